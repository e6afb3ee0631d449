"""GPipe, 1F1B, interleaved 1F1B, zero bubble, DualPipeV: each is a function that returns the actions of each rank."""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np

from parallax.errors import LONGEST_PATH, ConfigError, nearest, quoted
from parallax.schedules.csv_files import load_csv
from parallax.schedules.schedule import Schedule
from parallax.schedules.timetable import ACTION_KINDS, Action
from parallax.user_code import CODE_FORM, named, names_code


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: bubble (P-1)/(M+P-1), M slots (Huang et al. 2019, section 2.3).

    The head runs between the two, where all ranks can share it.
    """
    return gpipe_on(tuple(range(ranks)), microbatches)


def gpipe_on(placement: Sequence[int], microbatches: int) -> Schedule:
    """GPipe for any placement: all microbatches forward through a rank's first stage, then its next, then backward."""
    orders = []
    for rank in range(max(placement) + 1):
        stages = [stage for stage, holder in enumerate(placement) if holder == rank]
        passes = [*((stage, "F") for stage in stages), *((stage, "B") for stage in reversed(stages))]
        orders.append(tuple(Action(*which, m) for which in passes for m in range(microbatches)))
    return Schedule("gpipe", tuple(placement), microbatches, tuple(orders), head="between")


def accumulate(microbatches: int) -> Schedule:
    """Gradient accumulation as a pipeline of one stage: F and B of one microbatch in each tick, one slot.

    >>> print(accumulate(microbatches=2))
    accumulate ranks=1 stages=1 microbatches=2 ticks=2 lockstep bubble=0.0%
    tick         0       1
    rank 0 0F0+0B0 0F1+0B1
    """
    order = tuple(Action(0, kind, m) for m in range(microbatches) for kind in "FB")
    return Schedule("accumulate", (0,), microbatches, (order,))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """PipeDream-Flush: GPipe's bubble with at most 2(P-1)+1 slots (Narayanan et al. 2021, section 2.2.1).

    Papers start with P-1-r forwards on rank r; here there are twice as many, so that in lockstep each later tick has
    both an F and a B.
    """
    return _alternating("one_f_one_b", tuple(range(ranks)), microbatches)


def interleaved(ranks: int, microbatches: int, virtual: int) -> Schedule:
    """1F1B with v stages on each rank, r, r+P, r+2P, ...: bubble (P-1)/(vM+P-1) if P divides M (the same, 2.2.2)."""
    return _alternating("interleaved", tuple(range(ranks)) * virtual, microbatches)


def zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1: as 1F1B, but rank r runs W of a microbatch r microbatches after its B (Qi et al. 2023, section 2.2).

    The bubble is 2(P-1) in lockstep and P-1 asynchronous, with times of 1 for F, B and W; that of 1F1B is 3(P-1). In
    lockstep it is larger because W has no separate tick while only later ranks run backward, and again at the end.
    """
    return _alternating("zero_bubble", tuple(range(ranks)), microbatches, lag=lambda rank: rank)


def zero_bubble_v(ranks: int, microbatches: int) -> Schedule:
    """Stages r and 2P-1-r on rank r, so that the first and the last share a rank, with W split: the stages of ZB-V (the
    same, section 6), in an order for lockstep.

    Stage s runs microbatch m forward in tick 2m+s and backward in tick 2m+4P-2-s, which never collide. W runs where
    others are busy longer, and otherwise when more than P-1 wait on a rank. So a rank holds at most min(M, P)
    microbatches from F to B and min(M, P/2) from B to W, and min(M, (3P-1)/2) of both. For M >= P the bubble is
    (5P-2)/4 in lockstep if P is even, (5P-3)/4 if it is odd, and at most (3P-2)/4 asynchronous if M >= 2P, with times
    of 1 for F, B and W. ZB-V as published has no gap between a rank's first action and its last: for M >= 2P-1 its
    bubble is 3.5(P-1) in lockstep and (P-1)/2 asynchronous, and it holds P microbatches.
    """
    return _in_a_v("zero_bubble_v", ranks, microbatches, joint=False)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV, half of DualPipe (DeepSeek-V3, section 3.2.1): zero_bubble_v with F and B of different microbatches as
    one pass.

    Each B runs one tick later than there, so that a rank's F is of its one stage when its B is of its other, and the
    head comes after both. So a rank holds at most min(M, P+1/2) microbatches from F to B, and min(M, P/2) from B to W.
    For M > P the bubble is P-1/2 in lockstep, and P-1 asynchronous, with times of 1 for F, B and W.
    """
    return _in_a_v("dualpipe_v", ranks, microbatches, joint=True)


