"""A compiled step's text with the names of this project: a line above each collective and each large product."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from parallax.analysis.compiled.hlo import (
    COLLECTIVES,
    COMPUTATION_LINE,
    INSTRUCTION_LINE,
    Computation,
    Instruction,
    Module,
    arrays_of,
    of_update,
    parse_hlo,
)
from parallax.analysis.compiled.program import CompiledCollective, chained, instruction_flops, module_path
from parallax.analysis.traced.trace import Origin, shown_file
from parallax.config.sections import HEAD
from parallax.display.units import in_bytes, in_flops
from parallax.model.loss import LOGITS
from parallax.model.transformer import Block
from parallax.pipeline import ShardedModel
from parallax.sharding.bucket import BY_LAYER
from parallax.sharding.layout import named_leaves
from parallax.sharding.parameter import Role
from parallax.sharding.plan import GRADIENTS, SMALL, ParameterPlan

MARK = "// "  # XLA reads over such lines
LEAST_PRODUCT = 0.01  # of the largest product's FLOPs
FRAMES = re.compile(r"(?m)^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}$")
PLACES = re.compile(r"(?m)^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+) ")
FILE_NAMES = re.compile(r'(?m)^(\d+) "(.*)"$')


class Parameter(NamedTuple):
    """A parameter's row of the plan, and entries on a device: of one layer as it computes, of all layers at rest."""

    row: ParameterPlan
    entries: int
    at_rest: int


class Names:
    """What the parts of a compiled program are called here: parameters, modules, passes, source lines."""

    def __init__(self, text: str, model: ShardedModel):
        self.sizes = {axis: size for axis, size in model.axis_sizes.items() if size > 1}
        rows, shapes = named_leaves(model.plan.rows), named_leaves(model.plan.shapes)
        self.parameters = {name: _parameter(row, shapes[name].shape, model.axis_sizes) for name, row in rows.items()}
        head, _, rest = text.partition("\nFunctionNames")
        self._files = {int(number): name for number, name in FILE_NAMES.findall(head)}
        self._places = {number: (file, line) for number, file, line in _numbers(PLACES, rest)}
        self._frames = {number: (place, above) for number, place, above in _numbers(FRAMES, rest)}

    def collective(self, call: CompiledCollective, op: Instruction, entries: set[int]) -> str:
        """One line about a collective, of which an operand or a result has so many `entries`."""
        kind = f"{call.kind} over {' and '.join(call.axes)}"
        often = "once" if call.count == 1 else f"{call.count:g} times"
        op_names = op_names_of(call.source)
        moved = [self._moved(call, op_name, entries) for op_name in op_names]
        return self._line(kind, moved, op_names, f"{in_bytes(call.bytes)}, {often} a step", op)

    def product(self, op: Instruction, op_name: str, entries: tuple[int, ...], flops: int) -> str:
        """One line about a product whose operands and, last, result have so many `entries`."""
        *_, letters = ["", *(name for name in op_name.split("/") if "->" in name)]
        kind = " ".join(filter(None, ["product", letters]))
        return self._line(kind, [self._multiplied(op_name, entries)], [op_name], f"{in_flops(flops)} a call", op)

    def _line(self, kind: str, about: list[str], op_names: list[str], amount: str, op: Instruction) -> str:
        passes = [Origin(op_name, None).direction for op_name in op_names if op_name]
        parts = [*dict.fromkeys(about), *dict.fromkeys(passes), amount, self._source(op)]
        return f"{MARK}{kind}: {'; '.join(filter(None, parts))}"

    def _moved(self, call: CompiledCollective, op_name: str, entries: set[int]) -> str:
        """Which parameters or activations a collective moves."""
        path, is_gradient = module_path(op_name), GRADIENTS in op_name.split("/")
        of = "gradient of " if is_gradient or Origin(op_name, None).direction == "backward" else ""
        if of_update(op_name):
            return " or ".join(self._of_module(path, moves=False))
        moved = [] if _in_layer(op_name) else list(self._of_module(path, moves=True))
        if moved:
            return of + " or ".join([name for name in moved if self.parameters[name].entries in entries] or moved)
        if not _in_layer(op_name) and self._are_of_bucket(path):
            return f"{of}matrices of {'a layer' if path == BY_LAYER else path}"
        if is_gradient and call.kind == "all-reduce" and not path:
            held = [name for name, param in self.parameters.items() if self._is_summed_over(param.row, call.axes)]
            alone = [name for name in held if self.parameters[name].at_rest > SMALL]
            held = [name for name in alone if self.parameters[name].at_rest in entries] or [*{*held} - {*alone}]
            return f"gradients of {', '.join(sorted(held))}" if held else "gradients"
        return f"{of}activations{f' of {path}' if path else ''}" if path or of else ""

    def _are_of_bucket(self, path: str) -> bool:
        """Whether this is the scope of a message with several parameters of a layer."""
        of_layers = (row for row, *_ in self.parameters.values() if row.spec.stack)
        return path == BY_LAYER or any(row.scope.startswith(f"{path}/") for row in of_layers)

    def _multiplied(self, op_name: str, entries: tuple[int, ...]) -> str:
        """The kernel of a product, and whether the product is the gradient of it or of the input."""
        path = module_path(op_name)
        kernels = self._tables() if path == LOGITS else list(self._of_module(path, moves=False))
        if not kernels:
            return path
        sizes = {self.parameters[name].entries for name in kernels}
        name = " or ".join(kernels)
        if Origin(op_name, None).direction != "backward":
            return name
        of_kernel, of_input = entries[-1] in sizes, bool(sizes & {*entries[:-1]})
        if of_kernel != of_input:
            return f"gradient of {name}" if of_kernel else f"gradient of what {name} multiplies"
        return f"gradient of {name} or of what it multiplies"

    def _of_module(self, path: str, *, moves: bool) -> Iterator[str]:
        """The kernels of a module or, with `moves`, all its parameters that are not sharded alike everywhere."""
        for name, (row, *_) in self.parameters.items():
            is_moved = len({row.at_rest, row.staged, row.resident, row.compute, row.summed}) > 1
            if row.scope == path and not row.spec.is_statistic and (is_moved if moves else row.spec.inputs):
                yield name

    def _tables(self) -> list[str]:
        """The table of the head, which is the embedding's if there is one."""
        part_of = {name: row.spec.part for name, (row, *_) in self.parameters.items() if row.spec.role == Role.TABLE}
        return [name for name, part in part_of.items() if part == HEAD] or [*part_of]

    def _is_summed_over(self, row: ParameterPlan, axes: tuple[str, ...]) -> bool:
        missing = tuple(axis for axis in self.sizes if axis not in row.at_rest.used_axes())
        return missing == axes and row.spec.is_trained

    def _source(self, op: Instruction) -> str:
        """The innermost line outside of libraries, as "parallax/model/dense.py:57"; "" if the text does not say."""
        match = re.search(r"stack_frame_id=(\d+)", op.rest)
        frame = int(match[1]) if match else 0
        while frame in self._frames:
            place, above = self._frames[frame]
            file, line = self._places.get(place, (0, 0))
            if file in self._files and (name := shown_file(self._files[file])) is not None:
                return f"{name}:{line}"
            frame = above - 1  # XLA prints one more; 0 is none
        return ""


