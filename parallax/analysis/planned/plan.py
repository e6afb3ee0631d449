"""Plans: predicted memory and time of a step on chips that need not be present, helpful changes, and comparisons."""

import contextlib
import dataclasses
import functools
import itertools
import math
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from parallax.analysis.planned.closed_form import ClosedForm
from parallax.analysis.planned.devices import fastest_matmul, matmul_lines
from parallax.analysis.planned.layouts import (
    Choice,
    flags_of,
    hosts_of_experts,
    order_to_try,
    ranks_beside,
    with_keys,
    with_own_hosts,
)
from parallax.analysis.planned.step_time import (
    PUBLISHED_OVER_PLANNED,
    CompiledStep,
    Estimate,
    compiled_parts,
    predicted,
    time_parts,
)
from parallax.analysis.planned.sweep import MEMORY_WITHIN, PricedLayout, Sweep, draw, front
from parallax.analysis.planned.topology import Topology, read_topology
from parallax.analysis.traced.recompute import FINER, sets_to_try
from parallax.config.sections import RESIDUAL_VALUES, STATE_DTYPES, STREAMS, ModelConfig
from parallax.config.settings import Settings, check_settings, default_settings, default_value
from parallax.display.html import content_html
from parallax.display.tables import Table, content_text, table_text, text_table
from parallax.display.units import duration, in_bytes, memory_unit, percent, time_unit
from parallax.errors import ConfigError, ParallaxError
from parallax.hardware.chips import KERNEL_EFFICIENCY
from parallax.model.experts.exchange import EXCHANGES
from parallax.model.experts.exchange_costs import exchange_of, exchanged_rows, share_of_host
from parallax.model.kernels.platforms import ATTENTION_KERNELS
from parallax.sharding.activations import BATCH_AXES
from parallax.sharding.compiler import hides_exchanges, hides_reduce_scatters
from parallax.sharding.host import HOST
from parallax.sharding.plan import DATA_AXES
from parallax.sharding.zigzag import CONTIGUOUS
from parallax.step.resolve import in_largest_batches, resolve


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
        """Model FLOPs over what the chips could compute in that time."""
        return self.estimate.mfu

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the fullest chip."""
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
        """Seconds of a step by purpose; their sum is `secs`."""
        return analytic_parts(self.estimate)

    @property
    def layout(self) -> Choice:
        """The settings that a sweep varies: mesh, microbatches, schedule, remat, sharding policy, sums of gradients."""
        return Choice.of(self.settings)

    def __repr__(self) -> str:
        title = plan_heading(self.name, self.settings, self.topology)
        return "\n".join([title, "", *content_text(estimate_parts(self.estimate, self.topology, self.settings.model))])

    def _repr_html_(self) -> str:
        title = plan_heading(self.name, self.settings, self.topology).splitlines()
        return "\n".join(content_html([*title, *estimate_parts(self.estimate, self.topology, self.settings.model)]))


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """Plans for one topology, fastest first. It prints as a table: * marks the Pareto front of memory and time, > the
    first plan that was given. Notebooks draw it. Plans that do not fit are named below the table."""

    name: str
    configured: Choice
    topology: Topology
    plans: tuple[Plan, ...]
    too_large: tuple[Plan, ...]

    @property
    def front(self) -> list[Choice]:
        """Layouts on the Pareto front of memory and time."""
        return front(self._rows)

    @property
    def _rows(self) -> list[PricedLayout]:
        return [PricedLayout(plan.layout, plan.estimate) for plan in self.plans]

    def __repr__(self) -> str:
        lines = [f"{self.name} on {self.topology.name}", *sweep_table(self._rows, {}, self.front, self.configured)]
        layouts = ((f"{plan.layout.mesh} remat {plan.layout.remat}", plan.peak_bytes) for plan in self.too_large)
        return "\n".join([*lines, *(f"{name} {verdict(size, self.topology, 'predicted')}" for name, size in layouts)])

    def _repr_svg_(self) -> str:
        return draw(f"{self.name} on {self.topology.name}", self._rows, self.topology, self.configured)


def plan(settings: Settings, topology: str | Topology, *, name: str = "step") -> Plan:
    """Plan the step of these settings on `topology`, as "v5p:4x4x4" or "H100:8". Nothing is compiled, and no device is
    needed.

    Raises ConfigError if the topology is unknown, or if mesh or layout are not legal on it.
    """
    check_settings(settings)
    topology = read_topology(topology) if isinstance(topology, str) else topology
    topology.chip.peak(settings.model.dtype)
    settings = resolve(in_largest_batches(settings), topology.as_devices)
    return Plan(name, settings, topology, predicted(settings, topology))


def compare_plans(plans: Sequence[Plan]) -> Comparison:
    """Compare plans with the first one.

    Raises ConfigError without plans, or if they are for different topologies.
    """
    if not plans:
        raise ConfigError("there are no plans to compare; give at least one")
    first = plans[0]
    other = next((plan for plan in plans if plan.topology != first.topology), None)
    if other:
        raise ConfigError(
            f"plans for {first.topology.name} and {other.topology.name} cannot be compared; plan for one topology"
        )
    ordered = sorted(plans, key=lambda plan: plan.secs)
    fitting = tuple(plan for plan in ordered if plan.fits)
    return Comparison(first.name, first.layout, first.topology, fitting, tuple(p for p in ordered if not p.fits))


CHANGES_SHOWN = 8
MORE_SETS = 2  # sets of recomputed parts that are tried besides those of a sweep
LEAST_SPEEDUP, LEAST_SAVING = 0.003, 0.02  # shares; smaller changes are ignored
LEAST_GAIN = 0.0005  # share of the step's time that one more change must save beside others
# Keys whose changes are shown alone: they change dtypes, or move arrays to the host.
SHOWN_ALONE = {"model.matmul", "model.matmul_residuals", "fsdp.gather_dtype"}
SHOWN_ALONE |= {f"pipeline.{key}" for key in ("residuals_on", "grads_dtype", "grads_on")}
SHOWN_ALONE |= {f"optimizer.{key}" for key in ("m_dtype", "v_dtype", "weights_dtype", "states_on", "masters_on")}


class Change(NamedTuple):
    """Other values of keys, as {"pipeline.remat": "layer"}, and their effect: bytes of a chip, and a share of the
    step's time, of traced steps or by the closed form. `together` is the number of single changes that they are."""

    values: Mapping[str, Any]
    bytes: int
    secs: float
    together: int = 1
    is_traced: bool = True


