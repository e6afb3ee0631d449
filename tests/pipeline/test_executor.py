"""What the executor of schedule tables computes, sends and leaves out; any legal table will do."""

import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from support.plain_model import plain_losses_and_grad, plain_parts
from support.random_schedules import PLACEMENTS, random_schedule
from support.tiny_model import SCHEDULES, build, make_batch, model_config, params_of
from support.traced_equations import equations, inside, readers_of_unset

from parallax.analysis.traced.flops import flops_by_direction
from parallax.analysis.traced.trace import step_program
from parallax.config.sections import (
    AXES,
    REMAT,
)
from parallax.jaxprs import ancestors as dependencies
from parallax.jaxprs import loop
from parallax.model.batch import GROUPS
from parallax.model.context import Context
from parallax.model.mask import Mask
from parallax.model.rope import Rope
from parallax.pipeline.layer_passes import layer_passes
from parallax.schedules.csv_files import save_csv
from parallax.sharding.host import to_host
from parallax.sharding.slots import zeros
from parallax.step.step import with_first_scales


def flops_by_rank(mesh, **changes):
    """Matmul FLOPs of each pipeline rank, its data and tensor ranks together."""
    model, batch = build(mesh, microbatches=8, chunk_tokens=32, **changes), make_batch()
    program = jax.make_jaxpr(model.loss_and_grad)(model.shapes, batch)
    ranks = [flops_by_direction(program, rank=dict(pp=pp, dp=0, tp=0)) for pp in range(mesh[0])]
    return [mesh[1] * mesh[2] * sum(rank.values()) for rank in ranks]


@functools.cache
def flops_of_one_device(remat):
    return flops_by_rank((1, 1, 1), remat=remat)[0]


@pytest.mark.fast(1)
@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "layer"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_executes_the_work_of_one_device_and_ranks_share_it_evenly(schedule, remat):
    """F + B (+ recomputation), the head too; 2 % are allowed, for pieces that do not divide."""
    ranks = flops_by_rank((4, 1, 1), remat=remat, schedule=schedule, **SCHEDULES[schedule])
    assert sum(ranks) <= 1.02 * flops_of_one_device(remat)
    assert max(ranks) <= 1.02 * min(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "elementwise"])
def test_slots_carried_from_tick_to_tick_give_the_same_bits(remat, monkeypatch):
    run = lambda: tuple(map(np.asarray, jax.tree.leaves(of(build((1, 1, 1), remat=remat)))))  # noqa: E731
    of = lambda model: jax.jit(model.loss_and_grad)(params_of(model), make_batch())  # noqa: E731
    model = build((1, 1, 1), remat=remat)
    assert model.carries_residuals and not model.schedule.keeps_across_ticks
    of_ticks = run()
    monkeypatch.setattr("parallax.pipeline.model_on_mesh.clears_what_is_overwritten", lambda mesh: False)
    assert not build((1, 1, 1), remat=remat).carries_residuals
    for carried, fresh in zip(of_ticks, run(), strict=True):
        np.testing.assert_array_equal(carried, fresh)


OF_TWO_KINDS = dict(layers=3, layers_of="dense*1 moe*2", experts=4, experts_per_token=2, d_expert=16)
PROBED = 0x7FC0DEAD  # bits of a NaN that no operation makes


def after_any_value(x, earlier):
    """`collectives.after`, which hands on a NaN of `earlier`, where some are NaN that nothing else may read."""
    probe = lax.convert_element_type(earlier.reshape(-1)[0], jnp.float32)
    return jnp.where(lax.bitcast_convert_type(probe, jnp.uint32) == PROBED, probe.astype(x.dtype), x)


class Unset:
    """What no pass has written, on simulated devices: NaN, or the largest integer, where a TPU has what was there
    before. `shapes` are those of such arrays."""

    def __init__(self, monkeypatch):
        self.shapes, self.monkeypatch = [], monkeypatch
        for module in ("sharding.message_order", "model.loss"):
            monkeypatch.setattr(f"parallax.{module}.after", after_any_value)

    def fill(self):
        for module in ("stage", "tick"):
            self.monkeypatch.setattr(f"parallax.pipeline.{module}.unset", self.filled)
        self.monkeypatch.setattr("parallax.pipeline.stage.host_slots", lambda *of: to_host(self.filled(*of)))

    def filled(self, like, *leading):
        self.shapes.append((*leading, *like.shape))
        largest = jnp.nan if jnp.issubdtype(like.dtype, jnp.inexact) else jnp.iinfo(like.dtype).max
        return jnp.full_like(zeros(like, *leading), largest)


