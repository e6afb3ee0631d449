"""Tiny random models made by Hugging Face's `transformers`, and what they and ours say of the same tokens.

Needs the extra hf-tests; the table in docs/measured/hf.md is made of the same checks, by benchmarks/hf_table.py.
"""

import contextlib
import dataclasses
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing here comes from elsewhere

import jax
import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy

from parallax.cli.convert import main
from parallax.config.sections import MeshConfig, ModelConfig, SampleConfig
from parallax.config.settings import load_settings
from parallax.data.tokenizer import Bytes
from parallax.inference.generate import generate
from parallax.inference.run import restore_params
from parallax.interop.hf_config import read_config, write_config
from parallax.model.batch import IGNORED
from parallax.sharding.mesh import make_mesh
from parallax.step.optimizer import make_optimizer
from parallax.step.step import TrainStep, abstract_state, model_of
from support.hf_folders import read_folder

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

CONTEXT, FACTOR = 32, 4.0
SIZES = dict(vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
GROUPED = SIZES | dict(num_key_value_heads=2, max_position_embeddings=CONTEXT)
LATENT = SIZES | dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    first_k_dense_replace=4,
    max_position_embeddings=CONTEXT,
)


def scaled(kind, **more):
    """Fields of a model whose context was extended."""
    rope = dict(rope_type=kind, rope_theta=1000.0, factor=FACTOR, **more)
    if kind != "linear":
        rope["original_max_position_embeddings"] = CONTEXT
    return dict(rope_parameters=rope, max_position_embeddings=int(CONTEXT * FACTOR))


