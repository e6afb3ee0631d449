"""The text of a compiled step says above each collective and each large product what it is of the model."""

import re

import jax
import pytest
from support.docs_commands import ROOT
from support.hlo_examples import CHAIN
from support.tiny_model import ROWS, SEQ, build, optimizer_config

import parallax as px
from parallax.analysis.compiled.annotated import MARK, annotated
from parallax.analysis.compiled.program import read_hlo_text
from parallax.analysis.traced.trace import PACKAGE
from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainStep

OVER_DP, OVER_TP = "channel_id=1, replica_groups={{0,2},{1,3}}", "channel_id=1, replica_groups={{0,1},{2,3}}"
F, B = "jit(train_step)/shard_map/while/body/F/cond/branch_1_fun", "jit(train_step)/shard_map/while/body/B/cond"
PRODUCT = "gate/gate._product/BSD,DF->BSF/dot_general"
# The gate of an MLP on dp=2 tp=2, forward and backward, as XLA writes it; and two sums that it sends together.
GATE = f"""HloModule jit_train_step, is_scheduled=true

FileNames
1 "{PACKAGE}/model/mlp.py"
2 "{PACKAGE}/sharding/collectives.py"

FunctionNames
1 "f"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=43 end_line=43 column=1 end_column=2}}
2 {{file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=2}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%fused (whole: f32[64,32], gathered: f32[32,32]) -> f32[64,32] {{
  %whole.1 = f32[64,32]{{1,0}} parameter(0)
  %gathered.1 = f32[32,32]{{1,0}} parameter(1)
  ROOT %dot.1 = f32[64,32]{{1,0}} dot(%whole.1, %gathered.1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (x: f32[64,16], w: f32[16,32], s: f32[64], n: f32[2]) -> f32[16,32] {{
  %x = f32[64,16]{{1,0}} parameter(0)
  %w = f32[16,32]{{1,0}} parameter(1)
  %s = f32[64]{{0}} parameter(2)
  %n = f32[2]{{0}} parameter(3)
  %gathered = f32[32,32]{{1,0}} all-gather(%w), {OVER_DP}, dimensions={{0}}, \
metadata={{op_name="{F}/mlp/gate/all_gather"}}
  %whole = f32[64,32]{{1,0}} all-gather(%x), {OVER_TP}, dimensions={{1}}, \
metadata={{op_name="{F}/Block/mlp/all_gather" stack_frame_id=2}}
  %wide = f32[64,32]{{1,0}} fusion(%whole, %gathered), kind=kOutput, calls=%fused, \
metadata={{op_name="{F}/Block/mlp/{PRODUCT}"}}
  %d_whole = f32[64,32]{{1,0}} dot(%wide, %gathered), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}, \
metadata={{op_name="{B}/transpose(jvp(Block))/mlp/{PRODUCT}"}}
  %d_w = f32[32,32]{{1,0}} dot(%whole, %wide), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}, \
metadata={{op_name="{B}/transpose(jvp(Block))/mlp/{PRODUCT}"}}
  %small = f32[] dot(%n, %n), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  %rows = f32[64,64]{{1,0}} dot(%whole, %wide), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}, \
metadata={{op_name="jit(train_step)/update/mlp/gate/dot_general"}}
  %together = (f32[64]{{0}}, f32[2]{{0}}) all-reduce(%s, %n), {OVER_DP}, to_apply=%add, \
metadata={{op_name="jit(train_step)/shard_map/(gradients/psum_invariant:psum_invariant)"}}
  ROOT %d_shard = f32[16,32]{{1,0}} reduce-scatter(%d_w), {OVER_DP}, dimensions={{0}}, to_apply=%add, \
metadata={{op_name="{B}/gradients/mlp/gate/reduce_scatter"}}
}}
"""


def annotated_text(text, model):
    return annotated(text, model, read_hlo_text(text, model.mesh, None, model.share_of_rows).collectives)


def notes_of(text):
    """The notes by the instruction below each."""
    pairs = ((note.strip(), line) for note, line in zip(text.splitlines(), text.splitlines()[1:]))
    return {re.search(r"%([\w.\-]+) =", line)[1]: note for note, line in pairs if note.startswith(MARK)}


def without_notes(text):
    return "".join(line for line in text.splitlines(keepends=True) if not line.lstrip().startswith(MARK))


