"""Each process's rows of a batch, and how they get to its devices."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from parallax.config.settings import Settings
from parallax.data import Reader, open_reader
from parallax.data.vocabulary import with_tokenizer
from parallax.training.folder import RunFolder


def own_rows(sharding: Sharding, shape: tuple[int, int]) -> np.ndarray:
    """The rows of a global batch that this process's devices hold, in order; a mesh may leave gaps between them."""
    pieces = {index[0].indices(shape[0]) for index in sharding.addressable_devices_indices_map(shape).values()}
    return np.concatenate([np.arange(*piece) for piece in sorted(pieces)])


def put_on(sharding: Sharding, shape: tuple[int, int]) -> Callable[[dict[str, np.ndarray]], dict[str, Any]]:
    """A function that sends this process's `own_rows` to its devices, as pieces of global arrays."""
    rows = own_rows(sharding, shape)

    def put_one(array: np.ndarray) -> jax.Array:
        def piece(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(shape[0])
            first = np.searchsorted(rows, start)
            return array[first : first + stop - start, index[1]]

        return jax.make_array_from_callback(shape, sharding, piece)

    return lambda batch: {name: put_one(array) for name, array in batch.items()}


def open_split(settings: Settings, folder: RunFolder, split: str, rows: np.ndarray | None = None) -> Reader:
    """The reader of a split; the corpus is prepared first where it is not yet."""
    vocab = settings.model.vocab or None
    settings = with_tokenizer(settings, folder.path)
    return open_reader(settings.data, folder=folder.data, vocab=vocab, split=split, rows=rows)
