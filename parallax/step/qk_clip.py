"""QK-clip of MuonClip (Kimi K2, arXiv 2507.20534, section 2.1): heads whose logits grow too large are scaled down.

After an update, for each head with a largest logit S of the step's batch over the limit t = model.qk_clip, logits are
multiplied by g = t / S. Symbols of the paper: W_q and W_k of a head by the root of g; with latent attention the parts
of a head by the root, its rotated part of the queries by g, and the rotated keys, which all heads share, not at all.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from parallax.config.sections import BLOCKS, ModelConfig
from parallax.errors import ConfigError, quoted
from parallax.pipeline import ShardedModel
from parallax.sharding.collectives import max_over
from parallax.sharding.layers_on_ranks import stacks_of
from parallax.sharding.layout import Layout, named_leaves
from parallax.sharding.parameter import Role
from parallax.sharding.plan import ParameterPlan
from parallax.sharding.rounding import random_bits, to_bfloat16

MAX_LOGIT = "attention/max_logit"  # of a step's metrics
SCALED = (Role.WEIGHT, Role.BIAS)
LARGEST_LOGITS = "largest_logits/of_heads"  # the statistic, in attention
CLIPPED_FIELD = "clipped"  # used like a name of an optimizer's field


def logits_of(plan: Any) -> dict[str, ParameterPlan]:
    """The rows of largest logits, by name; none if heads are not clipped."""
    return {name: row for name, row in plan.statistics.items() if row.spec.role == Role.LOGITS}


def max_logit_of(model: ShardedModel, statistics: Mapping[str, Array]) -> dict[str, Array]:
    """The metric of a model whose heads are clipped, empty for others: the largest logit of the step, 0 or more."""
    rows = logits_of(model.plan)
    if not rows:
        return {}

    def local(pieces: dict[str, Array]) -> Array:
        """Communication: forward all_reduce of each stack's largest logit over the axes that cut it."""
        largest = [max_over(piece.max(initial=0), rows[name].at_rest.used_axes()) for name, piece in pieces.items()]
        return jnp.stack(largest).max()

    specs = {name: row.at_rest.spec(model.mesh) for name, row in rows.items()}
    given = {name: statistics[name] for name in rows}
    largest = jax.shard_map(local, mesh=model.mesh, in_specs=(specs,), out_specs=P(), check_vma=True)
    return {MAX_LOGIT: largest(given)}


def with_clipped_heads(
    model: ShardedModel, params: Any, statistics: Mapping[str, Array], noise: Array | None = None
) -> Any:
    """Parameters in which heads are scaled down whose largest logit exceeds the limit. Those in bfloat16 are rounded
    with `noise`, int32 [2], (seed, step)."""
    leaves, rows, limit = named_leaves(params), named_leaves(model.plan.rows), model.config.qk_clip
    for name in logits_of(model.plan):
        factors = _factors(_layers_of(model, name), limit / jnp.maximum(statistics[name], limit))
        for projections, factor in zip(_projections(model, name), factors, strict=True):
            for clipped in projections:
                x = leaves[clipped]
                scaled = x.astype(jnp.float32) * _along(rows[clipped].at_rest, x.shape, factor)
                leaves[clipped] = scaled if x.dtype == jnp.float32 else _rounded(scaled, clipped, noise)
    return jax.tree.unflatten(jax.tree.structure(params), leaves.values())


def check_clipped(model: ShardedModel) -> None:
    """Raise ConfigError if heads of some layers cannot be clipped, or if a projection that it scales is not trained."""
    config, rows, statistics = model.config, named_leaves(model.plan.rows), logits_of(model.plan)
    asked, clipped = f"model.qk_clip={config.qk_clip}", {row.spec.stack for row in statistics.values()}
    for kind, stack in stacks_of(config.layer_kinds).items() if config.qk_clip else ():
        if stack not in clipped:
            raise ConfigError(
                f"{asked} clips heads of the package's attention, which layers {kind!r} of model.kinds="
                f"{quoted(config.kinds)} do not have; use qk_clip=0, or that attention."
            )
    for name in chain(*(chain(*_projections(model, name)) for name in statistics)):
        if not rows[name].spec.is_trained:
            of_adapters = f"model.lora_rank={config.lora_rank}", "lora_rank=0"
            of_frozen = f"optimizer.frozen={quoted(model.settings.optimizer.frozen)}", "train it"
            cause, advice = of_adapters if config.lora_rank else of_frozen
            raise ConfigError(f"{asked} scales {name} down, which {cause} does not train; use qk_clip=0, or {advice}.")


def _layers_of(model: ShardedModel, statistic: str) -> ModelConfig:
    """The settings of the layers with this statistic."""
    kind = model.plan.statistics[statistic].spec.stack.removeprefix(BLOCKS).strip("/")
    blocks = model.config.blocks
    return blocks[kind] if kind else next(iter(blocks.values()))


def _projections(model: ShardedModel, statistic: str) -> list[list[str]]:
    """The kernels and biases that make the heads of queries, and those of keys if these are scaled."""
    layers, attention = _layers_of(model, statistic), statistic.removesuffix(LARGEST_LOGITS)
    last = "queries_3" if layers.d_latent_q else "queries_0"  # of MLA's layers for queries
    modules = (last, "up_k") if layers.attention == "mla" else ("q",) if _shares_keys(layers) else ("q", "k")
    names = [name for name, row in named_leaves(model.plan.rows).items() if row.spec.role in SCALED]
    return [[name for name in names if name.startswith(f"{attention}{module}/")] for module in modules]


def _shares_keys(layers: ModelConfig) -> bool:
    """Whether query heads share a key head, in attention other than MLA."""
    return layers.kv_heads < layers.heads


def _factors(layers: ModelConfig, factors_LH: Array) -> tuple[Array, ...]:
    """The factors of `_projections`. If query heads share a key head, all of it is on queries, so that other heads of
    the group keep their logits."""
    root_LH = jnp.sqrt(factors_LH)
    if layers.attention == "mla":
        is_rotated = jnp.arange(layers.sizes["d_qk"]) >= layers.d_head
        return jnp.where(is_rotated, factors_LH[..., None], root_LH[..., None]), root_LH
    return (factors_LH,) if _shares_keys(layers) else (root_LH, root_LH)


def _rounded(x: Array, name: str, noise: Array) -> Array:
    """A parameter in bfloat16; entries that it can hold stay as they are."""
    return to_bfloat16(x, random_bits(noise, CLIPPED_FIELD, name, x.shape))


def _along(layout: Layout, shape: tuple[int, ...], factors: Array) -> Array:
    """Factors of layers and heads, and of a head's entries if they differ, with dims of size 1 for a parameter's other
    ones."""
    dims = ("layers", "heads", "kv_heads", "d_qk")[: factors.ndim + 1]
    return factors.reshape([size if name in dims else 1 for name, size in zip(layout.names, shape, strict=True)])
