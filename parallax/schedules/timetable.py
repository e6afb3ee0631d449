"""The ordered actions of each rank, their ticks, and the tables that the ticks of parallax/pipeline/tick.py read."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from parallax.errors import ParallaxError

ACTION_KINDS = ("F", "B", "W")  # in the order in which they run inside a tick
# Residuals that one action writes and a later one on the same rank reads, by both.
POOLS = ("F to B", "F to W", "B to W")
LISTED = 8  # most actions that an error names


class ScheduleError(ParallaxError):
    """The orders repeat or omit an action, or run one before its inputs exist; or a schedule's file is invalid."""


class Action(NamedTuple):
    """One pass of one microbatch through one stage: F forward, B backward, W the weights' gradients.

    >>> str(Action(stage=2, kind="F", microbatch=0))
    '2F0'
    >>> Action.parse("1B3")
    Action(stage=1, kind='B', microbatch=3)
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        match = re.fullmatch(r"([0-9]+)([FBW])([0-9]+)", text)
        if match is None:
            raise ScheduleError(f"{text!r} is not an action; write stage, F, B or W, and microbatch, as in '2F0'.")
        return cls(int(match[1]), match[2], int(match[3]))


class Segment(NamedTuple):
    """Ticks `start <= tick < stop` in which only these kinds of action occur: "F", "FB", "FBW", ..."""

    start: int
    stop: int
    kinds: str


class Span(NamedTuple):
    """The ticks during which a rank holds a buffer, including the first and the last."""

    rank: int
    first: int
    last: int


@dataclass(frozen=True, repr=False)
class Timetable:
    """The order of actions on each rank; a Schedule prints and draws it. `placement[s]` is the rank that holds stage s.

    Without W actions, B computes the gradients of a stage's input and of its weights. With W actions, B computes only
    the input's gradient, and W that of the weights. `head` says where the loss is computed: "inside" the ticks, for
    each microbatch after its last forward pass, or "between" the last forward and the first backward, for all at once.
    `starts` are the actions' ticks; without them each action runs as soon as possible. With `joint` the F and the B of
    a rank's tick are one pass, F&B, in which messages of the one can travel while the other computes; so this B reads
    nothing that this F has computed. Raises ScheduleError if the orders cannot run.

    The ticks read tables, int32 `[tick, rank]` with -1 for no action. `microbatch["F"]` is the microbatch whose
    forward pass runs, and `chunk["F"]` the index of the rank's stage in which it runs; likewise "B" and "W".

    A slot is one buffer of a rank, which is reused when it is free. A slot of pool "F to B" is written by F and free
    after B: `slot["F to B"]["F"]` is the slot that F writes, `slot["F to B"]["B"]` the one that B reads. Messages are
    also stored in slots: `message["F"]` is the slot that F reads, and `arrival["F", 1]` the slot in which a message
    from the previous rank is stored at the end of the tick, or, with `late_gradients`, a gradient before the tick's B.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    head: str = "inside"
    starts: tuple[tuple[int, ...], ...] | None = None
    joint: bool = False

    def __post_init__(self):
        self._check_sizes()
        self._check_actions()
        self._check_starts() if self.starts else self._check_deadlock()

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def virtual(self) -> int:
        """Stages that each rank holds."""
        return self.stages // self.ranks

    @cached_property
    def split(self) -> bool:
        """Whether the backward pass is split into B and W."""
        return any(action.kind == "W" for order in self.orders for action in order)

    @property
    def kinds(self) -> tuple[str, ...]:
        return ACTION_KINDS if self.split else ACTION_KINDS[:2]

    def rank_of(self, stage: int) -> int:
        return self.placement[stage]

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """For each stage, its index among its rank's stages."""
        return tuple(self.placement[:stage].count(rank) for stage, rank in enumerate(self.placement))

    # ---- ticks

    def needs(self, action: Action) -> list[Action]:
        """The actions whose results `action` reads."""
        stage, kind, microbatch = action
        if kind == "F":
            return [Action(stage - 1, "F", microbatch)] if stage > 0 else []
        if kind == "W":
            return [Action(stage, "B", microbatch)]
        if stage < self.stages - 1:
            return [Action(stage, "F", microbatch), Action(stage + 1, "B", microbatch)]
        read_by_head = range(self.microbatches) if self.head == "between" else [microbatch]
        return [Action(stage, "F", m) for m in read_by_head]

    def _soonest(self, action: Action, tick: int, earlier: Action) -> int:
        """The first tick in which `action` can run after `earlier`, which ran in `tick`."""
        same_rank = self.rank_of(action.stage) == self.rank_of(earlier.stage)
        in_turn = ACTION_KINDS.index(earlier.kind) < ACTION_KINDS.index(action.kind)
        waits = self.head == "between" or (self.joint and earlier in self.needs(action))
        waits_for_head = waits and (earlier.kind, action.kind) == ("F", "B")
        return tick if same_rank and in_turn and not waits_for_head else tick + 1

    @cached_property
    def tick_of(self) -> dict[Action, int]:
        """The tick of each action: that in `starts`, otherwise the earliest possible. Blocked actions are left out."""
        if self.starts:
            rows = zip(self.orders, self.starts, strict=True)
            return {action: tick for order, ticks in rows for action, tick in zip(order, ticks, strict=True)}
        ticks: dict[Action, int] = {}
        done = [0] * self.ranks
        placed = -1
        while placed < len(ticks):
            placed = len(ticks)
            for rank, order in enumerate(self.orders):
                for before, action in zip((None, *order)[done[rank] :], order[done[rank] :]):
                    earlier = self.needs(action) + [before] * (before is not None)
                    if any(other not in ticks for other in earlier):
                        break
                    ticks[action] = max((self._soonest(action, ticks[e], e) for e in earlier), default=0)
                    done[rank] += 1
        return ticks

    @property
    def ticks(self) -> int:
        return 1 + max(self.tick_of.values())

    @cached_property
    def as_run(self) -> list[Action]:
        """All actions by tick; F, B and W of a tick in this order."""
        return sorted(self.tick_of, key=lambda action: (self.tick_of[action], ACTION_KINDS.index(action.kind)))

    def grid(self) -> list[list[list[Action]]]:
        """The actions of each rank in each tick: `[rank][tick]`, in the order in which they run."""
        cells = [[[] for _ in range(self.ticks)] for _ in range(self.ranks)]
        for action in self.as_run:
            cells[self.rank_of(action.stage)][self.tick_of[action]].append(action)
        return cells

    # ---- tables of the actions

    def _table(self, cells: Iterable[tuple[int, Action, int]]) -> np.ndarray:
        """A table with each value at its tick and at its action's rank."""
        table = np.full((self.ticks, self.ranks), -1, np.int32)
        for tick, action, value in cells:
            table[tick, self.rank_of(action.stage)] = value
        table.flags.writeable = False
        return table

    def _when_run(self, kind: str, value: Callable[[Action], int]) -> np.ndarray:
        return self._table((tick, a, value(a)) for a, tick in self.tick_of.items() if a.kind == kind)

    @cached_property
    def microbatch(self) -> dict[str, np.ndarray]:
        """By kind of action, the microbatch that it runs."""
        return {kind: self._when_run(kind, lambda action: action.microbatch) for kind in self.kinds}

    @cached_property
    def chunk(self) -> dict[str, np.ndarray]:
        """By kind of action, the index of the rank's stage that it runs; 0 if a rank has one."""
        return {kind: self._when_run(kind, lambda action: self.chunks[action.stage]) for kind in self.kinds}

    @cached_property
    def both(self) -> np.ndarray:
        """bool `[tick, rank]`: where F and B are one pass."""
        return (self.microbatch["F"] >= 0) & (self.microbatch["B"] >= 0) & self.joint

    # ---- slots of residuals

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools of the schedule: all, or only "F to B" if the backward pass is not split."""
        return POOLS if self.split else POOLS[:1]

    @cached_property
    def _slot_of(self) -> dict[str, dict[tuple[int, int], int]]:
        """By pool, the slot of each (stage, microbatch)."""

        def spans(pool: str) -> dict[tuple[int, int], Span]:
            made = ((action, tick) for action, tick in self.tick_of.items() if action.kind == pool[0])
            return {
                (a.stage, a.microbatch): Span(self.rank_of(a.stage), tick, self.tick_of[a._replace(kind=pool[-1])])
                for a, tick in made
            }

        return {pool: assign_slots(spans(pool)) for pool in self.pools}

    @cached_property
    def slots(self) -> dict[str, int]:
        """By pool, the number of slots that each rank needs."""
        return {pool: 1 + max(slots.values()) for pool, slots in self._slot_of.items()}

    @cached_property
    def keeps_across_ticks(self) -> bool:
        """Whether any residual is read in a later tick than that in which it was written."""
        return any(not np.array_equal(self.microbatch[pool[0]], self.microbatch[pool[-1]]) for pool in self.pools)

    @cached_property
    def slot(self) -> dict[str, dict[str, np.ndarray]]:
        """By pool and kind of action, the slot that it writes or reads."""

        def table(pool: str, kind: str) -> np.ndarray:
            return self._when_run(kind, lambda action: self._slot_of[pool][action.stage, action.microbatch])

        def kinds_between(first: str, last: str) -> tuple[str, ...]:
            return self.kinds[ACTION_KINDS.index(first) : ACTION_KINDS.index(last) + 1]

        return {pool: {kind: table(pool, kind) for kind in kinds_between(pool[0], pool[-1])} for pool in self.pools}

    # ---- messages

    def sender(self, action: Action) -> Action | None:
        """The action of another stage whose output F or B reads; None at the first and last stage."""
        stage = action.stage + (-1 if action.kind == "F" else 1)
        return action._replace(stage=stage) if 0 <= stage < self.stages and action.kind != "W" else None

    @cached_property
    def _message_slot_of(self) -> dict[Action, int]:
        """The slot of each action's message; F and B have separate slots."""
        slots: dict[Action, int] = {}
        for kind in "FB":
            readers = {a: self.sender(a) for a in self.tick_of if a.kind == kind and self.sender(a)}
            slots |= assign_slots(
                {a: Span(self.rank_of(a.stage), self.tick_of[s] + 1, self.tick_of[a]) for a, s in readers.items()}
            )
        return slots

    @cached_property
    def message_slots(self) -> dict[str, int]:
        """Most messages for F, and for B, that a rank holds at once; at least 1."""
        slots = self._message_slot_of.items()
        return {kind: 1 + max((slot for a, slot in slots if a.kind == kind), default=0) for kind in "FB"}

    @cached_property
    def message(self) -> dict[str, np.ndarray]:
        """Slot of the message that F and B read; -1 in the first and last stage, which read embedding and loss."""
        return {kind: self._when_run(kind, lambda a: self._message_slot_of.get(a, -1)) for kind in "FB"}

    @cached_property
    def late_gradients(self) -> bool:
        """Whether the gradient that B makes is sent in the next tick, beside its F, and arrives before its B.

        At the end of its own tick nothing but W could hide it. F and B as one pass begin with it."""
        beside = any({"F", "B"} <= set(segment.kinds) for segment in self.segments)
        return self.ranks > 1 and beside and not self.split and not self.joint

    @cached_property
    def arrival(self) -> dict[tuple[str, int], np.ndarray]:
        """By kind of the reader and distance in ranks: the slot of a message, in the tick in which it arrives."""
        cells: dict[tuple[str, int], list] = {}
        for action, slot in self._message_slot_of.items():
            sender = self.sender(action)
            shift = (self.rank_of(action.stage) - self.rank_of(sender.stage)) % self.ranks
            shift -= self.ranks * (2 * shift > self.ranks)  # the shorter way around the ring
            tick = self.tick_of[sender] + (action.kind == "B" and self.late_gradients)
            cells.setdefault((action.kind, shift), []).append((tick, action, slot))
        return {route: self._table(cells[route]) for route in sorted(cells)}

    # ---- the last stage's output, which the head reads

    @cached_property
    def exit_microbatch(self) -> np.ndarray:
        """int32 `[tick]`: the microbatch whose forward pass the last stage has run, -1 for none."""
        return self._when_run("F", lambda a: a.microbatch if a.stage == self.stages - 1 else -1).max(axis=1)

    @cached_property
    def _exit_slot_of(self) -> dict[Action, int]:
        forward = [a for a in self.tick_of if a.kind == "F" and a.stage == self.stages - 1]
        return assign_slots({a: Span(0, self.tick_of[a], self.tick_of[a._replace(kind="B")]) for a in forward})

    @cached_property
    def exit_slots(self) -> int:
        """Number of microbatches whose outputs, or their gradients, are held between F and B of the last stage."""
        return 1 + max(self._exit_slot_of.values())

    @cached_property
    def exit_slot(self) -> dict[str, np.ndarray]:
        """int32 `[tick]`: the slot that the last stage's F writes, and the one that its B reads."""

        def slot(action: Action) -> int:
            return self._exit_slot_of.get(action._replace(kind="F"), -1)

        return {kind: self._when_run(kind, slot).max(axis=1) for kind in "FB"}

    # ---- segments to compile

    @cached_property
    def segments(self) -> list[Segment]:
        """Runs of ticks, divided where no kind of action occurs on both sides, so that each kind is compiled once."""
        used = {kind: np.flatnonzero(self.microbatch[kind].max(axis=1) >= 0) for kind in self.kinds}

        def active(tick: int) -> set[str]:
            return {kind for kind, ticks in used.items() if ticks[0] <= tick <= ticks[-1]}

        segments: list[Segment] = []
        for kinds, ticks in groupby(range(self.ticks), active):
            start = next(ticks)
            if segments and kinds & set(segments[-1].kinds):
                start, _, before = segments.pop()
                kinds = kinds | set(before)
            segments.append(Segment(start, self.ticks, "".join(kind for kind in ACTION_KINDS if kind in kinds)))
        stops = [segment.start for segment in segments[1:]] + [self.ticks]
        return [segment._replace(stop=stop) for segment, stop in zip(segments, stops)]

    # ---- checks

    def _check_sizes(self) -> None:
        counts = {self.placement.count(rank) for rank in range(self.ranks)}
        if self.microbatches < 1 or len(counts) != 1 or 0 in counts or max(self.placement) >= self.ranks:
            self._refuse(
                f"{self.stages} stages and {self.microbatches} microbatches do not fit {self.ranks} ranks: "
                "each rank holds as many stages as the others, and there is at least one microbatch"
            )
        if self.head not in ("inside", "between"):
            self._refuse(f"head={self.head!r}: write 'inside' or 'between'")

    def _check_actions(self) -> None:
        count = Counter((rank, action) for rank, order in enumerate(self.orders) for action in order)
        wanted = {
            (self.rank_of(stage), Action(stage, kind, microbatch))
            for stage in range(self.stages)
            for kind in self.kinds
            for microbatch in range(self.microbatches)
        }
        wrong = {
            "not of this schedule, or on another rank than its stage": set(count) - wanted,
            "repeated": {key for key in count if count[key] > 1},
            "missing": wanted - set(count),
        }
        for what, actions in wrong.items():
            if actions:
                listed = ", ".join(f"{action} on rank {rank}" for rank, action in sorted(actions)[:LISTED])
                listed += f" and {len(actions) - LISTED} more" * (len(actions) > LISTED)
                self._refuse(f"{what}: {listed}", {action for _, action in actions})

    def _check_starts(self) -> None:
        action_in: dict[tuple[int, int, str], Action] = {}
        for action, tick in self.tick_of.items():
            cell = (self.rank_of(action.stage), tick, action.kind)
            if cell in action_in:
                both = f"{action_in[cell]} and {action} are both in tick {tick} of rank {cell[0]}"
                self._refuse(f"slot clash: {both}, which holds one action of each kind", {action_in[cell], action})
            action_in[cell] = action
        for action, tick in self.tick_of.items():
            for need in self.needs(action):
                soonest = self._soonest(action, self.tick_of[need], need)
                if tick < soonest:
                    reads = f"{action} in tick {tick} reads {need} of tick {self.tick_of[need]}"
                    self._refuse(f"dependency broken: {reads}, so tick {soonest} is its soonest", {action})

    def _check_deadlock(self) -> None:
        left = [[action for action in order if action not in self.tick_of] for order in self.orders]
        blocked = [actions[0] for actions in left if actions]
        if blocked:
            lacking = ((action, [str(n) for n in self.needs(action) if n not in self.tick_of]) for action in blocked)
            waits = ", ".join(f"{action} waits for {' '.join(needs)}" for action, needs in lacking)
            self._refuse(f"deadlock: {waits}", set(blocked))

    def _refuse(self, why: str, marked: Iterable[Action] = ()) -> None:
        """Raise ScheduleError with the orders (by tick, if ticks are given), with marked actions between > and <."""
        marked = set(marked)
        rows = []
        for rank, order in enumerate(self.orders):
            ticks = self.starts[rank] if self.starts else range(len(order))
            rows.append([[] for _ in range(1 + max(ticks, default=-1))])
            for action, tick in zip(order, ticks, strict=True):
                rows[rank][tick].append(f">{action}<" if action in marked else action)
        raise refused(self.name, why, rows, joint=self.joint)


