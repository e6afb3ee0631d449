"""Start the processes of a job on this machine, and end them together.

    python -m parallax.launch --processes 4 --devices-per-process 2 -- train.py --config=configs/quickstart.py
    python -m parallax.launch --processes 8 --gpus-per-process 1 -- train.py --config=configs/gpu_80gb_x8.py

After -- comes a Python file, or -m and a module, with its arguments. Each line of output begins with the number of its
process. SIGTERM, Ctrl-C and SIGHUP are forwarded to all processes. When one ends, the others have --grace-secs to
follow. The exit status is that of the first process that failed by itself; 75, the status of those that follow, has the
lowest priority.
"""

import argparse
import contextlib
import ctypes
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

from parallax.cli.arguments import Parser, positive
from parallax.errors import EXIT_RESTART, ConfigError, exit_status, tell
from parallax.processes.address import ADDRESS_FLAGS, TOKEN

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_SECS = 0.05
NCCL_SECS = 7500  # longer than distributed.compile_secs, as in launch/slurm.sh: then the run ends itself first
KILL_SECS = 5.0  # between SIGTERM and SIGKILL
LAST_LINES_SECS = 2.0  # to read the last output of ended processes, whose pipes others may hold open
SIGNALLED = 128  # shells add it to the number of the signal that ended a process
# XLA's CPU collectives print the number of connections of each group of devices, from several threads into one line.
NOISE = re.compile(rb"\[Gloo\] Rank|connected peer ranks is")
FOLLOWING = (EXIT_RESTART, -signal.SIGABRT)  # statuses of a process that ends because another did: from us, or from JAX
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, 2 for user errors."""
    return exit_status(lambda: run(parser().parse_args(arguments)), one_line=True)


def run(parsed: argparse.Namespace) -> int:
    """Start all processes and wait for them; returns the status of the first that failed by itself, 0 if none did."""
    command = python_command(parsed.command)
    with started(command, [environment_of(parsed, rank) for rank in range(parsed.processes)]) as processes:
        readers = show_output(processes)
        status = status_of(*wait(processes, parsed.grace_secs))
        deadline = time.monotonic() + LAST_LINES_SECS
        for reader in readers:
            reader.join(max(deadline - time.monotonic(), 0))
        return status


def python_command(command: Sequence[str]) -> list[str]:
    """The command to start, with unbuffered output."""
    command = list(command[1:] if command[:1] == ["--"] else command)
    if not command:
        raise ConfigError("nothing to start; write it last, as in `-- train.py --config=configs/quickstart.py`")
    is_module = command[0] == "-m" and len(command) > 1
    if not is_module and not (command[0].endswith(".py") and Path(command[0]).is_file()):
        advice = "write one after --, or a module, as -m parallax.train"
        raise ConfigError(f"{command[0]!r} is not a Python file in {Path.cwd()}; {advice}")
    return [sys.executable, "-u", *command]


def environment_of(parsed: argparse.Namespace, rank: int) -> dict[str, str]:
    """The environment of one process: the coordinator's address, and its own devices."""
    place = (f"127.0.0.1:{parsed.port}", str(parsed.processes), str(rank))
    changed = {variable: value for (variable, _), value in zip(ADDRESS_FLAGS.values(), place)} | {TOKEN: parsed.token}
    if parsed.devices_per_process:
        changed |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(parsed.devices_per_process)}
    if parsed.gpus_per_process:
        changed["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of(parsed, rank))
        limit = f"--xla_gpu_nccl_termination_timeout_seconds={NCCL_SECS}"
        changed["XLA_FLAGS"] = f"{limit} {os.environ.get('XLA_FLAGS', '')}".strip()
        changed["NCCL_DEBUG"] = os.environ.get("NCCL_DEBUG", "WARN")
    # `show_output` reads UTF-8, and writes what the console has.
    return {**os.environ, "PYTHONIOENCODING": "utf-8", **changed}


def gpus_of(parsed: argparse.Namespace, rank: int) -> list[str]:
    """The GPUs of one process, from those in CUDA_VISIBLE_DEVICES if it is set."""
    each, needed = parsed.gpus_per_process, parsed.processes * parsed.gpus_per_process
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    ours = list(map(str, range(needed))) if visible is None else [gpu for gpu in visible.split(",") if gpu]
    if len(ours) < needed:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={visible!r} names {len(ours)} GPUs, and --processes {parsed.processes} with "
            f"--gpus-per-process {each} needs {needed}; name more of them, or start fewer processes"
        )
    return ours[rank * each : (rank + 1) * each]


