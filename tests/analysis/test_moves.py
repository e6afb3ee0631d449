"""What is read from the sharding plan's rows is what the traced step sends."""

import itertools
from collections import Counter

import pytest

from parallax.analysis.planned.layouts import model_on_topology
from parallax.analysis.planned.moves import SentPerUse, moves
from parallax.analysis.planned.step_time import traced_work
from parallax.analysis.planned.topology import read_topology
from parallax.config.sections import POLICY_NAMES
from parallax.config.settings import default_settings, read_settings

FOUR, MICROBATCHES = read_topology("v5e:2x2"), 2


def settings(policy, tp, bucket="parameter", **data_parallel):
    return read_settings(
        default_settings(),
        mesh=dict(pp=1, dp=4 // tp, tp=tp),
        model=dict(vocab=64, layers=2, d_model=32, d_ff=64, heads=4, d_head=8, d_latent=16, d_rope=4, kernel="xla"),
        pipeline=dict(microbatches=MICROBATCHES, schedule="gpipe", remat="none"),
        data_parallel=dict(policy=policy, **data_parallel),
        fsdp=dict(bucket=bucket),
        data=dict(seq=16, global_batch=8),
    )


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    ("policy", "tp", "bucket"),
    [*itertools.product(POLICY_NAMES, [1, 2], ["parameter"]), ("zero2", 1, "module"), ("zero3", 2, "layer")],
)
def test_the_rows_say_what_the_traced_step_sends_for_layers(policy, tp, bucket):
    chosen = settings(policy, tp, bucket)
    model = model_on_topology(chosen, FOUR)
    layers = SentPerUse.of(model.plan).modules
    traced, planned = Counter(), Counter()
    for call in traced_work(model, chosen).sent:
        if "dp" in call.axes and call.module.split("/")[0] in layers:
            traced[call.kind] += call.total_bytes
    times = {"use": 2 * MICROBATCHES, "add_up": MICROBATCHES}  # weights in the forward and in the backward pass
    for move, size in moves(model.plan).items():
        if move.name != "sum":  # of all parameters together, by no layer's name
            planned[move.kind] += size * times.get(move.name, 1)
    assert traced == planned and (traced or policy == "ddp")


def test_matrices_that_a_message_rounds_and_those_of_8_bit_products_have_messages_of_their_own():
    eight_bits = dict(matmul="int8", matmul_parts="mlp"), dict(bucket="layer", gather_dtype="int8")
    chosen = read_settings(settings("zero3", 1, "layer"), model=eight_bits[0], fsdp=eight_bits[1])
    model = model_on_topology(chosen, FOUR)
    per_use = SentPerUse.of(model.plan)
    gathers = {
        call.module for call in traced_work(model, chosen).sent if call.kind == "all-gather" and per_use.has(call)
    }
    assert per_use.weights == {"attention", "mlp"} == gathers == per_use.together & gathers


def test_what_is_sent_at_each_use_follows_from_the_rows_with_their_exceptions():
    chosen = settings("zero3", 1, exceptions="blocks/attention=zero1")
    per_use = SentPerUse.of(model_on_topology(chosen, FOUR).plan)
    for modules in (per_use.weights, per_use.gradients):
        assert {name.split("/")[0] for name in modules} == {"mlp"}
    assert "attention" in per_use.modules
