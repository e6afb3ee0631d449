"""Dense: a matrix product that is its kernel's notation plus the layout that it must return."""

import math
from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from parallax.model.products import AMAX, AMAX_LAYOUT, COMPUTE, KERNEL, ROUNDED, scaled_product
from parallax.sharding.collectives import reshard
from parallax.sharding.einsum import einsum, einsum_layout
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import parameter


class Dense(nn.Module):
    """`y = x @ kernel`, contracted over the dims that `x` and `kernel` share.

    `weight`, `x` and `y` are the layouts of kernel, input and output. The strings choose the form:

        column    "d_model d_ff/tp"     batch/dp seq d_model    -> batch/dp seq d_ff/tp
        row       "d_ff/tp d_model"     batch/dp seq d_ff/tp    -> batch/dp seq d_model/tp
        scatter   "d_model/tp d_ff"     batch/dp seq d_model/tp -> batch/dp seq d_ff/tp

    `at_rest` is the kernel's dim that data axes may cut between its uses: see ShardingPlan. `matmul` says how the
    product and the input's gradient are made: see parallax/model/products.py.

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
    scale: float = 1.0  # of the initial values' standard deviation, fan_in ** -0.5
    at_rest: str = "d_model"
    matmul: str = COMPUTE

    def setup(self):
        x, y = Layout.parse(self.x), Layout.parse(self.y)
        fan_in = math.prod(self.sizes[name] for name in Layout.parse(self.weight).names if name in x.names)
        initial = nn.initializers.normal(self.scale * fan_in**-0.5)
        self.kernel = parameter(self, KERNEL, self.weight, self.sizes, initial, at_rest=self.at_rest)
        if self.matmul != COMPUTE:
            self.amax = parameter(self, AMAX, AMAX_LAYOUT, self.sizes, nn.initializers.zeros)
        if self.bias:
            layout = " ".join("/".join((name, *y.cut_of(name))) for name in y.names if name not in x.names)
            self.shift = parameter(self, "bias", layout, self.sizes, nn.initializers.zeros)

    def __call__(self, x: Array, *, behind: int = 0, like: "Dense | None" = None) -> Array:
        """With so many zeros behind the entries of the last dim. In 8 bits x is rounded once with `like`, which has the
        same input."""
        y_layout = Layout.parse(self.y)
        partial = einsum_layout([Layout.parse(self.x), Layout.parse(self.weight)], y_layout.names)
        y = self._product(f"{self.x}, {self.weight} -> {partial}", x, behind, like)
        y = reshard(f"{partial} -> {y_layout}", y)
        if not self.bias:
            return y
        shift = self.shift.astype(self.dtype)
        return y + shift.reshape((1,) * (y.ndim - shift.ndim) + shift.shape)

    def _product(self, pattern: str, x: Array, behind: int, like: "Dense | None") -> Array:
        kernel = _padded(self.kernel.astype(self.dtype), behind)
        if self.matmul == COMPUTE:
            return einsum(pattern, x, kernel)
        rounded = self.get_variable(ROUNDED, KERNEL) if self.has_variable(ROUNDED, KERNEL) else None
        how = dict(form=self.matmul, like=like.amax if like else None)
        return scaled_product(pattern, x, kernel, self.amax, **how, rounded=_padded(rounded, behind))


def _padded(kernel: Array | None, behind: int) -> Array | None:
    """With so many zeros behind the entries of the last dim."""
    if kernel is None or not behind:
        return kernel
    return jnp.pad(kernel, [*((0, 0) for _ in kernel.shape[:-1]), (0, behind)])
