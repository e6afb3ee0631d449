"""The devices of this machine: FLOP/s and bandwidths, from data sheets or measured, and memory."""

import math
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from parallax.analysis.memory import bytes_on_device
from parallax.analysis.topology import Topology, host_numbers
from parallax.config.sections import MATMULS, ModelConfig
from parallax.runtime.chips import Chip, chip
from parallax.runtime.errors import ConfigError
from parallax.runtime.units import in_bytes

MATMUL, MACHINE_MATMUL = 512, 1024  # rows and columns of factors: of each device, and of all together
COPIED_BYTES = 2**24  # of each device: larger than caches
GATHERED_BYTES = 2**20  # of each device's piece
MEASURED_SECS = 0.5


def local_topology(dtype: str) -> Topology:
    """The devices that JAX has here. What CPUs do a second is measured, in `dtype`, by all of them together."""
    devices = jax.devices()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        return Topology(f"{len(devices)} simulated devices", measured(dtype), (len(devices),), shared=True)
    shape = (len(devices),)
    if devices[0].platform == "gpu":
        on_each = math.gcd(*Counter(host_numbers(devices, here=True)).values())
        shape = (len(devices) // on_each, on_each)
    return Topology(f"{len(devices)} x {kind}", chip(kind), shape)


def measured(dtype: str) -> Chip:
    """A chip as good as one of the devices is while all are at work; takes a few seconds."""
    count = jax.device_count()
    mesh = Mesh(jax.devices(), "all", axis_types=(AxisType.Auto,))
    square = jnp.ones((count * MATMUL, MATMUL), dtype)
    copied = jnp.ones(count * COPIED_BYTES // 4, jnp.float32)
    gathered = jnp.ones(count * GATHERED_BYTES // 4, jnp.float32)
    gather = partial(jax.lax.all_gather, axis_name="all", tiled=True)
    sent = max(count - 1, 1) * GATHERED_BYTES
    return Chip(
        name="this machine",
        platform="cpu",
        flops={dtype: 2 * MATMUL**3 / _best_secs(mesh, lambda x: x @ x, square)},
        usable_bytes=device_memory(),
        hbm_bandwidth=2 * COPIED_BYTES / _best_secs(mesh, lambda x: x + 1, copied),
        ici_bandwidth=sent / _best_secs(mesh, lambda x: gather(x).sum(keepdims=True), gathered),
        ici_links=1,
        torus_dims=0,
        switched=count,
        dcn_bandwidth=0.0,
        clock_hz=None,
    )


def _best_secs(mesh: Mesh, local: Callable[[Array], Array], x: Array) -> float:
    """The least time in which all devices have done this once, each with its piece of x."""
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=True))
    return _least_secs(run, x)


def _least_secs(run: Callable[[Array], Array], x: Array) -> float:
    """The least time of a call, of as many as fit into half a second."""
    run(x).block_until_ready()
    end, least = time.perf_counter() + MEASURED_SECS, float("inf")
    while (begun := time.perf_counter()) < end:
        run(x).block_until_ready()
        least = min(least, time.perf_counter() - begun)
    return least


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
    needed = bytes_on_device(state)
    if there is not None and needed > there:
        raise ConfigError(
            f"parameters and optimizer need {in_bytes(needed)} on each device, which has {in_bytes(there)}; use more "
            "devices, or a smaller model.layers, model.d_model, model.d_ff or model.vocab"
        )


def measure_matmul(dtype: str) -> float:
    """FLOPs a second of square matmuls on one device, the best of as many as fit into half a second."""
    x = jnp.ones((MACHINE_MATMUL, MACHINE_MATMUL), dtype)
    return 2 * MACHINE_MATMUL**3 / _least_secs(jax.jit(lambda x: x @ x), x)


def matmul_lines(model: ModelConfig, known: Chip) -> Iterator[str]:
    """Which products are made in 8 bits, with a warning where the chip makes the other kind faster, or no kind fast."""
    if model.matmul == "compute":
        return
    saved = ", which save their input in 8 bits" * (model.matmul_residuals != "compute")
    yield f"products of {' and '.join(model.matmul_parts.split())} in {model.matmul}{saved}"
    speeds = {name: known.matmul_speed(name) for name in MATMULS}
    best = max(MATMULS, key=lambda name: speeds[name])
    if model.matmul != best:
        figures = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
        yield (
            f"warning: model.matmul={model.matmul!r} is not the fastest on {known.name}; speed of products over "
            f"bfloat16's: {figures}; use model.matmul={best!r}"
        )