AXES_OF_LAYERS = "tp", "cp", "ep", "exchange"  # layers are traced for each of these, which one layout is not worth


class Prices:
    """Prices changes of a planned step: in closed form, which is cheaper, where they have one."""

    def __init__(self, settings: Settings, topology: Topology, now: Estimate):
        self.settings, self.topology, self.now = settings, topology, now
        self.layout = Choice.of(settings)
        ranks = ranks_beside(settings.mesh) * self.layout.dp * self.layout.ep
        rows = settings.data.global_batch // (ranks * self.layout.microbatches)
        self.closed = ClosedForm(settings, topology, anchors=(rows, 2 * rows))  # most changes keep the rows

    @property
    def free_bytes(self) -> int:
        """Memory of a chip that the step leaves."""
        return self.topology.chip.usable_bytes - self.now.peak_bytes

    @functools.cached_property
    def before(self) -> Estimate | None:
        """The step in closed form; None if it has none."""
        with contextlib.suppress(ParallaxError):
            if self.closed.knows(self.layout):
                return self.closed.estimate(self.layout)
        return None

    def price(self, values: Mapping[str, Any]) -> Change | None:
        """The effect of a change, in closed form if it has one; None if it is not legal, or if the host's memory cannot
        hold it."""
        with contextlib.suppress(ParallaxError):
            closed, layout = self.closed.changed(values), Choice.of(with_keys(self.settings, values))
            alone = any(getattr(layout, axis) != getattr(self.layout, axis) for axis in AXES_OF_LAYERS)
            if self.before is not None and closed is not None and closed.knows(layout) and not alone:
                return self._compared(values, closed.estimate(layout), self.before, is_traced=False)
        return self.traced(values)

    def traced(self, values: Mapping[str, Any]) -> Change | None:
        """The same by the traced step."""
        with contextlib.suppress(ParallaxError):
            then = predicted(with_keys(self.settings, values), self.topology)
            return self._compared(values, then, self.now, is_traced=True)
        return None

    def _compared(
        self, values: Mapping[str, Any], then: Estimate, before: Estimate, *, is_traced: bool
    ) -> Change | None:
        if then.host_bytes > max(self.topology.chip.host_bytes, self.now.host_bytes):
            return None
        return Change(values, then.peak_bytes - before.peak_bytes, then.secs / before.secs - 1, is_traced=is_traced)


def helpful_changes(
    settings: Settings, topology: Topology, now: Estimate, show: Callable[[int, int], None] = lambda done, of: None
) -> list[Change]:
    """Changes that save time or memory: first those that fit, by time saved, then those that save memory, and last the
    best of them together. Those that save time have the figures of traced steps.

    If the step does not fit: first those that make it fit, fastest first, then those that come nearest, all by their
    traced steps. `show` is called with the number of changes priced so far and the number of all.
    """
    prices = Prices(settings, topology, now)
    changes = without_repeats([*priced_changes(prices, show)])
    while guessed := [change for change in best_alone(changes, prices)[0] if not change.is_traced]:
        traced = [prices.traced(change.values) for change in guessed]
        changes = [change for change in changes if change not in guessed] + [change for change in traced if change]
    together = best_together(prices, _faster(changes, prices.free_bytes)) if prices.free_bytes >= 0 else []
    return [*itertools.chain(*best_alone(changes, prices)), *together]


