"""A run stops, goes on, moves to another mesh and ends, and its losses are those of a run that never stopped."""

import errno
import io
import json
import os
import re
import shlex
import shutil
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from support.checkpoint_examples import save_settings
from support.run_examples import at_batch, at_step, losses, stop_at, tiny_config, write_corpus
from support.stand_ins import full_disk, on_write

from parallax.checkpoint.steps import complete_steps, latest_step
from parallax.cli import generate, watch
from parallax.cli import train as command_line
from parallax.cli.command import load_config, read_line
from parallax.cli.evaluate import evaluate
from parallax.cli.watch import WatchedRun, picture
from parallax.config.settings import load_settings, read_settings
from parallax.display import progress
from parallax.display.progress import ProgressPrinter, printing_progress, waiting
from parallax.errors import CheckpointError, ConfigError
from parallax.hardware.sensors import Sensors
from parallax.storage.run_files import COPIED, ON_DISK, read_metrics
from parallax.training.divergence import SkippedSteps
from parallax.training.facts import next_commands
from parallax.training.folder import RunFolder
from parallax.training.logger import RunLogger, drop_after
from parallax.training.loop import Due, TrainingLoop
from parallax.training.meter import Meter
from parallax.training.process_times import ProcessTimes
from parallax.training.profile import Profile
from parallax.training.resume import step_to_resume
from parallax.training.run import train
from parallax.training.step_reports import StepReports


@pytest.fixture
def halfway(whole_run, tmp_path):
    """What a kill after step 6 leaves: the checkpoint of step 4, lines beyond it, and the last of them torn."""
    folder = tmp_path / "halfway"
    shutil.copytree(whole_run, folder)
    shutil.rmtree(folder / "checkpoints" / "8")
    rows = [row for row in (folder / "metrics.jsonl").read_text().splitlines() if "train/loss" in row]
    (folder / "metrics.jsonl").write_text("\n".join(rows[:6]) + "\n" + rows[6][:20])
    return folder


def test_losses_after_resuming_are_bit_for_bit_those_of_a_run_that_never_stopped(
    corpus, tmp_path, whole_run, monkeypatch
):
    stop_at(monkeypatch, 2)
    outcome = train(tiny_config(corpus), tmp_path)
    monkeypatch.undo()
    assert outcome.reason == "stopped" and 2 <= outcome.step < 8
    assert latest_step(tmp_path / "checkpoints") == outcome.step
    assert train(tiny_config(corpus), tmp_path).reason == "finished"
    assert losses(tmp_path) == losses(whole_run)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 9))


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(corpus, halfway, whole_run, capsys):
    other = {"mesh.pp": 2, "mesh.dp": 2, "mesh.tp": 2, "pipeline.microbatches": 2}
    train(tiny_config(corpus, **other), halfway)
    assert (
        "going on with changed settings: mesh.dp=-1 there, 2 here, mesh.pp=1 there, 2 here" in capsys.readouterr().out
    )
    there, here = losses(whole_run), losses(halfway)
    # The same sums in another order: some units in the last place of float32, over 4 steps.
    np.testing.assert_allclose(here, there, rtol=1e-5)


def test_steps_that_a_kill_has_undone_are_computed_again_and_recorded_once(corpus, halfway, whole_run):
    assert train(tiny_config(corpus), halfway).reason == "finished"
    assert losses(halfway) == losses(whole_run)


@pytest.mark.slow
def test_a_fresh_run_can_start_from_the_weights_of_another(corpus, whole_run, tmp_path):
    config = tiny_config(corpus, **{"train.init_from": str(whole_run), "model.dropout": 0.0})
    config.optimizer.learning_rate = 0.0
    train(config, tmp_path)
    here, there = (read_metrics(folder / "metrics.jsonl") for folder in (tmp_path, whole_run))
    assert [row["step"] for row in here] == list(range(1, 9))
    assert here[-1]["eval/loss"] == pytest.approx(there[-1]["eval/loss"], rel=1e-6)


def test_weights_of_a_folder_without_checkpoints_are_refused(corpus, tmp_path):
    with pytest.raises(
        CheckpointError, match="train.init_from='nowhere' holds no checkpoint; name the folder of a run"
    ):
        train(tiny_config(corpus, **{"train.init_from": "nowhere"}), tmp_path)


