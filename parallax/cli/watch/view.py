"""Runs as a picture for a terminal: a frame for each, side by side where there is room."""

import math
import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from parallax.cli.watch.plot import POINT, Plot, plot
from parallax.cli.watch.run import Saved, Status, WatchedRun
from parallax.runtime.units import decimal, duration, in_bytes, percent

LEAST_WIDTH = 58  # of a frame beside another
PLOT_ROWS = 12
FEWEST_ROWS = 5
OTHER_LINES = 14  # of a frame, but for its plot
TRAIN, EVAL, SOFT = "cyan", "yellow", "bright_black"
STATE_STYLES = {"running": "green", "finished": "green", "starting": "cyan", "stopped": "yellow"}
BAD = "bold red"


class View:
    """All runs, as rich draws them."""

    def __init__(self, runs: Sequence[WatchedRun]):
        self.runs = runs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        unicode = not options.ascii_only
        columns = max(1, min(len(self.runs), options.max_width // LEAST_WIDTH))
        lines = -(-len(self.runs) // columns)
        fits = (options.height or console.height) // lines - OTHER_LINES if console.is_terminal else PLOT_ROWS
        rows = max(FEWEST_ROWS, min(PLOT_ROWS, fits))
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1)
        width = options.max_width // columns
        frames = [frame(run, width=width, rows=rows, unicode=unicode) for run in self.runs]
        for at in range(0, len(frames), columns):
            grid.add_row(*frames[at : at + columns])
        yield grid


def frame(run: WatchedRun, *, width: int, rows: int, unicode: bool) -> Panel:
    """Everything of one run, in so many columns and with so many rows for its plot."""
    status = run.status
    style = STATE_STYLES.get(status.state, BAD)
    title = Text.assemble((f" {run.name} ", "bold"), ("· " if unicode else "- ", SOFT), (f"{status.state} ", style))
    parts: list[RenderableType] = [progress(run, status), losses(run)]
    drawn = curves(run, width=width - 4, rows=rows, unicode=unicode)
    parts += [Text(), drawn, Text()] if drawn else [Text("\nno step is done yet\n", style=SOFT)]
    parts += [facts(run, status)]
    if status.why:
        parts.append(Text(status.why, style=style, overflow="fold"))
    return Panel(Group(*parts), title=title, title_align="left", border_style=SOFT, box=box.ROUNDED, safe_box=True)


def progress(run: WatchedRun, status: Status) -> RenderableType:
    """How far the run has come, and how long it will take."""
    of = f"/{run.steps:,}" if run.steps else ""
    left = "" if run.left_secs is None or not run.metrics.steps else f"left {duration(run.left_secs)}"
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, justify="right")
    colour = STATE_STYLES.get(status.state, "red")
    bar = ProgressBar(total=run.steps or 1, completed=run.step if run.steps else 0, style=SOFT, complete_style=colour)
    bar.finished_style = colour
    share = f"{run.step / run.steps:.0%} " if run.steps else ""
    table.add_row(Text(f"step {run.step:,}{of}"), bar, Text(f"{share}{left}"))
    return table


def losses(run: WatchedRun) -> Text:
    """The latest loss of training and of evaluation."""
    metrics, line = run.metrics, Text(no_wrap=True, overflow="ellipsis")
    if metrics.steps:
        loss = metrics.losses[-1]
        line.append("train loss ", style=TRAIN).append(_loss(loss), style="bold")
    if metrics.eval_steps:
        line.append("   eval loss ", style=EVAL).append(_loss(metrics.eval_losses[-1]), style="bold")
        line.append(f" at step {metrics.eval_steps[-1]:,}", style=SOFT)
    return line


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None or not math.isfinite(loss) else decimal(loss, 4)


def curves(run: WatchedRun, *, width: int, rows: int, unicode: bool) -> RenderableType | None:
    """Both losses by step, with the ends of both axes."""
    metrics, wide = run.metrics, max(width - 8, 4)
    train, held_out = zip(metrics.steps, metrics.losses), zip(metrics.eval_steps, metrics.eval_losses)
    drawn = plot(train, held_out, width=wide, height=rows)
    if drawn is None:
        return None
    lines = [_line(drawn, at, unicode) for at in range(rows)]
    ends = f"step {drawn.first:,.0f}", f"{drawn.last:,.0f}"
    axis = Text(" " * 8 + ends[0] + ends[1].rjust(wide - len(ends[0])), style=SOFT, no_wrap=True)
    return Group(*lines, axis)


def _line(drawn: Plot, row: int, unicode: bool) -> Text:
    ends = {0: drawn.high, len(drawn.lines) - 1: drawn.low}
    label = f"{ends[row]:6.4g}"[:6] if row in ends else ""
    line = Text(f"{label:>6} {'│' if unicode else '|'}", style=SOFT, no_wrap=True)
    dots = drawn.lines[row] if unicode else re.sub(r"[^ o]", "*", drawn.lines[row].replace(POINT, "o"))
    cells = Text(dots, style=TRAIN)
    for at, column in drawn.marks:
        if at == row:
            cells.stylize(EVAL, column, column + 1)
    return line.append_text(cells)


def facts(run: WatchedRun, status: Status) -> RenderableType:
    """Speed, memory, checkpoints and skipped steps, a name and a value a line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=SOFT, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts_of(run, status):
        table.add_row(name, value)
    return table


def facts_of(run: WatchedRun, status: Status) -> Iterator[tuple[str, Text]]:
    """Names and values."""
    speed = run.speed
    if speed is not None:
        yield "speed", Text(f"{decimal(speed.tokens_per_second, 0)} tokens/s, {decimal(speed.step_secs, 2)} s a step")
        peak = "unknown" if speed.peak_share is None else percent(speed.peak_share)
        memory = "" if speed.memory_bytes is None else f", memory {in_bytes(speed.memory_bytes)}"
        yield "of peak", Text(f"{peak}{memory}")
        yield "data wait", Text(percent(speed.wait_share), style="yellow" if speed.wait_share > 0.05 else "")
    yield "checkpoints", saved_text(run.saved, status)
    yield "skipped", Text(f"{run.skipped:,} steps" if run.skipped else "none", style="yellow" if run.skipped else "")
    if run.metrics.torn:
        yield "unreadable", Text(f"{run.metrics.torn:,} lines of metrics.jsonl", style="yellow")
    if run.metrics.odd:
        yield "odd", Text(f"{run.metrics.odd:,} values of metrics.jsonl are no finite numbers", style="yellow")
    started = f", start {len(run.starts)}" if len(run.starts) > 1 else ""
    if run.mesh:
        yield "mesh", Text(f"{run.mesh} on {run.devices}{started}")


def saved_text(saved: Saved, status: Status) -> Text:
    """What is saved, what is being saved, and what is damaged."""
    if saved.error:
        return Text(saved.error, style=BAD)
    text = Text("none yet")
    if saved.valid:
        others = ", ".join(f"{step:,}" for step in saved.valid[:-1])
        text = Text(f"step {saved.valid[-1]:,}" + (f", before it {others}" if others else ""))
    if saved.unfinished:
        steps = ", ".join(f"{step:,}" for step in saved.unfinished)
        if status.over:
            text.append(f"; a save of step {steps} was not finished", style="yellow")
        else:
            text.append(f"; saving step {steps}", style="cyan")
    if saved.damaged:
        text.append(f"; damaged: {', '.join(f'{step:,}' for step in saved.damaged)}", style=BAD)
    return text
