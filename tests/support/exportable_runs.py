"""Runs of our own, as if they had trained, of every kind that has an architecture elsewhere."""

import pathlib
import tempfile

import numpy as np

from parallax.config.settings import read_settings
from parallax.data.tokenizer import Bytes
from parallax.interop.export import json_text, make_run, param_shapes
from support.run_examples import tiny_config

LLAMA, QWEN3, V3 = "LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM"
V2 = "DeepseekV2ForCausalLM"
GROUPS = dict(experts=8, router_groups=4, router_groups_chosen=2, experts_per_token=3, d_expert=12, shared_experts=2)
BIASED_NORMS = dict(norm="layer", norm_bias=True, mlp="plain")
BIASES = BIASED_NORMS | dict(out_bias=True, mlp_bias=True)
GEMMA = dict(norm_scale="one_plus", activation="gelu_tanh", embedding_scale=32**0.5)
LOCAL = dict(layers_of="dense local", kinds="local=(sliding_window=4)")
COHERE = dict(norm="layer", branches="parallel_one_norm", logit_scale=2.0)
LONGROPE = dict(rope_scaling="longrope", rope_short_factors="1.0 1.5", rope_long_factors="2.0 4.0", rope_magnitude=1.25)
SIZES = dict(vocab=384, d_rope=4, d_latent=16)
OWN = {
    "gqa": (dict(attention="gqa"), LLAMA),
    "biases": (dict(attention="gqa", qkv_bias=True), "Qwen2ForCausalLM"),
    "norms": (dict(attention="gqa", qk_norm=True), QWEN3),
    "mla": (dict(attention="mla", d_latent_q=16), V3),
    "mla, yarn": (dict(attention="mla", rope_scaling="yarn", rope_factor=4.0), V3),
    "mla, a part": (dict(attention="mla", rope_scaling="yarn", rope_factor=4.0, rope_temperature=1.0), V3),
    "gqa, yarn": (dict(attention="gqa", rope_scaling="yarn", rope_factor=4.0), LLAMA),
    "gqa, llama3": (dict(attention="gqa", rope_scaling="llama3", rope_factor=4.0, rope_fast_turns=4.0), LLAMA),
    "gqa, linear": (dict(attention="gqa", rope_scaling="linear", rope_factor=4.0), LLAMA),
    "mixture": (dict(attention="gqa", layers_of="moe*2", experts=4, d_expert=24), "MixtralForCausalLM"),
    "mixture, norms": (
        dict(attention="gqa", qk_norm=True, layers_of="moe dense", experts=4, d_expert=24, router_normalized=False),
        "Qwen3MoeForCausalLM",
    ),
    "mixture, sigmoid": (
        dict(attention="mla", layers_of="dense moe", router_score="sigmoid", router_scale=2.0, **GROUPS),
        V3,
    ),
    "factors": (dict(attention="gqa", embedding_scale=3.0, logit_scale=0.5, residual_scale=0.3), "GraniteForCausalLM"),
    "rotated in part": (dict(attention="gqa", rope_fraction=0.5) | LONGROPE, "Phi3ForCausalLM"),
    "biases and norms of heads": (dict(attention="gqa", qkv_bias=True, out_bias=True, qk_norm=True), QWEN3),
    "biases of q, k and v, and of the MLP": (
        dict(attention="gqa", qkv_bias=True, mlp_bias=True, activation="gelu"),
        "HeliumForCausalLM",
    ),
    "biases and norms": (dict(attention="gqa", qkv_bias=True, qk_norm=True), "Glm4MoeForCausalLM"),
    "norms after rotation": (dict(attention="gqa", qk_norm=True, qk_norm_after_rope=True), "HunYuanDenseV1ForCausalLM"),
    "mixture, factors": (
        dict(attention="gqa", layers_of="moe*2", experts=4, d_expert=24, attention_scale=0.2),
        "GraniteMoeForCausalLM",
    ),
    "mixture, norms of projections": (
        dict(attention="gqa", layers_of="moe*2", experts=4, d_expert=24, qk_norm=True, qk_norm_over="projection"),
        "OlmoeForCausalLM",
    ),
    "mixture, gate": (
        dict(attention="gqa", layers_of="dense moe", experts=4, d_expert=12, shared_experts=2, shared_gate=True),
        "Qwen2MoeForCausalLM",
    ),
    "mixture, sigmoid of grouped heads": (
        dict(attention="gqa", layers_of="dense moe", experts=4, d_expert=12, router_score="sigmoid", shared_experts=1),
        "Glm4MoeForCausalLM",
    ),
    "mixture, biases": (
        dict(attention="gqa", layers_of="local moe", kinds="local=(base='moe', sliding_window=8)", experts=4)
        | dict(d_expert=12, qkv_bias=True, out_bias=True, sinks=True, router_shift=True, expert_bias=True)
        | dict(expert_activation="clamped", expert_limit=0.5),
        "GptOssForCausalLM",
    ),
    "norms without parameters": (
        dict(attention="gqa", norm="layer", norm_scale="none", norm_eps=1e-5),
        "OlmoForCausalLM",
    ),
    "norms after": (
        dict(attention="gqa", norm_place="after", qk_norm=True, qk_norm_over="projection"),
        "Olmo2ForCausalLM",
    ),
    "one plus": (
        dict(attention="gqa", **GEMMA),
        "GemmaForCausalLM",
    ),
    "norms before and after": (
        dict(attention="gqa", norm_place="both", score_cap=20.0, logit_cap=30.0, **GEMMA)
        | dict(layers_of="dense local", kinds="local=(sliding_window=8)", attention_scale=24**-0.5),
        "Gemma2ForCausalLM",
    ),
    "norms before and after, of heads": (
        dict(attention="gqa", norm_place="both", qk_norm=True, qk_norm_scale="one_plus", **GEMMA)
        | dict(layers_of="local dense", kinds="local=(sliding_window=8, rope_theta=100.0)", rope_theta=1e6),
        "Gemma3ForCausalLM",
    ),
    "norms after, windows": (
        dict(attention="gqa", norm_place="after", qk_norm=True, qk_norm_over="projection", **LOCAL)
        | dict(kinds="local=(sliding_window=4, rope_theta=1e5)"),
        "Olmo3ForCausalLM",
    ),
    "norms on both sides": (dict(attention="gqa", norm_place="both"), "Glm4ForCausalLM"),
    "biases everywhere": (dict(attention="gqa", qkv_bias=True, out_bias=True, mlp_bias=True), LLAMA),
    "windows in some layers": (dict(attention="gqa", **LOCAL), "MinistralForCausalLM"),
    "without positions in some layers": (
        dict(attention="gqa", layers_of="nope dense", kinds="nope=(rope=False)"),
        "SmolLM3ForCausalLM",
    ),
    "parallel, one norm": (dict(attention="gqa", **COHERE), "CohereForCausalLM"),
    "parallel, windows": (
        dict(attention="gqa", layers_of="nope local", kinds="nope=(rope=False) local=(sliding_window=4)", **COHERE),
        "Cohere2ForCausalLM",
    ),
    "plain": (dict(attention="gqa", mlp="plain", activation="relu2"), "ArceeForCausalLM"),
    "plain, biases": (dict(attention="gqa", activation="gelu_tanh", qkv_bias=True, **BIASES), "Starcoder2ForCausalLM"),
    "plain, one plus": (
        dict(attention="gqa", activation="relu2", norm_scale="one_plus", rope_fraction=0.5, **BIASED_NORMS),
        "NemotronForCausalLM",
    ),
    "parallel": (
        dict(
            attention="gqa",
            activation="gelu",
            branches="parallel",
            kv_heads=4,
            rope_fraction=0.25,
            qkv_bias=True,
            **BIASES,
        ),
        "GPTNeoXForCausalLM",
    ),
    "mixture, latents": (dict(attention="mla", layers_of="moe*2", router_normalized=False, **GROUPS), V2),
}


def own_settings(corpus, **changes):
    return read_settings(tiny_config(corpus, **{f"model.{key}": value for key, value in (SIZES | changes).items()}))


def own_run(folder, settings, tokenizer=None):
    """A run of random parameters, as if it had trained; it reads bytes where no tokenizer is given.

    Its routers have biases where they score by sigmoids, as if optimizer.balance_rate had moved them.
    """
    tokenizer = tokenizer or Bytes()
    draw, made = np.random.default_rng(0), {}
    for name, about in param_shapes(settings).items():
        around = 1.0 if name.endswith("scale") else 0.0
        size = 0.0 if name.endswith("router.bias") and settings.model.router_score != "sigmoid" else 0.2
        size *= 200 if about.dtype == np.int8 else 1
        made[name] = (around + size * draw.normal(size=about.shape)).astype(about.dtype)
    with tempfile.TemporaryDirectory() as beside:
        tokenizer.save(pathlib.Path(beside))
        carried = {path.name: path for path in pathlib.Path(beside).iterdir()}
        carried["config.json"] = json_text(settings.to_dict())
        make_run(folder, settings, tokenizer, carried, lambda _, here: [(here.index, [made[here.name][here.index]])])
    return made
