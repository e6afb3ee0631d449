"""The mean loss over batches of text, forward only, and by position in the window."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from parallax.data import Reader
from parallax.errors import DataError
from parallax.pipeline import GROUP_LOSSES, GROUP_TOKENS
from parallax.processes.job import agreed
from parallax.step.step import first_positions


class MeanLoss(NamedTuple):
    """The mean loss in nats over so many labels (NaN without labels), and sums in nats and numbers of labels by their
    position in the window, in the groups of `first_positions`."""

    loss: float
    tokens: int
    nats_by_position: np.ndarray
    tokens_by_position: np.ndarray

    @property
    def by_position(self) -> dict[int, float]:
        """The mean loss by the first position of each group that has labels."""
        firsts = [0, *(1 << power for power in range(len(self.tokens_by_position) - 1))]
        each = zip(firsts, self.nats_by_position, self.tokens_by_position)
        return {first: float(nats / tokens) for first, nats, tokens in each if tokens}


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
) -> MeanLoss:
    """The mean loss over the labels of a reader's first batches.

    `step`, of `make_position_step`, computes a batch's metrics; `show` is called with the number of batches done and of
    all batches.

    Raises:
        DataError: a batch cannot be read, by this process or by another one: all raise it at the same batch.
    """
    nats, tokens, by_position = 0.0, 0, np.zeros((2, len(first_positions(reader.seq))))
    for index in range(batches):
        metrics = jax.device_get(step(params, put(_read(reader, index))))
        nats += float(metrics["loss"]) * float(metrics["tokens"])
        tokens += int(metrics["tokens"])
        by_position += metrics[GROUP_LOSSES][0], metrics[GROUP_TOKENS]
        show(index + 1, batches)
    return MeanLoss(nats / tokens if tokens else math.nan, tokens, *by_position)


def mean_of(losses: Iterable[MeanLoss]) -> MeanLoss:
    """The mean of losses over texts in windows of one length; NaN without tokens."""
    losses = [*losses]
    known = [(each.loss, each.tokens) for each in losses if each.tokens]
    total = sum(tokens for _, tokens in known)
    loss = sum(loss * tokens for loss, tokens in known) / total if total else math.nan
    return MeanLoss(loss, total, *(sum(each[part] for each in losses) for part in (2, 3)))
