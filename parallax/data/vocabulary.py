"""Determines a run's tokenizer and the vocab of its model if the config leaves them open."""

import dataclasses
from pathlib import Path

from parallax.checkpoint.steps import check_steps, complete_steps, read_manifest
from parallax.config.earlier import of_today
from parallax.config.sections import AUTO, SMALLEST_BPE_VOCAB, DataConfig
from parallax.config.settings import Settings, read_settings
from parallax.data.tokenizer import TOKENIZER_FILE, Bytes, Tokenizer, load_tokenizer, made_by
from parallax.runtime.errors import ConfigError, DataError, quoted
from parallax.runtime.run_files import RunFiles

# Matrix units work on multiples of 128, and such a vocab divides over any usual number of devices.
VOCAB_MULTIPLE = 128
LEFT_OPEN = {"vocab": 0, "vocab_multiple": 1}  # values of model keys that are replaced by those of imported weights


def with_tokenizer(settings: Settings, run: Path) -> Settings:
    """Settings with data.tokenizer "auto" resolved from the run or from train.init_from.

    A resumed run keeps its tokenizer; a fresh one takes that of the run whose weights it starts from.
    """
    origin = _origin(settings, run)
    if settings.data.tokenizer != AUTO or origin is None:
        return settings
    return read_settings(settings, data={"tokenizer": _tokenizer_of(origin.checkpoints)})


def tokenizer_of_step(checkpoints: Path, step: int) -> Tokenizer:
    """The tokenizer that a step carries, with the end of documents that it had for the run."""
    return made_by(load_tokenizer(checkpoints / str(step)), _fingerprint_of(checkpoints, step))


def known_fingerprint(settings: Settings, run: Path) -> str:
    """The fingerprint of the tokenizer of this run's newest step, or of the weights it starts from; "" without both."""
    origin = _origin(settings, run)
    valid = check_steps(origin.checkpoints).valid if origin else []
    return _fingerprint_of(origin.checkpoints, valid[0]) if valid else ""


def _fingerprint_of(checkpoints: Path, step: int) -> str:
    found = read_manifest(checkpoints, step)["settings"].get("corpus", {}).get("tokenizer")
    return found if isinstance(found, str) else ""


def with_vocab_of_source(settings: Settings, run: Path | None = None) -> Settings:
    """Settings in which model.vocab 0 is replaced by the vocab of the weights in train.init_from, with their padding.

    A resumed run has its own vocab and does not need those weights; whether it fits is checked when it is resumed.

    Raises:
        ConfigError: the vocab is different.
    """
    source, here = settings.train.init_from, settings.model.vocab
    origin = _origin(settings, run) if source else None
    if origin is None or (here and origin.path == run):
        return settings
    valid = check_steps(origin.checkpoints).valid
    if not valid:
        return settings  # loading reports that all are damaged
    saved = of_today(read_manifest(origin.checkpoints, valid[0])["settings"])[0].get("model", {})
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


def with_vocab(settings: Settings, entries: int) -> Settings:
    """Settings in which model.vocab 0 is replaced by the next multiple of 128 that holds all entries, or by the number
    of entries if model.vocab_multiple pads them."""
    padded = settings.model.vocab_multiple > 1
    rounded = entries if padded else -(-entries // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return read_settings(settings, model={"vocab": settings.model.vocab or rounded})


def with_likely_vocab(settings: Settings) -> Settings:
    """Settings with the vocab that a run would take from its tokenizer, without reading text."""
    settings = with_vocab_of_source(settings)
    return settings if settings.model.vocab else with_vocab(settings, likely_entries(settings.data))


def likely_entries(data: DataConfig) -> int:
    """Number of entries of the tokenizer that a run would use; an untrained bpe counts with its maximum."""
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


def _origin(settings: Settings, run: Path | None) -> RunFiles | None:
    """The run that determines it: this one if it has a checkpoint, else that of its first weights; None without
    either."""
    known = (RunFiles(at) for at in (run, settings.train.init_from) if at)
    return next((files for files in known if complete_steps(files.checkpoints)), None)


def _tokenizer_of(checkpoints: Path) -> str:
    """The value for data.tokenizer: the tokenizer of the newest readable step, since loading skips damaged ones."""
    steps = sorted(complete_steps(checkpoints), reverse=True)
    for step in steps:
        file = checkpoints / str(step) / TOKENIZER_FILE
        try:
            return Bytes.name if load_tokenizer(file).name == Bytes.name else str(file)
        except DataError:
            if step == steps[-1]:
                raise
    raise DataError(f"{checkpoints} has no checkpoint")
