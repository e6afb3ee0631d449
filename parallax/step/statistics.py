"""Updates of the parameters that follow from a step's statistics, and not from a gradient."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from parallax.model.products import latest_amax
from parallax.sharding.layout import named_leaves
from parallax.sharding.parameter import Role
from parallax.sharding.plan import ParameterPlan


def with_statistics(
    rows: Mapping[str, ParameterPlan], params: Any, statistics: Mapping[str, Array], balance_rate: float
) -> Any:
    """Parameters after a step with these statistics; `rows` are `plan.statistics`.

    Scales of 8-bit products follow from the largest magnitudes, biases of routers that are not frozen from the counts;
    largest logits are kept as they are.
    """
    after, structure = named_leaves(params), jax.tree.structure(params)
    for name, row in rows.items():
        if row.spec.role == Role.MAXIMA:
            after[name] = latest_amax(statistics[name], after[name])
        elif row.spec.role == Role.LOGITS:
            after[name] = statistics[name]
        elif not row.spec.frozen:
            after[name] = balanced(after[name], statistics[name], balance_rate)
    return jax.tree.unflatten(structure, after.values())


def balanced(bias: Array, counts: Array, rate: float) -> Array:
    """The bias of an expert with fewer tokens than the mean is raised by `rate`, that of others lowered (arXiv
    2408.15664)."""
    return bias + rate * jnp.sign(counts.mean(-1, keepdims=True) - counts)
