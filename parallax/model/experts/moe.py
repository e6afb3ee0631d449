"""A mixture of experts instead of the MLP: each token is sent to a few experts, and none is ever dropped."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.config.sections import EXPERTS, ModelConfig
from parallax.model.dense import Dense
from parallax.model.experts.exchange import SharedExperts, exchange_form
from parallax.model.experts.experts import Experts, HeldExperts
from parallax.model.experts.ragged import ordered
from parallax.model.experts.router import Router
from parallax.model.families import Family
from parallax.model.mlp import GatedMLP
from parallax.sharding.activations import activation
from parallax.sharding.collectives import bound_axis_sizes, reshard
from parallax.sharding.einsum import einsum, einsum_layout
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import parameter

GATE = "d_model gates"


class MoE(nn.Module):
    """Weighted sum of a token's experts, plus the shared experts; input and output have the residual's layout.

    Experts are gated MLPs. In all families ep shards their number and tp their width. `exchange` says how tokens are
    sent to them, and `exchange_hosts` over how many hosts: see parallax/model/experts/exchange.py. With `chunk_tokens`,
    at most that many of a device's tokens (or one position of each of its rows) are sent at once. Then the backward
    pass repeats the exchange and the products of each chunk, whatever `pipeline.remat` says, and B computes the
    gradients of experts together with the input's, not W. With `model.shared_gate` the shared experts' output is times
    a sigmoid of the token (Qwen2-MoE). With `model.expert_bias` experts have biases; those of their results are added
    up behind the exchange: the sum of a token's experts' results, each with its weight, is that of the results without
    biases plus that of the biases. `row_weight` is 1 / rows of the global batch; None, in evaluation and decoding,
    omits the additional gradients of Router. Besides the communication of its router, its exchange and its shared
    experts:

    Communication:
        forward   all_gather of x over tp
        backward  the transposes
    """

    model: ModelConfig
    residual: str
    family: Family  # of the shared experts
    out_scale: float
    balance_coefficient: float = 0.0
    router_z_coefficient: float = 0.0
    exchange: str = "gather"
    exchange_hosts: int = 1
    chunk_tokens: int = 0  # 0: all tokens at once
    matmul: str = "compute"  # of the shared experts
    matmul_of_experts: str = "compute"
    dense: Callable[..., Dense] | None = None  # makes the shared experts' projections, if they are not Dense

    def setup(self):
        model = self.model
        self.router = Router(model, self.balance_coefficient, self.router_z_coefficient)
        self.experts = Experts(model, self.out_scale, self.matmul_of_experts)
        if model.expert_bias:
            self.down_bias = parameter(
                self, "down_bias", self._bias_layout, model.sizes, nn.initializers.zeros, role="bias", part=EXPERTS
            )
        if model.shared_experts:
            if model.shared_gate:
                initial = nn.initializers.normal(model.d_model**-0.5)
                what = dict(role="weight", part="shared")
                self.shared_gate = parameter(self, "shared_gate", GATE, model.sizes, initial, **what)
            self.shared = GatedMLP(
                self.residual,
                self.family,
                model.sizes,
                model.dtype,
                self.out_scale,
                width="d_shared",
                name="shared",
                part="shared",
                dense=self.dense,
                matmul=self.matmul,
                activation=model.activation,
                limit=model.activation_limit,
            )

    def __call__(self, x: Array, row_weight: Array | None) -> Array:
        whole = reshard(f"{self.residual} -> {activation('d_model')}", x)
        weights, ids = self.router(whole, row_weight)
        experts = self.experts()
        gate = self._gate(whole) if self.model.shared_gate else None

        def shared(token: Array | None) -> Array:
            return self.shared(ordered(x, token), gate)

        shared_experts = shared if self.model.shared_experts else None
        # Initial values do not depend on the output, and not every ragged_dot can be mapped over layers.
        if self.is_initializing():
            return x + shared(None) if shared_experts else x
        y = self._in_chunks(experts, shared_experts, whole, weights, ids)
        return y + self._biases(weights, ids) if self.model.expert_bias else y

    @property
    def _bias_layout(self) -> str:
        return f"experts {Layout.parse(self.residual).written('d_model')}"

    def _biases(self, weights: Array, ids: Array) -> Array:
        """For each token the sum of its experts' biases of down times their weights, in the residual's layout."""
        is_chosen_BSKE = ids[..., None] == jnp.arange(self.model.experts)[None, None, None]
        weights_BSE = jnp.where(is_chosen_BSKE, weights[..., None], 0).sum(axis=2)
        given, bias = map(Layout.parse, (activation("experts"), self._bias_layout))
        sums = einsum_layout([given, bias], Layout.parse(self.residual).names)
        product, dtype = f"{given}, {bias} -> {sums}", self.model.dtype
        y = einsum(product, weights_BSE.astype(dtype), self.down_bias.astype(dtype))
        return reshard(f"{sums} -> {self.residual}", y)

    def _gate(self, whole: Array) -> Array:
        """The factor of each token on its shared experts' output, [B, S, 1]."""
        product = f"{activation('d_model')}, {GATE} -> {activation('gates')}"
        logits = einsum(product, whole, self.shared_gate.astype(whole.dtype))
        return jax.nn.sigmoid(checkpoint_name(logits, "router"))

    def _in_chunks(self, experts: HeldExperts, shared_experts: SharedExperts | None, *arrays: Array) -> Array:
        """The exchange of arrays [B, S, ...], chunk by chunk. If tp shards the residual's seq, a chunk has the same
        number of positions of each shard, so that its results have the residual's layout."""
        exchange = exchange_form(self.exchange, self.exchange_hosts)
        rows, seq = arrays[0].shape[:2]
        pieces = bound_axis_sizes().get("tp", 1) if "tp" in Layout.parse(self.residual).cut_of("seq") else 1
        chunks = chunks_of_tokens(rows * pieces, seq // pieces, self.chunk_tokens)
        if chunks == 1:
            return exchange(experts, self.residual, *arrays, shared_experts)
        in_chunks = [rearrange(x, "B (t c s) ... -> c B (t s) ...", t=pieces, c=chunks) for x in arrays]

        def run(chunk: tuple[list[Array], list[Array]]) -> Array:
            scales, arrays = chunk
            return exchange(experts.with_scales(scales), self.residual, *arrays)

        y = lax.map(jax.checkpoint(run), (experts.for_each(chunks), in_chunks))
        y = rearrange(y, "c B s D -> B (c s) D")
        return y + shared_experts(None) if shared_experts else y


def chunks_of_tokens(rows: int, positions: int, most: int) -> int:
    """Number of equal chunks of positions in which no chunk has more than `most` tokens, or each has one position.

    >>> [chunks_of_tokens(4, 12, most) for most in (0, 48, 30, 16, 3)]
    [1, 1, 2, 3, 12]
    """
    if not most:
        return 1
    counts = (count for count in range(1, positions) if not positions % count)
    return next((count for count in counts if rows * positions // count <= most), positions)
