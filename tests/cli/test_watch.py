"""What `python -m parallax.watch` shows of a run that goes on, has ended in any way, or is no run."""

import io
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
import types

import pytest
from rich.console import Console

from parallax.cli import watch
from parallax.cli.watch import Metrics, WatchedRun, follow, main, picture, plot, write_svg
from parallax.errors import CheckpointError
from parallax.storage.run_files import COPIED, OWN_PARTS, PROCESS_STEP_SECS, WRITTEN_AT, process_key

GONE = 2**22 + 1  # no process has this number: it is more than Linux gives


def shown_of(*runs, width=100, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    console = Console(file=file, width=width)
    console.print(picture(runs, console))
    file.seek(0)
    return file.read()


def row(step, loss=2.0, **more):
    speed = {"perf/step_secs": 0.5, "perf/tokens_per_second": 1000.0, "perf/data_wait_secs": 0.1, "perf/mfu": 0.25}
    speed |= {"perf/memory_bytes": 3 << 30, "train/skipped_steps": 0.0}
    return {"step": step, "train/loss": loss, **speed, **{key.replace("_", "/", 1): v for key, v in more.items()}}


def write_run(folder, rows, *, owner=None, ended=None, steps=20):
    """What a run leaves in its folder, without training one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"train": {"steps": steps}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "log.txt").write_text("step 3/20  loss 2\nLostError: process 1 of 2 is gone\n\n")
    start = {"start": 0, "mesh": {"pp": 1, "dp": 8, "tp": 1}, "devices": "8 x cpu"}
    if ended is not None:
        start["ended"] = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "reason": ended}
    (folder / "metadata.json").write_text(json.dumps({"starts": [start]}))
    if owner is not None:
        (folder / "lock").write_text(f"process {owner} on {socket.gethostname()} since 2026-01-02 03:04:05")
    return folder


@pytest.mark.slow
def test_a_finished_run_is_shown_with_all_that_it_has_written(observed_run):
    run = WatchedRun(observed_run)
    shown = shown_of(run)
    assert run.status.state == "finished" and run.step == run.steps == 8
    assert run.saved.valid == [4, 8] and not run.saved.damaged and not run.saved.unfinished
    for words in ("step 8/8", "100%", "tokens/s", "of peak", "memory", "data wait", "pp=2 dp=2 tp=2 on 8 x cpu"):
        assert words in shown, words
    assert "checkpoints  step 8, before it 4" in shown and "skipped      none" in shown
    last = run.metrics.recent[-1]
    assert f"train loss {last['train/loss']:.4f}   eval loss {last['eval/loss']:.4f} at step 8" in shown


@pytest.mark.parametrize(
    ("how", "state", "why"),
    [
        ({"owner": os.getpid()}, "running", ""),
        ({"ended": "finished"}, "finished", ""),
        ({"ended": "stopped"}, "stopped", ""),
        ({"ended": "DivergenceError: step 6 is not finite"}, "failed", "DivergenceError: step 6 is not finite"),
        ({"owner": GONE}, "gone", "LostError: process 1 of 2 is gone"),
    ],
)
def test_it_is_known_whether_a_run_goes_on_and_how_it_ended(tmp_path, how, state, why):
    run = WatchedRun(write_run(tmp_path, [row(1), row(2), row(3)], **how))
    assert run.status == (state, why)
    assert state in shown_of(run) and (not why or why in shown_of(run))
    assert (run.left_secs == 17 * 0.5) is (state == "running")


def test_a_run_that_stands_still_is_told_from_one_that_is_slow(tmp_path):
    folder, late = write_run(tmp_path, [row(1), row(2)], owner=os.getpid()), time.time() + 59
    assert WatchedRun(folder, clock=lambda: late).status.state == "running"
    status = WatchedRun(folder, clock=lambda: late + 30).status
    assert status.state == "stands still" and "a step takes 0.50 s" in status.why
    slow = write_run(tmp_path, [{**row(n), "perf/step_secs": 100.0} for n in (1, 2)], owner=os.getpid())
    assert WatchedRun(slow, clock=lambda: late + 30).status.state == "running"


def test_a_start_in_a_folder_whose_run_has_ended_is_no_ended_run(tmp_path):
    folder = write_run(tmp_path, [row(1)], owner=os.getpid(), ended="stopped")
    assert WatchedRun(folder).status.state == "stopped"
    os.utime(folder / "lock", (time.time() + 5, time.time() + 5))
    assert WatchedRun(folder).status.state == "running"


def test_a_run_that_has_no_step_yet_is_starting(tmp_path):
    (tmp_path / "log.txt").write_text("run somewhere\n")
    run = WatchedRun(tmp_path)
    assert run.status.state == "starting" and "no step is done yet" in shown_of(run)


def test_lines_are_read_as_the_file_grows_and_torn_ones_wait_for_their_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = Metrics(path)
    rows.read()
    assert rows.steps == []
    path.write_text('{"step": 1, "train/loss": 3.0}\n{"step": 2, "tr')
    rows.read()
    assert rows.steps == [1] and rows.torn == 0
    with path.open("a") as file:
        file.write('ain/loss": null}\nno line of ours\n{"step": 3, "train/loss": 1.0, "eval/loss": 1.5}\n')
    rows.read()
    assert (rows.steps, rows.losses, rows.torn) == ([1, 2, 3], [3.0, None, 1.0], 1)
    assert (rows.eval_steps, rows.eval_losses) == ([3], [1.5])
    # A run that goes on from step 1 cuts the file: by renaming another over it, as it does, and in place.
    aside = tmp_path / "aside"
    aside.write_text('{"step": 1, "train/loss": 3.0}\n{"step": 2, "train/loss": 2.0}\n' + " " * 200)
    aside.replace(path)
    rows.read()
    assert (rows.steps, rows.losses) == ([1, 2], [3.0, 2.0])
    path.write_text('{"step": 1, "train/loss": 3.0}\n')
    rows.read()
    assert rows.steps == [1]


def test_a_running_run_is_followed_through_refreshes(tmp_path):
    run = WatchedRun(write_run(tmp_path, [row(1)], owner=os.getpid()))
    write_run(tmp_path, [row(1), row(2), row(3, train_skipped_steps=1.0)], ended="finished")
    run.refresh()
    assert (run.step, run.skipped, run.status.state) == (3, 1, "finished")
    assert "skipped      1 steps" in shown_of(run)


def test_saves_in_progress_and_damaged_steps_are_told_from_whole_ones(observed_run, tmp_path):
    shutil.copytree(observed_run, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "12.orbax-checkpoint-tmp-3").mkdir()
    (folder / "8" / "tokenizer.json").unlink()
    run = WatchedRun(tmp_path / "run")
    assert (run.saved.valid, run.saved.damaged, run.saved.unfinished) == ([4], [8], [12])
    assert "step 4; a save of step 12 was not finished; damaged: 8" in shown_of(run, width=120)
    metadata = json.loads(run.files.metadata.read_text())
    del metadata["starts"][-1]["ended"]
    run.files.metadata.write_text(json.dumps(metadata))
    run.refresh()
    assert "step 4; copying step 12; damaged: 8" in shown_of(run, width=120)
    with run.files.metrics.open("a") as file:
        file.write(json.dumps({"step": 12, COPIED: 0.5}) + "\n")
    steps = run.metrics.steps[:]
    run.refresh()
    assert "step 4; step 12 is copied, not yet on disk; damaged: 8" in shown_of(run, width=120)
    assert run.metrics.steps == steps


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [60, 80, 130])
def test_no_line_is_wider_than_the_terminal(tmp_path, width, encoding):
    rows = [row(n, 9.0 / n, **({"eval_loss": 8.0 / n} if n % 5 == 0 else {})) for n in range(1, 18)]
    runs = [write_run(tmp_path / name, rows, ended="E: " + "long " * 60) for name in ("one", "two", "a" * 90)]
    shown = shown_of(*map(WatchedRun, runs), width=width, encoding=encoding)
    assert max(map(len, shown.splitlines())) <= width
    beside = any("one" in line and "two" in line for line in shown.splitlines())
    assert beside is (width == 130)
    assert ("◆" in shown) is (encoding == "utf-8") and "step 17/20" in shown and "0.5294" in shown


def test_a_plot_is_drawn_where_the_numbers_are():
    fall = plot(enumerate([7, 6, 5, 4, 3, 2, 1, 0]), [], width=4, height=2)
    assert fall.lines == ["⠑⢄  ", "  ⠑⢄"]
    assert (fall.low, fall.high, fall.first, fall.last) == (0, 7, 0, 7)
    flat = plot([(1, 2.0)], [], width=4, height=3)
    assert [line.strip() for line in flat.lines if line.strip()] in (["⠁"], ["⠂"], ["⠄"], ["⡀"])
    assert plot([(1, None), (2, float("nan"))], [], width=4, height=3) is None
    marked = plot([(0, 0), (9, 1)], [(9, 1.0)], width=10, height=4)
    assert marked.marks == [(0, 9)] and marked.lines[0].endswith("◆")
    jump = plot([(0, 7), (1, 7), (6, 0), (7, 0)], [], width=4, height=2)  # a line goes over columns without a number
    assert jump.lines == ["⠉⢆  ", "  ⠱⣀"]


def test_one_spike_does_not_flatten_the_curve():
    losses = [3.0 - 0.01 * n for n in range(100)]
    losses[60] = 1e6
    drawn = plot(enumerate(losses), [], width=50, height=8)
    assert drawn.high < 5 and drawn.low == pytest.approx(2.01)


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_a_run_is_refused_by_what_was_looked_for(tmp_path, there, capsys):
    folder = tmp_path if there else tmp_path / "nowhere"
    assert main([str(folder), "--once"]) == 3
    error = capsys.readouterr().err
    assert "is not the folder of a run" in error and "config.json, metrics.jsonl, log.txt" in error
    write_run(tmp_path / "below", [])
    if there:
        with pytest.raises(CheckpointError, match="runs below it: below"):
            WatchedRun(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--width=10"], "--width=10 must be a whole number of 40 or more"),
        (["--svg=/nowhere/at/all.svg"], "--svg=/nowhere/at/all.svg cannot be written"),
        (["--twice"], "unrecognized arguments: --twice"),
        (["--sort=loss"], "--sort=loss sorts a table; add --table"),
        (["--table", "--sort=los"], "--sort='los' is unknown"),
    ],
)
def test_a_wrong_command_line_is_one_line(tmp_path, capsys, arguments, words):
    assert main([str(write_run(tmp_path, [row(1)])), "--once", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_pipe_gets_one_picture_and_an_svg_needs_nothing_else(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [row(n, 3.0 / n) for n in range(1, 9)], owner=os.getpid())
    assert main([str(folder), f"--svg={tmp_path / 'watch.svg'}"]) == 0
    assert capsys.readouterr().out.count("step 8/20") == 1
    svg = (tmp_path / "watch.svg").read_text()
    assert "running" in svg and "url(http" not in svg and "font-face" not in svg


def test_a_run_that_was_followed_leaves_one_shown_of(tmp_path, monkeypatch):
    runs, looks = [WatchedRun(write_run(tmp_path / "run", [row(1)], owner=os.getpid()))], iter([None, None])

    def look(secs):
        if next(looks, "ended") == "ended":
            raise KeyboardInterrupt

    # Only its own: threads that other tests have left sleep, too.
    monkeypatch.setattr(watch, "time", types.SimpleNamespace(sleep=look))
    console = Console(file=io.StringIO(), width=60, force_terminal=True)
    follow(runs, console)
    write_svg(runs, console.width, tmp_path / "watch.svg")
    assert console.file.getvalue().count("train loss") > 1
    assert (tmp_path / "watch.svg").read_text().count("data&#160;wait") == 1


def test_a_terminal_is_drawn_anew_until_ctrl_c_and_jax_is_not_imported(tmp_path):
    folder = write_run(tmp_path, [row(1), row(2)], owner=os.getpid())
    ours, theirs = pty.openpty()
    program = "import sys; sys.modules['jax'] = None; from parallax.cli.watch import main; sys.exit(main())"
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "60", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment,
    )
    os.close(theirs)
    seen = ""
    while "step 2/20" not in seen:
        seen += os.read(ours, 65536).decode("utf-8", "replace")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(3)) + "\n")
    while "step 3/20" not in seen:
        seen += os.read(ours, 65536).decode("utf-8", "replace")
    process.send_signal(signal.SIGINT)
    while True:
        try:
            seen += os.read(ours, 65536).decode("utf-8", "replace")
        except OSError:  # the terminal ends with its process
            break
    assert process.wait(timeout=30) == 0 and process.stderr.read() == b""
    assert "╯" in seen.rstrip()[-20:]  # the last picture stays


def mixture_row(step, shares):
    """A row of a run with experts in the last of two layers."""
    load = {"experts/load": 4 * max(shares), "experts/entropy": 0.5, "experts/layers": [1]}
    return row(step) | load | {"experts/load_by_layer": [4 * max(shares)], "experts/shares": [shares]}


def test_the_load_of_experts_is_shown_and_drawn(tmp_path, capsys):
    rows = [mixture_row(1, [0.7, 0.1, 0.1, 0.1]), mixture_row(2, [0.3, 0.2, 0.25, 0.25])]
    rows.insert(1, row(2) | {"experts/shares": [[None, "many"]], "experts/layers": [1]})  # a file may hold anything
    folder, drawn = write_run(tmp_path / "run", rows, owner=os.getpid()), tmp_path / "load.svg"
    assert main([str(folder), "--once", f"--load={drawn}"]) == 0
    assert "largest load 1.20 x even, entropy 0.500 of even" in capsys.readouterr().out
    picture = drawn.read_text()
    assert "<title>layer 1, expert 0: 2.80</title>" in picture and "<title>layer 1, expert 1: 0.80</title>" in picture
    assert picture.count("<title>") == 8 and "step 1<" in picture and "step 2<" in picture


def test_a_run_without_experts_has_no_load_to_draw(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [row(1)], owner=os.getpid())
    assert "largest load" not in shown_of(WatchedRun(folder))
    assert main([str(folder), "--once", f"--load={tmp_path / 'load.svg'}"]) == 2
    assert "no line of metrics.jsonl has experts/shares" in capsys.readouterr().err


# ---- goodput, processes, and many runs


def timed_run(folder, *, steps=3, ended=None, goodput=None, **more):
    rows = [row(number, loss=4.0 - number, **more) | {WRITTEN_AT: 1000.0 + number} for number in range(1, steps + 1)]
    write_run(folder, rows, ended=ended, owner=GONE)
    about = json.loads((folder / "metadata.json").read_text())
    about["starts"][0]["goodput"] = {"began": 990.0, "start": 8.0} if goodput is None else goodput
    (folder / "metadata.json").write_text(json.dumps(about))
    return folder


def test_the_goodput_of_a_run_is_that_of_its_files_until_its_last_sign_of_life(tmp_path):
    run = WatchedRun(timed_run(tmp_path))
    assert run.goodput.secs["steps"] == pytest.approx(3 * 0.4) and run.goodput.wall == pytest.approx(13.0)
    assert "goodput      9.2 % of 13s: steps 1s, start 8s, other 4s" in shown_of(run)
    assert "goodput" not in shown_of(WatchedRun(write_run(tmp_path / "earlier", [row(1)])))


def test_the_lines_of_another_run_do_not_count_when_the_metadata_comes_later(tmp_path):
    metadata = timed_run(tmp_path, steps=4) / "metadata.json"
    about = json.loads(metadata.read_text())
    metadata.write_text("{}")
    run = WatchedRun(tmp_path)
    assert run.goodput is None
    about["starts"][0]["start"] = 3
    metadata.write_text(json.dumps(about))
    run.refresh()
    assert run.goodput.secs["steps"] == pytest.approx(0.4) and run.metrics.steps == [1, 2, 3, 4]


def of_processes(*seconds, step_secs=1.0):
    """The keys of a line of metrics.jsonl for processes that need these seconds for data."""
    keys = dict.fromkeys(map(process_key, OWN_PARTS), [0.0] * len(seconds))
    return keys | {process_key("data"): [*seconds], PROCESS_STEP_SECS: [step_secs] * len(seconds)}


def test_processes_are_a_strip_and_the_slow_one_is_named(tmp_path):
    write_run(tmp_path, [row(1) | of_processes(0.0, 0.6, 0.1), row(2)])
    run = WatchedRun(tmp_path)
    assert "processes    ▁▅▂ none is slow" in shown_of(run)  # the config does not say how slow is slow
    (tmp_path / "config.json").write_text(json.dumps({"train": {"steps": 20, "slow_process_share": 0.2}}))
    run.refresh()
    assert run.slow == {1: "data"}
    said = "processes    ▁▅▂; process 1 is slow: 0.60 s a step waiting for its data, median 0.10 s"
    assert said in shown_of(run)
    many = WatchedRun(write_run(tmp_path / "many", [row(1) | of_processes(*[0.0] * 999, 1.0)]))
    assert f"processes    {'▁' * 31}█" in shown_of(many)


@pytest.mark.parametrize("value", [None, 3, "0.5", [], [1.0], [1.0, -1.0], [1.0, "x"], [1.0, None], [1.0, 1e300]])
def test_odd_seconds_of_processes_are_not_drawn(tmp_path, value):
    run = WatchedRun(write_run(tmp_path / "run", [row(1) | of_processes(0.0, 0.6) | {PROCESS_STEP_SECS: value}]))
    assert "processes" not in shown_of(run) and run.step == 1


def names_of(text):
    return [line.split()[0] for line in text.splitlines() if line.strip().startswith("run")]


def test_a_folder_of_runs_is_a_table_that_sorts(tmp_path, capsys):
    timed_run(tmp_path / "run-a", steps=2, ended="finished", perf_tokens_per_second=500.0)
    timed_run(tmp_path / "run-b", steps=5, goodput={})
    write_run(tmp_path / "run-c", [], steps=9)
    (tmp_path / "notes").mkdir()
    expected = {"name": "abc", "step": "bac", "loss": "bac", "tokens/s": "bac", "goodput": "abc", "state": "abc"}
    for column, order in expected.items():
        assert main([str(tmp_path), "--table", f"--sort={column}", "--width=110"]) == 0
        shown = capsys.readouterr().out
        assert names_of(shown) == [f"run-{letter}" for letter in order], (column, shown)
    assert "500" in shown and "finished" in shown and "2.0000" in shown
    assert main([str(tmp_path / "run-a"), str(tmp_path / "run-c"), "--table"]) == 0
    assert names_of(capsys.readouterr().out) == ["run-a", "run-c"]
