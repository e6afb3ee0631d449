"""TensorBoard's events and the traces of steps of a run whose folder is in a bucket."""

import contextlib
import importlib.util
import json
import threading

import pytest
from support import faulty_store
from support.run_examples import at_step, tiny_config

from parallax.analysis.compiled.profile import profile_steps, read_traces
from parallax.cli.report import main as report
from parallax.config.settings import read_settings
from parallax.errors import CheckpointError
from parallax.storage import files
from parallax.storage.run_files import RunFiles, read_metrics
from parallax.training import logger as logger_module
from parallax.training.logger import RunLogger, metrics_writers
from parallax.training.run import train

needs_tensorboard_x = pytest.mark.skipif(
    importlib.util.find_spec("tensorboardX") is None,
    reason="needs the extra tensorboard: pip install -e '.[tensorboard]'",
)


def events_of(folder):
    """What TensorBoard shows of a run's folder, by step and name: files in the order of their names, without what is
    purged."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    shown = {}
    for path in files.files_below(folder / "tensorboard"):
        content, start = files.read_bytes(path), 0
        while start < len(content):
            size = int.from_bytes(content[start : start + 8], "little")
            event = Event.FromString(content[start + 12 : start + 12 + size])
            start += 16 + size
            if event.session_log.status == SessionLog.START:
                shown = {key: value for key, value in shown.items() if key[0] < event.step}
            shown |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
    return shown


@contextlib.contextmanager
def logging_in(bucket, tmp_path, after):
    """The log of a run that goes on after a step."""
    settings = read_settings(tiny_config(tmp_path, **{"train.tensorboard": True}))
    logger = RunLogger(RunFiles(bucket), metrics_writers(settings, RunFiles(bucket)))
    logger.begin(after)
    yield logger


def kill(logger):
    """End the threads of a log, which sends nothing more."""
    (tensorboard,) = logger._writers
    for log in (tensorboard, logger._log, logger._metrics):
        log._ended.set()
        log._thread.join()
    tensorboard._file._events.close()


def writing_threads():
    """The threads of open files of events."""
    from tensorboardX.event_file_writer import _EventLoggerThread

    return {thread for thread in threading.enumerate() if isinstance(thread, _EventLoggerThread)}


@needs_tensorboard_x
def test_a_killed_run_and_the_next_one_are_one_curve(bucket, tmp_path):
    with logging_in(bucket, tmp_path, 0) as killed:
        for step in (1, 2, 3):
            killed.record(step, {"train/loss": float(step)})
            killed.flush()  # as before each manifest
        killed.record(4, {"train/loss": 4.0})
    kill(killed)
    with logging_in(bucket, tmp_path, 2) as logger, logger:
        for step in (3, 4):
            logger.record(step, {"train/loss": 10.0 + step})
    assert events_of(bucket) == {
        (step, "train/loss"): loss for step, loss in [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0)]
    }
    names = files.names_in(bucket / "tensorboard")
    assert len(names) == 4 and all("tfevents" in name for name in names)


@needs_tensorboard_x
def test_events_are_stored_now_and_then_and_after_a_store_has_failed(store, bucket, tmp_path, monkeypatch):
    with logging_in(bucket, tmp_path, 0) as logger, logger:
        logger.record(1, {"train/loss": 1.0})
        with store.having(faulty_store.of("PUT", faulty_store.expired, "/tensorboard/")):
            with pytest.raises(CheckpointError, match="ExpiredToken"):
                logger.flush()
        logger.record(2, {"train/loss": 2.0})
        assert events_of(bucket) == {}
        logger.flush()
        assert len(events_of(bucket)) == 2
    monkeypatch.setattr(logger_module, "EVENTS_SECS", 0.01)
    with logging_in(bucket, tmp_path, 2) as logger, logger:
        logger.record(3, {"train/loss": 3.0})
        while len(events_of(bucket)) < 3:
            pass


@needs_tensorboard_x
def test_a_store_that_fails_at_the_end_leaves_no_file_open(store, bucket, tmp_path):
    """Python 3.12 would print a traceback when it ends: what is open is closed then, in a new thread."""
    before = writing_threads()
    fails = store.having(faulty_store.of("PUT", faulty_store.expired, "/tensorboard/"))
    with logging_in(bucket, tmp_path, 0) as logger, fails, logger:
        logger.record(1, {"train/loss": 1.0})
    assert events_of(bucket) == {} and writing_threads() == before


@needs_tensorboard_x
def test_tensorboard_reads_the_files_of_all_starts_as_one(bucket, tmp_path):
    """As `tensorboard --logdir` does of a copy of the folder."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    test_a_killed_run_and_the_next_one_are_one_curve(bucket, tmp_path)
    for path in files.files_below(bucket / "tensorboard"):
        files.copy_file(path, tmp_path / path.name)
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 13), (4, 14)]


@pytest.mark.slow
@needs_tensorboard_x
def test_a_run_in_a_bucket_is_traced_and_has_curves_through_a_kill(bucket, corpus, monkeypatch, capsys):
    changes = {"train.tensorboard": True, "train.profile_steps": "3:7", "checkpoint.every_steps": 2}

    def killed():
        raise KeyError("killed")

    with monkeypatch.context() as patch, pytest.raises(KeyError):
        at_step(patch, 5, killed)
        train(tiny_config(corpus, **changes), str(bucket))
    assert train(tiny_config(corpus, **changes), str(bucket)).reason == "finished"
    run = RunFiles(bucket)
    rows = {row["step"]: row["train/loss"] for row in read_metrics(run.metrics)}
    shown = {step: loss for (step, name), loss in events_of(bucket).items() if name == "train/loss"}
    assert shown == pytest.approx(rows) and len(rows) == 8
    assert files.names_in(run.profile) == ["steps-3-7", "steps-5-7"]
    assert profile_steps(read_traces(bucket)).steps == (5, 6, 7)
    capsys.readouterr()
    assert report(["report", f"--trace={bucket}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [5, 6, 7]
