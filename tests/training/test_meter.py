"""The numbers on the line of a step, and what they are a share of."""

import dataclasses
import math
import re

import pytest
from support.stand_ins import Chip
from support.tiny_model import build

from parallax.analysis.planned.devices import light_secs, measure_matmul, peak_flops
from parallax.analysis.traced.flops import flops_in_8_bits_per_token, flops_per_token
from parallax.hardware.chips import CHIPS, chip
from parallax.hardware.devices import most_memory
from parallax.hardware.sensors import POWER, TEMPERATURE
from parallax.training.meter import Meter

FIXED = {"clock": lambda: 0.0, "memory": lambda: int(1.3 * 2**30)}
VALUES = {"train/loss": 4.12344, "train/grad_norm": 1.234, "train/learning_rate": 3e-4}


def test_the_line_of_a_step_has_what_people_look_for():
    meter = Meter(steps=1000, step_tokens=16_000, step_flops=4.92e13, peak_flops=4.92e14, devices=8, **FIXED)
    values = dict(VALUES)
    meter.measure(10.0, 5.0, compiled=True)
    for ended in (10.5, 11.0):
        values |= meter.measure(ended, 0.02, compiled=False)
    assert meter.line(10, values) == (
        "step 10/1000   loss 4.1234 gnorm 1.23 lr 3.0e-4   32k tok/s mfu 20% wait   4% left 8m15s"
    )
    assert values["perf/flops_per_second_per_device"] == 1.23e13 and values["perf/memory_bytes"] == int(1.3 * 2**30)
    values |= meter.measure(11.5, 0.0, compiled=False)
    assert meter.line(11, values) == (
        "step 11/1000   loss 4.1234 gnorm 1.23 lr 3.0e-4   32k tok/s mfu 20%   1.3 GiB left 8m14s"
    )
    assert meter.eval_line(10, 3.97211) == "step 10/1000  eval loss 3.9721"


@pytest.mark.parametrize("peak", [None, 4.92e14], ids=str)
@pytest.mark.parametrize("experts", [{}, {"experts/load": 1.31}], ids=["dense", "experts"])
@pytest.mark.parametrize("steps", [200, 5_000, 200_000])
def test_columns_of_step_lines_align_with_and_without_a_wait(steps, experts, peak):
    meter = Meter(steps=steps, step_tokens=16_000, step_flops=4.92e13, peak_flops=peak, devices=8, **FIXED)
    now, begins = 0.0, []
    for step, loss, norm, waited in (
        (1, 11.93, 12.3, 0),
        (9, 9.5, 1.2, 0.02),
        (80, 3.1, 123.4, 0),
        (123, 2.5, 0.9, 0.1),
    ):
        now += 0.5 + step / 1000
        values = {"train/loss": loss, "train/grad_norm": norm, "train/learning_rate": 3e-4, **experts}
        line = meter.line(step, values | meter.measure(now, waited, compiled=step == 1))
        has_room = peak is not None and not experts  # for all of its parts; others leave some out
        assert (" wait " in line) is (waited > 0) or not has_room
        words = ("loss", "gnorm", "lr", "load", "tok/s", "left")
        begins.append({word: line.index(word) for word in words if f" {word}" in line})
    assert begins[1] == begins[2] == begins[3] and begins[0].items() <= begins[1].items()


def test_a_step_whose_end_was_seen_late_gives_the_next_one_no_speed_beyond_the_peak():
    meter = Meter(steps=10, step_tokens=100, step_flops=1e12, peak_flops=1e12, devices=1, **FIXED)
    meter.measure(10.0, 0.0, compiled=True)
    late = meter.measure(18.0, 0.0, compiled=False)
    assert late["perf/mfu"] == 0.125 and "mfu 12%" in meter.line(2, VALUES | late)
    values = meter.measure(18.001, 0.0, compiled=False)
    assert values["perf/step_secs"] == pytest.approx(0.001)
    assert all(math.isnan(values[f"perf/{name}"]) for name in ("mfu", "tokens_per_second"))
    assert "tok/s" not in meter.line(3, VALUES | values)
    assert meter.measure(22.001, 0.0, compiled=False)["perf/mfu"] == pytest.approx(0.25)


