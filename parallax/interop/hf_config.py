"""The config.json of Hugging Face's `transformers`, read as a section `model` and written from one.

Every field is read by its meaning in its architecture: it becomes a key, must have the one value that is computed here,
or is on a list of those that change no number. Any other field is refused by name.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from parallax.config.sections import ModelConfig
from parallax.model.rope import rope_of
from parallax.runtime.errors import LARGEST_INT32, QUOTED_LETTERS, ConfigError, shown

NEEDED: Any = object()  # the default of a field that must be there
LARGEST_NUMBER = 1e30  # far beyond what a model has; what is computed of it is still a float
# How a model is computed, and not which model it is: what no config.json says.
OWN_KEYS = ("dtype", "kernel", "dropout", "vocab_multiple")
SIZES = {  # by key of the section
    "vocab": "vocab_size",
    "layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "heads": "num_attention_heads",
}
DEFAULT_WINDOW, FULL_LAYERS = 4096, 28  # of sliding_window and max_window_layers where they are absent
FULL = "full_attention"
LATENT_NORM_EPS = 1e-6  # of the norms inside DeepSeek's attention, which rms_norm_eps does not reach
# Fields about the file itself, text generation, training, initial values, caches, kernels, and how other programs run
# the model.
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
# Fields that would change what is computed, and the values that do not.
AT_DEFAULT = {
    **dict.fromkeys(
        ["rope_interleaved", "qk_layer_norms", "use_qk_norm", "add_cross_attention", "tie_encoder_decoder"], (False,)
    ),
    **dict.fromkeys(["hidden_dropout", "resid_pdrop", "embd_pdrop"], (0,)),
    "use_bias": (False,),
    "activation": ("swiglu", "silu"),
    "cross_attention_hidden_size": (),
    "pruned_heads": ({},),
}
FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")  # that predict more than the next token
# Fields of experts, where no layer has any.
EXPERT_FIELDS = (
    "n_routed_experts n_shared_experts num_experts num_local_experts num_experts_per_tok moe_intermediate_size "
    "moe_layer_freq n_group topk_group topk_method norm_topk_prob routed_scaling_factor scoring_func aux_loss_alpha "
    "seq_aux ep_size output_router_logits router_aux_loss_coef"
)


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10_000.0  # where none is written
# Where other programs say how weights are quantized, and what of it changes no number: how these weights are multiplied
# elsewhere, which were left as they are, and how scales were rounded.
OTHER_QUANTIZATION = ("compression_config", "quantization")
HARMLESS_QUANTIZATION = "activation_scheme modules_to_not_convert ignored_layers scale_fmt dequantize run_compressed"
SUPPORTED_WEIGHTS = "'fp8' in blocks, or weights in float32, bfloat16 or float16: take the model that it was made of"

ScaleBlock = tuple[int, int]  # rows and columns of a float8 matrix that share a scale


# ---- a JSON object, field by field


class Fields:
    """A JSON object of which each field is taken once; `end` refuses those that are left.

    A null field counts as absent. `where` names the object in errors.

    >>> fields = Fields("config.json", {"hidden_size": 64, "hidden_act": "gelu"})
    >>> fields.whole("hidden_size")
    64
    >>> fields.only("hidden_act", "silu", absent="silu")
    Traceback (most recent call last):
    parallax.runtime.errors.ConfigError: config.json: hidden_act='gelu' is not supported; supported: 'silu'
    """

    def __init__(self, where: str, content: Mapping[str, Any]):
        self.where, self.left, self._known = where, dict(content), set()  # `left`: not taken yet
        self.notes: list[str] = []  # what users should know of fields that were taken

    def within(self, name: str, content: Mapping[str, Any]) -> "Fields":
        """The fields of an object inside this one, with the same notes."""
        inner = Fields(f"{self.where}: {name}", content)
        inner.notes = self.notes
        return inner

    def take(self, name: str, absent: Any = NEEDED) -> Any:
        """The value as it is."""
        self._known.add(name)
        value = self.left.pop(name, None)
        if value is not None:
            return value
        if absent is NEEDED:
            raise ConfigError(f"{self.where} has no {name}; add it, as the model's authors have it")
        return absent

    def whole(self, name: str, absent: Any = NEEDED, least: int = 1) -> Any:
        """A whole number of at least `least`, and an int32."""
        value = self.take(name, absent)
        if value is absent:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_INT32:
            self.refuse(name, value, f"a whole number of {least} or more, and at most {LARGEST_INT32}")
        return value

    def number(self, name: str, absent: Any = NEEDED, *, zero: bool = False) -> Any:
        """A number above 0, or from 0 on, and at most LARGEST_NUMBER, as a float."""
        value = self.take(name, absent)
        if value is absent:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_NUMBER:
            self.refuse(name, value, f"a number from 0 to {LARGEST_NUMBER}")
        if value == 0 and not zero:
            self.refuse(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str, absent: Any = NEEDED) -> Any:
        """True or false."""
        value = self.take(name, absent)
        if not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        """A JSON object; an empty one if it is absent."""
        value = self.take(name, {})
        if not isinstance(value, dict):
            self.refuse(name, value, "an object")
        return value

    def only(self, name: str, *supported: Any, absent: Any = NEEDED) -> Any:
        """One of the values that are supported; what `absent` stands for must be one, too."""
        was_there = self.left.get(name) is not None
        value = self.take(name, absent)
        # 1 == True to Python; a zero may be written as a float.
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in supported):
            self.refuse(name, value, " or ".join(map(_json, supported)), absent=not was_there)
        return value

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that change nothing that is computed."""
        for name in names:
            self._known.add(name)
            self.left.pop(name, None)

    def pass_over(self, name: str, why: str) -> None:
        """A field that is not read; where it is there, a note says so."""
        value = self.take(name, None)
        if value is not None:
            self.notes.append(f"{self.where}: {name}={value!r:.100} is passed over: {why}")

    def end(self) -> None:
        """Raise ConfigError where a field that is not null was not taken."""
        left = [name for name, value in self.left.items() if value is not None]
        if left:
            close = difflib.get_close_matches(left[0][:QUOTED_LETTERS], self._known, n=1, cutoff=0.8)
            raise ConfigError(
                f"{self.where}: {shown(left[0])}={self.left[left[0]]!r:.100} is not supported, for what it does is not "
                f"known; {f'did you mean {close[0]!r}?' if close else 'if it changes nothing, remove it'}"
            )

    def refuse(self, name: str, value: Any, supported: str, *, absent: bool = False) -> None:
        """Raise ConfigError about a value."""
        how = f"{name} is absent, which stands for {_json(value)}, and" if absent else f"{name}={value!r:.100}"
        raise ConfigError(f"{self.where}: {how} is not supported; supported: {supported}")


