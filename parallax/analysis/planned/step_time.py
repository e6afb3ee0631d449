"""Time of a step: estimated from its traced program, to rank layouts, or read from a compiled one, to decide.

The estimate needs no compiler and no device:

    step = (work + messages of each tick) / (1 - bubble) + messages once a step + update

*Work* is a sum of three terms. A matrix product takes the longer of FLOPs over the chip's peak and bytes of factors and
result over its memory bandwidth. A reduction reads its operand twice, since later operations wait for its result. A
write into slots and sums, such as residuals, writes and reads. All other operations are assumed to be fused with these;
some are passes of their own, on GPUs (parallax/analysis/planned/gpu_passes.py) and of a mixture's rows
(parallax/analysis/planned/row_passes.py).
*Bubble* is that of the schedule in lockstep, where a recomputed pass counts as a forward pass. *Messages* are the
traced collectives over the links of their axes, with a latency for each; where several arrays are one message, they are
copied together and apart. Gathers of single layers over data axes overlap with the work, as do the permutes of
layout.context="ring" and of layout.tensor_parallel="streams" and, with fsdp.reduce="compute", on GPUs and on chips
whose SparseCores run them, sums of the layers' gradients; `hidden_secs` says how much of them is hidden. So do rows
sent to experts on v5e and v5p; on other chips compute waits for them: `hides_ragged`. On large slices of v5e compute
waits for exchanges of gradients: `hides_exchanges`. On TPUs without SparseCores a reduce-scatter is synchronous
wherever it begins. On TPUs the messages of a pipeline travel beside passes, if its schedule has both in a tick and no
W: `ticks_beside`. All other messages are exposed, and on GPUs those that find the memory full that XLA's scheduler has:
`share_that_hides`. The *update* reads and writes parameters and optimizer state, and reads gradients, at memory
bandwidth.

Arrays in host memory are copied over the chip's link to its host, in both directions at once: residuals during the
passes that write and read them, states during the update. If a copy takes longer than the work, the step waits for the
rest. It always waits for the parameters that are copied to the device before the first pass.
"""

import dataclasses
import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import Mesh

from parallax.analysis.compiled.program import (
    BranchEvent,
    Compiled,
    CompiledCollective,
    Compute,
    End,
    Kernel,
    LoopEvent,
    costs_of,
    read_step,
)
from parallax.analysis.planned.gpu_passes import ADDS, BACKWARD_PASS, PADDING, REDUCTIONS, SLICES_AT, GpuPasses
from parallax.analysis.planned.layouts import model_on_topology
from parallax.analysis.planned.moves import SentPerUse, read_by_update
from parallax.analysis.planned.row_passes import MIXTURE, ROWS_IN, RowPasses
from parallax.analysis.planned.topology import Route, Topology, one_way, route
from parallax.analysis.traced.collectives import Sent, sent_in_equation
from parallax.analysis.traced.flops import (
    GROUPED,
    KERNEL_CALLS,
    PRODUCT_PRIMITIVES,
    flops_per_token,
    grouped_matrices,
    is_grouped,
    product_flops,
)
from parallax.analysis.traced.memory import (
    HostMemory,
    Memory,
    moved_in_step,
    predicted_host_memory,
    predicted_memory,
)
from parallax.analysis.traced.trace import Origin, step_program, walk
from parallax.config.sections import ATTENTION
from parallax.config.settings import Settings
from parallax.display.tables import LEAST_SHOWN, Table
from parallax.display.units import percent, time_unit
from parallax.errors import ConfigError
from parallax.hardware.chips import KERNEL_EFFICIENCY, LANES, Chip, mfu
from parallax.jaxprs import SCALED_MATMUL, var_bytes
from parallax.model.experts.grouped_kernel import BLOCK_ROWS
from parallax.model.experts.grouped_triton import TILE_ROWS
from parallax.pipeline import BACKWARD, FORWARD, WEIGHTS, ShardedModel
from parallax.schedules import Schedule
from parallax.schedules.pricing import lockstep_bubble
from parallax.sharding.activations import CONTEXT_AXIS, EXPERT_AXIS
from parallax.sharding.bucket import BY_LAYER
from parallax.sharding.compiler import (
    hides_exchanges,
    hides_ragged,
    hides_reduce_scatters,
    is_absent_gpus,
    share_beside,
)
from parallax.sharding.host import DEVICE, HOST, is_type_on_host
from parallax.sharding.mesh import is_for_gpus, make_mesh
from parallax.sharding.plan import DATA_AXES
from parallax.sharding.streams import STREAM_AXIS
from parallax.step.resolve import resolve
from parallax.step.step import step_of

WRITES = "dynamic_update_slice"
# Dtypes of products, in ModelConfig.
EIGHT_BIT = {"int8": "int8", "float8_e4m3fn": "float8", "float8_e5m2": "float8", "float4_e2m1fn": "float4"}
GROUPED_PRODUCTS = "grouped"
# Blocks of rows and their group's matrix, of which GPUs have products and copies in place of a kernel: an OpCost's
# `kernel`, too. They are in the module of a mixture itself.
IN_BLOCKS = "blocks"
OF_BLOCKS = ("dot_general", SCALED_MATMUL, SLICES_AT, PADDING, ADDS, WRITES)
# Passes over a mixture's rows, and those to and from slots of activations, weights and sums of gradients.
OF_ROWS, OF_SLOTS = "rows", "slots"
# Published steps took from so many to so many times as long as planned as theirs, by platform and whether layers have
# experts: nine in ten of the dense rows of benchmarks/published.py, and all of the few mixtures.
PUBLISHED_OVER_PLANNED = {
    ("tpu", False): (0.91, 1.17),
    ("tpu", True): (0.93, 1.47),
    ("gpu", False): (0.89, 1.30),
    ("gpu", True): (0.96, 2.94),
}
Passes = GpuPasses | RowPasses | None
KERNEL_PARTS = (ATTENTION, GROUPED_PRODUCTS)  # kernels, which no compiler of XLA's prices


