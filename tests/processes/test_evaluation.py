"""An evaluation of all that is held out, and tasks, have the same result with every number of processes."""

import json

import pytest
from support.harness_tasks import TASKS, write_tasks
from support.process_examples import flags_of, launched

from parallax.storage.run_files import read_metrics

# The last batch is filled up for three ranks, too.
MESH = {"mesh.pp": 1, "mesh.replica": 3, "mesh.dp": 2, "mesh.tp": 1, "mesh.simulate": 6, "pipeline.microbatches": 1}
RUN = {"data.global_batch": 6, "train.steps": 3, "train.eval_batches": -1, "model.dropout": 0.0}
OF_TWO = {"mesh.pp": 1, "mesh.dp": 2, "mesh.tp": 2, "mesh.simulate": 4, "pipeline.microbatches": 1}


@pytest.mark.slow
def test_the_held_out_text_has_the_same_loss_with_one_two_and_three_processes(corpus, tmp_path):
    last = {}
    for count in (1, 2, 3):
        folder = tmp_path / str(count)
        flags = [*flags_of(corpus, **MESH, **RUN), f"--workdir={folder}"]
        with launched("train.py", *flags, processes=count, devices=6 // count) as job:
            status, text = job.end()
        assert status == 0 and "the whole held-out text" in text, text
        row = read_metrics(folder / "metrics.jsonl")[-1]
        last[count] = {key: value for key, value in row.items() if key.startswith("eval/")}
    assert len(last[1]) == 1 + len([0, 1, 2, 4, 8, 16])
    assert last[2] == pytest.approx(last[1], rel=1e-6) and last[3] == pytest.approx(last[1], rel=1e-6)
    results = {count: evaluated(tmp_path / "1", processes=count, devices=6 // count) for count in (1, 2)}
    assert results[2]["loss"] == pytest.approx(results[1]["loss"], rel=1e-6)
    assert results[1]["loss"] == pytest.approx(last[1]["eval/loss"], rel=1e-6)
    assert [results[2][name] for name in ("tokens", "text_bytes")] == [
        results[1][name] for name in ("tokens", "text_bytes")
    ]


def evaluated(folder, *flags, processes, devices):
    """The results that `python -m parallax.evaluate` prints, once."""
    command = ["-m", "parallax.evaluate", f"--workdir={folder}", "--json", *flags]
    with launched(*command, processes=processes, devices=devices) as job:
        status, text = job.end()
    assert status == 0, text
    printed = [line.removeprefix("[0] ") for line in text.splitlines()]
    return json.loads("\n".join(printed[printed.index("{") : printed.index("}") + 1]))


@pytest.mark.slow
def test_tasks_have_the_same_results_with_one_and_two_processes_in_training_and_after(corpus, tmp_path):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra: lm-eval)")
    tasks = write_tasks(tmp_path / "tasks")
    run = {"train.steps": 4, "train.tasks": ",".join(TASKS), "train.tasks_folder": tasks, "train.tasks_every_steps": 2}
    rows = {}
    for count in (1, 2):
        flags = [*flags_of(corpus, **OF_TWO, **RUN | run), f"--workdir={tmp_path / str(count)}"]
        with launched("train.py", *flags, processes=count, devices=4 // count) as job:
            status, text = job.end()
        assert status == 0, text
        metrics = read_metrics(tmp_path / str(count) / "metrics.jsonl")
        rows[count] = [{key: value for key, value in row.items() if key.startswith("tasks/")} for row in metrics]
    assert [len(row) for row in rows[1]] == [0, 6, 0, 6]
    for here, there in zip(rows[2], rows[1], strict=True):
        assert here == pytest.approx(there, rel=1e-5)
    asked = f"--tasks={','.join(TASKS)}", f"--task-folder={tasks}"
    after = evaluated(tmp_path / "2", *asked, processes=2, devices=2)
    names = {
        f"tasks/{task}/{name.removesuffix(',none')}": value for task in after for name, value in after[task].items()
    }
    last = rows[2][-1]
    assert {name: names[name] for name in last} == pytest.approx(last, rel=1e-5)
