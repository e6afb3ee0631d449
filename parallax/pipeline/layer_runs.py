"""The layers of a stage as loops: runs of one kind, and runs that repeat."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from jax import Array

from parallax.sharding.layers_on_ranks import Arrangement

MOST_RUNS = 8  # most loops in a pass of a stage


class LayerRun(NamedTuple):
    """Consecutive layer positions, from `place`, with layers of `kinds` (indices); with `uneven` some are empty.
    `layer` is the index of the first one among those of its kind in its stage, None if that differs between stages."""

    kinds: tuple[int, ...]
    place: int
    places: int
    uneven: bool
    layer: int | None

    @property
    def shape(self) -> tuple:
        return self.kinds, self.places, self.uneven, self.layer is None

    def part(self, first: Array | int, places: int) -> "LayerRun":
        """So many places of the run, from its place `first`."""
        layer = None if self.layer is None else self.layer + first
        return self._replace(place=self.place + first, places=places, layer=layer)

    @property
    def can_prefetch(self) -> bool:
        """Whether the next layer's weights can be gathered while a layer runs: both are of one kind."""
        return len(self.kinds) == 1 and self.places > 1


class Repeat(NamedTuple):
    """A sequence of runs that is repeated `times` times; `runs` are those of the first time."""

    times: int
    runs: tuple[LayerRun, ...]

    def paired(self) -> list[tuple[LayerRun, LayerRun]]:
        """The runs of two passes at once, one from the first place to the last, one back: cut where either comes to
        another run.

        >>> dense, moe = (LayerRun((kind,), place, places, False, 0) for kind, place, places in ((0, 0, 1), (1, 1, 3)))
        >>> [(run.place, back.place, run.places) for run, back in Repeat(1, (dense, moe)).paired()]
        [(0, 3, 1), (1, 1, 2), (3, 0, 1)]
        """
        places = [(run, place) for run in self.runs for place in range(run.places)]
        meeting, pairs = zip(places, reversed(places)), []
        for (run, back), turns in itertools.groupby(meeting, lambda pair: (pair[0][0], pair[1][0])):
            turns = [*turns]
            first, last = turns[0][0][1], turns[-1][1][1]
            pairs.append((run.part(first, len(turns)), back.part(last, len(turns))))
        return pairs

    def run_in(self, run: LayerRun, turn: Array | int) -> LayerRun:
        """The run in repetition `turn`, which may be traced."""
        if self.times == 1:
            return run
        layers = sum(other.places for other in self.runs if other.kinds == run.kinds)
        further = turn * sum(other.places for other in self.runs)
        return run._replace(place=run.place + further, layer=None if run.layer is None else run.layer + turn * layers)


def repeats_of(order: Arrangement) -> tuple[Repeat, ...]:
    """The places of a stage, divided where the kind of layer changes.

    A sequence of runs that repeats is one Repeat, so that a program does not grow with the number of layers. If more
    than MOST_RUNS are left, all places are one run of all kinds.

    >>> order = Arrangement((0,), ("a", *("b", "b", "a") * 3))
    >>> [(repeat.times, [run.places for run in repeat.runs]) for repeat in repeats_of(order)]
    [(3, [1, 2]), (1, [1])]
    """
    kinds = order.kinds_in_places[0].reshape(-1, order.stage_layers)
    none = len(set(order.kinds))
    there = [tuple(sorted({*column} - {none})) for column in kinds.T.tolist()]
    runs, first = [], 0
    for of_run, places in itertools.groupby(there):
        count, earlier = len([*places]), {int((stage[:first] == of_run[0]).sum()) for stage in kinds}
        uneven = bool((kinds[:, first : first + count] == none).any())
        layer = earlier.pop() if len(of_run) == len(earlier) == 1 else None
        runs.append(LayerRun(of_run, first, count, uneven, layer))
        first += count
    repeats = _repeated(runs)
    if sum(len(repeat.runs) for repeat in repeats) <= MOST_RUNS:
        return repeats
    return (Repeat(1, (LayerRun(tuple(range(none)), 0, order.stage_layers, order.uneven, None),)),)


def _repeated(runs: Sequence[LayerRun]) -> tuple[Repeat, ...]:
    """Runs with repeated sequences written once; the choice that leaves the fewest."""
    shapes = [run.shape for run in runs]
    letters = "".join(chr(ord("a") + shapes.index(shape)) for shape in shapes)  # a letter for each shape
    of_size = (re.finditer(rf"(?=((.{{{size}}})\2+))", letters) for size in range(1, len(runs) // 2 + 1))
    blocks = itertools.chain(*of_size)
    best = max(blocks, key=lambda block: (len(block[1]) - len(block[2]), -block.start()), default=None)
    if best is None:
        return (Repeat(1, tuple(runs)),)
    (first, last), size = best.span(1), len(best[2])
    parts = (1, runs[:first]), ((last - first) // size, runs[first : first + size]), (1, runs[last:])
    return tuple(Repeat(count, tuple(part)) for count, part in parts if part)
