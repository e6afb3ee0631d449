"""What FLOPs, plans, sweeps and reports say of mixtures of experts."""

import dataclasses
import inspect
import itertools
import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_model
from support.hlo_examples import HEADER
from support.plan_changes import changes_of
from support.step_collectives import step_collectives
from test_plan import tiny as tiny_settings

from parallax.analysis.compiled.program import costs_of, read_hlo_text
from parallax.analysis.planned.closed_form import ClosedForm
from parallax.analysis.planned.layouts import Choice, build_if_legal, choices, flags_of, model_on_topology
from parallax.analysis.planned.plan import plan, plan_heading, single_changes
from parallax.analysis.planned.step_time import (
    Clock,
    CompiledStep,
    StepTime,
    compile_and_read,
    compiled_parts,
    messages,
    predict,
    step_time,
    traced_work,
)
from parallax.analysis.planned.sweep import LeastWork
from parallax.analysis.planned.topology import read_topology
from parallax.analysis.traced.flops import (
    active_parameters,
    flops_breakdown,
    flops_by_direction,
    flops_per_token,
    grouped_flops,
    layers_of_stages,
    matmul_parameters_by_stack,
    parameters_by_component,
)
from parallax.analysis.traced.memory import Memory
from parallax.analysis.traced.trace import abstract_mesh
from parallax.config.sections import ModelConfig
from parallax.errors import ConfigError
from parallax.hardware.chips import KERNEL_EFFICIENCY
from parallax.model.experts.exchange_costs import even_load, exchange_of, exchanged_rows, rows_over_hosts
from parallax.model.experts.grouped_kernel import (
    gated_by_group,
    input_gradient_by_group,
    transposed_by_group,
    weights_by_group,
)
from parallax.model.experts.grouped_triton import gated_in_tiles, input_gradient_in_tiles, sums_by_group
from parallax.sharding.mesh import mesh_of
from parallax.training.facts import size_tables

ROWS, SEQ = 16, 64
FOUR = read_topology("v5e:2x2")
MIXTURE = dict(layers=8, layers_of="dense*2 moe*6", experts=8, experts_per_token=2, d_expert=24, shared_experts=1)


def on(sizes, **changes):
    """The tiny mixture for accelerators, on a mesh of no devices."""
    model = tiny_model.build((1, 1, 1), **MIXTURE | dict(microbatches=1, chunk_tokens=64) | changes)
    return model.replace(mesh=abstract_mesh(dict(pp=1, dp=1, tp=1) | sizes))


def settings(**changes):
    moe = {f"model_{name}": value for name, value in MIXTURE.items()}
    few = dict(data_global_batch=8, mesh_dp=1, mesh_ep=4, pipeline_microbatches=1, model_layers=8)
    return tiny_settings(**moe | few | changes)


# ---- parameters and FLOPs


def test_a_token_meets_its_experts_alone():
    """By hand: mla's kernels as of dense layers, three matrices an expert, of which two of eight count."""
    model = on({})
    moe, counts = 6 * 3 * 32 * 24, parameters_by_component(model.plan.declared)
    router = 6 * (32 * 8 + 8)  # its bias as well
    assert (counts["experts"], counts["shared"], counts["router"]) == (8 * moe, moe, router)
    assert counts["mlp"] == 2 * 3 * 32 * 64
    active = active_parameters(model.config, counts)
    assert active == counts | {"experts": 2 * moe}
    dense = tiny_model.build((1, 1, 1), microbatches=1)
    other = flops_per_token(dense.config, dense.plan.declared, seq=SEQ)
    found = flops_per_token(model.config, model.plan.declared, seq=SEQ)
    assert found - other == 6 * (3 * moe + 6 * 32 * 8 - 6 * 3 * 32 * 64)
    assert set(matmul_parameters_by_stack(model.config, model.plan.declared)) == {"blocks/dense", "blocks/moe"}


