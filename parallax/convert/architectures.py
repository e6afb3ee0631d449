"""A model as config.json of Hugging Face's `transformers` describes it, and as a section `model` does.

Every field is taken for what it means in its architecture: it becomes a key, must have the one value that is computed
here, or is on a list of those that change no number. Any other is refused by name.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from parallax.convert.fields import NEEDED, Fields
from parallax.convert.rope_fields import context_of, read_rope, write_rope
from parallax.errors import ConfigError
from parallax.model import ModelConfig

# How a model is computed, and not which: what no config.json says.
OWN_KEYS = ("dtype", "kernel", "dropout")
LATENT_NORM_EPS = 1e-6  # of the norms inside DeepSeek's attention, which rms_norm_eps does not reach
# What files say of themselves, of texts and how they are written, of initial values, of caches and of kernels.
HARMLESS = (
    "_name_or_path name_or_path transformers_version torch_dtype dtype auto_map use_cache initializer_range "
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class "
    "pretraining_tp return_dict output_attentions output_hidden_states torchscript is_decoder is_encoder_decoder "
    "id2label label2id problem_type chunk_size_feed_forward task_specific_params attn_implementation "
    "_attn_implementation_autoset _flash_attn_2_enabled unsloth_version max_length min_length do_sample temperature "
    "top_k top_p repetition_penalty num_beams max_sequence_length unsloth_fixed"
)
# Of experts, where no layer has any; of predictions of more than one token, whose layers are no part of the model.
OF_EXPERTS = (
    "n_routed_experts n_shared_experts num_experts num_local_experts num_experts_per_tok moe_intermediate_size "
    "moe_layer_freq n_group topk_group topk_method norm_topk_prob routed_scaling_factor scoring_func aux_loss_alpha "
    "seq_aux ep_size output_router_logits router_aux_loss_coef num_nextn_predict_layers num_mtp_layers"
)


class Described(NamedTuple):
    """What a config.json says: keys of `model`, and whether rotated pairs are neighbours in the weights' rows."""

    architecture: str
    model: dict[str, Any]
    interleaved: bool


class Architecture(NamedTuple):
    """A class of `transformers`, and how its fields are read; `read` gives the keys of its attention."""

    model_type: str
    read: Callable[[Fields, dict[str, Any]], dict[str, Any]]
    interleaved: Callable[[Fields], bool] = lambda fields: False


def describe(content: Mapping[str, Any]) -> Described:
    """Read the object of a config.json.

    Raises:
        ConfigError: an architecture, a field or a value that is not supported, by name.
    """
    fields = Fields("config.json", content)
    name = _architecture(fields)
    kind = ARCHITECTURES[name]
    fields.only("model_type", kind.model_type, absent=kind.model_type)
    if fields.object("quantization_config"):
        fields.refuse("quantization_config", content["quantization_config"], "float32, bfloat16 or float16 weights")
    model = {
        "vocab": fields.whole("vocab_size", least=2),
        "layers": fields.whole("num_hidden_layers"),
        "d_model": fields.whole("hidden_size"),
        "d_ff": fields.whole("intermediate_size"),
        "heads": fields.whole("num_attention_heads"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tied": fields.flag("tie_word_embeddings", False),
        "qkv_bias": False,
        "qk_norm": False,
    }
    fields.only("hidden_act", "silu", "swish", absent="silu")
    fields.only("attention_dropout", 0, absent=0)
    model |= kind.read(fields, model)
    model |= read_rope(fields, fields.whole("max_position_embeddings"), model["attention"])
    interleaved = kind.interleaved(fields)
    fields.ignore(HARMLESS.split())
    fields.end()
    return Described(name, model, interleaved)


def _architecture(fields: Fields) -> str:
    names = fields.take("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in tuple(ARCHITECTURES):
        fields.refuse("architectures", names, ", ".join(f"['{name}']" for name in ARCHITECTURES))
    return names[0]


# ---- grouped-query attention


def _heads(fields: Fields, model: Mapping[str, Any], *, kv_heads: Any = NEEDED, d_head: Any = None) -> dict[str, Any]:
    """Keys of GQA; a head's width that is not written follows from d_model where `d_head` is None."""
    if d_head is None and model["d_model"] % model["heads"] == 0:
        d_head = model["d_model"] // model["heads"]
    kv_heads = fields.whole("num_key_value_heads", kv_heads)
    return {"attention": "gqa", "kv_heads": kv_heads, "d_head": fields.whole("head_dim", d_head or NEEDED)}


def _llama(fields: Fields, model: dict[str, Any]) -> dict[str, Any]:
    fields.only("attention_bias", False, absent=False)
    fields.only("mlp_bias", False, absent=False)
    return _heads(fields, model, kv_heads=model["heads"])


def _mistral(fields: Fields, model: dict[str, Any]) -> dict[str, Any]:
    was_null = "sliding_window" in fields.left
    fields.only("sliding_window", None, absent=None if was_null else 4096)
    _check_full_attention(fields)
    return _heads(fields, model)


def _qwen2(fields: Fields, model: dict[str, Any]) -> dict[str, Any]:
    fields.only("use_mrope", False, absent=False)
    _check_no_window(fields)
    return {**_heads(fields, model), "qkv_bias": True}


def _qwen3(fields: Fields, model: dict[str, Any]) -> dict[str, Any]:
    _check_no_window(fields)
    fields.only("attention_bias", False, absent=False)
    return {**_heads(fields, model, d_head=128), "qk_norm": True}


def _check_no_window(fields: Fields) -> None:
    fields.only("use_sliding_window", False, absent=False)
    fields.ignore(["sliding_window", "max_window_layers"])  # which nothing uses then
    _check_full_attention(fields)


def _check_full_attention(fields: Fields) -> None:
    types = fields.take("layer_types", [])
    if not isinstance(types, list) or set(map(str, types)) - {"full_attention"}:
        fields.refuse("layer_types", types, "'full_attention' in every layer")


# ---- multi-head latent attention


def _mla(fields: Fields, model: dict[str, Any], *, first_experts: int) -> dict[str, Any]:
    dense = fields.whole("first_k_dense_replace", first_experts, least=0)
    if dense < model["layers"]:
        fields.refuse(
            "first_k_dense_replace",
            dense,
            f"{model['layers']} or more, which is num_hidden_layers: layers of experts are not computed",
        )
    fields.ignore(OF_EXPERTS.split())
    fields.only("attention_bias", False, absent=False)
    fields.only("num_key_value_heads", model["heads"], absent=model["heads"])
    if model["norm_eps"] != LATENT_NORM_EPS:
        fields.refuse("rms_norm_eps", model["norm_eps"], f"{LATENT_NORM_EPS}, which the norms of the latents have")
    d_head, d_rope = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    fields.only("v_head_dim", d_head)
    fields.ignore(["head_dim", "qk_head_dim"])  # which follow from these
    narrow = 0 if "q_lora_rank" in fields.left and fields.left["q_lora_rank"] is None else NEEDED
    return {
        "attention": "mla",
        "kv_heads": model["heads"],
        "d_head": d_head,
        "d_rope": d_rope,
        "d_latent": fields.whole("kv_lora_rank"),
        "d_latent_q": fields.whole("q_lora_rank", narrow),
    }


def _deepseek_v2(fields: Fields, model: dict[str, Any]) -> dict[str, Any]:
    fields.only("mlp_bias", False, absent=False)
    return _mla(fields, model, first_experts=0)


def _deepseek_v3(fields: Fields, model: dict[str, Any]) -> dict[str, Any]:
    return _mla(fields, model, first_experts=3)


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", _llama),
    "MistralForCausalLM": Architecture("mistral", _mistral),
    "Qwen2ForCausalLM": Architecture("qwen2", _qwen2),
    "Qwen3ForCausalLM": Architecture("qwen3", _qwen3),
    "DeepseekV2ForCausalLM": Architecture("deepseek_v2", _deepseek_v2, lambda fields: True),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek_v3", _deepseek_v3, lambda fields: fields.flag("rope_interleave", True)
    ),
}


