"""Grouped products on TPU, for gradients, by JAX's megablox kernels.

Of the weights' gradient XLA makes the products of all rows with all rows, one for each group. The kernel takes each row
for its own group alone, and skips those behind the last one. Of the rows' XLA has a kernel that wants the matrices
transposed in memory, which is a copy of them for each layer.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import Array, lax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from parallax.model.kernels import LANES, platform_traced, unchecked

GROUPED_SCOPE = "by_group"  # by which the kernels are known in traced programs
BLOCK_ROWS = (512, 256, LANES)  # of a block
WIDEST_BLOCK = 1024  # entries of a block of either factor


def ragged_dot(x_NA: Array, w_EIO: Array, sizes_E: Array, transposed: bool) -> Array:
    """Rows times their group's matrices by XLA, or these transposed: by JAX's kernel where TPUs have it, which reads
    them as they lie; XLA would copy them before.

    Rows behind the last group are then not written, and whatever was there.
    """
    if transposed and _has_kernel(x_NA):
        return transposed_by_group(x_NA, w_EIO, sizes_E)
    contracted = ([1], [2 if transposed else 1]), ([], [])
    return lax.ragged_dot_general(x_NA, w_EIO, sizes_E, lax.RaggedDotDimensionNumbers(contracted, [0], [0]))


def ragged_sums(x_NI: Array, y_NO: Array, sizes_E: Array) -> Array:
    """Of each group the sum of outer products, by the kernel where TPUs have it, by XLA elsewhere."""
    if _has_kernel(x_NI):
        return weights_by_group(x_NI, y_NO, sizes_E)
    contracted = ([0], [0]), ([], [])
    return lax.ragged_dot_general(x_NI, y_NO, sizes_E, lax.RaggedDotDimensionNumbers(contracted, [0], []))


def transposed_by_group(x_NO: Array, w_EIO: Array, sizes_E: Array, *, interpret: bool = False) -> Array:
    """Rows times their group's matrices transposed, [N, I] of x's dtype; sums are float32. Rows behind the last group
    have no meaning. `N` is a multiple of 128."""
    widths = w_EIO.shape[2], w_EIO.shape[1]
    return _by_group(gmm, x_NO, w_EIO, sizes_E, widths=widths, transpose_rhs=True, interpret=interpret)


def weights_by_group(x_NI: Array, y_NO: Array, sizes_E: Array, *, interpret: bool = False) -> Array:
    """Of each group the sum over its rows of their outer products, [E, I, O] of x's dtype; sums are float32.

    `N` is a multiple of 128.
    """
    return _by_group(tgmm, x_NI, y_NO, sizes_E, widths=(x_NI.shape[1], y_NO.shape[1]), interpret=interpret)


def _has_kernel(x_NA: Array) -> bool:
    """Whether what is traced now is for TPUs, and the rows fill blocks."""
    return platform_traced() == "tpu" and len(x_NA) % LANES == 0


def _by_group(kernel: Callable, x: Array, other: Array, sizes_E: Array, *, widths: Iterable[int], **how: Any) -> Array:
    rows = next(size for size in BLOCK_ROWS if len(x) % size == 0)
    tiling = rows, *map(width_of_block, widths)

    def run(x: Array, other: Array, sizes_E: Array) -> Array:
        left = x.T if kernel is tgmm else x
        return kernel(left, other, sizes_E, preferred_element_type=x.dtype, tiling=tiling, **how)

    with jax.named_scope(GROUPED_SCOPE):
        return unchecked(run, x, other, sizes_E)


def width_of_block(width: int) -> int:
    """Entries of a block of so many: the most that leave least of the last block empty.

    >>> [width_of_block(width) for width in (4096, 1408, 704, 64)]
    [1024, 768, 768, 128]
    """
    sizes = range(min(WIDEST_BLOCK, -(-width // LANES) * LANES), 0, -LANES)
    return min((size for size in sizes if 2 * size > WIDEST_BLOCK or size >= width), key=lambda size: -width % size)
