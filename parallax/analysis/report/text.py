"""A report as text of at most 80 columns."""

import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from parallax.analysis.report.rows import (
    DIRECTIONS,
    PlaceRow,
    axes_order,
    by_axis_and_kind,
    by_fate,
    by_place,
    shares_of_flops,
)
from parallax.analysis.report.steptime import StepTime
from parallax.runtime.units import in_bytes, in_flops, percent

WIDTH = 80
LEAST_CELL = 8  # letters that are left of a name in a column that is too wide
MADE_HEAD = ["axis, kind", "calls\ntraced", "calls\ncompiled", "bytes\ntraced", "bytes\ncompiled", "async"]
MADE_HEAD += ["cycles\nbetween"]
LEAST_SHOWN = 0.0005  # of a step: what takes less is no line


def text(report: Any, *, line_numbers: bool = True) -> str:
    """All sections; without line numbers it does not change when a file does."""
    sections = [
        heading(report),
        sent(report),
        places(report, line_numbers),
        flops(report),
        memory(report),
        made(report),
        time(report),
    ]
    return "\n\n".join("\n".join(fitted(lines)) for lines in map(list, sections) if lines)


def fitted(lines: Iterable[str]) -> Iterator[str]:
    """The lines, with sentences that are longer than WIDTH in several; tables fit by themselves."""
    for line in lines:
        long = len(line) > WIDTH
        yield from textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False) if long else [line]


def heading(report: Any) -> Iterator[str]:
    """What is reported."""
    mesh = " ".join(f"{axis}={size}" for axis, size in report.mesh.items())
    yield f"{report.name}: {mesh} on {report.devices} devices"
    batch = f"{report.rows} x {report.seq} = {report.tokens:,} tokens a step"
    yield f"{report.schedule} with {report.microbatches} microbatches; {batch}"


def sent(report: Any) -> Iterator[str]:
    """Totals by axes and kind."""
    yield "What a device sends in a step, by axis and kind"
    yield ""
    rows, before = [], None
    for row in by_axis_and_kind(report.sent):
        axes = ", ".join(row.axes)
        sizes = [in_bytes(getattr(row, way)) if getattr(row, way) else "-" for way in DIRECTIONS]
        rows += [axes] * (axes != before)
        rows.append([f"  {row.kind}", *sizes, *_total(row.total, report), f"{row.calls:,}"])
        before = axes
    total = sum(one.total_bytes for one in report.sent)
    ways = [sum(one.total_bytes for one in report.sent if one.direction == way) for way in DIRECTIONS]
    calls = sum(one.count for one in report.sent if one.bytes)
    rows.append(["all", *map(in_bytes, ways), *_total(total, report), f"{calls:,}"])
    yield from table(["axis, kind", *DIRECTIONS, "total", "a token", "calls"], rows, left=1, width=WIDTH)
    yield from silent(report)


def silent(report: Any) -> Iterator[str]:
    """The calls that send nothing."""
    calls = sum(one.count for one in report.sent if not one.bytes)
    if calls:
        yield f"{calls:,} calls more send nothing: their axes are of one device."


def places(report: Any, line_numbers: bool) -> Iterator[str]:
    """Who asked for it, by axis and kind, of each the place that sends most first."""
    yield "Who asks for it"
    yield ""
    groups = defaultdict(list)
    for row in by_place(report.sent, line_numbers=line_numbers):
        groups[row.axes, row.kind].append(row)
    rows: list[str | list[str]] = []
    for axes, kind in sorted(groups, key=lambda key: (axes_order(key[0]), -sum(row.total for row in groups[key]), key)):
        _, *cells = place_cells(groups[axes, kind])
        rows += [f"{', '.join(axes)} {kind}", *([f"  {way}", *rest] for _, _, way, *rest in cells)]
    yield from table(["axis, kind", "module", "source", "calls", "total"], rows, left=3, width=WIDTH)


