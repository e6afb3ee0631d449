"""Command lines: `--config=FILE --config.SECTION.KEY=VALUE` and a program's own flags, read by absl.

Mistakes are a ConfigError of one line, the same for every program. `ml_collections.config_flags` reads such lines, too,
but neither the config.json of a run nor keys of earlier versions.
"""

import ast
import dataclasses
import difflib
import logging
import os
import platform
import re
import runpy
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import absl.logging
from absl import flags
from ml_collections import ConfigDict

from parallax import errors
from parallax.cli.arguments import dashed
from parallax.config.earlier import RENAMED, renamed
from parallax.config.keys import KINDS
from parallax.config.reference import CONFIGS, about, key_lines
from parallax.config.sections import BASE, LAYER_KINDS, SECTIONS, MeshConfig
from parallax.config.settings import (
    OF_A_RUN,
    Settings,
    check_has_experts,
    fit_to_steps,
    load_saved,
    read_settings,
    tell_saved,
)
from parallax.display.progress import stop_progress, waiting
from parallax.errors import CheckpointError, ConfigError, ParallaxError, errors_as, nearest, quoted, shown, tell
from parallax.hardware.devices import leave_out_absent_tpu
from parallax.processes import job
from parallax.processes.address import ADDRESS_FLAGS, read_address
from parallax.storage.buckets import is_in_bucket
from parallax.storage.files import is_local
from parallax.storage.remote import source_path
from parallax.storage.run_files import RunFiles
from parallax.user_code import with_settings
from parallax.version import code_version, versions

WIDEST_HELP = 100  # columns
ERROR_LETTERS = 400  # most characters of an error that a config file raises
CONFIG_MEANING = "a Python file with get_config(), the config.json of a run, or the name of a config of Parallax"
KEY_MEANING = "another value for a key of the config, as --config.train.steps=50"
ABBREVIATIONS = {"lr": "learning_rate"}
HELP = {"help": "print this", "help-config": "print every key of a config with its default and meaning"}


class Flag(NamedTuple):
    """A program's own flag; its values have the type of the default, or are texts if that is None."""

    meaning: str
    default: str | int | float | bool | None = None
    choices: tuple[str, ...] = ()


FLAGS_OF_A_JOB = {name: Flag(f"{meaning} (or {variable})") for name, (variable, meaning) in ADDRESS_FLAGS.items()}


class Line(NamedTuple):
    """A parsed command line: the config with its changes, its file, the program's flags, and warnings about values of
    the file that were adapted to the command line."""

    config: ConfigDict
    path: str
    values: dict[str, Any]
    warnings: tuple[str, ...] = ()


def run_command(
    act: Callable[[Sequence[str]], int | None],
    argv: Sequence[str],
    about: str,
    usage: str,
    program_flags: Mapping[str, Flag],
) -> int:
    """Run a command line; returns the exit status. User errors are one line on stderr.

    `about` is the program's docstring, `usage` an example of a call, and `program_flags` are its flags.
    """
    words = set(dashed(argv, HELP))
    if words & {"-h", "-help", "--help"}:
        return run_quietly(lambda: print(help_text(about, usage, program_flags)))
    if words & {"-help-config", "--help-config"}:
        return run_quietly(lambda: print(config_keys()))
    return run_quietly(lambda: act(argv), one_line=True)


def run_quietly(act: Callable[[], int | None], *, one_line: bool = False) -> int:
    """`errors.exit_status` of a command, without what libraries say at their start."""
    absl.logging.set_verbosity(absl.logging.ERROR)
    logging.getLogger("jax").setLevel(logging.ERROR)
    leave_out_absent_tpu()
    return errors.exit_status(act, one_line=one_line)


def read_command(argv: Sequence[str], program_flags: Mapping[str, Flag]) -> tuple[Settings, dict[str, Any]]:
    """The settings of a command line, and the values of the program's own flags, by name.

    `argv` begins with the program's name. Raises ConfigError if anything is wrong.
    """
    line = read_line(argv, program_flags)
    for warning in line.warnings:
        tell(warning, sys.stderr)
    settings = read_settings(line.config.to_dict())
    check_has_experts(settings)
    return settings, line.values


