"""Settings with nothing left open: what a config leaves to the devices, to a tokenizer or to weights is filled in."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from parallax.checkpoint.steps import check_steps, complete_steps, read_manifest
from parallax.config.earlier import of_today
from parallax.config.sections import AUTO, SMALLEST_BPE_VOCAB, DataConfig, DataParallelConfig
from parallax.config.settings import Settings, read_settings
from parallax.data.tokenizer import TOKENIZER_FILE, Bytes, Tokenizer, load_tokenizer
from parallax.errors import ConfigError, DataError, quoted
from parallax.model.checks import check_context, check_kernel_on, check_kernel_seq
from parallax.model.kernels.cudnn import BEFORE_AMPERE, LONGEST_BIAS
from parallax.model.kernels.platforms import FASTEST_KERNEL
from parallax.sharding.activations import CONTEXT_AXIS
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

    `tokenizer` is that of the data; without it, model.vocab 0 becomes what a run would probably have, and no text is
    read. `run` is the run's folder, whose checkpoints go before those of the run from which the weights come.

    Without devices, mesh axes of -1 and the kernel "auto" stay. So they do in a run's config.json, since its next start
    may have other devices.

    Raises:
        ConfigError: the mesh does not fit the devices, or the vocab not the weights.
    """
    if devices is not None:
        settings = fit_to_devices(settings, devices)
    settings = with_vocab_of_weights(settings, run)
    if settings.model.vocab:
        return settings
    return with_entries(settings, tokenizer.vocab if tokenizer else likely_entries(settings.data))


# ---- what devices decide


def fit_to_devices(settings: Settings, devices: Devices) -> Settings:
    """The settings with a number for each mesh axis, and with the attention kernel for these devices."""
    try:
        sizes = resolve_sizes(settings.mesh, devices.count, simulated=not devices.topology)
    except ConfigError as error:
        if not devices.topology:
            raise
        raise ConfigError(f"{devices.topology} has {devices.count} devices: {error}") from error
    settings = with_kernel_on(settings, sizes, devices.platform, devices.kind)
    simulate = devices.count if devices.platform == "cpu" else 0
    return read_settings(settings, mesh={**sizes, "simulate": simulate})


def with_kernel_on(settings: Settings, axis_sizes: Mapping[str, int], platform: str, kind: str) -> Settings:
    """The settings with the attention kernel that model.kernel="auto" stands for on devices of this kind: the fastest
    one if it supports the model and its rows in this form of context parallelism, otherwise "xla"."""
    if settings.model.kernel != AUTO:
        return settings
    seq, context, ranks = settings.data.seq, settings.layout.context, axis_sizes.get(CONTEXT_AXIS, 1)
    fastest = dataclasses.replace(settings.model, kernel=FASTEST_KERNEL.get(platform, "xla"))
    try:
        check_context(fastest, context, axis_sizes)
        check_kernel_on(fastest, platform, kind)
        check_kernel_seq(fastest, seq, context, ranks)
        unfit = platform == "gpu" and (seq > LONGEST_BIAS or any(name in kind for name in BEFORE_AMPERE))
    except ConfigError:
        unfit = True
    model = dataclasses.replace(settings.model, kernel="xla") if unfit else fastest
    return dataclasses.replace(settings, model=model)


def for_inference(settings: Settings) -> Settings:
    """The settings with which a trained model is read: without a schedule of training, which may need a certain number
    of stages, for rows of any length, which of the kernels only "xla" takes, and without a sharding policy of a user's
    own: it changes no number."""
    kernel = "xla" if settings.model.kernel == AUTO else settings.model.kernel
    pipeline = {"schedule": "gpipe", "virtual": 1, "microbatches": 1}
    policy = DataParallelConfig.policy if names_code(settings.data_parallel.policy) else settings.data_parallel.policy
    return read_settings(settings, pipeline=pipeline, model={"kernel": kernel}, data_parallel={"policy": policy})


# ---- what weights and tokenizers decide


def with_tokenizer(settings: Settings, run: Path) -> Settings:
    """Settings with data.tokenizer "auto" resolved from the run or from that of its first weights.

    A resumed run keeps its tokenizer; a fresh one takes that of the run whose weights it starts from. The file is that
    of a checkpoint, which a later one replaces, so a run's config.json never names it.
    """
    origin = _origin(settings, run)
    if settings.data.tokenizer != AUTO or origin is None:
        return settings
    return read_settings(settings, data={"tokenizer": _tokenizer_of(origin.checkpoints)})


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


def with_vocab_of_weights(settings: Settings, run: Path | None = None) -> Settings:
    """Settings in which model.vocab 0 is replaced by the vocab of the first weights, with their padding.

    A resumed run has its own vocab and does not need those weights; whether it fits is checked when it is resumed.

    Raises:
        ConfigError: the vocab is different.
    """
    source, here = settings.train.first_run, settings.model.vocab
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
            source_key = "continue_from" if settings.train.continue_from else "init_from"
            raise ConfigError(
                f"model.{key}={written}, but the weights of train.{source_key}={source!r} have model.{key}={value}; "
                f"use {value}, or {'0' if key == 'vocab' else 'model.vocab=0 and 1 here'} to take it from there"
            )
    return dataclasses.replace(settings, model=theirs)


def with_entries(settings: Settings, entries: int) -> Settings:
    """Settings in which model.vocab 0 is replaced by the next multiple of 128 that holds all entries, or by the number
    of entries if model.vocab_multiple pads them."""
    padded = settings.model.vocab_multiple > 1
    rounded = entries if padded else -(-entries // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return read_settings(settings, model={"vocab": settings.model.vocab or rounded})


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
