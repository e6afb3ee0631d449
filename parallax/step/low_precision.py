"""Optimizer states and weights in fewer bits than float32, rounded stochastically.

A value between two neighbours of a dtype is rounded to either, to the nearer one more often, so that the mean of many
roundings is the value: an update that is too small for the last bit takes effect in some steps. The random bits depend
on the seed, the step, the parameter's name and the entry's index in the whole array, so they are the same on every
mesh.

Written here, since optax keeps a moment in another dtype by rounding to nearest (`mu_dtype`), and has no scaled blocks.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from parallax.errors import ConfigError
from parallax.sharding.layout import HEAD_DIMS, Layout, named_leaves
from parallax.sharding.parameter import ParameterSpec, Role
from parallax.sharding.rounding import random_bits, to_bfloat16

WEIGHTS_FIELD = "weights"  # used like a name of an optimizer's field
# The fields in which optax's transformations hold first and second moments, and the keys of their dtypes.
MOMENT_FIELDS = {"mu": "m_dtype", "trace": "m_dtype", "nu": "v_dtype"}
ROOTS = ("nu",)  # fields of squares, whose roots are stored in float8: squares span twice as many powers of two

# e4m3: 3 bits of mantissa, normal from 2**-6 on, 448 = 1.75 * 2**8 at most, no infinity.
E4M3 = jnp.float8_e4m3fn
E4M3_DROPPED, E4M3_NORMAL, E4M3_STEP, E4M3_EXPONENT, E4M3_MANTISSA = 20, 2.0**-6, 2.0**-9, 8, 0x600000
MANTISSA_BITS, MANTISSA, MAGNITUDE = 23, 0x7FFFFF, 0x7FFFFFFF  # of a float32

ENTRIES_OF_SCALE = 32  # most entries that share a scale
LEAST_PIECES = 8  # fewest blocks along a dim that a mesh may shard
LEAST_BLOCK = 8  # entries; smaller blocks save little, since each has a scale


class Blocks(NamedTuple):
    """An array in float8: each entry is divided by the scale of its block, a power of two. Values and scales have the
    same number of dims, so they are sharded in the same way."""

    values: Array  # float8_e4m3fn
    scales: Array  # float32


def with_states_in(
    tx: optax.GradientTransformation, dtypes: Mapping[str, str], rows: Any, *, roots: Collection[str] = ROOTS
) -> Any:
    """A transformation that computes `tx` in float32 and stores its states in other dtypes.

    Args:
        dtypes: "float32", "bfloat16" or "float8", by field of the states, as {"mu": "bfloat16", "nu": "float8"}. A
            field holds an array for each parameter: in a NamedTuple, or as an entry of a dict or a tuple.
        rows: those of the model's plan, which determine blocks: see `block_of`. A training step updates states in
            float8 layer by layer, so `tx` must work by entry or by a layer's matrix.
        roots: fields of squares, whose roots are stored in float8.
    Returns:
        An optax transformation whose `update` takes `noise`, int32 [2], (seed, step), and, if arrays hold only some of
        the layers, `layers`: see `random_bits`. Its `init` raises ConfigError if `tx` keeps nothing in a field, or, for
        float8, arrays of other shapes than the parameters.
    """
    row_of = named_leaves(rows)
    inner = optax.with_extra_args_support(tx)

    def narrow(state: Any, before: Any, noise: Array, layers: Array | None = None) -> Any:
        def leaf(path: Any, x: Array, before: Any) -> Any:
            field, name = _place(path, row_of)
            dtype = dtypes.get(field, "float32")
            if dtype == "float32" or x.dtype != jnp.float32:
                return x
            if not x.size:  # of layers of another turn: see update_by_layer
                return before
            block = block_of(row_of[name].spec, row_of[name].at_rest, x.shape) if dtype == "float8" else ()
            block = shape_of_blocks(before) if isinstance(before, Blocks) else block
            if dtype == "float8" and not block:
                return x
            bits = random_bits(noise, field, name, x.shape, layers)
            return to_float8(x, bits, block, root=field in roots) if block else to_bfloat16(x, bits)

        return jax.tree_util.tree_map_with_path(leaf, state, before)

    def widen(state: Any) -> Any:
        def leaf(path: Any, x: Any) -> Array:
            field, _ = _place(path, row_of)
            if isinstance(x, Blocks):
                return from_float8(x, root=field in roots)
            narrow = dtypes.get(field, "float32") != "float32" and x.dtype == jnp.bfloat16
            return x.astype(jnp.float32) if narrow else x

        return jax.tree_util.tree_map_with_path(leaf, state, is_leaf=lambda x: isinstance(x, Blocks))

    def init(params: Any) -> Any:
        state = inner.init(params)
        _check_fields(state, params, dtypes)
        return narrow(state, state, jnp.zeros(2, jnp.int32))

    def update(
        grads: Any, state: Any, params: Any = None, *, noise: Array, layers: Array | None = None, **others: Any
    ) -> tuple[Any, Any]:
        updates, wide = inner.update(grads, widen(state), params, **others)
        return updates, narrow(wide, state, noise, layers)

    return optax.GradientTransformationExtraArgs(init, update)


def _place(path: Any, names: Collection[str]) -> tuple[str, str]:
    """The field that contains a leaf of an optimizer's state, and the parameter's name, one of `names`; "" for a leaf
    that belongs to no parameter."""
    for start in range(1, len(path)):
        if (name := jax.tree_util.keystr(path[start:], simple=True, separator="/")) in names:
            return jax.tree_util.keystr(path[start - 1 : start], simple=True), name
    return "", ""


def _check_fields(state: Any, params: Any, dtypes: Mapping[str, str]) -> None:
    """Raise ConfigError if a dtype has no effect on a state, or cannot hold its arrays."""
    shape_of, shapes_by_field = {name: x.shape for name, x in named_leaves(params).items()}, {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        field, name = _place(path, shape_of)
        if field and x.dtype == jnp.float32:
            shapes_by_field.setdefault(field, {})[name] = x.shape
    fields: dict[str, list[str]] = {}
    for field in dtypes:
        fields.setdefault(MOMENT_FIELDS.get(field, field), []).append(field)
    for names in fields.values():
        dtype, kept = dtypes[names[0]], [shapes for field, shapes in shapes_by_field.items() if field in names]
        said = _said(names[0], dtype)
        if dtype != "float32" and not kept:
            raise ConfigError(
                f"{said} has no effect on this optimizer: it keeps nothing in {' or '.join(names)}, but "
                f"{'in ' + ', '.join(shapes_by_field) if shapes_by_field else 'no array for a parameter'}; use "
                "'float32', or wrap it in with_states_in, with the names of its fields."
            )
        others = [(name, shape) for shapes in kept for name, shape in shapes.items() if shape != shape_of[name]]
        if dtype == "float8" and others:
            name, shape = others[0]
            raise ConfigError(
                f"{said} needs arrays of the parameters' shapes, and this optimizer keeps {list(shape)} for {name}, "
                f"which is {list(shape_of[name])}; use 'bfloat16'."
            )


def _said(field: str, dtype: str) -> str:
    """The setting, or the argument of `with_states_in`, that gives a field this dtype."""
    return f"optimizer.{MOMENT_FIELDS[field]}={dtype!r}" if field in MOMENT_FIELDS else f"{field}={dtype!r}"


# ---- weights


def widened(params: Any) -> Any:
    """Parameters in float32; float32 ones are unchanged."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, params)


