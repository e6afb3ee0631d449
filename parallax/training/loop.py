"""The training loop: dispatch a step, report the previous one, and pause to evaluate and save."""

import functools
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from parallax.checkpoint.save import CheckpointWriter
from parallax.config.sections import OptimizerConfig
from parallax.config.settings import Settings
from parallax.data import Prefetcher
from parallax.runtime.errors import DataError, ParallaxError
from parallax.runtime.multihost import job
from parallax.runtime.progress import FIRST_SECS, waiting
from parallax.runtime.run_files import COPIED
from parallax.training.corruption import SilentCorruptionCheck
from parallax.training.divergence import DivergenceError, SkippedSteps, not_finite
from parallax.training.load import EXPERT_COUNTS, load_values
from parallax.training.logger import RunLogger
from parallax.training.meter import Meter
from parallax.training.optimizer import learning_rate
from parallax.training.profile import Profile
from parallax.training.signals import StopRequest
from parallax.training.step import TrainState
from parallax.training.watchdog import Watchdog

RATES_BLOCK = 1024  # updates whose learning rates are computed together
PATIENCE_SECS = 10.0  # time before a wait for a step is reported
RECORDED = ("loss", "grad_norm", "skipped_steps", "z_loss")  # a step's metrics in metrics.jsonl
SILENCE_SECS = 30.0  # after this time without a line a step is printed, whatever train.log_every_steps says


