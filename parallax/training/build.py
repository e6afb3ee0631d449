"""The components of a run: mesh, data, model and optimizer, built from its settings after all checks."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from parallax.analysis.planned.devices import check_fits
from parallax.checkpoint.steps import complete_steps
from parallax.config.sections import ALL_BATCHES
from parallax.config.settings import Settings, check_has_experts, code_of, read_settings
from parallax.data import MixedReader, Reader
from parallax.data.tokenizer import Tokenizer
from parallax.display.progress import waiting
from parallax.errors import ConfigError
from parallax.inference.generate import encode
from parallax.pipeline import ShardedModel
from parallax.processes import job
from parallax.processes.compile_cache import use_compile_cache
from parallax.sharding.mesh import make_mesh
from parallax.step.batches import open_by_source, open_split, own_part, put_by_shape
from parallax.step.resolve import VOCAB_MULTIPLE, resolve, vocab_of_weights
from parallax.step.step import abstract_state, optimizer_of
from parallax.training.folder import RunFolder
from parallax.training.resume import check_source, files_of_import
from parallax.version import code_versions


class RunComponents(NamedTuple):
    """The components of a run, built from a valid config."""

    settings: Settings
    model: ShardedModel
    tx: optax.GradientTransformation
    train_data: Reader | MixedReader
    eval_data: dict[str, Reader]  # by source; empty without evaluations
    of_import: dict[str, bytes]  # files of the import from which its weights came, by name


def build(settings: Settings, folder: RunFolder) -> RunComponents:
    """Mesh, data, model and optimizer; all checks between sections happen here."""
    if not complete_steps(folder.checkpoints):  # a run of an earlier version may go on
        check_has_experts(settings)
    mesh = make_mesh(settings.mesh)
    use_compile_cache(settings.train.compile_cache)
    job.connect_devices(mesh)
    if settings.train.first_run and not complete_steps(folder.checkpoints):
        check_source(settings.train)
    check_before_data(settings, mesh, folder)
    with waiting("preparing the data"):
        train_data = job.prepare_once(lambda: open_split(settings, folder, "train"), "the prepared data")
    job.set_phase("planning the run", compiling=True)
    settings = until_the_end(settings, train_data)
    settings = resolve(settings, tokenizer=train_data.tokenizer, run=folder.path)
    with waiting("planning the run"):
        model = ShardedModel(settings, mesh)
        tx = optimizer_of(model)
        check_fits(abstract_state(model, tx))
    if settings.sample.prompt:  # report a prompt that cannot be read now, not at the end
        encode_sample(settings, train_data.tokenizer)
    shape = (settings.data.global_batch, settings.data.seq)
    part = functools.partial(own_part, model.batch_sharding)
    if tuple(map(len, part(shape))) != shape:
        train_data = open_split(settings, folder, "train", part)
    eval_data = open_by_source(settings, folder, "eval", part) if settings.train.eval_batches else {}
    for name, reader in eval_data.items():
        if not reader.batches:
            raise ConfigError(
                f"train.eval_batches={settings.train.eval_batches}, but data.eval_fraction="
                f"{settings.data.eval_fraction} holds out no text{f' of data.mixture.{name}' if name else ''}; "
                "use a larger share, or train.eval_batches=0"
            )
    of_import = files_of_import(folder, settings.train.first_run)
    return RunComponents(settings, model, tx, train_data, eval_data, of_import)


def check_before_data(settings: Settings, mesh: Mesh, folder: RunFolder) -> None:
    """All that can be checked without a tokenizer, since preparing data may take hours; raises a ParallaxError."""
    # This vocab divides over any axis.
    some = settings.model.vocab or VOCAB_MULTIPLE * mesh.size * settings.model.vocab_multiple
    any_vocab = read_settings(settings, model={"vocab": some, **vocab_of_weights(settings, folder.path)})
    model = ShardedModel(any_vocab, mesh)
    for shape in settings.data.shapes:
        model_of_shape(model, shape).check_batch(*shape)
    optimizer_of(model)


def model_of_shape(model: ShardedModel, shape: tuple[int, int]) -> ShardedModel:
    """The same model for batches of this shape, (global_batch, seq): the kernel of attention may follow from it."""
    settings = model.settings
    if shape == settings.data.shapes[0]:
        return model
    return model.replace(model=settings.model, data=settings.data.in_shape(shape))


def until_the_end(settings: Settings, data: Reader | MixedReader) -> Settings:
    """The settings with no more steps than the sources of a mixture last for."""
    last = data.last_step
    if last is None or last >= settings.train.steps:
        return settings
    if not last:
        raise ConfigError(f"data.mixture ends with {data.ended_by} before the first step; give it more text or budget")
    return read_settings(settings, train={"steps": last})


def eval_count(components: RunComponents, reader: Reader) -> int:
    """Number of batches in an evaluation of a source, at most those that hold every window once."""
    wanted = components.settings.train.eval_batches
    return reader.batches if wanted == ALL_BATCHES else min(wanted, reader.batches)


def checkpoint_settings(components: RunComponents) -> dict[str, Any]:
    """The settings of a checkpoint, with the fingerprints of its data and the versions of the code."""
    corpus = {
        **components.train_data.fingerprints,
        "tokenizer": components.train_data.tokenizer.fingerprint,
    }
    versions, user_code = code_versions(), {}
    for key, code in code_of(components.settings).items():
        versions |= code.installed
        if code.source and not code.installed:
            user_code[key] = code.source
    sections = {**components.settings.to_dict(), "corpus": corpus, "code": versions}
    return sections | ({"user_code": user_code} if user_code else {})


def put_batches(components: RunComponents) -> Callable[[dict[str, np.ndarray]], dict[str, jax.Array]]:
    """A function that sends this run's batches to its devices."""
    return put_by_shape(components.model.batch_sharding, components.settings.data.shapes)


def encode_sample(settings: Settings, tokenizer: Tokenizer) -> np.ndarray:
    """Ids of the prompt of the run's sample."""
    sample = settings.sample
    return encode(tokenizer, sample.prompt, special_tokens=sample.special_tokens, name="sample.prompt")
