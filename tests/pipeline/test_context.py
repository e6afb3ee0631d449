"""Context parallelism changes nothing: loss, gradients, logits and activations are those of the plain model."""

import functools
import itertools
import random

import jax
import numpy as np
import pytest
from support.pairwise import few_fast, pairs_of, pairwise_cases
from support.plain_model import plain_logits
from support.tiny_model import HIDDEN_CUT, SCHEDULES, SEQ, SEQ_CUT, build, make_batch, params_of
from test_parity import COSTS, CUTS, GRADIENT_ERROR, LOSS_ERROR, check_parity, is_empty, name_of

from parallax.errors import ConfigError

FORMS = ["all_gather", "ring", "ulysses"]
FACTORS = CUTS | {"microbatches": [4], "context": FORMS, "schedule": list(SCHEDULES)} | COSTS
# Context beside each other axis: beside a pipeline alone, beside data and tensor ranks, and beside replicas.
FEW = [(2, 1, 1, 1, 4), (1, 2, 2, 1, 2), (1, 1, 1, 2, 4)]
MESHES = [*FEW, (1, 1, 1, 1, 8), (1, 2, 1, 1, 4), (1, 1, 2, 1, 4), (2, 1, 2, 1, 2), (2, 2, 1, 1, 2), (4, 1, 1, 1, 2)]


@functools.cache
def cases(*meshes):
    """Cases in which every two settings meet, chosen among some of all, which are too many."""
    pick, factors = random.Random(0), FACTORS | {"mesh": meshes}
    drawn = ({key: pick.choice(values) for key, values in factors.items()} for _ in range(4000))
    return pairwise_cases([case for case in drawn if not is_empty(case)])


def check(case, record_property, **how):
    check_parity(SCHEDULES[case["schedule"]] | case, record_property, **how)


@pytest.mark.parametrize("meshes", [FEW, MESHES], ids=len)
def test_every_pair_of_settings_is_in_a_case(meshes):
    settings = [(key, value) for key, values in (FACTORS | {"mesh": meshes}).items() for value in values]
    pairs = (pair for pair in itertools.combinations(settings, 2) if pair[0][0] != pair[1][0])
    wanted = {pair for pair in pairs if not is_empty(dict(pair) | {"microbatches": 4})}
    assert wanted == {pair for case in cases(*meshes) for pair in pairs_of(case)}


def test_documents_of_the_batch_cross_shards():
    segments = make_batch()["segments"]
    for chunks in (4, 8, 16):  # of 2, 4 and 8 context ranks
        first = np.arange(SEQ // chunks, SEQ, SEQ // chunks)
        assert (segments[:, first] == segments[:, first - 1]).mean() > 0.5


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", few_fast(cases(*FEW), "context", "mesh", "attention", "residual"), ids=name_of)
def test_loss_gradients_and_update_equal_the_plain_model(case, record_property):
    check(case, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(*MESHES), ids=name_of)
def test_loss_gradients_and_update_equal_the_plain_model_on_every_mesh(case, record_property):
    check(case, record_property)


# Sizes that 3 context ranks and 2 tensor ranks divide.
OF_THREE = dict(d_model=48, d_ff=96, heads=6, kv_heads=2, d_latent=24)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "context", "attention", "schedule"),
    [
        ((1, 1, 1, 1, 3), "ring", "gqa", "gpipe"),
        pytest.param((1, 1, 2, 1, 3), "ulysses", "gqa", "one_f_one_b", marks=pytest.mark.slow),
        pytest.param((2, 1, 1, 1, 3), "all_gather", "mla", "zero_bubble", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_three_context_ranks_give_the_plain_models_gradients(mesh, context, attention, schedule, record_property):
    case = dict(mesh=mesh, context=context, attention=attention, schedule=schedule, tied=False, layers=4)
    check(case | OF_THREE, record_property, seq=18)


def test_one_context_rank_changes_no_program():
    with_axis, without = (jax.make_jaxpr(build(mesh).loss_and_grad) for mesh in ((1, 2, 1, 1, 1), (1, 2, 1)))
    model = build((1, 2, 1))
    assert str(with_axis(model.shapes, make_batch())) == str(without(model.shapes, make_batch()))


@functools.cache
def on_one_device(attention):
    model = build((1, 1, 1), attention=attention, layers=4)
    logits = jax.jit(functools.partial(plain_logits, model.config))(params_of(model), make_batch(rows=16))
    return np.asarray(logits), np.asarray(jax.jit(model.activations)(params_of(model), make_batch(rows=16)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "context", "attention", "residual", "embedding"),
    [
        ((2, 1, 2, 1, 2), "ring", "gqa", SEQ_CUT, "all_to_all"),
        ((1, 1, 2, 1, 4), "all_gather", "mla", HIDDEN_CUT, "vocab_parallel"),
        pytest.param((2, 1, 1, 1, 4), "ulysses", "gqa", HIDDEN_CUT, "all_to_all", marks=pytest.mark.slow),
        pytest.param((1, 1, 2, 1, 4), "all_gather", "mla", SEQ_CUT, "vocab_parallel", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_logits_come_in_the_order_of_the_text_and_activations_are_the_same(
    mesh, context, attention, residual, embedding
):
    how = dict(context=context, attention=attention, residual=residual, embedding=embedding)
    model, batch = build(mesh, layers=4, **how), make_batch(rows=16)
    params, (expected, seen) = params_of(model), on_one_device(attention)
    logits = jax.jit(model.logits)(params, batch["tokens"], batch["segments"], batch["positions"])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=GRADIENT_ERROR * np.abs(expected).max())
    np.testing.assert_allclose(jax.jit(model.activations)(params, batch), seen, rtol=GRADIENT_ERROR)


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", [(2, 1, 1, 1, 4), (1, 1, 2, 1, 4)], ids=str)
def test_the_forward_pass_alone_has_the_same_loss(mesh):
    batch = make_batch(rows=16)
    model, alone = (build(each, layers=4, context="ring", z_coefficient=1e-3) for each in (mesh, (1, 1, 1)))
    found, expected = (jax.jit(each.loss)(params_of(each), batch) for each in (model, alone))
    for name in ("loss", "z_loss", "tokens"):
        np.testing.assert_allclose(found[name], expected[name], rtol=LOSS_ERROR)


@pytest.mark.parametrize(
    ("mesh", "seq", "message"),
    [
        (
            (1, 1, 1, 1, 4),
            12,
            "data.seq=12 does not divide over 2 x mesh.cp=4: each context rank has two chunks of",
        ),
        ((1, 1, 8, 1, 1), 12, "data.seq=12 does not divide over mesh.tp=8; use a multiple of 8."),
        ((1, 1, 4, 1, 2), 12, "data.seq=12 does not divide over mesh.cp=2 x mesh.tp=4; use a multiple of 8."),
    ],
    ids=str,
)
def test_a_seq_that_cannot_be_cut_is_refused_before_compiling(mesh, seq, message):
    model = build(mesh)
    with pytest.raises(ConfigError) as caught:
        model.loss_and_grad(model.shapes, make_batch(rows=16, seq=seq))
    assert message in str(caught.value)
