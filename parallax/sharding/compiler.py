"""What XLA is told for each kind of chip, and what it must be spared.

Measured in programs that both libtpu generations compile (0.0.42 and 0.0.50), by where their time goes:
`python benchmarks/overlap.py`, which has rows without the options.
"""

import functools
import math
import sys
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from parallax.runtime.chips import chip
from parallax.runtime.errors import ConfigError, tell
from parallax.runtime.version import version_of

# Without it compute waits for every exchange of gradients (fsdp.reduce="compute").
EXCHANGE = {"xla_tpu_enable_async_all_to_all": True}
# The same for tokens that come to experts (layout.exchange="ragged"), as v5e has it by default.
ASYNC_RAGGED = {"xla_tpu_enable_async_ragged_all_to_all": True}
# All-gathers and reductions made by the SparseCores, beside compute. The other way to have gathers wait for nobody,
# fusing them into what computes, is for v5e alone: elsewhere newer compilers refuse it, since results may be wrong.
SPARSE_CORES = {
    "xla_tpu_enable_async_collective_fusion": False,
    **dict.fromkeys(
        (
            "xla_tpu_enable_sparse_core_collective_offload_all_gather",
            "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather",
            "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather",
            "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
            "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter",
            "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
            "xla_tpu_use_single_sparse_core_for_all_gather_offload",
            "xla_tpu_enable_sparse_core_reduce_scatter_v2",
            "xla_tpu_enable_sparse_core_collective_aggregator",
            "xla_tpu_enable_concurrent_sparse_core_offloading",
            "xla_tpu_enable_sparse_core_offload_queuing_in_lhs",
        ),
        True,
    ),
}
# KiB of a core's VMEM that one operation may fill. With the default, 16 MiB, an MLP's products take a quarter longer.
VMEM = {"xla_tpu_scoped_vmem_limit_kib": 65_536}
# Products of rows with their group's matrices by a kernel, as v5p has it by default; a dilated convolution otherwise.
RAGGED_DOT = {"xla_tpu_enable_ragged_dot_kernel": True}
OPTIONS = {
    "TPU v5e": EXCHANGE | RAGGED_DOT,
    "TPU v5p": EXCHANGE | ASYNC_RAGGED | SPARSE_CORES | VMEM,
    "TPU v6e": RAGGED_DOT,
    "TPU v7x": EXCHANGE | SPARSE_CORES,
}

# For GPUs that are not here: what is called by a name that this process does not have is compiled as a call of nothing.
ABSENT = {"xla_gpu_mock_custom_calls": True}

Said = tuple[tuple[str, bool | int], ...]


def compiler_options(mesh: Mesh) -> dict[str, bool | int]:
    """What the compiler is told for the devices of this mesh; nothing for chips of which nothing was measured.

    What the installed compiler does not take is left out, and a line on stderr says so, once.
    """
    if is_absent_gpus(mesh):
        return ABSENT
    if not _is_tpu(mesh):
        return {}
    try:
        name = chip(mesh.devices.flat[0].device_kind).name
    except ConfigError:
        return {}
    return dict(_taken(name, mesh, tuple(OPTIONS.get(name, {}).items())))


@functools.cache
def _taken(chip_name: str, mesh: Mesh, options: Said) -> Said:
    """Those of the options that the installed compiler takes: all at once or, where it refuses, one after the other."""
    if not options or not refusal(mesh, dict(options)) or refusal(mesh, {}):
        return options  # what is refused without any is not the options' fault: the step itself will say it
    taken: dict[str, bool | int] = {}
    for name, value in options:
        if why := refusal(mesh, taken | {name: value}):
            what = f"does not take {name}={value} for {chip_name}, left out: {why}"
            tell(f"libtpu {version_of('libtpu')} {what}", sys.stderr)
        else:
            taken[name] = value
    return tuple(taken.items())


def refusal(mesh: Mesh, options: dict[str, bool | int]) -> str:
    """Why the compiler does not take a program with these options, in a line; "" where it does.

    The program gathers and exchanges along each axis: what is refused may depend on the slice, as asynchronous
    all-to-alls are on 64 chips of v5e.
    """
    axes = [axis for axis, size in mesh.shape.items() if size > 1]

    def send(x: jax.Array) -> jax.Array:
        for axis in axes:
            x = lax.all_to_all(x, axis, 0, 0, tiled=True) + lax.all_gather(x, axis, tiled=True)[: len(x)]
        return x

    cut = PartitionSpec(mesh.axis_names)
    x = jax.ShapeDtypeStruct((mesh.size**2, 128), "float32", sharding=NamedSharding(mesh, cut))
    try:
        jax.jit(jax.shard_map(send, mesh=mesh, in_specs=cut, out_specs=cut)).lower(x).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def relays_what_is_read(mesh: Mesh) -> bool:
    """Whether the compiler copies what is read from a slot into the order that a product of it wants.

    It does for TPU, where the copies take as long as making a gated MLP's products again; told to leave the order, it
    reads slots within the products.
    """
    return _is_tpu(mesh)


def clears_what_is_overwritten(mesh: Mesh) -> bool:
    """Whether the compiler writes zeros, and copies of them, into slots that a loop fills before anything is read.

    It does for GPUs. What the step allocates once, and carries from one microbatch to the next, it clears once.
    """
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "gpu"


def swaps_in_place() -> bool:
    """Whether what is traced now is for GPUs, where halves of a dim change places as fast as they are read.

    Elsewhere a product with a permutation, which is exact, is faster: on TPU, whose matrix units move entries along the
    last dim, where 128 of them lie side by side.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "gpu"


def first_group(mesh: Mesh, axes: Sequence[str]) -> int:
    """Among how many neighbouring ranks of some axes a gather begins, before it goes on among all; 1: at once among
    all.

    Of a gather among devices that fill a torus of three dims, libtpu makes a sum of arrays that are mostly zero. Two
    gathers, along one dim and then along the others, stay what they are.
    """
    if not isinstance(mesh, Mesh):
        return 1
    order = [*(name for name in mesh.axis_names if name not in axes), *axes]
    groups = mesh.devices.transpose([mesh.axis_names.index(name) for name in order])
    ranks = groups.reshape(-1, math.prod(mesh.shape[axis] for axis in axes))[0]
    if getattr(ranks[0], "coords", None) is None:
        return 1
    moved = np.diff([device.coords for device in ranks], axis=0) != 0
    if moved.any(axis=0).sum() < 3:
        return 1
    turns = np.flatnonzero(moved.sum(axis=1) > 1)  # where a second dim begins to change
    near = int(turns[0]) + 1 if len(turns) else 1
    return near if len(ranks) % near == 0 else 1


def is_absent_gpus(mesh: Mesh) -> bool:
    """Whether the mesh is of GPUs that are not here: its programs are compiled, and cannot run."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "gpu" != jax.default_backend()


def _is_tpu(mesh: Mesh) -> bool:
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "tpu"
