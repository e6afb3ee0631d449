"""Settings of a run: one frozen dataclass for each section of a config, checked when they are read."""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

from parallax.config import sections
from parallax.config.earlier import of_today, renamed
from parallax.config.sections import SECTIONS, STEP_RANGE
from parallax.display.html import facts_html
from parallax.errors import LONGEST_PATH, CheckpointError, ConfigError, errors_as, nearest, quoted, shown, tell
from parallax.storage.files import OBJECT_BYTES, read_object
from parallax.user_code import UserCode, imported_code, names_code, saved_code, settings_by_name, with_settings

PRINTED_WIDTH = 100  # columns of printed settings
FINGERPRINT_DIGITS = 12  # in messages: as many tell two corpora apart
# Keys that the saved config of a run does not decide.
NOT_SAVED = tuple(f"{name}.{key}" for name, section in SECTIONS.items() for key in sorted(section.not_saved))
KEYS = {f"{name}.{field.name}": field.metadata["key"] for name, kind in SECTIONS.items() for field in fields(kind)}
# Keys that may name files, with their values that name none.
PATHS = {name: ("", *key.choices) for name, key in KEYS.items() if key.path}
# Keys that may name code of a user's own, with the arguments with which it is called.
CODE = {name: key.code for name, key in KEYS.items() if key.code}
# Keys that only layers of experts read: the meaning of each says so.
EXPERT_KEYS = tuple(name for name, key in KEYS.items() if key.meaning.startswith("moe: "))
NOT_OF_A_MODEL = ("optimizer.", "data.")  # sections whose code a model does not read
NO_CODE: Mapping[str, Any] = MappingProxyType({})
# What commands read of the keys of both kinds: all, what a model needs, or its data.
OF_A_RUN = (*NOT_SAVED, *(name for name in PATHS if name not in NOT_SAVED))
OF_A_MODEL = ("train.compile_cache",)
OF_DATA = ("data.cache", "data.path", "data.mixture", "data.tokenizer")


@dataclass(frozen=True, repr=False)
class Settings:
    """All sections of a config; it prints each in lines of its own."""

    mesh: sections.MeshConfig
    model: sections.ModelConfig
    layout: sections.LayoutConfig
    pipeline: sections.PipelineConfig
    data_parallel: sections.DataParallelConfig
    fsdp: sections.FsdpConfig
    loss: sections.LossConfig
    optimizer: sections.OptimizerConfig
    guard: sections.GuardConfig
    data: sections.DataConfig
    train: sections.TrainConfig
    checkpoint: sections.CheckpointConfig
    distributed: sections.DistributedConfig
    sample: sections.SampleConfig

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested dicts of JSON values; `read_settings` reads them back."""
        return asdict(self)

    def __repr__(self) -> str:
        return "\n".join(_lines(self.to_dict()))

    def _repr_html_(self) -> str:
        key = '<span style="white-space:nowrap">{}=<b>{}</b></span>'
        return facts_html(
            (name, " &ensp; ".join(key.format(k, escape(repr(v))) for k, v in keys.items()))
            for name, keys in self.to_dict().items()
        )


def default_settings() -> Settings:
    """The settings of configs/base.py."""
    return Settings(**{name: section() for name, section in SECTIONS.items()})


def read_settings(config: Any, *, code: Mapping[str, Any] = NO_CODE, **changes: Mapping[str, Any]) -> Settings:
    """Build settings from a config: nested dicts, or an object with `to_dict()`, as a ConfigDict or Settings.

    `changes` are other values of keys by section, as mesh={"tp": 4}; `code` is as in `with_code`. ConfigError names
    unknown, missing and mistyped keys. A warning on stderr names keys of earlier versions and their current names. Code
    that a config names is imported; in its place the value may be the function or class.

    >>> from configs.base import get_config
    >>> read_settings(get_config(), mesh={"tp": 4}, model={"layers": 8}).model.layers
    8
    """
    if not isinstance(config, Mapping):
        if not hasattr(config, "to_dict"):
            raise ConfigError(f"{quoted(config)} is not a config; start from get_config() of configs/base.py")
        config = config.to_dict()
    written = dict(config)
    for name, keys in changes.items():
        there = written.get(name)
        written[name] = {**there, **keys} if isinstance(there, Mapping) and isinstance(keys, Mapping) else keys
    written, said = renamed(written)
    for text in said:
        tell(f"warning: {text}", sys.stderr)
    _check_names("", written, SECTIONS)
    # The order of a mixture's sources matters: one without code stays as it is written.
    named = [pair for pair in key_values(written, CODE) if pair[0] != "data.mixture" or names_code(pair[1])]
    codes = {name: imported_code(name, value, CODE[name]) for name, value in named}
    settings = Settings(**{name: _read_section(name, keys) for name, keys in _replaced(written, codes).items()})
    return with_code(settings, code) if code else settings


def with_code(settings: Settings, code: Mapping[str, Any]) -> Settings:
    """Settings whose keys `code` names, as "model.mlp", have these functions or classes.

    Raises ConfigError for keys that cannot be code.
    """
    for name in code:
        if name not in CODE:
            raise ConfigError(f"code={{{name!r}: ...}} is not a key that may be code; {nearest(name, CODE)}")
    there = settings.to_dict()
    for name, value in key_values(there, [name for name in code if isinstance(code[name], Mapping)]):
        code = {**code, name: with_settings(name, code[name], settings_by_name(name, value))}
    return read_settings(_replaced(there, code)) if code else settings


def code_of(settings: Settings) -> dict[str, UserCode]:
    """The code of a user's own that these settings name, by key."""
    return {name: value for name, value in key_values(settings.to_dict(), CODE) if isinstance(value, UserCode)}


