"""The model on one device: embedding, blocks and head, built from layout strings."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

from parallax.config.sections import (
    ATTENTION,
    ATTENTION_CHOICES,
    BLOCKS,
    COMPUTE,
    DELAYED,
    EMBEDDING,
    EXPERTS,
    HEAD,
    LORA_BASES,
    MATMUL_PARTS,
    MLP,
    ONE_NORM,
    PARALLEL,
    SEQUENTIAL,
    LossConfig,
    ModelConfig,
)
from parallax.errors import ConfigError, quoted
from parallax.jaxprs import needed, part
from parallax.model.attention import GQA, as_it_is
from parallax.model.context import Context, temperatures_of
from parallax.model.dense import Dense
from parallax.model.dropout import Dropout
from parallax.model.embedding import Embedding, Head, TableForm
from parallax.model.experts.moe import MoE
from parallax.model.families import Family
from parallax.model.logits import LogitForm, scaled
from parallax.model.lora import lora_of
from parallax.model.mask import Mask
from parallax.model.mla import MLA, up_of
from parallax.model.mlp import mlps_of
from parallax.model.norm import norms_of
from parallax.model.products import MEASURED
from parallax.model.rope import Rope
from parallax.sharding.layers_on_ranks import stacks_of
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import Declared, map_declared
from parallax.user_code import codes_by_name, named


class Block(nn.Module):
    """One transformer layer: attention and an MLP, or a mixture of experts, each a branch that is added to the residual
    stream. `model.norm_place` says where a branch has its norms, and `model.branches` whether the MLP reads the stream
    after attention or what attention reads.

    Communication: that of its norms, attention and MLP; the residual stream itself sends nothing.
    """

    model: ModelConfig
    residual: str
    family: Family
    kv: str  # layout of key-value heads: "kv_heads/tp" | "kv_heads"
    kind: str = "dense"
    loss: LossConfig = LossConfig()
    exchange: str = "gather"  # of a mixture's tokens
    exchange_hosts: int = 1
    expert_chunk_tokens: int = 0
    measures: bool = False  # measure operands of 8-bit products, and compute the products in the compute dtype

    def setup(self):
        residual, sizes, eps = self.residual, self._shaped.sizes, self.model.norm_eps
        norm = partial(
            _made, "model.norm", self.model.norm, norms_of(self.model), layout=residual, sizes=sizes, eps=eps
        )
        behind = self.model.norms_behind
        self.attention_norm = norm(part=ATTENTION) if self.model.norms_before else as_it_is
        self.attention = self._attention()
        self.attention_out_norm = norm(part=ATTENTION) if behind else as_it_is
        self.mlp_norm = norm(part=MLP) if self.model.norms_before > 1 else as_it_is
        self.mlp_out_norm = norm(part=MLP) if behind else as_it_is
        # What the backward pass does not read has no name.
        before, is_read = self.model.norms_before, not behind and self.model.branches == SEQUENTIAL
        named = partial(partial, checkpoint_name)
        self.of_norm = named(name="norm") if before else as_it_is
        self.of_mlp_norm = named(name="norm") if before > 1 else as_it_is
        self.of_out = named(name="out") if behind else as_it_is
        self.of_sum = named(name="out") if is_read else as_it_is
        self.of_down = named(name="down") if behind else as_it_is
        self.mlp = (
            self._mixture()
            if self._is_mixture
            else _made(
                "model.mlp",
                self.model.mlp,
                mlps_of(self.model),
                residual=residual,
                family=self.family,
                sizes=sizes,
                dtype=self.model.dtype,
                out_scale=self._out_scale,
                matmul=self._matmul(MLP),
                matmul_residuals=self.model.matmul_residuals,
                dense=self._dense,
            )
        )
        dropout = partial(Dropout, residual, sizes, self.model.dropout, order=self.family.context.order)
        self.drop_attention, self.drop_mlp = dropout(site=0), dropout(site=1)

    def __call__(self, x: Array, context: Context) -> Array:
        rows, key, factor = context.rows_B, context.key, self.model.residual_scale
        normed = self.of_norm(self.attention_norm(x))
        branch = self.attention_out_norm(self.of_out(self.attention(normed, context)))
        after = self.of_sum(x + scaled(self.drop_attention(branch, rows, key), factor))
        normed = self.of_mlp_norm(self.mlp_norm(self._stream(x, normed, after)))
        branch = self.mlp_out_norm(self.of_down(self.mlp(normed, *self._for_mixtures(context))))
        return after + scaled(self.drop_mlp(branch, rows, key), factor)

    def decode(self, x: Array, context: Context, cache: dict) -> tuple[Array, dict]:
        """As the call, for new tokens after cached ones; without dropout."""
        normed, factor = self.attention_norm(x), self.model.residual_scale
        branch, cache = self.attention.decode(normed, context, cache)
        after = x + scaled(self.attention_out_norm(branch), factor)
        branch = self.mlp(self.mlp_norm(self._stream(x, normed, after)), *self._for_mixtures(context))
        return after + scaled(self.mlp_out_norm(branch), factor), cache

    def cache_layouts(self) -> dict[str, str]:
        """Layouts of the entries that `decode` caches."""
        return self.attention.cache_layouts()

    @property
    def _shaped(self) -> ModelConfig:
        """The model's settings, with the shapes of this kind of layers."""
        return self.model.of_block(self.kind)

    @property
    def _is_mixture(self) -> bool:
        return self.model.base_of(self.kind) == "moe"

    @property
    def _out_scale(self) -> float:
        # Each of the 2 * layers branches adds its variance to the residual (GPT-2, section 2.3).
        return (2 * self.model.layers) ** -0.5 if self.model.init_out == "scaled" else 0.0

    def _for_mixtures(self, context: Context) -> tuple:
        """Arguments of a mixture besides x. The call is elsewhere, since operations would have this method's name."""
        return (context.row_weight,) if self._is_mixture else ()

    def _stream(self, x: Array, normed: Array, after: Array) -> Array:
        """What the MLP, or its norm, reads: the stream after attention, what attention's norm reads, or its result."""
        return {SEQUENTIAL: after, PARALLEL: x, ONE_NORM: normed}[self.model.branches]

    def _mixture(self) -> nn.Module:
        return MoE(
            self._shaped,
            self.residual,
            self.family,
            self._out_scale,
            balance_coefficient=self.loss.balance_coefficient,
            router_z_coefficient=self.loss.router_z_coefficient,
            exchange=self.exchange,
            exchange_hosts=self.exchange_hosts,
            chunk_tokens=self.expert_chunk_tokens,
            matmul=self._matmul(MLP),
            matmul_of_experts=self._matmul(EXPERTS),
            dense=self._dense,
        )

    def _matmul(self, part: str) -> str:
        """The form of the products of a part of the layer."""
        matmul = self.model.matmul_of(part)
        return MEASURED if self.measures and matmul != COMPUTE else matmul

    def _attention(self) -> nn.Module:
        m, shared = self._shaped, {"residual": self.residual, "family": self.family}
        shared |= {"sizes": m.sizes, "dtype": m.dtype, "kernel": m.kernel, "bias": m.qkv_bias}
        one_of_all = Rope(self.model.settings_of_layers.settings[0]).temperature()
        temperature = 1.0 if temperatures_of(self.model) else one_of_all
        shared |= {"temperature": m.score_factor * temperature, "out_scale": self._out_scale}
        shared |= {"norm_eps": m.norm_eps, "matmul": self._matmul(ATTENTION)}
        shared |= {"matmul_residuals": m.matmul_residuals, "dense": self._dense}
        choices = {name: getattr(m, name) for name in ATTENTION_CHOICES} | {"clips": bool(m.qk_clip)}
        if m.attention == "mla":
            return MLA(
                **shared,
                up=up_of(m, self.family.context.order),
                out_bias=m.out_bias,
                score_cap=m.score_cap,
                sinks=m.sinks,
                clips=bool(m.qk_clip),
            )
        shared |= {"kv": self.kv, "qk_norm": m.qk_norm}
        return _made("model.attention", m.attention, {"gqa": partial(GQA, **choices)}, **shared)

    @property
    def _dense(self) -> Callable[..., Dense] | None:
        """What makes projections in place of Dense."""
        return named("model.dense", self.model.dense, {"dense": lora_of(self.model, self.family.context.order)})


