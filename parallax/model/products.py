"""Matrix products in 8 bits.

Input and weight, and in the backward pass the gradient of the output, are divided by a scale, clipped and rounded to 8
bits. The product and the input's gradient are computed from them. The weight's gradient is computed in the compute
dtype from the unrounded gradient and the input, which is unrounded or rounded; if rounded, its 8 bits are saved. With
weight gradients in 8 bits it is a product of the rounded input and gradient.

A form says what a product does, in words: its dtypes, its scales, the dtype of weight gradients, and fixed ranges, as
in "float8", "int8 row" or "float8 current 8bit". Dtypes:

    int8      products of int8, summed in int32
    float8    e4m3 times e4m3, summed in float32; gradients are e5m2 (Micikevicius et al. 2022), e4m3 with scales of
              rows and blocks
    float4    e2m1 times e2m1, with nvfp4 scales; gradients are computed in the compute dtype, from what was not rounded
    measured  products in the compute dtype; maxima as with delayed scales

Scales:

    delayed   one of a tensor: its largest magnitude in the previous step, over all microbatches and devices. Nothing is
              computed or sent before rounding; values that exceed it are clipped
    current   one of a tensor: its largest magnitude now, in this microbatch, over all devices
    row       one of each token of an input or a gradient, over the dims that the weight has, too; weights as current
    block     one of 128 entries of a token; of 128 x 128 of a weight (DeepSeek-V3). Powers of two, so that values are
              exact in the compute dtype, in which the products are: XLA has none of 8 bits with such scales
    mxfp8     one of 32 entries along each sum, a power of two (OCP's microscaling formats). B200 has such products, by
              jax.nn.scaled_matmul; elsewhere they are in the compute dtype, with the same values
    nvfp4     one of 16 entries along the sum, in e4m3, times one of the tensor, a power of two; on B200 as mxfp8
    fixed     one of a tensor: a given range

A scale that is not a tensor's cannot leave a sum over tokens. So the weight's gradient in 8 bits rounds anew with row
and block: one scale of each column, over a microbatch's tokens; with mxfp8 one of 32 tokens.

A maximum does not depend on the order of operands, and is rounded up to a few bits: every mesh has the same scales if
its microbatches have the same rows.

With delayed scales a product's largest magnitudes [3], of input, weight and gradient of the output, are a parameter.
Its "gradient" is the largest magnitudes of this step; these are combined by maximum where other gradients are summed.
`latest_amax` turns them into the next step's scales.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import pack, unpack
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.config.sections import BLOCK_SCALES, COMPUTE, DELAYED, EIGHT_BITS, FIXED, MXFP8, NVFP4, ROW_SCALES
from parallax.sharding.collectives import as_varying, max_over, vary_alike, varying_axes
from parallax.sharding.compiler import rounds_in_products
from parallax.sharding.eight_bits import LARGEST_NUMBERS, to_eight_bits
from parallax.sharding.einsum import einsum_letters
from parallax.sharding.layout import COUNTING_DIMS, Layout
from parallax.sharding.plan import WITHIN_STAGE
from parallax.sharding.platform import multiplies_microscaled, platform_traced

MEASURED = "measured"
AMAX, AMAX_LAYOUT = "amax", "operands"  # a parameter's name, and its layout
KERNEL, ROUNDED = "kernel", "rounded"  # a module's only kernel, and the collection of rounded kernels
INPUT, WEIGHT, GRADIENT = range(3)
# Maxima are rounded up to this many bits of mantissa, so that sums in another order, on another mesh, give the same
# scale.
AMAX_BITS, FLOAT32_BITS = 4, 23
LEAST_FLOAT8 = 2.0**-9  # of e4m3
LEAST_AMAX = 2.0**-100  # of an operand's own maxima: units, and what is divided by them, stay finite
WIDEST_BLOCKS = {BLOCK_SCALES: 128, MXFP8: 32, NVFP4: 16}  # the most entries of a block

# The number to which the largest magnitude of the previous step is mapped. A power of two for float8: it leaves room
# for growth, and scales are exact in bfloat16.
HIGHEST = {"int8": 127.0, "float8": 256.0, "float8_e5m2": 32768.0}


class EightBitProduct(NamedTuple):
    """8-bit dtypes of operands and of gradients, "" if nothing is rounded; scales, the dtype of weight gradients, and
    the largest magnitudes of input, weight and gradient with fixed scales."""

    operand: str = ""
    gradient: str = ""
    scales: str = DELAYED
    weight_gradients: str = COMPUTE
    ranges: tuple[float, ...] = ()

    @property
    def known(self) -> bool:
        """Whether scales are known before the operands."""
        return self.scales in (DELAYED, FIXED)

    @property
    def rounds_in_products(self) -> bool:
        """Whether XLA would round an operand in each product that reads it."""
        return self.scales == FIXED and self.operand == "float8" and rounds_in_products()

    @property
    def rounds_anew(self) -> bool:
        """Whether the weight's gradient in 8 bits needs other scales than the other products."""
        return self.weight_gradients == EIGHT_BITS and self.scales in FINE

    def amax(self, maxima: Array | None) -> Array | None:
        """The largest magnitudes that determine the scales, from those of the previous step; None if they are those of
        the operands."""
        return rounded_up(jnp.float32(self.ranges)) if self.scales == FIXED else maxima