def test_a_run_from_before_a_key_was_added_goes_on_as_if_it_had_it(corpus, whole_run, tmp_path):
    config = json.loads((whole_run / "config.json").read_text())
    del config["train"]["compile_cache"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path / "config.json")[0].train.compile_cache == "auto"
    settings, said = load_settings(tmp_path), []
    assert settings == load_settings(whole_run)
    config["data"]["cache"] = ""  # which a saved config does not decide
    save_settings(tmp_path / "checkpoints", 8, config)
    assert step_to_resume(RunFolder(tmp_path), settings.to_dict(), "auto", said.append) == 8 and not said


def test_a_finished_run_has_nothing_to_do(corpus, whole_run, capsys):
    before = losses(whole_run)
    outcome = train(tiny_config(corpus), whole_run)
    assert outcome.reason == "nothing to do" and outcome.step == 8
    assert "nothing to do" in capsys.readouterr().out and losses(whole_run) == before


def test_a_step_is_said_to_be_on_disk_when_it_is_and_copied_before(corpus, tmp_path, monkeypatch):
    """The disk takes the last of step 4 no sooner than step 6 is over."""
    later, seen = threading.Event(), {}

    def slow(manifest):
        assert manifest.parent.name.startswith("8") or later.wait(60)

    def look():
        seen.update(read_metrics(tmp_path / "metrics.jsonl")[3], log=(tmp_path / "log.txt").read_text())
        assert latest_step(tmp_path / "checkpoints") is None
        shown = io.StringIO()
        Console(file=shown, width=120).print(picture([WatchedRun(tmp_path)], Console(width=120)))
        assert "none yet; step 4 is copied, not yet on disk" in shown.getvalue()
        later.set()

    on_write(monkeypatch, "checkpoints/*/manifest.json", slow)
    at_step(monkeypatch, 6, look)
    assert train(tiny_config(corpus), tmp_path).reason == "finished"
    assert COPIED in seen and ON_DISK not in seen and "on disk" not in seen["log"]
    lines, rows = (tmp_path / "log.txt").read_text(), read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 9)]
    assert {row["step"]: row[COPIED] < row[ON_DISK] for row in rows if ON_DISK in row} == {4: True, 8: True}
    assert lines.index("step 6/8") < lines.index("step 4 is on disk")
    assert lines.index("step 8 is on disk") < lines.index("finished: step 8 is saved")


def test_a_step_that_fails_to_reach_the_disk_is_not_said_to_be_there(corpus, tmp_path, monkeypatch):
    on_write(monkeypatch, "checkpoints/8*/manifest.json", full_disk)
    with pytest.raises(CheckpointError, match="cannot save step 8"):
        train(tiny_config(corpus), tmp_path)
    lines, rows = (tmp_path / "log.txt").read_text(), read_metrics(tmp_path / "metrics.jsonl")
    assert "step 4 is on disk" in lines and "step 8 is" not in lines
    assert COPIED in rows[-1] and ON_DISK not in rows[-1]


def test_the_run_folder_says_what_the_run_is(corpus, whole_run):
    wanted = {"config.json", "metadata.json", "metrics.jsonl", "log.txt", "checkpoints", "tokenizer.json", "lock"}
    assert wanted == {path.name for path in whole_run.iterdir()} - {"data"}  # there if its batches were read again
    settings = read_settings(load_config(whole_run / "config.json")[0])
    assert settings == load_settings(whole_run) and settings.model.vocab == 384
    about = json.loads((whole_run / "metadata.json").read_text())
    assert about["starts"][0]["ended"]["reason"] == "finished"
    assert about["starts"][0]["versions"]["jax"] and about["starts"][0]["mesh"] == {"pp": 1, "dp": 8, "tp": 1}


def test_metrics_have_the_agreed_names_and_losses_fall(whole_run):
    rows = read_metrics(whole_run / "metrics.jsonl")
    wanted = {"step", "train/loss", "train/grad_norm", "train/learning_rate", "perf/tokens_per_second"}
    assert all(wanted | {"perf/mfu", "perf/data_wait_secs"} <= set(row) for row in rows)
    assert [row["step"] for row in rows if "eval/loss" in row] == [4, 8]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.5
    assert max(row["train/learning_rate"] for row in rows) == pytest.approx(3e-3)