@pytest.fixture
def unset(monkeypatch):
    return Unset(monkeypatch)


UNSET = {
    "interleaved, elementwise": dict(remat="elementwise"),
    "interleaved, none, uneven layers": dict(remat="none", layers=11),
    **{f"{name}, elementwise": dict(schedule=name, remat="elementwise") for name in SCHEDULES if name != "interleaved"},
    "gpipe, none": dict(schedule="gpipe", remat="none"),
    "one_f_one_b, stage": dict(schedule="one_f_one_b", remat="stage"),
    "one_f_one_b, stages of one layer": dict(schedule="one_f_one_b", remat="layer", layers=4),
    "zero_bubble, none": dict(schedule="zero_bubble", remat="none"),
    "zero_bubble_v, none, uneven layers": dict(schedule="zero_bubble_v", remat="none", layers=11),
    "dualpipe_v, none": dict(schedule="dualpipe_v", remat="none"),
    "dualpipe_v, stage, uneven layers": dict(schedule="dualpipe_v", remat="stage", layers=11),
    "dualpipe_v, prefetch": dict(schedule="dualpipe_v", remat="attention", mesh=(2, 2, 1), policy="zero3", prefetch=1),
    "bfloat16": dict(remat="elementwise", dtype="bfloat16"),
    "eight bits": dict(remat="elementwise", matmul="int8", matmul_residuals="8bit"),
    "largest scores": dict(schedule="dualpipe_v", attention="gqa", qk_clip=1.0),
    "ranks of every axis": dict(mesh=(2, 2, 2), remat="elementwise"),
    "context ranks": dict(mesh=(2, 1, 2, 1, 2), remat="elementwise", context="ring"),
    "kinds of layers": dict(mesh=(2, 1, 1), schedule="one_f_one_b", remat="elementwise", **OF_TWO_KINDS),
    "kinds of layers, both passes": dict(mesh=(2, 1, 1), schedule="dualpipe_v", remat="none")
    | OF_TWO_KINDS
    | dict(layers=5, layers_of="dense*2 moe*3"),
    "expert ranks": dict(mesh=(2, 1, 1, 1, 1, 2), schedule="zero_bubble", exchange="gather", **OF_TWO_KINDS),
    "host memory": dict(remat="elementwise", residuals_on="host"),
    "sums in bfloat16": dict(remat="elementwise", grads_dtype="bfloat16"),
}


def with_unset(changes, **more):
    """A model of one of these."""
    form = dict(mesh=(4, 1, 1), schedule="interleaved", microbatches=4) | changes | more
    return build(form.pop("mesh"), **SCHEDULES[form["schedule"]] | form)


@pytest.mark.fast(2)
@pytest.mark.parametrize("changes", UNSET.values(), ids=UNSET)
def test_what_unset_slots_and_idle_ranks_hold_has_no_effect(changes, unset):
    """On TPU nothing clears them: so what is NaN there must be in no sum, with a factor of zero neither."""
    batch = make_batch()
    params = with_first_scales(model := with_unset(changes), params_of(model), batch, seed=0)
    made = lambda model: jax.tree.leaves(jax.jit(model.loss_grads_and_statistics)(params, batch))  # noqa: E731
    expected = made(with_unset(changes))
    unset.fill()
    for dirty, clean in zip(made(with_unset(changes)), expected, strict=True):
        assert np.isfinite(clean).all()
        np.testing.assert_array_equal(dirty, clean)
    assert len(unset.shapes) > 2  # slots, and the outputs of F and B


@pytest.mark.parametrize("schedule", ["interleaved", pytest.param("dualpipe_v", marks=pytest.mark.slow)])
def test_nor_has_it_in_a_forward_pass(schedule, unset):
    batch = make_batch()
    grouped = batch | {GROUPS: batch["tokens"] % 2}

    @jax.jit
    def made(params):
        logits = model.logits(params, batch["tokens"])
        return logits, model.loss(params, grouped, groups=2), model.activations(params, batch)

    model = with_unset({}, schedule=schedule)
    expected = jax.tree.leaves(made(params_of(model)))
    made.clear_cache()
    unset.fill()
    for dirty, clean in zip(jax.tree.leaves(made(params_of(model))), expected, strict=True):
        assert np.isfinite(clean).all()
        np.testing.assert_array_equal(dirty, clean)
    assert len(unset.shapes) == 3  # an idle rank's output in each


