"""The gradient of the head's table before that of its input: the same arithmetic, in another order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.collective_order import run_in_order
from support.tiny_model import AS_WRITTEN, build, make_batch, params_of

from parallax.config.sections import LossConfig
from parallax.model.loss import chunked_loss_and_grads
from parallax.sharding.layout import Layout

MESHES = {
    "chunks": ((1, 2, 2), dict(attention="gqa", layers=2, microbatches=2)),
    "tied, one chunk, head in ticks": (
        (2, 2, 1),
        dict(attention="gqa", layers=2, tied=True, schedule="one_f_one_b", chunk_tokens=4096),
    ),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", MESHES)
def test_loss_and_gradients_are_bitwise_the_same(name):
    (mesh, changes), results = MESHES[name], []
    for table_first in (False, True):
        model = build(mesh, **changes, table_first=table_first)
        results.append(run_in_order(model.loss_and_grad, params_of(model), make_batch(), options=AS_WRITTEN))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_the_last_chunks_input_gradient_waits_for_the_whole_table_gradient():
    config = LossConfig(chunk_tokens=8, table_first=True)

    def grads(table_VD, hidden_ND):
        labels_N = jnp.zeros(len(hidden_ND), jnp.int32)
        return chunked_loss_and_grads(config, Layout.parse("vocab d_model"), table_VD, hidden_ND, labels_N, 1.0)

    table_VD, hidden_ND = jnp.zeros((64, 4)), jnp.zeros((24, 4))
    equations = jax.make_jaxpr(grads)(table_VD, hidden_ND).eqns
    (barrier,) = [each for each in equations if each.primitive.name == "optimization_barrier"]
    written = {out: each for each in equations for out in each.outvars}
    assert (64, 4) in [out.aval.shape for out in barrier.invars]
    products = [each for each in equations if each.primitive.name == "dot_general"]
    (input_grad,) = [each for each in products if each.outvars[0].aval.shape == (8, 4)]
    assert barrier in [written.get(each) for each in input_grad.invars]


def test_the_layers_backward_pass_waits_for_the_exchange():
    """What the layers read of the head comes out of the barrier that takes the scattered gradient of the table."""
    mesh, changes = MESHES["chunks"]
    model = build(mesh, **changes, table_first=True)
    program = jax.jit(model.loss_and_grad).lower(model.shapes, make_batch()).as_text()
    scatter = program.index("optimization_barrier", program.index("optimization_barrier") + 1)
    assert "reduce_scatter" in program[program.index("optimization_barrier") : scatter]
