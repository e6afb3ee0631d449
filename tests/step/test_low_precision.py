"""Moments and weights in fewer bits: rounding without bias, the same bits on every mesh, and what float32 computes."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from support.low_precision_reference import as_float32, kept, neighbours, stored
from support.run_examples import tiny_config
from support.tiny_model import AS_WRITTEN, build, make_batch, optimizer_config

from parallax.checkpoint.arrays import flatten
from parallax.checkpoint.restore import restore
from parallax.checkpoint.save import CheckpointWriter
from parallax.cli.convert import main as convert
from parallax.cli.evaluate import main as evaluate
from parallax.config.sections import CheckpointConfig
from parallax.config.settings import load_settings
from parallax.errors import CheckpointError, ConfigError
from parallax.interop.safetensors import read_model
from parallax.sharding.layout import named_leaves
from parallax.sharding.rounding import random_bits, to_bfloat16
from parallax.step.expert_load import EXPERT_COUNTS
from parallax.step.low_precision import (
    WEIGHTS_FIELD,
    from_float8,
    has_blocks,
    to_e4m3,
    to_float8,
    with_states_in,
)
from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainStep, abstract_state
from parallax.training.run import train

NARROW = {
    "bfloat16": (to_bfloat16, ml_dtypes.bfloat16, 16, 16),
    "float8": (to_e4m3, ml_dtypes.float8_e4m3fn, 20, 12),
}


def some_values(name):
    rng = np.random.default_rng(2)
    values = rng.normal(size=48) * 2.0 ** rng.integers(-12, 8, 48)
    return np.clip(values, -448, 448).astype(np.float32) if name == "float8" else values.astype(np.float32)


@pytest.mark.parametrize("name", NARROW)
def test_each_value_is_rounded_to_the_farther_neighbour_as_often_as_it_is_near_to_it(name):
    """All random numbers that there are, once each: how many round away from 0 is the value's place between the two.

    In e4m3 what is below 2^-6 is a multiple of 2^-29 first, which is 1 of 2^20 random numbers.
    """
    narrow, dtype, bits, shift = NARROW[name]
    every = jnp.arange(1 << bits, dtype=jnp.uint32) << shift
    count = jax.jit(lambda x: (jnp.abs(narrow(jnp.full(every.shape, x), every).astype(jnp.float32)) > jnp.abs(x)).sum())
    values = some_values(name)
    below, above = neighbours(values, dtype)
    expected = (values - below) / (above - below) * (1 << bits)
    found = np.array([count(x) for x in values])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1 if name == "float8" else 0)


@pytest.mark.parametrize("name", NARROW)
def test_the_mean_of_many_roundings_is_the_value(name):
    """N roundings have a mean with a deviation of at most half a step / sqrt(N); five of them, for 48 values."""
    narrow, dtype, *_ = NARROW[name]
    values, many = some_values(name), 10_000
    bits = random_bits(jnp.int32([3, 7]), "mu", "some/kernel", (many, len(values)))
    rounded = np.asarray(jax.jit(narrow)(np.broadcast_to(values, bits.shape), bits)).astype(np.float64)
    below, above = neighbours(values, dtype)
    assert ((rounded == below) | (rounded == above)).all()
    assert (np.abs(rounded.mean(axis=0) - values) <= 5 * np.abs(above - below) / 2 / np.sqrt(many)).all()


@pytest.mark.parametrize("name", NARROW)
def test_what_a_dtype_has_stays_as_it_is(name):
    narrow, dtype, *_ = NARROW[name]
    numbers = np.arange(1 << 8 * np.dtype(dtype).itemsize, dtype=f"u{np.dtype(dtype).itemsize}").view(dtype)
    wide = numbers.astype(np.float32)
    found = np.asarray(jax.jit(narrow)(wide, np.full(wide.shape, 0xFFFFFFFF, np.uint32)))
    np.testing.assert_array_equal(found.astype(np.float32), wide)  # infinity and NaN too


def test_an_update_too_small_for_bfloat16_is_made_now_and_then():
    """1000 times 1e-4 onto 1, whose next number is 1 + 2^-7: each step is a jump with probability 0.0128, the sum has a
    deviation of 2^-7 sqrt(1000 x 0.0128) = 0.028 in one entry and 0.028 / 16 in the mean of 256."""

    def step(x, number):
        bits = random_bits(jnp.stack([jnp.int32(0), number]), WEIGHTS_FIELD, "x", x.shape)
        return to_bfloat16(x.astype(jnp.float32) + 1e-4, bits), None

    x, _ = jax.lax.scan(step, jnp.ones(256, jnp.bfloat16), jnp.arange(1000, dtype=jnp.int32))
    assert abs(np.asarray(x, np.float64).mean() - 1.1) < 5 * 0.028 / 16


# ---- blocks


def test_a_block_has_a_power_of_two_that_brings_its_largest_to_448_at_most():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(3, 64, 10)) * 10.0 ** rng.integers(-20, 20, (3, 4, 1, 10)).repeat(16, 2).reshape(3, 64, 10)
    x = x.astype(np.float32)
    x[0, :16, 0], x[1, :16, 0] = 0, 448 / 1024  # nothing, and what ends at the largest number
    blocks = jax.jit(to_float8, static_argnums=2)(jnp.asarray(x), jnp.zeros(x.shape, jnp.uint32), (1, 16, 1))
    largest = np.abs(x).reshape(3, 4, 16, 10).max(axis=2).astype(np.float64)
    exponent = np.ceil(np.log2(np.where(largest, largest, 1) / 448))
    np.testing.assert_array_equal(np.asarray(blocks.scales)[largest > 0], 2.0 ** exponent[largest > 0])
    assert blocks.scales.shape == (3, 4, 10) and blocks.values.dtype == jnp.float8_e4m3fn
    step = np.maximum(2.0**-3 * np.abs(x), (2.0**-9 * np.asarray(blocks.scales)).repeat(16, 1))
    assert (np.abs(np.asarray(from_float8(blocks)) - x) <= step).all()


def test_a_second_moment_that_is_not_zero_never_becomes_zero():
    """What a first moment is divided by: its root, whose least number is 2^-9 of its block's scale."""
    x = jnp.float32([[1.0, 1e-20, 0.0] + [0.0] * 5]).T
    there_and_back = jax.jit(lambda x, bits: from_float8(to_float8(x, bits, (8, 1), root=True), root=True))
    found = np.asarray(there_and_back(x, jnp.zeros(x.shape, jnp.uint32)))[:, 0]
    assert found[0] == 1 and found[1] == (2.0**-9 * 2.0**-8) ** 2 and (found[2:] == 0).all()


