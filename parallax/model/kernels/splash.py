"""JAX's splash attention for TPUs: attention that never stores its scores. Short windows have kernels of this
project's, which read what a window shows in one step."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.tree_util import Partial

from parallax.hardware.chips import LANES
from parallax.model.kernels.pallas import pallas_attention
from parallax.model.kernels.splash_window import (
    LONGEST_WINDOW,
    WIDEST_HEAD_IN_WINDOW,
    ShortWindow,
    attention_in_short_window,
)
from parallax.model.mask import Mask, blocks_seen, sees
from parallax.sharding.activations import CONTEXT_AXIS
from parallax.sharding.collectives import vary_alike
from parallax.sharding.platform import platform_traced
from parallax.sharding.zigzag import ZIGZAG, order_of, own_tokens

LARGEST_BLOCK = 512  # tokens: the default of MaxText; larger ones compute more of what the mask hides


def splash_attention(
    q_BSHJ: Array,
    k_BTGJ: Array,
    v_BTGK: Array,
    mask: Mask,
    *,
    scale: float,
    cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Softmax attention of each token to those that the mask shows it, [B, S, H, K]. No communication.

    The kernel holds one block of scores at a time and skips those that the mask hides by the tokens' places alone. The
    backward pass recomputes them from q, k, v, the output and each row's logsumexp in float32. `S` is a multiple of
    128, or of 256 if context ranks share the queries, since a block must not cross a chunk's border. For
    `cap` and `sinks` see `attend`.
    """
    arrays = (*(x.swapaxes(1, 2) for x in (q_BSHJ * scale, k_BTGJ, v_BTGK)), mask, sinks)
    return pallas_attention(SplashKernelOf(cap), *vary_alike(arrays)).swapaxes(1, 2)


def splash_block_tokens(seq: int, ranks: int = 1) -> int:
    """Tokens on a side of a block of scores: the largest power of two, from 128 to 512, that divides `seq`, or a chunk
    of it if `ranks` context ranks share the queries.

    >>> [splash_block_tokens(seq) for seq in (128, 768, 2048, 4096)], splash_block_tokens(2048, ranks=4)
    ([128, 256, 512, 512], 256)
    """
    tokens = seq if ranks == 1 else seq // (2 * ranks)
    return next(size for size in (LARGEST_BLOCK, 256, LANES) if tokens % size == 0)


def has_short_window(window: int, ranks: int, width: int) -> bool:
    """Whether a layer with this window and heads of this width, whose queries `ranks` context ranks share, has kernels
    of this project's."""
    return ranks == 1 and 0 < window <= LONGEST_WINDOW and width <= WIDEST_HEAD_IN_WINDOW


class SplashKernel(NamedTuple):
    """Splash attention of a row, with tables of the blocks to compute; segments of queries [B, S] and keys [B, T]."""

    of_row: Callable
    segments: splash.SegmentIds

    def __call__(self, q: Array, k: Array, v: Array, sinks: Array | None = None) -> Array:
        return jax.vmap(self.of_row, (0, 0, 0, 0, None))(q, k, v, self.segments, sinks)


class SplashKernelOf(NamedTuple):
    """Makes the kernel for queries [B, H, S, J] and keys [B, G, T, J]."""

    cap: float

    def __call__(self, q: Array, k: Array, mask: Mask) -> SplashKernel | Partial:
        (heads, queries), keys = q.shape[1:3], k.shape[2]
        ranks, segments = keys // queries, mask.segments_BN
        interpreted = platform_traced() == "cpu"
        if has_short_window(mask.window, ranks, q.shape[-1]):
            form = ShortWindow(mask.window, self.cap, interpreted)
            return Partial(functools.partial(_in_short_window, form), segments)
        places = PlacesMask(keys, ranks, mask.window, mask.order)
        kernel = _kernel_of_all_ranks(heads, places, ranks, self.cap, interpreted=interpreted)
        if ranks == 1:
            return SplashKernel(kernel, splash.SegmentIds(segments, segments))

        def of_this_rank(table: Array) -> Array:  # [queries], or [1, blocks of queries, blocks of keys]
            dim = table.ndim // 2
            size = table.shape[dim] // ranks
            return lax.dynamic_slice_in_dim(table, lax.axis_index(CONTEXT_AXIS) * size, size, dim)

        kernel = jax.tree.map(of_this_rank, kernel)
        return SplashKernel(kernel, splash.SegmentIds(own_tokens(segments, 1, mask.order), segments))


def _in_short_window(
    form: ShortWindow, segments: Array, q: Array, k: Array, v: Array, sinks: Array | None = None
) -> Array:
    return attention_in_short_window(q, k, v, segments, sinks, form)


class PlacesMask(splash.CausalMask):
    """The part of a Mask that depends on places, for keys in order and queries in the order in which context ranks hold
    them; the kernel adds segments."""

    def __init__(self, seq: int, ranks: int, window: int, order: str = ZIGZAG):
        super().__init__((seq, seq))
        self.q_sequence = order_of(ranks, seq, order).reshape(-1).astype(np.int32)
        self.window = window
        self.mask_function = functools.partial(sees, window=window)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        """The mask of a block. Most blocks have one value, so entries need not be compared: at 131,072 tokens there are
        65,536 blocks."""
        queries, keys = self.q_sequence[block[0]], block[1]
        some, every = blocks_seen((queries.min(), queries.max()), (keys.start, keys.stop - 1), self.window)
        if some and not every:
            return super().__getitem__(block)
        return np.full((len(queries), keys.stop - keys.start), every)

    # JAX caches tables by their masks.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacesMask) and self.window == other.window and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.window))


@functools.cache
def _kernel_of_all_ranks(heads: int, places: PlacesMask, ranks: int, cap: float, interpreted: bool) -> Callable:
    """The kernel of all context ranks: its tables are concatenated in the order of the ranks. Pallas interprets it on
    CPUs."""
    size = splash_block_tokens(len(places.q_sequence), ranks)
    forward = dict(block_q=size, block_kv=size, block_kv_compute=size)
    # Two backward kernels, one for dq: a fused kernel would store a float32 dq for every block of keys.
    backward = dict(block_q_dkv=size, block_kv_dkv=size, block_kv_dkv_compute=size, block_q_dq=size, block_kv_dq=size)
    mask = splash.MultiHeadMask([places] * heads)
    with jax.ensure_compile_time_eval():  # constants, even if they are first needed during tracing
        return splash.make_splash_mha(
            mask,
            block_sizes=splash.BlockSizes(**forward, **backward),
            head_shards=1,
            q_seq_shards=ranks,
            attn_logits_soft_cap=cap or None,
            interpret=interpreted,
        )
