"""A model's parameters as a table: where each is cut, and what a device holds of it."""

import math
from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple

from parallax.runtime.units import in_bytes
from parallax.sharding.layout import Layout, named_leaves


class Row(NamedTuple):
    """One parameter: its name, layout and shape, and the bytes of a device's piece."""

    name: str
    layout: Layout
    shape: tuple[int, ...]
    bytes: int


class Overview:
    """Lets what has `layouts`, `shapes`, `shardings` and `axis_sizes` print as its table of parameters."""

    layouts: Any
    shapes: Any
    shardings: Any
    axis_sizes: Mapping[str, int]

    def __repr__(self) -> str:
        return as_text(parameter_rows(self.layouts, self.shapes, self.shardings), self.axis_sizes)

    def _repr_html_(self) -> str:
        return as_html(parameter_rows(self.layouts, self.shapes, self.shardings), self.axis_sizes)


def parameter_rows(layouts: Any, shapes: Any, shardings: Any) -> list[Row]:
    """A row for each leaf of these trees, which are of one structure."""
    leaves, cuts = named_leaves(shapes), named_leaves(shardings)
    return [
        Row(name, layout, leaves[name].shape, _piece(leaves[name], cuts[name]))
        for name, layout in named_leaves(layouts).items()
    ]


def as_text(rows: list[Row], axis_sizes: Mapping[str, int]) -> str:
    """A line for each parameter, within about 100 columns."""
    cells = [[row.name, str(row.layout), _shape(row), in_bytes(row.bytes)] for row in rows]
    table = [["parameter", "layout", "shape", "on a device"], *cells]
    widths = [max(len(line[at]) for line in table) for at in range(3)]
    lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c:>{widths[2]}}  {d:>11}" for a, b, c, d in table]
    return "\n".join([heading(rows, axis_sizes), *lines])


def as_html(rows: list[Row], axis_sizes: Mapping[str, int]) -> str:
    """The same as a table whose bars are the bytes of a device."""
    most = max(row.bytes for row in rows)
    bar = '<div style="background:#0072b2;height:0.7em;width:{:.1f}em"></div>'
    left = 'style="text-align:left"'
    lines = [
        f"<tr><td {left}>{escape(row.name)}</td><td {left}>{row.layout._repr_html_()}</td><td>{_shape(row)}</td>"
        f"<td>{in_bytes(row.bytes)}</td><td>{bar.format(8 * row.bytes / most)}</td></tr>"
        for row in rows
    ]
    head = f"<tr><th {left}>parameter</th><th {left}>layout</th><th>shape</th><th>on a device</th><th></th></tr>"
    return f"<p>{heading(rows, axis_sizes)}</p><table>{head}{''.join(lines)}</table>"


def heading(rows: list[Row], axis_sizes: Mapping[str, int]) -> str:
    """How many parameters there are on which mesh, and their bytes on a device."""
    sizes = " ".join(f"{axis}={size}" for axis, size in axis_sizes.items())
    total = sum(math.prod(row.shape) for row in rows)
    held = in_bytes(sum(row.bytes for row in rows))
    return f"{total:,} parameters on {sizes}, {held} of them on a device"


def _shape(row: Row) -> str:
    return "x".join(map(str, row.shape))


def _piece(leaf: Any, sharding: Any) -> int:
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
