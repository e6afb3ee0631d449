"""What a block can say besides its widths is the same on every mesh: each choice, pairs of them, and models of all."""

import itertools

import numpy as np
import pytest
from support.cached_logits import decoded_logits
from support.pairwise import pairwise_cases
from support.plain_model import plain_logits
from support.tiny_model import HIDDEN_CUT, ROWS, SEQ, SEQ_CUT, build, make_batch, model_config, params_of
from test_parity import check_parity

from parallax.analysis.traced.flops import matmul_parameters_by_stack
from parallax.analysis.traced.memory import tick_state
from parallax.analysis.traced.recompute import forward_flops, part_costs
from parallax.config.sections import POLICY_NAMES
from parallax.errors import ConfigError
from parallax.inference.decode import Prompts

# Eight layers with norms after each branch amplify rounding: on one device a gradient is then 2.1e-5 from that in
# float64, since the first branch reads embeddings of size 0.02, and its norm makes them 1. Four are 2.3e-6 from it.
LAYERS = 4
CHOICES = {
    "one plus": dict(norm_scale="one_plus"),
    "layer": dict(norm="layer", norm_bias=True),
    "layer, no parameters": dict(norm="layer", norm_scale="none"),
    "after": dict(norm_place="after"),
    "both": dict(norm_place="both"),
    "parallel": dict(branches="parallel"),
    "one norm": dict(branches="parallel_one_norm"),
    "plain": dict(mlp="plain"),
    "gelu": dict(activation="gelu"),
    "relu2": dict(activation="relu2"),
    "biases": dict(mlp_bias=True, out_bias=True, qkv_bias=True),
}
LIKE = {
    "GPT-NeoX": dict(norm="layer", norm_bias=True, branches="parallel", mlp="plain", activation="gelu")
    | CHOICES["biases"],
    "Gemma 2": dict(norm_scale="one_plus", norm_place="both", activation="gelu_tanh"),
    "OLMo": dict(norm="layer", norm_scale="none", tied=True),
    "Cohere": dict(norm="layer", branches="parallel_one_norm", attention="mla"),
    "OLMo 2": dict(norm_place="after", tied=False),
}
PLAIN = dict(attention="gqa", embedding="vocab_parallel", microbatches=4, tied=True, layers=LAYERS)
CUT = PLAIN | dict(mesh=(2, 2, 2), tensor_parallel="column_row", residual=HIDDEN_CUT, schedule="one_f_one_b")
CUT |= dict(remat="elementwise")


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_the_same_on_a_mesh(name, record_property):
    check_parity(CUT | CHOICES[name], record_property)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("GPT-NeoX", dict(schedule="zero_bubble", remat="none")),
        ("OLMo", dict(tensor_parallel="scatter", policy="zero1")),
        ("Cohere", dict(residual=SEQ_CUT, remat="layer")),
        ("OLMo 2", dict(residual=SEQ_CUT, remat="norm swiglu", tensor_parallel="scatter")),
        ("Gemma 2", dict(residual=SEQ_CUT, remat="attention down", policy="lean")),
    ],
)
def test_a_model_of_such_choices_is_the_same_on_a_mesh(name, cut, record_property):
    check_parity(CUT | LIKE[name] | cut, record_property)


# Every pair of these is in one of the rows, and each row is on a mesh of each axis.
GRID = {
    "norm": ["rms", "layer"],
    "norm_scale": ["direct", "one_plus", "none"],
    "norm_bias": [False, True],
    "norm_place": ["before", "after", "both"],
    "branches": ["sequential", "parallel", "parallel_one_norm"],
    "mlp": ["gated", "plain"],
    "activation": ["silu", "gelu", "gelu_tanh", "relu2"],
    "out_bias": [False, True],  # and the MLP's
}
AXES = {
    "pp": (2, 1, 1),
    "dp": (1, 2, 1),
    "tp": (1, 1, 2),
    "replica": (1, 1, 1, 2),
    "cp": (1, 1, 1, 1, 2),
    "ep": (1, 1, 1, 1, 1, 2),
}
CUTS = {
    "attention": ["gqa", "mla"],
    "residual": [HIDDEN_CUT, SEQ_CUT],
    "tensor_parallel": ["column_row", "scatter"],
    "remat": ["none", "elementwise", "attention", "layer", "stage"],
    "schedule": ["one_f_one_b", "zero_bubble", "zero_bubble_v"],
    "policy": list(POLICY_NAMES),
}


def legal(case):
    return not (case["norm_place"] == "after" and case["branches"] == "parallel_one_norm")