def read_line(
    argv: Sequence[str],
    program_flags: Mapping[str, Flag],
    config: Path | None = None,
    reads: Collection[str] = OF_A_RUN,
    *,
    in_bucket: Collection[str] = ("workdir",),
    from_url: Collection[str] = (),
) -> Line:
    """A parsed command line. Only names and types of its config are checked; `config` is the default config. Of a saved
    config it is said what `tell_saved` says of the keys that the command `reads`. Flags of `in_bucket` may name what is
    in a bucket, and those of `from_url` and --config what is behind any URL that can be read."""
    argv = dashed(argv, program_flags)
    words = (re.match(r"--?(?:no)?config\.([^=]*)", word) for word in argv[1:])
    overrides = list(dict.fromkeys(match[1] for match in words if match))
    values = flags.FlagValues()
    known = {"config": Flag(CONFIG_MEANING, config and str(config)), **program_flags}
    for name, flag in known.items():
        _define(name, flag, values)
    for name in overrides:
        _define(f"config.{name}", Flag("", None if name in RENAMED else key_default(name)), values)
    if rest := _read(values, argv, list(known)):
        raise ConfigError(_stray(rest[0]))
    given = {name: values[name].value for name in program_flags}
    for name, value in {"config": values.config, **given}.items():
        if value == "":
            raise ConfigError(f"--{name}='' is empty; leave it out, or write a value: {known[name].meaning}")
        if isinstance(value, str):  # a path; other texts are not URLs either
            if name in (*from_url, "config"):
                source_path(value, f"--{name}", pattern=name != "config")
            elif not (name in in_bucket and is_in_bucket(value)):
                errors.check_local(f"--{name}", value)
    if values.config is None:
        folder = given.get("workdir")
        said = "" if folder is None else f", and --workdir={shown(folder)} holds no run to resume"
        raise ConfigError(f"--config is missing{said}; use one of {', '.join(known_configs())}")
    config_dict, left_out = load_config(values.config)
    with config_dict.unlocked(), config_dict.ignore_type():  # read_settings reports wrong types
        for name in sorted(overrides, key=is_of_a_kind):  # which change model.kinds, as the line says it
            section, _, key = name.partition(".")
            value = values[f"config.{name}"].value
            if is_of_a_kind(name):
                key, kind, setting = key.split(".")
                kinds = config_dict.to_dict()[section][key]
                config_dict[section][key] = with_settings(f"{section}.{key}", kinds, {kind: {setting: value}})
                continue
            config_dict.update({section: {key: _literal(value) if name in RENAMED else value}})
    wrong = f"--config={shown(values.config)}: what follows from other values cannot be computed with those written: "
    with errors_as(ConfigError, wrong, "", ArithmeticError, TypeError):
        plain = config_dict.to_dict()
    sections, said = renamed(plain, chosen=overrides)
    if is_saved(values.config):
        tell_saved(source_path(values.config), sections, left_out, [name for name in reads if name not in overrides])
    warnings = [*(f"warning: {text}" for text in said), *fit_to_steps(sections, overrides)]
    return Line(ConfigDict(sections), values.config, given, tuple(warnings))


def read_line_of_run(
    argv: Sequence[str],
    program_flags: Mapping[str, Flag],
    reads: Collection[str] = OF_A_RUN,
    *,
    from_url: Collection[str] = (),
) -> Line:
    """The same for a program that works on the run in --workdir, whose config it uses."""
    workdir = written(argv, "workdir")
    if not workdir:
        raise ConfigError("--workdir is required: the folder of the run")
    if not is_in_bucket(workdir):
        errors.check_local("--workdir", workdir)
    saved = RunFiles(workdir).config
    if not saved.is_file():
        raise CheckpointError(f"--workdir={workdir} is not the folder of a run: it has no {saved.name}")
    return read_line(argv, program_flags, config=saved, reads=reads, from_url=from_url)


def join_job(settings: Settings, values: Mapping[str, Any]) -> None:
    """Become one of the processes of a job, all of which must run the same code with the same settings and `values` of
    the program's flags."""
    with waiting("connecting the processes of the job"):
        job.join(read_address(values), settings.distributed, simulate=settings.mesh.simulate)
    if job.several() and not job.is_first():
        stop_progress()
    config = {f"{section}.{key}": value for section, keys in settings.to_dict().items() for key, value in keys.items()}
    given = {f"--{name}": value for name, value in values.items() if name not in ADDRESS_FLAGS}
    packages = {f"package {name}": version for name, version in versions().items()}
    code = {"python": platform.python_version(), "code version": code_version()}
    job.check_equal("config and code", config | given | packages | code)


def file_of(config: str) -> Path:
    """The file that --config means: a name alone, as quickstart, is one of Parallax's own configs."""
    named = CONFIGS / f"{config}.py"
    return named if re.fullmatch(r"\w+", str(config)) and named.is_file() else source_path(config)


def is_saved(path: str) -> bool:
    """Whether a config was saved by a run, whose folder may come from somebody else; other configs are programs."""
    return source_path(path).suffix == ".json"


