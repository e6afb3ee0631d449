"""What a run says of its settings when it starts; what of a config file goes with fewer steps on the command line."""

import json
import pathlib

import pytest
from support.run_examples import as_flags, first_state, stop_at, tiny_config

from configs.base import get_config
from parallax.cli import train as command_line
from parallax.cli.command import read_command, read_line
from parallax.config.settings import PRINTED_WIDTH, default_settings, differences, load_settings, read_settings
from parallax.errors import ConfigError
from parallax.step.optimizer import learning_rate
from parallax.storage.run_files import read_metrics
from parallax.training.run import train

ROOT = pathlib.Path(command_line.__file__).parents[2]
QUICKSTART = f"--config={ROOT / 'configs' / 'quickstart.py'}"


def read(*words):
    line = read_line(["train.py", *words], {})
    return read_settings(line.config), line.warnings


def as_a_file(config, path):
    """A config file of a user's own."""
    path.write_text(f"from ml_collections import ConfigDict\n\ndef get_config():\n    return ConfigDict({config!r})\n")
    return f"--config={path}"


def test_a_run_prints_what_differs_from_the_base_config_and_each_key_once():
    assert default_settings() == read_settings(get_config()) and differences(default_settings()) == []
    changed = read_settings(get_config(), mesh={"tp": 4}, sample={"prompt": "a  b"}, train={"wandb": "x" * 200})
    assert differences(changed) == [
        "mesh           tp=4",
        f"train          wandb={'x' * 200!r}",
        "sample         prompt='a  b'",
    ]
    every = differences(read_settings(tiny_config(ROOT)))
    assert max(map(len, every)) <= PRINTED_WIDTH and len(every) < 12
    text = " ".join(every)
    assert text.count(" layers=2") == 1 and "rope_theta" not in text and "d_model=32" in text


def test_the_log_says_what_of_the_text_is_left_out_and_spells_special_tokens(tmp_path):
    """Also when the text was prepared before."""
    texts = tmp_path / "texts"
    texts.mkdir()
    lines = [json.dumps({"text": f"{number} is one of many<|endoftext|>numbers " * 8}) for number in range(60)]
    (texts / "a.jsonl").write_text("\n".join(lines))
    (texts / "README.md").write_text("no text")
    data = {"data.source": "jsonl", "data.path": str(texts), "data.tokenizer": "bpe", "data.bpe_vocab": 280}
    for start in ("first", "second"):
        first_state(tiny_config(tmp_path, **data, **{"model.vocab": 0}), tmp_path / start)
        log = (tmp_path / start / "log.txt").read_text()
        assert f"\n{texts}: reading 1 file, leaving out 1: 1 with the ending .md\n" in log
        assert "\nthe text spells 480 special tokens of the tokenizer, which stay text\n" in log


# ---- fewer steps


def test_a_warm_up_of_the_file_is_cut_where_the_command_line_takes_fewer_steps():
    settings, (warning,) = read(QUICKSTART, "--config.train.steps=20")
    assert (settings.train.steps, settings.optimizer.warmup_steps) == (20, 2)
    learning_rate(settings.optimizer, settings.train.steps)
    assert warning == "warning: optimizer.warmup_steps=20 is not below train.steps=20; this run takes 2"
    assert read(QUICKSTART, "--config.train.steps", "1")[0].optimizer.warmup_steps == 0
    assert read(QUICKSTART, "--config.train.steps=21") == (read(QUICKSTART, "--config.train.steps=21")[0], ())
    assert read(QUICKSTART, "--config.train.steps=21")[0].optimizer.warmup_steps == 20


@pytest.mark.parametrize(
    "words",
    [
        ["--config.train.steps=20", "--config.optimizer.warmup_steps=20"],
        ["--config.optimizer.warmup_steps=240"],
        ["--config.train.steps=20", "--config.optimizer.warmup_steps", "30"],
    ],
    ids=str,
)
def test_a_warm_up_that_was_written_beside_the_steps_is_refused(words):
    settings, warnings = read(QUICKSTART, *words)
    assert not warnings
    with pytest.raises(ConfigError, match="optimizer.warmup_steps=.* must be below train.steps="):
        learning_rate(settings.optimizer, settings.train.steps)


def test_a_file_that_is_wrong_by_itself_is_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from configs.quickstart import get_config as base\n"
        "def get_config():\n    config = base()\n    config.train.steps = 20\n    return config\n"
    )
    settings, warnings = read(f"--config={path}")
    assert not warnings
    with pytest.raises(ConfigError, match="optimizer.warmup_steps=20 must be below train.steps=20"):
        learning_rate(settings.optimizer, settings.train.steps)


