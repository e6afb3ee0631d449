"""Cost of each part of a layer: entries if it is saved, FLOPs if the backward pass recomputes it.

Both follow from the widths of the model; tests/pipeline/test_remat.py compares them with traced steps.
"""

import functools
import itertools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from parallax.config.remat import OF_HEADS, REMAT, SETS, canonical_remat, recomputed_parts
from parallax.config.sections import ATTENTION, MLP, SEQUENTIAL, ModelConfig
from parallax.model.kernels.flops import tokens_read_twice
from parallax.sharding.plan import FLOAT32_BYTES

# Least distance in memory between sets, as a share of the most memory: for each layout of a sweep, for one layout.
APART, FINER = 0.2, 0.04
LEAST_SHARE = 0.01  # of a forward pass; a cheaper part is always recomputed


class PartCost(NamedTuple):
    """Cost per token, over all layers: entries in the model's dtype, and FLOPs of matrix products."""

    width: float
    flops: float


@functools.cache
def part_costs(model: ModelConfig, *, seq: int) -> dict[str, PartCost]:
    """Costs of the parts that the model has. In causal attention a token reads seq / 2 others on average, fewer in a
    window.

    >>> costs = part_costs(ModelConfig(layers=1, d_model=8, d_ff=16, attention="gqa", heads=2, kv_heads=1), seq=4)
    >>> costs["ffn"], costs["swiglu"]
    (PartCost(width=32.0, flops=512.0), PartCost(width=16.0, flops=0.0))
    """
    read, stacks = tokens_read_twice(model.windows, seq), []
    for kind, block in model.blocks.items():
        of_kind = [twice for twice, each in zip(read, model.layer_kinds, strict=True) if each == kind]
        stacks.append(_stack_costs(block, model.base_of(kind), len(of_kind), sum(of_kind)))
    return {part: _added([costs[part] for costs in stacks if part in costs]) for part in model.remat_parts}


def _added(costs: Sequence[PartCost]) -> PartCost:
    return PartCost(*map(sum, zip(*costs, strict=True)))


def _stack_costs(block: ModelConfig, base: str, layers: int, read_twice: float) -> dict[str, PartCost]:
    """The same for layers of one kind, which together read twice so many tokens for each."""
    d, heads, sizes = block.d_model, block.heads * block.d_head, block.sizes
    itemsize = jnp.dtype(block.dtype).itemsize
    of_float32 = FLOAT32_BYTES / itemsize
    # Entries per token in a layer, and parameters that are multiplied to compute them.
    parts: dict[str, tuple[float, float]] = {"out": (d, heads * d), "down": (d, _down_weights(block, base))}
    if block.attention == "mla":
        latents, shared = block.d_latent + block.d_latent_q, block.d_rope
        wide, read = block.heads * sizes["d_qk"], block.d_latent_q or d
        parts["latent"] = latents + shared, d * (latents + shared)
        parts |= {"q": (wide, read * wide), "kv": (2 * heads, block.d_latent * 2 * heads)}
    else:
        values = block.kv_heads * block.d_head
        parts["qk"] = heads + values, d * (heads + values)
        # Recomputing normed queries and keys alone takes no product.
        parts["q"] = heads, d * heads * (not block.qk_norm)
        parts["kv"] = 2 * values, d * (values if block.qk_norm else 2 * values)
    # Saved in the form that 8-bit products read. Router, experts and the product for d_rope read their inputs, too.
    of_mlp = block.saves_8_bits(MLP)
    normed = _normed_width(block.norms_before, [block.saves_8_bits(ATTENTION), of_mlp and base != "moe"], itemsize)
    parts["norm"] = d * normed, 0
    hidden, swiglu = 0, 0
    if base == "moe":
        experts, weights_and_ids = block.experts_per_token * block.d_expert, 2 * block.experts_per_token * of_float32
        parts |= {"router": (block.experts * of_float32, d * block.experts), "dispatch": (d + weights_and_ids, 0)}
        parts["experts"] = 2 * experts, d * 2 * experts
        hidden, swiglu = 2 * sizes["d_shared"], sizes["d_shared"]
    elif base == "dense":
        hidden, swiglu = mlp_kernels(block) * block.d_ff, block.d_ff * (1 / itemsize if of_mlp else 1)
    parts |= {"ffn": (hidden, d * hidden), "swiglu": (swiglu, 0)}
    costs = {part: PartCost(float(layers * width), 2.0 * layers * weights) for part, (width, weights) in parts.items()}
    scores = block.heads * ((sizes["d_qk"] if block.attention == "mla" else block.d_head) + block.d_head)
    return costs | {"core": PartCost(layers * (heads + block.heads * of_float32), float(scores * read_twice))}


