"""Models of Hugging Face's `transformers` compute here what they compute there: logits, fine-tuning and greedy text."""

import functools
import tempfile
from pathlib import Path

import pytest
from own_runs import OWN, own_run, own_settings

from parallax.convert.__main__ import main

EXTRA = 'needs the extra hf-tests: pip install -e ".[hf-tests]" -c constraints.txt'
pytest.importorskip("torch", reason=EXTRA)
pytest.importorskip("transformers", reason=EXTRA)

from hf_families import (
    CONTEXT,
    FAMILIES,
    LENGTHS,
    MESHES,
    Pair,
    equal_tokens,
    logits_difference,
    loss_difference,
    make_pair,
    ours_on,
)
from transformers import AutoModelForCausalLM

# Sums over up to 96 float32 terms in other orders, on logits of size 1 to 10.
LOGITS_ERROR = 1e-4
LOSS_ERROR = 1e-3
on_every_mesh = pytest.mark.parametrize(
    "mesh", [MESHES[0], *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES[1:])], ids=str
)


@pytest.fixture(scope="module")
def pair_of():
    """The pair of a family, made once."""
    with tempfile.TemporaryDirectory() as folder:
        yield functools.cache(lambda name: make_pair(name, Path(folder) / name))


@on_every_mesh
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_theirs(pair_of, name, mesh):
    assert logits_difference(pair_of(name), *ours_on(pair_of(name), mesh)) < LOGITS_ERROR


@on_every_mesh
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_is_theirs(pair_of, name, mesh):
    equal, total = equal_tokens(pair_of(name), *ours_on(pair_of(name), mesh))
    assert equal == total


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_of_fine_tuning_are_theirs(pair_of, name, mesh):
    assert loss_difference(name, pair_of(name), *ours_on(pair_of(name), mesh)) < LOSS_ERROR


@pytest.mark.parametrize("kind", OWN)
def test_a_run_of_our_own_computes_there_what_it_computes_here(corpus, tmp_path, kind):
    """Windows no longer than 16 tokens, the context of these runs, and beyond."""
    changes, architecture = OWN[kind]
    own_run(tmp_path / "run", own_settings(corpus, rope_original_seq=16, tied=False, **changes))
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert type(theirs).__name__ == architecture
    pair = Pair(theirs.eval(), tmp_path / "run")
    assert logits_difference(pair, *ours_on(pair, (1, 1, 1)), LENGTHS[:2]) < LOGITS_ERROR


MATTERS = [
    ("Llama 2", dict(norm_eps=1e-2)),
    ("Llama 2, linear", dict(rope_factor=3.5)),
    ("Llama 3, llama3, tied", dict(rope_fast_turns=8.0)),
    ("Mistral, wide heads", dict(rope_theta=9000.0)),
    ("Qwen2, yarn", dict(rope_temperature=1.0)),
    ("Qwen3", dict(rope_theta=9000.0)),
    ("DeepSeek-V2, yarn", dict(rope_temperature=1.0)),
    ("DeepSeek-V3, yarn", dict(rope_slow_turns=0.5)),
    ("DeepSeek-V3, yarn on what is rotated", dict(rope_magnitude=1.0)),
]


@pytest.mark.parametrize(("name", "change"), MATTERS, ids=[name for name, _ in MATTERS])
def test_the_comparison_sees_a_field_that_is_not_as_they_have_it(pair_of, name, change):
    model, params = ours_on(pair_of(name), (1, 1, 1), **change)
    assert logits_difference(pair_of(name), model, params, [3 * CONTEXT]) > 20 * LOGITS_ERROR
