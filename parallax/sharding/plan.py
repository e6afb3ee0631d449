"""The sharding plan: the layout of each parameter at rest, during a step and in a layer, and the moves between these.

Layers declare the layout that they compute with and the dim that data axes may shard at rest; they do not name data
axes. A policy says in which of the four layouts that dim is sharded. Where two layouts differ, something moves:

    load      at rest -> resident      once a step; cast first
    use       resident -> compute      at each use of a layer, an embedding or a head
    add_up    compute -> summed        a gradient, at each use
    store     summed -> at rest        gradients, once a step

A layer's vjp returns its statistics (see Role) in the place of gradients. They take the same moves, and `store` returns
them apart from gradients.

Policies are those of ZeRO (Rajbhandari et al. 2020; "zero3" is FSDP), and "lean", which shards weights, not gradients.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial, reduce
from html import escape
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import pack, unpack
from flax.traverse_util import unflatten_dict
from jax import Array, lax

from parallax.config.sections import EXPERTS, PARTS, FsdpConfig, OptimizerConfig, PipelineConfig
from parallax.display.html import html_table
from parallax.display.tables import text_table
from parallax.display.units import in_bytes
from parallax.errors import ConfigError, check_choice, nearest, quoted
from parallax.sharding import collectives
from parallax.sharding.bucket import BY_PARAMETER, Bucket, Packed, Shipment, buckets
from parallax.sharding.compiler import (
    copies_whole_stacks,
    moves_sums_out_of_loops,
    reads_heads_last,
    sends_small_gradients_last,
)
from parallax.sharding.eight_bits import EIGHT_BIT_DTYPES, gather_rounded, scale_of
from parallax.sharding.host import DEVICE, HOST, argument_to_device, is_on_host, to_device, to_host
from parallax.sharding.layers_on_ranks import Arrangement
from parallax.sharding.layout import Layout, named_leaves, with_parents
from parallax.sharding.parameter import Declared, ParameterSpec, Role, is_declared, layouts_of
from parallax.sharding.rounding import bits_in_layer, to_bfloat16
from parallax.sharding.slots import heads_last, host_zeros, map_slots, read_layer, row_major, write_slot
from parallax.user_code import named, names_code

DATA_AXES = ("dp", "cp", "ep")  # axes that may shard a parameter at rest, major first; `replica` never does
WITHIN_STAGE = (*DATA_AXES, "tp")  # axes that may shard a layer's parameters
SMALL = 1 << 18  # entries; latency dominates for smaller arrays, so they share one message
GRADIENTS = "gradients"  # scope, in traces, of gradient messages that are not sent by a transposed collective


class PolicyLayouts(NamedTuple):
    """Layouts of a parameter between steps, during a step and in a layer, and of its gradient between microbatches."""

    at_rest: Layout
    resident: Layout
    compute: Layout
    summed: Layout


# `compute` is the layout that a layer computes with; `cut` is the same layout, also sharded over data axes.
POLICIES: dict[str, Callable[[Layout, Layout], tuple[Layout, Layout, Layout, Layout]]] = {
    "ddp": lambda compute, cut: (compute, compute, compute, compute),
    "zero1": lambda compute, cut: (cut, compute, compute, compute),
    "zero2": lambda compute, cut: (cut, compute, compute, cut),
    "lean": lambda compute, cut: (cut, cut, compute, compute),
    "zero3": lambda compute, cut: (cut, cut, compute, cut),
}


def layouts_under(policy: str, compute: Layout, cut: Layout) -> PolicyLayouts:
    """The layouts under a policy, one of POLICIES or of a user's own; ConfigError if that returns something else."""
    layouts = named("data_parallel.policy", policy, POLICIES)(compute=compute, cut=cut)
    if not (isinstance(layouts, Sequence) and len(layouts) == 4 and all(isinstance(each, Layout) for each in layouts)):
        raise ConfigError(
            f"data_parallel.policy={quoted(policy)} returns {quoted(layouts)}; return four layouts: at rest, resident, "
            "compute and summed."
        )
    return PolicyLayouts(*layouts)


class Policies(NamedTuple):
    """The policy of all parameters, and exceptions: other policies by name of a part, module or parameter."""

    policy: str
    exceptions: Mapping[str, str] = MappingProxyType({})

    def check(self, names: Iterable[str]) -> None:
        """Raise ConfigError if a policy is unknown or an exception matches none of these parameters."""
        if not names_code(self.policy):
            check_choice("data_parallel.policy", self.policy, POLICIES)
        known = dict.fromkeys(above for name in names for above in with_parents(name))
        for name, policy in self.exceptions.items():
            check_choice(f"data_parallel.exceptions: {name}", policy, POLICIES)
            if name not in known:
                raise ConfigError(
                    f"data_parallel.exceptions names {name!r}, which is not a part, module or parameter of this model; "
                    f"{nearest(name, known)}"
                )

    def of(self, name: str) -> str:
        """The policy of a parameter: that of the longest exception that matches it, else the default policy.

        >>> Policies("zero3", {"blocks": "zero1", "blocks/mlp": "ddp"}).of("blocks/mlp/up/kernel")
        'ddp'
        """
        matches = [other for other in self.exceptions if f"{name}/".startswith(f"{other}/")]
        return self.exceptions[max(matches, key=len)] if matches else self.policy


