"""What all layers of a stage share for one microbatch: where its tokens stand, and what may see what."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from parallax.model.rope import Rope


class Context(NamedTuple):
    """Of one microbatch; every tensor-parallel rank holds all of its positions."""

    rope: tuple[Array, Array]  # cosines and sines, [B, S, rotated / 2]
    mask_B1ST: Array | None  # True where query S may see key T; None where the kernel asks for segments instead
    rows_B: Array  # index of each row in the global batch
    key: Array | None  # of dropout; None drops nothing
    cursor: Array | int = 0  # cached decoding: entries that the cache holds already
    segments_BS: Array | None = None  # documents of the windows, where there is no mask


def causal_mask(segments_BS: Array) -> Array:
    """A token sees itself and what stands before it in its own segment; [B, 1, S, S]."""
    order_S = jnp.arange(segments_BS.shape[1])
    causal_ST = order_S[:, None] >= order_S[None, :]
    same_BST = segments_BS[:, :, None] == segments_BS[:, None, :]
    return (causal_ST[None] & same_BST)[:, None]


def training_context(
    rope: Rope, positions_BS: Array, segments_BS: Array, rows_B: Array, key: Array | None, *, masked: bool = True
) -> Context:
    """The context of whole windows: causal inside each document. Not `masked`, it holds the segments alone."""
    tables = rope.tables(positions_BS)
    if not masked:
        return Context(tables, None, rows_B, key, segments_BS=segments_BS)
    return Context(tables, causal_mask(segments_BS), rows_B, key)
