"""Optimizers held to NumPy leaf by leaf; rates at their corners, what decays, the clip, how states are cut."""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.checkpoint_examples import SETTINGS
from support.tiny_model import build, optimizer_config, params_of

from parallax.checkpoint.arrays import flatten, shape_and_dtype
from parallax.checkpoint.restore import restore
from parallax.checkpoint.save import CheckpointWriter
from parallax.config.sections import CheckpointConfig
from parallax.errors import ConfigError
from parallax.sharding.layout import Layout, named_leaves
from parallax.step.optimizer import DECAYED, clip_by_norm, global_norm, learning_rate, make_optimizer, muon_dims
from parallax.step.step import TrainStep, abstract_state, init_state, state_shardings

PEAK, STEPS, WARMUP = 1.0, 100, 10
SCHEDULES = ["cosine", "linear", "wsd", "wsd_sqrt", "constant"]


def rate(step, **changes):
    config = optimizer_config(**(dict(learning_rate=PEAK, warmup_steps=WARMUP, final_ratio=0.1) | changes))
    return float(learning_rate(config, STEPS)(step))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_rises_to_its_peak_from_a_first_step_that_is_not_zero(schedule):
    rates = [rate(step, schedule=schedule) for step in range(WARMUP)]
    np.testing.assert_allclose(rates, PEAK * np.arange(1, WARMUP + 1) / WARMUP, rtol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1])
def test_without_warm_up_the_first_step_has_the_peak(schedule, warmup):
    assert rate(0, schedule=schedule, warmup_steps=warmup) == pytest.approx(PEAK, rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("cosine", 54, 0.1 + 0.9 * 0.5),
        ("cosine", 99, 0.1),  # the last of 100 steps
        ("linear", 54, 0.1 + 0.9 * 0.5),
        ("linear", 99, 0.1),
        ("wsd", 80, 1.0),  # the last fifth of the 90 steps after the peak falls, from step 81
        ("wsd", 81, 1.0),
        ("wsd", 90, 0.1 + 0.9 * 0.5),
        ("wsd", 99, 0.1),
        ("wsd_sqrt", 81, 1.0),
        ("wsd_sqrt", 90, 0.1 + 0.9 * (1 - math.sqrt(0.5))),
        ("wsd_sqrt", 99, 0.1),
        ("constant", 99, 1.0),
    ],
)
def test_the_rate_has_these_values(schedule, step, expected):
    assert rate(step, schedule=schedule, decay_fraction=0.2) == pytest.approx(PEAK * expected, rel=1e-5)


def test_the_share_in_which_the_rate_falls_is_of_the_steps_after_the_warm_up():
    """With 0 it fell in the last step all the same."""
    rates = np.array([rate(step, schedule="wsd", warmup_steps=60, decay_fraction=0.5) for step in range(STEPS)])
    assert (rates[59:80] == PEAK).all() and (np.diff(rates[79:]) < 0).all() and rates[-1] == pytest.approx(0.1)
    for schedule in ("wsd", "wsd_sqrt"):
        assert [rate(step, schedule=schedule, decay_fraction=0.0) for step in (50, 98, 99)] == [PEAK] * 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_of_one_step_has_the_peak(schedule):
    config = optimizer_config(learning_rate=PEAK, warmup_steps=0, schedule=schedule)
    assert float(learning_rate(config, 1)(0)) == PEAK


def test_cosine_follows_its_formula():
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * done / 90)) / 2 for done in range(91)]
    np.testing.assert_allclose([rate(WARMUP - 1 + done) for done in range(91)], expected, rtol=1e-4)


def test_the_cool_down_falls_as_one_minus_the_root_of_its_share():
    """Hägele et al. 2024: to 0, from the peak at step N - N_decay."""
    fall = [1 - math.sqrt(done / 18) for done in range(19)]
    rates = [rate(81 + done, schedule="wsd_sqrt", final_ratio=0.0) for done in range(19)]
    np.testing.assert_allclose(rates, fall, atol=1e-7)
    assert rates[0] == PEAK and rates[-1] == 0