class OpCost(NamedTuple):
    """A matrix product of one shape, a reduction or a write: FLOPs, bytes of memory traffic, and number of runs in a
    device's step. `matmul` is as in ModelConfig; "compute" for operations without 8-bit operands. `kernel` is one of
    KERNEL_PARTS, IN_BLOCKS, OF_ROWS, OF_SLOTS, or "" for what else XLA compiles."""

    flops: int
    bytes: int
    direction: str
    count: int
    matmul: str = "compute"
    kernel: str = ""


class TicksBeside(NamedTuple):
    """By direction of the messages between stages, the ticks in which a rank runs the pass beside which they travel: B
    for outputs, F for gradients; and a rank's passes of each kind in a step."""

    forward: int = 0
    backward: int = 0
    passes: int = 1


class TracedWork(NamedTuple):
    """Work of one device in a step, independent of the chip."""

    products: list[OpCost]
    sent: list[Sent]
    model_flops: float  # a device's share of the model FLOPs, without recomputation
    bubble: float  # share of the ticks in which an average rank is idle
    moved: Mapping[tuple[str, str], int] = MappingProxyType({})  # bytes over the host's link, see `moved_by_passes`
    per_use: SentPerUse = SentPerUse()
    trained: float = 1.0  # share of the parameters that an update reads and writes
    gradients: int = 0  # bytes that it reads of them
    ticks_beside: TicksBeside = TicksBeside()

    @property
    def packed(self) -> list[Sent]:
        """Messages that have several arrays; sums over all ranks have none of them."""
        of_parameters = [call for call in self.sent if _is_of_parameters(call) and call.kind != "all-reduce"]
        return [call for call in of_parameters if call.module in self.per_use.together]


class CollectiveTime(NamedTuple):
    """Time of one collective in a step, of all its `calls`. `hides`: it may overlap with work. `ticking`: it is part of
    the ticks, so ranks wait for it as for work. `beside` is the direction of a message between stages, on chips where
    it travels beside a pass."""

    axes: str
    secs: float
    hides: bool
    ticking: bool
    beside: str = ""
    calls: int = 1


class Estimate(NamedTuple):
    """A predicted step. Bytes and seconds are those of the busiest device; `secs` is the step's time."""

    peak_bytes: int
    components: dict[str, int]
    work_secs: float
    recompute_secs: float  # of the work
    exposed_secs: dict[str, float]  # by axes, as "dp" or "dp tp"
    hidden_secs: float  # saved by messages that hide: on GPUs a part of their time
    update_secs: float
    bubble: float
    secs: float
    mfu: float
    host_bytes: int = 0  # of host memory
    link_bytes: int = 0  # copied over the link to the host in a step, in both directions
    link_secs: float = 0.0  # in which the step waits for that link
    beside_secs: float = 0.0  # of `hidden_secs`, what hides between stages of a pipeline
    share_that_hides: float = 1.0  # of the messages that could, by the memory of XLA's scheduler for GPUs

    @property
    def bubble_secs(self) -> float:
        """Time in which the average device waits for others of the pipeline."""
        return self.secs - self.work_secs - sum(self.exposed_secs.values()) - self.update_secs - self.link_secs


def predict(settings: Settings, topology: Topology) -> Estimate:
    """Predict the step of these settings on a topology. ConfigError if their mesh or layout is not legal on it.

    >>> from configs.llama_1b_16 import get_config
    >>> from parallax.analysis.planned.topology import read_topology
    >>> from parallax.config.settings import read_settings
    >>> topology = read_topology("v5e:4x4")
    >>> predict(read_settings(get_config().to_dict()), topology).peak_bytes < topology.chip.usable_bytes
    True
    """
    return predicted(resolve(settings, topology.as_devices), topology)


def predicted(settings: Settings, topology: Topology) -> Estimate:
    """The same for settings in which nothing is open."""
    model = model_on_topology(settings, topology)
    held, host = predicted_memory(model, settings), predicted_host_memory(model, settings)
    return estimate(settings, topology, held, traced_work(model, settings), host)


def traced_work(model: ShardedModel, settings: Settings) -> TracedWork:
    """The products and collectives of the first pipeline rank, whose stages are the largest."""
    shape = (settings.data.global_batch, settings.data.seq)
    program, first = step_program(model, *shape), dict.fromkeys(model.axis_sizes, 0)
    count = functools.partial(costs_in_equation, model=model, passes=passes_of(program, model))
    counted: dict[type, list[tuple[Any, int]]] = defaultdict(list)
    for what, times in walk(program, rank=first, count=count).items():
        counted[type(what)].append((what, times))
    model_flops = flops_per_token(settings.model, model.plan.declared, seq=shape[1]) * math.prod(shape)
    return TracedWork(
        [product._replace(count=times) for product, times in counted[OpCost]],
        sorted(sent._replace(count=times) for sent, times in counted[Sent]),
        model_flops / math.prod(model.axis_sizes.values()),
        lockstep_bubble(model.schedule, costs_of(model.config, model.pipeline.remat, seq=shape[1])),
        dict(counted[tuple]) if HOST in moved_in_step(settings) else {},
        SentPerUse.of(model.plan),
        model.plan.trained,
        read_by_update(model.plan),
        ticks_beside(model.schedule),
    )