def test_all_parameters_and_active_ones_are_said_when_a_run_begins():
    model = on({})
    nothing_held = Memory(**dict.fromkeys(Memory._fields, 0))
    parameters = parameters_by_component(model.plan.declared)
    lines = list(size_tables(model.config, parameters, nothing_held, sum(parameters.values())))
    (active,) = (line for line in lines if line.startswith("active for a token"))
    total = sum(active_parameters(model.config, parameters_by_component(model.plan.declared)).values())
    assert f"{total:,}" in active and any(line.startswith("experts") for line in lines)


@pytest.mark.slow
def test_flops_of_experts_are_those_of_rows_in_use_on_every_mesh():
    """With an even load; in rows of 128 tokens a quarter more than that is whole blocks."""
    one = flops_breakdown(on({}), ROWS, 2 * SEQ)
    assert one.repeated == 0
    for sizes, exchange in (({"ep": 4}, "gather"), ({"ep": 4}, "ragged"), ({"dp": 2, "ep": 2}, "ragged")):
        found = flops_breakdown(on(sizes, exchange=exchange), ROWS, 2 * SEQ)
        assert found.model * 4 == pytest.approx(one.model)
        assert found.executed * 4 == pytest.approx(one.executed, rel=1e-6)


@pytest.mark.slow
def test_rows_that_fill_blocks_are_padding_and_not_the_model_s():
    model = on({})
    on_cpu = model.replace(mesh=abstract_mesh(model.axis_sizes, simulated=True))
    ragged, blocks = (flops_breakdown(one, ROWS, SEQ) for one in (model, on_cpu))
    assert blocks.model == ragged.model and blocks.padding > ragged.padding and blocks.repeated == 0
    on_ranks = model.replace(mesh=abstract_mesh(dict(pp=1, dp=1, ep=4, tp=1), simulated=True))
    assert flops_breakdown(on_ranks, ROWS, SEQ).repeated > 0  # room for tokens that do not come


def test_stages_count_layers_by_what_they_compute():
    model = on({"pp": 2}, layers_of="dense*4 moe*4", microbatches=4, d_expert=64, shared_experts=0)
    dense, moe = layers_of_stages(model, SEQ)
    assert dense < 4 < moe and dense + moe == pytest.approx(8)
    alone = on({"pp": 2}, layers_of="moe*8", microbatches=4)
    assert layers_of_stages(alone, SEQ) == [4, 4]
    assert costs_of(model.config, "attention", seq=SEQ).backward > 2


def test_a_grouped_product_multiplies_each_row_once():
    x, w, y = jnp.ones((40, 8)), jnp.ones((4, 8, 6)), jnp.ones((40, 6))
    assert grouped_flops(x.shape, w.shape, y.shape) == grouped_flops(x.shape, y.shape, w.shape) == 2 * 40 * 8 * 6


# ---- how many rows are in use


@pytest.mark.parametrize(("experts", "chosen", "ranks"), [(8, 2, 4), (8, 2, 8), (16, 6, 4), (16, 6, 2), (8, 3, 1)])
def test_an_even_load_is_the_mean_over_all_choices(experts, chosen, ranks):
    model = ModelConfig(layers=1, layers_of="moe", experts=experts, experts_per_token=chosen)
    sets = list(itertools.combinations(range(experts), chosen))
    here = experts // ranks
    own = np.mean([sum(expert < here for expert in one) for one in sets])
    room = min(chosen, here)
    assert even_load(model, ranks) * (room if ranks == 1 else min(room, 1.25 * own)) == pytest.approx(own)


def test_the_exchange_that_sends_less_is_taken_and_on_cpus_that_which_they_have():
    model = ModelConfig(layers=1, layers_of="moe", experts=64, experts_per_token=6)
    assert exchange_of("auto", model, 8, ragged=True) == "ragged"
    assert exchange_of("auto", model, 8, ragged=False) == exchange_of("auto", model, 1, ragged=True) == "gather"
    assert exchange_of("ragged", model, 8, ragged=False) == "ragged"
    assert exchange_of("gather", model, 8, ragged=True) == "gather"
    assert [exchange_of("auto", model, ranks, ragged=True) for ranks in (4, 6)] == ["gather", "ragged"]
    assert on({"ep": 4}).exchange == "ragged" and tiny_model.build((1, 1, 1, 1, 1, 4), **MIXTURE).exchange == "gather"


