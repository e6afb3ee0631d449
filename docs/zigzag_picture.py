"""Draws docs/zigzag.svg, who computes which scores on four context ranks: `python docs/zigzag_picture.py`, or
`make golden`."""

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from parallax.sharding.zigzag import chunks_of

PICTURE = ROOT / "docs" / "zigzag.svg"
RANKS = 4
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # Okabe and Ito
HIDDEN = "#f1f3f4"
CELL, TOP, LEFT, GAP = 30, 74, 76, 400
INK, PAPER = "#222222", "#ffffff"


def picture() -> str:
    """SVG of two squares of scores: ranks that hold neighbouring chunks, and ranks in zigzag order."""
    in_order = np.arange(2 * RANKS).reshape(RANKS, 2)
    parts = [_text(20, 26, f"Causal scores of one row on mesh.cp={RANKS}", "font-size='15' font-weight='bold'")]
    parts += _square(LEFT, "each rank two neighbouring chunks", in_order)
    parts += _square(LEFT + GAP, "zigzag: chunk r and chunk 2 cp - 1 - r", chunks_of(RANKS))
    width, height = LEFT + GAP + 330, TOP + 2 * RANKS * CELL + 66
    size = f"width='{width:.0f}' height='{height:.0f}' viewBox='0 0 {width:.0f} {height:.0f}'"
    style = "font-family='Helvetica, Arial, sans-serif' font-size='11'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {style}>"
    return "\n".join([head, f"<rect width='100%' height='100%' fill='{PAPER}'/>", *parts, "</svg>\n"])


def _square(left: float, title: str, held: np.ndarray) -> Iterator[str]:
    """Rows are chunks of queries in the colour of their rank, columns chunks of keys."""
    chunks, owner = 2 * RANKS, {int(chunk): rank for rank, own in enumerate(held) for chunk in own}
    bottom = TOP + chunks * CELL
    yield _text(left, TOP - 24, title, "font-size='12'")
    for query in range(chunks):
        y, colour = TOP + query * CELL, COLOURS[owner[query]]
        yield _text(left - 10, y + 20, f"rank {owner[query]}", "text-anchor='end'", colour)
        for key in range(chunks):
            x = left + key * CELL
            yield _box(x, y, CELL - 1, CELL - 1, colour if key < query else HIDDEN)
            if key == query:  # half of the chunk on the diagonal is computed
                corners = f"{x},{y} {x},{y + CELL - 1} {x + CELL - 1},{y + CELL - 1}"
                yield f"<polygon points='{corners}' fill='{colour}'/>"
    yield _text(left, bottom + 16, "chunks of keys")
    work = {rank: sum(int(chunk) + 0.5 for chunk in own) for rank, own in enumerate(held)}
    for rank, done in work.items():
        x = left + chunks * CELL + 14
        y = TOP + rank * 26
        yield _box(x, y, done * 3, 12, COLOURS[rank])
        yield _text(x + done * 3 + 4, y + 10, f"{done:g}")
    slowest = max(work.values()) / (sum(work.values()) / RANKS)
    yield _text(left, bottom + 36, f"chunks of scores by rank: the largest is {slowest:.2f} x the mean")


def _text(x: float, y: float, text: str, more: str = "", fill: str = INK) -> str:
    return f"<text x='{x:.2f}' y='{y:.2f}' fill='{fill}' {more}>{escape(text)}</text>"


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{fill}'/>"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
