"""Optimizers in the global view: optax under jit, outside shard_map, on arrays sharded as they are stored.

The communication of an update, for Muon's products and the norm, is written here in the local view.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec as P

from parallax.config.sections import OptimizerConfig
from parallax.runtime.bits import in_32_bits
from parallax.runtime.errors import ConfigError
from parallax.sharding.collectives import all_gather, bound_axis_sizes, sum_over
from parallax.sharding.layout import Layout, map_layouts
from parallax.sharding.parameter import is_load, is_trained, stacked_dims
from parallax.training.low_precision import MOMENT_FIELDS, with_states_in

# Dims that a kernel contracts if they come first.
INPUT_DIMS = ("d_model", "d_ff", "d_expert", "d_shared", "d_latent", "d_latent_q")
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
    schedule = "constant" if config.schedule == "wsd" and not config.decay_fraction else config.schedule
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, config.final_ratio),
        "linear": lambda: optax.linear_schedule(peak, last, rest),
        "wsd": lambda: optax.linear_schedule(peak, last, falling, transition_begin=rest - falling),
        "constant": lambda: optax.constant_schedule(peak),
    }[schedule]()
    # The first step has 1/warmup of the peak instead of 0, so that it is not wasted.
    rising = optax.linear_schedule(peak / max(config.warmup_steps, 1), peak, max(top, 1))
    return in_32_bits()(optax.join_schedules([rising, after], [top]))


def make_optimizer(config: OptimizerConfig, steps: int, layouts: Any) -> optax.GradientTransformation:
    """Clip by the norm of the whole gradient, then AdamW or Muon; weight decay skips norms and biases. Routers' biases
    have no gradient and a separate update: see `balance`. Scales of 8-bit products are not changed.

    `layouts` is the tree of the parameters' layouts, whose dims say which leaves are matrices. If moments are not in
    float32, `update` takes `noise`: see `with_states_in`.
    """
    direction = optax.scale_by_adam(config.b1, config.b2, config.eps)
    if config.name == "muon":
        direction = muon_and(direction, config.muon_momentum, layouts)
    decay = optax.add_decayed_weights(config.weight_decay, map_layouts(is_matrix, layouts))
    update = optax.chain(direction, decay, optax.scale_by_learning_rate(learning_rate(config, steps)))
    trained = optax.chain(clip_by_norm(config.clip_norm), update) if config.clip_norm else update
    others = {"balance": balance(config.balance_rate), "scale": optax.set_to_zero()}
    kinds = map_layouts(_kind_of_update, layouts)
    found = {kind: others[kind] for kind in others if kind in jax.tree.leaves(kinds)}
    if found:
        trained = optax.partition({**found, "trained": trained}, kinds)
    dtypes = {field: getattr(config, key) for field, key in MOMENT_FIELDS.items()}
    return trained if {*dtypes.values()} == {"float32"} else with_states_in(trained, dtypes, layouts)


def _kind_of_update(layout: Layout) -> str:
    return "trained" if is_trained(layout) else "balance" if is_load(layout) else "scale"


def balance(rate: float) -> optax.GradientTransformation:
    """The update of routers' biases, whose gradients are the number of tokens of each expert: the bias of an expert
    with fewer than the mean is raised by `rate`, that of others lowered (arXiv 2408.15664)."""

    def update(counts, state, params=None):
        return jax.tree.map(lambda count: rate * jnp.sign(count.mean(-1, keepdims=True) - count), counts), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def muon_and(adam: optax.GradientTransformation, momentum: float, layouts: Any) -> optax.GradientTransformation:
    """Muon's direction for hidden matrices, and `adam`'s for all other leaves.

    It replaces optax.contrib.muon, whose Adam would also use Muon's Nesterov momentum, and whose products the compiler
    would shard on its own. States are the same as there.
    """
    matrices = map_layouts(lambda layout: optax.MaskedNode() if muon_dims(layout) is None else layout, layouts)
    kinds = map_layouts(lambda layout: "adam" if muon_dims(layout) is None else "muon", layouts)

    def update(grads, state, params=None):
        mean, count = optax.tree.update_moment(grads, state.mu, momentum, 1), optax.safe_increment(state.count)
        ahead = optax.tree.bias_correction(mean, momentum, optax.safe_increment(count))
        own = optax.tree.bias_correction(grads, momentum, count)
        nesterov = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, ahead, own)
        orthogonal = functools.partial(orthogonalized, coefficients=state.ns_coeffs)
        directions = jax.tree_util.tree_map_with_path(orthogonal, nesterov, matrices)
        return directions, optax.contrib.MuonState(count, mean, state.ns_coeffs)

    muon = optax.GradientTransformation(optax.contrib.scale_by_muon().init, update)
    # With a chain of one, the states of `adam` have the same names as in optax.adamw.
    return optax.partition({"muon": optax.chain(muon), "adam": optax.chain(adam)}, kinds)


def orthogonalized(path: Any, x: Array, layout: Layout, coefficients: Array) -> Array:
    """Orthogonalize each matrix of stacked layers by Newton-Schulz iterations, scaled to the size of AdamW's entries.

    It runs in the local view of the current mesh, so that it sends what `newton_schulz` says; without a mesh, on whole
    arrays.
    """
    if not x.size:  # updated in another turn: see update_by_layer
        return x
    inputs, outputs = (math.prod(x.shape[at] for at in dims) for dims in muon_dims(layout))
    rounds = functools.partial(newton_schulz, layout=layout, tall=inputs > outputs)
    if not (mesh := jax.sharding.get_abstract_mesh()).empty:
        spec = layout.spec(mesh)
        rounds = jax.shard_map(rounds, mesh=mesh, in_specs=(spec, P()), out_specs=spec, check_vma=True)
    # The name of the module, as in Flax: mlp/gate for "blocks/mlp/gate/kernel".
    with jax.named_scope(jax.tree_util.keystr(path[1:-1], simple=True, separator="/")):
        return MUON_RMS * math.sqrt(max(inputs, outputs)) * rounds(x, coefficients)


def newton_schulz(x: Array, coefficients: Array, *, layout: Layout, tall: bool) -> Array:
    """Five rounds of `a X + (b G + c G²) X` with `G = X Xᵀ` for each matrix X, which is first scaled to norm 1. A
    `tall` matrix is transposed, so that G is small. Each device computes its own rows of G and X.

    Communication:
        forward   all_reduce of the squares' sum over the axes of x; in each round all_gather of X over the axes that
                  cut rows, all_reduce of G over the axes that cut columns, all_gather of G over the axes of rows
    """
    dims = muon_dims(layout)
    row_axes, column_axes = (tuple(axis for at in group for axis in layout.axes[at]) for group in dims)
    own = x.reshape(-1, *(math.prod(x.shape[at] for at in group) for group in dims))
    if tall:
        own, row_axes, column_axes = own.mT, column_axes, row_axes
    all_rows = functools.partial(all_gather, f"layers {'/'.join(('rows', *row_axes))} columns -> layers rows columns")
    squares = sum_over(jnp.sum(jnp.square(own), (1, 2), keepdims=True), (*row_axes, *column_axes))
    own = own / (jnp.sqrt(squares) + MUON_EPS)
    a, b, c = coefficients.astype(x.dtype)
    for _ in range(MUON_ROUNDS):
        every = all_rows(own)
        gram = sum_over(own @ every.mT, column_axes)
        own = a * own + (b * gram + c * gram @ all_rows(gram)) @ every
    return (own.mT if tall else own).reshape(x.shape)


def clip_by_norm(largest: float) -> optax.GradientTransformationExtraArgs:
    """Scale gradients down to norm `largest` if theirs is larger; `update` takes the norm as `grad_norm` if known.

    The results are those of optax.clip_by_global_norm, which computes the norm itself.
    """

    def update(grads, state, params=None, *, grad_norm=None, **others):
        norm = global_norm(grads) if grad_norm is None else grad_norm
        clip = lambda grad: jnp.where(norm < largest, grad, grad / norm.astype(grad.dtype) * largest)  # noqa: E731
        return jax.tree.map(clip, grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def is_matrix(layout: Layout) -> bool:
    """Whether a parameter is a matrix; scales of norms and biases are not.

    >>> [is_matrix(Layout.parse(text)) for text in ("layers/pp d_model/tp", "layers/pp d_model/dp d_ff/tp")]
    [False, True]
    """
    dims = layout.names[stacked_dims(layout) :]
    return len(dims) > 1 and any(name in INPUT_DIMS for name in dims)


def muon_dims(layout: Layout) -> Any:
    """Input and output dims of a hidden matrix, where each layer and each expert has its own matrix; None for
    parameters that AdamW updates.

    >>> muon_dims(Layout.parse("layers/pp d_model/dp heads/tp d_head"))
    MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2, 3))
    """
    if not is_matrix(layout) or "vocab" in layout.names:
        return None
    first = stacked_dims(layout)
    dims = tuple(range(first, len(layout.names)))
    inputs = dims[:1] if layout.names[first] in INPUT_DIMS else dims[:-1]
    return optax.contrib.MuonDimensionNumbers(inputs, tuple(d for d in dims if d not in inputs))


def global_norm(grads: Any, layouts: Any = None) -> Array:
    """Global gradient norm in float32, over the whole mesh; in the local view for pieces with these layouts. Loads of
    experts and maxima are excluded, but make it non-finite if they are: rounding to 8 bits can hide non-finite values.

    Communication:
        forward   all_reduce of the squares' sum of each leaf over the axes that cut it, those of the same axes together
    """
    squares, structure = jax.tree.flatten(jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), grads))
    if bound_axis_sizes():
        given = structure.flatten_up_to(layouts)
        kept = [at for at, layout in enumerate(given) if not is_load(layout)]
        squares = [squares[at] if is_trained(given[at]) else 0 * squares[at] for at in kept]
        cut_by = [given[at].used_axes() for at in kept]
        for axes in dict.fromkeys(cut_by):
            members = [at for at, own in enumerate(cut_by) if own == axes]
            for at, total in zip(members, sum_over(jnp.stack([squares[at] for at in members]), axes), strict=True):
                squares[at] = total
    return jnp.sqrt(sum(squares))
