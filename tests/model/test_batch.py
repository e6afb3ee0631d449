"""What a batch may hold: an error where values can be seen, NaN where they cannot, and ignored labels count nothing."""

import functools

import jax
import numpy as np
import pytest
from support import tiny_model
from support.tiny_model import MESHES, VOCAB, make_batch, optimizer_config, params_of, section

import parallax as px
from parallax.config.sections import GuardConfig, SampleConfig
from parallax.data import as_batch
from parallax.errors import ConfigError, DataError
from parallax.inference.generate import generate
from parallax.model.batch import BATCH_ARRAYS, IGNORED, checked
from parallax.model.embedding import EMBEDDINGS
from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainStep, init_state, make_eval_step

IDS = f"use 0 to {VOCAB - 1} (model.vocab={VOCAB})"
AT = (3, 7)
ROWS = 8
BUILT = dict(layers=2, microbatches=2, z_coefficient=1e-2)
# (array, value) -> the error behind the value
OUT_OF_RANGE = {
    ("tokens", VOCAB): IDS,
    ("tokens", -1): IDS,
    ("labels", VOCAB): f"{IDS}, or -1 where there is nothing to predict",
    ("labels", -100): f"{IDS}, or -1 where there is nothing to predict",
    ("segments", -1): "use 0 to 2147483647",
    ("positions", -2): "use 0 to 16777216",
    ("positions", 2**24 + 1): "use 0 to 16777216",
}


build = functools.cache(tiny_model.build)


def batch_with(name, value, dtype=np.int32, rows=ROWS):
    batch = make_batch(rows)
    batch[name] = batch[name].astype(dtype)
    batch[name][AT] = value
    return batch


def refused(function, *args, **kwargs):
    with pytest.raises((DataError, ConfigError)) as error:
        function(*args, **kwargs)
    return str(error.value)


# ---- where values can be looked at


@pytest.mark.parametrize("on_devices", [False, True], ids=["numpy", "cut over devices"])
@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE, ids=str)
def test_a_value_out_of_range_is_quoted_with_its_place_and_the_range(name, value, on_devices):
    batch = batch_with(name, value)
    if on_devices:
        batch = jax.device_put(batch, build((1, 4, 2), **BUILT).batch_sharding)
    assert refused(checked, batch, VOCAB) == f"{name}[3, 7]={value} is out of range; {OUT_OF_RANGE[name, value]}"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(2**32 + 5, np.int64), (2**64 - 1, np.uint64), (255, np.uint8), (65535, np.uint16), (-1, np.int8)],
)
def test_no_dtype_wraps_an_id_into_the_range(value, dtype):
    assert refused(checked, batch_with("tokens", value, dtype), VOCAB) == f"tokens[3, 7]={value} is out of range; {IDS}"


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.uint16, np.int8])
def test_whole_numbers_of_any_dtype_become_int32(dtype):
    found = checked(batch_with("tokens", VOCAB - 1, dtype), VOCAB)
    assert {str(array.dtype) for array in found.values()} == {"int32"} and found["tokens"][AT] == VOCAB - 1


