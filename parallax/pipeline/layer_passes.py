"""How the layers of one kind run: forward, backward, and in the two halves of the backward pass.

`layer_passes` chooses once, by `pipeline.remat` and by whether the schedule divides the backward pass. What is saved is
in pools: "FB" is saved by F for B, "FW" by F for W alone, and "BW" by B for W.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax import Array
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from parallax.config.remat import LAYER_INPUT, saved_parts
from parallax.jaxprs import part
from parallax.model.context import Context
from parallax.pipeline.split_program import BackwardSplit, Selection, select, split_backward
from parallax.sharding.collectives import as_varying
from parallax.sharding.slots import row_major

Pools = dict[str, list[Array]]  # a layer's residuals


class LayerVjp(NamedTuple):
    """A layer's vjp in its weights and its input, as data: the arrays that it holds, in order.

    Weights and context are there again when the gradient is taken. What is left are the layer's residuals.
    """

    structure: Any  # of the vjp, a tree
    known: tuple[int | None, ...]  # for each array, its place among those of (weights, context); None for a residual

    def residuals(self, pull: Any) -> list[Array]:
        """The arrays of a vjp that must be saved. They vary over pp, as arrays from a slot do."""
        leaves = zip(jax.tree.leaves(pull), self.known, strict=True)
        return [as_varying(leaf, ["pp"]) for leaf, place in leaves if place is None]

    def with_residuals(self, weights: Any, context: Context, residuals: list[Array]) -> Any:
        """The vjp again: a function from the output's gradient to those of weights and input."""
        there, rest = jax.tree.leaves((weights, context)), iter(residuals)
        leaves = [next(rest) if place is None else there[place] for place in self.known]
        return jax.tree.unflatten(self.structure, leaves)


def vjp_of(block: nn.Module, constant: tuple[bool, ...], weights: Any, x: Array, context: Context) -> tuple[Array, Any]:
    """A layer's output, and its vjp in x and in the weights that are trained, a list. The others are constants, and so
    are rounded kernels."""
    leaves, structure = jax.tree.flatten(weights["params"])

    def run(trained: list[Array], x: Array) -> Array:
        given = iter(trained)
        whole = [leaf if still else next(given) for leaf, still in zip(leaves, constant, strict=True)]
        return block.apply(weights | {"params": jax.tree.unflatten(structure, whole)}, x, context)

    return jax.vjp(run, [leaf for leaf, still in zip(leaves, constant, strict=True) if not still], x)


def with_missing(constant: tuple[bool, ...], gradients: Iterable[Array | None]) -> list[Array | None]:
    """The gradients of all weights, None for those that are not trained."""
    given = iter(gradients)
    return [None if still else next(given) for still in constant]


def traced_vjp(
    block: nn.Module, constant: tuple[bool, ...], weights: Any, x: Array, context: Context
) -> tuple[LayerVjp, ClosedJaxpr]:
    """The vjp of arguments of these shapes, and the program from (weights, x, context) to (y, *residuals)."""
    traced, (_, pull) = jax.make_jaxpr(lambda *given: vjp_of(block, constant, *given), return_shape=True)(
        weights, x, context
    )
    jaxpr, before = traced.jaxpr, len(jax.tree.leaves(weights))
    places = {var: place for place, var in enumerate([*jaxpr.invars[:before], *jaxpr.invars[before + 1 :]])}
    y, *held = jaxpr.outvars
    known = tuple(None if isinstance(var, Literal) else places.get(var) for var in held)
    residuals = [var for var, place in zip(held, known, strict=True) if place is None]
    program = part(jaxpr.eqns, jaxpr.invars, [y, *residuals], jaxpr.constvars, traced.consts)
    return LayerVjp(jax.tree.structure(pull), known), program


