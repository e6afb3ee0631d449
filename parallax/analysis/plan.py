"""Plans: a step's predicted memory and time on chips that need not be there, changes that help, and comparisons."""

import dataclasses
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from parallax.analysis.layouts import (
    SHARDED_TABLES,
    Choice,
    build_if_legal,
    policies,
    settings_on_topology,
    with_changes,
)
from parallax.analysis.render import Table, parts_html, parts_text, table_text, text_table, time_parts
from parallax.analysis.step_time import CompiledStep, Estimate, compiled_parts, predict, predict_of
from parallax.analysis.sweep import PricedLayout, Sweep, draw, front
from parallax.analysis.topology import Topology, read_topology
from parallax.config.sections import REMAT
from parallax.config.settings import Settings
from parallax.data.vocabulary import with_likely_vocab
from parallax.model.exchange import EXCHANGES
from parallax.model.families import CONTEXTS
from parallax.model.kernels import ATTENTION_KERNELS
from parallax.model.traffic import exchange_of, exchanged_rows
from parallax.runtime.errors import ConfigError
from parallax.runtime.units import in_bytes, percent
from parallax.sharding.activations import BATCH_AXES
from parallax.sharding.plan import DATA_AXES


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The predicted step of settings on a topology. It prints as text; notebooks show it as bars."""

    name: str
    settings: Settings
    topology: Topology
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
        return self.peak_bytes <= self.topology.chip.usable_bytes

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by what they go to; their sum is `secs`."""
        return analytic_parts(self.estimate)

    @property
    def layout(self) -> Choice:
        """What of the settings a sweep varies: mesh, microbatches, schedule, remat and the sharding policy."""
        return Choice.of(self.settings)

    def __repr__(self) -> str:
        title = plan_heading(self.name, self.settings, self.topology)
        return "\n".join([title, "", *parts_text(estimate_parts(self.estimate, self.topology))])

    def _repr_html_(self) -> str:
        title = plan_heading(self.name, self.settings, self.topology).splitlines()
        return "\n".join(parts_html([*title, *estimate_parts(self.estimate, self.topology)]))


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """Plans for one topology, the fastest first. It prints as a table, * on the Pareto front of memory and time, > the
    first of those that were given; notebooks draw it. What does not fit is named below the table."""

    name: str
    own: Choice
    topology: Topology
    plans: tuple[Plan, ...]
    too_large: tuple[Plan, ...]

    @property
    def front(self) -> list[Choice]:
        """Layouts than which no other here is faster in as little memory."""
        return front(self._rows)

    @property
    def _rows(self) -> list[PricedLayout]:
        return [PricedLayout(plan.layout, plan.estimate) for plan in self.plans]

    def __repr__(self) -> str:
        lines = [f"{self.name} on {self.topology.name}", *sweep_table(self._rows, {}, self.front, self.own)]
        verdicts = (verdict(plan.peak_bytes, self.topology, "predicted") for plan in self.too_large)
        layouts = (f"{plan.layout.mesh} remat {plan.layout.remat}" for plan in self.too_large)
        return "\n".join([*lines, *(f"{layout} {said}" for layout, said in zip(layouts, verdicts))])

    def _repr_svg_(self) -> str:
        return draw(f"{self.name} on {self.topology.name}", self._rows, self.topology, self.own)


def plan(settings: Settings, topology: str | Topology, *, name: str = "step") -> Plan:
    """The step of these settings on `topology`, as "v5p:4x4x4" or "H100:8"; nothing is compiled, no device needed.

    Raises ConfigError where the topology is unknown, or where mesh or layout are not legal there.
    """
    topology = read_topology(topology) if isinstance(topology, str) else topology
    topology.chip.peak(settings.model.dtype)
    settings = settings_on_topology(with_likely_vocab(settings), topology)
    return Plan(name, settings, topology, predict(settings, topology))


def compare_plans(plans: Sequence[Plan]) -> Comparison:
    """Plans side by side; the first is the one that the others are compared with.

    Raises ConfigError where there is none, or where they are for different places.
    """
    if not plans:
        raise ConfigError("there is no plan to compare; give at least one")
    first = plans[0]
    other = next((plan for plan in plans if plan.topology != first.topology), None)
    if other:
        raise ConfigError(
            f"plans for {first.topology.name} and {other.topology.name} cannot be compared; plan for one place"
        )
    ordered = sorted(plans, key=lambda plan: plan.secs)
    fitting = tuple(plan for plan in ordered if plan.fits)
    return Comparison(first.name, first.layout, first.topology, fitting, tuple(p for p in ordered if not p.fits))


