"""`pipeline.remat` as a set of parts changes nothing but what is saved and made again, and both are as predicted."""

import itertools
import re

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from support.tiny_model import (
    HIDDEN_CUT,
    MODEL,
    ROWS,
    SCHEDULES,
    SEQ,
    SEQ_CUT,
    build,
    make_batch,
    model_config,
    optimizer_config,
    params_of,
)
from support.user_parts import SquaredMLP
from test_experts import batch_of, mixture, reference, step_on
from test_experts import check as check_mixture
from test_parity import check_parity

from parallax.analysis.compiled.program import costs_of
from parallax.analysis.traced.flops import flops_by_direction, matmul_parameters_by_stack
from parallax.analysis.traced.memory import memory, tick_state
from parallax.analysis.traced.recompute import forward_flops, name_of_set, part_costs, recomputed_flops, sets_to_try
from parallax.analysis.traced.trace import step_program
from parallax.config.remat import REMAT_PARTS, canonical_remat, recomputed_parts
from parallax.config.sections import PipelineConfig
from parallax.config.settings import with_code
from parallax.errors import ConfigError
from parallax.model import mlp
from parallax.model.kernels.flops import attention_flops
from parallax.pipeline import loss_and_grads, model_on_mesh
from parallax.sharding.mesh import mesh_of
from parallax.sharding.slots import row_major
from parallax.step.optimizer import make_optimizer
from parallax.step.step import abstract_state, model_of

