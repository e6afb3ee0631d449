"""Published steps on TPUs and GPUs, and the times of the same layouts as this project plans or compiles them.

    python benchmarks/published.py --analytic [--half new | --rows 0 3]
    python benchmarks/published.py [--rows 23]

With --analytic a step is planned from its trace; nothing is compiled. It is planned twice: as this project's program,
and *as theirs*, with what the published program does otherwise by its recipe (benchmarks/theirs.py). *Half* is the one
to which constants of prices were fitted, or the one held out, by which plans are judged; *unseen* are rows that were
added later, *blind* those that were planned once, after all prices were mended, and *new* those that were entered after
that and planned once with today's prices: the last two are left out unless asked for, and the new ones are judged as
held out. The last lines have the error of each half, of both plans. Without it steps are compiled on a machine without
chips, with kernels at their peak, which needs XLA's compilers: pip install -e '.[tpu]' or '.[gpu-compiler]'. A column
*of it* is the share of the published time. A published rate of tokens or FLOP/s is taken as the time of a step. A row
has the model, batch, mesh and recompute of the published step, where these have words here; the program is this
project's.
"""

import math
import os
import random
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Before JAX is imported: no device is asked for.
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, config_of, run_benchmark
from theirs import Mixture, as_theirs, theirs_of


class Published(NamedTuple):
    """A published step, and the config that has its model, batch and layout."""

    title: str
    secs: float  # of a step
    source: str
    config: str
    topology: str
    changes: Mapping[str, Any] = {}  # of the config, by "section.key"
    packed: bool = False  # rows of several documents, which attention tells apart


