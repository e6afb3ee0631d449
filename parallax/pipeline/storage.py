"""How parameters are stored, how the ticks get them, and how gradients come back: FSDP, and the layers' order."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from parallax.pipeline.arrangement import Arrangement
from parallax.sharding.collectives import all_gather, exchange_and_add, reduce_scatter, sum_over
from parallax.sharding.layout import Layout, map_layouts
from parallax.sharding.mesh import AXES

ENDS = ("embedding", "head")
SMALL = 1 << 18  # entries; below, sending takes less time than starting to send


@dataclasses.dataclass(frozen=True)
class Storage:
    """Of a model's parameters, in local view. `layouts` are those that are stored, `used` those that the ticks find: a
    rank's layers in the order in which it runs them, and the tables of embedding and head, which all ranks use, not
    cut over pp. The parts in `once`, of "blocks", "embedding" and "head", are gathered over dp before the ticks and
    scattered after them; of others a layer's weights, or a table, when they are used. Weights are gathered in `dtype`;
    gradients are float32, and travel over dp as `reduce` says: see FsdpConfig.
    """

    layouts: Any
    used: Any
    arrangement: Arrangement
    dtype: str
    reduce: str
    gather_first: int  # see all_gather
    once: frozenset[str]

    def blocks(self, stored: Any) -> Any:
        """The weights of this rank's layers, as the ticks find them."""
        cast = map_layouts(self._cast, self.used["blocks"], stored)
        leaves, structure = jax.tree.flatten(cast)
        blocks = jax.tree.unflatten(structure, self.arrangement.to_stages(self._stored_blocks, leaves))
        return self._gathered(self.used["blocks"], blocks) if "blocks" in self.once else blocks

    def block_grads(self, grads: Any) -> Any:
        """The inverse, for gradients."""
        if "blocks" in self.once:
            grads = self._scattered(self.used["blocks"], grads)
        leaves, structure = jax.tree.flatten(grads)
        return jax.tree.unflatten(structure, self.arrangement.to_model(self._stored_blocks, leaves))

    def ends(self, stored: Any) -> dict[str, Any]:
        """The weights of embedding and head, as the ticks find them."""
        ends = {part: self._from_ranks(part, stored[part]) for part in ENDS}
        return ends | {part: self._gathered(self.used[part], ends[part], part) for part in ENDS if part in self.once}

    def end_grads(self, grads: dict[str, Any]) -> dict[str, Any]:
        """The inverse, for gradients."""
        grads = grads | {
            part: self._scattered(self.used[part], grads[part], part) for part in ENDS if part in self.once
        }
        return {part: self._to_ranks(part, grad) for part, grad in grads.items()}

    def layer_moves(self) -> tuple[Callable, list[Callable]]:
        """In the ticks: what gathers one layer's weights, and for each leaf what scatters its gradient."""
        return self._moves("blocks" in self.once, map_layouts(_of_one_layer, self.used["blocks"]))

    def end_moves(self, part: str) -> tuple[Callable, list[Callable]]:
        """The same for "embedding" or "head"."""
        return self._moves(part in self.once, self.used[part], part)

    def sum_grads(self, grads: Any) -> Any:
        """Gradients of parameters that several ranks hold, summed over them once, after all microbatches.

        Norms and biases, those with the same axes, travel in one message; what is large travels by itself.
        """
        leaves, structure = jax.tree.flatten(grads)
        messages: dict[Any, list[int]] = {}
        for at, layout in enumerate(jax.tree.leaves(self.layouts, is_leaf=_is_layout)):
            axes = tuple(axis for axis in AXES if axis not in layout.used_axes())
            alone = at if leaves[at].size > SMALL else None
            messages.setdefault((axes, alone), []).append(at)
        for (axes, _), members in messages.items():
            for at, total in zip(members, _sum_together([leaves[at] for at in members], axes), strict=True):
                leaves[at] = total
        return jax.tree.unflatten(structure, leaves)

    @property
    def _stored_blocks(self) -> list[Layout]:
        return jax.tree.leaves(self.layouts["blocks"], is_leaf=_is_layout)

    def _cast(self, layout: Layout, weight: Array) -> Array:
        """What will be gathered is cast before it is sent to its rank, as it is there."""
        moves = not self.arrangement.in_order and "dp" in layout.used_axes()
        return weight.astype(self.dtype) if moves else weight

    def _from_ranks(self, part: str, stored: Any) -> Any:
        """What is cut over pp, gathered over it: cast first, as it is used."""

        def moved(path: str, layout: Layout, weight: Array) -> Array:
            used = layout.without("pp")
            with jax.named_scope(path):
                return weight if used == layout else all_gather(f"{layout} -> {used}", weight.astype(self.dtype))

        return _each(moved, self.layouts[part], stored, part)

    def _to_ranks(self, part: str, grads: Any) -> Any:
        """The inverse, for gradients: each rank has a summand."""

        def moved(path: str, layout: Layout, grad: Array) -> Array:
            used = layout.without("pp")
            with jax.named_scope(path):
                return grad if used == layout else reduce_scatter(f"{used} -> {layout}", grad)

        return _each(moved, self.layouts[part], grads, part)

    def _moves(self, once: bool, layouts: Any, part: str = "") -> tuple[Callable, list[Callable]]:
        if once:
            return _unchanged, [_unchanged for _ in jax.tree.leaves(layouts, is_leaf=_is_layout)]
        scatters = [partial(self._scatter, path, layout) for path, layout in _with_paths(layouts, part)]
        return partial(self._gathered, layouts, part=part), scatters

    def _scatter(self, path: str, layout: Layout, grad: Array) -> Array:
        """The gradient of a gathered weight, summed over dp to what is stored, in float32."""
        whole = layout.without("dp")
        pattern = f"{whole} -> {layout}"
        with jax.named_scope(path):
            if whole == layout or self.reduce == "float32":
                return reduce_scatter(pattern, grad.astype(jnp.float32))
            return exchange_and_add(pattern, grad.astype(self.dtype))

    def _scattered(self, layouts: Any, grads: Any, part: str = "") -> Any:
        return _each(self._scatter, layouts, grads, part)

    def _gathered(self, layouts: Any, weights: Any, part: str = "") -> Any:
        """Weights gathered over dp, in the compute dtype: cast first, so that fewer bytes are sent."""

        def gathered(path: str, layout: Layout, weight: Array) -> Array:
            whole = layout.without("dp")
            with jax.named_scope(path):
                if whole == layout:
                    return weight
                return all_gather(f"{layout} -> {whole}", weight.astype(self.dtype), first=self.gather_first)

        return _each(gathered, layouts, weights, part)


