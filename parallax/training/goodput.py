"""Goodput: the share of a run's wall time, since it began and over all its starts, that went into steps that count."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parallax.display.units import duration, percent
from parallax.storage.run_files import (
    COMPILE_SECS,
    EVAL_SECS,
    GOODPUT,
    LARGEST_STEP,
    LAST_SAVE_SECS,
    SAVE_SECS,
    WRITTEN_AT,
    number_of,
)

IN_STEPS = "steps"  # the part that counts
PARTS_OF_START = ("start", "restore", "lost", "between starts")
PARTS_OF_ROWS = (IN_STEPS, "data", "compile", "evaluation", "save")
OTHER = "other"
STEP_SECS = "perf/step_secs"
KEYS_OF_ROWS = (STEP_SECS, "perf/data_wait_secs", COMPILE_SECS, EVAL_SECS, SAVE_SECS, LAST_SAVE_SECS)
LONGEST_PART_SECS = 1e10  # of a part; a file that says more is wrong


class Start(NamedTuple):
    """What is kept of a start: the step from which it went on, when it began and ended, and seconds by part."""

    step: int
    began: float
    ended: float
    secs: Mapping[str, float]
    lost_steps: int


@dataclass
class StepSeconds:
    """Seconds of lines of metrics.jsonl by part. Lines up to the step `since` are left out: another run's, or those of
    a version that did not keep its time."""

    since: int = 0
    secs: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS_OF_ROWS, 0.0))
    steps: int = 0
    latest: float = 0.0  # when the latest line was written

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a line."""
        if row["step"] <= self.since:
            return
        step, data, compiling, evaluation, save, last_save = (seconds(row.get(name)) for name in KEYS_OF_ROWS)
        data = min(data, step)
        compiling = min(compiling, step - data)
        parts = (step - data - compiling, data, compiling, evaluation, save + last_save)
        self.secs = {part: self.secs[part] + secs for part, secs in zip(PARTS_OF_ROWS, parts)}
        self.steps += STEP_SECS in row
        self.latest = max(self.latest, seconds(row.get(WRITTEN_AT)))


def seconds(value: Any) -> float:
    """A number of seconds from a file; 0 for anything else.

    >>> seconds(1.5), seconds("1.5"), seconds(-1), seconds(float("nan")), seconds(None)
    (1.5, 0.0, 0.0, 0.0, 0.0)
    """
    number = number_of(value)
    return number if number is not None and 0 <= number < LONGEST_PART_SECS else 0.0


def starts_of(listed: Any) -> list[Start]:
    """The starts of metadata.json whose time is known: the latest ones, up to the first that lacks it."""
    starts: list[Start] = []
    for entry in reversed(listed if isinstance(listed, list) else []):
        kept = entry.get(GOODPUT) if isinstance(entry, dict) else None
        if not isinstance(kept, dict) or not seconds(kept.get("began")):
            break
        step, lost = entry.get("start"), kept.get("lost_steps")
        starts.insert(
            0,
            Start(
                step=step if type(step) is int and 0 <= step < LARGEST_STEP else 0,
                began=seconds(kept["began"]),
                ended=seconds(kept.get("ended")),
                secs={part: seconds(kept.get(part)) for part in PARTS_OF_START},
                lost_steps=lost if type(lost) is int and 0 <= lost < LARGEST_STEP else 0,
            ),
        )
    return starts


def last_sign(starts: Sequence[Start], latest: float) -> float:
    """When the run last gave a sign of life: by its end, its latest line, or its latest start."""
    if not starts:
        return latest
    last = starts[-1]
    return max(last.ended, latest, last.began + last.secs["start"] + last.secs["restore"])


class Goodput(NamedTuple):
    """Seconds of a run's wall time by part, which add up to it, and the number of steps that ran again."""

    secs: dict[str, float]
    lost_steps: int

    @property
    def wall(self) -> float:
        """Seconds since the run began."""
        return sum(self.secs.values())

    @property
    def share(self) -> float:
        """The share of steps that count."""
        return self.secs[IN_STEPS] / self.wall if self.wall else math.nan

    def text(self) -> str:
        """The share, and all parts of at least a second.

        >>> Goodput({"steps": 80.0, "lost": 15.0, "save": 0.2, "other": 4.8}, 3).text()
        '80.0 % of 1m40s: steps 1m20s, lost 15s (3 steps), other 5s'
        """
        parts = [
            f"{part} {duration(secs)}" + (f" ({self.lost_steps:,} steps)" if part == "lost" else "")
            for part, secs in self.secs.items()
            if secs >= 1
        ]
        return f"{percent(self.share)} of {duration(self.wall)}: {', '.join(parts)}" if self.wall else "unknown"


def goodput(starts: Sequence[Start], rows: StepSeconds, until: float) -> Goodput | None:
    """The parts of the wall time from the first known start until `until`; None without a known start.

    What no part has is "other". If clocks went back, so that parts are longer than the time between, they count.
    """
    if not starts:
        return None
    of_starts = {part: sum(start.secs[part] for start in starts) for part in PARTS_OF_START}
    secs = rows.secs | of_starts
    secs[OTHER] = max(until - starts[0].began - sum(secs.values()), 0.0)
    return Goodput(secs, sum(start.lost_steps for start in starts))


def before_first_step(
    earlier: Sequence[Start],
    began: float,
    start_secs: float,
    restore_secs: float,
    kept: StepSeconds,
    dropped: StepSeconds,
) -> dict[str, float]:
    """What a start keeps in metadata.json: its own seconds before the first step; those since the last sign of life of
    the start before it; and those of the steps that it runs again, with their saves, evaluations and compilation."""
    secs = {"start": start_secs, "restore": restore_secs}
    if not earlier:
        return secs
    between = max(began - last_sign(earlier, max(kept.latest, dropped.latest)), 0.0)
    return secs | {"between starts": between, "lost": sum(dropped.secs.values()), "lost_steps": dropped.steps}
