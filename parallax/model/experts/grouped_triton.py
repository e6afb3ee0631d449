"""Grouped products on GPUs: kernels for Triton, in tiles of rows of one group.

Rows are sorted by group. A tile begins with a row of its group, so that only the last one of a group has room to spare.
Which group a tile is of follows from the groups' sizes; tiles that no group needs end at once. Rows after the last
group are a group without a matrix, whose results are 0. Sums are float32.

For gated experts a kernel computes gate, up and the input of down from rows that it reads once, and another adds up the
gradients of rows from gate and up: XLA fuses nothing with a kernel, so each would be a pass over memory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from parallax.errors import ConfigError
from parallax.hardware.chips import BEFORE_AMPERE, chip
from parallax.model.experts.grouped_kernel import GROUPED_SCOPE, gated
from parallax.model.experts.rows import blocks_of_groups
from parallax.model.kernels.pallas import unchecked
from parallax.model.mlp import ACTIVATIONS, SWIGLU, Activation
from parallax.model.products import Operand
from parallax.sharding.platform import device_kind_planned, platform_planned, platform_traced

WHOLE_READ = 16  # of which dims are multiples: then rows are read 16 bytes at once, and products are whole
# Of a tile, and how much of the contracted dim is read at once. None is less than the last, the least of products.
TILE_ROWS, TILE_COLUMNS, TILE_INNER, LEAST_OF_TILE = 128, 256, 64, 16
# Chips on which a core's shared memory has no room for three reads of such a tile's factors have half of its columns.
SHARED_KIB = 160
# Activations that Pallas lowers to Triton: it has no error function, which "gelu" needs.
IN_TILES = {*ACTIVATIONS, "clamped"} - {"gelu"}
WARPS, STAGES = 8, 3  # Hopper multiplies 64 rows by four warps
BAND = 8  # tiles of rows that run beside all tiles of columns, so that both are read from the cache


class Tile(NamedTuple):
    """Rows and columns of a program's result, and how much of the contracted dim it reads at once."""

    rows: int
    columns: int
    inner: int


