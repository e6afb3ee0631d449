"""Both ends of the pipeline: embedding before the first stage, head (final norm, logits and loss) after the last one.

With every schedule all ranks share the head by tokens. If only the last stage computed it, every tick of a 1F1B
schedule would be longer by the whole head instead of a P-th of it, and stages of uneven layers could only balance whole
layers. Sharing takes two more messages per microbatch.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax

from parallax.config.sections import ALL_AXES, EMBEDDING, HEAD, LossConfig
from parallax.model.batch import BATCH_ARRAYS, GROUPS, IGNORED
from parallax.model.embedding import logits
from parallax.model.loss import TokenGroups, chunked_loss, chunked_loss_and_grads
from parallax.model.transformer import Parts
from parallax.sharding.activations import BATCH, BATCH_AXES, ROWS, SEQ, SHARED_ROWS, TOKEN_AXES, TOKENS, with_rows
from parallax.sharding.collectives import all_gather, as_varying, cut, offset, reduce_scatter, sum_over
from parallax.sharding.layout import Layout
from parallax.sharding.plan import GRADIENTS, ShardingPlan
from parallax.sharding.zigzag import context_ranks, own_tokens

DROPOUT = 0x44524F50  # "DROP": keeps dropout's keys apart from those of the initial values


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One device's part of a batch, in microbatches: int32 arrays [M, B, S], the same on all pp and tp ranks. Tokens of
    context ranks are in the order of parallax/sharding/zigzag.py."""

    ids: Array
    labels: Array
    segments: Array  # [M, B, N], those of whole rows, in order
    positions: Array
    rows: Array  # [M, B], indices in the global batch
    key: Array | None  # of this step's dropout
    groups: Array | None = None  # [M, B, S]

    @staticmethod
    def of(
        batch: Mapping[str, Array], noise: Array | None, microbatches: int, *, order: str, drops: bool, shared: bool
    ) -> "Tokens":
        """Those of this device's part of a batch. If microbatches are `shared`, each has consecutive rows of the batch
        on every mesh, which data ranks share; otherwise each rank divides its own rows.

        Communication:
            forward   all_gather of the batch's arrays over cp
            backward  nothing
        """
        rows = offset(BATCH, "batch", len(batch["tokens"])) + jnp.arange(len(batch["tokens"]))
        if context_ranks() > 1:
            whole = all_gather(f"entries {TOKENS} -> entries {ROWS} seq", jnp.stack(list(batch.values())))
            batch = dict(zip(batch, own_tokens(whole, 2, order))) | {"segments": dict(zip(batch, whole))["segments"]}
        if shared:
            batch = {name: _share_of_each(x, microbatches) for name, x in batch.items()}
            rows = _share_of_each(rows, microbatches)
        arrays = {name: rearrange(x, "(M B) S -> M B S", M=microbatches) for name, x in batch.items()}
        key = None
        if noise is not None and drops:
            root = jax.random.fold_in(jax.random.key(noise[0]), DROPOUT)
            key = as_varying(jax.random.fold_in(root, noise[1]))
        rows = rows.reshape(microbatches, -1)
        return Tokens(*(arrays[name] for name in BATCH_ARRAYS), rows, key, arrays.get(GROUPS))

    def count(self) -> Array:
        """Number of labels in the whole global batch that are not ignored, float32."""
        return sum_over(jnp.sum(self.labels != IGNORED).astype(jnp.float32), TOKEN_AXES)

    def counts(self, groups: int) -> Array:
        """The same of each group, [groups]."""
        is_in = self.groups[None] == jnp.arange(groups).reshape(-1, 1, 1, 1)
        counts = jnp.sum(is_in & (self.labels != IGNORED)[None], axis=(1, 2, 3))
        return sum_over(counts.astype(jnp.float32), TOKEN_AXES)

    @property
    def targets(self) -> dict[str, Array]:
        """What the head reads of tokens: their labels, and their groups if losses are summed by group."""
        return {"labels": self.labels} | ({} if self.groups is None else {GROUPS: self.groups})


