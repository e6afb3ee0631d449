"""What stands before the first stage and behind the last: embedding, final norm, logits and loss.

No rank does the head's work for another: under each schedule all of them share it by tokens. The last stage alone
would make every tick of a 1F1B schedule longer by the whole head, where all ranks make it longer by a P-th; stages of
uneven layers could balance whole layers only. It costs two messages more per microbatch.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from parallax.collectives import all_gather, as_varying, cut, reduce_scatter, sum_over
from parallax.layers.embedding import logits, with_rows
from parallax.loss import IGNORED, LossConfig, chunked_loss, chunked_loss_and_grads
from parallax.mesh import AXES
from parallax.model import Parts
from parallax.notation import Layout


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A batch as one device has it, in microbatches: int32 arrays [M, B, S], the same on all pp and tp ranks."""

    ids: Array
    labels: Array
    segments: Array
    positions: Array
    rows: Array  # [M, B], indices in the global batch
    key: Array | None  # of this step's dropout

    def count(self) -> Array:
        """Labels in the whole global batch that are not ignored, float32."""
        return sum_over(jnp.sum(self.labels != IGNORED).astype(jnp.float32), ["dp"])


@dataclasses.dataclass(frozen=True)
class Work:
    """Embedding and head of a model for rows of the batch cut one way, on weights stored with FSDP.

    `gather` and `scatters` are as those of Stage. Gradients are this device's share, scaled by `weight`.
    """

    parts: Parts
    loss: LossConfig
    gather: dict[str, Callable[[Any], Any]]
    scatters: dict[str, list[Callable[[Array], Array]]]  # for each leaf
    weights: Any  # {"embedding": ..., "head": ...}
    key: Array | None

    def embed(self, ids_BS: Array, rows_B: Array) -> Array:
        return self._embed(self._gathered("embedding"), ids_BS, rows_B)

    def embed_grads(self, ids_BS: Array, rows_B: Array, dx: Array) -> Any:
        """The gradient of what is stored of the embedding."""
        _, pull = jax.vjp(lambda w: self._embed(w, ids_BS, rows_B), self._gathered("embedding"))
        (grads,) = pull(dx)
        return {"embedding": self._scattered("embedding", grads)}

    def head_loss(self, y: Array, labels_BS: Array) -> Array:
        """Cross-entropy and z-loss, [2], summed over this device's tokens."""
        weights = self._gathered("head")
        hidden = self._hidden(weights, y)
        return chunked_loss(self.loss, self._form.gathered, self._table(weights), *self._tokens(hidden, labels_BS))

    def head_loss_and_grads(self, y: Array, labels_BS: Array, weight: Array) -> tuple[Array, Any, Array]:
        """The losses summed over this device's tokens, the gradients of what is stored, and that of y."""
        weights = self._gathered("head")
        hidden, pull = jax.vjp(self._hidden, weights, y)
        tokens = self._tokens(hidden, labels_BS)
        table = as_varying(self._table(weights))
        loss, d_table, d_hidden = chunked_loss_and_grads(self.loss, self._form.gathered, table, *tokens, weight)
        grads, dy = pull(d_hidden.reshape(hidden.shape))
        if "table" in grads:
            grads = grads | {"table": d_table}
            return loss, {"head": self._scattered("head", grads)}, dy
        embedding = self._scattered("embedding", {"table": d_table})
        return loss, {"embedding": embedding, "head": self._scattered("head", grads)}, dy

    def logits(self, y: Array) -> Array:
        """Logits in float32 of this device's tokens, cut as the embedding's form says."""
        weights = self._gathered("head")
        return logits(self._form, self.parts.head.rows, self._hidden(weights, y), self._table(weights))

    def _gathered(self, part):
        return self.gather[part](self.weights[part])

    def _scattered(self, part, grads):
        leaves, structure = jax.tree.flatten(grads)
        return jax.tree.unflatten(structure, [f(leaf) for f, leaf in zip(self.scatters[part], leaves, strict=True)])

    @property
    def _form(self):
        return self.parts.head.form

    def _embed(self, weights, ids_BS, rows_B):
        # Layers fold in 1, 2, ...: see Stage.
        key = None if self.key is None else jax.random.fold_in(self.key, 0)
        return self.parts.embedding.apply({"params": weights}, ids_BS, rows_B, key)

    def _hidden(self, weights, y):
        return self.parts.head.apply({"params": weights}, y)

    def _table(self, head_weights):
        tied = self.parts.head.tied
        weights = self._gathered("embedding") if tied else head_weights
        return weights["table"].astype(self.parts.embedding.dtype)

    def _tokens(self, hidden, labels_BS):
        rows = self.parts.head.rows
        labels = cut(f"{rows} seq -> {self._form.ids(rows)}", labels_BS)
        return hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)

    def _zeros(self, part):
        return jax.tree.map(lambda w: as_varying(jnp.zeros(w.shape, jnp.float32)), self.weights[part])

    def zero_grads(self) -> Any:
        return {part: self._zeros(part) for part in self.weights}

    def zero_loss(self) -> Array:
        return as_varying(jnp.zeros(2, jnp.float32), self.loss_axes)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes over which a device's loss is one summand."""
        used = self._form.ids(self.parts.head.rows).used_axes()
        return tuple(axis for axis in AXES if axis in used or axis == "pp")


