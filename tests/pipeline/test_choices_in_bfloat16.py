"""Models of many choices in bfloat16: products and the stream stay in it, and a mesh is as near to what is exact as
one device."""

import functools

import jax
import numpy as np
import pytest
from support.plain_model import plain_losses_and_grad
from support.tiny_model import ROWS, SEQ, SEQ_CUT, build, make_batch, params_of
from test_block_choices import LIKE
from test_choices import ALL, EXPERTS
from test_parity import Z_COEFFICIENT

from parallax.analysis.traced.memory import memory
from parallax.jaxprs import within
from parallax.sharding.layout import named_leaves

HALF = dict(dtype="bfloat16", attention="gqa", layers=4)
MODELS = {name: HALF | LIKE[name] for name in ("Gemma", "GPT-NeoX", "OLMo 2")} | {"all": HALF | ALL | EXPERTS}


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["Gemma", "GPT-NeoX", "all"])
def test_products_and_the_stream_are_in_bfloat16(name):
    """But for a router's three products, in float32."""
    model = build((1, 1, 1), remat="layer", microbatches=1, **MODELS[name])
    traced = jax.make_jaxpr(model.loss_and_grad)(model.shapes, make_batch())
    products = (one for top in traced.eqns for one in within(top) if "dot" in one.primitive.name)
    operands = [operand.aval.dtype.name for one in products for operand in one.invars[:2]]
    assert {*operands} <= {"bfloat16", "float32"} and operands.count("float32") == (2 * 4 if name == "all" else 0)
    saved = memory(model, {}, global_batch=ROWS, seq=SEQ).saved_activations
    assert saved == 2 * model.config.d_model * model.config.layers * ROWS * SEQ


CASES = {
    "ring": ("Gemma", dict(mesh=(2, 1, 2, 1, 2), context="ring", schedule="zero_bubble", remat="none")),
    "sets": ("Gemma", dict(mesh=(1, 2, 2), remat="down norm", residual=SEQ_CUT, prefetch=1, reduce="compute")),
    "heads": ("GPT-NeoX", dict(mesh=(1, 2, 2, 1, 2), context="ulysses", remat="norm", policy="lean")),
    "scatter": ("OLMo 2", dict(mesh=(2, 2, 2), tensor_parallel="scatter", schedule="dualpipe_v", policy="zero1")),
    "streams": ("OLMo 2", dict(mesh=(2, 1, 4), tensor_parallel="streams", residual=SEQ_CUT, schedule="zero_bubble")),
    "experts": ("all", dict(mesh=(2, 1, 2, 1, 1, 2), exchange="ragged", schedule="zero_bubble_v", remat="router ffn")),
}


@functools.cache
def exact(name):
    """In float64, of weights as they are stored."""
    model = build((1, 1, 1), **MODELS[name])
    losses, grads = plain_losses_and_grad(model.config, params_of(model), make_batch(), Z_COEFFICIENT)
    return losses, named_leaves(grads)


@functools.cache
def errors(name, **how):
    """Of the losses, and of each gradient's norm."""
    model = build(**dict(mesh=(1, 1, 1)) | how, z_coefficient=Z_COEFFICIENT, **MODELS[name])
    metrics, grads = jax.device_get(jax.jit(model.loss_and_grad)(params_of(model), make_batch()))
    losses, expected = exact(name)
    wrong = {
        at: np.linalg.norm(leaf - expected[at]) / np.linalg.norm(expected[at])
        for at, leaf in named_leaves(grads).items()
        if leaf.size and not at.endswith("router/bias")
    }
    return np.abs(np.array([metrics["loss"], metrics["z_loss"]]) / losses - 1).max(), wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_mesh_is_as_near_to_the_exact_gradients_as_one_device(name):
    """In a mixture, too, where rounding takes a few tokens to another expert: its errors are three times as large."""
    model, how = CASES[name]
    (loss, alone), (loss_here, here) = errors(model), errors(model, **how)
    assert max(loss, loss_here) <= 2**-12
    assert {at for at in here if here[at] > 1.5 * alone[at] + 2**-8} == set()
