"""Padding of the vocab: additional table rows, so that the vocab divides over the mesh; they have no logits."""

import jax.numpy as jnp
from jax import Array

from parallax.sharding.collectives import offset, ranks_over
from parallax.sharding.layout import Layout


def without_padding(logits: Array, table: Layout, entries: int) -> Array:
    """Set logits [..., V] after the vocab's first `entries` to -inf; `table` says how the vocab is sharded.

    Then softmax gives them probability 0, sampling never chooses them, and their rows get no gradient.

    Communication:
        forward   nothing
        backward  nothing
    """
    columns = logits.shape[-1]
    if columns * ranks_over(table.cut_of("vocab")) == entries:
        return logits
    return jnp.where(offset(table, "vocab", columns) + jnp.arange(columns) < entries, logits, -jnp.inf)
