"""RMSNorm over all heads of a projection together (OLMo et al. 2024, section 3.2)."""

from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp
from jax import Array, lax

from parallax.config.sections import DIRECT, ONE_PLUS, UNSCALED
from parallax.model.norm import named_means
from parallax.sharding.collectives import all_reduce
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import parameter


class HeadsNorm(nn.Module):
    """`x / rms(x) * scale`, computed in float32; the mean square is over heads and d_head, and each head has a scale of
    its own, which `scaling` makes a factor, as in RMSNorm.

    Communication:
        forward   all_reduce of one number a token over tp if heads are cut over tp
        backward  all_reduce of one number a token over tp if heads are cut over tp
    """

    layout: str  # of x, which ends with heads and d_head
    sizes: Mapping[str, int]
    eps: float
    part: str = ""  # of the model: see ParameterSpec
    scaling: str = DIRECT

    @nn.compact
    def __call__(self, x: Array) -> Array:
        layout = Layout.parse(self.layout)
        tokens = Layout(layout.names[:-2], layout.axes[:-2])
        heads, width = layout.names[-2:]
        wide = x.astype(jnp.float32)
        squares = jnp.sum(jnp.square(wide), axis=(-2, -1))
        squares = all_reduce(f"{tokens.with_partial(*layout.cut_of(heads))} -> {tokens}", squares)
        inverse = lax.rsqrt(named_means(squares / (self.sizes[heads] * self.sizes[width])) + self.eps)
        y = wide * inverse[..., None, None]
        if self.scaling != UNSCALED:
            first = nn.initializers.zeros if self.scaling == ONE_PLUS else nn.initializers.ones
            of_heads = layout.written(heads, width)
            scale_HK = parameter(self, "scale", of_heads, self.sizes, first, role="norm", part=self.part)
            scale = scale_HK[None, None]
            y = y * (1 + scale if self.scaling == ONE_PLUS else scale)
        return y.astype(x.dtype)
