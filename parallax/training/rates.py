"""The learning rate of any update, on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from parallax.config.sections import OptimizerConfig
from parallax.training.optimizer import learning_rate

BLOCK = 1024  # updates


class Rates:
    """`rates[n]` is the rate of update n, counted from 0. Computed a block at a time: the devices are busy, and a run
    may have more steps than fit into a list."""

    def __init__(self, config: OptimizerConfig, steps: int):
        self._schedule = jax.jit(jax.vmap(learning_rate(config, steps)))
        self._block = functools.lru_cache(maxsize=2)(self._compute)

    def __getitem__(self, update: int) -> float:
        return float(self._block(update // BLOCK)[update % BLOCK])

    def _compute(self, block: int) -> np.ndarray:
        return np.asarray(self._schedule(block * BLOCK + jnp.arange(BLOCK)))
