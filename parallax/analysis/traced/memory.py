"""Memory of a device: exact for a step's arguments; for the rest, the most that its traced program holds at once.

The result of an operation takes memory until its last reader has run. Elementwise operations, slices and broadcasts are
fused into their readers and write nothing, except for expensive ones with several readers and those that a loop, a
kernel or a collective reads. Loops update their state in place, and branches pass unchanged values on in place.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from parallax.analysis.traced.trace import as_traced, in_local_view, step_program
from parallax.config.settings import Settings
from parallax.jaxprs import Loop, aval_bytes, called, closed, loop, needed
from parallax.pipeline import ShardedModel, first_state, pipeline_of
from parallax.sharding.host import DEVICE, HOST, is_on_host, is_type_on_host, rests_on_host
from parallax.step.step import TrainState, TrainStep, abstract_state, optimizer_of

# fmt: off
SAME_BYTES = {
    "pvary", "pcast", "copy", "stop_gradient", "optimization_barrier", "layout_constraint", "name", "reshape",
    "squeeze", "expand_dims", "bitcast_convert_type",
}
# Fused into its reader, if there is only one.
EXPENSIVE = {
    "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "rsqrt", "sqrt", "cbrt", "div", "rem", "pow", "erf",
    "sin", "cos", "tan",
}
FUSED = EXPENSIVE | SAME_BYTES | {
    "add", "sub", "mul", "neg", "max", "min", "abs", "sign", "floor", "ceil", "round", "square", "integer_pow",
    "add_any", "clamp", "select_n", "convert_element_type", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not",
    "xor", "is_finite", "shift_left", "shift_right_logical", "shift_right_arithmetic", "broadcast_in_dim", "iota",
    "axis_index", "transpose", "slice", "dynamic_slice", "pad", "rev", "split", "concatenate", "stack", "unstack",
    "gather", "random_bits", "random_wrap", "random_unwrap", "random_fold_in", "random_seed", "threefry2x32",
    "reduce_precision", "empty",
}
# fmt: on
IN_PLACE = {"dynamic_update_slice", "scatter", "scatter-add"}
# Operands are computed while they are read. device_put is one of them: it allocates buffers in host memory.
FUSES_OPERANDS = FUSED | IN_PLACE | {"dot_general", "cumsum", "argmax", "argmin", "device_put"}
REDUCTION = "reduce_"
# Components of the ticks' state by field; other fields are pipeline buffers.
WAITING, GRADIENTS_WAITING = "in host memory", "gradients in host memory"
STATE_COMPONENTS = {"saved": "saved_activations", "grads": "gradients", "loss": "other"}
NOTHING, PARAMETERS, DATA = range(3)  # inputs that a value depends on: none, only parameters, the batch
END = 1 << 60  # an index after all operations


GIVEN = ("parameters", "optimizer", "batch")  # components of memory that are arguments of a step


class Memory(NamedTuple):
    """Bytes on a device at the peak of a step, by component; their sum is the predicted peak.

    `gradients` are the sums over microbatches, and those of a layer before they are added. `gathered_weights` are
    copies in the compute dtype: of one layer at a time, or of all layers once a step. `saved_activations` are
    residuals, for as many microbatches as the schedule has slots. `pipeline_buffers` are messages, inputs of the first
    stage and outputs of the last. `working_activations` are those of the running layer (with remat="stage", stage) and
    their gradients; `logits` are those of a chunk of tokens, and their gradients.
    """

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    gathered_weights: int
    saved_activations: int
    pipeline_buffers: int
    working_activations: int
    logits: int
    other: int

    @property
    def peak(self) -> int:
        return sum(self)

    @property
    def arguments(self) -> int:
        """What a step is given."""
        return sum(getattr(self, name) for name in GIVEN)


class HostMemory(NamedTuple):
    """Bytes of host memory used by a device between steps, and by its residuals and gradients during a step."""

    parameters: int = 0
    optimizer: int = 0
    residuals: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def predicted_host_memory(model: ShardedModel, settings: Settings) -> HostMemory:
    """Bytes of host memory of a device."""
    kept, waiting = predicted_state(model), Counter[str]()
    if HOST in moved_in_step(settings):
        for _, component, size in tick_state(model, settings.data.global_batch, settings.data.seq):
            waiting[component] += size
    between = (bytes_on_device(tree, memory=HOST) for tree in (kept.params, kept.opt_state))
    return HostMemory(*between, waiting[WAITING], waiting[GRADIENTS_WAITING])


def moved_in_step(settings: Settings) -> set[str]:
    """The memories, HOST or DEVICE, of what a step's passes write."""
    pipeline = settings.pipeline
    return {HOST if pipeline.residuals_on != DEVICE else DEVICE, pipeline.grads_on}


