"""Try Parallax on this machine's devices: run a few steps, compare them with the plan, and write a file for an issue.

python -m parallax.firstrun
python -m parallax.firstrun --config=configs/llama_1b_16.py --config.mesh.dp=-1 --steps=20 --out=first-run.md
"""

import contextlib
import getpass
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path

from parallax.display.progress import loading

with loading(__name__, sys.stderr):
    import jax
    from jax.extend.backend import get_backend

    from parallax.analysis.measured import (
        WARM_UP,
        MeasuredSteps,
        PhaseError,
        compared,
        measure,
        planned_memory,
        say,
        shortened,
        warnings,
    )
    from parallax.cli.arguments import write_output
    from parallax.cli.command import CONFIGS, Flag, read_command, read_line, run_command, written
    from parallax.config.settings import read_settings
    from parallax.display.units import in_bytes
    from parallax.errors import ConfigError, ParallaxError, check_whole, first_line
    from parallax.hardware.devices import device_memory, start_devices
    from parallax.processes.address import ADDRESS_FLAGS, read_address
    from parallax.processes.job import is_first, join, leave, limited, reporting
    from parallax.step.resolve import Devices, resolve
    from parallax.version import code_version

COMMAND = "python -m parallax.firstrun {}"
USAGE = COMMAND.format("[--config=FILE] [--config.SECTION.KEY=VALUE ...] [--steps=12] [--out=FILE]")
FLAGS = {
    "steps": Flag(f"steps to take; the first {WARM_UP} are excluded from times", 12),
    "out": Flag("the file to write", "first-run.md"),
    **{name: Flag(f"{meaning} (or {variable})") for name, (variable, meaning) in ADDRESS_FLAGS.items()},
}


def main(argv: Sequence[str]) -> int:
    """Run; returns the exit status. User errors are one line on stderr."""
    return leave(lambda: run_command(reporting()(act), argv, __doc__, USAGE, FLAGS))


def act(argv: Sequence[str]) -> None:
    """Run all phases and write the file; then raise PhaseError if a phase failed."""
    line = read_line(argv, FLAGS, config=CONFIGS / "base.py")
    steps, out = line.values["steps"], line.values["out"]
    check_whole("--steps", steps, least=WARM_UP + 1)
    settings = read_settings(line.config)
    join(read_address(line.values), settings.distributed, simulate=settings.mesh.simulate)
    program, *words = argv
    note = notes_in(out)
    try:
        start_devices()
    except RuntimeError as error:  # a missing driver, or chips that another process uses
        note("\n".join([COMMAND.format(" ".join(words)), *software(), f"JAX has no devices: {error}"]))
        raise PhaseError(f"JAX has no devices: {first_line(error)}; {out} says more") from error
    words = words if written(argv, "config") else [*choose(words), *words]
    run = MeasuredSteps(shortened(read_command([program, *words], FLAGS)[0], steps), note)
    config = json.dumps(run.settings.to_dict(), indent=1)
    note("\n".join([COMMAND.format(" ".join(words)), "", *machine(), *software(), "", config, ""]))
    try:
        with limited(run.settings.distributed):
            measure(run)
        if run.failed:
            raise PhaseError(run.failed)
    finally:
        note("\n".join(["", *compared(run), "", *(f"warning: {line}" for line in warnings(run))]))
        say(f"results are in {out}, without names of host, user and home; attach it to an issue")


def notes_in(out: str) -> Callable[[str], None]:
    """A function that prints a text and adds it to the file, so that nothing is lost with the process."""
    lines = [f"# First run, {time.strftime('%Y-%m-%d')}", "", "```"]

    def note(text: str) -> None:
        say(text)
        lines.append(text)
        if is_first():
            write_output("out", out, nameless("\n".join([*lines, "```", ""])))

    return note


# ---- the choice of the config: the largest one that fits according to the plan

