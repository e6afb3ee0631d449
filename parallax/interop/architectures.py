"""A model as config.json of Hugging Face's `transformers` describes it, and as a section `model` does.

Every field is taken for what it means in its architecture: it becomes a key, must have the one value that is computed
here, or is on a list of those that change no number. Any other is refused by name.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from parallax.config.sections import ModelConfig
from parallax.interop.fields import NEEDED, Fields
from parallax.interop.quantized import Block, read_quantization
from parallax.interop.rope_fields import context_of, read_rope, write_rope
from parallax.model.rope import rope_of
from parallax.runtime.errors import ConfigError

# How a model is computed, and not which: what no config.json says.
OWN_KEYS = ("dtype", "kernel", "dropout", "vocab_multiple")
DEFAULT_WINDOW, FULL_LAYERS = 4096, 28  # of sliding_window and max_window_layers where they are absent
FULL = "full_attention"
LATENT_NORM_EPS = 1e-6  # of the norms inside DeepSeek's attention, which rms_norm_eps does not reach
# What files say of themselves, of texts and how they are written, of training, of initial values, of caches and of
# kernels, and of other programs' ways of running the model.
HARMLESS = (
    "_name_or_path name_or_path transformers_version torch_dtype dtype auto_map use_cache initializer_range "
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class "
    "pretraining_tp return_dict output_attentions output_hidden_states torchscript is_decoder is_encoder_decoder "
    "id2label label2id problem_type chunk_size_feed_forward task_specific_params attn_implementation "
    "_attn_implementation_autoset _flash_attn_2_enabled unsloth_version max_length min_length do_sample temperature "
    "top_k top_p repetition_penalty num_beams max_sequence_length unsloth_fixed model_max_length "
    "bad_words_ids begin_suppress_tokens diversity_penalty early_stopping encoder_no_repeat_ngram_size "
    "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id length_penalty "
    "no_repeat_ngram_size num_beam_groups num_return_sequences output_scores prefix remove_invalid_values "
    "return_dict_in_generate suppress_tokens tf_legacy_loss typical_p use_bfloat16 keys_to_ignore_at_inference "
    "cache_implementation is_llama_config is_qwen2_config neftune_noise_alpha transformers.js_config "
    "_attn_implementation_internal _attn_implementation use_flash_attention gradient_checkpointing"
)
# What would compute something else, but for these values: those of the models that are computed here.
AT_DEFAULT = {
    "rope_interleaved": (False,),
    "qk_layer_norms": (False,),
    "use_qk_norm": (False,),
    "activation": ("swiglu", "silu"),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "hidden_dropout": (0,),
    "use_bias": (False,),
    "resid_pdrop": (0,),
    "embd_pdrop": (0,),
}
FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")  # that predict more than the next token
# Of experts, where no layer has any.
OF_EXPERTS = (
    "n_routed_experts n_shared_experts num_experts num_local_experts num_experts_per_tok moe_intermediate_size "
    "moe_layer_freq n_group topk_group topk_method norm_topk_prob routed_scaling_factor scoring_func aux_loss_alpha "
    "seq_aux ep_size output_router_logits router_aux_loss_coef"
)


class Described(NamedTuple):
    """What a config.json says: keys of `model`, its context in tokens, whether rotated pairs are neighbours in the
    weights' rows, blocks of float8 weights that share a scale, layers behind the model's that predict further tokens,
    and what to say of it."""

    architecture: str
    model: dict[str, Any]
    context: int
    interleaved: bool
    block: Block | None
    further_layers: int
    notes: tuple[str, ...]


class Architecture(NamedTuple):
    """A class of `transformers`, and how its fields are read; `read` gives the keys of its attention."""

    model_type: str
    read: Callable[[Fields, dict[str, Any]], dict[str, Any]]
    context: int  # tokens, where max_position_embeddings is absent
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
    block = read_quantization(fields)
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
        "sliding_window": 0,
    }
    fields.only("hidden_act", "silu", "swish", absent="silu")
    fields.only("attention_dropout", 0, absent=0)
    model |= kind.read(fields, model)
    context = fields.whole("max_position_embeddings", kind.context)
    model |= read_rope(fields, context, model["attention"])
    interleaved, further = kind.interleaved(fields), _further_layers(fields)
    for field, values in AT_DEFAULT.items():
        fields.only(field, None, *values, absent=None)
    fields.ignore(HARMLESS.split())
    fields.end()
    return Described(name, model, context, interleaved, block, further, (*fields.notes, *_noted(model, block, further)))


def _further_layers(fields: Fields) -> int:
    """Layers that predict tokens behind the next one, which only their training and drafts need."""
    return max(fields.whole(name, 0, least=0) for name in FURTHER_LAYERS)


def _noted(model: Mapping[str, Any], block: Block | None, further: int) -> Iterator[str]:
    if model["sliding_window"]:
        yield (
            f"sliding_window={model['sliding_window']} hides nothing from windows that are no longer: it is kept as "
            "model.sliding_window, and a longer data.seq is refused"
        )
    if block:
        yield f"float8 weights become float32, each block of {block[0]} x {block[1]} times its scale"
    if further:
        yield f"{further} layer{'s' * (further > 1)} for multi-token prediction, behind the model's, left out"


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
    window = _window(fields)
    _layer_types(fields, window)
    return {**_heads(fields, model), "sliding_window": window}


def _qwen2(fields: Fields, model: dict[str, Any]) -> dict[str, Any]:
    fields.only("use_mrope", False, absent=False)
    return {**_heads(fields, model), "qkv_bias": True, "sliding_window": _window_of_some(fields, model["layers"])}


def _qwen3(fields: Fields, model: dict[str, Any]) -> dict[str, Any]:
    fields.only("attention_bias", False, absent=False)
    window = _window_of_some(fields, model["layers"])
    return {**_heads(fields, model, d_head=128), "qk_norm": True, "sliding_window": window}


def _window(fields: Fields) -> int:
    """Tokens of the window; 0 where it is null, which is not what it stands for where it is absent."""
    absent = None if "sliding_window" in fields.left else DEFAULT_WINDOW
    return fields.whole("sliding_window", absent) or 0


def _window_of_some(fields: Fields, layers: int) -> int:
    """The same of Qwen's: it is for use_sliding_window, and for layers from max_window_layers on or by layer_types."""
    window = _window(fields)
    window *= fields.flag("use_sliding_window", False)
    full = fields.whole("max_window_layers", FULL_LAYERS, least=0)
    types = _layer_types(fields, window)
    some = set(types) != {FULL} if types else full < layers
    return window if some else 0


