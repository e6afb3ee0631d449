"""Choices of tokens in rows sorted by expert, and results summed for each token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Rows(NamedTuple):
    """Choices, each of a token and one of its K places, in rows sorted by the chosen expert; `sizes_E` counts them."""

    choice_R: Array  # token * K + place, or N * K or more for none; arbitrary after the last row in use
    row_NK: Array  # row of each choice; R if it has none
    sizes_E: Array

    def of_choices(self) -> "Rows":
        """The same rows, for an array [N * K, ...] with an entry for each choice."""
        return self._replace(row_NK=self.row_NK.reshape(-1, 1))


def sort_rows(chosen_NK: Array, count: int, *, most: int, unit: int = 1) -> Rows:
    """Rows of the choices from 0 to count - 1; rows of the same choice are in the order of the tokens. A token has at
    most `most` of these choices. The size of each expert is a multiple of `unit`: the last rows of some are of no
    choice, their `choice_R` is N * K or more."""
    tokens, places = chosen_NK.shape
    chosen = jnp.where((chosen_NK >= 0) & (chosen_NK < count), chosen_NK, count).reshape(-1)
    sizes_E = (chosen[:, None] == jnp.arange(count)[None]).sum(axis=0).astype(jnp.int32)
    keys, sizes_E = (chosen, sizes_E) if unit == 1 else _filled_up(chosen, sizes_E, unit)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    row = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32), unique_indices=True)
    rows = tokens * most + len(keys) - len(chosen)
    row_NK = jnp.where(chosen < count, row[: len(chosen)], rows).reshape(tokens, places)
    return Rows(order[:rows], row_NK, sizes_E)


def _filled_up(chosen: Array, sizes_E: Array, unit: int) -> tuple[Array, Array]:
    """The chosen experts, and further choices until the size of each expert is a multiple of `unit`; the sizes."""
    count, spare_E = len(sizes_E), -sizes_E % unit
    is_spare = jnp.arange(unit - 1)[None] < spare_E[:, None]
    spare = jnp.where(is_spare, jnp.arange(count)[:, None], count).reshape(-1)
    spare = jnp.pad(spare, (0, -(len(chosen) + len(spare)) % unit), constant_values=count)
    return jnp.concatenate([chosen, spare]), sizes_E + spare_E


def blocks_of_groups(sizes_E: Array, rows: int, size: int) -> tuple[Array, Array, Array]:
    """Blocks of `size` of the rows, each of one group: for each its group, its first row and the number of rows of its
    group. There are as many as may be needed; unused ones begin after all rows.

    >>> [table.tolist() for table in blocks_of_groups(jnp.array([3, 0, 1]), 5, size=2)]
    [[0, 0, 2, 2], [0, 2, 3, 5], [2, 1, 1, 0]]
    """
    count = (rows + len(sizes_E) * (size - 1)) // size
    needed_E = -(-sizes_E // size)
    last_E, ends_E = jnp.cumsum(needed_E), jnp.cumsum(sizes_E)
    number = jnp.arange(count)
    group = (number[:, None] >= last_E[None]).sum(axis=1)
    is_needed = group < len(sizes_E)
    group = jnp.minimum(group, len(sizes_E) - 1)
    first = (ends_E - sizes_E)[group] + (number - (last_E - needed_E)[group]) * size
    rows_of_group = jnp.clip(ends_E[group] - first, 0, size)
    return group, jnp.where(is_needed, first, rows), jnp.where(is_needed, rows_of_group, 0)


def transposes_of_each_other(*pair: jax.custom_vjp) -> None:
    """Let the backward pass of each of two functions, linear in their first argument, be the other one. Of what else
    they take, they take the same."""
    for function, transpose in (pair, pair[::-1]):
        function.defvjp(
            lambda x, *others, function=function: (function(x, *others), others),
            lambda others, dy, transpose=transpose: (transpose(dy, *others), *(None for _ in others)),
        )


@jax.custom_vjp
def dispatch(x_ND: Array, rows: Rows) -> Array:
    """Each row's token, [R, D]; its transpose is `collect`. Rows that are not in use get an arbitrary token."""
    return x_ND[rows.choice_R // rows.row_NK.shape[1]]


@jax.custom_vjp
def collect(y_RD: Array, rows: Rows) -> Array:
    """The sum of each token's rows, added in float32, in y's dtype, [N, D]."""
    return sums_of_tokens(rows.row_NK, y_RD)


def sums_of_tokens(row_NK: Array, *arrays_RD: Array, mode: str = "fill") -> Array:
    """The sum of each token's rows over all arrays; a row that does not exist counts as 0."""
    # Added one after the other, all in one pass; on TPU a sum over a dim of size K is slower.
    of_tokens = (y_RD.at[row_N].get(mode=mode, fill_value=0) for y_RD in arrays_RD for row_N in row_NK.T)
    return sum(y_ND.astype(jnp.float32) for y_ND in of_tokens).astype(arrays_RD[0].dtype)


# Rows that are not in use get a gradient, too, which no grouped product and no exchange reads.
transposes_of_each_other(dispatch, collect)
