"""A mixture of experts in the MLP's place: each token goes to a few of them, and none is ever dropped."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
from einops import rearrange
from jax import Array, lax

from parallax.config.sections import ModelConfig
from parallax.model.exchange import EXCHANGES
from parallax.model.experts import Experts
from parallax.model.families import Family
from parallax.model.mlp import GatedMLP
from parallax.model.router import Router
from parallax.sharding.activations import activation
from parallax.sharding.collectives import bound_axis_sizes, reshard
from parallax.sharding.layout import Layout


class MoE(nn.Module):
    """The sum of a token's experts times their weights, and of those that all tokens go to; in and out as the residual.

    Experts are gated MLPs, cut over ep by their number and over tp by their width, in both families. `exchange` is how
    tokens come to them: see parallax/model/exchange.py. With `chunk_tokens`, at most so many of a device's tokens (or
    one position of each of its rows) are on their way at once; the backward pass sends and computes each chunk again,
    whatever `pipeline.remat` says, and its gradients of experts come with the input's: B makes them, not W.
    `row_weight` is 1 / rows of the global batch; None, in evaluation and decoding, leaves out what Router says of
    gradients. Besides what its router, its exchange and its shared experts send:

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
    chunk_tokens: int = 0  # 0: all at once
    matmul: str = "compute"  # of the shared experts

    def setup(self):
        model = self.model
        self.router = Router(model, self.balance_coefficient, self.router_z_coefficient)
        self.experts = Experts(model, self.out_scale)
        if model.shared_experts:
            how = dict(width="d_shared", name="shared", matmul=self.matmul)
            self.shared = GatedMLP(self.residual, self.family, model.sizes, model.dtype, self.out_scale, **how)

    def __call__(self, x: Array, row_weight: Array | None) -> Array:
        whole = reshard(f"{self.residual} -> {activation('d_model')}", x)
        weights, ids = self.router(whole, row_weight)
        exchange = partial(EXCHANGES[self.exchange], self.experts(), self.residual)
        # Initial values depend on nothing that is computed, and not every ragged_dot can be mapped over layers.
        y = x if self.is_initializing() else self._in_chunks(exchange, whole, weights, ids)
        return y + self.shared(x) if self.model.shared_experts else y

    def _in_chunks(self, exchange: Callable, *arrays: Array) -> Array:
        """`exchange` of arrays [B, S, ...], chunk by chunk. Where tp cuts the residual's seq, a chunk has as many
        positions of each piece, so that its results lie where the residual has them."""
        rows, seq = arrays[0].shape[:2]
        pieces = bound_axis_sizes().get("tp", 1) if "tp" in Layout.parse(self.residual).cut_of("seq") else 1
        chunks = chunks_of_tokens(rows * pieces, seq // pieces, self.chunk_tokens)
        if chunks == 1:
            return exchange(*arrays)
        apart = [rearrange(x, "B (t c s) ... -> c B (t s) ...", t=pieces, c=chunks) for x in arrays]
        y = lax.map(jax.checkpoint(lambda chunk: exchange(*chunk)), apart)
        return rearrange(y, "c B s D -> B (c s) D")


def chunks_of_tokens(rows: int, positions: int, most: int) -> int:
    """In how many equal chunks of positions no chunk has more than so many tokens, if it has more than one position.

    >>> [chunks_of_tokens(4, 12, most) for most in (0, 48, 30, 16, 3)]
    [1, 1, 2, 3, 12]
    """
    if not most:
        return 1
    counts = (count for count in range(1, positions) if not positions % count)
    return next((count for count in counts if rows * positions // count <= most), positions)