def test_warm_up_that_does_not_end_is_refused():
    with pytest.raises(ConfigError, match="optimizer.warmup_steps=100 must be below train.steps=100; use warmup_steps"):
        rate(0, warmup_steps=100)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "adam", "optimizer.name='adam' is unknown; did you mean 'adamw'?"),
        ("schedule", "cosin", "optimizer.schedule='cosin' is unknown; did you mean 'cosine'?"),
        ("warmup_steps", -1, "optimizer.warmup_steps=-1 must be a whole number of 0 or more"),
        ("warmup_steps", 1.5, "optimizer.warmup_steps=1.5 is a number, but it must be a whole number"),
        ("learning_rate", float("nan"), "optimizer.learning_rate=nan is not a number that float32 holds"),
        ("b1", 1.0, "optimizer.b1=1.0 must be at least 0 and below 1"),
        ("clip_norm", -1.0, "optimizer.clip_norm=-1.0 must be at least 0"),
        ("m_dtype", "bf16", "optimizer.m_dtype='bf16' is unknown; "),
        ("v_dtype", "float16", "optimizer.v_dtype='float16' is unknown; did you mean 'bfloat16'?"),
        ("weights_dtype", "float8", "optimizer.weights_dtype='float8' is unknown; "),
    ],
)
def test_wrong_settings_are_refused(field, value, message):
    with pytest.raises(ConfigError) as caught:
        optimizer_config(**{field: value})
    assert message in str(caught.value)


def names(model, leaves):
    paths = jax.tree_util.tree_leaves_with_path(model.shapes)
    words = [".".join(str(key.key) for key in path) for path, _ in paths]
    return dict(zip(words, leaves, strict=True))


def layout_leaves(model):
    return jax.tree.leaves(model.layouts, is_leaf=lambda leaf: isinstance(leaf, Layout))


# (input dims, output dims) of every kernel, the layers' dim not counted; the rest is left to AdamW.
MUON = {
    "mla": {
        "queries_0.kernel": (("d_model",), ("d_latent_q",)),
        "queries_3.kernel": (("d_latent_q",), ("heads", "d_qk")),
        "down.kernel": (("d_model",), ("d_latent",)),
        "k_rope.kernel": (("d_model",), ("d_rope",)),
        "up_k.kernel": (("d_latent",), ("heads", "d_head")),
        "up_v.kernel": (("d_latent",), ("heads", "d_head")),
        "out.kernel": (("heads", "d_head"), ("d_model",)),
    },
    "gqa": {
        "q.kernel": (("d_model",), ("heads", "d_head")),
        "k.kernel": (("d_model",), ("kv_heads", "d_head")),
        "v.kernel": (("d_model",), ("kv_heads", "d_head")),
        "out.kernel": (("heads", "d_head"), ("d_model",)),
    },
}
MLP = {
    "gate.kernel": (("d_model",), ("d_ff",)),
    "up.kernel": (("d_model",), ("d_ff",)),
    "down.kernel": (("d_ff",), ("d_model",)),
}


@pytest.mark.parametrize("attention", MUON)
@pytest.mark.parametrize("family", ["column_row", "scatter"])
def test_muon_knows_inputs_and_outputs_of_every_kernel(attention, family):
    model = build((1, 1, 1), attention=attention, d_latent_q=16, tied=False, qkv_bias=True, tensor_parallel=family)
    expected = {f"blocks.attention.{name}": dims for name, dims in MUON[attention].items()}
    expected |= {f"blocks.mlp.{name}": dims for name, dims in MLP.items()}
    found = {}
    for name, row in names(model, jax.tree.leaves(model.plan.rows)).items():
        if (dims := muon_dims(row.spec, row.at_rest)) is not None:
            words = [tuple(row.at_rest.names[at] for at in axes) for axes in (dims.reduction_axis, dims.output_axis)]
            found[name] = tuple(words)
    assert found == expected


@pytest.mark.parametrize("attention", MUON)
def test_norms_and_biases_do_not_decay(attention):
    model = build((1, 1, 1), attention=attention, d_latent_q=16, tied=False, qkv_bias=True)
    for name, row in names(model, jax.tree.leaves(model.plan.rows)).items():
        assert (row.spec.role in DECAYED) == name.endswith(("kernel", "table")), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("attention", MUON)