def line_of_run(argv):
    return read_line(argv, command_line.FLAGS, config=command_line.config_of_run(argv))


def test_a_finished_run_says_what_to_do_next_in_commands_that_are_understood(corpus, whole_run):
    log = (whole_run / "log.txt").read_text()
    says, commands = log[log.index("what to do next:") :].split("\n\n")[:2]
    generates, watches, trains = [shlex.split(line.partition("   ")[2]) for line in commands.splitlines()]
    assert generates[1:3] == ["-m", "parallax.generate"] and watches[1:3] == ["-m", "parallax.watch"]
    assert generate.parse(generates[3:]).prompt == ["The "] and generate.parse(generates[3:]).workdir == whole_run
    assert watch.parse(watches[3:]).workdir == [whole_run]
    line = line_of_run(trains[2:])
    assert (line.values["workdir"], line.config.train.steps) == (str(whole_run), 16)
    assert line.config.data.cache == str(corpus / "cache")  # which its config.json does not decide


def test_what_to_do_next_has_every_key_that_the_saved_config_does_not_decide(corpus, whole_run, capsys):
    values = {"compile_cache": "/a b", "profile_steps": "3:4", "tensorboard": True, "wandb": "mine"}
    settings = read_settings(tiny_config(corpus), train=values, data={"cache": "/c"})
    generates, _, trains = (shlex.split(line.partition("   ")[2]) for line in next_commands(whole_run, settings))
    assert generates[-1] == "--config.train.compile_cache=/a b"
    config = line_of_run(trains[2:]).config
    assert {name: config.train[name] for name in values} == values and config.data.cache == "/c"
    assert "does not decide" not in capsys.readouterr().err


def test_the_log_shows_the_plan_the_entropy_and_the_steps(whole_run):
    log = (whole_run / "log.txt").read_text()
    for words in ("attention", "saved activations", "unigram entropy", "MFLOP a token", "measured float32 matmul"):
        assert words in log
    assert re.search(r"^\d\d:\d\d:\d\d step 8/8 +loss", log, re.M) and "step 8/8  eval loss" in log
    assert "mfu" in log and "tok/s" in log and "finished: step 8" in log
    assert "8 x cpu as pp=1, dp=8, tp=1; accumulate" in log and "nats a token" in log and "a byte" in log


def test_the_best_checkpoint_is_kept_with_the_last(corpus, tmp_path, monkeypatch):
    changes = {"checkpoint.every_steps": 2, "checkpoint.keep_last": 1, "train.eval_every_steps": 0}
    judged = iter([3.0, 1.0, 2.0, 2.5])
    monkeypatch.setattr("parallax.training.run.evaluation", lambda parts: lambda params: {"eval/loss": next(judged)})
    train(tiny_config(corpus, **changes), tmp_path)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == [4, 8]


