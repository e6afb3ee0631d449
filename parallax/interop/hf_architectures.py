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
ABSENT_FIELDS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}

# Fields that are keys of a section in another way: those of 1 / the key, and of the key times another one.
INVERSE, TIMES_D_EXPERT = ("1 / logit_scale",), ("shared_experts * d_expert",)
# Choices of a block that an architecture has at their defaults, unless its row says otherwise.
PLAIN_CHOICES = ("norm", "norm_scale", "norm_bias", "attention_scale", "score_cap", "sinks", "embedding_scale")
PLAIN_CHOICES += ("residual_scale", "logit_scale", "logit_cap", "qk_norm_over", "qk_norm_after_rope", "shared_gate")
PLAIN_CHOICES += ("router_shift", "expert_activation", "expert_limit")

EXPERT = "{expert}"
OUTSIDE = ("embedding", "head.norm", "head")  # modules that are not in layers
# What the tensors of our modules are called, without ".weight" and ".bias"; those in a layer follow the layer's name.
WEIGHT_NAMES = {
    "embedding": "model.embed_tokens",
    "head.norm": "model.norm",
    "head": "lm_head",
    "": "model.layers.{layer}",  # a layer
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
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
    names: Mapping[str, str] = {}  # of weights, where they are not WEIGHT_NAMES
    interleaved: str = "never"  # whether rotated pairs are neighbours: "never", "always", or the field that says it
    rotated: float | None = None  # part of a head, if partial_rotary_factor is absent; None: heads are rotated whole
    ignored: tuple[str, ...] = ()  # fields that change no result
    windows: str = ""  # which layers may have a sliding window: "all", "all, if used", or "some, if used"
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


def no(*names: str) -> dict[str, tuple]:
    """Fields that must be false."""
    return dict.fromkeys(names, (False,))


GQA_KEYS = {"attention": "gqa", "qkv_bias": False, "qk_norm": False}
QWEN3_KEYS = GQA_KEYS | {"qk_norm": True}
# rms_norm_eps does not apply to the norms inside DeepSeek's attention.
MLA_KEYS = {"attention": "mla", "qkv_bias": False, "qk_norm": False, "norm_eps": 1e-6}
ALL_HEADS = {"num_key_value_heads": "heads"}
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
GRANITE_MOE = MIXTRAL._replace(only={})
GRANITE_FACTORS = {
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "1 / logit_scale",
}
GRANITE_ABSENT = ALL_HEADS | dict.fromkeys(GRANITE_FACTORS, 1.0)
BIASED_FIELDS = GQA_FIELDS | {"attention_bias": "qkv_bias"}
NO_NORM = {"attention": "gqa", "qk_norm": False}
# A run of our own becomes the first that computes it.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", 2048, GQA_KEYS, absent=ALL_HEADS, only=no("attention_bias", "mlp_bias")),
    "MistralForCausalLM": Architecture("mistral", 131_072, GQA_KEYS, windows="all"),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", 32_768, GQA_KEYS | {"qkv_bias": True}, only=no("use_mrope"), windows="some, if used"
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", 32_768, QWEN3_KEYS, absent={"head_dim": 128}, only=no("attention_bias"), windows="some, if used"
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek_v3",
        4096,
        MLA_KEYS,
        MLA_FIELDS,
        ALL_HEADS,
        no("attention_bias"),
        names={"mlp.router.bias": "mlp.gate.e_score_correction_bias"},
        interleaved="rope_interleave",
        mixture=DEEPSEEK_V3,
    ),
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek_v2",
        2048,
        MLA_KEYS,
        MLA_FIELDS,
        ALL_HEADS,
        no("attention_bias", "mlp_bias"),
        interleaved="always",
        mixture=DEEPSEEK_V2,
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral", 131_072, GQA_KEYS, absent=MIXTRAL_ABSENT, names=MIXTRAL_NAMES, windows="all", mixture=MIXTRAL
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", 32_768, QWEN3_KEYS, only=no("attention_bias"), windows="all, if used", mixture=QWEN3_MOE
    ),
    "GraniteForCausalLM": Architecture(
        "granite",
        2048,
        GQA_KEYS,
        GQA_FIELDS | GRANITE_FACTORS,
        GRANITE_ABSENT,
        no("attention_bias", "mlp_bias"),
    ),
    "GraniteMoeForCausalLM": Architecture(
        "granitemoe",
        2048,
        GQA_KEYS,
        GQA_FIELDS | GRANITE_FACTORS,
        GRANITE_ABSENT,
        no("attention_bias"),
        names=GRANITE_NAMES,
        mixture=GRANITE_MOE,
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        4096,
        QWEN3_KEYS | {"qk_norm_over": "projection"},
        absent=ALL_HEADS | {"rms_norm_eps": 1e-5},
        only=no("attention_bias") | {"clip_qkv": (None,)},
        mixture=OLMOE,
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3",
        4096,
        GQA_KEYS | {"rope_scaling": "none"},
        absent=ALL_HEADS | {"rms_norm_eps": 1e-5, "sliding_window": 0},
        only=no("attention_bias"),
        names=PHI3_NAMES,
        rotated=1.0,
        ignored=("original_max_position_embeddings",),
        windows="all",
    ),
    "GlmForCausalLM": Architecture(
        "glm",
        131_072,
        NO_NORM,
        BIASED_FIELDS,
        {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07, "attention_bias": True},
        names=GATES_AND_UPS,
        interleaved="always",
        rotated=0.5,
    ),
    "Glm4MoeForCausalLM": Architecture(
        "glm4_moe",
        131_072,
        {"attention": "gqa"},
        BIASED_FIELDS | {"use_qk_norm": "qk_norm"},
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": False, "use_qk_norm": False},
        names={"mlp.router.bias": "mlp.gate.e_score_correction_bias"},
        rotated=0.5,
        mixture=GLM4_MOE,
    ),
    "Ernie4_5ForCausalLM": Architecture(
        "ernie4_5",
        131_072,
        GQA_KEYS,
        absent={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        | {"rope_theta": 5e5},
        interleaved="always",
    ),
    "HeliumForCausalLM": Architecture(
        "helium",
        4096,
        GQA_KEYS,
        absent={"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
        only=no("attention_bias", "mlp_bias"),
        interleaved="always",
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "hunyuan_v1_dense",
        2048,
        QWEN3_KEYS | {"qk_norm_after_rope": True},
        absent=ALL_HEADS | {"rms_norm_eps": 1e-5},
        only=no("attention_bias"),
        names=HUNYUAN_NAMES,
        ignored=("eod_token_id",),
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

# Architectures that differ in one aspect from what is supported.
DIFFERING: dict[str, str] = {}
