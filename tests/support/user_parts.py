"""Parts of a user's own, as a config names them: "support.user_parts:SquaredMLP(power=3.0)"."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from parallax.model.attention import GQA
from parallax.model.dense import Dense, unrounded
from parallax.model.loss import cross_entropy
from parallax.model.mlp import GatedMLP
from parallax.model.norm import RMSNorm
from parallax.model.transformer import Block
from parallax.schedules import Action, Schedule
from parallax.sharding.activations import activation
from parallax.sharding.collectives import reshard
from parallax.sharding.einsum import einsum
from parallax.sharding.layout import new_dims
from parallax.sharding.parameter import parameter

new_dims("rank")


class SquaredMLP(GatedMLP):
    """`down(relu(up(x)) ** power)`, with a bias along d_ff, a parameter of its own."""

    power: float = 2.0

    @nn.compact
    def __call__(self, x):
        whole, wide = self.family.input("d_model"), activation("d_ff/tp")
        x = reshard(f"{self.residual} -> {whole}", x)
        dense = partial(self.dense or Dense, sizes=self.sizes, dtype=self.dtype, part=self.part)
        up = dense(self.family.into("d_model", "d_ff/tp"), whole, wide, name="up")
        down = dense(self.family.back("d_ff/tp"), wide, self.residual, scale=self.out_scale, name="down")
        shift = parameter(self, "shift", "d_ff/tp", self.sizes, nn.initializers.zeros, role="bias", part=self.part)
        return down(nn.relu(checkpoint_name(up(x) + shift[None, None], "ffn")) ** self.power)


class ScaledNorm(RMSNorm):
    """RMSNorm times a factor."""

    factor: float = 0.5

    @nn.compact
    def __call__(self, x):
        return self.factor * super().__call__(x)


class CoolGQA(GQA):
    """GQA with another temperature of its scores."""

    cooling: float = 0.5

    @property
    def _scale(self):
        return self.cooling * super()._scale


class LoRA(Dense):
    """A Dense with a product of low rank beside it, whose inner dim is its own."""

    rank: int = 4

    def setup(self):
        super().setup()
        sizes, of_adapter = {**self.sizes, "rank": self.rank}, dict(role="weight", part="adapters")
        first = nn.initializers.normal(0.1)
        self.a = parameter(self, "a", self.into("rank"), sizes, first, inputs=self.inputs, **of_adapter)
        self.b = parameter(self, "b", self.back("rank"), sizes, first, inputs="rank", **of_adapter)

    def __call__(self, x, *, zeros_after=0):
        sums, whole = self.partial_sums("rank"), self.between("rank")
        narrow = einsum(f"{self.x}, {self.into('rank')} -> {sums}", unrounded(x), self.a.astype(self.dtype))
        narrow = reshard(f"{sums} -> {whole}", narrow)
        added = einsum(f"{whole}, {self.back('rank')} -> {self.y}", narrow, self.b.astype(self.dtype))
        return super().__call__(x, zeros_after=zeros_after) + added


class ParallelBlock(Block):
    """Attention and MLP side by side."""

    def __call__(self, x, context):
        normed = checkpoint_name(self.attention_norm(x), "norm")
        attended = checkpoint_name(self.attention(normed, context), "out")
        return x + attended + self.mlp(self.mlp_norm(x))


def focal(logits_CV, labels_C, table, z_coefficient, entries=None, *, power: float = 2.0):
    """The focal loss: cross-entropy, less for tokens that are already likely."""
    losses = cross_entropy(logits_CV, labels_C, table, z_coefficient, entries)
    return losses.at[0].multiply((1 - jnp.exp(-losses[0])) ** power)


def wide_gathered(compute, cut):
    """Gathers the MLP's weights at each use and others once a step."""
    return (cut, cut, compute, cut) if "d_ff" in str(compute) else (cut, compute, compute, cut)


def eager(ranks: int, microbatches: int) -> Schedule:
    """One forward and one backward pass in turn, as early as possible."""
    orders = []
    for rank in range(ranks):
        forward, backward = ([Action(rank, kind, m) for m in range(microbatches)] for kind in "FB")
        ahead = min(ranks - rank, microbatches)
        order = [*forward[:ahead]]
        for at, action in enumerate(backward):
            order += [action, *forward[ahead + at : ahead + at + 1]]
        orders.append(tuple(order))
    return Schedule("eager", tuple(range(ranks)), microbatches, tuple(orders))


def signs(b1: float = 0.9) -> optax.GradientTransformation:
    """The sign of the mean of gradients."""
    means = optax.ema(b1, debias=False)
    sign = optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates))
    return optax.chain(means, sign)


def read_lines(file, *, least: int = 1):
    """The lines of a file with at least so many letters."""
    yield from (line for line in file.read_text().splitlines() if len(line) >= least)


def numbers(*, most: int = 200):
    """Documents that are numbers."""
    yield from (f"{number} and {number + 1}" for number in range(most))


def no_texts():
    """Documents of which not all are texts."""
    yield "one"
    yield 2
