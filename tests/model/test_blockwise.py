"""Attention in blocks is the plain form to float32 rounding, and holds no square of scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import mesh_of
from support.traced_equations import equations

from parallax.model.attention import attend_over_context
from parallax.model.families import CONTEXTS
from parallax.model.kernels import blockwise as blockwise_module
from parallax.model.kernels.blockwise import LONGEST_SIDE, blockwise_attention, scores_in_window, tokens_of_block
from parallax.model.mask import Mask
from parallax.sharding.activations import SEQ, activation
from parallax.sharding.collectives import as_varying
from parallax.sharding.layout import Layout
from parallax.sharding.zigzag import order_of, own_tokens, to_order

SIDE = LONGEST_SIDE["cpu"]
ROWS, SCALE = 2, 0.3
# Sums over up to 600 float32 terms in another order.
ERROR = 2e-6
HEADS = {  # heads, key heads, width of queries and keys, width of values
    "mha": (4, 4, 8, 8),
    "gqa": (4, 2, 8, 8),
    "mqa": (4, 1, 8, 8),
    "mla": (4, 4, 12, 8),
    "wide values": (4, 2, 4, 16),
}
SEQS = [16, 97, 512, 600, 521]  # one block of all; a prime; 2 blocks; blocks of 200; a prime that is more than a block


def documents(seq, seed=0):
    """Segments of packed rows [ROWS, seq]: documents of uneven lengths, across blocks, and padding (0) at one's end."""
    rng = np.random.default_rng(seed)
    segments = 1 + np.cumsum(rng.random((ROWS, seq)) < 5 / seq, axis=1).astype(np.int32)
    segments[0, -seq // 5 :] = 0
    return segments


def arrays(heads, seq, dtype=np.float32):
    """(q, k, v) and a weight for each entry of the output."""
    queries, keys, width, width_of_values = HEADS[heads]
    rng = np.random.default_rng(1)
    shapes = (queries, width), (keys, width), (keys, width_of_values), (queries, width_of_values)
    return [rng.normal(size=(ROWS, seq, *shape)).astype(np.float32).astype(dtype) for shape in shapes]


def plain(q, k, v, segments, scale=SCALE, window=0):
    """A softmax over whole rows of scores."""
    group, seq = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    near = np.tri(seq, dtype=bool) & ~np.tri(seq, k=-window, dtype=bool) if window else np.tri(seq, dtype=bool)
    seen = (segments[:, :, None] == segments[:, None, :]) & near[None]
    scores = jnp.where(seen[:, None], scale * jnp.einsum("BSHJ,BTHJ->BHST", q, k), -jnp.inf)
    return jnp.einsum("BHST,BTHK->BSHK", jax.nn.softmax(scores, axis=-1), v)


def with_gradients(function, q, k, v, dy):
    """(y, dq, dk, dv), as one compiled program."""

    def run(q, k, v, dy):
        y, pull = jax.vjp(function, q, k, v)
        return y, *pull(dy)

    return jax.tree.map(np.asarray, jax.jit(run)(q, k, v, dy))


def exact(heads, seq, segments, dtype=np.float32, window=0):
    """`with_gradients` of the plain form in float64."""
    with jax.enable_x64(True):
        given = [np.asarray(x, np.float64) for x in arrays(heads, seq, dtype)]
        return with_gradients(lambda q, k, v: plain(q, k, v, segments, window=window), *given)


def check(found, expected, error):
    for name, a, e in zip(("y", "dq", "dk", "dv"), found, expected, strict=True):
        assert a.shape == e.shape and np.isfinite(a).all()
        assert np.abs(a - e).max() <= error * np.abs(e).max(), name


@pytest.mark.fast(7)
@pytest.mark.parametrize("seq", SEQS)
@pytest.mark.parametrize("heads", HEADS)
def test_values_and_gradients_are_those_of_the_plain_form(heads, seq):
    segments = documents(seq)
    blocks = lambda q, k, v: blockwise_attention(q, k, v, Mask(jnp.asarray(segments)), scale=SCALE)  # noqa: E731
    check(with_gradients(blocks, *arrays(heads, seq)), exact(heads, seq, segments), ERROR)


def test_scores_that_are_large_overflow_nothing():
    """And what is hidden stays so: the largest score of a row may be one that a query does not see."""
    segments, (q, k, v, dy) = documents(512), arrays("gqa", 512)
    blocks = lambda q, k, v: blockwise_attention(q, k, v, Mask(jnp.asarray(segments)), scale=300.0)  # noqa: E731
    found = with_gradients(blocks, q, k, v, dy)
    with jax.enable_x64(True):
        given = [np.asarray(x, np.float64) for x in (q, k, v, dy)]
        expected = with_gradients(lambda q, k, v: plain(q, k, v, segments, 300.0), *given)
    # A score near 3000 has an error of 1e-4 by its own rounding, and its exponential as much.
    check(found, expected, 1e-3)


def test_bfloat16_has_float32_statistics():
    """Inputs, weights and the output are rounded to 8 bits, 2^-9 each; sums are not."""
    segments = documents(512)
    blocks = lambda q, k, v: blockwise_attention(q, k, v, Mask(jnp.asarray(segments)), scale=SCALE)  # noqa: E731
    found = with_gradients(blocks, *arrays("gqa", 512, jnp.bfloat16))
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}
    expected = exact("gqa", 512, segments, jnp.bfloat16)
    check([np.asarray(x, np.float64) for x in found], expected, 2**-7)


