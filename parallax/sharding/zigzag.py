"""The order of tokens on context ranks: see docs/cp.md.

A row of seq tokens is split into 2 * cp chunks. In zigzag order, which balances causal attention, rank r holds chunk r
and, after it, chunk 2 * cp - 1 - r: one that sees few tokens and one that sees many; the sum is the same on each rank.
In contiguous order, in which a rank's neighbours have all that a short window reaches, it holds chunks 2 * r and
2 * r + 1. A batch arrives in the order of its text. It is
reordered once a step together with its positions and segments, so layers that work token by token need not know the
order. "In order" below means the order of the text.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from parallax.sharding.activations import CONTEXT_AXIS
from parallax.sharding.collectives import as_varying, gather_with_exchange, offset, ranks_over, reshard
from parallax.sharding.layout import Layout

ZIGZAG, CONTIGUOUS = "zigzag", "contiguous"
CHUNKS = 2  # of a rank


def context_ranks() -> int:
    """The size of cp; 1 outside a mesh, and on a mesh that does not shard seq."""
    return ranks_over([CONTEXT_AXIS])


def chunks_of(ranks: int, order: str = ZIGZAG) -> np.ndarray:
    """Indices of the two chunks of each rank, [ranks, 2].

    >>> chunks_of(2).tolist(), chunks_of(2, CONTIGUOUS).tolist()
    ([[0, 3], [1, 2]], [[0, 1], [2, 3]])
    """
    low = np.arange(ranks)
    if order == CONTIGUOUS:
        return np.arange(2 * ranks).reshape(ranks, 2)
    return np.stack([low, 2 * ranks - 1 - low], axis=1)


def order_of(ranks: int, pieces: int, order: str = ZIGZAG) -> np.ndarray:
    """Indices in the row of the pieces (tokens or blocks) that each rank holds, [ranks, pieces / ranks].

    >>> order_of(2, 8).tolist()
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    chunk = pieces // (2 * ranks)
    return (chunks_of(ranks, order)[:, :, None] * chunk + np.arange(chunk)).reshape(ranks, -1)


def places(layout: str | Layout, tokens: int, order: str = ZIGZAG) -> Array:
    """Index in the whole row of each of a device's `tokens`, for an array of this layout, [tokens]."""
    layout = layout if isinstance(layout, Layout) else Layout.parse(layout)
    ranks, within = context_ranks(), layout.without(CONTEXT_AXIS)  # the axes that shard a context rank's tokens
    held = offset(within, "seq", tokens) + jnp.arange(tokens)
    if CONTEXT_AXIS not in layout.cut_of("seq") or ranks == 1:
        return held
    chunk = tokens * ranks_over(within.cut_of("seq")) // 2
    chunks = jnp.asarray(chunks_of(ranks, order))[lax.axis_index(CONTEXT_AXIS)]
    return chunks[held // chunk] * chunk + held % chunk


def own_tokens(x: Array, axis: int, order: str = ZIGZAG) -> Array:
    """This rank's tokens, taken from whole rows in order; dim `axis` is seq."""
    ranks = context_ranks()
    if ranks == 1:
        return x
    chunk = x.shape[axis] // (2 * ranks)
    rank = lax.axis_index(CONTEXT_AXIS)
    x = as_varying(x, [CONTEXT_AXIS])
    if order == CONTIGUOUS:
        return lax.dynamic_slice_in_dim(x, rank * 2 * chunk, 2 * chunk, axis)
    numbers = rank, 2 * ranks - 1 - rank
    return jnp.concatenate([lax.dynamic_slice_in_dim(x, number * chunk, chunk, axis) for number in numbers], axis)


def reshard_in_order(pattern: str, x: Array, order: str = ZIGZAG) -> Array:
    """`reshard` for arrays whose tokens are in order if cp does not shard `seq`, and in that of ranks if it does.

    Communication:
        forward   as reshard
        backward  the transposes; where cp is gathered, all_to_all of the gradient over it
    """
    before, after = (Layout.parse(text.strip()) for text in pattern.split("->"))
    ranks, dim = context_ranks(), before.index("seq")
    was_cut, is_cut = (CONTEXT_AXIS in layout.cut_of("seq") for layout in (before, after))
    if ranks == 1 or was_cut == is_cut:
        return reshard(pattern, x)
    if was_cut:
        move = reshard if CONTEXT_AXIS in after.used_axes() else gather_with_exchange
        return in_order_of_text(move(pattern, x), ranks, dim, order)
    return reshard(pattern, in_order_of_ranks(x, ranks, dim, order))


def in_order_of_text(x: Array, ranks: int, dim: int, order: str = ZIGZAG) -> Array:
    """Whole rows whose tokens are in the order of ranks, rank by rank, in that of the text; `dim` is seq."""
    if order == CONTIGUOUS:
        return x
    halves = x.reshape(*x.shape[:dim], ranks, CHUNKS, -1, *x.shape[dim + 1 :]).swapaxes(dim, dim + 1)
    return _second_reversed(halves, dim).reshape(x.shape)


def in_order_of_ranks(x: Array, ranks: int, dim: int, order: str = ZIGZAG) -> Array:
    """The inverse of `in_order_of_text`."""
    if order == CONTIGUOUS:
        return x
    halves = x.reshape(*x.shape[:dim], CHUNKS, ranks, -1, *x.shape[dim + 1 :])
    return _second_reversed(halves, dim).swapaxes(dim, dim + 1).reshape(x.shape)


def _second_reversed(halves: Array, dim: int) -> Array:
    """Both halves of a row, [..., 2, ranks, ...], with the ranks of the second in reverse order."""
    # As a take of chunks, XLA for TPUs would gather in loops, and scatter gradients into zeros.
    is_first = (np.arange(CHUNKS) == 0).reshape(CHUNKS, *(1,) * (halves.ndim - dim - 1))
    return jnp.where(is_first, halves, jnp.flip(halves, dim + 1))


def to_order(x: Array, axis: int, order: str = ZIGZAG) -> Array:
    """Bring tokens into order: rank r gets chunks 2r and 2r + 1 in place of its two, if it has others.

    Communication:
        forward   permute of the even chunk and the odd one over cp
        backward  the transposes
    """
    ranks = context_ranks()
    if ranks == 1 or order == CONTIGUOUS:
        return x
    rank, chunks = lax.axis_index(CONTEXT_AXIS), chunks_of(ranks)
    low, high = jnp.split(as_varying(x, [CONTEXT_AXIS]), 2, axis)
    # One of a rank's two chunks has an even index. The even one is sent first, and its new rank stores it first.
    is_even = rank % 2 == 0
    even, odd = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
    moves = [[(r, int(next(n for n in chunks[r] if n % 2 == parity)) // 2) for r in range(ranks)] for parity in (0, 1)]
    even = lax.ppermute(even, CONTEXT_AXIS, moves[0])
    return jnp.concatenate([even, lax.ppermute(odd, CONTEXT_AXIS, moves[1])], axis)
