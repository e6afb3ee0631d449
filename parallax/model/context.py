"""Inputs that all layers of a stage share for one microbatch: positions, masks and row numbers of its tokens."""

from typing import NamedTuple

from jax import Array

from parallax.model.mask import Mask


class Context(NamedTuple):
    """Shared inputs of one microbatch; every tensor-parallel rank holds all positions of its context rank."""

    rope: tuple[Array, Array]  # `Rope.tables` of its tokens' positions: cosines and sines, [B, S, rotated / 2]
    rows_B: Array  # index of each row in the global batch
    key: Array | None  # of dropout; None disables it
    mask: Mask
    row_weight: Array | None = None  # weight of a row in the auxiliary losses of mixtures: 1 / rows of the batch
