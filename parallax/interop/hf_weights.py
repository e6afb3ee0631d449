"""How each parameter is stored in tensors of Hugging Face's `transformers`: one description for both directions.

Their kernels are `[out, in]`, with heads concatenated in `out`; ours have named dims. Each is a view of the other
except for rotated pairs: ours are (i, i + width/2), as in Llama; DeepSeek's are neighbours, (2i, 2i + 1).

Weights in float8 with a scale for each block, as in DeepSeek-V3, are read as float32, and experts in MXFP4, as in
gpt-oss, as bfloat16. If all experts of a layer are in one tensor, each kernel is read from its part of it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import ml_dtypes
import numpy as np
from einops import rearrange

from parallax.config.sections import UNSCALED, ModelConfig
from parallax.interop.export import TensorSource, stack_names
from parallax.interop.hf_architectures import ARCHITECTURES, EXPERT, Architecture, LanguageModel
from parallax.interop.hf_config import ScaleBlock
from parallax.interop.mxfp4 import Mxfp4Tensor
from parallax.interop.safetensors import Tensor

# Names after the layer, in files that have all experts of a layer in one tensor.
FUSED_GATES_AND_UPS, FUSED_DOWNS, FUSED_ROUTER = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate"
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
SCALES = "_scale_inv"  # after a weight's name; the weight is multiplied by it
WHOLE_PIECE_BYTES = 1 << 24  # pieces of a tensor that is converted to float32; the only memory besides the result


class WeightView(NamedTuple):
    """One of our arrays (of one layer and one expert if they are stacked) as a view of their tensor.

    `view` turns the tensor of this `shape` into a view with the array's shape; `order` then reorders its last dim.
    Without both the array equals the tensor. With `by_rows` it does so with any of the tensor's rows, which are rows of
    the array, too.
    """

    tensor: str  # its name, with {layer} if layers are stacked, and {expert} if experts are
    shape: tuple[int, ...]
    view: Callable[[np.ndarray], np.ndarray] | None = None
    order: np.ndarray | None = None
    experts: int = 0  # experts of a layer, if they are stacked
    by_rows: bool = False

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


def weight_views(model: ModelConfig, architecture: str, *, interleaved: bool) -> dict[str, WeightView | None]:
    """The view of every array; `interleaved` says that rotated pairs are neighbours in the tensors.

    An array without a view, which is a router's bias that the architecture does not have, must be zeros.

    >>> table = dict(zip(("vocab", "d_model"), (64, 8)))
    >>> WeightView("model.embed_tokens.weight", tuple(table.values())).ours(np.zeros((64, 8))).shape
    (64, 8)
    """
    kind, d_model, heads, width = ARCHITECTURES[architecture], model.d_model, model.heads, model.d_head
    table = model.vocab, d_model
    views: dict[str, WeightView | None] = {"embedding.table": WeightView(f"{kind.tensor('embedding')}.weight", table)}
    views |= _norm(kind, model, "head.norm")
    if not model.tied:
        views["head.table"] = WeightView(f"{kind.tensor('head')}.weight", table)
    back = "d_model (heads d_head) -> heads d_head d_model"
    norms = ["attention_norm", "mlp_norm"][: model.norms_before]
    norms += ["attention_out_norm", "mlp_out_norm"] if model.norms_behind else []
    layer = {
        **{name: view for norm in norms for name, view in _norm(kind, model, norm).items()},
        **_bias(kind, "attention.out", d_model, has=model.out_bias),
        "attention.out.kernel": _kernel_view(kind, "attention.out", back, d_model, heads * width, heads=heads),
        **(_mla(kind, model, interleaved) if model.attention == "mla" else _gqa(kind, model, interleaved)),
    }
    if model.sinks:
        layer["attention.sink_logits.logits"] = WeightView(kind.tensor("attention.sink_logits"), (heads,))
    for of_stack, stack in stack_names(model.layer_kinds).items():
        mlp = _mixture(kind, model) if model.base_of(of_stack) == "moe" else _dense_mlp(kind, model)
        views |= {f"{stack}{name}": view for name, view in (layer | mlp).items()}
    return views


def _norm(kind: Architecture, model: ModelConfig, module: str) -> dict[str, WeightView]:
    scale = {} if model.norm_scale == UNSCALED else {f"{module}.scale": _scale_view(kind, module, model.d_model)}
    return scale | _bias(kind, module, model.d_model, has=model.norm_bias)


def _bias(kind: Architecture, module: str, size: int, *, has: bool) -> dict[str, WeightView]:
    return {f"{module}.bias": WeightView(f"{kind.tensor(module)}.bias", (size,))} if has else {}


def _dense_mlp(kind: Architecture, model: ModelConfig) -> dict[str, WeightView]:
    views, widths = _mlp(kind, "mlp", model.d_model, model.d_ff), {"gate": model.d_ff, "up": model.d_ff}
    if model.mlp == "plain":
        del views["mlp.gate.kernel"], widths["gate"]
    for name, width in (widths | {"down": model.d_model}).items():
        views |= _bias(kind, f"mlp.{name}", width, has=model.mlp_bias)
    return views


def _mlp(kind: Architecture, module: str, d_model: int, d_ff: int) -> dict[str, WeightView]:
    into, back = "d_ff d_model -> d_model d_ff", "d_model d_ff -> d_ff d_model"
    gate, up, down = (f"{module}.{name}" for name in ("gate", "up", "down"))
    if kind.tensor(gate) == kind.tensor(up):
        both = f"{kind.tensor(gate)}.weight", (2 * d_ff, d_model)
        return {
            f"{gate}.kernel": WeightView(*both, lambda tensor: tensor[:d_ff].T),
            f"{up}.kernel": WeightView(*both, lambda tensor: tensor[d_ff:].T),
            f"{down}.kernel": _kernel_view(kind, down, back, d_model, d_ff),
        }
    return {
        f"{gate}.kernel": _kernel_view(kind, gate, into, d_ff, d_model),
        f"{up}.kernel": _kernel_view(kind, up, into, d_ff, d_model),
        f"{down}.kernel": _kernel_view(kind, down, back, d_model, d_ff),
    }


def _mixture(kind: Architecture, model: ModelConfig) -> dict[str, WeightView | None]:
    d_model, d_expert, count = model.d_model, model.d_expert, model.experts
    into, back = "d_expert d_model -> d_model d_expert", "d_model d_expert -> d_expert d_model"
    gate, up, down = (f"mlp.experts.{name}" for name in ("gate", "up", "down"))
    bias = WeightView(kind.tensor("mlp.router.bias"), (count,)) if "mlp.router.bias" in kind.names else None
    others = _mlp(kind, "mlp.shared", d_model, model.sizes["d_shared"]) if model.shared_experts else {}
    if model.shared_gate:
        others["mlp.shared_gate"] = _kernel_view(kind, "mlp.shared_gate", "gates d_model -> d_model gates", 1, d_model)
    if model.router_shift:
        others["mlp.router.shift"] = WeightView(f"{kind.tensor('mlp.router')}.bias", (count,))
    if kind.columns_in_turn:
        kernels = _in_turn(kind, model)
    elif EXPERT not in kind.tensor(gate):
        both, downs = (f"{kind.tensor(module)}.weight" for module in (gate, down))
        kernels = {
            gate: WeightView(both, (count, 2 * d_expert, d_model), lambda tensor: tensor[:, :d_expert].swapaxes(1, 2)),
            up: WeightView(both, (count, 2 * d_expert, d_model), lambda tensor: tensor[:, d_expert:].swapaxes(1, 2)),
            down: WeightView(downs, (count, d_model, d_expert), lambda tensor: tensor.swapaxes(1, 2)),
        }
    else:
        kernels = {
            gate: _kernel_view(kind, gate, into, d_expert, d_model)._replace(experts=count),
            up: _kernel_view(kind, up, into, d_expert, d_model)._replace(experts=count),
            down: _kernel_view(kind, down, back, d_model, d_expert)._replace(experts=count),
        }
    return {
        "mlp.router.kernel": _kernel_view(kind, "mlp.router", "experts d_model -> d_model experts", count, d_model),
        "mlp.router.bias": bias,
        **kernels,
        **others,
    }


def _in_turn(kind: Architecture, model: ModelConfig) -> dict[str, WeightView]:
    """Experts' kernels and biases in tensors [experts, in, out] and [experts, out]; every other column is of gate, and
    those between them of up."""
    count, widths = model.experts, {"gate": model.d_expert, "up": model.d_expert, "down": model.d_model}
    views = {}
    for place, (name, width) in enumerate(widths.items()):
        module = f"mlp.experts.{name}"
        tensor, is_down = kind.tensor(module), name == "down"
        view = None if is_down else partial(_every_other, place)
        columns, inputs = (width, model.d_expert) if is_down else (2 * width, model.d_model)
        views[module] = WeightView(tensor, (count, inputs, columns), view, by_rows=True)
        bias = "mlp.down_bias" if is_down else f"{module}_bias"
        if model.expert_bias:
            views[bias] = WeightView(f"{tensor}_bias", (count, columns), view, by_rows=True)
    return views


def _every_other(first: int, tensor: np.ndarray) -> np.ndarray:
    return tensor[..., first::2]


def _scale_view(kind: Architecture, module: str, size: int) -> WeightView:
    return WeightView(f"{kind.tensor(module)}.weight", (size,))


def _kernel_view(
    kind: Architecture, module: str, pattern: str, *shape: int, order: np.ndarray | None = None, **sizes: int
) -> WeightView:
    """The view of a kernel by an einops pattern from its tensor of this shape."""
    return WeightView(f"{kind.tensor(module)}.weight", shape, partial(rearrange, pattern=pattern, **sizes), order)


HEADS = "(heads d_head) d_in -> d_in heads d_head"


def _gqa(kind: Architecture, model: ModelConfig, interleaved: bool) -> dict[str, WeightView]:
    views, first = {}, 0
    is_joined = kind.tensor("attention.q") == kind.tensor("attention.k")
    every = model.d_head * (model.heads + 2 * model.kv_heads)  # rows of all three in one tensor
    for name, heads in (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads)):
        module, out = f"attention.{name}", heads * model.d_head
        rows = partial(_rows, first if is_joined else 0, out, heads)
        if kind.joined_by_head:
            rows = partial(_rows_of_heads, "qkv".index(name), heads)
        size, order, first = (
            every if is_joined else out,
            None if name == "v" else _order(model, interleaved),
            first + out,
        )
        tensor = kind.tensor(module)
        views[f"{module}.kernel"] = WeightView(
            f"{tensor}.weight", (size, model.d_model), partial(rows, pattern=HEADS), order
        )
        by_head = "(heads d_head) -> heads d_head"
        if model.qkv_bias:
            views[f"{module}.bias"] = WeightView(f"{tensor}.bias", (size,), partial(rows, pattern=by_head), order)
        if model.qk_norm and name != "v" and model.qk_norm_scale != UNSCALED:
            scales = f"{kind.tensor(f'{module}_norm')}.weight"
            if model.qk_norm_over == "projection":
                view = partial(rearrange, pattern=by_head, heads=heads)
                views[f"{module}_norm.scale"] = WeightView(scales, (out,), view, order)
            else:
                views[f"{module}_norm.scale"] = WeightView(scales, (model.d_head,), np.asarray, order)
    return views


def _rows(first: int, count: int, heads: int, tensor: np.ndarray, pattern: str) -> np.ndarray:
    return rearrange(tensor[first : first + count], pattern, heads=heads)


def _rows_of_heads(place: int, heads: int, tensor: np.ndarray, pattern: str) -> np.ndarray:
    """The same, where each head has its rows of queries, keys and values together."""
    split = pattern.replace("(heads d_head)", "(heads qkv d_head)").replace("-> ", "-> qkv ")
    return rearrange(tensor, split, heads=heads, qkv=3)[place]


def _order(model: ModelConfig, interleaved: bool) -> np.ndarray | None:
    """The dims of a head in their order: theirs are rotated first, and ours last; pairs as `weight_views` says. None if
    they are the same."""
    rotated = model.rotated
    if rotated == model.d_head and not interleaved:
        return None
    pairs = np.arange(rotated)
    pairs = rearrange(pairs, "(pair two) -> (two pair)", two=2) if interleaved else pairs
    return np.concatenate([np.arange(rotated, model.d_head), pairs])


def _mla(kind: Architecture, model: ModelConfig, interleaved: bool) -> dict[str, WeightView]:
    heads, width, latent, rope = model.heads, model.d_head, model.d_latent, model.d_rope
    pairs = np.arange(rope)
    pairs = rearrange(pairs, "(pair two) -> (two pair)", two=2) if interleaved else pairs
    down = f"{kind.tensor('attention.down')}.weight", (latent + rope, model.d_model)
    up = f"{kind.tensor('attention.up')}.weight", (heads * 2 * width, latent)
    # Keys and values are adjacent in each head.
    halves = partial(rearrange, pattern="(heads kv d_head) latent -> kv latent heads d_head", heads=heads, kv=2)
    views = {
        "attention.down.kernel": WeightView(*down, lambda tensor: tensor[:latent].T),
        "attention.k_rope.kernel": WeightView(*down, lambda tensor: tensor[latent:].T, pairs),
        "attention.norm.scale": _scale_view(kind, "attention.norm", latent),
        "attention.up_k.kernel": WeightView(*up, lambda tensor: halves(tensor)[0]),
        "attention.up_v.kernel": WeightView(*up, lambda tensor: halves(tensor)[1]),
    }
    order = np.concatenate([np.arange(width), width + pairs])
    first, norm, last = (f"attention.queries_{place}" for place in (0, 1, 3))
    out, narrow = heads * len(order), model.d_latent_q
    if not narrow:
        whole = _kernel_view(kind, "attention.queries", HEADS, out, model.d_model, order=order, heads=heads)
        return views | {f"{first}.kernel": whole}
    return views | {
        f"{first}.kernel": _kernel_view(kind, first, "d_out d_in -> d_in d_out", narrow, model.d_model),
        f"{norm}.scale": _scale_view(kind, norm, narrow),
        f"{last}.kernel": _kernel_view(kind, last, HEADS, out, narrow, order=order, heads=heads),
    }


def of_language_model(tensors: Mapping[str, Tensor], part: LanguageModel | None) -> dict[str, Tensor]:
    """The tensors of a language model by the names that they have alone; `part` says where they are, None: they are
    all."""
    if part is None:
        return dict(tensors)
    renamed = {}
    for name, tensor in tensors.items():
        if not name.startswith(part.others):
            start = next((start for start in part.names if name.startswith(start)), "")
            renamed[part.names.get(start, "") + name.removeprefix(start)] = tensor
    return renamed


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


Weight = Tensor | ScaledTensor | Mxfp4Tensor


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
    fused = {}
    if EXPERT not in ARCHITECTURES[architecture].tensor("mlp.experts.gate"):
        return fused
    for layer, base in enumerate(model.layer_bases):
        if base == "moe":
            fused |= _fused_layer(model, ARCHITECTURES[architecture], layer)
    return fused


def _fused_layer(model: ModelConfig, kind: Architecture, layer: int) -> dict[str, FusedTensor]:
    count, d_model, d_expert = model.experts, model.d_model, model.d_expert
    prefix = f"{kind.tensor('').format(layer=layer)}."

    def kernels(*of_expert: str) -> list[str]:
        templates = [f"{kind.tensor(f'mlp.experts.{name}')}.weight" for name in of_expert]
        return [template.format(layer=layer, expert=expert) for expert in range(count) for template in templates]

    router = kind.tensor("mlp.router").format(layer=layer)
    return {
        prefix + FUSED_GATES_AND_UPS: FusedTensor((count, 2 * d_expert, d_model), kernels("gate", "up")),
        prefix + FUSED_DOWNS: FusedTensor((count, d_model, d_expert), kernels("down")),
        # Here Mixtral uses the same name as the others.
        f"{prefix}{FUSED_ROUTER}.weight": FusedTensor((count, d_model), [f"{router}.weight"]),
    }


def unfused(tensors: Mapping[str, Weight], fused: Mapping[str, FusedTensor]) -> dict[str, Weight]:
    """Tensors by name, with fused ones replaced by their parts."""
    plain = {}
    for name, tensor in tensors.items():
        parts = fused[name].parts if name in fused else [name]
        plain |= zip(parts, tensor.matrices(len(parts)) if name in fused and len(tensor.shape) > 2 else [tensor])
    return plain
