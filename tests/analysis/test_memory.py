"""What is computed before a run is what the run then holds."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from support.run_examples import tiny_config
from support.traced_equations import equations

from parallax.analysis.traced.flops import flops_per_token, parameters_by_component
from parallax.analysis.traced.memory import memory, memory_of_run
from parallax.analysis.traced.trace import abstract_mesh
from parallax.config.sections import MeshConfig
from parallax.config.settings import read_settings
from parallax.jaxprs import called, loop
from parallax.pipeline import model_on_mesh, sharded_model
from parallax.sharding.mesh import make_mesh
from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainStep, abstract_state, init_state, model_of


def build(pp=2, dp=2, tp=2, **changes):
    settings = read_settings(
        tiny_config(pathlib.Path("unused"), **{"model.vocab": 384, "pipeline.microbatches": 2, **changes})
    )
    mesh = make_mesh(MeshConfig(pp=pp, dp=dp, tp=tp, simulate=0), jax.devices()[: pp * dp * tp])
    model = model_of(settings, mesh)
    return settings, model, make_optimizer(settings.optimizer, settings.train.steps, model.plan.rows)


def held(tree):
    """Bytes of a tree's pieces on the first device."""
    device = jax.devices()[0]
    shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.fast(1)
@pytest.mark.parametrize("attention", ["mla", "gqa"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "dtypes", [(), ("bfloat16", "bfloat16", "bfloat16"), ("float8", "float8", "bfloat16")], ids=str
)
def test_planned_bytes_are_those_that_a_device_holds(attention, optimizer, dtypes):
    keys = ("optimizer.m_dtype", "optimizer.v_dtype", "optimizer.weights_dtype")
    changes = dict(zip(keys, dtypes)) | ({"model.d_model": 64} if dtypes else {})
    _, model, tx = build(**{"model.attention": attention, "optimizer.name": optimizer} | changes)
    plan = memory(model, abstract_state(model, tx).opt_state, global_batch=8, seq=32)
    state = init_state(model, tx, 0)
    assert plan.parameters == held(state.params) and plan.optimizer == held(state.opt_state)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer.name": "muon"},
        {"model.matmul": "int8"},
        {"optimizer.masters_on": "host", "model.dtype": "bfloat16"},
    ],
    ids=str,
)
def test_a_run_predicts_the_memory_of_its_model_from_the_step_that_it_runs(changes, monkeypatch):
    """Without dropout, which only the step has."""
    _, model, tx = build(**changes, **{"model.dropout": 0.0})
    step, batches = TrainStep(model, tx, 0), dict(global_batch=8, seq=32)
    predicted = memory_of_run(step, **batches)
    assert predicted == memory(model, abstract_state(model, tx).opt_state, **batches)
    if not model.plan.uses_host:
        monkeypatch.setattr(sharded_model, "loss_and_grads", lambda *args, **named: pytest.fail("traced again"))
        step.lower(**batches)


@pytest.mark.slow
def test_weights_gathered_once_a_step_and_their_gradients_are_whole():
    plans = {}
    for policy in ("zero3", "zero1"):
        _, model, tx = build(1, 8, 1, **{"data_parallel.policy": policy})
        plans[policy] = memory(model, abstract_state(model, tx).opt_state, global_batch=16, seq=32)
    parts = parameters_by_component(model.plan.declared)
    layers = parts["attention"] + parts["mlp"] + parts["norms"] - model.config.d_model
    other_layers = 4 * layers * (model.config.layers - 1) // model.config.layers
    assert plans["zero1"].gathered_weights == 4 * (sum(parts.values()) - parts["norms"])  # those are not cut over dp
    assert plans["zero1"].gradients >= 4 * sum(parts.values())
    assert plans["zero1"].gathered_weights - plans["zero3"].gathered_weights >= other_layers


@pytest.mark.fast(2)
@pytest.mark.parametrize("remat", ["stage", "layer"])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "interleaved"])
@pytest.mark.parametrize("mesh", [(2, 2, 2), pytest.param((4, 2, 1), marks=pytest.mark.slow)], ids=str)
def test_saved_activations_are_slots_and_messages_as_wide_as_a_layers_input(mesh, schedule, remat):
    virtual = 2 if schedule == "interleaved" else 1
    pipeline = {"pipeline.remat": remat, "pipeline.microbatches": 4, "pipeline.schedule": schedule}
    _, model, tx = build(*mesh, **{"model.layers": 8, "pipeline.virtual": virtual, **pipeline})
    plan = memory(model, abstract_state(model, tx).opt_state, global_batch=16, seq=32)
    s, tokens = model.schedule, 16 * 32 // (4 * mesh[1])
    of_a_slot = 1 if remat == "stage" else 8 // s.stages
    ends = 2 * s.microbatches if s.head == "between" else s.exit_slots
    an_input = tokens * 4 * model.config.d_model // mesh[2]
    assert plan.saved_activations == an_input * of_a_slot * s.slots["F to B"]
    unsent = s.head == "inside"  # a gradient waits for the next tick, beside whose F it is sent
    buffers = an_input * (sum(s.message_slots.values()) + ends + unsent)
    # GPipe's are not all there at once: messages of one direction are gone when those of the other travel.
    assert plan.pipeline_buffers == buffers or (s.head == "between" and plan.pipeline_buffers < buffers)


