"""Attention without scores equals attention with them: values and gradients, on every mesh, in every schedule.

Pallas kernels are interpreted on CPUs. The shapes are the least that a kernel takes.
"""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.stand_ins import Chip, ChipMesh
from support.tiny_model import build, make_batch, mesh_of, model_config, params_of, positions_of
from support.traced_equations import equations, inside

from configs.base import get_config
from parallax.analysis.planned.topology import read_topology
from parallax.analysis.traced.flops import KERNEL_CALLS, flops_breakdown
from parallax.analysis.traced.trace import abstract_mesh
from parallax.config.sections import AXES
from parallax.config.settings import read_settings
from parallax.errors import ConfigError
from parallax.model.attention import attend, attend_to_cache
from parallax.model.checks import check_context, check_kernel, check_kernel_on, check_kernel_seq
from parallax.model.context import Context
from parallax.model.kernels.blockwise import blockwise_attention, tokens_of_block
from parallax.model.kernels.choice import chosen_kernel
from parallax.model.kernels.cudnn import CUDNN_BLOCK, described_attention
from parallax.model.kernels.cudnn_window import piece_in_window
from parallax.model.kernels.flops import attention_flops, kernel_flops
from parallax.model.kernels.splash import splash_attention, splash_block_tokens
from parallax.model.kernels.splash_window import window_tokens
from parallax.model.kernels.triton_blocks import blocks_to_read
from parallax.model.mask import Mask, order_in, window_in
from parallax.model.rope import Rope
from parallax.pipeline.layer_passes import layer_passes
from parallax.sharding.zigzag import order_of, own_tokens
from parallax.step.resolve import resolve
from parallax.step.step import model_of

GQA = dict(attention="gqa", d_head=128, heads=4, kv_heads=2)
MLA = dict(attention="mla", d_head=64, heads=4, d_rope=16)
SEQ = 128
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_kept_between_runs():
    """Programs as large as these, with either kernel, are right as XLA compiles them for CPUs; loaded from the cache
    they hang or give NaN (jaxlib 0.10.2 and 0.12.0.1), as if their collectives met in another order."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)


def heads(*, seq=SEQ, rows=2, heads=4, kv_heads=2, d_qk=128, d_v=128, dtype=jnp.float32):
    """(q, k, v) and segments: packed documents, the last padding."""
    rng = np.random.default_rng(0)
    shapes = (heads, d_qk), (kv_heads, d_qk), (kv_heads, d_v)
    arrays = [jnp.asarray(rng.normal(size=(rows, seq, *shape)).astype(np.float32).astype(dtype)) for shape in shapes]
    segments = 1 + np.cumsum(rng.random((rows, seq)) < 0.03, axis=1).astype(np.int32)
    segments[:, -5:] = 0
    return arrays, jnp.asarray(segments)


def with_scores(q, k, v, segments, scale):
    return attend_to_cache([(q, k.swapaxes(1, 2))], v.swapaxes(1, 2), Mask(segments, cursor=0), scale=scale)


def in_triton(q, k, v, segments, scale):
    return attend(q, k, v, Mask(segments), scale=scale, kernel="triton")


def in_splash(q, k, v, segments, scale):
    return splash_attention(q, k, v, Mask(segments), scale=scale)


def in_blocks(q, k, v, segments, scale):
    return blockwise_attention(q, k, v, Mask(segments), scale=scale)


def value_and_pulled(function, arrays):
    """The output, and the gradients of its product with fixed random weights."""
    y, pull = jax.vjp(function, *arrays)
    return y, *pull(jax.random.normal(jax.random.key(1), y.shape).astype(y.dtype))


def error(actual, expected):
    """The largest difference, over the largest entry."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.abs(actual - expected).max() / np.abs(expected).max()


SHAPES = {
    "groups": dict(),
    "one_key_head": dict(kv_heads=1),
    "narrow_values": dict(kv_heads=4, d_qk=96, d_v=64),
    "odd_widths": dict(kv_heads=4, d_qk=20, d_v=12),
    "three_blocks": dict(seq=384, rows=1, heads=2, kv_heads=1),
}


IN_TRITON = {
    "groups": dict(seq=96),
    "narrow_values": dict(kv_heads=4, d_qk=24, d_v=16),
    "filled_rows": dict(seq=72, rows=1, heads=1, kv_heads=1, d_qk=16, d_v=16),
}
CASES = [(in_splash, name, shape) for name, shape in SHAPES.items()]
CASES += [(in_triton, name, shape) for name, shape in IN_TRITON.items()]


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "attention, shape", [(f, shape) for f, _, shape in CASES], ids=[f"{f.__name__}-{n}" for f, n, _ in CASES]
)
def test_values_and_gradients_are_those_of_attention_with_scores(attention, shape):
    arrays, segments = heads(**shape)
    both = (
        jax.jit(lambda *arrays, f=f: value_and_pulled(lambda q, k, v: f(q, k, v, segments, scale=0.1), arrays))(*arrays)
        for f in (attention, with_scores)
    )
    for actual, expected in zip(*both, strict=True):
        assert error(actual, expected) < 1e-5


@pytest.mark.fast(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shape", [dict(), dict(kv_heads=4, d_qk=24, d_v=16)], ids=["groups", "narrow_values"])
def test_queries_of_a_context_rank_meet_the_keys_of_all_in_order(shape, ranks):
    """Documents cross from rank to rank. Each rank's gradients of keys and values are a term of those of all."""
    arrays, segments = heads(seq=256 * ranks, rows=1, **shape)

    def on_ranks(attention):
        own = lambda q, k, v, segments: attention(own_tokens(q, axis=1), k, v, segments, scale=0.1)  # noqa: E731
        mapped = jax.shard_map(own, mesh=mesh_of(1, 1, 1, cp=ranks), in_specs=P(), out_specs=P(None, "cp"))
        return lambda *arrays: mapped(*arrays, segments)

    both = (jax.jit(functools.partial(value_and_pulled, on_ranks(f)))(arrays) for f in (in_splash, in_blocks))
    for actual, expected in zip(*both, strict=True):
        assert error(actual, expected) < 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_cudnn_is_told_what_is_causal_and_a_mask_says_the_rest(ranks, monkeypatch):
    """Of whole rows the mask knows documents alone: cuDNN then skips what is behind the diagonal."""
    arrays, segments = heads(seq=256)
    expected = with_scores(*arrays, segments, 0.1)
    calls, by_xla = [], jax.nn.dot_product_attention

    def told(*heads, **how):
        calls.append(how)
        return by_xla(*heads, **how | {"implementation": "xla"})

    monkeypatch.setattr(jax.nn, "dot_product_attention", told)

    def own(q, k, v, segments):
        return attend(own_tokens(q, axis=1), k, v, Mask(segments), scale=0.1, kernel="cudnn")

    mesh = mesh_of(1, 1, 1, cp=ranks)
    mapped = jax.shard_map(own, mesh=mesh, in_specs=P(), out_specs=P(None, "cp" if ranks > 1 else None))
    actual = own_order(jax.jit(mapped)(*arrays, segments), ranks)
    assert error(actual, expected) < 1e-5
    assert {(how["implementation"], how["is_causal"]) for how in calls} == {("cudnn", ranks == 1)}


def near(segments, window):
    """Which tokens see which, entry by entry."""
    seq = segments.shape[1]
    back = np.arange(seq)[:, None] - np.arange(seq)[None, :]
    return (segments[:, :, None] == segments[:, None, :]) & (back >= 0) & (back < window)


def cudnns_scores(form, q, k, v, bias):
    """Scores in float32, hidden as a call of cuDNN does."""
    scale, is_causal, window = form
    query, key = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])[None]
    shown = ((query >= key) & (query - key < (window or k.shape[1]))) | (not is_causal)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    return jnp.where(shown, scale * jnp.einsum("BSHJ,BTHJ->BHST", q, k) + bias, -1e30), k, v


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def as_cudnn_does(form, q, k, v, bias):
    """Attention whose backward pass reads what cuDNN's does: operands, the output and each query's logsumexp."""
    return as_cudnn_does_forward(form, q, k, v, bias)[0]