def llama(layers: int, d_model: int, d_ff: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    """The changes to a model of these sizes, with heads of 128."""
    sizes = dict(layers=layers, d_model=d_model, d_ff=d_ff, heads=heads, kv_heads=kv_heads, vocab=vocab)
    return {f"model.{name}": size for name, size in sizes.items()}


def scaled(scale: int, batch: int, *, seq: int = 2048, **mesh: int) -> dict[str, Any]:
    """MaxText's model of `scale` billion parameters (global_parameter_scale): each doubling makes heads and MLP, then
    d_model, then layers twice as large."""
    thirds, rest = divmod(scale.bit_length() - 1, 3)
    wide, deep, of_model = 2 ** (thirds + (rest > 0)), 2**thirds, 2 ** (thirds + (rest > 1))
    sizes = llama(16 * deep, 2048 * of_model, 7168 * wide, 16 * wide, 16 * wide, 32_000)
    return sizes | at(batch, seq, **mesh)


def at(batch: int, seq: int, **mesh: int) -> dict[str, Any]:
    """The changes to this global batch of rows of `seq` tokens on this mesh."""
    return {"data.global_batch": batch, "data.seq": seq} | {f"mesh.{axis}": size for axis, size in mesh.items()}


def secs_at(tflops: float, changes: Mapping[str, Any], chips: int) -> float:
    """Seconds of a step of which MaxText printed TFLOP/s of a chip: then 6 FLOPs for each parameter and token, and
    those of attention without a mask, 12 for each layer, pair of tokens and entry of the heads."""
    size = {name.split(".")[1]: value for name, value in changes.items()}
    width = 128 * size["heads"]
    layer = 4 * size["d_model"] * width + 3 * size["d_model"] * size["d_ff"]
    parameters = size["layers"] * layer + 2 * size["vocab"] * size["d_model"]
    tokens = size["global_batch"] * size["seq"] / chips
    return tokens * (6 * parameters + 12 * size["layers"] * width * size["seq"]) / (tflops * 1e12)


def remat(parts: str, on_host: str = "device") -> dict[str, Any]:
    """Parts of a layer that are recomputed, and saved ones that are in the host's memory."""
    return {"pipeline.remat": parts, "pipeline.residuals_on": on_host}


def microbatches(count: int, policy: str = "zero3") -> dict[str, Any]:
    return {"pipeline.microbatches": count, "data_parallel.policy": policy}


# Where each figure is, at the commit that was read.
RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/blob/c8cfe2f/training"
MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/e591f30"
IRONWOOD = f"{RECIPES}/ironwood/README.md"
V5E, V5P = (f"{MAXTEXT}/src/maxtext/configs/tpu/{chip}/README.md" for chip in ("v5e", "v5p"))
TIERING = f"{MAXTEXT}/docs/reference/models/tiering.md"
JAX_TOOLBOX = "https://github.com/NVIDIA/JAX-Toolbox/blob/bcbbfa5/docs/frameworks/maxtext/README.md"
DGX_CLOUD = "https://github.com/NVIDIA/dgxc-benchmarking/blob"
BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/067f987/docs/performance-summary-archive.md"
TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/b5bcd76/benchmarks"
KEMPNER = "https://github.com/KempnerInstitute/KempnerForge/blob/5666d0d/benchmarks/mfu_scaling/mfu_scaling.md"
LLMQ = "https://github.com/IST-DASLab/llmq/blob/b77d969/benchmarks"
HERE = "h100.md"  # beside docs/measured/published.md

LLAMA_7B, LLAMA_8B = llama(32, 4096, 11_008, 32, 32, 32_000), llama(32, 4096, 14_336, 32, 8, 128_256)
LLAMA_13B = llama(40, 5120, 17_920, 40, 8, 128_256)
LLAMA2_70B, LLAMA_70B = (llama(80, 8192, 28_672, 64, 8, vocab) for vocab in (32_000, 128_256))
LLAMA_405B = llama(126, 16_384, 53_248, 128, 8, 128_256)
QWEN_7B = llama(28, 3584, 18_944, 28, 4, 152_064) | {"model.qkv_bias": True}
NEMOTRON_15B = llama(32, 6144, 24_576, 48, 8, 256_000)
NEMOTRON_15B |= {"model.mlp": "plain", "model.activation": "relu2", "model.norm": "layer"}
QWEN_235B = {f"model.{key}": value for key, value in dict(
    layers=94, layers_of="moe*94", d_model=4096, heads=64, kv_heads=4, d_head=128, qk_norm=True, vocab=151_936,
    experts=128, experts_per_token=8, d_expert=1536, d_ff=12_288,
).items()}  # fmt: skip
FLOAT8 = {"model.matmul": "float8"}
ALL_FLOAT8 = FLOAT8 | {"model.matmul_weight_gradients": "8bit"}
BFLOAT16 = {f"optimizer.{key}_dtype": "bfloat16" for key in ("m", "v", "weights")}
BFLOAT16_WEIGHTS = {"optimizer.weights_dtype": "bfloat16"}
CHUNKS = {"loss.chunk_tokens": 4096}
# Of other frameworks' words for what is saved.
MINIMAL, FULL = remat("elementwise core"), remat("layer")
OFFLOADED = remat("elementwise core ffn", "input qkv out")  # Trillium's small models
QKV_OFFLOADED = remat("elementwise core out ffn", "input qkv")
EVERY_SECOND = remat("elementwise ffn")  # torchtitan: every second product, and attention, are saved

SCALED = {
    "16B on 256 v5e": (120, scaled(16, 6 * 256, dp=256) | FULL, 256, "v5e:16x16", V5E),
    "32B on 256 v5e": (132, scaled(32, 4 * 256, dp=256) | FULL, 256, "v5e:16x16", V5E),
    "64B on 256 v5e": (118, scaled(64, 2 * 256, dp=256) | FULL, 256, "v5e:16x16", V5E),
    "128B on 256 v5e, tp 16": (110, scaled(128, 256, dp=16, tp=16) | QKV_OFFLOADED, 256, "v5e:16x16", V5E),
    "32B on 64 v5p, tp 4": (328, scaled(32, 6 * 64, dp=16, tp=4) | MINIMAL, 64, "v5p:4x4x4", V5P),
    "64B on 64 v5p, tp 4": (323, scaled(64, 3 * 64, dp=16, tp=4) | MINIMAL, 64, "v5p:4x4x4", V5P),
    "128B on 128 v5p, tp 8": (315, scaled(128, 128, dp=16, tp=8) | MINIMAL, 128, "v5p:4x4x8", V5P),
    "512B on 512 v5p, tp 8": (294, scaled(512, 2 * 512, dp=64, tp=8) | FULL, 512, "v5p:8x8x8", V5P),
}  # fmt: skip


def trillium(model: str, chips: str, secs: float, folder: str, changes: Mapping[str, Any]) -> Published:
    title = f"MaxText, {model} on {math.prod(map(int, chips.split('x')))} v6e"
    return Published(title, secs, f"{RECIPES}/trillium/{folder}/README.md", "llama2_7b_64", f"v6e:{chips}", changes)


def ironwood(title: str, secs: float, slice_of: str, changes: Mapping[str, Any]) -> Published:
    chips = math.prod(map(int, slice_of.split("x")))
    mesh = {"mesh.dp": 2 * chips // changes.get("mesh.cp", 1)}
    return Published(f"MaxText, {title}", secs, IRONWOOD, "llama2_7b_64", f"v7x:{slice_of}", mesh | changes)


LONG_70B = LLAMA_70B | at(64, 131_072, cp=8) | remat("elementwise out ffn") | {"layout.context": "all_gather"}
TPU_ROWS = [
    *(
        Published(f"MaxText, {title}", secs_at(tflops, changes, chips), source, "llama2_7b_64", topology, changes)
        for title, (tflops, changes, chips, topology, source) in SCALED.items()
    ),
    Published("MaxText, Llama-2-70B on 512 v5p", 2 * 4096 / 692, TIERING, "llama2_7b_64", "v5p:8x8x8",
              LLAMA2_70B | at(1024, 4096, dp=512) | EVERY_SECOND),
    Published("MaxText, Llama-3.1-405B on 512 v5p", 131.474, f"{RECIPES}/v5p/Llama3.1-405B-MaxText/README.md",
              "llama2_7b_64", "v5p:8x8x8",
              LLAMA_405B | at(1024, 8192, dp=512) | remat("elementwise qkv out ffn", "core") | CHUNKS),
    Published("MaxText, Mixtral-8x7B on 128 v5p", 36 * 4096 / 2909, TIERING, "mixtral_8x7b_128", "v5p:8x4x4",
              at(36 * 128, 4096, dp=128, ep=1) | FULL | BFLOAT16_WEIGHTS | microbatches(1)
              | {"data_parallel.exceptions": ""}),
    trillium("Llama-3.1-8B", "2x4", 3.443, "Llama3.1-8B-MaxText/v6e-8", LLAMA_8B | at(24, 8192, dp=8) | OFFLOADED),
    trillium("Llama-3.1-8B", "16x16", 4.546, "Llama3.1-8B-MaxText/v6e-256",
             LLAMA_8B | at(1024, 8192, dp=256) | OFFLOADED),
    trillium("Mistral-7B", "2x4", 6.320, "Mistral-7B-MaxText",
             llama(32, 4096, 14_336, 32, 8, 32_000) | at(48, 8192, dp=8) | OFFLOADED),
    trillium("Llama-3.1-70B", "4x8", 17.790, "Llama3.1-70B-MaxText/v6e-32",
             LLAMA_70B | at(64, 8192, dp=32) | QKV_OFFLOADED | BFLOAT16_WEIGHTS),
    trillium("Llama-3.1-70B", "16x16", 42.656, "Llama3.1-70B-MaxText/v6e-256",
             LLAMA_70B | at(1280, 8192, dp=256) | QKV_OFFLOADED),
    trillium("Llama-2-70B", "16x16", 9.052, "Llama2-70B-MaxText",
             LLAMA2_70B | at(512, 4096, dp=256) | QKV_OFFLOADED),
    ironwood("Llama-3.1-70B on 64 v7x", 12.20, "4x4x4", LLAMA_70B | at(256, 8192) | remat("elementwise out ffn")),
    ironwood("Llama-3.1-70B on 64 v7x in FP8", 7.93, "4x4x4",
             LLAMA_70B | at(256, 8192) | remat("elementwise out ffn") | ALL_FLOAT8),
    ironwood("Llama-3.1-405B on 256 v7x", 98.34, "4x8x8",
             LLAMA_405B | at(1536, 8192) | remat("elementwise q core out ffn", "input") | CHUNKS),
    ironwood("Llama-3.1-405B on 256 v7x in FP8", 64.37, "4x8x8",
             LLAMA_405B | at(1536, 8192) | remat("layer", "host") | ALL_FLOAT8 | CHUNKS),
    ironwood("Llama-3.1-70B on 256 v7x, 131,072 tokens", 34.02, "4x8x8", LONG_70B),
    ironwood("Qwen3-235B-A22B on 256 v7x", 30.87, "4x8x8",
             QWEN_235B | at(8192, 4096) | remat("layer", "host")),
]  # fmt: skip


def gpus(title: str, secs: float, source: str, topology: str, changes: Mapping[str, Any], **more: Any) -> Published:
    return Published(title, secs, source, "gpu_80gb_x8", topology, changes, **more)


NEMO, NEMOTRON = (f"{DGX_CLOUD}/v25.04/{folder}/README.md" for folder in ("llama3.1", "nemotron"))
NEMO_8B = LLAMA_8B | at(128, 8192, dp=4, cp=2) | microbatches(32, "zero1") | {"layout.context": "ulysses"}
NEMO_8B |= remat("elementwise")
NEMO_70B = LLAMA_70B | {"pipeline.schedule": "interleaved", "pipeline.virtual": 5} | remat("elementwise")
NEMO_70B |= microbatches(64, "zero1")
NEMO_15B = NEMOTRON_15B | at(64, 4096, dp=8, tp=2) | microbatches(4, "zero1") | remat("elementwise")
BRIDGE_8B = LLAMA_8B | at(128, 8192, dp=8) | ALL_FLOAT8 | {"model.matmul_scales": "current"} | remat("elementwise")
MAXTEXT_70B = LLAMA_70B | at(256, 8192, dp=128) | microbatches(1) | remat("elementwise core out ffn") | CHUNKS
FORGE = microbatches(2) | FULL
# llm.q shards weights and gradients with --shard-weights and --shard-gradients alone. With zero1 sums of gradients are
# in float32 here.
UNSHARDED = {"data_parallel.policy": "zero1", "pipeline.grads_dtype": "float32"}
ON_LLMQ = QWEN_7B | BFLOAT16 | {"data.seq": 1024, "data.global_batch": 512, "pipeline.grads_dtype": "bfloat16"}
TITAN_8B = LLAMA_8B | at(16, 8192, dp=8) | microbatches(1) | EVERY_SECOND | CHUNKS
GPU_ROWS = [
    gpus("MaxText, Llama-2-7B on 8 H100", 0.721, JAX_TOOLBOX, "H100:8", at(16, 4096, dp=8) | microbatches(1)),
    gpus("MaxText, Llama-3-70B on 128 H100", 15.563, f"{DGX_CLOUD}/v25.02/maxtext/README_70b.md", "H100:16x8",
         MAXTEXT_70B),
    gpus("MaxText, Llama-3-70B on 128 H100 in FP8", 9.074, f"{DGX_CLOUD}/v25.02/maxtext/README_70b.md", "H100:16x8",
         MAXTEXT_70B | ALL_FLOAT8),
    gpus("NeMo, Llama-3.1-8B on 8 H100", 12.27, NEMO, "H100:8", NEMO_8B),
    gpus("NeMo, Llama-3.1-8B on 8 H100 in FP8", 9.33, NEMO, "H100:8", NEMO_8B | ALL_FLOAT8),
    gpus("NeMo, Llama-3.1-70B on 64 H100", 14.66, NEMO, "H100:8x8",
         NEMO_70B | at(128, 8192, pp=4, dp=2, cp=2, tp=4) | {"layout.context": "ulysses"}),
    gpus("NeMo, Llama-3.1-70B on 64 H100 in FP8", 9.86, NEMO, "H100:8x8",
         NEMO_70B | at(128, 8192, pp=8, dp=2, tp=4) | ALL_FLOAT8 | {"pipeline.virtual": 5}),
    gpus("NeMo, Nemotron-4-15B on 16 H100", 2.66, NEMOTRON, "H100:2x8", NEMO_15B),
    gpus("NeMo, Nemotron-4-15B on 16 H100 in FP8", 1.98, NEMOTRON, "H100:2x8", NEMO_15B | ALL_FLOAT8),
    gpus("Megatron-Bridge, Llama-3-8B on 8 H100 in FP8", 128 * 8192 / 8 / 14_451, BRIDGE, "H100:8",
         BRIDGE_8B | microbatches(16)),
    gpus("llm.q, Qwen2.5-7B on one H100", 37.817, f"{LLMQ}/H100x1.md", "H100:1",
         ON_LLMQ | microbatches(128) | remat("elementwise")),
    gpus("llm.q, Qwen2.5-7B on one H100 in FP8", 27.314, f"{LLMQ}/H100x1.md", "H100:1",
         ON_LLMQ | microbatches(32) | remat("elementwise ffn") | ALL_FLOAT8),
    gpus("llm.q, Qwen2.5-7B on 8 H100", 4.649, f"{LLMQ}/H100x8.md", "H100:8",
         ON_LLMQ | microbatches(8) | remat("elementwise") | UNSHARDED),
    gpus("llm.q, Qwen2.5-7B on 8 H100 in FP8", 3.292, f"{LLMQ}/H100x8.md", "H100:8",
         ON_LLMQ | microbatches(4) | remat("elementwise") | ALL_FLOAT8 | UNSHARDED),
    Published("this project, 1.2B on one H100", 3.83, HERE, "gpu_80gb", "H100:1", packed=True),
    Published("this project, 1.2B on one H100 in FP8", 0.837, HERE, "gpu_80gb", "H100:1",
              {"data.global_batch": 32, "pipeline.microbatches": 4} | FLOAT8, packed=True),
    gpus("KempnerForge, Llama-3-8B on one H200", 3.13, KEMPNER, "H200:1", LLAMA_8B | at(8, 4096, dp=1) | FORGE),
    gpus("KempnerForge, Llama-3-8B on 2 H200", 3.50, KEMPNER, "H200:2", LLAMA_8B | at(16, 4096, dp=2) | FORGE),
    gpus("KempnerForge, Llama-3-8B on 4 H200", 3.36, KEMPNER, "H200:4", LLAMA_8B | at(32, 4096, dp=4) | FORGE),
    gpus("torchtitan, Llama-3.1-8B on 32 H200 in FP8", 2 * 8192 / 10_938,
         f"{TORCHTITAN}/llama3-8b_h200_202506_trainy-whitefiber.md", "H200:4x8",
         TITAN_8B | at(64, 8192, dp=32) | ALL_FLOAT8 | {"model.matmul_scales": "current"}),
    gpus("Megatron-Bridge, Llama-3-8B on 8 B200 in FP8", 128 * 8192 / 8 / 30_624, BRIDGE, "B200:8",
         BRIDGE_8B | microbatches(8, "zero1")),
    gpus("Megatron-Bridge, Llama-3-8B on 8 B200 in MXFP8", 128 * 8192 / 8 / 29_521, BRIDGE, "B200:8",
         BRIDGE_8B | microbatches(8, "zero1") | {"model.matmul_scales": "mxfp8"}),
]  # fmt: skip
# Other chips than those of the plan: H100 with a power limit of 500 W and memory of 2.4 TB/s.
TITAN = f"{TORCHTITAN}/llama3_h100_202412_torchtitan.md"
OTHER_ROWS = [
    gpus("torchtitan, Llama-3.1-8B on 8 H100", 2 * 8192 / 6667, TITAN, "H100:1x8", TITAN_8B),
    gpus("torchtitan, Llama-3.1-8B on 8 H100 in FP8", 2 * 8192 / 8532, TITAN, "H100:1x8", TITAN_8B | ALL_FLOAT8),
    gpus("torchtitan, Llama-3.1-8B on 128 H100", 2 * 8192 / 6514, TITAN, "H100:16x8",
         TITAN_8B | at(256, 8192, dp=128)),
    gpus("torchtitan, Llama-3.1-8B on 128 H100 in FP8", 2 * 8192 / 8380, TITAN, "H100:16x8",
         TITAN_8B | at(256, 8192, dp=128) | ALL_FLOAT8),
]  # fmt: skip
# Rows that were looked for after the held-out half had been seen, and entered before any of them was planned. Nothing
# is fitted to them or mended by them.
AXLEARN = "https://github.com/apple/axlearn/blob/34aed43/axlearn/experiments/text/gpt/fuji.py"
GPU_RECIPES = "https://github.com/AI-Hypercomputer/gpu-recipes/blob/2e1fd5e/training"
FOUNDRY = "https://github.com/mosaicml/llm-foundry/blob/8c8dd48/scripts/train/benchmarking/README.md"
GPT3 = llama(96, 12_288, 49_152, 96, 96, 50_304)
NEMOTRON_340B = llama(96, 18_432, 73_728, 96, 8, 256_000) | {"model.d_head": 192}
PLAIN = {"model.mlp": "plain", "model.norm": "layer"}
BIASES = {f"model.{part}_bias": True for part in ("mlp", "norm", "qkv", "out")}
WITHOUT_ROPE = {"model.rope": False, "model.tied": True}  # positions are a table
GPT3 |= PLAIN | BIASES | WITHOUT_ROPE | {"model.activation": "gelu"}
NEMOTRON_340B |= PLAIN | {"model.activation": "relu2"}
DEEPSEEK_V3 = {f"model.{key}": value for key, value in dict(
    layers=61, layers_of="dense*3 moe*58", d_model=7168, d_ff=18_432, vocab=129_280, attention="mla", heads=128,
    kv_heads=128, d_head=128, d_latent=512, d_latent_q=1536, d_rope=64, experts=256, experts_per_token=8,
    d_expert=2048, shared_experts=1, router_score="sigmoid", router_scale=2.5,
).items()}  # fmt: skip
DEEPSEEK_V3 |= at(2048, 4096) | remat("layer", "host") | {"optimizer.m_dtype": "bfloat16"}
QWEN_1_5B, QWEN_3B, QWEN_14B = (
    llama(*sizes) | {"model.qkv_bias": True, "model.tied": tied}
    for *sizes, tied in (
        (28, 1536, 8960, 12, 2, 151_936, True),
        (36, 2048, 11_008, 16, 2, 151_936, True),
        (48, 5120, 13_824, 40, 8, 152_064, False),
    )
)


def interleaved(virtual: int) -> dict[str, Any]:
    return {"pipeline.schedule": "interleaved", "pipeline.virtual": virtual}


def mpt(billions: int, gpus_of: str, tokens: float, windows: int, count: int, seq: int = 2048) -> Published:
    """A step of llm-foundry's table: of `windows` in `count` microbatches, at this rate of tokens a second."""
    sizes = {3: (32, 2560, 20), 7: (32, 4096, 32), 13: (40, 5120, 40), 30: (48, 7168, 56), 70: (80, 8192, 64)}
    layers, d_model, heads = sizes[billions]
    changes = llama(layers, d_model, 4 * d_model, heads, heads, 50_368) | PLAIN | WITHOUT_ROPE
    whole = billions < 30 and seq == 2048  # without recompute
    changes |= {"model.activation": "gelu"} | microbatches(count) | (remat("elementwise") if whole else FULL)
    chip, sizes = gpus_of.split(":")
    ranks = math.prod(map(int, sizes.split("x")))
    title = f"llm-foundry, MPT-{billions}B on {ranks} {chip}" + f", {seq:,} tokens" * (seq != 2048)
    return gpus(title, windows * seq / tokens, FOUNDRY, gpus_of, changes | at(windows, seq, dp=ranks))


FUJI_7B = LLAMA_7B | {"model.vocab": 32_768, "model.tied": True} | remat("elementwise core ffn")
BRIDGE_70B = LLAMA_70B | interleaved(5) | microbatches(128, "zero1") | remat("elementwise")
BRIDGE_405B = LLAMA_405B | interleaved(8) | {"layout.context": "ulysses"} | remat("elementwise")
BRIDGE_FLOAT8 = ALL_FLOAT8 | {"model.matmul_scales": "current"}
NEMO_340B = NEMOTRON_340B | interleaved(12) | at(32, 4096, pp=8, dp=2, tp=8) | microbatches(16, "zero1")
NEMO_340B |= remat("elementwise core")
NEMO_175B = GPT3 | interleaved(12) | at(256, 2048, pp=8, dp=4, tp=4) | microbatches(64, "zero1") | remat("elementwise")
LLMQ_1_5B = ON_LLMQ | QWEN_1_5B | microbatches(16) | remat("elementwise")
LLMQ_3B = ON_LLMQ | QWEN_3B | microbatches(4) | remat("elementwise") | UNSHARDED
UNSEEN_ROWS = [
    Published("axlearn, Fuji-7B on 32 v5e", 1.93, AXLEARN, "llama2_7b_64", "v5e:4x8",
              FUJI_7B | at(64, 2048, dp=8, replica=4)),
    *(
        Published(f"MaxText, {title}", secs_at(tflops, changes, chips), V5P, "llama2_7b_64", topology, changes)
        for title, tflops, changes, chips, topology in (
            ("128B on 256 v5p, tp 8", 316, scaled(128, 256, dp=32, tp=8) | MINIMAL, 256, "v5p:4x8x8"),
            ("256B on 512 v5p, tp 8", 308, scaled(256, 512, dp=64, tp=8) | MINIMAL, 512, "v5p:8x8x8"),
            ("1024B on 1024 v5p, tp 16", 254, scaled(1024, 2048, dp=64, tp=16) | FULL, 1024, "v5p:8x8x16"),
            ("1024B on 2048 v5p, tp 16", 297, scaled(1024, 4096, dp=128, tp=16) | FULL, 2048, "v5p:8x16x16"),
        )
    ),
    Published("MaxText, GPT-3-175B on 512 v5p in int8, tp 8", 22.197, f"{RECIPES}/v5p/GPT3-175B-MaxText/README.md",
              "llama2_7b_64", "v5p:8x8x8",
              GPT3 | at(2048, 2048, dp=64, tp=8) | FULL
              | {"model.matmul": "int8", "model.matmul_weight_gradients": "8bit"}),
    trillium("GPT-3-175B", "16x16", 17.182, "GPT3-175B-MaxText/bf16", GPT3 | at(768, 2048, dp=256) | FULL),
    trillium("Llama-3.1-70B", "8x8", 18.688, "Llama3.1-70B-MaxText/v6e-64",
             LLAMA_70B | at(128, 8192, dp=64) | QKV_OFFLOADED),
    trillium("Llama-3.1-70B", "8x16", 34.786, "Llama3.1-70B-MaxText/v6e-128",
             LLAMA_70B | at(512, 8192, dp=128) | QKV_OFFLOADED),
    trillium("Llama-3.1-8B", "4x4", 3.393, "Llama3.1-8B-MaxText/v6e-16", LLAMA_8B | at(48, 8192, dp=16) | OFFLOADED),
    trillium("Llama-3.1-8B", "8x16", 4.602, "Llama3.1-8B-MaxText/v6e-128",
             LLAMA_8B | at(512, 8192, dp=128) | OFFLOADED),
    Published("MaxText, Gemma-3-12B on 256 v6e, 32,768 tokens", 7.318,
              f"{RECIPES}/trillium/Gemma3-12B-MaxText/v6e-256/README.md", "gemma3_12b", "v6e:16x16",
              at(256, 32_768, dp=256) | microbatches(1) | FULL | CHUNKS | {"model.kernel": "splash"}),
    ironwood("Llama-3.1-70B on 256 v7x, 131,072 tokens, in FP8", 30.11, "4x8x8", LONG_70B | ALL_FLOAT8),
    ironwood("Qwen3-235B-A22B on 256 v7x in FP8", 27.67, "4x8x8",
             QWEN_235B | at(8192, 4096) | remat("layer", "host") | ALL_FLOAT8),
    ironwood("DeepSeek-V3 on 128 v7x", 27.02, "4x4x8", DEEPSEEK_V3),
    ironwood("DeepSeek-V3 on 128 v7x in FP8", 22.47, "4x4x8", DEEPSEEK_V3 | ALL_FLOAT8),
    gpus("Megatron-Bridge, Llama-3-70B on 64 H100 in FP8", 256 * 8192 / 64 / 1664, BRIDGE, "H100:8x8",
         BRIDGE_70B | at(256, 8192, pp=8, dp=2, tp=4) | BRIDGE_FLOAT8),
    gpus("Megatron-Bridge, Llama-3.1-405B on 1024 H100 in FP8", 1536 * 8192 / 1024 / 328, BRIDGE, "H100:128x8",
         BRIDGE_405B | at(1536, 8192, pp=8, dp=8, cp=2, tp=8) | microbatches(192, "zero1") | BRIDGE_FLOAT8),
    gpus("NeMo, Llama-3.1-405B on 512 H100", 19.810, f"{DGX_CLOUD}/v25.05.05/llama3.1/README.md", "H100:64x8",
         BRIDGE_405B | at(256, 8192, pp=8, dp=4, cp=2, tp=8) | microbatches(64, "zero1")),
    gpus("NeMo, Nemotron-4-340B on 128 H100", 4.61, f"{DGX_CLOUD}/v25.02/nemotron/README_340b.md", "H100:16x8",
         NEMO_340B),
    gpus("NeMo, Nemotron-4-340B on 128 H100 in FP8", 3.16, f"{DGX_CLOUD}/v25.02/nemotron/README_340b.md", "H100:16x8",
         NEMO_340B | ALL_FLOAT8),
    gpus("NeMo, GPT-3-175B on 128 H100", 8.309, f"{DGX_CLOUD}/v25.02/nemo_megatron/README_175b.md", "H100:16x8",
         NEMO_175B),
    gpus("NeMo, GPT-3-175B on 128 H100 in FP8", 5.626, f"{DGX_CLOUD}/v25.02/nemo_megatron/README_175b.md", "H100:16x8",
         NEMO_175B | ALL_FLOAT8),
    gpus("llm.q, Qwen2.5-1.5B on one H100", 8.930, f"{LLMQ}/H100x1.md", "H100:1", LLMQ_1_5B),
    gpus("llm.q, Qwen2.5-1.5B on one H100 in FP8", 7.204, f"{LLMQ}/H100x1.md", "H100:1", LLMQ_1_5B | ALL_FLOAT8),
    gpus("llm.q, Qwen2.5-3B on 8 H100", 2.182, f"{LLMQ}/H100x8.md", "H100:8", LLMQ_3B),
    gpus("llm.q, Qwen2.5-3B on 8 H100 in FP8", 1.674, f"{LLMQ}/H100x8.md", "H100:8", LLMQ_3B | ALL_FLOAT8),
    gpus("llm.q, Qwen2.5-14B on 8 H100", 10.729, f"{LLMQ}/H100x8.md", "H100:8",
         ON_LLMQ | QWEN_14B | microbatches(4) | remat("elementwise ffn", "input")),
    mpt(7, "H100:8", 85_144, 48, 1),
    mpt(13, "H100:8", 38_336, 16, 1),
    mpt(30, "H100:8", 16_022, 504, 21),
    mpt(70, "H100:16x8", 135_490, 1024, 1),
    gpus("KempnerForge, Llama-3-8B on 2 H200, tp 2", 2.49, KEMPNER, "H200:2",
         LLAMA_8B | at(8, 4096, dp=1, tp=2) | FORGE),
    gpus("KempnerForge, Llama-3-8B on 4 H200, tp 4", 1.30, KEMPNER, "H200:4",
         LLAMA_8B | at(8, 4096, dp=1, tp=4) | FORGE),
    gpus("KempnerForge, Llama-3-8B on 4 H200, tp 2", 2.52, KEMPNER, "H200:4",
         LLAMA_8B | at(16, 4096, dp=2, tp=2) | FORGE),
    gpus("MaxText, Llama-3.1-70B on 256 H200", 15.516,
         f"{GPU_RECIPES}/a3ultra/llama3-1-70b/maxtext-pretraining-gke/README.md", "H200:32x8",
         LLAMA_70B | at(512, 8192, dp=128, replica=2) | microbatches(1) | EVERY_SECOND | CHUNKS),
    gpus("Megatron-Bridge, Llama-3.1-405B on 128 B200 in FP8", 64 * 8192 / 128 / 661, BRIDGE, "B200:16x8",
         BRIDGE_405B | at(64, 8192, pp=8, dp=2, cp=2, tp=4) | microbatches(32, "zero1") | BRIDGE_FLOAT8),
    gpus("Megatron-Bridge, Llama-3.1-405B on 128 B200 in MXFP8", 64 * 8192 / 128 / 624, BRIDGE, "B200:16x8",
         BRIDGE_405B | at(64, 8192, pp=8, dp=2, cp=2, tp=4) | microbatches(32, "zero1")
         | ALL_FLOAT8 | {"model.matmul_scales": "mxfp8"}),
    mpt(7, "A100:8", 37_130, 96, 2),
    mpt(13, "A100:8", 18_097, 48, 3),
    mpt(30, "A100:8", 7_330, 504, 21),
    mpt(7, "A100:8", 25_655, 128, 2, 8192),
    mpt(7, "A100:8", 13_382, 32, 2, 32_768),
]  # fmt: skip
# Rows that were entered before any of them was planned, in a commit of their own. Nothing is fitted to them.
NEMO_2407 = "https://github.com/NVIDIA/NeMo/blob/v2.1.0/docs/source/performance/performance_summary.md"
NEMO_2502 = "https://docs.nvidia.com/nemo-framework/user-guide/latest/performance/performance_summary.html"
MAXTEXT_2501, PAX_5B, PAX_175B, GROK, FINETUNE_8B, FINETUNE_70B = (
    f"{DGX_CLOUD}/{page}.md"
    for page in ("v25.01/maxtext/README_70b", "v25.01/paxml/README_5b", "v25.01/paxml/README_175b",
                 "v25.02/grok1/README_314b", "v25.04/ft_llama3/README_8b", "v25.04/ft_llama3/README_70b")
)  # fmt: skip
AUTOMODEL = "https://github.com/NVIDIA-NeMo/Automodel/blob"
FORGE_CONFIGS, FORGE_MIXTURE = (
    KEMPNER.replace("mfu_scaling/mfu_scaling", page)
    for page in ("config_validation/config_validation", "moe_packed/moe_packed_benchmark")
)
H200_70B, H200_MIXTRAL = (
    f"{GPU_RECIPES}/a3ultra/{model}/nemo-gke/nemo2407/recipe/README.md" for model in ("llama3_70b", "mixtral_8x7b")
)


def sized(model: Mapping[str, Any], layers: int, d_model: int, heads: int) -> dict[str, Any]:
    """The same model of another size, with four times d_model in the MLP and as many heads of keys as of queries."""
    vocab = model["model.vocab"]
    return {**model, **llama(layers, d_model, 4 * d_model, heads, heads, vocab)}


def mixture(layers: int, d_model: int, heads: int, kv_heads: int, vocab: int, *experts: int) -> dict[str, Any]:
    """The changes to a mixture in all layers: of the number of `experts`, of those of a token, and of their width."""
    count, of_token, width = experts
    sizes = dict(layers_of=f"moe*{layers}", experts=count, experts_per_token=of_token, d_expert=width)
    return llama(layers, d_model, width, heads, kv_heads, vocab) | {f"model.{key}": of for key, of in sizes.items()}


def per_gpu(
    title: str,
    tokens: float,
    source: str,
    topology: str,
    changes: Mapping[str, Any],
    config: str = "gpu_80gb_x8",
    **more: Any,
) -> Published:
    """A step of which the tokens a second of one GPU are published."""
    ranks = math.prod(map(int, topology.split(":")[1].split("x")))
    secs = changes["data.global_batch"] * changes["data.seq"] / ranks / tokens
    return Published(title, secs, source, config, topology, changes, **more)


def lora(rank: int, modules: str = "attention mlp") -> dict[str, Any]:
    return {"model.lora_rank": rank, "model.lora_on": modules, "model.lora_base": "bfloat16"}


GPT_5B, GPT_20B = sized(GPT3, 24, 4096, 32), sized(GPT3, 44, 6144, 48)
NEMOTRON_8B, NEMOTRON_22B = sized(NEMOTRON_15B, 32, 4096, 32), sized(NEMOTRON_15B, 40, 6144, 48)
HALF_ROPE = {"model.rope_fraction": 0.5}
LLAMA2_13B, LLAMA_29B = llama(40, 5120, 13_824, 40, 40, 32_000), llama(56, 6144, 21_504, 48, 8, 128_256)
QWEN_0_5B = llama(24, 896, 4864, 14, 2, 151_936) | {"model.qkv_bias": True, "model.tied": True, "model.d_head": 64}
QWEN_30B = mixture(48, 2048, 32, 4, 151_936, 128, 8, 768) | {"model.qk_norm": True}
MIXTRAL = mixture(32, 4096, 32, 8, 32_000, 8, 2, 14_336)
GROK_1, GROK_1_EIGHTH = (mixture(layers, 6144, 48, 8, 128_256, 8, 2, 32_768) for layers in (64, 8))
GPT_OSS_120B = {"model.layers": 36, "model.layers_of": "(local moe)*18", "model.experts": 128}
OSS_ON_V7X = GPT_OSS_120B | remat("layer", "host") | microbatches(1) | {"model.kernel": "splash"}
MAXTEXT_LLAMA2 = LLAMA2_70B | at(128, 4096, dp=64) | microbatches(1) | remat("elementwise core ffn") | CHUNKS
PAX = microbatches(1) | MINIMAL
NEMO_FLOAT8 = remat("elementwise") | ALL_FLOAT8
NEMO_GROK = at(1024, 8192, dp=1, cp=2, ep=8, tp=4) | microbatches(128, "zero1") | {"layout.context": "ulysses"}
NEMO_GROK |= remat("elementwise")
AUTO = BFLOAT16 | FULL
TUNED = at(32, 4096, dp=1) | microbatches(16) | remat("elementwise") | lora(16)
BLIND_ROWS = [
    trillium("Llama-3.1-8B", "4x8", 3.495, "Llama3.1-8B-MaxText/v6e-32", LLAMA_8B | at(96, 8192, dp=32) | OFFLOADED),
    trillium("Llama-3.1-8B", "8x8", 5.652, "Llama3.1-8B-MaxText/v6e-64", LLAMA_8B | at(320, 8192, dp=64) | OFFLOADED),
    Published("MaxText, GPT-3-175B on 256 v6e in int8", 14.245, f"{RECIPES}/trillium/GPT3-175B-MaxText/fp8/README.md",
              "llama2_7b_64", "v6e:16x16",
              GPT3 | at(768, 2048, dp=256) | FULL
              | {"model.matmul": "int8", "model.matmul_weight_gradients": "8bit"}),
    *(
        Published(f"MaxText, {title}", secs_at(tflops, changes, chips), source, "llama2_7b_64", topology, changes)
        for title, tflops, changes, chips, topology, source in (
            ("64B on two slices of 256 v5e", 112, scaled(64, 1024, dp=256, replica=2) | FULL, 512, "2xv5e:16x16", V5E),
            ("16B on 32 slices of 256 v5e", 108, scaled(16, 49_152, dp=256, replica=32) | FULL, 8192, "32xv5e:16x16",
             V5E),
            ("128B on two slices of 256 v5p, tp 8", 274, scaled(128, 512, dp=32, tp=8, replica=2) | MINIMAL, 512,
             "2xv5p:4x8x8", V5P),
        )
    ),
    Published("MaxText, Gemma-3-12B on two slices of 256 v6e, 32,768 tokens", 7.793,
              f"{RECIPES}/trillium/Gemma3-12B-MaxText/2x-v6e-256/README.md", "gemma3_12b", "2xv6e:16x16",
              at(512, 32_768, dp=256, replica=2) | microbatches(1) | FULL | CHUNKS | {"model.kernel": "splash"}),
    Published("MaxText, DeepSeek-V3 on 512 v5p, 8,192 tokens", 90.668,
              f"{RECIPES}/v5p/DeepSeek3-671B-MaxText/README.md", "llama2_7b_64", "v5p:8x8x8",
              DEEPSEEK_V3 | at(3072, 8192, dp=512) | {"optimizer.m_dtype": "float32"}
              | remat("elementwise latent qkv core experts ffn", "input out")),
    ironwood("DeepSeek-V3 on 256 v7x", 26.79, "4x8x8", DEEPSEEK_V3 | at(4096, 4096)),
    ironwood("DeepSeek-V3 on 256 v7x in FP8", 22.08, "4x8x8", DEEPSEEK_V3 | at(4096, 4096) | ALL_FLOAT8),
    Published("MaxText, gpt-oss-120b on 64 v7x", 17.10, IRONWOOD, "gpt_oss_20b", "v7x:4x4x4",
              OSS_ON_V7X | at(1280, 8192, dp=64, replica=2, ep=1)),
    Published("MaxText, gpt-oss-120b on 256 v7x", 17.12, IRONWOOD, "gpt_oss_20b", "v7x:4x8x8",
              OSS_ON_V7X | at(5120, 8192, dp=64, replica=8, ep=1)),
    ironwood("Llama-3.1-70B on 256 v7x", 12.27, "4x8x8", LLAMA_70B | at(1024, 8192) | remat("elementwise out ffn")),
    ironwood("Llama-3.1-70B on 256 v7x in FP8", 7.95, "4x8x8",
             LLAMA_70B | at(1024, 8192) | remat("elementwise out ffn") | ALL_FLOAT8),
    gpus("MaxText, Llama-2-70B on 64 H100", 6.999, MAXTEXT_2501, "H100:8x8", MAXTEXT_LLAMA2),
    gpus("MaxText, Llama-2-70B on 64 H100 in FP8", 4.324, MAXTEXT_2501, "H100:8x8", MAXTEXT_LLAMA2 | ALL_FLOAT8),
    gpus("Paxml, GPT-3-5B on 16 H100", 0.634, PAX_5B, "H100:2x8", GPT_5B | at(64, 2048, dp=8, replica=2) | PAX),
    gpus("Paxml, GPT-3-5B on 16 H100 in FP8", 0.47, PAX_5B, "H100:2x8",
         GPT_5B | at(64, 2048, dp=8, replica=2) | PAX | ALL_FLOAT8),
    gpus("Paxml, GPT-3-175B on 128 H100 in FP8", 7.47, PAX_175B, "H100:16x8",
         GPT3 | at(256, 2048, dp=128) | microbatches(1) | remat("elementwise core ffn") | ALL_FLOAT8),
    per_gpu("NeMo, GPT-3-20B on 64 H100 in FP8", 5851, NEMO_2407, "H100:8x8",
            GPT_20B | at(256, 2048, dp=32, tp=2) | microbatches(4, "zero1") | NEMO_FLOAT8),
    per_gpu("NeMo, Llama-2-7B on 8 H100 in FP8", 16_934, NEMO_2407, "H100:8",
            LLAMA_7B | at(128, 4096, dp=8) | microbatches(16, "zero1") | NEMO_FLOAT8),
    per_gpu("NeMo, Llama-2-13B on 16 H100 in FP8", 8715, NEMO_2407, "H100:2x8",
            LLAMA2_13B | at(128, 4096, pp=4, dp=4) | interleaved(10) | microbatches(32, "zero1") | NEMO_FLOAT8),
    per_gpu("NeMo, Llama-2-70B on 64 H100 in FP8", 1728, NEMO_2407, "H100:8x8",
            LLAMA2_70B | at(128, 4096, pp=4, dp=4, tp=4) | interleaved(20) | microbatches(32, "zero1") | NEMO_FLOAT8),
    per_gpu("NeMo, Nemotron-3-8B on 64 H100 in FP8", 12_507, NEMO_2407, "H100:8x8",
            NEMOTRON_8B | HALF_ROPE | at(256, 4096, dp=32, tp=2) | microbatches(2, "zero1") | NEMO_FLOAT8),
    per_gpu("NeMo, Nemotron-3-22B on 64 H100 in FP8", 4312, NEMO_2407, "H100:8x8",
            NEMOTRON_22B | HALF_ROPE | at(256, 4096, pp=4, dp=8, tp=2) | interleaved(10)
            | microbatches(16, "zero1") | NEMO_FLOAT8),
    gpus("NeMo, 8 layers of Llama-3.1-405B on 32 H100", 5.4, NEMO, "H100:4x8",
         LLAMA_405B | {"model.layers": 8, "layout.context": "ulysses"} | at(64, 8192, dp=2, cp=2, tp=8)
         | microbatches(32, "zero1") | remat("elementwise")),
    gpus("NeMo, 8 layers of Llama-3.1-405B on 32 H100 in FP8", 3.53, NEMO,
         "H100:4x8",
         LLAMA_405B | {"model.layers": 8, "layout.context": "ulysses"} | at(64, 8192, dp=2, cp=2, tp=8)
         | microbatches(32, "zero1") | NEMO_FLOAT8),
    gpus("NeMo, 8 layers of Grok-1 on 64 H100", 21.42, GROK, "H100:8x8", GROK_1_EIGHTH | NEMO_GROK),
    gpus("NeMo, 8 layers of Grok-1 on 64 H100 in FP8", 17.53, GROK, "H100:8x8",
         GROK_1_EIGHTH | NEMO_GROK | ALL_FLOAT8),
    gpus("NeMo, Grok-1 on 512 H100", 21.01, GROK, "H100:64x8", GROK_1 | NEMO_GROK | {"mesh.pp": 8} | interleaved(8)),
    gpus("NeMo, fine-tuning of Llama-3-8B on 8 H100", 1.32, FINETUNE_8B, "H100:8",
         LLAMA_8B | at(32, 4096, dp=8) | microbatches(4, "zero1") | remat("elementwise"), packed=True),
    gpus("NeMo, LoRA of Llama-3-8B on 8 H100", 0.92, FINETUNE_8B, "H100:8",
         LLAMA_8B | at(32, 4096, dp=8) | microbatches(4, "zero1") | remat("elementwise") | lora(8, "attention/[qkv]"),
         packed=True),
    gpus("NeMo, fine-tuning of Llama-3-70B on 32 H100", 3.36, FINETUNE_70B, "H100:4x8",
         LLAMA_70B | at(32, 4096, pp=4, dp=2, tp=4) | interleaved(5) | microbatches(16, "zero1")
         | remat("elementwise"), packed=True),
    gpus("NeMo, LoRA of Llama-3-70B on 8 H100", 9.118, FINETUNE_70B, "H100:8",
         LLAMA_70B | at(32, 4096, pp=4, dp=1, tp=2) | interleaved(20) | microbatches(32, "zero1")
         | remat("elementwise") | lora(16, "attention/[qkv]"), packed=True),
    gpus("AutoModel, Llama-3.1-70B on 64 H100, cp 2", 18.90, f"{AUTOMODEL}/2013a4d/docs/performance-summary.md",
         "H100:8x8", LLAMA_70B | at(128, 8192, dp=32, cp=2) | microbatches(4) | FULL | BFLOAT16_WEIGHTS),
    gpus("AutoModel, Qwen3-30B-A3B on 8 H100", 21.773, f"{AUTOMODEL}/8d9bfb9/docs/performance-summary.md", "H100:8",
         QWEN_30B | at(512, 4096, dp=1, ep=8) | microbatches(16) | AUTO),
    Published("AutoModel, gpt-oss-20b on 8 H100", 10.04, f"{AUTOMODEL}/89e3a9f/docs/performance-summary.md",
              "gpt_oss_20b", "H100:8", at(256, 4096, dp=1, ep=8) | microbatches(16) | AUTO),
    gpus("AutoModel, DeepSeek-V3 on 256 H100", 8.18, f"{AUTOMODEL}/89e3a9f/docs/performance-summary.md", "H100:32x8",
         DEEPSEEK_V3 | at(512, 4096, pp=4, dp=1, ep=64) | interleaved(8) | microbatches(8) | AUTO),
    gpus("AutoModel, LoRA of Llama-3.1-8B on one H100", 10.51, f"{AUTOMODEL}/507bfb7/docs/performance-summary.md",
         "H100:1", LLAMA_8B | TUNED | {"model.lora_dropout": 0.1}),
    gpus("AutoModel, LoRA of Qwen2.5-7B on one H100", 9.29, f"{AUTOMODEL}/507bfb7/docs/performance-summary.md",
         "H100:1", QWEN_7B | TUNED),
    per_gpu("Megatron-Bridge, Qwen3-30B-A3B on 16 H100 in FP8", 8960, BRIDGE, "H100:2x8",
            QWEN_30B | at(1024, 4096, dp=1, ep=16) | microbatches(64, "zero1") | BRIDGE_FLOAT8 | remat("elementwise")),
    per_gpu("Megatron-Bridge, gpt-oss-120b on 64 H100", 5824, BRIDGE, "H100:8x8",
            GPT_OSS_120B | at(1280, 4096, pp=4, dp=2, ep=8) | microbatches(80, "zero1") | remat("elementwise")
            | {"pipeline.schedule": "one_f_one_b"}, "gpt_oss_20b"),
    per_gpu("Megatron-Bridge, gpt-oss-120b on 64 B200", 13_568, BRIDGE, "B200:8x8",
            GPT_OSS_120B | at(1280, 4096, dp=8, ep=8) | microbatches(5, "zero1") | remat("elementwise"),
            "gpt_oss_20b"),
    per_gpu("Megatron-Bridge, Qwen3-30B-A3B on 8 B200 in MXFP8", 27_136, BRIDGE, "B200:8",
            QWEN_30B | at(512, 4096, dp=1, ep=8) | microbatches(16, "zero1") | remat("elementwise") | ALL_FLOAT8
            | {"model.matmul_scales": "mxfp8"}),
    per_gpu("Megatron-Bridge, Qwen3-235B-A22B on 256 B200 in MXFP8", 3776, BRIDGE, "B200:32x8",
            QWEN_235B | at(8192, 4096, pp=8, dp=4, ep=8) | microbatches(256, "zero1") | remat("elementwise")
            | ALL_FLOAT8 | {"model.matmul_scales": "mxfp8", "pipeline.schedule": "one_f_one_b"}),
    per_gpu("NeMo, Nemotron-4-15B on 64 B200 in FP8", 14_760, NEMO_2502, "B200:8x8",
            NEMOTRON_15B | at(256, 4096, dp=64) | microbatches(2, "zero1") | NEMO_FLOAT8),
    per_gpu("NeMo, Nemotron-4-340B on 128 B200 in FP8", 602, NEMO_2502, "B200:16x8",
            NEMOTRON_340B | at(32, 4096, pp=4, dp=4, tp=8) | interleaved(12) | microbatches(8, "zero1") | NEMO_FLOAT8),
    per_gpu("NeMo, Llama-3-70B on 64 B200 in FP8", 3062, NEMO_2502, "B200:8x8",
            LLAMA_70B | at(128, 8192, pp=4, dp=4, cp=2, tp=2) | interleaved(5) | microbatches(32, "zero1") | NEMO_FLOAT8
            | {"layout.context": "ulysses"}),
    per_gpu("NeMo, Mixtral-8x7B on 64 B200 in FP8", 15_457, NEMO_2502, "B200:8x8",
            MIXTRAL | at(256, 4096, dp=8, ep=8) | microbatches(2, "zero1") | NEMO_FLOAT8),
    gpus("NeMo, Llama-3.1-70B on 256 H200 in FP8", 20.021, H200_70B, "H200:32x8",
         LLAMA_70B | {"model.vocab": 50_304} | at(1024, 8192, pp=4, dp=32, tp=2) | interleaved(20)
         | microbatches(32, "zero1") | NEMO_FLOAT8),
    gpus("NeMo, Mixtral-8x7B on 256 H200", 2.740, H200_MIXTRAL, "H200:32x8",
         MIXTRAL | {"model.vocab": 50_304} | at(1024, 4096, dp=32, ep=8) | microbatches(2, "zero1")
         | remat("elementwise")),
    gpus("KempnerForge, Llama-3-8B on 32 H200", 7.05, FORGE_CONFIGS, "H200:8x4",
         LLAMA_8B | at(512, 4096, dp=32) | microbatches(4) | FULL),
    gpus("KempnerForge, Llama-3-13B on 8 H200", 14.81, KEMPNER, "H200:2x4",
         LLAMA_13B | at(128, 4096, dp=8) | microbatches(4) | FULL),
    gpus("KempnerForge, Llama-3-13B on 8 H200, tp 4", 4.79, KEMPNER, "H200:2x4",
         LLAMA_13B | at(32, 4096, dp=2, tp=4) | microbatches(4) | FULL),
    gpus("KempnerForge, Llama-3-70B on 32 H200, tp 4", 14.76, FORGE_CONFIGS, "H200:8x4",
         LLAMA_70B | at(64, 4096, dp=8, tp=4) | microbatches(4) | FULL),
    gpus("KempnerForge, Llama-3-13B on 32 H200, pp 2, tp 4", 4.99, FORGE_CONFIGS, "H200:8x4",
         LLAMA_13B | at(64, 4096, pp=2, dp=4, tp=4) | microbatches(4) | FULL | {"pipeline.schedule": "one_f_one_b"}),
    gpus("KempnerForge, Llama-3-29B on 32 H200, pp 2, tp 4", 5.78, FORGE_CONFIGS, "H200:8x4",
         LLAMA_29B | at(32, 4096, pp=2, dp=4, tp=4) | microbatches(8) | FULL | {"pipeline.schedule": "one_f_one_b"}),
    gpus("KempnerForge, Llama-3-70B on 32 H200, pp 4, tp 4", 4.29, FORGE_CONFIGS, "H200:8x4",
         LLAMA_70B | at(8, 4096, pp=4, dp=2, tp=4) | microbatches(4) | FULL | {"pipeline.schedule": "one_f_one_b"}),
    gpus("KempnerForge, mixture of 8 experts on 8 H200", 2.57, FORGE_MIXTURE, "H200:2x4",
         mixture(24, 2048, 16, 4, 128_256, 8, 2, 7168) | at(32, 4096, dp=8) | microbatches(1) | FULL),
    gpus("llm.q, Qwen2.5-0.5B on one H100", 3.508, f"{LLMQ}/H100x1.md", "H100:1",
         ON_LLMQ | QWEN_0_5B | microbatches(16) | remat("elementwise")),
    gpus("llm.q, Qwen2.5-3B on one H100 in FP8", 12.954, f"{LLMQ}/H100x1.md", "H100:1",
         ON_LLMQ | QWEN_3B | microbatches(32) | remat("elementwise") | ALL_FLOAT8),
    gpus("llm.q, Qwen2.5-1.5B on one RTX 4090", 37.281, f"{LLMQ}/4090x1.md", "RTX4090:1",
         ON_LLMQ | QWEN_1_5B | microbatches(128) | remat("elementwise") | {"loss.chunk_tokens": 1024}),
    gpus("llm.q, Qwen2.5-1.5B on one RTX 4090 in FP8", 25.792, f"{LLMQ}/4090x1.md", "RTX4090:1",
         ON_LLMQ | QWEN_1_5B | microbatches(128) | remat("elementwise") | {"loss.chunk_tokens": 1024} | ALL_FLOAT8),
    gpus("llm.q, Qwen2.5-0.5B on 4 RTX 4090", 3.384, f"{LLMQ}/4090x4.md", "RTX4090:4",
         ON_LLMQ | QWEN_0_5B | microbatches(8) | remat("elementwise") | {"loss.chunk_tokens": 8192} | UNSHARDED),
    gpus("llm.q, Qwen2.5-1.5B on 4 RTX 4090 in FP8", 7.287, f"{LLMQ}/4090x4.md", "RTX4090:4",
         ON_LLMQ | QWEN_1_5B | microbatches(16) | remat("elementwise") | CHUNKS | ALL_FLOAT8 | UNSHARDED),
]  # fmt: skip
# Rows that were entered after the blind ones had been planned, in a commit of their own, before any of them was.
MAXTEXT_V4 = "https://github.com/AI-Hypercomputer/maxtext/blob/281e04b/README.md"
MAXTEXT_LOG = f"{MAXTEXT}/docs/guides/monitoring_and_debugging/understand_logs_and_metrics.md"
MAXTEXT_A3 = "https://github.com/AI-Hypercomputer/maxtext/blob/efb6d9e/MaxText/configs/a3/llama_2_7b/README.md"
LLAMA2_RECIPE = RECIPES.replace("c8cfe2f", "66af741")
FUJI_V1, FUJI_V2, FUJI_V2_GPU, FUJI_70B, FUJI_70B_V6E, HONEYCRISP = (
    f"https://github.com/apple/axlearn/blob/{commit}/axlearn/experiments/text/gpt/{page}.py"
    for commit, page in (("4dae719", "fuji"), ("f2326c5", "fuji"), ("dd2e449", "fuji"), ("a7c64ee", "fuji"),
                         ("3f36108", "fuji"), ("273d0d0", "honeycrisp"))
)  # fmt: skip
PAX_GPU = "https://github.com/NVIDIA/JAX-Toolbox/blob/0005642/rosetta/rosetta/projects/pax/README.md"
MEGATRON = "https://github.com/NVIDIA/Megatron-LM/blob/ebb1484/README.md"
TITAN_H200 = f"{TORCHTITAN}/llama3-8b_h200_202506_trainy-whitefiber.md"


def of_parameters(tflops: float, parameters: int, tokens: int) -> float:
    """Seconds of a step of which TFLOP/s are published that count 6 FLOPs for each parameter and token, and nothing of
    attention, as MaxText did in 2023: of `tokens` on a chip."""
    return 6 * parameters * tokens / (tflops * 1e12)


# Attention that stores its scores is in blocks here.
UNFUSED = {"model.kernel": "xla"}
# MaxText of 2023: 1,024 tokens, heads of 256, and ReLU, which is its square here; of base.yml and the scripts then.
EARLY = PLAIN | UNFUSED | FULL | {"model.activation": "relu2", "model.norm": "rms", "model.tied": True}
EARLY |= {"model.d_head": 256}
GPT_22B = llama(48, 6144, 24_576, 24, 24, 32_768) | EARLY
GPT_52B = llama(32, 12_288, 49_152, 32, 32, 32_768) | EARLY
FUJI_7B_V1 = FUJI_7B | UNFUSED  # before axlearn had kernels of attention in this config
FUJI_70B_V2 = LLAMA2_70B | {"model.vocab": 32_768} | CHUNKS
HONEYCRISP_3B = llama(26, 3072, 8064, 24, 8, 49_152) | remat("elementwise core ffn") | microbatches(1, "ddp")
HONEYCRISP_3B |= {"model.qk_norm": True, "model.tied": True}
DEEPSEEK_16B = {f"model.{key}": value for key, value in dict(
    layers=27, layers_of="dense*1 moe*26", d_model=2048, d_ff=10_944, vocab=102_400, attention="mla", heads=16,
    kv_heads=16, d_head=128, d_latent=512, d_rope=64, experts=64, experts_per_token=6, d_expert=1408, shared_experts=2,
).items()}  # fmt: skip
GPT_126M = llama(12, 768, 3072, 12, 12, 50_304) | PLAIN | BIASES | WITHOUT_ROPE
GPT_126M |= {"model.activation": "gelu", "model.d_head": 64} | UNFUSED | remat("elementwise") | microbatches(1, "ddp")
QWEN_32B = llama(64, 5120, 27_648, 40, 8, 152_064) | {"model.qkv_bias": True}
TUNED_WHOLE = FULL | lora(16)
BRIDGE_TUNED = LLAMA_70B | remat("elementwise") | BRIDGE_FLOAT8
NEW_ROWS = [
    Published("MaxText, 22B on 64 v4, 1,024 tokens", of_parameters(156, 21_944_598_528, 16 * 1024), MAXTEXT_V4,
              "llama2_7b_64", "v4:4x4x4", GPT_22B | at(16 * 64, 1024, dp=64)),
    Published("MaxText, 22B on 8 slices of 64 v4, 1,024 tokens", of_parameters(146, 21_944_598_528, 16 * 1024),
              MAXTEXT_V4, "llama2_7b_64", "8xv4:4x4x4", GPT_22B | at(16 * 512, 1024, dp=64, replica=8)),
    Published("MaxText, 52B on 192 v4, 1,024 tokens", of_parameters(154, 51_942_260_736, 10 * 1024), MAXTEXT_V4,
              "llama2_7b_64", "v4:4x4x12", GPT_52B | at(10 * 192, 1024, dp=192)),
    Published("axlearn, Fuji-7B on 512 v4", 3.03, FUJI_V1, "llama2_7b_64", "v4:8x8x8",
              FUJI_7B_V1 | at(2048, 2048, dp=16, replica=32)),
    Published("axlearn, Fuji-7B on 4 slices of 256 v5e", 2.44, FUJI_V1, "llama2_7b_64", "4xv5e:16x16",
              FUJI_7B_V1 | at(2048, 2048, dp=16, replica=64)),
    # "HBM usage: 14GB/chip", which stored scores of 4,096 tokens would not leave: with a kernel of attention.
    Published("axlearn, Fuji-7B on 4 slices of 256 v5e, 4,096 tokens", 2.21, FUJI_V2, "llama2_7b_64", "4xv5e:16x16",
              FUJI_7B | MINIMAL | at(1024, 4096, dp=256, replica=4)),
    # What attention saves is in the host's memory; a kernel of attention is assumed, for the rows' 4,096 tokens. The
    # page's 59.87 % MFU is of these sizes, an MLP of 28,672 and a head of its own, not of the ones in that commit.
    Published("axlearn, Fuji-70B on 4 slices of 256 v5e", 14.3736, FUJI_70B, "llama2_7b_64", "4xv5e:16x16",
              FUJI_70B_V2 | at(1024, 4096, dp=256, replica=4) | remat("elementwise core ffn", "qkv out")),
    Published("axlearn, Fuji-7B on 256 v5p", 2.85, FUJI_V1, "llama2_7b_64", "v5p:4x8x8",
              FUJI_7B_V1 | at(2048, 2048, dp=8, replica=32)),
    # As on v5e.
    Published("axlearn, Fuji-70B on 256 v6e", 19.5, FUJI_70B_V6E, "llama2_7b_64", "v6e:16x16",
              FUJI_70B_V2 | microbatches(4) | at(1024, 4096, dp=256) | remat("elementwise core ffn", "qkv out")),
    Published("axlearn, Fuji-70B on 4 slices of 256 v6e", 4.9, FUJI_70B_V6E, "llama2_7b_64", "4xv6e:16x16",
              FUJI_70B_V2 | at(1024, 4096, dp=256, replica=4) | remat("elementwise core ffn", "qkv out")),
    # Whole parameters on each chip. A kernel of attention is assumed, since the rows have 4,096 tokens.
    Published("axlearn, Honeycrisp-3B on 512 v5p", 1.48, HONEYCRISP, "llama2_7b_64", "v5p:8x8x8",
              HONEYCRISP_3B | at(2048, 4096, dp=512)),
    Published("axlearn, Honeycrisp-3B on 2048 v5p", 0.47, HONEYCRISP, "llama2_7b_64", "v5p:8x16x16",
              HONEYCRISP_3B | at(2048, 4096, dp=2048)),
    *(
        Published(f"MaxText, {title}", secs_at(tflops, changes, chips), source, "llama2_7b_64", topology, changes)
        for title, tflops, changes, chips, topology, source in (
            ("32B on 4 slices of 256 v5e", 126, scaled(32, 4 * 1024, dp=256, replica=4) | FULL, 1024, "4xv5e:16x16",
             V5E),
            ("128B on 16 slices of 256 v5e, tp 16", 100,
             scaled(128, 4096, dp=16, tp=16, replica=16) | QKV_OFFLOADED, 4096, "16xv5e:16x16", V5E),
            ("64B on two slices of 64 v5p, tp 4", 309, scaled(64, 3 * 128, dp=16, tp=4, replica=2) | MINIMAL, 128,
             "2xv5p:4x4x4", V5P),
            ("256B on two slices of 512 v5p, tp 8", 289, scaled(256, 1024, dp=64, tp=8, replica=2) | MINIMAL, 1024,
             "2xv5p:8x8x8", V5P),
            ("1024B on two slices of 2048 v5p, tp 16", 279,
             scaled(1024, 8192, dp=128, tp=16, replica=2) | FULL, 4096, "2xv5p:8x16x16", V5P),
        )
    ),
    # A demonstration of the log: base.yml's recompute, and the kernel that it takes on TPUs.
    Published("MaxText, DeepSeek-V2-Lite on 4 v5p", 5.667, MAXTEXT_LOG, "llama2_7b_64", "v5p:2x2x1",
              DEEPSEEK_16B | at(96, 2048, dp=4) | FULL),
    Published("MaxText, Llama-2-70B on 256 v6e, 4 rows a chip", 17.373,
              f"{LLAMA2_RECIPE}/trillium/Llama2-70B-MaxText/README.md", "llama2_7b_64", "v6e:16x16",
              LLAMA2_70B | at(1024, 4096, dp=256) | FULL),
    Published("MaxText, Gemma-3-12B on 4 slices of 256 v6e, 32,768 tokens", 8.390,
              f"{RECIPES}/trillium/Gemma3-12B-MaxText/4x-v6e-256/README.md", "gemma3_12b", "4xv6e:16x16",
              at(1024, 32_768, dp=256, replica=4) | microbatches(1) | FULL | CHUNKS | {"model.kernel": "splash"}),
    # GPT-3's positions are a table there; 126M has no kernel of attention, and pax's base class recomputes all of 175B.
    gpus("Paxml, GPT-3-126M on 64 A100", 256 / 2526.72, PAX_GPU, "A100:8x8", GPT_126M | at(256, 2048, dp=64)),
    gpus("Paxml, GPT-3-5B on 256 A100", 2048 / 718.19, PAX_GPU, "A100:32x8", GPT_5B | at(2048, 2048, dp=256) | PAX),
    gpus("Paxml, GPT-3-175B on 256 A100", 1536 / 20.44, PAX_GPU, "A100:32x8",
         GPT3 | at(1536, 2048, dp=256) | microbatches(1) | FULL),
    # The README's example: no interleaving, no kernel of attention, and 138 TFLOP/s that count a second forward pass.
    gpus("Megatron-LM, GPT-3-175B on 1024 A100", 32.0, MEGATRON, "A100:128x8",
         GPT3 | {"model.vocab": 51_200, "pipeline.schedule": "one_f_one_b"} | UNFUSED
         | at(1536, 2048, pp=16, dp=8, tp=8) | microbatches(192, "ddp") | FULL),
    mpt(3, "A100:8", 86_491, 160, 2),
    mpt(13, "A100:8", 11_454, 72, 3, 16_384),
    gpus("Paxml, GPT-3-126M on 64 H100", 256 / 4709.12, PAX_GPU, "H100:8x8", GPT_126M | at(256, 2048, dp=64)),
    gpus("Paxml, GPT-3-5B on 256 H100", 2048 / 1657.24, PAX_GPU, "H100:32x8", GPT_5B | at(2048, 2048, dp=256) | PAX),
    gpus("Paxml, GPT-3-5B on 256 H100 in FP8", 2048 / 2374.66, PAX_GPU, "H100:32x8",
         GPT_5B | at(2048, 2048, dp=256) | PAX | ALL_FLOAT8),
    gpus("Paxml, GPT-3-175B on 256 H100", 1536 / 51.00, PAX_GPU, "H100:32x8",
         GPT3 | at(1536, 2048, dp=256) | microbatches(1) | FULL),
    gpus("Paxml, GPT-3-175B on 256 H100 in FP8", 1536 / 84.45, PAX_GPU, "H100:32x8",
         GPT3 | at(1536, 2048, dp=256) | microbatches(1) | FULL | ALL_FLOAT8),
    gpus("MaxText, Llama-2-7B on 8 H100, 4 rows each", secs_at(492, LLAMA_7B | at(32, 4096, dp=8), 8), MAXTEXT_A3,
         "H100:8", LLAMA_7B | at(32, 4096, dp=8) | microbatches(1) | remat("elementwise")),
    gpus("axlearn, Fuji-7B on 256 H100", 2.44, FUJI_V1, "H100:32x8",
         FUJI_7B_V1 | microbatches(1) | at(2048, 2048, dp=8, replica=32)),
    gpus("axlearn, Fuji-7B on 512 H100", 1.54, FUJI_V1, "H100:64x8",
         FUJI_7B_V1 | microbatches(1) | at(2048, 2048, dp=8, replica=64)),
    # Measured with the commit that brought cuDNN's kernel of attention.
    gpus("axlearn, Fuji-7B on 256 H100, 4,096 tokens", 1.78, FUJI_V2_GPU, "H100:32x8",
         FUJI_7B | microbatches(1) | at(1024, 4096, dp=8, replica=32)),
    mpt(3, "H100:8x8", 1_441_663, 1152, 3),
    mpt(30, "H100:32x8", 550_022, 2048, 1),
    mpt(13, "H100:8", 15_812, 24, 3, 32_768),
    per_gpu("Megatron-Bridge, Llama-3-70B on 64 H100 in FP8, 128 rows", 1602, BRIDGE, "H100:8x8",
            BRIDGE_70B | microbatches(64, "zero1") | at(128, 8192, pp=8, dp=2, tp=4) | BRIDGE_FLOAT8),
    per_gpu("Megatron-Bridge, Llama-3.1-405B on 1024 H100 in FP8, 512 rows", 292, BRIDGE, "H100:128x8",
            BRIDGE_405B | at(512, 8192, pp=8, dp=8, cp=2, tp=8) | microbatches(64, "zero1") | BRIDGE_FLOAT8),
    per_gpu("Megatron-Bridge, fine-tuning of Llama-3-70B on 32 H100 in FP8", 1638, BRIDGE, "H100:4x8",
            BRIDGE_TUNED | interleaved(5) | at(32, 4096, pp=4, dp=2, tp=4) | microbatches(16, "zero1"), packed=True),
    per_gpu("Megatron-Bridge, LoRA of Llama-3-70B on 8 H100 in FP8", 2643, BRIDGE, "H100:8",
            BRIDGE_TUNED | interleaved(20) | at(32, 4096, pp=4, dp=1, tp=2) | microbatches(32, "zero1")
            | lora(16, "attention/[qkv]"), packed=True),
    gpus("AutoModel, LoRA of Qwen2.5-32B on 8 H100, tp 2", 7.28, f"{AUTOMODEL}/2013a4d/docs/performance-summary.md",
         "H100:8", QWEN_32B | TUNED_WHOLE | at(32, 4096, dp=4, tp=2) | microbatches(4)),
    gpus("AutoModel, LoRA of Llama-3.3-70B on 8 H100, tp 2", 15.00, f"{AUTOMODEL}/2013a4d/docs/performance-summary.md",
         "H100:8", LLAMA_70B | TUNED_WHOLE | at(32, 4096, dp=4, tp=2) | microbatches(4)),
    gpus("AutoModel, LoRA of Llama-3.3-70B on 16 H100, tp 2", 8.32, f"{AUTOMODEL}/2013a4d/docs/performance-summary.md",
         "H100:2x8", LLAMA_70B | TUNED_WHOLE | at(32, 4096, dp=8, tp=2) | microbatches(2)),
    gpus("llm.q, Qwen2.5-3B on one H100", 16.935, f"{LLMQ}/H100x1.md", "H100:1",
         ON_LLMQ | QWEN_3B | microbatches(32) | remat("elementwise")),
    gpus("llm.q, Qwen2.5-0.5B on 8 H100", 0.465, f"{LLMQ}/H100x8.md", "H100:8",
         ON_LLMQ | QWEN_0_5B | microbatches(2) | remat("elementwise") | UNSHARDED),
    gpus("llm.q, Qwen2.5-1.5B on 8 H100", 1.148, f"{LLMQ}/H100x8.md", "H100:8",
         ON_LLMQ | QWEN_1_5B | microbatches(2) | remat("elementwise") | UNSHARDED),
    gpus("llm.q, Qwen2.5-14B on 8 H100 in FP8", 7.120, f"{LLMQ}/H100x8.md", "H100:8",
         ON_LLMQ | QWEN_14B | microbatches(4) | remat("elementwise ffn", "input") | ALL_FLOAT8),
    gpus("KempnerForge, Llama-3-8B on 4 H200, 128 rows", 13.49, FORGE_CONFIGS, "H200:4",
         LLAMA_8B | at(128, 4096, dp=4) | microbatches(4) | FULL),
    gpus("KempnerForge, Llama-3-13B on 16 H200, tp 4", 4.87, KEMPNER, "H200:4x4",
         LLAMA_13B | at(64, 4096, dp=4, tp=4) | microbatches(4) | FULL),
    gpus("KempnerForge, Llama-3-8B on 32 H200, tp 4", 1.68, KEMPNER, "H200:8x4",
         LLAMA_8B | at(64, 4096, dp=8, tp=4) | FORGE),
    gpus("torchtitan, Llama-3.1-8B on 64 H200 in FP8", 2 * 8192 / 10_753, TITAN_H200, "H200:8x8",
         TITAN_8B | at(128, 8192, dp=64) | ALL_FLOAT8 | {"model.matmul_scales": "current"}),
    per_gpu("Megatron-Bridge, Qwen3-30B-A3B on 8 B200 in MXFP8, one row at once", 9299, BRIDGE, "B200:8",
            QWEN_30B | at(512, 4096, dp=1, ep=8) | microbatches(64, "zero1") | remat("elementwise") | ALL_FLOAT8
            | {"model.matmul_scales": "mxfp8"}),
]  # fmt: skip
ROWS = [*TPU_ROWS, *GPU_ROWS, *OTHER_ROWS, *UNSEEN_ROWS, *BLIND_ROWS, *NEW_ROWS]


# Hosts with four GPUs have no switch: each of their 18 links leads to another GPU, six to each (NVIDIA's blog,
# "Introducing NVIDIA HGX H100": 300 GB/s in both directions between two). By the program of these rows.
PAIR_LINKS = {"KempnerForge": 6}
# Half of each chip's rows, drawn once, before any was planned: draw() with this seed. Constants of prices
# (parallax/hardware/chips.py) are fitted to the other half alone.
SEED = 2026
HELD_OUT = (
    "MaxText, 16B on 256 v5e",
    "MaxText, 32B on 256 v5e",
    "MaxText, Llama-2-70B on 512 v5p",
    "MaxText, Mixtral-8x7B on 128 v5p",
    "MaxText, 32B on 64 v5p, tp 4",
    "MaxText, Llama-3.1-8B on 256 v6e",
    "MaxText, Llama-3.1-70B on 256 v6e",
    "MaxText, Llama-3.1-70B on 32 v6e",
    "MaxText, Llama-3.1-70B on 256 v7x, 131,072 tokens",
    "MaxText, Qwen3-235B-A22B on 256 v7x",
    "MaxText, Llama-3.1-405B on 256 v7x in FP8",
    "this project, 1.2B on one H100",
    "NeMo, Llama-3.1-8B on 8 H100",
    "MaxText, Llama-2-7B on 8 H100",
    "Megatron-Bridge, Llama-3-8B on 8 H100 in FP8",
    "MaxText, Llama-3-70B on 128 H100",
    "llm.q, Qwen2.5-7B on one H100 in FP8",
    "NeMo, Llama-3.1-8B on 8 H100 in FP8",
    "llm.q, Qwen2.5-7B on one H100",
    "torchtitan, Llama-3.1-8B on 32 H200 in FP8",
    "KempnerForge, Llama-3-8B on one H200",
    "Megatron-Bridge, Llama-3-8B on 8 B200 in MXFP8",
)


def draw(rows: Sequence[Published], seed: int) -> tuple[str, ...]:
    """Titles of half of each chip's rows."""
    chance, of_chip = random.Random(seed), defaultdict(list)
    for row in rows:
        of_chip[row.topology.split(":")[0]].append(row.title)
    return tuple(title for titles in of_chip.values() for title in chance.sample(titles, len(titles) // 2))


# Nobody published a time of it: it shows that the benchmark runs.
SMALL = {"mesh.simulate": 0, "mesh.dp": 8, "model.dtype": "bfloat16", "pipeline.microbatches": 1}
SMALLEST = [Published("tiny_gqa", 1.0, "nowhere", "tiny_gqa", "H100:1x8", SMALL)]


def main() -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("--rows", nargs="*", type=int, help="numbers of rows; all of --half without it")
    parser.add_argument("--half", choices=HALVES, help=f"rows of this half; without it of all but {BLIND} and {NEW}")
    parser.add_argument("--analytic", action="store_true", help="plan the steps, and compile nothing")
    args = parser.parse_args()
    if args.half and args.rows is not None:
        parser.error("--half: --rows says which rows; use one of the two")
    rows = SMALLEST if args.smoke else ROWS
    if wrong := [at for at in args.rows or () if not 0 <= at < len(rows)]:
        parser.error(f"--rows {wrong[0]}: there are rows 0 to {len(rows) - 1}")
    print(f"| step | half | published | {'planned' if args.analytic else 'predicted'} | of it |", end="")
    print(" as theirs | of it |" if args.analytic else " GiB | MFU |", "|---" * 7 + "|", sep="\n")
    shares: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for at in numbers_of(rows, args.half) if args.rows is None else args.rows:
        started, row = time.perf_counter(), rows[at]
        plans, compiled = (planned_secs(row), []) if args.analytic else compiled_step(row)
        parts = [f"{secs:.3f} s | {secs / row.secs:.2f}" for secs in plans] + compiled
        print(
            f"| [{row.title}]({row.source}) |", " | ".join([half_of(row), f"{row.secs:.2f} s", *parts]), "|", flush=True
        )
        print(f"row {at}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        judged = HELD if half_of(row) == NEW else half_of(row)
        for group in (judged, f"{judged}, {kind_of(row)}") if args.analytic else ():
            shares[group].append(tuple(secs / row.secs for secs in plans))
    for group in sorted(shares, key=last_of_its_half):
        ours, theirs = zip(*shares[group], strict=True)
        print(f"{errors_line(group, ours)}; as theirs {errors_line('', theirs)}; {len(ours)} rows")


BLIND, NEW, HELD = "blind", "new", "held out"
# In the order in which their errors are printed.
HALVES = ("another chip", "fitted", "unseen", BLIND, NEW, HELD)


def last_of_its_half(group: str) -> tuple[int, bool, str]:
    """The order of the lines of errors: a half by its kinds of machine and model, and then all of it.

    >>> sorted(["held out", "held out, GPUs, dense", "fitted"], key=last_of_its_half)
    ['fitted', 'held out, GPUs, dense', 'held out']
    """
    half, _, kind = group.partition(", ")
    return HALVES.index(half), not kind, kind


def numbers_of(rows: Sequence[Published], half: str | None) -> list[int]:
    """Numbers of the rows of a half, or of all that may be planned."""
    halves = [half_of(row) for row in rows]
    return [at for at, row_half in enumerate(halves) if (row_half == half if half else row_half not in (BLIND, NEW))]


def half_of(row: Published) -> str:
    """Which half a row belongs to, or what it is if it belongs to none."""
    for name, rows in (
        ("another chip", OTHER_ROWS), ("unseen", UNSEEN_ROWS), (BLIND, BLIND_ROWS), (NEW, NEW_ROWS)
    ):  # fmt: skip
        if row in rows:
            return name
    return HELD if row.title in HELD_OUT else "fitted"


def kind_of(row: Published) -> str:
    """The kind of machine and model: "GPUs, dense", for example."""
    has_experts = row.config in ("mixtral_8x7b_128", "gpt_oss_20b") or "model.experts" in row.changes
    on_tpus = re.match(r"(\d+x)?v\d", row.topology)
    return f"{'TPUs' if on_tpus else 'GPUs'}, {'mixture' if has_experts else 'dense'}"


def errors_line(group: str, shares: Sequence[float]) -> str:
    """How far planned times are from published ones.

    >>> errors_line("held out", [0.9, 1.02, 1.2])
    'held out: median 10.0 %, worst 20.0 %'
    """
    errors = [abs(share - 1) for share in shares]
    return (
        f"{group}{': ' if group else ''}median {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %"
    )


def settings_of(row: Published) -> tuple[Any, Any]:
    """The row's settings, in which nothing is open, and its topology."""
    from parallax.analysis.planned.topology import read_topology, without_chips
    from parallax.config.settings import read_settings
    from parallax.step.resolve import resolve

    without_chips(["--topology"])
    config = config_of(row.config)
    config.update_from_flattened_dict(row.changes)
    topology = read_topology(row.topology)
    links = PAIR_LINKS.get(row.title.split(",")[0], 0)
    topology = topology._replace(chip=topology.chip._replace(pair_links=links))
    return resolve(read_settings(config.to_dict()), topology.as_devices), topology


def planned_secs(row: Published) -> tuple[float, float]:
    """Seconds of the step by its plan, without a compiler: of this project's program, and as theirs."""
    from parallax.analysis.planned.layouts import model_on_topology
    from parallax.analysis.planned.step_time import estimate, traced_work
    from parallax.analysis.traced.memory import predicted_host_memory, predicted_memory

    settings, topology = settings_of(row)
    model = model_on_topology(settings, topology)
    held, host, traced = (
        predicted_memory(model, settings),
        predicted_host_memory(model, settings),
        traced_work(model, settings),
    )
    ours = estimate(settings, topology, held, traced, host, packed=row.packed).secs
    if not (theirs := theirs_of(row.title, on_gpus=not topology.is_tpu)):
        return ours, ours
    work = as_theirs(traced, theirs, settings, topology)
    hidden = dict(hidden_axes=theirs.hides.split(), sums=theirs.sums, waits_for_sums=theirs.waits_for_sums)
    step = estimate(settings, topology, held, work, host, packed=row.packed, by_xla=False, **hidden)
    return ours, max(step.secs, Mixture(settings, topology, theirs).host_secs / (1 - step.bubble))


def compiled_step(row: Published) -> tuple[tuple[float], list[str]]:
    """Seconds of the compiled step, with kernels at their peak; GiB of a device, arguments and temporaries, and MFU."""
    from parallax.analysis.planned.step_time import compile_and_read
    from parallax.analysis.planned.topology import devices_of

    settings, topology = settings_of(row)
    step = compile_and_read(settings, topology, devices_of(topology), kernel_efficiency=1.0)
    gib = (step.arguments + step.temporaries) / 2**30
    return (step.time.total_secs,), [f"{gib:.2f}", f"{100 * step.time.mfu:.1f} %"]


if __name__ == "__main__":
    run_benchmark(main)
