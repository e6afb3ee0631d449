"""A layer cut over a mesh computes what it computes alone: outputs, and gradients in parameters and input."""

import functools

import jax
import numpy as np
import pytest
from support.sharded_layers import (
    IN_FAMILIES,
    SIZES,
    call,
    declared,
    on_mesh,
    residual_layers,
    value_and_grads,
    windows,
)
from support.tiny_model import HIDDEN_CUT, SEQ_CUT, model_config

from parallax.model.dense import Dense
from parallax.model.families import FAMILIES
from parallax.model.rope import Rope
from parallax.sharding.layout import Layout

# Sums over 4 to 64 float32 terms in another order.
ERROR = 1e-5
MESHES = [(2, 2, 2), (1, 1, 4)]
OF_FAMILIES = ["mlp", "mlp_clamped", "mlp_plain", "gqa", "gqa_bias", "gqa_qk_norm", "mla", "mla_latent_queries"]
OTHERS = [
    "norm",
    "norm_one_plus",
    "layer_norm",
    "embedding_vocab_parallel",
    "embedding_all_to_all",
    "head_vocab_parallel",
    "head_all_to_all",
]
LAYERS = [(name, *cut) for name in OF_FAMILIES for cut in IN_FAMILIES]
LAYERS += [(name, "column_row", residual) for name in OTHERS for residual in (HIDDEN_CUT, SEQ_CUT)]


def rope_for(name):
    model = model_config(attention="gqa" if "gqa" in name else "mla")
    return Rope(model)


def check_equal(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - e).max() <= ERROR * max(np.abs(e).max(), 1e-30)


@functools.cache
def alone(name):
    layer = residual_layers(HIDDEN_CUT, FAMILIES["column_row"])[name]
    _, params = declared(layer, rope_for(name))
    return params, value_and_grads(call(layer, rope_for(name)), params, windows())


def output_layout(name, residual):
    if not name.startswith("head"):
        return residual
    return "batch/dp seq vocab/tp" if name == "head_vocab_parallel" else "batch/dp seq/tp vocab"


def check_cut(name, mesh, residual, family, **changes):
    layer = residual_layers(residual, FAMILIES[family], **changes)[name]
    layouts, _ = declared(layer, rope_for(name))
    params, expected = alone(name)
    function = on_mesh(call(layer, rope_for(name)), layouts, mesh, residual, output_layout(name, residual))
    check_equal(value_and_grads(function, params, windows()), expected)


@pytest.mark.fast(5)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("name", "family", "residual"), LAYERS)
def test_a_layer_is_the_same_on_every_mesh(name, family, residual, mesh):
    check_cut(name, mesh, residual, family)


@pytest.mark.fast(4)
@pytest.mark.parametrize("name", ["gqa", "gqa_bias", "gqa_qk_norm"])
@pytest.mark.parametrize(("family", "residual"), IN_FAMILIES)
def test_more_ranks_than_key_heads_read_the_right_ones(name, family, residual):
    check_cut(name, (1, 1, 8), residual, family, kv="kv_heads")


FORMS = {
    "column": ("d_model d_ff/tp", "batch/dp seq d_model", "batch/dp seq d_ff/tp"),
    "row": ("d_ff/tp d_model", "batch/dp seq d_ff/tp", "batch/dp seq d_model/tp"),
    "row_to_seq": ("d_ff/tp d_model", "batch/dp seq d_ff/tp", "batch/dp seq/tp d_model"),
    "scatter": ("d_model/tp d_ff", "batch/dp seq d_model/tp", "batch/dp seq d_ff/tp"),
    "scatter_to_heads": ("d_model/tp heads d_head", "batch/dp seq d_model/tp", "batch/dp seq heads/tp d_head"),
    "two_axes": ("d_model d_ff/tp/pp", "batch/dp seq d_model", "batch/dp seq d_ff/tp/pp"),
    "from_heads": ("heads/tp d_head d_model", "batch/dp seq heads/tp d_head", "batch/dp seq d_model/tp"),
}


@pytest.mark.fast(6)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_dense_is_a_matrix_product_whatever_its_form(form, bias):
    weight, x_layout, y_layout = FORMS[form]
    layer = Dense(weight, x_layout, y_layout, SIZES, bias=bias)
    shape = [SIZES[word.split("/")[0]] for word in x_layout.split()]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    _, *rest = windows()
    rng, kernel_shape = np.random.default_rng(2), [SIZES[word.split("/")[0]] for word in weight.split()]
    params = {"kernel": rng.normal(size=kernel_shape).astype(np.float32)}
    layouts = {"kernel": Layout.parse(weight)}
    contracted = 2 if form == "from_heads" else 1
    expected = np.tensordot(x, params["kernel"], contracted)
    if bias:
        params["bias"] = rng.normal(size=expected.shape[2:]).astype(np.float32)
        layouts["bias"] = Layout.parse(" ".join(y_layout.split()[2:]).replace("/dp", ""))
        expected = expected + params["bias"]
    function = on_mesh(call(layer, None), layouts, (2, 2, 2), x_layout, y_layout)
    single = value_and_grads(call(layer, None), params, (x, *rest))
    check_equal(single[0], expected)
    check_equal(value_and_grads(function, params, (x, *rest)), single)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "residual"), IN_FAMILIES)
@pytest.mark.parametrize("name", ["mla", "mla_latent_queries"])
def test_parts_that_are_joined_by_adding_are_the_same(monkeypatch, name, family, residual):
    """As on TPU; the layer alone joins them side by side."""
    alone(name)
    asked = []
    monkeypatch.setattr("parallax.model.mla.joins_by_adding", lambda: asked.append(True) or True)
    check_cut(name, (2, 2, 2), residual, family)
    assert asked
