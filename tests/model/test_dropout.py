"""Dropout drops its share, and what it drops depends on the place in the whole array alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.tiny_model import HIDDEN_CUT, SEQ_CUT, build, make_batch, mesh_of, model_config, params_of

from parallax.model.dropout import Dropout
from parallax.pipeline.embed_and_head import DROPOUT
from parallax.sharding.layout import Layout

SIZES = model_config().sizes
SHAPE = (8, 16, SIZES["d_model"])


def drop(x, rows, key, *, rate=0.25, site=0, layout=HIDDEN_CUT):
    return Dropout(layout, SIZES, rate, site).apply({}, x, rows, key)


def kept(seed=0, rows=range(8), **changes):
    return np.asarray(drop(jnp.ones(SHAPE), jnp.asarray(rows), jax.random.key(seed), **changes)) != 0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_a_share_is_dropped_and_the_rest_is_scaled(rate):
    y = np.asarray(drop(jnp.ones(SHAPE), jnp.arange(8), jax.random.key(0), rate=rate))
    spread = (rate * (1 - rate) / y.size) ** 0.5
    assert abs((y == 0).mean() - rate) < 4 * spread
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-6)


def test_nothing_is_dropped_without_a_key_or_a_rate():
    x = jnp.ones(SHAPE)
    assert drop(x, jnp.arange(8), None) is x
    assert drop(x, jnp.arange(8), jax.random.key(0), rate=0.0) is x


def test_what_is_dropped_depends_on_step_site_and_row():
    first = kept()
    for other in (kept(seed=1), kept(site=1), kept(rows=range(8, 16))):
        assert 0.3 < (first != other).mean() < 0.45  # independent masks differ in 2 * 0.25 * 0.75 of all places
    np.testing.assert_array_equal(kept(rows=range(4, 12))[:4], first[4:])
    assert len({mask.tobytes() for mask in first}) == len(first)


@pytest.mark.parametrize("layout", [HIDDEN_CUT, SEQ_CUT])
def test_the_mask_is_the_same_however_it_is_cut(layout):
    def local(x, rows, key):
        return drop(x, rows, key, layout=layout)

    spec = Layout.parse(layout).spec()
    run = jax.shard_map(local, mesh=mesh_of(1, 2, 4), in_specs=(spec, P("dp"), P()), out_specs=spec, check_vma=True)
    x, rows, key = jnp.ones(SHAPE), jnp.arange(8), jax.random.key(0)
    np.testing.assert_array_equal(jax.jit(run)(x, rows, key), drop(x, rows, key))


@pytest.mark.parametrize("layout", [HIDDEN_CUT, SEQ_CUT])
def test_the_mask_is_the_same_on_context_ranks(layout):
    """Which hold chunk r and chunk 7 - r of the 8 of a row."""
    chunks = np.arange(SHAPE[1]).reshape(8, -1)
    order = np.concatenate([np.concatenate([chunks[rank], chunks[7 - rank]]) for rank in range(4)])
    mesh = mesh_of(1, 1, 2, 1, 4)
    spec = Layout.parse(layout).spec(mesh)
    local = lambda x, rows, key: drop(x, rows, key, layout=layout)  # noqa: E731
    run = jax.shard_map(local, mesh=mesh, in_specs=(spec, P(), P()), out_specs=spec, check_vma=True)
    arrays = jnp.ones(SHAPE), jnp.arange(8), jax.random.key(0)
    np.testing.assert_array_equal(jax.jit(run)(*arrays), drop(*arrays)[:, order])


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat", ["attention", "stage", *(pytest.param(x, marks=pytest.mark.slow) for x in ("none", "layer"))]
)
def test_recomputing_drops_the_same_again(remat):
    """With dropout the loss is still one function: its gradient along itself says how it rises."""
    model, batch = build((2, 1, 2), dropout=0.2, remat=remat, layers=4), make_batch(rows=8)
    params, noise = params_of(model), np.array([0, 3], np.int32)
    step = jax.jit(lambda params: model.loss_and_grad(params, batch, noise))
    _, grads = step(params)
    norm2 = sum(float(np.square(leaf).sum()) for leaf in jax.tree.leaves(grads))
    # A central difference. Its third-order error falls with the square of the step: 5.6 % at 0.004, 0.4 % at 0.001;
    # rounding the two losses, near 4, to float32 adds 2e-7 / (2 * 0.001 * norm), about 1e-4.
    size = 0.001 / norm2**0.5
    ahead, behind = (
        float(step(jax.tree.map(lambda p, g, s=sign: p + s * size * g, params, grads))[0]["loss"]) for sign in (1, -1)
    )
    assert (ahead - behind) / (2 * size) == pytest.approx(norm2, rel=1e-2)


@pytest.mark.slow
def test_without_noise_the_training_loss_is_that_of_evaluation():
    model, batch = build((1, 1, 1), dropout=0.5, layers=2), make_batch(rows=8)
    params = params_of(model)
    trained, _ = jax.jit(model.loss_and_grad)(params, batch)
    np.testing.assert_allclose(trained["loss"], jax.jit(model.loss)(params, batch)["loss"], rtol=1e-6)


def test_no_layer_draws_the_masks_of_another_or_of_the_embedding():
    """Dropout's keys differ from each other and from those of the initial values, at every step."""
    seed = jax.random.key(0)
    initial = list(jax.random.split(seed, 3))
    layers = list(jax.random.split(initial[1], 4))
    steps = [jax.random.fold_in(jax.random.fold_in(seed, DROPOUT), step) for step in range(4)]
    drawn = [
        jax.random.fold_in(jax.random.fold_in(step, at), site) for step in steps for at in range(5) for site in (0, 1)
    ]
    keys = {tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in [*initial, *layers, *steps, *drawn]}
    assert len(keys) == len(initial) + len(layers) + len(steps) + len(drawn)
