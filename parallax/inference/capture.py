"""Activations of a model: attention maps, the key-value cache, logits, and the loss of each token.

It runs the model's own layers, without a mesh.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from parallax.config.sections import BLOCKS, EMBEDDING, HEAD, ModelConfig
from parallax.inference.decode import FAMILY, FORM
from parallax.model.attention import INTERMEDIATES
from parallax.model.batch import IGNORED, checked
from parallax.model.context import Context, tables_of_layers
from parallax.model.embedding import logits
from parallax.model.loss import cross_entropy
from parallax.model.transformer import Block, Parts
from parallax.pipeline import Arrangement, ShardedModel
from parallax.sharding.activations import ROWS, activation


class Activations(NamedTuple):
    """NumPy arrays of one batch, float32; of `B` windows of `S` tokens, in `L` layers with `H` heads.

    `attention` [L, B, H, S, S]: the weight of each token (last dim) for each query; a row adds up to 1, or to
        less with sinks.
    `cache`: the entries of the decoding cache, by name, [L, B, S, ...]: "latent" and "k_rope" of latent attention,
    "k" and "v" of grouped-query attention; the keys are rotated.
    `losses` [B, S]: -log p(label) in nats, NaN where the label is ignored.
    `logits` [B, S, vocab].
    """

    attention: np.ndarray
    cache: dict[str, np.ndarray]
    losses: np.ndarray
    logits: np.ndarray

    @property
    def loss(self) -> float:
        """The mean of the losses of labels that are not ignored, in nats; equals `ShardedModel.loss` for this batch."""
        return float(np.nanmean(self.losses))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache per token, in all layers, in float32."""
        rows = self.losses.size
        return sum(array.nbytes for array in self.cache.values()) // rows

    def __repr__(self) -> str:
        layers, rows, heads, seq, _ = self.attention.shape
        cached = ", ".join(f"{name} {list(array.shape)}" for name, array in self.cache.items())
        return (
            f"Inside {layers} layers with {heads} heads, {rows} x {seq} tokens: loss {self.loss:.4f} nats\n"
            f"  attention {list(self.attention.shape)}\n"
            f"  cache     {cached}\n"
            f"  losses    {list(self.losses.shape)}, logits {list(self.logits.shape)}"
        )


def capture_activations(model: ShardedModel | ModelConfig, params: Any, batch: Mapping[str, Any]) -> Activations:
    """Run a batch forward on one device and return its activations.

    Args:
        params: those of `model.init` or of a checkpoint, from any mesh; they must fit one device.
        batch: int32 arrays [B, S]: tokens, labels, segments, positions; see `as_batch`. Attention takes
            layers * B * heads * S * S * 4 bytes.
    Raises:
        DataError: the batch is not as parallax.model.batch says.
    """
    config = model if isinstance(model, ModelConfig) else model.config
    config = dataclasses.replace(config, kernel="xla")  # other kernels never store the attention weights
    params, batch = jax.device_get((params, checked(batch, config.vocab)))
    seen = jax.device_get(_run(config)(params, batch))
    losses = np.where(batch["labels"] == IGNORED, np.nan, seen.losses).astype(np.float32)
    return Activations(
        seen.attention, jax.tree.map(partial(np.asarray, dtype=np.float32), seen.cache), losses, seen.logits
    )


def _run(model: ModelConfig):
    parts = Parts.build(model, activation("d_model/tp"), FAMILY, FORM, model.kv(1), ROWS)

    def run(params: Any, batch: Mapping[str, Array]) -> Activations:
        rows = jnp.arange(len(batch["tokens"]))
        tables = tables_of_layers(model, batch["positions"], batch["tokens"].shape[1])
        context = Context.of_model(model, tables, rows, None, batch["segments"])
        x = parts.embedding.apply({"params": params[EMBEDDING]}, batch["tokens"], rows, None)

        def layer(block: Block, weights: Any, x: Array, context: Context, _: None) -> tuple[Array, dict]:
            x, sown = block.apply({"params": weights}, x, context, mutable=[INTERMEDIATES])
            return x, sown[INTERMEDIATES]["attention"]["seen"]

        order = Arrangement((0,), model.layer_kinds)
        x, seen = parts.scan(layer, x, params[BLOCKS], context, None, order.kinds_in_places[:, 0], order.numbers[0])
        hidden = parts.head.apply({"params": params[HEAD]}, x)
        table = params[EMBEDDING if model.tied else HEAD]["table"]
        table, form = table.astype(model.dtype), parts.head.logit_form
        logits_BSV = logits(FORM, ROWS, hidden, table, model.vocab, form)[..., : model.vocab]
        losses, _ = cross_entropy(logits_BSV.reshape(-1, model.vocab), batch["labels"].reshape(-1), FORM.table, 0.0)
        return Activations(seen["weights"], seen["cache"], losses.reshape(batch["labels"].shape), logits_BSV)

    return jax.jit(run)


look_inside = capture_activations  # the name in version 0.1