def _json(value: Any) -> str:
    return "null" if value is None else repr(value)


class HfConfig(NamedTuple):
    """A config.json, read."""

    architecture: str
    model: dict[str, Any]  # keys of the section
    context: int  # tokens
    interleaved: bool  # whether rotated pairs are neighbours in the weights' rows
    block: ScaleBlock | None  # of float8 weights
    further_layers: int  # after the model's own, for multi-token prediction
    notes: tuple[str, ...]  # for the user


class Architecture(NamedTuple):
    """A model class of `transformers`; `read` reads the fields of its attention."""

    model_type: str
    read: Callable[[Fields, dict[str, Any]], dict[str, Any]]
    context: int  # tokens, where max_position_embeddings is absent
    interleaved: Callable[[Fields], bool] = lambda fields: False


def read_config(content: Mapping[str, Any]) -> HfConfig:
    """Read the object of a config.json.

    Raises:
        ConfigError: an architecture, a field or a value that is not supported, by name.
    """
    fields = Fields("config.json", content)
    names = fields.take("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in tuple(ARCHITECTURES):
        fields.refuse("architectures", names, ", ".join(f"['{name}']" for name in ARCHITECTURES))
    kind = ARCHITECTURES[names[0]]
    fields.only("model_type", kind.model_type, absent=kind.model_type)
    block = _read_quantization(fields)
    model = {
        **{key: fields.whole(name, least=2 if key == "vocab" else 1) for key, name in SIZES.items()},
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
    model |= _read_rope(fields, context, model["attention"])
    interleaved = kind.interleaved(fields)
    further = max(fields.whole(name, 0, least=0) for name in FURTHER_LAYERS)
    for field, values in AT_DEFAULT.items():
        fields.only(field, None, *values, absent=None)
    fields.ignore(HARMLESS.split())
    fields.end()
    notes = (*fields.notes, *_notes(model, block, further))
    return HfConfig(names[0], model, context, interleaved, block, further, notes)


def _notes(model: Mapping[str, Any], block: ScaleBlock | None, further: int) -> Iterator[str]:
    if model["sliding_window"]:
        yield (
            f"sliding_window={model['sliding_window']} hides nothing from windows that are no longer: it is kept as "
            "model.sliding_window, and a longer data.seq is refused"
        )
    if block:
        yield f"float8 weights become float32, each block of {block[0]} x {block[1]} times its scale"
    if further:
        yield f"{further} layer{'s' * (further > 1)} for multi-token prediction, behind the model's, left out"


# ---- grouped-query attention


def _heads(fields: Fields, model: Mapping[str, Any], *, kv_heads: Any = NEEDED, d_head: Any = None) -> dict[str, Any]:
    """Keys of GQA. Where head_dim is absent it is `d_head`, or follows from d_model if that is None."""
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
    """Tokens of the window; 0 where it is null, the default of `transformers` where it is absent."""
    absent = None if "sliding_window" in fields.left else DEFAULT_WINDOW
    return fields.whole("sliding_window", absent) or 0


def _window_of_some(fields: Fields, layers: int) -> int:
    """Qwen's window, which needs use_sliding_window, in layers from max_window_layers on or by layer_types."""
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
    fields.ignore(EXPERT_FIELDS.split())
    fields.only("attention_bias", False, absent=False)
    fields.only("num_key_value_heads", model["heads"], absent=model["heads"])
    if model["norm_eps"] != LATENT_NORM_EPS:
        fields.refuse("rms_norm_eps", model["norm_eps"], f"{LATENT_NORM_EPS}, which the norms of the latents have")
    d_head, d_rope = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    fields.only("v_head_dim", d_head)
    fields.ignore(["head_dim", "qk_head_dim"])  # follow from these
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


# ---- rotary embedding


def _read_rope(fields: Fields, context: int, attention: str) -> dict[str, Any]:
    """The keys model.rope_*; `context` is max_position_embeddings.

    Both forms are read: rope_theta and rope_scaling side by side, or all in rope_parameters.
    """
    theta = fields.number("rope_theta", DEFAULT_THETA)
    new, old = fields.object("rope_parameters"), fields.object("rope_scaling")
    if new and old:
        raise ConfigError(f"{fields.where} has rope_parameters and rope_scaling; leave the one that is meant")
    scaling = fields.within("rope_parameters" if new else "rope_scaling", new or old)
    kind = scaling.take("rope_type", scaling.take("type", "default"))
    if kind not in ROPE_TYPES:
        scaling.refuse("rope_type", kind, ", ".join(map(repr, ROPE_TYPES)))
    for each in (fields, scaling):
        each.only("partial_rotary_factor", 1, absent=1)
    found = {
        "rope_theta": scaling.number("rope_theta", theta),
        "rope_scaling": "none" if kind == "default" else kind,
        "rope_factor": 1.0,
        "rope_original_seq": context,
        "rope_fast_turns": 32.0,
        "rope_slow_turns": 1.0,
        "rope_temperature": 0.0,
        "rope_magnitude": 1.0,
    }
    if kind == "linear":
        scaling.ignore(["original_max_position_embeddings"])
        found["rope_factor"] = _factor(scaling)
    if kind == "llama3":
        found["rope_factor"] = _factor(scaling)
        found["rope_original_seq"] = scaling.whole("original_max_position_embeddings", context)
        found["rope_fast_turns"] = scaling.number("high_freq_factor")
        found["rope_slow_turns"] = scaling.number("low_freq_factor")
    if kind == "yarn":
        found |= _read_yarn(scaling, context, attention)
    scaling.end()
    return found


def _read_yarn(scaling: Fields, context: int, attention: str) -> dict[str, Any]:
    original = scaling.whole("original_max_position_embeddings", context)
    factor = _factor(scaling, max(context / original, 1.0))
    given = scaling.number("attention_factor", 0.0)
    own, all_dims = (scaling.number(name, 0.0, zero=True) for name in ("mscale", "mscale_all_dim"))
    scale = lambda weight: 0.1 * weight * math.log(factor) + 1  # noqa: E731
    magnitude = given or (scale(own) / scale(all_dims) if own and all_dims else scale(1.0))
    scaling.only("truncate", True, absent=True)
    scaling.ignore(["finetuned"])
    scaling.pass_over("attn_factor", "transformers reads attention_factor, and does without where it is absent")
    found = {
        "rope_factor": factor,
        "rope_original_seq": original,
        "rope_fast_turns": scaling.number("beta_fast", 32.0),
        "rope_slow_turns": scaling.number("beta_slow", 1.0),
    }
    if attention == "mla":  # only a part of a head is rotated: the magnitude is the part's, the temperature the head's
        return found | {"rope_magnitude": magnitude, "rope_temperature": scale(all_dims) ** 2 if all_dims else 1.0}
    return found | {"rope_temperature": magnitude**2}


def _factor(scaling: Fields, absent: Any = None) -> float:
    factor = scaling.number("factor") if absent is None else scaling.number("factor", absent)
    if factor < 1:
        scaling.refuse("factor", factor, "1 or more")
    return factor


def rope_json(model: ModelConfig) -> dict[str, Any]:
    """rope_theta and, where there is one, rope_scaling, as all versions of `transformers` read them.

    Raises:
        ConfigError: these fields cannot say what the model does.
    """
    rope = rope_of(model)
    temperature = rope.temperature()
    if rope.scaling != "yarn" and (temperature != 1 or rope.magnitude != 1):
        raise ConfigError(
            f"model.rope_temperature={model.rope_temperature:g} and rope_magnitude={rope.magnitude:g} have no place in "
            f"a config.json with model.rope_scaling={rope.scaling!r}; use 0 and 1.0, or rope_scaling='yarn'"
        )
    if rope.scaling == "none":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = rope.original_seq
    if rope.scaling == "llama3":
        scaling |= {"low_freq_factor": rope.slow_turns, "high_freq_factor": rope.fast_turns}
    if rope.scaling == "yarn":
        scaling |= {"beta_fast": rope.fast_turns, "beta_slow": rope.slow_turns, "attention_factor": rope.magnitude}
        if model.attention == "gqa":
            scaling["attention_factor"] *= math.sqrt(temperature)
        elif temperature != 1:
            if temperature < 1 or rope.factor == 1:
                raise ConfigError(
                    f"model.rope_temperature={temperature:g} with rope_factor={rope.factor:g} has no place in a "
                    "config.json; use 1 or more, with a rope_factor above 1"
                )
            weight = (math.sqrt(temperature) - 1) / (0.1 * math.log(rope.factor))
            scaling |= {"mscale": weight, "mscale_all_dim": weight}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def context_of(model: ModelConfig, known: int) -> int:
    """max_position_embeddings: `known`, but for yarn, whose factor some versions of `transformers` take from it."""
    return round(model.rope_original_seq * model.rope_factor) if model.rope_scaling == "yarn" else known


# ---- quantized weights


def _read_quantization(fields: Fields) -> ScaleBlock | None:
    """The blocks of float8 weights, None where weights are not quantized; ConfigError for another quantization."""
    for name in OTHER_QUANTIZATION:
        if other := fields.object(name):
            fields.refuse(name, other, SUPPORTED_WEIGHTS)
    content = fields.object("quantization_config")
    if not content:
        return None
    inner = fields.within("quantization_config", content)
    bitsandbytes = content.get("load_in_4bit") or content.get("load_in_8bit")
    method = inner.take("quant_method", "bitsandbytes" if bitsandbytes else None)
    if method != "fp8":
        inner.refuse("quant_method", method, SUPPORTED_WEIGHTS)
    inner.only("fmt", "e4m3", absent="e4m3")
    block = inner.take("weight_block_size", None)
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        inner.refuse("weight_block_size", block, "two whole numbers, as [128, 128]")
    inner.ignore(HARMLESS_QUANTIZATION.split())
    inner.end()
    return sizes[0], sizes[1]


# ---- written


def write_config(model: ModelConfig, seq: int) -> dict[str, Any]:
    """A config.json for a model that was trained on windows of `seq`, of the plainest architecture that computes it.

    Raises:
        ConfigError: none does.
    """
    name = _plainest(model)
    content = {
        "architectures": [name],
        "model_type": ARCHITECTURES[name].model_type,
        **{name: getattr(model, key) for key, name in SIZES.items()},
        "num_key_value_heads": model.heads if model.attention == "mla" else model.kv_heads,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "max_position_embeddings": context_of(model, seq),
        **rope_json(model),
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


def with_window(content: Mapping[str, Any], config: HfConfig, model: ModelConfig) -> dict[str, Any]:
    """The object of a config.json, with the model's window."""
    if config.model["sliding_window"] == model.sliding_window:
        return dict(content)
    old = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
    rest = {key: value for key, value in content.items() if key not in old}
    return rest | _window_fields(config.architecture, model.sliding_window)


def _window_fields(architecture: str, window: int) -> dict[str, Any]:
    if architecture == "MistralForCausalLM":
        return {"sliding_window": window or None}
    if architecture.startswith("Qwen"):
        used = {"sliding_window": window, "max_window_layers": 0} if window else {}
        return {"use_sliding_window": bool(window), **used}
    if window:
        raise ConfigError(f"model.sliding_window={window} has no place in a {architecture}; use model.sliding_window=0")
    return {}


def differing_keys(config: HfConfig, model: ModelConfig) -> list[str]:
    """Keys in which a model differs from a config.json, but for those of context extension."""
    fixed = {key: value for key, value in config.model.items() if not key.startswith(("rope_", "sliding_window"))}
    return [key for key, value in fixed.items() if getattr(model, key) != value]


def same_rope(config: HfConfig, model: ModelConfig) -> bool:
    """Whether a model's rotary embedding is that of a config.json."""
    keys = {key: value for key, value in config.model.items() if key.startswith("rope_")}
    other = rope_of(replace(model, **keys))
    mine = rope_of(model)
    same_angles = (other.frequencies() == mine.frequencies()).all()
    return bool(same_angles) and (other.temperature(), other.magnitude) == (mine.temperature(), mine.magnitude)


def check_own_keys(overrides: list[str]) -> None:
    """Raise ConfigError where a key is set that the folder's config.json says."""
    wrong = [key for key in overrides if key.startswith("model.") and key.removeprefix("model.") not in OWN_KEYS]
    if wrong:
        own = ", ".join(f"--config.model.{key}" for key in OWN_KEYS)
        raise ConfigError(f"--config.{wrong[0]} is what the folder's config.json says; of the model set {own}")
