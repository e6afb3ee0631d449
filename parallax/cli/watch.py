"""Watch runs in a terminal: losses, speed, memory, checkpoints and status.

    python -m parallax.watch runs/mine
    python -m parallax.watch runs/mine runs/other --once
    python -m parallax.watch runs/mixture --once --load=load.svg
    python -m parallax.watch runs --table --sort=loss

It only reads the files of the runs, on this machine or another one that sees their folders. It ends when all runs have
ended, or with Ctrl-C, which does not affect the runs. If the output is not a terminal, it prints one picture.
"""

import argparse
import contextlib
import io
import math
import os
import re
import socket
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.columns import Columns
from rich.console import CONSOLE_SVG_FORMAT, Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from parallax.analysis.load_picture import load_picture
from parallax.checkpoint.steps import check_steps, unfinished_saves
from parallax.cli.arguments import Parser, local_path, run_path, write_output
from parallax.display.tables import BARS, bars
from parallax.display.units import decimal, duration, in_bytes, percent
from parallax.errors import CheckpointError, ConfigError, StoreError, check_choice, check_whole, exit_status, printable
from parallax.storage import files
from parallax.storage.run_files import (
    COPIED,
    EVAL_LOSS_FROM,
    EVAL_LOSS_OF,
    LARGEST_STEP,
    OWN_PARTS,
    PROCESS_STEP_SECS,
    TRAIN_LOSS_OF,
    RunFiles,
    is_of_save,
    number_of,
    process_key,
    row_of,
)
from parallax.training.goodput import Goodput, StepSeconds, goodput, last_sign, starts_of
from parallax.training.slow_processes import SLOW_IN, median, slow_processes