def test_decay_skips_norms_and_biases(attention, optimizer):
    model = build((1, 1, 1), attention=attention, tied=False, qkv_bias=True, layers=1)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), model.shapes)
    config = optimizer_config(name=optimizer, learning_rate=0.5, weight_decay=0.1, warmup_steps=0, schedule="constant")
    tx = make_optimizer(config, 10, model.plan.rows)
    nothing = jax.tree.map(np.zeros_like, params)
    updates, _ = jax.jit(lambda params: tx.update(nothing, tx.init(params), params))(params)
    for name, update in names(model, jax.tree.leaves(updates)).items():
        expected = -0.5 * 0.1 if name.endswith(("kernel", "table")) else 0.0
        np.testing.assert_allclose(update, expected, rtol=1e-5, err_msg=name)


@functools.cache
def gradients(scale):
    model, rng = build((1, 1, 1)), np.random.default_rng(3)
    return jax.tree.map(lambda leaf: scale * rng.normal(size=leaf.shape).astype(np.float32), model.shapes)


def one_step(mesh, config, scale):
    """(parameters after a step, norm of the gradient), computed on arrays cut over the mesh."""
    model = build(mesh)
    tx = make_optimizer(config, 10, model.plan.rows)

    def step(params, grads):
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), global_norm(grads)

    grads = jax.tree.map(jax.device_put, gradients(scale), model.shardings)
    return jax.tree.map(np.asarray, jax.jit(step)(params_of(model), grads))


@pytest.mark.fast(1)
@pytest.mark.parametrize(("optimizer", "clip_norm"), [("adamw", 1.0), ("adamw", 0.0), ("muon", 1.0)])
def test_a_step_is_the_same_on_one_device_and_on_eight(optimizer, clip_norm):
    # eps as large as a clipped gradient's entries: AdamW's step then depends on their size, and so on the norm.
    settings = dict(learning_rate=0.01, warmup_steps=0, clip_norm=clip_norm, eps=1e-3)
    config = optimizer_config(name=optimizer, **settings)
    (alone, norm), (cut, cut_norm) = (one_step(mesh, config, scale=0.1) for mesh in [(1, 1, 1), (2, 2, 2)])
    expected = math.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(gradients(0.1))))
    np.testing.assert_allclose([norm, cut_norm], expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), cut, alone)


def test_the_gradient_is_clipped_to_the_norm_of_all_its_leaves():
    """Twice the gradient gives the same step once the norm is above the clip, and another below it."""
    settings = dict(learning_rate=0.01, warmup_steps=0, clip_norm=1.0, eps=1e-3)
    config = optimizer_config(**settings)
    steps = [one_step((2, 2, 2), config, scale)[0]["blocks"]["mlp"]["up"]["kernel"] for scale in (0.1, 0.2, 1e-4)]
    np.testing.assert_allclose(steps[0], steps[1], rtol=0, atol=1e-6)
    assert np.abs(steps[0] - steps[2]).max() > 1e-4


@pytest.mark.parametrize("size", [0.1, 10.0, np.nan])
def test_the_clip_is_that_of_optax_and_takes_a_norm_that_is_known(size):
    grads = {name: size * np.random.default_rng(len(name)).normal(size=5).astype(np.float32) for name in ("a", "bc")}
    theirs, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    ours = clip_by_norm(1.0)
    measured, _ = ours.update(grads, ours.init(grads))
    told, _ = ours.update(grads, ours.init(grads), grad_norm=global_norm(grads))
    wrong, _ = ours.update(grads, ours.init(grads), grad_norm=np.float32(1e3))
    for name in grads:
        np.testing.assert_array_equal(measured[name], theirs[name])
        np.testing.assert_array_equal(told[name], theirs[name])
        assert (wrong[name] != theirs[name]).all()


# Gradients longer and shorter than the clip, while the rate rises and after it; eps counts beside their entries.
SIZES = [0.2, 1e-4, 0.05, 3e-3, 1.0, 2e-3]
HELD = dict(
    learning_rate=0.02, schedule="linear", warmup_steps=3, final_ratio=0.1, eps=1e-3, weight_decay=0.3, clip_norm=1.0,
    balance_rate=0.01,
)  # fmt: skip
OPTIMIZER_MODELS = {
    "mla": dict(attention="mla", d_latent_q=16, tied=False, qkv_bias=True),
    "gqa": dict(attention="gqa", qk_norm=True, qkv_bias=True),
    "experts": dict(attention="gqa", layers_of="dense moe", experts=4, d_expert=24, shared_experts=1),
}
OPTIMIZER_MESHES = {"experts": (1, 2, 2, 1, 1, 2)}  # of others: (2, 2, 2)