def grid():
    rows = (dict(zip(GRID, values)) for values in itertools.product(*GRID.values()))
    chosen = pairwise_cases([row for row in rows if legal(row)])
    taking_turns = itertools.cycle(pairwise_cases([dict(zip(CUTS, x)) for x in itertools.product(*CUTS.values())]))
    chosen = [row | dict(mlp_bias=row["out_bias"]) for row in chosen]
    return [(axis, PLAIN | cut | row) for row in chosen for axis, cut in zip(AXES, taking_turns)]


GRID_CASES = [pytest.param(*each, id=f"{number}-{each[0]}") for number, each in enumerate(grid())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "case"), [pytest.param(*each, id=f"{at}-{each[0]}") for at, each in enumerate(grid())]
)
def test_all_pairs_of_choices_are_the_same_on_every_axis(axis, case, record_property):
    check_parity(case | dict(mesh=AXES[axis]), record_property)


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("name", LIKE)
def test_cached_decoding_says_what_the_whole_pass_says(name, mesh):
    case = PLAIN | LIKE[name]
    batch = make_batch(rows=8, seq=8)
    batch |= dict(segments=np.ones_like(batch["segments"]), positions=np.arange(8)[None].repeat(8, 0))
    model, alone = build(mesh, **case), build((1, 1, 1), **case)
    params, prompts = params_of(model), Prompts(batch["tokens"], np.zeros(8, np.int32))
    expected = plain_logits(model.config, params_of(alone), batch)
    np.testing.assert_allclose(decoded_logits(model, params, prompts, prefill=3), expected, rtol=1e-4, atol=1e-5)


ROUNDED = dict(matmul="int8", matmul_residuals="8bit")
COUNTED = LIKE | {f"{name} in 8 bits": LIKE[name] | ROUNDED for name in ("GPT-NeoX", "Cohere", "OLMo 2")}


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", COUNTED)
def test_what_is_saved_and_made_again_is_as_a_plan_says(name):
    """For each part alone: what a set saves less when it has this part. All products are those of the parts."""
    changes = PLAIN | COUNTED[name]
    built = build((1, 1, 1), **changes)
    costs = part_costs(built.config, seq=SEQ)
    assert set(costs) == set(built.config.remat_parts)

    def saved(parts):
        model = build((1, 1, 1), **changes | dict(remat=" ".join(parts), microbatches=1))
        arrays = ((component, size) for _, component, size in tick_state(model, ROWS, SEQ))
        return sum(size for component, size in arrays if component == "saved_activations") / (4 * ROWS * SEQ)

    everything = saved(costs)
    assert everything == LAYERS * model_config().d_model
    for part in costs:
        width = saved([other for other in costs if other != part]) - everything
        maxima = 2 * LAYERS / (ROWS * SEQ) if "8 bits" in name else 0  # a float32 for each rounded input of a layer
        assert 0 <= width - costs[part].width <= maxima, part
    products = sum(matmul_parameters_by_stack(built.config, built.plan.declared).values())
    assert forward_flops(built.config, seq=SEQ) - costs["core"].flops == 2 * products


@pytest.mark.slow
def test_initial_values_are_those_of_the_names_that_stay():
    """A norm of 1 + w begins with zeros, and an MLP's kernels do not depend on norms, places or biases."""
    some, others = (
        build((1, 1, 1), **PLAIN | changes).init(0)["blocks"]
        for changes in ({}, dict(norm_scale="one_plus", norm_bias=True, norm_place="both", mlp_bias=True))
    )
    assert not np.asarray(others["mlp_out_norm"]["scale"]).any() and not np.asarray(others["mlp"]["up"]["bias"]).any()
    for kernel in ("gate", "up", "down"):
        np.testing.assert_array_equal(some["mlp"][kernel]["kernel"], others["mlp"][kernel]["kernel"])


MOE = dict(layers=4, experts=4, layers_of="moe*4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(branches="parallel_one_norm", norm_place="after"), "shares the norm before attention"),
        (dict(norm_place="both", init_out="zeros"), r"multiplies its gradient by norm_eps \*\* -0.5 = 1000"),
        (MOE | dict(activation="gelu"), "model.activation='gelu' does nothing .* only mixtures"),
        (MOE | dict(layers_of="dense moe*3", activation="gelu"), "since experts have model.expert_activation"),
        (MOE | dict(mlp="plain"), "model.mlp='plain' does nothing"),
        (MOE | dict(mlp_bias=True), "model.mlp_bias=True does nothing"),
        (dict(mlp="squared:SquaredMLP", mlp_bias=True), "does nothing with model.mlp='squared:SquaredMLP'"),
        (dict(norm="mine:Norm", norm_bias=True), "which has parameters of its own"),
        (dict(attention="mine:Attention", out_bias=True), "model.out_bias=True does nothing with"),
    ],
)
def test_a_choice_that_nothing_reads_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        model_config(**changes)
    assert "\n" not in str(caught.value)
