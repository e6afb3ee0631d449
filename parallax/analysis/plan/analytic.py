"""How long a step takes and what it holds, from its traced program: nothing is compiled, no device is needed.

    step = (work + messages of each tick) / (1 - bubble) + messages once a step + update

*Work* is the sum over matrix products of the longer of FLOPs over the chip's peak and bytes of factors and result over
its memory bandwidth; over reductions of reading what they reduce twice, for what comes after waits for the result; and
over writes into slots and sums, those of what is kept for the backward pass, of writing and reading. All else is taken
to be fused with these. *Bubble* is the schedule's in lockstep, a recomputed pass counted as a forward one. *Messages*
are the traced collectives over the links of their axes. Gathers of layers over dp, one by one, hide behind the work,
and with fsdp.reduce="compute" or fsdp.prefetch=1 so do sums of their gradients, as far as `hidden_secs` says; all
others are exposed. The *update* reads and writes parameters and optimizer state, and reads gradients, at memory
bandwidth.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from parallax.analysis.budget import Memory, flops_per_token, memory
from parallax.analysis.plan.layouts import build, placed
from parallax.analysis.report.executed import product_flops
from parallax.analysis.report.origin import Origin
from parallax.analysis.report.place import Place
from parallax.analysis.report.shares import attention_share, costs_of
from parallax.analysis.report.traced import Sent, program_collectives, step_program
from parallax.analysis.report.walk import walk
from parallax.analysis.report.whole import abstract_mesh
from parallax.config.sections import MeshConfig, PipelineConfig
from parallax.config.settings import Settings
from parallax.pipeline.sharded_model import ShardedModel
from parallax.pipeline.storage import ENDS
from parallax.schedules import Costs, by_name, figures
from parallax.sharding.mesh import AXES
from parallax.training.build import model_of
from parallax.training.optimizer import make_optimizer
from parallax.training.step import abstract_state

REDUCTIONS = ("reduce_sum", "reduce_max")
WRITES = "dynamic_update_slice"
PRODUCTS = ("dot_general", "pallas_call")
LAYER_PARTS = ("attention", "mlp")  # begin the names of all modules of a layer, its norms too


class Product(NamedTuple):
    """A matrix product of one shape, a reduction or a write: FLOPs, bytes through memory, runs in a device's step."""

    flops: int
    bytes: int
    direction: str
    count: int

    def secs(self, rate: float, bandwidth: float) -> float:
        """The longer of computing it once, at FLOP/s, and of moving its bytes."""
        return max(self.flops / rate, self.bytes / bandwidth)


class Traced(NamedTuple):
    """What one device does in a step, before any chip is named."""

    products: list[Product]
    sent: list[Sent]
    model_flops: float  # of the model's mathematics, a device's share; recomputation is not in it


class Message(NamedTuple):
    """What one collective takes in a step. `hides`: work may run meanwhile. `ticking`: it belongs to the ticks, so
    that ranks wait for it as they do for work."""

    axes: str
    secs: float
    hides: bool
    ticking: bool


class Estimate(NamedTuple):
    """A predicted step. Bytes and seconds are those of the busiest device; `secs` is the step's time."""

    peak_bytes: int
    components: dict[str, int]
    work_secs: float
    recompute_secs: float  # of the work
    exposed_secs: dict[str, float]  # by axes, as "dp" or "dp tp"
    hidden_secs: float
    update_secs: float
    bubble: float
    secs: float
    mfu: float

    @property
    def bubble_secs(self) -> float:
        """Time in which the average device waits for others of the pipeline."""
        return self.secs - self.work_secs - sum(self.exposed_secs.values()) - self.update_secs


def predict(settings: Settings, place: Place) -> Estimate:
    """The step of these settings on a place; ConfigError where their mesh or layout is not legal there.

    >>> from configs.llama_1b_16 import get_config
    >>> from parallax.analysis.report.place import read_topology
    >>> from parallax.config.settings import read_settings
    >>> place = read_topology("v5e:4x4")
    >>> predict(read_settings(get_config().to_dict()), place).peak_bytes < place.chip.usable_bytes
    True
    """
    settings = placed(settings, place)
    return predict_of(build(settings, place), settings, place)


def predict_of(model: ShardedModel, settings: Settings, place: Place) -> Estimate:
    """The same of a model that was built, of settings that were placed."""
    return estimate(settings, place, predicted_memory(model, settings), trace(model, settings))


def predicted_memory(model: ShardedModel, settings: Settings) -> Memory:
    """Bytes on each device, by component."""
    tx = make_optimizer(settings.optimizer, settings.train.steps, model.layouts)
    data = settings.data
    return memory(model, abstract_state(model, tx).opt_state, global_batch=data.global_batch, seq=data.seq)


def trace(model: ShardedModel, settings: Settings) -> Traced:
    """The products and collectives of the first pipeline rank, whose stages are the largest."""
    shape = (settings.data.global_batch, settings.data.seq)
    program, first = step_program(model, *shape), dict.fromkeys(AXES, 0)
    found = walk(program, at=first, count=_product)
    model_flops = flops_per_token(settings.model, model.shapes, seq=shape[1]) * math.prod(shape)
    return Traced(
        [product._replace(count=count) for product, count in found.items()],
        program_collectives(program, at=first, sizes=model.axis_sizes),
        model_flops / math.prod(model.axis_sizes.values()),
    )


