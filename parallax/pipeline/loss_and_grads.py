"""What a step computes on each device, from top to bottom: loss and gradients, and what needs the forward pass alone.

These are functions of a model, which is static, and of arrays in local view.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array

from parallax.config.sections import BLOCKS, EMBEDDING, HEAD
from parallax.model.batch import BATCH_ARRAYS
from parallax.model.products import with_largest_weights
from parallax.pipeline.embed_and_head import BatchedHead, EmbedAndHead, LossOnly, MicrobatchHead, Tokens
from parallax.pipeline.layer_passes import layer_passes
from parallax.pipeline.model_on_mesh import ModelOnMesh
from parallax.pipeline.observations import no_observations, of_all_devices
from parallax.pipeline.slots import zeros
from parallax.pipeline.stage import Layers, SaveLayers, SaveNothing, SaveObservations, SaveStageInput, gathered_layer
from parallax.pipeline.tick import Pipeline, State, empty_residuals, run_ticks
from parallax.schedules import gpipe_on
from parallax.sharding import activations
from parallax.sharding.activations import BATCH, CONTEXT_AXIS, ROWS, SHARED_ROWS, TOKENS
from parallax.sharding.collectives import all_gather, as_varying, offset, reshard, sum_over
from parallax.sharding.compiler import relays_what_is_read
from parallax.sharding.layout import Layout
from parallax.sharding.zigzag import context_ranks, own_tokens, to_order

DROPOUT = 0x44524F50  # "DROP": keeps dropout's keys apart from those of the initial values


def loss_and_grads(model: ModelOnMesh, params: Any, batch: Mapping[str, Array], noise: Array | None):
    """Metrics, gradients and statistics, see ShardedModel.loss_grads_and_statistics."""
    pipeline, state = first_state(model, params, batch, noise)
    if not pipeline.carries_residuals:
        state = state._replace(residuals=None)
    for segment in model.schedule.segments:
        if segment.kinds:  # a file may have empty ticks
            state = run_ticks(pipeline, state, segment, segment.kinds)
        if "F" in segment.kinds and model.schedule.head == "between":
            state = state._replace(ends=pipeline.ends.run_head(state.ends))
    ended = pipeline.ends.finish(state.ends)
    of_layers = model.parts.of_kinds(state.grads)
    if model.rounds_kernels:
        weights = model.parts.of_kinds(pipeline.layers.weights)
        of_layers = with_largest_weights(of_layers, weights, model.plan.scales(BLOCKS), model.model.dtype)
    return _metrics(pipeline, ended.loss), *model.plan.store(ended.grads | {BLOCKS: of_layers})


def first_state(
    model: ModelOnMesh, params: Any, batch: Mapping[str, Array], noise: Array | None
) -> tuple[Pipeline, State]:
    """What the ticks of a step read, and the state before the first one: empty slots and zero gradients."""
    tokens = microbatches(model, batch, noise, model.pipeline.microbatches)
    weight = 1 / jnp.maximum(tokens.count(), 1)
    weights = model.plan.load(jax.tree.map(as_varying, params))
    last = model.schedule.placement[-1]
    if model.schedule.head == "between":
        ends = BatchedHead(embed_and_head(model, weights, tokens, SHARED_ROWS), tokens, last, weight)
    else:
        ends = MicrobatchHead(embed_and_head(model, weights, tokens, ROWS), tokens, last, weight)
    saves = SaveStageInput() if model.pipeline.remat == "stage" else SaveLayers()
    pipeline = Pipeline(model.schedule, tokens, ends, Layers.of(model, weights[BLOCKS]), saves, model.carries_residuals)
    of_ends = ends.start(model.schedule.exit_slots)
    x = jax.eval_shape(lambda: empty_messages(pipeline, of_ends)["F"][0])
    pipeline = pipeline._replace(layers=with_passes(pipeline, x))
    residuals = empty_residuals(pipeline, x)
    grads = model.parts.by_kind(model.plan.zero_grads(BLOCKS, weights[BLOCKS]))
    return pipeline, State(empty_messages(pipeline, of_ends), residuals, grads, of_ends)


def loss_of_batch(model: ModelOnMesh, params: Any, batch: Mapping[str, Array], noise: None) -> dict[str, Array]:
    """Metrics of the forward pass, see ShardedModel.loss."""
    pipeline, state = run_forward(model, params, batch, noise, SaveNothing(), None)
    return _metrics(pipeline, state.ends.loss)


def observations(model: ModelOnMesh, params: Any, batch: Mapping[str, Array], noise: Array | None) -> Array:
    """Observations of activations, see ShardedModel.activations."""
    _, state = run_forward(model, params, batch, noise, SaveObservations(), no_observations(model.model.layers))
    return of_all_devices(state.residuals)


def run_forward(
    model: ModelOnMesh,
    params: Any,
    batch: Mapping[str, Array],
    noise: Array | None,
    saves: SaveNothing | SaveObservations,
    saved: Array | None,
) -> tuple[Pipeline, State]:
    """The forward pass of all microbatches with the loss: what its ticks read, and their last state."""
    tokens = microbatches(model, batch, noise, model.pipeline.microbatches)
    schedule = gpipe_on(model.schedule.placement, model.pipeline.microbatches)
    weights = model.plan.load(jax.tree.map(as_varying, params))
    ends = LossOnly(embed_and_head(model, weights, tokens, ROWS), tokens, schedule.placement[-1])
    pipeline = Pipeline(schedule, tokens, ends, Layers.of(model, weights[BLOCKS]), saves, carries_residuals=True)
    return pipeline, forward_ticks(pipeline, ends.start(1), saved)


def logits_of_batch(model: ModelOnMesh, params: Any, batch: Mapping[str, Array], noise: None) -> Array:
    """Logits, see ShardedModel.logits."""
    tokens, schedule = microbatches(model, batch, None, 1), gpipe_on(model.schedule.placement, 1)
    weights = model.plan.load(jax.tree.map(as_varying, params))
    ends = BatchedHead(embed_and_head(model, weights, tokens, SHARED_ROWS), tokens, schedule.placement[-1])
    pipeline = Pipeline(
        schedule, tokens, ends, Layers.of(model, weights[BLOCKS]), SaveNothing(), carries_residuals=True
    )
    outputs = ends.from_last(forward_ticks(pipeline, ends.start(1), None).ends.exits)
    if context_ranks() > 1:
        outputs = _in_order_of_text(model, outputs)
    return ends.embed_and_head.logits(outputs)


def forward_ticks(pipeline: Pipeline, of_ends: Any, saved: Array | None) -> State:
    """Run the forward passes of all ticks; `saved` is carried through them."""
    state = State(empty_messages(pipeline, of_ends), saved, [], of_ends)
    for segment in pipeline.schedule.segments:
        if "F" in segment.kinds:
            state = run_ticks(pipeline, state, segment, "F")
    return state


# ---- what ticks read


def microbatches(model: ModelOnMesh, batch: Mapping[str, Array], noise: Array | None, count: int) -> Tokens:
    """This device's tokens, in so many microbatches."""
    rows = offset(BATCH, "batch", len(batch["tokens"])) + jnp.arange(len(batch["tokens"]))
    own, segments = _in_context_order(batch)
    own["segments"] = segments
    cut = {name: rearrange(x, "(M B) S -> M B S", M=count) for name, x in own.items()}
    key = None
    if noise is not None and model.model.dropout > 0:
        root = jax.random.fold_in(jax.random.key(noise[0]), DROPOUT)
        key = as_varying(jax.random.fold_in(root, noise[1]))
    arrays = (cut[name] for name in BATCH_ARRAYS)
    return Tokens(*arrays, rows.reshape(count, -1), key)


