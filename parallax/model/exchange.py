"""How tokens come to the ranks that hold their experts, and the results back: two forms that give the same.

Either sends a token to a rank once, however many of its experts that holds, and one sum comes back.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.model.experts import HeldExperts, collect, dispatch, sort_rows
from parallax.model.kernels import platform_traced
from parallax.sharding.activations import EXPERT_AXIS, activation
from parallax.sharding.collectives import (
    all_gather,
    as_varying,
    bound_axis_sizes,
    is_bound,
    reshard,
    varying_axes,
)
from parallax.sharding.layout import Layout

NOWHERE = -1  # the id of no expert


def gather_exchange(experts: HeldExperts, residual: str, x: Array, weights: Array, ids: Array) -> Array:
    """Every rank gets the tokens of all, [B, S, ...]; partial sums are scattered to the layout of the residual.

    Communication:
        forward   all_gather of x, weights and ids over ep;
                  reduce_scatter of the result over tp; reduce_scatter of the result over ep
        backward  all_gather of the gradient over ep; all_gather of the gradient over tp;
                  reduce_scatter of the gradient of x and the gradient of weights over ep
    """
    x, weights, ids = _gathered("d_model", x), _gathered("entries", weights), _gathered("entries", ids)
    y = experts(x, _flat(weights), _flat(ids))
    # First over tp, whose links are the fastest.
    made, mine = Layout.parse(activation("d_model")).without(EXPERT_AXIS), Layout.parse(residual)
    scattered = mine.without(EXPERT_AXIS).with_partial(EXPERT_AXIS)
    y = reshard(f"{made.with_partial(EXPERT_AXIS, 'tp')} -> {scattered}", y)
    return reshard(f"{scattered} -> {mine}", y)


def ragged_exchange(experts: HeldExperts, residual: str, x: Array, weights: Array, ids: Array) -> Array:
    """A rank gets the tokens that go to one of its experts; it has room for all of all ranks, so none is ever dropped.
    Ragged ones are the all-to-alls: each rank sends to each other as many rows as it has for it.

    Communication:
        forward   all_gather of the counts over ep; all_to_all of x, weights, ids and the result over ep;
                  reduce_scatter of the result over tp
        backward  all_gather of the gradient over tp;
                  all_to_all of the gradient of x, the gradient of weights and the gradient over ep
    """
    if not is_bound(EXPERT_AXIS):
        return gather_exchange(experts, residual, x, weights, ids)
    ranks, shape = lax.axis_size(EXPERT_AXIS), x.shape
    x, weights, ids = _flat(x), _flat(weights), _flat(ids)
    number = jnp.arange(ranks)
    goes_NP = ((ids // len(experts.gate))[:, :, None] == number.reshape(1, 1, -1)).any(axis=1)
    rows = sort_rows(jnp.where(goes_NP, number[None], ranks), ranks, most=min(ids.shape[1], ranks))
    counts_PP = all_gather("rows/ep columns -> rows columns", rows.sizes_E[None])
    send = functools.partial(moved, counts=counts_PP, rows=ranks * len(x))
    arrived = send(dispatch(x, rows)), send(dispatch(weights, rows)), send(ids[rows.choice_R // ranks], fill=NOWHERE)
    y = experts(*(checkpoint_name(array, "dispatch") for array in arrived))
    y = collect(moved(y, counts_PP.T, len(rows.choice_R)), rows).reshape(shape)
    return reshard(f"{activation('d_model')} +tp -> {residual}", y)


EXCHANGES = {"gather": gather_exchange, "ragged": ragged_exchange}


def moved(x_RD: Array, counts: Array, rows: int, fill: int = 0) -> Array:
    """Rows sorted by the rank that they go to, as they arrive, sorted by the rank that they come from, [rows, D].

    `counts[p, q]` says how many go from rank p to rank q. Behind those that arrive there is `fill`.

    Communication:
        forward   all_to_all of x over ep
        backward  the transposes
    """
    axes = frozenset([EXPERT_AXIS]).union(varying_axes(x_RD), varying_axes(counts))
    return _moved(as_varying(x_RD, axes), as_varying(counts, axes), (len(x_RD), rows), fill)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _moved(x: Array, counts: Array, rows: tuple[int, int], fill: int) -> Array:
    me = lax.axis_index(EXPERT_AXIS)
    before = lambda counts, axis: jnp.cumsum(counts, axis=axis) - counts  # noqa: E731
    output = as_varying(jnp.full((rows[1], *x.shape[1:]), fill, x.dtype), varying_axes(x))
    # Where what I send begins here, and where it begins on the rank that gets it.
    begins, arrives = before(counts[me], 0), before(counts, 0)[me]
    exchange = ragged_all_to_all if platform_traced() == "cpu" else lax.ragged_all_to_all
    return exchange(x, output, begins, counts[me], arrives, counts[:, me], axis_name=EXPERT_AXIS)


def _move_forward(x: Array, counts: Array, rows: tuple[int, int], fill: int) -> tuple[Array, Array]:
    return _moved(x, counts, rows, fill), counts


def _move_backward(rows: tuple[int, int], fill: int, counts: Array, dy: Array) -> tuple[Array, None]:
    return _moved(dy, counts.T, rows[::-1], 0), None


_moved.defvjp(_move_forward, _move_backward)


def ragged_all_to_all(
    x_RD: Array,
    output_TD: Array,
    input_offsets: Array,
    send_sizes: Array,
    output_offsets: Array,
    recv_sizes: Array,
    *,
    axis_name: str,
) -> Array:
    """What `jax.lax.ragged_all_to_all` does, which XLA does not have on CPUs: all ranks' rows are gathered, and each
    takes its own.

    Communication:
        forward   all_gather of x, input_offsets and output_offsets over ep
        backward  nothing
    """
    me, row = lax.axis_index(axis_name), jnp.arange(len(output_TD))
    gathered = (lax.all_gather(array, axis_name) for array in (x_RD, input_offsets, output_offsets))
    x_PRD, begins_P, arrives_P = (array if at == 0 else array[:, me] for at, array in enumerate(gathered))
    for x, begins, arrives, size in zip(x_PRD, begins_P, arrives_P, recv_sizes):
        mine = (row >= arrives) & (row < arrives + size)
        found = x.at[begins + row - arrives].get(mode="clip")
        output_TD = jnp.where(mine.reshape(-1, *(1 for _ in x.shape[1:])), found, output_TD)
    return output_TD


def _gathered(dims: str, x: Array) -> Array:
    mine = Layout.parse(activation(dims))
    gathered = all_gather(f"{mine} -> {mine.without(EXPERT_AXIS)}", x)
    # With a name it would be saved beside x where nothing is sent.
    return checkpoint_name(gathered, "dispatch") if bound_axis_sizes().get(EXPERT_AXIS, 1) > 1 else gathered


def _flat(x_BSD: Array) -> Array:
    return x_BSD.reshape(-1, x_BSD.shape[-1])