def place_cells(rows: Iterable[PlaceRow]) -> Iterator[list[str]]:
    """A head, and the cells of each place."""
    yield ["axis", "kind", "direction", "module", "source", "calls", "total"]
    for row in rows:
        source = row.source.removeprefix("parallax/")
        calls, total = f"{row.calls:,}", in_bytes(row.total)
        yield [", ".join(row.axes), row.kind, row.direction, row.module, source, calls, total]


def flops(report: Any) -> Iterator[str]:
    """What is executed, and what could be."""
    yield "FLOPs of a device in a step"
    yield ""
    rows = [[label, in_flops(value), percent(share)] for label, value, share in shares_of_flops(report.flops)]
    yield from table(["", "FLOPs", "share"], rows, left=1, width=WIDTH)
    yield executed(report)
    yield f"MFU is at most {percent(report.flops.ceiling)}."


def executed(report: Any) -> str:
    """What a device executes, as traced and as compiled."""
    traced = f"A device executes {in_flops(report.flops.executed)}"
    if report.compiled_flops is None:
        return f"{traced}."
    passes, update = map(in_flops, report.compiled_flops)
    return f"{traced}; in the compiled program {passes}, and {update} for the optimizer's update."


def memory(report: Any) -> Iterator[str]:
    """Bytes by component, beside the compiler's totals."""
    yield "Memory of a device"
    yield ""
    rows = [[name.replace("_", " "), in_bytes(size), "", ""] for name, size in report.memory.items()]
    if report.compiled is None:
        yield from table(["", "predicted"], [row[:2] for row in [*rows, ["together", in_bytes(report.peak)]]], left=1)
        return
    for name, mine, theirs in report.beside_compiler():
        rows.append([name, in_bytes(mine), in_bytes(theirs), f"{mine / theirs - 1:+.1%}".replace("%", " %")])
    yield from table(["", "predicted", "compiler", "difference"], rows, left=1)


def made(report: Any) -> Iterator[str]:
    """What became of the collectives."""
    if report.compiled is None:
        if report.compiled_for:
            yield report.compiled_for
        return
    yield f"What the compiler made of the collectives, for {report.compiled_for}"
    yield ""
    rows, before = [], None
    whole, *cells = made_cells(report)
    for axes, kind, *figures in cells:
        rows += [axes] * (axes != before)
        rows.append([f"  {kind}", *figures])
        before = axes
    yield from table(MADE_HEAD[: len(whole) - 1], rows, left=1, width=WIDTH)
    yield from made_notes(report)


def made_cells(report: Any) -> Iterator[list[str]]:
    """A head, and the cells of each axis and kind; those of the update, which no traced program has, last."""
    timed = report.compiled.cycles is not None
    head = ["axis", "kind", "calls traced", "compiled", "bytes traced", "compiled", "asynchronous"]
    yield [*head, "cycles between"] if timed else head
    for row in by_fate(report.sent_on_average, report.compiled.collectives):
        cells = [
            ", ".join(row.axes) + " (update)" * row.update,
            row.kind,
            f"{row.traced_calls:,.0f}" if row.traced_calls else "-",
            f"{row.calls:,.0f}" if row.calls else "-",
            in_bytes(row.traced_bytes) if row.traced_calls else "-",
            in_bytes(row.bytes) if row.calls else "-",
            percent(row.asynchronous_bytes / row.bytes) if row.calls else "-",
        ]
        yield [*cells, f"{row.cycles_between:,.0f}"] if timed else cells


def made_notes(report: Any) -> Iterator[str]:
    """What the table says, in words."""
    rows = [row for row in by_fate(report.sent_on_average, report.compiled.collectives)]
    merged = sum(one.count for one in report.compiled.collectives if one.merged > 1)
    arrays = sum(one.count * one.merged for one in report.compiled.collectives if one.merged > 1)
    if merged:
        calls = "1 call moves" if merged == 1 else f"{merged:,.0f} calls move"
        yield f"{calls} {arrays:,.0f} arrays that were merged."
    gone = [f"{row.kind} over {', '.join(row.axes)}" for row in rows if row.traced_calls and not row.calls]
    if gone:
        yield f"Turned into others: {'; '.join(gone)}."
    if any(row.update for row in rows):
        yield "(update): of the optimizer, for which the compiler chooses what is sent; nothing of it is traced."


