"""Rotary position embedding, per head (Su et al. 2021), with linear, YaRN (Peng et al. 2023) and Llama 3's scaling."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from parallax.config.sections import ModelConfig
from parallax.sharding.collectives import as_varying, varying_axes

PAPER = 0  # of `sharpness`: as the scaling's paper has it


@dataclasses.dataclass(frozen=True)
class Rope:
    """Angles for heads of `width` (even) rotated dims; every head gets the same, whatever the cut.

    Scalings but "linear" keep what turns more than `fast_turns` times in the original context, and stretch by `factor`
    what turns fewer than `slow_turns` times. Between them yarn goes from one to the other by dim (its section 3.2: 32
    and 1 turns), llama3 by turns (Grattafiori et al. 2024: 4 and 1).

    >>> plain = dict(fast_turns=32.0, slow_turns=1.0, sharpness=0.0, magnitude=1.0)
    >>> Rope(width=4, theta=100.0, scaling="none", factor=1.0, original_seq=0, **plain).frequencies().tolist()
    [1.0, 0.1]
    """

    width: int
    theta: float
    scaling: str  # "none" | "linear" | "yarn" | "llama3"
    factor: float
    original_seq: int
    fast_turns: float
    slow_turns: float
    sharpness: float  # what attention logits are multiplied by; PAPER
    magnitude: float  # what rotated dims of queries and of keys are multiplied by

    def frequencies(self) -> np.ndarray:
        """Radians per position of each pair of dims, shape [width / 2]."""
        plain = self.theta ** (-np.arange(0, self.width, 2) / self.width)
        stretched = {
            "none": np.zeros_like,
            "linear": np.ones_like,
            "yarn": self._stretched_by_dim,
            "llama3": self._stretched_by_turns,
        }[self.scaling](plain)
        return plain / self.factor * stretched + plain * (1 - stretched)

    def temperature(self) -> float:
        """What attention logits are multiplied by; YaRN's paper has (0.1 ln factor + 1)^2 (section 3.3), others 1."""
        if self.sharpness != PAPER:
            return self.sharpness
        return (0.1 * math.log(self.factor) + 1) ** 2 if self.scaling == "yarn" else 1.0

    def tables(self, positions_BS: Array) -> tuple[Array, Array]:
        """Cosines and sines in float32, both [B, S, width / 2]."""
        frequencies = jnp.asarray(self.frequencies(), jnp.float32)[None, None]
        angles = positions_BS[..., None].astype(jnp.float32) * frequencies
        tables = jnp.cos(angles), jnp.sin(angles)
        return tables if self.magnitude == 1 else tuple(self.magnitude * table for table in tables)

    def _stretched_by_dim(self, plain: np.ndarray) -> np.ndarray:
        low, high = (self._dim_that_turns(turns) for turns in (self.fast_turns, self.slow_turns))
        low, high = max(math.floor(low), 0), min(math.ceil(high), self.width - 1)
        return np.clip((np.arange(len(plain)) - low) / max(high - low, 1e-3), 0, 1)

    def _stretched_by_turns(self, plain: np.ndarray) -> np.ndarray:
        turns = self.original_seq * plain / (2 * math.pi)
        return np.clip((self.fast_turns - turns) / (self.fast_turns - self.slow_turns), 0, 1)

    def _dim_that_turns(self, turns: float) -> float:
        pairs = math.log(self.original_seq / (turns * 2 * math.pi)) / math.log(self.theta)
        return self.width * pairs / 2


def rope_of(model: ModelConfig) -> Rope:
    """The rotary positions of a model."""
    return Rope(
        width=model.d_rope if model.attention == "mla" else model.d_head,
        theta=model.rope_theta,
        scaling=model.rope_scaling,
        factor=model.rope_factor,
        original_seq=model.rope_original_seq,
        fast_turns=model.rope_fast_turns,
        slow_turns=model.rope_slow_turns,
        sharpness=model.rope_temperature,
        magnitude=model.rope_magnitude,
    )


def rotate(x_BSHP: Array, tables: tuple[Array, Array]) -> Array:
    """Rotate the pairs (i, i + width/2) of the last dim by the tables' angles.

    The halves change places in a product with a permutation, which is exact: matrix units move entries along the last
    dim, where TPUs hold 128 of them side by side, several times faster than slices and concatenation do.
    """
    cos_BS1p, sin_BS1p = (table[:, :, None] for table in tables)
    # Cast once: where x is the same on ranks of which the tables may differ, each product would sum its gradient.
    x_BSHP = as_varying(x_BSHP, varying_axes(cos_BS1p))
    width = x_BSHP.shape[-1]
    swap_PP = jnp.roll(jnp.eye(width, dtype=x_BSHP.dtype), width // 2, axis=1)
    wide = dict(precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    swapped_BSHP = jnp.einsum("BSHP,PQ->BSHQ", x_BSHP, swap_PP, **wide)
    cos_BS1P = jnp.concatenate([cos_BS1p, cos_BS1p], axis=-1)
    sin_BS1P = jnp.concatenate([-sin_BS1p, sin_BS1p], axis=-1)
    return (x_BSHP * cos_BS1P + swapped_BSHP * sin_BS1P).astype(x_BSHP.dtype)
