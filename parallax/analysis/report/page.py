"""A report as one HTML page that needs nothing else: bars for axes, components and FLOPs, and tables."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from parallax.analysis.report.rows import DIRECTIONS, FLOPS_LABELS, by_axis_and_kind, by_place, shares_of_flops
from parallax.analysis.report.style import STYLE
from parallax.analysis.report.text import computed_cells, executed, made_cells, made_notes, parts_of, place_cells
from parallax.runtime.units import in_bytes, in_flops, percent

Part = tuple[str, float]  # a colour's class, and a share of the whole bar


def page(report: Any) -> str:
    """The whole page."""
    sections = (heading, sent, memory, flops, time, made, places)
    body = "\n".join(line for section in sections for line in section(report))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(report.name)}: what a step sends, stores and computes</title>\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def heading(report: Any) -> Iterator[str]:
    """What is reported, and the figures to know first."""
    mesh = " ".join(f"{axis}={size}" for axis, size in report.mesh.items())
    yield f"<h1>{escape(report.name)}</h1>"
    yield (
        f"<p>{mesh} on {report.devices} devices; {escape(report.schedule)} with {report.microbatches} microbatches; "
        f"{report.rows:,} × {report.seq:,} = {report.tokens:,} tokens a step</p>"
    )
    total = sum(one.total_bytes for one in report.sent)
    facts = {
        "A device sends": in_bytes(total),
        "for each token": in_bytes(total / report.tokens),
        "Memory, predicted": in_bytes(report.peak),
        "MFU at most": percent(report.flops.ceiling),
    }
    yield '<dl class="facts">'
    yield from (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    yield "</dl>"


def sent(report: Any) -> Iterator[str]:
    """A bar for each axis and kind."""
    yield "<h2>What a device sends in a step</h2>"
    yield "<p>Bytes by mesh axis and kind of collective, and for each token of the step.</p>"
    rows = by_axis_and_kind(report.sent)
    most, before = max((row.total for row in rows), default=1), None
    yield '<div class="bars" id="sent">'
    for row in rows:
        if row.axes != before:
            yield f'<div class="group">{", ".join(row.axes)}</div>'
        before = row.axes
        parts = [(way, getattr(row, way) / most) for way in DIRECTIONS]
        yield from bar_row(row.kind, parts, in_bytes(row.total), f"{in_bytes(row.total / report.tokens)} a token")
    yield "</div>"
    yield from legend((way, way) for way in DIRECTIONS)


def memory(report: Any) -> Iterator[str]:
    """A bar for each component, and for the compiler's totals."""
    yield "<h2>What a device holds</h2>"
    yield "<p>Predicted from the config and the schedule's slots" + (
        ", beside what the compiler counts.</p>" if report.compiled else ".</p>"
    )
    beside = report.beside_compiler() if report.compiled else []
    most = max(report.peak, *(theirs for _, _, theirs in beside), 1)
    yield '<div class="bars" id="memory">'
    for name, size in report.memory.items():
        yield from bar_row(name.replace("_", " "), [("model", size / most)], in_bytes(size))
    yield from bar_row("together", [("model", report.peak / most)], in_bytes(report.peak), kind="sum")
    for name, mine, theirs in beside:
        yield from bar_row(f"compiler: {name}", [("theirs", theirs / most)], in_bytes(theirs), difference(mine, theirs))
    yield "</div>"


def flops(report: Any) -> Iterator[str]:
    """One bar of all FLOPs, and what its parts are."""
    ceiling = percent(report.flops.ceiling)
    yield "<h2>What a device computes</h2>"
    yield f"<p>{escape(executed(report))} MFU is at most {ceiling}, the share of the model's own.</p>"
    rows = shares_of_flops(report.flops)
    names = {label: name for name, label in FLOPS_LABELS.items()}
    yield bar([(names[label], share) for label, _, share in rows], "tall", "flops")
    yield '<div class="wide"><table class="split"><tbody>'
    for label, value, share in rows:
        swatch = f'<i class="{names[label]}"></i>'
        yield row_of([f"{swatch}{escape(label)}", in_flops(value), percent(share)], left=1, raw=True)
    yield "</tbody></table></div>"


def time(report: Any) -> Iterator[str]:
    """A bar for each part of a step's time, if the compiler estimates cycles."""
    if report.time is None:
        return
    total = report.time.total_secs
    yield "<h2>Where the time of a step goes</h2>"
    yield f"<p>{total:.3f} s by the compiler's cycles and the bandwidth of links: MFU {percent(report.time.mfu)}.</p>"
    yield '<div class="bars" id="time">'
    for name, secs in parts_of(report.time).items():
        yield from bar_row(name, [("theirs", secs / total)], f"{secs:.3f} s", percent(secs / total))
    yield "</div>"
    yield from table_of(["compute of", "products", "the rest", "share of the step"], computed_cells(report), left=1)


def made(report: Any) -> Iterator[str]:
    """What became of the collectives."""
    yield "<h2>What the compiler made of the collectives</h2>"
    if report.compiled is None:
        yield f"<p>{escape(report.compiled_for)}</p>"
        return
    yield f"<p>Compiled for {escape(report.compiled_for)}. {escape(' '.join(made_notes(report)))}</p>"
    head, *rows = made_cells(report)
    yield from table_of(head, rows, left=2)


def places(report: Any) -> Iterator[str]:
    """Who asked for it."""
    yield "<h2>Who asks for it</h2>"
    head, *rows = place_cells(by_place(report.sent))
    yield from table_of(head, rows, left=5, source=4)


def bar_row(label: str, parts: Sequence[Part], value: str, beside: str = "", kind: str = "") -> Iterator[str]:
    """A label, a bar and what it stands for."""
    yield f'<div class="label {kind}">{escape(label)}</div><div class="value {kind}">{escape(value)}</div>'
    yield f'<div class="beside {kind}">{escape(beside)}</div>{bar(parts)}'


def bar(parts: Iterable[Part], kind: str = "", name: str = "") -> str:
    """Parts beside one another, each as wide as its share."""
    pieces = "".join(f'<i class="{colour}" style="width:{100 * share:.3f}%"></i>' for colour, share in parts if share)
    named = f' id="{name}"' if name else ""
    return f'<div class="bar {kind}"{named}>{pieces}</div>'


def legend(entries: Iterable[Part]) -> Iterator[str]:
    """What colours mean."""
    items = "".join(f'<li><i class="{colour}"></i>{escape(label)}</li>' for colour, label in entries)
    yield f'<ul class="legend">{items}</ul>'


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int, source: int = -1) -> Iterator[str]:
    """A table that scrolls by itself where it is wider than the page."""
    yield '<div class="wide"><table><thead>'
    yield row_of(head, left=left, tag="th")
    yield "</thead><tbody>"
    yield from (row_of(row, left=left, source=source) for row in rows)
    yield "</tbody></table></div>"


def row_of(cells: Sequence[str], *, left: int, tag: str = "td", source: int = -1, raw: bool = False) -> str:
    """One row; cells after the first `left` are numbers."""

    def cell(at: int, text: str) -> str:
        kind = ' class="source"' if at == source else ' class="number"' if at >= left else ""
        return f"<{tag}{kind}>{text if raw else escape(text)}</{tag}>"

    return f"<tr>{''.join(cell(at, text) for at, text in enumerate(cells))}</tr>"


def difference(mine: int, theirs: int) -> str:
    """How far a prediction is from what the compiler says."""
    return f"predicted {(mine / theirs - 1) * 100:+.1f} %"
