"""FLOPs of compiled programs: loops turned, products counted in every form in which compilers write them."""

import jax
import jax.numpy as jnp
import pytest

from parallax.analysis.compiled.program import Share, read_hlo_text, shares_of_windows
from parallax.config.sections import MeshConfig
from parallax.sharding.mesh import make_mesh


def compiled_flops(text, shares=None):
    mesh = make_mesh(MeshConfig(pp=1, dp=1, tp=1, simulate=0), jax.devices()[:1])
    return read_hlo_text(text, mesh, shares).flops


def compiled_text(function, *shapes):
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)).compile().as_text()


def test_products_of_loops_and_batches_are_counted_as_often_as_they_run():
    def program(x, w, heads):
        y = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
        return y @ y.T, jnp.einsum("bsh,bth->bst", heads, heads)

    text = compiled_text(program, (64, 32), (5, 32, 32), (3, 16, 8))
    assert compiled_flops(text).passes == 2 * (5 * 64 * 32 * 32 + 64 * 64 * 32 + 3 * 16 * 16 * 8)


def test_products_of_the_update_are_counted_apart():
    text = CONVOLUTION.replace("WINDOW", 'window={size=1}, dim_labels=b0f_0io->b0f, metadata={op_name="NAME"}')
    text = text.replace("f32[4,8,32]", "f32[1,8,32]")
    flops = 2 * 4 * 16 * 8 * 32
    assert compiled_flops(text.replace("NAME", "jit(step)/shard_map/dot_general")) == (flops, 0)
    assert compiled_flops(text.replace("NAME", "jit(step)/update/dot_general")) == (0, flops)


UNNAMED = """
%product (x: f32[8,8]) -> f32[8,8] {
  %x.1 = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%x.1, %x.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x.2 = f32[8,8]{1,0} parameter(0)
  %one = f32[8,8]{1,0} fusion(%x.2), kind=kOutput, calls=%product, metadata={op_name="jit(step)/update/cond"}
  ROOT %two = f32[8,8]{1,0} fusion(%one), kind=kOutput, calls=%product
}
"""


def test_a_product_that_the_compiler_left_unnamed_belongs_to_what_calls_it():
    assert compiled_flops(UNNAMED) == (2 * 8**3, 2 * 8**3)


BRANCH = """
%idle (x: f32[8,8]) -> f32[8,8] {
  ROOT %x.1 = f32[8,8]{1,0} parameter(0)
}

%work (x: f32[8,8]) -> f32[8,8] {
  %x.2 = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%x.2, %x.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[8,8], at: s32[]) -> f32[8,8] {
  %x.3 = f32[8,8]{1,0} parameter(0)
  %at = s32[] parameter(1)
  ROOT %c = f32[8,8]{1,0} conditional(%at, %x.3, %x.3), branch_computations={%idle, %work}, NAME
}
"""


def test_a_branch_counts_as_often_as_the_schedule_takes_it():
    text = BRANCH.replace("NAME", 'metadata={op_name="jit(step)/while/body/F/cond"}')
    assert compiled_flops(text).passes == 2 * 8**3
    assert compiled_flops(text, {"F": Share(average=0.25, lockstep=1.0)}).passes == 0.25 * 2 * 8**3


LOOP_FOR_BRANCH = """
%more (s: (s32[], f32[8,8], s32[])) -> pred[] {
  %s.1 = (s32[], f32[8,8], s32[]) parameter(0)
  %at = s32[] get-tuple-element(%s.1), index=0
  %turns = s32[] get-tuple-element(%s.1), index=2
  ROOT %less = pred[] compare(%at, %turns), direction=LT
}

%work (s: (s32[], f32[8,8], s32[])) -> (s32[], f32[8,8], s32[]) {
  %s.2 = (s32[], f32[8,8], s32[]) parameter(0)
  %x.2 = f32[8,8]{1,0} get-tuple-element(%s.2), index=1
  %dot.1 = f32[8,8]{1,0} dot(%x.2, %x.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %one = s32[] get-tuple-element(%s.2), index=2
  ROOT %t = (s32[], f32[8,8], s32[]) tuple(%one, %dot.1, %one)
}

ENTRY %main (x: (s32[], f32[8,8], s32[])) -> (s32[], f32[8,8], s32[]) {
  %x.3 = (s32[], f32[8,8], s32[]) parameter(0)
  ROOT %c = (s32[], f32[8,8], s32[]) while(%x.3), condition=%more, body=%work, metadata={op_name="NAME"}
}
"""


