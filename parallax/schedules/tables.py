"""What the executor reads: tables of microbatches, slots and messages, derived from the orders."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from parallax.schedules.order import KINDS, Action, Orders


class Segment(NamedTuple):
    """Ticks `start <= tick < stop` in which the same kinds of action occur: "F", "B" or "FB"."""

    start: int
    stop: int
    kinds: str


class Span(NamedTuple):
    """The ticks in which a rank keeps something, first and last included."""

    rank: int
    first: int
    last: int


class Schedule(Orders):
    """Orders with the tables of the executor, each int32 `[tick, rank]`, -1 where nothing happens.

    A slot holds what F saved until its B has run. An input slot holds a message from its arrival, at the
    end of a tick, to the tick that reads it.
    """

    def _table(self, cells: Iterable[tuple[int, Action, int]]) -> np.ndarray:
        """A table with these values, each at a tick and at the rank of an action."""
        table = np.full((self.ticks, self.ranks), -1, np.int32)
        for tick, action, value in cells:
            table[tick, self.rank_of(action.stage)] = value
        table.flags.writeable = False
        return table

    def _when_run(self, kind: str, value: Callable[[Action], int]) -> np.ndarray:
        return self._table((tick, a, value(a)) for a, tick in self.tick_of.items() if a.kind == kind)

    def _when_received(self, kind: str, value: Callable[[Action], int]) -> np.ndarray:
        return self._table((tick, a, value(a)) for a, tick in self._arrivals(kind).items())

    @cached_property
    def forward(self) -> np.ndarray:
        """Microbatch whose forward pass runs."""
        return self._when_run("F", lambda action: action.microbatch)

    @cached_property
    def backward(self) -> np.ndarray:
        """Microbatch whose backward pass runs."""
        return self._when_run("B", lambda action: action.microbatch)

    @cached_property
    def forward_chunk(self) -> np.ndarray:
        """Which of the rank's stages runs F; always 0 where a rank has one stage."""
        return self._when_run("F", lambda action: action.stage // self.ranks)

    @cached_property
    def backward_chunk(self) -> np.ndarray:
        """Which of the rank's stages runs B."""
        return self._when_run("B", lambda action: action.stage // self.ranks)

    @cached_property
    def _slots(self) -> dict[Action, int]:
        """Slot of the activations that each F writes and each B reads."""
        ticks = self.tick_of
        ends = {a: a._replace(kind="B") for a in ticks if a.kind == "F"}
        slots = assign_slots({f: Span(self.rank_of(f.stage), ticks[f], ticks[b]) for f, b in ends.items()})
        return slots | {ends[f]: slot for f, slot in slots.items()}

    @cached_property
    def slots(self) -> int:
        """Microbatches whose activations a rank must be able to hold at once."""
        return 1 + max(self._slots.values())

    @cached_property
    def forward_slot(self) -> np.ndarray:
        """Slot into which F saves its activations."""
        return self._when_run("F", self._slots.__getitem__)

    @cached_property
    def backward_slot(self) -> np.ndarray:
        """Slot in which B finds the activations of its F."""
        return self._when_run("B", self._slots.__getitem__)

    def _arrivals(self, kind: str) -> dict[Action, int]:
        """The tick at whose end each action's message arrives; the ends of the pipeline receive none."""
        step = -1 if kind == "F" else 1
        senders = {a: a._replace(stage=a.stage + step) for a in self.tick_of if a.kind == kind}
        return {a: self.tick_of[sender] for a, sender in senders.items() if sender in self.tick_of}

    @cached_property
    def _input_slots(self) -> dict[Action, int]:
        """Input slot of the message that each action reads; F and B have slots of their own."""
        slots: dict[Action, int] = {}
        for kind in KINDS:
            arrivals = self._arrivals(kind).items()
            slots |= assign_slots({a: Span(self.rank_of(a.stage), t + 1, self.tick_of[a]) for a, t in arrivals})
        return slots

    @cached_property
    def input_slots(self) -> int:
        """Messages of one kind that a rank must be able to hold at once; at least 1."""
        return 1 + max(self._input_slots.values(), default=0)

    @cached_property
    def receive_forward(self) -> np.ndarray:
        """Microbatch whose activations arrive from the stage before, at the end of the tick."""
        return self._when_received("F", lambda action: action.microbatch)

    @cached_property
    def receive_backward(self) -> np.ndarray:
        """Microbatch whose gradient arrives from the stage after, at the end of the tick."""
        return self._when_received("B", lambda action: action.microbatch)

    @cached_property
    def arrive_slot_forward(self) -> np.ndarray:
        """Input slot for the activations that arrive at the end of the tick."""
        return self._when_received("F", self._input_slots.__getitem__)

    @cached_property
    def arrive_slot_backward(self) -> np.ndarray:
        """Input slot for the gradient that arrives at the end of the tick."""
        return self._when_received("B", self._input_slots.__getitem__)

    @cached_property
    def use_slot_forward(self) -> np.ndarray:
        """Input slot that F reads; -1 in the first stage, which reads the embedding."""
        return self._when_run("F", lambda action: self._input_slots.get(action, -1))

    @cached_property
    def use_slot_backward(self) -> np.ndarray:
        """Input slot that B reads; -1 in the last stage, which reads the gradient of the head."""
        return self._when_run("B", lambda action: self._input_slots.get(action, -1))

    @cached_property
    def segments(self) -> list[Segment]:
        """Maximal runs of ticks with the same kinds of action: what no rank runs need not be compiled."""
        kinds = [
            "".join(kind for kind, table in zip(KINDS, (self.forward, self.backward)) if table[tick].max() >= 0)
            for tick in range(self.ticks)
        ]
        runs = [(name, list(ticks)) for name, ticks in groupby(range(self.ticks), kinds.__getitem__)]
        return [Segment(ticks[0], ticks[-1] + 1, name) for name, ticks in runs]


def assign_slots(spans: Mapping[Action, Span]) -> dict[Action, int]:
    """For each span the lowest slot that no overlapping span of its rank holds.

    >>> a, b, c = (Action(0, "F", m) for m in range(3))
    >>> list(assign_slots({a: Span(0, 0, 3), b: Span(0, 1, 2), c: Span(0, 3, 5)}).values())
    [0, 1, 1]
    """
    slots: dict[Action, int] = {}
    held_until: dict[int, list[int]] = {}
    for action, (rank, first, last) in sorted(spans.items(), key=lambda item: item[1].first):
        lasts = held_until.setdefault(rank, [])
        slot = next((i for i, until in enumerate(lasts) if until < first), len(lasts))
        lasts[slot : slot + 1] = [last]
        slots[action] = slot
    return slots
