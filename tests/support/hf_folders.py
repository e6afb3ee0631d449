"""Folders as Hugging Face's `transformers` saves them, written by hand: no library of theirs, and none of ours."""

import json
import struct

import ml_dtypes
import numpy as np

KINDS = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
KINDS |= {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "U8": np.dtype(np.uint8)}
SIZES = {
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.44.0",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": True,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
CONFIGS = {
    "LlamaForCausalLM": {"model_type": "llama", "num_key_value_heads": 2, "attention_bias": False, "mlp_bias": False},
    "MistralForCausalLM": {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 8, "sliding_window": None},
    "Qwen2ForCausalLM": {"model_type": "qwen2", "num_key_value_heads": 2, "use_sliding_window": False},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8, "attention_bias": False},
    "DeepseekV2ForCausalLM": {"model_type": "deepseek_v2", "num_key_value_heads": 4, **LATENT, "q_lora_rank": None},
    "DeepseekV3ForCausalLM": {"model_type": "deepseek_v3", "num_key_value_heads": 4, **LATENT},
    "MixtralForCausalLM": {
        "model_type": "mixtral",
        "num_key_value_heads": 2,
        "sliding_window": None,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "router_jitter_noise": 0.0,
    },
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    },
    "GptOssForCausalLM": {
        "model_type": "gpt_oss",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "rope_theta": 150000,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        | {"original_max_position_embeddings": 16},
    },
}
V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
GROUPS = {"n_group": 4, "topk_group": 2}
MIXTURE_KEYS = (
    "experts",
    "experts_per_token",
    "d_expert",
    "shared_experts",
    "router_score",
    "router_normalized",
    "router_scale",
    "router_groups",
    "router_groups_chosen",
)
# Layers with experts: an architecture, and changes.
MIXTURES = {
    "Mixtral": ("MixtralForCausalLM", {}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", {}),
    "Qwen3-MoE, every other layer": (
        "Qwen3MoeForCausalLM",
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False},
    ),
    "DeepSeek-V2": (V2, {"first_k_dense_replace": 1, "routed_scaling_factor": 16.0}),
    "DeepSeek-V2, groups": (
        V2,
        {"first_k_dense_replace": 0, "topk_method": "group_limited_greedy", **GROUPS, "num_hidden_layers": 3},
    ),
    "DeepSeek-V3": (V3, {"first_k_dense_replace": 1, "num_hidden_layers": 3, **GROUPS, "n_shared_experts": 1}),
}


def config_of(architecture, **changes):
    """A config.json; None as a change writes null."""
    return {"architectures": [architecture], **SIZES, **CONFIGS[architecture], **changes}


def without(config, *names):
    return {key: value for key, value in config.items() if key not in names}


def shapes_of(config):
    """Every tensor of a model, in the order of its layers."""
    c, (architecture,) = config, config["architectures"]
    if architecture in FORMS or c.get("mlp_bias"):
        return form_shapes(c)
    d, f, h = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    table = {"model.embed_tokens.weight": (c["vocab_size"], d)}
    layers = {}
    for layer in range(c["num_hidden_layers"]):
        parts = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        mlp = mlp_shapes("mlp", d, f)
        if architecture.startswith("Phi3"):
            mlp = {
                f"mlp.{name}": x for name, x in of_phi3({k.removeprefix("mlp."): x for k, x in mlp.items()}, c).items()
            }
        parts |= mixture_shapes(c, d) if has_experts(c, layer) else mlp
        attention = latent_shapes(c, d, h) if "kv_lora_rank" in c else grouped_shapes(c, d, h, architecture)
        parts |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        layers |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    head = {} if c["tie_word_embeddings"] else {"lm_head.weight": (c["vocab_size"], d)}
    return {**table, **layers, "model.norm.weight": (d,), **head}


