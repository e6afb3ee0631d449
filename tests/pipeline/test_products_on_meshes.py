"""Products in 8 bits on meshes: every mesh has the same scales, to the bit, and the same loss.

Sums differ by mesh in their last places. An entry that lies so near to the middle between two 8-bit numbers is rounded
to either of them: a few of 100,000 are one step apart, and so are the entries of gradients that they are part of.
"""

import functools
import math
from collections import Counter

import jax
import numpy as np
import pytest
from support.tiny_model import SEQ, SEQ_CUT, build, make_batch, model_config, params_of
from test_block_choices import LIKE
from test_choices import ALL

from parallax.analysis.traced.memory import memory, tick_state
from parallax.analysis.traced.recompute import part_costs
from parallax.errors import ConfigError
from parallax.jaxprs import within
from parallax.model.products import latest_amax
from parallax.sharding.layout import named_leaves
from parallax.step.step import with_first_scales

LOSS_ERROR, GRADIENT_ERROR = 1e-5, 0.05  # of a loss; of a leaf's norm: what left out a microbatch is wrong by a quarter
GATHERS = dict(gather_dtype="int8", matmul_parts="mlp")
EXPERTS = dict(matmul_parts="experts", layers=2, layers_of="moe*2", experts=4, d_expert=16)
MODELS = {
    "gqa": dict(attention="gqa", layers=4),
    "mla": dict(attention="mla", layers=4, d_latent_q=16),
    "clamped": dict(attention="gqa", layers=4, activation="clamped", activation_limit=1.0),
    "moe": dict(attention="gqa", layers=4, layers_of="(dense moe)*2", shared_experts=1, experts=4, d_expert=16),
}
EIGHT_BIT = dict(matmul_residuals="8bit")
FAST = {
    "zero bubble": ("gqa", "int8", (2, 2, 2), dict(schedule="zero_bubble", remat="none", policy="zero1")),
    "context": ("gqa", "float8", (1, 2, 2, 1, 2, 1), dict(context="ring", remat="norm swiglu", prefetch=1)),
    "experts": ("moe", "int8", (1, 1, 2, 1, 1, 4), dict(tensor_parallel="scatter", policy="lean")),
    "8-bit residuals": ("gqa", "int8", (2, 2, 2), EIGHT_BIT | dict(schedule="zero_bubble", remat="none")),
    "rounded gathers": ("gqa", "float8", (1, 2, 2), GATHERS),
}
SLOW = {
    "experts alone, ragged": ("gqa", "int8", (1, 1, 1, 1, 1, 4), EXPERTS | dict(exchange="ragged")),
    "experts alone, over hosts": (
        "gqa",
        "int8",
        (1, 1, 1, 1, 1, 4),
        EXPERTS | dict(exchange="ragged", exchange_hosts=2),
    ),
    "experts alone, ragged, W apart": (
        "gqa",
        "float8",
        (2, 1, 1, 1, 1, 2),
        EXPERTS | dict(exchange="ragged", schedule="zero_bubble", remat="norm router"),
    ),
    "experts alone, chunks": (
        "gqa",
        "int8",
        (1, 2, 2, 1, 1, 2),
        EXPERTS | dict(expert_chunk_tokens=8, policy="zero1", prefetch=0),
    ),
    "experts alone, ahead": ("gqa", "float8", (2, 2, 1, 1, 1, 2), EXPERTS | dict(remat="layer", prefetch=1)),
    "tensor": ("gqa", "int8", (1, 2, 4), dict(residual=SEQ_CUT, remat="attention")),
    "gpipe": ("mla", "int8", (2, 1, 4), dict(schedule="gpipe", remat="stage")),
    "1F1B": ("mla", "float8", (4, 2, 1), dict(schedule="one_f_one_b", policy="zero2")),
    "interleaved": ("gqa", "float8", (2, 2, 2), dict(schedule="interleaved", virtual=2, tensor_parallel="scatter")),
    "V": ("gqa", "int8", (2, 1, 2, 2), dict(schedule="zero_bubble_v", remat="layer", policy="ddp")),
    "Ulysses": ("mla", "int8", (1, 1, 2, 1, 4, 1), dict(context="ulysses", reduce="compute")),
    "uneven": ("gqa", "int8", (2, 2, 1), dict(schedule="zero_bubble", layers=3)),
    "clamped": ("clamped", "int8", (1, 2, 2), EIGHT_BIT | dict(remat="swiglu", tensor_parallel="scatter")),
    "8-bit residuals, sets": (
        "mla",
        "float8",
        (2, 2, 2),
        EIGHT_BIT | dict(schedule="gpipe", remat="q ffn", residuals_on="host"),
    ),
    # Of the first batch an operand lies so near to the middle that this mesh rounds it to the other number, and the
    # largest gradient of a layer is 3 % larger. Of the second one none does, as of the five after it.
    "8-bit residuals, V": (
        "gqa",
        "float8",
        (2, 1, 2),
        EIGHT_BIT | dict(schedule="zero_bubble_v", residual=SEQ_CUT, seed=1),
    ),
    "8-bit residuals, scatter": ("gqa", "int8", (1, 2, 4), EIGHT_BIT | dict(remat="ffn", tensor_parallel="scatter")),
    "rounded gathers, zero1": ("mla", "int8", (2, 2, 2), GATHERS | dict(schedule="zero_bubble", policy="zero1")),
    "rounded gathers, ahead": (
        "moe",
        "int8",
        (1, 2, 2, 1, 1, 2),
        GATHERS | dict(prefetch=1, layers_of="dense*2 moe*2"),
    ),
    "two kinds": ("moe", "float8", (2, 1, 1, 1, 1, 4), dict(schedule="zero_bubble", remat="layer")),
}


