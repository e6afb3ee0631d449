"""What a step computes on each device, from top to bottom: loss and gradients, and what needs the forward pass alone.

These are functions of a model, which is static, and of arrays in local view.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from parallax.config.sections import EMBEDDING, FIXED, HEAD
from parallax.model.context import Context
from parallax.pipeline.embed_and_head import BatchedHead, LossOnly, MicrobatchHead, Tokens
from parallax.pipeline.layer_passes import InRows, LayerPasses, SaveAll, layer_passes
from parallax.pipeline.layer_weights import LayerWeights, RoundedWeights
from parallax.pipeline.model_on_mesh import ModelOnMesh
from parallax.pipeline.observations import of_all_devices
from parallax.pipeline.stage import Layers, SaveLayers, SaveNothing, SaveObservations, SaveStageInput
from parallax.pipeline.tick import Pipeline, State, tables_of, tick
from parallax.schedules import gpipe_on
from parallax.sharding import activations
from parallax.sharding.activations import CONTEXT_AXIS, ROWS, SHARED_ROWS
from parallax.sharding.collectives import as_varying, reshard, sum_over
from parallax.sharding.compiler import (
    keeps_stream_in_rows,
    relays_what_is_read,
    saves_means_of_norms,
    writes_slots_of_one_dtype,
)
from parallax.sharding.rounding import rounding_key
from parallax.sharding.slots import zeros
from parallax.sharding.zigzag import context_ranks, to_order

# Metrics by group: sums [2, groups] of both losses of a token, and [groups] numbers of labels.
GROUP_LOSSES, GROUP_TOKENS = "group_losses", "group_tokens"


def loss_and_grads(
    model: ModelOnMesh, params: Any, batch: Mapping[str, Array], noise: Array | None, *, groups: int = 0
):
    """Metrics, gradients and statistics, see ShardedModel.loss_grads_and_statistics."""
    pipeline = pipeline_of(model, params, batch, noise, "train", groups)
    state = first_state(pipeline)
    if not pipeline.carries_residuals:
        state = state._replace(saved=None)
    for segment in model.schedule.segments:
        if segment.kinds:  # a file may have empty ticks
            tables = tables_of(model.schedule, segment)
            state, _ = lax.scan(partial(tick, pipeline, tables, segment.kinds), state, tables)
        if "F" in segment.kinds and model.schedule.head == "between":
            state = state._replace(ends=pipeline.ends.run_head(state.ends))
    ended, of_layers = pipeline.ends.finish(state.ends), dict(zip(model.orders, state.grads, strict=True))
    if model.rounds_kernels:
        of_layers = {weights.stack: weights.completed(of_layers[weights.stack]) for weights in pipeline.layers.weights}
    return _metrics(pipeline, ended.loss), *model.plan.store(ended.grads | of_layers)


def loss_of_batch(
    model: ModelOnMesh, params: Any, batch: Mapping[str, Array], noise: None, *, groups: int = 0
) -> dict[str, Array]:
    """Metrics of the forward pass, see ShardedModel.loss."""
    pipeline = pipeline_of(model, params, batch, noise, "loss", groups)
    return _metrics(pipeline, run_forward(pipeline).ends.loss)


def observations(model: ModelOnMesh, params: Any, batch: Mapping[str, Array], noise: Array | None) -> Array:
    """Observations of activations, see ShardedModel.activations."""
    return of_all_devices(run_forward(pipeline_of(model, params, batch, noise, "observe")).saved)


def logits_of_batch(model: ModelOnMesh, params: Any, batch: Mapping[str, Array], noise: None) -> Array:
    """Logits, see ShardedModel.logits."""
    pipeline = pipeline_of(model, params, batch, noise, "logits")
    outputs = pipeline.ends.from_last(run_forward(pipeline).ends.exits)
    if context_ranks() > 1:
        outputs = _in_order_of_text(model, outputs)
    return pipeline.ends.logits(outputs)


def run_forward(pipeline: Pipeline) -> State:
    """The state after the forward passes of all microbatches."""
    state = first_state(pipeline)
    for segment in pipeline.schedule.segments:
        if "F" in segment.kinds:
            tables = tables_of(pipeline.schedule, segment)
            state, _ = lax.scan(partial(tick, pipeline, tables, "F"), state, tables)
    return state


# ---- what ticks read, and the state before them


def pipeline_of(
    model: ModelOnMesh, params: Any, batch: Mapping[str, Array], noise: Array | None, use: str, groups: int = 0
) -> Pipeline:
    """What ticks read to "train", or in a forward pass alone for "loss", "logits" or to "observe"; losses are also
    summed by so many groups. For "parts" it is that of training without the passes of layers."""
    trains, schedule = use in ("train", "parts"), model.schedule
    if not trains:
        schedule = gpipe_on(schedule.placement, 1 if use == "logits" else schedule.microbatches)
    form = dict(order=model.layout.order, drops=model.config.drops, shared=trains and model.plan.rounds_grads)
    tokens = Tokens.of(batch, noise, schedule.microbatches, **form)
    weight = 1 / jnp.maximum(tokens.count(), 1) if trains else None
    # As varying: else the vjp of each use would sum its gradient over the ranks, where the plan sums it once.
    weights = model.plan.load(jax.tree.map(as_varying, params))
    batched = model.schedule.head == "between" if trains else use == "logits"
    parts = model.parts.on_rows(embedding=SHARED_ROWS if batched else ROWS, head=SHARED_ROWS)
    ends_form = BatchedHead if batched else MicrobatchHead if trains else LossOnly
    ends = ends_form(
        parts,
        model.loss_config,
        model.plan,
        weights={part: weights[part] for part in (EMBEDDING, HEAD)},
        tokens=tokens,
        last=schedule.placement[-1],
        weight=weight,
        groups=groups,
    )
    kernels = RoundedWeights if model.rounds_kernels else LayerWeights
    layers = Layers(
        model,
        passes=[SaveAll(block, None, (), None, {}) for block in parts.blocks.values()],
        numbers=[order.own_layers() for order in model.orders.values()],
        kinds=model.arrangement.own_kinds() if len(model.orders) > 1 else None,
        weights=kernels.of_step(model, [weights[stack] for stack in model.orders], trains=trains),
        changes_in_loops=trains and model.changes_in_loops,
    )
    if not trains:
        saves = SaveObservations() if use == "observe" else SaveNothing()
        return Pipeline(schedule, ends, layers, saves, carries_residuals=True)
    saves = SaveStageInput() if model.pipeline.remat == "stage" else SaveLayers()
    if model.plan.rounds_grads:
        rounding = as_varying(rounding_key(jnp.zeros(2, jnp.int32) if noise is None else noise))
        layers = layers._replace(rounding=rounding)
    if use == "train":
        layers = layers._replace(passes=passes_of_training(layers, ends))
    return Pipeline(schedule, ends, layers, saves, model.carries_residuals)


def first_state(pipeline: Pipeline) -> State:
    """The state before the first tick: empty slots and zero gradients."""
    schedule, layers, saves = pipeline.schedule, pipeline.layers, pipeline.saves
    of_ends = pipeline.ends.start(schedule.exit_slots)
    x = jax.eval_shape(lambda: zeros(pipeline.ends.first_stage_input(of_ends, jnp.int32(0))))
    saved, grads = saves.empty(layers, x, schedule.slots), saves.zero_grads(layers)
    messages = {kind: zeros(x, count) for kind, count in schedule.message_slots.items()}
    return State(messages, saved, grads, of_ends, zeros(x) if schedule.late_gradients else None)


def passes_of_training(layers: Layers, ends: MicrobatchHead | BatchedHead) -> list[LayerPasses]:
    """The passes of each kind of layers."""
    model = layers.model
    read, stream = relays_what_is_read(model.mesh), keeps_stream_in_rows(model.mesh)
    settings = dict(remat=model.pipeline.remat, split=model.schedule.split, norms_apart=model.norms_apart)
    in_bytes = writes_slots_of_one_dtype(model.mesh) and model.config.matmul_scales == FIXED
    settings |= dict(norm_means=saves_means_of_norms(model.mesh), in_bytes=in_bytes)
    shapes = [jax.tree.flatten(arguments) for arguments in arguments_of_layers(layers, ends)]

    def carried_in_rows(stack: str) -> bool:
        # Where a tick allocates slots, XLA lays them out for the products that read the input, and copies nothing.
        # Where it carries them, all slots are copied that are read in another layout than the one they lie in. With
        # parts beside the input that is so in stages of one layer; in a loop over layers only the entry is copied,
        # and the products take longer with a given layout: 1102 in place of 1042 ms of compute in llama_1b_16 on v5e.
        of_one_layer = model.orders[stack].stage_layers == 1
        return read and model.carries_residuals and (model.pipeline.remat == "layer" or of_one_layer)

    return [
        _passes_of_shapes(
            passes.block,
            structure,
            *leaves,
            stack=stack,
            plan=model.plan,
            in_rows=InRows(read, carried_in_rows(stack), stream),
            **settings,
        )
        for passes, stack, (leaves, structure) in zip(layers.passes, model.orders, shapes, strict=True)
    ]


@lru_cache(maxsize=16)  # a model is traced for its step, and before that for its memory
def _passes_of_shapes(block: nn.Module, structure: Any, *leaves: Any, **settings: Any) -> LayerPasses:
    """The passes of a layer for arguments of these shapes."""
    weights, x, context = jax.tree.unflatten(structure, leaves)
    return layer_passes(block, weights=weights, x=x, context=context, **settings)


def arguments_of_layers(layers: Layers, ends: MicrobatchHead | BatchedHead) -> list[tuple[Any, Any, Context]]:
    """Shapes of what a layer of each kind reads: its gathered weights, its input and the context."""
    model = layers.model
    x = jax.eval_shape(lambda: zeros(ends.first_stage_input(ends.start(model.schedule.exit_slots), jnp.int32(0))))

    def context_of(kind: str) -> Context:
        context = model.context(ends.tokens, jnp.int32(0)).of_layer(model.config, jnp.int32(0))
        return context.of_kind(model.config, kind)

    contexts = [jax.eval_shape(partial(context_of, kind)) for kind in model.parts.blocks]
    gathered = jax.eval_shape(lambda: [weights.gathered(0) for weights in layers.weights])
    return [(weights, x, context) for weights, context in zip(gathered, contexts, strict=True)]


def _metrics(pipeline: Pipeline, loss_sum: Array) -> dict[str, Array]:
    count, ends = pipeline.ends.tokens.count(), pipeline.ends
    sums = sum_over(loss_sum, ends.loss_axes)
    loss, z_loss = (sums[:, 0] if ends.groups else sums) / jnp.maximum(count, 1)
    metrics = {"loss": loss, "tokens": count}
    if ends.groups:
        metrics |= {GROUP_LOSSES: sums[:, 1:], GROUP_TOKENS: ends.tokens.counts(ends.groups)}
    return metrics | {"z_loss": z_loss} if ends.loss.z_coefficient else metrics


def _in_order_of_text(model: ModelOnMesh, outputs: Array) -> Array:
    """The last layer's outputs in the order of the text."""
    residual = activations.with_rows(model.residual, SHARED_ROWS)
    # If tp shards tokens, too, they are gathered over tp during the permute.
    whole = residual.with_cut("seq", (CONTEXT_AXIS,)).with_cut("d_model", ("tp",))
    outputs = to_order(reshard(f"{residual} -> {whole}", outputs), 1, model.layout.order)
    return reshard(f"{whole} -> {residual}", outputs)
