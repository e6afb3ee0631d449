"""Rotary position embedding, per head (Su et al. 2021), with linear and YaRN scaling (Peng et al. 2023)."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from parallax.collectives import as_varying, varying_axes

# YaRN, section 3.2: dims that turn more than 32 times in the original context are kept, fewer than once stretched.
FAST_TURNS, SLOW_TURNS = 32, 1


@dataclasses.dataclass(frozen=True)
class Rope:
    """Angles for heads of `width` (even) rotated dims; every head gets the same, whatever the cut.

    >>> Rope(width=4, theta=100.0, scaling="none", factor=1.0, original_seq=0).frequencies().tolist()
    [1.0, 0.1]
    """

    width: int
    theta: float
    scaling: str  # "none" | "linear" | "yarn"
    factor: float
    original_seq: int

    def frequencies(self) -> np.ndarray:
        """Radians per position of each pair of dims, shape [width / 2]."""
        plain = self.theta ** (-np.arange(0, self.width, 2) / self.width)
        return {"none": lambda: plain, "linear": lambda: plain / self.factor, "yarn": self._yarn}[self.scaling]()

    def temperature(self) -> float:
        """What YaRN multiplies attention logits by (its section 3.3: 1/t = (0.1 ln factor + 1)^2); else 1."""
        return (0.1 * math.log(self.factor) + 1) ** 2 if self.scaling == "yarn" else 1.0

    def tables(self, positions_BS: Array) -> tuple[Array, Array]:
        """Cosines and sines in float32, both [B, S, width / 2]."""
        frequencies = jnp.asarray(self.frequencies(), jnp.float32)[None, None]
        angles = positions_BS[..., None].astype(jnp.float32) * frequencies
        return jnp.cos(angles), jnp.sin(angles)

    def _yarn(self) -> np.ndarray:
        plain = self.theta ** (-np.arange(0, self.width, 2) / self.width)
        low, high = (self._dim_that_turns(turns) for turns in (FAST_TURNS, SLOW_TURNS))
        low, high = max(math.floor(low), 0), min(math.ceil(high), self.width - 1)
        stretched = np.clip((np.arange(self.width // 2) - low) / max(high - low, 1e-3), 0, 1)
        return plain / self.factor * stretched + plain * (1 - stretched)

    def _dim_that_turns(self, turns: float) -> float:
        pairs = math.log(self.original_seq / (turns * 2 * math.pi)) / math.log(self.theta)
        return self.width * pairs / 2


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
