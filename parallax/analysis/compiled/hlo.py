"""Parses the text of compiled programs: optimised and scheduled HLO of the TPU, CPU and GPU backends.

Instructions are in the order in which a device runs them. Shapes are those on one device.

Written here, since JAX's public API gives a compiled program as text, and its cost only as sums: not by instruction,
loop or branch.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from parallax.step.step import UPDATE

RAGGED_EXCHANGE = "ragged-all-to-all"
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", RAGGED_EXCHANGE)
COMPUTATION_LINE = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
CLOSE = re.compile(r'\}(, execution_thread="\w+")?')  # a kernel's metadata may begin a line with }, too
INSTRUCTION_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?[\])}]) ([a-z][\w\-]*)\(")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
NAME = re.compile(r"%([\w.\-]+)")


class Instruction(NamedTuple):
    """One line. `rest` is all text after the operands: called computations, metadata and the backend's annotations."""

    name: str
    kind: str
    shape: str
    operands: tuple[str, ...]
    literal: str  # the text between the parentheses, a constant's value
    rest: str
    root: bool

    def attribute(self, name: str) -> str:
        """The value of `name=`, a computation or a word; "" if it is missing."""
        return self._note(rf"\b{name}=%?([\w.\-]+)")

    def _note(self, pattern: str) -> str:
        match = re.search(pattern, self.rest)
        return match[1] if match else ""

    @property
    def called(self) -> tuple[str, ...]:
        """A conditional's branches in the order of their index, or the computation that a fusion or a call runs."""
        if branches := re.search(r"branch_computations=\{([^}]*)\}", self.rest):
            return tuple(NAME.findall(branches[1]))
        if self.kind == "conditional":
            return self.attribute("false_computation"), self.attribute("true_computation")
        return tuple(filter(None, [self.attribute("calls") or self.attribute("to_apply")]))

    @property
    def cycles(self) -> int | None:
        """The TPU compiler's estimate for this instruction; None for collectives, loops and kernels."""
        digits = self._note(r'"estimated_cycles":"(\d+)"')
        return int(digits) if digits else None

    @property
    def op_name(self) -> str:
        """Its origin in the traced program: scopes and operation, as `jit(step)/while/body/Block/mlp/dot`."""
        return self._note(r'op_name="([^"]*)"')

    @property
    def chain(self) -> str:
        """For a collective in several pieces, the number that its pieces share."""
        return self._note(r'chain_id="(\d+)"')

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return self._note(r'custom_call_target="([^"]*)"')


class Computation(NamedTuple):
    name: str
    instructions: tuple[Instruction, ...]

    @property
    def root(self) -> Instruction:
        """The instruction whose value it returns."""
        return next((op for op in self.instructions if op.root), self.instructions[-1])

    def find(self, name: str) -> Instruction | None:
        """The instruction of this name."""
        return next((op for op in self.instructions if op.name == name), None)

    def shape_of(self, name: str) -> str:
        """The shape of the instruction of this name; "" without it."""
        op = self.find(name)
        return op.shape if op is not None else ""


