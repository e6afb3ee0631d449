"""The load of experts in a step: each expert's share of the choices in its layer.

A step's statistics have the counts over the whole batch: see parallax/model/experts/router.py.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from parallax.pipeline import ShardedModel
from parallax.sharding.collectives import as_varying, offset, sum_over
from parallax.sharding.layout import Layout, named_leaves
from parallax.sharding.parameter import Role

EXPERT_COUNTS = "expert_counts"  # of a step's metrics
DIGITS = 5  # decimals of a share in metrics.jsonl


def counts_of(model: ShardedModel, statistics: Mapping[str, Array]) -> dict[str, Array]:
    """Metrics of a model with experts, empty for others: how often each expert was chosen, float32 [layers with
    experts, experts], in the order of the model, whole on every device. Padding tokens are counted, too."""
    counted = [name for name, row in model.plan.statistics.items() if row.spec.role == Role.COUNTS]
    if not counted:
        return {}
    shapes, rows = named_leaves(model.shapes), model.plan.statistics
    stacks = [_whole(model.mesh, statistics[name], rows[name].at_rest, shapes[name].shape) for name in counted]
    if len(stacks) == 1:
        return {EXPERT_COUNTS: stacks[0]}
    layers = np.concatenate([model.orders[rows[name].spec.stack].members for name in counted])
    return {EXPERT_COUNTS: jnp.concatenate(stacks)[np.argsort(layers)]}


def _whole(mesh: Any, x: Array, layout: Layout, shape: tuple[int, ...]) -> Array:
    """The whole of a sharded array on every device, in the local view: the sum of pieces at their positions.

    Communication:
        forward   all_reduce of the counts over the axes that cut them
    """

    def local(piece: Array) -> Array:
        starts = [offset(layout, dim, size) for dim, size in zip(layout.names, piece.shape, strict=True)]
        empty = as_varying(jnp.zeros(shape, piece.dtype), layout.used_axes())
        return sum_over(jax.lax.dynamic_update_slice(empty, piece, starts), layout.used_axes())

    return jax.shard_map(local, mesh=mesh, in_specs=(layout.spec(mesh),), out_specs=P(), check_vma=True)(x)


def load_values(counts: np.ndarray, bases: tuple[str, ...], *, table: bool) -> dict[str, Any]:
    """Values for metrics.jsonl from counts [layers with experts, experts]; `bases` are ModelConfig.layer_bases.

    "experts/load" is the largest share of an expert over an even share, 1 or more. "experts/entropy" is the entropy of
    the shares over that of even shares, 0 to 1. Both are the worst of all layers. Lists are by layer; "experts/layers"
    has the layers' numbers in the model. With `table`, "experts/shares" has the share of each expert.

    >>> load_values(np.array([[6, 2], [4, 4]]), ("dense", "moe", "moe"), table=True)["experts/shares"]
    [[0.75, 0.25], [0.5, 0.5]]
    """
    shares = counts.astype(float) / np.maximum(counts.sum(axis=-1, keepdims=True), 1)
    experts = counts.shape[-1]
    loads = experts * shares.max(axis=-1)
    entropies = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(axis=-1) / max(math.log(experts), 1e-9)

    def rounded(values: np.ndarray) -> list:
        return np.round(values, DIGITS).tolist()

    return {
        "experts/load": float(loads.max()),
        "experts/entropy": float(entropies.min()),
        "experts/layers": [layer for layer, base in enumerate(bases) if base == "moe"],
        "experts/load_by_layer": rounded(loads),
        "experts/entropy_by_layer": rounded(entropies),
        **({"experts/shares": rounded(shares)} if table else {}),
    }