class InsideState(NamedTuple):
    exits: Array  # [exit slots, ...] gradients of the last stage's outputs
    loss: Array
    grads: Any


@dataclasses.dataclass(frozen=True)
class InsideEnds:
    """Embedding and head in the ticks, one microbatch at a time: the embedding on the first stage's rank, the head
    on all ranks, each with its share of tokens, when the last stage, on rank `last`, has run.

    Communication over pp, once a microbatch: reduce_scatter of the last stage's output to all ranks, all_gather of
    its gradient back.
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
        return self.work.embed(_take(self.tokens.ids, microbatch), _take(self.tokens.rows, microbatch))

    def leave(self, state, microbatch, slot, y):
        whole, own = _residuals(self.work)
        mine = jnp.where(lax.axis_index("pp") == self.last, y, 0)
        share = reduce_scatter(f"{whole} -> {own}", self._folded(mine))
        labels = self._own_labels(_take(self.tokens.labels, microbatch))
        loss, grads, d_share = self.work.head_loss_and_grads(share, labels, self.weight)
        dy = all_gather(f"{own} -> {whole}", d_share).reshape(y.shape)
        exits = lax.dynamic_update_index_in_dim(state.exits, as_varying(dy), slot, 0)
        return InsideState(exits, state.loss + loss, _add(state.grads, grads))

    def between(self, state):
        return state

    def enter_backward(self, state, microbatch, slot):
        return _take(state.exits, slot)

    def leave_backward(self, state, microbatch, dx):
        ids, rows = _take(self.tokens.ids, microbatch), _take(self.tokens.rows, microbatch)
        return state._replace(grads=_add(state.grads, self.work.embed_grads(ids, rows, dx)))

    def finish(self, state):
        return state

    # Rows that are too few for all ranks are folded: pieces of a row become rows, for the head works by tokens.

    def _folded(self, y_BSD: Array) -> Array:
        fold = folds(len(y_BSD), lax.axis_size("pp"))
        return y_BSD.reshape(len(y_BSD) * fold, -1, y_BSD.shape[-1])

    def _own_labels(self, labels_BS: Array) -> Array:
        """Labels of this rank's share, folded as every tp rank folds its own piece of seq."""
        fold = folds(len(labels_BS), lax.axis_size("pp"))
        pieces = math.prod(map(lax.axis_size, _residuals(self.work)[0].cut_of("seq")))
        labels = labels_BS.reshape(len(labels_BS), pieces, fold, -1).swapaxes(1, 2)
        return cut("batch/dp seq -> batch/dp/pp seq", labels.reshape(len(labels_BS) * fold, -1))


