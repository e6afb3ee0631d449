"""What a block can say of its attention, its factors and its mixture: each choice gives the plain model's loss
and gradients on every mesh. What an update makes of gradients has nothing to do with these choices."""

import functools

import jax
import numpy as np
import pytest
from support.collective_order import run_in_order
from support.plain_model import plain_losses_and_grad, without_close_choices
from support.tiny_model import HIDDEN_CUT, SEQ, SEQ_CUT, build, make_batch, params_of, section
from test_parity import GRADIENT_ERROR, LOSS_ERROR, Z_COEFFICIENT, leaf_errors

from parallax.config.sections import CLAMPED
from parallax.model import attention
from parallax.pipeline import loss_and_grads

NORMED = dict(attention="gqa", qk_norm=True)
CHOICES = {
    "attention_scale": dict(attention_scale=0.5),
    "score_cap": dict(score_cap=2.0),
    "sinks": dict(sinks=True),
    "embedding_scale": dict(embedding_scale=3.0),
    "residual_scale": dict(residual_scale=0.7),
    "logit_scale": dict(logit_scale=1.5),
    "logit_cap": dict(logit_cap=2.0),
    "rope_fraction": dict(attention="gqa", rope_fraction=0.5),
    "no positions": dict(rope=False),
    "norm over heads": NORMED | dict(qk_norm_over="projection"),
    "norm after rope": NORMED | dict(qk_norm_after_rope=True),
    "norm of one plus": NORMED | dict(qk_norm_scale="one_plus"),
    "norm over heads after rope": NORMED
    | dict(qk_norm_over="projection", qk_norm_after_rope=True, qk_norm_scale="one_plus"),
    "router_shift": dict(layers_of="moe*4", router_shift=True),
    "shared_gate": dict(layers_of="(dense moe)*2", shared_experts=2, shared_gate=True),
    "clamped": dict(layers_of="moe*4", expert_activation="clamped", expert_limit=0.5),
    "expert_bias": dict(layers_of="moe*4", expert_bias=True),
    "clamped MLP": dict(activation="clamped", activation_limit=0.5),
    "clamped shared experts": dict(layers_of="(dense moe)*2", shared_experts=2, activation="clamped"),
}
# Rows have twice as many tokens as the context before, and those of two context ranks as many.
SCALED = {
    "linear": dict(rope_scaling="linear", rope_factor=4.0),
    "llama3": dict(rope_scaling="llama3", rope_factor=4.0, rope_original_seq=SEQ // 2),
    "longrope": dict(attention="gqa", rope_scaling="longrope", rope_original_seq=SEQ // 2, rope_magnitude=1.25)
    | dict(rope_short_factors="1.0 1.5 2.0 2.5", rope_long_factors="2.0 3.0 4.0 5.0"),
}
EXPERTS = dict(experts=4, experts_per_token=2, d_expert=16)
ALL = {key: value for choice in CHOICES.values() for key, value in choice.items()} | dict(rope_fraction=0.5)
ALL |= dict(layers_of="(dense moe)*2", attention_scale=0.9)
CUT = dict(layers=4, attention="mla", residual=SEQ_CUT, tensor_parallel="column_row", embedding="vocab_parallel")
CUT |= dict(tied=False, microbatches=4, remat="layer", policy="zero3", prefetch=0, reduce="float32") | EXPERTS
RING = dict(mesh=(1, 1, 2, 1, 2), context="ring")


@functools.lru_cache(maxsize=1)  # cases of one model follow each other
def plain(config, embeddings):
    """(batch, losses, gradients)"""
    model = build((1, 1, 1), **{key: getattr(config, key) for key in section("model")})
    params, batches = values_of(model, embeddings), [make_batch(seed=seed) for seed in range(50)]
    chooses = config.has_mixtures or config.activation == CLAMPED
    batch = without_close_choices(config, params, batches) if chooses else batches[0]
    return batch, *plain_losses_and_grad(config, params, batch, Z_COEFFICIENT)


def values_of(model, embeddings):
    """Initial values, with the embedding's table times this."""
    params = params_of(model)
    return params | {"embedding": {"table": embeddings * params["embedding"]["table"]}}


def check(choice, embeddings=1.0, **how):
    model = build(z_coefficient=Z_COEFFICIENT, **(CUT | how | choice))
    batch, losses, expected = plain(model.config, embeddings)
    metrics, grads, *_ = run_in_order(model.loss_and_grad, values_of(model, embeddings), batch)
    np.testing.assert_allclose((metrics["loss"], metrics["z_loss"]), losses, rtol=LOSS_ERROR)
    # The place of a router's load is empty where nothing reads it.
    expected = jax.tree.map(lambda actual, leaf: leaf if actual.size else actual, grads, expected)
    grads, expected = ([leaf for leaf in jax.tree.leaves(tree) if leaf.size] for tree in (grads, expected))
    wrong = {name: error for name, error in leaf_errors(grads, expected).items() if not error <= GRADIENT_ERROR}
    assert wrong == {}


def test_all_choices_together_give_the_plain_models_gradients():
    check(ALL, **RING)


# Axes pp, dp, tp, replica, cp, ep.
AXES = {
    "pp": dict(mesh=(4, 1, 1), schedule="zero_bubble", remat="attention"),
    "dp": dict(mesh=(1, 2, 2), policy="lean", tensor_parallel="scatter", residual=HIDDEN_CUT),
    "tp": dict(mesh=(1, 1, 4), embedding="all_to_all", remat="none"),
    "more ranks than kv_heads": dict(mesh=(1, 1, 8), tensor_parallel="scatter", kv_heads=2),
    "ring": RING,
    "ulysses": dict(mesh=(1, 1, 2, 1, 2), context="ulysses", tied=True),
    "all_gather": dict(mesh=(2, 1, 1, 1, 2), context="all_gather", schedule="one_f_one_b"),
    "ep": dict(mesh=(2, 1, 2, 1, 1, 2), schedule="dualpipe_v"),
}


SCALED_FIRST = {
    "all together": ALL | dict(qk_norm_after_rope=False),
    "another temperature in some layers": dict(attention="gqa", kinds="far=(rope_scaling='yarn', rope_factor=4.0)")
    | dict(layers_of="(dense far)*2"),
    "norm after rope": CHOICES["norm after rope"],  # they stay as they are
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("axis", ["ring", "pp"])
@pytest.mark.parametrize("name", SCALED_FIRST)
def test_queries_scaled_first_and_saved_means_of_norms_give_the_plain_models_gradients(name, axis, monkeypatch):
    asked = []
    monkeypatch.setattr(attention, "scales_queries_first", lambda: asked.append(True) or True)
    monkeypatch.setattr(loss_and_grads, "saves_means_of_norms", lambda mesh: True)
    check(SCALED_FIRST[name], **AXES[axis])
    assert asked


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", CHOICES | SCALED)
def test_each_choice_gives_the_plain_models_gradients_on_each_axis(name, axis):
    check((CHOICES | SCALED)[name], **AXES[axis])
