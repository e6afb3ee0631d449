"""What published programs do otherwise than this project's, by their recipes: a step's work and messages *as theirs*.

Nothing here is fitted to a time but HOST_SECS. A program other than this one keeps what its backward pass needs where
it was written, without slots; sums gradients by reduce-scatters, and takes maxima, by which it rounds, on each rank.
Each of its experts multiplies its rows in a product of its own, and rows are moved as `Mixture` says.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# Exchanges of a mixture's tokens: each chosen expert gets a copy of the token by NCCL's all-to-all, or each rank and
# each host gets one, with the kernels of DeepEP or HybridEP.
ALL_TO_ALL, ONCE = "all-to-all", "once"
# Where layers go from the rank at which they rest to the one that computes them, and back: theirs rest there.
LAYERS_ON_RANKS = "sharding/layers_on_ranks"
LARGEST_MAXIMA = 16  # bytes
RECOMPUTE = "recompute"  # a direction
AXES = ("pp", "replica", "dp", "cp", "ep", "tp")
WIDE_BYTES = 2  # of a number in bfloat16


class Theirs(NamedTuple):
    """What a published program does otherwise, by its recipe, not by its time."""

    hides: str = ""  # axes over which it sends beside its work
    recomputes: bool = False  # what is between products; attention is recomputed as here
    exchange: str = ""  # of a mixture's tokens; with "" its experts are priced as here
    sums: str = "bfloat16"  # the dtype of gradients that are summed over ranks; with "" they are sent as here
    waits_for_sums: bool = False  # whether it waits for reduce-scatters that SparseCores could hide
    # Whether a token's experts are next to each other, in place of any; of either all have as many.
    in_turn: bool = False
    slots: bool = False  # whether it copies activations to and from slots, as scans of XLA do
    host_secs: float = 0.0  # in which its host launches what a layer of experts needs, forward and backward
    blocks: tuple[int, ...] = ()  # tokens of the blocks that attention computes in windows, forward and backward


# By the program, the first word of a row's title, for rows on GPUs that are not below:
# - JAX programs recompute what their policy says, and have scans.
# - llm.q recomputes what --recompute-... of the row's command says; most rows have none.
# - AutoModel's benchmarks choose experts by FakeBalancedGate (components/moe/layers.py), which gives them out in turn.
# - Megatron-LM's example recomputes whole layers, and hides nothing.
# - torchtitan's and KempnerForge's FSDP sums in float32 (MixedPrecisionPolicy: mixed_precision_reduce,
#   default_mp_policy), AutoModel's too; llm-foundry has mixed_precision: PURE.
XLA, FSDP = Theirs(recomputes=True, slots=True), Theirs(recomputes=True, sums="float32")
PROGRAMS = {
    "MaxText": XLA,
    "Paxml": XLA,
    "axlearn": XLA,
    "llm.q": Theirs(),
    "Megatron-LM": Theirs(recomputes=True),
    "llm-foundry": Theirs(recomputes=True),
    "torchtitan": FSDP,
    "KempnerForge": FSDP._replace(exchange=ALL_TO_ALL),
    "AutoModel": FSDP._replace(exchange=ONCE, in_turn=True),
}
# The recipes of NVIDIA's programs, each at the version that its page names:
# - 24.07: NeMo-Framework-Launcher, launcher_scripts/conf/training; 25.01 and 25.02: dgxc-benchmarking, the model's yaml
#   and configure.sh; of the H200: gpu-recipes, src/frameworks/a3ultra/nemo-configs. There `ub_tp_comm_overlap` is tp,
#   `overlap_p2p_comm` pp, and `overlap_grad_sync` and `overlap_param_sync` are dp.
# - later: NeMo, nemo/collections/llm/recipes, and Megatron-Bridge at v0.4.2, scripts/performance/configs: tp is
#   `tp_comm_overlap`; pp hides with virtual stages, and dp if it is more than 1, in MegatronCommOverlapCallback and
#   comm_overlap.py.
# - cp hides, since keys go from rank to rank beside attention: TransformerEngine's `cp_comm_type` is "p2p" by default.
# - `activations_checkpoint_granularity` and `recompute_modules` are empty, or "selective", which is attention; those of
#   gpt-oss are layernorm and moe_act. `moe_token_dispatcher_type` is "alltoall", but "flex" with HybridEP for
#   Qwen3-30B. The exchange of tokens hides nowhere.
DATA, ALL, WITH_CP = Theirs("dp"), Theirs("tp pp dp"), Theirs("tp pp dp cp")
TOKENS = DATA._replace(exchange=ALL_TO_ALL)
# Without CUDA graphs of whole steps Megatron-Bridge launches each operation of a mixture from the host, and waits for
# the numbers of rows. Derived from one row: Qwen3-30B-A3B on 16 H100 takes 9.5 ms for each layer of a microbatch of one
# window, for which a plan has 6 ms of the GPU's work.
HOST_SECS = 9.5e-3
THEIRS = {
    "NeMo, Llama-3.1-8B on 8 H100": Theirs("dp cp"),
    "NeMo, Llama-3.1-8B on 8 H100 in FP8": Theirs("dp cp"),
    "NeMo, Llama-3.1-70B on 64 H100": WITH_CP,
    "NeMo, Llama-3.1-70B on 64 H100 in FP8": ALL,
    "NeMo, Nemotron-4-15B on 16 H100": ALL,
    "NeMo, Nemotron-4-15B on 16 H100 in FP8": ALL,
    "Megatron-Bridge, Llama-3-8B on 8 H100 in FP8": DATA,
    "Megatron-Bridge, Llama-3-8B on 8 B200 in FP8": DATA,
    "Megatron-Bridge, Llama-3-8B on 8 B200 in MXFP8": DATA,
    "Megatron-Bridge, Llama-3-70B on 64 H100 in FP8": ALL,
    "Megatron-Bridge, Llama-3.1-405B on 1024 H100 in FP8": WITH_CP,
    "NeMo, Llama-3.1-405B on 512 H100": WITH_CP,
    "NeMo, Nemotron-4-340B on 128 H100": ALL,
    "NeMo, Nemotron-4-340B on 128 H100 in FP8": ALL,
    "NeMo, GPT-3-175B on 128 H100": ALL,
    "NeMo, GPT-3-175B on 128 H100 in FP8": ALL,
    "Megatron-Bridge, Llama-3.1-405B on 128 B200 in FP8": WITH_CP,
    "Megatron-Bridge, Llama-3.1-405B on 128 B200 in MXFP8": WITH_CP,
    "NeMo, GPT-3-20B on 64 H100 in FP8": ALL,
    "NeMo, Llama-2-7B on 8 H100 in FP8": DATA,
    "NeMo, Llama-2-13B on 16 H100 in FP8": Theirs("pp dp"),
    "NeMo, Llama-2-70B on 64 H100 in FP8": ALL,
    "NeMo, Nemotron-3-8B on 64 H100 in FP8": ALL,
    "NeMo, Nemotron-3-22B on 64 H100 in FP8": ALL,
    "NeMo, 8 layers of Llama-3.1-405B on 32 H100": WITH_CP,
    "NeMo, 8 layers of Llama-3.1-405B on 32 H100 in FP8": WITH_CP,
    "NeMo, 8 layers of Grok-1 on 64 H100": WITH_CP._replace(exchange=ALL_TO_ALL),
    "NeMo, 8 layers of Grok-1 on 64 H100 in FP8": WITH_CP._replace(exchange=ALL_TO_ALL),
    "NeMo, Grok-1 on 512 H100": WITH_CP._replace(exchange=ALL_TO_ALL),
    "NeMo, fine-tuning of Llama-3-8B on 8 H100": DATA,
    "NeMo, LoRA of Llama-3-8B on 8 H100": DATA,
    "NeMo, fine-tuning of Llama-3-70B on 32 H100": ALL,
    "NeMo, LoRA of Llama-3-70B on 8 H100": Theirs("pp"),
    "Megatron-Bridge, Qwen3-30B-A3B on 16 H100 in FP8": DATA._replace(exchange=ONCE, host_secs=HOST_SECS),
    "Megatron-Bridge, gpt-oss-120b on 64 H100": TOKENS._replace(recomputes=True, host_secs=HOST_SECS),
    "Megatron-Bridge, gpt-oss-120b on 64 B200": TOKENS._replace(recomputes=True, host_secs=HOST_SECS),
    "Megatron-Bridge, Qwen3-30B-A3B on 8 B200 in MXFP8": DATA._replace(exchange=ONCE, host_secs=HOST_SECS),
    "Megatron-Bridge, Qwen3-235B-A22B on 256 B200 in MXFP8": TOKENS._replace(host_secs=HOST_SECS),
    "NeMo, Nemotron-4-15B on 64 B200 in FP8": DATA,
    "NeMo, Nemotron-4-340B on 128 B200 in FP8": ALL,
    "NeMo, Llama-3-70B on 64 B200 in FP8": WITH_CP,
    "NeMo, Mixtral-8x7B on 64 B200 in FP8": TOKENS,
    "NeMo, Llama-3.1-70B on 256 H200 in FP8": Theirs("pp dp"),
    "NeMo, Mixtral-8x7B on 256 H200": TOKENS,
    "Megatron-Bridge, Llama-3-70B on 64 H100 in FP8, 128 rows": ALL,
    "Megatron-Bridge, Llama-3.1-405B on 1024 H100 in FP8, 512 rows": WITH_CP,
    "Megatron-Bridge, fine-tuning of Llama-3-70B on 32 H100 in FP8": ALL,
    "Megatron-Bridge, LoRA of Llama-3-70B on 8 H100 in FP8": Theirs("tp pp"),
    "Megatron-Bridge, Qwen3-30B-A3B on 8 B200 in MXFP8, one row at once": DATA._replace(
        exchange=ONCE, host_secs=HOST_SECS
    ),
}
# On v6e the SparseCores send no reduce-scatters: MaxText's flags of each recipe (benchmarks/xla_flags_library.py and
# maxtext_trillium_model_configs.py) fuse gathers into compute, and at most all-reduces are the SparseCores';
# axlearn/common/compiler_options.py has the same for FSDP over a whole slice.
ON_V6E = XLA._replace(sums="", waits_for_sums=True)
# MaxText's splash kernel has blocks of these sizes in windows, too: sa_block_q and sa_block_kv, and those of dkv.
THEIRS |= {f"MaxText, gpt-oss-120b on {chips} v7x": XLA._replace(sums="", blocks=(1024, 2048)) for chips in (64, 256)}
# Commands of llm.q that recompute: --recompute-ffn or -swiglu, and -norm.
THEIRS |= {
    title: Theirs(recomputes=True)
    for title in (
        "llm.q, Qwen2.5-7B on one H100 in FP8",
        "llm.q, Qwen2.5-7B on 8 H100 in FP8",
        "llm.q, Qwen2.5-14B on 8 H100",
        "llm.q, Qwen2.5-14B on 8 H100 in FP8",
    )
}


def theirs_of(title: str, *, on_gpus: bool) -> Theirs | None:
    """What the program of this row does otherwise; None for this project's, and for those of most TPUs."""
    of_chip = ON_V6E if re.search(r"\bv6e\b", title) else None
    return THEIRS.get(title) or (PROGRAMS.get(title.split(",")[0]) if on_gpus else of_chip)


