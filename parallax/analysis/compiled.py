"""What the compiler made of a step: its memory, what a device does in turn, collectives, cycles and FLOPs."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from parallax.analysis.flops import parameters_by_component
from parallax.analysis.hlo import (
    COLLECTIVES,
    Computation,
    Instruction,
    Module,
    axes_of,
    float_dims,
    groups_of,
    of_update,
    parse,
    shape_bytes,
)
from parallax.model.kernels import kernel_flops
from parallax.pipeline import BACKWARD, FORWARD, WAIT, WEIGHTS, ShardedModel
from parallax.schedules import Costs, Schedule
from parallax.schedules.pricing import USUAL

PASSES = FORWARD + BACKWARD + WEIGHTS


class Share(NamedTuple):
    """How often a conditional takes its second branch, which does the work, as a share of its executions.

    `own` is the share of an average rank; `lockstep` that of the rank for which the others wait.
    """

    own: float
    lockstep: float


Shares = dict[str, Share]


def attention_share(shapes: Any) -> float:
    """Attention's share of a layer's parameters."""
    counts = parameters_by_component(shapes)
    return counts["attention"] / (counts["attention"] + counts["mlp"])


def costs_of(remat: str, attention: float) -> Costs:
    """Times of passes in units of a forward pass. Recomputing a layer costs one more; recomputing attention alone costs
    its share of the parameters."""
    again = {"none": 0.0, "elementwise": 0.0, "attention": attention}.get(remat, 1.0)
    return Costs(forward=1, backward=2 + again, weights=1)


def branch_shares(model: ShardedModel) -> Shares:
    """Branch shares of a model's step; its remat policy sets the costs of passes."""
    return shares_of(model.schedule, costs_of(model.pipeline.remat, attention_share(model.shapes)))


def shares_of(schedule: Schedule, costs: Costs = USUAL) -> Shares:
    """Shares by name of the conditional: "F", "B" and "W" for whether a rank runs this pass in a tick, "F/end" and
    "B/end" for whether it then stands at the pipeline's end, "exit" for the head.

    A tick lasts as long as its slowest rank, so that what counts for time is how often that rank runs each pass. Who is
    slowest follows from `costs`. Where the tick runs the head, in which all ranks join between F and the rest, the
    slowest is taken before and after it.
    """
    time_of = costs.of(schedule)
    acts = {kind: table >= 0 for kind, table in schedule.microbatch.items()}
    ends = {kind: acts[kind] & (schedule.message[kind] < 0) for kind in "FB"}
    turns = {kind: segment.stop - segment.start for segment in schedule.segments for kind in segment.kinds}
    critical = {kind: _critical(schedule, acts, time_of, kind) for kind in acts}
    share = lambda table, others: float(table.sum() / others)  # noqa: E731
    shares = {
        kind: Share(share(acts[kind].mean(axis=1), turns[kind]), share(critical[kind], turns[kind])) for kind in acts
    }
    for kind, at_end in ends.items():
        slowest_at_end = share(critical[kind] & at_end.any(axis=1), critical[kind].sum())
        shares[f"{kind}/end"] = Share(share(at_end, acts[kind].sum()), slowest_at_end)
    exits = share(schedule.exit_microbatch >= 0, turns["F"])
    return shares | {"exit": Share(exits, exits)}


def _critical(schedule: Schedule, acts: dict, time_of: dict[str, float], kind: str) -> np.ndarray:
    """`[tick]`: whether the rank that the others wait for runs this pass."""
    exits = schedule.exit_microbatch >= 0
    together = np.zeros((schedule.ticks, schedule.ranks))
    for other in acts:
        apart = exits & ((other == "F") != (kind == "F"))
        together += np.where(apart[:, None], 0, acts[other] * time_of[other])
    slowest = together.argmax(axis=1)
    return acts[kind][np.arange(schedule.ticks), slowest]


def name_of(op_name: str) -> str:
    """The name under which `shares_of` knows a conditional, from its operation's name; "" where it does not.

    >>> name_of("jit(step)/while/body/closed_call/F/cond"), name_of("jit(step)/while/body/F/cond/branch_1_fun/cond")
    ('F', 'F/end')
    """
    parts = op_name.split("/")
    if not parts or parts[-1] != "cond" or "body" not in parts:
        return ""
    scopes = [at for at, part in enumerate(parts) if re.fullmatch(f"[{PASSES}]", part)]
    within = list(_conds(parts[scopes[0] :] if scopes else parts))
    if not scopes:
        return "exit" if len(within) == 1 else ""
    return parts[scopes[0]] + ("" if len(within) == 1 else "/end")


