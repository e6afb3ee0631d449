"""The same parameters and batch give the same loss, gradients and update on every mesh, however a model is cut."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import optax
import pytest
from support.collective_order import run_in_order
from support.pairwise import few_fast, pairs_of, pairwise_cases
from support.plain_model import plain_losses_and_grad
from support.tiny_model import HIDDEN_CUT, MESHES, SEQ, SEQ_CUT, build, make_batch, optimizer_config, params_of

from parallax.config.sections import POLICY_NAMES, ModelConfig
from parallax.step.optimizer import make_optimizer

CUTS = {
    "mesh": MESHES,
    "attention": ["mla", "gqa"],
    "residual": [HIDDEN_CUT, SEQ_CUT],
    "tensor_parallel": ["column_row", "scatter"],
    "embedding": ["vocab_parallel", "all_to_all"],
    "microbatches": [1, 4, 8],
}
COSTS = {
    "remat": ["none", "attention", "layer", "stage"],  # "elementwise" differs from "attention" in names: see below
    "policy": list(POLICY_NAMES),
    "prefetch": [0, 1],
    "reduce": ["float32", "compute"],
    "tied": [True, False],
}
# What models of other projects have besides.
IMPORTED = dict(qk_norm=True, qkv_bias=True, rope_scaling="llama3", rope_factor=8.0, rope_fast_turns=4.0) | dict(
    rope_original_seq=8, rope_temperature=1.2, rope_magnitude=0.9
)
Z_COEFFICIENT = 1e-3

# Adam's first step is learning_rate * g / (|g| + eps), of slope learning_rate / eps at most: with the usual eps it is
# the sign of g, and where g is nothing but rounding, so is its sign. This eps is of the size of the gradients.
LEARNING_RATE, EPS = 1e-2, 1e-3
LOSS_ERROR, GRADIENT_ERROR = 1e-6, 1e-5
ROUNDING = 2.0**-22  # two last places of a float32


def grid(factors):
    """All combinations that can be; one microbatch only where there is no pipeline, for on several stages it is all
    bubble, and nothing gathered ahead where nothing is gathered layer by layer."""
    cases = [dict(zip(factors, values)) for values in itertools.product(*factors.values())]
    return [case for case in cases if not is_empty(case)]


def is_empty(case):
    ahead_of_all = case.get("prefetch") == 1 and case.get("policy", "zero3") not in ("lean", "zero3")
    all_bubble = "mesh" in case and case.get("microbatches") == 1 and case["mesh"][0] > 1
    return ahead_of_all or all_bubble


def whole_grid(cuts, costs):
    """Every way to cut, with the settings of cost taking turns."""
    return [case | cost for case, cost in zip(grid(cuts), itertools.cycle(grid(costs)))]


def name_of(case):
    words = {HIDDEN_CUT: "hidden_cut", SEQ_CUT: "seq_cut"}
    mesh, *rest = case.values()
    tied = ["tied" if rest.pop() else "untied"]
    return "-".join(["x".join(map(str, mesh)), *(words.get(word, str(word)) for word in rest), *tied])


PAIRS = pairwise_cases(grid(CUTS | COSTS))


def test_every_pair_of_settings_is_in_a_case():
    wanted = {pair for case in grid(CUTS | COSTS) for pair in pairs_of(case)}
    assert wanted == {pair for case in PAIRS for pair in pairs_of(case)}
    assert len(PAIRS) <= 40  # eight meshes with five policies each


@functools.cache
def batch(seq):
    return make_batch(seq=seq)


def test_the_plain_model_computes_no_attention_of_ours(monkeypatch):
    model = build((1, 1, 1))
    params = params_of(model)
    monkeypatch.setattr("parallax.model.attention.blockwise_attention", None)
    plain_losses_and_grad(model.config, params, batch(SEQ))


def optimizer(rows):
    changes = dict(learning_rate=LEARNING_RATE, eps=EPS, schedule="constant", warmup_steps=0, clip_norm=1.0)
    return make_optimizer(optimizer_config(**changes), steps=10, rows=rows)


def one_update(tx, params, grads):
    updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates)


OF_MODEL = [key.name for key in dataclasses.fields(ModelConfig)]


@functools.cache
def reference(seq, **changes):
    """Losses, gradients and updated parameters of the plain model; how it is cut is no part of it."""
    model = build((1, 1, 1), **changes)
    params = params_of(model)
    losses, grads = plain_losses_and_grad(model.config, params, batch(seq), Z_COEFFICIENT)
    update = functools.partial(one_update, optimizer(model.plan.rows))
    # Compiled as one program: else each of the optimizer's operations is compiled for itself, two seconds of them.
    updated = jax.jit(update)(params, jax.tree.map(np.float32, grads))
    return losses, grads, jax.tree.map(np.asarray, updated)


def check_parity(case, record_property, seq=SEQ):
    model = build(z_coefficient=Z_COEFFICIENT, **case)
    tx = optimizer(model.plan.rows)

    def step(params, batch):
        metrics, grads = model.loss_and_grad(params, batch)
        return (metrics["loss"], metrics["z_loss"]), grads, one_update(tx, params, grads)

    actual = run_in_order(step, params_of(model), batch(seq))
    expected = reference(seq, **{key: case[key] for key in OF_MODEL if key in case})
    np.testing.assert_allclose(actual[0], expected[0], rtol=LOSS_ERROR)
    errors = leaf_errors(actual[1], expected[1])
    record_property("largest relative gradient error", float(max(errors.values())))
    assert {name: error for name, error in errors.items() if not error <= GRADIENT_ERROR} == {}
    check_updated(actual[2], expected[2], expected[1])


def leaf_errors(actual, expected):
    """Of each leaf the largest difference, over the leaf's largest entry."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(actual), strict=True)
    return {jax.tree_util.keystr(path): np.abs(a - e).max() / np.abs(e).max() for (path, e), a in pairs}


