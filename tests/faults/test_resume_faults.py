"""A run after a kill, a damaged checkpoint or a changed config goes on as if nothing was, or says why it does not."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support.checkpoint_examples import fill, flip, largest_file, rewrite, truncate
from support.process_examples import flags_of
from support.run_examples import at_step, tiny_config
from support.stand_ins import full_disk, on_write

from parallax.checkpoint.steps import latest_step, read_manifest
from parallax.cli import train as command_line
from parallax.errors import CheckpointError
from parallax.storage.run_files import read_metrics
from parallax.training.folder import RunFolder
from parallax.training.logger import RunLogger
from parallax.training.resume import step_to_resume
from parallax.training.run import train

ROOT = pathlib.Path(command_line.__file__).parents[2]
EVERY_SECOND = {"checkpoint.every_steps": 2, "checkpoint.keep_last": 9, "checkpoint.keep_best": 0}


@pytest.fixture(scope="module")
def never_stopped(corpus, tmp_path_factory):
    """The folder of a whole run with a checkpoint after every second step; not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    train(tiny_config(corpus, **EVERY_SECOND), folder)
    return folder


@pytest.fixture
def at_six(never_stopped, tmp_path):
    """The same run as a kill after step 6 leaves it."""
    folder = tmp_path / "run"
    shutil.copytree(never_stopped, folder)
    shutil.rmtree(folder / "checkpoints" / "8")
    return folder


def assert_same_run(folder, other, steps=8):
    """Losses, evaluations, parameters and optimizer states are equal bit for bit."""

    def numbers(at):
        rows = read_metrics(at / "metrics.jsonl")
        names = ("train/loss", "train/grad_norm", "eval/loss")
        return [
            (row["step"], *(np.float32(row[name]).tobytes().hex() for name in names if name in row)) for row in rows
        ]

    assert numbers(folder) == numbers(other) and len(numbers(folder)) == steps
    here, there = (read_manifest(at / "checkpoints", steps)["arrays"] for at in (folder, other))
    assert here == there and len(here["rest"]) > 20


def go_on(corpus, folder, **changes):
    return train(tiny_config(corpus, **(EVERY_SECOND | changes)), folder)


@pytest.mark.fast(1)
@pytest.mark.parametrize("how", [flip, truncate, pathlib.Path.unlink], ids=["flipped", "truncated", "deleted"])
def test_a_damaged_step_is_named_and_the_run_goes_on_from_the_one_before(corpus, at_six, never_stopped, capsys, how):
    how(largest_file(at_six / "checkpoints" / "6" / "params"))
    assert go_on(corpus, at_six).reason == "finished"
    out = capsys.readouterr().out
    assert "the checkpoint of step 6 is damaged: its file params/" in out and "not what was saved" in out
    aside = at_six / "checkpoints" / "damaged-6"
    assert f"set aside as {aside}, going on from step 4, the one before it" in out and aside.is_dir()
    assert "going on from step 4\n" in out and "is damaged" in (at_six / "log.txt").read_text()
    assert_same_run(at_six, never_stopped)


