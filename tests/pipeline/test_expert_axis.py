"""Expert ranks are data ranks of a dense model: loss, gradients and updates are those of the plain model."""

import jax
import numpy as np
import pytest
from support.tiny_model import build, make_batch, params_of
from test_parity import check_parity

from parallax.config.sections import POLICY_NAMES
from parallax.errors import ConfigError

# Expert ranks alone, and beside each other axis; on one mesh with each policy.
BESIDE = {
    (1, 1, 1, 1, 1, 2): dict(policy="ddp"),
    (1, 1, 2, 1, 1, 4): dict(policy="zero2", tensor_parallel="scatter", embedding="all_to_all"),
    (2, 1, 1, 1, 1, 4): dict(policy="lean", schedule="interleaved", virtual=2),
    (1, 1, 1, 1, 4, 2): dict(context="ring", reduce="compute"),
    (1, 1, 1, 2, 1, 4): dict(policy="zero1"),
}
ALL = (1, 2, 2, 1, 1, 2)


def check(mesh, record_property, **how):
    check_parity(dict(mesh=mesh, attention="gqa", tied=False) | how, record_property)


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", BESIDE, ids=str)
def test_expert_ranks_beside_each_axis_give_the_plain_models_gradients(mesh, record_property):
    check(mesh, record_property, **BESIDE[mesh])


@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=[] if name == "zero3" else pytest.mark.slow) for name in POLICY_NAMES]
)
def test_each_policy_over_data_and_expert_ranks_gives_the_plain_models_gradients(policy, record_property):
    check(ALL, record_property, policy=policy)


@pytest.mark.slow
def test_the_same_devices_along_dp_give_the_same_bits():
    found = []
    for mesh in (ALL, (1, 4, 2)):
        model = build(mesh, attention="gqa", tied=False)
        found.append(jax.tree.map(np.asarray, jax.jit(model.loss_and_grad)(params_of(model), make_batch())))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_rows_that_expert_ranks_do_not_divide_are_refused():
    model = build((1, 2, 1, 1, 1, 4), microbatches=1)
    with pytest.raises(ConfigError, match=r"data.global_batch=12 does not divide over mesh.dp=2 x mesh.ep=4 x pipe"):
        model.loss_and_grad(model.shapes, make_batch(rows=12))
