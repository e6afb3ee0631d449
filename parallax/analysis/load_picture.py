"""The load of experts as SVG: the largest load of each layer by step, and maps of layers by experts for some steps."""

import math
from collections.abc import Iterable
from typing import Any

from parallax.display.svg import TIP, svg
from parallax.errors import ConfigError
from parallax.storage.run_files import number_of

MAPS = 4  # number of steps that are drawn, including the first and the last
PICTURE_WIDTH, HEIGHT, MAP_HEIGHT, GAP = 620, 130, 110, 46  # points
# Blue, white and vermilion, of Okabe and Ito: no load, an even one, STRONGEST or more.
COLOURS = ("#0072b2", "#f4f4f4", "#d55e00")
STRONGEST = 3.0
MOST_NAMES, MOST_TIPS = 8, 1000  # most layers with labels, and most cells with tooltips


def load_picture(rows: Iterable[dict[str, Any]]) -> str:
    """SVG of the rows of metrics.jsonl of a run with experts.

    A load is an expert's share of its layer's choices times the number of experts: 1 is even.

    Raises ConfigError if no row has "experts/shares", or if its values are not numbers.
    """
    rows = [row for row in rows if {"experts/shares", "experts/load_by_layer"} & row.keys()]
    tables = [row for row in rows if _is_table(row.get("experts/shares"), row.get("experts/layers"))]
    if not tables:
        raise ConfigError("no line of metrics.jsonl has experts/shares: a run writes them if model.layers_of has moe")
    layers, experts = tables[-1]["experts/layers"], len(tables[-1]["experts/shares"][0])
    curves = [row for row in rows if _is_table([row.get("experts/load_by_layer")], [0], len(layers))]
    chosen = [tables[index] for index in sorted({round(n * (len(tables) - 1) / (MAPS - 1)) for n in range(MAPS)})]
    shown = [row for row in chosen if _is_table(row["experts/shares"], layers, experts)]

    def draw(axes: Any) -> None:
        steps = [row["step"] for row in curves]
        for number, layer in enumerate(layers):
            shade = (0, 0.447 * (number + 1) / len(layers), 0.698 * (number + 1) / len(layers))
            label = f"layer {layer}" if number % -(-len(layers) // MOST_NAMES) == 0 else None
            axes.plot(steps, [row["experts/load_by_layer"][number] for row in curves], color=shade, label=label, lw=1)
        axes.set_ylim(bottom=1)
        axes.set_xlabel("step", loc="left")
        axes.set_title("largest load of an expert, times even", loc="left")
        axes.legend(frameon=False)
        width = (PICTURE_WIDTH - (len(shown) - 1) * 14) / len(shown)
        for number, row in enumerate(shown):
            place = (
                number * (width + 14) / PICTURE_WIDTH,
                -(MAP_HEIGHT + GAP) / HEIGHT,
                width / PICTURE_WIDTH,
                MAP_HEIGHT / HEIGHT,
            )
            _map(axes.inset_axes(place), row, named=number == 0)

    return svg(draw, PICTURE_WIDTH, HEIGHT)


def _map(axes: Any, row: dict[str, Any], *, named: bool) -> None:
    """Rows are layers, columns experts, of one step."""
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm  # here: most commands draw nothing

    layers, shares = row["experts/layers"], row["experts/shares"]
    experts = len(shares[0])
    loads = [[share * experts for share in layer] for layer in shares]
    colours = {"cmap": LinearSegmentedColormap.from_list("load", COLOURS), "norm": TwoSlopeNorm(1, 0, STRONGEST)}
    few = experts * len(layers) <= MOST_TIPS
    axes.pcolormesh(loads, edgecolors="white", linewidth=0.6 if few else 0, rasterized=not few, **colours)
    if few:
        for y, layer in enumerate(loads):
            for x, load in enumerate(layer):
                cell = axes.fill_between((x, x + 1), y, y + 1, alpha=0)
                cell.set_gid(f"{TIP}layer {layers[y]}, expert {x}: {load:.2f}")
                if experts <= MOST_NAMES:
                    axes.text(x + 0.5, y + 0.5, f"{load:.1f}", ha="center", va="center", fontsize=6.5)
    every = -(-len(layers) // MOST_NAMES)
    axes.set_yticks([layer_number + 0.5 for layer_number in range(0, len(layers), every)])
    axes.set_yticklabels([f"layer {layer}" for layer in layers[::every]] if named else [])
    axes.invert_yaxis()
    for label, side in zip(axes.set_xticks([0, experts], ["0", f"expert {experts - 1}"]), ("left", "right")):
        label.label1.set_horizontalalignment(side)
    axes.tick_params(length=0)
    axes.set_title(f"step {row['step']:,}", loc="left")
    axes.spines[:].set_visible(False)


def _is_table(shares: Any, layers: Any, experts: int | None = None) -> bool:
    """Whether `shares` has a list of finite numbers for each layer, all of one length: the file may hold anything."""
    if not isinstance(shares, list) or not isinstance(layers, list) or not 0 < len(shares) == len(layers):
        return False
    if not all(isinstance(row, list) and row and len(row) == (experts or len(shares[0])) for row in shares):
        return False
    return all(math.isfinite(number_of(x) if number_of(x) is not None else math.nan) for row in shares for x in row)
