"""RMSNorm over the last dim, sharded or not (Zhang and Sennrich 2019, equation 4)."""

from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp
from jax import Array, lax

from parallax.sharding.collectives import all_reduce
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import parameter


class RMSNorm(nn.Module):
    """`x / rms(x) * scale`, computed in float32.

    Communication:
        forward   all_reduce of one number a token over tp if the last dim is cut over tp
        backward  all_reduce of one number a token over tp if the last dim is cut over tp
    """

    layout: str  # of x
    sizes: Mapping[str, int]
    eps: float
    part: str = ""  # of the model: see ParameterSpec

    @nn.compact
    def __call__(self, x: Array) -> Array:
        layout = Layout.parse(self.layout)
        dim, axes = layout.names[-1], layout.axes[-1]
        tokens = Layout(layout.names[:-1], layout.axes[:-1])
        scale = parameter(
            self, "scale", "/".join((dim, *axes)), self.sizes, nn.initializers.ones, role="norm", part=self.part
        )
        wide = x.astype(jnp.float32)
        squares = jnp.sum(jnp.square(wide), axis=-1)
        squares = all_reduce(f"{tokens.with_partial(*axes)} -> {tokens}", squares)
        inverse = lax.rsqrt(squares / self.sizes[dim] + self.eps)
        return (wide * inverse[..., None] * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
