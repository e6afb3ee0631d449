"""How the layers of one kind run: forward, backward, and in the two halves of the backward pass.

`layer_passes` chooses once, by `pipeline.remat` and by whether the schedule divides the backward pass. What is saved is
in pools: "F to B" is saved by F for B, "F to W" by F for W alone, and "B to W" by B for W.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax import Array
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from parallax.config.remat import AFTER_ATTENTION, LAYER_INPUT, NORM, NORM_MEANS, OF_HEADS, saved_parts
from parallax.jaxprs import part
from parallax.model.context import Context
from parallax.model.lora import noise_of
from parallax.pipeline.split_program import BackwardSplit, Selection, inlined, select, split_backward
from parallax.sharding.collectives import as_varying
from parallax.sharding.plan import ShardingPlan
from parallax.sharding.slots import from_bytes, heads_major, row_major, to_bytes

Pools = dict[str, list[Array]]  # a layer's residuals


class InRows(NamedTuple):
    """What a layer's passes have in row-major memory layout; the rest has that which XLA chooses."""

    read: bool = False  # saved activations, as the backward pass reads them: see `relays_what_is_read`
    # These as they are written, too, and the input as it is read. Those of heads are heads-major then.
    carried: bool = False
    stream: bool = False  # the input and the stream after attention, in both passes: see `keeps_stream_in_rows`


AS_XLA_CHOOSES = InRows()


def traced_vjp(
    block: nn.Module, plan: ShardingPlan, stack: str, weights: Any, x: Array, context: Context
) -> tuple[Any, tuple[int | None, ...], ClosedJaxpr]:
    """The vjp in weights and x of arguments of these shapes, as a tree's structure and `held` of SaveAll, and the
    program from (weights, x, context) to (y, *residuals). Weights that are not trained are constants, and so are
    rounded kernels."""

    def forward(weights: Any, x: Array, context: Context) -> tuple[Array, Any]:
        def run(trained: Any, x: Array) -> Array:
            params = jax.tree.map(lambda weight, new: weight if new is None else new, weights["params"], trained)
            return block.apply(weights | {"params": params} | noise_of(context), x, context)

        return jax.vjp(run, plan.trained_of(weights["params"], stack), x)

    traced, (_, pull) = jax.make_jaxpr(forward, return_shape=True)(weights, x, context)
    jaxpr, before = traced.jaxpr, len(jax.tree.leaves(weights))
    places = {var: place for place, var in enumerate([*jaxpr.invars[:before], *jaxpr.invars[before + 1 :]])}
    y, *held = jaxpr.outvars
    known = tuple(None if isinstance(var, Literal) else places.get(var) for var in held)
    residuals = [var for var, place in zip(held, known, strict=True) if place is None]
    program = part(jaxpr.eqns, jaxpr.invars, [y, *residuals], jaxpr.constvars, traced.consts)
    return jax.tree.structure(pull), known, program


@dataclasses.dataclass(frozen=True, eq=False)
class SaveAll:
    """Passes that save all that the backward pass reads.

    The vjp holds arrays. Weights and context are there again when the gradient is taken; what is left are the layer's
    residuals.
    """

    block: nn.Module
    vjp: Any  # its structure, a tree of the arrays that it holds
    held: tuple[int | None, ...]  # for each array, its place among those of (weights, context); None for a residual
    program: ClosedJaxpr  # see traced_vjp
    saved: Pools  # shapes of a layer's residuals
    names: tuple[str, ...] = ()  # of the first residuals in "F to B"
    last_gradient = 0  # a leaf of the gradients to which the last pass of a tick adds

    def run(self, weights: Any, x: Array, context: Context) -> Array:
        """The layer's output."""
        return self.block.apply(weights | noise_of(context), x, context)

    def forward(self, weights: Any, x: Array, context: Context) -> tuple[Array, Pools]:
        """F: the layer's output, and what is saved."""
        y, residuals = self.output_and_residuals(weights, x, context)
        return y, {"F to B": residuals}

    def backward(self, weights: Any, context: Context, saved: Pools, dy: Array) -> tuple[Array, Any, Pools]:
        """B: the gradients of x and of weights; nothing is saved."""
        there, rest = jax.tree.leaves((weights, context)), iter(self.residuals(weights, context, saved))
        arrays = [next(rest) if place is None else there[place] for place in self.held]
        dw, dx = jax.tree.unflatten(self.vjp, arrays)(dy)
        return dx, dw, {}

    def residuals(self, weights: Any, context: Context, saved: Pools) -> list[Array]:
        """What the vjp holds besides weights and context: saved, or recomputed from what is saved."""
        return saved["F to B"]

    def output_and_residuals(self, weights: Any, x: Array, context: Context) -> tuple[Array, list[Array]]:
        """The layer's output, and residuals, which vary over pp, as arrays from a slot do."""
        y, *residuals = jaxpr_as_fun(self.program)(*jax.tree.leaves((weights, x, context)))
        return y, [as_varying(leaf, ["pp"]) for leaf in residuals]


