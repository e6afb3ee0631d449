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


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
def test_streams_equal_the_collective_forward_and_backward(form, ranks):
    streamed, plain, is_whole = FORMS[form]
    shape = (1, 1, ranks, 2, 2 * ranks if is_whole else 2, 3)
    pieces = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    (y, dx, _), (y_plain, dx_plain, _) = (on_mesh(function, pieces, (1, 1, ranks)) for function in (streamed, plain))
    np.testing.assert_allclose(y, y_plain, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(dx, dx_plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ranks", "forward", "backward"), [(2, 1, 0), (3, 1, 1), (4, 2, 1), (8, 4, 3)])
def test_tokens_take_the_shorter_direction_around_the_ranks(ranks, forward, backward):
    """A rank sends so many messages to the next rank, and to the one before; of two ranks both are the same one."""

    def moves(function, *, whole):
        local = jax.shard_map(function, mesh=mesh_of(1, 1, ranks), in_specs=P(), out_specs=P(None, "tp"))
        sent = equations(local, np.ones((1, 2 * ranks if whole else 2, 1), np.float32))
        pairs = [one.params["perm"][0] for one in sent if one.primitive.name == "ppermute"]
        return Counter((target - source) % ranks for source, target in pairs)

    there = moves(lambda x: gather_as_streams(GATHER, x).pieces[-1], whole=False)
    back = moves(lambda x: reshard_streams(SUM, as_streams(x)), whole=True)
    assert (there[1], there[ranks - 1]) == ((forward, backward) if ranks > 2 else (1, 1))
    assert (back[ranks - 1], back[1]) == ((forward, backward) if ranks > 2 else (1, 1))
    assert sum(there.values()) == sum(back.values()) == ranks - 1
