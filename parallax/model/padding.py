"""Padding of the vocab: rows of the tables behind its entries, so that a mesh can cut them; they have no logits."""

import math

import jax.numpy as jnp
from jax import Array

from parallax.sharding.collectives import bound_axis_sizes, offset
from parallax.sharding.layout import Layout


def without_padding(logits: Array, table: Layout, entries: int) -> Array:
    """Logits [..., V] of which those behind the vocab's first `entries` are -inf; `table` says how the vocab is cut.

    No softmax gives them a share, no sampling chooses them, and no gradient reaches their rows.

    Communication:
        forward   nothing
        backward  nothing
    """
    columns, axes = logits.shape[-1], table.cut_of("vocab")
    ranks = math.prod(size for axis, size in bound_axis_sizes().items() if axis in axes)
    if columns * ranks == entries:
        return logits
    return jnp.where(offset(table, "vocab", columns) + jnp.arange(columns) < entries, logits, -jnp.inf)
