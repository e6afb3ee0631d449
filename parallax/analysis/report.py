"""The report of a step: collectives, memory and FLOPs, traced and as compiled."""

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from parallax.analysis.compiled.annotated import annotated
from parallax.analysis.compiled.hlo import of_update
from parallax.analysis.compiled.program import Compiled, CompiledFlops, ModuleSecs, gpu_of, read_step, secs_by_module
from parallax.analysis.planned.step_time import StepTime, compiled_parts, overlaps, step_time, time_parts
from parallax.analysis.traced.collectives import (
    Sent,
    busiest,
    bytes_by,
    collectives_by_rank,
    on_average,
    update_collectives,
)
from parallax.analysis.traced.flops import Flops, flops_breakdown
from parallax.analysis.traced.memory import GIVEN, memory
from parallax.config.sections import ALL_AXES
from parallax.display.html import html_page, in_frame
from parallax.display.plain import as_plain
from parallax.display.progress import waiting
from parallax.display.tables import LEAST_SHOWN, Table, TitledTables, section_text
from parallax.display.units import in_bytes, in_flops, percent, time_unit
from parallax.errors import ConfigError
from parallax.hardware.chips import chip
from parallax.step.step import TrainStep, abstract_state

LEFT_OUT = ("mesh", "timeline", "modules", "flops", "pairs", "group")  # fields of `compiled` that JSON leaves out


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """A report as plain data. It prints as text; notebooks show it as a page.

    `sent` holds the collectives of a device for loss and gradients: see `busiest`. `sent_on_average` holds those of an
    average pipeline rank, to compare with the compiled program. `memory` holds the predicted bytes on a device by
    component, at the peak; `dtypes` those of parameters and optimizer states. `compiled` is None if nothing was
    compiled; `compiled_for` says for which devices, or why not. `time` is None if cycles are unknown; `computed` is
    its compute by module. `program` is the compiled program with names, if asked for: see `annotated`.
    """

    name: str
    mesh: dict[str, int]
    schedule: str
    microbatches: int
    rows: int
    seq: int
    sent: tuple[Sent, ...]
    sent_on_average: tuple[Sent, ...]
    flops: Flops
    memory: dict[str, int]
    compiled: Compiled | None
    compiled_for: str
    time: StepTime | None = None
    computed: tuple[ModuleSecs, ...] = ()
    dtypes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    program: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of a step, on all devices."""
        return self.rows * self.seq

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def peak(self) -> int:
        """Predicted peak bytes on a device, the sum of all components."""
        return sum(self.memory.values())

    @property
    def compiled_flops(self) -> CompiledFlops | None:
        """FLOPs of the compiled program on an average device, with those of the update separate."""
        return self.compiled and self.compiled.flops

    def beside_compiler(self) -> list[tuple[str, int, int]]:
        """Label, predicted bytes and the compiler's bytes: for a step's arguments, on TPUs for its peak, and for all
        that it reserves."""
        arguments = sum(size for name, size in self.memory.items() if name in GIVEN)
        made = self.compiled
        # That for TPUs leaves gaps between arrays, which its peak excludes; that of other compilers may exclude arrays.
        peak = [("at the peak", self.peak, made.peak)] if made.cycles is not None else []
        return [("arguments", arguments, made.arguments), *peak, ("together", self.peak, made.together)]

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and lists that JSON can hold."""
        # The program's text is longer than all else.
        plain = as_plain(dataclasses.replace(self, compiled=None), ("program",))
        plain |= {"tokens": self.tokens, "devices": self.devices, "peak": self.peak}
        plain["flops"] |= {"executed": self.flops.executed, "mfu_ceiling": self.flops.mfu_ceiling}
        if self.compiled is not None:
            plain |= {"compiled_flops": as_plain(self.compiled_flops), "compiled": as_plain(self.compiled, LEFT_OUT)}
        return plain

    def to_json(self) -> str:
        """The whole report as JSON, with every collective."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """A self-contained page."""
        total = sum(call.total_bytes for call in self.sent)
        facts = {
            "A device sends": in_bytes(total),
            "for each token": in_bytes(total / self.tokens),
            "Memory, predicted": in_bytes(self.peak),
            "MFU at most": percent(self.flops.mfu_ceiling),
        }
        title = f"{self.name}: what a step sends, stores and computes"
        return html_page(title, report_heading(self), facts, sections_of(self))

    def __repr__(self) -> str:
        first, *rest = report_heading(self)
        sections = [TitledTables("", first, rest), *sections_of(self)]
        return "\n\n".join("\n".join(section_text(section)) for section in sections)

    def _repr_html_(self) -> str:
        return in_frame(self.to_html())


def report(
    step: TrainStep,
    batch: Any = None,
    *,
    name: str = "step",
    entries: int | None = None,
    compiled: bool = True,
    annotate: bool = False,
) -> Report:
    """Report what a `TrainStep` sends, stores and computes.

    Args:
        batch: the arrays that the step takes, or their shapes; by default as `step_of` knows them.
        name: the printed name.
        entries: number of tokens in the model's vocab, if part of it is padding.
        compiled: whether to compile the step and read the result. Not possible on an abstract mesh.
        annotate: whether to keep the text of the compiled program, with names.

    Raises ConfigError if the batch's shape is not known.
    """
    if not isinstance(step, TrainStep):
        raise ConfigError(f"a {type(step).__name__} is given where a step is needed; write px.step_of(settings)")
    model, shape = step.model, step.batch_shape if batch is None else batch["tokens"].shape
    if shape is None:
        raise ConfigError("the shape of this step's batch is not known; write report(step, batch).")
    rows, seq = shape
    with waiting("tracing the step"):
        state = abstract_state(model, step.tx)
        planned = memory(model, state.opt_state, global_batch=rows, seq=seq)
        update = update_collectives(step)
        ranks = [[*rank, *update] for rank in collectives_by_rank(model, rows, seq)]
        flops = flops_breakdown(model, rows, seq, entries=entries)
    made, made_for, time, computed, text = None, "", None, (), ""
    if compiled and isinstance(model.mesh, Mesh):
        kind = model.mesh.devices.flat[0].device_kind
        made_for = f"{model.mesh.size} x {kind}"
        with waiting(f"compiling the step for {made_for}"):
            program = step.lower(rows, seq).compile()
        with waiting("reading the compiled step"):
            made = read_step(program, model, seq=seq)
            text = annotated(program.as_text(), model, made.collectives) if annotate else ""
            if made.cycles is not None:
                time = step_time(made, chip(kind), flops.model, dtype=model.config.dtype)
                computed = tuple(secs_by_module(made, chip(kind).clock_hz))
    return Report(
        name=name,
        mesh=dict(model.axis_sizes),
        schedule=model.schedule.name,
        microbatches=model.pipeline.microbatches,
        rows=rows,
        seq=seq,
        sent=tuple(busiest(ranks)),
        sent_on_average=tuple(on_average(ranks)),
        flops=flops,
        memory=dict(planned._asdict()),
        compiled=made,
        compiled_for=made_for,
        time=time,
        computed=computed,
        dtypes={"parameters": dtypes_of(state.params), "optimizer": dtypes_of(state.opt_state)},
        program=text,
    )


DIRECTIONS = ("forward", "recompute", "backward", "update")
FLOPS_LABELS = {
    "model": "the model's own",
    "masked": "attention scores that are masked or recomputed",
    "padding": "heads and vocab filled up, other products",
    "repeated": "done on several devices alike, or in vain",
    "recomputed": "forward run again in the backward pass",
    "waiting": "could be done while waiting in ticks",
}


class CompiledRow(NamedTuple):
    """Traced and compiled collectives of one kind over some axes, of an average device."""

    axes: tuple[str, ...]
    kind: str
    update: bool  # of the optimizer
    traced_calls: float
    traced_bytes: float
    calls: float
    bytes: float
    asynchronous_bytes: float
    cycles_between: float


def grouped_by(sent: Iterable[Sent], *fields: str) -> list[tuple[tuple, list[Sent]]]:
    """Collectives that send something, grouped by fields of which the first is axes: in mesh order, then by bytes."""
    groups: dict[tuple, list[Sent]] = defaultdict(list)
    for call in sent:
        if call.bytes:
            groups[tuple(getattr(call, field) for field in fields)].append(call)
    return sorted(groups.items(), key=lambda group: (axes_order(group[0][0]), -sum(by_direction(group[1])), group[0]))


def by_direction(sent: Iterable[Sent]) -> list[float]:
    """Bytes in a step for each of DIRECTIONS."""
    sums = bytes_by(sent, "direction")
    return [sums.get((direction,), 0) for direction in DIRECTIONS]


def traced_beside_compiled(sent: Iterable[Sent], made: Iterable[Any]) -> list[CompiledRow]:
    """Traced and compiled collectives of an average device by axes and kind, including those that only one has."""
    rows_of: dict[tuple, Counter] = defaultdict(Counter)
    for call in filter(lambda call: call.bytes, sent):
        row = rows_of[call.axes, call.kind, call.direction == "update"]
        row.update(traced_calls=call.count, traced_bytes=call.total_bytes)
    for call in filter(lambda call: call.bytes, made):
        row, moved = rows_of[call.axes, call.kind, of_update(call.source)], call.bytes * call.count
        cycles = call.cycles_between * call.count
        row.update(calls=call.count, bytes=moved, asynchronous_bytes=moved * call.asynchronous, cycles_between=cycles)
    rows = [CompiledRow(*key, *(row[name] for name in CompiledRow._fields[3:])) for key, row in rows_of.items()]
    return sorted(rows, key=lambda row: (row.update, axes_order(row.axes), -max(row.bytes, row.traced_bytes), row.kind))


def shares_of_flops(flops: Flops) -> list[tuple[str, float, float]]:
    """Label, FLOPs and share of the total, including waiting, for each purpose that is not zero."""
    whole = sum(flops)
    pairs = ((label, getattr(flops, name)) for name, label in FLOPS_LABELS.items())
    return [(label, value, value / whole) for label, value in pairs if value / whole >= 0.00005]


def axes_order(axes: tuple[str, ...]) -> tuple:
    """A key that sorts single axes in mesh order, then pairs."""
    return len(axes), [ALL_AXES.index(axis) for axis in axes]


def report_heading(report: Report) -> list[str]:
    """Two lines: name, mesh, schedule and batch."""
    mesh = " ".join(f"{axis}={size}" for axis, size in report.mesh.items())
    batch = f"{report.rows} x {report.seq} = {report.tokens:,} tokens a step"
    batches = "microbatch" + "es" * (report.microbatches > 1)
    return [
        f"{report.name}: {mesh} on {report.devices} devices",
        f"{report.schedule} with {report.microbatches} {batches}; {batch}",
    ]


def sections_of(report: Report) -> Iterator[TitledTables]:
    """All sections after the heading, for text and page."""
    yield sent_section(report)
    yield call_site_section(report)
    yield flops_section(report)
    yield memory_section(report)
    if report.compiled is not None:
        yield collectives_section(report)
    elif report.compiled_for:
        yield TitledTables("collectives", report.compiled_for, ())
    if report.time is not None:
        yield time_section(report)


def sent_section(report: Report) -> TitledTables:
    """Totals by axes and kind."""
    groups = grouped_by(report.sent, "axes", "kind")
    most = max((sum(by_direction(sent)) for _, sent in groups), default=1)
    rows, bars, before = [], [], None
    for (axes, kind), sent in groups:
        sizes = by_direction(sent)
        rows += [", ".join(axes)] * (axes != before)
        rows.append([f"  {kind}", *(in_bytes(size) if size else "-" for size in sizes), *_total(sizes, sent, report)])
        bars.append([(direction, size / most) for direction, size in zip(DIRECTIONS, sizes)])
        before = axes
    sizes = by_direction(report.sent)
    rows.append(["all", *map(in_bytes, sizes), *_total(sizes, report.sent, report)])
    table = Table(["axis, kind", *DIRECTIONS, "total", "a token", "calls"], rows, 1, bars)
    silent = sum(call.count for call in report.sent if not call.bytes)
    notes = [f"{silent:,} calls more send nothing: their axes are of one device."] * bool(silent)
    return TitledTables("sent", "What a device sends in a step, by axis and kind", [table, *notes])


def _total(sizes: list[float], sent: Iterable[Sent], report: Report) -> tuple[str, str, str]:
    calls = sum(call.count for call in sent if call.bytes)
    return in_bytes(sum(sizes)), in_bytes(sum(sizes) / report.tokens), f"{calls:,}"


def call_site_section(report: Report) -> TitledTables:
    """The source lines that send, by axis and kind, most bytes first."""
    rows: list[str | list[str]] = []
    for (axes, kind), of_kind in grouped_by(report.sent, "axes", "kind"):
        rows.append(f"{', '.join(axes)} {kind}")
        for (_, direction, module, source), sent in grouped_by(of_kind, "axes", "direction", "module", "source"):
            calls, total = sum(call.count for call in sent), sum(call.total_bytes for call in sent)
            rows.append([f"  {direction}", module, source.removeprefix("parallax/"), f"{calls:,}", in_bytes(total)])
    table = Table(["axis, kind", "module", "source", "calls", "total"], rows, 3)
    return TitledTables("call-sites", "Who asks for it", [table])


def flops_section(report: Report) -> TitledTables:
    """Executed FLOPs by purpose."""
    shares = shares_of_flops(report.flops)
    rows = [[label, in_flops(value), percent(share)] for label, value, share in shares]
    table = Table(["", "FLOPs", "share"], rows, 1, [[("predicted", share)] for _, _, share in shares])
    executed = f"A device executes {in_flops(report.flops.executed)}"
    if report.compiled_flops is not None:
        passes, update = map(in_flops, report.compiled_flops)
        executed += f"; in the compiled program {passes}, and {update} for the optimizer's update"
    ceiling = f"MFU is at most {percent(report.flops.mfu_ceiling)}."
    return TitledTables("flops", "FLOPs of a device in a step", [table, f"{executed}.", ceiling])


def dtypes_of(tree: Any) -> tuple[str, ...]:
    """The dtypes of a tree without counts and keys, those of most bytes first."""
    sizes: Counter[str] = Counter()
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim:
            sizes[str(leaf.dtype)] += leaf.size * leaf.dtype.itemsize
    return tuple(name for name, _ in sizes.most_common())


def memory_section(report: Report) -> TitledTables:
    """Bytes by component, beside the compiler's totals."""
    narrow = {name: ", ".join(dtypes) for name, dtypes in report.dtypes.items() if dtypes != ("float32",)}
    labels = {name: f" ({narrow[name]})" if name in narrow else "" for name in report.memory}
    sizes = {name.replace("_", " ") + labels[name]: size for name, size in report.memory.items()}
    compiled = report.compiled is not None
    beside = report.beside_compiler() if compiled else []
    most = max(report.peak, *(theirs for _, _, theirs in beside), 1)
    if not compiled:
        sizes["together"] = report.peak
    rows = [[name, in_bytes(size), *[""] * 2 * compiled] for name, size in sizes.items()]
    bars = [[("predicted", size / most)] for size in sizes.values()]
    for name, mine, theirs in beside:
        rows.append([name, in_bytes(mine), in_bytes(theirs), f"{mine / theirs - 1:+.1%}".replace("%", " %")])
        bars.append([("compiler", theirs / most)])
    table = Table(["", "predicted", *["compiler", "difference"] * compiled], rows, 1, bars)
    return TitledTables("memory", "Memory of a device", [table])


