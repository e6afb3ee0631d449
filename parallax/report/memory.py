"""Memory of a step by component: predicted, beside what the compiler reports."""

from typing import Any, NamedTuple

import jax
import optax

from parallax.budget import Memory, memory
from parallax.sharded_model import ShardedModel
from parallax.step import abstract_state


class Reported(NamedTuple):
    """What a compiler reports, in bytes on a device."""

    arguments: int
    temporaries: int
    outputs: int
    aliased: int

    @property
    def peak(self) -> int:
        """What a device must have: arguments, results that do not take their place, and temporaries.

        `peak_memory_in_bytes` is another figure: XLA for CPU leaves temporaries out of it, and for TPU it is smaller
        than what is reserved, by a fifth to a third for the configs of this project.
        """
        return self.arguments + self.temporaries + self.outputs - self.aliased


class MemoryTable(NamedTuple):
    """`rows` are components and their bytes at the predicted peak; `difference` is predicted over compiled, less 1."""

    rows: tuple[tuple[str, int], ...]
    peak: int
    compiled: Reported | None
    difference: float | None


def memory_table(
    model: ShardedModel,
    tx: optax.GradientTransformation,
    global_batch: int,
    seq: int,
    compiled: jax.stages.Compiled | None = None,
) -> MemoryTable:
    """The memory of a step on each device, predicted; with a compiled step, beside the compiler's."""
    held = memory(model, abstract_state(model, tx).opt_state, global_batch=global_batch, seq=seq)
    reported = None if compiled is None else read_memory(compiled.memory_analysis())
    return beside(held, reported)


def read_memory(analysis: Any) -> Reported:
    """The figures of `jax.stages.Compiled.memory_analysis()`."""
    return Reported(
        analysis.argument_size_in_bytes,
        analysis.temp_size_in_bytes,
        analysis.output_size_in_bytes,
        analysis.alias_size_in_bytes,
    )


def beside(held: Memory, reported: Reported | None) -> MemoryTable:
    """The table of a prediction and of what the compiler reports, if it was asked.

    >>> held = Memory(*range(10))
    >>> beside(held, Reported(20, 40, 10, 10)).difference
    -0.25
    """
    difference = None if reported is None else held.peak / reported.peak - 1
    return MemoryTable(tuple(held._asdict().items()), held.peak, reported, difference)
