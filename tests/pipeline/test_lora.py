"""Adapters: the same loss and gradients on every mesh, of adapters alone, with a base in any dtype at rest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import build, make_batch
from test_parity import GRADIENT_ERROR, LOSS_ERROR, leaf_errors

from parallax.errors import ConfigError
from parallax.sharding.layout import named_leaves

SMALL = dict(layers=4, microbatches=2, lora_rank=4)
MIXED = SMALL | dict(attention="gqa", layers_of="(dense moe)*2", experts=4, shared_experts=1, d_expert=16)
MIXED |= dict(expert_bias=True)
MLA = SMALL | dict(attention="mla", d_latent_q=8)
SEQ_CUT = "batch/dp seq/tp d_model"
FEW = SMALL | dict(layers=2, microbatches=1, attention="gqa")
CASES = [
    (FEW, (1, 2, 2), {}),
    (FEW | dict(layers_of="moe*2", experts=4, d_expert=16), (1, 2, 2), {}),
    (MIXED, (2, 1, 2, 1, 1, 2), {"schedule": "zero_bubble"}),
    (MIXED, (1, 1, 2, 1, 1, 4), {"exchange": "ragged", "residual": SEQ_CUT}),
    (MIXED, (1, 2, 2, 1, 2), {"tensor_parallel": "scatter", "policy": "zero2"}),
    (MIXED, (2, 2, 1), {"schedule": "one_f_one_b", "policy": "ddp", "remat": "none"}),
    (MLA, (2, 2, 2), {"schedule": "dualpipe_v", "tensor_parallel": "scatter", "residual": SEQ_CUT}),
    (MLA, (1, 1, 8), {"remat": "norm swiglu ffn"}),
    (MLA, (4, 1, 2), {"schedule": "interleaved", "virtual": 1, "policy": "zero1"}),
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
    """Loss and gradients on one device, of the numbers that a base in 8 bits stands for."""
    model = build((1, 1, 1), **dict(case))
    return jax.device_get(jax.jit(model.loss_and_grad)(put(model, initial(case, base)[1]), make_batch()))


@pytest.mark.fast(1)
@pytest.mark.parametrize("base", ["int8", "float32", "float8"])
@pytest.mark.parametrize(("model", "mesh", "changes"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_one_device(model, mesh, changes, base):
    case = tuple(model.items())
    here = build(mesh, **model, **changes, lora_base=base)
    loss, grads = jax.device_get(jax.jit(here.loss_and_grad)(put(here, initial(case, base)[0]), make_batch()))
    expected, of_adapters = whole(case, base)
    assert abs(loss["loss"] / expected["loss"] - 1) <= LOSS_ERROR
    trained = {name for name, grad in named_leaves(grads).items() if grad.size}
    assert trained == {name for name, row in named_leaves(here.plan.rows).items() if row.spec.adapts}
    assert all(np.abs(grad).max() > 0 for name, grad in named_leaves(grads).items() if name in trained)
    there = {name: grad for name, grad in named_leaves(of_adapters).items() if name in trained}
    assert max(leaf_errors({name: named_leaves(grads)[name] for name in there}, there).values()) <= GRADIENT_ERROR


def test_only_adapters_are_trained_and_what_rests_is_as_the_config_says():
    rows = named_leaves(build((1, 1, 1), **MIXED, lora_base="int8").plan.rows)
    shapes = named_leaves(build((1, 1, 1), **MIXED, lora_base="int8").shapes)
    dtypes = {name: shapes[name].dtype for name in rows}
    assert all(row.spec.is_trained == bool(row.spec.adapts) for row in rows.values())
    assert all(dtypes[name] == jnp.int8 for name, row in rows.items() if row.spec.unit)
    assert {name.rpartition("/")[2] for name, dtype in dtypes.items() if dtype == jnp.float32} >= {"lora_a", "unit"}
    assert dtypes["embedding/table"] == jnp.bfloat16 and dtypes["blocks/moe/mlp/experts/up"] == jnp.int8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lora_rank=0, lora_base="int8"), "model.lora_base='int8' does nothing with model.lora_rank=0"),
        (dict(lora_base="int8", matmul="int8"), "which model.matmul='int8' would round again"),
        (dict(lora_on="attention/w"), "no product in 'attention/w' may have an adapter"),
        (dict(lora_on="mlp/router"), "no product in 'mlp/router' may have an adapter"),
    ],
)
def test_what_adapters_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build((1, 1, 1), **(MIXED | changes))
