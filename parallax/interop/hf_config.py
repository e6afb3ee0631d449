"""The config.json of Hugging Face's `transformers`, read as a section `model` and written from one.

Every field is read by its meaning in its architecture: it becomes a key, must have the one supported value, or is on a
list of fields that do not change results. Any other field is refused by name.
"""

import dataclasses
import difflib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from parallax.config.sections import BASE, LAYER_KINDS, LONGROPE, ModelConfig
from parallax.errors import LARGEST_INT32, QUOTED_LETTERS, ConfigError, shown
from parallax.interop.hf_architectures import (
    ABSENT_FIELDS,
    ARCHITECTURES,
    DIFFERING,
    HIDDEN_ACT,
    HIDDEN_ACTIVATION,
    INVERSE,
    LANGUAGE_MODELS,
    NULL_IS_ZERO,
    PLAIN_CHOICES,
    SILU,
    TIMES_D_EXPERT,
    WINDOWED,
    WORDS,
    Architecture,
    LanguageModel,
    Mixture,
)
from parallax.model.rope import Rope
from parallax.user_code import settings_text

NEEDED: Any = object()  # the default of a required field
LARGEST_NUMBER = 1e30  # far beyond any model; values computed from it are still finite floats
# Keys about how a model is computed, which are not in a config.json.
OWN_KEYS = ("dtype", "kernel", "dropout", "vocab_multiple")
TYPES = {key.name: key.type for key in dataclasses.fields(ModelConfig)}
# Fields of rope_scaling by its type, besides the factor.
ORIGINAL_CONTEXT = {"original_max_position_embeddings": "rope_original_seq"}
DEFAULT_ROPE, OLD_LONGROPE = "default", ("su", "yarn")  # words of rope_type; the last are Phi-3's, of the first files
DYNAMIC, ALPHA = "dynamic", "alpha"  # the word, and a field beside it, of a rope_theta that is stretched once for all
BESIDE_ALPHA = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # which transformers does not read then
ROPE_FIELDS = {
    DEFAULT_ROPE: {},
    "linear": {},
    "llama3": ORIGINAL_CONTEXT | {"high_freq_factor": "rope_fast_turns", "low_freq_factor": "rope_slow_turns"},
    "yarn": ORIGINAL_CONTEXT | {"beta_fast": "rope_fast_turns", "beta_slow": "rope_slow_turns"},
    LONGROPE: ORIGINAL_CONTEXT,
}
ROPE_SCALING = "rope_scaling"  # the field
FACTORS = {"short_factor": "rope_short_factors", "long_factor": "rope_long_factors"}  # lists there, texts here
YARN_TURNS = {"beta_fast": 32.0, "beta_slow": 1.0}  # if they are absent
DEFAULT_WINDOW, FULL_LAYERS = 4096, 28  # of sliding_window and max_window_layers if they are absent
FULL, SLIDING = "full_attention", "sliding_attention"
PERIOD = "sliding_window_pattern"  # every layer of this number has no window
LOCAL_THETA = "rope_local_base_freq"  # rope_theta of layers with a window, of architectures with a default of it
# Words for kinds of layers: with a window, if others have none; without rotation, if others have it.
LOCAL, UNROTATED = "local", "nope"
# Keys that say all of a rotary embedding whose context is not extended.
PLAIN_ROPE = ("rope_theta", "rope_scaling", "rope_factor", "rope_truncate", "rope_temperature", "rope_magnitude")
PLAIN_ROPE += tuple(FACTORS.values())
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
# Fields that could change results, with the values that do not; the first one is the default of an absent field.
AT_DEFAULT = {
    **dict.fromkeys(
        ["rope_interleaved", "qk_layer_norms", "use_qk_norm", "add_cross_attention", "tie_encoder_decoder"],
        (None, False),
    ),
    "activation": (None, "swiglu", "silu"),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": (None, {}),
}
BIASES = ("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias", "lm_head_bias")
# Of training alone, so that they are left out with a note.
DROPOUTS = ("attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout", "resid_pdrop", "embd_pdrop")
FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")  # layers that predict more than the next token
# Fields of experts, ignored if no layer has experts; and fields about their training or placement.
EXPERT_FIELDS = (
    "n_routed_experts n_shared_experts num_experts num_local_experts num_experts_per_tok moe_intermediate_size "
    "moe_layer_freq n_group topk_group topk_method norm_topk_prob routed_scaling_factor scoring_func"
)
BALANCE_FIELDS = "aux_loss_alpha seq_aux ep_size output_router_logits router_aux_loss_coef"
MOST_LAYERS = 2**14  # more are refused as model.layers
ROPE_DEFAULTS = {key.name: key.default for key in dataclasses.fields(ModelConfig) if key.name.startswith("rope_")}
DEFAULT_THETA = 10_000.0  # if it is absent
# Fields in which other programs describe quantization, and parts of it that do not change results: how weights are
# multiplied elsewhere, which ones are not quantized, and how scales were rounded.
OTHER_QUANTIZATION = ("compression_config", "quantization")
HARMLESS_QUANTIZATION = "activation_scheme modules_to_not_convert ignored_layers scale_fmt dequantize run_compressed"
SUPPORTED_WEIGHTS = "'fp8' in blocks, or weights in float32, bfloat16 or float16: use the model before quantization"

MXFP4 = "mxfp4"  # of experts alone, as gpt-oss is published

ScaleBlock = tuple[int, int]  # rows and columns of a float8 matrix that share a scale


# ---- a JSON object, field by field


