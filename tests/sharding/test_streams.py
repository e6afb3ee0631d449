"""Token streams have the tokens of a gather, give the sums of a reduce-scatter, and travel both ways around."""

from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.numpy_collectives import on_mesh
from support.tiny_model import mesh_of
from support.traced_equations import equations

from parallax.sharding.collectives import all_gather, reduce_scatter
from parallax.sharding.streams import as_streams, gather_as_streams, reshard_streams, tokens_in_order

GATHER, SUM = "batch seq/tp d_model -> batch seq d_model", "batch seq d_model +tp -> batch seq/tp d_model"
# A form of streams, the collective that it stands for, and whether it begins with all tokens.
FORMS = {
    "gathered": (lambda x: tokens_in_order(gather_as_streams(GATHER, x)), lambda x: all_gather(GATHER, x), False),
    "added up": (lambda x: reshard_streams(SUM, as_streams(x)), lambda x: reduce_scatter(SUM, x), True),
    "taken apart": (lambda x: tokens_in_order(as_streams(x)), lambda x: x, True),
}


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 2), (3, 2), (4, 3), (4, 1), (5, 1), (8, 3)])
@pytest.mark.parametrize("form", FORMS)
def test_streams_equal_the_collective_forward_and_backward(form, ranks, tokens):
    streamed, plain, is_whole = FORMS[form]
    shape = (1, 1, ranks, 2, tokens * ranks if is_whole else tokens, 3)
    pieces = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    (y, dx, _), (y_plain, dx_plain, _) = (on_mesh(function, pieces, (1, 1, ranks)) for function in (streamed, plain))
    np.testing.assert_allclose(y, y_plain, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(dx, dx_plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ranks", "sent"), [(2, 1), (3, 1), (4, 1.5), (8, 3.5)])
def test_links_of_both_directions_send_the_same_number_of_tokens(ranks, sent):
    """A rank sends so many times its tokens to the next rank, and to the one before; of two ranks both are the same."""

    def moves(function, *, whole):
        tokens = 2 * ranks if whole else 2
        local = jax.shard_map(function, mesh=mesh_of(1, 1, ranks), in_specs=P(), out_specs=P(None, "tp"))
        moved = Counter()
        for one in equations(local, np.ones((1, tokens, 1), np.float32)):
            if one.primitive.name == "ppermute":
                source, target = one.params["perm"][0]
                moved[(target - source) % ranks] += one.outvars[0].aval.shape[1] / 2
        return moved

    there = moves(lambda x: gather_as_streams(GATHER, x).pieces[-1], whole=False)
    back = moves(lambda x: reshard_streams(SUM, as_streams(x)), whole=True)
    assert there == back == {1: sent, ranks - 1: sent}