def test_where_all_steps_are_damaged_the_run_is_refused_and_nothing_moves(corpus, at_six):
    for step in (2, 4, 6):
        flip(largest_file(at_six / "checkpoints" / str(step) / "params"))
    before = sorted(at_six.rglob("*"))
    config = (at_six / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged: step 6: .*; step 4: .*; step 2: "):
        go_on(corpus, at_six, **{"optimizer.learning_rate": 1e-3})
    assert sorted(at_six.rglob("*")) == before and (at_six / "config.json").read_bytes() == config


def test_weights_of_another_run_come_from_its_newest_step_that_is_whole(corpus, at_six, tmp_path, capsys):
    flip(largest_file(at_six / "checkpoints" / "6" / "params"))
    train(tiny_config(corpus, **{"train.init_from": str(at_six)}), tmp_path / "fresh")
    assert "of step 6 in" in (out := capsys.readouterr().out) and "weights are those of step 4" in out
    assert (at_six / "checkpoints" / "6").is_dir()


def test_what_is_unfinished_is_cleared_away_and_said(corpus, at_six, never_stopped, capsys):
    checkpoints = at_six / "checkpoints"
    (checkpoints / "8.orbax-checkpoint-tmp").mkdir()
    (checkpoints / "8").mkdir()
    go_on(corpus, at_six)
    out = capsys.readouterr().out
    assert "removed an unfinished save of step 8, " in out
    assert f"set aside a checkpoint that was never finished: {checkpoints / 'unfinished-8'}" in out
    assert_same_run(at_six, never_stopped)


@pytest.mark.parametrize("left", ["checkpoints/4.orbax-checkpoint-tmp-1", "metrics.jsonl", ""])
def test_a_start_after_a_first_save_that_was_killed_says_that_it_begins_again(left, tmp_path):
    said = []
    if left:
        path = tmp_path / left
        path.write_text('{"step": 1}\n') if path.suffix == ".jsonl" else path.mkdir(parents=True)
    assert step_to_resume(RunFolder(tmp_path), {}, "auto", said.append) == 0
    assert said == [f"an earlier start in {tmp_path} has saved no step: this one begins again"] * bool(left)


def test_a_checkpoint_carries_config_code_tokenizer_and_data(corpus, never_stopped):
    step = never_stopped / "checkpoints" / "8"
    assert json.loads((step / "config.json").read_text())["model"]["vocab"] == 384
    assert (step / "tokenizer.json").read_bytes() == (never_stopped / "tokenizer.json").read_bytes()
    assert json.loads((step / "data.json").read_text())["tokens"] > 1000
    settings = read_manifest(never_stopped / "checkpoints", 8)["settings"]
    assert set(settings["code"]) >= {"parallax", "jax"} and set(settings["corpus"]) == {"fingerprint", "tokenizer"}


SHAPES = {"model.layers": 4, "model.d_model": 64, "model.d_ff": 128, "model.heads": 2, "model.vocab": 512}


def test_a_config_of_other_shapes_is_refused_field_by_field(corpus, at_six):
    with pytest.raises(CheckpointError) as error:
        go_on(corpus, at_six, **SHAPES)
    for key, (there, here) in {
        "model.layers": (2, 4),
        "model.d_model": (32, 64),
        "model.d_ff": (64, 128),
        "model.heads": (4, 2),
        "model.vocab": (384, 512),
    }.items():
        assert f"{key}={there} there, {here} here" in str(error.value)


def test_changes_that_are_safe_are_listed(corpus, at_six, capsys):
    rewrite(at_six / "checkpoints", 6, lambda manifest: manifest["settings"]["code"].update(parallax="0.0.1+edited"))
    changes = {"optimizer.learning_rate": 1e-3, "mesh.pp": 2, "mesh.dp": 4, "pipeline.schedule": "one_f_one_b"}
    # A run that is done says so after the list.
    assert go_on(corpus, at_six, **changes, **{"train.steps": 6}).reason == "nothing to do"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "changed settings" in line]
    for text in (
        "optimizer.learning_rate=0.003 there, 0.001 here",
        "mesh.pp=1 there, 2 here",
        "pipeline.schedule='gpipe' there, 'one_f_one_b' here",
        "code.parallax='0.0.1+edited' there, ",
    ):
        assert text in line


def test_another_tokenizer_is_refused_by_name(corpus, at_six, tmp_path):
    rewrite(at_six / "checkpoints", 6, lambda manifest: manifest["settings"]["corpus"].update(tokenizer="f00"))
    with pytest.raises(
        CheckpointError, match="the text or its tokenizer is not, corpus.tokenizer='f00' there, '[0-9a-f]{12}' here;"
    ):
        go_on(corpus, at_six)
    with pytest.raises(
        CheckpointError, match=r"learned other ids: corpus.tokenizer='f00' there, '.*' here; use .*/tokenizer\.json"
    ):
        go_on(corpus, tmp_path / "fresh", **{"train.init_from": str(at_six)})


def test_the_lock_of_a_dead_process_holds_nobody_up(corpus, at_six, never_stopped):
    (at_six / "lock").write_text("process 1 on elsewhere since 1999-01-01 00:00:00")
    go_on(corpus, at_six)
    assert_same_run(at_six, never_stopped)


def saved_step(manifest):
    """The step of a manifest in a folder that is not finished."""
    return int(manifest.parent.name.partition(".")[0])


def test_a_save_that_fails_ends_the_run_with_status_3_and_the_step_before_is_there(corpus, tmp_path, monkeypatch):
    on_write(monkeypatch, "checkpoints/*/manifest.json", lambda path: full_disk() if saved_step(path) == 4 else None)
    with pytest.raises(CheckpointError, match="cannot save step 4 in .*No space left") as error:
        go_on(corpus, tmp_path)
    assert error.value.exit_status == 3 and latest_step(tmp_path / "checkpoints") == 2
    assert "No space left" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_a_slow_save_does_not_stop_the_steps(corpus, never_stopped, tmp_path, monkeypatch):
    """The disk takes the last of step 4 no sooner than step 5 is over."""
    later = threading.Event()

    def slow(manifest):
        assert saved_step(manifest) != 4 or later.wait(60), "step 5 waits for the save of step 4"

    def let_it_end():
        assert latest_step(tmp_path / "checkpoints") == 2
        later.set()

    on_write(monkeypatch, "checkpoints/*/manifest.json", slow)
    at_step(monkeypatch, 5, let_it_end)
    assert go_on(corpus, tmp_path).reason == "finished"
    assert_same_run(tmp_path, never_stopped)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["log.txt", "metrics.jsonl"])
