"""What a compiled step gathers, and how often."""

import re

import jax
import pytest
from support.tiny_model import build, make_batch

TABLE = re.compile(r'all-gather(?:-start)?\(.*op_name="[^"]*/embedding/all_gather')
# Over data axes, and with pipeline ranks once a step over pp. In ticks the first of these ranks embeds in a branch of
# its own, before the head.
TIMES = {
    "one stage": ((1, 2, 1), {}, 1),
    "batched head": ((2, 2, 1), dict(schedule="gpipe"), 1 + 1),
    "head in ticks": ((2, 2, 1), dict(schedule="one_f_one_b"), 2 + 1),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", TIMES)
def test_a_tied_table_is_gathered_once_for_embedding_and_head(name):
    mesh, changes, times = TIMES[name]
    model = build(mesh, tied=True, layers=2, microbatches=2, **changes)
    compiled = jax.jit(model.loss_and_grad).lower(model.shapes, make_batch()).compile().as_text()
    assert len(TABLE.findall(compiled)) == times


@pytest.mark.parametrize(("policy", "once"), [("zero1", True), ("zero3", False)])
def test_kernels_that_stay_whole_for_a_step_are_rounded_once(policy, once):
    """All layers of a kernel, [layers, d_model, d_ff / tp], in 8 bits: only before the loops over microbatches and
    layers."""
    model = build((1, 2, 1), layers=4, matmul="int8", policy=policy)
    traced = str(jax.make_jaxpr(model.loss_and_grad)(model.shapes, make_batch()))
    assert (re.search(r":i8\[4,32,64\]", traced) is not None) == once
