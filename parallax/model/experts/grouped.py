"""Grouped products: of rows with the matrix of their group, as for a mixture's experts.

What goes in: rows, sorted by group; a matrix of each group; the number of rows of each group, which may leave over rows
at the end. What comes out: each row times its group's matrix (`grouped_dot`), or each group's sum of outer
products (`grouped_sums`), which is the gradient of its matrix. No expert computes rows of another. A vector of each
group, as a bias, is given to its rows by `grouped_rows`.

"blocks", in this file, is a loop over blocks of rows in plain JAX, for CPUs, and for GPUs what their kernels do not
take; "triton" are kernels for GPUs: parallax/model/experts/grouped_triton.py; "ragged_dot" is XLA's product and kernels
for TPUs: parallax/model/experts/grouped_kernel.py. Tests hold all to products of each group alone.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from parallax.model.experts.grouped_kernel import ragged_dot, ragged_sums
from parallax.model.experts.grouped_triton import fits_triton, rows_by_group, sums_by_group
from parallax.model.experts.rows import blocks_of_groups
from parallax.model.products import Operand, multiplied
from parallax.sharding.collectives import as_varying, vary_alike, varying_axes
from parallax.sharding.platform import platform_planned, platform_traced

FORMS = ("blocks", "ragged_dot", "triton")
LEAST_ROWS = 8
# The most rows of a block, and the fewest blocks of a group of even size. GPUs need large products, and each block
# copies its group's matrix, or is added to sums in memory: on one H100, 16,384 rows of 2048 to 8 groups of 4096 took
# 15.4 ms in blocks of 128, forward and backward, 6.1 ms in blocks of 512, and 9.7 ms as a ragged_dot, which XLA turns
# into products of all rows with all matrices there. As compiled for H100, priced by a roofline, 15,360 rows of 2880 to
# 4 groups of 2880 take 3.4 ms in blocks of 512 (two products and the sums), and 2.7 ms in blocks of 1024.
MOST_ROWS, PIECES = {"cpu": 128, "gpu": 1024}, {"cpu": 4, "gpu": 2}


def grouped_dot(
    x_NI: Array | Operand,
    w_EIO: Array | Operand,
    sizes_E: Array,
    *,
    transposed: bool = False,
    form: str | None = None,
    dtype: Any = None,
) -> Array:
    """Each row times its group's matrix, [N, O]; for rows [N, O], times the transposed matrix, [N, I]. The result has
    this dtype, or x's; sums are float32. For operands in 8 bits sums are int32 or float32. No communication.

    The first `sizes_E[0]` rows are of group 0, the next ones of group 1. Rows after the last group give 0. `form` is
    one of FORMS, with equal results. By default it is the fastest: "ragged_dot" on TPUs, which have a kernel for it;
    elsewhere XLA turns that into products of all rows with all matrices. On GPUs "triton" if the rows are in 16 bits
    and dims are multiples of 16, else, and on CPUs, "blocks". ValueError for another form, or "triton" of 8 bits.

    >>> x, w = jnp.ones((3, 2)), jnp.stack([jnp.ones((2, 1)), 2 * jnp.ones((2, 1))])
    >>> grouped_dot(x, w, jnp.array([1, 1])).tolist()
    [[2.0], [4.0], [0.0]]
    """
    x, w = (array if isinstance(array, Operand) else Operand(array, None) for array in (x_NI, w_EIO))
    x, w, sizes_E = vary_alike((x, w, sizes_E.astype(jnp.int32)))
    form, dtype = _form_of(form, x, w.values), dtype or x.values.dtype
    if form == "triton":
        return rows_by_group([x.values], [w.values], sizes_E, transposed=transposed, dtype=dtype)
    product = _dot_in_blocks if form == "blocks" else ragged_dot
    return product(x, w, sizes_E, transposed, dtype)


def grouped_sums(
    x_NI: Array, y_NO: Array, sizes_E: Array, others_EIO: Array | None = None, *, form: str | None = None
) -> Array:
    """Sum over each group's rows of their outer products, [E, I, O] in x's dtype: the gradient of `grouped_dot`'s
    matrices. They are added to the `others`. Sums are float32. No communication.

    >>> x, y = jnp.ones((3, 1)), jnp.array([[1.0], [2.0], [4.0]])
    >>> grouped_sums(x, y, jnp.array([1, 1])).tolist()
    [[[1.0]], [[2.0]]]
    """
    arrays = vary_alike((x_NI, y_NO, sizes_E.astype(jnp.int32), others_EIO))
    form = _form_of(form, Operand(x_NI, None), y_NO)
    sums = {"blocks": _sums_in_blocks, "ragged_dot": ragged_sums, "triton": sums_by_group}[form]
    return sums(*arrays).astype(x_NI.dtype)


def grouped_rows(b_EO: Array, sizes_E: Array, rows: int) -> Array:
    """The vector of each row's group, [N, O]; 0 for rows after the last group. No communication.

    >>> grouped_rows(jnp.array([[1.0], [2.0]]), jnp.array([1, 2]), 4).tolist()
    [[1.0], [2.0], [2.0], [0.0]]
    """
    b_EO, sizes_E = vary_alike((b_EO, sizes_E))
    return jnp.einsum("NE,EO->NO", _is_of_group(sizes_E, rows).astype(b_EO.dtype), b_EO)


def sums_of_groups(y_NO: Array, sizes_E: Array, others_EO: Array | None = None) -> Array:
    """The sum of each group's rows, [E, O] in y's dtype: the gradient of `grouped_rows`' vectors. They are added to the
    `others`. Sums are float32. No communication."""
    y_NO, sizes_E, others_EO = vary_alike((y_NO, sizes_E, others_EO))
    in_use_NO = jnp.where((jnp.arange(len(y_NO)) < sizes_E.sum())[:, None], y_NO, 0)  # others may be undefined
    is_of_group = _is_of_group(sizes_E, len(y_NO)).astype(y_NO.dtype)
    sums_EO = jnp.einsum("NE,NO->EO", is_of_group, in_use_NO, preferred_element_type=jnp.float32)
    return (sums_EO if others_EO is None else sums_EO + others_EO).astype(y_NO.dtype)


def _is_of_group(sizes_E: Array, rows: int) -> Array:
    """Whether each row is one of each group, [N, E]: as a factor of a product, which every device computes fast and in
    one order."""
    ends_E, row = jnp.cumsum(sizes_E), jnp.arange(rows)[:, None]
    return (row >= (ends_E - sizes_E)[None]) & (row < ends_E[None])


def _form_of(form: str | None, x: Operand, other: Array) -> str:
    """This form, or the fastest one for rows and the other factor on the platform for which they are traced."""
    if form is not None and form not in FORMS:
        raise ValueError(f"form={form!r} is none of {', '.join(FORMS)}")
    if form == "triton" and (x.unit is not None or x.values.dtype != other.dtype):
        dtypes = f"{x.values.dtype.name} times {other.dtype.name}"
        raise ValueError(
            f"form='triton' does not multiply {dtypes}: both must be of one dtype, no 8-bit one; use 'blocks'"
        )
    if form is not None:
        return form
    if platform_planned() in ("tpu", ""):
        return "ragged_dot"
    return "triton" if fits_triton(x, other) else "blocks"


def rows_of_block(rows: int, groups: int) -> int:
    """Rows that are multiplied at once in the form "blocks": fewer if groups have few rows.

    >>> [rows_of_block(rows, groups=8) for rows in (8, 256, 2048, 8192)]
    [8, 8, 64, 128]
    """
    kind = "cpu" if platform_traced() == "cpu" else "gpu"
    size = LEAST_ROWS
    while size < MOST_ROWS[kind] and 2 * size * PIECES[kind] * groups <= rows:
        size *= 2
    return size


def _dot_in_blocks(x: Operand, w: Operand, sizes_E: Array, transposed: bool, dtype: Any) -> Array:
    """The product of each block with its group's matrix. A block that ends after its group's last row also writes rows
    of the next group, whose own blocks come later and overwrite them."""
    rows, size = len(x.values), rows_of_block(len(x.values), len(sizes_E))
    product, width = ("bO,IO->bI", w.values.shape[1]) if transposed else ("bI,IO->bO", w.values.shape[2])
    filled, unit = jnp.pad(x.values, ((0, size), (0, 0))), x.unit
    of_rows = unit is not None and unit.ndim > 0
    units = jnp.pad(unit, ((0, size), (0, 0))) if of_rows else None

    def step(y_NA: Array, block: tuple[Array, Array, Array]) -> tuple[Array, None]:
        group, first, _ = block
        part = Operand(
            lax.dynamic_slice_in_dim(filled, first, size),
            lax.dynamic_slice_in_dim(units, first, size) if of_rows else unit,
        )
        matrix = Operand(lax.dynamic_index_in_dim(w.values, group, keepdims=False), w.unit)
        if x.unit is None:
            y = jnp.einsum(product, part.values, matrix.values, preferred_element_type=jnp.float32).astype(dtype)
        else:
            y = multiplied(product, part, matrix, dtype)
        return lax.dynamic_update_slice_in_dim(y_NA, y, first, 0), None

    start = as_varying(jnp.zeros((rows + size, width), dtype), varying_axes(x.values))
    y_NA, _ = lax.scan(step, start, blocks_of_groups(sizes_E, rows, size))
    return jnp.where((jnp.arange(rows) < sizes_E.sum())[:, None], y_NA[:rows], 0)


def _sums_in_blocks(x_NI: Array, y_NO: Array, sizes_E: Array, others_EIO: Array | None) -> Array:
    """Sum of the others and over each group's rows of their outer products, float32 [E, I, O]."""
    rows, size = len(x_NI), rows_of_block(len(x_NI), len(sizes_E))
    x_filled, y_filled = (jnp.pad(array, ((0, size), (0, 0))) for array in (x_NI, y_NO))

    def step(sums_EIO: Array, block: tuple[Array, Array, Array]) -> tuple[Array, None]:
        group, first, count = block
        x, y = (lax.dynamic_slice_in_dim(array, first, size) for array in (x_filled, y_filled))
        x, y = (jnp.where((jnp.arange(size) < count)[:, None], array, 0) for array in (x, y))
        return sums_EIO.at[group].add(jnp.einsum("bI,bO->IO", x, y, preferred_element_type=jnp.float32)), None

    shape = len(sizes_E), x_NI.shape[1], y_NO.shape[1]
    start = jnp.zeros(shape, jnp.float32) if others_EIO is None else others_EIO.astype(jnp.float32)
    start = as_varying(start, varying_axes(x_NI))
    return lax.scan(step, start, blocks_of_groups(sizes_E, rows, size))[0]
