"""What training steps send is kept in tests/golden, by axes, kind and module; a change is a diff there."""

import difflib

import pytest
from support import traced_counts
from support.traced_settings import CASES, COLUMNS

VALUES = {
    "mesh": {"1x1x1", "2x1x1", "1x2x1", "1x1x2", "1x2x2", "2x1x2", "2x2x2"},
    "attention": {"mla", "gqa"},
    "tensor_parallel": {"column_row", "scatter"},
    "residual": {"hidden", "seq"},
    "schedule": {"gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipe_v"},
    "remat": {"none", "elementwise", "attention", "layer", "stage"},
    "policy": {"ddp", "zero1", "zero2", "lean", "zero3"},
    "reduce": {"float32", "compute"},
    "prefetch": {"0", "1"},
    "head": {"tied", "untied"},
    "name": {"adamw", "muon"},
}
SLOW = {
    "alone",
    "gpipe",
    "zb-v",
    "dp",
    "dp-ahead",
    "dp-ahead-bf16",
    "tp-hidden",
    "tp-seq",
    "all-gpipe",
    "all-gpipe-step",
}
SLOW |= {"all-1f1b-step", "all-1f1b-ahead", "all-inter", "all-zb-step", "all-zb-v"}
SLOW |= {"cp-gather", "cp-latent"}
CALLS, AXES, KIND = -4, 1, 2  # words of a line


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_a_step_sends_what_it_did(name):
    kept, now = traced_counts.kept()[1][name].splitlines(), traced_counts.part(name).splitlines()
    diff = "\n".join(difflib.unified_diff(kept, now, "tests/golden/collectives.txt", "now", lineterm="", n=0))
    assert not diff, f"if this is meant, `make golden` writes it down:\n{diff}"


def test_all_rows_and_no_others_are_kept():
    header, parts = traced_counts.kept()
    assert header.strip() == traced_counts.HEADER.strip() and list(parts) == list(CASES)


def test_each_value_is_in_a_fast_row():
    fast = [values for name, values in CASES.items() if name not in SLOW]
    assert list(VALUES) == COLUMNS
    assert {key: {values[key] for values in fast} for key in COLUMNS} == VALUES


@pytest.mark.parametrize("name", CASES)
def test_a_report_counts_no_call_that_the_program_has_not(name):
    """The walk over the jaxpr counts all sides of branches, the report that which is taken."""
    reported, written = {}, {}
    for line in traced_counts.kept()[1][name].splitlines()[1:]:
        words = line.split()
        found, calls = written if "in jaxpr" in line else reported, words[CALLS].replace(",", "")
        key = words[AXES], words[KIND]
        found[key] = found.get(key, 0) + max(map(int, calls.split("/")))
    assert reported.keys() == written.keys()
    assert all(reported[key] <= written[key] for key in written)
    if CASES[name]["mesh"] == "1x2x1":  # no branches: all but what nothing reads is sent
        assert all(written[key] - reported[key] <= 4 for key in written)
