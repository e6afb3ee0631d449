"""The model of a config in plain jnp: annotations say how arrays are sharded, and XLA adds the collectives (GSPMD).

Parameters, batch and residual stream are sharded as in Parallax. A layer casts its weights and annotates them as not
sharded over data axes, which is FSDP: XLA gathers them and, in the backward pass, sums their gradients. Over tp,
products have annotated columns and rows (Megatron); over cp, tokens are in the same order as in Parallax, and keys and
values are annotated as whole; over ep, a row's tokens are copied to buffers of experts, which are then annotated as
sharded by expert: XLA makes all-to-alls of this. The attention kernel, the rotation of queries and keys, the order of
context ranks and the copies to an expert's rows and back are those of Parallax.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.config.remat import saved_parts
from parallax.errors import ConfigError
from parallax.model.batch import IGNORED
from parallax.model.experts.exchange_costs import ROOM_OVER_EVEN
from parallax.model.experts.router import LEAST_SUM
from parallax.model.experts.rows import Rows, collect, dispatch, sort_rows
from parallax.model.kernels.cudnn import cudnn_attention
from parallax.model.kernels.splash import splash_attention
from parallax.model.mask import Mask
from parallax.model.rope import Rope, rotate
from parallax.pipeline import ShardedModel
from parallax.sharding.activations import ROWS, SEQ, TOKENS, activation
from parallax.sharding.layout import Layout
from parallax.sharding.plan import empty_like
from parallax.sharding.zigzag import in_order_of_ranks, in_order_of_text

WHOLE, WIDE, LOGITS = activation("d_model"), activation("d_ff/tp"), activation("vocab/tp")
QUERIES, KEYS = (activation("heads/tp d_head", seq=seq) for seq in (SEQ, "seq"))
BY_ROW, BY_EXPERT = f"{ROWS} experts capacity d_model", "batch/replica/dp experts/ep capacity d_model"
KERNELS = {"splash": splash_attention, "cudnn": cudnn_attention}


class Annotated(ShardedModel):
    """ShardedModel with gradients in the global view; parameters and their initial values are the same."""

    # An expert has room for so many times its share of a row's choices; what is beyond is dropped. GSPMD's shapes are
    # static. With as many as there are experts none is dropped.
    room: float = ROOM_OVER_EVEN

    def loss_grads_and_statistics(self, params: Any, batch: dict[str, Array], noise: Array | None = None):
        """As ShardedModel's; microbatches are every M-th row, so that each device keeps the rows that it has."""
        self.check_model()
        batch = self.in_order_of_ranks(self.checked(batch))
        count = jnp.maximum((batch["labels"] != IGNORED).sum(), 1).astype(jnp.float32)
        grad = jax.value_and_grad(partial(self.share_of_loss, count=count), has_aux=True)

        def accumulate(totals: Any, piece: dict[str, Array]):
            return self.as_stored(jax.tree.map(jnp.add, totals, grad(params, piece))), None

        cut = lambda x: x.reshape(-1, self.pipeline.microbatches, x.shape[1]).swapaxes(0, 1)  # noqa: E731
        counts = jnp.zeros((self.config.layers, self.config.experts))
        zeros = self.as_stored(((jnp.float32(0), counts), jax.tree.map(jnp.zeros_like, params)))
        ((loss, counts), grads), _ = lax.scan(accumulate, zeros, jax.tree.map(cut, batch))
        grads = jax.tree.map(lambda row, x: x if row.spec.is_trained else empty_like(x), self.plan.rows, grads)
        return {"loss": loss, "tokens": count}, grads, dict.fromkeys(self.plan.statistics, counts)

    def check_model(self) -> None:
        """Raise ConfigError for unsupported settings."""
        m, sizes, family = self.config, self.axis_sizes, self.layout.tensor_parallel
        more = m.qkv_bias, m.qk_norm, m.dropout, m.sliding_window, m.kinds, not m.rope, m.padded_vocab > m.vocab
        if m.attention != "gqa" or any(more) or self.loss_config.z_coefficient:
            raise ConfigError("the annotated model is GQA with RoPE, without biases, norms of heads, dropout, z-loss.")
        if sizes["pp"] > 1 or m.kv_heads % sizes["tp"] or family != "column_row":
            raise ConfigError("the annotated model has no pipeline, tp divides its kv_heads, its family is column_row.")
        if self.layout.context != "all_gather":
            raise ConfigError("the annotated model gathers keys over cp: layout.context is all_gather.")
        plain = m.router_score == "softmax" and m.router_normalized and m.router_scale == m.router_groups == 1
        more = m.shared_experts, m.router_shift, m.expert_bias, self.loss_config.balance_coefficient
        if len({*m.layer_kinds}) > 1 or (m.has_mixtures and (any(more) or not plain)):
            raise ConfigError(
                "layers of the annotated model are alike; a mixture's router is a normalized softmax, without shared "
                "experts, biases, balance loss."
            )

    def share_of_loss(self, params: Any, batch: dict[str, Array], *, count: Array) -> tuple[Array, Array]:
        """What one microbatch adds to the mean cross-entropy, and how many tokens each expert of each layer got."""
        rows = self.plan.rows
        ends = {name: self.gathered(params[name], rows[name]) for name in ("embedding", "head")}
        table_VD = ends["embedding"]["table"]
        x_BSD = self.cut(table_VD[batch["tokens"]], self.residual)
        rope = Rope(self.config).tables(batch["positions"])

        def layer(x_BSD: Array, weights: Any):
            return self.block(self.gathered(weights, rows["blocks"]), x_BSD, rope, batch["segments"])

        x_BSD, counts_LE = lax.scan(self.with_remat(layer), x_BSD, params["blocks"])
        x_BSD = self.norm(x_BSD, ends["head"]["norm"])
        losses_BS = self.cross_entropy(x_BSD, ends["head"].get("table", table_VD), batch["labels"])
        return losses_BS.sum() / count, counts_LE

    def with_remat(self, layer: Any) -> Any:
        """The layer with its backward pass as `pipeline.remat` says; with one stage, "stage" is as "layer" here."""
        if self.pipeline.remat == "none":
            return layer
        policy = jax.checkpoint_policies.save_only_these_names(*(saved_parts(self.pipeline.remat) or ()))
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def block(self, weights: Any, x_BSD: Array, rope: Any, segments_BS: Array) -> tuple[Array, Array]:
        attention = weights["attention"]
        y_BSD = self.cut(self.norm(x_BSD, weights["attention_norm"]), WHOLE)
        q, k, v = (jnp.einsum("BSD,DHK->BSHK", y_BSD, attention[name]["kernel"]) for name in "qkv")
        q, *kv = (self.cut(x, QUERIES) for x in (rotate(q, rope), rotate(k, rope), v))
        y_BSHK = self.attend(checkpoint_name(q, "q"), *(checkpoint_name(x, "kv") for x in kv), segments_BS)
        y_BSHK = self.cut(y_BSHK, QUERIES)
        x_BSD += self.cut(jnp.einsum("BSHK,HKD->BSD", y_BSHK, attention["out"]["kernel"]), self.residual)
        x_BSD = checkpoint_name(x_BSD, "out")
        y_BSD = self.cut(self.norm(x_BSD, weights["mlp_norm"]), WHOLE)
        y_BSD, counts_E = (self.mixture if self.config.has_mixtures else self.mlp)(weights["mlp"], y_BSD)
        return x_BSD + self.cut(y_BSD, self.residual), counts_E

    def mlp(self, weights: Any, x_BSD: Array) -> tuple[Array, Array]:
        gate, up = (self.cut(x_BSD @ weights[name]["kernel"], WIDE) for name in ("gate", "up"))
        gate, up = checkpoint_name(gate, "ffn"), checkpoint_name(up, "ffn")
        hidden = self.cut(jax.nn.silu(gate) * up, WIDE)
        return hidden @ weights["down"]["kernel"], jnp.zeros(self.config.experts)

    def mixture(self, weights: Any, x_BSD: Array) -> tuple[Array, Array]:
        """Each row of the batch sends its tokens to buffers of experts of its own, so that each device sorts and copies
        what it has; only the buffers travel."""
        (batch, seq, _), m, experts = x_BSD.shape, self.config, weights["experts"]
        capacity = min(seq, math.ceil(self.room * seq * m.experts_per_token / m.experts))
        weights_BSK, ids_BSK = self.route(weights["router"], x_BSD)
        rows = jax.vmap(partial(rows_of_experts, experts=m.experts, capacity=capacity))(ids_BSK)
        shape = batch, m.experts, capacity, -1
        by_row = self.cut(jax.vmap(dispatch)(x_BSD, rows).reshape(shape), BY_ROW)
        x_BECD = checkpoint_name(self.cut(by_row, BY_EXPERT), "dispatch")
        weights_BEC1 = jax.vmap(dispatch)(weights_BSK.reshape(batch, -1, 1), jax.vmap(Rows.of_choices)(rows))
        is_used_BEC = jnp.arange(capacity)[None, None] < rows.sizes_E[..., None]
        weights_BEC1 = jnp.where(is_used_BEC[..., None], weights_BEC1.reshape(shape), 0)
        weights_BEC1 = self.cut(self.cut(weights_BEC1, BY_ROW), BY_EXPERT)
        gate, up = (jnp.einsum("BECD,EDU->BECU", x_BECD, experts[name]) for name in ("gate", "up"))
        gate, up = checkpoint_name(gate, "experts"), checkpoint_name(up, "experts")
        hidden = (jax.nn.silu(gate) * up * weights_BEC1).astype(x_BSD.dtype)
        y_BECD = self.cut(jnp.einsum("BECU,EUD->BECD", hidden, experts["down"]), BY_EXPERT)
        y_BRD = self.cut(y_BECD, BY_ROW).reshape(batch, m.experts * capacity, -1)
        return jax.vmap(collect)(y_BRD, rows), rows.sizes_E.sum(axis=0).astype(jnp.float32)

    def route(self, weights: Any, x_BSD: Array) -> tuple[Array, Array]:
        """Weights and ids of each token's experts, [B, S, K]."""
        product = partial(jnp.einsum, "BSD,DE->BSE", precision="highest")
        scores_BSE = jax.nn.softmax(checkpoint_name(product(x_BSD.astype(jnp.float32), weights["kernel"]), "router"))
        chosen_by_BSE = lax.stop_gradient(scores_BSE + weights["bias"][None, None])
        # Sorted, since XLA gathers the scores of all rows for a top_k.
        ids_BSK = jnp.argsort(-chosen_by_BSE, axis=-1)[..., : self.config.experts_per_token]
        weights_BSK = jnp.take_along_axis(scores_BSE, ids_BSK, axis=-1)
        return weights_BSK / (weights_BSK.sum(axis=-1, keepdims=True) + LEAST_SUM), ids_BSK

    def attend(self, q_BSHK: Array, k_BTGK: Array, v_BTGK: Array, segments_BT: Array) -> Array:
        """Causal softmax attention in each document. XLA cannot shard a kernel, so each device runs it on its own
        queries and heads."""
        scale = Rope(self.config).temperature() * self.config.d_head**-0.5
        k_BTGK, v_BTGK = (in_order_of_text(self.cut(x, KEYS), *self.order) for x in (k_BTGK, v_BTGK))
        if kernel := KERNELS.get(self.config.kernel):
            run = partial(kernel, scale=scale)
            queries, keys, rows = map(self.spec, (QUERIES, KEYS, ROWS))
            run = jax.shard_map(run, mesh=self.mesh, in_specs=(queries, keys, keys, rows), out_specs=queries)
            return run(q_BSHK, k_BTGK, v_BTGK, Mask(segments_BT, order=self.layout.order))
        places_1T = jnp.arange(segments_BT.shape[1])[None]
        segments_BS, places_1S = (in_order_of_ranks(x, *self.order) for x in (segments_BT, places_1T))
        same_BST = segments_BS[:, :, None] == segments_BT[:, None, :]
        mask_B1ST = (same_BST & (places_1S[..., None] >= places_1T[:, None]))[:, None]
        out = jax.nn.dot_product_attention(q_BSHK, k_BTGK, v_BTGK, mask=mask_B1ST, scale=scale, implementation="xla")
        return checkpoint_name(out, "core")

    def norm(self, x: Array, weights: Any) -> Array:
        wide = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + self.config.norm_eps)
        return (wide * inverse * weights["scale"][None, None]).astype(x.dtype)

    def cross_entropy(self, x_BSD: Array, table_VD: Array, labels_BS: Array) -> Array:
        x_BSD = self.cut(x_BSD, WHOLE)
        logits_BSV = jnp.einsum("BSD,VD->BSV", x_BSD, table_VD, preferred_element_type=jnp.float32)
        logits_BSV = self.cut(logits_BSV, LOGITS)
        is_label_BSV = jnp.arange(logits_BSV.shape[-1])[None, None] == labels_BS[..., None]
        label_logit_BS = jnp.where(is_label_BSV, logits_BSV, 0).sum(axis=-1)
        return jnp.where(labels_BS == IGNORED, 0, jax.nn.logsumexp(logits_BSV, axis=-1) - label_logit_BS)

    # ---- how arrays are sharded

    def in_order_of_ranks(self, batch: dict[str, Array]) -> dict[str, Array]:
        """The batch with each row's tokens in the order in which context ranks hold them, as in Parallax. Segments stay
        in the order of the text: only masks read them."""
        in_order = {"segments": self.cut(batch["segments"], ROWS + " seq")}
        others = {name: batch[name] for name in ("tokens", "labels", "positions")}
        return in_order | {name: self.cut(in_order_of_ranks(x, *self.order), TOKENS) for name, x in others.items()}

    @property
    def order(self) -> tuple[int, int, str]:
        """How many context ranks hold a row, its dim of tokens, and their order."""
        return self.axis_sizes.get("cp", 1), 1, self.layout.order

    def spec(self, layout: str) -> P:
        return Layout.parse(layout).spec(self.mesh)

    def cut(self, x: Array, layout: str) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(layout)))

    def as_stored(self, losses_and_grads: Any) -> Any:
        losses, grads = losses_and_grads
        return losses, jax.tree.map(lax.with_sharding_constraint, grads, self.shardings)

    def gathered(self, weights: Any, rows: Any) -> Any:
        """Weights in the compute dtype, whole over data axes, but for experts over ep; a norm's scale and a router as
        they are. `rows` are of the plan, whose dim of layers weights of one layer lack."""

        def gather(weight: Array, row: Any) -> Array:
            if row.at_rest == row.compute:
                return weight
            whole = P(*row.compute.spec(self.mesh)[-weight.ndim :])
            return lax.with_sharding_constraint(weight.astype(self.config.dtype), NamedSharding(self.mesh, whole))

        return jax.tree.map(gather, weights, rows)


def rows_of_experts(ids_SK: Array, *, experts: int, capacity: int) -> Rows:
    """The choices of a row's tokens in buffers of experts, each of this capacity, one after the other. Choices beyond
    it have no row; rows beyond an expert's choices have an arbitrary one."""
    sorted_rows = sort_rows(ids_SK, experts, most=ids_SK.shape[1])
    first_E = jnp.cumsum(sorted_rows.sizes_E) - sorted_rows.sizes_E
    place_EC = jnp.minimum(first_E[:, None] + jnp.arange(capacity)[None], ids_SK.size - 1)
    rank_SK = sorted_rows.row_NK - first_E[ids_SK]
    row_SK = jnp.where(rank_SK < capacity, ids_SK * capacity + rank_SK, experts * capacity)
    return Rows(sorted_rows.choice_R[place_EC.reshape(-1)], row_SK, sorted_rows.sizes_E)
