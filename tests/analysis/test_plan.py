"""A plan's memory, time and search, without any of the chips that it is for."""

import contextlib
import functools
import io
import itertools
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from collections import Counter
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from support.plan_changes import changes_of
from support.run_examples import cached, settings_of_model
from support.stand_ins import on_write
from support.step_collectives import at_once

from configs.llama2_7b_64 import get_config as llama2_7b_64
from parallax.analysis.planned import plan as plan_module
from parallax.analysis.planned import step_time
from parallax.analysis.planned import sweep as sweep_module
from parallax.analysis.planned.devices import fastest_matmul, local_topology, matmul_lines
from parallax.analysis.planned.layouts import (
    SMALLER_SUMS,
    VIRTUAL,
    Choice,
    build_if_legal,
    choices,
    flags_of,
    model_on_topology,
    policies,
)
from parallax.analysis.planned.moves import SentPerUse
from parallax.analysis.planned.plan import (
    LEAST_SPEEDUP,
    REMAT_WIDTH,
    Change,
    Prices,
    best_of_each_key,
    changes_table,
    compiled_lines,
    eight_bit_lines,
    enough_lines,
    estimate_parts,
    fastest_line,
    helpful_changes,
    passed_over_lines,
    plan_heading,
    priced_changes,
    sets_table,
    single_changes,
    smaller_microbatches,
    sweep_table,
    tensor_forms,
    verdict,
    without_repeats,
)
from parallax.analysis.planned.step_time import (
    CompiledStep,
    Overlap,
    StepTime,
    TracedWork,
    by_axes,
    bytes_on_their_way,
    estimate,
    hidden_secs,
    messages,
    predict,
    secs_beside,
    share_that_hides,
    traced_work,
)
from parallax.analysis.planned.sweep import Cache, LeastWork, PricedLayout, Sweep, draw, front, price
from parallax.analysis.planned.topology import GET_CUDA, devices_of, read_topology
from parallax.analysis.traced import trace
from parallax.analysis.traced.collectives import Sent, collectives
from parallax.analysis.traced.flops import flops_in_8_bits_per_token
from parallax.analysis.traced.memory import Memory, predicted_memory
from parallax.analysis.traced.recompute import sets_to_try
from parallax.cli import plan as command
from parallax.cli.command import read_command
from parallax.config.sections import AXES, POLICY_NAMES, ModelConfig
from parallax.config.settings import read_settings
from parallax.errors import ConfigError, ParallaxError
from parallax.hardware.chips import chip
from parallax.schedules import SCHEDULES
from parallax.step.step import model_of

ROOT = pathlib.Path(__file__).parents[2]
PAIR = read_topology("v5e:1x2")
TINY = """
from configs.base import get_config as get_base

def get_config():
    config = get_base()
    config.mesh.update(pp=1, dp=2, tp=2)
    config.model.update(vocab=64, layers=2, d_model=32, d_ff=64, heads=4, kv_heads=4, d_head=8, d_latent=16, d_rope=4)
    config.model.update(attention="gqa", dtype="bfloat16", kernel="xla")
    config.pipeline.microbatches = 2
    config.data.update(seq=16, global_batch=4)
    return config
"""


def tiny(**changes):
    """Settings of the tiny model on two chips; `changes` are written as mesh_dp=2."""
    scope: dict = {}
    exec(TINY, scope)
    config = scope["get_config"]()
    config.mesh.tp = 1
    for name, value in changes.items():
        section = next(known for known in sorted(config, key=len, reverse=True) if name.startswith(f"{known}_"))
        config[section][name.removeprefix(f"{section}_")] = value
    return read_settings(config.to_dict())


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text(TINY)
    return f"--config={path}"


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    """Plans of equal settings on equal meshes share their traced step, and what it costs and holds; none of these tests
    changes what is traced."""

    def of(model, *shape):
        return *settings_of_model(model.settings, model.mesh), model.measures, shape

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_step_program", cached(trace._step_program, of))
        for name in ("predicted_memory", "traced_work"):
            function = getattr(step_time, name)
            patch.setattr(step_time, name, cached(function, lambda model, settings: (settings, model.mesh)))
        yield


@functools.cache
def model_for(settings):  # one for memory and work, which then trace one step
    return model_on_topology(settings, PAIR)


@functools.cache
def held_of(settings):
    return predicted_memory(model_for(settings), settings)


@functools.cache
def traced_of(settings):
    return traced_work(model_for(settings), settings)


