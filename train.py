"""Train a model: `python train.py --config=configs/quickstart.py --config.mesh.tp=4 --workdir=runs/mine`.

The command line, by absl and ml_collections, with one line for whatever is wrong with it.
"""

import os

# The start-up talk of XLA's C++ is for those who ask for it; it reads this when it is loaded.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")

import dataclasses
import difflib
import logging
import re
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_type_hints

import absl.logging
from absl import flags
from ml_collections import ConfigDict, config_flags

from parallax.errors import ConfigError, ParallaxError, nearest
from parallax.loop import check_run_name, train
from parallax.loop.processes import agree
from parallax.loop.resume import RESUME
from parallax.settings import KINDS, SECTIONS

CONFIGS = Path(__file__).parent / "configs"
SAVED = "saved.py"  # loads the config.json of a run
RUNS = Path("runs")
# Set by launchers of jobs; the first that is there names the run.
RUN_NAME_VARIABLES = ("PARALLAX_RUN_NAME", "JOBSET_NAME")
FLAGS = {
    "config": "a Python file with get_config(), or the config.json of a run; may be left out to go on with --workdir",
    "workdir": "the folder of the run; with a checkpoint in it, the run goes on from there",
    "run_name": f"name of a new folder in {RUNS}/, in place of --workdir",
    "resume": "what to do with a checkpoint in the folder: auto (go on if there is one), must, never",
}


class Command(NamedTuple):
    """What a command line asks for."""

    config: ConfigDict
    workdir: Path
    resume: str


def main(argv: Sequence[str]) -> int:
    """Do what the command line says; returns the exit status. What a user got wrong is one line on stderr."""
    absl.logging.set_verbosity(absl.logging.ERROR)
    logging.getLogger("jax").setLevel(logging.ERROR)
    try:
        if {"-h", "-help", "--help"} & set(argv):
            print(usage())
            return 0
        command = parse(argv)
        train(command.config, command.workdir, resume=command.resume)
    except ParallaxError as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_status
    return 0


def parse(argv: Sequence[str]) -> Command:
    """Read a command line, program name first; ConfigError says what is wrong with it."""
    argv = _name_config(list(argv))
    for name in _overrides(argv):
        check_key(name)
    values = flags.FlagValues()
    path = _value(argv, "config")
    config_flags.DEFINE_config_file(
        "config", None, FLAGS["config"], lock_config=True, flag_values=values, sys_argv=argv
    )
    flags.DEFINE_string("workdir", None, FLAGS["workdir"], flag_values=values)
    flags.DEFINE_string("run_name", None, FLAGS["run_name"], flag_values=values)
    flags.DEFINE_enum("resume", "auto", RESUME, FLAGS["resume"], flag_values=values)
    rest = _read(values, argv, path)
    if rest:
        raise ConfigError(_stray(rest[0]))
    workdir = choose_workdir(values.workdir, values.run_name) or default_workdir(values.config, path)
    return Command(values.config, workdir, values.resume)


def usage() -> str:
    """What --help prints: the flags, and every key of a config with its default and meaning."""
    known = "\n".join(f"  --{name:10} {meaning}" for name, meaning in FLAGS.items())
    keys = re.sub(r"(?m)^    (config|#)", _as_flag, (CONFIGS / "base.py").read_text().split("ConfigDict()\n", 1)[1])
    kept = [line for line in keys.splitlines() if not re.search(r"= ConfigDict\(\)|return config", line)]
    return (
        "python train.py --config=configs/quickstart.py [--config.SECTION.KEY=VALUE ...] [--workdir=FOLDER]\n\n"
        f"{known}\n\nKeys and their defaults in configs/base.py:\n" + "\n".join(kept).rstrip()
    )


def _as_flag(start: re.Match[str]) -> str:
    return "  --config" if start.group(1) == "config" else "  #"


def choose_workdir(workdir: str | None, run_name: str | None) -> Path | None:
    """The run's folder: as written, or below runs/ by name or by the launcher's name; None where nobody names it."""
    if workdir and run_name:
        raise ConfigError(f"--workdir={workdir} and --run_name={run_name} both name the run's folder; give one")
    if workdir == "":
        raise ConfigError("--workdir='' is no folder; give it a name or leave it out")
    if workdir:
        return Path(workdir)
    if run_name is None:
        run_name = next((os.environ[name] for name in RUN_NAME_VARIABLES if os.environ.get(name)), None)
    return RUNS / check_run_name(run_name) if run_name is not None else None


