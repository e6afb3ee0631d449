"""layout.tensor_parallel="streams" gives the plain model's losses, gradients and update: in every schedule, with every
set that is recomputed, and beside every other axis."""

import dataclasses

import pytest
from support.tiny_model import ROWS, SEQ, SEQ_CUT, build, settings_of
from test_choices import CHOICES, check
from test_parity import check_parity

from parallax.analysis.planned.step_time import predict
from parallax.analysis.planned.topology import read_topology
from parallax.analysis.traced.collectives import bytes_by, collectives_by_rank
from parallax.errors import ConfigError

STREAMS = dict(tensor_parallel="streams", residual=SEQ_CUT)
CASES = {
    "tp": dict(mesh=(1, 1, 4), attention="gqa", remat="none", tied=False),
    "pipeline": dict(mesh=(2, 1, 4), attention="gqa", schedule="one_f_one_b", remat="attention"),
    "divided": dict(mesh=(2, 2, 2), attention="gqa", schedule="zero_bubble", remat="none", policy="zero1"),
    "divided, made again": dict(mesh=(2, 1, 2), attention="gqa", schedule="zero_bubble_v", remat="norm swiglu ffn qkv"),
    "stages": dict(mesh=(2, 2, 2), attention="gqa", schedule="interleaved", virtual=2, remat="stage"),
    "latents": dict(mesh=(2, 1, 4), attention="mla", schedule="dualpipe_v", remat="elementwise"),
    "more ranks than kv_heads": dict(mesh=(1, 1, 8), attention="gqa", kv_heads=2, remat="layer"),
    "data": dict(mesh=(1, 4, 2), attention="gqa", policy="lean", reduce="compute", prefetch=1, embedding="all_to_all"),
    "ring": dict(mesh=(1, 1, 2, 1, 4), attention="gqa", context="ring", remat="attention"),
    "gathered keys": dict(mesh=(1, 1, 2, 1, 4), attention="gqa", context="all_gather", remat="layer"),
    "replicas": dict(mesh=(1, 2, 2, 2), attention="gqa", policy="zero3", remat="layer"),
    "ulysses": dict(mesh=(1, 1, 2, 1, 2), attention="gqa", context="ulysses", qk_norm=True, qkv_bias=True),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_update_equal_the_plain_model(name, record_property):
    check_parity(dict(microbatches=4, tied=True) | CASES[name] | STREAMS, record_property)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), [("shared_gate", (2, 1, 2, 1, 1, 2)), ("expert_bias", (2, 1, 4)), ("clamped MLP", (2, 1, 4))]
)
def test_shared_experts_and_other_mlps_give_the_plain_models_gradients(name, mesh):
    check(CHOICES[name] | dict(attention="gqa"), mesh=mesh, schedule="one_f_one_b", remat="attention", **STREAMS)


def test_each_layer_sends_the_bytes_of_its_gathers_and_sums_as_permutes():
    """Four of each pass: tokens to attention's and the MLP's products, and sums back. The backward pass makes none of
    them again."""

    def sent_by(**how):
        model = build((1, 1, 4), attention="gqa", residual=SEQ_CUT, remat="none", **how)
        return bytes_by(collectives_by_rank(model, ROWS, SEQ)[0], "axes", "kind")

    plain, streams = sent_by(), sent_by(tensor_parallel="streams")
    in_layers = {kind: plain[("tp",), kind] - streams[("tp",), kind] for kind in ("all-gather", "reduce-scatter")}
    assert in_layers["all-gather"] == in_layers["reduce-scatter"] == streams[("tp",), "permute"] // 2 > 0


def test_products_of_experts_may_be_in_8_bits():
    experts = dict(layers=4, layers_of="moe*4", experts=4, d_expert=16, matmul="int8", matmul_parts="experts")
    assert build((1, 1, 2), attention="gqa", **experts, **STREAMS).config.products_in_8_bits == ["experts"]


def test_a_plan_hides_streams_behind_products():
    topology = read_topology("v5e:2x2")

    def planned(**how):
        sizes = dict(d_model=2048, d_ff=8192, layers=2, heads=16, kv_heads=16, d_head=128, dtype="bfloat16")
        settings = settings_of(attention="gqa", residual=SEQ_CUT, **sizes, **how)
        mesh = dataclasses.replace(settings.mesh, pp=1, dp=2, tp=2, simulate=0)
        data = dataclasses.replace(settings.data, seq=2048, global_batch=8)
        return predict(dataclasses.replace(settings, mesh=mesh, data=data), topology)

    plain, streams = planned(), planned(tensor_parallel="streams")
    assert streams.hidden_secs > plain.hidden_secs and streams.exposed_secs["tp"] < plain.exposed_secs["tp"]
    assert streams.secs < plain.secs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(residual="batch/dp seq d_model/tp"),
            "does not shard over tp; use residual='batch/dp seq/tp d_model', or",
        ),
        (
            dict(matmul="int8", init_out="scaled"),
            "model.matmul='int8' does not; use matmul='compute', or tensor_parall",
        ),
        (
            dict(attention="mla", layers=4, layers_of="moe*4", experts=4, d_expert=16),
            "does nothing with model.attention='mla' and model.layers_of='moe*4': latent attention and experts send as",
        ),
        (dict(lora_rank=4), "model.lora_rank=4 does not; use lora_rank=0, or tensor_parallel='column_row'."),
    ],
)
def test_what_is_not_computed_of_streams_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError) as refused:
        build((1, 1, 2), **STREAMS | changes)
    assert message in str(refused.value) and "\n" not in str(refused.value)
