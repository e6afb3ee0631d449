"""What a training step sends, from sizes alone: formulas on paper, for every family, layout and schedule.

Bytes are those of a device in a step, keyed by (axes, kind, direction). A gather to `whole` bytes over n devices, or a
reduce-scatter of them, sends (n-1)/n of them; an all-reduce twice that; an all-to-all (n-1)/n of a device's own piece.
"""

import dataclasses
import math
from collections import Counter
from functools import cached_property
from types import SimpleNamespace
from typing import NamedTuple

from parallax.schedules import dualpipe_v, zero_bubble_v

TRANSPOSE = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather", "all-to-all": "all-to-all"}
FLOAT32 = 4
PER_USE = ("lean", "zero3")  # policies whose weights are gathered at each use


class Kernel(NamedTuple):
    """Entries of a layer's kernel on an expert rank, whether they are cut over tp, how many layers of a rank of the
    pipeline have it, and the axes that cut it at rest."""

    entries: int
    over_tp: bool
    layers: int
    fsdp: str


@dataclasses.dataclass
class Step:
    """A step of `model` (its config), in which all that forward computes is kept."""

    mesh: tuple[int, int, int]
    model: SimpleNamespace
    family: str
    residual: str  # "hidden" | "seq": which dim of the residual stream tp cuts
    embedding: str
    schedule: str
    virtual: int
    policy: str  # of data_parallel, for the layers
    chunk_tokens: int
    rows: int
    seq: int
    microbatches: int
    reduce: str = "float32"  # fsdp.reduce
    tables: str = ""  # another policy for embedding and head
    replica: int = 1
    cp: int = 1
    ep: int = 1
    context: str = "all_gather"
    order: str = "zigzag"
    exchange: str = "gather"
    exchange_hosts: int = 1
    expert_chunk_tokens: int = 0
    balances: bool = False  # whether there is a balance loss

    def __post_init__(self):
        self.pp, self.dp, self.tp = self.mesh
        self.sent = Counter()
        self.tables = self.tables or self.policy
        # Axes that cut parameters at rest.
        self.fsdp = " ".join(["dp", *(axis for axis in ("cp", "ep") if getattr(self, axis) > 1)])
        self.data = f"replica {self.fsdp}" if self.replica > 1 else self.fsdp
        # Layers of a rank; all ranks have as many of a kind.
        self.moe, self.dense = (self.model.layer_kinds.count(kind) // self.pp for kind in ("moe", "dense"))

    # ---- sizes

    @property
    def bytes(self) -> int:
        return {"float32": 4, "bfloat16": 2}[self.model.dtype]

    @property
    def tokens(self) -> int:
        """Of a microbatch, on a data, context and expert rank."""
        return self.rows * self.seq // (self.replica * self.dp * self.cp * self.ep * self.microbatches)

    @property
    def shared_tokens(self) -> int:
        """Of the whole batch, on a rank of those and of the pipeline, whose ranks share the head by rows."""
        return self.rows * self.seq // (self.replica * self.dp * self.cp * self.ep * self.pp)

    @property
    def heads_between(self) -> bool:
        """A pipeline under GPipe embeds all before its ticks and has the head between; others do both in the ticks."""
        return self.schedule == "gpipe" and self.pp > 1

    @property
    def whole_kv(self) -> bool:
        return self.model.kv_heads % self.tp != 0

    @property
    def layer_passes(self) -> int:
        return self.microbatches * self.model.layers // self.pp

    @property
    def mlp_passes(self) -> int:
        """Of gated MLPs that all tokens go to: those of dense layers, and the shared ones of mixtures."""
        return self.microbatches * (self.dense + (self.moe if self.model.shared_experts else 0))

    @cached_property
    def kernels(self) -> list[Kernel]:
        """Those of attention, of dense layers' MLPs, and of mixtures' experts and of those that all tokens go to."""
        m, column = self.model, self.family == "column_row"
        cut, rest = True, (self.dense + self.moe, self.fsdp)
        kernels = [Kernel(m.d_model * m.d_ff, cut, self.dense, self.fsdp)] * 3
        kernels += [Kernel(m.d_model * m.d_expert * m.shared_experts, cut, self.moe, self.fsdp)] * 3
        beside_ep = " ".join(axis for axis in self.fsdp.split() if axis != "ep")
        kernels += [Kernel(m.d_model * m.d_expert * m.experts // self.ep, cut, self.moe, beside_ep)] * 3
        heads = m.heads * m.d_head
        if m.attention == "gqa":
            kv = Kernel(m.d_model * m.kv_heads * m.d_head, not (column and self.whole_kv), *rest)
            return [*kernels, Kernel(m.d_model * heads, cut, *rest), kv, kv, Kernel(heads * m.d_model, cut, *rest)]
        queries = [(m.d_model, m.heads * (m.d_head + m.d_rope))]
        if m.d_latent_q:
            queries = [(m.d_model, m.d_latent_q), (m.d_latent_q, m.heads * (m.d_head + m.d_rope))]
        others = [(m.d_model, m.d_latent), (m.d_latent, heads), (m.d_latent, heads), (heads, m.d_model)]
        kernels += [Kernel(rows * columns, cut, *rest) for rows, columns in queries + others]
        return [*kernels, Kernel(m.d_model * m.d_rope, not column, *rest)]

    @cached_property
    def scales(self) -> list[Kernel]:
        """Of a layer's norms, and a mixture's router and its bias, which no data axis cuts and which stay float32."""
        m, mla = self.model, self.model.attention == "mla"
        latents, layers = [m.d_latent, m.d_latent_q] if mla else [], self.dense + self.moe
        scales = [Kernel(m.d_model, self.residual == "hidden", layers, "")] * 2
        scales += [Kernel(width, True, layers, "") for width in latents if width]
        return scales + [Kernel((m.d_model + 1) * m.experts, False, self.moe, "")]

    @property
    def table(self) -> int:
        """Entries of the embedding's table, or of the head's, on a tensor rank; cut over dp further."""
        return self.model.vocab * self.model.d_model // (self.tp if self.embedding == "vocab_parallel" else 1)

    @property
    def tables_at_once(self) -> bool:
        """Whether pp and dp cut the same dim of a table, the larger one, and it is gathered over both once a step."""
        return self.tables in ("zero1", "zero2") and self.model.vocab >= self.model.d_model and self.pp > 1

    @property
    def tables_in_turn(self) -> bool:
        """Whether a step gathers a table once over dp, which cuts its rows, and then over pp, which cuts d_model."""
        return self.tables in ("zero1", "zero2") and self.pp > 1 and not self.tables_at_once

    @property
    def sums_at_once(self) -> bool:
        """Whether its gradient is scattered over both once a step, too; with "zero2" over dp at each use."""
        return self.tables_at_once and self.tables == "zero1"

    def cut(self, entries: int, over_tp: bool) -> int:
        return entries // self.tp if over_tp else entries

    # ---- one collective

    def add(self, axes: str, kind: str, direction: str, whole: int, times: int = 1, among: int = 0) -> None:
        """Of all devices along the axes, or `among` groups of so many of them."""
        devices = among or math.prod(getattr(self, axis) for axis in axes.split())
        share = -(-whole * (devices - 1) // devices)
        self.sent[tuple(axes.split()), kind, direction] += times * (2 * share if kind == "all-reduce" else share)

    def there_and_back(self, axis: str, kind: str, whole: int, times: int, back: str = "") -> None:
        """Forward, and backward its transpose, or what takes its place."""
        self.add(axis, kind, "forward", whole, times)
        self.add(axis, back or TRANSPOSE[kind], "backward", whole, times)

    # ---- tensor parallelism

    def norm(self, tokens: int, times: int) -> None:
        """A norm over a cut dim adds up one number a token, in float32, in both directions."""
        for direction in ("forward", "backward"):
            self.add("tp", "all-reduce", direction, tokens * FLOAT32, times)

    def layers(self) -> None:
        if self.residual == "hidden":
            self.norm(self.tokens, 2 * self.layer_passes)
        {"column_row": self.column_row, "scatter": self.scatter}[self.family]()

    def column_row(self) -> None:
        """Attention and MLP each gather the residual and scatter it back; mla gathers its latents, too."""
        m, row, times = self.model, self.tokens * self.bytes, self.layer_passes
        self.there_and_back("tp", "all-gather", row * m.d_model, times + self.mlp_passes)
        self.there_and_back("tp", "reduce-scatter", row * m.d_model, times + self.mlp_passes)
        for width in [m.d_latent, m.d_latent_q] if m.attention == "mla" else []:
            if width:
                self.there_and_back("tp", "all-gather", row * width, times)
                self.norm(self.tokens, times)

    def scatter(self) -> None:
        """Every projection scatters what it makes; what all ranks need whole is all-reduced, and so is its gradient."""
        m, row, times = self.model, self.tokens * self.bytes, self.layer_passes
        if self.residual == "seq":
            self.there_and_back("tp", "all-to-all", row * m.d_model // self.tp, times + self.mlp_passes)
        for width, mlps in ((m.d_ff, self.dense), (m.shared_experts * m.d_expert, self.moe if m.shared_experts else 0)):
            for each in (width, width, m.d_model):
                self.there_and_back("tp", "reduce-scatter", row * each, self.microbatches * mlps)
        wide, whole = [m.d_model], []
        if m.attention == "gqa":
            wide.append(m.heads * m.d_head)
            (whole if self.whole_kv else wide).extend([m.kv_heads * m.d_head] * 2)
        else:
            wide += [m.heads * (m.d_head + m.d_rope), m.d_latent, m.d_latent_q]
            whole.append(m.d_rope)
            self.norm(self.tokens, times * (2 if m.d_latent_q else 1))
            for window, layers in Counter(m.windows).items():
                expanded = self.expanded_tokens(window) * self.bytes * m.heads * m.d_head
                self.there_and_back("tp", "reduce-scatter", expanded, 2 * self.microbatches * layers // self.pp)
        for width in wide:
            self.there_and_back("tp", "reduce-scatter", row * width, times)
        for width in whole:
            for direction in ("forward", "backward"):
                self.add("tp", "all-reduce", direction, row * width, times)

    # ---- mixtures

    def mixtures(self) -> None:
        """The residual is gathered over tp before the router, and a token's results are scattered over it. A balance
        loss sums the load of each row over cp. With T tokens of a microbatch on each of n expert ranks and K experts a
        token, where rows of d_model have r bytes and a token's weights and ids 4 K each:

        gather  (n-1) T (r + 8 K) of tokens and (n-1) T r / tp of results forward; backward the same, without the ids
        ragged, with experts on one host
                (n-1)/n K T 2 r of tokens and results, and (n-1) 4 (R + E) of weights and counts forward, R being K T
                and up to 8 for each expert; backward the same of tokens and results, and (n-1) 4 of each row of
                the room, 5/4 K T, or all that may come if less. Rooms are filled up to eights; 4/5 of them are sent.
        ragged, on h hosts
                (h-1) q T 2 r of tokens and results and (h-1) 8 K T of weights and ids, where q is the share of tokens
                that have any of their experts on a host; backward half of the latter. And what n/h ranks of one host
                send, as above, of the tokens that come, with R for all that may.
        """
        m, n, times = self.model, self.ep, self.microbatches * self.moe
        places, row = m.experts_per_token * FLOAT32, m.d_model * self.bytes
        self.there_and_back("tp", "all-gather", self.tokens * row, times)
        if self.balances:
            rows = self.tokens * self.cp // self.seq
            self.add("cp", "all-reduce", "forward", rows * m.experts * FLOAT32, times)
        # The backward pass of chunks sends tokens again, and no results.
        chunks, again = self.chunks, ["recompute"] if self.chunks > 1 else []
        times, tokens = times * chunks, self.tokens // chunks
        if self.exchange == "ragged" and n > 1:
            self.there_and_back("tp", "reduce-scatter", tokens * row, times)
            there, back, choice = ["forward", *again], ["forward", "backward"], m.experts_per_token * tokens
            h, n, of_host, come = self.exchange_hosts, n // self.exchange_hosts, m.experts, tokens
            if h > 1:
                of_host, come = m.experts // h, h * tokens
                elsewhere, ways = (math.comb(some, m.experts_per_token) for some in (m.experts - of_host, m.experts))
                q = round(1 - elsewhere / ways, 4)
                for direction in [*there, *back, "backward"]:
                    self.add("ep", "all-to-all", direction, round(q * come * row), times, among=h)
                for direction in [*there, *there, "backward"]:
                    kind = "reduce-scatter" if direction == "backward" else "all-gather"
                    self.add("ep", kind, direction, come * places, times, among=h)
            rows = sent = -(-(m.experts_per_token * come + 7 * of_host) // 8) * 8
            if h > 1:
                sent = min(rows, 8 * (-(-int(1.25 * choice) // 8) + of_host))
            usual = -(-5 * choice // 4) if choice < 256 else -(-5 * choice // 1024) * 256
            here = m.experts // self.ep
            room = min(-(-usual // 8) * 8, n * (come * min(m.experts_per_token, here) // 8 + here) * 8)
            for direction in [*there, *back, "backward"]:
                self.add("ep", "all-to-all", direction, min(sent * row, round(4 * room * row / 5)), times, among=n)
            for direction in there:
                self.add("ep", "all-gather", direction, n * of_host * FLOAT32, times, among=n)
                self.add("ep", "all-gather", direction, n * rows * FLOAT32, times, among=n)
            self.add("ep", "all-gather", "backward", n * room * FLOAT32, times, among=n)
            return
        for width in (row, places, places):
            for direction in ("forward", *again):
                self.add("ep", "all-gather", direction, n * tokens * width, times)
        for width in (row, places):
            self.add("ep", "reduce-scatter", "backward", n * tokens * width, times)
        self.there_and_back("tp", "reduce-scatter", n * tokens * row, times)
        self.there_and_back("ep", "reduce-scatter", n * tokens * row // self.tp, times)

    @property
    def chunks(self) -> int:
        most = self.expert_chunk_tokens
        return -(-self.tokens // most) if most else 1

    # ---- context parallelism

    @property
    def gathers_latent(self) -> bool:
        """Context ranks gather MLA's latent and rotated key, not the keys and values that are expanded from them."""
        return self.model.attention == "mla" and self.context == "all_gather"

    @property
    def expands_in_branches(self) -> bool:
        """Layers with other windows expand other numbers of tokens, in branches, whose residuals have their weights."""
        return self.gathers_latent and self.cp > 1 and len(set(self.model.windows)) > 1

    def expanded_tokens(self, window: int) -> int:
        """Those of which a rank expands the latent: its own, and those that it is sent."""
        if not self.gathers_latent or self.cp == 1:
            return self.tokens
        rows = self.tokens * self.cp // self.seq
        return self.tokens + self.neighbours * (window - 1) * rows if window else self.tokens * self.cp

    @property
    def neighbours(self) -> int:
        """Ranks that send the ends of their chunks to another one."""
        return 1 if self.order == "contiguous" else 2

    def attention_over_context(self) -> None:
        """Of a layer: each rank has T tokens of G key heads, whose keys are J wide and values K.

        all_gather  (cp-1) T (G J + G K) forward, and as many gradients backward; of MLA (cp-1) T (d_latent + d_rope)
        ring        (cp-1) T (G J + G K) forward; backward as many, and the gradients, in float32, cp T (G J + G K)
        ulysses     (cp-1)/cp T (H + G') (J + K) both ways, where G' are the key heads, repeated until cp divides them

        With a window of w tokens, if w - 1 are no more than a chunk, all_gather has two tails of w - 1 tokens of each
        row in place of (cp-1) T, both ways, and a ring makes two hops in place of cp-1; in contiguous order one.
        """
        for window, layers in Counter(self.model.windows).items():
            self.attention_in_window(window, self.microbatches * layers // self.pp)

    def attention_in_window(self, window: int, times: int) -> None:
        m, row = self.model, self.tokens * self.bytes
        heads = m.heads // self.tp
        mla = m.attention == "mla"
        keys = heads if mla else max(heads * m.kv_heads // m.heads, 1)
        key, value = m.d_head + (m.d_rope if mla else 0), m.d_head
        assert window - 1 <= self.seq // (2 * self.cp)
        if self.context == "all_gather":
            latent = m.d_latent // (self.tp if self.family == "scatter" else 1)
            for width in (latent, m.d_rope) if self.gathers_latent else (keys * key, keys * value):
                if window:
                    for direction in ("forward", "backward"):
                        self.hop(direction, row * width * self.cp // self.seq * (window - 1), self.neighbours * times)
                else:
                    self.there_and_back("cp", "all-gather", self.cp * row * width, times, "all-to-all")
        elif self.context == "ring":
            hops = min(self.cp - 1, self.neighbours) if window else self.cp - 1
            for width in (keys * key, keys * value):
                for direction in ("forward", "backward"):
                    self.hop(direction, row * width, times * hops)
                self.hop("backward", self.tokens * width * FLOAT32, times * (hops + 1))
        else:
            shared = math.lcm(keys, self.cp)
            for width in (heads * key, shared * key, shared * value, heads * value):
                self.there_and_back("cp", "all-to-all", row * width, times)

    def hop(self, direction: str, size: int, times: int) -> None:
        """Keys go to the next rank; on simulated devices with a pipeline all are gathered, and one is taken."""
        if self.pp > 1:
            self.add("cp", "all-gather", direction, self.cp * size, times)
        elif self.cp > 1:
            self.sent[("cp",), "permute", direction] += times * size

    def batch_in_context_order(self) -> None:
        """Four int32 arrays of whole rows, once a step."""
        self.add("cp", "all-gather", "forward", 4 * 4 * self.rows * self.seq // (self.replica * self.dp * self.ep))

    def embed_and_head(self) -> None:
        head = self.shared_tokens * self.bytes * self.model.d_model
        embedded = head * (1 if self.heads_between else self.pp)  # in the ticks the first rank embeds all
        if self.embedding == "vocab_parallel":
            self.there_and_back("tp", "reduce-scatter", embedded, 1)
            self.there_and_back("tp", "all-gather", head, 1)
        elif self.residual == "hidden":
            self.there_and_back("tp", "all-to-all", embedded // self.tp, 1)
            self.there_and_back("tp", "all-to-all", head // self.tp, 1)
        if self.residual == "hidden":
            self.norm(self.shared_tokens, 1)

    def cross_entropy(self) -> None:
        """Over a cut vocab, three numbers a token: the largest logit, the sum of exponentials, the label's logit."""
        if self.embedding != "vocab_parallel":
            return
        calls = 1 if self.heads_between else self.microbatches
        tokens = self.shared_tokens // calls
        chunks = -(-tokens // self.chunk_tokens)
        self.add("tp", "all-reduce", "forward", -(-tokens // chunks) * FLOAT32, 3 * chunks * calls)

    # ---- data parallelism

    def data_parallel(self) -> None:
        """FSDP ("zero3"): two gathers in the compute dtype and one reduce-scatter in float32 at each use, 3 (dp-1)/dp
        of the parameters' bytes in float32. Of other policies weights are gathered once a step, or gradients scattered
        once, or both; of "ddp" neither. The gradient of an embedding reads no table. Where gradients are exchanged in
        the compute dtype, pieces go to each rank that adds them: as many entries."""
        m = self.model
        for entries, over_tp, layers, fsdp in self.kernels:
            kernel, passes = self.cut(entries, over_tp), self.microbatches * layers
            gathers, sums = self.times(self.policy, passes, layers)
            self.add(fsdp, "all-gather", "forward", kernel * self.bytes, gathers)
            self.add(fsdp, "all-gather", "recompute", kernel * self.bytes, gathers * (self.policy in PER_USE))
            self.add(fsdp, *self.sum_of_gradients(kernel), sums)
        if self.expands_in_branches and self.policy in PER_USE:
            up = 2 * self.cut(m.d_latent * m.heads * m.d_head, True)
            self.add(self.fsdp, "all-gather", "recompute", up * self.bytes, -self.layer_passes)
        uses = 2 if self.heads_between else 2 * self.microbatches  # by the embedding and by the head
        gathers, sums = self.times(self.tables, uses, 1 if self.model.tied else 2)
        axes = {True: f"pp {self.fsdp}", False: self.fsdp}
        table = self.table // (self.pp if self.tables_in_turn else 1)
        self.add(axes[self.tables_at_once], "all-gather", "forward", table * self.bytes, gathers)
        self.add(axes[self.sums_at_once], *self.sum_of_gradients(self.table), sums)

    def times(self, policy: str, uses: int, once: int) -> tuple[int, int]:
        """How often a step gathers weights, and scatters gradients, that have so many uses."""
        if policy == "ddp":
            return 0, 0
        return uses if policy in PER_USE else once, uses if policy in ("zero2", "zero3") else once

    def cut_at_rest(self, entries: int, policy: str, fsdp: str) -> int:
        return entries if policy == "ddp" else entries // math.prod(getattr(self, axis) for axis in fsdp.split())

    def sum_at_rest(self, entries: int, policy: str, over_tp: bool, fsdp: str, over_pp: bool = True) -> None:
        """The gradient of a parameter at rest, summed once over the axes that do not cut it."""
        axes = (
            ["pp"] * (not over_pp)
            + ["replica"] * (self.replica > 1)
            + [fsdp] * (policy == "ddp")
            + ["tp"] * (not over_tp)
        )
        self.add(" ".join(axes), "all-reduce", "backward", self.cut_at_rest(entries, policy, fsdp) * FLOAT32)

    def sum_of_gradients(self, entries: int) -> tuple[str, str, int]:
        exchanged = self.reduce == "compute"
        kind, width = ("all-to-all", self.bytes) if exchanged else ("reduce-scatter", FLOAT32)
        return kind, "backward", entries * width

    def replicated(self) -> None:
        """Gradients of what several ranks hold are summed once a step, and so are the metrics."""
        m = self.model
        for entries, over_tp, layers, fsdp in self.kernels:
            self.sum_at_rest(layers * self.cut(entries, over_tp), self.policy, over_tp, fsdp)
        for entries, over_tp, layers, _ in self.scales:
            axes = self.data if over_tp else f"{self.data} tp"
            self.add(axes, "all-reduce", "backward", layers * self.cut(entries, over_tp) * FLOAT32)
        for _ in range(1 if m.tied else 2):
            table = self.cut_at_rest(self.table, self.tables, self.fsdp)
            gathered = self.table if self.tables_in_turn else table
            self.add("pp", "all-gather", "forward", gathered * self.bytes, not self.tables_at_once)
            self.add("pp", "reduce-scatter", "backward", table * FLOAT32, not self.sums_at_once)
            over_tp = self.embedding == "vocab_parallel"
            self.sum_at_rest(self.table // self.pp, self.tables, over_tp, self.fsdp, over_pp=self.pp > 1)
        hidden = self.residual == "hidden"
        axes = f"pp {self.data}" if hidden else f"pp {self.data} tp"
        self.add(axes, "all-reduce", "backward", self.cut(m.d_model, hidden) * FLOAT32)
        self.add(self.data, "all-reduce", "forward", FLOAT32, 2)  # tokens, for the weight and for the metrics
        losses = f"pp {self.data}" if self.embedding == "vocab_parallel" else f"pp {self.data} tp"
        self.add(losses, "all-reduce", "forward", 2 * FLOAT32)

    # ---- the pipeline

    @property
    def message(self) -> int:
        """Bytes of a microbatch's activation, as a rank holds it."""
        return self.tokens * self.model.d_model * self.bytes // self.tp

    @property
    def messages(self) -> int:
        """In a tick every rank sends on what it has, in a V both ways round; between two ranks both ways are one."""
        p, m, v = self.pp, self.microbatches, self.virtual
        ticks = {
            "gpipe": m + p - 1,
            "one_f_one_b": m + 2 * (p - 1),
            "zero_bubble": m + 2 * (p - 1),
            "interleaved": v * m + (v + 1) * p - 2,
            # With fewer microbatches more W are left at the end, as many as the rule of the schedules leaves.
            "zero_bubble_v": (2 * m + 4 * p - 2 if m >= p else zero_bubble_v(p, m).ticks) * (1 if p == 2 else 2),
            "dualpipe_v": (2 * m + 4 * p - 1 if m > p else dualpipe_v(p, m).ticks) * (1 if p == 2 else 2),
        }
        return 0 if p == 1 else ticks[self.schedule]

    def pipeline(self) -> None:
        for direction in ("forward", "backward"):
            self.sent[("pp",), "permute", direction] += self.messages * self.message
        outputs = self.microbatches * self.message
        self.there_and_back("pp", "reduce-scatter", outputs, 1)  # of the last stage, shared for the head
        if self.heads_between:
            self.there_and_back("pp", "all-gather", outputs, 1)  # of the embedding, which ranks shared
        if self.schedule in ("interleaved", "zero_bubble_v", "dualpipe_v") and self.pp > 1:
            self.layers_to_their_ranks()

    def layers_to_their_ranks(self) -> None:
        """Stored in another order than they run in, weights change ranks before the ticks, gradients after them."""
        pieces = {"kernels": 0, "scales": 0}
        for entries, over_tp, layers, fsdp in self.kernels:
            pieces["kernels"] += layers * self.cut_at_rest(self.cut(entries, over_tp), self.policy, fsdp)
        for entries, over_tp, layers, _ in self.scales:
            pieces["scales"] += layers * self.cut(entries, over_tp)
        self.add("pp", "all-to-all", "forward", pieces["kernels"] * self.bytes + pieces["scales"] * FLOAT32)
        self.add("pp", "all-to-all", "backward", FLOAT32 * (pieces["kernels"] + pieces["scales"]))

    # ---- all of it

    def total(self) -> Counter:
        self.sent = Counter()
        parts = (
            self.layers,
            self.mixtures,
            self.attention_over_context,
            self.batch_in_context_order,
            self.embed_and_head,
            self.cross_entropy,
            self.data_parallel,
            self.replicated,
            self.pipeline,
        )
        for part in parts:
            part()
        return +self.sent
