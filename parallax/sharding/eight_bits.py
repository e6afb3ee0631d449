"""8-bit numbers with one scale per array: int8, float8 with 4 bits of exponent and 3 of mantissa (e4m3), and for
gradients float8 with 5 and 2 (e5m2). Products may also have float4, with 2 and 1 (e2m1)."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from parallax.sharding.collectives import all_gather, reduce_scatter
from parallax.sharding.layout import parse_move

# The largest number of each. e4m3 has no infinity: larger values would become NaN.
LARGEST_NUMBERS = {"int8": 127.0, "float8": 448.0, "float8_e5m2": 57344.0, "float4": 6.0}
EIGHT_BIT_DTYPES = {
    "int8": jnp.dtype(jnp.int8),
    "float8": jnp.dtype(jnp.float8_e4m3fn),
    "float8_e5m2": jnp.dtype(jnp.float8_e5m2),
    "float4": jnp.dtype(jnp.float4_e2m1fn),
}


def scale_of(largest: Array, kind: str) -> Array:
    """Scale that maps the largest entry of an array to the largest number of this kind, float32; 1 if it is 0."""
    # Products, not quotients: compilers turn some quotients into products, which gives other bits.
    return jnp.where(largest == 0, 1.0, largest.astype(jnp.float32) * (1 / LARGEST_NUMBERS[kind]))


def to_eight_bits(x: Array, scale: Array, kind: str) -> Array:
    """Round each entry over the scale to the nearest number of a kind of EIGHT_BIT_DTYPES; larger entries are clipped.

    >>> to_eight_bits(jnp.array([-1.0, 0.3, 0.7]), jnp.float32(0.5 / 127), "int8")
    Array([-127,   76,  127], dtype=int8)
    """
    over = jnp.clip(x.astype(jnp.float32) * (1 / scale), -LARGEST_NUMBERS[kind], LARGEST_NUMBERS[kind])
    if kind == "float4":  # not every way in which XLA converts to e2m1 rounds to the nearest number
        step = jnp.where(jnp.abs(over) < 2, 0.5, jnp.where(jnp.abs(over) < 4, 1.0, 2.0))
        over = jnp.round(over / step) * step
    return (jnp.round(over) if kind == "int8" else over).astype(EIGHT_BIT_DTYPES[kind])


def from_eight_bits(values: Array, scale: Array, dtype: str) -> Array:
    """The values that these numbers represent."""
    return (values.astype(jnp.float32) * scale).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gather_rounded(pattern: str, kind: str, first: Callable, x: Array, scale: Array) -> Array:
    """All-gather x rounded to 8 bits with `scale`, and return it in the dtype of x. Pieces are rounded before they are
    sent. The gradient is that of `all_gather`, as if nothing were rounded.

    Communication:
        forward   all_gather of x over the axes that go
        backward  reduce_scatter of the gradient over the axes that go
    """
    values = all_gather(pattern, to_eight_bits(x, scale, kind), first=first)
    return from_eight_bits(values, scale, x.dtype)


def _forward(pattern: str, kind: str, first: Callable, x: Array, scale: Array) -> tuple[Array, Array]:
    return gather_rounded(pattern, kind, first, x, scale), scale


def _backward(pattern: str, kind: str, first: Callable, scale: Array, dy: Array) -> tuple[Array, Array]:
    before, after = parse_move(pattern)
    return reduce_scatter(f"{after} -> {before}", dy), jnp.zeros_like(scale)


gather_rounded.defvjp(_forward, _backward)
