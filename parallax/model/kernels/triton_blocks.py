"""Attention for Triton, on GPUs: kernels that skip the blocks of keys of which a block of queries sees none.

Places hide a block, and so do documents: tables of what the documents of packed rows show are made from the segments of
their tokens. So work follows the lengths of documents, not of rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from parallax.model.kernels.blockwise import HIDDEN
from parallax.model.logits import soft_capped
from parallax.model.mask import blocks_seen, sees

NARROWEST_HEAD = 16  # of heads in a product


class Form(NamedTuple):
    """What is static of a call; blocks in tokens on a side. 0 is no cap, and no window."""

    scale: float
    cap: float
    window: int
    d_qk: int
    d_v: int
    block: int
    backward_block: int
    interpret: bool


def triton_width(width: int) -> int:
    """The head width that the kernels for Triton multiply: the next power of two."""
    return max(NARROWEST_HEAD, pl.next_power_of_2(width))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attention_in_documents(q: Array, k: Array, v: Array, sinks_H: Array, segments_BS: Array, form: Form) -> Array:
    """Softmax attention, [B, S, H, K], of rows of whole blocks; each token attends to those before it in its document
    and window. See `attend` for the cap and sinks; a sink of HIDDEN has no weight. No communication.

    A program has a block of queries and reads keys, or has a block of keys and reads the queries of all heads that
    share them. Sums are float32.
    """
    return _forward(q, k, v, sinks_H, segments_BS, form)[0]


def _forward(q: Array, k: Array, v: Array, sinks: Array, segments: Array, form: Form) -> tuple[Array, Any]:
    (rows, seq, heads, _), size = q.shape, form.block
    first, _ = blocks_to_read(segments, form.window, size)
    call = _call(_forward_kernel, "mha_fwd", form, size, rows, heads, q)
    out, logsumexp = call(
        in_specs=[_block(q, size), *_shared_keys(q, k, v), _whole(sinks), _row(segments), _row(first)],
        out_specs=[_block(v, size), _block_of_numbers(size)],
        out_shape=[
            jax.ShapeDtypeStruct((rows, seq, heads, v.shape[-1]), q.dtype),
            jax.ShapeDtypeStruct((rows, heads, seq), jnp.float32),
        ],
    )(q, k, v, sinks, segments, first)
    return out, (q, k, v, sinks, segments, out, logsumexp)


def _backward(form: Form, saved: Any, dy: Array) -> tuple[Array, Array, Array, Array, None]:
    q, k, v, sinks, segments, out, logsumexp = saved
    (rows, seq, heads, _), groups, size = q.shape, k.shape[2], form.backward_block
    share = heads // groups
    first, after = blocks_to_read(segments, form.window, size)
    row_sums = (dy.astype(jnp.float32) * out).sum(axis=-1).swapaxes(1, 2)
    arrays, numbers = (q, k, v, dy), (logsumexp, row_sums)
    by_query = _call(_query_gradient_kernel, "mha_dq", form, size, rows, heads, q)
    dq = by_query(
        in_specs=[_block(q, size), *_shared_keys(q, k, v), _block(dy, size)]
        + [*[_block_of_numbers(size)] * 2, _row(segments), _row(first)],
        out_specs=_block(q, size),
        out_shape=q,
    )(*arrays, *numbers, segments, first)
    of_group = pl.BlockSpec((None, share, seq), lambda i, row, group: (row, group, 0))
    by_key = _call(_key_gradients_kernel, "mha_dkv", form, size, rows, groups, q)
    dk, dv = by_key(
        in_specs=[_heads(q, share), _block(k, size), _block(v, size), _heads(dy, share)]
        + [of_group, of_group, _row(segments), _row(after)],
        out_specs=[_block(k, size), _block(v, size)],
        out_shape=[k, v],
    )(*arrays, *numbers, segments, after)
    d_sinks = -(jnp.exp(sinks[None, :, None] - logsumexp) * row_sums).sum(axis=(0, 2))
    return dq, dk, dv, d_sinks, None


attention_in_documents.defvjp(_forward, _backward)


def _call(kernel: Callable, name: str, form: Form, size: int, rows: int, heads: int, q: Array) -> Callable:
    """pallas_call for a grid of blocks of this size, rows and heads, but for what goes in and out."""
    # Hopper multiplies 64 rows by four warps. Eight divide the columns, too, so that wide sums fit their registers.
    warps = 4 if size <= 64 and q.shape[-1] * q.dtype.itemsize <= 256 else 8
    params = plgpu.CompilerParams(num_warps=warps, num_stages=1 if q.dtype == jnp.float32 else 2)
    grid = q.shape[1] // size, rows, heads
    program = functools.partial(kernel, form=form)
    return functools.partial(
        pl.pallas_call, program, grid=grid, compiler_params=params, interpret=form.interpret, name=name
    )


# ---- what a program is given: of a row, of one head or of the heads that share keys


def _block(x: Array, size: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, size, None, triton_width(x.shape[-1])), lambda i, row, head: (row, i, head, 0))


def _block_of_numbers(size: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, size), lambda i, row, head: (row, head, i))


def _shared_keys(q: Array, *keys_and_values: Array) -> list[pl.BlockSpec]:
    def whole(x: Array) -> pl.BlockSpec:
        share = q.shape[2] // x.shape[2]
        shape = None, x.shape[1], None, triton_width(x.shape[-1])
        return pl.BlockSpec(shape, lambda i, row, head: (row, 0, lax.div(head, share), 0))

    return list(map(whole, keys_and_values))


def _heads(x: Array, share: int) -> pl.BlockSpec:
    shape = None, x.shape[1], share, triton_width(x.shape[-1])
    return pl.BlockSpec(shape, lambda i, row, group: (row, 0, group, 0))


def _row(x: Array) -> pl.BlockSpec:
    return pl.BlockSpec((None, x.shape[1]), lambda i, row, head: (row, 0))


def _whole(x: Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda i, row, head: (0,))


# ---- which blocks are read


def blocks_to_read(segments_BS: Array, window: int, size: int) -> tuple[Array, Array]:
    """By block of queries the first block of keys of which they see some, and by block of keys the block after the last
    one of queries that see some, [B, blocks].

    No more than these if documents are contiguous and their numbers rise; what ends a row, as padding, may have any
    number. If not, maybe more.

    >>> first, after = blocks_to_read(jnp.array([[1, 1, 1, 2, 3, 3, 0, 0]]), 0, 2)
    >>> first.tolist(), after.tolist()
    ([[0, 0, 2, 3]], [[2, 2, 3, 4]])
    """
    blocks = segments_BS.shape[1] // size
    starts = jnp.arange(blocks) * size
    queries, keys = ((x, x + size - 1) for x in (starts[:, None], starts[None]))
    in_reach_QK, _ = blocks_seen(queries, keys, window)
    seen_BQK = in_reach_QK[None] & _may_share_documents(segments_BS.reshape(-1, blocks, size))
    first, after = seen_BQK.argmax(axis=2), blocks - seen_BQK[:, ::-1].argmax(axis=1)
    return first.astype(jnp.int32), after.astype(jnp.int32)


def _may_share_documents(segments_BKS: Array) -> Array:
    """Whether tokens of two blocks may be of one document, [B, blocks, blocks]: of a row's last one, or of others whose
    ranges of numbers overlap."""
    is_last = segments_BKS == segments_BKS[:, -1:, -1:]
    most = jnp.iinfo(segments_BKS.dtype).max
    lowest, highest = jnp.where(is_last, most, segments_BKS).min(-1), jnp.where(is_last, -most, segments_BKS).max(-1)
    overlap = lowest[:, :, None] <= highest[:, None]
    has_last = is_last.any(-1)
    return overlap & overlap.swapaxes(1, 2) | has_last[:, :, None] & has_last[:, None]


# ---- the programs


def _forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    sinks_ref: Any,
    segments_ref: Any,
    first_ref: Any,
    out_ref: Any,
    logsumexp_ref: Any,
    *,
    form: Form,
) -> None:
    size, query = form.block, pl.program_id(0)
    q = _load(q_ref, form.d_qk)

    def step(key: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, top, total = carry
        k, v = _keys(k_ref, v_ref, key, size, form)
        scores, _ = _scores(q, k, _shown(segments_ref, query, key, form.window, size), form)
        higher = jnp.maximum(top, scores.max(axis=-1))
        weights, fade = jnp.exp(scores - higher[:, None]), jnp.exp(top - higher)
        seen = plgpu.dot(weights.astype(v.dtype), v)
        return out * fade[:, None] + seen, higher, total * fade + weights.sum(axis=-1)

    zeros = jnp.zeros(size, jnp.float32)
    start = jnp.zeros(out_ref.shape, jnp.float32), zeros + sinks_ref[pl.program_id(2)], zeros + 1
    out, top, total = lax.fori_loop(first_ref[query], query + 1, step, start)
    _store(out_ref, out / total[:, None], form.d_v)
    logsumexp_ref[...] = top + jnp.log(total)


def _query_gradient_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dy_ref: Any,
    logsumexp_ref: Any,
    row_sums_ref: Any,
    segments_ref: Any,
    first_ref: Any,
    dq_ref: Any,
    *,
    form: Form,
) -> None:
    size, query = form.backward_block, pl.program_id(0)
    q, dy = _load(q_ref, form.d_qk), _load(dy_ref, form.d_v)
    numbers = logsumexp_ref[...], row_sums_ref[...]

    def step(key: Array, dq: Array) -> Array:
        k, v = _keys(k_ref, v_ref, key, size, form)
        shown = _shown(segments_ref, query, key, form.window, size)
        _, d_scores = _weights(q, k, v, dy, *numbers, shown, form)
        return dq + plgpu.dot(d_scores.astype(k.dtype), k)

    dq = lax.fori_loop(first_ref[query], query + 1, step, jnp.zeros(dq_ref.shape, jnp.float32))
    _store(dq_ref, dq * form.scale, form.d_qk)


def _key_gradients_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dy_ref: Any,
    logsumexp_ref: Any,
    row_sums_ref: Any,
    segments_ref: Any,
    after_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    form: Form,
) -> None:
    size, key = form.backward_block, pl.program_id(0)
    k, v = _load(k_ref, form.d_qk), _load(v_ref, form.d_v)

    def of_head(head: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def step(query: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dk, dv = carry
            tokens = _tokens(query, size)
            q, dy = _load(q_ref.at[tokens, head], form.d_qk), _load(dy_ref.at[tokens, head], form.d_v)
            numbers = logsumexp_ref[head, tokens], row_sums_ref[head, tokens]
            shown = _shown(segments_ref, query, key, form.window, size)
            weights, d_scores = _weights(q, k, v, dy, *numbers, shown, form)
            return dk + plgpu.dot(d_scores.astype(q.dtype).T, q), dv + plgpu.dot(weights.astype(dy.dtype).T, dy)

        return lax.fori_loop(key, after_ref[key], step, carry)

    start = tuple(jnp.zeros(ref.shape, jnp.float32) for ref in (dk_ref, dv_ref))
    dk, dv = lax.fori_loop(0, q_ref.shape[1], of_head, start)
    _store(dk_ref, dk * form.scale, form.d_qk)
    _store(dv_ref, dv, form.d_v)


def _scores(q: Array, k: Array, shown: Array, form: Form) -> tuple[Array, Array]:
    """Scores of a block, and before its mask."""
    scores = soft_capped(plgpu.dot(q, k.T) * form.scale, form.cap)
    return jnp.where(shown, scores, HIDDEN), scores


def _weights(
    q: Array, k: Array, v: Array, dy: Array, logsumexp: Array, row_sums: Array, shown: Array, form: Form
) -> tuple[Array, Array]:
    """Weights of a block, and the gradient of its scores before the cap."""
    scores, unmasked = _scores(q, k, shown, form)
    weights = jnp.exp(scores - logsumexp[:, None])
    d_scores = weights * (plgpu.dot(dy, v.T) - row_sums[:, None])
    return weights, d_scores * (1 - (unmasked / form.cap) ** 2) if form.cap else d_scores


def _shown(segments_ref: Any, query: Array, key: Array, window: int, size: int) -> Array:
    """Whether queries of a block attend to keys of another."""
    queries, keys = (block * size + jnp.arange(size) for block in (query, key))
    of_queries, of_keys = (segments_ref[_tokens(block, size)] for block in (query, key))
    return (of_queries[:, None] == of_keys[None]) & sees(queries[:, None], keys[None], window)


def _tokens(block: Array, size: int) -> Any:
    return pl.ds(block * size, size)


def _keys(k_ref: Any, v_ref: Any, key: Array, size: int, form: Form) -> tuple[Array, Array]:
    tokens = _tokens(key, size)
    return _load(k_ref.at[tokens], form.d_qk), _load(v_ref.at[tokens], form.d_v)


def _load(ref: Any, width: int) -> Array:
    """What has this width, with zeros up to the width of a product."""
    return plgpu.load(ref, mask=_is_inside(ref, width), other=0.0)


def _store(ref: Any, value: Array, width: int) -> None:
    plgpu.store(ref, value.astype(ref.dtype), mask=_is_inside(ref, width))


def _is_inside(ref: Any, width: int) -> Array:
    return jnp.broadcast_to(jnp.arange(ref.shape[-1])[None] < width, ref.shape)