@pytest.fixture(scope="module")
def few():
    """A sweep that looks at few layouts, legal and not; each is traced, which takes about a second, in one test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_module, "choices", lambda *args: list(choices(*args))[::41])
        patch.setattr(sweep_module, "sets_to_try", lambda *args, **how: ["none", "layer", "elementwise"])
        patch.setattr(sweep_module, "predicted_memory", lambda model, settings: held_of(settings))
        patch.setattr(sweep_module, "traced_work", lambda model, settings: traced_of(settings))
        yield


@pytest.fixture(scope="module")
def found(few, tmp_path_factory):
    """A finished sweep, in which all layouts are kept."""
    search = Sweep(tiny(), PAIR, Cache(tmp_path_factory.mktemp("plan")), keep=1000)
    search.run()
    return search


def test_a_plan_in_one_call_fills_the_mesh_and_refuses_another_size():
    assert predict(tiny(mesh_dp=-1), PAIR) == predict(tiny(), PAIR)
    with pytest.raises(ConfigError, match="v5e:1x2 has 2 devices: .*dp=4"):
        predict(tiny(mesh_dp=4), PAIR)


# ---- time


def test_messages_over_dp_take_their_bytes_over_the_links_of_dp():
    settings = tiny()
    model = model_on_topology(settings, PAIR)
    batch = dict.fromkeys(("tokens", "labels", "segments", "positions"), jax.ShapeDtypeStruct((4, 16), "int32"))
    sizes = {"pp": 1, "dp": 2, "tp": 1}
    sent = collectives(model.loss_and_grad, model.shapes, batch, rank=dict.fromkeys(sizes, 0), sizes=sizes)
    # A sum over "pp dp" is one over dp, where pp has one rank.
    bytes_over_dp = sum(one.bytes * one.count for one in sent if one.axes in [("dp",), ("pp", "dp")])
    found = predict(settings, at_once(PAIR))
    # Two chips in a row have one link to each other, of 50 GB/s, of which messages reach nine tenths.
    assert found.exposed_secs["dp"] + found.hidden_secs == pytest.approx(bytes_over_dp / 45e9)


def test_the_parts_of_a_step_add_up_to_it():
    found = predict(tiny(mesh_pp=2, mesh_dp=1, pipeline_schedule="one_f_one_b"), PAIR)
    assert found.bubble == pytest.approx(1 / 3)  # P - 1 over M + P - 1
    busy = found.work_secs + sum(found.exposed_secs.values())
    assert found.bubble_secs > 0.3 * busy
    assert found.secs == pytest.approx(busy + found.bubble_secs + found.update_secs)


def test_messages_between_stages_hide_behind_one_pass_each_where_gradients_wait_for_f():
    """Of four ticks, three have a B, and three an F: what is sent in the others is exposed, and all that is sent with
    other schedules, or on GPUs."""
    settings = tiny(mesh_pp=2, mesh_dp=1, pipeline_schedule="one_f_one_b")
    found, traced = predict(settings, PAIR), traced_work(model_on_topology(settings, PAIR), settings)
    sent = messages(traced.sent, PAIR, settings, traced.per_use)
    over_pp = [each for each in sent if each.axes == "pp"]
    forward, backward = (next(each for each in over_pp if each.beside == name) for name in ("forward", "backward"))
    assert traced.ticks_beside[:2] == (3, 3) and forward.calls == backward.calls == 4
    # What is exposed over pp has the sums over "pp dp", too, where dp has one rank.
    after_them = [each for each in sent if each.axes == "pp dp"]
    assert found.exposed_secs["pp"] + found.beside_secs == pytest.approx(
        sum(each.secs for each in over_pp + after_them)
    )
    microbatches = settings.pipeline.microbatches
    long, short = [("forward", 7.0 * microbatches), ("backward", 9.0 * microbatches)], [("forward", 1e-12)]
    assert secs_beside(forward, long, traced.ticks_beside) == pytest.approx(3 / 4 * forward.secs)
    assert secs_beside(backward, long, traced.ticks_beside) == pytest.approx(3 / 4 * backward.secs)
    assert secs_beside(forward, short, traced.ticks_beside) == 0, "no B"
    assert secs_beside(backward, short, traced.ticks_beside) == pytest.approx(3e-12 / microbatches)
    for schedule in ("gpipe", "zero_bubble"):
        assert predict(tiny(mesh_pp=2, mesh_dp=1, pipeline_schedule=schedule), PAIR).beside_secs == 0
    assert predict(settings, read_topology("H100:1x2")).beside_secs == 0


@pytest.mark.fast(1)
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_of_one_microbatch_the_layers_messages_are_of_the_ticks_as_of_several(policy):
    """With embedding and head outside of the ticks: the same tokens pass through the layers, over tp the same bytes."""

    def ticking(microbatches):
        settings = tiny(
            mesh_pp=2,
            mesh_tp=2,
            data_global_batch=8,
            pipeline_schedule="gpipe",
            pipeline_microbatches=microbatches,
            data_parallel_policy=policy,
        )
        eight = at_once(read_topology("v5e:2x4"))
        traced = traced_work(model_on_topology(settings, eight), settings)
        sent = messages(traced.sent, eight, settings, traced.per_use)
        return by_axes((message for message in sent if message.ticking), settings.mesh.sizes)

    one, four = ticking(1), ticking(4)
    assert one["tp"] == pytest.approx(four["tp"]) and one["tp"] > 0
    assert one.get("dp", 0) == pytest.approx(four.get("dp", 0) / 4)  # what travels does so for each
    assert ("dp" in one) == (policy != "zero1" and policy != "ddp")


@pytest.mark.parametrize(("where", "hides"), [("H100:1x2", True), ("v5p:2x1x1", True), ("v5e:1x2", False)])
def test_gathers_hide_behind_the_work_and_reduce_scatters_where_the_compiler_makes_them_asynchronous(where, hides):
    """On a TPU SparseCores run them, if it has them."""
    topology, settings = read_topology(where), tiny(fsdp_reduce="float32")
    traced = traced_work(model_on_topology(settings, topology), settings)
    calls = [call for call in traced.sent if call.bytes]
    sent = messages(calls, topology, settings, traced.per_use)
    hiding = {call.kind for call, message in zip(calls, sent, strict=True) if message.hides}
    assert hiding == {"all-gather", *["reduce-scatter"] * hides}
    assert predict(settings, topology).hidden_secs > 0


@pytest.mark.parametrize(
    ("where", "hides"), [("v5e:4x4", True), ("v5e:4x8", False), ("v5p:4x4x4", True), ("H100:2x8", True)]
)
def test_exchanges_of_gradients_hide_where_the_compiler_makes_them_asynchronous(where, hides):
    topology, settings = read_topology(where), tiny(model_dtype="bfloat16", fsdp_reduce="compute")
    sent = [Sent("all-to-all", ("dp",), 10**9, 2, "backward", "attention/q", "")]
    per_use = SentPerUse(frozenset({"attention"}), gradients=frozenset({"attention/q"}))
    (exchange,) = messages(sent, topology, settings, per_use)
    assert exchange.hides == hides
    tried = list(single_changes(settings, topology))
    assert ({"fsdp.reduce": "float32"} in tried) == (where != "v5e:4x4")


@pytest.mark.parametrize(("where", "waits"), [("H100:1x2", True), ("v5e:1x2", False)])
def test_messages_of_gpus_hide_as_far_as_xlas_scheduler_has_memory(where, waits):
    """All do with much memory, none with less than a step always holds, and a little less hides a little fewer."""
    pair, settings = read_topology(where), tiny(data_seq=512, loss_chunk_tokens=512)
    needed = predict(settings, pair).peak_bytes

    def step(share):
        return predict(settings, pair._replace(chip=pair.chip._replace(usable_bytes=round(share * needed))))

    roomy, short = step(1.5), step(0.01)
    assert roomy.share_that_hides == 1 and roomy.hidden_secs > 0
    assert (short.hidden_secs == 0) == (short.secs > roomy.secs) == (short.share_that_hides == 0) == waits
    steps = [step(1.5 - 0.02 * number) for number in range(70)]
    shares = [each.share_that_hides for each in steps]
    assert shares == sorted(shares, reverse=True)
    assert max(more - less for more, less in itertools.pairwise(shares)) < 0.05
    between = [each for each in steps if 0 < each.share_that_hides < 1]
    assert bool(between) == waits and all(roomy.secs < each.secs < short.secs for each in between)
    for each in (roomy, *between, short):
        said = [line for line in estimate_parts(each, pair, settings.model) if "XLA's scheduler" in str(line)]
        assert len(said) == (each.share_that_hides < 1)
        assert all(f" {100 * each.share_that_hides:.1f} % of the messages" in line for line in said)


def test_memory_for_messages_counts_what_is_on_its_way_and_what_a_layer_holds_for_a_time():
    """By hand: two layers of one matrix of 800 entries each, in bfloat16, gathered by eight ranks and exchanged."""
    topology = read_topology("H100:1x8")
    settings = tiny(mesh_dp=8, data_global_batch=16, pipeline_microbatches=2, model_layers=2)
    sent = [
        Sent("all-gather", ("dp",), 1400, 4, "forward", "mlp/up", ""),
        Sent("all-gather", ("dp",), 1400, 4, "recompute", "mlp/up", ""),
        Sent("all-to-all", ("dp",), 1400, 4, "backward", "mlp/up", ""),
        Sent("all-gather", ("dp",), 700, 2, "forward", "attention/q", ""),  # once a step, for both layers
    ]
    used = frozenset({"mlp/up"})
    traced = TracedWork([], sent, 0.0, 0.0, per_use=SentPerUse(frozenset({"mlp", "attention"}), used, used))
    on_their_way = bytes_on_their_way(traced, settings)
    assert on_their_way == 1600 + 2 * 1600  # the next layer's; gradients that leave, and those that arrive
    nothing = dict.fromkeys(Memory._fields, 0)
    held = Memory(**nothing | dict(gathered_weights=1600 + 1600, saved_activations=50_000, working_activations=5000))
    # All the time 50,000, both layers' q and what is on its way; at most also a layer's weights and activations.
    least = 50_000 + 1600 + on_their_way

    def share(held, limit):
        chip = topology.chip._replace(usable_bytes=limit / 0.95 / 0.8)
        return share_that_hides(held, traced, settings, topology._replace(chip=chip))

    assert [share(held, least + part * 6600) for part in (1, 0.5, 0)] == pytest.approx([1, 0.5, 0])
    # At a peak in the head no layer's messages are on their way.
    head = held._replace(logits=40_000)
    assert share(head, head.peak) == 1 and share(head, head.peak - 1000) < 1


def test_recomputing_costs_time_and_attention_without_scores_saves_it():
    settings = dict(model_d_head=64, data_seq=512, model_heads=2, model_kv_heads=2)
    none, layer, scores = (
        predict(tiny(**settings, **more), PAIR)
        for more in (
            {"model_kernel": "splash", "pipeline_remat": "none"},
            {"model_kernel": "splash", "pipeline_remat": "layer"},
            {"pipeline_remat": "layer"},
        )
    )
    assert none.recompute_secs == 0 < layer.recompute_secs
    assert layer.work_secs < scores.work_secs


def test_what_is_kept_is_written_and_read_and_can_cost_more_than_making_it_again():
    wide = dict(model_d_ff=4096, data_global_batch=128)
    none, layer = (predict(tiny(**wide, pipeline_remat=remat), PAIR) for remat in ("none", "layer"))
    assert none.work_secs > layer.work_secs  # products whose result is much wider than what they multiply are kept


def test_the_more_is_sent_the_less_of_it_hides():
    work, sent = 1.0, (0.1, 0.5, 1.0, 5.0)
    shares = [hidden_secs(work, secs) / secs for secs in sent]
    assert shares == sorted(shares, reverse=True)
    assert 0.95 < shares[0] < 1
    assert hidden_secs(work, 5.0) < work


def test_an_exchange_loads_the_links_of_a_torus_more_than_a_gather():
    topology = read_topology("v5e:4x4")
    assert topology.route({"pp": 1, "dp": 16, "tp": 1}, ["dp"]).spread == pytest.approx(
        2 * 16 / 15
    )  # two dims, a quarter each
    assert topology.route({"pp": 1, "dp": 8, "tp": 2}, ["tp"]).spread == 1
    assert read_topology("H100:8").route({"pp": 1, "dp": 8, "tp": 1}, ["dp"]).spread == 1


@pytest.mark.parametrize(
    ("topology", "sizes", "axis", "links"),
    [
        ("v5p:4x4x4", (1, 64, 1), "dp", 6),  # three rings
        ("v5p:4x4x4", (4, 4, 4), "pp", 2),
        ("v5p:2x2x4", (1, 16, 1), "dp", 3),  # no cube of rings: three lines
        ("v5e:4x4", (1, 16, 1), "dp", 2),  # lines, for only 16 close to a ring
        ("v5e:16x16", (1, 16, 16), "tp", 2),
        ("v5e:4x4", (2, 8, 1), "pp", 1 / 2),  # chips two apart share each link with those between
    ],
)
def test_an_axis_sends_over_the_links_of_the_dims_that_it_fills(topology, sizes, axis, links):
    topology = read_topology(topology)
    bandwidth = topology.route(dict(zip(AXES, sizes)), [axis]).bandwidth
    assert bandwidth == links * topology.chip.ici_bandwidth


@pytest.mark.parametrize(
    ("sizes", "axis", "rates"),  # bytes a second that a GPU sends: in a ring, in an all-to-all, to one other
    [
        ((1, 2, 8), "tp", (450e9, 450e9, 450e9)),  # a host's switch
        ((1, 16, 1), "dp", (8 * 50e9, 50e9 * 15 / 8, 50e9)),  # eight rings; of 15 others 8 are on the other host
        ((1, 8, 2), "dp", (4 * 50e9, 50e9 * 7 / 4, 50e9)),
        ((1, 2, 8), "dp", (50e9, 50e9, 50e9)),  # one GPU of each host, and its own interface
        ((2, 8, 1), "pp", (50e9, 50e9, 50e9)),
    ],
)
def test_rings_over_hosts_use_the_network_interfaces_of_all_their_gpus(sizes, axis, rates):
    links = read_topology("H100:2x8").route(dict(zip(AXES, sizes)), [axis])
    for kinds, rate in zip((("all-gather", "reduce-scatter", "all-reduce"), ("all-to-all",), ("permute",)), rates):
        for kind in kinds:
            assert links.secs(kind, 1e9) == pytest.approx(1e9 / rate)


def test_a_ring_over_hosts_is_no_faster_than_their_switch():
    rtx = read_topology("RTX4090:2x8")
    card = rtx._replace(chip=rtx.chip._replace(dcn_bandwidth=rtx.chip.ici_bandwidth))
    assert card.route({"pp": 1, "dp": 16, "tp": 1}, ["dp"]).bandwidth == card.chip.ici_bandwidth


def test_a_step_on_two_hosts_is_priced_by_what_its_collectives_send_over_the_network():
    topology, settings = read_topology("H100:2x8"), tiny(mesh_dp=16, data_global_batch=16, model_d_model=64)
    sent = [Sent(kind, ("dp",), 10**9, 1, "forward", "attention/q", "") for kind in ("all-gather", "all-to-all")]
    ring, exchange = messages(sent, at_once(topology), settings, SentPerUse())
    switch, network = 0.8 * 450e9, 0.94 * 50e9  # what is reached; eight network interfaces have more than the switch
    assert (ring.secs, exchange.secs) == pytest.approx((1e9 / switch, 1e9 * 8 / 15 / network))


@pytest.mark.parametrize(
    ("where", "gather", "total", "exchange"),
    [
        ("H100:1x8", 6.6 + 7 * 0.6, 6.6 + 14 * 0.6, 8.4 + 3.4),  # NCCL's protocol for few bytes
        ("H100:2x8", 6.6 + 14 * 0.6 + 2.7, 6.8 + 2 * (7 * 0.6 + 5), 8.4 + 14),  # and trees for sums
        ("RTX4090:1x8", 6.6 + 7 * 1.0, 6.6 + 14 * 1.0, 8.4 + 5.7),
        ("v5p:4x4x4", 5 + 3 * 2, 5 + 2 * 3 * 2, 5 + 3 * 2),  # in each dim half of a ring
        ("v5e:4x4", 5 + 2 * 3, 5 + 2 * 2 * 3, 5 + 2 * 3),  # in each dim a line
    ],
)
def test_each_message_takes_its_latency_besides_the_time_of_its_bytes(where, gather, total, exchange):
    topology, kinds = read_topology(where), ("all-gather", "all-reduce", "all-to-all")
    settings = tiny(mesh_dp=topology.devices, data_global_batch=topology.devices, model_d_model=64)

    def secs(topology):
        sent = [Sent(kind, ("dp",), 8, 3, "forward", "attention/q", "") for kind in kinds]
        return [message.secs for message in messages(sent, topology, settings, SentPerUse())]

    added = [1e6 * (late - at) / 3 for late, at in zip(secs(topology), secs(at_once(topology)), strict=True)]
    assert added == pytest.approx([gather, total, exchange], rel=1e-4)


def test_what_hides_on_gpus_takes_a_part_of_its_time_from_the_work():
    """A message takes cores and memory from the work that it hides behind: `beside` of its time."""
    topology, settings = read_topology("H100:1x8"), tiny(mesh_dp=8, data_global_batch=16, model_d_model=64)
    model = model_on_topology(settings, topology)
    traced, held = traced_work(model, settings), predicted_memory(model, settings)
    step = estimate(settings, topology, held, traced)
    sent = sum(message.secs for message in messages(traced.sent, topology, settings, traced.per_use))
    hiding = sum(m.secs for m in messages(traced.sent, topology, settings, traced.per_use) if m.hides)
    assert step.hidden_secs == pytest.approx((1 - 0.61) * hidden_secs(step.work_secs, hiding))
    assert sum(step.exposed_secs.values()) == pytest.approx(sent - step.hidden_secs)
    all_hidden = estimate(settings, topology, held, traced, hidden_axes=("dp", "tp", "pp"))
    assert step.secs > all_hidden.secs > step.secs - sent


def test_a_message_for_a_layer_saves_latency_and_costs_copies():
    """And nothing of a layer is computed before its only gather has ended, unless that was ahead."""
    model = dict(mesh_dp=8, data_global_batch=16, model_d_model=64, model_attention="gqa", model_layers=4)
    eight = read_topology("H100:1x8")
    alone, layer = (predict(tiny(**model, fsdp_bucket=unit), eight) for unit in ("parameter", "layer"))
    ahead = predict(tiny(**model, fsdp_bucket="layer", fsdp_prefetch=1), eight)
    sent = [sum(each.exposed_secs.values()) + each.hidden_secs for each in (layer, alone)]
    assert sent[0] < 0.5 * sent[1] and layer.work_secs > alone.work_secs
    assert layer.hidden_secs < ahead.hidden_secs
    assert {"fsdp.bucket": "module"} in list(single_changes(tiny(**model), eight))


# ---- what the chips can run

KERNEL = "--config.model.kernel="
HERE = PAIR._replace(
    name="2 simulated devices", chip=PAIR.chip._replace(name="this machine", platform="cpu"), shape=(2,)
)
LONG = dict(model_d_head=64, data_seq=512, model_heads=2, model_kv_heads=2)  # attention is much of the step


def kernels_of(topology, **changes):
    """The kernels of attention that a plan would price as changes."""
    changed = [one for one in changes_of(tiny(**LONG | changes), topology) if one[0].startswith(KERNEL)]
    return [flag.removeprefix(KERNEL) for flag, settings in changed if build_if_legal(settings, topology) is not None]


@pytest.mark.parametrize(
    ("topology", "kernels"),
    [
        (PAIR, ["splash"]),
        (read_topology("H100:2"), ["cudnn", "triton"]),
        (read_topology("a100:2"), ["cudnn", "triton"]),
        (HERE, []),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_advice_names_the_kernel_of_the_chips_that_are_planned_for(topology, kernels):
    assert kernels_of(topology) == kernels


@pytest.mark.parametrize(
    ("topology", "now", "offered"),
    [("H100:2x2", "compute", "float32"), ("H100:4", "compute", ""), ("v5e:2x2", "compute", "")]
    + [(where, "float32", "compute") for where in ("H100:2x2", "H100:4", "v5e:2x2")]
    + [(where, "compute", "float32") for where in ("v5p:2x2x1", "v6e:2x2", "v7x:2x1x1")],
)
def test_sums_by_rings_are_offered_to_gpus_on_several_hosts_and_where_sparse_cores_run_them(topology, now, offered):
    settings = tiny(mesh_dp=4, model_dtype="bfloat16", fsdp_reduce=now)
    flags = [flag for flag, _ in changes_of(settings, read_topology(topology)) if "fsdp.reduce" in flag]
    assert flags == ([f"--config.fsdp.reduce={offered}"] if offered else [])


def test_advice_names_no_kernel_that_takes_no_such_heads_or_dtype():
    wide = dict(model_d_head=192, model_d_model=384)
    assert kernels_of(read_topology("A100:2"), **wide) == ["triton"]
    assert kernels_of(read_topology("H100:2"), **wide) == ["cudnn", "triton"]
    assert kernels_of(read_topology("H100:2"), model_dtype="float32") == ["triton"]
    assert kernels_of(read_topology("H100:2"), model_d_head=320, model_d_model=640) == []


@pytest.mark.fast(1)
@pytest.mark.parametrize("kernel", ["cudnn", "triton"])
def test_flash_attention_on_gpus_is_priced_without_one(kernel):
    of = lambda kernel: predict(tiny(**LONG, model_kernel=kernel), read_topology("H100:2"))  # noqa: E731
    scores, flash = of("xla"), of(kernel)
    assert flash.work_secs < scores.work_secs and flash.peak_bytes < scores.peak_bytes
    settings = tiny(**LONG, model_kernel=kernel)
    products = traced_work(model_on_topology(settings, read_topology("H100:2")), settings).products
    by_pass = {way: sum(p.flops * p.count for p in products if p.direction == way) for way in ("forward", "backward")}
    assert by_pass["backward"] > 2 * by_pass["forward"]  # its backward pass makes the scores again


def test_a_plan_that_fits_a_gpu_but_not_what_jax_takes_of_it_says_so():
    gpu, tpu = read_topology("H100:8"), read_topology("v5p:2x2x2")
    told = "JAX reserves 60.0 GiB by default: XLA_CLIENT_MEM_FRACTION=0.95"
    assert verdict(61 * 2**30, gpu, "predicted").splitlines()[1:] == [told]
    for peak, topology in ((59, gpu), (81, gpu), (80, tpu)):
        assert "\n" not in verdict(peak * 2**30, topology, "predicted")


@pytest.mark.parametrize("kernel", ["splash", "cudnn", "triton"])
def test_what_this_machine_does_not_run_at_a_known_speed_is_not_planned_here(kernel):
    with pytest.raises(ConfigError, match=f"model.kernel='{kernel}' .*CPUs.*; use kernel"):
        predict(tiny(**LONG, model_kernel=kernel), HERE)


# ---- layouts


@pytest.mark.slow
def test_a_sweep_looks_at_exactly_the_legal_layouts():
    settings = tiny(data_global_batch=2)
    brute = set()
    halves = [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    sets = sets_to_try(settings.model, seq=settings.data.seq)
    stages = itertools.product((1, 2, 3), SCHEDULES, (1, *VIRTUAL), sets)
    for mesh, others in itertools.product(halves, list(stages)):
        if (others[1] == "interleaved") != (others[2] > 1):
            continue  # one stage on each rank is 1F1B
        if mesh[0] == 1 and others[1:3] != ("gpipe", 1):
            continue  # the same as gpipe
        for policy in policies(*mesh[:2]):
            choice = Choice(*mesh, *others, *policy)
            try:
                chips = AbstractMesh(mesh, AXES, axis_types=(AxisType.Auto,) * 3)
                model_of(choice.applied(settings), chips).check_batch(2, 16)
            except ParallaxError:
                continue
            brute.add(choice)
    legal = {choice for choice in choices(settings, PAIR) if build_if_legal(choice.applied(settings), PAIR) is not None}
    assert legal == brute
    assert any(choice.schedule == "interleaved" for choice in choices(settings, PAIR))
    assert not any(choice.schedule == "interleaved" for choice in brute)  # two layers are no four stages


@pytest.mark.fast(1)
@pytest.mark.parametrize("matmul", ["int8", "float8"])
def test_the_bound_of_products_in_8_bits_is_of_their_speed(matmul):
    """Layers so wide that their products are all but everything: a bound at bfloat16's speed is far above."""
    four = read_topology("v5e:2x2" if matmul == "int8" else "H100:4")
    wide = dict(model_d_model=8192, model_d_ff=28672, model_dtype="bfloat16", data_seq=512, data_global_batch=512)
    settings = tiny(**wide, model_matmul=matmul, model_vocab=256, pipeline_remat="layer", mesh_dp=4)
    own = Choice.of(settings)
    bound = LeastWork(settings, four, model_on_topology(settings, four)).bound(own)
    found = predict(settings, four).secs
    assert 0.8 * found < bound <= found


