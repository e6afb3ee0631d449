"""What XLA is told for each kind of chip, and what it must be spared.

Measured in programs that libtpu 0.0.42 compiles, by where their time goes: `python benchmarks/overlap.py`, which has
rows without the options.
"""

import math

import numpy as np
from jax.sharding import Mesh

from parallax.chips import chip
from parallax.errors import ConfigError

# Without it compute waits for every exchange of gradients (fsdp.reduce="compute").
EXCHANGE = ("xla_tpu_enable_async_all_to_all",)
# On chips of two cores, gathers wait unless all of these are said, the last one too, whichever way.
GATHER = (
    "xla_enable_async_all_gather",
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_overlap_compute_collective_tc",
)
OPTIONS = {
    "TPU v5e": dict.fromkeys(EXCHANGE, True),
    "TPU v5p": dict.fromkeys((*EXCHANGE, *GATHER), True) | {"xla_tpu_megacore_fusion_allow_ags": False},
}


def compiler_options(mesh: Mesh) -> dict[str, bool]:
    """What the compiler is told for the devices of this mesh; nothing for chips of which nothing was measured."""
    if not _is_tpu(mesh):
        return {}
    try:
        return OPTIONS.get(chip(mesh.devices.flat[0].device_kind).name, {})
    except ConfigError:
        return {}


def relays_what_is_read(mesh: Mesh) -> bool:
    """Whether the compiler copies what is read from a slot into the order that a product of it wants.

    It does for TPU, where the copies take as long as making a gated MLP's products again; told to leave the order, it
    reads slots within the products.
    """
    return _is_tpu(mesh)


def gather_hops(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """The hops of a gather along an axis, see `all_gather`; none: among all at once.

    Of a gather among devices that fill a torus of three dims, libtpu makes a sum of arrays that are mostly zero. One
    hop along each dim stays what it is, and the SparseCores can make it.
    """
    ranks = _along(mesh, axis)
    if getattr(ranks[0], "coords", None) is None:
        return ()
    places = np.array([device.coords for device in ranks])
    moved = np.diff(places, axis=0) != 0
    if moved.any(axis=0).sum() < 3:
        return ()
    return _runs(places)


def _runs(places: np.ndarray) -> tuple[int, ...]:
    """How many ranks follow each other along each dim of a torus, the fastest first; () where they do not lie so."""
    sizes = [len(np.unique(places[:, dim])) for dim in range(places.shape[1])]
    order = sorted((dim for dim in range(len(sizes)) if sizes[dim] > 1), key=lambda dim: int(np.argmax(places[:, dim] != places[0, dim])))
    hops = tuple(sizes[dim] for dim in order)
    return hops if math.prod(hops) == len(places) else ()


def _is_tpu(mesh: Mesh) -> bool:
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "tpu"


def _along(mesh: Mesh, axis: str) -> list:
    """The devices of the first group along an axis; of a mesh without devices, none that are anywhere."""
    if not isinstance(mesh, Mesh):
        return [None]
    return list(mesh.devices[tuple(slice(None) if name == axis else 0 for name in mesh.axis_names)])