def _share_of_each(x: Array, count: int) -> Array:
    """This rank's rows of each of so many microbatches with consecutive rows of the batch, from its own rows.

    Communication:
        forward   all_gather of x over data axes
        backward  nothing
    """
    whole = all_gather(f"{ROWS} seq -> batch seq", as_varying(x.reshape(len(x), -1), BATCH_AXES))
    shares = rearrange(whole, "(M ranks B) S -> ranks (M B) S", M=count, ranks=len(whole) // len(x))
    return shares[offset(BATCH, "batch", 1)].reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class EmbedAndHead:
    """Both ends of a pipeline: the first stage's input, on rank 0, and what follows the last one's output, on `last`.

    Gradients are this device's share, scaled by `weight`, in the plan's summed layout.
    """

    parts: Parts
    loss: LossConfig
    plan: ShardingPlan
    weights: Any  # {"embedding": ..., "head": ...}, resident
    tokens: Tokens
    last: int
    weight: Array | None  # of a token in the loss whose gradient is taken; a forward pass has none
    groups: int = 0  # whose losses are also summed apart

    def embed(self, ids_BS: Array, rows_B: Array) -> Array:
        return self._embed(self._gathered(EMBEDDING), ids_BS, rows_B)

    def embed_grads(self, ids_BS: Array, rows_B: Array, dx: Array) -> Any:
        """The gradient of the stored embedding; occurrences of a token are added in float32."""
        wide = jax.tree.map(lambda w: w.astype(jnp.float32), self._gathered(EMBEDDING))  # its values are not needed
        _, pull = jax.vjp(lambda w: self._embed(w, ids_BS, rows_B), wide)
        (grads,) = pull(dx)
        return {EMBEDDING: self.plan.to_summed(EMBEDDING, grads)}

    def head_loss_and_grads(self, y: Array, targets: Mapping[str, Array], totals: Any) -> tuple[Array, Any, Array]:
        """The sums of `chunked_loss` over this device's tokens, `totals` plus the gradients of the stored
        parameters, and the gradient with respect to y."""
        weights, head = self._gathered(HEAD), self.parts.head
        home = EMBEDDING if head.tied else HEAD
        hidden, pull = jax.vjp(self._hidden, weights, y)
        table, labels = as_varying(self._table(weights)), cut(self._cut_of_labels, targets["labels"])
        arrays = table, hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), self.weight
        row = self.plan.rows[home]["table"]
        in_place, trained = row.summed == row.compute, row.spec.is_trained  # in place: nothing needs to be scattered
        earlier = totals[home]["table"] if in_place and trained else None
        form = dict(entries=head.entries, logit_form=head.logit_form, groups=self._own_groups(targets))
        loss, d_table, d_hidden = chunked_loss_and_grads(
            self.loss, head.form.table, *arrays, earlier, trained=trained, **form
        )
        of_head, dy = pull(d_hidden.reshape(hidden.shape))
        shares = {HEAD: {name: grad for name, grad in of_head.items() if name != "table"}}
        if in_place and trained:
            totals = totals | {home: totals[home] | {"table": d_table}}
        elif trained:
            shares.setdefault(home, {})["table"] = d_table
        shares = {part: self.plan.to_summed(part, share) for part, share in shares.items()}
        if self.loss.table_first:
            dy, shares = lax.optimization_barrier((dy, shares))  # before the layers' backward pass, which reads dy
        return loss, add_gradients(totals, shares), dy

    def logits(self, y: Array) -> Array:
        """Logits in float32 of this device's tokens, sharded as the embedding's form says."""
        weights, head = self._gathered(HEAD), self.parts.head
        arrays = self._hidden(weights, y), self._table(weights)
        return logits(head.form, head.rows, *arrays, head.entries, head.logit_form)

    def _gathered(self, part: str) -> Any:
        return self.plan.use(self.weights[part], part)

    def _embed(self, weights: Any, ids_BS: Array, rows_B: Array) -> Array:
        key = self.tokens.key
        key = None if key is None else jax.random.fold_in(key, 0)  # layers fold in 1, 2, ...: see `one_layer`
        weights = self.plan.stop_frozen(weights, EMBEDDING)
        return self.parts.embedding.apply({"params": weights}, ids_BS, rows_B, key)

    def _hidden(self, weights: Any, y: Array) -> Array:
        return self.parts.head.apply({"params": self.plan.stop_frozen(weights, HEAD)}, y)

    def _table(self, head_weights: Any) -> Array:
        weights = self._gathered(EMBEDDING) if self.parts.head.tied else head_weights
        return weights["table"].astype(self.parts.embedding.dtype)

    def _own_groups(self, targets: Mapping[str, Array]) -> TokenGroups | None:
        """The groups of the tokens of which this device computes logits."""
        if not self.groups:
            return None
        return TokenGroups(cut(self._cut_of_labels, targets[GROUPS]).reshape(-1), self.groups)

    @property
    def _cut_of_labels(self) -> str:
        """The move of labels to the tokens of which this device computes logits."""
        rows = self.parts.head.rows
        return f"{rows} {SEQ} -> {self.parts.head.form.ids(rows)}"

    def zero_grads(self) -> Any:
        return {part: self.plan.zero_grads(part, self.weights[part]) for part in self.weights}

    def zero_loss(self) -> Array:
        shape = (2, 1 + self.groups) if self.groups else (2,)
        return as_varying(jnp.zeros(shape, jnp.float32), self.loss_axes)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes over which the losses of devices must be summed."""
        used = self.parts.head.form.ids(self.parts.head.rows).used_axes()
        return tuple(axis for axis in ALL_AXES if axis in used or axis == "pp")

    @property
    def _residual(self) -> tuple[Layout, Layout]:
        """Layout of the residual stream, and of a pipeline rank's share of its rows."""
        return Layout.parse(self.parts.head.residual), with_rows(self.parts.head.residual, SHARED_ROWS)