def _layer_types(fields: Fields, window: int) -> list[str]:
    types = fields.take("layer_types", [])
    known = (FULL, "sliding_attention") if window else (FULL,)
    if not isinstance(types, list) or set(map(str, types)) - {*known}:
        fields.refuse("layer_types", types, " or ".join(map(repr, known)) + " in every layer")
    return types


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
    "LlamaForCausalLM": Architecture("llama", _llama, 2048),
    "MistralForCausalLM": Architecture("mistral", _mistral, 131_072),
    "Qwen2ForCausalLM": Architecture("qwen2", _qwen2, 32_768),
    "Qwen3ForCausalLM": Architecture("qwen3", _qwen3, 32_768),
    "DeepseekV2ForCausalLM": Architecture("deepseek_v2", _deepseek_v2, 2048, lambda fields: True),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek_v3", _deepseek_v3, 4096, lambda fields: fields.flag("rope_interleave", True)
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
    return content | {"head_dim": model.d_head, **_window_fields(name, model.sliding_window)}


def _plainest(model: ModelConfig) -> str:
    latents = model.attention == "mla" and not model.qkv_bias and model.norm_eps == LATENT_NORM_EPS
    if latents and not model.sliding_window:
        return "DeepseekV3ForCausalLM"
    if model.attention == "gqa" and not (model.qkv_bias and model.qk_norm):
        plain = "Mistral" if model.sliding_window else "Llama"
        return f"{'Qwen2' if model.qkv_bias else 'Qwen3' if model.qk_norm else plain}ForCausalLM"
    keys = ("attention", "qkv_bias", "qk_norm", "norm_eps", "sliding_window")
    has = ", ".join(f"model.{key}={getattr(model, key)!r}" for key in keys)
    raise ConfigError(
        f"no architecture of transformers that is known here has {has} together: Qwen3 has norms and no biases, "
        f"Qwen2 biases and no norms, DeepSeek no biases, no window and norm_eps={LATENT_NORM_EPS}"
    )


def with_window(config: Mapping[str, Any], described: Described, model: ModelConfig) -> dict[str, Any]:
    """A config.json that was described, with the model's window."""
    if described.model["sliding_window"] == model.sliding_window:
        return dict(config)
    old = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
    rest = {key: value for key, value in config.items() if key not in old}
    return rest | _window_fields(described.architecture, model.sliding_window)


def _window_fields(architecture: str, window: int) -> dict[str, Any]:
    if architecture == "MistralForCausalLM":
        return {"sliding_window": window or None}
    if architecture.startswith("Qwen"):
        used = {"sliding_window": window, "max_window_layers": 0} if window else {}
        return {"use_sliding_window": bool(window), **used}
    if window:
        raise ConfigError(f"model.sliding_window={window} has no place in a {architecture}; use model.sliding_window=0")
    return {}


def differing_keys(described: Described, model: ModelConfig) -> list[str]:
    """Keys of `model` in which it is not the one that is described, but for those of context extension."""
    fixed = {key: value for key, value in described.model.items() if not key.startswith(("rope_", "sliding_window"))}
    return [key for key, value in fixed.items() if getattr(model, key) != value]


def same_rope(described: Described, model: ModelConfig) -> bool:
    """Whether the model rotates as the one that is described."""
    keys = {key: value for key, value in described.model.items() if key.startswith("rope_")}
    other = rope_of(dataclasses.replace(model, **keys))
    mine = rope_of(model)
    same_angles = (other.frequencies() == mine.frequencies()).all()
    return bool(same_angles) and (other.temperature(), other.magnitude) == (mine.temperature(), mine.magnitude)


def check_own_keys(overrides: list[str]) -> None:
    """Raise ConfigError where a key is set that the folder's config.json says."""
    wrong = [key for key in overrides if key.startswith("model.") and key.removeprefix("model.") not in OWN_KEYS]
    if wrong:
        own = ", ".join(f"--config.model.{key}" for key in OWN_KEYS)
        raise ConfigError(f"--config.{wrong[0]} is what the folder's config.json says; of the model set {own}")