def as_theirs(traced: Any, theirs: Theirs, settings: Any, topology: Any) -> Any:
    """The traced work of this project's program with what theirs does otherwise."""
    from parallax.analysis.planned.step_time import GROUPED_PRODUCTS, IN_BLOCKS, OF_ROWS, OF_SLOTS
    from parallax.config.sections import ATTENTION

    left_out = [OF_SLOTS] * (not theirs.slots)
    products = [
        op for op in traced.products if theirs.recomputes or op.direction != RECOMPUTE or op.kernel == ATTENTION
    ]
    products = in_blocks(products, settings.data.seq, *theirs.blocks) if theirs.blocks else products
    products += between_products(settings, theirs)
    sent = [call for call in traced.sent if not _is_of_maxima(call) and call.module != LAYERS_ON_RANKS]
    if theirs.exchange and settings.model.has_mixtures:
        left_out += [GROUPED_PRODUCTS, IN_BLOCKS, OF_ROWS]
        mixture = Mixture(settings, topology, theirs)
        products += mixture.products()
        sent = [call for call in sent if not _is_of_exchange(call)] + [*mixture.sent()]
    return traced._replace(products=[op for op in products if op.kernel not in left_out], sent=sent)


def in_blocks(products: Sequence[Any], seq: int, forward: int, backward: int) -> list[Any]:
    """The same work with attention in windows by blocks of so many tokens, each of which sees itself and the one before
    it, of those that layers without a window compute in blocks up to the diagonal."""
    from parallax.config.sections import ATTENTION

    most = {op.direction: op.flops for op in sorted(products, key=lambda op: op.flops) if op.kernel == ATTENTION}
    whole: Counter = Counter()
    for op in products:
        if op.kernel == ATTENTION and 2 * op.flops > most[op.direction]:
            whole[op.direction] += op.flops  # the backward pass has two kernels
    made = []
    for op in products:
        if op.kernel == ATTENTION and 2 * op.flops <= most[op.direction]:
            blocks = seq // (backward if op.direction == "backward" else forward)
            op = op._replace(flops=round(whole[op.direction] * (2 * blocks - 1) / (blocks * (blocks + 1) / 2)))
        made.append(op)
    return made