def _conds(parts: list[str]) -> Iterator[int]:
    return (at for at, part in enumerate(parts) if part == "cond")


KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call")
KINDS = dict(zip(COLLECTIVES, (*COLLECTIVES[:-1], "permute"), strict=True))
PROJECT = "parallax/"


class CollectiveCall(NamedTuple):
    """A collective of the compiled program; `bytes` are what a device sends in one call of it.

    `pairs` are a permutation's senders and receivers, none for other collectives; `group` are the devices of one group
    of the others, where they are not all along `axes`.
    `merged` are the arrays that it moves together. `source` is the operation's name in the traced program, and where
    the compiler dropped that, its operand's; `line` is the innermost of this project's.
    """

    op: str
    kind: str  # "all-gather" "reduce-scatter" "all-reduce" "all-to-all" "permute"
    axes: tuple[str, ...]
    bytes: int
    merged: int
    pairs: tuple[tuple[int, ...], ...]
    group: tuple[int, ...]
    source: str
    line: str

    @property
    def shift(self) -> int:
        """How many devices further a permutation's messages go, most of them; 0 for other collectives."""
        return int(np.median([receiver - sender for sender, receiver in self.pairs])) if self.pairs else 0


class Compute(NamedTuple):
    """Cycles of compute of one part of the model; `product` says whether they are a matrix product's."""

    cycles: int
    module: str
    product: bool


class Begin(NamedTuple):
    call: CollectiveCall
    asynchronous: bool


class End(NamedTuple):
    op: str


class LoopEvent(NamedTuple):
    trips: int
    body: list


class BranchEvent(NamedTuple):
    """Sides with the share of times that each is taken: by an average rank, and by the one that others wait for."""

    own: tuple[float, ...]
    lockstep: tuple[float, ...]
    sides: list[list]


class Kernel(NamedTuple):
    """A Pallas call, to which the compiler gives no cycles; `flops` are 0 for kernels that are not of this project."""

    name: str
    source: str
    operand_bytes: int
    result_bytes: int
    flops: int


