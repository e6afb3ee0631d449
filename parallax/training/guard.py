"""Skips non-finite and spiking updates."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from parallax.config.sections import SIGNALS, GuardConfig


class GuardState(NamedTuple):
    """What the guard remembers from step to step; it is saved with the run, so that a resumed one skips the same."""

    skipped: Array  # int32: steps that changed nothing
    in_a_row: Array  # int32: of the latest steps, those that were not finite
    seen: Array  # int32: values that the statistics hold
    mean: Array  # float32 [2], of loss and gradient norm
    variance: Array


def init_guard() -> GuardState:
    """Nothing skipped, nothing seen."""
    # Arrays of their own: a step is given each buffer once.
    return GuardState(*(jnp.zeros((), jnp.int32) for _ in range(3)), *(jnp.zeros(2, jnp.float32) for _ in range(2)))


def judge(config: GuardConfig | None, state: GuardState, metrics: dict[str, Array]) -> tuple[Array, GuardState]:
    """Whether a step with these metrics may change parameters, a bool scalar, and what to remember of it.

    What is not finite shows in the norm of the whole gradient and in the losses: they are the same on every device,
    and so is the verdict. After more than `max_skipped_steps` steps in a row that were not finite nothing passes any
    more: the host, which reads metrics a step late, finds the state as it was. None: steps are skipped without limit,
    and no spikes are looked for.
    """
    finite = jnp.isfinite(jnp.stack(list(metrics.values()))).all()
    passes, moments = finite, state[2:]
    if config is not None:
        passes &= state.in_a_row <= config.max_skipped_steps
        if config.spike_z:
            spike, moments = _spike(config, state, metrics)
            passes &= ~spike
            moments = tuple(jnp.where(finite, new, old) for new, old in zip(moments, state[2:]))
    in_a_row = jnp.where(finite, 0, state.in_a_row + 1)
    return passes, GuardState(state.skipped + ~passes, in_a_row, *moments)


def _spike(config: GuardConfig, state: GuardState, metrics: dict[str, Array]) -> tuple[Array, tuple[Array, ...]]:
    """Whether the signal lies more than `spike_z` deviations above its running mean, and the statistics with it.

    The mean is of all values until there are a window of them, then each has the weight of one in a window. A value
    enters as no more than the bound: one spike does not blind the guard to the next, and a level that lasts becomes
    the mean.
    """
    values = jnp.stack([metrics[name] for name in SIGNALS])
    bound = state.mean + config.spike_z * jnp.sqrt(state.variance)
    known = (state.seen >= config.spike_window_steps) & (state.variance > 0)
    above = known & (values > bound)
    weight = 1 / (jnp.minimum(state.seen, config.spike_window_steps - 1) + 1).astype(jnp.float32)
    off = jnp.where(above, bound, values) - state.mean
    seen = jnp.minimum(state.seen + 1, config.spike_window_steps)
    moments = seen, state.mean + weight * off, (1 - weight) * (state.variance + weight * off**2)
    return above[SIGNALS.index(config.spike_signal)], moments
