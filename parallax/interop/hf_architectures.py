"""Model classes of Hugging Face's `transformers` as tables: names of fields, defaults, and names of weights.

A class whose models differ only in what a table says is a row of ARCHITECTURES; parallax/interop/hf_config.py and
hf_weights.py read all of them alike.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

# Fields that are keys of the section `model`. If several fields are the same key, they must have the same value.
FIELDS = {
    "vocab_size": "vocab",
    "num_hidden_layers": "layers",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_attention_heads": "heads",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
}
GQA_FIELDS = FIELDS | {"num_key_value_heads": "kv_heads", "head_dim": "d_head"}
MLA_FIELDS = FIELDS | {
    "num_key_value_heads": "heads",
    "qk_nope_head_dim": "d_head",
    "qk_rope_head_dim": "d_rope",
    "v_head_dim": "d_head",
    "kv_lora_rank": "d_latent",
    "q_lora_rank": "d_latent_q",
}
# Fields that say which products have biases; a row has those that `transformers` reads of its class.
BIASED_FIELDS = GQA_FIELDS | {"attention_bias": "qkv_bias"}
ATTENTION_BIASED = GQA_FIELDS | {"attention_bias": "qkv_bias out_bias"}
BIASED = ATTENTION_BIASED | {"mlp_bias": "mlp_bias"}
ABSENT_FIELDS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}

# Fields that are keys of a section in another way: 1 / a power of a key, with the field's type; the key times another.
INVERSE = {"1 / logit_scale": ("logit_scale", 1, float), "1 / attention_scale ** 2": ("attention_scale", 2, int)}
TIMES_D_EXPERT = ("shared_experts * d_expert",)
# Fields in which null stands for a key of 0, and not for an absent field.
NULL_IS_ZERO = {"q_lora_rank": "d_latent_q"}
NULL_IS_ZERO |= {"attn_logit_softcapping": "score_cap", "final_logit_softcapping": "logit_cap"}
# Values of keys that are words here and truth values there.
WORDS = {"branches": {False: "sequential", True: "parallel"}}
# Choices of a block that an architecture has at their defaults, unless its row says otherwise.
PLAIN_CHOICES = ("norm", "norm_scale", "norm_bias", "attention_scale", "score_cap", "sinks", "embedding_scale")
PLAIN_CHOICES += ("residual_scale", "logit_scale", "logit_cap", "qk_norm_over", "qk_norm_scale", "shared_gate")
PLAIN_CHOICES += ("qk_norm_after_rope", "router_shift", "expert_bias", "expert_activation", "expert_limit")
PLAIN_CHOICES += ("norm_place", "branches", "mlp", "activation", "activation_limit", "mlp_bias", "out_bias")
WINDOWED = "windows"  # of `rotated_layers`: those with a window
HIDDEN_ACT, HIDDEN_ACTIVATION = "hidden_act", "hidden_activation"  # the field of an activation; a row says which
# Its words, with the activation of each; the first is that of an absent field.
SILU = {"silu": "silu", "swish": "silu"}
GELU = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
RELU2 = {"relu2": "relu2"}
GELU_FIRST = {"gelu": "gelu"}
EVERY_ACTIVATION = SILU | GELU | RELU2
GEMMA_GELU = dict.fromkeys(GELU, "gelu_tanh")  # transformers reads all as this

EXPERT = "{expert}"
OUTSIDE = ("embedding", "head.norm", "head")  # modules that are not in layers
# What the tensors of our modules are called, without ".weight" and ".bias"; those in a layer follow the layer's name.
WEIGHT_NAMES = {
    "embedding": "model.embed_tokens",
    "head.norm": "model.norm",
    "head": "lm_head",
    "": "model.layers.{layer}",  # a layer
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "attention.sink_logits": "self_attn.sinks",  # a whole name
    # Of latent attention: keys' and values' latent with the rotated key, both up-projections, and the queries' parts.
    "attention.down": "self_attn.kv_a_proj_with_mqa",
    "attention.norm": "self_attn.kv_a_layernorm",
    "attention.up": "self_attn.kv_b_proj",
    "attention.queries": "self_attn.q_proj",
    "attention.queries_0": "self_attn.q_a_proj",
    "attention.queries_1": "self_attn.q_a_layernorm",
    "attention.queries_3": "self_attn.q_b_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": f"mlp.experts.{EXPERT}.gate_proj",
    "mlp.experts.up": f"mlp.experts.{EXPERT}.up_proj",
    "mlp.experts.down": f"mlp.experts.{EXPERT}.down_proj",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}  # and "mlp.router.bias", a whole name, if there is one. Modules of one name are in one tensor, one after the other.
MIXTRAL_NAMES = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": f"block_sparse_moe.experts.{EXPERT}.w1",
    "mlp.experts.up": f"block_sparse_moe.experts.{EXPERT}.w3",
    "mlp.experts.down": f"block_sparse_moe.experts.{EXPERT}.w2",
}
GRANITE_NAMES = {
    "mlp.router": "block_sparse_moe.router.layer",
    "mlp.experts.gate": "block_sparse_moe.input_linear",
    "mlp.experts.up": "block_sparse_moe.input_linear",
    "mlp.experts.down": "block_sparse_moe.output_linear",
}
GATES_AND_UPS = dict.fromkeys(["mlp.gate", "mlp.up"], "mlp.gate_up_proj")
PHI3_NAMES = GATES_AND_UPS | dict.fromkeys([f"attention.{name}" for name in "qkv"], "self_attn.qkv_proj")
QWEN2_MOE_NAMES = {f"mlp.shared.{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
NEOX_NAMES = {
    "embedding": "gpt_neox.embed_in",
    "head.norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
    "": "gpt_neox.layers.{layer}",
    **dict.fromkeys([f"attention.{name}" for name in "qkv"], "attention.query_key_value"),
    "attention.out": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
GPT_OSS_NAMES = {
    "mlp.router": "mlp.router",
    "mlp.experts.gate": "mlp.experts.gate_up_proj",
    "mlp.experts.up": "mlp.experts.gate_up_proj",
    "mlp.experts.down": "mlp.experts.down_proj",
}
HUNYUAN_NAMES = {
    f"attention.{name}_norm": f"self_attn.{word}_layernorm" for name, word in (("q", "query"), ("k", "key"))
}


class Architecture(NamedTuple):
    """A model class of `transformers`."""

    model_type: str
    context: int  # tokens, if max_position_embeddings is absent
    keys: Mapping[str, Any]  # keys of the section that all its models have
    fields: Mapping[str, str] = GQA_FIELDS  # fields that are keys of the section, in the order of reading
    absent: Mapping[str, Any] = {}  # defaults of absent fields, besides ABSENT_FIELDS; a text is the key with the value
    only: Mapping[str, tuple] = {}  # fields with one meaning: values, of which the first is that of an absent field
    biases: Mapping[str, str] = {}  # fields of biases that `transformers` reads and no key says, with what has them
    names: Mapping[str, str] = {}  # of weights, where they are not WEIGHT_NAMES
    interleaved: str = "never"  # whether rotated pairs are neighbours: "never", "always", or the field that says it
    rotated: float | None = None  # part of a head, if partial_rotary_factor is absent; None: heads are rotated whole
    scalings: tuple[str, ...] = ()  # of rotary embedding, the key's words; () for all
    ignored: tuple[str, ...] = ()  # fields that change no result
    renamed: Mapping[str, str] = {}  # other names of usual fields, and these
    activation_field: str = HIDDEN_ACT
    activations: Mapping[str, str] = EVERY_ACTIVATION  # of layers without experts; see SILU
    root_scaled: bool = False  # whether embeddings are times the root of d_model
    whole_heads: bool = False  # whether key heads are as many as heads, of d_model / heads, with no fields of these
    equal_heads: bool = False  # whether heads are of d_model / heads, whatever head_dim says
    joined_by_head: bool = False  # whether a tensor of q, k and v has all three of a head, then those of the next
    buffers: tuple[str, ...] = ()  # ends of names in old files, of arrays that are no weights
    windows: str = ""  # which layers may have a sliding window: "all", "some", or either with ", if used"
    full_layers: int = 0  # if layer_types is absent, one layer in so many has no window, the last of them
    stretched_theta: bool = False  # whether a rope_type of dynamic with an alpha is plain rotation of a larger theta
    rotated_layers: str = ""  # which layers are rotated: WINDOWED, or the field with a 0 or 1 for each; "": all
    ropes_by_type: bool = False  # whether layers with a window may be rotated by other angles than those without
    further_layers: bool = False  # whether transformers takes an absent num_nextn_predict_layers for 1
    columns_in_turn: bool = False  # whether experts' tensors are [experts, in, out], gate and up in turn in `out`
    mixture: "Mixture | None" = None

    def tensor(self, module: str) -> str:
        """What a module's tensors are called, with {layer} and {expert} if there are several.

        >>> ARCHITECTURES["MixtralForCausalLM"].tensor("mlp.experts.up")
        'model.layers.{layer}.block_sparse_moe.experts.{expert}.w3'
        """
        names = {**WEIGHT_NAMES, **self.names}
        return names[module] if module in OUTSIDE or not module else f"{names['']}.{names[module]}"


class Mixture(NamedTuple):
    """How an architecture describes its layers of experts."""

    fields: Mapping[str, str]  # and their keys
    absent: Mapping[str, Any]
    keys: Mapping[str, Any]  # keys that all its layers of experts have
    only: Mapping[str, Any] = {}  # fields that must have a value
    dense: str = ""  # which layers have no experts: "first", "some", or "" for none
    other_name: str = ""  # of the first field
    methods: bool = False  # whether topk_method says if experts are in groups


NO_NORM = {"attention": "gqa", "qk_norm": False}
GQA_KEYS = NO_NORM | {"qkv_bias": False}
QWEN3_KEYS = {"attention": "gqa", "qk_norm": True}
# rms_norm_eps does not apply to the norms inside DeepSeek's attention.
MLA_KEYS = {"attention": "mla", "qkv_bias": False, "qk_norm": False, "norm_eps": 1e-6}
ALL_HEADS = {"num_key_value_heads": "heads"}
ONE_DIRECTION = {"use_bidirectional_attention": (None, False)}
LATENT_BIASES = "projections to latents have biases there and none here"
SOFTMAX = {"router_score": "softmax"}
PLAIN_ROUTER = SOFTMAX | {"router_scale": 1.0, "router_groups": 1, "router_groups_chosen": 1, "shared_experts": 0}
MIXTRAL_ABSENT = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 0}
# A softmax over the chosen experts equals a normalised softmax over all.
MIXTRAL = Mixture(
    {"num_local_experts": "experts", "num_experts_per_tok": "experts_per_token", "intermediate_size": "d_expert"},
    {"num_local_experts": 8, "num_experts_per_tok": 2},
    PLAIN_ROUTER | {"router_normalized": True},
    {"router_jitter_noise": 0.0},
    other_name="num_experts",
)
QWEN3_MOE = Mixture(
    {"num_experts": "experts", "num_experts_per_tok": "experts_per_token", "moe_intermediate_size": "d_expert"}
    | {"norm_topk_prob": "router_normalized"},
    {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
    PLAIN_ROUTER,
    dense="some",
    other_name="num_local_experts",
)
DEEPSEEK_EXPERTS = {
    "n_routed_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "d_expert",
    "n_shared_experts": "shared_experts",
    "routed_scaling_factor": "router_scale",
}
# transformers ignores moe_layer_freq, and V2's norm_topk_prob, which the models' own code uses.
DEEPSEEK_V2 = Mixture(
    DEEPSEEK_EXPERTS,
    {"n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2, "routed_scaling_factor": 1.0}
    | {"first_k_dense_replace": 0},
    SOFTMAX | {"router_normalized": False},
    {"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False},
    dense="first",
    other_name="num_experts",
    methods=True,
)
DEEPSEEK_V3 = Mixture(
    DEEPSEEK_EXPERTS
    | {"norm_topk_prob": "router_normalized", "n_group": "router_groups", "topk_group": "router_groups_chosen"},
    {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1}
    | {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 8, "topk_group": 4}
    | {"first_k_dense_replace": 3},
    {"router_score": "sigmoid"},
    {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    dense="first",
    other_name="num_local_experts",
)
GLM4_MOE = DEEPSEEK_V3._replace(
    absent={"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1}
    | {"routed_scaling_factor": 1.0, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
)
QWEN2_MOE = QWEN3_MOE._replace(
    fields=QWEN3_MOE.fields | {"shared_expert_intermediate_size": "shared_experts * d_expert"},
    absent={"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": False}
    | {"shared_expert_intermediate_size": 5632},
    keys={key: value for key, value in PLAIN_ROUTER.items() if key != "shared_experts"} | {"shared_gate": True},
)
OLMOE = QWEN3_MOE._replace(
    fields={"num_experts": "experts", "num_experts_per_tok": "experts_per_token", "intermediate_size": "d_expert"}
    | {"norm_topk_prob": "router_normalized"},
    absent={"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    dense="",
)
GPT_OSS = Mixture(
    MIXTRAL.fields | {"swiglu_limit": "expert_limit"},
    {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0},
    MIXTRAL.keys | {"router_shift": True, "expert_bias": True, "expert_activation": "clamped"},
    {"swiglu_alpha": 1.702},
    other_name="num_experts",
)
GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS_ROPE |= {"original_max_position_embeddings": 4096}
GRANITE_MOE = MIXTRAL._replace(only={})
GRANITE_FACTORS = {
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "1 / logit_scale",
}
GRANITE_ABSENT = ALL_HEADS | dict.fromkeys(GRANITE_FACTORS, 1.0)
WITHOUT_EPS = {name: key for name, key in BIASED.items() if key != "norm_eps"}
OLMO_FIELDS = {name: key for name, key in ATTENTION_BIASED.items() if key != "norm_eps"}
EVERY_BIAS = {"use_bias": "qkv_bias out_bias mlp_bias"}
STARCODER2_FIELDS = {name: key for name, key in GQA_FIELDS.items() if key != "norm_eps"}
STARCODER2_FIELDS |= EVERY_BIAS | {"norm_epsilon": "norm_eps"}
NEOX_FIELDS = {name: key for name, key in FIELDS.items() if key != "norm_eps"}
NEOX_FIELDS |= {"layer_norm_eps": "norm_eps", "attention_bias": "qkv_bias out_bias"}
COHERE_KEYS = NO_NORM | {"norm": "layer", "norm_bias": False, "branches": "parallel_one_norm"}
COHERE_FIELDS = {name: key for name, key in ATTENTION_BIASED.items() if key != "norm_eps"}
COHERE_FIELDS |= {"layer_norm_eps": "norm_eps", "logit_scale": "logit_scale"}
COHERE_ABSENT = ALL_HEADS | {"layer_norm_eps": 1e-5, "logit_scale": 0.0625}
COHERE_ABSENT |= {"tie_word_embeddings": True}
COHERE2_ONLY = dict.fromkeys(("use_embedding_sharing", "use_gated_activation", "use_parallel_block"), (None, True))
COHERE2_ONLY |= {"layer_switch": (None, 4), "rotary_pct": (None, 1), "position_embedding_type": (None, "rope_gptj")}
COHERE2_ONLY |= {"order_of_interleaved_layers": (None, "local_attn_first")}
BIASED_NORMS = {"norm": "layer", "norm_bias": True}
GEMMA2_FIELDS = ATTENTION_BIASED | {
    "query_pre_attn_scalar": "1 / attention_scale ** 2",
    "attn_logit_softcapping": "score_cap",
    "final_logit_softcapping": "logit_cap",
}
GEMMA2_ABSENT = {"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True, "query_pre_attn_scalar": 256.0}
GEMMA2_ABSENT |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA2 = Architecture(
    "gemma2",
    8192,
    NO_NORM | {"norm_scale": "one_plus", "norm_place": "both"},
    GEMMA2_FIELDS,
    GEMMA2_ABSENT,
    ONE_DIRECTION | {"sliding_window_pattern": (None, 2)},
    names={"mlp_norm": "pre_feedforward_layernorm"},
    activation_field=HIDDEN_ACTIVATION,
    activations=GELU | EVERY_ACTIVATION,
    root_scaled=True,
    windows="some",
    full_layers=2,
)
OLMO2_KEYS = QWEN3_KEYS | {"qk_norm_over": "projection", "norm_place": "after"}
OLMO2 = Architecture("olmo2", 2048, OLMO2_KEYS, ATTENTION_BIASED, ALL_HEADS | {"rms_norm_eps": 1e-5})
GRANITE = Architecture("granite", 2048, NO_NORM, BIASED | GRANITE_FACTORS, GRANITE_ABSENT)
GLM = Architecture(
    "glm",
    131_072,
    NO_NORM,
    BIASED_FIELDS,
    {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True},
    names=GATES_AND_UPS,
    interleaved="always",
    rotated=0.5,
)
COHERE = Architecture("cohere", 8192, COHERE_KEYS, COHERE_FIELDS, COHERE_ABSENT, interleaved="always")
# A run of our own becomes the first that computes it.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", 2048, NO_NORM, BIASED, ALL_HEADS),
    "MistralForCausalLM": Architecture("mistral", 131_072, GQA_KEYS, windows="all"),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", 32_768, GQA_KEYS | {"qkv_bias": True}, only={"use_mrope": (False,)}, windows="some, if used"
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", 32_768, QWEN3_KEYS, ATTENTION_BIASED, {"head_dim": 128}, windows="some, if used"
    ),
    "GemmaForCausalLM": Architecture(
        "gemma",
        8192,
        NO_NORM | {"norm_scale": "one_plus"},
        ATTENTION_BIASED,
        {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
        ONE_DIRECTION,
        activations=GEMMA_GELU | SILU | RELU2,
        root_scaled=True,
    ),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA2._replace(
        model_type="gemma3_text",
        context=131_072,
        keys=GEMMA2.keys | {"qk_norm": True, "qk_norm_scale": "one_plus"},
        absent=GEMMA2_ABSENT
        | {"vocab_size": 262_208, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        only=ONE_DIRECTION,
        ignored=("_sliding_window_pattern",),
        full_layers=6,
        ropes_by_type=True,
    ),
    "OlmoForCausalLM": Architecture(
        "olmo",
        2048,
        NO_NORM | {"norm": "layer", "norm_scale": "none", "norm_eps": 1e-5},
        OLMO_FIELDS,
        ALL_HEADS,
        {"clip_qkv": (None,)},
    ),
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO2._replace(
        model_type="olmo3",
        absent=OLMO2.absent | {"rope_theta": 5e5},
        windows="some",
        full_layers=4,
        ropes_by_type=True,
    ),
    "ArceeForCausalLM": Architecture(
        "arcee",
        4096,
        NO_NORM | {"mlp": "plain"},
        BIASED,
        ALL_HEADS | {"rms_norm_eps": 1e-5},
        activations=RELU2 | EVERY_ACTIVATION,
    ),
    "Starcoder2ForCausalLM": Architecture(
        "starcoder2",
        4096,
        NO_NORM | BIASED_NORMS | {"mlp": "plain"},
        STARCODER2_FIELDS,
        {"num_key_value_heads": 2, "norm_epsilon": 1e-5, "use_bias": True, "tie_word_embeddings": True}
        | {"sliding_window": 0},
        names={"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
        activations=GELU | EVERY_ACTIVATION,
        windows="all",
    ),
    "NemotronForCausalLM": Architecture(
        "nemotron",
        4096,
        NO_NORM | BIASED_NORMS | {"norm_scale": "one_plus", "mlp": "plain"},
        WITHOUT_EPS | {"norm_eps": "norm_eps"},
        ALL_HEADS | {"norm_eps": 1e-5},
        rotated=0.5,
        activations=RELU2 | EVERY_ACTIVATION,
    ),
    "GPTNeoXForCausalLM": Architecture(
        "gpt_neox",
        2048,
        NO_NORM | BIASED_NORMS | {"mlp": "plain", "mlp_bias": True},
        NEOX_FIELDS | {"use_parallel_residual": "branches"},
        {"layer_norm_eps": 1e-5, "attention_bias": True, "use_parallel_residual": True},
        names=NEOX_NAMES,
        rotated=0.25,
        ignored=("classifier_dropout",),
        renamed={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        activations=GELU_FIRST | EVERY_ACTIVATION,
        whole_heads=True,
        joined_by_head=True,
        buffers=(".attention.bias", ".attention.masked_bias"),
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek_v3",
        4096,
        MLA_KEYS,
        MLA_FIELDS,
        ALL_HEADS,
        biases={"attention_bias": LATENT_BIASES},
        names={"mlp.router.bias": "mlp.gate.e_score_correction_bias"},
        interleaved="rope_interleave",
        further_layers=True,
        mixture=DEEPSEEK_V3,
    ),
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek_v2",
        2048,
        MLA_KEYS,
        MLA_FIELDS,
        ALL_HEADS,
        biases={"attention_bias": LATENT_BIASES, "mlp_bias": "shared experts have biases there and none here"},
        interleaved="always",
        mixture=DEEPSEEK_V2,
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral", 131_072, GQA_KEYS, absent=MIXTRAL_ABSENT, names=MIXTRAL_NAMES, windows="all", mixture=MIXTRAL
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", 32_768, QWEN3_KEYS, ATTENTION_BIASED, windows="all, if used", mixture=QWEN3_MOE
    ),
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": GRANITE._replace(
        model_type="granitemoe", fields=ATTENTION_BIASED | GRANITE_FACTORS, names=GRANITE_NAMES, mixture=GRANITE_MOE
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        4096,
        QWEN3_KEYS | {"qk_norm_over": "projection"},
        ATTENTION_BIASED,
        ALL_HEADS | {"rms_norm_eps": 1e-5},
        {"clip_qkv": (None,)},
        mixture=OLMOE,
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3",
        4096,
        GQA_KEYS,
        absent=ALL_HEADS | {"rms_norm_eps": 1e-5, "sliding_window": 0},
        only={"full_attn_mod": (None, 1), "interpolate_factor": (None, 1)},  # of the code that came with Phi-4-mini
        names=PHI3_NAMES,
        scalings=("none", "longrope"),
        rotated=1.0,
        ignored=("original_max_position_embeddings",),
        windows="all",
    ),
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM._replace(
        model_type="glm4",
        keys=NO_NORM | {"norm_place": "both"},
        names=GATES_AND_UPS | {"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"},
    ),
    "Glm4MoeForCausalLM": Architecture(
        "glm4_moe",
        131_072,
        {"attention": "gqa"},
        BIASED_FIELDS | {"use_qk_norm": "qk_norm"},
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "use_qk_norm": False},
        names={"mlp.router.bias": "mlp.gate.e_score_correction_bias"},
        rotated=0.5,
        further_layers=True,
        mixture=GLM4_MOE,
    ),
    "Ernie4_5ForCausalLM": Architecture(
        "ernie4_5",
        131_072,
        NO_NORM,
        GQA_FIELDS | EVERY_BIAS,
        {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        | {"rope_theta": 5e5, "use_bias": False},
        interleaved="always",
    ),
    "HeliumForCausalLM": Architecture(
        "helium",
        4096,
        NO_NORM,
        BIASED_FIELDS | {"mlp_bias": "mlp_bias"},
        {"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
        interleaved="always",
        equal_heads=True,
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "hunyuan_v1_dense",
        2048,
        QWEN3_KEYS | {"qk_norm_after_rope": True},
        ATTENTION_BIASED,
        ALL_HEADS | {"rms_norm_eps": 1e-5},
        {"use_qk_norm": (None, True)},
        names=HUNYUAN_NAMES,
        ignored=("eod_token_id",),
        stretched_theta=True,
    ),
    "MinistralForCausalLM": Architecture("ministral", 131_072, GQA_KEYS, windows="some"),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        32_768,
        NO_NORM,
        BIASED,
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6, "sliding_window": 0},
        windows="some, if used",
        rotated_layers="no_rope_layers",
    ),
    "CohereForCausalLM": COHERE._replace(absent=COHERE_ABSENT | {"rope_theta": 5e5}),
    "Cohere2ForCausalLM": COHERE._replace(
        model_type="cohere2",
        only=COHERE2_ONLY,
        ignored=("use_parallel_embedding",),
        windows="some",
        full_layers=4,
        rotated_layers=WINDOWED,
        equal_heads=True,
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss",
        131_072,
        {"attention": "gqa", "qk_norm": False, "sinks": True},
        ATTENTION_BIASED,
        {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0}
        | {"attention_bias": True, "sliding_window": 128, "rope_scaling": GPT_OSS_ROPE},
        names=GPT_OSS_NAMES,
        ignored=("initial_context_length", "experts_per_token"),  # of the code that came with the weights
        windows="some",
        full_layers=2,
        columns_in_turn=True,
        mixture=GPT_OSS,
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2_moe",
        32_768,
        NO_NORM,
        GQA_FIELDS | {"qkv_bias": "qkv_bias"},
        {"qkv_bias": True},
        names=QWEN2_MOE_NAMES,
        windows="some, if used",
        mixture=QWEN2_MOE,
    ),
}


class LanguageModel(NamedTuple):
    """A language model within a model that also reads pictures."""

    model_type: str  # of the whole
    architecture: str  # of the language model alone
    names: Mapping[str, str]  # beginnings of its tensors' names there, and alone
    others: tuple[str, ...]  # beginnings of names of the rest
    ignored: tuple[str, ...]  # fields about the rest


LANGUAGE_MODELS = {
    "Gemma3ForConditionalGeneration": LanguageModel(
        "gemma3",
        "Gemma3ForCausalLM",
        {"language_model.": "", "model.language_model.": "model."},
        tuple(f"{start}{part}." for start in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
        ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
        + ("boi_token_id", "eoi_token_id", "image_token_id"),
    ),
}

# Architectures that differ in one aspect from what is supported.
DIFFERING: dict[str, str] = {
    "Ministral3ForCausalLM": "its queries are times a factor that grows with their place (llama_4_scaling_beta)",
}