class TimelineReader:
    """Reads the timeline of a module on a mesh; `unknown` collects loops whose turns depend on data, counted once."""

    def __init__(self, module: Module, mesh: Mesh, shares: Shares | None):
        self.module, self.mesh, self.shares = module, mesh, shares
        self.sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
        self.unknown: list[str] = []
        self._read: dict[str, list] = {}

    def entry(self) -> list:
        """The whole program."""
        return self.computation(self.module.entry)

    def computation(self, name: str) -> list:
        """What one computation does; compute that follows compute of the same kind is one event."""
        if name not in self._read:
            events: list = []
            for event in self._events(self.module.computations[name]):
                if isinstance(event, Compute) and events and event[1:] == events[-1][1:]:
                    event = event._replace(cycles=events.pop().cycles + event.cycles)
                events.append(event)
            self._read[name] = events
        return self._read[name]

    def _events(self, computation: Computation) -> Iterator:
        for one in computation.instructions:
            base = one.kind.removesuffix("-start").removesuffix("-done")
            if one.kind == "while":
                yield self._loop(one, computation)
            elif one.kind == "conditional":
                yield self._branch(one)
            elif one.kind == "call":
                yield from self.computation(one.called[0])
            elif one.kind in ("fusion", "async-start"):
                yield from self._fused(one, computation)
            elif one.kind in ("call-start", "call-update"):
                yield from self._offloaded(one, computation)
            elif one.kind.endswith("-done") and (base in COLLECTIVES or base in ("async", "call")):
                yield End(self._start_of(one, computation))
            elif base in COLLECTIVES:
                yield from self._collective(one, computation, one, computation)
            elif one.kind == "custom-call" and one.target in KERNELS:
                yield self._kernel(one, computation)
            elif one.cycles:
                yield Compute(one.cycles, module_of(one.op_name), one.op_name.endswith(PRODUCT))

    def _start_of(self, done: Instruction, computation: Computation) -> str:
        one = done
        while one.kind.endswith("-done") or one.kind in ("async-update", "call-update"):
            one = computation.find(one.operands[0])
        return one.name

    def _loop(self, one: Instruction, computation: Computation) -> LoopEvent:
        trips = self.module.trips(one, computation)
        if trips is None:
            self.unknown.append(one.op_name or one.name)
        return LoopEvent(1 if trips is None else trips, self.computation(one.attribute("body")))

    def _branch(self, one: Instruction) -> BranchEvent:
        sides = [self.computation(name) for name in one.called]
        share = (self.shares or {}).get(name_of(one.op_name))
        if share is None or len(sides) != 2:
            dearest = max(range(len(sides)), key=lambda at: weight(sides[at]))
            only = tuple(float(at == dearest) for at in range(len(sides)))
            return BranchEvent(only, only, sides)
        return BranchEvent(_two(share.own), _two(share.lockstep), sides)

    def _fused(self, one: Instruction, computation: Computation) -> Iterator:
        """A fusion: compute, and possibly a collective or a piece of one."""
        inside = list(self._inside(one))
        for home, inner in inside:
            if inner.target == "AsyncCollectiveDone":
                yield End(_chained(_operand_in_chain(home, inner)))
        for home, inner in inside:
            if inner.target == "AsyncCollectiveStart":
                piece = _operand_in_chain(home, inner)
                yield Begin(self._call(piece, home, one, computation)._replace(op=_chained(piece)), True)
            elif inner.kind in COLLECTIVES and not inner.chain:
                yield from self._collective(inner, home, one, computation)
        if one.cycles:
            yield Compute(one.cycles, module_of(one.op_name), one.op_name.endswith(PRODUCT))

    def _offloaded(self, one: Instruction, caller: Computation) -> Iterator:
        """What a core beside the one that computes does: a collective of a SparseCore, or a gather of rows.

        It begins where its operands are there. In programs of newer compilers a start has none, and its update has.
        """
        start = caller.find(self._start_of(one, caller)) if one.kind == "call-update" else one
        if one.kind == "call-start" and not one.operands:
            return
        pieces = [(home, inner) for home, inner in self._inside(start) if inner.kind in COLLECTIVES]
        for home, piece in pieces:
            call = self._call(piece, home, start, caller)
            if call.axes:
                yield Begin(call, True)
        if not pieces:  # it reads what it writes, and says no cycles
            result = shape_bytes(self._result(start, caller))
            yield Kernel(start.name, start.op_name, result, result, 0)

    def _result(self, start: Instruction, caller: Computation) -> str:
        done = (one for one in caller.instructions if one.kind == "call-done")
        return next((one.shape for one in done if self._start_of(one, caller) == start.name), "")

    def _inside(self, one: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """What a fusion or a call holds, and in which computation."""
        for name in one.called:
            home = self.module.computations[name]
            for inner in home.instructions:
                yield home, inner
                if inner.kind in ("fusion", "call", "call-start"):
                    yield from self._inside(inner)

    def _collective(self, piece: Instruction, home: Computation, outer: Instruction, caller: Computation) -> Iterator:
        """A collective of the computation `home`; `outer` is what stands for it in the schedule, in `caller`."""
        apart = outer.kind.endswith("-start")
        call = self._call(piece, home, outer, caller)
        if call.axes:
            yield Begin(call, apart)
            if not apart:
                yield End(call.op)

    def _call(self, piece: Instruction, home: Computation, outer: Instruction, caller: Computation) -> CollectiveCall:
        kind = piece.kind.removesuffix("-start")
        groups = groups_of(piece.rest, self.mesh.size)
        axes, members = axes_of(groups, self.sizes), len(groups[0])
        operand = sum(shape_bytes(_shape(home, name)) for name in piece.operands)
        if kind == "all-reduce" and "all-reduce-scatter" in home.name:
            kind = "reduce-scatter"  # the TPU compiler writes it as a fusion of a sum and a slice of it
        return CollectiveCall(
            outer.name,
            KINDS[kind],
            axes,
            sent_bytes(KINDS[kind], operand, members),
            len(piece.operands) if kind != "all-to-all" else 1,
            tuple(groups) if kind == "collective-permute" else (),
            groups[0] if 2 <= members < math.prod(self.sizes[axis] for axis in axes) else (),
            *self._origin(piece, outer, caller),
        )

    def _origin(self, piece: Instruction, outer: Instruction, computation: Computation) -> tuple[str, str]:
        """Operation name and source line; merged collectives have none, and take those of their first operand."""
        operands = (computation.find(name) for name in outer.operands)
        known = (one for one in (piece, outer, *operands) if one is not None and one.op_name)
        one = next(known, piece)
        for file, number in self.module.lines(one):
            at = file.rfind(PROJECT)
            if at >= 0 and not file.endswith("collectives.py"):
                return one.op_name, f"{file[at:]}:{number}"
        return one.op_name, ""

    def _kernel(self, one: Instruction, computation: Computation) -> Kernel:
        shapes = [_shape(computation, name) for name in one.operands]
        flops = kernel_flops(one.name, [dims for shape in shapes for dims in float_dims(shape)]) or 0
        return Kernel(one.name, one.op_name, sum(map(shape_bytes, shapes)), shape_bytes(one.shape), flops)


def sent_bytes(kind: str, operand: int, members: int) -> int:
    """Bytes that a device sends in one collective among `members`, from those of its operands.

    >>> sent_bytes("all-gather", 100, 4), sent_bytes("all-reduce", 100, 4), sent_bytes("permute", 100, 0)
    (300, 150, 100)
    """
    if kind == "permute":
        return operand
    if kind == "all-gather":
        return operand * (members - 1)
    return (1 + (kind == "all-reduce")) * operand * (members - 1) // members


def weight(events: list) -> tuple[float, float]:
    """What one pass through a timeline costs on the rank that the others wait for: cycles, and bytes sent."""
    cycles, sent = 0.0, 0.0
    for event in events:
        if isinstance(event, Compute):
            cycles += event.cycles
        elif isinstance(event, Begin):
            sent += event.call.bytes
        elif isinstance(event, LoopEvent):
            inner = weight(event.body)
            cycles, sent = cycles + event.trips * inner[0], sent + event.trips * inner[1]
        elif isinstance(event, BranchEvent):
            for share, side in zip(event.lockstep, event.sides, strict=True):
                inner = weight(side)
                cycles, sent = cycles + share * inner[0], sent + share * inner[1]
    return cycles, sent


def _two(share: float) -> tuple[float, float]:
    return 1 - share, share


def _operand_in_chain(home: Computation, one: Instruction) -> Instruction:
    """The collective that a custom call starts or ends."""
    operands = map(home.find, one.operands)
    return next(found for found in operands if found is not None and found.chain)


def _chained(piece: Instruction) -> str:
    return f"{piece.kind} of chain {piece.chain}"


def _shape(computation: Computation, name: str) -> str:
    one = computation.find(name)
    return one.shape if one is not None else ""


class CompiledCollective(NamedTuple):
    """A collective of the compiled program.

    `bytes` are what a device sends in one call. `count` is how often an average device calls it in a step, with loops
    turned and branches as the schedule takes them; `lockstep_count` how often the rank that the others wait for does.
    `cycles_between` are those of compute between its start and its end, in one call. `merged` arrays move together.
    `source` is its name in the traced program, `line` this project's line that asked, "" where the compiler lost it.
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
    line: str
    merged: int


class Compiled(NamedTuple):
    """A compiled program; sizes are in bytes for a device.

    `peak` is the compiler's word for the most at any moment; that of XLA for CPU leaves temporaries out, and `together`
    is what a device must have. `cycles` are of compute, loops turned, on the rank that the
    others wait for; None where the compiler gives none. `unknown_loops` turn as often as data says and count once.
    """

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    peak: int
    collectives: list[CompiledCollective]
    cycles: float | None
    pallas_calls: list[Kernel]
    unknown_loops: list[str]
    mesh: Mesh
    timeline: list
    text: str
    modules: dict[str, list[float]]  # cycles in products and in the rest

    @property
    def together(self) -> int:
        """Arguments, results that do not take their place, and temporaries."""
        return self.arguments + self.temporaries + self.outputs - self.aliased


def read_compiled(compiled: jax.stages.Compiled, mesh: Mesh, branch_shares: Shares | None = None) -> Compiled:
    """Read what `jax.jit(step).lower(...).compile()` gave on this mesh.

    `branch_shares` say how often each branch runs: see `shares_of`. Conditionals that they do not name, and all where
    there are none, are taken to run their dearer branch each time.
    """
    sizes, text = compiled.memory_analysis(), compiled.as_text()
    return read_text(text, mesh, branch_shares)._replace(
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        outputs=sizes.output_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        peak=sizes.peak_memory_in_bytes,
    )


def read_text(text: str, mesh: Mesh, branch_shares: Shares | None = None) -> Compiled:
    """The same from the program's text alone, without sizes."""
    reader = TimelineReader(parse(text), mesh, branch_shares)
    timeline = reader.entry()
    tally = Tally()
    tally.add(timeline, 1.0, 1.0)
    cycles, modules = sum(map(sum, tally.modules.values())) or None, dict(tally.modules)
    return Compiled(0, 0, 0, 0, 0, tally.made(), cycles, tally.kernels, reader.unknown, mesh, timeline, text, modules)


class Tally:
    """Counts what a timeline holds, with how often it runs."""

    def __init__(self):
        self.kernels: list[Kernel] = []
        self.modules: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._made: dict[str, list] = {}

    def add(self, events: list, own: float, lockstep: float) -> None:
        """Count these events, run so often on an average rank and on the one that others wait for."""
        for at, event in enumerate(events):
            if isinstance(event, Compute):
                self.modules[event.module][not event.product] += event.cycles * lockstep
            elif isinstance(event, LoopEvent):
                self.add(event.body, own * event.trips, lockstep * event.trips)
            elif isinstance(event, BranchEvent):
                for side, *shares in zip(event.sides, event.own, event.lockstep, strict=True):
                    self.add(side, own * shares[0], lockstep * shares[1])
            elif isinstance(event, Kernel):
                self.kernels.append(event)
            elif isinstance(event, Begin):
                self._add_call(event, _until_end(events[at + 1 :], event.call.op), own, lockstep)

    def _add_call(self, event: Begin, between: float, own: float, lockstep: float) -> None:
        call = event.call
        counts = self._made.setdefault(call.op, [event, between, 0.0, 0.0])
        counts[2] += own
        counts[3] += lockstep

    def made(self) -> list[CompiledCollective]:
        """The collectives in program order."""
        return [
            CompiledCollective(
                c.kind, c.axes, c.bytes, own, lock, e.asynchronous, between, c.op, c.source, c.line, c.merged
            )
            for e, between, own, lock in self._made.values()
            for c in [e.call]
        ]


def _until_end(events: list, op: str) -> float:
    last = next((at for at, event in enumerate(events) if isinstance(event, End) and event.op == op), len(events))
    return weight(events[:last])[0]


# Names that a stack has of how the program is run, and not of what it runs.
RUNNING = {"train_step", "step", "shard_map", "while", "body", "closed_call", "eval_jaxpr", "cond"}
RUNNING |= {*PASSES, WAIT, "Block", ""}
PRODUCT = "dot_general"
SLICES = ("dynamic_slice", "dynamic_update_slice", "scatter-add", "slice", "add")
NO_COMPUTE = (*COLLECTIVES, "while", "conditional", "call")
SLOTS, ELSEWHERE, UPDATE = "slots and sums", "elsewhere", "update"


class ModuleSecs(NamedTuple):
    """Seconds of a step on the rank that the others wait for: in products and what is fused with them, in the rest."""

    module: str
    products: float
    others: float

    @property
    def total(self) -> float:
        return self.products + self.others


def secs_by_module(compiled: Compiled, clock_hz: float) -> list[ModuleSecs]:
    """The modules of a program, those that take longest first."""
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
    # A function that is jitted by itself, or is private, as jit(_where), is no part of the model.
    *stack, last = re.sub(r"\w+\(|\)", "", re.sub(r"jit\(\w+\)/", "", op_name)).split("/")
    names = [name for name in stack if name not in RUNNING and not name.startswith(("branch_", "_"))]
    if names:
        return names[0] if "->" in names[0] else names[0].lower()
    return SLOTS if last in SLICES else ELSEWHERE


CALLS = ("fusion", "call", "async-start")
PRODUCTS = ("dot", "convolution", "custom-call")


class CompiledFlops(NamedTuple):
    """FLOPs of matrix products that an average device executes in a step: for loss and gradients, which can be traced,
    and for the update of the parameters."""

    passes: float
    update: float


def compiled_flops(text: str, shares: Shares | None = None) -> CompiledFlops:
    """FLOPs that an average device executes, 2 for each multiply-add, of a program as text.

    Loops turn as often as they say, once where that depends on data; branches are taken as `shares` say, and the
    dearest where they do not. What is multiplied by the zeros of a padded or spread operand is not counted.
    """
    module = parse(text)
    return CompiledFlops(
        *(ProductFlops(module, shares or {}, update).of(module.entry, False) for update in (False, True))
    )


class ProductFlops:
    """Adds FLOPs up, those of the update or the others, each computation once."""

    def __init__(self, module: Module, shares: Shares, update: bool):
        self.module, self.shares, self.update = module, shares, update
        self._known: dict[tuple[str, bool], float] = {}

    def of(self, name: str, within: bool) -> float:
        """Those of one computation and all that it calls; `within` says whether the update calls it."""
        if (name, within) not in self._known:
            home = self.module.computations[name]
            self._known[name, within] = sum(self._flops(one, home, within) for one in home.instructions)
        return self._known[name, within]

    def _flops(self, one: Instruction, home: Computation, within: bool) -> float:
        # What the compiler made without a name belongs to what calls it.
        within = of_update(one.op_name) if one.op_name else within
        if one.kind in PRODUCTS and within != self.update:
            return 0
        if one.kind == "dot":
            return _dot(one, home)
        if one.kind == "convolution":
            return _convolution(one, home)
        if one.kind == "custom-call":
            return _kernel(one, home)
        if one.kind == "while":
            return (self.module.trips(one, home) or 1) * self.of(one.attribute("body"), within)
        sides = [self.of(name, within) for name in one.called] if one.kind in (*CALLS, "conditional") else []
        return self._branch(one, sides) if one.kind == "conditional" else sum(sides)

    def _branch(self, one: Instruction, sides: list[float]) -> float:
        share = self.shares.get(name_of(one.op_name))
        if share is None or len(sides) != 2:
            return max(sides)
        return (1 - share.own) * sides[0] + share.own * sides[1]


def _dot(one: Instruction, home: Computation) -> int:
    left = _dims(home, one.operands[0])
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)[1]
    return 2 * math.prod(_array(one.shape)) * math.prod(left[int(dim)] for dim in contracted.split(",") if dim)


