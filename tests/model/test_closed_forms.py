"""What a step is measured to send, from its traced program, is what formulas on paper say, to the byte."""

from collections import Counter

import jax
import pytest
from support.step_collectives import step_collectives
from support.tiny_model import HIDDEN_CUT, MESHES, ROWS, SCHEDULES, SEQ, SEQ_CUT, build, section
from support.traffic_formulas import Step

from parallax.analysis.traced.collectives import bytes_by
from parallax.analysis.traced.trace import abstract_mesh
from parallax.config.sections import POLICY_NAMES
from parallax.model.families import CONTEXTS
from parallax.sharding.layout import Layout

RESIDUALS = {"hidden": HIDDEN_CUT, "seq": SEQ_CUT}


def both(mesh, **changes):
    """(measured, formula) of a step: bytes by (axes, kind, direction)."""
    given = dict(tensor_parallel="column_row", residual="hidden", remat="none", microbatches=4) | changes
    model = build(mesh, **given | {"residual": RESIDUALS[given["residual"]]})
    if given.get("exchange") == "ragged":  # on simulated devices it is made of gathers
        model = model.replace(mesh=abstract_mesh(model.axis_sizes))
    layout, pipeline = section("layout", **given), model.pipeline
    step = Step(
        mesh[:3],
        model.config,
        family=layout["tensor_parallel"],
        residual=given["residual"],
        embedding=layout["embedding"],
        schedule=pipeline.schedule,
        virtual=pipeline.virtual,
        policy=model.data_parallel.policy,
        tables=model.data_parallel.by_name.get("head", ""),
        replica=model.axis_sizes.get("replica", 1),
        cp=model.axis_sizes.get("cp", 1),
        ep=model.axis_sizes.get("ep", 1),
        context=layout["context"],
        order=layout["order"],
        exchange=layout["exchange"],
        exchange_hosts=layout["exchange_hosts"],
        expert_chunk_tokens=layout["expert_chunk_tokens"],
        balances=model.loss_config.balance_coefficient > 0,
        chunk_tokens=model.loss_config.chunk_tokens,
        rows=ROWS,
        seq=SEQ,
        microbatches=pipeline.microbatches,
        reduce=model.fsdp.reduce,
    )
    measured = bytes_by(step_collectives(model, ROWS, SEQ), "axes", "kind", "direction")
    return +Counter(measured), step.total()


def meshes(all_of_them, *fast):
    """A parameter `mesh`; with the fast tests only the meshes on which a term of the formula is not like on others."""
    marks = {mesh: () if mesh in fast else pytest.mark.slow for mesh in all_of_them}
    cases = [pytest.param(mesh, marks=mark, id="x".join(map(str, mesh))) for mesh, mark in marks.items()]
    return pytest.mark.parametrize("mesh", cases)


@pytest.mark.fast(2)
@meshes(MESHES, (2, 2, 2))
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("family", ["column_row", "scatter"])
@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_every_family_sends_what_its_formula_says(attention, family, residual, mesh):
    measured, formula = both(mesh, attention=attention, tensor_parallel=family, residual=residual)
    assert measured == formula


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("family", ["column_row", "scatter"])
def test_key_heads_that_are_fewer_than_ranks_are_sent_as_the_formula_says(family, residual):
    measured, formula = both((1, 1, 8), attention="gqa", tensor_parallel=family, residual=residual)
    assert measured == formula


@pytest.mark.fast(1)
@meshes([(2, 2, 2), (4, 2, 1), (8, 1, 1)], (4, 2, 1))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_sends_what_its_formula_says(schedule, mesh):
    measured, formula = both(mesh, schedule=schedule, layers=16, microbatches=8, **SCHEDULES[schedule])
    assert measured == formula


@pytest.mark.fast(2)
@meshes(MESHES, (2, 2, 2))
@pytest.mark.parametrize(
    ("embedding", "tied"), [("all_to_all", False), ("all_to_all", True), ("vocab_parallel", False)]
)
@pytest.mark.parametrize("residual", RESIDUALS)
def test_every_embedding_and_head_sends_what_its_formula_says(residual, embedding, tied, mesh):
    changes = dict(residual=residual, embedding=embedding, tied=tied, schedule="one_f_one_b", attention="gqa")
    measured, formula = both(mesh, **changes)
    assert measured == formula


@pytest.mark.fast(2)
@meshes(MESHES, (2, 2, 2))
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_sends_what_its_formula_says(policy, tied, mesh):
    measured, formula = both(mesh, policy=policy, tied=tied, d_latent_q=16)
    assert measured == formula


