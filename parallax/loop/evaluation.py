"""The mean loss over batches of text, forward only."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from parallax.data import Reader


class Measured(NamedTuple):
    """`loss` is the mean over `tokens` labels, in nats; not a number where there is none."""

    loss: float
    tokens: int


def measure(
    step: Callable[[Any, Any], dict[str, jax.Array]],
    params: Any,
    reader: Reader,
    put: Callable[[Any], Any],
    batches: int,
    show: Callable[[int, int], None] = lambda done, of: None,
) -> Measured:
    """What `step` says of the first batches of a reader; `show` is told how many of how many are done."""
    nats, tokens = 0.0, 0
    for index in range(batches):
        metrics = jax.device_get(step(params, put(reader.batch(index))))
        nats += float(metrics["loss"]) * float(metrics["tokens"])
        tokens += int(metrics["tokens"])
        show(index + 1, batches)
    return Measured(nats / tokens if tokens else math.nan, tokens)
