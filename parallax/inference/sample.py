"""Sampling of the next token from logits: temperature, top-k and top-p."""

import jax
import jax.numpy as jnp
from jax import Array

from parallax.config.sections import SampleConfig


def noise_keys(key: Array, rows_B: Array, positions_B: Array) -> Array:
    """A key for each row of the global batch at its position, so that sharding does not change the samples."""
    fold = jax.vmap(lambda row, position: jax.random.fold_in(jax.random.fold_in(key, row), position))
    return fold(rows_B, positions_B)


def sample_tokens(logits_BV: Array, keys_B: Array, config: SampleConfig) -> Array:
    """One token for each row, int32 [B]; equal logits, keys and config give equal tokens."""
    if config.temperature == 0:
        return logits_BV.argmax(axis=-1).astype(jnp.int32)
    logits_BV = logits_BV.astype(jnp.float32)
    # The largest logit becomes 0, so that dividing by a small temperature gives no infinity.
    scaled_BV = (logits_BV - logits_BV.max(axis=-1, keepdims=True)) / config.temperature
    kept_BV = keep_top_p(keep_top_k(scaled_BV, config.top_k), config.top_p)
    return jax.vmap(jax.random.categorical)(keys_B, kept_BV).astype(jnp.int32)


def keep_top_k(logits_BV: Array, k: int) -> Array:
    """-inf for all but the k largest logits of a row; 0 keeps all.

    >>> keep_top_k(jnp.array([[1.0, 3.0, 2.0]]), 2).tolist()
    [[-inf, 3.0, 2.0]]
    """
    if k == 0 or k >= logits_BV.shape[-1]:
        return logits_BV
    least_B1 = jax.lax.top_k(logits_BV, k)[0][:, -1:]
    return jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)


def keep_top_p(logits_BV: Array, p: float) -> Array:
    """-inf for all but the smallest set of most likely tokens whose probability reaches p (Holtzman et al. 2020).

    >>> keep_top_p(jnp.array([[2.0, 1.0, 0.0]]), 0.8).tolist()
    [[2.0, 1.0, -inf]]
    """
    if p == 1:
        return logits_BV
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    probability_BV = jax.nn.softmax(sorted_BV, axis=-1)
    # A token is kept while the more likely ones have not reached p; the most likely one is always kept.
    stays_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV < p
    least_B1 = jnp.where(stays_BV, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