@pytest.fixture
def on_tpu(monkeypatch):
    """A function that moves a model to chips that are not here."""
    for module, name in (
        ("loss_and_grads", "relays_what_is_read"),
        ("loss_and_grads", "keeps_stream_in_rows"),
        ("loss_and_grads", "saves_means_of_norms"),
        ("model_on_mesh", "fuses_norms_into_products"),
    ):
        monkeypatch.setattr(f"parallax.pipeline.{module}.{name}", lambda mesh: True)

    def moved(model):
        sizes, chip = model.mesh.shape, AbstractDevice("TPU v5p", None, "tpu")
        types = (AxisType.Auto,) * len(sizes)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=chip)
        return model.replace(mesh=mesh)

    return moved


@pytest.mark.fast(3)
@pytest.mark.parametrize("changes", UNSET.values(), ids=UNSET)
def test_a_step_for_tpu_reads_of_what_is_unset_what_a_table_says(changes, on_tpu):
    """That is, a slot, or one of two arrays. The tests above say that these were written."""
    model = on_tpu(with_unset(changes, kernel="xla"))
    readers = readers_of_unset(model.loss_and_grad, model.shapes, make_batch())
    assert readers == {"dynamic_slice", "select_n"}


def test_a_forward_pass_for_tpu_and_its_gradient_choose_between_an_idle_ranks_output_and_another(on_tpu):
    model, batch = on_tpu(with_unset(dict(layers=11), kernel="xla")), make_batch()
    gradient = jax.grad(lambda params: model.logits(params, batch["tokens"]).sum())
    for function in (gradient, lambda params: (model.loss(params, batch), model.activations(params, batch))):
        assert readers_of_unset(function, model.shapes) == {"select_n"}


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("schedule", "layers"),
    [
        *((name, {}) for name in SCHEDULES if name != "gpipe"),
        ("one_f_one_b", dict(layers=3)),
        ("one_f_one_b", OF_TWO_KINDS),
    ],
    ids=lambda value: value if isinstance(value, str) else {0: "even", 1: "uneven"}.get(len(value), "of two kinds"),
)
def test_stages_that_act_in_loops_of_at_most_one_turn_give_what_those_in_branches_give(schedule, layers, monkeypatch):
    """The form for GPUs, where XLA would copy all slots and sums that a branch returns."""
    changes = dict(schedule=schedule, **SCHEDULES[schedule], microbatches=4, remat="elementwise", policy="zero3")
    changes |= layers
    run = lambda model: tuple(jax.tree.leaves(jax.jit(model.loss_and_grad)(params_of(model), make_batch())))  # noqa: E731
    loops = lambda model: sum(  # noqa: E731
        e.primitive.name == "while" for e in equations(model.loss_and_grad, model.shapes, make_batch())
    )
    model = build((2, 2, 2), **changes)
    expected, before = run(model), loops(model)
    on_devices = lambda mesh: isinstance(mesh, Mesh)  # noqa: E731
    monkeypatch.setattr("parallax.pipeline.model_on_mesh.copies_what_branches_return", on_devices)
    model = build((2, 2, 2), **changes)
    assert loops(model) >= before + 4  # F, the head, B and the embedding's gradient
    for looped, branched in zip(run(model), expected, strict=True):
        np.testing.assert_allclose(looped, branched, rtol=0, atol=1e-6 * np.abs(branched).max(initial=1e-30))
    counted = flops_by_direction(step_program(model, *make_batch()["tokens"].shape), rank=dict(pp=0, dp=0, tp=0))
    assert counted["forward"] > 0  # loops whose turns depend on data could not be counted


def test_a_forward_pass_can_be_differentiated_where_training_has_loops(monkeypatch):
    """As losses of a user's own are, which read logits."""
    monkeypatch.setattr(
        "parallax.pipeline.model_on_mesh.copies_what_branches_return", lambda mesh: isinstance(mesh, Mesh)
    )
    model, batch = build((2, 1, 1), layers=3), make_batch()
    for loss in (
        lambda params: model.logits(params, batch["tokens"]).mean(),
        lambda params: model.loss(params, batch)["loss"],
    ):
        gradient = jax.eval_shape(jax.grad(loss), model.shapes)
        assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, model.shapes)


