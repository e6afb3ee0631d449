"""Weights that travel in 8 bits are those of a model whose matrices were rounded whole, on every mesh."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.plain_model import plain_losses_and_grad, without_close_choices
from support.step_collectives import step_collectives
from support.tiny_model import SCHEDULES, build, make_batch, params_of
from test_experts import mixture, step_on
from test_parity import GRADIENT_ERROR, LOSS_ERROR, Z_COEFFICIENT, leaf_errors

from parallax.config.sections import AXES
from parallax.sharding.collectives import as_varying
from parallax.sharding.layout import named_leaves

KINDS = {"int8": (jnp.int8, 127), "float8": (jnp.float8_e4m3fn, 448)}


def rounded(x, kind):
    """A matrix in 8 bits over its largest entry, float32."""
    dtype, most = KINDS[kind]
    scale = np.float32(np.abs(x).max()) * np.float32(1 / most)
    over = np.clip(np.float32(x) * (np.float32(1) / scale), -most, most)
    return np.float32((np.rint(over) if kind == "int8" else over).astype(dtype)) * scale


def rounded_layers(params, kind):
    """Each matrix of each layer in 8 bits, experts together; norms, routers and tables as they are."""

    def leaf(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        is_rounded = (name.startswith("blocks/") and name.endswith("kernel")) or "experts" in name
        stays = "router" in name or not is_rounded
        return np.asarray(x) if stays else np.stack([rounded(one, kind) for one in np.asarray(x)])

    return jax.tree_util.tree_map_with_path(leaf, params)


CASES = {
    "ddp": dict(mesh=(1, 2, 2), attention="gqa", policy="ddp", gather_dtype="int8"),
    "alone": dict(mesh=(1, 1, 1), attention="gqa", gather_dtype="int8"),
    "zero1": dict(mesh=(2, 2, 2), attention="mla", policy="zero1", schedule="one_f_one_b", gather_dtype="float8"),
    "lean": dict(mesh=(1, 4, 2), attention="mla", policy="lean", gather_dtype="int8"),
    "zero3": dict(mesh=(2, 2, 2), attention="gqa", schedule="zero_bubble", prefetch=1, gather_dtype="float8"),
    "out of order": dict(mesh=(2, 2, 1), attention="gqa", schedule="interleaved", gather_dtype="int8"),
    "context": dict(mesh=(1, 1, 2, 2, 2), attention="gqa", reduce="compute", gather_dtype="int8"),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_weights_that_were_rounded_whole(name):
    case = dict(microbatches=4) | SCHEDULES.get(CASES[name].get("schedule"), {}) | CASES[name]
    model, batch = build(**case), make_batch()
    params = params_of(model)
    metrics, grads = jax.tree.map(np.asarray, jax.jit(model.loss_and_grad)(params, batch))
    losses, expected = plain_losses_and_grad(model.config, rounded_layers(params, case["gather_dtype"]), batch)
    np.testing.assert_allclose(metrics["loss"], losses[0], rtol=LOSS_ERROR)
    assert {at: error for at, error in leaf_errors(grads, expected).items() if not error <= GRADIENT_ERROR} == {}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_computes_with_is_bitwise_the_whole_rounded(kind):
    """In bfloat16, where what is rounded was cast before."""
    model = build((1, 2, 2), attention="gqa", dtype="bfloat16", gather_dtype=kind)
    params, rows = params_of(model), model.plan.rows["blocks"]

    def first_layer(params):
        blocks = model.plan.load(params)["blocks"]
        layer = model.plan.use(jax.tree.map(lambda x: x[0], blocks), "blocks")
        return jax.tree.map(lambda x: as_varying(x)[None], layer)

    specs = jax.tree.map(lambda sharding: sharding.spec, model.shardings)
    run = jax.shard_map(first_layer, mesh=model.mesh, in_specs=(specs,), out_specs=P(AXES), check_vma=True)
    found, before, compared = named_leaves(jax.jit(run)(params)), named_leaves(params["blocks"]), 0
    for name, row in named_leaves(rows).items():
        if row.dtype:
            whole = rounded(np.asarray(before[name][0]).astype(jnp.bfloat16), kind).astype(jnp.bfloat16)
            by_tp = next(dim for dim, axes in enumerate(row.compute.axes[1:]) if "tp" in axes)
            np.testing.assert_array_equal(found[name], [*np.split(whole, 2, by_tp)] * 2, err_msg=name)
            compared += 1
    assert compared == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alike", "dense first"])
def test_experts_travel_so_too(name):
    model = mixture((1, 2, 1, 1, 1, 2), name, microbatches=4, gather_dtype="int8")
    params = params_of(model)
    whole = rounded_layers(params, "int8")
    batches = [make_batch(32, seed=seed) for seed in range(8)]
    batch = without_close_choices(model.config, whole, batches)
    losses, grads, _ = step_on(model)(params, batch)
    expected = plain_losses_and_grad(model.config, whole, batch, Z_COEFFICIENT, model.loss_config)
    np.testing.assert_allclose(losses, expected[0], rtol=LOSS_ERROR)
    assert {at: error for at, error in leaf_errors(grads, expected[1]).items() if not error <= GRADIENT_ERROR} == {}


@pytest.mark.slow
def test_matrices_of_layers_are_sent_in_a_quarter_of_the_bytes():
    """Of float32; and the largest entries of a layer's seven matrices as a number each."""

    def sent(kind):
        model = build((1, 4, 2), attention="gqa", gather_dtype=kind)
        return step_collectives(model, 64, 16)

    def gathered(found):
        layers = [one for one in found if one.kind == "all-gather" and one.axes == ("dp",)]
        return Counter({one.module: one.total_bytes for one in layers if "/" in one.module})

    narrow, wide = sent("int8"), sent("compute")
    assert gathered(wide) == {module: 4 * count for module, count in gathered(narrow).items()}
    assert len(gathered(wide)) == 7
    largest = [one for one in narrow if one.kind == "all-reduce" and one not in wide]
    # Seven eighths of the numbers, in whole bytes, there and back; for each layer and microbatch, forward and backward.
    assert {one.bytes for one in largest} == {2 * -(-7 * 7 * 4 // 8)}
    assert sum(one.count for one in largest) == 2 * 8 * 4
