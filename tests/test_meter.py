"""The numbers on the line of a step, and what they are a share of."""

from parallax.chips import CHIPS
from parallax.loop.meter import Meter
from parallax.loop.peak import measure_matmul, most_memory, peak_flops


def test_the_line_of_a_step_has_what_people_look_for():
    fixed = {"clock": lambda: 0.0, "memory": lambda: 1.3 * 2**30}
    meter = Meter(steps=1000, step_tokens=16_000, step_flops=4.92e13, peak_flops=4.92e14, devices=8, **fixed)
    values = {"train/loss": 4.12344, "train/grad_norm": 1.234, "train/learning_rate": 3e-4}
    meter.measure(10.0, 5.0, compiled=True)
    for ended in (10.5, 11.0):
        values |= meter.measure(ended, 0.0, compiled=False)
    assert meter.line(10, values) == (
        "step 10/1000  loss 4.1234  gnorm 1.23  lr 3.0e-04  0.50 s  32,000 tok/s  12.3 TFLOP/s/dev  mfu 20%  "
        "mem 1.3 GiB  wait 0.0%  left 8m15s"
    )
    assert values["perf/flops_per_second_per_device"] == 1.23e13 and values["perf/memory_bytes"] == 1.3 * 2**30


def test_an_unknown_chip_has_no_peak_and_a_known_one_has_its_own(monkeypatch):
    class Chip:
        platform, device_kind = "tpu", "TPU v5 lite"

    monkeypatch.setattr("parallax.loop.peak.jax.devices", lambda: [Chip] * 8)
    assert peak_flops("bfloat16")[0] == 8 * CHIPS["TPU v5e"].flops["bfloat16"]
    Chip.device_kind = "TPU v5p"
    assert peak_flops("bfloat16")[0] == 8 * CHIPS["TPU v5p"].flops["bfloat16"]
    Chip.device_kind = "Abacus"
    assert peak_flops("bfloat16") == (None, "unknown for Abacus")
    meter = Meter(
        steps=2, step_tokens=1, step_flops=1.0, peak_flops=None, devices=1, clock=lambda: 0.0, memory=lambda: None
    )
    values = {"train/loss": 1.0, "train/grad_norm": 1.0, "train/learning_rate": 1.0}
    line = meter.line(1, values | meter.measure(1.0, 0.0, compiled=False))
    assert "mfu n/a" in line and " mem " not in line


def test_memory_is_the_most_that_a_device_has_held_or_the_process_where_devices_are_simulated(monkeypatch):
    assert 2**26 < most_memory() < 2**40

    class Chip:
        platform = "gpu"

        def __init__(self, stats):
            self.memory_stats = lambda: stats

    for stats, most in (([{"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 7}], 7), ([None, {}], None)):
        monkeypatch.setattr("parallax.loop.peak.jax.local_devices", lambda chips=stats: [*map(Chip, chips)])
        assert most_memory() == most


def test_the_peak_of_a_cpu_is_measured_in_under_two_seconds():
    assert measure_matmul("float32") > 1e8