def _sum_together(arrays: list[Array], axes: tuple[str, ...]) -> list[Array]:
    """Each array's sum over these axes, all in one message; the same bits as one by one."""
    if len(arrays) == 1 or not axes:
        return [sum_over(x, axes) for x in arrays]
    ends = list(itertools.accumulate(x.size for x in arrays))
    pieces = jnp.split(sum_over(jnp.concatenate([x.reshape(-1) for x in arrays]), axes), ends[:-1])
    return [piece.reshape(x.shape) for piece, x in zip(pieces, arrays, strict=True)]


def _each(move: Callable[[str, Layout, Array], Array], layouts: Any, arrays: Any, part: str) -> Any:
    """`move(path, layout, array)` of each leaf."""
    leaves, structure = jax.tree.flatten(arrays)
    named = zip(_with_paths(layouts, part), leaves, strict=True)
    return jax.tree.unflatten(structure, [move(path, layout, leaf) for (path, layout), leaf in named])


def _with_paths(layouts: Any, part: str) -> list[tuple[str, Layout]]:
    """Layouts with the modules that they belong to, as "attention/q": whom a report names for what is sent."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(layouts, is_leaf=_is_layout)
    names = ((jax.tree_util.keystr(path[:-1], simple=True, separator="/"), layout) for path, layout in leaves)
    return [("/".join(filter(None, [part, name])), layout) for name, layout in names]


def _is_layout(leaf: Any) -> bool:
    return isinstance(leaf, Layout)


def _unchanged(weights: Any) -> Any:
    return weights


def _of_one_layer(layout: Layout) -> Layout:
    return Layout(layout.names[1:], layout.axes[1:])
