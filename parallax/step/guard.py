"""Skips non-finite and spiking updates."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from parallax.config.sections import SIGNALS, GuardConfig


class GuardState(NamedTuple):
    """State of the guard. It is saved with the run, so that a resumed run skips the same steps."""

    skipped: Array  # int32: number of skipped steps
    in_a_row: Array  # int32: number of consecutive non-finite steps up to now
    seen: Array  # int32: number of values in the statistics
    mean: Array  # float32 [2]: of loss and gradient norm
    variance: Array


def init_guard() -> GuardState:
    """The state before the first step."""
    # Separate arrays, since a buffer cannot be donated twice.
    return GuardState(*(jnp.zeros((), jnp.int32) for _ in range(3)), *(jnp.zeros(2, jnp.float32) for _ in range(2)))


def judge(config: GuardConfig | None, state: GuardState, metrics: dict[str, Array]) -> tuple[Array, GuardState]:
    """Whether a step with these metrics may change parameters (a bool scalar), and the new state.

    Non-finite values appear in the norm of the whole gradient or in the losses. These are the same on every device, so
    the decision is, too. After more than `max_skipped_steps` consecutive non-finite steps the next one is skipped even
    if it is finite: the host, which reads metrics one step late and then stops the run, finds the state unchanged. With
    None as the config, non-finite steps are skipped without limit, and spikes are not detected.
    """
    of_batch = [value for value in metrics.values() if value.ndim == 0]  # sums by group are parts of them
    finite = jnp.isfinite(jnp.stack(of_batch)).all()
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
    """Whether the signal is more than `spike_z` deviations above its running mean, and the updated statistics.

    The mean is over all values until they fill a window; then a new value has the weight of one in a window. Values are
    clipped to the bound before they are added: so one spike does not hide the next, and a lasting level becomes the
    mean.
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
