"""What a report reads from a traced program: how often, how much, which way, who asked and where."""

import functools
import math
import pathlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from support.step_collectives import step_collectives
from support.tiny_model import build, optimizer_config

from parallax.analysis.compiled.program import read_compiled
from parallax.analysis.traced.collectives import (
    Sent,
    busiest,
    bytes_by,
    collectives,
    collectives_by_rank,
    on_average,
    update_collectives,
)
from parallax.analysis.traced.flops import flops_by_direction
from parallax.analysis.traced.trace import walk
from parallax.config.sections import AXES
from parallax.sharding.collectives import (
    all_gather,
    all_to_all,
    as_varying,
    max_over,
    permute,
    reduce_scatter,
    sum_over,
)
from parallax.sharding.plan import GRADIENTS
from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainStep, abstract_state

REPO = pathlib.Path(__file__).parents[2]
SIZES = {"pp": 2, "dp": 4, "tp": 2}
MESH = AbstractMesh(tuple(SIZES.values()), AXES, axis_types=(AxisType.Auto,) * 3)
ROWS, SEQ = 64, 16
X = jax.ShapeDtypeStruct((16, 8), "float32")  # on each device


def sent_by(local, *more, at=(0, 0, 0)):
    """What a device sends that runs `local(x)` on an X of its own."""
    whole = jax.ShapeDtypeStruct((16 * 16, 8), "float32")
    varying = lambda *args: as_varying(local(*map(as_varying, args)).sum()[None])  # noqa: E731
    specs = (P(AXES), *(P() for _ in more))
    mapped = jax.shard_map(varying, mesh=MESH, in_specs=specs, out_specs=P(AXES))
    return collectives(mapped, whole, *more, rank=dict(zip(AXES, at)), sizes=SIZES)


def calls(sent):
    return [(one.kind, one.axes, one.bytes, one.count) for one in sent]


