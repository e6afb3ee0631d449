"""What plans and reports say of context parallelism: bytes in closed form, memory, layouts, prices and words."""

import re

import jax
import pytest
from support import tiny_model
from support.plan_changes import changes_of
from support.step_collectives import at_once, step_collectives
from test_plan import PAIR
from test_plan import tiny as tiny_settings

import parallax as px
from parallax.analysis.compiled.program import read_compiled
from parallax.analysis.planned.layouts import Choice, build_if_legal, choices, flags_of, with_keys
from parallax.analysis.planned.plan import plan_heading, single_changes, sweep_table
from parallax.analysis.planned.step_time import predict
from parallax.analysis.planned.sweep import LeastWork, PricedLayout, draw
from parallax.analysis.planned.topology import read_topology
from parallax.analysis.report import report
from parallax.analysis.traced.collectives import bytes_by
from parallax.analysis.traced.flops import flops_breakdown
from parallax.analysis.traced.memory import memory
from parallax.config.sections import MeshConfig
from parallax.errors import ConfigError
from parallax.sharding.mesh import resolve_sizes
from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainStep, abstract_state, init_state

ROWS, SEQ, MICROBATCHES, LAYERS, BYTES = 16, 64, 4, 8, 4
FORMS = ("all_gather", "ring", "ulysses")
WAYS = ("forward", "recompute", "backward")
FOUR = read_topology("v5e:2x2")
GQA, MLA = 2 * 4 * 8, 16 + 4  # numbers of a token that keys and values are made of: k and v, or the latent


def build(mesh, **changes):
    return tiny_model.build(mesh, microbatches=MICROBATCHES, **changes)


def adamw(model):
    return make_optimizer(tiny_model.optimizer_config(), 1000, model.plan.rows)


def over_cp(model):
    """Bytes that attention sends over cp in a step, by kind and direction."""
    sent = [one for one in step_collectives(model, ROWS, SEQ) if one.module.startswith("attention")]
    found = bytes_by([one for one in sent if one.axes == ("cp",)], "kind", "direction")
    return {key: size for key, size in found.items() if size}


# ---- bytes in closed form: of all layers and microbatches, `tokens` of a device


def of_all_gather(cp, tokens, numbers):
    return dict.fromkeys((("all-gather", "forward"), ("all-to-all", "backward")), (cp - 1) * tokens * numbers)


def of_ring(cp, tokens, numbers):
    """Forward k and v take cp - 1 hops; backward they do again, and their gradients go all the way round."""
    return {
        ("permute", "forward"): (cp - 1) * tokens * numbers,
        ("permute", "backward"): (2 * cp - 1) * tokens * numbers,
    }


def of_ulysses(cp, tokens, numbers):
    return {("all-to-all", way): (cp - 1) * tokens * numbers // cp for way in ("forward", "backward")}


# For each form what a token has: GQA's 8 heads of 8 have 4 of k and v, MLA's are 12 and 8 wide.
CLOSED = {
    ("gqa", "all_gather"): (of_all_gather, GQA),
    ("mla", "all_gather"): (of_all_gather, MLA),
    ("gqa", "ring"): (of_ring, GQA),
    ("mla", "ring"): (of_ring, 8 * (12 + 8)),
    ("gqa", "ulysses"): (of_ulysses, 2 * 8 * 8 + GQA),
    ("mla", "ulysses"): (of_ulysses, 2 * 8 * (12 + 8)),
}


@pytest.mark.fast(3)
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize(("attention", "context"), CLOSED)
def test_each_form_sends_what_it_does_in_closed_form(attention, context, cp):
    closed, numbers = CLOSED[attention, context]
    tokens = LAYERS * ROWS * SEQ // (2 * cp)
    expected = {key: BYTES * size for key, size in closed(cp, tokens, numbers).items()}
    model = build((1, 2, 1, 1, cp), attention=attention, context=context, remat="none")
    assert over_cp(model) == expected


@pytest.mark.fast(1)
@pytest.mark.parametrize("context", FORMS)
def test_what_remat_makes_again_is_sent_again(context):
    sent = over_cp(build((1, 1, 2, 1, 4), attention="gqa", context=context, remat="layer"))
    forward, again = ({kind: size for (kind, way), size in sent.items() if way == of} for of in WAYS[:2])
    assert forward == again and forward


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero1", "zero3"])
def test_weights_travel_over_dp_and_cp_together(policy):
    cut, whole = (step_collectives(build(mesh, policy=policy), 32, SEQ) for mesh in ((1, 2, 1, 1, 4), (1, 8, 1)))
    of_weights = lambda sent, axes: bytes_by(  # noqa: E731
        [one for one in sent if one.axes == axes and "norm" not in one.module and one.kind != "all-reduce"],
        "kind", "direction", "module",
    )  # fmt: skip
    found = of_weights(cut, ("dp", "cp"))
    assert found and found == of_weights(whole, ("dp",))


# ---- memory and FLOPs


@pytest.mark.slow
@pytest.mark.parametrize("context", FORMS)
def test_planned_bytes_are_those_that_a_device_holds(context):
    model = build((1, 2, 1, 1, 4), context=context)
    tx = adamw(model)
    plan = memory(model, abstract_state(model, tx).opt_state, global_batch=ROWS, seq=SEQ)
    state, device = init_state(model, tx, 0), jax.devices()[0]
    held = lambda tree: sum(  # noqa: E731
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )
    assert plan.parameters == held(state.params) and plan.optimizer == held(state.opt_state)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["xla", "splash"])