LARGE = {"train/loss": 3.4e38, "train/grad_norm": 3.4e38, "train/learning_rate": 3.4e38}
SMALL = {"train/loss": -1e-30, "train/grad_norm": 1e-38, "train/learning_rate": 1e-38}
ODD = {"train/loss": float("nan"), "train/grad_norm": float("inf"), "train/learning_rate": 0.0}


@pytest.mark.parametrize("values", [VALUES, LARGE, SMALL, ODD], ids=["usual", "large", "small", "odd"])
@pytest.mark.parametrize("steps", [1, 240, 500_000, 2**31 - 1])
@pytest.mark.parametrize("secs", [1e-6, 1e-3, 1.77, 86_400.0])
@pytest.mark.parametrize("peak", [None, 1.01e27], ids=str)
def test_a_line_of_a_step_fits_in_100_columns_and_keeps_what_matters(values, steps, secs, peak):
    """Whatever the counts and the speeds; beyond them stand eight letters of the time of day and a blank."""
    fixed = FIXED | {"memory": lambda: 1023 * 2**30}
    meter = Meter(steps=steps, step_tokens=2**31, step_flops=1e21, peak_flops=peak, devices=3, **fixed)
    meter.light_secs = None if peak is None else 1e-7
    values = values | meter.measure(secs, secs, compiled=False) | {POWER: 1200.0, TEMPERATURE: 104.0}
    meter.measure(3 * secs, secs / 2, compiled=False)
    for ended, step in enumerate({1, steps}, 4):
        meter.measure(ended * secs, secs, compiled=False)
        line = meter.line(step, values)
        assert len(f"23:59:59 {line}") <= 100 and "\n" not in line
        assert re.match(rf"step {step}/{steps} +loss +\S+ ", line) and " tok/s" in line and " left " in line
        assert ("FLOP/s" in line) == (peak is None) == ("mfu" not in line)
        assert len(f"23:59:59 {meter.eval_line(step, values['train/loss'])}") <= 100


def test_an_unknown_chip_has_no_peak_and_a_known_one_has_its_own(with_chips):
    with_chips(*[Chip("tpu", "TPU v5 lite")] * 8)
    assert peak_flops("bfloat16")[0] == 8 * CHIPS["TPU v5e"].flops["bfloat16"]
    with_chips(*[Chip("tpu", "TPU v5p")] * 8)
    assert peak_flops("bfloat16")[0] == 8 * CHIPS["TPU v5p"].flops["bfloat16"]
    with_chips(Chip("tpu", "Abacus"))
    assert peak_flops("bfloat16") == (None, "unknown for Abacus")
    meter = Meter(
        steps=2, step_tokens=1, step_flops=1.0, peak_flops=None, devices=1, clock=lambda: 0.0, memory=lambda: None
    )
    values = {"train/loss": 1.0, "train/grad_norm": 1.0, "train/learning_rate": 1.0}
    line = meter.line(1, values | meter.measure(1.0, 0.0, compiled=False))
    assert re.search(" +1 tok/s +1 FLOP/s/dev +left 1s$", line)


def test_the_speed_of_light_has_the_peak_of_each_products_dtype():
    """llm.q's definition: products in 8 bits at their peak, all others at that of model.dtype."""
    h100, sizes = CHIPS["NVIDIA H100"], dict(attention="gqa", dtype="bfloat16", matmul="float8", layers=8)
    for parts, kernels in (("attention mlp", 8 * (32 * 8 * (8 + 4 + 4 + 8) + 3 * 32 * 64)), ("mlp", 8 * 3 * 32 * 64)):
        model = build((1, 1, 1), **sizes, matmul_parts=parts)
        flops = flops_per_token(model.config, model.plan.declared, seq=16)
        in_8_bits = flops_in_8_bits_per_token(model.config, model.plan.declared, h100)
        assert in_8_bits == 4 * kernels  # forward and the input's gradient
        secs = light_secs(model.config, flops - in_8_bits, in_8_bits, h100)
        assert secs == pytest.approx((flops - in_8_bits) / 989e12 + in_8_bits / 1979e12)
    # The data sheet's 9e15 FLOP/s in 4 bits, where it has them.
    of_float4 = dataclasses.replace(model.config, matmul="float4", matmul_scales="nvfp4")
    assert light_secs(of_float4, 2250e12, 9000e12, CHIPS["NVIDIA B200"]) == 2
    plain = build((1, 1, 1), **sizes | {"matmul": "compute"})
    assert flops_in_8_bits_per_token(plain.config, plain.plan.declared, h100) == 0
    # On a chip without 8-bit products they have the peak of bfloat16.
    assert light_secs(model.config, 0, 1e12, CHIPS["NVIDIA A100"]) == 1e12 / 312e12