def embed_and_head(model: ModelOnMesh, weights: Any, tokens: Tokens, rows: str) -> EmbedAndHead:
    """Embedding and head on resident weights; `rows` is the layout of the batch dim for the embedding. Ranks of the
    pipeline always share the head's rows."""
    parts = model.parts_on(SHARED_ROWS)._replace(embedding=model.parts_on(rows).embedding)
    of_ends = {part: weights[part] for part in (EMBEDDING, HEAD)}
    return EmbedAndHead(parts, model.loss_config, model.plan, of_ends, tokens.key)


def with_passes(pipeline: Pipeline, x: Any) -> Layers:
    """The layers of this rank with the passes of training, for a residual stream of this shape."""
    layers, model = pipeline.layers, pipeline.layers.model
    context = jax.eval_shape(lambda: model.context(pipeline.tokens, jnp.int32(0)))
    settings = dict(split=model.schedule.split, in_rows=relays_what_is_read(model.mesh), x=x, context=context)
    gathered = jax.eval_shape(lambda: [gathered_layer(layers, kind, 0) for kind in range(len(layers.stacks))])
    kinds = zip(layers.passes, gathered, strict=True)
    remat = model.pipeline.remat
    passes = [layer_passes(p.block, remat, weights=w, constant=p.constant, **settings) for p, w in kinds]
    return layers._replace(passes=passes)


def empty_messages(pipeline: Pipeline, of_ends: Any) -> dict[str, Array]:
    """Slots for messages between stages."""
    x = jax.eval_shape(lambda: pipeline.ends.first_stage_input(of_ends, jnp.int32(0)))
    return {kind: zeros(x, count) for kind, count in pipeline.schedule.message_slots.items()}


def _metrics(pipeline: Pipeline, loss_sum: Array) -> dict[str, Array]:
    count, ends = pipeline.tokens.count(), pipeline.ends.embed_and_head
    loss, z_loss = sum_over(loss_sum, ends.loss_axes) / jnp.maximum(count, 1)
    metrics = {"loss": loss, "tokens": count}
    return metrics | {"z_loss": z_loss} if ends.loss.z_coefficient else metrics


def _in_context_order(batch: Mapping[str, Array]) -> tuple[dict[str, Array], Array]:
    """The tokens of this context rank, in the order of parallax/sharding/zigzag.py, and the segments of whole rows.

    Communication:
        forward   all_gather of the batch's arrays over cp
        backward  nothing
    """
    if context_ranks() == 1:
        return dict(batch), batch["segments"]
    arrays = Layout.parse(f"entries {TOKENS}")
    whole = all_gather(f"{arrays} -> {arrays.without(CONTEXT_AXIS)}", jnp.stack(list(batch.values())))
    own = own_tokens(whole, axis=2)
    return dict(zip(batch, own)), dict(zip(batch, whole))["segments"]


def _in_order_of_text(model: ModelOnMesh, outputs: Array) -> Array:
    """The last layer's outputs in the order of the text."""
    residual = activations.with_rows(model.residual, SHARED_ROWS)
    # If tp shards tokens, too, they are gathered over tp during the permute.
    whole = residual.with_cut("seq", (CONTEXT_AXIS,)).with_cut("d_model", ("tp",))
    outputs = to_order(reshard(f"{residual} -> {whole}", outputs), axis=1)
    return reshard(f"{whole} -> {residual}", outputs)
