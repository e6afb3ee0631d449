"""Sliding windows of a model and of kinds of its layers: from a config to exports and activations."""

import json

import numpy as np
import pytest
from support import user_parts
from support.exportable_runs import own_run
from support.hf_folders import config_of, random_tensors, shapes_of, write_folder
from support.tiny_model import build, make_batch, model_config, params_of

import parallax as px
from configs.base import get_config
from parallax.checkpoint.steps import read_manifest
from parallax.cli.command import load_config, read_command
from parallax.cli.convert import main
from parallax.config.earlier import of_today
from parallax.config.settings import load_settings, read_settings, with_code
from parallax.errors import ConfigError
from parallax.training.resume import is_fixed

MISTRAL = "MistralForCausalLM"
WINDOW = 16
KINDS = "near=(sliding_window=4) far=(rope=False)"


def imported(folder, *flags, **changes):
    config = config_of(MISTRAL, sliding_window=WINDOW, **changes)
    write_folder(folder / "theirs", config, random_tensors(shapes_of(config)))
    return main(["from-hf", str(folder / "theirs"), "--workdir", str(folder / "run"), *flags])


def test_an_import_keeps_the_window_and_says_so(tmp_path, capsys):
    assert imported(tmp_path) == 0
    assert f"sliding_window={WINDOW}: a token attends to so many, the last ones" in capsys.readouterr().out
    assert load_settings(tmp_path / "run").model.windows == (WINDOW,) * 2


def test_kinds_are_written_in_a_file_and_on_the_command_line_and_are_saved():
    line = ["--config=configs/tiny_gqa.py", "--config.model.layers_of=near far", f"--config.model.kinds={KINDS}"]
    model = read_command(["x", *line, "--config.model.kinds.near.rope_theta=500"], {})[0].model
    assert model.kinds == "far=(rope=False) near=(rope_theta=500.0, sliding_window=4)"
    assert model.windows == (4, 0) and model.layer_kinds == ("dense", "dense")
    as_objects = {"near": {"sliding_window": 4, "rope_theta": 500.0}, "far": {"rope": False}}
    changed = read_settings(get_config(), model={"layers": 2, "layers_of": "near far", "kinds": as_objects})
    assert changed.model.kinds == model.kinds
    assert read_settings(json.loads(json.dumps(changed.to_dict()))) == changed


def test_a_kind_with_settings_may_have_a_class_too():
    block = "support.user_parts:ParallelBlock"
    model = dict(layers=2, layers_of="side far", kinds={"side": {"block": block, "sliding_window": 4}, "far": {}})
    settings = read_settings(get_config(), model=model)
    assert settings.model.kinds == f"side={block} far=() side=(sliding_window=4)"
    assert settings.model.windows == (4, 0) and settings.model.layer_kinds == ("side", "dense")
    again = read_settings(json.loads(json.dumps(settings.to_dict())))
    assert again == settings and again.model.kinds.target == settings.model.kinds.target
    with_class = with_code(settings, {"model.kinds": {"side": user_parts.ParallelBlock}})
    assert with_class.model.windows == (4, 0), "settings stay with a class given anew"


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ("near=(sliding_window=-1)", "model.kinds.near.sliding_window=-1 must be a whole number of 0 or more"),
        (
            "near=(rope_factor=2.0)",
            "model.kinds.near: model.rope_factor=2.0 does nothing with model.rope_scaling='none'",
        ),
        (
            "near=(vocab=2)",
            "model.kinds.near.vocab is not a setting in which kinds of layers differ; known: base, ",
        ),
        ("near=(base='mow')", "model.kinds.near.base='mow' is unknown; did you mean 'moe'?"),
        ("near=(base='mow', d_ff=96)", "model.kinds.near.base='mow' is unknown; did you mean 'moe'?"),
        ("near=() near=()", 'must be "NAME=module:name"'),
        ("near=() far=(rope=False)", "has settings for 'far', but .* has no such layer; its kinds are near"),
        ("near=() moe=(base='dense')", "has settings for 'moe'"),
    ],
)
def test_what_is_wrong_of_a_kind_is_one_line(kinds, message):
    with pytest.raises(ConfigError, match=message):
        model_config(layers=2, layers_of="near*2", kinds=kinds)


def test_attention_maps_end_at_the_window_of_their_layer():
    model = build((1, 1, 1), layers=2, layers_of="near far", attention="gqa", kinds=KINDS)
    batch = make_batch(rows=1, seq=9)
    batch |= {"segments": np.ones_like(batch["segments"])}
    seen = px.look_inside(model, params_of(model), batch).attention.min(axis=(1, 2))
    back = np.arange(9)[:, None] - np.arange(9)[None]
    assert ((seen[0] > 0) == ((back >= 0) & (back < 4))).all() and ((seen[1] > 0) == (back >= 0)).all()


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