def test_a_layout_that_cuts_through_blocks_of_float8_is_not_legal():
    """As a run refuses it: a search goes on with the next."""
    sixteen = read_topology("v5e:4x4")
    settings = tiny(mesh_dp=16, data_global_batch=32, model_d_model=64, optimizer_m_dtype="float8")
    assert price(settings, sixteen) == "not legal"
    with pytest.raises(ConfigError, match="optimizer.m_dtype='float8' has blocks of 8 along a dim of .*mesh.dp=16"):
        predict(settings, sixteen)
    assert price(tiny(mesh_dp=16, data_global_batch=32, model_d_model=64), sixteen).secs > 0


SPEEDS = [("H100", "float8", "int8"), ("H200", "float8", "int8"), ("v7x", "float8", "int8"), ("v5e", "int8", "float8")]


@pytest.mark.parametrize(("name", "best", "other"), SPEEDS)
def test_products_in_8_bits_are_warned_of_where_another_dtype_is_faster(name, best, other):
    known = chip(name)
    speeds = {matmul: known.matmul_speed(matmul) for matmul in ("compute", "int8", "float8")}
    assert fastest_matmul(known) == best and speeds[best] == max(speeds.values())
    (line,) = matmul_lines(ModelConfig(matmul=best), known)
    assert line == f"products of attention and mlp in {best}"
    warned = [line for line in matmul_lines(ModelConfig(matmul=other), known) if line.startswith("warning: ")]
    if speeds[other] == speeds[best]:
        assert not warned
    else:
        figures = ", ".join(f"{matmul} {speed:.2f}" for matmul, speed in speeds.items())
        assert warned == [
            f"warning: model.matmul='{other}' is not the fastest on {known.name}; speed of products over bfloat16's: "
            f"{figures}; use model.matmul='{best}'"
        ]
    assert not [*matmul_lines(ModelConfig(), known)]