@pytest.mark.parametrize(("where", "exchange"), [("v5e:4x4", "ragged"), ("v5e:4x8", "gather"), ("v6e:4x8", "ragged")])
def test_no_exchange_is_chosen_that_the_compiler_refuses_for_a_slice(where, exchange):
    topology, ranks = read_topology(where), dict(model_experts=32, mesh_ep=8)
    chosen = settings(**ranks, mesh_dp=topology.devices // 8, data_global_batch=topology.devices)
    assert model_on_topology(chosen, topology).exchange == exchange
    assert f"over ep by {exchange}" in plan_heading("tiny", chosen, topology)
    others = [change["layout.exchange"] for change in single_changes(chosen, topology) if "layout.exchange" in change]
    assert others == (["gather"] if exchange == "ragged" else [])
    asked = dataclasses.replace(chosen, layout=dataclasses.replace(chosen.layout, exchange="ragged"))
    if exchange == "gather":
        with pytest.raises(
            ConfigError, match="with more than 16 chips, and this one has 32; use exchange='gather', or"
        ):
            model_on_topology(asked, topology)
    else:
        assert model_on_topology(asked, topology).exchange == "ragged"


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gather", "ragged"])
def test_the_bytes_of_tokens_are_those_of_the_closed_form(exchange):
    model = on({"ep": 4}, exchange=exchange, layers_of="moe*8", remat="none")
    sent = [one for one in step_collectives(model, ROWS, SEQ) if one.axes == ("ep",)]
    tokens = [one for one in sent if one.direction == "forward" and one.module.startswith("mlp")]
    wide = sum(one.total_bytes for one in tokens if one.bytes >= ROWS // 4 * SEQ * 32)
    rows, here = exchanged_rows(model.config, 4)[exchange], ROWS // 4 * SEQ
    # Those of each of the eight experts are sent in units of 8, so there may be 7 more.
    filled = 1 + 7 * 8 / (model.config.experts_per_token * here) if exchange == "ragged" else 1
    assert wide == pytest.approx(filled * rows * 8 * here * 32 * 4, rel=1e-3)


# ---- plans


def test_a_plan_says_how_tokens_come_to_experts():
    heading = plan_heading("wide", settings(), FOUR)
    assert "a token goes to 2 of 8 experts, over ep by ragged: 50.0 % of the bytes of gather" in heading
    chunks = plan_heading("wide", settings(layout_expert_chunk_tokens=64), FOUR)
    assert chunks.splitlines()[-1].endswith("64 tokens at once")
    assert "experts" not in plan_heading("wide", tiny_settings(mesh_dp=4), FOUR)
    flags = {flags for flags, _ in changes_of(settings(), FOUR)}
    assert "--config.layout.exchange=gather" in flags and "--config.layout.exchange=ragged" not in flags


@pytest.mark.parametrize(
    ("where", "hides"),
    [("v5e:2x2", True), ("v5p:2x2x1", True), ("v6e:2x2", False), ("v7x:2x1x1", False), ("H100:1x4", False)],
)
def test_rows_sent_to_experts_hide_where_the_compiler_sends_them_beside_compute(where, hides):
    topology = read_topology(where)
    asked = settings(layout_exchange="ragged", mesh_ep=topology.devices, mesh_dp=1)
    traced = traced_work(model_on_topology(asked, topology), asked)
    rows = [call for call in traced.sent if call.bytes and call.axes == ("ep",) and call.kind == "all-to-all"]
    assert rows and all(m.hides == hides for m in messages(rows, topology, asked, traced.per_use))


@pytest.mark.slow
def test_a_plan_prices_the_exchange():
    over_ep = [plan(settings(layout_exchange=name), FOUR).estimate.exposed_secs["ep"] for name in ("ragged", "gather")]
    assert 0 < over_ep[0] < over_ep[1]


TWO_HOSTS = read_topology("H100:2x2")


def over_hosts(hosts, **changes):
    asked = dict(layout_exchange="ragged", layout_exchange_hosts=hosts, model_experts=16, model_experts_per_token=8)
    return settings(**asked | changes)


def test_a_plan_says_what_goes_between_hosts():
    lines = plan_heading("wide", over_hosts(2), TWO_HOSTS).splitlines()
    assert lines[-1].endswith("once to each of 2 hosts, 1.00 in place of 4 rows between them")
    one_level, two_levels = ({"layout.exchange_hosts": 1}, {"layout.exchange": "ragged", "layout.exchange_hosts": 2})
    assert two_levels in [*single_changes(over_hosts(1), TWO_HOSTS)]
    changes = [*single_changes(over_hosts(2), TWO_HOSTS)]
    assert one_level in changes and one_level | {"layout.exchange": "gather"} in changes
    on_one_host = [*single_changes(over_hosts(1), read_topology("H100:4")), *single_changes(over_hosts(1), FOUR)]
    assert not any("layout.exchange_hosts" in change for change in on_one_host)


def test_messages_of_an_exchange_over_hosts_are_priced_by_the_links_of_their_ranks():
    """Between hosts by the network, inside by the switch; bytes between hosts are those of tokens, once for each."""
    own = over_hosts(2)
    model = build_if_legal(own, TWO_HOSTS)
    rows, seq = own.data.global_batch, own.data.seq
    sent = [call for call in step_collectives(model, rows, seq) if call.axes == ("ep",) and call.kind == "all-to-all"]
    assert {call.group for call in sent} == {(0, 2), (0, 1)}
    between = sum(call.total_bytes for call in sent if call.group == (0, 2) and call.direction == "forward")
    row = own.model.d_model * jnp.dtype(own.model.dtype).itemsize * own.model.layer_bases.count("moe")
    tokens, (rows_between, _) = rows * seq // 4, rows_over_hosts(own.model, 4, 2)
    assert between == pytest.approx(rows_between * tokens * row, rel=1e-3)
    sizes = own.mesh.sizes
    network, switch = (TWO_HOSTS.route(sizes, ("ep",), group) for group in ((0, 2), (0, 1)))
    assert network.to_one == TWO_HOSTS.chip.dcn_bandwidth < switch.to_one
    with_tp = {"dp": 1, "ep": 2, "tp": 2}
    assert TWO_HOSTS.route(with_tp, ("ep",), (0, 1)).to_one == TWO_HOSTS.chip.dcn_bandwidth


def test_a_plan_refuses_hosts_on_which_expert_ranks_are_not():
    for hosts, topology, said in ((2, "H100:4", "ranks are on 1 host"), (4, "H100:2x2", "ranks are on 2 hosts")):
        with pytest.raises(ConfigError, match=f"exchange_hosts={hosts}, but the mesh.ep=4 {said}"):
            model_on_topology(over_hosts(hosts), read_topology(topology))
    with pytest.raises(ConfigError, match="use exchange_hosts=1 on TPUs"):
        model_on_topology(over_hosts(2), FOUR)


def test_a_search_has_each_layout_s_own_number_of_hosts_for_its_experts():
    """Where the settings ask for an exchange over hosts: else they would be those of other layouts, and illegal."""
    tried = [*choices(over_hosts(2), TWO_HOSTS)]
    own = {(choice.ep, choice.tp, choice.cp): choice.exchange_hosts for choice in tried if choice.ep > 1}
    assert own == {(2, 1, 1): 1, (2, 2, 1): 2, (4, 1, 1): 2}
    shapes = {choice.mesh: choice for choice in tried if choice.schedule == "gpipe" and choice.ep > 1}
    assert {"1·2·1 ep=2 ragged", "1·1·2 ep=2 ragged on 2 hosts", "1·1·1 ep=4 ragged on 2 hosts"} < {*shapes}
    for choice in shapes.values():
        assert build_if_legal(choice._replace(microbatches=1).applied(over_hosts(2)), TWO_HOSTS), choice
    assert {choice.exchange_hosts for choice in choices(over_hosts(1), TWO_HOSTS)} == {1}
    changes = [*single_changes(over_hosts(2), TWO_HOSTS)]
    assert {"mesh.dp": 2, "mesh.ep": 2, "layout.exchange_hosts": 1} in changes


@pytest.mark.slow
def test_the_closed_form_and_the_bound_know_an_exchange_over_hosts():
    own = over_hosts(2)
    choice, step = Choice.of(own), predict(own, TWO_HOSTS)
    assert ClosedForm(own, TWO_HOSTS).estimate(choice).secs == pytest.approx(step.secs, rel=0.02)
    assert LeastWork(own, TWO_HOSTS, build_if_legal(own, TWO_HOSTS)).bound(choice) <= step.secs


@pytest.mark.slow
def test_bounds_are_never_above_what_is_found():
    own = settings()
    least, choice = LeastWork(own, FOUR, build_if_legal(own, FOUR)), Choice.of(own)
    tried = [choice._replace(exchange="gather", remat="none"), choice._replace(dp=4, ep=1, policy="zero1")]
    tried += [choice._replace(ep=2, tp=2, remat="attention"), choice._replace(ep=2, dp=2, remat="elementwise")]
    for one in tried:
        assert least.bound(one) <= predict(one.applied(own), FOUR).secs * (1 + 1e-9), one


def test_a_layout_with_an_exchange_is_asked_for_by_a_flag():
    own = Choice.of(settings())
    other = own._replace(exchange="gather")
    assert flags_of(own.keys_to(other)) == ["--config.layout.exchange=gather"] and other.mesh == "1·1·1 ep=4 gather"
    assert Choice.of(other.applied(settings())) == other


def test_expert_ranks_must_divide_the_experts():
    with pytest.raises(ConfigError, match=r"model.experts=8 does not divide over mesh.ep=3") as error:
        on({"ep": 3}, heads=6, d_model=48)
    assert "\n" not in str(error.value)


# ---- compiled programs

COMPILED = """ENTRY %main (x.1: bf16[64,32], w.1: bf16[2,32,16]) -> bf16[2,32,16] {
  %x.1 = bf16[64,32]{1,0} parameter(0)
  %w.1 = bf16[2,32,16]{2,1,0} parameter(1)
  %zeros.1 = bf16[256,32]{1,0} parameter(2)
  %sizes.1 = s32[4]{0} parameter(3)
  %ragged.1 = bf16[256,32]{1,0} ragged-all-to-all(%x.1, %zeros.1, %sizes.1, %sizes.1, %sizes.1, %sizes.1), \
channel_id=1, replica_groups={{0,1,2,3}}, metadata={op_name="jit(f)/mlp/exchange.sent/ragged_all_to_all"}
  %ragged-dot-metadata = (s32[3]{0}, s32[9]{0}) custom-call(%sizes.1), custom_call_target="tpu_custom_call"
  %ragged-dot-none.1 = bf16[256,16]{1,0} custom-call(%sizes.1, %ragged.1, %w.1), custom_call_target="tpu_custom_call"
  ROOT %tgmm.1 = bf16[2,32,16]{2,1,0} custom-call(%sizes.1, %ragged.1, %ragged-dot-none.1), \
custom_call_target="tpu_custom_call"
}
"""


def test_kernels_of_a_plan_take_the_share_of_peak_that_is_said():
    kernel = read_hlo_text(HEADER + COMPILED, mesh_of(ep=4, dp=1)).pallas_calls[1]
    how = dict(dtype="bfloat16", lockstep=True)
    memory = FOUR.chip._replace(hbm_bandwidth=1e30)
    secs = [sum(Clock(None, memory, **how, kernel_efficiency=share).run([kernel]).values()) for share in (1, 0.7)]
    assert secs[0] / secs[1] == pytest.approx(KERNEL_EFFICIENCY) == pytest.approx(0.7)
    for what in (step_time, compile_and_read):
        assert inspect.signature(what).parameters["kernel_efficiency"].default == KERNEL_EFFICIENCY


def test_kernels_and_ragged_exchanges_are_priced_by_the_rows_in_use():
    mesh = mesh_of(ep=4, dp=1)
    load = even_load(ModelConfig(layers=1, layers_of="moe", experts=8, experts_per_token=2), 4)
    full, read = (read_hlo_text(HEADER + COMPILED, mesh, None, *given) for given in ((), (load,)))
    (sent,) = read.collectives
    assert (sent.kind, sent.axes) == ("all-to-all", ("ep",))
    assert sent.bytes == pytest.approx(64 * 32 * 2 * 3 / 4, rel=1e-3)
    metadata, product, gradient = read.pallas_calls
    assert metadata.flops == 0
    assert product.flops == gradient.flops == round(load * 2 * 256 * 32 * 16)
    assert product.operand_bytes == round(4 * 4 + load * 256 * 32 * 2 + 2 * 32 * 16 * 2)
    assert gradient.result_bytes == 2 * 32 * 16 * 2 and all(one.grouped for one in (product, gradient))
    assert full.pallas_calls[1].flops == 2 * 256 * 32 * 16


def test_grouped_kernels_in_8_bits_are_priced_at_the_speed_of_these():
    text = HEADER + COMPILED
    for before, after in (("x.1: bf16", "x.1: s8"), ("w.1: bf16", "w.1: s8"), ("= bf16[64,32]", "= s8[64,32]")):
        text = text.replace(before, after)
    text = text.replace("= bf16[2,32,16]{2,1,0} parameter", "= s8[2,32,16]{2,1,0} parameter")
    text = text.replace("= bf16[256,32]", "= s8[256,32]").replace("none.1 = bf16[", "none.1 = s32[")
    product, plain = (read_hlo_text(found, mesh_of(ep=4, dp=1)).pallas_calls[1] for found in (text, HEADER + COMPILED))
    assert (product.matmul, plain.matmul) == ("int8", "compute")
    assert product.flops == plain.flops == 2 * 256 * 32 * 16
    assert product.operand_bytes == 4 * 4 + 256 * 32 + 2 * 32 * 16 and product.result_bytes == 256 * 16 * 4
    chip = FOUR.chip
    clock = Clock(mesh_of(ep=4, dp=1), chip, "bfloat16", lockstep=True, kernel_efficiency=1e-3)
    (slow,), (fast,) = (clock.run([one]).values() for one in (plain, product))
    assert slow / fast == pytest.approx(chip.matmul_speed("int8"))


GATED = """ENTRY %main (x.1: bf16[256,32], w.1: bf16[2,32,16]) -> bf16[256,16] {
  %x.1 = bf16[256,32]{1,0} parameter(0)
  %w.1 = bf16[2,32,16]{2,1,0} parameter(1)
  %weights.1 = f32[256,1]{1,0} parameter(2)
  %sizes.1 = s32[2]{0} parameter(3)
  %gmm_gated.1 = (bf16[256,16]{1,0}, bf16[256,16]{1,0}, bf16[256,16]{1,0}) custom-call(%sizes.1, %x.1, %w.1, %w.1, \
%weights.1), custom_call_target="tpu_custom_call"
  ROOT %y.1 = bf16[256,16]{1,0} get-tuple-element(%gmm_gated.1), index=2
}
"""

# XLA lets the kernel write into a slot.
FUSED = (
    GATED.replace("ENTRY %main", "%inner").replace("ROOT %y.1", "ROOT %y.3")
    + """
ENTRY %main (x.2: bf16[256,32], w.2: bf16[2,32,16]) -> bf16[256,16] {
  %x.2 = bf16[256,32]{1,0} parameter(0)
  %w.2 = bf16[2,32,16]{2,1,0} parameter(1)
  %weights.2 = f32[256,1]{1,0} parameter(2)
  %sizes.2 = s32[2]{0} parameter(3)
  ROOT %gmm_gated.2 = bf16[256,16]{1,0} fusion(%x.2, %w.2, %weights.2, %sizes.2), kind=kCustom, calls=%inner
}
"""
)


def test_kernels_for_gated_experts_multiply_by_each_of_their_matrices():
    array = lambda *shape: jax.ShapeDtypeStruct(shape, "bfloat16")  # noqa: E731
    x, rows, weights = (array(256, width) for width in (32, 16, 1))
    into = array(2, 32, 16)
    sizes = jax.ShapeDtypeStruct((2,), "int32")

    def flops(kernel, *args):
        return flops_by_direction(jax.make_jaxpr(kernel)(*args, sizes), rank={}, share_of_rows=0.5)["forward"]

    product = 0.5 * 2 * 256 * 32 * 16
    assert flops(gated_by_group, x, into, into, weights) == 2 * product
    assert flops(input_gradient_by_group, rows, rows, into, into) == 2 * product
    for text in (GATED, FUSED):
        (read,) = read_hlo_text(HEADER + text, mesh_of(ep=4, dp=1), None, 0.5).pallas_calls
        assert read.grouped and read.flops == 2 * product and read.result_bytes == 0.5 * 3 * 256 * 16 * 2


# As XLA for GPU calls kernels for Triton: all by one name, with tables of tiles before the operands.
FOR_GPUS = """ENTRY %main (x.1: bf16[256,32], w.1: bf16[2,32,16]) -> bf16[256,16] {
  %x.1 = bf16[256,32]{1,0} parameter(0)
  %w.1 = bf16[2,32,16]{2,1,0} parameter(1)
  %weights.1 = f32[256,1]{1,0} parameter(2)
  %tiles.1 = s32[5]{0} parameter(3)
  %pallas_call.4 = (bf16[256,16]{1,0}, bf16[256,16]{1,0}, bf16[256,16]{1,0}) custom-call(%tiles.1, %tiles.1, %tiles.1, \
%x.1, %w.1, %w.1, %weights.1), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(step)/by_group/gmm_gated/pallas_call"}
  ROOT %y.1 = bf16[256,16]{1,0} get-tuple-element(%pallas_call.4), index=2
}
"""


def test_kernels_for_groups_on_gpus_are_counted_as_their_products():
    array = lambda *shape: jax.ShapeDtypeStruct(shape, "bfloat16")  # noqa: E731
    x, rows, weights, into = array(256, 32), array(256, 16), array(256, 1), array(2, 32, 16)
    sizes = jax.ShapeDtypeStruct((2,), "int32")

    def flops(kernel, *args):
        return flops_by_direction(jax.make_jaxpr(kernel)(*args), rank={}, share_of_rows=0.5)["forward"]

    product = 0.5 * 2 * 256 * 32 * 16
    biases = [array(2, 16)] * 2
    assert flops(gated_in_tiles, x, into, into, weights, sizes) == 2 * product
    with_biases = lambda *args: gated_in_tiles(*args[:-2], biases_EU=args[-2:])  # noqa: E731
    assert flops(with_biases, x, into, into, weights, sizes, *biases) == 2 * product
    assert flops(input_gradient_in_tiles, rows, rows, into, into, sizes) == 2 * product
    assert flops(sums_by_group, x, rows, sizes) == flops(sums_by_group, x, rows, sizes, into) == product
    (read,) = read_hlo_text(HEADER + FOR_GPUS, mesh_of(ep=4, dp=1), None, 0.5).pallas_calls
    assert read.grouped and read.flops == 2 * product and read.result_bytes == 0.5 * 3 * 256 * 16 * 2


@pytest.mark.slow
def test_a_plan_prices_grouped_products_in_8_bits_as_such():
    """Those of the forward pass and of gradients of rows, which are as many."""

    def flops_of(**how):
        own = settings(pipeline_remat="none", **how)
        found = Counter()
        for one in traced_work(build_if_legal(own, FOUR), own).products:
            found[one.matmul, one.direction] += one.count * one.flops
        return found

    plain, narrow = flops_of(), flops_of(model_matmul="int8", model_matmul_parts="experts")
    assert narrow["int8", "forward"] == narrow["int8", "backward"] > 0 == plain["int8", "forward"]
    assert narrow.total() == plain.total()


USUAL = """%few (p.1: bf16[64,32]) -> bf16[64,32] {
  %p.1 = bf16[64,32]{1,0} parameter(0)
  ROOT %rows.1 = bf16[64,32]{1,0} fusion(%p.1), kind=kCustom, calls=%gathered, \
metadata={op_name="jit(f)/mlp/usual_load/cond/branch_1_fun/gather"}
}

%gathered (p.2: bf16[64,32]) -> bf16[64,32] {
  %p.2 = bf16[64,32]{1,0} parameter(0)
  ROOT %gather.2 = bf16[64,32]{1,0} gather(%p.2, %p.2), offset_dims={1}
}

%all (p.3: bf16[64,32]) -> bf16[64,32] {
  %p.3 = bf16[64,32]{1,0} parameter(0)
  ROOT %dear.3 = bf16[64,32]{1,0} add(%p.3, %p.3), backend_config={"estimated_cycles":"1000000"}, \
metadata={op_name="jit(f)/mlp/usual_load/cond/branch_0_fun/add"}
}

ENTRY %main (x.1: bf16[64,32], few.1: s32[]) -> bf16[64,32] {
  %x.1 = bf16[64,32]{1,0} parameter(0)
  %few.1 = s32[] parameter(1)
  ROOT %y.1 = bf16[64,32]{1,0} conditional(%few.1, %x.1, %x.1), branch_computations={%all, %few}
}
"""


def test_the_branch_of_a_usual_load_is_priced_whatever_the_compiler_calls_it_and_rows_that_are_gathered():
    read = read_hlo_text(HEADER + USUAL, mesh_of(ep=4, dp=1))
    assert read.cycles is None  # of the other branch, which is dearer
    (rows,) = read.pallas_calls
    assert (rows.operand_bytes, rows.result_bytes, rows.flops) == (64 * 32 * 2, 64 * 32 * 2, 0)


def test_grouped_products_are_a_part_of_the_time_by_themselves():
    time = StepTime(1.0, {"ep": 0.5}, 0.75, 2.25, 0.0, 0.5, 0.5)
    assert compiled_parts(time) == {
        "compute": 1.0, "attention kernel": 0.25, "grouped products": 0.5, "exposed over ep": 0.5
    }  # fmt: skip
    assert "grouped products" not in compiled_parts(time._replace(grouped_secs=0.0))
    assert CompiledStep("", time=time).time.grouped_secs == 0.5


# ---- kernels of gradients


def group_sizes():
    rng, sizes = random.Random(0), []
    while sum(sizes) < 300:
        sizes.append(rng.choice([0, 1, 40, 128, 130]))
    return sizes


def test_the_kernel_sums_over_the_rows_of_each_group():
    """And adds the sums to others."""
    sizes = group_sizes()
    x, y = (np.random.default_rng(0).normal(size=(512, width)).astype(np.float32) for width in (48, 24))
    args = *map(jnp.asarray, (x, y)), jnp.asarray(sizes, jnp.int32)
    found = weights_by_group(*args, interpret=True)
    ends = np.cumsum([0, *sizes])
    wanted = np.stack([x[a:b].T @ y[a:b] for a, b in itertools.pairwise(ends)])
    assert found.shape == (len(sizes), 48, 24)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    others = np.random.default_rng(1).normal(size=wanted.shape).astype(np.float32)
    np.testing.assert_allclose(weights_by_group(*args, jnp.asarray(others), interpret=True), wanted + others, atol=1e-4)


@pytest.mark.parametrize("widths", [(48, 24), (24, 1100)], ids=str)
def test_the_kernel_multiplies_rows_by_their_group_s_matrix_transposed(widths):
    """A block has 1024 entries at most."""
    sizes, (into, out) = group_sizes(), widths
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, out)).astype(np.float32)
    w = rng.normal(size=(len(sizes), into, out)).astype(np.float32)
    found = transposed_by_group(*map(jnp.asarray, (x, w)), jnp.asarray(sizes, jnp.int32), interpret=True)
    ends = np.cumsum([0, *sizes])
    wanted = np.concatenate([x[a:b] @ w[at].T for at, (a, b) in enumerate(itertools.pairwise(ends))])
    assert found.shape == (512, into)
    np.testing.assert_allclose(found[: ends[-1]], wanted, atol=1e-4)


def test_a_model_of_one_kind_has_one_stack():
    model = on({}, layers_of="moe*8")
    assert set(matmul_parameters_by_stack(model.config, model.plan.declared)) == {"blocks"}
    assert parameters_by_component(model.plan.declared)["mlp"] == 0
    assert dataclasses.replace(model.layout, exchange="ragged").exchange == "ragged" and jax.device_count() >= 4