def test_ignored_labels_of_an_unsigned_dtype_are_no_ids():
    """255 is what -1 becomes in a uint8."""
    batch = make_batch(ROWS)
    batch["labels"] = batch["labels"].astype(np.uint8)
    assert "=255 is out of range" in refused(checked, batch, VOCAB)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b | {"tokens": b["tokens"] + 0.5}, "tokens is float64, not int32; use tokens.astype('int32')"),
        (lambda b: b | {"segments": b["segments"] > 1}, "segments is bool, not int32"),
        (lambda b: b | {"positions": b["positions"].astype("float32")}, "positions is float32, not int32"),
        (lambda b: b | {"tokens": b["tokens"].tolist()}, "tokens must be an array of int32, not list"),
        (lambda b: {name: array[0] for name, array in b.items()}, "tokens has shape [16]; use [global_batch, seq]"),
        (lambda b: {name: array[:0] for name, array in b.items()}, "tokens has shape [0, 16]; use [global_batch, seq]"),
        (lambda b: b | {"labels": b["labels"][:, :8]}, "labels has shape [8, 8], tokens has [8, 16]; use one shape"),
        (lambda b: b | {"mask": b["labels"]}, "unknown array 'mask' in a batch; known: tokens, labels"),
        (lambda b: b | {"label": b.pop("labels")}, "unknown array 'label' in a batch; did you mean 'labels'?"),
        (
            lambda b: {name: b[name] for name in BATCH_ARRAYS[:2]},
            "the batch has no 'segments'; it needs tokens, labels",
        ),
        (lambda b: b["tokens"], "a batch is a dict of the arrays tokens, labels, segments, positions, not ndarray"),
        (
            lambda b: {name: array[:3] for name, array in b.items()},
            "data.global_batch=3 does not divide over mesh.dp=2",
        ),
    ],
)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
def test_what_is_no_batch_is_refused_with_a_line(change, message, traced):
    model, batch = build((1, 2, 1), **BUILT), change(make_batch(ROWS))
    loss = functools.partial(jax.eval_shape, model.loss) if traced and isinstance(batch, dict) else model.loss
    found = refused(loss, model.shapes, batch)
    assert found.replace("float64", "float32").startswith(message.replace("float64", "float32")), found


def entry_points(model):
    """Whatever takes a batch, by name: nothing of it compiles before the batch is looked at."""
    tx = make_optimizer(optimizer_config(warmup_steps=1), 10, model.plan.rows)
    step = TrainStep(model, tx, 0)
    return {
        "loss": lambda batch: model.loss(model.shapes, batch),
        "loss_and_grad": lambda batch: model.loss_and_grad(model.shapes, batch),
        "activations": lambda batch: model.activations(model.shapes, batch),
        "look_inside": lambda batch: px.look_inside(model, {}, batch),
        "train_step": lambda batch: step(None, batch),
        "eval_step": lambda batch: make_eval_step(model)(None, batch),
        "logits": lambda batch: model.logits(
            model.shapes, *(batch[name] for name in ("tokens", "segments", "positions"))
        ),
    }


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE, ids=str)
def test_every_entry_point_looks_at_the_values(name, value):
    for entry, take in entry_points(build((1, 1, 1), **BUILT)).items():
        if (entry, name) != ("logits", "labels"):
            assert f"{name}[3, 7]={value} is out of range" in refused(take, batch_with(name, value)), entry


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5, VOCAB]], f"prompt 0 has token id {VOCAB}; the model knows 0 to {VOCAB - 1}"),
        ([[5], [5, -1]], "prompt 1 has token id -1"),
        ([[5.7, 6.2]], "prompt 0 is float64 of shape [2]; a prompt is a list of whole token ids"),
        ([5, 6], "prompt 0 is int64 of shape []"),
        (np.zeros((1, 1, 4), int), "prompt 0 is int64 of shape [1, 4]"),
        ([["a"]], "prompt 0 is <U1 of shape [1]"),
        (np.zeros((0, 4), int), "there are no prompts"),
        ([[]], "prompt 0 is float64 of shape [0]; a prompt is a list of whole token ids"),
    ],
)
def test_prompts_that_are_no_ids_of_the_model_are_refused(prompts, message):
    config = SampleConfig(**(section("sample") | {"prompt": "", "tokens": 1}))
    assert refused(generate, build((1, 1, 1), **BUILT), None, prompts, config).startswith(message)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, 6, 7], "ids has shape [3]; use [rows, seq + 1]"),
        ([[5]], "ids has shape [1, 1]; use [rows, seq + 1], with two columns or more"),
        ([[5.5, 6.0]], "ids is float64; token ids are whole numbers"),
        ([[-4, 5]], "ids are from -4 to 5; token ids are 0 to 2147483647"),
        ([[2**40, 5]], "ids are from 5 to 1099511627776"),
    ],
)
def test_rows_that_are_no_token_ids_make_no_batch(ids, message):
    assert refused(as_batch, np.array(ids)).startswith(message)


