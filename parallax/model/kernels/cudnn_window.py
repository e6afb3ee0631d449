"""Sliding windows in cuDNN's attention where context ranks share the queries of a row.

cuDNN skips what is before a window in whole rows alone. So a rank's queries are cut into pieces, each a row of the call
with the keys that it may see.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax
from jax.tree_util import Partial

from parallax.errors import divisors
from parallax.model.kernels.pallas import vjp_in_parts
from parallax.model.mask import Mask
from parallax.sharding.activations import TOKENS
from parallax.sharding.zigzag import CHUNKS, own_tokens, places

SHORTEST_PIECE = 128  # queries: shorter ones copy keys more often
LONGEST_PIECE = 512  # longer ones see more that is hidden


def piece_in_window(seq: int, ranks: int, window: int) -> tuple[int, int] | None:
    """Queries of a piece, and keys that it is given, of a row of `seq` tokens whose queries context ranks share; None
    if these are all keys.

    A piece is the largest divisor of a chunk up to half of the window; the chunk, if all are much shorter. cuDNN takes
    even numbers of tokens.

    >>> piece_in_window(16_384, 2, 1024), piece_in_window(16_384, 2, 128), piece_in_window(512, 2, 500)
    ((512, 1536), (128, 256), None)
    """
    queries = seq // (CHUNKS * ranks)
    longest = max(SHORTEST_PIECE, min(window // 2, LONGEST_PIECE))
    fitting = [size for size in divisors(queries) if size % 2 == 0 and SHORTEST_PIECE // 2 <= size <= longest]
    queries = max(fitting, default=queries)
    keys = queries + -(-window // 8) * 8
    return (queries, keys) if queries % 2 == 0 and keys < seq else None


def starts_and_shown(mask: Mask, queries: int, piece: tuple[int, int]) -> tuple[Array, Array]:
    """Of each piece of a rank's `queries`: the place of its first key, and what the mask shows, [pieces B, 1, S, T]."""
    size, keys = piece
    places_nS = places(TOKENS, queries, mask.order).reshape(-1, size)
    starts_n = jnp.maximum(places_nS[:, -1] + 1 - keys, 0)
    places_nT = starts_n[:, None] + jnp.arange(keys)[None]
    segments_nBS = rearrange(own_tokens(mask.segments_BN, 1, mask.order), "B (n s) -> n B s", n=len(starts_n))
    segments_nBT = _in_reach(mask.segments_BN, starts_n, keys)
    shown_nBST = jax.vmap(mask.allows)(places_nS[:, :, None], places_nT[:, None, :], segments_nBS, segments_nBT)
    return starts_n, rearrange(shown_nBST, "n B S T -> (n B) 1 S T")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_in_pieces(attention: Callable, bias: Array, starts_n: Array, q: Array, k: Array, v: Array) -> Array:
    """`attention(bias, q, k, v)` of the pieces of the queries [B, S, H, J] as rows. No communication.

    It saves what that of whole queries does: the backward pass takes the keys of the pieces again. A key's gradients
    from all pieces that see it are added in float32.
    """
    return _forward(attention, bias, starts_n, q, k, v)[0]


def _forward(
    attention: Callable, bias: Array, starts_n: Array, q: Array, k: Array, v: Array
) -> tuple[Array, tuple[Any, ...]]:
    rows = _operands(bias, starts_n, q, k, v)
    out, others, pull = vjp_in_parts(Partial(attention, bias), *rows)
    out = _in_a_row(out, starts_n)
    others = [_numbers_in_a_row(x, starts_n) for x in others]
    return out, (bias, starts_n, q, k, v, out, others, pull)


def _backward(attention: Callable, saved: tuple[Any, ...], dy: Array) -> tuple[Array | None, ...]:
    bias, starts_n, q, k, v, out, others, pull = saved
    rows = _operands(bias, starts_n, q, k, v)
    numbers = [_numbers_as_rows(x, starts_n) for x in others]
    dq, dk, dv = pull.rebuilt(*rows, bias, _as_rows(out, starts_n), numbers)(_as_rows(dy, starts_n))
    return None, None, _in_a_row(dq, starts_n), *(_added(x, starts_n, k.shape[1]) for x in (dk, dv))


attention_in_pieces.defvjp(_forward, _backward)


def _operands(bias: Array, starts_n: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    k, v = (_in_reach(x, starts_n, bias.shape[-1]) for x in (k, v))
    return _as_rows(q, starts_n), *(rearrange(x, "n B t ... -> (n B) t ...") for x in (k, v))


def _as_rows(x: Array, starts_n: Array) -> Array:
    return rearrange(x, "B (n s) ... -> (n B) s ...", n=len(starts_n))


def _in_a_row(x: Array, starts_n: Array) -> Array:
    return rearrange(x, "(n B) s ... -> B (n s) ...", n=len(starts_n))


def _numbers_as_rows(x: Array, starts_n: Array) -> Array:
    """A number for each query and head, as `logsumexp`; what is none of these stays."""
    return rearrange(x, "B H (n s) -> (n B) H s", n=len(starts_n)) if x.ndim == 3 else x


def _numbers_in_a_row(x: Array, starts_n: Array) -> Array:
    return rearrange(x, "(n B) H s -> B H (n s)", n=len(starts_n)) if x.ndim == 3 else x


def _in_reach(x_BT: Array, starts_n: Array, keys: int) -> Array:
    """So many keys of each piece, [pieces, B, keys, ...]."""
    return jax.vmap(lambda start: lax.dynamic_slice_in_dim(x_BT, start, keys, axis=1))(starts_n)


def _added(dx: Array, starts_n: Array, tokens: int) -> Array:
    """The sum over pieces for each of so many tokens."""
    of_pieces = rearrange(dx, "(n B) t ... -> n B t ...", n=len(starts_n))
    _, rows, keys, *dims = of_pieces.shape

    def add(sums: Array, piece: tuple[Array, Array]) -> tuple[Array, None]:
        start, new = piece
        before = lax.dynamic_slice_in_dim(sums, start, keys, axis=1)
        return lax.dynamic_update_slice_in_dim(sums, before + new.astype(jnp.float32), start, axis=1), None

    zeros = jnp.zeros((rows, tokens, *dims), jnp.float32)
    return lax.scan(add, zeros, (starts_n, of_pieces))[0].astype(dx.dtype)
