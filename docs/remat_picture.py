"""Draws docs/remat.svg, memory against time of sets of parts to make again: `python docs/remat_picture.py`, or
`make golden`."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from parallax.analysis.planned.sweep import Cache, PricedLayout, Sweep, front
from parallax.analysis.planned.topology import read_topology
from parallax.cli.command import read_command
from parallax.config.remat import REMAT
from parallax.display.svg import INK, svg
from parallax.step.resolve import resolve

PICTURE = ROOT / "docs" / "remat.svg"
NAME, TOPOLOGY = "llama_1b_16", "v5e:4x4"
BLUE, GREY = "#0072b2", "#999999"
SIZE = 560, 300  # points


def priced_sets() -> list[PricedLayout]:
    """The config's own layout with each set, fastest first."""
    topology = read_topology(TOPOLOGY)
    settings = read_command(["remat_picture", f"--config={ROOT / 'configs' / NAME}.py"], {})[0]
    with TemporaryDirectory() as folder:
        search = Sweep(resolve(settings, topology.as_devices), topology, Cache(folder), keep=1)
        search.run_sets()
    return search.sets


def picture() -> str:
    """SVG of memory against time, the Pareto front a line."""
    sets = priced_sets()
    marked = front(sets)
    place = lambda row: (row.estimate.peak_bytes / 2**30, row.estimate.secs)  # noqa: E731

    def points(axes: Any) -> None:
        axes.set_title(f"{NAME} on {TOPOLOGY}, predicted: each value of pipeline.remat", loc="left")
        axes.set(xlabel="memory of a chip, GiB", ylabel="time of a step, s")
        axes.margins(0.12)
        axes.plot(*zip(*(place(row) for row in sets if row.choice in marked)), "--", color=INK, linewidth=0.8)
        for row in sets:
            is_word = row.choice.remat in REMAT
            axes.plot(*place(row), "o", color=BLUE if row.choice in marked else GREY, markersize=8 if is_word else 5)
            weight = "bold" if is_word else "normal"
            axes.annotate(row.choice.remat, place(row), (6, 3), textcoords="offset points", color=INK, weight=weight)

    return svg(points, *SIZE)


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