FORMS = [
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Olmo",
    "Olmo2",
    "Olmo3",
    "Arcee",
    "Starcoder2",
    "Nemotron",
    "GPTNeoX",
    "Ministral",
    "SmolLM3",
]
FORMS = [f"{family}ForCausalLM" for family in (*FORMS, "Cohere", "Cohere2", "Glm4")]
USUAL = ("model.embed_tokens", "model.layers", "model.norm", "lm_head", "self_attn.o_proj")
OF_NEOX = ("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out", "attention.dense")
UP_AND_DOWN = {
    "gpt_neox": ["dense_h_to_4h", "dense_4h_to_h"],
    "starcoder2": ["c_fc", "c_proj"],
    "arcee": ["up_proj", "down_proj"],
    "nemotron": ["up_proj", "down_proj"],
}


def form_shapes(c):
    """The same of families with other norms, MLPs and biases than Llama's."""
    kind, d, f, h = c["model_type"], c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    is_neox, width, kv_heads = kind == "gpt_neox", c.get("head_dim", d // h), c.get("num_key_value_heads", h)
    table, at, last, head, out = OF_NEOX if is_neox else USUAL
    norms = [] if kind == "olmo" else ["input_layernorm", "post_attention_layernorm"]
    normed = kind in ("olmo2", "olmo3")
    norms = ["post_attention_layernorm", "post_feedforward_layernorm"] if normed else norms
    norms = norms[:1] if kind.startswith("cohere") else norms
    norms += ["post_self_attn_layernorm", "post_mlp_layernorm"] if kind == "glm4" else []
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if kind in ("gemma2", "gemma3_text") else []
    heads = {"q": h * width, "k": kv_heads * width, "v": kv_heads * width}
    attention = {f"self_attn.{name}_proj": (rows, d) for name, rows in heads.items()}
    attention = {"attention.query_key_value": (3 * d, d)} if is_neox else attention
    attention |= {} if kind in ("glm4", "helium") else {out: (d, h * width)}
    up, down = UP_AND_DOWN.get(kind, ["up_proj", "down_proj"])
    mlp = {f"mlp.{up}": (f, d), f"mlp.{down}": (d, f)}
    mlp |= {} if kind in UP_AND_DOWN else {"mlp.gate_proj": (f, d)}
    mlp = {"mlp.gate_up_proj": (2 * f, d), "mlp.down_proj": (d, f)} if kind == "glm4" else mlp
    biased = [attention] * bool(c.get("use_bias") or c.get("attention_bias"))
    biased += [mlp] * bool(is_neox or c.get("use_bias") or c.get("mlp_bias"))
    layer = {f"{name}.weight": shape for name, shape in (attention | mlp).items()} | {
        f"{x}.weight": (d,) for x in norms
    }
    layer |= {f"self_attn.{name}_norm.weight": (heads[name],) for name in "qk"[: 2 * normed]}
    layer |= {f"self_attn.{name}_norm.weight": (width,) for name in "qk"[: 2 * (kind == "gemma3_text")]}
    layer |= {f"{name}.bias": shape[:1] for part in biased for name, shape in part.items()}
    layer |= {f"{out}.weight": (d, h * width)}
    ends = ["weight", "bias"] if kind in ("gpt_neox", "starcoder2", "nemotron") else ["weight"][: kind != "olmo"]
    layer |= {f"{name}.bias": (d,) for name in norms if "bias" in ends}
    shapes = {f"{at}.{number}.{name}": x for number in range(c["num_hidden_layers"]) for name, x in layer.items()}
    shapes |= {f"{last}.{end}": (d,) for end in ends} | {f"{table}.weight": (c["vocab_size"], d)}
    return shapes if c["tie_word_embeddings"] else shapes | {f"{head}.weight": (c["vocab_size"], d)}


def has_experts(c, layer):
    if "first_k_dense_replace" in c:
        return layer >= c["first_k_dense_replace"]
    if "num_experts" in c:
        return (layer + 1) % c.get("decoder_sparse_step", 1) == 0 and layer not in c.get("mlp_only_layers", [])
    return "num_local_experts" in c


def of_phi3(shapes, c):
    """The tensors that Phi-3 has in place of those of a Llama."""
    joined = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for whole, parts in joined.items():
        rows = [shapes.pop(f"{part}.weight") for part in parts if f"{part}.weight" in shapes]
        shapes |= {f"{whole}.weight": (sum(row for row, _ in rows), c["hidden_size"])} if rows else {}
    return shapes


def mlp_shapes(at, d, f, names=("gate_proj", "up_proj", "down_proj")):
    shapes = zip(names, ((f, d), (f, d), (d, f)))
    return {f"{at}.{name}.weight": shape for name, shape in shapes}


def mixture_shapes(c, d):
    at, names, width = "mlp", ("gate_proj", "up_proj", "down_proj"), c.get("moe_intermediate_size")
    if c["model_type"] == "granitemoe":
        e, width, at = c["num_local_experts"], c["intermediate_size"], "block_sparse_moe"
        fused = {"input_linear": (e, 2 * width, d), "output_linear": (e, d, width), "router.layer": (e, d)}
        return {f"{at}.{name}.weight": shape for name, shape in fused.items()}
    if c["model_type"] == "gpt_oss":
        e, width = c["num_local_experts"], c["intermediate_size"]
        fused = {"experts.gate_up_proj": (e, d, 2 * width), "experts.down_proj": (e, width, d)}
        fused |= {f"{name}_bias": (e, columns) for name, (_, _, columns) in fused.items()}
        return {f"{at}.{name}": shape for name, shape in fused.items()} | {
            f"{at}.router.weight": (e, d),
            f"{at}.router.bias": (e,),
        }
    if c["model_type"] == "olmoe":
        width = c["intermediate_size"]
    if c["model_type"] == "mixtral":
        at, names, width = "block_sparse_moe", ("w1", "w3", "w2"), c["intermediate_size"]
    experts = c.get("n_routed_experts") or c.get("num_experts") or c["num_local_experts"]
    shapes = {f"{at}.gate.weight": (experts, d)}
    for expert in range(experts):
        shapes |= mlp_shapes(f"{at}.experts.{expert}", d, width, names)
    if c.get("n_shared_experts"):
        shapes |= mlp_shapes(f"{at}.shared_experts", d, width * c["n_shared_experts"])
    if c["model_type"] == "qwen2_moe":
        shapes |= mlp_shapes(f"{at}.shared_expert", d, c["shared_expert_intermediate_size"])
        shapes[f"{at}.shared_expert_gate.weight"] = (1, d)
    with_bias = c["model_type"] in ("deepseek_v3", "glm4_moe")
    return shapes | ({f"{at}.gate.e_score_correction_bias": (experts,)} if with_bias else {})


def grouped_shapes(c, d, h, architecture):
    width = c.get("head_dim") or d // h
    wide = {"q": h * width, "k": c["num_key_value_heads"] * width, "v": c["num_key_value_heads"] * width}
    shapes = {f"{name}_proj.weight": (rows, d) for name, rows in wide.items()} | {"o_proj.weight": (d, h * width)}
    if architecture.startswith("Phi3"):
        return of_phi3(shapes, c)
    if c.get("qkv_bias", architecture == "Qwen2ForCausalLM") or c.get("attention_bias"):
        shapes |= {f"{name}_proj.bias": (rows,) for name, rows in wide.items()}
    if architecture.startswith("GptOss"):
        shapes |= {"sinks": (h,)}
    if c.get("attention_bias") and architecture.startswith(("GptOss", "Qwen3")):
        shapes |= {"o_proj.bias": (d,)}
    if architecture.startswith("Qwen3") or c.get("use_qk_norm"):
        shapes |= {"q_norm.weight": (width,), "k_norm.weight": (width,)}
    if architecture.startswith("HunYuan"):
        shapes |= {"query_layernorm.weight": (width,), "key_layernorm.weight": (width,)}
    if architecture.startswith("Olmoe"):
        shapes |= {f"{name}_norm.weight": (wide[name],) for name in "qk"}
    return shapes


def latent_shapes(c, d, h):
    nope, rope, value, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
    shapes = {
        "kv_a_proj_with_mqa.weight": (rank + rope, d),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (h * (nope + value), rank),
        "o_proj.weight": (d, h * value),
    }
    if c["q_lora_rank"] is None:
        return shapes | {"q_proj.weight": (h * (nope + rope), d)}
    narrow = c["q_lora_rank"]
    return shapes | {
        "q_a_proj.weight": (narrow, d),
        "q_a_layernorm.weight": (narrow,),
        "q_b_proj.weight": (h * (nope + rope), narrow),
    }


def random_tensors(shapes, kind="F32", seed=0):
    """Values of every size that the dtype has, but no NaN."""
    draw = np.random.default_rng(seed)
    return {
        name: (draw.normal(size=shape) * 8.0 ** draw.integers(-2, 2)).astype(KINDS[kind])
        for name, shape in shapes.items()
    }


def in_blocks(tensors, block):
    """The matrices of layers in float8 with a scale for each block, beside what they stand for, entry by entry."""
    stored, meant = {}, {}
    for name, array in tensors.items():
        stored[name] = meant[name] = array
        if array.ndim == 2 and ".layers." in name:
            rows, columns = ([at // side for at in range(size)] for size, side in zip(array.shape, block))
            scales = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
            for (r, c), value in np.ndenumerate(array):
                scales[rows[r], columns[c]] = max(scales[rows[r], columns[c]], np.float32(abs(value)) / np.float32(448))
            stored[name] = (array / scales[np.ix_(rows, columns)]).astype(KINDS["F8_E4M3"])
            stored[f"{name}_scale_inv"] = scales
            meant[name] = stored[name].astype(np.float32) * scales[np.ix_(rows, columns)]
    return stored, meant


def fused(tensors):
    """Tensors of a mixture as `transformers` 5 has them in memory: all experts of a layer in two, and Mixtral's under
    the others' names."""
    kernels = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
    found, of_layers = {}, {}
    for name, array in tensors.items():
        layer, _, rest = name.partition(".experts.")
        layer = layer.replace(".block_sparse_moe", ".mlp")
        if rest:
            of_layers.setdefault(layer, {}).setdefault(kernels[rest.split(".")[1]], []).append(array)
        else:
            found[layer] = array
    for layer, of in of_layers.items():
        pairs = [np.concatenate(pair) for pair in zip(of["gate"], of["up"])]
        found |= {f"{layer}.experts.gate_up_proj": np.stack(pairs), f"{layer}.experts.down_proj": np.stack(of["down"])}
    return found


def write_file(path, tensors):
    """One safetensors file."""
    names, header, at = {dtype: name for name, dtype in KINDS.items()}, {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values()))


def write_folder(folder, config, tensors, *, shards=1):
    """config.json, the tensors in so many files, with an index if there are several, and a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"parallax": "bytes"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    if shards == 1:
        write_file(folder / "model.safetensors", tensors)
        return folder
    files = [f"model-{at + 1:05}-of-{shards:05}.safetensors" for at in range(shards)]
    homes = {name: files[at % shards] for at, name in enumerate(tensors)}
    for file in files:
        write_file(folder / file, {name: tensors[name] for name in tensors if homes[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return folder


def read_folder(folder):
    """Every tensor of a folder, by name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        for name, about in header.items():
            if name != "__metadata__":
                bits = data[slice(*about["data_offsets"])]
                found[name] = np.frombuffer(bits, KINDS[about["dtype"]]).reshape(about["shape"])
    return found