def test_a_mesh_that_cuts_through_blocks_is_refused():
    mesh = jax.sharding.AbstractMesh((1, 16, 1), ("pp", "dp", "tp"))
    model = build((1, 8, 1), **SHAPE).replace(mesh=mesh)
    with pytest.raises(ConfigError) as error:
        abstract_state(model, optimizer(model, m_dtype="float8"))
    assert str(error.value) == (
        "optimizer.m_dtype='float8' has blocks of 8 along a dim of blocks/attention/k/kernel of size 64, which "
        "mesh.dp=16 shards into pieces of 4; use m_dtype='bfloat16', or a mesh that shards it into 8 pieces or a "
        "divisor of that."
    )


# ---- the same bits on every mesh

SHAPE = dict(attention="gqa", tied=True, layers=4, d_model=64, d_ff=64, microbatches=4)  # blocks of 8
EXPERTS = SHAPE | dict(layers=2, layers_of="dense moe", experts=4, d_expert=64, balance_coefficient=0.01)
ALL = dict(m_dtype="float8", v_dtype="float8", weights_dtype="bfloat16")
HALF = dict(m_dtype="bfloat16", v_dtype="bfloat16", weights_dtype="bfloat16")
MIXED = dict(m_dtype="float8", v_dtype="bfloat16", weights_dtype="float32")
# The clip is off: the order in which a norm's squares are added depends on the mesh.
HELD = dict(learning_rate=1e-2, warmup_steps=0, schedule="constant", clip_norm=0.0, eps=1e-5, balance_rate=1e-3)


