"""Walks a traced program as one device runs it and counts on the way; also finds the origin of each equation.

Values that depend only on tables, loop counters and the device's mesh coordinates are computed. So only the taken side
of a branch is counted, and every iteration of a loop. Equations that no output needs are not counted: XLA drops them.
"""

import functools
import math
import pathlib
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from parallax import jaxprs
from parallax.hardware.chips import name_of_kind
from parallax.jaxprs import Loop, apply, called, closed, loop, needed
from parallax.model import dense, families, lora, products
from parallax.model.batch import BATCH_ARRAYS
from parallax.model.experts.experts import USUAL_LOAD
from parallax.model.mask import window_in
from parallax.model.transformer import Block
from parallax.pipeline import BACKWARD, FORWARD, JOINT, WEIGHTS, ShardedModel
from parallax.sharding import bucket, collectives, einsum, layout, streams
from parallax.sharding.layout import named_leaves
from parallax.sharding.plan import GRADIENTS, empty_like
from parallax.sharding.zigzag import CONTIGUOUS
from parallax.step.step import UPDATE, TrainStep, abstract_state
from parallax.version import PACKAGE

# Files that send on behalf of their callers.
PLUMBING = tuple(
    module.__file__
    for module in (bucket, collectives, dense, einsum, families, jaxprs, layout, lora, products, streams)
)
LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
LIBRARIES += [pathlib.Path(jax.__file__).parents[1]]  # an environment may borrow another's
# Scopes of the pipeline's passes, of messages of gradients, and of the update. In B, equations that are not transposed
# are recomputed forward work.
SCOPES = {FORWARD: "forward", BACKWARD: "recompute", WEIGHTS: "backward", GRADIENTS: "backward", UPDATE: "update"}
REMATTED = "rematted_computation"  # JAX's name for what jax.checkpoint recomputes
OUTERMOST = Block.__name__, JOINT  # no parts of the model: every layer has the first


class Origin(NamedTuple):
    """`stack` holds names of transformations, scopes and modules, outermost first, including those of callers."""

    stack: str
    traceback: Any

    @property
    def direction(self) -> str:
        """Transposed equations are "backward"; forward work that the backward pass repeats is "recompute"."""
        again = REMATTED in self.stack
        if "transpose(" in self.stack and not again:
            return "backward"
        return _scope(self.stack) or ("recompute" if again else "forward")

    @property
    def module(self) -> str:
        """The Flax module, as "attention/q"; outside of modules the file, as "pipeline/tick"."""
        return _module(self.stack) or self.source.rpartition(":")[0].removeprefix("parallax/").removesuffix(".py")

    @property
    def source(self) -> str:
        """The innermost line outside of libraries, as "parallax/model/dense.py:57"; "" if unknown."""
        for frame in self.traceback.frames if self.traceback else ():
            if (name := shown_file(frame.file_name)) is not None:
                return f"{name}:{frame.line_num}"
        return ""


@functools.cache
def _scope(stack: str) -> str | None:
    """The direction that the innermost of the pipeline's scopes stands for."""
    return next((SCOPES[name] for name in reversed(_names(stack)) if name in SCOPES), None)


@functools.cache
def _module(stack: str) -> str:
    # A name with a dot is a method of the module before it.
    left_out = (*SCOPES, REMATTED, *OUTERMOST, CONTIGUOUS)
    names = [name for name in _names(stack) if name not in left_out and "." not in name and not window_in(name)]
    return "/".join(names).lower()


def _names(stack: str) -> list[str]:
    """The names in a stack, without those of transformations.

    >>> _names("B/transpose(jvp(Block))/mlp/down")
    ['B', 'Block', 'mlp', 'down']
    """
    return [name for name in re.sub(r"\w+\(|\)", "", stack).split("/") if name]


@functools.cache
def shown_file(file_name: str) -> str | None:
    """Name of a file in a report; None for files that only pass calls on."""
    if file_name in PLUMBING:
        return None
    path = pathlib.Path(file_name)
    if path.is_relative_to(PACKAGE):
        return path.relative_to(PACKAGE.parent).as_posix()
    return None if any(path.is_relative_to(folder) for folder in LIBRARIES) else path.name


