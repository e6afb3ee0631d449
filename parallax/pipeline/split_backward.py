"""Separates a layer's forward pass from its backward pass, and divides the backward pass in two: B, everything that the
input's gradient needs, and W, the other gradients of weights."""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from parallax.config.remat import REMAT_PARTS
from parallax.runtime.errors import ConfigError, nearest
from parallax.runtime.jaxprs import ancestors, apply, called, part, within
from parallax.sharding.collectives import as_varying

CALLS = ("jit", "pjit", "closed_call", "core_call")
# A weight gradient without these operations, as of a norm or a bias, is computed in B: deferring it to W would save
# whole activations in memory, only to defer a sum.
INNER = ("scan", "while", "cond")
PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "pallas_call")


class SplitVjp:
    """The deferred gradient of `y = layer(weights, x, context)`, from saved arrays.

    Weights and context are available when the gradient is taken, so they are not saved. `saved` must be traced before
    `backward`, `plan_split` before the two halves of a divided backward pass, and `plan_selection` before the forward
    pass that saves only a selection.
    """

    def saved(self, pull: Callable, weights: Any, context: Any) -> list[Array]:
        """The arrays that `pull`, the layer's vjp in weights and x, holds besides weights and context, for
        `backward`."""
        leaves, self.structure = jax.tree.flatten(pull)
        known = {id(leaf): at for at, leaf in enumerate(jax.tree.leaves((weights, context)))}
        self.source = [known.get(id(leaf)) for leaf in leaves]
        # Arrays from a slot vary over pp, and a divided program requires equal types.
        return [as_varying(leaf, ["pp"]) for leaf, at in zip(leaves, self.source, strict=True) if at is None]

    def backward(self, weights: Any, saved: list[Array], context: Any, dy: Array) -> tuple[Any, Array]:
        """Gradients with respect to weights and x."""
        known, rest = jax.tree.leaves((weights, context)), iter(saved)
        leaves = [next(rest) if at is None else known[at] for at in self.source]
        pull = jax.tree.unflatten(self.structure, leaves)
        return pull(dy)

    def plan_selection(self, forward: ClosedJaxpr, names: Collection[str]) -> None:
        """Divide a traced forward pass: activations with one of these names are saved, the rest is recomputed.
        ConfigError if a layer uses a name that is not a part of `pipeline.remat`."""
        given = {e.params["name"] for e in inlined(forward).jaxpr.eqns if e.primitive.name == "name"}
        for name in sorted(given - set(REMAT_PARTS)):
            raise ConfigError(
                f"checkpoint_name(..., {name!r}) in a layer: pipeline.remat has no such part; "
                f"{nearest(name, REMAT_PARTS)}"
            )
        self.selection = select(forward, now=[0], names=names)

    def forward_selected(self, weights: Any, x: Array, context: Any) -> tuple[Array, list[Array]]:
        """The layer's output, and the arrays that `recompute` needs besides weights, x and context."""
        y, *kept = self.selection.make(*jax.tree.leaves((weights, x, context)))
        return y, kept

    def recompute(self, weights: Any, x: Array, context: Any, kept: list[Array]) -> list[Array]:
        """The arrays that the layer's vjp saves."""
        return self.selection.recompute(*jax.tree.leaves((weights, x, context)), *kept)

    def plan_split(self, weights: Any, saved: list[Array], context: Any, dy: Array, *, saved_is_kept: bool) -> None:
        """Divide the backward pass. With `saved_is_kept` the second half reads what it needs directly from `saved`."""
        known, structure = jax.tree.flatten((weights, context))

        def backward(*args):
            weights, context = jax.tree.unflatten(structure, args[: len(known)])
            dw, dx = self.backward(weights, list(args[len(known) : -1]), context, args[-1])
            return [*jax.tree.leaves(dw), dx]

        first_saved, last_saved = len(known), len(known) + len(saved)
        readable = range(first_saved, last_saved) if saved_is_kept else ()
        traced = jax.make_jaxpr(backward)(*known, *saved, dy)
        wanted = len(traced.out_avals) - 1
        self.backward_split = split_backward(traced, wanted=[wanted], readable=readable)
        self.read_later = tuple(at - first_saved for at in self.backward_split.reads)
        self.now = tuple(at for at in range(wanted) if at not in self.backward_split.deferred)

    def input_backward(
        self, weights: Any, saved: list[Array], context: Any, dy: Array
    ) -> tuple[Array, dict[int, Array], list[Array]]:
        """B: the gradient of x, the gradients of weights that take no matrix product, by index, and the input of W."""
        dw_and_dx = self.backward_split.first(*jax.tree.leaves((weights, context)), *saved, dy)
        few, (dx, *b_residuals) = dw_and_dx[: len(self.now)], dw_and_dx[len(self.now) :]
        return dx, dict(zip(self.now, few, strict=True)), b_residuals

    def weight_backward(self, read: list[Array], b_residuals: list[Array]) -> dict[int, Array]:
        """W: the gradients of the other weights, from saved arrays `read_later` and `b_residuals`."""
        return dict(zip(self.backward_split.deferred, self.backward_split.second(*read, *b_residuals), strict=True))