@dataclasses.dataclass(frozen=True, eq=False)
class SaveAll:
    """Passes that save all that the backward pass reads."""

    block: nn.Module
    constant: tuple[bool, ...]  # for each weight, whether it gets no gradient
    vjp: LayerVjp | None
    saved: Pools  # shapes of a layer's residuals
    names: tuple[str, ...] = ()  # of the first residuals in "FB"
    last_gradient = 0  # a leaf of the gradients to which the last pass of a tick adds

    def run(self, weights: Any, x: Array, context: Context) -> Array:
        """The layer's output."""
        return self.block.apply(weights, x, context)

    def forward(self, weights: Any, x: Array, context: Context) -> tuple[Array, Pools]:
        """F: the layer's output, and what is saved."""
        y, pull = vjp_of(self.block, self.constant, weights, x, context)
        return y, {"FB": self.vjp.residuals(pull)}

    def backward(self, weights: Any, context: Context, saved: Pools, dy: Array) -> tuple[Array, Any, Pools]:
        """B: the gradients of x and of weights; nothing is saved."""
        dw, dx = self.pull(weights, context, saved)(dy)
        structure = jax.tree.structure(weights["params"])
        return dx, jax.tree.unflatten(structure, with_missing(self.constant, dw)), {}

    def pull(self, weights: Any, context: Context, saved: Pools) -> Any:
        """The layer's vjp."""
        return self.vjp.with_residuals(weights, context, self.residuals(weights, context, saved))

    def residuals(self, weights: Any, context: Context, saved: Pools) -> list[Array]:
        """What the vjp holds besides weights and context: saved, or recomputed from what is saved."""
        return saved["FB"]


@dataclasses.dataclass(frozen=True, eq=False)
class SaveNamed(SaveAll):
    """Passes that save the layer's input and activations with some names, from which the others are recomputed."""

    selection: Selection | None = None
    in_rows: bool = False  # whether saved activations are read in row-major memory layout

    def forward(self, weights: Any, x: Array, context: Context) -> tuple[Array, Pools]:
        y, *named = jaxpr_as_fun(self.selection.make)(*jax.tree.leaves((weights, x, context)))
        return y, {"FB": [x, *named]}

    def residuals(self, weights: Any, context: Context, saved: Pools) -> list[Array]:
        x, *named = saved["FB"]
        named = [row_major(leaf) for leaf in named] if self.in_rows else named
        found = jaxpr_as_fun(self.selection.recompute)(*jax.tree.leaves((weights, x, context)), *named)
        return [as_varying(leaf, ["pp"]) for leaf in found]


@dataclasses.dataclass(frozen=True, eq=False)
class SaveLayerInput(SaveAll):
    """Passes that save the layer's input, from which the backward pass runs the layer again."""

    def forward(self, weights: Any, x: Array, context: Context) -> tuple[Array, Pools]:
        return self.block.apply(weights, x, context), {"FB": [x]}

    def pull(self, weights: Any, context: Context, saved: Pools) -> Any:
        (x,) = saved["FB"]
        return vjp_of(self.block, self.constant, weights, x, context)[1]

    def residuals(self, weights: Any, context: Context, saved: Pools) -> list[Array]:
        return self.vjp.residuals(self.pull(weights, context, saved))


