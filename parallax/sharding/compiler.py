"""Compiler options for each kind of chip, and properties of compilers that the code works around.

Measured on programs compiled by both libtpu generations (0.0.42 and 0.0.50): `python benchmarks/overlap.py`, which
also has rows without the options.
"""

import functools
import math
import sys
from collections.abc import Collection, Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from parallax.errors import tell
from parallax.hardware.chips import name_of_kind
from parallax.sharding.mesh import chips_of_slice, is_simulated
from parallax.sharding.platform import device_kind_planned, platform_traced
from parallax.version import version_of

# Without this option compute waits for every exchange of gradients (fsdp.reduce="compute").
EXCHANGE = {"xla_tpu_enable_async_all_to_all": True}
# The same for tokens sent to experts (layout.exchange="ragged").
ASYNC_RAGGED = {"xla_tpu_enable_async_ragged_all_to_all": True}
# The SparseCores run all-gathers and reductions in parallel with compute. The other way to overlap gathers, fusing them
# into compute, is only for v5e: for other chips newer compilers refuse it, since results may be wrong.
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
# KiB of a core's VMEM that one operation may fill. With the default, 16 MiB, an MLP's products take a quarter longer on
# v5p, and all compute of a 7B model a third longer on v7x. On v5e all compute of llama_1b_16 takes 2 to 9 % longer
# than with 32 MiB, which take half as long again to compile; 64 MiB took more than twice as long. On v6e a layer of it
# takes 12 % longer with 32 than with 64 MiB, and all compute 4 % longer with 96, which leave nothing for the stream.
VMEM = "xla_tpu_scoped_vmem_limit_kib"
# A kernel for products of rows with their group's matrices, the default on v5p; otherwise a dilated convolution.
RAGGED_DOT = {"xla_tpu_enable_ragged_dot_kernel": True}
OPTIONS = {
    "TPU v5e": EXCHANGE | RAGGED_DOT | {VMEM: 32_768},
    "TPU v5p": EXCHANGE | ASYNC_RAGGED | SPARSE_CORES | {VMEM: 65_536},
    "TPU v6e": EXCHANGE | SPARSE_CORES | RAGGED_DOT | {VMEM: 65_536},
    "TPU v7x": EXCHANGE | SPARSE_CORES | {VMEM: 65_536},
}
# In addition, of models with experts. On v5e compute waits for the rows sent to them, too, without the option for that.
# A gather goes on there beside what XLA fuses it with, products by default. The products of experts are kernels, which
# it cannot fuse, and their gathers waited; with the other option it fuses passes over memory, too. In llama_1b_16,
# which is dense, fewer gathers wait with it, too, but they leave products for passes that need the same bandwidth.
OF_MIXTURES = {"TPU v5e": ASYNC_RAGGED | {"xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions": True}}
# In addition, of token streams. XLA counts products and passes over memory at this part of their time, and begins
# permutes several of them before their tokens are used. On v5p it takes a message for half as long as its bytes need
# over a link, and began one a single product before. On v5e, with two ranks, waits were longer.
OF_STREAMS = {
    "TPU v5p": {"xla_lhs_output_fusion_latency_multiplier": 0.4, "xla_lhs_loop_fusion_latency_multiplier": 0.4}
}

# In addition, of float8 with fixed ranges. With it XLA rounds what one or two products read inside of these products,
# and not in a pass before. Attention's output gains by it. What two products read is behind a barrier, since both would
# round all of it for each block of their results: see `rounds_in_products`.
OF_FIXED_RANGES = {"TPU v7x": {"xla_tpu_allow_conv_input_fusion_with_downcast_convert": True}}

# For GPUs that are not present: a custom call whose target this process lacks is compiled as a call that does nothing.
ABSENT = {"xla_gpu_mock_custom_calls": True}
# For products in float8 on GPUs. XLA gives products to Triton first, and what Triton declines to cuBLAS in bfloat16.
# Left to cuBLASLt, products in float8 are made as such: measured on an H100 with jax 0.11.2, 387 microseconds for
# 16,384 x 2048 x 8192, where bfloat16 takes 647 and the first way 708. Small products of one input would be merged,
# in bfloat16, since their weights have different scales.
FLOAT8_ON_GPU = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}

# For programs of simulated devices that run once: their code is slow, and made in a fraction of the time. By default
# XLA makes a module of each fusion, some 16 ms of CPU time; only jaxlib 0.10 has the earlier form beside it.
RUN_ONCE: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
if version_of("jaxlib").startswith("0.10."):
    RUN_ONCE["xla_cpu_use_fusion_emitters"] = False

