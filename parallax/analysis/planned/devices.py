"""This machine's devices: FLOP/s and bandwidths, from data sheets or measured, and memory."""

import math
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

from parallax.analysis.planned.topology import Topology
from parallax.analysis.traced.memory import bytes_on_device
from parallax.config.sections import BLOCK_SCALES, DELAYED, MXFP8, NVFP4, ModelConfig
from parallax.display.units import in_bytes
from parallax.errors import ConfigError
from parallax.hardware.chips import Chip, chip
from parallax.hardware.devices import device_memory, start_devices
from parallax.sharding.mesh import host_numbers

MATMUL, MACHINE_MATMUL = 512, 1024  # rows and columns of factors: of each device, and of all together
COPIED_BYTES = 2**24  # of each device: larger than caches
GATHERED_BYTES = 2**20  # of each device's piece
MEASURED_SECS = 0.5
MOST_MATMULS = 16  # of the whole machine: a run waits for them


def local_topology(dtype: str) -> Topology:
    """The devices of this machine. The speed of CPUs is measured in `dtype`, with all devices busy."""
    devices = start_devices()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        name = f"{len(devices)} simulated device" + "s" * (len(devices) > 1)
        return Topology(name, measured(dtype), (len(devices),), shared=True)
    shape = (len(devices),)
    if devices[0].platform == "gpu":
        on_each = math.gcd(*Counter(host_numbers(devices, here=True)).values())
        shape = (len(devices) // on_each, on_each)
    return Topology(f"{len(devices)} x {kind}", chip(kind), shape)


def measured(dtype: str) -> Chip:
    """The measured speed of one device while all are busy, as a Chip; takes a few seconds."""
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
    """The shortest time in which all devices run this once, each on its piece of x."""
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=True))
    return _least_secs(run, x)


def _least_secs(run: Callable[[Array], Array], x: Array, calls: float = math.inf) -> float:
    """The shortest time of a call, among at most `calls` and no more than fit into half a second, but for the first."""
    run(x).block_until_ready()
    end, secs = time.perf_counter() + MEASURED_SECS, []
    while ((begun := time.perf_counter()) < end and len(secs) < calls) or not secs:
        run(x).block_until_ready()
        secs.append(time.perf_counter() - begun)
    return min(secs)


def peak_flops(dtype: str) -> tuple[float | None, str]:
    """FLOP/s of all devices together, None if unknown, and the source of the number.

    Simulated devices share the machine, whose matmul rate in `dtype` is measured; for chips it is looked up.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return measure_matmul(dtype), f"measured {dtype} matmul"
    try:
        known = chip(device.device_kind)
    except ConfigError:  # a run does not need the peak: it goes on without MFU
        return None, f"unknown for {device.device_kind}"
    return known.peak(dtype) * jax.device_count(), f"{jax.device_count()} x {known.name}, {dtype}"


def light_secs(model: ModelConfig, flops: float, flops_in_8_bits: float, known: Chip) -> float:
    """Seconds that one such chip needs at the speed of light: for the model's products alone, each at the peak that the
    data sheet has for the dtype in which it is computed: 8 bits, or 4, those of `flops_in_8_bits`.

    >>> h100 = chip("H100")
    >>> round(light_secs(ModelConfig(dtype="bfloat16", matmul="float8"), 989e12, 1979e12, h100), 3)
    2.0
    """
    peak = known.peak(model.dtype)
    return flops / peak + flops_in_8_bits / known.flops.get(model.matmul, peak)


def check_fits(state: Any) -> None:
    """Raise ConfigError if the state alone, a tree of ShapeDtypeStruct, does not fit on a device."""
    there = device_memory()
    needed = bytes_on_device(state)
    if there is not None and needed > there:
        raise ConfigError(
            f"parameters and optimizer need {in_bytes(needed)} on each device, which has {in_bytes(there)}; use more "
            "devices, or a smaller model.layers, model.d_model, model.d_ff or model.vocab"
        )


def measure_matmul(dtype: str) -> float:
    """FLOP/s of square matmuls on one device, the best of 16, or of as many as fit into half a second."""
    x = jnp.ones((MACHINE_MATMUL, MACHINE_MATMUL), dtype)
    return 2 * MACHINE_MATMUL**3 / _least_secs(jax.jit(lambda x: x @ x), x, calls=MOST_MATMULS)


def fastest_matmul(known: Chip) -> str:
    """The value of `model.matmul` that is fastest on this chip. If several are, "compute" before "float8", which has a
    wider range than "int8"."""
    return max(("compute", "float8", "int8"), key=known.matmul_speed)


def matmul_lines(model: ModelConfig, known: Chip) -> Iterator[str]:
    """Which products are computed in 8 bits, with a warning if another dtype would be faster on this chip."""
    if model.matmul == "compute":
        return
    saved = ", which save their input in 8 bits" * (model.matmul_residuals != "compute")
    scales = f", with {model.matmul_scales} scales" * (model.matmul_scales != DELAYED)
    too = ", weights' gradients, too" * (model.matmul_weight_gradients != "compute")
    yield f"products of {' and '.join(model.products_in_8_bits)} in {model.matmul}{scales}{too}{saved}"
    if model.matmul_scales == BLOCK_SCALES or (model.matmul_scales in (MXFP8, NVFP4) and not known.is_microscaled):
        yield (
            f"warning: model.matmul_scales={model.matmul_scales!r} rounds as it says, but {known.name} has no such "
            f"products: they are computed in {model.dtype}, no faster; use matmul_scales='row', of int8 or float8"
        )
    speeds = {name: known.matmul_speed(name) for name in dict.fromkeys(("compute", "int8", "float8", model.matmul))}
    best = fastest_matmul(known)
    if speeds[model.matmul] < speeds[best]:
        figures = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
        yield (
            f"warning: model.matmul={model.matmul!r} is not the fastest on {known.name}; speed of products over "
            f"bfloat16's: {figures}; use model.matmul={best!r}"
        )
