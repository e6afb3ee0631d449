"""Prices of layouts in closed form, beside those of their traced steps."""

import random

import pytest

from configs.base import get_config
from parallax.analysis.planned.closed_form import ClosedForm, on_line
from parallax.analysis.planned.layouts import Choice, choices, model_on_topology, with_keys
from parallax.analysis.planned.parts import LayerCosts, Place
from parallax.analysis.planned.step_time import OpCost, predict
from parallax.analysis.planned.sweep import MEMORY_WITHIN, TIME_WITHIN, LeastWork
from parallax.analysis.planned.topology import read_topology
from parallax.config.settings import read_settings
from parallax.errors import ParallaxError

SAMPLED, SEED = 5, 20261128
DENSE = dict(attention="gqa", dtype="bfloat16", kernel="xla", vocab=64, layers=8, d_model=64, d_ff=256)
DENSE |= dict(heads=4, kv_heads=4, d_head=16, d_latent=16, d_rope=4)
MIXTURE = dict(layers_of="moe*8", experts=4, experts_per_token=2, d_expert=64)
WINDOWS = dict(layers_of="(near*3 full)*2", kinds="near=(sliding_window=32) full=(sliding_window=0)")
EIGHT = read_topology("v5e:2x4")


def settings_of(batch=64, seq=128, mesh=None, **model):
    config = get_config()
    config.mesh.update({"dp": 8} | (mesh or {}))
    config.model.update(**(DENSE | {"kernel": "xla"}))
    for name, value in model.items():
        config.model[name] = value
    config.pipeline.microbatches = 2
    config.data.update(seq=seq, global_batch=batch)
    return read_settings(config.to_dict())


def sampled(settings, topology, count=SAMPLED):
    """Legal layouts drawn at random, each with its traced estimate."""
    drawn, every = random.Random(SEED), [*choices(settings, topology)]
    while count:
        choice = drawn.choice(every)
        try:
            step = predict(choice.applied(settings), topology)
        except ParallaxError:
            continue
        count -= 1
        yield choice, step


@pytest.mark.fast(1)
def test_a_pipeline_with_a_divided_backward_pass_has_the_price_of_its_traced_step():
    settings = settings_of(layers=4)
    closed = ClosedForm(settings, EIGHT)
    choice = Choice(2, 2, 2, 4, "zero_bubble", 1, "elementwise", "zero2", "", 0)
    found, step = closed.estimate(choice), predict(choice.applied(settings), EIGHT)
    assert found.secs == pytest.approx(step.secs, rel=TIME_WITHIN)
    assert found.components["saved_activations"] == step.components["saved_activations"]
    # The traced step holds a few small ones more, before they are added to the sums.
    assert found.components["gradients"] == pytest.approx(step.components["gradients"], rel=0.01)
    assert found.bubble == step.bubble


@pytest.mark.fast(1)
@pytest.mark.parametrize(("schedule", "virtual"), [("interleaved", 2), ("one_f_one_b", 1)])
def test_messages_between_stages_hide_as_much_as_in_the_traced_step(schedule, virtual):
    settings = settings_of(layers=4)
    choice = Choice(2, 2, 2, 4, schedule, virtual, "elementwise", "zero2", "", 0)
    found, step = ClosedForm(settings, EIGHT).estimate(choice), predict(choice.applied(settings), EIGHT)
    assert found.beside_secs == pytest.approx(step.beside_secs, rel=1e-6) and step.beside_secs > 0
    assert found.exposed_secs["pp"] == pytest.approx(step.exposed_secs["pp"], rel=1e-6)
    assert found.components["pipeline_buffers"] == step.components["pipeline_buffers"]


STAGES = [
    ("H100:1x4", Choice(2, 2, 1, 2, "zero_bubble", 1, "stage", "ddp", "", 0), {}),
    ("v5e:2x2", Choice(2, 2, 1, 2, "one_f_one_b", 1, "stage", "zero3", "", 1), {"fsdp.gather_dtype": "int8"}),
    ("H100:1x4", Choice(2, 2, 1, 2, "interleaved", 2, "stage", "zero3", "", 1), {}),
    ("v5e:2x2", Choice(2, 2, 1, 2, "one_f_one_b", 1, "stage", "zero3", "", 0), {"fsdp.bucket": "module"}),
]


@pytest.mark.parametrize(
    ("topology", "choice", "values"), [STAGES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in STAGES[1:])]
)
def test_stages_that_run_again_gather_and_copy_their_weights_again(topology, choice, values):
    topology, settings = read_topology(topology), with_keys(settings_of(mesh={"dp": 4}, batch=16, layers=4), values)
    found, step = ClosedForm(settings, topology).estimate(choice), predict(choice.applied(settings), topology)
    assert found.work_secs == pytest.approx(step.work_secs, rel=1e-4)
    assert found.secs == pytest.approx(step.secs, rel=1e-4)


