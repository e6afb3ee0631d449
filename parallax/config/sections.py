"""Every key of a config, with its default, meaning and range; they are defined only here.

`python docs/config_keys.py` writes configs/base.py and docs/configs.md from it, and --help-config prints it.
"""

import copy
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from parallax.config.keys import ABOVE_ZERO, Section, key
from parallax.config.mixture import DATASET, RECORDS, Phase, SourceConfig, phases_of, sources_of
from parallax.config.paths import dataset_of, paths_of
from parallax.config.remat import REMAT, REMAT_PARTS, RESIDUALS_ON, canonical_remat, canonical_residuals_on
from parallax.config.where import where_of
from parallax.errors import (
    ConfigError,
    check_choice,
    check_local,
    check_whole,
    divisors,
    listed,
    names_of,
    nearest,
    quoted,
    words_of,
)
from parallax.schedules import SCHEDULES, check_schedule
from parallax.storage.copies import LIMIT_BYTES
from parallax.user_code import UserCode, codes_by_name, names_code, settings_by_name

# tp goes last: neighbours have the fastest links, and tp sends the most.
ALL_AXES = ("pp", "replica", "dp", "cp", "ep", "tp")
AXES = ("pp", "dp", "tp")  # axes of every mesh; a mesh has the others only if they have more than one device
INFERRED = -1
RESIDUAL_VALUES = ("batch/dp seq d_model/tp", "batch/dp seq/tp d_model")
STREAMS = "streams"  # a value of layout.tensor_parallel
PARTS = EMBEDDING, BLOCKS, HEAD = ("embedding", "blocks", "head")  # of a model: modules, and entries of its parameters
POLICY_NAMES = ("ddp", "zero1", "zero2", "lean", "zero3")
SIGNALS = ("loss", "grad_norm")
BUILT_IN = ("stdlib", "moby", "synthetic")  # sources that need no path
FILES = ("text", *RECORDS)  # sources that read `path` through a tokenizer
SPECIAL_TOKENS = ("text", "tokens")
TEXT, CHAT, COMPLETION = FORMATS = ("text", "chat", "completion")  # what a record is
MESSAGES, PROMPT_AND_COMPLETION = "messages", ("prompt", "completion")  # fields of records
NAMED_TEMPLATES = ("chatml", "gemma", "llama3", "zephyr")  # in parallax/data/templates
ANSWERS, EVERY_TOKEN = LOSS_ON = ("answers", "all")
CUT, DROP_LONG, SPLIT = TOO_LONG = ("cut", "drop", "split")
AUTO = "auto"  # a value that is chosen from other settings
TOKENIZER_ENDINGS = (".json", ".tiktoken", ".model")  # of files with a tokenizer
SMALLEST_BPE_VOCAB = 257  # every byte, and the end of a document
BELOW_ONE = 1 - 2**-24  # values nearer to 1 are 1 in float32, with which bias correction would divide 0 by 0
LEAST_FLOAT = 1e-30  # well above float32's least: quotients by it, or by its root, stay finite
LEAST_TEMPERATURE = 1e-6  # below it, float32 cannot distinguish scaled logits; 0 is exact
STATE_DTYPES = ("float32", "bfloat16", "float8")  # of an optimizer's moments
WEIGHTS_DTYPES = ("float32", "bfloat16")
MEMORIES = ("device", "host")
NORM_PLACES = BEFORE, BEHIND, BOTH = ("before", "after", "both")
BRANCHES = SEQUENTIAL, PARALLEL, ONE_NORM = ("sequential", "parallel", "parallel_one_norm")
NORM_SCALES = DIRECT, ONE_PLUS, UNSCALED = ("direct", "one_plus", "none")
LAYER_KINDS = ("dense", "moe")  # by their MLP
BASE = "base"  # of a kind of layers: the one of which it is a variant
# Settings of attention that are data of a layer: layers that differ in them alone have one block.
OF_A_KIND = ("sliding_window", "rope", "rope_theta", "rope_scaling", "rope_factor", "rope_original_seq")
OF_A_KIND += ("rope_fast_turns", "rope_slow_turns", "rope_truncate", "rope_temperature", "rope_magnitude")
ROPE_FACTORS = ("rope_short_factors", "rope_long_factors")
OF_A_KIND += ROPE_FACTORS
# Settings that change shapes: layers that differ in them have another block. Of attention, and of the MLP by its base.
SHAPES_OF_GQA, SHAPES_OF_MLA = (
    ("heads", "d_head", "kv_heads", "rope_fraction"),
    ("heads", "d_head", "d_latent", "d_latent_q", "d_rope"),
)
SHAPES_OF_MLP = {"dense": "d_ff", "moe": "d_expert"}
SHAPES_OF_HEADS = (*dict.fromkeys(SHAPES_OF_GQA + SHAPES_OF_MLA),)
OF_A_STACK = (*SHAPES_OF_HEADS, *SHAPES_OF_MLP.values())
LONGROPE = "longrope"  # a rope_scaling
CLAMPED = "clamped"  # an activation
MATMULS = ("compute", "int8", "float8", "float4")
MATMUL_PARTS = ATTENTION, MLP, EXPERTS = ("attention", "mlp", "experts")
MATMUL_RESIDUALS = COMPUTE, EIGHT_BITS = ("compute", "8bit")
ADAPTER, EXPERT_ADAPTER = ("adapters", "experts' adapters")  # parts of a model that model.lora_rank adds
LORA_BASES = ("float32", "bfloat16", "int8", "float8")
RANGE = re.compile(r"\d*\.?\d+(e[+-]?\d+)?")
MATMUL_SCALES = ("delayed", "current", "row", "block", "mxfp8", "nvfp4", "fixed")
DELAYED, CURRENT, ROW_SCALES, BLOCK_SCALES, MXFP8, NVFP4, FIXED = MATMUL_SCALES
# Arguments of code that a config may name: see docs/extend.md.
OF_PRODUCTS = ("matmul", "matmul_residuals")
MLP_ARGS = ("residual", "family", "sizes", "dtype", "out_scale", "dense", *OF_PRODUCTS)
ATTENTION_ARGS = ("residual", "family", "sizes", "dtype", "kernel", "norm_eps", "bias", "temperature", "out_scale")
ATTENTION_ARGS += ("kv", "qk_norm", "dense", *OF_PRODUCTS)
DENSE_ARGS = ("weight", "x", "y", "sizes", "dtype", "bias", "scale", "at_rest", "part", *OF_PRODUCTS)
BLOCK_ARGS = ("model", "residual", "family", "kv", "kind", "loss", "exchange", "exchange_hosts")
BLOCK_ARGS += ("expert_chunk_tokens", "measures")
# Keys that attention of a user's own is not told; attention_scale is a factor of its `temperature`.
OF_QK_NORM = ("qk_norm_over", "qk_norm_scale", "qk_norm_after_rope")
ATTENTION_CHOICES = ("score_cap", "sinks", *OF_QK_NORM, "out_bias")
OF_GQA = ("rope_fraction", *OF_QK_NORM)
# Syntax of model.layers_of: a group in parentheses or a single kind, with a count; a run within a group.
LAYER_RUN = re.compile(r"([a-z]\w*)(?:\*([1-9]\d{0,4}))?(?![\w*])")
LAYER_GROUP = re.compile(r"(?:\(([^()]+)\)|([a-z]\w*))(?:\*([1-9]\d{0,4}))?(?![\w*])")
MOST_INT8_PRODUCTS = (2**31 - 1) // 127**2
SAVED_STEP = re.compile(r"(.+)/checkpoints/([1-9]\d{0,9})/?")
STEP_RANGE = re.compile(r"([1-9]\d{0,9}):([1-9]\d{0,9})")

TOO_SMALL = "is too small; use {} or more"
ALL_BATCHES = -1  # of the held-out text
AXIS = {"least": 1, "also": INFERRED, "says": "is not a number of devices; use 1 or more, or -1 for all others"}


@dataclass(frozen=True)
class MeshConfig(Section, most=2**20, saved=True):
    """Number of devices along each axis; one may be -1: all remaining devices."""

    pp: int = key(1, "pipeline: shards the layers", **AXIS)
    dp: int = key(INFERRED, "data: shards the batch, and the parameters (FSDP)", **AXIS)
    tp: int = key(1, "tensor: shards heads, d_ff and vocab", **AXIS)
    simulate: int = key(
        0,
        "number of simulated CPU devices, in all processes together; 0: use the real devices",
        most=2**12,
        says="is not a number of devices; use 0 (none) or more",
    )
    replica: int = key(
        1, "data, without sharded parameters (hybrid sharding): for the network between slices of chips", **AXIS
    )
    cp: int = key(1, "context: shards seq, and the parameters; data.seq must divide over 2 * cp", **AXIS)
    ep: int = key(1, "expert: shards experts; everything else, also the batch, is sharded as over dp", **AXIS)

    def check(self) -> None:
        inferred = [axis for axis, size in self.sizes.items() if size == INFERRED]
        if len(inferred) > 1:
            both = ", ".join(f"mesh.{axis}=-1" for axis in inferred)
            raise ConfigError(f"{both}: at most one axis can be inferred; give the others a size, such as 1")

    @property
    def sizes(self) -> dict[str, int]:
        """The configured size of each axis of the mesh, in mesh order."""
        return {axis: getattr(self, axis) for axis in ALL_AXES if axis in AXES or getattr(self, axis) != 1}


