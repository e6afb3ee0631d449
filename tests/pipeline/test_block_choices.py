"""What a block can say besides its widths is the same on every mesh: each choice, and models of all."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from support.cached_logits import decoded_logits
from support.plain_model import plain_logits
from support.tiny_model import HIDDEN_CUT, ROWS, SEQ, SEQ_CUT, build, make_batch, model_config, params_of
from test_parity import check_parity

from parallax.analysis.traced.flops import matmul_parameters_by_stack
from parallax.analysis.traced.memory import tick_state
from parallax.analysis.traced.recompute import forward_flops, part_costs
from parallax.errors import ConfigError
from parallax.inference.decode import Prompts

# Eight layers with norms after each branch amplify rounding: on one device a gradient is then 2.1e-5 from that in
# float64, since the first branch reads embeddings of size 0.02, and its norm makes them 1. Four are 2.3e-6 from it.
LAYERS = 4
CHOICES = {
    "one plus": dict(norm_scale="one_plus"),
    "layer": dict(norm="layer", norm_bias=True),
    "layer, no parameters": dict(norm="layer", norm_scale="none"),
    "after": dict(norm_place="after"),
    "both": dict(norm_place="both"),
    "parallel": dict(branches="parallel"),
    "one norm": dict(branches="parallel_one_norm"),
    "plain": dict(mlp="plain"),
    "gelu": dict(activation="gelu"),
    "relu2": dict(activation="relu2"),
    "clamped": dict(activation="clamped", activation_limit=0.5),
    "biases": dict(mlp_bias=True, out_bias=True, qkv_bias=True),
}
LIKE = {
    "GPT-NeoX": dict(norm="layer", norm_bias=True, branches="parallel", mlp="plain", activation="gelu")
    | CHOICES["biases"],
    # and what Gemma 3 has in its place or besides
    "Gemma": dict(norm_scale="one_plus", norm_place="both", activation="gelu_tanh", qk_norm=True, score_cap=2.0)
    | dict(attention_scale=0.3, embedding_scale=32**0.5, logit_cap=2.0, layers_of="(local global)*2")
    | dict(kinds="local=(sliding_window=3, rope_theta=100.0) global=(rope_theta=1e6)"),
    "OLMo": dict(norm="layer", norm_scale="none", tied=True),
    "Cohere": dict(norm="layer", branches="parallel_one_norm", attention="mla"),
    "OLMo 2": dict(norm_place="after", tied=False),
}
PLAIN = dict(attention="gqa", embedding="vocab_parallel", microbatches=4, tied=True, layers=LAYERS)
CUT = PLAIN | dict(mesh=(2, 2, 2), tensor_parallel="column_row", residual=HIDDEN_CUT, schedule="one_f_one_b")
CUT |= dict(remat="elementwise")


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_the_same_on_a_mesh(name, record_property):
    check_parity(CUT | CHOICES[name], record_property)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("GPT-NeoX", dict(schedule="zero_bubble", remat="none")),
        ("OLMo", dict(tensor_parallel="scatter", policy="zero1")),
        ("Gemma", dict(mesh=(2, 1, 2, 1, 2), context="ring", residual=SEQ_CUT, remat="attention down", policy="lean")),
        ("Cohere", dict(residual=SEQ_CUT, remat="layer")),
        ("OLMo 2", dict(residual=SEQ_CUT, remat="norm swiglu", tensor_parallel="scatter")),
    ],
)
def test_a_model_of_such_choices_is_the_same_on_a_mesh(name, cut, record_property):
    check_parity(CUT | LIKE[name] | cut, record_property)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [
        dict(schedule="one_f_one_b", context="ring", remat="elementwise"),
        dict(schedule="zero_bubble", context="ulysses", remat="none", tensor_parallel="scatter", policy="zero1"),
    ],
    ids=lambda cut: cut["context"],
)
def test_a_model_in_the_manner_of_gemma_is_the_same_on_all_six_axes_at_once(cut):
    """In a process of its own, for this one has eight devices."""
    case = CUT | LIKE["Gemma"] | cut | dict(mesh=(2, 2, 2, 2, 2, 2))
    program = f"""
