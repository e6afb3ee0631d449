"""The keys that a context rank's queries see, where a sliding window hides most of a row: only these are sent.

Rank r has a few chunks of a row, see parallax/sharding/zigzag.py. A query at the start of a chunk sees the last
`window - 1` tokens before it: the end of the chunk before, or whole chunks and the end of an earlier one. So ranks send
the ends of their chunks, their tails, and no rank gets the rest.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.model.mask import Mask
from parallax.sharding.activations import CONTEXT_AXIS
from parallax.sharding.collectives import as_varying, permutes_wait, to_next_rank, vary_alike, varying_axes
from parallax.sharding.layout import parse_move
from parallax.sharding.zigzag import CHUNKS, chunks_of, context_ranks, reshard_in_order


class Tail(NamedTuple):
    """The last `tokens` of the chunk `slot` of each rank, sent to the rank `shift` after it."""

    shift: int
    slot: int
    tokens: int


def reshard_seen(
    moves: Sequence[tuple[str, Array]], mask: Mask, act: Callable[..., Sequence[Array]] | None = None
) -> list[Array]:
    """`reshard_in_order` of keys and values [B, T, ...], each with its pattern. Where it would gather them over cp, a
    layer with a window sends only tokens that some query sees, if these are fewer; in place of the others are zeros.

    With `act(*arrays, places=...)` its results are returned, and it computes them only of tokens that are there, each
    by itself; their places in the row are None for whole rows. What it names "kv" can be saved.

    Communication, a tail:
        forward   permute of its tokens over cp
        backward  permute of their gradient over cp
    """
    patterns, arrays = zip(*moves)

    def of_whole_rows() -> list[Array]:
        whole = [reshard_in_order(pattern, x, mask.order) for pattern, x in zip(patterns, arrays)]
        return whole if act is None else list(act(*whole, places=None))

    if context_ranks() == 1 or not mask.hides_earlier or not all(map(_gathers, patterns)):
        return of_whole_rows()
    arrays, mask = vary_alike((arrays, mask))

    # A single branch has all messages: simulated devices could confuse those of several, which run at the same time.
    def in_window(mask: Mask) -> list[Array]:
        tokens = arrays[0].shape[1]
        sent = tails(context_ranks(), tokens, mask.window, mask.order)
        if sent is None:
            return of_whole_rows()
        seen = _gather_tails(arrays, sent)
        if act is not None:
            seen = act(*seen, places=_places_of(_pieces(sent, tokens, mask.order)))
        return [_in_rows(x, sent, mask.order) for x in seen]

    whole = mask.by_window(in_window)
    if act is None or mask.which is None:
        return whole
    return [checkpoint_name(x, "kv") for x in whole]  # a policy does not see names within branches


def _gathers(pattern: str) -> bool:
    before, after = parse_move(pattern)
    return CONTEXT_AXIS in before.used_axes() and CONTEXT_AXIS not in after.used_axes()


def tails(ranks: int, tokens: int, window: int, order: str) -> tuple[Tail, ...] | None:
    """What ranks that hold so many tokens of a row send for a window, 0 for none; None if whole rows are gathered
    since that sends no more. Where permutes would wait for others, each tail is gathered."""
    sent = _tails(ranks, tokens, window, order) if window else None
    copies = ranks - 1 if permutes_wait() else 1
    return sent if sent is not None and copies * _tokens_of(sent) < (ranks - 1) * tokens else None


@functools.cache
def _tails(ranks: int, tokens: int, window: int, order: str) -> tuple[Tail, ...]:
    """The tails that reach so far.

    >>> _tails(4, 32, 4, "zigzag")
    (Tail(shift=1, slot=0, tokens=3), Tail(shift=3, slot=1, tokens=3))
    >>> _tails(4, 32, 4, "contiguous")
    (Tail(shift=1, slot=1, tokens=3),)
    """
    numbers, sent = chunks_of(ranks, order), []
    chunk = tokens // CHUNKS
    for shift in range(1, ranks):
        for slot in range(CHUNKS):
            before = np.roll(numbers, -shift, axis=0) - numbers[:, slot, None]  # by so many chunks, on each rank
            seen = np.where(before > 0, window - 1 - (before - 1) * chunk, 0).max()
            if seen > 0:
                sent.append(Tail(shift, slot, int(min(seen, chunk))))
    return tuple(sent)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_tails(arrays: Sequence[Array], sent: Sequence[Tail]) -> list[Array]:
    """This rank's tokens [B, T, ...] and behind them the tails that arrive."""
    tokens = arrays[0].shape[1]
    pieces = [arrays]
    for tail in sent:
        ends = [lax.slice_in_dim(x, *_ends(tail, tokens), axis=1) for x in arrays]
        pieces.append(to_next_rank(ends, CONTEXT_AXIS, by=tail.shift))
    return [jnp.concatenate(of_array, axis=1) for of_array in zip(*pieces)]


