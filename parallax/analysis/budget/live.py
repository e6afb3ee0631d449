"""The bytes that a program holds at once: memory taken and given back, operation by operation.

What is written takes memory from the operation that makes it to the one that reads it last. Memory is used again in
place where XLA does so: by updates of part of an array, by elementwise operations of equal size, by what loops carry.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set

from parallax.analysis.budget import flow
from parallax.analysis.budget.program import ELEMENTWISE, IN_PLACE, VIEWS, Op, Program, Value
from parallax.analysis.budget.written import Compiler, Written


@dataclasses.dataclass(eq=False)
class Buffer:
    bytes: int
    component: str


class Heap:
    """What is held; `at_peak` are the bytes by component when they were most."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self._live: set[Buffer] = set()
        self._peak = self._now = 0

    def take(self, size: int, component: str) -> Buffer:
        buffer = Buffer(size, component)
        self._live.add(buffer)
        self.held[component] += size
        self._now += size
        if self._now > self._peak:
            self._peak, self.at_peak = self._now, self.held.copy()
        return buffer

    def give_back(self, buffers: Iterable[Buffer | None]) -> None:
        for buffer in self._live.intersection(buffers):
            self._live.discard(buffer)
            self.held[buffer.component] -= buffer.bytes
            self._now -= buffer.bytes

    def rename(self, buffer: Buffer, component: str) -> None:
        self.held[buffer.component] -= buffer.bytes
        self.held[component] += buffer.bytes
        buffer.component = component

    def __contains__(self, buffer: Buffer) -> bool:
        return buffer in self._live


class Run:
    """A program run on a heap.

    `name(value, made_of, is_gradient)` says to which component a value belongs, and `carried_names(op)` those
    of what an outermost loop carries, None where it does not know.
    """

    def __init__(self, compiler: Compiler, name: Callable[..., str], carried_names: Callable[[Op], list[str] | None]):
        self.compiler, self.name, self.carried_names, self.heap = compiler, name, carried_names, Heap()
        self.written: dict[Program, Written] = {}

    def run(
        self,
        program: Program,
        inputs: Sequence[Buffer | None],
        made_of: Sequence[int],
        *,
        free: Set[Buffer] = frozenset(),
        places: Sequence[Buffer | None] = (),
        gradients: Set[int] = frozenset(),
    ) -> list[Buffer | None]:
        """The buffers of the outputs. `free` are inputs' buffers that may be written to, `places` the buffers in which
        the outputs should end, `gradients` the numbers of outputs that are such."""
        if program not in self.written:
            self.written[program] = Written(program, self.compiler)
        places = places or [None] * len(program.outputs)
        gradients = gradients | {at for at, place in enumerate(places) if place and place.component == "gradients"}
        one = Pass(self, program, inputs, flow.made_of(program, made_of), flow.only_for(program, gradients))
        return one.run(free, places)


