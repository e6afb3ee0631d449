"""Matrix products in 8 bits, scaled with the maxima of the previous step.

Input and weight, and in the backward pass the gradient of the output, are divided by a scale, clipped and rounded to 8
bits. The product and the input's gradient are computed from them. The weight's gradient is computed in the compute
dtype from the unrounded gradient and the input, which is unrounded or rounded; if rounded, its 8 bits are saved.

A scale is one number for a whole tensor of a layer: its largest magnitude in the previous step, over all microbatches
and devices. So nothing must be computed or sent before rounding. A maximum does not depend on the order of operands.
Values that exceed it are clipped: e4m3 would become nan.

A product's largest magnitudes [3], of input, weight and gradient of the output, are a parameter. Its "gradient" is the
largest magnitudes of this step; these are combined by maximum where other gradients are summed. `latest_amax` turns
them into the next step's scales.

    int8      products of int8, summed in int32
    float8    e4m3 times e4m3, e5m2 times e4m3 for the input's gradient, summed in float32 (Micikevicius et al. 2022)
    measured  products in the compute dtype; maxima as above
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.sharding.collectives import as_varying, vary_alike, varying_axes
from parallax.sharding.eight_bits import to_eight_bits
from parallax.sharding.einsum import einsum_letters
from parallax.sharding.platform import platform_traced

COMPUTE, MEASURED = "compute", "measured"
EIGHT_BITS = "8bit"  # of residuals
AMAX, AMAX_LAYOUT = "amax", "operands"  # a parameter's name, and its layout
KERNEL, ROUNDED = "kernel", "rounded"  # a module's only kernel, and the collection of rounded kernels
INPUT, WEIGHT, GRADIENT = range(3)
# Maxima are rounded up to this many bits of mantissa, so that sums in another order, on another mesh, give the same
# scale.
AMAX_BITS, FLOAT32_BITS = 4, 23

# The number to which the largest magnitude of the previous step is mapped. A power of two for float8: it leaves room
# for growth, and scales are exact in bfloat16.
HIGHEST = {"int8": 127.0, "float8": 256.0, "float8_e5m2": 32768.0}


class EightBitProduct(NamedTuple):
    """8-bit dtypes of operands and of gradients; "" if nothing is rounded."""

    operand: str = ""
    gradient: str = ""


EIGHT_BIT_PRODUCTS = {
    MEASURED: EightBitProduct(),
    "int8": EightBitProduct("int8", "int8"),
    "float8": EightBitProduct("float8", "float8_e5m2"),
}


class Operand(NamedTuple):
    """Numbers in 8 bits, or unrounded, and the value of one unit."""

    values: Array
    unit: Array | None

    @staticmethod
    def of(x: Array, kind: str, amax: Array, rounded: Array | None = None) -> "Operand":
        """Round an array, or use its earlier `rounded` form; with kind "" nothing is rounded."""
        if not kind:
            return Operand(x, None)
        unit = unit_of(amax, kind)
        return Operand(to_eight_bits(x, unit, kind) if rounded is None else rounded, unit)

    @property
    def sums(self) -> Any:
        """The dtype of sums of products; None if the numbers are not rounded."""
        if self.unit is None:
            return None
        return jnp.int32 if self.values.dtype == jnp.int8 else jnp.float32


class ProductInput(NamedTuple):
    """The input of products: unrounded, in the form that they all read, and its largest magnitude."""

    x: Array
    operand: Operand
    largest: Array

    @staticmethod
    def of(x: Array, amax: Array, *, form: str, part: str = "") -> "ProductInput":
        """An input rounded with the scale of the first product that reads it. `part` is the name of its 8 bits for
        `pipeline.remat`; "" for no name."""
        fixed = lax.stop_gradient(x)
        operand = Operand.of(fixed, EIGHT_BIT_PRODUCTS[form].operand, lax.stop_gradient(amax)[INPUT])
        most = largest(fixed)
        if not part:
            return ProductInput(x, operand, most)
        values, most = (checkpoint_name(array, part) for array in (operand.values, most))
        return ProductInput(x, Operand(values, operand.unit), most)


def scaled_product(
    pattern: str,
    x: Array | ProductInput,
    w: Array,
    amax: Array,
    *,
    form: str,
    residuals: str = COMPUTE,
    rounded: Array | None = None,
) -> Array:
    """`einsum(pattern, x, w)` in 8 bits; the result has x's dtype.

    `amax` holds the largest magnitudes [3] that determine the scales; 0 means unknown, and results that depend on it
    are nan. Its gradient is the current largest magnitudes. An input of several products is rounded once, with one
    scale. `residuals` is the form in which the input is saved for the weight's gradient: EIGHT_BITS means rounded.
    `rounded` is w from `rounded_kernels`: then w itself only gets a gradient, and its largest magnitude is 0, not
    measured.

    Communication:
        forward   nothing
        backward  nothing

    >>> x, w, amax = jnp.array([[1.0, -2.0]]), jnp.array([[127.0], [50.4]]), jnp.array([127.0, 127.0, 0.0])
    >>> scaled_product("seq d_model, d_model d_ff -> seq d_ff", x, w, amax, form="int8").item()
    27.0
    """
    x = x if isinstance(x, ProductInput) else ProductInput.of(x, amax, form=form)
    saves = residuals if EIGHT_BIT_PRODUCTS[form].operand else COMPUTE
    x, w, amax, values, unit, most, rounded = vary_alike((x.x, w, amax, *x.operand, x.largest, rounded))
    return _product(einsum_letters(pattern, x, w), form, saves, x, w, amax, Operand(values, unit), most, rounded)


def rounded_kernels(weights: Any, scales: Any, dtype: str, form: str) -> Any:
    """A layer's weights, with kernels of 8-bit products in 8 bits: rounded once for all uses, before the gather.
    `scales` is that of its part of the plan."""
    flat, kind = flatten_dict(weights), EIGHT_BIT_PRODUCTS[form].operand
    for kernel, amax in _kernels_of(scales).items():
        scale = lax.stop_gradient(flat[amax])[WEIGHT]
        flat[kernel] = Operand.of(flat[kernel].astype(dtype), kind, scale).values
    return unflatten_dict(flat)


def apart(weights: Any, scales: Any, dtype: str) -> dict[str, Any]:
    """Collections of such weights, gathered: ROUNDED, and "params" with zeros in place of 8-bit kernels, for their
    gradients."""
    params, rounded = flatten_dict(weights), {}
    for kernel in _kernels_of(scales):
        values = rounded[kernel] = params[kernel]
        params[kernel] = as_varying(jnp.zeros(values.shape, dtype), varying_axes(values))
    return {"params": unflatten_dict(params), ROUNDED: unflatten_dict(rounded)}


def with_largest_weights(grads: Any, weights: Any, scales: Any, dtype: str) -> Any:
    """Gradients of layers, completed with the largest magnitudes of rounded kernels, which products do not measure."""
    completed, flat = flatten_dict(grads), flatten_dict(weights)
    for kernel, amax in _kernels_of(scales).items():
        kernels = flat[kernel].astype(dtype)
        # XLA for CPU does not propagate nan in some maxima.
        is_nan = jnp.isnan(kernels).any(axis=tuple(range(1, kernels.ndim)))
        most = jnp.where(is_nan, jnp.nan, jax.vmap(largest)(kernels))
        completed[amax] = as_varying(completed[amax]).at[..., WEIGHT].set(as_varying(most))
    return unflatten_dict(completed)


def _kernels_of(scales: Any) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The paths of kernels with 8-bit products, and of their scales."""
    return {path: (*path[:-1], amax) for path, amax in flatten_dict(scales).items() if amax}


