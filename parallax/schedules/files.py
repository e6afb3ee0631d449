"""Schedules as CSV files: a row for each rank, a column for each tick, in a cell what runs then.

A cell is empty, or holds actions as they print: `1F2`, or `1F2+1B0`. No headings. A stage stands on the rank in whose
row its actions are.
"""

import csv
import difflib
import os
from collections.abc import Collection
from pathlib import Path

from parallax.schedules.order import KINDS, Action, ScheduleError, refusal
from parallax.schedules.tables import Schedule

Place = tuple[int, int]  # rank and tick
Grid = list[list[list[Action]]]  # [rank][tick]


def save_csv(schedule: Schedule, path: str | Path) -> None:
    """Write the schedule's grid; a file of that name is replaced. Raises ScheduleError where it cannot be written."""
    lines = (",".join("+".join(map(str, cell)) for cell in row) for row in schedule.grid())
    write_text(path, "".join(f"{line}\n" for line in lines))


def load_csv(path: str | Path) -> Schedule:
    """The schedule of a file, named as the file is; each action runs in the tick in whose column it is.

    Raises ScheduleError, with the grid and the wrong cell between > and <, for a file that is no schedule.
    """
    path = Path(path)
    rows = _read(path)
    grid = _parse(path.stem, rows)
    placement = _placement(path.stem, rows, grid)
    microbatches = _count(path.stem, rows, grid, "microbatch")
    placed = [
        [(action, tick) for tick, cell in enumerate(row) for action in sorted(cell, key=lambda a: KINDS.index(a.kind))]
        for row in grid
    ]
    orders = tuple(tuple(action for action, _ in row) for row in placed)
    starts = tuple(tuple(tick for _, tick in row) for row in placed)
    return Schedule(path.stem, placement, microbatches, orders, starts=starts)


def write_text(path: str | Path, text: str) -> None:
    """Write a whole file or none of it. Raises ScheduleError where that cannot be done."""
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        try:
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ScheduleError(f"{path} cannot be written: {error.strerror}.") from None


def _read(path: Path) -> list[list[str]]:
    """Cells as they are written, without empty rows and columns at the end."""
    try:
        # Spreadsheets put a byte order mark first.
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    except FileNotFoundError:
        there = [other.name for other in path.parent.glob("*.csv") if other.is_file()]  # a link may lead nowhere
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


def _parse(name: str, rows: list[list[str]]) -> Grid:
    grid, unreadable = [], {}
    for rank, row in enumerate(rows):
        grid.append([])
        for tick, cell in enumerate(row):
            try:
                grid[rank].append([Action.parse(text.strip()) for text in cell.split("+")] if cell else [])
            except ValueError as error:  # also of int, for thousands of digits
                unreadable[rank, tick] = error
    if unreadable:
        (rank, tick), error = next(iter(unreadable.items()))
        raise _refusal(name, f"unreadable, rank {rank}, tick {tick}: {str(error).rstrip('.')}", rows, unreadable)
    return grid


def _placement(name: str, rows: list[list[str]], grid: Grid) -> tuple[int, ...]:
    """The rank of each stage."""
    found: dict[int, dict[int, list[Place]]] = {}
    for rank, row in enumerate(grid):
        for tick, cell in enumerate(row):
            for action in cell:
                found.setdefault(action.stage, {}).setdefault(rank, []).append((rank, tick))
    for stage, by_rank in sorted(found.items()):
        if len(by_rank) > 1:
            both = " and ".join(f"rank {rank}" for rank in by_rank)
            few = min(by_rank.values(), key=len)  # the likelier mistake
            raise _refusal(name, f"stage {stage} stands on {both}, and can on one alone", rows, few)
    return tuple(next(iter(found[stage])) for stage in range(_count(name, rows, grid, "stage")))


def _count(name: str, rows: list[list[str]], grid: Grid, what: str) -> int:
    """How many stages or microbatches there are; their numbers must have no gap."""
    places: dict[int, list[Place]] = {}
    for rank, row in enumerate(grid):
        for tick, cell in enumerate(row):
            for action in cell:
                places.setdefault(getattr(action, what), []).append((rank, tick))
    gap = next(number for number in range(len(places) + 1) if number not in places)
    if gap < len(places):
        beyond = [place for number in places if number > gap for place in places[number]]
        why = f"missing: {what} {gap}, though there is {what} {max(places)}; numbers start at 0 and have no gap"
        raise _refusal(name, why, rows, beyond)
    return len(places)


def _refusal(name: str, why: str, rows: list[list[str]], marked: Collection[Place]) -> ScheduleError:
    cells = [
        [([f">{cell}<"] if (rank, tick) in marked else [cell] if cell else []) for tick, cell in enumerate(row)]
        for rank, row in enumerate(rows)
    ]
    return refusal(name, why, cells)
