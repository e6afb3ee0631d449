"""Which tokenizer a run reads with, and how many entries its model has, where the config leaves that open."""

import dataclasses
from pathlib import Path

from parallax.checkpoint import complete_steps, examine, read_manifest
from parallax.config.sections import AUTO
from parallax.config.settings import Settings, with_added
from parallax.data.tokenizer import TOKENIZER_FILE, Bytes, load_tokenizer
from parallax.runtime.errors import ConfigError, DataError
from parallax.runtime.run_files import RunFiles

LEFT_OPEN = {"vocab": 0, "vocab_multiple": 1}  # keys of a model that follow from first weights where they are so


def with_tokenizer(settings: Settings, run: Path) -> Settings:
    """Settings whose data.tokenizer says which one it is, where "auto" follows from the run or from train.init_from.

    A run that goes on keeps the one that it has; a fresh one takes that of the run whose weights it starts from.
    """
    origin = _origin(settings, run)
    if settings.data.tokenizer != AUTO or origin is None:
        return settings
    name = _tokenizer_of(origin.checkpoints)
    return dataclasses.replace(settings, data=dataclasses.replace(settings.data, tokenizer=name))


def with_vocab_of_source(settings: Settings, run: Path | None = None) -> Settings:
    """Settings whose model.vocab, if it is 0, is that of the weights in train.init_from, and their padding.

    A run that goes on has its own, whatever has become of those weights; whether it fits is judged when it is resumed.

    Raises:
        ConfigError: it is another.
    """
    source = settings.train.init_from
    known = [at for at in (run, source) if source and at and complete_steps(RunFiles(at).checkpoints)]
    here = settings.model.vocab
    if not known or (here and known[0] == run):
        return settings
    folder = RunFiles(known[0]).checkpoints
    valid = examine(folder).valid
    if not valid:
        return settings  # loading says how all of them are damaged
    saved = with_added(read_manifest(folder, valid[0])["settings"]).get("model", {})
    there = {key: saved.get(key) for key in LEFT_OPEN}
    if not all(type(value) is int for value in there.values()):
        return settings
    model, theirs = settings.model, dataclasses.replace(settings.model, **there)
    if here and (here, model.padded_vocab) == (theirs.vocab, theirs.padded_vocab):
        return settings
    for key, value in there.items():
        written = getattr(model, key)
        if written != value and (here or written != LEFT_OPEN[key]):
            raise ConfigError(
                f"model.{key}={written}, but the weights of train.init_from={source!r} have model.{key}={value}; "
                f"use {value}, or {'0' if key == 'vocab' else 'model.vocab=0 and 1 here'} to take it from there"
            )
    return dataclasses.replace(settings, model=theirs)


def _origin(settings: Settings, run: Path) -> RunFiles | None:
    """The run that decides: this one if it has a checkpoint, or that of its first weights; None where neither is."""
    known = (RunFiles(at) for at in (run, settings.train.init_from) if at)
    return next((files for files in known if complete_steps(files.checkpoints)), None)


def _tokenizer_of(checkpoints: Path) -> str:
    """As data.tokenizer names it: that of the newest step which can be read, as loading passes over damaged ones."""
    steps = sorted(complete_steps(checkpoints), reverse=True)
    for step in steps:
        file = checkpoints / str(step) / TOKENIZER_FILE
        try:
            return Bytes.name if load_tokenizer(file).name == Bytes.name else str(file)
        except DataError:
            if step == steps[-1]:
                raise
    raise DataError(f"{checkpoints} has no checkpoint")
