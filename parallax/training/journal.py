"""Where a run speaks: the console, log.txt, metrics.jsonl and curves; from process 0 alone."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallax.runtime.errors import CheckpointError, tell, writing
from parallax.runtime.files import plain, write_whole
from parallax.runtime.multihost.job import is_first
from parallax.runtime.progress import make_room, speaker_on, speaking
from parallax.runtime.run_files import row_of
from parallax.training.curves import Curves
from parallax.training.folder import RunFolder

DATE, CLOCK = "%Y-%m-%d %Z", "%H:%M:%S"
WHEN_GONE = "it was removed or renamed while the run went on: put it back, and the same command goes on"
WHEN_FULL = "what is saved stays; make room, and the same command goes on from there"


class Lines:
    """A file that lines are added to; a disk that takes no more is a CheckpointError, and a folder that is gone too."""

    def __init__(self, path: Path):
        self._folder = path.parent
        with writing(self._folder, WHEN_FULL):
            self._file = open(path, "a", opener=plain)  # noqa: SIM115
            # As long as it is open, no other folder gets its number.
            self._opened = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, text: str) -> None:
        with writing(self._folder, WHEN_FULL):
            self._file.write(text)
        # What is written to a folder that was removed or renamed is lost, or elsewhere, and no write says so.
        try:
            there = os.path.samestat(self._folder.stat(), os.fstat(self._opened))
        except OSError as error:
            raise CheckpointError(f"{self._folder} cannot be looked at ({error.strerror}); {WHEN_GONE}") from error
        if not there:
            raise CheckpointError(f"{self._folder} is another folder than when the run began; {WHEN_GONE}")

    def flush(self) -> None:
        with writing(self._folder, WHEN_FULL):
            self._file.flush()

    def close(self) -> None:
        if not self.closed:
            os.close(self._opened)
            self._file.close()


class Journal:
    """Lines for people and numbers for programs. Use it as a context: while it is open it says what is waited for, too;
    leaving it closes its files."""

    def __init__(self, folder: RunFolder, curves: Sequence[Curves] = ()):
        self._speaks = is_first()
        self._metrics_path = folder.metrics
        self._log = Lines(folder.log) if self._speaks else None
        self._metrics: Any = None
        self._curves = curves
        self._waits: list[str] | None = []  # lines for log.txt, until there is more to say than what is waited for
        self._speaking = speaking(speaker_on(sys.stdout, self._keep_wait) if self._speaks else None)
        self._days: dict[str, str] = {}  # of the last line in the log and on the console

    def __enter__(self) -> "Journal":
        self._speaking.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        self._speaking.__exit__(None, None, None)
        if error is not None and self._metrics is not None:
            with contextlib.suppress(CheckpointError):
                self._keep(self._timed(f"{kind.__name__}: {error}"))
        for curves in self._curves:
            with contextlib.suppress(Exception):  # others' code: what it raises hides no error of the run
                curves.close(failed=error is not None)
        for file in (self._log, self._metrics):
            if file is not None:
                # Lines were flushed as they came: what is left is what an error has told of.
                with contextlib.suppress(OSError):
                    file.close()

    def say(self, text: str) -> None:
        """Keep in log.txt, and print while the console is there: the run does not end with it."""
        if self._speaks:
            make_room()
            waits, self._waits = self._waits or [], None
            now = time.localtime()
            try:
                self._keep("\n".join([*waits, self._timed(text, now)]))
            finally:
                tell(self._timed(text, now, "console"), sys.stdout)

    def say_besides(self, text: str) -> None:
        """Say, from any process, what went wrong while another error ends the run; a full disk does not replace it."""
        if not self._speaks:
            return tell(text, sys.stderr)
        with contextlib.suppress(CheckpointError):
            self.say(text)

    def say_last(self, text: str) -> None:
        """Keep in log.txt alone, from any thread, as why the run ends; a full disk does not keep it from ending."""
        if self._speaks and not self._log.closed:
            with contextlib.suppress(CheckpointError):
                self._keep(self._timed(text))

    def _keep_wait(self, text: str) -> None:
        """Keep a line on what is waited for; a run that is refused leaves an empty log, and so no folder."""
        if self._waits is not None:
            self._waits.append(self._timed(text))
        else:
            self.say_last(text)

    def _keep(self, text: str) -> None:
        self._log.write(text + "\n")  # in one piece: another thread may write, too
        self._log.flush()

    def _timed(self, text: str, now: time.struct_time | None = None, where: str = "log") -> str:
        """The text behind the time of day; the first of a day, in the log and on the console, stands below its date."""
        now = now or time.localtime()
        day, before = time.strftime(DATE, now), self._days.get(where)
        self._days[where] = day
        return ("" if day == before else f"{day}\n") + f"{time.strftime(CLOCK, now)} {text}"

    def begin(self, step: int) -> None:
        """Make ready for numbers after `step`: what an earlier run wrote beyond it will be computed again."""
        if self._speaks:
            with writing(self._metrics_path.parent, WHEN_FULL):
                drop_after(self._metrics_path, step)
            self._metrics = Lines(self._metrics_path)
            for curves in self._curves:
                with writing(self._metrics_path.parent, WHEN_FULL):
                    curves.begin(step, self.say)

    def record(self, step: int, values: dict[str, Any]) -> None:
        """A line of metrics.jsonl and a point of each curve; JSON has no NaN, a number that is not finite is null."""
        if self._speaks:
            self._metrics.write(json.dumps({"step": step, **{k: _written(v) for k, v in values.items()}}) + "\n")
            self._metrics.flush()
            for curves in self._curves:
                with writing(self._metrics_path.parent, WHEN_FULL):
                    curves.write(step, values)


def drop_after(path: Path, step: int) -> None:
    """Cut metrics.jsonl down to whole lines of steps up to `step`; a line that a kill has torn goes too."""
    if path.exists():
        kept = [line for line in _lines(path) if (row := row_of(line)) and row["step"] <= step]
        write_whole(path, "".join(line + "\n" for line in kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of metrics.jsonl; a torn last line is left out."""
    return [row for line in _lines(path) if (row := row_of(line)) is not None]


def _lines(path: Path) -> list[str]:
    with open(path, encoding="utf-8", errors="replace", opener=plain) as file:
        return file.read().splitlines()


def _written(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
