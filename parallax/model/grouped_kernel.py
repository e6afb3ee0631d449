"""The gradient of the weights of a grouped product on TPU, which the compiler's own kernels for these do not have.

It makes of that gradient the products of all rows with all rows, one for each group. JAX's megablox kernel takes each
row for its own group alone, and skips those behind the last one.
"""

import jax
from jax import Array, lax
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

from parallax.model.kernels import LANES, platform_traced, unchecked

GROUPED_SCOPE = "weights_by_group"  # by which the kernel is known in traced programs
BLOCK_ROWS = (512, 256, LANES)  # of a block
WIDEST_BLOCK = 1024  # entries of a block of either factor


def ragged_dot(x_NI: Array, w_EIO: Array, sizes_E: Array) -> Array:
    """`lax.ragged_dot`, with the kernel for its weights' gradient where TPUs have it."""
    has_kernel = platform_traced() == "tpu" and len(x_NI) % LANES == 0
    return (_with_kernel if has_kernel else lax.ragged_dot)(x_NI, w_EIO, sizes_E)


@jax.custom_vjp
def _with_kernel(x_NI: Array, w_EIO: Array, sizes_E: Array) -> Array:
    return lax.ragged_dot(x_NI, w_EIO, sizes_E)


def _forward(x: Array, w: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return lax.ragged_dot(x, w, sizes), (x, w, sizes)


def _backward(saved: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array, None]:
    x, w, sizes = saved
    (dx,) = jax.vjp(lambda x: lax.ragged_dot(x, w, sizes), x)[1](dy)
    return dx, weights_by_group(x, dy, sizes).astype(w.dtype), None


_with_kernel.defvjp(_forward, _backward)


def weights_by_group(x_NI: Array, y_NO: Array, sizes_E: Array, *, interpret: bool = False) -> Array:
    """Of each group the sum over its rows of their outer products, [E, I, O] of x's dtype; sums are float32.

    `N` is a multiple of 128.
    """
    rows = next(size for size in BLOCK_ROWS if len(x_NI) % size == 0)
    tiling = rows, *(width_of_block(x.shape[1]) for x in (x_NI, y_NO))

    def run(x: Array, y: Array, sizes: Array) -> Array:
        return tgmm(x.T, y, sizes, preferred_element_type=x.dtype, tiling=tiling, interpret=interpret)

    with jax.named_scope(GROUPED_SCOPE):
        return unchecked(run, x_NI, y_NO, sizes_E)


def width_of_block(width: int) -> int:
    """Entries of a block of so many: the most that leave least of the last block empty.

    >>> [width_of_block(width) for width in (4096, 1408, 704, 64)]
    [1024, 768, 768, 128]
    """
    sizes = range(min(WIDEST_BLOCK, -(-width // LANES) * LANES), 0, -LANES)
    return min((size for size in sizes if 2 * size > WIDEST_BLOCK or size >= width), key=lambda size: -width % size)