EXPERTS = dict(num_experts_per_tok=3, moe_intermediate_size=24)
SOME_EXPERTS = LATENT | EXPERTS | dict(first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=2)
GROUPS = dict(n_routed_experts=16, n_group=4, topk_group=2)
QWEN3_MOE = GROUPED | EXPERTS | dict(head_dim=16, num_experts=8, norm_topk_prob=True)
LLAMA3 = scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0)
FAMILIES = {
    "Llama 2": ("Llama", GROUPED | dict(num_key_value_heads=4, rms_norm_eps=1e-5)),
    "Llama 2, linear": ("Llama", GROUPED | scaled("linear")),
    "Llama 3, llama3, tied": ("Llama", GROUPED | LLAMA3 | dict(tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "Mistral, wide heads": ("Mistral", GROUPED | dict(sliding_window=None, head_dim=16)),
    "Mistral, a window": ("Mistral", GROUPED | dict(sliding_window=5)),
    "Qwen2, windows in some layers": (
        "Qwen2",
        GROUPED | dict(use_sliding_window=True, sliding_window=20, max_window_layers=2),
    ),
    "Qwen2, tied": ("Qwen2", GROUPED | dict(tie_word_embeddings=True)),
    "Qwen2, yarn": ("Qwen2", GROUPED | scaled("yarn")),
    "Qwen3": ("Qwen3", GROUPED | dict(head_dim=16)),
    "DeepSeek-V2, yarn": ("DeepseekV2", LATENT | scaled("yarn", mscale=0.707, mscale_all_dim=0.707)),
    "DeepSeek-V2, whole queries": ("DeepseekV2", LATENT | dict(q_lora_rank=None)),
    "DeepSeek-V3, yarn": ("DeepseekV3", LATENT | scaled("yarn", mscale=1.0, mscale_all_dim=1.0)),
    "DeepSeek-V3, yarn on what is rotated": ("DeepseekV3", LATENT | scaled("yarn")),
    "DeepSeek-V3, halves": ("DeepseekV3", LATENT | dict(rope_interleave=False)),
}
MIXTURES = {
    "Mixtral": ("Mixtral", GROUPED | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "Mixtral, a window": ("Mixtral", GROUPED | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=7)),
    "Qwen3-MoE": ("Qwen3Moe", QWEN3_MOE),
    "Qwen3-MoE, every other layer": ("Qwen3Moe", QWEN3_MOE | dict(decoder_sparse_step=2, norm_topk_prob=False)),
    "DeepSeek-V2, experts": ("DeepseekV2", SOME_EXPERTS | dict(routed_scaling_factor=1.5)),
    "DeepSeek-V2, groups of experts": (
        "DeepseekV2",
        SOME_EXPERTS
        | GROUPS
        | scaled("yarn", mscale=0.7, mscale_all_dim=0.7)
        | dict(topk_method="group_limited_greedy"),
    ),
    "DeepSeek-V3, groups of experts": (
        "DeepseekV3",
        SOME_EXPERTS | GROUPS | scaled("yarn", mscale=1.0, mscale_all_dim=1.0) | dict(n_shared_experts=1),
    ),
    "DeepSeek-V3, one group": (
        "DeepseekV3",
        SOME_EXPERTS | dict(n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0),
    ),
}
LONGROPE = dict(rope_type="longrope", rope_theta=1000.0, partial_rotary_factor=0.75)
LONGROPE |= dict(short_factor=[1.0, 1.1, 1.3], long_factor=[1.0, 2.0, 4.0])
# A pad_token_id would leave a row of their table without a gradient.
FACTORS = dict(attention_multiplier=0.3, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=0.5)
FAMILIES |= {
    "Granite": ("Granite", GROUPED | FACTORS | dict(tie_word_embeddings=True)),
    "Phi-3": ("Phi3", GROUPED | dict(pad_token_id=None)),
    "Phi-3, rotated in part": (
        "Phi3",
        GROUPED | dict(pad_token_id=None, rope_parameters=dict(rope_theta=1000.0, partial_rotary_factor=0.75)),
    ),
    "Phi-3, longrope": (
        "Phi3",
        GROUPED | dict(pad_token_id=None, original_max_position_embeddings=8, rope_parameters=LONGROPE),
    ),
    "Phi-3, a window": ("Phi3", GROUPED | dict(pad_token_id=None, sliding_window=CONTEXT)),
    "GLM": ("Glm", GROUPED | dict(head_dim=16, pad_token_id=None)),
    "Ernie 4.5": ("Ernie4_5", GROUPED | dict(head_dim=16)),
    "Helium": ("Helium", GROUPED | dict(head_dim=8)),
    "Hunyuan": ("HunYuanDenseV1", GROUPED | dict(head_dim=16)),
}
LINEAR_IN_FULL = {
    "full_attention": dict(rope_type="linear", rope_theta=1000.0, factor=FACTOR),
    "sliding_attention": dict(rope_type="default", rope_theta=100.0),
}
UNGROUPED = {key: value for key, value in GROUPED.items() if key != "num_key_value_heads"}
FAMILIES |= {
    "Gemma": ("Gemma", GROUPED | dict(num_key_value_heads=1, head_dim=16, pad_token_id=0)),
    "Gemma 2": (
        "Gemma2",
        GROUPED
        | dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=20, pad_token_id=0)
        | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    ),
    "Gemma 3": (
        "Gemma3",
        GROUPED
        | dict(head_dim=16, query_pre_attn_scalar=144, sliding_window=20, pad_token_id=0)
        | dict(max_position_embeddings=int(CONTEXT * FACTOR), rope_parameters=LINEAR_IN_FULL)
        | dict(layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]),
    ),
    "OLMo": ("Olmo", GROUPED | dict(pad_token_id=0, tie_word_embeddings=True)),
    "OLMo 2": ("Olmo2", GROUPED | dict(pad_token_id=0)),
    "StarCoder2": ("Starcoder2", GROUPED | dict(bos_token_id=0, eos_token_id=0)),
    "StarCoder2, a window": ("Starcoder2", GROUPED | dict(bos_token_id=0, eos_token_id=0, sliding_window=7)),
    "Arcee": ("Arcee", GROUPED | dict(bos_token_id=0, eos_token_id=0)),
    "Nemotron": ("Nemotron", GROUPED | dict(head_dim=16)),
    "GPT-NeoX": ("GPTNeoX", UNGROUPED | dict(rope_parameters=dict(rope_theta=1000.0, partial_rotary_factor=0.5))),
    "GPT-NeoX, one after the other": ("GPTNeoX", UNGROUPED | dict(use_parallel_residual=False, attention_bias=False)),
}
IDS = dict(bos_token_id=0, eos_token_id=0, pad_token_id=None)
# Six heads, of a width of their own, and a vocab that nothing divides; windows shorter than a row, as long, and longer.
ODD = GROUPED | IDS | dict(num_attention_heads=6, head_dim=16, vocab_size=321)
BIASED = dict(attention_bias=True, mlp_bias=True)
YARN_IN_FULL = dict(
    full_attention=dict(
        rope_type="yarn", rope_theta=1000.0, factor=FACTOR, original_max_position_embeddings=CONTEXT, truncate=False
    ),
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
)
LONGER = dict(max_position_embeddings=int(CONTEXT * FACTOR))
FAMILIES |= {
    "Llama, biases": ("Llama", ODD | BIASED | dict(hidden_size=36, num_key_value_heads=1)),
    "Granite, biases": ("Granite", GROUPED | FACTORS | BIASED),
    "GLM-4": ("Glm4", ODD),
    "OLMo 3": ("Olmo3", ODD | dict(sliding_window=CONTEXT)),
    "OLMo 3, yarn in some layers": (
        "Olmo3",
        GROUPED | IDS | LONGER | dict(sliding_window=7, rope_parameters=YARN_IN_FULL),
    ),
    "Ministral": ("Ministral", ODD | dict(sliding_window=5, layer_types=["full_attention", "sliding_attention"] * 2)),
    "SmolLM3": ("SmolLM3", ODD | dict(no_rope_layers=[1, 0, 1, 1])),
    "SmolLM3, windows and biases": (
        "SmolLM3",
        GROUPED | IDS | BIASED | dict(use_sliding_window=True, sliding_window=CONTEXT, no_rope_layer_interval=2),
    ),
    "Cohere": ("Cohere", GROUPED | IDS | dict(num_key_value_heads=1, head_dim=16, logit_scale=2.0)),
    "Cohere 2": (
        "Cohere2",
        ODD | dict(hidden_size=48, head_dim=8, logit_scale=2.0, sliding_window=7, attention_bias=True),
    ),
}
STRETCHED = dict(rope_type="dynamic", rope_theta=1000.0, alpha=50.0, factor=1.0)
BIASED_GEMMA = GROUPED | dict(attention_bias=True, head_dim=16, pad_token_id=0)
FAMILIES |= {
    "Gemma, biases": ("Gemma", BIASED_GEMMA | dict(hidden_act="silu")),
    "Gemma 2, biases": ("Gemma2", BIASED_GEMMA | dict(sliding_window=20, hidden_activation="gelu")),
    "Gemma 3, biases": ("Gemma3", BIASED_GEMMA | dict(sliding_window=20, hidden_activation="relu2")),
    "Qwen3, biases": ("Qwen3", ODD | dict(attention_bias=True, hidden_act="gelu")),
    "OLMo, biases": ("Olmo", GROUPED | IDS | dict(attention_bias=True, hidden_act="gelu_new")),
    "OLMo 2, biases": ("Olmo2", ODD | dict(attention_bias=True, hidden_act="relu2")),
    "OLMo 3, biases": ("Olmo3", GROUPED | IDS | dict(attention_bias=True, sliding_window=7)),
    "Ernie 4.5, biases": ("Ernie4_5", GROUPED | IDS | dict(head_dim=16, use_bias=True)),
    "Helium, biases": ("Helium", GROUPED | IDS | BIASED | dict(head_dim=8)),
    "Hunyuan, biases": (
        "HunYuanDenseV1",
        ODD | dict(attention_bias=True, rope_parameters=STRETCHED),
    ),
}
SHARED = dict(moe_intermediate_size=12, shared_expert_intermediate_size=24, num_experts=8, num_experts_per_tok=3)
MIXTURES |= {
    "Granite-MoE": ("GraniteMoe", GROUPED | FACTORS | dict(num_local_experts=4, num_experts_per_tok=2)),
    "OLMoE": ("Olmoe", GROUPED | dict(num_experts=8, num_experts_per_tok=3, pad_token_id=None)),
    "OLMoE, biases": (
        "Olmoe",
        GROUPED | dict(num_experts=8, num_experts_per_tok=3, pad_token_id=None, attention_bias=True),
    ),
    "Qwen3-MoE, biases": ("Qwen3Moe", QWEN3_MOE | dict(attention_bias=True)),
    "Qwen2-MoE": ("Qwen2Moe", GROUPED | SHARED),
    "Qwen2-MoE, windows in some layers": (
        "Qwen2Moe",
        GROUPED
        | SHARED
        | dict(use_sliding_window=True, sliding_window=5, max_window_layers=2, mlp_only_layers=[3], qkv_bias=False),
    ),
    "gpt-oss": (
        "GptOss",
        GROUPED
        | scaled("yarn", truncate=False)
        | dict(head_dim=16, num_local_experts=8, num_experts_per_tok=3, sliding_window=5, swiglu_limit=0.7),
    ),
    "GLM-4.5": (
        "Glm4Moe",
        GROUPED
        | EXPERTS
        | dict(head_dim=8, n_routed_experts=8, use_qk_norm=True, attention_bias=True, routed_scaling_factor=1.5),
    ),
}
FAMILIES |= MIXTURES
MESHES = [(1, 1, 1), (2, 2, 2)]  # pp, dp, tp
EXPERT_MESH = (2, 1, 2, 2)  # and ep
LENGTHS = [2, CONTEXT, 3 * CONTEXT]  # tokens of a window; tp cuts it, so that a document of one token is one of two
ROWS = 4
STEPS = 10
ADAMW = dict(learning_rate=1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0)
NEW_TOKENS = 24