class Fields:
    """A JSON object whose fields are each taken once; `end` refuses the remaining ones.

    A null field counts as absent. `where` names the object in errors.

    >>> fields = Fields("config.json", {"hidden_size": 64, "hidden_act": "gelu"})
    >>> fields.read("hidden_size", int)
    64
    >>> fields.only("hidden_act", "silu")
    Traceback (most recent call last):
    parallax.errors.ConfigError: config.json: hidden_act='gelu' is not supported; supported: 'silu'
    """

    def __init__(self, where: str, content: Mapping[str, Any], notes: list[str] | None = None):
        self.where, self.left, self._known = where, dict(content), set()  # `left`: fields not taken yet
        self.notes = [] if notes is None else notes  # notes for the user about fields
        self._written: dict[str, str] = {}  # names in the file, where they are others

    def take(self, name: str, absent: Any = NEEDED) -> Any:
        """The value without checks."""
        self._known.add(name)
        value = self.left.pop(name, None)
        if value is not None:
            return value
        if absent is NEEDED:
            raise ConfigError(f"{self.where} has no {name}; add it, with the value of the model's authors")
        return absent

    def read(self, name: str, kind: type, absent: Any = NEEDED, *, least: int = 1) -> Any:
        """A bool, an object (dict), an integer of at least `least`, or a float above 0 (or at least 0 if `least` is
        0)."""
        if self.left.get(name) is None:
            return self.take(name, absent)
        value = self.take(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is int:
            fits = number and isinstance(value, int) and least <= value <= LARGEST_INT32
            supported = f"a whole number of {least} or more, and at most {LARGEST_INT32}"
        elif kind is float:
            fits = number and 0 <= value <= LARGEST_NUMBER and (value > 0 or least == 0)
            supported = f"a number from 0 to {LARGEST_NUMBER}{', but not 0' * least}"
        else:
            fits = isinstance(value, kind)
            supported = {bool: "true or false", dict: "an object"}[kind]
        if not fits:
            self.refuse(name, value, supported)
        return kind(value)

    def read_as(self, written: str, usual: str) -> None:
        """Read a field of another name as the usual one; errors quote it as it is written."""
        if self.left.get(written) is not None:
            self.left[usual], self._written[usual] = self.take(written, None), written

    def within(self, name: str) -> "Fields":
        """The fields of an object inside this one, with the same notes; none if it is absent."""
        return Fields(f"{self.where}: {name}", self.read(name, dict, {}), self.notes)

    def only(self, name: str, *supported: Any) -> None:
        """Take a field that must have one of the supported values; the first is the default of an absent field."""
        value = self.take(name, supported[0])
        # 1 == True in Python; a zero may be written as a float.
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in supported):
            self.refuse(name, value, " or ".join(map(_in_json, supported)))

    def ignore(self, names: Iterable[str]) -> None:
        """Take fields that do not change results."""
        for name in names:
            self.take(name, None)

    def end(self) -> None:
        """Raise ConfigError if a field that is not null was not taken."""
        left = [name for name, value in self.left.items() if value is not None]
        if left:
            close = difflib.get_close_matches(left[0][:QUOTED_LETTERS], self._known, n=1, cutoff=0.8)
            raise ConfigError(
                f"{self.where}: {shown(left[0])}={self.left[left[0]]!r:.100} is not supported because its meaning is "
                f"unknown; {f'did you mean {close[0]!r}?' if close else 'if it changes nothing, remove it'}"
            )

    def refuse(self, name: str, value: Any, supported: str) -> NoReturn:
        """Raise ConfigError about a value."""
        written = self._written.get(name, name)
        raise ConfigError(f"{self.where}: {written}={value!r:.100} is not supported; supported: {supported}")


def _in_json(value: Any) -> str:
    return "null" if value is None else repr(value)


class HfConfig(NamedTuple):
    """The content of a config.json."""

    architecture: str
    model: dict[str, Any]  # keys of the section
    context: int  # tokens
    interleaved: bool  # whether rotated pairs are neighbours in the weights' rows
    block: ScaleBlock | None  # of float8 weights
    mxfp4: bool  # whether experts' kernels are in that format
    further_layers: int  # after the model's own, for multi-token prediction
    notes: tuple[str, ...]  # for the user
    part: LanguageModel | None = None  # where it is, if it is a part of a model


# ---- read