def test_each_collective_and_product_has_its_parameter_axes_and_pass():
    text = annotated_text(GATE, build((1, 2, 2), attention="gqa", layers=2))
    assert without_notes(text) == GATE
    gate = "blocks/mlp/gate/kernel"
    norms = "blocks/attention_norm/scale, blocks/mlp_norm/scale, head/norm/scale"
    assert notes_of(text) == {
        "gathered": f"// all-gather over dp: {gate}; forward; 2.0 KiB, once a step",
        "whole": "// all-gather over tp: activations of mlp; forward; 4.0 KiB, once a step; parallax/model/mlp.py:43",
        "dot.1": f"// product BSD,DF->BSF: {gate}; forward; 131.1 kFLOP a call",
        "d_whole": f"// product BSD,DF->BSF: gradient of what {gate} multiplies; backward; 131.1 kFLOP a call",
        "d_w": f"// product BSD,DF->BSF: gradient of {gate}; backward; 131.1 kFLOP a call",
        "rows": f"// product: {gate}; update; 262.1 kFLOP a call",
        "together": f"// all-reduce over dp: gradients of {norms}; backward; forward; 264 B, once a step",
        "d_shard": f"// reduce-scatter over dp: gradient of {gate}; backward; 2.0 KiB, once a step",
    }
    shown = re.findall(r"(?m)^    (// .*)$", (ROOT / "docs" / "report.md").read_text())
    assert len(shown) == 5 and {*shown} <= {*notes_of(text).values()}


def test_a_message_of_several_matrices_has_the_name_of_their_module_or_layer():
    packed = GATE.replace("mlp/gate/all_gather", "layer/all_gather").replace("mlp/gate/reduce_s", "mlp/reduce_s")
    notes = notes_of(annotated_text(packed, build((1, 2, 2), attention="gqa", layers=2)))
    assert notes["gathered"] == "// all-gather over dp: matrices of a layer; forward; 2.0 KiB, once a step"
    assert notes["d_shard"] == "// reduce-scatter over dp: gradient of matrices of mlp; backward; 2.0 KiB, once a step"


def test_the_sum_of_a_large_gradient_names_no_small_one():
    table = """HloModule jit_train_step, is_scheduled=true

ENTRY %main (x: f32[16384,32]) -> f32[16384,32] {
  %x = f32[16384,32]{1,0} parameter(0)
  ROOT %sum = f32[16384,32]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%add, \
metadata={op_name="jit(train_step)/shard_map/gradients/psum"}
}
"""
    model = build((1, 2, 1), attention="gqa", layers=2, vocab=16384, policy="ddp")
    (note,) = notes_of(annotated_text(table, model)).values()
    assert note == "// all-reduce over dp: gradients of embedding/table; backward; 2.0 MiB, once a step"


def test_a_collective_in_pieces_is_named_at_each():
    notes = notes_of(annotated_text(CHAIN, build((2, 4, 1), attention="gqa", layers=2)))
    named = {note.partition(";")[0] for note in notes.values() if "all-gather" in note}
    assert named == {"// all-gather over dp: activations of mlp/up"} and len(notes) > 1


@pytest.fixture
def lines_in_programs():
    """As users have them; other tests' programs name no lines."""
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 100)
    yield
    jax.config.update("jax_traceback_in_locations_limit", before)


@pytest.mark.slow
@pytest.mark.usefixtures("lines_in_programs")
def test_the_compiled_program_of_a_step_names_all_that_moves():
    model = build((2, 2, 2), attention="gqa", layers=4)
    optimizer = make_optimizer(optimizer_config(warmup_steps=0), 10, model.plan.rows)
    step = TrainStep(model, optimizer, seed=0, batch_shape=(ROWS, SEQ))
    found = px.report(step, annotate=True)
    notes = list(notes_of(found.program).values())
    collectives = [note for note in notes if not note.startswith(f"{MARK}product")]
    assert len(collectives) == len(found.compiled.collectives)
    over_dp = {note.split(": ")[1].split(";")[0] for note in collectives if " over dp:" in note}
    moved = [name for name, row in px.named_leaves(model.plan.rows).items() if "dp" in row.at_rest.used_axes()]
    assert len(moved) == 8 and over_dp >= {*moved, *(f"gradient of {name}" for name in moved)}
    assert all(re.search(r"; parallax/[\w/]+\.py:\d+$", note) for note in collectives)
