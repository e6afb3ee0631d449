"""The router of a mixture: a token's experts and their weights, and the losses that balance the load."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.config.sections import ModelConfig
from parallax.sharding.activations import CONTEXT_AXIS, activation
from parallax.sharding.collectives import is_bound, sum_over, vary_alike
from parallax.sharding.einsum import einsum
from parallax.sharding.parameter import parameter
from parallax.sharding.zigzag import context_ranks

LEAST_SUM = 1e-20  # of the weights before they are normalised, since all sigmoids may be 0


class Router(nn.Module):
    """Weights [B, S, K] in float32 and ids [B, S, K] of each token's K experts, highest score first.

    Scores are a softmax over experts or sigmoids, in float32 at the highest precision; `shift` is a part of the logits.
    `bias` is added to them only for
    the choice (DeepSeek-V3, section 2.1.2); among equal scores the lower id is chosen. With groups, only experts of the
    best groups are chosen: with softmax the score of a group is that of its best expert (DeepSeek-V2, section 2.1.2),
    with sigmoid the sum of its two best (DeepSeek-V3).

    If `row_weight`, 1 / rows of the global batch, is given, the backward pass adds gradients of terms that are not part
    of the output: of the balance loss and the z-loss, see LossConfig. The gradient of the bias is the number of tokens
    of each expert. Every tensor-parallel rank has all tokens and makes the same choices; only the first one reports
    counts.

    Communication:
        forward   all_reduce of the counts of each row over cp if there is a balance loss
        backward  nothing
    """

    model: ModelConfig
    balance_coefficient: float
    z_coefficient: float

    def setup(self):
        initial = nn.initializers.normal(self.model.d_model**-0.5)
        sizes, zeros = self.model.sizes, nn.initializers.zeros
        self.kernel = parameter(self, "kernel", "d_model experts", sizes, initial, role="weight", part="router")
        self.bias = parameter(self, "bias", "experts", sizes, zeros, role="counts", part="router")
        if self.model.router_shift:
            self.shift = parameter(self, "shift", "experts", sizes, zeros, role="bias", part="router")

    def __call__(self, x: Array, row_weight: Array | None) -> tuple[Array, Array]:
        product = f"{activation('d_model')}, d_model experts -> {activation('experts')}"
        logits_BSE = einsum(product, x.astype(jnp.float32), self.kernel, precision="highest")
        if self.model.router_shift:
            logits_BSE += self.shift[None, None]
        logits_BSE = checkpoint_name(logits_BSE, "router")
        sigmoid = self.model.router_score == "sigmoid"
        scores_BSE = jax.nn.sigmoid(logits_BSE) if sigmoid else jax.nn.softmax(logits_BSE, axis=-1)
        ids_BSK = chosen_experts(lax.stop_gradient(scores_BSE + self.bias.reshape(1, 1, -1)), self.model)
        weights_BSK = jnp.take_along_axis(scores_BSE, ids_BSK, axis=-1)
        if self.model.router_normalized:
            weights_BSK /= weights_BSK.sum(axis=-1, keepdims=True) + LEAST_SUM
        weights_BSK *= self.model.router_scale
        if row_weight is None:
            return weights_BSK, ids_BSK
        counts_BE = _counts(ids_BSK, self.model.experts)
        loss = self._losses(logits_BSE, scores_BSE, counts_BE, row_weight)
        tells = jnp.float32(lax.axis_index("tp") == 0 if is_bound("tp") else 1)
        gradients = tells, tells * counts_BE.sum(axis=0)
        return with_gradients(weights_BSK, (loss, self.bias), gradients), ids_BSK

    def _losses(self, logits_BSE: Array, scores_BSE: Array, counts_BE: Array, row_weight: Array) -> Array:
        """This device's share of the balance loss and the z-loss of the whole batch."""
        loss = jnp.zeros(())
        if self.balance_coefficient:
            row_counts_BE = sum_over(counts_BE, [CONTEXT_AXIS])
            shares_BE = row_counts_BE / row_counts_BE.sum(axis=-1, keepdims=True)
            p_BSE = scores_BSE / (scores_BSE.sum(axis=-1, keepdims=True) + LEAST_SUM)
            balance = self.model.experts * jnp.einsum("BE,BSE->", shares_BE, p_BSE, precision="highest")
            loss += self.balance_coefficient * balance
        if self.z_coefficient:
            loss += self.z_coefficient * jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1)).sum()
        return loss * row_weight / (logits_BSE.shape[1] * context_ranks())


def chosen_experts(scores_BSE: Array, model: ModelConfig) -> Array:
    """The ids of each token's experts, highest score first; among equal scores the lower id first."""
    if model.router_groups > 1:
        scores_BSE = _in_best_groups(scores_BSE, model)
    return lax.top_k(scores_BSE, model.experts_per_token)[1]


def _in_best_groups(scores_BSE: Array, model: ModelConfig) -> Array:
    """The scores, with -inf outside of a token's best groups."""
    groups_BSGE = rearrange(scores_BSE, "B S (G E) -> B S G E", G=model.router_groups)
    counting = min(2 if model.router_score == "sigmoid" else 1, groups_BSGE.shape[-1])
    best_BSG = lax.top_k(groups_BSGE, counting)[0].sum(axis=-1)
    chosen = lax.top_k(best_BSG, model.router_groups_chosen)[1]
    is_chosen_BSG = jax.nn.one_hot(chosen, model.router_groups, dtype=bool).any(axis=2)
    return rearrange(jnp.where(is_chosen_BSG[..., None], groups_BSGE, -jnp.inf), "B S G E -> B S (G E)")


def _counts(ids_BSK: Array, experts: int) -> Array:
    """Number of tokens of each row for each expert, float32, in which integers are exact up to 2^24."""
    return jax.nn.one_hot(ids_BSK, experts, dtype=bool).sum(axis=(1, 2)).astype(jnp.float32)


def with_gradients(y: Array, given: Any, gradients: Any) -> Array:
    """Return `y`; the backward pass adds `gradients` to those of the arrays in `given`, whatever the gradient of y.

    >>> jax.grad(lambda x: 3 * with_gradients(jnp.ones(()), x, jnp.full((), 5.0)))(1.0).item()
    5.0
    """
    return _with_gradients(*vary_alike((y, given, gradients)))


@jax.custom_vjp
def _with_gradients(y: Array, given: Any, gradients: Any) -> Array:
    return y


_with_gradients.defvjp(lambda y, given, gradients: (y, gradients), lambda gradients, dy: (dy, gradients, None))
