"""The mean loss over batches of text, forward only."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from parallax.data import Reader
from parallax.errors import DataError
from parallax.processes.job import agreed


def _read(reader: Reader, index: int) -> dict[str, np.ndarray]:
    """This process's rows of a batch, after all processes have read theirs, so that none waits alone in a
    collective."""

    def of_another(process: int, code: int) -> DataError:
        return DataError(f"process {process} cannot read a batch of the evaluation; see its own error")

    return agreed(lambda: reader.batch(index), DataError, of_another)


def mean_loss(
    step: Callable[[Any, Any], dict[str, jax.Array]],
    params: Any,
    reader: Reader,
    put: Callable[[Any], Any],
    batches: int,
    show: Callable[[int, int], None],
) -> tuple[float, int]:
    """The mean loss in nats over the labels of a reader's first batches (NaN without labels), and their number.

    `step` computes a batch's metrics; `show` is called with the number of batches done and of all batches.

    Raises:
        DataError: a batch cannot be read, by this process or by another one: all raise it at the same batch.
    """
    nats, tokens = 0.0, 0
    for index in range(batches):
        metrics = jax.device_get(step(params, put(_read(reader, index))))
        nats += float(metrics["loss"]) * float(metrics["tokens"])
        tokens += int(metrics["tokens"])
        show(index + 1, batches)
    return nats / tokens if tokens else math.nan, tokens


def mean_of(losses: Iterable[tuple[float, int]]) -> float:
    """The mean of losses over texts of so many tokens; NaN without tokens."""
    known = [(loss, tokens) for loss, tokens in losses if tokens]
    total = sum(tokens for _, tokens in known)
    return sum(loss * tokens for loss, tokens in known) / total if total else math.nan
