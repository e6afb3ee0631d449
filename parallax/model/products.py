"""Matrix products in 8 bits, scaled by the maxima of the step before.

Input and weight, and in the backward pass the gradient of the output, are divided by a scale, clipped and rounded to 8
bits. The product and the input's gradient are made of them. The weight's gradient is made in the compute dtype, of the
gradient as it was, and of the input as it was, or as it was rounded: then its 8 bits are what is saved of it.

A scale is one number for a whole tensor of a layer: the largest magnitude that it had in the step before, over all
microbatches and devices, so that nothing is computed, and no device waits, before rounding. A maximum is the same in
whatever order it is taken. What grew since then is clipped: e4m3 would become nan.

A product's largest magnitudes [3], of input, weight and gradient of the output, are a parameter. Its "gradient" is the
largest magnitudes of this step, of which the maximum is kept where gradients are summed; see `latest_amax` for what
becomes of it.

    int8      products of int8, summed in int32
    float8    e4m3 times e4m3, e5m2 times e4m3 for the input's gradient, summed in float32 (Micikevicius et al. 2022)
    measured  products in the compute dtype; maxima as above
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.model.kernels import is_for_absent_gpus, platform_traced
from parallax.sharding.collectives import as_varying, vary_alike, varying_axes
from parallax.sharding.eight_bits import to_eight_bits
from parallax.sharding.einsum import einsum_letters

COMPUTE, MEASURED = "compute", "measured"
EIGHT_BITS = "8bit"  # of residuals
AMAX, AMAX_LAYOUT = "amax", "operands"  # a parameter's name, and its layout
KERNEL, ROUNDED = "kernel", "rounded"  # the parameter beside it, and the collection of what it was rounded to
INPUT, WEIGHT, GRADIENT = range(3)
# Maxima are rounded up to so many bits of mantissa: what another mesh adds up in another order has the same scale.
AMAX_BITS, FLOAT32_BITS = 4, 23

# What the largest magnitude of the step before becomes. Of float8 a power of two: it leaves room for growth, and scales
# are exact in bfloat16.
HIGHEST = {"int8": 127.0, "float8": 256.0, "float8_e5m2": 32768.0}


class EightBitProduct(NamedTuple):
    """The kinds of 8-bit numbers that operands are rounded to, and gradients, and the dtype of sums; "" and None where
    nothing is rounded."""

    operand: str = ""
    gradient: str = ""
    sums: Any = None


EIGHT_BIT_PRODUCTS = {
    MEASURED: EightBitProduct(),
    "int8": EightBitProduct("int8", "int8", jnp.int32),
    "float8": EightBitProduct("float8", "float8_e5m2", jnp.float32),
}


class Operand(NamedTuple):
    """Numbers in 8 bits, or as they were, and what 1 of them stands for."""

    values: Array
    unit: Array | None

    @staticmethod
    def of(x: Array, kind: str, amax: Array, rounded: Array | None = None) -> "Operand":
        """Of an array, or of what it was rounded to before; "" is no kind and rounds nothing."""
        if not kind:
            return Operand(x, None)
        unit = unit_of(amax, kind)
        return Operand(to_eight_bits(x, unit, kind) if rounded is None else rounded, unit)


class ProductInput(NamedTuple):
    """The input of products: as it is, as they all take it, and its largest magnitude."""

    x: Array
    operand: Operand
    largest: Array

    @staticmethod
    def of(x: Array, amax: Array, *, form: str, part: str = "") -> "ProductInput":
        """An input by the scale of one product, the first of those that take it. `part` is the name that its 8 bits
        have for `pipeline.remat`; "" is none."""
        fixed = lax.stop_gradient(x)
        operand = Operand.of(fixed, EIGHT_BIT_PRODUCTS[form].operand, lax.stop_gradient(amax)[INPUT])
        found = ProductInput(x, operand, largest(fixed))
        if not part:
            return found
        values, most = (checkpoint_name(array, part) for array in (operand.values, found.largest))
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
    """`einsum(pattern, x, w)` in 8 bits, in x's dtype. `amax` are the largest magnitudes [3] that all is rounded by;
    where one is 0, none is known, and what depends on it is nan. Its gradient is what they are now. An input of several
    products has the scale that it was rounded by, once for all of them. `residuals` says what the weight's gradient is
    made of, and what is saved of the input: EIGHT_BITS is what it was rounded to. `rounded` is w as `rounded_kernels`
    has it: of w only the gradient is taken then, and its largest magnitude is 0, not measured.

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


def rounded_kernels(weights: Any, dtype: str, form: str) -> Any:
    """A layer's weights, those of 8-bit products in 8 bits: once for all that a product does with one, and before it is
    gathered."""
    if not isinstance(weights, Mapping):
        return weights
    inner = {name: rounded_kernels(weight, dtype, form) for name, weight in weights.items()}
    if AMAX in weights:
        kind, kernel = EIGHT_BIT_PRODUCTS[form].operand, weights[KERNEL].astype(dtype)
        inner[KERNEL] = Operand.of(kernel, kind, lax.stop_gradient(weights[AMAX])[WEIGHT]).values
    return inner


