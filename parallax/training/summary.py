"""The table at the start of a run: what will be trained, and what a device will hold."""

import io
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from parallax.analysis.memory import Memory
from parallax.runtime.units import in_bytes

WIDTH = 88


def render(parameters: dict[str, int], memory: Memory) -> str:
    """Two tables as text: parameters by component, and bytes on each device."""
    table = _table("parameters", "share")
    total = sum(parameters.values())
    for name, count in parameters.items():
        table.add_row(name, f"{count:,}", f"{count / total:.1%}")
    table.add_row("total", f"{total:,}", "")
    device = _table("on each device")
    for name, size in memory._asdict().items():
        device.add_row(name.replace("_", " "), in_bytes(size))
    device.add_row("total", in_bytes(sum(memory)))
    return f"{_text(table)}\n\n{_text(device)}"


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