# Chips on which the gradient of attention's output, a product with a kernel of heads, takes twice as long if the dim
# that it sums over is the last in memory.
HEADS_LAST = ("TPU v6e", "TPU v7x")
# Chips on which steps were compiled with the gradients of a gated MLP's gate and up written, not computed again.
GRADIENTS_WRITTEN = ("TPU v5p", "TPU v6e", "TPU v7x")
# Chips on which steps were compiled with small gradients sent after large ones.
SMALL_GRADIENTS_LAST = ("TPU v7x",)
# Chips on which steps were compiled with and without the passes over memory that XLA is spared below.
FEWER_PASSES = ("TPU v5e", "TPU v5p", "TPU v6e", "TPU v7x")

# A slice of v5e with more chips than this has limited routing, for which XLA refuses asynchronous all-to-alls and, with
# any options, ragged ones.
MOST_FOR_EXCHANGES = {"TPU v5e": 16}

# XLA plans for this share of a GPU's memory, and its scheduler for another of what arguments leave of it. Where a
# program holds more it begins messages where they are awaited: docs/measured/gpus.md, Memory for messages.
PLANNED_SHARE, SCHEDULED_SHARE = 0.8, 0.95

Options = dict[str, bool | int | float]
Said = tuple[tuple[str, bool | int | float], ...]


def compiler_options(
    mesh: Mesh,
    matmul: str = "compute",
    *,
    has_fixed_ranges: bool = False,
    has_mixtures: bool = False,
    has_streams: bool = False,
) -> Options:
    """Compiler options for this mesh, this form of products, fixed ranges of float8, layers with experts and token
    streams; empty for chips that were not measured.

    TPU options that the installed compiler does not accept are left out, and a line on stderr says so once. Without a
    line, and untried, EXCHANGE is left out for slices for which XLA refuses it: a program that exchanges over two chips
    ends the process.
    """
    if _is_on(mesh, "gpu"):
        return (ABSENT if is_absent_gpus(mesh) else {}) | (FLOAT8_ON_GPU if matmul == "float8" else {})
    if not _is_on(mesh, "tpu"):
        return {}
    name = name_of_kind(mesh.devices.flat[0].device_kind)
    options = OPTIONS.get(name, {})
    if _has_limited_routing(name, chips_of_slice(mesh)):
        options = {key: value for key, value in options.items() if key not in EXCHANGE}
    more = OF_MIXTURES.get(name, {}) if options and has_mixtures else {}
    more = more | OF_STREAMS.get(name, {}) if options and has_streams else more
    more = more | OF_FIXED_RANGES.get(name, {}) if options and matmul == "float8" and has_fixed_ranges else more
    return dict(_taken(name, mesh, tuple((options | more).items())))


@functools.cache
def _taken(chip_name: str, mesh: Mesh, options: Said) -> Said:
    """The options that the installed compiler accepts: all are tried together and, if it refuses, one by one."""
    if not options or not refusal(mesh, dict(options)) or refusal(mesh, {}):
        return options  # refused even without options: compiling the step will report the error
    taken: Options = {}
    for name, value in options:
        if why := refusal(mesh, taken | {name: value}):
            what = f"does not take {name}={value} for {chip_name}, left out: {why}"
            tell(f"libtpu {version_of('libtpu')} {what}", sys.stderr)
        else:
            taken[name] = value
    return tuple(taken.items())


def refusal(mesh: Mesh, options: Options) -> str:
    """Why the compiler refuses a program with these options, in one line; "" if it accepts them.

    The program gathers and exchanges along each axis, since a refusal may depend on the slice. It does so in a loop, as
    steps do. Elsewhere XLA makes an all-to-all asynchronous only if something is beside it, and refused nothing where
    it then refused the step.
    """
    axes = [axis for axis, size in mesh.shape.items() if size > 1]

    def send(x: jax.Array) -> jax.Array:
        for axis in axes:
            x = lax.all_to_all(x, axis, 0, 0, tiled=True) + lax.all_gather(x, axis, tiled=True)[: len(x)]
        return x

    cut = PartitionSpec(None, mesh.axis_names)
    x = jax.ShapeDtypeStruct((2, mesh.size**2, 128), "float32", sharding=NamedSharding(mesh, cut))
    sent = jax.shard_map(functools.partial(lax.map, send), mesh=mesh, in_specs=cut, out_specs=cut)
    try:
        jax.jit(sent).lower(x).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def hides_reduce_scatters(chip_name: str) -> bool:
    """Whether the SparseCores of this chip run reduce-scatters beside compute. On other TPUs compute waits for them."""
    return any(on and "offload_reduce_scatter" in name for name, on in OPTIONS.get(chip_name, {}).items())


def share_beside(arguments: float, least: float, most: float, usable: int) -> float:
    """Share of the messages that go on beside compute on GPUs, in a program with so many bytes of arguments on one with
    so many usable ones, which besides holds `least` all the time and, with messages on their way, `most`: XLA's
    scheduler begins none while its memory is full.

    >>> [share_beside(22, least, 43, 80) for least in (37.5, 40, 43)]
    [0.436..., 0.0, 0.0]
    """
    limit = SCHEDULED_SHARE * (PLANNED_SHARE * usable - arguments)
    if most <= limit:
        return 1.0
    return 0.0 if least >= limit else (limit - least) / (most - least)