class Pair(NamedTuple):
    """A model of `transformers`, and the run that was made of its folder."""

    theirs: transformers.PreTrainedModel
    run: Path


def make_pair(name: str, folder: Path) -> Pair:
    """A model with random values, norms' scales and biases too, saved in shards, and imported."""
    theirs = random_model(name)
    theirs.save_pretrained(folder / "theirs", max_shard_size="100KB")
    return import_pair(theirs, folder)


def published_pair(config: dict, folder: Path) -> Pair:
    """The same of a config.json, which stands in the folder as it is given."""
    kind = config["architectures"][0].removesuffix("ForCausalLM")
    theirs = filled(kind, config_class(kind).from_dict(config))
    theirs.save_pretrained(folder / "theirs")
    (folder / "theirs" / "config.json").write_text(json.dumps(config))
    return import_pair(theirs, folder)


def import_pair(theirs: transformers.PreTrainedModel, folder: Path) -> Pair:
    """A model that is saved in a folder, and the run that is made of it."""
    Bytes().save(folder / "theirs")
    with contextlib.redirect_stdout(io.StringIO()):
        # The comparison is in float32, whatever the file has.
        flags = ["--workdir", str(folder / "run"), f"--config.data.seq={max(LENGTHS)}", "--config.model.dtype=float32"]
        assert main(["from-hf", str(folder / "theirs"), *flags]) == 0
    return Pair(theirs, folder / "run")


