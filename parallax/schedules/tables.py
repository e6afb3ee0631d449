"""What the executor reads: tables of microbatches, slots and messages, derived from the orders."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from parallax.schedules.order import KINDS, Action, Orders, grid_text
from parallax.schedules.pricing import Costs, figures


class Segment(NamedTuple):
    """Ticks `start <= tick < stop`, in which no other kinds of action occur than these: "F", "FB", "FBW", ..."""

    start: int
    stop: int
    kinds: str


class Span(NamedTuple):
    """The ticks in which a rank keeps something, first and last included."""

    rank: int
    first: int
    last: int


# What one action makes and a later one on the same rank reads, and until when it is kept.
POOLS = ("FB", "FW", "BW")


class Schedule(Orders):
    """Orders with the tables of the executor, each int32 `[tick, rank]`, -1 where nothing happens.

    `microbatch["F"]` is whose forward pass runs, `chunk["F"]` in which of the rank's stages; likewise "B" and "W".
    A slot of pool "FB" is taken by F and free when B has run; of "FW" from F to W, of "BW" from B to W;
    `slot["FB"]["F"]` is where F writes and `slot["FB"]["B"]` where B reads. A message waits in a slot, too:
    `message["F"]` is the one that F reads, and `arrival["F", 1]` where one that comes from the rank before is put
    at the end of the tick.
    """

    def _repr_svg_(self) -> str:
        # Drawing reads schedules: it cannot be imported above.
        from parallax.schedules.draw import gantt

        return gantt(self, Costs())

    def _table(self, cells: Iterable[tuple[int, Action, int]]) -> np.ndarray:
        """A table with these values, each at a tick and at the rank of an action."""
        table = np.full((self.ticks, self.ranks), -1, np.int32)
        for tick, action, value in cells:
            table[tick, self.rank_of(action.stage)] = value
        table.flags.writeable = False
        return table

    def _when_run(self, kind: str, value: Callable[[Action], int]) -> np.ndarray:
        return self._table((tick, a, value(a)) for a, tick in self.tick_of.items() if a.kind == kind)

    @cached_property
    def microbatch(self) -> dict[str, np.ndarray]:
        """Microbatch of which each kind of action runs."""
        return {kind: self._when_run(kind, lambda action: action.microbatch) for kind in self.kinds}

    @cached_property
    def chunk(self) -> dict[str, np.ndarray]:
        """Which of the rank's stages runs; 0 where a rank has one."""
        return {kind: self._when_run(kind, lambda action: self.chunks[action.stage]) for kind in self.kinds}

    # ---- what is kept on a rank

    @property
    def pools(self) -> tuple[str, ...]:
        """Which of POOLS the schedule has: without W, the first alone."""
        return POOLS if self.split else POOLS[:1]

    @cached_property
    def _slot_of(self) -> dict[str, dict[tuple[int, int], int]]:
        """By pool, the slot of each pass (stage, microbatch)."""
        found = {}
        for pool in self.pools:
            spans = {}
            for action, tick in self.tick_of.items():
                if action.kind == pool[0]:
                    until = self.tick_of[action._replace(kind=pool[1])]
                    spans[action.stage, action.microbatch] = Span(self.rank_of(action.stage), tick, until)
            found[pool] = assign_slots(spans)
        return found

    @cached_property
    def slots(self) -> dict[str, int]:
        """By pool, how many slots each rank must have."""
        return {pool: 1 + max(slots.values()) for pool, slots in self._slot_of.items()}

    @cached_property
    def keeps_across_ticks(self) -> bool:
        """Whether anything that a pass keeps is read in a later tick."""
        return any(not np.array_equal(self.microbatch[first], self.microbatch[then]) for first, then in self.pools)

    @cached_property
    def slot(self) -> dict[str, dict[str, np.ndarray]]:
        """By pool and kind of action, the slot that it writes or reads."""

        def table(pool: str, kind: str) -> np.ndarray:
            return self._when_run(kind, lambda action: self._slot_of[pool][action.stage, action.microbatch])

        users = {pool: [k for k in self.kinds if KINDS.index(pool[0]) <= KINDS.index(k)] for pool in self.pools}
        return {
            pool: {kind: table(pool, kind) for kind in kinds if KINDS.index(kind) <= KINDS.index(pool[1])}
            for pool, kinds in users.items()
        }

    # ---- what is sent

    def sender(self, action: Action) -> Action | None:
        """The action of another stage whose output F or B reads; none at the pipeline's ends."""
        stage = action.stage + (-1 if action.kind == "F" else 1)
        return action._replace(stage=stage) if 0 <= stage < self.stages and action.kind != "W" else None

    @cached_property
    def _message_slot_of(self) -> dict[Action, int]:
        """Slot in which the message that each action reads waits; F and B have slots of their own."""
        found: dict[Action, int] = {}
        for kind in "FB":
            readers = {a: self.sender(a) for a in self.tick_of if a.kind == kind and self.sender(a)}
            found |= assign_slots(
                {a: Span(self.rank_of(a.stage), self.tick_of[s] + 1, self.tick_of[a]) for a, s in readers.items()}
            )
        return found

    @cached_property
    def message_slots(self) -> dict[str, int]:
        """Messages for F, and for B, that a rank must be able to hold at once; at least 1."""
        return {
            kind: 1 + max((slot for a, slot in self._message_slot_of.items() if a.kind == kind), default=0)
            for kind in "FB"
        }

    @cached_property
    def message(self) -> dict[str, np.ndarray]:
        """Slot of the message that F and B read; -1 at the pipeline's ends, which read embedding and loss."""
        return {kind: self._when_run(kind, lambda a: self._message_slot_of.get(a, -1)) for kind in "FB"}

    @cached_property
    def arrival(self) -> dict[tuple[str, int], np.ndarray]:
        """By kind of the reader and by how many ranks a message moves: its slot, in the tick at whose end it comes."""
        cells: dict[tuple[str, int], list] = {}
        for action, slot in self._message_slot_of.items():
            sender = self.sender(action)
            shift = (self.rank_of(action.stage) - self.rank_of(sender.stage)) % self.ranks
            shift -= self.ranks * (2 * shift > self.ranks)  # the shorter way round
            cells.setdefault((action.kind, shift), []).append((self.tick_of[sender], action, slot))
        return {route: self._table(cells[route]) for route in sorted(cells)}

    # ---- the head

    @cached_property
    def exit_microbatch(self) -> np.ndarray:
        """int32 `[tick]`: the microbatch that the last stage has run forward, -1 where none."""
        return self.microbatch["F"].max(axis=1, where=self._in_last_stage("F"), initial=-1)

    @cached_property
    def _exit_slot_of(self) -> dict[Action, int]:
        last = self.stages - 1
        spans = {
            a: Span(0, tick, self.tick_of[a._replace(kind="B")])
            for a, tick in self.tick_of.items()
            if a.kind == "F" and a.stage == last
        }
        return assign_slots(spans)

    @cached_property
    def exit_slots(self) -> int:
        """Microbatches whose output or its gradient waits between the last stage's F and its B."""
        return 1 + max(self._exit_slot_of.values())

    @cached_property
    def exit_slot(self) -> dict[str, np.ndarray]:
        """int32 `[tick]`: where the last stage's output or its gradient is put ("F") and found ("B")."""
        found = {kind: np.full(self.ticks, -1, np.int32) for kind in "FB"}
        for action, slot in self._exit_slot_of.items():
            for kind in "FB":
                found[kind][self.tick_of[action._replace(kind=kind)]] = slot
        return found

    def _in_last_stage(self, kind: str) -> np.ndarray:
        last = self.stages - 1
        return self._when_run(kind, lambda action: int(action.stage == last)) == 1

    # ---- what is compiled

    @cached_property
    def segments(self) -> list[Segment]:
        """Runs of ticks, cut where no kind of action occurs on both sides: each kind is compiled once."""
        used = {kind: np.flatnonzero(self.microbatch[kind].max(axis=1) >= 0) for kind in self.kinds}
        open_in = [
            "".join(kind for kind, ticks in used.items() if ticks[0] <= tick <= ticks[-1]) for tick in range(self.ticks)
        ]
        parts: list[Segment] = []
        for kinds, ticks in groupby(range(self.ticks), open_in.__getitem__):
            start, *_, stop = [*ticks, self.ticks]
            parts.append(Segment(start, stop, kinds))
        starts = [part.start for part in parts] + [self.ticks]
        segments: list[Segment] = []
        for (start, _, kinds), stop in zip(parts, starts[1:]):
            if segments and set(segments[-1].kinds) & set(kinds):
                start, _, before = segments.pop()
                kinds = "".join(kind for kind in KINDS if kind in before + kinds)
            segments.append(Segment(start, stop, kinds))
        return segments

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        sizes = f"ranks={self.ranks} stages={self.stages} microbatches={self.microbatches} ticks={self.ticks}"
        rows = [[list(map(str, cell)) for cell in row] for row in self.grid()]
        return f"{self.name} {sizes} lockstep bubble={figures(self).lockstep_bubble:.1%}\n{grid_text(rows)}"


def assign_slots(spans: Mapping) -> dict:
    """For each span the lowest slot that no overlapping span of its rank holds.

    >>> assign_slots({"a": Span(0, 0, 3), "b": Span(0, 1, 2), "c": Span(0, 3, 5)})
    {'a': 0, 'b': 1, 'c': 1}
    """
    slots = {}
    held_until: dict[int, list[int]] = {}
    for key, (rank, first, last) in sorted(spans.items(), key=lambda item: item[1].first):
        lasts = held_until.setdefault(rank, [])
        slot = next((i for i, until in enumerate(lasts) if until < first), len(lasts))
        lasts[slot : slot + 1] = [last]
        slots[key] = slot
    return slots
