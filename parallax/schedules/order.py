"""An order of actions for each rank, and the ticks that follow from it."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parallax.runtime.errors import ParallaxError

KINDS = ("F", "B", "W")  # in the order in which they run inside a tick
LISTED = 8  # actions that an error names


class ScheduleError(ParallaxError):
    """An order of actions repeats or forgets one, or one stands before what it needs; or its file cannot be used."""


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


@dataclass(frozen=True)
class Orders:
    """What each rank does, in which order. `placement[s]` is the rank that holds stage s.

    With W among the actions, B is the gradient of a stage's input alone and W that of its weights; without, B is
    both. `head` says where the loss is computed: "inside" the ticks, one microbatch at a time when the last stage
    has run it, or once "between" the last forward and the first backward. `starts` are the actions' ticks; without
    them each runs as soon as it can. Raises ScheduleError when the orders cannot run.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    head: str = "inside"
    starts: tuple[tuple[int, ...], ...] | None = None

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
        """Whether W is an action of its own."""
        return any(action.kind == "W" for order in self.orders for action in order)

    @property
    def kinds(self) -> tuple[str, ...]:
        return KINDS if self.split else KINDS[:2]

    def rank_of(self, stage: int) -> int:
        return self.placement[stage]

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """For each stage, which of its rank's stages it is."""
        return tuple(self.placement[:stage].count(rank) for stage, rank in enumerate(self.placement))

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
        in_turn = KINDS.index(earlier.kind) < KINDS.index(action.kind)
        waits_for_head = self.head == "between" and (earlier.kind, action.kind) == ("F", "B")
        return tick if same_rank and in_turn and not waits_for_head else tick + 1

    @cached_property
    def tick_of(self) -> dict[Action, int]:
        """The tick of each action; where none are given the earliest, without those that are stuck."""
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
        """All actions as they run: by tick, F, B and W of a tick in this order."""
        return sorted(self.tick_of, key=lambda action: (self.tick_of[action], KINDS.index(action.kind)))

    # ---- what cannot run is refused, with the grid

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
        self._refuse_any("not of this schedule, or on another rank than its stage", set(count) - wanted)
        self._refuse_any("repeated", {key for key in count if count[key] > 1})
        self._refuse_any("missing", wanted - set(count))

    def _check_starts(self) -> None:
        at: dict[tuple[int, int, str], Action] = {}
        for action, tick in self.tick_of.items():
            cell = (self.rank_of(action.stage), tick, action.kind)
            if cell in at:
                both = f"{at[cell]} and {action} are both in tick {tick} of rank {cell[0]}"
                self._refuse(f"slot clash: {both}, which holds one action of each kind", {at[cell], action})
            at[cell] = action
        for action, tick in self.tick_of.items():
            for need in self.needs(action):
                soonest = self._soonest(action, self.tick_of[need], need)
                if tick < soonest:
                    reads = f"{action} in tick {tick} reads {need} of tick {self.tick_of[need]}"
                    self._refuse(f"dependency broken: {reads}, so tick {soonest} is its soonest", {action})

    def _check_deadlock(self) -> None:
        left = [[action for action in order if action not in self.tick_of] for order in self.orders]
        stuck = [actions[0] for actions in left if actions]
        if stuck:
            lacking = ((action, [str(n) for n in self.needs(action) if n not in self.tick_of]) for action in stuck)
            waits = ", ".join(f"{action} waits for {' '.join(needs)}" for action, needs in lacking)
            self._refuse(f"deadlock: {waits}", set(stuck))

    def _refuse_any(self, what: str, found: set[tuple[int, Action]]) -> None:
        if found:
            listed = ", ".join(f"{action} on rank {rank}" for rank, action in sorted(found)[:LISTED])
            listed += f" and {len(found) - LISTED} more" * (len(found) > LISTED)
            self._refuse(f"{what}: {listed}", {action for _, action in found})

    def _refuse(self, why: str, marked: Iterable[Action] = ()) -> None:
        """Raise ScheduleError with the grid as it was written, the marked actions between > and <."""
        marked = set(marked)
        rows = [
            [[f">{action}<" if action in marked else str(action) for action in cell] for cell in row]
            for row in self._written()
        ]
        raise refusal(self.name, why, rows)

    def _written(self) -> list[list[list[Action]]]:
        """Cells by rank and tick where ticks are given, else by rank and place in the order."""
        if not self.starts:
            return [[[action] for action in order] for order in self.orders]
        last = max((tick for ticks in self.starts for tick in ticks), default=0)
        rows = [[[] for _ in range(last + 1)] for _ in self.orders]
        for row, order, ticks in zip(rows, self.orders, self.starts, strict=True):
            for action, tick in zip(order, ticks, strict=True):
                row[tick].append(action)
        return rows

    def grid(self) -> list[list[list[Action]]]:
        """The actions of each rank in each tick: `[rank][tick]`, in the order in which they run."""
        cells = [[[] for _ in range(self.ticks)] for _ in range(self.ranks)]
        for action in self.as_run:
            cells[self.rank_of(action.stage)][self.tick_of[action]].append(action)
        return cells


def refusal(name: str, why: str, rows: list[list[list[str]]]) -> ScheduleError:
    """The error for a grid, which it shows, that cannot run."""
    return ScheduleError(f"schedule {name!r}: {why}.\n{grid_text(rows)}")


def grid_text(rows: list[list[list[str]]], first: int = 0) -> str:
    """Ranks down, ticks along from `first`, what shares a tick joined by +."""
    cells = [["+".join(cell) or "." for cell in row] for row in rows]
    columns = max(map(len, cells), default=0)
    cells = [row + ["."] * (columns - len(row)) for row in cells]
    width = max((len(text) for row in cells for text in row), default=1)
    width = max(width, len(str(first + columns - 1)))
    labels = ["tick", *(f"rank {rank}" for rank in range(len(rows)))]
    labels = [label.ljust(max(map(len, labels))) for label in labels]
    ticks = [str(tick) for tick in range(first, first + columns)]
    lines = zip(labels, [ticks, *cells])
    return "\n".join(" ".join([label, *(text.rjust(width) for text in row)]) for label, row in lines)