def as_cudnn_does_forward(form, q, k, v, bias):
    scores, _, values = cudnns_scores(form, q, k, v, bias)
    logsumexp = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("BHST,BTHJ->BSHJ", jnp.exp(scores - logsumexp[..., None]), values)
    return out, (q, k, v, bias, out, logsumexp)


def as_cudnn_does_backward(form, saved, dy):
    q, k, v, bias, out, logsumexp = saved
    scores, keys, values = cudnns_scores(form, q, k, v, bias)
    weights = jnp.exp(scores - logsumexp[..., None])
    row_sums = jnp.einsum("BSHJ,BSHJ->BHS", dy, out)[..., None]
    d_scores = form[0] * weights * (jnp.einsum("BSHJ,BTHJ->BHST", dy, values) - row_sums)
    dk, dv = jnp.einsum("BHST,BSHJ->BTHJ", d_scores, q), jnp.einsum("BHST,BSHJ->BTHJ", weights, dy)
    dk, dv = (x.reshape(*k.shape[:3], -1, k.shape[-1]).sum(axis=3) for x in (dk, dv))
    return jnp.einsum("BHST,BTHJ->BSHJ", d_scores, keys), dk, dv, None


as_cudnn_does.defvjp(as_cudnn_does_forward, as_cudnn_does_backward)