def add_gradients(total: Any, share: Any) -> Any:
    """Add a share to gradients by part of the model; parts without a share are unchanged."""

    def added(part: str) -> Any:
        before = {name: total[part][name] for name in share[part]}
        return total[part] | jax.tree.map(lambda a, b: a + as_varying(b), before, share[part])

    return total | {part: added(part) for part in share}


class EndsState(NamedTuple):
    """What ticks carry of both ends; None where a form of the ends, or a forward pass, has no such thing."""

    entries: Array | None  # [M, ...] the first stage's inputs, then their gradients
    exits: Array | None  # [M or exit slots, ...] the last stage's outputs, then their gradients
    loss: Array
    grads: Any


class MicrobatchHead(EmbedAndHead):
    """Embedding and head in the ticks, one microbatch at a time. The embedding runs on the first stage's rank; the head
    runs on all ranks, each with its share of tokens, after the last stage, on rank `last`.

    Communication, a microbatch:
        forward   reduce_scatter of the last stage's output over pp
        backward  all_gather of its gradient over pp
    """

    def start(self, slots: int) -> EndsState:
        """The state before the first tick; `slots` are those of gradients of the last stage's outputs."""
        x = jax.eval_shape(lambda: self.first_stage_input(None, jnp.int32(0)))
        exits = as_varying(jnp.zeros((slots, *x.shape), x.dtype))
        return EndsState(None, exits, self.zero_loss(), self.zero_grads())

    def first_stage_input(self, state: EndsState | None, microbatch: Array) -> Array:
        """The first stage's input."""
        return self.embed(*self._ids_and_rows(microbatch))

    def on_last_stage_output(self, state: EndsState, microbatch: Array, slot: Array, y: Array) -> EndsState:
        """Take the last stage's output, which is `y` on its rank; all ranks call this together."""
        # If there are fewer rows than ranks, they are folded: pieces of a row become rows, since the head works by
        # tokens.
        whole, share = self._residual
        mine, fold = jnp.where(lax.axis_index("pp") == self.last, y, 0), folds(len(y), lax.axis_size("pp"))
        y_of_share = reduce_scatter(f"{whole} -> {share}", mine.reshape(len(y) * fold, -1, y.shape[-1]))
        # Labels are folded in the same way as every tp rank folds its own piece of seq.
        pieces = math.prod(map(lax.axis_size, whole.without(*TOKEN_AXES).cut_of("seq")))
        targets = {}
        for name, x_MBS in self.tokens.targets.items():
            x_BS = lax.dynamic_index_in_dim(x_MBS, microbatch, keepdims=False)
            folded = rearrange(x_BS, "B (pieces fold S) -> (B fold) (pieces S)", pieces=pieces, fold=fold)
            targets[name] = cut(f"{TOKENS} -> {SHARED_ROWS} {SEQ}", folded)
        loss, grads, d_share = self.head_loss_and_grads(y_of_share, targets, state.grads)
        exits = state.exits
        if exits is not None:
            with jax.named_scope(GRADIENTS):
                dy = all_gather(f"{share} -> {whole}", d_share).reshape(y.shape)
            exits = lax.dynamic_update_index_in_dim(exits, as_varying(dy), slot, 0)
        return EndsState(None, exits, state.loss + loss, grads)

    def last_stage_gradient(self, state: EndsState, microbatch: Array, slot: Array) -> Array:
        """The gradient with respect to the last stage's output."""
        return lax.dynamic_index_in_dim(state.exits, slot, keepdims=False)

    def on_first_stage_gradient(self, state: EndsState, microbatch: Array, dx: Array) -> EndsState:
        """Take the gradient with respect to the first stage's input."""
        grads = self.embed_grads(*self._ids_and_rows(microbatch), dx)
        return state._replace(grads=add_gradients(state.grads, grads))

    def _ids_and_rows(self, microbatch: Array) -> list[Array]:
        arrays = self.tokens.ids, self.tokens.rows
        return [lax.dynamic_index_in_dim(x, microbatch, keepdims=False) for x in arrays]

    def finish(self, state: EndsState) -> EndsState:
        """What is left to do after the last tick."""
        return state


