"""Layers in which one product takes the place of several with the same input, for rows of benchmarks/overlap.py.

The products are q, k and v of grouped-query attention, and gate and up of an MLP, with "column_row" and without biases
or 8 bits. Kernels are joined when they are used, and are parameters of their own; or they are one parameter, which is
what joining can gain at most.
"""

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from parallax.config.sections import ATTENTION
from parallax.model.attention import GQA
from parallax.model.context import Context
from parallax.model.dense import Dense
from parallax.model.mlp import GatedMLP
from parallax.sharding.activations import activation
from parallax.sharding.collectives import reshard
from parallax.sharding.einsum import einsum


def joined(x: Array, parts: Sequence[Dense], dim: int) -> tuple[Array, Sequence[int]]:
    """The outputs of several products with x from one, side by side in this dim, and where all but the first begin."""
    first, kernels = parts[0], [part.kernel.astype(x.dtype) for part in parts]
    y = einsum(f"{first.x}, {first.weight} -> {first.y}", x, jnp.concatenate(kernels, axis=dim))
    sizes = [kernel.shape[dim] for kernel in kernels]
    return y, [sum(sizes[: count + 1]) for count in range(len(sizes) - 1)]


class JoinedGQA(GQA):
    """GQA with one product for q, k and v."""

    def _project(self, x: Array, context: Context) -> tuple[Array, Array, Array]:
        x = reshard(f"{self.residual} -> {self.family.input('d_model')}", x)
        y, starts = self._product(x)
        q, k, v = jnp.split(y, starts, axis=-2)
        return *self._rotated(q, k, context), checkpoint_name(v, "kv")

    def _product(self, x: Array) -> tuple[Array, Sequence[int]]:
        return joined(x, (self.q, self.k, self.v), dim=-2)


class GQAOfOneKernel(JoinedGQA):
    """The same from one parameter, on one tensor-parallel rank."""

    def setup(self):
        super().setup()
        sizes = {**self.sizes, "heads": self.sizes["heads"] + 2 * self.sizes["kv_heads"]}
        self.qkv = Dense(self.q.weight, self.q.x, self.q.y, sizes=sizes, dtype=self.dtype, part=ATTENTION)

    def _product(self, x: Array) -> tuple[Array, Sequence[int]]:
        q, kv = self.sizes["heads"], self.sizes["kv_heads"]
        return self.qkv(x), (q, q + kv)


class JoinedMLP(GatedMLP):
    """The gated MLP with one product for gate and up."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        whole, wide = self.family.input("d_model"), activation(f"{self.width}/tp")
        x = reshard(f"{self.residual} -> {whole}", x)
        dense = partial(Dense, sizes=self.sizes, dtype=self.dtype, part=self.part)
        down = dense(self.family.back(f"{self.width}/tp"), wide, self.residual, scale=self.out_scale, name="down")
        into = partial(dense, self.family.into("d_model", f"{self.width}/tp"), whole, wide)
        gate, up = jnp.split(checkpoint_name(self._product(into, x), "ffn"), 2, axis=-1)
        return down(checkpoint_name(nn.silu(gate) * up, "swiglu"))

    def _product(self, into: partial, x: Array) -> Array:
        return joined(x, [into(name=name) for name in ("gate", "up")], dim=-1)[0]


class MLPOfOneKernel(JoinedMLP):
    """The same from one parameter, on one tensor-parallel rank."""

    def _product(self, into: partial, x: Array) -> Array:
        return into(sizes={**self.sizes, self.width: 2 * self.sizes[self.width]}, name="gate_up")(x)