@pytest.mark.fast(1)
@pytest.mark.parametrize("policy", ["ddp", "zero3"])
def test_gradients_of_an_embedding_add_up_over_the_places_of_a_token_in_float32(policy):
    model = build((1, 1, 1), dtype="bfloat16", policy=policy, vocab=64)
    found = equations(model.loss_and_grad, model.shapes, make_batch())
    tables = [e.outvars[0].aval for e in found if e.primitive.name == "scatter-add"]
    assert {x.dtype.name for x in tables if x.shape == (64, model.config.d_model)} == {"float32"}


def layer_alone():
    """A layer of the tiny model on one device: its passes with the backward pass whole and divided, and what they take
    besides what is saved."""
    model = model_config(attention="mla")
    block = plain_parts(model).blocks["dense"]
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(4, 16, model.d_model)), jnp.float32) for _ in range(2))
    ids = jnp.zeros((4, 16), jnp.int32)
    context = Context(Rope(model).tables(ids), jnp.arange(4), None, Mask(ids))
    weights = jax.tree.map(lambda leaf: leaf.value, block.init(jax.random.key(0), x, context)["params"],
                           is_leaf=lambda leaf: hasattr(leaf, "layout"))  # fmt: skip
    weights = {"params": weights}
    plan = build((1, 1, 1), attention="mla").plan
    given = dict(plan=plan, stack="blocks", weights=weights, x=x, context=context)
    whole, divided = (layer_passes(block, "none", split=split, **given) for split in (False, True))
    return whole, divided, weights, x, context, dy


@pytest.mark.slow
def test_b_and_w_cost_together_what_the_backward_pass_cost():
    """FLOPs as XLA counts them in the compiled programs."""
    passes, halves, weights, x, context, dy = layer_alone()
    all_saved, saved = (each.forward(weights, x, context)[1] for each in (passes, halves))
    for_w = {"F to W": saved["F to W"]} | halves.backward(weights, context, saved, dy)[2]
    flops = lambda f, *args: jax.jit(f).lower(*args).compile().cost_analysis()["flops"]  # noqa: E731
    whole = flops(lambda saved, dy: passes.backward(weights, context, saved, dy), all_saved, dy)
    first = flops(lambda saved, dy: halves.backward(weights, context, saved, dy), saved, dy)
    second = flops(halves.weight_gradients, for_w)
    assert first + second == pytest.approx(whole, rel=0.01)
    assert 0.3 * whole < second < 0.5 * whole, "attention's products have no weights, so B is the larger part"