class Parts(NamedTuple):
    """The modules of a model; their parameters are the entries "embedding", "blocks" and "head".

    Layers of a kind are stacked. "blocks" has an entry for each kind if there are several; otherwise it is the stack.
    """

    embedding: Embedding
    blocks: Mapping[str, Block]  # by kind
    head: Head

    @staticmethod
    def build(
        model: ModelConfig,
        residual: str,
        family: Family,
        form: TableForm,
        tp: int,
        rows: str,
        **options: Any,
    ) -> "Parts":
        """`rows` is the layout of the batch dim in embedding and head; for `residual`, `family` and `options` see
        Block."""
        sizes = FrozenDict(model.sizes)  # which a cache can hash
        scale = model.embedding_scale
        order = family.context.order
        embedding = Embedding(form, rows, residual, sizes, model.vocab, model.dtype, model.dropout, scale, order)
        norm = named("model.norm", model.norm, norms_of(model))
        shared = (form, rows, residual, sizes, model.vocab)
        head = Head(*shared, model.norm_eps, model.tied, norm, LogitForm.of(model))
        code = codes_by_name(model.kinds)
        block = dict(model=model, residual=residual, family=family, **options)
        blocks = {
            kind: _made("model.kinds", code.get(kind, "block"), {"block": Block}, kind=kind, kv=shaped.kv(tp), **block)
            for kind, shaped in model.blocks.items()
        }
        return Parts(embedding, blocks, head)

    def by_kind(self, blocks: Any) -> list[Any]:
        """The entry of "blocks" for each kind of layers, in the order of `self.blocks`."""
        return [blocks[kind] for kind in self.blocks] if len(self.blocks) > 1 else [blocks]

    def on_rows(self, *, embedding: str, head: str) -> "Parts":
        """The same, with other layouts of the batch dim in embedding and head."""
        return self._replace(embedding=self.embedding.clone(rows=embedding), head=self.head.clone(rows=head))

    def scan(
        self, layer: Callable, x: Array, blocks: Any, context: Context, others: Any, kinds: Any, numbers: Any
    ) -> tuple[Array, Any]:
        """Run `x, out = layer(kind, weights, x, context, other)` for each layer in order; return the last x and all
        `out`, stacked. `kind` is that of its block.

        `blocks` are resident weights, `context` is that of all layers, `others` have an entry for each. `kinds` is
        Arrangement.kinds_in_places of one rank, and `numbers` has the model's layer in each place, None if layers do
        not differ in their settings. A place without a layer leaves x unchanged and returns `other` as `out`.
        """
        stacks, names = self.by_kind(blocks), list(self.blocks)
        model = self.blocks[names[0]].model

        if len(stacks) == 1:

            def run_only(x: Array, given: Any) -> tuple[Array, Any]:
                weights, number, other = given
                return layer(names[0], weights, x, context.of_layer(model, number), other)

            return jax.lax.scan(run_only, x, (stacks[0], numbers, others))

        def run_layer(x: Array, given: Any) -> tuple[Array, Any]:
            kind, index, number, other = given
            here = context.of_layer(model, number)

            def of_kind(name: str, stack: Any, x: Array, other: Any) -> tuple[Array, Any]:
                return layer(name, jax.tree.map(lambda w: w[index], stack), x, here.of_kind(model, name), other)

            runs = [partial(of_kind, *pair) for pair in zip(names, stacks, strict=True)]
            return jax.lax.switch(kind, runs if other is None else [*runs, lambda *same: same], x, other)

        return jax.lax.scan(run_layer, x, (*kinds, numbers, others))

    def declared(self) -> dict[str, Any]:
        """The shapes of `declare`."""
        blocks = tuple(self.blocks.items())
        # A notebook may define anew what its own classes use.
        declare = _declared.__wrapped__ if blocks[0][1].model.has_user_code else _declared
        return declare(self.embedding, blocks, self.head)

    def declared_in_8_bits(self) -> dict[str, Any]:
        """The same with every product in 8 bits that may be, and with largest logits: all maxima of steps that a
        checkpoint of this model may have."""

        def in_8_bits(block: Block) -> Block:
            products = dict(matmul="int8", matmul_parts=" ".join(MATMUL_PARTS), matmul_scales=DELAYED, matmul_ranges="")
            products |= dict(init_out="scaled")  # which has no effect on what is declared
            products |= dict(lora_base=LORA_BASES[0])  # a kernel that rests in 8 bits has no such scales
            products |= dict(qk_clip=1.0)
            return block.clone(model=dataclasses.replace(block.model, **products))

        return self._replace(blocks={kind: in_8_bits(block) for kind, block in self.blocks.items()}).declared()

    def declare(self, key: Array) -> dict[str, Any]:
        """All parameters as whole arrays of `Declared`: no axis is bound here, so nothing depends on the mesh."""
        model = next(iter(self.blocks.values())).model
        embedding, blocks, head = jax.random.split(key, 3)
        ids = jnp.zeros((1, 1), jnp.int32)
        x = jnp.zeros((1, 1, model.d_model), model.dtype)
        keys = jax.random.split(blocks, model.layers)
        names = stacks_of(model.layer_kinds)
        of_kind = {kind: keys[np.equal(model.layer_kinds, kind)] for kind in self.blocks}
        stacks = {kind: _stacked(block, kind, of_kind[kind], names[kind]) for kind, block in self.blocks.items()}
        return {
            EMBEDDING: self.embedding.init(embedding, ids, ids[0], None)["params"],
            BLOCKS: stacks if len(stacks) > 1 else stacks.popitem()[1],
            HEAD: self.head.init(head, x).get("params", {}),  # a tied head may have none
        }


