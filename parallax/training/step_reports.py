"""What is recorded and printed of each step, when its metrics are read from the devices."""

import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from parallax.config.sections import OptimizerConfig
from parallax.config.settings import Settings
from parallax.display.progress import FIRST_SECS, waiting
from parallax.hardware.sensors import Sensors
from parallax.pipeline import GROUP_LOSSES, GROUP_TOKENS
from parallax.processes import job
from parallax.step.expert_load import EXPERT_COUNTS, load_values
from parallax.step.optimizer import learning_rate
from parallax.step.qk_clip import MAX_LOGIT
from parallax.storage.run_files import COMPILE_SECS, EVAL_LOSS_OF, TASK_RESULT, TRAIN_LOSS_OF
from parallax.training.divergence import SkippedSteps
from parallax.training.logger import RunLogger
from parallax.training.meter import Meter, StepWork
from parallax.training.process_times import OwnTimes, ProcessTimes

RATES_BLOCK = 1024  # updates whose learning rates are computed together
PATIENCE_SECS = 10.0  # time before a wait for a step is reported
RECORDED = ("loss", "grad_norm", "skipped_steps", "z_loss")  # a step's metrics in metrics.jsonl
SILENCE_SECS = 30.0  # after this time without a line a step is printed, whatever train.log_every_steps says


def learning_rates(config: OptimizerConfig, steps: int) -> Callable[[int], float]:
    """A function that returns the rate of an update, counted from 0. Rates are computed in blocks: the devices are
    busy, and a run may have more steps than fit into a list."""
    schedule = jax.jit(jax.vmap(learning_rate(config, steps)))

    @functools.lru_cache(maxsize=2)
    def compute(block: int) -> np.ndarray:
        return np.asarray(schedule((block * RATES_BLOCK + np.arange(RATES_BLOCK)).astype(np.int32)))

    return lambda update: float(compute(update // RATES_BLOCK)[update % RATES_BLOCK])


class DispatchedStep(NamedTuple):
    """A step whose metrics are still on the devices; `when` is its end by the meter's clock."""

    step: int
    metrics: dict[str, jax.Array]
    when: "Future[float]"
    waited_secs: float


@dataclass(kw_only=True)
class StepReports:
    """Reads the metrics of steps, and records and prints them; `first` is the first step of this start."""

    settings: Settings
    logger: RunLogger
    meter: Meter
    rates: Callable[[int], float]  # of `learning_rates`
    skips: SkippedSteps
    first: int
    sensors: Sensors
    processes: ProcessTimes
    works: Mapping[int, StepWork] = field(default_factory=dict)  # by the first step of this start that has it
    times: OwnTimes = field(default_factory=OwnTimes)
    compile_secs: float = 0.0  # of the latest step that was compiled
    said_at: float = 0.0  # when the latest line was printed

    def dispatched(self, step: int, metrics: dict[str, jax.Array], waited_secs: float) -> DispatchedStep:
        """A step that was just dispatched; its time is taken when it ends, and devices are read while it runs."""
        if self.is_logged(step):
            self.sensors.begin()
        return DispatchedStep(step, metrics, self.meter.ending(metrics), waited_secs)

    def end_of_turn(self, step: int) -> None:
        """Tell process 0 what this process has spent for itself since the step before; it compares all processes. The
        first step compiles, and does not count."""
        secs = self.times.take()
        if not self.compiles(step):
            job.report_numbers({"step": step, **secs})
        self.processes.update()

    def compiles(self, step: int) -> bool:
        """Whether a step is compiled: the first, and the first with batches of another shape."""
        return step == self.first or step in self.works

    def finish(self, ended: DispatchedStep, params: Any) -> None:
        """Read a step and report it."""
        self.report(ended, self.read(ended, params))

    def read(self, ended: DispatchedStep, params: Any) -> dict[str, Any]:
        """Wait for a step and return its metrics.

        Raises:
            DivergenceError: too many steps were not finite; the search for the reason uses the newest `params`.
        """
        first = self.compiles(ended.step)
        if ended.step in self.works:
            self.meter.begin_work(self.works[ended.step])
        patience_secs = FIRST_SECS if first else PATIENCE_SECS
        with self.times.apart(), waiting(f"taking step {ended.step}", patience_secs=patience_secs):
            metrics = jax.device_get(ended.metrics)
        counts = metrics.pop(EXPERT_COUNTS, None)
        of_sources = self.losses_of_sources(metrics.pop(GROUP_LOSSES, None), metrics.pop(GROUP_TOKENS, None))
        metrics = {name: float(value) for name, value in metrics.items()}
        updates = ended.step - 1 - int(metrics["skipped_steps"] - metrics["skipped"])  # before this step
        values = {f"train/{name}": metrics[name] for name in RECORDED if name in metrics}
        values |= {f"{TRAIN_LOSS_OF}{name}": loss for name, loss in of_sources.items()}
        values["train/learning_rate"] = self.rates(updates)
        values |= self.skips.note(ended.step, metrics)
        values |= {name: metrics[name] for name in metrics if name == MAX_LOGIT}
        if counts is not None:
            values |= load_values(counts, self.settings.model.layer_bases, table=self.is_logged(ended.step))
        if self.skips.too_many(metrics):
            self.logger.record(ended.step, values)
            self.skips.stop(ended.step, metrics, params)
        if first:
            values[COMPILE_SECS] = self.compile_secs
        return values | self.meter.measure(ended.when.result(), ended.waited_secs, compiled=first)

    def losses_of_sources(self, sums: np.ndarray | None, tokens: np.ndarray | None) -> dict[str, float]:
        """The mean loss of a step by source of a mixture, of those that have labels in it."""
        if sums is None:
            return {}
        names = [source.name for source in self.settings.data.parts]
        return {name: float(nats / count) for name, nats, count in zip(names, sums[0], tokens) if count}

    def is_logged(self, step: int) -> bool:
        """Whether a step is printed by its number, whatever the time of steps."""
        ends = step in (self.first, self.settings.train.steps)
        return ends or step % self.settings.train.log_every_steps == 0

    def report(self, ended: DispatchedStep, values: dict[str, float]) -> None:
        """Record a step's metrics, and print its line if one is due."""
        if self.is_logged(ended.step):
            values |= self.sensors.take() | self.processes.table()
        self.logger.record(ended.step, values)
        due = self.is_logged(ended.step) or time.monotonic() - self.said_at > SILENCE_SECS
        if due or "eval/loss" in values:
            self.logger.say(self.meter.line(ended.step, values))
            self.said_at = time.monotonic()
        if "eval/loss" in values:
            of_sources = {key.removeprefix(EVAL_LOSS_OF): values[key] for key in values if key.startswith(EVAL_LOSS_OF)}
            self.logger.say(self.meter.eval_line(ended.step, values["eval/loss"], of_sources))
        results = {key.removeprefix(TASK_RESULT): values[key] for key in values if key.startswith(TASK_RESULT)}
        if results:
            each = "".join(f"  {name} {value:.4f}" for name, value in results.items())
            self.logger.say(f"step {ended.step}/{self.settings.train.steps}{each}")