@pytest.mark.parametrize(("written", "left"), [("50:52", ""), ("15:40", "15:20"), ("20:21", "20:20"), ("3:20", "3:20")])
def test_steps_to_trace_of_the_file_are_cut_too(written, left, tmp_path):
    config = get_config().to_dict()
    config["train"]["profile_steps"], config["optimizer"]["warmup_steps"] = written, 0
    settings, warnings = read(as_a_file(config, tmp_path / "mine.py"), "--config.train.steps=20")
    assert settings.train.profile_steps == left and len(warnings) == (written != left)
    assert not warnings or f"train.profile_steps='{written}' goes beyond" in warnings[0]
    with pytest.raises(ConfigError, match="ends at step 52, but train.steps=20; use steps of the run"):
        read(QUICKSTART, "--config.train.steps=20", "--config.train.profile_steps=50:52")


@pytest.mark.parametrize("value", ["0", "-3"])
def test_steps_that_are_none_are_refused_as_before(value):
    with pytest.raises(ConfigError, match=f"train.steps={value} is too small; use 1 or more"):
        read(QUICKSTART, f"--config.train.steps={value}")


def test_other_commands_say_it_on_stderr(capsys):
    settings, _ = read_command(["plan", QUICKSTART, "--config.train.steps=20"], {})
    captured = capsys.readouterr()
    assert settings.optimizer.warmup_steps == 2 and not captured.out
    assert captured.err.startswith("warning: optimizer.warmup_steps=20 is ") and captured.err.count("\n") == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_adapters_beside_random_weights_are_said(corpus, tmp_path, monkeypatch, capsys, rank):
    """Who forgets train.init_from would fine-tune noise."""

    def begin(*_, **__):
        raise InterruptedError("it has begun")

    monkeypatch.setattr("parallax.training.run.run_to_end", begin)
    with pytest.raises(InterruptedError):
        train(tiny_config(corpus, **{"model.lora_rank": rank}), tmp_path / "run")
    said = "warning: model.lora_rank=2 trains adapters alone, beside weights that are random: train.init_from names"
    assert (said in capsys.readouterr().out) == (rank > 0)


def test_a_key_of_experts_without_any_is_refused_of_a_new_run_and_not_of_one_that_goes_on(
    corpus, tmp_path, monkeypatch
):
    """A run of an earlier version, which took it, keeps its settings."""

    def begin(*_, **__):
        raise InterruptedError("it has begun")

    monkeypatch.setattr("parallax.training.build.make_mesh", begin)
    config = tiny_config(corpus, **{"model.experts": 16})
    with pytest.raises(ConfigError, match=r"model\.experts=16 does nothing with model\.layers_of=''"):
        train(config, tmp_path / "run")
    monkeypatch.setattr("parallax.training.build.complete_steps", lambda folder: {3})
    with pytest.raises(InterruptedError):
        train(config, tmp_path / "run")


@pytest.mark.slow
def test_a_run_with_a_cut_warm_up_goes_on_as_the_same_run(corpus, tmp_path, monkeypatch):
    changes = {"optimizer.warmup_steps": 100, "train.steps": 200, "train.profile_steps": "50:52", "model.layers": 1}
    config = tiny_config(corpus, **changes, **{"data.cache": ""}).to_dict()

    def run(folder, *words):
        argv = ["train.py", f"--workdir={tmp_path / folder}", *words]
        line = read_line(argv, command_line.FLAGS, config=command_line.config_of_run(argv))
        return train(line.config, line.values["workdir"], resume=line.values["resume"], warnings=line.warnings)

    short = [as_a_file(config, tmp_path / "long.py"), *as_flags({"train.steps": 8, "checkpoint.every_steps": 0})]
    assert run("whole", *short).step == 8
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        done = run("parts", *short).step
    assert 2 <= done < 8
    saved = load_settings(tmp_path / "parts")
    assert (saved.train.steps, saved.optimizer.warmup_steps, saved.train.profile_steps) == (8, 0, "")
    assert run("parts").step == 8  # its own config.json says all
    whole, parts = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert [row["train/loss"] for row in whole] == [row["train/loss"] for row in parts]
    assert [row["train/learning_rate"] for row in whole] == [row["train/learning_rate"] for row in parts]
    log = (tmp_path / "parts" / "log.txt").read_text()
    assert (
        log.count("warning: optimizer.warmup_steps=100 is not")
        == 1
        == log.count("warning: train.profile_steps='50:52'")
    )
    assert "what differs from configs/base.py (all settings are in" in log and "changed settings" not in log