CHANGES_SHOWN = 6
LEAST_SECS, LEAST_BYTES = 0.003, 0.02  # shares below which a change is none


class Change(NamedTuple):
    """Flags to add to the command, and what they do: bytes of a chip, and a share of the step's time."""

    flags: str
    bytes: int
    secs: float


def helpful_changes(
    settings: Settings, topology: Topology, now: Estimate, show: Callable[[int, int], None] = lambda done, of: None
) -> list[Change]:
    """The changes that save time or memory; those first that save most time and fit, then those that save memory.

    Where nothing fits yet, these are shown although none of them alone may be enough. `show` is told how many of how
    many are priced.
    """
    found = list(_priced(settings, topology, now, show))
    room = topology.chip.usable_bytes - now.peak_bytes
    faster = [change for change in found if change.secs < -LEAST_SECS and change.bytes <= room]
    smaller = [change for change in found if change.bytes < -LEAST_BYTES * now.peak_bytes and change not in faster]
    half = CHANGES_SHOWN // 2
    most, least = max(half, CHANGES_SHOWN - len(smaller)), max(half, CHANGES_SHOWN - len(faster))
    return (
        sorted(faster, key=lambda change: change.secs)[:most] + sorted(smaller, key=lambda change: change.bytes)[:least]
    )


def _priced(
    settings: Settings, topology: Topology, now: Estimate, show: Callable[[int, int], None]
) -> Iterator[Change]:
    tried = list(neighbours(settings, topology))
    for done, (flags, changed) in enumerate(tried):
        show(done, len(tried))
        model = build_if_legal(changed, topology)
        if model is not None:
            then = predict_of(model, changed, topology)
            yield Change(flags, then.peak_bytes - now.peak_bytes, then.secs / now.secs - 1)


def neighbours(settings: Settings, topology: Topology) -> Iterator[tuple[str, Settings]]:
    """Settings that differ in one respect, legal or not, and the flags that ask for them. Of attention's kernels those
    that the topology's chips run, not those that they interpret."""
    own = Choice.of(settings)
    further = ["cp"] * (own.cp > 1) + ["ep"] * (own.ep > 1 or "moe" in settings.model.kinds)
    for choice in _layouts(own, further):
        yield shlex.join(own.flags_to(choice)), choice.applied(settings)
    for kernel, runs in ATTENTION_KERNELS.items():
        if settings.model.kernel == "xla" != kernel and topology.chip.platform in runs.native:
            yield f"--config.model.kernel={kernel}", with_changes(settings, "model", kernel=kernel)
    if settings.fsdp.reduce == "float32" != settings.model.dtype and own.data_ranks > 1:
        yield "--config.fsdp.reduce=compute", with_changes(settings, "fsdp", reduce="compute")
    now = _exchange(settings, topology)
    for exchange in EXCHANGES if now else ():
        if exchange != now:
            yield f"--config.layout.exchange={exchange}", with_changes(settings, "layout", exchange=exchange)
    chunk = settings.loss.chunk_tokens // 2
    if chunk:
        yield f"--config.loss.chunk_tokens={chunk}", with_changes(settings, "loss", chunk_tokens=chunk)


def _exchange(settings: Settings, topology: Topology) -> str:
    """How tokens come to experts of other ranks; "" where none do."""
    model, ranks = settings.model, settings.mesh.ep
    if "moe" not in model.kinds or ranks == 1:
        return ""
    return exchange_of(settings.layout.exchange, model, ranks, on_cpus=topology.chip.platform == "cpu")