def orthogonalized(x):
    """Newton and Schulz's five rounds with Jordan's coefficients, on a matrix of norm 1."""
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def norm_of(grads):
    return math.sqrt(sum((grad.astype(np.float64) ** 2).sum() for name, grad in grads.items() if name not in LOADS))


LOADS = ("blocks.moe.mlp.router.bias",)


def is_kernel(name):
    return name.endswith("kernel") or ".experts." in name


class PlainOptimizer:
    """AdamW, or Muon with AdamW for what is no hidden matrix, in float64, a leaf, a layer and an expert at a time."""

    def __init__(self, config, steps, params):
        self.config, self.steps, self.done = config, steps, 0
        self.params = {name: leaf.astype(np.float64) for name, leaf in params.items()}
        self.mean = {name: np.zeros_like(leaf) for name, leaf in self.params.items()}
        self.square = {name: np.zeros_like(leaf) for name, leaf in self.params.items()}

    def step(self, grads):
        config, self.done = self.config, self.done + 1
        norm = norm_of(grads)
        warm, after = config.warmup_steps, (self.done - self.config.warmup_steps) / (self.steps - config.warmup_steps)
        share = self.done / warm if self.done <= warm else 1 + (config.final_ratio - 1) * after
        for name, leaf in self.params.items():
            if name in LOADS:
                mean = grads[name].mean(axis=-1, keepdims=True)
                self.params[name] = leaf + config.balance_rate * np.sign(mean - grads[name])
                continue
            grad = grads[name].astype(np.float64) * min(1, config.clip_norm / norm)
            hidden = is_kernel(name) and config.name == "muon"
            direction = self.muon(name, grad) if hidden else self.adam(name, grad)
            if is_kernel(name) or name.endswith("table"):
                direction = direction + config.weight_decay * leaf
            self.params[name] = leaf - config.learning_rate * share * direction

    def adam(self, name, grad):
        b1, b2, t = self.config.b1, self.config.b2, self.done
        mean = self.mean[name] = b1 * self.mean[name] + (1 - b1) * grad
        square = self.square[name] = b2 * self.square[name] + (1 - b2) * grad**2
        return mean / (1 - b1**t) / (np.sqrt(square / (1 - b2**t)) + self.config.eps)

    def muon(self, name, grad):
        beta, t = self.config.muon_momentum, self.done
        mean = self.mean[name] = beta * self.mean[name] + (1 - beta) * grad
        ahead = beta * mean / (1 - beta ** (t + 1)) + (1 - beta) * grad / (1 - beta**t)  # Nesterov's, both unbiased
        inputs = 2 if name.endswith("out.kernel") else 1  # of heads and d_head the output kernel reads
        stacked = 2 if ".experts." in name else 1
        rows = math.prod(grad.shape[stacked : stacked + inputs])
        matrices = ahead.reshape(math.prod(grad.shape[:stacked]), rows, -1)
        return np.stack([0.2 * math.sqrt(max(x.shape)) * orthogonalized(x) for x in matrices]).reshape(grad.shape)


def parameters_by_name(params):
    return {name: np.asarray(leaf) for name, leaf in flatten(params).items()}


@functools.cache
def optimizer_model(attention):
    return build(OPTIMIZER_MESHES.get(attention, (2, 2, 2)), layers=2, **OPTIMIZER_MODELS[attention])


def random_leaves(model, size, seed):
    rng = np.random.default_rng(seed)
    leaves = jax.tree.map(lambda leaf: size * rng.normal(size=leaf.shape).astype(np.float32), model.shapes)
    return jax.tree.map(jax.device_put, leaves, model.shardings)


def first_state(model, tx, params):
    return jax.jit(tx.init, out_shardings=state_shardings(model, tx).opt_state)(params)