def ticks_beside(schedule: Schedule) -> TicksBeside:
    """Those of a schedule; none if gradients do not wait for F: what then hides was not compared with compiled steps.

    >>> from parallax.schedules import gpipe, one_f_one_b
    >>> ticks_beside(one_f_one_b(4, 4)), ticks_beside(gpipe(4, 4))  # of 10 ticks
    (TicksBeside(forward=7, backward=7, passes=4), TicksBeside(forward=0, backward=0, passes=1))
    """
    if not schedule.late_gradients:
        return TicksBeside()
    runs = {kind: int((table >= 0).any(axis=1).sum()) for kind, table in schedule.microbatch.items()}
    return TicksBeside(runs["B"], runs["F"], schedule.virtual * schedule.microbatches)


def passes_of(program: ClosedJaxpr, model: ShardedModel) -> Passes:
    """The passes over memory that XLA makes of a program besides products, if it is known: all on GPUs, and those of
    rows on TPUs."""
    if is_for_gpus(model.mesh):
        return gpu_passes(program)
    return RowPasses(program) if model.config.has_mixtures and not model.is_simulated else None


@functools.lru_cache(maxsize=32)  # values of pipeline.remat share programs
def gpu_passes(program: ClosedJaxpr) -> GpuPasses:
    """The passes of a program on GPUs."""
    return GpuPasses(program)


def costs_in_equation(
    equation: JaxprEqn,
    origin: Origin,
    *,
    model: ShardedModel,
    passes: Passes,
    sizes: Mapping[str, int] | None = None,
) -> Counter:
    """What an equation costs a device of the first pipeline rank, as a Sent, an OpCost, or bytes over the host's
    link; nothing if it is fused with others. `passes` are those of its program. Messages go over axes of other `sizes`
    than the model's, if given."""
    sizes = sizes or model.axis_sizes
    sent = sent_in_equation(equation, origin, rank=dict.fromkeys(sizes, 0), sizes=sizes)
    work = _pass(equation, origin, passes) or _product(equation, origin, model=model)
    return sent or work or moved_by_passes(equation, origin)


def moved_by_passes(equation: JaxprEqn, origin: Origin) -> Counter:
    """Bytes that an equation moves to or from host memory, by scope of the pass and target. Allocation of slots and
    loads once a step belong to no pass."""
    scope = next((name for name in origin.stack.split("/") if name in (FORWARD, BACKWARD, WEIGHTS)), None)
    if equation.primitive.name != "device_put" or scope is None:
        return Counter()
    (source,), (out,) = equation.invars, equation.outvars
    if is_type_on_host(source.aval) == is_type_on_host(out.aval):
        return Counter()
    goes = HOST if is_type_on_host(out.aval) else DEVICE
    return Counter({(scope, goes): var_bytes(out)})


def op_secs(op: OpCost, settings: Settings, topology: Topology, *, packed: bool) -> float:
    """Seconds of one run: its launch, the longer of its FLOPs and its bytes at the rates that the chip reaches, and its
    ends, in which only one of them goes on."""
    reached, dtype = topology.chip.reached, settings.model.dtype
    if op.kernel == ATTENTION:
        of_pass = dict(backward=op.direction == BACKWARD_PASS, packed=packed)
        rate = topology.attention_rate(dtype, settings.data.seq, kernel=settings.model.kernel, **of_pass)
    else:
        rate = topology.matmul_rate(dtype, op.matmul) * (KERNEL_EFFICIENCY if op.kernel == GROUPED_PRODUCTS else 1)
    flops, moved = op.flops / rate, op.bytes / (topology.chip.hbm_bandwidth * reached.memory)
    return reached.launch_secs + max(flops, moved) + min(flops, moved, reached.ramp_secs)


