"""Try Parallax on the devices that are here: a few steps, held to the plan, in a file that an issue can take.

python -m parallax.firstrun
python -m parallax.firstrun --config=configs/llama_1b_16.py --config.mesh.dp=-1 --steps=20 --out=first-run.md
"""

import os

# Before JAX is imported. The start-up talk of XLA's C++ is for those who ask for it.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from parallax.runtime.progress import loading, make_room

with loading(__name__, sys.stderr):
    from parallax.cli.command import CONFIGS, Flag, Line, read_line, run_command, written
    from parallax.cli.command import usage as usage_of
    from parallax.cli.firstrun import machine
    from parallax.cli.firstrun.choose import choose, placed
    from parallax.cli.firstrun.page import page, page_without_devices, warnings
    from parallax.cli.firstrun.work import WARM_UP, FirstRun, Found
    from parallax.config.settings import Settings, read_settings
    from parallax.runtime.devices import simulate_devices
    from parallax.runtime.errors import ConfigError, ParallaxError, check_whole, tell
    from parallax.runtime.files import write_whole
    from parallax.runtime.multihost.address import FLAGS as ADDRESS_FLAGS
    from parallax.runtime.multihost.address import read_address
    from parallax.runtime.multihost.job import is_first, join, leave, reporting, several

FLAGS = {
    "steps": Flag(f"steps to take; the first {WARM_UP} are left out of the times", 12),
    "out": Flag("the file to write", "first-run.md"),
    **{name: Flag(f"{meaning} (or {variable})") for name, (variable, meaning) in ADDRESS_FLAGS.items()},
}


class PhaseError(ParallaxError):
    """A phase of the first run failed; the file says how."""

    exit_status = 1


def main(argv: Sequence[str]) -> int:
    """Run; returns the exit status. What a user got wrong is one line on stderr."""

    def act_in_job(argv: Sequence[str]) -> None:
        with reporting():
            act(argv)

    return leave(lambda: run_command(act_in_job, argv, usage))


def usage() -> str:
    """What --help prints."""
    line = "python -m parallax.firstrun [--config=FILE] [--config.SECTION.KEY=VALUE ...] [--steps=12] [--out=FILE]"
    return usage_of(__doc__, line, FLAGS)


def act(argv: Sequence[str]) -> None:
    """Do what the command line says; PhaseError where a phase fails, after the file is written."""
    own = [] if written(argv, "config") else [f"--config={CONFIGS / 'base.py'}"]
    line = read_line([argv[0], *own, *argv[1:]], FLAGS)
    check_flags(line)
    settings, out = read_settings(line.config), Path(line.values["out"])
    join(read_address(line.values), settings.distributed, simulate=settings.mesh.simulate)
    if settings.mesh.simulate and not several():
        simulate_devices(settings.mesh.simulate)
    about = {"Versions": machine.software(), "Flags": machine.flags()}
    try:
        about = {"Devices": machine.devices(), **about}
    except RuntimeError as error:  # of a driver that is not there, or of chips that another process has
        write(out, machine.nameless(page_without_devices(command(argv[1:]), str(error), about)))
        raise PhaseError(f"JAX has no devices: {str(error).splitlines()[0]}; {out} says more") from error
    if own:
        own = choose(config_flags(argv[1:]), say)
        line = read_line([argv[0], *own, *argv[1:]], FLAGS)
    found = Found(shortened(read_settings(line.config), line.values["steps"]), command([*own, *argv[1:]]))
    say(f"{about['Devices']['devices']}; {found.command}")
    try_out(found, about, out, line.values["steps"])


def try_out(found: Found, about: dict[str, dict[str, str]], out: Path, steps: int) -> None:
    """Do all phases, and keep the file up to date."""

    def save() -> None:
        if is_first():
            write(out, machine.nameless(page(found, about)))

    save()
    FirstRun(found, steps, say=say, save=save).run()
    for warning in warnings(found):
        say(f"warning: {warning}")
    say(f"all of it is in {out}; without names of host, user and home; attach it to an issue")
    if found.failed:
        failed = next(phase for phase in found.phases if phase.state == "failed")
        raise PhaseError(f"{failed.name} failed: {failed.error.splitlines()[0]}")


def check_flags(line: Line) -> None:
    """Raise ConfigError where a flag has no value that means something."""
    check_whole("--steps", line.values["steps"], least=WARM_UP + 1)
    if line.values["out"] == "":
        raise ConfigError("--out='' names no file; write a path, as in --out=first-run.md")


def config_flags(words: Sequence[str]) -> list[str]:
    """The settings among the words of a command line."""
    return [word for word in words if word.startswith(("--config.", "-config."))]


def shortened(settings: Settings, steps: int) -> Settings:
    """The settings on these devices, of a run of so many steps whose learning rate rises at once."""
    train = dataclasses.replace(settings.train, steps=steps, profile_steps="")
    optimizer = dataclasses.replace(settings.optimizer, warmup_steps=1)
    return placed(dataclasses.replace(settings, train=train, optimizer=optimizer))


def command(words: Sequence[str]) -> str:
    """What to type for the same run, from the repository."""
    return " ".join(["python -m parallax.firstrun", *words]).replace(f"{CONFIGS.parent}{os.sep}", "")


def write(out: Path, text: str) -> None:
    """Write the file whole; ConfigError where that cannot be."""
    try:
        write_whole(out, text)
    except OSError as error:
        raise ConfigError(f"--out={out} cannot be written: {error.strerror}") from error


def say(text: str) -> None:
    """A line of progress, from process 0."""
    if is_first():
        make_room()
        tell(text, sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
