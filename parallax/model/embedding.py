"""Token embedding, in two forms, and the head, with a tied or a separate table."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from parallax.config.sections import EMBEDDING, HEAD
from parallax.model.dropout import Dropout
from parallax.model.logits import PLAIN, LogitForm, scaled
from parallax.model.norm import RMSNorm
from parallax.model.padding import without_padding
from parallax.sharding.activations import SEQ, with_rows
from parallax.sharding.collectives import cut, offset, reshard
from parallax.sharding.einsum import einsum, einsum_layout
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import parameter
from parallax.sharding.zigzag import ZIGZAG


class TableForm(NamedTuple):
    """How a vocab table is sharded, and for which tokens a rank looks up rows or computes logits. `rows` is the layout
    of the batch dim."""

    vocab: str  # the layout of the vocab dim
    tokens: str  # the layout of the tokens' seq

    @property
    def table(self) -> Layout:
        return Layout.parse(f"{self.vocab} d_model")

    def ids(self, rows: str) -> Layout:
        return Layout.parse(f"{rows} {self.tokens}")

    def hidden(self, rows: str) -> Layout:
        """Layout of activations with whole d_model, for the tokens that this rank works on."""
        return Layout.parse(f"{rows} {self.tokens} d_model")

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        return self.table.cut_of("vocab")


EMBEDDINGS = {
    # Every rank has a part of the vocab and works on all tokens: partial sums, and logits sharded over the vocab.
    "vocab_parallel": TableForm("vocab/tp", SEQ),
    # Every rank has the whole vocab and works on its part of the tokens; an all-to-all leads to the residual's layout.
    "all_to_all": TableForm("vocab", f"{SEQ}/tp"),
}

INITIAL_STD = 0.02


def vocab_table(module: nn.Module, form: TableForm, sizes: Mapping[str, int], entries: int, part: str) -> Array:
    """Declare the table of `part`, a part of the model, as a parameter of `module`; rows after its first `entries` are
    padding, initialised with zeros.

    At rest, data axes shard its rows: shards are contiguous in memory, where shards of d_model would be copied before
    they are sent. The initial values of the entries do not depend on the padding.
    """

    def initial(key: Array, shape: tuple[int, ...]) -> Array:
        table_VD = nn.initializers.normal(INITIAL_STD)(key, shape, jnp.float32)
        return jnp.where(jnp.arange(shape[0])[:, None] < entries, table_VD, 0)

    layout, at_rest = str(form.table), "vocab d_model"
    return parameter(module, "table", layout, sizes, initial, role="table", part=part, at_rest=at_rest)


class Embedding(nn.Module):
    """Table rows times `scale` for token ids [B, S], which every `tp` rank holds; the result has the residual's layout.

    An id outside of the vocab, such as an id of the padding, gets NaN.

    Communication, vocab_parallel:
        forward   reduce_scatter of what was found over tp
        backward  the transposes
    Communication, all_to_all:
        forward   all_to_all of what was found over tp if the residual is cut over d_model
        backward  the transposes
    """

    form: TableForm
    rows: str  # layout of the batch dim: see sharding/activations.py
    residual: str
    sizes: Mapping[str, int]
    entries: int  # of the vocab; the table's other rows are padding
    dtype: str
    dropout: float
    scale: float = 1.0
    order: str = ZIGZAG  # of the tokens on context ranks

    @nn.compact
    def __call__(self, ids_BS: Array, rows_B: Array, key: Array | None) -> Array:
        table = vocab_table(self, self.form, self.sizes, self.entries, EMBEDDING)
        ids = cut(f"{self.rows} {SEQ} -> {self.form.ids(self.rows)}", ids_BS)
        first = offset(self.form.table, "vocab", table.shape[0])
        # Cast after the lookup, whose gradient is a sum over all occurrences of a token: see `embed_grads`.
        rows = table.at[ids - first].get(mode="fill", fill_value=0, wrap_negative_indices=False).astype(self.dtype)
        # A factor, so that the backward pass needs only this factor and not the table.
        rows *= jnp.where((ids >= 0) & (ids < self.entries), 1, jnp.nan).astype(self.dtype)[..., None]
        partial = self.form.hidden(self.rows).with_partial(*self.form.vocab_axes)
        residual = with_rows(self.residual, self.rows)
        x = reshard(f"{partial} -> {residual}", scaled(rows, self.scale))
        return Dropout(str(residual), self.sizes, self.dropout, site=0, order=self.order)(x, rows_B, key)


class Head(nn.Module):
    """The final norm, and logits from a table: the embedding's if tied, otherwise a separate one. With LayerNorm, what
    the norm sends is sent twice.

    Communication, vocab_parallel:
        forward   all_reduce of the squares over tp if the residual is cut over d_model; all_gather of x over tp
        backward  the transposes; all_reduce of what the norm needs over tp if the residual is cut over d_model
    Communication, all_to_all:
        forward   all_reduce of the squares over tp if the residual is cut over d_model;
                  all_to_all of x over tp if the residual is cut over d_model
        backward  the transposes; all_reduce of what the norm needs over tp if the residual is cut over d_model
    """

    form: TableForm
    rows: str
    residual: str
    sizes: Mapping[str, int]
    entries: int  # of the vocab; the table's other rows are padding
    norm_eps: float
    tied: bool
    norm_of: Callable[..., nn.Module] = RMSNorm  # makes its norm
    logit_form: LogitForm = PLAIN

    def setup(self):
        layout = str(with_rows(self.residual, self.rows))
        self.norm = self.norm_of(layout=layout, sizes=self.sizes, eps=self.norm_eps, part=HEAD)
        self.table = None if self.tied else vocab_table(self, self.form, self.sizes, self.entries, HEAD)

    def __call__(self, x: Array) -> Array:
        """Normed activations [B, S, D] of the tokens for which this rank computes logits."""
        before = with_rows(self.residual, self.rows)
        return reshard(f"{before} -> {self.form.hidden(self.rows)}", self.norm(x))


def logits(
    form: TableForm, rows: str, hidden: Array, table: Array, entries: int, logit_form: LogitForm = PLAIN
) -> Array:
    """Logits in float32, sharded over the vocab or over the tokens as the form says; -inf for rows of padding."""
    names = ("batch", "seq", "vocab")
    out = einsum_layout([form.hidden(rows), form.table], names)
    padded = einsum(f"{form.hidden(rows)}, {form.table} -> {out}", hidden, table, dtype=jnp.float32)
    return without_padding(logit_form(padded), form.table, entries)