def narrowed(params: Any, like: Any, noise: Array, layers: Array | None = None) -> Any:
    """Parameters in the dtypes of `like`, a tree of the same structure; `noise` is int32 [2], (seed, step)."""

    def leaf(path: Any, x: Array, old: Array) -> Array:
        if x.dtype == old.dtype:
            return x
        if not x.size:
            return old
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return to_bfloat16(x, random_bits(noise, WEIGHTS_FIELD, name, x.shape, layers))

    return jax.tree_util.tree_map_with_path(leaf, params, like)


# ---- rounding to 8 bits


def to_e4m3(x: Array, bits: Array) -> Array:
    """Round each entry, of at most 448, to a neighbour in e4m3 by 20 random bits; non-finite entries become NaN.

    Below 2**-6, where neighbours differ by 2**-9, entries are first rounded to multiples of 2**-29.
    """
    word, noise = lax.bitcast_convert_type(x, jnp.uint32) & MAGNITUDE, bits >> (32 - E4M3_DROPPED)
    normal = lax.bitcast_convert_type((word + noise) >> E4M3_DROPPED << E4M3_DROPPED, jnp.float32)
    fixed = (jnp.minimum(jnp.abs(x), E4M3_NORMAL) * (2**E4M3_DROPPED / E4M3_STEP)).astype(jnp.uint32)
    small = ((fixed + noise) >> E4M3_DROPPED).astype(jnp.float32) * E4M3_STEP
    rounded = jnp.where(jnp.abs(x) < E4M3_NORMAL, small, normal)
    return jnp.where(jnp.isfinite(x), jnp.where(x < 0, -rounded, rounded), jnp.nan).astype(E4M3)


def to_float8(x: Array, bits: Array, block: tuple[int, ...], *, root: bool = False) -> Blocks:
    """Blocks of this shape, each divided by the smallest power of two that brings its largest entry to 448 or less.

    With `root` the root of each entry is stored; none may be negative. Nonzero values never round to 0 then, but to the
    smallest positive number, so that division by them stays finite.
    """
    # Arrays have two dims for each dim: then XLA fuses everything and does not broadcast scales to all entries in
    # memory.
    parts = _in_blocks(jnp.sqrt(x) if root else x, block)
    largest = lax.bitcast_convert_type(jnp.abs(parts).max(_of_block(x.ndim), keepdims=True), jnp.uint32)
    above = (largest & MANTISSA) > E4M3_MANTISSA
    exponent = jnp.maximum((largest >> MANTISSA_BITS).astype(jnp.int32) - E4M3_EXPONENT + above, 1)

    def power_of_two(exponent: Array) -> Array:
        return lax.bitcast_convert_type(exponent << MANTISSA_BITS, jnp.float32)

    values = to_e4m3(parts * power_of_two(254 - exponent), _in_blocks(bits, block))
    if root:
        values = jnp.where((parts > 0) & (values == 0), jnp.asarray(E4M3_STEP, E4M3), values)
    return Blocks(values.reshape(x.shape), power_of_two(exponent).squeeze(_of_block(x.ndim)))


