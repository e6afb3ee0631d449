"""The steps of a run: dispatch one, report the one before, and pause to evaluate and save."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from parallax.checkpoint import Checkpoints
from parallax.data import Prefetcher
from parallax.distributed import at
from parallax.errors import ParallaxError
from parallax.loop.journal import Journal
from parallax.loop.meter import Meter
from parallax.loop.signals import StopRequest
from parallax.loop.watchdog import Watchdog
from parallax.settings import Settings
from parallax.step import TrainState


class DivergenceError(ParallaxError):
    """Loss or gradient is no longer finite."""

    exit_status = 4


class Ended(NamedTuple):
    """A step whose metrics are still on the devices."""

    step: int
    metrics: dict[str, jax.Array]
    waited_secs: float


@dataclass
class Steps:
    """What the steps of a run need besides their state."""

    settings: Settings
    train_step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Any], float] | None
    batches: Prefetcher
    checkpoints: Checkpoints
    journal: Journal
    meter: Meter
    stop: StopRequest
    watchdog: Watchdog
    rates: np.ndarray  # learning rate of each step
    eval_loss: float | None = None  # of the latest evaluation

    def run(self, state: TrainState, start: int) -> tuple[TrainState, int]:
        """From step `start` to the last one or to a signal; returns the state and the steps done."""
        pending = None
        for done in range(start + 1, self.settings.train.steps + 1):
            at(f"step {done}", compiling=done == start + 1)
            self.watchdog.begin(done, compiles=done == start + 1)
            batch, waited = self.batches.get(done - 1)
            state, metrics = self.train_step(state, batch)
            if pending is not None:
                self._report(pending, self._read(pending, first=pending.step == start + 1))
            pending = Ended(done, metrics, waited)
            self.checkpoints.check()
            # Asked once: a signal that comes later is for the next step. After the last one there is nothing to stop.
            stopping = done < self.settings.train.steps and self.stop.after(done)
            if stopping or self._evaluates_after(done) or self._saves_after(done):
                self._pause(pending, state, first=done == start + 1, stopping=stopping)
                pending = None
            if stopping:
                break
        return state, done

    def _evaluates_after(self, done: int) -> bool:
        if self.evaluate is None:
            return False
        # Each checkpoint is judged by its own evaluation, or the best could not be known.
        judged = self._saves_after(done) and self.settings.checkpoint.keep_best > 0
        return judged or self._is_due(done, self.settings.train.eval_every_steps)

    def _saves_after(self, done: int) -> bool:
        return self._is_due(done, self.settings.checkpoint.every_steps)

    def _is_due(self, done: int, interval: int) -> bool:
        return done == self.settings.train.steps or (interval > 0 and done % interval == 0)

    def _pause(self, ended: Ended, state: TrainState, *, first: bool, stopping: bool) -> None:
        """Finish a step's report, then evaluate and save as they are due; who is stopping saves at once."""
        values = self._read(ended, first=first)
        self.watchdog.pause()
        if self._evaluates_after(ended.step) and not stopping:
            at(f"the evaluation after step {ended.step}", compiling=self.eval_loss is None)
            values["eval/loss"] = self.eval_loss = self.evaluate(state.params)
            self._check_finite(ended.step, values)
        self._report(ended, values)
        if stopping or self._saves_after(ended.step):
            at(f"saving step {ended.step}")
            self.checkpoints.save(ended.step, parts_of(state), loss=values.get("eval/loss"))
        self.meter.pause()

    def _read(self, ended: Ended, *, first: bool) -> dict[str, float]:
        """A step's numbers, waiting for it to end; DivergenceError if they are not finite."""
        metrics = {name: float(value) for name, value in jax.device_get(ended.metrics).items()}
        values = {
            "train/loss": metrics["loss"],
            "train/grad_norm": metrics["grad_norm"],
            "train/learning_rate": float(self.rates[ended.step - 1]),
        }
        if "z_loss" in metrics:
            values["train/z_loss"] = metrics["z_loss"]
        self._check_finite(ended.step, values)
        return values | self.meter.measure(ended.waited_secs, compiled=first)

    def _check_finite(self, step: int, values: Mapping[str, float]) -> None:
        # The norm too: what it is infinite of is in the parameters by now.
        if not all(map(math.isfinite, values.values())):
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if "perf/" not in name)
            raise DivergenceError(
                f"step {step} is not finite: {numbers}; it was not saved; try a lower optimizer.learning_rate, "
                "more optimizer.warmup_steps or a smaller optimizer.clip_norm"
            )

    def _report(self, ended: Ended, values: dict[str, float]) -> None:
        self.journal.record(ended.step, values)
        last = ended.step == self.settings.train.steps
        if last or ended.step % self.settings.train.log_every_steps == 0 or "eval/loss" in values:
            self.journal.say(self.meter.line(ended.step, values))
            self.journal.draw(ended.step, values)


def parts_of(state: TrainState) -> dict[str, Any]:
    """A state as the parts of a checkpoint: parameters can be loaded without the rest."""
    return {"params": state.params, "rest": {"opt_state": state.opt_state, "step": state.step}}


def state_of(parts: dict[str, Any]) -> TrainState:
    """The state that `parts_of` took apart."""
    return TrainState(params=parts["params"], **parts["rest"])
