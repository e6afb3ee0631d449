"""Attention in a short sliding window on TPUs; JAX's splash reads the keys of a window in several steps."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from parallax.hardware.chips import LANES
from parallax.model.kernels.blockwise import HIDDEN
from parallax.model.mask import sees

WIDEST_HEAD_IN_WINDOW = 256  # entries; 512 take too much of the vector memory, too
LONGEST_WINDOW = 1024  # tokens; the scores of a block of queries in a longer one take too much of the vector memory
QUERIES = 256  # of a block


def window_tokens(seq: int, window: int) -> tuple[int, int]:
    """Queries of a block, and the tokens that they see, from the first of a block on.

    >>> window_tokens(8192, 1024), window_tokens(384, 100), window_tokens(512, 500)
    ((256, 1280), (128, 256), (256, 512))
    """
    size = QUERIES if seq % QUERIES == 0 else LANES
    return size, min(size * (1 + -(-(window - 1) // size)), seq)


class ShortWindow(NamedTuple):
    """What is static of a call."""

    window: int
    cap: float
    interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attention_in_short_window(
    q: Array, k: Array, v: Array, segments: Array, sinks: Array | None, form: ShortWindow
) -> Array:
    """Softmax attention of scaled queries [B, H, S, J] to keys [B, G, S, J] and values [B, G, S, K] of the last
    `window` tokens of their documents. For `cap` and `sinks` see `attend`. No communication.

    A step has a block of queries and all keys that these see, so that a softmax is one piece. The backward pass makes
    scores once for all gradients. Those of keys and values are summed in vector memory while the queries that see them
    pass, which takes as many steps more as there are blocks before a block of queries.
    """
    return _forward(q, k, v, segments, sinks, form)[0]


def _forward(
    q: Array, k: Array, v: Array, segments: Array, sinks: Array | None, form: ShortWindow
) -> tuple[Array, Any]:
    blocks = WindowBlocks.of(q, k, form.window)
    (rows, heads, seq, _), width = q.shape, v.shape[-1]
    out, logsumexp = _call(
        "splash_window_fwd",
        functools.partial(_forward_kernel, blocks=blocks, form=form),
        grid=(rows, heads // blocks.group, blocks.count, blocks.group),
        in_specs=blocks.read(q, v),
        out_specs=[blocks.queries(width), blocks.numbers()],
        out_shape=[
            jax.ShapeDtypeStruct((rows, heads, seq, width), q.dtype),
            jax.ShapeDtypeStruct((rows, heads, 1, seq), jnp.float32),
        ],
        interpret=form.interpret,
    )(*_read(q, k, v, segments, sinks))
    return out, (q, k, v, segments, sinks, out, logsumexp[:, :, 0])


def _backward(form: ShortWindow, saved: Any, dy: Array) -> tuple[Array, Array, Array, None, Array | None]:
    q, k, v, segments, sinks, out, logsumexp = saved
    blocks, width = WindowBlocks.of(q, k, form.window), v.shape[-1]
    dq, dk, dv = _call(
        "splash_window_bwd",
        functools.partial(_backward_kernel, blocks=blocks, form=form),
        grid=(q.shape[0], k.shape[1], blocks.count + blocks.before, blocks.group),
        in_specs=[*blocks.read(q, v), blocks.queries(width), blocks.queries(width), blocks.numbers()],
        out_specs=[blocks.queries(q.shape[-1]), blocks.first_keys(k.shape[-1]), blocks.first_keys(width)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)],
        scratch_shapes=[pltpu.VMEM((blocks.tokens, x.shape[-1]), jnp.float32) for x in (k, v)],
        interpret=form.interpret,
    )(*_read(q, k, v, segments, sinks), out, dy, logsumexp[:, :, None])
    if sinks is None:
        return dq, dk, dv, None, None
    row_sums = (out.astype(jnp.float32) * dy).sum(axis=-1)
    d_sinks = -(jnp.exp(sinks[None, :, None] - logsumexp) * row_sums).sum(axis=(0, 2))
    return dq, dk, dv, None, d_sinks.astype(sinks.dtype)


attention_in_short_window.defvjp(_forward, _backward)


class WindowBlocks(NamedTuple):
    """The blocks of a call; a step is of a row, a key head, a block of queries, and one of a `group` of heads."""

    size: int
    tokens: int  # of which a block of queries sees some
    count: int
    group: int

    @classmethod
    def of(cls, q: Array, k: Array, window: int) -> "WindowBlocks":
        seq = q.shape[2]
        size, tokens = window_tokens(seq, window)
        return cls(size, tokens, seq // size, q.shape[1] // k.shape[1])

    @property
    def before(self) -> int:
        """Blocks of keys before a block of queries."""
        return self.tokens // self.size - 1

    def first_key(self, block: Any) -> Any:
        """The block from which on a block of queries reads keys."""
        return jnp.maximum(block - self.before, 0)

    def read(self, q: Array, v: Array) -> list[pl.BlockSpec]:
        """Queries, keys, values, segments of queries and of keys, and sinks."""

        def first_seen(block: Any) -> Any:
            return self.size * self.first_key(jnp.minimum(block, self.count - 1))

        def keys(width: int) -> pl.BlockSpec:
            block = pl.Element(1), pl.Element(1), pl.Element(self.tokens), pl.Element(width)
            return pl.BlockSpec(block, lambda row, head, i, _: (row, head, first_seen(i), 0))

        of_queries = pl.BlockSpec((None, 1, self.size), lambda row, _, i, __: (row, 0, jnp.minimum(i, self.count - 1)))
        block = pl.Element(1), pl.Element(1), pl.Element(self.tokens)
        of_keys = pl.BlockSpec(block, lambda row, _, i, __: (row, 0, first_seen(i)))
        sinks = pl.BlockSpec(memory_space=pltpu.SMEM)
        return [self.queries(q.shape[-1]), keys(q.shape[-1]), keys(v.shape[-1]), of_queries, of_keys, sinks]

    def queries(self, width: int) -> pl.BlockSpec:
        """A block of queries, or of what is theirs."""
        return pl.BlockSpec((None, None, self.size, width), lambda *step: (*self._of_query(*step), 0))

    def numbers(self) -> pl.BlockSpec:
        """A number for each query."""

        def index(*step: Any) -> tuple[Any, ...]:
            row, head, block = self._of_query(*step)
            return row, head, 0, block

        return pl.BlockSpec((None, None, 1, self.size), index)

    def first_keys(self, width: int) -> pl.BlockSpec:
        """The first block of the keys that a block of queries reads."""
        return pl.BlockSpec(
            (None, None, self.size, width), lambda row, head, block, _: (row, head, self.first_key(block), 0)
        )

    def _of_query(self, row: Any, head: Any, block: Any, member: Any) -> tuple[Any, Any, Any]:
        """After the last block of queries nothing of them is read or written again."""
        member = jnp.where(block < self.count, member, self.group - 1)
        return row, head * self.group + member, jnp.minimum(block, self.count - 1)


def _call(name: str, kernel: Callable, **call: Any) -> Callable:
    """A Pallas call that compiled programs name so, too. Its steps are of rows and key heads, which cores share, and of
    blocks and heads, in order."""
    params = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"))
    return jax.named_scope(name)(pl.pallas_call(kernel, compiler_params=params, name=name, **call))


def _read(q: Array, k: Array, v: Array, segments: Array, sinks: Array | None) -> tuple[Array, ...]:
    """Operands of both kernels; a sink that is HIDDEN has no weight."""
    sinks = jnp.full(q.shape[1], HIDDEN) if sinks is None else sinks.astype(jnp.float32)
    return q, k, v, segments[:, None], segments[:, None], sinks[None]


def _forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    of_queries_ref: Any,
    of_keys_ref: Any,
    sinks_ref: Any,
    out_ref: Any,
    logsumexp_ref: Any,
    *,
    blocks: WindowBlocks,
    form: ShortWindow,
) -> None:
    sink = sinks_ref[0, pl.program_id(1) * blocks.group + pl.program_id(3)]
    scores_TS, _ = _scores(q_ref, k_ref, of_queries_ref, of_keys_ref, _firsts(blocks), form)
    top_1S = jnp.maximum(scores_TS.max(axis=0, keepdims=True), sink)
    weights_TS = jnp.exp(scores_TS - top_1S)
    total_1S = weights_TS.sum(axis=0, keepdims=True) + jnp.exp(sink - top_1S)
    out_KS = _sum_over_rows(v_ref[0, 0], weights_TS.astype(v_ref.dtype)) / total_1S
    out_ref[...] = out_KS.T.astype(out_ref.dtype)
    logsumexp_ref[...] = top_1S + jnp.log(total_1S)


def _backward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    of_queries_ref: Any,
    of_keys_ref: Any,
    sinks_ref: Any,
    out_ref: Any,
    dy_ref: Any,
    logsumexp_ref: Any,
    dq_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    dk_sum_ref: Any,
    dv_sum_ref: Any,
    *,
    blocks: WindowBlocks,
    form: ShortWindow,
) -> None:
    block, member, size = pl.program_id(2), pl.program_id(3), blocks.size
    firsts = _firsts(blocks)
    sums = dk_sum_ref, dv_sum_ref

    @pl.when((block == 0) & (member == 0))
    def start() -> None:
        for sum_ref in sums:
            sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when((block > blocks.before) & (member == 0))
    def next_keys() -> None:
        for sum_ref in sums:
            if blocks.before:
                sum_ref[:-size] = sum_ref[size:]
            sum_ref[-size:] = jnp.zeros((size, sum_ref.shape[-1]), jnp.float32)

    @pl.when(block < blocks.count)
    def add() -> None:
        q, k, v, dy = q_ref[...], k_ref[0, 0], v_ref[0, 0], dy_ref[...]
        scores_TS, slope_TS = _scores(q_ref, k_ref, of_queries_ref, of_keys_ref, firsts, form)
        weights_TS = jnp.exp(scores_TS - logsumexp_ref[...])
        row_sums_1S = (out_ref[...].astype(jnp.float32) * dy).T.sum(axis=0, keepdims=True)
        d_scores_TS = (weights_TS * (_product(v, dy.T) - row_sums_1S) * slope_TS).astype(q.dtype)
        dv_sum_ref[...] += _product(weights_TS.astype(dy.dtype), dy)
        dk_sum_ref[...] += _product(d_scores_TS, q)
        dq_ref[...] = _sum_over_rows(k, d_scores_TS).T.astype(dq_ref.dtype)

    for sum_ref, gradient_ref in zip(sums, (dk_ref, dv_ref), strict=True):
        gradient_ref[...] = sum_ref[:size].astype(gradient_ref.dtype)


def _firsts(blocks: WindowBlocks) -> tuple[Array, Array]:
    """The places of the first key and the first query of a step."""
    block = pl.program_id(2)
    return blocks.size * blocks.first_key(block), blocks.size * block


def _scores(
    q_ref: Any, k_ref: Any, of_queries_ref: Any, of_keys_ref: Any, firsts: tuple[Array, Array], form: ShortWindow
) -> tuple[Array, Array | float]:
    """Scores [T, S], HIDDEN where masked, and the slope of their cap."""
    scores_TS, slope = _product(k_ref[0, 0], q_ref[...].T), 1.0
    if form.cap:
        bounded_TS = jnp.tanh(scores_TS / form.cap)
        scores_TS, slope = form.cap * bounded_TS, 1 - bounded_TS**2
    key_TS, query_TS = (
        first + lax.broadcasted_iota(jnp.int32, scores_TS.shape, dim) for dim, first in enumerate(firsts)
    )
    same_TS = of_keys_ref[0, 0][:, None] == of_queries_ref[...]
    return jnp.where(same_TS & sees(query_TS, key_TS, form.window), scores_TS, HIDDEN), slope


def _product(x: Array, y: Array) -> Array:
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def _sum_over_rows(x_TK: Array, y_TS: Array) -> Array:
    """[K, S]"""
    return lax.dot_general(x_TK, y_TS, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
