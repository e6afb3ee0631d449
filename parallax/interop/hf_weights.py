"""How each parameter is stored in tensors of Hugging Face's `transformers`: one description for both directions.

Their kernels are `[out, in]`, with heads concatenated in `out`; ours have named dims. Each is a view of the other
except for rotated pairs: ours are (i, i + width/2), as in Llama; DeepSeek's are neighbours, (2i, 2i + 1).

Weights in float8 with a scale for each block, as in DeepSeek-V3, are read as float32. If all experts of a layer are in
one tensor, each kernel is read from its part of it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import ml_dtypes
import numpy as np
from einops import rearrange

from parallax.config.sections import ModelConfig
from parallax.interop.export import TensorSource, stack_names
from parallax.interop.hf_config import ScaleBlock
from parallax.interop.safetensors import Tensor

LAYER = "model.layers.{layer}."
EXPERT = "{expert}"
# Names after the layer, in files that have all experts of a layer in one tensor.
FUSED_GATES_AND_UPS, FUSED_DOWNS = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
LM_HEAD = "lm_head.weight"
TABLE = "model.embed_tokens.weight"
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
SCALES = "_scale_inv"  # after a weight's name; the weight is multiplied by it
WHOLE_PIECE_BYTES = 1 << 24  # pieces of a tensor that is converted to float32; the only memory besides the result


class WeightView(NamedTuple):
    """One of our arrays (of one layer and one expert if they are stacked) as a view of their tensor.

    `view` turns the tensor of this `shape` into a view with the array's shape; `order` then reorders its last dim.
    Without both the array equals the tensor.
    """

    tensor: str  # its name, with {layer} if layers are stacked, and {expert} if experts are
    shape: tuple[int, ...]
    view: Callable[[np.ndarray], np.ndarray] | None = None
    order: np.ndarray | None = None
    experts: int = 0  # experts of a layer, if they are stacked

    def tensors(self, here: TensorSource) -> Iterator[tuple[tuple[int, ...], str]]:
        """The tensors of this part of the array: the index in it, and the name of each."""
        if not self.experts:
            yield here.index, self.tensor.format(layer=here.layer)
        for expert in range(self.experts):
            yield (*here.index, expert), self.tensor.format(layer=here.layer, expert=expert)

    def ours(self, tensor: np.ndarray) -> np.ndarray:
        """The array as a view of the tensor, before its last dim is reordered."""
        return self.view(tensor) if self.view else tensor

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Rows of `ours`, reordered."""
        return rows if self.order is None else rows[..., self.order]

    def write(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Write rows of the array into rows of `ours`."""
        rows[..., slice(None) if self.order is None else self.order] = values


class MixtureNames(NamedTuple):
    """Names of an architecture's mixture tensors, after the layer."""

    prefix: str
    gate: str
    up: str
    down: str
    bias: str = ""  # of the router, if it has one

    def expert(self, name: str) -> str:
        return f"{self.prefix}.experts.{EXPERT}.{name}"


USUAL_NAMES = MixtureNames("mlp", "gate_proj", "up_proj", "down_proj")
MIXTURES = {
    "MixtralForCausalLM": MixtureNames("block_sparse_moe", "w1", "w3", "w2"),
    "DeepseekV3ForCausalLM": USUAL_NAMES._replace(bias="e_score_correction_bias"),
}


def weight_views(model: ModelConfig, architecture: str, *, interleaved: bool) -> dict[str, WeightView | None]:
    """The view of every array; `interleaved` says that rotated pairs are neighbours in the tensors.

    An array without a view, which is a router's bias that the architecture does not have, must be zeros.

    >>> table = dict(zip(("vocab", "d_model"), (64, 8)))
    >>> WeightView("model.embed_tokens.weight", tuple(table.values())).ours(np.zeros((64, 8))).shape
    (64, 8)
    """
    d_model, heads, width = model.d_model, model.heads, model.d_head
    table = model.vocab, d_model
    views: dict[str, WeightView | None] = {"embedding.table": WeightView(TABLE, table)}
    views["head.norm.scale"] = _scale_view("model.norm", d_model)
    if not model.tied:
        views["head.table"] = WeightView(LM_HEAD, table)
    names = MIXTURES.get(architecture, USUAL_NAMES)
    of_attention = _mla(model, interleaved) if model.attention == "mla" else _gqa(model)
    layer = {
        "attention_norm.scale": _scale_view(f"{LAYER}input_layernorm", d_model),
        "mlp_norm.scale": _scale_view(f"{LAYER}post_attention_layernorm", d_model),
        "attention.out.kernel": _kernel_view(
            "self_attn.o_proj", "d_model (heads d_head) -> heads d_head d_model", d_model, heads * width, heads=heads
        ),
        **{f"attention.{name}": view for name, view in of_attention.items()},
    }
    for kind, stack in stack_names(model.layer_kinds).items():
        mlp = _mixture(model, names) if kind == "moe" else _mlp("mlp", d_model, model.d_ff)
        views |= {f"{stack}{name}": view for name, view in layer.items()}
        views |= {f"{stack}mlp.{name}": view for name, view in mlp.items()}
    return views


def _mlp(prefix: str, d_model: int, d_ff: int) -> dict[str, WeightView]:
    into, back = "d_ff d_model -> d_model d_ff", "d_model d_ff -> d_ff d_model"
    return {
        "gate.kernel": _kernel_view(f"{prefix}.gate_proj", into, d_ff, d_model),
        "up.kernel": _kernel_view(f"{prefix}.up_proj", into, d_ff, d_model),
        "down.kernel": _kernel_view(f"{prefix}.down_proj", back, d_model, d_ff),
    }


def _mixture(model: ModelConfig, names: MixtureNames) -> dict[str, WeightView | None]:
    d_model, d_expert, count = model.d_model, model.d_expert, model.experts
    into, back = "d_expert d_model -> d_model d_expert", "d_model d_expert -> d_expert d_model"
    shared = _mlp(f"{names.prefix}.shared_experts", d_model, model.sizes["d_shared"]) if model.shared_experts else {}
    bias = WeightView(f"{LAYER}{names.prefix}.gate.{names.bias}", (count,)) if names.bias else None
    return {
        "router.kernel": _kernel_view(f"{names.prefix}.gate", "experts d_model -> d_model experts", count, d_model),
        "router.bias": bias,
        "experts.gate": _kernel_view(names.expert(names.gate), into, d_expert, d_model)._replace(experts=count),
        "experts.up": _kernel_view(names.expert(names.up), into, d_expert, d_model)._replace(experts=count),
        "experts.down": _kernel_view(names.expert(names.down), back, d_model, d_expert)._replace(experts=count),
        **{f"shared.{name}": view for name, view in shared.items()},
    }


def _scale_view(name: str, size: int) -> WeightView:
    return WeightView(f"{name}.weight", (size,))


def _kernel_view(name: str, pattern: str, *shape: int, order: np.ndarray | None = None, **sizes: int) -> WeightView:
    """The view of a kernel by an einops pattern from its tensor of this shape."""
    return WeightView(f"{LAYER}{name}.weight", shape, partial(rearrange, pattern=pattern, **sizes), order)


HEADS = "(heads d_head) d_in -> d_in heads d_head"


def _gqa(model: ModelConfig) -> dict[str, WeightView]:
    views = {}
    for name, heads in (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads)):
        theirs, out = f"self_attn.{name}_proj", heads * model.d_head
        views[f"{name}.kernel"] = _kernel_view(theirs, HEADS, out, model.d_model, heads=heads)
        if model.qkv_bias:
            view = partial(rearrange, pattern="(heads d_head) -> heads d_head", heads=heads)
            views[f"{name}.bias"] = WeightView(f"{LAYER}{theirs}.bias", (out,), view)
        if model.qk_norm and name != "v":
            views[f"{name}_norm.scale"] = _scale_view(f"{LAYER}self_attn.{name}_norm", model.d_head)
    return views


