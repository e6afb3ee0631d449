"""A run that takes seconds, for the tests of the loop, its command line and its errors."""

import fcntl
import functools
import importlib.util
import os
import pathlib
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs.tiny_gqa import get_config
from parallax.data import Reader
from parallax.inference import run as run_of_inference
from parallax.step import step
from parallax.step.step import TrainState
from parallax.storage.run_files import read_metrics
from parallax.training import build, facts, run
from parallax.training.logger import RunLogger
from parallax.training.loop import TrainingLoop, checkpoint_trees
from parallax.training.run import train

TEXT = "It is a truth that a small text is enough to see a loss fall, and it falls faster when it repeats. "


def write_corpus(folder: pathlib.Path) -> pathlib.Path:
    """Forty short documents of plain text."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"Document {number}. " + TEXT * (2 + number % 3))
    return folder


def tiny_config(corpus: pathlib.Path, **changes) -> ConfigDict:
    """The smallest run; changes are written section.key=value."""
    config = get_config()
    config.model.update({"layers": 2, "d_model": 32, "d_ff": 64, "d_head": 8, "heads": 4, "kv_heads": 2})
    config.model.dropout = 0.1
    config.data.update({"source": "text", "path": str(corpus / "*.txt"), "cache": str(corpus / "cache")})
    config.data.update({"seq": 32, "global_batch": 8, "eval_fraction": 0.2})
    config.train.update({"steps": 8, "log_every_steps": 1, "eval_every_steps": 4, "eval_batches": 1})
    config.optimizer.warmup_steps = 2
    config.checkpoint.every_steps = 4
    config.sample.prompt = ""
    for key, value in changes.items():
        section, name = key.split(".")
        config[section][name] = value
    return config


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Not to be changed."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def whole_run(corpus, tmp_path_factory):
    """The folder of the tiny run, finished; not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(tiny_config(corpus), folder).reason == "finished"
    return folder


@pytest.fixture(scope="session", autouse=True)
def shared_programs():
    """Runs of equal settings share their model and what is traced, planned and measured of it: all but the first take
    a quarter of the time. What they train on, when they stop and what they save is their own."""
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), function in SHARED.items():
            patch.setattr(module, name, function)
        yield


def settings_of_model(settings, mesh):
    """All of the settings that a model and its optimizer read."""
    sections = (settings.model, settings.layout, settings.pipeline, settings.fsdp, settings.loss, settings.optimizer)
    return *sections, settings.data_parallel, settings.train.steps, tuple(settings.data.shapes), mesh


def cached(function, key):
    """`function`, called once for each key of its arguments."""
    results = {}

    @functools.wraps(function)
    def found(*args, **kwargs):
        at = key(*args, **kwargs)
        if at not in results:
            results[at] = function(*args, **kwargs)
        return results[at]

    return found


POSITION_STEP = functools.cache(step.make_position_step)
SHARED = {
    (build, "ShardedModel"): cached(build.ShardedModel, settings_of_model),
    (build, "optimizer_of"): functools.cache(build.optimizer_of),
    (facts, "memory_of_run"): cached(facts.memory_of_run, lambda step, **batch: (step, *batch.items())),
    (run, "TrainStep"): functools.cache(run.TrainStep),
    (run, "make_position_step"): POSITION_STEP,
    (step, "make_position_step"): POSITION_STEP,  # which evaluations of a finished run import
    (run_of_inference, "model_of"): cached(run_of_inference.model_of, settings_of_model),
    (facts, "peak_flops"): functools.cache(facts.peak_flops),
}


def at_step(monkeypatch, step: int, act: Callable[[], Any]) -> None:
    """Call `act` when a step was recorded."""
    record = RunLogger.record

    def record_and_act(self, at, values):
        record(self, at, values)
        if at == step and "train/loss" in values:  # not when it was saved
            act()

    monkeypatch.setattr(RunLogger, "record", record_and_act)


def stop_at(monkeypatch, step: int, number: int = signal.SIGTERM) -> None:
    """Have a signal sent when a step is recorded."""
    at_step(monkeypatch, step, lambda: os.kill(os.getpid(), number))


def at_batch(monkeypatch, split: str, act: Callable[[int], Any]) -> None:
    """Call `act` with the number of each batch of a split, counted from 0, before it is read."""
    read = Reader.batch

    def act_and_read(self, step):
        if self.split == split:
            act(step)
        return read(self, step)

    monkeypatch.setattr(Reader, "batch", act_and_read)


def first_state(config: ConfigDict, folder: pathlib.Path) -> tuple[TrainState, int]:
    """The state and step that a run begins with. It saves them as if it had taken all its steps."""
    begun = []

    def run(loop, state, start):
        begun.append((state, start))
        loop.checkpoints.save(config.train.steps, checkpoint_trees(state))
        return state, config.train.steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "run", run)
        train(config, folder)
    return begun[0]


def losses(folder: pathlib.Path) -> list[float]:
    """The loss of each step of a run, in all its bits."""
    return [row["train/loss"] for row in read_metrics(folder / "metrics.jsonl")]


def as_flags(changes: dict) -> list[str]:
    """Changes as they are written on the command line."""
    return [f"--config.{key}={value}" for key, value in changes.items()]


@pytest.fixture(scope="session")
def observed_run(request, tmp_path_factory):
    """The folder of a whole run on 2·2·2 with a tokenizer of its own, of which steps 3 to 5 were traced and TensorBoard
    was told; beside it its corpus. All workers have the same. Not to be changed."""
    return made_once(request, tmp_path_factory, "observed", observe_a_run) / "run"


def observe_a_run(root: pathlib.Path) -> None:
    changes = {"mesh.pp": 2, "mesh.dp": 2, "mesh.tp": 2, "pipeline.microbatches": 2, "model.dropout": 0.0}
    changes |= {"data.tokenizer": "bpe", "data.bpe_vocab": 280, "train.profile_steps": "3:5"}
    changes |= {"train.eval_batches": 100, "train.tensorboard": importlib.util.find_spec("tensorboardX") is not None}
    assert train(tiny_config(write_corpus(root / "corpus"), **changes), root / "run").reason == "finished"


def made_once(request, tmp_path_factory, name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """A folder that the first of a session's workers to need it makes, while others that need it wait."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if hasattr(request.config, "workerinput") else base) / name
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = root.with_suffix(".made")
        if not made.exists():
            shutil.rmtree(root, ignore_errors=True)  # of a worker whose run has failed
            make(root)
            made.touch()
    return root