def collectives_section(report: Report) -> TitledTables:
    """The compiled collectives beside the traced ones by axis and kind, those of the update last."""
    timed, gpu = report.compiled.cycles is not None, gpu_of(report.compiled.mesh)
    hidden = {(row.axes, row.kind): row.hidden for row in overlaps(report.compiled, gpu)} if gpu else {}
    head = ["axis, kind", "calls\ntraced", "calls\ncompiled", "bytes\ntraced", "bytes\ncompiled", "async"]
    head += ["hidden"] if gpu else ["cycles\nbetween"] * timed
    compared = traced_beside_compiled(report.sent_on_average, report.compiled.collectives)
    rows, before = [], None
    for row in compared:
        axes = ", ".join(row.axes) + " (update)" * row.update
        rows += [axes] * (axes != before)
        cells = [
            f"  {row.kind}",
            f"{row.traced_calls:,.0f}" if row.traced_calls else "-",
            f"{row.calls:,.0f}" if row.calls else "-",
            in_bytes(row.traced_bytes) if row.traced_calls else "-",
            in_bytes(row.bytes) if row.calls else "-",
            percent(row.asynchronous_bytes / row.bytes) if row.calls else "-",
        ]
        if gpu:
            cells.append(percent(hidden["+".join(row.axes), row.kind]) if row.calls else "-")
        elif timed:
            cells.append(f"{row.cycles_between:,.0f}")
        rows.append(cells)
        before = axes
    table = Table(head, rows, 1)
    title = f"Compiled collectives beside the traced ones, for {report.compiled_for}"
    return TitledTables("collectives", title, [table, *collective_notes(report, compared)])