def random_model(name: str) -> transformers.PreTrainedModel:
    """In float32, logits of size 1; the same for the same name."""
    kind, fields = FAMILIES[name]
    return filled(kind, config_class(kind)(**fields))


def config_class(kind: str) -> type[transformers.PretrainedConfig]:
    """That of a model class; of a language model within another one not the class of the whole."""
    return getattr(transformers, f"{kind}ForCausalLM").config_class


def filled(kind: str, config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """A model of random values."""
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager")
    draw = torch.Generator().manual_seed(0)
    biases = [(which, buffer) for which, buffer in model.named_buffers() if which.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for which, parameter in [*model.named_parameters(), *biases]:
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.ndim == 1:
                parameter.copy_(0.2 * noise + (0.0 if which.endswith("bias") else 1.0))
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model.float().eval()


def meshes_of(name: str) -> list[tuple[int, ...]]:
    """The meshes that a family is compared on."""
    return [*MESHES, EXPERT_MESH] if name in MIXTURES else MESHES


def ours_on(pair: Pair, mesh: tuple[int, ...], **changes):
    """(model, parameters) of the run on a mesh, with two microbatches where it has a pipeline; `changes` are keys of
    its model."""
    settings = load_settings(pair.run)
    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, **changes))
    schedule = dict(schedule="one_f_one_b", microbatches=2) if mesh[0] > 1 else {}
    settings = dataclasses.replace(settings, pipeline=dataclasses.replace(settings.pipeline, **schedule))
    sizes = dict(zip(("pp", "dp", "tp", "ep"), mesh))
    laid_out = make_mesh(MeshConfig(**sizes, simulate=0), jax.devices()[: int(np.prod(mesh))])
    model = model_of(settings, laid_out)
    _, params = restore_params(pair.run / "checkpoints", None, model)
    return model, params


