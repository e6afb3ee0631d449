"""Logging of a run: console, log.txt, metrics.jsonl, TensorBoard, Weights & Biases; in process 0 only."""

import contextlib
import json
import math
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from parallax.config.settings import Settings
from parallax.display.progress import clear_progress, printing_progress, progress_printer
from parallax.errors import CheckpointError, first_line, imported, tell, writing
from parallax.processes.job import is_first
from parallax.storage import files
from parallax.storage.run_files import ON_DISK, WRITTEN_AT, RunFiles, row_of
from parallax.training.goodput import StepSeconds

DATE, CLOCK = "%Y-%m-%d %Z", "%H:%M:%S"
EVENTS_SECS = 60  # between the files of TensorBoard that are sent to a bucket
WANDB_SECS = 60  # timeout of the service at the start and at the end of a run


class RunLogger:
    """Log lines for people and metrics for programs. Use it as a context: while it is open, it also prints what the run
    waits for; leaving it closes its files."""

    def __init__(self, folder: RunFiles, writers: Sequence["TensorBoard | Wandb"] = ()):
        self._speaks = is_first()
        self._metrics_path = folder.metrics
        for log in (folder.log, folder.metrics) if self._speaks else ():
            with writing(folder.path, files.WHEN_FULL):
                files.make_one_file(log)
        self._log = files.append_file(folder.log) if self._speaks else None
        self._metrics: Any = None
        self._writers, self._begun = writers, ()
        self._waits: list[str] | None = []  # progress lines, held back from log.txt until the first other line
        self._speaking = printing_progress(progress_printer(sys.stdout, self._keep_wait) if self._speaks else None)
        self.spent = StepSeconds()  # of the lines of metrics.jsonl
        self._days: dict[str, str] = {}  # day of the last line in the log and on the console

    def __enter__(self) -> "RunLogger":
        self._speaking.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        self._speaking.__exit__(None, None, None)
        if error is not None and self._metrics is not None:
            with contextlib.suppress(CheckpointError):
                self._keep(self._timed(f"{kind.__name__}: {error}"))
        for writer in self._writers:
            with contextlib.suppress(Exception):  # third-party code: its errors must not hide those of the run
                writer.close(failed=error is not None)
        for file in (self._log, self._metrics):
            if file is not None:
                # Lines were flushed before; if anything is left, its error was reported already.
                with contextlib.suppress(OSError, CheckpointError):
                    file.close()

    def say(self, text: str) -> None:
        """Print a line and write it to log.txt; a closed console does not end the run."""
        if self._speaks:
            clear_progress()
            waits, self._waits = self._waits or [], None
            now = time.localtime()
            try:
                self._keep("\n".join([*waits, self._timed(text, now)]))
            finally:
                tell(self._timed(text, now, "console"), sys.stdout)

    def say_besides(self, text: str) -> None:
        """Report, from any process, a second error while the first one ends the run; a full disk is ignored."""
        if not self._speaks:
            return tell(text, sys.stderr)
        with contextlib.suppress(CheckpointError):
            self.say(text)

    def say_last(self, text: str) -> None:
        """Write to log.txt only, from any thread, why the run ends; a full disk is ignored."""
        if self._speaks and not self._log.closed:
            with contextlib.suppress(CheckpointError):
                self._keep(self._timed(text))

    def flush(self) -> None:
        """Return when all lines so far are stored; a checkpoint that counts has its metrics."""
        for file in (self._log, self._metrics, *self._begun):
            if file is not None:
                file.flush()

    def _keep_wait(self, text: str) -> None:
        """Log a progress message, but not before the first other line: a refused run leaves an empty log."""
        if self._waits is not None:
            self._waits.append(self._timed(text))
        else:
            self.say_last(text)

    def _keep(self, text: str) -> None:
        self._log.write(text + "\n")  # in one call, since another thread may write, too

    def _timed(self, text: str, now: time.struct_time | None = None, where: str = "log") -> str:
        """The text with the time of day before it; the date is on a line above the first line of each day."""
        now = now or time.localtime()
        day, before = time.strftime(DATE, now), self._days.get(where)
        self._days[where] = day
        return ("" if day == before else f"{day}\n") + f"{time.strftime(CLOCK, now)} {text}"

    def begin(self, step: int, source: Path | None = None, *, since: int = 0) -> StepSeconds:
        """Prepare for metrics after `step`: later ones of an earlier start are dropped and will be recomputed. With
        `source`, the metrics.jsonl of the run from which this one goes on, those up to `step` are that run's. Returns
        the seconds of the dropped lines; `spent` has those of the lines after the step `since` that are kept."""
        self.spent, dropped = StepSeconds(since), StepSeconds(since)
        if self._speaks:
            with writing(self._metrics_path.parent, files.WHEN_FULL):
                drop_after(
                    self._metrics_path,
                    step,
                    source,
                    note=lambda row: (self.spent if row["step"] <= step else dropped).add(row),
                )
                self._metrics = files.append_file(self._metrics_path)
                for writer in self._writers:
                    writer.begin(step, self.say)
                self._begun = self._writers
        return dropped

    def on_disk(self, step: int, secs: float, *, limit_secs: float = 0.0) -> None:
        """Print and record that a step's checkpoint is on disk, `secs` after its save began, and whether that is longer
        than checkpoint.deadline_secs, if there is one."""
        late = f", {secs:.1f} s after its save began: checkpoint.deadline_secs={limit_secs} is too short for that"
        self.say(f"step {step} is on disk{late if 0 < limit_secs < secs else ''}")
        self.record(step, {ON_DISK: secs})

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl, and a step of each writer. Non-finite numbers are null, since JSON has no
        NaN."""
        if self._speaks:
            about = {"step": step, WRITTEN_AT: round(time.time(), 3)}
            row = about | {name: _as_json(value) for name, value in values.items()}
            self._metrics.write(json.dumps(row) + "\n")
            self.spent.add(row)
            for writer in self._writers:
                with writing(self._metrics_path.parent, files.WHEN_FULL):
                    writer.write(step, values)


def drop_after(
    path: Path, step: int, source: Path | None = None, note: Callable[[dict[str, Any]], None] = lambda row: None
) -> None:
    """Drop the lines of metrics.jsonl after `step`, and incomplete ones; with `source` they become the lines of that
    file, if it is there. `note` is called with each complete line that was there before."""

    def kept(lines_of: Path, note: Callable[[dict[str, Any]], None]) -> Iterator[bytes]:
        for line in files.lines_in(lines_of):
            if row := row_of(line):
                note(row)
                if row["step"] <= step:
                    yield line + b"\n"

    if source and source.exists():
        for row in filter(None, map(row_of, files.lines_in(path) if path.exists() else ())):
            note(row)
        files.replace_log(path, kept(source, lambda row: None))
    elif path.exists():
        files.replace_log(path, kept(path, note))


def _as_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def metrics_writers(settings: Settings, folder: RunFiles) -> list["TensorBoard | Wandb"]:
    """The writers of the settings, in process 0; ConfigError if a package is missing."""
    train, writers = settings.train, []
    if train.tensorboard and is_first():
        writers.append(TensorBoard(folder))
    if train.wandb and is_first():
        writers.append(Wandb(train.wandb, folder, settings.to_dict()))
    return writers


class TensorBoard:
    """TensorBoard events in the run's folder; events after the resumed step are purged. In a bucket they are files of
    EVENTS_SECS, which TensorBoard reads as one."""

    def __init__(self, folder: RunFiles):
        self._package = imported("tensorboardX", "train.tensorboard=True", "tensorboard")
        self._folder, self._file = folder.tensorboard, None
        self._unsent: list[EventFile] = []
        self._writing, self._sending, self._ended = threading.Lock(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._send_often, name="tensorboard", daemon=True)

    def begin(self, step: int, say: Callable[[str], None]) -> None:
        """Prepare for metrics after `step`; `say` reports errors that do not end the run."""
        self._file = EventFile(self._package, self._folder, purge_step=step + 1)
        if not files.is_local(self._folder):
            self._thread.start()

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write a step's metrics and texts."""
        with self._writing:
            self._file.write(step, values)

    def flush(self) -> None:
        """Return when what was written is stored, in a bucket; on a disk, the library writes now and then."""
        if files.is_local(self._folder):
            return
        with self._sending:
            with self._writing:
                self._unsent.append(self._file)
                self._file = EventFile(self._package, self._folder)
            while self._unsent:
                self._unsent[0].close()
                self._unsent.pop(0)

    def close(self, *, failed: bool) -> None:
        if self._file is not None:
            self._ended.set()
            if self._thread.is_alive():
                self._thread.join()
            try:
                self.flush()
            finally:  # left open, an empty file would be closed when Python ends, which 3.12 says it cannot
                self._file.close()

    def _send_often(self) -> None:
        while not self._ended.wait(EVENTS_SECS):
            with contextlib.suppress(OSError):  # the next save tries again, and says so
                self.flush()