def load_config(path: str) -> tuple[ConfigDict, dict[str, Any]]:
    """The config from get_config() of a file, or from a run's JSON, with the values that this does not decide;
    ConfigError if that fails."""
    file = file_of(path)
    if not is_saved(path) and not is_local(file):
        raise ConfigError(
            f"--config={shown(path)} is code, which is run only from a file of this machine; copy it, or name a "
            "config.json"
        )
    if not file.is_file():
        raise ConfigError(f"--config={shown(path)} {_instead_of(file)}")
    if (root := str(CONFIGS.parent)) not in sys.path:
        sys.path.append(root)  # configs import `configs.base`, whatever the current folder
    try:
        if is_saved(path):
            saved, left_out = load_saved(file)
            return ConfigDict(saved), left_out
        defined = runpy.run_path(str(file))
        if "get_config" not in defined:
            raise ConfigError("it has no get_config(), which returns the config; write it as in configs/base.py")
        config = defined["get_config"]()
        if not isinstance(config, ConfigDict):
            what = f"get_config() returns a {type(config).__name__}, not a ConfigDict"
            raise ConfigError(f"{what}; begin with that of configs/base.py, and change its keys")
        return config, {}
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f", line {lines[-1]}" if lines else ""
        kind = "" if isinstance(error, ParallaxError) else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}".split())
        more = "…" if len(reason) > ERROR_LETTERS else ""
        raise ConfigError(f"{path}{where}: {reason[:ERROR_LETTERS]}{more}") from error


def written(argv: Sequence[str], flag: str) -> str | None:
    """The value written for a flag, as --flag=value or --flag value."""
    for place, arg in enumerate(argv[1:], 1):
        name, equals, value = arg.partition("=")
        if name in (f"--{flag}", f"-{flag}"):
            return value if equals else next(iter(argv[place + 1 :]), None)
    return None


def written_mesh(argv: Sequence[str], mesh: MeshConfig) -> dict[str, int]:
    """Keys of the mesh that a command line sets, with their values."""
    names = [field.name for field in dataclasses.fields(mesh)]
    return {name: getattr(mesh, name) for name in names if written(argv, f"config.mesh.{name}") is not None}


def read_secs(flag: str, text: str) -> float:
    """A time such as 3h, 90m, 1h30m, 45s or a number of seconds.

    >>> [read_secs("--max-runtime", text) for text in ("1h30m", "90m", "7.5")]
    [5400.0, 5400.0, 7.5]
    """
    match = re.fullmatch(r"(?=.)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text)
    secs = sum(float(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1))) if match else 0.0
    if not secs:
        raise ConfigError(
            f"{flag}={quoted(text)} is not a time; write it as 3h, 90m, 1h30m, 45s or a number of seconds above 0"
        )
    return secs


def help_text(about: str, usage: str, program_flags: Mapping[str, Flag]) -> str:
    """The text of --help: description, examples, usage and flags."""
    config = {"config=FILE": CONFIG_MEANING} if "--config=FILE" in usage else {}
    meanings = {name: flag.meaning for name, flag in program_flags.items()}
    meanings = {**config, "config.SECTION.KEY=VALUE": KEY_MEANING, **meanings, **HELP}
    width = min(shutil.get_terminal_size().columns, WIDEST_HELP)
    indent = max(map(len, meanings)) + 6
    lines = [
        _filled(meaning, width, initial_indent=f"  --{name}".ljust(indent), subsequent_indent=" " * indent)
        for name, meaning in meanings.items()
    ]
    called = _filled(usage, width, initial_indent="usage: ", subsequent_indent=" " * 7)
    return "\n".join([about.strip(), "", called, "", "flags:", *lines])


def _filled(text: str, width: int, **indents: str) -> str:
    return textwrap.fill(text, width, **indents, break_on_hyphens=False, break_long_words=False)


def config_keys() -> str:
    """The text of --help-config: every key of a config with its default and meaning."""
    parts = ("\n".join([f"  # {about(section)}", *key_lines(section, "  --config")]) for section in SECTIONS.values())
    return "Keys of a config, with their defaults:\n\n" + "\n\n".join(parts)


def key_default(name: str) -> int | float | str | bool:
    """The default of a key, written as section.key; ConfigError if it does not exist."""
    section, _, key = name.partition(".")
    if section not in SECTIONS:
        raise ConfigError(f"unknown key --config.{shown(name)}; did you mean --config.{nearest_key(name)}?")
    known = {field.name: field.default for field in dataclasses.fields(SECTIONS[section])}
    if is_of_a_kind(name):
        key = key.split(".")[2]
        known |= {BASE: LAYER_KINDS[0]}
    if not key:
        raise ConfigError(f"--config.{section} is a section; write --config.{section}.<key>, one of {', '.join(known)}")
    if key not in known:
        raise ConfigError(f"unknown key --config.{shown(name)}; {nearest(key, known)}")
    return known[key]