def predicted_memory(model: ShardedModel, settings: Settings) -> Memory:
    """Bytes of a device, by component."""
    data, kept = settings.data, predicted_state(model)
    return memory(model, kept.opt_state, global_batch=data.global_batch, seq=data.seq)


@lru_cache(maxsize=2)  # read for a layout's checks, for its memory, and for that of its host
def predicted_state(model: ShardedModel) -> TrainState:
    """Shapes and shardings of the state that training with the model's settings would keep."""
    return abstract_state(model, optimizer_of(model))


def memory(model: ShardedModel, opt_state: Any, *, global_batch: int, seq: int) -> Memory:
    """Memory of a step on an accelerator; `opt_state` is a tree of ShapeDtypeStruct with shardings.

    The update of the parameters is assumed to be in place, and so never to need more memory than the passes.
    """
    model = as_traced(model)  # the ticks' state must be that of the program
    traced = step_program(model, global_batch, seq).jaxpr
    params = len(jax.tree.leaves(model.shapes))
    return _memory(model, opt_state, (global_batch, seq), traced, traced.invars[:params], traced.invars[params:])


def memory_of_run(step: TrainStep, *, global_batch: int, seq: int) -> Memory:
    """The same of a step that is to run here, dropout included. It is traced for that, and not again when it runs."""
    model, kept = step.model, abstract_state(step.model, step.tx)
    if as_traced(model) is not model or model.plan.uses_host:
        return memory(model, kept.opt_state, global_batch=global_batch, seq=seq)
    traced = step.trace(global_batch, seq)
    (state, batch), _ = jax.tree.unflatten(traced.in_tree, traced.jaxpr.jaxpr.invars)
    given = jax.tree.leaves(state.params), jax.tree.leaves(batch)
    return _memory(model, kept.opt_state, (global_batch, seq), traced.jaxpr.jaxpr, *given)


def _memory(
    model: ShardedModel, opt_state: Any, shape: tuple[int, int], traced: Jaxpr, params: Sequence, batch: Sequence
) -> Memory:
    """The memory of a traced program that begins with the passes, from its inputs `params` and `batch`."""
    mapped = next(equation for equation in traced.eqns if equation.primitive.name == "shard_map")
    program = flat(called(mapped))
    kinds = dict.fromkeys(params, PARAMETERS) | dict.fromkeys(batch, DATA)
    made_of = {value: kinds.get(var, NOTHING) for var, value in zip(mapped.invars, program.inputs)}
    held = Liveness(model, tick_state(model, *shape), made_of).peak(program)
    on_host = (row.memory == HOST for row in jax.tree.leaves(model.plan.rows))
    waiting = {var for var, waits in zip(params, on_host) if waits}
    inputs = zip(mapped.invars, program.inputs)
    held["parameters"] = sum(x.bytes for var, x in inputs if made_of[x] == PARAMETERS and var not in waiting)
    held["batch"] = sum(value.bytes for value, kind in made_of.items() if kind == DATA)
    held["optimizer"] = bytes_on_device(opt_state)
    return Memory(**{name: held[name] for name in Memory._fields})


def bytes_on_device(tree: Any, *, memory: str = DEVICE) -> int:
    """Bytes on each device, in this memory, of a tree of arrays or of ShapeDtypeStruct with shardings."""
    here = (x for x in jax.tree.leaves(tree) if rests_on_host(x.sharding) == (memory == HOST))
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in here)


def tick_state(model: ShardedModel, global_batch: int, seq: int) -> list[tuple[tuple[int, ...], str, int]]:
    """Shape on a device, component and bytes of each array that the loops over ticks carry; the component of arrays in
    host memory is WAITING, or GRADIENTS_WAITING."""

    def arrays(params, batch, noise):
        state, described = first_state(pipeline_of(model, params, batch, noise, "train")), []
        if not model.schedule.arrival:  # one stage sends nothing, so that no loop carries its slots of messages
            state = state._replace(messages={})
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            fields = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            components = (STATE_COMPONENTS[field] for field in fields if field in STATE_COMPONENTS)
            component = next(components, "pipeline_buffers")
            if is_on_host(leaf):
                component = GRADIENTS_WAITING if component == "gradients" else WAITING
            described.append((leaf.shape, component, aval_bytes(leaf)))
        return described

    return in_local_view(model, arrays, global_batch, seq)


@dataclasses.dataclass(eq=False)
class Value:
    """A result of an operation or an input of a program, as on one device."""

    shape: tuple[int, ...]
    bytes: int

    @staticmethod
    def of(aval: Any) -> Value:
        return Value(tuple(aval.shape), 0 if is_type_on_host(aval) else aval_bytes(aval))


