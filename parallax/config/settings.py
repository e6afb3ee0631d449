"""A run's settings: one frozen dataclass for each section of a config, checked as they are read."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, get_type_hints

from parallax.checkpoint.config import CheckpointConfig
from parallax.data.config import DataConfig
from parallax.inference.sample import SampleConfig
from parallax.model.loss import LossConfig
from parallax.model.transformer import LayoutConfig, ModelConfig
from parallax.pipeline import FsdpConfig, PipelineConfig
from parallax.runtime.errors import LARGEST_INT32, CheckpointError, ConfigError, check_local, nearest, quoted, shown
from parallax.runtime.files import read_object
from parallax.runtime.multihost.config import DistributedConfig
from parallax.sharding.mesh import AXES, MeshConfig
from parallax.training.guard import GuardConfig
from parallax.training.optimizer import OptimizerConfig

# Matrix units work on multiples of 128, and a vocab that is one can be cut over any usual number of devices.
VOCAB_MULTIPLE = 128
# The most that a whole number may be, by key or by section; what is far beyond any machine would only end in tables of
# schedules and layers that fill the memory, or in numbers that the devices' int32 does not hold.
LARGEST = {
    "mesh": 2**20,
    "mesh.simulate": 2**12,
    "model": 2**24,
    "model.layers": 2**14,
    "pipeline": 2**14,
    "data": 2**24,
    "data.seed": 2**63 - 1,
    "data.synthetic_tokens": 2**40,
    "sample.tokens": 2**20,
    # These say their own.
    "train.seed": 2**63 - 1,
    "sample.seed": 2**63 - 1,
}
STEP_RANGE = re.compile(r"([1-9]\d{0,9}):([1-9]\d{0,9})")
LARGEST_FLOAT32 = 3.4028234e38
AXIS_KEYS = [f"mesh.{axis}" for axis in AXES]  # may be -1
# Of POSIX's file systems; where a name is longer, asking whether there is such a file is an error.
PATH_KEYS = ("data.path", "data.cache", "data.tokenizer", "train.init_from", "train.compile_cache", "pipeline.schedule")
PATH_BYTES, NAME_BYTES = 4095, 255
# Keys that came after 0.1.0 had runs, with what these did.
ADDED = {"train": {"compile_cache": "auto"}, "model": {"vocab_multiple": 1, "sliding_window": 0}}
KINDS = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "True or False"}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long to train, and how often to log and evaluate; `configs/base.py` says what each field means."""

    steps: int
    seed: int
    init_from: str
    log_every_steps: int
    eval_every_steps: int
    eval_batches: int
    check_every: int
    tensorboard: bool
    wandb: str
    profile_steps: str
    stall_factor: float
    compile_cache: str

    def __post_init__(self):
        least_of = {"steps": 1, "seed": 0, "log_every_steps": 1, "eval_every_steps": 0, "eval_batches": 0}
        least_of |= {"check_every": 0}
        for key, least in least_of.items():
            if getattr(self, key) < least:
                raise ConfigError(f"train.{key}={getattr(self, key)} is too small; use {least} or more")
        if self.seed > LARGEST_INT32:
            raise ConfigError(f"train.seed={self.seed} is too large; use less than 2**31")
        if self.stall_factor and self.stall_factor < 1:
            raise ConfigError(f"train.stall_factor={self.stall_factor:g} must be 1 or more, or 0 for no watchdog")
        if not self.compile_cache:
            raise ConfigError("train.compile_cache='' names no folder; use 'auto', 'off' or a folder")
        profiled = self.profiled
        if profiled and profiled[-1] > self.steps:
            raise ConfigError(
                f"train.profile_steps={quoted(self.profile_steps)} ends at step {profiled[-1]}, but "
                f"train.steps={self.steps}; use steps of the run"
            )

    @property
    def profiled(self) -> range:
        """The steps that are traced; none where `profile_steps` is empty, ConfigError where it is no range."""
        if not self.profile_steps:
            return range(0)
        found = STEP_RANGE.fullmatch(self.profile_steps)
        if not found:
            raise ConfigError(
                f"train.profile_steps={quoted(self.profile_steps)} is no range of steps; write FIRST:LAST, counted "
                "from 1, as 20:25, or leave it empty"
            )
        first, last = map(int, found.groups())
        if last < first:
            raise ConfigError(
                f"train.profile_steps={quoted(self.profile_steps)} ends at {last}, before it begins at {first}; write "
                f"the smaller one first, as {last}:{first}"
            )
        return range(first, last + 1)


@dataclasses.dataclass(frozen=True, repr=False)
class Settings:
    """All sections of a config; it prints as a section a line."""

    mesh: MeshConfig
    model: ModelConfig
    layout: LayoutConfig
    pipeline: PipelineConfig
    fsdp: FsdpConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    guard: GuardConfig
    data: DataConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    distributed: DistributedConfig
    sample: SampleConfig

    def __post_init__(self):
        if self.checkpoint.keep_best and not self.train.eval_batches:
            raise ConfigError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} needs evaluations, but train.eval_batches="
                "0; use checkpoint.keep_best=0 or train.eval_batches=4"
            )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested dicts that JSON can hold; `read_settings` reads them back."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        width = max(map(len, SECTIONS))
        sections = self.to_dict().items()
        return "\n".join(
            f"{name:{width}}  {'  '.join(f'{k}={v!r}' for k, v in keys.items())}" for name, keys in sections
        )

    def _repr_html_(self) -> str:
        key = '<span style="white-space:nowrap">{}=<b>{}</b></span>'
        row = '<tr><th style="text-align:left">{}</th><td style="text-align:left">{}</td></tr>'
        sections = self.to_dict().items()
        cells = ((name, [key.format(k, escape(repr(v))) for k, v in keys.items()]) for name, keys in sections)
        return f"<table>{''.join(row.format(name, ' &ensp; '.join(keys)) for name, keys in cells)}</table>"