class LearningRates:
    """`rates[n]` is the rate of update n, counted from 0. Rates are computed in blocks: the devices are busy, and a run
    may have more steps than fit into a list."""

    def __init__(self, config: OptimizerConfig, steps: int):
        schedule = jax.jit(jax.vmap(learning_rate(config, steps)))
        compute = lambda block: np.asarray(schedule(block * RATES_BLOCK + jnp.arange(RATES_BLOCK, dtype=jnp.int32)))  # noqa: E731
        self._block = functools.lru_cache(maxsize=2)(compute)

    def __getitem__(self, update: int) -> float:
        return float(self._block(update // RATES_BLOCK)[update % RATES_BLOCK])


class DispatchedStep(NamedTuple):
    """A step whose metrics are still on the devices; `when` is its end by the meter's clock."""

    step: int
    metrics: dict[str, jax.Array]
    when: "Future[float]"
    waited_secs: float


@dataclass
class TrainingLoop:
    """Runs the steps; the fields are everything that it needs besides the state."""

    settings: Settings
    train_step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Any], float] | None
    batches: Prefetcher
    checkpoints: CheckpointWriter
    logger: RunLogger
    meter: Meter
    stop: StopRequest
    watchdog: Watchdog
    rates: LearningRates
    skips: SkippedSteps
    corruption_check: SilentCorruptionCheck
    profile: Profile
    eval_loss: float | None = None  # of the latest evaluation
    params: Any = None  # after the latest step that was dispatched
    owed: bool = False  # whether a save waits for a step that is not skipped
    owed_evaluation: bool = False  # whether an evaluation was due with it
    data_error: DataError | None = None  # of a batch for which this process has asked all processes to stop
    first: int = 0  # the first step of this start
    said_at: float = 0.0  # when the latest line was printed

    def run(self, state: TrainState, start: int) -> tuple[TrainState, int]:
        """Run from step `start` to the last one or to a signal; returns the state and the number of steps done.

        Raises:
            DataError: a batch cannot be read; the steps before it are saved, if possible.
        """
        try:
            state, done = self.take_steps(state, start)
            if self.data_error is None:
                return state, done
            if not self.owed:
                self.checkpoints.wait()
                self.logger.say(f"step {done} is saved; with the data back, the same command goes on from there")
        except ParallaxError as error:
            if self.data_error is None or isinstance(error, DataError):
                raise
            # The disk may also hold the data; the error about data is more informative.
            self.logger.say_besides(f"{type(error).__name__}: {error}")
        raise self.data_error

    def take_steps(self, state: TrainState, start: int) -> tuple[TrainState, int]:
        """The same; if a batch cannot be read, `data_error` is the error."""
        pending, self.first = None, start + 1
        if self.profile.begins_after(start):
            self.profile.begin(start, state)
        for done in range(start + 1, self.settings.train.steps + 1):
            job.set_phase(f"step {done}", compiling=done == self.first)
            self.watchdog.begin(done, compiles=done == self.first)
            with waiting(f"reading the batch of step {done}", patience_secs=PATIENCE_SECS):
                batch, waited = self.batches.get(done - 1)
            self.stop_before_the_error()
            with self.profile.around(done):
                state, metrics = self.take(state, batch, done)
            self.params = state.params
            before, pending = pending, DispatchedStep(done, metrics, self.meter.ending(metrics), waited)
            if before is not None:
                self.report(before, self.read(before))
            self.checkpoints.check()
            # Checked once: a later signal is for the next step. After the last step there is nothing to stop.
            stopping = done < self.settings.train.steps and self.stop.after(done)
            turns = self.profile.begins_after(done) or self.profile.ends_after(done)
            if stopping or turns or self.evaluates_after(done) or self.saves_after(done):
                stopping = self.pause(pending, state, stopping=stopping)
                pending = None
            elif done == self.first:  # report the first step without waiting for the second one
                self.report(pending, self.read(pending))
                pending = None
            if stopping:
                break
        return state, done

    def stop_before_the_error(self) -> None:
        """Make the run stop and save, in all processes, if the data of a later step cannot be read.

        This process has batches until then. If it has none left, as for the first step of a run or after steps that
        cannot be saved, the error is raised first, and the last checkpoint stays.
        """
        error = self.batches.failure_before(self.settings.train.steps)
        if self.data_error is None and isinstance(error, DataError):
            self.data_error = error
            self.watchdog.pause()
            self.stop.ask("data that cannot be read")

    def take(self, state: TrainState, batch: Any, done: int) -> tuple[TrainState, dict[str, jax.Array]]:
        """Dispatch a step; every `train.check_every`-th is run twice and compared."""
        interval = self.settings.train.check_every
        compiles = done == self.first
        what = "compiling the training step" if compiles else f"taking step {done}"
        with waiting(what, patience_secs=FIRST_SECS if compiles else PATIENCE_SECS):
            if interval and done % interval == 0:
                return self.corruption_check.take(self.train_step, state, batch, done)
            return self.train_step(state, batch)

    def evaluates_after(self, done: int) -> bool:
        """Whether an evaluation is due."""
        if self.evaluate is None:
            return False
        # Each checkpoint needs its own evaluation to determine the best ones.
        judged = self.saves_after(done) and self.settings.checkpoint.keep_best > 0
        return judged or self.owed_evaluation or self._is_due(done, self.settings.train.eval_every_steps)

    def saves_after(self, done: int) -> bool:
        """Whether a checkpoint is due."""
        return self.owed or self._is_due(done, self.settings.checkpoint.every_steps)

    def _is_due(self, done: int, interval: int) -> bool:
        return done == self.settings.train.steps or (interval > 0 and done % interval == 0)

    def pause(self, ended: DispatchedStep, state: TrainState, *, stopping: bool) -> bool:
        """Finish a step's report, then evaluate, save and trace if due; returns whether the run stops here.

        A run that is stopping saves at once; so do all processes if the text of an evaluation cannot be read.
        """
        values = self.read(ended)
        self.watchdog.pause()
        if self.profile.ends_after(ended.step):
            self.profile.end(state)
        saves, evaluates = stopping or self.saves_after(ended.step), self.evaluates_after(ended.step)
        # Non-finite numbers of a step may come from the parameters: they must not replace a good checkpoint before a
        # later step has shown that they work. After the last step the evaluation shows it.
        self.owed = saves and values.get("skipped/reason") == "not finite" and ended.step < self.settings.train.steps
        self.owed_evaluation = evaluates and self.owed
        if evaluates and not stopping and not self.owed:
            job.set_phase(f"the evaluation after step {ended.step}", compiling=self.eval_loss is None)
            try:
                values["eval/loss"] = self.eval_loss = self.evaluate(state.params)
            except DataError as error:  # all processes raise it at the same batch
                self.data_error, stopping = error, True
            else:
                check_eval_loss(ended.step, self.eval_loss)
        self.report(ended, values)
        if (saves or stopping) and not self.owed:
            self.save(ended.step, state, values.get("eval/loss"))
        if self.profile.begins_after(ended.step) and not stopping:
            self.profile.begin(ended.step, state)
        self.meter.pause()
        return stopping and not self.owed

    def save(self, step: int, state: TrainState, loss: float | None) -> None:
        """Start to save a state; DivergenceError if its parameters are not finite."""
        if bad := not_finite(state.params):
            raise DivergenceError(
                f"after step {step} parameters are not finite: {', '.join(bad)}; they are not saved, older steps are "
                "untouched; try a lower optimizer.learning_rate or a larger optimizer.eps"
            )
        job.set_phase(f"saving step {step}")
        with waiting("writing the checkpoint of an earlier step"):
            self.checkpoints.wait()
        began = time.monotonic()
        with waiting(f"copying step {step}"):  # it is written while the next steps run
            self.checkpoints.save(step, checkpoint_parts(state), loss=loss)
        self.logger.record(step, {COPIED: time.monotonic() - began})

    def read(self, ended: DispatchedStep) -> dict[str, Any]:
        """Wait for a step and return its metrics; DivergenceError if too many steps were not finite."""
        first = ended.step == self.first
        with waiting(f"taking step {ended.step}", patience_secs=FIRST_SECS if first else PATIENCE_SECS):
            metrics = jax.device_get(ended.metrics)
        counts = metrics.pop(EXPERT_COUNTS, None)
        metrics = {name: float(value) for name, value in metrics.items()}
        updates = ended.step - 1 - int(metrics["skipped_steps"] - metrics["skipped"])  # before this step
        values = {f"train/{name}": metrics[name] for name in RECORDED if name in metrics}
        values["train/learning_rate"] = float(self.rates[updates])
        values |= self.skips.note(ended.step, metrics)
        if counts is not None:
            values |= load_values(counts, self.settings.model.kinds, table=self.is_logged(ended.step))
        if self.skips.too_many(metrics):
            self.logger.record(ended.step, values)
            self.skips.stop(ended.step, metrics, self.params)
        return values | self.meter.measure(ended.when.result(), ended.waited_secs, compiled=first)

    def is_logged(self, step: int) -> bool:
        """Whether a step is printed by its number, whatever the time of steps."""
        ends = step in (self.first, self.settings.train.steps)
        return ends or step % self.settings.train.log_every_steps == 0

    def report(self, ended: DispatchedStep, values: dict[str, float]) -> None:
        """Record a step's metrics, and print its line if one is due."""
        self.logger.record(ended.step, values)
        due = self.is_logged(ended.step) or time.monotonic() - self.said_at > SILENCE_SECS
        if due or "eval/loss" in values:
            self.logger.say(self.meter.line(ended.step, values))
            self.said_at = time.monotonic()
        if "eval/loss" in values:
            self.logger.say(self.meter.eval_line(ended.step, values["eval/loss"]))


def check_eval_loss(step: int, loss: float) -> None:
    """Raise DivergenceError unless the loss of an evaluation is finite."""
    if not math.isfinite(loss):
        raise DivergenceError(
            f"after step {step} eval/loss is {loss:.4g}; it was not saved; try a lower optimizer.learning_rate, "
            "more optimizer.warmup_steps or a smaller optimizer.clip_norm"
        )


def checkpoint_parts(state: TrainState) -> dict[str, Any]:
    """A state as the parts of a checkpoint: parameters can be loaded without the rest."""
    return {"params": state.params, "rest": {name: part for name, part in state._asdict().items() if name != "params"}}


def state_from(parts: dict[str, Any]) -> TrainState:
    """The state from its checkpoint parts."""
    return TrainState(params=parts["params"], **parts["rest"])
