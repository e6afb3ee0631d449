"""Dense: a matrix product that is its kernel's notation plus the layout that it must return."""

import math
from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from parallax.model.parameter import parameter
from parallax.sharding.collectives import all_gather, reshard
from parallax.sharding.einsum import einsum, einsum_layout
from parallax.sharding.layout import Layout


class Dense(nn.Module):
    """`y = x @ kernel`, contracted over the dims that `x` and `kernel` share.

    `weight` is the stored kernel's layout, `x` and `y` those of input and output. The strings choose the form:

        column    "d_model/dp d_ff/tp"     batch/dp seq d_model    -> batch/dp seq d_ff/tp
        row       "d_ff/tp d_model/dp"     batch/dp seq d_ff/tp    -> batch/dp seq d_model/tp
        scatter   "d_model/tp/dp d_ff"     batch/dp seq d_model/tp -> batch/dp seq d_ff/tp

    Communication:
        forward   all_gather of the kernel over dp if it is cut over dp;
                  reduce_scatter of the partial sums over tp if a contracted dim and `y` are cut over tp;
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

    def setup(self):
        self.kernel = parameter(self, "kernel", self.weight, self.sizes, self._initial)
        if self.bias:
            self.shift = parameter(self, "bias", self._bias_layout(), self.sizes, _zeros)

    def __call__(self, x: Array) -> Array:
        x_layout, y_layout, gathered = Layout.parse(self.x), Layout.parse(self.y), self.gathered_layout
        partial = einsum_layout([x_layout, gathered], y_layout.names)
        y = einsum(f"{x_layout}, {gathered} -> {partial}", x, self.gathered_kernel())
        y = reshard(f"{partial} -> {y_layout}", y)
        return y + self._broadcast_bias(y.ndim) if self.bias else y

    @property
    def gathered_layout(self) -> Layout:
        """The layout of the kernel that is multiplied with: the stored one, not cut over `dp`."""
        return Layout.parse(self.weight).without("dp")

    def gathered_kernel(self) -> Array:
        """The kernel in the compute dtype, gathered over `dp`; cast first, so that fewer bytes are sent."""
        return all_gather(f"{self.weight} -> {self.gathered_layout}", self.kernel.astype(self.dtype))

    def _initial(self, key: Array, shape: tuple[int, ...]) -> Array:
        shared = set(Layout.parse(self.weight).names) & set(Layout.parse(self.x).names)
        fan_in = math.prod(self.sizes[name] for name in shared)
        return nn.initializers.normal(self.scale * fan_in**-0.5)(key, shape, jnp.float32)

    def _bias_layout(self) -> str:
        x, y = Layout.parse(self.x), Layout.parse(self.y)
        return " ".join("/".join((name, *y.cut_of(name))) for name in y.names if name not in x.names)

    def _broadcast_bias(self, ndim: int) -> Array:
        shift = self.shift.astype(self.dtype)
        return shift.reshape((1,) * (ndim - shift.ndim) + shift.shape)


def _zeros(key: Array, shape: tuple[int, ...]) -> Array:
    return jnp.zeros(shape, jnp.float32)