def fit_to_steps(sections: dict[str, Any], written: Collection[str]) -> Iterator[str]:
    """Adapt values of a config file to a smaller number of steps on the command line, with a warning for each change.

    Only if train.steps is among the keys `written` there. Values written together with it, in the file or on the
    command line, are not changed and may be refused.
    """
    train, optimizer = sections.get("train"), sections.get("optimizer")
    if "train.steps" not in written or train["steps"] < 1 or not isinstance(optimizer, dict):
        return
    steps, warmup, traced = train["steps"], optimizer.get("warmup_steps"), train.get("profile_steps")
    if "optimizer.warmup_steps" not in written and isinstance(warmup, int) and steps <= warmup:
        optimizer["warmup_steps"] = left = steps // 10
        yield f"warning: optimizer.warmup_steps={warmup} is not below train.steps={steps}; this run takes {left}"
    traces = STEP_RANGE.fullmatch(traced) if isinstance(traced, str) else None
    if "train.profile_steps" not in written and traces and steps < int(traces[2]):
        train["profile_steps"] = left = f"{traces[1]}:{steps}" if int(traces[1]) <= steps else ""
        yield (
            f"warning: train.profile_steps={traced!r} goes beyond train.steps={steps}; this run traces {left or 'none'}"
        )


def check_settings(settings: Any) -> None:
    """Raise ConfigError unless these are Settings, as for a config that was not read yet."""
    if not isinstance(settings, Settings):
        kind = type(settings).__name__
        raise ConfigError(f"a {kind} is given where settings are needed; make them with px.read_settings(config)")


def check_has_experts(settings: Settings) -> None:
    """Raise ConfigError for a key of experts if no layer has any: who forgets model.layers_of would train a dense
    model. Classes of the user's may read any key."""
    model = settings.model
    if model.has_mixtures or model.names_layers_of_code:
        return
    for key in EXPERT_KEYS:
        section, name = key.split(".")
        written, default = getattr(getattr(settings, section), name), default_value(key)
        if written != default:
            raise ConfigError(
                f"{key}={written!r} does nothing with model.layers_of={quoted(model.layers_of)}, which has no layer of "
                f"experts; use {name}={default!r}, or layers_of='moe*{model.layers}'."
            )


def load_settings(run: Path) -> Settings:
    """The settings with which a run folder was last trained, as far as its config decides them: see `load_saved`."""
    path = run / "config.json"
    saved, left_out = load_saved(path)
    tell_saved(path, saved, left_out, OF_A_MODEL)
    return read_settings(saved)


