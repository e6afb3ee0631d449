"""What all layers of a stage share for one microbatch: where its tokens stand, and what may see what."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from parallax.model.rope import Rope
from parallax.sharding.activations import TOKENS
from parallax.sharding.zigzag import own_tokens, places


class Context(NamedTuple):
    """Of one microbatch; every tensor-parallel rank holds all positions of its context rank."""

    rope: tuple[Array, Array]  # cosines and sines, [B, S, rotated / 2]
    rows_B: Array  # index of each row in the global batch
    key: Array | None  # of dropout; None drops nothing
    segments_BN: Array | None = None  # documents of whole windows, in order; None in cached decoding
    cursor: Array | int = 0  # cached decoding: entries that the cache holds already
    row_weight: Array | None = None  # of a row in the auxiliary losses of mixtures: 1 / rows of the batch
    mask_B1ST: Array | None = None  # cached decoding: True where new token S may see entry T


def causal_mask(segments_BN: Array, queries: int | None = None) -> Array:
    """A token sees itself and what stands before it in its own segment, [B, 1, S, N] for so many queries: those of this
    context rank, by default all. `segments_BN` are those of whole rows, in order."""
    seq = segments_BN.shape[1]
    is_cut = queries not in (None, seq)
    order_S = places(TOKENS, queries) if is_cut else jnp.arange(seq)
    own_BS = own_tokens(segments_BN, axis=1) if is_cut else segments_BN
    causal_SN = order_S[:, None] >= jnp.arange(seq)[None, :]
    same_BSN = own_BS[:, :, None] == segments_BN[:, None, :]
    return (causal_SN[None] & same_BSN)[:, None]


def segment_mask(segments_BN: Array) -> Array:
    """A token sees those of its own segment, [B, 1, N, N]: what remains of `causal_mask` where a kernel is causal."""
    return (segments_BN[:, :, None] == segments_BN[:, None, :])[:, None]


def training_context(
    rope: Rope,
    positions_BS: Array,
    segments_BN: Array,
    rows_B: Array,
    key: Array | None,
    row_weight: Array | None = None,
) -> Context:
    """The context of whole windows: causal inside each document. Positions are those of this context rank's tokens,
    segments those of all."""
    return Context(rope.tables(positions_BS), rows_B, key, segments_BN, row_weight=row_weight)
