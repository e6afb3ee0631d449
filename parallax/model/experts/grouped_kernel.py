"""Grouped products on TPU: JAX's megablox kernels for gradients, and kernels for gated experts.

For the weight gradient XLA multiplies all rows for each group; the kernel visits each row once, for its own group, and
skips rows after the last group. For the gradient of the rows XLA has a kernel, but it needs the matrices transposed in
memory, which takes a copy of them for each layer.

The kernels for gated experts do what stands between their products on blocks that are still in the core: silu(gate) *
up * weight, and the sum of a row's gradients from gate and up. Otherwise each is a pass over memory. The gradient of
silu(gate) * up * weight is left to XLA, which reads gate and up where they are kept; for a kernel it would copy them.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, make_group_metadata, tgmm

from parallax.hardware.chips import LANES
from parallax.model.kernels.pallas import unchecked
from parallax.model.mlp import SWIGLU, Activation
from parallax.model.products import Operand, in_units
from parallax.sharding.platform import platform_traced

GROUPED_SCOPE = "by_group"  # the kernels' scope in traced programs
BLOCK_ROWS = (512, 256, LANES)  # possible rows of a block
WIDEST_BLOCK = 1024  # entries of a block of either factor
DEFAULT_VMEM_BYTES = 16 * 2**20  # that a kernel of JAX may fill: the compiler's default for v5e, the smallest
VMEM_BYTES = 48 * 2**20  # that a kernel for gated experts may fill: three quarters of the VMEM of v7x, the smallest


def ragged_dot(x: Operand, w: Operand, sizes_E: Array, transposed: bool, dtype: Any) -> Array:
    """Rows times their group's matrices by XLA, or times the transposed matrices. For those TPUs use JAX's kernel,
    which reads the matrices without transposing them; XLA would copy them first. The kernel does not support 8 bits, so
    matrices in 8 bits are copied.

    With the kernel, rows after the last group are undefined.
    """
    if transposed and has_kernel(x):
        return transposed_by_group(x.values, w.values, sizes_E)
    dims = lax.RaggedDotDimensionNumbers((([1], [2 if transposed else 1]), ([], [])), [0], [0])
    y = lax.ragged_dot_general(x.values, w.values, sizes_E, dims, preferred_element_type=x.sums)
    return y.astype(dtype) if x.unit is None else in_units(y, x, w, dtype)


def ragged_sums(x_NI: Array, y_NO: Array, sizes_E: Array, others_EIO: Array | None) -> Array:
    """Sum of the others and of outer products of each group's rows: on TPU by the kernel, elsewhere by XLA."""
    if has_kernel(Operand(x_NI, None)):
        return weights_by_group(x_NI, y_NO, sizes_E, others_EIO)
    contracted = ([0], [0]), ([], [])
    sums_EIO = lax.ragged_dot_general(x_NI, y_NO, sizes_E, lax.RaggedDotDimensionNumbers(contracted, [0], []))
    return sums_EIO if others_EIO is None else sums_EIO + others_EIO


def transposed_by_group(x_NO: Array, w_EIO: Array, sizes_E: Array, *, interpret: bool = False) -> Array:
    """Rows times their group's matrices transposed, [N, I] in x's dtype; sums are float32. Rows after the last group
    are undefined. `N` is a multiple of 128."""
    widths = w_EIO.shape[2], w_EIO.shape[1]
    return _by_group(gmm, x_NO, w_EIO, sizes_E, widths=widths, transpose_rhs=True, interpret=interpret)


def weights_by_group(
    x_NI: Array, y_NO: Array, sizes_E: Array, others_EIO: Array | None = None, *, interpret: bool = False
) -> Array:
    """Sum of the others and over each group's rows of their outer products, [E, I, O] in x's dtype; sums are float32.

    `N` is a multiple of 128.
    """
    others = () if others_EIO is None else (others_EIO,)
    return _by_group(tgmm, x_NI, y_NO, sizes_E, *others, widths=(x_NI.shape[1], y_NO.shape[1]), interpret=interpret)


def has_kernel(x: Operand) -> bool:
    """Whether these kernels multiply the rows: the program being traced is for TPUs, the rows divide into blocks, and
    they are not in 8 bits."""
    return platform_traced() == "tpu" and len(x.values) % LANES == 0 and x.unit is None


# ---- kernels for gated experts, which Pallas interprets on CPUs. Rows after the last group are undefined


def gated(gate_RU: Array, up_RU: Array, weight_R1: Array, activation: Activation = SWIGLU) -> Array:
    """`activation` of gate and up, times weight, [R, U] in float32. No communication."""
    return activation(gate_RU.astype(jnp.float32), up_RU) * weight_R1


