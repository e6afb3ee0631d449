"""What the devices could do a second, from data sheets or measured where there is none, and what they hold."""

import os
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from parallax.analysis.budget import bytes_on_device
from parallax.runtime.chips import chip
from parallax.runtime.errors import ConfigError
from parallax.runtime.units import in_bytes

MEASURED_SIZE = 1024
MEASURED_SECS = 0.4


def peak_flops(dtype: str) -> tuple[float | None, str]:
    """FLOPs a second of all devices together, None where unknown, and how we know.

    Simulated devices share the machine, whose matmul rate in `dtype` is measured; chips are looked up.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return measure_matmul(dtype), f"measured {dtype} matmul"
    try:
        known = chip(device.device_kind)
    except ConfigError:  # a run needs no peak: it goes on without a share of it
        return None, f"unknown for {device.device_kind}"
    return known.peak(dtype) * jax.device_count(), f"{jax.device_count()} x {known.name}, {dtype}"


def most_memory() -> int | None:
    """Bytes that any of this process's devices has held at most, None where the backend does not say.

    Simulated devices share the process, whose own peak it is.
    """
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        # Linux counts in KiB, macOS in bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in peaks if peak is not None), default=None)


def device_memory() -> int | None:
    """Bytes that a device has, None where the backend does not say; simulated devices share the machine's."""
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")


def check_fits(state: Any) -> None:
    """Raise ConfigError where a state's pieces alone, of a tree of ShapeDtypeStruct, are more than a device holds."""
    there = device_memory()
    needed = bytes_on_device(state, jax.tree.map(lambda leaf: leaf.sharding, state))
    if there is not None and needed > there:
        raise ConfigError(
            f"parameters and optimizer need {in_bytes(needed)} on each device, which has {in_bytes(there)}; use more "
            "devices, or a smaller model.layers, model.d_model, model.d_ff or model.vocab"
        )


def measure_matmul(dtype: str) -> float:
    """FLOPs a second of square matmuls on one device, the best of as many as fit into half a second."""
    x = jnp.ones((MEASURED_SIZE, MEASURED_SIZE), dtype)
    multiply = jax.jit(jnp.matmul)
    multiply(x, x).block_until_ready()
    end = time.perf_counter() + MEASURED_SECS
    best = float("inf")
    while (begun := time.perf_counter()) < end:
        multiply(x, x).block_until_ready()
        best = min(best, time.perf_counter() - begun)
    return 2 * MEASURED_SIZE**3 / best
