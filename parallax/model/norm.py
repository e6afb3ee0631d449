"""Norms over the last dim, sharded or not: RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016)."""

import functools
from collections.abc import Callable, Mapping
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.config.remat import NORM_MEANS
from parallax.config.sections import DIRECT, ONE_PLUS, UNSCALED, ModelConfig
from parallax.sharding.collectives import all_reduce
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import parameter


class RMSNorm(nn.Module):
    """`x / rms(x) * scale`, computed in float32.

    `scaling` says what the parameter is: the factor, or the factor less 1, or there is none. With `bias` a vector is
    added.

    Communication:
        forward   all_reduce of one number a token over tp if the last dim is cut over tp
        backward  all_reduce of one number a token over tp if the last dim is cut over tp
    """

    layout: str  # of x
    sizes: Mapping[str, int]
    eps: float
    part: str = ""  # of the model: see ParameterSpec
    scaling: str = DIRECT
    bias: bool = False

    is_centered = False  # whether the mean is subtracted first

    @nn.compact
    def __call__(self, x: Array) -> Array:
        layout, wide = Layout.parse(self.layout), x.astype(jnp.float32)
        if self.is_centered:
            wide = wide - mean(layout, self.sizes, wide)[..., None]
        inverse = lax.rsqrt(mean(layout, self.sizes, jnp.square(wide)) + self.eps)
        vector = layout.written(layout.names[-1])
        declare, broadcast = partial(parameter, self, part=self.part), (1,) * (x.ndim - 1) + (-1,)
        y = wide * inverse[..., None]
        if self.scaling != UNSCALED:
            first = nn.initializers.zeros if self.scaling == ONE_PLUS else nn.initializers.ones
            scale = declare("scale", vector, self.sizes, first, role="norm").reshape(broadcast)
            y = y * (1 + scale if self.scaling == ONE_PLUS else scale)
        if self.bias:
            y = y + declare("bias", vector, self.sizes, nn.initializers.zeros, role="bias").reshape(broadcast)
        return y.astype(x.dtype)


class LayerNorm(RMSNorm):
    """RMSNorm of `x - mean(x)`.

    Communication:
        forward   all_reduce of the mean and the variance over tp if the last dim is cut over tp
        backward  all_reduce of the mean's gradient and the variance's gradient over tp if the last dim is cut over tp
    """

    is_centered = True


def mean(layout: Layout, sizes: Mapping[str, int], x: Array) -> Array:
    """The mean of each token over the last dim of x, of which the layout says how it is sharded."""
    tokens, axes = Layout(layout.names[:-1], layout.axes[:-1]), layout.axes[-1]
    total = all_reduce(f"{tokens.with_partial(*axes)} -> {tokens}", jnp.sum(x, axis=-1))
    return named_means(total / sizes[layout.names[-1]])


def named_means(means: Array) -> Array:
    """Means of a norm, with their activation name if there is one for each token. Those of each head have none: they
    are 1/64 of the bytes of 16-bit heads of 128, and what saving them gains was not compiled."""
    return checkpoint_name(means, NORM_MEANS) if means.ndim == 2 else means


def norms_of(model: ModelConfig) -> dict[str, Callable[..., nn.Module]]:
    """What makes the norms of a model's residual stream, by `model.norm`."""
    return _norms(model.norm_scale, model.norm_bias)


@functools.cache  # a module is equal to another one only if it has the same partial
def _norms(scaling: str, bias: bool) -> dict[str, Callable[..., nn.Module]]:
    return {name: partial(norm, scaling=scaling, bias=bias) for name, norm in (("rms", RMSNorm), ("layer", LayerNorm))}