def test_a_token_that_sees_itself_alone_gets_its_own_value():
    q, k, v, _ = arrays("mha", 512)
    alone = np.broadcast_to(np.arange(512, dtype=np.int32), (ROWS, 512))
    np.testing.assert_array_equal(blockwise_attention(q, k, v, Mask(jnp.asarray(alone)), scale=SCALE), v)


def test_what_comes_later_changes_nothing():
    q, k, v, _ = arrays("gqa", 600)
    one = jnp.ones((ROWS, 600), jnp.int32)
    run = jax.jit(lambda k, v: blockwise_attention(q, k, v, Mask(one), scale=SCALE))
    before = run(k, v)
    for at in (1, 250, 450):
        later = np.arange(600)[:, None, None] >= at
        np.testing.assert_array_equal(run(np.where(later, 9, k), np.where(later, 9, v))[:, :at], before[:, :at])


# ---- what it holds


@pytest.mark.parametrize("heads", HEADS)
def test_queries_keys_values_the_output_and_one_number_a_query_are_kept(heads):
    seq, (queries, keys, width, of_values) = 512, HEADS[heads]
    q, k, v, _ = arrays(heads, seq)
    blocks = functools.partial(blockwise_attention, mask=Mask(jnp.asarray(documents(seq))), scale=SCALE)
    kept = jax.eval_shape(lambda *x: jax.vjp(blocks, *x)[1], q, k, v)
    entries = sorted(leaf.size for leaf in jax.tree.leaves(kept) if jnp.issubdtype(leaf.dtype, jnp.floating))
    tokens = ROWS * seq
    expected = [queries, queries * width, keys * width, keys * of_values, queries * of_values]
    assert entries == sorted(tokens * each for each in expected)


def test_the_largest_array_is_a_block_of_scores():
    seq = 4 * SIDE
    q, k, v, dy = arrays("gqa", seq)
    segments = jnp.asarray(documents(seq))

    def run(q, k, v):
        y, pull = jax.vjp(lambda *x: blockwise_attention(*x, Mask(segments), scale=SCALE), q, k, v)
        return pull(dy)

    largest = max(var.aval.size for equation in equations(run, q, k, v) for var in equation.outvars)
    assert largest == ROWS * 4 * SIDE**2


def temporaries(seq):
    """Bytes that the compiled forward and backward pass holds besides its operands and results."""
    q, k, v, dy = arrays("gqa", seq)
    segments = jnp.ones((ROWS, seq), jnp.int32)

    def run(q, k, v, dy):
        y, pull = jax.vjp(lambda *x: blockwise_attention(*x, Mask(segments), scale=SCALE), q, k, v)
        return y, pull(dy)

    return jax.jit(run).lower(q, k, v, dy).compile().memory_analysis().temp_size_in_bytes


def test_memory_grows_with_seq_and_not_with_its_square():
    short, middle, long = (temporaries(seq) for seq in (1024, 2048, 4096))
    assert long - middle == pytest.approx(2 * (middle - short), rel=0.05)
    assert long < ROWS * 4 * 4096**2  # a byte a score