@dataclasses.dataclass(frozen=True)
class ParameterPlan:
    """One row of the plan. Layouts name all dims, "layers" too; an array of one layer lacks it.

    `staged` is the layout at rest after the move over pp, if any: layers are on the ranks that run them, and every
    pipeline rank has whole tables.
    """

    spec: ParameterSpec  # what it is
    scope: str  # the module, as "attention/q", which reports name as the sender
    at_rest: Layout
    staged: Layout
    resident: Layout
    compute: Layout
    summed: Layout
    dtype: str | None  # in which weights are sent over data axes; None if no data axis shards them
    rounded_to: str | None = None  # "int8" or "float8" if weights are sent in 8 bits; see FsdpConfig
    rounded_for: str | None = None  # the same for a kernel of 8-bit products that each use gathers
    memory: str = DEVICE  # memory kind between steps
    states: str = DEVICE  # memory kind of its optimizer states
    grads: str = "float32"  # dtype of its summed gradient
    grads_on: str = DEVICE  # memory kind of that

    @property
    def grad_bytes(self) -> int:
        """Bytes on the device of an entry of its summed gradient, or of its statistic."""
        return 0 if self.spec.is_constant or self.grads_on == HOST else jnp.dtype(self.grads).itemsize

    @property
    def is_gathered_per_use(self) -> bool:
        return self.resident != self.compute

    @property
    def is_cast_at_load(self) -> bool:
        """Whether `load` casts it: parameters that it moves, and those that are not cast where they are used."""
        moves = self.at_rest != self.staged or self.staged != self.resident or self.memory == HOST
        return self.dtype is None or moves or not self.is_gathered_per_use

    @property
    def is_stored_at_once(self) -> bool:
        """Whether pp and data axes shard the same dim of a table. Then `load` gathers over both at once, and `store`
        scatters the gradient over both at once."""
        further = sum(old != new for old, new in zip(self.summed.axes, self.at_rest.axes, strict=True))
        return further == 1 and self.resident == self.summed and self.at_rest != self.staged != self.summed

    @property
    def travels(self) -> str | None:
        """The dtype in which weights are sent over data axes."""
        kind = self.rounded_to or (self.rounded_for if self.is_gathered_per_use else None)
        return EIGHT_BIT_DTYPES[kind].name if kind else self.dtype

    def cast(self, weight: Array) -> Array:
        """The weight in the dtype of compute; 8-bit weights stay as they are. Parameters that no data axis shards are
        float32 in a step, whatever dtype they are stored in."""
        return weight if weight.dtype.itemsize == 1 else weight.astype(self.dtype or jnp.float32)

    def cast_at_load(self, weight: Array) -> Array:
        """The array that `load` moves. Layers in host memory are cast one after the other, so that at most one of them
        is on the device in its stored dtype."""
        if self.memory != HOST:
            return self.cast(weight)
        weight = to_host(weight)
        if not self.spec.stack:
            return self.cast(argument_to_device(weight))
        return lax.map(lambda layer: self.cast(argument_to_device(weight, layer)[0]), jnp.arange(len(weight)))