# Each part of a dense layer is in some set and not in others; each schedule, and what else a pass depends on.
DENSE = {
    "one norm": dict(mesh=(2, 2, 2), attention="gqa", residual=HIDDEN_CUT, schedule="one_f_one_b", remat="norm"),
    "llm.q's": dict(mesh=(2, 1, 2), attention="mla", schedule="zero_bubble", remat="norm swiglu ffn qkv core"),
    "latents": dict(mesh=(2, 1, 1), attention="mla", d_latent_q=16, schedule="zero_bubble_v", remat="qkv out"),
    "heads' norms": dict(mesh=(2, 2, 1), attention="gqa", qk_norm=True, schedule="interleaved", remat="qkv swiglu"),
    "no heads' norms": dict(mesh=(1, 1, 2), attention="gqa", qk_norm=True, residual=SEQ_CUT, remat="qk core"),
    "ahead": dict(mesh=(1, 4, 1), attention="gqa", prefetch=1, reduce="compute", remat="elementwise ffn"),
    "context": dict(mesh=(1, 1, 1, 1, 4), attention="gqa", context="ring", remat="out core"),
    "context, divided": dict(mesh=(2, 1, 1, 1, 2), attention="mla", schedule="zero_bubble", remat="elementwise kv"),
    "context of heads": dict(mesh=(2, 1, 2, 1, 2), attention="gqa", context="ulysses", remat="norm qkv"),
    "scatter": dict(mesh=(1, 2, 2), attention="mla", tensor_parallel="scatter", policy="zero1", remat="latent norm"),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", DENSE)
def test_loss_gradients_and_update_equal_the_plain_model(name, record_property):
    case = dict(microbatches=4, tied=True) | DENSE[name]
    check_parity(SCHEDULES.get(case.get("schedule"), {}) | case, record_property)


MIXTURES = {
    "in turn": dict(mesh=(2, 1, 1, 1, 1, 2), exchange="ragged", schedule="zero_bubble", remat="norm experts ffn"),
    "dense first": dict(mesh=(1, 1, 2, 1, 1, 2), exchange="gather", schedule="one_f_one_b", remat="dispatch core"),
    "alike": dict(mesh=(1, 2, 1, 1, 1, 2), exchange="ragged", prefetch=1, remat="router qkv"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_with_mixtures_too(name, record_property):
    how = dict(microbatches=4) | MIXTURES[name]
    model = mixture(how.pop("mesh"), name, **how)
    check_mixture(step_on(model)(params_of(model), batch_of(name)), reference(name), record_property)


# ---- what is saved

WIDE = dict(attention="gqa", kv_heads=2, d_ff=96)
# Float32 entries of a token and layer, by hand.
WIDTHS = {"norm": 2 * 32, "q": 8 * 8, "kv": 2 * 2 * 8, "core": 8 * 8 + 8, "out": 32, "ffn": 2 * 96, "swiglu": 96}
SOME_SETS = ["norm", "norm swiglu", "ffn q swiglu", "norm swiglu ffn qkv core", "elementwise core", "attention out"]


def saved_bytes(remat, schedule, microbatches, **changes):
    """Of the slots that ticks carry, and of the plan; saved activations of the first rank."""
    model = build((2, 1, 1), remat=remat, schedule=schedule, microbatches=microbatches, **WIDE | changes)
    tx = make_optimizer(optimizer_config(warmup_steps=1), 10, model.plan.rows)
    plan = memory(model, abstract_state(model, tx).opt_state, global_batch=ROWS, seq=SEQ)
    carried = tick_state(model, ROWS, SEQ)
    sizes = [np.prod(shape) * 4 for shape, component, _ in carried if component == "saved_activations"]
    return model, sum(map(int, sizes)), plan.saved_activations


@pytest.mark.fast(1)
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("remat", SOME_SETS)
def test_slots_hold_each_layers_input_and_the_parts_that_are_not_in_the_set(remat, schedule):
    model, carried, planned = saved_bytes(remat, schedule, 4)
    tokens, layers = ROWS // 4 * SEQ, MODEL["layers"] // 2
    kept = 32 + sum(width for part, width in WIDTHS.items() if part not in recomputed_parts(remat))
    assert carried == 4 * kept * tokens * layers * model.schedule.slots["F to B"]
    assert planned == carried


@pytest.mark.fast(1)
@pytest.mark.parametrize("remat", SOME_SETS[1:4])
def test_the_plan_holds_what_w_reads_too(remat):
    _, carried, planned = saved_bytes(remat, "zero_bubble", 4)
    assert planned == carried


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_widths_of_parts_are_those_of_the_slots(attention):
    """For each part alone: what a set saves less when it has this part."""
    model = model_config(attention=attention, d_latent_q=16 * (attention == "mla"), qk_norm=attention == "gqa")
    costs = part_costs(model, seq=SEQ)
    assert set(costs) == set(model.remat_parts)

    def saved(parts):
        how = dict(attention=attention, d_latent_q=model.d_latent_q, qk_norm=model.qk_norm)
        built = build((1, 1, 1), remat=" ".join(parts), microbatches=1, **how)
        carried = tick_state(built, ROWS, SEQ)
        entries = [np.prod(shape) for shape, component, _ in carried if component == "saved_activations"]
        return sum(entries) / (ROWS * SEQ)

    everything = saved(costs)
    assert everything == model.layers * model.d_model
    for part in costs:
        assert saved([other for other in costs if other != part]) - everything == costs[part].width, part


@pytest.mark.fast(1)
@pytest.mark.parametrize("remat", ["none", "elementwise"])
def test_what_is_saved_fuses_with_what_reads_it(remat):
    """Behind a barrier, slices of slots would be copies: 8 % of the compute of configs/llama_1b_16.py on v5e."""
    assert "optimization_barrier" not in lowered(remat)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("mesh", "remat", "in_rows"), [((2, 1, 1), "layer", True), ((1, 1, 1), "layer", False), ((1, 1, 1), "norm", True)]
)
def test_where_xla_relays_what_is_read_slots_are_read_in_rows(mesh, remat, in_rows, monkeypatch):
    """Else it copies all slots that ticks carry in each backward pass: 202 of 1499 ms in a pipeline of llama_1b_16 on
    v5e. Those that a tick allocates have the layout in which the input is read."""
    assert "LayoutConstraint" not in lowered(remat, mesh)
    monkeypatch.setattr(loss_and_grads, "relays_what_is_read", lambda mesh: True)
    assert ("LayoutConstraint" in lowered(remat, mesh)) == in_rows


@pytest.mark.fast(1)
def test_in_stages_of_one_layer_slots_are_written_in_rows_and_inputs_read_in_rows(monkeypatch):
    """Else XLA copies all slots that are written in the layout of a product: 606 of 1620 ms in stages of one layer of
    llama_1b_16 on v5e."""
    monkeypatch.setattr(loss_and_grads, "relays_what_is_read", lambda mesh: True)
    meshes = [(1, 1, 1), (2, 1, 1), (MODEL["layers"], 1, 1)]
    of_a_tick, in_loop, one_layer = (lowered("norm swiglu", mesh).count("@LayoutConstraint") for mesh in meshes)
    assert of_a_tick == in_loop > 0
    assert one_layer == 2 * of_a_tick + 1


def test_in_stages_of_one_layer_activations_of_heads_are_written_as_attention_reads_them(monkeypatch):
    """The tokens of a head are side by side, in F and in B; elsewhere arrays of four dims are in rows."""
    monkeypatch.setattr(loss_and_grads, "relays_what_is_read", lambda mesh: True)

    def layouts(mesh):
        text = "\n".join(line for line in lowered("core", mesh).splitlines() if "@LayoutConstraint" in line)
        return {*re.findall(r"result_layouts = \[dense<(\[\d, \d, \d, \d\])>", text)}

    assert layouts((MODEL["layers"], 1, 1)) == {"[3, 1, 2, 0]"}
    assert layouts((2, 1, 1)) == {"[3, 2, 1, 0]"}


@pytest.mark.parametrize(("width", "in_rows"), [(64, True), (256, True), (192, False)])
def test_activations_that_tiles_would_pad_keep_the_memory_layout_that_xla_chooses(width, in_rows):
    text = jax.jit(row_major).lower(jax.ShapeDtypeStruct((2, 8, width), "float32")).as_text()
    assert ("LayoutConstraint" in text) == in_rows


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("remat", "schedule", "mesh"), [("elementwise", "interleaved", (4, 2, 1)), ("layer", "zero_bubble", (8, 1, 1))]
)
def test_norms_apart_from_products_change_no_number(remat, schedule, mesh, monkeypatch, record_property):
    """Norms that are recomputed, and the gradient of the MLP's, are behind barriers where XLA would fuse them into
    products, whose blocks are smaller then."""
    one_layer = (MODEL["layers"], 1, 1)
    assert "optimization_barrier" not in lowered(remat, one_layer)
    monkeypatch.setattr(model_on_mesh, "fuses_norms_into_products", lambda mesh: True)
    assert lowered(remat, one_layer).count("optimization_barrier") == 3
    for other in ((1, 1, 1), (2, 1, 1)):
        assert "optimization_barrier" not in lowered(remat, other)
    case = dict(mesh=mesh, attention="gqa", remat=remat, schedule=schedule, microbatches=4)
    check_parity(SCHEDULES[schedule] | case, record_property)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "case",
    [
        dict(mesh=(1, 1, 4), residual=SEQ_CUT, remat="elementwise"),
        SCHEDULES["zero_bubble"] | dict(mesh=(2, 2, 1), schedule="zero_bubble", remat="none"),
    ],
    ids=["tp", "divided"],
)
def test_gradients_of_gate_and_up_that_are_written_change_no_number(case, monkeypatch, record_property):
    """Behind a barrier, on chips where products would compute that of up again. In 8 bits they are rounded first, and
    token streams have none."""
    streams = dict(mesh=(1, 1, 4), residual=SEQ_CUT, tensor_parallel="streams")
    in_streams = lowered("elementwise", **streams).count("optimization_barrier")
    assert "optimization_barrier" not in lowered("elementwise")
    monkeypatch.setattr(mlp, "computes_gradients_again", lambda: True)
    assert lowered("elementwise").count("optimization_barrier") == 1
    assert "optimization_barrier" not in lowered("elementwise", matmul="int8")
    assert lowered("elementwise", **streams).count("optimization_barrier") == in_streams
    check_parity(dict(attention="gqa", microbatches=4) | case, record_property)


