"""Parameters and FLOPs of the model, and FLOPs of the traced step on each device."""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from parallax.analysis.traced.trace import Origin, abstract_mesh, step_program, walk
from parallax.config.sections import (
    ATTENTION,
    AXES,
    BLOCK_SCALES,
    COMPUTE,
    EIGHT_BITS,
    EMBEDDING,
    EXPERT_ADAPTER,
    EXPERTS,
    HEAD,
    MLP,
    ModelConfig,
)
from parallax.hardware.chips import Chip
from parallax.jaxprs import SCALED_MATMUL
from parallax.model.experts.grouped_kernel import GROUPED_SCOPE
from parallax.model.families import CONTEXTS, RING, WHOLE
from parallax.model.kernels.flops import (
    KERNEL_PRODUCTS,
    attention_flops,
    kernel_flops,
    kernel_in_window,
    tokens_read_twice,
)
from parallax.model.mask import order_in, window_in
from parallax.model.products import WIDEST_BLOCKS, product_of
from parallax.pipeline import ShardedModel
from parallax.sharding.activations import CONTEXT_AXIS
from parallax.sharding.mesh import is_simulated
from parallax.sharding.parameter import Declared, Role, declared_leaves

NORMS = "norms"
COMPONENTS = (EMBEDDING, ATTENTION, MLP, NORMS, HEAD)  # in this order, before other parts of layers
# For a weight and token: forward and the gradient of the activations take 2 FLOPs each, and that of the weight 2.
FLOPS_PER_WEIGHT, FLOPS_PER_GRADIENT, FLOPS_PER_PRODUCT = 4, 2, 2


def parameters_by_component(declared: Any, *, trained: bool = False) -> dict[str, int]:
    """Number of parameters of each of COMPONENTS, and of other parts of layers, over all layers and devices; norms are
    counted together. Maxima of steps, as scales of 8-bit products, are not counted; with `trained`, neither are
    parameters without a gradient."""
    counts = Counter(dict.fromkeys(COMPONENTS, 0))
    for leaf in declared_leaves(declared):
        if trained and leaf.spec.is_constant:
            continue
        if not leaf.spec.is_maximum:
            counts[NORMS if leaf.spec.role == Role.NORM else leaf.spec.part or "other"] += math.prod(leaf.value.shape)
    return dict(counts)


def active_parameters(model: ModelConfig, counts: Mapping[str, int]) -> dict[str, int]:
    """Parameters active for one token, by component: of the experts, those that it is sent to.

    >>> active_parameters(ModelConfig(experts=8, experts_per_token=2), {"attention": 10, "experts": 80})
    {'attention': 10, 'experts': 20}
    """
    share = Fraction(model.experts_per_token, model.experts)
    return {name: int(count * share) if name in (EXPERTS, EXPERT_ADAPTER) else count for name, count in counts.items()}


def qk_width(model: ModelConfig) -> int:
    """Width of one query head."""
    return model.sizes["d_qk"] if model.attention == "mla" else model.d_head


def matmul_parameters_by_stack(model: ModelConfig, declared: Any, *, trained: bool = False) -> dict[str, int]:
    """Parameters of layers' matrix products for one token, of the experts only those that it is sent to, by the name of
    their stack, as "blocks" or "blocks/moe"; with `trained`, only weights that are."""
    counts_of: dict[str, Counter] = defaultdict(Counter)
    for leaf in declared_leaves(declared):
        if leaf.spec.role == Role.WEIGHT and leaf.spec.stack:
            counted = leaf.spec.is_trained or not trained
            counts_of[leaf.spec.stack][leaf.spec.part] += math.prod(leaf.value.shape) if counted else 0
    return {stack: sum(active_parameters(model, counts).values()) for stack, counts in counts_of.items()}


def weight_flops_by_stack(model: ModelConfig, declared: Any) -> dict[str, int]:
    """FLOPs of the layers' products with weights for one token, forward and backward, by the name of their stack."""
    each, trained = (matmul_parameters_by_stack(model, declared, trained=only) for only in (False, True))
    return {stack: FLOPS_PER_WEIGHT * each[stack] + FLOPS_PER_GRADIENT * trained[stack] for stack in each}


def flops_per_head_weight(declared: Any) -> int:
    """FLOPs of the head for one token and entry of its table, forward and backward."""
    tables = {leaf.spec.part: leaf for leaf in declared_leaves(declared) if leaf.spec.role == Role.TABLE}
    return FLOPS_PER_WEIGHT + FLOPS_PER_GRADIENT * tables.get(HEAD, tables[EMBEDDING]).spec.is_trained


