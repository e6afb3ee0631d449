"""Layouts that a sweep tries: mesh, microbatches, schedule, remat, sharding policy and sums of gradients."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from parallax.analysis.planned.topology import Topology
from parallax.analysis.traced.memory import predicted_state
from parallax.analysis.traced.recompute import sets_to_try
from parallax.analysis.traced.trace import abstract_mesh
from parallax.config.remat import REMAT
from parallax.config.sections import ALL_AXES, AUTO, POLICY_NAMES, MeshConfig, ModelConfig
from parallax.config.settings import Settings
from parallax.errors import ConfigError, ParallaxError, divisors
from parallax.model.checks import check_context, check_exchange, check_kernel_on, check_ragged
from parallax.model.experts.exchange_costs import exchange_of
from parallax.model.families import CONTEXTS
from parallax.model.kernels.platforms import ATTENTION_KERNELS
from parallax.pipeline import ShardedModel
from parallax.schedules import SCHEDULES
from parallax.schedules.pricing import stages_of_rank
from parallax.sharding.activations import EXPERT_AXIS
from parallax.sharding.host import DEVICE, HOST
from parallax.sharding.mesh import SLOW_AXES, axis_between_slices, factorisations
from parallax.sharding.zigzag import CONTIGUOUS, ZIGZAG
from parallax.step.step import model_of

SHARDED_TABLES = "embedding=zero3 head=zero3"
# Stages per rank that are tried with "interleaved"; more stages send more and gain little.
VIRTUAL = (2, 4)
# Schedules for several ranks, and the number of stages on each rank.
SEVERAL = [(name, v) for name in SCHEDULES for v in (VIRTUAL if name == "interleaved" else (1,))]
# The config section of each setting that a sweep varies.
CHOSEN_AXES = ("pp", "dp", "cp", "ep", "tp")
SECTION_OF = dict.fromkeys(CHOSEN_AXES, "mesh") | {"prefetch": "fsdp"}
SECTION_OF |= dict.fromkeys(("context", "exchange", "order", "exchange_hosts"), "layout")
SECTION_OF |= dict.fromkeys(("microbatches", "schedule", "virtual", "remat", "grads_dtype", "grads_on"), "pipeline")
SECTION_OF |= dict.fromkeys(("policy", "exceptions"), "data_parallel")
# Dtype and memory of sums of gradients that are smaller on the device, those that cost the least time first.
SMALLER_SUMS = (("bfloat16", DEVICE), ("bfloat16", HOST), ("float32", HOST))


def unchosen_sizes(mesh: MeshConfig) -> dict[str, int]:
    """The sizes of axes that no sweep varies. They shard the batch, and each of their ranks does the same work."""
    return {axis: getattr(mesh, axis) for axis in ALL_AXES if axis not in CHOSEN_AXES}


def ranks_beside(mesh: MeshConfig) -> int:
    """Number of ranks along these axes together.

    >>> ranks_beside(MeshConfig(dp=4, replica=2))
    2
    """
    return math.prod(unchosen_sizes(mesh).values())


class Choice(NamedTuple):
    """One layout: the settings that a sweep varies."""

    pp: int
    dp: int
    tp: int
    microbatches: int
    schedule: str
    virtual: int
    remat: str
    policy: str  # of data_parallel, as its exceptions
    exceptions: str
    prefetch: int
    cp: int = 1
    context: str = "all_gather"
    ep: int = 1
    exchange: str = AUTO
    grads_dtype: str = "float32"
    grads_on: str = DEVICE
    order: str = ZIGZAG
    exchange_hosts: int = 1

    @classmethod
    def of(cls, settings: Settings) -> "Choice":
        """The layout of settings whose mesh has no -1."""
        return cls(*(getattr(getattr(settings, SECTION_OF[name]), name) for name in cls._fields))

    @property
    def mesh(self) -> str:
        """The mesh in short: pp·dp·tp, then the axes that shard seq and experts, and the form of each if it is set.

        >>> Choice(1, 4, 1, 1, "gpipe", 1, "layer", "zero3", "", 0, cp=4, context="ring").mesh
        '1·4·1 cp=4 ring'
        """
        further = f" cp={self.cp} {self.keys}" * (self.cp > 1) + f" ep={self.ep}" * (self.ep > 1)
        further += f" {self.exchange}" * (self.ep > 1 and self.exchange != AUTO)
        further += f" on {self.exchange_hosts} hosts" * (self.ep > 1 < self.exchange_hosts)
        return f"{self.pp}·{self.dp}·{self.tp}{further}"

    @property
    def keys(self) -> str:
        """How keys meet queries of other context ranks, and the order of tokens if it is not zigzag."""
        return self.context + f" {self.order}" * (self.order != ZIGZAG)

    @property
    def schedule_words(self) -> str:
        """The schedule with the stages of a rank, if these are several; "" without a pipeline.

        >>> Choice(4, 1, 1, 8, "interleaved", 2, "layer", "zero3", "", 0).schedule_words
        'interleaved v=2'
        """
        return (self.schedule + f" v={self.virtual}" * (self.virtual > 1)) * (self.pp > 1)

    @property
    def policy_words(self) -> str:
        """The policy with its exceptions, and whether weights are gathered ahead; "" on one data rank.

        >>> Choice(1, 4, 1, 1, "gpipe", 1, "layer", "zero3", "embedding=zero1 head=zero1", 1).policy_words
        'zero3 embedding=zero1 head=zero1, ahead'
        """
        exceptions = {"": "", SHARDED_TABLES: ", tables zero3"}.get(self.exceptions, f" {self.exceptions}")
        return (self.policy + exceptions + ", ahead" * self.prefetch) * (self.data_ranks > 1)

    @property
    def data_ranks(self) -> int:
        """Number of ranks over which data axes shard a parameter."""
        return self.dp * self.cp * self.ep

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.pp * stages_of_rank(self.schedule, self.virtual)

    @property
    def as_timed(self) -> "Choice":
        """A layout with the same sizes, microbatches and prefetch, all that `estimate` reads of one besides its
        work."""
        others = dict(schedule="gpipe", virtual=1, remat="layer", policy="zero3", exceptions="", context="all_gather")
        exchange = dict(exchange=AUTO, exchange_hosts=1)
        return self._replace(**others, **exchange, grads_dtype="float32", grads_on=DEVICE, order=ZIGZAG)

    @property
    def sums(self) -> tuple[str, str]:
        """Dtype and memory of sums of gradients."""
        return self.grads_dtype, self.grads_on

    @property
    def sharding(self) -> tuple[tuple[int, ...], str, str, tuple[str, str]]:
        """What a sharding plan follows from: sizes of CHOSEN_AXES, policy and exceptions, and sums of gradients."""
        return tuple(getattr(self, axis) for axis in CHOSEN_AXES), self.policy, self.exceptions, self.sums

    def with_smaller_sums(self, *, host: bool) -> list["Choice"]:
        """This layout with each of SMALLER_SUMS that is smaller on the device than its own; in host memory if `host`.

        >>> layout = Choice(1, 4, 1, 1, "gpipe", 1, "layer", "zero3", "", 0, grads_dtype="bfloat16")
        >>> [smaller.sums for smaller in layout.with_smaller_sums(host=True)]
        [('bfloat16', 'host')]
        """
        if self.grads_on == HOST:
            return []
        others = [sums for sums in SMALLER_SUMS if sums != self.sums and sums[0] in (self.grads_dtype, "bfloat16")]
        return [
            self._replace(grads_dtype=dtype, grads_on=memory) for dtype, memory in others if host or memory == DEVICE
        ]

    @property
    def words_of_sums(self) -> list[str]:
        """Dtype and memory of sums of gradients, where these are not float32 and the device."""
        rounded = [f"sums {self.grads_dtype}"] if self.grads_dtype != "float32" else []
        return rounded + ["sums on host"] * (self.grads_on == HOST)

    def applied(self, settings: Settings) -> Settings:
        """The settings with this layout instead of their own."""
        return with_keys(settings, {f"{SECTION_OF[name]}.{name}": value for name, value in self._asdict().items()})

    def variations(self, further: Sequence[str], sets: Sequence[str] = REMAT) -> list["Choice"]:
        """Layouts that differ in one setting or in the sizes of two axes; `further` are axes besides pp, dp and tp,
        `sets` values of remat. Of microbatches twice as many are tried, and all that are half of others."""
        changes: list[dict[str, Any]] = [{"remat": remat} for remat in sets]
        fewer = [self.microbatches >> halvings for halvings in range(1, self.microbatches.bit_length())]
        changes += [{"microbatches": many} for many in (2 * self.microbatches, *fewer)]
        names = ("policy", "exceptions", "prefetch")
        changes += [dict(zip(names, policy)) for policy in policies(self.pp, self.data_ranks)]
        moved = [("dp", "tp"), ("tp", "dp"), ("dp", "pp"), ("pp", "dp")]
        moved += [pair for axis in further for pair in (("dp", axis), (axis, "dp"), (axis, "tp"), ("tp", axis))]
        sizes = self._asdict()
        changes += [{half: sizes[half] // 2, twice: 2 * sizes[twice]} for half, twice in moved if sizes[half] % 2 == 0]
        changes += [{"context": context} for context in CONTEXTS if self.cp > 1]
        schedules = [("one_f_one_b", 1), ("interleaved", 2), ("zero_bubble", 1), ("dualpipe_v", 1)]
        changes += [{"schedule": schedule, "virtual": v} for schedule, v in (schedules if self.pp > 1 else ())]
        varied = (self._replace(**change) for change in changes)
        varied = (choice if choice.pp > 1 else choice._replace(schedule="gpipe", virtual=1) for choice in varied)
        return [choice for choice in varied if choice != self]

    def keys_to(self, other: "Choice") -> dict[str, Any]:
        """The keys in which another layout differs, with its values."""
        pairs = zip(self._fields, self, other, strict=True)
        return {f"{SECTION_OF[name]}.{name}": theirs for name, mine, theirs in pairs if mine != theirs}


def with_keys(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """The settings with other values of keys, as {"pipeline.remat": "layer"}."""
    sections: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    changed = {name: dataclasses.replace(getattr(settings, name), **keys) for name, keys in sections.items()}
    return dataclasses.replace(settings, **changed)


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """The flags of a command line that give keys these values."""
    return [f"--config.{key}={value}" for key, value in values.items()]


def policies(pp: int, ranks: int) -> list[tuple[str, str, int]]:
    """Policies, exceptions and prefetch depths that make a difference on this many data ranks. An exception for tables
    is worthwhile if each pipeline rank would hold them whole."""
    if ranks == 1:
        return [("zero3", "", 0)]
    return [*((policy, "", 0) for policy in POLICY_NAMES), ("zero3", "", 1), *[("zero1", SHARDED_TABLES, 0)] * (pp > 1)]


def choices(settings: Settings, topology: Topology) -> Iterator[Choice]:
    """Every combination worth trying on a topology's devices, with the settings' sizes of axes that no sweep varies;
    some may not be legal."""
    beside, devices = ranks_beside(settings.mesh), topology.devices
    for cp, context in contexts(settings, devices // beside):
        for ep in expert_ranks(settings.model, devices // beside // cp):
            for pp, dp, tp in factorisations(devices // beside // cp // ep):
                rows_fit = settings.data.global_batch % (beside * dp * ep) == 0
                sizes = unchosen_sizes(settings.mesh) | {"pp": pp}
                crosses = any(sizes.get(axis, 1) % topology.slices == 0 for axis in SLOW_AXES)
                if rows_fit and crosses and _context_fits(settings.model, cp, tp, context):
                    sharded = dict(pp=pp, dp=dp, tp=tp, cp=cp, ep=ep)
                    hosts = with_own_hosts(Choice.of(settings)._replace(**sharded), settings, topology).exchange_hosts
                    yield from _choices_on(settings, pp, dp, tp, cp, context, ep, hosts)


def with_own_hosts(choice: Choice, settings: Settings, topology: Topology) -> Choice:
    """The layout, where the settings ask for an exchange over hosts, with the number of those on which its own expert
    ranks are; 1 if hosts have no equal parts of them. With one such rank it stays as it is: nothing is exchanged."""
    if settings.layout.exchange_hosts == 1 or choice.ep == 1:
        return choice
    return choice._replace(exchange_hosts=hosts_of_experts(choice.applied(settings), topology) or 1)


def hosts_of_experts(settings: Settings, topology: Topology) -> int:
    """The number of hosts of GPUs on which expert ranks are; 0 if these have no equal parts of them."""
    crosses = topology.has_gpu_hosts and settings.mesh.ep > 1
    return topology.hosts_along(settings.mesh.sizes, EXPERT_AXIS) if crosses else 1


def _choices_on(
    settings: Settings, pp: int, dp: int, tp: int, cp: int, context: str, ep: int, hosts: int
) -> Iterator[Choice]:
    sets = sets_to_try(settings.model, seq=settings.data.seq, exchanges=ep > 1)
    sums = settings.pipeline.grads_dtype, settings.pipeline.grads_on
    for microbatches in divisors(settings.data.global_batch // (ranks_beside(settings.mesh) * dp * ep)):
        for schedule, virtual in SEVERAL if pp > 1 else SEVERAL[:1]:  # without a pipeline it is gradient accumulation
            for remat in sets:
                for policy in policies(pp, dp * cp * ep):
                    shape = pp, dp, tp, microbatches, schedule, virtual, remat, *policy
                    exchange, order = settings.layout.exchange, order_to_try(settings, cp)
                    yield Choice(*shape, cp, context, ep, exchange, *sums, order, hosts)


def order_to_try(settings: Settings, cp: int) -> str:
    """The order of tokens on context ranks that is worth trying: contiguous if a window hides tokens in every layer,
    since it sends less and computes as much; the settings' own if there is one rank."""
    if cp == 1:
        return settings.layout.order
    return CONTIGUOUS if all(0 < window < settings.data.seq for window in settings.model.windows) else ZIGZAG