@dataclass(frozen=True)
class ModelConfig(Section, most=2**24, saved=True):
    """The model: a decoder-only transformer."""

    vocab: int = key(0, "number of entries; 0: the tokenizer's, rounded up to a multiple of 128")
    vocab_multiple: int = key(
        1, "rows of tables are padded to a multiple of this, as 128; padding has no logits", least=1
    )
    layers: int = key(4, "number of blocks of attention and MLP", least=1, most=2**14)
    depth: int = key(
        0, "layers, in a config whose width, rate, batch and steps follow from them, as text_to_chat_x8; 0: in others"
    )
    d_model: int = key(256, "width of the residual stream", least=1)
    d_ff: int = key(704, "width of the MLP", least=1)
    mlp: str = key("gated", "the MLP of dense layers: with a gate, or plain", choices=("gated", "plain"), code=MLP_ARGS)
    activation: str = key(
        "silu",
        "activation of the MLP of dense layers and of shared experts; relu2 is the square of ReLU, and clamped is, of "
        "gated ones, (up + 1) * gate * sigmoid(1.702 gate), with gate at most activation_limit and up from "
        "-activation_limit to activation_limit",
        choices=("silu", "gelu", "gelu_tanh", "relu2", CLAMPED),
    )
    activation_limit: float = key(7.0, "the largest gate and up of activation='clamped'", least=1e-6)
    mlp_bias: bool = key(False, "biases on the projections of the MLP of dense layers")
    norm: str = key(
        "rms",
        "norms of the residual stream, in blocks and in the head: RMSNorm or LayerNorm",
        choices=("rms", "layer"),
        code=("layout", "sizes", "eps", "part"),
    )
    norm_scale: str = key(
        DIRECT,
        "these norms' factor: the parameter itself, 1 + the parameter, or none, and no parameter",
        choices=NORM_SCALES,
    )
    norm_bias: bool = key(False, "biases of these norms")
    norm_place: str = key(BEFORE, "where attention and the MLP have them: before, after, or both", choices=NORM_PLACES)
    branches: str = key(
        SEQUENTIAL,
        "what the MLP reads: the stream after attention, or what attention reads, through a norm of its own or through "
        "attention's",
        choices=BRANCHES,
    )
    dense: str = key(
        "dense",
        "projections, but for experts' and mla's up-projections of latents",
        choices=("dense",),
        code=DENSE_ARGS,
    )
    kinds: str = key(
        "",
        'what differs in kinds of layers: settings, as "local=(sliding_window=1024) wide=(d_ff=4096)", and '
        'classes of blocks, as "wide=my_module:WideBlock(width=4)"',
        saved=True,
        code=BLOCK_ARGS,
        by_name=True,
    )
    layers_of: str = key(
        "",
        'kinds of layers, "dense", "moe" or those of model.kinds, in order: "moe*32", "dense*1 moe*26", '
        '"(local*5 global)*8"; empty: all dense',
        saved=True,
    )
    experts: int = key(8, "moe: number of experts in a layer", least=1, most=2**12)
    experts_per_token: int = key(2, "moe: number of experts for each token", least=1)
    d_expert: int = key(704, "moe: width of an expert's gated MLP", least=1)
    shared_experts: int = key(0, "moe: experts for every token, computed as one MLP of this many times d_expert")
    router_score: str = key(
        "softmax",
        "moe: score function of the router, over all experts or separately for each",
        choices=("softmax", "sigmoid"),
    )
    router_normalized: bool = key(True, "moe: the weights of a token's experts sum to 1")
    router_scale: float = key(1.0, "moe: factor on the weights of experts", least=1e-6)
    router_groups: int = key(1, "moe: groups of experts; a token first chooses groups, then experts in them", least=1)
    router_groups_chosen: int = key(
        1, "moe: groups that a token chooses, by their best expert (softmax) or the sum of two best (sigmoid)", least=1
    )
    router_shift: bool = key(False, "moe: a trained bias on the router's logits")
    expert_bias: bool = key(False, "moe: biases of each expert's gate, up and down")
    shared_gate: bool = key(False, "moe: each token's output of shared experts is times a sigmoid of its own")
    expert_activation: str = key(
        "swiglu",
        "moe: silu(gate) * up in experts; or (up + 1) * gate * sigmoid(1.702 gate), with gate at most expert_limit and "
        "up from -expert_limit to expert_limit",
        choices=("swiglu", CLAMPED),
    )
    expert_limit: float = key(7.0, "moe: the largest gate and up of expert_activation='clamped'", least=1e-6)
    attention: str = key(
        "mla", "kv_heads = heads is MHA, kv_heads = 1 is MQA", choices=("mla", "gqa"), code=ATTENTION_ARGS
    )
    heads: int = key(8, "query heads", least=1)
    kv_heads: int = key(8, "gqa only", least=1)
    d_head: int = key(32, "per head; in mla the part of q and k without position, and v", least=1)
    d_latent: int = key(64, "mla: width of the compressed keys and values")
    d_latent_q: int = key(0, "mla: width of the compressed queries; 0 projects queries directly")
    d_rope: int = key(16, "mla: width of the decoupled, rotated part of q and k")
    rope: bool = key(True, "rotary position embeddings; False: none (NoPE)")
    attention_scale: float = key(0.0, "factor on scores; 0: the width of queries and keys to the power -0.5")
    score_cap: float = key(0.0, "soft cap on scores: each becomes cap * tanh(score / cap); 0: none")
    qk_clip: float = key(0.0, "largest score of a head; a step that exceeds it scales its projections down; 0: none")
    sinks: bool = key(False, "a trained logit of each head that softmax counts beside the scores, without a value")
    rope_theta: float = key(10_000.0, "base of the wavelengths of rotary position embeddings", least=1 + 1e-6)
    rope_fraction: float = key(1.0, "gqa: part of a head's dims that is rotated, the last of them", least=1e-6, most=1)
    rope_scaling: str = key(
        "none",
        "extends the context beyond the length in training",
        choices=("none", "linear", "yarn", "llama3", LONGROPE),
    )
    rope_factor: float = key(1.0, "factor by which the scaling extends the context; 1 or more", least=1)
    rope_original_seq: int = key(2048, "tokens; yarn, llama3, longrope: the context before the extension", least=1)
    rope_fast_turns: float = key(
        32.0, "yarn, llama3 (usually 4): pairs with more turns in the original context are kept", least=1e-6
    )
    rope_slow_turns: float = key(
        1.0, "yarn, llama3: wavelengths of pairs with fewer turns there are multiplied by rope_factor", least=1e-6
    )
    rope_truncate: bool = key(
        True, "yarn: the first and the last pair between which it interpolates are rounded outwards to whole numbers"
    )
    rope_temperature: float = key(
        0.0, "factor on attention's logits; 0: (0.1 ln rope_factor + 1)^2 for yarn, 1 for others"
    )
    rope_magnitude: float = key(1.0, "factor on the rotated parts of queries and of keys", least=1e-6)
    rope_short_factors: str = key(
        "",
        'longrope: factors on the wavelengths of rotated pairs, one each, as "1.0 1.05 1.2", in rows of at most '
        "rope_original_seq tokens",
        saved=True,
    )
    rope_long_factors: str = key("", "longrope: the same in longer rows", saved=True)
    qkv_bias: bool = key(False, "biases on the projections to heads: q, k and v; in mla only q")
    out_bias: bool = key(False, "a bias on attention's output projection")
    qk_norm: bool = key(False, "gqa: RMSNorm of queries and keys, before rotation")
    qk_norm_over: str = key(
        "head",
        "qk_norm: over d_head, with one scale for all heads; or over all heads of a projection, with a scale for each",
        choices=("head", "projection"),
    )
    qk_norm_scale: str = key(DIRECT, "qk_norm: the norms' factor, as norm_scale", choices=NORM_SCALES)
    qk_norm_after_rope: bool = key(False, "qk_norm: after rotation")
    sliding_window: int = key(0, "the last tokens that a query attends to, including itself; 0: all")
    norm_eps: float = key(1e-6, "added to the mean square in norms", least=LEAST_FLOAT, below=1)
    tied: bool = key(True, "the head uses the embedding's table")
    embedding_scale: float = key(1.0, "factor on the embedding's output", least=1e-6)
    residual_scale: float = key(1.0, "factor on residual branches, of attention and of the MLP", least=1e-6)
    logit_scale: float = key(1.0, "factor on logits", least=1e-6)
    logit_cap: float = key(0.0, "soft cap on logits, after logit_scale: cap * tanh(logit / cap); 0: none")
    init_out: str = key(
        "scaled",
        "initial values of attention's output projection and of the down-projections of MLPs and experts: scaled, "
        "normal with 1 / sqrt(2 layers) of other kernels' deviation; zeros, so that each layer begins as the identity",
        choices=("scaled", "zeros"),
    )
    dropout: float = key(0.0, "probability, on embedding and residual branches", below=1)
    dtype: str = key(
        "float32", "dtype of compute; optimizer.weights_dtype is that of parameters", choices=("float32", "bfloat16")
    )
    kernel: str = key(
        AUTO,
        "kernel of softmax attention; none stores heads x seq x seq scores. xla runs everywhere, block by block; "
        "splash is for TPU (data.seq a multiple of 128; interpreted on CPU, slowly), cudnn for GPU (bfloat16), "
        "triton for GPU (interpreted on CPU); auto is splash on TPU, and cudnn or else triton on GPU, where these "
        "support the model and its rows, else xla",
        choices=(AUTO, "xla", "cudnn", "splash", "triton"),
    )
    matmul: str = key(
        "compute",
        "dtype of products of projections and MLPs and of gradients of their inputs; compute is model.dtype, int8 is "
        "fast on TPU v5e, v5p and v6e, float8 on v7x, H100 and H200; float4, with nvfp4 scales, is for B200, and has "
        "gradients in model.dtype",
        choices=MATMULS,
    )
    matmul_parts: str = key(
        " ".join(MATMUL_PARTS),
        "int8, float8: the parts of a layer with 8-bit products: attention, its projections; mlp, the MLP of dense "
        "layers and of shared experts; experts, those of mixtures",
        saved=True,
    )
    matmul_residuals: str = key(
        "compute",
        "int8, float8: form of the input that is saved for the weight's gradient: compute, in model.dtype; 8bit, the "
        "rounded input",
        choices=MATMUL_RESIDUALS,
    )
    matmul_scales: str = key(
        DELAYED,
        "int8, float8: delayed: a tensor's largest magnitude in the step before; current: that of now; row: of each "
        "token of inputs and gradients; block: of 128 entries of a token and of 128 x 128 of a weight; mxfp8: of 32 "
        "entries of each sum, as B200's products have; nvfp4: of 16, of float4; fixed: matmul_ranges. Experts have "
        "row in place of current",
        choices=MATMUL_SCALES,
    )
    matmul_ranges: str = key(
        "",
        'fixed: largest magnitudes of input, weight and gradient, as "224 1 0.01"; what exceeds them is clipped',
        saved=True,
    )
    matmul_weight_gradients: str = key(
        COMPUTE,
        "int8, float8: dtype of products for gradients of weights, but for experts': compute, in model.dtype; 8bit, of "
        "the rounded input and gradient; with row, block and mxfp8 these are rounded anew, over tokens",
        choices=MATMUL_RESIDUALS,
    )
    lora_rank: int = key(
        0, "rank of adapters beside products, which alone are trained (Hu et al. 2022); 0: none", most=2**12
    )
    lora_alpha: float = key(
        16.0, "lora: what an adapter adds is multiplied by lora_alpha / lora_rank", least=LEAST_FLOAT
    )
    lora_on: str = key(
        "attention mlp",
        'lora: modules of a layer, or patterns of their names, whose products have adapters, as "attention/[qv] mlp"',
        saved=True,
    )
    lora_dropout: float = key(0.0, "lora: probability, on the input of each adapter; not of experts' adapters", below=1)
    lora_base: str = key(
        "float32",
        "lora: dtype between steps of weights that are not trained; int8 and float8 have a float32 scale for each "
        "column of a projection's or an expert's kernel, and other weights are in bfloat16 then",
        choices=LORA_BASES,
    )

    def check(self) -> None:
        if self.depth not in (0, self.layers):
            raise ConfigError(
                f"model.depth={self.depth} is not model.layers={self.layers}: nothing follows from it here, as in "
                "configs/text_to_chat_x8.py; change model.layers"
            )
        self._check_kinds()
        self._check_matmul()
        self._check_matmul_scales()
        self._check_lora()
        self._check_rope()
        if self.attention == "mla":
            self._check_reads_no(OF_GQA, "model.attention='mla', which rotates d_rope dims and norms its latents")
        self._check_heads()
        if not self.qk_norm:
            self._check_reads_no(OF_QK_NORM, "model.qk_norm=False")
        if self.attention == "mla":
            self._check_reads_no(("qk_norm",), "model.attention='mla', which norms its latents", "attention='gqa'")
        if names_code(self.attention):
            self._check_reads_no(ATTENTION_CHOICES, f"model.attention={quoted(self.attention)}, which computes scores")
        if self.has_mixtures:
            self._check_experts()
        self._check_norms()
        self._check_mlp()

    def _check_heads(self) -> None:
        if self.attention == "mla":
            for name in ("d_latent", "d_rope"):
                check_whole(f"model.{name}", getattr(self, name), least=1)
        if self.rotated % 2 or not self.rotated:
            written = f"d_rope={self.d_rope}" if self.attention == "mla" else f"d_head={self.d_head}"
            part = f" with rope_fraction={self.rope_fraction} rotates {self.rotated} dims, and" * (
                self.rope_fraction < 1
            )
            raise ConfigError(f"model.{written}{part} must be even: RoPE rotates its dims in pairs.")
        if self.attention != "mla" and self.heads % self.kv_heads:
            raise ConfigError(
                f"model.heads={self.heads} does not divide over model.kv_heads={self.kv_heads}; "
                f"use kv_heads in {listed(divisors(self.heads))}."
            )

    def _check_kinds(self) -> None:
        codes, written, there = codes_by_name(self.kinds), settings_by_name("model.kinds", self.kinds), self.named_kinds
        if unused := [kind for kind in (*codes, *written) if kind not in there]:
            what = "a class" if unused[0] in codes else "settings"
            raise ConfigError(
                f"model.kinds={quoted(self.kinds)} has {what} for {unused[0]!r}, but "
                f"model.layers_of={quoted(self.layers_of)} has no such layer; its kinds are "
                f"{', '.join(dict.fromkeys(there))}."
            )
        for kind, settings in written.items():
            check_choice(f"model.kinds.{kind}.base", settings.get(BASE, LAYER_KINDS[0]), LAYER_KINDS)
            for name in settings:
                if name not in (BASE, *OF_A_STACK, *OF_A_KIND):
                    raise ConfigError(
                        f"model.kinds.{kind}.{name} is not a setting in which kinds of layers differ; "
                        f"{nearest(name, (BASE, *OF_A_STACK, *OF_A_KIND))}"
                    )
                if name in OF_A_STACK and (why := self._not_of_kind(kind, name, {*codes})):
                    wrong = f"model.kinds.{kind}.{name}={quoted(settings[name])} does nothing"
                    raise ConfigError(f"{wrong}: {why}; give another kind another {name}.")
            if kind in (*LAYER_KINDS, *codes) and BASE in settings:
                wrong = f"model.kinds.{kind}.base={quoted(settings[BASE])} does nothing"
                raise ConfigError(f"{wrong}: {kind!r} has blocks of its own; leave base out.")
            changed = self.of_kind(kind)
            try:
                if _shapes_of(changed) != _shapes_of(self):
                    changed._check_heads()
                changed._check_rope()
            except ConfigError as error:
                raise ConfigError(f"model.kinds.{kind}: {error}") from None

    def _not_of_kind(self, kind: str, name: str, codes: Collection[str]) -> str:
        """Why a setting that changes shapes is none of this kind; "" if it is."""
        if kind in LAYER_KINDS:
            return f"{kind!r} layers have model.{name}={getattr(self, name)} itself"
        if kind in codes:
            return f"{kind!r} has a class of yours, with settings of its own"
        base = self.base_of(kind)
        if name in SHAPES_OF_MLP.values() and name != SHAPES_OF_MLP.get(base):
            return f"{kind!r} is no variant of {'mixtures' if base == 'dense' else 'dense layers'}"
        read = {*(SHAPES_OF_MLA if self.attention == "mla" else SHAPES_OF_GQA), *SHAPES_OF_MLP.values()}
        return "" if name in read else f"model.attention={quoted(self.attention)} does not read it"

    def _check_rope(self) -> None:
        if self.rope_slow_turns >= self.rope_fast_turns:
            raise ConfigError(
                f"model.rope_slow_turns={self.rope_slow_turns} must be below "
                f"model.rope_fast_turns={self.rope_fast_turns}; yarn's are 1 and 32, llama3's 1 and 4."
            )
        scaling = f"model.rope_scaling={self.rope_scaling!r}"
        if self.rope_scaling in ("none", LONGROPE):
            self._check_reads_no(("rope_factor",), scaling, "rope_scaling='linear', 'yarn' or 'llama3'")
        if self.rope_scaling != "yarn":
            self._check_reads_no(("rope_truncate",), scaling)
        if self.rope_scaling != LONGROPE:
            self._check_reads_no(ROPE_FACTORS, scaling)
            return
        for name in ROPE_FACTORS:
            words = getattr(self, name).split()
            if len(words) != self.rotated // 2 or not all(map(_is_factor, words)):
                raise ConfigError(
                    f"model.{name}={quoted(getattr(self, name))} is not {self.rotated // 2} numbers from 1e-6 to 1e6, "
                    f"one for each pair of the {self.rotated} rotated dims of a head; write one as "
                    f"{quoted(' '.join(['1.0'] * (self.rotated // 2)))}."
                )

    def _check_reads_no(self, names: Sequence[str], reader: str, instead: str = "") -> None:
        """Raise ConfigError if a key of these differs from its default, which `reader` would not read. `instead` is
        what one may want besides the default."""
        for name in names:
            written, default = getattr(self, name), getattr(type(self), name)
            if written != default:
                use = f"{name}={default!r}, or {instead}" if instead else repr(default)
                raise ConfigError(f"model.{name}={quoted(written)} does nothing with {reader}; use {use}.")

    def _check_norms(self) -> None:
        if names_code(self.norm) and (self.norm_scale, self.norm_bias) != (DIRECT, False):
            raise ConfigError(
                f"model.norm_scale={self.norm_scale!r} and norm_bias={self.norm_bias} do nothing with model.norm="
                f"{quoted(self.norm)}, which has parameters of its own; use norm_scale={DIRECT!r} and norm_bias=False."
            )
        if self.branches == ONE_NORM and self.norm_place == BEHIND:
            raise ConfigError(
                f"model.branches={ONE_NORM!r} shares the norm before attention, but model.norm_place={BEHIND!r} has "
                f"none there; use branches={PARALLEL!r}, or norm_place={BEFORE!r} or {BOTH!r}."
            )
        if self.norms_behind and self.init_out == "zeros":
            raise ConfigError(
                f"model.init_out='zeros' with model.norm_place={self.norm_place!r}: a norm after a branch of zeros "
                f"multiplies its gradient by norm_eps ** -0.5 = {self.norm_eps**-0.5:g}; use init_out='scaled'."
            )

    def _check_mlp(self) -> None:
        of_layers, of_mlp = f"model.layers_of={quoted(self.layers_of)}", f"model.mlp={quoted(self.mlp)}"
        of_dense = "mlp_bias", *([] if self.has_mixtures and self.shared_experts else ["activation"])
        if not self.has_dense:
            instead = "some dense layers"
            self._check_reads_no(("mlp", *of_dense), f"{of_layers}, which has only mixtures", instead)
        if names_code(self.mlp):
            reader = f"{of_mlp}, which is code of your own"
            self._check_reads_no(of_dense, reader, "a setting of that code")
        if self.activation != CLAMPED:
            self._check_reads_no(("activation_limit",), f"model.activation={self.activation!r}")
        elif self.mlp == "plain":
            raise ConfigError(
                f"model.activation={CLAMPED!r} is of a gate and what it is times, but model.mlp='plain' has no gate; "
                "use mlp='gated', or another activation."
            )

    def _check_matmul(self) -> None:
        parts = words_of("model.matmul_parts", self.matmul_parts, MATMUL_PARTS)
        lacking = [part for part in parts if part not in self._parts_with_products]
        if self.matmul != "compute" and lacking and {*parts} != {*MATMUL_PARTS}:
            raise ConfigError(
                f"model.matmul_parts={quoted(self.matmul_parts)} has {' and '.join(map(repr, lacking))}, which no "
                f"layer of this model has; use a set of {', '.join(self._parts_with_products)}."
            )
        saving = {"attention", *(["mlp"] if self.has_dense else [])} & {*self.products_in_8_bits}
        if not saving:
            reader = f"model.matmul={self.matmul!r} and model.matmul_parts={quoted(self.matmul_parts)}"
            instead = "8-bit products of attention or of dense layers: what experts read is saved for the router"
            self._check_reads_no(("matmul_residuals",), reader, instead)
        if self.first_scales_are_measured and self.init_out == "zeros":
            raise ConfigError(
                f"model.init_out='zeros' gives model.matmul={self.matmul!r} no first scales: they are largest "
                "magnitudes, and those of zeros, and of the gradients behind them, are 0; use init_out='scaled', "
                "matmul_scales='current', or matmul='compute'."
            )
        widest = max(width for block in (self, *self.blocks.values()) for width in block.summed_widths)
        if self.matmul == "int8" and widest > MOST_INT8_PRODUCTS:
            raise ConfigError(
                f"model.matmul='int8' sums products of a dim of {widest} in int32, which holds {MOST_INT8_PRODUCTS} of "
                "them; use matmul='float8' or 'compute'."
            )

    def _check_matmul_scales(self) -> None:
        if self.matmul == COMPUTE:
            reader, instead = "model.matmul='compute', which rounds nothing", "matmul='int8' or 'float8'"
            self._check_reads_no(("matmul_scales", "matmul_weight_gradients"), reader, instead)
        if (self.matmul_scales == FIXED) != bool(self.matmul_ranges):
            what = "needs" if self.matmul_scales == FIXED else "reads no"
            raise ConfigError(
                f"model.matmul_scales={self.matmul_scales!r} {what} model.matmul_ranges, which is "
                f"{quoted(self.matmul_ranges)}; use matmul_scales='fixed' with matmul_ranges='224 1 0.01' (of input, "
                "weight and gradient), or other scales and matmul_ranges=''."
            )
        if self.matmul_scales == MXFP8 and self.matmul != "float8":
            raise ConfigError(
                f"model.matmul_scales='mxfp8' is of float8, not of model.matmul={self.matmul!r}; use matmul='float8', "
                "or matmul_scales='block', which has larger blocks of any 8 bits."
            )
        if (self.matmul == "float4") != (self.matmul_scales == NVFP4):
            raise ConfigError(
                f"model.matmul={self.matmul!r} with model.matmul_scales={self.matmul_scales!r}: float4 and nvfp4 "
                "scales are for each other; use matmul='float4' with matmul_scales='nvfp4', or neither."
            )
        if self.matmul == "float4":
            reader = "model.matmul='float4', whose gradients are computed in model.dtype"
            instead = "matmul='float8' with matmul_scales='mxfp8'"
            self._check_reads_no(("matmul_residuals", "matmul_weight_gradients"), reader, instead)
        words = self.matmul_ranges.split()
        if words and (
            len(words) != 3 or not all(RANGE.fullmatch(word) and 1e-30 < float(word) < 1e30 for word in words)
        ):
            raise ConfigError(
                f"model.matmul_ranges={quoted(self.matmul_ranges)} is not three numbers above 1e-30 and below 1e30: "
                "the largest magnitudes of input, weight and gradient; use one as '224 1 0.01'."
            )
        if {*self.products_in_8_bits} == {EXPERTS}:
            why = "gradients of experts' kernels are computed in model.dtype"
            reader = f"model.matmul_parts={quoted(self.matmul_parts)}: {why}"
            self._check_reads_no(("matmul_weight_gradients",), reader, "8-bit products of attention or MLPs")

    def _check_lora(self) -> None:
        if not self.lora_rank:
            names = "lora_alpha", "lora_on", "lora_dropout", "lora_base"
            self._check_reads_no(names, "model.lora_rank=0, which makes no adapters", "lora_rank=16")
        if self.lora_rank and names_code(self.dense):
            raise ConfigError(
                f"model.lora_rank={self.lora_rank} makes adapters of the package's projections, but model.dense="
                f"{quoted(self.dense)} makes others; use lora_rank=0, or dense='dense'."
            )
        if self.stored_base and self.matmul != COMPUTE:
            raise ConfigError(
                f"model.lora_base={self.lora_base!r} has kernels in 8 bits with scales of their own, which "
                f"model.matmul={self.matmul!r} would round again; use lora_base='bfloat16', or matmul='compute'."
            )

    @property
    def shapes_of_heads(self) -> tuple[int | float, ...]:
        """Settings of attention in which kinds with blocks of their own may differ."""
        return tuple(getattr(self, name) for name in SHAPES_OF_HEADS)

    @property
    def summed_widths(self) -> tuple[int, ...]:
        """Widths of what a layer's products sum."""
        of_heads = self.heads * (self.d_head + self.d_rope), self.d_latent, self.d_latent_q
        return self.d_model, self.d_ff, self.d_expert, self.sizes["d_shared"], *of_heads

    @property
    def stored_base(self) -> str:
        """The 8-bit dtype of kernels that adapters leave as they are, between steps; "" if they have none.

        >>> [ModelConfig(lora_rank=8, lora_base=base).stored_base for base in ("bfloat16", "int8")]
        ['', 'int8']
        """
        return self.lora_base if self.lora_base in ("int8", "float8") else ""

    @property
    def drops(self) -> bool:
        """Whether a step of training drops entries of some activation."""
        return self.dropout > 0 or self.lora_dropout > 0

    def matmul_of(self, part: str) -> str:
        """The form of products in this part of a layer: see parallax/model/products.py.

        >>> [ModelConfig(matmul="int8", matmul_parts="mlp").matmul_of(part) for part in ("attention", "mlp")]
        ['compute', 'int8']
        >>> ModelConfig(matmul="float8", matmul_scales="row").matmul_of("mlp")
        'float8 row compute'
        """
        return self.matmul_form if part in self.matmul_parts.split() else COMPUTE

    @property
    def matmul_form(self) -> str:
        """The form of the model's 8-bit products."""
        further = [self.matmul_scales, self.matmul_weight_gradients, self.matmul_ranges]
        return self.matmul if further == [DELAYED, COMPUTE, ""] else " ".join([self.matmul, *further]).strip()

    @property
    def first_scales_are_measured(self) -> bool:
        """Whether a run begins with a pass that finds the first scales of 8-bit products."""
        return self.matmul != COMPUTE and self.matmul_scales == DELAYED

    @property
    def products_in_8_bits(self) -> list[str]:
        """The parts of its layers with 8-bit products.

        >>> ModelConfig(matmul="int8", layers=2, layers_of="moe*2", matmul_parts="experts").products_in_8_bits
        ['experts']
        """
        return [part for part in self._parts_with_products if self.matmul_of(part) != "compute"]

    @property
    def _parts_with_products(self) -> list[str]:
        has = {"mlp": self.has_dense or self.shared_experts > 0, "experts": self.has_mixtures}
        return [part for part in MATMUL_PARTS if has.get(part, True)]

    def _check_experts(self) -> None:
        if self.shared_gate and not self.shared_experts:
            self._check_reads_no(("shared_gate",), "model.shared_experts=0")
        if self.expert_activation != CLAMPED:
            self._check_reads_no(("expert_limit",), f"model.expert_activation={self.expert_activation!r}")
        groups, size = self.router_groups, self.experts // self.router_groups
        if self.experts % groups:
            raise ConfigError(
                f"model.experts={self.experts} does not divide over model.router_groups={groups}; "
                f"use router_groups in {listed(divisors(self.experts))}."
            )
        if self.router_groups_chosen > groups:
            raise ConfigError(
                f"model.router_groups_chosen={self.router_groups_chosen} is more than model.router_groups={groups}; "
                f"use at most {groups}."
            )
        if self.experts_per_token > self.router_groups_chosen * size:
            raise ConfigError(
                f"model.experts_per_token={self.experts_per_token} is more than the {self.router_groups_chosen * size} "
                f"experts that model.router_groups_chosen={self.router_groups_chosen} of model.router_groups={groups} "
                "leave; use at most that, or more experts."
            )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of the block of each layer, in order: kinds that differ only in OF_A_KIND share their base's, and
        kinds of the same base and other shapes that of the first.

        >>> kinds = dict(kinds="near=(sliding_window=4)", layers_of="dense (near moe)*2")
        >>> ModelConfig(layers=5, **kinds).layer_kinds
        ('dense', 'dense', 'moe', 'dense', 'moe')
        """
        return _layer_kinds(self)

    def base_of(self, kind: str) -> str:
        """The kind of which this one is a variant, "dense" or "moe"; itself if it has a class of the user's.

        >>> ModelConfig(kinds="wide=(base='moe', d_expert=4)", layers_of="moe*3 wide").base_of("wide")
        'moe'
        """
        if kind in (*LAYER_KINDS, *codes_by_name(self.kinds)):
            return kind
        return settings_by_name("model.kinds", self.kinds).get(kind, {}).get(BASE, LAYER_KINDS[0])

    @property
    def layer_bases(self) -> tuple[str, ...]:
        """`base_of` each layer, in order."""
        return _layer_bases(self)

    @property
    def has_mixtures(self) -> bool:
        """Whether it has layers of experts."""
        return "moe" in self.layer_bases

    @property
    def names_layers_of_code(self) -> bool:
        """Whether layers, or parts of them, are classes of the user's, which may read any key."""
        return bool(codes_by_name(self.kinds)) or any(map(names_code, (self.mlp, self.attention, self.dense)))

    def of_block(self, kind: str) -> "ModelConfig":
        """The settings of a block of this kind: the model's, but for shapes.

        >>> ModelConfig(kinds="wide=(d_ff=4, rope=False)", layers_of="dense*3 wide").of_block("wide").d_ff
        4
        """
        return self.of_kind(kind, OF_A_STACK)

    @property
    def blocks(self) -> dict[str, "ModelConfig"]:
        """`of_block` of each kind of `layer_kinds`.

        >>> blocks = ModelConfig(kinds="narrow=(heads=4)", layers_of="dense*3 narrow").blocks
        >>> {kind: block.heads for kind, block in blocks.items()}
        {'dense': 8, 'narrow': 4}
        """
        return {kind: self.of_block(kind) for kind in sorted({*self.layer_kinds})}

    @property
    def block_of_each(self) -> list["ModelConfig"]:
        """The settings of the block of each layer."""
        blocks = self.blocks
        return [blocks[kind] for kind in self.layer_kinds]

    @property
    def dense_widths(self) -> tuple[int, ...]:
        """The width of the MLP of each dense layer."""
        of_each = zip(self.layer_bases, self.block_of_each, strict=True)
        return tuple(block.d_ff for base, block in of_each if base == LAYER_KINDS[0])

    def of_kind(self, kind: str, names: Sequence[str] = (*OF_A_STACK, *OF_A_KIND)) -> "ModelConfig":
        """The settings of layers of this kind, as far as they are of these names; ConfigError if one is out of range.

        >>> ModelConfig(kinds="near=(sliding_window=4)", layers_of="dense*3 near").of_kind("near").sliding_window
        4
        """
        changed, settings = copy.copy(self), settings_by_name("model.kinds", self.kinds).get(kind, {})
        for field in fields(self):
            if field.name in settings and field.name in names:
                name, value = f"model.kinds.{kind}.{field.name}", settings[field.name]
                value = field.metadata["key"].checked(name, value, field.type, type(self))
                object.__setattr__(changed, field.name, value)
        return changed

    @property
    def settings_of_layers(self) -> "SettingsOfLayers":
        """What differs between layers with blocks of one kind."""
        return _settings_of_layers(self)

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding window of each layer, 0 for none."""
        return tuple(settings.sliding_window for settings in self.settings_of_layers.of_each)

    @property
    def named_kinds(self) -> tuple[str, ...]:
        """The kind of each layer, in order; ConfigError if `layers_of` is invalid or its length is not `layers`.

        >>> ModelConfig(layers=5, layers_of="dense (dense moe)*2").named_kinds
        ('dense', 'dense', 'moe', 'dense', 'moe')
        """
        if not self.layers_of.strip():
            return ("dense",) * self.layers
        kinds: list[str] = []
        left_over = LAYER_GROUP.sub("", self.layers_of)
        for group, kind, times in LAYER_GROUP.findall(self.layers_of):
            run = [name for name, count in LAYER_RUN.findall(group or kind) for _ in range(int(count or 1))]
            left_over += LAYER_RUN.sub("", group)
            kinds += run * (int(times or 1) if len(run) <= self.layers else 1)
            if len(kinds) > self.layers:
                break
        named = {**codes_by_name(self.kinds), **settings_by_name("model.kinds", self.kinds)}
        known = (*LAYER_KINDS, *(name for name in named if name not in LAYER_KINDS))
        wrong = set(re.findall(r"[^\W\d]\w*", self.layers_of)) - set(known)
        if wrong or left_over.strip():
            raise ConfigError(
                f"model.layers_of={quoted(self.layers_of)} is not a sequence of kinds"
                + (f": {nearest(min(wrong), known)}" if wrong else "")
                + '; write "dense*1 moe*26" or "(dense moe*3)*6", say'
            )
        if len(kinds) != self.layers:
            more = "more than" if len(kinds) > self.layers else f"{len(kinds)} layers, not"
            raise ConfigError(
                f"model.layers_of={quoted(self.layers_of)} has {more} model.layers={self.layers}; "
                f'"moe*{self.layers}" has as many'
            )
        return tuple(kinds)

    @property
    def rotated(self) -> int:
        """Dims of a head that RoPE rotates."""
        return self.d_rope if self.attention == "mla" else int(self.d_head * self.rope_fraction)

    @property
    def score_factor(self) -> float:
        """The scale of scores over the usual one, that of queries and keys of unit variance.

        >>> ModelConfig(attention="gqa", d_head=64, attention_scale=0.0625).score_factor
        0.5
        """
        width = self.sizes["d_qk"] if self.attention == "mla" else self.d_head
        return self.attention_scale * width**0.5 if self.attention_scale else 1.0

    @property
    def has_user_code(self) -> bool:
        """Whether a part of it is code of a user's own."""
        return any(isinstance(value, UserCode) for value in vars(self).values())

    @property
    def has_dense(self) -> bool:
        """Whether it has layers that are not mixtures."""
        return any(base != "moe" for base in self.layer_bases)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of every dim of parameters and of activations' last dims; `vocab` includes its padding."""
        names = ("layers", "d_model", "d_ff", "heads", "kv_heads", "d_head", "d_latent", "d_latent_q", "d_rope")
        sizes = {name: getattr(self, name) for name in (*names, "experts", "d_expert")}
        sizes |= {
            "d_shared": self.shared_experts * self.d_expert,
            "d_qk": self.d_head + self.d_rope,
            "operands": 3,
            "gates": 1,
        }
        return {"vocab": self.padded_vocab, **sizes}

    @property
    def remat_parts(self) -> tuple[str, ...]:
        """The parts of its layers that `pipeline.remat` can name, in the order of a layer.

        >>> ModelConfig(layers=2, attention="gqa").remat_parts, "experts" in ModelConfig(layers_of="moe*4").remat_parts
        (('norm', 'q', 'kv', 'core', 'out', 'ffn', 'swiglu'), True)
        """
        has = dict.fromkeys(("router", "dispatch", "experts"), self.has_mixtures)
        has |= dict.fromkeys(("ffn", "swiglu"), self.has_dense or self.shared_experts > 0)
        has |= {"latent": self.attention == "mla", "qk": self.attention == "gqa" and self.qk_norm}
        rounded = self.saves_8_bits(ATTENTION) or (self.has_dense and self.saves_8_bits(MLP))
        has |= {"norm": self.norms_before or rounded, "down": self.norms_behind}
        has["out"] = self.norms_behind or self.branches == SEQUENTIAL
        return tuple(part for part in REMAT_PARTS if has.get(part, True))

    def saves_8_bits(self, part: str) -> bool:
        """Whether what this part of a layer reads of the stream is saved in 8 bits."""
        in_8_bits = self.matmul_residuals == EIGHT_BITS and self.matmul_of(part) != COMPUTE
        return in_8_bits and (part, self.attention) != (ATTENTION, "mla")

    @property
    def norms_before(self) -> int:
        """The number of a layer's norms before attention and the MLP."""
        return 0 if self.norm_place == BEHIND else 1 + (self.branches != ONE_NORM)

    @property
    def norms_behind(self) -> bool:
        """Whether a layer has norms after attention and the MLP."""
        return self.norm_place != BEFORE

    @property
    def padded_vocab(self) -> int:
        """Rows of the tables: `vocab`, rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    def kv(self, tp: int) -> str:
        """Layout of key-value heads on `tp` tensor-parallel ranks: each rank has all heads if there are too few."""
        return "kv_heads/tp" if self.kv_heads % tp == 0 else "kv_heads"


# A plan asks for each equation of a step whether there are mixtures, and to read the text of kinds takes milliseconds.
@functools.lru_cache(maxsize=32)
def _layer_kinds(model: ModelConfig) -> tuple[str, ...]:
    named = model.named_kinds
    if not model.kinds:
        return named
    blocks = {kind: model.base_of(kind) for kind in {*named}}
    blocks |= {kind: shapes[0] for shapes in _kinds_by_shape(model).values() for kind in shapes}
    return tuple(blocks[kind] for kind in named)


@functools.lru_cache(maxsize=32)
def _layer_bases(model: ModelConfig) -> tuple[str, ...]:
    bases = {kind: model.base_of(kind) for kind in {*model.layer_kinds}}
    return tuple(bases[kind] for kind in model.layer_kinds)


def _kinds_by_shape(model: ModelConfig) -> dict[tuple, list[str]]:
    """Names of kinds whose shapes are not the model's, by their base and shapes."""
    kinds: dict[tuple, list[str]] = {}
    for kind in settings_by_name("model.kinds", model.kinds):
        shapes = _shapes_of(model.of_kind(kind))
        if shapes != _shapes_of(model):
            kinds.setdefault((model.base_of(kind), *shapes), []).append(kind)
    return kinds