def tile_of(rows: int, groups: int, columns: int, inner: int, *, products: int = 1) -> Tile:
    """The tile for groups with so many rows in all and matrices of these dims: lower if groups have few rows.

    `products` share a program's registers.

    >>> tile_of(16384, 8, 4096, 2048), tile_of(256, 8, 20, 12)
    (Tile(rows=128, columns=128, inner=64), Tile(rows=32, columns=32, inner=16))
    """
    widest = TILE_COLUMNS // products if _shared_kib() >= SHARED_KIB else TILE_COLUMNS // 2 // products
    return Tile(_side(-(-rows // groups), TILE_ROWS), _side(columns, widest), _side(inner, TILE_INNER))


def _shared_kib() -> int:
    """Shared memory of a core; 0 if it is not known."""
    try:
        target = chip(device_kind_planned()).target
    except ConfigError:
        return 0
    return target.shared_kib if target else 0


def _side(width: int, most: int) -> int:
    return min(most, max(LEAST_OF_TILE, pl.next_power_of_2(width)))


def fits_triton(x: Operand, other: Array) -> bool:
    """Whether these kernels multiply the rows fast with the other factor, matrices or rows: the program is traced or
    planned for GPUs with bfloat16, both are of one dtype of 16 bits, and dims but that of rows are multiples of 16."""
    if platform_planned() != "gpu" or any(name in device_kind_planned() for name in BEFORE_AMPERE):
        return False
    dtype, widths = x.values.dtype, (x.values.shape[1], *other.shape[1:])
    is_fit = x.unit is None and dtype.itemsize == 2 and dtype == other.dtype
    return is_fit and all(width % WHOLE_READ == 0 for width in widths)


def rows_by_group(
    lefts: Sequence[Array], matrices: Sequence[Array], sizes_E: Array, *, transposed: bool = False, dtype: Any = None
) -> Array:
    """The sum of rows [N, I] times their group's matrices [E, I, O], [N, O] in this dtype or the rows'; or times the
    transposed matrices [E, O, I]. Each left side has its matrix. Rows after the last group give 0. No communication.
    """
    (rows, inner), columns = lefts[0].shape, matrices[0].shape[1 if transposed else 2]
    tile = tile_of(rows, len(sizes_E), columns, inner)
    result = jax.ShapeDtypeStruct((rows, columns), dtype or lefts[0].dtype)

    def run(sizes_E: Array, *arrays: Array) -> Array:
        kernel = functools.partial(_rows_kernel, tile=tile, transposed=transposed)
        return _for_row_tiles(kernel, "gmm_rows", tile, result, sizes_E, arrays)

    with jax.named_scope(GROUPED_SCOPE):
        return unchecked(run, sizes_E, *lefts, *matrices)


def gated_in_tiles(
    x_ND: Array,
    gate_EDU: Array,
    up_EDU: Array,
    weight_N1: Array,
    sizes_E: Array,
    activation: Activation = SWIGLU,
    biases_EU: Sequence[Array] = (),
) -> tuple[Array, Array, Array]:
    """Rows times their group's gate and up matrices, and `gated` of both, all [N, U] in x's dtype. `biases_EU` are of
    gate and up if they have some. Rows after the last group give 0. No communication."""
    columns = gate_EDU.shape[2]
    tile = tile_of(len(x_ND), len(sizes_E), columns, x_ND.shape[1], products=2)
    result = jax.ShapeDtypeStruct((len(x_ND), columns), x_ND.dtype)

    def run(sizes_E: Array, *arrays: Array) -> tuple[Array, Array, Array]:
        kernel = functools.partial(_gated_kernel, tile=tile, activation=activation)
        return _for_row_tiles(kernel, "gmm_gated", tile, 3 * (result,), sizes_E, arrays)

    with jax.named_scope(GROUPED_SCOPE):
        return unchecked(run, sizes_E, x_ND, gate_EDU, up_EDU, weight_N1, *biases_EU)


def input_gradient_in_tiles(d_gate_NU: Array, d_up_NU: Array, gate_EDU: Array, up_EDU: Array, sizes_E: Array) -> Array:
    """The sum of both gradients times their group's matrices transposed, [N, D] in their dtype. No communication."""
    return rows_by_group([d_gate_NU, d_up_NU], [gate_EDU, up_EDU], sizes_E, transposed=True)


def sums_by_group(x_NI: Array, y_NO: Array, sizes_E: Array, others_EIO: Array | None = None) -> Array:
    """Sum of the others and over each group's rows of their outer products, [E, I, O] in x's dtype."""
    (rows, high), wide = x_NI.shape, y_NO.shape[1]
    groups = len(sizes_E)
    tile = tile_of(groups * high, groups, wide, rows)
    result = jax.ShapeDtypeStruct((groups, high, wide), x_NI.dtype)
    grid = pl.cdiv(high, tile.rows) * pl.cdiv(wide, tile.columns), groups

    def run(sizes_E: Array, *arrays: Array) -> Array:
        firsts_E = jnp.cumsum(sizes_E) - sizes_E
        kernel = functools.partial(_sums_kernel, tile=tile)
        return _call(kernel, "gmm_sums", grid, result, arrays)(firsts_E, sizes_E, *arrays)

    with jax.named_scope(GROUPED_SCOPE):
        return unchecked(run, sizes_E, x_NI, y_NO, *(() if others_EIO is None else [others_EIO]))


def _for_row_tiles(
    kernel: Callable, name: str, tile: Tile, results: Any, sizes_E: Array, arrays: Sequence[Array]
) -> Any:
    """The kernel's results; it gets of each tile of rows its group, its first row and the rows of its group."""
    rows, columns = jax.tree.leaves(results)[0].shape
    rest = rows - sizes_E.sum(keepdims=True)
    tables = blocks_of_groups(jnp.concatenate([sizes_E, rest]), rows, tile.rows)
    grid = (len(tables[0]) * pl.cdiv(columns, tile.columns),)
    return _call(kernel, name, grid, results, arrays)(*tables, *arrays)


def _call(kernel: Callable, name: str, grid: tuple[int, ...], results: Any, arrays: Sequence[Array]) -> Callable:
    return pl.pallas_call(
        kernel,
        out_shape=results,
        grid=grid,
        # Each read of float32 takes twice the room.
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES if arrays[0].itemsize == 2 else 1),
        interpret=platform_traced() == "cpu",
        name=name,
    )


# ---- the programs


class Extent(NamedTuple):
    """Entries of a dim: the first, how many, and which of them are there; None if all are."""

    first: Any
    size: int
    is_there: Array | None = None

    @classmethod
    def of_block(cls, block: Any, size: int, width: int) -> "Extent":
        """A block of a dim of this width."""
        first = block * size
        return cls(first, size, jnp.arange(size) < width - first if width % size else None)

    @classmethod
    def of_some(cls, first: Any, size: int, count: Any) -> "Extent":
        """Of entries from the first on, `count` that are there."""
        return cls(first, size, jnp.arange(size) < count)


def _rows_kernel(groups_ref: Any, firsts_ref: Any, counts_ref: Any, *refs: Any, tile: Tile, transposed: bool) -> None:
    *factors, out_ref = refs
    pairs = list(zip(factors[: len(factors) // 2], factors[len(factors) // 2 :]))
    group, rows, columns = _tile_of_program(groups_ref, firsts_ref, counts_ref, out_ref, tile)
    total = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    for x_ref, w_ref in pairs:

        def step(k: Array, total: Array, x_ref: Any = x_ref, w_ref: Any = w_ref) -> Array:
            inner = Extent.of_block(k, tile.inner, x_ref.shape[1])
            w = _load(w_ref, columns, inner, group=group).T if transposed else _load(w_ref, inner, columns, group=group)
            return total + plgpu.dot(_load(x_ref, rows, inner), w)

        total = lax.fori_loop(0, _steps(group, x_ref, w_ref, tile), step, total)
    _store(out_ref, total, rows, columns)


def _gated_kernel(
    groups_ref: Any, firsts_ref: Any, counts_ref: Any, *refs: Any, tile: Tile, activation: Activation
) -> None:
    x_ref, gate_ref, up_ref, weight_ref, *biases, gate_out, up_out, hidden_out = refs
    group, rows, columns = _tile_of_program(groups_ref, firsts_ref, counts_ref, gate_out, tile)

    def step(k: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        inner = Extent.of_block(k, tile.inner, x_ref.shape[1])
        x = _load(x_ref, rows, inner)
        gate, up = (
            total + plgpu.dot(x, _load(ref, inner, columns, group=group))
            for total, ref in zip(totals, (gate_ref, up_ref), strict=True)
        )
        return gate, up

    zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    totals = lax.fori_loop(0, _steps(group, x_ref, gate_ref, tile), step, (zeros, zeros))
    if biases:
        left = (gate_out.shape[1] - columns.first) * _has_matrix(group, gate_ref)
        of_group = Extent.of_some(columns.first, columns.size, left)
        totals = [total + _load(ref, of_group, group=group)[None] for total, ref in zip(totals, biases)]
    gate, up = (total.astype(gate_out.dtype) for total in totals)
    weight = _load(weight_ref, rows, Extent(0, 1))
    for ref, value in ((gate_out, gate), (up_out, up), (hidden_out, gated(gate, up, weight, activation))):
        _store(ref, value, rows, columns)


def _sums_kernel(firsts_ref: Any, sizes_ref: Any, x_ref: Any, y_ref: Any, *refs: Any, tile: Tile) -> None:
    *others, out_ref = refs
    (_, high, wide), group = out_ref.shape, pl.program_id(1)
    row, column = _in_bands(pl.program_id(0), pl.cdiv(high, tile.rows), pl.cdiv(wide, tile.columns))
    inputs, outputs = Extent.of_block(row, tile.rows, high), Extent.of_block(column, tile.columns, wide)
    first, count = firsts_ref[group], sizes_ref[group]

    def step(k: Array, total: Array) -> Array:
        done = k * tile.inner
        rows = Extent.of_some(first + done, tile.inner, count - done)
        return total + plgpu.dot(_load(x_ref, rows, inputs).T, _load(y_ref, rows, outputs))

    zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    total = lax.fori_loop(0, lax.div(count + tile.inner - 1, tile.inner), step, zeros)
    for ref in others:
        total += _load(ref, inputs, outputs, group=group).astype(jnp.float32)
    _store(out_ref, total, inputs, outputs, group=group)


def _tile_of_program(
    groups_ref: Any, firsts_ref: Any, counts_ref: Any, out_ref: Any, tile: Tile
) -> tuple[Array, Extent, Extent]:
    """The group, the rows and the columns of a program."""
    columns = out_ref.shape[1]
    row, column = _in_bands(pl.program_id(0), groups_ref.shape[0], pl.cdiv(columns, tile.columns))
    rows = Extent.of_some(firsts_ref[row], tile.rows, counts_ref[row])
    return groups_ref[row], rows, Extent.of_block(column, tile.columns, columns)


def _in_bands(program: Array, rows: int, columns: int) -> tuple[Array, Array]:
    """The tile of rows and of columns of a program: a few rows beside all columns, then the next rows."""
    band, place = lax.div(program, BAND * columns), lax.rem(program, BAND * columns)
    high = jnp.minimum(rows - band * BAND, BAND)
    return band * BAND + lax.rem(place, high), lax.div(place, high)


def _steps(group: Array, x_ref: Any, w_ref: Any, tile: Tile) -> Array:
    """How often a program multiplies."""
    return _has_matrix(group, w_ref) * pl.cdiv(x_ref.shape[1], tile.inner)


def _has_matrix(group: Array, w_ref: Any) -> Array:
    """1, or 0 for rows after the last group; Pallas takes no conditional for the end of a loop."""
    return (group < w_ref.shape[0]).astype(jnp.int32)


def _load(ref: Any, *extents: Extent, group: Array | None = None) -> Array:
    """Entries of an array, 0 for those that are not there; of its `group` if it has one for each."""
    mask = _mask(extents)
    return plgpu.load(_entries(ref, extents, group), mask=mask, other=None if mask is None else 0.0)


def _store(ref: Any, value: Array, *extents: Extent, group: Array | None = None) -> None:
    plgpu.store(_entries(ref, extents, group), value.astype(ref.dtype), mask=_mask(extents))


def _entries(ref: Any, extents: Sequence[Extent], group: Array | None) -> Any:
    slices = [pl.ds(extent.first, extent.size) for extent in extents]
    return ref.at[tuple(slices if group is None else [group, *slices])]


def _mask(extents: Sequence[Extent]) -> Array | None:
    """Which entries are there, of one or two dims; None if all are."""
    shape, mask = tuple(extent.size for extent in extents), None
    for dim, extent in enumerate(extents):
        if extent.is_there is not None:
            dims = tuple(size if dim == other else 1 for other, size in enumerate(shape))
            along = jnp.broadcast_to(extent.is_there.reshape(dims), shape)
            mask = along if mask is None else mask & along
    return mask
