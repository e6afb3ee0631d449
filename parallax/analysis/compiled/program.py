"""Reads a compiled step: memory, the order of events on a device, collectives, cycles and FLOPs."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from parallax.analysis.compiled.hlo import (
    COLLECTIVES,
    RAGGED_EXCHANGE,
    Computation,
    Instruction,
    Module,
    arrays_of,
    axes_of,
    float_dims,
    groups_of,
    of_update,
    parse_hlo,
    shape_bytes,
)
from parallax.analysis.compiled.roofline import FUSIONS, moved_bytes, roofline_secs
from parallax.analysis.traced.collectives import sent_bytes
from parallax.analysis.traced.flops import grouped_flops
from parallax.analysis.traced.recompute import forward_flops, recomputed_flops
from parallax.config.sections import ModelConfig
from parallax.errors import ConfigError
from parallax.hardware.chips import Chip, chip
from parallax.model.experts.experts import USUAL_LOAD
from parallax.model.experts.grouped_kernel import GROUPED_SCOPE
from parallax.model.experts.hosts import share_between_hosts
from parallax.model.experts.ragged import SENT
from parallax.model.kernels.flops import kernel_flops
from parallax.model.mask import WINDOW, order_in, window_in
from parallax.model.transformer import Block
from parallax.pipeline import BACKWARD, FORWARD, JOINT, WEIGHTS, ShardedModel
from parallax.schedules import Costs, Schedule
from parallax.schedules.pricing import USUAL
from parallax.sharding.collectives import BRANCH
from parallax.sharding.plan import GRADIENTS
from parallax.step.step import UPDATE, TrainStep

PASSES = FORWARD, BACKWARD, WEIGHTS, JOINT
LOOP_FOR_BRANCH = f"{BRANCH}/while"  # the end of the name of a loop of at most one turn: see `changed_over_pp`


class Share(NamedTuple):
    """Share of a conditional's executions that take the second branch, which does the work.

    `average` is that of an average rank; `lockstep` that of the slowest rank, for which the others wait.
    """

    average: float
    lockstep: float


Shares = dict[str, Share]


def costs_of(model: ModelConfig, remat: str, *, seq: int) -> Costs:
    """Cost of each pass relative to a forward pass; `recompute` is the share that the backward pass repeats."""
    again = recomputed_flops(model, remat, seq=seq) / forward_flops(model, seq=seq)
    return Costs(forward=1, backward=2 + again, weights=1)


def shares_of(schedule: Schedule, costs: Costs = USUAL) -> Shares:
    """Shares by name of the conditional: "F", "B" and "W" for whether a rank runs this pass in a tick, "F/end" and
    "B/end" for whether it then runs the pipeline's first or last stage, "exit" for the head. If F and B of a tick are
    one pass, "FB" is that pass, with "FB/F/end" and "FB/B/end", and "F" and "B" are alone.

    A tick lasts as long as its slowest rank, so time depends on how often that rank runs each pass. `costs` determine
    the slowest rank. If the tick runs the head, in which all ranks take part between F and the rest, the slowest rank
    is determined separately before and after it; if F and B are one pass, it comes last.
    """
    time_of = costs.of(schedule)
    acts = {kind: table >= 0 for kind, table in schedule.microbatch.items()}
    turns = {kind: segment.stop - segment.start for segment in schedule.segments for kind in segment.kinds}
    if schedule.both.any():
        acts |= {kind: acts[kind] & ~schedule.both for kind in (FORWARD, BACKWARD)} | {JOINT: schedule.both}
        time_of[JOINT] = time_of[FORWARD] + time_of[BACKWARD] - costs.hidden / schedule.virtual
        turns[JOINT] = turns[FORWARD]
    critical = {kind: _critical(schedule, acts, time_of, kind) for kind in acts}
    taken = {kind: (acts[kind].mean(axis=1).sum() / turns[kind], critical[kind].sum() / turns[kind]) for kind in acts}
    for scope, kind in [(name, kind) for name in acts for kind in name if kind != WEIGHTS]:
        at_end = acts[scope] & (schedule.message[kind] < 0)
        slowest_at_end, slowest = critical[scope] & at_end.any(axis=1), max(critical[scope].sum(), 1)
        name = scope if scope == kind else f"{scope}/{kind}"
        taken[f"{name}/end"] = at_end.sum() / acts[scope].sum(), slowest_at_end.sum() / slowest
    taken["exit"] = ((schedule.exit_microbatch >= 0).sum() / turns["F"],) * 2
    return {name: Share(*map(float, shares)) for name, shares in taken.items()}


def shares_of_windows(windows: Sequence[int]) -> Shares:
    """The shares of layers with each window, by its scope.

    >>> shares_of_windows([8, 8, 8, 0])
    {'window_of_8': Share(average=0.75, lockstep=0.75)}
    """
    counts = Counter(windows)
    return {f"{WINDOW}{window}": Share(*[count / len(windows)] * 2) for window, count in counts.items() if window}


def _critical(schedule: Schedule, acts: dict, time_of: dict[str, float], kind: str) -> np.ndarray:
    """`[tick]`: whether the slowest rank runs this pass."""
    exits = (schedule.exit_microbatch >= 0) & (JOINT not in acts)
    together = np.zeros((schedule.ticks, schedule.ranks))
    for other in acts:
        apart = exits & ((other == "F") != (kind == "F"))
        together += np.where(apart[:, None], 0, acts[other] * time_of[other])
    slowest = together.argmax(axis=1)
    return acts[kind][np.arange(schedule.ticks), slowest]


def name_of(op_name: str) -> str:
    """The name of a conditional in `shares_of`, from its operation's name; "" if it has none, as in a loop over layers,
    where stages differ.

    >>> name_of("jit(step)/while/body/closed_call/F/cond"), name_of("jit(step)/while/body/F/cond/branch_1_fun/cond")
    ('F', 'F/end')
    >>> name_of("jit(step)/while/body/FB/cond/branch_1_fun/F/cond"), name_of("jit(step)/while/body/B/cond/while")
    ('FB/F/end', 'B')
    >>> name_of("step/body/F/cond/while/body/cond"), name_of("step/body/F/cond/while/body/while/body/cond")
    ('F/end', '')
    """
    parts = op_name.removesuffix("/while").split("/")
    if parts[-1] != BRANCH or "body" not in parts:
        return ""
    scopes = [index for index, part in enumerate(parts) if part in PASSES]
    of_pass = parts[scopes[0] if scopes else 0 :]
    outermost = of_pass.count(BRANCH) == 1
    if not scopes:
        return "exit" if outermost else ""
    if outermost:
        return parts[scopes[0]]
    inside = of_pass[of_pass.index(BRANCH) + 1 : -1]  # beginning with "while" where a loop is the branch
    if "while" in (inside[1:] if inside[:1] == ["while"] else inside):
        return ""
    return "/".join([*dict.fromkeys((parts[scopes[0]], parts[scopes[-1]])), "end"])


SIDE = re.compile(rf"branch_\d+_fun/[\w(]*{WINDOW}(\d+)")  # what is within a window's side of a conditional
CUDNN_CALLS = ("cudnn_", "__cudnn$fmha")  # for GPUs that are not present, and for those that are
TRITON_CALL = re.compile(r"\bmha_\w+")  # attention for Triton; XLA gives all Pallas calls one name
KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call", *CUDNN_CALLS)
GEMM = "__cublas"
SCALED_DOT = "__cudnn$blockScaledDot"
# Prefixes of names of grouped products: the TPU compiler's own, and JAX's for gradients.
GROUPED_KERNELS = ("ragged-dot", "gmm", "tgmm")
EIGHT_BIT_OPERANDS = {"s8": "int8", "f8e4m3fn": "float8", "f8e5m2": "float8"}  # as in ModelConfig
KIND_OF_HLO = {name: name for name in COLLECTIVES} | {"collective-permute": "permute", RAGGED_EXCHANGE: "all-to-all"}
IN_TURN = '"is_sync":true'  # of a collective that XLA for GPU runs synchronously


class CompiledCollective(NamedTuple):
    """A collective of the compiled program; in a timeline, its start.

    `bytes` is what a device sends in one call. `count` is the number of calls by an average device in a step, with all
    iterations of loops and with branches as the schedule takes them; `lockstep_count` is that of the slowest rank.
    `cycles_between` is the compute between start and end of one call. `merged` is the number of arrays sent together.
    `source` is its name in the traced program or, if the compiler dropped that, its operand's. `pairs` are a
    permutation's senders and receivers, empty for other collectives. `group` are the devices of one group of another
    collective, if they are not all devices along `axes`.
    """

    kind: str  # "all-gather" "reduce-scatter" "all-reduce" "all-to-all" "permute"
    axes: tuple[str, ...]
    bytes: int
    count: float
    lockstep_count: float
    asynchronous: bool
    cycles_between: float
    op: str
    source: str
    merged: int
    pairs: tuple[tuple[int, ...], ...]
    group: tuple[int, ...]

    @property
    def shift(self) -> int:
        """Distance, in devices, that most messages of a permutation travel; 0 for other collectives."""
        return int(np.median([receiver - sender for sender, receiver in self.pairs])) if self.pairs else 0


class Compute(NamedTuple):
    """Compute of one part of the model: cycles (0 if unknown) and FLOPs of matrix products. `product` says whether the
    cycles are a matrix product's."""

    cycles: float
    flops: int
    module: str
    product: bool