def windows(length: int, *, packed: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Tokens in one document a row, or in several; a window of 2 that is packed holds documents of one token."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, SIZES["vocab_size"], (ROWS, length)).astype(np.int32)
    starts = draw.random((ROWS, length)) < 0.1 if packed else np.zeros((ROWS, length), bool)
    starts[:, length // 2] |= packed
    starts[:, 0] = True
    segments = np.cumsum(starts, axis=1).astype(np.int32)
    order = np.broadcast_to(np.arange(length), tokens.shape)
    positions = order - np.maximum.accumulate(np.where(starts, order, 0), axis=1)
    follows = np.roll(segments, -1, 1) == segments
    follows[:, -1] = False
    labels = np.where(follows, np.roll(tokens, -1, 1), IGNORED).astype(np.int32)
    return dict(tokens=tokens, labels=labels, segments=segments, positions=positions.astype(np.int32))


def their_logits(model, batch):
    order = np.arange(batch["tokens"].shape[1])
    seen = (batch["segments"][:, :, None] == batch["segments"][:, None]) & (order[:, None] >= order[None])[None]
    near = order[:, None] - order[None] < (getattr(model.config, "sliding_window", None) or len(order))
    by_type = {"full_attention": masked(seen), "sliding_attention": masked(seen & near)}
    # A mask of ours stands in place of theirs, which knows no documents; where there is one a row, theirs decides.
    mask = None
    if batch["segments"].max() > 1:
        of_layers = getattr(model.config, "layer_types", None)
        mask = by_type if of_layers else by_type["sliding_attention"]
    tokens, positions = (torch.from_numpy(batch[name]).long() for name in ("tokens", "positions"))
    return model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits


def masked(seen):
    return torch.where(torch.from_numpy(seen)[:, None], 0.0, torch.finfo(torch.float32).min)


def logits_difference(pair: Pair, model, params, lengths: Sequence[int] = LENGTHS) -> float:
    """The largest, over all lengths, packed and not."""
    run, found = jax.jit(model.logits), []
    for length in lengths:
        for packed in (False, True):
            batch = windows(length, packed=packed)
            ours = run(params, batch["tokens"], batch["segments"], batch["positions"])
            with torch.no_grad():
                theirs = their_logits(pair.theirs, batch).numpy()
            assert theirs.std() > 0.5  # of a size at which the difference means something
            entries = theirs.shape[-1]
            assert (np.asarray(ours)[..., entries:] == -np.inf).all()  # of rows that pad the vocab
            found.append(np.abs(np.asarray(ours)[..., :entries] - theirs).max())
    return float(max(found))


def batches() -> list[dict[str, np.ndarray]]:
    """Two in turns: random tokens teach nothing but themselves."""
    return [windows(2 * CONTEXT, packed=True, seed=step % 2) for step in range(STEPS)]


def their_losses(name: str) -> list[float]:
    """Of ten steps that train a whole model."""
    return adamw_losses(random_model(name).train())


def adamw_losses(model: torch.nn.Module) -> list[float]:
    """Of ten steps of PyTorch's AdamW; decay on matrices alone, and a gradient as long as it may be at most."""
    trained = [p for p in model.parameters() if p.requires_grad]
    biases = {id(p) for name, p in model.named_parameters() if name.endswith("bias")}  # experts' have two dims
    matrices = [p for p in trained if p.ndim > 1 and id(p) not in biases]
    rest = [p for p in trained if p.ndim == 1 or id(p) in biases]
    groups = [dict(params=matrices, weight_decay=ADAMW["weight_decay"]), dict(params=rest, weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, lr=ADAMW["learning_rate"], betas=(ADAMW["b1"], ADAMW["b2"]), eps=ADAMW["eps"])
    losses = []
    for batch in batches():
        labels = torch.from_numpy(batch["labels"]).long().flatten()
        loss = cross_entropy(their_logits(model, batch).flatten(0, 1), labels, ignore_index=IGNORED)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, ADAMW["clip_norm"])
        adamw.step()
        losses.append(loss.item())
    return losses


def our_losses(pair: Pair, model, params) -> list[float]:
    """As train.init_from would begin: with the imported parameters, and an optimizer that has seen nothing."""
    settings = load_settings(pair.run)
    config = dataclasses.replace(settings.optimizer, schedule="constant", warmup_steps=0, **ADAMW)
    tx = make_optimizer(config, STEPS, model.plan.rows)
    step = TrainStep(model, tx, settings.train.seed, settings.guard)
    zeros = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), abstract_state(model, tx)
    )
    state, losses = zeros._replace(params=jax.tree.map(lambda leaf: leaf.copy(), params)), []
    for batch in batches():
        state, metrics = step(state, jax.device_put(batch, model.batch_sharding))
        assert not metrics["skipped"]
        losses.append(float(metrics["loss"]))
    return losses


