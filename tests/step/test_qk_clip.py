"""QK-clip: a step's largest logits are those of a plain model on every mesh, and heads are scaled as NumPy does."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import plain_model
from support.run_examples import tiny_config
from support.tiny_model import SEQ_CUT, build, make_batch, mesh_of, optimizer_config, params_of, settings_of
from support.traced_equations import equations
from support.user_parts import LoRA

import parallax as px
from configs.base import get_config
from parallax.analysis.traced.flops import parameters_by_component
from parallax.cli.convert import main as convert
from parallax.config.settings import read_settings
from parallax.errors import CheckpointError, ConfigError
from parallax.model import attention
from parallax.model.mask import Mask
from parallax.model.transformer import Block
from parallax.pipeline import ShardedModel
from parallax.sharding.layout import named_leaves
from parallax.step.optimizer import make_optimizer
from parallax.step.qk_clip import LARGEST_LOGITS, MAX_LOGIT, with_clipped_heads
from parallax.step.step import TrainStep, abstract_state
from parallax.storage.run_files import read_metrics
from parallax.training.resume import why_not_this_run
from parallax.training.run import train

MODELS = {
    "gqa": dict(attention="gqa", kv_heads=2),
    "mha": dict(attention="gqa", kv_heads=4, qkv_bias=True),
    "mla": dict(attention="mla", d_latent_q=16),
}
LIMIT = 15.5  # between the largest logits of these heads


def model_on(mesh, name, **changes):
    return build(mesh, **dict(layers=2, heads=4, qk_clip=LIMIT, microbatches=2) | MODELS[name] | changes)


def stirred(model):
    """Kernels of different sizes, so that heads have different logits."""
    rng = np.random.default_rng(0)

    def scaled(path, x):
        is_kernel = "kernel" in jax.tree_util.keystr(path)
        return np.asarray(x) * np.float32(rng.uniform(1, 3, (x.shape[0], *[1] * (x.ndim - 1)))) if is_kernel else x

    params = jax.tree_util.tree_map_with_path(scaled, params_of(model))
    return jax.tree.map(jax.device_put, params, model.shardings)


def plain_largest(model, params, batch):
    """The largest score of each head [layers, heads], from whole rows of scores."""
    largest = []

    def measure(q, k, is_seen, scale):
        keys = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
        scores = scale * np.einsum("BSHJ,BTHJ->BHST", np.float64(q), np.float64(keys))
        largest.append(np.where(is_seen, scores, -np.inf).max(axis=(0, 2, 3)))

    def attend(q, k, v, mask, *, scale, **others):
        jax.debug.callback(measure, q, k, mask.dense(q.shape[1]), scale, ordered=True)
        return PLAIN_ATTEND(q, k, v, mask, scale=scale, **others)

    config = dataclasses.replace(model.config, qk_clip=0.0)
    params, batch = jax.tree.map(np.asarray, (params, batch))
    with mock.patch.object(plain_model, "plain_attend", attend):
        jax.jit(lambda params, batch: plain_model.plain_logits(config, params, batch))(params, batch)
    jax.effects_barrier()
    assert len(largest) == config.layers
    return np.stack(largest)


PLAIN_ATTEND, LARGEST = plain_model.plain_attend, attention.largest_logits


def measured(model, params, batch):
    """The same, from a step's statistics."""
    batch = jax.device_put(batch, model.batch_sharding)
    noise = np.int32([0, 0])
    *_, statistics = jax.jit(model.loss_grads_and_statistics)(params, batch, noise)
    return np.concatenate([np.asarray(x) for name, x in statistics.items() if name.endswith(LARGEST_LOGITS)])


