"""The devices that are here. What simulated ones do a second, all at work, is measured: there is no data sheet."""

import os
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from parallax.analysis.report.place import Place
from parallax.runtime.chips import Chip, chip

MATMUL = 512  # rows and columns of each device's factors
COPIED_BYTES = 2**24  # of each device: larger than caches
GATHERED_BYTES = 2**20  # of each device's piece
MEASURED_SECS = 0.5


def local_place(dtype: str) -> Place:
    """The devices that JAX has here. What CPUs do a second is measured, in `dtype`, by all of them together."""
    devices = jax.devices()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        return Place(f"{len(devices)} simulated devices", measured(dtype), (len(devices),), shared=True)
    return Place(f"{len(devices)} x {kind}", chip(kind), (len(devices),))


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
        usable_bytes=_memory_bytes() // count,
        hbm_bandwidth=2 * COPIED_BYTES / _best_secs(mesh, lambda x: x + 1, copied),
        ici_bandwidth=sent / _best_secs(mesh, lambda x: gather(x).sum(keepdims=True), gathered),
        ici_links=1,
        torus_dims=0,
        ring_multiple=0,
        cube=False,
        switched=count,
        dcn_bandwidth=0.0,
        clock_hz=None,
    )


def _best_secs(mesh: Mesh, local: Callable[[Array], Array], x: Array) -> float:
    """The least time in which all devices have done this once, each with its piece of x."""
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=True))
    run(x).block_until_ready()
    end, best = time.perf_counter() + MEASURED_SECS, float("inf")
    while (begun := time.perf_counter()) < end:
        run(x).block_until_ready()
        best = min(best, time.perf_counter() - begun)
    return best


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