# Entries of what is computed: rows of tables and counters have fewer, activations are not worth it.
LARGEST_KNOWN = 1 << 14
UNCHANGED = ("pvary", "pcast", "copy", "optimization_barrier", "layout_constraint")
Count = Callable[[JaxprEqn, Origin], Counter]
Known = np.ndarray | None  # None: not known before the program runs


def walk(program: ClosedJaxpr, *, rank: Mapping[str, int], count: Count) -> Counter:
    """Sum of `count` over every equation that the device at these mesh coordinates runs, as often as it runs it.

    Raises ValueError if the taken side of a branch or the trip count of a loop depends on data and changes the sum. For
    branches of experts the side for a usual load counts.
    """
    device = Walk(rank, count)
    device.call(program, Invocation("", set()), [None] * len(program.jaxpr.invars))
    return device.total


class Invocation(NamedTuple):
    """How a program is called."""

    stack: str  # as in Origin
    wanted: Set[int]  # indices of outputs whose values decide what runs later


class Walk:
    """One device's way through a program; `total` is what it has counted."""

    def __init__(self, rank: Mapping[str, int], count: Count):
        self.rank, self.count, self.total = dict(rank), count, Counter()
        self._steering, self._calls, self._needed = Steering(), {}, functools.cache(needed)

    def call(self, program: ClosedJaxpr, invocation: Invocation, args: Sequence[Known]) -> list[Known]:
        """Run a program and return its outputs; the wanted ones are known if possible.

        It is run again only if values that decide what it runs are different: most ticks, and most layers, are alike.
        """
        steers = self._steering.inputs(program.jaxpr, invocation.wanted)
        args = [value if index in steers else None for index, value in enumerate(args)]
        values = tuple(None if value is None else value.tobytes() for value in args)
        key = program.jaxpr, invocation.stack, frozenset(invocation.wanted), values
        if key not in self._calls:
            counted, outs = self._apart(lambda: self._run(program, invocation, args))
            self._calls[key] = counted, outs
        counted, outs = self._calls[key]
        self.total.update(counted)
        return outs

    def _apart(self, run: Callable[[], list[Known]]) -> tuple[Counter, list[Known]]:
        """The counts of a run, not added to the total, and its outputs."""
        before, self.total = self.total, Counter()
        outs = run()
        counted, self.total = self.total, before
        return counted, outs

    def _run(self, program: ClosedJaxpr, invocation: Invocation, args: Sequence[Known]) -> list[Known]:
        jaxpr = program.jaxpr
        steering = self._steering.variables(jaxpr, frozenset(invocation.wanted))
        value_of = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(_known, program.consts), *args], strict=True))

        def read(atom: Any) -> Known:
            return np.asarray(atom.val) if isinstance(atom, Literal) else value_of[atom]

        for equation in self._needed(jaxpr):
            source = equation.source_info
            stack = "/".join(filter(None, [invocation.stack, str(source.name_stack)]))
            self.total.update(self.count(equation, Origin(stack, source.traceback)))
            inner = Invocation(stack, {index for index, out in enumerate(equation.outvars) if out in steering})
            outs = self._outputs(equation, inner, [read(atom) for atom in equation.invars])
            value_of |= zip(equation.outvars, outs, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _outputs(self, equation: JaxprEqn, invocation: Invocation, values: list[Known]) -> list[Known]:
        name, params = equation.primitive.name, equation.params
        if name == "axis_index" and params["axis_name"] in self.rank:
            return [np.int32(self.rank[params["axis_name"]])]
        if name in UNCHANGED:
            return values
        if name == "scan":
            return self._scan(loop(equation), invocation, values)
        if name == "cond":
            return self._branch([closed(branch) for branch in params["branches"]], invocation, *values)
        if name == "while":
            return self._while(closed(params["body_jaxpr"]), invocation, len(equation.outvars))
        if (inner := called(equation)) is not None:
            if name == "shard_map":  # sharded values have a different piece on each device
                shapes = [var.aval.shape for var in inner.jaxpr.invars]
                values = [v if v is not None and v.shape == s else None for v, s in zip(values, shapes, strict=True)]
            return self.call(inner, invocation, values)
        return _evaluate(equation, values) if invocation.wanted else [None] * len(equation.outvars)

    def _scan(self, scan: Loop, invocation: Invocation, values: list[Known]) -> list[Known]:
        split, made = scan.consts + scan.carried, len(scan.body.jaxpr.outvars) - scan.carried
        read = self._steering.inputs(scan.body.jaxpr, invocation.wanted)
        if all(index < scan.consts for index in read):  # every iteration is like the first
            counted, _ = self._apart(lambda: self.call(scan.body, Invocation(invocation.stack, set()), values))
            self.total.update({key: number * scan.length for key, number in counted.items()})
            return [None] * (scan.carried + made)
        inner = Invocation(
            invocation.stack,
            invocation.wanted | {index - scan.consts for index in read if scan.consts <= index < split},
        )
        carry, xs = values[scan.consts : split], values[split:]
        for turn in reversed(range(scan.length)) if scan.reverse else range(scan.length):
            slices = [None if x is None else x[turn] for x in xs]
            carry = self.call(scan.body, inner, [*values[: scan.consts], *carry, *slices])[: scan.carried]
        return [*carry, *[None] * made]

    def _branch(self, branches: list[ClosedJaxpr], invocation: Invocation, which: Known, *values: Known) -> list[Known]:
        if which is None and USUAL_LOAD in invocation.stack.split("/"):
            which = np.int32(1)
        if which is not None:
            return self.call(branches[min(max(int(which), 0), len(branches) - 1)], invocation, values)
        counts = [self._apart(partial(self.call, branch, invocation, values))[0] for branch in branches]
        if any(counted != counts[0] for counted in counts):
            shown = " or ".join(str(dict(counted)) for counted in counts)
            raise ValueError(f"which branch runs depends on data, and the branches have different counts: {shown}.")
        self.total.update(counts[0])
        return [None] * len(branches[0].jaxpr.outvars)

    def _while(self, body: ClosedJaxpr, invocation: Invocation, outputs: int) -> list[Known]:
        inputs = len(body.jaxpr.invars)
        counted, _ = self._apart(lambda: self.call(body, Invocation(invocation.stack, set()), [None] * inputs))
        if counted:
            raise ValueError(f"a while loop's trip count depends on data, and each iteration counts {dict(counted)}.")
        return [None] * outputs


def _evaluate(equation: JaxprEqn, values: list[Known]) -> list[Known]:
    """Outputs of an equation whose inputs are known, if they are small and of integers or booleans."""
    if not _can_be_known(equation) or any(value is None for value in values):
        return [None] * len(equation.outvars)
    if equation.primitive.name in BY_NUMPY:
        (out,) = (var.aval for var in equation.outvars)
        arrays = [np.asarray(value, var.aval.dtype) for value, var in zip(values, equation.invars)]
        with np.errstate(over="ignore"):  # integers wrap around
            result = BY_NUMPY[equation.primitive.name](*arrays, **_shapes(equation))
        return [np.asarray(result).astype(out.dtype).reshape(out.shape)]
    return [np.asarray(out) for out in apply(equation, values)]


def _shapes(equation: JaxprEqn) -> dict[str, tuple[int, ...]]:
    params = equation.params
    match equation.primitive.name:
        case "dynamic_slice":
            return {"sizes": params["slice_sizes"]}
        case "broadcast_in_dim":
            return {"shape": params["shape"], "dims": params["broadcast_dimensions"]}
    return {}


def _select(which: np.ndarray, first: np.ndarray, *others: np.ndarray) -> np.ndarray:
    selected = first
    for number, other in enumerate(others, 1):
        selected = np.where(which == number, other, selected)
    return selected


def _dynamic_slice(x: np.ndarray, *starts: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """A start that is too far is moved back, as in JAX."""
    firsts = (min(max(int(start), 0), dim - size) for start, dim, size in zip(starts, x.shape, sizes))
    return x[tuple(slice(first, first + size) for first, size in zip(firsts, sizes))]


def _broadcast(x: np.ndarray, shape: tuple[int, ...], dims: tuple[int, ...]) -> np.ndarray:
    sizes = dict(zip(dims, x.shape))
    return np.broadcast_to(x.reshape([sizes.get(dim, 1) for dim in range(len(shape))]), shape)


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Rounded toward zero; -1 where y is 0, as XLA has it."""
    x, y = x.astype(np.int64), y.astype(np.int64)
    return np.where(y == 0, -1, np.abs(x) // np.maximum(np.abs(y), 1) * np.sign(x) * np.sign(y))


def _clamp(least: np.ndarray, x: np.ndarray, most: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(x, least), most)


# What steers most programs, of integers and booleans. Each new shape of an equation takes JAX about 15 ms to compile.
# The result gets the equation's dtype and shape.
BY_NUMPY = dict(lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal, eq=np.equal, ne=np.not_equal)
BY_NUMPY |= dict(add=np.add, sub=np.subtract, mul=np.multiply, max=np.maximum, min=np.minimum)
BY_NUMPY |= {"and": np.bitwise_and, "or": np.bitwise_or, "not": np.invert}
BY_NUMPY |= dict(squeeze=np.asarray, reshape=np.asarray, convert_element_type=np.asarray)
BY_NUMPY |= dict(select_n=_select, dynamic_slice=_dynamic_slice, broadcast_in_dim=_broadcast)
BY_NUMPY |= dict(div=_quotient, clamp=_clamp)


def _can_be_known(equation: JaxprEqn) -> bool:
    """Whether the outputs are small, and no input is an activation or a weight."""
    read = (var.aval for var in equation.invars if not isinstance(var, Literal))
    return all(_counts(var.aval) for var in equation.outvars) and all(map(_is_discrete, read))


def _known(const: Any) -> Known:
    """The value of a constant that can steer, as a schedule's tables do, however many ticks these have."""
    return np.asarray(const) if _is_discrete(const) else None


def _counts(array: Any) -> bool:
    return _is_discrete(array) and math.prod(array.shape) <= LARGEST_KNOWN


def _is_discrete(array: Any) -> bool:
    """Whether an array is of integers or booleans."""
    dtype = getattr(array, "dtype", None)
    return dtype is not None and any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.integer, np.bool_))


