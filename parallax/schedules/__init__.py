"""Pipeline schedules as data: an order of actions for each rank; a new schedule is a function in `named`.

    >>> print(by_name("gpipe", ranks=2, microbatches=3))
    gpipe ranks=2 stages=2 microbatches=3 ticks=8 lockstep bubble=25.0%
    tick     0   1   2   3   4   5   6   7
    rank 0 0F0 0F1 0F2   .   . 0B0 0B1 0B2
    rank 1   . 1F0 1F1 1F2 1B0 1B1 1B2   .

`1F0` is the forward pass of microbatch 0 in stage 1, `1B0` its backward pass, `1W0` the part of it that makes the
weights' gradients, where a schedule splits it off. A tick holds at most one action of each kind per rank, in that
order. When it ends, every rank passes on what it made, so it lasts as long as its dearest rank.
"""

from parallax.schedules.draw import gantt
from parallax.schedules.files import load_csv, save_csv
from parallax.schedules.named import (
    SCHEDULES,
    accumulate,
    by_name,
    check_name,
    check_virtual,
    gpipe,
    in_turn,
    interleaved,
    one_f_one_b,
    zero_bubble,
    zero_bubble_v,
)
from parallax.schedules.order import KINDS, Action, ScheduleError
from parallax.schedules.pricing import Costs, Figures, figures
from parallax.schedules.tables import Schedule, Segment

__all__ = [
    "KINDS",
    "SCHEDULES",
    "Action",
    "Costs",
    "Figures",
    "Schedule",
    "ScheduleError",
    "Segment",
    "accumulate",
    "by_name",
    "check_name",
    "check_virtual",
    "figures",
    "gantt",
    "gpipe",
    "in_turn",
    "interleaved",
    "load_csv",
    "one_f_one_b",
    "save_csv",
    "zero_bubble",
    "zero_bubble_v",
]