FRESH_SECS = 1.0  # between two reads of the files
MOST_AT_ONCE = 16  # runs
SVG = re.sub(r"\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # without fonts from other sites
LEAST_WIDTH = 40


# ---- a run, from its files

RECENT = 20  # steps for the speed; of older steps only drawn values are kept
QUIET_SECS = 60.0  # shorter pauses, as evaluations and saves, do not count as standing still
QUIET_STEPS = 10  # as train.stall_factor
LONGEST_LINE = 1000  # most characters of a text to show
LONGEST_SECS = 1e9  # longer estimates are not shown
SPEEDS = ("step_secs", "tokens_per_second", "mfu", "data_wait_secs", "memory_bytes")
OF_EXPERTS = ("experts/load", "experts/entropy")
NUMBERS = ("train/loss", "eval/loss", "train/skipped_steps", *OF_EXPERTS, *(f"perf/{name}" for name in SPEEDS))
OF_PROCESSES = (*map(process_key, OWN_PARTS), PROCESS_STEP_SECS)
MOST_PROCESSES = 1 << 16
POSITION = re.compile(r"\d{1,9}")  # of a token in its window
OWNER = re.compile(r"process (\d+) on (\S+) since")


class Status(NamedTuple):
    """`state` is "starting", "running", "stands still", "finished", "stopped", "interrupted", "failed" or "gone"; `why`
    says more."""

    state: str
    why: str = ""

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.state in ("finished", "stopped", "interrupted", "failed", "gone")


class Saved(NamedTuple):
    """Saved steps: intact ones, oldest first; damaged ones; and those whose save has not ended. `error` says why they
    are unknown."""

    valid: list[int]
    damaged: list[int]
    unfinished: list[int]
    error: str = ""


class Metrics:
    """metrics.jsonl, read as it grows: `steps` with `losses`, `eval_steps` with `eval_losses`, and the latest rows.

    `copied` are steps whose state was copied to be saved, `spent` is what all lines say of the run's time, and
    `processes` has the seconds of each process in the latest line with them, as `slow_processes` takes them. Rows
    contain only finite numbers; any other loss is None. A line counts when it is complete; invalid lines are counted in
    `torn`, and values that are neither a finite number nor null in `odd`.
    """

    def __init__(self, path: Path):
        self._path, self._log = path, files.growing_log(path)
        self._forget()

    def read(self, since: int = 0) -> None:
        """Read new lines; from the beginning if the file was replaced or is shorter, as a resumed run shortens it. Time
        counts after the step `since`."""
        if since != self.spent.since:
            self._log = files.growing_log(self._path)
        replaced, lines = self._log.read()
        if replaced:
            self._forget(since)
        for line in lines:
            self._add(row_of(line))

    def _forget(self, since: int = 0) -> None:
        self.spent, self.processes = StepSeconds(since), np.empty((0, len(OF_PROCESSES)))
        self.steps: list[int] = []
        self.losses: list[float | None] = []
        self.eval_steps: list[int] = []
        self.eval_losses: list[float] = []
        self.eval_by_source: dict[str, float] = {}
        self.eval_by_position: dict[int, float] = {}
        self.train_by_source: dict[str, float] = {}
        self.recent: deque[dict[str, float]] = deque(maxlen=RECENT)
        self.copied: set[int] = set()  # steps whose state was copied to be saved
        self.torn = self.odd = 0

    def _add(self, row: dict[str, Any] | None) -> None:
        if row is None:
            self.torn += 1
            return
        self.spent.add(row)
        if PROCESS_STEP_SECS in row:
            self.processes = processes_of(row)
        if is_of_save(row):
            self.copied |= {row["step"]} if COPIED in row else set()
            return
        numbers = {key: number_of(row[key]) for key in NUMBERS if row.get(key) is not None}
        finite = {key: number for key, number in numbers.items() if number is not None and math.isfinite(number)}
        self.odd += len(numbers) - len(finite)
        self.steps.append(row["step"])
        self.losses.append(finite.get("train/loss"))
        if "eval/loss" in finite:
            self.eval_steps.append(row["step"])
            self.eval_losses.append(finite["eval/loss"])
            self.eval_by_source = losses_of_sources(row)
            self.eval_by_position = losses_by_position(row)
        self.train_by_source |= losses_of_sources(row, TRAIN_LOSS_OF)
        self.recent.append({"step": row["step"], **finite})


def losses_of_sources(row: Mapping[str, Any], prefix: str = EVAL_LOSS_OF) -> dict[str, float]:
    """The losses of a mixture's held-out text in a line of metrics.jsonl, by source; or others with this prefix."""
    named = {key.removeprefix(prefix): number_of(row[key]) for key in row if key.startswith(prefix)}
    return {one_line(name): loss for name, loss in named.items() if loss is not None and math.isfinite(loss)}


def losses_by_position(row: Mapping[str, Any]) -> dict[int, float]:
    """The losses of the held-out text in a line of metrics.jsonl, by the first position of each group."""
    named = losses_of_sources(row, EVAL_LOSS_FROM)
    known = {int(name): loss for name, loss in named.items() if POSITION.fullmatch(name)}
    return {first: known[first] for first in sorted(known)}


def processes_of(row: dict[str, Any]) -> np.ndarray:
    """Seconds of each process in a line of metrics.jsonl; without rows if it has others than it should."""
    columns = [row.get(key) for key in OF_PROCESSES]
    lengths = {len(column) if isinstance(column, list) else 0 for column in columns}
    if len(lengths) > 1 or not 1 < max(lengths) <= MOST_PROCESSES:
        return np.empty((0, len(OF_PROCESSES)))
    numbers = [[number_of(value) for value in column] for column in columns]
    right = all(number is not None and 0 <= number < LONGEST_SECS for column in numbers for number in column)
    return np.array(numbers).T if right else np.empty((0, len(OF_PROCESSES)))


class WatchedRun:
    """A run, read from its folder; `refresh` reads new data. Nothing is written or locked.

    Raises:
        CheckpointError: the folder holds no run.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time):
        self.path, self.clock, self.files = path, clock, RunFiles(path)
        self.metrics = Metrics(self.files.metrics)
        self.settings: dict[str, Any] = {}
        self.starts: list[dict[str, Any]] = []
        self.saved = Saved([], [], [])
        self._looked: tuple = ()
        self._check()
        self.refresh()

    def refresh(self) -> None:
        """Read new data of the run."""
        self.settings = files.object_if_readable(self.files.config, odd_numbers=True) or self.settings
        starts = files.object_if_readable(self.files.metadata, odd_numbers=True).get("starts")
        self.starts = [row for row in starts if isinstance(row, dict)] if isinstance(starts, list) else self.starts
        timed = starts_of(self.starts)
        self.metrics.read(timed[0].step if timed else 0)
        self._look_at_checkpoints()

    @property
    def name(self) -> str:
        """The folder's name."""
        return one_line(self.path.resolve().name)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.metrics.steps[-1] if self.metrics.steps else self._first_step - 1

    @property
    def steps(self) -> int | None:
        """Number of steps of the run, if its config exists yet."""
        train = self.settings.get("train")
        steps = train.get("steps") if isinstance(train, dict) else None
        return steps if type(steps) is int and 0 < steps < LARGEST_STEP else None

    @property
    def speed(self) -> dict[str, float]:
        """Medians of the latest steps by name, and the share of time waiting for data; empty until a step that did not
        compile."""
        recent = [row for row in self.metrics.recent if row["step"] != self._first_step] or self.metrics.recent
        values_of = {name: [row[key] for row in recent if (key := f"perf/{name}") in row] for name in SPEEDS}
        values_of["step_secs"] = [secs for secs in values_of["step_secs"] if 0 < secs < LONGEST_SECS]
        if not values_of["step_secs"]:
            return {}
        waiting = sum(values_of.pop("data_wait_secs")) / sum(values_of["step_secs"])
        return {name: statistics.median(values) for name, values in values_of.items() if values} | {"waiting": waiting}

    @property
    def left_secs(self) -> float | None:
        """Seconds to the last step at the current speed, without evaluations and saves."""
        if self.steps is None or not self.speed or self.status.over:
            return None
        left = max(self.steps - self.step, 0) * self.speed["step_secs"]
        return left if left < LONGEST_SECS else None

    @property
    def skipped(self) -> int:
        """Steps that the guard has skipped."""
        counts = [row["train/skipped_steps"] for row in self.metrics.recent if "train/skipped_steps" in row]
        return int(counts[-1]) if counts else 0

    @property
    def expert_load(self) -> tuple[float, ...]:
        """The largest load of an expert (1 if even) and the least entropy in the latest step; empty without experts."""
        latest = self.metrics.recent[-1] if self.metrics.recent else {}
        return tuple(latest[name] for name in OF_EXPERTS) if all(name in latest for name in OF_EXPERTS) else ()

    @property
    def goodput(self) -> Goodput | None:
        """What the run's time went into until its last sign of life; None for runs of earlier versions."""
        starts = starts_of(self.starts)
        return goodput(starts, self.metrics.spent, last_sign(starts, self.metrics.spent.latest))

    @property
    def slow(self) -> dict[int, str]:
        """Processes that were slow in the latest line, with what they were slow in."""
        train = self.settings.get("train")
        share = number_of(train.get("slow_process_share")) if isinstance(train, dict) else None
        means = self.metrics.processes
        return slow_processes(means, share) if len(means) and share is not None and share > 0 else {}

    @property
    def status(self) -> Status:
        """Whether the run is running, or how it has ended."""
        alive, ended, of = self._owner_is_alive(), self._started.get("ended"), self.files
        taken_again = alive and files.time_of(of.lock) > files.time_of(of.metadata) + 1  # by a new start
        if isinstance(ended, dict) and not taken_again:
            reason = str(ended.get("reason"))
            if reason == "interrupted":
                return Status(reason, self.last_words())
            return Status(reason) if reason in ("finished", "stopped") else Status("failed", one_line(reason))
        if alive is False:
            return Status("gone", self.last_words() or "its log has no last message")
        times = map(files.time_of, (of.metrics, of.log, of.metadata, of.lock, of.checkpoints))
        quiet = self.clock() - max(self.metrics.spent.latest, *times)
        secs = self.speed.get("step_secs", 0.0)
        if quiet > max(QUIET_SECS, QUIET_STEPS * secs) and self.metrics.steps:
            return Status("stands still", f"nothing new for {quiet:.0f} s; a step takes {secs:.2f} s")
        return Status("running" if self.metrics.steps else "starting")

    def last_words(self) -> str:
        """The last informative line of the log."""
        try:
            lines = files.end_of(self.files.log, 4096).decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return next((one_line(line.strip()) for line in reversed(lines) if line.strip()), "")

    @property
    def mesh(self) -> str:
        """Devices along each axis in the latest start, as "pp=1 dp=8 tp=1"."""
        mesh = self._started.get("mesh")
        return one_line(" ".join(f"{axis}={size}" for axis, size in mesh.items())) if isinstance(mesh, dict) else ""

    @property
    def devices(self) -> str:
        """The devices of the latest start, as "8 x cpu"."""
        return one_line(str(self._started.get("devices", "")))

    @property
    def _started(self) -> dict[str, Any]:
        return self.starts[-1] if self.starts else {}

    @property
    def _first_step(self) -> int:
        """The first step of the latest start, which compiles."""
        start = self._started.get("start")
        return (start if type(start) is int and 0 <= start < LARGEST_STEP else 0) + 1

    def _check(self) -> None:
        wanted = (self.files.config, self.files.metrics, self.files.log)
        if any(file.is_file() for file in wanted) or files.names_in(self.files.metrics):
            return
        reason = "it has none of" if self.path.is_dir() else "it does not exist; wanted are"
        below = [folder.name for folder in files.folders_with(self.path, self.files.config.name)]
        advice = f"; runs below it: {', '.join(below[:8])}" if below else "; name the --workdir of a run"
        names = ", ".join(file.name for file in wanted)
        raise CheckpointError(f"{str(self.path)!r} is not the folder of a run: {reason} {names}{advice}")

    def _look_at_checkpoints(self) -> None:
        folder = self.files.checkpoints
        try:
            seen = files.state_below(folder)
        except OSError:
            seen = ()
        if seen == self._looked:  # manifests are long, so they are read again only after a change
            return
        try:
            checked, unfinished = check_steps(folder), [step for step, _ in unfinished_saves(folder)]
            self.saved = Saved(sorted(checked.valid), sorted(checked.damaged), unfinished)
        except StoreError:  # a store that does not answer says nothing of the steps
            raise
        except CheckpointError as error:
            if isinstance(error.__cause__, StoreError):
                raise error.__cause__ from None
            self.saved = Saved([], [], [], one_line(str(error)))
        self._looked = seen

    def _owner_is_alive(self) -> bool | None:
        """Whether the process that locks the folder is alive; None if this machine cannot know."""
        try:
            owner = OWNER.match(files.owner_of(self.files.lock))
        except OSError:
            return None
        if owner is None or owner[2] != socket.gethostname():
            return None
        try:
            os.kill(int(owner[1]), 0)
        except (OSError, OverflowError) as error:
            return isinstance(error, PermissionError)
        return True


def one_line(text: str) -> str:
    """Text from a file as one printable line of limited length."""
    return printable(text[:LONGEST_LINE], keep="")


# ---- a curve; `rich`, which draws the rest, has no plots

BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille dots of a character, by row and column
WIDE, HIGH = 2, 4
POINT = "◆"
NEIGHBOURS = 2  # on each side; shorter excursions are spikes
LARGEST = 1e99  # sums and differences of such values are finite
OUTLIER = 0.5  # a spike is drawn at most this share of the range of other values above them

Points = Iterable[tuple[float, float | None]]  # pairs of x and y


class Plot(NamedTuple):
    """Lines of equal width, `marks`, the (row, column) of single points, and the ends of both axes."""

    lines: list[str]
    marks: list[tuple[int, int]]
    low: float
    high: float
    first: float
    last: float


def plot(curve: Points, points: Points, *, width: int, height: int) -> Plot | None:
    """A curve in braille dots with single points on top, in width x height characters; None without any points.

    Both are pairs of x and y; pairs whose y is None or not finite are left out. A column of dots shows the mean of its
    values; a straight line crosses columns without values.

    >>> print("\\n".join(plot(enumerate([3, 2, 1, 0]), [], width=2, height=1).lines))
    ⠑⢄
    """
    curve, points = _finite(curve), _finite(points)
    if not curve and not points:
        return None
    xs = [x for x, _ in curve + points]
    first, last = min(xs), max(xs)

    def column_of(x: float, columns: int) -> int:
        return round((x - first) / (last - first) * (columns - 1)) if last > first else 0

    def row_of(y: float, rows: int) -> int:
        share = (min(y, top) - low) / (top - low) if top > low else 0.5
        return round((1 - share) * (rows - 1))

    values = defaultdict(list)
    for x, y in curve:
        values[column_of(x, width * WIDE)].append(y)
    means = {column: statistics.fmean(values[column]) for column in sorted(values)}
    low, top = _bounds([*means.values()], [y for _, y in points])
    dots = [(column, row_of(mean, height * HIGH)) for column, mean in means.items()]
    cells = [[0] * width for _ in range(height)]
    for start, end in zip(dots[:1] + dots, dots):
        steps = max(end[0] - start[0], abs(end[1] - start[1]), 1)
        for column, row in np.linspace(start, end, steps + 1).round().astype(int):
            cells[row // HIGH][column // WIDE] |= DOTS[row % HIGH][column % WIDE]
    lines = [[chr(BRAILLE + bits) if bits else " " for bits in line] for line in cells]
    marks = [(row_of(y, height), column_of(x, width)) for x, y in points]
    for row, column in marks:
        lines[row][column] = POINT
    return Plot(["".join(line) for line in lines], marks, low, top, first, last)


def _finite(pairs: Points) -> list[tuple[float, float]]:
    """The pairs that can be drawn, with extremely large values clipped."""
    return [(x, min(max(y, -LARGEST), LARGEST)) for x, y in pairs if y is not None and math.isfinite(y)]


def _bounds(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value to draw, chosen so that a high spike does not flatten the rest."""
    low, highest = min(*values, *others, math.inf), max(*values, *others, -math.inf)
    around = (values[max(index - NEIGHBOURS, 0) : index + NEIGHBOURS + 1] for index in range(len(values)))
    usual = max([*map(statistics.median, around), *others])
    return low, min(highest, usual + OUTLIER * (usual - low)) if usual > low else highest


# ---- the picture

LEAST_FRAME = 58  # least columns of a frame beside another
PLOT_ROWS = 12
FEWEST_ROWS = 5
OTHER_LINES = 14  # lines of a frame without its plot
TRAIN, EVAL, SOFT = "cyan", "yellow", "bright_black"
STATE_STYLES = {
    "running": "green",
    "finished": "green",
    "starting": "cyan",
    "stopped": "yellow",
    "interrupted": "yellow",
}
BAD = "bold red"
MOST_BARS = 32
MOST_NAMED = 3  # slow processes


def picture(runs: Sequence[WatchedRun], console: Console) -> Columns:
    """All runs, fitted to a console: a frame for each, side by side if there is room."""
    columns = max(1, min(len(runs), console.width // LEAST_FRAME))
    lines, width = -(-len(runs) // columns), console.width // columns
    fits = console.height // lines - OTHER_LINES if console.is_terminal else PLOT_ROWS
    rows = max(FEWEST_ROWS, min(PLOT_ROWS, fits))
    return Columns([frame(run, width=width, rows=rows) for run in runs], width=width, padding=0)


def frame(run: WatchedRun, *, width: int, rows: int) -> Panel:
    """The frame of one run, with this width and this number of rows for its plot."""
    status = run.status
    style = STATE_STYLES.get(status.state, BAD)
    title = Text.assemble((f" {run.name} ", "bold"), ("· ", SOFT), (f"{status.state} ", style))
    parts: list[RenderableType] = [progress(run, status), losses(run), Text()]
    parts += [*curves(run, width=width - 4, rows=rows), Text(), facts(run, status)]
    if status.why:
        parts.append(Text(status.why, style=style, overflow="fold"))
    return Panel(Group(*parts), title=title, title_align="left", border_style=SOFT, box=box.ROUNDED, safe_box=True)


def progress(run: WatchedRun, status: Status) -> RenderableType:
    """Progress and remaining time of the run."""
    of = f"/{run.steps:,}" if run.steps else ""
    left = "" if run.left_secs is None or not run.metrics.steps else f"left {duration(run.left_secs)}"
    columns = Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True, justify="right")
    table = Table.grid(*columns, expand=True, padding=(0, 1))
    colour = STATE_STYLES.get(status.state, "red")
    done = run.step if run.steps else 0
    bar = ProgressBar(run.steps or 1, done, style=SOFT, complete_style=colour, finished_style=colour)
    share = f"{run.step / run.steps:.0%} " if run.steps else ""
    table.add_row(Text(f"step {run.step:,}{of}"), bar, Text(f"{share}{left}"))
    return table


def losses(run: WatchedRun) -> Text:
    """The latest loss of training and of evaluation."""
    metrics, line = run.metrics, Text(no_wrap=True, overflow="ellipsis")
    if metrics.steps:
        loss = metrics.losses[-1]
        line.append("train loss ", style=TRAIN)
        line.append("not finite" if loss is None else decimal(loss, 4), style="bold")
    if metrics.eval_steps:
        line.append("   eval loss ", style=EVAL).append(decimal(metrics.eval_losses[-1], 4), style="bold")
        line.append(f" at step {metrics.eval_steps[-1]:,}", style=SOFT)
    return line


def curves(run: WatchedRun, *, width: int, rows: int) -> Iterator[Text]:
    """Both losses by step, with the ends of both axes; a line of text if there are none yet."""
    metrics, wide = run.metrics, max(width - 8, 4)
    train, held_out = zip(metrics.steps, metrics.losses), zip(metrics.eval_steps, metrics.eval_losses)
    drawn = plot(train, held_out, width=wide, height=rows)
    if drawn is None:
        yield Text("no step is done yet", style=SOFT)
        return
    ends = {0: f"{drawn.high:6.4g}"[:6], rows - 1: f"{drawn.low:6.4g}"[:6]}
    for number, dots in enumerate(drawn.lines):
        line = Text(f"{ends.get(number, ''):>6} │", style=SOFT, no_wrap=True).append(dots, style=TRAIN)
        for row, column in drawn.marks:
            if row == number:
                line.stylize(EVAL, column + 8, column + 9)
        yield line
    first, last = f"step {drawn.first:,.0f}", f"{drawn.last:,.0f}"
    yield Text(" " * 8 + first + last.rjust(wide - len(first)), style=SOFT, no_wrap=True)


def facts(run: WatchedRun, status: Status) -> RenderableType:
    """Speed, memory, checkpoints and skipped steps, one name and value per line."""
    table = Table.grid(Column(style=SOFT, no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    add, speed = table.add_row, run.speed
    if speed:
        tokens = decimal(speed.get("tokens_per_second", 0.0), 0)
        add("speed", Text(f"{tokens} tokens/s, {decimal(speed['step_secs'], 2)} s a step"))
        peak = percent(speed["mfu"]) if "mfu" in speed else "unknown"
        memory = f", memory {in_bytes(speed['memory_bytes'])}" if "memory_bytes" in speed else ""
        add("of peak", Text(f"{peak}{memory}"))
        add("data wait", Text(percent(speed["waiting"]), style="yellow" if speed["waiting"] > 0.05 else ""))
    if run.goodput is not None and run.goodput.wall:
        add("goodput", Text(run.goodput.text()))
    if len(run.metrics.processes):
        add("processes", processes_text(run.metrics.processes, run.slow))
    add("checkpoints", saved_text(run.saved, status, run.metrics.copied))
    add("skipped", Text(f"{run.skipped:,} steps" if run.skipped else "none", style="yellow" if run.skipped else ""))
    if run.expert_load:
        largest, entropy = run.expert_load
        add("experts", Text(f"largest load {decimal(largest, 2)} x even, entropy {decimal(entropy, 3)} of even"))
    if by_source := run.metrics.eval_by_source:
        each = ", ".join(f"{name} {decimal(loss, 4)}" for name, loss in by_source.items())
        add("eval loss of", Text(each))
    if by_source := run.metrics.train_by_source:
        each = ", ".join(f"{name} {decimal(loss, 4)}" for name, loss in by_source.items())
        add("train loss of", Text(each))
    if by_position := run.metrics.eval_by_position:
        (first, at_first), *_, (last, at_last) = [*by_position.items()] * 2
        ends = f"{decimal(at_first, 4)} at {first:,}, {decimal(at_last, 4)} from {last:,} on"
        add("by position", Text(f"eval loss {bars([*by_position.values()])} {ends}"))
    if run.metrics.torn:
        add("unreadable", Text(f"{run.metrics.torn:,} lines of metrics.jsonl", style="yellow"))
    if run.metrics.odd:
        add("odd", Text(f"{run.metrics.odd:,} values of metrics.jsonl are not finite numbers", style="yellow"))
    started = f", start {len(run.starts)}" if len(run.starts) > 1 else ""
    if run.mesh:
        add("mesh", Text(f"{run.mesh} on {run.devices}{started}"))
    return table


def processes_text(means: np.ndarray, slow: Mapping[int, str]) -> Text:
    """A bar for each process, of the share of a step that it spends for itself, and the slow ones in words. Many
    processes share a bar, which shows the largest."""
    walls = np.maximum(means[:, -1], 1e-9)
    shares = np.minimum(means[:, :-1].sum(axis=1) / walls, 1.0)
    pieces = np.array_split(shares, min(len(shares), MOST_BARS))
    text = Text("".join(BARS[round(float(piece.max()) * (len(BARS) - 1))] for piece in pieces), style="cyan")
    usual = median(means)
    for rank, part in [*slow.items()][:MOST_NAMED]:
        column = OWN_PARTS.index(part)
        spent, others = (decimal(float(secs[column]), 2) for secs in (means[rank], usual))
        text.append(f"; process {rank} is slow: {spent} s a step {SLOW_IN[part]}, median {others} s", style="yellow")
    return text if slow else text.append(" none is slow", style=SOFT)


def saved_text(saved: Saved, status: Status, copied: Container[int]) -> Text:
    """Steps on disk, steps being copied and written, and damaged ones."""
    if saved.error:
        return Text(saved.error, style=BAD)
    text = Text("none yet")
    if saved.valid:
        others = ", ".join(f"{step:,}" for step in saved.valid[:-1])
        text = Text(f"step {saved.valid[-1]:,}" + (f", before it {others}" if others else ""))
    if saved.unfinished:
        steps = ", ".join(f"{step:,}" for step in saved.unfinished)
        if status.over:
            text.append(f"; a save of step {steps} was not finished", style="yellow")
        elif all(step in copied for step in saved.unfinished):
            text.append(f"; step {steps} is copied, not yet on disk", style="cyan")
        else:
            text.append(f"; copying step {steps}", style="cyan")
    if saved.damaged:
        text.append(f"; damaged: {', '.join(f'{step:,}' for step in saved.damaged)}", style=BAD)
    return text


# ---- many runs as a table


class Cell(NamedTuple):
    """What a table shows of a run in a column, and the number or text by which it sorts; None is last."""

    text: str
    key: Any


def number_cell(value: float | None, text: Callable[[float], str], *, high_first: bool = False) -> Cell:
    """A number; empty if it is unknown."""
    return Cell("", None) if value is None else Cell(text(value), -value if high_first else value)


def cells(run: WatchedRun) -> dict[str, Cell]:
    """What a table shows of a run, by column. The largest step, speed and goodput come first, and the lowest loss."""
    metrics, speed, spent = run.metrics, run.speed, run.goodput
    losses = [metrics.losses[-1] if metrics.losses else None, metrics.eval_losses[-1] if metrics.eval_losses else None]
    train, held_out = (number_cell(loss, lambda x: decimal(x, 4)) for loss in losses)
    share = spent.share if spent is not None and spent.wall else None
    return {
        "name": Cell(run.name, run.name),
        "state": Cell(run.status.state, run.status.state),
        "step": number_cell(run.step, lambda step: f"{step:,}", high_first=True),
        "loss": train,
        "eval": held_out,
        "tokens/s": number_cell(speed.get("tokens_per_second"), lambda x: decimal(x, 0), high_first=True),
        "mfu": number_cell(speed.get("mfu"), percent, high_first=True),
        "goodput": number_cell(share, percent, high_first=True),
        "left": number_cell(run.left_secs, duration),
    }


RUN_COLUMNS = ("name", "state", "step", "loss", "eval", "tokens/s", "mfu", "goodput", "left")


def run_table(runs: Sequence[WatchedRun], column: str) -> Table:
    """The runs, sorted by a column; those without a value there come last."""
    heads = (Column(name, justify="left" if name in ("name", "state") else "right") for name in RUN_COLUMNS)
    table = Table(*heads, box=box.SIMPLE_HEAD, safe_box=True, pad_edge=False)
    rows = [cells(run) for run in runs]
    for row in sorted(rows, key=lambda row: (row[column].key is None, row[column].key or 0, row["name"].text)):
        style = STATE_STYLES.get(row["state"].text, BAD)
        table.add_row(*(Text(row[name].text, style=style if name == "state" else "") for name in RUN_COLUMNS))
    return table


def runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else those directly in it that are; itself again if there is none, which is
    refused."""
    config = RunFiles(folder).config
    below = files.folders_with(folder, config.name)
    return [folder] if config.is_file() or not below else below


# ---- the command

Draw = Callable[[Sequence[WatchedRun], Console], RenderableType]


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch; returns the exit status. User errors are one line on stderr."""
    return exit_status(lambda: watch(parse(arguments)), one_line=True)


def watch(flags: argparse.Namespace) -> None:
    """Draw the runs once, or until they have ended."""
    folders = [run for path in flags.workdir for run in (runs_in(path) if flags.table else [path])]
    runs = [WatchedRun(path) for path in folders]
    draw = (lambda runs, console: run_table(runs, flags.sort)) if flags.table else picture
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals without characters for curves
    console = Console(width=flags.width)
    if flags.once or not console.is_terminal:
        console.print(draw(runs, console))
    else:
        follow(runs, console, draw)
    if flags.svg is not None:
        write_svg(runs, console.width, flags.svg, draw)
    if flags.load is not None:
        write_load(runs, flags.load)


def follow(runs: Sequence[WatchedRun], console: Console, draw: Draw = picture) -> None:
    """Redraw on an alternate screen; the last picture stays on the terminal."""
    try:
        with Live(draw(runs, console), console=console, screen=True, auto_refresh=False) as live:
            while not all(run.status.over for run in runs):
                live.update(draw(runs, console), refresh=True)
                time.sleep(FRESH_SECS)
                refresh(runs)
    except KeyboardInterrupt:
        pass
    console.print(draw(runs, console))


def refresh(runs: Sequence[WatchedRun]) -> None:
    """Read new data of all runs; a store is asked about many at once."""
    with ThreadPool(min(len(runs), MOST_AT_ONCE)) as pool:
        pool.map(_refresh_if_reached, runs)


def _refresh_if_reached(run: WatchedRun) -> None:
    with contextlib.suppress(StoreError):  # shown is what was read last
        run.refresh()


def write_svg(runs: Sequence[WatchedRun], width: int, path: Path, draw: Draw = picture) -> None:
    """Write only the last picture."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(draw(runs, console))
    write_output("svg", path, console.export_svg(title="python -m parallax.watch", code_format=SVG))


def write_load(runs: Sequence[WatchedRun], path: Path) -> None:
    """Write the load of a run's experts as a picture; ConfigError unless there is one run, which has experts."""
    if len(runs) > 1:
        raise ConfigError(f"--load={path} draws one run, and {len(runs)} are named")
    rows = (row for line in files.lines_in(runs[0].files.metrics) if (row := row_of(line)) is not None)
    write_output("load", path, load_picture(rows))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse flags; ConfigError if they are wrong."""
    parser = Parser("python -m parallax.watch", description=__doc__)
    parser.add_argument("workdir", type=run_path, nargs="+", help="the folders of the runs")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--width", type=int, help="columns; default: those of the terminal")
    parser.add_argument("--svg", type=local_path, help="also write the picture to this file")
    parser.add_argument(
        "--table", action="store_true", help="a line for each run; a folder of runs stands for all in it"
    )
    parser.add_argument("--sort", help=f"the column by which --table sorts: {', '.join(RUN_COLUMNS)}; default: name")
    parser.add_argument("--load", type=local_path, help="also draw the load of a run's experts, as SVG in this file")
    flags = parser.parse_args(arguments)
    if flags.width is not None:
        check_whole("--width", flags.width, least=LEAST_WIDTH)
    if flags.sort is not None and not flags.table:
        raise ConfigError(f"--sort={flags.sort} sorts a table; add --table")
    flags.sort = flags.sort or RUN_COLUMNS[0]
    check_choice("--sort", flags.sort, RUN_COLUMNS)
    return flags


if __name__ == "__main__":
    sys.exit(main())