PIECE = 16 * 8 * 4  # bytes of X
BYTES = {  # on axes of 4 and 2 devices
    "all-gather": (lambda x: all_gather("batch/dp d_model -> batch d_model", x), "dp", 3 * PIECE),
    "reduce-scatter": (lambda x: reduce_scatter("batch d_model -> batch/dp d_model", x), "dp", 3 * PIECE // 4),
    "all-reduce": (lambda x: sum_over(x, ["dp"]), "dp", 2 * 3 * PIECE // 4),
    "all-to-all": (lambda x: all_to_all("batch/dp d_model -> batch d_model/dp", x), "dp", 3 * PIECE // 4),
    "permute": (lambda x: permute("batch d_model", x, axis="pp"), "pp", PIECE),
}


@pytest.mark.parametrize("kind", BYTES)
def test_bytes_are_those_that_a_device_sends_in_one_call(kind):
    local, axis, size = BYTES[kind]
    assert calls(sent_by(local)) == [(kind, (axis,), size, 1)]


def test_a_sum_over_several_axes_is_one_entry_with_their_tuple():
    assert calls(sent_by(lambda x: sum_over(x, ["tp", "dp"]))) == [("all-reduce", ("dp", "tp"), 2 * 7 * PIECE // 8, 1)]
    assert calls(sent_by(lambda x: max_over(x, ["tp"]))) == [("all-reduce", ("tp",), PIECE, 1)]


def test_an_axis_of_one_device_sends_nothing():
    mesh = AbstractMesh((1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)
    gather = lambda x: all_gather("batch/dp d_model -> batch d_model", x)  # noqa: E731
    mapped = jax.shard_map(gather, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    assert calls(collectives(mapped, X, rank=dict.fromkeys(AXES, 0), sizes=dict.fromkeys(AXES, 1))) == [
        ("all-gather", ("dp",), 0, 1)
    ]


def test_only_ranks_that_a_permute_names_send():
    shift = lambda x: lax.ppermute(x, "dp", [(0, 1), (1, 1)])  # noqa: E731
    assert [sent_by(shift, at=(0, dp, 0))[0].bytes for dp in range(4)] == [PIECE, 0, 0, 0]


def exchange(x, *_):
    return all_to_all("batch/dp d_model -> batch d_model/dp", x).reshape(x.shape)


def test_loops_are_multiplied_out():
    def nested(x):
        inner = lambda x, _: (exchange(x), None)  # noqa: E731
        outer = lambda x, _: (lax.scan(inner, x, None, length=3)[0], None)  # noqa: E731
        return exchange(lax.scan(outer, x, None, length=5)[0])

    assert sum(one.count for one in sent_by(nested)) == 3 * 5 + 1


def test_of_a_branch_that_a_table_decides_the_side_counts_that_this_rank_takes():
    table = np.array([[0, 1], [1, 1], [0, 1], [2, 1]])  # [turn, rank]: how many exchanges

    def turn(x, row):
        sides = [lambda x: x, exchange, lambda x: exchange(exchange(x))]
        return lax.switch(row[lax.axis_index("pp")], sides, x), None

    found = [sent_by(lambda x: lax.scan(turn, x, jnp.asarray(table))[0], at=(pp, 0, 0)) for pp in range(2)]
    assert [sum(one.count for one in sent) for sent in found] == [3, 4]


def test_a_counter_that_a_loop_carries_decides_branches():
    def turn(carry, _):
        x, number = carry
        return (lax.cond(number % 3 == 0, exchange, lambda x: x, x), number + 1), None

    assert sum(one.count for one in sent_by(lambda x: lax.scan(turn, (x, 0), None, length=10)[0][0])) == 4


def test_a_counter_decides_branches_behind_a_barrier_that_it_shares_with_activations():
    def turn(carry, _):
        x, number = lax.optimization_barrier(carry)
        return (lax.cond(number < 4, exchange, lambda x: x, x), number + 1), None

    def run(x):
        return lax.scan(turn, (x, as_varying(jnp.int32(0))), None, length=10)[0][0]

    assert sum(one.count for one in sent_by(run)) == 4


def test_a_loop_is_followed_once_where_a_branch_is_decided_by_what_its_weights_give():
    def turn(carry, _):
        x, number = carry
        x = x @ jnp.ones((9, 8, 8))[number]
        return (lax.cond(x.sum() > 0, jnp.sin, jnp.sin, x), number + 1), None

    program = jax.make_jaxpr(lambda x: lax.scan(turn, (x, 0), None, length=9)[0])(X)
    visits = []

    def count(equation, _):
        visits.append(equation.primitive.name)
        return Counter([equation.primitive.name])

    assert walk(program, rank={}, count=count)["sin"] == 9
    assert visits.count("dot_general") == 1


def test_the_tables_of_a_schedule_steer_however_many_ticks_they_have():
    table = np.arange(1000 * 32, dtype=np.int32).reshape(1000, 32) % 3

    def ticks(x):
        tick = lambda x, row: (lax.cond(row[1] > 0, exchange, lambda x: x, x), None)  # noqa: E731
        return lax.scan(tick, x, table)[0]

    assert [one.count for one in sent_by(ticks)] == [(table[:, 1] > 0).sum()]


def test_a_branch_on_data_is_refused_where_its_sides_differ_and_only_there():
    count = jax.ShapeDtypeStruct((), "int32")
    differ = lambda x, n: lax.cond(n > 0, exchange, lambda x: x, x)  # noqa: E731
    with pytest.raises(ValueError, match="which branch runs depends on data.*all-to-all"):
        sent_by(differ, count)
    alike = lambda x, n: lax.cond(n > 0, exchange, lambda x: exchange(x), x)  # noqa: E731
    assert sum(one.count for one in sent_by(alike, count)) == 1


def test_a_loop_whose_turns_depend_on_data_is_refused_if_it_sends():
    count = jax.ShapeDtypeStruct((), "int32")
    with pytest.raises(ValueError, match="a while loop's trip count.*all-to-all"):
        sent_by(lambda x, n: lax.fori_loop(0, n, lambda _, x: exchange(x), x), count)
    assert sent_by(lambda x, n: lax.fori_loop(0, n, lambda _, x: 2 * x, x), count) == []


def test_what_no_output_needs_is_not_counted():
    """XLA drops it, too: the gradient of an embedding does not gather its table."""
    assert sent_by(lambda x: (exchange(x), x)[1]) == []


def gradient_of(function):
    return lambda x: jax.grad(lambda x: jnp.square(function(x)).sum())(x)


def directions(sent):
    return {(one.direction, one.kind): one.count for one in sent}


def test_transposes_and_what_is_in_the_scope_of_gradients_is_backward():
    gather = lambda x: all_gather("batch/dp d_model -> batch d_model", x)  # noqa: E731

    def exchanged(x):
        gradient = gradient_of(gather)(x)
        with jax.named_scope(GRADIENTS):
            return exchange(gradient)

    found = directions(sent_by(exchanged))
    assert found == {("forward", "all-gather"): 1, ("backward", "reduce-scatter"): 1, ("backward", "all-to-all"): 1}


def test_what_a_checkpoint_runs_again_is_recomputed():
    def layer(x):
        return jnp.sin(all_gather("batch/dp d_model -> batch d_model", jnp.sin(x)))

    found = directions(sent_by(gradient_of(jax.checkpoint(layer))))
    once = {("forward", "all-gather"): 1, ("backward", "reduce-scatter"): 1}
    assert found == once | {("recompute", "all-gather"): 1}
    assert directions(sent_by(gradient_of(layer))) == once


def step(mesh=(2, 2, 2), **changes):
    return build(mesh, microbatches=4, **changes)


@functools.cache
def sent_in_step(**changes):
    return step_collectives(step(**changes), ROWS, SEQ)


@pytest.mark.slow
def test_what_forward_did_not_keep_is_sent_again_where_gradients_read_it():
    def by_module(remat, direction):
        return {
            s.module: s.total_bytes
            for s in sent_in_step(remat=remat)
            if s.module.startswith("mlp") and (s.axes, s.direction) == (("tp",), direction)
        }

    forward = by_module("none", "forward")
    assert set(forward) == {"mlp_norm", "mlp", "mlp/down"}
    assert by_module("none", "recompute") == {}
    # No gradient reads what the last product of a layer adds to the residual, but the next layer of a stage does.
    assert by_module("layer", "recompute") == {name: sent for name, sent in forward.items() if name != "mlp/down"}
    assert by_module("stage", "recompute") == forward
    for direction in ("forward", "backward"):
        assert by_module("none", direction) == by_module("layer", direction) == by_module("stage", direction)


@pytest.mark.slow
def test_weights_gathered_ahead_are_the_same_messages_in_the_same_directions():
    plain, ahead = (
        bytes_by(sent_in_step(remat="layer", **changes), "axes", "kind", "direction")
        for changes in ({}, {"prefetch": 1})
    )
    assert plain == ahead and plain[("dp",), "all-gather", "recompute"] > 0


def test_flops_are_told_apart_by_direction():
    model, at = step(remat="layer"), dict.fromkeys(AXES, 0)
    batch = dict.fromkeys(("tokens", "labels", "segments", "positions"), jax.ShapeDtypeStruct((ROWS, SEQ), "int32"))
    found = flops_by_direction(jax.make_jaxpr(model.loss_and_grad)(model.shapes, batch), rank=at)
    # Rope's products move entries by a permutation, which has no gradient: d_rope^2 for each head, and for the keys.
    # Attention's backward pass makes the scores again.
    tokens, layers, heads = ROWS * SEQ // 2, 8 // 2, 8 // 2
    rope, scores = 4**2 * (heads + 1), SEQ * heads * (8 + 4)
    assert found["backward"] == 2 * found["forward"] + 2 * tokens * layers * (scores - rope)
    assert 0.7 * found["forward"] < found["recompute"] < found["forward"], (
        "not the head, and not a layer's last product"
    )
    assert set(found) == {"forward", "backward", "recompute"}


WORDS = (
    "reshard(",
    "all_gather(",
    "reduce_scatter(",
    "all_reduce(",
    "all_to_all(",
    "sum_over(",
    "max_over(",
    "family.read(",  # a gather, whole or as streams
    "combine(",  # sum_over or max_over
    "permute(",
)


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble_v"])
def test_sources_are_lines_of_this_project_that_ask_for_what_they_are_said_to(schedule):
    for one in step_collectives(step(schedule=schedule, attention="gqa"), ROWS, SEQ):
        file, _, line = one.source.partition(":")
        text = (REPO / file).read_text().splitlines()[int(line) - 1]
        # A factor that is the same for all of a cut dim sums its gradient where it is used.
        asks = any(word in text for word in WORDS) or (one.direction == "backward" and "inverse" in text)
        # What Dense and the plan send for a kernel or a table, the line asks for that uses it.
        used = f"{one.module.rpartition('/')[2]}(", "table"
        assert asks or any(word in text for word in used), (one, text)


def test_what_the_plan_moves_for_a_layer_is_asked_for_by_the_layers_line():
    """It named the line of the plan, the same for every kernel."""
    sent = step_collectives(step(attention="gqa", tied=False), ROWS, SEQ)
    moved = {one.module: one.source.partition(":")[0] for one in sent if one.axes == ("dp",) and one.bytes}
    files = {"mlp/gate": "model/mlp.py", "attention/out": "model/attention.py", "head": "model/embedding.py"}
    assert {module: moved[module] for module in files} == {m: f"parallax/{file}" for m, file in files.items()}
    assert {module for module, file in moved.items() if file == "parallax/sharding/plan.py"} <= {"sharding/plan"}


def test_modules_are_named_as_the_model_names_them():
    modules = {one.module for one in step_collectives(step(attention="mla", tied=False), ROWS, SEQ)}
    assert {"embedding", "attention", "attention/norm", "attention/out", "mlp", "mlp/down", "head/norm"} <= modules
    assert {"model/loss", "pipeline/tick", "sharding/plan"} <= modules


def test_a_report_has_of_each_entry_the_count_of_the_rank_that_sends_it_most():
    model = step((4, 2, 1))
    ranks, report = collectives_by_rank(model, ROWS, SEQ), step_collectives(model, ROWS, SEQ)
    embeds = [sum(s.count for s in rank if s.module == "embedding" and s.direction == "forward") for rank in ranks]
    assert len(ranks) == 4 and embeds[0] >= 1
    for one in report:
        same = [s.count for rank in ranks for s in rank if s._replace(count=0) == one._replace(count=0)]
        assert one.count == max(same)
    assert {one._replace(count=0) for one in report} == {s._replace(count=0) for rank in ranks for s in rank}


def test_an_average_rank_sends_a_rank_s_share_of_what_all_send():
    ranks = collectives_by_rank(step((4, 2, 1), schedule="one_f_one_b"), ROWS, SEQ)
    average = on_average(ranks)
    assert sum(one.total_bytes for one in average) == sum(one.total_bytes for rank in ranks for one in rank) / 4
    assert sum(one.total_bytes for one in average) < sum(one.total_bytes for one in busiest(ranks))


@pytest.mark.slow
def test_a_mesh_without_devices_gives_the_report_of_one_with_them():
    mesh = AbstractMesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
    abstract = build((1, 1, 1), microbatches=4).replace(mesh=mesh)
    assert step_collectives(abstract, ROWS, SEQ) == sent_in_step()


def test_totals_add_up_over_every_field():
    sent = sent_in_step()
    whole = sum(one.bytes * one.count for one in sent)
    assert whole > 0
    for fields in (("axes", "kind"), ("direction",), ("module",)):
        assert sum(bytes_by(sent, *fields).values()) == whole
    assert Sent("permute", ("pp",), 8, 3, "forward", "", "").total_bytes == 24


# ---- the update


@pytest.mark.parametrize(
    ("mesh", "optimizer", "changes"),
    [
        ((1, 2, 2), "adamw", dict(attention="mla")),
        ((2, 2, 2), "muon", dict(attention="gqa")),
        pytest.param((1, 4, 2), "muon", dict(attention="mla", tensor_parallel="scatter"), marks=pytest.mark.slow),
        pytest.param((1, 2, 4), "muon", dict(attention="mla", policy="zero1"), marks=pytest.mark.slow),
        pytest.param((1, 8, 1), "muon", dict(attention="mla", policy="ddp"), marks=pytest.mark.slow),
    ],
)
def test_what_the_update_sends_is_what_is_compiled(mesh, optimizer, changes):
    model = build(mesh, layers=2, **changes)
    tx = make_optimizer(optimizer_config(name=optimizer, warmup_steps=0), 10, model.plan.rows)
    step = TrainStep(model, tx, seed=0)
    state = abstract_state(model, tx)
    norm = lambda grads: step.grad_norm(grads, {})  # noqa: E731
    update = jax.jit(lambda state, grads: step.update(state.params, state.opt_state, grads, {}, norm(grads)))
    traced, compiled, messages = Counter(), Counter(), Counter()
    for one in update_collectives(step):
        assert one.direction == "update" and one.source.startswith("parallax/step/optimizer.py:")
        axes = tuple(axis for axis in one.axes if model.axis_sizes[axis] > 1)
        traced[axes, one.kind] += one.total_bytes
        messages[axes, one.kind] += one.count
    traced = +traced  # without what sends nothing
    for one in read_compiled(update.lower(state, state.params).compile(), model.mesh).collectives:
        compiled[one.axes, one.kind] += one.bytes * one.count
        messages[one.axes, one.kind] += one.count
    assert traced.keys() == compiled.keys()
    for key in traced:  # an all-reduce's share of one number is no whole number of bytes: each message is rounded
        assert traced[key] == pytest.approx(compiled[key], abs=messages[key])
    if optimizer == "adamw":
        cuts = [math.prod(model.axis_sizes[a] for a in leaf.used_axes()) for leaf in jax.tree.leaves(model.layouts)]
        expected = sum(2 * 4 * (n - 1) / n for n in cuts)
        assert traced.total() == pytest.approx(expected, abs=len(traced)), "one number of each parameter"


# Of a matrix of d_model=32 rows over dp and d_ff=64 columns over tp, each device has 16 x 32 entries.
SENT_BY_MUON = {
    # As many layers as ranks: each has a whole matrix.
    4: {("all-to-all", ("dp", "tp")): 2 * 4 * 16 * 32 * 3 / 4},
    # Dealt over dp: columns are over tp, and G has 32 x 32 entries. Before, one number.
    2: {("all-to-all", ("dp",)): 2 * 2 * 16 * 32 / 2, ("all-reduce", ("tp",)): 2 / 2 * (5 * 32 * 32 + 1)},
    # One matrix stays as it is: own rows of X, and twice of G.
    1: {
        ("all-gather", ("dp",)): 5 * (16 * 32 + 16 * 32),
        ("all-reduce", ("tp",)): 5 * 16 * 32,
        ("all-reduce", ("dp", "tp")): 2 * 3 / 4,
    },
}


@pytest.mark.parametrize("layers", SENT_BY_MUON)
def test_muon_sends_its_matrices_once_each_way_or_their_rows_and_products(layers):
    model = build((1, 2, 2), attention="gqa", layers=layers, d_model=32, d_ff=64)
    tx = make_optimizer(optimizer_config(name="muon", warmup_steps=0), 10, model.plan.rows)
    found = [one for one in update_collectives(TrainStep(model, tx, seed=0)) if one.module == "mlp/gate"]
    assert bytes_by(found, "kind", "axes") == {key: 4 * number for key, number in SENT_BY_MUON[layers].items()}
