"""The weights of a rank's layers in a step: as they rest in it, and as a layer reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import Array

from parallax.config.sections import DELAYED
from parallax.model.products import (
    apart,
    largest_kernels,
    largest_weights,
    product_of,
    rounded_kernels,
    with_largest_weights,
)
from parallax.pipeline.model_on_mesh import ModelOnMesh
from parallax.sharding.plan import entry
from parallax.sharding.slots import read_entry


@dataclasses.dataclass(frozen=True, eq=False)
class LayerWeights:
    """The resident weights of layers of one kind, with a leading dim of places. A layer gathers them by the plan."""

    model: ModelOnMesh
    stack: str  # name in the tree of parameters, as in ModelOnMesh.orders
    resident: Any

    @staticmethod
    def of_step(model: ModelOnMesh, resident: Sequence[Any], *, trains: bool) -> Sequence[LayerWeights]:
        """Those of each kind of layers."""
        return [LayerWeights(model, *each) for each in zip(model.orders, resident, strict=True)]

    def gathered(self, place: Array | int, x: Array | None = None) -> dict[str, Any]:
        """The collections of a layer's weights, gathered; on simulated devices only after `x`, which its pass reads
        first."""
        weights = jax.tree.map(lambda weight: read_entry(weight, place), self.resident)
        weights = self.model.devices.after(weights, x)
        return {"params": self.model.plan.use(weights, self.stack)}


@dataclasses.dataclass(frozen=True, eq=False)
class RoundedWeights(LayerWeights):
    """Kernels of 8-bit products are rounded before they are gathered, and sent in 8 bits; those that no use gathers are
    rounded once for all uses."""

    maxima: Any  # the largest magnitudes of kernels, None if no scale follows from them
    largest: Mapping[tuple[str, ...], Array]  # those that products do not measure, if scales are delayed

    @staticmethod
    def of_step(model: ModelOnMesh, resident: Sequence[Any], *, trains: bool) -> Sequence[LayerWeights]:
        plan, dtype, form = model.plan, model.config.dtype, model.config.matmul_form
        product, pairs = product_of(form), [*zip(resident, map(plan.scales, model.orders), strict=True)]
        maxima = [None if product.known else largest_kernels(*pair, dtype) for pair in pairs]
        delayed = trains and product.scales == DELAYED
        largest = [largest_weights(*pair, dtype) if delayed else {} for pair in pairs]
        rounded = [rounded_once(model, *each) for each in zip(model.orders, resident, maxima, strict=True)]
        return [RoundedWeights(model, *each) for each in zip(model.orders, rounded, maxima, largest, strict=True)]

    def gathered(self, place: Array | int, x: Array | None = None) -> dict[str, Any]:
        plan, config = self.model.plan, self.model.config
        weights = jax.tree.map(lambda weight: read_entry(weight, place), self.resident)
        weights = self.model.devices.after(weights, x)
        maxima = None if self.maxima is None else jax.tree.map(lambda most: read_entry(most, place), self.maxima)
        given = plan.scales(self.stack), config.dtype, config.matmul_form, maxima
        return apart(plan.use(rounded_kernels(weights, *given), self.stack), *given)

    def completed(self, grads: Any) -> Any:
        """Sums of gradients of these layers after all passes, with the maxima that products do not measure."""
        return with_largest_weights(grads, self.largest)


def rounded_once(model: ModelOnMesh, stack: str, weights: Any, maxima: Any) -> Any:
    """A stack's resident weights, in which kernels of 8-bit products that no use gathers are rounded for all uses."""
    rows = entry(model.plan.rows, stack)
    scales = jax.tree.map(lambda row: "" if row.is_gathered_per_use else row.spec.scales, rows)
    given = scales, model.config.dtype, model.config.matmul_form
    return jax.vmap(lambda weights, maxima: rounded_kernels(weights, *given, maxima))(weights, maxima)
