"""A run's folder: its name, its lock, config.json and metadata.json."""

import contextlib
import errno
import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from parallax.config.settings import Settings
from parallax.display.progress import waiting
from parallax.errors import CheckpointError, ConfigError, writing
from parallax.processes.job import is_first
from parallax.storage import files
from parallax.storage.run_files import GOODPUT, TIME, RunFiles
from parallax.version import VERSION, versions

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunFolder(RunFiles):
    """A run's folder, for the run that writes it."""

    _lock: Any = None
    _started = False  # whether this run is the latest of the starts in metadata.json

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and lock it against other runs; the lock ends with the process."""
        if not is_first():
            # One process of a job holds the lock for all.
            yield
            return
        with writing(self.path):
            before = {*files.names_in(self.path)} if self.path.exists() else None
            files.make_folder(self.path)
            lock = files.run_lock(self.lock)
        with lock:
            with writing(self.path), waiting("waiting for the lock of the run"):
                _take(lock, self.path)
            self._lock = lock
            try:
                files.PlainPath(self.path)  # refused now, not at the first save
                yield
            finally:
                self._remove_if_bare(before)

    def check_locked(self) -> None:
        """CheckpointError if another run has taken the lock since; only a lease can be lost."""
        if self._lock is not None:
            self._lock.check()

    def _remove_if_bare(self, before: set[str] | None) -> None:
        """Remove new files of the folder if the run was refused before it logged anything; `before` are the old
        ones."""
        with contextlib.suppress(OSError):  # another process may have removed the folder already
            names = {*files.names_in(self.path)} - (before or set())
            if names <= {self.lock.name, self.log.name} and not has_content(self.log):
                for name in names:
                    files.remove(self.path / name)
                if before is None:
                    self.path.rmdir()

    def write_config(self, settings: Settings) -> None:
        """Write the config as JSON, for resuming and generating."""
        _replace(self.config, settings.to_dict())

    def write_metadata(self, *, began: float, **about: Any) -> None:
        """Record where, when and with which versions the run was started; the latest start comes last. `began` is when
        its process did, in seconds since 1970."""
        if not is_first():
            return
        starts = self.starts()
        start = {
            "time": time.strftime(TIME),
            "host": socket.gethostname(),
            "command": sys.argv,
            "python": platform.python_version(),
            "versions": {"parallax": VERSION, **versions()},
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            **about,
            GOODPUT: {"began": began},
        }
        _replace(self.metadata, {"run_name": self.path.name, "starts": [*starts, start]})
        self._started = True

    def write_end(self, reason: str) -> None:
        """Record how the run ended, in the entry of its latest start."""
        # The run may end because the disk is full: then that error is reported, not this one.
        with contextlib.suppress(OSError, CheckpointError):
            self.check_locked()
            self._add_to_start({"ended": time.time()}, ended={"time": time.strftime(TIME), "reason": reason})

    def write_goodput(self, secs: Mapping[str, float]) -> None:
        """Record what the latest start has spent before its first step."""
        self._add_to_start(secs)

    def _add_to_start(self, secs: Mapping[str, float], **about: Any) -> None:
        if self._started and (starts := self.starts()):
            spent = starts[-1].get(GOODPUT)
            spent = (spent if isinstance(spent, dict) else {}) | {part: round(x, 3) for part, x in secs.items()}
            starts[-1] = {**starts[-1], **about, GOODPUT: spent}
            _replace(self.metadata, {"run_name": self.path.name, "starts": starts})

    def starts(self) -> list[Any]:
        """The starts so far; empty if the file cannot be read."""
        starts = files.object_if_readable(self.metadata).get("starts")
        return starts if isinstance(starts, list) else []


def check_run_name(name: str) -> str:
    """Return a valid run name; ConfigError if it could not be a folder's name on every system.

    >>> check_run_name("quickstart-20260102-030405")
    'quickstart-20260102-030405'
    """
    if not RUN_NAME.fullmatch(name):
        raise ConfigError(
            f"--run-name={name!r} is not a valid name of a run; use 1 to 100 letters, digits, '.', '_' or '-', "
            "a letter or digit first"
        )
    return name


def _take(lock: Any, folder: Path) -> None:
    owner = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    try:
        lock.take(owner)
    except BlockingIOError as error:
        raise CheckpointError(
            f"another run is training in {folder} ({error.strerror}); stop it or choose another --workdir"
        ) from None
    except OSError as error:
        if error.errno == errno.ENOSPC or not files.is_local(folder):
            raise
        raise CheckpointError(
            f"cannot lock {folder / 'lock'} ({os.strerror(error.errno)}); mount its file system with locks, as NFS and "
            "Lustre can, or choose another --workdir"
        ) from error


def has_content(path: Path) -> bool:
    """Whether a file is there and not empty; a store that tells no sizes keeps nothing empty."""
    return path.exists() and files.size_of(path) != 0


def _replace(path: Path, content: Any) -> None:
    if is_first():
        files.write_whole(path, json.dumps(content, indent=2) + "\n")