def from_float8(x: Blocks, *, root: bool = False) -> Array:
    """The inverse of `to_float8`, in float32."""
    block = shape_of_blocks(x)
    scales = jnp.expand_dims(x.scales, _of_block(x.scales.ndim))
    wide = (_in_blocks(x.values, block).astype(jnp.float32) * scales).reshape(x.values.shape)
    return jnp.square(wide) if root else wide


def shape_of_blocks(x: Blocks) -> tuple[int, ...]:
    """Along each dim how many entries share a scale; 1 where there are none, as in an update of other layers."""
    return tuple(size // max(count, 1) or 1 for size, count in zip(x.values.shape, x.scales.shape, strict=True))


def _in_blocks(x: Array, block: tuple[int, ...]) -> Array:
    """Split each dim in two: index of the block, and index in the block."""
    sizes = [part for size, entries in zip(x.shape, block, strict=True) for part in (size // entries, entries)]
    return x.reshape(sizes)


def _of_block(dims: int) -> tuple[int, ...]:
    """The dims of `_in_blocks` that are indices in a block."""
    return tuple(range(1, 2 * dims, 2))


# ---- blocks


def block_of(spec: ParameterSpec, layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Number of entries of a parameter that share a scale, along each dim: up to 32 along one dim. () for scales of
    norms and for shapes that are too small or do not divide, which stay in float32.

    It depends on the whole shape only, so that it is the same on every mesh. The last dim is used only if no other is
    suitable: on TPU it is in lanes, where this takes twice as long. In tables it is used always, since data axes shard
    the vocab, often into pieces that blocks do not divide.

    >>> kernel, norm = (ParameterSpec(role, stack="blocks") for role in (Role.WEIGHT, Role.NORM))
    >>> block_of(kernel, Layout.parse("layers d_model d_ff"), (4, 2048, 5632))
    (1, 32, 1)
    >>> block_of(norm, Layout.parse("layers d_model"), (4, 2048))
    ()
    >>> block_of(ParameterSpec(Role.TABLE), Layout.parse("vocab d_model"), (32000, 768))
    (1, 32)
    """
    first, last = spec.stacked(layout), len(shape) - 1
    if last <= first:
        return ()
    first += spec.role == Role.TABLE

    def entries(dim: int) -> int:
        """The largest power of two that divides the dim and leaves enough blocks for a mesh to shard."""
        least = 1 if layout.names[dim] in HEAD_DIMS else LEAST_PIECES
        size = ENTRIES_OF_SCALE
        while size > 1 and (shape[dim] % size or shape[dim] // size < least):
            size //= 2
        return size

    def rank(dim: int) -> tuple[Any, ...]:
        return entries(dim) >= LEAST_BLOCK, dim < last, layout.names[dim] in HEAD_DIMS, entries(dim), shape[dim]

    best = max(range(first, len(shape)), key=rank)
    if entries(best) < LEAST_BLOCK:
        return ()
    return tuple(entries(dim) if dim == best else 1 for dim in range(len(shape)))


def has_blocks(opt_state: Any) -> bool:
    """Whether a state has arrays in float8."""
    return any(isinstance(x, Blocks) for x in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, Blocks)))


def check_blocks(opt_state: Any, shardings: Any) -> None:
    """Raise ConfigError if a mesh divides blocks of a state, a tree of shapes; `shardings` are those of the
    parameters."""
    sharding_of = named_leaves(shardings)
    for path, x in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=lambda x: isinstance(x, Blocks)):
        if not isinstance(x, Blocks):
            continue
        field, name = _place(path, sharding_of)
        key, sharding = MOMENT_FIELDS.get(field, field), sharding_of[name]
        pieces = [whole // local for whole, local in zip(x.values.shape, sharding.shard_shape(x.values.shape))]
        for size, blocks, count, cut in zip(
            x.values.shape, x.scales.shape, pieces, [*sharding.spec, *[None] * len(pieces)]
        ):
            if blocks % count:
                axes = cut if isinstance(cut, tuple) else (cut,)
                over = " x ".join(f"mesh.{axis}={sharding.mesh.shape[axis]}" for axis in axes)
                raise ConfigError(
                    f"{_said(field, 'float8')} has blocks of {size // blocks} along a dim of {name} of size {size}, "
                    f"which {over} shards into pieces of {size // count}; use {key}='bfloat16', or a mesh that shards "
                    f"it into {blocks} pieces or a divisor of that."
                )
