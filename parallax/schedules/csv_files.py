"""Schedules as CSV files: a row for each rank, a column for each tick, and in each cell the actions that run then.

A cell is empty or holds actions as they are printed: `1F2`, or `1F2+1B0`; with `1F2&1B0` in all such cells, F and B are
one pass. There are no headings. The row of a stage's
actions is the stage's rank.
"""

import csv
import difflib
import io
import re
from collections.abc import Collection
from pathlib import Path

from parallax.errors import errors_as
from parallax.schedules.schedule import Schedule
from parallax.schedules.timetable import ACTION_KINDS, Action, ScheduleError, cell_text, refused
from parallax.storage.files import OBJECT_BYTES, names_in, read_bytes, write_whole

Placed = tuple[int, int, Action]  # rank, tick, and action


def save_csv(schedule: Schedule, path: str | Path) -> None:
    """Write the schedule's grid, replacing an existing file. Raises ScheduleError if it cannot be written."""
    lines = (",".join(cell_text(cell, joint=schedule.joint) for cell in row) for row in schedule.grid())
    with errors_as(ScheduleError, f"{path} cannot be written: ", "."):
        write_whole(Path(path), "".join(f"{line}\n" for line in lines))


def load_csv(path: str | Path) -> Schedule:
    """The schedule of a file, with the file's name; each action runs in the tick of its column.

    Raises ScheduleError, with the grid and the wrong cell between > and <, if the file is not a schedule.
    """
    name, rows = Path(path).stem, _read(Path(path))
    placed = _parse(name, rows)
    placement, microbatches = _placement(name, rows, placed), _count(name, rows, placed, "microbatch")
    joint = _is_joint(name, rows)
    by_rank = [[cell for cell in placed if cell[0] == rank] for rank in range(len(rows))]
    orders = tuple(tuple(action for *_, action in cells) for cells in by_rank)
    starts = tuple(tuple(tick for _, tick, _ in cells) for cells in by_rank)
    return Schedule(name, placement, microbatches, orders, starts=starts, joint=joint)


def _read(path: Path) -> list[list[str]]:
    """Cells as text, without empty rows and columns at the end."""
    try:
        # Spreadsheets put a byte order mark first.
        text = read_bytes(path, OBJECT_BYTES).decode("utf-8-sig")
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline=""))]
    except FileNotFoundError:
        there = [name for name in names_in(path.parent) if name.endswith(".csv") and (path.parent / name).is_file()]
        close = difflib.get_close_matches(path.name, there, n=1)
        guess = f"; did you mean {str(path.with_name(close[0]))!r}?" if close else "."
        raise ScheduleError(f"{path} does not exist{guess}") from None
    except OSError as error:
        raise ScheduleError(f"{path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"{path} is not a text file in UTF-8 with commas: {error}.") from None
    while rows and not any(rows[-1]):
        rows.pop()
    if not rows:
        raise ScheduleError(f"{path} is empty; write a row for each rank and a column for each tick.")
    ticks = 1 + max(tick for row in rows for tick, cell in enumerate(row) if cell)
    return [row[:ticks] for row in rows]


def _parse(name: str, rows: list[list[str]]) -> list[Placed]:
    """The actions of the cells, in the order in which each rank runs them."""
    placed, unreadable = [], {}
    for rank, row in enumerate(rows):
        for tick, cell in enumerate(row):
            try:
                placed += [(rank, tick, Action.parse(text.strip())) for text in re.split("[+&]", cell) if cell]
            except ValueError as error:  # also of int, for thousands of digits
                unreadable[rank, tick] = error
    if unreadable:
        (rank, tick), error = next(iter(unreadable.items()))
        raise _refused(name, f"unreadable, rank {rank}, tick {tick}: {str(error).rstrip('.')}", rows, unreadable)
    return sorted(placed, key=lambda cell: (*cell[:2], ACTION_KINDS.index(cell[2].kind)))


def _is_joint(name: str, rows: list[list[str]]) -> bool:
    """Whether F and B of a cell are one pass; all cells must say the same."""
    shared = {
        (rank, tick): cell
        for rank, row in enumerate(rows)
        for tick, cell in enumerate(row)
        if {"F", "B"} <= set(cell) or "&" in cell
    }
    joint = [place for place, cell in shared.items() if "&" in cell]
    wrong = [place for place in joint if not re.fullmatch(r"\d+F\d+\s*&\s*\d+B\d+(\s*\+\s*\d+W\d+)?", shared[place])]
    if wrong:
        why = f"{shared[wrong[0]]!r} is not F&B; write & between one F and one B, as in '0F2&1B0' or '0F2&1B0+1W0'"
        raise _refused(name, why, rows, wrong)
    if joint and len(joint) < len(shared):
        apart = [place for place in shared if place not in joint]
        both = f"{shared[joint[0]]!r} is one pass, {shared[apart[0]]!r} is two"
        why = f"{both}; write & in all cells with F and B, or + in all"
        raise _refused(name, why, rows, apart)
    return bool(joint)


def _cells_by(placed: list[Placed], what: str) -> dict[int, list[tuple[int, int]]]:
    """The cells, (rank, tick), in which each stage or microbatch occurs."""
    cells: dict[int, list[tuple[int, int]]] = {}
    for rank, tick, action in placed:
        cells.setdefault(getattr(action, what), []).append((rank, tick))
    return cells


def _placement(name: str, rows: list[list[str]], placed: list[Placed]) -> tuple[int, ...]:
    """The rank of each stage."""
    cells_of = _cells_by(placed, "stage")
    for stage, cells in sorted(cells_of.items()):
        by_rank = {rank: [cell for cell in cells if cell[0] == rank] for rank, _ in cells}
        if len(by_rank) > 1:
            both = " and ".join(f"rank {rank}" for rank in by_rank)
            few = min(by_rank.values(), key=len)  # the likelier mistake
            raise _refused(name, f"stage {stage} is on {both}, but must be on one rank", rows, few)
    return tuple(cells_of[stage][0][0] for stage in range(_count(name, rows, placed, "stage")))


def _count(name: str, rows: list[list[str]], placed: list[Placed], what: str) -> int:
    """Number of stages or microbatches; their numbers must not have gaps."""
    cells = _cells_by(placed, what)
    gap = next(number for number in range(len(cells) + 1) if number not in cells)
    if gap < len(cells):
        beyond = [cell for number in cells if number > gap for cell in cells[number]]
        why = f"missing: {what} {gap}, though there is {what} {max(cells)}; numbers start at 0 and have no gap"
        raise _refused(name, why, rows, beyond)
    return len(cells)


def _refused(name: str, why: str, rows: list[list[str]], marked: Collection[tuple[int, int]]) -> ScheduleError:

    def mark(rank: int, tick: int, cell: str) -> str:
        return f">{cell}<" if (rank, tick) in marked else cell

    cells = [
        [[mark(rank, tick, cell)] if cell else [] for tick, cell in enumerate(row)] for rank, row in enumerate(rows)
    ]
    return refused(name, why, cells)
