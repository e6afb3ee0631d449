"""Kinds of layers of other widths and heads: stacks of their own, counted as they are; generation, and what is
refused."""

import dataclasses

import jax
import numpy as np
import pytest
from support.cached_logits import decoded_logits
from support.tiny_model import build, make_batch, model_config, params_of

from parallax.analysis.traced.flops import flops_per_token, parameters_by_component
from parallax.analysis.traced.recompute import down_flops, part_costs, unread_flops
from parallax.errors import ConfigError
from parallax.inference.decode import Prompts
from parallax.interop.hf_config import write_config
from parallax.model.checks import check_kernel_on
from parallax.sharding.layout import named_leaves
from parallax.user_code import settings_text

WIDE = dict(attention="gqa", layers=4, layers_of="dense wide far also")
WIDE |= dict(kinds="wide=(d_ff=96) far=(rope=False) also=(d_ff=96, sliding_window=4)")
WIDTHS = [64, 96, 64, 96]


def test_layers_of_one_shape_share_a_stack():
    model = build((1, 1, 1), **WIDE)
    assert model.config.layer_kinds == ("dense", "wide", "dense", "wide")
    assert [*model.config.dense_widths] == WIDTHS and model.config.windows == (0, 0, 0, 4)
    shapes = {name: leaf.shape for name, leaf in named_leaves(model.shapes).items() if name.endswith("mlp/up/kernel")}
    assert shapes == {"blocks/dense/mlp/up/kernel": (2, 32, 64), "blocks/wide/mlp/up/kernel": (2, 32, 96)}


OF_GQA = {"near": dict(kv_heads=2, d_head=4), "far": dict(heads=16, d_head=16, d_ff=96)}
OF_MLA = {"near": dict(d_latent=8, d_rope=8), "far": dict(heads=16, d_head=4, d_latent_q=8)}


@pytest.mark.parametrize(
    ("changes", "of_each"),
    [
        (WIDE | dict(kinds="wide=(d_ff=96) far=() also=(d_ff=96)"), [dict(d_ff=width) for width in WIDTHS]),
        (dict(attention="gqa", kinds=settings_text(OF_GQA), layers_of="dense near far"), [{}, *OF_GQA.values()]),
        (dict(attention="mla", kinds=settings_text(OF_MLA), layers_of="dense near far"), [{}, *OF_MLA.values()]),
    ],
    ids=("widths", "gqa", "mla"),
)
def test_each_layer_is_counted_with_its_own_shapes(changes, of_each):
    """As models of one layer each, without windows, which are not theirs."""
    model = build((1, 1, 1), **changes | dict(layers=len(of_each)))
    alone = [build((1, 1, 1), attention=changes["attention"], layers=1, **each) for each in of_each]
    numbers = [sum(parameters_by_component(each.plan.declared).values()) for each in (model, *alone)]
    outside = sum(leaf.size for name, leaf in named_leaves(alone[0].shapes).items() if not name.startswith("blocks"))
    assert numbers[0] - outside == sum(number - outside for number in numbers[1:])
    flops = [flops_per_token(each.config, each.plan.declared, seq=16) for each in (model, *alone)]
    head = 6 * 64 * 32
    assert flops[0] - head == sum(of_one - head for of_one in flops[1:])
    here, *there = (part_costs(each.config, seq=16) for each in (model, *alone))
    assert all(
        cost == tuple(sum(each) for each in zip(*(costs[part] for costs in there))) for part, cost in here.items()
    )
    for summed in (down_flops, unread_flops):
        assert summed(model.config) == sum(summed(each.config) for each in alone)


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
        ("wide=(d_expert=96)", "model.kinds.wide.d_expert=96 does nothing: 'wide' is no variant of mixtures"),
        ("dense=(heads=4)", "model.kinds.dense.heads=4 does nothing: 'dense' layers have model.heads=8 itself"),
        ("wide=(kv_heads=2)", "model.kinds.wide.kv_heads=2 does nothing: model.attention='mla' does not read it"),
        ("wide=(d_latent=0)", "model.kinds.wide: model.d_latent=0 must be"),
        ("wide=(d_rope=3)", "model.kinds.wide: model.d_rope=3 must be even"),
        ("wide=(d_ff=0)", "model.kinds.wide.d_ff=0"),
        ("wide=(d_model=2)", "model.kinds.wide.d_model is not a setting in which kinds of layers differ"),
    ],
)
def test_shapes_that_a_kind_cannot_have_are_refused(kinds, message):
    with pytest.raises(ConfigError, match=message):
        model_config(layers=2, layers_of="dense wide" if "wide" in kinds else "dense*2", kinds=kinds)


ULYSSES = dict(mesh=(1, 1, 1, 1, 4), context="ulysses")
ROUNDED = dict(mesh=(1, 1, 2), matmul="int8", matmul_scales="current", tensor_parallel="column_row")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("d_ff=97", {}, "model.kinds.wide.d_ff=97 does not divide over mesh.tp=2"),
        ("heads=5, kv_heads=1", {}, "model.kinds.wide.heads=5 does not divide over mesh.tp=2"),
        ("heads=6, kv_heads=3", {}, "model.kinds.wide.kv_heads=3 and mesh.tp=2: one must divide the other"),
        ("heads=6, kv_heads=4", {}, "model.kinds.wide: model.heads=6 does not divide over model.kv_heads=4"),
        ("base='moe', d_expert=97", {}, "model.kinds.wide.d_expert=97 does not divide over mesh.tp=2"),
        ("heads=2, kv_heads=2", ULYSSES, "model.kinds.wide.heads=2 does not divide over .*mesh.cp=4.*'ulysses'"),
        ("kv_heads=1", ROUNDED, "mesh.tp=2 ranks share model.kinds.wide.kv_heads=1, and each would round"),
    ],
)
def test_shapes_of_a_kind_that_a_mesh_does_not_divide_are_refused_by_its_name(kind, changes, message):
    settings = dict(mesh=(1, 1, 2), attention="gqa", layers=2, layers_of="dense wide", kinds=f"wide=({kind})")
    with pytest.raises(ConfigError, match=message):
        build(**settings | changes)


def test_a_kernel_that_does_not_take_the_heads_of_a_kind_is_refused_by_its_name():
    model = model_config(attention="gqa", layers=2, layers_of="dense wide", kinds="wide=(d_head=12)")
    model = dataclasses.replace(model, kernel="cudnn", dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"these are 12 wide \(model.kinds.wide.d_head=12\)"):
        check_kernel_on(model, "gpu", "NVIDIA H100")


def test_no_architecture_has_two_widths_or_numbers_of_heads():
    for kind, message in (("d_ff=96", "one width of MLPs"), ("kv_heads=2", "the same heads in all layers")):
        model = model_config(attention="gqa", layers=2, layers_of="dense wide", kinds=f"wide=({kind})")
        with pytest.raises(ConfigError, match=f"LlamaForCausalLM has .*{message}"):
            write_config(model, 16)
