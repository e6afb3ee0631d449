"""Embedding and head in the ticks, one microbatch at a time."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from parallax.pipeline.ends import Tokens, Work, add, residuals, take
from parallax.sharding.activations import SHARED_ROWS, TOKENS
from parallax.sharding.collectives import all_gather, as_varying, cut, reduce_scatter


class InsideState(NamedTuple):
    exits: Array  # [exit slots, ...] gradients of the last stage's outputs
    loss: Array
    grads: Any


@dataclasses.dataclass(frozen=True)
class InsideEnds:
    """Embedding and head in the ticks, one microbatch at a time: the embedding on the first stage's rank, the head
    on all ranks, each with its share of tokens, when the last stage, on rank `last`, has run.

    Communication, a microbatch:
        forward   reduce_scatter of the last stage's output over pp
        backward  all_gather of its gradient over pp
    """

    work: Work
    tokens: Tokens
    weight: Array
    last: int

    def start(self, slots: int) -> InsideState:
        x = jax.eval_shape(lambda: self.enter(None, jnp.int32(0)))
        exits = as_varying(jnp.zeros((slots, *x.shape), x.dtype))
        return InsideState(exits, self.work.zero_loss(), self.work.zero_grads())

    def enter(self, state, microbatch):
        return self.work.embed(take(self.tokens.ids, microbatch), take(self.tokens.rows, microbatch))

    def leave(self, state, microbatch, slot, y):
        whole, own = residuals(self.work)
        loss, grads, d_share = self.work.head_loss_and_grads(*self._share(y, microbatch), self.weight, state.grads)
        dy = all_gather(f"{own} -> {whole}", d_share).reshape(y.shape)
        exits = lax.dynamic_update_index_in_dim(state.exits, as_varying(dy), slot, 0)
        return InsideState(exits, state.loss + loss, grads)

    def between(self, state):
        return state

    def enter_backward(self, state, microbatch, slot):
        return take(state.exits, slot)

    def leave_backward(self, state, microbatch, dx):
        ids, rows = take(self.tokens.ids, microbatch), take(self.tokens.rows, microbatch)
        return state._replace(grads=add(state.grads, self.work.embed_grads(ids, rows, dx)))

    def finish(self, state):
        return state

    def _share(self, y: Array, microbatch: Array) -> tuple[Array, Array]:
        """This rank's tokens of the last stage's output, and their labels.

        Rows that are too few for all ranks are folded: pieces of a row become rows, for the head works by tokens.
        """
        whole, own = residuals(self.work)
        mine = jnp.where(lax.axis_index("pp") == self.last, y, 0)
        share = reduce_scatter(f"{whole} -> {own}", self._folded(mine))
        return share, self._own_labels(take(self.tokens.labels, microbatch))

    def _folded(self, y_BSD: Array) -> Array:
        fold = folds(len(y_BSD), lax.axis_size("pp"))
        return y_BSD.reshape(len(y_BSD) * fold, -1, y_BSD.shape[-1])

    def _own_labels(self, labels_BS: Array) -> Array:
        """Labels of this rank's share, folded as every tp rank folds its own piece of seq."""
        fold = folds(len(labels_BS), lax.axis_size("pp"))
        pieces = math.prod(map(lax.axis_size, residuals(self.work)[0].cut_of("seq")))
        labels = labels_BS.reshape(len(labels_BS), pieces, fold, -1).swapaxes(1, 2)
        return cut(f"{TOKENS} -> {SHARED_ROWS} seq", labels.reshape(len(labels_BS) * fold, -1))


class LossEnds(InsideEnds):
    """The same for the forward pass alone; the state is the loss."""

    def start(self, slots: int) -> Array:
        return self.work.zero_loss()

    def leave(self, state, microbatch, slot, y):
        return state + self.work.head_loss(*self._share(y, microbatch))


def folds(rows: int, ranks: int) -> int:
    """Into how many pieces of seq each row must be cut so that ranks can share the pieces evenly.

    >>> folds(rows=2, ranks=8)
    4
    """
    return ranks // math.gcd(rows, ranks)