def test_a_file_system_without_locks_is_refused_by_name(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(
        CheckpointError, match=r"cannot lock .*/lock \(No locks available\); mount its file system with"
    ):
        with RunFolder(tmp_path / "run").locked():
            pass


def test_a_console_that_is_gone_ends_no_run(tmp_path, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as console, RunLogger(RunFolder(tmp_path)) as logger:
        monkeypatch.setattr(sys, "stdout", console)
        logger.say("step 1")
        logger.say("step 2")
    date, *lines = (tmp_path / "log.txt").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \S+", date)
    assert [re.fullmatch(r"\d\d:\d\d:\d\d (.*)", line)[1] for line in lines] == ["step 1", "step 2"]


def test_a_line_of_the_log_has_its_time_and_a_new_day_its_date(tmp_path, monkeypatch, capsys):
    times = iter(["2026-11-22 23:59:58", "2026-11-22 23:59:59", "2026-11-23 00:00:00", "2026-11-23 00:00:01"])
    monkeypatch.setattr(time, "localtime", lambda: time.strptime(next(times), "%Y-%m-%d %H:%M:%S"))
    with pytest.raises(ZeroDivisionError), RunLogger(RunFolder(tmp_path)) as logger:
        logger.begin(0)
        logger.say("run here\n\na table")
        logger.say("step 1")
        logger.say_last("step 2")
        _ = 1 / 0
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [lines[0][:10], *lines[1:5]] == ["2026-11-22", "23:59:58 run here", "", "a table", "23:59:59 step 1"]
    assert [lines[5][:10], *lines[6:]] == [
        "2026-11-23",
        "00:00:00 step 2",
        "00:00:01 ZeroDivisionError: division by zero",
    ]
    assert capsys.readouterr().out.splitlines() == lines[:5]


def test_the_console_has_the_date_too_where_the_log_had_a_line_before_it(tmp_path, capsys):
    with RunLogger(RunFolder(tmp_path)) as logger:
        logger.say_last("a line for the log alone")
        logger.say("step 1")
    date, line = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \S+", date) and line.endswith(" step 1")
    assert (tmp_path / "log.txt").read_text().splitlines()[0] == date


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.d_ff": 128}, "model.d_ff=64 there, 128 here"),
        ({"model.layers": 4}, "model.layers=2 there, 4 here"),
        ({"data.seed": 1}, "data.seed=0 there, 1 here"),
        ({"data.global_batch": 16}, "data.global_batch=8 there, 16 here"),
        ({"data.seq": 16}, "data.seq=32 there, 16 here"),
        ({"optimizer.name": "muon"}, "optimizer.name='adamw' there, 'muon' here"),
        ({"optimizer.frozen": "embedding"}, "optimizer.frozen='' there, 'embedding' here"),
        ({"train.seed": 3}, "train.seed=0 there, 3 here"),
    ],
    ids=str,
)
def test_another_model_or_other_data_is_refused_with_both_values(corpus, whole_run, changes, message):
    with pytest.raises(CheckpointError) as error:
        train(tiny_config(corpus, **{**changes, "train.steps": 20}), whole_run)
    assert "cannot go on from step 8" in str(error.value) and message in str(error.value)


def test_moved_text_is_the_same_and_changed_text_is_refused(corpus, halfway, whole_run, tmp_path):
    texts = write_corpus(tmp_path / "corpus")
    train(tiny_config(texts), halfway)
    assert losses(halfway) == losses(whole_run)
    (texts / "01.txt").write_text("Another text altogether. " * 20)
    with pytest.raises(CheckpointError, match=r"other settings: data\.\* is the same, .* is not, corpus.fingerprint="):
        train(tiny_config(texts, **{"train.steps": 20}), halfway)


def test_an_error_about_other_data_begins_with_its_cause_and_ends_with_what_to_do(corpus, whole_run, tmp_path):
    def refused(config):
        with pytest.raises(CheckpointError) as error:
            train(config, whole_run)
        return str(error.value)

    begins = f"cannot go on from step 8 in {whole_run} with other settings: "
    corpora = "corpus.fingerprint='[0-9a-f]{12}' there, '[0-9a-f]{12}' here"
    ends = (
        "; set back what differs, or choose another --workdir; a new run there takes these weights with "
        f"train.init_from={whole_run}"
    )
    message = refused(tiny_config(corpus, **{"data.seq": 16, "data.cache": str(tmp_path), "train.steps": 20}))
    assert re.fullmatch(f"{begins}data.seq=32 there, 16 here, {corpora}{ends}", message)
    texts = write_corpus(tmp_path / "corpus")
    (texts / "01.txt").write_text("Another text altogether. " * 20)
    config = tiny_config(texts, **{"model.d_ff": 128, "train.steps": 20})
    message, paths = refused(config), f"data.path='{corpus}/*.txt' there, '{texts}/*.txt' here"
    begins = f"cannot go on from step 8 in {whole_run} with other settings: "
    assert message.startswith(f"{begins}{paths}, model.d_ff=64 there, 128 here, corpus.fingerprint=")
    assert message.endswith("; set back what differs, or choose another --workdir")  # of another model no weights fit


def test_a_run_without_evaluations_needs_no_other_key_and_says_that_none_is_the_best(corpus, tmp_path, capsys):
    changes = {"train.eval_batches": 0, "data.eval_fraction": 0.0, "checkpoint.every_steps": 2}
    config = tiny_config(corpus, **changes)
    assert config.checkpoint.keep_best == 1 and train(config, tmp_path).reason == "finished"
    said = (
        "nothing is evaluated (train.eval_batches=0), so no checkpoint becomes one of the best (checkpoint.keep_best=1)"
    )
    assert capsys.readouterr().out.count(said) == 1
    assert sorted(complete_steps(tmp_path / "checkpoints")) == [6, 8]


