"""Jobs of several real processes on this machine, for the tests: started, watched line by line, and always ended."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

from support.run_examples import as_flags, tiny_config

ROOT = pathlib.Path(__file__).parents[2]
FAULTY = str(ROOT / "tests" / "faulty_train.py")
LONGEST_SECS = 240


def flags_of(corpus: pathlib.Path, **changes) -> list[str]:
    """The tiny run as a command line."""
    config = tiny_config(corpus)
    sections = {name: dict(config[name]) for name in ("model", "data", "train", "optimizer", "checkpoint", "sample")}
    own = {f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()}
    return [f"--config={ROOT / 'configs' / 'tiny_gqa.py'}", *as_flags(own | changes)]


class Started:
    """A program whose output is read as it comes; use it as a context, which leaves no process behind."""

    def __init__(self, *command: str, environment: dict[str, str] | None = None):
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-u", *command],
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._process.stdout as lines:
            self.lines.extend(lines)

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_) -> None:
        if self._process.poll() is None:
            # The launcher's children die with it.
            self._process.kill()
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def pids(self) -> dict[int, int]:
        """Process by rank, as the launcher says."""
        found = re.findall(r"\[launch\] process (\d+) is pid (\d+)", self.text)
        return {int(rank): int(pid) for rank, pid in found}

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_for(self, word: str) -> None:
        """Until a line with this word has come."""
        deadline = time.monotonic() + LONGEST_SECS
        while word not in self.text:
            assert self._process.poll() is None or word in self.text, f"ended without {word!r}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {word!r} in time:\n{self.text}"
            time.sleep(0.02)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Status and output, once it has ended."""
        status = self._process.wait(timeout=LONGEST_SECS)
        self._reader.join(timeout=10)
        return status, self.text


def launched(*command: str, processes: int = 2, devices: int = 4, options: tuple[str, ...] = ()) -> Started:
    """`python -m parallax.launch` with so many processes."""
    sizes = ["--processes", str(processes), "--devices-per-process", str(devices)]
    return Started("-m", "parallax.launch", *sizes, *options, "--", *command)
