"""Token streams: a gather whose pieces are multiplied as they arrive, and a sum that leaves piece by piece.

Between a gather of tokens over tp and the reduce-scatter of their sums, all but attention works on each token for
itself. So the pieces need not be one array. A rank multiplies its own tokens while it sends them to both neighbours,
then those that have arrived, which it passes on; partial sums go back the same way, and each rank adds its own. Links
of both directions send the same bytes: of the rank halfway around a ring each brings half of the tokens. Compilers for
TPU overlap these permutes with the products, but not a gather or a reduce-scatter in a loop.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from parallax.errors import NotationError
from parallax.sharding.collectives import as_varying, is_bound, permutes_wait, reshard, to_next_rank, vary_alike
from parallax.sharding.layout import Layout, check_rank, parse_move

STREAM_AXIS, SEQ_DIM = "tp", 1  # of activations [B, S, ...]


class Streams(NamedTuple):
    """The tokens of all tp ranks, as arrays [B, tokens, ...] of each, of the nearest ranks first: see `steps`."""

    pieces: tuple[Array, ...]


def steps(ranks: int) -> list[int]:
    """How many ranks before this one each piece's rank is, around the ring; negative after it. The rank halfway around
    has two pieces, one from either side, unless it is the neighbour on both.

    >>> steps(2), steps(3), steps(4)
    ([0, 1], [0, 1, -1], [0, 1, -1, 2, -2])
    """
    after = ranks // 2 if ranks > 2 else 0
    return sorted(range(-after, ranks // 2 + 1), key=lambda step: (abs(step), -step))


def gather_as_streams(pattern: str, x: Array) -> Streams:
    """`all_gather` of tokens over tp, as streams. Where tp is not bound there is one.

    Communication:
        forward   permute of x over tp
        backward  the transposes

    >>> import jax.numpy as jnp
    >>> len(gather_as_streams("batch seq/tp d_model -> batch seq d_model", jnp.ones((2, 3, 4))).pieces)
    1
    """
    before, after = parse_move(pattern)
    check_rank(pattern, before, x)
    _check_is_of_tokens(pattern, before, after)
    pieces = {0: x}
    for step in steps(_ranks())[1:]:
        direction = int(np.sign(step))
        sent = lax.slice_in_dim(pieces[step - direction], *_part(step, x.shape[SEQ_DIM]), axis=SEQ_DIM)
        pieces[step] = to_next_rank(sent, STREAM_AXIS, by=direction, apart=permutes_wait())
    return Streams((*pieces.values(),))


def reshard_streams(pattern: str, x: Array | Streams) -> Array | Streams:
    """`reshard`; partial sums of streams are reduce-scattered over seq, and streams without such sums stay as they are.

    Communication, sums of streams:
        forward   permute of the sums over tp
        backward  the transposes
    """
    if not isinstance(x, Streams):
        return reshard(pattern, x)
    before, after = parse_move(pattern)
    if before == after:
        return x
    _check_is_of_tokens(pattern, after, before.without(STREAM_AXIS))
    sums = dict(zip(steps(_ranks()), x.pieces, strict=True))
    for step in reversed([*sums][1:]):
        direction = int(np.sign(step))
        arrived = to_next_rank(sums[step], STREAM_AXIS, by=-direction, apart=permutes_wait())
        sums[step - direction] += _among_zeros(step, arrived, sums[step - direction].shape[SEQ_DIM])
    return sums[0]


def per_stream(function: Callable[..., Array], *arrays: Array | Streams) -> Array | Streams:
    """A function that works on each token for itself, of arrays, or of each stream.

    >>> per_stream(lambda x, y: x + y, Streams((1, 2)), Streams((10, 20)))
    Streams(pieces=(11, 22))
    """
    if not isinstance(arrays[0], Streams):
        return function(*arrays)
    return Streams(tuple(map(function, *(streams.pieces for streams in arrays))))


def tokens_in_order(x: Array | Streams) -> Array:
    """All tokens of streams in one array. No communication."""
    if not isinstance(x, Streams):
        return x
    pieces = vary_alike([as_varying(piece, [STREAM_AXIS]) for piece in x.pieces])
    return _in_order(tuple(pieces)) if len(pieces) > 1 else pieces[0]


def as_streams(x: Array) -> Streams:
    """The inverse of `tokens_in_order`. No communication."""
    return Streams(_apart(as_varying(x, [STREAM_AXIS])) if _ranks() > 1 else (x,))


@jax.custom_vjp
def _in_order(pieces: tuple[Array, ...]) -> Array:
    """Each piece at the place of its rank. Compilers let a product write its piece there."""
    rows, tokens, *dims = pieces[0].shape
    whole = lax.empty((rows, _ranks(), tokens, *dims), pieces[0].dtype)
    whole, *_ = vary_alike((whole, *pieces))
    for step, piece in zip(steps(_ranks()), pieces, strict=True):
        whole = lax.dynamic_update_slice(whole, piece[:, None], _place(step, whole))
    return whole.reshape(rows, -1, *dims)


@jax.custom_vjp
def _apart(x: Array) -> tuple[Array, ...]:
    """The transpose, which is the inverse."""
    by_rank = x.reshape(x.shape[0], _ranks(), -1, *x.shape[2:])
    rows, _, tokens, *dims = by_rank.shape

    def piece(step: int) -> Array:
        first, last = _part(step, tokens)
        return lax.dynamic_slice(by_rank, _place(step, by_rank), (rows, 1, last - first, *dims))[:, 0]

    return tuple(map(piece, steps(_ranks())))


# Of JAX's own derivatives each would write zeros over a copy of all tokens for every piece.
_in_order.defvjp(lambda pieces: (_in_order(pieces), None), lambda _, dy: (_apart(dy),))
_apart.defvjp(lambda x: (_apart(x), None), lambda _, dy: (_in_order(dy),))


def _place(step: int, by_rank: Array) -> tuple[Array | int, ...]:
    """Where a piece begins in an array [B, rank, tokens, ...]."""
    first, _ = _part(step, by_rank.shape[2])
    return (0, (lax.axis_index(STREAM_AXIS) - step) % _ranks(), first) + (0,) * (by_rank.ndim - 3)


def _part(step: int, tokens: int) -> tuple[int, int]:
    """Which of a rank's tokens a piece has: the first, and the one after the last."""
    if 2 * abs(step) < _ranks() or _ranks() == 2:
        return 0, tokens
    return (0, tokens // 2) if step > 0 else (tokens // 2, tokens)


def _among_zeros(step: int, x: Array, tokens: int) -> Array:
    """A piece among zeros for the tokens that it lacks."""
    first, last = _part(step, tokens)
    around = [(0, 0, 0)] * x.ndim
    around[SEQ_DIM] = first, tokens - last, 0
    return lax.pad(x, jnp.zeros((), x.dtype), around) if x.shape[SEQ_DIM] < tokens else x


def _ranks() -> int:
    return lax.axis_size(STREAM_AXIS) if is_bound(STREAM_AXIS) else 1


def _check_is_of_tokens(pattern: str, cut: Layout, whole: Layout) -> None:
    if {*cut.used_axes()} - {*whole.used_axes()} != {STREAM_AXIS} or cut.cut_of("seq")[-1:] != (STREAM_AXIS,):
        raise NotationError(f"{pattern!r}: streams are of tokens; {STREAM_AXIS} must shard seq, before or after.")
