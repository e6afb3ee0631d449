"""A run that goes on from a chosen step of another one, in a folder of its own: bitwise as that one, or with other
data."""

import shutil

import numpy as np
import pytest
from support.checkpoint_examples import flip, largest_file
from support.run_examples import at_batch, losses, stop_at, tiny_config, write_corpus

from parallax.checkpoint.steps import read_manifest
from parallax.cli.replay import replay
from parallax.config.sections import TrainConfig
from parallax.config.settings import read_settings
from parallax.errors import CheckpointError, ConfigError
from parallax.storage.run_files import read_metrics
from parallax.training.folder import RunFolder
from parallax.training.run import train

OF_STEPS = ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss")


@pytest.fixture(scope="module")
def source(corpus, tmp_path_factory):
    """The folder of a whole run of eight steps, with a checkpoint after every second one; not to be changed."""
    folder = tmp_path_factory.mktemp("source") / "run"
    train(saving(corpus), folder)
    return folder


def saving(corpus, **changes):
    every_second = {"checkpoint.every_steps": 2, "checkpoint.keep_last": 9, "checkpoint.keep_best": 0}
    return tiny_config(corpus, **every_second | changes)


def continuing(corpus, source, step=4, **changes):
    return saving(corpus, **{"train.continue_from": f"{source}/checkpoints/{step}"} | changes)


def metrics(folder):
    return [
        {name: row[name] for name in ("step", *OF_STEPS) if name in row}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


def assert_as(folder, source):
    assert metrics(folder) == metrics(source) and len(metrics(folder)) == 8
    here, there = (read_manifest(at / "checkpoints", 8)["arrays"] for at in (folder, source))
    assert here == there and len(here["rest"]) > 20


def test_it_is_bitwise_the_run_that_it_goes_on_from_and_leaves_that_one_as_it_was(corpus, source, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    assert train(continuing(corpus, source), tmp_path).reason == "finished"
    assert_as(tmp_path, source)
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before
    assert f"run {tmp_path}, going on from {source}/checkpoints/4\n" in capsys.readouterr().out
    start = RunFolder(tmp_path).starts()[-1]
    assert (start["start"], start["continued_from"]) == (4, f"{source}/checkpoints/4")
    # The same command goes on from its own steps.
    assert train(continuing(corpus, source), tmp_path).reason == "nothing to do"


def test_the_same_command_begins_it_anew_until_it_has_saved_and_then_needs_the_other_run_no_more(
    corpus, source, tmp_path, monkeypatch, capsys
):
    there, here = tmp_path / "there", tmp_path / "here"
    shutil.copytree(source, there)
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        first = train(continuing(corpus, there), here)
        assert first.reason == "stopped" and first.step < 8
        shutil.rmtree(here / "checkpoints")  # as if it had been killed before a save
        done = train(continuing(corpus, there), here).step
    assert "has saved no step: this one begins again" in capsys.readouterr().out
    shutil.rmtree(there)
    assert train(continuing(corpus, there), here).reason == "finished"
    assert f"run {here}, going on from step {done}\n" in capsys.readouterr().out
    assert_as(here, source)


def test_other_data_is_refused_unless_it_is_allowed_and_then_is_read_at_the_same_step_numbers(
    corpus, source, tmp_path, monkeypatch
):
    other = write_corpus(tmp_path / "other")
    (other / "00.txt").write_text("Something else entirely. " * 9)
    with pytest.raises(
        CheckpointError, match=r"with other settings: .*, or allow other data with train.other_data=True$"
    ):
        train(continuing(other, source), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    numbers = []
    with monkeypatch.context() as patch:
        at_batch(patch, "train", numbers.append)
        train(continuing(other, source, **{"train.other_data": True}), tmp_path / "allowed")
    assert sorted(numbers)[:4] == [4, 5, 6, 7]  # and later ones, which are read ahead
    found, whole = losses(tmp_path / "allowed"), losses(source)
    assert found[:4] == whole[:4] and not np.isin(found[4:], whole).any()
    # It has other data now: so its own steps go on with that.
    (tmp_path / "allowed" / "checkpoints" / "8" / "manifest.json").unlink()
    again = continuing(other, source, **{"train.other_data": True})
    assert train(again, tmp_path / "allowed").reason == "finished" and losses(tmp_path / "allowed") == found
    with pytest.raises(CheckpointError, match="with other settings: "):
        (tmp_path / "allowed" / "checkpoints" / "8" / "manifest.json").unlink()
        train(continuing(corpus, source, **{"train.other_data": True}), tmp_path / "allowed")


def test_other_data_has_the_same_tokenizer(corpus, source, tmp_path):
    changes = {"train.other_data": True, "data.tokenizer": "bpe", "data.bpe_vocab": 280, "model.vocab": 384}
    with pytest.raises(CheckpointError, match=r"corpus.tokenizer='\w+' there, '\w+' here"):
        train(continuing(write_corpus(tmp_path / "other"), source, **changes), tmp_path / "run")


@pytest.mark.parametrize(
    ("step", "changes", "message"),
    [
        (3, {}, "there is no checkpoint of step 3 in .*; steps there: 2, 4, 6, 8"),
        (4, {"model.d_ff": 32}, "cannot go on from step 4 in .* with other settings: model.d_ff=64 there, 32 here"),
        (4, {"train.seed": 1}, "with other settings: train.seed=0 there, 1 here"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(corpus, source, tmp_path, step, changes, message):
    with pytest.raises(CheckpointError, match=message):
        train(continuing(corpus, source, step, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_damaged_step_is_refused_and_no_other_is_taken(corpus, source, tmp_path):
    shutil.copytree(source, tmp_path / "there")
    flip(largest_file(tmp_path / "there" / "checkpoints" / "4" / "params"))
    with pytest.raises(CheckpointError, match="the checkpoint of step 4 in .* is damaged: .*; use another step"):
        train(continuing(corpus, tmp_path / "there"), tmp_path / "run")


def test_no_steps_of_a_folder_are_lost(corpus, source):
    """Neither those of the run itself nor those of a third one."""
    for step in (4, 8):
        with pytest.raises(
            CheckpointError, match="holds a run at step 8, which began with its own first step, not with"
        ):
            train(continuing(corpus, source, step), source)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"continue_from": "runs/mine"}, "train.continue_from='runs/mine' is not a step of a run; write its folder"),
        ({"continue_from": "runs/mine/checkpoints/0"}, "is not a step of a run"),
        (
            {"continue_from": "a/checkpoints/2", "init_from": "b"},
            "train.init_from='b' does nothing with train.continue",
        ),
        ({"other_data": True}, "train.other_data=True does nothing without train.continue_from"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**keys)


def test_a_step_before_its_first_checkpoint_is_not_replayed_from_initial_values(corpus, source, tmp_path):
    config = continuing(corpus, source)
    train(config, tmp_path)
    with pytest.raises(CheckpointError, match="began from train.continue_from='.*/checkpoints/4'; replay a step after"):
        replay(read_settings(config), RunFolder(tmp_path), 5)
