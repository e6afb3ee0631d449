"""Power and temperature of this process's GPUs, from NVIDIA's management library. Other devices do not tell them."""

import os
import statistics
import threading
from collections.abc import Callable, Mapping
from typing import Any

POWER, TEMPERATURE = "perf/power_watts", "perf/temperature_celsius"
VISIBLE = "CUDA_VISIBLE_DEVICES"


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


def nvml_reader(numbers: list[int], environment: Mapping[str, str] = os.environ) -> Callable[[], dict[str, float]]:
    """A function that reads the mean power of these GPUs and the highest temperature; `numbers` count those that CUDA
    sees. It reads nothing without the package nvidia-ml-py, or where the driver does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [_handle(pynvml, number, environment) for number in numbers]
    except Exception:  # also of a package with this name that is another one: a run does not need its sensors
        return dict

    def read() -> dict[str, float]:
        try:
            watts = [pynvml.nvmlDeviceGetPowerUsage(handle) / 1000 for handle in handles]
            celsius = [pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) for handle in handles]
        except Exception:  # a part of a GPU, say, has neither
            return {}
        return {POWER: statistics.fmean(watts), TEMPERATURE: float(max(celsius))}

    return read


def _handle(pynvml: Any, number: int, environment: Mapping[str, str]) -> Any:
    """NVML's handle of a GPU that CUDA counts: NVML counts all of the machine."""
    visible = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    name = visible[number] if visible else str(number)
    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)
