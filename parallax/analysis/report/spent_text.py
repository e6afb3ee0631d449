"""The time of traced steps as text of at most 80 columns."""

from collections.abc import Iterator, Sequence
from typing import Any

from parallax.analysis.report.text import WIDTH, fitted, table
from parallax.runtime.units import percent

SHOWN_DEVICES = 16
LEAST_SHOWN = 0.0005  # of the wall time: what takes less is put together


def text(found: Any) -> str:
    """All sections."""
    sections = [heading(found), parts(found), devices(found)]
    return "\n\n".join("\n".join(fitted(section)) for section in sections)


def heading(found: Any) -> Iterator[str]:
    """What was traced."""
    mesh = " ".join(f"{axis}={size}" for axis, size in found.mesh.items())
    where = f"{len(found.devices)} devices" + (f" ({found.kind})" if found.kind else "")
    steps = found.steps
    which = (
        "unknown steps" if not steps else f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    )
    yield f"{found.name}: {which} on {where}" + (f", {mesh}" if mesh else "")
    each = f", {_ms(found.secs / len(steps))} a step" if steps else ""
    yield f"{_ms(found.secs)} of wall time{each}; below, an average device in one step"


def parts(found: Any) -> Iterator[str]:
    """Parts of the model, collectives and idle: they add up to the wall time."""
    steps, least = max(len(found.steps), 1), LEAST_SHOWN * found.secs
    rows = [
        [*_cells(part, found, steps), f"{_ms(part.products / steps)} in products" if part.products else ""]
        for part in found.modules
        if part.secs >= least
    ]
    rows += _rest([part for part in found.modules if part.secs < least], found, steps)
    for part in found.collectives:
        rows.append([*_cells(part, found, steps), f"{_ms(part.hidden / steps)} hidden" if part.hidden else ""])
    rows.append(["idle", "", _ms(found.idle / steps), percent(found.idle / found.secs), ""])
    total = sum(part.secs for part in (*found.modules, *found.collectives)) + found.idle
    rows.append(["together", "", _ms(total / steps), percent(total / found.secs), ""])
    yield from table(["of a step", "calls", "time", "share", "of it"], rows, left=1, width=WIDTH)
    yield ""
    yield "hidden: a collective runs while the device computes, and is counted there."
    if found.kind == "cpu":
        yield "Simulated devices share the machine's cores: collectives hold the wait for the others, too."


def _cells(part: Any, found: Any, steps: int) -> list[str]:
    return [part.name, f"{part.calls / steps:,.0f}", _ms(part.secs / steps), percent(part.secs / found.secs)]


def devices(found: Any) -> Iterator[str]:
    """Each device's share of compute, collectives and idle."""
    rows = [
        [str(one.device), one.place, *(percent(part / found.secs) for part in (one.compute, one.exposed, one.idle))]
        for one in found.devices[:SHOWN_DEVICES]
    ]
    yield from table(["device", "place", "compute", "exposed collectives", "idle"], rows, left=2, width=WIDTH)
    if len(found.devices) > SHOWN_DEVICES:
        yield f"and {len(found.devices) - SHOWN_DEVICES} more devices; --json has all."


def _rest(parts: Sequence[Any], found: Any, steps: int) -> list[list[str]]:
    secs = sum(part.secs for part in parts)
    if not secs:
        return []
    calls = sum(part.calls for part in parts)
    name = f"{len(parts)} more parts" if len(parts) > 1 else parts[0].name
    return [[name, f"{calls / steps:,.0f}", _ms(secs / steps), percent(secs / found.secs), ""]]


def _ms(secs: float) -> str:
    return f"{1e3 * secs:,.2f} ms"
