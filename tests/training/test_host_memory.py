"""Parameters, optimizer states and residuals in host memory: the same bits as on the device."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.run_examples import tiny_config
from support.tiny_model import build, make_batch, optimizer_config

from configs.base import get_config
from parallax.analysis.planned.plan import plan
from parallax.analysis.traced.memory import WAITING, tick_state
from parallax.checkpoint.arrays import flatten
from parallax.checkpoint.fingerprint import fingerprints
from parallax.checkpoint.restore import restore
from parallax.checkpoint.save import CheckpointWriter
from parallax.config.sections import CheckpointConfig, PipelineConfig
from parallax.config.settings import read_settings
from parallax.errors import ConfigError
from parallax.sharding.host import rests_on_host
from parallax.sharding.plan import ShardingPlan
from parallax.sharding.rounding import places_in_stack, random_bits
from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainStep, abstract_state
from parallax.training.run import train

ROOT = pathlib.Path(__file__).parents[2]

SHAPE = dict(attention="gqa", tied=True, layers=4, d_model=64, d_ff=64, microbatches=4, dtype="bfloat16")
HELD = dict(learning_rate=1e-2, warmup_steps=2, balance_rate=1e-3)
ON_HOST = dict(states_on="host", masters_on="host")
SMALL = dict(layers=2, d_model=32, microbatches=2)


def step_of(mesh, changes, optimizer, memories):
    kept = {key: optimizer[key] for key in ("weights_dtype",) if key in optimizer}
    model = build(mesh, **SHAPE | changes)
    model = model.replace(optimizer=dataclasses.replace(model.settings.optimizer, **kept | memories))
    tx = make_optimizer(optimizer_config(**HELD | optimizer), 10, model.plan.rows)
    return TrainStep(model, tx, seed=5)


def ten_steps(step):
    """Metrics of each step and the last state, as bytes."""
    state, found = step.init(), []
    for number in range(10):
        batch = jax.device_put(make_batch(rows=32, seed=number % 2), step.model.batch_sharding)
        state, metrics = step(state, batch)
        found.append({name: np.asarray(value).tobytes() for name, value in metrics.items()})
    return found, {name: np.asarray(leaf).tobytes() for name, leaf in flatten(state).items()}, state


CASES = {
    "adamw": ((1, 4, 1), {}, {}),
    "muon": ((2, 1, 2), {}, {"name": "muon"}),
    "float8": ((1, 2, 1), {"layers": 2}, {"m_dtype": "float8", "v_dtype": "float8"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ten_steps_layer_by_layer_are_bitwise_the_same_from_either_memory(name, monkeypatch):
    mesh, changes, optimizer = CASES[name]
    found, states, state = ten_steps(step_of(mesh, changes, optimizer, ON_HOST))
    assert any(rests_on_host(leaf.sharding) for leaf in jax.tree.leaves(state.params))
    monkeypatch.setattr(ShardingPlan, "uses_host", True)
    expected, on_device, state = ten_steps(step_of(mesh, changes, optimizer, {}))
    assert not any(rests_on_host(leaf.sharding) for leaf in jax.tree.leaves(state))
    assert found == expected
    assert {name for name in states if states[name] != on_device[name]} == set()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"matmul": "int8"}], ids=["plain", "int8"])
def test_a_step_that_is_skipped_changes_nothing_in_host_memory(changes):
    float8 = {"m_dtype": "float8", "v_dtype": "float8"}
    step = step_of((1, 2, 1), SMALL | changes, float8, ON_HOST)
    batch = jax.device_put(make_batch(rows=8), step.model.batch_sharding)
    before, metrics = step(step.init(batch), batch)
    assert metrics["skipped"] == 0
    held = {name: np.asarray(leaf).tobytes() for name, leaf in flatten(before).items()}
    bad = before.params["head"]["norm"]["scale"] * jnp.nan  # one of the few that stay on the device
    params = before.params | {"head": before.params["head"] | {"norm": {"scale": bad}}}
    after, metrics = step(before._replace(params=params), batch)
    assert metrics["skipped"] == 1
    moved = {name for name, leaf in flatten(after).items() if np.asarray(leaf).tobytes() != held[name]}
    assert moved == {"step", "params.head.norm.scale", "guard.skipped", "guard.in_a_row"}
    for name, leaf in flatten(after).items():
        assert rests_on_host(leaf.sharding) == rests_on_host(flatten(step.shardings)[name]), name


def test_random_bits_of_a_layer_are_those_of_its_place_in_the_stack():
    noise, bits = jnp.int32([3, 7]), jax.jit(random_bits, static_argnums=(1, 2, 3))
    whole = np.asarray(bits(noise, "mu", "some/kernel", (5, 3, 4)))
    for rows in ([2], [0, 4]):
        own = bits(noise, "mu", "some/kernel", (len(rows), 3, 4), jnp.int32(rows))
        np.testing.assert_array_equal(own, whole[rows])
    places = jax.jit(places_in_stack, static_argnums=0)
    high, low = places((1, 1, 3, 1 << 20), jnp.int32([70_000]))  # counts beyond 32 bits
    expected = 70_000 * 3 * 2**20 + np.arange(3 * 2**20, dtype=np.uint64).reshape(1, 1, 3, -1)
    np.testing.assert_array_equal(np.asarray(high, np.uint64) << np.uint64(32) | np.asarray(low, np.uint64), expected)


WHOLE = """
import json, sys
sys.path[:0] = ["tests", "tests/training"]
import conftest
from test_host_memory import ON_HOST, step_of, ten_steps
plain, moved = (ten_steps(step_of((1, 4, 1), {}, {}, memories)) for memories in ({}, ON_HOST))
assert plain[0] == moved[0] and plain[1] == moved[1]
print("the same bits")
"""


@pytest.mark.slow
def test_ten_steps_of_adamw_are_bitwise_those_on_the_device():
    """With a CPU that has no fused multiply-add. XLA fuses the update of a whole array and of a layer otherwise, and
    which products it rounds before it adds them depends on that; all else is the same."""
    flags = {**os.environ, "XLA_FLAGS": "--xla_cpu_max_isa=AVX", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run([sys.executable, "-c", WHOLE], env=flags, capture_output=True, text=True, cwd=ROOT)
    assert "the same bits" in done.stdout, done.stderr[-2000:]


@pytest.mark.slow
def test_what_is_saved_in_one_memory_goes_on_in_the_other(tmp_path):
    """Rounded and in blocks, too; and the fingerprints of what is in host memory are those of the device."""
    changes, optimizer = {"layers": 2}, {"m_dtype": "float8", "v_dtype": "bfloat16"}
    steps = [step_of((1, 2, 1), changes, optimizer, memories) for memories in (ON_HOST, {})]
    state = steps[0].init()
    assert fingerprints(flatten(state)) == fingerprints(flatten(steps[1].init()))
    with CheckpointWriter(tmp_path, CheckpointConfig(keep_best=0), settings={}) as checkpoints:
        checkpoints.save(1, {"state": state})
    for step in steps:
        wanted = abstract_state(step.model, step.tx)
        found = restore(tmp_path, 1, {"state": wanted})["state"]
        for name, leaf in flatten(found).items():
            assert rests_on_host(leaf.sharding) == rests_on_host(flatten(wanted)[name].sharding), name
            assert np.asarray(leaf).tobytes() == np.asarray(flatten(state)[name]).tobytes(), name
    assert rests_on_host(state.params["embedding"]["table"].sharding)
    assert not rests_on_host(state.params["head"]["norm"]["scale"].sharding)


@pytest.mark.slow
def test_a_run_goes_on_with_its_states_in_the_other_memory(corpus, tmp_path):
    """Up to the last place, in which an update by layers may be rounded otherwise."""

    def ended(name, *memories):
        for steps, memory in zip((4, 8), memories, strict=True):
            there = {f"optimizer.{key}": memory for key in ON_HOST}
            changes = {"model.dtype": "bfloat16", "model.d_model": 64, "optimizer.schedule": "constant"}
            changes |= {"optimizer.m_dtype": "float8", "optimizer.v_dtype": "float8", "train.steps": steps}
            outcome = train(tiny_config(corpus, **changes | there), tmp_path / name)
            assert (outcome.reason, outcome.step) == ("finished", steps)
        return outcome.eval_loss

    expected = ended("stays", "device", "device")
    for memories in (("host", "device"), ("device", "host")):
        assert ended(" then ".join(memories), *memories) == pytest.approx(expected, rel=1e-4)


def test_the_plan_of_parameters_prints_the_memory_of_each():
    model = step_of((1, 2, 1), {}, {}, {"states_on": "host"}).model
    text = repr(model.plan)
    (kernel,) = (line for line in text.splitlines() if line.startswith("blocks/mlp/gate/kernel"))
    (scale,) = (line for line in text.splitlines() if line.startswith("blocks/mlp_norm/scale"))
    assert kernel.split()[-4:-2] == ["device", "host"] and scale.split()[-4:-2] == ["device", "device"]
    assert "in host memory between steps: optimizer's states of 8 of 11 arrays" in text


ERRORS = {
    "masters in float32": (
        lambda: step_of((1, 1, 1), {"dtype": "float32"}, {}, ON_HOST),
        "optimizer.masters_on='host' saves nothing with model.dtype='float32': a step computes with a copy in that "
        "dtype; use model.dtype='bfloat16', or masters_on='device'.",
    ),
    "no masters": (
        lambda: optimizer_config(masters_on="host", weights_dtype="bfloat16"),
        "optimizer.masters_on='host' moves float32 parameters, but with optimizer.weights_dtype='bfloat16' there are "
        "none; use masters_on='device', or weights_dtype='float32'.",
    ),
    "another word": (
        lambda: optimizer_config(states_on="hosts"),
        "optimizer.states_on='hosts' is unknown; ",
    ),
    "what is made again": (
        lambda: build((1, 1, 1), remat="elementwise ffn", residuals_on="ffn"),
        "pipeline.residuals_on='ffn' has 'ffn', but pipeline.remat='elementwise ffn' does not save it by name; use a "
        "set of input, latent, q, kv, core, out, experts, down, or another remat",
    ),
    "no names": (
        lambda: build((1, 1, 1), remat="none", residuals_on="input"),
        "pipeline.residuals_on='input' has 'input', but pipeline.remat='none' does not save it by name; use 'host', "
        "or another remat",
    ),
    "unknown part": (
        lambda: PipelineConfig(residuals_on="ffm"),
        "pipeline.residuals_on='ffm' is unknown; did you mean 'ffn'? ",
    ),
    "a word among parts": (
        lambda: PipelineConfig(residuals_on="host ffn"),
        "pipeline.residuals_on='host ffn' is not a set of parts; use one of device, host alone, or a set of input, ",
    ),
    "another optimizer": (
        lambda: TrainStep(*adafactor(), seed=0),
        "optimizer.states_on='host' needs an optimizer that keeps arrays of the parameters' shapes; this one keeps ",
    ),
}


def adafactor():
    model = build((1, 1, 1), **SHAPE)
    model = model.replace(optimizer=dataclasses.replace(model.settings.optimizer, states_on="host"))
    return model, optax.adafactor(1e-3, min_dim_size_to_factor=8)


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_is_refused(name):
    make, message = ERRORS[name]
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(message)


PLANNED = dict(model=dict(layers=8, d_model=1024, d_ff=4096, dtype="bfloat16", vocab=4096, kernel="xla"))


def planned(where="v5e:2x2", **changes):
    config = get_config().to_dict()
    sections = PLANNED | {"mesh": {"dp": 4}, "data": {"seq": 512, "global_batch": 16}} | changes
    return plan(read_settings(config, **sections), where)


@pytest.mark.slow
def test_a_plan_has_less_on_the_device_and_says_what_the_link_carries():
    here = planned()
    states = planned(optimizer=dict(states_on="host", masters_on="host"))
    assert states.memory["optimizer"] + states.memory["parameters"] < 0.02 * here.memory["optimizer"]
    moved = here.memory["optimizer"] + here.memory["parameters"]
    assert 0.98 * moved < states.estimate.host_bytes <= moved
    # Masters come to the device twice and go back once, moments both ways once, at 15 GB/s each way.
    masters = states.estimate.host_bytes / 3
    assert states.estimate.link_bytes == pytest.approx(7 * masters)
    at_most = (masters + 3 * masters) / 15e9
    assert at_most - here.estimate.update_secs <= states.estimate.link_secs <= at_most
    assert states.secs == pytest.approx(here.secs + states.estimate.link_secs, rel=0.02)
    assert f"the step waits {states.estimate.link_secs:.3f} s" in repr(states)

    residuals = planned(pipeline=dict(residuals_on="host", remat="layer", microbatches=2))
    stays = planned(pipeline=dict(remat="layer", microbatches=2))
    saved = stays.memory["saved_activations"]
    assert residuals.memory["saved_activations"] == 0 and residuals.estimate.host_bytes == saved
    assert residuals.estimate.link_bytes == 2 * 2 * saved  # of each microbatch, there and back
    # All but the input of the layer that is at work.
    assert residuals.peak_bytes == stays.peak_bytes - saved * 7 // 8

    # On GPUs all copies wait, and one way for the other, at 63 GB/s.
    for on_host in (
        dict(optimizer=dict(states_on="host", masters_on="host")),
        dict(pipeline=dict(residuals_on="host")),
    ):
        found = planned("H100:4", **on_host).estimate
        assert found.link_secs == pytest.approx(found.link_bytes / 63e9) and found.link_bytes


# ---- residuals

RESIDUALS = {
    "inputs": dict(mesh=(2, 1, 1), schedule="gpipe", remat="layer", residuals_on="host"),
    "a set": dict(mesh=(1, 2, 1), remat="elementwise", residuals_on="input ffn"),
    "in flight": dict(mesh=(2, 2, 1), schedule="one_f_one_b", remat="attention", residuals_on="host"),
    "all, split": dict(mesh=(2, 1, 1), schedule="zero_bubble", remat="none", residuals_on="host"),
    "context": dict(mesh=(1, 1, 1, 1, 2), context="ring", remat="attention", residuals_on="host"),
    "stage": dict(mesh=(2, 1, 1), schedule="interleaved", virtual=2, remat="stage", residuals_on="input"),
    "one pass": dict(mesh=(2, 1, 1), schedule="dualpipe_v", remat="stage", residuals_on="input"),
    "one pass, all": dict(mesh=(2, 1, 1), schedule="dualpipe_v", remat="norm core", residuals_on="host"),
    "kinds": dict(
        mesh=(2, 1, 1),
        schedule="zero_bubble_v",
        layers_of="(dense moe)*2",
        experts=4,
        d_expert=32,
        remat="norm core",
        residuals_on="dispatch experts qkv",
    ),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", RESIDUALS)
def test_loss_and_gradients_are_bitwise_those_with_residuals_on_the_device(name, monkeypatch):
    # What is in an unset slot is not known; nan shows whether something reads it.
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    case = dict(attention="gqa", tied=True, layers=4, d_model=32, d_ff=64, microbatches=4) | RESIDUALS[name]
    mesh, batch = case.pop("mesh"), make_batch(rows=16)
    moved, stays = (build(mesh, **case | on) for on in ({}, {"residuals_on": "device"}))
    assert types_in_ticks(moved) > 0 == types_in_ticks(stays)
    params = stays.init(0)
    found, expected = (jax.jit(model.loss_and_grad)(params, batch) for model in (moved, stays))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def types_in_ticks(model):
    """How many arrays the slots of a step have in host memory."""
    return sum(component == WAITING for _, component, _ in tick_state(model, 16, 16))
