"""Dense: a matrix product defined by its kernel's layout and the layouts of input and output."""

import math
from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from parallax.config.sections import COMPUTE, DELAYED, EIGHT_BITS
from parallax.model.products import (
    AMAX_LAYOUT,
    KERNEL,
    ROUNDED,
    Operand,
    ProductInput,
    product_of,
    scaled_product,
    scales_of,
)
from parallax.sharding.collectives import bound_axis_sizes
from parallax.sharding.eight_bits import KERNEL_UNIT, normal_in_units
from parallax.sharding.einsum import einsum, einsum_layout
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import parameter
from parallax.sharding.streams import Streams, per_stream, reshard_streams


class Dense(nn.Module):
    """`y = x @ kernel`, contracted over the dims that `x` and `kernel` share.

    `weight`, `x` and `y` are the layouts of kernel, input and output. The strings choose the form:

        column    "d_model d_ff/tp"     batch/dp seq d_model    -> batch/dp seq d_ff/tp
        row       "d_ff/tp d_model"     batch/dp seq d_ff/tp    -> batch/dp seq d_model/tp
        scatter   "d_model/tp d_ff"     batch/dp seq d_model/tp -> batch/dp seq d_ff/tp

    `at_rest` is the kernel's dim that data axes may shard between its uses: see ShardingPlan. `matmul` is the form of
    the product and of the gradients, `matmul_residuals` that of the saved input, from which the kernel's gradient is
    computed: see parallax/model/products.py, also for what scales send. `stored` is the 8-bit dtype of a kernel that is
    not trained, with the value of one unit for each column.

    Communication:
        forward   reduce_scatter of the partial sums over tp if a contracted dim and `y` are cut over tp;
                  all_reduce of the partial sums over tp if a contracted dim is cut over tp and `y` is not
        backward  the transposes
    """

    weight: str
    x: str
    y: str
    sizes: Mapping[str, int]
    dtype: str = "float32"
    bias: bool = False
    scale: float = 1.0  # factor on the initial values' standard deviation, fan_in ** -0.5; 0: zeros
    at_rest: str = "d_model"
    matmul: str = COMPUTE
    matmul_residuals: str = COMPUTE
    part: str = ""  # of the model: see ParameterSpec
    stored: str = ""

    def setup(self):
        x, y, weight = Layout.parse(self.x), Layout.parse(self.y), Layout.parse(self.weight)
        inputs = self.inputs.split()
        deviation = self.scale * math.prod(self.sizes[name] for name in inputs) ** -0.5
        initial = nn.initializers.normal(deviation)
        zeros, scales = nn.initializers.zeros, scales_of(self.matmul) if self.matmul != COMPUTE else ""
        self.amax = None
        of_weight = dict(role="weight", part=self.part, at_rest=self.at_rest, inputs=self.inputs)
        of_weight |= dict(products=self.matmul, scales=scales)
        if self.stored:
            of_weight |= dict(stored=self.stored, unit=KERNEL_UNIT)
            initial, units = normal_in_units(deviation, self.stored)
            outputs = weight.written(*(name for name in weight.names if name not in inputs))
            of_unit = dict(role="norm", part=self.part, stored="float32")
            self.unit = parameter(self, KERNEL_UNIT, outputs, self.sizes, units, **of_unit)
        self.kernel = parameter(self, KERNEL, self.weight, self.sizes, initial, **of_weight)
        if scales and product_of(self.matmul).scales == DELAYED:
            self.amax = parameter(self, scales, AMAX_LAYOUT, self.sizes, zeros, role="maxima", part=self.part)
        if self.bias:
            layout = y.written(*(name for name in y.names if name not in x.names))
            self.shift = parameter(self, "bias", layout, self.sizes, zeros, role="bias", part=self.part)

    def input(self, x: Array, *, part: str = "", before: str = "", shared: bool = False) -> Array | ProductInput:
        """x in the form that this product reads; other products of the same input can use it, too, so 8-bit inputs are
        rounded once: say then that it is `shared`. If the 8-bit input is saved, `pipeline.remat` knows it under the
        name `part`, unless ranks held less of it in the layout `before`."""
        if self.matmul == COMPUTE:
            return x
        axes_before, axes = (Layout.parse(layout).used_axes() for layout in (before or self.x, self.x))
        pieces = math.prod(bound_axis_sizes().get(axis, 1) for axis in axes_before if axis not in axes)
        saved = self.matmul_residuals == EIGHT_BITS and pieces == 1
        said = dict(x_layout=self.x, weight=self.weight, part=part if saved else "", shared=shared)
        return ProductInput.of(x, self.amax, form=self.matmul, **said)

    def __call__(self, x: Array | ProductInput | Streams, *, zeros_after: int = 0) -> Array | Streams:
        """The product, with so many zeros appended to the last dim."""
        return self.product(x, zeros_after)

    @nn.nowrap
    def product(self, x: Array | ProductInput | Streams, zeros_after: int = 0) -> Array | Streams:
        """The same, in the scope of who calls it."""
        y_layout = Layout.parse(self.y)
        partial = einsum_layout([Layout.parse(self.x), Layout.parse(self.weight)], y_layout.names)
        pattern = f"{self.x}, {self.weight} -> {partial}"
        y = per_stream(lambda x: self._product(pattern, x, zeros_after), x)
        y = reshard_streams(f"{partial} -> {y_layout}", y)
        if not self.bias:
            return y
        return per_stream(lambda y: y + _of_columns(self.shift.astype(self.dtype), y), y)

    @property
    def inputs(self) -> str:
        """The names of the dims that the product contracts."""
        x = Layout.parse(self.x)
        return " ".join(name for name in Layout.parse(self.weight).names if name in x.names)

    @nn.nowrap
    def into(self, dim: str) -> str:
        """The layout of a matrix from this product's inputs to `dim`, sharded as the kernel is.

        >>> down = Dense("d_ff/tp d_model", "batch/dp seq d_ff/tp", "batch/dp seq/tp d_model", sizes={})
        >>> down.into("rank"), down.back("rank")
        ('d_ff/tp rank', 'rank d_model')
        """
        return f"{Layout.parse(self.weight).written(*self.inputs.split())} {dim}"

    @nn.nowrap
    def back(self, dim: str) -> str:
        """The layout of a matrix from `dim` to this product's outputs, sharded as `y` is."""
        inputs = self.inputs.split()
        outputs = (name for name in Layout.parse(self.weight).names if name not in inputs)
        return f"{dim} {Layout.parse(self.y).written(*outputs)}"

    @nn.nowrap
    def between(self, dim: str) -> str:
        """The layout of `x` times a matrix `into(dim)`, when it is added up: tokens as in `y`, and `dim` whole.

        >>> down = Dense("d_ff/tp d_model", "batch/dp seq d_ff/tp", "batch/dp seq/tp d_model", sizes={})
        >>> down.partial_sums("rank"), down.between("rank")
        ('batch/dp seq rank +tp', 'batch/dp seq/tp rank')
        """
        y = Layout.parse(self.y)
        return f"{y.written(*y.names[:2])} {dim}"

    @nn.nowrap
    def partial_sums(self, dim: str) -> str:
        """The same before it is added up."""
        names = Layout.parse(self.between(dim)).names
        return str(einsum_layout([Layout.parse(self.x), Layout.parse(self.into(dim))], names))

    def _product(self, pattern: str, x: Array | ProductInput, zeros_after: int) -> Array:
        kernel = padded(self.kernel.astype(self.dtype), zeros_after)
        if self.stored:
            sums = einsum(pattern, x, kernel)
            units = _of_columns(padded(self.unit, zeros_after), sums)
            return (sums.astype(jnp.float32) * units).astype(self.dtype)
        if self.matmul == COMPUTE:
            return einsum(pattern, x, kernel)
        rounded = self.get_variable(ROUNDED, KERNEL) if self.has_variable(ROUNDED, KERNEL) else None
        rounded = padded(rounded, zeros_after)
        form, residuals = self.matmul, self.matmul_residuals
        return scaled_product(pattern, x, kernel, self.amax, form=form, residuals=residuals, rounded=rounded)


def unrounded(x: Array | ProductInput) -> Array:
    """A product's input as it is, without the 8-bit form that other products of it share."""
    return x.x if isinstance(x, ProductInput) else x


def _of_columns(x: Array, y: Array) -> Array:
    """An array of the last dims of y, with as many dims."""
    return x.reshape((1,) * (y.ndim - x.ndim) + x.shape)


def padded(kernel: Array | Operand | None, zeros: int) -> Array | Operand | None:
    """A kernel, or a product, with `zeros` appended to the last dim."""
    if kernel is None or not zeros:
        return kernel
    if isinstance(kernel, Operand):
        return kernel._replace(values=padded(kernel.values, zeros))
    return jnp.pad(kernel, [*((0, 0) for _ in kernel.shape[:-1]), (0, zeros)])