def op_names_of(source: str) -> list[str]:
    """The operation names that XLA joined into one, as those of collectives that are sent together.

    >>> op_names_of("jit(step)/shard_map/(gradients/psum:jvp(Head)/norm/psum)")
    ['jit(step)/shard_map/gradients/psum', 'jit(step)/shard_map/jvp(Head)/norm/psum']
    """
    joined = re.fullmatch(r"(.*/|)\((.*:.*)\)", source)
    return [joined[1] + name for name in joined[2].split(":")] if joined else [source]


def annotated(text: str, model: ShardedModel, collectives: Iterable[CompiledCollective]) -> str:
    """The text of a compiled step of this model, which has these collectives, with a line above each of them and each
    large product: the parameter or the part of a layer that it belongs to, the mesh axes, the pass, how much is sent or
    computed, and the line of code. Without these lines the text is what it was."""
    module, names, calls = parse_hlo(text), Names(text, model), {call.op: call for call in collectives}
    notes = {(home.name, op.name): note for home, op, note in _notes(module, names, calls)}
    lines, home = [], ""
    for line in text.splitlines(keepends=True):
        if head := COMPUTATION_LINE.match(line.rstrip("\n")):
            home = head[2]
        elif match := INSTRUCTION_LINE.match(line):
            note = notes.get((home, match[2]))
            lines += [f"  {note}\n"] if note else []
        lines.append(line)
    return "".join(lines)


def _notes(
    module: Module, names: Names, calls: Mapping[str, CompiledCollective]
) -> Iterator[tuple[Computation, Instruction, str]]:
    products = list(_products(module))
    least = LEAST_PRODUCT * max((flops for *_, flops in products), default=0)
    callers = {name: op for home in module.computations.values() for op in home.instructions for name in op.called}
    for home, op, flops in products:
        if flops >= least:
            caller = callers.get(home.name, op)
            op_name = next(filter(module_path, (op.op_name, caller.op_name)), "")
            yield home, op, names.product(op, op_name, (*_entries_of(home, op.operands), _count(op.shape)), flops)
    for home in module.computations.values():
        for op in home.instructions:
            call = calls.get(chained(op) if op.kind in COLLECTIVES and op.chain else op.name)
            if call is not None:
                yield home, op, names.collective(call, op, {*_entries_of(home, op.operands), _count(op.shape)})


def _products(module: Module) -> Iterator[tuple[Computation, Instruction, int]]:
    for home in module.computations.values():
        for op in home.instructions:
            if flops := instruction_flops(op, home):
                yield home, op, flops


def _numbers(pattern: re.Pattern, text: str) -> Iterator[tuple[int, ...]]:
    return (tuple(map(int, numbers)) for numbers in pattern.findall(text))


def _in_layer(op_name: str) -> bool:
    """Whether an operation is one of a layer's own; weights are moved outside of layers, under their modules' names."""
    return re.search(rf"\b{Block.__name__}\b", op_name) is not None


def _parameter(row: ParameterPlan, shape: Iterable[int], axis_sizes: Mapping[str, int]) -> Parameter:
    compute, at_rest = (
        layout.local_shape(dict(zip(layout.names, shape)), axis_sizes) for layout in (row.compute, row.at_rest)
    )
    return Parameter(row, math.prod(compute[bool(row.spec.stack) :]), math.prod(at_rest))


def _entries_of(home: Computation, operands: Iterable[str]) -> tuple[int, ...]:
    return tuple(_count(op.shape) for name in operands if (op := home.find(name)) is not None)


def _count(shape: str) -> int:
    """Entries of an array, or of the largest one of a tuple.

    >>> _count("(f32[2,3]{1,0}, s32[])")
    6
    """
    return max((math.prod(dims) for _, dims in arrays_of(shape)), default=0)