def check_updated(actual, expected, grads):
    """As far apart as gradients within GRADIENT_ERROR can bring the parameters."""

    def check(actual, expected, grad):
        slope = LEARNING_RATE / EPS
        allowed = slope * GRADIENT_ERROR * np.abs(grad).max() + ROUNDING * (LEARNING_RATE + np.abs(expected))
        assert (np.abs(actual - expected) <= allowed).all()

    jax.tree.map(check, actual, expected, grads)


IN_FAST_CASES = ("policy", "attention", "residual", "tensor_parallel", "embedding")


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", few_fast(PAIRS, *IN_FAST_CASES), ids=name_of)
def test_loss_gradients_and_update_equal_the_plain_model(case, record_property):
    check_parity(case, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("attention", CUTS["attention"])
def test_what_stands_between_products_made_again_gives_the_same(attention, record_property):
    cut = dict(mesh=(2, 2, 2), residual=SEQ_CUT, tensor_parallel="column_row", embedding="vocab_parallel", tied=True)
    cost = dict(microbatches=4, remat="elementwise", policy="zero3", prefetch=0, reduce="compute")
    check_parity(cut | cost | dict(attention=attention, schedule="zero_bubble"), record_property)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "family"), [((2, 2, 2), "column_row"), ((1, 1, 8), "scatter")])
def test_normed_heads_and_llama3_scaling_are_the_same_on_meshes(mesh, family, record_property):
    cut = dict(mesh=mesh, residual=SEQ_CUT, tensor_parallel=family, embedding="vocab_parallel", tied=False)
    cost = dict(microbatches=4, remat="layer", policy="zero3", prefetch=0, reduce="float32")
    check_parity(cut | cost | IMPORTED | dict(attention="gqa"), record_property)


@pytest.mark.slow
@pytest.mark.parametrize("case", whole_grid(CUTS, COSTS), ids=name_of)
def test_loss_gradients_and_update_equal_the_plain_model_on_the_whole_grid(case, record_property):
    check_parity(case, record_property)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("mesh", "policy"), [((2, 2, 1, 2), "zero3"), ((1, 2, 2, 2), "zero1"), ((1, 1, 1, 8), "ddp")], ids=str
)
def test_replicas_give_the_plain_models_gradients(mesh, policy, record_property):
    check_parity(dict(mesh=mesh, policy=policy, attention="gqa", tied=False), record_property)


