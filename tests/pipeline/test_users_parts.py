"""Parts of a user's own, named in a config or given as objects: the same loss, gradients and step on every mesh."""

import functools

import jax
import pytest
from support import user_parts
from support.tiny_model import build, make_batch, mesh_of, params_of, settings_of
from test_parity import GRADIENT_ERROR, LOSS_ERROR, leaf_errors

from parallax.config.settings import read_settings, with_code
from parallax.model import attention
from parallax.step.step import model_of

PARTS = {
    "model.mlp": (user_parts.SquaredMLP, {}),
    "model.norm": (user_parts.ScaledNorm, {}),
    "model.attention": (user_parts.CoolGQA, {}),
    "model.dense": (user_parts.LoRA, {}),
    "model.kinds": ({"side": user_parts.ParallelBlock}, {"layers_of": "(dense side)*4"}),
    "loss.name": (user_parts.focal, {"z_coefficient": 1e-3}),
    "data_parallel.policy": (user_parts.wide_gathered, {}),
    "pipeline.schedule": (user_parts.eager, {}),
}
FORMS = [
    ((2, 2, 2), {}),
    ((1, 2, 2), {"tensor_parallel": "scatter", "residual": "batch/dp seq/tp d_model"}),
    ((4, 1, 2), {"remat": "norm swiglu ffn"}),
]
STEP = {
    "optimizer": {"warmup_steps": 0, "clip_norm": 0.0},
    "train": {"steps": 4},
    "data": {"seq": 16, "global_batch": 64},
}


def settings_with(key, mesh, **changes):
    """The tiny model with this part."""
    code, others = PARTS[key]
    kept = {"schedule": "zero_bubble"} if mesh[0] > 1 and key != "pipeline.schedule" else {}
    base = settings_of(attention="gqa", **kept, **changes)
    if "layers_of" in others:  # only with the classes of its kinds
        return read_settings(base, model={"kinds": code, **others})
    return with_code(read_settings(base, loss=others) if others else base, {key: code})


def alone(key):
    """The model on one device."""
    # On one rank a schedule is gradient accumulation.
    settings = settings_of(attention="gqa") if key == "pipeline.schedule" else settings_with(key, (1, 1, 1))
    return model_of(settings, mesh_of(1, 1, 1))


@pytest.fixture(scope="module")
def whole():
    """Loss and gradients of one device."""

    @functools.cache
    def of(key):
        model = alone(key)
        return jax.device_get(jax.jit(model.loss_and_grad)(params_of(model), make_batch()))

    return of


def loss_of(model):
    return float(jax.jit(model.loss)(params_of(model), make_batch())["loss"])


@pytest.fixture(scope="module")
def plain_loss():
    """Without a part of one's own."""
    return loss_of(build((1, 1, 1), attention="gqa"))


@pytest.mark.fast(3)
@pytest.mark.parametrize(("mesh", "changes"), FORMS, ids=str)
@pytest.mark.parametrize("key", PARTS)
def test_loss_and_gradients_are_those_of_one_device(key, mesh, changes, whole):
    if key == "pipeline.schedule" and mesh[0] == 1:
        mesh = (2, *mesh[1:])
    model = model_of(settings_with(key, mesh, **changes), mesh_of(*mesh))
    expected, actual = whole(key), jax.device_get(jax.jit(model.loss_and_grad)(params_of(model), make_batch()))
    assert abs(actual[0]["loss"] / expected[0]["loss"] - 1) <= LOSS_ERROR
    assert max(leaf_errors(actual[1], expected[1]).values()) <= GRADIENT_ERROR


@pytest.mark.fast(1)
def test_attention_of_ones_own_scales_once_where_queries_are_scaled_first(whole, monkeypatch):
    """Its scale is another, and so is the factor of its queries."""
    key, asked = "model.attention", []
    expected = whole(key)
    monkeypatch.setattr(attention, "scales_queries_first", lambda: asked.append(True) or True)
    model = model_of(settings_with(key, (2, 2, 2)), mesh_of(2, 2, 2))
    loss, gradients = jax.device_get(jax.jit(model.loss_and_grad)(params_of(model), make_batch()))
    assert asked and abs(loss["loss"] / expected[0]["loss"] - 1) <= LOSS_ERROR
    assert max(leaf_errors(gradients, expected[1]).values()) <= GRADIENT_ERROR


@pytest.mark.parametrize("key", [key for key in PARTS if key not in ("data_parallel.policy", "pipeline.schedule")])
def test_a_part_of_ones_own_is_used(key, plain_loss):
    assert abs(loss_of(alone(key)) - plain_loss) > 1e-4


@pytest.mark.parametrize(
    "model", [{"attention": "mla"}, {"attention": "gqa", "layers_of": "moe*8", "shared_experts": 1}]
)
def test_a_dense_of_ones_own_is_in_every_projection_that_may_be_one(model):
    settings = with_code(settings_of(**model, layers=8), {"model.dense": user_parts.LoRA})
    blocks = model_of(settings, mesh_of(1, 1, 1)).plan.rows["blocks"]
    lacking = {"up_k", "up_v"} if model["attention"] == "mla" else set()
    assert {name for name, rows in blocks["attention"].items() if "kernel" in rows and "a" not in rows} == lacking
    if "layers_of" in model:
        assert all("a" in rows for rows in blocks["mlp"]["shared"].values())
