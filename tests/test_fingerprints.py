"""A fingerprint is of what a program does: not of names and places in the source, and another program has another."""

import dataclasses
import json

import fingerprints
import jax
import jax.numpy as jnp
import pytest
from support.traced_settings import CASES

ROW = "dp"


@pytest.mark.slow
def test_a_step_lowered_again_is_equal_and_a_changed_one_is_found(tmp_path, monkeypatch, capsys):
    file = tmp_path / "before.json"
    assert fingerprints.main([f"--out={file}", "--only", ROW]) == 0
    assert json.loads(file.read_text()).keys() == {"jax", f"{ROW} train", f"{ROW} eval"}
    assert fingerprints.main([f"--against={file}", "--only", ROW]) == 0
    read = fingerprints.settings_of

    def changed(name):
        settings = read(name)
        return dataclasses.replace(settings, optimizer=dataclasses.replace(settings.optimizer, b1=0.8))

    monkeypatch.setattr(fingerprints, "settings_of", changed)
    capsys.readouterr()
    assert fingerprints.main([f"--against={file}", "--only", ROW]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{ROW} train: ")  # an evaluation has no optimizer
    assert fingerprints.main([f"--against={file}", "--only", "no row"]) == 1  # nothing was compared


def lowered_and_compiled(function):
    found = jax.jit(function).lower(jnp.ones((4, 4)))
    texts = found.as_text(debug_info=True), found.compile().as_text()
    return fingerprints.lowered_text(texts[0]), fingerprints.optimized_text(texts[1])


def test_names_and_places_are_left_out():
    @jax.jit
    def inner(x):
        return jnp.sin(x) @ x

    def first(x):
        return inner(x) + inner(x + 1)

    @jax.jit
    def another(y):
        return jnp.sin(y) @ y

    def second(y):
        with jax.named_scope("elsewhere"):
            return another(y) + another(y + 1)

    def changed(x):
        return inner(x) + inner(x + 2)

    assert lowered_and_compiled(first) == lowered_and_compiled(second)
    assert not set(lowered_and_compiled(first)) & set(lowered_and_compiled(changed))


def test_rows_are_rows():
    rows = {*fingerprints.LOWERED, *fingerprints.WRITTEN, *fingerprints.COMPILED, *fingerprints.TRAINED}
    assert rows <= set(CASES)


@pytest.mark.slow
def test_a_generation_and_a_compiled_step_have_a_fingerprint_and_losses_have_bits():
    for make in (fingerprints.generate_text, fingerprints.compiled_text, fingerprints.loss_bits):
        assert make(ROW) == make(ROW)