def latest_amax(maxima: Array, before: Array) -> Array:
    """The scales of the next step: this step's maxima, rounded up to AMAX_BITS bits, or the previous scale where the
    maximum is 0.

    >>> latest_amax(jnp.array([1.0, 1.01, 0.0]), jnp.array([3.0, 3.0, 3.0])).tolist()
    [1.0, 1.0625, 3.0]
    """
    dropped = FLOAT32_BITS - AMAX_BITS
    word = lax.bitcast_convert_type(maxima, jnp.uint32)
    rounded = lax.bitcast_convert_type((word + (1 << dropped) - 1) >> dropped << dropped, jnp.float32)
    return jnp.where(maxima > 0, rounded, before)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(*of_forward: Any) -> Array:
    return _forward(*of_forward)[0]


def _forward(
    letters: str,
    form: str,
    saves: str,
    x: Array,
    w: Array,
    amax: Array,
    operand: Operand,
    most: Array,
    rounded: Array | None,
) -> tuple[Array, tuple]:
    weight = Operand.of(w, EIGHT_BIT_PRODUCTS[form].operand, amax[WEIGHT], rounded)
    y = multiplied(letters, operand, weight, x.dtype)
    of_w = largest(w) if rounded is None else jnp.zeros_like(most)
    saved = Operand(x, None) if saves == COMPUTE else operand
    return y, (saved, w, amax, rounded, most, of_w)