@dataclasses.dataclass(eq=False, repr=False)
class ShardingPlan:
    """Layouts and moves of all parameters: a tree of ParameterPlan. It prints as a table.

    A single module can have a plan, too: `nn.map_variables(Dense, "params", trans_in_fn=plan.use)` is FSDP as a Flax
    module, which gathers its kernel wherever it is applied.

    Args:
        declared: a tree of parameters as `Declared`.
        sizes: of dims, as `ModelConfig.sizes`, of which a parameter's own shape goes first; `axis_sizes` of the mesh.
        dtype: of compute, in which weights are sent unless `fsdp` says otherwise.
        products: the 8-bit dtype to which products round their kernels.
        orders: of layers on pipeline ranks, for "blocks", or for "blocks/KIND" if there are several kinds.
            Without it no layer moves over pp.
        gather_first: `first` of `all_gather`.
        fsdp: how weights and gradients are sent.
        optimizer: its memory of parameters and of their optimizer states between steps. Norms and biases, which no data
            axis may shard, are always on the device.
        pipeline: its dtype and memory of summed gradients.
    Raises:
        ConfigError: the policies do not fit these parameters.
    """

    declared: Any
    policies: Policies
    sizes: Mapping[str, int]
    axis_sizes: Mapping[str, int]
    dtype: str
    _: dataclasses.KW_ONLY
    orders: Mapping[str, Arrangement] = dataclasses.field(default_factory=dict)
    products: str | None = None
    gather_first: Callable[[tuple[str, ...]], int] = lambda axes: 1
    fsdp: FsdpConfig = dataclasses.field(default_factory=FsdpConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)

    def __post_init__(self):
        self.policies.check(named_leaves(layouts_of(self.declared)))
        self.shapes = nn.meta.unbox(self.declared)
        self.rows = jax.tree_util.tree_map_with_path(self._row, self.declared, is_leaf=is_declared)

    def __repr__(self) -> str:
        """A line for each parameter, within about 110 columns: what it is and of which part of the model, the layout at
        rest, then the data axes that shard it during a step and in a layer, and those of its summed gradient. If
        anything is in host memory, also the memory of the parameter between steps and of its optimizer states."""
        host = ("memory", "states") if self.uses_host else ()
        head = ["parameter", "is", "part", "at rest", "in step", *host, "on device"]
        rows = [
            [*line.cells[:4], " ".join(line.cells[4:7]), *(getattr(line, name) for name in host), line.cells[-1]]
            for line in self._lines()
        ]
        return "\n".join([self.heading, *text_table(head, rows, left=len(head) - 1)])

    def _repr_html_(self) -> str:
        lines = self._lines()
        most = max(line.held[0] for line in lines) or 1
        bar = '<div style="background:#0072b2;height:0.7em;width:{:.1f}em"></div>'
        rows = [
            (
                *map(escape, line.cells[:3]),
                line.layout._repr_html_(),
                *line.cells[4:],
                *(line.memory, line.states) * self.uses_host,
                bar.format(8 * line.held[0] / most),
            )
            for line in lines
        ]
        head = (*TABLE_HEAD, *("memory", "states") * self.uses_host, "")
        return f"<p>{escape(self.heading)}</p>{html_table(rows, left=LEFT, head=head)}"

    @property
    def heading(self) -> str:
        """The number of parameters, the mesh, and bytes on a device at rest and during a step."""
        mesh = " ".join(f"{axis}={size}" for axis, size in self.axis_sizes.items())
        total = sum(leaf.size for leaf in jax.tree.leaves(self.shapes))
        held = [in_bytes(sum(line.held[column] for line in self._lines())) for column in range(3)]
        policy = " ".join([self.policies.policy, *(f"{name}={p}" for name, p in self.policies.exceptions.items())])
        moving = [row for row in jax.tree.leaves(self.rows) if row.travels and row.at_rest != row.compute]
        travels = sorted({row.travels for row in moving})
        return (
            f"{total:,} parameters on {mesh}, {held[0]} of them on a device\n"
            f"policy {policy}: in a step {held[1]} of weights, {held[2]} of gradients"
            + "".join(f"; weights travel as {dtype}" for dtype in travels)
            + self._frozen
            + self._on_host
        )

    @property
    def _frozen(self) -> str:
        """A line that says how many parameters are not trained; "" for none."""
        sizes = self._sizes_of_frozen
        return f"\nnot trained: {sum(sizes):,} parameters, in {len(sizes)} arrays" if sizes else ""

    @property
    def _on_host(self) -> str:
        """A line that says for how many parameters masters or states are in host memory; "" for none."""
        rows = jax.tree.leaves(self.rows)
        counts = {"parameters": [row.memory for row in rows], "optimizer's states": [row.states for row in rows]}
        said = [f"{what} of {on.count(HOST)}" for what, on in counts.items() if HOST in on]
        return f"\nin host memory between steps: {' and '.join(said)} of {len(rows)} arrays" if said else ""

    def _lines(self) -> list["_Line"]:
        shapes = named_leaves(self.shapes)
        return [_Line.of(name, row, shapes[name], self.axis_sizes) for name, row in named_leaves(self.rows).items()]

    @property
    def uses_host(self) -> bool:
        """Whether any parameter or optimizer state is in host memory between steps."""
        return any(HOST in (row.memory, row.states) for row in jax.tree.leaves(self.rows))

    @property
    def rounds_grads(self) -> bool:
        """Whether sums of gradients are rounded."""
        return any(row.grads != "float32" for row in jax.tree.leaves(self.rows))

    @property
    def grads_on_host(self) -> bool:
        """Whether summed gradients are in host memory."""
        return any(row.grads_on == HOST for row in jax.tree.leaves(self.rows))

    @cached_property
    def statistics(self) -> dict[str, ParameterPlan]:
        """The rows of parameters that follow from a step's statistics, by name."""
        return {name: row for name, row in named_leaves(self.rows).items() if row.spec.is_statistic}

    @property
    def at_rest(self) -> Any:
        """The tree of layouts at rest."""
        return jax.tree.map(lambda row: row.at_rest, self.rows)

    def scales(self, part: str) -> Any:
        """For each leaf of a part, its ParameterSpec's `scales`; "" if no 8-bit product rounds it before it travels."""
        return jax.tree.map(lambda row: row.spec.scales, entry(self.rows, part))

    @property
    def trained(self) -> float:
        """The share of the parameters that are updated."""
        every = sum(leaf.size for leaf in jax.tree.leaves(self.shapes))
        return (every - sum(self._sizes_of_frozen)) / every

    @property
    def _sizes_of_frozen(self) -> list[int]:
        leaves = zip(jax.tree.leaves(self.rows), jax.tree.leaves(self.shapes), strict=True)
        return [leaf.size for row, leaf in leaves if row.spec.is_constant]

    def _row(self, path: Any, declared: Declared) -> ParameterPlan:
        name, spec, compute = jax.tree_util.keystr(path, simple=True, separator="/"), declared.spec, declared.layout
        # Parameters of layers have the same names for every kind of layer.
        scope = name.rpartition("/")[0].removeprefix(spec.stack).strip("/")
        order, ranks = self.orders.get(spec.stack), self.axis_sizes.get("pp", 1) if self.orders else 1
        sizes = {**self.sizes, **dict(zip(compute.names, jnp.shape(declared.value), strict=True))}
        cut = cut_over_data(compute, declared.at_rest, sizes, self.axis_sizes)
        stay = layouts_under(self.policies.of(name), compute, cut)
        at_rest = staged = stay.at_rest
        if order and not order.in_order:
            at_rest = cut_over_pp(staged.without("pp"), sizes, self.axis_sizes, names=staged.names[1:])
        elif not spec.stack and ranks > 1 and len(compute.names) > 1:
            at_rest = cut_over_pp(staged, sizes, self.axis_sizes, names=staged.names)
        row = ParameterPlan(spec, scope, at_rest, staged, stay.resident, compute, stay.summed, None)
        if not declared.at_rest:
            return row
        dtype = jnp.dtype(declared.value.dtype)
        sent = dtype.name if dtype.itemsize == 1 else self.dtype
        row = dataclasses.replace(row, dtype=sent, memory=self.optimizer.masters_on, states=self.optimizer.states_on)
        if spec.stack and spec.is_trained:
            # Without tp, ranks along it may have summands, whose rounded sum would depend on the mesh.
            dtype = self.pipeline.grads_dtype if "tp" in compute.used_axes() else "float32"
            row = dataclasses.replace(row, grads=dtype, grads_on=self.pipeline.grads_on)
        if spec.scales:  # kernels of 8-bit products are rounded with these products' scales
            return dataclasses.replace(row, rounded_for=self.products)
        narrow = self.fsdp.gather_dtype != "compute" and spec.role != Role.TABLE and not spec.unit
        return dataclasses.replace(row, rounded_to=self.fsdp.gather_dtype) if narrow else row

    def check_grads(self) -> None:
        """Raise ConfigError if no gradient can be rounded or be in host memory, or if ranks have summands of one that
        is rounded."""
        rows = named_leaves(self.rows)
        for key, has in (("grads_dtype", self.rounds_grads), ("grads_on", self.grads_on_host)):
            asked, plain = getattr(self.pipeline, key), getattr(PipelineConfig, key)
            if asked != plain and not has:
                raise ConfigError(
                    f"pipeline.{key}={asked!r} has no effect: no matrix of this model's layers is trained that it is "
                    f"for; use {plain!r}."
                )
        for name, row in rows.items():
            over = {
                axis: size
                for axis, size in self.axis_sizes.items()
                if size > 1 and axis not in ("pp", *row.summed.used_axes())
            }
            if row.grads != "float32" and over:
                ranks = " x ".join(f"mesh.{axis}={size}" for axis, size in over.items())
                policy, excepted = self.policies.of(name), self.policies.of(name) != self.policies.policy
                said = f"the policy {policy!r} of data_parallel.{'exceptions' if excepted else 'policy'}"
                raise ConfigError(
                    f"pipeline.grads_dtype={row.grads!r} rounds sums of gradients, but with {said} each of {ranks} "
                    f"ranks has a summand of {name}, so the result would depend on the mesh; use 'zero3' or 'zero2' "
                    "there, without mesh.replica, or grads_dtype='float32'."
                )

    # ---- the moves

    def load(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Resident weights of a step from parameters at rest, by stack: as "embedding", "blocks/moe", "head"."""
        loaded = {}
        for stack, order in self.stacks.items():
            rows, (leaves, structure) = self.rows_of(stack), jax.tree.flatten(entry(params, stack))
            pairs = zip(rows, leaves, strict=True)
            leaves = [row.cast_at_load(x) if row.is_cast_at_load else x for row, x in pairs]
            if order and not order.in_order:
                leaves = order.moved([row.at_rest for row in rows], leaves)
            # If pp and data axes shard the same dim of a table, both are gathered at once.
            before, loaded[stack] = "staged" if order else "at_rest", jax.tree.unflatten(structure, leaves)
            # What may be sent in 8 bits is rounded even where nothing moves.
            if any(row.rounded_to or getattr(row, before) != row.resident for row in rows):
                loaded[stack] = self.use(loaded[stack], stack, before, "resident")
        return loaded

    def use(self, weights: Any, part: str = "", before: str = "resident", after: str = "compute") -> Any:
        """The weights that a layer computes with, from resident ones: those of a part or of one of its layers; without
        a part, all. `load` gathers from another layout of their rows, `before`, to another one, `after`.

        They are cast first, so that fewer bytes are sent.
        """
        rows, (whole, structure) = self.rows_of(part), jax.tree.flatten(weights)
        moves = [(getattr(row, before), getattr(row, after)) for row in rows]
        rounded = [
            index
            for index, row in enumerate(rows)
            if row.rounded_to and row.is_gathered_per_use == (after == "compute")
        ]
        wide = [index for index, (old, new) in enumerate(moves) if old != new and index not in rounded]
        for scope, members in self.buckets_of_weights(rows, wide, before, after):
            with jax.named_scope(scope):
                patterns = [_pattern(*moves[index], whole[index]) for index in members]
                arrays = [(rows[index], whole[index]) for index in members]
                sent = [x if x.dtype.itemsize == 1 else x.astype(row.dtype) for row, x in arrays]  # as `cast`
                packed = Packed.of(patterns, sent)
                gathered = packed.apart(collectives.all_gather(packed.pattern, packed.array, first=self.gather_first))
            for index, x in zip(members, gathered, strict=True):
                whole[index] = x
        if rounded:
            whole = self._gather_rounded(rows, rounded, before, after, whole)
        if after == "compute":
            whole = [_laid_out(row, x) for row, x in zip(rows, whole, strict=True)]
        return jax.tree.unflatten(structure, whole)

    def _gather_rounded(
        self, rows: Sequence[ParameterPlan], which: Sequence[int], before: str, after: str, weights: Sequence[Array]
    ) -> list[Array]:
        """The same for some of these rows, in 8 bits, bitwise equal to rounding the whole weights. One all_reduce finds
        all their largest entries."""
        whole = [*weights]
        for index in which:
            whole[index] = rows[index].cast(whole[index])
        largest, shapes = pack(
            [largest_entry(rows[index].spec, rows[index].compute, whole[index]) for index in which], "*"
        )
        largest_of = dict(zip(which, unpack(collectives.max_over(largest, WITHIN_STAGE), shapes, "*"), strict=True))
        for scope, members in self.buckets_of_weights(rows, which, before, after):
            with jax.named_scope(scope):
                moves = [(getattr(rows[index], before), getattr(rows[index], after)) for index in members]
                patterns = tuple(_pattern(*move, whole[index]) for move, index in zip(moves, members, strict=True))
                scales = [scale_of(largest_of[index], self.fsdp.gather_dtype) for index in members]
                given = [whole[index] for index in members], scales
                gathered = gather_rounded(patterns, self.fsdp.gather_dtype, self.gather_first, *given)
            for index, x in zip(members, gathered, strict=True):
                whole[index] = x
        return whole

    def trained_of(self, weights: Any, part: str) -> Any:
        """A part's weights, with None for constants of the backward pass."""
        return jax.tree.map(
            lambda row, weight: None if row.spec.is_constant else weight, entry(self.rows, part), weights
        )

    def stop_frozen(self, weights: Any, part: str) -> Any:
        """A part's weights, without a gradient with respect to those that are not trained: they are constants of the
        backward pass, which saves and computes nothing for them."""

        def stopped(row: ParameterPlan, weight: Array) -> Array:
            return lax.stop_gradient(weight) if row.spec.is_constant else weight

        return jax.tree.map(stopped, entry(self.rows, part), weights)

    def add_up(self, stack: str, totals: Any, place: Array, grads: Any, layer: Array, key: Array | None) -> Any:
        """Add a layer's gradients to summed gradients of the layers in a stack; where they are maxima, the maximum is
        taken. A gradient that is None is not there: another pass adds it, or the parameter is not trained.

        `place` is the layer's in the arrays, `layer` the model's; `key` is that of the microbatch's random bits, None
        if no sum is rounded."""

        (sums, structure), rows = jax.tree.flatten(totals), named_leaves(entry(self.rows, stack))
        given, wholes, names = structure.flatten_up_to(grads), jax.tree.leaves(entry(self.shapes, stack)), [*rows]
        there = [index for index, grad in enumerate(given) if grad is not None]
        messages, earlier = self.buckets_of_gradients([*rows.values()], there), []
        first, others, later = self._in_order_sent([*rows.values()], given, messages)
        for message in [*first, *others, *later]:
            used, sent = [rows[names[index]] for index in message.members], [given[index] for index in message.members]
            if message in later:
                sent = [reduce(collectives.after, earlier, grad) for grad in sent]
            moves = [(row.compute, row.summed) for row in used]
            shares = self._scatter(message.scope, used, moves, sent)
            earlier += shares[:1] if message in first else []
            for index, row, share in zip(message.members, used, shares, strict=True):
                total = sums[index]
                if row.spec.is_maximum:
                    sums[index] = total.at[place].max(share.astype(total.dtype))
                elif (row.grads, row.grads_on) == ("float32", DEVICE):
                    sums[index] = total.at[place].add(share.astype(total.dtype))
                else:
                    share += read_layer(total, place)
                    if row.grads == "bfloat16":
                        of_row = f"{stack}/{names[index]}", row.summed, wholes[index].shape
                        share = to_bfloat16(share, bits_in_layer(key, *of_row, layer, share.shape))
                    sums[index] = write_slot(total, share, place)
        return jax.tree.unflatten(structure, sums)

    def to_summed(self, part: str, grads: Any) -> Any:
        """A tree of gradients of a part, of which it may lack some leaves, in their summed layouts."""

        def scattered(row: ParameterPlan, grad: Array) -> Array:
            share = self._scatter_alone(row, row.compute, row.summed, grad)
            is_large = row.spec.role == Role.TABLE and row.compute != row.summed
            return lax.optimization_barrier(share) if is_large and moves_sums_out_of_loops() else share

        return jax.tree.map(scattered, {name: self.rows[part][name] for name in grads}, grads)

    def store(self, summed: Mapping[str, Any]) -> tuple[Any, dict[str, Array]]:
        """Move what was added up, by stack, to the at-rest layout and reduce it over the axes that do not shard it.
        Returns gradients, a tree like the parameters, with empty arrays for those that are not trained; and statistics
        by name."""
        stored = {}
        with jax.named_scope(GRADIENTS):
            for stack, order in self.stacks.items():
                rows, (leaves, structure) = self.rows_of(stack), jax.tree.flatten(summed[stack])
                for index, row in enumerate(rows):
                    target = row.at_rest if row.is_stored_at_once else row.staged
                    if row.spec.is_constant:
                        continue
                    if row.summed != target:
                        scatter = partial(self._scatter_alone, row, row.summed, target)
                        if row.grads != "float32":  # no other rank has a summand of a sum that was rounded
                            scatter = partial(_scatter_whole, row.summed, target)
                        x = leaves[index]
                        leaves[index] = map_slots(scatter, x) if is_on_host(x) else scatter(x)
                    # Of a table each pipeline rank has a summand; layers are on the ranks that ran them.
                    if not row.spec.stack and target != row.at_rest:
                        with jax.named_scope(row.scope):
                            leaves[index] = collectives.reduce_scatter(f"{target} -> {row.at_rest}", leaves[index])
                if order and not order.in_order:
                    kept = [index for index, row in enumerate(rows) if not row.spec.is_constant]
                    here = [to_device(leaves[index]) for index in kept]
                    moved = order.moved([rows[index].at_rest for index in kept], here, back=True)
                    for index, x in zip(kept, moved, strict=True):
                        leaves[index] = to_host(x) if is_on_host(leaves[index]) else x
                stored[stack] = jax.tree.unflatten(structure, leaves)
            stored = self._sum(unflatten_dict(stored, sep="/"))
        grads = jax.tree.map(lambda row, x: x if row.spec.is_trained else empty_like(x), self.rows, stored)
        by_name = named_leaves(stored)
        return grads, {name: by_name[name] for name in self.statistics}

    def zero_grads(self, stack: str, weights: Any) -> Any:
        """Zero gradients in the summed layout, which may differ from the layout of the weights."""

        def zeros(row: ParameterPlan, weight: Array, whole: Any) -> Array:
            stacked, sizes = int(bool(row.spec.stack)), dict(zip(row.summed.names, whole.shape))
            # Of a stack, whose layers may not divide over pp, there are as many as the rank has places.
            layout = Layout(row.summed.names[stacked:], row.summed.axes[stacked:])
            shape = (0,) * len(layout.names) if row.spec.is_constant else layout.local_shape(sizes, self.axis_sizes)
            if row.grads_on == HOST:
                like = jax.eval_shape(lambda: collectives.as_varying(jnp.zeros(shape, row.grads)))
                return host_zeros(like, len(weight))
            return collectives.as_varying(jnp.zeros((*weight.shape[:stacked], *shape), row.grads))

        return jax.tree.map(zeros, entry(self.rows, stack), weights, entry(self.shapes, stack))

    def rows_of(self, stack: str) -> list[ParameterPlan]:
        """The rows of a stack, as "blocks" or "blocks/KIND"; without a name, all rows."""
        return jax.tree.leaves(entry(self.rows, stack))

    @cached_property
    def stacks(self) -> dict[str, Arrangement | None]:
        """The names of the parts of the model, with one for each kind of layers, and the order of each, if any."""
        of_rows = {part: [row.spec.stack or part for row in jax.tree.leaves(self.rows[part])] for part in PARTS}
        # A head whose table is the embedding's, and whose norm has no parameters, has no rows.
        names = [name for part, stacks in of_rows.items() for name in stacks or [part]]
        return {name: self.orders.get(name) for name in names}

    def buckets_of_weights(
        self, rows: Sequence[ParameterPlan], which: Sequence[int], before: str = "resident", after: str = "compute"
    ) -> list[Bucket]:
        """The messages in which some of these rows' weights are gathered. Only those of a layer, at a use, go
        together."""
        sent = {
            index: Shipment(row.scope, getattr(row, before), getattr(row, after), row.travels, row.rounded_to)
            for index, row in enumerate(rows)
            if index in which
        }
        unit = self.fsdp.bucket if (before, after) == ("resident", "compute") else BY_PARAMETER
        return buckets(unit, sent, self._ranks)

    def buckets_of_gradients(self, rows: Sequence[ParameterPlan], which: Sequence[int]) -> list[Bucket]:
        """The messages in which some of these rows' gradients of one layer are scattered."""
        exact = self.fsdp.reduce == "float32"
        sent = {
            index: Shipment(row.scope, row.summed, row.compute, "float32" if exact else row.dtype)
            for index, row in enumerate(rows)
            if index in which
        }
        return buckets(self.fsdp.bucket, sent, self._ranks)

    def _in_order_sent(
        self, rows: Sequence[ParameterPlan], grads: Sequence[Array], messages: Sequence[Bucket]
    ) -> tuple[list[Bucket], list[Bucket], list[Bucket]]:
        """The messages of a layer's gradients in the order in which they are traced: the largest of weights that read
        the stream, those that go at any time, and those that are sent after the first. It is for what was compiled:
        reduce-scatters of dense layers that are trained whole, over data ranks of one slice. With context ranks it
        gained nothing, and took memory. See `sends_small_gradients_last`."""
        is_mixture = any(row.spec.part == EXPERTS for row in rows)
        is_whole = all(grad is not None for grad in grads)  # none frozen, and none added by another pass
        on_data_ranks = self.fsdp.reduce == "float32" and self._ranks(("replica", "pp", "cp", "tp")) == 1
        if not (is_whole and on_data_ranks and not is_mixture and sends_small_gradients_last()):
            return [], [*messages], []
        entries = {message: sum(grads[index].size for index in message.members) for message in messages}
        # Not of `down`: its product begins the backward pass, where links are busy with gathers.
        reading = [each for each in messages if all("d_model" in rows[index].spec.inputs for index in each.members)]
        most = max((entries[message] for message in reading), default=0)
        first = [message for message in reading if entries[message] == most]
        # Not vectors: their gradients are summed within products.
        smaller = [each for each in messages if entries[each] < most and grads[each.members[0]].ndim > 1]
        return first, [message for message in messages if message not in (*first, *smaller)], smaller

    def _ranks(self, axes: Sequence[str]) -> int:
        return math.prod(self.axis_sizes.get(axis, 1) for axis in axes)

    def _scatter(
        self, scope: str, rows: Sequence[ParameterPlan], moves: Sequence, grads: Sequence[Array]
    ) -> list[Array]:
        """Sum gradients over data axes in one message, by their moves from one layout to another; each device keeps its
        pieces. `_sum` is for whole ones."""
        first, (before, after) = rows[0], moves[0]  # if these are several, all of them are trained and move
        if first.spec.is_constant:
            return [*map(empty_like, grads)]
        with jax.named_scope(GRADIENTS), jax.named_scope(scope):
            if before == after:
                return [grad.astype(jnp.float32) for grad in grads]
            patterns = [_pattern(*move, grad) for move, grad in zip(moves, grads, strict=True)]
            if self.fsdp.reduce == "float32":
                send, sent = collectives.reduce_scatter, [grad.astype(jnp.float32) for grad in grads]
            else:
                if jnp.dtype(first.dtype) == jnp.bfloat16 and first.spec.role == Role.TABLE:
                    # What the cast does, as one more operation: a cast that stands alone takes TPU half as long again.
                    grads = [lax.reduce_precision(grad, exponent_bits=8, mantissa_bits=7) for grad in grads]
                pairs = zip(rows, grads, strict=True)
                send, sent = collectives.exchange_and_add, [grad.astype(row.dtype) for row, grad in pairs]
            packed = Packed.of(patterns, sent)
            return packed.apart(send(packed.pattern, packed.array))

    def _scatter_alone(self, row: ParameterPlan, before: Layout, after: Layout, grad: Array) -> Array:
        """The same for one gradient."""
        (share,) = self._scatter(row.scope, [row], [(before, after)], [grad])
        return share

    def _sum(self, grads: Any) -> Any:
        """Sum gradients of parameters that several ranks hold, once, after all microbatches.

        Norms and biases with the same axes are sent in one message; large arrays are sent alone.
        """
        leaves, structure = jax.tree.flatten(grads)
        messages: dict[Any, list[int]] = defaultdict(list)
        for index, row in enumerate(jax.tree.leaves(self.rows)):
            if row.spec.is_constant:
                continue
            axes = tuple(axis for axis in collectives.bound_axis_sizes() if axis not in row.at_rest.used_axes())
            if is_on_host(leaves[index]):
                if collectives.varying_axes(leaves[index]) & {*axes}:
                    leaves[index] = map_slots(partial(collectives.sum_over, axes=axes), leaves[index])
                continue
            alone = index if leaves[index].size > SMALL else None
            combine = collectives.max_over if row.spec.is_maximum else collectives.sum_over
            messages[combine, axes, alone, leaves[index].dtype].append(index)
        for (combine, axes, *_), members in messages.items():
            if len(members) == 1 or not axes:
                totals = [combine(leaves[index], axes) for index in members]
            else:  # in one message; bitwise the same as one by one
                flat, shapes = pack([leaves[index] for index in members], "*")
                totals = unpack(combine(flat, axes), shapes, "*")
            for index, total in zip(members, totals, strict=True):
                leaves[index] = total
        return jax.tree.unflatten(structure, leaves)


# After the layout at rest: the data axes that shard the parameter in a step and in a layer, and its summed gradient.
TABLE_HEAD = (
    "parameter",
    "is",
    "part",
    "at rest",
    "resident",
    "compute",
    "summed",
    "over pp",
    "travels",
    "shape",
    "on a device",
)
FLOAT32_BYTES = 4
LEFT = 9  # columns that are flush left


class _Line(NamedTuple):
    """A row of the table; `held` are bytes on a device: at rest, resident, and of the summed gradient."""

    cells: tuple[str, ...]
    layout: Layout
    held: tuple[int, int, int]
    memory: str
    states: str

    @staticmethod
    def of(name: str, row: ParameterPlan, shape: Any, axis_sizes: Mapping[str, int]) -> "_Line":
        def entries(layout: Layout) -> int:
            return shape.size // math.prod(axis_sizes.get(axis, 1) for axis in layout.used_axes())

        width = shape.dtype.itemsize if row.dtype else FLOAT32_BYTES
        width = jnp.dtype(row.dtype).itemsize if row.dtype and row.is_cast_at_load else width
        held = (
            entries(row.at_rest) * shape.dtype.itemsize * (row.memory == DEVICE),
            entries(row.resident) * width,
            entries(row.summed) * row.grad_bytes,
        )
        during = row.resident, row.compute, row.summed
        cuts = ("/".join(a for a in layout.used_axes() if a in DATA_AXES) or "-" for layout in during)
        hop = "-" if row.at_rest == row.staged else "all-to-all" if row.spec.stack else "all-gather"
        travels = row.travels if row.at_rest != row.compute and row.travels else "-"
        sizes = "x".join(map(str, shape.shape)), in_bytes(held[0])
        what = "frozen" if row.spec.frozen and not row.spec.is_statistic else str(row.spec.role)
        cells = name, what, row.spec.part or "-", str(row.at_rest), *cuts, hop, travels, *sizes
        return _Line(cells, row.at_rest, held, row.memory, row.states)


def cut_over_data(layout: Layout, dims: str, sizes: Mapping[str, int], axis_sizes: Mapping[str, int]) -> Layout:
    """The layout with one dim also sharded over the mesh's remaining data axes: the first of `dims` that they divide,
    or the last one if they divide none. Unchanged if no data axis remains.

    >>> layout, sizes = Layout.parse("experts/ep d_model d_ff/tp"), dict(experts=8, d_model=64, d_ff=128)
    >>> [str(cut_over_data(layout, "experts d_model", sizes, dict(dp=dp, ep=2))) for dp in (4, 8)]
    ['experts/ep/dp d_model d_ff/tp', 'experts/ep d_model/dp d_ff/tp']
    """
    further = tuple(axis for axis in DATA_AXES if axis in axis_sizes and axis not in layout.used_axes())
    for dim in dims.split():
        cut = layout.with_cut(dim, (*layout.cut_of(dim), *further))
        if sizes[dim] % math.prod(axis_sizes.get(axis, 1) for axis in cut.cut_of(dim)) == 0:
            break
    return cut if dims else layout


def cut_over_pp(
    layout: Layout, sizes: Mapping[str, int], axis_sizes: Mapping[str, int], names: Sequence[str]
) -> Layout:
    """The layout with the largest of these dims that pp divides also sharded over pp; unchanged if there is none."""
    further = {name: (*layout.cut_of(name), "pp") for name in names}
    pieces = {name: math.prod(axis_sizes.get(axis, 1) for axis in axes) for name, axes in further.items()}
    fit = [(sizes[name], name) for name in names if sizes[name] % pieces[name] == 0]
    return layout.with_cut(max(fit)[1], further[max(fit)[1]]) if fit else layout


def largest_entry(spec: ParameterSpec, layout: Layout, weights: Array) -> Array:
    """The largest magnitude on this device, in dims of size 1; one per layer if the array has several layers."""
    dims = len(layout.names) - bool(spec.stack)
    return jnp.abs(lax.stop_gradient(weights)).max(range(weights.ndim - dims, weights.ndim), keepdims=True)


def entry(tree: Any, path: str) -> Any:
    """What a tree has under a name like "blocks/KIND"; the tree itself for ""."""
    return reduce(lambda inner, name: inner[name], filter(None, path.split("/")), tree)


def empty_like(x: Array) -> Array:
    """In place of a gradient that is not there: no entries, in as many dims."""
    return jnp.zeros((0,) * x.ndim, jnp.float32)


def _scatter_whole(before: Layout, after: Layout, x: Array) -> Array:
    """The move of a sum that is whole on its rank: to axes of one rank, of which it then does not vary."""
    return collectives.reduce_scatter(_pattern(before, after, x), x)


def _laid_out(row: ParameterPlan, whole: Array) -> Array:
    """A layer's weight in the memory layout in which its products should read it."""
    if len(row.spec.inputs) != 2 or whole.ndim != 3:
        return whole
    if reads_heads_last():
        return heads_last(whole)
    return row_major(whole) if copies_whole_stacks() and not row.is_gathered_per_use else whole


def _pattern(before: Layout, after: Layout, x: Array) -> str:
    """The move in the notation; an array of one layer has no dim "layers". Partial sums may be left out: axes that
    a `reduce_scatter` brings are theirs."""
    skip = len(before.names) - x.ndim
    before, after = (Layout(layout.names[skip:], layout.axes[skip:]) for layout in (before, after))
    return f"{before} -> {after}"
