"""Collectives written in the notation. Over an axis that is not bound they do nothing.

Inside `jax.shard_map` every function below sends what its pattern says. JAX derives its transpose from types, which
say over which axes a value varies. Outside, no axis is bound and all are the identity: that run is the reference.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from parallax.config.sections import ALL_AXES
from parallax.errors import NotationError
from parallax.sharding.layout import Layout, check_rank, parse_move
from parallax.sharding.platform import platform_traced

BRANCH = "cond"  # JAX's name of a branch in the stack of an operation


def is_bound(axis: str) -> bool:
    """Whether `axis` is bound, that is, whether this runs inside a shard_map over it."""
    return axis in jax.sharding.get_abstract_mesh().manual_axes


def bound_axis_sizes() -> dict[str, int]:
    """Size of every bound axis; empty outside shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in ALL_AXES if axis in mesh.manual_axes}


def ranks_over(axes: Iterable[str]) -> int:
    """Number of ranks along these axes together. An axis that is not bound has one."""
    sizes = bound_axis_sizes()
    return math.prod(sizes.get(axis, 1) for axis in axes)


def varying_axes(x: Array) -> frozenset[str]:
    """The axes over which the copies of `x` may differ."""
    return frozenset(jax.typeof(x).mat.varying)


def as_varying(x: Array, axes: Iterable[str] = ALL_AXES) -> Array:
    """Mark `x` as varying over `axes`.

    Communication:
        forward   nothing
        backward  all_reduce of the gradient over the axes if x does not vary over them
    """
    missing = tuple(a for a in _bound(axes) if a not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(tree: Any) -> Any:
    """Mark all arrays of a tree as varying over the axes over which any of them varies."""
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))
    return jax.tree.map(lambda x: as_varying(x, axes), tree)


def vary_over_pp(tree: Any) -> Any:
    """Mark arrays as varying over pp, as results of branches do that its ranks take differently."""
    return jax.tree.map(lambda leaf: as_varying(leaf, ["pp"]), tree)


def cond_over_pp(acts: Array | bool, act: Callable[[], Any], idle: Callable[[], Any]) -> Any:
    """`lax.cond` with branches that ranks of pp take differently: they must agree on the axes of their results. Without
    a branch if `acts` is True."""
    if acts is True:
        return vary_over_pp(act())
    return lax.cond(acts, lambda: vary_over_pp(act()), lambda: vary_over_pp(idle()))


def changed_over_pp(
    acts: Array | bool, act: Callable[[Any], tuple[Any, Any]], idle: Callable[[], Any], kept: Any, *, in_loop: bool
) -> tuple[Any, Any]:
    """`act(kept)`, which makes something and changes what is kept, on ranks of pp that act; on others `idle()`, and
    what is kept as it is.

    A branch as those of `cond_over_pp`. `in_loop` is for where XLA would copy what a branch returns: a loop of at most
    one turn, which changes in place what is kept. It has the name of a branch in the compiled program.
    """
    if acts is True:
        return vary_over_pp(act(kept))
    if not in_loop:
        return lax.cond(acts, lambda: vary_over_pp(act(kept)), lambda: vary_over_pp((idle(), kept)))
    with jax.named_scope(BRANCH):
        turns, start = acts.astype(jnp.int32), vary_over_pp((idle(), kept))
        return lax.fori_loop(0, turns, lambda _, carried: vary_over_pp(act(carried[1])), start)


def updated_over_pp(acts: Array | bool, act: Callable[[Any], Any], kept: Any, *, in_loop: bool) -> Any:
    """The same for an act that only changes what is kept."""
    return changed_over_pp(acts, lambda kept: ((), act(kept)), lambda: (), kept, in_loop=in_loop)[1]


def offset(layout: Layout, dim: str, local_size: int) -> Array | int:
    """Index of this device's first entry in the whole `dim`."""
    rank = 0
    for axis in layout.cut_of(dim):
        if is_bound(axis):
            rank = rank * lax.axis_size(axis) + lax.axis_index(axis)
    return rank * local_size


def after(x: Array, earlier: Array) -> Array:
    """Return `x`, but only after `earlier` has been computed.

    It keeps the messages of simulated devices in one order (`parallax/sharding/message_order.py` says why), and on some
    TPUs those of a layer's gradients (`sends_small_gradients_last`).
    XLA removes an optimization_barrier before it fixes that order, so this function uses arithmetic that XLA cannot
    simplify. If a gradient is NaN, in which case the step is lost, messages are NaN, too.

    Communication:
        forward   nothing
        backward  nothing
    """
    probe = earlier.reshape(-1)[0]
    # XLA knows that integers are not NaN: it is `earlier` that is asked, not what it would be as one of `x`.
    return jnp.where(jnp.isnan(probe), probe.astype(x.dtype), x)