def _normed_width(norms: int, in_8_bits: Sequence[bool], itemsize: int) -> float:
    """Copies of a normed input in the model's dtype that attention and the MLP read: their own or a shared one, and for
    each that reads 8 bits one of those."""
    whole = in_8_bits.count(False) if norms == 2 else norms * (not all(in_8_bits))
    return whole + sum(in_8_bits) / itemsize


def mlp_kernels(model: ModelConfig) -> int:
    """The number of kernels of a dense layer's MLP that read d_model."""
    return 1 if model.mlp == "plain" else 2


def unread_flops(model: ModelConfig) -> float:
    """FLOPs per token of products that only the residual stream reads, in all layers. The backward pass recomputes them
    only with remat="stage"."""
    if model.norms_behind:
        return 0.0
    out = sum(block.heads * block.d_head for block in model.block_of_each) * (model.branches != SEQUENTIAL)
    return down_flops(model) + 2.0 * out * model.d_model


def down_flops(model: ModelConfig) -> float:
    """FLOPs per token of the last products of MLPs, in all layers."""
    return 2.0 * sum(map(_down_weights, model.block_of_each, model.layer_bases))


def _down_weights(block: ModelConfig, base: str) -> int:
    """Parameters of the last product of an MLP, for one token."""
    of_experts = block.experts_per_token * block.d_expert + block.sizes["d_shared"]
    return block.d_model * {"dense": block.d_ff, "moe": of_experts}.get(base, 0)


@functools.cache
def recomputed_flops(model: ModelConfig, remat: str, *, seq: int) -> float:
    """FLOPs per token of matrix products that the backward pass recomputes, over all layers."""
    costs = part_costs(model, seq=seq)
    parts = () if remat == "none" else recomputed_parts(remat) or costs
    whole_stage = unread_flops(model) if remat == "stage" else 0
    return whole_stage + sum(costs[part].flops for part in parts if part in costs)


@functools.cache
def forward_flops(model: ModelConfig, *, seq: int) -> float:
    """FLOPs per token of matrix products of the layers' forward pass."""
    return recomputed_flops(model, "stage", seq=seq)


def sets_to_try(model: ModelConfig, *, seq: int, exchanges: bool = False, apart: float = APART) -> list[str]:
    """Values of `pipeline.remat` to try: the named ones and sets on the Pareto front of memory and recomputed FLOPs.

    Successive sets differ in memory by at least the share `apart` of the most. Queries, keys and values are recomputed
    together, and parts of almost no cost are recomputed in every set. If ranks exchange tokens (`exchanges`), each set
    is tried also with the received tokens saved.

    >>> sets_to_try(ModelConfig(attention="gqa", layers=1), seq=2048)
    ['none', 'elementwise', 'attention', 'layer', 'stage', 'elementwise qkv', 'elementwise ffn', 'elementwise qkv ffn']
    """
    costs = part_costs(model, seq=seq)
    dear = LEAST_SHARE * forward_flops(model, seq=seq)
    with_products = [part for part in costs if costs[part].flops > dear]
    units = [{part} for part in with_products if part not in OF_HEADS] + [set(OF_HEADS) & set(with_products)]
    subsets = [set().union(*x) for n in range(len(units) + 1) for x in itertools.combinations(units, n)]
    everything = sum(costs[part].width for part in with_products)
    kept, least = [], math.inf
    priced = [(sum(costs[part].flops for part in parts), sum(costs[part].width for part in parts)) for parts in subsets]
    for (_, width), parts in sorted(zip(priced, subsets), key=lambda priced: (priced[0][0], -priced[0][1])):
        saved = everything - width
        if saved <= least - apart * everything:
            kept.append(parts)
            least = saved
    free = [set(costs) - set(with_products)]
    free += [part_set - {"dispatch"} for part_set in free if exchanges]
    sets = {name_of_set(model, free_parts | parts): None for free_parts in free for parts in kept}
    return [*dict.fromkeys([*REMAT, *sets])]


def name_of_set(model: ModelConfig, parts: Collection[str]) -> str:
    """The shortest name of a set of parts of the model: "layer" for all of them."""
    of_model = set(model.remat_parts)
    if set(parts) == of_model:
        return "layer"
    for name in reversed(SETS):
        covered = of_model & set(SETS[name])
        if covered <= set(parts):
            return canonical_remat(" ".join([name, *(set(parts) - covered)]))
    return canonical_remat(" ".join(parts))