def _shapes_of(model: ModelConfig) -> tuple:
    return tuple(getattr(model, name) for name in OF_A_STACK)


def _is_factor(word: str) -> bool:
    return bool(RANGE.fullmatch(word)) and 1e-6 <= float(word) <= 1e6


class SettingsOfLayers(NamedTuple):
    """The settings with which some layer runs, and for each layer the number of its own."""

    settings: tuple[ModelConfig, ...]
    numbers: tuple[int, ...]

    @property
    def differ(self) -> bool:
        """Whether there are several."""
        return len(self.settings) > 1

    @property
    def of_each(self) -> list[ModelConfig]:
        """The settings of each layer."""
        return [self.settings[number] for number in self.numbers]


@functools.lru_cache(maxsize=32)
def _settings_of_layers(model: ModelConfig) -> SettingsOfLayers:
    kinds = {kind: model.of_kind(kind) for kind in dict.fromkeys(model.named_kinds)}
    different = list(dict.fromkeys(kinds.values()))
    return SettingsOfLayers(tuple(different), tuple(different.index(kinds[kind]) for kind in model.named_kinds))


@dataclass(frozen=True)
class LayoutConfig(Section, saved=True):
    """How arrays are sharded."""

    residual: str = key(RESIDUAL_VALUES[0], f'or "{RESIDUAL_VALUES[1]}"', saved=True)
    tensor_parallel: str = key(
        "column_row",
        "how kernels are sharded over tp, and activations sent: streams is column_row whose tokens are multiplied as "
        "they arrive (only with a residual sharded over seq)",
        choices=("column_row", "scatter", STREAMS),
    )
    embedding: str = key("vocab_parallel", "how tables are sharded over tp", choices=("vocab_parallel", "all_to_all"))
    context: str = key(
        "all_gather",
        "how queries attend to the keys of other cp ranks: keys and values are gathered; or move from rank to rank "
        "(only with kernel='xla'); or an all-to-all shards heads instead of seq",
        choices=("all_gather", "ring", "ulysses"),
    )
    order: str = key(
        "zigzag",
        "which of a row's tokens a cp rank has: an early and a late part, so that all ranks compute as much of causal "
        "attention; or one part, for models all of whose layers have windows",
        choices=("zigzag", "contiguous"),
    )
    exchange: str = key(
        AUTO,
        "moe: how tokens are sent to experts of other ep ranks: gather sends all tokens to all ranks; ragged sends "
        "each token only to ranks with its experts; auto is the one that sends less, "
        "and gather where ragged does not compile",
        choices=(AUTO, "gather", "ragged"),
    )
    exchange_hosts: int = key(
        1,
        "moe: number of hosts on which the ranks of ep are. With exchange='ragged' a token is then sent once to each "
        "host that has any of its experts, and from there to their ranks; 1: to each of these ranks",
        least=1,
    )
    expert_chunk_tokens: int = key(
        0,
        "moe: most tokens of a device that are sent to experts at once; the backward pass repeats the exchange. "
        "0: all tokens",
    )

    def check(self) -> None:
        if " ".join(self.residual.split()) not in RESIDUAL_VALUES:
            wrong = f"layout.residual={quoted(self.residual)} is not a layout of the residual stream"
            raise ConfigError(f"{wrong}; use {' or '.join(map(repr, RESIDUAL_VALUES))}.")
        if self.tensor_parallel == STREAMS and " ".join(self.residual.split()) != RESIDUAL_VALUES[1]:
            raise ConfigError(
                f"layout.tensor_parallel={STREAMS!r} sends each tp rank's tokens, which layout.residual="
                f"{self.residual!r} does not shard over tp; use residual={RESIDUAL_VALUES[1]!r}, or "
                "tensor_parallel='column_row'."
            )