class Steering:
    """Which values decide what a program runs. Results are cached."""

    def __init__(self):
        self.variables = functools.cache(self._variables)

    def _variables(self, jaxpr: Jaxpr, wanted: frozenset[int]) -> Set:
        """Variables that decide which sides of branches are taken, or the values of the `wanted` outputs."""
        steer = {jaxpr.outvars[index] for index in wanted if not isinstance(jaxpr.outvars[index], Literal)}
        for equation in reversed(jaxpr.eqns):
            read = self._operands(equation, {index for index, out in enumerate(equation.outvars) if out in steer})
            steer |= {equation.invars[index] for index in read if not isinstance(equation.invars[index], Literal)}
        return steer

    def inputs(self, jaxpr: Jaxpr, wanted: Set[int]) -> Set[int]:
        """Indices of the inputs among them."""
        steer = self.variables(jaxpr, frozenset(wanted))
        return {index for index, var in enumerate(jaxpr.invars) if var in steer}

    def _operands(self, equation: JaxprEqn, wanted: Set[int]) -> Set[int]:
        name = equation.primitive.name
        if name == "cond":
            sides = (self.inputs(closed(branch).jaxpr, wanted) for branch in equation.params["branches"])
            return {0} | {1 + index for side in sides for index in side}
        if name == "scan":
            return self._of_loop(equation, wanted)
        if name == "while":  # its outputs are not known in any case
            return set()
        if name in UNCHANGED:
            return set(wanted)
        if (inner := called(equation)) is not None:
            return self.inputs(inner.jaxpr, wanted)
        return set(range(len(equation.invars))) if wanted and _can_be_known(equation) else set()

    def _of_loop(self, equation: JaxprEqn, wanted: Set[int]) -> Set[int]:
        """Values that an iteration reads from the previous one are wanted outputs of that one, too."""
        scan = loop(equation)
        while True:
            read = self.inputs(scan.body.jaxpr, wanted)
            more = {index - scan.consts for index in read if 0 <= index - scan.consts < scan.carried} - wanted
            if not more:
                return read
            wanted = wanted | more


