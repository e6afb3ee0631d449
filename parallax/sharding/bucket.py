"""Buckets: arrays of a layer that are sent in one message. Each piece is bitwise what it would be alone."""

import math
import posixpath
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from einops import pack, unpack
from jax import Array

from parallax.sharding.layout import Layout, parse_move

# What FsdpConfig.bucket says goes together; BY_LAYER is also the scope, in traces, of arrays of several modules.
BY_PARAMETER, BY_MODULE, BY_LAYER = "parameter", "module", "layer"


class Shipment(NamedTuple):
    """An array that moves from one layout to the other, or back: its module, as "attention/q", the dtype in which it is
    sent, and that to which the message rounds it, if it does."""

    scope: str
    sharded: Layout
    whole: Layout
    dtype: str | None
    rounded_to: str | None = None

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
        together[(number,) if alone else (module, array.axes, array.dtype, array.rounded_to)].append(number)
    return [Bucket(_common([arrays[index].scope for index in members]), (*members,)) for members in together.values()]


class Packed(NamedTuple):
    """Arrays that move together as one: the pattern of its move, and what `apart` needs of them."""

    pattern: str
    array: Array
    shapes: Sequence[Any] = ()
    dims: Sequence[int] = ()

    @classmethod
    def of(cls, patterns: Sequence[str], arrays: Sequence[Array]) -> "Packed":
        """Arrays with their moves, which gain or lose the same axes, each in one dim. One array is as it is; several
        lie beside each other in one matrix, whose rows are parts of these dims. Cutting one long row apart takes TPU
        much longer (docs/dp.md)."""
        if len(arrays) == 1:
            return cls(patterns[0], arrays[0])
        moves = [parse_move(pattern) for pattern in patterns]
        gathers = len(moves[0][0].used_axes()) > len(moves[0][1].used_axes())
        moved = [_moved(*(move if gathers else reversed(move)))[0] for move in moves]
        dims, cuts = zip(*moved, strict=True)
        assert len({*cuts}) == 1, cuts
        first = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
        rows = math.gcd(*(len(x) for x in first))
        matrix, shapes = pack([x.reshape(rows, -1, *x.shape[1:]) for x in first], "rows *")
        sharded, whole = f"rows/{'/'.join(cuts[0])} entries", "rows entries"
        return cls(f"{sharded} -> {whole}" if gathers else f"{whole} -> {sharded}", matrix, shapes, dims)

    def apart(self, moved: Array) -> list[Array]:
        """The arrays again, of which each may have more rows or fewer, from the one that was moved."""
        if not self.dims:
            return [moved]
        first = (x.reshape(-1, *x.shape[2:]) for x in unpack(moved, self.shapes, "rows *"))
        return [jnp.moveaxis(x, 0, dim) for x, dim in zip(first, self.dims, strict=True)]


def _moved(sharded: Layout, whole: Layout) -> list[tuple[int, tuple[str, ...]]]:
    """The dims that are not sharded alike, and the last axes that only the first layout has; () if it has others."""
    pairs = enumerate(zip(sharded.axes, whole.axes, strict=True))
    return [(dim, cut[len(kept) :] if cut[: len(kept)] == kept else ()) for dim, (cut, kept) in pairs if cut != kept]


def _common(scopes: Sequence[str]) -> str:
    """The module in which all these are, as "mlp" of "mlp/up" and "mlp/down"."""
    return scopes[0] if len(scopes) == 1 else posixpath.commonpath(scopes) or BY_LAYER
