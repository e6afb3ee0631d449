"""Each process's part of a batch, and its transfer to the devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from parallax.config.settings import Settings
from parallax.data import MixedReader, Reader, open_mixture, open_reader, open_sources
from parallax.data.mixture import OwnPart, check_chat_settings
from parallax.step.resolve import known_fingerprint, run_tokenizer, vocab_of_weights
from parallax.storage.files import object_if_readable
from parallax.storage.run_files import RunFiles


def own_part(sharding: Sharding, shape: tuple[int, int]) -> tuple[np.ndarray, range]:
    """Rows of a global batch that this process's devices hold, in order, and the range of columns; a mesh may leave
    gaps between rows."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    rows, columns = ({index[dim].indices(shape[dim])[:2] for index in indices} for dim in (0, 1))
    first, last = min(columns), max(columns)
    return np.concatenate([np.arange(*piece) for piece in sorted(rows)]), range(first[0], last[1])


def put_on(sharding: Sharding, shape: tuple[int, int]) -> Callable[[dict[str, np.ndarray]], dict[str, Any]]:
    """A function that sends this process's `own_part` to its devices, as pieces of global arrays."""
    rows, columns = own_part(sharding, shape)

    def put_one(array: np.ndarray) -> jax.Array:
        def piece(index: tuple[slice, ...]) -> np.ndarray:
            (start, stop, _), (left, right, _) = (part.indices(size) for part, size in zip(index, shape))
            first = np.searchsorted(rows, start)
            return array[first : first + stop - start, left - columns.start : right - columns.start]

        return jax.make_array_from_callback(shape, sharding, piece)

    return lambda batch: {name: put_one(array) for name, array in batch.items()}


def put_by_shape(sharding: Sharding, shapes: Sequence[tuple[int, int]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The same for batches of several shapes, which this process's parts of them tell apart."""
    by_part = {tuple(map(len, own_part(sharding, shape))): put_on(sharding, shape) for shape in shapes}
    assert len(by_part) == len(shapes), "a process holds the same share of each batch"
    return lambda batch: by_part[batch["tokens"].shape](batch)


def open_split(settings: Settings, folder: RunFiles, split: str, part: OwnPart | None = None) -> Reader | MixedReader:
    """The reader of a split, or the mixture to train on; prepares the data first if necessary.

    `part` gives this process's part of a shape of batches; all of it by default.
    """
    if settings.data.mixture and split == "train":
        return open_mixture(settings.data, part=part, **_options(settings, folder))
    (reader,) = open_by_source(settings, folder, split, part).values()
    return reader


def open_by_source(settings: Settings, folder: RunFiles, split: str, part: OwnPart | None = None) -> dict[str, Reader]:
    """A split of each source of a mixture by name, or that of a run's only source, which is named ""."""
    options = _options(settings, folder)
    if part is not None:
        options["rows"], options["columns"] = part((settings.data.global_batch, settings.data.seq))
    if settings.data.mixture:
        return open_sources(settings.data, split=split, **options)
    readers = {"": open_reader(settings.data, split=split, **options)}
    check_chat_settings(settings.data, readers)
    return readers


def _options(settings: Settings, folder: RunFiles) -> dict[str, Any]:
    """What a run says of its data besides its settings: the model's vocab, the tokenizer, and folders."""
    vocab = settings.model.vocab or vocab_of_weights(settings, folder.path).get("vocab")
    options = {"folder": folder.data, "vocab": vocab, "fingerprint": known_fingerprint(settings, folder.path)}
    return options | {"tokenizer": run_tokenizer(settings, folder.path), "finished": saved_cache(folder)}


def saved_cache(folder: RunFiles) -> str:
    """data.cache of the run's saved config, which does not decide where anything is written; "" if it names none."""
    data = object_if_readable(folder.config).get("data")
    cache = data.get("cache") if isinstance(data, dict) else None
    return cache if isinstance(cache, str) else ""