def _made(key: str, value: str, known: Mapping[str, Callable], **arguments: Any) -> nn.Module:
    """The layer that a setting chooses. Raises ConfigError if code of a user's own makes something else."""
    layer = named(key, value, known)(**arguments)
    if not isinstance(layer, nn.Module):
        raise ConfigError(f"{key}={quoted(value)} makes {quoted(layer)}, not a Flax module.")
    return layer


# A plan's sweep has many layouts with the same parts, and more with the same layers.
@functools.lru_cache(maxsize=32)
def _declared(embedding: Embedding, blocks: tuple[tuple[str, Block], ...], head: Head) -> dict[str, Any]:
    return jax.eval_shape(Parts(embedding, dict(blocks), head).declare, jax.random.key(0))


def _stacked(block: Block, kind: str, keys: Array, stack: str) -> Any:
    """The parameters of one layer per key, stacked under this name."""
    init_of = _init_of.__wrapped__ if block.model.has_user_code else _init_of
    draw, structure = init_of(block, kind, keys.dtype)
    stacked = jax.tree.unflatten(structure, jax.vmap(draw)(keys))
    return map_declared(partial(_in_layers, stack), stacked)


@functools.lru_cache(maxsize=32)
def _init_of(block: Block, kind: str, key_dtype: Any) -> tuple[Callable[[Array], list[Array]], Any]:
    """The leaves of a layer's initial parameters as a function of a key, without what a layer computes with them, and
    the structure of their tree."""
    model = dataclasses.replace(block.model, kernel="xla")  # one token is too few for others

    def init(key: Array) -> Any:
        ids, x = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, model.d_model), model.dtype)
        context = Context(Rope(model.of_block(kind)).tables(ids), ids[0], None, Mask(ids))
        return block.clone(model=model).init(key, x, context)["params"]

    traced, like = jax.make_jaxpr(init, return_shape=True)(jax.ShapeDtypeStruct((), key_dtype))
    jaxpr = traced.jaxpr
    draw = jaxpr_as_fun(part(needed(jaxpr), jaxpr.invars, jaxpr.outvars, jaxpr.constvars, traced.consts))
    return draw, jax.tree.structure(like)


def _in_layers(stack: str, declared: Declared) -> Declared:
    layout, spec = declared.layout, dataclasses.replace(declared.spec, stack=stack)
    return declared.replace(layout=Layout(("layers", *layout.names), (("pp",), *layout.axes)), spec=spec)