def _bound(axes: Iterable[str]) -> tuple[str, ...]:
    """The bound axes in mesh order. A sum adds its terms in this order, so it must not depend on the order of a set."""
    wanted = set(axes)
    return tuple(axis for axis in ALL_AXES if axis in wanted and is_bound(axis))


def all_gather(pattern: str, x: Array, *, first: Callable[[tuple[str, ...]], int] = lambda axes: 1) -> Array:
    """Gather over the axes that `after` lacks; axes of the same dim together.

    `first(axes)` is a group size. If it is more than 1, a gather over these axes takes two steps: first within groups
    of that many neighbouring ranks, then among the groups. The result and the number of bytes are the same.

    Communication:
        forward   all_gather of x over the axes that go
        backward  the transposes

    >>> all_gather("d_model/dp d_ff/tp -> d_model d_ff/tp", jnp.ones((2, 3))).shape
    (2, 3)
    """
    before, after = _checked(pattern, x)
    for dim, (old, new) in enumerate(zip(before.axes, after.axes, strict=True)):
        if old[: len(new)] != new:
            _refuse(pattern, f"only the last axes of a dim can be gathered; {before.names[dim]} needs another order")
        if gone := tuple(axis for axis in old[len(new) :] if is_bound(axis)):
            for groups in _gather_groups(ranks_over(gone), first(gone)):
                if dim == 0 or not _sends_leading_dims():
                    x = lax.all_gather(x, _named(gone), axis=dim, tiled=True, axis_index_groups=groups)
                else:
                    pieces = lax.all_gather(x, _named(gone), axis_index_groups=groups)
                    whole = *x.shape[:dim], len(pieces) * x.shape[dim], *x.shape[dim + 1 :]
                    x = jnp.moveaxis(pieces, 0, dim).reshape(whole)
    return x


def _sends_leading_dims() -> bool:
    """Whether gathers and scatters are along a dim of their own, before all others. XLA for CPUs lays out an array
    with the dim of such a message first, over a single rank, too: the residual stream would be transposed in memory
    before and after each, where here pieces are put side by side."""
    return platform_traced() == "cpu"


def _gather_groups(ranks: int, first: int) -> list[list[list[int]] | None]:
    """Groups of ranks for each step of a gather; None means all ranks.

    >>> _gather_groups(6, 1), _gather_groups(6, 2)
    ([None], [[[0, 1], [2, 3], [4, 5]], [[0, 2, 4], [1, 3, 5]]])
    """
    if first == 1 or first == ranks:
        return [None]
    numbers = range(ranks)
    near = [[*numbers[start : start + first]] for start in numbers[::first]]
    return [near, [[*numbers[start::first]] for start in range(first)]]


def reduce_scatter(pattern: str, x: Array) -> Array:
    """Add partial sums and keep this device's piece; `before` may omit its `+axis`.

    Communication:
        forward   reduce_scatter of x over the axes that come
        backward  the transposes
    """
    for dim, come, size in _cut_further(pattern, x, "scattered after the axes that shard it"):
        x = as_varying(x, come)
        if dim == 0 or not _sends_leading_dims():
            x = lax.psum_scatter(x, _named(come), scatter_dimension=dim, tiled=True)
        else:
            pieces = x.reshape(*x.shape[:dim], ranks_over(come), size, *x.shape[dim + 1 :])
            x = lax.psum_scatter(jnp.moveaxis(pieces, dim, 0), _named(come))
    return x


def exchange_and_add(pattern: str, x: Array) -> Array:
    """A `reduce_scatter` that adds in float32 and sends `x` in its own dtype: in bfloat16 each summand is rounded once,
    and no sum is. Devices exchange pieces, and each adds those that it keeps. TPU compilers overlap this exchange with
    compute, but not a reduce_scatter.

    Communication:
        forward   all_to_all of x over the axes that come
        backward  the transposes

    >>> exchange_and_add("d_model d_ff -> d_model/dp d_ff", jnp.ones((2, 3), "bfloat16")).dtype
    dtype('float32')
    """
    for dim, come, size in _cut_further(pattern, x, "scattered after the axes that shard it"):
        shape = *x.shape[:dim], -1, size, *x.shape[dim + 1 :]
        if 0 < dim < x.ndim - 1:
            # Between other dims, as in kernels of experts, pieces are brought apart first: compilers for TPU would lay
            # out all of the array anew, before and after. Elsewhere they do better by themselves.
            x, dim = jnp.moveaxis(x.reshape(shape), dim, 0), 0
            shape = x.shape
        pieces = lax.all_to_all(as_varying(x, come), _named(come), split_axis=dim, concat_axis=dim, tiled=True)
        pieces = pieces.reshape(shape)
        # One after the other: of TPU programs, a reduction would be the slowest part of this.
        x = sum(jnp.take(pieces, rank, axis=dim).astype(jnp.float32) for rank in range(pieces.shape[dim]))
    return x.astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_with_exchange(pattern: str, x: Array) -> Array:
    """`all_gather` with `exchange_and_add` as its backward pass: gradients are sent in their own dtype and added in
    float32.

    Communication:
        forward   all_gather of x over the axes that go
        backward  all_to_all of the gradient over the axes that go
    """
    return all_gather(pattern, x)


