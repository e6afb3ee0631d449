"""Softmax attention, and grouped-query attention (Ainslie et al. 2023), with MHA and MQA as its two extremes."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.config.sections import ATTENTION, DIRECT
from parallax.model.context import Context
from parallax.model.dense import Dense
from parallax.model.experts.router import with_gradients
from parallax.model.families import ContextForm, Family
from parallax.model.halo import reshard_seen
from parallax.model.heads_norm import HeadsNorm
from parallax.model.kernels.blockwise import blockwise_attention
from parallax.model.kernels.cudnn import cudnn_attention
from parallax.model.kernels.splash import splash_attention
from parallax.model.kernels.triton import triton_attention
from parallax.model.logits import soft_capped
from parallax.model.mask import Mask, blocks_seen
from parallax.model.norm import RMSNorm
from parallax.model.rope import rotate
from parallax.sharding.activations import ROWS, SEQ, activation
from parallax.sharding.collectives import cut, offset, vary_alike
from parallax.sharding.compiler import scales_queries_first
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import parameter
from parallax.sharding.streams import Streams, tokens_in_order
from parallax.sharding.zigzag import context_ranks, reshard_in_order

INTERMEDIATES = "intermediates"  # the name of Flax's collection
LOGITS_SIDE = 512  # tokens on a side of a block of scores of which the largest is taken


def as_it_is(x: Array, *others: Any) -> Array:
    """x, in the place of a layer that a model does not have."""
    return x


def attend(
    q_BSHJ: Array,
    k_BTGJ: Array,
    v_BTGK: Array,
    mask: Mask,
    *,
    scale: float,
    kernel: str,
    cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Softmax attention, [B, S, H, K]; groups of H / G query heads share a key head. If queries and keys are those of
    one context rank, the keys of the others come in a ring; otherwise nothing is sent.

    Scores have a soft cap, `cap * tanh(score / cap)`, if it is not 0 (Gemma 2, section 2). With `sinks` [H] the
    softmax of each head counts one more logit, which has no value (gpt-oss; Xiao et al. 2023, section 3).
    """
    assert mask.cursor is None, "new tokens read a cache: attend_to_cache"
    if kernel == "splash":
        return splash_attention(q_BSHJ, k_BTGJ, v_BTGK, mask, scale=scale, cap=cap, sinks=sinks)
    if kernel == "triton":
        return triton_attention(q_BSHJ, k_BTGJ, v_BTGK, mask, scale=scale, cap=cap, sinks=sinks)
    if kernel == "cudnn":
        assert not cap and sinks is None, "model.kernel='cudnn' has neither caps nor sinks"
        return _padded(partial(cudnn_attention, mask=mask, scale=scale), q_BSHJ, k_BTGJ, v_BTGK)
    return blockwise_attention(q_BSHJ, k_BTGJ, v_BTGK, mask, scale=scale, cap=cap, sinks=sinks)


