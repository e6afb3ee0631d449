"""Mixtures change nothing on meshes: loss, gradients, load and updates are those of a plain model, whose experts all
compute all tokens."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import pairs_of, pairwise_cases
from reference import closest_choices, plain_forward, plain_losses_and_grad
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
from tiny import HIDDEN_CUT, SCHEDULES, SEQ_CUT, build, make_batch, optimizer_config, params_of

from parallax.runtime.errors import ConfigError
from parallax.training.optimizer import make_optimizer

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
FACTORS = {"model": list(MODELS), "schedule": list(SCHEDULES), "context": ["all_gather", "ring", "ulysses"]}
FACTORS |= {"exchange": ["gather", "ragged"], "expert_chunk_tokens": [0, 8]}
FACTORS |= {key: CUTS[key] for key in ("residual", "tensor_parallel", "embedding")}
FACTORS |= {key: values for key, values in COSTS.items() if key != "tied"}
# pp dp tp replica cp ep: experts in a pipeline, and there beside each other axis.
FEW = [(2, 1, 1, 1, 1, 4), (2, 1, 2, 1, 1, 2), (2, 2, 1, 1, 1, 2), (2, 1, 1, 2, 1, 2), (2, 1, 1, 1, 2, 2)]
MESHES = [
    *FEW, (1, 1, 1, 1, 1, 8), (1, 1, 2, 1, 1, 4), (1, 2, 1, 1, 1, 4), (1, 1, 1, 2, 1, 4), (1, 1, 1, 1, 4, 2),
    (4, 1, 1, 1, 1, 2), (1, 2, 2, 1, 1, 2), (1, 1, 2, 1, 2, 2),
]  # fmt: skip
BALANCE_RATE = 1e-2
ROWS = 32
MARGIN = 1e-5  # of the closest choice in a batch; float32 rounds scores by some 1e-7


def is_empty(case):
    """What is refused: to gather ahead where nothing is gathered layer by layer, or the next layer is of another kind;
    and more stages than layers."""
    ahead_of_none = case.get("policy", "zero3") not in ("lean", "zero3") or case.get("model", "alike") != "alike"
    stages = case.get("mesh", (1,))[0] * (2 if case.get("schedule") in ("interleaved", "zero_bubble_v") else 1)
    return (case.get("prefetch") == 1 and ahead_of_none) or (case.get("model") == "late" and stages > 7)


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


@functools.cache
def batch_of(name):
    """The first batch in which no choice of experts is so close that rounding could change it."""
    model = mixture((1, 1, 1), name)
    batches = [make_batch(ROWS, seed=seed) for seed in range(50)]
    for batch, margin in zip(batches, closest_choices(model.model, params_of(model), batches)):
        if margin > MARGIN:
            return batch
    raise AssertionError("each batch has a close choice")


def optimizer(layouts):
    changes = dict(learning_rate=LEARNING_RATE, eps=EPS, schedule="constant", warmup_steps=0, clip_norm=1.0)
    return make_optimizer(optimizer_config(balance_rate=BALANCE_RATE, **changes), steps=10, layouts=layouts)


def expected_of(name, params, batch):
    """(losses, gradients, updated parameters) of the plain model, with the load as the biases' gradient."""
    model = mixture((1, 1, 1), name)
    losses, grads = plain_losses_and_grad(model.model, params, batch, Z_COEFFICIENT, model.loss_config)
    update = functools.partial(one_update, optimizer(model.layouts))
    updated = jax.jit(update)(params, jax.tree.map(np.float32, grads))
    return losses, grads, jax.tree.map(np.asarray, updated)


@functools.cache
def reference(name):
    return expected_of(name, jax.tree.map(np.asarray, params_of(mixture((1, 1, 1), name))), batch_of(name))


def router(tree):
    """The mixtures' routers in a tree of parameters."""
    return tree["blocks"].get("moe", tree["blocks"])["mlp"]["router"]


# ---- on a mesh


def step_on(model, params, batch):
    """(losses, gradients, updated parameters)."""
    tx = optimizer(model.layouts)

    def step(params, batch):
        metrics, grads = model.loss_and_grad(params, batch)
        return (metrics["loss"], metrics["z_loss"]), grads, one_update(tx, params, grads)

    params = jax.tree.map(jax.device_put, params, model.shardings)
    return jax.tree.map(np.asarray, jax.jit(step)(params, batch))


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
    check(step_on(model, params_of(model), batch_of(name)), reference(name), record_property)


@pytest.mark.parametrize("case", few_cases(), ids=name_of)
def test_loss_gradients_and_update_equal_the_plain_model(case, record_property):
    check_case(case, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(*MESHES), ids=name_of)
def test_loss_gradients_and_update_equal_the_plain_model_on_every_mesh(case, record_property):
    check_case(case, record_property)


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
    for mesh in ([(2, 1, 2, 1, 1, 2)] if name == "alike" else MESHES):
        jax.tree.map(np.testing.assert_array_equal, mixture(mesh, name).init(0), whole)