def _layouts(own: Choice, further: Sequence[str]) -> Iterator[Choice]:
    """Layouts that differ in one respect, or in the sizes of two axes; `further` are those beside pp, dp and tp."""
    for remat in REMAT:
        if remat != own.remat:
            yield own._replace(remat=remat)
    for microbatches in (2 * own.microbatches, own.microbatches // 2):
        if microbatches:
            yield own._replace(microbatches=microbatches)
    for policy, exceptions, prefetch in policies(own.pp, own.data_ranks):
        if (policy, exceptions, prefetch) != (own.policy, own.exceptions, own.prefetch):
            yield own._replace(policy=policy, exceptions=exceptions, prefetch=prefetch)
    halved = [("dp", "tp"), ("tp", "dp"), ("dp", "pp"), ("pp", "dp")]
    for axis in further:
        halved += [("dp", axis), (axis, "dp"), (axis, "tp"), ("tp", axis)]
    for one, other in halved:
        if getattr(own, one) % 2 == 0:
            yield own._replace(**{one: getattr(own, one) // 2, other: 2 * getattr(own, other)})
    for context in CONTEXTS if own.cp > 1 else ():
        if context != own.context:
            yield own._replace(context=context)
    if own.pp > 1:
        for schedule, virtual in (("one_f_one_b", 1), ("interleaved", 2), ("zero_bubble", 1)):
            if (schedule, virtual) != (own.schedule, own.virtual):
                yield own._replace(schedule=schedule, virtual=virtual)


JAX_TAKES = 0.75  # of a GPU's memory


def plan_heading(name: str, settings: Settings, topology: Topology) -> str:
    """What is planned, and where."""
    mesh = " ".join(f"{axis}={size}" for axis, size in settings.mesh.sizes.items())
    data, pipeline = settings.data, settings.pipeline
    ranks = math.prod(getattr(settings.mesh, axis) for axis in BATCH_AXES)
    windows, seq = data.global_batch // ranks // pipeline.microbatches, data.seq // settings.mesh.cp
    stages = f" v={pipeline.virtual}" * (pipeline.virtual > 1)
    schedule = pipeline.schedule + stages if settings.mesh.pp > 1 else "accumulate"
    policy = " ".join(filter(None, [settings.data_parallel.policy, settings.data_parallel.exceptions]))
    policy += ", one layer ahead" * settings.fsdp.prefetch
    context = f", keys over cp by {settings.layout.context}" * (settings.mesh.cp > 1)
    lines = [
        f"{name} on {topology.name}: {topology.devices} x {topology.chip.name}",
        f"mesh {mesh}; {schedule}, {pipeline.microbatches} microbatches of {windows} x {seq} tokens a device",
        f"remat {pipeline.remat}, policy {policy}, attention by {settings.model.kernel}{context}",
        *_mixture_lines(settings, topology),
    ]
    return "\n".join(lines)


def _mixture_lines(settings: Settings, topology: Topology) -> Iterator[str]:
    """Of a mixture, how many experts a token goes to, and how it comes to those of other ranks."""
    model, chunk, exchange = settings.model, settings.layout.expert_chunk_tokens, _exchange(settings, topology)
    if "moe" not in model.kinds:
        return
    line = f"a token goes to {model.experts_per_token} of {model.experts} experts"
    if exchange:
        sent = exchanged_rows(model, settings.mesh.ep)
        other = next(name for name in EXCHANGES if name != exchange)
        line += f", over ep by {exchange}: {percent(sent[exchange] / sent[other])} of the bytes of {other}"
    yield line + f", {chunk} tokens at once" * (chunk > 0)


def verdict(peak_bytes: int, topology: Topology, who: str) -> str:
    """Whether it fits."""
    usable = topology.chip.usable_bytes
    fits = "fits" if peak_bytes <= usable else "does not fit"
    share = percent(peak_bytes / usable)
    said = f"{fits}: {in_bytes(peak_bytes)} of {in_bytes(usable)} a chip, {share} ({who})"
    if topology.chip.platform == "gpu" and JAX_TAKES * usable < peak_bytes <= usable:
        said += f"\nJAX takes {in_bytes(JAX_TAKES * usable)} if not told otherwise: XLA_CLIENT_MEM_FRACTION=0.95"
    return said


def estimate_parts(found: Estimate, topology: Topology) -> Iterator[Table | str]:
    """A predicted step: whether it fits, its memory by component, the largest first, and its time by parts."""
    yield from verdict(found.peak_bytes, topology, "predicted").splitlines()
    yield f"MFU {percent(found.mfu)} (analytic)"
    yield ""
    parts = [(name.replace("_", " "), size) for name, size in found.components.items() if size]
    parts.sort(key=lambda part: -part[1])
    shares = [size / found.peak_bytes for _, size in parts]
    rows = [[name, in_bytes(size), percent(share)] for (name, size), share in zip(parts, shares)]
    bars = [[("predicted", share)] for share in shares]
    yield Table(["memory of a chip", "predicted", "of the peak"], rows, 1, bars)
    yield ""
    yield time_parts(analytic_parts(found), found.secs)
    name, size = parts[0]
    used = {axis for axes in found.exposed_secs for axis in axes.split()}
    axes = " and ".join(axis for axis in DATA_AXES if axis == "dp" or axis in used)
    hidden = f"; {found.hidden_secs:.3f} s of messages over {axes} hide behind the work" * (found.hidden_secs > 0)
    yield f"largest: {name}, {in_bytes(size)}{hidden}"


def analytic_parts(found: Estimate) -> dict[str, float]:
    """The parts of a predicted step, with their names."""
    return {
        "work of the model": found.work_secs - found.recompute_secs,
        "work done again": found.recompute_secs,
        **{f"exposed over {axes}": secs for axes, secs in found.exposed_secs.items()},
        "bubble of the pipeline": found.bubble_secs,
        "update": found.update_secs,
    }


def compiled_lines(made: CompiledStep, topology: Topology) -> Iterator[str]:
    """What the compiler says of a step."""
    if made.refused:
        yield f"does not fit: the compiler says {made.refused}"
        return
    yield verdict(made.peak_bytes, topology, "compiled")
    yield f"arguments {in_bytes(made.arguments)}, temporaries {in_bytes(made.temporaries)}"
    if made.time is None:
        yield "the compiler of this backend estimates no cycles: the step's time is the analytic one"
        return
    yield f"MFU {percent(made.time.mfu)} (compiled; bubble {percent(made.time.bubble)})"
    yield ""
    yield from table_text(time_parts(compiled_parts(made.time), made.time.total_secs))


def changes_table(found: Sequence[Change]) -> Iterator[str]:
    """What each change of one setting would do, by the analytic plan."""
    rows = [[change.flags, f"{change.bytes / 2**30:+.1f} GiB", f"{100 * change.secs:+.1f} %"] for change in found]
    yield from text_table(["what would change it, each alone", "memory", "step"], rows, left=1)


def sweep_table(
    rows: Iterable[PricedLayout], compiled: dict[Choice, CompiledStep], front: Sequence[Choice], own: Choice
) -> Iterator[str]:
    """One line for each layout: * on the Pareto front of memory and time, > the config's own."""
    rows = list(rows)
    cut, experts = (any(getattr(choice, axis) > 1 for choice, _ in rows) for axis in ("cp", "ep"))
    mesh = ["pp", "dp", *["cp", "keys"] * cut, *["ep"] * experts, "tp"]
    head = ["", *mesh, "M", "schedule", "remat", "policy", "GiB", "s/step", "MFU", "bubble"]
    lines = []
    for choice, found in rows:
        marks = ("*" if choice in front else " ") + (">" if choice == own else "")
        schedule = "-" if choice.pp == 1 else choice.schedule + f" v={choice.virtual}" * (choice.virtual > 1)
        context = [str(choice.cp), choice.context if choice.cp > 1 else "-"] * cut
        further = *context, *[str(choice.ep)] * experts
        sizes = str(choice.pp), str(choice.dp), *further, str(choice.tp), str(choice.microbatches)
        figures = f"{found.peak_bytes / 2**30:.2f}", f"{found.secs:.3f}", percent(found.mfu), percent(found.bubble)
        lines.append([marks, *sizes, schedule, choice.remat, _policy(choice), *figures])
        if choice in compiled:
            lines.append([*[""] * (1 + len(sizes)), "  compiled", "", "", *_figures(compiled[choice])])
    yield from (line.rstrip() for line in text_table(head, lines, left=1))


def _policy(choice: Choice) -> str:
    if choice.data_ranks == 1:
        return "-"
    exceptions = {"": "", SHARDED_TABLES: ", tables zero3"}.get(choice.exceptions, f" {choice.exceptions}")
    return choice.policy + exceptions + ", ahead" * choice.prefetch


def _figures(made: CompiledStep) -> tuple[str, str, str, str]:
    held, time = f"{made.peak_bytes / 2**30:.2f}" if made.peak_bytes else "no fit", made.time
    return (held, f"{time.total_secs:.3f}", percent(time.mfu), percent(time.bubble)) if time else (held, "", "", "")


def fastest_line(compiled: dict[Choice, CompiledStep], own: Choice) -> Iterator[str]:
    """The fastest of the compiled layouts, and the flags that turn the config into it."""
    timed = {choice: made.time for choice, made in compiled.items() if made.time is not None}
    if not timed:
        return
    best = min(timed, key=lambda choice: timed[choice].total_secs)
    flags = shlex.join(own.flags_to(best)) or "the config as it is"
    yield f"fastest as compiled: {timed[best].total_secs:.3f} s a step, MFU {percent(timed[best].mfu)}: {flags}\n"


def passed_over_line(search: Sweep) -> str:
    """How many layouts were priced, and why others were not."""
    passed = ", ".join(f"{number:,} {why}" for why, number in search.passed.items())
    return f"{len(search.rows):,} layouts priced" + f"; passed over: {passed}" * bool(passed)


plan.compare = compare_plans  # px.plan.compare
