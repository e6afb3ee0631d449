"""Mixtures change nothing on meshes: loss, gradients, load and updates are those of a plain model, whose experts all
compute all tokens."""

import functools
import itertools
import math
import pathlib
import random
import subprocess
import sys

import jax
import numpy as np
import pytest
from support.collective_order import run_in_order
from support.pairwise import pairs_of, pairwise_cases
from support.plain_model import closest_choices, plain_logits, plain_losses_and_grad, without_close_choices
from support.tiny_model import HIDDEN_CUT, SCHEDULES, SEQ, SEQ_CUT, build, make_batch, optimizer_config, params_of
from test_parity import (
    COSTS,
    CUTS,
    EPS,
    GRADIENT_ERROR,
    LEARNING_RATE,
    LOSS_ERROR,
    Z_COEFFICIENT,
    check_updated,
    leaf_errors,
    one_update,
)

from parallax.config.sections import ModelConfig
from parallax.errors import ConfigError
from parallax.inference.capture import capture_activations
from parallax.sharding.layout import named_leaves
from parallax.step.optimizer import make_optimizer
from parallax.step.statistics import with_statistics

# Losses that are large enough to be seen.
MIXTURE = dict(experts=8, experts_per_token=2, d_expert=16, balance_coefficient=0.1, router_z_coefficient=0.01)
SIGMOID = dict(router_score="sigmoid", router_scale=2.5, router_groups=4, router_groups_chosen=2)
MODELS = {
    "alike": dict(layers_of="moe*8", attention="gqa", tied=True),
    "dense first": dict(layers_of="dense moe*7", attention="mla", shared_experts=1, router_normalized=False)
    | dict(experts_per_token=3, router_groups=4, router_groups_chosen=2, router_scale=2.0),
    "in turn": dict(layers_of="(dense moe)*4", attention="gqa", tied=False, experts_per_token=1, shared_experts=1),
    # On the first ranks and in the first stages there is none.
    "late": dict(layers_of="dense*5 moe*2", layers=7, attention="mla", shared_experts=2, tied=False, **SIGMOID),
}
FACTORS = {"model": [*MODELS], "schedule": list(SCHEDULES), "context": ["all_gather", "ring", "ulysses"]}
FACTORS |= {"exchange": ["gather", "ragged"], "expert_chunk_tokens": [0, 8]}
FACTORS |= {key: CUTS[key] for key in ("residual", "tensor_parallel", "embedding")}
FACTORS |= {key: values for key, values in COSTS.items() if key != "tied"}
# Where a test says to which experts tokens go.
STEERED = dict(layers_of="dense moe*2 dense", layers=4, attention="gqa", tied=False)
MODELS |= {
    "steered": STEERED | dict(router_score="sigmoid"),
    "twins": STEERED | dict(experts_per_token=1, router_normalized=False),
}
# As gpt-oss: windows in turn, sinks, biases everywhere, clamped experts, yarn that rounds nothing.
MODELS["gpt-oss"] = dict(layers_of="(local moe)*2", layers=4, kinds="local=(base='moe', sliding_window=5)", tied=False)
MODELS["gpt-oss"] |= dict(attention="gqa", sinks=True, qkv_bias=True, out_bias=True, router_shift=True)
MODELS["gpt-oss"] |= dict(expert_bias=True, expert_activation="clamped", expert_limit=0.5, rope_scaling="yarn")
MODELS["gpt-oss"] |= dict(rope_factor=4.0, rope_original_seq=8, rope_truncate=False)
# pp dp tp replica cp ep: experts in a pipeline, and there beside each other axis.
FEW = [(2, 1, 1, 1, 1, 4), (2, 1, 2, 1, 1, 2), (2, 2, 1, 1, 1, 2), (2, 1, 1, 2, 1, 2), (2, 1, 1, 1, 2, 2)]
MESHES = [
    *FEW, (1, 1, 1, 1, 1, 8), (1, 1, 2, 1, 1, 4), (1, 2, 1, 1, 1, 4), (1, 1, 1, 2, 1, 4), (1, 1, 1, 1, 4, 2),
    (4, 1, 1, 1, 1, 2), (1, 2, 2, 1, 1, 2), (1, 1, 2, 1, 2, 2),
]  # fmt: skip
BALANCE_RATE = 1e-2
ROWS = 32


