"""What the config of a received run decides: what is computed and read, and never where code is loaded from, where
anything is written, or who is told."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest

from parallax.cli import evaluate, generate, replay
from parallax.cli import train as command_line
from parallax.cli.command import load_config, read_line, read_line_of_run
from parallax.config.earlier import RENAMED
from parallax.config.keys import Section, key
from parallax.config.sections import SECTIONS
from parallax.config.settings import NOT_SAVED, OF_A_MODEL, default_settings, load_saved, load_settings, tell_saved
from parallax.inference import run as run_of_inference
from parallax.interop.export import export_params, import_params
from parallax.training import build as build_of_training

ROOT = pathlib.Path(command_line.__file__).parents[2]
TOLD = {"train.wandb": "a project of theirs", "train.tensorboard": True, "train.profile_steps": "3:4"}


def write(folder, **values):
    """Change keys of a run's config.json, written section__key=value."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.exists() else default_settings().to_dict()
    for name, value in values.items():
        section, _, name = name.partition("__")
        config[section][name] = value
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    return path


def another(value):
    if isinstance(value, bool):
        return not value
    return f"{value}x" if isinstance(value, str) else value + 1


EVERY_KEY = {f"{name}.{field.name}": field for name, section in SECTIONS.items() for field in fields(section)}


def test_a_saved_config_decides_every_key_but_where_things_go_come_from_and_who_is_told(tmp_path, capsys):
    """Whoever adds a key has it here: is it for a stranger to decide?"""
    assert NOT_SAVED == (
        "data.cache",
        "data.cache_bytes",
        "train.compile_cache",
        "train.profile_steps",
        "train.tasks",
        "train.tasks_every_steps",
        "train.tasks_folder",
        "train.tasks_limit",
        "train.tensorboard",
        "train.wandb",
        "checkpoint.local",
        "checkpoint.local_every_steps",
    )
    base = default_settings().to_dict()
    wrong = {name: another(field.default) for name, field in EVERY_KEY.items()}
    path = write(tmp_path / "run", **{name.replace(".", "__"): value for name, value in wrong.items()})
    found, left_out = load_saved(path)
    tell_saved(path, default_settings().to_dict(), left_out, NOT_SAVED)
    for name, value in wrong.items():
        section, _, key = name.partition(".")
        assert found[section][key] == (base[section][key] if name in NOT_SAVED else value), name
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"{path} does not decide data.cache='x' and data.cache_bytes=")
    assert "--config" not in said and all(f"{name}=" in said for name in NOT_SAVED)


def test_nothing_is_said_of_keys_that_have_their_defaults_or_that_nobody_uses(tmp_path, capsys):
    for changes, reads in (({}, NOT_SAVED), ({"train__wandb": "theirs"}, OF_A_MODEL)):
        path = write(tmp_path / "run", **changes)
        tell_saved(path, *load_saved(path), reads)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("section", [{}, {"saved": True}], ids=["silent", "allowed"])
def test_a_new_key_says_whether_a_saved_config_decides_it(section):
    """A text may name a place, so its section cannot answer for it; nobody answers for a number in a silent one."""
    for kind, default in [(str, "")] + [(int, 0), (bool, False)] * (not section):
        with pytest.raises(AssertionError, match=r"write saved=True or saved=False for new\.place"):
            type("NewConfig", (Section,), {"place": key(default, "?"), "__annotations__": {"place": kind}}, **section)


def test_keys_that_were_renamed_become_no_others():
    assert not {*RENAMED} & {*NOT_SAVED}  # of_today renames before a config is cut to what it decides


# ---- every way to read one


@pytest.fixture
def received(whole_run, tmp_path):
    """A finished run whose config names folders of its own making for all that is loaded and written."""
    shutil.copytree(whole_run, tmp_path / "run")
    places = {"train__compile_cache": str(tmp_path / "run" / "compiled"), "data__cache": str(tmp_path / "victim")}
    write(tmp_path / "run", **places, **{name.replace(".", "__"): value for name, value in TOLD.items()})
    return tmp_path / "run"


@pytest.fixture
def asked(monkeypatch):
    """Folders of compiled programs that JAX was asked to use."""
    found = []
    for module in (run_of_inference, build_of_training):
        monkeypatch.setattr(module, "use_compile_cache", found.append)
    return found


def go_on(run):
    return command_line.main(["train.py", f"--workdir={run}", "--config.train.steps=9"])


def from_its_config(run):
    words = ["--config.train.steps=1", "--config.optimizer.warmup_steps=0", "--config.model.vocab=0"]
    return command_line.main(["train.py", f"--config={run}/config.json", f"--workdir={run}-2", *words])


COMMANDS = {
    "generate with a mesh": lambda run: generate.main(
        [f"--workdir={run}", "--prompt=It is", "--tokens=2", "--config.mesh.tp=2"]
    ),
    "generate": lambda run: generate.main([f"--workdir={run}", "--prompt=It is", "--tokens=2"]),
    "evaluate": lambda run: evaluate.main(["evaluate", f"--workdir={run}"]),
    "replay": lambda run: replay.main(["replay", f"--workdir={run}", "--step=8"]),
    "train --workdir": go_on,
    "train --config": from_its_config,
}