class End(NamedTuple):
    op: str


class LoopEvent(NamedTuple):
    trips: int
    body: list


class BranchEvent(NamedTuple):
    """Sides of a branch, with the share of executions that take each: on an average rank and on the slowest rank."""

    average: tuple[float, ...]
    lockstep: tuple[float, ...]
    sides: list[list]


class Kernel(NamedTuple):
    """A Pallas call or a gather of rows, for which the compiler estimates no cycles. `flops` is 0 for kernels that are
    neither this project's nor grouped products. For grouped products only the rows in use count. `matmul` is as in
    ModelConfig."""

    name: str
    source: str
    operand_bytes: int
    result_bytes: int
    flops: int
    grouped: bool = False
    matmul: str = "compute"


class TimelineReader:
    """Reads the timeline of a module on a mesh. `unknown` collects loops whose trip count depends on data; their body
    counts once.

    Cycles are the compiler's estimates. The compiler for a `gpu` has none; there they are the roofline's time in the
    GPU's clock cycles.
    """

    def __init__(
        self, module: Module, mesh: Mesh, shares: Shares | None, share_of_rows: float = 1.0, gpu: Chip | None = None
    ):
        self.module, self.mesh, self.shares, self.share_of_rows, self.gpu = module, mesh, shares, share_of_rows, gpu
        self.sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
        self.unknown: list[str] = []
        self._read: dict[str, list] = {}

    def entry(self) -> list:
        """The whole program."""
        return self.computation(self.module.entry)

    def computation(self, name: str) -> list:
        """The events of one computation; consecutive compute of the same kind is one event."""
        if name not in self._read:
            events: list = []
            for event in self._events(self.module.computations[name]):
                if isinstance(event, Compute) and events and event[2:] == events[-1][2:]:
                    before = events.pop()
                    event = event._replace(cycles=before.cycles + event.cycles, flops=before.flops + event.flops)
                events.append(event)
            self._read[name] = [_with_cycles_between(event, events[index + 1 :]) for index, event in enumerate(events)]
        return self._read[name]

    def _events(self, computation: Computation) -> Iterator:
        left_out = self._other_kinds(computation)
        for op in computation.instructions:
            base = op.kind.removesuffix("-start").removesuffix("-done")
            if op.name in left_out:
                continue
            if _is_for_branch(op):
                yield self._branch(op, [[], self.computation(op.attribute("body"))])
            elif op.kind == "while":
                yield self._loop(op, computation)
            elif op.kind == "conditional":
                yield self._branch(op, [self.computation(name) for name in op.called])
            elif op.kind == "call":
                yield from self.computation(op.called[0])
            elif op.kind in (*FUSIONS, "async-start"):
                yield from self._fused(op, computation)
            elif op.kind in ("call-start", "call-update"):
                yield from self._offloaded(op, computation)
            elif op.kind.endswith("-done") and (base in COLLECTIVES or base in ("async", "call")):
                yield End(self._start_of(op, computation))
            elif base in COLLECTIVES:
                yield from self._collective(op, computation, op, computation)
            elif _is_kernel(op):
                yield self._kernel(op, computation)
            else:
                yield from self._compute(op, computation, [(computation, op)])

    def _compute(
        self, op: Instruction, computation: Computation, parts: Iterable[tuple[Computation, Instruction]]
    ) -> Iterator:
        products = [(part, home, flops) for home, part in parts if (flops := instruction_flops(part, home))]
        cycles, flops = op.cycles or 0, sum(flops for *_, flops in products)
        if self.gpu:
            moved = moved_bytes(op, computation, self.module)
            cycles = roofline_secs(products, moved, self.gpu) * self.gpu.clock_hz
        if cycles or flops:
            yield Compute(cycles, flops, module_of(op.op_name), op.op_name.endswith(PRODUCT))

    def _start_of(self, done: Instruction, computation: Computation) -> str:
        op = done
        while op.kind.endswith("-done") or op.kind in ("async-update", "call-update"):
            op = computation.find(op.operands[0])
        return op.name

    def _loop(self, op: Instruction, computation: Computation) -> LoopEvent:
        trips = self.module.trips(op, computation)
        if trips is None:
            self.unknown.append(op.op_name or op.name)
        return LoopEvent(1 if trips is None else trips, self.computation(op.attribute("body")))

    def _branch(self, op: Instruction, sides: list[list]) -> BranchEvent:
        share = (self.shares or {}).get(name_of(op.op_name))
        if self._is_for_usual_load(op):
            share = Share(1.0, 1.0)
        if taken := self._shares_of_windows(op):  # within a pass, after which the conditional seems to be called
            return BranchEvent(taken, taken, sides)
        if share is None or len(sides) != 2:
            dearest = max(range(len(sides)), key=lambda side: weight(sides[side]))
            only = tuple(float(side == dearest) for side in range(len(sides)))
            return BranchEvent(only, only, sides)
        return BranchEvent((1 - share.average, share.average), (1 - share.lockstep, share.lockstep), sides)

    def _other_kinds(self, computation: Computation) -> set[str]:
        """Of the loops for layers of several kinds, of which a place has one, all but the dearest."""
        of_places: dict[str, list[Instruction]] = defaultdict(list)
        for op in computation.instructions:
            if _is_for_branch(op) and not name_of(op.op_name):
                of_places[op.op_name].append(op)
        by_weight = (
            sorted(loops, key=lambda op: weight(self.computation(op.attribute("body")))) for loops in of_places.values()
        )
        return {op.name for loops in by_weight for op in loops[:-1]}

    def _is_for_usual_load(self, branch: Instruction) -> bool:
        """Whether the last side of a branch is that of experts with a usual load. The compiler may have dropped the
        branch's own name, and a side may be empty."""
        sides = [
            f"{USUAL_LOAD}/cond/branch_{number}" in op.op_name
            for number, side in enumerate(branch.called)
            for op in self.module.computations[side].instructions
        ]
        return any(sides)

    def _shares_of_windows(self, branch: Instruction) -> tuple[float, ...]:
        """The share of layers that take each side, if these are attention with different windows; else ()."""
        sides = [self.module.computations[side].instructions for side in branch.called]
        windows = [max((int(each[1]) for op in ops if (each := SIDE.search(op.op_name))), default=0) for ops in sides]
        taken = [(self.shares or {}).get(f"{WINDOW}{window}") for window in windows]
        if not any(windows) or len({*windows}) != len(windows) or taken.count(None) > (0 in windows):
            return ()
        rest = 1 - sum(share.average for share in taken if share)
        return tuple(share.average if share else rest for share in taken)

    def _fused(self, op: Instruction, computation: Computation) -> Iterator:
        """A fusion: compute, and possibly a collective or a piece of one."""
        inside = list(self._inside(op))
        for home, inner in inside:
            if inner.target == "AsyncCollectiveDone":
                yield End(chained(_operand_in_chain(home, inner)))
        for home, inner in inside:
            if inner.target == "AsyncCollectiveStart":
                piece = _operand_in_chain(home, inner)
                yield self._call(piece, home, op, computation, True)._replace(op=chained(piece))
            elif inner.kind in COLLECTIVES and not inner.chain:
                yield from self._collective(inner, home, op, computation)
        if op.cycles is None and not self.gpu and any(inner.kind == "gather" for _, inner in inside):
            rows = shape_bytes(op.shape)  # it reads what it writes, and says no cycles
            yield Kernel(op.name, op.op_name, rows, rows, 0)
        kernels = [] if self.gpu else [(home, inner) for home, inner in inside if _is_kernel(inner)]
        for home, inner in kernels:  # its results are written where a slice of something is updated
            yield self._kernel(inner, home)
        if not any(inner.kind in COLLECTIVES for _, inner in inside) or not self.gpu:
            yield from self._compute(op, computation, [part for part in inside if part not in kernels])

    def _offloaded(self, op: Instruction, caller: Computation) -> Iterator:
        """Work that is offloaded from the computing core: a collective on a SparseCore, or a gather of rows.

        It begins when its operands are ready. In programs of newer compilers the start has no operands; its update has.
        """
        start = caller.find(self._start_of(op, caller)) if op.kind == "call-update" else op
        if op.kind == "call-start" and not op.operands:
            return
        pieces = [(home, inner) for home, inner in self._inside(start) if inner.kind in COLLECTIVES]
        for home, piece in pieces:
            call = self._call(piece, home, start, caller, True)
            if call.axes:
                yield call
        if not pieces:  # it reads what it writes, and says no cycles
            result = shape_bytes(self._result(start, caller))
            yield Kernel(start.name, start.op_name, result, result, 0)

    def _result(self, start: Instruction, caller: Computation) -> str:
        done = (op for op in caller.instructions if op.kind == "call-done")
        return next((op.shape for op in done if self._start_of(op, caller) == start.name), "")

    def _inside(self, op: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """The instructions inside a fusion or a call, with their computation."""
        for name in op.called:
            home = self.module.computations[name]
            for inner in home.instructions:
                yield home, inner
                if inner.kind in ("fusion", "call", "call-start"):
                    yield from self._inside(inner)

    def _collective(self, piece: Instruction, home: Computation, outer: Instruction, caller: Computation) -> Iterator:
        """A collective of the computation `home`; `outer` is its instruction in the schedule, in `caller`."""
        apart = outer.kind.endswith("-start") and IN_TURN not in outer.rest
        call = self._call(piece, home, outer, caller, apart)
        if call.axes:
            yield call
            if not call.asynchronous:
                yield End(call.op)

    def _call(
        self, piece: Instruction, home: Computation, outer: Instruction, caller: Computation, asynchronous: bool
    ) -> CompiledCollective:
        kind = piece.kind.removesuffix("-start")
        groups = groups_of(piece.rest, self.mesh.size)
        axes, members = axes_of(groups, self.sizes), len(groups[0])
        operand = self._operand_bytes(piece, home)
        if kind == "all-reduce" and "all-reduce-scatter" in home.name:
            kind = "reduce-scatter"  # the TPU compiler writes it as a fusion of a sum and a slice of it
        return CompiledCollective(
            kind=KIND_OF_HLO[kind],
            axes=axes,
            bytes=sent_bytes(KIND_OF_HLO[kind], operand, members),
            count=0,
            lockstep_count=0,
            asynchronous=asynchronous,
            cycles_between=0,
            op=outer.name,
            source=self._source(piece, outer, caller),
            merged=len(piece.operands) if KIND_OF_HLO[kind] != "all-to-all" else 1,
            pairs=tuple(groups) if kind == "collective-permute" else (),
            group=groups[0] if 2 <= members < math.prod(self.sizes[axis] for axis in axes) else (),
        )

    def _operand_bytes(self, piece: Instruction, home: Computation) -> int:
        """Bytes of the operands that are sent; of a ragged exchange, only rows in use."""
        sizes = [shape_bytes(home.shape_of(name)) for name in piece.operands]
        if not piece.kind.startswith(RAGGED_EXCHANGE):
            return sum(sizes)
        # Input and output come first, then offsets and sizes. On the side of experts there is more room than rows.
        rows, of_experts = sizes[:2] if SENT in piece.op_name else sizes[1::-1]
        if share := share_between_hosts(piece.op_name):
            return round(share * max(sizes[:2]))
        return min(rows, round(self.share_of_rows * of_experts))

    def _source(self, piece: Instruction, outer: Instruction, computation: Computation) -> str:
        """Operation name; merged collectives have none and take that of their first operand."""
        operands = (computation.find(name) for name in outer.operands)
        return next((op.op_name for op in (piece, outer, *operands) if op is not None and op.op_name), "")

    def _kernel(self, op: Instruction, computation: Computation) -> Kernel:
        shapes = [computation.shape_of(name) for name in op.operands]
        operands, result, flops = sum(map(shape_bytes, shapes)), shape_bytes(op.shape), _kernel_flops(op, computation)
        if _is_grouped(op):
            operands, result = round(sum(map(self._used_bytes, shapes))), round(self._used_bytes(op.shape))
            flops = round(self.share_of_rows * flops)
        # Attention kernels multiply in the model's dtype; 8-bit operands of theirs are tables of masks.
        matmul = _matmul(shapes) if _is_grouped(op) else "compute"
        return Kernel(op.name, op.op_name, operands, result, flops, _is_grouped(op), matmul)

    def _used_bytes(self, shape: str) -> float:
        """Bytes of a grouped product's operand or result, of rows only those in use."""
        return shape_bytes(shape) * (self.share_of_rows if _has_rows(shape) else 1)


def executed(events: list, average: float = 1.0, lockstep: float = 1.0) -> Iterator[tuple[Any, float, float]]:
    """All events except loops and branches, with the number of times that an average rank and the slowest rank execute
    each in a step."""
    for event in events:
        if isinstance(event, LoopEvent):
            yield from executed(event.body, average * event.trips, lockstep * event.trips)
        elif isinstance(event, BranchEvent):
            for side, *shares in zip(event.sides, event.average, event.lockstep, strict=True):
                yield from executed(side, average * shares[0], lockstep * shares[1])
        else:
            yield event, average, lockstep


def weight(events: list) -> tuple[float, float, float]:
    """Cost of one pass through a timeline on the slowest rank: FLOPs, cycles, bytes sent. FLOPs come first, since
    kernels have no others: so ordered, it tells the dearest side of a branch."""
    cycles, flops, sent = 0.0, 0.0, 0.0
    for event, _, count in executed(events):
        if isinstance(event, Compute):
            cycles += count * event.cycles
            flops += count * event.flops
        elif isinstance(event, Kernel):
            flops += count * event.flops
        elif isinstance(event, CompiledCollective):
            sent += count * event.bytes
    return flops, cycles, sent


def _with_cycles_between(event: Any, after: list) -> Any:
    """A collective with the cycles of compute until its end; other events are unchanged."""
    if not isinstance(event, CompiledCollective):
        return event
    last = next(
        (index for index, other in enumerate(after) if isinstance(other, End) and other.op == event.op), len(after)
    )
    return event._replace(cycles_between=weight(after[:last])[1])


def _operand_in_chain(home: Computation, op: Instruction) -> Instruction:
    """The collective that a custom call starts or ends."""
    operands = map(home.find, op.operands)
    return next(operand for operand in operands if operand is not None and operand.chain)


def chained(piece: Instruction) -> str:
    """The name of a collective in several pieces, of which this is one, in a timeline."""
    return f"{piece.kind} of chain {piece.chain}"


class CompiledFlops(NamedTuple):
    """FLOPs of matrix products that an average device executes in a step, 2 for each multiply-add: for loss and
    gradients, which can be traced, and for the update of the parameters. Products with the zeros of a padded or dilated
    operand are not counted."""

    passes: float
    update: float


class Compiled(NamedTuple):
    """A compiled program. Sizes are bytes on a device, 0 if only its text was read.

    `peak` is the compiler's figure for the most bytes at any moment. XLA for CPU leaves temporaries out of it, so use
    `together` for what a device must have. `cycles` are of compute on the slowest rank, with all iterations of loops;
    None if unknown: see `TimelineReader`. The trip count of `unknown_loops` depends on data, and they count once.
    """

    collectives: list[CompiledCollective]
    cycles: float | None
    flops: CompiledFlops
    pallas_calls: list[Kernel]
    unknown_loops: list[str]
    mesh: Mesh
    timeline: list
    modules: dict[str, list[float]]  # cycles in products and in the rest
    arguments: int = 0
    temporaries: int = 0
    outputs: int = 0
    aliased: int = 0
    peak: int = 0

    @property
    def together(self) -> int:
        """Arguments, results that do not reuse their buffers, and temporaries."""
        return self.arguments + self.temporaries + self.outputs - self.aliased


def read_step(compiled: jax.stages.Compiled, model: ShardedModel, *, seq: int) -> Compiled:
    """`read_compiled` for a training step of this model on rows of `seq` tokens; the remat policy sets the costs of
    passes."""
    costs = costs_of(model.config, model.pipeline.remat, seq=seq)
    shares = shares_of(model.schedule, costs) | shares_of_windows(model.config.windows)
    return read_compiled(compiled, model.mesh, shares, model.share_of_rows)


def read_compiled(
    compiled: jax.stages.Compiled, mesh: Mesh, branch_shares: Shares | None = None, share_of_rows: float = 1.0
) -> Compiled:
    """Read the result of `jax.jit(step).lower(...).compile()` on this mesh.

    `branch_shares` say how often each branch runs: see `shares_of` and `shares_of_windows`. Conditionals without a
    share are assumed to take the more expensive branch. `share_of_rows` is that of their rows that a mixture's products
    use.
    """
    sizes = compiled.memory_analysis()
    read = read_hlo_text(compiled.as_text(), mesh, branch_shares, share_of_rows, gpu_of(mesh))._replace(
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        outputs=sizes.output_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
    )
    # The compiler's peak counts arrays in host memory, too. What is on the device may be more than its peak.
    on_host = any(getattr(sizes, f"host_{kind}_size_in_bytes") for kind in ("argument", "output", "temp"))
    return read._replace(peak=read.together if on_host else sizes.peak_memory_in_bytes)


def gpu_of(mesh: Mesh | None) -> Chip | None:
    """The mesh's GPU model, or None for other devices, unknown GPUs and no mesh."""
    if mesh is None:
        return None
    device = mesh.devices.flat[0]
    try:
        return chip(device.device_kind) if device.platform == "gpu" else None
    except ConfigError:
        return None


def read_hlo_text(
    text: str,
    mesh: Mesh,
    branch_shares: Shares | None = None,
    share_of_rows: float = 1.0,
    gpu: Chip | None = None,
) -> Compiled:
    """The same from the program's text alone, without sizes; times of a `gpu` program come from a roofline."""
    reader = TimelineReader(parse_hlo(text), mesh, branch_shares, share_of_rows, gpu)
    timeline = reader.entry()
    collectives: dict[str, CompiledCollective] = {}
    modules: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    flops, kernels = [0.0, 0.0], []
    for event, average, lockstep in executed(timeline):
        if isinstance(event, Compute):
            modules[event.module][not event.product] += event.cycles * lockstep
            flops[event.module == UPDATE] += event.flops * average
        elif isinstance(event, Kernel):
            flops[of_update(event.source)] += event.flops * average
            kernels.append(event)
        elif isinstance(event, CompiledCollective):
            call = collectives.get(event.op, event)
            collectives[event.op] = call._replace(
                count=call.count + average, lockstep_count=call.lockstep_count + lockstep
            )
    return Compiled(
        collectives=list(collectives.values()),
        cycles=sum(map(sum, modules.values())) or None,
        flops=CompiledFlops(*flops),
        pallas_calls=kernels,
        unknown_loops=reader.unknown,
        mesh=mesh,
        timeline=timeline,
        modules=dict(modules),
    )


# Names in a stack that describe how the program is run, not a part of the model.
RUNNING = {TrainStep.train_step.__name__, "step", "shard_map", "while", "body", "closed_call", "eval_jaxpr", "cond"}
RUNNING |= {*PASSES, GRADIENTS, Block.__name__, ""}
PRODUCT = "dot_general"
SLICES = ("dynamic_slice", "dynamic_update_slice", "scatter-add", "slice", "add")
NO_COMPUTE = (*COLLECTIVES, "while", "conditional", "call")
SLOTS, ELSEWHERE = "slots and sums", "elsewhere"


class ModuleSecs(NamedTuple):
    """Seconds of a step on the slowest rank: in products, including what is fused with them, and in the rest."""

    module: str
    products: float
    others: float

    @property
    def total(self) -> float:
        return self.products + self.others


def secs_by_module(compiled: Compiled, clock_hz: float) -> list[ModuleSecs]:
    """The modules of a program, slowest first."""
    rows = [ModuleSecs(name, *(part / clock_hz for part in parts)) for name, parts in compiled.modules.items()]
    return sorted(rows, key=lambda row: -row.total)


def module_of(op_name: str) -> str:
    """The part of the model that an operation belongs to.

    >>> module_of("jit(train_step)/shard_map/while/body/B/while/body/transpose(jvp(Block))/mlp/up/dot_general")
    'mlp'
    >>> module_of("jit(train_step)/update/cond/branch_1_fun/add"), module_of("jit(train_step)/while/body/dynamic_slice")
    ('update', 'slots and sums')
    """
    if of_update(op_name):
        return UPDATE
    names, last = _parts(op_name)
    if names:
        return names[0] if "->" in names[0] else names[0].lower()
    return SLOTS if last in SLICES else ELSEWHERE


def module_path(op_name: str) -> str:
    """The path of the module that an operation belongs to; "" if it belongs to none.

    >>> module_path("jit(train_step)/while/body/transpose(jvp(Block))/mlp/up/up._product/BSD,DF->BSF/dot_general")
    'mlp/up'
    """
    names = (name for name in _parts(op_name)[0] if name not in (UPDATE, USUAL_LOAD))
    return "/".join(name for name in names if "." not in name and "->" not in name)


def _parts(op_name: str) -> tuple[list[str], str]:
    """The names in a stack that are parts of a model, and the operation."""
    # A function that is jitted separately, or is private, as jit(_where), is not a part of the model.
    *stack, last = re.sub(r"\w+\(|\)", "", re.sub(r"jit\(\w+\)/", "", op_name)).split("/")
    return [name for name in stack if name not in RUNNING and not name.startswith(("branch_", "_"))], last


def instruction_flops(op: Instruction, home: Computation) -> int:
    """FLOPs of an instruction of this computation if it is a matrix product; otherwise 0."""
    if op.kind == "dot":
        return _dot(op, home)
    if op.kind == "convolution":
        return _convolution(op, home)
    if op.kind == "custom-call":
        if op.target == SCALED_DOT:
            return 2 * math.prod(arrays_of(op.shape)[0][1]) * _dims(home, op.operands[0])[-1]
        return _gemm(op, home) if op.target.startswith(GEMM) else _kernel_flops(op, home)
    return 0


def _dot(op: Instruction, home: Computation) -> int:
    left = _dims(home, op.operands[0])
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.rest)[1]
    return 2 * math.prod(arrays_of(op.shape)[0][1]) * math.prod(left[int(dim)] for dim in contracted.split(",") if dim)


