"""A run as its files show it: metrics so far, status and checkpoints."""

import math
import os
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from parallax.checkpoint.steps import check_steps, unfinished_saves
from parallax.runtime import files
from parallax.runtime.errors import CheckpointError, printable
from parallax.runtime.run_files import LARGEST_STEP, TIME, RunFiles, number_of, row_of

RECENT = 20  # steps that speeds are of
QUIET_SECS = 60.0  # what is over sooner is no standing still: an evaluation, a save
QUIET_STEPS = 10  # as train.stall_factor
LONGEST_LINE = 1000  # characters of a text to show
LONGEST_SECS = 1e9  # to wait for: what is longer is no estimate
KEPT = 200  # whole rows; of older ones only what is drawn
SPEEDS = ("step_secs", "tokens_per_second", "mfu", "data_wait_secs", "memory_bytes")
NUMBERS = {"train/loss", "eval/loss", "train/skipped_steps", *(f"perf/{name}" for name in SPEEDS)}
OWNER = re.compile(r"process (\d+) on (\S+) since")


class Status(NamedTuple):
    """`state` is "starting", "running", "stands still", "finished", "stopped", "failed" or "gone"; `why` says more."""

    state: str
    why: str = ""

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.state in ("finished", "stopped", "failed", "gone")


class Speed(NamedTuple):
    """Of the latest steps: seconds and tokens, and the shares of the devices' peak and of waiting for data."""

    step_secs: float
    tokens_per_second: float
    peak_share: float | None
    wait_share: float
    memory_bytes: float | None


class Saved(NamedTuple):
    """Steps: whole ones, oldest first; damaged ones; those whose save has begun and not ended. `error` says why none
    of them is known."""

    valid: list[int]
    damaged: list[int]
    unfinished: list[int]
    error: str = ""


class Metrics:
    """metrics.jsonl, read as it grows: `steps` with `losses`, `eval_steps` with `eval_losses`, and the latest rows.

    A loss that is no number is None. A line counts when it ends; lines that are none are counted in `torn`, and what
    stands where a finite number or null would, in `odd`.
    """

    def __init__(self, path: Path):
        self._path = path
        self._forget()

    def read(self) -> None:
        """Read on; from the beginning if the file is another one, or shorter: a run that goes on cuts its own."""
        try:
            file = files.open_file(self._path)
        except OSError:
            self._forget()
            return
        with file:
            about = os.fstat(file.fileno())
            if about.st_ino != self._inode or about.st_size < self._offset:
                self._forget()
                self._inode = about.st_ino
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.decode("utf-8", "replace").splitlines():
            self._add(row_of(line))

    def _forget(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float | None] = []
        self.eval_steps: list[int] = []
        self.eval_losses: list[float] = []
        self.recent: list[dict[str, Any]] = []
        self.torn = self.odd = 0
        self._inode, self._offset = 0, 0

    def _add(self, row: dict[str, Any] | None) -> None:
        if row is None:
            self.torn += 1
            return
        self.steps.append(row["step"])
        self.losses.append(number_of(row.get("train/loss")))
        held_out = number_of(row.get("eval/loss"))
        if held_out is not None:
            self.eval_steps.append(row["step"])
            self.eval_losses.append(held_out)
        values = (row[key] for key in row.keys() & NUMBERS if row[key] is not None)
        self.odd += sum(not is_finite(value) for value in values)
        self.recent.append(row)
        if len(self.recent) > 2 * KEPT:
            del self.recent[:-KEPT]


