"""Losses summed by group of tokens: the same on every mesh, and nothing else of a step changes."""

import jax
import numpy as np
import pytest
from support.tiny_model import build, make_batch, params_of

from parallax.errors import DataError
from parallax.model.batch import IGNORED
from parallax.step.step import first_positions, make_position_step

ROWS, SEQ, GROUPS = 8, 16, 3
SMALL = dict(layers=2, d_model=16, d_ff=16, microbatches=2)
CASES = {
    "one device": ((1, 1, 1), {}),
    "pp·dp·tp": ((2, 2, 2), {"schedule": "one_f_one_b"}),
    "pp·cp·ep": ((2, 1, 1, 1, 2, 2), {}),
    "cp": ((1, 1, 2, 1, 4, 1), {}),
    "head between": ((2, 2, 1), {"schedule": "gpipe"}),
    "zero bubble": ((2, 1, 2), {"schedule": "zero_bubble"}),
}


def batch_of():
    """By row, so that it is known which group a token has after rows and tokens were sent around."""
    batch = make_batch(rows=ROWS, seq=SEQ, seed=1)
    return batch, batch | {"groups": np.broadcast_to(np.arange(ROWS)[:, None] % GROUPS, (ROWS, SEQ)).astype(np.int32)}


@pytest.fixture(scope="module")
def expected():
    """Nats and number of labels of each group, as the loss of a batch without labels of the others has them."""
    (batch, grouped), model = batch_of(), build((1, 1, 1), **SMALL)
    loss, params = jax.jit(model.loss), params_of(model)

    def alone(group):
        labels = np.where(grouped["groups"] == group, batch["labels"], IGNORED).astype(np.int32)
        metrics = loss(params, batch | {"labels": labels})
        return float(metrics["loss"] * metrics["tokens"]), float(metrics["tokens"])

    return np.array([alone(group) for group in range(GROUPS)]).T


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", CASES)
def test_groups_have_the_same_sums_on_every_mesh_and_leave_loss_and_gradients_bitwise(name, expected):
    mesh, changes = CASES[name]
    model = build(mesh, **SMALL, **changes)
    params, (batch, grouped) = params_of(model), batch_of()
    step = jax.jit(model.loss_grads_and_statistics, static_argnums=3)
    metrics, grads, _ = step(params, grouped, None, GROUPS)
    plain, plain_grads, _ = step(params, batch, None)
    assert float(metrics["loss"]) == float(plain["loss"])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), grads, plain_grads)
    np.testing.assert_allclose(metrics["group_losses"][0], expected[0], rtol=1e-5)
    np.testing.assert_array_equal(metrics["group_tokens"], expected[1])


def test_groups_that_a_batch_does_not_have_are_refused():
    model, (batch, grouped) = build((1, 1, 1), **SMALL), batch_of()
    params = params_of(model)
    with pytest.raises(DataError, match="groups=3, but the batch has no array 'groups'"):
        model.loss(params, batch, 3)
    with pytest.raises(DataError, match="groups of the batch has 2, but groups=2; use 0 to 1"):
        model.loss(params, grouped, 2)


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", CASES)
def test_positions_are_those_in_the_text_on_every_mesh(name):
    mesh, changes = CASES[name]
    model = build(mesh, **SMALL, **changes)
    batch = make_batch(rows=ROWS, seq=SEQ, seed=1)
    metrics = make_position_step(model)(params_of(model), batch)
    lasts = [*first_positions(SEQ)[1:], SEQ]
    columns = [slice(first, last) for first, last in zip(first_positions(SEQ), lasts)]
    counts = [(batch["labels"][:, part] != IGNORED).sum() for part in columns]
    np.testing.assert_array_equal(metrics["group_tokens"], counts)
    whole = metrics["group_losses"][0].sum() / metrics["group_tokens"].sum()
    np.testing.assert_allclose(whole, metrics["loss"], rtol=1e-6)
