"""Kinds of layers with other heads, latents and widths of experts: the plain model's gradients on every mesh, caches of
their own shapes, and what a plan says of each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cached_logits import decoded_logits
from support.plain_model import plain_logits
from support.tiny_model import HIDDEN_CUT, ROWS, SEQ, SEQ_CUT, build, make_batch, params_of
from test_choices import EXPERTS, check

from parallax.analysis.traced.flops import flops_breakdown
from parallax.inference.capture import capture_activations
from parallax.inference.decode import Decoder, Prompts
from parallax.model.context import Context
from parallax.model.rope import Rope
from parallax.sharding.layout import named_leaves
from parallax.step.expert_load import counts_of
from parallax.user_code import settings_by_name

GQA = dict(attention="gqa", layers=4, layers_of="(near far)*2", qkv_bias=True, out_bias=True)
GQA |= dict(
    kinds="near=(sliding_window=3, rope_theta=100.0, kv_heads=2, d_head=4) "
    "far=(heads=16, d_head=16, rope_fraction=0.5, d_ff=96)"
)
MLA = dict(attention="mla", layers=4, layers_of="(near far)*2")
MLA |= dict(kinds="near=(sliding_window=3, d_latent=8, d_rope=8) far=(heads=16, d_head=4, d_latent_q=8)")
MIXTURES = dict(attention="gqa", layers=5, layers_of="near moe dense far moe", shared_experts=1, tied=False) | EXPERTS
MIXTURES |= dict(kinds="near=(base='moe', sliding_window=3, heads=16) far=(base='moe', d_expert=32, kv_heads=8)")
MODELS = {"gqa": GQA, "mla": MLA, "mixtures": MIXTURES}
PATTERN = dict(layers=5, layers_of="near far*2 near*2")
UNEVEN = {"gqa": PATTERN, "mla": PATTERN, "mixtures": {}}  # with two stages
# Axes pp, dp, tp, replica, cp, ep.
AXES = {
    "pp": dict(mesh=(2, 1, 1), schedule="zero_bubble", remat="attention"),
    "tp": dict(mesh=(1, 1, 4), embedding="all_to_all", remat="none"),
    "more ranks than kv_heads": dict(mesh=(1, 1, 8), tensor_parallel="scatter"),
    "dp": dict(mesh=(1, 2, 2), policy="lean", tensor_parallel="scatter", residual=HIDDEN_CUT),
    "ring": dict(mesh=(1, 1, 2, 1, 2), context="ring"),
    "ulysses": dict(mesh=(1, 1, 2, 1, 2), context="ulysses", tied=True),
    "all_gather": dict(mesh=(2, 1, 1, 1, 2), context="all_gather", schedule="one_f_one_b", remat="stage"),
    "contiguous": dict(mesh=(1, 1, 2, 1, 2), context="all_gather", order="contiguous"),
    "ep": dict(mesh=(2, 1, 2, 1, 1, 2), schedule="dualpipe_v"),
}


def uniform(name, kind):
    """A model all of whose layers are of one kind of another's."""
    model = dict(MODELS[name])
    return model | settings_by_name("model.kinds", model.pop("kinds"))[kind] | dict(layers_of="")


def test_layers_of_other_heads_give_the_plain_models_gradients():
    model = dict(attention="gqa", layers=2, layers_of="near far", kinds=GQA["kinds"], microbatches=2)
    check(model, mesh=(2, 1, 2), schedule="one_f_one_b", residual=SEQ_CUT)


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", MODELS)
def test_kinds_of_other_shapes_give_the_plain_models_gradients_on_each_axis(name, axis):
    changes = UNEVEN[name] if axis == "pp" else {}
    check(MODELS[name] | changes, **AXES[axis])


