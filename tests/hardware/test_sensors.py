"""Power and temperature come from the driver in the background, or not at all."""

import ctypes
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
    """A machine with GPUs of these milliwatts and degrees in its slots, as the package pynvml shows it."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *gpus):
        self.gpus = dict(zip(SLOTS, gpus))

    def nvmlInit(self):
        if not self.gpus:
            raise RuntimeError("NVML Shared Library Not Found")

    def nvmlDeviceGetHandleByPciBusId(self, address):
        return self.gpus[address]

    def nvmlDeviceGetPowerUsage(self, gpu):
        return gpu[0]

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        if gpu[1] is None:
            raise RuntimeError("Not Supported")
        return gpu[1]


SLOTS = (b"0000:0A:00.0", b"0000:0B:00.0", b"0000:C0:00.0", b"0000:C1:00.0")


class Cuda:
    """CUDA's driver where a process sees the GPUs of these slots, in this order."""

    def __init__(self, *slots):
        self.slots, self.is_initialized = slots, False

    def cuInit(self, flags):
        self.is_initialized = flags == 0
        return 0

    def cuDeviceGet(self, device, number):
        if not self.is_initialized or number >= len(self.slots):
            return 101  # CUDA_ERROR_INVALID_DEVICE
        device._obj.value = 7 + number  # a handle is no number
        return 0

    def cuDeviceGetPCIBusId(self, address, size, device):
        written = SLOTS[self.slots[device.value - 7]]
        assert size == len(address) > len(written)
        address.value = written
        return 0


def last_reading_ends():
    """Wait for what reads sensors beside the steps."""
    for thread in threading.enumerate():
        if thread.name == "sensors":
            thread.join()


@pytest.mark.parametrize(
    ("slots", "numbers", "values"),
    [
        ([0, 1, 2, 3], [0, 1], {POWER: 450.0, TEMPERATURE: 71.0}),
        ([2, 0, 1, 3], [0], {POWER: 700.0, TEMPERATURE: 80.0}),  # the fastest first
        ([2, 0], [1], {POWER: 400.0, TEMPERATURE: 60.0}),  # CUDA_VISIBLE_DEVICES="2,0"
        ([3], [0], {}),  # a GPU that does not tell
        ([2], [1], {}),  # none
    ],
)
def test_readings_are_of_the_gpus_that_this_process_sees(monkeypatch, slots, numbers, values):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml((400_000, 60), (500_000, 71), (700_000, 80), (1, None)))
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": Cuda(*slots)}.__getitem__)
    assert nvml_reader(numbers)() == values


@pytest.mark.parametrize("package", [None, Nvml(), SimpleNamespace()], ids=["none", "no driver", "another one"])
def test_without_the_package_or_the_driver_nothing_is_read(monkeypatch, package):
    monkeypatch.setitem(sys.modules, "pynvml", package)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Cuda(0))
    assert nvml_reader([0])() == {}


def test_without_cudas_driver_nothing_is_read(monkeypatch):
    def load(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "pynvml", Nvml((400_000, 60)))
    monkeypatch.setattr(ctypes, "CDLL", load)
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
    last_reading_ends()
    assert slow.take() == {POWER: 1.0} and slow.take() == {}


def test_logged_steps_have_what_devices_tell_and_cpus_tell_nothing(corpus, tmp_path, monkeypatch, capsys):
    config = tiny_config(corpus, **{"train.log_every_steps": 3, "train.eval_batches": 0})

    class AtOnce(Sensors):
        def begin(self):
            super().begin()
            last_reading_ends()

    monkeypatch.setattr(run, "local_sensors", lambda: AtOnce(lambda: {POWER: 412.3, TEMPERATURE: 61.0}))
    train(config, tmp_path / "gpu")
    rows = read_metrics(tmp_path / "gpu" / "metrics.jsonl")
    assert [row["step"] for row in rows if row.get(POWER) == 412.3 and row[TEMPERATURE] == 61] == [1, 3, 6, 8]
    lines = [line for line in capsys.readouterr().out.splitlines() if " step " in line and "loss" in line]
    assert lines and all("412 W 61 °C" in line for line in lines[1:])
    of_cpus = local_sensors()
    of_cpus.begin()
    last_reading_ends()
    assert of_cpus.take() == {}
