"""Inputs that all layers of a stage share for one microbatch: positions, masks and row numbers of its tokens."""

from typing import NamedTuple

from jax import Array

from parallax.model.mask import Mask
from parallax.model.rope import Rope


class Context(NamedTuple):
    """Shared inputs of one microbatch; every tensor-parallel rank holds all positions of its context rank."""

    rope: tuple[Array, Array]  # cosines and sines, [B, S, rotated / 2]
    rows_B: Array  # index of each row in the global batch
    key: Array | None  # of dropout; None disables it
    mask: Mask
    row_weight: Array | None = None  # weight of a row in the auxiliary losses of mixtures: 1 / rows of the batch


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
    return Context(rope.tables(positions_BS), rows_B, key, Mask(segments_BN), row_weight)
