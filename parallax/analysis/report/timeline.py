"""A compiled program as what a device does in turn: compute, collectives that begin and end, loops and branches."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from parallax.analysis.report.groups import axes_of, groups_of
from parallax.analysis.report.hlo import COLLECTIVES, Computation, Instruction, Module, float_dims, shape_bytes
from parallax.analysis.report.shares import Shares, name_of
from parallax.model.kernels import kernel_flops

KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call")
KINDS = dict(zip(COLLECTIVES, (*COLLECTIVES[:-1], "permute"), strict=True))
PROJECT = "parallax/"


class Call(NamedTuple):
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
    cycles: int


class Begin(NamedTuple):
    call: Call
    asynchronous: bool


class End(NamedTuple):
    op: str


class Loop(NamedTuple):
    trips: int
    body: list


class Branch(NamedTuple):
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


class Reader:
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
        """What one computation does; compute that follows compute is one event."""
        if name not in self._read:
            events: list = []
            for event in self._events(self.module.computations[name]):
                if isinstance(event, Compute) and events and isinstance(events[-1], Compute):
                    event = Compute(events.pop().cycles + event.cycles)
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
                yield Compute(one.cycles)

    def _start_of(self, done: Instruction, computation: Computation) -> str:
        one = done
        while one.kind.endswith("-done") or one.kind in ("async-update", "call-update"):
            one = computation.find(one.operands[0])
        return one.name

    def _loop(self, one: Instruction, computation: Computation) -> Loop:
        trips = self.module.trips(one, computation)
        if trips is None:
            self.unknown.append(one.op_name or one.name)
        return Loop(1 if trips is None else trips, self.computation(one.attribute("body")))

    def _branch(self, one: Instruction) -> Branch:
        sides = [self.computation(name) for name in one.called]
        share = (self.shares or {}).get(name_of(one.op_name))
        if share is None or len(sides) != 2:
            dearest = max(range(len(sides)), key=lambda at: weight(sides[at]))
            only = tuple(float(at == dearest) for at in range(len(sides)))
            return Branch(only, only, sides)
        return Branch(_two(share.own), _two(share.lockstep), sides)

    def _fused(self, one: Instruction, computation: Computation) -> Iterator:
        """A fusion: compute, and perhaps a collective, or the first, a middle or the last piece of one."""
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
            yield Compute(one.cycles)

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

    def _call(self, piece: Instruction, home: Computation, outer: Instruction, caller: Computation) -> Call:
        kind = piece.kind.removesuffix("-start")
        groups = groups_of(piece.rest, self.mesh.size)
        axes, members = axes_of(groups, self.sizes), len(groups[0])
        operand = sum(shape_bytes(_shape(home, name)) for name in piece.operands)
        if kind == "all-reduce" and "all-reduce-scatter" in home.name:
            kind = "reduce-scatter"  # the TPU compiler writes it as a fusion of a sum and a slice of it
        return Call(
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
        """Name and line of who asked; merged collectives have lost theirs, and the first operand knows."""
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


def weight(events: list) -> tuple[float, int]:
    """What one pass through a timeline costs, to find the dearer of two: cycles, then bytes sent."""
    cycles, sent = 0.0, 0
    for event in events:
        if isinstance(event, Compute):
            cycles += event.cycles
        elif isinstance(event, Begin):
            sent += event.call.bytes
        elif isinstance(event, Loop):
            inner = weight(event.body)
            cycles, sent = cycles + event.trips * inner[0], sent + event.trips * inner[1]
        elif isinstance(event, Branch):
            inner = max(map(weight, event.sides))
            cycles, sent = cycles + inner[0], sent + inner[1]
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
