"""Dense: a matrix product that is its kernel's notation plus the layout that it must return."""

import math
from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

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

    `at_rest` is the kernel's dim that data axes may cut between its uses: see ShardingPlan.

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

    def setup(self):
        self.kernel = parameter(self, "kernel", self.weight, self.sizes, self._initial, at_rest=self.at_rest)
        if self.bias:
            self.shift = parameter(self, "bias", self._bias_layout(), self.sizes, _zeros)

    def __call__(self, x: Array) -> Array:
        y_layout = Layout.parse(self.y)
        partial = einsum_layout([Layout.parse(self.x), Layout.parse(self.weight)], y_layout.names)
        y = einsum(f"{self.x}, {self.weight} -> {partial}", x, self.kernel.astype(self.dtype))
        y = reshard(f"{partial} -> {y_layout}", y)
        return y + self._broadcast_bias(y.ndim) if self.bias else y

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
