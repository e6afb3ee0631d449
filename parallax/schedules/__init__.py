"""Pipeline schedules as data: an order of actions for each rank; a new schedule is a function here.

    >>> print(by_name("gpipe", stages=2, microbatches=3))
    gpipe stages=2 microbatches=3 ticks=8 bubble=25.0%
    tick     0   1   2   3   4   5   6   7
    rank 0 0F0 0F1 0F2   .   . 0B0 0B1 0B2
    rank 1   . 1F0 1F1 1F2 1B0 1B1 1B2   .

`1F0` is the forward pass of microbatch 0 in stage 1, `1B0` its backward pass. A tick holds at most one action
of each kind per rank, forward first. When it ends, every rank passes on what it made, so it lasts as long as
its dearest rank.
"""

from collections.abc import Callable

from parallax.errors import check_choice
from parallax.schedules.order import Action, ScheduleError
from parallax.schedules.tables import Schedule, Segment

__all__ = ["SCHEDULES", "Action", "Schedule", "ScheduleError", "Segment", "accumulate", "by_name", "gpipe"]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: bubble (P-1)/(M+P-1), M slots (Huang et al. 2019, section 2.3).

    The head's work lies between the two, where all ranks can share it.
    """
    orders = [[Action(stage, kind, m) for kind in "FB" for m in range(microbatches)] for stage in range(stages)]
    return Schedule("gpipe", stages, microbatches, tuple(map(tuple, orders)), head="between")


def accumulate(microbatches: int) -> Schedule:
    """Gradient accumulation as a pipeline of one stage: F and B of one microbatch in each tick, one slot.

    >>> print(accumulate(microbatches=2))
    accumulate stages=1 microbatches=2 ticks=2 bubble=0.0%
    tick         0       1
    rank 0 0F0+0B0 0F1+0B1
    """
    order = tuple(Action(0, kind, m) for m in range(microbatches) for kind in "FB")
    return Schedule("accumulate", 1, microbatches, (order,))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe}


def by_name(name: str, stages: int, microbatches: int) -> Schedule:
    """The schedule called `name`; with one stage each of them is gradient accumulation.

    Raises ConfigError for an unknown name.
    """
    check_choice("pipeline.schedule", name, SCHEDULES)
    return accumulate(microbatches) if stages == 1 else SCHEDULES[name](stages, microbatches)