@pytest.mark.parametrize(
    ("form", "name", "per_layer"),
    [
        # A layer's weights: 4096 of query, key and value, from 32 to heads of 8; 2048 of attention's output, back; 6144
        # of the MLP, between 32 and 64. Each product has 2 FLOPs for a weight.
        ("float8 row", "H100", 4 * (4096 + 2048 + 6144)),
        ("float8 row 8bit", "H100", 6 * (4096 + 2048 + 6144)),
        ("int8 delayed 8bit", "v5p", 6 * (4096 + 2048 + 6144)),
        ("int8 block", "H100", 0),
        ("int8 block 8bit", "H100", 2 * (4096 + 2048 + 6144)),  # with scales of columns
        ("float8 mxfp8 8bit", "H100", 0),
        # Heads of 8 are no block of 32: two of the products are computed in bfloat16.
        ("float8 mxfp8", "B200", 2 * (4096 + 2048 + 2 * 6144)),
        ("float8 mxfp8 8bit", "B200", 4 * (4096 + 2048) + 6 * 6144),
        ("float4 nvfp4", "B200", 2 * (4096 + 6144)),
        ("float4 nvfp4", "H100", 0),
    ],
)
def test_flops_in_8_bits_are_those_of_products_that_the_chip_has(form, name, per_layer):
    matmul, scales, gradients = f"{form} compute".split()[:3]
    keys = dict(matmul=matmul, matmul_scales=scales, matmul_weight_gradients=gradients)
    model = build((1, 1, 1), attention="gqa", dtype="bfloat16", layers=8, **keys)
    assert flops_in_8_bits_per_token(model.config, model.plan.declared, chip(name)) == 8 * per_layer


def test_the_share_of_the_speed_of_light_stands_beside_mfu_where_it_is_another_number():
    about = dict(steps=10, step_tokens=100, step_flops=1e12, peak_flops=1e12, devices=1, **FIXED)
    for light, shown in ((None, None), (1.0, None), (0.6, "sol 30%")):
        meter = Meter(**about, light_secs=light)
        meter.measure(10.0, 0.0, compiled=True)
        values = meter.measure(12.0, 0.0, compiled=False)
        assert values.get("perf/sol") == (None if light is None else light / 2)
        line = meter.line(2, VALUES | values)
        assert "mfu 50%" in line and (shown in line if shown else "sol" not in line)
    # In 8 bits a step may be faster than all products in bfloat16 could be.
    assert meter.measure(12.7, 0.0, compiled=False)["perf/mfu"] == pytest.approx(1 / 0.7)


def test_memory_is_the_most_that_a_device_has_held_or_the_process_where_devices_are_simulated(with_chips):
    assert 2**26 < most_memory() < 2**40
    for stats, most in (([{"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 7}], 7), ([None, {}], None)):
        with_chips(*(Chip("gpu", "a kind", memory=each) for each in stats))
        assert most_memory() == most


def test_the_peak_of_a_cpu_is_measured_in_under_two_seconds():
    assert measure_matmul("float32") > 1e8


def test_a_machine_that_stands_still_while_it_should_be_measured_is_measured(monkeypatch):
    monkeypatch.setattr("parallax.analysis.planned.devices.MEASURED_SECS", 0.0)
    assert measure_matmul("float32") > 1e8
