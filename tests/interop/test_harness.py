"""lm-evaluation-harness gives a run the numbers that its own backend gives the exported model."""

import importlib.util
import json
import re
import sys
from types import SimpleNamespace

import pytest
from support.harness_tasks import DOCUMENTS, TASKS, write_tasks
from support.run_examples import tiny_config
from support.stand_ins import ClientStandIn

from parallax.cli.convert import main as convert
from parallax.cli.evaluate import main
from parallax.config.settings import read_settings
from parallax.errors import ConfigError, DataError
from parallax.inference.run import load
from parallax.interop.harness import TaskResults, Tasks, harness_model
from parallax.storage.run_files import read_metrics
from parallax.training.run import train


def test_results_are_a_table():
    values = {"acc,none": 0.5, "exact_match,strict": 0.0, "exact_match,loose": 0.25}
    assert str(TaskResults({"choices": values})).splitlines() == [
        "task     metric               value",
        "choices  acc                 0.5000",
        "choices  exact_match,strict  0.0000",
        "choices  exact_match,loose   0.2500",
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--limit=3"], "--limit=3 does nothing without --tasks; name tasks, or leave it out"),
        (["--tasks=a", "--data=b"], "--data=b is not read with --tasks=a; leave one of them out"),
        (["--tasks=a", "--limit=-1"], "--limit=-1 is not a number of documents"),
    ],
)
def test_flags_of_tasks_that_do_not_fit_are_refused(observed_run, capsys, flags, words):
    assert main(["evaluate", f"--workdir={observed_run}", *flags]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_without_the_harness_a_line_says_how_to_get_it(observed_run, monkeypatch, capsys):
    """Before the model is loaded."""
    monkeypatch.setattr("parallax.cli.evaluate.load_trained", lambda *_: pytest.fail("it was loaded"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["evaluate", f"--workdir={observed_run}", "--tasks=arc_easy"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "tasks need the package lm_eval, which is not installed: pip install -e '.[lm-eval]'" in said


def test_a_process_to_which_the_harness_returns_nothing_has_the_results_of_the_first(in_job, monkeypatch):
    """As where a launcher's LOCAL_RANK is not 0."""
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=lambda *model, **options: None))
    in_job(ClientStandIn(values={"text": '{"choices": {"acc,none": 0.5}}'}))
    tasks = object.__new__(Tasks)
    tasks.names, tasks.limit, tasks._manager, tasks._judged = ["choices"], 0, None, SimpleNamespace(params=None)
    assert tasks("the parameters").by_metric == {"tasks/choices/acc": 0.5}
    assert tasks._judged.params == "the parameters"


def test_settings_of_tasks_do_nothing_without_tasks(corpus):
    with pytest.raises(ConfigError, match="train.tasks_limit=3 does nothing without train.tasks; name tasks, or leave"):
        read_settings(tiny_config(corpus, **{"train.tasks_limit": 3}))


@pytest.mark.slow
def test_tasks_have_the_numbers_of_the_harnesss_own_backend_on_the_exported_model(corpus, tmp_path, capsys):
    """Windows of 32 tokens: longer texts are cut alike."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra: lm-eval)")
    pytest.importorskip("transformers", reason="transformers is not installed (extra: hf-tests)")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tasks = write_tasks(tmp_path / "tasks")
    changes = {"train.steps": 40, "data.tokenizer": "bpe", "data.bpe_vocab": 300, "model.dropout": 0.0}
    changes |= {"train.tasks": "rolling", "train.tasks_folder": str(tasks), "train.tasks_every_steps": 20}
    train(tiny_config(corpus, **changes), tmp_path / "run")
    assert convert(["to-hf", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    run = load(tmp_path / "run")
    theirs = HFLM(str(tmp_path / "exported"), dtype="float32", device="cpu", batch_size=2)
    ours = harness_model(run.model, run.params, run.tokenizer, run.ends, length=run.settings.data.seq, rows=2)
    assert theirs.max_length == ours.max_length

    def instances(kind, *arguments):
        return [Instance(kind, {}, argument, number) for number, argument in enumerate(arguments)]

    pairs = [(doc["text"], choice) for doc in DOCUMENTS["choices"] for choice in doc["choices"]]
    pairs += [("", "It is a truth"), ("word " * 40, "falls")]
    scores = [each.loglikelihood(instances("loglikelihood", *pairs)) for each in (ours, theirs)]
    for (here, is_greedy), (there, is_theirs) in zip(*scores, strict=True):
        assert here == pytest.approx(there, rel=1e-4, abs=1e-4) and is_greedy == is_theirs
    texts = [(doc["target"],) for doc in DOCUMENTS["rolling"]]
    rolled = [each.loglikelihood_rolling(instances("loglikelihood_rolling", *texts)) for each in (ours, theirs)]
    assert rolled[0] == pytest.approx(rolled[1], rel=1e-4)
    written = [
        each.generate_until(
            instances(
                "generate_until",
                *((doc["text"], {"until": ["ter", " a"], "max_gen_toks": 12}) for doc in DOCUMENTS["writes"]),
            )
        )
        for each in (ours, theirs)
    ]
    assert written[0] == written[1] and any(written[0])

    capsys.readouterr()
    flags = [f"--workdir={tmp_path / 'run'}", f"--task-folder={tasks}", f"--tasks={','.join(TASKS)}", "--json"]
    one = [f"--config.mesh.{axis}=1" for axis in ("pp", "dp", "tp")]
    assert main(["evaluate", *flags, *one]) == 0
    found = json.loads(capsys.readouterr().out)
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    expected = lm_eval.simple_evaluate(theirs, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0)["results"]
    assert [*found] == [*TASKS]
    for task, values in found.items():
        assert values, task
        for name, value in values.items():
            assert value == pytest.approx(expected[task][name], rel=1e-4, nan_ok=True), (task, name)
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    in_training = {key.removeprefix("tasks/"): row[key] for key in row if key.startswith("tasks/")}
    assert in_training["rolling/byte_perplexity"] == pytest.approx(found["rolling"]["byte_perplexity,none"], rel=1e-5)
    said = re.findall(r"step (\d+)/40  rolling/byte_perplexity", (tmp_path / "run" / "log.txt").read_text())
    assert said == ["20", "40"]
    (tasks / "rolling.jsonl").unlink()
    assert main(["evaluate", *flags[:2], "--tasks=rolling", *one]) == DataError.exit_status
    assert "tasks rolling cannot be read: Unable to find " in capsys.readouterr().err
    assert main(["evaluate", *flags[:2], "--tasks=choice", *one]) == 2
    assert "there is no task 'choice'; did you mean 'choices'?" in capsys.readouterr().err
