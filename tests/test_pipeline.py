"""What stages keep, how often weights are gathered, and laws of the executor that hold for any batch."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations, inside, sent
from tiny import build, make_batch, params_of

from parallax.errors import ConfigError
from parallax.pipeline import PipelineConfig, Stage
from parallax.pipeline.saved import SplitVjp

LAYERS, WIDTH = 3, 4


def toy_layer(weights, x, context):
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def toy_stage(remat):
    return Stage(toy_layer, lambda weights: weights, lambda grads: grads, remat)


class NoDropout:
    """As much of a context as a stage looks at."""

    key = None


jax.tree_util.register_static(NoDropout)


def toy():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return (
        {"up": normal(LAYERS, WIDTH, WIDTH), "down": normal(LAYERS, WIDTH, WIDTH)},
        normal(2, WIDTH),
        normal(2, WIDTH),
    )


@pytest.mark.parametrize("remat", ["none", "layer", "stage"])
def test_a_stage_split_in_two_has_the_gradient_of_its_layers(remat):
    weights, x, dy = toy()
    stage, earlier = toy_stage(remat), jax.tree.map(jnp.ones_like, weights)
    y, kept = stage.forward(weights, x, NoDropout())
    dx, grads = stage.backward(weights, kept, NoDropout(), dy, earlier)

    def plain(weights, x):
        for layer in range(LAYERS):
            x = toy_layer({name: stacked[layer] for name, stacked in weights.items()}, x, None)
        return x

    expected_y, pull = jax.vjp(plain, weights, x)
    expected_grads, expected_dx = pull(dy)
    np.testing.assert_allclose(y, expected_y, rtol=1e-5)
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e + 1, rtol=1e-5, atol=1e-5), grads, expected_grads)


def test_what_is_kept_is_what_remat_says():
    weights, x, _ = toy()
    kept = {remat: toy_stage(remat).forward(weights, x, NoDropout())[1] for remat in ("none", "layer", "stage")}
    np.testing.assert_array_equal(kept["stage"], x)
    assert kept["layer"].shape == (LAYERS, *x.shape)
    np.testing.assert_array_equal(kept["layer"][0], x)
    # Activations of the layer alone: its weights are at hand again in the backward pass.
    shapes = [leaf.shape for leaf in jax.tree.leaves(kept["none"])]
    assert all(shape == (LAYERS, *x.shape) for shape in shapes) and len(shapes) >= 2


def test_a_split_layer_saves_neither_weights_nor_context():
    weights, x, dy = toy()
    one = jax.tree.map(lambda w: w[0], weights)
    split = SplitVjp(lambda weights, x, context: toy_layer(weights, x, None) * context)
    context = jnp.full((2, WIDTH), 3.0)
    y, saved = split.forward(one, x, context)
    assert not any(leaf is known for leaf in saved for known in (*one.values(), context))
    expected = jax.vjp(lambda w, x: toy_layer(w, x, None) * context, one, x)[1](dy)
    found = split.backward(one, saved, context, dy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_gathering_once_a_step_keeps_fsdp_out_of_the_ticks():
    """The data axis's collectives inside loops run for every microbatch; those outside once."""
    batch = make_batch()

    def inside_loops(gather):
        model, found = build((2, 2, 1), gather=gather), Counter()
        for loop in equations(model.loss_and_grad, model.shapes, batch):
            if loop.primitive.name == "scan":
                found.update(sent(inside(loop.params["jaxpr"])))
        return found

    assert inside_loops("step").keys().isdisjoint({"all_gather dp", "reduce_scatter dp"})
    assert inside_loops("microbatch").keys() >= {"all_gather dp", "reduce_scatter dp"}


@pytest.mark.parametrize("mesh", [(1, 1, 1), (4, 1, 2)], ids=str)
def test_the_order_of_microbatches_does_not_matter(mesh):
    model, batch = build(mesh, microbatches=4), make_batch(rows=16)
    step, params = jax.jit(model.loss_and_grad), params_of(model)
    turned = {name: np.roll(array, 4, axis=0) for name, array in batch.items()}  # by one microbatch of 4 rows
    (metrics, grads), (other_metrics, other_grads) = step(params, batch), step(params, turned)
    np.testing.assert_allclose(other_metrics["loss"], metrics["loss"], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), other_grads, grads)


def test_gradients_of_two_batches_add_up():
    """Accumulation is a sum: the gradient of a batch is that of its halves, weighed by their labels."""
    batch = make_batch(rows=16)
    halves = [{name: array[half] for name, array in batch.items()} for half in (slice(8), slice(8, 16))]
    model = build((2, 1, 1), microbatches=4)
    params, step = params_of(model), jax.jit(model.loss_and_grad)
    metrics, grads = step(params, batch)
    parts = [step(params, half) for half in halves]
    shares = [part[0]["tokens"] / metrics["tokens"] for part in parts]
    summed = jax.tree.map(lambda a, b: shares[0] * a + shares[1] * b, parts[0][1], parts[1][1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), summed, grads)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2), (4, 1, 2)], ids=str)
def test_the_forward_pass_alone_has_the_same_loss(mesh):
    model, batch = build(mesh), make_batch()
    params = params_of(model)
    loss, _ = jax.jit(model.loss_and_grad)(params, batch)
    np.testing.assert_allclose(jax.jit(model.loss)(params, batch)["loss"], loss["loss"], rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("schedule", "gpip", "pipeline.schedule='gpip' is unknown; did you mean 'gpipe'?"),
        ("remat", "layers", "pipeline.remat='layers' is unknown; did you mean 'layer'? Known: none, layer, stage"),
        ("gather", "batch", "pipeline.gather='batch' is unknown; "),
        ("microbatches", 0, "pipeline.microbatches=0 must be a whole number of 1 or more."),
        ("microbatches", 2.0, "pipeline.microbatches=2.0 must be a whole number"),
    ],
)
def test_wrong_settings_are_refused(field, value, message):
    fields = dict(schedule="gpipe", microbatches=4, remat="layer", gather="step") | {field: value}
    with pytest.raises(ConfigError) as caught:
        PipelineConfig(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "rows", "seq", "message"),
    [
        (
            (1, 2, 1),
            12,
            16,
            "data.global_batch=12 does not divide over mesh.dp=2 x pipeline.microbatches=4; use a",
        ),
        ((8, 1, 1), 12, 16, "data.global_batch=12 does not divide over mesh.dp=1 x mesh.pp=8, which share embedding"),
        ((1, 1, 8), 16, 12, "data.seq=12 does not divide over mesh.tp=8; use a multiple of 8."),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_before_compiling(mesh, rows, seq, message):
    model = build(mesh)
    with pytest.raises(ConfigError) as caught:
        model.loss_and_grad(model.shapes, make_batch(rows=rows, seq=seq))
    assert message in str(caught.value)
