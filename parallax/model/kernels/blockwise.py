"""Attention without a full matrix of scores: an online softmax over blocks of keys, on every backend.

Milakov and Gimelshein 2018 for the softmax. Dao et al. 2022 for the backward pass, which recomputes the scores from the
saved queries, keys, values, output and one number for each query. Liu et al. 2023 for the ring. Blocks that the mask
hides by the tokens' places alone are skipped; which ones is known at trace time, for each context rank.
"""

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange, repeat
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.model.logits import soft_capped
from parallax.model.mask import Mask, blocks_seen
from parallax.sharding.activations import CONTEXT_AXIS
from parallax.sharding.collectives import as_varying, to_next_rank, vary_alike, varying_axes
from parallax.sharding.platform import platform_traced
from parallax.sharding.zigzag import ZIGZAG, context_ranks, order_of

# Most tokens on a side of a block of scores, by platform; docs/cp.md has the figures. Rows of two such blocks are a
# special case: on TPU smaller blocks are faster, since less of them is masked, and on GPU one block of all.
LONGEST_SIDE = {"cpu": 256, "gpu": 512, "tpu": 512}
TWO_BLOCKS = {"gpu": 1024, "tpu": 256}
# On CPUs a window has so many blocks or more, down to the shortest: at each of its ends half a block is computed for
# nothing. On GPU and TPU, as compiled, shorter blocks take longer: docs/measured/windows.md.
WINDOW_BLOCKS, SHORTEST_SIDE = 8, {"cpu": 128}
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
    hops; gradients of k and v, in float32, make one more hop at the end, back to their own rank. With a window, a hop
    goes on to the next rank whose keys some rank's queries see. For `cap` and `sinks` see `attend`: a sink is where the
    running maximum starts, with the weight 1.

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
    of_scores = Scores(scale, cap, chunk)
    out = _attention(*vary_alike((q, k, v, mask.replace(segments_BN=segments), sinks)), of_scores)
    return out if chunk % size == 0 else _without_filling(out, _chunks(q_BSHJ, mask), chunk)


def _chunks(q: Array, mask: Mask) -> int:
    """Chunks of the local queries: two on a context rank, see parallax/sharding/zigzag.py."""
    return 1 if q.shape[1] == mask.segments_BN.shape[1] else 2