# ---- where they cannot: inside of what JAX traces


@functools.cache
def compiled(mesh, embedding, schedule="gpipe"):
    model = build(mesh, embedding=embedding, schedule=schedule, **BUILT)
    return params_of(model), jax.jit(model.loss_and_grad), jax.jit(model.loss)


SOME = [((1, 1, 1), "all_to_all", "gpipe"), ((2, 2, 2), "vocab_parallel", "one_f_one_b")]
REST = [(mesh, kind, "gpipe") for mesh in MESHES for kind in EMBEDDINGS if (mesh, kind, "gpipe") not in SOME]
on_meshes = pytest.mark.parametrize(
    "case",
    [*SOME, *(pytest.param(case, marks=pytest.mark.slow) for case in REST)],
    ids=lambda case: "-".join(map(str, case)),
)


@pytest.mark.slow
@on_meshes
def test_an_id_out_of_range_that_nobody_can_look_at_makes_loss_and_gradient_nan(case):
    params, both, loss = compiled(*case)
    batch = make_batch(rows=32)
    assert np.isfinite(float(both(params, batch)[0]["loss"]))
    bad = [
        ("tokens", VOCAB),
        ("tokens", -1),
        ("tokens", 2**31 - 1),
        ("labels", VOCAB),
        ("labels", -100),
        ("labels", -2),
    ]
    for name, value in bad:
        wrong = {**batch, name: batch[name].copy()}
        wrong[name][AT] = value
        metrics, grads = both(params, wrong)
        assert np.isnan(float(metrics["loss"])) and np.isnan(float(loss(params, wrong)["loss"])), (name, value)
        assert not np.isfinite(np.asarray(grads["head"]["norm"]["scale"])).any(), (name, value)


@pytest.mark.slow
def test_the_guard_refuses_a_step_on_an_id_out_of_range():
    model = build((1, 2, 2), **BUILT)
    tx = make_optimizer(optimizer_config(warmup_steps=1), 10, model.plan.rows)
    guard = GuardConfig(max_skipped_steps=3, spike_z=0.0, spike_signal="loss", spike_window_steps=4)
    state, step = init_state(model, tx, 0), TrainStep(model, tx, 0, guard)
    before = jax.device_get(state.params)
    for number, name in enumerate(("tokens", "labels"), start=1):
        state, metrics = step.take(state, jax.device_put(batch_with(name, VOCAB), model.batch_sharding))
        assert float(metrics["skipped"]) == 1 and float(metrics["skipped_steps"]) == number
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
    state, metrics = step(state, make_batch(ROWS))
    assert float(metrics["skipped"]) == 0 and float(metrics["skipped_steps"]) == 2


# ---- ignored positions


@pytest.mark.fast(1)
@on_meshes
def test_an_ignored_position_counts_in_neither_loss_nor_gradient_nor_tokens(case):
    """Rows of which every label is ignored may hold any tokens: not a bit changes, the z-loss's neither."""
    params, both, loss = compiled(*case)
    batch, other = make_batch(rows=32), make_batch(rows=32, seed=1)
    batch["labels"][1::2] = IGNORED
    exchanged = {name: batch[name].copy() for name in BATCH_ARRAYS}
    for name in ("tokens", "segments", "positions"):
        exchanged[name][1::2] = other[name][1::2]
    (metrics, grads), (again, same) = both(params, batch), both(params, exchanged)
    assert float(metrics["tokens"]) == (batch["labels"] != -1).sum() > 0 and float(metrics["z_loss"]) > 0
    for one, two in zip(jax.tree.leaves((metrics, grads)), jax.tree.leaves((again, same)), strict=True):
        np.testing.assert_array_equal(one, two)
    assert jax.device_get(loss(params, batch)) == jax.device_get(loss(params, exchanged))
    assert np.isfinite(float(metrics["loss"])) and px.IGNORED == IGNORED == -1