def _in_a_v(name: str, ranks: int, microbatches: int, *, joint: bool) -> Schedule:
    """Down the ranks and back: of each stage an F and a B in every second tick, W where ticks have room."""
    placement = (*range(ranks), *reversed(range(ranks)))
    passes = [*itertools.product(range(2 * ranks), range(microbatches))]
    tick_of = {Action(stage, "F", m): 2 * m + stage for stage, m in passes}
    tick_of |= {Action(stage, "B", m): 2 * m + 4 * ranks - 2 + joint - stage for stage, m in passes}
    last_stage = [Action(2 * ranks - 1, "F", m) for m in range(microbatches)]
    heads = () if joint else {tick_of[action] for action in last_stage}
    orders, starts = _with_weights_in_gaps(tick_of, placement, ranks - 1, heads)
    return Schedule(name, placement, microbatches, orders, starts=starts, joint=joint)


def _alternating(name: str, placement: Sequence[int], microbatches: int, lag: Callable | None = None) -> Schedule:
    """Forward passes until the first gradient arrives, then forward and backward alternate.

    With several stages on a rank, P microbatches run through one of them, then through the next. `lag(rank)` is the
    number of passes by which W follows B; without it, B computes both.
    """
    ranks = max(placement) + 1
    virtual = len(placement) // ranks
    groups = _groups(microbatches, ranks)
    orders = []
    for rank in range(ranks):
        stages = [rank + chunk * ranks for chunk in range(virtual)]
        forward = [Action(stage, "F", m) for group in groups for stage in stages for m in group]
        backward = [Action(stage, "B", m) for group in groups for stage in reversed(stages) for m in group]
        ahead = 2 * (ranks - 1 - rank) + (virtual - 1) * len(groups[0])
        order = [*forward[:ahead]]
        for action, later in itertools.zip_longest(backward, forward[ahead:]):
            order += [later, action] if later else [action]
        orders.append(tuple(order) if lag is None else _with_weights(order, lag(rank)))
    return Schedule(name, tuple(placement), microbatches, tuple(orders))


def _groups(microbatches: int, ranks: int) -> list[range]:
    """Microbatches in groups of `ranks`; if that does not divide evenly, groups are larger, the first ones largest.

    A smaller group would leave its stages idle until its first microbatch returns to the rank.

    >>> _groups(9, 4)
    [range(0, 5), range(5, 9)]
    """
    count = max(microbatches // ranks, 1)
    return [range(group[0], group[-1] + 1) for group in np.array_split(np.arange(microbatches), count)]


def _with_weights(order: Sequence[Action], lag: int) -> tuple[Action, ...]:
    """An order of F and B in which each W is inserted `lag` backward passes after its own B.

    >>> print(*_with_weights([Action(0, "B", 0), Action(0, "B", 1)], lag=1))
    0B0 0B1 0W0 0W1
    """
    weights = [action._replace(kind="W") for action in order if action.kind == "B"]
    result, passed = [], 0
    for action in order:
        result.append(action)
        passed += action.kind == "B"
        if action.kind == "B" and passed > lag:
            result.append(weights[passed - lag - 1])
    return (*result, *weights[max(len(weights) - lag, 0) :])


def _with_weights_in_gaps(
    tick_of: Mapping[Action, int], placement: Sequence[int], most: int, heads: Collection[int]
) -> tuple[tuple, tuple]:
    """The orders of the ranks, and their ticks, with each W where it makes no tick longer, or where more than `most`
    would wait on a rank. Ticks in which all ranks run F and B are steady: there each runs W, too. In ticks of `heads`
    all ranks wait for each other after F, since each has its share of the head."""
    cells: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for action in sorted(tick_of, key=lambda action: ACTION_KINDS.index(action.kind)):
        cells[tick_of[action], placement[action.stage]].append(action)
    ranks, last = range(max(placement) + 1), max(tick_of.values())
    waiting = [deque() for _ in ranks]
    for tick in itertools.count():
        if tick > last and not any(waiting):
            break
        row = [cells[tick, rank] for rank in ranks]
        for queue, cell in zip(waiting, row):
            queue.extend(action._replace(kind="W") for action in cell if action.kind == "B")
        busy = [sum(action.kind != "F" or tick not in heads for action in cell) for cell in row]
        due = [count + 1 for queue, count in zip(waiting, busy) if len(queue) > most]
        longest = max([1 + 2 * all(len(cell) == 2 for cell in row) - (tick in heads), *busy, *due])
        for queue, cell, count in zip(waiting, row, busy):
            if queue and count < longest:
                cell.append(queue.popleft())
    placed = [
        [(action, tick) for tick in sorted(t for t, r in cells if r == rank) for action in cells[tick, rank]]
        for rank in ranks
    ]
    return tuple(tuple(a for a, _ in row) for row in placed), tuple(tuple(tick for _, tick in row) for row in placed)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    builder.__name__: builder for builder in (gpipe, one_f_one_b, interleaved, zero_bubble, zero_bubble_v, dualpipe_v)
}