@dataclasses.dataclass(eq=False)
class Op:
    """An operation; literal operands are None. `inner` are a loop's body or the branches of a conditional."""

    name: str
    ins: list[Value | None]
    outs: list[Value]
    inner: Sequence[Program] = ()
    loop: Loop | None = None

    def reads_from_memory(self, operand: int) -> bool:
        """Whether operand `operand` is read from memory, not fused; a loop may start from a constant."""
        if self.loop:
            return not self.loop.consts <= operand < self.loop.consts + self.loop.carried
        return self.name not in FUSES_OPERANDS and not self.name.startswith(REDUCTION)


@dataclasses.dataclass(eq=False)
class Program:
    """A traced program with its calls inlined."""

    inputs: list[Value]
    ops: list[Op]
    outputs: list[Value | None]


def flat(program: ClosedJaxpr) -> Program:
    """A traced program and its inner programs, each as one list of operations whose results are used."""
    inputs, ops = [Value.of(var.aval) for var in program.jaxpr.invars], []
    outputs = inline(program, inputs, ops)
    return Program(inputs, ops, outputs)


def inline(program: ClosedJaxpr, inputs: list[Value | None], ops: list[Op]) -> list[Value | None]:
    """Add the operations of a program to `ops`; returns its results for these inputs."""
    jaxpr = program.jaxpr
    value_of = dict(zip(jaxpr.invars, inputs)) | {var: Value.of(var.aval) for var in jaxpr.constvars}

    def read(atom: Any) -> Value | None:
        return None if isinstance(atom, Literal) else value_of[atom]

    for equation in needed(jaxpr):
        ins, inner = [read(atom) for atom in equation.invars], called(equation)
        if inner is not None:
            outs = inline(inner, ins, ops)
        else:
            outs = [Value.of(var.aval) for var in equation.outvars]
            op = Op(equation.primitive.name, ins, outs)
            if op.name == "scan":
                op.loop = loop(equation)
                op.inner = [flat(op.loop.body)]
            elif op.name == "cond":
                op.inner = [flat(closed(branch)) for branch in equation.params["branches"]]
            ops.append(op)
        value_of |= zip(equation.outvars, outs)
    return [read(atom) for atom in jaxpr.outvars]


class Buffers:
    """Which values of a program are written to memory, which buffer each uses, and who reads it last.

    `home` maps a value to the value whose buffer it uses, None if it is not in memory. `sources` are the values in
    memory from which it is computed.
    """

    def __init__(self, program: Program, buffers_of: Callable[[Program], Buffers]):
        self.program, self.buffers_of = program, buffers_of
        self.written = self._fused_but_written()
        self.home: dict[Value | None, Value | None] = {value: value for value in program.inputs}
        self.sources: dict[Value | None, frozenset[Value]] = {value: frozenset([value]) for value in program.inputs}
        for op in program.ops:
            self._place(op)
        self.last = {
            source: index
            for index, op in enumerate(program.ops)
            if op.name not in FUSED or op.outs[0] in self.written
            for value in op.ins
            for source in self.sources.get(value, ())
        }

    def passed_on(self, output: int) -> int | None:
        """Index of the input whose buffer an output reuses."""
        home = self.home.get(self.program.outputs[output])
        return self.program.inputs.index(home) if home in self.program.inputs else None

    def _fused_but_written(self) -> set[Value]:
        """Results of operations that could be fused, but are needed in memory or too expensive to compute twice."""
        written: set[Value] = set()
        needed: set[Value] = set()
        readers: dict[Value, set] = defaultdict(set)
        for place, value in enumerate(self.program.outputs):
            if value:
                readers[value].add(("output", place))
        for op in reversed(self.program.ops):
            out = op.outs[0]
            again = op.name in EXPENSIVE and len(readers[out]) > 1
            if op.name in FUSED - SAME_BYTES and (out in needed or again):
                written.add(out)
            fused = op.name in FUSED and out not in written
            for place, value in enumerate(op.ins):
                if value is not None:
                    readers[value] |= readers[out] if fused else {op}
                    if op.reads_from_memory(place) or (op.name in SAME_BYTES and out in needed):
                        needed.add(value)
        return written

    def _place(self, op: Op) -> None:
        taken: set[Value] = set()
        for output, value in enumerate(op.outs):
            if op.name in FUSED and value not in self.written:
                self.home[value] = self.home.get(op.ins[0]) if op.name in SAME_BYTES and op.ins else None
                self.sources[value] = frozenset().union(*(self.sources.get(operand, ()) for operand in op.ins))
                continue
            home = self.home.get(self._continued(op, output))
            if home is None or home in taken:
                home = value
                self.written.add(value)
            taken.add(home)
            self.home[value], self.sources[value] = home, frozenset([home])

    def _continued(self, op: Op, output: int) -> Value | None:
        """The operand whose buffer an output reuses."""
        if op.name in IN_PLACE:
            return op.ins[0]
        if op.loop:
            return op.ins[op.loop.consts + output] if output < op.loop.carried else None
        inputs = (self.buffers_of(branch).passed_on(output) for branch in op.inner)
        return next((op.ins[1 + number] for number in inputs if number is not None), None)