def folds(rows: int, ranks: int) -> int:
    """Into how many pieces of seq each row must be cut so that ranks can share the pieces evenly.

    >>> folds(rows=2, ranks=8)
    4
    """
    return ranks // math.gcd(rows, ranks)


class SpreadState(NamedTuple):
    entries: Array  # [M, ...] the first stage's inputs, then their gradients
    exits: Array  # [M, ...] the last stage's outputs, then their gradients
    loss: Array
    grads: Any


@dataclasses.dataclass(frozen=True)
class SpreadEnds:
    """Embedding before all ticks, head between forward and backward: every pipeline rank does its share of rows.

    Communication over pp: forward all_gather of the embedded rows and reduce_scatter of the last stage's outputs,
    backward the transposes: each rank sends every microbatch's activations about once, as a stage boundary does.
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
        return _take(state.entries, microbatch)

    def leave(self, state, microbatch, slot, y):
        return state._replace(exits=lax.dynamic_update_index_in_dim(state.exits, y, microbatch, 0))

    def between(self, state):
        y = self.from_last(state.exits)
        loss, grads, dy = self.work.head_loss_and_grads(y, self._own_rows(self.tokens.labels), self.weight)
        return SpreadState(state.entries, self._to_first(dy), state.loss + loss, _add(state.grads, grads))

    def enter_backward(self, state, microbatch, slot):
        return _take(state.exits, microbatch)

    def leave_backward(self, state, microbatch, dx):
        return state._replace(entries=lax.dynamic_update_index_in_dim(state.entries, dx, microbatch, 0))

    def finish(self, state) -> SpreadState:
        """Take the gradients of the first stage's inputs back to the ranks that embedded them."""
        first = lax.axis_index("pp") == 0
        dx = self._scatter_rows(jnp.where(first, state.entries, 0))
        grads = self.work.embed_grads(self._own_rows(self.tokens.ids), self._own_rows(self.tokens.rows), dx)
        return state._replace(grads=_add(state.grads, grads))

    def from_last(self, exits: Array) -> Array:
        """This rank's rows of the last stage's outputs."""
        last = lax.axis_index("pp") == self.last
        return self._scatter_rows(jnp.where(last, exits, 0))

    def own_labels(self) -> Array:
        return self._own_rows(self.tokens.labels)

    def _own_rows(self, x_MB: Array) -> Array:
        flat = x_MB.reshape(-1, *x_MB.shape[2:])
        rest = " seq" if flat.ndim == 2 else ""
        return cut(f"batch/dp{rest} -> batch/dp/pp{rest}", flat)

    def _to_first(self, x: Array) -> Array:
        whole, own = _residuals(self.work)
        rows = all_gather(f"{own} -> {whole}", x)
        return rows.reshape(*self.tokens.rows.shape, *rows.shape[1:])

    def _scatter_rows(self, x_MB: Array) -> Array:
        whole, own = _residuals(self.work)
        return reduce_scatter(f"{whole} -> {own}", x_MB.reshape(-1, *x_MB.shape[2:]))


def _residuals(work: Work) -> tuple[Layout, Layout]:
    """The residual stream's layout, and that of this pipeline rank's share of its rows."""
    residual = work.parts.head.residual
    return Layout.parse(residual), with_rows(residual, "batch/dp/pp")


def _take(stacked: Array, at: Array) -> Array:
    return lax.dynamic_index_in_dim(stacked, at, keepdims=False)


def _add(total: Any, share: Any) -> Any:
    """Gradients by part of the model; a part that has no share stays as it is."""
    added = {part: jax.tree.map(lambda a, b: a + as_varying(b), total[part], share[part]) for part in share}
    return total | added
