"""The model of a config in plain jnp: annotations say how arrays are sharded, and XLA adds the collectives (GSPMD).

Parameters, batch and residual stream are sharded as in Parallax. A layer casts its weights and annotates them as not
sharded over dp, which is FSDP: XLA gathers them and, in the backward pass, sums their gradients. The attention kernel
and the rotation of queries and keys are those of Parallax.
"""

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
from parallax.model.kernels.cudnn import cudnn_attention
from parallax.model.kernels.splash import splash_attention
from parallax.model.mask import Mask
from parallax.model.rope import Rope, rotate
from parallax.pipeline import ShardedModel
from parallax.sharding.layout import Layout

HEADS, LOGITS = P("dp", None, "tp", None), P("dp", None, "tp")
KERNELS = {"splash": splash_attention, "cudnn": cudnn_attention}


class Annotated(ShardedModel):
    """ShardedModel with gradients in the global view; parameters and their initial values are the same."""

    def loss_grads_and_statistics(self, params: Any, batch: dict[str, Array], noise: Array | None = None):
        """As ShardedModel's; microbatches are every M-th row, so that each device keeps the rows that it has."""
        self.check_model()
        batch = self.checked(batch)
        count = jnp.maximum((batch["labels"] != IGNORED).sum(), 1).astype(jnp.float32)
        grad = jax.value_and_grad(partial(self.share_of_loss, count=count))

        def accumulate(totals: Any, piece: dict[str, Array]):
            return self.as_stored(jax.tree.map(jnp.add, totals, grad(params, piece))), None

        cut = lambda x: x.reshape(-1, self.pipeline.microbatches, x.shape[1]).swapaxes(0, 1)  # noqa: E731
        zeros = self.as_stored((jnp.float32(0), jax.tree.map(jnp.zeros_like, params)))
        (loss, grads), _ = lax.scan(accumulate, zeros, jax.tree.map(cut, batch))
        return {"loss": loss, "tokens": count}, grads, {}

    def check_model(self) -> None:
        """Raise ConfigError for unsupported settings."""
        m, sizes, family = self.config, self.axis_sizes, self.layout.tensor_parallel
        more = m.qkv_bias, m.qk_norm, m.dropout, m.sliding_window, m.kinds, not m.rope, m.padded_vocab > m.vocab
        if m.attention != "gqa" or any(more) or self.loss_config.z_coefficient:
            raise ConfigError("the annotated model is GQA with RoPE, without biases, norms of heads, dropout, z-loss.")
        if sizes["pp"] > 1 or m.kv_heads % sizes["tp"] or family != "column_row":
            raise ConfigError("the annotated model has no pipeline, tp divides its kv_heads, its family is column_row.")

    def share_of_loss(self, params: Any, batch: dict[str, Array], *, count: Array) -> Array:
        """What one microbatch adds to the mean cross-entropy."""
        ends = {name: self.gathered(params[name], self.shardings[name]) for name in ("embedding", "head")}
        table_VD = ends["embedding"]["table"]
        x_BSD = self.cut(table_VD[batch["tokens"]], self.stream)
        rope = Rope(self.config).tables(batch["positions"])
        one = jax.tree.map(lambda stored: NamedSharding(self.mesh, P(*stored.spec[1:])), self.shardings["blocks"])

        def layer(x_BSD: Array, weights: Any):
            return self.block(self.gathered(weights, one), x_BSD, rope, batch["segments"]), None

        x_BSD, _ = lax.scan(self.with_remat(layer), x_BSD, params["blocks"])
        x_BSD = self.norm(x_BSD, ends["head"]["norm"])
        return self.cross_entropy(x_BSD, ends["head"].get("table", table_VD), batch["labels"]).sum() / count

    def with_remat(self, layer: Any) -> Any:
        """The layer with its backward pass as `pipeline.remat` says; with one stage, "stage" is as "layer" here."""
        if self.pipeline.remat == "none":
            return layer
        policy = jax.checkpoint_policies.save_only_these_names(*(saved_parts(self.pipeline.remat) or ()))
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def block(self, weights: Any, x_BSD: Array, rope: Any, segments_BS: Array) -> Array:
        attention, mlp = weights["attention"], weights["mlp"]
        y_BSD = self.whole(self.norm(x_BSD, weights["attention_norm"]))
        q, k, v = (jnp.einsum("BSD,DHK->BSHK", y_BSD, attention[name]["kernel"]) for name in "qkv")
        heads = (checkpoint_name(x, "qkv") for x in (rotate(q, rope), rotate(k, rope), v))
        y_BSHK = self.attend(*heads, segments_BS)
        x_BSD += self.cut(jnp.einsum("BSHK,HKD->BSD", y_BSHK, attention["out"]["kernel"]), self.stream)
        x_BSD = checkpoint_name(x_BSD, "out")
        y_BSD = self.whole(self.norm(x_BSD, weights["mlp_norm"]))
        gate, up = (checkpoint_name(y_BSD @ mlp[name]["kernel"], "ffn") for name in ("gate", "up"))
        return x_BSD + self.cut((jax.nn.silu(gate) * up) @ mlp["down"]["kernel"], self.stream)

    def attend(self, q_BSHK: Array, k_BTGK: Array, v_BTGK: Array, segments_BS: Array) -> Array:
        """Causal softmax attention in each document. XLA cannot shard a kernel, so each device runs it on its own
        heads."""
        scale = Rope(self.config).temperature() * self.config.d_head**-0.5
        if kernel := KERNELS.get(self.config.kernel):
            run = partial(kernel, scale=scale)
            run = jax.shard_map(run, mesh=self.mesh, in_specs=(HEADS, HEADS, HEADS, P("dp")), out_specs=HEADS)
            return run(q_BSHK, k_BTGK, v_BTGK, Mask(segments_BS))
        same_BST = segments_BS[:, :, None] == segments_BS[:, None, :]
        mask_B1ST = (same_BST & jnp.tri(same_BST.shape[1], dtype=bool)[None])[:, None]
        out = jax.nn.dot_product_attention(q_BSHK, k_BTGK, v_BTGK, mask=mask_B1ST, scale=scale, implementation="xla")
        return checkpoint_name(out, "core")

    def norm(self, x: Array, weights: Any) -> Array:
        wide = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + self.config.norm_eps)
        return (wide * inverse * weights["scale"][None, None]).astype(x.dtype)

    def cross_entropy(self, x_BSD: Array, table_VD: Array, labels_BS: Array) -> Array:
        x_BSD = self.whole(x_BSD)
        logits_BSV = jnp.einsum("BSD,VD->BSV", x_BSD, table_VD, preferred_element_type=jnp.float32)
        logits_BSV = self.cut(logits_BSV, LOGITS)
        is_label_BSV = jnp.arange(logits_BSV.shape[-1])[None, None] == labels_BS[..., None]
        label_logit_BS = jnp.where(is_label_BSV, logits_BSV, 0).sum(axis=-1)
        return jnp.where(labels_BS == IGNORED, 0, jax.nn.logsumexp(logits_BSV, axis=-1) - label_logit_BS)

    # ---- how arrays are sharded

    @property
    def stream(self) -> P:
        return Layout.parse(self.layout.residual).spec()

    def cut(self, x: Array, spec: P) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def whole(self, x_BSD: Array) -> Array:
        """Gathered over tp, as read by products with sharded columns."""
        return self.cut(x_BSD, P("dp"))

    def as_stored(self, loss_and_grads: Any) -> Any:
        loss, grads = loss_and_grads
        return loss, jax.tree.map(lax.with_sharding_constraint, grads, self.shardings)

    def gathered(self, weights: Any, stored: Any) -> Any:
        return jax.tree.map(partial(gather, self.config.dtype), weights, stored)


def gather(dtype: str, weight: Array, stored: NamedSharding) -> Array:
    """A weight in the compute dtype, whole over dp; a norm's scale as it is."""
    whole = P(*(tuple(axis for axis in axes if axis != "dp") for axes in map(axes_of, stored.spec)))
    if whole == P(*map(axes_of, stored.spec)):
        return weight
    return lax.with_sharding_constraint(weight.astype(dtype), stored.update(spec=whole))


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes over which a spec's entry shards a dim; the rows of tables have several."""
    return (entry,) if isinstance(entry, str) else entry or ()