@dataclass
class WatchedRun:
    """A run, as its folder shows it; `refresh` reads what is new. Nothing is written, and nothing is locked.

    Raises:
        CheckpointError: the folder holds no run.
    """

    path: Path
    clock: Callable[[], float] = time.time
    metrics: Metrics = field(init=False)
    settings: dict[str, Any] = field(init=False, default_factory=dict)
    starts: list[dict[str, Any]] = field(init=False, default_factory=list)
    saved: Saved = field(init=False, default=Saved([], [], []))
    _looked: tuple = field(init=False, default=())

    def __post_init__(self):
        self.files = RunFiles(self.path)
        self.metrics = Metrics(self.files.metrics)
        self._check()
        self.refresh()

    def refresh(self) -> None:
        """Read what the run has written since."""
        self.metrics.read()
        self.settings = _json(self.files.config) or self.settings
        starts = _json(self.files.metadata).get("starts")
        self.starts = [one for one in starts if isinstance(one, dict)] if isinstance(starts, list) else self.starts
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
        """Steps that the run is to take, if its config is there yet."""
        train = self.settings.get("train")
        steps = train.get("steps") if isinstance(train, dict) else None
        return steps if type(steps) is int and 0 < steps < LARGEST_STEP else None

    @property
    def speed(self) -> Speed | None:
        """None before a step has been taken that did not compile."""
        recent = self.metrics.recent[-RECENT:]
        if len(self.metrics.recent) > 1:
            recent = [row for row in recent if row["step"] != self._first_step] or recent
        secs = [secs for secs in _numbers(recent, "perf/step_secs") if 0 < secs < LONGEST_SECS]
        if not secs:
            return None
        tokens, peak = (_median(recent, f"perf/{name}") for name in ("tokens_per_second", "mfu"))
        waited = sum(_numbers(recent, "perf/data_wait_secs"))
        return Speed(statistics.median(secs), tokens or 0.0, peak, waited / sum(secs), self._last("perf/memory_bytes"))

    @property
    def left_secs(self) -> float | None:
        """Seconds to the last step at the current speed, without evaluations and saves."""
        if self.steps is None or self.speed is None or self.status.over:
            return None
        left = max(self.steps - self.step, 0) * self.speed.step_secs
        return left if left < LONGEST_SECS else None

    @property
    def skipped(self) -> int:
        """Steps that the guard has skipped."""
        return int(self._last("train/skipped_steps") or 0)

    @property
    def quiet_secs(self) -> float:
        """Since the run has last written anything."""
        return max(self.clock() - self._last_sign(), 0.0)

    @property
    def status(self) -> Status:
        """Whether the run goes on, or how it has ended."""
        alive, ended = self._owner_is_alive(), self._started.get("ended")
        if isinstance(ended, dict) and not (alive and self._taken_again(ended)):
            return _ended(str(ended.get("reason")))
        if alive is False:
            return Status("gone", self.last_words() or "it has left no word in its log")
        quiet, secs = self.quiet_secs, self.speed.step_secs if self.speed else 0.0
        if quiet > max(QUIET_SECS, QUIET_STEPS * secs) and self.metrics.steps:
            return Status("stands still", f"nothing new for {quiet:.0f} s; a step takes {secs:.2f} s")
        return Status("running" if self.metrics.steps else "starting")

    def last_words(self) -> str:
        """The last line of the log that says anything."""
        try:
            with files.open_file(self.files.log) as log:
                log.seek(max(log.seek(0, os.SEEK_END) - 4096, 0))
                lines = log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return next((one_line(line.strip()) for line in reversed(lines) if line.strip()), "")

    @property
    def mesh(self) -> str:
        """Devices along each axis, of the latest start, as "pp=1 dp=8 tp=1"."""
        mesh = self._started.get("mesh")
        return one_line(" ".join(f"{axis}={size}" for axis, size in mesh.items())) if isinstance(mesh, dict) else ""

    @property
    def devices(self) -> str:
        """Of the latest start, as "8 x cpu"."""
        return one_line(str(self._started.get("devices", "")))

    @property
    def _started(self) -> dict[str, Any]:
        return self.starts[-1] if self.starts else {}

    @property
    def _first_step(self) -> int:
        """The first step of the latest start, which compiles."""
        start = self._started.get("start")
        return (start if type(start) is int and 0 <= start < LARGEST_STEP else 0) + 1

    def _last(self, key: str) -> float | None:
        return next(iter(_numbers(reversed(self.metrics.recent), key)), None)

    def _check(self) -> None:
        wanted = (self.files.config, self.files.metrics, self.files.log)
        if any(map(files.is_file, wanted)):
            return
        how = "it has none of" if files.is_folder(self.path) else "it does not exist; wanted are"
        below = [str(file.parent) for file in files.matching(f"*/{self.files.config.name}", self.path)]
        advice = f"; runs below it: {', '.join(below[:8])}" if below else "; name the --workdir of a run"
        names = ", ".join(file.name for file in wanted)
        raise CheckpointError(f"{str(self.path)!r} is not the folder of a run: {how} {names}{advice}")

    def _look_at_checkpoints(self) -> None:
        folder = self.files.checkpoints
        try:
            seen = tuple((name, files.modified_ns(folder / name)) for name in files.names_in(folder))
        except OSError:
            seen = ()
        if seen == self._looked:  # manifests are long: they are read again only when something has changed
            return
        try:
            checked = check_steps(folder)
            self.saved = Saved(
                sorted(checked.valid), sorted(checked.damaged), [step for step, _ in unfinished_saves(folder)]
            )
        except CheckpointError as error:
            self.saved = Saved([], [], [], one_line(str(error)))
        self._looked = seen

    def _last_sign(self) -> float:
        files = (self.files.metrics, self.files.log, self.files.metadata, self.files.lock, self.files.checkpoints)
        return max((_time_of(file) for file in files), default=0.0)

    def _owner_is_alive(self) -> bool | None:
        """Whether the process that holds the folder is there; None where that cannot be known from this machine."""
        try:
            with files.open_file(self.files.lock, "r", encoding="utf-8") as lock:
                owner = OWNER.match(lock.read(LONGEST_LINE))
        except (OSError, ValueError):
            return None
        if owner is None or owner[2] != socket.gethostname():
            return None
        try:
            os.kill(int(owner[1]), 0)
        except PermissionError:
            return True
        except (OSError, OverflowError):
            return False
        return True

    def _taken_again(self, ended: dict[str, Any]) -> bool:
        """Whether another start has taken the folder since its latest run ended."""
        try:
            then = datetime.strptime(str(ended.get("time")), TIME).timestamp()
        except (ValueError, OverflowError, OSError):
            return False
        return _time_of(self.files.lock) > then + 1


def _ended(reason: str) -> Status:
    return Status(reason) if reason in ("finished", "stopped") else Status("failed", one_line(reason))


def is_finite(value: Any) -> bool:
    """Whether a value of a line is a number that can be drawn."""
    number = number_of(value)
    return number is not None and math.isfinite(number)


def one_line(text: str) -> str:
    """Text from a file as one printable line of limited length."""
    return printable(text[:LONGEST_LINE], keep="")


def _numbers(rows: Iterable[dict[str, Any]], key: str) -> list[float]:
    """The finite values of a key."""
    return [number_of(row[key]) for row in rows if is_finite(row.get(key))]


def _median(rows: list[dict[str, Any]], key: str) -> float | None:
    values = _numbers(rows, key)
    return statistics.median(values) if values else None


def _time_of(file: Path) -> float:
    try:
        return files.modified_ns(file) / 1e9
    except OSError:
        return 0.0


def _json(file: Path) -> dict[str, Any]:
    """A file's JSON object, empty if there is none yet."""
    try:
        return files.read_object(file, odd_numbers=True)
    except (OSError, ValueError):
        return {}