def _gather_forward(arrays: Sequence[Array], sent: Sequence[Tail]) -> tuple[list[Array], None]:
    return _gather_tails(arrays, sent), None


def _return_tails(sent: Sequence[Tail], _: None, gradients: Sequence[Array]) -> tuple[tuple[Array, ...]]:
    """A token's gradients from all ranks that see it travel in their own dtype and are added in float32."""
    ranks, first = context_ranks(), gradients[0].shape[1] - _tokens_of(sent)
    tokens, sums = first, [dy[:, :first].astype(jnp.float32) for dy in gradients]
    for tail in sent:
        back = [lax.slice_in_dim(dy, first, first + tail.tokens, axis=1) for dy in gradients]
        arrived = to_next_rank(back, CONTEXT_AXIS, by=ranks - tail.shift)
        begin, end = _ends(tail, tokens)
        sums = [x.at[:, begin:end].add(new.astype(jnp.float32)) for x, new in zip(sums, arrived)]
        first += tail.tokens
    return (tuple(x.astype(dy.dtype) for x, dy in zip(sums, gradients)),)


_gather_tails.defvjp(_gather_forward, _return_tails)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _in_rows(x: Array, sent: Sequence[Tail], order: str) -> Array:
    """Whole rows of what `_gather_tails` has, zeros elsewhere."""
    rows, held, *dims = x.shape
    tokens, first = held - _tokens_of(sent), 0
    whole = as_varying(jnp.zeros((rows, context_ranks() * tokens, *dims), x.dtype), varying_axes(x))
    for start, length in _pieces(sent, tokens, order):
        piece = lax.slice_in_dim(x, first, first + length, axis=1)
        whole = lax.dynamic_update_slice_in_dim(whole, piece, start, axis=1)
        first += length
    return whole


def _in_rows_forward(x: Array, sent: Sequence[Tail], order: str) -> tuple[Array, None]:
    return _in_rows(x, sent, order), None


def _from_rows(sent: Sequence[Tail], order: str, _: None, dy: Array) -> tuple[Array]:
    pieces = _pieces(sent, dy.shape[1] // context_ranks(), order)
    taken = [lax.dynamic_slice_in_dim(dy, start, length, axis=1) for start, length in pieces]
    return (jnp.concatenate(taken, axis=1),)


_in_rows.defvjp(_in_rows_forward, _from_rows)


def _pieces(sent: Sequence[Tail], tokens: int, order: str) -> list[tuple[Array, int]]:
    """The first place in the row and the length of each of this rank's chunks, and of each tail that arrives."""
    chunks = [(start, tokens // CHUNKS) for start in _starts(tokens, order)]
    return chunks + [(_start_of(tail, tokens, order), tail.tokens) for tail in sent]


def _places_of(pieces: Sequence[tuple[Array, int]]) -> Array:
    return jnp.concatenate([start + jnp.arange(length) for start, length in pieces])


def _tokens_of(sent: Sequence[Tail]) -> int:
    return sum(tail.tokens for tail in sent)


def _starts(tokens: int, order: str) -> Array:
    """The places in the row of the first tokens of this rank's chunks."""
    numbers = chunks_of(context_ranks(), order)
    return jnp.asarray(numbers * (tokens // CHUNKS))[lax.axis_index(CONTEXT_AXIS)]


def _ends(tail: Tail, tokens: int) -> tuple[int, int]:
    """Where a tail begins and ends among a rank's tokens."""
    end = (tail.slot + 1) * tokens // CHUNKS
    return end - tail.tokens, end


def _start_of(tail: Tail, tokens: int, order: str) -> Array:
    """The place in the row of the first token of a tail that arrives on this rank."""
    ranks = context_ranks()
    numbers = chunks_of(ranks, order)
    ends = (np.roll(numbers, tail.shift, axis=0)[:, tail.slot] + 1) * (tokens // CHUNKS)
    return jnp.asarray(ends - tail.tokens)[lax.axis_index(CONTEXT_AXIS)]