CURRENT, TOO = dict(matmul_scales="current"), dict(matmul_weight_gradients="8bit")
ROW, BLOCK, MX = (dict(matmul_scales=scales) for scales in ("row", "block", "mxfp8"))
BLOCK, MX = (scales | dict(d_model=64, d_ff=256, d_latent=64, d_latent_q=64) for scales in (BLOCK, MX))
OWN_SCALES = {
    "current, zero bubble": (
        "gqa",
        "int8",
        (2, 2, 2),
        CURRENT | TOO | EIGHT_BIT | dict(schedule="zero_bubble", remat="none", policy="zero1"),
    ),
    "current, sets": ("mla", "float8", (1, 1, 2), CURRENT | EIGHT_BIT | dict(remat="norm swiglu", seed=1)),
    "current, experts": ("moe", "int8", (1, 2, 2), CURRENT | dict(remat="layer")),
    "current, experts, ragged": ("gqa", "int8", (1, 1, 1, 1, 1, 4), CURRENT | EXPERTS | dict(exchange="ragged")),
    "row, experts": ("moe", "int8", (1, 1, 2, 1, 1, 4), ROW | dict(tensor_parallel="scatter", policy="lean")),
    "row, context": (
        "gqa",
        "int8",
        (1, 2, 1, 1, 2, 1),
        ROW | TOO | EIGHT_BIT | dict(context="ring", prefetch=1, remat="norm"),
    ),
    "row, V": ("gqa", "int8", (2, 1, 2, 2), ROW | dict(schedule="zero_bubble_v", remat="layer", residual=SEQ_CUT)),
    "block, rounded gathers": ("gqa", "int8", (1, 2, 2), BLOCK | TOO | dict(gather_dtype="int8")),
    "mxfp8": ("mla", "float8", (2, 1, 2), MX | TOO | dict(schedule="one_f_one_b", seed=1)),
    "nvfp4": (
        "moe",
        "float4",
        (1, 2, 2),
        MX | dict(matmul_scales="nvfp4", d_expert=32, schedule="gpipe", remat="ffn", seed=1),
    ),
    "fixed": ("gqa", "int8", (2, 2, 1), dict(matmul_scales="fixed", matmul_ranges="4 0.5 0.001") | TOO),
}


