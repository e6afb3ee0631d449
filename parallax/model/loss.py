"""Cross-entropy in float32 over chunks of tokens, with or without a sharded vocab; only one chunk of logits exists."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax

from parallax.config.sections import LossConfig
from parallax.errors import ConfigError, quoted
from parallax.model.batch import IGNORED
from parallax.model.logits import PLAIN, LogitForm
from parallax.model.padding import without_padding
from parallax.sharding.collectives import after, as_varying, max_over, offset, ranks_over, sum_over, varying_axes
from parallax.sharding.layout import Layout
from parallax.sharding.plan import GRADIENTS
from parallax.sharding.platform import platform_traced
from parallax.user_code import named

LOGITS = "logits"  # the scope of the head's products, for traces


def cross_entropy(
    logits_CV: Array, labels_C: Array, table: Layout, z_coefficient: float, entries: int | None = None
) -> Array:
    """`-log p(label)` and `z_coefficient * logsumexp^2` of each token, [2, C]; 0 where the label is IGNORED.

    For any other label outside of the vocab both are NaN, and so are their gradients. `table` says how the vocab is
    sharded; each rank passes its columns, and all get the same losses. Columns after the first `entries` of the vocab
    are padding and have no effect.

    Communication:
        forward   all_reduce of the largest logit, the sum and the label's logit over tp if the vocab is cut over tp
        backward  nothing
    """
    axes = table.cut_of("vocab")
    if entries is not None:
        logits_CV = without_padding(logits_CV, table, entries)
    top_C = max_over(lax.stop_gradient(logits_CV).max(axis=-1), axes)
    exp_sum_C = sum_over(jnp.exp(logits_CV - top_C[:, None]).sum(axis=-1), axes)
    logsumexp_C = top_C + jnp.log(exp_sum_C)
    columns_V = offset(table, "vocab", logits_CV.shape[1]) + jnp.arange(logits_CV.shape[1])
    is_label_CV = columns_V[None, :] == labels_C[:, None]
    label_logit_C = sum_over(jnp.where(is_label_CV, logits_CV, 0).sum(axis=-1), axes)
    losses_2C = jnp.stack([logsumexp_C - label_logit_C, z_coefficient * jnp.square(logsumexp_C)])
    vocab = entries or logits_CV.shape[1] * ranks_over(axes)
    known_C = (labels_C == IGNORED) | (labels_C >= 0) & (labels_C < vocab)
    losses_2C *= jnp.where(known_C, 1, jnp.nan)[None]  # a factor: the gradient is NaN, too
    return jnp.where(labels_C[None] == IGNORED, 0, losses_2C)


class TokenGroups(NamedTuple):
    """Groups of tokens whose losses are also summed apart: that of each token, 0 to `count` - 1."""

    of_N: Array
    count: int


def chunked_loss(
    config: LossConfig,
    table: Layout,
    table_VD: Array,
    hidden_ND: Array,
    labels_N: Array,
    *,
    entries: int | None = None,
    logit_form: LogitForm = PLAIN,
    groups: TokenGroups | None = None,
) -> Array:
    """The sums [2] of `cross_entropy`'s two losses over N tokens, forward only; with groups [2, 1 + groups], those of
    all tokens first."""
    losses_of = partial(_summed_losses, config, table, entries, logit_form, groups.count if groups else 0)

    def step(_: None, chunk: tuple) -> tuple[None, Array]:
        hidden_CD, *of_tokens = chunk
        return None, losses_of(*of_tokens, _products(hidden_CD, table_VD))

    return lax.scan(step, None, _chunks(config, hidden_ND, labels_N, groups))[1].sum(0)


def chunked_loss_and_grads(
    config: LossConfig,
    table: Layout,
    table_VD: Array,
    hidden_ND: Array,
    labels_N: Array,
    weight: Array,
    earlier_VD: Array | None = None,
    *,
    entries: int | None = None,
    trained: bool = True,
    logit_form: LogitForm = PLAIN,
    groups: TokenGroups | None = None,
) -> tuple[Array, Array | None, Array]:
    """The sums of `chunked_loss`, and `weight` times the gradients of both losses with respect to table (float32) and
    hidden, chunk by chunk.

    The table's gradient is added to `earlier_VD`, if given, to save the memory of a second table; it is None if the
    table is not `trained`.

    Forward and backward of a chunk run together, so logits are neither saved nor recomputed. `table_VD` must vary over
    every bound axis: its gradient is this device's share, which the caller sums once. With `config.table_first` it is
    whole before the last chunk's gradient of hidden.
    """
    losses_of = partial(_summed_losses, config, table, entries, logit_form, groups.count if groups else 0)
    wide = dict(preferred_element_type=jnp.float32)

    def step(grad_VD, chunk, table_first=False):
        hidden_CD, *of_tokens = chunk
        hidden_CD, pull_hidden = jax.vjp(lambda x: as_varying(x, varying_axes(table_VD)), hidden_CD)
        if table_first and platform_traced() == "cpu":  # the loop over earlier chunks sends, too
            hidden_CD = after(hidden_CD, grad_VD)
        loss, pull = jax.vjp(partial(losses_of, *of_tokens), _products(hidden_CD, table_VD))
        (grad_CV,) = pull(as_varying(_weights_of(loss, weight), varying_axes(loss)))
        # Rounded to the dtype of the other factor: a product of two dtypes would be computed in the wider one.
        grad_CV = grad_CV.astype(table_VD.dtype)
        with jax.named_scope(GRADIENTS), jax.named_scope(LOGITS):
            if table_first:
                grad_VD = grad_VD + jnp.einsum("CV,CD->VD", grad_CV, hidden_CD, **wide)
                grad_CV, grad_VD = lax.optimization_barrier((grad_CV, grad_VD))
            hidden_grad = jnp.einsum("CV,VD->CD", grad_CV, table_VD, **wide).astype(hidden_CD.dtype)
            if trained and not table_first:
                grad_VD = grad_VD + jnp.einsum("CV,CD->VD", grad_CV, hidden_CD, **wide)
        return grad_VD, (loss, *pull_hidden(hidden_grad))

    start = as_varying(jnp.zeros(table_VD.shape, jnp.float32)) if earlier_VD is None and trained else earlier_VD
    chunks = _chunks(config, hidden_ND, labels_N, groups)
    if config.table_first:
        grad_VD, earlier = lax.scan(step, start, jax.tree.map(lambda x: x[:-1], chunks))
        grad_VD, last = step(grad_VD, jax.tree.map(lambda x: x[-1], chunks), table_first=True)
        losses, grad_ND = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), earlier, last)
    else:
        grad_VD, (losses, grad_ND) = lax.scan(step, start, chunks)
    return losses.sum(axis=0), grad_VD, rearrange(grad_ND, "count C D -> (count C) D")[: len(hidden_ND)]


def _summed_losses(
    config: LossConfig,
    table: Layout,
    entries: int | None,
    logit_form: LogitForm,
    groups: int,
    labels_C: Array,
    groups_C: Array | None,
    products_CV: Array,
) -> Array:
    """The sums of both losses, as loss.name says: [2], or [2, 1 + groups]. Raises ConfigError if a user's own are not
    [2, C]."""
    loss = named("loss.name", config.name, {"cross_entropy": cross_entropy})
    of_chunk = dict(logits_CV=logit_form(products_CV), labels_C=labels_C, table=table)
    losses = loss(**of_chunk, z_coefficient=config.z_coefficient, entries=entries)
    shape = getattr(losses, "shape", None)
    if shape != (2, len(labels_C)):
        raise ConfigError(
            f"loss.name={quoted(config.name)} returns {quoted(losses) if shape is None else f'the shape {shape}'} for "
            f"{len(labels_C)} tokens; return [2, {len(labels_C)}], as cross_entropy: the loss and the z-loss of each."
        )
    if not groups:
        return losses.sum(axis=1)
    is_in_GC = groups_C[None] == jnp.arange(groups)[:, None]
    of_groups = jnp.where(is_in_GC[None], losses[:, None], 0).sum(axis=2)
    return jnp.concatenate([losses.sum(axis=1, keepdims=True), of_groups], axis=1)


def _weights_of(sums: Array, weight: Array) -> Array:
    """The weights of sums in the loss whose gradient is taken: those of groups have none."""
    weights = jnp.full_like(sums, weight)
    return weights if sums.ndim == 1 else weights.at[:, 1:].set(0)


def _products(hidden_CD: Array, table_VD: Array) -> Array:
    with jax.named_scope(LOGITS):
        return jnp.einsum("CD,VD->CV", hidden_CD, table_VD, preferred_element_type=jnp.float32)


def _chunks(
    config: LossConfig, hidden_ND: Array, labels_N: Array, groups: TokenGroups | None
) -> tuple[Array, Array, Array | None]:
    """Tokens with their labels and groups in equal chunks of at most `chunk_tokens`; the last chunk is padded with
    ignored tokens."""
    tokens = len(labels_N)
    count = -(-tokens // config.chunk_tokens)
    size = -(-tokens // count)
    fill = count * size - tokens
    hidden_ND = jnp.pad(hidden_ND, ((0, fill), (0, 0)))
    labels_N = jnp.pad(labels_N, (0, fill), constant_values=IGNORED)
    groups_N = None if groups is None else jnp.pad(groups.of_N, (0, fill))
    hidden_chunks = rearrange(hidden_ND, "(count C) D -> count C D", C=size)
    of_tokens = jax.tree.map(lambda x_N: rearrange(x_N, "(count C) -> count C", C=size), (labels_N, groups_N))
    return hidden_chunks, *of_tokens
