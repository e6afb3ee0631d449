"""Settings with nothing left open: what a config leaves to the devices, to a tokenizer or to weights is filled in."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax

from parallax.checkpoint.steps import check_steps, complete_steps, read_manifest
from parallax.config.earlier import of_today
from parallax.config.sections import AUTO, SMALLEST_BPE_VOCAB, DataConfig, DataParallelConfig
from parallax.config.settings import Settings, read_settings
from parallax.data.mixture import prepared_paths
from parallax.data.tokenizer import TOKENIZER_FILE, Bytes, Tokenizer, load_tokenizer
from parallax.errors import ConfigError, DataError, quoted
from parallax.model.kernels.choice import chosen_kernel
from parallax.sharding.mesh import resolve_sizes
from parallax.storage.run_files import RunFiles
from parallax.user_code import names_code

# Matrix units work on multiples of 128, and such a vocab divides over any usual number of devices.
VOCAB_MULTIPLE = 128
LEFT_OPEN = {"vocab": 0, "vocab_multiple": 1}  # values of model keys that are replaced by those of imported weights


class Devices(NamedTuple):
    """Devices to which settings are fitted; `topology` is the name of chips that need not be present."""

    count: int
    platform: str
    kind: str
    topology: str = ""

    @classmethod
    def here(cls) -> "Devices":
        """Those of all processes, which have started."""
        first = jax.devices()[0]
        return cls(jax.device_count(), first.platform, first.device_kind)


def resolve(
    settings: Settings,
    devices: Devices | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    run: Path | None = None,
) -> Settings:
    """The settings with a number for the vocab and, on `devices`, for each mesh axis, and with an attention kernel.

    Nothing else replaces settings, but `for_inference` those of a trained run. `tokenizer` is that of the data; without
    it, model.vocab 0 becomes what a run would probably have, and no text is read. `run` is the run's folder, whose
    checkpoints go before those of the run from which the weights come.

    Without devices, mesh axes of -1 and the kernel "auto" stay. So they do in a run's config.json, since its next start
    may have other devices; a model chooses its kernel from its mesh.

    Raises:
        ConfigError: the mesh does not fit the devices, or the vocab not the weights.
    """
    mesh, model = {}, vocab_of_weights(settings, run)
    if not (settings.model.vocab or model):
        entries = tokenizer.vocab if tokenizer else likely_entries(settings.data)
        # A vocab that model.vocab_multiple pads is that of the tokenizer.
        multiple = 1 if settings.model.vocab_multiple > 1 else VOCAB_MULTIPLE
        model = {"vocab": -(-entries // multiple) * multiple}
    if devices is not None:
        sizes = sizes_on(settings, devices)
        mesh = {**sizes, "simulate": devices.count if devices.platform == "cpu" else 0}
        model |= {"kernel": chosen_kernel(settings, sizes, devices.platform, devices.kind)}
    return read_settings(settings, mesh=mesh, model=model)


def in_largest_batches(settings: Settings) -> Settings:
    """The settings as if all batches of a run had the shape of the phase with most tokens in one, which needs most
    memory; of these the one with the longest rows."""
    largest = settings.data.largest
    if largest is settings.data:
        return settings
    # The vocab follows from the mixture, which has no part in a plan.
    return dataclasses.replace(resolve(settings), data=largest)


def sizes_on(settings: Settings, devices: Devices) -> dict[str, int]:
    """The sizes of the mesh's axes on these devices."""
    try:
        return resolve_sizes(settings.mesh, devices.count, simulated=not devices.topology)
    except ConfigError as error:
        if not devices.topology:
            raise
        raise ConfigError(f"{devices.topology} has {devices.count} devices: {error}") from error


