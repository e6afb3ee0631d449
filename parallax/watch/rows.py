"""metrics.jsonl, read as it grows."""

import os
from pathlib import Path
from typing import Any

from parallax.runfiles import row_of

KEPT = 200  # whole rows; of older ones only what is drawn


class Rows:
    """`steps` with their `losses`, `eval_steps` with their `eval_losses`, and the latest rows whole.

    A loss that was not finite is None. A line counts when it ends; lines that are none are counted in `torn`.
    """

    def __init__(self, path: Path):
        self._path = path
        self._forget()

    def read(self) -> None:
        """Read on; from the beginning if the file is another one, or shorter: a run that goes on cuts its own."""
        try:
            file = self._path.open("rb")
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
        self.torn = 0
        self._inode, self._offset = 0, 0

    def _add(self, row: dict[str, Any] | None) -> None:
        if row is None:
            self.torn += 1
            return
        self.steps.append(row["step"])
        loss = row.get("train/loss")
        self.losses.append(loss if isinstance(loss, int | float) else None)
        if isinstance(row.get("eval/loss"), int | float):
            self.eval_steps.append(row["step"])
            self.eval_losses.append(row["eval/loss"])
        self.recent.append(row)
        if len(self.recent) > 2 * KEPT:
            del self.recent[:-KEPT]