def collective_notes(report: Report, rows: list[CompiledRow]) -> Iterator[str]:
    """Sentences that explain the table."""
    merged = [call for call in report.compiled.collectives if call.merged > 1]
    count, arrays = sum(call.count for call in merged), sum(call.count * call.merged for call in merged)
    if merged:
        calls = "1 call moves" if count == 1 else f"{count:,.0f} calls move"
        yield f"{calls} {arrays:,.0f} arrays that were merged."
    gone = [f"{row.kind} over {', '.join(row.axes)}" for row in rows if row.traced_calls and not row.calls]
    if gone:
        yield f"Turned into others: {'; '.join(gone)}."
    if any(row.update for row in rows):
        yield "(update): of the gradient's norm and of the optimizer."


def time_section(report: Report) -> TitledTables:
    """Time of a step by part, from the compiler's cycles or, for GPUs, from a roofline over the program's fusions."""
    on_gpu = report.compiled is not None and gpu_of(report.compiled.mesh) is not None
    by = "a roofline over its fusions" if on_gpu else "the compiler's cycles"
    time, total = report.time, report.time.total_secs
    parts = time_parts(compiled_parts(time), total)
    unit, name = time_unit(total)
    computed = [
        [module.module, *(f"{secs / unit:.3f} {name}" for secs in of_module), percent(module.total / total)]
        for module in report.computed
        for of_module in [(module.products, module.others)]
        if module.total / total > LEAST_SHOWN
    ]
    mfu = ", ".join(filter(None, [f"MFU {percent(time.mfu)}", time.kernels]))
    waits = f"An average rank waits for others {percent(time.bubble)} of the time."
    modules = Table(["compute of", "products", "the rest", "share of the step"], computed, 1)
    return TitledTables(
        "time", f"Time of a step, by {by} and the bandwidth of links", [parts, f"{mfu}.", waits, "", modules]
    )
