"""Command lines: `--config=FILE --config.SECTION.KEY=VALUE` and a program's own flags, read by absl and ml_collections.

What is wrong with one is a ConfigError of one line, the same for every program.
"""

import dataclasses
import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import absl.logging
from absl import flags
from ml_collections import ConfigDict, config_flags

from parallax.cli.arguments import dashed, help_text
from parallax.config.keys import KINDS
from parallax.config.reference import CONFIGS, about, key_lines
from parallax.config.sections import AUTO, SMALLEST_BPE_VOCAB, STEP_RANGE, DataConfig
from parallax.config.settings import SECTIONS, Settings, read_settings, with_vocab
from parallax.data.tokenizer import load_tokenizer
from parallax.data.vocabulary import with_vocab_of_source
from parallax.runtime.accelerators import leave_out_absent_tpu
from parallax.runtime.errors import (
    QUOTED_LETTERS,
    ConfigError,
    DataError,
    check_local,
    exit_status,
    nearest,
    quoted,
    shown,
    tell,
)

ERROR_LETTERS = 400  # of what a config file raises
SAVED = "saved.py"  # loads the config.json of a run
CONFIG_MEANING = "a Python file with get_config(), or the config.json of a run"
KEY_MEANING = "another value for a key of the config, as --config.train.steps=50"
HELP = {"help": "print this", "help-config": "print every key of a config with its default and meaning"}


class Flag(NamedTuple):
    """A flag of a program's own; its values are of the default's type, texts where that is None."""

    meaning: str
    default: str | int | float | bool | None = None
    choices: tuple[str, ...] = ()


class Line(NamedTuple):
    """What a command line says: the config with its changes, the file that it came from, the program's flags, and
    warnings about what of the file was changed to go with the command line."""

    config: ConfigDict
    path: str
    values: dict[str, Any]
    warnings: tuple[str, ...] = ()


def run_command(act: Callable[[Sequence[str]], None], argv: Sequence[str], usage: Callable[[], str]) -> int:
    """Do what a command line says; returns the exit status. What a user got wrong is one line on stderr."""
    absl.logging.set_verbosity(absl.logging.ERROR)
    logging.getLogger("jax").setLevel(logging.ERROR)
    leave_out_absent_tpu()
    words = set(dashed(argv, HELP))
    if words & {"-h", "-help", "--help"}:
        return exit_status(lambda: print(usage()))
    if words & {"-help-config", "--help-config"}:
        return exit_status(lambda: print(config_keys()))
    return exit_status(lambda: act(argv), one_line=True)


def read_command(argv: Sequence[str], own: Mapping[str, Flag]) -> tuple[Settings, dict[str, Any]]:
    """The settings that a command line asks for, and the values of the program's own flags, by name.

    `argv` begins with the program's name. Raises ConfigError for all that is wrong with it.
    """
    line = read_line(argv, own)
    for warning in line.warnings:
        tell(warning, sys.stderr)
    return read_settings(line.config.to_dict()), line.values


def read_line(argv: Sequence[str], own: Mapping[str, Flag]) -> Line:
    """A command line as it is written: its config is not yet checked but for names and types."""
    argv, path = _name_config(dashed(argv, own))
    for name in _overrides(argv):
        check_key(name)
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, CONFIG_MEANING, lock_config=True, flag_values=values, sys_argv=argv)
    for name, flag in own.items():
        _define(name, flag, values)
    if (root := str(CONFIGS.parent)) not in sys.path:
        sys.path.append(root)  # a config starts from `configs.base`, in whatever folder one is
    rest = _read(values, argv, path, ("config", *own))
    if rest:
        raise ConfigError(_stray(rest[0]))
    own_values = {name: values[name].value for name in own}
    for name, value in own_values.items():
        if isinstance(value, str):  # a path, or else no URL either
            check_local(f"--{name}", value)
    return Line(values.config, path, own_values, fit_to_steps(values.config, _overrides(argv), path))