def flops_per_token(model: ModelConfig, declared: Any, *, seq: int) -> int:
    """Model FLOPs for one token, forward and backward, without recomputation.

    6 for each active parameter of a matmul, 4 if it is not trained. In causal attention a token reads seq / 2 others on
    average, fewer in a window, in each head with 2 FLOPs for every entry of q and of v, times 3 for forward and
    backward.
    """
    layers, head = sum(weight_flops_by_stack(model, declared).values()), model.vocab * model.d_model
    return layers + flops_per_head_weight(declared) * head + scores_flops(model, seq)


def flops_in_8_bits_per_token(model: ModelConfig, declared: Any, chip: Chip) -> int:
    """The part of `flops_per_token` that this chip computes in 8 bits, or 4: see `products_in_8_bits`."""
    counts: Counter = Counter()
    for leaf in declared_leaves(declared):
        counts[leaf.spec.part] += FLOPS_PER_PRODUCT * products_in_8_bits(leaf, chip) * math.prod(leaf.value.shape)
    return sum(active_parameters(model, counts).values())


def products_in_8_bits(kernel: Declared, chip: Chip) -> int:
    """How many of a kernel's three products, forward and for the gradients of input and kernel, this chip computes in
    the 8 bits to which they are rounded, and not in the compute dtype. A device's tokens are taken to be whole
    blocks."""
    spec = kernel.spec
    if spec.role != Role.WEIGHT or spec.products == COMPUTE:
        return 0
    product, sizes = product_of(spec.products), dict(zip(kernel.layout.names, kernel.value.shape))
    width, of_experts = WIDEST_BLOCKS.get(product.scales, 1), spec.part == EXPERTS
    has_units = width == 1 or (product.scales != BLOCK_SCALES and chip.is_microscaled and not of_experts)
    outputs = [name for name in sizes if name not in spec.inputs]
    count = sum(
        bool(kind) and has_units and sizes[summed[-1]] % width == 0
        for kind, summed in ((product.operand, spec.inputs), (product.gradient, outputs))
    )
    if product.weight_gradients == EIGHT_BITS and spec.is_trained and not of_experts:
        count += has_units or product.scales == BLOCK_SCALES  # then scales are of columns
    return count


def scores_flops(model: ModelConfig, seq: int) -> int:
    """FLOPs of causal attention's two products for one token, forward and backward, in all layers."""
    return sum(scores_flops_of_layers(model, seq))


def scores_flops_of_layers(model: ModelConfig, seq: int) -> list[int]:
    """The same for each layer."""
    widths = (block.heads * (qk_width(block) + block.d_head) for block in model.block_of_each)
    return [3 * twice * width for twice, width in zip(tokens_read_twice(model.windows, seq), widths, strict=True)]


GROUPED = ("ragged_dot", "ragged_dot_general")
KERNEL_CALLS = {"pallas_call": "name", "ffi_call": "target_name"}  # the parameter that holds the kernel's name
PRODUCT_PRIMITIVES = ("dot_general", SCALED_MATMUL, *KERNEL_CALLS, *GROUPED)
UNCOUNTED = ("conv_general_dilated",)


def flops_by_direction(program: ClosedJaxpr, *, rank: Mapping[str, int], share_of_rows: float = 1.0) -> dict[str, int]:
    """FLOPs of the matrix products of a traced program that the device at these mesh coordinates executes, 2 for each
    multiply-add, separately for "forward", "backward" and "recompute". Grouped products count rows in use, the share
    `share_of_rows` of all.

    Raises ValueError if the taken side of a branch depends on data and the sides have different costs.

    >>> x = jax.ShapeDtypeStruct((4, 8), "float32")
    >>> square = lambda x: jax.lax.cond(jax.numpy.arange(3)[1] > 0, lambda: x @ x.T, lambda: x[:, :4])
    >>> flops_by_direction(jax.make_jaxpr(square)(x), rank={})
    {'forward': 256}
    """

    def count(equation: JaxprEqn, origin: Origin) -> Counter:
        flops = product_flops(equation, share_of_rows, origin.stack)
        if flops is None:
            name = equation.primitive.name
            raise ValueError(f"{name} multiplies matrices in a way that is not counted here.")
        return Counter({origin.direction: flops})

    return dict(walk(program, rank=rank, count=count))