def between_products(settings: Any, theirs: Theirs) -> Iterator[Any]:
    """Passes between the products of an MLP, each a kernel of its own where no compiler fuses it with others: forward
    it reads what gate and up write, and backward these and the gradient. In 8 bits roundings are these passes."""
    from parallax.analysis.planned.step_time import OpCost

    model, sizes = settings.model, dict.fromkeys(AXES, 1) | settings.mesh.sizes
    if theirs.slots or model.matmul != "compute":
        return
    ranks = math.prod(sizes[axis] for axis in ("replica", "dp", "ep", "cp", "tp"))
    entries = settings.data.global_batch * settings.data.seq * model.d_ff / ranks / settings.pipeline.microbatches
    runs = model.layer_bases.count("dense") / sizes["pp"] * settings.pipeline.microbatches
    read = 1 if model.mlp == "plain" else 2  # for each entry that is written
    for direction in ("forward", *[RECOMPUTE] * theirs.recomputes, "backward"):
        arrays = read + 1 if direction != "backward" else 2 * read + 1
        yield OpCost(0, round(WIDE_BYTES * arrays * entries), direction, runs)


def _is_of_maxima(call: Any) -> bool:
    """Whether a message has the largest magnitudes of a product, two numbers."""
    return call.kind == "all-reduce" and call.bytes <= LARGEST_MAXIMA