def _gather_forward(pattern: str, x: Array) -> tuple[Array, None]:
    return all_gather(pattern, x), None


def _exchange_backward(pattern: str, _: None, dy: Array) -> tuple[Array]:
    before, after = parse_move(pattern)
    return (exchange_and_add(f"{after} -> {before}", dy).astype(dy.dtype),)


gather_with_exchange.defvjp(_gather_forward, _exchange_backward)


def all_reduce(pattern: str, x: Array) -> Array:
    """Add partial sums over the axes that `before` marks with `+`; every device gets the whole sum.

    Communication:
        forward   all_reduce of x over the axes that go
        backward  the transposes

    >>> float(all_reduce("batch/dp +tp -> batch/dp", jnp.ones(1))[0])
    1.0
    """
    before, after = _checked(pattern, x)
    if before.axes != after.axes:
        _refuse(pattern, "an all-reduce does not change how dims are sharded")
    return sum_over(x, tuple(a for a in before.partial if a not in after.partial))


def sum_over(x: Array, axes: Iterable[str]) -> Array:
    """Add the copies of `x` over `axes`; every device gets the whole sum.

    Communication:
        forward   all_reduce of x over the axes
        backward  the transposes
    """
    bound = _bound(axes)
    return lax.psum(as_varying(x, bound), bound) if bound else x


def max_over(x: Array, axes: Iterable[str]) -> Array:
    """Maximum of the copies of `x` over `axes`. Not differentiable: stop the gradient first.

    Communication:
        forward   all_reduce of x over the axes
        backward  nothing
    """
    bound = _bound(axes)
    return lax.pmax(as_varying(x, bound), bound) if bound else x


def all_to_all(pattern: str, x: Array) -> Array:
    """Move one axis from one dim to another. The number of entries on a device does not change.

    Communication:
        forward   all_to_all of x over the axis
        backward  the transposes
    """
    before, after = _checked(pattern, x)
    moved = [a for a in ALL_AXES if _dim_of(before, a) != _dim_of(after, a)]
    if len(moved) != 1 or _dim_of(before, moved[0]) is None or _dim_of(after, moved[0]) is None:
        _refuse(pattern, "an all-to-all moves exactly one axis from one dim to another")
    (axis,) = moved
    source, target = _dim_of(before, axis), _dim_of(after, axis)
    if before.axes[source][-1] != axis or after.axes[target][-1] != axis:
        _refuse(pattern, f"{axis} must be the last axis of both dims")
    if not is_bound(axis):
        return x
    _check_divides(pattern, before.names[target], x.shape[target], (axis,))
    return lax.all_to_all(x, axis, split_axis=target, concat_axis=source, tiled=True)


def cut(pattern: str, x: Array) -> Array:
    """Keep this device's piece of a value that every device has.

    Communication:
        forward   nothing
        backward  all_reduce of the gradient over each axis that comes if x does not vary over it
    """
    for dim, come, _ in _cut_further(pattern, x, "sharded after the axes that shard it already"):
        for axis in come:
            size = x.shape[dim] // lax.axis_size(axis)
            x = lax.dynamic_slice_in_dim(as_varying(x, [axis]), lax.axis_index(axis) * size, size, dim)
    return x


