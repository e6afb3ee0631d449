"""The load of experts in SVG: of some steps a map of layers by experts, and of all steps the largest by layer."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from parallax.runtime.errors import ConfigError
from parallax.runtime.svg import INK, nice_step, svg, svg_text

MAPS = 4  # steps that are drawn, the first and the last among them
MAP_WIDTH, LEAST_CELL, MOST_CELL, ROW = 400, 3, 34, 18
LEFT, TOP, GAP, PLOT_HEIGHT, PER_LINE = 58, 74, 34, 130, 2
FAINT, GRID = "#767676", "#dddddd"
EVEN, MORE, LESS = (244, 244, 244), (213, 94, 0), (0, 114, 178)  # of a load of 1, of LARGEST or more, of 0
LARGEST = 3.0


def load_picture(rows: Sequence[dict[str, Any]]) -> str:
    """SVG of the rows of metrics.jsonl of a run with experts.

    A load is an expert's share of its layer's choices times the number of experts: 1 is even.

    Raises ConfigError where no row has "experts/shares".
    """
    tables = [row for row in rows if row.get("experts/shares")]
    if not tables:
        raise ConfigError("no line of metrics.jsonl has experts/shares: a run writes them if model.layers_of has moe")
    shown = [tables[at] for at in sorted({round(n * (len(tables) - 1) / (MAPS - 1)) for n in range(MAPS)})]
    layers, experts = shown[-1]["experts/layers"], len(shown[-1]["experts/shares"][0])
    cell = min(max(MAP_WIDTH / experts, LEAST_CELL), MOST_CELL)
    across, down = LEFT + cell * experts + GAP, ROW * len(layers) + 2 * GAP
    columns = min(PER_LINE, len(shown))
    parts = [svg_text(20, 26, "Load of experts, times even", "font-size='15' font-weight='bold'"), *_scale(20, 38)]
    for at, row in enumerate(shown):
        parts += _map(row, (at % columns) * across, TOP + (at // columns) * down, cell)
    top, width = TOP + -(-len(shown) // columns) * down, columns * across - GAP
    parts += _curves([row for row in rows if row.get("experts/load_by_layer")], layers, top, width)
    return svg(parts, width + 70, top + PLOT_HEIGHT + 44)


def _map(row: dict[str, Any], left: float, top: float, cell: float) -> Iterator[str]:
    """Rows are layers, columns experts, of one step."""
    shares = row["experts/shares"]
    experts = len(shares[0])
    yield svg_text(left + LEFT, top + 2, f"step {row['step']:,}", "font-weight='bold'")
    for at, (layer, own) in enumerate(zip(row["experts/layers"], shares, strict=True)):
        y = top + 10 + at * ROW
        yield svg_text(left + LEFT - 6, y + 13, f"layer {layer}", "text-anchor='end'")
        for expert, share in enumerate(own):
            load, x = share * experts, left + LEFT + expert * cell
            box = f"x='{x:.1f}' y='{y}' width='{cell - 1:.1f}' height='{ROW - 1}' fill='{_colour(load)}'"
            yield f"<rect class='load' {box}><title>layer {layer}, expert {expert}: {load:.2f}</title></rect>"
            if cell > 26:
                fill = "#ffffff" if load > 0.8 * LARGEST or load < 0.2 else INK
                yield svg_text(x + cell / 2, y + 13, f"{load:.1f}", "text-anchor='middle' font-size='10'", fill)
    yield svg_text(left + LEFT, top + ROW * len(shares) + 24, f"experts 0 to {experts - 1}", fill=FAINT)


def _scale(left: float, top: float) -> Iterator[str]:
    """What colours mean."""
    for at in range(31):
        yield f"<rect x='{left + 4 * at}' y='{top}' width='4' height='10' fill='{_colour(LARGEST * at / 30)}'/>"
    for load in (0.0, 1.0, LARGEST):
        text = f"{load:.0f}" if load < LARGEST else f"{load:.0f} or more"
        yield svg_text(left + 120 * load / LARGEST, top + 22, text, fill=FAINT)


def _colour(load: float) -> str:
    """White for an even load; the palette of Okabe and Ito, which colour-blind people can tell apart."""
    end, way = (MORE, min(load - 1, LARGEST - 1) / (LARGEST - 1)) if load > 1 else (LESS, 1 - load)
    return "#" + "".join(f"{round(even + way * (full - even)):02x}" for even, full in zip(EVEN, end))


def _curves(rows: Sequence[dict[str, Any]], layers: Sequence[int], top: float, width: float) -> Iterator[str]:
    """The largest load of each layer over the steps, the first layer lightest."""
    steps = [row["step"] for row in rows]
    most = max(max(row["experts/load_by_layer"]) for row in rows)
    unit = nice_step(max(most - 1, 0.1) / 4)
    ceiling = 1 + unit * math.ceil(round((most - 1) / unit, 6)) if most > 1 else 1 + unit
    x_of = lambda step: LEFT + (width - LEFT) * (step - steps[0]) / max(steps[-1] - steps[0], 1)  # noqa: E731
    y_of = lambda load: top + PLOT_HEIGHT * (1 - (load - 1) / (ceiling - 1))  # noqa: E731
    yield svg_text(LEFT, top - 8, "largest load of each layer, by step", "font-weight='bold'")
    for tick in range(round((ceiling - 1) / unit) + 1):
        y = y_of(1 + tick * unit)
        yield f"<line x1='{LEFT}' y1='{y:.1f}' x2='{width:.1f}' y2='{y:.1f}' stroke='{GRID}'/>"
        yield svg_text(LEFT - 6, y + 4, f"{1 + tick * unit:g}", "text-anchor='end'", FAINT)
    ends = []
    for at, layer in enumerate(layers):
        points = [(x_of(row["step"]), y_of(row["experts/load_by_layer"][at])) for row in rows]
        grey = round(190 * (1 - (at + 1) / len(layers)))
        colour = f"#{grey:02x}{max(grey, 90):02x}{max(grey, 150):02x}"
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f"<polyline class='layer' points='{path}' fill='none' stroke='{colour}' stroke-width='1.3'/>"
        ends.append((points[-1][1], layer, colour))
    below = -math.inf
    for y, layer, colour in sorted(ends):
        if y - below >= 11:  # else its name would lie on another one
            yield svg_text(width + 6, y + 4, f"layer {layer}", fill=colour)
            below = y
    yield svg_text(LEFT, top + PLOT_HEIGHT + 18, f"step {steps[0]:,}", fill=FAINT)
    yield svg_text(width, top + PLOT_HEIGHT + 18, f"{steps[-1]:,}", "text-anchor='end'", FAINT)