class LossOnly(MicrobatchHead):
    """The same for the forward pass alone."""

    def start(self, slots: int) -> EndsState:
        return EndsState(None, None, self.zero_loss(), None)

    def head_loss_and_grads(self, y: Array, targets: Mapping[str, Array], totals: None) -> tuple[Array, None, None]:
        weights, head = self._gathered(HEAD), self.parts.head
        table, hidden = self._table(weights), self._hidden(weights, y)
        labels = cut(self._cut_of_labels, targets["labels"])
        arrays = table, hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        form = dict(entries=head.entries, logit_form=head.logit_form, groups=self._own_groups(targets))
        return chunked_loss(self.loss, head.form.table, *arrays, **form), None, None


def folds(rows: int, ranks: int) -> int:
    """Number of pieces of seq into which each row must be divided so that ranks can share the pieces evenly.

    >>> folds(rows=2, ranks=8)
    4
    """
    return ranks // math.gcd(rows, ranks)


class BatchedHead(EmbedAndHead):
    """Embedding before all ticks, head between forward and backward: every pipeline rank processes its share of rows.

    Communication, a step:
        forward   all_gather of the embedded rows over pp; reduce_scatter of the last stage's outputs over pp
        backward  the transposes

    Each rank sends the activations of every microbatch about once, like a stage boundary.
    """

    def start(self, slots: int) -> EndsState:
        """The state before the first tick: all rows are embedded."""
        x = self.embed(self._own_rows(self.tokens.ids), self._own_rows(self.tokens.rows))
        entries = as_varying(self._to_first(x))
        assert slots == len(entries), "all microbatches wait for the head together"
        return EndsState(entries, jnp.zeros_like(entries), self.zero_loss(), self.zero_grads())

    def first_stage_input(self, state: EndsState, microbatch: Array) -> Array:
        """The first stage's input."""
        return lax.dynamic_index_in_dim(state.entries, microbatch, keepdims=False)

    def on_last_stage_output(self, state: EndsState, microbatch: Array, slot: Array, y: Array) -> EndsState:
        """Keep the last stage's output, which is `y` on its rank."""
        return state._replace(exits=lax.dynamic_update_index_in_dim(state.exits, y, microbatch, 0))

    def run_head(self, state: EndsState) -> EndsState:
        """The loss of all microbatches and its gradients, after the last F and before the first B."""
        y = self.from_last(state.exits)
        targets = jax.tree.map(self._own_rows, self.tokens.targets)
        loss, grads, dy = self.head_loss_and_grads(y, targets, state.grads)
        with jax.named_scope(GRADIENTS):
            exits = self._to_first(dy)
        return EndsState(state.entries, exits, state.loss + loss, grads)

    def last_stage_gradient(self, state: EndsState, microbatch: Array, slot: Array) -> Array:
        """The gradient with respect to the last stage's output."""
        return lax.dynamic_index_in_dim(state.exits, microbatch, keepdims=False)

    def on_first_stage_gradient(self, state: EndsState, microbatch: Array, dx: Array) -> EndsState:
        """Keep the gradient with respect to the first stage's input."""
        return state._replace(entries=lax.dynamic_update_index_in_dim(state.entries, dx, microbatch, 0))

    def finish(self, state: EndsState) -> EndsState:
        """Send the gradients of the first stage's inputs back to the ranks that embedded them."""
        with jax.named_scope(GRADIENTS):
            dx = self._scatter_rows(0, state.entries)
        grads = self.embed_grads(self._own_rows(self.tokens.ids), self._own_rows(self.tokens.rows), dx)
        return state._replace(grads=add_gradients(state.grads, grads))

    def from_last(self, exits: Array) -> Array:
        """This rank's rows of the last stage's outputs."""
        return self._scatter_rows(self.last, exits)

    def _own_rows(self, x_MB: Array) -> Array:
        flat = x_MB.reshape(-1, *x_MB.shape[2:])
        rest = f" {SEQ}" if flat.ndim == 2 else ""
        return cut(f"{ROWS}{rest} -> {SHARED_ROWS}{rest}", flat)

    def _to_first(self, x: Array) -> Array:
        whole, share = self._residual
        rows = all_gather(f"{share} -> {whole}", x)
        return rows.reshape(*self.tokens.rows.shape, *rows.shape[1:])

    def _scatter_rows(self, rank: int, x_MB: Array) -> Array:
        """This rank's rows of an array on another pipeline rank."""
        whole, share = self._residual
        x_MB = jnp.where(lax.axis_index("pp") == rank, x_MB, 0)
        return reduce_scatter(f"{whole} -> {share}", x_MB.reshape(-1, *x_MB.shape[2:]))
