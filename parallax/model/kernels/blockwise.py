"""Attention without a full matrix of scores: an online softmax over blocks of keys, on every backend.

Milakov and Gimelshein 2018 for the softmax. Dao et al. 2022 for the backward pass, which recomputes the scores from the
saved queries, keys, values, output and one number for each query. Liu et al. 2023 for the ring. Blocks that the mask
hides by the tokens' places alone are skipped; which ones is known at trace time, for each context rank.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange, repeat
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.model.logits import soft_capped
from parallax.model.mask import Mask, blocks_seen
from parallax.sharding.activations import CONTEXT_AXIS
from parallax.sharding.collectives import as_varying, is_bound, to_next_rank, vary_alike, varying_axes
from parallax.sharding.platform import platform_traced
from parallax.sharding.zigzag import context_ranks, order_of

# Most tokens on a side of a block of scores, by platform; docs/cp.md has the figures. Rows of two such blocks are a
# special case: on TPU smaller blocks are faster, since less of them is masked, and on GPU one block of all.
LONGEST_SIDE = {"cpu": 256, "gpu": 512, "tpu": 512}
TWO_BLOCKS = {"gpu": 1024, "tpu": 256}
FILLING = -1  # the segment of padding; no document has it
HIDDEN = -0.7 * float(np.finfo(np.float32).max)  # a finite score whose weight is 0 beside any other score


def blockwise_attention(
    q_BSHJ: Array,
    k_BTGJ: Array,
    v_BTGK: Array,
    mask: Mask,
    *,
    scale: float,
    cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Softmax attention of each token to those that the mask shows it, [B, S, H, K], in q's dtype.

    Groups of H / G query heads share a key head. If the keys are fewer than the tokens of a row, too, they are those of
    this context rank, and the others come in a ring. Statistics and sums are float32. A ring of cp ranks makes cp - 1
    hops; gradients of k and v, in float32, make one more hop at the end, back to their own rank. For `cap` and `sinks`
    see `attend`: a sink is where the running maximum starts, with the weight 1.

    Communication, a hop:
        forward   permute of k and v over cp
        backward  permute of k, v, the gradient of k and the gradient of v over cp
    Communication, the end:
        forward   nothing
        backward  permute of the gradient of k and the gradient of v over cp
    """
    chunk = q_BSHJ.shape[1] // _chunks(q_BSHJ, mask)
    size = tokens_of_block(chunk)
    q, k, v = (_filled(x, x.shape[1] // chunk, size) for x in (q_BSHJ, k_BTGJ, v_BTGK))
    segments = _filled(mask.segments_BN, mask.segments_BN.shape[1] // chunk, size, of=FILLING)
    out = _attention(*vary_alike((q, k, v, mask.replace(segments_BN=segments), sinks)), scale, cap)
    return out if chunk % size == 0 else _without_filling(out, _chunks(q_BSHJ, mask), chunk)


def _chunks(q: Array, mask: Mask) -> int:
    """Chunks of the local queries: two on a context rank, see parallax/sharding/zigzag.py."""
    return 1 if q.shape[1] == mask.segments_BN.shape[1] else 2


def tokens_of_block(tokens: int) -> int:
    """Tokens on a side of a block: the same in each block, at most what LONGEST_SIDE and TWO_BLOCKS have for the
    platform of the program. The last block may be padded.

    >>> [tokens_of_block(tokens) for tokens in (16, 256, 1000, 4096, 521)]
    [16, 256, 250, 256, 174]
    """
    platform = platform_traced() or "tpu"
    longest = LONGEST_SIDE[platform]
    if longest < tokens <= 2 * longest:
        longest = TWO_BLOCKS.get(platform, longest)
    return -(-tokens // -(-tokens // longest))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(q: Array, k: Array, v: Array, mask: Mask, sinks: Array | None, scale: float, cap: float) -> Array:
    return _forward(q, k, v, mask, sinks, scale, cap)[0]


def _forward(
    q: Array, k: Array, v: Array, mask: Mask, sinks: Array | None, scale: float, cap: float
) -> tuple[Array, Any]:
    blocks = _Blocks(q, k, mask, scale, cap)
    q_blocks = blocks.of_queries(q)
    sums, top = _zeros(q_blocks, (*q_blocks.shape[:-1], v.shape[-1])), _zeros(q_blocks, q_blocks.shape[:-1]) + HIDDEN
    start = sums, top, _zeros(q_blocks, q_blocks.shape[:-1])
    if sinks is not None:
        start = sums, _zeros(q_blocks, top.shape) + blocks.of_heads(sinks), start[2] + 1

    def step(state: Any, sums: tuple, kv: Any, pair: Array) -> tuple[Any, tuple]:
        query, key = pair[0], pair[1]
        out, top, total = (_read(x, query) for x in state)
        k_block, v_block = (_read(x, key) for x in kv)
        scores = blocks.scores(_read(q_blocks, query), k_block, pair)
        higher = jnp.maximum(top, scores.max(axis=-1))
        weights, fade = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        seen = _product("BGQT,BGTK->BGQK", weights.astype(v_block.dtype), v_block)
        new = out * fade[..., None] + seen, higher, total * fade + weights.sum(axis=-1)
        return jax.tree.map(lambda before, block: _write(before, block, query), state, new), sums

    (out, top, total), _ = _run_hops(blocks.pairs(), step, start, (blocks.of_keys(k), blocks.of_keys(v)))
    out = blocks.of_tokens((out / total[..., None]).astype(q.dtype))
    logsumexp = top + jnp.log(total)
    out, logsumexp = (checkpoint_name(x, "core") for x in (out, logsumexp))
    return out, (q, k, v, mask, sinks, out, logsumexp)


def _backward(scale: float, cap: float, saved: Any, dy: Array) -> tuple[Array, Array, Array, None, Array | None]:
    q, k, v, mask, sinks, out, logsumexp = saved
    blocks = _Blocks(q, k, mask, scale, cap)
    q_blocks, dy_blocks = blocks.of_queries(q), blocks.of_queries(dy)
    row_sums = blocks.of_queries((dy.astype(jnp.float32) * out).sum(axis=-1, keepdims=True))[..., 0]
    kv = blocks.of_keys(k), blocks.of_keys(v)

    def step(dq: Array, sums: Any, kv: Any, pair: Array) -> tuple[Array, Any]:
        query, key = pair[0], pair[1]
        q_block, dy_block = _read(q_blocks, query), _read(dy_blocks, query)
        k_block, v_block, dk_block, dv_block = (_read(x, key) for x in (*kv, *sums))
        scores = blocks.scores(q_block, k_block, pair)
        weights = jnp.exp(scores - _read(logsumexp, query)[..., None])
        d_weights = _product("BGQK,BGTK->BGQT", dy_block, v_block)
        d_scores = scale * weights * (d_weights - _read(row_sums, query)[..., None])
        d_scores = blocks.behind_cap(d_scores, scores).astype(q.dtype)
        dk_block += _product("BGQT,BGQJ->BGTJ", d_scores, q_block)
        dv_block += _product("BGQT,BGQK->BGTK", weights.astype(dy.dtype), dy_block)
        dq = _write(dq, _read(dq, query) + _product("BGQT,BGTJ->BGQJ", d_scores, k_block), query)
        return dq, tuple(_write(x, block, key) for x, block in zip(sums, (dk_block, dv_block)))

    start, *sums = (_zeros(q_blocks, x.shape) for x in (q_blocks, *kv))
    dq, (dk, dv) = _run_hops(blocks.pairs(), step, start, kv, tuple(sums))
    dk, dv = (blocks.of_tokens(x).astype(k.dtype) for x in (dk, dv))
    d_sinks = None
    if sinks is not None:
        of_rows = -jnp.exp(blocks.of_heads(sinks) - logsumexp) * row_sums
        d_sinks = blocks.of_tokens(of_rows[..., None]).sum(axis=(0, 1, 3)).astype(sinks.dtype)
    return blocks.of_tokens(dq).astype(q.dtype), dk, dv, None, d_sinks


_attention.defvjp(_forward, _backward)


class _Blocks:
    """Tokens in blocks: [blocks, B, G, rows, ...]. Rows of queries are tokens times the heads of a group."""

    def __init__(self, q: Array, k: Array, mask: Mask, scale: float, cap: float):
        self.size, self.scale, self.mask = tokens_of_block(q.shape[1] // _chunks(q, mask)), scale, mask
        self.cap = cap
        self.groups, self.heads = k.shape[2], q.shape[2] // k.shape[2]  # heads of a group
        self.counts = tuple(tokens // self.size for tokens in (q.shape[1], k.shape[1], mask.segments_BN.shape[1]))
        self.segments = rearrange(mask.segments_BN, "B (n b) -> n B b", b=self.size)

    def pairs(self) -> list[np.ndarray]:
        """The pairs of blocks to compute: see `_pairs`."""
        return _pairs(*self.counts, context_ranks(), self.size, self.mask.window)

    def of_queries(self, x: Array) -> Array:
        return rearrange(x, "B (n b) (G H) W -> n B G (H b) W", b=self.size, G=self.groups)

    def of_keys(self, x: Array) -> Array:
        return rearrange(x, "B (n b) G W -> n B G b W", b=self.size)

    def of_heads(self, x_H: Array) -> Array:
        return repeat(x_H, "(G H) -> 1 1 G (H b)", b=self.size, G=self.groups)

    def of_tokens(self, x: Array) -> Array:
        return rearrange(x, "n B G (H b) W -> B (n b) (G H) W", b=self.size)

    def scores(self, q: Array, k: Array, pair: Array) -> Array:
        """Scores of a block of queries and a block of keys, float32 [B, G, rows, keys]; HIDDEN where masked."""
        first_query, first_key = pair[2], pair[3]  # indices of blocks in the whole row
        segments = [_read(self.segments, first) for first in (first_query, first_key)]
        within = jnp.arange(self.size)
        places = (first_query * self.size + within)[:, None], (first_key * self.size + within)[None, :]
        seen = jnp.tile(self.mask.allows(*places, *segments), (1, self.heads, 1))[:, None]
        return jnp.where(seen, soft_capped(self.scale * _product("BGQJ,BGTJ->BGQT", q, k), self.cap), HIDDEN)

    def behind_cap(self, d_scores: Array, scores: Array) -> Array:
        """The gradient before the cap, whose slope is 1 - tanh^2; nothing where `scores` are HIDDEN."""
        return d_scores * (1 - jnp.square(jnp.maximum(scores / self.cap, -1))) if self.cap else d_scores


def _run_hops(pairs: list[np.ndarray], step: Callable, state: Any, kv: Any, zeros: tuple = ()) -> tuple[Any, tuple]:
    """Run `step(state, sums, kv, pair)`, which returns the next state and sums, for all pairs. Between two hops keys
    and values move to the next rank, and after them the sums over them, which start as `zeros` and are back on
    their rank at the end. A hop does not send what it computes: its sums are added to those that arrive."""
    rank = lax.axis_index(CONTEXT_AXIS) if len(pairs[0]) > 1 else 0
    tables = [jnp.asarray(of_hop) for of_hop in pairs]

    def hop(state: Any, kv: Any, pairs: Array) -> tuple[Any, tuple]:
        return lax.scan(lambda carry, pair: (step(*carry, kv, pair), None), (state, zeros), pairs)[0]

    def send(arrays: Any) -> Any:
        return to_next_rank(arrays, CONTEXT_AXIS, apart=_others_wait())

    def hop_and_send(carry: Any, pairs: Array) -> tuple[Any, None]:
        state, kv, sums = carry
        sent, arrived = send(kv), send(sums)
        state, of_hop = hop(state, kv, pairs)
        return (state, sent, jax.tree.map(jnp.add, arrived, of_hop)), None

    last = len(tables) - 1
    if not last:
        return hop(state, kv, tables[0][rank])
    sent = send(kv)
    state, sums = hop(state, kv, tables[0][rank])
    carry = state, sent, sums
    if last > 1:
        carry, _ = lax.scan(hop_and_send, carry, jnp.stack(tables[1:last])[:, rank])
    state, kv, sums = carry
    arrived = send(sums)
    state, of_hop = hop(state, kv, tables[last][rank])
    return state, send(jax.tree.map(jnp.add, arrived, of_hop))


@functools.cache
def _pairs(queries: int, keys: int, whole: int, ranks: int, size: int, window: int) -> list[np.ndarray]:
    """The pairs of blocks of `size` tokens to compute, for each hop [ranks, pairs, 4]: local indices of the block of
    queries and of the block of keys, then their indices in the whole row. `queries` and `keys` are the numbers of local
    blocks, `whole` is that of a row."""
    is_ring = keys < whole
    of_ranks = np.arange(whole)[None] if queries == whole else order_of(ranks, whole)
    hops = []
    for hop in range(ranks if is_ring else 1):
        of_keys = np.roll(of_ranks, hop, axis=0) if is_ring else np.tile(np.arange(keys), (len(of_ranks), 1))
        hops.append([_seen_pairs(*blocks, size, window) for blocks in zip(of_ranks, of_keys)])
    most = max((len(pairs) for of_hop in hops[1:] for pairs in of_hop), default=0)
    return [_alike(of_hop, most if hop else max(map(len, of_hop))) for hop, of_hop in enumerate(hops)]


def _seen_pairs(queries: np.ndarray, keys: np.ndarray, size: int, window: int) -> np.ndarray:
    """The pairs, of block indices in the row, in which some query attends to some key."""
    edges = [(first * size, first * size + size - 1) for first in (queries[:, None], keys[None, :])]
    query, key = np.nonzero(blocks_seen(*edges, window)[0])
    return np.stack([query, key, queries[query], keys[key]], axis=1).astype(np.int32)


def _alike(of_ranks: list[np.ndarray], count: int) -> np.ndarray:
    """As many pairs for each rank: with a window some see fewer blocks. In those that are added no token sees another:
    the keys come after the queries."""
    hidden = np.array([0, 0, 0, 1], np.int32)
    return np.stack([np.concatenate([pairs, np.tile(hidden, (count - len(pairs), 1))]) for pairs in of_ranks])


def _filled(x: Array, chunks: int, size: int, of: int = 0) -> Array:
    """Tokens [B, T, ...] in `chunks` chunks, each padded to a multiple of `size`."""
    missing = -(x.shape[1] // chunks) % size
    if not missing:
        return x
    x = rearrange(x, "B (c t) ... -> B c t ...", c=chunks)
    x = jnp.pad(x, [(0, missing if dim == 2 else 0) for dim in range(x.ndim)], constant_values=of)
    return rearrange(x, "B c t ... -> B (c t) ...")


def _without_filling(x: Array, chunks: int, tokens: int) -> Array:
    """The first `tokens` tokens of each chunk."""
    return rearrange(rearrange(x, "B (c t) ... -> B c t ...", c=chunks)[:, :, :tokens], "B c t ... -> B (c t) ...")


def _others_wait() -> bool:
    """Whether a permute could deadlock because pipeline ranks take different branches. True except on TPU, where a
    permute involves only two devices."""
    return platform_traced() not in ("", "tpu") and is_bound("pp") and lax.axis_size("pp") > 1


def _product(names: str, a: Array, b: Array) -> Array:
    return jnp.einsum(names, a, b, preferred_element_type=jnp.float32)


def _zeros(blocks: Array, shape: tuple[int, ...]) -> Array:
    """Zeros in float32 that vary over the axes of `blocks`."""
    return as_varying(jnp.zeros(shape, jnp.float32), varying_axes(blocks))


def _read(x: Array, block: Array) -> Array:
    return lax.dynamic_index_in_dim(x, block, keepdims=False)


def _write(x: Array, new: Array, block: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, new, block, 0)
