"""What a run needs, computed before it runs: parameters, bytes on each device, FLOPs for each token."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from parallax.model import ModelConfig
from parallax.sharded_model import ShardedModel

COMPONENTS = ("embedding", "attention", "mlp", "norms", "head")
# Forward is 2 FLOPs a weight and token, backward twice that: once for weights, once for activations.
FLOPS_PER_WEIGHT = 6


class Memory(NamedTuple):
    """Bytes on the device that holds most."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int


def memory(model: ShardedModel, opt_state: Any, *, global_batch: int, seq: int) -> Memory:
    """What a step keeps; `opt_state` is a tree of ShapeDtypeStruct with shardings."""
    parameters = bytes_on_device(zip(jax.tree.leaves(model.shapes), jax.tree.leaves(model.shardings)))
    optimizer = bytes_on_device((leaf, leaf.sharding) for leaf in jax.tree.leaves(opt_state))
    # Gradients are summed in float32, cut as their parameters are, whatever the dtype of compute.
    return Memory(
        parameters, parameters, optimizer, activation_bytes(model, global_batch=global_batch, seq=seq)
    )


def parameters_by_component(shapes: Any) -> dict[str, int]:
    """Number of parameters of each of COMPONENTS, over all layers and devices.

    >>> table, scale = jax.ShapeDtypeStruct((512, 64), "float32"), jax.ShapeDtypeStruct((64,), "float32")
    >>> parameters_by_component({"embedding": {"table": table}, "head": {"norm": {"scale": scale}}})
    {'embedding': 32768, 'attention': 0, 'mlp': 0, 'norms': 64, 'head': 0}
    """
    counts = dict.fromkeys(COMPONENTS, 0)
    for path, leaf in _named_leaves(shapes):
        counts[component_of(path)] += math.prod(leaf.shape)
    return counts


def component_of(path: str) -> str:
    """Which of COMPONENTS a parameter belongs to, by its path.

    >>> [component_of(path) for path in ("blocks/attention/norm/scale", "blocks/mlp/gate/kernel")]
    ['norms', 'mlp']
    """
    if path.endswith("/scale"):
        return "norms"
    names = path.split("/")
    return names[1] if names[0] == "blocks" else names[0]


def bytes_on_device(arrays: Iterable[tuple[Any, jax.sharding.Sharding]]) -> int:
    """Bytes of each device's pieces of arrays, given with their shardings."""
    return sum(math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize for x, sharding in arrays)


def activation_bytes(model: ShardedModel, *, global_batch: int, seq: int) -> int:
    """Activations that a device keeps between a microbatch's forward and backward pass, in all slots.

    slots x tokens of a microbatch on the device x what one token keeps in the layers of a stage. With remat
    "stage" a token keeps the stage's input, with "layer" the input of each layer, with "none" what
    `layer_residuals` says. What a backward pass recomputes, and what embedding and head use, is not in it.
    """
    sizes, itemsize = model.axis_sizes, jnp.dtype(model.model.dtype).itemsize
    tokens = global_batch * seq // (sizes["dp"] * model.pipeline.microbatches)
    layers = model.model.layers // sizes["pp"]
    layer_input = model.model.d_model // sizes["tp"] * itemsize
    kept = {
        "stage": layer_input,
        "layer": layers * layer_input,
        "none": layers * layer_residuals(model.model, seq=seq, tp=sizes["tp"]),
    }
    return model.schedule.slots * tokens * kept[model.pipeline.remat]


def layer_residuals(model: ModelConfig, *, seq: int, tp: int) -> int:
    """Bytes that one token keeps in one layer if nothing is recomputed; an estimate.

    The inputs of both norms, and in float32 what they normalise; the inputs of attention and MLP, gathered
    over tp; q, k and v; the attention weights, seq of them a head, in float32 before and in the compute dtype
    after the softmax (kernel "xla" alone); the attention's result; gate, up and their product.
    """
    itemsize = jnp.dtype(model.dtype).itemsize
    norms = 2 * model.d_model // tp * (itemsize + 4)
    gathered = 2 * model.d_model * itemsize
    heads = model.heads // tp
    qkvo = heads * (2 * qk_width(model) + 2 * model.d_head) * itemsize
    weights = heads * seq * (4 + itemsize) if model.kernel == "xla" else 0
    mlp = 3 * model.d_ff // tp * itemsize
    return norms + gathered + qkvo + weights + mlp


def qk_width(model: ModelConfig) -> int:
    """Width of one query head."""
    return model.sizes["d_qk"] if model.attention == "mla" else model.d_head


def matmul_parameters(model: ModelConfig, shapes: Any) -> int:
    """Parameters that multiply every token: all kernels, and the head's table, tied or not; no embedding."""
    kernels = (math.prod(leaf.shape) for path, leaf in _named_leaves(shapes) if path.endswith("/kernel"))
    return sum(kernels) + model.vocab * model.d_model


def flops_per_token(model: ModelConfig, shapes: Any, *, seq: int) -> int:
    """FLOPs of the model's mathematics for one token, forward and backward; recomputation is not in it.

    6 for each parameter in a matmul; in causal attention a token reads seq / 2 others on average, in each
    head with 2 FLOPs for every entry of q and of v, times 3 for forward and backward.
    """
    attention = 3 * model.layers * seq * model.heads * (qk_width(model) + model.d_head)
    return FLOPS_PER_WEIGHT * matmul_parameters(model, shapes) + attention


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
