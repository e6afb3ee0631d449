"""The config.json of published models, field by field, and how many parameters each is published with.

Fields that stand in all files of a family and change nothing are in its base; the others are each file's own.
"""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.31.0",
    "use_cache": True,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_dropout": 0.0}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "rope_scaling": None,
    "sliding_window": None,
    "max_position_embeddings": 40960,
}
LLAMA_2 = LLAMA | {"pretraining_tp": 1, "rope_scaling": None, "max_position_embeddings": 4096, "vocab_size": 32000}
LLAMA_3 = LLAMA_2 | {"rope_theta": 500000.0, "vocab_size": 128256, "attention_bias": False, "attention_dropout": 0.0}
LLAMA_3 |= {"bos_token_id": 128000, "eos_token_id": 128001, "max_position_embeddings": 8192}
LLAMA_31 = LLAMA_3 | {"mlp_bias": False, "max_position_embeddings": 131072, "eos_token_id": [128001, 128008, 128009]}
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA_31 |= {"rope_scaling": LLAMA3_ROPE | {"factor": 8.0, "rope_type": "llama3"}}
LLAMA_32 = LLAMA_31 | {"rope_scaling": LLAMA3_ROPE | {"factor": 32.0, "rope_type": "llama3"}}
LLAMA_32 |= {"tie_word_embeddings": True}
SMOL = LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
FOR_BROWSERS = {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}}


def sizes(hidden, ff, layers, heads, kv_heads=None):
    found = dict(hidden_size=hidden, intermediate_size=ff, num_hidden_layers=layers, num_attention_heads=heads)
    return found | ({} if kv_heads is None else {"num_key_value_heads": kv_heads})


def qwen2(hidden, ff, layers, heads, kv_heads, vocab, window, **more):
    own = {"vocab_size": vocab, "max_window_layers": layers, "sliding_window": window}
    return QWEN2 | sizes(hidden, ff, layers, heads, kv_heads) | own | {"max_position_embeddings": window} | more


def qwen3(hidden, ff, layers, heads, **more):
    return QWEN3 | sizes(hidden, ff, layers, heads, 8) | {"vocab_size": 151936, "max_window_layers": layers} | more


FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
B7, B13, B70 = (4096, 11008, 32, 32), (5120, 13824, 40, 40), (8192, 28672, 80, 64, 8)
B8 = (4096, 14336, 32, 32, 8)
MISTRAL_7B = MISTRAL | sizes(*B8) | {"max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096}
MISTRAL_7B |= {"vocab_size": 32000}
QWEN_CODER = {"rope_scaling": None, "use_mrope": False}
DISTILLED = {"bos_token_id": 151646, "eos_token_id": 151643, "max_position_embeddings": 131072, "use_mrope": False}
R1_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG_YARN = {"factor": 16.0, "type": "yarn", "finetuned": True}
QWEN_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}