def is_empty(case):
    """What is refused: more stages than layers, and to gather ahead where no layer is gathered when it runs or none
    follows one of its own kind."""
    stages = case.get("mesh", (1,))[0] * (
        2 if case.get("schedule") in ("interleaved", "zero_bubble_v", "dualpipe_v") else 1
    )
    if case.get("model") == "late" and stages > 7:
        return True
    if case.get("prefetch") != 1:
        return False
    known = {"model", "mesh", "schedule"} <= case.keys()
    return case.get("policy", "zero3") not in ("lean", "zero3") or (known and not can_prefetch(case["model"], stages))


@functools.cache
def can_prefetch(model, stages):
    """Whether, of some consecutive places of all stages, each has a layer of one kind; or a stage has one layer."""
    kinds = np.array(ModelConfig(**{"layers": 8} | MODELS[model]).layer_kinds)
    columns = [{*column} for column in itertools.zip_longest(*np.array_split(kinds, stages))]
    alike = [column - {None} for column in columns]
    return len(columns) == 1 or any(len(one) == 1 and one == other for one, other in itertools.pairwise(alike))


@functools.cache
def cases(*meshes):
    """Cases in which every two settings meet, chosen among some of all, which are too many."""
    pick, factors = random.Random(0), FACTORS | {"mesh": meshes}
    drawn = ({key: pick.choice(values) for key, values in factors.items()} for _ in range(4000))
    return pairwise_cases([case for case in drawn if not is_empty(case)])


@functools.cache
def few_cases():
    """Of those on few meshes some in which every setting is."""
    left, chosen = set(settings(FEW)), []
    while left:
        chosen.append(max(cases(*FEW), key=lambda case: len(left & {*case.items()})))
        left -= {*chosen[-1].items()}
    return chosen


def settings(meshes):
    return [(key, value) for key, values in (FACTORS | {"mesh": meshes}).items() for value in values]


def name_of(case):
    words = {HIDDEN_CUT: "hidden_cut", SEQ_CUT: "seq_cut"}
    return "-".join("x".join(map(str, v)) if k == "mesh" else words.get(v, str(v)) for k, v in case.items())


def test_every_pair_of_settings_is_in_a_case():
    pairs = (pair for pair in itertools.combinations(settings(MESHES), 2) if pair[0][0] != pair[1][0])
    wanted = {pair for pair in pairs if not is_empty(dict(pair))}
    assert wanted == {pair for case in cases(*MESHES) for pair in pairs_of(case)}
    assert len(few_cases()) <= 7


# ---- the plain model


def mixture(mesh, name, **how):
    sizes = MIXTURE | MODELS[name]
    return build(mesh, z_coefficient=Z_COEFFICIENT, **sizes | how)


@pytest.mark.parametrize(
    ("how", "form"),
    [
        ({"remat": "elementwise"}, "ragged again"),
        ({"remat": "dispatch"}, "ragged again"),
        ({"remat": "norm"}, "ragged"),  # tokens are saved
        ({"remat": "elementwise experts"}, "ragged"),  # gate and up are recomputed, which takes them
        ({"remat": "layer"}, "ragged"),
        ({"remat": "elementwise", "expert_chunk_tokens": 8}, "ragged"),
        ({"remat": "elementwise", "schedule": "zero_bubble"}, "ragged"),
        ({"remat": "elementwise", "exchange": "gather"}, "gather"),
    ],
    ids=str,
)
def test_the_backward_pass_sends_tokens_again_where_it_recomputes_nothing_else_of_experts(how, form):
    model = mixture((2, 1, 1, 1, 1, 2), "alike", **{"exchange": "ragged"} | how)
    assert model.parts.blocks["moe"].exchange == form


