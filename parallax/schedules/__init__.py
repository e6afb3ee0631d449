"""Pipeline schedules as data: an order of actions for each rank. Add a new schedule as a function in `definitions`.

    >>> print(by_name("gpipe", ranks=2, microbatches=3))
    gpipe ranks=2 stages=2 microbatches=3 ticks=8 lockstep bubble=25.0%
    tick     0   1   2   3   4   5   6   7
    rank 0 0F0 0F1 0F2   .   . 0B0 0B1 0B2
    rank 1   . 1F0 1F1 1F2 1B0 1B1 1B2   .

`1F0` is the forward pass of microbatch 0 in stage 1 and `1B0` its backward pass. If a schedule splits the backward
pass, `1W0` is the part that computes the weights' gradients. In a tick, a rank runs at most one action of each kind, in
this order. All ranks take part in its messages, so a tick lasts as long as its slowest rank. F and B that are one pass
are written `1F2&0B1`.
"""

from parallax.schedules.csv_files import load_csv, save_csv
from parallax.schedules.definitions import (
    SCHEDULES,
    accumulate,
    by_name,
    check_schedule,
    dualpipe_v,
    gpipe,
    gpipe_on,
    interleaved,
    one_f_one_b,
    zero_bubble,
    zero_bubble_v,
)
from parallax.schedules.drawing import gantt
from parallax.schedules.pricing import Costs, Figures, figures
from parallax.schedules.schedule import Schedule
from parallax.schedules.timetable import ACTION_KINDS, Action, ScheduleError, Segment