def fit_to_steps(config: ConfigDict, overrides: Sequence[str], path: str) -> tuple[str, ...]:
    """Cut what a config file says for more steps than the command line takes; returns a warning for each change.

    What is written beside train.steps, in the file or on the command line, is left to be refused.
    """
    written = config.to_dict()
    train, optimizer = (written.get(name) for name in ("train", "optimizer"))
    if "train.steps" not in overrides or not isinstance(train, dict) or not isinstance(optimizer, dict):
        return ()
    steps, warmup, traced = train.get("steps"), optimizer.get("warmup_steps"), train.get("profile_steps")
    warnings = []
    if "optimizer.warmup_steps" not in overrides and _are_whole(steps, warmup) and 1 <= steps <= warmup:
        config.optimizer.warmup_steps = steps // 10
        warnings.append(
            f"warning: optimizer.warmup_steps={warmup} of {path} is not below --config.train.steps={steps}; this run "
            f"warms up for {steps // 10}, or as --config.optimizer.warmup_steps says"
        )
    traces = STEP_RANGE.fullmatch(traced) if isinstance(traced, str) else None
    if "train.profile_steps" not in overrides and traces and _are_whole(steps) and 1 <= steps < int(traces[2]):
        config.train.profile_steps = left = f"{traces[1]}:{steps}" if int(traces[1]) <= steps else ""
        warnings.append(
            f"warning: train.profile_steps={traced!r} of {path} goes beyond --config.train.steps={steps}; this run "
            f"traces {left or 'no steps'}, or as --config.train.profile_steps says"
        )
    return tuple(warnings)


def written(argv: Sequence[str], flag: str) -> str | None:
    """What is written for a flag, as --flag=value or --flag value."""
    for at, arg in enumerate(argv[1:], 1):
        name, equals, value = arg.partition("=")
        if name in (f"--{flag}", f"-{flag}"):
            return value if equals else next(iter(argv[at + 1 :]), None)
    return None


def read_secs(flag: str, text: str) -> float:
    """A time such as 3h, 90m, 1h30m, 45s or a number of seconds.

    >>> [read_secs("--max-runtime", text) for text in ("1h30m", "90m", "7.5")]
    [5400.0, 5400.0, 7.5]
    """
    found = re.fullmatch(r"(?=.)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text)
    secs = sum(float(part or 0) * unit for part, unit in zip(found.groups(), (3600, 60, 1))) if found else 0.0
    if not secs:
        raise ConfigError(
            f"{flag}={quoted(text)} is no time; write it as 3h, 90m, 1h30m, 45s or a number of seconds above 0"
        )
    return secs


def usage(about: str, line: str, own: Mapping[str, Flag], *, names_config: bool = True) -> str:
    """What --help prints: what a program does, with examples, and its flags; `about` is its docstring."""
    config = {"config=FILE": CONFIG_MEANING} if names_config else {}
    meanings = config | {"config.SECTION.KEY=VALUE": KEY_MEANING} | {name: flag.meaning for name, flag in own.items()}
    return help_text(about, line, meanings | HELP)


def config_keys() -> str:
    """What --help-config prints: every key of a config with its default and meaning."""
    parts = ("\n".join([f"  # {about(section)}", *key_lines(section, "  --config")]) for section in SECTIONS.values())
    return "Keys of a config, with their defaults:\n\n" + "\n\n".join(parts)


def with_likely_vocab(settings: Settings) -> Settings:
    """Settings with the vocab that a run would take from its tokenizer, though no text is read."""
    settings = with_vocab_of_source(settings)
    return settings if settings.model.vocab else with_vocab(settings, likely_entries(settings.data))


def likely_entries(data: DataConfig) -> int:
    """The entries of the tokenizer that a run would use: a bpe that is yet to be trained has all that it may have."""
    if data.source != "prepared" and data.tokenizer in (AUTO, "bytes", "bpe"):
        return data.bpe_vocab if data.tokenizer == "bpe" else SMALLEST_BPE_VOCAB
    file = data.path if data.source == "prepared" else data.tokenizer
    try:
        return load_tokenizer(file).vocab
    except DataError as error:
        raise ConfigError(
            f"model.vocab=0 takes that of the tokenizer {quoted(file)}, which cannot be read; "
            "make it readable, or give the number, as in --config.model.vocab=32000"
        ) from error


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
            raise ConfigError(f"unknown key --config.{shown(name)}; {nearest(key, known)}")
    else:
        raise ConfigError(f"unknown key --config.{shown(name)}; did you mean --config.{nearest_key(name)}?")


def nearest_key(word: str) -> str:
    """The key of all configs, as section.key, that somebody may have meant.

    >>> [nearest_key(word) for word in ("lr", "steps", "messh.tp", "d_modle")]
    ['optimizer.learning_rate', 'train.steps', 'mesh.tp', 'model.d_model']
    """
    keys = [f"{section}.{field.name}" for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)]
    word = word[:QUOTED_LETTERS]
    last = word.split(".")[-1]

    def likeness(key: str) -> float:
        name = key.split(".")[1]
        initials = "".join(part[0] for part in name.split("_"))
        parts = (difflib.SequenceMatcher(None, a, b).ratio() for a, b in ((word, key), (last, name)))
        return max(*parts, 0.95 * (last == initials))

    return max(keys, key=likeness)