class Pass:
    """One run of one program."""

    def __init__(self, run: Run, program: Program, inputs: Sequence, made_of: dict[Value, int], gradients: set[Value]):
        self.whole, self.heap, self.program = run, run.heap, program
        self.made_of, self.gradients = made_of, gradients
        self.written = run.written[program]
        self.outermost = len(run.written) == 1
        self.buffer: dict[Value, Buffer | None] = dict(zip(program.inputs, inputs, strict=True))
        self.outer, self.own = set(inputs), set()
        self.ends: dict[Buffer, int] = {}
        for value, buffer in self.buffer.items():
            self._hold(buffer, self.written.last.get(value, -1))

    def run(self, free: Set[Buffer], places: Sequence[Buffer | None]) -> list[Buffer | None]:
        self.free, self.place = free, {}
        for value, place in zip(self.program.outputs, places, strict=True):
            source = self.written.source(value)
            if source is not None and place is not None:
                self.place.setdefault(source, place)
        kinds = {"scan": self._loop, "cond": self._branches}
        for now, op in enumerate(self.written.ops):
            self.now = now
            outs = kinds.get(op.name, self._plain)(op)
            for value, buffer in zip(op.outs, outs, strict=True):
                self.buffer[value] = buffer
                self._hold(buffer, max(now, self.written.last.get(value, now)))
                if buffer not in self.outer:
                    self.own.add(buffer)
            self._give_back([buffer for buffer in self.own if buffer is None or self.ends[buffer] <= now])
        outputs = [self._of(value) for value in self.program.outputs]
        self._give_back(self.own.difference(outputs))
        return outputs

    def _hold(self, buffer: Buffer | None, until: int) -> None:
        if buffer is not None:
            self.ends[buffer] = max(until, self.ends.get(buffer, -1))

    def _give_back(self, buffers: Iterable[Buffer | None]) -> None:
        buffers = set(buffers)
        self.own -= buffers
        self.heap.give_back(buffers)

    def _of(self, value: Value | None) -> Buffer | None:
        return self.buffer.get(self.written.source(value))

    def _may_write(self, buffer: Buffer) -> bool:
        """Whether nobody reads it after this operation."""
        mine = buffer in self.own or buffer in self.free or buffer not in self.ends
        return mine and self.ends.get(buffer, -1) <= self.now

    def _new(self, value: Value) -> Buffer:
        return self.heap.take(value.bytes, self._name(value))

    def _name(self, value: Value) -> str:
        return self.whole.name(value, self.made_of[value], value in self.gradients)

    def _placed(self, value: Value, taken: Iterable[Buffer | None]) -> Buffer | None:
        """The buffer in which an output should end, if it is free by now."""
        place = self.place.get(value)
        if place is None or place in taken or place.bytes < value.bytes or not self._may_write(place):
            return None
        return place

    # ---- operations

    def _plain(self, op: Op) -> list[Buffer | None]:
        read = dict.fromkeys(self.buffer.get(value) for value in self.written.reads(op))
        outs: list[Buffer | None] = []
        for value in op.outs:
            used = value in self.written.passing
            outs.append(None if used else self._in_place(op, value, read, outs) or self._new(value))
        return outs

    def _in_place(self, op: Op, value: Value, read: dict, taken: list) -> Buffer | None:
        over = op.name in ELEMENTWISE or op.name in IN_PLACE or op.name.startswith("psum")
        place = self._placed(value, [*taken, *(() if over else read)])
        if place is not None or not over:
            return place
        operands = [self._of(op.ins[0])] if op.name in IN_PLACE else read
        fitting = (b for b in operands if b is not None and b.bytes == value.bytes and b not in taken)
        return next((b for b in fitting if self._may_write(b)), None)

    def _loop(self, op: Op) -> list[Buffer | None]:
        body, first, last = op.inner[0], op.loop.consts, op.loop.consts + op.loop.carried
        operands = [self._of(value) for value in op.ins]
        carried = self._carried(op, operands)
        stacks = range(len(carried), len(op.outs))
        stacked = [None if at in op.dropped else self._new(op.outs[at]) for at in stacks]
        inner = [*operands[:first], *carried, *operands[last:]]
        own = {buffer for buffer in carried if buffer is not None}
        fixed = {b for b, i, o in zip(carried, body.inputs[first:last], body.outputs) if i is o}
        made_of = flow.in_every_turn(op, flow.operands(op, self.made_of))
        outs = self.whole.run(body, inner, made_of, free=own - fixed, places=[*carried, *[None] * len(stacked)])
        self.heap.give_back(set(outs).difference(inner))
        return carried + stacked

    def _carried(self, op: Op, operands: list[Buffer | None]) -> list[Buffer | None]:
        """What a loop carries: where it starts from if nobody else reads that, else a copy."""
        first = op.loop.consts
        names = (self.outermost and self.whole.carried_names(op)) or [None] * op.loop.carried
        readers, taken = Counter(operands), []
        for at, (value, name) in enumerate(zip(op.outs, names)):
            start = operands[first + at]
            unchanged = op.inner[0].outputs[at] is op.inner[0].inputs[first + at]
            if at in op.dropped or unchanged:
                taken.append(None if at in op.dropped else start)
                continue
            if start is None or start.bytes != value.bytes or readers[start] > 1 or not self._may_write(start):
                start = self._placed(value, [*taken, *operands]) or self._new(value)
            if name is None and start.component == "other":  # zeros until now
                name = self._name(value)
            if name is not None:
                self.heap.rename(start, name)
            taken.append(start)
        return taken

    def _branches(self, op: Op) -> list[Buffer | None]:
        operands = [self._of(value) for value in op.ins[1:]]
        readers = Counter(operands)
        free = {b for b in operands if b is not None and readers[b] == 1 and self._may_write(b)}
        outs: list[Buffer | None] = []
        for at, value in enumerate(op.outs):
            if at in op.dropped:
                outs.append(None)
                continue
            sources = {operands[n] for branch in op.inner if (n := passed_on(branch, branch.outputs[at])) is not None}
            handed = next((b for b in sources & free if b.bytes == value.bytes and b not in outs), None)
            outs.append(handed or self._placed(value, [*outs, *operands]) or self._new(value))
        made_of = flow.operands(op, self.made_of)[1:]
        for branch in op.inner:
            mine = free.union(b for b in outs if b is not None)
            made = self.whole.run(branch, operands, made_of, free=mine, places=outs)
            self.heap.give_back(set(made).difference(operands, outs))
        return outs


def passed_on(program: Program, value: Value | None) -> int | None:
    """Number of the input in whose place an output stands: handed on, or written to in part."""
    maker = {out: op for op in program.ops for out in op.outs}
    while value is not None and value in maker:
        value = _continued(maker[value], value)
    return program.inputs.index(value) if value is not None and value in program.inputs else None


def _continued(op: Op, value: Value) -> Value | None:
    """The operand in whose place an output of an operation stands."""
    if op.name in VIEWS or op.name in IN_PLACE:
        return op.ins[0]
    at = op.outs.index(value)
    if op.name == "scan":
        return op.ins[op.loop.consts + at] if at < op.loop.carried else None
    if op.name == "cond":
        found = (passed_on(branch, branch.outputs[at]) for branch in op.inner)
        return next((op.ins[1 + number] for number in found if number is not None), None)
    if op.name in ELEMENTWISE:
        return next((x for x in op.ins if x is not None and x.bytes == value.bytes), None)
    return None