DTYPES_OF_PRODUCTS = {
    MEASURED: ("", ""),
    "int8": ("int8", "int8"),
    "float8": ("float8", "float8_e5m2"),
    "float4": ("float4", ""),
}
# Scales with which gradients, too, are e4m3: their range is smaller, and it has another bit.
FINE = (ROW_SCALES, BLOCK_SCALES, MXFP8)


@cache
def product_of(form: str) -> EightBitProduct:
    """The product of a form.

    >>> product_of("float8 fixed 8bit 16 1 0.01").ranges, product_of("int8").scales
    ((16.0, 1.0, 0.01), 'delayed')
    """
    dtype, *words = form.split()
    operand, gradient = DTYPES_OF_PRODUCTS[dtype]
    gradient = operand if words and words[0] in FINE else gradient
    return EightBitProduct(operand, gradient, *words[:2])._replace(ranges=tuple(map(float, words[2:])))


class Operand(NamedTuple):
    """Numbers in 8 bits, or unrounded, and the value of one unit: a number, or an array with as many dims, whose sizes
    are 1 or divide theirs. `of_whole` is the factor of all units if these are e4m3 apart from it."""

    values: Array
    unit: Array | None
    of_whole: Array | None = None

    @staticmethod
    def of(x: Array, kind: str, amax: Array, rounded: Array | None = None, *, fixed: bool = False) -> "Operand":
        """Round an array, or use its earlier `rounded` form; with kind "" nothing is rounded. With `fixed` ranges no
        maximum shows an entry that is not finite, so it is nan then; int8, which has no nan, has a unit of nan."""
        if not kind:
            return Operand(x, None)
        unit = unit_of(amax, kind)
        if fixed and kind == "int8":
            unit = jnp.where(jnp.isfinite(x).all(), unit, jnp.nan)
        elif fixed:  # entry by entry: for one answer rounding would wait; and XLA for TPU may write a mask of isfinite
            x = x + (x - x)
        return Operand.in_units(x, kind, unit) if rounded is None else Operand(rounded, unit)

    @staticmethod
    def measured(x: Array, kind: str, layout: Layout, over: Collection[str] | None = None) -> "Operand":
        """Round an array with its own maxima over these dims, on all devices that share them; by default one maximum.

        Communication:
            forward   all_reduce of the maxima over the axes that shard these dims
            backward  nothing
        """
        over = layout.names if over is None else over
        places = tuple(dim for dim, name in enumerate(layout.names) if name in over)
        most = own_largest(x, places)
        most = max_over(most, [axis for dim in places for axis in layout.axes[dim]])
        return Operand.in_units(x, kind, own_unit(most, kind))

    @staticmethod
    def in_blocks(x: Array, kind: str, blocks: Sequence[int], layout: Layout) -> "Operand":
        """Round an array with a scale of each block of this shape: a power of two; or, for float4, e4m3 times a power
        of two of the whole array.

        Communication:
            forward   all_reduce of the largest magnitude over the axes that shard the array if it is for float4
            backward  nothing
        """
        parts = x.reshape([size for whole, block in zip(x.shape, blocks) for size in (whole // block, block)])
        most = own_largest(parts, range(1, parts.ndim, 2)).reshape(parts.shape[::2])
        unit = most * (1 / LARGEST_NUMBERS[kind])
        if kind != "float4":
            return Operand.in_units(x, kind, jnp.maximum(rounded_up(unit, 0), LEAST_AMAX))
        whole = max_over(unit.max(), layout.used_axes()) * (1 / LARGEST_NUMBERS["float8"])
        whole = jnp.maximum(rounded_up(whole, 0), LEAST_AMAX)
        # XLA would leave out a conversion to 8 bits and back.
        shares = lax.optimization_barrier(jnp.maximum(unit * (1 / whole), LEAST_FLOAT8).astype(jnp.float8_e4m3fn))
        return Operand.in_units(x, kind, shares.astype(jnp.float32) * whole)._replace(of_whole=whole)

    @staticmethod
    def in_units(x: Array, kind: str, unit: Array) -> "Operand":
        """Round an array to multiples of these units."""
        parts, of_parts = _apart(x, unit)
        return Operand(to_eight_bits(parts, of_parts, kind).reshape(x.shape), unit)

    def unrounded(self, dtype: Any) -> "Operand":
        """The values that these numbers represent."""
        if self.unit is None:
            return self
        parts, of_parts = _apart(self.values, self.unit)
        return Operand((parts.astype(jnp.float32) * of_parts).astype(dtype).reshape(self.values.shape), None)

    def behind_barrier(self) -> "Operand":
        """The same, not to be rounded again in each product that reads it."""
        return self._replace(values=lax.optimization_barrier(self.values))

    @property
    def sums(self) -> Any:
        """The dtype of sums of products; None if the numbers are not rounded."""
        if self.unit is None:
            return None
        return jnp.int32 if self.values.dtype == jnp.int8 else jnp.float32


def _apart(x: Array, unit: Array) -> tuple[Array, Array]:
    """An array with each dim divided into units' parts and the entries of each, and the units beside it."""
    if not unit.ndim:
        return x, unit
    parts = x.reshape([size for whole, count in zip(x.shape, unit.shape) for size in (count, whole // count)])
    return parts, unit.reshape([size for count in unit.shape for size in (count, 1)])


class Call(NamedTuple):
    """What of a product is not an array: its einsum, its form, what is saved of the input, and the layouts of input,
    weight and result."""

    letters: str
    form: str
    saves: str
    layouts: tuple[Layout, Layout, Layout]

    @property
    def product(self) -> EightBitProduct:
        return product_of(self.form)

    def weight(
        self, w: Array, amax: Array | None, rounded: "Array | Operand | None", *, backward: bool = False
    ) -> Operand:
        """The weight rounded, or as it was `rounded` before."""
        product = self.product
        if isinstance(rounded, Operand):
            return rounded
        if backward and not product.gradient:
            return Operand(w, None)
        if product.known or not product.operand:
            amax = None if amax is None else amax[WEIGHT]
            return Operand.of(w, product.operand, amax, rounded, fixed=product.scales == FIXED)
        of_sum, weight = self.layouts[2 if backward else 0].names, self.layouts[1]
        return kernel_operand(product, w, weight, [name for name in weight.names if name in of_sum])

    def gradient(self, dy: Array, amax: Array | None, *, columns: bool = False) -> Operand:
        """The gradient of the result rounded, for that of the input or, by columns, of the weight."""
        product = self.product
        if product.known or not product.gradient:
            amax = None if amax is None else amax[GRADIENT]
            operand = Operand.of(dy, product.gradient, amax, fixed=product.scales == FIXED)
            return operand.behind_barrier() if product.rounds_in_products else operand
        return token_operand(product, dy, product.gradient, self.layouts[2], self.layouts[1], columns=columns)


def kernel_operand(product: EightBitProduct, w: Array, layout: Layout, contracted: Sequence[str]) -> Operand:
    """A weight rounded with its own maxima, for a product that contracts these of its dims."""
    if product.scales not in WIDEST_BLOCKS:
        return Operand.measured(w, product.operand, layout)
    in_blocks = set(layout.names).difference(COUNTING_DIMS) if product.scales == BLOCK_SCALES else contracted[-1:]
    return Operand.in_blocks(w, product.operand, blocks_of(product, layout, w.shape, in_blocks), layout)


def token_operand(
    product: EightBitProduct, x: Array, kind: str, layout: Layout, weight: Layout, *, columns: bool = False
) -> Operand:
    """An input or a gradient rounded with its own maxima. `columns` are scales that leave a sum over tokens."""
    of_weight = [name for name in layout.names if name in weight.names]
    of_tokens = [name for name in layout.names if name not in weight.names]
    if product.scales in WIDEST_BLOCKS and not (columns and product.scales == BLOCK_SCALES):
        in_blocks = (of_tokens if columns else of_weight)[-1:]
        return Operand.in_blocks(x, kind, blocks_of(product, layout, x.shape, in_blocks), layout)
    if columns:
        return Operand.measured(x, kind, layout, of_tokens)
    return Operand.measured(x, kind, layout, of_weight if product.scales == ROW_SCALES else None)


def blocks_of(
    product: EightBitProduct, layout: Layout, shape: Sequence[int], names: Collection[str]
) -> tuple[int, ...]:
    """The shape of blocks that are as wide as may be in these dims: a power of two that divides them."""
    widest = WIDEST_BLOCKS[product.scales]
    return tuple(math.gcd(size, widest) if name in names else 1 for name, size in zip(layout.names, shape))


class ProductInput(NamedTuple):
    """The input of products: unrounded, in the form that they all read, and its largest magnitude with delayed scales;
    and in the form that weights' gradients in 8 bits read, if that is another."""

    x: Array
    operand: Operand
    largest: Array | None
    columns: Operand | None = None

    @staticmethod
    def of(
        x: Array,
        amax: Array | None,
        *,
        form: str,
        x_layout: str = "",
        weight: str = "",
        part: str = "",
        shared: bool = False,
    ) -> "ProductInput":
        """An input rounded with the scale of the first product that reads it, whose weight has this layout. `part` is
        the name of its 8 bits for `pipeline.remat`; "" for no name. `shared`: whether several products read it."""
        product, fixed, most, columns = product_of(form), lax.stop_gradient(x), None, None
        if product.known:
            amax = product.amax(amax)
            amax = lax.stop_gradient(amax)[INPUT]
            operand = Operand.of(fixed, product.operand, amax, fixed=product.scales == FIXED)
            operand = operand.behind_barrier() if shared and product.rounds_in_products else operand
            most = largest(fixed) if product.scales == DELAYED else None
        else:
            rounded = partial(token_operand, product, fixed, product.operand)
            layouts = Layout.parse(x_layout), Layout.parse(weight)
            operand = rounded(*layouts)
            columns = rounded(*layouts, columns=True) if product.rounds_anew else None
        if part and product.known:
            values, most = (None if each is None else checkpoint_name(each, part) for each in (operand.values, most))
            operand = Operand(values, operand.unit)
        elif part:
            operand, columns = jax.tree.map(lambda array: checkpoint_name(array, part), (operand, columns))
        return ProductInput(x, operand, most, columns)


def scaled_product(
    pattern: str,
    x: Array | ProductInput,
    w: Array,
    amax: Array | None = None,
    *,
    form: str,
    residuals: str = COMPUTE,
    rounded: Array | Operand | None = None,
) -> Array:
    """`einsum(pattern, x, w)` in 8 bits; the result has x's dtype.

    With delayed scales `amax` holds the largest magnitudes [3] that determine them; 0 means unknown, and results that
    depend on it are nan. Its gradient is the current largest magnitudes. An input of several products is rounded once,
    with one scale. `residuals` is the form in which the input is saved for the weight's gradient: EIGHT_BITS means
    rounded. `rounded` is w from `rounded_kernels`: then w itself only gets a gradient, and its largest magnitude is 0,
    not measured.

    Communication:
        forward   all_reduce of the maxima of x and w over the axes that cut them if scales are current or of rows
        backward  all_reduce of the maxima of the gradient over the axes that cut it if scales are current or of rows

    >>> x, w, amax = jnp.array([[1.0, -2.0]]), jnp.array([[127.0], [50.4]]), jnp.array([127.0, 127.0, 0.0])
    >>> scaled_product("seq d_model, d_model d_ff -> seq d_ff", x, w, amax, form="int8").item()
    27.0
    """
    product, (inputs, _, result) = product_of(form), pattern.partition("->")
    of_x, of_w, of_y = (Layout.parse(part.strip()) for part in (*inputs.split(","), result))
    if not isinstance(x, ProductInput):
        x = ProductInput.of(x, amax, form=form, x_layout=str(of_x), weight=str(of_w))
    saves, amax = residuals if product.operand else COMPUTE, product.amax(amax)
    given = x.x, w, amax, x.operand, x.largest, x.columns, rounded
    x, w, amax, operand, most, columns, rounded = vary_alike(given)
    call = Call(einsum_letters(pattern, x, w), form, saves, (of_x, of_w, of_y))
    return _product(call, x, w, amax, operand, most, columns, rounded)


def scales_of(form: str, parameter: str = AMAX) -> str:
    """What a kernel's ParameterSpec says of its scales: the name of the parameter that has them; their word, if they
    are none; "" if kernels are rounded only where they are used."""
    scales = product_of(form).scales
    return "" if scales in WIDEST_BLOCKS else parameter if scales == DELAYED else scales


def rounded_kernels(weights: Any, scales: Any, dtype: str, form: str, maxima: Any = None) -> Any:
    """A layer's weights, with kernels of 8-bit products in 8 bits: rounded once for all uses, before the gather.
    `scales` is that of its part of the plan; `maxima` are their own largest magnitudes, if scales follow from them."""
    flat, product, most_of = flatten_dict(weights), product_of(form), flatten_dict(maxima or {})
    for kernel, amax in _kernels_of(scales).items():
        if flat[kernel].dtype.itemsize == 1:  # rounded for all uses of a step
            continue
        wide = flat[kernel].astype(dtype)
        if maxima is None:
            most = product.amax(lax.stop_gradient(flat.get(amax)))[WEIGHT]
            flat[kernel] = Operand.of(wide, product.operand, most, fixed=product.scales == FIXED).values
        else:
            flat[kernel] = to_eight_bits(wide, own_unit(most_of[kernel], product.operand), product.operand)
    return unflatten_dict(flat)


def apart(weights: Any, scales: Any, dtype: str, form: str, maxima: Any = None) -> dict[str, Any]:
    """Collections of such weights, gathered: ROUNDED, and "params" with zeros in place of 8-bit kernels, for their
    gradients."""
    params, rounded, most_of = flatten_dict(weights), {}, flatten_dict(maxima or {})
    for kernel in _kernels_of(scales):
        values = rounded[kernel] = params[kernel]
        params[kernel] = as_varying(jnp.zeros(values.shape, dtype), varying_axes(values))
        if maxima is not None:
            rounded[kernel] = Operand(values, own_unit(most_of[kernel], product_of(form).operand))
    return {"params": unflatten_dict(params), ROUNDED: unflatten_dict(rounded)}


def largest_kernels(weights: Any, scales: Any, dtype: str) -> Any:
    """The largest magnitude of each such kernel of a stack of layers, [layers], on all devices, in one message.

    Communication:
        forward   all_reduce of the maxima over the axes that may shard kernels
        backward  nothing
    """
    of_layers = jax.vmap(lambda kernel: own_largest(kernel.astype(dtype), range(kernel.ndim)))
    kernels = {path: of_layers(lax.stop_gradient(flatten_dict(weights)[path])) for path in _kernels_of(scales)}
    leaves, structure = jax.tree.flatten(unflatten_dict(kernels))
    flat, shapes = pack(vary_alike(leaves), "*")
    return jax.tree.unflatten(structure, unpack(max_over(flat, WITHIN_STAGE), shapes, "*"))


def largest_weights(weights: Any, scales: Any, dtype: str) -> dict[tuple[str, ...], Array]:
    """The largest magnitudes [layers] of this device's kernels that are rounded, by the path of their scales: products
    do not measure them."""
    flat, maxima = flatten_dict(weights), {}
    for kernel, amax in _kernels_of(scales).items():
        kernels = flat[kernel].astype(dtype)
        # XLA for CPU does not propagate nan in some maxima.
        is_nan = jnp.isnan(kernels).any(axis=tuple(range(1, kernels.ndim)))
        maxima[amax] = jnp.where(is_nan, jnp.nan, jax.vmap(largest)(kernels))
    return maxima


def with_largest_weights(grads: Any, largest: Mapping[tuple[str, ...], Array]) -> Any:
    """Gradients of layers, completed with these."""
    completed = flatten_dict(grads)
    for amax, most in largest.items():
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
    return jnp.where(maxima > 0, rounded_up(maxima), before)


def rounded_up(maxima: Array, bits: int = AMAX_BITS) -> Array:
    """The least float32 numbers with so many bits of mantissa that are not smaller.

    >>> rounded_up(jnp.float32([1.01, 3.0]), 0).tolist()
    [2.0, 4.0]
    """
    dropped = FLOAT32_BITS - bits
    word = lax.bitcast_convert_type(maxima, jnp.uint32)
    return lax.bitcast_convert_type((word + (1 << dropped) - 1) >> dropped << dropped, jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(*of_forward: Any) -> Array:
    return _forward(*of_forward)[0]


def _forward(
    call: Call,
    x: Array,
    w: Array,
    amax: Array | None,
    operand: Operand,
    most: Array | None,
    columns: Operand | None,
    rounded: Array | Operand | None,
) -> tuple[Array, tuple]:
    product = call.product
    y = multiplied(call.letters, operand, call.weight(w, amax, rounded), x.dtype)
    of_w = None
    if product.scales == DELAYED:
        of_w = largest(w) if rounded is None else jnp.zeros_like(most)
    if product.weight_gradients == EIGHT_BITS:
        read = operand if columns is None else columns
        saved = Operand(x, read.unit) if call.saves == COMPUTE else read
    else:
        saved = Operand(x, None) if call.saves == COMPUTE else operand
    return y, (saved, w, amax, rounded, most, of_w)


def _backward(call: Call, saved: tuple, dy: Array) -> tuple:
    x, w, amax, rounded, of_x, of_w = saved
    product = call.product
    operands, result = call.letters.split("->")
    left, right = operands.split(",")
    gradient, weight = call.gradient(dy, amax), call.weight(w, amax, rounded, backward=True)
    dx = multiplied(f"{result},{right}->{left}", gradient, weight, dy.dtype)
    if product.weight_gradients == EIGHT_BITS:
        if call.saves == COMPUTE:
            x = Operand.in_units(x.values, product.operand, x.unit)
        if product.rounds_anew:
            gradient = call.gradient(dy, amax, columns=True)
        dw = multiplied(f"{left},{result}->{right}", x, gradient, w.dtype)
    else:
        x = x.unrounded(dy.dtype) if x.unit is not None and x.unit.ndim else x
        # 8-bit numbers are exact in bfloat16, but their unit is not.
        (dw,) = jax.vjp(lambda w: jnp.einsum(call.letters, x.values.astype(dy.dtype), w), w)[1](dy)
        dw = dw if x.unit is None else (dw.astype(jnp.float32) * x.unit).astype(w.dtype)
    maxima = jnp.stack([of_x, of_w, largest(dy)]) if product.scales == DELAYED else None
    return dx, dw, maxima, None, None, None, None


_product.defvjp(_forward, _backward)


def largest(x: Array) -> Array:
    """The largest magnitude, float32; nan if an entry is."""
    # The last dim is reduced separately, so that TPU compilers fuse the maximum with the rounding.
    return jnp.max(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=tuple(range(x.ndim - 1))))


def own_largest(x: Array, dims: Sequence[int]) -> Array:
    """The largest magnitudes over these dims, which stay with size 1; over all, a number. Inf if an entry is nan: XLA
    for CPU does not propagate nan in some maxima, and what is rounded with these is lost if they are lost."""
    size = jnp.abs(x.astype(jnp.float32))
    size = jnp.where(jnp.isnan(size), jnp.inf, size)
    if len(dims) == x.ndim:
        return jnp.max(jnp.max(size, axis=tuple(range(x.ndim - 1))))
    return jnp.max(size, axis=tuple(dims), keepdims=True)


def multiplied(letters: str, x: Operand, w: Operand, dtype: Any) -> Array:
    """The product of two operands, in this dtype; in their own if they are not rounded."""
    if x.sums is None:
        return jnp.einsum(letters, x.values, w.values)
    operands, result = letters.split("->")
    pairs = [*zip((x, w), operands.split(","))]
    if multiplies_microscaled() and all(is_microscaled(operand, names, result) for operand, names in pairs):
        return microscaled(letters, x, w, dtype)
    if not all(leaves_sum(operand, names, result) for operand, names in pairs):
        return jnp.einsum(letters, x.unrounded(dtype).values, w.unrounded(dtype).values)
    summed = x.sums
    if summed == jnp.float32 and platform_traced() == "gpu":
        if x.unit.ndim == w.unit.ndim == 0:
            # The pattern that XLA turns into one call of cuBLASLt, with the option FLOAT8_ON_GPU.
            return jnp.einsum(letters, *(v.values.astype(dtype) * v.unit.astype(dtype) for v in (x, w)))
        summed = dtype  # cuBLASLt scales no rows: float32 sums would be written to memory, and read to be scaled
    sums = jnp.einsum(letters, x.values, w.values, preferred_element_type=summed)
    x, w = (operand._replace(unit=_aligned(operand.unit, names, result)) for operand, names in pairs)
    return in_units(sums, x, w, dtype)


def leaves_sum(operand: Operand, names: str, result: str) -> bool:
    """Whether a sum of products can be scaled with the operand's units, whose dims have these `names`."""
    sizes = zip(names, operand.unit.shape, operand.values.shape)
    return all(units == 1 or (units == size and dim in result) for dim, units, size in sizes)


def is_microscaled(operand: Operand, names: str, result: str) -> bool:
    """Whether the last dim that is summed is in blocks as B200 has them, and no other dim in any."""
    summed = [dim for dim in names if dim not in result]
    blocks = {dim: size // units for dim, size, units in zip(names, operand.values.shape, operand.unit.shape)}
    return bool(blocks) and blocks.pop(summed[-1]) == _width(operand) and set(blocks.values()) == {1}


def _width(operand: Operand) -> int:
    return WIDEST_BLOCKS[MXFP8 if operand.of_whole is None else NVFP4]


def microscaled(letters: str, x: Operand, w: Operand, dtype: Any) -> Array:
    """The product of operands in such blocks, which XLA gives to cuDNN on B200, and on other GPUs multiplies in this
    dtype."""
    operands, result = letters.split("->")
    left, right = operands.split(",")
    summed = "".join(dim for dim in left if dim not in result)
    sizes = dict(zip(left + right, x.values.shape + w.values.shape))
    kept = [[dim for dim in result if dim in names] for names in (left, right)]

    def rows(array: Array, names: str, dims: list[str]) -> Array:
        array = array.transpose([names.index(dim) for dim in (*dims, *summed)])
        return array.reshape(1, math.prod(sizes[dim] for dim in dims), -1)

    pairs = [*zip((x, w), (left, right), kept)]
    values = [rows(operand.values, names, dims) for operand, names, dims in pairs]
    if x.of_whole is None:
        units = [rows(operand.unit, names, dims).astype(jnp.float8_e8m0fnu) for operand, names, dims in pairs]
    else:
        shares = [rows(operand.unit, names, dims) * (1 / operand.of_whole) for operand, names, dims in pairs]
        units = [share.astype(jnp.float8_e4m3fn) for share in shares]
    y = as_varying(jax.nn.scaled_matmul(*values, *units, preferred_element_type=dtype), varying_axes(x.values))
    if x.of_whole is not None:
        y = (y.astype(jnp.float32) * (x.of_whole * w.of_whole)).astype(dtype)
    y = y.reshape([sizes[dim] for dims in kept for dim in dims])
    return y.transpose([(kept[0] + kept[1]).index(dim) for dim in result])


def _aligned(unit: Array, names: str, result: str) -> Array:
    """Units of an operand with these dims, of which contracted ones have one unit, with the dims of the result."""
    if not unit.ndim:
        return unit
    kept = [dim for dim in result if dim in names]
    sizes = dict(zip(names, unit.shape))
    unit = unit.reshape([sizes[dim] for dim in names if dim in kept])
    unit = unit.transpose([[dim for dim in names if dim in kept].index(dim) for dim in kept])
    return unit.reshape([sizes.get(dim, 1) if dim in names else 1 for dim in result])


def in_units(sums: Array, x: Operand, w: Operand, dtype: Any) -> Array:
    """The values of sums of products of 8-bit numbers."""
    return (sums.astype(jnp.float32) * (x.unit * w.unit)).astype(dtype)


def unit_of(amax: Array, kind: str) -> Array:
    """The value of one unit of the 8-bit numbers; nan if no scale is known.

    >>> unit_of(jnp.float32([254, 0]), "int8").tolist()
    [2.0, nan]
    """
    return jnp.where(amax > 0, amax, jnp.nan) * (1 / HIGHEST[kind])


def own_unit(maxima: Array, kind: str) -> Array:
    """The same for an operand's own maxima; any unit is right for zeros."""
    return unit_of(jnp.maximum(rounded_up(maxima), LEAST_AMAX), kind)