class BackwardSplit(NamedTuple):
    """A program divided in two, with each equation in one of them.

    `first(*args)` returns `(*outputs, *b_residuals)`, `second(*args at reads, *b_residuals)` the deferred outputs.
    """

    first: Callable
    second: Callable
    deferred: tuple[int, ...]  # outputs of the whole program that the second one computes
    reads: tuple[int, ...]  # arguments of the whole program that the second one reads


def split_backward(program: ClosedJaxpr, *, wanted: Iterable[int], readable: Iterable[int]) -> BackwardSplit:
    """Divide a traced program. The first part computes the outputs at `wanted` and everything cheap, the second one the
    matrix products that these do not need.

    The second part reads arguments at `readable` itself; the first part passes everything else as `b_residuals`.
    """
    whole = inlined(program)
    jaxpr = whole.jaxpr
    wanted, readable = set(wanted), set(readable)
    first = ancestors(jaxpr, [jaxpr.outvars[at] for at in wanted])
    deferred = []
    for at, out in enumerate(jaxpr.outvars):
        if at in wanted:
            continue
        own = ancestors(jaxpr, [out]) - first
        if any(_multiplies(jaxpr.eqns[number]) for number in own):
            deferred.append(at)
        else:
            first |= own
    second = ancestors(jaxpr, [jaxpr.outvars[at] for at in deferred]) - first
    crossing = _crossing(jaxpr, second, [jaxpr.outvars[at] for at in deferred])
    place = {var: at for at, var in enumerate(jaxpr.invars)}
    reads = [var for var in crossing if place.get(var) in readable]
    b_residuals = [var for var in crossing if place.get(var) not in readable and var not in set(jaxpr.constvars)]
    now = [out for at, out in enumerate(jaxpr.outvars) if at not in deferred]
    later = [jaxpr.outvars[at] for at in deferred]
    return BackwardSplit(
        _numbered(whole, first, jaxpr.invars, [*now, *b_residuals]),
        _numbered(whole, second, [*reads, *b_residuals], later),
        tuple(deferred),
        tuple(place[var] for var in reads),
    )


class Selection(NamedTuple):
    """`make(*args)` returns `(*outputs at given places, *kept)`, `recompute(*args, *kept)` the other outputs."""

    make: Callable
    recompute: Callable
    names: tuple[str, ...]  # of saved values


def select(program: ClosedJaxpr, *, now: Iterable[int], names: Collection[str]) -> Selection:
    """Divide a traced program: the outputs at `now` are computed first, the others later, from the arguments and from
    values with these names, which are saved if the other outputs need them."""
    whole = inlined(program)
    jaxpr = whole.jaxpr
    named = {e.outvars[0]: e.params["name"] for e in jaxpr.eqns if e.primitive.name == "name"}
    named = {var: name for var, name in named.items() if name in names}
    first, later = [], []
    for at, out in enumerate(jaxpr.outvars):
        (first if at in now else later).append(out)
    recomputed = ancestors(jaxpr, later, given=named)
    kept = [var for var in _crossing(jaxpr, recomputed, later) if var in named]
    first += kept
    return Selection(
        _numbered(whole, ancestors(jaxpr, first), jaxpr.invars, first),
        _numbered(whole, recomputed, [*jaxpr.invars, *kept], later),
        tuple(named[var] for var in kept),
    )


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with calls of jitted functions inlined, so that an einsum's two gradients are two equations."""

    def run(jaxpr: Jaxpr, consts: list, args: list) -> list:
        value_of = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda atom: atom.val if isinstance(atom, Literal) else value_of[atom]  # noqa: E731
        for equation in jaxpr.eqns:
            values = [read(atom) for atom in equation.invars]
            inner = called(equation) if equation.primitive.name in CALLS else None
            outs = run(inner.jaxpr, inner.consts, values) if inner else apply(equation, values)
            value_of |= zip(equation.outvars, outs, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    return jax.make_jaxpr(lambda *args: run(closed.jaxpr, closed.consts, args))(*closed.in_avals)


def _multiplies(equation: JaxprEqn) -> bool:
    """Whether an equation is a matrix product, or a loop or a branch with one in it, as grouped products are."""
    inner = within(equation) if equation.primitive.name in INNER else ()
    return any(each.primitive.name in PRODUCTS for each in (equation, *inner))


def _crossing(jaxpr: Jaxpr, second: set[int], outs: Iterable) -> list:
    """Values that the second part reads but does not compute."""
    made = {var for number in second for var in jaxpr.eqns[number].outvars}
    read = [var for number in sorted(second) for var in jaxpr.eqns[number].invars] + list(outs)
    return [*dict.fromkeys(var for var in read if not isinstance(var, Literal) and var not in made)]


def _numbered(whole: ClosedJaxpr, numbers: set[int], invars: list, outvars: list) -> Callable:
    """A function that runs some equations of a program, from `invars` to `outvars`."""
    equations = [whole.jaxpr.eqns[number] for number in sorted(numbers)]
    return part(equations, invars, outvars, whole.jaxpr.constvars, whole.consts)
