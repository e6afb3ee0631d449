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
from parallax.pipeline import ShardedModel
from parallax.sharding.activations import ROWS, activation
from parallax.sharding.layers_on_ranks import Arrangement


class Activations(NamedTuple):
    """NumPy arrays of one batch, float32; of `B` windows of `S` tokens, in `L` layers with `H` heads.

    `attention` [L, B, H, S, S]: the weight of each token (last dim) for each query; a row adds up to 1, or to
        less with sinks.
    `cache`: the entries of the decoding cache, by name, [L, B, S, ...]: "latent" and "k_rope" of latent attention,
    "k" and "v" of grouped-query attention; the keys are rotated.
    Where kinds of layers differ in these shapes, both are lists with an array for each layer.
    `losses` [B, S]: -log p(label) in nats, NaN where the label is ignored.
    `logits` [B, S, vocab].
    """

    attention: np.ndarray | list[np.ndarray]
    cache: dict[str, np.ndarray | list[np.ndarray]]
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
        return sum(array.nbytes for layers in self.cache.values() for array in layers) // rows

    def __repr__(self) -> str:
        rows, _, seq, _ = self.attention[0].shape
        heads = " and ".join(map(str, sorted({weights.shape[1] for weights in self.attention})))
        cached = ", ".join(f"{name} {_shapes(layers)}" for name, layers in self.cache.items())
        model = f"{len(self.attention)} layers with {heads} heads"
        return (
            f"Inside {model}, {rows} x {seq} tokens: loss {self.loss:.4f} nats\n"
            f"  attention {_shapes(self.attention)}\n"
            f"  cache     {cached}\n"
            f"  losses    {list(self.losses.shape)}, logits {list(self.logits.shape)}"
        )


def _shapes(layers: np.ndarray | list[np.ndarray]) -> str:
    if isinstance(layers, np.ndarray):
        return str(list(layers.shape))
    return " and ".join(dict.fromkeys(str(list(array.shape)) for array in layers))


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
    parts = Parts.build(model, activation("d_model/tp"), FAMILY, FORM, 1, ROWS)

    def run(params: Any, batch: Mapping[str, Array]) -> Activations:
        rows = jnp.arange(len(batch["tokens"]))
        tables = tables_of_layers(model, batch["positions"], batch["tokens"].shape[1])
        context = Context.of_model(model, tables, rows, None, batch["segments"])
        x = parts.embedding.apply({"params": params[EMBEDDING]}, batch["tokens"], rows, None)

        shapes = _shapes_by_kind(parts, model, x, params[BLOCKS], context)

        def layer(kind: str, weights: Any, x: Array, context: Context, _: None) -> tuple[Array, dict]:
            x, seen = _seen_in(parts.blocks[kind], weights, x, context)
            return x, _as_large(seen, shapes)

        order = Arrangement((0,), model.layer_kinds)
        x, seen = parts.scan(layer, x, params[BLOCKS], context, None, order.kinds_in_places[:, 0], order.numbers[0])
        seen = _of_each_layer(seen, [shapes[kind] for kind in model.layer_kinds]) if shapes else seen
        hidden = parts.head.apply({"params": params[HEAD]}, x)
        table = params[EMBEDDING if model.tied else HEAD]["table"]
        table, form = table.astype(model.dtype), parts.head.logit_form
        logits_BSV = logits(FORM, ROWS, hidden, table, model.vocab, form)[..., : model.vocab]
        losses, _ = cross_entropy(logits_BSV.reshape(-1, model.vocab), batch["labels"].reshape(-1), FORM.table, 0.0)
        return Activations(seen["weights"], seen["cache"], losses.reshape(batch["labels"].shape), logits_BSV)

    return jax.jit(run)


def _seen_in(block: Block, weights: Any, x: Array, context: Context) -> tuple[Array, dict]:
    x, sown = block.apply({"params": weights}, x, context, mutable=[INTERMEDIATES])
    return x, sown[INTERMEDIATES]["attention"]["seen"]


def _shapes_by_kind(parts: Parts, model: ModelConfig, x: Array, blocks: Any, context: Context) -> dict[str, Any]:
    """The shapes of what is seen in a layer of each kind; empty if they are the same."""
    if len({block.shapes_of_heads for block in model.blocks.values()}) == 1:
        return {}
    context, shapes = context.of_layer(model, jnp.int32(0)), {}
    for (kind, block), stack in zip(parts.blocks.items(), parts.by_kind(blocks), strict=True):
        first = jax.tree.map(lambda weight: weight[0], stack)
        _, shapes[kind] = jax.eval_shape(partial(_seen_in, block), first, x, context.of_kind(model, kind))
    return shapes


def _as_large(seen: dict, shapes: dict[str, Any]) -> dict:
    """What is seen in a layer, with zeros behind it up to the largest shape of any kind."""

    def padded(array: Array, *of_kinds: jax.ShapeDtypeStruct) -> Array:
        largest = map(max, zip(*(like.shape for like in of_kinds), strict=True))
        return jnp.pad(array, [(0, size - here) for size, here in zip(largest, array.shape, strict=True)])

    return jax.tree.map(padded, seen, *shapes.values()) if shapes else seen


def _of_each_layer(seen: dict, shapes: list[Any]) -> dict:
    """Lists with the array of each layer, from arrays of all with zeros behind."""

    def cropped(layers: Array, *of_each: jax.ShapeDtypeStruct) -> list[Array]:
        pairs = zip(layers, of_each, strict=True)
        return [array[tuple(map(slice, like.shape))] for array, like in pairs]

    return jax.tree.map(cropped, seen, *shapes)


look_inside = capture_activations  # the name in version 0.1