def abstract_mesh(sizes: Mapping[str, int], *, simulated: bool = False, gpu: str = "") -> AbstractMesh:
    """A mesh of these sizes without devices, for tracing. With `simulated` the program is traced as for simulated
    devices instead of accelerators. The name of a `gpu`, or its kind as JAX has it, says which grouped and which
    microscaled products it has."""
    device = AbstractDevice("cpu", None, "cpu") if simulated else None
    if gpu and not simulated:
        device = AbstractDevice(gpu, None, "")
    axis_types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types, abstract_device=device)


def step_program(model: ShardedModel, global_batch: int, seq: int) -> ClosedJaxpr:
    """The traced program of `loss_and_grad` of the model `as_traced`, without dropout; the mesh may be abstract."""
    return _step_program(as_traced(model), global_batch, seq)


@functools.lru_cache(maxsize=2)  # a report needs its model and the same on one device, each more than once
def _step_program(model: ShardedModel, global_batch: int, seq: int) -> ClosedJaxpr:
    return jax.make_jaxpr(model.loss_and_grad)(*step_arguments(model, global_batch, seq)[:2])


def step_arguments(model: ShardedModel, global_batch: int, seq: int) -> tuple[Any, dict[str, Any], Any]:
    """The shapes of parameters, a batch and noise."""
    batch = dict.fromkeys(BATCH_ARRAYS, jax.ShapeDtypeStruct((global_batch, seq), jnp.int32))
    return model.shapes, batch, jax.ShapeDtypeStruct((2,), jnp.int32)


