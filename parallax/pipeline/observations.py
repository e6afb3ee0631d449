"""What a forward pass records of activations: for the embedding and each layer, float32 [1 + layers of the model, 2],
the number of non-finite entries of the output and the largest magnitude of the others."""

import jax.numpy as jnp
from jax import Array

from parallax.config.sections import ALL_AXES
from parallax.sharding.collectives import as_varying, max_over, sum_over


def no_observations(layers: int) -> Array:
    """The observations before the first layer."""
    return as_varying(jnp.zeros((1 + layers, 2), jnp.float32))


def with_observation(seen: Array, row: Array, x: Array, counts: Array) -> Array:
    """The observations with this array's in a row, if it `counts`."""
    finite, wide = jnp.isfinite(x), jnp.abs(x.astype(jnp.float32))
    observed = jnp.stack([jnp.sum(~finite).astype(jnp.float32), jnp.max(jnp.where(finite, wide, 0))])
    observed = as_varying(jnp.where(counts, observed, 0))
    return seen.at[row].set(jnp.stack([seen[row, 0] + observed[0], jnp.maximum(seen[row, 1], observed[1])]))


def of_all_devices(seen: Array) -> Array:
    """The combined observations of all devices; each entry of an activation is on one of them."""
    return jnp.stack([sum_over(seen[:, 0], ALL_AXES), max_over(seen[:, 1], ALL_AXES)], axis=1)