@pytest.mark.parametrize("remat", ["stage", "layer"])
def test_one_stage_that_carries_its_slots_saves_inputs_and_has_no_messages(remat):
    _, model, tx = build(1, 2, 1, **{"model.layers": 4, "pipeline.remat": remat, "pipeline.microbatches": 4})
    plan = memory(model, abstract_state(model, tx).opt_state, global_batch=16, seq=32)
    assert model.carries_residuals and plan.saved_activations and not model.schedule.arrival
    an_input = 16 * 32 // (4 * 2) * 4 * model.config.d_model
    assert plan.saved_activations == an_input * (1 if remat == "stage" else 4)


def test_the_memory_of_a_model_on_gpus_is_that_of_its_plan(monkeypatch):
    """Its ticks carry slots, but the program that is read is that of an abstract mesh, whose ticks allocate them."""
    for form in ("copies_what_branches_return", "clears_what_is_overwritten"):
        monkeypatch.setattr(model_on_mesh, form, lambda mesh: isinstance(mesh, Mesh))
    _, model, tx = build(1, 4, 2, **{"pipeline.remat": "elementwise"})
    planned = model.replace(mesh=abstract_mesh(model.axis_sizes))
    held, plan = (memory(each, abstract_state(each, tx).opt_state, global_batch=8, seq=32) for each in (model, planned))
    assert held == plan and plan.saved_activations


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble"])
def test_the_plan_holds_what_the_loop_over_ticks_carries(schedule, remat):
    """Read from the traced loop: what enters it and leaves it again; zeros that it carries take no memory."""
    pipeline = {"pipeline.remat": remat, "pipeline.microbatches": 4, "pipeline.schedule": schedule}
    _, model, tx = build(2, 2, 2, **{"model.layers": 4, **pipeline})
    batch = dict.fromkeys(("tokens", "labels", "segments", "positions"), jax.ShapeDtypeStruct((16, 32), jnp.int32))
    plan = memory(model, abstract_state(model, tx).opt_state, global_batch=16, seq=32)
    (mapped,) = (e for e in equations(model.loss_and_grad, model.shapes, batch) if e.primitive.name == "shard_map")
    ticks = next(e for e in called(mapped).jaxpr.eqns if e.primitive.name == "scan")
    assert ticks.params["length"] == model.schedule.ticks
    scan = loop(ticks)
    carry = ticks.invars[scan.consts : scan.consts + scan.carried]
    carried = sum(var.aval.size * var.aval.dtype.itemsize for var in carry)
    loss = 2 * 4
    held = plan.saved_activations + plan.pipeline_buffers + plan.gradients
    least = 0.95 if remat == "none" else 1
    assert held >= least * (carried - loss)


@pytest.mark.slow
def test_1f1b_keeps_as_many_microbatches_however_many_there_are():
    saved = {}
    for schedule in ("gpipe", "one_f_one_b"):
        for microbatches in (8, 16):
            _, model, tx = build(
                2, 2, 2, **{"pipeline.schedule": schedule, "pipeline.microbatches": microbatches, "model.layers": 4}
            )
            plan = memory(model, abstract_state(model, tx).opt_state, global_batch=4 * microbatches, seq=32)
            saved[schedule, microbatches] = plan.saved_activations
    assert saved["gpipe", 16] == pytest.approx(2 * saved["gpipe", 8], rel=0.1)
    assert saved["one_f_one_b", 16] == saved["one_f_one_b", 8] < saved["gpipe", 8] / 2


@pytest.mark.slow
def test_recomputing_costs_a_layer_or_a_stage_for_as_long_as_it_lasts():
    plans = {}
    for remat in ("none", "layer", "stage"):
        _, model, tx = build(1, 2, 2, **{"pipeline.remat": remat})
        plan = memory(model, abstract_state(model, tx).opt_state, global_batch=8, seq=32)
        plans[remat] = plan.working_activations
    assert plans["stage"] > 1.5 * plans["layer"] >= plans["none"]


def test_an_untied_head_costs_parameters_but_no_flops():
    tied, untied = (build(1, 1, 1, **{"model.tied": tied})[1] for tied in (True, False))
    flops = [flops_per_token(model.config, model.plan.declared, seq=32) for model in (tied, untied)]
    counts = [sum(parameters_by_component(model.plan.declared).values()) for model in (tied, untied)]
    assert flops[0] == flops[1] and counts[1] - counts[0] == 384 * 32
    longer = dataclasses.replace(tied.config, layers=4)
    assert flops_per_token(longer, tied.plan.declared, seq=32) > flops[0]