class Liveness:
    """Finds the peak of a program's memory, and its components at that moment."""

    def __init__(self, model: ShardedModel, state: list[tuple[tuple[int, ...], str, int]], inputs: dict[Value, int]):
        """`state` is the ticks' state, see `tick_state`; `inputs` say what each input depends on."""
        vocab = model.config.padded_vocab
        self.columns, self.state, self.inputs = {vocab, vocab // model.axis_sizes["tp"]}, state, inputs
        # Residuals that are used in the tick that writes them are not part of a loop's state.
        of_a_tick = not model.carries_residuals
        self.residuals = {shape for shape, component, _ in state if of_a_tick and component == "saved_activations"}
        weights = (value.shape for value, kind in inputs.items() if kind == PARAMETERS)
        self.weight_shapes = {shape for whole in weights for shape in (whole, whole[1:])}
        self.named: dict[Value, str] = {}
        self.buffers_of, self.inside = cache(lambda program: Buffers(program, self.buffers_of)), cache(self._inside)

    def peak(self, program: Program) -> Counter:
        """Bytes at the peak of a step, without inputs."""
        for op in program.ops:
            self.named |= self._names_of_state(op)
        return self._run(program, [self.inputs[value] for value in program.inputs], given=set())[0]

    def _names_of_state(self, op: Op) -> dict[Value, str]:
        """Components of a loop's state if it is the ticks' state, or a part of it in the same order."""
        names, rest = {}, iter(self.state)
        for value in op.outs[: op.loop.carried] if op.loop else ():
            names[value] = next((component for shape, component, _ in rest if shape == value.shape), None)
        return {} if None in names.values() else names

    def _inside(self, program: Program, made_of: tuple[int, ...]) -> tuple[Counter, list[int]]:
        """For a body or a branch: its peak without inputs and outputs, and what the outputs depend on."""
        home = self.buffers_of(program).home
        return self._run(program, made_of, given={home.get(value) for value in program.outputs})

    def _run(self, program: Program, made_of: Sequence[int], given: set) -> tuple[Counter, list[int]]:
        buffers, kinds = self.buffers_of(program), dict(zip(program.inputs, made_of))
        kept = {buffers.home.get(value) for value in program.outputs}
        held, most, ends = Counter(), Counter(), defaultdict(Counter)
        for number, op in enumerate(program.ops):
            inner, outs = self._inner(op, [kinds.get(value, NOTHING) for value in op.ins])
            kinds |= zip(op.outs, outs)
            for value in op.outs:
                if value in buffers.written and value not in given:
                    size = Counter({self._component(value, kinds[value]): value.bytes})
                    held += size
                    ends[END if value in kept else buffers.last.get(value, number)] += size
            most = max(most, held + inner, key=Counter.total)
            held -= ends[number]
        return most, [kinds.get(value, NOTHING) for value in program.outputs]

    def _inner(self, op: Op, made_of: list[int]) -> tuple[Counter, list[int]]:
        """Peak of an operation's inner programs, and what its outputs depend on."""
        if op.loop:
            first, last = op.loop.consts, op.loop.consts + op.loop.carried
            while True:
                peak, outs = self.inside(op.inner[0], tuple(made_of))
                carried = [*map(max, made_of[first:last], outs)]
                if carried == made_of[first:last]:
                    return peak, outs
                made_of = [*made_of[:first], *carried, *made_of[last:]]
        if op.inner:
            peaks, outs = zip(*(self.inside(branch, tuple(made_of[1:])) for branch in op.inner))
            return max(peaks, key=Counter.total), [*map(max, *outs)]
        return Counter(), [max(made_of, default=NOTHING)] * len(op.outs)

    def _component(self, value: Value, made_of: int) -> str:
        if value in self.named:
            return self.named[value]
        if value.shape in self.residuals:
            return "saved_activations"
        if made_of == PARAMETERS:
            self.weight_shapes.add(value.shape)
            return "gathered_weights"
        if value.shape in self.weight_shapes:
            return "gradients"
        if made_of == NOTHING:
            return "other"
        return "logits" if len(value.shape) == 2 and value.shape[1] in self.columns else "working_activations"