def in_local_view(model: ShardedModel, look: Callable[..., Any], global_batch: int, seq: int) -> Any:
    """What `look(params, batch, noise)` returns, called with tracers in the local view of the model's mesh."""
    seen: list[Any] = []

    def run(*given: Any) -> Array:
        seen.append(look(*given))
        return jnp.float32(0)

    local = jax.shard_map(run, out_specs=P(), **model.on_mesh)
    jax.eval_shape(local, *step_arguments(model, global_batch, seq))
    return seen[0]


@functools.lru_cache(maxsize=4)  # the same two, and what they are traced as
def as_traced(model: ShardedModel) -> ShardedModel:
    """The model whose program is read: for GPUs on an abstract mesh, which has branches where GPUs have loops of at
    most one turn, and residuals of a tick in that tick."""
    if not model.changes_in_loops:
        return model
    kind = model.mesh.devices.flat[0].device_kind
    return model.replace(mesh=abstract_mesh(model.axis_sizes, gpu=name_of_kind(kind) or kind))


def update_program(step: TrainStep) -> ClosedJaxpr:
    """The traced program of the gradient norm and of the update of the parameters."""

    def update(state: Any, grads: Any, statistics: Any) -> Any:
        with jax.named_scope(UPDATE):
            noise, norm = jnp.stack([jnp.int32(step.seed), state.step]), step.grad_norm(grads, statistics)
            return step.update(state.params, state.opt_state, grads, statistics, norm, noise)

    wide = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), step.model.shapes)
    statistics = {name: named_leaves(wide)[name] for name in step.model.plan.statistics}
    grads = jax.tree.map(lambda row, x: x if row.spec.is_trained else empty_like(x), step.model.plan.rows, wide)
    return jax.make_jaxpr(update)(abstract_state(step.model, step.tx), grads, statistics)