class EventFile:
    """A file of TensorBoard's events in a folder, where it is when it is closed; without events it is not written."""

    def __init__(self, package: Any, folder: Path, purge_step: int | None = None):
        self._here, self._has_events = files.FolderHere(folder), purge_step is not None
        # TensorBoard reads files in the order of their names, which have the second.
        options = {} if files.is_local(folder) else {"filename_suffix": f".{time.time_ns()}"}
        self._events = package.SummaryWriter(str(self._here.path), purge_step=purge_step, **options)

    def write(self, step: int, values: dict[str, Any]) -> None:
        self._has_events = True
        for name, value in values.items():
            if isinstance(value, int | float):
                self._events.add_scalar(name, value, step)
            if isinstance(value, str):
                self._events.add_text(name, value, step)

    def close(self) -> None:
        """May be called again after an OSError."""
        self._events.close()
        if self._has_events:
            self._here.store()
        else:
            self._here.remove()


class Wandb:
    """A run of Weights & Biases; a resumed run continues it. If the service fails, the run continues without it.

    Steps are those of the run: metrics that are recomputed after a resume appear at their own step.
    """

    def __init__(self, project: str, folder: RunFiles, settings: dict[str, Any]):
        self._wandb = imported("wandb", f"train.wandb={project!r}, which may be left empty,", "wandb")
        self._project, self._folder, self._settings = project, folder, settings
        self._run: Any = None
        self._say: Callable[[str], None] = print

    def begin(self, step: int, say: Callable[[str], None]) -> None:
        self._say = say
        run_id = self._own_id()
        with self._going_on_without():
            self._run = self._wandb.init(
                project=self._project,
                id=run_id,
                name=self._folder.path.resolve().name,
                dir=str(self._here()),
                config=self._settings,
                resume="allow",
                # Console capture is off: signals and closed pipes are handled by the run.
                settings=self._wandb.Settings(console="off", init_timeout=WANDB_SECS),
            )
            self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, Any]) -> None:
        if self._run is not None:
            with self._going_on_without():
                self._run.log({"step": step, **{k: v for k, v in values.items() if isinstance(v, int | float | str)}})

    def flush(self) -> None:
        """The library sends what was written by itself."""

    def close(self, *, failed: bool) -> None:
        if self._run is None:
            return

        def finish() -> None:
            with self._going_on_without():
                self._run.finish(exit_code=int(failed))

        ending = threading.Thread(target=finish, name="wandb", daemon=True)
        ending.start()
        ending.join(WANDB_SECS)
        if ending.is_alive():
            self._say(f"wandb has not received all metrics within {WANDB_SECS} s; the run ends without waiting longer")

    def _here(self) -> Path:
        """Where the library keeps its files: in the run's folder or, if that is elsewhere, in this machine's cache."""
        if files.is_local(self._folder.path):
            return self._folder.path
        files.make_folder(files.cache_folder() / "wandb")
        return files.cache_folder() / "wandb"

    def _own_id(self) -> str:
        """The id of the project's run in this folder; a new one if there is none yet."""
        file = self._folder.wandb
        known = files.object_if_readable(file)
        if known.get("project") != self._project or not isinstance(known.get("id"), str):
            known = {"project": self._project, "id": uuid.uuid4().hex[:12]}
            with writing(self._folder.path):
                files.write_whole(file, json.dumps(known) + "\n")
        return known["id"]

    @contextlib.contextmanager
    def _going_on_without(self) -> Any:
        try:
            yield
        except Exception as error:
            self._run = None
            self._say(f"wandb failed, the run goes on without it: {first_line(error)}")
