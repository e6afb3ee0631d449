"""Every two choices of a block that a model may have together give the plain model's gradients, on each axis."""

import itertools

import numpy as np
import pytest
from support.pairwise import pairs_of, pairwise_cases
from support.tiny_model import HIDDEN_CUT, SEQ_CUT, model_config
from test_choices import EXPERTS, check

from parallax.config.sections import POLICY_NAMES
from parallax.errors import ConfigError

LOCAL, GLOBAL = "sliding_window=3, rope_theta=100.0", "rope_theta=1e5"
NORMED = dict(qk_norm=True)
# Of each choice its values, the first of which is that of a model which says nothing.
CHOICES = {
    "attention": {"gqa": dict(attention="gqa"), "mla": dict(attention="mla")},
    "scale": {"": {}, "attention_scale": dict(attention_scale=0.5)},
    "cap": {"": {}, "score_cap": dict(score_cap=2.0)},
    "sinks": {"": {}, "sinks": dict(sinks=True)},
    "embedding": {"": {}, "embedding_scale": dict(embedding_scale=3.0)},
    "residual": {"": {}, "residual_scale": dict(residual_scale=0.7)},
    "logits": {"": {}, "logit_scale": dict(logit_scale=1.5)},
    "logit cap": {"": {}, "logit_cap": dict(logit_cap=2.0)},
    "tied": {"": dict(tied=True), "untied": dict(tied=False)},
    "rope": {
        "": {},
        "rope_fraction": dict(rope_fraction=0.5),
        "yarn": dict(rope_scaling="yarn", rope_factor=4.0, rope_original_seq=8),
        "no positions": dict(rope=False),
    },
    "heads": {
        "": {},
        "norm": NORMED,
        "norm over heads": NORMED | dict(qk_norm_over="projection"),
        "norm after rope": NORMED | dict(qk_norm_after_rope=True),
        "norm of one plus": NORMED | dict(qk_norm_scale="one_plus"),
        "norm over heads after rope": NORMED
        | dict(qk_norm_over="projection", qk_norm_after_rope=True, qk_norm_scale="one_plus"),
    },
    "window": {"": {}, "windows": dict(sliding_window=3), "local and global": {}},
    "mixture": {
        "": {},
        "router_shift": dict(layers_of="moe*4", router_shift=True),
        "shared_gate": dict(layers_of="(dense moe)*2", shared_experts=2, shared_gate=True),
        "clamped": dict(layers_of="moe*4", expert_activation="clamped", expert_limit=0.5),
        "expert_bias": dict(layers_of="(dense moe)*2", expert_bias=True),
    },
    "norm": {"": {}, "layer": dict(norm="layer")},
    "norm scale": {"": {}, "one plus": dict(norm_scale="one_plus"), "no scale": dict(norm_scale="none")},
    "norm bias": {"": {}, "norm_bias": dict(norm_bias=True)},
    "place": {"": {}, "after": dict(norm_place="after"), "both": dict(norm_place="both")},
    "branches": {"": {}, "parallel": dict(branches="parallel"), "one norm": dict(branches="parallel_one_norm")},
    "mlp": {"": {}, "plain": dict(mlp="plain")},
    "activation": {"": {}}
    | {name: dict(activation=name) for name in ("gelu", "gelu_tanh", "relu2")}
    | {"clamped": dict(activation="clamped", activation_limit=0.5)},
    "biases": {"": {}, "qkv and out": dict(qkv_bias=True, out_bias=True)},
    "mlp bias": {"": {}, "mlp_bias": dict(mlp_bias=True)},
}


def settings_of(case):
    """What the values of a case set."""
    found = {key: value for name, value in case.items() for key, value in CHOICES[name][value].items()}
    if case.get("window") == "local and global":
        bases = {"moe*4": ("moe", "moe"), "(dense moe)*2": ("dense", "moe")}.get(found.get("layers_of"), ("dense",) * 2)
        kinds = zip(("local", "global"), bases, (LOCAL, GLOBAL))
        found |= dict(kinds=" ".join(f"{name}=(base='{base}', {words})" for name, base, words in kinds))
        found |= dict(layers_of="(local global)*2")
    return found


