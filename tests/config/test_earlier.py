"""Configs of earlier versions load: keys that were renamed, and keys that came later, said in one line."""

import json
from typing import get_type_hints

import pytest
from support.checkpoint_examples import save_settings

from configs.base import get_config
from parallax.cli.command import read_command, read_line
from parallax.config import earlier
from parallax.config.earlier import RENAMED, of_today, renamed
from parallax.config.sections import SECTIONS
from parallax.config.settings import Settings, load_settings, read_settings
from parallax.errors import ConfigError, check_choice
from parallax.training.folder import RunFolder
from parallax.training.resume import step_to_resume

WIDTHS = {"small": 64, "large": 512}
BASE = get_config().to_dict()
SAID = "model.size='small' is now model.d_model=64, model.d_ff=128"


def sizes(value, config):
    """What `model.size` was: a name for two keys, one of which depended on another section."""
    check_choice("model.size", value, WIDTHS)
    factor = 4 if config["pipeline"]["remat"] == "stage" else 2
    return {"model.d_model": WIDTHS[value], "model.d_ff": factor * WIDTHS[value]}


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    """Two keys and a section that were there once."""
    monkeypatch.setitem(RENAMED, "model.size", sizes)
    monkeypatch.setitem(RENAMED, "loop.length", lambda value, _: {"train.steps": value})


def with_old(**old):
    """A config as an earlier version wrote it."""
    config = get_config().to_dict()
    del config["model"]["d_model"], config["model"]["d_ff"]
    config["model"].update(old)
    return config


def of(settings):
    return settings.model.d_model, settings.model.d_ff


def test_every_rename_gives_keys_that_there_are():
    today = {f"{name}.{key}" for name, section in SECTIONS.items() for key in section.__dataclass_fields__}
    assert not RENAMED.keys() & today
    assert get_type_hints(Settings) == SECTIONS and [*get_type_hints(Settings)] == [*SECTIONS]


def test_an_earlier_run_whose_idle_ranks_skipped_the_work_loads_and_one_that_masked_it_is_refused():
    assert read_settings(BASE, pipeline={"branches": "skip"}).to_dict() == BASE
    with pytest.raises(ConfigError, match="pipeline.branches='mask' was removed: idle ranks always skip the work"):
        read_settings(BASE, pipeline={"branches": "mask"})


def test_keys_of_a_config_in_python_are_renamed_with_a_warning(capsys):
    assert of(read_settings(with_old(size="small"))) == (64, 128)
    assert capsys.readouterr().err == f"warning: {SAID}\n"
    assert of(read_settings(BASE, model={"size": "large"}, pipeline={"remat": "stage"})) == (512, 2048)
    assert read_settings(BASE | {"loop": {"length": 7}}).train.steps == 7
    with pytest.raises(ConfigError, match="model.size='tiny' is unknown; known: small, large"):
        read_settings(with_old(size="tiny"))


def test_a_config_of_today_is_left_as_it_is(capsys):
    assert renamed(BASE) == of_today(BASE) == (BASE, [])
    read_settings(BASE)
    assert capsys.readouterr().err == ""


def test_the_config_of_an_earlier_run_loads_and_one_line_says_what_was_changed(tmp_path, capsys):
    old = with_old(size="small")
    del old["train"]["compile_cache"], old["model"]["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(old))
    line = f"{tmp_path / 'config.json'} is of an earlier version: {SAID}; "
    line += "model.sliding_window=0 is added; train.compile_cache='auto' is added\n"
    settings = load_settings(tmp_path)
    assert of(settings) == (64, 128) and settings.model.sliding_window == 0
    assert capsys.readouterr().err == line
    assert read_command(["plan", f"--config={tmp_path / 'config.json'}"], {})[0] == settings
    assert capsys.readouterr().err == line


def test_a_run_goes_on_from_a_checkpoint_whose_settings_have_earlier_names(tmp_path):
    said = []
    save_settings(tmp_path / "checkpoints", 8, with_old(size="small"))
    settings = read_settings(BASE, model={"size": "small"}).to_dict()
    assert step_to_resume(RunFolder(tmp_path), settings, "auto", said.append) == 8 and not said


@pytest.mark.parametrize("words", [["--config.model.size=small"], ["--config.model.size", "small"]], ids=len)
def test_an_earlier_name_on_the_command_line_is_renamed_with_a_warning(words, capsys):
    settings, _ = read_command(["plan", "--config=configs/base.py", *words], {})
    assert of(settings) == (64, 128) and capsys.readouterr().err == f"warning: {SAID}\n"


def test_a_file_of_the_users_may_have_earlier_names_which_the_command_line_may_change(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from configs.base import get_config as base\n"
        "def get_config():\n    config = base()\n    config.model.size = 'large'\n    return config\n"
    )

    def read(*words):
        line = read_line(["train.py", f"--config={path}", *words], {})
        return of(read_settings(line.config)), line.warnings

    assert read() == (
        (512, 1024),
        (f"warning: {SAID}".replace("small", "large").replace("64", "512").replace("128", "1024"),),
    )
    assert read("--config.model.size=small") == ((64, 128), (f"warning: {SAID}",))
    # What the command line writes with today's name counts.
    assert read("--config.model.d_ff=99") == ((512, 99), ("warning: model.size='large' is now model.d_model=512",))
    assert read("--config.loop.length=5")[1][-1] == "warning: loop.length=5 is now train.steps=5"


def test_an_earlier_name_is_not_one_of_todays(monkeypatch):
    monkeypatch.delitem(RENAMED, "model.size")
    with pytest.raises(ConfigError, match=r"unknown key --config\.model\.size"):
        read_line(["train.py", "--config=configs/base.py", "--config.model.size=small"], {})
    assert earlier.renamed({"model": 5, "loop": {}}) == ({"model": 5, "loop": {}}, [])