# Of each: its config.json, and how many parameters it has, where that is published to the last one.
PHI3 = (
    LLAMA
    | sizes(3072, 8192, 32, 32, 32)
    | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0}
    | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "max_position_embeddings": 4096, "sliding_window": 2047}
    | {"original_max_position_embeddings": 4096, "rope_theta": 10000.0, "vocab_size": 32064}
)
GRANITE = (
    LLAMA
    | sizes(2048, 8192, 40, 32, 8)
    | {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_bias": False, "mlp_bias": False}
    | {"attention_dropout": 0.0, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0}
    | {"logits_scaling": 8.0, "residual_multiplier": 0.22, "max_position_embeddings": 4096, "rope_theta": 10000.0}
    | {"tie_word_embeddings": True, "vocab_size": 49155}
)
TAKEN = {
    "microsoft/Phi-3-mini-4k-instruct": (PHI3, 3_821_079_552),
    "microsoft/Phi-3-mini-128k-instruct": (
        PHI3
        | {"max_position_embeddings": 131072, "sliding_window": 262144}
        | {"rope_scaling": {"type": "longrope", "long_factor": [1.05] * 48, "short_factor": [1.0] * 48}},
        3_821_079_552,
    ),
    "ibm-granite/granite-3.0-2b-base": (GRANITE, 2_533_531_648),
    "THUDM/glm-4-9b-chat-hf": (
        LLAMA
        | sizes(4096, 13696, 40, 32, 2)
        | {"architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True, "attention_dropout": 0.0}
        | {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0}
        | {"max_position_embeddings": 131072, "vocab_size": 151552},
        9_399_951_360,
    ),
    "huggyllama/llama-7b": (
        LLAMA
        | sizes(*B7)
        | {"max_sequence_length": 2048, "pad_token_id": 0, "rms_norm_eps": 1e-06, "vocab_size": 32000},
        6_738_415_616,
    ),
    "meta-llama/Llama-2-7b-hf": (LLAMA_2 | sizes(*B7, 32), 6_738_415_616),
    "meta-llama/Llama-2-13b-chat-hf": (LLAMA_2 | sizes(*B13, 40), 13_015_864_320),
    "meta-llama/Llama-2-70b-hf": (LLAMA_2 | sizes(*B70), 68_976_648_192),
    "codellama/CodeLlama-7b-hf": (
        LLAMA_2 | sizes(*B7, 32) | {"max_position_embeddings": 16384, "rope_theta": 1000000, "vocab_size": 32016},
        6_738_546_688,
    ),
    "codellama/CodeLlama-34b-Instruct-hf": (
        LLAMA_2 | sizes(8192, 22016, 48, 64, 8) | {"max_position_embeddings": 16384, "rope_theta": 1000000},
        33_743_970_304,
    ),
    "lmsys/vicuna-7b-v1.5": (
        LLAMA_2 | sizes(*B7, 32) | {"_name_or_path": "vicuna-7b-v1.5", "pad_token_id": 0},
        6_738_415_616,
    ),
    "lmsys/vicuna-13b-v1.5-16k": (
        LLAMA_2
        | sizes(*B13, 40)
        | {"max_sequence_length": 16384, "rope_scaling": {"factor": 4.0, "type": "linear"}, "pad_token_id": 0},
        13_015_864_320,
    ),
    "NousResearch/Yarn-Llama-2-7b-64k": (
        LLAMA_2
        | sizes(*B7, 32)
        | {
            "auto_map": {"AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
            "max_position_embeddings": 65536,
            "rope_scaling": LONG_YARN | {"original_max_position_embeddings": 4096},
        },
        6_738_415_616,
    ),
    "openlm-research/open_llama_3b_v2": (
        LLAMA
        | sizes(3200, 8640, 26, 32)
        | {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "vocab_size": 32000},
        3_426_473_600,
    ),
    "meta-llama/Meta-Llama-3-8B": (LLAMA_3 | sizes(*B8), 8_030_261_248),
    "meta-llama/Meta-Llama-3-70B-Instruct": (LLAMA_3 | sizes(*B70), 70_553_706_496),
    "meta-llama/Llama-3.1-8B-Instruct": (LLAMA_31 | sizes(*B8), 8_030_261_248),
    "meta-llama/Llama-3.1-70B": (LLAMA_31 | sizes(*B70), 70_553_706_496),
    "meta-llama/Llama-3.2-1B": (
        LLAMA_32 | sizes(2048, 8192, 16, 32, 8) | {"head_dim": 64},
        1_235_814_400,
    ),
    "meta-llama/Llama-3.2-3B-Instruct": (
        LLAMA_32 | sizes(3072, 8192, 28, 24, 8) | {"head_dim": 128},
        3_212_749_824,
    ),
    "meta-llama/Llama-3.3-70B-Instruct": (LLAMA_31 | sizes(*B70) | {"head_dim": 128}, 70_553_706_496),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (
        LLAMA_2
        | sizes(2048, 5632, 22, 32, 4)
        | {"attention_bias": False, "max_position_embeddings": 2048, "rope_theta": 10000.0},
        1_100_048_384,
    ),
    "HuggingFaceTB/SmolLM-135M": (
        SMOL
        | sizes(576, 1536, 30, 9, 3)
        | {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "max_position_embeddings": 2048}
        | {"initializer_range": 0.041666666666666664, "rope_theta": 10000.0},
        134_515_008,
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (SMOL | sizes(576, 1536, 30, 9, 3) | FOR_BROWSERS, 134_515_008),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (SMOL | sizes(960, 2560, 32, 15, 5) | FOR_BROWSERS, 361_821_120),
    "HuggingFaceTB/SmolLM2-1.7B": (SMOL | sizes(2048, 8192, 24, 32, 32) | {"rope_theta": 130000}, 1_711_376_384),
    "01-ai/Yi-6B": (
        LLAMA
        | sizes(4096, 11008, 32, 32, 4)
        | {"max_position_embeddings": 4096, "pad_token_id": 0, "rope_theta": 5000000.0, "vocab_size": 64000},
        6_061_035_520,
    ),
    "01-ai/Yi-1.5-34B-Chat": (
        LLAMA
        | sizes(7168, 20480, 60, 56, 8)
        | {"max_position_embeddings": 4096, "pad_token_id": 0, "rope_theta": 5000000.0, "vocab_size": 64000}
        | {"attention_bias": False, "attention_dropout": 0.0, "pretraining_tp": 1, "rope_scaling": None},
        34_388_917_248,
    ),
    "deepseek-ai/deepseek-llm-7b-base": (
        LLAMA_2 | sizes(4096, 11008, 30, 32, 32) | {"rms_norm_eps": 1e-06, "vocab_size": 102400},
        6_910_365_696,
    ),
    "deepseek-ai/deepseek-coder-1.3b-base": (
        LLAMA
        | sizes(2048, 5504, 24, 16, 16)
        | {"bos_token_id": 32013, "eos_token_id": 32014, "max_position_embeddings": 16384, "pretraining_tp": 1}
        | {"rms_norm_eps": 1e-06, "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000}
        | {"vocab_size": 32256},
        1_346_471_936,
    ),
    "deepseek-ai/deepseek-coder-6.7b-instruct": (
        LLAMA
        | sizes(4096, 11008, 32, 32, 32)
        | {"bos_token_id": 32013, "eos_token_id": 32021, "max_position_embeddings": 16384, "rms_norm_eps": 1e-06}
        | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000, "vocab_size": 32256},
        6_740_512_768,
    ),
    "tiiuae/Falcon3-7B-Base": (
        LLAMA
        | sizes(3072, 23040, 28, 12, 4)
        | {"activation": "swiglu", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 256}
        | {"mlp_bias": False, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_theta": 1000042}
        | {"vocab_size": 131072, "pretraining_tp": 1, "rope_scaling": None},
        7_455_550_464,
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (LLAMA_31 | sizes(*B8), 8_030_261_248),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": (LLAMA_31 | sizes(*B70), 70_553_706_496),
    "mistralai/Mistral-7B-v0.1": (MISTRAL_7B, 7_241_732_096),
    "HuggingFaceH4/zephyr-7b-beta": (
        MISTRAL_7B | {"_name_or_path": "mistralai/Mistral-7B-v0.1", "pad_token_id": 2},
        7_241_732_096,
    ),
    "teknium/OpenHermes-2.5-Mistral-7B": (
        MISTRAL_7B | {"eos_token_id": 32000, "vocab_size": 32002},
        7_241_748_480,
    ),
    "NousResearch/Yarn-Mistral-7b-128k": (
        MISTRAL_7B
        | {"max_sequence_length": 131072, "sliding_window": 131072}
        | {"rope_scaling": LONG_YARN | {"original_max_position_embeddings": 8192}},
        7_241_732_096,
    ),
    "mistralai/Mistral-7B-Instruct-v0.2": (
        MISTRAL_7B | {"rope_theta": 1000000.0, "sliding_window": None},
        7_241_732_096,
    ),
    "mistralai/Mistral-7B-v0.3": (
        MISTRAL_7B | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
        7_248_023_552,
    ),
    "mistralai/Mistral-Nemo-Base-2407": (
        MISTRAL
        | sizes(5120, 14336, 40, 32, 8)
        | {"head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 1000000.0, "sliding_window": None}
        | {"vocab_size": 131072},
        12_247_782_400,
    ),
    "mistralai/Ministral-8B-Instruct-2410": (
        MISTRAL
        | sizes(4096, 12288, 36, 32, 8)
        | {"head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 100000000.0, "sliding_window": 32768}
        | {"vocab_size": 131072},
        8_019_808_256,
    ),
    "mistralai/Mistral-Small-24B-Base-2501": (
        MISTRAL
        | sizes(5120, 32768, 40, 32, 8)
        | {"head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 100000000.0, "sliding_window": None}
        | {"vocab_size": 131072},
        23_572_403_200,
    ),
    "Qwen/Qwen1.5-7B": (
        qwen2(4096, 11008, 32, 32, 32, 151936, 32768, max_window_layers=28),
        7_721_324_544,
    ),
    "Qwen/Qwen2-0.5B": (qwen2(896, 4864, 24, 14, 2, 151936, 131072, tie_word_embeddings=True), 494_032_768),
    "Qwen/Qwen2-7B-Instruct": (
        qwen2(3584, 18944, 28, 28, 4, 152064, 131072, max_position_embeddings=32768),
        7_615_616_512,
    ),
    "Qwen/Qwen2.5-0.5B": (
        qwen2(896, 4864, 24, 14, 2, 151936, 32768, tie_word_embeddings=True, use_mrope=False),
        494_032_768,
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": (
        qwen2(1536, 8960, 28, 12, 2, 151936, 32768, max_window_layers=21, tie_word_embeddings=True),
        1_543_714_304,
    ),
    "Qwen/Qwen2.5-3B": (
        qwen2(2048, 11008, 36, 16, 2, 151936, 32768, tie_word_embeddings=True),
        3_085_938_688,
    ),
    "Qwen/Qwen2.5-7B-Instruct": (qwen2(3584, 18944, 28, 28, 4, 152064, 131072), 7_615_616_512),
    "Qwen/Qwen2.5-7B-Instruct, with its README's yarn": (
        qwen2(3584, 18944, 28, 28, 4, 152064, 32768, rope_scaling=QWEN_YARN),
        7_615_616_512,
    ),
    "Qwen/Qwen2.5-14B": (qwen2(5120, 13824, 48, 40, 8, 152064, 131072, rms_norm_eps=1e-05), 14_770_033_664),
    "Qwen/Qwen2.5-32B": (qwen2(5120, 27648, 64, 40, 8, 152064, 131072, rms_norm_eps=1e-05), 32_763_876_352),
    "Qwen/Qwen2.5-72B": (qwen2(8192, 29568, 80, 64, 8, 152064, 131072, rms_norm_eps=1e-05), 72_706_203_648),
    "Qwen/Qwen2.5-Coder-7B": (
        qwen2(3584, 18944, 28, 28, 4, 152064, 131072, **QWEN_CODER, max_position_embeddings=32768),
        7_615_616_512,
    ),
    "Qwen/Qwen2.5-Math-1.5B": (
        qwen2(1536, 8960, 28, 12, 2, 151936, 4096, max_window_layers=21, rope_theta=10000, tie_word_embeddings=True)
        | {"use_mrope": False},
        1_543_714_304,
    ),
    "Qwen/QwQ-32B": (
        qwen2(5120, 27648, 64, 40, 8, 152064, 32768, rms_norm_eps=1e-05, max_position_embeddings=40960),
        32_763_876_352,
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        qwen2(1536, 8960, 28, 12, 2, 151936, 4096, max_window_layers=21, rope_theta=10000, **DISTILLED),
        1_777_088_000,
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (
        qwen2(3584, 18944, 28, 28, 4, 152064, 4096, rope_theta=10000, **DISTILLED),
        7_615_616_512,
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": (
        qwen2(5120, 13824, 48, 40, 8, 152064, 131072, rms_norm_eps=1e-05, **DISTILLED),
        14_770_033_664,
    ),
    "Qwen/Qwen3-0.6B": (qwen3(1024, 3072, 28, 16, tie_word_embeddings=True), 596_049_920),
    "Qwen/Qwen3-1.7B": (qwen3(2048, 6144, 28, 16, tie_word_embeddings=True), 1_720_574_976),
    "Qwen/Qwen3-4B": (qwen3(2560, 9728, 36, 32, tie_word_embeddings=True), 4_022_468_096),
    "Qwen/Qwen3-4B-Instruct-2507": (
        qwen3(2560, 9728, 36, 32, tie_word_embeddings=True, rope_theta=5000000, max_position_embeddings=262144),
        4_022_468_096,
    ),
    "Qwen/Qwen3-8B": (qwen3(4096, 12288, 36, 32), 8_190_735_360),
    "Qwen/Qwen3-8B-FP8": (
        qwen3(4096, 12288, 36, 32, quantization_config=FP8 | {"modules_to_not_convert": ["lm_head"]}),
        8_190_735_360,
    ),
    "Qwen/Qwen3-14B": (qwen3(5120, 17408, 40, 40), 14_768_307_200),
    "Qwen/Qwen3-32B": (qwen3(5120, 25600, 64, 64), 32_762_123_264),
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": (
        qwen3(4096, 12288, 36, 32, max_position_embeddings=131072)
        | {"rope_scaling": R1_ROPE | {"attn_factor": 0.8782488562869419}, "rope_theta": 1000000},
        8_190_735_360,
    ),
}

DEEPSEEK = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "max_position_embeddings": 163840,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "n_group": 1,
    "topk_group": 1,
}
DEEPSEEK_ROPE = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
V2_LITE = DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": DEEPSEEK_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V3 = DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": FP8,
    "rope_scaling": DEEPSEEK_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
V2 = V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "max_position_embeddings": 32768,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "vocab_size": 32000,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "vocab_size": 151936,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    | {"rope_type": "yarn", "truncate": False},
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
WINDOWS_IN_TURN = ["sliding_attention", "full_attention"]
MIXTURES = {
    "openai/gpt-oss-20b": (
        GPT_OSS | sizes(2880, 2880, 24, 64, 8) | {"num_local_experts": 32, "layer_types": 12 * WINDOWS_IN_TURN},
        20_914_757_184,
    ),
    "openai/gpt-oss-120b": (
        GPT_OSS | sizes(2880, 2880, 36, 64, 8) | {"num_local_experts": 128, "layer_types": 18 * WINDOWS_IN_TURN},
        116_829_156_672,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        QWEN2
        | sizes(2048, 5632, 24, 16, 16)
        | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "decoder_sparse_step": 1}
        | {"max_position_embeddings": 32768, "max_window_layers": 21, "sliding_window": 32768, "vocab_size": 151936}
        | {"moe_intermediate_size": 1408, "norm_topk_prob": False, "num_experts": 60, "num_experts_per_tok": 4}
        | {"output_router_logits": False, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632},
        14_315_784_192,
    ),
    "mistralai/Mixtral-8x7B-v0.1": (MIXTRAL | sizes(*B8), 46_702_792_704),
    "mistralai/Mixtral-8x22B-v0.1": (
        MIXTRAL
        | sizes(6144, 16384, 56, 48, 8)
        | {"max_position_embeddings": 65536, "rope_theta": 1000000, "router_aux_loss_coef": 0.001}
        | {"router_jitter_noise": 0.0},
        140_620_634_112,
    ),
    "Qwen/Qwen3-30B-A3B": (
        QWEN3_MOE | sizes(2048, 6144, 48, 32, 4) | {"moe_intermediate_size": 768, "max_window_layers": 48},
        30_532_122_624,
    ),
    "Qwen/Qwen3-235B-A22B": (
        QWEN3_MOE | sizes(4096, 12288, 94, 64, 4) | {"moe_intermediate_size": 1536, "max_window_layers": 94},
        235_093_634_560,
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (V2_LITE, 15_706_484_224),
    "deepseek-ai/DeepSeek-V2": (V2, 235_741_434_880),
    # Its files have 684,531,386,000 entries: 13,463,426,304 of the layer for multi-token prediction, 41,540,496 scales.
    "deepseek-ai/DeepSeek-V3": (V3, 671_026_419_200),
}
# Billions of parameters by their authors, all and those that a token meets, rounded or cut. DeepSeek's active ones do
# without the embedding, the others' have it.
BILLIONS = {
    "openai/gpt-oss-20b": ("20.9", "3.6"),
    "openai/gpt-oss-120b": ("116.8", "5.1"),
    "Qwen/Qwen1.5-MoE-A2.7B": ("14.3", "2.7"),
    "mistralai/Mixtral-8x7B-v0.1": ("46.7", "12.9"),
    "mistralai/Mixtral-8x22B-v0.1": ("141", "39"),
    "Qwen/Qwen3-30B-A3B": ("30.5", "3.3"),
    "Qwen/Qwen3-235B-A22B": ("235", "22"),
    "deepseek-ai/DeepSeek-V2-Lite": ("15.7", "2.4"),
    "deepseek-ai/DeepSeek-V2": ("236", "21"),
    "deepseek-ai/DeepSeek-V3": ("671", "37"),
}
AWQ = {"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm"}
GPTQ = {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "quant_method": "gptq", "sym": True}
BITSANDBYTES = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
DUAL_CHUNKS = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}

GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False, "head_dim": 256}
GEMMA2 |= {"attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA2 |= {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
GEMMA2 |= {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "rms_norm_eps": 1e-06}
GEMMA2 |= {"rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000}
GEMMA3 = {name: value for name, value in GEMMA2.items() if name != "hidden_act"}
GEMMA3 |= {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None}
GEMMA3 |= {"final_logit_softcapping": None, "max_position_embeddings": 32768, "rope_local_base_freq": 10000}
GEMMA3 |= {"rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6}
GEMMA3 |= {"vocab_size": 262144}
GEMMA3_12B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model", "patch_size": 14},
}
OLMO3_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0}
OLMO3_YARN |= {"attention_factor": 1.2079441541679836, "beta_slow": 1.0}

# With other norms, MLPs, biases and layers than Llama's.
FORMS = {
    "google/gemma-2b": (
        {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "attention_bias": False, "head_dim": 256}
        | {"attention_dropout": 0.0, "hidden_act": "gelu", "hidden_activation": None, "rms_norm_eps": 1e-06}
        | {"max_position_embeddings": 8192, "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000}
        | sizes(2048, 16384, 18, 8, 1),
        2_506_172_416,
    ),
    "google/gemma-2-2b": (GEMMA2 | sizes(2304, 9216, 26, 8, 4), 2_614_341_888),
    "google/gemma-3-1b-pt": (GEMMA3 | sizes(1152, 6912, 26, 4, 1), 999_885_952),
    "allenai/OLMo-7B-hf": (
        {"architectures": ["OlmoForCausalLM"], "model_type": "olmo", "attention_bias": False, "clip_qkv": None}
        | {"attention_dropout": 0.0, "hidden_act": "silu", "max_position_embeddings": 2048, "rope_theta": 10000.0}
        | {"rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 50304}
        | sizes(4096, 11008, 32, 32, 32),
        6_888_095_744,
    ),
    "allenai/OLMo-2-1124-7B": (
        {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False, "hidden_act": "silu"}
        | {"attention_dropout": 0.0, "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "rope_theta": 500000}
        | {"rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 100352}
        | sizes(4096, 11008, 32, 32, 32),
        7_298_617_344,
    ),
    "allenai/Olmo-3-1025-7B": (
        {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "attention_bias": False, "hidden_act": "silu"}
        | {"attention_dropout": 0.0, "max_position_embeddings": 65536, "rms_norm_eps": 1e-06, "rope_theta": 500000}
        | {"rope_scaling": OLMO3_YARN, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278}
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8}
        | sizes(4096, 11008, 32, 32, 32),
        7_298_011_136,
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False, "mlp_bias": False}
        | {"attention_dropout": 0.0, "hidden_act": "silu", "max_position_embeddings": 65536, "max_window_layers": 28}
        | {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36}
        | {"pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0}
        | {"sliding_window": None, "use_sliding_window": False, "vocab_size": 128256}
        | sizes(2048, 11008, 36, 16, 4),
        3_075_098_624,
    ),
    "CohereForAI/c4ai-command-r7b-12-2024": (
        {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "attention_bias": False, "head_dim": 128}
        | {"attention_dropout": 0.0, "hidden_act": "silu", "layer_norm_eps": 1e-05, "logit_scale": 0.25}
        | {"max_position_embeddings": 8192, "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0}
        | {"sliding_window": 4096, "sliding_window_pattern": 4, "order_of_interleaved_layers": "local_attn_first"}
        | {"layer_switch": 4, "position_embedding_type": "rope_gptj", "use_embedding_sharing": True}
        | {"use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True}
        | {"cache_implementation": "hybrid", "vocab_size": 256000}
        | sizes(4096, 14336, 32, 32, 8),
        8_028_033_024,
    ),
    "THUDM/GLM-4-9B-0414": (
        {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True, "head_dim": 128}
        | {"attention_dropout": 0.0, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-05}
        | {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 151552}
        | sizes(4096, 13696, 40, 32, 2),
        9_400_279_040,
    ),
    "ibm-granite/granite-3b-code-base-2k": (
        LLAMA
        | sizes(2560, 10240, 32, 32, 32)
        | {"attention_bias": True, "mlp_bias": True, "vocab_size": 49152, "max_position_embeddings": 2048}
        | {"tie_word_embeddings": True},
        3_482_503_680,
    ),
    "bigcode/starcoder2-3b": (
        {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "use_bias": True}
        | {"attention_dropout": 0.1, "embedding_dropout": 0.1, "residual_dropout": 0.1, "norm_epsilon": 1e-05}
        | {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 16384, "sliding_window": 4096}
        | {"rope_theta": 999999.4420358813, "vocab_size": 49152}
        | sizes(3072, 12288, 30, 24, 2),
        3_030_371_328,
    ),
    "EleutherAI/pythia-1.4b": (
        {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu", "rotary_pct": 0.25}
        | {"layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "rotary_emb_base": 10000, "vocab_size": 50304}
        | {"use_parallel_residual": True, "tie_word_embeddings": False}
        | sizes(2048, 8192, 24, 16),
        1_414_647_808,
    ),
}

# What is not computed here, and the field and value by which that is said.
REFUSED = {
    "CohereForAI/c4ai-command-r-plus": (
        {"architectures": ["CohereForCausalLM"], "model_type": "cohere", "hidden_act": "silu", "use_qk_norm": True}
        | {"layer_norm_eps": 1e-05, "logit_scale": 0.8333333333333334, "rope_theta": 75000000.0, "vocab_size": 256000}
        | sizes(12288, 33792, 64, 96, 8),
        r"use_qk_norm=True is not supported; supported: null or False",
    ),
    "mistralai/Ministral-3-3B, its text": (
        MISTRAL | {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"},
        r"'Ministral3ForCausalLM'.*; its queries are times a factor that grows with their place",
    ),
    "Qwen/Qwen2.5-7B-Instruct-1M": (
        qwen2(3584, 18944, 28, 28, 4, 152064, 32768, dual_chunk_attention_config=DUAL_CHUNKS),
        "dual_chunk_attention_config=.* is not supported because its meaning is unknown",
    ),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": (
        qwen2(3584, 18944, 28, 28, 4, 152064, 131072, quantization_config=AWQ),
        "quantization_config: quant_method='awq' is not supported; supported: 'fp8' in blocks",
    ),
    "TheBloke/Llama-2-7B-GPTQ": (
        LLAMA_2 | sizes(*B7, 32) | {"quantization_config": GPTQ},
        "quantization_config: quant_method='gptq' is not supported",
    ),
    "unsloth/llama-3-8b-bnb-4bit": (
        LLAMA_3 | sizes(*B8) | {"quantization_config": BITSANDBYTES},
        "quantization_config: quant_method='bitsandbytes' is not supported",
    ),
    "neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8": (
        LLAMA_31 | sizes(*B8) | {"quantization_config": {"quant_method": "compressed-tensors"}},
        "quantization_config: quant_method='compressed-tensors' is not supported",
    ),
    "mlx-community/Qwen3-8B-4bit": (
        qwen3(4096, 12288, 36, 32, quantization={"group_size": 64, "bits": 4}),
        "quantization={'group_size': 64, 'bits': 4} is not supported",
    ),
    "upstage/SOLAR-0-70b-16bit": (
        LLAMA_2 | sizes(*B70) | {"rope_scaling": {"factor": 2.0, "type": "dynamic"}},
        "rope_type='dynamic' is not supported",
    ),
}
