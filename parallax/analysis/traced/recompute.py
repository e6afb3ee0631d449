"""Cost of each part of a layer: entries if it is saved, FLOPs if the backward pass recomputes it.

Both follow from the widths of the model; tests/pipeline/test_remat.py compares them with traced steps.
"""

import functools
import itertools
import math
from collections import Counter
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
    kinds = Counter(model.layer_kinds)
    d, heads, sizes = model.d_model, model.heads * model.d_head, model.sizes
    itemsize = jnp.dtype(model.dtype).itemsize
    of_float32 = FLOAT32_BYTES / itemsize
    # Entries per token in a layer that has the part, and parameters that are multiplied to compute them.
    attention = {"out": (d, heads * d)}
    if model.attention == "mla":
        latents, shared = model.d_latent + model.d_latent_q, model.d_rope
        wide, read = model.heads * sizes["d_qk"], model.d_latent_q or d
        attention["latent"] = latents + shared, d * (latents + shared)
        attention |= {"q": (wide, read * wide), "kv": (2 * heads, model.d_latent * 2 * heads)}
    else:
        values = model.kv_heads * model.d_head
        attention["qk"] = heads + values, d * (heads + values)
        # Recomputing normed queries and keys alone takes no product.
        attention["q"] = heads, d * heads * (not model.qk_norm)
        attention["kv"] = 2 * values, d * (values if model.qk_norm else 2 * values)
    scores = model.heads * ((sizes["d_qk"] if model.attention == "mla" else model.d_head) + model.d_head)
    scores *= sum(tokens_read_twice(model.windows, seq))
    experts = model.experts_per_token * model.d_expert
    weights_and_ids = 2 * model.experts_per_token * of_float32
    mixture = {"router": (model.experts * of_float32, d * model.experts), "dispatch": (d + weights_and_ids, 0)}
    mixture["experts"] = 2 * experts, d * 2 * experts
    layers = {part: (model.layers, *cost) for part, cost in attention.items()}
    layers |= {part: (kinds["moe"], *cost) for part, cost in mixture.items()}
    dense = sum(model.dense_widths)
    hidden = mlp_kernels(model) * dense + 2 * kinds["moe"] * sizes["d_shared"]
    layers |= {"ffn": (1, hidden, d * hidden), "down": (model.layers, d, down_flops(model) / 2 / model.layers)}
    # Saved in the form that 8-bit products read. Router, experts and the product for d_rope read their inputs, too.
    of_heads, of_mlp = model.saves_8_bits(ATTENTION), model.saves_8_bits(MLP)
    rounded = ((count, [of_heads, of_mlp and kind != "moe"]) for kind, count in kinds.items())
    normed = sum(count * _normed_width(model.norms_before, in_8_bits, itemsize) for count, in_8_bits in rounded)
    layers["norm"] = 1, d * normed, 0
    of_mlp = 1 / itemsize if of_mlp else 1
    layers["swiglu"] = 1, dense * of_mlp + kinds["moe"] * sizes["d_shared"], 0
    costs = {part: PartCost(float(n * width), 2.0 * n * weights) for part, (n, width, weights) in layers.items()}
    costs["core"] = PartCost(model.layers * (heads + model.heads * of_float32), float(scores))
    return {part: costs[part] for part in model.remat_parts}


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
    out = 0 if model.branches == SEQUENTIAL else 2.0 * model.layers * model.heads * model.d_head * model.d_model
    return down_flops(model) + out


def down_flops(model: ModelConfig) -> float:
    """FLOPs per token of the last products of MLPs, in all layers."""
    kinds = Counter(model.layer_kinds)
    moe = model.experts_per_token * model.d_expert + model.sizes["d_shared"]
    return 2.0 * model.d_model * (sum(model.dense_widths) + kinds["moe"] * moe)


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
