"""Attention in a sliding window for Triton, on GPUs; JAX's kernels for Triton compute each block up to the diagonal."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from parallax.model.kernels.blockwise import HIDDEN
from parallax.model.mask import sees


class Window(NamedTuple):
    """What is static of a call; blocks in tokens on a side."""

    window: int
    block: int
    backward_block: int
    interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attention_in_window(q: Array, k: Array, v: Array, segments_BS: Array, form: Window) -> Array:
    """Softmax attention of scaled queries to the last `window` tokens of their documents, for arrays [B, S, G, W] whose
    width is a power of two, of 16 or more, and rows of whole blocks. No communication.

    A program has a block of queries, and reads the blocks of keys that one of them sees. In the backward pass it has
    a block of keys, too, and reads the blocks of queries that see one of these.
    """
    return _forward(q, k, v, segments_BS, form)[0]


def _forward(q: Array, k: Array, v: Array, segments: Array, form: Window) -> tuple[Array, Any]:
    rows, seq, groups, _ = q.shape
    whole, block = _specs(q, form.block)
    numbers = pl.BlockSpec((None, None, form.block), lambda i, row, group: (row, group, i))
    out, logsumexp = pl.pallas_call(
        functools.partial(_forward_kernel, form=form),
        grid=(seq // form.block, rows, groups),
        in_specs=[block, whole, whole, pl.BlockSpec((None, seq), lambda i, row, group: (row, 0))],
        out_specs=[block, numbers],
        out_shape=[q, jax.ShapeDtypeStruct((rows, groups, seq), jnp.float32)],
        compiler_params=_params(q),
        interpret=form.interpret,
        name="mha_forward",
    )(q, k, v, segments)
    return out, (q, k, v, segments, out, logsumexp)


def _backward(form: Window, saved: Any, dy: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, segments, out, logsumexp = saved
    rows, seq, groups, _ = q.shape
    row_sums = (dy.astype(jnp.float32) * out).sum(axis=-1).swapaxes(1, 2)
    whole, block = _specs(q, form.backward_block)
    of_row = pl.BlockSpec((None, seq), lambda i, row, group: (row, 0))
    numbers = pl.BlockSpec((None, None, seq), lambda i, row, group: (row, group, 0))
    dq, dk, dv = pl.pallas_call(
        functools.partial(_backward_kernel, form=form, blocks=seq // form.backward_block),
        grid=(seq // form.backward_block, rows, groups),
        in_specs=[whole, whole, whole, of_row, whole, numbers, numbers],
        out_specs=[block, block, block],
        out_shape=[q, k, v],
        compiler_params=_params(q),
        interpret=form.interpret,
        name="mha_backward",
    )(q, k, v, segments, dy, logsumexp, row_sums)
    return dq, dk, dv, None


attention_in_window.defvjp(_forward, _backward)


def _specs(q: Array, size: int) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """Of a whole row of a head, and of a block of it."""
    _, seq, _, width = q.shape
    whole = pl.BlockSpec((None, seq, None, width), lambda i, row, group: (row, 0, group, 0))
    return whole, pl.BlockSpec((None, size, None, width), lambda i, row, group: (row, i, group, 0))


def _params(q: Array) -> plgpu.CompilerParams:
    return plgpu.CompilerParams(num_warps=4 if q.shape[-1] <= 64 else 8, num_stages=2)


def _forward_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, segments_ref: Any, out_ref: Any, logsumexp_ref: Any, *, form: Window
) -> None:
    size, query = form.block, pl.program_id(0)
    q = q_ref[...]

    def step(key: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, top, total = carry
        k, v = (_block(ref, key, size) for ref in (k_ref, v_ref))
        shown = _shown(segments_ref, query, key, form.window, size)
        scores = jnp.where(shown, plgpu.dot(q, k.T), HIDDEN)
        higher = jnp.maximum(top, scores.max(axis=-1))
        weights, fade = jnp.exp(scores - higher[:, None]), jnp.exp(top - higher)
        seen = plgpu.dot(weights.astype(v.dtype), v)
        return out * fade[:, None] + seen, higher, total * fade + weights.sum(axis=-1)

    zeros = jnp.zeros(size, jnp.float32)
    start = jnp.zeros(q.shape, jnp.float32), zeros + HIDDEN, zeros
    out, top, total = lax.fori_loop(_first_key(query, form.window, size), query + 1, step, start)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    logsumexp_ref[...] = top + jnp.log(total)


def _backward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    segments_ref: Any,
    dy_ref: Any,
    logsumexp_ref: Any,
    row_sums_ref: Any,
    dq_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    form: Window,
    blocks: int,
) -> None:
    size, mine = form.backward_block, pl.program_id(0)
    whole = functools.partial(_block, size=size)
    shape = dq_ref.shape

    def weights_of(query: Array, key: Array, q: Array, k: Array, v: Array, dy: Array) -> tuple[Array, Array]:
        """Weights of a block and the gradient of its scores."""
        shown = _shown(segments_ref, query, key, form.window, size)
        scores = jnp.where(shown, plgpu.dot(q, k.T), HIDDEN)
        weights = jnp.exp(scores - whole(logsumexp_ref, query)[:, None])
        return weights, weights * (plgpu.dot(dy, v.T) - whole(row_sums_ref, query)[:, None])

    q, k, v, dy = (whole(ref, mine) for ref in (q_ref, k_ref, v_ref, dy_ref))

    def of_query(query: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = carry
        q, dy = whole(q_ref, query), whole(dy_ref, query)
        weights, d_scores = weights_of(query, mine, q, k, v, dy)
        return dk + plgpu.dot(d_scores.astype(q.dtype).T, q), dv + plgpu.dot(weights.astype(dy.dtype).T, dy)

    def of_key(key: Array, dq: Array) -> Array:
        k, v = whole(k_ref, key), whole(v_ref, key)
        _, d_scores = weights_of(mine, key, q, k, v, dy)
        return dq + plgpu.dot(d_scores.astype(k.dtype), k)

    zeros = jnp.zeros(shape, jnp.float32)
    after = jnp.minimum(lax.div((mine + 1) * size + form.window - 2, size) + 1, blocks)
    dk, dv = lax.fori_loop(mine, after, of_query, (zeros, zeros))
    dq = lax.fori_loop(_first_key(mine, form.window, size), mine + 1, of_key, zeros)
    for ref, gradient in ((dq_ref, dq), (dk_ref, dk), (dv_ref, dv)):
        ref[...] = gradient.astype(ref.dtype)


def _block(ref: Any, block: Array, size: int) -> Array:
    tokens = pl.ds(block * size, size)
    return ref[tokens, :] if len(ref.shape) > 1 else ref[tokens]


def _shown(segments_ref: Any, query: Array, key: Array, window: int, size: int) -> Array:
    """Whether queries of a block attend to keys of another."""
    places, segments = zip(
        *((block * size + jnp.arange(size), _block(segments_ref, block, size)) for block in (query, key))
    )
    same = segments[0][:, None] == segments[1][None, :]
    return same & sees(places[0][:, None], places[1][None, :], window)


def _first_key(query: Array, window: int, size: int) -> Array:
    """The first block of keys of which a block of queries sees one."""
    return lax.div(jnp.maximum(query * size - window + 1, 0), size)