# Models of many choices, in forms of products that differ.
CHOSEN = {"Gemma": LIKE["Gemma"], "GPT-NeoX": LIKE["GPT-NeoX"], "all": ALL | dict(experts=4, d_expert=16)}
CHOSEN = {name: dict(attention="gqa", layers=4) | model for name, model in CHOSEN.items()}
OF_CHOICES = {
    "Gemma, delayed": ("Gemma", "float8", (2, 1, 2), dict(schedule="zero_bubble", remat="none", residual=SEQ_CUT)),
    "Gemma, row": (
        "Gemma",
        "int8",
        (1, 2, 2, 1, 2),
        ROW | TOO | EIGHT_BIT | dict(context="ring", remat="down norm", policy="zero1"),
    ),
    "GPT-NeoX, current": (
        "GPT-NeoX",
        "int8",
        (2, 2, 2),
        CURRENT | TOO | dict(schedule="dualpipe_v", microbatches=4, tensor_parallel="scatter"),
    ),
    "GPT-NeoX, block": ("GPT-NeoX", "float8", (1, 2, 2), BLOCK | dict(gather_dtype="int8", prefetch=1)),
    "all, ragged": (
        "all",
        "float8",
        (2, 1, 1, 1, 1, 4),
        CURRENT | dict(exchange="ragged", schedule="zero_bubble", remat="norm router"),
    ),
    "all, scatter": ("all", "int8", (1, 1, 2, 1, 1, 4), dict(tensor_parallel="scatter", policy="lean")),
}


ARITHMETIC = (
    "layers",
    "matmul_parts",
    "matmul_residuals",
    "matmul_scales",
    "matmul_ranges",
    "matmul_weight_gradients",
    "d_model",
    "d_ff",
    "d_latent",
    "d_latent_q",
    "gather_dtype",
    "layers_of",
    "experts",
    "d_expert",
    "seed",
)  # alone, too


@functools.cache
def batch(seed=0, ranks=1, microbatches=4):
    """Rows in the order that gives one device's microbatches the rows that they have on so many data ranks: a scale may
    be of a microbatch."""
    rows = make_batch(rows=32, seed=seed)
    order = np.arange(32).reshape(ranks, microbatches, -1).swapaxes(0, 1).ravel()
    return {name: array[order] for name, array in rows.items()}


def found_of(mesh, name, form, *, seed=0, ranks=1, **how):
    """Loss, gradients and scales of a step whose scales a first pass has set, if it does."""
    model = build(mesh, matmul=form, **(MODELS | CHOSEN)[name] | how)
    params = with_first_scales(model, params_of(model), batch(seed), seed=0)
    step = jax.jit(model.loss_grads_and_statistics)
    metrics, grads, found = jax.tree.map(np.asarray, step(params, batch(seed, ranks)))
    scales = {name: np.asarray(leaf) for name, leaf in named_leaves(params).items() if name.endswith("amax")}
    grads = {name: grad for name, grad in named_leaves(grads).items() if name not in model.plan.statistics}
    after = {name: np.asarray(latest_amax(found[name], scales[name])) for name in scales}
    return metrics["loss"], grads, scales, after


@functools.cache
def alone(name, form, **how):
    return found_of((1, 1, 1), name, form, **how)