def apart(weights: Any, dtype: str) -> dict[str, Any]:
    """Collections of such weights, gathered: "params", where zeros are in the place of what is in 8 bits, for the
    gradient; and ROUNDED."""
    if not isinstance(weights, Mapping):
        return {"params": weights}
    of_each = {name: apart(weight, dtype) for name, weight in weights.items()}
    params = {name: found["params"] for name, found in of_each.items()}
    rounded = {name: found[ROUNDED] for name, found in of_each.items() if found.get(ROUNDED)}
    if AMAX in weights:
        values = weights[KERNEL]
        params[KERNEL], rounded[KERNEL] = as_varying(jnp.zeros(values.shape, dtype), varying_axes(values)), values
    return {"params": params, ROUNDED: rounded}


def with_largest_weights(grads: Any, weights: Any, dtype: str) -> Any:
    """Gradients of layers with what products of rounded kernels do not measure: the largest magnitudes of these."""
    if not isinstance(grads, Mapping):
        return grads
    found = {name: with_largest_weights(grad, weights[name], dtype) for name, grad in grads.items()}
    if AMAX in grads:
        kernels = weights[KERNEL].astype(dtype)
        # XLA for CPU loses nan in some maxima.
        is_nan = jnp.isnan(kernels).any(axis=tuple(range(1, kernels.ndim)))
        most = jnp.where(is_nan, jnp.nan, jax.vmap(largest)(kernels))
        found[AMAX] = as_varying(found[AMAX]).at[..., WEIGHT].set(as_varying(most))
    return found


def is_scale(name: str) -> bool:
    """Whether a parameter of this name in a checkpoint is the scales of an 8-bit product.

    >>> is_scale("blocks.mlp.gate.amax"), is_scale("blocks.mlp.gate.kernel")
    (True, False)
    """
    return name.rpartition(".")[2] == AMAX


def latest_amax(found: Array, before: Array) -> Array:
    """The scales of the next step, of the maxima of this one, rounded up to AMAX_BITS bits; those of before where all
    that was met is 0.

    >>> latest_amax(jnp.array([1.0, 1.01, 0.0]), jnp.array([3.0, 3.0, 3.0])).tolist()
    [1.0, 1.0625, 3.0]
    """
    dropped = FLOAT32_BITS - AMAX_BITS
    word = lax.bitcast_convert_type(found, jnp.uint32)
    rounded = lax.bitcast_convert_type((word + (1 << dropped) - 1) >> dropped << dropped, jnp.float32)
    return jnp.where(found > 0, rounded, before)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(
    letters: str,
    form: str,
    saves: str,
    x: Array,
    w: Array,
    amax: Array,
    operand: Operand,
    most: Array,
    rounded: Array | None,
) -> Array:
    return _forward(letters, form, saves, x, w, amax, operand, most, rounded)[0]


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
    y = _multiplied(
        letters, form, operand, Operand.of(w, EIGHT_BIT_PRODUCTS[form].operand, amax[WEIGHT], rounded), x.dtype
    )
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
    dx = _multiplied(f"{result},{right}->{left}", form, gradient, weight, dy.dtype)
    # Numbers of 8 bits are exact in bfloat16; what 1 of them stands for is not.
    (dw,) = jax.vjp(lambda w: jnp.einsum(letters, x.values.astype(dy.dtype), w), w)[1](dy)
    dw = dw if x.unit is None else (dw.astype(jnp.float32) * x.unit).astype(w.dtype)
    return dx, dw, jnp.stack([of_x, of_w, largest(dy)]), None, None, None


_product.defvjp(_forward, _backward)


def largest(x: Array) -> Array:
    """The largest magnitude, float32; nan if an entry is."""
    # The last dim apart: so compilers for TPU take it in the pass that rounds.
    return jnp.max(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=tuple(range(x.ndim - 1))))


def _multiplied(letters: str, form: str, x: Operand, w: Operand, dtype: Any) -> Array:
    sums = EIGHT_BIT_PRODUCTS[form].sums
    if sums is None:
        return jnp.einsum(letters, x.values, w.values)
    if sums == jnp.float32 and platform_traced() == "gpu" and not is_for_absent_gpus():
        # As XLA finds it: of it, it makes one call of cuBLASLt. For GPUs that are not here it makes none, and multiplies
        # in the compute dtype.
        return jnp.einsum(letters, *(v.values.astype(dtype) * v.unit.astype(dtype) for v in (x, w)))
    y = jnp.einsum(letters, x.values, w.values, preferred_element_type=sums)
    return (y.astype(jnp.float32) * (x.unit * w.unit)).astype(dtype)


def unit_of(amax: Array, kind: str) -> Array:
    """What 1 of the 8-bit numbers stands for; nan where no scale is known.

    >>> unit_of(jnp.float32([254, 0]), "int8").tolist()
    [2.0, nan]
    """
    return jnp.where(amax > 0, amax, jnp.nan) * (1 / HIGHEST[kind])