def test_what_is_saved_is_a_context_ranks_share_and_has_no_square_of_seq(kernel):
    def saved(cp, seq, remat):
        model = build((1, 1, 1, 1, cp), attention="gqa", remat=remat, kernel=kernel, context="ulysses")
        opt_state = abstract_state(model, adamw(model)).opt_state
        return memory(model, opt_state, global_batch=ROWS, seq=seq).saved_activations

    for remat in ("none", "layer"):
        # Segments are those of whole rows on each rank.
        assert saved(4, 1024, remat) == pytest.approx(saved(1, 1024, remat) / 4, rel=0.1)
        assert saved(4, 2048, remat) == pytest.approx(2 * saved(4, 1024, remat), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("context", FORMS)
def test_the_predicted_peak_is_near_the_compilers(context):
    wide = dict(vocab=2048, d_model=128, d_ff=384, heads=8, kv_heads=8, d_head=16, chunk_tokens=256, attention="gqa")
    model = build((1, 2, 1, 1, 4), context=context, remat="none", **wide)
    tx = adamw(model)
    plan = memory(model, abstract_state(model, tx).opt_state, global_batch=64, seq=512)
    made = read_compiled(TrainStep(model, tx, 0).lower(64, 512).compile(), model.mesh)
    assert plan.peak / made.together == pytest.approx(1, abs=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("context", FORMS)
@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_context_ranks_share_all_flops_but_those_of_latents_that_each_expands(attention, context):
    found = flops_breakdown(build((1, 2, 1, 1, 4), attention=attention, context=context), ROWS, SEQ)
    alone = flops_breakdown(build((1, 1, 1), attention=attention), ROWS, SEQ)
    assert found.model == alone.model / 8 and found.padding == pytest.approx(alone.padding / 8)
    assert found.masked <= alone.masked / 8 + 1  # blocks are smaller
    expanded = attention == "mla" and context == "all_gather"
    assert found.repeated == pytest.approx(3 * (4 - 1) * 2 * LAYERS * ROWS * SEQ / 8 * 16 * 8 * 16 * expanded, abs=1)


@pytest.mark.fast(1)
@pytest.mark.parametrize("layers", ["near*8", "(near*3 dense)*2"])
@pytest.mark.parametrize(("order", "neighbours"), [("zigzag", 2), ("contiguous", 1)])
def test_a_window_leaves_of_the_latents_that_a_rank_expands_those_that_it_is_sent(order, neighbours, layers):
    windows = dict(layers_of=layers, kinds="near=(sliding_window=4)", attention="mla")
    flops = flops_breakdown(build((1, 2, 1, 1, 4), context="all_gather", order=order, **windows), ROWS, SEQ)
    near = 8 if "dense" not in layers else 6
    sent = near * neighbours * (4 - 1) * ROWS // 2 + (8 - near) * (4 - 1) * ROWS * SEQ // 8
    assert flops.repeated == pytest.approx(3 * 2 * sent * 16 * 8 * 16, abs=1)


# ---- layouts


def long(**changes):
    few = dict(data_global_batch=2, data_seq=64, mesh_dp=2, mesh_cp=2, pipeline_microbatches=1, model_layers=4)
    return tiny_settings(**few | changes)


def test_cp_is_tried_where_it_is_asked_for_or_rows_are_few():
    tried = lambda settings: {(c.cp, c.context) for c in choices(settings, FOUR)}  # noqa: E731
    all_forms = {(1, "all_gather"), *((cp, form) for cp in (2, 4) for form in FORMS)}
    assert tried(long()) == tried(long(mesh_cp=1)) == all_forms
    assert tried(long(mesh_cp=1, data_global_batch=4)) == {(1, "all_gather")}
    assert tried(long(data_seq=12)) == {key for key in all_forms if key[0] < 4}  # 12 tokens are no 2 x 4 chunks


def test_contiguous_order_is_tried_if_every_layer_has_a_window():
    near = dict(mesh_dp=1, mesh_cp=4, model_kinds="near=(sliding_window=8)", data_seq=64)
    windowed, mixed = (long(model_layers_of=layers, **near) for layers in ("near*4", "near*3 dense"))
    for settings, order in ((windowed, "contiguous"), (mixed, "zigzag")):
        assert {choice.order for choice in choices(settings, FOUR) if choice.cp > 1} == {order}
        assert ({"layout.order": "contiguous"} in [*single_changes(settings, FOUR)]) == (settings is windowed)
    assert Choice.of(windowed)._replace(order="contiguous").mesh == "1·1·1 cp=4 all_gather contiguous"
    zigzag, contiguous = (
        predict(with_keys(windowed, {"layout.order": order}), at_once(FOUR)).exposed_secs["cp"]
        for order in ("zigzag", "contiguous")
    )
    assert contiguous < zigzag


def test_only_forms_are_tried_that_fit_heads_and_kernel():
    heads = {c.cp * c.tp for c in choices(long(model_heads=2, model_kv_heads=2), FOUR) if c.context == "ulysses"}
    assert max(heads) == 2
    splash = choices(long(model_kernel="splash", data_seq=2048), FOUR)
    assert {c.context for c in splash if c.cp > 1} == {"all_gather", "ulysses"}


def test_a_layout_with_context_ranks_is_applied_and_asked_for_by_flags():
    settings = long()
    own = Choice.of(settings)
    other = own._replace(cp=4, dp=1, context="ring")
    assert own.cp == 2 and Choice.of(other.applied(settings)) == other
    assert flags_of(own.keys_to(other)) == ["--config.mesh.dp=1", "--config.mesh.cp=4", "--config.layout.context=ring"]
    assert build_if_legal(other.applied(settings), FOUR) is not None


@pytest.mark.slow
def test_bounds_are_never_above_what_is_found():
    settings = long()
    least = LeastWork(settings, FOUR, build_if_legal(settings, FOUR))
    legal = [c for c in choices(settings, FOUR) if c.cp > 1 and c.pp == 1]
    for choice in legal[:: len(legal) // 9]:
        found, bound = predict(choice.applied(settings), FOUR), least.bound(choice)
        assert bound <= found.secs * (1 + 1e-9), choice


@pytest.mark.slow
def test_a_table_and_a_drawing_of_layouts_show_context_ranks():
    settings = long()
    own = Choice.of(settings)
    tried = own, own._replace(dp=1, cp=4, context="ulysses"), own._replace(dp=1, tp=4, cp=1)
    rows = [PricedLayout(choice, predict(choice.applied(settings), FOUR)) for choice in tried]
    lines = list(sweep_table(rows, {}, [], own))
    assert lines[0].split()[:5] == ["pp", "dp", "cp", "keys", "tp"] and max(map(len, lines)) <= 100
    assert "all_gather" in lines[1] and "ulysses" in lines[2]
    assert "context" in draw("tiny", rows, FOUR, own)
    assert "cp" not in next(sweep_table(rows[2:], {}, [], own)).split()


def test_advice_moves_context_ranks_and_names_the_other_forms():
    flags = {flags for flags, _ in changes_of(long(), FOUR)}
    assert {"--config.layout.context=ring", "--config.layout.context=ulysses"} <= flags
    assert {"--config.mesh.dp=1 --config.mesh.cp=4", "--config.mesh.dp=4 --config.mesh.cp=1"} <= flags
    assert not any("cp" in flag or "context" in flag for flag, _ in changes_of(tiny_settings(), PAIR))


def test_replicas_stay_in_a_plan():
    settings = tiny_settings(mesh_replica=2, mesh_dp=2, data_global_batch=8)
    assert px.plan(settings, "v5e:2x2").settings.mesh.sizes == {"pp": 1, "replica": 2, "dp": 2, "tp": 1}


# ---- prices and words


@pytest.mark.slow
def test_messages_over_cp_are_priced_between_dp_and_tp():
    found = {form: predict(long(mesh_dp=1, mesh_cp=4, layout_context=form), FOUR).exposed_secs for form in FORMS}
    assert found["all_gather"]["cp"] > found["ulysses"]["cp"] > 0
    sizes = {"pp": 1, "dp": 4, "cp": 4, "tp": 4}
    routes = {axis: read_topology("v5p:4x4x4").route(sizes, [axis]).bandwidth for axis in ("dp", "cp", "tp")}
    assert routes["tp"] >= routes["cp"] >= routes["dp"]


def test_keys_of_a_ring_travel_while_others_are_met():
    ring = predict(long(layout_context="ring"), at_once(FOUR))
    gathered = predict(long(layout_context="all_gather"), at_once(FOUR))
    assert ring.hidden_secs > gathered.hidden_secs and ring.exposed_secs["cp"] < gathered.exposed_secs["cp"]


def test_plans_and_reports_name_the_axis_and_the_form():
    settings = long()
    heading = plan_heading("long", settings, FOUR)
    assert "mesh pp=1 dp=2 cp=2 tp=1" in heading and "1 microbatch of 1 x 32 tokens a device" in heading
    assert "keys over cp by all_gather" in heading
    model = build((1, 2, 1, 1, 4), context="ring")
    step = TrainStep(model, adamw(model), 0)
    batch = {"tokens": jax.ShapeDtypeStruct((ROWS, SEQ), "int32")}
    text = str(report(step, batch, name="long", compiled=False))
    assert "pp=1 dp=2 cp=4 tp=1 on 8 devices" in text and re.search(r"^cp\n +permute", text, re.MULTILINE)


def test_a_mesh_of_other_devices_says_which_meshes_are_left_beside_cp():
    config = MeshConfig(pp=1, dp=3, tp=1, simulate=0, cp=2)
    with pytest.raises(ConfigError, match=r"mesh.cp=2 .* legal pp·dp·tp for 4: 1·4·1"):
        resolve_sizes(config, 8)