@pytest.fixture
def cudnn_calls(monkeypatch):
    """Calls of cuDNN in layers with windows: key tokens, and the window that it is told. They are made here."""
    calls = set()

    def told(q, k, v, *, bias, is_causal, scale, local_window_size, implementation):
        assert implementation == "cudnn" and is_causal == (q.shape[1] == k.shape[1])
        calls.add((k.shape[1], local_window_size))
        return as_cudnn_does((scale, is_causal, local_window_size and local_window_size[0] + 1), q, k, v, bias)

    monkeypatch.setattr(jax.nn, "dot_product_attention", told)
    return calls


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("kernel", "ranks", "order"),
    [
        ("splash", 1, "zigzag"),
        ("splash", 2, "zigzag"),
        ("splash", 2, "contiguous"),
        ("cudnn", 1, "zigzag"),
        ("cudnn", 2, "zigzag"),
        ("cudnn", 2, "contiguous"),
        ("triton", 1, "zigzag"),
    ],
)
@pytest.mark.parametrize("window", [100, 300])
def test_a_kernel_hides_what_is_behind_the_window(kernel, ranks, order, window, cudnn_calls):
    """The last of three documents is longer than the window, and crosses from rank to rank."""
    (q, k, v), _ = heads(seq=512, rows=1, heads=2, kv_heads=1)
    segments = jnp.asarray(np.searchsorted([40, 90], np.arange(512), side="right")[None].astype(np.int32))
    hidden = ~near(np.asarray(segments), window)[:, None]

    def plain(q, k, v):
        scores = jnp.einsum("BSHJ,BTGJ->BHST", 0.1 * q, k)
        return jnp.einsum("BHST,BTGK->BSHK", jax.nn.softmax(jnp.where(hidden, -jnp.inf, scores), axis=-1), v)

    def these(q, k, v, segments):
        mask = Mask(segments, window=window, order=order)
        return attend(own_tokens(q, 1, order), k, v, mask, scale=0.1, kernel=kernel)

    mesh = mesh_of(1, 1, 1, cp=ranks)
    mapped = jax.shard_map(these, mesh=mesh, in_specs=P(), out_specs=P(None, "cp" if ranks > 1 else None))
    both = lambda q, k, v: own_order(mapped(q, k, v, segments), ranks, order)  # noqa: E731
    found, expected = (jax.jit(functools.partial(value_and_pulled, f))((q, k, v)) for f in (both, plain))
    for actual, wanted in zip(found, expected, strict=True):
        assert error(actual, wanted) < 1e-5
    # cuDNN skips what is before a window of its own, which it has of whole rows; the other pieces are of 128 queries.
    called = {(512, (window - 1, 0)) if ranks == 1 else (128 + -(-window // 8) * 8, None)}
    assert cudnn_calls == (called if kernel == "cudnn" else set())


@pytest.mark.parametrize("window", [1, 200, pytest.param(300, marks=pytest.mark.slow)])
def test_a_short_window_has_caps_and_sinks_and_groups_of_heads(window):
    """Of three blocks; the first queries see no whole window, and the last keys have few queries."""
    (q, k, v), segments = heads(seq=384, rows=2, d_qk=24, d_v=16)
    sinks = jnp.linspace(-1.0, 1.0, 4)

    def these(kernel, q, k, v, sinks):
        return attend(q, k, v, Mask(segments, window=window), scale=0.1, kernel=kernel, cap=1.5, sinks=sinks)

    run = lambda kernel: functools.partial(value_and_pulled, functools.partial(these, kernel))  # noqa: E731
    found, expected = (jax.jit(run(kernel))((q, k, v, sinks)) for kernel in ("splash", "xla"))
    for actual, wanted in zip(found, expected, strict=True):
        assert error(actual, wanted) < 1e-5


@pytest.mark.parametrize("window", [100, 128, 129, 300])
def test_flops_of_a_short_window_are_those_of_the_products_that_run(window):
    """A step, of a block of queries, has all keys that these see; after the last queries steps multiply nothing."""
    (q, k, v), segments = heads(seq=384, d_qk=96, d_v=64)

    def in_window(q, k, v):
        return splash_attention(q, k, v, Mask(segments, window=window), scale=0.1)

    kernels = [e for e in equations(lambda *heads: value_and_pulled(in_window, heads), q, k, v) if is_kernel(e)]
    assert [name_of(e) for e in kernels] == ["splash_window_fwd", "splash_window_bwd"]
    for equation in kernels:
        shapes = [var.aval.shape for var in equation.invars if jnp.issubdtype(var.aval.dtype, jnp.floating)]
        steps = 2 * 4 * (384 // 128)
        assert kernel_flops(name_of(equation), shapes, window=window) == steps * of_a_block(equation)
    rows, seen = np.arange(384)[:, None], np.arange(384)[None]
    blocks = ((rows >= seen) & (rows - seen < window)).reshape(3, 128, 3, 128).any(axis=(1, 3)).sum(axis=1).max()
    assert window_tokens(384, window) == (128, 128 * blocks)


@pytest.mark.fast(2)
@pytest.mark.parametrize("remat, calls", [("elementwise", 1), ("none", 1), ("attention", 2)])
@pytest.mark.parametrize("window", [0, 4])
def test_cudnns_forward_pass_is_made_again_only_where_its_result_is(remat, calls, window):
    """A remat policy that keeps attention keeps each row's logsumexp, too; none keeps the bias."""
    devices, rows = dict.fromkeys(AXES, 1), make_batch()
    model = build((1, 1, 1), kernel="xla", dtype="bfloat16", remat=remat, sliding_window=window, **GQA)
    model = model.replace(mesh=abstract_mesh(devices), model=dataclasses.replace(model.config, kernel="cudnn"))
    made = equations(model.loss_and_grad, model.shapes, rows)
    assert [name_of(e) for e in made if is_kernel(e)] == ["cudnn_fwd"] * calls + ["cudnn_bwd"]
    seq = rows["tokens"].shape[1]
    squares = [v for e in made if e.primitive.name == "scan" for v in e.outvars if v.aval.shape[-2:] == (seq, seq)]
    assert not squares


@pytest.mark.parametrize("order", ["zigzag", pytest.param("contiguous", marks=pytest.mark.slow)])
def test_pieces_of_queries_save_no_copies_of_keys(order):
    """Two context ranks with two pieces of 128 queries each, in layers with a window of 40."""
    saved = []
    for window in (0, 40):
        model = build((1, 1, 1, 1, 2), kernel="xla", remat="none", layers=2, order=order, sliding_window=window, **GQA)
        model = model.replace(mesh=abstract_mesh(model.axis_sizes))
        model = model.replace(model=dataclasses.replace(model.config, kernel="cudnn", dtype="bfloat16"))
        made = equations(model.loss_and_grad, model.shapes, make_batch(rows=4, seq=512))
        keys = {e.invars[1].aval.shape[1] for e in made if is_kernel(e)}
        assert keys == ({128 + 40} if window else {512})
        scans = [e for e in made if e.primitive.name == "scan"]
        saved.append(sorted(str(v.aval) for e in scans if any(map(is_kernel, inside(e))) for v in e.outvars))
    assert saved[0] == saved[1]


def test_a_piece_of_queries_has_all_keys_that_it_sees():
    cases = (512, 2, 100), (8184, 2, 100), (1024, 4, 129), (1536, 2, 7), (4096, 2, 1024), (96, 4, 1)
    for seq, ranks, window in cases:
        queries, keys = piece_in_window(seq, ranks, window)
        assert seq // (2 * ranks) % queries == 0 and queries + window - 1 <= keys < seq
        a_pass = attention_flops("cudnn", "fwd", rows=1, heads=1, seq=seq, d_qk=8, d_v=8, ranks=ranks, window=window)
        pieces = seq // ranks // queries
        assert a_pass == kernel_flops("cudnn_fwd", [(pieces, queries, 1, 8), *[(pieces, keys, 1, 8)] * 2], window)
    assert piece_in_window(4096, 2, 1024) == (512, 1536)
    assert piece_in_window(8184, 2, 100) == (66, 170)  # chunks of 2046 = 31 * 66
    assert piece_in_window(4 * 125, 2, 100) is None  # odd


def own_order(x, ranks, order="zigzag"):
    """In the order of the text, of rows as context ranks hold them."""
    return x if ranks == 1 else x[:, np.argsort(order_of(ranks, x.shape[1], order).reshape(-1))]


@pytest.mark.slow
def test_in_bfloat16_it_is_as_near_as_attention_with_scores():
    arrays, segments = heads(dtype=jnp.bfloat16)
    run = lambda f, arrays: value_and_pulled(lambda q, k, v: f(q, k, v, segments, scale=0.1), arrays)  # noqa: E731
    exact = run(with_scores, [x.astype(jnp.float32) for x in arrays])
    for actual, other, expected in zip(run(in_splash, arrays), run(with_scores, arrays), exact, strict=True):
        assert actual.dtype == jnp.bfloat16
        assert error(actual, expected) < max(2 * error(other, expected), 2.0**-7)


def test_what_is_replicated_gets_the_whole_gradient():
    """Weights known to all; queries cut over dp and tp, keys and values over dp alone, as their one head is."""
    (q, k, v), segments = heads(kv_heads=1)
    weights = [jnp.linspace(0.5, 1.5, 128), jnp.linspace(1.0, 2.0, 128), jnp.linspace(-1.0, 1.0, 128)]

    def loss(weights, q, k, v, segments):
        q, k, v = (x * w[None, None, None] for x, w in zip((q, k, v), weights, strict=True))
        return (splash_attention(q, k, v, Mask(segments), scale=0.1) ** 2).sum()

    def local(weights, *arrays):
        return jax.lax.psum(loss(weights, *arrays), ("dp", "tp"))

    cut, whole = P("dp", None, "tp"), P("dp")
    mapped = jax.shard_map(local, mesh=mesh_of(1, 2, 2), in_specs=(P(), cut, whole, whole, whole), out_specs=P())
    outside = jax.jit(jax.grad(mapped, argnums=(0, 1, 2, 3)))(weights, q, k, v, segments)
    expected = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(weights, q, k, v, segments)
    inside = jax.shard_map(
        jax.grad(local, argnums=(0, 1, 2, 3)),
        mesh=mesh_of(1, 2, 2),
        in_specs=(P(), cut, whole, whole, whole),
        out_specs=(P(), cut, whole, whole),
    )
    for grads in (outside, jax.jit(inside)(weights, q, k, v, segments)):
        for actual, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
            assert error(actual, wanted) < 1e-5


# ---- in a model


def settings(**changes):
    return dict(layers=2, microbatches=2) | changes


@functools.cache
def batch():
    return make_batch(rows=4, seq=SEQ)


def loss_and_grads(mesh, **changes):
    model = build(mesh, **settings(**changes))
    metrics, grads = jax.jit(model.loss_and_grad)(params_of(model), batch())
    return float(metrics["loss"]), jax.tree.map(np.asarray, grads)


@functools.cache
def reference(attention):
    return loss_and_grads((1, 1, 1), **(MLA if attention == "mla" else GQA))


def check_model(mesh, kind, kernel="splash", **changes):
    loss, grads = loss_and_grads(mesh, kernel=kernel, **kind, **changes)
    expected_loss, expected = reference(kind["attention"])
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for actual, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert error(actual, wanted) < 1e-5


@pytest.mark.slow
def test_a_zero_bubble_schedule_with_all_kept():
    check_model((2, 2, 2), GQA, schedule="zero_bubble", remat="none")


@pytest.mark.slow
def test_latent_attention_in_a_recomputing_pipeline():
    check_model((2, 1, 2), MLA, schedule="one_f_one_b", remat="layer")


@functools.cache
def long_batch(seq):
    return make_batch(rows=2, seq=seq)


def check_context_ranks(mesh, kind, *, layers=1, **changes):
    """A model whose context ranks share a row, in chunks of 128, against the same on one device in blocks."""
    both = []
    for sizes, kernel in (((1, 1, 1), "xla"), (mesh, "splash")):
        model = build(sizes, **settings(layers=layers, kernel=kernel, **kind, **changes))
        metrics, grads = jax.jit(model.loss_and_grad)(params_of(model), long_batch(256 * mesh[-1]))
        both.append((float(metrics["loss"]), jax.tree.map(np.asarray, jax.tree.leaves(grads))))
    (expected_loss, expected), (loss, grads) = both
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for actual, wanted in zip(grads, expected, strict=True):
        assert error(actual, wanted) < 1e-5


@pytest.mark.slow
def test_context_ranks_gather_keys():
    check_context_ranks((1, 1, 1, 1, 2), GQA | dict(d_head=16), microbatches=1)


CONTEXT_RANKS = [
    ((1, 1, 1, 1, 4), GQA, dict(remat="none")),
    ((1, 1, 2, 1, 2), MLA, dict(remat="layer")),
    ((1, 1, 1, 1, 4), MLA, dict(remat="none", tensor_parallel="scatter")),
    ((1, 1, 2, 1, 2), GQA, dict(context="ulysses")),
    ((1, 1, 1, 1, 4), GQA, dict(context="ulysses")),  # more ranks than key heads
    ((1, 1, 1, 1, 4), MLA, dict(context="ulysses", remat="layer")),
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh, kind, changes", CONTEXT_RANKS)
def test_context_ranks_compute_what_one_device_does(mesh, kind, changes):
    check_context_ranks(mesh, kind, **changes)


@pytest.mark.slow
def test_context_ranks_in_a_zero_bubble_schedule():
    check_context_ranks((2, 1, 2, 1, 2), GQA, layers=2, schedule="zero_bubble", remat="none")


MORE = [
    ((1, 1, 1), GQA, dict(schedule="gpipe", remat="layer")),
    ((2, 2, 1), GQA, dict(schedule="one_f_one_b", remat="layer", prefetch=1)),
    ((1, 2, 4), GQA, dict(schedule="gpipe", remat="none")),  # more ranks than key heads
    ((2, 1, 2), MLA, dict(schedule="zero_bubble", remat="layer")),
    ((2, 2, 1), MLA, dict(schedule="one_f_one_b", remat="none")),
    ((2, 2, 2), GQA, dict(schedule="zero_bubble", remat="stage")),
    ((2, 2, 1), GQA, dict(schedule="one_f_one_b", remat="stage", tensor_parallel="scatter")),
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh, kind, changes", MORE)
def test_a_model_trains_as_with_scores_however_it_is_cut(mesh, kind, changes):
    check_model(mesh, kind, **changes)


IN_MODELS = [
    ((1, 2, 4), GQA, dict(schedule="gpipe", remat="none")),  # more ranks than key heads
    ((2, 2, 1), GQA, dict(schedule="zero_bubble", remat="attention")),
    ((2, 1, 2), MLA, dict(schedule="one_f_one_b", remat="layer")),
    ((1, 1, 2, 1, 2), GQA, dict(context="ulysses")),
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh, kind, changes", IN_MODELS)
def test_a_model_trains_as_with_scores_by_the_kernel_for_triton(mesh, kind, changes):
    check_model(mesh, kind, "triton", **changes)


def layer_alone(kind, seq=SEQ, kernel="splash", split=False):
    """The passes of a layer of the tiny model on one device, and what they take."""
    model = build((1, 1, 1), kernel=kernel, **settings(**kind))
    block = model.parts.blocks["dense"]
    weights = jax.tree.map(lambda stacked: stacked[0], params_of(model)["blocks"])
    segments = jnp.asarray(make_batch(rows=2, seq=seq)["segments"])
    positions = jnp.asarray(positions_of(np.asarray(segments)))
    context = Context(Rope(model.config).tables(positions), jnp.arange(2), None, Mask(segments))
    x = jax.random.normal(jax.random.key(0), (2, seq, model.config.d_model))
    weights = {"params": weights}
    given = dict(weights=weights, x=x, context=context, plan=model.plan, stack="blocks")
    passes = layer_passes(block, "none", split=split, **given)
    return passes, weights, x, context


@pytest.mark.slow
def test_nothing_outside_of_the_kernels_is_as_large_as_the_scores():
    passes, weights, x, context = layer_alone(MLA, seq=384)  # in blocks of 128

    def both(weights, x):
        y, saved = passes.forward(weights, x, context)
        return passes.backward(weights, context, saved, y)

    shapes = {var.aval.shape for equation in equations(both, weights, x) for var in equation.outvars}
    assert (128, 128) in shapes
    assert not [shape for shape in shapes if shape[-2:] == (384, 384)]


@pytest.mark.slow
def test_a_layer_keeps_the_output_and_a_number_a_row_but_no_table_and_no_segments():
    passes, weights, x, context = layer_alone(GQA)
    saved = passes.forward(weights, x, context)[1]["F to B"]
    assert {leaf.dtype.name for leaf in saved} <= {"float32", "bool"}
    assert [leaf.shape for leaf in saved].count((2, 4, SEQ)) == 1  # logsumexp
    assert [leaf.shape for leaf in saved].count((2, 4, SEQ, 128)) == 2  # q, output


@pytest.mark.slow
def test_a_layer_keeps_the_output_once_and_key_heads_as_they_are_for_triton():
    passes, weights, x, context = layer_alone(GQA, kernel="triton")
    saved = passes.forward(weights, x, context)[1]["F to B"]
    shapes = [leaf.shape for leaf in saved]
    assert shapes.count((2, 4, SEQ)) == 1  # logsumexp
    assert shapes.count((2, SEQ, 4, 128)) == 2  # q, output
    assert shapes.count((2, SEQ, 2, 128)) == 2  # k, v
    assert not [leaf for leaf in saved if leaf.dtype == jnp.int32]


def test_a_context_rank_keeps_segments_of_whole_rows_but_no_table():
    arrays, segments = heads(seq=512, rows=1)
    kept = []

    def own(q, k, v):
        y, pull = jax.vjp(lambda q: splash_attention(own_tokens(q, axis=1), k, v, Mask(segments), scale=0.1), q)
        kept.extend(leaf for leaf in jax.tree.leaves(pull) if leaf.ndim)
        return y

    mapped = jax.shard_map(own, mesh=mesh_of(1, 1, 1, cp=2), in_specs=P(), out_specs=P(None, "cp"))
    jax.eval_shape(mapped, *arrays)
    whole = [leaf.shape for leaf in kept if jnp.issubdtype(leaf.dtype, jnp.integer)]
    assert whole == [(1, 512)]
    assert sorted(leaf.shape for leaf in kept if leaf.dtype == jnp.float32) == [
        (1, 2, 512, 128),  # k and v
        (1, 2, 512, 128),
        (1, 4, 256),  # logsumexp
        (1, 4, 256, 128),  # q and the output
        (1, 4, 256, 128),
    ]


@pytest.mark.parametrize("remat, calls", [("elementwise", 1), ("layer", 2)])
def test_tritons_forward_pass_is_made_again_only_where_its_result_is(remat, calls):
    model = build((1, 1, 1), kernel="triton", remat=remat, **GQA)
    names = [name_of(e) for e in equations(model.loss_and_grad, model.shapes, batch()) if is_kernel(e)]
    assert names == ["mha_fwd"] * calls + ["mha_dq", "mha_dkv"]


@pytest.mark.slow
def test_the_kernels_of_a_divided_backward_pass_are_in_b():
    passes, weights, x, context = layer_alone(GQA, split=True)
    y, saved = passes.forward(weights, x, context)
    kernels = lambda *args: [e for e in equations(*args) if is_kernel(e)]  # noqa: E731
    for_w = passes.backward(weights, context, saved, y)[2] | {"F to W": saved["F to W"]}
    assert len(kernels(lambda dy: passes.backward(weights, context, saved, dy), y)) == 2
    assert not kernels(passes.weight_gradients, for_w)


# ---- what they cost, what they refuse


def counted(equation):
    """FLOPs of a causal kernel, counted in its program: products of a block, times the blocks that run."""
    *rows_and_heads, queries, keys = equation.params["grid_mapping"].grid
    return of_a_block(equation) * int(np.prod(rows_and_heads)) * queries * (keys + 1) // 2


def of_a_block(equation):
    """FLOPs of the products in a kernel's program, which is of one block."""
    products = [inner for inner in inside(equation.params["jaxpr"]) if inner.primitive.name == "dot_general"]
    a_block = 0
    for product in products:
        (contracted, _), _ = product.params["dimension_numbers"]
        terms = [product.invars[0].aval.shape[dim] for dim in contracted]
        a_block += 2 * int(np.prod([*product.outvars[0].aval.shape, *terms]))
    return a_block


@pytest.mark.parametrize("rows", [1, 2])
def test_flops_of_kernels_are_those_of_the_products_in_the_blocks_that_run(rows):
    (q, k, v), segments = heads(rows=rows, seq=384, d_qk=96, d_v=64)  # three blocks a side
    run = lambda *heads: value_and_pulled(functools.partial(in_splash, segments=segments, scale=0.1), heads)  # noqa: E731
    kernels = [e for e in equations(run, q, k, v) if is_kernel(e)]
    assert [e.params["name"].split("_")[2] for e in kernels] == ["fwd", "dkv", "dq"]
    for equation in kernels:
        shapes = [var.aval.shape for var in equation.invars if jnp.issubdtype(var.aval.dtype, jnp.floating)]
        assert kernel_flops(equation.params["name"], shapes) == counted(equation)
    assert kernel_flops("another", []) is None


@pytest.mark.parametrize("window", [1, 100, 128, 300, 512, 4096])
def test_flops_of_a_window_are_those_of_the_blocks_that_it_shows(window):
    """Of 2,048 tokens; blocks may be shorter in short windows."""
    query, key = np.arange(2048)[:, None], np.arange(2048)[None]
    shown = (query >= key) & (query - key < window)
    for kernel, size in (
        ("xla", tokens_of_block(2048, window)),
        ("splash", splash_block_tokens(2048)),
        ("cudnn", CUDNN_BLOCK),
    ):
        blocks = shown.reshape(2048 // size, size, -1, size).any(axis=(1, 3)).sum()
        of_one = dict(rows=1, heads=1, seq=2048, d_qk=8, d_v=8)
        assert attention_flops(kernel, "fwd", **of_one, window=window) == 2 * 2 * 8 * size**2 * blocks


@pytest.mark.parametrize("window", [0, 100, 512, 1500])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("kernel", "ranks"), [("splash", 2), ("splash", 4), ("xla", 4)])
def test_flops_of_context_ranks_are_those_of_the_rank_with_the_most_blocks(kernel, ranks, order, window):
    places, key = order_of(ranks, 2048, order).reshape(-1, 1), np.arange(2048)[None]
    shown = (places >= key) & (places - key < (window or 2048))
    sizes = {"splash": splash_block_tokens(2048, ranks), "xla": tokens_of_block(1024 // ranks, window)}
    size = sizes[kernel]
    blocks = shown.reshape(ranks, -1, size, 2048 // size, size).any(axis=(2, 4)).sum(axis=(1, 2)).max()
    of_one = dict(rows=1, heads=1, seq=2048, d_qk=8, d_v=8, ranks=ranks, window=window, order=order)
    assert attention_flops(kernel, "fwd", **of_one) == 2 * 2 * 8 * size**2 * blocks
    where = "contiguous/" * (order == "contiguous") + f"window_of_{window}/" * (window > 0)
    shapes = [(1, 2048 // ranks, 8), (1, 2048, 8), (1, 2048, 8)]
    if kernel == "splash":
        assert kernel_flops("splash_mha_fwd_", shapes, window_in(where), order_in(where)) == 32 * size**2 * blocks


@pytest.mark.parametrize("ranks", [2, 4])
def test_flops_of_a_context_rank_are_those_of_the_blocks_that_its_tables_name(ranks):
    """Chunks in zigzag order: as many on each rank."""
    arrays, segments = heads(seq=512 * ranks, rows=1, d_qk=96, d_v=64)  # a chunk is a block of 256
    own = lambda q, k, v: splash_attention(own_tokens(q, axis=1), k, v, Mask(segments), scale=0.1)  # noqa: E731
    mapped = jax.shard_map(own, mesh=mesh_of(1, 1, 1, cp=ranks), in_specs=P(), out_specs=P(None, "cp"))
    kernels = [e for e in equations(lambda *arrays: value_and_pulled(mapped, arrays), *arrays) if is_kernel(e)]
    assert len(kernels) == 3
    live = [int((table > 0).sum()) for table in np.split(live_blocks(512 * ranks, ranks), ranks)]
    assert len(set(live)) == 1
    for equation in kernels:
        shapes = [var.aval.shape for var in equation.invars if jnp.issubdtype(var.aval.dtype, jnp.floating)]
        assert kernel_flops(equation.params["name"], shapes) == of_a_block(equation) * 4 * live[0]


@pytest.mark.parametrize("kernel, seq, window", [("triton", 64, 40), ("splash", 256, 100)])
def test_layers_of_one_stack_may_have_a_window_in_a_kernel_or_none(kernel, seq, window):
    (q, k, v), segments = heads(seq=seq, rows=1, heads=2, kv_heads=1, d_qk=16, d_v=16)

    @functools.partial(jax.jit, static_argnames="kernel")
    def run(which, kernel):
        mask = Mask(segments, windows=(window, 0), which=which)
        return value_and_pulled(functools.partial(attend, mask=mask, scale=0.1, kernel=kernel), (q, k, v))

    for which in range(2):
        for actual, wanted in zip(run(which, kernel), run(which, "xla"), strict=True):
            assert error(actual, wanted) < 1e-5


@pytest.mark.parametrize("order", ["zigzag", pytest.param("contiguous", marks=pytest.mark.slow)])
def test_layers_of_one_stack_may_have_a_window_in_cudnn_on_context_ranks(order, cudnn_calls):
    (q, k, v), segments = heads(seq=64, rows=2, heads=2, kv_heads=1, d_qk=16, d_v=16)

    def these(kernel, which, q, k, v):
        mask = Mask(segments, windows=(7, 0), which=which, order=order)
        return attend(own_tokens(q, 1, order), k, v, mask, scale=0.1, kernel=kernel)

    mapped = lambda kernel: jax.shard_map(  # noqa: E731
        functools.partial(these, kernel), mesh=mesh_of(1, 1, 1, cp=2), in_specs=P(), out_specs=P(None, "cp")
    )
    run = lambda kernel: jax.jit(lambda which: value_and_pulled(functools.partial(mapped(kernel), which), (q, k, v)))  # noqa: E731
    by_cudnn, by_xla = run("cudnn"), run("xla")
    for which in range(2):
        for actual, wanted in zip(by_cudnn(which), by_xla(which), strict=True):
            assert error(actual, wanted) < 1e-5
    assert cudnn_calls == {(24, None), (64, None)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, width, ranks", [("xla", 8, 1), ("splash", 64, 1), ("triton", 16, 1), ("cudnn", 16, 1), ("cudnn", 16, 2)]
)
def test_a_step_computes_of_a_window_what_its_closed_form_says(kernel, width, ranks):
    """So that what is left of the traced step, as padding, is the same with a window and without."""
    left = []
    for kinds in ("near=(rope_theta=100.0) far=(rope=False)", "near=(sliding_window=100) far=(rope=False)"):
        changes = dict(layers_of="near far", kinds=kinds, attention="gqa", d_head=width, heads=4, kv_heads=2)
        model = build((1, 1, 1, 1, ranks), kernel="xla" if kernel == "cudnn" else kernel, **settings(**changes))
        if kernel == "cudnn":
            model = model.replace(mesh=abstract_mesh(model.axis_sizes))
            model = model.replace(model=dataclasses.replace(model.config, kernel=kernel, dtype="bfloat16"))
        flops = flops_breakdown(model, 4, 1024)
        left.append((flops.padding, flops.repeated))
    assert left[0] == left[1]


def test_kernels_for_triton_read_the_blocks_that_a_window_shows_alone():
    """Of 512 tokens and a window of 40: four blocks of 128 forward, and eight of 64 backward, of which each sees one
    more. What is not a number where no block is read does not spread."""
    (q, k, v), segments = heads(seq=512, rows=1, heads=2, kv_heads=2, d_qk=32, d_v=32)
    k, v = (x.at[:, :256].set(jnp.nan) for x in (k, v))
    in_window = functools.partial(attend, mask=Mask(segments, window=40), scale=0.1, kernel="triton")

    def run(q, k, v):
        y, pull = jax.vjp(in_window, q, k, v)
        return y, pull(jnp.ones_like(y))[0]

    assert all(np.isfinite(x[:, 384:]).all() and not np.isfinite(x[:, :256]).all() for x in jax.jit(run)(q, k, v))
    flops = []
    for equation in filter(is_kernel, equations(run, q, k, v)):
        shapes = [var.aval.shape for var in equation.invars if jnp.issubdtype(var.aval.dtype, jnp.floating)]
        flops.append(kernel_flops(equation.params["name"], shapes, window=40) // (2 * 2 * 32))
    assert flops == [2 * (1 + 2 + 2 + 2) * 128**2, *(products * (1 + 7 * 2) * 64**2 for products in (3, 4))]


def test_kernels_for_triton_read_the_blocks_of_a_tokens_document_alone():
    """Three documents in rows of four blocks, as a block of 64 tokens ends or not; then padding. What is not a number
    in one document does not spread to the others, unless they are in one block."""
    (q, k, v), _ = heads(seq=256, rows=1, heads=2, kv_heads=1, d_qk=128, d_v=128)
    segments = jnp.asarray((1 + np.searchsorted([64, 100, 192, 250], np.arange(256), side="right")[None]) % 5)
    in_documents = functools.partial(attend, mask=Mask(segments), scale=0.1, kernel="triton")

    @jax.jit
    def run(q, k, v):
        y, pull = jax.vjp(in_documents, q, k, v)
        return y, *pull(jnp.ones_like(y))

    def is_finite_by_block(place):
        not_a_number = [x.at[:, place].set(jnp.nan) for x in (k, v)]
        arrays = run(q, *not_a_number)
        return np.isfinite([x.sum(axis=(0, 2, 3)).reshape(4, 64).sum(axis=1) for x in arrays]).all(axis=0).tolist()

    assert is_finite_by_block(0) == [False, True, True, True]
    assert is_finite_by_block(64) == [True, False, False, True]
    assert is_finite_by_block(255) == [True, True, True, False]


@pytest.mark.parametrize("window", [0, 5])
def test_the_blocks_to_read_are_those_that_documents_show(window):
    """Of documents in order, which padding of number 0 ends: no more. Of documents in any order: no fewer."""
    rng = np.random.default_rng(0)
    in_order, in_any = np.sort(rng.integers(1, 9, (20, 64))), rng.integers(0, 3, (20, 64))
    in_order[np.arange(64) >= 64 - rng.integers(0, 20, (20, 1))] = 0
    segments = jnp.asarray(np.concatenate([in_order, in_any]))
    shown = np.asarray(Mask(segments, window=window).dense(64)).reshape(40, 8, 8, 8, 8).any(axis=(2, 4))
    wanted = np.array([shown.argmax(axis=2), 8 - shown[:, ::-1].argmax(axis=1)])
    read = np.array(blocks_to_read(segments, window, 8))
    np.testing.assert_array_equal(read[:, :20], wanted[:, :20])
    assert (read[0] <= wanted[0]).all() and (read[1] >= wanted[1]).all()


def test_flops_of_triton_are_those_of_the_products_in_the_blocks_that_run():
    """Of 192 tokens and heads of 40 entries, of which it multiplies 64: three blocks of 64."""
    (q, k, v), segments = heads(seq=192, d_qk=40, d_v=20)
    run = lambda *heads: value_and_pulled(lambda q, k, v: in_triton(q, k, v, segments, 0.1), heads)  # noqa: E731
    kernels = [e for e in equations(run, q, k, v) if is_kernel(e)]
    assert [e.params["name"] for e in kernels] == ["mha_fwd", "mha_dq", "mha_dkv"]
    for equation in kernels:
        # A loop over blocks is traced once, and runs for all on one side of the diagonal, of keys for two heads.
        calls = int(np.prod(equation.params["grid_mapping"].grid)) // 3 * (1 + ("dkv" in equation.params["name"]))
        shapes = [var.aval.shape for var in equation.invars if jnp.issubdtype(var.aval.dtype, jnp.floating)]
        assert kernel_flops(equation.params["name"], shapes) == of_a_block(equation) * calls * (3 * 4 // 2)


def is_kernel(equation):
    return equation.primitive.name in KERNEL_CALLS


def name_of(call):
    return call.params[KERNEL_CALLS[call.primitive.name]]


def live_blocks(seq, ranks, size=256):
    """Blocks of queries, rank by rank, that see something of blocks of keys."""
    order = np.concatenate([np.arange(seq).reshape(2 * ranks, -1)[[r, 2 * ranks - 1 - r]] for r in range(ranks)])
    return (order.reshape(-1)[:, None] >= np.arange(seq)).reshape(seq // size, size, -1, size).any(axis=(1, 3))


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_stands_for_cudnn_has_the_operands_and_the_flops_of_attention(ranks):
    """A call forward, and one backward, whose products are those of attention with scores, which it makes again."""
    (q, k, v), segments = heads()
    q = q[:, : SEQ // ranks]
    bias = jnp.where(Mask(segments).dense(SEQ)[:, :, : SEQ // ranks], 0.0, -1e30)
    run = lambda *heads: value_and_pulled(lambda q, k, v: described_attention(q, k, v, bias), heads)  # noqa: E731
    calls = [e for e in equations(run, q, k, v) if is_kernel(e)]
    assert [name_of(e) for e in calls] == ["cudnn_fwd", "cudnn_bwd"]
    given, (rows, queries, count, width) = [x.shape for x in (q, k, v, bias)], q.shape
    shapes = [[var.aval.shape for var in e.invars] for e in calls]
    assert shapes == [given, [*given, q.shape, (rows, count, queries), q.shape]]
    assert [var.aval.shape for var in calls[1].outvars] == given[:3]
    a_product = 2 * rows * count * queries * SEQ * width
    assert [kernel_flops(name_of(e), of) for e, of in zip(calls, shapes)] == [2 * a_product, 5 * a_product]


@pytest.mark.parametrize("kernel, block", [("splash", 512), ("cudnn", 128), ("triton", 64)])
def test_blocks_behind_the_diagonal_cost_nothing(kernel, block):
    whole = lambda seq: 2 * seq**2 * 256  # noqa: E731
    cost = lambda seq: attention_flops(kernel, "fwd", rows=1, heads=1, seq=seq, d_qk=128, d_v=128)  # noqa: E731
    assert cost(block) == whole(block)
    assert cost(8 * block) == whole(8 * block) * 36 // 64


def refused(check, *args):
    with pytest.raises(ConfigError) as caught:
        check(*args)
    return str(caught.value)


def test_a_window_needs_a_cudnn_that_has_it_beside_a_bias(monkeypatch):
    windowed = model_config(kernel="cudnn", dtype="bfloat16", sliding_window=4, attention="gqa")
    for version in ((), (9, 10, 2), (9, 28, 0)):
        monkeypatch.setattr("parallax.model.checks.cudnn_version", lambda version=version: version)
        check_kernel_seq(windowed, 8, "all_gather", 1)
    monkeypatch.setattr("parallax.model.checks.cudnn_version", lambda: (9, 8, 0))
    check_kernel_seq(dataclasses.replace(windowed, sliding_window=0), 8, "all_gather", 1)
    check_kernel_seq(windowed, 4, "all_gather", 1)  # which hides nothing
    check_kernel_seq(windowed, 8, "all_gather", 2)  # in a bias
    assert refused(check_kernel_seq, windowed, 8, "ulysses", 2) == (
        "model.kernel='cudnn' has windows since cuDNN 9.10.2, and 9.8.0 is installed; install a newer one, or use "
        "kernel='xla'."
    )


def test_windows_that_no_block_divides_are_refused():
    model = build((1, 1, 1), kernel="splash", **settings(**GQA))
    assert refused(model.check_batch, 4, 200) == (
        "data.seq=200 is not a multiple of 128, the least block of model.kernel='splash'; use seq=256, or kernel='xla'."
    )
    check_kernel_seq(model_config(kernel="xla"), 200, "all_gather", 1)


def test_blocks_that_would_cross_a_context_ranks_chunks_are_refused():
    model = build((1, 1, 1, 1, 2), kernel="splash", **settings(**GQA))
    assert refused(model.check_batch, 4, 640) == (
        "data.seq=640 is not a multiple of 512 = 2 x mesh.cp=2 chunks of 128, the least block of "
        "model.kernel='splash'; use seq=1024, or kernel='xla'."
    )
    check_kernel_seq(model_config(kernel="splash"), 640, "ulysses", 2)  # whole rows of a rank's heads


@pytest.mark.parametrize("kernel", ["splash", "cudnn"])
def test_keys_that_go_from_rank_to_rank_are_for_one_kernel(kernel):
    ring = lambda cp: check_context(model_config(kernel=kernel, **GQA), "ring", dict(tp=1, cp=cp))  # noqa: E731
    assert refused(ring, 2) == (
        f"layout.context='ring' sends keys from rank to rank, which model.kernel='{kernel}' does not support; "
        "use kernel='xla', or layout.context in {'all_gather', 'ulysses'}."
    )
    ring(1)


def test_triton_takes_whole_rows_and_heads_that_are_not_too_wide():
    share = lambda context, cp: check_context(model_config(kernel="triton"), context, dict(tp=1, cp=cp))  # noqa: E731
    assert refused(share, "all_gather", 2) == (
        "layout.context='all_gather' splits the queries of a row over ranks, which model.kernel='triton' does not "
        "support; use kernel='xla', or layout.context in {'ulysses'}."
    )
    share("ulysses", 2)
    share("all_gather", 1)
    check_kernel_seq(model_config(kernel="triton"), 201, "ulysses", 2)
    wide = model_config(kernel="triton", attention="gqa", d_head=320)
    assert "heads of at most 256 entries, and these are 320 wide" in refused(
        check_kernel_on, wide, "gpu", "NVIDIA A100"
    )


def test_heads_that_context_ranks_cannot_share_are_refused():
    share = lambda context, tp, cp: check_context(model_config(heads=12), context, dict(tp=tp, cp=cp))  # noqa: E731
    assert refused(share, "ulysses", 2, 4) == (
        "model.heads=12 does not divide over mesh.tp=2 x mesh.cp=4, which shard them under layout.context='ulysses'; "
        "use tp x cp in {1, 2, 3, 4, 6, 12} or heads=16."
    )
    share("ulysses", 2, 3)
    share("all_gather", 2, 4)


def test_gpus_are_told_that_they_have_no_such_kernel():
    mesh = ChipMesh(np.array([[[Chip("gpu", "NVIDIA H100 80GB HBM3")]]]))
    assert refused(check_kernel, model_config(kernel="splash"), mesh) == (
        "model.kernel='splash' needs TPUs, or CPUs to try it on, and these are GPUs (NVIDIA H100 80GB HBM3); "
        "use kernel in {'xla', 'cudnn', 'triton'}."
    )


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_cudnn_is_for_gpus_alone(platform):
    cudnn = model_config(kernel="cudnn", dtype="bfloat16")
    assert "model.kernel='cudnn' needs GPUs, and these are " in refused(check_kernel_on, cudnn, platform, "a kind")


@pytest.mark.parametrize("kind", ["NVIDIA A100", "NVIDIA L4", "NVIDIA A10G", "NVIDIA GeForce RTX 4090", "Tesla V100"])
def test_heads_wider_than_cudnn_takes_on_a_gpu_are_refused_and_those_of_no_whole_width_on_all(kind):
    wide = model_config(kernel="cudnn", dtype="bfloat16", attention="mla", d_head=128, d_rope=64)
    for newer in ("NVIDIA H100", "NVIDIA H200", "NVIDIA GeForce RTX 5090", "NVIDIA GB200"):
        check_kernel_on(wide, "gpu", newer)
    assert f"on {kind} takes heads whose width is a multiple of 8, at most 128; these are 192 wide (model.d_head=" in (
        refused(check_kernel_on, wide, "gpu", kind)
    )
    odd = model_config(kernel="cudnn", dtype="bfloat16", attention="gqa", d_head=12)
    assert "these are 12 wide (model.d_head=12)" in refused(check_kernel_on, odd, "gpu", "NVIDIA H100")


A_TPU, A_GPU = ("tpu", "TPU v5e"), ("gpu", "NVIDIA H100")


@pytest.mark.parametrize(
    "device, changes, seq, context, cp, expected",
    [
        (A_TPU, {}, 256, "all_gather", 1, "splash"),
        (A_TPU, {}, 200, "all_gather", 1, "xla"),  # no whole blocks
        (A_TPU, {}, 512, "all_gather", 2, "splash"),
        (A_TPU, {}, 256, "all_gather", 2, "xla"),  # chunks of a context rank have no whole blocks
        (A_TPU, {}, 512, "ring", 2, "xla"),
        (A_TPU, {}, 512, "ring", 1, "splash"),  # nothing to send
        (A_GPU, {"dtype": "bfloat16"}, 256, "all_gather", 1, "cudnn"),
        (A_GPU, {"dtype": "bfloat16"}, 256, "ulysses", 2, "cudnn"),
        (A_GPU, {"dtype": "bfloat16"}, 255, "all_gather", 1, "triton"),
        (A_GPU, {"dtype": "bfloat16"}, 32_768, "all_gather", 1, "triton"),  # a bias of 2 GiB
        (A_GPU, {"dtype": "bfloat16"}, 32_768, "all_gather", 2, "xla"),
        (A_GPU, {"dtype": "bfloat16", "d_head": 12}, 256, "all_gather", 1, "triton"),
        (A_GPU, {"dtype": "bfloat16", "sinks": True}, 256, "all_gather", 1, "triton"),
        (A_GPU, {}, 256, "all_gather", 1, "xla"),  # float32
        (("gpu", "Tesla V100-SXM2-16GB"), {"dtype": "bfloat16"}, 256, "all_gather", 1, "xla"),
        (("cpu", "cpu"), {}, 256, "all_gather", 1, "xla"),
    ],
)
def test_auto_is_the_fastest_kernel_that_takes_the_model(device, changes, seq, context, cp, expected):
    model = GQA | {"d_head": 64, "kernel": "auto"} | changes
    settings = read_settings(get_config(), model=model, data={"seq": seq}, layout={"context": context})
    named = read_settings(settings, model={"kernel": "triton"})
    assert chosen_kernel(settings, dict(tp=1, cp=cp), *device) == expected
    assert chosen_kernel(named, dict(tp=1, cp=cp), *device) == "triton"


def test_auto_is_decided_before_anything_reads_it():
    changes = dict(mesh={"dp": -1, "simulate": 0}, data={"seq": 256}, model={"vocab": 64, "dtype": "bfloat16"})
    auto = read_settings(get_config(), **changes)
    assert auto.model.kernel == "auto"
    found = [resolve(auto, read_topology(name).as_devices).model.kernel for name in ("v5e:2x2", "H100:1x8")]
    assert found == ["splash", "cudnn"]
    assert model_of(auto, mesh_of(1, 1, 1)).config.kernel == "xla"  # of CPUs


# ---- the compiler for TPU

COMPILE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from parallax.model.kernels.splash import splash_attention
from parallax.model.mask import Mask

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
axis = sys.argv[1]
mesh = Mesh(np.array(devices).reshape(2, 2), (axis, "tp"))

def local(scale, q, k, v, segments):
    attend = lambda q, k, v: splash_attention(q, k, v, Mask(segments), scale=0.1)
    loss = lambda scale, q, k, v: (attend(q * scale, k, v).astype("float32") ** 2).sum()
    return jax.grad(lambda *args: jax.lax.psum(loss(*args), (axis, "tp")), argnums=(0, 1, 2, 3))(scale, q, k, v)

rows = P("dp") if axis == "dp" else P()
keys = P(*rows or (None,), None, "tp")
queries = keys if axis == "dp" else P(None, "cp", "tp")
specs = P(), queries, keys, keys
step = jax.shard_map(local, mesh=mesh, in_specs=(*specs, rows), out_specs=specs)
array = lambda spec, dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
heads = zip(specs[1:], ((16, 192), (4, 192), (4, 128)))
heads = [array(spec, "bfloat16", 2, 2048, *shape) for spec, shape in heads]
compiled = jax.jit(step).lower(array(P(), "bfloat16"), *heads, array(rows, "int32", 2, 2048)).compile()
print(compiled.as_text().count('custom_call_target="tpu_custom_call"'), compiled.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed")
@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_it_compiles_for_tpu_without_room_for_the_scores(axis):
    tpu = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | tpu
    done = subprocess.run([sys.executable, "-c", COMPILE, axis], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls, temporaries = map(int, done.stdout.split()[-2:])
    assert calls == 3
    assert temporaries < 8 * 2048**2 * 2 / 4, "less than a quarter of the scores of a device's 8 heads"