@pytest.mark.fast(1)
@pytest.mark.parametrize(("matmul", "scales"), [("float8", "row"), ("int8", "row"), ("float8", "delayed")])
def test_weights_of_products_in_8_bits_are_rounded_once_and_read_again(matmul, scales):
    topology, values = read_topology("H100:1x4"), {"model.matmul": matmul, "model.matmul_scales": scales}
    settings = with_keys(settings_of(mesh={"dp": 4}, batch=16, layers=4, dtype="bfloat16"), values)
    choice = Choice(1, 4, 1, 2, "gpipe", 1, "elementwise", "zero1", "", 0)
    found, step = ClosedForm(settings, topology).estimate(choice), predict(choice.applied(settings), topology)
    assert found.work_secs == pytest.approx(step.work_secs, rel=TIME_WITHIN)


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "replica": 2}])
def test_maxima_over_data_ranks_of_what_layers_round_are_sent_in_closed_form_too(mesh):
    topology, values = read_topology("H100:1x4"), {"model.matmul": "float8", "model.matmul_scales": "current"}
    settings = with_keys(settings_of(mesh=mesh, batch=16, layers=4, dtype="bfloat16"), values)
    choice = Choice(1, mesh["dp"], 1, 2, "gpipe", 1, "elementwise", "zero1", "", 0)
    found, step = ClosedForm(settings, topology).estimate(choice), predict(choice.applied(settings), topology)
    assert sum(found.exposed_secs.values()) == pytest.approx(sum(step.exposed_secs.values()), rel=1e-6)
    assert found.secs == pytest.approx(step.secs, rel=TIME_WITHIN)
    one_rank = choice._replace(dp=1)
    alone = with_keys(settings, {"mesh.dp": 1, "mesh.replica": 1, "data.global_batch": 4})
    closed = ClosedForm(alone, read_topology("H100:1"))
    assert "dp" not in closed.estimate(one_rank).exposed_secs


CASES = [
    ("v5e:2x4", {}),
    ("v5e:2x4", dict(layers=6)),
    ("v5e:2x4", dict(batch=8, mesh={"dp": 4, "cp": 2})),
    ("v5e:2x4", MIXTURE),
    ("v5e:2x4", WINDOWS),
    ("H100:1x8", dict(d_head=64, seq=256)),
]


@pytest.mark.parametrize(
    ("topology", "changes"), [CASES[1], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)]
)
def test_bounds_without_moves_are_below_prices_whatever_is_moved(topology, changes):
    """Of time, and of memory. Layouts with the same moves have them whichever of them was priced first."""
    topology, settings = read_topology(topology), settings_of(**changes)
    closed, drawn = ClosedForm(settings, topology), random.Random(SEED)
    least, every = LeastWork(settings, topology, model_on_topology(settings, topology)), [*choices(settings, topology)]
    of_moves: dict[int, list] = {}
    while len(of_moves) < SAMPLED or max(map(len, of_moves.values())) < 2:
        choice = drawn.choice(every)
        try:
            priced = closed.estimate(choice)
        except ParallaxError:
            continue
        of_moves.setdefault(id(closed.moves(choice)), []).append(choice)
        parts, tables = closed.without_moves(choice), least.of_tables(choice, closed.uses_of_tables(choice))
        with_tables = parts._replace(sent=[*parts.sent, *tables])
        bounds = [least.bound(choice, each) for each in (closed.of_layers(choice), parts, with_tables)]
        assert 0 < bounds[0] <= bounds[1] * (1 + 1e-9) <= bounds[2] * (1 + 2e-9) <= priced.secs * (1 + 3e-9), choice
        passes = closed.memory_without_weights(choice).peak + least.held_of_weights(choice)
        assert passes <= priced.peak_bytes and closed.certain_bytes(choice) <= priced.peak_bytes, choice
    for choice in (alike for each in of_moves.values() for alike in each[1:3]):
        assert ClosedForm(settings, topology, closed.layers).estimate(choice) == closed.estimate(choice), choice


@pytest.mark.fast(1)
def test_what_a_plan_holds_is_known_before_what_it_moves_is_traced(monkeypatch):
    settings, choice = settings_of(layers=4), Choice(2, 2, 2, 4, "interleaved", 2, "layer", "zero1", "", 0)
    closed = ClosedForm(settings, EIGHT)
    with monkeypatch.context() as patched:
        patched.delattr("parallax.analysis.planned.closed_form.traced_rest")
        held = closed.memory(choice)
    step = predict(choice.applied(settings), EIGHT)
    for name in ("parameters", "optimizer"):
        assert getattr(held, name) == step.components[name] > 0
    assert held.gradients == pytest.approx(step.components["gradients"], rel=0.01)
    assert held.peak == closed.estimate(choice).peak_bytes


@pytest.mark.parametrize("topology", ["v5e:2x4", "H100:1x8"])
def test_bounds_of_sums_in_host_memory_have_the_link_and_are_below_their_traced_step(topology):
    topology, settings = read_topology(topology), settings_of(layers=2)
    least = LeastWork(settings, topology, model_on_topology(settings, topology))
    for policy in ("zero3", "lean"):
        choice = Choice.of(settings)._replace(policy=policy, grads_on="host")
        bound, step = least.bound(choice), predict(choice.applied(settings), topology)
        assert least.bound(choice._replace(grads_on="device")) < bound <= step.secs


