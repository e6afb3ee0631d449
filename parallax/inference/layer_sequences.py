"""Sequences of layers that a stage repeats. In a deep stage decoding compiles each once, as the body of a loop."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from parallax.sharding.layers_on_ranks import Arrangement

UNROLLED_LAYERS = 8
"""Layers of a stage that decoding compiles one by one, each in a second of CPU time; if there are more, they are loops.

A loop copies a layer's weights for each token. On a CPU that cost 15 % of the speed with 8 layers, whose weights stay
in its cache, and less with 16 and 32, whose weights do not (docs/serving.md).
"""


class Layer(NamedTuple):
    """The layers of a rank in one place of a sequence, one for each repetition."""

    kind: str
    indices: tuple[int, ...]  # in the stack of their kind
    window: int


class LayerSequence(NamedTuple):
    """A sequence of layers and the number of its repetitions, from a place of the stage on."""

    start: int
    times: int
    places: list[list[Layer | None]]  # for each place of the sequence the layers of each rank

    @property
    def layers(self) -> list[Layer]:
        """Those of all ranks, in the same order in every process."""
        return list(dict.fromkeys(layer for of_ranks in self.places for layer in of_ranks if layer))

    def place(self, place: int, time: Any) -> Any:
        """The place in the stage of a place of the sequence in one of its repetitions."""
        return self.start + len(self.places) * time + place


def layer_sequences(arrangement: Arrangement, windows: Sequence[int]) -> list[LayerSequence]:
    """The layers of a stage: one sequence, or the loops of a deep stage. `windows` are those of the model's layers."""
    kinds, (_, indices) = arrangement.kinds, arrangement.kinds_in_places

    def like(number: int) -> tuple[str, int] | None:
        return None if number < 0 else (kinds[number], windows[number])

    of_places = [tuple(map(like, of_ranks)) for of_ranks in arrangement.numbers.T]

    def layer(rank: int, places: Sequence[int]) -> Layer | None:
        if of_places[places[0]][rank] is None:
            return None
        kind, window = of_places[places[0]][rank]
        return Layer(kind, tuple(int(indices[rank, place]) for place in places), window)

    def sequence(start: int, period: int, times: int) -> LayerSequence:
        stop = start + period * times
        of_sequence = [range(first, stop, period) for first in range(start, start + period)]
        ranks = range(len(indices))
        return LayerSequence(start, times, [[layer(rank, places) for rank in ranks] for places in of_sequence])

    deep = len(of_places) > UNROLLED_LAYERS
    return [sequence(*each) for each in (repeats_in(of_places) if deep else [(0, len(of_places), 1)])]


def repeats_in(items: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """The start, the period and the number of repetitions of sequences that make up all items.

    >>> list(repeats_in("dmmmm")), list(repeats_in("llgllgl"))
    ([(0, 1, 1), (1, 1, 4)], [(0, 3, 2), (6, 1, 1)])
    """
    start = 0
    while start < len(items):
        rest = items[start:]
        choices = ((period, _times(rest, period)) for period in range(1, len(rest) + 1))
        period, times = max(choices, key=lambda choice: choice[0] * (choice[1] - 1))
        yield start, period, times
        start += period * times


def _times(items: Sequence[Any], period: int) -> int:
    """How often the first items are there in turn."""
    times = 1
    while items[times * period :][:period] == items[:period]:
        times += 1
    return times