@dataclass(frozen=True)
class PipelineConfig(Section, most=2**14, saved=True):
    """When stages run and what they save.

    Saved per microbatch in flight, by `remat`: "none" everything that the backward pass reads; "layer" each layer's
    input; "stage" the stage's input. Any other value is a set of parts of a layer that are recomputed, in any order:
    saved are the layer's input and, of all other parts, what the backward pass reads. parallax/config/remat.py has the
    names of the parts. Two names stand for sets and may be used in others: "elementwise" is everything except products,
    "attention" is these and attention.
    """

    schedule: str = key(
        "gpipe",
        "order in which stages run",
        choices=tuple(SCHEDULES),
        other="a CSV file",
        path=True,
        saved=True,
        code=("ranks", "microbatches"),
    )
    virtual: int = key(1, "interleaved only: stages on each pipeline rank", least=1)
    microbatches: int = key(1, "number per step; with mesh.pp=1, gradient accumulation", least=1)
    remat: str = key(
        "layer",
        "what the backward pass recomputes",
        choices=REMAT,
        other='a set of parts, as "norm swiglu ffn"',
        saved=True,
    )
    residuals_on: str = key(
        "device",
        "memory of saved activations; a set names the parts that are in host memory",
        choices=RESIDUALS_ON,
        other='a set of parts, as "input ffn"',
        saved=True,
    )

    grads_dtype: str = key(
        "float32",
        "dtype of summed gradients of layers' matrices; bfloat16 is rounded stochastically at each addition",
        choices=("float32", "bfloat16"),
    )
    grads_on: str = key("device", "memory of summed gradients of layers' matrices", choices=("device", "host"))

    def check(self) -> None:
        object.__setattr__(self, "remat", canonical_remat(self.remat))
        object.__setattr__(self, "residuals_on", canonical_residuals_on(self.residuals_on))
        check_schedule(self.schedule, self.virtual)