def attend_to_cache(
    pairs: Sequence[tuple[Array, Array]],
    v_BGTK: Array,
    mask: Mask,
    *,
    scale: float,
    cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """`attend` from new tokens to those of a cache, in which heads come before tokens. `pairs` are parts of queries
    [B, S, H, J] and of keys [B, G, T, J], whose scores are added."""
    heads = v_BGTK.shape[1]
    scores = [
        jnp.einsum("BSGMJ,BGTJ->BGMST", _in_groups(q_BSHJ, heads), k_BGTJ, preferred_element_type=jnp.float32)
        for q_BSHJ, k_BGTJ in pairs
    ]
    weights_BHST = _weights_of(sum(scores), mask, scale=scale, cap=cap, sinks=sinks)
    weights = rearrange(weights_BHST.astype(v_BGTK.dtype), "B (G M) S T -> B G M S T", G=heads)
    return rearrange(jnp.einsum("BGMST,BGTK->BSGMK", weights, v_BGTK), "B S G M K -> B S (G M) K")


def _padded(kernel_of: Callable, q_BSHJ: Array, k_BTGJ: Array, v_BTGK: Array) -> Array:
    """Call a kernel that needs one head width: narrower value heads are padded with zeros."""
    width = v_BTGK.shape[-1]
    v_BTGJ = jnp.pad(v_BTGK, ((0, 0),) * 3 + ((0, k_BTGJ.shape[-1] - width),))
    return kernel_of(q_BSHJ, k_BTGJ, v_BTGJ)[..., :width]


def attend_over_context(
    form: ContextForm,
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    keys: str,
    scale: float,
    kernel: str,
    cap: float = 0.0,
    sinks: Array | None = None,
    observe: Callable[..., Array] = as_it_is,
) -> Array:
    """`attend` from this context rank's queries to the keys of all ranks, [B, S, H, K]. `keys` is how cp shards seq of
    the given `k` and `v`: if cp shards it but the form needs whole rows, they are gathered, or exchanged for heads. A
    ring sends what `blockwise_attention` says. `observe` is LargestLogits, or returns the output as it is.

    Communication, all_gather:
        forward   all_gather of k and v over cp if they are cut over it
        backward  all_to_all of k's gradient and v's gradient over cp if they are cut over it
    Communication, ring:
        forward   nothing
        backward  nothing
    Communication, ulysses:
        forward   all_to_all of q, k, v and the result over cp
        backward  the transposes
    """
    mine, core = activation("heads/tp d_head"), activation(f"{form.heads} d_head", seq=form.queries)
    held, wanted = activation("heads/tp d_head", seq=keys), activation(f"{form.heads} d_head", seq=form.keys)
    if form.heads != "heads/tp":
        k, v = (_in_pieces(heads, context_ranks()) for heads in (k, v))
    q = reshard_in_order(f"{mine} -> {core}", q, form.order)
    k, v = reshard_seen([(f"{held} -> {wanted}", heads) for heads in (k, v)], mask)
    sinks = None if sinks is None else cut(f"heads/tp -> {form.heads}", sinks)
    out = attend(q, k, v, mask, scale=scale, kernel=kernel, cap=cap, sinks=sinks)
    out = observe(out, q, k, mask, scale, form.heads)
    return reshard_in_order(f"{core} -> {mine}", out, form.order)


def _in_pieces(kv_BTGK: Array, ranks: int) -> Array:
    """Key or value heads, each repeated until they divide over `ranks`."""
    heads = kv_BTGK.shape[2]
    return repeat(kv_BTGK, "B T G K -> B T (G times) K", times=ranks // math.gcd(heads, ranks))


def attention_weights(
    q_BSHJ: Array, k_BTGJ: Array, mask: Mask, *, scale: float, cap: float = 0.0, sinks: Array | None = None
) -> Array:
    """Attention weights as in `attend`: float32 [B, H, S, T]; each query's row adds up to 1, or less with `sinks`. No
    communication."""
    q_BSGMJ = _in_groups(q_BSHJ, k_BTGJ.shape[2])
    scores = jnp.einsum("BSGMJ,BTGJ->BGMST", q_BSGMJ, k_BTGJ, preferred_element_type=jnp.float32)
    return _weights_of(scores, mask, scale=scale, cap=cap, sinks=sinks)


def _in_groups(q_BSHJ: Array, heads: int) -> Array:
    return rearrange(q_BSHJ, "B S (G M) J -> B S G M J", G=heads)


def _weights_of(scores_BGMST: Array, mask: Mask, *, scale: float, cap: float, sinks: Array | None) -> Array:
    scores_BHST = soft_capped(rearrange(scale * scores_BGMST, "B G M S T -> B (G M) S T"), cap)
    scores_BHST = jnp.where(mask.dense(scores_BHST.shape[2]), scores_BHST, -jnp.inf)
    if sinks is None:
        return jax.nn.softmax(scores_BHST, axis=-1)
    total_BHS1 = jnp.logaddexp(jax.nn.logsumexp(scores_BHST, axis=-1, keepdims=True), sinks[None, :, None, None])
    return jnp.exp(scores_BHST - total_BHS1)


def sow_intermediates(layer: nn.Module, mask: Mask, q: Array, k: Array, *, cache: dict, **scores: Any) -> None:
    """Sow attention weights and cache entries if INTERMEDIATES is mutable; otherwise nothing is computed. `scores` are
    further arguments of `attention_weights`."""
    if layer.is_mutable_collection(INTERMEDIATES):
        seen = {"weights": attention_weights(q, k, mask, **scores), "cache": cache}
        layer.sow(INTERMEDIATES, "seen", seen, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def update_kv_cache(cache: Array, new: Array, mask: Mask) -> Array:
    """Write the entries of new tokens into the cache, [..., tokens, width] both, from slot `mask.cursor` on, by default
    from the first. If it has fewer slots than there are tokens, it is a ring: a token is in the slot of its place
    modulo the slots."""
    first, slots = 0 if mask.cursor is None else mask.cursor, cache.shape[-2]
    new = new.astype(cache.dtype)
    if slots >= mask.segments_BN.shape[1]:
        return lax.dynamic_update_slice_in_dim(cache, new, first, axis=-2)
    last_S = first + jnp.arange(new.shape[-2])[-slots:]
    return cache.at[..., last_S % slots, :].set(new[..., -slots:, :], unique_indices=True)


def through_cache(
    cache: dict[str, Array], new: dict[str, Array], mask: Mask
) -> tuple[dict[str, Array], Mask, dict[str, Array]]:
    """The entries [..., tokens, width] that new tokens attend to, their mask, and the cache with the new tokens.
    Without a cursor the cache is empty, and the new tokens attend to each other.

    A ring has a layer's window of tokens. A new token takes the slot of one that it does not see; of several, each may
    see what the next overwrites, so they attend to the ring as it was, and to each other.
    """
    written = {name: update_kv_cache(cache[name], entries, mask) for name, entries in new.items()}
    if mask.cursor is None:
        return new, mask, written
    slots, tokens = (next(iter(entries.values())).shape[-2] for entries in (cache, new))
    if slots >= mask.segments_BN.shape[1]:
        return written, mask, written
    if tokens == 1:
        return written, mask.replace(key_places=_places_in_ring(slots, mask.cursor + 1)), written
    places_T = jnp.append(_places_in_ring(slots, mask.cursor), mask.cursor + jnp.arange(tokens))
    both = {name: jnp.concatenate([cache[name], new[name].astype(cache[name].dtype)], axis=-2) for name in new}
    return both, mask.replace(key_places=places_T), written


def _places_in_ring(slots: int, tokens: Array | int) -> Array:
    """The place of the token in each slot of a ring after so many tokens, negative for a slot that is empty.

    >>> _places_in_ring(4, 6).tolist(), _places_in_ring(4, 3).tolist()
    ([4, 5, 2, 3], [0, 1, 2, -1])
    """
    last = tokens - 1
    return last - (last - jnp.arange(slots)) % slots


class Sinks(nn.Module):
    """A trained logit of each head: see `attend`.

    Communication:
        forward   nothing
        backward  nothing
    """

    sizes: Mapping[str, int]

    @nn.compact
    def __call__(self) -> Array:
        zeros = nn.initializers.zeros
        return parameter(self, "logits", "heads/tp", self.sizes, zeros, role="bias", part=ATTENTION)


def no_sinks() -> None:
    """In the place of Sinks."""


class LargestLogits(nn.Module):
    """The largest logit of each head in a step, 0 or more: a statistic, see `with_gradients`.

    Communication:
        forward   nothing
        backward  nothing
    """

    sizes: Mapping[str, int]

    @nn.compact
    def __call__(self, out: Array, q: Array, k: Array, mask: Mask, scale: float, heads: str) -> Array:
        """`out`, the result of attention of `heads`, which may be some of this rank's."""
        zeros, mine = nn.initializers.zeros, "heads/tp"
        of_heads = parameter(self, "of_heads", mine, self.sizes, zeros, role="logits", part=ATTENTION)
        largest_H = checkpoint_name(largest_logits(q, k, mask, scale=scale), "core")
        sizes = zip((heads, mine), (len(largest_H), len(of_heads)))
        first, before = (offset(Layout.parse(layout), "heads", size) for layout, size in sizes)
        largest_H, others, place = vary_alike((largest_H, jnp.zeros_like(of_heads), jnp.int32(first - before)))
        return with_gradients(out, of_heads, lax.dynamic_update_slice_in_dim(others, largest_H, place, axis=0))


def largest_logits(q_BSHJ: Array, k_BTGJ: Array, mask: Mask, *, scale: float) -> Array:
    """The largest score of each head, float32 [H], of its queries with the keys that they attend to. It has no
    gradient, and is computed in blocks. Keys are those of whole rows."""
    queries, keys = q_BSHJ.shape[1], k_BTGJ.shape[1]
    places_T = jnp.arange(keys)
    places_S, segments_BS = mask.of_queries(queries, places_T)
    q, k = lax.stop_gradient((_in_groups(q_BSHJ, k_BTGJ.shape[2]), k_BTGJ))
    rows, columns = min(queries, LOGITS_SIDE), min(keys, LOGITS_SIDE)
    blocks = itertools.product(range(0, queries, rows), range(0, keys, columns))

    def is_seen(block: tuple[int, int]) -> bool:
        """Whether a query of a block may attend to a key of it; that of a context rank, whose places differ, may."""
        row, column = block
        places = (row, row + rows - 1), (column, column + columns - 1)
        return queries < keys or blocks_seen(*places, mask.longest_window)[0]

    start_GM = jnp.full(q.shape[2:4], -jnp.inf, jnp.float32)
    given = q, k, places_S, places_T, segments_BS, mask, start_GM
    q, k, places_S, places_T, segments_BS, mask, start_GM = vary_alike(given)

    def of_block(largest_GM: Array, starts: Array) -> tuple[Array, None]:
        some = partial(lax.dynamic_slice_in_dim, start_index=starts[0], slice_size=rows)
        others = partial(lax.dynamic_slice_in_dim, start_index=starts[1], slice_size=columns)
        segments = some(segments_BS, axis=1), others(mask.segments_BN, axis=1)
        seen_BST = mask.allows(some(places_S)[:, None], others(places_T)[None], *segments)
        pair = some(q, axis=1), others(k, axis=1)
        scores = scale * jnp.einsum("BSGMJ,BTGJ->BGMST", *pair, preferred_element_type=jnp.float32)
        scores = jnp.where(seen_BST[:, None, None], scores, -jnp.inf)
        return jnp.maximum(largest_GM, scores.max(axis=(0, 3, 4))), None

    return lax.scan(of_block, start_GM, jnp.asarray([*filter(is_seen, blocks)]))[0].reshape(-1)


class GQA(nn.Module):
    """Queries in `heads` heads, keys and values in `kv_heads`; all sharded over `tp` by heads.

    If `tp` is larger than `kv_heads`, `kv` is "kv_heads": every rank projects all of them and keeps the ones that its
    query heads read. With `qk_norm` each query and key head has an RMSNorm before it is rotated, or after, with one
    scale for all heads (Henry et al. 2020, as in Qwen3). Heads are whole, so the norm sends nothing; a norm over all
    heads of a projection (as in OLMo 2) sums squares. Over `cp` it sends what `attend_over_context` sends. In the
    family streams permutes are sent for each other rank.

    Communication, column_row:
        forward   all_gather of x over tp; reduce_scatter of the result over tp;
                  all_reduce of q's squares over tp if heads are normed together;
                  all_reduce of k's squares over tp if kv_heads are cut and normed together
        backward  all_gather of the result's gradient over tp; reduce_scatter of x's gradient over tp;
                  all_reduce of what q's norm needs over tp if heads are normed together;
                  all_reduce of what k's norm needs over tp if kv_heads are cut and normed together
    Communication, streams:
        forward   permute of x and the result over tp;
                  all_reduce of q's squares over tp if heads are normed together;
                  all_reduce of k's squares over tp if kv_heads are cut and normed together
        backward  permute of x's gradient and the result's gradient over tp;
                  all_reduce of what q's norm needs over tp if heads are normed together;
                  all_reduce of what k's norm needs over tp if kv_heads are cut and normed together
    Communication, scatter:
        forward   all_to_all of x over tp if it is cut over seq; reduce_scatter of q and the result over tp;
                  reduce_scatter of k and v over tp if kv_heads are cut;
                  all_reduce of k and v over tp if kv_heads are whole;
                  all_reduce of q's squares over tp if heads are normed together;
                  all_reduce of k's squares over tp if kv_heads are cut and normed together
        backward  the transposes; all_reduce of the gradients of k and v over tp if kv_heads are whole;
                  all_reduce of what q's norm needs over tp if heads are normed together;
                  all_reduce of what k's norm needs over tp if kv_heads are cut and normed together
    """

    residual: str
    family: Family
    kv: str  # "kv_heads/tp" | "kv_heads"
    sizes: Mapping[str, int]
    dtype: str
    kernel: str
    norm_eps: float
    bias: bool
    qk_norm: bool
    temperature: float
    out_scale: float
    matmul: str = "compute"
    matmul_residuals: str = "compute"  # of q, k and v; attention itself saves the input of `out`
    dense: Callable[..., Dense] | None = None  # makes its projections, if they are not Dense
    score_cap: float = 0.0
    sinks: bool = False
    qk_norm_over: str = "head"  # or "projection"
    qk_norm_scale: str = DIRECT  # see `scaling` of RMSNorm
    qk_norm_after_rope: bool = False
    out_bias: bool = False  # of the output projection
    clips: bool = False  # take the largest logits, by which heads are clipped

    def setup(self):
        x, out = self.family.input("d_model"), activation("heads/tp d_head")
        q, kv = (self.family.into("d_model", f"{heads} d_head") for heads in ("heads/tp", self.kv))
        wide = activation(f"{self.kv} d_head")
        dense = partial(self.dense or Dense, sizes=self.sizes, dtype=self.dtype, matmul=self.matmul, part=ATTENTION)
        into_heads = partial(dense, bias=self.bias, matmul_residuals=self.matmul_residuals)
        self.q = into_heads(q, x, out)
        self.k = into_heads(kv, x, wide)
        self.v = into_heads(kv, x, wide)
        back = self.family.back("heads/tp d_head")
        self.out = dense(back, out, self.residual, bias=self.out_bias, scale=self.out_scale)
        norm_of = HeadsNorm if self.qk_norm_over == "projection" else RMSNorm
        norm = partial(norm_of, sizes=self.sizes, eps=self.norm_eps, part=ATTENTION, scaling=self.qk_norm_scale)
        self.q_norm, self.k_norm = (norm(out), norm(wide)) if self.qk_norm else (as_it_is, as_it_is)
        # Queries are scaled in float32, before they are rounded; cached keys are the same in either case.
        self.scales_first = scales_queries_first() and not self.qk_norm_after_rope
        # Without a norm the backward pass does not read what is rotated, since rotation is linear.
        self.before_norms, self.k_after_norm = (rotate, as_it_is) if self.qk_norm_after_rope else (as_it_is, rotate)
        self.q_after_norm = partial(rotate, scale=self._scale) if self.scales_first else self.k_after_norm
        self.sink_logits = Sinks(self.sizes) if self.sinks else no_sinks
        self.largest_logits = LargestLogits(self.sizes) if self.clips else as_it_is
        self.read_by_norm = partial(checkpoint_name, name="qk") if self.qk_norm else as_it_is

    def __call__(self, x: Array, context: Context) -> Array:
        q, k, v = self._project(x, context)
        sow_intermediates(self, context.mask, q, k, cache={"k": k, "v": v}, **self._scores)
        return self.out(self._attend(q, k, v, context.mask))

    def decode(self, x: Array, context: Context, cache: dict) -> tuple[Array, dict]:
        """Attend from new tokens to what `through_cache` says; also returns the cache with them."""
        q, k, v = self._project(x, context)
        heads_first = {name: entries.swapaxes(1, 2) for name, entries in (("k", k), ("v", v))}
        kv, mask, cache = through_cache(cache, heads_first, context.mask)
        if mask.cursor is None:
            return self.out(self._attend(q, k, v, mask)), cache
        k, v = (self._read_by_these_queries(kv[name], q.shape[2], dim=1) for name in ("k", "v"))
        return self.out(attend_to_cache([(q, k)], v, mask, **self._scores)), cache

    def cache_layouts(self) -> dict[str, str]:
        """Layouts of the entries that one layer caches; `kv_seq` is the cache's length. Heads come first, so that a
        head's product reads what lies together."""
        return dict.fromkeys(("k", "v"), f"{ROWS} {self.kv} kv_seq d_head")

    def _project(self, x: Array, context: Context) -> tuple[Array, Array, Array]:
        """Queries, keys and values. A subclass that computes them in another way gives queries and keys to `_rotated`:
        on some chips that scales queries, and scores are not scaled."""
        x = self.family.read(self.residual, x)
        x = self.q.input(x, part="norm", before=self.residual, shared=True)
        q, k = self._rotated(tokens_in_order(self.q(x)), tokens_in_order(self.k(x)), context)
        return q, k, checkpoint_name(tokens_in_order(self.v(x)), "kv")

    def _rotated(self, q: Array, k: Array, context: Context) -> tuple[Array, Array]:
        """Queries and keys, rotated and normed; queries times the part of the scale that `_scores` leaves out."""
        q, k = self.before_norms(q, context.rope), self.before_norms(k, context.rope)
        q, k = self.q_norm(self.read_by_norm(q)), self.k_norm(self.read_by_norm(k))
        q = checkpoint_name(context.tempered(self.q_after_norm(q, context.rope)), "q")
        return q, checkpoint_name(self.k_after_norm(k, context.rope), "kv")

    def _attend(self, q: Array, k: Array, v: Array, mask: Mask) -> Array | Streams:
        k, v = (self._read_by_these_queries(heads, q.shape[2]) for heads in (k, v))
        form = self.family.context
        shared = dict(keys=SEQ, kernel=self.kernel, observe=self.largest_logits)
        return self.family.given_back(attend_over_context(form, q, k, v, mask, **shared, **self._scores))

    @property
    def _scores(self) -> dict[str, Any]:
        """What becomes of scores: arguments of `attend`. Their scale is the factor that `_rotated` leaves for them."""
        scale = 1.0 if self.scales_first else self._scale
        return dict(scale=scale, cap=self.score_cap, sinks=self.sink_logits())

    @property
    def _scale(self) -> float:
        return self.temperature * self.sizes["d_head"] ** -0.5

    def _read_by_these_queries(self, kv: Array, local_heads: int, *, dim: int = 2) -> Array:
        """The key or value heads that this rank's query heads read: all of them if they are sharded like queries."""
        group = self.sizes["heads"] // self.sizes["kv_heads"]
        wanted = max(local_heads // group, 1)
        if wanted == kv.shape[dim]:
            return kv
        first = offset(Layout.parse(activation("heads/tp d_head")), "heads", local_heads) // group
        return lax.dynamic_slice_in_dim(kv, first, wanted, axis=dim)