@dataclasses.dataclass(frozen=True, eq=False)
class SaveNamed(SaveAll):
    """Passes that save the layer's input and activations with some names, from which the others are recomputed."""

    selection: Selection | None = None
    in_rows: InRows = AS_XLA_CHOOSES
    in_bytes: Collection[int] = ()  # places of the activations that are saved as bytes: see `as_bytes`

    def forward(self, weights: Any, x: Array, context: Context) -> tuple[Array, Pools]:
        x = row_major(x) if self.in_rows.stream else x
        y, *named = jaxpr_as_fun(self.selection.make)(*jax.tree.leaves((weights, x, context)))
        of_stream = [AFTER_ATTENTION] if self.in_rows.stream else []
        saved = as_bytes(named, self.in_bytes)
        return y, {"F to B": [x, *self._laid_out(saved, self.selection.names if self.in_rows.carried else of_stream)]}

    def residuals(self, weights: Any, context: Context, saved: Pools) -> list[Array]:
        x, *named = saved["F to B"]
        x = row_major(x) if self.in_rows.carried or self.in_rows.stream else x
        named = self._laid_out(named, self.selection.names) if self.in_rows.read else named
        named = from_arrays_of_bytes(named, self.selection.make.out_avals[1:], self.in_bytes)
        recomputed = jaxpr_as_fun(self.selection.recompute)(*jax.tree.leaves((weights, x, context)), *named)
        return [as_varying(leaf, ["pp"]) for leaf in recomputed]

    def _laid_out(self, named: list[Array], names: Collection[str]) -> list[Array]:
        """Saved activations, those with these names in the memory layout in which they are read."""

        def laid_out(name: str, leaf: Array) -> Array:
            if name not in names:
                return leaf
            of_heads = self.in_rows.carried and name in OF_HEADS and leaf.ndim == 4
            return heads_major(leaf) if of_heads else row_major(leaf)

        return [laid_out(*saved) for saved in zip(self.names[1:], named, strict=True)]


def as_bytes(named: list[Array], places: Collection[int]) -> list[Array]:
    """Saved activations, those in these places as arrays of bytes."""
    return [part for place, leaf in enumerate(named) for part in (to_bytes(leaf) if place in places else [leaf])]


def from_arrays_of_bytes(saved: list[Array], like: Sequence[Any], places: Collection[int]) -> list[Array]:
    """Activations like these from what `as_bytes` returned."""
    rest = iter(saved)
    return [
        from_bytes(list(itertools.islice(rest, leaf.dtype.itemsize)), leaf.dtype) if place in places else next(rest)
        for place, leaf in enumerate(like)
    ]


def beside_eight_bits(selection: Selection) -> tuple[int, ...]:
    """The places, among saved activations, of an MLP's `swiglu` in 8 bits and of the 16-bit one that is computed just
    before. XLA for v7x writes the slots of both in the product that computes both if these have one dtype: see
    `writes_slots_of_one_dtype`."""
    jaxpr, names = selection.make.jaxpr, selection.names
    computed = {var: number for number, equation in enumerate(jaxpr.eqns) for var in equation.outvars}
    kept = [(computed[var], place, var.aval) for place, var in enumerate(jaxpr.outvars[1:])]
    places: list[int] = []
    for number, place, like in kept:
        if names[place] == "swiglu" and like.dtype.itemsize == 1:
            before = [each for each in kept if each[0] < number and each[2].shape == like.shape]
            wide = [each[:2] for each in before if names[each[1]] == "ffn" and each[2].dtype.itemsize == 2]
            places += [place, max(wide)[1]] if wide else []
    return tuple(places)


