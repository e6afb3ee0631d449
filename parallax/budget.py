"""What a run needs, computed before it runs: parameters, bytes on each device, FLOPs for each token."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from parallax.model import ModelConfig
from parallax.sharded_model import ShardedModel

BATCH_ARRAYS = ("tokens", "labels", "segments", "positions")
COMPONENTS = ("embedding", "attention", "mlp", "norms", "head")
# Forward is 2 FLOPs a weight and token, backward twice that: once for weights, once for activations.
FLOPS_PER_WEIGHT = 6


class Memory(NamedTuple):
    """Bytes on each device.

    `gathered_weights` are copies in the compute dtype: collected over dp, of a layer at a time or of all once a step,
    and, where a schedule runs layers in another order than they are stored in, sent to their ranks.
    `saved_activations` pass from tick to tick: what forward keeps for backward, as many microbatches as the schedule
    has slots, and messages. `recomputed_activations` are those of a layer, or of a stage, during its backward pass.
    """

    parameters: int
    gathered_weights: int
    gradients: int
    optimizer: int
    saved_activations: int
    recomputed_activations: int


def memory(model: ShardedModel, opt_state: Any, *, global_batch: int, seq: int) -> Memory:
    """What a step keeps, from a trace of its start; `opt_state` is a tree of ShapeDtypeStruct with shardings."""
    found = {}

    def start(params, batch, noise):
        found.update(_of_step(model, params, batch, noise))
        return jnp.float32(0)

    batch = dict.fromkeys(BATCH_ARRAYS, jax.ShapeDtypeStruct((global_batch, seq), jnp.int32))
    jax.eval_shape(model.mapped(start, PartitionSpec()), model.shapes, batch, None)
    return Memory(
        parameters=bytes_on_device(model.shapes, model.shardings),
        optimizer=bytes_on_device(opt_state, jax.tree.map(lambda leaf: leaf.sharding, opt_state)),
        **found,
    )


def _of_step(model: ShardedModel, params: Any, batch: Any, noise: Any) -> dict[str, int]:
    """The entries of Memory that live as long as a step, in local view."""
    executor, ends_state, blocks = model.ready(params, batch, noise)
    state, stage = executor.start(ends_state), executor.stage
    layer = stage.gather(jax.tree.map(lambda leaf: leaf[0], blocks))
    _, saved = stage.vjp.forward(layer, state.messages["F"][0], executor.context(jnp.int32(0)))
    again = {"none": 0, "layer": 1, "stage": stage.stage_layers}[model.pipeline.remat]
    copies = (blocks, executor.ends.work.weights) if model.storage.once else (layer,)
    if not model.arrangement.in_order and not model.storage.once:
        copies = (blocks, *copies)
    carried = state.messages, state.kept, state.ends._replace(loss=None, grads=None)
    return {
        "gathered_weights": _bytes(copies),
        "gradients": _bytes((state.grads, state.ends.grads)),
        "saved_activations": _bytes(carried),
        "recomputed_activations": again * _bytes(saved),
    }


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


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