def check(case):
    name, form, mesh, how = case
    loss, grads, first, then = found_of(mesh, name, form, **how)
    known = {key: how[key] for key in ARITHMETIC if key in how}
    if "matmul_scales" in how:
        known |= {"ranks": math.prod(mesh[at] for at in (1, 3, 5) if at < len(mesh))}
    expected = alone(name, form, **known)
    np.testing.assert_allclose(loss, expected[0], rtol=LOSS_ERROR)
    errors = {at: np.linalg.norm(grads[at] - own) / np.linalg.norm(own) for at, own in expected[1].items()}
    assert {at: error for at, error in errors.items() if not error <= GRADIENT_ERROR} == {}
    for scales, own in ((first, expected[2]), (then, expected[3])):
        if "matmul_scales" in how:
            assert not scales
            continue
        assert scales.keys() == own.keys() and len(own) >= (7 if "matmul_parts" not in how else 3)
        for at in own:
            assert (own[at] > 0).all()
            np.testing.assert_array_equal(scales[at], own[at], err_msg=at)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_a_mesh_has_the_loss_and_the_scales_of_one_device(name):
    check(FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_meshes_have_the_loss_and_the_scales_of_one_device(name):
    check(SLOW[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_SCALES)
def test_scales_of_the_operands_give_a_mesh_the_loss_of_one_device(name):
    check(OWN_SCALES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_CHOICES)
def test_models_of_many_choices_have_the_loss_of_one_device(name):
    check(OF_CHOICES[name])


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["delayed", "current"])
def test_kernels_of_8_bit_products_travel_in_8_bits(scales):
    def gathered(matmul):
        how = dict(matmul_scales=scales) if matmul != "compute" else {}
        model = build((1, 2, 1), matmul=matmul, **MODELS["gqa"] | how)
        traced = jax.make_jaxpr(model.loss_and_grad)(params_of(model), batch())
        gathers = [
            one.invars[0].aval for top in traced.eqns for one in within(top) if "all_gather" in str(one.primitive)
        ]
        return Counter((aval.dtype.name, aval.size) for aval in gathers)

    before, after = gathered("compute"), gathered("int8")
    kernels = {size: count for (dtype, size), count in after.items() if dtype == "int8"}
    assert kernels and sum(kernels.values()) == 2 * 7  # of attention and of the MLP, forward and backward
    for size, count in kernels.items():
        assert before["float32", size] - after["float32", size] == count
    rows = jax.tree.leaves(build((1, 2, 1), matmul="int8", **MODELS["gqa"]).plan.rows)
    assert [row.travels for row in rows].count("int8") == 7  # as the plan says


@pytest.mark.slow
def test_gather_dtype_is_for_the_kernels_that_no_8_bit_product_reads():
    """Of these alone it changes how they travel, and what is computed."""

    def model_of(**how):
        return build((1, 2, 2), matmul="float8", **MODELS["gqa"] | how)

    def travels(model):
        rows = named_leaves(model.plan.rows["blocks"])
        return {name: row.travels for name, row in rows.items() if name.endswith("kernel")}

    def found(model):
        params = with_first_scales(model, params_of(model), batch(), seed=0)
        return jax.jit(model.loss_and_grad)(params, batch())

    for name, dtype in travels(model_of(matmul_parts="mlp", gather_dtype="int8")).items():
        assert dtype == ("float8_e4m3fn" if name.startswith("mlp") else "int8"), name
    plain, rounded = model_of(), model_of(gather_dtype="int8")
    assert set(travels(rounded).values()) == {"float8_e4m3fn"} and travels(plain) == travels(rounded)
    jax.tree.map(np.testing.assert_array_equal, found(plain), found(rounded))


def test_ranks_that_cut_blocks_are_refused():
    with pytest.raises(ConfigError, match="mesh.tp=2 ranks cut model.d_ff=64 of blocks/mlp/down/kernel within a block"):
        build((1, 1, 2), matmul="int8", matmul_scales="block", **MODELS["gqa"])
    build((1, 1, 2), matmul="int8", matmul_scales="block", **MODELS["gqa"] | dict(d_ff=256))
    how = dict(matmul="float8", matmul_scales="mxfp8", d_ff=64, context="ring", **TOO)
    with pytest.raises(ConfigError, match="chunks of 8, within a block of 32 tokens; use seq in multiples of 128"):
        build((1, 1, 2, 1, 2, 1), **MODELS["gqa"] | how).check_batch(32, 32)


def test_sums_of_too_many_tokens_are_refused():
    how = dict(matmul="int8", microbatches=1, **TOO)
    with pytest.raises(ConfigError, match="sums int8 products of 262144 tokens of a microbatch in int32, which holds"):
        build((1, 1, 1), **MODELS["gqa"] | how).check_batch(4, 2**16)
    build((1, 2, 1), **MODELS["gqa"] | how | dict(microbatches=2)).check_batch(4, 2**16)


def test_ranks_that_share_key_heads_or_gather_latents_are_refused():
    with pytest.raises(ConfigError, match="mesh.tp=8 ranks share model.kv_heads=4"):
        build((1, 1, 8), matmul="int8", **MODELS["gqa"])
    build((1, 1, 8), matmul="int8", matmul_parts="mlp", **MODELS["gqa"])
    with pytest.raises(ConfigError, match="with layout.context='all_gather' each of mesh.cp=2 ranks"):
        build((1, 2, 2, 1, 2, 1), matmul="int8", **MODELS["mla"])


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_saves_what_it_saves_without_and_its_maxima(name):
    """An input that several products read is saved once."""

    def saved_by(form):
        model = build((1, 1, 1), matmul=form, remat="none", microbatches=1, **MODELS[name])
        return memory(model, {}, global_batch=32, seq=SEQ).saved_activations

    layers, products_of_layer = 4, 9
    assert 0 <= saved_by("int8") - saved_by("compute") <= 2 * 4 * layers * products_of_layer


# What a token has saved of a layer's inputs in the compute dtype, by what is made again: entries, and arrays. d_model
# is 32, d_ff 64; attention and the MLP read a normed input each.
INPUTS = {
    "none": (2 * 32 + 64, 3),
    "ffn": (2 * 32 + 64, 3),
    "swiglu": (2 * 32, 2),
    "norm": (64, 1),
    "elementwise": (0, 0),
    "layer": (0, 0),
}


def saved(residuals, mesh=(1, 1, 1), **how):
    how = dict(matmul="int8", matmul_residuals=residuals, microbatches=1) | how
    return saved_by(build(mesh, **MODELS["gqa"] | how))


def saved_by(model):
    """Bytes of what a tick's state holds for the backward pass."""
    return sum(size for _, component, size in tick_state(model, 8, SEQ) if component == "saved_activations")


@pytest.mark.fast(1)
@pytest.mark.parametrize(("how", "shared", "products"), [(dict(attention="mla"), 3, 8), (dict(mlp="plain"), 1, 6)])
def test_what_several_products_read_is_rounded_once_where_xla_would_round_in_each(how, shared, products, monkeypatch):
    """Inputs of several products and the gradient of each are behind a barrier: of float8 with fixed ranges on v7x."""
    monkeypatch.setattr("parallax.model.products.rounds_in_products", lambda: True)

    def barriers(matmul):
        fixed = dict(matmul=matmul, matmul_scales="fixed", matmul_ranges="8 0.25 0.5")
        model = build((1, 1, 1), remat="none", **MODELS["gqa"] | how | fixed)
        return jax.jit(model.loss_and_grad).lower(model.shapes, make_batch()).as_text().count("optimization_barrier")

    assert (barriers("float8"), barriers("int8")) == (shared + products, 0)


FIXED_ON_V7X = dict(matmul_scales="fixed", matmul_ranges="8 0.25 0.5", matmul_residuals="8bit", remat="norm")


@pytest.mark.fast(1)
@pytest.mark.parametrize("how", [{}, dict(schedule="zero_bubble", mesh=(2, 2, 1)), dict(dtype="float32")], ids=str)
def test_swiglu_in_8_bits_and_up_are_saved_as_bytes_where_a_product_writes_slots_of_one_dtype(how, monkeypatch):
    """The same numbers, and as many bytes: those of up are two arrays. Up of float32 stays as it is."""
    how = dict(mesh=(1, 2, 1), dtype="bfloat16") | FIXED_ON_V7X | how
    mesh = how.pop("mesh")

    def found():
        model = build(mesh, matmul="float8", **MODELS["gqa"] | how)
        sizes = [size for _, component, size in tick_state(model, 8, SEQ) if component == "saved_activations"]
        step = jax.jit(model.loss_and_grad)
        return len(sizes), sum(sizes), jax.tree.map(np.asarray, step(params_of(model), make_batch()))

    before = found()
    monkeypatch.setattr("parallax.pipeline.loss_and_grads.writes_slots_of_one_dtype", lambda mesh: True)
    after = found()
    jax.tree.map(np.testing.assert_array_equal, after[2], before[2])
    assert after[:2] == (before[0] + (how["dtype"] == "bfloat16"), before[1])


OF_TWO_KINDS = dict(layers_of="dense*2 moe*2", layers=4)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, 4 * 2),
        (dict(matmul="float8") | FIXED_ON_V7X, 4 * 2),
        (dict(remat="layer", microbatches=2), 4 * 2),
        (dict(bucket="layer"), 0),
        (dict(reduce="compute"), 0),
        (dict(mesh=(2, 2, 1)), 0),
        (dict(mesh=(1, 2, 2)), 0),
        (dict(mesh=(1, 2, 1, 1, 2)), 0),
        (OF_TWO_KINDS, 4 * 2),
        (OF_TWO_KINDS | dict(layers_of="moe*4"), 0),
    ],
    ids=str,
)
def test_small_gradients_that_are_sent_after_large_ones_are_the_same(how, expected, monkeypatch):
    """Those of attention's four kernels wait for those of gate and up, of dense layers over data ranks alone; in one
    message all go at once."""
    how = dict(mesh=(1, 2, 1), d_ff=128) | how
    mesh = how.pop("mesh")

    def found():
        model = build(mesh, **MODELS["gqa"] | how)
        step = jax.jit(model.loss_and_grad)
        waits = step.lower(model.shapes, make_batch()).as_text().count("stablehlo.compare NE")
        return waits, jax.tree.map(np.asarray, step(params_of(model), make_batch()))

    before = found()
    monkeypatch.setattr("parallax.sharding.plan.sends_small_gradients_last", lambda: True)
    after = found()
    jax.tree.map(np.testing.assert_array_equal, after[1], before[1])
    assert after[0] - before[0] == expected


