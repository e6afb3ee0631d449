"""Token streams: a gather whose pieces are multiplied as they arrive, and a sum that leaves piece by piece.

Between a gather of tokens over tp and the reduce-scatter of their sums, all but attention works on each token for
itself. So the pieces need not be one array. A rank multiplies its own tokens while it sends them to the next rank,
then those that have arrived, which it passes on; partial sums go back by the same way, and each rank adds its own.
Compilers for TPU overlap these permutes with the products, but not a gather or a reduce-scatter in a loop.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax import Array, lax

from parallax.errors import NotationError
from parallax.sharding.collectives import as_varying, is_bound, permutes_wait, reshard, to_next_rank
from parallax.sharding.layout import Layout, check_rank, parse_move

STREAM_AXIS, SEQ_DIM = "tp", 1  # of activations [B, S, ...]


class Streams(NamedTuple):
    """The tokens of all tp ranks, as an array [B, S / tp, ...] of each: those of this rank, of the rank before it, of
    the one before that, and so on."""

    pieces: tuple[Array, ...]


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
    pieces = [x]
    for _ in range(1, _ranks()):
        pieces.append(to_next_rank(pieces[-1], STREAM_AXIS, apart=permutes_wait()))
    return Streams(tuple(pieces))


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
    total = x.pieces[-1]
    for piece in x.pieces[-2::-1]:
        total = to_next_rank(total, STREAM_AXIS, by=-1, apart=permutes_wait()) + piece
    return total


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
    return lax.concatenate(_turned(x.pieces), SEQ_DIM) if isinstance(x, Streams) else x


def as_streams(x: Array) -> Streams:
    """The inverse of `tokens_in_order`. No communication."""
    return Streams(tuple(_turned(lax.split(x, [x.shape[SEQ_DIM] // _ranks()] * _ranks(), SEQ_DIM))))


def _turned(pieces: Sequence[Array]) -> list[Array]:
    """The piece of rank r at place r, of pieces whose places are distances to the rank before this one that has them;
    and the other way round."""
    if len(pieces) == 1:
        return [*pieces]
    rank = lax.axis_index(STREAM_AXIS)
    places = [(rank - place) % len(pieces) for place in range(len(pieces))]
    return [lax.select_n(place, *(as_varying(piece, [STREAM_AXIS]) for piece in pieces)) for place in places]


def _ranks() -> int:
    return lax.axis_size(STREAM_AXIS) if is_bound(STREAM_AXIS) else 1


def _check_is_of_tokens(pattern: str, cut: Layout, whole: Layout) -> None:
    if {*cut.used_axes()} - {*whole.used_axes()} != {STREAM_AXIS} or cut.cut_of("seq")[-1:] != (STREAM_AXIS,):
        raise NotationError(f"{pattern!r}: streams are of tokens; {STREAM_AXIS} must shard seq, before or after.")