def contexts(settings: Settings, devices: int) -> list[tuple[int, str]]:
    """Sizes of cp worth trying on this number of devices, each with the forms of context parallelism. Sizes above 1 are
    tried only if the settings have context ranks, or fewer rows than there are devices."""
    tried = [(1, settings.layout.context)]
    if settings.mesh.cp > 1 or settings.data.global_batch < ranks_beside(settings.mesh) * devices:
        sizes = [cp for cp in divisors(devices) if cp > 1 and settings.data.seq % (2 * cp) == 0]
        tried += itertools.product(sizes, CONTEXTS)
    return tried


def expert_ranks(model: ModelConfig, devices: int) -> list[int]:
    """Sizes of ep worth trying on this number of devices: only 1 if no layer has experts, since ep would act as dp.

    >>> expert_ranks(ModelConfig(layers=2, layers_of="moe*2", experts=12), 8), expert_ranks(ModelConfig(), 8)
    ([1, 2, 4], [1])
    """
    return [ep for ep in divisors(devices) if model.experts % ep == 0] if model.has_mixtures else [1]


def _context_fits(model: ModelConfig, cp: int, tp: int, context: str) -> bool:
    try:
        check_context(model, context, {"cp": cp, "tp": tp})
    except ConfigError:
        return False
    return True


