"""Sends tokens to the ranks that hold their experts, and results back: two forms with equal results, and a plain one.

What goes in: the experts of this rank; tokens `x`, [B, S, D], of this ep rank, whole over tp; for each token the
`weights` and `ids` of its K experts, [B, S, K]. What comes out: for each token the sum of its experts' outputs times
their weights, in the residual's layout, plus what `shared_experts` computes while rows travel.

`plain_exchange` is these words as code, and JAX differentiates it. `gather_exchange` sends all tokens to all ranks, and
each computes those of its experts; `ragged_exchange` sends a row for each choice, in an order by hand that hides most
messages: parallax/model/experts/ragged.py. Tests hold both to the plain form, in values and gradients.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from parallax.model.experts.experts import HeldExperts
from parallax.model.experts.hosts import sums_by_host
from parallax.model.experts.ragged import sums_of_rows
from parallax.sharding.activations import EXPERT_AXIS, activation
from parallax.sharding.collectives import all_gather, bound_axis_sizes, is_bound, reshard
from parallax.sharding.layout import Layout

SharedExperts = Callable[[Array | None], Array]  # the argument is for `ordered`


def plain_exchange(
    experts: HeldExperts,
    residual: str,
    x: Array,
    weights: Array,
    ids: Array,
    shared_experts: SharedExperts | None = None,
) -> Array:
    """What the other exchanges compute, in plain products: each expert computes all tokens. It is no choice of
    layout.exchange.

    Communication: that of `gather_exchange`.
    """
    x, weights, ids = _gathered("d_model", x), _gathered("entries", weights), _gathered("entries", ids)
    gate, up, down = (held.kernels for held in experts)
    weights_BSE = jnp.where(ids[..., None] == experts.ids()[None, None, None], weights[..., None], 0).sum(axis=2)
    wide = [jnp.einsum("BSD,EDU->BSEU", x, kernels) for kernels in (gate, up)]
    if experts.gate.bias is not None:
        wide = [products + held.bias[None, None] for products, held in zip(wide, experts)]
    hidden = experts.activation(*wide)
    y = jnp.einsum("BSEU,EUD,BSE->BSD", hidden, down, weights_BSE)
    return _with_shared(_scattered(y, residual), shared_experts)


def gather_exchange(
    experts: HeldExperts,
    residual: str,
    x: Array,
    weights: Array,
    ids: Array,
    shared_experts: SharedExperts | None = None,
) -> Array:
    """Every rank gets the tokens of all ranks; partial sums are scattered to the residual's layout.

    Communication:
        forward   all_gather of x, weights and ids over ep;
                  reduce_scatter of the result over tp; reduce_scatter of the result over ep
        backward  all_gather of the gradient over ep; all_gather of the gradient over tp;
                  reduce_scatter of the gradient of x and the gradient of weights over ep
    """
    x, weights, ids = _gathered("d_model", x), _gathered("entries", weights), _gathered("entries", ids)
    return _with_shared(_scattered(experts(x, _flat(weights), _flat(ids)), residual), shared_experts)


def ragged_exchange(
    experts: HeldExperts,
    residual: str,
    x: Array,
    weights: Array,
    ids: Array,
    shared_experts: SharedExperts | None = None,
    send_again: bool = False,
    hosts: int = 1,
) -> Array:
    """A rank gets one row for each choice of one of its experts, and the results are sent back.

    The all-to-alls are ragged: each rank sends each other rank as many rows as it has for it, in units of 8, which are
    whole tiles of TPUs. A rank has room for a quarter more than its share of all rows, `usual_rows`, in two rounds if
    these are many: the rows of one travel while those of the other are multiplied. If any rank would get more, the
    remaining rows are sent in further rounds. So none is ever dropped, and only time depends on the load.

    Compilers compute shared experts while the last results travel, and their gradient while the first rows do: the
    first products of the backward pass are computed after that.

    With `send_again` received tokens have no name to be saved by: the backward pass sends x once more, the rows of a
    round after the products of the round before. Recomputed, all would be sent before its first products.

    With several `hosts`, over which ranks are spread in turn, a token is sent once to each that has any of its experts,
    and from there to their ranks: parallax/model/experts/hosts.py. Messages are those between hosts and those inside.

    Communication:
        forward   all_gather of the counts with the weights over ep; all_to_all of x and the result over ep;
                  reduce_scatter of the result over tp
        backward  all_gather of the gradient over tp; all_gather of the gradient of weights over ep;
                  all_to_all of the gradient and the gradient of x over ep

    Communication, several hosts:
        forward   all_gather of weights and ids over ep; all_to_all of x and the result over ep;
                  all_gather of the counts with the weights over ep; all_to_all of x and the result over ep;
                  reduce_scatter of the result over tp
        backward  all_gather of the gradient over tp; all_gather of the gradient of weights over ep;
                  all_to_all of the gradient and the gradient of x over ep;
                  all_to_all of the gradient and the gradient of x over ep; reduce_scatter of the gradient of weights
                  over ep
    """
    if not is_bound(EXPERT_AXIS):
        return gather_exchange(experts, residual, x, weights, ids, shared_experts)
    given = experts, _flat(x), _flat(weights), _flat(ids), shared_experts, send_again
    y, shared = sums_of_rows(*given) if hosts == 1 else sums_by_host(*given, hosts)
    y = reshard(f"{activation('d_model')} +tp -> {residual}", y.reshape(x.shape))
    return y if shared is None else y + shared


EXCHANGES = {"gather": gather_exchange, "ragged": ragged_exchange}
SENT_AGAIN = "ragged again"
EXCHANGE_FORMS = EXCHANGES | {SENT_AGAIN: functools.partial(ragged_exchange, send_again=True)}


def exchange_form(name: str, hosts: int) -> Callable[..., Array]:
    """The form with this name, for ranks on so many hosts."""
    return EXCHANGE_FORMS[name] if hosts == 1 else functools.partial(EXCHANGE_FORMS[name], hosts=hosts)


def _gathered(dims: str, x: Array) -> Array:
    layout = Layout.parse(activation(dims))
    gathered = all_gather(f"{layout} -> {layout.without(EXPERT_AXIS)}", x)
    # With a name it would be saved in addition to x if nothing is sent.
    return checkpoint_name(gathered, "dispatch") if bound_axis_sizes().get(EXPERT_AXIS, 1) > 1 else gathered


def _scattered(y: Array, residual: str) -> Array:
    """Partial sums of all ranks' tokens in the residual's layout, summed first over tp, whose links are the fastest."""
    computed, wanted = Layout.parse(activation("d_model")).without(EXPERT_AXIS), Layout.parse(residual)
    scattered = wanted.without(EXPERT_AXIS).with_partial(EXPERT_AXIS)
    y = reshard(f"{computed.with_partial(EXPERT_AXIS, 'tp')} -> {scattered}", y)
    return reshard(f"{scattered} -> {wanted}", y)


def _with_shared(y: Array, shared_experts: SharedExperts | None) -> Array:
    return y + shared_experts(None) if shared_experts else y


def _flat(x_BSD: Array) -> Array:
    return x_BSD.reshape(-1, x_BSD.shape[-1])
