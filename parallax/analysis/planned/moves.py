"""What the moves of a sharding plan send for layers, and what stays on a device, from the plan's rows.

See parallax/sharding/plan.py for the moves: load, use, add_up, store.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from parallax.analysis.traced.collectives import Sent, sent_bytes
from parallax.sharding.layout import Layout
from parallax.sharding.plan import DATA_AXES, FLOAT32_BYTES, ParameterPlan, ShardingPlan


class Move(NamedTuple):
    """What a device sends over some data axes in one move of weights or gradients, of all layers or of tables. A
    gradient that several ranks hold at rest is summed once a step."""

    name: str  # "load" | "use" | "add_up" | "store" | "sum"
    kind: str  # as in Sent
    axes: tuple[str, ...]


def moves(plan: ShardingPlan, *, of_tables: bool = False) -> dict[Move, int]:
    """Bytes that a device sends in each move; `of_tables` those of embedding and head instead."""
    sent: Counter[Move] = Counter()
    kind = "reduce-scatter" if plan.fsdp.reduce == "float32" else "all-to-all"
    for row, size in _rows(plan, of_layers=not of_tables):
        weights = jnp.dtype(row.travels or jnp.float32).itemsize
        moved = [("load", "all-gather", row.staged, row.resident, weights)]
        moved += [("use", "all-gather", row.resident, row.compute, weights)]
        if not row.spec.is_constant:
            gradients = FLOAT32_BYTES if plan.fsdp.reduce == "float32" else jnp.dtype(row.dtype or jnp.float32).itemsize
            moved += [("add_up", kind, row.compute, row.summed, gradients)]
            moved += [("store", kind, row.summed, row.staged, gradients)]
            held = tuple(axis for axis in DATA_AXES if axis not in row.at_rest.used_axes())
            whole = _entries(plan, row.at_rest, size) * FLOAT32_BYTES
            sent[Move("sum", "all-reduce", held)] += sent_bytes("all-reduce", whole, _ranks(plan, held))
        for name, collective, before, after, itemsize in moved:
            axes = _axes_between(before, after)
            piece = _entries(plan, before, size) * itemsize
            sent[Move(name, collective, axes)] += sent_bytes(collective, piece, _ranks(plan, axes))
    return {move: size for move, size in sent.items() if size}


def bytes_in_step(plan: ShardingPlan) -> int:
    """Bytes on a device during a step: sums of the layers' gradients, and weights that stay gathered."""
    held = 0
    for row, size in _layers(plan):
        if not row.spec.is_constant:
            held += _entries(plan, row.summed, size) * row.grad_bytes
        if row.at_rest != row.resident == row.compute:
            narrow = row.rounded_to or row.rounded_for
            width = 1 if narrow else jnp.dtype(row.dtype or jnp.float32).itemsize
            held += _entries(plan, row.compute, size) * width
    return held


def read_by_update(plan: ShardingPlan) -> int:
    """Bytes of a device's gradients, which the update reads."""
    leaves = zip(jax.tree.leaves(plan.rows), jax.tree.leaves(plan.shapes), strict=True)
    trained = ((row, leaf.size) for row, leaf in leaves if row.spec.is_trained)
    return sum(_entries(plan, row.at_rest, size) * jnp.dtype(row.grads).itemsize for row, size in trained)


def most_pieces(plan: ShardingPlan) -> int:
    """Number of pieces into which a parameter of layers is cut at rest: the most of any."""
    return max(_ranks(plan, tuple(row.at_rest.used_axes())) for row, _ in _layers(plan))


class SentPerUse(NamedTuple):
    """What layers send at each use, not once a step: the modules whose weights, and those whose gradients, data axes
    move then; `modules` are all of which a layer consists, as "attention". Messages of the scopes in `together` have
    several arrays."""

    modules: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()
    gradients: frozenset[str] = frozenset()
    together: frozenset[str] = frozenset()

    @classmethod
    def of(cls, plan: ShardingPlan) -> "SentPerUse":
        """By the plan's rows."""
        weights, gradients = [], []
        for rows in map(plan.rows_of, {row.spec.stack for row, _ in _layers(plan)}):
            used = [index for index, row in enumerate(rows) if row.is_gathered_per_use]
            summed = [index for index, row in enumerate(rows) if row.compute != row.summed and not row.spec.is_constant]
            weights += plan.buckets_of_weights(rows, used)
            gradients += plan.buckets_of_gradients(rows, summed)
        scopes = [frozenset(bucket.scope for bucket in buckets) for buckets in (weights, gradients)]
        modules = frozenset().union(*scopes, (row.scope for row, _ in _layers(plan)))
        together = frozenset(bucket.scope for bucket in weights + gradients if len(bucket.members) > 1)
        return cls(frozenset(scope.split("/")[0] for scope in modules), *scopes, together)

    def has(self, sent: Sent) -> bool:
        """Whether this is such a message, if it is one of weights or their gradients."""
        return sent.module in (self.weights if sent.kind == "all-gather" else self.gradients)


def _layers(plan: ShardingPlan) -> Iterator[tuple[ParameterPlan, int]]:
    return _rows(plan, of_layers=True)


def _rows(plan: ShardingPlan, *, of_layers: bool) -> Iterator[tuple[ParameterPlan, int]]:
    """The rows of layers, or all others, with the number of entries on all devices."""
    for row, leaf in zip(jax.tree.leaves(plan.rows), jax.tree.leaves(plan.shapes), strict=True):
        if bool(row.spec.stack) == of_layers:
            yield row, leaf.size


def _axes_between(before: Layout, after: Layout) -> tuple[str, ...]:
    """The data axes that shard only one of them."""
    return tuple(axis for axis in DATA_AXES if (axis in before.used_axes()) != (axis in after.used_axes()))


def _ranks(plan: ShardingPlan, axes: tuple[str, ...]) -> int:
    return math.prod(plan.axis_sizes.get(axis, 1) for axis in axes)


def _entries(plan: ShardingPlan, layout: Layout, size: int) -> int:
    """Entries on a device, of `size` on all."""
    return size // _ranks(plan, tuple(layout.used_axes()))