def estimate(settings: Settings, place: Place, held: Memory, traced: Traced) -> Estimate:
    """The step of a traced program on these chips."""
    rate = place.matmul_rate(settings.model.dtype)
    timed = [(p.direction, p.count * p.secs(rate, place.chip.hbm_bandwidth)) for p in traced.products]
    work = sum(secs for _, secs in timed)
    sent = messages(traced.sent, place, settings)
    hidden = hidden_secs(work, sum(message.secs for message in sent if message.hides))
    exposed = exposed_parts(sent, hidden)
    bubble = 0.0 if place.shared else lockstep_bubble(settings)
    ticking = sum(message.secs for message in exposed if message.ticking)
    update = (3 * held.parameters + 2 * held.optimizer) / place.chip.hbm_bandwidth
    secs = (work + ticking) / (1 - bubble) + sum(message.secs for message in exposed if not message.ticking) + update
    return Estimate(
        peak_bytes=held.peak,
        components=held._asdict(),
        work_secs=work,
        recompute_secs=sum(secs for direction, secs in timed if direction == "recompute"),
        exposed_secs=by_axes(exposed),
        hidden_secs=hidden,
        update_secs=update,
        bubble=bubble,
        secs=secs,
        mfu=traced.model_flops / place.chip.peak(settings.model.dtype) / secs,
    )


def messages(sent: Iterable[Sent], place: Place, settings: Settings) -> list[Message]:
    """The traced collectives in seconds; those that send nothing are left out."""
    sizes, found = settings.mesh.sizes, []
    for one in sent:
        if not one.bytes:
            continue
        bandwidth = place.bandwidth(sizes, one.axes, neighbours=one.kind == "permute")
        spread = place.spread(sizes, one.axes) if one.kind == "all-to-all" else 1
        can_hide = one.kind in ("all-gather", "all-to-all") or settings.fsdp.prefetch > 0
        # A table's message is long, and little is computed beside it; what is sent once a step has nothing beside it.
        beside = not one.module.startswith(ENDS) and settings.pipeline.gather == "microbatch"
        hides = one.axes == ("dp",) and can_hide and beside and not place.shared
        secs = one.total_bytes * spread / bandwidth
        found.append(Message(" ".join(one.axes), secs, hides, _ticks(one, settings.pipeline)))
    return found


def _ticks(one: Sent, pipeline: PipelineConfig) -> bool:
    """Whether it belongs to the ticks: it is sent for each microbatch. Of a single one the count does not tell, but
    what layers send is of their passes, weights that are gathered once aside."""
    if pipeline.microbatches > 1:
        return one.count >= pipeline.microbatches
    of_passes = "pp" not in one.axes and ("dp" not in one.axes or pipeline.gather == "microbatch")
    return one.module.startswith(LAYER_PARTS) and of_passes


def hidden_secs(work: float, sent: float) -> float:
    """Of so many seconds of messages that can hide behind the work, those that do: the more there are, the oftener one
    waits for another.

    Fitted to the waits of compiled steps of llama_1b_16, by analysis.report.steptime: of 166 ms of messages 14 with
    2 microbatches, of 677 ms 207 with 8.

    >>> hidden_secs(1.0, 0.2), hidden_secs(1.0, 0.8), hidden_secs(1.0, 10.0)
    (0.181..., 0.550..., 0.999...)
    """
    return -work * math.expm1(-sent / work) if work else 0.0


def exposed_parts(sent: Iterable[Message], hidden: float) -> list[Message]:
    """Of each message the seconds in which nothing else is done, where so many of what can hide do hide."""
    hiding = sum(message.secs for message in sent if message.hides)
    return [m._replace(secs=m.secs * (1 - hidden / hiding)) if m.hides else m for m in sent]


def by_axes(sent: Iterable[Message]) -> dict[str, float]:
    """Their seconds, added up."""
    found: dict[str, float] = {}
    for message in sent:
        found[message.axes] = found.get(message.axes, 0) + message.secs
    return found


def schedule_costs(settings: Settings) -> Costs:
    """Times of passes over that of a forward one."""
    alone = dataclasses.replace(settings, mesh=MeshConfig(pp=1, dp=1, tp=1, simulate=0))
    return costs_of(settings.pipeline.remat, _attention_share(alone) if settings.pipeline.remat == "attention" else 0.0)


@cache
def _attention_share(settings: Settings) -> float:
    return attention_share(model_of(settings, abstract_mesh(settings.mesh.sizes)).shapes)


def lockstep_bubble(settings: Settings) -> float:
    """Share of the ticks in which the average rank has nothing to do."""
    pipeline = settings.pipeline
    if pipeline.branches == "mask":
        return 0.0  # it computes instead, and that is in the work
    sizes = pipeline.schedule, settings.mesh.pp, pipeline.microbatches, pipeline.virtual
    return _bubble(*sizes, schedule_costs(settings))


@cache
def _bubble(name: str, ranks: int, microbatches: int, virtual: int, costs: Costs) -> float:
    return figures(by_name(name, ranks, microbatches, virtual), costs).lockstep_bubble


def _product(equation: JaxprEqn, origin: Origin) -> Counter:
    name, arrays = equation.primitive.name, [*equation.invars, *equation.outvars]
    if name == WRITES:
        arrays = 2 * equation.invars[1:2]
    elif name in REDUCTIONS:
        arrays = 2 * arrays
    elif name not in PRODUCTS:
        return Counter()
    moved = sum(math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in arrays)
    # Of a kernel that is not of this project the FLOPs are not known, and its bytes alone count.
    return Counter({Product(product_flops(equation) or 0, moved, origin.direction, 0): 1})
