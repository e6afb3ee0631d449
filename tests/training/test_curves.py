"""The numbers of metrics.jsonl are in TensorBoard and Weights & Biases, too, and these end no run."""

import contextlib
import importlib.util
import json
import math
import sys
from types import SimpleNamespace

import pytest
from support.run_examples import tiny_config

from parallax.config.settings import read_settings
from parallax.errors import ConfigError
from parallax.storage.run_files import read_metrics
from parallax.training.folder import RunFolder
from parallax.training.logger import RunLogger, Wandb, metrics_writers


def test_tensorboard_has_every_number_of_every_step(observed_run):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    points = {}
    for file in (observed_run / "tensorboard").iterdir():
        content, at = file.read_bytes(), 0
        while at < len(content):
            # A record: its size in 8 bytes, a checksum in 4, the event, a checksum in 4.
            size = int.from_bytes(content[at : at + 8], "little")
            event = Event.FromString(content[at + 12 : at + 12 + size])
            at += 16 + size
            points |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
    rows = read_metrics(observed_run / "metrics.jsonl")
    wanted = {(row["step"], name): value for row in rows for name, value in row.items() if name not in ("step", "time")}
    assert len(rows) == 8 and set(points) == set(wanted)
    assert all(points[at] == pytest.approx(wanted[at], rel=1e-6) for at in wanted)


class Service(SimpleNamespace):
    """Stands for the package wandb: keeps what it is told; `fails` names what raises."""

    def __init__(self, fails=()):
        super().__init__(fails=fails, begun=[], rows=[], ended=[], Settings=dict)

    def init(self, **how):
        self.check("init")
        self.begun.append(how)
        return self

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, values):
        self.check("log")
        self.rows.append(values)

    def finish(self, exit_code):
        self.check("finish")
        self.ended.append(exit_code)

    def check(self, name):
        if name in self.fails:
            raise RuntimeError(f"{name}: the service is down\nin many words")


def run_with(service, folder, monkeypatch, steps, error=None):
    """A run that records these steps; returns what it said."""
    monkeypatch.setitem(sys.modules, "wandb", service)
    settings = read_settings(tiny_config(folder, **{"train.wandb": "planets"}))
    folder = RunFolder(folder)
    with contextlib.suppress(ZeroDivisionError), RunLogger(folder, metrics_writers(settings, folder)) as logger:
        logger.begin(steps[0] - 1)
        for step in steps:
            values = {"train/loss": 1.0 / step, "skipped/reason": "spike", "skipped/windows": [1, 2]}
            logger.record(step, values | {"train/grad_norm": math.nan})
        if error is not None:
            raise error
    return folder.log.read_text()


def test_a_run_is_one_run_of_wandb_however_often_it_goes_on(tmp_path, monkeypatch):
    service = Service()
    run_with(service, tmp_path, monkeypatch, [1, 2, 3], error=ZeroDivisionError())
    run_with(service, tmp_path, monkeypatch, [3, 4])
    first, second = service.begun
    assert first["id"] == second["id"] == json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert first["project"] == "planets" and first["resume"] == "allow" and first["name"] == tmp_path.name
    assert first["config"]["model"]["layers"] == 2 and first["dir"] == str(tmp_path)
    assert [row["step"] for row in service.rows] == [1, 2, 3, 3, 4] and service.ended == [1, 0]
    assert service.rows[1]["train/loss"] == 0.5 and service.rows[1]["skipped/reason"] == "spike"
    assert math.isnan(service.rows[1]["train/grad_norm"]) and "skipped/windows" not in service.rows[1]


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_service_that_fails_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch, where):
    said = run_with(Service([where]), tmp_path, monkeypatch, [1, 2, 3])
    assert said.count("wandb failed, the run goes on without it") == 1 and f": {where}: the service is down\n" in said
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_service_that_does_not_end_is_not_waited_for(tmp_path, monkeypatch):
    import threading

    service, stuck = Service(), threading.Event()
    service.finish = lambda exit_code: stuck.wait(30)
    monkeypatch.setattr("parallax.training.logger.WANDB_SECS", 0.1)
    assert "wandb has not received all metrics within 0.1 s" in run_with(service, tmp_path, monkeypatch, [1])
    stuck.set()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"train.wandb": "planets"},
            "train.wandb='planets', which may be left empty, needs the package wandb: pip install",
        ),
        ({"train.tensorboard": True}, "train.tensorboard=True needs the package tensorboardX: pip install -e '.[t"),
    ],
)
def test_a_missing_package_is_named_with_how_to_get_it(tmp_path, monkeypatch, changes, words):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError) as error:
        metrics_writers(read_settings(tiny_config(tmp_path, **changes)), RunFolder(tmp_path))
    assert words in str(error.value)


def test_other_processes_than_the_first_draw_nothing(tmp_path, second_of_two):
    changes = {"train.wandb": "planets", "train.tensorboard": True}
    assert metrics_writers(read_settings(tiny_config(tmp_path, **changes)), RunFolder(tmp_path)) == []


def test_wandb_itself_takes_the_numbers_offline(tmp_path, monkeypatch):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("needs the extra wandb: pip install -e '.[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    said = []
    for steps in ((1, 2), (3,)):
        curves = Wandb("planets", RunFolder(tmp_path), {"model": {"layers": 2}})
        curves.begin(steps[0] - 1, said.append)
        for step in steps:
            curves.write(step, {"train/loss": 1.0 / step, "skipped/reason": "spike"})
        curves.close(failed=False)
    own = json.loads((tmp_path / "wandb.json").read_text())["id"]
    written = list((tmp_path / "wandb").glob(f"offline-run-*-{own}/*.wandb"))
    assert said == [] and len(written) == 2 and all(file.stat().st_size for file in written)
