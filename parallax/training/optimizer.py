"""Optimizers in the global view: optax under jit, outside shard_map, on arrays that are cut as they are stored."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from parallax.config.sections import OptimizerConfig
from parallax.runtime.errors import ConfigError
from parallax.sharding.layout import Layout, map_layouts

INPUT_DIMS = ("d_model", "d_ff", "d_latent", "d_latent_q")  # that a kernel contracts, when they stand first
# Root mean square of the entries of Muon's direction, made AdamW's, so that one learning rate serves both
# (arXiv 2502.16982, section 2.2): those of an orthogonal matrix have 1 / root of its longer side.
MUON_RMS = 0.2


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate at each step, counted from 0: linear warm-up to the peak, then the schedule.

    The last step, `steps - 1`, has the schedule's last value.

    Raises ConfigError when warm-up does not end before `steps` do.
    """
    if config.warmup_steps >= max(steps, 1):
        raise ConfigError(
            f"optimizer.warmup_steps={config.warmup_steps} must be below train.steps={steps}; "
            f"use warmup_steps={steps // 10}."
        )
    top = max(config.warmup_steps - 1, 0)  # the step at the peak
    peak, last, rest = config.learning_rate, config.learning_rate * config.final_ratio, max(steps - 1 - top, 1)
    falling = max(round(rest * config.decay_fraction), 1)
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, config.final_ratio),
        "linear": lambda: optax.linear_schedule(peak, last, rest),
        "wsd": lambda: optax.linear_schedule(peak, last, falling, transition_begin=rest - falling),
        "constant": lambda: optax.constant_schedule(peak),
    }[config.schedule]()
    # The first step has 1/warmup of the peak, not 0: a step that changes nothing is a step lost.
    rising = optax.linear_schedule(peak / max(config.warmup_steps, 1), peak, max(top, 1))
    return optax.join_schedules([rising, after], [top])


def make_optimizer(config: OptimizerConfig, steps: int, layouts: Any) -> optax.GradientTransformation:
    """Clip by the norm of the whole gradient, then AdamW or Muon; decay skips norms and biases.

    `layouts` is the tree of the parameters' layouts: which leaf is a matrix, and of what, is read from its dims.
    """
    direction = optax.scale_by_adam(config.b1, config.b2, config.eps)
    if config.name == "muon":
        direction = muon_and(direction, config.muon_momentum, layouts)
    decay = optax.add_decayed_weights(config.weight_decay, map_layouts(is_matrix, layouts))
    update = optax.chain(direction, decay, optax.scale_by_learning_rate(learning_rate(config, steps)))
    return optax.chain(clip_by_norm(config.clip_norm), update) if config.clip_norm else update


def muon_and(adam: optax.GradientTransformation, momentum: float, layouts: Any) -> optax.GradientTransformation:
    """Muon's direction for hidden matrices, and `adam`'s for all other leaves.

    Not optax.contrib.muon, whose Adam would take Nesterov's momentum from Muon; states are named as they are there.
    """
    dims = map_layouts(lambda layout: muon_dims(layout) or optax.MaskedNode(), layouts)
    kinds = map_layouts(lambda layout: "adam" if muon_dims(layout) is None else "muon", layouts)

    def scale(directions: Any, _: Any) -> Any:
        return jax.tree.map(lambda x, of: MUON_RMS * math.sqrt(_longer_side(x.shape, of)) * x, directions, dims)

    muon = optax.contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=dims)
    # A chain of one gives the states of `adam` the names that they have as a part of optax.adamw.
    return optax.partition({"muon": optax.chain(muon, optax.stateless(scale)), "adam": optax.chain(adam)}, kinds)


def _longer_side(shape: tuple[int, ...], dims: Any) -> int:
    """Rows or columns of a matrix, whichever are more."""
    return max(math.prod(shape[at] for at in axes) for axes in (dims.reduction_axis, dims.output_axis))


def clip_by_norm(largest: float) -> optax.GradientTransformationExtraArgs:
    """What is longer than `largest` is made as long; `update` takes the norm as `grad_norm` where it is known.

    The numbers are those of optax.clip_by_global_norm, which measures the norm itself.
    """

    def update(grads, state, params=None, *, grad_norm=None, **others):
        norm = global_norm(grads) if grad_norm is None else grad_norm
        clip = lambda grad: jnp.where(norm < largest, grad, grad / norm.astype(grad.dtype) * largest)  # noqa: E731
        return jax.tree.map(clip, grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def is_matrix(layout: Layout) -> bool:
    """Whether a parameter multiplies: norms' scales and biases do not.

    >>> [is_matrix(Layout.parse(text)) for text in ("layers/pp d_model/tp", "layers/pp d_model/dp d_ff/tp")]
    [False, True]
    """
    dims = [name for name in layout.names if name != "layers"]
    return len(dims) > 1 and any(name in INPUT_DIMS for name in dims)


def muon_dims(layout: Layout) -> Any:
    """Which dims of a hidden matrix are input and output, each stacked layer a matrix of its own; None: leave to AdamW.

    >>> muon_dims(Layout.parse("layers/pp d_model/dp heads/tp d_head"))
    MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2, 3))
    """
    if not is_matrix(layout) or "vocab" in layout.names:
        return None
    first = layout.names.index("layers") + 1
    dims = tuple(range(first, len(layout.names)))
    inputs = dims[:1] if layout.names[first] in INPUT_DIMS else dims[:-1]
    return optax.contrib.MuonDimensionNumbers(inputs, tuple(d for d in dims if d not in inputs))


def global_norm(grads: Any) -> Array:
    """The norm of the whole gradient, over the whole mesh, in float32."""
    return optax.global_norm(jax.tree.map(lambda grad: grad.astype(jnp.float32), grads))