def _is_of_exchange(call: Any) -> bool:
    """Whether a message brings a mixture's tokens to its experts, or back."""
    return call.module.split("/")[0] == "mlp" and "ep" in call.axes and set(call.axes) <= {"ep", "tp"}


class Mixture:
    """The experts of one GPU in a step: their products, passes over their rows, and the exchange of tokens.

    Choices are even, as in published steps: they force a balanced load. Rows are copied to be sorted by expert, and
    back; with ALL_TO_ALL and several experts on a rank once more, to bring together what came from different ranks.
    What is between the products of gate and up and that of down is one pass. In 8 bits each factor of a product is
    rounded to two copies, of which one is transposed, by a pass that reads it once.
    """

    def __init__(self, settings: Any, topology: Any, theirs: Theirs):
        self.model, self.sizes, self.theirs = settings.model, dict.fromkeys(AXES, 1) | settings.mesh.sizes, theirs
        sizes, windows = self.sizes, settings.data.global_batch
        self.runs = self.model.layer_bases.count("moe") / sizes["pp"] * settings.pipeline.microbatches
        ranks = sizes["replica"] * sizes["dp"] * sizes["ep"] * sizes["cp"] * sizes["tp"]
        self.tokens = windows * settings.data.seq / settings.pipeline.microbatches / ranks
        self.rows = self.tokens * self.model.experts_per_token * sizes["tp"]
        self.again = settings.pipeline.remat == "layer" and theirs.recomputes
        # Ranks of an exchange that are on one host: those of tp come first.
        self.local = max(1, min(sizes["ep"], topology.shape[-1] // sizes["tp"]))

    @property
    def host_secs(self) -> float:
        """Seconds in which the host launches the layers of experts."""
        return self.runs * self.theirs.host_secs

    @property
    def passes(self) -> list[str]:
        """Directions of the passes of a layer."""
        return ["forward", *[RECOMPUTE] * self.again, "backward"]

    def products(self) -> Iterator[Any]:
        """Products of each expert, and passes over rows."""
        from parallax.analysis.planned.step_time import OpCost

        d_model, width, matmul = self.model.d_model, self.model.d_expert // self.sizes["tp"], self.model.matmul
        experts = self.model.experts // self.sizes["ep"]
        each = self.rows / experts
        narrow = matmul != "compute"
        for direction in self.passes:
            for inputs, outputs in ((d_model, 2 * width), (width, d_model)):
                moved = (each * (inputs + outputs) + inputs * outputs) * WIDE_BYTES
                count = self.runs * experts * (2 if direction == "backward" else 1)  # of the input, and of the kernel
                yield OpCost(2 * each * inputs * outputs, moved, direction, count, matmul)
                factor = outputs if direction == "backward" else inputs
                rounded = (WIDE_BYTES + 2) * self.rows * factor * narrow
                between = WIDE_BYTES * self.rows * width * (5 if direction == "backward" else 3) * (inputs == width)
                for moved in filter(None, (rounded, between)):
                    yield OpCost(0, moved, direction, self.runs)
            yield OpCost(0, self._bytes_of_moves(), direction, self.runs)

    def _bytes_of_moves(self) -> float:
        """Bytes that copies of rows move in a pass of a layer: there, and back to where tokens are added up."""
        row, ep = WIDE_BYTES * self.model.d_model, self.sizes["ep"]
        if self.theirs.exchange == ONCE:
            return 2 * row * (self.rows + self.tokens * self.ranks_of_token())
        together = 4 if ep > 1 and self.model.experts > ep else 0
        return row * (self.rows * (2 + together) + self.rows + self.tokens)

    def ranks_of_token(self, groups: int | None = None) -> float:
        """Of so many groups of ranks, all ranks of the exchange without it, those that have an expert of a token."""
        groups, count, chosen = groups or self.sizes["ep"], self.model.experts, self.model.experts_per_token
        if self.theirs.in_turn:
            return max(1, chosen * groups / count)
        none = math.comb(count - count // groups, chosen) / math.comb(count, chosen)
        return groups * (1 - none)

    def sent(self) -> Iterator[Any]:
        """Messages of the exchange, there and back in each pass."""
        from parallax.analysis.traced.collectives import Sent

        ep, row = self.sizes["ep"], WIDE_BYTES * self.model.d_model
        hosts = ep // self.local
        to_others = (ep - 1) / ep
        if self.theirs.exchange == ALL_TO_ALL:
            copies = self.model.experts_per_token * to_others
        elif hosts == 1:
            copies = self.ranks_of_token() * to_others
        else:  # one to each other host, as many as all-to-alls of so many bytes send there
            copies = self.ranks_of_token(hosts) * (hosts - 1) / hosts * (ep - 1) / (ep - self.local)
        for direction in self.passes * (ep > 1):
            yield Sent("all-to-all", ("ep",), self.tokens * copies * row, 2 * self.runs, direction, "mlp", "")
            if (tp := self.sizes["tp"]) > 1:  # experts are cut over tp, whose ranks gather the tokens of all
                whole = self.tokens * self.model.experts_per_token * (tp - 1) * row
                for kind in ("all-gather", "reduce-scatter"):
                    yield Sent(kind, ("tp",), whole, self.runs, direction, "mlp", "")
