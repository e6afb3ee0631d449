"""Training with experts: the same on every mesh; what their load is, what moves a router's bias, and what does not."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.run_examples import tiny_config
from support.tiny_model import build, make_batch, model_config, optimizer_config, params_of

from configs.tiny_moe import get_config as tiny_moe
from parallax.checkpoint.arrays import flatten
from parallax.checkpoint.restore import restore
from parallax.checkpoint.save import CheckpointWriter
from parallax.config.sections import CheckpointConfig, GuardConfig
from parallax.inference.run import load
from parallax.model.experts.router import Router
from parallax.sharding.layout import named_leaves
from parallax.step.expert_load import EXPERT_COUNTS, load_values
from parallax.step.guard import init_guard
from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainState, TrainStep, abstract_state, make_eval_step, state_shardings
from parallax.storage.run_files import read_metrics
from parallax.training.loop import checkpoint_trees, state_from
from parallax.training.run import train

STEPS, RATE, EXPERTS, ROWS, SEQ = 20, 2e-3, 4, 16, 16
KINDS = ("moe", "dense", "moe")
MIXTURE = dict(
    layers=3, layers_of=" ".join(KINDS), d_model=16, d_ff=32, heads=4, kv_heads=2, d_head=4, attention="gqa",
    experts=EXPERTS, d_expert=8, shared_experts=1, router_score="sigmoid", microbatches=2,
    balance_coefficient=1e-2, router_z_coefficient=1e-3,
)  # fmt: skip
# Clipped at each step, and decayed: neither is for a bias. With eps as large as a clipped gradient's entries AdamW does
# not make more of what float32 rounds; a token that chooses otherwise would show beyond the tolerance.
OPTIMIZER = dict(learning_rate=1e-2, warmup_steps=0, clip_norm=0.1, weight_decay=0.5, eps=1e-2, balance_rate=RATE)
# pp, dp, tp, replica, cp, ep
MESHES = {
    "one device": (1, 1, 1),
    "ep·tp": (1, 1, 2, 1, 1, 2),
    "pp·cp·ep": (2, 1, 1, 1, 2, 2),
    "dp·ep": (1, 2, 1, 1, 1, 4),
}


@functools.cache
def on(name):
    """(model, optimizer, step, evaluation) on a mesh."""
    model = build(MESHES[name], **MIXTURE).replace(optimizer=optimizer_config(**OPTIMIZER))
    tx = make_optimizer(model.settings.optimizer, STEPS, model.plan.rows)
    return model, tx, TrainStep(model, tx, 0, GuardConfig()), make_eval_step(model)


def first_state(name):
    """The state before the first step, its biases moved off 0."""
    model, tx, _, _ = on(name)
    params, shardings = params_of(model), state_shardings(model, tx)
    opt_state = jax.jit(tx.init, out_shardings=shardings.opt_state)(params)
    return TrainState(
        *jax.device_put((jnp.int32(0), params), shardings[:2]), opt_state, jax.device_put(init_guard(), shardings.guard)
    )


def biases(params):
    return np.asarray(params["blocks"]["moe"]["mlp"]["router"]["bias"])


def batch_of(step):
    return make_batch(rows=ROWS, seq=SEQ, seed=step % 4)


@functools.cache
def trained(name):
    """(metrics of each step, biases before and after each, loss of an evaluation at the end, state)."""
    _, _, step, evaluate = on(name)
    state = first_state(name)
    rows, seen = [], [biases(state.params)]
    for at in range(STEPS):
        state, metrics = step(state, batch_of(at))
        rows.append(jax.device_get(metrics))
        seen.append(biases(state.params))
    evaluated = float(evaluate(state.params, make_batch(rows=ROWS, seq=SEQ, seed=9))["loss"])
    np.testing.assert_array_equal(biases(state.params), seen[-1])  # which moves nothing
    return rows, seen, evaluated, state


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MESHES][1:])
def test_twenty_steps_are_the_same_on_every_mesh(name):
    rows, seen, evaluated, _ = trained(name)
    expected, expected_biases, expected_evaluated, _ = trained("one device")
    losses = [row["loss"] for row in rows]
    np.testing.assert_allclose(losses, [row["loss"] for row in expected], rtol=1e-5)
    assert evaluated == pytest.approx(expected_evaluated, rel=5e-3) and losses[-1] < losses[0]
    # A token that lies between two experts, as far as float32 knows, may choose otherwise; where an expert has the mean
    # number of tokens, its bias then moves otherwise, too.
    counts, others = (np.array([row[EXPERT_COUNTS] for row in of]) for of in (rows, expected))
    np.testing.assert_array_equal(counts[0], others[0])
    np.testing.assert_array_equal(seen[1], expected_biases[1])
    assert np.abs(counts - others).sum() / 2 <= 1e-3 * others.sum()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_steps_of_tiny_moe_are_the_same_on_meshes_of_different_axes(tmp_path):
    """With its text, in rows of 64 tokens, which take a quarter of the time; no mesh has the axes of another."""
    losses, evaluated = [], []
    for axes in (["pp", "ep", "tp"], ["pp", "cp", "ep"], ["dp", "ep", "tp"]):
        config = tiny_moe()
        config.mesh.update(dict.fromkeys(("pp", "dp", "cp", "ep", "tp"), 1) | dict.fromkeys(axes, 2))
        config.data.update({"cache": str(tmp_path / "cache"), "seq": 64})
        config.train.update({"steps": STEPS, "eval_every_steps": STEPS})
        config.optimizer.warmup_steps = STEPS // 2
        config.sample.prompt = ""
        folder = tmp_path / "·".join(axes)
        assert train(config, folder).reason == "finished"
        rows = read_metrics(folder / "metrics.jsonl")
        losses.append([row["train/loss"] for row in rows if "train/loss" in row])
        evaluated.append([row["eval/loss"] for row in rows if "eval/loss" in row][-1])
    assert len(losses[0]) == STEPS and losses[0][-1] < losses[0][0] - 0.5
    for found, at_end in zip(losses, evaluated):
        np.testing.assert_allclose(found, losses[0], rtol=1e-5)
        assert at_end == pytest.approx(evaluated[0], rel=5e-3)


@pytest.mark.slow
def test_counts_are_of_every_choice_of_the_batch_by_layer_of_the_model():
    counts = np.array([row[EXPERT_COUNTS] for row in trained("one device")[0]])
    assert counts.shape == (STEPS, KINDS.count("moe"), EXPERTS)
    assert (counts.sum(axis=-1) == ROWS * SEQ * model_config(**MIXTURE).experts_per_token).all()
    values = load_values(counts[0], KINDS, table=True)
    shares = counts[0] / counts[0].sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(values["experts/shares"], shares, atol=1e-5)
    assert values["experts/layers"] == [0, 2] and values["experts/load"] == pytest.approx(EXPERTS * shares.max())
    entropies = [-sum(p * math.log(p) for p in layer) / math.log(EXPERTS) for layer in shares]
    assert values["experts/entropy"] == pytest.approx(min(entropies))
    np.testing.assert_allclose(values["experts/entropy_by_layer"], entropies, atol=1e-5)
    np.testing.assert_allclose(values["experts/load_by_layer"], EXPERTS * shares.max(axis=1), atol=1e-5)


@pytest.mark.slow
def test_a_bias_moves_by_the_rate_towards_experts_with_few_tokens_and_by_nothing_else():
    """Though the gradient is clipped and other parameters decay."""
    rows, seen, _, _ = trained("one device")
    assert all(row["grad_norm"] > OPTIMIZER["clip_norm"] for row in rows)
    for row, before, after in zip(rows, seen, seen[1:]):
        few = np.sign(row[EXPERT_COUNTS].mean(axis=-1, keepdims=True) - row[EXPERT_COUNTS])
        np.testing.assert_array_equal(after, before + np.float32(RATE) * few)


@pytest.mark.slow
def test_a_step_that_is_skipped_moves_no_bias():
    _, _, step, _ = on("one device")
    state = first_state("one device")
    state.params["blocks"]["moe"]["mlp_norm"]["scale"] *= np.nan
    before = biases(state.params)
    state, metrics = step(state, batch_of(0))
    assert metrics["skipped"] == 1 and metrics[EXPERT_COUNTS].any()
    np.testing.assert_array_equal(biases(state.params), before)


@pytest.mark.parametrize("name", ["one device", "pp·cp·ep"])
def test_the_norm_of_the_gradient_is_without_the_load(name):
    model, _, step, _ = on(name)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), model.shapes)
    expected = math.sqrt(sum((leaf**2).sum() for path, leaf in flatten(grads).items() if "router.bias" not in path))
    grads["blocks"]["moe"]["mlp"]["router"]["bias"] += 1000
    grads = jax.tree.map(jax.device_put, grads, model.shardings)
    counts = {name: named_leaves(grads)[name] for name in model.plan.statistics}
    np.testing.assert_allclose(jax.jit(step.grad_norm)(grads, counts), expected, rtol=1e-5)


@pytest.mark.slow
def test_what_is_saved_on_one_mesh_is_bitwise_restored_on_another_and_goes_on(tmp_path):
    there, here = "pp·cp·ep", "ep·tp"
    state = trained(there)[-1]
    with CheckpointWriter(tmp_path, CheckpointConfig(every_steps=1, keep_best=0), settings={}) as checkpoints:
        checkpoints.save(STEPS, checkpoint_trees(state))
    losses = []
    for name in (there, here):
        model, tx, step, _ = on(name)
        wanted = checkpoint_trees(abstract_state(model, tx))
        found = state_from(restore(tmp_path, STEPS, wanted, settings={}))
        assert biases(found.params).any()
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, state))
        losses.append(float(step(found, batch_of(STEPS))[1]["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_the_balance_loss_evens_a_load_that_one_expert_has():
    """Its gradient alone, on a router that sends nearly all tokens to one of four experts."""
    model = model_config(**MIXTURE | dict(experts_per_token=1, d_model=8))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 32, 8)), jnp.float32).at[..., 0].set(1)
    kernel = jnp.asarray(rng.normal(0, 0.3, (8, EXPERTS)), jnp.float32).at[0, 2].add(3)

    def largest_load(coefficient):
        router = Router(model, coefficient, 0.0)

        @jax.jit
        def gradients(params):
            nothing = lambda params: 0 * router.apply({"params": params}, x, jnp.float32(1 / len(x)))[0].sum()  # noqa: E731
            return jax.grad(nothing)(params)

        params = {"kernel": kernel, "bias": jnp.zeros(EXPERTS)}
        loads = []
        for _ in range(150):
            grads = gradients(params)
            loads.append(float(grads["bias"].max() / grads["bias"].mean()))
            params["kernel"] = params["kernel"] - 0.5 * grads["kernel"]
        return loads

    assert largest_load(0.0)[-1] > 3
    evened = largest_load(1.0)
    assert evened[0] > 3 and evened[-1] < 1.5


@pytest.mark.slow
def test_weights_that_a_run_begins_from_an_evaluation_and_a_text_have_the_biases(corpus, tmp_path):
    """Those of the first run are large, and the second moves none."""
    experts = {"layers_of": "moe*2", "experts": EXPERTS, "d_expert": 16, "router_score": "sigmoid"}
    changes = {f"model.{key}": value for key, value in experts.items()} | {"mesh.ep": 2, "mesh.tp": 2}
    for name, more in {"first": {}, "second": {"train.init_from": str(tmp_path / "first"), "train.steps": 4}}.items():
        rate = {"optimizer.balance_rate": 0.5 if name == "first" else 0.0}
        train(tiny_config(corpus, **changes, **rate, **more), tmp_path / name)
    first, cut = load(tmp_path / "first"), load(tmp_path / "first", ep=2, tp=2)
    bias = first.params["blocks"]["mlp"]["router"]["bias"]
    assert np.abs(bias).max() >= 0.5
    np.testing.assert_array_equal(load(tmp_path / "second").params["blocks"]["mlp"]["router"]["bias"], bias)
    loss = lambda run: float(jax.jit(run.model.loss)(run.params, run.batch())["loss"])  # noqa: E731
    with_biases = loss(first)
    assert loss(cut) == pytest.approx(with_biases, rel=1e-5)
    how = {"tokens": 12, "temperature": 0.0}
    assert first.generate("It is", **how) == cut.generate("It is", **how)
    first.params["blocks"]["mlp"]["router"]["bias"] = jnp.zeros_like(bias)
    assert abs(loss(first) - with_biases) > 1e-4
