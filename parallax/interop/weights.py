"""Where each parameter of ours lies in the tensors of Hugging Face's `transformers`: one description, both ways.

Theirs multiply from the left, `[out, in]`, with heads side by side in `out`; ours are named dim by dim. Each is a view
of the other, but for rotated pairs: ours are (i, i + width/2), as Llama's are; DeepSeek's are neighbours, (2i, 2i + 1).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from parallax.config.sections import ModelConfig

LAYER = "model.layers.{layer}."
HEAD = "lm_head.weight"
TABLE = "model.embed_tokens.weight"


class Place(NamedTuple):
    """Where an array, of one layer where layers are stacked, lies in a tensor.

    `view` makes of the tensor, `shape`, a view with the array's shape; `order` then reorders its last dim. Without both
    the array is the tensor.
    """

    tensor: str  # with {layer} where layers are stacked
    shape: tuple[int, ...]
    view: Callable[[np.ndarray], np.ndarray] | None = None
    order: np.ndarray | None = None

    def ours(self, tensor: np.ndarray) -> np.ndarray:
        """The array as a view of the tensor, its last dim not yet in order."""
        return self.view(tensor) if self.view else tensor

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Rows of `ours`, in order."""
        return rows if self.order is None else rows[..., self.order]

    def put(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Write rows of the array into rows of `ours`."""
        rows[..., slice(None) if self.order is None else self.order] = values


def places(model: ModelConfig, *, interleaved: bool) -> dict[str, Place]:
    """The place of every array; `interleaved` says that rotated pairs are neighbours in the tensors.

    >>> table = dict(zip(("vocab", "d_model"), (64, 8)))
    >>> Place("model.embed_tokens.weight", tuple(table.values())).ours(np.zeros((64, 8))).shape
    (64, 8)
    """
    vocab, d_model, d_ff = model.vocab, (model.d_model,), (model.d_ff,)
    scale = lambda name: Place(f"{name}.weight", d_model)  # noqa: E731
    found = {
        "embedding.table": Place(TABLE, (vocab, *d_model)),
        "blocks.attention_norm.scale": scale(f"{LAYER}input_layernorm"),
        "blocks.mlp_norm.scale": scale(f"{LAYER}post_attention_layernorm"),
        "blocks.mlp.gate.kernel": _kernel("mlp.gate_proj", d_model, d_ff),
        "blocks.mlp.up.kernel": _kernel("mlp.up_proj", d_model, d_ff),
        "blocks.mlp.down.kernel": _kernel("mlp.down_proj", d_ff, d_model),
        "blocks.attention.out.kernel": _kernel("self_attn.o_proj", (model.heads, model.d_head), d_model),
        "head.norm.scale": scale("model.norm"),
    }
    if not model.tied:
        found["head.table"] = Place(HEAD, (vocab, *d_model))
    of_attention = _mla(model, interleaved) if model.attention == "mla" else _gqa(model)
    return found | {f"blocks.attention.{name}": place for name, place in of_attention.items()}


def _gqa(model: ModelConfig) -> dict[str, Place]:
    found = {}
    for name, heads in (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads)):
        out = heads, model.d_head
        found[f"{name}.kernel"] = _kernel(f"self_attn.{name}_proj", (model.d_model,), out)
        if model.qkv_bias:
            bias = f"{LAYER}self_attn.{name}_proj.bias"
            found[f"{name}.bias"] = Place(bias, (math.prod(out),), lambda tensor, out=out: tensor.reshape(out))
        if model.qk_norm and name != "v":
            found[f"{name}_norm.scale"] = Place(f"{LAYER}self_attn.{name}_norm.weight", (model.d_head,))
    return found


def _mla(model: ModelConfig, interleaved: bool) -> dict[str, Place]:
    heads, width, latent, rope = model.heads, model.d_head, model.d_latent, model.d_rope
    pairs = np.arange(rope).reshape(rope // 2, 2).T.reshape(-1) if interleaved else np.arange(rope)
    down = f"{LAYER}self_attn.kv_a_proj_with_mqa.weight", (latent + rope, model.d_model)
    up = f"{LAYER}self_attn.kv_b_proj.weight", (heads * 2 * width, latent)

    def half(tensor: np.ndarray, at: int) -> np.ndarray:
        of_heads = tensor.reshape(heads, 2 * width, latent)
        return of_heads[:, at * width : (at + 1) * width].transpose(2, 0, 1)

    return {
        **_queries(model, np.concatenate([np.arange(width), width + pairs])),
        "down.kernel": Place(*down, lambda tensor: tensor[:latent].T),
        "k_rope.kernel": Place(*down, lambda tensor: tensor[latent:].T, pairs),
        "norm.scale": Place(f"{LAYER}self_attn.kv_a_layernorm.weight", (latent,)),
        "up_k.kernel": Place(*up, lambda tensor: half(tensor, 0)),
        "up_v.kernel": Place(*up, lambda tensor: half(tensor, 1)),
    }


def _queries(model: ModelConfig, order: np.ndarray) -> dict[str, Place]:
    out, narrow = (model.heads, len(order)), model.d_latent_q
    if not narrow:
        return {"queries_0.kernel": _kernel("self_attn.q_proj", (model.d_model,), out, order)}
    return {
        "queries_0.kernel": _kernel("self_attn.q_a_proj", (model.d_model,), (narrow,)),
        "queries_1.scale": Place(f"{LAYER}self_attn.q_a_layernorm.weight", (narrow,)),
        "queries_3.kernel": _kernel("self_attn.q_b_proj", (narrow,), out, order),
    }


def _kernel(name: str, into: tuple[int, ...], out: tuple[int, ...], order: np.ndarray | None = None) -> Place:
    """Of a matrix product from dims `into` to dims `out`."""
    last = len(out)
    turned = *range(last, last + len(into)), *range(last)
    view = lambda tensor: tensor.reshape(*out, *into).transpose(turned)  # noqa: E731
    return Place(f"{LAYER}{name}.weight", (math.prod(out), math.prod(into)), view, order)