def read_config(content: Mapping[str, Any]) -> HfConfig:
    """Read the object of a config.json.

    Raises:
        ConfigError: an architecture, a field or a value that is not supported, by name.
    """
    fields = Fields("config.json", content)
    names = fields.take("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in tuple(ARCHITECTURES):
        supported = ", ".join(f"['{name}']" for name in ARCHITECTURES)
        why = next((f"; {why}" for name, why in DIFFERING.items() if names == [name]), "")
        fields.refuse("architectures", names, f"{supported}{why}")
    kind = ARCHITECTURES[names[0]]
    fields.only("model_type", kind.model_type)
    for theirs, usual in kind.renamed.items():
        fields.read_as(theirs, usual)
    block, mxfp4 = _read_quantization(fields, kind)
    model = {**kind.keys, "sliding_window": 0, "rope": True, "layers_of": "", "kinds": ""}
    absent = {**ABSENT_FIELDS, **kind.absent}
    absent |= {name: TYPES[key](0) for name, key in NULL_IS_ZERO.items() if name in fields.left}
    _read_keys(fields, kind.fields, model, absent)
    if kind.whole_heads:
        model |= {"kv_heads": model["heads"], "d_head": model["d_model"] // model["heads"]}
    if (kind.whole_heads or kind.equal_heads) and model["heads"] * model["d_head"] != model["d_model"]:
        if model["d_model"] % model["heads"]:
            fields.refuse("num_attention_heads", model["heads"], f"a divisor of hidden_size={model['d_model']}")
        fields.refuse("head_dim", model["d_head"], f"{model['d_model'] // model['heads']}, which hidden_size gives")
    if kind.root_scaled:
        model["embedding_scale"] = math.sqrt(model["d_model"])
    if model["attention"] == "mla":
        model["kv_heads"] = model["heads"]
        fields.ignore(["head_dim", "qk_head_dim"])  # derived from other fields
    if kind.mixture:
        model |= _read_mixture(fields, kind.mixture, model)
    model["activation"] = _read_activation(fields, kind, has_experts=bool(model["layers_of"]))
    model = {name: getattr(ModelConfig, name) for name in PLAIN_CHOICES} | model
    context = fields.read("max_position_embeddings", int, kind.context)
    full, local = _read_ropes(fields, kind, context, model)
    model |= full
    model |= _read_kinds(fields, kind, model, local)
    interleaved = kind.interleaved == "always"
    if kind.interleaved not in ("always", "never"):
        interleaved = fields.read(kind.interleaved, bool, True)
    further = max(fields.read(name, int, 0, least=0) for name in FURTHER_LAYERS)
    fields.ignore([*HARMLESS.split(), *kind.ignored])
    _refuse_other_biases(fields, kind)
    _leave_out_dropouts(fields)
    for name, values in {**AT_DEFAULT, **kind.only}.items():
        fields.only(name, *values)
    fields.end()
    notes = (*fields.notes, *_notes(model, block, mxfp4, further))
    return HfConfig(names[0], model, context, interleaved, block, mxfp4, further, notes)


def language_model(content: Mapping[str, Any]) -> tuple[dict[str, Any], LanguageModel | None]:
    """The object of a config.json; of a model that also reads pictures that of its language model, and where this is.

    Raises:
        ConfigError: such a model has no text_config.
    """
    names = content.get("architectures")
    part = next((about for name, about in LANGUAGE_MODELS.items() if names == [name]), None)
    if part is None:
        return dict(content), None
    fields = Fields("config.json", content)
    fields.only("model_type", part.model_type)
    fields.ignore(["architectures", *part.ignored])
    text = fields.read("text_config", dict)
    written = {name: value for name, value in text.items() if value is not None}
    return {**text, **fields.left, **written, "architectures": [part.architecture]}, part


def _read_keys(fields: Fields, names: Mapping[str, str], model: dict[str, Any], absent: Mapping[str, Any]) -> None:
    """Add keys to a model from the fields in `names`, in this order; a default that is a text is the key with it."""
    for name, key in names.items():
        default = absent.get(name, NEEDED)
        if name == "head_dim" and default is NEEDED and model["d_model"] % model["heads"] == 0:
            default = model["d_model"] // model["heads"]
        default = model[default] if isinstance(default, str) else default
        if key in INVERSE:
            plain, power, _ = INVERSE[key]
            model[plain] = 1 / fields.read(name, float, default) ** (1 / power)
            continue
        first, *more = key.split()
        value = fields.read(name, bool if first in WORDS else TYPES[first], default)
        value = WORDS[first][value] if first in WORDS else value
        if model.setdefault(first, value) != value:
            fields.refuse(name, value, _in_json(model[first]))
        model |= dict.fromkeys(more, value)


def _read_activation(fields: Fields, kind: Architecture, *, has_experts: bool) -> str:
    """The key activation; of the two fields that may say it, `transformers` ignores one."""
    words = _activations(kind, has_experts=has_experts)
    name, other = kind.activation_field, {HIDDEN_ACT: HIDDEN_ACTIVATION, HIDDEN_ACTIVATION: HIDDEN_ACT}
    word = fields.take(name, next(iter(words)))
    if word not in tuple(words):
        fields.refuse(name, word, " or ".join(map(repr, words)))
    fields.only(other[name], None, *(same for same, activation in words.items() if activation == words[word]))
    return words[word]


def _activations(kind: Architecture, *, has_experts: bool) -> Mapping[str, str]:
    """The words that say an activation; in a model with experts the field is of experts, too."""
    return SILU if has_experts else kind.activations


def _refuse_other_biases(fields: Fields, kind: Architecture) -> None:
    """Refuse biases that are no key of this architecture."""
    for name in BIASES:
        if (value := fields.take(name, False)) is not False:
            why = kind.biases.get(name, f"transformers ignores the field in a {kind.model_type}")
            fields.refuse(name, value, f"false; {why}")


def _leave_out_dropouts(fields: Fields) -> None:
    for name in DROPOUTS:
        if value := fields.read(name, float, 0.0, least=0):
            fields.notes.append(f"{fields.where}: {name}={value:g} is of training, and left out: set model.dropout")


def _read_mixture(fields: Fields, mixture: Mixture, model: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of layers with experts; only `layers_of` if there are none."""
    fields.ignore(BALANCE_FIELDS.split())
    experts = next(iter(mixture.fields))
    if fields.left.get(experts) is None and mixture.other_name in fields.left:
        fields.left[experts] = fields.take(mixture.other_name)
    layers = _read_layers(fields, mixture, model["layers"])
    if mixture.dense == "some" and fields.left.get(experts) == 0:
        layers = ""
    if not layers:
        fields.ignore(EXPERT_FIELDS.split())
        return {"layers_of": layers}
    keys = dict(mixture.keys)
    for name, value in mixture.only.items():
        fields.only(name, value)
    if mixture.methods:
        keys |= _read_method(fields)
    known = {**mixture.absent, **dict.fromkeys({"n_group", "topk_group"} & fields.left.keys(), 1)}  # null is none
    known["intermediate_size"] = model["d_ff"]  # which was taken
    for name, key in mixture.fields.items():
        if key in TIMES_D_EXPERT:
            width = fields.read(name, int, known.get(name, NEEDED), least=0)
            if width % keys["d_expert"]:
                fields.refuse(name, width, f"a multiple of the experts' {keys['d_expert']}")
            keys["shared_experts"] = width // keys["d_expert"]
            continue
        keys[key] = fields.read(name, TYPES[key], known.get(name, NEEDED), least=int(key != "shared_experts"))
    fields.only(mixture.other_name, None, keys["experts"])
    return {"layers_of": layers} | keys


def _read_layers(fields: Fields, mixture: Mixture, layers: int) -> str:
    """The key layers_of."""
    layers = min(layers, MOST_LAYERS)
    if mixture.dense == "first":
        dense = fields.read("first_k_dense_replace", int, mixture.absent["first_k_dense_replace"], least=0)
        return layers_of(["dense" if layer < dense else "moe" for layer in range(layers)])
    if not mixture.dense:
        return layers_of(["moe"] * layers)
    step, dense = fields.read("decoder_sparse_step", int, 1), fields.take("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        fields.refuse("mlp_only_layers", dense, "a list of layers")
    without = {*dense}
    return layers_of(["dense" if layer in without or (layer + 1) % step else "moe" for layer in range(layers)])


def _read_method(fields: Fields) -> dict[str, int]:
    """The keys of groups of DeepSeek-V2's router."""
    method = fields.take("topk_method", "greedy")
    if method == "greedy":
        fields.ignore(["n_group", "topk_group"])
        return {"router_groups": 1, "router_groups_chosen": 1}
    if method != "group_limited_greedy":
        fields.refuse("topk_method", method, "'greedy' or 'group_limited_greedy'")
    return {"router_groups": fields.read("n_group", int), "router_groups_chosen": fields.read("topk_group", int)}


def layers_of(kinds: Sequence[str]) -> str:
    """The key layers_of for layers of these kinds; empty if all are dense.

    >>> layers_of(["dense", "moe", "moe"]), layers_of(["dense", "moe"] * 3), layers_of(["dense"])
    ('dense moe*2', '(dense moe)*3', '')
    """
    if set(kinds) == {"dense"}:
        return ""
    whole, count = _runs(kinds), len(kinds)
    sizes = (size for size in range(2, count // 2 + 1) if count % size == 0)
    periods = (size for size in sizes if [*kinds] == [*kinds[:size]] * (count // size))
    period = next(periods, 0) if " " in whole else 0
    return f"({_runs(kinds[:period])})*{count // period}" if period else whole


def _runs(kinds: Sequence[str]) -> str:
    counts = ((kind, len([*run])) for kind, run in itertools.groupby(kinds))
    return " ".join(kind + f"*{count}" * (count > 1) for kind, count in counts)


def _read_kinds(
    fields: Fields, kind: Architecture, model: Mapping[str, Any], local: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys of windows and of what differs between layers; `local` are rotary keys of layers with a window."""
    count = min(model["layers"], MOST_LAYERS)
    rotated = _read_rotated(fields, kind.rotated_layers, count) if kind.rotated_layers not in ("", WINDOWED) else []
    windows = _read_windows(fields, kind, count, rotated) if kind.windows else [0] * count
    if kind.rotated_layers == WINDOWED:
        rotated = [bool(window) for window in windows]
    differing: list[dict[str, Any]] = []
    for window, rotates in itertools.zip_longest(windows, rotated, fillvalue=True):
        differing.append({"sliding_window": window, **local} if window else {})
        differing[-1] |= {} if rotates else {"rope": False}
    if all(each == differing[0] for each in differing):
        return differing[0]
    bases = ModelConfig(layers=count, layers_of=model["layers_of"]).named_kinds
    kinds, names = {}, []
    for base, settings in zip(bases, differing):
        words = [LOCAL] * ("sliding_window" in settings) + [UNROTATED] * ("rope" in settings)
        names.append("_".join([*([base] * (len({*bases}) > 1)), *words]) if words else base)
        if words:
            kinds[names[-1]] = ({BASE: base} if base != LAYER_KINDS[0] else {}) | settings
    return {"layers_of": layers_of(names), "kinds": settings_text(kinds)}


def _read_rotated(fields: Fields, name: str, count: int) -> list[bool]:
    """Whether each layer is rotated: a 1, or without the list all layers but each so-many-th."""
    every = fields.read("no_rope_layer_interval", int, 4)
    each = fields.take(name, None)
    if each is None:
        return [bool((layer + 1) % every) for layer in range(count)]
    if not isinstance(each, list) or len(each) < count or not all(value in (0, 1) for value in each):
        fields.refuse(name, each, f"0 or 1 for each of num_hidden_layers={count}")
    return [bool(value) for value in each[:count]]


def _read_windows(fields: Fields, kind: Architecture, count: int, rotated: Sequence[bool]) -> list[int]:
    """The window of each layer, 0 for none. If only some have one, layer_types says which, or if it is absent their
    order or max_window_layers."""
    absent = kind.absent.get("sliding_window", DEFAULT_WINDOW)
    least = 0 if kind.windows.endswith("if used") else 1  # where another field may say that it is not
    window = fields.read("sliding_window", int, 0 if "sliding_window" in fields.left else absent, least=least)
    fields.only("sliding_window_size", None, window)  # of the first files of Gemma 2, beside the other
    full = 0
    if kind.windows.endswith("if used"):
        window *= fields.read("use_sliding_window", bool, False)
        full = fields.read("max_window_layers", int, FULL_LAYERS, least=0)
    every = kind.full_layers
    if every and PERIOD not in kind.only:
        every = fields.read(PERIOD, int, every)
    types = fields.take("layer_types", [])
    known = (FULL, SLIDING) if window else (FULL,)
    if not isinstance(types, list) or set(map(str, types)) - {*known}:
        fields.refuse("layer_types", types, " or ".join(map(repr, known)) + " in every layer")
    if types and len(types) != count:
        fields.refuse("layer_types", types, f"one for each of num_hidden_layers={count}")
    if not window and every and not types:
        fields.refuse("sliding_window", None, "a whole number, or layer_types without a window")
    if not window or not kind.windows.startswith("some"):
        return [window] * count
    if types:
        return [window * (each == SLIDING) for each in types]
    if every:
        return [window * bool((layer + 1) % every) for layer in range(count)]
    return [window * (not rotated[layer] if rotated else layer >= full) for layer in range(count)]


def _notes(model: Mapping[str, Any], block: ScaleBlock | None, mxfp4: bool, further: int) -> Iterator[str]:
    if model["sliding_window"]:
        yield f"sliding_window={model['sliding_window']}: a token attends to so many, the last ones, in every layer"
    elif model["kinds"]:
        yield f"layers differ: model.layers_of={model['layers_of']!r}, model.kinds={model['kinds']!r}"
    if block:
        yield f"float8 weights become float32, each block of {block[0]} x {block[1]} times its scale"
    if mxfp4:
        yield "MXFP4 weights become bfloat16, which has all their values; to-hf writes these, not MXFP4"
    if further:
        yield f"{further} layer{'s' * (further > 1)} for multi-token prediction, after the model's, left out"


# ---- rotary embedding


def _read_ropes(
    fields: Fields, kind: Architecture, context: int, model: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys model.rope_* of layers without a window, and those that differ in layers with one; `context` is
    max_position_embeddings."""
    theta = kind.absent.get("rope_theta", DEFAULT_THETA)
    both = functools.partial(_read_rope, context=context, model=model, kind=kind)
    new, old = fields.within("rope_parameters"), fields.within("rope_scaling")
    if new.left and old.left:
        raise ConfigError(f"{fields.where} has rope_parameters and rope_scaling; keep the intended one")
    if not (new.left or old.left):
        old = Fields(f"{fields.where}: {ROPE_SCALING}", kind.absent.get(ROPE_SCALING, {}))
    if not kind.ropes_by_type:
        return both(fields, new if new.left else old, theta=theta), {}
    if new.left.keys() - {FULL, SLIDING}:
        fields.refuse("rope_parameters", new.left, f"an object for each of {FULL!r} and {SLIDING!r}")
    default = kind.absent.get(LOCAL_THETA)
    of_local = fields.read(LOCAL_THETA, float, default) if default else theta
    if new.left:
        both_types = zip(map(new.within, (FULL, SLIDING)), (theta, of_local))
        full, local = (both(each, each, theta=its_theta) for each, its_theta in both_types)
    else:
        none = Fields(fields.where, {})
        full, local = both(fields, old, theta=theta), both(none, none, theta=of_local)
        if full["rope_theta"] != theta and not default:
            what = f"{theta:g}, which layers with a window have; write rope_parameters of each type"
            fields.refuse("rope_theta", full["rope_theta"], what)
    names = PLAIN_ROPE if local["rope_scaling"] == "none" else tuple(local)
    return full, {name: local[name] for name in names if local.get(name) != full.get(name)}


def _read_rope(
    fields: Fields, scaling: Fields, *, context: int, model: Mapping[str, Any], theta: float, kind: Architecture
) -> dict[str, Any]:
    """The keys model.rope_*; `theta` is the default of rope_theta.

    Both forms are read: rope_theta beside rope_scaling, or all in rope_parameters; `scaling` are the fields of either.
    """
    theta = scaling.read("rope_theta", float, fields.read("rope_theta", float, theta))
    form = scaling.take("rope_type", scaling.take("type", DEFAULT_ROPE))
    if kind.scalings and form in OLD_LONGROPE:
        form = LONGROPE
    if kind.stretched_theta and form == DYNAMIC and ALPHA in scaling.left:
        form, theta = DEFAULT_ROPE, theta * scaling.read(ALPHA, float) ** (model["d_head"] / (model["d_head"] - 2))
        scaling.ignore(BESIDE_ALPHA)
    known = [name for name in ROPE_FIELDS if not kind.scalings or name in (DEFAULT_ROPE, *kind.scalings)]
    if form not in known:
        scaling.refuse("rope_type", form, ", ".join(map(repr, known)))
    keys = {"rope_theta": theta, "rope_scaling": "none" if form == DEFAULT_ROPE else form}
    if kind.rotated is None:
        for each in (fields, scaling):
            each.only("partial_rotary_factor", 1)
    else:
        part = fields.read("partial_rotary_factor", float, kind.rotated)
        keys["rope_fraction"] = scaling.read("partial_rotary_factor", float, part)
    absent = YARN_TURNS | dict.fromkeys(ORIGINAL_CONTEXT, context)
    for name in ORIGINAL_CONTEXT if form == LONGROPE else ():  # beside the others it counts more
        absent[name] = scaling.left[name] = fields.take(name, scaling.left.get(name, NEEDED))
    _read_keys(scaling, ROPE_FIELDS[form], keys, absent)
    keys = ROPE_DEFAULTS | {"rope_original_seq": context} | keys
    if form == LONGROPE:
        keys |= _read_longrope(scaling, context, keys["rope_original_seq"])
    elif form != DEFAULT_ROPE:
        extended = max(context / keys["rope_original_seq"], 1.0)
        keys["rope_factor"] = scaling.read("factor", float, extended if form == "yarn" else NEEDED)
        if keys["rope_factor"] < 1:
            scaling.refuse("factor", keys["rope_factor"], "1 or more")
    if form == "linear":
        scaling.ignore(ORIGINAL_CONTEXT)
    if form == "yarn":
        keys |= _read_yarn_strength(scaling, keys["rope_factor"], model["attention"])
    scaling.end()
    return keys


def _read_longrope(scaling: Fields, context: int, original: int) -> dict[str, Any]:
    """The keys of the factors, and rope_magnitude."""
    keys: dict[str, Any] = {}
    for name, key in FACTORS.items():
        value = scaling.take(name)
        if not isinstance(value, list) or not all(type(factor) in (int, float) for factor in value):
            scaling.refuse(name, value, "a list of numbers")
        keys[key] = " ".join(str(float(factor)) for factor in value)
    if original == 1:  # of which the usual attention_factor divides by the logarithm
        scaling.refuse(next(iter(ORIGINAL_CONTEXT)), original, "2 or more")
    factor = scaling.read("factor", float, context / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return keys | {"rope_magnitude": scaling.read("attention_factor", float, usual)}


def _read_yarn_strength(scaling: Fields, factor: float, attention: str) -> dict[str, float]:
    """The keys rope_truncate, rope_temperature and rope_magnitude."""
    given = scaling.read("attention_factor", float, 0.0)
    of_rotated, all_dims = (scaling.read(name, float, 0.0, least=0) for name in ("mscale", "mscale_all_dim"))

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1

    magnitude = given or (scale(of_rotated) / scale(all_dims) if of_rotated and all_dims else scale(1.0))
    truncate = {"rope_truncate": scaling.read("truncate", bool, True)}
    scaling.ignore(["finetuned"])
    misspelt = scaling.take("attn_factor", None)
    if misspelt is not None:
        why = "transformers reads attention_factor, and ignores this field"
        scaling.notes.append(f"{scaling.where}: attn_factor={misspelt!r:.100} is ignored: {why}")
    if attention == "mla":  # only a part of a head is rotated: the magnitude is for it, the temperature for the head
        temperature = scale(all_dims) ** 2 if all_dims else 1.0
        return truncate | {"rope_temperature": temperature, "rope_magnitude": magnitude}
    return truncate | {"rope_temperature": magnitude**2}


def rope_json(model: ModelConfig, architecture: str) -> dict[str, Any]:
    """rope_theta and, if needed, rope_scaling and partial_rotary_factor, in the form that all versions of
    `transformers` read; rope_parameters where layers differ in what that form cannot say.

    Raises:
        ConfigError: these fields cannot describe the model.
    """
    kind = ARCHITECTURES[architecture]
    full, local = _of_types(model)
    content = _rope_json(full, kind)
    if LOCAL_THETA in kind.absent and local.rope_scaling == "none":
        return content | {LOCAL_THETA: local.rope_theta}
    if not kind.ropes_by_type or (local.rope_scaling, local.rope_theta, full.rope_theta) == (
        "none",
        *[kind.absent.get("rope_theta", DEFAULT_THETA)] * 2,
    ):
        return content
    by_type = {FULL: content, SLIDING: _rope_json(local, kind)}
    return {
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": each["rope_theta"], **(each["rope_scaling"] or {})}
            for name, each in by_type.items()
        }
    }


def _of_types(model: ModelConfig) -> tuple[ModelConfig, ModelConfig]:
    """Settings of the first rotated layer without a window, and of the first with one; of another, if there is none."""
    each = model.settings_of_layers.settings
    each = [settings for settings in each if settings.rope] or each
    full = next((settings for settings in each if not settings.sliding_window), each[0])
    return full, next((settings for settings in each if settings.sliding_window), each[0])


def _rope_json(model: ModelConfig, kind: Architecture) -> dict[str, Any]:
    form, temperature = model.rope_scaling, Rope(model).temperature()
    if (form not in ("yarn", LONGROPE) and model.rope_magnitude != 1) or (form != "yarn" and temperature != 1):
        raise ConfigError(
            f"model.rope_temperature={model.rope_temperature:g} and rope_magnitude={model.rope_magnitude:g} have no "
            f"place in a config.json with model.rope_scaling={form!r}; use 0 and 1.0, or rope_scaling='yarn'"
        )
    part = {"partial_rotary_factor": model.rope_fraction} if kind.rotated else {}
    if form == "none":
        none = {"rope_type": "default"} if ROPE_SCALING in kind.absent else None
        return {"rope_theta": model.rope_theta, ROPE_SCALING: none} | part
    scaling = {"rope_type": form, "factor": model.rope_factor}
    scaling |= {name: getattr(model, key) for name, key in ROPE_FIELDS[form].items()}
    if form == LONGROPE:
        scaling |= {name: [float(word) for word in getattr(model, key).split()] for name, key in FACTORS.items()}
        scaling |= {"attention_factor": model.rope_magnitude}
        part |= dict.fromkeys(ORIGINAL_CONTEXT, model.rope_original_seq)
    if form == "yarn":
        scaling |= {"attention_factor": model.rope_magnitude} | ({} if model.rope_truncate else {"truncate": False})
        if model.attention == "gqa":
            scaling["attention_factor"] *= math.sqrt(temperature)
        elif temperature != 1:
            if temperature < 1 or model.rope_factor == 1:
                raise ConfigError(
                    f"model.rope_temperature={temperature:g} with rope_factor={model.rope_factor:g} has no place in a "
                    "config.json; use 1 or more, with a rope_factor above 1"
                )
            weight = (math.sqrt(temperature) - 1) / (0.1 * math.log(model.rope_factor))
            scaling |= {"mscale": weight, "mscale_all_dim": weight}
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling} | part


def context_of(model: ModelConfig, known: int) -> int:
    """max_position_embeddings: `known` except for yarn, whose factor some versions of `transformers` take from it."""
    full, _ = _of_types(model)
    return round(full.rope_original_seq * full.rope_factor) if full.rope_scaling == "yarn" else known


# ---- quantized weights


def _read_quantization(fields: Fields, kind: Architecture) -> tuple[ScaleBlock | None, bool]:
    """The blocks of float8 weights, None if there are none, and whether experts are in MXFP4; ConfigError for another
    quantization."""
    for name in OTHER_QUANTIZATION:
        if other := fields.within(name).left:
            fields.refuse(name, other, SUPPORTED_WEIGHTS)
    inner = fields.within("quantization_config")
    if not inner.left:
        return None, False
    bitsandbytes = inner.left.get("load_in_4bit") or inner.left.get("load_in_8bit")
    method = inner.take("quant_method", "bitsandbytes" if bitsandbytes else None)
    if method == MXFP4 and kind.columns_in_turn:
        inner.ignore(HARMLESS_QUANTIZATION.split())
        inner.end()
        return None, True
    if method != "fp8":
        inner.refuse("quant_method", method, f"{MXFP4!r}" if kind.columns_in_turn else SUPPORTED_WEIGHTS)
    inner.only("fmt", "e4m3")
    block = inner.take("weight_block_size", None)
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        inner.refuse("weight_block_size", block, "two whole numbers, as [128, 128]")
    inner.ignore(HARMLESS_QUANTIZATION.split())
    inner.end()
    return (sizes[0], sizes[1]), False


# ---- write


def write_config(model: ModelConfig, seq: int) -> dict[str, Any]:
    """A config.json for a model trained on windows of `seq`, of the simplest architecture that computes it.

    Raises:
        ConfigError: no architecture does.
    """
    name = _plainest(model)
    kind = ARCHITECTURES[name]
    of_latents = {"attention_bias": False, "q_lora_rank": model.d_latent_q or None}
    content = {
        "architectures": [name],
        "model_type": kind.model_type,
        **{field: _value_of(key, model) for field, key in kind.fields.items()},
        kind.activation_field: _word_of_activation(kind, model),
        "attention_dropout": 0.0,
        "max_position_embeddings": context_of(model, seq),
        **rope_json(model, name),
        **_layer_fields(name, model),
        **_mixture_fields(kind.mixture, model),
        **(of_latents if model.attention == "mla" else {}),
        **({"rope_interleave": True} if kind.interleaved == "rope_interleave" else {}),
        **({FURTHER_LAYERS[0]: 0} if kind.further_layers else {}),
    }
    usual = {name: theirs for theirs, name in kind.renamed.items()}
    return {usual.get(field, field): value for field, value in content.items()}


def _plainest(model: ModelConfig) -> str:
    differing = {name: [*_differing(kind, model)] for name, kind in ARCHITECTURES.items()}
    if plain := [name for name, differences in differing.items() if not differences]:
        return plain[0]
    listed = "; ".join(f"{name} has {', '.join(differences)}" for name, differences in differing.items())
    raise ConfigError(f"no supported architecture of transformers is this model: {listed}")


def _differing(kind: Architecture, model: ModelConfig) -> Iterator[str]:
    """What all models of an architecture have and this one does not."""
    kinds, mixture = model.layer_bases, kind.mixture
    if kind.scalings and model.rope_scaling not in kind.scalings:
        yield f"model.rope_scaling={' or '.join(map(repr, kind.scalings))}"
    read = " ".join([*kind.fields.values(), *(mixture.fields.values() if mixture else [])]).split()
    if "branches" in read and model.branches not in WORDS["branches"].values():
        yield f"model.branches={' or '.join(map(repr, WORDS['branches'].values()))}"
    read += ["rope_fraction"] if kind.rotated else []
    read += ["activation", *(["embedding_scale"] if kind.root_scaled else [])]
    keys = {key: getattr(ModelConfig, key) for key in (*PLAIN_CHOICES, "rope_fraction") if key not in read}
    keys |= kind.keys | (mixture.keys if mixture and "moe" in kinds else {})
    if not kind.windows and any(model.windows):
        yield "no window"
    if not kind.windows.startswith("some") and len({*model.windows}) > 1:
        yield "one window"
    if {*model.dense_widths} - {model.d_ff} or {block.d_expert for block in model.blocks.values()} - {model.d_expert}:
        yield "one width of MLPs"
    if any(block.shapes_of_heads != model.shapes_of_heads for block in model.blocks.values()):
        yield "the same heads in all layers"
    yield from _differing_ropes(kind, model)
    if kind.whole_heads:
        keys |= {"kv_heads": model.heads}
    if kind.whole_heads or kind.equal_heads:
        keys |= {"d_head": model.d_model // model.heads}
    if kind.root_scaled:
        keys |= {"embedding_scale": math.sqrt(model.d_model)}
    for first, *more in map(str.split, kind.fields.values()):
        keys |= {key: getattr(model, first) for key in more if key.isidentifier() and first.isidentifier()}
    yield from (f"model.{key}={value!r}" for key, value in keys.items() if getattr(model, key) != value)
    for key in kind.fields.values():
        if key in INVERSE and not math.isclose(_inverse(key, model), _value_of(key, model)):
            yield f"a whole number of {key}"
    activations = _activations(kind, has_experts=model.has_mixtures).values()
    if model.activation not in activations:
        yield f"model.activation={next(iter(activations))!r}"
    if "moe" in kinds:
        if mixture is None:
            yield "no experts"
        elif not mixture.dense and "dense" in kinds:
            yield "experts in every layer"
        elif mixture.dense == "first" and [*kinds] != sorted(kinds):
            yield "experts from a layer on"


def _word_of_activation(kind: Architecture, model: ModelConfig) -> str:
    words = _activations(kind, has_experts=model.has_mixtures)
    return next(word for word, activation in words.items() if activation == model.activation)


def _value_of(key: str, model: ModelConfig) -> Any:
    """The value of a field that stands for a key."""
    if key in INVERSE:
        return round(_inverse(key, model)) if INVERSE[key][-1] is int else _inverse(key, model)
    if key == "attention_scale":  # they have no default that depends on the width
        return model.attention_scale or model.d_head**-0.5
    if key in NULL_IS_ZERO.values():
        return getattr(model, key) or None
    if key in WORDS:
        return next(theirs for theirs, word in WORDS[key].items() if word == getattr(model, key))
    return model.sizes["d_shared"] if key in TIMES_D_EXPERT else getattr(model, key.split()[0])


def _inverse(key: str, model: ModelConfig) -> float:
    plain, power, _ = INVERSE[key]
    return 1 / _value_of(plain, model) ** power


def _mixture_fields(mixture: Mixture | None, model: ModelConfig) -> dict[str, Any]:
    """The fields of a config.json for a model's layers of experts."""
    if mixture is None:
        return {}
    kinds = (*model.layer_bases, "moe")
    content = {"first_k_dense_replace": kinds.index("moe")} if mixture.dense == "first" else {}
    if not model.has_mixtures:
        return content
    content |= {name: _value_of(key, model) for name, key in mixture.fields.items()} | mixture.only
    if mixture.dense == "some":
        dense = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
        content |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if mixture.methods:
        method = "group_limited_greedy" if model.router_groups > 1 else "greedy"
        content |= {"topk_method": method, "n_group": model.router_groups, "topk_group": model.router_groups_chosen}
    return content


def with_layers(content: Mapping[str, Any], config: HfConfig, model: ModelConfig) -> dict[str, Any]:
    """The object of a config.json, with the model's windows and the layers that it rotates."""
    there = _of_file(config)
    if (there.windows, _rotated(there)) == (model.windows, _rotated(model)):
        return dict(content)
    old = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", PERIOD)
    old += ("no_rope_layer_interval", ARCHITECTURES[config.architecture].rotated_layers)
    rest = {key: value for key, value in content.items() if key not in old}
    return rest | _layer_fields(config.architecture, model)


def _layer_fields(architecture: str, model: ModelConfig) -> dict[str, Any]:
    """The fields of windows, and of which layers have one or are rotated."""
    kind, windows, window = ARCHITECTURES[architecture], model.windows, max(model.windows)
    of_some = len({*windows}) > 1
    of_some_there = kind.windows.startswith("some")
    if {*windows} - {0, window} or (window and not kind.windows) or (of_some and not of_some_there):
        counts = ", ".join(f"{width} in {windows.count(width)} layers" for width in sorted({*windows}))
        same = " or the same window in every layer" * bool(kind.windows)
        raise ConfigError(
            f"the layers' windows, {counts}, have no place in a {architecture}; use model.sliding_window=0{same}"
        )
    written: dict[str, Any] = {}
    if kind.rotated_layers not in ("", WINDOWED):
        written[kind.rotated_layers] = [int(rotated) for rotated in _rotated(model)]
    if not kind.windows:
        return written
    types = {"layer_types": [SLIDING if each else FULL for each in windows]}
    if not kind.windows.endswith("if used"):
        unused = DEFAULT_WINDOW if kind.full_layers else None  # transformers makes the mask of no layer, too
        return written | {"sliding_window": window or unused} | (types if of_some_there else {})
    written["use_sliding_window"] = bool(window)
    if window:
        written |= {"sliding_window": window, "max_window_layers": windows.index(window)}
        if written.get(kind.rotated_layers) or 0 in windows[windows.index(window) :]:
            written |= types
    return written


def _of_file(config: HfConfig) -> ModelConfig:
    """The layers of a config.json, their windows and which are rotated."""
    return ModelConfig(**{key: config.model[key] for key in ("layers", "layers_of", "kinds", "sliding_window", "rope")})


def _rotated(model: ModelConfig) -> list[bool]:
    return [settings.rope for settings in model.settings_of_layers.of_each]


def _differing_ropes(kind: Architecture, model: ModelConfig) -> Iterator[str]:
    """What an architecture says of the rotary embeddings of layers that is not so in this model."""
    rotated = _rotated(model)
    if not kind.rotated_layers and not all(rotated):
        yield "rotary embeddings in all layers"
    if kind.rotated_layers == WINDOWED and rotated != [bool(window) for window in model.windows]:
        yield "rotary embeddings in layers with a window alone"
    of_type = zip(_ropes(model), [kind.ropes_by_type and bool(window) for window in model.windows])
    different = {(rope, with_window) for rope, with_window in of_type if rope[0]}
    if len(different) > len({with_window for _, with_window in different}):
        yield f"the same rotary embedding in all {'rotated ' * bool(kind.rotated_layers)}layers"


def _ropes(model: ModelConfig) -> list[tuple[float, ...]]:
    """What the rotation of each layer follows from: whether there is one, its tables, and the factor on logits."""
    settings, numbers = model.settings_of_layers
    ropes = map(Rope, settings)
    each = [(float(rope.model.rope), *rope.rotation, rope.temperature()) for rope in ropes]
    return [each[number] for number in numbers]


def differing_keys(config: HfConfig, model: ModelConfig) -> str:
    """Differences between a model and a config.json, in words; keys of context extension may differ."""
    free = ("sliding_window", "rope", "kinds", *(key for key in ROPE_DEFAULTS if key != "rope_fraction"))
    fixed = {key: value for key, value in config.model.items() if key not in free}
    fixed["layers_of"] = layers_of(_of_file(config).layer_kinds)
    here = {key: getattr(model, key) for key in fixed} | {"layers_of": layers_of(model.layer_kinds)}
    differing = [f"model.{k}={v!r} there, {here[k]!r} here" for k, v in fixed.items() if here[k] != v]
    there = _differing_ropes(ARCHITECTURES[config.architecture], model)
    differing += [f"{each} there, model.kinds={model.kinds!r} here" for each in there]
    return ", ".join(differing)


def same_rope(config: HfConfig, model: ModelConfig) -> bool:
    """Whether a model's rotary embeddings are those of a config.json."""
    keys = {key: value for key, value in config.model.items() if key.startswith("rope_")}
    keys |= {key: config.model[key] for key in ("rope", "layers_of", "kinds")}
    there = dataclasses.replace(model, **keys)
    return _ropes(there) == _ropes(model)


def check_own_keys(overrides: list[str]) -> None:
    """Raise ConfigError if a key is set that the folder's config.json determines."""
    wrong = [key for key in overrides if key.startswith("model.") and key.removeprefix("model.") not in OWN_KEYS]
    if wrong:
        keys = ", ".join(f"--config.model.{key}" for key in OWN_KEYS)
        raise ConfigError(
            f"--config.{wrong[0]} is determined by the folder's config.json; of the model set only {keys}"
        )