def test_a_loop_of_at_most_one_turn_counts_as_the_branch_for_which_it_stands():
    text = LOOP_FOR_BRANCH.replace("NAME", "jit(step)/while/body/B/cond/while")
    assert compiled_flops(text).passes == 2 * 8**3
    assert compiled_flops(text, {"B": Share(average=0.25, lockstep=1.0)}).passes == 0.25 * 2 * 8**3
    # In a loop over layers: a place has a layer of one kind.
    text = LOOP_FOR_BRANCH.replace("NAME", "jit(step)/while/body/B/cond/while/body/while/body/cond/while")
    (loop,) = (line for line in text.splitlines() if "ROOT %c" in line)
    again = loop.replace("ROOT %c", "%first")
    for both in (text, text.replace(loop, f"{again}\n{loop.replace('%x.3', '%first')}")):
        assert compiled_flops(both, {"B": Share(average=0.25, lockstep=1.0)}).passes == 2 * 8**3
    other = LOOP_FOR_BRANCH.replace("NAME", "jit(step)/while/body/B/while")  # a loop of unknown length counts once
    assert compiled_flops(other, {"B": Share(average=0.25, lockstep=1.0)}).passes == 2 * 8**3


def test_a_side_of_attention_with_a_window_counts_for_the_layers_that_have_it():
    near = 'metadata={op_name="jit(step)/while/body/F/cond/branch_1_fun/window_of_8/dot"}'
    idle = "ROOT %x.1 = f32[8,8]{1,0} parameter(0)"
    text = BRANCH.replace("NAME", 'metadata={op_name="jit(step)/while/body/F/cond"}')
    text = text.replace("rhs_contracting_dims={0}", "rhs_contracting_dims={0}, " + near)
    for windows, share in (([8, 8, 8, 0], 0.75), ([8], 1)):
        shares = {"F": Share(1.0, 1.0)} | shares_of_windows(windows)  # the pass that has the layers
        assert compiled_flops(text, shares).passes == share * 2 * 8**3
    other = text.replace(idle, f"{idle}, {near}")  # both sides have this window: the dearer one
    assert compiled_flops(other, shares_of_windows([8, 0])).passes == 2 * 8**3


CONVOLUTION = """
ENTRY %main (x: f32[4,16,8], w: f32[4,8,32]) -> f32[4,16,32] {
  %x = f32[4,16,8]{2,1,0} parameter(0)
  %w = f32[4,8,32]{2,1,0} parameter(1)
  ROOT %y = f32[4,16,32]{2,1,0} convolution(%x, %w), WINDOW
}
"""


@pytest.mark.parametrize(
    "window",
    [
        # Both a product of 16 x 8 with 8 x 32 for each of 4 heads, which are a spatial dim with zeros in between.
        "window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
        "window={size=4 stride=3 pad=0_0 lhs_dilate=4 rhs_reversal=1}, dim_labels=0bf_0io->0bf",
    ],
)
def test_a_batch_that_is_written_as_a_convolution_is_counted_without_its_zeros(window):
    assert compiled_flops(CONVOLUTION.replace("WINDOW", window)).passes == 2 * 4 * 16 * 8 * 32


def test_a_product_that_is_written_as_a_convolution_is_a_product():
    text = CONVOLUTION.replace("WINDOW", "window={size=1}, dim_labels=b0f_0io->b0f")
    text = text.replace("f32[4,8,32]", "f32[1,8,32]")
    assert compiled_flops(text).passes == 2 * 4 * 16 * 8 * 32
