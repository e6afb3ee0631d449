"""A run's settings: one frozen dataclass for each section of a config, checked as they are read."""

import dataclasses
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, get_type_hints

from parallax.config.sections import (
    CheckpointConfig,
    DataConfig,
    DataParallelConfig,
    DistributedConfig,
    FsdpConfig,
    GuardConfig,
    LayoutConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    SampleConfig,
    TrainConfig,
)
from parallax.runtime.errors import CheckpointError, ConfigError, nearest, quoted, shown
from parallax.runtime.files import read_object

# Matrix units work on multiples of 128, and a vocab that is one can be cut over any usual number of devices.
VOCAB_MULTIPLE = 128


@dataclasses.dataclass(frozen=True, repr=False)
class Settings:
    """All sections of a config; it prints as a section a line."""

    mesh: MeshConfig
    model: ModelConfig
    layout: LayoutConfig
    pipeline: PipelineConfig
    data_parallel: DataParallelConfig
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
# Keys that came after 0.1.0 had runs, with what these did.
ADDED = {
    name: {field.name: field.default for field in dataclasses.fields(kind) if field.metadata["key"].added}
    for name, kind in SECTIONS.items()
}


def default_settings() -> Settings:
    """The settings of configs/base.py."""
    return Settings(**{name: section() for name, section in SECTIONS.items()})


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
    known = {name: {**ADDED[name], **sections[name]} for name in ADDED if isinstance(sections.get(name), dict)}
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


def _read_section(name: str, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}={quoted(values)} must be a section; write config.{name}.<key> = ...")
    fields = {field.name: field for field in dataclasses.fields(SECTIONS[name])}
    _check_names(f"{name}.", values, fields)
    read = {key: field.metadata["key"].read(f"{name}.{key}", values[key], field.type) for key, field in fields.items()}
    return SECTIONS[name](**read)


def _check_names(prefix: str, written: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name in written:
        if name not in known:
            raise ConfigError(f"unknown key {prefix}{shown(str(name))}; {nearest(str(name), known)}")
    missing = [f"{prefix}{name}" for name in known if name not in written]
    if missing:
        raise ConfigError(f"the config has no {', '.join(missing)}; start from get_config() of configs/base.py")
