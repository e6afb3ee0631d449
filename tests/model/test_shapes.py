"""Kinds of dense layers of another width: stacks of their own, counted as they are; generation, and what is refused."""

import jax
import numpy as np
import pytest
from support.cached_logits import decoded_logits
from support.tiny_model import build, make_batch, model_config, params_of

from parallax.analysis.traced.flops import flops_per_token, parameters_by_component
from parallax.analysis.traced.recompute import down_flops, part_costs
from parallax.errors import ConfigError
from parallax.inference.decode import Prompts
from parallax.interop.hf_config import write_config
from parallax.sharding.layout import named_leaves

WIDE = dict(attention="gqa", layers=4, layers_of="dense wide far also")
WIDE |= dict(kinds="wide=(d_ff=96) far=(rope=False) also=(d_ff=96, sliding_window=4)")
WIDTHS = [64, 96, 64, 96]


def test_layers_of_one_shape_share_a_stack():
    model = build((1, 1, 1), **WIDE)
    assert model.config.layer_kinds == ("dense", "wide", "dense", "wide")
    assert [*model.config.dense_widths] == WIDTHS and model.config.windows == (0, 0, 0, 4)
    shapes = {name: leaf.shape for name, leaf in named_leaves(model.shapes).items() if name.endswith("mlp/up/kernel")}
    assert shapes == {"blocks/dense/mlp/up/kernel": (2, 32, 64), "blocks/wide/mlp/up/kernel": (2, 32, 96)}


def test_each_layer_is_counted_with_its_own_width():
    """As four models of one layer each."""
    model = build((1, 1, 1), **WIDE)
    alone = [build((1, 1, 1), attention="gqa", layers=1, d_ff=width) for width in WIDTHS]
    numbers = [sum(parameters_by_component(each.plan.declared).values()) for each in (model, *alone)]
    outside = sum(leaf.size for name, leaf in named_leaves(alone[0].shapes).items() if not name.startswith("blocks"))
    assert numbers[0] - outside == sum(number - outside for number in numbers[1:])
    full = build((1, 1, 1), **WIDE | dict(kinds="wide=(d_ff=96) far=() also=(d_ff=96)"))  # as windows are not theirs
    of_each = [flops_per_token(each.config, each.plan.declared, seq=16) for each in (full, *alone)]
    head = 6 * 64 * 32
    assert of_each[0] - head == sum(flops - head for flops in of_each[1:])
    here, *there = (part_costs(each.config, seq=16) for each in (full, *alone))
    assert all(
        cost == tuple(sum(each) for each in zip(*(costs[part] for costs in there))) for part, cost in here.items()
    )
    assert down_flops(full.config) == sum(down_flops(each.config) for each in alone)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 1, 2)])
def test_generation_says_what_the_full_pass_says(mesh):
    model, ids = build(mesh, **WIDE, microbatches=1), make_batch()["tokens"][:4]
    places = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    alone = build((1, 1, 1), **WIDE, microbatches=1)
    expected = np.asarray(jax.jit(alone.logits)(params_of(alone), ids, np.ones_like(ids), places))
    logits = decoded_logits(model, params_of(model), Prompts(ids, np.zeros(len(ids), np.int32)), prefill=7)
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ("dense=(d_ff=96)", "model.kinds.dense.d_ff=96 does nothing: 'dense' layers have model.d_ff=64 itself"),
        ("wide=(d_ff=96, base='moe')", "model.kinds.wide.d_ff=96 does nothing: 'wide' is no variant of dense layers"),
        ("wide=(d_ff=0)", "model.kinds.wide.d_ff=0"),
        ("wide=(d_model=2)", "model.kinds.wide.d_model is not a setting in which kinds of layers differ"),
    ],
)
def test_shapes_that_a_kind_cannot_have_are_refused(kinds, message):
    with pytest.raises(ConfigError, match=message):
        model_config(layers=2, layers_of="dense wide" if "wide" in kinds else "dense*2", kinds=kinds)


def test_a_width_that_tp_does_not_divide_is_refused_and_no_architecture_has_two():
    with pytest.raises(ConfigError, match="model.kinds.wide.d_ff=97 does not divide over mesh.tp=2"):
        build((1, 1, 2), **WIDE | dict(kinds="wide=(d_ff=97) far=() also=(d_ff=97)"))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has .*one width of MLPs"):
        write_config(model_config(**WIDE | dict(layers_of="dense wide far*2", kinds="wide=(d_ff=96) far=()")), 16)
