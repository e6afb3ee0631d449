"""Padding of the vocab: rows of the tables behind its entries, so that a mesh can cut them; they have no logits."""

import jax.numpy as jnp
from jax import Array

from parallax.sharding.collectives import offset, ranks_over
from parallax.sharding.layout import Layout


def without_padding(logits: Array, table: Layout, entries: int) -> Array:
    """Logits [..., V] of which those behind the vocab's first `entries` are -inf; `table` says how the vocab is cut.

    No softmax gives them a share, no sampling chooses them, and no gradient reaches their rows.

    Communication:
        forward   nothing
        backward  nothing
    """
    columns = logits.shape[-1]
    if columns * ranks_over(table.cut_of("vocab")) == entries:
        return logits
    return jnp.where(offset(table, "vocab", columns) + jnp.arange(columns) < entries, logits, -jnp.inf)
