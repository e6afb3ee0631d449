"""The bar that a long preparation shows on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def progress_bar(title: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error, if that is a terminal; the yielded function says how many bytes more are done."""
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda done: progress.advance(task, done)