@pytest.mark.fast(1)
@pytest.mark.parametrize("remat", INPUTS)
def test_8_bit_residuals_save_each_input_once_in_a_byte_an_entry(remat):
    """In place of four. Beside them each array has its largest magnitude, a float32."""
    layers, (entries, arrays) = 4, INPUTS[remat]
    fewer = 3 * 8 * SEQ * entries - 4 * arrays
    assert saved("compute", remat=remat) - saved("8bit", remat=remat) == layers * fewer


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_sweep_counts_the_8_bits_of_a_part(name):
    def saved_of(remat):
        how = dict(matmul="int8", matmul_residuals="8bit", microbatches=1, remat=remat)
        return saved_by(build((1, 1, 1), **MODELS[name] | how))

    costs = part_costs(model_config(matmul="int8", matmul_residuals="8bit", **MODELS[name]), seq=SEQ)
    for part, other in (("norm", "swiglu"), ("swiglu", "norm")):
        found = saved_of(other) - saved_of("norm swiglu")
        maxima = found - 4 * 8 * SEQ * costs[part].width
        assert 0 <= maxima <= 4 * 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("how", [dict(residual=SEQ_CUT), {}, dict(tensor_parallel="scatter")], ids=str)
def test_8_bit_residuals_are_not_saved_where_ranks_gathered_them(how):
    """Four tp ranks hold as much of an input in float32 before it is gathered."""
    before, after = (saved(residuals, (1, 1, 4), remat="swiglu", **how) for residuals in ("compute", "8bit"))
    assert (after < before) if how.get("tensor_parallel") else (after == before)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "elementwise", "layer"])
def test_what_waits_for_weights_gradients_is_in_8_bits(remat):
    """W reads inputs, whatever is made again for B: those of 4 layers on 2 ranks, for as many microbatches as wait."""
    how = dict(schedule="zero_bubble", remat=remat, microbatches=4)
    before, after = (saved(residuals, (2, 1, 1), **how) for residuals in ("compute", "8bit"))
    a_microbatch = 2 * (3 * 2 * SEQ * 2 * 32 - 4 * 2)
    assert before - after >= 2 * a_microbatch