def optimizer(model, **dtypes):
    return make_optimizer(optimizer_config(**HELD | dtypes), 10, model.plan.rows)


def with_weights(model, dtype):
    """The model with weights in this dtype between steps."""
    return model.replace(optimizer=dataclasses.replace(model.settings.optimizer, weights_dtype=dtype))


def model_of(mesh, changes, dtypes):
    return with_weights(build(mesh, **changes), dtypes.get("weights_dtype", "float32"))


def gradients(model, seed):
    rng = np.random.default_rng(seed)
    leaves = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), model.shapes)
    return jax.tree.map(jax.device_put, leaves, model.shardings)


def updater(step, options=None):
    """(state, gradients) -> state, with the random bits of the state's step; `options` are the compiler's."""

    def update(state, grads):
        noise = jnp.stack([jnp.int32(step.seed), state.step])
        statistics = {name: named_leaves(grads)[name] for name in step.model.plan.statistics}
        params, opt_state = step.update(state.params, state.opt_state, grads, statistics, jnp.float32(1), noise)
        return state._replace(step=state.step + 1, params=params, opt_state=opt_state)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(step.model, step.tx))
    return jax.jit(update, out_shardings=shardings, compiler_options=options)


def held(state):
    """Arrays by name, as bytes: what has 8 bits has no order in NumPy."""
    return {name: (str(leaf.dtype), np.asarray(leaf).tobytes()) for name, leaf in flatten(state).items()}


@functools.cache
def after_updates(mesh, number, experts, dtypes, name="adamw", as_written=False):
    dtypes = dict(dtypes)
    model = model_of(mesh, EXPERTS if experts else SHAPE, dtypes)
    step = TrainStep(model, optimizer(model, name=name, **dtypes), seed=5)
    state, update = step.init(), updater(step, AS_WRITTEN if as_written else None)
    for seed in range(number):
        state = update(state, gradients(model, seed))
    return step, state


CUT = [
    ((1, 8, 1), False, ALL),
    ((2, 2, 2), False, ALL),
    ((2, 2, 2), False, HALF),
    ((1, 2, 1, 1, 2, 2), True, ALL),
    ((1, 1, 2, 2, 2, 1), True, ALL),
    ((1, 2, 1, 1, 2, 2), True, HALF),
    ((2, 2, 2), False, MIXED),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "experts", "dtypes"), CUT, ids=str)
def test_states_and_weights_have_the_same_bits_on_every_mesh(mesh, experts, dtypes):
    # Where XLA fuses the sum of a parameter and its update with the product by the rate, it rounds once for twice: of
    # float32 parameters near 1 and updates near 0.01, about one in a hundred then differs in its last bit.
    how = dict(as_written=dtypes["weights_dtype"] == "float32")
    (_, alone), (_, cut) = (after_updates(m, 2, experts, tuple(dtypes.items()), **how) for m in ((1, 1, 1), mesh))
    assert held(alone) == held(cut)
    kinds = {kind for kind, _ in held(cut).values()}
    assert ("float8_e4m3fn" in kinds) == (dtypes["m_dtype"] == "float8") and "bfloat16" in kinds


def test_random_bits_differ_by_seed_step_field_and_parameter():
    places = [([0, 1], "mu", "a"), ([1, 1], "mu", "a"), ([0, 2], "mu", "a"), ([0, 1], "nu", "a"), ([0, 1], "mu", "b")]
    draws = [np.asarray(random_bits(jnp.int32(noise), *place, (64,))).tobytes() for noise, *place in places]
    assert len({*draws}) == len(places)