@pytest.mark.fast(1)
def test_where_the_stream_is_kept_in_rows_it_is_written_and_read_in_rows(monkeypatch):
    """The input in F and in B, and the stream after attention in F; B reads what has a name in rows anyway."""
    monkeypatch.setattr(loss_and_grads, "relays_what_is_read", lambda mesh: True)
    monkeypatch.setattr(model_on_mesh, "clears_what_is_overwritten", lambda mesh: False)  # there no slot is carried
    before = lowered("norm swiglu").count("@LayoutConstraint")
    assert lowered("layer").count("@LayoutConstraint") == 0
    monkeypatch.setattr(loss_and_grads, "keeps_stream_in_rows", lambda mesh: True)
    assert lowered("norm swiglu").count("@LayoutConstraint") == before + 3
    assert lowered("layer").count("@LayoutConstraint") == 2


MEANS = {
    "context, divided": dict(mesh=(1, 1, 1, 1, 2), context="ring", schedule="zero_bubble", remat="elementwise kv"),
    "divided": dict(mesh=(2, 1, 2), schedule="zero_bubble", qk_norm=True, residual=HIDDEN_CUT, remat="elementwise"),
    "latents": dict(mesh=(1, 2, 1), attention="mla", d_latent_q=16, remat="norm swiglu ffn"),
    "centred": dict(mesh=(1, 1, 2), norm="layer", norm_bias=True, residual=HIDDEN_CUT, remat="norm"),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", MEANS)
def test_saved_means_of_norms_change_no_number(name, monkeypatch, record_property):
    monkeypatch.setattr(loss_and_grads, "saves_means_of_norms", lambda mesh: True)
    case = dict(microbatches=4, attention="gqa") | MEANS[name]
    check_parity(SCHEDULES.get(case.get("schedule"), {}) | case, record_property)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("changes", "means"),
    [
        ({}, 2),
        (dict(qk_norm=True), 2),  # those of each head are not saved
        (dict(qk_norm=True, qk_norm_over="projection"), 4),
        (dict(norm="layer"), 4),
        (dict(attention="mla", d_latent_q=16), 4),
    ],
    ids=str,
)
def test_slots_of_any_set_hold_the_means_of_its_norms_too(changes, means, monkeypatch):
    sets = "norm swiglu", "elementwise core", "attention"
    before = [saved_bytes(remat, "gpipe", 4, **changes) for remat in sets]
    _, of_layers, _ = saved_bytes("layer", "gpipe", 4, **changes)
    monkeypatch.setattr(loss_and_grads, "saves_means_of_norms", lambda mesh: True)
    for remat, (model, carried, planned) in zip(sets, before, strict=True):
        entries = means * ROWS // 4 * SEQ * MODEL["layers"] // 2 * model.schedule.slots["F to B"]
        _, *after = saved_bytes(remat, "gpipe", 4, **changes)
        assert after == [carried + 4 * entries, planned + 4 * entries]
    assert saved_bytes("layer", "gpipe", 4, **changes)[1] == of_layers