def _convolution(one: Instruction, home: Computation) -> int:
    """The TPU compiler writes products as convolutions; batch dims become spatial ones, with zeros between."""
    left, right, out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest).groups()
    sizes = dict(zip(left, _dims(home, one.operands[0]))), dict(zip(right, _dims(home, one.operands[1])))
    result = dict(zip(out, _array(one.shape)))
    pairs = (
        _pairs(sizes[0][dim], sizes[1][dim], result[dim], window)
        for dim, window in zip(sorted(filter(str.isdigit, out)), _windows(one.rest))
    )
    return 2 * result["b"] * result["f"] * sizes[1]["i"] * math.prod(pairs)


def _pairs(size: int, kernel: int, out: int, window: dict[str, str]) -> int:
    """Pairs of places in the output and the kernel that meet an entry of the input, along one dim."""
    stride, spread, apart = (int(window.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(window.get("pad", "0_0").split("_")[0])
    places = (at * stride + k * apart - low for at in range(out) for k in range(kernel))
    return sum(place % spread == 0 and 0 <= place < size * spread for place in places)


def _windows(rest: str) -> Iterator[dict[str, str]]:
    """The window's numbers, one dim after the other."""
    found = re.search(r"window=\{([^}]*)\}", rest)
    given = dict(part.split("=") for part in found[1].split()) if found else {}
    yield from ({name: value.split("x")[at] for name, value in given.items()} for at in range(_rank(given)))


def _rank(window: dict[str, str]) -> int:
    return len(window["size"].split("x")) if window else 0


def _kernel(one: Instruction, home: Computation) -> int:
    return kernel_flops(one.name, [dims for name in one.operands for dims in float_dims(home.find(name).shape)]) or 0


def _dims(home: Computation, name: str) -> list[int]:
    return _array(home.find(name).shape)


def _array(shape: str) -> list[int]:
    return [int(size) for size in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if size]
