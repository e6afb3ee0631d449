"""What a run's wall time went into is known over all its starts, and adds up."""

import json
import re
import shutil
import signal

import pytest
from support.process_examples import FAULTY, Started, flags_of
from support.run_examples import losses, tiny_config

from parallax.storage.run_files import COPIED, LAST_SAVE_SECS, SAVE_SECS, WRITTEN_AT, row_of
from parallax.training.goodput import StepSeconds, before_first_step, goodput, starts_of
from parallax.training.run import train


def step(number, at, secs=10.0, **more):
    return {"step": number, WRITTEN_AT: at, "perf/step_secs": secs, "perf/data_wait_secs": 1.0, **more}


def seconds_of(rows, since=0):
    read = StepSeconds(since)
    for row in rows:
        read.add(row)
    return read


def entry(first, **kept):
    return {"start": first, "goodput": kept}


def test_the_parts_of_a_history_with_a_kill_add_up_to_its_wall_time():
    """Begun at 1000; starts and compiles; killed after step 5 with step 3 saved; goes on at 1200, ends at 1300."""
    rows = [
        step(1, 1045, 25.0, **{"perf/compile_secs": 15.0}),
        step(2, 1055),
        step(3, 1070, **{"perf/eval_secs": 4.0}),
        {"step": 3, WRITTEN_AT: 1073, COPIED: 2.0, SAVE_SECS: 3.0},
        step(4, 1083),
        step(5, 1093),
    ]
    first = [entry(0, began=1000.0, start=18.0, restore=0)]
    kept, dropped = seconds_of(rows[:4]), seconds_of(rows[4:])
    second = before_first_step(starts_of(first), 1200.0, 11.0, 7.0, kept, dropped)
    assert second == {"start": 11.0, "restore": 7.0, "between starts": 107.0, "lost": 20.0, "lost_steps": 2}
    for row in (step(4, 1248, 25.0, **{"perf/compile_secs": 14.0}), step(5, 1262), {"step": 5, LAST_SAVE_SECS: 6.0}):
        kept.add(row)
    history = starts_of([*first, entry(3, began=1200.0, **second)])
    spent = goodput(history, kept, 1300.0)
    assert spent.secs == {
        "steps": 9.0 + 9.0 + 9.0 + 10.0 + 9.0,
        "data": 5.0,
        "compile": 29.0,
        "evaluation": 4.0,
        "save": 9.0,
        "start": 29.0,
        "restore": 7.0,
        "lost": 20.0,
        "between starts": 107.0,
        "other": 300.0 - 256.0,
    }
    assert spent.wall == 300.0 and spent.share == pytest.approx(46 / 300) and spent.lost_steps == 2
    assert spent.text() == (
        "15.3 % of 5m00s: steps 46s, data 5s, compile 29s, evaluation 4s, save 9s, start 29s, restore 7s, "
        "lost 20s (2 steps), between starts 1m47s, other 44s"
    )


def test_a_stop_that_was_recorded_ends_a_start_and_one_without_steps_ends_when_it_was_ready():
    start = {"began": 1000.0, "start": 18.0, "restore": 2.0}
    for more, rows, ended in (({}, [], 1020.0), ({}, [step(1, 1050)], 1050.0), ({"ended": 1080.0}, [], 1080.0)):
        secs = before_first_step(
            starts_of([entry(0, **start, **more)]), 1100.0, 1.0, 0.0, seconds_of(rows), StepSeconds()
        )
        assert secs["between starts"] == 1100.0 - ended


def test_starts_of_an_earlier_version_and_steps_of_another_run_do_not_count():
    known = entry(7, began=1000.0, start=5.0)
    history = starts_of([entry(0, began=1.0), {"start": 4}, known])
    assert [start.step for start in history] == [7] and starts_of([known, {"start": 9}]) == []
    rows = seconds_of([step(6, 990), step(7, 999), step(8, 1020)], since=7)
    spent = goodput(history, rows, 1020.0)
    assert (spent.secs["steps"], spent.secs["start"], spent.secs["other"], spent.wall) == (9.0, 5.0, 5.0, 20.0)
    assert goodput([], rows, 1020.0) is None