# The window is shorter than a chunk of a context rank, and layers that differ in all that is data share a stack.
KINDS = dict(
    layers_of="(local*2 global)*2 local*2",
    kinds="local=(sliding_window=3, rope_theta=100.0, rope_scaling='yarn', rope_factor=4.0, rope_original_seq=8) "
    "global=(rope=False)",
)
# Those of another width have a stack of their own.
SHAPES = dict(kinds=KINDS["kinds"].replace("rope=False", "rope=False, d_ff=96"))
LAYERS_OF_KINDS = [
    dict(mesh=(2, 1, 1, 1, 4), context="ring", attention="gqa", schedule="one_f_one_b", remat="elementwise") | SHAPES,
    dict(mesh=(1, 1, 2, 1, 4), context="ring", attention="gqa", schedule="gpipe", remat="elementwise"),
    dict(mesh=(2, 2, 2), attention="mla", schedule="zero_bubble", tensor_parallel="scatter", residual=SEQ_CUT) | SHAPES,
    dict(mesh=(4, 1, 2), attention="gqa", schedule="dualpipe_v", policy="zero2", remat="norm ffn") | SHAPES,
    dict(mesh=(1, 1, 2, 1, 4), context="ring", attention="mla", remat="none", tensor_parallel="scatter"),
    dict(mesh=(2, 2, 1, 1, 2), context="all_gather", attention="mla", schedule="zero_bubble", remat="none"),
    dict(mesh=(2, 2, 2), attention="gqa", schedule="interleaved", virtual=2, remat="stage", residual=SEQ_CUT),
    dict(mesh=(1, 2, 1, 1, 4), context="ulysses", attention="gqa", kv_heads=1, remat="layer", policy="zero1"),
    dict(mesh=(1, 1, 2, 1, 4), context="all_gather", attention="gqa", remat="elementwise", residual=SEQ_CUT),
    dict(mesh=(1, 2, 1, 1, 4), context="all_gather", attention="gqa", remat="layer"),
    dict(mesh=(1, 1, 2, 1, 4), context="all_gather", order="contiguous", attention="mla", remat="none"),
    dict(mesh=(2, 1, 1, 1, 4), context="ring", order="contiguous", attention="gqa", schedule="zero_bubble"),
    dict(mesh=(2, 1, 2, 1, 2), context="all_gather", attention="gqa", kernel="splash", seq=512, remat="attention"),
    dict(mesh=(4, 2, 1), attention="mla", schedule="zero_bubble_v", prefetch=1),
    dict(mesh=(2, 4, 1), attention="gqa", schedule="dualpipe_v", microbatches=8, remat="attention"),
    dict(mesh=(4, 2, 1), attention="gqa", layers=6, layers_of="(local*2 global)*2", schedule="gpipe", remat="layer"),
]


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", LAYERS_OF_KINDS, ids=lambda case: "-".join(map(str, case.values())))
def test_layers_with_windows_and_positions_of_their_own_are_the_same_on_meshes(case, record_property):
    seq = case.get("seq", SEQ)
    check_parity(KINDS | {key: value for key, value in case.items() if key != "seq"}, record_property, seq)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("layers", ["local*6", "(local*2 global)*2"], ids=["alike", "mixed"])
@pytest.mark.parametrize(
    "cut",
    [
        dict(mesh=(1, 1, 2, 1, 4), remat="attention", tensor_parallel="scatter"),
        dict(mesh=(2, 1, 1, 1, 4), schedule="zero_bubble", remat="layer", policy="zero1"),
        dict(mesh=(1, 2, 1, 1, 4), remat="none", residual=SEQ_CUT),
    ],
    ids=lambda cut: cut["remat"],
)
def test_latents_that_no_query_sees_are_not_missed(cut, layers, order, record_property):
    window = "local=(sliding_window=3)" + " global=()" * ("global" in layers)
    model = dict(attention="mla", layers=6, layers_of=layers, kinds=window)
    check_parity(cut | model | dict(context="all_gather", order=order), record_property)
