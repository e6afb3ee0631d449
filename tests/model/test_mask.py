"""A mask is one rule: whole, for new tokens after others, and block by block."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.model.mask import Mask, blocks_seen, sees

SEGMENTS = np.array([[1, 1, 2, 2, 2, 2, 2, 0]])


def rule(query, key, window):
    """Whether a token sees another, in words: same document, not later, and not too far back."""
    same = SEGMENTS[0, query] == SEGMENTS[0, key]
    return same and key <= query and (not window or key > query - window)


@pytest.mark.parametrize("window", [0, 1, 3, 8])
def test_a_mask_is_its_rule_entry_by_entry(window):
    found = np.asarray(Mask(jnp.asarray(SEGMENTS), window=window).dense(8))[0, 0]
    expected = [[rule(query, key, window) for key in range(8)] for query in range(8)]
    np.testing.assert_array_equal(found, expected)


@functools.partial(jax.jit, static_argnums=(1, 2))
def rows_from(cursor, queries, window):
    return Mask(jnp.asarray(SEGMENTS), window=window, cursor=cursor).dense(queries)


@pytest.mark.parametrize("cursor", [0, 3, 7])
@pytest.mark.parametrize("window", [0, 3])
def test_new_tokens_have_the_rows_from_their_cursor_on(cursor, window):
    whole = np.asarray(Mask(jnp.asarray(SEGMENTS), window=window).dense(8))
    for queries in range(1, 9 - cursor):
        np.testing.assert_array_equal(rows_from(cursor, queries, window), whole[:, :, cursor : cursor + queries])


@pytest.mark.parametrize("window", [0, 1, 2, 5, 9])
def test_blocks_are_seen_where_one_of_their_tokens_is(window):
    """By place alone: of all pairs of blocks of up to four tokens."""
    blocks = [(first, first + more) for first in range(9) for more in range(4)]
    for queries, keys in itertools.product(blocks, blocks):
        places = (np.arange(first, last + 1) for first, last in (queries, keys))
        seen = sees(*np.meshgrid(*places, indexing="ij"), window)
        assert blocks_seen(queries, keys, window) == (seen.any(), seen.all())
