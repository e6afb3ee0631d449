"""The ragged exchange in two levels: a token is sent once to each host that has any of its experts, and inside the host
to their ranks.

Of the expert ranks the first `ranks` are on the first host, the next on the second, and so on. Between hosts a rank
sends to those that have its number in their hosts. Tokens of the host at p arrive behind p * N rows, in their order; so
whoever knows their experts knows their places, and no further message has to tell them. Inside a host they go the way
of all tokens, parallax/model/experts/ragged.py: it adds up the results of a token's experts on this host, and the sums
go back over the network.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from parallax.model.experts.exchange_costs import share_of_host
from parallax.model.experts.experts import HeldExperts
from parallax.model.experts.ragged import Slices, alike_over_ranks, gather_group, group_rank, send_back, sums_of_rows
from parallax.model.experts.rows import Rows, collect, dispatch, sort_rows, transposes_of_each_other
from parallax.sharding.activations import EXPERT_AXIS
from parallax.sharding.collectives import as_varying, varying_axes

BETWEEN_HOSTS = "exchange.hosts="  # begins the scope of messages between hosts; the share of tokens for a host follows


def share_between_hosts(stack: str) -> float | None:
    """The share of tokens that are sent to a host in this scope of a program; None outside of these scopes.

    >>> share_between_hosts("mlp/exchange.hosts=0.9494/ragged_all_to_all"), share_between_hosts("mlp")
    (0.9494, None)
    """
    share = re.search(rf"{re.escape(BETWEEN_HOSTS)}([\d.]+)", stack)
    return float(share[1]) if share else None


class HostRows(NamedTuple):
    """This rank's tokens in rows sorted by host, for each host that a token goes to one; and the slices that come back
    from each host to each rank with this number in its host."""

    rows: Rows
    slices: Slices


def sums_by_host(
    experts: HeldExperts,
    x_ND: Array,
    weights_NK: Array,
    ids_NK: Array,
    shared_experts: Callable[[Array], Array] | None,
    send_again: bool,
    hosts: int,
) -> tuple[Array, Array | None]:
    """What `sums_of_rows` computes. Between hosts, arrays of a rank's M = hosts * N tokens have the places of all that
    may come."""
    x_ND, weights_NK, ids_NK, experts = alike_over_ranks(x_ND, weights_NK, ids_NK, experts)
    ranks, (tokens, choices) = lax.axis_size(EXPERT_AXIS) // hosts, ids_NK.shape
    here, of_host = group_rank(hosts, ranks), ranks * experts.count
    weights_MK, ids_MK = (
        checkpoint_name(gather_group(array, hosts, ranks), "dispatch") for array in (weights_NK, ids_NK)
    )
    goes_PNH = _goes(ids_MK // of_host, hosts).reshape(hosts, tokens, hosts)
    hosts_NH = jnp.where(_goes(ids_NK // of_host, hosts), jnp.arange(hosts)[None], hosts)
    rows, counts_PH = sort_rows(hosts_NH, hosts, most=min(hosts, choices)), goes_PNH.sum(axis=1, dtype=jnp.int32)
    before_PH = jnp.cumsum(counts_PH, axis=1) - counts_PH
    places = jnp.tile(tokens * jnp.arange(hosts, dtype=jnp.int32), (hosts, 1))
    between = HostRows(rows, Slices(counts_PH.T, before_PH.T, places))
    # Which of the tokens is at each place; those that do not come follow behind those of their rank that do.
    comes_M = lax.dynamic_index_in_dim(goes_PNH, here, axis=2, keepdims=False).reshape(-1)
    token_M = jnp.argsort(2 * (jnp.arange(len(comes_M)) // tokens) + ~comes_M, stable=True)
    ids_MK = jnp.where(comes_M[token_M][:, None], ids_MK[token_M] - here * of_host, -1)
    weights_MK = weights_MK.at[token_M].get(unique_indices=True)
    between_hosts = f"{BETWEEN_HOSTS}{share_of_host(hosts * of_host, choices, hosts):.4f}"
    with jax.named_scope(between_hosts):
        x_MD = checkpoint_name(to_hosts(x_ND, between), "dispatch")
    y_MD, shared = sums_of_rows(experts, x_MD, weights_MK, ids_MK, shared_experts, send_again, hosts)
    with jax.named_scope(between_hosts):
        return from_hosts(y_MD, between), shared


@jax.custom_vjp
def to_hosts(x_ND: Array, between: HostRows) -> Array:
    """The tokens that come from all hosts, [M, D], and zeros where none comes; its transpose is `from_hosts`.

    Communication:
        forward   all_to_all of x over ep
        backward  the transposes
    """
    hosts = between.slices.size.shape[1]
    empty = as_varying(jnp.zeros((hosts * len(x_ND), x_ND.shape[1]), x_ND.dtype), varying_axes(x_ND))
    return _send(dispatch(x_ND, between.rows), between.slices.reverse(), empty)


@jax.custom_vjp
def from_hosts(y_MD: Array, between: HostRows) -> Array:
    """For each token the sum of what all hosts return, [N, D].

    Communication:
        forward   all_to_all of y over ep
        backward  the transposes
    """
    rows = len(between.rows.choice_R)
    empty = as_varying(lax.empty((rows, y_MD.shape[1]), y_MD.dtype), varying_axes(y_MD))
    return collect(_send(y_MD, between.slices, empty), between.rows)


transposes_of_each_other(to_hosts, from_hosts)


def _send(x: Array, slices: Slices, others: Array) -> Array:
    return send_back(x, slices, others, apart=lax.axis_size(EXPERT_AXIS) // slices.size.shape[1])


def _goes(hosts_NK: Array, hosts: int) -> Array:
    """Whether each token goes to each host, [N, H]."""
    return (hosts_NK[:, :, None] == jnp.arange(hosts)[None, None]).any(axis=1)
