"""metrics.jsonl, read as it grows."""

import math
import os
from pathlib import Path
from typing import Any

from parallax.runtime.files import plain
from parallax.runtime.run_files import number_of, row_of

KEPT = 200  # whole rows; of older ones only what is drawn
SPEEDS = ("step_secs", "tokens_per_second", "mfu", "data_wait_secs", "memory_bytes")
NUMBERS = {"train/loss", "eval/loss", "train/skipped_steps", *(f"perf/{name}" for name in SPEEDS)}


class Rows:
    """`steps` with their `losses`, `eval_steps` with their `eval_losses`, and the latest rows whole.

    A loss that is no number is None. A line counts when it ends; lines that are none are counted in `torn`, and what
    stands where a finite number or null would, in `odd`.
    """

    def __init__(self, path: Path):
        self._path = path
        self._forget()

    def read(self) -> None:
        """Read on; from the beginning if the file is another one, or shorter: a run that goes on cuts its own."""
        try:
            file = open(self._path, "rb", opener=plain)  # noqa: SIM115
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


def is_finite(value: Any) -> bool:
    """Whether a value of a line is a number that can be drawn."""
    number = number_of(value)
    return number is not None and math.isfinite(number)