def gated_by_group(
    x_ND: Array,
    gate_EDU: Array,
    up_EDU: Array,
    weight_N1: Array,
    sizes_E: Array,
    activation: Activation = SWIGLU,
    biases_EU: Sequence[Array] = (),
) -> tuple[Array, Array, Array]:
    """Rows times their group's gate and up matrices, and `gated` of both, all [N, U] in x's dtype. `biases_EU` are of
    gate and up if they have some.

    XLA lets a kernel write one of its results straight into the slot where that is kept, and copies others. So there
    are two kernels, and the first writes gate twice: to be kept, and for the second.
    """
    result = jax.ShapeDtypeStruct((len(x_ND), gate_EDU.shape[2]), x_ND.dtype)
    of_gate, of_up = ([bias[:, None]] for bias in biases_EU) if biases_EU else ([], [])

    def twice(gate: Array, *bias: Array) -> tuple[Array, ...]:
        gate = sum(bias, gate)
        return gate, gate

    def end(up: Array, gate: Array, weight: Array, *bias: Array) -> tuple[Array, ...]:
        up = sum(bias, up).astype(x_ND.dtype)
        return up, gated(gate, up, weight, activation)

    gate, read = _fused("gmm_gate", twice, 2 * [result], sizes_E, [x_ND], [gate_EDU], of_gate)
    up, hidden = _fused("gmm_gated", end, 2 * [result], sizes_E, [x_ND], [up_EDU], [read, weight_N1, *of_up])
    return gate, up, hidden


def input_gradient_by_group(d_gate_NU: Array, d_up_NU: Array, gate_EDU: Array, up_EDU: Array, sizes_E: Array) -> Array:
    """The sum of both gradients times their group's matrices transposed, [N, D] in their dtype."""
    result = jax.ShapeDtypeStruct((len(d_up_NU), up_EDU.shape[1]), d_up_NU.dtype)
    arrays = [d_gate_NU, d_up_NU], [gate_EDU, up_EDU], []
    return _fused("gmm_input_gradient", lambda total: (total,), [result], sizes_E, *arrays, transposed=True)[0]


