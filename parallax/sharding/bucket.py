"""Buckets: arrays of a layer that are sent in one message. Each piece is bitwise what it would be alone."""

import math
import posixpath
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from einops import pack, unpack
from jax import Array

from parallax.sharding.collectives import all_gather
from parallax.sharding.layout import Layout, parse_move

# What FsdpConfig.bucket says goes together; BY_LAYER is also the scope, in traces, of arrays of several modules.
BY_PARAMETER, BY_MODULE, BY_LAYER = "parameter", "module", "layer"


class Shipment(NamedTuple):
    """An array that moves from one layout to the other, or back: its module, as "attention/q", and the dtype in which
    it is sent."""

    scope: str
    sharded: Layout
    whole: Layout
    dtype: str | None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which it moves, those of one dim; () if several dims move."""
        moved = _moved(self.sharded, self.whole)
        return moved[0][1] if len(moved) == 1 else ()


class Bucket(NamedTuple):
    """What one message has: indices of its arrays, and its scope, the module in which all of them are."""

    scope: str
    members: tuple[int, ...]


def buckets(unit: str, arrays: Mapping[int, Shipment], ranks: Callable[[Sequence[str]], int]) -> list[Bucket]:
    """The messages of these arrays by number, in order of their first ones. `unit` is as FsdpConfig.bucket; `ranks` is
    the number of ranks along axes.

    Arrays go together that move over the same axes in the same dtype. One that moves in several dims stays alone, and
    so does one whose axes have one rank, which sends nothing.

    >>> kernels = {"mlp/up": "d_model/dp d_ff", "mlp/down": "d_ff d_model/dp", "attention/out": "d_head d_model/dp"}
    >>> moves = [(name, Layout.parse(text), Layout.parse(text).without("dp")) for name, text in kernels.items()]
    >>> arrays = {index: Shipment(*move, "bfloat16") for index, move in enumerate(moves)}
    >>> [[*map(tuple, buckets(unit, arrays, lambda axes: 2))] for unit in ("module", "layer")]
    [[('mlp', (0, 1)), ('attention/out', (2,))], [('layer', (0, 1, 2))]]
    """
    together: dict[tuple, list[int]] = defaultdict(list)
    for number, array in arrays.items():
        module = array.scope.split("/")[0] if unit == BY_MODULE else ""
        alone = unit == BY_PARAMETER or ranks(array.axes) == 1
        together[(number,) if alone else (module, array.axes, array.dtype)].append(number)
    return [Bucket(_common([arrays[index].scope for index in members]), (*members,)) for members in together.values()]


def gather_together(patterns: Sequence[str], arrays: Sequence[Array], first: Callable) -> list[Array]:
    """`all_gather` of several arrays in one message; `first` as there. They lose the same axes, each in one dim.

    Communication:
        forward   all_gather of all of them over the axes that go
        backward  the transposes
    """
    if len(arrays) == 1:
        return [all_gather(patterns[0], arrays[0], first=first)]
    dims, axes = _dims_and_axes(map(parse_move, patterns))
    flat, shapes = _packed(arrays, dims)
    return _apart(all_gather(f"rows/{axes} entries -> rows entries", flat, first=first), shapes, dims)


def scatter_together(scatter: Callable, patterns: Sequence[str], arrays: Sequence[Array]) -> list[Array]:
    """The same for `scatter`, which is `reduce_scatter` or `exchange_and_add`: sums of several arrays in one message.

    Communication:
        forward   reduce_scatter or all_to_all of all of them over the axes that come
        backward  the transposes
    """
    if len(arrays) == 1:
        return [scatter(patterns[0], arrays[0])]
    dims, axes = _dims_and_axes(reversed(parse_move(pattern)) for pattern in patterns)
    flat, shapes = _packed(arrays, dims)
    return _apart(scatter(f"rows entries -> rows/{axes} entries", flat), shapes, dims)


def _packed(arrays: Sequence[Array], dims: Sequence[int]) -> tuple[Array, list]:
    """Arrays beside each other in one matrix, whose rows are parts of these dims, and what `_apart` needs. Cutting one
    long row apart takes TPU much longer (docs/dp.md)."""
    first = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    rows = math.gcd(*(len(x) for x in first))
    return pack([x.reshape(rows, -1, *x.shape[1:]) for x in first], "rows *")


def _apart(flat: Array, shapes: list, dims: Sequence[int]) -> list[Array]:
    """The arrays again, of which each may have more rows or fewer."""
    first = (x.reshape(-1, *x.shape[2:]) for x in unpack(flat, shapes, "rows *"))
    return [jnp.moveaxis(x, 0, dim) for x, dim in zip(first, dims, strict=True)]


def _moved(sharded: Layout, whole: Layout) -> list[tuple[int, tuple[str, ...]]]:
    """The dims that are not sharded alike, and the last axes that only the first layout has; () if it has others."""
    pairs = enumerate(zip(sharded.axes, whole.axes, strict=True))
    return [(dim, cut[len(kept) :] if cut[: len(kept)] == kept else ()) for dim, (cut, kept) in pairs if cut != kept]


def _dims_and_axes(moves: Iterable[Iterable[Layout]]) -> tuple[list[int], str]:
    """The dim of each array that moves between a sharded layout and a whole one, and the axes, as in the notation."""
    dims, axes = zip(*(_moved(*move)[0] for move in moves), strict=True)
    assert len({*axes}) == 1, axes
    return [*dims], "/".join(axes[0])


def _common(scopes: Sequence[str]) -> str:
    """The module in which all these are, as "mlp" of "mlp/up" and "mlp/down"."""
    return scopes[0] if len(scopes) == 1 else posixpath.commonpath(scopes) or BY_LAYER
