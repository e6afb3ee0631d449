"""Parameters by component, their bytes on a device, and the FLOPs of a token."""

import math
from typing import Any

import jax

from parallax.config.sections import ModelConfig

COMPONENTS = ("embedding", "attention", "mlp", "norms", "head")
# Forward is 2 FLOPs a weight and token, backward twice that: once for weights, once for activations.
FLOPS_PER_WEIGHT = 6


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


def bytes_on_device(shapes: Any, shardings: Any) -> int:
    """Bytes of each device's pieces of a tree of arrays."""
    pieces = jax.tree.map(lambda x, sharding: math.prod(sharding.shard_shape(x.shape)), shapes, shardings)
    sizes = jax.tree.map(lambda x, piece: piece * x.dtype.itemsize, shapes, pieces)
    return sum(jax.tree.leaves(sizes))


def qk_width(model: ModelConfig) -> int:
    """Width of one query head."""
    return model.sizes["d_qk"] if model.attention == "mla" else model.d_head


def matmul_parameters(model: ModelConfig, shapes: Any) -> int:
    """Parameters that multiply every token: all kernels, and the head's table, tied or not, without rows that pad its
    vocab; no embedding."""
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
