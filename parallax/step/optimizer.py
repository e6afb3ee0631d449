"""Optimizers in the global view: optax under jit, outside shard_map, on arrays sharded as they are stored.

The communication of an update, for Muon's products and the norm, is written here in the local view.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from parallax.config.sections import OptimizerConfig
from parallax.errors import ConfigError, quoted
from parallax.sharding.collectives import (
    all_gather,
    as_varying,
    bound_axis_sizes,
    ranks_over,
    sum_over,
    varying_axes,
)
from parallax.sharding.host import is_on_host
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import ParameterSpec, Role, in_32_bits
from parallax.sharding.plan import ParameterPlan
from parallax.sharding.slots import read_layer
from parallax.step.low_precision import MOMENT_FIELDS, with_states_in
from parallax.user_code import name_in_module, named, names_code, takes

DECAYED = (Role.WEIGHT, Role.TABLE)  # roles of parameters with weight decay
# Root mean square of the entries of Muon's direction, matched to AdamW's so that one learning rate serves both
# (arXiv 2502.16982, section 2.2); that of an orthogonal matrix is 1 / root of its longer side.
MUON_RMS = 0.2
MUON_ROUNDS, MUON_EPS = 5, 1e-8  # as in optax.contrib.scale_by_muon


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate at each step, counted from 0: linear warm-up to the peak, then the schedule.

    The last step, `steps - 1`, has the schedule's last value, except if it is the first, which has the peak.

    Raises ConfigError if warm-up does not end before `steps`.
    """
    if config.warmup_steps >= max(steps, 1):
        raise ConfigError(
            f"optimizer.warmup_steps={config.warmup_steps} must be below train.steps={steps}; "
            f"use warmup_steps={steps // 10}."
        )
    top = max(config.warmup_steps - 1, 0)  # the step at the peak
    peak, last, rest = config.learning_rate, config.learning_rate * config.final_ratio, max(steps - 1 - top, 1)
    falling = max(round(rest * config.decay_fraction), 1)
    stays = config.schedule.startswith("wsd") and not config.decay_fraction
    schedule = "constant" if stays else config.schedule
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, config.final_ratio),
        "linear": lambda: optax.linear_schedule(peak, last, rest),
        "wsd": lambda: optax.linear_schedule(peak, last, falling, transition_begin=rest - falling),
        "wsd_sqrt": lambda: _one_minus_sqrt(peak, last, falling, begin=rest - falling),
        "constant": lambda: optax.constant_schedule(peak),
    }[schedule]()
    # The first step has 1/warmup of the peak instead of 0, so that it is not wasted.
    rising = optax.linear_schedule(peak / max(config.warmup_steps, 1), peak, max(top, 1))
    return in_32_bits()(optax.join_schedules([rising, after], [top]))


def _one_minus_sqrt(peak: float, last: float, steps: int, *, begin: int) -> optax.Schedule:
    """The cool-down that Hägele et al. 2024 recommend (arXiv 2405.18392, section 3.2), from the peak at `begin`."""

    def rate(count: Array) -> Array:
        share = jnp.clip((count - begin) / steps, 0, 1)
        return peak - (peak - last) * jnp.sqrt(share)

    return rate


def make_optimizer(config: OptimizerConfig, steps: int, rows: Any) -> optax.GradientTransformation:
    """Clip by the norm of the whole gradient, then AdamW, Muon or an optimizer of a user's own; weight decay skips
    norms and biases. Parameters that are not trained are not changed, and it keeps no states of them.

    `rows` are those of the model's plan, which say what each parameter is. If moments are not in float32, `update`
    takes `noise`: see `with_states_in`.
    """
    decayed = jax.tree.map(lambda row: row.spec.role in DECAYED, rows)
    if names_code(config.name):
        update = users_update(config, steps, rows, decayed)
    else:
        direction = optax.scale_by_adam(config.b1, config.b2, config.eps)
        if config.name == "muon":
            direction = muon_and(direction, config.muon_momentum, rows)
        update = update_along(direction, config, steps, decayed)
    trained = optax.chain(clip_by_norm(config.clip_norm), update) if config.clip_norm else update
    kinds = jax.tree.map(lambda row: "trained" if row.spec.is_trained else "frozen", rows)
    if "frozen" in jax.tree.leaves(kinds):
        trained = optax.partition({"frozen": optax.set_to_zero(), "trained": trained}, kinds)
    dtypes = {field: getattr(config, key) for field, key in MOMENT_FIELDS.items()}
    return trained if {*dtypes.values()} == {"float32"} else with_states_in(trained, dtypes, rows)