def is_of_a_kind(name: str) -> bool:
    """Whether a key is a setting of one kind of layers, as model.kinds.local.sliding_window."""
    return bool(re.fullmatch(r"model\.kinds\.[^\W\d]\w*\.\w+", name))


def nearest_key(word: str) -> str:
    """The key, as section.key, that was probably meant.

    >>> [nearest_key(word) for word in ("lr", "steps", "messh.tp", "d_modle")]
    ['optimizer.learning_rate', 'train.steps', 'mesh.tp', 'model.d_model']
    """
    keys = [f"{section}.{field.name}" for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)]
    word = word[: errors.QUOTED_LETTERS]
    last = word.split(".")[-1]

    def likeness(key: str) -> float:
        name = key.split(".")[1]
        parts = (difflib.SequenceMatcher(None, a, b).ratio() for a, b in ((word, key), (last, name)))
        return max(*parts, 0.95 * (ABBREVIATIONS.get(last) == name))

    return max(keys, key=likeness)


def unknown_flag(name: str, known: Sequence[str]) -> str:
    """The error for a flag that does not exist: a key of the config without --config, or nearly one of the known.

    >>> unknown_flag("model.layers", ["workdir"]), unknown_flag("layers", ["workdir"])
    ('unknown flag --model.layers; did you mean --config.model.layers?', \
'unknown flag --layers; did you mean --config.model.layers?')
    >>> unknown_flag("workdirr", ["workdir"])
    "unknown flag --workdirr; did you mean '--workdir'? Known: --workdir"
    """
    word = name.replace("-", "_")
    is_key = any(word == field.name for section in SECTIONS.values() for field in dataclasses.fields(section))
    dotted = "." in name and not difflib.get_close_matches(name, [flag for flag in known if "." in flag])
    flags = [f"--{flag}" for flag in known]
    instead = f"did you mean --config.{nearest_key(word)}?" if is_key or dotted else nearest(f"--{name}", flags)
    return f"unknown flag --{shown(name)}; {instead}"


def known_configs() -> list[str]:
    """Parallax's own configs: as paths from the current folder where they lie below it, else by name."""
    files = sorted(CONFIGS.glob("*.py"))
    if not CONFIGS.is_relative_to(Path.cwd()):
        return [file.stem for file in files]
    return [os.path.relpath(file) for file in files]


def _instead_of(file: Path) -> str:
    """Why a config's path is not a file, with a suggestion for the current folder."""
    if file.is_dir():
        saved = file / "config.json"
        return f"is a folder; name a file in it{f', as {str(saved)!r}' if saved.is_file() else ''}"
    if not is_local(file):
        return "does not exist"
    known = {Path(path).stem: path for path in known_configs()}
    close = difflib.get_close_matches(file.stem[: errors.QUOTED_LETTERS], known, n=1)
    lead = f"did you mean {known[close[0]]!r}? Known" if close else "known"
    where = "" if file.is_absolute() or Path.cwd() == CONFIGS.parent else f" in {Path.cwd()}"
    return f"does not exist{where}; {lead}: {', '.join(known.values())}"


def _define(name: str, flag: Flag, values: flags.FlagValues) -> None:
    if flag.choices:
        flags.DEFINE_enum(name, flag.default, flag.choices, flag.meaning, flag_values=values)
        return
    define = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float}
    define.get(type(flag.default), flags.DEFINE_string)(name, flag.default, flag.meaning, flag_values=values)


def _read(values: flags.FlagValues, argv: Sequence[str], known: Sequence[str]) -> list[str]:
    """Let absl read the flags; returns the other arguments."""
    try:
        return values(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        raise ConfigError(unknown_flag(error.flagname, known)) from error
    except flags.IllegalFlagValueError as error:
        raise ConfigError(_illegal(str(error), values)) from error
    except flags.Error as error:
        raise ConfigError(str(error)) from error


def _illegal(message: str, values: flags.FlagValues) -> str:
    """Absl's error about a value, or ours for a value of the config."""
    match = re.match(r"flag --(config\.[\w.]+)=(.*?): ", message, re.DOTALL)
    return f"--{match[1]}={shown(match[2])} must be {KINDS[type(values[match[1]].default)]}" if match else message


def _literal(text: str) -> Any:
    """A value from a command line; if it is not a Python literal, it is a text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _stray(argument: str) -> str:
    word, equals, value = argument.lstrip("-").removeprefix("config.").partition("=")
    is_file = word.endswith((".py", ".json"))
    meant = f"--config={shown(word)}" if is_file else f"--config.{nearest_key(word)}{equals}{shown(value)}"
    form = "Settings are written --config.<section>.<key>=<value>"
    return f"stray argument {quoted(argument)}; did you mean {meant}? {form}"
