"""Dropout whose mask depends on the index in the whole array, so that sharding does not change it."""

import math
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from parallax.sharding.collectives import offset
from parallax.sharding.layout import Layout
from parallax.sharding.zigzag import ZIGZAG, places


class Dropout(nn.Module):
    """Zero each entry of an activation, of dims `batch seq` and others, with probability `rate`, scale the rest.

    `site` distinguishes the dropouts of one layer, `rows_B` are the rows' indices in the global batch. Without a key
    nothing is dropped. Tokens are at `places_S` of their rows, by default those that the layout says.

    Communication:
        forward   nothing
        backward  nothing
    """

    layout: str  # of x
    sizes: Mapping[str, int]
    rate: float
    site: int
    order: str = ZIGZAG  # of the tokens on context ranks

    def __call__(self, x: Array, rows_B: Array, key: Array | None, places_S: Array | None = None) -> Array:
        if self.rate == 0 or key is None:
            return x
        keep = self._bits(x, rows_B, key, places_S) >= jnp.uint32(self.rate * 2**32)
        return jnp.where(keep, x / (1 - self.rate), 0).astype(x.dtype)

    def _bits(self, x: Array, rows_B: Array, key: Array, places_S: Array | None) -> Array:
        layout = Layout.parse(self.layout)
        seq_S = places(layout, x.shape[1], self.order) if places_S is None else places_S
        first, *others = zip(layout.names[2:], x.shape[2:])
        entry = _indices(layout, *first)
        for name, size in others:
            entry = (entry[:, None] * self.sizes[name] + _indices(layout, name, size)[None]).reshape(-1)
        place_SD = seq_S[:, None] * math.prod(self.sizes[name] for name in layout.names[2:]) + entry[None, :]
        key = jax.random.fold_in(key, self.site)
        key_B = jax.vmap(jax.random.fold_in, (None, 0))(key, rows_B)
        folded = jax.vmap(lambda key: jax.vmap(jax.vmap(lambda place: jax.random.fold_in(key, place)))(place_SD))
        return jax.random.key_data(folded(key_B))[..., 0].reshape(x.shape)


def _indices(layout: Layout, name: str, size: int) -> Array:
    """Indices in the whole array of this rank's part of a dim."""
    return offset(layout, name, size) + jnp.arange(size)
