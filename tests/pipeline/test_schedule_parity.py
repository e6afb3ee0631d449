"""Every schedule gives the loss, gradients and update of the plain model, on every mesh with a pipeline."""

import itertools
import random

import pytest
from support.pairwise import few_fast, pairs_of, pairwise_cases
from support.tiny_model import HIDDEN_CUT, SEQ_CUT
from support.traffic_formulas import PER_USE
from test_parity import check_parity, name_of

from parallax.config.sections import POLICY_NAMES

SCHEDULES = {
    "gpipe": dict(schedule="gpipe"),
    "1f1b": dict(schedule="one_f_one_b"),
    "interleaved1": dict(schedule="interleaved", virtual=1),
    "interleaved2": dict(schedule="interleaved", virtual=2),
    "interleaved4": dict(schedule="interleaved", virtual=4),
    "zero_bubble": dict(schedule="zero_bubble"),
    "zero_bubble_v": dict(schedule="zero_bubble_v"),
    "dualpipe_v": dict(schedule="dualpipe_v"),
}
STAGES = {"interleaved2": 2, "interleaved4": 4, "zero_bubble_v": 2, "dualpipe_v": 2}  # on each rank; else 1
MESHES = [
    (1, 1, 1), (1, 2, 4), (2, 1, 1), (2, 4, 1), (2, 1, 4), (2, 2, 2), (4, 1, 1), (4, 2, 1), (4, 1, 2), (8, 1, 1),
]  # fmt: skip
NOTHING_PER_USE = ("ddp", "zero1")
SUMMED_PER_USE = ("zero2", "zero3")
# Microbatches as a share of the pipeline's ranks: fewer, as many, twice, four times.
SHARES = [0.5, 1, 2, 4]
# What a schedule has less to do with is drawn for each case. With `uneven` some stages have a layer more than others.
REST = {
    "attention": ["mla", "gqa"],
    "residual": [HIDDEN_CUT, SEQ_CUT],
    "embedding": ["vocab_parallel", "all_to_all"],
    "remat": ["none", "elementwise", "attention", "layer", "stage"],
    "tied": [True, False],
    "uneven": [False, True],
    "prefetch": [0, 1],
    "reduce": ["float32", "compute"],
    "bucket": ["parameter", "module", "layer"],
    "table_first": [False, True],
}

# The largest error of a gradient that was seen, 7e-6: two rows a microbatch, and much that cancels.
WORST = dict(
    mesh=(8, 1, 1), layers=12, microbatches=32, policy="zero3", attention="mla", residual=HIDDEN_CUT,
    embedding="all_to_all", remat="none", tied=False, prefetch=0, reduce="float32",
    schedule="zero_bubble",
)  # fmt: skip


def case_of(mesh, schedule, share, policy, number):
    """The settings of a case, and what is drawn for its number."""
    pick = random.Random(number)
    rest = {key: pick.choice(values) for key, values in REST.items()}
    stages = mesh[0] * STAGES.get(schedule, 1)
    layers = stages + max(stages // 2, 1) if rest.pop("uneven") else stages
    case = dict(mesh=mesh, layers=layers, microbatches=max(int(share * mesh[0]), 1), policy=policy)
    rest["prefetch"] *= policy in PER_USE
    rest["table_first"] &= policy in SUMMED_PER_USE
    if policy in NOTHING_PER_USE:
        rest["bucket"] = "parameter"
    return case | rest | SCHEDULES[schedule]


def whole_grid():
    cases = itertools.product(MESHES, SCHEDULES, SHARES, POLICY_NAMES)
    return [case_of(*case, number) for number, case in enumerate(cases)]


def pairs():
    """A case for each pair of the settings that schedules are about; meshes of a size take turns. Twice as many
    microbatches as ranks are with interleaved4 alone: they are to a schedule what four times as many are."""
    schedules = ["1f1b", "interleaved2", "zero_bubble", "zero_bubble_v", "dualpipe_v"]
    factors = dict(pp=[2, 4, 8], schedule=schedules, share=[0.5, 1, 4], policy=POLICY_NAMES)
    grid = [dict(zip(factors, values)) for values in itertools.product(*factors.values())]
    chosen = pairwise_cases(grid)
    assert {pair for case in grid for pair in pairs_of(case)} == {pair for case in chosen for pair in pairs_of(case)}
    cases = []
    for number, case in enumerate(chosen):
        meshes = [mesh for mesh in MESHES if mesh[0] == case["pp"] and (mesh[1:] != (1, 1) or mesh[0] == 8)]
        cases.append(case_of(meshes[number % len(meshes)], *list(case.values())[1:], number))
    return [*cases, case_of((4, 1, 2), "interleaved4", 2, "zero3", len(cases)), WORST]


def test_every_pair_of_settings_is_in_the_whole_grid():
    """What is drawn is drawn from enough cases."""
    settings = [{key: case[key] for key in ("policy", "schedule", *REST) if key in case} for case in whole_grid()]
    factors = {key: sorted({case[key] for case in settings}, key=str) for key in settings[0]}
    wanted = {
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
    }
    wanted -= {frozenset({("policy", policy), ("prefetch", 1)}) for policy in set(POLICY_NAMES) - set(PER_USE)}
    summed_once = set(POLICY_NAMES) - set(SUMMED_PER_USE)
    wanted -= {frozenset({("policy", policy), ("table_first", True)}) for policy in summed_once}
    wanted -= {frozenset({("policy", p), ("bucket", unit)}) for p in NOTHING_PER_USE for unit in ("module", "layer")}
    found = {frozenset(pair) for case in settings for pair in itertools.combinations(case.items(), 2)}
    assert wanted <= found


def name(case):
    return name_of({"mesh": case["mesh"], **{key: value for key, value in case.items() if key not in ("mesh", "tied")},
                    "tied": case["tied"]})  # fmt: skip


@pytest.mark.fast(2)
@pytest.mark.parametrize("case", few_fast(pairs(), "schedule", "virtual", "attention"), ids=name)
def test_every_schedule_equals_the_plain_model(case, record_property):
    check_parity(case, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("case", whole_grid(), ids=name)
def test_every_schedule_equals_the_plain_model_on_the_whole_grid(case, record_property):
    check_parity(case, record_property)
