"""Products of rows with the matrix of their group: those of a mixture's experts, none of which computes for a row that
is not its own."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from parallax.model.grouped_kernel import ragged_dot
from parallax.model.kernels import platform_traced
from parallax.sharding.collectives import as_varying, varying_axes

LEAST_ROWS = 8
# Of a block: how many rows at most, and how many blocks an even group has at least. A GPU wants large products: on one
# H100, 16,384 rows of 2048 to 8 groups of 4096 took 15.4 ms in blocks of 128, forward and backward, 6.1 ms in 512 and
# 9.7 ms as a ragged_dot, of which XLA makes products of all rows with all matrices there.
MOST_ROWS, PIECES = {"cpu": 128, "gpu": 512}, {"cpu": 4, "gpu": 2}


def grouped_dot(x_NI: Array, w_EIO: Array, sizes_E: Array, *, form: str | None = None) -> Array:
    """Each row times its group's matrix, [N, O] of x's dtype; sums are float32. No communication.

    The first `sizes_E[0]` rows are of group 0, those behind them of group 1. Rows behind the last group give 0, and
    their gradient is 0. `form` is "blocks" or "ragged_dot", which gives the same; without it the faster one is taken:
    ragged_dot on TPUs, which have a kernel for it. On CPUs and GPUs XLA makes of it the products of all rows with all
    matrices.

    >>> x, w = jnp.ones((3, 2)), jnp.stack([jnp.ones((2, 1)), 2 * jnp.ones((2, 1))])
    >>> grouped_dot(x, w, jnp.array([1, 1])).tolist()
    [[2.0], [4.0], [0.0]]
    """
    form = form or ("ragged_dot" if platform_traced() in ("tpu", "") else "blocks")
    sizes_E = sizes_E.astype(jnp.int32)
    axes = frozenset().union(*map(varying_axes, (x_NI, w_EIO, sizes_E)))
    x_NI, w_EIO, sizes_E = (as_varying(array, axes) for array in (x_NI, w_EIO, sizes_E))
    return FORMS[form](x_NI, w_EIO, sizes_E)


def rows_of_block(rows: int, groups: int) -> int:
    """Rows that are multiplied at once in the form "blocks": fewer where groups have few rows.

    >>> [rows_of_block(rows, groups=8) for rows in (8, 256, 2048, 8192)]
    [8, 8, 64, 128]
    """
    kind = "cpu" if platform_traced() == "cpu" else "gpu"
    size = LEAST_ROWS
    while size < MOST_ROWS[kind] and 2 * size * PIECES[kind] * groups <= rows:
        size *= 2
    return size


@jax.custom_vjp
def _in_blocks(x_NI: Array, w_EIO: Array, sizes_E: Array) -> Array:
    return _rows_times("bI,IO->bO", x_NI, w_EIO, sizes_E)


def _forward(x: Array, w: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _in_blocks(x, w, sizes), (x, w, sizes)


def _backward(saved: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array, None]:
    # Two loops, so that a divided backward pass can leave the weights' for later.
    x, w, sizes = saved
    return _rows_times("bO,IO->bI", dy, w, sizes), _rows_with_rows(x, dy, sizes).astype(w.dtype), None


_in_blocks.defvjp(_forward, _backward)

FORMS = {"blocks": _in_blocks, "ragged_dot": ragged_dot}


def _rows_times(product: str, x_NA: Array, w_EIO: Array, sizes_E: Array) -> Array:
    """The product of each block with its group's matrix. A block that ends behind its group's last row writes rows of
    the next group, whose own blocks come later."""
    rows, size = len(x_NA), rows_of_block(len(x_NA), len(sizes_E))
    width = jax.eval_shape(functools.partial(jnp.einsum, product), x_NA[:1], w_EIO[0]).shape[1]
    filled = jnp.pad(x_NA, ((0, size), (0, 0)))

    def step(y_NA: Array, block: tuple[Array, Array, Array]) -> tuple[Array, None]:
        group, first, _ = block
        x = lax.dynamic_slice_in_dim(filled, first, size)
        w = lax.dynamic_index_in_dim(w_EIO, group, keepdims=False)
        y = jnp.einsum(product, x, w, preferred_element_type=jnp.float32).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(y_NA, y, first, 0), None

    start = as_varying(jnp.zeros((rows + size, width), x_NA.dtype), varying_axes(x_NA))
    y_NA, _ = lax.scan(step, start, _blocks(sizes_E, rows, size))
    return jnp.where((jnp.arange(rows) < sizes_E.sum())[:, None], y_NA[:rows], 0)


def _rows_with_rows(x_NI: Array, y_NO: Array, sizes_E: Array) -> Array:
    """Of each group, the sum over its rows of their outer products, float32 [E, I, O]."""
    rows, size = len(x_NI), rows_of_block(len(x_NI), len(sizes_E))
    x_filled, y_filled = (jnp.pad(array, ((0, size), (0, 0))) for array in (x_NI, y_NO))

    def step(sums_EIO: Array, block: tuple[Array, Array, Array]) -> tuple[Array, None]:
        group, first, own = block
        x, y = (lax.dynamic_slice_in_dim(array, first, size) for array in (x_filled, y_filled))
        x, y = (jnp.where((jnp.arange(size) < own)[:, None], array, 0) for array in (x, y))
        return sums_EIO.at[group].add(jnp.einsum("bI,bO->IO", x, y, preferred_element_type=jnp.float32)), None

    shape = len(sizes_E), x_NI.shape[1], y_NO.shape[1]
    start = as_varying(jnp.zeros(shape, jnp.float32), varying_axes(x_NI))
    return lax.scan(step, start, _blocks(sizes_E, rows, size))[0]


def _blocks(sizes_E: Array, rows: int, size: int) -> tuple[Array, Array, Array]:
    """Of each block its group, its first row and how many rows are the group's: as many blocks as there may be. Those
    that no group needs begin behind all rows."""
    count = (rows + len(sizes_E) * (size - 1)) // size
    needed_E = -(-sizes_E // size)
    last_E, ends_E = jnp.cumsum(needed_E), jnp.cumsum(sizes_E)
    number = jnp.arange(count)
    group = (number[:, None] >= last_E[None]).sum(axis=1)
    is_needed = group < len(sizes_E)
    group = jnp.minimum(group, len(sizes_E) - 1)
    first = (ends_E - sizes_E)[group] + (number - (last_E - needed_E)[group]) * size
    own = jnp.clip(ends_E[group] - first, 0, size)
    return group, jnp.where(is_needed, first, rows), jnp.where(is_needed, own, 0)
