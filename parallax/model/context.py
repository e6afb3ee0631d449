"""Inputs that all layers of a stage share for one microbatch: positions, segments and masks of its tokens."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from parallax.model.rope import Rope
from parallax.sharding.activations import TOKENS
from parallax.sharding.zigzag import own_tokens, places


class Context(NamedTuple):
    """Shared inputs of one microbatch; every tensor-parallel rank holds all positions of its context rank."""

    rope: tuple[Array, Array]  # cosines and sines, [B, S, rotated / 2]
    rows_B: Array  # index of each row in the global batch
    key: Array | None  # of dropout; None disables it
    segments_BN: Array | None = None  # documents of whole windows, in order; None if there is a mask
    cursor: Array | int = 0  # cached decoding: number of entries already in the cache
    row_weight: Array | None = None  # weight of a row in the auxiliary losses of mixtures: 1 / rows of the batch
    mask_B1ST: Array | None = None  # cached decoding: True where new token S may attend to entry T


def causal_mask(segments_BN: Array, queries: int | None = None) -> Array:
    """Mask with which a token attends to itself and earlier tokens of its segment, [B, 1, S, N]. `queries` is the
    number of this context rank's queries, by default all. `segments_BN` are those of whole rows, in order."""
    seq = segments_BN.shape[1]
    is_cut = queries not in (None, seq)
    order_S = places(TOKENS, queries) if is_cut else jnp.arange(seq)
    own_BS = own_tokens(segments_BN, axis=1) if is_cut else segments_BN
    causal_SN = order_S[:, None] >= jnp.arange(seq)[None, :]
    same_BSN = own_BS[:, :, None] == segments_BN[:, None, :]
    return (causal_SN[None] & same_BSN)[:, None]


def segment_mask(segments_BN: Array) -> Array:
    """Mask with which a token attends to its own segment, [B, 1, N, N]; for kernels that are causal themselves."""
    return (segments_BN[:, :, None] == segments_BN[:, None, :])[:, None]


def training_context(
    rope: Rope,
    positions_BS: Array,
    segments_BN: Array,
    rows_B: Array,
    key: Array | None,
    row_weight: Array | None = None,
) -> Context:
    """The context of whole windows: causal attention within each document. `positions` are those of this context rank's
    tokens, `segments` those of whole rows."""
    return Context(rope.tables(positions_BS), rows_B, key, segments_BN, row_weight=row_weight)
