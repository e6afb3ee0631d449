"""Tables of HTML, for pages and for notebooks, which have no style sheet."""

from collections.abc import Iterable, Sequence

FLUSH = ' style="text-align:{}"'


def html_table(rows: Iterable[Sequence[str] | str], *, left: int, head: Sequence[str] = ()) -> str:
    """Cells are HTML; the first `left` columns are flush left, the others right. A row that is a string is a line of
    its own, across all columns.

    >>> html_table([["a", "1"]], left=1)
    '<table><tr><td style="text-align:left">a</td><td style="text-align:right">1</td></tr></table>'
    """
    sides = lambda at: FLUSH.format("left" if at < left else "right")  # noqa: E731
    lines = [("th", head)] * bool(head) + [("td", row) for row in rows]
    body = (
        f'<td class="group" colspan="{len(head)}">{cells}</td>'
        if isinstance(cells, str)
        else "".join(f"<{tag}{sides(at)}>{cell}</{tag}>" for at, cell in enumerate(cells))
        for tag, cells in lines
    )
    return f"<table>{''.join(f'<tr>{cells}</tr>' for cells in body)}</table>"