@pytest.mark.fast(3)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_loads_code_from_where_a_received_run_says_or_writes_there(
    command, received, asked, tmp_path, capsys
):
    assert COMMANDS[command](received) == 0
    said = capsys.readouterr().err
    assert asked == ["auto"]
    assert f"{received}/config.json does not decide " in said
    assert f"train.compile_cache='{received}/compiled'" in said
    for name in ("compiled", "tensorboard", "profile", "wandb.json"):
        assert not (received / name).exists() and not (tmp_path / "run-2" / name).exists()
    assert not (tmp_path / "victim").exists()
    assert ("train.wandb=" in said) is command.startswith("train")
    assert (f"data.cache='{tmp_path}/victim'" in said) is (not command.startswith("generate"))
    # What it reads, it says; `generate` reads none of it.
    named = f"{received}/config.json names files, which are only read, as data: data.path="
    assert (named in said) is (not command.startswith("generate"))


def test_a_loaded_run_says_which_files_its_batches_are_of(received, asked, capsys, tmp_path, corpus):
    run = run_of_inference.load(received)
    said = capsys.readouterr().err
    assert asked == ["auto"] and "does not decide train.compile_cache=" in said and "names files" not in said
    assert run.batch(0)["tokens"].shape == run.batch(1)["tokens"].shape
    said = capsys.readouterr().err
    assert said.count("\n") == 2 and f"does not decide data.cache='{tmp_path}/victim': " in said
    assert f"data.path='{corpus}/*.txt'" in said and not (tmp_path / "victim").exists()


def test_complete_data_in_a_cache_that_a_saved_config_names_is_read_and_never_written(
    whole_run, corpus, tmp_path, capsys
):
    shutil.copytree(whole_run, tmp_path / "run")
    shutil.copytree(corpus / "cache", tmp_path / "cache")
    shutil.rmtree(tmp_path / "run" / "data", ignore_errors=True)
    write(tmp_path / "run", data__cache=str(tmp_path / "cache"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    assert evaluate.main(["evaluate", f"--workdir={tmp_path / 'run'}"]) == 0
    assert run_of_inference.load(tmp_path / "run").batch()["tokens"].size
    assert not (tmp_path / "run" / "data").exists()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == before
    for ids in (tmp_path / "cache").rglob("*.ids"):
        ids.unlink()
    assert evaluate.main(["evaluate", f"--workdir={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run" / "data").exists() and not [*(tmp_path / "cache").rglob("*.ids")]


def test_an_exported_and_imported_run_decides_no_more(received, tmp_path):
    export_params(received, tmp_path / "exported", step=None, shard_bytes=1 << 20)
    import_params(tmp_path / "exported", tmp_path / "imported")
    for folder in (received, received / "checkpoints" / "8", tmp_path / "exported", tmp_path / "imported"):
        settings = load_settings(folder)
        assert settings.train.compile_cache == "auto" and not settings.data.cache and not settings.train.wandb


def test_what_the_command_line_says_counts_and_is_not_said_again(received, capsys, tmp_path):
    words = ["--config.train.compile_cache=/mine", "--config.data.cache=mine", "--config.data.path=my.txt"]
    words += [f"--config.{name}={value}" for name, value in TOLD.items()]
    line = read_line_of_run(["evaluate", f"--workdir={received}", *words], evaluate.FLAGS)
    assert line.config.train.compile_cache == "/mine" and line.config.data.cache == "mine"
    assert line.config.train.wandb and line.config.train.tensorboard and line.config.train.profile_steps
    assert capsys.readouterr().err == ""


def test_a_config_that_the_user_wrote_decides_everything(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from configs.base import get_config as base\n"
        "def get_config():\n    config = base()\n    config.train.compile_cache = '/mine'\n    return config\n"
    )
    line = read_line(["train.py", f"--config={tmp_path / 'mine.py'}"], {})
    assert line.config.train.compile_cache == "/mine" and not capsys.readouterr().err
    path = write(tmp_path / "run", train__compile_cache="/theirs")
    assert load_config(str(path))[0].train.compile_cache == "auto"


FILES = {
    "data__tokenizer": "/their/tokenizer.json",
    "data__chat_template": "/their/chat.jinja",
    "train__init_from": "/their/run",
    "train__continue_from": "/their/run/checkpoints/4",
    "pipeline__schedule": "their.csv",
}


def test_every_file_that_a_received_config_names_is_said(tmp_path, capsys):
    path = write(tmp_path / "run", data__source="text", data__path="/etc/*.conf", **FILES)
    read_line(["train.py", f"--config={path}"], {})
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert set(re.findall(r"([a-z]+\.[a-z_]+)='([^']*)'", said)) == {
        ("data.path", "/etc/*.conf"),
        *((name.replace("__", "."), value) for name, value in FILES.items()),
    }
    # No other key that a saved config decides is a path.
    paths = {name for name, field in EVERY_KEY.items() if field.metadata["key"].path}
    assert paths - {*NOT_SAVED} == {"data.path", "data.mixture", *(name.replace("__", ".") for name in FILES)}


@pytest.mark.parametrize("value", [[], {}, None, 7, "\x1b[2J", "x" * 9999], ids=lambda value: str(value)[:5])
def test_an_odd_value_of_a_key_that_it_does_not_decide_is_one_line(value, tmp_path, capsys):
    path = write(tmp_path / "run", train__compile_cache=value, data__cache=value, train__tensorboard=value)
    assert read_line(["train.py", f"--config={path}"], {}).config.train.compile_cache == "auto"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(said) < 1000 and said.strip().isprintable()


@pytest.mark.slow
def test_a_process_of_one_device_keeps_no_program_in_a_received_folder(received):
    """Where a folder for compiled programs is used on CPU: JAX is told of none, and makes none."""
    write(received, mesh__dp=1)
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-m", "parallax.generate", f"--workdir={received}", "--prompt=It", "--tokens=2"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert not (received / "compiled").exists()
