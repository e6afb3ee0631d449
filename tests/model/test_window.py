"""A model that was made with a sliding window takes no text that is longer, for windows are not computed."""

import json

import numpy as np
import pytest
from jax.sharding import AbstractMesh
from support.exportable_runs import own_run
from support.hf_folders import config_of, random_tensors, shapes_of, write_folder
from support.tiny_model import build, make_batch, params_of

import parallax as px
from parallax.checkpoint.steps import read_manifest
from parallax.cli.command import load_config
from parallax.cli.convert import main
from parallax.config.earlier import of_today
from parallax.config.sections import AXES, SampleConfig
from parallax.config.settings import load_settings, read_settings
from parallax.errors import ConfigError
from parallax.inference.generate import generate
from parallax.step.step import model_of
from parallax.training.resume import is_fixed

MISTRAL = "MistralForCausalLM"
WINDOW = 16


def imported(folder, *flags, **changes):
    config = config_of(MISTRAL, sliding_window=WINDOW, **changes)
    write_folder(folder / "theirs", config, random_tensors(shapes_of(config)))
    return main(["from-hf", str(folder / "theirs"), "--workdir", str(folder / "run"), *flags])


def test_an_import_keeps_the_window_and_a_longer_seq_is_refused_there_and_later(tmp_path, capsys):
    assert imported(tmp_path) == 2
    assert f"data.seq=256 is longer than model.sliding_window={WINDOW}" in capsys.readouterr().err
    assert imported(tmp_path / "short", f"--config.data.seq={WINDOW}") == 0
    assert f"sliding_window={WINDOW} does not affect windows that are no longer" in capsys.readouterr().out
    mesh = AbstractMesh((1,) * len(AXES), AXES)
    for seq in (WINDOW, WINDOW + 1):
        config = load_config(tmp_path / "short" / "run" / "config.json")[0]
        config.data.seq = seq
        if seq == WINDOW:
            model_of(read_settings(config), mesh).check_batch(config.data.global_batch, config.data.seq)
            continue
        with pytest.raises(ConfigError, match=f"data.seq={seq} is longer than model.sliding_window={WINDOW}"):
            model_of(read_settings(config), mesh).check_batch(config.data.global_batch, config.data.seq)
        config.model.sliding_window = 0  # what somebody says who wants another model
        model_of(read_settings(config), mesh).check_batch(config.data.global_batch, config.data.seq)


@pytest.mark.slow
def test_nothing_that_reads_a_text_takes_a_longer_one():
    model = build((1, 1, 1), layers=1, attention="gqa", sliding_window=8)
    params, batch = params_of(model), make_batch(rows=4, seq=9)
    for act in (
        lambda: model.loss(params, batch),
        lambda: model.logits(params, batch["tokens"]),
        lambda: px.look_inside(model, params, batch),
    ):
        with pytest.raises(ConfigError, match="seq=9 is longer than model.sliding_window=8"):
            act()
    config = SampleConfig(prompt="", tokens=3, temperature=0.0, top_k=0, top_p=1.0, seed=0)
    assert len(generate(model, params, [[1, 2, 3, 4, 5]], config)[0]) == 3
    with pytest.raises(
        ConfigError, match="a prompt of 6 tokens and sample.tokens=3 make a text whose length=9 is longer"
    ):
        generate(model, params, [[1, 2], [1, 2, 3, 4, 5, 6]], config)


def test_a_window_may_go_when_a_run_goes_on_and_goes_out_with_the_config_that_it_came_in(tmp_path):
    assert not is_fixed("model.sliding_window")
    assert imported(tmp_path, f"--config.data.seq={WINDOW}") == 0
    settings = load_settings(tmp_path / "run").to_dict()
    for window, written in {WINDOW: WINDOW, 0: None, 32: 32}.items():
        settings["model"]["sliding_window"] = window
        own_run(tmp_path / f"tuned{window}", read_settings(settings))
        out = tmp_path / f"out{window}"
        assert main(["to-hf", str(tmp_path / f"tuned{window}"), str(out), "--like", str(tmp_path / "run")]) == 0
        said = json.loads((out / "config.json").read_text())
        assert said["sliding_window"] == written and said["architectures"] == [MISTRAL]


def test_a_run_of_before_there_were_windows_and_padding_has_neither(tmp_path):
    """Its config.json and its checkpoints do not have the keys."""
    config = config_of("LlamaForCausalLM", vocab_size=384)
    write_folder(tmp_path / "theirs", config, random_tensors(shapes_of(config)))
    assert main(["from-hf", str(tmp_path / "theirs"), "--workdir", str(tmp_path / "run")]) == 0
    path = tmp_path / "run" / "config.json"
    saved = json.loads(path.read_text())
    del saved["model"]["sliding_window"], saved["model"]["vocab_multiple"]
    path.write_text(json.dumps(saved))
    for model in (load_settings(tmp_path / "run").model, read_settings(load_config(path)[0]).model):
        assert (model.sliding_window, model.vocab_multiple) == (0, 1)
    there = read_manifest(tmp_path / "run" / "checkpoints", 0)["settings"]
    assert of_today(there | {"model": saved["model"]})[0]["model"]["vocab_multiple"] == 1
    with pytest.raises(ConfigError, match="the config has no model.vocab_multiple, model.sliding_window"):
        read_settings(saved)


@pytest.mark.slow
def test_within_the_window_the_model_is_the_one_without():
    models = [build((1, 1, 1), layers=1, attention="gqa", sliding_window=window) for window in (0, 16)]
    batch = make_batch(rows=4, seq=16)
    plain, windowed = (model.loss(params_of(model), batch)["loss"] for model in models)
    np.testing.assert_array_equal(plain, windowed)
