"""What one sees inside a model is what it computes: attention maps, the cache, and the loss of each token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.plain_model import plain_logits, plain_parts
from support.tiny_model import build, make_batch, params_of

import parallax as px
from parallax.model.batch import IGNORED
from parallax.model.context import Context
from parallax.model.mask import Mask
from parallax.model.rope import Rope

ROWS, SEQ = 8, 16
CASES = {"mla": {}, "mla_latent_queries": {"d_latent_q": 16}, "gqa": {"attention": "gqa"}, "yarn": {}}
CASES["yarn"] = {"attention": "gqa", "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_seq": 8}


@functools.cache
def seen(case):
    model = build((2, 2, 2), **CASES[case], microbatches=2, layers=2)
    params, batch = params_of(model), make_batch(ROWS, SEQ)
    return model, jax.device_get(params), batch, px.look_inside(model, params, batch)


each_case = pytest.mark.parametrize("case", CASES)


@pytest.mark.fast(2)
@each_case
def test_attention_adds_up_to_1_and_sees_only_what_came_before_in_its_document(case):
    _, _, batch, inside = seen(case)
    np.testing.assert_allclose(inside.attention.sum(axis=-1), 1, atol=1e-6)
    later = np.triu(np.ones((SEQ, SEQ), bool), 1)
    other = batch["segments"][:, :, None] != batch["segments"][:, None, :]
    assert other.any() and not inside.attention[:, :, :, later].any()
    assert not np.moveaxis(inside.attention, 2, -1)[:, other].any()


@pytest.mark.fast(2)
@each_case
def test_the_maps_and_the_cache_make_what_the_layer_makes(case):
    """The first layer's output, from its attention map and what it caches alone."""
    model, params, batch, inside = seen(case)
    block, parts = jax.tree.map(lambda leaf: leaf[0], params["blocks"]), plain_parts(model.config)
    context = Context(Rope(model.config).tables(batch["positions"]), jnp.arange(ROWS), None, Mask(batch["segments"]))
    x = params["embedding"]["table"][batch["tokens"]]
    x = (
        x
        / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + model.config.norm_eps)
        * block["attention_norm"]["scale"]
    )
    layer = parts.blocks["dense"].bind({"params": block}).attention.clone(parent=None)
    expected = layer.apply({"params": block["attention"]}, jnp.asarray(x), context)

    cache = {name: array[0] for name, array in inside.cache.items()}
    if model.config.attention == "mla":
        values = np.einsum("BTR,RHK->BTHK", cache["latent"], block["attention"]["up_v"]["kernel"])
    else:
        values = np.repeat(cache["v"], model.config.heads // model.config.kv_heads, axis=2)
    read = np.einsum("BHST,BTHK->BSHK", inside.attention[0], values)
    made = np.einsum("BSHK,HKD->BSD", read, block["attention"]["out"]["kernel"])
    np.testing.assert_allclose(made, expected, atol=1e-5)


@pytest.mark.parametrize("case", ["mla", "mla_latent_queries"])
def test_the_latent_cache_alone_gives_the_scores_that_the_maps_come_from(case):
    """DeepSeek-V2, section 2.1.2: a key is up_k of the latent, beside the rotated part that all heads share. The scores
    of two keys differ by the logarithm of their weights; so a query's weights lie in the span of what is cached."""
    _, params, batch, inside = seen(case)
    latent, k_rope = inside.cache["latent"][0], inside.cache["k_rope"][0]
    up_k = params["blocks"]["attention"]["up_k"]["kernel"][0]
    for row, segments in enumerate(batch["segments"]):
        for query in np.flatnonzero(segments == segments[-1])[-1:]:
            keys = np.flatnonzero((segments == segments[query]) & (np.arange(SEQ) <= query))
            for head in range(up_k.shape[1]):
                key = np.concatenate([latent[row, keys] @ up_k[:, head], k_rope[row, keys]], axis=-1)
                scores = np.log(inside.attention[0, row, head, query, keys])
                with_offset = np.concatenate([key, np.ones((len(keys), 1))], axis=1)
                found, *_ = np.linalg.lstsq(with_offset, scores, rcond=None)
                np.testing.assert_allclose(with_offset @ found, scores, atol=1e-4)


@pytest.mark.fast(1)
@each_case
def test_the_losses_of_tokens_average_to_the_loss_of_the_mesh(case):
    model, params, batch, inside = seen(case)
    on_mesh = jax.jit(model.loss)(jax.device_put(params, model.shardings), jax.device_put(batch, model.batch_sharding))
    assert abs(inside.loss - float(on_mesh["loss"])) < 1e-5
    assert (np.isnan(inside.losses) == (batch["labels"] == IGNORED)).all()
    np.testing.assert_allclose(
        inside.logits, plain_logits(model.config, jax.tree.map(jnp.asarray, params), batch), atol=1e-5
    )
    exact = -jax.nn.log_softmax(inside.logits)[tuple(np.indices(inside.losses.shape)) + (batch["labels"],)]
    real = ~np.isnan(inside.losses)
    np.testing.assert_allclose(inside.losses[real], np.asarray(exact)[real], atol=1e-5)


def test_it_says_what_it_holds():
    inside = seen("mla")[-1]
    text = repr(inside)
    assert "2 layers with 8 heads, 8 x 16 tokens" in text and "latent [2, 8, 16, 16]" in text
    assert inside.cache_bytes == 2 * (16 + 4) * 4  # layers x (d_latent + d_rope) x float32
    assert f"loss {inside.loss:.4f} nats" in text


def test_nobody_who_does_not_look_pays_for_it():
    model = build((1, 1, 1), layers=2)
    batch = {name: jax.ShapeDtypeStruct((ROWS, SEQ), "int32") for name in make_batch(1, 2)}
    square = f"{ROWS},{model.config.heads},{SEQ},{SEQ}"
    softmaxes = str(jax.make_jaxpr(model.loss)(model.shapes, batch)).count(f"f32[{square}] = exp")
    assert softmaxes <= 1  # the layer's own, where jax writes it in this shape