def estimate(
    settings: Settings,
    topology: Topology,
    held: Memory,
    traced: TracedWork,
    host: HostMemory | None = None,
    *,
    packed: bool = True,
    hidden_axes: Collection[str] = (),
    sums: str = "",
    waits_for_sums: bool = False,
    by_xla: bool = True,
) -> Estimate:
    """Estimate the step of a traced program on these chips; without `host`, no arrays are in host memory. Rows are
    `packed` documents, or one document each. Another program may send beside its work what goes over `hidden_axes`, sum
    gradients by reduce-scatters of numbers of the dtype `sums`, where here all-to-alls bring what is added up, and wait
    for reduce-scatters that SparseCores could hide (`waits_for_sums`). One that is not scheduled `by_xla` sends beside
    its work in any memory."""
    host = host or HostMemory()
    bandwidth = topology.chip.hbm_bandwidth * topology.chip.reached.memory
    timed = [(op.direction, op.count * op_secs(op, settings, topology, packed=packed)) for op in traced.products]
    timed += [(call.direction, copy_secs(call, settings, topology.chip)) for call in traced.packed]
    work = sum(secs for _, secs in timed)
    sent = [
        message._replace(hides=message.hides or is_over(message.axes.split(), hidden_axes))
        for message in messages(
            traced.sent, topology, settings, traced.per_use, sums=sums, waits_for_sums=waits_for_sums
        )
    ]
    share = share_that_hides(held, traced, settings, topology) if by_xla else 1.0
    hiding = share * sum(message.secs for message in sent if message.hides)
    hidden = hidden_secs(work, hiding)
    hidden *= 1 - topology.chip.reached.beside  # of what is hidden, this much is saved
    beside = [secs_beside(message, timed, traced.ticks_beside) for message in sent]
    of_each = share * hidden / (hiding or 1)
    exposed = [m._replace(secs=m.secs * (1 - m.hides * of_each) - b) for m, b in zip(sent, beside)]
    bubble = 0.0 if topology.shared else traced.bubble
    ticking = sum(message.secs for message in exposed if message.ticking)
    parameters, states = traced.trained * (held.parameters + host.parameters), held.optimizer + host.optimizer
    update = (traced.gradients + 2 * parameters + 2 * states) / bandwidth
    passes, once = link_waits(timed, update, traced.moved, host, topology.chip)
    secs = (work + ticking) / (1 - bubble) + sum(message.secs for message in exposed if not message.ticking) + update
    secs += passes / (1 - bubble) + once
    return Estimate(
        peak_bytes=held.peak,
        components=held._asdict(),
        work_secs=work,
        recompute_secs=sum(secs for direction, secs in timed if direction == "recompute"),
        exposed_secs=by_axes(exposed, settings.mesh.sizes),
        hidden_secs=hidden + sum(beside),
        update_secs=update,
        bubble=bubble,
        secs=secs,
        mfu=mfu(traced.model_flops, secs, topology.chip.peak(settings.model.dtype)),
        host_bytes=host.total,
        link_bytes=sum(traced.moved.values()) + 3 * host.parameters + 2 * host.optimizer + 3 * host.gradients,
        link_secs=passes + once,
        beside_secs=sum(beside),
        share_that_hides=share,
    )


def share_that_hides(held: Memory, traced: TracedWork, settings: Settings, topology: Topology) -> float:
    """The share of those messages that could hide which find memory to do so: on GPUs see `share_beside`. A step holds
    weights of a layer, running activations and logits for a time, and all else all the time."""
    if topology.chip.platform != "gpu":
        return 1.0
    resident = sum(whole_bytes(call, settings) * call.count for call in traced.sent if _stays(call, traced.per_use))
    gathered = max(0.0, held.gathered_weights - resident)
    at_times = held.working_activations + held.logits + gathered
    temporaries, on_their_way = held.peak - held.arguments, bytes_on_their_way(traced, settings)
    # Where logits are at the peak, that is in the head: no layer's messages are on their way then.
    most = max(temporaries, temporaries - held.logits - gathered * (held.logits > 0) + on_their_way)
    least = temporaries - at_times + on_their_way
    return share_beside(held.arguments, least, most, topology.chip.usable_bytes)


def bytes_on_their_way(traced: TracedWork, settings: Settings) -> float:
    """Bytes of an average layer's messages that XLA for GPU has under way at once: the weights that the next layer
    will use, and gradients, whose exchange needs as much where they arrive."""
    passes = settings.model.layers * settings.pipeline.microbatches / settings.mesh.pp
    held = 0.0
    for call in filter(traced.per_use.has, traced.sent):
        if _is_of_parameters(call) and call.direction in ("forward", "backward"):
            held += call.count * whole_bytes(call, settings) * (1 + (call.kind == "all-to-all"))
    return held / passes


def _stays(call: Sent, per_use: SentPerUse) -> bool:
    """Whether it gathers weights of layers for all of a step."""
    of_layers = call.module.split("/")[0] in per_use.modules
    return call.kind == "all-gather" and _is_of_parameters(call) and of_layers and not per_use.has(call)


def whole_bytes(call: Sent, settings: Settings) -> float:
    """Bytes of the whole array of which each rank sends the others' pieces, or gets them."""
    ranks = math.prod(size for axis, size in settings.mesh.sizes.items() if axis in call.axes)
    return call.bytes * ranks / (ranks - 1) if ranks > 1 else call.bytes


def secs_beside(message: CollectiveTime, timed: Sequence[tuple[str, float]], ticks: TicksBeside) -> float:
    """Seconds of a message between stages that are hidden: in these ticks, by the pass of one microbatch in one stage
    beside which it travels."""
    if message.hides or not message.beside:
        return 0.0
    of_pass = sum(secs for direction, secs in timed if (direction == "forward") == (message.beside == "backward"))
    return getattr(ticks, message.beside) * min(message.secs / message.calls, of_pass / ticks.passes)


def link_waits(
    timed: Iterable[tuple[str, float]],
    update: float,
    moved: Mapping[tuple[str, str], int],
    host: HostMemory,
    chip: Chip,
) -> tuple[float, float]:
    """Seconds of waiting for the link to the host, in the passes and once a step. `timed` is the time of the work by
    direction, `update` that of the update without waiting."""
    bandwidth = chip.host_bandwidth * chip.reached.host
    if not bandwidth:  # simulated devices use the same memory for both
        return 0.0, 0.0
    if chip.platform == "gpu":
        # As measured on an H100 (docs/hardware.md): all wait, and one way for the other.
        once = 3 * host.parameters + 2 * host.optimizer + 3 * host.gradients
        return sum(moved.values()) / bandwidth, once / bandwidth
    work: Counter = Counter()
    for direction, secs in timed:
        work[FORWARD if direction == "forward" else BACKWARD] += secs
    waits = 0.0
    for scopes in ((FORWARD,), (BACKWARD, WEIGHTS)):
        each_way = [sum(moved.get((scope, target), 0) for scope in scopes) for target in (HOST, DEVICE)]
        waits += max(0.0, max(each_way) / bandwidth - work[scopes[0]])
    of_update = (host.parameters + host.optimizer + host.gradients) / bandwidth
    # Zeros of gradients are written before the passes, and their norm is taken before the update.
    return waits, (host.parameters + 2 * host.gradients) / bandwidth + max(0.0, of_update - update)