def update_along(
    direction: optax.GradientTransformation, config: OptimizerConfig, steps: int, decayed: Any
) -> optax.GradientTransformation:
    """The update in this direction, with weight decay of parameters where `decayed`, times the learning rate."""
    decay = optax.add_decayed_weights(config.weight_decay, decayed)
    return optax.chain(direction, decay, optax.scale_by_learning_rate(learning_rate(config, steps)))


def users_update(config: OptimizerConfig, steps: int, rows: Any, decayed: Any) -> optax.GradientTransformation:
    """The update of a user's own optimizer.

    A function with a parameter `learning_rate`, as optax.lion, makes all of it. It gets the schedule, and weight_decay,
    `mask` (of the parameters to decay) and `rows` if it has such parameters. Any other function, as
    optax.scale_by_lion, makes a direction, which gets weight decay and the learning rate.

    Raises ConfigError for settings that would do nothing.
    """
    make, has = named("optimizer.name", config.name, {}), functools.partial(takes, config.name)
    for key in ("b1", "b2", "eps", "muon_momentum"):
        if getattr(config, key) != getattr(OptimizerConfig, key):
            raise ConfigError(
                f"optimizer.{key}={getattr(config, key)} does nothing with optimizer.name={quoted(config.name)}; leave "
                f"it out, and write the settings of {name_in_module(config.name)} in the name, as NAME(b1=0.9)."
            )
    given = {"rows": rows} if has("rows") else {}
    if not has("learning_rate"):
        return update_along(_transformation(config, make(**given)), config, steps, decayed)
    if has("weight_decay"):
        given |= {"weight_decay": config.weight_decay} | ({"mask": decayed} if has("mask") else {})
    elif config.weight_decay:
        raise ConfigError(
            f"optimizer.weight_decay={config.weight_decay} does nothing with optimizer.name={quoted(config.name)}, "
            "which has no parameter weight_decay; use weight_decay=0, or a function without learning_rate, whose "
            "direction gets both."
        )
    return _transformation(config, make(learning_rate=learning_rate(config, steps), **given))


def _transformation(config: OptimizerConfig, made: Any) -> optax.GradientTransformation:
    if not (callable(getattr(made, "init", None)) and callable(getattr(made, "update", None))):
        raise ConfigError(
            f"optimizer.name={quoted(config.name)} returns {quoted(made)}, not an optax.GradientTransformation."
        )
    return optax.with_extra_args_support(made)


def muon_and(adam: optax.GradientTransformation, momentum: float, rows: Any) -> optax.GradientTransformation:
    """Muon's direction for hidden matrices, and `adam`'s for all other leaves.

    It replaces optax.contrib.muon, whose Adam would also use Muon's Nesterov momentum, and whose products the compiler
    would shard on its own. States are the same as there.
    """

    def by_muon(row: ParameterPlan) -> bool:
        return row.spec.is_trained and muon_dims(row.spec, row.at_rest) is not None

    matrices = jax.tree.map(lambda row: row if by_muon(row) else optax.MaskedNode(), rows)
    kinds = jax.tree.map(lambda row: "muon" if by_muon(row) else "adam", rows)

    def update(grads, state, params=None):
        mean, count = optax.tree.update_moment(grads, state.mu, momentum, 1), optax.safe_increment(state.count)
        # Corrected for the bias of the first steps: one factor each, of all parameters.
        of_mean = momentum / (1 - momentum ** optax.safe_increment(count))
        of_grad = (1 - momentum) / (1 - momentum**count)
        nesterov = jax.tree.map(lambda m, g: of_mean * m + of_grad * g, mean, grads)
        orthogonal = functools.partial(orthogonalized, coefficients=state.ns_coeffs)
        directions = jax.tree_util.tree_map_with_path(orthogonal, nesterov, matrices)
        return directions, optax.contrib.MuonState(count, mean, state.ns_coeffs)

    muon = optax.GradientTransformation(optax.contrib.scale_by_muon().init, update)
    # With a chain of one, the states of `adam` have the same names as in optax.adamw.
    return optax.partition({"muon": optax.chain(muon), "adam": optax.chain(adam)}, kinds)


