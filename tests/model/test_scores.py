"""Scores with a soft cap, and softmax with sinks: each kernel computes the plain form, and its gradients; what has
neither, or would ignore a choice, says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import model_config, settings_of
from support.user_parts import CoolGQA

from parallax.config.settings import read_settings, with_code
from parallax.errors import ConfigError
from parallax.model.attention import attend, attend_to_cache
from parallax.model.checks import check_kernel_on
from parallax.model.heads_norm import HeadsNorm
from parallax.model.kernels.choice import chosen_kernel
from parallax.model.logits import LogitForm
from parallax.model.mask import Mask
from parallax.model.norm import RMSNorm

ROWS, SEQ, HEADS, GROUPS, WIDTH, SCALE = 2, 128, 4, 2, 8, 0.5
# Sums over up to 128 float32 terms in another order.
ERROR = 2e-6


def plain(q, k, v, segments, cap, sinks):
    """A softmax over whole rows of scores, and one more score for each head."""
    k, v = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (k, v))
    seen = (segments[:, :, None] == segments[:, None, :]) & np.tri(SEQ, dtype=bool)[None]
    scores = SCALE * jnp.einsum("BSHJ,BTHJ->BHST", q, k)
    scores = jnp.where(seen[:, None], cap * jnp.tanh(scores / cap) if cap else scores, -jnp.inf)
    if sinks is not None:
        more = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, more], axis=-1)
    return jnp.einsum("BHST,BTHK->BSHK", jax.nn.softmax(scores, axis=-1)[..., :SEQ], v)


ONE_CHOICE = [pytest.param(1.5, False, marks=pytest.mark.slow), pytest.param(0.0, True, marks=pytest.mark.slow)]


@pytest.mark.parametrize("form", ["xla", "cached", "splash", "triton"])
@pytest.mark.parametrize(("cap", "with_sinks"), [(1.5, True), *ONE_CHOICE])
def test_each_kernel_has_caps_and_sinks_as_the_plain_form_has(form, cap, with_sinks):
    rng = np.random.default_rng(0)
    shapes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, WIDTH), (HEADS, WIDTH))
    q, k, v, weight = (rng.normal(size=(ROWS, SEQ, *shape)).astype(np.float32) for shape in shapes)
    segments = np.cumsum(rng.random((ROWS, SEQ)) < 0.05, axis=1).astype(np.int32)
    sinks = rng.normal(size=HEADS).astype(np.float32) if with_sinks else None

    def loss(kernel, q, k, v, sinks):
        about = dict(scale=SCALE, cap=cap, sinks=sinks)
        if kernel is None:
            out = plain(q, k, v, segments, cap, sinks)
        elif kernel == "cached":
            k, v = (x.swapaxes(1, 2) for x in (k, v))
            out = attend_to_cache([(q, k)], v, Mask(segments, cursor=0), **about)
        else:
            out = attend(q, k, v, Mask(segments), kernel=kernel, **about)
        return (weight * out).sum(), out

    given = (q, k, v, *([sinks] if with_sinks else []))
    run = lambda kernel: jax.grad(  # noqa: E731
        lambda *given: loss(kernel, *given, *([] if with_sinks else [None])), range(len(given)), has_aux=True
    )
    found, expected = (jax.tree.leaves(jax.jit(run(each))(*given)) for each in (form, None))
    for actual, wanted in zip(found, expected, strict=True):
        assert np.abs(actual - wanted).max() < ERROR * max(1, np.abs(wanted).max())


def test_layers_with_and_without_a_window_have_sinks_in_float32_beside_bfloat16():
    q, k, v = (jnp.zeros((1, 256, heads, WIDTH), jnp.bfloat16) for heads in (HEADS, GROUPS, GROUPS))
    mask = Mask(jnp.zeros((1, 256), jnp.int32), windows=(64, 0), which=jnp.int32(0))

    def loss(sinks):
        return attend(q, k, v, mask, scale=SCALE, kernel="splash", sinks=sinks).sum().astype(jnp.float32)

    assert jax.eval_shape(jax.grad(loss), jnp.zeros(HEADS)).dtype == jnp.float32


@pytest.mark.parametrize("norm", [RMSNorm, HeadsNorm])
def test_heads_are_normed_with_a_factor_of_one_plus_the_parameter_or_with_none(norm):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3, HEADS, WIDTH), (HEADS, WIDTH)))
    w = w if norm is HeadsNorm else w[0]
    axes = (-2, -1) if norm is HeadsNorm else -1
    unit = x / np.sqrt(np.square(x).mean(axes, keepdims=True) + 1e-6)
    for scaling, factor in {"direct": w, "one_plus": 1 + w, "none": np.ones_like(w)}.items():
        layer = norm("batch seq heads d_head", {"heads": HEADS, "d_head": WIDTH}, 1e-6, scaling=scaling)
        params = layer.init(jax.random.key(0), x).get("params", {})
        first = {"direct": [1], "one_plus": [0], "none": []}[scaling]
        assert [float(leaf.value.mean()) for leaf in params.values()] == first
        y = layer.apply({"params": {name: w for name in params}}, x)
        np.testing.assert_allclose(y, unit * factor, rtol=1e-5, atol=1e-6)


def test_logits_have_a_scale_and_then_a_cap():
    logits = np.linspace(-9, 9, 7, dtype=np.float32)
    np.testing.assert_allclose(LogitForm(0.5, 2.0)(logits), 2 * np.tanh(0.5 * logits / 2), rtol=1e-6)


@pytest.mark.parametrize("choice", [{"score_cap": 30.0}, {"sinks": True}], ids=str)
def test_cudnn_refuses_caps_and_sinks_and_auto_is_another(choice):
    model = dict(attention="gqa", d_head=64, dtype="bfloat16", **choice)
    (key,) = choice
    with pytest.raises(ConfigError, match=rf"^model.{key}=\S+ is not in model.kernel='cudnn'; use kernel='triton'"):
        check_kernel_on(model_config(kernel="cudnn", **model), "gpu", "NVIDIA H100")
    device = {"cp": 1}, "gpu", "NVIDIA H100"
    assert chosen_kernel(settings_of(kernel="auto", **model), *device) == "triton"
    assert chosen_kernel(settings_of(kernel="auto", attention="gqa", d_head=64, dtype="bfloat16"), *device) == "cudnn"


NOTHING = {
    "latent heads": (
        dict(attention="mla", rope_fraction=0.5),
        "rope_fraction=0.5 does nothing with",
    ),
    "no norms": (
        dict(attention="gqa", qk_norm_over="projection"),
        "qk_norm_over='projection' does nothing with",
    ),
    "after nothing": (
        dict(attention="gqa", qk_norm_after_rope=True),
        "qk_norm_after_rope=True does nothing with",
    ),
    "a factor of nothing": (
        dict(attention="gqa", qk_norm_scale="one_plus"),
        "qk_norm_scale='one_plus' does nothing with",
    ),
    "nothing shared": (
        dict(layers_of="moe*8", shared_gate=True),
        "shared_gate=True does nothing with",
    ),
    "no limit": (
        dict(layers_of="moe*8", expert_limit=5.0),
        "expert_limit=5.0 does nothing with",
    ),
    "an odd part": (
        dict(attention="gqa", d_head=8, rope_fraction=0.4),
        "d_head=8 with rope_fraction=0.4 rotates 3 dims, and must be even",
    ),
}


@pytest.mark.parametrize("what", NOTHING)
def test_a_choice_that_nothing_reads_is_an_error(what):
    changes, message = NOTHING[what]
    with pytest.raises(ConfigError) as error:
        model_config(**changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_attention_of_ones_own_is_told_of_a_scale_but_not_of_sinks():
    own = with_code(settings_of(attention="gqa", attention_scale=0.2), {"model.attention": CoolGQA})
    with pytest.raises(ConfigError, match=r"model.sinks=True does nothing with model.attention=.*; use False\."):
        read_settings(own, model={"sinks": True})
