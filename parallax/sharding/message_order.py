"""In which order a device meets the messages of a program.

A message of an accelerator meets its own counterpart, whatever else is sent. XLA starts the messages of a simulated
device in the order of the program, and each occupies one of a few threads until it is done. But a loop or a branch runs
in other threads, beside all that does not read its result. Then devices reach its messages and those of the rest in
different orders, and messages of the same ranks may be confused, or wait for each other for ever.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from parallax.jaxprs import CALLS, KIND_OF_PRIMITIVE, apply, called, within
from parallax.sharding.collectives import after, varying_axes

# Calls whose results are those of their programs' equations, one after the other.
OPENED = (*CALLS, "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2")


class Accelerators:
    """Devices whose messages need no other order than that in which they are read."""

    def after(self, arrays: Any, earlier: Array | None) -> Any:
        """The arrays of a tree, but on simulated devices only after `earlier` has been computed."""
        return arrays

    def in_turn(self, earlier: Array | None, run: Callable, *args: Any) -> Any:
        """`run(*args)`. On simulated devices its messages come after `earlier`, which is one of its arguments, loops
        and branches that send come one by one with all that sends, and its results after them."""
        return run(*args)


class SimulatedDevices(Accelerators):
    """Devices whose messages need the order of the program. `has_loops` says whether a layer's loops or branches may
    send; if not, that order is there without `in_turn`, which would trace a layer twice."""

    def __init__(self, has_loops: bool = True):
        self.has_loops = has_loops

    def after(self, arrays: Any, earlier: Array | None) -> Any:
        return arrays if earlier is None else jax.tree.map(lambda x: after(x, earlier), arrays)

    def in_turn(self, earlier: Array | None, run: Callable, *args: Any) -> Any:
        if not self.has_loops:
            return run(*args)
        traced, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
        turns = _Turns([] if earlier is None else [_Sender([earlier], alone=True)])
        given = [_Value(x, frozenset([0] if x is earlier else [])) for x in jax.tree.leaves(args)]
        outs = turns.outputs(traced.jaxpr, traced.consts, given)
        return jax.tree.unflatten(jax.tree.structure(shapes), [*map(turns.last, outs)])


class _Value(NamedTuple):
    """An array, and the numbers of the senders from which it is computed."""

    array: Any
    read: frozenset[int]


class _Sender(NamedTuple):
    """Results of a message, or of a loop or a branch with messages, which run `alone`, and what came before: the
    numbers of the senders that it reads or waits for. Any result of a loop or a branch waits for all that it reads; and
    so does a message of one array, as all are that the package sends."""

    results: list[Array]
    alone: bool
    earlier: frozenset[int] = frozenset()


class _Turns:
    """A program in which what runs alone and any other sender run one after the other, as they are written."""

    def __init__(self, senders: list[_Sender]):
        self.senders = senders

    def outputs(self, jaxpr: Jaxpr, consts: Sequence, args: Sequence[_Value]) -> list[_Value]:
        value_of = dict(zip(jaxpr.constvars, (_Value(const, frozenset()) for const in consts), strict=True))
        value_of |= zip(jaxpr.invars, args, strict=True)

        def value(atom: Any) -> _Value:
            return _Value(atom.val, frozenset()) if isinstance(atom, Literal) else value_of[atom]

        for equation in jaxpr.eqns:
            values = [*map(value, equation.invars)]
            inner = called(equation) if equation.primitive.name in OPENED else None
            outs = self.outputs(inner.jaxpr, inner.consts, values) if inner else self._of(equation, values)
            value_of |= zip(equation.outvars, outs, strict=True)
        return [*map(value, jaxpr.outvars)]

    def last(self, out: _Value) -> Array:
        """An output, after all that runs alone. Integers are as they were: nothing that sends reads them alone."""
        if not _is_float(out.array):
            return out.array
        arrays = [out.array]
        self._tie(arrays, out.read, [sender.alone for sender in self.senders])
        return arrays[0]

    def _of(self, equation: JaxprEqn, values: list[_Value]) -> list[_Value]:
        arrays, read = [each.array for each in values], frozenset().union(*(each.read for each in values))
        if not any(each.primitive.name in KIND_OF_PRIMITIVE for each in (equation, *within(equation))):
            return [_Value(out, read) for out in apply(equation, arrays)]
        alone = equation.primitive.name not in KIND_OF_PRIMITIVE
        read = self._tie(arrays, read, [alone or sender.alone for sender in self.senders])
        outs = apply(equation, arrays)
        self.senders.append(_Sender([*filter(_is_float, outs)], alone, read))
        return [_Value(out, read | {len(self.senders) - 1}) for out in outs]

    def _tie(self, arrays: list[Any], read: frozenset[int], apart: Sequence[bool]) -> frozenset[int]:
        """Make the smallest array that can be wait for each sender that is `apart` and was not read, the latest first,
        and returns all that were read or are waited for, now or by these. Integers come last: one may say which branch
        runs, which a reader of the program wants to know. What gives integers alone, or varies over more axes than each
        of the arrays, is not waited for."""
        sizes = {place: (not _is_float(x), x.size) for place, x in enumerate(arrays) if isinstance(x, Array)}
        places = sorted(sizes, key=sizes.get)
        for number, sender in reversed([*enumerate(self.senders)]):
            pairs = ((place, result) for place in places for result in sender.results)
            pairs = (pair for pair in pairs if varying_axes(pair[1]) <= varying_axes(arrays[pair[0]]))
            if number not in read and apart[number] and (pair := next(pairs, None)):
                place, result = pair
                arrays[place] = after(arrays[place], result)
                read |= sender.earlier | {number}
        return read


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