def _faster(changes: Sequence[Change], free_bytes: int) -> list[Change]:
    """Those that save time and fit, fastest first."""
    faster = [change for change in changes if change.secs < -LEAST_SPEEDUP and change.bytes <= free_bytes]
    return sorted(faster, key=attrgetter("secs"))


def best_alone(changes: Sequence[Change], prices: Prices) -> tuple[list[Change], list[Change]]:
    """The single changes that are shown: those that save time, and those that save memory alone. Of a step that does
    not fit, all are of the first kind."""
    free_bytes, by_secs, by_bytes = prices.free_bytes, attrgetter("secs"), attrgetter("bytes")
    if free_bytes < 0:
        smaller = sorted((change for change in changes if change.bytes < 0), key=by_bytes)
        enough = sorted((change for change in smaller if change.bytes <= free_bytes), key=by_secs)
        return (enough + [change for change in smaller if change.bytes > free_bytes])[:CHANGES_SHOWN], []
    faster, least_saving = _faster(changes, free_bytes), LEAST_SAVING * prices.now.peak_bytes
    smaller = [change for change in changes if change.bytes < -least_saving and change not in faster]
    half = CHANGES_SHOWN // 2
    most, least = max(half, CHANGES_SHOWN - len(smaller)), max(half, CHANGES_SHOWN - len(faster))
    smaller.sort(key=by_bytes)
    alone = sorted(best_of_each_key(faster, most), key=by_secs)
    return alone, sorted(best_of_each_key(smaller, least), key=by_bytes)


def best_of_each_key(ordered: Sequence[Change], count: int) -> list[Change]:
    """So many of these changes: the first one of each key before second ones."""
    keys = [change.values.keys() for change in ordered]
    numbers = sorted(range(len(ordered)), key=lambda number: keys[number] in keys[:number])
    return [ordered[number] for number in numbers[:count]]


def best_together(prices: Prices, faster: Sequence[Change]) -> list[Change]:
    """The two best changes together and, if more help, all that do. From the fastest on, each is added that fits and
    still saves time. Changes of dtypes and of memory, which do more than move work, are left to the user."""
    best, pair = None, []
    for change in faster:
        if change.values.keys() & (SHOWN_ALONE | (best.values.keys() if best else set())):
            continue
        if best is None:
            best = change
            continue
        then = prices.price({**best.values, **change.values})
        if then and then.bytes <= prices.free_bytes and then.secs < best.secs - LEAST_GAIN:
            best = then._replace(together=best.together + 1)
            pair += [best] * (best.together == 2)
    shown = pair + [best] * (best is not None and best.together > 2)
    traced = (change if change.is_traced else prices.traced(change.values) for change in shown)
    return [then._replace(together=change.together) for change, then in zip(shown, traced) if then]


def without_repeats(changes: Sequence[Change]) -> list[Change]:
    """The changes but for those of which a part does as much."""

    def repeats(change: Change) -> bool:
        parts = (other for other in changes if other.values.items() < change.values.items())
        return any(part.secs <= change.secs + LEAST_GAIN and part.bytes <= change.bytes for part in parts)

    return [change for change in changes if not repeats(change)]


def priced_changes(prices: Prices, show: Callable[[int, int], None] = lambda done, of: None) -> Iterator[Change]:
    """All single changes that are legal, with their effects; of those to tensor ranks the faster form."""
    tried = list(single_changes(prices.settings, prices.topology))
    finer = ({"pipeline.remat": remat} for remat in faster_sets(prices))
    tried += [values for values in finer if values not in tried]
    for done, values in enumerate(tried):
        show(done, len(tried))
        forms = map(prices.price, tensor_forms(values, prices.settings, prices.topology))
        yield from sorted(filter(None, forms), key=attrgetter("secs"))[:1]
    if prices.free_bytes < 0:
        yield from smaller_microbatches(prices)


def smaller_microbatches(prices: Prices) -> Iterator[Change]:
    """Of a step that does not fit: the change to the fewest microbatches with which it does, or to the most that there
    can be; none if twice as many are enough, which are tried anyway."""
    settings, ranks = prices.settings, ranks_beside(prices.settings.mesh) * prices.layout.dp * prices.layout.ep
    many, most = prices.layout.microbatches, settings.data.global_batch // ranks
    priced, doubled = None, 0
    while most % (2 * many) == 0 and (priced is None or priced.bytes > prices.free_bytes):
        many, doubled = 2 * many, doubled + 1
        priced = prices.price({"pipeline.microbatches": many})
        if priced and (1 - MEMORY_WITHIN) * (prices.now.peak_bytes + priced.bytes) <= prices.topology.chip.usable_bytes:
            priced = prices.traced(priced.values)
    if priced and doubled > 1:
        yield priced


