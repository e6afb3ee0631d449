"""What stands before the first stage and behind the last: embedding, final norm, logits and loss.

No rank does the head's work for another: under each schedule all of them share it by tokens. The last stage alone
would make every tick of a 1F1B schedule longer by the whole head, where all ranks make it longer by a P-th; stages of
uneven layers could balance whole layers only. It costs two messages more per microbatch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from parallax.config.sections import ALL_AXES, LossConfig
from parallax.model.batch import IGNORED
from parallax.model.embedding import logits
from parallax.model.loss import chunked_loss, chunked_loss_and_grads
from parallax.model.transformer import Parts
from parallax.sharding.activations import BATCH_AXES, SHARED_ROWS, with_rows
from parallax.sharding.collectives import as_varying, cut, sum_over
from parallax.sharding.layout import Layout
from parallax.sharding.plan import ShardingPlan


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
        return sum_over(jnp.sum(self.labels != IGNORED).astype(jnp.float32), BATCH_AXES)


@dataclasses.dataclass(frozen=True)
class Work:
    """Embedding and head of a model for rows of the batch cut one way, on resident weights. Gradients are this
    device's share, scaled by `weight`, and cut as the plan's summed ones are.
    """

    parts: Parts
    loss: LossConfig
    plan: ShardingPlan
    weights: Any  # {"embedding": ..., "head": ...}, resident
    key: Array | None

    def embed(self, ids_BS: Array, rows_B: Array) -> Array:
        return self._embed(self._gathered("embedding"), ids_BS, rows_B)

    def embed_grads(self, ids_BS: Array, rows_B: Array, dx: Array) -> Any:
        """The gradient of what is stored of the embedding."""
        _, pull = jax.vjp(lambda w: self._embed(w, ids_BS, rows_B), self._gathered("embedding"))
        (grads,) = pull(dx)
        return {"embedding": self.plan.added_up("embedding", grads)}

    def head_loss(self, y: Array, labels_BS: Array) -> Array:
        """Cross-entropy and z-loss, [2], summed over this device's tokens."""
        weights = self._gathered("head")
        arrays = self._table(weights), *self._tokens(self._hidden(weights, y), labels_BS)
        return chunked_loss(self.loss, self._form.table, *arrays, entries=self._entries)

    def head_loss_and_grads(self, y: Array, labels_BS: Array, weight: Array, totals: Any) -> tuple[Array, Any, Array]:
        """The losses summed over this device's tokens, `totals` with the gradients of what is stored added, and the
        gradient in y."""
        weights, home = self._gathered("head"), "embedding" if self.parts.head.tied else "head"
        hidden, pull = jax.vjp(self._hidden, weights, y)
        arrays = as_varying(self._table(weights)), *self._tokens(hidden, labels_BS), weight
        row = self.plan.rows[home]["table"]
        in_place = row.summed == row.compute  # nothing is left to scatter
        earlier = totals[home]["table"] if in_place else None
        loss, d_table, d_hidden = chunked_loss_and_grads(
            self.loss, self._form.table, *arrays, earlier, entries=self._entries
        )
        found, dy = pull(d_hidden.reshape(hidden.shape))
        shares = {"head": {name: grad for name, grad in found.items() if name != "table"}}
        if in_place:
            totals = totals | {home: totals[home] | {"table": d_table}}
        else:
            shares.setdefault(home, {})["table"] = d_table
        shares = {part: self.plan.added_up(part, share) for part, share in shares.items()}
        return loss, add(totals, shares), dy

    def logits(self, y: Array) -> Array:
        """Logits in float32 of this device's tokens, cut as the embedding's form says."""
        weights = self._gathered("head")
        rows = self.parts.head.rows
        return logits(self._form, rows, self._hidden(weights, y), self._table(weights), self._entries)

    def _gathered(self, part):
        return self.plan.use(self.weights[part], part)

    @property
    def _form(self):
        return self.parts.head.form

    @property
    def _entries(self):
        return self.parts.head.entries

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

    def zero_grads(self) -> Any:
        return {part: self.plan.zero_grads(part, self.weights[part]) for part in self.weights}

    def zero_loss(self) -> Array:
        return as_varying(jnp.zeros(2, jnp.float32), self.loss_axes)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes over which a device's loss is one summand."""
        used = self._form.ids(self.parts.head.rows).used_axes()
        return tuple(axis for axis in ALL_AXES if axis in used or axis == "pp")


def residuals(work: Work) -> tuple[Layout, Layout]:
    """The residual stream's layout, and that of this pipeline rank's share of its rows."""
    residual = work.parts.head.residual
    return Layout.parse(residual), with_rows(residual, SHARED_ROWS)


def take(stacked: Array, at: Array) -> Array:
    return lax.dynamic_index_in_dim(stacked, at, keepdims=False)


def add(total: Any, share: Any) -> Any:
    """Gradients by part of the model; what has no share stays as it is."""

    def added(part: str) -> Any:
        own = {name: total[part][name] for name in share[part]}
        return total[part] | jax.tree.map(lambda a, b: a + as_varying(b), own, share[part])

    return total | {part: added(part) for part in share}
