"""A forward pass that records, for each layer's output, non-finite entries and the largest magnitude."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from parallax.config.sections import ALL_AXES
from parallax.pipeline.executor import Read, Stage
from parallax.sharding.collectives import as_varying, max_over, sum_over, vary_all


class ObservedStage(Stage):
    """A stage that saves only its observations: float32 [1 + layers of the model, 2], for the embedding and each layer
    the number of non-finite entries of its output and the largest magnitude of the others."""

    def forward(self, weights: Sequence[Any], read: Read, seen: Array) -> tuple[Array, Array]:
        x, context, at = read()

        def step(stack, carry, layer, number, gathered):
            x, seen = carry
            own = stack.layers[number]
            seen = _add(seen, jnp.int32(0), x, own == 0)
            y = stack.layer(gathered, x, stack.context(context, number))
            return (y, _add(seen, own + 1, y, own >= 0)), {}

        state: Any = (x, seen), []
        for turns in self.loop.turns(step, at.chunk, weights=weights):
            state = turns.end(lax.fori_loop(turns.start, turns.stop, turns.turn, turns.begin(state)))
        return vary_all(state[0])


def nothing_seen(layers: int) -> Array:
    """The observations before the first layer."""
    return as_varying(jnp.zeros((1 + layers, 2), jnp.float32))


def all_seen(seen: Array) -> Array:
    """The combined observations of all devices; each entry of an activation is on one of them."""
    return jnp.stack([sum_over(seen[:, 0], ALL_AXES), max_over(seen[:, 1], ALL_AXES)], axis=1)


def _add(seen: Array, at: Array, x: Array, counts: Array) -> Array:
    finite, wide = jnp.isfinite(x), jnp.abs(x.astype(jnp.float32))
    found = jnp.stack([jnp.sum(~finite).astype(jnp.float32), jnp.max(jnp.where(finite, wide, 0))])
    found = as_varying(jnp.where(counts, found, 0))
    return seen.at[at].set(jnp.stack([seen[at, 0] + found[0], jnp.maximum(seen[at, 1], found[1])]))