@dataclass(frozen=True)
class DataParallelConfig(Section, saved=True):
    """How data axes shard parameters, and so when weights and gradients are sent over them.

    | policy | weights at rest | in a step | gradients | sent |
    |---|---|---|---|---|
    | "ddp" | whole | whole | whole | gradients, summed once a step |
    | "zero1" | sharded | whole | whole | weights gathered, gradients scattered, once a step |
    | "zero2" | sharded | whole | sharded | weights once a step, gradients for each microbatch |
    | "lean" | sharded | sharded | whole | weights at each use, gradients once a step |
    | "zero3" (FSDP) | sharded | sharded | sharded | weights at each use, gradients for each microbatch |

    Optimizer states are sharded like weights at rest. `exceptions` names parts of the model, modules or parameters with
    another policy: "embedding=zero1 blocks/mlp=zero2"; the longest matching name counts.
    """

    policy: str = key("zero3", "policy of all parameters", choices=POLICY_NAMES, code=("compute", "cut"))
    exceptions: str = key("", 'other policies by name, as "embedding=zero1 blocks/mlp=zero2"', saved=True)

    def check(self) -> None:
        for word in self.exceptions.split():
            name, equals, policy = word.partition("=")
            if not (name and equals and policy):
                raise ConfigError(
                    f"data_parallel.exceptions={quoted(self.exceptions)}: {quoted(word)} is not NAME=POLICY; "
                    'write "embedding=zero1", say.'
                )

    @property
    def by_name(self) -> dict[str, str]:
        """The exceptions: policies by name."""
        return dict(word.split("=", 1) for word in self.exceptions.split())