def faster_sets(prices: Prices) -> list[str]:
    """The values of `pipeline.remat`, a few apart from each other, of which the closed form says that they save the
    most time and fit."""
    settings, faster = prices.settings, {}
    if prices.before is None:
        return []
    for remat in sets_to_try(settings.model, seq=settings.data.seq, exchanges=prices.layout.ep > 1, apart=FINER):
        then = prices.price({"pipeline.remat": remat})
        if then and then.secs < 0 and then.bytes <= prices.free_bytes:
            faster[remat] = then.secs
    return sorted(faster, key=faster.__getitem__)[:MORE_SETS]


def single_changes(settings: Settings, topology: Topology) -> Iterator[dict[str, Any]]:
    """Other values of one key, or of those that go together, legal or not. Attention kernels are those that the
    topology's chips run, not those that they interpret; for products it is the dtype that is fastest on the chip, if it
    is faster than the others."""
    chip, optimizer, layout = topology.chip, settings.optimizer, Choice.of(settings)
    further = ["cp"] * (layout.cp > 1) + ["ep"] * (layout.ep > 1 or settings.model.has_mixtures)
    sets = sets_to_try(settings.model, seq=settings.data.seq, exchanges=layout.ep > 1)
    varied = (with_own_hosts(other, settings, topology) for other in layout.variations(further, sets))
    yield from map(layout.keys_to, varied)
    if (order := order_to_try(settings, layout.cp)) != layout.order:
        yield {"layout.order": order}
    for kernel, runs in ATTENTION_KERNELS.items():
        if settings.model.kernel == "xla" != kernel and chip.platform in runs.native:
            yield {"model.kernel": kernel}
    if settings.model.dtype != "float32" and layout.data_ranks > 1:
        # Sums in float32 are rings, which use the network interfaces of all GPUs of a host; exchanges use each its own.
        # On TPUs an exchange loads the links of a torus more, but compute waits for rings unless SparseCores run them,
        # and on large slices of v5e for exchanges, too.
        if settings.fsdp.reduce == "float32":
            yield {"fsdp.reduce": "compute"}
        elif (
            topology.has_gpu_hosts
            or hides_reduce_scatters(chip.name)
            or not hides_exchanges(chip.name, topology.slice_chips)
        ):
            yield {"fsdp.reduce": "float32"}
    if layout.tp > 1 and (streams := to_streams(settings, topology)):
        yield streams
    if settings.fsdp.bucket == "parameter" and layout.data_ranks > 1:
        yield {"fsdp.bucket": "module"}
    now = _exchange(settings, topology)
    asked, hosts = settings.layout.exchange_hosts, hosts_of_experts(settings, topology)
    one_level = {"layout.exchange_hosts": 1} if asked > 1 else {}
    others = [exchange for exchange in EXCHANGES if now and exchange != now]
    if others != ["ragged"] or topology.has_ragged:
        yield from ({"layout.exchange": exchange} | one_level for exchange in others)
    if now and asked > 1:
        yield one_level
    elif now and hosts > 1:
        yield {"layout.exchange": "ragged", "layout.exchange_hosts": hosts}
    if chunk := settings.loss.chunk_tokens // 2:
        yield {"loss.chunk_tokens": chunk}
    for dtype in STATE_DTYPES:
        wider = STATE_DTYPES[: STATE_DTYPES.index(dtype)]
        if states := [key for key in ("m_dtype", "v_dtype") if getattr(optimizer, key) in wider]:
            yield {f"optimizer.{key}": dtype for key in states}
    if optimizer.weights_dtype == "float32":
        yield {"optimizer.weights_dtype": "bfloat16"}
    if settings.pipeline.grads_dtype == "float32":
        yield {"pipeline.grads_dtype": "bfloat16"}
    if settings.fsdp.gather_dtype == "compute" and layout.data_ranks > 1:
        yield {"fsdp.gather_dtype": "int8"}
    if settings.model.matmul == "compute" != fastest_matmul(chip):
        yield {"model.matmul": fastest_matmul(chip)}
    elif settings.model.matmul != "compute" == settings.model.matmul_residuals:
        yield {"model.matmul_residuals": "8bit"}
    where = {"optimizer.states_on": optimizer.states_on, "optimizer.masters_on": optimizer.masters_on}
    where |= {f"pipeline.{key}": getattr(settings.pipeline, key) for key in ("residuals_on", "grads_on")}
    # Only if the speed of the chip's link to the host is known.
    yield from ({key: HOST} for key, memory in where.items() if chip.host_bandwidth and memory != HOST)