def _backward(letters: str, form: str, saves: str, saved: tuple, dy: Array) -> tuple:
    x, w, amax, rounded, of_x, of_w = saved
    kinds = EIGHT_BIT_PRODUCTS[form]
    operands, result = letters.split("->")
    left, right = operands.split(",")
    gradient = Operand.of(dy, kinds.gradient, amax[GRADIENT])
    weight = Operand.of(w, kinds.operand, amax[WEIGHT], rounded)
    dx = multiplied(f"{result},{right}->{left}", gradient, weight, dy.dtype)
    # 8-bit numbers are exact in bfloat16, but their unit is not.
    (dw,) = jax.vjp(lambda w: jnp.einsum(letters, x.values.astype(dy.dtype), w), w)[1](dy)
    dw = dw if x.unit is None else (dw.astype(jnp.float32) * x.unit).astype(w.dtype)
    return dx, dw, jnp.stack([of_x, of_w, largest(dy)]), None, None, None


_product.defvjp(_forward, _backward)


def largest(x: Array) -> Array:
    """The largest magnitude, float32; nan if an entry is."""
    # The last dim is reduced separately, so that TPU compilers fuse the maximum with the rounding.
    return jnp.max(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=tuple(range(x.ndim - 1))))


def multiplied(letters: str, x: Operand, w: Operand, dtype: Any) -> Array:
    """The product of two operands, in this dtype; in their own if they are not rounded."""
    if x.sums is None:
        return jnp.einsum(letters, x.values, w.values)
    if x.sums == jnp.float32 and platform_traced() == "gpu":
        # The pattern that XLA turns into one call of cuBLASLt, with the option FLOAT8_ON_GPU.
        return jnp.einsum(letters, *(v.values.astype(dtype) * v.unit.astype(dtype) for v in (x, w)))
    return in_units(jnp.einsum(letters, x.values, w.values, preferred_element_type=x.sums), x, w, dtype)


def in_units(sums: Array, x: Operand, w: Operand, dtype: Any) -> Array:
    """The values of sums of products of 8-bit numbers."""
    return (sums.astype(jnp.float32) * (x.unit * w.unit)).astype(dtype)


def unit_of(amax: Array, kind: str) -> Array:
    """The value of one unit of the 8-bit numbers; nan if no scale is known.

    >>> unit_of(jnp.float32([254, 0]), "int8").tolist()
    [2.0, nan]
    """
    return jnp.where(amax > 0, amax, jnp.nan) * (1 / HIGHEST[kind])