@dataclass(frozen=True)
class FsdpConfig(Section, saved=True):
    """When weights are gathered, and in which dtypes weights and gradients are sent.

    With `prefetch` 0 a layer is gathered when it runs. With 1, in both passes, while a layer computes, the next one is
    gathered and the gradients of the previous one are scattered; two whole layers exist instead of one. The arithmetic
    is the same: the loss is bitwise equal, and gradients are, except where XLA fuses differently. With several kinds of
    layers, this holds within each run of one kind. The first layer of a run, and all layers if stages differ, are
    gathered when they run. Where B is the pass after F, it begins with the last layer's weights as F has gathered them.

    `reduce` is the dtype in which gradients are sent to the rank that stores them: "float32", by a reduce-scatter, or
    "compute", that of the model. bfloat16 takes half the bytes; ranks exchange pieces and add them in float32, so that
    each summand is rounded once, to 8 significant bits, and no sum is.

    `gather_dtype` is the dtype in which matrices of layers are gathered: "compute" is model.dtype, in which tables of
    embedding and head are always sent. Routers, norms and biases are not rounded either. With "int8" and "float8"
    (e4m3) each matrix has one scale, from its largest entry over the whole mesh. Matrices are rounded wherever they are
    used, even if no axis gathers them, so that the loss does not depend on mesh or policy; training updates the
    unrounded weights. This helps if gathers wait for slow links. Kernels of 8-bit products (`model.matmul`) are sent in
    the form that the products read, whatever it says.

    `bucket` is what one message has: "parameter", each matrix of a layer by itself; "module", all of a module, as
    attention or the MLP, that move over the same axes in the same dtype; or "layer", all of a layer. The gradients of
    what is gathered together are scattered together. The result is bitwise the same. A larger message waits for its
    last matrix, and what reads its first one waits for all of it; this helps where messages are short, so that their
    latency counts. What moves once a step is sent by parameter.
    """

    prefetch: int = key(
        0,
        "number of layers gathered ahead, and scattered afterwards, while one computes",
        most=1,
        too_large="would hold more than two layers whole; use 0 or 1.",
    )
    reduce: str = key(
        "float32", "dtype in which gradients are sent; compute is model.dtype", choices=("float32", "compute")
    )
    gather_dtype: str = key(
        "compute", "dtype in which matrices of layers, except routers, are sent", choices=("compute", "int8", "float8")
    )
    bucket: str = key(
        "parameter", "matrices of a layer that are sent in one message", choices=("parameter", "module", "layer")
    )


@dataclass(frozen=True)
class LossConfig(Section, saved=True):
    """The loss: cross-entropy, a z-loss, and losses that balance the load of experts.

    The balance loss of a layer is the mean over the rows of the batch of `experts * sum(share * score)`: `share` is an
    expert's share of the row's choices, `score` the mean of its scores, which sum to 1. The balance losses of all
    layers are added. So it does not depend on mesh and microbatches. It is not part of a metric: "loss" is the
    cross-entropy.

    With `table_first` the last chunk of tokens gives the gradient of the head's table before that of its input, behind
    which the table's exchange can hide; it ends before the layers' backward pass begins. The arithmetic is the same.
    The program has the code of a chunk twice.
    """

    name: str = key(
        "cross_entropy",
        "loss of a token",
        choices=("cross_entropy",),
        code=("logits_CV", "labels_C", "table", "z_coefficient", "entries"),
    )
    z_coefficient: float = key(0.0, "weight of logsumexp(logits)^2", says="must be 0 or more; 1e-4 is usual.")
    balance_coefficient: float = key(0.0, "moe: weight of the balance loss; 1e-2 or 1e-3 is usual")
    router_z_coefficient: float = key(0.0, "moe: weight of logsumexp(router's logits)^2, a mean over tokens")
    chunk_tokens: int = key(
        1024,
        "most tokens on a device whose logits exist at once",
        least=1,
        says="must be 1 or more; 1024 is usual.",
    )
    table_first: bool = key(False, "the head's table gradient before its input's, and sent before layers run backward")


@dataclass(frozen=True)
class OptimizerConfig(Section, saved=True):
    """The optimizer and the learning rate schedule.

    Moments and weights in fewer bits than float32 are rounded stochastically. The random bits depend on train.seed, the
    step, the parameter and the entry's index in it, so they are the same on every mesh. The update is computed in
    float32.
    """

    name: str = key(
        "adamw",
        "with muon, AdamW updates embedding, head, norms and biases",
        choices=("adamw", "muon"),
        code=("learning_rate?", "weight_decay?", "mask?", "rows?"),
    )
    learning_rate: float = key(3e-4, "peak")
    schedule: str = key(
        "cosine",
        "after warm-up; wsd stays at the peak and falls at its end, linearly; wsd_sqrt falls as 1 - the root of the "
        "share of the fall that is done",
        choices=("cosine", "linear", "wsd", "wsd_sqrt", "constant"),
    )
    warmup_steps: int = key(100, "steps in which the rate rises linearly to its peak")
    decay_fraction: float = key(
        0.2,
        "wsd, wsd_sqrt: share of the steps after the warm-up, the last ones, in which the rate falls; 0: it stays",
        most=1,
    )
    final_ratio: float = key(0.1, "last learning rate / peak; a run of one step has the peak", most=1)
    b1: float = key(0.9, "decay of AdamW's mean of gradients, also with muon", below=BELOW_ONE)
    b2: float = key(0.95, "decay of AdamW's mean of squares", below=BELOW_ONE)
    eps: float = key(1e-8, "added to the root of AdamW's mean of squares", least=LEAST_FLOAT, below=1)
    weight_decay: float = key(0.1, "decoupled; not applied to norms and biases")
    clip_norm: float = key(1.0, "largest norm of the whole gradient; 0 is off")
    muon_momentum: float = key(0.95, "muon: Nesterov momentum, the decay of the mean of gradients", below=BELOW_ONE)
    balance_rate: float = key(
        0.0, "moe: added in a step to the router's bias of an expert with too few tokens; 1e-3 is usual"
    )
    m_dtype: str = key(
        "float32",
        "dtype of first moments between steps; float8: e4m3, with a float32 scale per block",
        choices=STATE_DTYPES,
    )
    v_dtype: str = key(
        "float32", "dtype of AdamW's second moments between steps; float8 stores their roots", choices=STATE_DTYPES
    )
    weights_dtype: str = key(
        "float32", "dtype of parameters between steps; with bfloat16 there is no float32 copy", choices=WEIGHTS_DTYPES
    )
    states_on: str = key(
        "device",
        "memory of moments between steps, except of norms and biases; host: the update copies one layer's at a time",
        choices=MEMORIES,
    )
    masters_on: str = key(
        "device",
        "memory of parameters between steps; host: a step computes with a copy in model.dtype",
        choices=MEMORIES,
    )
    frozen: str = key(
        "", 'names or patterns of parameters that are not trained, as "embedding blocks/attention/*"', saved=True
    )

    def check(self) -> None:
        if self.masters_on == "host" and self.weights_dtype != "float32":
            raise ConfigError(
                f"optimizer.masters_on='host' moves float32 parameters, but with optimizer.weights_dtype="
                f"{self.weights_dtype!r} there are none; use masters_on='device', or weights_dtype='float32'."
            )