def to_streams(settings: Settings, topology: Topology) -> dict[str, Any]:
    """The keys that make token streams of columns and rows, on TPUs; none elsewhere."""
    if not topology.is_tpu or settings.layout.tensor_parallel != "column_row":
        return {}
    by_token = {"layout.residual": RESIDUAL_VALUES[1]} if settings.layout.residual == RESIDUAL_VALUES[0] else {}
    return {"layout.tensor_parallel": STREAMS} | by_token


def tensor_forms(values: Mapping[str, Any], settings: Settings, topology: Topology) -> list[Mapping[str, Any]]:
    """A change of keys, and if it is to another number of tensor ranks, the same with token streams, where these are
    worth trying."""
    streams = to_streams(settings, topology) if values.get("mesh.tp", 1) > 1 else {}
    return [values, {**values, **streams}] if streams else [values]


def _exchange(settings: Settings, topology: Topology) -> str:
    """How tokens are sent to experts of other ranks; "" if none are."""
    model, ranks = settings.model, settings.mesh.ep
    if not model.has_mixtures or ranks == 1:
        return ""
    return exchange_of(settings.layout.exchange, model, ranks, ragged=topology.has_ragged)


JAX_TAKES = 0.75  # of a GPU's memory


def plan_heading(name: str, settings: Settings, topology: Topology) -> str:
    """The planned settings and the topology."""
    mesh = " ".join(f"{axis}={size}" for axis, size in settings.mesh.sizes.items())
    data, pipeline = settings.data, settings.pipeline
    ranks = math.prod(getattr(settings.mesh, axis) for axis in BATCH_AXES)
    windows, seq = data.global_batch // ranks // pipeline.microbatches, data.seq // settings.mesh.cp
    stages = f" v={pipeline.virtual}" * (pipeline.virtual > 1)
    batches = "microbatch" + "es" * (pipeline.microbatches > 1)
    schedule = pipeline.schedule + stages if settings.mesh.pp > 1 else "accumulate"
    policy = " ".join(filter(None, [settings.data_parallel.policy, settings.data_parallel.exceptions]))
    policy += ", one layer ahead" * settings.fsdp.prefetch
    context = f", keys over cp by {settings.layout.context}" * (settings.mesh.cp > 1)
    context += ", tokens in contiguous order" * (settings.mesh.cp > 1 and settings.layout.order == CONTIGUOUS)
    lines = [
        f"{name} on {topology.name}: {topology.devices} x {topology.chip.name}" + " core" * (topology.chip.cores > 1),
        f"mesh {mesh}; {schedule}, {pipeline.microbatches} {batches} of {windows} x {seq} tokens a device",
        f"remat {pipeline.remat}, policy {policy}, attention by {settings.model.kernel}{context}",
        *_mixture_lines(settings, topology),
        *dtype_lines(settings),
        *matmul_lines(settings.model, topology.chip),
    ]
    return "\n".join(lines)


def dtype_lines(settings: Settings) -> Iterator[str]:
    """Keys of other dtypes of weights and states, and of arrays in host memory, with their values."""
    now, base = settings.to_dict(), default_settings().to_dict()
    keys = (key.split(".") for key in sorted(SHOWN_ALONE) if not key.startswith("model."))
    changed = [
        f"{section}.{key}={now[section][key]}" for section, key in keys if now[section][key] != base[section][key]
    ]
    yield from [", ".join(changed)] * bool(changed)


def eight_bit_lines(settings: Settings, topology: Topology, now: Estimate) -> Iterator[str]:
    """Compares the step with products in 8 bits and the same without."""
    if settings.model.matmul == "compute":
        return
    keys = [f"model.{key}" for key in settings.to_dict()["model"] if key.startswith("matmul")]
    plain = with_keys(settings, {key: default_value(key) for key in keys})
    without = predicted(plain, topology)
    tokens = settings.data.global_batch * settings.data.seq
    speeds = [
        f"{name} {step.secs:.3f} s a step, {tokens / step.secs:,.0f} tokens/s"
        for name, step in ((settings.model.matmul, now), (settings.model.dtype, without))
    ]
    yield f"{'; '.join(speeds)}: {without.secs / now.secs:.2f} times as fast (MFU is of {settings.model.dtype}'s peak)"


