"""Power and temperature of this process's GPUs, from NVIDIA's management library. Other devices do not tell them."""

import ctypes
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

POWER, TEMPERATURE = "perf/power_watts", "perf/temperature_celsius"
DRIVER = "libcuda.so.1"
ADDRESS_BYTES = 32


class Sensors:
    """Readings in the background: a thread takes one when it is asked to, and whoever wants its values never waits.

    `read` returns them by name; none where devices do not tell.
    """

    def __init__(self, read: Callable[[], Mapping[str, float]]):
        self._read, self._values = read, {}
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin a reading, unless the one before has not ended: a driver may take long, or never answer."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._keep, name="sensors", daemon=True)
            self._thread.start()

    def take(self) -> dict[str, float]:
        """The values of a reading that has ended and was not taken yet; none if there is none."""
        values, self._values = self._values, {}
        return values

    def _keep(self) -> None:
        self._values = dict(self._read())


def local_sensors() -> Sensors:
    """The sensors of this process's devices."""
    import jax  # here, as in devices.py

    devices = jax.local_devices()
    if devices[0].platform != "gpu":
        return Sensors(dict)
    return Sensors(nvml_reader([device.local_hardware_id for device in devices]))


def nvml_reader(numbers: Sequence[int]) -> Callable[[], dict[str, float]]:
    """A function that reads the mean power of these GPUs and the highest temperature; `numbers` are CUDA's. It reads
    nothing without the package nvidia-ml-py, or where the driver does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByPciBusId(bus_id) for bus_id in _bus_ids(numbers)]
    except Exception:  # also of a package with this name that is another one: a run does not need its sensors
        return dict

    def read() -> dict[str, float]:
        try:
            watts = [pynvml.nvmlDeviceGetPowerUsage(handle) / 1000 for handle in handles]
            celsius = [pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) for handle in handles]
        except Exception:  # not every GPU tells both
            return {}
        return {POWER: statistics.fmean(watts), TEMPERATURE: float(max(celsius))}

    return read


def _bus_ids(numbers: Sequence[int]) -> list[bytes]:
    """The PCI addresses of these GPUs. CUDA's driver counts the fastest first, and only those that CUDA_VISIBLE_DEVICES
    names; NVML counts all of the machine by their slots."""
    driver = ctypes.CDLL(DRIVER)
    return [_bus_id(driver, number) for number in numbers]


def _bus_id(driver: Any, number: int) -> bytes:
    device, address = ctypes.c_int(), ctypes.create_string_buffer(ADDRESS_BYTES)
    initialized, got = driver.cuInit(0), driver.cuDeviceGet(ctypes.byref(device), number)
    if initialized or got or driver.cuDeviceGetPCIBusId(address, ADDRESS_BYTES, device):
        raise OSError(f"CUDA's driver does not tell the address of GPU {number}")
    return address.value
