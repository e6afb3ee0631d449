"""The model as one device sees it: embedding, blocks and head, built from strings."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from parallax.model.attention import GQA
from parallax.model.context import Context, training_context
from parallax.model.dropout import Dropout
from parallax.model.embedding import EMBEDDINGS, Embedding, Head, TableForm
from parallax.model.families import FAMILIES, Family
from parallax.model.kernels import KERNELS
from parallax.model.mla import MLA
from parallax.model.mlp import GatedMLP
from parallax.model.norm import RMSNorm
from parallax.model.remat import keep
from parallax.model.rope import Rope
from parallax.runtime.errors import ConfigError, NotationError, check_choice, check_whole, divisors, listed, quoted
from parallax.sharding.activations import RESIDUALS
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import Declared


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer; see configs/base.py for each field's meaning and unit."""

    vocab: int
    vocab_multiple: int
    layers: int
    d_model: int
    d_ff: int
    attention: str
    heads: int
    kv_heads: int
    d_head: int
    d_latent: int
    d_latent_q: int
    d_rope: int
    rope_theta: float
    rope_scaling: str
    rope_factor: float
    rope_original_seq: int
    rope_fast_turns: float
    rope_slow_turns: float
    rope_temperature: float
    rope_magnitude: float
    qkv_bias: bool
    qk_norm: bool
    sliding_window: int
    norm_eps: float
    tied: bool
    dropout: float
    dtype: str
    kernel: str

    def __post_init__(self):
        check_choice("model.attention", self.attention, ["mla", "gqa"])
        check_choice("model.rope_scaling", self.rope_scaling, ["none", "linear", "yarn", "llama3"])
        check_choice("model.dtype", self.dtype, ["float32", "bfloat16"])
        check_choice("model.kernel", self.kernel, list(KERNELS))
        for key in ("vocab_multiple", "layers", "d_model", "d_ff", "heads", "kv_heads", "d_head", "rope_original_seq"):
            self._check_at_least(key, 1)
        for key in ("vocab", "d_latent_q", "sliding_window"):
            self._check_at_least(key, 0)
        self._check_floats()
        self._check_mla() if self.attention == "mla" else self._check_gqa()

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of every dim that a parameter or an activation's last dims may have; of `vocab` with its padding."""
        names = (
            "layers",
            "d_model",
            "d_ff",
            "heads",
            "kv_heads",
            "d_head",
            "d_latent",
            "d_latent_q",
            "d_rope",
        )
        sizes = {name: getattr(self, name) for name in names}
        return {"vocab": self.padded_vocab, **sizes, "d_qk": self.d_head + self.d_rope}

    @property
    def padded_vocab(self) -> int:
        """Rows of the tables: `vocab`, and rows of padding up to a multiple of `vocab_multiple`."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def rope(self) -> Rope:
        width = self.d_rope if self.attention == "mla" else self.d_head
        turns = self.rope_fast_turns, self.rope_slow_turns
        scaling = self.rope_scaling, self.rope_factor, self.rope_original_seq, *turns
        return Rope(width, self.rope_theta, *scaling, self.rope_temperature, self.rope_magnitude)

    def kv(self, tp: int) -> str:
        """How so many tensor-parallel ranks cut key-value heads: each has all of them where they are too few."""
        return "kv_heads/tp" if self.kv_heads % tp == 0 else "kv_heads"

    def _check_at_least(self, key: str, least: int) -> None:
        check_whole(f"model.{key}", getattr(self, key), least=least)

    def _check_floats(self) -> None:
        ranges = {
            "rope_theta": (1 + 1e-6, math.inf),
            "rope_factor": (1, math.inf),
            "rope_fast_turns": (1e-6, math.inf),
            "rope_slow_turns": (1e-6, math.inf),
            "rope_temperature": (0, math.inf),
            "rope_magnitude": (1e-6, math.inf),
            "norm_eps": (1e-30, 1),  # well above float32's least: the norm of zeros divides by its root
            "dropout": (0, 1),
        }
        for key, (least, below) in ranges.items():
            value = getattr(self, key)
            if not least <= value < below:  # also refuses NaN
                raise ConfigError(f"model.{key}={value!r} must be at least {least} and below {below}.")
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

    def _check_mla(self) -> None:
        self._check_at_least("d_latent", 1)
        self._check_at_least("d_rope", 1)
        self._check_even("d_rope")
        if self.qk_norm:
            raise ConfigError(
                "model.qk_norm=True does nothing with model.attention='mla', which norms its latents; "
                "use qk_norm=False, or attention='gqa'."
            )

    def _check_gqa(self) -> None:
        self._check_even("d_head")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model.heads={self.heads} does not divide over model.kv_heads={self.kv_heads}; "
                f"use kv_heads in {listed(divisors(self.heads))}."
            )

    def _check_even(self, key: str) -> None:
        if getattr(self, key) % 2:
            raise ConfigError(f"model.{key}={getattr(self, key)} must be even: RoPE rotates its dims in pairs.")


@dataclasses.dataclass(frozen=True)
class LayoutConfig:
    """Where arrays are cut: the residual stream's layout, the tensor-parallel family, the embedding's form."""

    residual: str
    tensor_parallel: str
    embedding: str

    def __post_init__(self):
        check_choice("layout.tensor_parallel", self.tensor_parallel, FAMILIES)
        check_choice("layout.embedding", self.embedding, EMBEDDINGS)
        legal = " or ".join(map(repr, RESIDUALS))
        try:
            layout = str(Layout.parse(self.residual))
        except NotationError as error:  # quotes what was written
            raise ConfigError(f"layout.residual={error} Use {legal}.") from error
        if layout not in RESIDUALS:
            raise ConfigError(
                f"layout.residual={quoted(self.residual)} is no layout of the residual stream; use {legal}."
            )

    @property
    def stream(self) -> str:
        """The layout of the residual stream, with all axes that cut the batch."""
        return RESIDUALS[str(Layout.parse(self.residual))]

    @property
    def family(self) -> Family:
        return FAMILIES[self.tensor_parallel]

    @property
    def form(self) -> TableForm:
        return EMBEDDINGS[self.embedding]


class Block(nn.Module):
    """One pre-norm transformer layer: attention and gated MLP, each added to the residual stream.

    Communication: that of its norms, attention and MLP; the residual stream itself sends nothing.
    """

    model: ModelConfig
    residual: str
    family: Family
    kv: str  # how key-value heads are cut: "kv_heads/tp" | "kv_heads"

    def setup(self):
        residual, sizes, eps = self.residual, self.model.sizes, self.model.norm_eps
        self.attention_norm = RMSNorm(residual, sizes, eps)
        self.attention = self._attention()
        self.mlp_norm = RMSNorm(residual, sizes, eps)
        self.mlp = GatedMLP(residual, self.family, sizes, self.model.dtype, self._out_scale)
        self.drop_attention = Dropout(residual, sizes, self.model.dropout, site=0)
        self.drop_mlp = Dropout(residual, sizes, self.model.dropout, site=1)

    def __call__(self, x: Array, context: Context) -> Array:
        rows, key = context.rows_B, context.key
        x = keep(x + self.drop_attention(self.attention(self.attention_norm(x), context), rows, key), of="attention")
        return x + self.drop_mlp(self.mlp(self.mlp_norm(x)), rows, key)

    def decode(self, x: Array, context: Context, cache: dict) -> tuple[Array, dict]:
        """As the call, for new tokens behind cached ones; no dropout."""
        out, cache = self.attention.decode(self.attention_norm(x), context, cache)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), cache

    def cache_layouts(self) -> dict[str, str]:
        """The layouts of what `decode` caches."""
        return self.attention.cache_layouts()

    @property
    def _out_scale(self) -> float:
        # Each of the 2 * layers branches adds its variance to the residual (GPT-2, section 2.3).
        return (2 * self.model.layers) ** -0.5

    def _attention(self) -> nn.Module:
        m, shared = self.model, {"residual": self.residual, "family": self.family}
        shared |= {"sizes": m.sizes, "dtype": m.dtype, "kernel": m.kernel, "bias": m.qkv_bias}
        shared |= {"temperature": m.rope.temperature(), "out_scale": self._out_scale}
        shared |= {"norm_eps": m.norm_eps}
        return MLA(**shared) if m.attention == "mla" else GQA(kv=self.kv, qk_norm=m.qk_norm, **shared)


class Parts(NamedTuple):
    """The modules of a model; their parameters are the entries "embedding", "blocks" (stacked) and "head"."""

    embedding: Embedding
    block: Block
    head: Head

    @staticmethod
    def build(model: ModelConfig, residual: str, family: Family, form: TableForm, kv: str, rows: str) -> "Parts":
        """`rows` says how the batch is cut where embedding and head work."""
        embedding = Embedding(form, rows, residual, model.sizes, model.vocab, model.dtype, model.dropout)
        head = Head(form, rows, residual, model.sizes, model.vocab, model.norm_eps, model.tied)
        return Parts(embedding, Block(model, residual, family, kv), head)

    def declare(self, key: Array) -> dict[str, Any]:
        """All parameters as `Declared`, whole: no axis is bound here, so nothing depends on the mesh."""
        model = self.block.model
        embedding, blocks, head = jax.random.split(key, 3)
        ids = jnp.zeros((1, 1), jnp.int32)
        x = jnp.zeros((1, 1, model.d_model), model.dtype)
        context = training_context(model.rope, ids, ids, ids[0], None)
        block = self.block.clone(model=dataclasses.replace(model, kernel="xla"))  # one token is too few for others
        stacked = jax.vmap(lambda key: block.init(key, x, context)["params"])(jax.random.split(blocks, model.layers))
        return {
            "embedding": self.embedding.init(embedding, ids, ids[0], None)["params"],
            "blocks": jax.tree.map(_in_layers, stacked, is_leaf=lambda leaf: isinstance(leaf, Declared)),
            "head": self.head.init(head, x)["params"],
        }


def _in_layers(declared: Declared) -> Declared:
    layout = declared.layout
    return declared.replace(layout=Layout(("layers", *layout.names), (("pp",), *layout.axes)))
