"""Stochastic rounding to bfloat16.

The random bits of an entry depend on the seed, the step, the parameter's name and the entry's index in the whole array,
and for a sum of gradients on the microbatch. So they are the same on every mesh; nothing is sent for them.
"""

import math
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.random import threefry2x32_p

from parallax.sharding.collectives import offset, vary_alike
from parallax.sharding.layout import Layout

ROUNDING = 0x524F554E  # "ROUN": separates these random bits from those of initial values and dropout
GRADIENTS_FIELD = "gradients"  # used like a name of an optimizer's field


def random_bits(noise: Array, field: str, name: str, shape: tuple[int, ...], layers: Array | None = None) -> Array:
    """32 random bits for each entry of an array, uint32; `noise` is int32 [2], (seed, step). With `layers` (int32) the
    array holds only those layers of a stack.

    They are those of threefry in the global view.
    """
    key = field_key(rounding_key(noise), field, name)
    if layers is None or 0 in shape:
        return jax.random.bits(key, shape, jnp.uint32)
    return _bits(key, places_in_stack(shape, layers))


def bits_in_layer(
    key: Array, name: str, layout: Layout, whole: Sequence[int], layer: Array, shape: tuple[int, ...]
) -> Array:
    """The same for a device's piece of one layer's gradient, in the local view; `shape` is the piece's.

    `key` is a `microbatch_key`; `layout` and `whole`, the shape of the stack, begin with "layers"; `layer` is the
    model's layer.
    """
    starts = [offset(layout, dim, size) for dim, size in zip(layout.names[1:], shape, strict=True)]
    indices = [jnp.full(shape, layer).astype(jnp.uint32)]
    for dim, start in enumerate(starts):
        indices.append(lax.broadcasted_iota(jnp.uint32, shape, dim) + jnp.asarray(start).astype(jnp.uint32))
    return _bits(field_key(key, GRADIENTS_FIELD, name), entry_numbers(indices, whole))


def rounding_key(noise: Array) -> Array:
    """The key of a step's random bits; `noise` is int32 [2], (seed, step)."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(noise[0], impl="threefry2x32"), ROUNDING), noise[1])


def field_key(key: Array, field: str, name: str) -> Array:
    """The key of a parameter's bits, in this field."""
    return jax.random.fold_in(key, np.uint32(zlib.crc32(f"{field} {name}".encode())))


def places_in_stack(shape: tuple[int, ...], layers: Array) -> tuple[Array, Array]:
    """Index in the whole stack of each entry of these layers, as the upper and the lower 32 bits.

    >>> high, low = places_in_stack((1, 2, 4), jnp.int32([1 << 30]))
    >>> [hex(int(half[0, 1, 3])) for half in (high, low)]
    ['0x2', '0x7']
    """
    indices = [lax.broadcasted_iota(jnp.uint32, shape, dim) for dim in range(len(shape))]
    return entry_numbers([layers.astype(jnp.uint32)[indices[0]], *indices[1:]], shape)


def entry_numbers(indices: Sequence[Array], whole: Sequence[int]) -> tuple[Array, Array]:
    """Index in a whole array of entries with these indices (uint32) in its dims, as upper and lower 32 bits."""
    high, low = jnp.zeros(indices[0].shape, jnp.uint32), jnp.zeros(indices[0].shape, jnp.uint32)
    for dim, index in enumerate(indices):
        more, part = _times(index, math.prod(whole[dim + 1 :]))
        low += part
        high += more + (low < part).astype(jnp.uint32)
    return high, low


def _bits(key: Array, counts: tuple[Array, Array]) -> Array:
    """As jax.random.bits, which counts entries from the first."""
    words = vary_alike((*jax.random.key_data(key), *counts))
    return jnp.bitwise_xor(*threefry2x32_p.bind(*words))


def _times(x: Array, factor: int) -> tuple[Array, Array]:
    """The upper and the lower 32 bits of a product with a number below 2**64."""
    upper, lower = (np.uint32(factor >> bits & 0xFFFFFFFF) for bits in (32, 0))
    (a, b), (c, d) = ((word >> 16, word & 0xFFFF) for word in (x, lower))
    middle = a * d + (b * d >> 16)
    other = b * c + (middle & 0xFFFF)
    return a * c + (middle >> 16) + (other >> 16) + x * upper, x * lower


def to_bfloat16(x: Array, bits: Array) -> Array:
    """Round each entry to its neighbour towards 0 or away from 0, by 16 random bits; non-finite entries stay as they
    are.

    >>> x = jnp.full(4, 1 + 2**-9)  # a quarter of the way from 1 to 1 + 2**-7
    >>> to_bfloat16(x, jnp.uint32([0, 0xBFFF0000, 0xC0000000, 0xFFFFFFFF])).astype(float)
    Array([1.       , 1.       , 1.0078125, 1.0078125], dtype=float32)
    """
    word = lax.bitcast_convert_type(x, jnp.uint32)
    high = ((word + (bits >> 16)) >> 16).astype(jnp.uint16)
    return jnp.where(jnp.isfinite(x), lax.bitcast_convert_type(high, jnp.bfloat16), x.astype(jnp.bfloat16))
