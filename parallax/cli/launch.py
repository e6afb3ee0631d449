"""Start the processes of a job on this machine, and end them together.

    python -m parallax.launch --processes 4 --devices-per-process 2 -- train.py --config=configs/quickstart.py
    python -m parallax.launch --processes 8 --gpus-per-process 1 -- train.py --config=configs/gpu_80gb_x8.py

What follows -- is a Python file, or -m and a module, with its arguments. Each line of output begins with the number of
its process. SIGTERM, Ctrl-C and SIGHUP go on to all processes. When one ends, the others have --grace-secs to follow;
the exit status is that of the first that failed by itself: 75, with which the others follow it, comes last.
"""

import argparse
import contextlib
import ctypes
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from parallax.cli.arguments import Parser
from parallax.config.reference import CONFIGS
from parallax.runtime.errors import EXIT_RESTART, ConfigError, exit_status, tell
from parallax.runtime.multihost.address import FLAGS, TOKEN

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TICK_SECS = 0.05
KILL_SECS = 5.0  # between SIGTERM and SIGKILL
LAST_LINES_SECS = 2.0  # for what the ended have left in their pipes, which others may hold open
READ_BYTES = 1 << 16
SIGNALLED = 128  # shells add it to the number of the signal that ended a process
# XLA's CPU collectives count their connections aloud, in each group of devices, and from several threads into one line.
NOISE = re.compile(rb"\[Gloo\] Rank|connected peer ranks is")
FOLLOWING = (EXIT_RESTART, -signal.SIGABRT)  # how a process ends because another has: by us, or by JAX
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the result is the exit status, 2 for what a user got wrong."""
    return exit_status(lambda: run(_parser().parse_args(arguments)), one_line=True)


def run(parsed: argparse.Namespace) -> int:
    """Start all processes, and wait for them; returns the status of the first that failed by itself, 0 if none has."""
    command = python_command(parsed.command)
    parsed.port = parsed.port or _free_port()
    environments = [environment_of(parsed, rank) for rank in range(parsed.processes)]
    with Job(command, environments) as job:
        return job.wait(parsed.grace_secs)


def python_command(command: Sequence[str]) -> list[str]:
    """The command to start, with unbuffered output."""
    command = list(command[1:] if command[:1] == ["--"] else command)
    if not command:
        raise ConfigError("nothing to start; write it last, as in `-- train.py --config=configs/quickstart.py`")
    if command[0] == "-m" and len(command) > 1:
        return [sys.executable, "-u", *command]
    if not command[0].endswith(".py") or not Path(command[0]).is_file():
        ours = CONFIGS.parent / command[0]  # written as it would be right in the repository's folder
        if ours.suffix == ".py" and ours.is_file():
            raise ConfigError(f"{command[0]!r} does not exist in {Path.cwd()}; did you mean {str(ours)!r}?")
        raise ConfigError(f"{command[0]!r} is no Python file; write one, or -m and a module, after --")
    return [sys.executable, "-u", *command]


def environment_of(parsed: argparse.Namespace, rank: int) -> dict[str, str]:
    """The environment of one process: where it meets the others, and which devices are its own."""
    place = (f"127.0.0.1:{parsed.port}", str(parsed.processes), str(rank))
    own = {variable: value for (variable, _), value in zip(FLAGS.values(), place)} | {TOKEN: parsed.token}
    if parsed.devices_per_process:
        own |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(parsed.devices_per_process)}
    if parsed.gpus_per_process:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of(parsed, rank))
    return {**os.environ, **own}


def gpus_of(parsed: argparse.Namespace, rank: int) -> list[str]:
    """The GPUs of one process: of those that CUDA_VISIBLE_DEVICES leaves us, where it is set."""
    each, needed = parsed.gpus_per_process, parsed.processes * parsed.gpus_per_process
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    ours = list(map(str, range(needed))) if visible is None else [gpu for gpu in visible.split(",") if gpu]
    if len(ours) < needed:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={visible!r} names {len(ours)} GPUs, and --processes {parsed.processes} with "
            f"--gpus-per-process {each} needs {needed}; name more of them, or start fewer processes"
        )
    return ours[rank * each : (rank + 1) * each]


class Job:
    """Processes of one command; a context that leaves none of them behind."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]):
        self._output = selectors.DefaultSelector()
        self._lines: dict[BinaryIO, bytes] = {}
        self._processes: list[subprocess.Popen] = []
        self._ended: dict[int, int] = {}  # status by rank, in the order in which they ended
        self._made_to_end: set[int] = set()
        self._command, self._environments = command, environments

    def __enter__(self) -> "Job":
        # What is ignored, as SIGHUP is under nohup, the processes ignore too.
        heard = set(FORWARDED)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            heard.remove(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._forward) for number in heard}
        for rank, environment in enumerate(self._environments):
            self._processes.append(self._start(rank, environment))
        return self

    def __exit__(self, *_) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, grace_secs: float) -> int:
        """Show output until all have ended; from the first end on, the others have `grace_secs`."""
        deadline = float("inf")
        while len(self._ended) < len(self._processes):
            self._show(TICK_SECS)
            self._look_for_ended()
            if self._ended and deadline == float("inf"):
                deadline = time.monotonic() + grace_secs
            if time.monotonic() > deadline:
                deadline = self._end_the_rest()
        deadline = time.monotonic() + LAST_LINES_SECS
        while self._lines and time.monotonic() < deadline:
            self._show(TICK_SECS)
        return self._status()

    def _start(self, rank: int, environment: Mapping[str, str]) -> subprocess.Popen:
        # In a session of its own: Ctrl-C reaches it through us alone, once.
        process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            os.set_blocking(pipe.fileno(), False)
            self._lines[pipe] = b""
            self._output.register(pipe, selectors.EVENT_READ, (rank, stream))
        _say(f"process {rank} is pid {process.pid}")
        return process

    def _forward(self, number: int, _frame: object) -> None:
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _look_for_ended(self) -> None:
        """Note who has ended since the last look."""
        for rank, process in enumerate(self._processes):
            if rank not in self._ended and process.poll() is not None:
                self._ended[rank] = process.returncode
                if process.returncode:
                    _say(f"process {rank} ended with {_in_words(process.returncode)}")

    def _end_the_rest(self) -> float:
        """Ask those that are left to end, then make them; returns when to come back."""
        number = signal.SIGKILL if self._made_to_end else signal.SIGTERM
        left = [rank for rank in range(len(self._processes)) if rank not in self._ended]
        _say(f"ending process {', '.join(map(str, left))} by {number.name}")
        self._made_to_end.update(left)
        for rank in left:
            self._processes[rank].send_signal(number)
        return time.monotonic() + KILL_SECS

    def _status(self) -> int:
        """Of the first that failed by itself: who followed it comes after it, and who was made to end comes last."""
        failed = [rank for rank, code in self._ended.items() if code]
        failed.sort(key=lambda rank: (rank in self._made_to_end, self._ended[rank] in FOLLOWING))
        code = self._ended[failed[0]] if failed else 0
        return code if code >= 0 else SIGNALLED - code

    def _show(self, secs: float) -> None:
        for key, _ in self._output.select(secs):
            rank, stream = key.data
            read = os.read(key.fileobj.fileno(), READ_BYTES)
            *lines, rest = (self._lines[key.fileobj] + read).split(b"\n")
            self._lines[key.fileobj] = rest
            if not read:
                lines += [rest] if rest else []
                self._output.unregister(key.fileobj)
                del self._lines[key.fileobj]
            for line in lines:
                if NOISE.search(line):
                    continue
                tell(f"[{rank}] {line.decode(errors='replace')}", stream)


def _in_words(code: int) -> str:
    return f"status {code}" if code > 0 else signal.Signals(-code).name


def _say(text: str) -> None:
    tell(f"[launch] {text}", sys.stderr)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _positive(text: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,4}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 99999")
    return int(text)


def _port(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; use a number from 1 to 65535")
    return int(text)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m parallax.launch", description=__doc__)
    add = parser.add_argument
    add("--processes", type=_positive, required=True, metavar="N", help="processes to start")
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument("--devices-per-process", type=_positive, metavar="N", help="CPU devices that each simulates")
    devices.add_argument("--gpus-per-process", type=_positive, metavar="N", help="GPUs that each has for itself")
    add("--port", type=_port, default=None, help="where the processes meet on 127.0.0.1 (default: one that is free)")
    add("--grace-secs", type=_positive, default=60, metavar="S", help="for the others when one has ended (%(default)s)")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="a Python file, or -m and a module")
    parser.set_defaults(token=secrets.token_hex(16))
    return parser


if __name__ == "__main__":
    sys.exit(main())
