"""Grouped products for gradients on TPU, by JAX's megablox kernels.

For the weight gradient XLA multiplies all rows for each group; the kernel visits each row once, for its own group, and
skips rows after the last group. For the gradient of the rows XLA has a kernel, but it needs the matrices transposed in
memory, which takes a copy of them for each layer.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import Array, lax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from parallax.model.kernels import LANES, platform_traced, unchecked
from parallax.model.products import Operand, in_units

GROUPED_SCOPE = "by_group"  # the kernels' scope in traced programs
BLOCK_ROWS = (512, 256, LANES)  # possible rows of a block
WIDEST_BLOCK = 1024  # entries of a block of either factor


def ragged_dot(x: Operand, w: Operand, sizes_E: Array, transposed: bool, dtype: Any) -> Array:
    """Rows times their group's matrices by XLA, or times the transposed matrices. For those TPUs use JAX's kernel,
    which reads the matrices without transposing them; XLA would copy them first. The kernel does not support 8 bits, so
    matrices in 8 bits are copied.

    With the kernel, rows after the last group are undefined.
    """
    if transposed and x.unit is None and _has_kernel(x.values):
        return transposed_by_group(x.values, w.values, sizes_E)
    dims = lax.RaggedDotDimensionNumbers((([1], [2 if transposed else 1]), ([], [])), [0], [0])
    y = lax.ragged_dot_general(x.values, w.values, sizes_E, dims, preferred_element_type=x.sums)
    return y.astype(dtype) if x.unit is None else in_units(y, x, w, dtype)


def ragged_sums(x_NI: Array, y_NO: Array, sizes_E: Array, others_EIO: Array | None) -> Array:
    """Sum of the others and of outer products of each group's rows: on TPU by the kernel, elsewhere by XLA."""
    if _has_kernel(x_NI):
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


def _has_kernel(x_NA: Array) -> bool:
    """Whether the program being traced is for TPUs and the rows divide into blocks."""
    return platform_traced() == "tpu" and len(x_NA) % LANES == 0


def _by_group(
    kernel: Callable, x: Array, other: Array, sizes_E: Array, *added: Array, widths: Iterable[int], **how: Any
) -> Array:
    rows = next(size for size in BLOCK_ROWS if len(x) % size == 0)
    tiling = rows, *map(width_of_block, widths)

    def run(x: Array, other: Array, sizes_E: Array, *added: Array) -> Array:
        left, more = (x.T if kernel is tgmm else x), dict(zip(["existing_out"], added))
        return kernel(left, other, sizes_E, preferred_element_type=x.dtype, tiling=tiling, **more, **how)

    with jax.named_scope(GROUPED_SCOPE):
        return unchecked(run, x, other, sizes_E, *added)


def width_of_block(width: int) -> int:
    """Width of a block for a dim of this width: among those with the least padding of the last block, the largest.

    >>> [width_of_block(width) for width in (4096, 1408, 704, 64)]
    [1024, 768, 768, 128]
    """
    sizes = range(min(WIDEST_BLOCK, -(-width // LANES) * LANES), 0, -LANES)
    return min((size for size in sizes if 2 * size > WIDEST_BLOCK or size >= width), key=lambda size: -width % size)