@dataclass(frozen=True)
class GuardConfig(Section, saved=True):
    """Skips updates whose loss or gradient is not finite, and spikes."""

    max_skipped_steps: int = key(3, "consecutive steps skipped for non-finite numbers; one more stops the run")
    spike_z: float = key(
        0.0,
        "also skip steps this many deviations above the running mean; 0: off, 6 is usual",
        below=1e6,
        says="must be 0 (off) or more, below 1e6; 6 is usual.",
    )
    spike_signal: str = key("loss", "signal in which spikes are detected", choices=SIGNALS)
    spike_window_steps: int = key(
        128, "steps over which statistics average; no spike is detected before this many", least=2
    )


@dataclass(frozen=True)
class DataConfig(Section, most=2**24, says=TOO_SMALL, saved=True):
    """The text, the tokenizer and the windows of tokens."""

    source: str = key("stdlib", "source of documents", choices=(*BUILT_IN, *FILES, "prepared"), code=("file?",))
    path: str = key(
        "",
        "file, folder or glob, or a list, as \"['web/*.jsonl', 'more']\"; prepared: a folder; dataset: NAME",
        path=True,
        several=True,
        elsewhere="url",
        saved=True,
    )
    field: str = key("text", "of records: the field or column that holds a document", saved=True)
    where: str = key("", 'which records are documents, as "score >= 0.5 and year > 2019"; empty: all', saved=True)
    mixture: str = key(
        "",
        "sources by name instead of one, as \"web=(path='web', weight=7) code=(path='code/*.jsonl', weight=3)\"",
        by_name=True,
        code=("file?",),
        path=True,
        saved=True,
    )
    phases: str = key(
        "",
        'what changes from a step on: weights, seq, global_batch, as "anneal=(from_step=801, web=1, code=3)"',
        by_name=True,
        saved=True,
    )
    tokenizer: str = key(
        AUTO,
        "auto: that of the run in train.init_from or of prepared data, else bytes; bpe is trained on the corpus",
        choices=(AUTO, "bytes", "bpe"),
        other="a tokenizer.json, a file of tiktoken or SentencePiece, or tiktoken:NAME",
        path=True,
        elsewhere="url",
        saved=True,
    )
    bpe_vocab: int = key(4096, "number of entries of a trained bpe tokenizer")
    special_tokens: str = key(
        "text",
        "what becomes of text that spells a special token, as a rendered chat does: it stays text, or is that token",
        choices=SPECIAL_TOKENS,
        saved=True,
    )
    format: str = key(
        TEXT,
        "what a record is: a text; chat: messages, of which answers are learned; completion: a prompt "
        "and the completion that is learned",
        choices=FORMATS,
        saved=True,
    )
    chat_template: str = key(
        AUTO,
        "chat: auto: that of the tokenizer's folder",
        choices=(AUTO, *NAMED_TEMPLATES),
        other="a Jinja file",
        path=True,
        elsewhere="url",
        saved=True,
    )
    loss_on: str = key(ANSWERS, "chat, completion: which tokens are learned", choices=LOSS_ON, saved=True)
    too_long: str = key(
        CUT,
        "chat, completion: of a record with more tokens than a window: its first ones, none, or parts that each begin "
        "with a user's turn",
        choices=TOO_LONG,
        saved=True,
    )
    cache: str = key("", "folder for prepared shards; empty: inside the run folder", path=True, saved=False)
    cache_bytes: int = key(
        LIMIT_BYTES,
        "most bytes of copies on this machine of data in a bucket or behind a URL, in ~/.cache/parallax/copies",
        least=1,
        most=2**53,
        saved=False,
    )
    seq: int = key(256, "tokens in a window", least=1)
    global_batch: int = key(32, "windows in a step, over all devices", least=1)
    eval_fraction: float = key(
        0.02, "share of documents held out", below=1, says="is not a share; use 0 (hold out nothing) to below 1"
    )
    seed: int = key(0, "seed of the order of windows", most=2**63 - 1)
    synthetic_tokens: int = key(
        1_000_000, "synthetic: bytes of text, which are tokens of the bytes tokenizer", least=2, most=2**40
    )

    def check(self) -> None:
        if self.mixture:
            self._check_mixture()
        elif self.phases:
            raise ConfigError(
                f"data.phases={quoted(self.phases)} needs data.mixture, whose sources it names; write one, also of a "
                "single source"
            )
        if self.where and self.source not in RECORDS:
            raise ConfigError(
                f"data.where={quoted(self.where)} reads fields, and data.source={self.source!r} has none; "
                f"use {names_of(RECORDS)}"
            )
        if self.where:
            where_of("data.where", self.where)
        if self.source in BUILT_IN and self.path:
            raise ConfigError(
                f"data.path={quoted(self.path)} is not read by data.source={self.source!r}; "
                f"use {', '.join(FILES)} or prepared"
            )
        if self.source not in BUILT_IN and not self.path and not names_code(self.source):
            raise ConfigError(f"data.path='' but data.source={self.source!r} needs a file, folder or glob, or a name")
        self._check_format()
        if self.source == DATASET:
            for path in self.paths:
                dataset_of("data.path", path)
        if self.source == "arrayrecord" and not self.field and self.where:
            raise ConfigError(
                f"data.where={quoted(self.where)} reads fields, and data.field='' takes each record as text; name the "
                "field that holds a document"
            )
        if self.source in RECORDS and (self.source != "arrayrecord" or self.format == CHAT) and not self.field:
            raise ConfigError(
                f"data.field='' but data.source={self.source!r} needs the name of the field that holds a document"
            )
        if self.source == "prepared" and len(self.paths) > 1:
            raise ConfigError(
                f"data.path={quoted(self.path)} has several folders, and data.source='prepared' reads one; give each "
                "an entry of data.mixture"
            )
        if self.cache and self.source == "prepared":
            raise ConfigError(f"data.cache={quoted(self.cache)} is not used by data.source='prepared'; leave it empty")
        if self.tokenizer != AUTO:
            check_tokenizer(self.tokenizer, self.bpe_vocab, f"{AUTO!r}, ")

    def _check_format(self) -> None:
        reads_records = self.mixture or self.source in RECORDS
        if self.format != TEXT and not reads_records:
            raise ConfigError(
                f"data.format={self.format!r} reads records, and data.source={self.source!r} has none; use "
                f"{' or '.join(RECORDS)}. Prepared data knows its format"
            )
        if self.format != CHAT and self.chat_template != AUTO and not self.mixture:
            raise ConfigError(
                f"data.chat_template={quoted(self.chat_template)} is not read with data.format={self.format!r}; "
                "use data.format='chat'"
            )
        if self.format == COMPLETION and self.field != DataConfig.field:
            raise ConfigError(
                f"data.field={quoted(self.field)} is not read with data.format='completion', whose fields are prompt "
                "and completion"
            )
        for name in ("loss_on", "too_long"):
            is_read = self.format != TEXT or self.mixture or self.source == "prepared"
            if getattr(self, name) != getattr(DataConfig, name) and not is_read:
                raise ConfigError(
                    f"data.{name}={getattr(self, name)!r} is not read with data.format='text'; use chat or completion"
                )
        if self.format == CHAT and self.special_tokens != DataConfig.special_tokens:
            raise ConfigError(
                f"data.special_tokens={self.special_tokens!r} is not read with data.format='chat', whose template "
                "writes special tokens"
            )

    def changes_of_format(self, source: str, form: str) -> dict[str, str]:
        """How the settings of records change where this source is read, if its records have this format."""
        form = form if source in RECORDS else TEXT
        changes = {"format": form, "chat_template": self.chat_template if form == CHAT else AUTO}
        if form == CHAT:
            changes["special_tokens"] = DataConfig.special_tokens
        if form == COMPLETION:
            changes["field"] = DataConfig.field
        if form == TEXT and source != "prepared":
            changes |= {"loss_on": DataConfig.loss_on, "too_long": DataConfig.too_long}
        return changes

    def _check_mixture(self) -> None:
        if self.path or self.where or self.source != DataConfig.source:
            written = next(name for name in ("path", "where", "source") if getattr(self, name))
            raise ConfigError(
                f"data.{written}={quoted(getattr(self, written))} is not read with data.mixture; write it in the "
                f"mixture, as NAME=({written}={getattr(self, written)!r})"
            )
        for source in self.parts:
            if source.source and not names_code(source.source):
                check_choice(f"data.mixture.{source.name}.source", source.source, (*BUILT_IN, *FILES, "prepared"))
        assert self.run_phases

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths and globs of data.path."""
        return paths_of("data.path", self.path)

    @functools.cached_property
    def parts(self) -> list[SourceConfig]:
        """The sources of the mixture; none without one."""
        return sources_of(self.mixture) if self.mixture else []

    @functools.cached_property
    def run_phases(self) -> list[Phase]:
        """The phases of a run, in order; one if nothing changes."""
        return phases_of(self.phases, self.parts, seq=self.seq, global_batch=self.global_batch)

    def phase(self, step: int) -> Phase:
        """The phase of a step, which counts from 0."""
        return [phase for phase in self.run_phases if phase.first_step <= step][-1]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes of a run's batches, (global_batch, seq), in order, each once."""
        return [*dict.fromkeys(phase.shape for phase in self.run_phases)]

    @property
    def loss_groups(self) -> int:
        """Number of sources whose losses are told apart in a step; 0 if there is only one."""
        sources = len(self.parts)
        return sources if sources > 1 else 0

    @property
    def longest_seq(self) -> int:
        """Tokens in the longest windows of a run."""
        return max(seq for _, seq in self.shapes)

    @property
    def largest(self) -> "DataConfig":
        """The settings with the shape of the phase that has most tokens in a batch, or of these the longest rows."""
        global_batch, seq = max(self.shapes, key=lambda shape: (math.prod(shape), shape[1]))
        return self if (global_batch, seq) == self.shapes[0] else self.in_shape((global_batch, seq))

    def in_shape(self, shape: tuple[int, int]) -> "DataConfig":
        """The settings of a run whose batches all have this shape, (global_batch, seq)."""
        return replace(self, phases="", mixture="", global_batch=shape[0], seq=shape[1])


def fields_of_records(kind: str, field: str) -> tuple[str, ...]:
    """The fields of records of a format that must be there; `field` is data.field, which names messages too.

    >>> fields_of_records("chat", "text"), fields_of_records("chat", "conversation")
    (('messages',), ('conversation',))
    """
    if kind == COMPLETION:
        return PROMPT_AND_COMPLETION
    return (MESSAGES if kind == CHAT and field == DataConfig.field else field,)