def model_on_topology(settings: Settings, topology: Topology) -> ShardedModel:
    """The model on an abstract mesh. A ParallaxError says why the layout is not legal on a topology, or that the speed
    of the attention kernel on its chips is unknown."""
    kernel, chip = settings.model.kernel, topology.chip
    check_kernel_on(settings.model, chip.platform, chip.name)
    if chip.platform in ATTENTION_KERNELS[kernel].interpreted:
        raise ConfigError(
            f"model.kernel={kernel!r} is interpreted on {chip.platform.upper()}s, so no plan knows its speed; "
            "use kernel='xla', or --topology for chips that have it."
        )
    axis_between_slices(settings.mesh.sizes, topology.slices)
    hosts = hosts_of_experts(settings, topology) if chip.platform == "gpu" else None
    layout, ranks = settings.layout, settings.mesh.ep
    check_exchange(layout, ranks, chip.platform, hosts)
    check_ragged(layout, ranks, chip.name, topology.slice_chips)
    if layout.exchange == AUTO and ranks > 1:  # an abstract mesh does not say which chips it is for
        exchange = exchange_of(AUTO, settings.model, ranks, ragged=topology.has_ragged)
        settings = dataclasses.replace(settings, layout=dataclasses.replace(layout, exchange=exchange))
    mesh = abstract_mesh(settings.mesh.sizes, simulated=settings.mesh.simulate > 0, gpu=chip.gpu)
    model = model_of(settings, mesh)
    model.check_batch(settings.data.global_batch, settings.data.seq)
    predicted_state(model)  # for its checks
    return model


def build_if_legal(settings: Settings, topology: Topology) -> ShardedModel | None:
    """The model, or None if the layout is not legal."""
    try:
        return model_on_topology(settings, topology)
    except ParallaxError:
        return None