# ---- what is made again


def traced_flops(remat, **changes):
    """FLOPs of a step that are made again, without the head's, of which a chunk makes its logits again."""
    model = build((1, 1, 1), remat=remat, microbatches=4, **WIDE | changes)
    count = lambda model: flops_by_direction(step_program(model, ROWS, SEQ), rank=dict(pp=0, dp=0, tp=0))  # noqa: E731
    none = build((1, 1, 1), remat="none", microbatches=4, **WIDE | changes)
    return count(model).get("recompute", 0) - count(none).get("recompute", 0)


PARAMETERS = {"q": 32 * 8 * 8, "kv": 32 * 2 * 2 * 8, "out": 8 * 8 * 32, "ffn": 2 * 32 * 96}
ROTATED = {"q": 8 * 8 * 8, "kv": 2 * 8 * 8}  # queries and keys by a product with a matrix of a head's width
SCORES = MODEL["layers"] * attention_flops("xla", "fwd", rows=ROWS, heads=8, seq=SEQ, d_qk=8, d_v=8)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "remat", ["norm swiglu", "norm swiglu ffn", "qkv out", "q", "norm kv core", "attention", "layer"]
)
def test_the_step_makes_the_products_of_its_set_again(remat):
    parts = recomputed_parts(remat) or WIDTHS
    products = sum(PARAMETERS.get(part, 0) for part in parts)
    times = 2 * ROWS * SEQ * MODEL["layers"]
    expected = times * products + SCORES * ("core" in parts)
    assert traced_flops(remat) == expected + times * sum(ROTATED.get(part, 0) for part in parts)
    model = model_config(**WIDE)
    predicted = recomputed_flops(model, remat, seq=SEQ) * ROWS * SEQ
    # A token reads half of the row on average; blocks have the diagonal whole.
    beyond = SCORES - part_costs(model, seq=SEQ)["core"].flops * ROWS * SEQ
    assert predicted == expected - beyond * ("core" in parts)


