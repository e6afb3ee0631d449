"""An order of actions per rank, and the ticks, the price and the picture that follow from it."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from parallax.errors import ParallaxError

KINDS = ("F", "B")  # in the order in which they run inside a tick


class ScheduleError(ParallaxError):
    """An order of actions repeats or forgets one, or waits for ever."""


class Action(NamedTuple):
    """One pass of one microbatch through one stage.

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
        match = re.fullmatch(r"(\d+)([FB])(\d+)", text)
        if match is None:
            raise ScheduleError(f"{text!r} is not an action; write stage, F or B, microbatch, as in '2F0'.")
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Orders:
    """What each rank does, in which order; stage s runs on rank s % ranks.

    `head` says where the loss is computed: "inside" the ticks of the last stage, one microbatch at a time, or
    once "between" the last forward and the first backward. Raises ScheduleError when the orders cannot run.
    """

    name: str
    stages: int
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    head: str = "inside"

    def __post_init__(self):
        self.check()

    @property
    def ranks(self) -> int:
        return len(self.orders)

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def check(self) -> None:
        """Raise ScheduleError unless each action stands once, on its rank, and none waits for ever."""
        if self.stages < 1 or self.microbatches < 1 or not self.orders or self.stages % self.ranks:
            self._refuse(f"{self.stages} stages and {self.microbatches} microbatches do not fit {self.ranks} ranks")
        if self.head not in ("inside", "between"):
            self._refuse(f"head={self.head!r}: write 'inside' or 'between'")
        count = Counter((rank, action) for rank, order in enumerate(self.orders) for action in order)
        wanted = {
            (self.rank_of(stage), Action(stage, kind, microbatch))
            for stage in range(self.stages)
            for kind in KINDS
            for microbatch in range(self.microbatches)
        }
        self._refuse_any("missing", wanted - set(count))
        self._refuse_any("not of this schedule, or on another rank than its stage", set(count) - wanted)
        self._refuse_any("repeated", {key for key in count if count[key] > 1})
        if len(self.tick_of) < len(wanted):
            self._refuse(f"deadlock: {self._waits()}")

    def _refuse_any(self, what: str, found: set[tuple[int, Action]]) -> None:
        if found:
            self._refuse(f"{what}: {', '.join(f'{action} on rank {rank}' for rank, action in sorted(found))}")

    def _refuse(self, why: str) -> None:
        rows = [f"rank {rank}: {' '.join(map(str, order))}" for rank, order in enumerate(self.orders)]
        raise ScheduleError("\n".join([f"schedule {self.name!r}: {why}.", *rows]))

    def _waits(self) -> str:
        """For each rank that cannot go on: the action it is at, and what that needs."""
        left = [[action for action in order if action not in self.tick_of] for order in self.orders]
        waits = []
        for action, *_ in filter(None, left):
            lacking = [str(need) for need in self.needs(action) if need not in self.tick_of]
            waits.append(f"{action} waits for {' '.join(lacking)}")
        return ", ".join(waits)

    def needs(self, action: Action) -> list[Action]:
        """The actions whose results `action` reads."""
        stage, kind, microbatch = action
        if kind == "F":
            return [Action(stage - 1, "F", microbatch)] if stage > 0 else []
        if stage < self.stages - 1:
            return [Action(stage, "F", microbatch), Action(stage + 1, "B", microbatch)]
        read_by_head = range(self.microbatches) if self.head == "between" else [microbatch]
        return [Action(stage, "F", m) for m in read_by_head]

    def _soonest(self, action: Action, tick: int, earlier: Action) -> int:
        """The first tick in which `action` can run after `earlier`, which ran in `tick`."""
        same_rank = self.rank_of(action.stage) == self.rank_of(earlier.stage)
        together = same_rank and (earlier.kind, action.kind) == KINDS and self.head == "inside"
        return tick if together else tick + 1

    @cached_property
    def tick_of(self) -> dict[Action, int]:
        """The earliest tick that order and needs allow each action; without those that are stuck."""
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

    def _costs(self, tf: float, tb: float) -> np.ndarray:
        """`[tick, rank]` cost of what runs there."""
        costs = np.zeros((self.ticks, self.ranks))
        for action, tick in self.tick_of.items():
            costs[tick, self.rank_of(action.stage)] += tf if action.kind == "F" else tb
        return costs

    def price(self, *, tf: float = 1, tb: float = 2) -> float:
        """Time of all ticks, each as long as its dearest rank; one F takes `tf`, one B `tb`."""
        return float(self._costs(tf, tb).max(axis=1).sum())

    def bubble(self, *, tf: float = 1, tb: float = 2) -> float:
        """Share of that time in which an average rank waits."""
        return 1 - float(self._costs(tf, tb).mean(axis=1).sum()) / self.price(tf=tf, tb=tb)

    def asynchronous_price(self, *, tf: float = 1, tb: float = 2) -> float:
        """Time if ranks waited for what they need, not for ticks: the figure that papers quote."""
        ended: dict[Action, float] = {}
        free = [0.0] * self.ranks
        for action in sorted(self.tick_of, key=lambda a: (self.tick_of[a], KINDS.index(a.kind))):
            rank = self.rank_of(action.stage)
            start = max(free[rank], *(ended[need] for need in self.needs(action)), 0.0)
            free[rank] = ended[action] = start + (tf if action.kind == "F" else tb)
        return max(free)

    def __str__(self) -> str:
        cells = [[[] for _ in range(self.ticks)] for _ in range(self.ranks)]
        for action in sorted(self.tick_of, key=lambda a: KINDS.index(a.kind)):
            cells[self.rank_of(action.stage)][self.tick_of[action]].append(str(action))
        grid = [["+".join(cell) or "." for cell in row] for row in cells]
        width = max(len(text) for row in grid for text in row)
        labels = ["tick  ", *(f"rank {rank}" for rank in range(self.ranks))]
        rows = zip(labels, [map(str, range(self.ticks)), *grid])
        sizes = f"stages={self.stages} microbatches={self.microbatches} ticks={self.ticks}"
        lines = [" ".join([label, *(text.rjust(width) for text in row)]) for label, row in rows]
        return "\n".join([f"{self.name} {sizes} bubble={100 * self.bubble():.1f}%", *lines])
