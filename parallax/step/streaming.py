"""Updates parameters or optimizer states in host memory, and states in float8, layer by layer.

Moved as a whole, they would need more device memory than if they had stayed there; widened as a whole, float8 saves
nothing during the update. The optimizer gets its usual trees,
in which arrays of other layers have no rows; so it must work by entry or by a layer's matrix.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from parallax.errors import ConfigError
from parallax.pipeline import ShardedModel
from parallax.sharding.host import HOST, argument_to_device, is_on_host, to_host
from parallax.step.low_precision import Blocks

# In place of a stack: parameters outside of layers, states of no parameter, parameters that stay as they are.
UNSTACKED, WITHOUT_PARAMETER, FROZEN = "", "none", "frozen"
# `update(params, opt_state, grads, layers)` returns the updated first two; `layers` are the indices of stacked layers.
Update = Callable[[Any, Any, Any, Array | None], tuple[Any, Any]]


def map_kept(function: Callable, other: Callable[[Any], Any], opt_state: Any, *trees: Any) -> Any:
    """Map `function(kept, *leaves)` over the states of each parameter, with its leaves in `trees`, which have the
    parameters' structure; map `other(leaf)` over all other states.

    A state is an array, or blocks with their scales, or nothing if another optimizer in optax.partition updates the
    parameter.
    """

    def is_per_param(part: Any) -> bool:
        return isinstance(part, dict) and part.keys() == trees[0].keys()

    def is_kept(leaf: Any) -> bool:
        return isinstance(leaf, (optax.MaskedNode, Blocks))

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


def update_by_layer(
    update: Update, model: ShardedModel, params: Any, opt_state: Any, grads: Any, shardings: tuple[Any, Any]
) -> tuple[Any, Any]:
    """The result of `update` for the whole trees; one layer at a time is widened, and on the device.

    `shardings` are those of the parameters, and so of the gradients, and of the optimizer's state.
    """
    of_params = jax.tree.map(lambda row: row.spec.stack if row.spec.is_trained else FROZEN, model.plan.rows)

    def labelled(kept: Any, stack: str) -> Any:
        return jax.tree.map(lambda _: stack, kept)

    labels = of_params, map_kept(labelled, lambda _: WITHOUT_PARAMETER, opt_state, of_params), of_params
    labels = dict(enumerate(jax.tree.leaves(labels)))
    specs = [sharding.spec for sharding in jax.tree.leaves((*shardings, shardings[0]))]
    leaves, structure = jax.tree.flatten((params, opt_state, grads))
    written = len(leaves) - len(jax.tree.leaves(grads))

    def updated(at_hand: Mapping[int, Array], layers: Array | None = None) -> list[Array]:
        """All leaves except gradients after an update in which the leaves `at_hand` have rows."""
        given = [
            at_hand.get(index, x if labels[index] == WITHOUT_PARAMETER else _no_rows(x))
            for index, x in enumerate(leaves)
        ]
        return jax.tree.leaves(update(*jax.tree.unflatten(structure, given), layers))

    unstacked = updated(
        {index: _fetch(x, specs[index]) for index, x in enumerate(leaves) if labels[index] == UNSTACKED}
    )
    results = [to_host(x) if is_on_host(leaf) else x for leaf, x in zip(leaves, unstacked)]
    results = [leaves[index] if labels[index] == FROZEN else x for index, x in enumerate(results)]
    for stack in model.plan.orders:
        stacked = {index: x for index, x in enumerate(leaves) if labels[index] == stack}
        if not stacked:
            continue
        cut = {row.at_rest.cut_of("layers") for row in model.plan.rows_of(stack)}
        assert len(cut) == 1, f"layers of {stack} are cut in different ways: {cut}"
        pieces = math.prod(model.axis_sizes.get(axis, 1) for axis in cut.pop())
        changed = _layers_in_turn(updated, stacked, specs, written, pieces)
        results = [changed.get(index, x) for index, x in enumerate(results)]
    return jax.tree.unflatten(jax.tree.structure((params, opt_state)), results)


def _layers_in_turn(
    updated: Callable, stacked: Mapping[int, Array], specs: Sequence[P], written: int, pieces: int
) -> dict[int, Array]:
    """The first `written` leaves with layers, updated: the first layer of each piece, then the second, and so on."""
    layers = len(next(iter(stacked.values()))) // pieces

    def turn(number: Array, carry: dict[int, Array]) -> dict[int, Array]:
        rows = {index: _fetch(x, specs[index], number) for index, x in (stacked | carry).items()}
        results = updated(rows, number + layers * jnp.arange(pieces))
        return {index: _write(x, results[index], specs[index], number) for index, x in carry.items()}

    return lax.fori_loop(0, layers, turn, {index: x for index, x in stacked.items() if index < written})


def _fetch(x: Array, spec: P, number: Array | None = None) -> Array:
    """An array on the device, or of a stack the layer of this number on each piece: `[pieces, ...]`."""
    on_host = is_on_host(x)

    @partial(jax.shard_map, in_specs=(spec, P()), out_specs=spec, check_vma=True)
    def local(x: Array, number: Array | None) -> Array:
        if on_host:
            return argument_to_device(to_host(x), number)
        return x if number is None else lax.dynamic_slice_in_dim(x, number, 1)

    return local(x, number)


def _write(x: Array, layers: Array, spec: P, number: Array) -> Array:
    """The stack with the layer of this number on each piece, `[pieces, ...]`, replaced; in its memory."""
    on_host = is_on_host(x)

    @partial(jax.shard_map, in_specs=(spec, spec, P()), out_specs=spec, check_vma=True)
    def local(x: Array, layer: Array, number: Array) -> Array:
        x, layer = (to_host(x), to_host(layer)) if on_host else (x, layer)
        return lax.dynamic_update_slice_in_dim(x, layer, number, 0)

    return local(x, layers, number)


def _no_rows(x: Array) -> Array:
    return jnp.zeros((0, *x.shape[1:]), x.dtype)
