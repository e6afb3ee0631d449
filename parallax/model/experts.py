"""The experts that a rank holds: tokens in rows, sorted by expert, and what comes of them summed for each token."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from parallax.config.sections import ModelConfig
from parallax.model.grouped import grouped_dot
from parallax.sharding.collectives import as_varying, offset, varying_axes
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import parameter

INTO, BACK = "experts/ep d_model d_expert/tp", "experts/ep d_expert/tp d_model"


class Experts(nn.Module):
    """The kernels of the experts that are here, in the model's dtype.

    Communication:
        forward   nothing
        backward  nothing
    """

    model: ModelConfig
    out_scale: float

    def setup(self):
        self.gate = self._kernel("gate", INTO, self.model.d_model**-0.5)
        self.up = self._kernel("up", INTO, self.model.d_model**-0.5)
        self.down = self._kernel("down", BACK, self.out_scale * self.model.d_expert**-0.5)

    def __call__(self) -> "HeldExperts":
        return HeldExperts(*(kernel.astype(self.model.dtype) for kernel in (self.gate, self.up, self.down)))

    def _kernel(self, name: str, layout: str, deviation: float) -> Array:
        init = nn.initializers.normal(deviation)
        return parameter(self, name, layout, self.model.sizes, init, at_rest="d_model")


class HeldExperts(NamedTuple):
    """Gated MLPs [E, D, U] and [E, U, D] of consecutive ids, of each of which this rank holds a piece over tp."""

    gate: Array
    up: Array
    down: Array

    def __call__(self, x_ND: Array, weights_NK: Array, ids_NK: Array) -> Array:
        """The sum of what a token's experts give that are here, times their weights [N, K], [N, D] of x's dtype.

        It is a partial sum over tp, and over ep where the others' experts were meant, too.
        """
        axes = frozenset().union(*map(varying_axes, (x_ND, weights_NK, ids_NK, *self)))
        x_ND, weights_NK, ids_NK = (as_varying(array, axes) for array in (x_ND, weights_NK, ids_NK))
        count = len(self.gate)
        own_NK = ids_NK - offset(Layout.parse(INTO), "experts", count)
        rows = sort_rows(own_NK, count, most=min(ids_NK.shape[1], count))
        x_RD = dispatch(x_ND, rows)
        gate, up = (checkpoint_name(grouped_dot(x_RD, w, rows.sizes_E), "mlp") for w in (self.gate, self.up))
        # Times the weights before the last product, not after it: then its result is not kept for their gradient.
        hidden = _gated(gate, up, dispatch(weights_NK.reshape(-1, 1), rows.of_choices()))
        return collect(grouped_dot(hidden, self.down, rows.sizes_E), rows)


@jax.checkpoint
def _gated(gate: Array, up: Array, weight: Array) -> Array:
    return (nn.silu(gate) * up * weight).astype(gate.dtype)


class Rows(NamedTuple):
    """Choices, each of a token and one of K places, in rows sorted by what was chosen; `sizes_E` of each there are."""

    choice_R: Array  # token * K + place; behind the last row that is in use, of any token
    row_NK: Array  # where each choice is; R where it has no row
    sizes_E: Array

    def of_choices(self) -> "Rows":
        """The same rows, of an array [N * K, ...] of what belongs to choices."""
        return self._replace(row_NK=self.row_NK.reshape(-1, 1))


def sort_rows(chosen_NK: Array, count: int, *, most: int) -> Rows:
    """Rows of the choices from 0 to count - 1, of which a token has at most so many; in order of the tokens."""
    tokens, places = chosen_NK.shape
    chosen = jnp.where((chosen_NK >= 0) & (chosen_NK < count), chosen_NK, count).reshape(-1)
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    row = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32), unique_indices=True)
    row_NK = jnp.where(chosen < count, row, tokens * most).reshape(tokens, places)
    sizes_E = (chosen[:, None] == jnp.arange(count)[None]).sum(axis=0).astype(jnp.int32)
    return Rows(order[: tokens * most], row_NK, sizes_E)


@jax.custom_vjp
def dispatch(x_ND: Array, rows: Rows) -> Array:
    """Each row's token, [R, D]; its transpose is `collect`. Rows that are not in use have some token, too."""
    return x_ND[rows.choice_R // rows.row_NK.shape[1]]


@jax.custom_vjp
def collect(y_RD: Array, rows: Rows) -> Array:
    """Of each token the sum of its rows, in float32, as y's dtype, [N, D]."""
    found_NKD = y_RD.at[rows.row_NK].get(mode="fill", fill_value=0)
    return found_NKD.sum(axis=1, dtype=jnp.float32).astype(y_RD.dtype)


def _dispatched(x_ND: Array, rows: Rows) -> tuple[Array, Rows]:
    return dispatch(x_ND, rows), rows


def _collected(y_RD: Array, rows: Rows) -> tuple[Array, Rows]:
    return collect(y_RD, rows), rows


def _dispatch_in_use(rows: Rows, dy_ND: Array) -> tuple[Array, None]:
    in_use_R = jnp.arange(len(rows.choice_R)) < rows.sizes_E.sum()
    return jnp.where(in_use_R[:, None], dispatch(dy_ND, rows), 0), None


dispatch.defvjp(_dispatched, lambda rows, dx: (collect(dx, rows), None))
collect.defvjp(_collected, _dispatch_in_use)