@contextlib.contextmanager
def started(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> Iterator[list[subprocess.Popen]]:
    """Start a process of the command for each environment, forward our signals to them, and end all of them at exit."""
    processes = []

    def forward(number: int, _frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    # Signals that we ignore, as SIGHUP under nohup, are ignored by the processes, too.
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    heard = [number for number in FORWARDED if number != signal.SIGHUP or not ignored]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        for rank, environment in enumerate(environments):
            # In its own session, so that Ctrl-C reaches it only once, through us.
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
            processes.append(process)
            _say(f"process {rank} is pid {process.pid}")
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def show_output(processes: Sequence[subprocess.Popen]) -> list[threading.Thread]:
    """Print each line with the number of its process, from a thread for each pipe."""

    def show(rank: int, pipe: BinaryIO, stream: TextIO) -> None:
        for line in pipe:
            if not NOISE.search(line):
                text = line.removesuffix(b"\n").decode(errors="replace")
                tell(f"[{rank}] {text}", stream)

    readers = [
        threading.Thread(target=show, args=(rank, pipe, stream), daemon=True)
        for rank, process in enumerate(processes)
        for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    ]
    for reader in readers:
        reader.start()
    return readers


def wait(processes: Sequence[subprocess.Popen], grace_secs: float) -> tuple[dict[int, int], set[int]]:
    """Wait until all have ended; after the first end the others have `grace_secs`, then they are terminated.

    Returns their statuses by rank, in the order in which they ended, and the ranks that were terminated.
    """
    ended: dict[int, int] = {}
    made_to_end: set[int] = set()
    deadline = float("inf")
    while left := [rank for rank in range(len(processes)) if rank not in ended]:
        if time.monotonic() > deadline:
            number = signal.SIGKILL if made_to_end else signal.SIGTERM
            _say(f"ending process {', '.join(map(str, left))} by {number.name}")
            made_to_end.update(left)
            for rank in left:
                processes[rank].send_signal(number)
            deadline = time.monotonic() + KILL_SECS
        time.sleep(POLL_SECS)
        for rank in left:
            code = processes[rank].poll()
            if code is not None:
                ended[rank] = code
                if code:
                    _say(f"process {rank} ended with {f'status {code}' if code > 0 else signal.Signals(-code).name}")
        if ended and deadline == float("inf"):
            deadline = time.monotonic() + grace_secs
    return ended, made_to_end


def status_of(ended: Mapping[int, int], made_to_end: Collection[int]) -> int:
    """Status of the first process that failed by itself; those that followed come next, terminated ones last."""
    failed = [rank for rank, code in ended.items() if code]
    failed.sort(key=lambda rank: (rank in made_to_end, ended[rank] in FOLLOWING))
    code = ended[failed[0]] if failed else 0
    return code if code >= 0 else SIGNALLED - code


def _say(text: str) -> None:
    tell(f"[launch] {text}", sys.stderr)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def parser() -> argparse.ArgumentParser:
    parser = Parser("python -m parallax.launch", description=__doc__)
    add = parser.add_argument
    add("--processes", type=positive, required=True, metavar="N", help="number of processes to start")
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument("--devices-per-process", type=positive, metavar="N", help="CPU devices that each simulates")
    devices.add_argument("--gpus-per-process", type=positive, metavar="N", help="GPUs of each process")
    add(
        "--grace-secs",
        type=positive,
        default=60,
        metavar="S",
        help="for the others when one has ended (%(default)s)",
    )
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="a Python file, or -m and a module")
    parser.set_defaults(port=_free_port(), token=secrets.token_hex(16))
    return parser


if __name__ == "__main__":
    sys.exit(main())
