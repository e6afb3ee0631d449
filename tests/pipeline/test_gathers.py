"""What a compiled step gathers, and how often."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from support.tiny_model import MODEL, build, make_batch

from parallax.analysis.traced.trace import walk

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


KERNELS, LAYERS, MICROBATCHES, PASSES = 8, 4, 2, 2  # of latent attention and a gated MLP; F and B
SEQ = 20  # the size of a dim that inputs and gradients have, and no kernel


def roundings_of_kernels(equation, origin):
    """1 for an equation that rounds a kernel, or a piece of it, of one layer or of all."""
    out = equation.outvars[0].aval
    is_rounding = equation.primitive.name == "convert_element_type" and out.dtype == jnp.int8 and out.ndim > 1
    return Counter({"kernels": 1} if is_rounding and SEQ not in out.shape else {})


@pytest.mark.parametrize(("policy", "times"), [("zero1", 1), ("zero3", LAYERS * MICROBATCHES * PASSES)])
def test_kernels_that_stay_whole_for_a_step_are_rounded_once(policy, times):
    """Others are rounded at each use, before they are gathered."""
    model = build((1, 2, 1), layers=LAYERS, microbatches=MICROBATCHES, matmul="int8", policy=policy)
    program = jax.make_jaxpr(model.loss_and_grad)(model.shapes, make_batch(seq=SEQ))
    counted = walk(program, rank=dict.fromkeys(model.axis_sizes, 0), count=roundings_of_kernels)
    assert counted == {"kernels": KERNELS * times}


def gathers_of_kernels(equation, origin):
    """1 for a gather of a down-projection of one layer, from two ranks."""
    if equation.primitive.name != "all_gather":
        return Counter()
    return Counter({"kernels": equation.invars[0].aval.shape == (D_FF, D_MODEL // 2)})


D_FF, D_MODEL = 96, MODEL["d_model"]
# Layers that a rank runs for a microbatch, and those that are gathered again where a pass ends.
GATHERS = {
    "when it runs": (1, dict(prefetch=0), 2 * LAYERS),
    "ahead": (1, dict(prefetch=1), 2 * LAYERS + 1),
    "ahead, stage": (1, dict(prefetch=1, remat="stage"), 3 * LAYERS + 2),
    "ahead, two ranks": (2, dict(prefetch=1, schedule="one_f_one_b"), 2 * LAYERS + 2),
    "ahead, stage, two ranks": (2, dict(prefetch=1, schedule="one_f_one_b", remat="stage"), 3 * LAYERS + 2),
}


@pytest.mark.parametrize("name", GATHERS)
def test_the_last_layers_weights_serve_the_first_backward_layer(name):
    """With one layer gathered ahead F's last turn has them for B, if it is the next pass: on one pipeline rank, and
    where B runs the stage again."""
    ranks, changes, times = GATHERS[name]
    changes = changes | dict(layers=LAYERS * ranks, microbatches=MICROBATCHES, attention="gqa", d_ff=D_FF)
    model = build((ranks, 2, 1), **changes)
    program = jax.make_jaxpr(model.loss_and_grad)(model.shapes, make_batch())
    counted = walk(program, rank=dict.fromkeys(model.axis_sizes, 0), count=gathers_of_kernels)
    assert counted == {"kernels": MICROBATCHES * times}