def for_inference(settings: Settings) -> Settings:
    """The settings with which a trained model is read: without a schedule of training, which may need a certain number
    of stages, for rows of any length, which on every device only the kernel "xla" takes, for other hosts, and without a
    sharding policy of a user's own: it changes no number."""
    kernel = "xla" if settings.model.kernel == AUTO else settings.model.kernel
    pipeline, layout = {"schedule": "gpipe", "virtual": 1, "microbatches": 1}, {"exchange_hosts": 1}
    policy = DataParallelConfig.policy if names_code(settings.data_parallel.policy) else settings.data_parallel.policy
    others = {"layout": layout, "model": {"kernel": kernel}, "data_parallel": {"policy": policy}}
    return read_settings(settings, pipeline=pipeline, **others)


# ---- what weights and tokenizers decide


def run_tokenizer(settings: Settings, run: Path) -> str:
    """What data.tokenizer "auto" stands for: the tokenizer of the run, or that of its first weights; "auto" without
    both, and otherwise what is written.

    The file is that of a checkpoint, which a later one replaces, so a run's config.json never names it.
    """
    origin = _origin(settings, run)
    if settings.data.tokenizer != AUTO or origin is None:
        return settings.data.tokenizer
    return _tokenizer_of(origin.checkpoints)


def tokenizer_of_step(checkpoints: Path, step: int) -> Tokenizer:
    """The tokenizer that a step carries, with the end of documents that it had for the run."""
    return load_tokenizer(checkpoints / str(step), _fingerprint_of(checkpoints, step))


def known_fingerprint(settings: Settings, run: Path) -> str:
    """The fingerprint of the tokenizer of this run's newest step, or of the weights it starts from; "" without both."""
    origin = _origin(settings, run)
    valid = check_steps(origin.checkpoints).valid if origin else []
    return _fingerprint_of(origin.checkpoints, valid[0]) if valid else ""


def _fingerprint_of(checkpoints: Path, step: int) -> str:
    fingerprint = read_manifest(checkpoints, step)["settings"].get("corpus", {}).get("tokenizer")
    return fingerprint if isinstance(fingerprint, str) else ""


def vocab_of_weights(settings: Settings, run: Path | None = None) -> dict[str, int]:
    """The vocab of a run's first weights and its padding, as keys of the model; {} if they decide nothing.

    A resumed run has its own vocab and does not need those weights; whether it fits is checked when it is resumed.

    Raises:
        ConfigError: the vocab is different.
    """
    source, here = settings.train.first_run, settings.model.vocab
    origin = _origin(settings, run) if source else None
    if origin is None or (here and origin.path == run):
        return {}
    valid = check_steps(origin.checkpoints).valid
    if not valid:
        return {}  # loading reports that all are damaged
    saved = of_today(read_manifest(origin.checkpoints, valid[0])["settings"])[0].get("model", {})
    there = {key: saved.get(key) for key in LEFT_OPEN}
    if not all(type(value) is int for value in there.values()):
        return {}
    model, theirs = settings.model, dataclasses.replace(settings.model, **there)
    if here and (here, model.padded_vocab) == (theirs.vocab, theirs.padded_vocab):
        return {}
    for key, value in there.items():
        written = getattr(model, key)
        if written != value and (here or written != LEFT_OPEN[key]):
            source_key = "continue_from" if settings.train.continue_from else "init_from"
            raise ConfigError(
                f"model.{key}={written}, but the weights of train.{source_key}={source!r} have model.{key}={value}; "
                f"use {value}, or {'0' if key == 'vocab' else 'model.vocab=0 and 1 here'} to take it from there"
            )
    return there


def rounded_entries(settings: Settings) -> int | None:
    """Number of tokens from which `resolve` rounds up the vocab, if it reads no text; None if the vocab is given."""
    return None if settings.model.vocab or vocab_of_weights(settings) else likely_entries(settings.data)


def likely_entries(data: DataConfig) -> int:
    """Number of entries of the tokenizer that a run would use; an untrained bpe counts with its maximum."""
    prepared = [data.path] if data.source == "prepared" else prepared_paths(data)
    if not prepared and data.tokenizer in (AUTO, "bytes", "bpe"):
        return data.bpe_vocab if data.tokenizer == "bpe" else SMALLEST_BPE_VOCAB
    file = prepared[0] if prepared else data.tokenizer
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
    known = (RunFiles(path) for path in (run, settings.train.first_run) if path)
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
