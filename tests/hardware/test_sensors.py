"""Power and temperature come from the driver in the background, or not at all."""

import sys
import threading
from types import SimpleNamespace

import pytest
from support.run_examples import tiny_config

from parallax.hardware.sensors import POWER, TEMPERATURE, Sensors, local_sensors, nvml_reader
from parallax.storage.run_files import read_metrics
from parallax.training import run
from parallax.training.run import train


class Nvml:
    """A machine with GPUs of these milliwatts and degrees, as the package pynvml shows it."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *gpus):
        self.gpus, self.asked = gpus, []

    def nvmlInit(self):
        if not self.gpus:
            raise RuntimeError("NVML Shared Library Not Found")

    def nvmlDeviceGetHandleByIndex(self, number):
        self.asked.append(number)
        return self.gpus[number]

    def nvmlDeviceGetHandleByUUID(self, name):
        self.asked.append(name)
        return self.gpus[0]

    def nvmlDeviceGetPowerUsage(self, gpu):
        return gpu[0]

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        if gpu[1] is None:
            raise RuntimeError("Not Supported")
        return gpu[1]


@pytest.mark.parametrize(
    ("visible", "numbers", "asked", "values"),
    [
        (None, [0, 1], [0, 1], {POWER: 450.0, TEMPERATURE: 71.0}),
        ("2,0", [0], [2], {POWER: 700.0, TEMPERATURE: 80.0}),
        ("GPU-8932f937", [0], ["GPU-8932f937"], {POWER: 400.0, TEMPERATURE: 60.0}),
        ("3", [0], [3], {}),  # a GPU that does not tell
        ("9", [0], [9], {}),  # none
    ],
)
def test_readings_are_of_the_gpus_that_this_process_sees(monkeypatch, visible, numbers, asked, values):
    nvml = Nvml((400_000, 60), (500_000, 71), (700_000, 80), (1, None))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert nvml_reader(numbers, environment)() == values and nvml.asked == asked


@pytest.mark.parametrize("package", [None, Nvml(), SimpleNamespace()], ids=["none", "no driver", "another one"])
def test_without_the_package_or_the_driver_nothing_is_read(monkeypatch, package):
    monkeypatch.setitem(sys.modules, "pynvml", package)
    assert nvml_reader([0])() == {}


def test_nobody_waits_for_a_driver_that_does_not_answer():
    answers, reading, calls = threading.Event(), threading.Event(), []

    def read():
        calls.append(1)
        reading.set()
        answers.wait()
        return {POWER: 1.0}

    slow = Sensors(read)
    for _ in range(3):  # the second and third do not begin another reading
        slow.begin()
        assert slow.take() == {}
    assert reading.wait(60) and len(calls) == 1
    answers.set()
    slow._thread.join()
    assert slow.take() == {POWER: 1.0} and slow.take() == {}


def test_logged_steps_have_what_devices_tell_and_cpus_tell_nothing(corpus, tmp_path, monkeypatch, capsys):
    config = tiny_config(corpus, **{"train.log_every_steps": 3, "train.eval_batches": 0})

    class AtOnce(Sensors):
        def begin(self):
            super().begin()
            self._thread.join()

    monkeypatch.setattr(run, "local_sensors", lambda: AtOnce(lambda: {POWER: 412.3, TEMPERATURE: 61.0}))
    train(config, tmp_path / "gpu")
    rows = read_metrics(tmp_path / "gpu" / "metrics.jsonl")
    assert [row["step"] for row in rows if row.get(POWER) == 412.3 and row[TEMPERATURE] == 61] == [1, 3, 6, 8]
    lines = [line for line in capsys.readouterr().out.splitlines() if " step " in line and "loss" in line]
    assert lines and all("412 W 61 °C" in line for line in lines[1:])
    assert local_sensors()._read() == {}
