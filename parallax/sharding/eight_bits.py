"""8-bit numbers with one scale per array: int8, float8 with 4 bits of exponent and 3 of mantissa (e4m3), and for
gradients float8 with 5 and 2 (e5m2). Products may also have float4, with 2 and 1 (e2m1)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from parallax.sharding.bucket import Packed
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

KERNEL_UNIT = "unit"  # a parameter's name: the values of one unit of a kernel in 8 bits
DEVIATIONS = 4.0  # of initial values within the 8 bits


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


def rounded_columns(kernel: Array, inputs: Sequence[int], kind: str) -> tuple[Array, Array]:
    """A kernel in 8 bits, and the value of one unit of each column: the dims that are not these inputs.

    >>> values, units = rounded_columns(jnp.array([[1.0, 8.0], [-2.0, 4.0]]), [0], "int8")
    >>> values.tolist(), (127 * units).tolist()
    ([[64, 127], [-127, 64]], [2.0, 8.0])
    """
    units = scale_of(jnp.abs(kernel).max(inputs, keepdims=True), kind)
    return to_eight_bits(kernel, units, kind), units.squeeze(inputs)


def normal_in_units(deviation: float, kind: str) -> tuple[Callable, Callable]:
    """What draws initial values of a kernel in 8 bits, with this standard deviation, and of its units."""
    unit = DEVIATIONS / LARGEST_NUMBERS[kind]

    def draw(key: Array, shape: Sequence[int]) -> Array:
        return to_eight_bits(jax.random.normal(key, shape), unit, kind)

    return draw, jax.nn.initializers.constant(deviation * unit)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gather_rounded(
    patterns: Sequence[str], kind: str, first: Callable, arrays: Sequence[Array], scales: Sequence[Array]
) -> list[Array]:
    """All-gather arrays rounded to 8 bits with these scales, in one message, and return them in their dtypes. Pieces
    are rounded before they are sent. The gradient is that of `all_gather`, as if nothing were rounded.

    Communication:
        forward   all_gather of x over the axes that go
        backward  reduce_scatter of the gradient over the axes that go
    """
    packed = Packed.of(patterns, [to_eight_bits(x, scale, kind) for x, scale in zip(arrays, scales, strict=True)])
    whole = packed.apart(all_gather(packed.pattern, packed.array, first=first))
    return [from_eight_bits(x, scale, like.dtype) for x, scale, like in zip(whole, scales, arrays, strict=True)]


def _forward(patterns: Sequence[str], kind: str, first: Callable, arrays: Any, scales: Any) -> tuple[Any, Any]:
    return gather_rounded(patterns, kind, first, arrays, scales), scales


def _backward(patterns: Sequence[str], kind: str, first: Callable, scales: Any, dy: Any) -> tuple[Any, Any]:
    back = [f"{after} -> {before}" for before, after in map(parse_move, patterns)]
    packed = Packed.of(back, dy)
    return packed.apart(reduce_scatter(packed.pattern, packed.array)), jax.tree.map(jnp.zeros_like, scales)


gather_rounded.defvjp(_forward, _backward)
