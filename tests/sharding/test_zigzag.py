"""The order of tokens on context ranks: none is lost or twice there, causal work is even, the way back is exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.tiny_model import mesh_of

from parallax.sharding.activations import SEQ, activation
from parallax.sharding.layout import Layout
from parallax.sharding.zigzag import CONTIGUOUS, chunks_of, own_tokens, places, reshard_in_order, to_order

RANKS = [2, 3, 4, 8]
TOKENS = 48  # of a row


def zigzag(ranks, tokens=TOKENS):
    """The places in the text of all tokens, rank after rank: two chunks a rank, one from each end."""
    chunks = np.arange(tokens).reshape(2 * ranks, -1)
    return np.concatenate([np.concatenate([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)])


def on_ranks(function, x, before, after, ranks, tp=1):
    """`function` of each rank's piece of `x`, compiled."""
    mesh = mesh_of(1, 1, tp, 1, ranks)
    run = jax.shard_map(function, mesh=mesh, in_specs=before, out_specs=after, check_vma=True)
    return np.asarray(jax.jit(run)(x))


def rows(width=1):
    """Rows of which every entry is another, [2, TOKENS, width]."""
    return np.arange(2 * TOKENS * width, dtype=np.float32).reshape(2, TOKENS, width)


def test_all_chunks_are_on_one_rank_each():
    for ranks in RANKS:
        assert sorted(chunks_of(ranks).reshape(-1)) == list(range(2 * ranks))


@pytest.mark.parametrize("ranks", RANKS)
def test_causal_work_is_even(ranks):
    """Token i sees i + 1 tokens; each rank's see as many together."""
    seen = (zigzag(ranks) + 1).reshape(ranks, -1).sum(axis=1)
    assert set(seen) == {TOKENS * (TOKENS + 1) // 2 // ranks}


@pytest.mark.parametrize("ranks", RANKS)
def test_each_rank_takes_its_own_tokens_and_knows_their_places(ranks):
    order = zigzag(ranks)
    own = on_ranks(lambda x: own_tokens(x, axis=1), rows(), P(), P(None, "cp"), ranks)
    np.testing.assert_array_equal(own, rows()[:, order])
    found = on_ranks(lambda x: places(f"batch {SEQ}", x.shape[1]), rows(), P(None, "cp"), P("cp"), ranks)
    np.testing.assert_array_equal(found, order)


@pytest.mark.parametrize("ranks", [2, 4])
def test_places_are_known_where_tp_cuts_a_ranks_tokens_further(ranks):
    cut = P(None, ("cp", "tp"))
    local = lambda x: places(f"batch {SEQ}/tp d_model", x.shape[1])  # noqa: E731
    found = on_ranks(local, rows(), cut, P(("cp", "tp")), ranks, tp=2)
    np.testing.assert_array_equal(found, zigzag(ranks))
    whole = lambda x: places("batch seq/tp d_model", x.shape[1])  # noqa: E731
    np.testing.assert_array_equal(on_ranks(whole, rows(), P(None, "tp"), P("tp"), ranks, tp=2), np.arange(TOKENS))


@pytest.mark.parametrize("ranks", RANKS)
def test_tokens_that_are_gathered_are_in_order_and_cut_again_in_zigzag(ranks):
    cut, whole = Layout.parse(activation("d_model")), Layout.parse(activation("d_model", seq="seq"))
    mine = rows()[:, zigzag(ranks)]

    def gathered(x):
        return jax.lax.pmean(reshard_in_order(f"{cut} -> {whole}", x), "cp")

    np.testing.assert_array_equal(on_ranks(gathered, mine, P(None, "cp"), P(), ranks), rows())

    def there_and_back(x):
        return reshard_in_order(f"{whole} -> {cut}", reshard_in_order(f"{cut} -> {whole}", x))

    np.testing.assert_array_equal(on_ranks(there_and_back, mine, P(None, "cp"), P(None, "cp"), ranks), mine)


@pytest.mark.parametrize("ranks", RANKS)
def test_heads_change_places_with_tokens_in_order(ranks):
    cut = f"{activation('heads')}"
    by_heads = activation("heads/cp", seq="seq")
    mine, there = rows(24)[:, zigzag(ranks)], lambda x: reshard_in_order(f"{cut} -> {by_heads}", x)
    by_tokens, cut_heads = P(None, "cp"), P(None, None, "cp")
    np.testing.assert_array_equal(on_ranks(there, mine, by_tokens, cut_heads, ranks), rows(24))
    back = lambda x: reshard_in_order(f"{by_heads} -> {cut}", x)  # noqa: E731
    np.testing.assert_array_equal(on_ranks(back, rows(24), cut_heads, by_tokens, ranks), mine)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_order_of_the_text_comes_back(ranks):
    mine = rows(2)[:, zigzag(ranks)]
    found = on_ranks(lambda x: to_order(x, axis=1), mine, P(None, "cp"), P(None, "cp"), ranks)
    np.testing.assert_array_equal(found, rows(2))


@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_go_the_same_way_back(ranks):
    """A move of tokens is a permutation: the gradient of its product with weights has the weights in its place."""
    weights = np.random.default_rng(0).normal(size=(2, TOKENS, 1)).astype(np.float32)

    def gradient(x):
        rank = jax.lax.axis_index("cp")
        own = jax.lax.dynamic_slice_in_dim(jnp.asarray(weights), rank * x.shape[1], x.shape[1], 1)
        return jax.grad(lambda x: jnp.sum(to_order(x, axis=1) * own))(x)

    found = on_ranks(gradient, rows(), P(None, "cp"), P(None, "cp"), ranks)
    np.testing.assert_array_equal(found, weights[:, zigzag(ranks)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_contiguous_order_a_rank_has_a_piece_of_the_text(ranks):
    cut, whole = Layout.parse(activation("d_model")), Layout.parse(activation("d_model", seq="seq"))

    def moved(x):
        mine = own_tokens(x, 1, CONTIGUOUS)
        again = reshard_in_order(
            f"{whole} -> {cut}", reshard_in_order(f"{cut} -> {whole}", mine, CONTIGUOUS), CONTIGUOUS
        )
        return to_order(again, 1, CONTIGUOUS), places(f"batch {SEQ}", mine.shape[1], CONTIGUOUS)

    mesh = mesh_of(1, 1, 1, 1, ranks)
    run = jax.shard_map(moved, mesh=mesh, in_specs=P(), out_specs=(P(None, "cp"), P("cp")), check_vma=True)
    found, places_found = jax.jit(run)(rows())
    np.testing.assert_array_equal(found, rows())
    np.testing.assert_array_equal(places_found, np.arange(TOKENS))


def test_without_context_ranks_nothing_changes():
    x = jnp.asarray(rows())
    assert own_tokens(x, axis=1) is x and to_order(x, axis=1) is x
    np.testing.assert_array_equal(places(f"batch {SEQ}", TOKENS), np.arange(TOKENS))