def reshard(pattern: str, x: Array) -> Array:
    """Go from one layout to another by the cheapest collectives that do it.

    Partial sums are reduce-scattered if `after` shards a dim over their axis, and all-reduced otherwise. An axis that
    changes its dim moves by all-to-all, an axis that goes is gathered, and slicing over a new axis sends nothing.

    Communication:
        forward   reduce_scatter of x over each axis of partial sums if `after` cuts over it;
                  all_reduce of x over each axis of partial sums if `after` does not;
                  all_to_all of x over each axis if it changes its dim; all_gather of x over each axis if it goes
        backward  the transposes; all_reduce of the gradient over each axis if it comes and x does not vary over it
    """
    now, goal = _checked(pattern, x)
    for axis in now.partial:
        if axis in goal.partial:
            continue
        dim = _dim_of(goal, axis)
        step = now.without(axis)
        if dim is None:
            now, x = step, all_reduce(f"{now} -> {step}", x)
        else:
            step = step.with_cut(now.names[dim], (*now.axes[dim], axis))
            now, x = step, reduce_scatter(f"{now} -> {step}", x)
    for axis in ALL_AXES:
        source, target = _dim_of(now, axis), _dim_of(goal, axis)
        if source is not None and target is not None and source != target:
            step = now.without(axis).with_cut(now.names[target], (*now.axes[target], axis))
            now, x = step, all_to_all(f"{now} -> {step}", x)
    gone = [a for a in ALL_AXES if _dim_of(now, a) is not None and _dim_of(goal, a) is None]
    step = now.without(*gone)
    now, x = step, all_gather(f"{now} -> {step}", x)
    return cut(f"{now} -> {goal}", x)


def permute(layout: str, x: Array, *, axis: str, shift: int = 1) -> Array:
    """Send this rank's piece to the rank `shift` places later along `axis`; the last ranks send to the first.

    Communication:
        forward   permute of x over the axis
        backward  the transposes
    """
    if axis in Layout.parse(layout).used_axes():
        raise NotationError(f"permute over {axis}: {layout!r} is sharded over it; permute whole pieces only.")
    check_rank(layout, Layout.parse(layout), x)
    if not is_bound(axis):
        return x
    size = lax.axis_size(axis)
    return lax.ppermute(as_varying(x, [axis]), axis, [(i, (i + shift) % size) for i in range(size)])


def to_next_rank(tree: Any, axis: str, *, by: int = 1) -> Any:
    """Send each rank's values to the next rank along `axis`, or to the one `by` ranks on; the last sends to the first.

    Where `permutes_wait` for ranks that may not reach this call, all ranks of the axis gather, and each takes its own.

    Communication:
        forward   permute of x over the axis if not `permutes_wait`;
                  all_gather of x over the axis if `permutes_wait`
        backward  the transposes
    """
    size = lax.axis_size(axis)

    def sent(x: Array) -> Array:
        x = as_varying(x, [axis])
        if permutes_wait():
            return jnp.take(lax.all_gather(x, axis), (lax.axis_index(axis) - by) % size, axis=0)
        return lax.ppermute(x, axis, [(i, (i + by) % size) for i in range(size)])

    return jax.tree.map(sent, tree)


def permutes_wait() -> bool:
    """Whether a permute could deadlock because pipeline ranks take different branches. True except on TPU, where a
    permute involves only two devices."""
    return platform_traced() not in ("", "tpu") and is_bound("pp") and lax.axis_size("pp") > 1


def _checked(pattern: str, x: Array) -> tuple[Layout, Layout]:
    before, after = parse_move(pattern)
    check_rank(pattern, before, x)
    return before, after


def _cut_further(pattern: str, x: Array, rule: str) -> list[tuple[int, tuple[str, ...], int]]:
    """Each dim that becomes sharded over more bound axes: its index, these axes, the size of a piece. Errors quote
    the `rule` for such dims."""
    before, after = _checked(pattern, x)
    pieces = []
    for dim, (old, new) in enumerate(zip(before.axes, after.axes, strict=True)):
        if new[: len(old)] != old:
            _refuse(pattern, f"a dim is {rule}; {before.names[dim]} is not")
        if come := tuple(axis for axis in new[len(old) :] if is_bound(axis)):
            pieces.append((dim, come, _check_divides(pattern, before.names[dim], x.shape[dim], come)))
    return pieces


def _check_divides(pattern: str, name: str, size: int, axes: tuple[str, ...]) -> int:
    pieces = ranks_over(axes)
    if size % pieces:
        over = " x ".join(f"{axis}={lax.axis_size(axis)}" for axis in axes)
        _refuse(pattern, f"a local {name} of {size} does not divide over {over}")
    return size // pieces


def _named(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    """Axes as JAX takes them: a single axis as its name."""
    return axes if len(axes) > 1 else axes[0]


def _dim_of(layout: Layout, axis: str) -> int | None:
    return next((dim for dim, axes in enumerate(layout.axes) if axis in axes), None)


def _refuse(pattern: str, why: str) -> None:
    raise NotationError(f"{pattern!r}: {why}.")