# ---- the other way


def write_config(model: ModelConfig, seq: int) -> dict[str, Any]:
    """A config.json for a model that was trained on windows of `seq`, of the plainest architecture that computes it.

    Raises:
        ConfigError: none does.
    """
    name = _plainest(model)
    content = {
        "architectures": [name],
        "model_type": ARCHITECTURES[name].model_type,
        "vocab_size": model.vocab,
        "num_hidden_layers": model.layers,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads if model.attention == "mla" else model.kv_heads,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "max_position_embeddings": context_of(model, seq),
        **write_rope(model),
    }
    if model.attention == "mla":
        return content | {
            "q_lora_rank": model.d_latent_q or None,
            "kv_lora_rank": model.d_latent,
            "qk_nope_head_dim": model.d_head,
            "qk_rope_head_dim": model.d_rope,
            "v_head_dim": model.d_head,
            "first_k_dense_replace": model.layers,
            "rope_interleave": True,
            "attention_bias": False,
        }
    return content | {"head_dim": model.d_head}


def _plainest(model: ModelConfig) -> str:
    if model.attention == "mla" and not model.qkv_bias and model.norm_eps == LATENT_NORM_EPS:
        return "DeepseekV3ForCausalLM"
    if model.attention == "gqa" and not (model.qkv_bias and model.qk_norm):
        return f"{'Qwen2' if model.qkv_bias else 'Qwen3' if model.qk_norm else 'Llama'}ForCausalLM"
    keys = ("attention", "qkv_bias", "qk_norm", "norm_eps")
    has = ", ".join(f"model.{key}={getattr(model, key)!r}" for key in keys)
    raise ConfigError(
        f"no architecture of transformers that is known here has {has} together: Qwen3 has norms and no biases, "
        f"Qwen2 biases and no norms, DeepSeek no biases and norm_eps={LATENT_NORM_EPS}"
    )


def differing_keys(described: Described, model: ModelConfig) -> list[str]:
    """Keys of `model` in which it is not the one that is described, but for those of its rotary embedding."""
    there = described.model.items()
    return [key for key, value in there if not key.startswith("rope_") and getattr(model, key) != value]


def same_rope(described: Described, model: ModelConfig) -> bool:
    """Whether the model rotates as the one that is described."""
    keys = {key: value for key, value in described.model.items() if key.startswith("rope_")}
    other = dataclasses.replace(model, **keys).rope
    mine = model.rope
    same_angles = (other.frequencies() == mine.frequencies()).all()
    return bool(same_angles) and (other.temperature(), other.magnitude) == (mine.temperature(), mine.magnitude)


def check_own_keys(overrides: list[str]) -> None:
    """Raise ConfigError where a key is set that the folder's config.json says."""
    wrong = [key for key in overrides if key.startswith("model.") and key.removeprefix("model.") not in OWN_KEYS]
    if wrong:
        own = ", ".join(f"--config.model.{key}" for key in OWN_KEYS)
        raise ConfigError(f"--config.{wrong[0]} is what the folder's config.json says; of the model set {own}")
