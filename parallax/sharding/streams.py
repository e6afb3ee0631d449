"""Token streams: a gather whose pieces are multiplied as they arrive, and a sum that leaves piece by piece.

Between a gather of tokens over tp and the reduce-scatter of their sums, all but attention works on each token for
itself. So the pieces need not be one array. A rank multiplies its own tokens while it sends them to both neighbours,
then those that have arrived, which it passes on; partial sums go back the same way, and each rank adds its own. Links
of both directions send the same bytes: of the rank halfway around a ring each brings half of the tokens. So tokens are
sent in halves: nothing is cut to be passed on, and one half of the sums leaves while the other waits for those from
farther away. Compilers for TPU overlap these permutes with the products, but not a gather or a reduce-scatter in a
loop.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from parallax.errors import NotationError
from parallax.sharding.collectives import as_varying, is_bound, reshard, to_next_rank, vary_alike
from parallax.sharding.layout import Layout, check_rank, parse_move

STREAM_AXIS, SEQ_DIM = "tp", 1  # of activations [B, S, ...]


class TokenPiece(NamedTuple):
    """Tokens of the rank that is so many ranks before this one around the ring, negative after it."""

    step: int
    half: int | None = None  # 0 or 1; None for all tokens of that rank

    def tokens(self, of_rank: int) -> tuple[int, int]:
        """The first of these among so many tokens of a rank, and the one after the last."""
        if self.half is None:
            return 0, of_rank
        return (0, of_rank // 2) if self.half == 0 else (of_rank // 2, of_rank)


class Streams(NamedTuple):
    """The tokens of all tp ranks, as arrays [B, tokens, ...], one for each of `pieces_of`."""

    pieces: tuple[Array, ...]


def pieces_of(ranks: int) -> list[TokenPiece]:
    """The tokens of all ranks, of the nearest ranks first, in the order in which they are sent. If there is a rank
    halfway around, and it is not a neighbour, one half of its tokens comes from either side, and all ranks send halves.

    >>> [piece.step for piece in pieces_of(3)]
    [0, 1, -1]
    >>> [tuple(piece) for piece in pieces_of(4)]
    [(0, None), (1, 1), (-1, 0), (1, 0), (-1, 1), (2, 1), (-2, 0)]
    """
    mine, distances = TokenPiece(0), range(1, (ranks + 1) // 2)
    if ranks == 2:
        return [mine, TokenPiece(1)]
    if ranks % 2:
        return [mine, *(TokenPiece(step) for distance in distances for step in (distance, -distance))]
    there = [(1, 1), (-1, 0)]  # directions, and the half that goes on to the rank halfway around
    both = [*there, (1, 0), (-1, 1)]
    near = [TokenPiece(sign * distance, half) for distance in distances for sign, half in both]
    return [mine, *near, *(TokenPiece(sign * ranks // 2, half) for sign, half in there)]


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
    others = pieces_of(_ranks())[1:]
    # Cut for each direction, so that the gradients that arrive are added direction by direction, too: see `_joined`.
    sent = {(direction, piece): tokens for direction in (1, -1) for piece, tokens in _cut(x, direction, others).items()}
    for piece in others:
        direction = int(np.sign(piece.step))
        arrived = sent[direction, piece._replace(step=piece.step - direction)]
        sent[direction, piece] = to_next_rank(arrived, STREAM_AXIS, by=direction)
    return Streams((x, *(sent[int(np.sign(piece.step)), piece] for piece in others)))


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
    mine, *others = pieces_of(_ranks())
    sums = dict(zip((mine, *others), x.pieces, strict=True))
    of_mine: dict[int, dict[TokenPiece, Array]] = {}  # by direction
    for piece in reversed(others):
        direction = int(np.sign(piece.step))
        arrived = to_next_rank(sums[piece], STREAM_AXIS, by=-direction)
        here = piece._replace(step=piece.step - direction)
        if here.step == 0:
            of_mine.setdefault(direction, {})[here] = arrived
        else:
            sums[here] = sums[here] + arrived
    return sum(map(_joined, of_mine.values()), sums[mine])


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
    for piece, value in zip(pieces_of(_ranks()), pieces, strict=True):
        whole = lax.dynamic_update_slice(whole, value[:, None], _place(piece, whole))
    return whole.reshape(rows, -1, *dims)


@jax.custom_vjp
def _apart(x: Array) -> tuple[Array, ...]:
    """The transpose, which is the inverse."""
    by_rank = x.reshape(x.shape[0], _ranks(), -1, *x.shape[2:])
    rows, _, tokens, *dims = by_rank.shape

    def value(piece: TokenPiece) -> Array:
        first, last = piece.tokens(tokens)
        return lax.dynamic_slice(by_rank, _place(piece, by_rank), (rows, 1, last - first, *dims))[:, 0]

    return tuple(map(value, pieces_of(_ranks())))


# Of JAX's own derivatives each would write zeros over a copy of all tokens for every piece.
_in_order.defvjp(lambda pieces: (_in_order(pieces), None), lambda _, dy: (_apart(dy),))
_apart.defvjp(lambda x: (_apart(x), None), lambda _, dy: (_in_order(dy),))


def _place(piece: TokenPiece, by_rank: Array) -> tuple[Array | int, ...]:
    """Where a piece begins in an array [B, rank, tokens, ...]."""
    first, _ = piece.tokens(by_rank.shape[2])
    return (0, (lax.axis_index(STREAM_AXIS) - piece.step) % _ranks(), first) + (0,) * (by_rank.ndim - 3)


def _cut(x: Array, direction: int, others: list[TokenPiece]) -> dict[TokenPiece, Array]:
    """A rank's tokens [B, tokens, ...] in the pieces that it sends to the next rank in this direction."""
    pieces = sorted(piece._replace(step=0) for piece in others if piece.step == direction)
    if len(pieces) < 2:
        return dict.fromkeys(pieces, x)
    ends = [piece.tokens(x.shape[SEQ_DIM]) for piece in pieces]
    return dict(zip(pieces, lax.split(x, [last - first for first, last in ends], SEQ_DIM), strict=True))


def _joined(pieces: dict[TokenPiece, Array]) -> Array:
    """A rank's tokens of all its pieces. Of what each direction brings, compilers for TPU add this up within the
    product of the rank's tokens. What both bring of a piece, added first, was another pass over memory."""
    return jnp.concatenate([pieces[piece] for piece in sorted(pieces)], SEQ_DIM)


def _ranks() -> int:
    return lax.axis_size(STREAM_AXIS) if is_bound(STREAM_AXIS) else 1


def _check_is_of_tokens(pattern: str, cut: Layout, whole: Layout) -> None:
    if {*cut.used_axes()} - {*whole.used_axes()} != {STREAM_AXIS} or cut.cut_of("seq")[-1:] != (STREAM_AXIS,):
        raise NotationError(f"{pattern!r}: streams are of tokens; {STREAM_AXIS} must shard seq, before or after.")