def test_a_disk_that_fills_up_ends_the_run_with_status_3_and_it_goes_on_when_there_is_room(
    corpus, never_stopped, small_disk, monkeypatch, first
):
    """The first to meet it is no save, but a line of the log or of the metrics."""
    subprocess.run(["mount", "-o", "remount,size=24m", small_disk], check=True)  # room for each checkpoint of the run

    on_disk = RunLogger.on_disk

    def fill_up(self, step, secs, **limits):
        """Not before: at its end a save removes what Orbax has noted, and has room for a line again."""
        on_disk(self, step, secs, **limits)
        if step == 4:
            fill(small_disk / first)

    def wait_for_the_save():  # so that it ends before the step of the next one
        while latest_step(small_disk / "checkpoints") != 4:
            time.sleep(0.01)

    at_step(monkeypatch, 5, wait_for_the_save)
    monkeypatch.setattr(RunLogger, "on_disk", fill_up)
    full = (
        rf"^cannot write in {small_disk} \(No space left on device\); what is saved stays; make room, and the same .*$"
    )
    with pytest.raises(CheckpointError, match=full) as error:
        go_on(corpus, small_disk)
    assert error.value.exit_status == 3 and latest_step(small_disk / "checkpoints") == 4
    monkeypatch.undo()
    (small_disk / first).write_text(re.sub(r"\n{4096,}", "\n", (small_disk / first).read_text()))
    assert go_on(corpus, small_disk).reason == "finished"
    assert_same_run(small_disk, never_stopped)


def test_a_full_disk_at_the_start_is_named(small_disk):
    fill(small_disk / "filler")
    with pytest.raises(CheckpointError, match=r"cannot write in .* \(No space left on device\)"):
        with RunFolder(small_disk / "run").locked():
            pass


@pytest.mark.parametrize("text", ['{"starts": 5}', "[1"])
def test_torn_metadata_keeps_no_run_from_going_on(corpus, at_six, never_stopped, text):
    (at_six / "metadata.json").write_text(text)
    assert go_on(corpus, at_six).reason == "finished"
    (start,) = json.loads((at_six / "metadata.json").read_text())["starts"]
    assert start["start"] == 6
    assert_same_run(at_six, never_stopped)


def main(corpus, folder, **changes):
    """The tiny run as arguments of train.py."""
    return [*flags_of(corpus, **EVERY_SECOND | changes, **{"mesh.simulate": 8}), f"--workdir={folder}"]


def start(*command):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-u", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_at(process, word, *, after_secs=0.0):
    """Send SIGKILL when a line with the word was printed; returns whether the run was still going."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if word in line:
            break
    time.sleep(after_secs)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL or "finished" in "".join(seen), "".join(seen)
    return process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_kill_during_an_asynchronous_save_loses_nothing(corpus, never_stopped, tmp_path, capsys):
    process = start("tests/faults/stuck_save.py", "4", *main(corpus, tmp_path))
    assert kill_at(process, "saving step 4: arrays are written")
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert any(name.startswith("4.orbax-checkpoint-tmp") for name in left) and "2" in left
    assert latest_step(tmp_path / "checkpoints") == 2
    go_on(corpus, tmp_path)
    out = capsys.readouterr().out
    assert "removed an unfinished save of step 4" in out and "going on from step 2" in out
    assert_same_run(tmp_path, never_stopped)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"mesh.pp": 2, "mesh.dp": 2, "mesh.tp": 2}], ids=["dp8", "2·2·2"])
def test_kills_at_random_moments_lose_nothing(corpus, tmp_path, mesh):
    """Saves follow each other, so that most kills hit one."""
    changes = {"checkpoint.every_steps": 1, "train.steps": 40, "train.eval_every_steps": 10, **mesh}
    whole, run = tmp_path / "whole", tmp_path / "run"
    ended = start("train.py", *main(corpus, whole, **changes))
    assert "finished: step 40" in ended.communicate(timeout=300)[0] and ended.returncode == 0
    rng, kills = random.Random(0), 0
    for _ in range(8):
        process = start("train.py", *main(corpus, run, **changes))
        kills += kill_at(process, rng.choice(["tokens to train on", "step "]), after_secs=rng.uniform(0, 2))
    ended = start("train.py", *main(corpus, run, **changes))
    assert "step 40" in ended.communicate(timeout=300)[0] and ended.returncode == 0
    assert kills >= 3
    assert_same_run(run, whole, steps=40)