def assert_moved_alike(found, expected, before):
    """Each leaf has moved as it should, to 2e-4 of its largest move.

    Newton and Schulz's rounds multiply what float32 rounds by up to 3.4445^5 = 485, times 6e-8: 3e-5. A parameter
    near 2 is rounded by 1e-7, which is 1e-4 of the smallest moves here. What an optimizer does wrong shows in tenths.
    """
    for name, leaf in expected.items():
        moved, should = found[name] - before[name], leaf - before[name]
        off = np.abs(moved - should).max() / np.abs(should).max()
        assert off < 2e-4, f"{name} is off by {off:.1e} of its move"


@pytest.mark.fast(1)
@pytest.mark.parametrize("attention", OPTIMIZER_MODELS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_leaf_is_updated_as_plain_numpy_does(optimizer, attention):
    config = optimizer_config(name=optimizer, **HELD)
    model = optimizer_model(attention).replace(optimizer=config)
    step = TrainStep(model, make_optimizer(config, len(SIZES), model.plan.rows), seed=0)
    params = random_leaves(model, 1.0, seed=99)
    opt_state = first_state(model, step.tx, params)
    plain = PlainOptimizer(config, len(SIZES), parameters_by_name(params))

    @jax.jit
    def update(params, opt_state, grads):
        counts = {name: named_leaves(grads)[name] for name in model.plan.statistics}
        return step.update(params, opt_state, grads, counts, step.grad_norm(grads, counts))

    clipped = []
    for seed, size in enumerate(SIZES):
        grads = random_leaves(model, size, seed)
        on_host = parameters_by_name(grads)
        clipped.append(norm_of(on_host) > config.clip_norm)
        before = parameters_by_name(params)
        plain.params = {name: leaf.astype(np.float64) for name, leaf in before.items()}
        params, opt_state = update(params, opt_state, grads)
        plain.step(on_host)
        assert_moved_alike(parameters_by_name(params), plain.params, before)
    assert {*clipped} == {True, False} and not clipped[1], "some gradients are clipped, one while the rate rises is not"


def as_runs_were_begun(config, model):
    """The optimizers of optax: its Muon gives Nesterov's momentum to its Adam, too."""
    if config.name == "adamw":
        return optax.chain(clip_by_norm(1.0), optax.adamw(lambda count: 0.1))
    dims = jax.tree.map(lambda row: muon_dims(row.spec, row.at_rest), model.plan.rows)
    betas = dict(beta=config.muon_momentum, adam_b1=config.b1, adam_b2=config.b2)
    direction = optax.contrib.muon(-1.0, **betas, muon_weight_dimension_numbers=dims, consistent_rms=0.2)
    update = optax.chain(direction, optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(lambda count: 0.1))
    return optax.chain(clip_by_norm(1.0), update)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("attention", MUON)  # older checkpoints have no experts
def test_states_have_the_names_and_shapes_of_older_checkpoints(optimizer, attention):
    model, config = optimizer_model(attention), optimizer_config(name=optimizer, warmup_steps=0)
    old, new = (
        {name: shape_and_dtype(leaf) for name, leaf in flatten(jax.eval_shape(tx.init, model.shapes)).items()}
        for tx in (as_runs_were_begun(config, model), make_optimizer(config, 10, model.plan.rows))
    )
    assert new == old
    adam = {"adamw": "1.0", "muon": "1.0.inner_states.adam.inner_state.0"}[optimizer]
    assert {"1.2.count", f"{adam}.nu.embedding.table"} < {*new}


@pytest.mark.slow
def test_a_run_that_an_older_muon_began_goes_on_from_the_same_bits_with_the_right_update(tmp_path):
    model, config = optimizer_model("mla"), optimizer_config(name="muon", **HELD)
    old, params = as_runs_were_begun(config, model), random_leaves(model, 1.0, seed=99)
    step = TrainStep(model, make_optimizer(config, 10, model.plan.rows), seed=0)
    like, grads = abstract_state(model, step.tx), random_leaves(model, 0.1, seed=0)
    _, state = jax.jit(old.update)(grads, first_state(model, old, params), params)
    with CheckpointWriter(
        tmp_path, CheckpointConfig(every_steps=1, keep_last=1, keep_best=0), settings=SETTINGS
    ) as saved:
        saved.save(1, {"rest": {"opt_state": state}})
    found = restore(tmp_path, 1, {"rest": {"opt_state": like.opt_state}})["rest"]["opt_state"]
    for name, leaf in flatten(state).items():
        assert np.asarray(flatten(found)[name]).tobytes() == np.asarray(leaf).tobytes(), name
    before = parameters_by_name(params)
    plain = PlainOptimizer(config, 10, before)
    plain.step(parameters_by_name(grads))
    plain.params = {name: leaf.astype(np.float64) for name, leaf in before.items()}
    grads = random_leaves(model, 0.05, seed=1)
    plain.step(parameters_by_name(grads))
    after, _ = jax.jit(lambda p, s, grads: step.update(p, s, grads, {}, global_norm(grads)))(params, found, grads)
    assert_moved_alike(parameters_by_name(after), plain.params, before)


def test_muon_treats_each_stacked_layer_as_a_matrix_of_its_own():
    model = build((1, 1, 1), layers=3)
    config = optimizer_config(name="muon", learning_rate=0.1, warmup_steps=0, weight_decay=0.0, clip_norm=0.0)
    tx, rng = make_optimizer(config, 10, model.plan.rows), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), model.shapes)
    grads = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), model.shapes)
    step = jax.jit(lambda grads: tx.update(grads, tx.init(params), params)[0]["blocks"]["mlp"]["up"]["kernel"])
    first = step(grads)
    assert np.sum(first * grads["blocks"]["mlp"]["up"]["kernel"]) < 0, "downhill"
    grads["blocks"]["mlp"]["up"]["kernel"][0] *= -1
    second = step(grads)
    np.testing.assert_allclose(first[1:], second[1:], atol=1e-6)
    np.testing.assert_allclose(first[0], -second[0], atol=1e-6)
    # Orthogonal rows up to Newton and Schulz's five rounds, which end with singular values around 1.
    singular = np.linalg.svd(first[0], compute_uv=False)
    assert singular.max() / singular.min() < 2.5


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimizer_states_are_cut_as_their_parameters_are(optimizer):
    model = build((2, 2, 2), tied=False)
    tx = make_optimizer(optimizer_config(name=optimizer, warmup_steps=0), 10, model.plan.rows)
    state = init_state(model, tx, seed=0)
    by_name = {jax.tree_util.keystr(path): s for path, s in jax.tree_util.tree_leaves_with_path(model.shardings)}
    moments = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        of = [sharding for name, sharding in by_name.items() if jax.tree_util.keystr(path).endswith(name)]
        expected = of[0].spec if of else jax.sharding.PartitionSpec()
        assert leaf.sharding.is_equivalent_to(jax.sharding.NamedSharding(model.mesh, expected), leaf.ndim)
        moments += bool(of)
    matrices = sum(muon_dims(row.spec, row.at_rest) is not None for row in jax.tree.leaves(model.plan.rows))
    # AdamW keeps two moments of each parameter, Muon one of each matrix.
    assert moments == 2 * len(by_name) - (matrices if optimizer == "muon" else 0)
    planned = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, tx))
    assert jax.tree.all(jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), state, planned))


OTHERS = {
    "muon of optax": optax.contrib.muon(1e-3),
    "factored": optax.adafactor(1e-3, min_dim_size_to_factor=2),
    "of one part": optax.masked(optax.adam(1e-3), {"blocks": True, "embedding": False, "head": False}),
    "injected": optax.inject_hyperparams(optax.sgd)(1e-3, momentum=0.9),
}


@pytest.mark.parametrize("name", OTHERS)
def test_states_of_other_optimizers_lie_as_their_parameters_where_they_have_their_shape(name):
    """The oracle knows a parameter by the end of a path."""
    model = build((2, 2, 2))
    params, placed = flatten(model.shapes), 0
    for path, leaf in flatten(abstract_state(model, OTHERS[name]).opt_state).items():
        own = next((name for name in params if path.endswith(f".{name}")), None)
        cut = own is not None and leaf.shape == params[own].shape
        placed += cut
        assert leaf.sharding.spec == (flatten(model.shardings)[own].spec if cut else P()), path
    assert placed