def _mla(model: ModelConfig, interleaved: bool) -> dict[str, WeightView]:
    heads, width, latent, rope = model.heads, model.d_head, model.d_latent, model.d_rope
    pairs = np.arange(rope)
    pairs = rearrange(pairs, "(pair two) -> (two pair)", two=2) if interleaved else pairs
    down = f"{LAYER}self_attn.kv_a_proj_with_mqa.weight", (latent + rope, model.d_model)
    up = f"{LAYER}self_attn.kv_b_proj.weight", (heads * 2 * width, latent)
    # Keys and values are adjacent in each head.
    halves = partial(rearrange, pattern="(heads kv d_head) latent -> kv latent heads d_head", heads=heads, kv=2)
    views = {
        "down.kernel": WeightView(*down, lambda tensor: tensor[:latent].T),
        "k_rope.kernel": WeightView(*down, lambda tensor: tensor[latent:].T, pairs),
        "norm.scale": _scale_view(f"{LAYER}self_attn.kv_a_layernorm", latent),
        "up_k.kernel": WeightView(*up, lambda tensor: halves(tensor)[0]),
        "up_v.kernel": WeightView(*up, lambda tensor: halves(tensor)[1]),
    }
    order = np.concatenate([np.arange(width), width + pairs])
    queries = partial(_kernel_view, order=order, heads=heads)
    if not model.d_latent_q:
        return views | {"queries_0.kernel": queries("self_attn.q_proj", HEADS, heads * len(order), model.d_model)}
    narrow = model.d_latent_q
    return views | {
        "queries_0.kernel": _kernel_view("self_attn.q_a_proj", "d_out d_in -> d_in d_out", narrow, model.d_model),
        "queries_1.scale": _scale_view(f"{LAYER}self_attn.q_a_layernorm", narrow),
        "queries_3.kernel": queries("self_attn.q_b_proj", HEADS, heads * len(order), narrow),
    }