@functools.cache
def batch_of(name):
    model = mixture((1, 1, 1), name)
    return without_close_choices(model.config, params_of(model), [make_batch(ROWS, seed=seed) for seed in range(50)])


def optimizer(rows):
    changes = dict(learning_rate=LEARNING_RATE, eps=EPS, schedule="constant", warmup_steps=0, clip_norm=1.0)
    return make_optimizer(optimizer_config(balance_rate=BALANCE_RATE, **changes), steps=10, rows=rows)


def expected_of(name, params, batch):
    """(losses, gradients, updated parameters) of the plain model, with the load as the biases' gradient."""
    model = mixture((1, 1, 1), name)
    losses, grads = plain_losses_and_grad(model.config, params, batch, Z_COEFFICIENT, model.loss_config)
    updated = jax.jit(functools.partial(whole_update, model))(params, jax.tree.map(np.float32, grads))
    return losses, grads, jax.tree.map(np.asarray, updated)


def whole_update(model, params, grads):
    """Parameters after an update with gradients that have the counts in the biases' places."""
    updated = one_update(optimizer(model.plan.rows), params, grads)
    return with_statistics(model.plan.statistics, updated, named_leaves(grads), BALANCE_RATE)


@functools.cache
def reference(name):
    return expected_of(name, jax.tree.map(np.asarray, params_of(mixture((1, 1, 1), name))), batch_of(name))


def router(tree):
    """The mixtures' routers in a tree of parameters."""
    return tree["blocks"].get("moe", tree["blocks"])["mlp"]["router"]


# ---- on a mesh


def step_on(model):
    """(losses, gradients, updated parameters) of parameters and a batch, as one program."""

    def step(params, batch):
        metrics, grads, counts = model.loss_grads_and_statistics(params, batch)
        assert all(not named_leaves(grads)[name].size for name in counts)
        grads = jax.tree.unflatten(jax.tree.structure(grads), (named_leaves(grads) | counts).values())
        return (metrics["loss"], metrics["z_loss"]), grads, whole_update(model, params, grads)

    return lambda params, batch: run_in_order(step, jax.device_put(params, model.shardings), batch)


def check(found, expected, record_property):
    np.testing.assert_allclose(found[0], expected[0], rtol=LOSS_ERROR)
    np.testing.assert_array_equal(router(found[1])["bias"], router(expected[1])["bias"])
    errors = leaf_errors(found[1], expected[1])
    record_property("largest relative gradient error", float(max(errors.values())))
    assert {name: error for name, error in errors.items() if not error <= GRADIENT_ERROR} == {}
    np.testing.assert_array_equal(router(found[2])["bias"], router(expected[2])["bias"])
    check_updated(found[2], expected[2], expected[1])


def check_case(case, record_property):
    name, how = case["model"], SCHEDULES[case["schedule"]] | {"microbatches": 4} | case
    model = mixture(how.pop("mesh"), how.pop("model"), **how)
    check(step_on(model)(params_of(model), batch_of(name)), reference(name), record_property)


def with_the_first_of_each_model(cases):
    """The fast tests have one case of each model with layers of several kinds: a case takes some ten seconds."""
    firsts = {case["model"]: at for at, case in reversed([*enumerate(cases)]) if case["model"] != "alike"}
    return [
        pytest.param(case, marks=[] if at in firsts.values() else pytest.mark.slow, id=name_of(case))
        for at, case in enumerate(cases)
    ]


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", with_the_first_of_each_model(few_cases()))
def test_loss_gradients_and_update_equal_the_plain_model(case, record_property):
    check_case(case, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(*MESHES), ids=name_of)
def test_loss_gradients_and_update_equal_the_plain_model_on_every_mesh(case, record_property):
    check_case(case, record_property)