def hides_exchanges(chip_name: str, chips: int) -> bool:
    """Whether all-to-alls go on beside compute in a slice of so many chips. On TPUs they do with the option for them,
    which XLA refuses for v5e's slices of more than 16."""
    if not chip_name.startswith("TPU"):
        return True
    taken = EXCHANGE.items() <= OPTIONS.get(chip_name, {}).items()
    return taken and not _has_limited_routing(chip_name, chips)


def hides_ragged(chip_name: str) -> bool:
    """Whether rows that are sent to experts travel beside compute on this TPU: with the option for ragged all-to-alls.

    >>> [hides_ragged(f"TPU {name}") for name in ("v5e", "v5p", "v6e", "v7x")]
    [True, True, False, False]
    """
    return ASYNC_RAGGED.items() <= (OPTIONS.get(chip_name, {}) | OF_MIXTURES.get(chip_name, {})).items()


def compiles_ragged(chip_name: str, chips: int) -> bool:
    """Whether XLA compiles ragged all-to-alls for a slice of so many chips, among whichever of them.

    >>> compiles_ragged("TPU v5e", 16), compiles_ragged("TPU v5e", 32), compiles_ragged("TPU v6e", 256)
    (True, False, True)
    """
    return not _has_limited_routing(chip_name, chips)


def _has_limited_routing(chip_name: str, chips: int) -> bool:
    """Whether a slice of so many chips has it: see MOST_FOR_EXCHANGES."""
    return chips > MOST_FOR_EXCHANGES.get(chip_name, math.inf)