def check_tokenizer(tokenizer: str, bpe_vocab: int, others: str = "") -> None:
    """Raise ConfigError unless `tokenizer` is a known name or a file; `others` are more names to use."""
    is_file = tokenizer.endswith(TOKENIZER_ENDINGS) or tokenizer.startswith("tiktoken:")
    if tokenizer not in ("bytes", "bpe") and not is_file:
        raise ConfigError(
            f"data.tokenizer={quoted(tokenizer)} is unknown; use {others}'bytes', 'bpe' or the path of a "
            "tokenizer.json, of ranks.tiktoken or of a SentencePiece tokenizer.model, or 'tiktoken:cl100k_base'"
        )
    if tokenizer == "bpe" and bpe_vocab < SMALLEST_BPE_VOCAB:
        raise ConfigError(f"data.bpe_vocab={bpe_vocab} {TOO_SMALL.format(SMALLEST_BPE_VOCAB)}")


@dataclass(frozen=True)
class TrainConfig(Section, says=TOO_SMALL):
    """How long to train, and how often to log and evaluate."""

    steps: int = key(1000, "number of steps of the whole run, including those before a resume", least=1, saved=True)
    seed: int = key(0, "seed of initial values and dropout", saved=True)
    init_from: str = key(
        "",
        "run folder from which a fresh run takes the weights, and nothing else",
        path=True,
        elsewhere="bucket",
        saved=True,
    )
    continue_from: str = key(
        "",
        "step of another run, as runs/mine/checkpoints/100, from which a fresh run goes on, with its weights, "
        "optimizer and step number",
        path=True,
        elsewhere="bucket",
        saved=True,
    )
    other_data: bool = key(
        False, "continue_from: go on with other data than that run's, of the same tokenizer", saved=True
    )
    log_every_steps: int = key(10, "steps between console lines; metrics.jsonl has every step", least=1, saved=True)
    eval_every_steps: int = key(200, "0: only at the end", saved=True)
    eval_batches: int = key(
        4,
        "global batches in an evaluation; -1: the whole held-out text; 0: no evaluation",
        also=ALL_BATCHES,
        says="must be a number of batches, -1 for the whole held-out text, or 0 for no evaluation",
        saved=True,
    )
    tasks: str = key(
        "", "tasks of lm-evaluation-harness, with commas between them (extra: lm-eval); empty: none", saved=False
    )
    tasks_folder: str = key(
        "",
        "tasks: folder of descriptions in place of the harness's own; they may name code, which is run",
        path=True,
        saved=False,
    )
    tasks_every_steps: int = key(0, "tasks: steps between them; 0: only at the end", saved=False)
    tasks_limit: int = key(0, "tasks: documents of each; 0: all", saved=False)
    stall_factor: float = key(
        10.0,
        "prints all stacks if a step takes this many times the median; 0 is off",
        least=1,
        also=0,
        says="must be 1 or more, or 0 for no watchdog",
        saved=True,
    )
    slow_process_share: float = key(
        0.2,
        "a process is named as slow if it needs this share of a step's time more than the median process, in data, on "
        "the host or in saving",
        least=ABOVE_ZERO,
        saved=True,
    )
    slow_process_steps: int = key(50, "steps over whose mean a process is compared; 0: none is named", saved=True)
    check_every: int = key(
        0, "steps between checks for faulty hardware, which run a step twice and compare; 0: never", saved=True
    )
    tensorboard: bool = key(False, "also write TensorBoard events (extra: tensorboard)", saved=False)
    wandb: str = key("", "Weights & Biases project that also gets the metrics (extra: wandb); empty: none", saved=False)
    compile_cache: str = key(
        "auto",
        "folder of compiled programs; auto: on accelerators, the user's cache folder (~/.cache/parallax/jax)",
        choices=("auto", "off"),
        other="a folder, which all processes see",
        path=True,
        saved=False,
    )
    profile_steps: str = key("", "FIRST:LAST, as 20:25: steps to trace, both included; empty: none", saved=False)

    def check(self) -> None:
        self._check_source()
        self._check_tasks()
        if not self.compile_cache:
            raise ConfigError("train.compile_cache='' names no folder; use 'auto', 'off' or a folder")
        profiled = self.profiled
        if profiled and profiled[-1] > self.steps:
            raise ConfigError(
                f"train.profile_steps={quoted(self.profile_steps)} ends at step {profiled[-1]}, but "
                f"train.steps={self.steps}; use steps of the run"
            )

    def _check_source(self) -> None:
        if self.continue_from and self.init_from:
            raise ConfigError(
                f"train.init_from={quoted(self.init_from)} does nothing with train.continue_from="
                f"{quoted(self.continue_from)}, whose step has weights; leave one of them empty"
            )
        if self.continue_from and not SAVED_STEP.fullmatch(self.continue_from):
            raise ConfigError(
                f"train.continue_from={quoted(self.continue_from)} is not a step of a run; write its folder, as "
                "runs/mine/checkpoints/100"
            )
        if self.other_data and not self.continue_from:
            raise ConfigError(
                "train.other_data=True does nothing without train.continue_from; a run goes on with its own data"
            )

    def _check_tasks(self) -> None:
        of_tasks = {name: getattr(self, name) for name in ("tasks_folder", "tasks_every_steps", "tasks_limit")}
        if without := [name for name, value in of_tasks.items() if value and not self.tasks]:
            raise ConfigError(
                f"train.{without[0]}={quoted(of_tasks[without[0]])} does nothing without train.tasks; name tasks, or "
                "leave it out"
            )

    @property
    def first_run(self) -> str:
        """The run folder from which a fresh run takes its weights; "" if it begins with initial values.

        >>> TrainConfig(continue_from="runs/mine/checkpoints/100").first_run
        'runs/mine'
        """
        step = SAVED_STEP.fullmatch(self.continue_from)
        return step[1] if step else self.init_from

    @property
    def first_step(self) -> int:
        """The step of that run from which a fresh run goes on; 0 if it only takes weights."""
        step = SAVED_STEP.fullmatch(self.continue_from)
        return int(step[2]) if step else 0

    @property
    def profiled(self) -> range:
        """The steps to trace; none if `profile_steps` is empty, ConfigError if it is not a range."""
        if not self.profile_steps:
            return range(0)
        written = STEP_RANGE.fullmatch(self.profile_steps)
        steps = range(int(written[1]), int(written[2]) + 1) if written else range(0)
        if not steps:
            raise ConfigError(
                f"train.profile_steps={quoted(self.profile_steps)} is not a range of steps; write FIRST:LAST, counted "
                "from 1, as 20:25, or leave it empty"
            )
        return steps


@dataclass(frozen=True)
class CheckpointConfig(Section, says=TOO_SMALL, saved=True):
    """When to save and what to keep: the last few, the best few by eval/loss, and one of every so many steps for good.

    When a checkpoint is on disk, those before it that none of the three keys keeps are removed. With
    `keep_every_steps` = 1000 the first one at or after each of step 1000, 2000, 3000 and so on stays: usually these
    steps themselves. The key as it is now decides, so a run that goes on with another value may remove what the value
    before kept. Those that were set aside as damaged, and those of other folders, are never removed.

    `local` is a folder of each host, such as /dev/shm/parallax. Every `local_every_steps` steps each process copies its
    share of the state there, and that of a process on the host before it. A restart takes the newest step that is whole
    on all hosts, if it is newer than those of the run's folder. With `deadline_secs`, the time from SIGTERM to the end
    of a preempted host, a save that would take longer than what is left of it is preceded by such a copy.
    """

    every_steps: int = key(500, "0: only at the end")
    keep_last: int = key(2, "number of newest checkpoints to keep", least=1)
    keep_best: int = key(1, "by eval/loss; none without evaluations")
    keep_every_steps: int = key(0, "the first checkpoint of every so many steps is kept for good; 0: none")
    local: str = key("", "folder of each host for copies of the newest step; empty: none", path=True, saved=False)
    local_every_steps: int = key(0, "0: only where a save would miss deadline_secs", saved=False)
    deadline_secs: int = key(0, "from SIGTERM to the end of a preempted host, as 30; 0: no limit")

    def check(self) -> None:
        """Whether the keys of local copies belong together."""
        check_local("checkpoint.local", self.local)
        if self.local_every_steps and not self.local:
            raise ConfigError(
                f"checkpoint.local_every_steps={self.local_every_steps} needs a folder of each host; set "
                "checkpoint.local, as /dev/shm/parallax, or leave it out."
            )
        if self.local and not (self.local_every_steps or self.deadline_secs):
            raise ConfigError(
                f"checkpoint.local={self.local!r} would never be written; set checkpoint.local_every_steps, or "
                "checkpoint.deadline_secs."
            )
        if self.local_every_steps and 0 < self.every_steps <= self.local_every_steps:
            raise ConfigError(
                f"checkpoint.local_every_steps={self.local_every_steps} is not more often than checkpoint.every_steps="
                f"{self.every_steps}; use less than {self.every_steps}."
            )


@dataclass(frozen=True)
class DistributedConfig(Section, says="is too short; use a number of seconds of {} or more", saved=True):
    """How long the processes of a job wait for each other, and a process alone for its devices; in seconds."""

    start_secs: int = key(300, "for all processes to start", least=1)
    heartbeat_secs: int = key(60, "a process without a sign of life for this time is lost", least=1)
    wait_secs: int = key(900, "in a step, a batch of an evaluation, a save", least=1)
    compile_secs: int = key(7200, "in the first step and the first evaluation, which compile", least=1)
    prepare_secs: int = key(86_400, "for process 0 to prepare the data", least=1)
    clock_secs: int = key(60, "largest difference of the processes' clocks", least=1)


@dataclass(frozen=True)
class SampleConfig(Section, says=TOO_SMALL, saved=True):
    """The text that a finished run writes."""

    prompt: str = key("", "empty: no sample", saved=True)
    special_tokens: str = key("text", "as data.special_tokens, of the prompt", choices=SPECIAL_TOKENS)
    tokens: int = key(200, "number of tokens after the prompt", least=1, most=2**20)
    temperature: float = key(
        0.8,
        "0 is greedy",
        least=LEAST_TEMPERATURE,
        also=0,
        says=f"must be 0 (greedy) or {LEAST_TEMPERATURE} or more; 0.8 is usual",
    )
    top_k: int = key(0, "0 is off")
    top_p: float = key(0.95, "1 is off", least=ABOVE_ZERO, most=1, says="must be above 0 and at most 1 (off)")
    seed: int = key(0, "seed of sampling", most=2**32 - 1)  # JAX keys ignore higher bits


SECTIONS: dict[str, type[Section]] = {section.section: section for section in Section.__subclasses__()}
