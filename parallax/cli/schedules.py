"""Print, price, compare and draw pipeline schedules.

    python -m parallax.schedules one_f_one_b --stages 4 --microbatches 8
    python -m parallax.schedules interleaved --stages 4 --microbatches 8 --virtual 2 --svg interleaved.svg
    python -m parallax.schedules --compare --stages 4 --microbatches 8
    python -m parallax.schedules mine.csv --tf 1 --tb 2.5 --send 0.1

`--csv` writes a schedule to a file. Write your own schedule in this format and pass the file instead of a name.
"""

import argparse
import math
import re
import shutil
import sys
from collections.abc import Sequence

from parallax.cli.arguments import Parser, positive, write_output
from parallax.display.progress import has_colours
from parallax.display.tables import text_table
from parallax.display.units import percent
from parallax.errors import ConfigError, check_local, exit_status
from parallax.schedules.csv_files import load_csv, save_csv
from parallax.schedules.definitions import SCHEDULES, by_name, is_schedule_file
from parallax.schedules.drawing import gantt
from parallax.schedules.pricing import LONGEST, SHORTEST, USUAL, Costs, figures
from parallax.schedules.schedule import Schedule
from parallax.schedules.timetable import grid_text
from parallax.user_code import CODE_FORM, imported_code

TERMINAL_COLOURS = {"F": 34, "B": 33, "W": 32}  # terminal codes of blue, yellow, green
COMPARED = [(name, virtual) for name in SCHEDULES for virtual in ((2, 4) if name == "interleaved" else (1,))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status, 2 for user errors."""
    return exit_status(lambda: run(parser().parse_args(arguments)))


def run(parsed: argparse.Namespace) -> None:
    """Print the output and write the files."""
    _check_arguments(parsed)
    weights = parsed.tb / 2 if parsed.tw is None else parsed.tw
    costs = Costs(parsed.tf, parsed.tb, weights, parsed.send, parsed.hidden)
    ranks, microbatches = parsed.stages, parsed.microbatches
    if parsed.name:
        schedule = _schedule(parsed)
        if parsed.hidden and not (schedule.both.any() or parsed.compare):
            apart = f"of {schedule.name} no F and B are one pass; leave it out, or price dualpipe_v"
            raise ConfigError(f"--hidden={parsed.hidden:g} does nothing: {apart}.")
        ranks, microbatches = schedule.ranks, schedule.microbatches
        sizes = f"{schedule.name} ranks={ranks} stages={schedule.stages} microbatches={microbatches}"
        print(sizes, _coloured(_grid(schedule)), _figures(schedule, costs), sep="\n")
        if parsed.csv is not None:
            save_csv(schedule, parsed.csv)
        if parsed.svg is not None:
            write_output("svg", parsed.svg, gantt(schedule, costs, asynchronous=parsed.asynchronous))
    if parsed.compare:
        written = [(schedule.name, schedule)] if parsed.name and is_schedule_file(parsed.name) else []
        names = [(f"{name} v={virtual}" if virtual > 1 else name, name, virtual) for name, virtual in COMPARED]
        known = [(label, by_name(name, ranks, microbatches, virtual)) for label, name, virtual in names]
        print("\n" * bool(parsed.name) + _comparison(written + known, costs))


# ---- arguments


def parser() -> argparse.ArgumentParser:
    parser = Parser("python -m parallax.schedules", description=__doc__)
    add = parser.add_argument
    add("name", nargs="?", help=f"{', '.join(SCHEDULES)}, the path of a .csv file, or {CODE_FORM}")
    add("--stages", type=positive, metavar="P", help="pipeline ranks, each with --virtual stages")
    add("--microbatches", type=positive, metavar="M", help="microbatches of a step")
    add("--virtual", type=positive, metavar="V", help="stages on each rank, for interleaved (default: 1)")
    add("--tf", type=_time, default=USUAL.forward, help="time of a forward pass of all a rank's stages (%(default)s)")
    add("--tb", type=_time, default=USUAL.backward, help="time of a whole backward pass (%(default)s)")
    add("--tw", type=_time, help="the part of it for the weights' gradients (half of it)")
    add("--send", type=_time, default=USUAL.send, help="time of a message (%(default)s)")
    add("--hidden", type=_time, default=USUAL.hidden, help="time that F and B save if they are one pass (%(default)s)")
    add("--csv", metavar="FILE", help="write the schedule to this file")
    add("--svg", metavar="FILE", help="draw it to this file, as it runs in lockstep")
    add("--asynchronous", action="store_true", help="draw it as it runs if ranks wait only for what they need")
    add("--compare", action="store_true", help="a table of all schedules for these stages and microbatches")
    return parser


def _time(text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if time != 0 and not SHORTEST <= time <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: 0, or a number from {SHORTEST:g} to {LONGEST:g}")
    return time


def _check_arguments(parsed: argparse.Namespace) -> None:
    if not parsed.name and not parsed.compare:
        raise ConfigError(f"no schedule was named; write one of {', '.join(SCHEDULES)}, a .csv file, or --compare.")
    for name in ("csv", "svg"):
        path = getattr(parsed, name)
        if path is not None and not parsed.name:
            raise ConfigError(f"--{name}={path} needs the name of a schedule, too.")
        if path == "":
            raise ConfigError(f"--{name}='' names no file; write a path, as in --{name}=mine.{name}.")
        check_local(f"--{name}", path or "")
    check_local("name", parsed.name or "")
    if parsed.tw is not None and parsed.tw > parsed.tb:
        part = f"--tw={parsed.tw:g} is more than --tb={parsed.tb:g}, of which it is a part"
        raise ConfigError(f"{part}; use {parsed.tb:g} or less.")
    if parsed.tf + parsed.tb == 0:
        raise ConfigError("--tf=0 and --tb=0: there is no work; make one more than 0.")
    if parsed.virtual is not None and not parsed.name:
        raise ConfigError(f"--virtual={parsed.virtual} needs the name of a schedule; --compare alone shows 1, 2 and 4.")
    if parsed.asynchronous and parsed.svg is None:
        raise ConfigError("--asynchronous says how --svg=FILE is drawn, and that is not given.")
    for name in ("stages", "microbatches"):
        if getattr(parsed, name) is None and not is_schedule_file(parsed.name):
            raise ConfigError(f"--{name} is missing; a .csv file alone says how many there are.")


def _schedule(parsed: argparse.Namespace) -> Schedule:
    if not is_schedule_file(parsed.name):
        name = imported_code("the schedule", parsed.name)
        return by_name(name, parsed.stages, parsed.microbatches, parsed.virtual or 1)
    schedule = load_csv(parsed.name)
    written = {"stages": schedule.ranks, "microbatches": schedule.microbatches, "virtual": schedule.virtual}
    for name, number in written.items():
        given = getattr(parsed, name)
        if given not in (None, number):
            raise ConfigError(f"--{name}={given}, but {parsed.name} has {number}; leave it out, or write {number}.")
    return schedule


# ---- output


def _grid(schedule: Schedule) -> str:
    """The grid in blocks of ticks that fit the terminal's width; in one block if the output is not a terminal."""
    rows = schedule.grid()
    whole = grid_text(rows, joint=schedule.joint)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else len(whole)
    line = whole.index("\n")
    if line <= columns:
        return whole
    cell = 1 + max(len("+".join(map(str, cell))) for row in rows for cell in row)
    many = max((columns - len(f"rank {schedule.ranks - 1}")) // max(cell, 1 + len(str(schedule.ticks))), 1)
    blocks = range(0, schedule.ticks, many)
    return "\n\n".join(
        grid_text([row[first : first + many] for row in rows], first, joint=schedule.joint) for first in blocks
    )


def _coloured(grid: str) -> str:
    if not has_colours(sys.stdout):
        return grid
    return re.sub(r"\d+([FBW])\d+", lambda action: f"\033[{TERMINAL_COLOURS[action[1]]}m{action[0]}\033[0m", grid)


def _figures(schedule: Schedule, costs: Costs) -> str:
    priced = figures(schedule, costs)
    per_rank = " ".join(f"{held:g}" for held in priced.activations)
    return f"""\
ticks {priced.ticks}
lockstep time {priced.lockstep_time:g}
lockstep bubble {percent(abs(priced.lockstep_bubble))}
asynchronous time {priced.asynchronous_time:g}
asynchronous bubble {percent(abs(priced.asynchronous_bubble))}
activations at most {max(priced.activations):g} microbatches of a rank's layers; by rank {per_rank}
sends by rank {" ".join(map(str, priced.sends))}
slots {", ".join(f"{pool} {count}" for pool, count in schedule.slots.items())}"""


NOTES = """
The executor runs in lockstep; papers count asynchronous.
zero_bubble_v has ZB-V's stages in an order for lockstep. As published, F = B = W = 1 and M >= 2P-1,
ZB-V idles 3.5(P-1) in lockstep, not (5P-2)/4, and (P-1)/2 asynchronous, not (3P-2)/4; it holds P, not (3P-1)/2.
dualpipe_v has F and B of two microbatches as one pass; --hidden is what that saves. As published, with M >= 2P,
DualPipeV idles 2.5(P-1) in lockstep, not P-1/2, and (P-1)/2 asynchronous, not P-1; it holds P+1/2, not 3P/2."""


def _comparison(schedules: list[tuple[str, Schedule]], costs: Costs) -> str:
    """One line for each schedule; the most activations and sends are those of the worst rank."""
    head, rows = ["schedule", "ticks", "lockstep bubble", "asynchronous bubble", "most activations", "most sends"], []
    for label, schedule in schedules:
        priced = figures(schedule, costs)
        # abs, since 1 - 1.0000000000000002 should not print as a negative bubble
        bubbles = (percent(abs(share)) for share in (priced.lockstep_bubble, priced.asynchronous_bubble))
        rows.append([label, str(priced.ticks), *bubbles, f"{max(priced.activations):g}", str(max(priced.sends))])
    return "\n".join([*text_table(head, rows, left=1), NOTES])


if __name__ == "__main__":
    sys.exit(main())
