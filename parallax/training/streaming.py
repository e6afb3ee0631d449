"""Updates parameters or optimizer states in host memory, and states in float8, layer by layer.

Moved as a whole, they would need more device memory than if they had stayed there; widened as a whole, float8 saves
nothing during the update. The optimizer gets its usual trees,
in which arrays of other layers have no rows; so it must work by entry or by a layer's matrix.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from parallax.pipeline import ShardedModel
from parallax.runtime.errors import ConfigError
from parallax.sharding.host import HOST, is_on_host, to_device, to_host
from parallax.training.low_precision import Blocks

UNSTACKED, SHARED = "", "shared"  # labels: parameters outside of layers, and states that belong to no parameter
# `update(params, opt_state, grads, layers)` returns the updated first two; `layers` are the indices of stacked layers.
Update = Callable[[Any, Any, Any, Array | None], tuple[Any, Any]]


def map_kept(function: Callable, other: Callable[[Any], Any], opt_state: Any, *trees: Any) -> Any:
    """Map `function(kept, *leaves)` over the states of each parameter, with its leaves in `trees`, which have the
    parameters' structure; map `other(leaf)` over all other states.

    A state is an array, or blocks with their scales, or nothing if another optimizer in optax.partition updates the
    parameter.
    """
    is_per_param = lambda part: isinstance(part, dict) and part.keys() == trees[0].keys()  # noqa: E731
    is_kept = lambda leaf: isinstance(leaf, (optax.MaskedNode, Blocks))  # noqa: E731

    def of_param(kept: Any, *leaves: Any) -> Any:
        return kept if isinstance(kept, optax.MaskedNode) else function(kept, *leaves)

    def of_part(part: Any) -> Any:
        return jax.tree.map(of_param, part, *trees, is_leaf=is_kept) if is_per_param(part) else other(part)

    return jax.tree.map(of_part, opt_state, is_leaf=is_per_param)


def check_streams(model: ShardedModel, opt_state: Any) -> None:
    """Raise ConfigError if an update cannot work layer by layer; `opt_state` is a tree of shapes."""

    def check(kept: Any, param: Any, row: Any) -> Any:
        if HOST in (row.memory, row.states) and not isinstance(kept, Blocks) and kept.shape != param.shape:
            key = "masters_on" if row.memory == HOST else "states_on"
            raise ConfigError(
                f"optimizer.{key}='host' needs an optimizer that keeps arrays of the parameters' shapes; this one "
                f"keeps {list(kept.shape)} of {list(param.shape)}; use {key}='device', or AdamW or Muon."
            )
        return kept

    map_kept(check, lambda leaf: leaf, opt_state, model.shapes, model.plan.rows)


def update_by_layer(update: Update, model: ShardedModel, params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
    """The result of `update` for the whole trees; one layer at a time is widened, and on the device."""
    of_params = jax.tree_util.tree_map_with_path(partial(_stack_of, model.plan.orders), params)
    labelled = lambda kept, stack: jax.tree.map(lambda _: stack, kept)  # noqa: E731
    labels = of_params, map_kept(labelled, lambda _: SHARED, opt_state, of_params), of_params
    labels = dict(enumerate(jax.tree.leaves(labels)))
    leaves, structure = jax.tree.flatten((params, opt_state, grads))
    written = len(leaves) - len(jax.tree.leaves(grads))

    def updated(at_hand: Mapping[int, Array], layers: Array | None = None) -> list[Array]:
        """All leaves except gradients after an update in which the leaves `at_hand` have rows."""
        given = [at_hand.get(at, x if labels[at] == SHARED else _no_rows(x)) for at, x in enumerate(leaves)]
        return jax.tree.leaves(update(*jax.tree.unflatten(structure, given), layers))

    unstacked = updated({at: to_device(x) for at, x in enumerate(leaves) if labels[at] == UNSTACKED})
    results = [_beside(leaves[at], x) for at, x in enumerate(unstacked)]
    for stack in model.plan.orders:
        cut = {row.at_rest.cut_of("layers") for row in jax.tree.leaves(model.plan.rows_of(stack))}
        assert len(cut) == 1, f"layers of {stack} are cut in different ways: {cut}"
        pieces = math.prod(model.axis_sizes.get(axis, 1) for axis in cut.pop())
        # The first layer of every device, then the second, and so on.
        apart = {at: x.reshape(pieces, -1, *x.shape[1:]) for at, x in enumerate(leaves) if labels[at] == stack}
        carry = {at: x for at, x in apart.items() if at < written}
        turn = partial(_turn, updated, apart)
        for at, x in lax.fori_loop(0, next(iter(apart.values())).shape[1], turn, carry).items():
            results[at] = x.reshape(leaves[at].shape)
    return jax.tree.unflatten(jax.tree.structure((params, opt_state)), results)


def _turn(updated: Callable, apart: Mapping[int, Array], number: Array, carry: dict[int, Array]) -> dict[int, Array]:
    """Update one layer of each piece; arrays are `[piece, layer, ...]`, `carry` those that change."""
    rows = {at: lax.dynamic_slice_in_dim(x, number, 1, axis=1) for at, x in (apart | carry).items()}
    pieces, layers = next(iter(apart.values())).shape[:2]
    found = updated({at: to_device(x)[:, 0] for at, x in rows.items()}, number + layers * jnp.arange(pieces))
    write = lambda x, row: lax.dynamic_update_slice_in_dim(x, _beside(x, row[:, None]), number, axis=1)  # noqa: E731
    return {at: write(x, found[at]) for at, x in carry.items()}


def _stack_of(stacks: Mapping[str, Any], path: Any, leaf: Any) -> str:
    """The stack of layers to which a parameter belongs."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return next((stack for stack in stacks if name.startswith(f"{stack}/")), UNSTACKED)


def _no_rows(x: Array) -> Array:
    return jnp.zeros((0, *x.shape[1:]), x.dtype)


def _beside(x: Array, other: Array) -> Array:
    """The other array, moved to the memory of the first one."""
    return to_host(other) if is_on_host(x) else other
