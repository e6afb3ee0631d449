"""A plan, and a sweep's table, as text of at most 100 columns."""

from collections.abc import Iterable, Iterator, Sequence

from parallax.analysis.plan.analytic import Estimate
from parallax.analysis.plan.changes import Change
from parallax.analysis.plan.compiling import Outcome
from parallax.analysis.plan.layouts import Choice
from parallax.analysis.plan.sweep import Row, Sweep
from parallax.analysis.report.place import Place
from parallax.analysis.report.text import compiled_parts, table, times
from parallax.config.settings import Settings
from parallax.runtime.units import in_bytes, percent

JAX_TAKES = 0.75  # of a GPU's memory


def heading(name: str, settings: Settings, place: Place) -> str:
    """What is planned, and where."""
    mesh = " ".join(f"{axis}={size}" for axis, size in settings.mesh.sizes.items())
    data, pipeline = settings.data, settings.pipeline
    windows = data.global_batch // settings.mesh.dp // pipeline.microbatches
    stages = f" v={pipeline.virtual}" * (pipeline.virtual > 1)
    schedule = pipeline.schedule + stages if settings.mesh.pp > 1 else "accumulate"
    gather = pipeline.gather + " one layer ahead" * settings.fsdp.prefetch
    return "\n".join(
        [
            f"{name} on {place.name}: {place.devices} x {place.chip.name}",
            f"mesh {mesh}; {schedule}, {pipeline.microbatches} microbatches of {windows} x {data.seq} tokens a device",
            f"remat {pipeline.remat}, gather per {gather}, attention by {settings.model.kernel}",
        ]
    )


def verdict(peak_bytes: int, place: Place, who: str) -> str:
    """Whether it fits."""
    usable = place.chip.usable_bytes
    fits = "fits" if peak_bytes <= usable else "does not fit"
    share = percent(peak_bytes / usable)
    said = f"{fits}: {in_bytes(peak_bytes)} of {in_bytes(usable)} a chip, {share} ({who})"
    if place.chip.platform == "gpu" and JAX_TAKES * usable < peak_bytes <= usable:
        said += f"\nJAX takes {in_bytes(JAX_TAKES * usable)} if not told otherwise: XLA_CLIENT_MEM_FRACTION=0.95"
    return said


def memory(found: Estimate) -> Iterator[str]:
    """Bytes by component, the largest first."""
    parts = sorted(found.components.items(), key=lambda item: -item[1])
    rows = [[name.replace("_", " "), in_bytes(size), percent(size / found.peak_bytes)] for name, size in parts if size]
    yield from table(["memory of a chip", "predicted", "of the peak"], rows, left=1)


def analytic_parts(found: Estimate) -> dict[str, float]:
    """The parts of a predicted step, with their names."""
    return {
        "work of the model": found.work_secs - found.recompute_secs,
        "work done again": found.recompute_secs,
        **{f"exposed over {axes}": secs for axes, secs in found.exposed_secs.items()},
        "bubble of the pipeline": found.bubble_secs,
        "update": found.update_secs,
    }


def beneath(found: Estimate) -> str:
    """What is largest, and what goes on beside the work."""
    name, size = max(found.components.items(), key=lambda item: item[1])
    hidden = f"; {found.hidden_secs:.3f} s of messages over dp hide behind the work" * (found.hidden_secs > 0)
    return f"largest: {name.replace('_', ' ')}, {in_bytes(size)}{hidden}"


def outcome(made: Outcome, place: Place) -> Iterator[str]:
    """The compiler's word."""
    if made.refused:
        yield f"does not fit: the compiler says {made.refused}"
        return
    yield verdict(made.peak_bytes, place, "compiled")
    yield f"arguments {in_bytes(made.arguments)}, temporaries {in_bytes(made.temporaries)}"
    if made.secs is None:
        yield "the compiler of this backend estimates no cycles: the step's time is the analytic one"
        return
    yield f"MFU {percent(made.mfu)} (compiled; bubble {percent(made.bubble)})"
    yield ""
    yield from times(compiled_parts(made.compute_secs, made.pallas_secs, made.exposed_secs), made.secs)


def changes(found: Sequence[Change]) -> Iterator[str]:
    """What each change of one setting would do, by the analytic plan."""
    rows = [[change.flags, f"{change.bytes / 2**30:+.1f} GiB", f"{100 * change.secs:+.1f} %"] for change in found]
    yield from table(["what would change it, each alone", "memory", "step"], rows, left=1)


def sweep_table(
    rows: Iterable[Row], compiled: dict[Choice, Outcome], front: Sequence[Choice], own: Choice
) -> Iterator[str]:
    """One line for each layout: * on the Pareto front of memory and time, > the config's own."""
    head = ["", "pp", "dp", "tp", "M", "schedule", "remat", "gather", "GiB", "s/step", "MFU", "bubble"]
    lines = []
    for choice, found in rows:
        marks = ("*" if choice in front else " ") + (">" if choice == own else "")
        schedule = "-" if choice.pp == 1 else choice.schedule + f" v={choice.virtual}" * (choice.virtual > 1)
        sizes = map(str, (choice.pp, choice.dp, choice.tp, choice.microbatches))
        figures = f"{found.peak_bytes / 2**30:.2f}", f"{found.secs:.3f}", percent(found.mfu), percent(found.bubble)
        lines.append([marks, *sizes, schedule, choice.remat, _gathers(choice), *figures])
        if choice in compiled:
            lines.append(["", "", "", "", "", "  compiled", "", "", *_figures(compiled[choice])])
    yield from (line.rstrip() for line in table(head, lines, left=1))


def _gathers(choice: Choice) -> str:
    if choice.dp == 1:
        return "-"
    return choice.gather + ", ahead" * choice.prefetch


def _figures(made: Outcome) -> tuple[str, str, str, str]:
    if made.secs is None:
        return f"{made.peak_bytes / 2**30:.2f}" if made.peak_bytes else "no fit", "", "", ""
    return f"{made.peak_bytes / 2**30:.2f}", f"{made.secs:.3f}", percent(made.mfu), percent(made.bubble)


def fastest(compiled: dict[Choice, Outcome], own: Choice) -> Iterator[str]:
    """Of what was compiled the fastest layout, and the flags that make it of the config's own."""
    timed = {choice: made for choice, made in compiled.items() if made.secs is not None}
    if not timed:
        return
    best = min(timed, key=lambda choice: timed[choice].secs)
    flags = " ".join(own.flags_to(best)) or "the config as it is"
    yield f"fastest as compiled: {timed[best].secs:.3f} s a step, MFU {percent(timed[best].mfu)}: {flags}\n"


def counted(search: Sweep) -> str:
    """What became of the layouts that are not in the table."""
    passed = ", ".join(f"{number:,} {why}" for why, number in search.passed.items())
    return f"{len(search.rows):,} layouts priced" + f"; passed over: {passed}" * bool(passed)
