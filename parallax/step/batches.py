"""Each process's part of a batch, and its transfer to the devices."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from parallax.config.settings import Settings
from parallax.data import Reader, open_reader
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


def open_split(
    settings: Settings, folder: RunFiles, split: str, rows: np.ndarray | None = None, columns: range | None = None
) -> Reader:
    """The reader of a split; prepares the corpus first if necessary."""
    vocab = settings.model.vocab or vocab_of_weights(settings, folder.path).get("vocab")
    options = {"rows": rows, "columns": columns, "fingerprint": known_fingerprint(settings, folder.path)}
    options |= {"tokenizer": run_tokenizer(settings, folder.path), "finished": saved_cache(folder)}
    return open_reader(settings.data, folder=folder.data, vocab=vocab, split=split, **options)


def saved_cache(folder: RunFiles) -> str:
    """data.cache of the run's saved config, which does not decide where anything is written; "" if it names none."""
    data = object_if_readable(folder.config).get("data")
    cache = data.get("cache") if isinstance(data, dict) else None
    return cache if isinstance(cache, str) else ""