def _fused(
    name: str,
    end: Callable[..., Sequence[Array]],
    results: Sequence[jax.ShapeDtypeStruct],
    sizes_E: Array,
    lefts: Sequence[Array],
    matrices: Sequence[Array],
    others: Sequence[Array],
    *,
    transposed: bool = False,
) -> Sequence[Array]:
    """Results of `end`, [N, O], on blocks of the sum of products in float32 and on the same rows of `others`, [N, 1] or
    [N, O], or the rows of their group, [E, 1, O]. Each matrix is multiplied with its own left side."""
    (rows, inner), outer = lefts[0].shape, matrices[0].shape[1 if transposed else 2]
    size = _rows_of_block(rows)
    block, width = (width_of_block(dim, WIDEST_BLOCK) for dim in (inner, outer))
    blocks = -(-inner // block)

    def run(sizes_E: Array, *arrays: Array) -> Sequence[Array]:
        group_of, active = make_group_metadata(
            group_sizes=sizes_E,
            m=rows,
            tm=size,
            start_group=jnp.int32(0),
            num_nonzero_groups=len(sizes_E),
            visit_empty_groups=False,
        )

        def in_order(inner: Any, outer: Any) -> tuple[Any, Any]:
            return (outer, inner) if transposed else (inner, outer)

        # The grid: blocks of columns, visits of blocks of rows by groups, blocks of the contracted dim.
        left = pl.BlockSpec((size, block), lambda n, visit, k, starts, groups, tiles: (tiles[visit], k))
        narrow = pl.BlockSpec((size, 1), lambda n, visit, k, starts, groups, tiles: (tiles[visit], 0))
        by_column = pl.BlockSpec((size, width), lambda n, visit, k, starts, groups, tiles: (tiles[visit], n))
        of_group = pl.BlockSpec((None, 1, width), lambda n, visit, k, starts, groups, tiles: (groups[visit], 0, n))
        matrix = pl.BlockSpec(
            (None, *in_order(block, width)), lambda n, visit, k, starts, groups, tiles: (groups[visit], *in_order(k, n))
        )
        moved = sum(x.size * x.dtype.itemsize for x in (*arrays, *results))
        flops = 2 * rows * inner * outer * len(matrices)
        return pl.pallas_call(
            partial(_fused_block, end, (len(lefts), len(matrices), len(others), len(results)), transposed, inner),
            out_shape=results,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                in_specs=[left] * len(lefts)
                + [matrix] * len(matrices)
                + [of_group if x.ndim == 3 else narrow if x.shape[1] == 1 else by_column for x in others],
                out_specs=[by_column] * len(results),
                grid=(-(-outer // width), active, blocks),
                scratch_shapes=[pltpu.VMEM((size, width), jnp.float32)],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
            ),
            cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
            interpret=platform_traced() == "cpu",
            name=name,
        )(*group_of, *arrays)

    with jax.named_scope(GROUPED_SCOPE):
        return unchecked(run, sizes_E, *lefts, *matrices, *others)


def _fused_block(
    end: Callable[..., Sequence[Array]],
    counts: tuple[int, ...],
    transposed: bool,
    inner: int,
    starts: Any,
    groups: Any,
    tiles: Any,
    *refs: Any,
) -> None:
    """One block of the sum's terms; after the last one, the results of a block. Other groups' rows are unchanged."""
    lefts, matrices, others, results, (total,) = _split(refs, (*counts, 1))
    visit, k = pl.program_id(1), pl.program_id(2)
    size, block = lefts[0].shape
    last = pl.cdiv(inner, block) - 1

    @pl.when(k == 0)
    def _clear() -> None:
        total[...] = jnp.zeros_like(total)

    def add(entries: int) -> None:
        for left, matrix in zip(lefts, matrices, strict=True):
            right = matrix[:, :entries] if transposed else matrix[:entries]
            contracted = (([1], [1 if transposed else 0]), ([], []))
            total[...] += lax.dot_general(left[:, :entries], right, contracted, preferred_element_type=jnp.float32)

    pl.when(k < last)(lambda: add(block))

    @pl.when(k == last)
    def _end() -> None:
        add(inner - last * block)
        values = end(total[...], *(other[...] for other in others))
        for ref, value in zip(results, values, strict=True):
            row = tiles[visit] * size + lax.broadcasted_iota(jnp.int32, value.shape, 0)
            in_group = (row >= starts[groups[visit]]) & (row < starts[groups[visit] + 1])
            ref[...] = jnp.where(in_group, value.astype(jnp.float32), ref[...].astype(jnp.float32)).astype(ref.dtype)


def _split(refs: Sequence[Any], counts: Iterable[int]) -> list[Sequence[Any]]:
    rest = iter(refs)
    return [[next(rest) for _ in range(count)] for count in counts]


def _by_group(
    kernel: Callable, x: Array, other: Array, sizes_E: Array, *added: Array, widths: tuple[int, int], **options: Any
) -> Array:
    tiling = block_that_fits(len(x), widths, x.dtype.itemsize, sums_rows=kernel is tgmm, is_added=bool(added))

    def run(x: Array, other: Array, sizes_E: Array, *added: Array) -> Array:
        left, more = (x.T if kernel is tgmm else x), dict(zip(["existing_out"], added))
        return kernel(left, other, sizes_E, preferred_element_type=x.dtype, tiling=tiling, **more, **options)

    with jax.named_scope(GROUPED_SCOPE):
        return unchecked(run, x, other, sizes_E, *added)


def block_that_fits(
    rows: int, widths: tuple[int, int], entry_bytes: int, *, sums_rows: bool = False, is_added: bool = False
) -> tuple[int, int, int]:
    """Rows, and width of either side, of the block that a kernel of JAX computes at once: of those that fit a core's
    VMEM the widest, and of these the one of most rows. A narrower one reads its factors more often; fewer rows cost no
    traffic.

    >>> block_that_fits(16384, (2048, 4096), 2, sums_rows=True)
    (512, 1024, 1024)
    >>> block_that_fits(16384, (2048, 4096), 2, sums_rows=True, is_added=True)
    (256, 1024, 1024)
    """
    widest = [WIDEST_BLOCK >> halvings for halvings in range((WIDEST_BLOCK // LANES).bit_length())]
    sides = [sorted({width_of_block(width, most) for most in widest}) for width in widths]
    blocks = itertools.product([size for size in BLOCK_ROWS if rows % size == 0], *sides)
    fitting = (
        block
        for block in blocks
        if vmem_bytes(*block, entry_bytes, sums_rows=sums_rows, is_added=is_added) <= DEFAULT_VMEM_BYTES
    )
    return max(fitting, key=lambda block: (block[1] * block[2], block[0]))


def vmem_bytes(rows: int, left: int, right: int, entry_bytes: int, *, sums_rows: bool, is_added: bool) -> int:
    """Bytes of VMEM that a kernel of JAX takes for a block, whose product is [rows, right] or, if it sums over rows,
    [left, right]. It has two of each factor, of the result and of what is added to it, since one is copied while
    another is computed with, and the sums in float32. For a transposed or masked factor the compiler takes at most
    that of the left side in float32.
    """
    factors, result = (rows * (left + right), left * right) if sums_rows else ((rows + right) * left, rows * right)
    return 2 * entry_bytes * (factors + result * (1 + is_added)) + 4 * (result + rows * left)


def _rows_of_block(rows: int) -> int:
    return next(size for size in BLOCK_ROWS if rows % size == 0)


def width_of_block(width: int, widest: int) -> int:
    """Width of a block, at most the widest, for a dim of this width: among those with the least padding of the last
    block, the largest.

    >>> [width_of_block(width, 1024) for width in (4096, 1408, 704, 64)]
    [1024, 768, 768, 128]
    """
    sizes = range(min(widest, -(-width // LANES) * LANES), 0, -LANES)
    return min((size for size in sizes if 2 * size > widest or size >= width), key=lambda size: -width % size)