def test_each_layer_is_one_of_a_model_with_its_settings():
    """Layer by layer, each by the block of a model all of whose layers are like it."""
    changes = dict(layers=2, layers_of="near far")
    model, batch = build((1, 1, 1), **GQA | changes), make_batch(rows=2)
    alone = [build((1, 1, 1), **uniform("gqa", kind)) for kind in ("near", "far")]

    def layer_by_layer(params):
        x = params["embedding"]["table"][batch["tokens"]]
        for kind, of_kind in zip(("near", "far"), alone, strict=True):
            tables = Rope(of_kind.config).tables(batch["positions"])
            context = Context.of_model(of_kind.config, tables, np.arange(2), None, batch["segments"])
            weights = jax.tree.map(lambda stack: stack[0], params["blocks"][kind])
            x = of_kind.parts.blocks["dense"].apply({"params": weights}, x, context)
        hidden = model.parts.head.apply({"params": params["head"]}, x)
        return jnp.einsum("BSD,VD->BSV", hidden, params["embedding"]["table"])

    params, arrays = params_of(model), (batch[name] for name in ("tokens", "segments", "positions"))
    logits, expected = jax.jit(model.logits)(params, *arrays), jax.jit(layer_by_layer)(params)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def check_decoding(name, mesh):
    batch = make_batch(rows=4, seq=8)
    batch |= dict(segments=np.ones_like(batch["segments"]), positions=np.arange(8)[None].repeat(4, 0))
    model, alone = build(mesh, **MODELS[name], microbatches=1), build((1, 1, 1), **MODELS[name], microbatches=1)
    expected = plain_logits(model.config, params_of(alone), batch)
    prompts = Prompts(batch["tokens"], np.zeros(4, np.int32))
    np.testing.assert_allclose(
        decoded_logits(model, params_of(model), prompts, prefill=3), expected, rtol=1e-4, atol=1e-5
    )


def test_cached_decoding_of_other_heads_says_what_the_whole_pass_says():
    check_decoding("gqa", (1, 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 2, 2), (2, 1, 2, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_cached_decoding_of_other_shapes_says_what_the_whole_pass_says(name, mesh):
    check_decoding(name, mesh)


def test_a_kind_has_a_cache_of_its_own_shape_and_length():
    model = build((1, 1, 1), **GQA, microbatches=1)
    decoder = Decoder(model.config, model.plan.rows, model.mesh)
    places = jax.eval_shape(lambda: decoder.caches(2, 8)).of_sequences[0]
    shapes = [(tuple(form), entries["k"].shape) for place in places for form, entries in place.items()]
    assert shapes == [(("near", 3), (2, 2, 3, 4)), (("far", 8), (2, 4, 8, 16))] * 2


def test_activations_of_layers_with_other_heads_are_lists():
    model, batch = build((1, 1, 1), **GQA, microbatches=1), make_batch(rows=2)
    seen = capture_activations(model, params_of(model), batch)
    assert [weights.shape for weights in seen.attention] == [(2, heads, 16, 16) for heads in (8, 16) * 2]
    assert [keys.shape for keys in seen.cache["k"]] == [(2, 16, 2, 4), (2, 16, 4, 16)] * 2
    for weights in seen.attention:
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
    assert seen.cache_bytes == 2 * 4 * 2 * (2 * 4 + 4 * 16)
    assert "4 layers with 8 and 16 heads" in repr(seen)
    np.testing.assert_allclose(seen.loss, jax.jit(model.loss)(params_of(model), batch)["loss"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_a_step_of_two_kinds_multiplies_what_half_of_each_kinds_step_does(name):
    changes = dict(remat="layer", schedule="gpipe", chunk_tokens=64)
    each = [build((1, 1, 1), **uniform(name, kind), **changes) for kind in ("near", "far")]
    here, *alone = (flops_breakdown(model, ROWS, SEQ) for model in (build((1, 1, 1), **MODELS[name], **changes), *each))
    assert here == tuple(sum(pair) / 2 for pair in zip(*alone, strict=True)) and here.masked and here.recomputed


def test_counts_of_experts_are_in_the_order_of_the_layers():
    """Layers 0, 1, 3 and 4, which are in three stacks."""
    model = build((1, 1, 1), **MIXTURES)
    counted = {name: row for name, row in model.plan.statistics.items() if row.spec.role == "counts"}
    shapes = {name: leaf.shape for name, leaf in named_leaves(model.shapes).items() if name in counted}
    numbers = {"near": [0], "far": [3], "moe": [1, 4]}
    statistics = {
        name: jnp.broadcast_to(jnp.asarray(numbers[row.spec.stack.split("/")[1]], jnp.float32)[:, None], shapes[name])
        for name, row in counted.items()
    }
    counts = jax.jit(lambda given: counts_of(model, given))(statistics)["expert_counts"]
    assert counts[:, 0].tolist() == [0, 1, 3, 4]