def legal(case):
    """The nearest case that a model may have."""
    if case["mixture"] in ("router_shift", "clamped"):  # no layer is dense
        case |= {"mlp": "", "mlp bias": "", "activation": ""}
    if case["activation"] == "clamped":
        case |= {"mlp": ""}
    if case["attention"] == "mla":
        case |= {"heads": ""} | ({"rope": ""} if case["rope"] == "rope_fraction" else {})
    if (case["place"], case["branches"]) == ("after", "one norm"):
        case |= {"branches": "parallel"}
    return case


def rows():
    """Cases in which every pair is, of 3000 drawn at random: all combinations are 10^9."""
    rng, values = np.random.default_rng(0), {name: [*choice] for name, choice in CHOICES.items()}
    drawn = (legal({name: some[rng.integers(len(some))] for name, some in values.items()}) for _ in range(3000))
    return pairwise_cases([*drawn])


# Axes pp, dp, tp, replica, cp, ep.
AXES = {
    "pp": dict(mesh=(2, 1, 1)),
    "dp": dict(mesh=(1, 2, 1)),
    "tp": dict(mesh=(1, 1, 2)),
    "replica": dict(mesh=(1, 1, 1, 2)),
    "ring": dict(mesh=(1, 1, 1, 1, 2), context="ring"),
    "ulysses": dict(mesh=(1, 1, 1, 1, 2), context="ulysses"),
    "all_gather": dict(mesh=(1, 1, 1, 1, 2), context="all_gather"),
    "ep": dict(mesh=(1, 1, 1, 1, 1, 2)),
}
CUTS = {
    "residual": [HIDDEN_CUT, SEQ_CUT],
    "tensor_parallel": ["column_row", "scatter"],
    "embedding": ["vocab_parallel", "all_to_all"],
    "remat": ["none", "elementwise", "attention", "layer", "stage"],
    "schedule": ["one_f_one_b", "zero_bubble", "zero_bubble_v", "dualpipe_v"],
    "policy": [*POLICY_NAMES],
}
ROWS = rows()
TURNS = itertools.cycle(pairwise_cases([dict(zip(CUTS, values)) for values in itertools.product(*CUTS.values())]))
CASES = [
    pytest.param(row, axis, cut, id=f"{number}-{axis}")
    for number, row in enumerate(ROWS)
    for axis, cut in zip(AXES, TURNS)
]


def test_every_pair_is_in_a_case_or_refused():
    there = {pair for row in ROWS for pair in pairs_of(row)}
    assert len(ROWS) <= 48
    for (name, some), (other, others) in itertools.combinations(CHOICES.items(), 2):
        for pair in itertools.product(some, others):
            case = dict(zip((name, other), pair))
            if (*case.items(),) not in there:
                with pytest.raises(ConfigError):
                    model_config(**EXPERTS | dict(layers=4, attention="gqa") | settings_of(case))


@pytest.mark.slow
@pytest.mark.parametrize(("row", "axis", "cut"), CASES)
def test_pairs_of_choices_give_the_plain_models_gradients_on_each_axis(row, axis, cut):
    # A norm of heads, or after a branch, amplifies what is small: with no norm before it, queries of embeddings of size
    # 0.02, and clamped experts' gates, which are smaller. Gradients are then up to 2.6e-5 from those in float64 on one
    # device, too: of clamped experts 2.3e-5 with ten times the embeddings, 2.7e-6 with 300 times; of row 39 1.6e-5.
    after = 300.0 if "clamped" in (row["mixture"], row["activation"]) else 10.0
    embeddings = after if row["place"] == "after" or row is ROWS[39] else 1.0
    check(settings_of(row), embeddings=embeddings, **cut | AXES[axis])