def product_flops(equation: JaxprEqn, share_of_rows: float = 1.0, stack: str = "") -> int | None:
    """FLOPs of one equation's matrix products; `stack` is that of Origin. None if they cannot be counted."""
    name = equation.primitive.name
    if is_grouped(equation, stack):
        # Without how many rows each group has.
        operands = (var.aval.shape for var in equation.invars if var.aval.ndim > 1)
        return round(share_of_rows * grouped_flops(*operands, equation.outvars[0].aval.shape))
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
    if name == SCALED_MATMUL:
        return 2 * math.prod(equation.outvars[0].aval.shape) * equation.invars[0].aval.shape[-1]
    if name in KERNEL_CALLS:
        floats = [var.aval.shape for var in equation.invars if _is_float(var)]
        return kernel_flops(equation.params[KERNEL_CALLS[name]] or "", floats, window_in(stack), order_in(stack))
    return None if name in UNCOUNTED else 0


def is_grouped(equation: JaxprEqn, stack: str) -> bool:
    """Whether an equation multiplies rows by groups."""
    name = equation.primitive.name
    return name in GROUPED or (name == "pallas_call" and GROUPED_SCOPE in stack)


def _is_float(var: Any) -> bool:
    return jax.numpy.issubdtype(var.aval.dtype, jax.numpy.floating)


def grouped_flops(*shapes: Sequence[int]) -> int:
    """FLOPs of a grouped product of all its rows, from the shapes of its operands, rows first, and of its result: of
    rows with each of their group's matrices, or of rows with rows to such matrices.

    >>> grouped_flops((10, 3), (2, 3, 4), (10, 4)), grouped_flops((10, 3), (10, 4), (2, 3, 4))
    (240, 240)
    """
    return sum(2 * shapes[0][0] * math.prod(dims[1:]) for dims in grouped_matrices(*shapes))


def grouped_matrices(*shapes: Sequence[int]) -> list[Sequence[int]]:
    """Of such shapes those of matrices of all groups: the result, or operands that rows are multiplied with."""
    *operands, result = shapes
    return [result] if len(result) == 3 else [shape for shape in operands if len(shape) == 3]


class Flops(NamedTuple):
    """FLOPs of matrix products in a step, of an average device.

    `model` is 6 for each parameter of a matmul and token, plus causal attention. The next four are executed, too.
    `masked`: scores that causality hides, or that a kernel recomputes. `padding`: padded heads and vocab, rows that pad
    an expert's blocks, and other products of layers. `repeated`: work that several devices duplicate, or whose result
    is unused. `recomputed`: forward work repeated in the backward pass. `waiting` is not executed: it is what a rank
    could execute while it waits for others. A tick lasts as long as its slowest rank.
    """

    model: float
    masked: float
    padding: float
    repeated: float
    recomputed: float
    waiting: float

    @property
    def executed(self) -> float:
        """FLOPs that an average device executes."""
        return sum(self) - self.waiting

    @property
    def mfu_ceiling(self) -> float:
        """Upper limit of MFU: 1 if only the model's products are executed and no rank waits."""
        return self.model / sum(self)


def flops_breakdown(model: ShardedModel, global_batch: int, seq: int, *, entries: int | None = None) -> Flops:
    """The FLOPs of `loss_and_grad`, from its traced program; the mesh may be abstract.

    `entries` is the number of tokens in the vocab, if smaller than the vocab; padding rows are not the model's.
    """
    tokens, devices = global_batch * seq, math.prod(model.axis_sizes.values())
    counted = _countable(model)
    ranks = _by_rank(counted, global_batch, seq)
    directions = ("forward", "backward", "recompute")
    mean = {name: sum(rank.get(name, 0) for rank in ranks) / len(ranks) for name in directions}
    (of_one,) = _by_rank(_on_one_device(counted), global_batch, seq)
    alone, on_one = sum(of_one.values()) / devices, _attention_beyond_model(_on_one_device(counted), global_batch, seq)
    per_entry = flops_per_head_weight(model.plan.declared)
    counted_twice = (model.config.vocab - entries if entries else 0) * model.config.d_model
    useful = (
        (flops_per_token(model.config, model.plan.declared, seq=seq) - per_entry * counted_twice) * tokens / devices
    )
    masked = _attention_beyond_model(counted, global_batch, seq) / devices
    return Flops(
        model=useful,
        masked=masked,
        padding=alone - useful - on_one / devices,
        # Blocks of scores are smaller if cp shards seq, and fewer scores are masked.
        repeated=mean["forward"] + mean["backward"] - alone - (masked - on_one / devices),
        recomputed=mean["recompute"],
        waiting=_waiting(model, _layer(model, mean, tokens), seq),
    )