def has_ragged(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices of a mesh have ragged all-to-alls: CPUs do not, and an abstract mesh of accelerators does."""
    if not _is_on(mesh, "tpu"):
        return not is_simulated(mesh)
    return compiles_ragged(name_of_kind(mesh.devices.flat[0].device_kind), chips_of_slice(mesh))


def relays_what_is_read(mesh: Mesh) -> bool:
    """Whether XLA changes the memory layout of a slot when a product reads it.

    It does on TPU, where these copies take as long as recomputing a gated MLP's products. With a fixed layout the
    products read the slots directly.
    """
    return _is_on(mesh, "tpu")


def fuses_norms_into_products(mesh: Mesh) -> bool:
    """Whether XLA computes a norm anew within each product of the backward pass that reads it, and the sums of the
    norm's gradient within the product before them.

    It does on TPU. Their float32 intermediates leave less VMEM for a product's blocks: in stages of one layer of
    llama_1b_16 on v5e the weight gradients of an MLP's gate and up take 1.16 ms each, and 0.73 apart from the norm. In
    loops over the layers of a stage it chooses other blocks, and the norm's own passes are a loss.
    """
    return _is_on(mesh, "tpu")


def keeps_stream_in_rows(mesh: Mesh) -> bool:
    """Whether the forward pass should have the residual stream in row-major memory layout.

    On TPU XLA lays it out with tokens last, and the backward pass with the width last: it copied and
    transposed what it read of it in each layer.
    """
    return _is_on(mesh, "tpu") and name_of_kind(mesh.devices.flat[0].device_kind) in FEWER_PASSES


def saves_means_of_norms(mesh: Mesh) -> bool:
    """Whether the backward pass should read the means of a norm from slots, a number for each token, and not compute
    them again.

    XLA computes them in a pass of their own over the stream, before the products that read the norm. On v5p a layer's
    two take 0.42 of 32.7 ms of its backward pass in configs/llama2_7b_64.py, on v5e 0.31 of 14.3 in
    configs/llama_1b_16.py.
    """
    return _is_on(mesh, "tpu") and name_of_kind(mesh.devices.flat[0].device_kind) in FEWER_PASSES


def writes_slots_of_one_dtype(mesh: Mesh) -> bool:
    """Whether a product of float8 with fixed ranges writes several slots if these have one dtype, and otherwise one.

    On v7x an MLP's up was copied into its slot in a pass, 0.52 ms a layer of configs/llama2_7b_64.py with remat="norm".
    As bytes, as swiglu is saved then, too, it is written by the product; this takes 0.15 ms longer, and that through
    down, which reads them in the backward pass, 0.06.
    """
    return _is_on(mesh, "tpu") and name_of_kind(mesh.devices.flat[0].device_kind) in OF_FIXED_RANGES


def clears_what_is_overwritten(mesh: Mesh | AbstractMesh) -> bool:
    """Whether XLA writes zeros, and copies of zeros, into slots that a loop fills before anything reads them.

    It does on GPU and CPU. Slots that the step allocates once, and carries from one microbatch to the next, are cleared
    once. On eight simulated devices with mesh.tp=8 a step of configs/bench_small.py takes 7 % fewer CPU seconds.
    """
    return _is_on(mesh, "gpu") or is_simulated(mesh)


def copies_what_branches_return(mesh: Mesh) -> bool:
    """Whether XLA writes the results of a conditional to new buffers, though their operands are donated.

    It does on GPU. What a loop carries is updated in place.
    """
    return _is_on(mesh, "gpu")


def moves_sums_out_of_loops() -> bool:
    """Whether XLA, compiling the program being traced, moves a reduce-scatter whose result a loop adds up behind the
    loop.

    It does on TPU, in its pass `while-loop-all-reduce-code-motion`. It saves messages, and what the loop then adds up
    is whole on each device. Behind a barrier the result stays in the loop.
    """
    return platform_traced() == "tpu"


def swaps_in_place() -> bool:
    """Whether the program being traced is for GPUs, where swapping the halves of a dim costs no more than reading them.

    Elsewhere a product with a permutation matrix, which is exact, is faster: TPUs store 128 entries of the last dim
    side by side, and their matrix units move entries along it.
    """
    return platform_traced() == "gpu"


def reads_heads_last() -> bool:
    """Whether the program being traced is for a chip that should have kernels of heads with these dims last."""
    return _is_traced_for(HEADS_LAST)


def copies_whole_stacks() -> bool:
    """Whether the program being traced is for a chip on which a layer's weight should have a stack's memory layout.

    Where a product wants another layout, XLA copies the whole stack to read one layer of it: on v5p the kernels of
    attention's output of eight layers in each forward pass of configs/llama2_7b_64.py with PP 4 and stages of one
    layer, 0.90 ms each time.
    """
    return platform_traced() == "tpu"


def scales_queries_first() -> bool:
    """Whether the program being traced is for a chip on which queries should be scaled where they are rotated.

    The kernel of attention reads scaled queries. XLA writes the rotated ones to their slot, and scales them in another
    pass: on v5p 0.27 of 17.3 ms of a layer's forward pass in configs/llama2_7b_64.py, on v5e 0.20 of 7.35 in
    configs/llama_1b_16.py.
    """
    return _is_traced_for(FEWER_PASSES)


def rounds_in_products() -> bool:
    """Whether the program being traced is for a chip on which XLA, with fixed ranges, rounds what two products read in
    each of them, unless it is behind a barrier.

    On v7x the weight gradients of an MLP's gate and up, of configs/llama2_7b_64.py, take 1.18 ms each with it, and 0.72
    behind a barrier.
    """
    return _is_traced_for(OF_FIXED_RANGES)


def sends_small_gradients_last() -> bool:
    """Whether the program being traced is for a chip on which a dense layer's largest gradients should be sent before
    the others are.

    XLA computes and sends an MLP's last, and little is left of the layer beside them. In configs/llama2_7b_64.py with
    remat="norm" on v7x the reduce-scatter of up's takes 0.59 ms, beside a pass of 0.26. Attention's take 0.22. A step
    waited 27 ms, and now 10. That of configs/llama3_70b.py takes as long as before.
    """
    return _is_traced_for(SMALL_GRADIENTS_LAST)


def computes_gradients_again() -> bool:
    """Whether the program being traced is for a chip on which XLA, left to itself, computes the gradient of a gated
    MLP's up in each product that reads it, at a loss.

    The product through `down` writes its result and gate's gradient, and the product through `up` and that of its
    weight's gradient compute up's from both. Behind a barrier the first writes both gradients as fast, and the others
    take 0.12 ms less, of 4.30 of a layer's backward pass in configs/llama_1b_16.py on v6e. On v7x a step of
    configs/llama2_7b_64.py with remat="norm" has 734 ms of compute beside kernels in place of 741, and on v5p
    as configured 1614 in place of 1620.
    """
    return _is_traced_for(GRADIENTS_WRITTEN)


def first_group(mesh: Mesh, axes: Sequence[str]) -> int:
    """Group size of the first step of a two-step all-gather; 1 means one step.

    libtpu turns a gather among devices that fill a torus of three dims into a sum of arrays that are mostly zero. Two
    gathers, along one dim and then along the others, are left as they are.
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
    """Whether the mesh has GPUs that are not present: its programs can be compiled but not run."""
    return _is_on(mesh, "gpu") and jax.default_backend() != "gpu"


def _is_traced_for(chips: Collection[str]) -> bool:
    """Whether the program being traced is for one of these TPUs."""
    return platform_traced() == "tpu" and name_of_kind(device_kind_planned()) in chips


def _is_on(mesh: Mesh, platform: str) -> bool:
    """Whether the mesh has devices, and these are of this platform."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == platform
