"""Rotary position embedding, per head (Su et al. 2021), with linear, YaRN (Peng et al. 2023) and Llama 3's scaling."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from parallax.config.sections import ModelConfig
from parallax.model.logits import scaled
from parallax.sharding.collectives import as_varying, varying_axes
from parallax.sharding.compiler import swaps_in_place

AS_IN_PAPER = 0  # of model.rope_temperature


class Rope(NamedTuple):
    """The rotary positions of a model; every head gets the same angles, however it is sharded.

    Scalings except "linear" keep frequencies with more than `rope_fast_turns` turns in the original context and divide
    those with fewer than `rope_slow_turns` turns by `rope_factor`. Between them yarn interpolates by dim (its section
    3.2: 32 and 1 turns), llama3 by turns (Grattafiori et al. 2024: 4 and 1).

    >>> Rope(ModelConfig(attention="gqa", d_head=4, rope_theta=100.0)).frequencies().tolist()
    [1.0, 0.1]
    """

    model: ModelConfig

    @property
    def width(self) -> int:
        """Rotated dims of a head, an even number."""
        return self.model.rotated

    def frequencies(self) -> np.ndarray:
        """Radians per position of each pair of dims, shape [width / 2]; 0 if nothing is rotated."""
        if not self.model.rope:
            return np.zeros(self.width // 2)
        plain = self.model.rope_theta ** (-np.arange(0, self.width, 2) / self.width)
        stretched = {
            "none": np.zeros_like,
            "linear": np.ones_like,
            "yarn": self._stretched_by_dim,
            "llama3": self._stretched_by_turns,
        }[self.model.rope_scaling](plain)
        return plain / self.model.rope_factor * stretched + plain * (1 - stretched)

    def temperature(self) -> float:
        """Factor on attention logits; (0.1 ln factor + 1)^2 in YaRN's paper (section 3.3), 1 for other scalings."""
        if self.model.rope_temperature != AS_IN_PAPER:
            return self.model.rope_temperature
        is_yarn = self.model.rope and self.model.rope_scaling == "yarn"
        return (0.1 * math.log(self.model.rope_factor) + 1) ** 2 if is_yarn else 1.0

    @property
    def magnitude(self) -> float:
        """Factor on the rotated parts of queries and of keys."""
        return self.model.rope_magnitude if self.model.rope else 1.0

    @property
    def rotation(self) -> tuple[float, ...]:
        """What the tables follow from besides positions."""
        return (*self.frequencies().tolist(), self.magnitude)

    def tables(self, positions_BS: Array) -> tuple[Array, Array]:
        """Cosines and sines in float32, both [B, S, width / 2]."""
        frequencies = jnp.asarray(self.frequencies(), jnp.float32)[None, None]
        angles = positions_BS[..., None].astype(jnp.float32) * frequencies
        tables = jnp.cos(angles), jnp.sin(angles)
        return tables if self.magnitude == 1 else tuple(self.magnitude * table for table in tables)

    def _stretched_by_dim(self, plain: np.ndarray) -> np.ndarray:
        low, high = map(self._dim_that_turns, (self.model.rope_fast_turns, self.model.rope_slow_turns))
        if self.model.rope_truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.width - 1)
        return np.clip((np.arange(len(plain)) - low) / max(high - low, 1e-3), 0, 1)

    def _stretched_by_turns(self, plain: np.ndarray) -> np.ndarray:
        turns = self.model.rope_original_seq * plain / (2 * math.pi)
        fast, slow = self.model.rope_fast_turns, self.model.rope_slow_turns
        return np.clip((fast - turns) / (fast - slow), 0, 1)

    def _dim_that_turns(self, turns: float) -> float:
        pairs = math.log(self.model.rope_original_seq / (turns * 2 * math.pi)) / math.log(self.model.rope_theta)
        return self.width * pairs / 2


def rotate(x_BSHP: Array, tables: tuple[Array, Array], *, scale: float = 1.0) -> Array:
    """Rotate the pairs (i, i + width/2) of the last dim by the tables' angles, which give the width; entries before the
    last `width` are not rotated. All entries are multiplied by `scale`."""
    head = x_BSHP.shape[-1] - 2 * tables[0].shape[-1]
    if head == x_BSHP.shape[-1]:
        return scaled(x_BSHP, scale)
    cos_BS1p, sin_BS1p = (table[:, :, None] for table in tables)
    # Marked as varying once: if x is the same on ranks whose tables differ, each product would sum its gradient.
    x_BSHP = as_varying(x_BSHP, varying_axes(cos_BS1p))
    stays = jnp.zeros((*cos_BS1p.shape[:3], head), cos_BS1p.dtype)
    cos_BS1P = jnp.concatenate([1 + stays, cos_BS1p, cos_BS1p], axis=-1)
    sin_BS1P = jnp.concatenate([stays, -sin_BS1p, sin_BS1p], axis=-1)
    if scale != 1:
        cos_BS1P, sin_BS1P = scale * cos_BS1P, scale * sin_BS1P
    return (x_BSHP * cos_BS1P + _halves_swapped(x_BSHP, head) * sin_BS1P).astype(x_BSHP.dtype)


def _halves_swapped(x_BSHP: Array, head: int) -> Array:
    width = x_BSHP.shape[-1] - head
    if swaps_in_place() and not head:
        return jnp.roll(x_BSHP, width // 2, axis=-1)
    swap_PP = jnp.roll(jnp.eye(width, dtype=x_BSHP.dtype), width // 2, axis=1)
    swap_PP = jnp.pad(swap_PP, ((head, 0), (head, 0)))
    return jnp.einsum("BSHP,PQ->BSHQ", x_BSHP, swap_PP, precision=lax.Precision.HIGHEST)