def copy_secs(call: Sent, settings: Settings, chip: Chip) -> float:
    """Seconds in a step in which arrays are copied behind each other, or apart, for a message with several of them:
    the whole ones are read and written once. Pieces are much smaller."""
    return 2 * call.count * whole_bytes(call, settings) / (chip.hbm_bandwidth * chip.reached.memory)


def messages(
    sent: Iterable[Sent],
    topology: Topology,
    settings: Settings,
    per_use: SentPerUse,
    *,
    sums: str = "",
    waits_for_sums: bool = False,
) -> list[CollectiveTime]:
    """Times of the traced collectives, without those that send nothing; `sums` and `waits_for_sums` as `estimate`."""
    sizes, reached, chip, times = settings.mesh.sizes, topology.as_reached, topology.chip, []
    can_hide = {"all-gather"}
    # What stands for another program's sums is sent as those are.
    if sums or hides_exchanges(chip.name, topology.slice_chips):
        can_hide.add("all-to-all")
    if not waits_for_sums and (chip.platform == "gpu" or hides_reduce_scatters(chip.name)):
        can_hide.add("reduce-scatter")
    for call in sent:
        if not call.bytes:
            continue
        ticking, of_parameters = _ticks(call, settings, per_use), _is_of_parameters(call)
        # Those of layers: a table's message is long, and one once a step is alone, with little compute to hide them.
        # XLA for GPU has those of other microbatches' tables beside compute, too.
        of_table = call.module.split("/")[0] not in per_use.modules
        has_work = per_use.has(call) or (ticking and of_table and chip.platform == "gpu")
        # All of a layer waits for a message with all of its weights.
        waits = call.module == BY_LAYER and call.kind == "all-gather" and not settings.fsdp.prefetch
        of_weights = of_parameters and call.kind in can_hide and has_work and not waits
        # In the ring, keys are sent while the previous ones are used; token streams are multiplied as they arrive.
        passed_on = call.kind == "permute" and call.axes in ((CONTEXT_AXIS,), (STREAM_AXIS,))
        # The rows of one round are sent while those of another are multiplied.
        of_rows = call.kind == "all-to-all" and call.axes == (EXPERT_AXIS,) and hides_ragged(chip.name)
        hides = (of_weights or passed_on or of_rows) and not topology.shared
        links, kind, sent_bytes = reached.route(sizes, call.axes, call.group), call.kind, call.bytes
        if sums and kind == "all-to-all" and of_parameters:
            kind = "reduce-scatter"
            sent_bytes *= jnp.dtype(sums).itemsize / jnp.dtype(settings.model.dtype).itemsize
        secs = call.count * links.call_secs(kind, sent_bytes)
        if passed_on and call.axes == (STREAM_AXIS,):
            secs *= share_of_one_direction(sizes[STREAM_AXIS], links)
        between_stages = call.kind == "permute" and call.axes == ("pp",) and chip.platform == "tpu"
        beside = call.direction if between_stages and not topology.shared else ""
        times.append(CollectiveTime(" ".join(call.axes), secs, hides, ticking, beside, call.count))
    return times


def share_of_one_direction(ranks: int, links: Route) -> float:
    """The share of their time for which the permutes of token streams keep their links busy: they travel both ways
    around the ranks, over links of both directions where these close to a ring.

    >>> share_of_one_direction(4, Route(200e9, 1.0, 100e9)), share_of_one_direction(4, Route(100e9, 1.0, 100e9))
    (0.5, 1.0)
    """
    return max(0.5 if ranks > 2 else 1.0, links.to_one / links.bandwidth)


def is_over(axes: Collection[str], hidden: Collection[str]) -> bool:
    """Whether a message goes over `hidden` axes alone, or over further axes of data besides.

    >>> is_over(["dp", "cp"], ["dp"]), is_over(["cp"], ["dp"]), is_over(["dp", "tp"], ["dp"])
    (True, False, False)
    """
    return any(axis in hidden for axis in axes) and {*axes} <= {*hidden, *DATA_AXES}


def _is_of_parameters(call: Sent) -> bool:
    """Whether weights or their gradients are sent, over the data axes that shard them."""
    return "dp" in call.axes and set(call.axes) <= set(DATA_AXES)


def _ticks(call: Sent, settings: Settings, per_use: SentPerUse) -> bool:
    """Whether it is part of the ticks, that is, sent for each microbatch. With one microbatch the count does not tell;
    then collectives of layers are part of the ticks, except for weights that are gathered once a step."""
    if settings.pipeline.microbatches > 1:
        return call.count >= settings.pipeline.microbatches
    of_passes = "pp" not in call.axes and (not _is_of_parameters(call) or per_use.has(call))
    return call.module.split("/")[0] in per_use.modules and of_passes


def hidden_secs(work: float, sent: float) -> float:
    """Seconds that are hidden, of `sent` seconds of messages that can overlap with `work`. The more messages there are,
    the more often one waits for another.

    Fitted to compiled steps of llama_1b_16, as `step_time` reads them: with 2 microbatches steps wait for 14 of 166 ms
    of messages, with 8 microbatches for 207 of 677 ms.

    >>> hidden_secs(1.0, 0.2), hidden_secs(1.0, 0.8), hidden_secs(1.0, 10.0)
    (0.181..., 0.550..., 0.999...)
    """
    return -work * math.expm1(-sent / work) if work else 0.0


