"""The table at the start of a run: what will be trained, and what a device will hold."""

import io
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from parallax.budget import Memory

WIDTH = 88
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def render(parameters: dict[str, int], memory: Memory) -> str:
    """Two tables as text: parameters by component, and bytes on each device."""
    table = _table("parameters", "share")
    total = sum(parameters.values())
    for name, count in parameters.items():
        table.add_row(name, f"{count:,}", f"{count / total:.1%}")
    table.add_row("total", f"{total:,}", "")
    device = _table("on each device")
    for name, size in memory._asdict().items():
        device.add_row(name.replace("_", " "), in_units(size))
    device.add_row("total", in_units(sum(memory)))
    return f"{_text(table)}\n\n{_text(device)}"


def in_units(size: float) -> str:
    """Bytes in the largest unit that leaves a number of 1 or more.

    >>> [in_units(size) for size in (512, 1536, 3 * 2**30)]
    ['512 B', '1.5 KiB', '3.0 GiB']
    """
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {UNITS[unit]}" if unit else f"{size:.0f} B"


def _table(*columns: str) -> Table:
    # Frames are for people; a file or a pipe gets columns alone.
    table = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False)
    table.add_column("", min_width=17)
    for column in columns:
        table.add_column(column, justify="right", min_width=14)
    return table


def _text(table: Table) -> str:
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().strip("\n").splitlines())