SECTIONS: dict[str, type] = get_type_hints(Settings)


def read_settings(config: Any, **changes: Mapping[str, Any]) -> Settings:
    """Make the dataclasses of a config: nested dicts, or what has them by `to_dict()`, as a ConfigDict or Settings.

    `changes` are keys of sections that differ, as mesh={"tp": 4}. ConfigError names unknown, missing and mistyped keys.

    >>> from configs.base import get_config
    >>> read_settings(get_config(), mesh={"tp": 4}, model={"layers": 8}).model.layers
    8
    """
    if not isinstance(config, Mapping):
        if not hasattr(config, "to_dict"):
            raise ConfigError(f"{quoted(config)} is no config; start from get_config() of configs/base.py")
        config = config.to_dict()
    config = dict(config)
    _check_names("", config, SECTIONS)
    _check_names("", {**config, **changes}, SECTIONS)
    for section, values in changes.items():
        config[section] = {**config[section], **values} if isinstance(values, Mapping) else values
    return Settings(**{name: _read_section(name, config[name]) for name in SECTIONS})


def load_settings(run: Path) -> Settings:
    """The settings with which a run folder was last trained."""
    return read_settings(load_saved(run / "config.json"))


def load_saved(path: Path) -> dict[str, Any]:
    """The config that a run has saved, with the keys that came later."""
    return with_added(load_json(path))


def with_added(sections: Mapping[str, Any]) -> dict[str, Any]:
    """A saved config with the keys that there were not yet when it was saved.

    >>> with_added({"train": {"steps": 8}})
    {'train': {'compile_cache': 'auto', 'steps': 8}}
    """
    known = {name: {**keys, **sections[name]} for name, keys in ADDED.items() if isinstance(sections.get(name), dict)}
    return {**sections, **known}


def load_json(path: Path) -> dict[str, Any]:
    """What a run has saved as a JSON object, such as its config."""
    try:
        return read_object(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; is {path.parent} the folder of a run?") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; put the run's own back") from error


def with_vocab(settings: Settings, entries: int) -> Settings:
    """Settings whose model.vocab is no longer 0, but the next multiple of 128 that holds all entries; or the entries
    themselves, where model.vocab_multiple says to what they are padded."""
    padded = settings.model.vocab_multiple > 1
    rounded = entries if padded else -(-entries // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    model = dataclasses.replace(settings.model, vocab=settings.model.vocab or rounded)
    return dataclasses.replace(settings, model=model)


def _read_section(section: str, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{section}={quoted(values)} must be a section; write config.{section}.<key> = ...")
    kinds = get_type_hints(SECTIONS[section])
    fields = {field.name: kinds[field.name] for field in dataclasses.fields(SECTIONS[section])}
    _check_names(f"{section}.", values, fields)
    return SECTIONS[section](**{key: _read(f"{section}.{key}", values[key], fields[key]) for key in fields})


def _check_names(prefix: str, written: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name in written:
        if name not in known:
            raise ConfigError(f"unknown key {prefix}{shown(str(name))}; {nearest(str(name), known)}")
    missing = [f"{prefix}{name}" for name in known if name not in written]
    if missing:
        raise ConfigError(f"the config has no {', '.join(missing)}; start from get_config() of configs/base.py")


def _read(key: str, value: Any, kind: type) -> Any:
    # bool is an int to Python, but layers=True is a mistake; a whole number may stand for a float.
    fits = isinstance(value, int | float if kind is float else kind) and (kind is bool) == isinstance(value, bool)
    if not fits:
        raise ConfigError(f"{key}={quoted(value)} is {_kind_of(value)}, but it must be {KINDS[kind]}")
    _CHECKS.get(kind, lambda *_: None)(key, value)
    return kind(value)


def _check_float(key: str, value: float) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value!r} is not finite; it must be {KINDS[float]}")
    if abs(value) > LARGEST_FLOAT32:  # before anything makes a float of a whole number
        raise ConfigError(f"{key}={quoted(value)} is more than a float32 holds; use {LARGEST_FLOAT32:.1e} or less")


def _check_int(key: str, value: int) -> None:
    most = LARGEST.get(key, LARGEST.get(key.split(".")[0], LARGEST_INT32))
    if value > most:
        raise ConfigError(f"{key}={quoted(value)} is too large; use {most} or less")
    if value < -most:
        raise ConfigError(
            f"{key}={quoted(value)} is too small; use {'1 or more, or -1' if key in AXIS_KEYS else '0 or more'}"
        )


def _check_text(key: str, value: str) -> None:
    # No file, no terminal and no JSON takes these.
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ConfigError(f"{key}={quoted(value)} holds a zero byte or half a surrogate pair, no text; leave it out")
    if key in PATH_KEYS:
        _check_path(key, value)


def _check_path(key: str, value: str) -> None:
    check_local(key, value)
    whole, name = len(value.encode()), max(len(part.encode()) for part in value.split("/"))
    if name > NAME_BYTES or whole > PATH_BYTES:
        raise ConfigError(
            f"{key}={quoted(value)} is too long for a path: it has {whole} bytes, its longest name {name}; "
            f"use at most {PATH_BYTES}, and {NAME_BYTES} in a name"
        )
    home = value.split("/")[0]
    if home.startswith("~") and os.path.expanduser(home) == home:
        raise ConfigError(f"{key}={quoted(value)} begins with the home of a user who is not known here; write it out")


_CHECKS = {float: _check_float, int: _check_int, str: _check_text}


def _kind_of(value: Any) -> str:
    return KINDS[type(value)] if type(value) in KINDS else type(value).__name__
