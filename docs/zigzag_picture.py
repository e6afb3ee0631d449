"""Draws docs/zigzag.svg, who computes which scores on four context ranks: `python docs/zigzag_picture.py`, or
`make golden`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.shapes import EMPTY, box, page, text
from parallax.sharding.zigzag import chunks_of

PICTURE = ROOT / "docs" / "zigzag.svg"
RANKS = 4
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # Okabe and Ito
CELL, TOP, LEFT, GAP = 30, 74, 76, 400


def picture() -> str:
    """SVG of two squares of scores: ranks that hold neighbouring chunks, and ranks in zigzag order."""
    in_order = np.arange(2 * RANKS).reshape(RANKS, 2)
    parts = [text(20, 26, f"Causal scores of one row on mesh.cp={RANKS}", size=15, more="font-weight='bold'")]
    parts += _square(LEFT, "each rank two neighbouring chunks", in_order)
    parts += _square(LEFT + GAP, "zigzag: chunk r and chunk 2 cp - 1 - r", chunks_of(RANKS))
    width, height = LEFT + GAP + 330, TOP + 2 * RANKS * CELL + 66
    return page(width, height, parts, font=11)


def _square(left: float, title: str, held: np.ndarray) -> Iterator[str]:
    """Rows are chunks of queries in the colour of their rank, columns chunks of keys."""
    chunks, owner = 2 * RANKS, {int(chunk): rank for rank, own in enumerate(held) for chunk in own}
    bottom = TOP + chunks * CELL
    yield text(left, TOP - 24, title)
    for query in range(chunks):
        y, colour = TOP + query * CELL, COLOURS[owner[query]]
        yield text(left - 10, y + 20, f"rank {owner[query]}", size=11, fill=colour, anchor="end")
        for key in range(chunks):
            x = left + key * CELL
            yield box(x, y, CELL - 1, CELL - 1, colour if key < query else EMPTY)
            if key == query:  # half of the chunk on the diagonal is computed
                corners = f"{x},{y} {x},{y + CELL - 1} {x + CELL - 1},{y + CELL - 1}"
                yield f"<polygon points='{corners}' fill='{colour}'/>"
    yield text(left, bottom + 16, "chunks of keys", size=11)
    work = {rank: sum(int(chunk) + 0.5 for chunk in own) for rank, own in enumerate(held)}
    for rank, done in work.items():
        x = left + chunks * CELL + 14
        y = TOP + rank * 26
        yield box(x, y, done * 3, 12, COLOURS[rank])
        yield text(x + done * 3 + 4, y + 10, f"{done:g}", size=11)
    slowest = max(work.values()) / (sum(work.values()) / RANKS)
    yield text(left, bottom + 36, f"chunks of scores by rank: the largest is {slowest:.2f} x the mean", size=11)


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