# By platform, largest first: a config, and changes to it. All of them use the devices along dp.
CANDIDATES = {
    "gpu": ["gpu_80gb_16x8", "gpu_80gb_x8", "gpu_80gb", "gpu_24gb_x8", "gpu_24gb"],
    "tpu": [
        "llama2_7b_64",
        "llama_1b_16",
        "llama_1b_16 --config.pipeline.microbatches=8",
        "gpu_24gb --config.model.kernel=splash",
    ],
}
SMALLEST = "tiny_gqa"
# Share of a device's memory: JAX reserves three quarters of a GPU's, and compilers need more than the peak.
MEMORY_SHARE = 0.7


def flags_for(candidate: str) -> list[str]:
    """The flags of a candidate."""
    name, *changes = candidate.split()
    return [f"--config={CONFIGS / name}.py", "--config.mesh.dp=-1", *changes]


def choose(words: Sequence[str]) -> list[str]:
    """The flags of the config to use on this machine's devices; `words` are the user's."""
    available = device_memory()
    for candidate in CANDIDATES.get(jax.devices()[0].platform, []):
        flags = flags_for(candidate)
        try:
            needed = planned_memory(resolve(read_command([__name__, *flags, *words], FLAGS)[0], Devices.here()))
            if available is None or needed <= MEMORY_SHARE * available:
                return flags
            raise ConfigError(f"it needs {in_bytes(needed)} on each device, which has {in_bytes(available)}")
        except ParallaxError as error:
            say(f"{candidate} is passed over: {error}")
    return [f"--config={CONFIGS / SMALLEST}.py", f"--config.data.global_batch={4 * jax.device_count()}"]


# ---- the machine, without names of hosts, users or folders

# What JAX does not say of itself: packages, and settings of libraries in the environment, by how their names begin.
REPORTED = ("flax", "jax", "libtpu", "nvidia-cudnn", "nvidia-nccl", "optax", "orbax", "parallax")
SETTINGS = ("LIBTPU_INIT_ARGS", "NCCL_", "CUDA_DEVICE_")
# Addresses of private networks, or with a port: versions may have four numbers, too.
ADDRESS = re.compile(r"\b(?:\d{1,3}(?:\.\d{1,3}){3}:\d+|(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3})\b")
SHORTEST_NAME = 4  # characters; a shorter host name would match parts of words


def machine() -> list[str]:
    """What JAX says of itself, the devices and the environment, and what it leaves out of the devices: where the first
    and the last one are."""
    environment, *_ = jax.print_environment_info(return_string=True).split("| Processes")  # which may be other users'
    return [
        environment.strip(),
        f"devices: {jax.devices()[0]!r} to {jax.devices()[-1]!r}",
        f"memory of a device: {in_bytes(memory) if (memory := device_memory()) else '-'}",
        f"backend: {' '.join(get_backend().platform_version.split())}",
    ]


def software() -> list[str]:
    """Versions of the packages, and the environment's settings of libraries."""
    packages = {package.name: package.version for package in distributions() if package.name}  # it may be broken
    there = [(packages | {"parallax": code_version()}, REPORTED), (os.environ, SETTINGS)]
    return [f"{name}: {of[name]}" for of, names in there for name in sorted(of) if name.startswith(names)]


def nameless(text: str) -> str:
    """The text without names of this machine's host, user and folders, and without addresses.

    >>> nameless(f"{Path.home()}/corpus, 10.0.0.2:8476")
    '~/corpus, <address>'
    """
    for folder, instead in ((Path.cwd(), "."), (Path(sys.prefix), "<python>"), (Path.home(), "~")):
        if folder != Path(folder.anchor):
            text = text.replace(str(folder), instead)
    # JAX names the host, however short, and variables a coordinator.
    text = re.sub(r"(node=|ADDRESS=)('[^']*'|\S+)", r"\1<host>", ADDRESS.sub("<address>", text))
    for name in (socket.gethostname(), socket.gethostname().split(".")[0]):
        if len(name) >= SHORTEST_NAME:
            text = re.sub(rf"\b{re.escape(name)}\b", "<host>", text)
    with contextlib.suppress(KeyError, OSError):  # a container whose user has no name
        text = re.sub(rf"(?<=/){(user := re.escape(getpass.getuser()))}(?=/|\b)|\b{user}(?=@)", "<user>", text)
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv))
