"""QK-clip: a step's largest logits are those of a plain model on every mesh, and heads are scaled as NumPy does."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import plain_model
from support.tiny_model import build, make_batch, optimizer_config, params_of

from parallax.errors import ConfigError
from parallax.model import attention
from parallax.model.mask import Mask
from parallax.sharding.layout import named_leaves
from parallax.step.optimizer import make_optimizer
from parallax.step.qk_clip import LARGEST_LOGITS, MAX_LOGIT, with_clipped_heads
from parallax.step.step import TrainStep

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

    def attend(q, k, v, mask, *, scale, **others):
        keys = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
        scores = scale * np.einsum("BSHJ,BTHJ->BHST", np.float64(q), np.float64(keys))
        largest.append(np.where(mask.dense(q.shape[1]), scores, -np.inf).max(axis=(0, 2, 3)))
        return PLAIN_ATTEND(q, k, v, mask, scale=scale, **others)

    config = dataclasses.replace(model.config, qk_clip=0.0)
    params, batch = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), (params, batch))
    with jax.disable_jit(), mock.patch.object(plain_model, "plain_attend", attend):
        plain_model.plain_forward(config, params, batch)
    return np.stack(largest)


PLAIN_ATTEND = plain_model.plain_attend


def measured(model, params, batch):
    """The same, from a step's statistics."""
    batch = jax.device_put(batch, model.batch_sharding)
    noise = np.int32([0, 0])
    *_, statistics = jax.jit(model.loss_grads_and_statistics)(params, batch, noise)
    return np.concatenate([np.asarray(x) for name, x in statistics.items() if name.endswith(LARGEST_LOGITS)])


MESHES = [
    ((1, 1, 1), "gqa", {}),
    pytest.param((2, 2, 2), "mla", dict(schedule="one_f_one_b"), marks=pytest.mark.slow),
    pytest.param((2, 2, 2), "gqa", dict(schedule="zero_bubble_v", layers=4), marks=pytest.mark.slow),
    pytest.param((1, 2, 2, 2), "mha", dict(remat="layer"), marks=pytest.mark.slow),
    pytest.param((1, 1, 4), "gqa", {}, marks=pytest.mark.slow),  # ranks share key heads
    pytest.param((1, 1, 2, 1, 2), "gqa", dict(context="ulysses"), marks=pytest.mark.slow),
    pytest.param((1, 1, 2, 1, 2), "mla", dict(context="all_gather"), marks=pytest.mark.slow),
    pytest.param((1, 2, 1, 1, 2), "gqa", dict(context="all_gather", sliding_window=3), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "name", "changes"), MESHES)
def test_largest_logits_are_those_of_whole_rows_of_scores(mesh, name, changes):
    model, batch = model_on(mesh, name, **changes), make_batch(16)
    params = stirred(model)
    expected = np.maximum(plain_largest(model, params, batch), 0)
    assert (expected > LIMIT).any() and (expected < LIMIT).any(), expected
    np.testing.assert_allclose(measured(model, params, batch), expected, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("side", [5, 8, 16])
def test_blocks_of_any_size_give_the_largest_score(side, window):
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, 16, heads, 8)).astype(np.float32) for heads in (4, 2))
    mask = Mask(jnp.asarray(make_batch(2)["segments"]), window=window)
    scores = 0.5 * np.einsum("BSHJ,BTHJ->BHST", q, k.repeat(2, axis=2))
    expected = np.where(mask.dense(16), scores, -np.inf).max(axis=(0, 2, 3))
    with mock.patch.object(attention, "LOGITS_SIDE", side):
        np.testing.assert_allclose(attention.largest_logits(q, k, mask, scale=0.5), expected, rtol=1e-5)


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