def test_layers_traced_for_one_slice_are_those_of_several():
    slices, mesh = read_topology("2xv5e:2x2"), {"dp": 4, "replica": 2}
    one = ClosedForm(settings_of(mesh={"dp": 4}), read_topology("v5e:2x2"))
    one.estimate(Choice.of(one.settings))
    several, known = ClosedForm(settings_of(mesh=mesh), slices, one.layers), dict(one.layers)
    step = predict(several.settings, slices)
    assert several.estimate(Choice.of(several.settings)).secs == pytest.approx(step.secs, rel=TIME_WITHIN)
    assert one.layers == known and "replica" in step.exposed_secs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "changes"),
    [
        ("v5e:2x4", {}),
        ("v5e:2x4", dict(attention="mla")),
        ("v5e:2x4", dict(batch=8, mesh={"dp": 4, "cp": 2})),
        ("v5e:2x4", MIXTURE),
        ("v5e:2x4", dict(model_of_windows=True)),
        ("H100:1x8", dict(d_head=64, seq=256)),
        ("2xv5e:2x2", dict(mesh={"dp": 4, "replica": 2})),
    ],
)
def test_layouts_drawn_at_random_have_the_price_of_their_traced_step(topology, changes):
    """And about its memory: to what a sweep allows for."""
    topology, changes = read_topology(topology), dict(changes)
    if changes.pop("model_of_windows", False):
        changes |= WINDOWS
    settings = settings_of(**changes)
    closed = ClosedForm(settings, topology)
    for choice, step in sampled(settings, topology):
        found = closed.estimate(choice)
        assert found.secs == pytest.approx(step.secs, rel=TIME_WITHIN), choice
        assert found.peak_bytes == pytest.approx(step.peak_bytes, rel=MEMORY_WITHIN), choice
        assert closed.certain_bytes(choice) <= step.peak_bytes, choice


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer.m_dtype": "float8", "optimizer.v_dtype": "float8"},
        *(
            pytest.param(values, marks=pytest.mark.slow)
            for values in (
                {"fsdp.bucket": "module"},
                {"fsdp.gather_dtype": "int8", "pipeline.remat": "layer"},
                {"optimizer.states_on": "host"},
                {"optimizer.masters_on": "host"},
            )
        ),
    ],
    ids=" ".join,
)
def test_other_values_of_keys_have_the_effect_of_their_traced_step(values):
    settings = settings_of(layers=2)
    closed, other = ClosedForm(settings, EIGHT), with_keys(settings, values)
    before, changed = closed.estimate(Choice.of(settings)), closed.changed(values)
    made = set(changed._traced)
    then, step = changed.estimate(Choice.of(other)), predict(other, EIGHT)
    assert then.secs == pytest.approx(step.secs, rel=TIME_WITHIN)
    assert then.components["optimizer"] == step.components["optimizer"] and then.host_bytes == step.host_bytes
    assert closed.estimate(Choice.of(settings)) == before
    assert ("passes" in {key[0] for key in made}) and changed.layers is closed.layers
    assert closed.changed({"model.matmul": "int8"}) is None


def test_what_an_exchange_sends_is_its_own():
    settings = settings_of(mesh=dict(dp=4, ep=2), **MIXTURE | dict(layers=2, layers_of="moe*2"))
    closed = ClosedForm(settings, EIGHT)
    for exchange in ("gather", "ragged"):
        other = with_keys(settings, {"layout.exchange": exchange})
        found, step = closed.estimate(Choice.of(other)), predict(other, EIGHT)
        assert found.secs == pytest.approx(step.secs, rel=TIME_WITHIN)


def test_a_batch_that_does_not_divide_has_no_price():
    settings = settings_of(layers=2)
    with pytest.raises(ParallaxError, match="global_batch=64 does not divide over .* 3 microbatches"):
        ClosedForm(settings, EIGHT).estimate(Choice.of(settings)._replace(microbatches=3))


def test_layers_gathered_ahead_are_refused_whatever_was_priced_before():
    """Where no stage has two layers of a kind in a row, none can be."""
    settings = settings_of(layers=2, layers_of="narrow wide", kinds="narrow=(d_ff=64) wide=(d_ff=128)")
    closed, choice = ClosedForm(settings, EIGHT), Choice.of(settings)._replace(policy="zero3")
    assert closed.estimate(choice).secs > 0
    with pytest.raises(ParallaxError, match="prefetch"):
        closed.estimate(choice._replace(prefetch=1))


def test_costs_of_other_rows_are_on_a_line_and_those_of_another_program_are_not():
    place = Place("F/mlp", "dot_general")
    low, high = (
        LayerCosts({(OpCost(100 * rows, 7 + rows, "forward", 0), place): 3}, {"F to B": 10 * rows}) for rows in (2, 4)
    )
    costs, saved = on_line(low, high, 1.5)
    assert costs == {(OpCost(500, 12, "forward", 0), place): 3} and saved == {"F to B": 50}
    assert on_line(low, high._replace(costs={}), 1.5) is None
    other = {(cost, place._replace(primitive="reduce_sum")): count for (cost, place), count in high.costs.items()}
    assert on_line(low, high._replace(costs=other), 1.5) is None
