"""The keys that a context rank's queries see, where a sliding window hides most of a row: only these are sent.

Rank r has a few chunks of a row, see parallax/sharding/zigzag.py. A query at the start of a chunk sees the last
`window - 1` tokens before it: the end of the chunk before, or whole chunks and the end of an earlier one. So ranks send
the ends of their chunks, their tails, and no rank gets the rest.
"""

import functools
import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from parallax.model.mask import Mask
from parallax.sharding.activations import CONTEXT_AXIS
from parallax.sharding.collectives import as_varying, permutes_wait, to_next_rank, vary_alike, varying_axes
from parallax.sharding.layout import parse_move
from parallax.sharding.zigzag import chunks_of, context_ranks, reshard_in_order


class Tail(NamedTuple):
    """The last `tokens` of the chunk `slot` of each rank, sent to the rank `shift` after it."""

    shift: int
    slot: int
    tokens: int


def reshard_seen(moves: Sequence[tuple[str, Array]], mask: Mask) -> list[Array]:
    """`reshard_in_order` of keys and values [B, T, ...], each with its pattern. Where it would gather them over cp, a
    layer with a window sends only tokens that some query sees, if these are fewer; in place of the others are zeros.

    Communication, a tail:
        forward   permute of its tokens over cp
        backward  permute of their gradient over cp
    """
    patterns, arrays = zip(*moves)
    if context_ranks() == 1 or not mask.hides_earlier or not all(map(_gathers, patterns)):
        return list(itertools.starmap(reshard_in_order, moves))
    arrays, mask = vary_alike((arrays, mask))

    # A single branch has all messages: simulated devices could confuse those of several, which run at the same time.
    def of_window(mask: Mask) -> list[Array]:
        sent = tails(context_ranks(), arrays[0].shape[1], mask.window)
        return list(map(reshard_in_order, patterns, arrays) if sent is None else _gather_tails(arrays, sent))

    return mask.of_window(of_window)


def _gathers(pattern: str) -> bool:
    before, after = parse_move(pattern)
    return CONTEXT_AXIS in before.used_axes() and CONTEXT_AXIS not in after.used_axes()


def tails(ranks: int, tokens: int, window: int, apart: bool | None = None) -> tuple[Tail, ...] | None:
    """What ranks that hold so many tokens of a row send for a window, 0 for none; None if whole rows are gathered
    since that sends no more. Where permutes would wait for others, each tail is gathered.

    >>> tails(4, 32, 4, apart=False)
    (Tail(shift=1, slot=0, tokens=3), Tail(shift=3, slot=1, tokens=3))
    """
    apart = permutes_wait() if apart is None else apart
    sent = _tails(ranks, tokens, window) if window else None
    copies = ranks - 1 if apart else 1
    return sent if sent is not None and copies * sum(tail.tokens for tail in sent) < (ranks - 1) * tokens else None


@functools.cache
def _tails(ranks: int, tokens: int, window: int) -> tuple[Tail, ...]:
    numbers, sent = chunks_of(ranks), []
    chunk = tokens // numbers.shape[1]
    for shift in range(1, ranks):
        for slot in range(numbers.shape[1]):
            before = np.roll(numbers, -shift, axis=0) - numbers[:, slot, None]  # by so many chunks, on each rank
            seen = np.where(before > 0, window - 1 - (before - 1) * chunk, 0).max()
            if seen > 0:
                sent.append(Tail(shift, slot, int(min(seen, chunk))))
    return tuple(sent)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_tails(arrays: Sequence[Array], sent: Sequence[Tail]) -> list[Array]:
    """Whole rows of this rank's tokens and the tails that arrive, zeros elsewhere."""
    whole = [_with_chunks(x) for x in arrays]
    tokens = arrays[0].shape[1]
    for tail in sent:
        ends = [lax.slice_in_dim(x, *_places(tail, tokens), axis=1) for x in arrays]
        arrived = to_next_rank(ends, CONTEXT_AXIS, by=tail.shift, apart=permutes_wait())
        start = _start_of(tail, tokens)
        whole = [lax.dynamic_update_slice_in_dim(x, new, start, axis=1) for x, new in zip(whole, arrived)]
    return whole


def _with_chunks(x: Array) -> Array:
    """Whole rows, zeros but for this rank's tokens [B, T, ...]."""
    rows, tokens, *dims = x.shape
    whole = as_varying(jnp.zeros((rows, context_ranks() * tokens, *dims), x.dtype), varying_axes(x))
    for chunk, start in zip(jnp.split(x, len(_starts(tokens)), axis=1), _starts(tokens)):
        whole = lax.dynamic_update_slice_in_dim(whole, chunk, start, axis=1)
    return whole


def _gather_forward(arrays: Sequence[Array], sent: Sequence[Tail]) -> tuple[list[Array], None]:
    return _gather_tails(arrays, sent), None


def _return_tails(sent: Sequence[Tail], _: None, gradients: Sequence[Array]) -> tuple[tuple[Array, ...]]:
    """A token's gradients from all ranks that see it travel in their own dtype and are added in float32."""
    ranks, tokens = context_ranks(), gradients[0].shape[1] // context_ranks()

    def taken(start: Array, length: int) -> list[Array]:
        return [lax.dynamic_slice_in_dim(dy, start, length, axis=1) for dy in gradients]

    starts = _starts(tokens)
    chunks = [taken(start, tokens // len(starts)) for start in starts]
    sums = [jnp.concatenate(of_array, axis=1).astype(jnp.float32) for of_array in zip(*chunks)]
    for tail in sent:
        back = taken(_start_of(tail, tokens), tail.tokens)
        arrived = to_next_rank(back, CONTEXT_AXIS, by=ranks - tail.shift, apart=permutes_wait())
        first, end = _places(tail, tokens)
        sums = [x.at[:, first:end].add(new.astype(jnp.float32)) for x, new in zip(sums, arrived)]
    return (tuple(x.astype(dy.dtype) for x, dy in zip(sums, gradients)),)


_gather_tails.defvjp(_gather_forward, _return_tails)


def _starts(tokens: int) -> Array:
    """The places in the row of the first tokens of this rank's chunks."""
    numbers = chunks_of(context_ranks())
    return jnp.asarray(numbers * (tokens // numbers.shape[1]))[lax.axis_index(CONTEXT_AXIS)]


def _places(tail: Tail, tokens: int) -> tuple[int, int]:
    """Where a tail begins and ends among a rank's tokens."""
    end = (tail.slot + 1) * tokens // chunks_of(context_ranks()).shape[1]
    return end - tail.tokens, end


def _start_of(tail: Tail, tokens: int) -> Array:
    """The place in the row of the first token of a tail that arrives on this rank."""
    ranks = context_ranks()
    numbers = chunks_of(ranks)
    ends = (np.roll(numbers, tail.shift, axis=0)[:, tail.slot] + 1) * (tokens // numbers.shape[1])
    return jnp.asarray(ends - tail.tokens)[lax.axis_index(CONTEXT_AXIS)]