@dataclasses.dataclass(frozen=True, eq=False)
class SaveLayerInput(SaveAll):
    """Passes that save the layer's input, from which the backward pass runs the layer again."""

    in_rows: InRows = AS_XLA_CHOOSES

    def forward(self, weights: Any, x: Array, context: Context) -> tuple[Array, Pools]:
        x = row_major(x) if self.in_rows.stream else x
        return self.block.apply(weights | noise_of(context), x, context), {"F to B": [x]}

    def residuals(self, weights: Any, context: Context, saved: Pools) -> list[Array]:
        (x,) = saved["F to B"]
        x = row_major(x) if self.in_rows.carried or self.in_rows.stream else x
        return self.output_and_residuals(weights, x, context)[1]


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
            dx, dw, _ = saves_all.backward(weights, context, {"F to B": residuals}, dy)
            return dw, dx

        saves_all = SaveAll(whole.block, whole.vjp, whole.held, whole.program, {})

        given = weights, context, residuals, y
        traced, (dw, _) = jax.make_jaxpr(backward, return_shape=True)(*given)
        known, dx = len(jax.tree.leaves((weights, context))), len(traced.out_avals) - 1
        readable = range(known, known + len(residuals)) if later_is_saved else ()
        halves = split_backward(traced, wanted=[dx], readable=readable)
        later = tuple(place - known for place in halves.reads)
        now = dx + 1 - len(halves.deferred)
        b_residuals = jax.eval_shape(jaxpr_as_fun(halves.first), *jax.tree.leaves(given))[now:]
        passes = Divided(whole, halves, jax.tree.structure(dw), later, {})
        return dataclasses.replace(passes, saved=passes._by_reader(whole.saved["F to B"]) | {"B to W": b_residuals})

    @property
    def names(self) -> tuple[str, ...]:
        return self.whole.names

    @property
    def last_gradient(self) -> int:
        places = self._tree(self.halves.deferred, self.halves.deferred)
        leaves = jax.tree.leaves(places, is_leaf=lambda leaf: leaf is None)
        return next((place for place, leaf in enumerate(leaves) if leaf is not None), 0)

    def run(self, weights: Any, x: Array, context: Context) -> Array:
        return self.whole.run(weights, x, context)

    def forward(self, weights: Any, x: Array, context: Context) -> tuple[Array, Pools]:
        y, saved = self.whole.forward(weights, x, context)
        return y, self._by_reader(saved["F to B"])

    def backward(self, weights: Any, context: Context, saved: Pools, dy: Array) -> tuple[Array, Any, Pools]:
        """B: the gradient of x, those of weights that take no matrix product, and what is saved for W."""
        later, rest = dict(zip(self.later, saved.get("F to W", ()), strict=True)), iter(saved["F to B"])
        both = [later[place] if place in later else next(rest) for place in range(len(later) + len(saved["F to B"]))]
        residuals = self.whole.residuals(weights, context, {"F to B": both})
        outputs = jaxpr_as_fun(self.halves.first)(*jax.tree.leaves((weights, context)), *residuals, dy)
        now = [place for place in range(self.structure.num_leaves) if place not in self.halves.deferred]
        return outputs[len(now)], self._tree(now, outputs[: len(now)]), {"B to W": outputs[len(now) + 1 :]}

    def weight_gradients(self, saved: Pools) -> Any:
        """W: the other gradients of weights, from what F and B have saved."""
        return self._tree(self.halves.deferred, jaxpr_as_fun(self.halves.second)(*saved["F to W"], *saved["B to W"]))

    def _by_reader(self, saved: list[Array]) -> Pools:
        rest = [leaf for place, leaf in enumerate(saved) if place not in self.later]
        return {"F to B": rest, "F to W": [saved[place] for place in self.later]}

    def _tree(self, places: Iterable[int], gradients: list[Array]) -> Any:
        of_place = dict(zip(places, gradients, strict=True))
        return jax.tree.unflatten(self.structure, [of_place.get(place) for place in range(self.structure.num_leaves)])


# How the layers of one kind run.
LayerPasses = SaveAll | SaveNamed | SaveLayerInput | Divided


def layer_passes(
    block: nn.Module,
    remat: str,
    *,
    split: bool,
    in_rows: InRows = AS_XLA_CHOOSES,
    norms_apart: bool = False,
    norm_means: bool = False,
    in_bytes: bool = False,
    plan: ShardingPlan,
    stack: str,
    weights: Any,
    x: Any,
    context: Context,
) -> LayerPasses:
    """The passes of a stack's layers for a gathered layer's weights, an input and a context of these shapes.

    `norms_apart`: whether recomputed norms are apart from what reads them, as `fuses_norms_into_products` says.
    `norm_means`: whether a set saves what `saves_means_of_norms` says, too. `in_bytes`: whether it saves what
    `beside_eight_bits` says as bytes. With remat="stage" a stage runs its layers again before B, and these passes save
    all for the time of B.
    Raises ConfigError if the block names an activation that `pipeline.remat` does not know.
    """
    *vjp, program = traced_vjp(block, plan, stack, weights, x, context)
    given = jax.tree.leaves((weights, x, context))
    y, *residuals = jax.eval_shape(
        lambda *given: [as_varying(x, ["pp"]) for x in jaxpr_as_fun(program)(*given)], *given
    )
    parts, apart = saved_parts(remat), [NORM] if norms_apart else []
    if parts is not None:
        selection = select(program, now=[0], names=(*parts, NORM_MEANS) if norm_means else parts)
        if apart:
            selection = selection._replace(recompute=inlined(selection.recompute, apart))
        places = beside_eight_bits(selection) if in_bytes else ()
        named = jax.eval_shape(lambda *given: as_bytes(jaxpr_as_fun(selection.make)(*given)[1:], places), *given)
        kept = zip(selection.names, selection.make.out_avals[1:])
        of_parts = [[name] * (like.dtype.itemsize if n in places else 1) for n, (name, like) in enumerate(kept)]
        names = (LAYER_INPUT, *itertools.chain(*of_parts))
        passes = SaveNamed(block, *vjp, program, {"F to B": [x, *named]}, names, selection, in_rows, places)
    elif remat == "layer":
        program = inlined(program, apart) if apart else program
        passes = SaveLayerInput(block, *vjp, program, {"F to B": [x]}, (LAYER_INPUT,), in_rows)
    else:
        passes = SaveAll(block, *vjp, program, {"F to B": residuals}, (LAYER_INPUT,) if remat == "stage" else ())
    return Divided.of(passes, remat == "none", weights, residuals, context, y) if split else passes