@pytest.mark.fast(1)
@pytest.mark.parametrize("tables", POLICY_NAMES)
@pytest.mark.parametrize("policy", ["zero1", "zero3"])
def test_tables_with_a_policy_of_their_own_send_what_their_formula_says(policy, tables):
    changes = dict(policy=policy, exceptions=f"embedding={tables} head={tables}", schedule="one_f_one_b")
    measured, formula = both((2, 2, 2), tied=False, attention="gqa", **changes)
    assert measured == formula


@pytest.mark.fast(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("reduce", ["float32", "compute"])
@pytest.mark.parametrize("vocab", [16, 128])
def test_a_table_whose_rows_are_cut_over_pp_and_dp_is_moved_over_both_at_once(vocab, policy, tied, reduce):
    """Where that is once a step: a microbatch's gather of "lean" and "zero3", and its scatter of "zero2" and "zero3",
    is over dp alone. What "lean" gathers over one axis after the other, it scatters so. Of few rows pp cuts d_model."""
    measured, formula = both((2, 2, 2), policy=policy, tied=tied, vocab=vocab, reduce=reduce, dtype="bfloat16")
    assert measured == formula
    at_once = {(kind, direction) for axes, kind, direction in measured if axes == ("pp", "dp")}
    scatter = ("reduce-scatter" if reduce == "float32" else "all-to-all", "backward")
    assert (("all-gather", "forward") in at_once) == (policy in ("zero1", "zero2") and vocab == 128)
    assert (scatter in at_once) == (policy == "zero1" and vocab == 128)


@pytest.mark.slow
@meshes([(2, 2, 1, 2), (1, 2, 2, 2), (1, 1, 1, 8)], (2, 2, 1, 2))
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_replicas_send_what_is_cut_of_the_gradients(policy, mesh):
    """Hybrid sharding: over `replica` goes what a device holds at rest, 1/dp of the gradients of what dp cuts."""
    measured, formula = both(mesh, policy=policy, embedding="all_to_all", tied=False)
    assert measured == formula
    assert {kind for axes, kind, _ in measured if "replica" in axes} == {"all-reduce"}


CONTEXT_MESHES = [(1, 1, 2, 1, 4), (2, 1, 2, 1, 2), (1, 2, 1, 1, 4), (1, 1, 1, 2, 4), (1, 1, 1, 1, 8), (2, 1, 1, 1, 4)]


@pytest.mark.fast(2)
@meshes(CONTEXT_MESHES, (1, 1, 2, 1, 4), (2, 1, 2, 1, 2))
@pytest.mark.parametrize("family", ["column_row", "scatter"])
@pytest.mark.parametrize("attention", ["gqa", "mla"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_form_of_context_parallelism_sends_what_its_formula_says(context, attention, family, mesh):
    changes = dict(context=context, attention=attention, tensor_parallel=family, d_latent_q=16, dtype="bfloat16")
    measured, formula = both(mesh, **changes)
    assert measured == formula


@pytest.mark.fast(3)
@meshes(CONTEXT_MESHES, (1, 1, 2, 1, 4), (2, 1, 1, 1, 4))
@pytest.mark.parametrize("attention", ["gqa", "mla"])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_layers_with_windows_send_what_their_formula_says(context, order, attention, mesh):
    kinds = dict(layers_of="(near*3 dense)*2", kinds="near=(sliding_window=2)")
    measured, formula = both(mesh, context=context, order=order, attention=attention, dtype="bfloat16", **kinds)
    assert measured == formula


@pytest.mark.fast(1)
@meshes(CONTEXT_MESHES, (1, 1, 2, 1, 4))
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("layers", ["near*8", "(near*3 dense)*2"])
def test_ranks_scatter_what_they_expand_of_the_latents_that_a_window_sees(layers, order, mesh):
    changes = dict(layers_of=layers, kinds="near=(sliding_window=2)", order=order, attention="mla", dtype="bfloat16")
    measured, formula = both(mesh, context="all_gather", tensor_parallel="scatter", **changes)
    assert measured == formula


@pytest.mark.fast(1)
@meshes(CONTEXT_MESHES, (1, 1, 1, 2, 4))
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_cuts_over_context_ranks_as_its_formula_says(policy, mesh):
    measured, formula = both(mesh, policy=policy, tied=False, context="ulysses", residual="seq")
    assert measured == formula


EXPERT_MESHES = [(1, 1, 1, 1, 2, 4), (1, 1, 2, 1, 1, 4), (2, 1, 1, 1, 1, 4), (1, 2, 1, 1, 2, 2), (1, 2, 1, 2, 1, 2)]


@pytest.mark.slow
@meshes(EXPERT_MESHES, (1, 2, 1, 1, 2, 2), (1, 2, 1, 2, 1, 2))
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_cuts_over_expert_ranks_as_its_formula_says(policy, mesh):
    """Of a dense model: what dp, cp and ep cut travels over all of them in one collective, tables over pp, too."""
    measured, formula = both(mesh, policy=policy, tied=False, residual="seq", reduce="compute", dtype="bfloat16")
    assert measured == formula
    together = tuple(axis for axis, size in zip(("dp", "cp", "ep"), (mesh[1], *mesh[4:])) if axis == "dp" or size > 1)
    over_ep = {axes for axes, kind, _ in measured if "ep" in axes and kind != "all-reduce"}
    over_ep = {tuple(axis for axis in axes if axis != "pp") for axes in over_ep}
    assert over_ep == ({together} if policy != "ddp" else set())


MIXTURE = dict(layers_of="moe*8", experts=8, experts_per_token=3, d_expert=16, balance_coefficient=0.1)
MIXTURE_MESHES = [
    (1, 1, 1, 1, 1, 8), (1, 1, 2, 1, 1, 4), (2, 2, 1, 1, 1, 2), (2, 1, 2, 1, 1, 2), (1, 1, 2, 1, 2, 2),
    (1, 2, 1, 2, 1, 2), (2, 2, 2), (1, 2, 1, 1, 4),
]  # fmt: skip


@pytest.mark.fast(1)
@meshes(MIXTURE_MESHES, (1, 1, 2, 1, 2, 2))
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("family", ["column_row", "scatter"])
@pytest.mark.parametrize("shared_experts", [0, 2])
def test_a_mixture_sends_what_its_formula_says(shared_experts, family, residual, mesh):
    changes = MIXTURE | dict(shared_experts=shared_experts, attention="mla" if shared_experts else "gqa")
    measured, formula = both(mesh, tensor_parallel=family, residual=residual, dtype="bfloat16", **changes)
    assert measured == formula


@pytest.mark.fast(1)
@meshes([(1, 1, 1, 1, 1, 8), (1, 1, 2, 1, 1, 4), (1, 2, 2, 1, 1, 2), (1, 1, 2, 1, 2, 2)], (1, 1, 2, 1, 2, 2))
@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("exchange", ["gather", "ragged"])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_each_exchange_sends_what_its_formula_says(residual, exchange, chunk, mesh):
    """With chunks, the backward pass sends tokens again."""
    how = dict(exchange=exchange, expert_chunk_tokens=chunk, residual=residual, attention="gqa")
    measured, formula = both(mesh, **MIXTURE | how)
    assert measured == formula
    over_ep = {(kind, direction) for axes, kind, direction in measured if axes == ("ep",)}
    assert (("all-to-all", "backward") in over_ep) == (exchange == "ragged")
    assert any(direction == "recompute" for _, direction in over_ep) == (chunk > 0)


@pytest.mark.fast(2)
@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize(
    ("mesh", "hosts"), [((1, 1, 1, 1, 1, 8), 2), ((1, 1, 1, 1, 1, 8), 4), ((1, 1, 2, 1, 1, 4), 2)], ids=str
)
def test_an_exchange_over_hosts_sends_what_its_formula_says(mesh, hosts, chunk):
    how = dict(exchange="ragged", exchange_hosts=hosts, expert_chunk_tokens=chunk, residual="hidden", attention="gqa")
    measured, formula = both(mesh, **MIXTURE | how)
    assert measured == formula


@pytest.mark.fast(1)
@meshes(MIXTURE_MESHES, (1, 2, 1, 2, 1, 2))
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_experts_are_cut_over_the_other_data_axes_as_their_formula_says(policy, mesh):
    measured, formula = both(mesh, policy=policy, tied=False, reduce="compute", dtype="bfloat16", **MIXTURE)
    assert measured == formula


@pytest.mark.slow
@meshes([(2, 1, 1, 1, 1, 4), (2, 2, 1, 1, 1, 2), (2, 1, 2, 1, 1, 2)], (2, 1, 2, 1, 1, 2))
@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=[] if name == "interleaved" else pytest.mark.slow) for name in SCHEDULES]
)
def test_layers_in_turn_send_what_their_formula_says(schedule, mesh):
    kinds = MIXTURE | dict(layers_of="(dense moe)*8", layers=16, shared_experts=1)
    measured, formula = both(mesh, schedule=schedule, microbatches=8, **SCHEDULES[schedule], **kinds)
    assert measured == formula