def _mixture_lines(settings: Settings, topology: Topology) -> Iterator[str]:
    """For a mixture, the number of experts of a token, and how it is sent to those of other ranks."""
    model, chunk, exchange = settings.model, settings.layout.expert_chunk_tokens, _exchange(settings, topology)
    if not model.has_mixtures:
        return
    line = f"a token goes to {model.experts_per_token} of {model.experts} experts"
    if exchange:
        sent = exchanged_rows(model, settings.mesh.ep)
        other = next(name for name in EXCHANGES if name != exchange)
        line += f", over ep by {exchange}: {percent(sent[exchange] / sent[other])} of the bytes of {other}"
        if (hosts := settings.layout.exchange_hosts) > 1:
            share = share_of_host(model.experts, model.experts_per_token, hosts)
            rows = model.experts_per_token * (hosts - 1) / hosts
            line += f"; once to each of {hosts} hosts, {(hosts - 1) * share:.2f} in place of {rows:g} rows between them"
    yield line + f", {chunk} tokens at once" * (chunk > 0)


def verdict(peak_bytes: int, topology: Topology, who: str) -> str:
    """Whether it fits."""
    usable = topology.chip.usable_bytes
    fits = "fits" if peak_bytes <= usable else "does not fit"
    share = percent(peak_bytes / usable)
    said = f"{fits}: {in_bytes(peak_bytes)} of {in_bytes(usable)} a {topology.chip.unit}, {share} ({who})"
    if topology.chip.platform == "gpu" and JAX_TAKES * usable < peak_bytes <= usable:
        said += f"\nJAX reserves {in_bytes(JAX_TAKES * usable)} by default: XLA_CLIENT_MEM_FRACTION=0.95"
    return said


def estimate_parts(step: Estimate, topology: Topology, model: ModelConfig) -> Iterator[Table | str]:
    """A predicted step: whether it fits, its memory by component, largest first, and its time by parts."""
    yield from verdict(step.peak_bytes, topology, "predicted").splitlines()
    yield f"MFU {percent(step.mfu)} (analytic)"
    yield ""
    parts = [(name.replace("_", " "), size) for name, size in step.components.items() if size]
    parts.sort(key=lambda part: -part[1])
    shares = [size / step.peak_bytes for _, size in parts]
    rows = [[name, in_bytes(size), percent(share)] for (name, size), share in zip(parts, shares)]
    bars = [[("predicted", share)] for share in shares]
    yield Table([f"memory of a {topology.chip.unit}", "predicted", "of the peak"], rows, 1, bars)
    yield ""
    yield time_parts(analytic_parts(step), step.secs)
    if topology.chip.platform != "cpu":
        yield step_range(step.secs, topology, model)
    name, size = parts[0]
    used = {axis for axes in step.exposed_secs for axis in axes.split()}
    over = [axis for axis in DATA_AXES if axis == "dp" or axis in used] * (step.hidden_secs > step.beside_secs)
    axes = " and ".join(["pp"] * (step.beside_secs > 0) + over)
    hide = "hide" if not topology.chip.reached.beside else "are saved, as they hide"  # there the work gets longer
    unit, name_of_unit = time_unit(step.secs)
    saved = f"{step.hidden_secs / unit:.3f} {name_of_unit}"
    hidden = f"; {saved} of messages over {axes} {hide} behind the work" * (step.hidden_secs > 0)
    yield f"largest: {name}, {in_bytes(size)}{hidden}"
    if step.share_that_hides < 1:
        could = f"{percent(step.share_that_hides)} of the messages that could hide do"
        yield f"memory is short for XLA's scheduler: {could}, and all with less in memory"
    yield from host_lines(step, topology)


def step_range(secs: float, topology: Topology, model: ModelConfig) -> str:
    """From how long to how long a step takes that is planned to take so long, in words."""
    unit, name = time_unit(secs)
    least, most = (secs / unit * times for times in PUBLISHED_OVER_PLANNED[topology.chip.platform, model.has_mixtures])
    return f"range: {least:.3f} to {most:.3f} {name}, as published steps took beside their plans"


def host_lines(step: Estimate, topology: Topology) -> Iterator[str]:
    """Use of host memory, whether it fits, and whether the step waits for the link to it."""
    if not step.host_bytes:
        return
    chip = topology.chip
    if not chip.host_bandwidth:
        yield f"host memory: {in_bytes(step.host_bytes)}; the link of {chip.name} to its host is not known"
        return
    fits = "" if step.host_bytes <= chip.host_bytes else ", which does not fit"
    yield f"host memory: {in_bytes(step.host_bytes)} of {in_bytes(chip.host_bytes)} a {chip.unit}{fits}"
    rate = f"{in_bytes(step.link_bytes)} a step over its link of {chip.host_bandwidth / 1e9:g} GB/s each way"
    waits = f"waits {step.link_secs:.3f} s" if step.link_secs else "does not wait"
    yield f"{rate}; the step {waits}"


def analytic_parts(step: Estimate) -> dict[str, float]:
    """The parts of a predicted step, with their names."""
    return {
        "work of the model": step.work_secs - step.recompute_secs,
        "recomputed work": step.recompute_secs,
        **{f"exposed over {axes}": secs for axes, secs in step.exposed_secs.items()},
        "bubble of the pipeline": step.bubble_secs,
        "update": step.update_secs,
        **({"waits for the host's link": step.link_secs} if step.link_bytes else {}),
    }