def tokens_of_block(tokens: int, window: int = 0) -> int:
    """Tokens on a side of a block: the same in each block, at most what LONGEST_SIDE and TWO_BLOCKS have for the
    platform of the program. The last block may be padded. With a window blocks may be parts of these.

    >>> [tokens_of_block(tokens) for tokens in (16, 256, 1000, 4096, 521)]
    [16, 256, 250, 256, 174]
    >>> [tokens_of_block(4096, window) for window in (1024, 2048)], tokens_of_block(521, window=100)
    ([128, 256], 174)
    """
    platform = platform_traced() or "tpu"
    longest = LONGEST_SIDE[platform]
    if longest < tokens <= 2 * longest:
        longest = TWO_BLOCKS.get(platform, longest)
    size = -(-tokens // -(-tokens // longest))
    shortest = SHORTEST_SIDE.get(platform, size) if window and tokens % size == 0 else size
    while size % 2 == 0 and size > shortest and size * WINDOW_BLOCKS > window:
        size //= 2
    return size


class Scores(NamedTuple):
    """What is static of scores."""

    scale: float
    cap: float
    chunk: int  # tokens of a chunk that are no padding


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(q: Array, k: Array, v: Array, mask: Mask, sinks: Array | None, form: Scores) -> Array:
    return _forward(q, k, v, mask, sinks, form)[0]


def _forward(q: Array, k: Array, v: Array, mask: Mask, sinks: Array | None, form: Scores) -> tuple[Array, Any]:
    out, logsumexp = mask.by_window(partial(_forward_in_window, form, q, k, v, sinks))
    out, logsumexp = (checkpoint_name(x, "core") for x in (out, logsumexp))
    return out, (q, k, v, mask, sinks, out, logsumexp)


def _forward_in_window(
    form: Scores, q: Array, k: Array, v: Array, sinks: Array | None, mask: Mask
) -> tuple[Array, Array]:
    blocks = _Blocks(q, k, mask, form)
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
    return out, blocks.alike(top + jnp.log(total))


def _backward(form: Scores, saved: Any, dy: Array) -> tuple[Array, Array, Array, None, Array | None]:
    q, k, v, mask, *others = saved
    dq, dk, dv, d_sinks = mask.by_window(partial(_backward_in_window, form, q, k, v, *others, dy))
    return dq, dk, dv, None, d_sinks


def _backward_in_window(
    form: Scores,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    out: Array,
    logsumexp: Array,
    dy: Array,
    mask: Mask,
) -> tuple[Array, Array, Array, Array | None]:
    scale, blocks = form.scale, _Blocks(q, k, mask, form)
    logsumexp = blocks.of_alike(logsumexp)
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
    return blocks.of_tokens(dq).astype(q.dtype), dk, dv, d_sinks


_attention.defvjp(_forward, _backward)


class _Blocks:
    """Tokens in blocks: [blocks, B, G, rows, ...]. Rows of queries are tokens times the heads of a group."""

    def __init__(self, q: Array, k: Array, mask: Mask, form: Scores):
        self.scale, self.cap, self.chunk = form
        self.size, self.mask = tokens_of_block(self.chunk, mask.window), mask
        self.parts = tokens_of_block(self.chunk) // self.size  # of a block of a layer without a window
        self.groups, self.heads = k.shape[2], q.shape[2] // k.shape[2]  # heads of a group
        self.counts = tuple(tokens // self.size for tokens in (q.shape[1], k.shape[1], mask.segments_BN.shape[1]))
        self.segments = rearrange(mask.segments_BN, "B (n b) -> n B b", b=self.size)

    def pairs(self) -> dict[int, np.ndarray]:
        """The pairs of blocks to compute: see `_pairs`."""
        return _pairs(*self.counts, context_ranks(), self.size, self.mask.window, self.chunk, self.mask.order)

    def of_queries(self, x: Array) -> Array:
        return rearrange(x, "B (n b) (G H) W -> n B G (H b) W", b=self.size, G=self.groups)

    def of_keys(self, x: Array) -> Array:
        return rearrange(x, "B (n b) G W -> n B G b W", b=self.size)

    def of_heads(self, x_H: Array) -> Array:
        return repeat(x_H, "(G H) -> 1 1 G (H b)", b=self.size, G=self.groups)

    def of_tokens(self, x: Array) -> Array:
        return rearrange(x, "n B G (H b) W -> B (n b) (G H) W", b=self.size)

    def alike(self, rows: Array) -> Array:
        """A number for each row of queries, [blocks, B, G, rows], in blocks of the size without a window."""
        parts, size = self.parts, self.size
        return rows if parts == 1 else rearrange(rows, "(n p) B G (H b) -> n B G (H p b)", p=parts, b=size)

    def of_alike(self, rows: Array) -> Array:
        """The inverse of `alike`."""
        parts, size = self.parts, self.size
        return rows if parts == 1 else rearrange(rows, "n B G (H p b) -> (n p) B G (H b)", p=parts, b=size)

    def scores(self, q: Array, k: Array, pair: Array) -> Array:
        """Scores of a block of queries and a block of keys, float32 [B, G, rows, keys]; HIDDEN where masked."""
        first_query, first_key = pair[2], pair[3]  # indices of blocks in the whole row
        segments = [_read(self.segments, first) for first in (first_query, first_key)]
        within = jnp.arange(self.size)
        first_place = partial(_first_place, size=self.size, chunk=self.chunk if self.mask.window else self.size)
        places = (first_place(first_query) + within)[:, None], (first_place(first_key) + within)[None, :]
        seen = jnp.tile(self.mask.allows(*places, *segments), (1, self.heads, 1))[:, None]
        return jnp.where(seen, soft_capped(self.scale * _product("BGQJ,BGTJ->BGQT", q, k), self.cap), HIDDEN)

    def behind_cap(self, d_scores: Array, scores: Array) -> Array:
        """The gradient before the cap, whose slope is 1 - tanh^2; nothing where `scores` are HIDDEN."""
        return d_scores * (1 - jnp.square(jnp.maximum(scores / self.cap, -1))) if self.cap else d_scores


def _run_hops(pairs: Mapping[int, np.ndarray], step: Callable, state: Any, kv: Any, zeros: tuple = ()) -> Any:
    """Run `step(state, sums, kv, pair)`, which returns the next state and sums, for all pairs. Between two hops keys
    and values move on, to the next rank if no hop is left out, and after them the sums over them, which start as
    `zeros` and are back on their rank at the end. A hop does not send what it computes: its sums are added to those
    that arrive."""
    rank = lax.axis_index(CONTEXT_AXIS) if len(pairs[0]) > 1 else 0
    distances, tables = [*pairs], [jnp.asarray(of_hop) for of_hop in pairs.values()]

    def hop(state: Any, kv: Any, pairs: Array) -> tuple[Any, tuple]:
        return lax.scan(lambda carry, pair: (step(*carry, kv, pair), None), (state, zeros), pairs)[0]

    def send(arrays: Any, by: int = 1) -> Any:
        return to_next_rank(arrays, CONTEXT_AXIS, by=by)

    def hop_and_send(carry: Any, pairs: Array) -> tuple[Any, None]:
        state, kv, sums = carry
        sent, arrived = send(kv), send(sums)
        state, of_hop = hop(state, kv, pairs)
        return (state, sent, jax.tree.map(jnp.add, arrived, of_hop)), None

    last = len(tables) - 1
    if not last:
        return hop(state, kv, tables[0][rank])
    moves = np.diff([*distances, len(pairs[0])]).tolist()  # the last one is the way back
    sent = send(kv, moves[0])
    state, sums = hop(state, kv, tables[0][rank])
    if distances != [*range(len(distances))] or len({table.shape for table in tables[1:last]}) > 1:
        for turn in range(1, last + 1):
            kv, arrived = sent, send(sums, moves[turn - 1])
            sent = send(kv, moves[turn]) if turn < last else None
            state, of_hop = hop(state, kv, tables[turn][rank])
            sums = jax.tree.map(jnp.add, arrived, of_hop)
        return state, send(sums, moves[last])
    carry = state, sent, sums
    if last > 1:
        carry, _ = lax.scan(hop_and_send, carry, jnp.stack(tables[1:last])[:, rank])
    state, kv, sums = carry
    arrived = send(sums)
    state, of_hop = hop(state, kv, tables[last][rank])
    return state, send(jax.tree.map(jnp.add, arrived, of_hop), moves[last])


@functools.cache
def _pairs(
    queries: int, keys: int, whole: int, ranks: int, size: int, window: int, chunk: int, order: str
) -> dict[int, np.ndarray]:
    """The pairs of blocks of `size` tokens to compute, for each hop [ranks, pairs, 4]: local indices of the block of
    queries and of the block of keys, then their indices in the whole row. `queries` and `keys` are the numbers of local
    blocks, `whole` is that of a row. A hop is named by how many ranks before are those whose keys it has; those of
    which no rank sees any are left out."""
    is_ring = keys < whole
    of_ranks = np.arange(whole)[None] if queries == whole else order_of(ranks, whole, order)
    hops = []
    for hop in range(ranks if is_ring else 1):
        of_keys = np.roll(of_ranks, hop, axis=0) if is_ring else np.tile(np.arange(keys), (len(of_ranks), 1))
        hops.append([_seen_pairs(*blocks, size, window, chunk) for blocks in zip(of_ranks, of_keys)])
    counts = {hop: max(map(len, of_hop)) for hop, of_hop in enumerate(hops)}
    counts = {hop: count for hop, count in counts.items() if count or not hop}
    if len(counts) == len(hops) and not window:  # the hops after the first are one loop
        counts |= dict.fromkeys(range(1, len(hops)), max([*counts.values()][1:], default=0))
    return {hop: _alike(hops[hop], count) for hop, count in counts.items()}


def scores_in_window(seq: int, ranks: int, window: int, ring: bool, order: str = ZIGZAG) -> int:
    """Scores that each rank computes of a row of `seq` tokens in a layer with a window."""
    chunks = 1 if ranks == 1 else 2 * ranks
    chunk = seq // chunks
    size = tokens_of_block(chunk, window)
    whole = chunks * -(-chunk // size)
    keys = whole // ranks if ring else whole
    hops = _pairs(whole // ranks, keys, whole, ranks, size, window, chunk, order)
    return size**2 * sum(pairs.shape[1] for pairs in hops.values())


def _first_place(block: Any, size: int, chunk: int) -> Any:
    """The place in its row of a block's first token, if the padding at the end of a chunk has no places."""
    per_chunk = -(-chunk // size)
    return block * size if chunk % size == 0 else block // per_chunk * chunk + block % per_chunk * size


def _seen_pairs(queries: np.ndarray, keys: np.ndarray, size: int, window: int, chunk: int) -> np.ndarray:
    """The pairs, of block indices in the row, in which some query attends to some key."""
    firsts = (_first_place(blocks, size, chunk) for blocks in (queries[:, None], keys[None, :]))
    edges = [(first, first + size - 1) for first in firsts]
    query, key = np.nonzero(blocks_seen(*edges, window)[0])
    return np.stack([query, key, queries[query], keys[key]], axis=1).astype(np.int32)


def _alike(of_ranks: list[np.ndarray], count: int) -> np.ndarray:
    """As many pairs for each rank: with a window, or in contiguous order, some see fewer blocks. In those that are
    added no token sees another: the keys come after the queries."""
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


def _product(names: str, a: Array, b: Array) -> Array:
    return jnp.einsum(names, a, b, preferred_element_type=jnp.float32)


def _zeros(blocks: Array, shape: tuple[int, ...]) -> Array:
    """Zeros in float32 that vary over the axes of `blocks`."""
    return as_varying(jnp.zeros(shape, jnp.float32), varying_axes(blocks))


def _read(x: Array, block: Array) -> Array:
    return lax.dynamic_index_in_dim(x, block, keepdims=False)


def _write(x: Array, new: Array, block: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, new, block, 0)
