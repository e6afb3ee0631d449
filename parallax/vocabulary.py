"""Which tokenizer a run reads with, and how many entries its model has, where the config leaves that open."""

import dataclasses
from pathlib import Path

from parallax.checkpoint import complete_steps, read_manifest
from parallax.data.config import AUTO
from parallax.errors import ConfigError
from parallax.runfiles import RunFiles
from parallax.settings import Settings
from parallax.tokenizer import FILE_NAME, Bytes, load


def with_tokenizer(settings: Settings, run: Path) -> Settings:
    """Settings whose data.tokenizer says which one it is, where "auto" follows from the run or from train.init_from.

    A run that goes on keeps the one that it has; a fresh one takes that of the run whose weights it starts from.
    """
    origin = _origin(settings, run)
    if settings.data.tokenizer != AUTO or origin is None:
        return settings
    file = origin.checkpoints / str(max(complete_steps(origin.checkpoints))) / FILE_NAME
    name = Bytes.name if load(file).name == Bytes.name else str(file)
    return dataclasses.replace(settings, data=dataclasses.replace(settings.data, tokenizer=name))


def with_vocab_of_source(settings: Settings, run: Path | None = None) -> Settings:
    """Settings whose model.vocab, if it is 0, is that of the weights in train.init_from.

    Raises:
        ConfigError: it is another.
    """
    source = settings.train.init_from
    known = [at for at in (source, run) if source and at and complete_steps(RunFiles(at).checkpoints)]
    if not known:
        return settings
    folder = RunFiles(known[0]).checkpoints
    there = read_manifest(folder, max(complete_steps(folder)))["settings"].get("model", {}).get("vocab")
    here = settings.model.vocab
    if type(there) is not int or here == there:
        return settings
    if here:
        raise ConfigError(
            f"model.vocab={here}, but the weights of train.init_from={source!r} have model.vocab={there}; "
            f"use {there}, or 0 to take it from there"
        )
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, vocab=there))


def _origin(settings: Settings, run: Path) -> RunFiles | None:
    """The run that decides: this one if it has a checkpoint, or that of its first weights; None where neither is."""
    known = (RunFiles(at) for at in (run, settings.train.init_from) if at)
    return next((files for files in known if complete_steps(files.checkpoints)), None)