def abstract_model(**changes):
    """A model on a mesh that has no devices: nothing is arranged for simulated ones."""
    mesh = AbstractMesh((4, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)
    return build((4, 1, 1), **changes).replace(mesh=mesh)


def ticks_of(model):
    """The body of the loop over ticks."""
    scans = (e for e in equations(model.loss_and_grad, model.shapes, make_batch()) if e.primitive.name == "scan")
    return next(loop(e).body.jaxpr for e in scans if e.params["length"] == model.schedule.ticks)


def ancestors(jaxpr, equation):
    needed, found = set(map(id, equation.invars)), []
    for earlier in reversed(jaxpr.eqns):
        if any(id(out) in needed for out in earlier.outvars):
            found.append(earlier)
            needed |= set(map(id, earlier.invars))
    return found


def has_loop(equation):
    """Whether an equation is a branch with a loop in it, over layers or over chunks of the loss."""
    branches = equation.params["branches"] if equation.primitive.name == "cond" else ()
    return any(e.primitive.name == "scan" for branch in branches for e in inside(branch))


def messages_and_passes(schedule, **changes):
    """A tick's messages and its passes that have loops, F, the head, B and W, in this order; by message the passes that
    it waits for, and the passes that wait for it."""
    jaxpr = ticks_of(abstract_model(schedule=schedule, **changes))
    passes = [e for e in jaxpr.eqns if has_loop(e)]
    sends = [e for e in jaxpr.eqns if e.primitive.name == "ppermute"]
    needs = [sorted(passes.index(e) for e in ancestors(jaxpr, send) if e in passes) for send in sends]
    needed = [[at for at, e in enumerate(passes) if send in ancestors(jaxpr, e)] for send in sends]
    return len(passes), dict(zip(map(tuple, needs), map(tuple, needed), strict=True))


@pytest.mark.fast(1)
def test_with_w_a_message_waits_for_no_other_pass_than_the_one_that_made_it():
    """F's for F alone, B's for B and what it reads, not for W; and no pass of this tick for them."""
    assert messages_and_passes("zero_bubble") == (4, {(0,): (), (0, 1, 2): ()})


@pytest.mark.fast(1)
@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved"])
def test_a_gradient_travels_beside_the_next_f_and_an_output_beside_b(schedule):
    """The message of the gradient that the last tick has made waits for no pass of this one, and only B waits for it,
    not F. That of F's output waits for F alone, and nothing for it."""
    assert messages_and_passes(schedule, **SCHEDULES[schedule]) == (3, {(): (2,), (0,): ()})


@pytest.mark.parametrize("remat", ["layer", "stage"])
def test_in_one_pass_a_turn_runs_a_layer_of_each_and_neither_reads_what_the_other_makes(remat):
    """So a compiler may run the one while messages of the other are under way."""
    jaxpr = ticks_of(abstract_model(schedule="dualpipe_v", remat=remat, layers=16))
    (joint,) = (e for e in jaxpr.eqns if has_loop(e) and str(e.source_info.name_stack).endswith("FB"))
    loops = [e for e in inside(joint.params["branches"][1]) if e.primitive.name == "scan"]
    (turns,) = (loop(e) for e in loops if loop(e).length == 2 and scopes_of(loop(e).body) == {"F", "B"})
    body, carry = turns.body.jaxpr, turns.body.jaxpr.invars[turns.consts :][: turns.carried]
    streams = [at for at, var in enumerate(carry) if var.aval.shape == carry[1].aval.shape and var.aval.ndim == 3]
    x, dy = (carry[at] for at in streams)
    y, dx = (body.outvars[at] for at in streams)
    for out, own, other in ((y, x, dy), (dx, dy, x)):
        read = {var for e in needed_for(body, out) for var in e.invars if not isinstance(var, Literal)}
        assert own in read and other not in read


def scopes_of(closed):
    """Which of F and B have products in a program."""
    stacks = (str(e.source_info.name_stack) for e in inside(closed) if e.primitive.name == "dot_general")
    return {name for stack in stacks for name in stack.split("/") if name in ("F", "B")}


def needed_for(jaxpr, out):
    """The equations that an output needs."""
    return [jaxpr.eqns[at] for at in dependencies(jaxpr, [out])]


@functools.cache
def reference(layers):
    model = build((1, 1, 1), layers=layers)
    (loss, _), grads = plain_losses_and_grad(model.config, params_of(model), make_batch(), 0.0)
    return loss, grads


def check_table(schedule, layers, remat):
    """The executor's loss and gradients on a table from a file are those of the plain model."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/drawn.csv"
        save_csv(schedule, path)
        changes = dict(layers=layers, remat=remat, schedule=path, microbatches=schedule.microbatches)
        model, batch = build((schedule.ranks, 1, 2), **changes), make_batch()
        metrics, grads = jax.jit(model.loss_and_grad)(params_of(model), batch)
    loss, expected = reference(layers)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=0, atol=1e-5 * np.abs(e).max()), grads, expected)


drawn = st.builds(
    random_schedule,
    ranks=st.sampled_from([2, 4]),
    virtual=st.sampled_from([1, 2]),
    microbatches=st.sampled_from([1, 2, 4, 8]),
    placement=st.sampled_from(PLACEMENTS),
    split=st.booleans(),
    joint=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)


layers, remat = st.sampled_from([8, 12]), st.sampled_from(REMAT)


@pytest.mark.slow
@given(drawn, layers, remat)
@settings(max_examples=3)
def test_any_legal_table_gives_the_same_gradients(schedule, layers, remat):
    check_table(schedule, layers, remat)


@pytest.mark.slow
@given(drawn, layers, remat)
@settings(max_examples=40)
def test_any_of_many_legal_tables_gives_the_same_gradients(schedule, layers, remat):
    check_table(schedule, layers, remat)