def orthogonalized(path: Any, x: Array, row: ParameterPlan, coefficients: Array) -> Array:
    """Orthogonalize each matrix of stacked layers by Newton-Schulz iterations, scaled to the size of AdamW's entries.

    It runs in the local view of the current mesh, so that it sends what `newton_schulz` says; without a mesh, on whole
    arrays.
    """
    if not x.size:  # updated in another turn: see update_by_layer
        return x
    layout, dims = row.at_rest, muon_dims(row.spec, row.at_rest)
    inputs, outputs = (math.prod(x.shape[dim] for dim in group) for group in dims)
    rounds = functools.partial(newton_schulz, layout=layout, dims=dims, tall=inputs > outputs)
    if not (mesh := jax.sharding.get_abstract_mesh()).empty:
        spec = layout.spec(mesh)
        rounds = jax.shard_map(rounds, mesh=mesh, in_specs=(spec, P()), out_specs=spec, check_vma=True)
    # The name of the module, as in Flax: mlp/gate for "blocks/mlp/gate/kernel".
    with jax.named_scope(jax.tree_util.keystr(path[1:-1], simple=True, separator="/")):
        return MUON_RMS * math.sqrt(max(inputs, outputs)) * rounds(x, coefficients)


def newton_schulz(x: Array, coefficients: Array, *, layout: Layout, dims: Any, tall: bool) -> Array:
    """Five rounds of `a X + (b G + c G²) X` with `G = X Xᵀ` for each matrix X, which is first scaled to norm 1. A
    `tall` matrix is transposed, so that G is small. `dims` are those of `muon_dims`.

    Ranks that share matrices deal them, so that each has some whole ones. Over axes that still cut X, each device
    computes its own rows of G and X.

    Communication:
        forward   all_to_all of x over `dealt_axes`, before and after; over the other axes of x all_reduce of the
                  squares' sum, and in each round all_gather of X over those of rows, all_reduce of G over those of
                  columns, all_gather of G over those of rows
    """
    row_axes, column_axes = (tuple(axis for dim in group for axis in layout.axes[dim]) for group in dims)
    pieces = x.reshape(-1, *(math.prod(x.shape[dim] for dim in group) for group in dims))
    if tall:
        pieces, row_axes, column_axes = pieces.mT, column_axes, row_axes
    dealt = dealt_axes((*row_axes, *column_axes), len(pieces))
    matrices = deal(pieces, dealt, row_axes, column_axes)
    still = [tuple(axis for axis in axes if axis not in dealt) for axes in (row_axes, column_axes)]
    matrices = _rounds(matrices, coefficients.astype(x.dtype), *still)
    pieces = return_pieces(matrices, dealt, row_axes, column_axes)[: len(pieces)]
    return (pieces.mT if tall else pieces).reshape(x.shape)


def _rounds(matrices: Array, coefficients: Array, row_axes: Sequence[str], column_axes: Sequence[str]) -> Array:
    all_rows = functools.partial(all_gather, f"layers {'/'.join(('rows', *row_axes))} columns -> layers rows columns")
    squares = sum_over(jnp.sum(jnp.square(matrices), (1, 2), keepdims=True), (*row_axes, *column_axes))
    matrices = matrices / (jnp.sqrt(squares) + MUON_EPS)
    a, b, c = coefficients

    def one_round(_: Array, matrices: Array) -> Array:
        every = all_rows(matrices)
        gram = sum_over(matrices @ every.mT, column_axes)
        return a * matrices + (b * gram + c * gram @ all_rows(gram)) @ every

    # On simulated devices no loop may send beside those of other parameters.
    sends = any(axis in bound_axis_sizes() for axis in (*row_axes, *column_axes))
    return lax.fori_loop(0, MUON_ROUNDS, one_round, matrices, unroll=sends)


def dealt_axes(cut_by: Sequence[str], matrices: int) -> tuple[str, ...]:
    """The axes over which ranks deal their matrices, of those that cut them: the outermost, and further ones while
    every rank has a matrix. One matrix stays as it is: a rank alone would compute what all share."""
    dealt, ranks = (), 1
    for axis, size in bound_axis_sizes().items():
        if axis in cut_by and (ranks * size <= matrices or ranks == 1 < matrices):
            dealt, ranks = (*dealt, axis), ranks * size
    return dealt


def deal(pieces: Array, dealt: Sequence[str], row_axes: Sequence[str], column_axes: Sequence[str]) -> Array:
    """From each rank's piece of every matrix, [matrices, rows, columns], to whole matrices of each rank. Zeros make up
    for matrices that the ranks do not divide.

    Communication:
        forward   all_to_all of the pieces over the axes
    """
    if not dealt:
        return pieces
    pieces = jnp.pad(pieces, ((0, -len(pieces) % ranks_over(dealt)), (0, 0), (0, 0)))
    by_rank, whole = _dims_of_dealt(dealt, row_axes, column_axes)
    received = lax.all_to_all(pieces, tuple(dealt), split_axis=0, concat_axis=0, tiled=True)
    return rearrange(received, f"{by_rank} -> {whole}", **_sizes(dealt))


