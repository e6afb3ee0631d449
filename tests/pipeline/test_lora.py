"""Adapters: the same loss and gradients on every mesh, of adapters alone, with a base in any dtype at rest."""

import functools
import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cached_logits import decoded_logits
from support.collective_order import run_in_order
from support.plain_model import plain_losses_and_grad
from support.tiny_model import build, make_batch, model_config
from test_parity import GRADIENT_ERROR, LOSS_ERROR, leaf_errors

from parallax.errors import ConfigError
from parallax.inference.decode import Prompts
from parallax.model.context import Context
from parallax.model.dropout import Dropout
from parallax.model.lora import LoRA, noise_of
from parallax.pipeline.embed_and_head import DROPOUT
from parallax.sharding.layout import named_leaves

SMALL = dict(layers=4, microbatches=2, lora_rank=4)
MIXED = SMALL | dict(attention="gqa", layers_of="(dense moe)*2", experts=4, shared_experts=1, d_expert=16)
MIXED |= dict(expert_bias=True)
MLA = SMALL | dict(attention="mla", d_latent_q=8, activation="clamped", activation_limit=0.5)
SEQ_CUT = "batch/dp seq/tp d_model"
TOKENS = "batch seq d_model"
NOISE = np.array([0, 3], np.int32)  # of dropout
FEW = SMALL | dict(layers=2, microbatches=1, attention="gqa")
DROPPED = dict(lora_dropout=0.25)
CASES = [
    (FEW | DROPPED, (1, 2, 2), {}),
    (FEW | DROPPED, (1, 1, 2, 1, 2), {"residual": SEQ_CUT, "remat": "none"}),
    (MIXED | DROPPED | dict(lora_on="attention mlp/shared"), (2, 1, 2, 1, 1, 2), {"schedule": "zero_bubble"}),
    (FEW | dict(layers_of="moe*2", experts=4, d_expert=16), (1, 2, 2), {}),
    (MIXED, (2, 1, 2, 1, 1, 2), {"schedule": "zero_bubble"}),
    (MIXED, (1, 1, 2, 1, 1, 4), {"exchange": "ragged", "residual": SEQ_CUT}),
    (MIXED, (1, 2, 2, 1, 2), {"tensor_parallel": "scatter", "policy": "zero2"}),
    (MIXED, (2, 2, 1), {"schedule": "one_f_one_b", "policy": "ddp", "remat": "none"}),
    (MLA | DROPPED, (2, 2, 2), {"schedule": "dualpipe_v", "tensor_parallel": "scatter", "residual": SEQ_CUT}),
    (MLA, (1, 1, 8), {"remat": "norm swiglu ffn"}),
    (MLA, (4, 1, 2), {"schedule": "interleaved", "virtual": 1, "policy": "zero1"}),
]
# Replicas, and context ranks in each form.
CASES += [
    pytest.param(model, mesh, {"context": context} | changes, marks=pytest.mark.slow)
    for model, mesh, context, changes in (
        (MIXED, (1, 1, 1, 2, 2, 2), "ring", {"remat": "none"}),
        (SMALL | DROPPED | dict(attention="gqa"), (2, 1, 1, 2, 2), "ulysses", {"schedule": "one_f_one_b"}),
        (MLA | DROPPED | dict(sliding_window=3), (1, 1, 2, 1, 4), "all_gather", {}),
    )
]


@functools.cache
def initial(case, base):
    """Values with adapters that add something, and the same with kernels as the numbers that their 8 bits stand for."""
    model = build((1, 1, 1), **dict(case), lora_base=base)
    rng, rows = np.random.default_rng(1), named_leaves(model.plan.rows)
    values = {name: np.asarray(leaf) for name, leaf in named_leaves(model.init(0)).items()}
    wide = {}
    for name, row in rows.items():
        if name.endswith("lora_b"):
            values[name] = rng.normal(0, 0.1, values[name].shape).astype(np.float32)
        wide[name] = values[name].astype(np.float32)
        if row.spec.unit:
            units = values[f"{name.rpartition('/')[0]}/{row.spec.unit}"]
            inputs = [row.at_rest.index(dim) for dim in row.spec.inputs]
            wide[name] = wide[name] * np.expand_dims(units, inputs)
    return values, wide


def put(model, values):
    leaves = {name: values[name] for name in named_leaves(model.shapes)}
    return jax.tree.map(
        jax.device_put, jax.tree.unflatten(jax.tree.structure(model.shapes), leaves.values()), model.shardings
    )


@functools.cache
def whole(case, base):
    """Loss and gradients of the numbers that a base in 8 bits stands for: those of the plain model in float64."""
    model = build((1, 1, 1), **dict(case))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(NOISE[0]), DROPOUT), NOISE[1])
    params, batch = put(model, initial(case, base)[1]), make_batch()
    (loss, _), grads = plain_losses_and_grad(model.config, params, batch, 0.0, model.loss_config, key)
    return loss, grads


