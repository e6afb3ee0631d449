"""Runs on a mixture: what they record, how they go on, and that they may go on with other data."""

import json

import numpy as np
import pytest
from support.run_examples import losses, stop_at, tiny_config
from support.tiny_model import mesh_of

from parallax.checkpoint.steps import read_manifest
from parallax.cli.evaluate import evaluate
from parallax.cli.replay import replay
from parallax.cli.watch import main as watch
from parallax.config.settings import load_settings, read_settings
from parallax.errors import CheckpointError, ConfigError
from parallax.inference.run import load
from parallax.model.batch import IGNORED
from parallax.pipeline import ShardedModel
from parallax.step.batches import open_split
from parallax.storage.run_files import RunFiles, read_metrics
from parallax.training import facts
from parallax.training.build import model_of_shape
from parallax.training.folder import RunFolder
from parallax.training.run import train

LATER = "later=(from_step=6, text=1, count=3)"


def mixed(corpus, phases: str = LATER, count: str = "weight=1", **changes):
    mixture = f"text=(path='{corpus}/*.txt', weight=3) count=(source='synthetic', {count})"
    of_mixture = {"data.source": "stdlib", "data.path": "", "data.mixture": mixture, "data.phases": phases}
    return tiny_config(corpus, **of_mixture | {"data.synthetic_tokens": 20_000} | changes)


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A finished run on a mixture; not to be changed."""
    folder = tmp_path_factory.mktemp("mixed")
    assert train(mixed(corpus), folder).reason == "finished"
    return folder


def params_of_last(folder):
    return read_manifest(folder / "checkpoints", 8)["arrays"]


def test_losses_of_sources_are_recorded_and_each_source_is_in_the_log(whole):
    rows = [row for row in read_metrics(whole / "metrics.jsonl") if "eval/loss" in row]
    assert [row["step"] for row in rows] == [4, 8]
    for row in rows:
        each = row["eval/loss/text"], row["eval/loss/count"]
        assert min(each) < row["eval/loss"] < max(each)
    log = (whole / "log.txt").read_text()
    assert "from step 1: 8 x 32, text 75.0%, count 25.0%" in log and "from step 6 (later): 8 x 32, text 25.0%" in log
    assert f"eval loss {rows[-1]['eval/loss']:.4f}  text {rows[-1]['eval/loss/text']:.4f}" in log
    about = json.loads((whole / "checkpoints" / "8" / "data.json").read_text())
    assert [*about["sources"]] == ["text", "count"]


def test_the_loss_of_a_step_is_the_mean_of_its_sources(whole):
    reader = open_split(load_settings(whole), RunFiles(whole), "train")
    for row in read_metrics(whole / "metrics.jsonl"):
        batch = reader.batch(row["step"] - 1)
        counts = [((batch["labels"] != IGNORED) & (batch["groups"] == number)).sum() for number in range(2)]
        each = [row["train/loss/text"], row["train/loss/count"]]
        assert row["train/loss"] == pytest.approx(np.average(each, weights=counts), rel=1e-6)


def test_watch_and_evaluate_tell_sources_apart(whole, capsys):
    rows = [row for row in read_metrics(whole / "metrics.jsonl") if "eval/loss" in row]
    assert watch([str(whole), "--once"]) == 0
    loss = {name: rows[-1][f"eval/loss/{name}"] for name in ("text", "count")}
    shown = " ".join(capsys.readouterr().out.split())
    assert f"eval loss of text {loss['text']:.4f}, count {loss['count']:.4f}" in shown
    assert f"train loss of text {rows[-1]['train/loss/text']:.4f}, count {rows[-1]['train/loss/count']:.4f}" in shown
    assert f"{rows[-1]['eval/loss_from/0']:.4f} at 0, {rows[-1]['eval/loss_from/16']:.4f} from 16 on" in shown


@pytest.mark.slow
def test_evaluate_has_the_losses_of_a_runs_sources(whole):
    result = evaluate(whole, load_settings(whole))
    assert [*result.sources] == ["text", "count"] and min(result.sources.values()) < result.loss
    assert result.loss < max(result.sources.values()) and "of count" in str(result)
    assert result.documents > 2 and json.loads(result.to_json())["sources"] == result.sources


def test_a_stopped_run_goes_on_bitwise_and_may_be_told_then_what_it_reads_later(corpus, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        done = train(mixed(corpus, ""), tmp_path).step
    assert 4 <= done < 6
    assert train(mixed(corpus), tmp_path).reason == "finished"
    assert losses(tmp_path) == losses(whole) and params_of_last(tmp_path) == params_of_last(whole)


@pytest.mark.slow
def test_data_of_steps_that_are_done_is_not_changed(corpus, whole):
    for phases in ("later=(from_step=5, count=3)", "later=(from_step=6, count=4)", ""):
        with pytest.raises(CheckpointError, match="cannot go on from step 8 .* data.phases="):
            train(mixed(corpus, phases, **{"train.steps": 12}), whole)


def test_later_data_that_is_another_may_be_allowed(corpus, whole, tmp_path):
    changes = {"train.steps": 12, "train.continue_from": f"{whole}/checkpoints/8", "data.cache_bytes": 10**9}
    with pytest.raises(CheckpointError, match="data.phases=.*, or allow other data with") as error:
        train(mixed(corpus, "later=(from_step=6, count=4)", **changes), tmp_path)
    assert "cache_bytes" not in str(error.value)


def test_a_loaded_run_names_its_sources(whole):
    assert "data   text, count, 8 x 32 tokens a step" in repr(load(whole))


def test_each_shape_of_batches_chooses_its_kernel(corpus):
    settings = read_settings(mixed(corpus, "long=(from_step=4, seq=64)", **{"model.vocab": 384}))
    model = ShardedModel(settings, mesh_of(1, 1, 1))
    assert model.config.kernel == "xla" and model_of_shape(model, (8, 64)).settings.model.kernel == "auto"


def test_the_memory_of_later_shapes_is_said_and_one_that_will_not_fit_is_warned_of(monkeypatch):
    monkeypatch.setattr(facts, "device_memory", lambda: 2**30)
    assert [*facts.memory_lines({(8, 32): 2**29})] == []
    assert [*facts.memory_lines({(8, 32): 2**29, (4, 64): 2**29, (8, 64): 2**31})] == [
        "batches of 4 x 64, which come later, need 512.0 MiB on each device",
        "batches of 8 x 64, which come later, need 2.0 GiB on each device",
        "warning: batches of 8 x 64 need 2.0 GiB on each device, as predicted, which has 1.0 GiB; make global_batch or "
        "seq of their phase smaller, or use more devices",
    ]


@pytest.mark.slow
def test_a_run_of_one_source_goes_on_with_a_mixture(corpus, tmp_path):
    assert train(tiny_config(corpus), tmp_path).reason == "finished"
    later = "later=(from_step=9, count=3)"
    with pytest.raises(CheckpointError, match="cannot go on from step 8"):
        train(mixed(corpus, later, **{"train.steps": 10}), tmp_path)
    assert train(mixed(corpus, later, count="weight=0", **{"train.steps": 10}), tmp_path).step == 10


@pytest.mark.slow
def test_a_run_stops_where_a_source_ends_as_written(corpus, tmp_path):
    config = mixed(corpus, "", count="weight=1, tokens=320, end='stop'")
    assert train(config, tmp_path).step == 5
    assert train(config, tmp_path).reason == "nothing to do"
    assert "count ends the run after step 5, as its end='stop' says" in (tmp_path / "log.txt").read_text()
    with pytest.raises(ConfigError, match="data.mixture ends with count before the first step"):
        train(mixed(corpus, "", count="weight=1, tokens=1, end='stop'"), tmp_path / "none")


@pytest.mark.slow
def test_phases_of_other_shapes_are_resumed_bitwise_on_every_mesh(corpus, tmp_path, monkeypatch):
    phases = "long=(from_step=4, seq=64, global_batch=16) more=(from_step=7, count=3)"
    assert train(mixed(corpus, phases), tmp_path / "whole").reason == "finished"
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        train(mixed(corpus, phases), tmp_path / "run")
    assert train(mixed(corpus, phases), tmp_path / "run").reason == "finished"
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    rows = [row for row in read_metrics(tmp_path / "whole" / "metrics.jsonl") if "train/loss" in row]
    assert all({"train/loss/text", "train/loss/count"} <= {*row} for row in rows)  # in phases of each shape
    assert "batches of 16 x 64, which come later, need" in (tmp_path / "whole" / "log.txt").read_text()
    replayed = "\n".join(replay(read_settings(mixed(corpus, phases)), RunFolder(tmp_path / "whole"), 6))
    assert replayed.count(": the same") == 2, replayed
    assert params_of_last(tmp_path / "run") == params_of_last(tmp_path / "whole")
    rates = [
        row["train/learning_rate"] for row in read_metrics(tmp_path / "whole" / "metrics.jsonl") if "train/loss" in row
    ]
    assert len(rates) == 8  # rates follow from steps, not tokens
    changes = {"mesh.dp": 2, "mesh.tp": 2, "mesh.pp": 2}
    assert train(mixed(corpus, phases, **changes), tmp_path / "mesh").reason == "finished"
    assert losses(tmp_path / "mesh") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