def default_workdir(config: ConfigDict, path: str) -> Path:
    """The run's folder below runs/, by config and time; the same in all processes of a job."""
    started = time.strftime("%Y%m%d-%H%M%S")
    # Simulated devices are of one process, and can be made only before JAX is asked how many there are.
    if not config.mesh.simulate:
        started = agree(started)
    return RUNS / check_run_name(f"{Path(path.split(':')[0]).stem}-{started}")


def check_key(name: str) -> None:
    """Raise ConfigError unless `name` is section.key of a config."""
    section, _, key = name.partition(".")
    if section in SECTIONS:
        known = [field.name for field in dataclasses.fields(SECTIONS[section])]
        if not key:
            raise ConfigError(
                f"--config.{section} is a section; write --config.{section}.<key>, one of {', '.join(known)}"
            )
        if key not in known:
            raise ConfigError(f"unknown key --config.{name}; {nearest(key, known)}")
    else:
        raise ConfigError(f"unknown key --config.{name}; did you mean --config.{nearest_key(name)}?")


def nearest_key(word: str) -> str:
    """The key of all configs, as section.key, that somebody may have meant.

    >>> [nearest_key(word) for word in ("lr", "steps", "messh.tp", "d_modle")]
    ['optimizer.learning_rate', 'train.steps', 'mesh.tp', 'model.d_model']
    """
    keys = [f"{section}.{field.name}" for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)]
    last = word.split(".")[-1]

    def likeness(key: str) -> float:
        name = key.split(".")[1]
        initials = "".join(part[0] for part in name.split("_"))
        parts = (difflib.SequenceMatcher(None, a, b).ratio() for a, b in ((word, key), (last, name)))
        return max(*parts, 0.95 * (last == initials))

    return max(keys, key=likeness)


def _name_config(argv: list[str]) -> list[str]:
    """The command line with a --config that ml_collections can load; a saved run stands for itself."""
    path, workdir = _value(argv, "config"), _value(argv, "workdir")
    if path is None and workdir and (Path(workdir) / "config.json").is_file():
        path = str(Path(workdir) / "config.json")
        argv = [argv[0], f"--config={path}", *argv[1:]]
    if path is None:
        raise ConfigError(f"--config is missing; use one of {', '.join(known_configs())}")
    if not Path(path.split(":")[0]).is_file():
        raise ConfigError(f"--config={path} does not exist; {nearest(path, known_configs())}")
    if path.endswith(".json"):
        loader = f"{CONFIGS / SAVED}:{path}"
        argv = [loader if arg == path else arg.replace(f"config={path}", f"config={loader}", 1) for arg in argv]
    return argv


def _value(argv: Sequence[str], flag: str) -> str | None:
    """What is written for a flag, as --flag=value or --flag value."""
    for at, arg in enumerate(argv[1:], 1):
        name, equals, value = arg.partition("=")
        if name in (f"--{flag}", f"-{flag}"):
            return value if equals else next(iter(argv[at + 1 :]), None)
    return None


def _overrides(argv: Sequence[str]) -> list[str]:
    return [m.group(1) for arg in argv[1:] if (m := re.match(r"--?config\.([^=]*)", arg))]


def _read(values: flags.FlagValues, argv: Sequence[str], path: str) -> list[str]:
    """Let absl read the flags; returns what is no flag."""
    try:
        return values(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        raise ConfigError(f"unknown flag --{error.flagname}; {nearest(error.flagname, FLAGS)}") from error
    except flags.IllegalFlagValueError as error:
        raise ConfigError(_illegal(str(error))) from error
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename).name == Path(path.split(":")[0]).name]
        where = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"{path}{where}: {type(error).__name__}: {error}") from error


def _illegal(message: str) -> str:
    """Absl's words about a value, or ours where the value is a config's."""
    found = re.match(r"flag --config\.(\w+)\.(\w+)=(.*?): ", message)
    if not found:
        return message
    section, key, value = found.groups()
    return f"--config.{section}.{key}={value} must be {KINDS[get_type_hints(SECTIONS[section])[key]]}"


def _stray(argument: str) -> str:
    word, equals, value = argument.lstrip("-").removeprefix("config.").partition("=")
    meant = f"--config.{nearest_key(word)}{equals}{value}"
    return f"stray argument {argument!r}; did you mean {meant}? Settings are written --config.<section>.<key>=<value>"


def known_configs() -> list[str]:
    """The configs that come with the repository."""
    return [f"configs/{file.name}" for file in sorted(CONFIGS.glob("*.py")) if file.name != SAVED]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