@dataclasses.dataclass(frozen=True, eq=False)
class Divided:
    """Passes whose backward pass is divided: B computes all that the input's gradient needs, W the other gradients.

    Gradients are a tree like the weights, with None for those of the other half.
    """

    whole: SaveAll
    halves: BackwardSplit
    structure: Any  # of the gradients' tree
    later: tuple[int, ...]  # of what `whole` saves, what W reads
    saved: Pools

    @staticmethod
    def of(whole: SaveAll, later_is_saved: bool, weights: Any, residuals: Any, context: Context, y: Any) -> "Divided":
        """Divide the backward pass, for arguments of these shapes. If `later_is_saved`, F saves what W needs of the
        residuals; otherwise B does."""

        def backward(weights: Any, context: Context, residuals: Any, dy: Array) -> tuple[Any, Array]:
            return whole.vjp.with_residuals(weights, context, residuals)(dy)

        given = weights, context, residuals, y
        traced = jax.make_jaxpr(backward)(*given)
        known, dx = len(jax.tree.leaves((weights, context))), len(traced.out_avals) - 1
        readable = range(known, known + len(residuals)) if later_is_saved else ()
        halves = split_backward(traced, wanted=[dx], readable=readable)
        later = tuple(place - known for place in halves.reads)
        now = dx + 1 - len(halves.deferred)
        b_residuals = jax.eval_shape(jaxpr_as_fun(halves.first), *jax.tree.leaves(given))[now:]
        passes = Divided(whole, halves, jax.tree.structure(weights["params"]), later, {})
        return dataclasses.replace(passes, saved=passes._by_reader(whole.saved["FB"]) | {"BW": b_residuals})

    @property
    def names(self) -> tuple[str, ...]:
        return self.whole.names

    @property
    def last_gradient(self) -> int:
        trained = [place for place, still in enumerate(self.whole.constant) if not still]
        return trained[self.halves.deferred[0]] if self.halves.deferred else 0

    def run(self, weights: Any, x: Array, context: Context) -> Array:
        return self.whole.run(weights, x, context)

    def forward(self, weights: Any, x: Array, context: Context) -> tuple[Array, Pools]:
        y, saved = self.whole.forward(weights, x, context)
        return y, self._by_reader(saved["FB"])

    def backward(self, weights: Any, context: Context, saved: Pools, dy: Array) -> tuple[Array, Any, Pools]:
        """B: the gradient of x, those of weights that take no matrix product, and what is saved for W."""
        later, rest = dict(zip(self.later, saved.get("FW", ()), strict=True)), iter(saved["FB"])
        both = [later[at] if at in later else next(rest) for at in range(len(later) + len(saved["FB"]))]
        residuals = self.whole.residuals(weights, context, {"FB": both})
        found = jaxpr_as_fun(self.halves.first)(*jax.tree.leaves((weights, context)), *residuals, dy)
        trained = self.whole.constant.count(False)
        now = [at for at in range(trained) if at not in self.halves.deferred]
        return found[len(now)], self._tree(now, found[: len(now)]), {"BW": found[len(now) + 1 :]}

    def weight_gradients(self, saved: Pools) -> Any:
        """W: the other gradients of weights, from what F and B have saved."""
        found = jaxpr_as_fun(self.halves.second)(*saved["FW"], *saved["BW"])
        return self._tree(self.halves.deferred, found)

    def _by_reader(self, saved: list[Array]) -> Pools:
        rest = [leaf for at, leaf in enumerate(saved) if at not in self.later]
        return {"FB": rest, "FW": [saved[at] for at in self.later]}

    def _tree(self, places: Iterable[int], found: list[Array]) -> Any:
        of_place = dict(zip(places, found, strict=True))
        trained = (of_place.get(place) for place in range(self.whole.constant.count(False)))
        return jax.tree.unflatten(self.structure, with_missing(self.whole.constant, trained))


# How the layers of one kind run.
LayerPasses = SaveAll | SaveNamed | SaveLayerInput | Divided


def layer_passes(
    block: nn.Module,
    remat: str,
    *,
    split: bool,
    in_rows: bool,
    weights: Any,
    x: Any,
    context: Context,
    constant: tuple[bool, ...],
) -> LayerPasses:
    """The passes of a block for a gathered layer's weights, an input and a context of these shapes.

    `constant` as in SaveAll, `in_rows` as in `relays_what_is_read`. With remat="stage" a stage runs its layers again
    before B, and these passes save all for the time of B.
    Raises ConfigError if the block names an activation that `pipeline.remat` does not know.
    """
    if remat == "layer" and not split:
        return SaveLayerInput(block, constant, None, {"FB": [x]}, (LAYER_INPUT,))
    vjp, program = traced_vjp(block, constant, weights, x, context)
    given = jax.tree.leaves((weights, x, context))
    y, *residuals = jax.eval_shape(
        lambda *given: [as_varying(x, ["pp"]) for x in jaxpr_as_fun(program)(*given)], *given
    )
    parts = saved_parts(remat)
    if parts is not None:
        selection = select(program, now=[0], names=parts)
        named = jax.eval_shape(jaxpr_as_fun(selection.make), *given)[1:]
        names = (LAYER_INPUT, *selection.names)
        passes = SaveNamed(block, constant, vjp, {"FB": [x, *named]}, names, selection, in_rows)
    elif remat == "layer":
        passes = SaveLayerInput(block, constant, vjp, {"FB": [x]}, (LAYER_INPUT,))
    else:
        passes = SaveAll(block, constant, vjp, {"FB": residuals}, (LAYER_INPUT,) if remat == "stage" else ())
    return Divided.of(passes, remat == "none", weights, residuals, context, y) if split else passes