def _gemm(op: Instruction, home: Computation) -> int:
    """A product by cuBLAS."""
    left = _dims(home, op.operands[0])
    contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', op.rest)
    dims = re.findall(r"\d+", contracted[1]) if contracted else ()
    return 2 * math.prod(arrays_of(op.shape)[0][1]) * math.prod(left[int(dim)] for dim in dims)


def _convolution(op: Instruction, home: Computation) -> int:
    """The TPU compiler writes products as convolutions; batch dims become spatial ones, with zeros between."""
    left, right, out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.rest).groups()
    sizes = dict(zip(left, _dims(home, op.operands[0]))), dict(zip(right, _dims(home, op.operands[1])))
    result = dict(zip(out, arrays_of(op.shape)[0][1]))
    pairs = (
        _pairs(sizes[0][dim], sizes[1][dim], result[dim], window)
        for dim, window in zip(sorted(filter(str.isdigit, out)), _windows(op.rest))
    )
    return 2 * result["b"] * result["f"] * sizes[1]["i"] * math.prod(pairs)


def _pairs(size: int, kernel: int, out: int, window: dict[str, str]) -> int:
    """Number of pairs of output and kernel positions that read an entry of the input, along one dim."""
    stride, spread, apart = (int(window.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(window.get("pad", "0_0").split("_")[0])
    places = (position * stride + k * apart - low for position in range(out) for k in range(kernel))
    return sum(place % spread == 0 and 0 <= place < size * spread for place in places)


def _windows(rest: str) -> Iterator[dict[str, str]]:
    """The window's numbers, one dim after the other."""
    window = re.search(r"window=\{([^}]*)\}", rest)
    given = dict(part.split("=") for part in window[1].split()) if window else {}
    return (dict(zip(given, numbers)) for numbers in zip(*(value.split("x") for value in given.values())))


def _is_for_branch(op: Instruction) -> bool:
    return op.kind == "while" and op.op_name.endswith(LOOP_FOR_BRANCH)


def _is_kernel(op: Instruction) -> bool:
    return op.kind == "custom-call" and op.target.startswith(KERNELS)


def _is_grouped(op: Instruction) -> bool:
    # XLA for GPU gives all Pallas calls one name.
    return op.name.startswith(GROUPED_KERNELS) or (_is_kernel(op) and GROUPED_SCOPE in op.op_name.split("/"))


def _matmul(shapes: Sequence[str]) -> str:
    """The 8-bit dtype of a grouped product's operands, or "compute"."""
    kinds = (EIGHT_BIT_OPERANDS.get(dtype) for shape in shapes for dtype, _ in arrays_of(shape))
    return next(filter(None, kinds), "compute")


def _factors(shape: str) -> list[tuple[int, ...]]:
    """Dims of rows and matrices in a grouped product's operands or results, without the sizes of groups."""
    return [dims for _, dims in arrays_of(shape) if len(dims) > 1]


def _has_rows(shape: str) -> bool:
    """Whether a grouped product's operand or result are rows, not a matrix for each group or the groups' sizes."""
    return any(len(dims) == 2 for dims in _factors(shape))


def _kernel_flops(op: Instruction, home: Computation) -> int:
    if _is_grouped(op):
        operands = [dims for name in op.operands for dims in _factors(home.shape_of(name))]
        results = _factors(op.shape)  # empty if it only lists blocks
        return grouped_flops(*operands, results[0]) if results else 0
    name = op.name
    if triton := TRITON_CALL.search(op.op_name):
        name = triton[0]
    elif op.target.startswith(CUDNN_CALLS):
        name = "cudnn_bwd" if re.search("bwd|Backward", op.target) else "cudnn_fwd"
    shapes = [dims for name in op.operands for dims in float_dims(home.shape_of(name))]
    return kernel_flops(name, shapes, window_in(op.op_name), order_in(op.op_name)) or 0


def _dims(home: Computation, name: str) -> tuple[int, ...]:
    return arrays_of(home.find(name).shape)[0][1]
