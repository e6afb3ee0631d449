"""Batches on their way from the readers to the devices."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from parallax.data import Reader, open_reader
from parallax.errors import ConfigError
from parallax.loop.folder import RunFolder
from parallax.settings import Settings


def own_rows(sharding: Sharding, shape: tuple[int, int]) -> range:
    """The rows of a global batch that this process's devices hold."""
    rows = [index[0].indices(shape[0]) for index in sharding.addressable_devices_indices_map(shape).values()]
    return range(min(start for start, _, _ in rows), max(stop for _, stop, _ in rows))


def put_on(sharding: Sharding, shape: tuple[int, int]) -> Callable[[dict[str, np.ndarray]], dict[str, Any]]:
    """A function that sends this process's rows to its devices, as pieces of global arrays."""

    def put(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return {name: jax.make_array_from_process_local_data(sharding, array, shape) for name, array in batch.items()}

    return put


def open_split(settings: Settings, folder: RunFolder, split: str, rows: range | None = None) -> Reader:
    """The reader of a split; the corpus is prepared first where it is not yet."""
    vocab = settings.model.vocab or None
    return open_reader(settings.data, folder=folder.data, vocab=vocab, split=split, rows=rows)


def check_eval(reader: Reader, settings: Settings) -> None:
    """Raise ConfigError if there is nothing to evaluate on."""
    if not reader.batches:
        raise ConfigError(
            f"train.eval_batches={settings.train.eval_batches}, but data.eval_fraction="
            f"{settings.data.eval_fraction} holds out no text; use a larger share, or train.eval_batches=0 "
            "with checkpoint.keep_best=0"
        )