def assign_slots(spans: Mapping) -> dict:
    """For each span the lowest slot that no overlapping span of its rank uses.

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


def refused(name: str, why: str, rows: list[list[list]], *, joint: bool = False) -> ScheduleError:
    """The error for a schedule that cannot run, with its grid."""
    return ScheduleError(f"schedule {name!r}: {why}.\n{grid_text(rows, joint=joint)}")


def cell_text(cell: Iterable, *, joint: bool = False) -> str:
    """The actions of a rank in a tick, joined by +, or by & if F and B are one pass.

    >>> cell_text([Action(0, "F", 2), Action(3, "B", 1), Action(3, "W", 0)], joint=True)
    '0F2&3B1+3W0'
    """
    text = "+".join(map(str, cell))
    return re.sub(r"(F\d+<?)\+(>?\d+B)", r"\1&\2", text) if joint else text


def grid_text(rows: list[list[list]], first: int = 0, *, joint: bool = False) -> str:
    """A grid `[rank][tick]` as text, with ticks counted from `first`."""
    cells = [[cell_text(cell, joint=joint) or "." for cell in row] for row in rows]
    columns = max(map(len, cells), default=0)
    cells = [row + ["."] * (columns - len(row)) for row in cells]
    ticks = [str(tick) for tick in range(first, first + columns)]
    width = max((len(text) for row in (ticks, *cells) for text in row), default=1)
    labels = ["tick", *(f"rank {rank}" for rank in range(len(rows)))]
    label_width = max(map(len, labels))
    lines = zip(labels, [ticks, *cells])
    return "\n".join(" ".join([label.ljust(label_width), *(t.rjust(width) for t in row)]) for label, row in lines)