# ---- scales of float8


class ScaledTensor(NamedTuple):
    """A tensor of float8, read as float32: each block times its scale."""

    stored: Tensor
    scales: Tensor
    block: ScaleBlock
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def pieces(self, limit_bytes: int) -> Iterator[np.ndarray]:
        """Pieces of rows, each of at most `limit_bytes`."""
        scales, row = self.scales.whole().astype(np.float32), 0
        for piece in self.stored.pieces(limit_bytes // 4):  # a byte becomes four
            yield dequantized(piece, scales, self.block, row)
            row += len(piece)

    def whole(self) -> np.ndarray:
        """The whole tensor."""
        values, row = np.empty(self.shape, self.dtype), 0
        for piece in self.pieces(WHOLE_PIECE_BYTES):
            values[row : row + len(piece)] = piece
            row += len(piece)
        return values


Weight = Tensor | ScaledTensor


def dequantized(values_RC: np.ndarray, scales: np.ndarray, block: ScaleBlock, first_row: int) -> np.ndarray:
    """Rows of a matrix in float32, each entry times the scale of its block; `first_row` is the index of the first row.

    >>> dequantized(np.ones((2, 3), FLOAT8), np.float32([[1, 2], [3, 4]]), (2, 2), first_row=1)
    array([[1., 1., 2.],
           [3., 3., 4.]], dtype=float32)
    """
    scaled_RC = values_RC.astype(np.float32)
    of_row = (first_row + np.arange(len(scaled_RC))) // block[0]
    for column in range(scales.shape[1]):
        scaled_RC[:, column * block[1] : (column + 1) * block[1]] *= scales[of_row, column][:, None]
    return scaled_RC


def scales_shape(shape: tuple[int, ...], block: ScaleBlock) -> tuple[int, ...]:
    """Shape of a matrix's scales: blocks at its lower and right edge may be smaller.

    >>> scales_shape((576, 7168), (128, 128))
    (5, 56)
    """
    return tuple(math.ceil(size / side) for size, side in zip(shape, block))


def with_scales(tensors: Mapping[str, Tensor], block: ScaleBlock) -> dict[str, Weight]:
    """Tensors by name, with float8 ones joined to their scales, which are stored as separate tensors.

    A tensor that is not float8, or has no scales of the right shape, is unchanged, and so are such scales.
    """
    joined = dict(tensors)
    for name, tensor in tensors.items():
        scales = tensors.get(name + SCALES)
        fits = scales and scales.shape == scales_shape(tensor.shape, block) and len(tensor.shape) == 2
        if tensor.dtype == FLOAT8 and fits and scales.dtype in SCALE_DTYPES:
            joined[name] = ScaledTensor(tensor, joined.pop(name + SCALES), block)
    return joined


# ---- all experts of a layer in one tensor


class FusedTensor(NamedTuple):
    """A tensor that contains several tensors, one after the other in its rows."""

    shape: tuple[int, ...]
    parts: list[str]  # their names


def fused_tensors(model: ModelConfig, architecture: str) -> dict[str, FusedTensor]:
    """The tensors of mixtures by name, as `transformers` 5 holds them in memory and saves them with
    save_original_format=False: two for all experts of a layer; the first has the gate of each before its up."""
    names, fused = MIXTURES.get(architecture, USUAL_NAMES), {}
    for layer, kind in enumerate(model.layer_kinds):
        if kind == "moe":
            fused |= _fused_layer(model, names, LAYER.format(layer=layer))
    return fused


def _fused_layer(model: ModelConfig, names: MixtureNames, prefix: str) -> dict[str, FusedTensor]:
    count, d_model, d_expert = model.experts, model.d_model, model.d_expert

    def kernels(*of_expert: str) -> list[str]:
        templates = [f"{prefix}{names.expert(name)}.weight" for name in of_expert]
        return [template.format(expert=expert) for expert in range(count) for template in templates]

    return {
        prefix + FUSED_GATES_AND_UPS: FusedTensor((count, 2 * d_expert, d_model), kernels(names.gate, names.up)),
        prefix + FUSED_DOWNS: FusedTensor((count, d_model, d_expert), kernels(names.down)),
        # Here Mixtral uses the same name as the others.
        f"{prefix}{USUAL_NAMES.prefix}.gate.weight": FusedTensor(
            (count, d_model), [f"{prefix}{names.prefix}.gate.weight"]
        ),
    }


def unfused(tensors: Mapping[str, Weight], fused: Mapping[str, FusedTensor]) -> dict[str, Weight]:
    """Tensors by name, with fused ones replaced by their parts."""
    plain = {}
    for name, tensor in tensors.items():
        parts = fused[name].parts if name in fused else [name]
        plain |= zip(parts, tensor.matrices(len(parts)) if len(tensor.shape) > 2 else [tensor])
    return plain