@pytest.mark.fast(1)
@pytest.mark.parametrize("base", ["int8", "float32", "float8"])
@pytest.mark.parametrize(("model", "mesh", "changes"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_one_device(model, mesh, changes, base):
    case = tuple(model.items())
    here = build(mesh, **model, **changes, lora_base=base)
    loss, grads = run_in_order(here.loss_and_grad, put(here, initial(case, base)[0]), make_batch(), NOISE)
    expected, of_adapters = whole(case, base)
    assert abs(loss["loss"] / expected - 1) <= LOSS_ERROR
    trained = {name for name, grad in named_leaves(grads).items() if grad.size}
    assert trained == {name for name, row in named_leaves(here.plan.rows).items() if row.spec.adapts}
    assert all(np.abs(grad).max() > 0 for name, grad in named_leaves(grads).items() if name in trained)
    there = {name: grad for name, grad in named_leaves(of_adapters).items() if name in trained}
    errors = leaf_errors({name: named_leaves(grads)[name] for name in there}, there)
    assert max(errors.values()) <= GRADIENT_ERROR, errors


class Both(nn.Module):
    """Two products of one input."""

    @nn.compact
    def __call__(self, x):
        model, layouts = model_config(lora_rank=4, lora_on="*", **DROPPED), ("d_model d_ff", TOKENS, "batch seq d_ff")
        return [LoRA(*layouts, model.sizes, model=model, name=name)(x)[..., :4] for name in ("gate", "up")]


def test_an_adapter_reads_its_input_with_entries_dropped_and_each_another_share():
    x, rows, key = jnp.ones((4, 16, 32)), jnp.arange(4), jax.random.key(0)
    weights = {"kernel": jnp.zeros((32, 64)), "lora_a": jnp.eye(32, 4), "lora_b": jnp.eye(4, 64)}

    @jax.jit
    def run(key):
        return Both().apply({"params": dict(gate=weights, up=weights)} | noise_of(Context(None, rows, key, None)), x)

    gate, up = run(key)
    for name, added in (("gate", gate), ("up", up)):
        drop = Dropout(TOKENS, {"d_model": 32}, 0.25, zlib.crc32(name.encode()) >> 1)
        dropped = jax.jit(drop.apply)({}, x, rows, key)[..., :4]
        np.testing.assert_allclose(added, 4 * dropped, rtol=1e-6)  # alpha / rank = 4
    assert 0.2 < (gate != up).mean() < 0.55  # of independent shares 2 * 0.25 * 0.75
    assert all((added == 4).all() for added in run(None))


def test_only_adapters_are_trained_and_what_rests_is_as_the_config_says():
    rows = named_leaves(build((1, 1, 1), **MIXED, lora_base="int8").plan.rows)
    shapes = named_leaves(build((1, 1, 1), **MIXED, lora_base="int8").shapes)
    dtypes = {name: shapes[name].dtype for name in rows}
    assert all(row.spec.is_trained == bool(row.spec.adapts) for row in rows.values())
    assert all(dtypes[name] == jnp.int8 for name, row in rows.items() if row.spec.unit)
    assert {name.rpartition("/")[2] for name, dtype in dtypes.items() if dtype == jnp.float32} >= {"lora_a", "unit"}
    assert dtypes["embedding/table"] == jnp.bfloat16 and dtypes["blocks/moe/mlp/experts/up"] == jnp.int8


@pytest.mark.parametrize("family", ["column_row", pytest.param("scatter", marks=pytest.mark.slow)])
def test_decoding_in_the_latent_space_has_the_adapters_of_up_projections(family):
    case = (*(FEW | dict(attention="mla", layers=1)).items(),)
    here = build((1, 2, 2), **dict(case), tensor_parallel=family, lora_base="int8")
    values, wide = initial(case, "int8")
    assert {"blocks/attention/up_k/lora_a", "blocks/attention/up_v/lora_b", "blocks/attention/up_k/unit"} <= {*values}
    ids, alone = make_batch()["tokens"][:4], build((1, 1, 1), **dict(case))
    places = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    expected = np.asarray(jax.jit(alone.logits)(put(alone, wide), ids, np.ones_like(ids), places))
    logits = decoded_logits(here, put(here, values), Prompts(ids, np.zeros(len(ids), np.int32)), prefill=7)
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_product_of_experts_alone_may_have_adapters():
    rows = named_leaves(build((1, 1, 1), **MIXED, lora_on="mlp/experts/down").plan.rows)
    assert {name.rpartition("/")[2] for name, row in rows.items() if row.spec.adapts} == {"down_lora_a", "down_lora_b"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lora_rank=0, lora_base="int8"), "model.lora_base='int8' does nothing with model.lora_rank=0"),
        (dict(lora_base="int8", matmul="int8"), "which model.matmul='int8' would round again"),
        (dict(lora_on="attention/w"), "no product in 'attention/w' may have an adapter"),
        (dict(lora_on="mlp/router"), "no product in 'mlp/router' may have an adapter"),
        (dict(lora_dropout=0.1), "model.lora_dropout=0.1 with model.lora_on='attention mlp', which has experts"),
    ],
)
def test_what_adapters_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build((1, 1, 1), **(MIXED | changes))
