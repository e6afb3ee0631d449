"""Parameters that are not trained: constants of a step, which keeps, sends and computes nothing for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.run_examples import tiny_config
from support.tiny_model import make_batch
from support.traced_equations import equations, sent

import parallax as px
from configs.base import get_config
from parallax.analysis.traced.collectives import collectives_by_rank, update_collectives
from parallax.analysis.traced.flops import flops_by_direction, flops_per_token, parameters_by_component
from parallax.analysis.traced.memory import predicted_memory
from parallax.analysis.traced.trace import step_program
from parallax.checkpoint.arrays import flatten
from parallax.checkpoint.steps import read_manifest
from parallax.errors import CheckpointError, ConfigError
from parallax.step.step import TrainStep, abstract_state, model_of
from parallax.training.facts import size_tables
from parallax.training.run import train

ROWS, SEQ = 8, 16
MODEL = dict(vocab=64, layers=2, d_model=32, d_ff=64, heads=4, kv_heads=2, d_head=8, attention="gqa")
EXPERTS = dict(layers_of="dense moe", experts=4, d_expert=16, experts_per_token=2, expert_bias=True)
MESH = dict(pp=1, dp=1, tp=1)
CASES = {
    "a table and kernels": ("embedding blocks/*/kernel", {}),
    "the head's own table": ("head/table blocks/mlp", dict(mesh=MESH | dict(dp=2), model=dict(tied=False))),
    "a divided backward pass": (
        "blocks/attention embedding",
        dict(mesh=MESH | dict(pp=2), pipeline=dict(schedule="zero_bubble", microbatches=4, remat="none")),
    ),
    "every layer, where nothing is left for W": (
        "blocks",
        dict(mesh=MESH | dict(pp=2), pipeline=dict(schedule="zero_bubble", microbatches=2, remat="none")),
    ),
    "stages of uneven layers": (
        "embedding blocks/mlp/*/kernel",
        dict(
            mesh=MESH | dict(pp=2, dp=2),
            model=dict(layers=3),
            pipeline=dict(schedule="one_f_one_b", microbatches=2),
            data_parallel=dict(policy="zero2"),
        ),
    ),
    "experts, whose bias stays, too": (
        "blocks/moe/mlp/experts blocks/*/router",
        dict(mesh=MESH | dict(ep=2), model=EXPERTS, optimizer=dict(balance_rate=1e-2)),
    ),
    "8-bit products, whose scales follow": ("blocks/mlp/up", dict(mesh=MESH | dict(dp=2), model=dict(matmul="int8"))),
    "messages of several matrices": (
        "blocks/*/gate blocks/attention/k",
        dict(mesh=MESH | dict(dp=2), fsdp=dict(bucket="layer")),
    ),
    "muon": ("blocks/mlp/gate head", dict(mesh=MESH | dict(dp=2), optimizer=dict(name="muon"))),
    "states in float8, weights in bfloat16": (
        "blocks/mlp",
        dict(
            mesh=MESH | dict(dp=2),
            model=dict(d_model=64, d_ff=64),
            optimizer=dict(m_dtype="float8", v_dtype="float8", weights_dtype="bfloat16"),
        ),
    ),
    "host memory": (
        "blocks/mlp",
        dict(
            mesh=MESH | dict(dp=2),
            model=dict(dtype="bfloat16"),
            optimizer=dict(states_on="host", masters_on="host"),
        ),
    ),
}
FAST = ["a table and kernels"]


def settings_of(frozen, **changes):
    given = dict(mesh=MESH, train=dict(steps=8), data=dict(global_batch=ROWS, seq=SEQ))
    given |= changes | dict(model=MODEL | changes.get("model", {}))
    given["pipeline"] = dict(microbatches=1, schedule="gpipe") | changes.get("pipeline", {})
    given["optimizer"] = dict(warmup_steps=1, frozen=frozen) | changes.get("optimizer", {})
    return px.read_settings(get_config(), **given)


@functools.cache
def batch():
    return make_batch(rows=ROWS, seq=SEQ)


def step_of(settings):
    return px.step_of(settings, px.mesh_of(**{axis: size for axis, size in settings.mesh.sizes.items()}))


def arrays(tree):
    return {name: np.asarray(leaf) for name, leaf in flatten(tree).items()}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in FAST)) for c in CASES])
def test_the_rest_is_trained_as_if_the_frozen_ones_had_zero_updates(case):
    frozen, changes = CASES[case]
    steps = [step_of(settings_of(words, **changes)) for words in ("", frozen)]
    grads = []
    for step in steps:
        state = step.init(batch())
        noise = jnp.array([0, 0], jnp.int32)
        metrics, found = jax.jit(step.model.loss_and_grad)(state.params, step.model.checked(batch()), noise)
        grads.append((metrics["loss"], arrays(found)))
    (loss, every), (same, some) = grads
    assert loss == same
    specs = {name: row.spec for name, row in flatten(step.model.plan.rows).items()}
    for name, spec in specs.items():
        if spec.is_trained:
            np.testing.assert_allclose(some[name], every[name], rtol=1e-5, atol=1e-6 * np.abs(every[name]).max())
        else:
            assert some[name].size == 0, name
    before = arrays(state.params)
    state, metrics = step(state, batch())
    after = arrays(state.params)
    norm = np.sqrt(sum(np.square(every[name], dtype=np.float64).sum() for name in specs if specs[name].is_trained))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    updated = [name for name in after if specs[name].role != "maxima"]  # a scale may be the same again
    unchanged = {name for name in updated if np.array_equal(after[name], before[name])}
    assert unchanged == {name for name in updated if specs[name].frozen}
    kept = flatten(state.opt_state)
    assert not any(name.endswith(spec) for name in kept for spec in specs if specs[spec].frozen)
    assert kept


def test_a_step_computes_and_sends_nothing_for_them():
    """The kernels of MLPs on two data ranks: no product with a gradient of theirs, no message for it, no bytes."""
    models = [model_of(settings_of(words), px.mesh_of(dp=2)) for words in ("", "blocks/mlp/*/kernel")]
    kernels = 3 * MODEL["layers"] * MODEL["d_model"] * MODEL["d_ff"]
    programs = [step_program(model, ROWS, SEQ) for model in models]
    at = dict.fromkeys(models[0].axis_sizes, 0)
    every, some = (flops_by_direction(program, rank=at) for program in programs)
    assert every["forward"] == some["forward"]
    assert every["backward"] - some["backward"] == 2 * kernels * ROWS * SEQ // 2
    model_flops = [flops_per_token(model.config, model.plan.declared, seq=SEQ) for model in models]
    assert model_flops[0] - model_flops[1] == 2 * kernels
    scattered = [
        sum(one.total_bytes for one in collectives_by_rank(model, ROWS, SEQ)[0] if one.kind == "reduce-scatter")
        for model in models
    ]
    assert scattered[0] - scattered[1] == 4 * kernels // 2  # half of a float32 array goes to the other rank
    counts = [parameters_by_component(models[1].plan.declared, trained=only) for only in (False, True)]
    assert counts[0]["mlp"] == kernels and counts[1]["mlp"] == 0


def test_memory_counts_neither_gradients_nor_states():
    settings = [settings_of(words, mesh=MESH | dict(dp=2)) for words in ("", "blocks/mlp/*/kernel")]
    every, some = (predicted_memory(model_of(one, px.mesh_of(dp=2)), one) for one in settings)
    kernels = 3 * MODEL["layers"] * MODEL["d_model"] * MODEL["d_ff"] // 2
    assert every.optimizer - some.optimizer == 2 * 4 * kernels and every.parameters == some.parameters
    assert every.gradients - some.gradients >= 4 * kernels


def test_muon_sends_nothing_for_frozen_matrices():
    optimizer = dict(optimizer=dict(name="muon"))
    steps = [step_of(settings_of(words, mesh=MESH | dict(dp=2), **optimizer)) for words in ("", "blocks/mlp")]
    every, some = ({one.module for one in update_collectives(step)} for step in steps)
    assert {"mlp/gate", "mlp/up", "mlp/down"} <= every and not any(module.startswith("mlp") for module in some)


def test_a_plan_shows_them():
    model = model_of(settings_of("embedding blocks/mlp"), px.mesh_of(dp=2))
    of_mlp = 3 * MODEL["layers"] * MODEL["d_model"] * MODEL["d_ff"]
    assert f"not trained: {of_mlp + MODEL['vocab'] * MODEL['d_model']:,} parameters, in 4 arrays" in repr(model)
    lines = {line.split()[0]: line.split()[1:3] for line in repr(model).splitlines() if "/" in line.split()[0]}
    assert lines["embedding/table"] == ["frozen", "embedding"] and lines["blocks/mlp/up/kernel"] == ["frozen", "mlp"]
    assert lines["blocks/attention/q/kernel"] == ["weight", "attention"]
    assert lines["head/norm/scale"] == ["norm", "head"]
    assert "<td style" in model._repr_html_() and "frozen" in model._repr_html_()


def test_a_run_says_how_many_are_trained():
    settings = settings_of("blocks/mlp")
    model = model_of(settings, px.mesh_of())
    every, some = (parameters_by_component(model.plan.declared, trained=only) for only in (False, True))
    lines = list(size_tables(settings.model, every, predicted_memory(model, settings), sum(some.values())))
    (line,) = [line for line in lines if line.startswith("trained")]
    assert line.split()[1] == f"{sum(every.values()) - every['mlp']:,}"


def test_an_optimizer_with_states_of_them_is_refused():
    model = model_of(settings_of("blocks/mlp"), px.mesh_of())
    with pytest.raises(ConfigError, match=r"keeps states of mlp/down, which is not trained \(optimizer.frozen\)"):
        abstract_state(model, optax.adamw(1e-3))
    labels = jax.tree.map(lambda row: "no" if row.spec.frozen else "yes", model.plan.rows)
    tx = optax.partition({"yes": optax.adamw(1e-3), "no": optax.set_to_zero()}, labels)
    step = TrainStep(model, tx, seed=0)
    before = step.init()
    kernels = np.asarray(before.params["blocks"]["mlp"]["up"]["kernel"])
    after, _ = step(before, batch())
    np.testing.assert_array_equal(after.params["blocks"]["mlp"]["up"]["kernel"], kernels)


def test_an_optimizer_that_takes_counts_of_tokens_for_gradients_is_refused():
    model = model_of(settings_of("", model=EXPERTS), px.mesh_of())
    with pytest.raises(ConfigError, match=r"mlp/router, which is not trained \(it follows from the steps' statistics"):
        abstract_state(model, optax.adamw(1e-3))


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_with_the_same_ones(corpus, whole_run, tmp_path):
    """It starts from the weights of another run, whose embedding it keeps."""
    frozen = {"optimizer.frozen": "embedding", "train.init_from": str(whole_run), "optimizer.schedule": "constant"}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(tiny_config(corpus, **frozen), whole)
    for steps in (4, 8):
        train(tiny_config(corpus, **frozen, **{"train.steps": steps}), stopped)
    kept = [read_manifest(folder / "checkpoints", 8)["arrays"] for folder in (whole, stopped, whole_run)]
    assert kept[0] == kept[1]
    assert kept[0]["params"]["embedding.table"] == kept[2]["params"]["embedding.table"]
    others = [name for part, arrays in kept[0].items() if part != "params" for name in arrays]
    assert others and not any("embedding" in name for name in others)
    with pytest.raises(CheckpointError, match="with other settings: optimizer.frozen='embedding' there, '' here"):
        train(tiny_config(corpus, **frozen | {"optimizer.frozen": "", "train.steps": 12}), whole)


WRONG = {
    "embeding": "optimizer.frozen names 'embeding', which is no part, module or parameter of this model, and no "
    "pattern of one; did you mean 'embedding'?",
    "blocks/*/nothing": "optimizer.frozen names 'blocks/*/nothing', which is no part",
    "*": "optimizer.frozen='*' leaves no parameter to train; name fewer, or use ''.",
}


@pytest.mark.parametrize("frozen", WRONG)
def test_words_that_name_nothing_or_everything_are_refused(frozen):
    with pytest.raises(ConfigError) as error:
        model_of(settings_of(frozen), px.mesh_of())
    assert WRONG[frozen] in str(error.value)


@pytest.mark.parametrize("policy", ["ddp", "zero3"])
def test_no_message_is_empty(policy):
    """A table that is not trained is sent to no pipeline rank after a step."""
    settings = settings_of(
        "embedding", mesh=MESH | dict(pp=2), pipeline=dict(microbatches=2), data_parallel=dict(policy=policy)
    )
    model = model_of(settings, px.mesh_of(pp=2))
    found = [e for e in equations(model.loss_and_grad, model.shapes, batch()) if [*sent([e])]]
    assert found and all(operand.aval.size for e in found for operand in e.invars)