@pytest.mark.slow
def test_a_device_computes_its_own_random_bits_and_nothing_is_sent():
    step, state = after_updates((2, 2, 2), 1, False, tuple(ALL.items()))
    compiled = updater(step).lower(state, gradients(step.model, 0)).compile().as_text()
    assert not [kind for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if kind in compiled]


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [HALF, ALL], ids=str)
def test_what_is_saved_on_one_mesh_goes_on_with_the_same_bits_on_another(dtypes, tmp_path):
    _, state = after_updates((2, 2, 2), 1, False, tuple(dtypes.items()))
    config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    with CheckpointWriter(tmp_path, config, settings={}) as checkpoints:
        checkpoints.save(1, {"state": state})
    model = model_of((1, 8, 1), SHAPE, dtypes)
    step = TrainStep(model, optimizer(model, **dtypes), seed=5)
    found = restore(tmp_path, 1, {"state": abstract_state(model, step.tx)})["state"]
    assert held(found) == held(state)
    _, never_stopped = after_updates((1, 1, 1), 2, False, tuple(dtypes.items()))
    assert held(updater(step)(found, gradients(model, 1))) == held(never_stopped)


# ---- what float32 computes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtypes"),
    [("adamw", ALL), ("adamw", HALF), ("muon", ALL), ("muon", HALF)],
    ids=str,
)
def test_states_and_weights_are_those_of_float32_rounded(name, dtypes):
    """The second update, of the stored results of the first: by the plain optimizer in float32 on one device, then
    rounded by NumPy. All bits are the same, where both programs are compiled as they are written: else XLA adds and
    multiplies at once in one of them and not in the other. Muon's products differ by mesh: it is held on one device."""
    mesh = (2, 2, 2) if name == "adamw" else (1, 1, 1)
    (_, before), (_, after) = (
        after_updates(mesh, number, False, tuple(dtypes.items()), name, as_written=True) for number in (1, 2)
    )
    model = build((1, 1, 1), **SHAPE)
    plain, rows = optimizer(model, name=name), named_leaves(model.plan.rows)
    whole = jax.tree.map(np.asarray, before)
    wide = as_float32(whole.opt_state, jax.eval_shape(plain.init, model.shapes))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), whole.params)
    grads = jax.tree.map(np.asarray, gradients(model, 1))

    @functools.partial(jax.jit, compiler_options=AS_WRITTEN)
    def update(params, state, grads):
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    new, state = update(params, wide, grads)
    wanted = {WEIGHTS_FIELD: ("weights_dtype", named_leaves(new), named_leaves(jax.tree.map(np.asarray, after.params)))}
    wanted |= {"mu": ("m_dtype", kept(state, "mu"), kept(after.opt_state, "mu"))}
    wanted |= {"nu": ("v_dtype", kept(state, "nu"), kept(after.opt_state, "nu"))}
    for field, (key, computed, found) in wanted.items():
        assert computed.keys() == found.keys() and computed
        for leaf, x in computed.items():
            expected = stored(field, leaf, np.asarray(x, np.float32), dtypes[key], rows[leaf], (5, 1))
            np.testing.assert_array_equal(found[leaf].astype(np.float64), expected, err_msg=f"{field} {leaf}")


def test_the_wrapper_takes_any_transformation():
    """Momentum of optax.sgd, whose field is `trace`, in bfloat16."""
    model = build((1, 1, 1), **SHAPE)
    tx = with_states_in(optax.sgd(0.1, momentum=0.9), {"trace": "bfloat16"}, model.plan.rows)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), model.shapes)
    grads, noise = gradients(model, 0), np.int32([0, 0])
    _, state = jax.jit(lambda p, g: tx.update(g, tx.init(p), p, noise=noise))(params, grads)
    for name, grad in named_leaves(grads).items():
        found = kept(state, "trace")[name]
        expected = stored("trace", name, np.asarray(grad), "bfloat16", None, (0, 0))
        np.testing.assert_array_equal(found, expected)