@pytest.mark.slow
def test_a_bias_moves_by_the_rate_towards_an_even_load():
    _, grads, updated = reference("late")
    before, counts = router(params_of(mixture((1, 1, 1), "late")))["bias"], router(grads)["bias"]
    rate = np.float32(BALANCE_RATE) * np.sign(counts.mean(-1, keepdims=True) - counts).astype(np.float32)
    np.testing.assert_array_equal(router(updated)["bias"], np.asarray(before) + rate)
    tokens = batch_of("late")["tokens"].size
    np.testing.assert_array_equal(counts.sum(-1), 2 * tokens)


@pytest.mark.parametrize("name", ["alike", pytest.param("late", marks=pytest.mark.slow)])
def test_initial_values_are_bitwise_the_same_on_every_mesh(name):
    whole = jax.tree.map(np.asarray, mixture((1, 1, 1), name).init(0))
    for mesh in [(2, 1, 2, 1, 1, 2)] if name == "alike" else MESHES:
        jax.tree.map(np.testing.assert_array_equal, mixture(mesh, name).init(0), whole)


@pytest.mark.slow
def test_a_model_like_gpt_oss_is_the_same_over_context_expert_and_tensor_ranks(record_property):
    case = dict(mesh=(1, 1, 2, 1, 2, 2), model="gpt-oss", schedule="gpipe", context="ring", exchange="ragged")
    check_case(case, record_property)


HOSTS = [
    dict(mesh=(1, 1, 2, 1, 1, 4), model="in turn", schedule="gpipe", exchange_hosts=2, remat="elementwise"),
    dict(mesh=(2, 1, 1, 1, 1, 4), model="late", schedule="zero_bubble_v", exchange_hosts=2, remat="router"),
    dict(mesh=(1, 1, 1, 1, 1, 8), model="dense first", schedule="gpipe", exchange_hosts=4),
    dict(mesh=(1, 1, 1, 1, 1, 8), model="alike", schedule="gpipe", exchange_hosts=2, expert_chunk_tokens=8),
    dict(mesh=(1, 2, 1, 1, 1, 4), model="gpt-oss", schedule="gpipe", exchange_hosts=2, residual=SEQ_CUT),
    dict(mesh=(2, 1, 2, 1, 1, 2), model="late", schedule="one_f_one_b", exchange_hosts=2, remat="elementwise"),
    dict(mesh=(2, 1, 1, 1, 1, 4), model="dense first", schedule="interleaved", exchange_hosts=2, remat="layer"),
]


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", HOSTS, ids=name_of)
def test_tokens_that_are_sent_once_to_each_host_give_the_plain_models_step(case, record_property):
    check_case(case | {"exchange": "ragged"}, record_property)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        dict(mesh=(2, 2, 2, 1, 2, 2), model="late", schedule="one_f_one_b", context="ring", exchange="ragged"),
        dict(mesh=(2, 2, 2, 1, 2, 2), model="gpt-oss", schedule="zero_bubble", context="ring", exchange="ragged"),
        dict(mesh=(2, 2, 2, 2, 2, 2), model="gpt-oss", schedule="one_f_one_b", context="all_gather", exchange="gather"),
    ],
    ids=["late", "gpt-oss", "gpt-oss, replicas"],
)
def test_six_axes_give_the_plain_models_gradients(case):
    """In a process of its own, for this one has eight devices."""
    program = f"""
import sys
sys.path[:0] = {[str(folder) for folder in (pathlib.Path(__file__).parent, pathlib.Path(__file__).parents[1])]}
from parallax.hardware.devices import simulate_devices
simulate_devices({math.prod(case["mesh"])})
from test_experts import check_case
check_case({case}, print)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0 and "gradient error" in ended.stdout, ended.stderr[-2000:]


# ---- where tokens go


def params_on_host(name, **router_of_all):
    """Initial values with these in place of the routers'."""
    params = jax.tree.map(np.array, params_of(mixture((1, 1, 1), name)))
    for leaf, values in router_of_all.items():
        router(params)[leaf][...] = values
    return params