def by_axes(sent: Iterable[CollectiveTime], sizes: Mapping[str, int]) -> dict[str, float]:
    """Seconds of messages by those of their axes that have several ranks."""
    secs: dict[str, float] = {}
    for message in sent:
        axes = with_several_ranks(message.axes.split(), sizes)
        secs[axes] = secs.get(axes, 0) + message.secs
    return secs


def with_several_ranks(axes: Iterable[str], sizes: Mapping[str, int]) -> str:
    """Those of the axes that have several ranks, as `Estimate.exposed_secs` names them.

    >>> with_several_ranks(["dp", "cp"], {"dp": 8, "cp": 1})
    'dp'
    """
    return " ".join(axis for axis in axes if sizes.get(axis, 1) > 1)


def _pass(equation: JaxprEqn, origin: Origin, passes: Passes) -> Counter:
    """A pass over memory beside the products: on GPUs those that XLA makes, elsewhere reductions, which read twice, and
    those of a mixture's rows."""
    moved = passes.bytes(equation, origin) if passes else None
    if not isinstance(passes, GpuPasses) and equation.primitive.name in REDUCTIONS:
        moved = 2 * sum(var_bytes(var) for var in (*equation.invars, *equation.outvars))
    kernel = _kernel_of_pass(equation, origin)
    return Counter({OpCost(0, moved, origin.direction, 0, kernel=kernel): 1}) if moved else Counter()


def _kernel_of_pass(equation: JaxprEqn, origin: Origin) -> str:
    if _is_of_blocks(equation, origin):
        return IN_BLOCKS
    return OF_ROWS if origin.module in ROWS_IN else OF_SLOTS * origin.module.startswith("sharding/")


def _is_of_blocks(equation: JaxprEqn, origin: Origin) -> bool:
    module, _, inner = origin.module.partition("/")  # of which an einsum is a part, with its text as the name
    return equation.primitive.name in OF_BLOCKS and module == MIXTURE and (not inner or "->" in inner.split("/")[0])


def _product(equation: JaxprEqn, origin: Origin, *, model: ShardedModel) -> Counter:
    name, arrays = equation.primitive.name, [*equation.invars, *equation.outvars]
    if name == WRITES:
        arrays = 2 * equation.invars[1:2]
    elif name not in PRODUCT_PRIMITIVES:
        return Counter()
    # A grouped product computes the rows in use; its last operand holds the number of rows of each group.
    share_of_rows, grouped = model.share_of_rows, is_grouped(equation, origin.stack)
    rows = [var for var in arrays if grouped and var.aval.ndim == 2]
    moved, of_rows = (sum(map(var_bytes, some)) for some in (arrays, rows))
    moved -= round((1 - share_of_rows) * of_rows)
    # The FLOPs of a kernel from elsewhere are unknown; only its bytes count.
    by_dtype = name in ("dot_general", SCALED_MATMUL, *GROUPED)
    matmul = EIGHT_BIT.get(equation.invars[0].aval.dtype.name, "compute") if by_dtype else "compute"
    flops = product_flops(equation, share_of_rows, origin.stack) or 0
    kernel = _kernel_of_pass(equation, origin) if name == WRITES else IN_BLOCKS * _is_of_blocks(equation, origin)
    if grouped:
        kernel, flops = GROUPED_PRODUCTS, flops + _flops_beside_groups(equation, model)
    elif name in KERNEL_CALLS:
        kernel, flops = ATTENTION, flops * _padding(equation, model) if flops else 0
    return Counter({OpCost(round(flops), moved, origin.direction, 0, matmul, kernel): 1})