STREAMS = dict(schedule="one_f_one_b", tensor_parallel="streams", residual=SEQ_CUT)
MESHES = [
    ((1, 1, 1), "gqa", {}),
    pytest.param((2, 2, 2), "mla", dict(schedule="one_f_one_b"), marks=pytest.mark.slow),
    pytest.param((2, 2, 2), "gqa", dict(schedule="zero_bubble_v", layers=4), marks=pytest.mark.slow),
    pytest.param((1, 2, 2, 2), "mha", dict(remat="layer"), marks=pytest.mark.slow),
    pytest.param((1, 1, 4), "gqa", {}, marks=pytest.mark.slow),  # ranks share key heads
    pytest.param((1, 1, 2, 1, 2), "gqa", dict(context="ulysses"), marks=pytest.mark.slow),
    pytest.param((1, 1, 2, 1, 2), "mla", dict(context="all_gather"), marks=pytest.mark.slow),
    pytest.param((1, 2, 1, 1, 2), "gqa", dict(context="all_gather", sliding_window=3), marks=pytest.mark.slow),
    pytest.param((2, 1, 2), "gqa", STREAMS | dict(layers=3, sliding_window=3), marks=pytest.mark.slow),
    pytest.param((1, 1, 1, 1, 1, 2), "gqa", dict(layers_of="moe*2"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "name", "changes"), MESHES)
def test_largest_logits_are_those_of_whole_rows_of_scores(mesh, name, changes):
    model, batch = model_on(mesh, name, **changes), make_batch(16)
    params = stirred(model)
    expected = np.maximum(plain_largest(model, params, batch), 0)
    assert (expected > LIMIT).any() and (expected < LIMIT).any(), expected
    np.testing.assert_allclose(measured(model, params, batch), expected, rtol=1e-5)


@pytest.mark.parametrize("mesh", [(1, 1, 1), pytest.param((2, 1, 2), marks=pytest.mark.slow)])
def test_largest_logits_are_those_of_scores_where_queries_are_scaled_first(mesh, monkeypatch):
    expected = plain_largest(model_on(mesh, "gqa"), stirred(model_on(mesh, "gqa")), make_batch(16))
    scales = []
    monkeypatch.setattr(attention, "scales_queries_first", lambda: True)
    largest = lambda *given, scale: scales.append(scale) or LARGEST(*given, scale=scale)  # noqa: E731
    monkeypatch.setattr(attention, "largest_logits", largest)
    model = model_on(mesh, "gqa")
    np.testing.assert_allclose(measured(model, stirred(model), make_batch(16)), np.maximum(expected, 0), rtol=1e-5)
    assert {*scales} == {1.0}


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("side", [5, 8, 16])
def test_blocks_of_any_size_give_the_largest_score(side, window):
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, 16, heads, 8)).astype(np.float32) for heads in (4, 2))
    mask = Mask(make_batch(2)["segments"], window=window)
    scores = 0.5 * np.einsum("BSHJ,BTHJ->BHST", q, k.repeat(2, axis=2))
    expected = np.where(mask.dense(16), scores, -np.inf).max(axis=(0, 2, 3))
    with mock.patch.object(attention, "LOGITS_SIDE", side):
        found = jax.jit(lambda q, k: attention.largest_logits(q, k, mask, scale=0.5))(q, k)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("windows", "blocks"), [((0, 0), 10), ((3, 0), 10), ((3, 2), 7), ((3, 16), 10), ((6, 6), 9)])
def test_blocks_that_no_layer_sees_are_skipped(windows, blocks):
    """Of 4 x 4 blocks of 4 tokens."""
    q, k = (jax.ShapeDtypeStruct((2, 16, heads, 8), jnp.float32) for heads in (4, 2))
    mask = Mask(jnp.zeros((2, 16), jnp.int32), windows=windows, which=jnp.int32(0))
    with mock.patch.object(attention, "LOGITS_SIDE", 4):
        traced = equations(lambda q, k: attention.largest_logits(q, k, mask, scale=0.5), q, k)
        lengths = [equation.params["length"] for equation in traced if equation.primitive.name == "scan"]
    assert lengths == [blocks]


@pytest.mark.parametrize("name", MODELS)
def test_heads_over_the_limit_are_scaled_down(name):
    model = model_on((2, 2, 2), name)
    params, rng = stirred(model), np.random.default_rng(1)
    largest = rng.uniform(0.5 * LIMIT, 2 * LIMIT, (2, 4)).astype(np.float32)
    statistics = {row: jax.device_put(largest, named_leaves(model.shardings)[row]) for row in model.plan.statistics}
    clipped = jax.jit(lambda params: with_clipped_heads(model, params, statistics))(params)
    before, after = ({n: np.asarray(x) for n, x in named_leaves(tree).items()} for tree in (params, clipped))
    g = np.minimum(1, LIMIT / largest)[:, None, :, None]
    expected = {
        "gqa": {"q/kernel": g},
        "mha": {"q/kernel": g**0.5, "k/kernel": g**0.5, "q/bias": g[:, 0] ** 0.5, "k/bias": g[:, 0] ** 0.5},
        "mla": {"queries_3/kernel": np.concatenate([g.repeat(8, 3) ** 0.5, g.repeat(4, 3)], 3), "up_k/kernel": g**0.5},
    }[name]
    for path, x in before.items():
        factor = expected.get(path.removeprefix("blocks/attention/"), 1)
        np.testing.assert_allclose(after[path], x * factor, rtol=1e-6, err_msg=path)


