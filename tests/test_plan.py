"""What is computed before a run is what the run then holds."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest
from run_examples import tiny_config

from parallax.layers.context import training_context
from parallax.loop import settings_of
from parallax.mesh import MeshConfig, make_mesh
from parallax.model import Parts
from parallax.optimizer import make_optimizer
from parallax.pipeline import Stage
from parallax.plan import (
    activation_bytes,
    flops_per_token,
    layer_residuals,
    memory,
    parameters_by_component,
    recomputed_bytes,
)
from parallax.sharded_model import ShardedModel
from parallax.step import abstract_state, init_state


def build(pp=2, dp=2, tp=2, **changes):
    settings = settings_of(
        tiny_config(pathlib.Path("unused"), **{"model.vocab": 384, "pipeline.microbatches": 2, **changes})
    )
    mesh = make_mesh(MeshConfig(pp=pp, dp=dp, tp=tp, simulate=0), jax.devices()[: pp * dp * tp])
    model = ShardedModel(settings.model, settings.layout, settings.pipeline, settings.loss, mesh)
    return settings, model, make_optimizer(settings.optimizer, settings.train.steps, model.layouts)


def held(tree):
    """Bytes of a tree's pieces on the first device."""
    device = jax.devices()[0]
    shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.parametrize("attention", ["mla", "gqa"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_planned_bytes_are_those_that_a_device_holds(attention, optimizer):
    _, model, tx = build(**{"model.attention": attention, "optimizer.name": optimizer})
    plan = memory(model, abstract_state(model, tx).opt_state, global_batch=8, seq=32)
    state = init_state(model, tx, 0)
    assert plan.parameters == held(state.params) and plan.optimizer == held(state.opt_state)


def test_weights_gathered_once_a_step_and_their_gradients_are_whole():
    plans = {}
    for gather in ("microbatch", "step"):
        _, model, tx = build(1, 8, 1, **{"pipeline.gather": gather})
        plans[gather] = memory(model, abstract_state(model, tx).opt_state, global_batch=16, seq=32)
    blocks = sum(parameters_by_component(model.shapes)[name] for name in ("attention", "mlp"))
    assert plans["step"].gathered_weights == 2 * plans["microbatch"].gathered_weights >= 4 * blocks
    assert plans["step"].gradients > 4 * plans["microbatch"].gradients


def residuals_of_one_layer(settings, model):
    """Bytes that the executor keeps of one layer when nothing is recomputed, on one device."""
    m, parts = settings.model, Parts
    family, form = model.layout.family.gathered(), model.layout.form.without_fsdp()
    block = parts.build(m, model.layout.residual, family, form, "kv_heads/tp", "batch/dp").block
    layer = lambda weights, x, context: block.apply({"params": weights}, x, context)  # noqa: E731
    same = lambda weights: weights  # noqa: E731
    ids = jnp.zeros((1, settings.data.seq), jnp.int32)
    context = training_context(m.rope, ids, ids, ids[0, :1], None)
    x = jax.ShapeDtypeStruct((1, settings.data.seq, m.d_model), m.dtype)
    forward = functools.partial(Stage(layer, same, same, "none").forward, context=context)
    weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), m.dtype), model.shapes["blocks"])
    _, kept = jax.eval_shape(forward, weights, x)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


@pytest.mark.parametrize("attention", ["mla", "gqa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_formula_of_a_layers_residuals_is_near_what_is_kept(attention, dtype):
    sizes = {"d_model": 256, "d_ff": 704, "heads": 8, "kv_heads": 8, "d_head": 32, "dropout": 0.0}
    changes = {f"model.{key}": value for key, value in (sizes | {"attention": attention, "dtype": dtype}).items()}
    settings, model, _ = build(1, 1, 1, **{**changes, "data.seq": 256})
    kept = residuals_of_one_layer(settings, model) / settings.data.seq
    assert layer_residuals(settings.model, seq=256, tp=1) == pytest.approx(kept, rel=0.03)


class Carried(Exception):
    """Bytes of activations that the executor carries from tick to tick."""


@pytest.mark.parametrize("remat", ["stage", "layer"])
@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 2), (4, 2, 1)], ids=str)
def test_saved_activations_are_those_that_the_executor_carries(mesh, remat, monkeypatch):
    def start(self, ends_state):
        state = self._start(ends_state)
        ends = state.ends._replace(loss=None, grads=None)
        carried = (state.arrived_forward, state.arrived_backward, state.kept, ends)
        raise Carried(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(carried)))

    monkeypatch.setattr("parallax.pipeline.Executor.run", start)
    _, model, _ = build(*mesh, **{"model.layers": 4, "pipeline.remat": remat, "pipeline.microbatches": 4})
    batch = dict.fromkeys(("tokens", "labels", "segments", "positions"), jax.ShapeDtypeStruct((16, 32), jnp.int32))
    with pytest.raises(Carried) as carried:
        jax.eval_shape(model.loss_and_grad, model.shapes, batch)
    assert activation_bytes(model, global_batch=16, seq=32) == carried.value.args[0]


def test_recomputing_costs_a_layer_or_a_stage_for_as_long_as_it_lasts():
    plans = {}
    for remat in ("none", "layer", "stage"):
        _, model, _ = build(1, 2, 2, **{"pipeline.remat": remat})
        plans[remat] = recomputed_bytes(model, global_batch=8, seq=32)
    one_layer = 8 * 32 // (2 * 2) * layer_residuals(model.model, seq=32, tp=2)
    assert plans == {"none": 0, "layer": one_layer, "stage": 2 * one_layer}


def test_an_untied_head_costs_parameters_but_no_flops():
    tied, untied = (build(1, 1, 1, **{"model.tied": tied})[1] for tied in (True, False))
    flops = [flops_per_token(model.model, model.shapes, seq=32) for model in (tied, untied)]
    counts = [sum(parameters_by_component(model.shapes).values()) for model in (tied, untied)]
    assert flops[0] == flops[1] and counts[1] - counts[0] == 384 * 32
    longer = dataclasses.replace(tied.model, layers=4)
    assert flops_per_token(longer, tied.shapes, seq=32) > flops[0]