def time(report: Any) -> Iterator[str]:
    """Where the time of a step goes, if the compiler estimates cycles."""
    if report.time is not None:
        yield "Time of a step, by the compiler's cycles and the bandwidth of links"
        yield ""
        yield from times(parts_of(report.time), report.time.total_secs)
        mfu, bubble = percent(report.time.mfu), percent(report.time.bubble)
        yield f"MFU {mfu}; an average rank waits for others {bubble} of the time."
        yield ""
        head = ["compute of", "products", "the rest", "share of the step"]
        yield from table(head, computed_cells(report), left=1, width=WIDTH)


def computed_cells(report: Any) -> list[list[str]]:
    """Module, seconds in products and what is fused with them, in the rest, and the share of both in the step."""
    total = report.time.total_secs
    shown = [one for one in report.computed if one.total / total > LEAST_SHOWN]
    return [[one.module, f"{one.products:.3f} s", f"{one.others:.3f} s", percent(one.total / total)] for one in shown]


def parts_of(time: StepTime) -> dict[str, float]:
    """The parts of a compiled step, with their names."""
    return compiled_parts(time.compute_secs, time.pallas_secs, time.exposed_secs)


def compiled_parts(compute: float, pallas: float, exposed: dict[str, float]) -> dict[str, float]:
    """Seconds of a compiled step, with their names."""
    return {"compute": compute, "attention kernel": pallas} | {
        f"exposed over {axes}": secs for axes, secs in exposed.items()
    }


def times(parts: dict[str, float], secs: float) -> Iterator[str]:
    """Where a step's time goes."""
    rows = [[name, f"{part:.3f} s", percent(part / secs)] for name, part in parts.items() if part / secs > LEAST_SHOWN]
    yield from table(["time of a step", "", "share"], [*rows, ["step", f"{secs:.3f} s", percent(1)]], left=1)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str] | str], *, left: int, width: float = math.inf
) -> Iterator[str]:
    """Columns as wide as they must be, the first `left` of them flush left, two spaces apart; a row that is a text is a
    line of its own. Beyond `width` one space is between columns, then the widest of the first are cut in the middle.

    >>> print("\\n".join(table(["axis", "bytes"], ["all", ["  pp", "8"], ["  dp", "128"]], left=1)))
    axis  bytes
    all
      pp      8
      dp    128
    """
    tops = [cell.split("\n") for cell in head]
    high = max(map(len, tops))
    heads = [[cell[at - high] if len(cell) >= high - at else "" for cell in tops] for at in range(high)]
    lines = [*heads, *rows]
    cells = [line for line in lines if not isinstance(line, str)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    gap = 2 if sum(widths) + 2 * len(widths) - 2 <= width else 1
    while sum(widths) + gap * (len(widths) - 1) > width and max(widths[:left]) > LEAST_CELL:
        widths[widths.index(max(widths[:left]))] -= 1
    for line in lines:
        sides = (str.ljust if at < left else str.rjust for at in range(len(widths)))
        shown = [line] if isinstance(line, str) else map(_aligned, sides, line, widths)
        yield (" " * gap).join(shown).rstrip()


def _aligned(side: Callable[[str, int], str], cell: str, width: int) -> str:
    if len(cell) > width:
        cell = f"{cell[: width // 2]}…{cell[len(cell) - (width - width // 2 - 1) :]}"
    return side(cell, width)


def _total(size: int, report: Any) -> tuple[str, str]:
    return in_bytes(size), in_bytes(size / report.tokens)
