"""The MLP: gated, as in SwiGLU (Shazeer 2020), or plain."""

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.config.sections import CLAMPED, MLP, ModelConfig
from parallax.model.dense import Dense
from parallax.model.families import Family, with_gradient_apart
from parallax.sharding.activations import activation
from parallax.sharding.compiler import computes_gradients_again
from parallax.sharding.streams import Streams, per_stream

SLOPE = 1.702  # with which the sigmoid is near the error function of GELU (Hendrycks and Gimpel 2016, section 2)


@jax.custom_jvp
def gelu(x: Array) -> Array:
    """x times the normal distribution at x (Hendrycks and Gimpel 2016, section 2). With JAX 0.12 the derivative of its
    own has no replication type."""
    return x * _normal_distribution(x)


@gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    density = jnp.exp(-0.5 * jnp.square(x)) * (2 * math.pi) ** -0.5
    return gelu(x), tangent * (_normal_distribution(x) + x * density)


def _normal_distribution(x: Array) -> Array:
    return 0.5 * (1 + lax.erf(x * 2**-0.5))


ACTIVATIONS = {
    "silu": nn.silu,
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),  # (So et al. 2021)
}


class Activation(NamedTuple):
    """What a gated MLP computes of gate and up: `ACTIVATIONS` of gate, times up; or clamped, as in gpt-oss, (up + 1) *
    gate * sigmoid(1.702 gate) with gate at most `limit`, and up between both signs of it.

    >>> Activation("clamped", 2.0)(jnp.float32(-0.5), jnp.float32(4)) == 3 * -0.5 * jax.nn.sigmoid(1.702 * -0.5)
    Array(True, dtype=bool)
    """

    name: str = "silu"
    limit: float = 0.0  # of "clamped"

    def __call__(self, gate: Array, up: Array) -> Array:
        """In the dtype of gate, if up's is no wider. No communication."""
        if self.name != CLAMPED:
            return ACTIVATIONS[self.name](gate) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(SLOPE * gate) * (up + 1)


SWIGLU = Activation()


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`, or as `Activation` says of "clamped", and times `weight` [B, S, 1] if it is
    given; input and output have the residual's layout. In the family streams permutes are sent for each other rank.

    Communication, column_row:
        forward   all_gather of x over tp; reduce_scatter of the result over tp
        backward  the transposes
    Communication, scatter:
        forward   all_to_all of x over tp if it is cut over seq; reduce_scatter of gate, up and the result over tp
        backward  the transposes
    Communication, streams:
        forward   permute of x and the result over tp
        backward  the transposes
    """

    residual: str
    family: Family
    sizes: Mapping[str, int]
    dtype: str
    out_scale: float
    width: str = "d_ff"
    matmul: str = "compute"
    matmul_residuals: str = "compute"
    part: str = MLP  # of the layer: see ParameterSpec
    dense: Callable[..., Dense] | None = None  # makes its projections, if they are not Dense
    activation: str = "silu"
    limit: float = 0.0  # of activation="clamped"
    bias: bool = False  # of each projection

    @nn.compact
    def __call__(self, x: Array, weight: Array | None = None) -> Array:
        whole, wide = self.family.input("d_model"), activation(f"{self.width}/tp")
        x = self.family.normed(self.family.read(self.residual, x))
        kernel = self.family.into("d_model", f"{self.width}/tp")
        dense = partial(self.dense or Dense, **self.of_projections)
        gate, up = (dense(kernel, whole, wide, name=name) for name in ("gate", "up"))
        down = dense(self.family.back(f"{self.width}/tp"), wide, self.residual, scale=self.out_scale, name="down")
        x = gate.input(x, part="norm", before=self.residual, shared=True)
        wide_gate, wide_up = gate(x), up(x)
        activated = Activation(self.activation, self.limit)
        wide_gate, wide_up = checkpoint_name(wide_gate, "ffn"), checkpoint_name(wide_up, "ffn")
        # Not in 8 bits, where rounding and maxima of the gradients are in the product that computes them, and not with
        # token streams, whose messages waited longer (benchmarks/README.md).
        apart = computes_gradients_again() and self.matmul == "compute" and not isinstance(wide_gate, Streams)
        hidden = per_stream(lambda gate, up: _gated(gate, up, activated, apart), wide_gate, wide_up)
        # Here, so that the result of the last product need not be saved for the weight's gradient.
        hidden = hidden if weight is None else per_stream(operator.mul, hidden, self.family.given_back(weight))
        return down(down.input(checkpoint_name(hidden, "swiglu"), part="swiglu"))

    @property
    def of_projections(self) -> dict[str, Any]:
        """Arguments of its projections."""
        names = ("sizes", "dtype", "bias", "matmul", "matmul_residuals", "part")
        return {name: getattr(self, name) for name in names}


class PlainMLP(GatedMLP):
    """`down(activation(up(x)))`; input and output have the residual's layout. In the family streams permutes are
    sent for each other rank.

    Communication, column_row:
        forward   all_gather of x over tp; reduce_scatter of the result over tp
        backward  the transposes
    Communication, scatter:
        forward   all_to_all of x over tp if it is cut over seq; reduce_scatter of up and the result over tp
        backward  the transposes
    Communication, streams:
        forward   permute of x and the result over tp
        backward  the transposes
    """

    @nn.compact
    def __call__(self, x: Array) -> Array:
        whole, wide = self.family.input("d_model"), activation(f"{self.width}/tp")
        x = self.family.normed(self.family.read(self.residual, x))
        dense = partial(self.dense or Dense, **self.of_projections)
        up = dense(self.family.into("d_model", f"{self.width}/tp"), whole, wide, name="up")
        down = dense(self.family.back(f"{self.width}/tp"), wide, self.residual, scale=self.out_scale, name="down")
        wide = checkpoint_name(up(up.input(x, part="norm", before=self.residual)), "ffn")
        hidden = per_stream(lambda up: _activated(up, self.activation), wide)
        return down(down.input(checkpoint_name(hidden, "swiglu"), part="swiglu"))


# Their backward passes save only gate and up. `prevent_cse` would put a barrier before them: XLA would copy what they
# read from slots, and fuse it with nothing.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=(2, 3))
def _gated(gate: Array, up: Array, activation: Activation, gradients_apart: bool) -> Array:
    return activation(*(with_gradient_apart((gate, up)) if gradients_apart else (gate, up)))


@partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def _activated(up: Array, activation: str) -> Array:
    return ACTIVATIONS[activation](up)


def mlps_of(model: ModelConfig) -> dict[str, Callable[..., nn.Module]]:
    """What makes the MLPs of a model's dense layers, by `model.mlp`."""
    settings = dict(activation=model.activation, bias=model.mlp_bias)
    gated = partial(GatedMLP, limit=model.activation_limit, **settings)
    return {"gated": gated, "plain": partial(PlainMLP, **settings)}