def test_scales_without_products_of_their_own_are_warned_of():
    def lines(name, **how):
        return [*matmul_lines(ModelConfig(matmul="float8", **how), chip(name))]

    too = dict(matmul_scales="row", matmul_weight_gradients="8bit", matmul_residuals="8bit")
    said = "products of attention and mlp in float8, with row scales, weights' gradients, too, which save their input"
    assert lines("H100", **too) == [f"{said} in 8 bits"]
    assert len(lines("B200", matmul_scales="mxfp8")) == 1
    for name, scales in (("H100", "mxfp8"), ("B200", "block"), ("v7x", "block")):
        _, warned = lines(name, matmul_scales=scales)
        assert warned.startswith(f"warning: model.matmul_scales='{scales}' rounds as it says, but ")


@pytest.mark.parametrize("name", ["B200", "H100"])
@pytest.mark.parametrize("form", [("float8", "mxfp8", "8bit"), ("float4", "nvfp4", "compute")])
def test_blocks_are_priced_as_the_chip_multiplies_them(form, name):
    """On B200 in their 8 or 4 bits, as the compiled program has them; elsewhere in bfloat16."""
    alone = read_topology(f"{name}:1")
    keys = dict(zip(("model_matmul", "model_matmul_scales", "model_matmul_weight_gradients"), form))
    sizes = dict(model_d_model=64, model_d_head=64, data_seq=64)  # no sum has a single block
    settings = tiny(**keys, **sizes, model_dtype="bfloat16", pipeline_remat="none", mesh_dp=1)
    model, tokens = model_on_topology(settings, alone), settings.data.global_batch * settings.data.seq
    found = Counter()
    for product in traced_work(model, settings).products:
        found[product.matmul] += product.flops * product.count
    in_few_bits = tokens * flops_in_8_bits_per_token(model.config, model.plan.declared, alone.chip)
    assert found[form[0]] == in_few_bits and (in_few_bits > 0) == (name == "B200")
    assert {*found} == {"compute", *[form[0]] * (name == "B200")}  # attention and the head, too


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "attention", "topology", "kernel", "matmul"),
    [
        *itertools.product(["column_row", "scatter"], ["gqa", "mla"], ["v5e:2x2"], ["xla"], ["compute"]),
        ("column_row", "gqa", "H100:4", "cudnn", "compute"),
        ("column_row", "gqa", "v5e:2x2", "xla", "int8"),
        ("column_row", "gqa", "H100:4", "cudnn", "float8"),
    ],
)
def test_bounds_are_never_above_what_is_found(family, attention, topology, kernel, matmul):
    four = read_topology(topology)
    changes = dict(layout_tensor_parallel=family, model_attention=attention, model_kernel=kernel, model_matmul=matmul)
    settings = tiny(**changes)
    legal = [c for c in choices(settings, four) if c.microbatches == 1 or c.pp * c.tp > 2]
    least = LeastWork(settings, four, model_on_topology(settings, four))
    looked_at = 0
    for choice in legal[:: len(legal) // 16]:
        try:
            found = predict(choice.applied(settings), four)
        except ParallaxError:
            continue
        looked_at += 1
        assert least.bound(choice) <= found.secs * (1 + 1e-9), choice
        assert least.held(choice) <= found.peak_bytes, choice
    assert looked_at >= 4


def test_layouts_are_tried_within_each_replica_and_their_bounds_are_of_one():
    """Rows of another replica are no work of this one."""
    four, settings = read_topology("v5e:2x2"), tiny(mesh_replica=2, mesh_dp=2, pipeline_microbatches=1)
    tried = [*choices(settings, four)]
    assert Choice.of(settings) in tried and {c.pp * c.dp * c.cp * c.tp for c in tried} == {2}
    least = LeastWork(settings, four, model_on_topology(settings, four))
    for choice in (Choice.of(settings), Choice.of(settings)._replace(dp=1, tp=2, remat="none")):
        found = predict(choice.applied(settings), four)
        assert least.bound(choice) <= found.secs and least.held(choice) <= found.peak_bytes


def test_on_several_slices_stages_are_divided_over_them_unless_replicas_are():
    two = read_topology("2xv5e:1x2")
    assert {choice.pp for choice in choices(tiny(), two)} == {2, 4}
    assert {choice.pp for choice in choices(tiny(mesh_replica=2), two)} == {1, 2}


# ---- the search


@pytest.mark.slow
def test_a_search_for_the_best_finds_the_same_as_pricing_all(found):
    search = Sweep(tiny(), PAIR, found.cache, keep=2)
    search.run()
    assert search.rows[:2] == found.rows[:2]


@pytest.mark.slow
def test_layouts_whose_bound_is_above_the_best_are_not_traced(found, tmp_path, monkeypatch):
    fastest = found.rows[0]
    monkeypatch.setattr(sweep_module, "LeastWork", lambda *args: SlowerThan(fastest))
    search = Sweep(tiny(), PAIR, Cache(tmp_path), keep=1)
    search.run()
    assert {row.choice for row in search.rows} == {fastest.choice, search.configured}
    assert search.rows[0] == fastest and search.passed["slower"]


@pytest.mark.slow
def test_a_bounded_search_looks_at_the_layouts_that_may_be_fastest_and_counts_the_others(few, tmp_path):
    search, found, totals = Sweep(tiny(), PAIR, Cache(tmp_path), keep=1000, most=3), [], []
    search.find(lambda done, total: found.append((done, total)))
    search.run(lambda done, total: totals.append(total))
    assert found == [(done, len(found)) for done in range(len(found))] and len(found) > 3
    assert set(totals) == {3} and search.passed["beyond --most"] > 0
    assert len(search.rows) + search.passed.total() == len({*sweep_module.choices(tiny(), PAIR), search.configured})
    assert search.mean_secs > 0
    again = Sweep(tiny(), PAIR, search.cache, keep=1000, most=3)
    again.run()
    assert again.rows == search.rows and again.mean_secs == 0  # nothing was priced


def test_a_sweep_is_bounded_by_default_and_says_what_it_left_out_and_how_to_look_at_it():
    assert command.FLAGS["most"].default == 60
    left = {"slower": 9, "beyond --most": 1200}
    search = SimpleNamespace(most=60, passed=Counter(left), mean_secs=210.0, rows=[None] * 60)
    assert [*passed_over_lines(search)] == [
        "60 layouts priced; passed over: 9 slower, 1,200 beyond --most",
        "left out by --most=60: 1,200 layouts that may be faster; --most=0 looks at all, about 2d22h more",
    ]
    search.mean_secs = 0.0
    assert [*passed_over_lines(search)][1].endswith("--most=0 looks at all")
    search.passed = Counter(slower=9)
    assert [*passed_over_lines(search)] == ["60 layouts priced; passed over: 9 slower"]


class SlowerThan:
    """Bounds that tell one layout from the others."""

    head = None

    def __init__(self, row):
        self.row = row

    def work(self, choice):
        return self.bound(choice)

    def bound(self, choice, parts=None):
        return 0.0 if choice == self.row.choice else self.row.estimate.secs * 1.01

    def held(self, choice):
        return 0.0

    def held_of_weights(self, choice):
        return 0.0


@pytest.mark.slow
def test_layouts_that_do_not_fit_are_passed_over(found, tmp_path):
    smallest, largest = (pick(row.estimate.peak_bytes for row in found.rows) for pick in (min, max))
    middle = (smallest + largest) // 2
    topology = PAIR._replace(chip=PAIR.chip._replace(usable_bytes=middle))
    search = Sweep(tiny(), topology, Cache(tmp_path), keep=1000)
    search.run()
    own = {row.choice for row in search.rows if row.choice.sums == search.configured.sums}
    assert own == {r.choice for r in found.rows if r.estimate.peak_bytes <= middle}
    assert search.passed["too large"] == len(found.rows) - len(search.rows)


def test_a_layout_that_does_not_fit_is_priced_with_the_sums_of_gradients_that_do_and_cost_the_least(few, tmp_path):
    own = Choice.of(tiny())
    rounded, both, moved = own.with_smaller_sums(host=True)
    assert [choice.sums for choice in (rounded, both, moved)] == [*SMALLER_SUMS]
    assert own.with_smaller_sums(host=False) == [rounded] and not both.with_smaller_sums(host=True)
    peaks = [held_of(choice.applied(tiny())).peak for choice in (own, rounded, both, moved)]
    assert peaks == sorted({*peaks}, reverse=True)  # rounding needs some memory, too
    for usable, fits in zip([*peaks, peaks[-1] - 1], (own, rounded, both, moved, None)):
        topology = PAIR._replace(chip=PAIR.chip._replace(usable_bytes=usable))
        search = Sweep(tiny(), topology, Cache(tmp_path), keep=1)
        search._price_of = {}  # of no layout but its own
        search.run()
        assert [row.choice for row in search.shown()] == [fits] * (fits is not None)
        assert search.passed == Counter({"too large": 1} if fits is None else {})
    line, of_sums, on_host = list(sweep_table([PricedLayout(both, price(both.applied(tiny()), PAIR))], {}, [], own))[1:]
    assert (of_sums.split(), on_host.split()) == (["sums", "bfloat16"], ["sums", "on", "host"])


def test_smaller_sums_are_shown_beside_the_fastest_layouts_and_do_not_take_their_place(few, tmp_path):
    search = Sweep(tiny(), PAIR, Cache(tmp_path), keep=2)
    own, step = search.configured, price(tiny(), PAIR)
    rows = [(own._replace(microbatches=1), 1), (own._replace(tp=2, dp=1), 3), (own, 9)]
    rows += [(own._replace(microbatches=many, grads_dtype="bfloat16"), secs) for many, secs in ((1, 0), (2, 2), (4, 5))]
    search.rows = [
        PricedLayout(choice, step._replace(secs=secs)) for choice, secs in sorted(rows, key=lambda row: row[1])
    ]
    assert [row.estimate.secs for row in search.shown()] == [0, 1, 2, 3, 9]


@pytest.mark.slow
def test_a_sweep_goes_on_after_an_interruption_and_does_nothing_twice(found, tmp_path):
    def interrupt(done, total):
        if len(search.rows) == 4:
            raise KeyboardInterrupt

    def written():
        return {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    search = Sweep(tiny(), PAIR, Cache(tmp_path), keep=1000)
    with pytest.raises(KeyboardInterrupt):
        search.run(interrupt)
    assert len(search.rows) == 4
    before = written()
    search = Sweep(tiny(), PAIR, Cache(tmp_path), keep=1000)
    search.run()
    assert search.rows == found.rows and search.passed == found.passed
    whole = written()
    assert len(before) >= 4 and before.items() < whole.items()
    again = Sweep(tiny(), PAIR, Cache(tmp_path), keep=1000)
    again.run()
    assert again.rows == found.rows and written() == whole


@pytest.mark.parametrize("damage", ["", "{", '{"digest": "0", "value": {}}', "[1]"])
def test_a_damaged_entry_is_none_and_is_written_anew(tmp_path, damage):
    cache = Cache(tmp_path)
    assert cache.kept("key", lambda: {"secs": 1.5}) == {"secs": 1.5}
    (path,) = tmp_path.iterdir()
    path.write_text(damage)
    for make in (lambda: {"secs": 2.5}, None):
        assert cache.kept("key", make) == {"secs": 2.5}
    assert list(tmp_path.iterdir()) == [path]


def test_an_entry_with_a_changed_figure_is_damaged(tmp_path):
    cache = Cache(tmp_path)
    cache.kept("key", lambda: {"secs": 1.5})
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace("1.5", "1.4"))
    assert cache.kept("key", lambda: {"secs": 2.5}) == {"secs": 2.5}


def test_a_sweep_of_this_machine_goes_on_with_the_speed_that_it_had(tmp_path):
    here = PAIR._replace(shared=True)
    slower = here._replace(chip=PAIR.chip._replace(hbm_bandwidth=PAIR.chip.hbm_bandwidth * 0.9))
    for measured in (here, slower):
        assert Sweep(tiny(), measured, Cache(tmp_path), keep=1).topology == here
    assert Sweep(tiny(), slower, Cache(tmp_path / "other"), keep=1).topology == slower
    assert Sweep(tiny(), slower._replace(shared=False), Cache(tmp_path), keep=1).topology.chip == slower.chip


def test_entries_are_of_one_chip_one_config_and_one_version(tmp_path):
    cache = Cache(tmp_path)
    for settings, topology, version in [
        (tiny(), PAIR, "1"),
        (tiny(pipeline_microbatches=1), PAIR, "1"),
        (tiny(), read_topology("v6e:1x2"), "1"),
        (tiny(), PAIR, "2"),
        (tiny(data_seed=1, train_steps=7), PAIR, "1"),  # the same as the first
    ]:
        cache.versions = {"jax": version}
        cache.kept(sweep_module.key_of(settings, topology), lambda: 1.0)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.slow
def test_each_layout_of_a_sweep_has_an_entry_of_its_own():
    layouts = [*choices(tiny(), read_topology("v5e:2x2"))]
    keys = {sweep_module.digest(sweep_module.key_of(choice.applied(tiny()), PAIR)) for choice in layouts}
    assert len(keys) == len(layouts) > 100


# ---- what is shown


def test_the_table_fits_100_columns_and_marks_the_own_layout_and_the_front(found):
    own = tiny()
    long = Choice(32, 32, 32, 1024, "interleaved", 4, "layer", "zero1", "embedding=zero3 head=zero3", 0)
    rows = [*found.rows[:5], found.rows[0]._replace(choice=long)]
    lines = list(sweep_table(rows, {}, front(found.rows), found.rows[1].choice))
    assert max(map(len, lines)) <= 100
    lines_of = [len(textwrap.wrap(row.choice.remat, REMAT_WIDTH)) for row in rows]  # a set may take several
    assert len(lines) == 1 + sum(lines_of)
    assert lines[1 + lines_of[0]].split()[0].endswith(">")
    assert lines[1].startswith("*")  # the fastest is always on the front
    assert own  # the settings themselves are legal


@pytest.mark.slow
def test_sets_of_the_own_layout_are_shown_from_the_fastest_to_the_smallest(few, tmp_path):
    settings = tiny(pipeline_remat="norm")
    search = Sweep(settings, PAIR, Cache(tmp_path), keep=1)
    search.run_sets()
    assert {row.choice._replace(remat="norm") for row in search.sets} == {search.configured}
    assert {"layer", "elementwise"} < {row.choice.remat for row in search.sets}
    assert search.configured in [row.choice for row in search.sets]
    saved = predict(tiny(pipeline_remat="none"), PAIR)  # is left out: others are as fast, and smaller
    estimates = [row.estimate for row in search.sets]
    assert any(one.secs <= 1.01 * saved.secs and one.peak_bytes < saved.peak_bytes for one in estimates)
    head, *lines = sets_table(search.sets, search.configured)
    assert head.split() == ["this", "layout,", "remat", "MiB", "ms/step"]
    assert [line for line in lines if ">" in line] == [line for line in lines if "norm" in line]
    marked = [row for row in search.sets if row.choice in front(search.sets)]
    assert sum(line.startswith("*") for line in lines) == len(marked)
    sizes = [row.estimate.peak_bytes for row in marked]
    assert sizes == sorted(sizes, reverse=True)


def test_the_front_holds_what_nothing_beats_in_both(found):
    marked = front(found.rows)
    for choice, one in found.rows:
        better = [
            r
            for r in found.rows
            if r.estimate.secs <= one.secs
            and r.estimate.peak_bytes <= one.peak_bytes
            and (r.estimate.secs, r.estimate.peak_bytes) != (one.secs, one.peak_bytes)
        ]
        assert not (choice in marked and better)
        as_fast = [r for r in found.rows if r.choice in marked and r.estimate.secs <= one.secs * 1.01]
        assert choice in marked or any(r.estimate.peak_bytes <= one.peak_bytes for r in as_fast)


SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_has_a_point_for_each_layout_inside_its_frame(found):
    picture = ET.fromstring(draw("tiny", found.rows, PAIR, found.configured))
    points = [g for g in picture.iter(f"{SVG}g") if g.find(f"{SVG}title") is not None]
    assert len(points) == len(found.rows)
    titles = [point.find(f"{SVG}title").text for point in points]
    places = [point.find(f".//{SVG}use") for point in points]
    _, _, width, height = map(float, picture.get("viewBox").split())
    assert all(0 < float(p.get("x")) < width and 0 < float(p.get("y")) < height for p in places)
    fastest = max(range(len(points)), key=lambda at: float(places[at].get("y")))  # the lowest on the page
    assert f"{found.rows[0].estimate.secs:.3f} s" in titles[fastest]
    key = [text for text in picture.iter(f"{SVG}text") if text.text.startswith("MFU")]
    assert len(key) == len(front(found.rows))


@pytest.mark.parametrize(
    "change", [dict(virtual=4), dict(exceptions="embedding=zero1 head=zero1"), dict(prefetch=1), dict(policy="zero2")]
)
def test_a_picture_names_layouts_that_differ_differently(change):
    layout = Choice(4, 8, 1, 16, "interleaved", 2, "layer", "zero3", "", 0)
    assert sweep_module._name(layout) != sweep_module._name(layout._replace(**change))


def test_one_layout_alone_is_a_picture_too(found):
    ET.fromstring(draw("tiny", found.rows[:1], PAIR, found.configured))


# ---- the command


@pytest.fixture(scope="module")
def planned(config):
    """What the command prints on a machine that has no libtpu."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setitem(sys.modules, "libtpu", None)
        patch.setattr(plan_module, "single_changes", lambda *args: itertools.islice(single_changes(*args), 0, None, 4))
        assert command.main(["plan", config, "--topology=v5e:2x2"]) == 0
    return out.getvalue()


def test_the_command_says_what_a_plan_must(planned):
    out = planned
    assert re.search(r"^fits: [\d.]+ \w+ of 15.8 GiB a chip", out, re.M)
    assert re.search(r"^MFU \d+\.\d %", out, re.M)
    assert re.search(r"^range: [0-9.]+ to [0-9.]+ ms, ", out, re.M)  # of a small step, small units
    assert re.search(r"^step +[0-9.]+ ms ", out, re.M) and re.search(r" [+-][0-9.]+ MiB ", out)
    for word in ("memory of a chip", "time of a step", "exposed over dp", "exposed over tp", "largest: "):
        assert word in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "layout",
    [
        ["--config.mesh.dp=4", "--config.pipeline.microbatches=1"],
        ["--config.mesh.pp=2", "--config.mesh.dp=2", "--config.pipeline.schedule=one_f_one_b"],
    ],
    ids=["dp", "pp"],
)
def test_flags_lead_to_the_layout_that_was_priced(config, layout):
    command_line = ["plan", config, *layout, "--config.mesh.tp=1"]
    settings = read_command(command_line, {})[0]
    own = Choice.of(settings)
    four = read_topology("v5e:2x2")
    assert own in list(choices(settings, four))
    for choice in list(choices(settings, four))[::5]:
        assert Choice.of(read_command([*command_line, *flags_of(own.keys_to(choice))], {})[0]) == choice
    for flags, changed in changes_of(settings, read_topology("v5e:2x2")):
        assert Choice.of(read_command([*command_line, *shlex.split(flags)], {})[0]) == Choice.of(changed)


def test_token_streams_are_proposed_to_tpus_with_tensor_ranks_and_are_faster_there():
    flags = "--config.layout.tensor_parallel=streams '--config.layout.residual=batch/dp seq/tp d_model'"
    settings = tiny(mesh_dp=1, mesh_tp=2, model_d_model=256, model_d_ff=1024, data_seq=512)
    changed = dict(changes_of(settings, PAIR))[flags]
    now, then = predict(settings, PAIR), predict(changed, PAIR)
    assert then.exposed_secs["tp"] < now.exposed_secs["tp"] / 2 and then.secs < now.secs
    others = [(tiny(), PAIR), (settings, read_topology("H100:2")), (changed, PAIR)]
    assert not [flag for each in others for flag, _ in changes_of(*each) if "streams" in flag]
    change = Change({"layout.tensor_parallel": "streams", "layout.residual": "batch/dp seq/tp d_model"}, 0, -0.1)
    _, first, second = changes_table([change])
    assert [first.split()[0], second.strip()] == flags.split(maxsplit=1) and max(map(len, (first, second))) <= 100


def test_tensor_ranks_are_proposed_to_tpus_with_the_faster_of_both_forms(monkeypatch):
    settings, streams = tiny(model_d_model=256, model_d_ff=1024, data_seq=512), "layout.tensor_parallel"
    alone, keys = {"mesh.dp": 1, "mesh.tp": 2}, {"layout.residual": "batch/dp seq/tp d_model"}
    forms = [alone, alone | {streams: "streams"} | keys]
    assert tensor_forms(alone, settings, PAIR) == forms
    assert tensor_forms(alone, settings, read_topology("H100:2")) == forms[:1]
    assert tensor_forms({"pipeline.remat": "none"}, settings, PAIR) == [{"pipeline.remat": "none"}]
    prices = Prices(settings, PAIR, predict(settings, PAIR))
    plain, streamed = map(prices.price, forms)
    assert streamed.secs < plain.secs
    monkeypatch.setattr("parallax.analysis.planned.plan.single_changes", lambda settings, topology: [alone])
    assert streamed in priced_changes(prices) and plain not in priced_changes(prices)


def test_a_change_that_a_part_of_it_equals_is_not_shown():
    part, more = {"data_parallel.exceptions": ""}, {"data_parallel.exceptions": "", "fsdp.prefetch": 1}
    shown, equal = Change(part, -100, 0.01), Change(more, -100, 0.01)
    faster, smaller = Change(more, -100, -0.01), Change(more, -200, 0.01)
    assert without_repeats([equal, shown]) == [shown]
    assert without_repeats([shown, faster]) == [shown, faster] and without_repeats([shown, smaller]) == [shown, smaller]


def test_messages_are_named_by_their_axes_of_several_ranks():
    step = predict(tiny(), PAIR)
    assert [*step.exposed_secs] == ["dp"] and step.exposed_secs["dp"] > 0


@pytest.mark.parametrize(("schedule", "virtual"), [("one_f_one_b", 1), ("interleaved", 2)])
def test_a_plan_of_a_pipeline_proposes_none_in_place_of_it(schedule, virtual):
    """A schedule does nothing there, and is refused."""
    pipeline = {"pipeline_schedule": schedule, "pipeline_virtual": virtual}
    tried = changes_of(tiny(mesh_pp=2, mesh_dp=1, model_layers=4, **pipeline), PAIR)
    ((flags, changed),) = [(flags, changed) for flags, changed in tried if "mesh.pp=1" in flags]
    assert "--config.pipeline.schedule=gpipe" in flags and build_if_legal(changed, PAIR)


def test_a_plan_that_nothing_makes_fit_is_told_what_saves_most(monkeypatch):
    now = predict(tiny(), PAIR)
    half, third = now.peak_bytes // 2, now.peak_bytes // 3
    priced = [Change({"larger": 1}, half, -0.5), Change({"less": 1}, -third, 0.1), Change({"least": 1}, -half, -0.1)]
    monkeypatch.setattr(plan_module, "priced_changes", lambda *args: priced)
    monkeypatch.setattr(plan_module.Prices, "price", lambda *args: None)
    tight = PAIR._replace(chip=PAIR.chip._replace(usable_bytes=now.peak_bytes // 4))
    assert [key for change in helpful_changes(tiny(), tight, now) for key in change.values] == ["least", "less"]
    shown = [key for change in helpful_changes(tiny(), PAIR, now) for key in change.values]
    assert shown == ["larger", "least", "less"]


def test_a_plan_that_does_not_fit_names_first_what_makes_it_fit(monkeypatch):
    now = predict(tiny(), PAIR)
    half, third = now.peak_bytes // 2, now.peak_bytes // 3
    effects = {"slow": (-half, 0.3), "nearest": (-third, -0.2), "quick": (-half - 1, 0.1), "far": (-third + 1, -0.5)}
    priced = [Change({key: 1}, *effect) for key, effect in {**effects, "larger": (third, -0.5)}.items()]
    monkeypatch.setattr(plan_module, "priced_changes", lambda *args: priced)
    tight = PAIR._replace(chip=PAIR.chip._replace(usable_bytes=now.peak_bytes - half))
    shown = [key for change in helpful_changes(tiny(), tight, now) for key in change.values]
    assert shown == ["quick", "slow", "nearest", "far"]


@pytest.mark.parametrize(("room", "expected"), [(2, []), (4, [4]), (8, [8]), (64, [16])])
def test_a_plan_that_does_not_fit_names_the_fewest_microbatches_that_do_or_the_most_that_there_can_be(room, expected):
    """Twice as many are tried anyway; 16 divide the batch."""
    sizes = dict(data_global_batch=32, data_seq=256)
    settings = tiny(**sizes, pipeline_microbatches=1)
    now = predict(settings, PAIR)
    held = {many: predict(tiny(**sizes, pipeline_microbatches=many), PAIR).peak_bytes for many in (2, 4, 8, 16)}
    assert sorted(held.values(), reverse=True) == [*held.values()]
    usable_bytes = held.get(room, held[16] - 1)
    tight = PAIR._replace(chip=PAIR.chip._replace(usable_bytes=usable_bytes))
    changes = list(smaller_microbatches(Prices(settings, tight, now)))
    assert [change.values["pipeline.microbatches"] for change in changes] == expected
    assert room == 64 or all(now.peak_bytes + change.bytes <= usable_bytes for change in changes)


def test_a_plan_of_a_step_that_does_not_fit_says_which_changes_alone_make_it_fit():
    now = SimpleNamespace(peak_bytes=PAIR.chip.usable_bytes + 2**30)
    little, enough = Change({"little": 1}, -(2**20), 0.0), Change({"enough": 1}, -(2**30), 0.0)
    (line,) = enough_lines([little], now, PAIR)
    assert "no change alone saves the 1.0 GiB that are too much" in line and "--sweep" in line
    assert [*enough_lines([enough, little], now, PAIR)] == [
        "the first saves the 1.0 GiB that are too much; the others alone do not"
    ]
    assert [*enough_lines([enough] * 2 + [little], now, PAIR)] == [
        "each of the first 2 saves the 1.0 GiB that are too much; the others alone do not"
    ]
    assert [*enough_lines([enough] * 2, now, PAIR)] == ["each saves the 1.0 GiB that are too much"]
    assert not [*enough_lines([little], SimpleNamespace(peak_bytes=2**30), PAIR)]


def test_every_number_of_fewer_microbatches_and_sets_of_parts_are_tried():
    settings = tiny(data_global_batch=32, pipeline_microbatches=8)
    flags = [flags for flags, _ in changes_of(settings, PAIR)]
    many = [int(one.split("=")[1]) for one in flags if one.startswith("--config.pipeline.microbatches=")]
    assert sorted(many) == [1, 2, 4, 16]
    sets = sets_to_try(settings.model, seq=settings.data.seq)
    tried = {shlex.split(one)[0].removeprefix("--config.pipeline.remat=") for one in flags if "pipeline.remat" in one}
    assert tried == {*sets} - {settings.pipeline.remat} and any(" " in one for one in tried)


EFFECTS = {  # of a value of a key: bytes, and a share of the step's time
    ("pipeline.remat", "none"): (40, -0.2),
    ("pipeline.remat", "elementwise"): (30, -0.15),
    ("pipeline.microbatches", 1): (50, -0.1),
    ("fsdp.prefetch", 1): (1, -0.05),
    ("optimizer.weights_dtype", "bfloat16"): (0, -0.3),
}


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (
            1000,
            ["remat=none microbatches=1", "remat=none microbatches=1 prefetch=1"],
        ),
        (60, ["remat=none prefetch=1"]),  # one microbatch does not fit beside the residuals
        (10, []),
    ],
)
def test_a_plan_leads_to_the_best_changes_together(room, expected, monkeypatch):
    settings = tiny()

    def priced(_, values):
        return Change(values, *(sum(EFFECTS[value][at] for value in values.items()) for at in (0, 1)))

    monkeypatch.setattr(plan_module, "single_changes", lambda *_: [dict([value]) for value in EFFECTS])
    monkeypatch.setattr(plan_module, "faster_sets", lambda *_: [])
    monkeypatch.setattr(plan_module.Prices, "price", priced)
    tight = PAIR._replace(chip=PAIR.chip._replace(usable_bytes=room))
    found = helpful_changes(settings, tight, SimpleNamespace(peak_bytes=0, host_bytes=0))
    alone = [(*change.values.items(),) for change in found if change.together == 1]
    assert {*alone} == {(value,) for value, (size, _) in EFFECTS.items() if size <= room}
    together = [" ".join(flags_of(change.values)) for change in found if change.together > 1]
    assert [re.sub(r"--config\.\w+\.", "", flags) for flags in together] == expected
    lines = "\n".join(changes_table(found))
    assert ("the two best together" in lines) == bool(expected) and max(map(len, lines.splitlines())) <= 100
    assert ("all that help, together" in lines) == (len(expected) == 2)


def test_the_best_change_of_each_key_is_shown_before_second_ones():
    ordered = [Change(dict([value]), 0, 0.0) for value in EFFECTS]
    assert best_of_each_key(ordered, 3) == [ordered[0], *ordered[2:4]]
    assert len(best_of_each_key(ordered, 9)) == 5


def test_sums_of_gradients_by_reduce_scatter_hide_where_sparse_cores_run_them():
    sent = [Sent("reduce-scatter", ("dp",), 1e9, 4, "backward", "Block", "")]
    settings = tiny(mesh_dp=8, data_global_batch=8, fsdp_reduce="float32")
    topologies, per_use = map(read_topology, ("v5e:2x4", "v5p:2x2x2")), SentPerUse(gradients={"Block"})
    hides = [messages(sent, topology, settings, per_use)[0].hides for topology in topologies]
    assert hides == [False, True]


@pytest.mark.slow
def test_one_large_microbatch_less_recomputation_and_rings_are_faster_for_a_7b_model_on_64_chips():
    """As compiled: 1.892 s with all three changes, 2.253 s without."""
    config = llama2_7b_64()
    before = {"pipeline.microbatches": 4, "pipeline.remat": "attention", "fsdp.reduce": "compute"}
    config.update_from_flattened_dict(before | {"model.layers": 2})
    settings, topology = read_settings(config.to_dict()), read_topology("v5p:4x4x4")
    changed = {flags.removeprefix("--config."): changed for flags, changed in changes_of(settings, topology)}
    now = predict(settings, topology).secs
    for change in ("pipeline.microbatches=1", "pipeline.remat=elementwise", "fsdp.reduce=float32"):
        assert predict(changed[change], topology).secs < now * (1 - LEAST_SPEEDUP)


NARROW_OR_ON_HOST = {
    "--config.optimizer.m_dtype=bfloat16 --config.optimizer.v_dtype=bfloat16",
    "--config.optimizer.m_dtype=float8 --config.optimizer.v_dtype=float8",
    "--config.optimizer.weights_dtype=bfloat16",
    "--config.fsdp.gather_dtype=int8",
    "--config.model.matmul=int8",
    "--config.optimizer.states_on=host",
    "--config.optimizer.masters_on=host",
    "--config.pipeline.residuals_on=host",
}


@pytest.mark.slow
def test_a_plan_prices_fewer_bits_and_host_memory_each_alone():
    settings = tiny(model_d_model=64, pipeline_remat="layer", **LONG)
    offered = [(flags, one) for flags, one in changes_of(settings, PAIR) if flags in NARROW_OR_ON_HOST]
    assert {flags for flags, _ in offered} == NARROW_OR_ON_HOST
    now = predict(settings, PAIR)
    saves = {flags: now.peak_bytes - predict(one, PAIR).peak_bytes for flags, one in offered}
    assert all(saves[flags] > 0 for flags in NARROW_OR_ON_HOST if ".optimizer." in flags or "residuals" in flags)
    tight = PAIR._replace(chip=PAIR.chip._replace(usable_bytes=now.peak_bytes - 1))
    shown = helpful_changes(settings, tight, now)
    assert all(change.bytes < 0 for change in shown) and [*shown] == sorted(shown, key=lambda change: change.secs)
    assert NARROW_OR_ON_HOST & {shlex.join(flags_of(change.values)) for change in shown}


def test_what_is_narrow_or_on_the_host_is_not_offered_again():
    asked = dict(optimizer_m_dtype="float8", optimizer_v_dtype="bfloat16", optimizer_states_on="host")
    settings = tiny(**asked, fsdp_gather_dtype="int8", model_matmul="int8", pipeline_residuals_on="host")
    offered = {flags for flags, _ in changes_of(settings, PAIR)}
    assert "--config.optimizer.v_dtype=float8" in offered
    assert not [flags for flags in offered if "states_on" in flags or "m_dtype" in flags or "matmul=" in flags]
    assert not [flags for flags in offered if "gather_dtype" in flags or "residuals_on" in flags]
    without_link = PAIR._replace(chip=PAIR.chip._replace(host_bandwidth=0.0))
    assert not [flags for flags, _ in changes_of(tiny(), without_link) if flags.endswith("=host")]


@pytest.mark.slow
def test_8_bit_residuals_are_offered_and_said_with_8_bit_products():
    flags = "--config.model.matmul_residuals=8bit"
    offered = [{flags for flags, _ in changes_of(tiny(model_matmul=form), PAIR)} for form in ("compute", "int8")]
    assert flags not in offered[0] and flags in offered[1]
    both = tiny(model_matmul="int8", model_matmul_residuals="8bit")
    assert not [flags for flags, _ in changes_of(both, PAIR) if "matmul" in flags]
    assert "in int8, which save their input in 8 bits" in plan_heading("tiny", both, PAIR)
    assert any("times as fast" in line for line in eight_bit_lines(both, PAIR, predict(both, PAIR)))


def test_the_heading_says_stages_of_a_rank_and_gathers_ahead_where_they_are_asked_for():
    asked = dict(mesh_pp=2, mesh_dp=1, pipeline_schedule="interleaved", pipeline_virtual=2, fsdp_prefetch=1)
    lines = plan_heading("tiny", tiny(**asked), PAIR).splitlines()
    assert "; interleaved v=2, 2 microbatches" in lines[1] and "policy zero3, one layer ahead," in lines[2]
    assert "; accumulate, 1 microbatch of 2 x 16 tokens" in plan_heading("tiny", tiny(pipeline_microbatches=1), PAIR)
    plain = plan_heading("tiny", tiny(), PAIR)
    assert "; accumulate, 2 microbatches" in plain and "policy zero3, " in plain


@pytest.mark.slow
def test_flags_of_a_change_do_what_it_says(config):
    settings, topology = command.located(read_command(["plan", config], {})[0], "v5e:2x2")
    now = predict(settings, topology)
    change = helpful_changes(settings, topology, now)[0]
    then = predict(read_command(["plan", config, *flags_of(change.values)], {})[0], topology)
    assert then.secs == pytest.approx(now.secs * (1 + change.secs))
    assert then.peak_bytes == now.peak_bytes + change.bytes


@pytest.mark.slow
def test_a_sweep_prints_its_table_and_draws(few, config, tmp_path, capsys):
    flags = ["--topology=v5e:1x2", "--config.mesh.tp=1", "--sweep", "--analytic", "--keep=4"]
    files = [f"--cache={tmp_path / 'cache'}", f"--svg={tmp_path / 'plan.svg'}"]
    assert command.main(["plan", config, *flags, *files]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^\d+ layouts priced; passed over: ", out, re.M)
    assert (tmp_path / "plan.svg").read_text().count("<title>") >= 4
    (fastest,) = re.findall(r"^fastest as planned: ([0-9.]+) ms a step, MFU [0-9.]+ %: (.*)", out, re.M)
    changed = [] if fastest[1] == "the config as it is" else shlex.split(fastest[1])
    then = read_command(["plan", config, "--config.mesh.tp=1", *changed], {})[0]
    assert fastest[0] == f"{1000 * predict(then, PAIR).secs:.3f}"
    assert max(len(line) for line in out.splitlines() if not line.startswith("fastest")) <= 100


@pytest.mark.slow
def test_a_sweep_compiles_the_fastest_that_fit_and_the_config_s_own(few, config, tmp_path, capsys, monkeypatch):
    """The compiler refuses the layout that was priced fastest, and finds the third faster than the second."""
    asked = []

    def compiled(search, choice, devices):
        asked.append(choice)
        secs = {0: 0.3, 2: 0.2, 3: 0.1}.get(len(asked) - 1)  # the config's own is asked for first
        if secs is None:
            return CompiledStep("Used 20G of 15.8G HBM")
        return CompiledStep("", 1 << 28, 1 << 28, 1 << 29, StepTime(secs, {}, 0.0, secs, 0.0, 0.01 / secs))

    monkeypatch.setattr(Sweep, "compiled", compiled)
    monkeypatch.setattr(command, "why_not", lambda topology: "")
    monkeypatch.setattr(command, "devices_of", lambda topology: [None])
    flags = ["--topology=v5e:1x2", "--config.mesh.tp=1", "--sweep", "--keep=8", "--compile=2"]
    assert command.main(["plan", config, *flags, f"--cache={tmp_path / 'cache'}"]) == 0
    out = capsys.readouterr().out
    assert len(asked) == len(set(asked)) == 4
    assert re.search(r"^ +compiled +no fit$", out, re.M)
    found = re.search(r"^fastest as compiled: 0.100 s a step, MFU 10.0 %: (.*)", out, re.M)
    assert shlex.split(found[1]) == flags_of(asked[0].keys_to(asked[3]))


def test_an_interrupted_command_shows_what_it_has_and_ends_with_130(few, config, tmp_path, capsys, monkeypatch):
    kept = []

    def interrupt(path):
        if len(kept) == 2:
            raise KeyboardInterrupt
        kept.append(path)

    on_write(monkeypatch, "*.json", interrupt)
    flags = ["--topology=v5e:1x2", "--config.mesh.tp=1", "--sweep", f"--cache={tmp_path / 'cache'}"]
    assert command.main(["plan", config, *flags]) == 130
    shown = capsys.readouterr()
    assert "\n2 layouts priced; passed over: 3 not legal\n" in shown.out
    assert "the same command continues from here" in shown.err


def test_without_libtpu_the_plan_is_analytic_and_says_how_to_get_it(planned):
    assert re.search(r"^MFU", planned, re.M) and "pip install -e '.[tpu]'" in planned.splitlines()[-1]


@pytest.fixture
def no_changes(monkeypatch):
    """What would help a plan is not priced, which takes seconds."""
    monkeypatch.setattr(command.plan, "helpful_changes", lambda *_: [])


def test_a_plan_for_gpus_is_analytic_without_their_compiler_and_says_how_to_get_it(
    config, capsys, compiles_nothing, no_changes, monkeypatch
):
    monkeypatch.setattr("parallax.analysis.planned.topology.CUDA_PLUGINS", ("no_plugin",))
    assert command.main(["plan", config, "--topology=h100:4", "--config.model.kernel=cudnn"]) == 0
    out = capsys.readouterr().out
    assert "attention by cudnn" in out and re.search(r"^MFU \d+\.\d % \(analytic\)", out, re.M)
    assert out.splitlines()[-1] == f"not compiled: {GET_CUDA}" and "pip install -e '.[gpu-compiler]'" in GET_CUDA


def test_asked_for_devices_without_their_compiler_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("parallax.analysis.planned.topology.CUDA_PLUGINS", ("no_plugin",))
    with pytest.raises(ConfigError, match=re.escape(GET_CUDA)):
        devices_of("H100:1x8")


def test_the_headline_of_a_compiled_plan_says_how_kernels_are_priced():
    time = StepTime(1.0, {}, 0.5, 1.5, 0.0, 0.5)
    lines = lambda time: list(compiled_lines(CompiledStep("", 1, 1, 2, time), PAIR))  # noqa: E731
    assert "MFU 50.0 % (compiled, kernels at 70 % of peak; bubble 0.0 %)" in lines(time)
    assert "MFU 50.0 % (compiled, kernels at 100 % of peak; bubble 0.0 %)" in lines(time._replace(kernel_efficiency=1))
    assert "MFU 50.0 % (compiled; bubble 0.0 %)" in lines(time._replace(pallas_secs=0.0))
    (line,) = fastest_line([], {Choice.of(tiny()): CompiledStep("", time=time)}, Choice.of(tiny()), 0)
    assert line.startswith("fastest as compiled, kernels at 70 % of peak: 1.500 s a step")


def test_a_plan_compiled_for_gpus_says_what_becomes_of_its_collectives_and_what_its_figures_rest_on():
    sent = (Overlap("dp", "all-gather", 6, 42 * 2**20, 1.0, 0.15),)
    made = CompiledStep("", 1 << 28, 1 << 28, 1 << 29, StepTime(1.0, {"dp": 0.1}, 0.0, 1.1, 0.0, 0.5), sent)
    one, two = (list(compiled_lines(made, read_topology(name))) for name in ("H100:8", "H100:2x8"))
    assert "dp all-gather      6  42.0 MiB       100.0 %  15.0 %" in one
    assert any("3,350 GB/s" in line for line in one) and any(line.endswith("450 GB/s within a host") for line in one)
    assert any("450 GB/s within a host and 50 GB/s between hosts" in line for line in two)
    assert not any("rests" in line or "a GPU sends" in line for line in compiled_lines(made, PAIR))


def test_an_analytic_plan_compiles_nothing_and_asks_for_nothing(config, planned, capsys, compiles_nothing, no_changes):
    assert command.main(["plan", config, "--topology=v5e:2x2", "--analytic"]) == 0
    out = capsys.readouterr().out
    assert planned.startswith(out) and "pip install" not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topology=v9:4x4"], "chip 'v9:4x4' is unknown; .*v5e"),
        (["--topology=v5e:4x"], "--topology=v5e:4x is not a topology; write CHIP:SIZES"),
        (["--topology=v5p-64"], "Google's names v5litepod-16 is v5e:4x4, and v5p-64, which counts cores, v5p:2x4x4"),
        (["--topology=H100-8"], "such as v5p:4x4x4, v5e:4x4 or H100:8 for one host.$"),
        (["--topology=v5e"], "is not a topology"),
        (["--topology=v5p:4x4"], "has 2 sizes, but slices of TPU v5p have 3"),
        (["--topology=v5e:4x4"], "v5e:4x4 has 16 devices: mesh.pp=1 mesh.dp=2 mesh.tp=2 wants 4 devices"),
        (["--topology=v5e:4x4"], r"legal pp·dp·tp for 16: [^(]*$"),  # not mesh.simulate, which does nothing there
        (["--topology=h100:16"], "a host has at most 8 NVIDIA H100: write h100:2x8, for 16 GPUs"),
        (["--topology=2xv5p:4x4"], "write 2xv5p:4x4x4, for 128 chips"),
        (
            ["--topology=v5e:32x32"],
            r"slices of 32x32 \(1,024 chips\), but the largest of TPU v5e is 16x16 \(256\); write 4xv5e:16x16, ",
        ),
        (
            ["--topology=v5e:64x4"],
            r"slices of 64x4 \(256 chips\), but the largest of TPU v5e is 16x16 \(256\); write v5e:16x16, for 256",
        ),
        (["--topology=2xv6e:32x16"], r"largest of TPU v6e is 16x16 \(256\); write 4xv6e:16x16, for 1,024 chips"),
        ([], "wants 4 devices, but there are 8; .*, or plan for chips that need not be here: --topology=v5e:4x4"),
        (["--topology=2xH100:16"], "write H100:4x8, for 32 GPUs"),
        (["--topology=2xH100:4x8"], "has 2 slices, but NVIDIA H100 are on hosts; write H100:8x8, for 8 hosts"),
        (["--topology=2xv5e:1x2"], "neither divides over 2 slices of 2 chips, .*with mesh.replica=2 mesh.dp=1"),
        (["--topology=H100:2x2x8"], "a host has at most 8 NVIDIA H100: write H100:4x8, for 32 GPUs"),
        (
            ["--topology=H100:4", "--config.model.kernel=splash"],
            "needs TPUs, or CPUs .*use kernel in {'xla', 'cudnn', 'triton'}",
        ),
        (["--topology=v5e:2x2", "--config.model.kernel=cudnn"], r"needs GPUs, and these are TPUs \(TPU v5e\)"),
        (["--topology=H100:4", "--config.model.kernel=cudnn", "--config.model.dtype=float32"], "needs model.dtype='bf"),
        (["--topology=v5e:2x2", "--config.model.heads=3"], "model.heads=3 does not divide"),
        (["--topology=v5e:2x2", "--config.pipeline.microbatches=3"], "data.global_batch=4 does not divide"),
        (["--topology=v5e:2x2", "--svg=x.svg"], "--svg=x.svg is for --sweep"),
        (["--topology=v5e:2x2", "--sweep", "--keep=0"], "--keep=0 must be a whole number of 1 or more"),
        (["--topology=v5e:2x2", "--sweep", "--most=-1"], "--most=-1 must be a whole number of 0 or more"),
        (["--topology=v5e:2x2", "--most=9"], "--most=9 is for --sweep"),
        (["--topology="], "is empty; leave it out"),
        (["--topolgy=v5e:2x2"], "unknown flag --topolgy; did you mean '--topology'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_is_compiled(
    config, flags, message, capsys, compiles_nothing
):
    assert command.main(["plan", config, *flags]) == 2
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1 and shown.err.startswith("ConfigError: ")
    assert re.search(message, shown.err)


@pytest.mark.slow
def test_without_a_topology_the_devices_here_are_planned_for():
    topology = local_topology("float32")
    assert topology.devices == 8 and topology.shared
    assert (
        topology.chip.flops["float32"] > 1e8 and topology.chip.hbm_bandwidth > 1e7 and topology.chip.ici_bandwidth > 1e5
    )
    with pytest.raises(ConfigError, match="peak of this machine in 'int4' is not known"):
        topology.chip.peak("int4")


@pytest.mark.parametrize(
    ("hosts", "shape"),
    [([0] * 8, (1, 8)), ([at // 8 for at in range(32)], (4, 8)), ([0] * 8 + [1] * 4, (3, 4))],
    ids=str,
)
def test_gpus_here_are_on_the_hosts_that_jax_calls_slices(hosts, shape, monkeypatch):
    kind = dict(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    gpus = [SimpleNamespace(**kind, slice_index=host, process_index=at) for at, host in enumerate(hosts)]
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    assert local_topology("bfloat16").shape == shape


@pytest.mark.slow
def test_without_a_topology_the_step_is_compiled_here(config, capsys):
    flags = ["--config.mesh.tp=4", "--config.model.dtype=float32"]  # 8 devices
    assert command.main(["plan", config, *flags]) == 0
    out = capsys.readouterr().out
    assert "(compiled)" in out and "this machine" in out


@pytest.mark.slow
def test_the_step_is_compiled_for_chips_that_are_not_here(config):
    pytest.importorskip("libtpu")
    command = [sys.executable, "-m", "parallax.plan", config, "--topology=v5e:2x2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0
    assert re.search(r"^MFU \d+\.\d % \(compiled", ended.stdout, re.M)
    assert "WARNING" not in ended.stderr