def check_schedule(name: str, virtual: int) -> None:
    """Raise ConfigError unless `name` is a schedule, or the file of one, that supports `virtual` stages on each
    rank."""
    known = isinstance(name, str) and (name in SCHEDULES or is_schedule_file(name) or names_code(name))
    if not known:
        # Papers write 1F1B.
        spelled = str(name).lower().replace("1", "one_")
        advice = f"{nearest(spelled, SCHEDULES)}, the path of a .csv file, or {CODE_FORM}"
        raise ConfigError(f"pipeline.schedule={quoted(name, LONGEST_PATH)} is unknown; {advice}.")
    if virtual != 1 and name != "interleaved":
        raise ConfigError(
            f"pipeline.virtual={virtual} does nothing with pipeline.schedule={quoted(name, LONGEST_PATH)}; "
            "use virtual=1, or schedule='interleaved'."
        )


def _users(name: str, ranks: int, microbatches: int) -> Schedule:
    """A schedule of a user's own."""
    made = named("pipeline.schedule", name, SCHEDULES)(ranks=ranks, microbatches=microbatches)
    if not isinstance(made, Schedule):
        raise ConfigError(f"pipeline.schedule={quoted(name)} returns {quoted(made)}, not a Schedule.")
    if (made.ranks, made.microbatches) != (ranks, microbatches):
        raise ConfigError(
            f"pipeline.schedule={quoted(name)} returns a schedule of {made.ranks} ranks and {made.microbatches} "
            f"microbatches; it was called with ranks={ranks}, microbatches={microbatches}."
        )
    return made


def is_schedule_file(name: str) -> bool:
    """Whether this name is that of a schedule file."""
    return isinstance(name, str) and name.endswith(".csv")


def by_name(name: str, ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The schedule called `name`, or that of the file `name`; on one rank every schedule is gradient accumulation.

    `virtual` is the number of stages on each rank, only for "interleaved". Raises ConfigError for an unknown name and
    for a file of other sizes, ScheduleError for an invalid file.
    """
    check_schedule(name, virtual)
    written = load_csv(name) if is_schedule_file(name) else None
    if written:
        sizes = [("mesh.pp", written.ranks, ranks, "ranks")] * (ranks > 1)
        sizes += [("pipeline.microbatches", written.microbatches, microbatches, "microbatches")]
        for key, has, given, what in sizes:
            if has != given:
                raise ConfigError(
                    f"pipeline.schedule={quoted(name, LONGEST_PATH)} is of {has} {what}, and {key}={given}; "
                    f"use {key}={has}, or a schedule of {given} {what}."
                )
    if ranks == 1:
        return accumulate(microbatches)
    if names_code(name):
        return _users(name, ranks, microbatches)
    return written or _defined(name, ranks, microbatches, virtual)


@lru_cache(maxsize=256)  # a sweep builds many models with each schedule
def _defined(name: str, ranks: int, microbatches: int, virtual: int) -> Schedule:
    return SCHEDULES[name](ranks, microbatches, *[virtual] * (name == "interleaved"))
