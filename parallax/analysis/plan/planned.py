"""A plan as a value: what a step holds and how long it takes on chips that are not there; and plans side by side."""

import dataclasses
from collections.abc import Sequence
from html import escape

from parallax.analysis.plan import picture, text
from parallax.analysis.plan.analytic import Estimate, predict
from parallax.analysis.plan.layouts import Choice, placed
from parallax.analysis.plan.sweep import Row
from parallax.analysis.report.place import Place, read_topology
from parallax.cli.command import with_likely_vocab
from parallax.config.settings import Settings
from parallax.runtime.errors import ConfigError
from parallax.runtime.units import in_bytes, percent

# The palette of Okabe and Ito, which colour-blind people can tell apart.
COLOURS = ("#0072b2", "#e69f00", "#d55e00", "#cc79a7", "#56b4e9", "#009e73", "#f0e442", "#222222", "#999999")


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The predicted step of settings on a place. It prints as text; notebooks show it as bars."""

    name: str
    settings: Settings
    place: Place
    estimate: Estimate

    @property
    def secs(self) -> float:
        """Seconds of a step."""
        return self.estimate.secs

    @property
    def mfu(self) -> float:
        """FLOPs of the model's mathematics over what the chips could do in that time."""
        return self.estimate.mfu

    @property
    def peak_bytes(self) -> int:
        """Bytes of the chip that holds most."""
        return self.estimate.peak_bytes

    @property
    def memory(self) -> dict[str, int]:
        """The peak's bytes by component."""
        return self.estimate.components

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.place.chip.usable_bytes

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by what they go to; their sum is `secs`."""
        return text.analytic_parts(self.estimate)

    @property
    def layout(self) -> Choice:
        """What of the settings a sweep varies: mesh, microbatches, schedule, what is kept and gathered."""
        return Choice.of(self.settings)

    def __repr__(self) -> str:
        return "\n".join(
            [
                *self._heading(),
                "",
                *text.memory(self.estimate),
                "",
                *text.times(self.parts, self.secs),
                text.beneath(self.estimate),
            ]
        )

    def _repr_html_(self) -> str:
        held = {name.replace("_", " "): size for name, size in sorted(self.memory.items(), key=lambda item: -item[1])}
        lines = "<br>".join(map(escape, self._heading()))
        return (
            f"<p>{lines}</p>{_bars('memory of a chip', held, in_bytes)}{_bars('a step', self.parts, '{:.3f} s'.format)}"
        )

    def _heading(self) -> list[str]:
        return [
            *text.heading(self.name, self.settings, self.place).splitlines(),
            text.verdict(self.peak_bytes, self.place, "predicted"),
            f"{self.secs:.3f} s a step, MFU {percent(self.mfu)} (analytic)",
        ]


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """Plans for one place, the fastest first. It prints as a table, * on the Pareto front of memory and time, > the
    first of those that were given; notebooks draw it. What does not fit is named below the table."""

    name: str
    own: Choice
    place: Place
    plans: tuple[Plan, ...]
    too_large: tuple[Plan, ...]

    @property
    def front(self) -> list[Choice]:
        """Layouts than which no other here is faster in as little memory."""
        return picture.front(self._rows)

    @property
    def _rows(self) -> list[Row]:
        return [Row(plan.layout, plan.estimate) for plan in self.plans]

    def __repr__(self) -> str:
        lines = [f"{self.name} on {self.place.name}", *text.sweep_table(self._rows, {}, self.front, self.own)]
        verdicts = (text.verdict(plan.peak_bytes, self.place, "predicted") for plan in self.too_large)
        layouts = ("{pp}·{dp}·{tp} remat {remat}".format(**plan.layout._asdict()) for plan in self.too_large)
        return "\n".join([*lines, *(f"{layout} {said}" for layout, said in zip(layouts, verdicts))])

    def _repr_svg_(self) -> str:
        return picture.draw(f"{self.name} on {self.place.name}", self._rows, self.place, self.own)


def plan(settings: Settings, topology: str | Place, *, name: str = "step") -> Plan:
    """The step of these settings on `topology`, as "v5p:4x4x4" or "H100:8"; nothing is compiled, no device needed.

    Raises ConfigError where the topology is unknown, or where mesh or layout are not legal there.
    """
    place = read_topology(topology) if isinstance(topology, str) else topology
    place.chip.peak(settings.model.dtype)
    settings = placed(with_likely_vocab(settings), place)
    return Plan(name, settings, place, predict(settings, place))


def compare(plans: Sequence[Plan]) -> Comparison:
    """Plans side by side; the first is the one that the others are compared with.

    Raises ConfigError where there is none, or where they are for different places.
    """
    if not plans:
        raise ConfigError("there is no plan to compare; give at least one")
    first = plans[0]
    other = next((plan for plan in plans if plan.place != first.place), None)
    if other:
        raise ConfigError(f"plans for {first.place.name} and {other.place.name} cannot be compared; plan for one place")
    ordered = sorted(plans, key=lambda plan: plan.secs)
    fitting = tuple(plan for plan in ordered if plan.fits)
    return Comparison(first.name, first.layout, first.place, fitting, tuple(p for p in ordered if not p.fits))


def _bars(title: str, parts: dict[str, float], written) -> str:
    """One stacked bar, and what its pieces are."""
    whole = sum(parts.values())
    shown = {name: value for name, value in parts.items() if value > 0.005 * whole}
    colours = dict(zip(shown, COLOURS * 2))
    pieces = "".join(
        f'<div style="background:{colours[name]};width:{100 * value / whole:.2f}%"></div>'
        for name, value in shown.items()
    )
    key = " &ensp; ".join(
        f'<span style="white-space:nowrap"><span style="color:{colours[name]}">&#9632;</span> {escape(name)} '
        f"{written(value)}</span>"
        for name, value in shown.items()
    )
    bar = f'<div style="display:flex;height:1.1em;max-width:52em">{pieces}</div>'
    return f"<p><b>{title}: {written(whole)}</b></p>{bar}<p>{key}</p>"


plan.compare = compare  # px.plan.compare
