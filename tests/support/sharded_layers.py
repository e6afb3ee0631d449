"""Layers to test, and how to run one with no mesh, or cut over one, on the same arrays."""

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from parallax.model.attention import GQA
from parallax.model.context import Context
from parallax.model.dense import Dense
from parallax.model.embedding import EMBEDDINGS, Embedding, Head, logits
from parallax.model.families import FAMILIES
from parallax.model.mask import Mask
from parallax.model.mla import MLA
from parallax.model.mlp import GatedMLP, PlainMLP
from parallax.model.norm import LayerNorm, RMSNorm
from parallax.model.rope import Rope
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import layouts_of
from support.tiny_model import HIDDEN_CUT, SEQ_CUT, mesh_of, model_config, positions_of

ROWS, SEQ = 4, 8
SIZES = model_config().sizes | {"batch": ROWS, "seq": SEQ}
YARN = dict(rope_scaling="yarn", rope_factor=4.0, rope_original_seq=64, rope_theta=100.0)

# Each family with the layouts of the residual stream that it reads: streams are of tokens.
IN_FAMILIES = [(family, residual) for family in FAMILIES for residual in (HIDDEN_CUT, SEQ_CUT)]
IN_FAMILIES.remove(("streams", HIDDEN_CUT))


def attention_layer(kind, residual, family, *, kv="kv_heads/tp", **changes):
    """An attention of the tiny model."""
    model = model_config(attention=kind, **changes)
    shared = dict(residual=residual, family=family, sizes=model.sizes, dtype=model.dtype, kernel=model.kernel)
    shared |= dict(bias=model.qkv_bias, temperature=Rope(model).temperature(), out_scale=0.5)
    shared |= dict(norm_eps=model.norm_eps)
    normed = dict(qk_norm=model.qk_norm, qk_norm_over=model.qk_norm_over, sinks=model.sinks)
    return MLA(**shared) if kind == "mla" else GQA(kv=kv, **normed, **shared)


def residual_layers(residual, family, *, kv="kv_heads/tp"):
    """Every layer that reads or writes the residual stream, by name."""
    attention = lambda kind, **changes: attention_layer(kind, residual, family, **changes)  # noqa: E731
    shared = ("batch/dp", residual, SIZES, SIZES["vocab"])
    embedding = lambda form: Embedding(EMBEDDINGS[form], *shared, "float32", dropout=0.0)  # noqa: E731
    head = lambda form: Head(EMBEDDINGS[form], *shared, 1e-6, tied=False)  # noqa: E731
    return {
        "norm": RMSNorm(residual, SIZES, 1e-6),
        "norm_one_plus": RMSNorm(residual, SIZES, 1e-6, scaling="one_plus", bias=True),
        "layer_norm": LayerNorm(residual, SIZES, 1e-6, bias=True),
        "layer_norm_alone": LayerNorm(residual, SIZES, 1e-6, scaling="none"),
        "mlp": GatedMLP(residual, family, SIZES, "float32", 0.5),
        "mlp_clamped": GatedMLP(residual, family, SIZES, "float32", 0.5, activation="clamped", limit=1.5, bias=True),
        "mlp_plain": PlainMLP(residual, family, SIZES, "float32", 0.5, activation="relu2", bias=True),
        "gqa": attention("gqa", kv=kv),
        "gqa_bias": attention("gqa", kv=kv, qkv_bias=True),
        "gqa_qk_norm": attention("gqa", kv=kv, qk_norm=True),
        "gqa_normed_together": attention("gqa", kv=kv, qk_norm=True, qk_norm_over="projection", sinks=True),
        "mla": attention("mla"),
        "mla_latent_queries": attention("mla", d_latent_q=16, qkv_bias=True, **YARN),
        "embedding_vocab_parallel": embedding("vocab_parallel"),
        "embedding_all_to_all": embedding("all_to_all"),
        "head_vocab_parallel": head("vocab_parallel"),
        "head_all_to_all": head("all_to_all"),
    }


def windows(rows=ROWS, seq=SEQ, seed=0):
    """(x, ids, positions, segments) of packed windows."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, seq, SIZES["d_model"])).astype(np.float32)
    ids = rng.integers(0, SIZES["vocab"], (rows, seq)).astype(np.int32)
    segments = 1 + np.cumsum(rng.random((rows, seq)) < 0.2, axis=1).astype(np.int32)
    return x, ids, positions_of(segments), segments


def call(layer, rope):
    """`layer` as a function of (params, x, ids, positions, segments)."""

    def function(params, x, ids, positions, segments):
        weights, rows = {"params": params}, np.arange(len(ids))
        if isinstance(layer, Embedding):
            return layer.apply(weights, ids, rows, None)
        if isinstance(layer, Head):
            return logits(layer.form, layer.rows, layer.apply(weights, x), params["table"], layer.entries)
        if isinstance(layer, RMSNorm | GatedMLP | Dense):
            return layer.apply(weights, x)
        return layer.apply(weights, x, Context(rope.tables(positions), rows, None, Mask(segments)))

    return function


def declared(layer, rope):
    """(layouts, values) of a layer's parameters, all of them random, so that none is a 1 or a 0 by chance."""
    x, ids, positions, segments = windows()

    def init(key):
        rows = np.arange(len(ids))
        if isinstance(layer, Embedding):
            return layer.init(key, ids, rows, None)
        if isinstance(layer, RMSNorm | GatedMLP | Dense | Head):
            return layer.init(key, x)
        return layer.init(key, x, Context(rope.tables(positions), rows, None, Mask(segments)))

    boxed = jax.eval_shape(init, jax.random.key(0)).get("params", {})
    shapes, rng = nn.meta.unbox(boxed), np.random.default_rng(2)
    fill = lambda s: rng.normal(0.2, s.shape[0] ** -0.5, s.shape).astype(np.float32)  # noqa: E731
    return layouts_of(boxed), jax.tree.map(fill, shapes)


def on_mesh(function, layouts, mesh, x_layout, y_layout):
    """`function(params, x, ids, positions, segments)` cut over a mesh, on whole arrays."""
    specs = jax.tree.map(Layout.spec, layouts)
    in_specs = (specs, Layout.parse(x_layout).spec(), P("dp"), P("dp"), P("dp"))
    out_specs = Layout.parse(y_layout).spec()
    return jax.shard_map(function, mesh=mesh_of(*mesh), in_specs=in_specs, out_specs=out_specs, check_vma=True)


def value_and_grads(function, params, arrays):
    """(y, gradients in params, gradient in x) of the product of the output with fixed weights."""
    x, *rest = arrays

    def run(params, x):
        y, pull = jax.vjp(lambda params, x: function(params, x, *rest), params, x)
        return y, *pull(np.random.default_rng(5).normal(size=y.shape).astype(y.dtype))  # a draw by XLA is compiled

    return jax.tree.map(np.asarray, jax.jit(run)(params, x))