@pytest.mark.parametrize(
    "changes",
    [
        dict(attention="gqa"),
        dict(attention="gqa", qk_norm=True),
        dict(attention="mla"),
        dict(attention="mla", d_latent_q=16),
        dict(layers_of="dense*4 moe*4", experts=8, experts_per_token=8, d_expert=16, shared_experts=1),
    ],
    ids=str,
)
def test_parts_and_the_last_product_are_all_products_of_a_forward_pass(changes):
    built = build((1, 1, 1), **changes)
    layers = sum(matmul_parameters_by_stack(built.config, built.plan.declared).values())
    core = part_costs(built.config, seq=SEQ)["core"].flops
    assert forward_flops(built.config, seq=SEQ) - core == 2 * layers
    assert costs_of(built.config, "none", seq=SEQ).backward == 2
    assert costs_of(built.config, "stage", seq=SEQ).backward == 3
    assert (
        2 < costs_of(built.config, "qkv", seq=SEQ).backward < costs_of(built.config, "qkv core", seq=SEQ).backward < 3
    )


def test_sets_to_try_get_smaller_as_they_take_more():
    for exchanges, model in itertools.product([False, True], [model_config(**WIDE), mixture((1, 1, 1), "late").config]):
        found = sets_to_try(model, seq=SEQ, exchanges=exchanges)
        assert len(found) == len(set(found)) and len(found) < 24
        for remat in found:
            assert canonical_remat(remat) == remat
    assert name_of_set(model_config(**WIDE), WIDTHS) == "layer"
    assert name_of_set(model_config(**WIDE), ["swiglu", "norm"]) == "elementwise"


# ---- how it is written


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("norm swiglu ffn qkv core", "core qkv  ffn swiglu norm"),
        ("elementwise ffn", "ffn elementwise"),
        ("attention", "attention norm qkv elementwise core"),
    ],
)
def test_sets_in_any_order_are_the_same(one, other):
    fields = dict(schedule="gpipe", virtual=1, microbatches=1)
    assert PipelineConfig(remat=one, **fields) == PipelineConfig(remat=other, **fields)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("word", "parts"),
    [("elementwise", "norm swiglu"), ("attention", "out norm core qkv swiglu")],
)
def test_a_word_for_a_set_is_the_same_program_as_its_parts(word, parts):
    assert lowered(word) == lowered(parts)


def lowered(remat, mesh=(1, 1, 1), **changes):
    model = build(mesh, remat=remat, **WIDE, **changes)
    return jax.jit(model.loss_and_grad).lower(model.shapes, make_batch()).as_text()


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        (
            "swigl",
            "pipeline.remat='swigl' is unknown; did you mean 'swiglu'? Known: none, layer, stage, qkv, elementwise, "
            "attention, norm, latent, ",
        ),
        ("norm swigl", "pipeline.remat='norm swigl' has 'swigl', which is unknown; did you mean 'swiglu'? Known: "),
        (
            "layer norm",
            "pipeline.remat='layer norm' is not a set of parts; use one of none, layer, stage alone, or a set of qkv, ",
        ),
        ("", "pipeline.remat='' is not a set of parts; use one of none, "),
    ],
)
def test_a_wrong_set_is_refused(remat, message):
    with pytest.raises(ConfigError) as caught:
        PipelineConfig(schedule="gpipe", virtual=1, microbatches=1, remat=remat)
    said = str(caught.value)
    assert message in said and "\n" not in said


def test_a_part_that_no_layer_has_is_refused():
    with pytest.raises(ConfigError, match="='norm experts' has 'experts' .* use a set of norm, q, kv, core"):
        build((1, 1, 1), remat="norm experts", **WIDE)


class MisnamedMLP(SquaredMLP):
    """An MLP of a user's own whose output has a name that no set of parts has."""

    @nn.compact
    def __call__(self, x):
        return checkpoint_name(super().__call__(x), "mlp")


def test_a_name_that_no_set_can_have_is_refused():
    settings = with_code(build((1, 1, 1), remat="norm", **WIDE).settings, {"model.mlp": MisnamedMLP})
    model = model_of(settings, mesh_of())
    with pytest.raises(ConfigError, match=r"checkpoint_name\(\.\.\., 'mlp'\) in a layer"):
        jax.eval_shape(model.loss_and_grad, model.shapes, make_batch())


def test_every_part_is_of_some_model():
    models = mixture((1, 1, 1), "in turn").config, model_config(attention="gqa", qk_norm=True), model_config()
    models = *models, model_config(norm_place="both")
    assert set().union(*(model.remat_parts for model in models)) == set(REMAT_PARTS)