def load_saved(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The saved config of a run, with the current keys, and by name the values that it does not decide.

    The folder may come from somebody else. So keys of `NOT_SAVED` have their defaults, other values are left out, and
    code that it names is not imported.
    A line on stderr lists what an earlier version wrote otherwise.
    """
    saved, said = of_today(load_json(path))
    if said:
        tell(f"{path} is of an earlier version: {'; '.join(said)}", sys.stderr)
    left_out = {name: value for name, value in key_values(saved, NOT_SAVED) if value != default_value(name)}
    codes = {name: saved_code(name, value) for name, value in key_values(saved, CODE)}
    return _replaced(saved, {**codes, **{name: default_value(name) for name in left_out}}), left_out


def tell_saved(path: Path, saved: Mapping[str, Any], left_out: Mapping[str, Any], reads: Collection[str]) -> None:
    """Say on stderr, of the keys that a command reads, which a saved config does not decide, and which files it
    names."""
    if texts := [f"{name}={quoted(left_out[name], 150)}" for name in reads if name in left_out]:
        advice = "a run's folder may come from somebody else; write it on the command line, or in a config of your own"
        tell(f"{path} does not decide {' and '.join(texts)}: {advice}", sys.stderr)
    named = key_values(saved, [name for name in reads if name in PATHS])
    if texts := [f"{name}={quoted(value, LONGEST_PATH)}" for name, value in named if value not in PATHS[name]]:
        tell(f"{path} names files, which are only read, as data: {', '.join(texts)}", sys.stderr)


def default_value(name: str) -> Any:
    """The default of a key, as section.key."""
    section, _, key = name.partition(".")
    return getattr(SECTIONS[section], key)


def key_values(sections: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Keys, as section.key, that are there, with their values."""
    for name in names:
        section, _, key = name.partition(".")
        keys = sections.get(section)
        if isinstance(keys, Mapping) and key in keys:
            yield name, keys[key]


def _replaced(sections: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The sections with other values of keys, by name as section.key."""
    replaced = dict(sections)
    for name, value in values.items():
        section, _, key = name.partition(".")
        replaced[section] = {**replaced[section], key: value}
    return replaced


def load_json(path: Path, most: int = OBJECT_BYTES) -> dict[str, Any]:
    """A JSON object that a run has saved, such as its config."""
    missing = f"{path} is missing; is {path.parent} the folder of a run?"
    with errors_as(
        CheckpointError, f"{path} cannot be read: ", "; restore the run's own file", ValueError, missing=missing
    ):
        return read_object(path, most=most)


def differences(settings: Settings) -> list[str]:
    """Differences from configs/base.py, one section per line, as printed when a run starts."""
    base = default_settings().to_dict()
    return _lines(
        {
            name: {key: value for key, value in keys.items() if value != base[name][key]}
            for name, keys in settings.to_dict().items()
        }
    )


def _lines(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Keys and values by section, one below the other."""
    width = max(map(len, sections))
    return [
        line
        for name, keys in sections.items()
        for line in _wrapped(f"{name:{width}}", [f"{key}={value!r}" for key, value in keys.items()])
    ]


def _wrapped(head: str, words: Sequence[str]) -> Iterator[str]:
    """The head and the words, in lines of at most PRINTED_WIDTH columns unless a single word is longer."""
    line = head
    for word in words:
        if line != head and len(line) + 2 + len(word) > PRINTED_WIDTH:
            yield line
            line = head = " " * len(head)
        line += f"  {word}"
    if words:
        yield line


def _read_section(name: str, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}={quoted(values)} must be a section; write config.{name}.<key> = ...")
    _check_names(f"{name}.", values, SECTIONS[name].__dataclass_fields__)
    return SECTIONS[name](**values)


def _check_names(prefix: str, written: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name in written:
        if name not in known:
            raise ConfigError(f"unknown key {prefix}{shown(str(name))}; {nearest(str(name), known)}")
    missing = [f"{prefix}{name}" for name in known if name not in written]
    if missing:
        raise ConfigError(f"the config has no {', '.join(missing)}; start from get_config() of configs/base.py")


def compare_settings(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, each with the stored and the wanted value.

    >>> compare_settings({"model": {"layers": 4, "heads": 8}}, {"model": {"layers": 6, "heads": 8}})
    {'model.layers': (4, 6)}
    """
    differing = {}
    for key in sorted({*stored, *wanted}):
        there, here = stored.get(key), wanted.get(key)
        if isinstance(there, Mapping | None) and isinstance(here, Mapping | None):
            inner = compare_settings(there or {}, here or {})
            differing |= {f"{key}.{name}": values for name, values in inner.items()}
        elif there != here:
            differing[key] = there, here
    return differing


def difference_text(changed: Mapping[str, tuple[Any, Any]], between: str = ", ") -> str:
    """What `compare_settings` has found, for a message.

    >>> difference_text({"model.layers": (4, 6), "corpus.fingerprint": ("0" * 64, "1" * 64)})
    "model.layers=4 there, 6 here, corpus.fingerprint='000000000000' there, '111111111111' here"
    """

    def short(key: str, value: Any) -> Any:
        is_hash = isinstance(value, str) and key.startswith(("corpus.", "user_code."))
        return value[:FINGERPRINT_DIGITS] if is_hash else value

    shortened = {key: [short(key, value) for value in values] for key, values in changed.items()}
    return between.join(f"{key}={there!r} there, {here!r} here" for key, (there, here) in shortened.items())
