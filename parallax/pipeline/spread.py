"""Embedding before all ticks, head between forward and backward."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from parallax.pipeline.ends import Tokens, Work, add, residuals, take
from parallax.sharding.activations import ROWS, SHARED_ROWS
from parallax.sharding.collectives import all_gather, as_varying, cut, reduce_scatter


class SpreadState(NamedTuple):
    entries: Array  # [M, ...] the first stage's inputs, then their gradients
    exits: Array  # [M, ...] the last stage's outputs, then their gradients
    loss: Array
    grads: Any


@dataclasses.dataclass(frozen=True)
class SpreadEnds:
    """Embedding before all ticks, head between forward and backward: every pipeline rank does its share of rows.

    Communication, a step:
        forward   all_gather of the embedded rows over pp; reduce_scatter of the last stage's outputs over pp
        backward  the transposes

    Each rank sends every microbatch's activations about once, as a stage boundary does.
    """

    work: Work
    tokens: Tokens
    weight: Array
    last: int  # rank of the last stage; the first is on rank 0

    def start(self, slots: int) -> SpreadState:
        x = self.work.embed(self._own_rows(self.tokens.ids), self._own_rows(self.tokens.rows))
        entries = as_varying(self._to_first(x))
        assert slots == len(entries), "all microbatches wait for the head together"
        return SpreadState(entries, jnp.zeros_like(entries), self.work.zero_loss(), self.work.zero_grads())

    def enter(self, state, microbatch):
        return take(state.entries, microbatch)

    def leave(self, state, microbatch, slot, y):
        return state._replace(exits=lax.dynamic_update_index_in_dim(state.exits, y, microbatch, 0))

    def between(self, state):
        y = self.from_last(state.exits)
        labels = self._own_rows(self.tokens.labels)
        loss, grads, dy = self.work.head_loss_and_grads(y, labels, self.weight, state.grads)
        return SpreadState(state.entries, self._to_first(dy), state.loss + loss, grads)

    def enter_backward(self, state, microbatch, slot):
        return take(state.exits, microbatch)

    def leave_backward(self, state, microbatch, dx):
        return state._replace(entries=lax.dynamic_update_index_in_dim(state.entries, dx, microbatch, 0))

    def finish(self, state) -> SpreadState:
        """Take the gradients of the first stage's inputs back to the ranks that embedded them."""
        first = lax.axis_index("pp") == 0
        dx = self._scatter_rows(jnp.where(first, state.entries, 0))
        grads = self.work.embed_grads(self._own_rows(self.tokens.ids), self._own_rows(self.tokens.rows), dx)
        return state._replace(grads=add(state.grads, grads))

    def from_last(self, exits: Array) -> Array:
        """This rank's rows of the last stage's outputs."""
        last = lax.axis_index("pp") == self.last
        return self._scatter_rows(jnp.where(last, exits, 0))

    def _own_rows(self, x_MB: Array) -> Array:
        flat = x_MB.reshape(-1, *x_MB.shape[2:])
        rest = " seq" if flat.ndim == 2 else ""
        return cut(f"{ROWS}{rest} -> {SHARED_ROWS}{rest}", flat)

    def _to_first(self, x: Array) -> Array:
        whole, own = residuals(self.work)
        rows = all_gather(f"{own} -> {whole}", x)
        return rows.reshape(*self.tokens.rows.shape, *rows.shape[1:])

    def _scatter_rows(self, x_MB: Array) -> Array:
        whole, own = residuals(self.work)
        return reduce_scatter(f"{whole} -> {own}", x_MB.reshape(-1, *x_MB.shape[2:]))