def test_resume_must_and_never_mean_it(corpus, tmp_path, whole_run):
    with pytest.raises(CheckpointError, match="--resume=must, but .* has no checkpoint"):
        train(tiny_config(corpus), tmp_path, resume="must")
    with pytest.raises(CheckpointError, match="--resume=never, but .* holds a run at step 8"):
        train(tiny_config(corpus), whole_run, resume="never")
    with pytest.raises(ConfigError, match="--resume='maybe' is unknown"):
        train(tiny_config(corpus), tmp_path, resume="maybe")


def test_a_refused_run_leaves_no_folder_behind(corpus, tmp_path):
    with pytest.raises(ConfigError):
        train(tiny_config(corpus, **{"model.d_ff": 63, "mesh.tp": 4}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_refused_run_leaves_a_folder_that_was_there(corpus, tmp_path):
    with pytest.raises(ConfigError):
        train(tiny_config(corpus, **{"model.d_ff": 63, "mesh.tp": 4}), tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "log.txt").touch()
    with pytest.raises(ConfigError):
        train(tiny_config(corpus, **{"model.d_ff": 63, "mesh.tp": 4}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]


def test_an_error_on_the_way_is_in_the_log(corpus, tmp_path, monkeypatch):
    at_batch(monkeypatch, "eval", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tiny_config(corpus), tmp_path)
    assert (tmp_path / "log.txt").read_text().endswith("ZeroDivisionError: division by zero\n")
    (start,) = json.loads((tmp_path / "metadata.json").read_text())["starts"]
    assert start["ended"]["reason"] == "ZeroDivisionError: division by zero"


def test_two_runs_cannot_share_a_folder(corpus, tmp_path):
    with RunFolder(tmp_path).locked():
        with pytest.raises(CheckpointError, match=r"another run is training in .* \(process \d+ on .*\)"):
            train(tiny_config(corpus), tmp_path)


def test_curves_are_written_for_tensorboard(corpus, tmp_path):
    pytest.importorskip("tensorboardX")
    train(tiny_config(corpus, **{"train.tensorboard": True}), tmp_path)
    assert [path for path in (tmp_path / "tensorboard").iterdir() if "tfevents" in path.name]


@pytest.mark.slow
def test_an_evaluation_on_less_than_was_asked_for_is_said(corpus, tmp_path, capsys):
    train(tiny_config(corpus, **{"train.steps": 3, "train.eval_batches": 1000}), tmp_path)
    assert "all that are held out; train.eval_batches=1000 is more" in capsys.readouterr().out


@pytest.mark.slow
def test_an_evaluation_of_all_that_is_held_out_is_that_of_evaluate(corpus, tmp_path, capsys):
    """Whose last batch has rows without text."""
    train(tiny_config(corpus, **{"train.steps": 3, "train.eval_batches": -1}), tmp_path)
    assert "evaluating on batches: 9, the whole held-out text" in capsys.readouterr().out
    row, result = read_metrics(tmp_path / "metrics.jsonl")[-1], evaluate(tmp_path, load_settings(tmp_path))
    assert result.tokens % (8 * 32) and row["eval/loss"] == pytest.approx(result.loss, rel=1e-6)
    assert {int(key.rpartition("/")[2]): row[key] for key in row if "loss_from" in key} == pytest.approx(
        result.positions, rel=1e-6
    )


def test_a_finished_run_writes_a_sample(corpus, tmp_path, capsys):
    changes = {"sample.prompt": "Document", "sample.tokens": 5}
    train(tiny_config(corpus, **changes), tmp_path)
    assert "sample of 5 tokens:\n\nDocument" in capsys.readouterr().out


class Late:
    """A metric that says when it is read."""

    def __init__(self, events, step):
        self.events, self.step = events, step

    def __array__(self, *_, **__):
        self.events.append(f"read {self.step}")
        return np.float32(1)


class Stub:
    """Stands for what the loop only passes through or tells something."""

    signal = None

    def __getattr__(self, name):
        return lambda *_, **__: None


class NoSkips(SkippedSteps):
    def __init__(self):
        pass

    def note(self, step, metrics):
        return {}

    def too_many(self, metrics):
        return False


COUNTS = {name: np.float32(0) for name in ("grad_norm", "skipped", "skipped_steps", "in_a_row")}


def loop_of(settings, step, *, logger=None, meter=None, first=1, rates=None, skips=None, **others):
    """A loop over steps by a function of (state, batch), whose other parts do nothing unless they are given."""
    batches, logger = Stub(), logger or Stub()
    batches.get = lambda at: (None, 0.0)
    meter = meter or Meter(settings.train.steps, 1, 1.0, None, 1)
    rates, skips = rates or (lambda update: 0.0), skips or NoSkips()
    told = dict(logger=logger, meter=meter, rates=rates, skips=skips, sensors=Sensors(dict))
    told["processes"] = ProcessTimes(0.2, 50, print)
    reports = StepReports(settings=settings, first=first, **told)
    parts = dict.fromkeys(("checkpoints", "watchdog", "corruption_check"), Stub())
    parts |= {"stop": SimpleNamespace(after=lambda step: False), "profile": Profile(settings, None, None)}
    parts |= {"batches": batches, "logger": logger, "reports": reports, "evaluate": None, **others}
    return TrainingLoop(settings=settings, train_step=step, **parts)


def test_the_next_step_is_dispatched_before_the_metrics_of_the_last_are_read_but_for_the_first(corpus):
    events = []
    settings = read_settings(
        tiny_config(corpus, **{"train.steps": 4, "train.eval_every_steps": 0, "checkpoint.every_steps": 0})
    )

    def step(state, batch):
        events.append(f"dispatch {state.at}")
        return SimpleNamespace(params=None, at=state.at + 1), {**COUNTS, "loss": Late(events, state.at)}

    steps = loop_of(settings, step)
    steps.act = lambda due, ended, state: steps.reports.read(ended, None) and due
    steps.run(SimpleNamespace(params=None, at=0), 0)
    assert events == [
        "dispatch 0", "read 0", "dispatch 1", "dispatch 2", "read 1", "dispatch 3", "read 2", "read 3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "step, changes, expected",
    [
        (1, {}, Due()),
        (4, {}, Due(evaluate=True, save=True)),
        (6, {}, Due(evaluate=True)),
        (3, {"train.profile_steps": "4:5"}, Due(profile=True)),
        (12, {"train.eval_every_steps": 0, "checkpoint.every_steps": 0}, Due(evaluate=True, save=True)),  # the last one
        (4, {"checkpoint.keep_best": 0}, Due(save=True)),
        (4, {"train.eval_batches": 0}, Due(save=True)),
    ],
)
def test_what_is_due_after_a_step_follows_from_the_settings(corpus, step, changes, expected):
    every = {"train.steps": 12, "train.eval_every_steps": 6, "checkpoint.every_steps": 4}
    settings = read_settings(tiny_config(corpus, **every | changes))
    evaluate = float if settings.train.eval_batches else None
    assert loop_of(settings, None, evaluate=evaluate).due(step) == expected


def test_a_run_that_is_stopping_saves_and_does_not_evaluate_and_after_the_last_step_nothing_is_asked(corpus):
    asked = []
    stop = SimpleNamespace(after=lambda step: asked.append(step) or True)
    steps = loop_of(read_settings(tiny_config(corpus)), None, evaluate=float, stop=stop)
    assert [steps.due(step) for step in (3, 4, 8)] == [
        *[Due(save=True, stop=True)] * 2,
        Due(evaluate=True, save=True),
    ]
    assert asked == [3, 4]


def test_what_is_due_after_a_step_that_is_not_finite_waits_for_the_next_one(corpus):
    steps = loop_of(read_settings(tiny_config(corpus)), None, evaluate=float)
    bad, due = {"skipped/reason": "not finite"}, Due(evaluate=True, save=True, profile=True)
    now, steps.postponed = steps.divided(due, 4, bad)
    assert now == Due(profile=True) and steps.due(5) == Due(evaluate=True, save=True)
    stopping = Due(save=True, profile=True, stop=True)
    assert steps.divided(stopping, 5, bad) == (Due(), Due(save=True))
    assert steps.divided(due, 5, {}) == (due, Due()) == steps.divided(due, 8, bad)  # 8 is the last one


def take_steps(settings, step, say=lambda line: None):
    """The steps of `settings` by a function of (state, batch), without a model; lines go to `say`."""
    steps = loop_of(settings, step, logger=SimpleNamespace(record=lambda *_: None, say=say))
    steps.save = lambda *_: None
    steps.run(SimpleNamespace(params={}), 0)


def test_the_first_step_is_logged_and_one_after_half_a_minute_of_silence(corpus, monkeypatch):
    changes = {"train.steps": 9, "train.log_every_steps": 100, "train.eval_every_steps": 0, "checkpoint.every_steps": 0}
    lines, now = [], iter(np.arange(0.0, 1e6, 12.0))  # a look at the clock each 12 s
    monkeypatch.setattr("parallax.training.step_reports.time", SimpleNamespace(monotonic=lambda: next(now)))
    step = lambda state, batch: (state, {**COUNTS, "loss": np.float32(1)})  # noqa: E731
    take_steps(read_settings(tiny_config(corpus, **changes)), step, lines.append)
    assert [line.split()[1] for line in lines] == ["1/9", "4/9", "7/9", "9/9"]


def test_the_compilation_of_the_step_is_said_while_it_goes_on(corpus):
    now, out = [0.0], io.StringIO()
    printer = ProgressPrinter(out, clock=lambda: now[0])

    def step(state, batch):
        for _ in range(12 if now[0] == 0 else 0):
            now[0] += 1
            printer.tick()
        return state, {**COUNTS, "loss": np.float32(1)}

    with printing_progress(printer):
        take_steps(read_settings(tiny_config(corpus, **{"train.steps": 3, "train.eval_every_steps": 0})), step)
    assert out.getvalue().splitlines() == [
        "compiling the training step: 1s so far",
        "compiling the training step: 5s so far",
        "compiling the training step: 9s so far",
        "compiling the training step: done in 12.0 s",
    ]


def test_what_is_waited_for_is_in_the_log_once_a_run_is_not_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("PARALLAX_PROGRESS")
    monkeypatch.setattr(progress, "TICK_SECS", 0.01)

    def wait(what):
        with waiting(what, patience_secs=0):
            time.sleep(0.2)

    with RunLogger(RunFolder(tmp_path)) as logger:
        wait("preparing the data")
        assert (tmp_path / "log.txt").read_text() == ""  # a run that is refused now leaves nothing behind
        logger.say("run")
        wait("compiling the training step")
    lines = ["preparing the data ...", "run", "compiling the training step ..."]
    kept, printed = (tmp_path / "log.txt").read_text().splitlines(), capsys.readouterr().out.splitlines()
    assert [line[9:] for line in kept[1:]] == lines  # behind the date, and each behind its time
    printed.remove(kept[0])  # the date stands before the first line of the console that has a time, too
    assert [line[9:] if line.endswith("run") else line for line in printed] == lines


def test_of_several_processes_the_first_one_speaks(tmp_path, second_of_two, monkeypatch, capsys):
    monkeypatch.delenv("PARALLAX_PROGRESS")
    now, out = [0.0], io.StringIO()
    printer = ProgressPrinter(out, clock=lambda: now[0])
    with printing_progress(printer), RunLogger(RunFolder(tmp_path)) as logger, waiting("compiling"):
        now[0] += 100
        printer.tick()
        logger.say("step 1")
    assert out.getvalue() == capsys.readouterr().out == "" and not list(tmp_path.iterdir())


class Clock(threading.local):
    """Simulated seconds; each thread has its own, which only its own waits move."""

    now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, secs):
        self.now += secs

    def sleep_until(self, moment):
        self.now = max(self.now, moment)


class Device:
    """Takes STEP_SECS for a step, one after the other, while the host goes on."""

    def __init__(self, clock):
        self.clock, self.free = clock, 0.0

    def run(self, metrics):
        self.free = max(self.free, self.clock()) + STEP_SECS
        return {name: Running(value, self.free, self.clock) for name, value in metrics.items()}

    def wait(self):
        self.clock.sleep_until(self.free)


class Running:
    """A metric of a step that is at work until `until`."""

    def __init__(self, value, until, clock):
        self.value, self.until, self.clock = value, until, clock

    def block_until_ready(self):
        self.clock.sleep_until(self.until)

    def __array__(self, *_, **__):
        self.block_until_ready()
        return self.value


class SlowRates:
    """Computed on the device, after the step that it works on."""

    def __init__(self, device):
        self.device = device

    def __call__(self, update):
        self.device.wait()
        return 1e-3


STEP_SECS, LATE_SECS, START = 0.15, 0.4, 100
# What keeps the host besides the learning rate, and the seconds of that step.
KEEPS_THE_HOST = {
    104: ("its batch comes late", LATE_SECS + STEP_SECS),
    106: ("it is taken twice", 2 * STEP_SECS),
    108: ("it is skipped, which takes words", STEP_SECS),
    109: ("an evaluation follows", STEP_SECS),
    111: ("its dispatch waits for the device", STEP_SECS),
}


def test_a_steps_time_ends_where_the_step_does_whatever_keeps_the_host(corpus):
    """Each step of a run that goes on has its own time, also one after an evaluation, and the one after it."""
    clock, rows, batches, skips, last = Clock(), {}, Stub(), NoSkips(), START + 12
    device = Device(clock)
    at_step = {what: step for step, (what, _) in KEEPS_THE_HOST.items()}
    changes = {"train.steps": last, "train.check_every": at_step["it is taken twice"]}
    settings = read_settings(tiny_config(corpus, **changes))

    def step(state, batch):
        state.step += 1
        if state.step == at_step["its dispatch waits for the device"]:
            device.wait()
        return state, device.run({**COUNTS, "loss": np.float32(1)})

    def twice(train_step, state, batch, done):
        device.wait()
        train_step(state, batch)
        state.step -= 1
        device.wait()
        return train_step(state, batch)

    def batch(at):
        secs = LATE_SECS if at + 1 == at_step["its batch comes late"] else 0.0
        clock.sleep(secs)
        return None, secs

    batches.get = batch
    skips.note = lambda at, _: (at == at_step["it is skipped, which takes words"] and clock.sleep(STEP_SECS)) or {}
    logger = SimpleNamespace(record=lambda at, values: rows.update({at: values}), say=lambda text: None)
    meter, recheck = Meter(last, 1, 1.0, None, 1, clock), SimpleNamespace(take=twice)
    steps = loop_of(
        settings,
        step,
        logger=logger,
        meter=meter,
        first=START + 1,
        rates=SlowRates(device),
        skips=skips,
        evaluate=lambda params: clock.sleep(LATE_SECS) or {"eval/loss": 1.0},
        batches=batches,
        corruption_check=recheck,
    )
    steps.due = lambda done: Due(evaluate=done == at_step["an evaluation follows"])
    steps.run(SimpleNamespace(params={}, step=START), START)
    expected = {at: KEEPS_THE_HOST.get(at, ("", STEP_SECS))[1] for at in range(START + 1, last)}
    found = {at: rows[at]["perf/step_secs"] for at in expected}
    np.testing.assert_allclose([*found.values()], [*expected.values()], rtol=1e-9, err_msg=str(found))
    assert all(row["perf/data_wait_secs"] <= row["perf/step_secs"] for row in rows.values())


@pytest.mark.parametrize("metrics", [{}, {"z_loss": np.float32(0.5)}], ids=str)
def test_the_z_loss_is_recorded_where_there_is_one(corpus, metrics):
    reports = loop_of(read_settings(tiny_config(corpus)), Stub()).reports
    ended = reports.dispatched(1, {"loss": np.float32(1), **COUNTS, **metrics}, 0.0)
    found = reports.read(ended, None)
    assert {k: v for k, v in found.items() if "z_loss" in k} == {f"train/{k}": v for k, v in metrics.items()}


def test_metrics_beyond_a_step_are_dropped_and_torn_lines_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 2.0}\n{"step": 2, "train/loss": 1.5}\n{"step": 3, "tr')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    drop_after(path, 1)
    assert path.read_text() == '{"step": 1, "train/loss": 2.0}\n'
    drop_after(tmp_path / "absent", 1)
