"""Collectives of a step or a function, read from its traced program. Nothing is compiled and no device is needed."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import PartitionSpec as P

from parallax.analysis.traced.trace import Origin, step_program, update_program, walk
from parallax.config.sections import ALL_AXES
from parallax.jaxprs import KIND_OF_PRIMITIVE, RAGGED_PRIMITIVE, var_bytes
from parallax.model.experts.exchange_costs import ROOM_OVER_EVEN
from parallax.model.experts.hosts import share_between_hosts
from parallax.model.experts.ragged import SENT
from parallax.pipeline import ShardedModel
from parallax.sharding.collectives import as_varying
from parallax.sharding.layout import Layout
from parallax.step.step import TrainStep

PLAN = "parallax/sharding/plan.py"  # moves what layers use, for each under the layer's name


class Sent(NamedTuple):
    """Calls of one collective from one place in the source, for one purpose."""

    kind: str  # "all-gather" | "reduce-scatter" | "all-reduce" | "all-to-all" | "permute"
    axes: tuple[str, ...]  # in mesh order
    bytes: int  # sent by a device in one call
    count: float  # calls by a device in a step
    # "forward" | "backward" | "recompute": repeated in the backward pass | "update"
    direction: str
    module: str  # the module that sends: "attention/q", "embedding", or a file outside of modules: "pipeline/tick"
    # The line that asks for it: "parallax/model/mlp.py:50"; of what the plan moves, that of the layer which uses it.
    source: str
    # Ranks along the only axis that send to each other, if these are not all: a group of several.
    group: tuple[int, ...] = ()

    @property
    def total_bytes(self) -> float:
        """Bytes that a device sends in a step."""
        return self.bytes * self.count


def collectives(function: Callable, *args: Any, rank: Mapping[str, int], sizes: Mapping[str, int]) -> list[Sent]:
    """Collectives of the device at these mesh coordinates when it runs `function`; `sizes` are those of the axes.

    Each of `n` devices sends `n - 1` times its piece in an all-gather, `(n - 1) / n` of its operand in a reduce-scatter
    or an all-to-all, twice that in an all-reduce, and its operand in a permute; if `n` is 1, nothing. The rows of a
    ragged all-to-all depend on data; those of a usual load are counted.
    Raises ValueError if what is sent depends on data in another way.
    """
    return program_collectives(jax.make_jaxpr(function)(*args), rank=rank, sizes=sizes)


def update_collectives(step: TrainStep) -> list[Sent]:
    """Collectives of every device for the gradient norm and, if the optimizer is ours, for its update.

    Reductions of optax over whole arrays, as in its clipping, are not in the traced program: the compiler adds their
    collectives.
    """
    sizes = step.model.axis_sizes
    return program_collectives(update_program(step), rank=dict.fromkeys(sizes, 0), sizes=sizes)


def collectives_by_rank(model: ShardedModel, global_batch: int, seq: int) -> list[list[Sent]]:
    """What each pipeline rank sends for the loss and gradients of a step; the mesh may be abstract. Devices that differ
    only along other axes send the same. What follows are `update_collectives`."""
    program = step_program(model, global_batch, seq)
    places = (dict.fromkeys(model.axis_sizes, 0) | {"pp": rank} for rank in range(model.axis_sizes["pp"]))
    lines: dict[str, str] = {}
    ranks = [program_collectives(program, rank=rank, sizes=model.axis_sizes, lines=lines) for rank in places]
    return [_for_layers(sent, lines) for sent in ranks]


def _for_layers(sent: Iterable[Sent], lines: Mapping[str, str]) -> list[Sent]:
    """What the plan sends for a module, as asked for by the module's own line, or by that of a scope inside it, as the
    one that an einsum opens."""

    def line(call: Sent) -> str:
        if not call.source.startswith(PLAN):
            return call.source
        inside = (source for scope, source in lines.items() if scope.startswith(f"{call.module}/"))
        return lines.get(call.module) or next(inside, call.source)

    return sorted(call._replace(source=line(call)) for call in sent)


def busiest(ranks: Sequence[list[Sent]]) -> list[Sent]:
    """Entries of all ranks, each with the largest count of any rank, since ranks in lockstep wait for the slowest."""
    most: Counter = Counter()
    for rank in ranks:
        most |= _counted(rank)
    return sorted(sent._replace(count=count) for sent, count in most.items())


def on_average(ranks: Sequence[list[Sent]]) -> list[Sent]:
    """Entries of all ranks, each with its mean count, as for compiled programs."""
    together = sum(map(_counted, ranks), Counter())
    return sorted(sent._replace(count=count / len(ranks)) for sent, count in together.items())


def bytes_by(sent: Iterable[Sent], *fields: str) -> dict[tuple, int]:
    """Bytes in a step grouped by fields, as `bytes_by(sent, "axes", "kind")` or `bytes_by(sent, "direction")`.

    >>> calls = [Sent("permute", ("pp",), 8, count, way, "", "") for count, way in ((3, "forward"), (1, "backward"))]
    >>> bytes_by(calls, "axes"), bytes_by(calls, "direction")
    ({(('pp',),): 32}, {('forward',): 24, ('backward',): 8})
    """
    sums: dict[tuple, int] = defaultdict(int)
    for call in sent:
        sums[tuple(getattr(call, field) for field in fields)] += call.total_bytes
    return dict(sums)


def program_collectives(
    program: ClosedJaxpr,
    *,
    rank: Mapping[str, int],
    sizes: Mapping[str, int],
    lines: dict[str, str] | None = None,
) -> list[Sent]:
    """`collectives` of a traced program. `lines` gets the first line of each module, without those of the plan."""

    def count(equation: JaxprEqn, origin: Origin) -> Counter:
        if lines is not None and not lines.get(origin.module) and not origin.source.startswith(PLAN):
            lines[origin.module] = origin.source
        return sent_in_equation(equation, origin, rank=rank, sizes=sizes)

    counted = walk(program, rank=rank, count=count)
    return sorted(sent._replace(count=count) for sent, count in counted.items())


def _counted(rank: list[Sent]) -> Counter:
    return Counter({sent._replace(count=0): sent.count for sent in rank})


def sent_in_equation(
    equation: JaxprEqn, origin: Origin, *, rank: Mapping[str, int], sizes: Mapping[str, int]
) -> Counter:
    """The collective that an equation is, for a device at these coordinates of a mesh of these sizes, or nothing."""
    kind = KIND_OF_PRIMITIVE.get(equation.primitive.name)
    if kind is None:
        return Counter()
    named = equation.params["axes" if "axes" in equation.params else "axis_name"]
    axes = tuple(sorted((named,) if isinstance(named, str) else named, key=ALL_AXES.index))
    operands = [*map(var_bytes, equation.invars)]
    operand = sum(operands)
    if equation.primitive.name == RAGGED_PRIMITIVE:
        # Input and output come first, then offsets and sizes. On the side of experts there is more room than rows.
        rows, of_experts = operands[:2] if SENT in origin.stack else operands[1::-1]
        operand = min(rows, round(of_experts / ROOM_OVER_EVEN))
        if share := share_between_hosts(origin.stack):
            operand = round(share * max(operands[:2]))  # where tokens of all hosts have places
    groups = equation.params.get("axis_index_groups")  # a step of a two-step gather, or an exchange over hosts
    group = tuple(groups[0]) if groups and len(axes) == 1 else ()
    count = len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)
    size = sent_bytes(kind, operand, count)
    if kind == "permute" and not any(source == rank[axes[0]] != target for source, target in equation.params["perm"]):
        size = 0
    return Counter({Sent(kind, axes, size, 0, origin.direction, origin.module, origin.source, group): 1})


def sent_bytes(kind: str, operand: int, devices: int) -> int:
    """Bytes that a device sends in one collective among `devices` devices, from the bytes of its operands.

    >>> sent_bytes("all-gather", 100, 4), sent_bytes("all-reduce", 100, 4), sent_bytes("permute", 100, 2)
    (300, 150, 100)
    """
    if kind == "permute":
        return operand
    if kind == "all-gather":
        return (devices - 1) * operand
    share = -(-(devices - 1) * operand // devices)
    return 2 * share if kind == "all-reduce" else share


def sent_by(local: Callable, layouts: Sequence[str], arrays: Sequence[Any], mesh: Any) -> list[Sent]:
    """Collectives of a device that runs `local` on its pieces of arrays, and of the gradients in float arrays; traced.

    An array that is not sharded over an axis is the same on its ranks, and its gradient is summed over it. Nothing
    runs: `arrays` may be shapes, and the mesh may be abstract. Raises NotationError for an invalid layout.

    >>> import jax.numpy as jnp
    >>> from parallax.sharding.collectives import all_gather
    >>> from parallax.sharding.mesh import mesh_of
    >>> gather = lambda w: all_gather("d_model/dp d_ff -> d_model d_ff", w)
    >>> sent = sent_by(gather, ["d_model/dp d_ff"], [jnp.ones((8, 4))], mesh_of(dp=1))
    >>> sorted((one.direction, one.kind) for one in sent)
    [('backward', 'reduce-scatter'), ('forward', 'all-gather')]
    """

    def passes(*pieces: Any) -> Any:
        y, pull = jax.vjp(local, *pieces)
        gradients = [leaf for leaf in jax.tree.leaves(pull(y)) if leaf.dtype != jax.dtypes.float0]
        return as_varying(sum(as_varying(leaf.sum()) for leaf in gradients)[None])

    specs = tuple(Layout.parse(layout).spec(mesh) for layout in layouts)
    mapped = jax.shard_map(passes, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names), check_vma=True)
    return collectives(mapped, *arrays, rank=dict.fromkeys(mesh.axis_names, 0), sizes=dict(mesh.shape))