@pytest.mark.parametrize("value", [None, "7", True, -3.0, float("nan"), float("inf"), 10**400, [1], {"a": 1}])
def test_what_a_received_folder_says_is_a_number_of_seconds_or_nothing(value):
    assert starts_of([entry(0, began=value)]) == [] and starts_of(value) == []
    (start,) = starts_of([entry(value, began=5.0, start=value, lost=value, lost_steps=value, ended=value)])
    assert start.step == start.lost_steps == start.ended == 0 and not any(start.secs.values())
    rows = seconds_of(
        [{"step": 1, **dict.fromkeys((WRITTEN_AT, "perf/step_secs", "perf/compile_secs", COPIED), value)}]
    )
    assert not any(rows.secs.values()) and rows.latest == 0
    assert goodput([start], rows, 4.0).wall == 0.0  # a clock that went back
    assert goodput([start], rows, 4.0).text() == "unknown"


def goodput_of(folder):
    return json.loads((folder / "metadata.json").read_text())["starts"]


def check_adds_up(folder, lost_steps):
    """From the files alone, as `watch` reads them."""
    entries = goodput_of(folder)
    history = starts_of(entries)
    rows = seconds_of(map(row_of, (folder / "metrics.jsonl").read_text().splitlines()), history[0].step)
    spent = goodput(history, rows, history[-1].ended)
    assert len(history) == len(entries) and spent.lost_steps == lost_steps
    assert spent.wall == pytest.approx(history[-1].ended - history[0].began, abs=0.05)
    assert 0 < spent.secs["steps"] < spent.wall and spent.secs["compile"] > 0 and spent.secs["start"] > 0
    last = (folder / "log.txt").read_text().splitlines()[-1]
    share, wall = re.search(r" goodput (\S+) % of (\S+): ", last).groups()
    assert float(share) == pytest.approx(100 * spent.share, abs=2) and wall, (last, spent.text())
    return spent


def test_a_run_whose_steps_were_lost_knows_what_they_took(corpus, whole_run, tmp_path):
    """What a kill after step 6 leaves: the checkpoint of step 4, and lines beyond it."""
    folder = tmp_path / "halfway"
    shutil.copytree(whole_run, folder)
    shutil.rmtree(folder / "checkpoints" / "8")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines = [line for line in lines if json.loads(line)["step"] <= 6]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (start,) = goodput_of(folder)
    del start["ended"], start["goodput"]["ended"]
    (folder / "metadata.json").write_text(json.dumps({"starts": [start]}))
    lost = seconds_of(row for row in map(json.loads, lines) if row["step"] > 4)
    assert train(tiny_config(corpus), folder).reason == "finished" and losses(folder) == losses(whole_run)
    spent = check_adds_up(folder, lost_steps=2)
    assert spent.secs["lost"] == pytest.approx(sum(lost.secs.values()), abs=0.01)
    assert spent.secs["restore"] > 0 and spent.secs["between starts"] > 0


@pytest.mark.slow
def test_a_run_that_was_killed_and_goes_on_counts_what_the_kill_took(corpus, tmp_path):
    changes = {"train.steps": 24, "train.eval_batches": 0}
    flags = [*flags_of(corpus, **changes), f"--workdir={tmp_path}"]
    with Started(FAULTY, "die", "any", "16", *flags) as run:
        status, _ = run.end()
    assert status == -signal.SIGKILL
    done = len([row for row in map(row_of, (tmp_path / "metrics.jsonl").open()) if row and "train/loss" in row])
    with Started("train.py", *flags) as run:
        status, text = run.end()
    assert status == 0 and text.splitlines()[-1].split(" ", 1)[1].startswith("goodput "), text
    restored = goodput_of(tmp_path)[1]["start"]
    spent = check_adds_up(tmp_path, lost_steps=done - restored)
    assert restored >= 4 and spent.secs["between starts"] > 0 and spent.secs["restore"] > 0
