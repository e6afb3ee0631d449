"""What stages checkpoint_name, how often weights are gathered, and laws of the executor that hold for any batch."""

import functools
import types
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from support.plain_model import plain_losses
from support.tiny_model import SEQ_CUT, build, make_batch, params_of
from support.traced_equations import equations, inside, sent

from parallax.analysis.traced.memory import tick_state
from parallax.config.sections import REMAT, FsdpConfig, PipelineConfig
from parallax.errors import ConfigError
from parallax.model.batch import BATCH_ARRAYS
from parallax.pipeline import loss_and_grads
from parallax.pipeline.layer_passes import SaveAll, layer_passes
from parallax.pipeline.layer_runs import LayerRun, Repeat
from parallax.pipeline.layer_weights import LayerWeights
from parallax.pipeline.stage import Layers, Pass, SaveLayers, SaveNothing, SaveStageInput, weight_gradients
from parallax.sharding.message_order import Accelerators

LAYERS, WIDTH = 3, 4


class ToyLayer:
    """A block of two products, as a stage applies it."""

    def apply(self, weights, x, context):
        weights = weights["params"]
        up = checkpoint_name(x @ weights["up"], "ffn")
        return x * weights["scale"][None] + jnp.tanh(up) @ weights["down"]


class ToyModel:
    """As much of a ShardedModel as a stage looks at: LAYERS places, of which the first `layers` have one."""

    devices, pipeline, config, carries_residuals = Accelerators(), PipelineConfig(), None, True
    parts = types.SimpleNamespace(blocks={"toy": None})

    def __init__(self, layers, prefetch):
        self.stage_layers = LAYERS
        self.repeats = [Repeat(1, (LayerRun((0,), 0, LAYERS, layers < LAYERS, 0),))]
        self.arrangement, self.orders, self.plan, self.fsdp = (
            self,
            {"blocks": self},
            self,
            FsdpConfig(prefetch=prefetch),
        )

    def use(self, weights, stack):
        return weights

    def prefetches(self, run):
        return self.fsdp.prefetch > 0 and run.can_prefetch

    trained_of = use

    def add_up(self, stack, totals, place, grads, layer, key):
        return {name: x if grads[name] is None else x.at[place].add(grads[name]) for name, x in totals.items()}


def passes_of(remat, split, weights, x):
    one = {"params": jax.tree.map(lambda w: w[0], weights)}
    given = dict(weights=one, x=x, context=NoDropout(), plan=ToyModel(LAYERS, 0), stack="blocks")
    return layer_passes(ToyLayer(), remat, split=split, **given)


def toy_stage(remat, weights, x, *, split=False, layers=LAYERS, prefetch=0):
    """What a stage of toy layers saves, empty pools of two slots each, and a pass in the second of them."""
    numbers = jnp.where(jnp.arange(LAYERS) < layers, jnp.arange(LAYERS), -1)
    passes = [passes_of(remat, split, weights, x)]
    model = ToyModel(layers, prefetch)
    here = Layers(model, passes, LayerWeights.of_step(model, [weights], trains=True), [numbers], None)
    saves = SaveStageInput() if remat == "stage" else SaveLayers()
    pools = ("F to B", "F to W", "B to W") if split else ("F to B",)
    empty = saves.empty(here, x, dict.fromkeys(pools, 2))
    return saves, empty, Pass(here, NoDropout(), 0, dict.fromkeys(pools, (1,)))


class NoDropout:
    """As much of a context as a stage looks at."""

    key = None

    def of_layer(self, config, number):
        return self

    def of_kind(self, model, kind):
        return self


jax.tree_util.register_static(NoDropout)


def toy():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    weights = {
        "down": normal(LAYERS, WIDTH, WIDTH),
        "scale": normal(LAYERS, WIDTH),
        "up": normal(LAYERS, WIDTH, WIDTH),
    }
    return weights, normal(2, WIDTH), normal(2, WIDTH)


def plain_passes(weights, x, dy, layers):
    """Output and gradients of the layers one after the other."""

    def plain(weights, x):
        for layer in range(layers):
            x = ToyLayer().apply({"params": {name: stacked[layer] for name, stacked in weights.items()}}, x, None)
        return x

    y, pull = jax.vjp(plain, weights, x)
    return y, *pull(dy)