@pytest.mark.fast(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_with_context_ranks_sends_what_its_formula_says(schedule):
    changes = dict(embedding="all_to_all", context="ring", attention="gqa", **SCHEDULES[schedule])
    measured, formula = both((2, 1, 1, 1, 4), schedule=schedule, layers=16, microbatches=8, **changes)
    assert measured == formula


@pytest.mark.slow
@pytest.mark.parametrize("family", ["column_row", "scatter"])
@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_activations_and_gathered_weights_travel_in_the_compute_dtype(attention, family):
    schedule, virtual = ("interleaved", 2) if (attention == "mla") == (family == "scatter") else ("one_f_one_b", 1)
    changes = dict(attention=attention, tensor_parallel=family, d_latent_q=16, schedule=schedule, virtual=virtual)
    measured, formula = both((2, 2, 2), dtype="bfloat16", **changes)
    assert measured == formula


@meshes(MESHES, (2, 2, 2))
@pytest.mark.parametrize("policy", ["zero3", "zero1"])
def test_gradients_that_are_exchanged_send_what_their_formula_says(policy, mesh):
    changes = dict(reduce="compute", dtype="bfloat16", policy=policy, schedule="one_f_one_b")
    measured, formula = both(mesh, **changes)
    assert measured == formula
    exchanged = any(axes == ("dp",) and kind == "all-to-all" for axes, kind, _ in measured)
    assert exchanged == (mesh[1] > 1) and (("dp",), "reduce-scatter", "backward") not in measured


@pytest.mark.fast(1)
@pytest.mark.parametrize("policy", ["zero3", "zero2", "lean"])
@pytest.mark.parametrize("bucket", ["layer", "module"])
def test_what_is_sent_in_one_message_has_the_bytes_of_its_parameters(bucket, policy):
    changes = dict(reduce="compute", dtype="bfloat16", schedule="one_f_one_b", attention="gqa", tied=False)
    measured, formula = both((2, 2, 2), bucket=bucket, policy=policy, **changes)
    assert measured == formula


# ---- as one reads it elsewhere


def test_fsdp_sends_three_shares_of_the_parameters_bytes():
    """Of layers two gathers and one reduce-scatter. Embedding and head, which share a table, gather and scatter it each
    for itself, but no gradient reads the embedding's."""
    model = build((1, 8, 1), microbatches=1, remat="layer")
    layers = zip(jax.tree.leaves(model.shapes["blocks"]), layouts_in(model.layouts["blocks"]), strict=True)
    kernels = sum(4 * leaf.size for leaf, layout in layers if "dp" in layout.used_axes())
    table = 4 * model.shapes["embedding"]["table"].size
    found = bytes_by(step_collectives(model, ROWS, SEQ), "axes", "kind")
    sent = found[("dp",), "all-gather"] + found[("dp",), "reduce-scatter"]
    assert sent == 7 / 8 * (3 * kernels + 4 * table)


def layouts_in(tree):
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Layout))


def test_a_column_row_layer_sends_four_residuals_in_each_direction():
    model = build((1, 1, 8), microbatches=1, remat="none", attention="gqa", layers=1, residual=SEQ_CUT)
    residual = ROWS * SEQ * model.config.d_model * 4
    over_tp = [s for s in step_collectives(model, ROWS, SEQ) if s.axes == ("tp",)]
    of_layer = [s for s in over_tp if s.module.split("/")[0] in ("attention", "mlp")]
    assert bytes_by(of_layer, "direction") == {("forward",): 4 * residual * 7 / 8, ("backward",): 4 * residual * 7 / 8}


@pytest.mark.fast(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_microbatchs_activation_crosses_each_stage_boundary_each_way(ranks):
    """And once more in each tick of the bubble, where it is not read."""
    model = build((ranks, 2, 1), microbatches=8, schedule="gpipe")
    sent = [s for s in step_collectives(model, ROWS, SEQ) if s.kind == "permute"]
    activation = ROWS // 2 // 8 * SEQ * model.config.d_model * 4
    crossings = {(s.direction, s.bytes): s.count - (ranks - 1) for s in sent}
    assert crossings == {("forward", activation): 8, ("backward", activation): 8}
