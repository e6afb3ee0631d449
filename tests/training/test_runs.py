"""Initial values, training runs and programs: the same on every mesh, and for any number of microbatches and layers."""

import functools
import itertools

import jax
import numpy as np
import pytest
from support import user_parts
from support.tiny_model import (
    HIDDEN_CUT,
    MESHES,
    SEQ_CUT,
    build,
    make_batch,
    mesh_of,
    model_config,
    optimizer_config,
    params_of,
    settings_of,
)
from support.traced_equations import equations

from parallax.config.settings import with_code
from parallax.errors import ConfigError
from parallax.sharding.layout import named_leaves
from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainStep, init_state, make_eval_step, model_of

RUN_ERROR = 1e-4  # of losses in 20 steps: what differs in the last place is multiplied by Adam, step for step


@functools.cache
def initial(mesh, **changes):
    return jax.tree.map(np.asarray, build(mesh, **changes).init(3))


MLA, GQA = dict(attention="mla", tied=True), dict(attention="gqa", tied=False)
# Each mesh with one of the two, and (2, 2, 2) with both.
SLOW = [case for case in zip(MESHES[1:], itertools.cycle([MLA, GQA])) if case[0] != (2, 2, 2)]


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow if case in SLOW else ())
            for case in itertools.product(MESHES[1:], [MLA, GQA])
        ),
        ((1, 2, 1, 1, 4), MLA),
        pytest.param((2, 1, 1, 1, 4), GQA, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_initial_values_are_bitwise_the_same_on_every_mesh(mesh, changes):
    jax.tree.map(np.testing.assert_array_equal, initial(mesh, **changes), initial((1, 1, 1), **changes))


def test_initial_values_do_not_depend_on_the_layout():
    other = dict(residual=SEQ_CUT, tensor_parallel="scatter", embedding="all_to_all")
    jax.tree.map(np.testing.assert_array_equal, initial((2, 2, 2), **other), initial((1, 1, 1)))


BACK = ("attention/out/kernel", "mlp/down/kernel", "mlp/experts/down", "mlp/shared/down/kernel")
MIXED = dict(layers_of="(dense moe)*4", experts=4, shared_experts=1, d_expert=8)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("changes", "code", "mesh"),
    [
        (MLA | MIXED, {}, (2, 2, 2)),
        (GQA, {"model.mlp": user_parts.SquaredMLP, "model.dense": user_parts.LoRA}, (1, 1, 1)),
    ],
    ids=["mla, experts", "an MLP of one's own, LoRA"],
)
def test_projections_back_to_the_residual_stream_may_begin_at_zero(changes, code, mesh):
    """On every mesh, with all other values as they were."""

    def initial_of(mesh, init_out):
        settings = with_code(settings_of(init_out=init_out, **changes), code)
        return named_leaves(model_of(settings, mesh_of(*mesh)).init(3))

    scaled, zeros = initial_of((1, 1, 1), "scaled"), initial_of(mesh, "zeros")
    back = {name for name in scaled if name.endswith(BACK)}
    assert all(
        not np.any(values) if name in back else np.array_equal(values, scaled[name]) for name, values in zeros.items()
    )
    assert all(np.any(scaled[name]) for name in back) and len(back) == (5 if "layers_of" in changes else 2)


def test_a_layer_whose_projections_begin_at_zero_is_the_identity_and_learns():
    """So the number of layers does not change the first loss, and the zeros themselves have gradients."""
    few, many = (build((1, 1, 1), **GQA, layers=layers, init_out="zeros") for layers in (4, 8))
    loss, gradients = jax.jit(many.loss_and_grad)(many.init(3), make_batch())
    assert loss["loss"] == pytest.approx(float(jax.jit(few.loss)(few.init(3), make_batch())["loss"]), rel=1e-6)
    for name, gradient in named_leaves(gradients).items():
        begins = name.endswith(BACK) or not name.startswith("blocks")
        assert np.any(gradient) == begins, name


def test_projections_that_begin_at_zero_have_no_scales_for_products_in_8_bits():
    with pytest.raises(ConfigError, match="model.init_out='zeros' gives model.matmul='float8' no first scales"):
        model_config(init_out="zeros", matmul="float8")


def test_another_seed_gives_other_values():
    model = build((1, 1, 1))
    first, second = (model.init(seed)["embedding"]["table"] for seed in (0, 1))
    assert not np.array_equal(first, second)