@pytest.mark.fast(3)
@pytest.mark.parametrize("layers", [LAYERS, LAYERS - 1])
@pytest.mark.parametrize("split", [False, True], ids=["BW together", "BW apart"])
@pytest.mark.parametrize(
    ("remat", "prefetch"), [*((remat, 0) for remat in REMAT), ("none", 1), ("attention", 1), ("stage", 1)]
)
def test_a_stage_pass_by_pass_has_the_gradient_of_its_layers(remat, prefetch, split, layers):
    weights, x, dy = toy()
    saves, residuals, this = toy_stage(remat, weights, x, split=split, layers=layers, prefetch=prefetch)
    y, (residuals, gathered) = saves.forward(this, x, residuals)
    back = this._replace(gathered=gathered)
    dx, residuals, grads = saves.backward(back, dy, residuals, [jax.tree.map(jnp.ones_like, weights)])
    if split:
        grads = weight_gradients(this._replace(context=None), residuals, grads)
    expected_y, expected_grads, expected_dx = plain_passes(weights, x, dy, layers)
    # Of the largest entry, as everywhere: small entries are what is left of large terms. On one CPU, with 3 layers, an
    # entry of 0.045 among those up to 6 is 1.3e-6 off, which is 2e-7 of the largest.
    np.testing.assert_allclose(y, expected_y, rtol=0, atol=1e-6 * np.abs(expected_y).max())
    again, *_ = SaveNothing().forward(this, x, None)
    np.testing.assert_allclose(again, y, rtol=0, atol=1e-6 * np.abs(y).max())
    # Beside float64 on jax 0.12, with 3 layers, the plain passes are 2.5e-7 of it off, and those that make some again
    # 7.3e-7.
    np.testing.assert_allclose(dx, expected_dx, rtol=0, atol=1e-5 * np.abs(expected_dx).max())
    for grad, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(grad, expected + 1, rtol=1e-5, atol=1e-5)


def test_what_is_kept_is_what_remat_says():
    weights, x, _ = toy()
    shapes = {}
    for remat in REMAT:
        saves, residuals, this = toy_stage(remat, weights, x)
        _, (residuals, _) = saves.forward(this, x, residuals)
        (kept,) = residuals["F to B"]
        shapes[remat] = [leaf.shape for leaf in kept]
        if remat != "none":
            np.testing.assert_array_equal(kept[0][1].reshape(-1, *x.shape)[0], x)
            np.testing.assert_array_equal(kept[0][0], 0)
    assert shapes["stage"] == [(2, *x.shape)] and shapes["layer"] == [(2, LAYERS, *x.shape)]
    # Activations of the layer alone, and the scale as it was reshaped: weights are at hand again in the backward pass.
    assert shapes["attention"] == shapes["elementwise"] == [(2, LAYERS, *x.shape)] * 2  # the input and the product
    assert set(shapes["none"]) == {(2, LAYERS, *x.shape), (2, LAYERS, 1, WIDTH)} and len(shapes["none"]) >= 2


def test_w_reads_only_inputs_and_cotangents_of_matrix_products():
    """Not divided, the backward pass keeps all it reads until it has run; divided, B frees what W does not need."""
    weights, x, _ = toy()
    whole, halves = (passes_of("none", split, weights, x) for split in (False, True))
    pools = halves.saved
    assert len(pools["F to B"]) + len(pools["F to W"]) == len(whole.saved["F to B"]) and len(pools["F to B"]) > 0
    assert len(pools["F to W"]) == 2, "the inputs of up and of down"
    assert len(pools["B to W"]) == 2, "the gradients of their outputs"
    assert set(halves.halves.deferred) == {0, 2}, "down and up; the gradient of the scale takes no product"


def test_b_and_w_do_the_work_of_the_backward_pass_once():
    weights, x, dy = toy()
    one, context = {"params": jax.tree.map(lambda w: w[0], weights)}, NoDropout()
    whole, halves = (passes_of("none", split, weights, x) for split in (False, True))
    all_saved, saved = (passes.forward(one, x, context)[1] for passes in (whole, halves))
    for_w = {"F to W": saved["F to W"]} | halves.backward(one, context, saved, dy)[2]
    products = lambda f, *args: sum(e.primitive.name == "dot_general" for e in equations(f, *args))  # noqa: E731
    assert products(lambda saved, dy: halves.backward(one, context, saved, dy), saved, dy) == 2
    assert products(halves.weight_gradients, for_w) == 2
    assert products(lambda saved, dy: whole.backward(one, context, saved, dy), all_saved, dy) == 4


class Factor(NamedTuple):
    """A context that has one array."""

    factor: jax.Array
    key: None = None


def test_a_layer_saves_neither_weights_nor_context():
    class TimesContext(ToyLayer):
        def apply(self, weights, x, context):
            return super().apply(weights, x, None) * context.factor

    weights, x, dy = toy()
    one, factor = {"params": jax.tree.map(lambda w: w[0], weights)}, jnp.full((2, WIDTH), 3.0)
    context = Factor(factor)
    given = dict(weights=one, x=x, context=context, plan=ToyModel(LAYERS, 0), stack="blocks")
    passes = layer_passes(TimesContext(), "none", split=False, **given)
    assert isinstance(passes, SaveAll)
    _, saved = passes.forward(one, x, context)
    assert not any(leaf is known for leaf in saved["F to B"] for known in (*one["params"].values(), factor))
    expected = jax.vjp(lambda w, x: ToyLayer().apply(w, x, None) * factor, one, x)[1](dy)
    dx, dw, _ = passes.backward(one, context, saved, dy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ({"params": dw}, dx), expected)


