"""Tables, pages and facts as HTML; notebooks have no style sheet, so tables carry what they need."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from parallax.display.tables import BarPart, Table, TitledTables

FLUSH = ' style="text-align:{}"'
BAR_COLOURS = {"forward": "#3c7dc4", "recompute": "#d8a63a", "backward": "#389c88", "update": "#9b7dc0"}
BAR_COLOURS |= {"predicted": BAR_COLOURS["forward"], "compiler": "#858e96"}
STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfa; --ink: #1d2126; --soft: #5c6670; --line: #dfe2e3; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e7e9ea; --soft: #98a2ab; --line: #2d3338; }
}
body {
  max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-variant-numeric: tabular-nums;
}
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.1rem; margin: 3rem 0 0.25rem; }
p { margin: 0.5rem 0; max-width: 46rem; }
p, dt, th { color: var(--soft); font-weight: 400; }
.facts { display: flex; flex-wrap: wrap; gap: 1rem 3rem; margin: 1.75rem 0 0; }
dd { margin: 0; font-size: 1.35rem; font-weight: 600; }
.wide { overflow-x: auto; margin-top: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; }
th, td { padding: 0.28rem 0.9rem 0.28rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.group { font-weight: 600; padding-top: 0.9rem; }
"""


def html_table(rows: Iterable[Sequence[str] | str], *, left: int, head: Sequence[str] = ()) -> str:
    """Cells are HTML; the first `left` columns are flush left, the others right. A row that is a string is a line of
    its own, across all columns.

    >>> html_table([["a", "1"]], left=1)
    '<table><tr><td style="text-align:left">a</td><td style="text-align:right">1</td></tr></table>'
    """
    lines = [("th", head)] * bool(head) + [("td", row) for row in rows]
    body = (
        f'<td class="group" colspan="{len(head)}">{cells}</td>'
        if isinstance(cells, str)
        else "".join(
            f"<{tag}{FLUSH.format('left' if column < left else 'right')}>{cell}</{tag}>"
            for column, cell in enumerate(cells)
        )
        for tag, cells in lines
    )
    return f"<table>{''.join(f'<tr>{cells}</tr>' for cells in body)}</table>"


def facts_html(facts: Iterable[tuple[str, str]]) -> str:
    """A table of names and values, which are HTML."""
    return html_table([(f"<b>{escape(name)}</b>", value) for name, value in facts], left=2)


def html_page(title: str, heading: Sequence[str], facts: Mapping[str, str], sections: Iterable[TitledTables]) -> str:
    """A self-contained page: a heading of two lines, facts, and sections."""
    shown = "\n".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    lines = "\n".join(line for section in sections for line in section_html(section))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(heading[0])}</h1>\n<p>{escape(heading[1])}</p>\n"
        f'<dl class="facts">\n{shown}\n</dl>\n{lines}\n</body>\n</html>\n'
    )


def in_frame(page: str) -> str:
    """A page inside a notebook, in a frame, so that its style does not affect the notebook."""
    return f'<iframe srcdoc="{escape(page)}" style="width:100%;height:40rem;border:0"></iframe>'


def section_html(section: TitledTables) -> Iterator[str]:
    """Elements of a page."""
    yield f"<h2>{escape(section.title)}</h2>"
    yield f'<div id="{section.name}">'
    yield from content_html(section.content)
    yield "</div>"


def content_html(content: Iterable[Table | str]) -> Iterator[str]:
    """Elements of a page, or of a notebook, which has no style sheet."""
    for part in filter(None, content):
        yield from [f"<p>{escape(part)}</p>"] if isinstance(part, str) else table_html(part)


def table_html(table: Table) -> Iterator[str]:
    """A table, which scrolls if it is wider than the page, with a key if its bars have several colours."""
    bars, drawn = iter(table.bars), [""] * bool(table.bars)
    rows = (
        escape(row) if isinstance(row, str) else [*map(escape, row), *(_bar(next(bars, ())) for _ in drawn)]
        for row in table.rows
    )
    yield f'<div class="wide">{html_table(rows, left=table.left, head=[*map(escape, table.head), *drawn])}</div>'
    colours = dict.fromkeys(colour for bar in table.bars for colour, _ in bar)
    if len(colours) > 1:
        items = (f'<span style="color:{BAR_COLOURS[name]}">&#9632;</span> {name}' for name in colours)
        yield f"<p>{' &ensp; '.join(items)}</p>"


def _bar(bar: Sequence[BarPart]) -> str:
    """Adjacent parts, each as wide as its share."""
    styles = (f"width:{100 * share:.3f}%;background:{BAR_COLOURS[name]}" for name, share in bar if share)
    pieces = "".join(f'<i style="{style}"></i>' for style in styles)
    return f'<div class="bar" style="display:flex;min-width:10rem;height:0.85rem">{pieces}</div>' if bar else ""