def compiled_lines(made: CompiledStep, topology: Topology) -> Iterator[str]:
    """The compiler's figures for a step."""
    if made.refused:
        yield f"does not fit: the compiler says {made.refused}"
        return
    yield verdict(made.peak_bytes, topology, "compiled")
    yield f"arguments {in_bytes(made.arguments)}, temporaries {in_bytes(made.temporaries)}"
    if made.time is None:
        yield "the compiler of this backend estimates no cycles: the step's time is the analytic one"
        return
    source = ", ".join(filter(None, ["compiled", made.time.kernels]))
    yield f"MFU {percent(made.time.mfu)} ({source}; bubble {percent(made.time.bubble)})"
    yield ""
    yield from table_text(time_parts(compiled_parts(made.time), made.time.total_secs))
    if topology.chip.platform == "gpu":
        head = ["a GPU sends", "calls", "bytes", "asynchronous", "hidden"]
        rows = [
            [f"{axes} {kind}", f"{calls:,.0f}", in_bytes(size), *map(percent, shares)]
            for axes, kind, calls, size, *shares in made.sent
        ]
        yield from ["", *text_table(head, rows, left=1)] * bool(rows)
        chip = topology.chip
        hosts = f" and {chip.dcn_bandwidth / 1e9:g} GB/s between hosts" * topology.has_gpu_hosts
        links = f"; messages at {chip.ici_bandwidth * chip.ici_links / 1e9:g} GB/s within a host{hosts}"
        yield ""
        yield (
            f"compute: the longer of products at the chip's peak, attention's at {100 * KERNEL_EFFICIENCY:.0f} %, "
            f"and bytes at {chip.hbm_bandwidth / 1e9:,.0f} GB/s{links * (topology.devices > 1)}"
        )
        yield "not counted: launches, latency, caches, tiles that do not fill the GPU: most steps take longer"


TABLE_WIDTH = 100  # columns of a table
FIGURES_WIDTH = 24  # of a change's effect
REMAT_WIDTH = 12  # of the value of remat in a sweep's table


def changes_table(changes: Sequence[Change]) -> Iterator[str]:
    """The effect of each single change, by the analytic plan, and of the best together, with a line for each flag."""
    head, names, rows = "what would change it, each alone", {2: "the two best together"}, []
    unit, name_of_unit = memory_unit(max((abs(change.bytes) for change in changes), default=0))
    for change in changes:
        figures = [f"{change.bytes / unit:+.1f} {name_of_unit}", f"{100 * change.secs:+.1f} %"]
        flags = shlex.join(flags_of(change.values))
        if change.together == 1 and len(flags) <= TABLE_WIDTH - FIGURES_WIDTH:
            rows.append([flags, *figures])
        elif change.together == 1:
            first, *others = map(shlex.quote, flags_of(change.values))
            rows += [[first, *figures], *([f"  {flag}", "", ""] for flag in others)]
        else:
            rows.append([names.get(change.together, "all that help, together"), *figures])
            rows += [[f"  {shlex.quote(flag)}", "", ""] for flag in flags_of(change.values)]
    yield from text_table([head, "memory", "step"], rows, left=1)


def enough_lines(changes: Sequence[Change], now: Estimate, topology: Topology) -> Iterator[str]:
    """Which changes make a step fit that does not, or what to do if none alone does; nothing about others."""
    free_bytes = topology.chip.usable_bytes - now.peak_bytes
    if free_bytes >= 0:
        return
    too_much = f"the {in_bytes(-free_bytes)} that are too much"
    enough = sum(change.bytes <= free_bytes for change in changes)
    if not enough:
        yield f"no change alone saves {too_much}: take several, or let --sweep look for layouts that fit"
    elif enough < len(changes):
        first = f"each of the first {enough}" if enough > 1 else "the first"
        yield f"{first} saves {too_much}; the others alone do not"
    else:
        yield f"each saves {too_much}"