@pytest.mark.slow
def test_gathering_once_a_step_keeps_fsdp_out_of_the_ticks():
    """The data axis's collectives inside loops run for every microbatch; those outside once."""
    batch = make_batch()

    def inside_loops(policy):
        model, found = build((2, 2, 1), policy=policy), Counter()
        for loop in equations(model.loss_and_grad, model.shapes, batch):
            if loop.primitive.name == "scan":
                found.update(sent(inside(loop.params["jaxpr"])))
        return found

    assert inside_loops("zero1").keys().isdisjoint({"all_gather dp", "reduce_scatter dp"})
    assert inside_loops("zero3").keys() >= {"all_gather dp", "reduce_scatter dp"}


@functools.cache
def four_microbatches(mesh):
    """A model, its compiled step, and parameters."""
    model = build(mesh, microbatches=4)
    return model, jax.jit(model.loss_and_grad), params_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (4, 1, 2)], ids=str)
def test_the_order_of_microbatches_does_not_matter(mesh):
    (_, step, params), batch = four_microbatches(mesh), make_batch(rows=16)
    turned = {name: np.roll(array, 4, axis=0) for name, array in batch.items()}  # by one microbatch of 4 rows
    (metrics, grads), (other_metrics, other_grads) = step(params, batch), step(params, turned)
    np.testing.assert_allclose(other_metrics["loss"], metrics["loss"], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), other_grads, grads)


@pytest.mark.slow
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


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2), (4, 1, 2)], ids=str)
def test_the_forward_pass_alone_has_the_same_loss(mesh):
    (model, step, params), batch = four_microbatches(mesh), make_batch(rows=16)
    loss, _ = step(params, batch)
    np.testing.assert_allclose(jax.jit(model.loss)(params, batch)["loss"], loss["loss"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "rows", "changes"),
    [
        ((4, 1, 1), 6, dict(schedule="one_f_one_b", microbatches=3)),
        ((4, 1, 2), 1, dict(schedule="interleaved", virtual=2, microbatches=1, residual=SEQ_CUT)),
    ],
    ids=str,
)
def test_rows_that_are_too_few_for_all_ranks_are_shared_in_pieces(mesh, rows, changes):
    model, batch = build(mesh, **changes), make_batch(rows=rows)
    params = params_of(model)
    plain = jax.jit(lambda params: plain_losses(model.config, params, batch, 0.0)[0])
    expected = plain(params_of(build((1, 1, 1))))
    np.testing.assert_allclose(jax.jit(model.loss)(params, batch)["loss"], expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(model.loss_and_grad)(params, batch)[0]["loss"], expected, rtol=1e-6)
    with pytest.raises(ConfigError, match=f"data.global_batch={rows} does not divide over mesh.dp=1 x mesh.pp=4"):
        model.logits(params, batch["tokens"])


def test_evaluation_holds_as_much_however_many_microbatches_there_are():
    def temporaries(microbatches):
        model = build((4, 1, 1), schedule="one_f_one_b", microbatches=microbatches)
        batch = make_batch(rows=4 * microbatches)
        shapes = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), model.shapes, model.shardings
        )
        return jax.jit(model.loss).lower(shapes, batch).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(16) < 1.25 * temporaries(4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("schedule", "gpip", "pipeline.schedule='gpip' is unknown; did you mean 'gpipe'?"),
        (
            "remat",
            "layers",
            "pipeline.remat='layers' is unknown; did you mean 'layer'? Known: none, layer, stage, "
            "qkv, elementwise, attention, ",
        ),
        ("microbatches", 0, "pipeline.microbatches=0 must be a whole number of 1 or more."),
        ("microbatches", 2.0, "pipeline.microbatches=2.0 is a number, but it must be a whole number"),
        ("virtual", 0, "pipeline.virtual=0 must be a whole number of 1 or more."),
        (
            "virtual",
            2,
            "pipeline.virtual=2 does nothing with pipeline.schedule='gpipe'; use virtual=1, or schedule='int",
        ),
    ],
)
def test_wrong_settings_are_refused(field, value, message):
    fields = dict(schedule="gpipe", virtual=1, microbatches=4, remat="layer") | {field: value}
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


def test_the_layers_of_a_model_are_traced_once_for_each_shape(monkeypatch):
    traced = []

    def counted(*args, **named):
        traced.append(named["stack"])
        return layer_passes(*args, **named)

    monkeypatch.setattr(loss_and_grads, "layer_passes", counted)
    model = build((1, 1, 1), remat="layer", attention="gqa", layers=1)

    def lowered():
        batch = {name: jax.ShapeDtypeStruct((16, 16), jnp.int32) for name in BATCH_ARRAYS}
        return jax.jit(lambda *given: model.loss_and_grad(*given)).lower(model.shapes, batch).as_text()

    tick_state(model, 16, 16)
    after_another_trace = lowered()
    assert len(traced) == 1
    tick_state(model, 32, 16)
    assert len(traced) == 2
    loss_and_grads._passes_of_shapes.cache_clear()
    assert lowered() == after_another_trace
    assert len(traced) == 3
