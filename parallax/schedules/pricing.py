"""The cost of a schedule: time and bubble in lockstep and asynchronous, activations and messages."""

from typing import NamedTuple

import numpy as np

from parallax.errors import ConfigError
from parallax.schedules.timetable import Action, Timetable

SHORTEST, LONGEST = 1e-9, 1e9  # times of an action, in any unit; sums of them stay exact enough to compare


class Costs(NamedTuple):
    """Time of one microbatch in all stages of a rank, in any unit; each of v stages takes 1/v of it.

    `backward` is the whole backward pass, `weights` the part of W if a schedule splits it off; `send` is the time of a
    message from rank to rank.
    """

    forward: float = 1
    backward: float = 2
    weights: float = 1
    send: float = 0

    def of(self, schedule: Timetable) -> dict[str, float]:
        """Time of one action of each kind. Raises ConfigError for invalid costs."""
        for name, time in self._asdict().items():
            if time != 0 and not SHORTEST <= time <= LONGEST:
                allowed = f"write 0, or a number from {SHORTEST:g} to {LONGEST:g}"
                raise ConfigError(f"{name}={time:g} is not a valid time of an action; {allowed}.")
        if self.weights > self.backward:
            larger = f"weights={self.weights:g} is more than backward={self.backward:g}"
            raise ConfigError(f"{larger}, of which it is a part; use weights of {self.backward:g} or less.")
        if self.forward + self.backward == 0:
            raise ConfigError("forward=0 and backward=0: there is no work; make one more than 0.")
        backward = self.backward - (self.weights if schedule.split else 0)
        whole = {"F": self.forward, "B": backward, "W": self.weights}
        return {kind: time / schedule.virtual for kind, time in whole.items()}


USUAL = Costs()
ZERO_BUBBLE = {"zero_bubble": 1, "zero_bubble_v": 2}  # the schedules with W, and their stages on each rank


class Figures(NamedTuple):
    """The costs of a schedule. A bubble is the share of the time in which an average rank is idle."""

    ticks: int
    lockstep_time: float
    lockstep_bubble: float
    asynchronous_time: float
    asynchronous_bubble: float
    activations: tuple[float, ...]  # per rank, the most held at once, in microbatches of all the rank's layers
    sends: tuple[int, ...]  # per rank, messages to another


def figures(schedule: Timetable, costs: Costs = USUAL) -> Figures:
    """The costs of a schedule, in lockstep and asynchronous.

    In lockstep, as in training, a tick lasts as long as its slowest rank and ends with a message. Asynchronous, as
    in papers, a rank waits only for its inputs.
    """
    work = schedule.microbatches * (costs.forward + costs.backward)  # of each rank
    lockstep, time_of = float(tick_ends(schedule, costs)[-1]), costs.of(schedule)
    starts = start_times(schedule, costs, asynchronous=True)
    free = max(start + time_of[action.kind] for action, start in starts.items())
    held = tuple(float(most) for most in activations(schedule))
    return Figures(schedule.ticks, lockstep, 1 - work / lockstep, free, 1 - work / free, held, sends(schedule))


def least_bubble(name: str, ranks: int, microbatches: int, virtual: int = 1, costs: Costs = USUAL) -> float:
    """Lower bound of the lockstep bubble of the schedule called `name`, without building it.

    The last rank waits for the first forward pass, the first rank for the last backward pass, unless W fills that wait.
    """
    passes = costs.forward + (0 if name in ZERO_BUBBLE else costs.backward)
    wait = (ranks - 1) * passes / (ZERO_BUBBLE.get(name) or virtual)
    return wait / (wait + microbatches * (costs.forward + costs.backward))


def least_held(name: str, ranks: int, microbatches: int, virtual: int = 1) -> tuple[float, float]:
    """Lower bounds of the microbatches for which each rank has slots: from F to B, and from B to W."""
    if ranks == 1:
        return 1, 0
    if name == "gpipe":
        return microbatches, 0
    if name == "zero_bubble_v":
        return min(microbatches, ranks), min(microbatches, (ranks + 1) / 2)
    held = (2 * (ranks - 1) + (virtual - 1) * ranks + 1) / virtual
    return min(microbatches, held), min(microbatches, ranks) if name in ZERO_BUBBLE else 0


def tick_ends(schedule: Timetable, costs: Costs = USUAL) -> np.ndarray:
    """`[tick]`: when each tick and the message after it end in lockstep."""
    time_of = costs.of(schedule)
    busy = np.zeros((schedule.ticks, schedule.ranks))
    for action, tick in schedule.tick_of.items():
        busy[tick, schedule.rank_of(action.stage)] += time_of[action.kind]
    return np.cumsum(busy.max(axis=1) + costs.send * (schedule.ranks > 1))


def start_times(schedule: Timetable, costs: Costs = USUAL, *, asynchronous: bool) -> dict[Action, float]:
    """When each action begins, in lockstep or asynchronous, that is, if a rank waits only for its inputs.

    In both cases a rank keeps its order, and in a tick it runs F, B and W one after the other.
    """
    time_of, ticks = costs.of(schedule), [0.0, *tick_ends(schedule, costs).tolist()]
    starts: dict[Action, float] = {}
    free = [0.0] * schedule.ranks
    for action in schedule.as_run:
        rank, ready = schedule.rank_of(action.stage), [ticks[schedule.tick_of[action]]]
        if asynchronous:
            ready = [
                starts[need] + time_of[need.kind] + costs.send * (schedule.rank_of(need.stage) != rank)
                for need in schedule.needs(action)
            ]
        starts[action] = max(free[rank], *ready, 0.0)
        free[rank] = starts[action] + time_of[action.kind]
    return starts


def activations(schedule: Timetable) -> np.ndarray:
    """`[rank]`: most activations held at once, from F until the last action that reads them, in whole microbatches."""
    last = schedule.kinds[-1]
    held = np.zeros((schedule.ticks, schedule.ranks))
    for action, tick in schedule.tick_of.items():
        if action.kind == "F":
            until = schedule.tick_of[action._replace(kind=last)]
            held[tick : until + 1, schedule.rank_of(action.stage)] += 1 / schedule.virtual
    return held.max(axis=0)


def sends(schedule: Timetable) -> tuple[int, ...]:
    """Messages that each rank sends to others: outputs forward, their gradients back."""
    counts = [0] * schedule.ranks
    for sender, receiver in zip(schedule.placement, schedule.placement[1:]):
        for rank in (sender, receiver) if sender != receiver else ():
            counts[rank] += schedule.microbatches
    return tuple(counts)