def return_pieces(matrices: Array, dealt: Sequence[str], row_axes: Sequence[str], column_axes: Sequence[str]) -> Array:
    """The way back from `deal`.

    Communication:
        forward   all_to_all of the matrices over the axes
    """
    if not dealt:
        return matrices
    by_rank, whole = _dims_of_dealt(dealt, row_axes, column_axes)
    pieces = rearrange(matrices, f"{whole} -> {by_rank}", **_sizes(dealt))
    return lax.all_to_all(pieces, tuple(dealt), split_axis=0, concat_axis=0, tiled=True)


def _dims_of_dealt(dealt: Sequence[str], row_axes: Sequence[str], column_axes: Sequence[str]) -> tuple[str, str]:
    """Dims as einops has them, by rank and in whole matrices.

    >>> _dims_of_dealt(("dp", "tp"), ("dp",), ("tp",))
    ('(dp tp matrices) rows columns', 'matrices (dp rows) (tp columns)')
    """
    rows, columns = ([axis for axis in axes if axis in dealt] for axes in (row_axes, column_axes))
    by_rank = f"({' '.join(dealt)} matrices) rows columns"
    return by_rank, f"matrices ({' '.join((*rows, 'rows'))}) ({' '.join((*columns, 'columns'))})"


def _sizes(axes: Sequence[str]) -> dict[str, int]:
    return {axis: size for axis, size in bound_axis_sizes().items() if axis in axes}


def clip_by_norm(largest: float) -> optax.GradientTransformationExtraArgs:
    """Scale gradients down to norm `largest` if theirs is larger; `update` takes the norm as `grad_norm` if known.

    The results are those of optax.clip_by_global_norm, which computes the norm itself.
    """

    def update(grads, state, params=None, *, grad_norm=None, **others):
        norm = global_norm(grads) if grad_norm is None else grad_norm
        scale = jnp.where(norm < largest, 1.0, largest / norm)
        return jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def muon_dims(spec: ParameterSpec, layout: Layout) -> Any:
    """Input and output dims of a hidden matrix, where each layer and each expert has its own matrix; None for
    parameters that AdamW updates.

    >>> query = ParameterSpec(Role.WEIGHT, stack="blocks", inputs=("d_model",))
    >>> muon_dims(query, Layout.parse("layers/pp d_model/dp heads/tp d_head"))
    MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2, 3))
    """
    first = spec.stacked(layout)
    inputs = tuple(range(first, first + len(spec.inputs)))
    outputs = tuple(range(first + len(spec.inputs), len(layout.names)))
    return optax.contrib.MuonDimensionNumbers(inputs, outputs) if inputs and outputs else None


def _sum_of_squares(x: Array) -> Array:
    """In float32; of an array in host memory layer by layer."""
    if not is_on_host(x):
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    def turn(number: Array, total: Array) -> Array:
        return total + _sum_of_squares(read_layer(x, number))

    return lax.fori_loop(0, len(x), turn, as_varying(jnp.float32(0), varying_axes(x)))


def global_norm(grads: Any, rows: Any = None) -> Array:
    """Global gradient norm in float32, over the whole mesh; in the local view for pieces, with the plan's rows of their
    parameters. Statistics among them do not count, but make it non-finite if they are: rounding to 8 bits can hide
    non-finite values.

    Communication:
        forward   all_reduce of the squares' sum of each leaf over the axes that cut it, those of the same axes together
    """
    leaves, structure = jax.tree.flatten(grads)
    there = [index for index, x in enumerate(leaves) if x.size]
    squares = [_sum_of_squares(leaves[index]) for index in there]
    if bound_axis_sizes():
        rows = [structure.flatten_up_to(rows)[index] for index in there]
        squares = [0 * square if row.spec.is_statistic else square for row, square in zip(rows, squares, strict=True)]
        cut_by = [row.at_rest.used_axes() for row in rows]
        for axes in dict.fromkeys(cut_by):
            members = [index for index, cut in enumerate(cut_by) if cut == axes]
            totals = sum_over(jnp.stack([squares[index] for index in members]), axes)
            for index, total in zip(members, totals, strict=True):
                squares[index] = total
    return jnp.sqrt(sum(squares))