def _countable(model: ShardedModel) -> ShardedModel:
    """The model with countable attention: an abstract mesh on which cuDNN's kernels are calls with known FLOPs."""
    if model.config.kernel != "cudnn":
        return model
    return model.replace(mesh=abstract_mesh(model.axis_sizes))


def _on_one_device(model: ShardedModel) -> ShardedModel:
    """The model on a mesh of one device, without recomputation and without padded chunks of tokens."""
    pipeline = dataclasses.replace(model.pipeline, schedule="gpipe", virtual=1, remat="none")
    loss = dataclasses.replace(model.loss_config, chunk_tokens=1)
    layout = dataclasses.replace(model.layout, expert_chunk_tokens=0)
    mesh = abstract_mesh(dict.fromkeys(AXES, 1), simulated=is_simulated(model.mesh))
    return model.replace(pipeline=pipeline, loss=loss, layout=layout, mesh=mesh)


def _by_rank(model: ShardedModel, global_batch: int, seq: int) -> list[dict[str, int]]:
    """FLOPs by direction of one device of each pipeline rank."""
    program = step_program(model, global_batch, seq)
    places = (dict.fromkeys(model.axis_sizes, 0) | {"pp": rank} for rank in range(model.axis_sizes["pp"]))
    return [flops_by_direction(program, rank=rank, share_of_rows=model.share_of_rows) for rank in places]


def _attention_beyond_model(model: ShardedModel, rows: int, seq: int) -> float:
    """FLOPs of attention's core on all devices, minus those of the model."""
    config = model.config
    causal = scores_flops(config, seq) * rows * seq
    # If all tokens of a row are on one rank, context ranks shard heads instead of queries.
    meets = CONTEXTS[model.layout.context].meets
    shared = meets != WHOLE
    ranks = model.axis_sizes.get(CONTEXT_AXIS, 1) if shared else 1
    sizes = dict(rows=rows, seq=seq, ranks=ranks, ring=meets == RING and ranks > 1, order=model.layout.order)
    products = 0
    for (kind, window), layers in Counter(zip(config.layer_kinds, config.windows, strict=True)).items():
        block = config.blocks[kind]
        kernel = kernel_in_window(config.kernel, window, seq, ranks, qk_width(block))
        sizes |= dict(heads=block.heads, d_qk=qk_width(block), d_v=block.d_head, window=window)
        parts = (attention_flops(kernel, part, **sizes) for part in KERNEL_PRODUCTS[kernel])
        products += layers * ranks * sum(parts)
        if kernel == "splash":  # of each output with its gradient, before both kernels
            products += layers * 2 * rows * block.heads * seq * block.d_head
    return products - causal


def _layer(model: ShardedModel, mean: dict[str, float], tokens: int) -> dict[str, float]:
    """FLOPs of one layer and microbatch on a device, by kind of action. The head's products are left out, since all
    ranks run them at the same time."""
    config, sizes = model.config, model.axis_sizes
    declared, head = model.plan.declared, config.padded_vocab * config.d_model * tokens / math.prod(sizes.values())
    share, of_head = sizes["pp"] / (config.layers * model.pipeline.microbatches), flops_per_head_weight(declared)
    forward, backward = (mean["forward"] - 2 * head) * share, (mean["backward"] - (of_head - 2) * head) * share
    kernels = sum(matmul_parameters_by_stack(config, declared, trained=True).values())
    weights = 2 * kernels * tokens / math.prod(sizes.values()) * share
    backward += mean["recompute"] * share
    weights *= model.schedule.split
    return {"F": forward, "B": backward - weights, "W": weights}


def _waiting(model: ShardedModel, layer: dict[str, float], seq: int) -> float:
    """FLOPs that an average rank could execute while it waits for others in its ticks."""
    schedule, layers = model.schedule, layers_of_stages(model, seq)
    busy = np.zeros((schedule.ticks, schedule.ranks))
    for action, tick in schedule.tick_of.items():
        busy[tick, schedule.rank_of(action.stage)] += layers[action.stage] * layer[action.kind]
    return float((busy.max(axis=1) - busy.mean(axis=1)).sum())


def layers_of_stages(model: ShardedModel, seq: int) -> list[float]:
    """Number of layers of each stage, where each layer counts by its FLOPs relative to an average layer."""
    scores = np.array_split(scores_flops_of_layers(model.config, seq), model.schedule.stages)
    stacks = weight_flops_by_stack(model.config, model.plan.declared)
    weights = [np.array(order.sizes) * (stacks[name] / order.layers) for name, order in model.orders.items()]
    flops = sum(weights) + [of_stage.sum() for of_stage in scores]
    return (flops / (flops.sum() / model.config.layers)).tolist()