def _padding(equation: JaxprEqn, model: ShardedModel) -> float:
    """Width of heads in whole lanes of a TPU, queries' and values', over their own."""
    if model.is_simulated or is_for_gpus(model.mesh):
        return 1.0
    widths = [var.aval.shape[-1] for var in equation.invars if jnp.issubdtype(var.aval.dtype, jnp.floating)][:3:2]
    return sum(-(-width // LANES) * LANES for width in widths) / sum(widths)


def _flops_beside_groups(equation: JaxprEqn, model: ShardedModel) -> int:
    """FLOPs of a grouped product's tiles for rows that are not of the tile's group: on TPUs the tile in which a group
    begins is computed for the one before, too, and on GPUs half of a group's last tile is empty."""
    if model.is_simulated:
        return 0
    matrices = grouped_matrices(*(var.aval.shape for var in (*equation.invars, equation.outvars[0])))
    groups = matrices[0][0]
    rows = groups * TILE_ROWS // 2 if is_for_gpus(model.mesh) else (groups - 1) * BLOCK_ROWS[0]
    return sum(2 * rows * math.prod(matrix) for _, *matrix in matrices)


class StepTime(NamedTuple):
    """Seconds of a step on the slowest rank.

    `exposed_secs` is the time in which compute waits for a collective, by mesh axes as "dp" or "dp+tp". `pallas_secs`
    are estimated separately, at `kernel_efficiency` of peak, and can be left out: see `step_time`; `grouped_secs` are
    the part of them for products with experts. `bubble` is the share of the time in which an average rank waits for
    others. `mfu` is model FLOPs over what the chip could compute in `total_secs`.
    """

    compute_secs: float
    exposed_secs: dict[str, float]
    pallas_secs: float
    total_secs: float
    bubble: float
    mfu: float
    grouped_secs: float = 0.0
    kernel_efficiency: float = KERNEL_EFFICIENCY

    @property
    def kernels(self) -> str:
        """How kernels are priced, in words; "" without kernels."""
        return f"kernels at {100 * self.kernel_efficiency:.0f} % of peak" if self.pallas_secs else ""


def step_time(
    compiled: Compiled,
    chip: Chip,
    model_flops: float,
    *,
    dtype: str = "bfloat16",
    matmul: str = "compute",
    kernel_efficiency: float = KERNEL_EFFICIENCY,
) -> StepTime:
    """The time of one step with `model_flops` on a device, whose products are in `dtype`, or as `matmul` says.

    Compute takes the compiler's estimated cycles over the clock, with all iterations of loops and with branches as the
    schedule takes them; on GPUs the time of the roofline (parallax/analysis/compiled/roofline.py).
    A collective takes its bytes over its links' bandwidth (see `route`, and for messages `one_way`). Collectives over
    the same axes run one after the other, but messages in opposite directions overlap. The part of a collective that
    compute between its start and its end does not cover is exposed. Pallas calls, for which the compiler estimates no
    cycles, take the longer of their FLOPs at `kernel_efficiency` of peak and of reading operands and writing results
    once; with 1 the time is a lower bound. Raises ConfigError if the program has no cycles, as on CPU.
    """
    if compiled.cycles is None or chip.clock_hz is None:
        raise ConfigError(
            f"the compiler of {chip.name} estimates no cycles; a step time can only be read on TPU and GPU."
        )
    mesh, events = compiled.mesh, compiled.timeline
    clocks = (Clock(mesh, chip, dtype, lockstep, kernel_efficiency) for lockstep in (True, False))
    critical, average = (clock.run(events) for clock in clocks)
    total = sum(critical.values())
    exposed = {axes: secs for axes, secs in critical.items() if axes not in ("compute", *KERNEL_PARTS)}
    used = mfu(model_flops, total, chip.peak(dtype))
    assert used < max(1, chip.matmul_speed(matmul)), (
        f"{model_flops:.3g} FLOPs in {total:.3g} s are more than {chip.name} can do: a program misread"
    )
    kernels, bubble = sum(critical[name] for name in KERNEL_PARTS), 1 - sum(average.values()) / total
    grouped = critical[GROUPED_PRODUCTS]
    return StepTime(critical["compute"], exposed, kernels, total, bubble, used, grouped, kernel_efficiency)


class TimedEvent(NamedTuple):
    """An event of a timeline between `start` and `end`, in seconds from the timeline's first event.

    `spent` are the seconds that it takes from the device by purpose, as in `Clock.run`: for an `End` its wait by axes,
    for a loop or a branch those of its body, for the start of a collective none. A collective's span is the time in
    which its links are busy with it.
    """

    event: Any
    start: float
    end: float
    spent: Mapping[str, float]


class Clock:
    """Simulates a timeline and adds up its time by purpose."""

    def __init__(self, mesh: Mesh, chip: Chip, dtype: str, lockstep: bool, kernel_efficiency: float):
        self.mesh, self.chip, self.lockstep = mesh, chip, lockstep
        self.kernel_rate = kernel_efficiency * chip.peak(dtype)
        self._routes: dict[tuple, Route] = {}

    def run(self, events: list) -> Counter:
        """Seconds of "compute", of KERNEL_PARTS and of waits by axes."""
        spent: Counter = Counter()
        for timed in self.times(events):
            spent.update(timed.spent)
        return spent

    def times(self, events: list) -> Iterator[TimedEvent]:
        """When each event happens; all links are free at the start."""
        now = 0.0
        free: dict[tuple, float] = {}  # when the links of these axes, or of one direction, become free
        ready: dict[str, tuple[float, str]] = {}  # when a started collective is done
        for event in events:
            if isinstance(event, CompiledCollective):
                links = event.axes, event.shift
                begins = max(now, free.get(links, 0.0))
                free[links] = begins + self.collective_secs(event)
                ready[event.op] = free[links], "+".join(event.axes)
                yield TimedEvent(event, begins, free[links], {})
                continue
            if isinstance(event, End) and event.op in ready:
                done, axes = ready.pop(event.op)
                spent = {axes: max(0.0, done - now)}
            else:
                spent = self._local(event)
            ends = now + sum(spent.values())
            yield TimedEvent(event, now, ends, spent)
            now = ends

    def _local(self, event: Compute | Kernel | LoopEvent | BranchEvent | End) -> dict[str, float]:
        if isinstance(event, Compute):
            return {"compute": event.cycles / self.chip.clock_hz}
        if isinstance(event, Kernel):
            counts = event.flops or event.grouped  # a kernel that only moves rows, as a gather does, is not a product
            return {KERNEL_PARTS[event.grouped] if counts else "compute": self._kernel_secs(event)}
        if isinstance(event, LoopEvent):
            return {name: event.trips * secs for name, secs in self.run(event.body).items()}
        if isinstance(event, BranchEvent):
            spent: Counter = Counter()
            for share, side in zip(event.lockstep if self.lockstep else event.average, event.sides, strict=True):
                spent.update({name: share * secs for name, secs in self.run(side).items()} if share else {})
            return spent
        return {}

    def _kernel_secs(self, kernel: Kernel) -> float:
        """The longer of FLOPs at the rate of kernels, and operands and results once through memory."""
        moved = kernel.operand_bytes + kernel.result_bytes
        rate = self.kernel_rate * self.chip.matmul_speed(kernel.matmul)
        return max(kernel.flops / rate, moved / self.chip.hbm_bandwidth)

    def collective_secs(self, call: CompiledCollective) -> float:
        """Seconds of one call without other traffic on its links."""
        if call.pairs:
            return call.bytes / one_way(self.mesh, call.pairs, self.chip)
        key = call.axes, call.group
        if key not in self._routes:
            self._routes[key] = route(self.mesh, call.axes, self.chip, call.group)
        return self._routes[key].secs(call.kind, call.bytes)


class CompiledStep(NamedTuple):
    """The compiler's figures for a step: bytes on a device, and the time if it estimates cycles.

    `refused` is the compiler's message if the step does not fit; then nothing else is set. `sent` has a row for each
    kind of collective and its axes.
    """

    refused: str
    arguments: int = 0
    temporaries: int = 0
    peak_bytes: int = 0
    time: StepTime | None = None
    sent: tuple["Overlap", ...] = ()


class Overlap(NamedTuple):
    """The compiled collectives of one kind over some axes: bytes that an average device sends in a step, the share of
    them that is sent asynchronously, and the share that is hidden by compute between start and done."""

    axes: str
    kind: str
    calls: float
    bytes: float
    asynchronous: float
    hidden: float


def compile_and_read(
    settings: Settings, topology: Topology, devices: list[Any], *, kernel_efficiency: float = KERNEL_EFFICIENCY
) -> CompiledStep:
    """Compile the training step of settings in which nothing is open, and read the result; kernels at
    `kernel_efficiency` of peak."""
    step = step_of(settings, make_mesh(dataclasses.replace(settings.mesh, simulate=0), devices))
    lowered = step.lower(settings.data.global_batch, settings.data.seq)
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        used = re.search(r"Used [\d.]+[KMG] of [\d.]+[KMG] hbm", str(error))
        return CompiledStep(used[0].replace("hbm", "HBM") if used else str(error).splitlines()[0])
    return read_figures(program, step.model, settings, topology, kernel_efficiency=kernel_efficiency)


def read_figures(
    program: jax.stages.Compiled,
    model: ShardedModel,
    settings: Settings,
    topology: Topology | None,
    *,
    kernel_efficiency: float = KERNEL_EFFICIENCY,
) -> CompiledStep:
    """The compiler's figures for the compiled step of a model; without a topology, its memory."""
    compiled, seq = read_step(program, model, seq=settings.data.seq), settings.data.seq
    if is_absent_gpus(model.mesh):
        # JAX names no host memory for GPUs that are not present: in their program what rests there is on the device.
        host = predicted_host_memory(model_on_topology(settings, topology), settings)
        compiled = compiled._replace(arguments=compiled.arguments - host.parameters - host.optimizer)
    # The peak of other backends, as of the one for CPU, may leave temporaries out.
    peak = compiled.peak if model.mesh.devices.flat[0].platform == "tpu" else compiled.together
    sizes = compiled.arguments, compiled.temporaries, peak
    if compiled.cycles is None or topology is None:
        return CompiledStep("", *sizes)
    tokens = settings.data.global_batch * seq
    flops = flops_per_token(settings.model, model.plan.declared, seq=seq) * tokens / topology.devices
    kernels = dict(dtype=settings.model.dtype, matmul=settings.model.matmul, kernel_efficiency=kernel_efficiency)
    time = step_time(compiled, topology.chip, flops, **kernels)
    return CompiledStep("", *sizes, time, overlaps(compiled, topology.chip))


def overlaps(compiled: Compiled, chip: Chip) -> tuple[Overlap, ...]:
    """The collectives of a program compiled for this chip, by axes and kind, most bytes first."""
    clock = Clock(compiled.mesh, chip, "bfloat16", lockstep=True, kernel_efficiency=1.0)
    sums: dict[tuple[str, str], Counter] = defaultdict(Counter)
    for call in compiled.collectives:
        sent, secs = call.bytes * call.count, clock.collective_secs(call)
        beside = min(1.0, call.cycles_between / chip.clock_hz / secs) if secs else 0.0
        sums["+".join(call.axes), call.kind] += Counter(
            calls=call.count,
            bytes=sent,
            asynchronous=sent * call.asynchronous,
            hidden=sent * call.asynchronous * beside,
        )
    rows = (
        Overlap(*key, row["calls"], row["bytes"], *(row[name] / row["bytes"] for name in ("asynchronous", "hidden")))
        for key, row in sums.items()
        if row["bytes"]
    )
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def time_parts(parts: Mapping[str, float], secs: float) -> Table:
    """The parts of a step's time."""
    shown = {name: part for name, part in parts.items() if part / secs > LEAST_SHOWN}
    unit, name_of_unit = time_unit(secs)
    rows = [
        [name, f"{part / unit:.3f} {name_of_unit}", percent(part / secs)]
        for name, part in (shown | {"step": secs}).items()
    ]
    return Table(["time of a step", "", "share"], rows, 1, [[("compiler", part / secs)] for part in shown.values()])


def compiled_parts(time: StepTime) -> dict[str, float]:
    """Seconds of a compiled step by name."""
    exposed = {f"exposed over {axes}": secs for axes, secs in time.exposed_secs.items()}
    kernels = {"attention kernel": time.pallas_secs - time.grouped_secs}
    if time.grouped_secs:
        kernels["grouped products"] = time.grouped_secs
    return {"compute": time.compute_secs} | kernels | exposed
