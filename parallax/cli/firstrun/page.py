"""The file of a first run, as Markdown that an issue shows."""

import json
import math
import time
from collections.abc import Iterator, Mapping

from parallax.analysis.plan import heading
from parallax.cli.firstrun.work import WARM_UP, Found, seconds
from parallax.runtime.units import in_bytes, percent

# How far what is measured may lie from what was planned before it is worth a line: as analytic plans lie from compiled
# ones (docs/plan.md). Neither is planned for simulated devices.
MEMORY_WITHIN, TIME_WITHIN = 0.1, 0.2
LOSS_WITHIN = 0.1  # of ln(vocab), before anything is learned
UNEVEN = 1.5  # the slowest step over the median


def page(found: Found, machine: Mapping[str, Mapping[str, str]]) -> str:
    """The whole file; `machine` is sections of names and values."""
    kind = machine["Devices"]["devices"]
    lines = [f"# First run on {kind}", "", f"`{found.command}`, {time.strftime('%Y-%m-%d')}. {verdict(found)}"]
    for title, rows in (("Planned and measured", compared(found)), ("Phases", phases(found)), ("Steps", steps(found))):
        lines += ["", f"## {title}", "", *rows]
    lines += ["", "## Warnings", "", *([f"- {line}" for line in warnings(found)] or ["None."])]
    if found.options:
        machine = {**machine, "Compiler options of Parallax": found.options}
    for title, facts in machine.items():
        lines += ["", f"## {title}", "", *table(["", ""], facts.items())]
    config = json.dumps(found.settings.to_dict(), indent=1)
    return "\n".join([*lines, "", "## Config", "", "```json", config, "```", ""])


def page_without_devices(command: str, error: str, machine: Mapping[str, Mapping[str, str]]) -> str:
    """The file where JAX finds no devices."""
    lines = ["# First run: JAX has no devices", "", f"`{command}`", "", "```", error, "```"]
    for title, facts in machine.items():
        lines += ["", f"## {title}", "", *table(["", ""], facts.items())]
    return "\n".join([*lines, ""])


def verdict(found: Found) -> str:
    """The outcome in a sentence."""
    failed = [phase.name for phase in found.phases if phase.state in ("failed", "running")]
    return f"**Failed or interrupted: {', '.join(failed)}.**" if failed else "All phases are done."


def compared(found: Found) -> Iterator[str]:
    """The plan beside the compiler's word and the measurement."""
    held = found.held and found.held.peak
    yield from table(
        ["", "planned", "compiled", "measured", "measured / planned"],
        [
            [
                "memory of a device",
                size(held),
                size(found.compiled_bytes),
                size(found.most_bytes),
                ratio(found.most_bytes or found.compiled_bytes, held),
            ],
            [
                "time of a step",
                seconds(found.planned and found.planned.secs),
                seconds(found.compiled_step_secs),
                seconds(found.median_secs),
                ratio(found.median_secs, found.planned and found.planned.secs),
            ],
            ["MFU", share(found.planned and found.planned.mfu), "", share(found.mfu), ""],
            ["compilation", "", "", seconds(found.compile_secs), ""],
        ],
    )
    yield ""
    if found.compiled_parts:
        yield f"As compiled: {found.compiled_parts}. "
    yield (
        f"The measured time is the median after {WARM_UP} steps, each waited for. A device's measured memory is the "
        "allocator's peak, of the devices of process 0, where the backend says it; else the ratio is the compiler's."
    )
    if found.unplanned:
        yield f"No time was planned: {found.unplanned}"
    if found.topology is not None:
        yield "\n".join(["", "```", heading("the step", found.settings, found.topology), "```"])


def phases(found: Found) -> Iterator[str]:
    """Each phase with its time, and what a failed one says."""
    yield from table(
        ["phase", "", "time"], [[phase.name, phase.state, f"{phase.secs:.1f} s"] for phase in found.phases]
    )
    for phase in found.phases:
        if phase.error:
            yield from ("", "```", phase.error, "```")


def steps(found: Found) -> Iterator[str]:
    """Every step that was taken."""
    rows = [
        [str(number), seconds(taken.secs), f"{taken.loss:.4f}", f"{taken.grad_norm:.3g}", "yes" * taken.skipped]
        for number, taken in enumerate(found.steps, 1)
    ]
    yield from table(["step", "time", "loss", "gradient norm", "skipped"], rows)


def warnings(found: Found) -> Iterator[str]:
    """What somebody who reads the file should look at first."""
    yield from _numbers(found)
    held = found.held and found.held.peak
    real = found.topology is None or not found.topology.shared
    measured = found.most_bytes or found.compiled_bytes
    if real and measured and held and abs(measured / held - 1) > MEMORY_WITHIN:
        yield f"memory is {ratio(measured, held)} of what was planned: further off than {percent(MEMORY_WITHIN)}"
    if found.most_bytes and found.limit_bytes and found.most_bytes > 0.9 * found.limit_bytes:
        yield f"a device held {in_bytes(found.most_bytes)} of the {in_bytes(found.limit_bytes)} that it may"
    planned, secs = found.planned and found.planned.secs, found.median_secs
    if real and planned and secs and abs(secs / planned - 1) > TIME_WITHIN:
        yield f"a step takes {ratio(secs, planned)} of the planned time: further off than {percent(TIME_WITHIN)}"
    slowest = max((taken.secs for taken in found.steps[WARM_UP:]), default=0.0)
    if secs and slowest > UNEVEN * secs:
        yield f"the slowest step takes {slowest / secs:.1f} times the median"
    if found.unplanned:
        yield f"no time was planned: {found.unplanned}"


def _numbers(found: Found) -> Iterator[str]:
    losses = [taken.loss for taken in found.steps]
    if not losses:
        return
    wrong = [number for number, taken in enumerate(found.steps, 1) if not math.isfinite(taken.loss + taken.grad_norm)]
    if wrong:
        yield f"loss or gradient is not finite in step {', '.join(map(str, wrong))}"
    uniform = math.log(found.settings.model.vocab)
    if not abs(losses[0] / uniform - 1) < LOSS_WITHIN:
        yield f"the first loss is {losses[0]:.3f}; a model that has learned nothing is near ln(vocab) = {uniform:.3f}"
    if len(losses) > 1 and not losses[-1] < losses[0]:
        yield f"the loss does not fall: {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last"
    if skipped := sum(taken.skipped for taken in found.steps):
        yield f"the guard skipped {skipped} of {len(losses)} steps"


def table(head: list[str], rows) -> Iterator[str]:
    """A table of Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |"


def size(count: int | None) -> str:
    """Bytes, where they are known."""
    return "not known" if count is None else in_bytes(count)


def share(value: float | None) -> str:
    """A share, where it is known."""
    return "not known" if value is None else percent(value)


def ratio(measured: float | None, planned: float | None) -> str:
    """One over the other, where both are known.

    >>> ratio(1.1, 1.0), ratio(None, 1.0)
    ('110.0 %', '')
    """
    return percent(measured / planned) if measured and planned else ""
