"""Every key of a config, with its default, meaning and range: the one place where they are written.

`python docs/config_keys.py` writes configs/base.py and docs/configs.md from it, and --help-config prints it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from parallax.config.keys import ABOVE_ZERO, Section, key
from parallax.config.remat import REMAT, REMAT_PARTS, RESIDUALS_ON, canonical_remat, canonical_residuals_on
from parallax.runtime.errors import ConfigError, check_whole, divisors, listed, nearest, quoted
from parallax.schedules import SCHEDULES, check_schedule

# tp goes last: neighbours have the fastest links, and tp sends the most.
ALL_AXES = ("pp", "replica", "dp", "cp", "ep", "tp")
AXES = ("pp", "dp", "tp")  # those that every mesh has; of the others, those of more than one device
INFERRED = -1
RESIDUAL_VALUES = ("batch/dp seq d_model/tp", "batch/dp seq/tp d_model")
PARTS = ("embedding", "blocks", "head")  # of a model
POLICY_NAMES = ("ddp", "zero1", "zero2", "lean", "zero3")
SIGNALS = ("loss", "grad_norm")
BUILT_IN = ("stdlib", "moby", "synthetic")  # sources that need no path
FILES = ("text", "jsonl", "parquet")  # sources that read `path` through a tokenizer
AUTO = "auto"  # a value that follows from what else is asked for
SMALLEST_BPE_VOCAB = 257  # every byte, and the end of a document
BELOW_ONE = 1 - 2**-24  # what is nearer to 1 is 1 in float32, and an average over nothing but the past divides 0 by 0
LEAST_FLOAT = 1e-30  # well above float32's least: what divides by it, or by its root, stays finite
LEAST_TEMPERATURE = 1e-6  # below, float32 tells no two logits apart; 0 is exact
STATE_DTYPES = ("float32", "bfloat16", "float8")  # of an optimizer's moments
WEIGHTS_DTYPES = ("float32", "bfloat16")
MEMORIES = ("device", "host")
LAYER_KINDS = ("dense", "moe")  # by their MLP
MATMULS, MATMUL_PARTS = ("compute", "int8", "float8"), ("attention", "mlp")
MATMUL_RESIDUALS = ("compute", "8bit")
# Of model.layers_of: a group in parentheses or a kind by itself, and how often; a run within a group.
LAYER_RUN = re.compile(r"([a-z]+)(?:\*([1-9]\d{0,4}))?(?![\w*])")
LAYER_GROUP = re.compile(r"(?:\(([^()]+)\)|([a-z]+))(?:\*([1-9]\d{0,4}))?(?![\w*])")
MOST_INT8_PRODUCTS = (2**31 - 1) // 127**2
STEP_RANGE = re.compile(r"([1-9]\d{0,9}):([1-9]\d{0,9})")

TOO_SMALL = "is too small; use {} or more"
AXIS = {"least": 1, "also": INFERRED, "says": "is no number of devices; use 1 or more, or -1 for all others"}


@dataclass(frozen=True)
class MeshConfig(Section, most=2**20):
    """Devices along each axis; one of them may be -1, "all that is left"."""

    pp: int = key(1, "pipeline: the layers are cut over it", **AXIS)
    dp: int = key(INFERRED, "data: the batch is cut over it, and the parameters too (FSDP)", **AXIS)
    tp: int = key(1, "tensor: heads, d_ff and vocab are cut over it", **AXIS)
    simulate: int = key(
        0,
        "simulated CPU devices, in all processes together; 0 takes the devices that are there",
        most=2**12,
        says="is no number of devices; use 0 (none) or more",
    )
    replica: int = key(
        1, "data, over which no parameter is cut (hybrid sharding): for the network between slices of chips", **AXIS
    )
    cp: int = key(1, "context: seq is cut over it, and the parameters too; data.seq must divide over 2 * cp", **AXIS)
    ep: int = key(1, "expert: experts are cut over it; all else as over dp, the batch too", **AXIS)

    def check(self) -> None:
        inferred = [axis for axis, size in self.sizes.items() if size == INFERRED]
        if len(inferred) > 1:
            both = ", ".join(f"mesh.{axis}=-1" for axis in inferred)
            raise ConfigError(f"{both}: at most one axis can be inferred; give the others a size, such as 1")

    @property
    def sizes(self) -> dict[str, int]:
        """What was written for each axis that the mesh has, in mesh order."""
        return {axis: getattr(self, axis) for axis in ALL_AXES if axis in AXES or getattr(self, axis) != 1}


@dataclass(frozen=True)
class ModelConfig(Section, most=2**24):
    """The model as one device sees it: a decoder-only transformer."""

    vocab: int = key(0, "entries; 0 takes the tokenizer's, rounded up to a multiple of 128")
    vocab_multiple: int = key(1, "tables get rows up to such a multiple, as 128: zeros that have no logits", least=1)
    layers: int = key(4, "blocks of attention and MLP", least=1, most=2**14)
    d_model: int = key(256, "width of the residual stream", least=1)
    d_ff: int = key(704, "width of the gated MLP", least=1)
    layers_of: str = key(
        "",
        'kinds of layers, "dense" or "moe", in order: "moe*32", "dense*1 moe*26", "(dense moe*3)*6"; empty: all dense',
    )
    experts: int = key(8, "moe: experts of a layer", least=1, most=2**12)
    experts_per_token: int = key(2, "moe: how many of them a token goes to", least=1)
    d_expert: int = key(704, "moe: width of an expert's gated MLP", least=1)
    shared_experts: int = key(0, "moe: further experts that every token goes to; one MLP of so many widths")
    router_score: str = key("softmax", "moe: of an expert, over all or each by itself", choices=("softmax", "sigmoid"))
    router_normalized: bool = key(True, "moe: the weights of a token's experts sum to 1")
    router_scale: float = key(1.0, "moe: times these weights", least=1e-6)
    router_groups: int = key(1, "moe: groups of experts, of which a token chooses some first", least=1)
    router_groups_chosen: int = key(1, "moe: how many; a group counts as its best expert, or two best", least=1)
    attention: str = key("mla", "kv_heads = heads is MHA, kv_heads = 1 is MQA", choices=("mla", "gqa"))
    heads: int = key(8, "query heads", least=1)
    kv_heads: int = key(8, "gqa only", least=1)
    d_head: int = key(32, "per head; in mla the part of q and k without position, and v", least=1)
    d_latent: int = key(64, "mla: width of the compressed keys and values")
    d_latent_q: int = key(0, "mla: width of the compressed queries; 0 projects queries directly")
    d_rope: int = key(16, "mla: width of the decoupled, rotated part of q and k")
    rope_theta: float = key(10_000.0, "base of the wavelengths of rotary positions", least=1 + 1e-6)
    rope_scaling: str = key("none", "for longer texts than were trained", choices=("none", "linear", "yarn", "llama3"))
    rope_factor: float = key(1.0, "context extension that the scaling serves; 1 or more", least=1)
    rope_original_seq: int = key(2048, "tokens; yarn, llama3: the context that was trained before", least=1)
    rope_fast_turns: float = key(
        32.0, "yarn, llama3 (its own: 4): pairs that turn more often there are kept", least=1e-6
    )
    rope_slow_turns: float = key(
        1.0, "yarn, llama3: pairs that turn less often there are stretched by rope_factor", least=1e-6
    )
    rope_temperature: float = key(0.0, "times attention's logits; 0: yarn's (0.1 ln rope_factor + 1)^2, others' 1")
    rope_magnitude: float = key(1.0, "times the rotated parts of queries and of keys", least=1e-6)
    qkv_bias: bool = key(False, "biases on the projections to heads: of q, k and v; in mla of q alone")
    qk_norm: bool = key(False, "gqa: an RMSNorm over d_head of each query and key head, before it is rotated")
    sliding_window: int = key(0, "tokens that a query sees, itself too; data.seq must not be longer. 0: all")
    norm_eps: float = key(1e-6, "added to the mean square in RMSNorm", least=LEAST_FLOAT, below=1)
    tied: bool = key(True, "the head is the embedding's transpose")
    dropout: float = key(0.0, "probability, on embedding and residual branches", below=1)
    dtype: str = key(
        "float32", "of compute; optimizer.weights_dtype is that of parameters", choices=("float32", "bfloat16")
    )
    kernel: str = key(
        "xla",
        "softmax core of attention, none of which holds heads x seq x seq scores. xla runs everywhere, block by block; "
        "splash is for TPU (data.seq a multiple of 128; interpreted on CPU, slowly), cudnn for GPU (bfloat16)",
        choices=("xla", "cudnn", "splash"),
    )
    matmul: str = key(
        "compute",
        "products of projections and MLPs, and gradients of their inputs; compute is model.dtype, int8 is fast on TPU "
        "v5e, v5p and v6e, float8 on v7x, H100 and H200",
        choices=MATMULS,
    )
    matmul_parts: str = key(
        " ".join(MATMUL_PARTS),
        "int8, float8: of which parts of a layer: attention, its projections; mlp, that of dense layers and of shared "
        "experts",
    )
    matmul_residuals: str = key(
        "compute",
        "int8, float8: what is saved of an input for the weight's gradient: compute, it in model.dtype; 8bit, what it "
        "was rounded to",
        choices=MATMUL_RESIDUALS,
    )

    def check(self) -> None:
        self._check_matmul()
        if self.rope_slow_turns >= self.rope_fast_turns:
            raise ConfigError(
                f"model.rope_slow_turns={self.rope_slow_turns} must be below "
                f"model.rope_fast_turns={self.rope_fast_turns}; yarn's are 1 and 32, llama3's 1 and 4."
            )
        if self.rope_scaling == "none" and self.rope_factor != 1:
            raise ConfigError(
                f"model.rope_factor={self.rope_factor} does nothing with model.rope_scaling='none'; "
                "use rope_factor=1, or rope_scaling='linear', 'yarn' or 'llama3'."
            )
        rotated = "d_rope" if self.attention == "mla" else "d_head"
        if self.attention == "mla":
            for name in ("d_latent", "d_rope"):
                check_whole(f"model.{name}", getattr(self, name), least=1)
        if getattr(self, rotated) % 2:
            raise ConfigError(f"model.{rotated}={getattr(self, rotated)} must be even: RoPE rotates its dims in pairs.")
        if self.attention == "mla" and self.qk_norm:
            raise ConfigError(
                "model.qk_norm=True does nothing with model.attention='mla', which norms its latents; "
                "use qk_norm=False, or attention='gqa'."
            )
        if self.attention == "gqa" and self.heads % self.kv_heads:
            raise ConfigError(
                f"model.heads={self.heads} does not divide over model.kv_heads={self.kv_heads}; "
                f"use kv_heads in {listed(divisors(self.heads))}."
            )
        if "moe" in self.kinds:
            self._check_experts()

    def _check_matmul(self) -> None:
        for word in self.matmul_parts.split():
            if word not in MATMUL_PARTS:
                why = ": products of experts are made in model.dtype" if word == "experts" else ""
                raise ConfigError(
                    f"model.matmul_parts={quoted(self.matmul_parts)}: {quoted(word)} is no part{why}; "
                    f"use a set of {', '.join(MATMUL_PARTS)}."
                )
        if not self.matmul_parts.split():
            raise ConfigError("model.matmul_parts='' names no part; use model.matmul='compute', or 'attention mlp'.")
        if self.matmul == "compute" != self.matmul_residuals:
            raise ConfigError(
                f"model.matmul_residuals={self.matmul_residuals!r} does nothing with model.matmul='compute', which "
                "rounds no input; use matmul_residuals='compute', or matmul='int8' or 'float8'."
            )
        widest = max(self.d_ff, self.d_model, self.heads * (self.d_head + self.d_rope))
        if self.matmul == "int8" and widest > MOST_INT8_PRODUCTS:
            raise ConfigError(
                f"model.matmul='int8' sums products of a dim of {widest} in int32, which holds {MOST_INT8_PRODUCTS} of "
                "them; use matmul='float8' or 'compute'."
            )

    def matmul_of(self, part: str) -> str:
        """How this part of a layer makes its products.

        >>> [ModelConfig(matmul="int8", matmul_parts="mlp").matmul_of(part) for part in ("attention", "mlp")]
        ['compute', 'int8']
        """
        return self.matmul if part in self.matmul_parts.split() else "compute"

    def _check_experts(self) -> None:
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
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer, in order; ConfigError where `layers_of` is none, or has not as many as `layers`.

        >>> ModelConfig(layers=5, layers_of="dense (dense moe)*2").kinds
        ('dense', 'dense', 'moe', 'dense', 'moe')
        """
        if not self.layers_of.strip():
            return ("dense",) * self.layers
        found: list[str] = []
        left_over = LAYER_GROUP.sub("", self.layers_of)
        for group, kind, times in LAYER_GROUP.findall(self.layers_of):
            run = [name for name, count in LAYER_RUN.findall(group or kind) for _ in range(int(count or 1))]
            left_over += LAYER_RUN.sub("", group)
            found += run * (int(times or 1) if len(run) <= self.layers else 1)
            if len(found) > self.layers:
                break
        wrong = set(re.findall(r"[^\W\d]\w*", self.layers_of)) - set(LAYER_KINDS)
        if wrong or left_over.strip():
            raise ConfigError(
                f"model.layers_of={quoted(self.layers_of)} is no sequence of kinds"
                + (f": {nearest(min(wrong), LAYER_KINDS)}" if wrong else "")
                + '; write "dense*1 moe*26" or "(dense moe*3)*6", say'
            )
        if len(found) != self.layers:
            more = "more than" if len(found) > self.layers else f"{len(found)} layers, not"
            raise ConfigError(
                f"model.layers_of={quoted(self.layers_of)} has {more} model.layers={self.layers}; "
                f'"moe*{self.layers}" has as many'
            )
        return tuple(found)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of every dim that a parameter or an activation's last dims may have; of `vocab` with its padding."""
        names = ("layers", "d_model", "d_ff", "heads", "kv_heads", "d_head", "d_latent", "d_latent_q", "d_rope")
        sizes = {name: getattr(self, name) for name in (*names, "experts", "d_expert")}
        sizes |= {"d_shared": self.shared_experts * self.d_expert, "d_qk": self.d_head + self.d_rope, "operands": 3}
        return {"vocab": self.padded_vocab, **sizes}

    @property
    def remat_parts(self) -> tuple[str, ...]:
        """The parts that its layers have, of those that `pipeline.remat` names, in the order of a layer.

        >>> ModelConfig(layers=2, attention="gqa").remat_parts, "experts" in ModelConfig(layers_of="moe*4").remat_parts
        (('norm', 'q', 'kv', 'core', 'out', 'ffn', 'swiglu'), True)
        """
        kinds = self.kinds
        has = dict.fromkeys(("router", "dispatch", "experts"), "moe" in kinds)
        has |= dict.fromkeys(("ffn", "swiglu"), "dense" in kinds or self.shared_experts > 0)
        has |= {"latent": self.attention == "mla", "qk": self.attention == "gqa" and self.qk_norm}
        return tuple(part for part in REMAT_PARTS if has.get(part, True))

    @property
    def padded_vocab(self) -> int:
        """Rows of the tables: `vocab`, and rows of padding up to a multiple of `vocab_multiple`."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    def kv(self, tp: int) -> str:
        """How so many tensor-parallel ranks cut key-value heads: each has all of them where they are too few."""
        return "kv_heads/tp" if self.kv_heads % tp == 0 else "kv_heads"


@dataclass(frozen=True)
class LayoutConfig(Section):
    """Strings that say where arrays are cut."""

    residual: str = key(RESIDUAL_VALUES[0], f'or "{RESIDUAL_VALUES[1]}"')
    tensor_parallel: str = key("column_row", "how kernels are cut over tp", choices=("column_row", "scatter"))
    embedding: str = key("vocab_parallel", "how tables are cut over tp", choices=("vocab_parallel", "all_to_all"))
    context: str = key(
        "all_gather",
        "how queries meet the keys of other cp ranks: keys and values are gathered; or go from rank to rank "
        "(kernel='xla' alone); or heads change places with seq",
        choices=("all_gather", "ring", "ulysses"),
    )
    exchange: str = key(
        AUTO,
        "moe: how tokens come to experts of other ep ranks: gather, all of them go to all; ragged, each where an "
        "expert of its own is; auto, what sends less, on CPUs gather",
        choices=(AUTO, "gather", "ragged"),
    )
    expert_chunk_tokens: int = key(
        0,
        "moe: at most so many of a device's tokens are on their way to experts at once, and the backward pass sends "
        "them again; 0: all",
    )

    def check(self) -> None:
        if " ".join(self.residual.split()) not in RESIDUAL_VALUES:
            unknown = next((axis for axis in re.findall(r"[/+]([^\s/+]*)", self.residual) if axis not in AXES), None)
            wrong = " is no layout of the residual stream; use"
            if unknown is not None:
                wrong = f": unknown axis {quoted(unknown)}; {nearest(unknown, AXES)}. Use"
            raise ConfigError(
                f"layout.residual={quoted(self.residual)}{wrong} {' or '.join(map(repr, RESIDUAL_VALUES))}."
            )


@dataclass(frozen=True)
class PipelineConfig(Section, most=2**14):
    """When stages run and what they keep.

    Saved per microbatch in flight, by `remat`: "none" all that the backward pass reads; "layer" each layer's input;
    "stage" the stage's input. All else is a set of parts of a layer, in any order: the layer's input is saved, and of
    the parts that are not in the set what the backward pass reads; parallax/config/remat.py has their names. Two sets
    have a word, which may stand in others: "elementwise" is all but products, "attention" these and attention.
    """

    schedule: str = key("gpipe", "when which stage runs", choices=tuple(SCHEDULES), other="a CSV file", path=True)
    virtual: int = key(1, "interleaved only: stages on each pipeline rank", least=1)
    microbatches: int = key(1, "per step; with mesh.pp=1 they are gradient accumulation", least=1)
    remat: str = key(
        "layer", "what the backward pass computes again", choices=REMAT, other='a set of parts, as "norm swiglu ffn"'
    )
    residuals_on: str = key(
        "device",
        "where what a pass saves waits for a later one; a set is of the parts that wait in host memory",
        choices=RESIDUALS_ON,
        other='a set of parts, as "input ffn"',
    )

    def check(self) -> None:
        object.__setattr__(self, "remat", canonical_remat(self.remat))
        object.__setattr__(self, "residuals_on", canonical_residuals_on(self.residuals_on))
        check_schedule(self.schedule, self.virtual)


@dataclass(frozen=True)
class DataParallelConfig(Section):
    """Where the data axes cut parameters, and so when weights and gradients travel over them.

    | policy | weights at rest | in a step | gradients | travels |
    |---|---|---|---|---|
    | "ddp" | whole | whole | whole | gradients, summed once a step |
    | "zero1" | cut | whole | whole | weights gathered, gradients scattered, once a step |
    | "zero2" | cut | whole | cut | weights once a step, gradients for each microbatch |
    | "lean" | cut | cut | whole | weights at each use, gradients once a step |
    | "zero3" (FSDP) | cut | cut | cut | weights at each use, gradients for each microbatch |

    Optimizer states lie as weights at rest do. `exceptions` names parts of the model, modules or parameters that have
    another policy: "embedding=zero1 blocks/mlp=zero2"; the longest name that matches counts.
    """

    policy: str = key("zero3", "of all parameters", choices=POLICY_NAMES, other="one of your own")
    exceptions: str = key("", 'other policies by name, as "embedding=zero1 blocks/mlp=zero2"')

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
        """The exceptions, policies by name."""
        return dict(word.split("=", 1) for word in self.exceptions.split())


@dataclass(frozen=True)
class FsdpConfig(Section):
    """When weights are gathered, and how gradients travel.

    With `prefetch` 0 a layer is gathered when it runs. With 1, while a layer computes, the next one is gathered and the
    gradients of the one before are scattered, in the forward pass and in the backward pass; two layers exist whole, not
    one. The arithmetic is the same: a loss has the same bits, gradients too but for what XLA fuses. Of several kinds of
    layers, each run of one kind is gathered so; the first of a run, and all where stages differ, when they run.

    `reduce` is the dtype in which gradients travel to the rank that stores them: "float32", by a reduce-scatter, or
    "compute", that of the model. bfloat16 is half the bytes; ranks exchange pieces and add them in float32, so that
    each summand is rounded once, to 8 bits, and no sum is.

    `gather_dtype` is what matrices of layers are rounded to where they are gathered: "compute" is model.dtype, in
    which tables of embedding and head always travel. In "int8" and "float8" (e4m3) each is over one scale, its largest
    entry's over the whole mesh. They are rounded wherever they are used, also where no axis gathers them, so that the
    loss depends on no mesh and no policy; what is trained are the weights before rounding. It pays where gathers wait
    for slow links. Kernels of 8-bit products (`model.matmul`) travel as these read them, whatever it says.
    """

    prefetch: int = key(
        0,
        "layers gathered ahead, and gradients scattered behind, while one computes",
        most=1,
        too_large="would hold more than two layers whole; use 0 or 1.",
    )
    reduce: str = key(
        "float32", "dtype of gradients that travel; compute is model.dtype", choices=("float32", "compute")
    )
    gather_dtype: str = key("compute", "dtype of weights that travel", choices=("compute", "int8", "float8"))


@dataclass(frozen=True)
class LossConfig(Section):
    """What is minimised: cross-entropy, a z-loss, and what keeps the load of experts even.

    The balance loss of a layer is, for each row of the batch, `experts * sum(share * score)` over experts: the share of
    the row's choices that an expert got times the mean of its scores, which sum to 1; its mean over the rows is added,
    for each layer. So it depends on no mesh and no microbatch. No metric has it: "loss" is the cross-entropy.
    """

    z_coefficient: float = key(0.0, "weight of logsumexp(logits)^2", says="must be 0 or more; 1e-4 is usual.")
    balance_coefficient: float = key(0.0, "moe: weight of the balance loss; 1e-2 or 1e-3 is usual")
    router_z_coefficient: float = key(0.0, "moe: weight of logsumexp(router's logits)^2, a mean over tokens")
    chunk_tokens: int = key(
        1024,
        "logits of at most so many tokens exist at once on a device",
        least=1,
        says="must be 1 or more; 1024 is usual.",
    )


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """How gradients become updates, and the learning rate over the steps.

    Moments and weights in fewer bits than float32 are rounded stochastically. The random bits follow from train.seed,
    the step, the parameter and the entry's place in it: they are the same on every mesh. The update is computed in
    float32.
    """

    name: str = key("adamw", "with muon, AdamW does embedding, head, norms and biases", choices=("adamw", "muon"))
    learning_rate: float = key(3e-4, "peak")
    schedule: str = key("cosine", "after warm-up", choices=("cosine", "linear", "wsd", "constant"))
    warmup_steps: int = key(100, "in which the rate rises to its peak, linearly")
    decay_fraction: float = key(0.2, "wsd: last share of train.steps in which the rate falls", most=1)
    final_ratio: float = key(0.1, "last learning rate / peak", most=1)
    b1: float = key(0.9, "AdamW's decay of the gradient's mean, also for what muon leaves to it", below=BELOW_ONE)
    b2: float = key(0.95, "AdamW's decay of the square's mean", below=BELOW_ONE)
    eps: float = key(1e-8, "AdamW's, added to the root of that mean", least=LEAST_FLOAT, below=1)
    weight_decay: float = key(0.1, "decoupled; norms and biases are left out")
    clip_norm: float = key(1.0, "of the whole gradient; 0 is off")
    muon_momentum: float = key(0.95, "muon: decay of the gradient's mean; Nesterov's, as Muon has it", below=BELOW_ONE)
    balance_rate: float = key(
        0.0, "moe: what a step adds to the router's bias of an expert with too few tokens; 1e-3 is usual"
    )
    m_dtype: str = key(
        "float32", "of first moments between steps; float8: e4m3, each block over a float32 scale", choices=STATE_DTYPES
    )
    v_dtype: str = key("float32", "of second moments, AdamW's; float8 has their roots", choices=STATE_DTYPES)
    weights_dtype: str = key(
        "float32", "of parameters between steps; with bfloat16 there is no float32 copy of them", choices=WEIGHTS_DTYPES
    )
    states_on: str = key(
        "device",
        "where moments are between steps, but those of norms and biases; host: the update moves a layer's at a time",
        choices=MEMORIES,
    )
    masters_on: str = key(
        "device", "the same of parameters; host: a step computes with a copy of them in model.dtype", choices=MEMORIES
    )

    def check(self) -> None:
        if self.masters_on == "host" and self.weights_dtype != "float32":
            raise ConfigError(
                f"optimizer.masters_on='host' moves float32 parameters, but with optimizer.weights_dtype="
                f"{self.weights_dtype!r} there are none; use masters_on='device', or weights_dtype='float32'."
            )


@dataclass(frozen=True)
class GuardConfig(Section):
    """A step whose loss or gradient is not finite changes nothing."""

    max_skipped_steps: int = key(3, "in a row, for numbers that are not finite; one more stops the run")
    spike_z: float = key(
        0.0,
        "also skip what lies so many deviations above its running mean; 0: off, 6 is usual",
        below=1e6,
        says="must be 0 (off) or more, below 1e6; 6 is usual.",
    )
    spike_signal: str = key("loss", "what is judged", choices=SIGNALS)
    spike_window_steps: int = key(
        128, "the statistics' memory; no spike is seen before they have so many steps", least=2
    )


@dataclass(frozen=True)
class DataConfig(Section, most=2**24, says=TOO_SMALL):
    """Which text, as which tokens, in which windows."""

    source: str = key("stdlib", "where documents come from", choices=(*BUILT_IN, *FILES, "prepared"))
    path: str = key("", "file, folder or glob of text, jsonl, parquet; folder of prepared", path=True)
    field: str = key("text", "jsonl, parquet: the field or column that holds a document")
    tokenizer: str = key(
        AUTO,
        "auto is that of the run in train.init_from, or of prepared data, or bytes; bpe is trained on the corpus",
        choices=(AUTO, "bytes", "bpe"),
        other="a tokenizer.json",
        path=True,
    )
    bpe_vocab: int = key(4096, "entries of a bpe that is trained")
    cache: str = key("", "folder for prepared shards; empty: inside the run folder", path=True)
    seq: int = key(256, "tokens in a window", least=1)
    global_batch: int = key(32, "windows in a step, over all devices", least=1)
    eval_fraction: float = key(
        0.02, "share of documents held out", below=1, says="is not a share; use 0 (hold out nothing) to below 1"
    )
    seed: int = key(0, "of the order of windows", most=2**63 - 1)
    synthetic_tokens: int = key(
        1_000_000, "synthetic: bytes of text, tokens of the bytes tokenizer", least=2, most=2**40
    )

    def check(self) -> None:
        if self.source in BUILT_IN and self.path:
            raise ConfigError(
                f"data.path={quoted(self.path)} is not read by data.source={self.source!r}; "
                f"use {', '.join(FILES)} or prepared"
            )
        if self.source not in BUILT_IN and not self.path:
            raise ConfigError(f"data.path='' but data.source={self.source!r} needs a file, folder or glob")
        if self.source in ("jsonl", "parquet") and not self.field:
            raise ConfigError(
                f"data.field='' but data.source={self.source!r} needs the name of the field that holds a document"
            )
        if self.cache and self.source == "prepared":
            raise ConfigError(
                f"data.cache={quoted(self.cache)} is not used by data.source='prepared', which is ready; leave it empty"
            )
        if self.tokenizer != AUTO:
            check_tokenizer(self.tokenizer, self.bpe_vocab, f"{AUTO!r}, ")


def check_tokenizer(tokenizer: str, bpe_vocab: int, others: str = "") -> None:
    """Raise ConfigError unless `tokenizer` is a known name or a tokenizer.json; `others` are more names to use."""
    if tokenizer not in ("bytes", "bpe") and not tokenizer.endswith(".json"):
        raise ConfigError(
            f"data.tokenizer={quoted(tokenizer)} is unknown; use {others}'bytes', 'bpe' or the path of a tokenizer.json"
        )
    if tokenizer == "bpe" and bpe_vocab < SMALLEST_BPE_VOCAB:
        raise ConfigError(f"data.bpe_vocab={bpe_vocab} {TOO_SMALL.format(SMALLEST_BPE_VOCAB)}")


@dataclass(frozen=True)
class TrainConfig(Section, says=TOO_SMALL):
    """How long to train, and how often to log and evaluate."""

    steps: int = key(1000, "of the whole run, those before a resume too", least=1)
    seed: int = key(0, "of initial values and dropout")
    init_from: str = key("", "a run folder whose weights, and nothing else of it, a fresh run starts from", path=True)
    log_every_steps: int = key(10, "console lines; metrics.jsonl has every step", least=1)
    eval_every_steps: int = key(200, "0: only at the end")
    eval_batches: int = key(4, "global batches in an evaluation; 0 turns evaluation off")
    stall_factor: float = key(
        10.0,
        "a step that takes so many medians has all stacks printed; 0 is off",
        least=1,
        also=0,
        says="must be 1 or more, or 0 for no watchdog",
    )
    check_every: int = key(0, "steps; one is taken twice and compared, to find faulty hardware; 0: never")
    tensorboard: bool = key(False, "also write TensorBoard events (extra: tensorboard)")
    wandb: str = key("", "project of Weights & Biases that also gets the numbers (extra: wandb); empty: none")
    compile_cache: str = key(
        "auto",
        "where compiled programs are kept; auto: on accelerators, in the user's cache folder (~/.cache/parallax/jax)",
        choices=("auto", "off"),
        other="a folder, which all processes see",
        path=True,
    )
    profile_steps: str = key("", "FIRST:LAST, as 20:25: these steps are traced, both ends too; empty: none")

    def check(self) -> None:
        if not self.compile_cache:
            raise ConfigError("train.compile_cache='' names no folder; use 'auto', 'off' or a folder")
        profiled = self.profiled
        if profiled and profiled[-1] > self.steps:
            raise ConfigError(
                f"train.profile_steps={quoted(self.profile_steps)} ends at step {profiled[-1]}, but "
                f"train.steps={self.steps}; use steps of the run"
            )

    @property
    def profiled(self) -> range:
        """The steps that are traced; none where `profile_steps` is empty, ConfigError where it is no range."""
        if not self.profile_steps:
            return range(0)
        found = STEP_RANGE.fullmatch(self.profile_steps)
        if not found:
            raise ConfigError(
                f"train.profile_steps={quoted(self.profile_steps)} is no range of steps; write FIRST:LAST, counted "
                "from 1, as 20:25, or leave it empty"
            )
        first, last = map(int, found.groups())
        if last < first:
            raise ConfigError(
                f"train.profile_steps={quoted(self.profile_steps)} ends at {last}, before it begins at {first}; write "
                f"the smaller one first, as {last}:{first}"
            )
        return range(first, last + 1)


@dataclass(frozen=True)
class CheckpointConfig(Section, says=TOO_SMALL):
    """When to save and what to keep: the last few, and the best few by eval/loss."""

    every_steps: int = key(500, "0: only at the end")
    keep_last: int = key(2, "newest checkpoints that stay", least=1)
    keep_best: int = key(1, "by eval/loss")


@dataclass(frozen=True)
class DistributedConfig(Section, says="is too short; use a number of seconds of {} or more"):
    """How long the processes of a job wait for each other; in seconds."""

    start_secs: int = key(300, "for all to be there", least=1)
    heartbeat_secs: int = key(60, "a process that gives no sign of life for so long is lost", least=1)
    wait_secs: int = key(900, "in a step, an evaluation, a save", least=1)
    compile_secs: int = key(7200, "in what is compiled first: the first step, the first evaluation", least=1)
    prepare_secs: int = key(86_400, "for process 0 to prepare the data", least=1)
    clock_secs: int = key(60, "clocks may differ by so much", least=1)


@dataclass(frozen=True)
class SampleConfig(Section, says=TOO_SMALL):
    """The text that a finished run writes."""

    prompt: str = key("", "empty: no sample")
    tokens: int = key(200, "behind the prompt", least=1, most=2**20)
    temperature: float = key(
        0.8,
        "0 is greedy",
        least=LEAST_TEMPERATURE,
        also=0,
        says=f"must be 0 (greedy) or {LEAST_TEMPERATURE} or more; 0.8 is usual",
    )
    top_k: int = key(0, "0 is off")
    top_p: float = key(0.95, "1 is off", least=ABOVE_ZERO, most=1, says="must be above 0 and at most 1 (off)")
    seed: int = key(0, "of the draw", most=2**32 - 1)  # JAX keys forget the bits above


SECTIONS: dict[str, type[Section]] = {section.section: section for section in Section.__subclasses__()}