import sys
sys.path[:0] = {[str(folder) for folder in (pathlib.Path(__file__).parent, pathlib.Path(__file__).parents[1])]}
import support.environment
from parallax.hardware.devices import simulate_devices
simulate_devices(64)
from test_parity import check_parity
check_parity({case}, print)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0 and "gradient error" in ended.stdout, ended.stderr[-2000:]


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("name", LIKE)
def test_cached_decoding_says_what_the_whole_pass_says(name, mesh):
    case = PLAIN | LIKE[name]
    batch = make_batch(rows=8, seq=8)
    batch |= dict(segments=np.ones_like(batch["segments"]), positions=np.arange(8)[None].repeat(8, 0))
    model, alone = build(mesh, **case), build((1, 1, 1), **case)
    params, prompts = params_of(model), Prompts(batch["tokens"], np.zeros(8, np.int32))
    expected = plain_logits(model.config, params_of(alone), batch)
    np.testing.assert_allclose(decoded_logits(model, params, prompts, prefill=3), expected, rtol=1e-4, atol=1e-5)


ROUNDED = dict(matmul="int8", matmul_residuals="8bit")
HEADS = dict(layers_of="(near far)*2", kinds="near=(kv_heads=2, d_head=4) far=(heads=16, d_ff=96)")
COUNTED = LIKE | {f"{name} in 8 bits": LIKE[name] | ROUNDED for name in ("GPT-NeoX", "Cohere", "OLMo 2")}
COUNTED |= {"heads by kind": HEADS}


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", COUNTED)
def test_what_is_saved_and_made_again_is_as_a_plan_says(name):
    """For each part alone: what a set saves less when it has this part. All products are those of the parts."""
    changes = PLAIN | COUNTED[name]
    built = build((1, 1, 1), **changes)
    costs = part_costs(built.config, seq=SEQ)
    assert set(costs) == set(built.config.remat_parts)

    def saved(parts):
        model = build((1, 1, 1), **changes | dict(remat=" ".join(parts), microbatches=1))
        arrays = ((component, size) for _, component, size in tick_state(model, ROWS, SEQ))
        return sum(size for component, size in arrays if component == "saved_activations") / (4 * ROWS * SEQ)

    everything = saved(costs)
    assert everything == LAYERS * model_config().d_model
    for part in costs:
        width = saved([other for other in costs if other != part]) - everything
        maxima = 2 * LAYERS / (ROWS * SEQ) if "8 bits" in name else 0  # a float32 for each rounded input of a layer
        assert 0 <= width - costs[part].width <= maxima, part
    products = sum(matmul_parameters_by_stack(built.config, built.plan.declared).values())
    assert forward_flops(built.config, seq=SEQ) - costs["core"].flops == 2 * products


@pytest.mark.slow
def test_initial_values_are_those_of_the_names_that_stay():
    """A norm of 1 + w begins with zeros, and an MLP's kernels do not depend on norms, places or biases."""
    some, others = (
        build((1, 1, 1), **PLAIN | changes).init(0)["blocks"]
        for changes in ({}, dict(norm_scale="one_plus", norm_bias=True, norm_place="both", mlp_bias=True))
    )
    assert not np.asarray(others["mlp_out_norm"]["scale"]).any() and not np.asarray(others["mlp"]["up"]["bias"]).any()
    for kernel in ("gate", "up", "down"):
        np.testing.assert_array_equal(some["mlp"][kernel]["kernel"], others["mlp"][kernel]["kernel"])


MOE = dict(layers=4, experts=4, layers_of="moe*4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(branches="parallel_one_norm", norm_place="after"), "shares the norm before attention"),
        (dict(norm_place="both", init_out="zeros"), r"multiplies its gradient by norm_eps \*\* -0.5 = 1000"),
        (MOE | dict(activation="gelu"), "model.activation='gelu' does nothing .* only mixtures"),
        (dict(activation="clamped", mlp="plain"), "model.mlp='plain' has no gate; use mlp='gated', or another"),
        (dict(activation_limit=5.0), "model.activation_limit=5.0 does nothing with model.activation='silu'; use 7.0"),
        (MOE | dict(activation="clamped"), "model.activation='clamped' does nothing .* only mixtures"),
        (MOE | dict(mlp="plain"), "model.mlp='plain' does nothing"),
        (MOE | dict(mlp_bias=True), "model.mlp_bias=True does nothing"),
        (dict(mlp="squared:SquaredMLP", activation="clamped"), "activation='clamped' does nothing with model.mlp="),
        (dict(mlp="squared:SquaredMLP", mlp_bias=True), "does nothing with model.mlp='squared:SquaredMLP'"),
        (dict(norm="mine:Norm", norm_bias=True), "which has parameters of its own"),
        (dict(attention="mine:Attention", out_bias=True), "model.out_bias=True does nothing with"),
    ],
)
def test_a_choice_that_nothing_reads_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        model_config(**changes)
    assert "\n" not in str(caught.value)
