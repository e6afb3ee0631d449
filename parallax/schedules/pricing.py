"""The cost of a schedule: time and bubble in lockstep and asynchronous, activations and messages."""

from typing import NamedTuple

import numpy as np

from parallax.errors import ConfigError
from parallax.schedules.timetable import Action, Timetable

SHORTEST, LONGEST = 1e-9, 1e9  # times of an action, in any unit; sums of them stay exact enough to compare


class Costs(NamedTuple):
    """Time of one microbatch in all stages of a rank, in any unit; each of v stages takes 1/v of it.

    `backward` is the whole backward pass, `weights` the part of W if a schedule splits it off; `send` is the time of a
    message from rank to rank, `hidden` what F and B save where they are one pass.
    """

    forward: float = 1
    backward: float = 2
    weights: float = 1
    send: float = 0
    hidden: float = 0

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
        if self.hidden > min(self.forward, backward):
            shorter = f"the shorter of F, {self.forward:g}, and B, {backward:g}"
            raise ConfigError(f"hidden={self.hidden:g} is more than {shorter}, of which one pass of both hides it.")
        whole = {"F": self.forward, "B": backward, "W": self.weights}
        return {kind: time / schedule.virtual for kind, time in whole.items()}


USUAL = Costs()
# The schedules with W, and their stages on each rank.
ZERO_BUBBLE = {"zero_bubble": 1, "zero_bubble_v": 2, "dualpipe_v": 2}


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
    work, lockstep = _work_and_lockstep_time(schedule, costs)
    time_of = times(schedule, costs)
    starts = start_times(schedule, costs, asynchronous=True)
    free = max(start + time_of[action] for action, start in starts.items())
    held = tuple(float(most) for most in activations(schedule))
    return Figures(schedule.ticks, lockstep, 1 - work / lockstep, free, 1 - work / free, held, sends(schedule))


def lockstep_bubble(schedule: Timetable, costs: Costs = USUAL) -> float:
    """The bubble in lockstep, without the other figures."""
    work, lockstep = _work_and_lockstep_time(schedule, costs)
    return 1 - work / lockstep


def _work_and_lockstep_time(schedule: Timetable, costs: Costs) -> tuple[float, float]:
    """The time in which an average rank works, and that of all ticks."""
    saved = costs.hidden / schedule.virtual * schedule.both.sum() / schedule.ranks
    work = schedule.microbatches * (costs.forward + costs.backward) - float(saved)
    return work, float(tick_ends(schedule, costs)[-1])


def stages_of_rank(name: str, virtual: int = 1) -> int:
    """The number of stages on each rank with the schedule called `name`, without building it.

    >>> stages_of_rank("zero_bubble_v"), stages_of_rank("interleaved", virtual=4)
    (2, 4)
    """
    return ZERO_BUBBLE.get(name) or virtual


def least_bubble(name: str, ranks: int, microbatches: int, virtual: int = 1, costs: Costs = USUAL) -> float:
    """Lower bound of the lockstep bubble of the schedule called `name`, without building it.

    The last rank waits for the first forward pass, the first rank for the last backward pass, unless W fills that wait.
    """
    passes = costs.forward + (0 if name in ZERO_BUBBLE else costs.backward)
    wait = (ranks - 1) * passes / stages_of_rank(name, virtual)
    return wait / (wait + microbatches * (costs.forward + costs.backward))


def least_held(name: str, ranks: int, microbatches: int, virtual: int = 1) -> tuple[float, float]:
    """Lower bounds of the microbatches for which each rank has slots: from F to B, and from B to W."""
    if ranks == 1:
        return 1, 0
    if name == "gpipe":
        return microbatches, 0
    if name in ("zero_bubble_v", "dualpipe_v"):
        return min(microbatches, ranks + (name == "dualpipe_v") / 2), min(microbatches, ranks / 2)
    held = (2 * (ranks - 1) + (virtual - 1) * ranks + 1) / virtual
    return min(microbatches, held), min(microbatches, ranks) if name in ZERO_BUBBLE else 0


def tick_ends(schedule: Timetable, costs: Costs = USUAL) -> np.ndarray:
    """`[tick]`: when each tick and the message after it end in lockstep."""
    time_of = costs.of(schedule)
    busy = schedule.both * (-costs.hidden / schedule.virtual)
    for action, tick in schedule.tick_of.items():
        busy[tick, schedule.rank_of(action.stage)] += time_of[action.kind]
    return np.cumsum(busy.max(axis=1) + costs.send * (schedule.ranks > 1))


def start_times(schedule: Timetable, costs: Costs = USUAL, *, asynchronous: bool) -> dict[Action, float]:
    """When each action begins, in lockstep or asynchronous, that is, if a rank waits only for its inputs.

    In both cases a rank keeps its order, and in a tick it runs F, B and W one after the other; F and B that are one
    pass begin together.
    """
    time_of, ticks = times(schedule, costs), [0.0, *tick_ends(schedule, costs).tolist()]
    starts: dict[Action, float] = {}
    free = [0.0] * schedule.ranks
    for passes in one_by_one(schedule):
        rank, ready = schedule.rank_of(passes[0].stage), [ticks[schedule.tick_of[passes[0]]]]
        if asynchronous:
            ready = [
                starts[need] + time_of[need] + costs.send * (schedule.rank_of(need.stage) != rank)
                for action in passes
                for need in schedule.needs(action)
            ]
        starts |= dict.fromkeys(passes, max(free[rank], *ready, 0.0))
        free[rank] = starts[passes[0]] + time_of[passes[0]]
    return starts


def one_by_one(schedule: Timetable) -> list[tuple[Action, ...]]:
    """The passes in an order in which they can run: an action each, or F and B that are one."""
    pass_of: dict[tuple, tuple[Action, ...]] = {}
    for action in schedule.as_run:
        tick, rank = schedule.tick_of[action], schedule.rank_of(action.stage)
        key = tick, rank, "FB" if action.kind != "W" and schedule.both[tick, rank] else action.kind
        pass_of[key] = (*pass_of.get(key, ()), action)
    return [*pass_of.values()]


def times(schedule: Timetable, costs: Costs = USUAL) -> dict[Action, float]:
    """The time of each action's pass."""
    time_of, hidden = costs.of(schedule), costs.hidden / schedule.virtual
    both = time_of["F"] + time_of["B"] - hidden
    return {
        action: both if len(passes) > 1 else time_of[action.kind]
        for passes in one_by_one(schedule)
        for action in passes
    }


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
