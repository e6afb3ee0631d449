"""What a run needs, computed before it runs: parameters, bytes on each device, FLOPs for each token."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from parallax.model import ModelConfig
from parallax.notation import Layout
from parallax.schedules import Schedule
from parallax.sharded_model import ShardedModel

COMPONENTS = ("embedding", "attention", "mlp", "norms", "head")
# Forward is 2 FLOPs a weight and token, backward twice that: once for weights, once for activations.
FLOPS_PER_WEIGHT = 6


class Memory(NamedTuple):
    """Bytes on each device.

    `gathered_weights` are those collected over dp: a layer's at a time, or a whole stage's;
    `recomputed_activations` those of one layer, or of the whole stage, during its backward pass.
    """

    parameters: int
    gathered_weights: int
    gradients: int
    optimizer: int
    saved_activations: int
    recomputed_activations: int


def memory(model: ShardedModel, opt_state: Any, *, global_batch: int, seq: int) -> Memory:
    """What a step keeps; `opt_state` is a tree of ShapeDtypeStruct with shardings."""
    parameters = bytes_on_device(model.shapes, model.shardings)
    once = model.pipeline.gather == "step"
    whole = stage_weights(model)
    gathered = whole if once else whole // layers_of_stage(model)
    # Gradients are summed in float32, and cut as the weights that they are of: stored or gathered.
    blocks = bytes_on_device(model.shapes["blocks"], model.shardings["blocks"])
    return Memory(
        parameters=parameters,
        gathered_weights=gathered * jnp.dtype(model.model.dtype).itemsize,
        gradients=parameters - blocks + whole * 4 if once else parameters,
        optimizer=bytes_on_device(opt_state, jax.tree.map(lambda leaf: leaf.sharding, opt_state)),
        saved_activations=activation_bytes(model, global_batch=global_batch, seq=seq),
        recomputed_activations=recomputed_bytes(model, global_batch=global_batch, seq=seq),
    )


def stage_weights(model: ShardedModel) -> int:
    """Weights of a device's own layers once they are gathered over dp."""
    sizes = {axis: size for axis, size in model.axis_sizes.items() if axis != "dp"}
    layouts = jax.tree.leaves(model.layouts["blocks"], is_leaf=lambda leaf: isinstance(leaf, Layout))
    return sum(math.prod(layout.local_shape(model.model.sizes, sizes)) for layout in layouts)


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


def activation_bytes(model: ShardedModel, *, global_batch: int, seq: int) -> int:
    """Activations that a device keeps from tick to tick, for all microbatches in flight.

    Slots x tokens of a microbatch on the device x what one token keeps in the layers of a stage: with remat
    "stage" the stage's input, with "layer" the input of each layer, with "none" what `layer_residuals` says.
    And buffers as wide as a stage's input, see `boundary_buffers`. What a backward pass recomputes, and what
    embedding and head use, is not in it.
    """
    layers, layer_input = layers_of_stage(model), model.model.d_model // model.axis_sizes["tp"]
    layer_input *= jnp.dtype(model.model.dtype).itemsize
    kept = {
        "stage": layer_input,
        "layer": layers * layer_input,
        "none": layers * layer_residuals(model.model, seq=seq, tp=model.axis_sizes["tp"]),
    }
    of_token = model.schedule.slots * kept[model.pipeline.remat] + boundary_buffers(model.schedule) * layer_input
    return microbatch_tokens(model, global_batch=global_batch, seq=seq) * of_token


def boundary_buffers(schedule: Schedule) -> int:
    """Microbatches' worth of what stages pass on, as every rank holds it.

    Messages that have arrived, forward and backward; and at the ends of the pipeline the gradients of the last
    stage's outputs, or, where ranks share embedding and head, all inputs of the first and outputs of the last.
    """
    ends = 2 * schedule.microbatches if schedule.head == "between" else schedule.slots
    return 2 * schedule.input_slots + ends


def recomputed_bytes(model: ShardedModel, *, global_batch: int, seq: int) -> int:
    """Activations that the backward pass of a microbatch makes again: of a layer, or of all in the stage."""
    layers = {"none": 0, "layer": 1, "stage": layers_of_stage(model)}[model.pipeline.remat]
    of_token = layer_residuals(model.model, seq=seq, tp=model.axis_sizes["tp"])
    return layers * microbatch_tokens(model, global_batch=global_batch, seq=seq) * of_token


def microbatch_tokens(model: ShardedModel, *, global_batch: int, seq: int) -> int:
    """Tokens of a microbatch on one device."""
    return global_batch * seq // (model.axis_sizes["dp"] * model.pipeline.microbatches)


def layers_of_stage(model: ShardedModel) -> int:
    """Layers that a device holds its share of."""
    return model.model.layers // model.axis_sizes["pp"]


def layer_residuals(model: ModelConfig, *, seq: int, tp: int) -> int:
    """Bytes that one token keeps in one layer if nothing is recomputed, within a few percent.

    Of what automatic differentiation keeps, in the compute dtype unless said otherwise: for each norm three
    copies of its input in float32, and its output gathered over tp; q, k, v (as wide as k) and the attention's
    result; with the kernel "xla", for each head and key two attention weights in float32, one in the compute
    dtype and one bit of mask in a byte; six products as wide as d_ff; in mla the latent's norm.
    """
    itemsize, heads = jnp.dtype(model.dtype).itemsize, model.heads // tp
    norms = 2 * 3 * 4 * model.d_model // tp + 2 * itemsize * model.d_model
    attention = heads * (3 * qk_width(model) + model.d_head) * itemsize
    weights = heads * seq * (2 * 4 + itemsize + 1) if model.kernel == "xla" else 0
    mlp = 6 * model.d_ff // tp * itemsize
    latent = 3 * 4 * model.d_latent // tp if model.attention == "mla" else 0
    return norms + attention + weights + mlp + latent


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
