"""Tests' initial values, which NumPy draws, are distributed as those of `init`."""

import jax
import numpy as np
import pytest
from support.tiny_model import build, initial

from parallax.sharding.layout import named_leaves

NORMS = dict(norm_scale="one_plus", norm_bias=True, qk_norm=True)
EXPERTS = dict(layers_of="dense moe*3", experts=4, experts_per_token=2, d_expert=16, shared_experts=1, shared_gate=True)
OF_KINDS = "near=(sliding_window=4, heads=4) far=(d_head=16, d_ff=96)"
CONFIGS = {
    "mla": dict(layers=4, attention="mla", d_latent_q=16, vocab=61, tied=False, router_shift=True) | EXPERTS,
    "gqa": dict(layers=8, attention="gqa", qkv_bias=True, out_bias=True) | NORMS,
    "zeros": dict(layers=8, attention="gqa", sinks=True, qk_norm=True, qk_norm_scale="one_plus", init_out="zeros"),
    "kinds": dict(layers=4, attention="gqa", layers_of="(near far)*2", kinds=OF_KINDS),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_values_are_distributed_as_init_draws_them(name):
    model = build((1, 1, 1), **CONFIGS[name])
    found, drawn = (named_leaves(jax.tree.map(np.asarray, tree)) for tree in (initial(model.config), model.init(0)))
    assert found.keys() == drawn.keys()
    for path, expected in drawn.items():
        assert (found[path].shape, found[path].dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(found[path] == 0, expected == 0, err_msg=path)
        if expected.std() == 0:
            np.testing.assert_array_equal(found[path], expected, err_msg=path)
        else:  # as close as two samples of so many numbers are
            error, deviation = 5 * expected[expected != 0].size ** -0.5, float(expected.std())
            assert found[path].std() == pytest.approx(deviation, rel=error), path
            assert found[path].mean() == pytest.approx(float(expected.mean()), abs=2 * error * deviation), path
