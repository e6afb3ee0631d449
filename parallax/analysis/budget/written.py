"""Which values of a program are written to memory, who reads them, and in which order operations run."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from parallax.analysis.budget.program import ELEMENTWISE, EXPENSIVE, FOLDS, VIEWS, Op, Program, Value

END = 1 << 60  # the number of what comes after all operations


class Compiler(NamedTuple):
    """What differs between the compilers, as far as memory goes.

    `breadth_first`: operations run as soon as what they read is there, first come first served; else in the order in
    which they were traced. `copies`: arrays are copied where dims lie in another order than an operation reads them.
    `products_fuse`: what a matrix product reads is computed on the way. `masks_fuse`: so is what a reduction reads of a
    select; XLA for CPU hands reductions to a library that knows products and exponentials, but no select.
    """

    breadth_first: bool
    copies: bool
    products_fuse: bool
    masks_fuse: bool


CPU = Compiler(breadth_first=True, copies=True, products_fuse=False, masks_fuse=False)
ACCELERATOR = Compiler(breadth_first=False, copies=False, products_fuse=True, masks_fuse=True)


class Written:
    """Of a program: `ops`, those that write something, in order; `made`, what is written; `last`, the number of the
    operation that reads a written value last."""

    def __init__(self, program: Program, compiler: Compiler):
        self.program, self.compiler = program, compiler
        self._find_passing()
        self._find_sources()
        self.ops = [op for op in program.ops if op.name not in VIEWS and op.outs[0] not in self.passing]
        if compiler.breadth_first:
            self.ops = self._breadth_first()
        self.last = {source: at for at, op in enumerate(self.ops) for source in self.reads(op)}
        self.last |= {source: END for value in program.outputs for source in self.sources.get(value, ())}

    def reads(self, op: Op) -> list[Value]:
        """The written values that an operation reads."""
        found: dict[Value, None] = {}
        for at, value in enumerate(op.ins):
            if value is not None:
                table = self.computed_from if self._soft(op, at) else self.sources
                found |= dict.fromkeys(table.get(value, ()))
        return list(found)

    def source(self, value: Value | None) -> Value | None:
        """The written value that this one is another name for; None where it is computed from several."""
        sources = self.sources.get(value, ())
        return sources[0] if len(sources) == 1 else None

    def _soft(self, op: Op, at: int) -> bool:
        return op.reads_on_the_way(at) or (self.compiler.products_fuse and op.name == "dot_general")

    def _find_passing(self) -> None:
        """`passing` are values that nobody needs written; `readers` counts the operations that compute one."""
        uses: dict[Value, list[tuple[int, int]]] = defaultdict(list)
        for number, op in enumerate(self.program.ops):
            for at, value in enumerate(op.ins):
                uses[value].append((number, at))
        for at, value in enumerate(self.program.outputs):
            uses[value].append((END, at))
        self.passing: set[Value] = set()
        readers: dict[Value, set] = {}
        needed: set[Value] = set()
        for op in reversed(self.program.ops):
            for value in op.outs:
                readers[value] = set()
                for number, at in uses[value]:
                    self._add_reader(value, number, at, readers, needed)
            if op.name == "select_n" and self._is_reduced(readers[op.outs[0]]):
                needed.update(op.outs)
            if op.name in ELEMENTWISE and needed.isdisjoint(op.outs):
                computing = set().union(*(readers[value] for value in op.outs))
                if op.name not in EXPENSIVE or len(computing) <= 1:
                    self.passing.update(op.outs)
        self.readers = {value: len(found) for value, found in readers.items()}

    def _is_reduced(self, readers: set) -> bool:
        """Whether a reduction by a library is among those that compute a value."""
        numbers = (reader for reader in readers if isinstance(reader, int))
        return not self.compiler.masks_fuse and any(self.program.ops[at].name in FOLDS for at in numbers)

    def _add_reader(self, value: Value, number: int, at: int, readers: dict[Value, set], needed: set[Value]) -> None:
        if number == END:
            readers[value].add(("output", at))
            if at not in self.program.slices:
                needed.add(value)
            return
        user = self.program.ops[number]
        if user.name in VIEWS or user.outs[0] in self.passing:
            readers[value] |= set().union(*(readers[out] for out in user.outs))
            if user.name in VIEWS and not needed.isdisjoint(user.outs):
                needed.add(value)
            return
        readers[value].add(number)
        if not self._soft(user, at):
            needed.add(value)

    def _find_sources(self) -> None:
        """`sources[v]`: the written values that reading v reads; `computed_from[v]` the same for who computes v on the
        way, which may be other ones where v is written for somebody else."""
        self.sources: dict[Value | None, tuple] = {value: (value,) for value in self.program.inputs}
        self.computed_from = dict(self.sources)
        for op in self.program.ops:
            for value in op.outs:
                if op.name in VIEWS:
                    self.sources[value] = _union(self.sources, op.ins)
                    self.computed_from[value] = _union(self.computed_from, op.ins)
                    continue
                again = op.name in ELEMENTWISE and (op.name not in EXPENSIVE or self.readers[value] <= 1)
                self.computed_from[value] = _union(self.computed_from, op.ins) if again else (value,)
                self.sources[value] = self.computed_from[value] if value in self.passing else (value,)

    def _breadth_first(self) -> list[Op]:
        maker = {value: op for op in self.ops for value in op.outs}
        users: dict[Op | Value, list[Op]] = defaultdict(list)
        missing: dict[Op, int] = {}
        for op in self.ops:
            read = dict.fromkeys(maker.get(value, value) for value in self.reads(op))
            missing[op] = len(read)
            for other in read:
                users[other].append(op)
        ready = [op for op in self.ops if not missing[op]]
        inputs = [*self.program.inputs, *(v for v in users if isinstance(v, Value) and v not in self.program.inputs)]
        for value in inputs:
            ready += _freed(users[value], missing)
        for op in ready:  # it grows
            ready += _freed(users[op], missing)
        assert len(ready) == len(self.ops), "operations wait for each other"
        return ready


def _freed(users: list[Op], missing: dict[Op, int]) -> list[Op]:
    """Those that wait for nothing else any more."""
    for op in users:
        missing[op] -= 1
    return [op for op in users if not missing[op]]


def _union(table: dict[Value, tuple], values: Iterable[Value | None]) -> tuple:
    return tuple(dict.fromkeys(one for value in values if value is not None for one in table.get(value, ())))