@functools.cache
def steered_on(mesh, exchange):
    return step_on(mixture(mesh, "steered", exchange=exchange, microbatches=4))


ALL_TO_TWO = 100.0 * (np.arange(8) == 5) + 99.0 * (np.arange(8) == 4)  # of one rank of four; ranks of others get none
STEERS = {"all to two": (dict(bias=ALL_TO_TWO), (5, 4)), "exact ties": (dict(kernel=0, bias=0), (0, 1))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "exchange"),
    [
        ((1, 1, 2, 1, 1, 4), "ragged"),
        pytest.param((2, 1, 1, 1, 1, 4), "gather", marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 1, 2, 4), "ragged", marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("steer", STEERS)
def test_all_tokens_may_go_to_the_same_experts(steer, mesh, exchange, record_property):
    """So that others get none. Of equal scores the first ones are the best."""
    values, chosen = STEERS[steer]
    params, batch = params_on_host("steered", **values), make_batch(ROWS)
    expected = expected_of("steered", params, batch)
    load_LE = router(expected[1])["bias"]
    np.testing.assert_array_equal(load_LE, np.isin(np.arange(8), chosen) * batch["tokens"].size + 0 * load_LE)
    check(steered_on(mesh, exchange)(params, batch), expected, record_property)


def twins_together(tree):
    """A tree in which each expert's entries and those of its twin, four places on, are added up."""
    mlp = tree["blocks"]["moe"]["mlp"]
    pairs = lambda x, dim: sum(np.split(np.asarray(x), 2, axis=dim))  # noqa: E731
    of_router = {"kernel": pairs(mlp["router"]["kernel"], 2), "bias": pairs(mlp["router"]["bias"], 1)}
    paired = mlp | {"experts": jax.tree.map(lambda x: pairs(x, 1), mlp["experts"]), "router": of_router}
    return tree | {"blocks": tree["blocks"] | {"moe": tree["blocks"]["moe"] | {"mlp": paired}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [(1, 1, 2, 1, 1, 4), pytest.param((2, 1, 1, 1, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_it_does_not_matter_which_of_two_near_ties_is_chosen(mesh):
    """Experts have twins on other ranks, whose scores are as near as rounding: which of them gets a token may differ
    from mesh to mesh. What both do together may not."""
    params, batch = params_on_host("twins"), make_batch(ROWS)
    mlp = params["blocks"]["moe"]["mlp"]
    for leaf in mlp["experts"].values():
        leaf[:, 4:] = leaf[:, :4]
    near = 1 + 1e-7 * np.random.default_rng(0).normal(size=mlp["router"]["kernel"][..., 4:].shape)
    mlp["router"]["kernel"][..., 4:] = mlp["router"]["kernel"][..., :4] * near
    mlp["router"]["bias"][:, 4:] = mlp["router"]["bias"][:, :4]
    (closest,) = closest_choices(mixture((1, 1, 1), "twins").config, params, [batch])
    assert closest < 1e-10
    found = step_on(mixture(mesh, "twins", microbatches=4))(params, batch)
    losses, grads, _ = expected_of("twins", params, batch)
    np.testing.assert_allclose(found[0], losses, rtol=LOSS_ERROR)
    errors = leaf_errors(twins_together(found[1]), twins_together(grads))
    assert {name: error for name, error in errors.items() if not error <= GRADIENT_ERROR} == {}
    counts, expected = (router(twins_together(tree))["bias"] for tree in (found[1], grads))
    np.testing.assert_array_equal(counts, expected)


# ---- forward alone


@functools.cache
def on_one_device(name):
    """(logits, activations' sizes, losses) without a mesh."""
    model, batch = mixture((1, 1, 1), name), batch_of(name)
    params = params_of(model)
    logits = jax.jit(functools.partial(plain_logits, model.config))(params, batch)
    return np.asarray(logits), np.asarray(jax.jit(model.activations)(params, batch)), reference(name)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "how"),
    [
        ("late", (2, 1, 1, 1, 2, 2), dict(context="ring", residual=SEQ_CUT, exchange="ragged")),
        pytest.param("late", (1, 1, 2, 1, 1, 4), dict(tensor_parallel="scatter"), marks=pytest.mark.slow),
        pytest.param("in turn", (2, 1, 2, 1, 1, 2), dict(schedule="interleaved", virtual=2), marks=pytest.mark.slow),
        pytest.param("alike", (1, 1, 2, 1, 2, 2), dict(expert_chunk_tokens=8), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_logits_activations_and_the_loss_of_an_evaluation_are_the_same(name, mesh, how):
    model, batch = mixture(mesh, name, **how), batch_of(name)
    params, (logits, seen, losses) = params_of(model), on_one_device(name)
    found = jax.jit(model.logits)(params, batch["tokens"], batch["segments"], batch["positions"])
    np.testing.assert_allclose(found, logits, rtol=0, atol=GRADIENT_ERROR * np.abs(logits).max())
    np.testing.assert_allclose(jax.jit(model.activations)(params, batch), seen, rtol=GRADIENT_ERROR)
    metrics = jax.jit(model.loss)(params, batch)
    np.testing.assert_allclose((metrics["loss"], metrics["z_loss"]), losses, rtol=LOSS_ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["late", "alike"])
def test_activations_are_captured_of_each_kind_of_layer(name):
    model, batch, (logits, _, losses) = mixture((1, 1, 1), name), batch_of(name), on_one_device(name)
    found = capture_activations(model, params_of(model), batch)
    assert found.attention.shape[0] == model.config.layers == len(next(iter(found.cache.values())))
    np.testing.assert_allclose(found.attention.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_allclose(found.logits, logits, rtol=0, atol=GRADIENT_ERROR * np.abs(logits).max())
    np.testing.assert_allclose(found.loss, losses[0], rtol=GRADIENT_ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gather", "ragged"])
def test_bfloat16_trains_with_the_same_number_of_tokens(exchange):
    """Which expert they go to may differ: inputs of routers are rounded to 8 bits."""
    how = dict(dtype="bfloat16", reduce="compute", exchange=exchange, microbatches=4)
    losses, grads, _ = step_on(mixture((2, 1, 2, 1, 1, 2), "in turn", **how))(
        params_on_host("in turn"), batch_of("in turn")
    )
    np.testing.assert_allclose(losses, reference("in turn")[0], rtol=2**-7)
    assert all(leaf.dtype == np.float32 and np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    np.testing.assert_array_equal(router(grads)["bias"].sum(axis=-1), ROWS * SEQ)


@pytest.mark.parametrize(
    ("mesh", "how", "message"),
    [
        ((1, 1, 1, 1, 1, 3), {}, "model.experts=8 does not divide over mesh.ep=3; use ep in {1, 2, 4, 8} or experts=9"),
        (
            (1, 1, 4, 1, 1, 2),
            dict(d_expert=6),
            "model.d_expert=6 does not divide over mesh.tp=4; use tp in {1, 2, 3, 6}",
        ),
    ],
    ids=str,
)
def test_experts_that_a_mesh_does_not_divide_are_refused(mesh, how, message):
    with pytest.raises(ConfigError) as error:
        mixture(mesh, "alike", **how)
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("name", "mesh"), [("in turn", (1, 2, 1)), ("dense first", (4, 2, 1))])
def test_gathering_ahead_where_no_layer_follows_one_of_its_kind_is_refused(name, mesh):
    with pytest.raises(ConfigError, match=r"^fsdp.prefetch=1 .* no stage has two layers of one kind .*prefetch=0\.$"):
        mixture(mesh, name, prefetch=1)
    assert mixture(mesh, "alike", prefetch=1)