def losses_of_run(mesh, steps, **changes):
    """Losses of a run from initial values over four batches in turn, each of 16 rows."""
    model = build(mesh, **changes)
    tx = make_optimizer(optimizer_config(learning_rate=3e-3, warmup_steps=2), 20, model.plan.rows)
    state, step = init_state(model, tx, seed=0), TrainStep(model, tx, seed=0)
    losses = []
    for number in range(steps):
        state, metrics = step(state, jax.device_put(make_batch(rows=16, seed=number % 4), model.batch_sharding))
        losses.append(float(metrics["loss"]))
    assert int(state.step) == steps
    return losses


@functools.cache
def losses_on_one_device(steps, **changes):
    return losses_of_run((1, 1, 1), steps, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("residual", [HIDDEN_CUT, pytest.param(SEQ_CUT, marks=pytest.mark.slow)])
def test_twenty_steps_have_the_same_losses_on_one_device_and_on_eight(residual):
    losses = losses_on_one_device(20)
    np.testing.assert_allclose(losses_of_run((2, 2, 2), 20, residual=residual), losses, rtol=0, atol=RUN_ERROR)
    assert losses[-1] < losses[0] - 0.1  # random tokens: there is little to learn, but something is


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ((2, 2, 2), {"residual": HIDDEN_CUT}),
        pytest.param((1, 2, 4), {"residual": SEQ_CUT, "embedding": "all_to_all"}, marks=pytest.mark.slow),
        ((1, 1, 2, 1, 4), {"residual": SEQ_CUT}),
    ],
)
def test_dropout_does_not_depend_on_the_mesh(mesh, changes):
    losses = losses_on_one_device(3, dropout=0.1)
    np.testing.assert_allclose(losses_of_run(mesh, 3, dropout=0.1, **changes), losses, rtol=0, atol=RUN_ERROR)
    assert abs(losses[0] - losses_on_one_device(20)[0]) > 1e-3


@pytest.mark.slow
def test_dropout_differs_from_step_to_step_and_is_off_in_evaluation():
    model, batch = build((1, 1, 1), dropout=0.5), make_batch(rows=16)
    params = model.init(0)
    grad = jax.jit(lambda noise: model.loss_and_grad(params, batch, noise)[0]["loss"])
    first, again, second = (float(grad(np.array([0, step], np.int32))) for step in (0, 0, 1))
    assert first == again != second
    plain = build((1, 1, 1), dropout=0.0)
    expected = make_eval_step(plain)(params, batch)["loss"]
    np.testing.assert_allclose(make_eval_step(model)(params, batch)["loss"], expected, rtol=1e-6)


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 2)], ids=str)
def test_the_program_does_not_grow_with_microbatches_or_layers(mesh):
    def size(**changes):
        # Chunks of the loss that divide the tokens of every microbatch: else one more equation pads them.
        model = build(mesh, chunk_tokens=32, **changes)
        return sum(1 for _ in equations(model.loss_and_grad, model.shapes, make_batch()))

    assert size(microbatches=16) == size(microbatches=4)
    assert size(layers=16) == size(layers=4)


@pytest.mark.slow
def test_rows_without_labels_count_nothing_wherever_they_lie():
    """The mean is over real tokens of the whole batch: rows that have none add nothing, on every rank."""
    model, batch = build((1, 2, 1)), make_batch(rows=16)
    params, evaluate = model.init(0), make_eval_step(model)
    silent = {**batch, "labels": batch["labels"].copy()}
    silent["labels"][8:] = -1
    half = evaluate(params, silent)
    assert float(half["tokens"]) == (silent["labels"] >= 0).sum()
    swapped = {name: np.concatenate([array[8:], array[:8]]) for name, array in silent.items()}
    np.testing.assert_allclose(evaluate(params, swapped)["loss"], half["loss"], rtol=1e-6)


@functools.cache
def two_layers(mesh, dtype):
    """Metrics and gradients."""
    model = build(mesh, layers=2, dtype=dtype)
    return jax.jit(model.loss_and_grad)(params_of(model), make_batch())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_bfloat16_compute_is_float32_but_for_rounding(sizes):
    """A bfloat16 has 8 bits: each rounding is off by 2^-9. About 100 of them lie between loss and gradient,
    and add up as a random walk to 10 * 2^-9, 2 %."""
    (metrics, grads), (near, near_grads) = two_layers((1, 1, 1), "float32"), two_layers(sizes, "bfloat16")
    np.testing.assert_allclose(near["loss"], metrics["loss"], rtol=2**-9)
    for leaf, other in zip(jax.tree.leaves(grads), jax.tree.leaves(near_grads), strict=True):
        leaf, other = np.asarray(leaf), np.asarray(other)
        assert other.dtype == np.float32
        assert np.linalg.norm(other - leaf) < 0.04 * np.linalg.norm(leaf)