def known_configs() -> list[str]:
    """The configs that come with the repository, as they are written from the folder that one is in."""
    folder = os.path.relpath(CONFIGS) if CONFIGS.is_relative_to(Path.cwd()) else str(CONFIGS)
    return [os.path.normpath(f"{folder}/{file.name}") for file in sorted(CONFIGS.glob("*.py")) if file.name != SAVED]


def _name_config(argv: list[str]) -> tuple[list[str], str]:
    """The command line with a --config that ml_collections can load, and the file that was named."""
    path = written(argv, "config")
    if path is None:
        folder = written(argv, "workdir")
        said = "" if folder is None else f", and --workdir={shown(folder)} holds no run to go on with"
        raise ConfigError(f"--config is missing{said}; use one of {', '.join(known_configs())}")
    check_local("--config", path)
    file = Path(path.split(":")[0])
    if not file.is_file():
        raise ConfigError(f"--config={shown(path)} {_instead_of(file)}")
    if path.endswith(".json"):
        loader = f"{CONFIGS / SAVED}:{path}"
        argv = [loader if arg == path else arg.replace(f"config={path}", f"config={loader}", 1) for arg in argv]
    return argv, path


def _are_whole(*values: Any) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _instead_of(file: Path) -> str:
    """What is wrong with a config that is no file, and what would be right in the folder that one is in."""
    if file.is_dir():
        saved = file / "config.json"
        return f"is a folder; name a file in it{f', as {str(saved)!r}' if saved.is_file() else ''}"
    known = {Path(path).name: path for path in known_configs()}
    close = difflib.get_close_matches(file.name[:QUOTED_LETTERS], known, n=1)
    lead = f"did you mean {known[close[0]]!r}? Known" if close else "known"
    if Path.cwd() == CONFIGS.parent:
        return f"does not exist; {lead}: {', '.join(known.values())}"
    where = "" if file.is_absolute() else f" in {Path.cwd()}"
    return f"does not exist{where}; {lead} in {CONFIGS}: {', '.join(known)}"


def _overrides(argv: Sequence[str]) -> list[str]:
    return [m.group(1) for arg in argv[1:] if (m := re.match(r"--?config\.([^=]*)", arg))]


def _define(name: str, flag: Flag, values: flags.FlagValues) -> None:
    if flag.choices:
        flags.DEFINE_enum(name, flag.default, flag.choices, flag.meaning, flag_values=values)
        return
    define = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float}
    define.get(type(flag.default), flags.DEFINE_string)(name, flag.default, flag.meaning, flag_values=values)


def _read(values: flags.FlagValues, argv: Sequence[str], path: str, known: Sequence[str]) -> list[str]:
    """Let absl read the flags; returns what is no flag."""
    try:
        return values(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        raise ConfigError(f"unknown flag --{shown(error.flagname)}; {nearest(error.flagname, known)}") from error
    except flags.IllegalFlagValueError as error:
        raise ConfigError(_illegal(str(error), path)) from error
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename).name == Path(path.split(":")[0]).name]
        raise ConfigError(_in_file(path, lines, f"{type(error).__name__}: {error}")) from error


def _in_file(path: str, lines: Sequence[str | int | None], how: str) -> str:
    """`lines` are those of the file that were running, the innermost last."""
    where = f", line {lines[-1]}" if lines else ""
    how = " ".join(how.split())
    return f"{path}{where}: {how[:ERROR_LETTERS]}{'…' if len(how) > ERROR_LETTERS else ''}"


def _illegal(message: str, path: str) -> str:
    """Absl's words about a value, or ours where the value is a config's; it raises what a config raises, too."""
    _, raised, frames = message.partition("Error whilst parsing config file:")
    if raised:
        lines = re.findall(rf'{re.escape(Path(path.split(":")[0]).name)}", line (\d+)', frames)
        return _in_file(path, lines, frames.strip().splitlines()[-1])
    found = re.match(r"flag --(config\.(\w+)\.(\w+)|[\w-]+)=(.*): (.*)", message, re.DOTALL)
    if not found:
        return message
    flag, section, key, value, how = found.groups()
    if not section:
        return f"flag --{flag}={shown(value)}: {how}"
    value = re.split(": ", value, maxsplit=1)[0]  # what follows is absl's, and may repeat the value
    return f"--{flag}={shown(value)} must be {KINDS[get_type_hints(SECTIONS[section])[key]]}"


def _stray(argument: str) -> str:
    word, equals, value = argument.lstrip("-").removeprefix("config.").partition("=")
    meant = f"--config.{nearest_key(word)}{equals}{shown(value)}"
    how = "Settings are written --config.<section>.<key>=<value>"
    return f"stray argument {quoted(argument)}; did you mean {meant}? {how}"