def test_fields_of_any_name_are_stored_in_few_bits():
    """AdaGrad's sums of squares, on a mesh, in float8: blocks of their roots, from which the update is computed."""
    model = build((1, 2, 1), **SHAPE)
    plain = optax.adagrad(0.1, initial_accumulator_value=0.0)
    tx = with_states_in(plain, {"sum_of_squares": "float8"}, model.plan.rows, roots=("sum_of_squares",))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), model.shapes)
    grads = gradients(model, 0)
    assert has_blocks(abstract_state(model, tx).opt_state)
    updates, state = jax.jit(lambda p, g: tx.update(g, tx.init(p), p, noise=jnp.int32([0, 0])))(params, grads)
    exact, sums = jax.jit(lambda p, g: plain.update(g, plain.init(p), p))(params, grads)
    for one, other in zip(jax.tree.leaves(updates), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    found = state[0].sum_of_squares["blocks"]["mlp"]["up"]["kernel"]
    expected = sums[0].sum_of_squares["blocks"]["mlp"]["up"]["kernel"]
    found = jax.jit(functools.partial(from_float8, root=True))(found)
    np.testing.assert_allclose(found, expected, rtol=0.3, atol=1e-4 * np.max(expected))


REFUSED = {
    "no such field": (
        optax.adagrad(0.1),
        {"mu": "bfloat16", "trace": "bfloat16"},
        "optimizer.m_dtype='bfloat16' has no effect on this optimizer: it keeps nothing in mu or trace, but in "
        "sum_of_squares; use 'float32', or wrap it in with_states_in, with the names of its fields.",
    ),
    "no states": (optax.sgd(0.1), {"nu": "float8"}, "it keeps nothing in nu, but no array for a parameter"),
    "other shapes": (
        optax.adafactor(0.1, min_dim_size_to_factor=8),
        {"v_row": "float8"},
        "v_row='float8' needs arrays of the parameters' shapes, and this optimizer keeps ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_dtype_without_effect_on_an_optimizer_is_refused(case):
    tx, dtypes, said = REFUSED[case]
    model = build((1, 1, 1), **SHAPE)
    with pytest.raises(ConfigError) as error:
        abstract_state(model, with_states_in(tx, dtypes, model.plan.rows))
    assert said in str(error.value)


def test_in_float32_nothing_is_wrapped():
    model = build((1, 1, 1), **SHAPE)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(abstract_state(model, optimizer(model)))}
    assert kinds == {"float32", "int32"}
    trained = jax.make_jaxpr(lambda p, g: optimizer(model).update(g, optimizer(model).init(p), p))
    assert "threefry" not in str(trained(model.shapes, model.shapes))


# ---- whole steps and runs

MESHES = {
    "dense": [(1, 1, 1), (2, 2, 2)],
    "data and context": [(1, 1, 1), (1, 8, 1), (1, 2, 1, 1, 4)],
    "experts": [(1, 1, 1), (1, 2, 1, 1, 2, 2)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind if kind == "dense" else pytest.param(kind, marks=pytest.mark.slow) for kind in MESHES]
)
def test_losses_of_a_run_are_the_same_on_every_mesh_but_for_rare_roundings(kind):
    """Gradients differ by mesh in their last places, 1e-7, and so does which of 2^16 random numbers is enough to round
    an entry away from 0: a few of 100,000 entries are one step of their dtype apart. Losses are held to 1e-4, as those
    of runs in float32 are."""
    losses = {}
    for mesh in MESHES[kind]:
        model = model_of(mesh, EXPERTS if kind == "experts" else SHAPE, ALL)
        step = TrainStep(model, optimizer(model, **ALL, learning_rate=3e-3), seed=5)
        state = step.init()
        losses[mesh] = []
        for number in range(4):
            batch = jax.device_put(make_batch(rows=32, seed=number % 2), model.batch_sharding)
            state, metrics = step(state, batch)
            losses[mesh].append(float(metrics["loss"]))
        assert (EXPERT_COUNTS in metrics) == (kind == "experts")
    first, *others = losses.values()
    assert first[3] < first[1]
    for found in others:
        np.testing.assert_allclose(found, first, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero3"])
def test_weights_in_bfloat16_give_the_loss_and_gradients_of_the_same_in_float32(policy):
    """What is computed of them is float32 here, norms' scales too: the bits of both are the same, compiled as they are
    written. XLA fuses widening otherwise, with what reads it, and products' bits follow."""
    wide, batch = build((2, 2, 1), policy=policy, **SHAPE), make_batch(rows=32)
    narrow = with_weights(wide, "bfloat16")
    params = narrow.init(0)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    same = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    found, expected = (
        jax.jit(model.loss_and_grad, compiler_options=AS_WRITTEN)(weights, batch)
        for model, weights in ((narrow, params), (wide, same))
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


LOW = {"optimizer.m_dtype": "float8", "optimizer.v_dtype": "bfloat16", "optimizer.weights_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def low_run(corpus, tmp_path_factory):
    """A finished run on eight devices; not to be changed."""
    folder = tmp_path_factory.mktemp("low")
    assert train(low_config(corpus), folder).reason == "finished"
    return folder


def low_config(corpus, **changes):
    return tiny_config(corpus, **LOW | {"model.d_model": 64, "model.dropout": 0.0} | changes)


def digests(folder):
    """Fingerprints of the last step's arrays."""
    return json.loads((folder / "checkpoints" / "8" / "manifest.json").read_text())["content"]["arrays"]


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_with_the_same_bits(corpus, low_run, tmp_path):
    train(low_config(corpus, **{"train.steps": 4, "optimizer.schedule": "constant"}), tmp_path)
    train(low_config(corpus, **{"optimizer.schedule": "constant"}), tmp_path)
    never_stopped = tmp_path / "whole"
    train(low_config(corpus, **{"optimizer.schedule": "constant"}), never_stopped)
    assert digests(tmp_path) == digests(never_stopped) != digests(low_run)


@pytest.mark.parametrize("key", LOW)
def test_a_run_does_not_go_on_with_other_dtypes(corpus, whole_run, key):
    with pytest.raises(CheckpointError) as error:
        train(tiny_config(corpus, **{key: "bfloat16", "train.steps": 20}), whole_run)
    assert f"{key}='float32' there, 'bfloat16' here; set back what differs" in str(error.value)


@pytest.mark.slow
def test_weights_of_a_run_start_another_in_another_dtype(corpus, low_run, tmp_path):
    changes = {"train.steps": 1, "optimizer.warmup_steps": 0, "checkpoint.keep_best": 0, "train.eval_batches": 0}
    start = {"train.init_from": str(low_run), "optimizer.learning_rate": 0.0, "model.d_model": 64}
    train(tiny_config(corpus, **changes | start), tmp_path / "wide")
    train(low_config(corpus, **changes | start | {"train.init_from": str(tmp_path / "wide")}), tmp_path / "back")
    last, back = (load_params(folder, step) for folder, step in ((low_run, 8), (tmp_path / "back", 1)))
    wide = load_params(tmp_path / "wide", 1)
    for name, array in last.items():
        assert (array.dtype, wide[name].dtype) == (ml_dtypes.bfloat16, np.float32)
        np.testing.assert_array_equal(array.astype(np.float32), wide[name])
        np.testing.assert_array_equal(array.astype(np.float32), back[name].astype(np.float32))


def load_params(folder, step):
    """Tensors of a step, through an export."""
    out = folder / f"exported {step}"
    if not out.exists():
        assert convert(["export", str(folder), str(out), f"--step={step}"]) == 0
    return {name: tensor.whole() for name, tensor in read_model(out).items()}


@pytest.mark.slow
def test_weights_in_bfloat16_go_to_hugging_face_and_come_back(low_run, tmp_path):
    assert convert(["to-hf", str(low_run), str(tmp_path / "hf")]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {str(tensor.dtype) for tensor in read_model(tmp_path / "hf").values()} == {"bfloat16"}
    flag = "--config.optimizer.weights_dtype=bfloat16"
    assert convert(["from-hf", str(tmp_path / "hf"), "--workdir", str(tmp_path / "back"), flag]) == 0
    assert load_settings(tmp_path / "back").optimizer.weights_dtype == "bfloat16"
    there, here = load_params(low_run, 8), load_params(tmp_path / "back", 0)
    assert there.keys() == here.keys()
    for name, array in there.items():
        np.testing.assert_array_equal(array.view(np.uint16), here[name].view(np.uint16))


@pytest.mark.slow
def test_a_run_with_weights_in_bfloat16_is_evaluated(low_run, capsys):
    assert evaluate(["evaluate", f"--workdir={low_run}", "--config.mesh.dp=2"]) == 0
    assert "loss" in capsys.readouterr().out