def test_only_blocks_that_some_query_sees_are_computed():
    """With n blocks on a side, n (n + 1) / 2 of n * n."""
    q, k, v, _ = arrays("mha", 4 * SIDE)
    run = lambda q: blockwise_attention(q, k, v, Mask(jnp.ones((ROWS, 4 * SIDE), jnp.int32)), scale=SCALE)  # noqa: E731
    assert [e.params["length"] for e in equations(run, q) if e.primitive.name == "scan"] == [4 * 5 // 2]


@pytest.mark.fast(2)
@pytest.mark.parametrize(("seq", "window"), [(521, 300), (1000, 2), (1000, 7), (1000, 1000), (16, 3)])
def test_a_token_sees_its_window_alone(seq, window):
    segments = documents(seq)
    mask = Mask(jnp.asarray(segments), window=window)
    blocks = functools.partial(blockwise_attention, mask=mask, scale=SCALE)
    check(with_gradients(blocks, *arrays("gqa", seq)), exact("gqa", seq, segments, window=window), ERROR)


def test_blocks_behind_the_window_are_skipped():
    """Of 8 blocks on a side, half as long as without a window, each sees itself and the two before."""
    q, k, v, _ = arrays("mha", 4 * SIDE)
    mask = Mask(jnp.ones((ROWS, 4 * SIDE), jnp.int32), window=SIDE)
    run = functools.partial(blockwise_attention, k_BTGJ=k, v_BTGK=v, mask=mask, scale=SCALE)
    assert [e.params["length"] for e in equations(run, q) if e.primitive.name == "scan"] == [8 + 7 + 6]


@pytest.mark.parametrize(("seq", "pairs"), [(521, [3 + 2, 3 + 2 + 1]), (512, [1 + 2, 4 + 3])])
def test_a_window_that_is_data_of_the_layer_is_that_window(seq, pairs):
    """And a branch computes what its window shows alone, in blocks of its own length where a row has whole ones."""
    segments, windows = documents(seq), (100, 0, seq)
    q, k, v, dy = arrays("gqa", seq)

    @jax.jit
    def run(which):
        mask = Mask(jnp.asarray(segments), windows=windows, which=which)
        y, pull = jax.vjp(functools.partial(blockwise_attention, mask=mask, scale=SCALE), q, k, v)
        return y, *pull(dy)

    for which, window in enumerate(windows):
        check(jax.tree.map(np.asarray, run(which)), exact("gqa", seq, segments, window=window), ERROR)
    forward = lambda which: run(which)[0]  # noqa: E731
    scans = [e.params["length"] for e in equations(forward, 0) if e.primitive.name == "scan"][:2]
    assert sorted(scans) == pairs


@pytest.mark.parametrize("tokens", [1, 7, 63, 64, 97, 256, 300, 512, 521, 1024, 1031, 4096, 131072])
def test_blocks_are_of_one_size_and_filled_up_by_few_tokens(tokens):
    size = tokens_of_block(tokens)
    blocks = -(-tokens // size)
    assert size <= SIDE and blocks == -(-tokens // SIDE) and blocks * size - tokens < blocks


# ---- on context ranks


def over_context(form, heads, ranks, seq, tp=1, window=0, order="zigzag"):
    """`attend_over_context` as a function of whole arrays in the order of the text."""
    segments = jnp.asarray(documents(seq))
    mesh = mesh_of(1, 1, tp, 1, ranks)

    def local(q, k, v):
        q, k, v, whole = (as_varying(x) for x in (q, k, v, segments))
        # Of the text's order each rank has its piece; `own_tokens` wants whole rows.
        q, k, v = (own_tokens(jax.lax.all_gather(x, "cp", axis=1, tiled=True), 1, order) for x in (q, k, v))
        context, mask = CONTEXTS[form]._replace(order=order), Mask(whole, window=window, order=order)
        y = attend_over_context(context, q, k, v, mask, keys=SEQ, scale=SCALE, kernel="xla")
        return jax.lax.pmean(to_order(y, 1, order), ("pp", "dp"))

    spec = Layout.parse(activation("heads/tp d_head")).spec(mesh)
    run = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=True)
    return run, segments


OVER_CONTEXT = [("gqa", 4, 64, 1), ("gqa", 2, 1040, 2), ("mla", 2, 600, 1), ("mqa", 4, 128, 1)]
OVER_CONTEXT = [(form, *case) for form in CONTEXTS for case in OVER_CONTEXT]
OVER_CONTEXT += [("all_gather", "mha", 3, 96, 1), ("ring", "mha", 3, 96, 1)]  # 4 heads do not divide over 3 ranks


@pytest.mark.fast(4)
@pytest.mark.parametrize(("form", "heads", "ranks", "seq", "tp"), OVER_CONTEXT, ids=str)
def test_context_ranks_have_values_and_gradients_of_the_plain_form(form, heads, ranks, seq, tp):
    """Of several blocks a chunk, and of less than one."""
    run, segments = over_context(form, heads, ranks, seq, tp)
    check(with_gradients(run, *arrays(heads, seq)), exact(heads, seq, np.asarray(segments)), ERROR)


@pytest.mark.fast(3)
@pytest.mark.parametrize(("seq", "ranks", "window"), [(640, 4, 20), (640, 4, 150), (1028, 2, 300), (640, 4, 2)])
@pytest.mark.parametrize("form", CONTEXTS)
def test_windows_cross_from_rank_to_rank(form, seq, ranks, window):
    """Ranks then see different numbers of blocks; in a ring of four, some none of another rank's. A chunk of 257 tokens
    is padded, and a window does not count the padding."""
    run, segments = over_context(form, "mha", ranks, seq, window=window)
    check(with_gradients(run, *arrays("mha", seq)), exact("mha", seq, np.asarray(segments), window=window), ERROR)


@pytest.mark.fast(2)
@pytest.mark.parametrize("window", [20, 0, 300])
@pytest.mark.parametrize("form", CONTEXTS)
def test_in_contiguous_order_context_ranks_have_the_plain_forms_values(form, window):
    """Of four ranks with 160 tokens. Without a window they see different numbers of blocks."""
    run, segments = over_context(form, "gqa", 4, 640, window=window, order="contiguous")
    check(with_gradients(run, *arrays("gqa", 640)), exact("gqa", 640, np.asarray(segments), window=window), ERROR)


def test_in_a_ring_whose_window_ends_within_a_rank_hops_have_different_numbers_of_blocks(monkeypatch):
    monkeypatch.setitem(LONGEST_SIDE, "cpu", 16)
    run, segments = over_context("ring", "gqa", 8, 512, window=140, order="contiguous")
    check(with_gradients(run, *arrays("gqa", 512)), exact("gqa", 512, np.asarray(segments), window=140), ERROR)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("window", [100, 320, 1088, 2000])
def test_no_hop_of_a_ring_computes_more_blocks_than_a_rank_needs_in_it(order, window):
    """Of four ranks with 512 tokens each."""
    size, own = tokens_of_block(256, window), order_of(4, 2048, order)
    blocks = 0
    for hop in range(4):
        query, key = own[:, :, None], np.roll(own, hop, axis=0)[:, None, :]
        shown = (query >= key) & (query - key < window)
        blocks += shown.reshape(4, 512 // size, size, -1, size).any(axis=(2, 4)).sum(axis=(1, 2)).max()
    assert scores_in_window(2048, 4, window, ring=True, order=order) == size**2 * blocks


@pytest.mark.parametrize(("window", "moves"), [(1, []), (16, [1, 6]), (18, [1, 1, 4, 1]), (40, [1, 1, 1, 2, 1, 1])])
def test_a_ring_leaves_out_ranks_of_which_no_token_sees_any(window, moves):
    """Rank r has chunks r and 15 - r of 16 tokens: the chunk before is that of a neighbour, on either side."""
    run, _ = over_context("ring", "gqa", 8, 256, window=window)
    sent = [e.params["perm"] for e in equations(run, *arrays("gqa", 256)[:3]) if e.primitive.name == "ppermute"]
    distances = [(perm[0][1] - perm[0][0]) % 8 for perm in sent[:-2]]  # the last two bring the result into order
    assert distances == [move for move in moves for _ in "kv"]
    both = lambda q, k, v, dy: jax.vjp(run, q, k, v)[1](dy)  # noqa: E731
    sent = [e for e in equations(both, *arrays("gqa", 256)) if e.primitive.name == "ppermute"]
    # Keys and values twice, their gradients as often and once more, back home; the result and its gradient.
    assert len(sent) - 4 == 2 * (3 * len(moves) + bool(moves))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_compute_as_many_blocks_together_as_one_device_alone(ranks):
    """Of 2 * cp chunks on a side; those of a ring 3 with its own keys, then 2 with those of each other rank."""
    seq, chunks = 16 * ranks, 2 * ranks

    def turns(form):
        run, _ = over_context(form, "gqa", ranks, seq)
        return [e.params["length"] for e in equations(run, *arrays("gqa", seq)[:3]) if e.primitive.name == "scan"]

    assert turns("all_gather") == [chunks * (chunks + 1) // 2 // ranks] == [3 + 2 * (ranks - 1)]
    assert turns("ring") == ([3, 2] if ranks == 2 else [3, ranks - 2, 2, 2])  # a loop over the hops between


@pytest.mark.parametrize(
    ("platform", "sides", "in_windows"),
    [
        ("cpu", [256, 256, 256, 256], [128, 128, 256]),
        ("gpu", [512, 1024, 512, 512], [512, 512, 512]),
        ("tpu", [512, 256, 512, 512], [512, 512, 512]),
    ],
)
def test_a_platform_has_the_blocks_that_are_fast_on_it(platform, sides, in_windows, monkeypatch):
    monkeypatch.setattr(blockwise_module, "platform_traced", lambda: platform)
    assert [tokens_of_block(tokens) for tokens in (512, 1024, 2048, 8192)] == sides
    assert [tokens_of_block(8192, window) for window in (128, 1024, 2048)] == in_windows
