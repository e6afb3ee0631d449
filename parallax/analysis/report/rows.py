"""The rows of a report's tables, the same for text and page."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from parallax.analysis.report.flops import Flops
from parallax.analysis.report.hlo import of_update
from parallax.analysis.report.traced import Sent
from parallax.sharding.mesh import AXES

DIRECTIONS = ("forward", "recompute", "backward")
FLOPS_LABELS = {
    "model": "the model's own",
    "masked": "attention scores that are masked or made again",
    "padding": "heads and vocab filled up, other products",
    "repeated": "done on several devices alike, or in vain",
    "recomputed": "forward run again in the backward pass",
    "waiting": "could be done while waiting in ticks",
}


class AxisRow(NamedTuple):
    """What a device sends over some axes by one kind of collective: bytes in a step by direction, and calls."""

    axes: tuple[str, ...]
    kind: str
    forward: int
    recompute: int
    backward: int
    calls: int

    @property
    def total(self) -> int:
        return self.forward + self.recompute + self.backward


class PlaceRow(NamedTuple):
    """The calls of one collective from one place, whatever their sizes."""

    axes: tuple[str, ...]
    kind: str
    direction: str
    module: str
    source: str
    calls: int
    total: int


class MadeRow(NamedTuple):
    """What the compiler made of the collectives of one kind over some axes; an average device's."""

    axes: tuple[str, ...]
    kind: str
    update: bool  # of the optimizer, whose collectives the compiler chooses
    traced_calls: float
    traced_bytes: float
    calls: float
    bytes: float
    asynchronous_bytes: float
    cycles_between: float


def by_axis_and_kind(sent: Iterable[Sent]) -> list[AxisRow]:
    """Totals, axes in mesh order, of each the kind that sends most first; what sends nothing is left out."""
    found: dict[tuple, dict[str, int]] = defaultdict(lambda: dict.fromkeys((*DIRECTIONS, "calls"), 0))
    for one in sent:
        if one.bytes:
            found[one.axes, one.kind][one.direction] += one.total_bytes
            found[one.axes, one.kind]["calls"] += one.count
    rows = [AxisRow(*key, **values) for key, values in found.items()]
    return sorted(rows, key=lambda row: (axes_order(row.axes), -row.total, row.kind))


def by_place(sent: Iterable[Sent], *, line_numbers: bool = True) -> list[PlaceRow]:
    """Each place that sends something, axes in mesh order, the one that sends most first."""
    found: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for one in sent:
        if one.bytes:
            source = one.source if line_numbers else one.source.partition(":")[0]
            totals = found[one.axes, one.kind, one.direction, one.module, source]
            totals[0] += one.count
            totals[1] += one.total_bytes
    rows = [PlaceRow(*key, *totals) for key, totals in found.items()]
    return sorted(rows, key=lambda row: (axes_order(row.axes), -row.total, row))


def by_fate(sent: Iterable[Sent], made: Iterable[Any]) -> list[MadeRow]:
    """Traced beside compiled, of an average device, by axes and kind; what only one of them has too."""
    found: dict[tuple, dict[str, float]] = defaultdict(lambda: dict.fromkeys(MadeRow._fields[3:], 0))
    for one in sent:
        if one.bytes:
            row = found[one.axes, one.kind, False]
            row["traced_calls"] += one.count
            row["traced_bytes"] += one.total_bytes
    for one in made:
        if one.bytes:
            row = found[one.axes, one.kind, of_update(one.source)]
            row["calls"] += one.count
            row["bytes"] += one.bytes * one.count
            row["asynchronous_bytes"] += one.bytes * one.count * one.asynchronous
            row["cycles_between"] += one.cycles_between * one.count
    rows = [MadeRow(*key, **values) for key, values in found.items()]
    return sorted(rows, key=lambda row: (row.update, axes_order(row.axes), -max(row.bytes, row.traced_bytes), row.kind))


def shares_of_flops(flops: Flops) -> list[tuple[str, float, float]]:
    """Label, FLOPs and share of all, waiting included, of what there is."""
    whole = sum(flops)
    pairs = ((label, getattr(flops, name)) for name, label in FLOPS_LABELS.items())
    return [(label, value, value / whole) for label, value in pairs if value / whole >= 0.00005]


def axes_order(axes: tuple[str, ...]) -> tuple:
    """A key that sorts single axes in mesh order, then pairs."""
    return len(axes), [AXES.index(axis) for axis in axes]