def sweep_table(
    rows: Iterable[PricedLayout], compiled: dict[Choice, CompiledStep], front: Sequence[Choice], configured: Choice
) -> Iterator[str]:
    """One line for each layout: * marks the Pareto front of memory and time, > the config's own."""
    rows = list(rows)
    cut, experts = (any(getattr(choice, axis) > 1 for choice, _ in rows) for axis in ("cp", "ep"))
    mesh = ["pp", "dp", *["cp", "keys"] * cut, *["ep"] * experts, "tp"]
    (size_unit, size_name), (secs_unit, secs_name) = _units(rows)
    head = ["", *mesh, "M", "schedule", "remat", "policy", size_name, f"{secs_name}/step", "MFU", "bubble"]
    lines = []
    for choice, step in rows:
        marks = ("*" if choice in front else " ") + (">" if choice == configured else "")
        context = [str(choice.cp), choice.keys if choice.cp > 1 else "-"] * cut
        further = *context, *[str(choice.ep)] * experts
        sizes = str(choice.pp), str(choice.dp), *further, str(choice.tp), str(choice.microbatches)
        figures = f"{step.peak_bytes / size_unit:.2f}", f"{step.secs / secs_unit:.3f}"
        figures += percent(step.mfu), percent(step.bubble)
        words = textwrap.wrap(choice.remat, REMAT_WIDTH), [choice.policy_words or "-", *choice.words_of_sums]
        (remat, policy), *others = itertools.zip_longest(*words, fillvalue="")
        lines.append([marks, *sizes, choice.schedule_words or "-", remat, policy, *figures])
        lines += [[*[""] * (2 + len(sizes)), *cells, *[""] * 4] for cells in others]
        if choice in compiled:
            of_compiled = _figures(compiled[choice], size_unit, secs_unit)
            lines.append([*[""] * (1 + len(sizes)), "  compiled", "", "", *of_compiled])
    yield from text_table(head, lines, left=1, width=TABLE_WIDTH)


def sets_table(sets: Sequence[PricedLayout], configured: Choice) -> Iterator[str]:
    """The Pareto front of memory and time over `pipeline.remat` alone; > marks the config's own, even off the front."""
    marked = front(sets)
    now = next((row.estimate for row in sets if row.choice == configured), None)
    rows, ((size_unit, size_name), (secs_unit, secs_name)) = [], _units(sets)
    for choice, step in sets:
        if choice in marked or choice == configured:
            changed = f"{100 * (step.secs / now.secs - 1):+.1f} %" if now else ""
            figures = f"{step.peak_bytes / size_unit:.2f}", f"{step.secs / secs_unit:.3f}", changed
            rows.append(["*" * (choice in marked) + " >" * (choice == configured), choice.remat, *figures])
    head = ["", "this layout, remat", size_name, f"{secs_name}/step", ""]
    yield from text_table(head, rows, left=2)


def _units(rows: Sequence[PricedLayout]) -> tuple[tuple[int, str], tuple[float, str]]:
    """Units of memory and of time for a table of these layouts."""
    sizes, times = [row.estimate.peak_bytes for row in rows], [row.estimate.secs for row in rows]
    return memory_unit(max(sizes, default=0)), time_unit(max(times, default=1.0))


def _figures(made: CompiledStep, size_unit: int, secs_unit: float) -> tuple[str, str, str, str]:
    held, time = f"{made.peak_bytes / size_unit:.2f}" if made.peak_bytes else "no fit", made.time
    if not time:
        return held, "", "", ""
    return held, f"{time.total_secs / secs_unit:.3f}", percent(time.mfu), percent(time.bubble)


def fastest_line(
    rows: Iterable[PricedLayout], compiled: dict[Choice, CompiledStep], configured: Choice, usable_bytes: int
) -> Iterator[str]:
    """The fastest of the compiled layouts, or of those that are planned to fit if none is compiled, and the flags that
    turn the config into it. Sums of gradients stay as they are, if such a layout fits."""
    timed = {choice: made.time for choice, made in compiled.items() if made.time is not None}
    fitting = [row for row in rows if row.estimate.peak_bytes <= usable_bytes]
    if timed:
        best = min(timed, key=lambda choice: timed[choice].total_secs)
        secs, mfu = timed[best].total_secs, timed[best].mfu
        source = ", ".join(filter(None, ["fastest as compiled", timed[best].kernels]))
    elif fitting:
        best, step = min(fitting, key=lambda row: (row.choice.sums != configured.sums, row.estimate.secs))
        secs, mfu, source = step.secs, step.mfu, "fastest as planned"
    else:
        return
    flags = shlex.join(flags_of(configured.keys_to(best))) or "the config as it is"
    unit, name = time_unit(secs)
    yield f"{source}: {secs / unit:.3f} {name} a step, MFU {percent(mfu)}: {flags}\n"


def passed_over_lines(search: Sweep) -> Iterator[str]:
    """Number of layouts that were priced, and the reasons why others were not; how many `--most` left out that may be
    faster, how long they would take, and how to ask for them."""
    passed = ", ".join(f"{number:,} {why}" for why, number in search.passed.items() if number)
    yield f"{len(search.rows):,} layouts priced" + f"; passed over: {passed}" * bool(passed)
    if left := search.passed["beyond --most"]:
        rate = f", about {duration(left * search.mean_secs)} more" if search.mean_secs else ""
        yield f"left out by --most={search.most}: {left:,} layouts that may be faster; --most=0 looks at all{rate}"


plan.compare = compare_plans  # px.plan.compare
