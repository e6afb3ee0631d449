"""What follows the head's product: a factor on logits and a soft cap (Gemma 2, section 2)."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from parallax.config.sections import ModelConfig


class LogitForm(NamedTuple):
    """A factor on logits, and then a soft cap, `cap * tanh(logit / cap)`, unless it is 0. No communication.

    >>> LogitForm(scale=0.5, cap=2.0)(jnp.array([0.0, 1e6])).tolist(), LogitForm()(jnp.array([7.0])).tolist()
    ([0.0, 2.0], [7.0])
    """

    scale: float = 1.0
    cap: float = 0.0

    @staticmethod
    def of(model: ModelConfig) -> "LogitForm":
        """The form of a model's logits."""
        return LogitForm(model.logit_scale, model.logit_cap)

    def __call__(self, logits: Array) -> Array:
        return soft_capped(scaled(logits, self.scale), self.cap)


PLAIN = LogitForm()


def scaled(x: Array, factor: float) -> Array:
    """`factor * x`; x if the factor is 1."""
    return x if factor == 1 else factor * x


def soft_capped(x: Array, cap: float) -> Array:
    """`cap * tanh(x / cap)`; x if the cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x