class Module(NamedTuple):
    """A program: its computations by name, and the one that it starts with."""

    computations: dict[str, Computation]
    entry: str

    def trips(self, loop: Instruction, caller: Computation) -> int | None:
        """Trip count of a while loop of this computation; None if unknown.

        It is read from XLA's annotation, or from the constant start, step and limit of the loop's counter. The step is
        taken to be 1 if the sum is inside a fusion; the limit may be inside the fusion that compares.
        """
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        condition, body = (self.computations[loop.attribute(name)] for name in ("condition", "body"))
        test = condition.root
        compare = self.computations[test.called[0]].root if test.kind == "fusion" else test
        if compare.kind != "compare" or compare.attribute("direction") != "LT":
            return None
        counter, limit = (self._compared(name, test, condition) for name in compare.operands)
        last = _whole_number(self._at_start(limit, caller, loop))
        if last is None or counter is None or counter.kind != "get-tuple-element":
            return None
        first = _whole_number(self._at_start(counter, caller, loop)) or 0
        return -(-(last - first) // _rise(body, int(counter.attribute("index"))))

    def _compared(self, name: str, test: Instruction, condition: Computation) -> Instruction | None:
        """An operand of the condition's comparison, which may be inside a fusion."""
        if test.kind != "fusion":
            return condition.find(name)
        operand = self.computations[test.called[0]].find(name)
        return condition.find(test.operands[int(operand.literal)]) if operand.kind == "parameter" else operand

    def _at_start(self, read: Instruction | None, caller: Computation, loop: Instruction) -> Instruction | None:
        """A value that the condition reads before the first iteration: a constant, or an initial value of the loop."""
        if read is None or read.kind != "get-tuple-element":
            return read
        start = caller.find(loop.operands[0])
        index = int(read.attribute("index"))
        first = caller.find(start.operands[index]) if start is not None and start.kind == "tuple" else None
        while first is not None and first.kind == "copy":
            first = caller.find(first.operands[0])
        return first


def of_update(op_name: str) -> bool:
    """Whether an operation belongs to the update of the parameters, not to loss and gradients.

    >>> of_update("jit(train_step)/update/while/body/dot_general"), of_update("jit(train_step)/shard_map/dot_general")
    (True, False)
    """
    return UPDATE in op_name.split("/")


def parse_hlo(text: str) -> Module:
    """Parse the text of a compiled program, as returned by `Compiled.as_text()`."""
    computations, entry = {}, ""
    lines = iter(text.splitlines())
    for line in lines:
        if head := COMPUTATION_LINE.match(line):
            computations[head[2]] = Computation(head[2], tuple(_instructions(lines)))
            entry = head[2] if head[1] else entry
    return Module(computations, entry)


def _instructions(lines: Iterator[str]) -> Iterator[Instruction]:
    for head, line in _whole(lines):
        root, name, shape, kind = head.groups()
        inside, rest = _closed(line[head.end() :])
        yield Instruction(name, kind, shape, tuple(NAME.findall(inside)), inside, rest, bool(root))


def _whole(lines: Iterator[str]) -> Iterator[tuple[re.Match, str]]:
    """Instructions until the end of the computation; continued lines, as in metadata of kernels, are joined."""
    head, parts = None, []
    for line in lines:
        begins = INSTRUCTION_LINE.match(line)
        ends = CLOSE.fullmatch(line)
        if head and (begins or ends):
            yield head, "\n".join(parts)
        if ends:
            return
        if begins:
            head, parts = begins, [line]
        else:
            parts.append(line)


def _closed(after: str) -> tuple[str, str]:
    """The text before and after the parenthesis that closes the operands."""
    depth = 1
    for bracket in re.finditer(r"[()]", after):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return after[: bracket.start()], after[bracket.end() :]
    return after, ""


def _whole_number(constant: Instruction | None) -> int | None:
    if constant is None or constant.kind != "constant" or not re.fullmatch(r"-?\d+", constant.literal):
        return None
    return int(constant.literal)


def _rise(body: Computation, index: int) -> int:
    """Increment of the counter at this index of the loop's state; it is more than 1 in unrolled loops."""
    sum_ = body.find(body.root.operands[index]) if body.root.kind == "tuple" else None
    if sum_ is None or sum_.kind not in ("add", "fusion"):
        return 1
    return next(filter(None, (_whole_number(body.find(name)) for name in sum_.operands)), 1)


def arrays_of(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and dims of an array or of each array of a tuple."""
    arrays = ARRAY.findall(shape)
    return [(dtype, tuple(int(dim.strip("<=")) for dim in dims.split(",") if dim)) for dtype, dims in arrays]


@functools.cache
def shape_bytes(shape: str) -> int:
    """Bytes of an array or of all arrays of a tuple, without padding by the memory layout.

    >>> shape_bytes("(bf16[2,3]{1,0:T(8,128)}, pred[4], s32[])")
    20
    """
    bits = 0
    for dtype, dims in arrays_of(shape):
        size = re.search(r"\d+", dtype)
        width = 8 if dtype == "pred" else int(size[0]) if size else 0  # tokens have no width
        bits += width * math.prod(dims)
    return -(-bits // 8)


def float_dims(shape: str) -> list[tuple[int, ...]]:
    """Dims of the floating point arrays in a shape.

    >>> float_dims("(bf16[2,3]{1,0}, s32[4])")
    [(2, 3)]
    """
    return [dims for dtype, dims in arrays_of(shape) if re.match(r"b?f\d", dtype)]


Groups = list[tuple[int, ...]]


def groups_of(rest: str, devices: int) -> Groups:
    """Groups of devices that communicate, from an instruction's attributes.

    Reads lists `{{0,1},{2,3}}`, ranges `[2,2]<=[4]` and meshes `mesh['a'=2,'b'=2] {'b'}`. Each pair of a permutation
    is a group. Raises ValueError for an unknown form.

    >>> groups_of("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", 4)
    [(0, 2), (1, 3)]
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", rest):
        return _lists(pairs[1])
    if re.search(r"replica_groups=\{\}", rest):
        return [tuple(range(devices))]
    if lists := re.search(r"replica_groups=\{(.*?)\}\}", rest):
        return _lists(lists[1])
    if ranges := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", rest):
        return _rows(_order(ranges[2]).reshape(_ints(ranges[1])))
    mesh = re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((\[.*?)\))? \{([^}]*)\}", rest)
    if mesh and ":" not in mesh[3]:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        order = _order(mesh[2]) if mesh[2] else np.arange(devices)
        return _over_axes(order, {name: int(size) for name, size in sizes.items()}, re.findall(r"'([^']+)'", mesh[3]))
    raise ValueError(f"replica groups of an unknown form: {rest[:200]!r}")


def axes_of(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which the members of a group differ, in mesh order.

    >>> axes_of([(0, 1), (2, 3)], {"dp": 2, "tp": 2})
    ('tp',)
    """
    coordinates = np.stack(np.unravel_index(np.arange(math.prod(sizes.values())), tuple(sizes.values())), axis=1)
    differs = np.zeros(len(sizes), bool)
    for group in groups:
        differs |= np.ptp(coordinates[list(group)], axis=0) > 0
    return tuple(axis for axis, varies in zip(sizes, differs, strict=True) if varies)


def _over_axes(order: np.ndarray, sizes: dict[str, int], axes: list[str]) -> Groups:
    names = list(sizes)
    last = [names.index(axis) for axis in axes]
    first = [index for index in range(len(names)) if index not in last]
    size = math.prod(sizes[axis] for axis in axes)
    return _rows(order.reshape(tuple(sizes.values())).transpose(first + last).reshape(-1, size))


def _order(text: str) -> np.ndarray:
    """Device numbers of `[4,2]` or, transposed, of `[4,2]T(1,0)`."""
    dims, _, turned = text.partition("T")
    numbers = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return (numbers.transpose(_ints(turned)) if turned else numbers).reshape(-1)


def _lists(text: str) -> Groups:
    return [_ints(group) for group in re.findall(r"[\d,]+", text.replace("},{", "}{"))]


def _rows(table: np.ndarray) -> Groups:
    return [tuple(map(int, row)) for row in table]


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