def test_each_kind_of_layers_is_scaled_by_its_own_heads():
    """Key heads are shared in one, and not in the other."""
    kinds = dict(layers_of="dense near", kinds="near=(heads=2, kv_heads=2)")
    model = model_on((1, 1, 1), "gqa", **kinds)
    params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), model.shapes)
    shapes = named_leaves(model.shapes)
    statistics = {name: np.full(shapes[name].shape, np.float32(4 * LIMIT)) for name in model.plan.statistics}
    clipped = jax.jit(functools.partial(with_clipped_heads, model))(params, statistics)
    before, after = map(named_leaves, (params, clipped))
    expected = {"dense/attention/q": 0.25, "near/attention/q": 0.5, "near/attention/k": 0.5}
    expected = {f"blocks/{module}/kernel": factor for module, factor in expected.items()}
    for path, x in before.items():
        np.testing.assert_array_equal(after[path], x * np.float32(expected.get(path, 1)), err_msg=path)


def test_weights_in_bfloat16_are_scaled_by_the_factor_on_average():
    """0.998 lies between two of them; the one head that is below the limit keeps its entries."""
    model = model_on((1, 1, 1), "gqa")
    params = jax.tree.map(lambda x: np.ones(x.shape, jnp.bfloat16), model.shapes)
    largest = np.float32([[LIMIT / 0.998, LIMIT / 2, LIMIT / 0.998, LIMIT / 0.998]] * 2)
    largest = {f"blocks/attention/{LARGEST_LOGITS}": largest}
    clipped = jax.jit(functools.partial(with_clipped_heads, model))(params, largest, np.int32([0, 1]))
    q = clipped["blocks"]["attention"]["q"]["kernel"]
    of_heads = np.moveaxis(np.asarray(q, np.float32), 2, 0)
    assert q.dtype == jnp.bfloat16 and (of_heads[1] == 1).all()
    # 0.002 is the standard deviation of an entry.
    np.testing.assert_allclose(of_heads[[0, 2, 3]].mean((1, 2, 3)), 0.998, atol=4 * 0.002 * of_heads[0].size ** -0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_after_a_step_no_head_of_the_first_layer_exceeds_the_limit(name):
    """Its input is the same, since the learning rate is nearly 0; so its logits are the limit, or what they were."""
    model, batch = model_on((1, 2, 2), name), make_batch(16)
    config = optimizer_config(name="muon", warmup_steps=0, learning_rate=1e-20, weight_decay=0.0)
    step, params = TrainStep(model, make_optimizer(config, 10, model.plan.rows), seed=0), stirred(model)
    expected = plain_largest(model, params, batch)
    placed = jax.device_put(batch, model.batch_sharding)
    state, metrics = step(step.init()._replace(params=params), placed)
    assert float(metrics[MAX_LOGIT]) == pytest.approx(expected.max(), rel=1e-5)
    state, _ = step(state, placed)
    after = named_leaves(state.params)[f"blocks/attention/{LARGEST_LOGITS}"]
    np.testing.assert_allclose(np.asarray(after)[0], np.clip(expected[0], 0, LIMIT), rtol=1e-5)


def test_largest_logits_are_no_parameters():
    counts = [parameters_by_component(model_on((1, 1, 1), "gqa", qk_clip=t).plan.declared) for t in (0.0, LIMIT)]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_a_run_with_clipped_heads_goes_on_with_another_limit_and_its_weights_go_out(corpus, tmp_path):
    few = {"train.steps": 2, "train.eval_batches": 0, "checkpoint.keep_best": 0, "optimizer.warmup_steps": 0}
    config, run, start = functools.partial(tiny_config, corpus, **few), tmp_path / "run", tmp_path / "start"
    train(config(**{"model.qk_clip": 1e9}), run)
    train(config(**{"model.qk_clip": 0.01, "train.steps": 4}), run)
    largest = [line[MAX_LOGIT] for line in read_metrics(run / "metrics.jsonl") if MAX_LOGIT in line]
    assert len(largest) == 4 and largest[2] > 0.01 and largest[3] < 0.5 * largest[2], largest
    with pytest.raises(CheckpointError, match="model.qk_clip=0.01 there, 0.0 here"):
        train(config(**{"train.steps": 6}), run)
    text = px.load(run).generate("It is", tokens=4, temperature=0.0)
    assert convert(["to-hf", str(run), str(tmp_path / "hf")]) == 0
    train(config(**{"train.init_from": str(run), "optimizer.learning_rate": 0.0}), start)
    assert px.load(start).generate("It is", tokens=4, temperature=0.0) == text


REFUSED = {
    "model.qk_norm=True normalizes again": dict(qk_norm=True),
    "model.score_cap=30.0 bounds scores as it is": dict(score_cap=30.0),
    "layout.context='ring' sends those of mesh.cp=2 ranks from rank to rank": dict(context="ring"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_clipped_is_refused(message):
    with pytest.raises(ConfigError, match=f"^model.qk_clip={LIMIT}.*; use qk_clip=0, or ") as caught:
        model_on((1, 1, 1, 1, 2), "gqa", **REFUSED[message])
    assert message in str(caught.value)


class Unclipped(Block):
    """A layer whose attention takes no largest logits."""

    @property
    def _shaped(self):
        return dataclasses.replace(super()._shaped, qk_clip=0.0)


OF_ONES_OWN = {
    "model.dense": (LoRA, {}, "scales the kernels of the package's projections, and model.dense=.* makes others"),
    "model.kinds": (
        {"side": Unclipped},
        {"layers_of": "dense side"},
        "clips heads of the package's attention, which layers 'side' of model.kinds=.*Unclipped.* do not have",
    ),
}


@pytest.mark.parametrize("key", OF_ONES_OWN)
def test_parts_of_ones_own_whose_heads_it_cannot_scale_are_refused(key):
    code, changes, message = OF_ONES_OWN[key]
    base = settings_of(layers=2, attention="gqa", qk_clip=LIMIT, schedule="gpipe")
    settings = read_settings(base, model={key.removeprefix("model."): code, **changes})
    with pytest.raises(ConfigError, match=f"^model.qk_clip={LIMIT} {message}; use qk_clip=0, or "):
        planned(ShardedModel(settings, mesh_of(1, 1, 1)))


def planned(model):
    """The shapes of a training state."""
    return abstract_state(model, make_optimizer(model.settings.optimizer, 1000, model.plan.rows))


def frozen(name, words="", **changes):
    model = model_on((1, 1, 1), name, **changes)
    return model.replace(optimizer=dataclasses.replace(model.settings.optimizer, frozen=words))


@pytest.mark.parametrize(("name", "words"), [("gqa", "blocks/attention/q"), ("mha", "blocks/attention/k")])
def test_projections_that_are_not_trained_are_refused(name, words):
    message = f"scales {words}/.* down, which optimizer.frozen='{words}' does not train; use qk_clip=0, or train it"
    with pytest.raises(ConfigError, match=message):
        planned(frozen(name, words))


def test_adapters_are_refused_by_their_key():
    with pytest.raises(ConfigError, match="which model.lora_rank=2 does not train; use qk_clip=0, or lora_rank=0"):
        planned(model_on((1, 1, 1), "gqa", lora_rank=2))


def test_keys_that_heads_share_may_be_frozen():
    assert planned(frozen("gqa", "blocks/attention/k"))


def test_a_limit_may_become_another_but_not_come_or_go():
    saved = read_settings(get_config(), model={"qk_clip": 2.0}).to_dict()
    others = [read_settings(get_config(), model={"qk_clip": limit}).to_dict() for limit in (3.0, 0.0)]
    reasons = [why_not_this_run(1, saved, other) for other in others]
    assert reasons == ["", "it has other settings: model.qk_clip=2.0 there, 0.0 here"]
    begun = read_settings(get_config()).to_dict()
    assert "model.qk_clip=0.0 there, 2.0 here" in why_not_this_run(1, begun, saved)