def loss_difference(name: str, pair: Pair, model, params) -> float:
    """The largest of ten fine-tuning steps."""
    theirs = their_losses(name)
    assert theirs[-1] < theirs[0] - 0.1
    return float(np.abs(np.subtract(theirs, our_losses(pair, model, params))).max())


def comes_back(pair: Pair, folder: Path) -> bool:
    """Whether the run goes out with the config.json, and the bytes of every tensor, with which it came."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["to-hf", str(pair.run), str(folder)]) == 0
    came = pair.run.parent / "theirs"
    configs = [json.loads((where / "config.json").read_text()) for where in (came, folder)]
    there, here = (read_folder(where) for where in (came, folder))
    same = there.keys() == here.keys() and all(there[x].tobytes() == here[x].tobytes() for x in there)
    return same and configs[0] == configs[1]


def written_anew(name: str) -> tuple[ModelConfig, ModelConfig]:
    """The model of a family's config.json, and of the one that is written for a run of our own with it, after
    `transformers` has read that."""
    kind, fields = FAMILIES[name]
    ours = read_config(_in_full(config_class(kind)(**fields), f"{kind}ForCausalLM"))
    written = write_config(ModelConfig(**ours.model), ours.context)
    (architecture,) = written["architectures"]
    config = config_class(architecture.removesuffix("ForCausalLM")).from_dict(written)
    return ModelConfig(**ours.model), ModelConfig(**read_config(_in_full(config, architecture)).model)


def _in_full(config: transformers.PretrainedConfig, architecture: str) -> dict:
    return json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}


def equal_tokens(pair: Pair, model, params) -> tuple[int, int]:
    """(tokens that greedy generation writes alike, of how many), behind prompts of several lengths."""
    draw = np.random.default_rng(0)
    lengths = (9, CONTEXT) if model.config.rope_scaling == "longrope" else (1, 9, CONTEXT)  # on one side of its limit
    prompts = [draw.integers(0, SIZES["vocab_size"], length) for length in lengths]
    greedy = SampleConfig(prompt="", tokens=NEW_TOKENS, temperature=0.0, top_k=0, top_p=1.0, seed=0)
    ours = generate(model, params, prompts, greedy)
    equal = 0
    for prompt, written in zip(prompts, ours, strict=True):
        ids = torch.from_numpy(prompt)[None]
        how = dict(do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0)
        theirs = pair.theirs.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :].numpy()
        equal += int((theirs == written).sum())
    return equal, NEW_TOKENS * len(prompts)
