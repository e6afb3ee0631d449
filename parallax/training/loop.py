"""The training loop: dispatch a step, report the one before it, and do what is due: evaluate, save, profile, stop."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from parallax.checkpoint.local import LocalCopies, any_process
from parallax.checkpoint.save import CheckpointWriter
from parallax.config.settings import Settings
from parallax.data import Prefetcher
from parallax.display.progress import FIRST_SECS, waiting
from parallax.errors import DataError, ParallaxError
from parallax.processes import job
from parallax.step.step import TrainState
from parallax.storage.run_files import COPIED, EVAL_SECS, SAVE_SECS
from parallax.training.corruption import SilentCorruptionCheck
from parallax.training.divergence import DivergenceError, not_finite
from parallax.training.logger import RunLogger
from parallax.training.profile import Profile
from parallax.training.signals import StopRequest
from parallax.training.step_reports import PATIENCE_SECS, DispatchedStep, StepReports
from parallax.training.watchdog import Watchdog


class Due(NamedTuple):
    """What is done after a step, while no step runs."""

    evaluate: bool = False
    tasks: bool = False
    save: bool = False
    copy: bool = False  # to the hosts' own folders
    profile: bool = False  # a trace begins or ends
    stop: bool = False


NOTHING_DUE = Due()


@dataclass(kw_only=True)
class TrainingLoop:
    """Runs the steps; the fields are everything that it needs besides the state."""

    settings: Settings
    train_step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Any], dict[str, float]] | None  # losses, by their names in metrics.jsonl
    batches: Prefetcher
    checkpoints: CheckpointWriter
    logger: RunLogger
    reports: StepReports
    stop: StopRequest
    watchdog: Watchdog
    corruption_check: SilentCorruptionCheck
    profile: Profile
    copies: LocalCopies | None = None
    run_tasks: Callable[[Any], dict[str, float]] | None = None  # results, by their names in metrics.jsonl
    eval_loss: float | None = None  # of the latest evaluation
    postponed: Due = NOTHING_DUE  # what waits for a step that is finite
    without_tasks: bool = False  # since they asked for what is not computed
    data_error: DataError | None = None  # of a batch for which this process has asked all processes to stop

    def run(self, state: TrainState, start: int) -> tuple[TrainState, int]:
        """Run from step `start` to the last one or to a signal; returns the state and the number of steps done.

        Raises:
            DataError: a batch cannot be read; the steps before it are saved, if possible.
        """
        try:
            state, done = self.take_steps(state, start)
            if self.data_error is None:
                return state, done
            if not self.postponed.save:
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
        self.profile.begin(start, state)
        pending = None  # the step that runs while the next one is dispatched
        for done in range(start + 1, self.settings.train.steps + 1):
            batch, waited = self.next_batch(done)
            self.reports.times.waited_for_data(waited)
            state, metrics = self.take(state, batch, done)
            before, pending = pending, self.reports.dispatched(done, metrics, waited)
            if before is not None:
                self.reports.finish(before, state.params)
            with self.reports.times.apart():
                self.checkpoints.check()
            due = self.due(done)
            if any(due):
                due, pending = self.act(due, pending, state), None
            elif done == self.reports.first:  # its report does not wait for the second step
                self.reports.finish(pending, state.params)
                pending = None
            self.reports.end_of_turn(done)
            if due.stop:
                break
        return state, done

    def due(self, done: int) -> Due:
        """What is due after this step; each step is asked once, since all processes must agree about a stop."""
        train, checkpoint, last = self.settings.train, self.settings.checkpoint, done == self.settings.train.steps
        stop = not last and self.stop.after(done)  # after the last step there is nothing to stop
        save = last or self.postponed.save or _is_turn(done, checkpoint.every_steps)
        # Each checkpoint needs its own evaluation to determine the best ones.
        judge = save and checkpoint.keep_best > 0
        evaluate = last or judge or self.postponed.evaluate or _is_turn(done, train.eval_every_steps)
        tasks = last or self.postponed.tasks or _is_turn(done, train.tasks_every_steps)
        return Due(
            evaluate=evaluate and self.evaluate is not None and not stop,  # a run that is stopping saves at once
            tasks=tasks and self.run_tasks is not None and not stop,
            save=save or stop,
            copy=self.copies is not None and _is_turn(done, checkpoint.local_every_steps) and not (save or stop),
            profile=self.profile.begins_after(done) or self.profile.ends_after(done),
            stop=stop,
        )

    def act(self, due: Due, ended: DispatchedStep, state: TrainState) -> Due:
        """Report a step and do what is due after it; returns what was due in the end.

        If the text of an evaluation cannot be read, all processes stop.
        """
        values = self.reports.read(ended, state.params)
        self.watchdog.pause()
        if due.profile:
            with self.reports.times.apart():
                self.profile.end(state)
        due, self.postponed = self.divided(due, ended.step, values)
        if due.evaluate:
            began = time.monotonic()
            job.set_phase(f"the evaluation after step {ended.step}", compiling=self.eval_loss is None)
            try:
                with self.reports.times.apart():
                    values |= self.evaluate(state.params)
                    self.eval_loss = values["eval/loss"]
            except DataError as error:  # all processes raise it at the same batch
                self.data_error, due = error, due._replace(save=True, stop=True)
            else:
                check_eval_loss(ended.step, self.eval_loss)
                values[EVAL_SECS] = time.monotonic() - began
        if due.tasks and self.data_error is None and not self.without_tasks:
            began = time.monotonic()
            job.set_phase(f"the tasks after step {ended.step}", compiling=True)  # texts of new lengths
            try:
                with self.reports.times.apart(), waiting("running tasks"):
                    values |= self.run_tasks(state.params)
            except DataError as error:  # of the requests, which all processes have alike
                self.logger.say(f"warning: {error}; the run goes on without tasks")
                self.without_tasks = True
            values[EVAL_SECS] = values.get(EVAL_SECS, 0.0) + time.monotonic() - began
        self.reports.report(ended, values)
        if due.copy:
            with self.reports.times.apart():
                self.copy(ended.step, state)
        if due.save:
            if due.stop and self.settings.checkpoint.deadline_secs:
                self.copy_if_late(ended.step, state)
            with self.reports.times.apart():
                self.save(ended.step, state, values.get("eval/loss"))
        if due.profile and not due.stop:
            with self.reports.times.apart():
                self.profile.begin(ended.step, state)
        self.reports.meter.pause()
        return due

    def divided(self, due: Due, step: int, values: dict[str, Any]) -> tuple[Due, Due]:
        """What is done now, and what waits for a later step.

        Non-finite numbers of a step may come from the parameters: they must not replace a good checkpoint before a
        later step has shown that they work. After the last step the evaluation shows it.
        """
        suspect = values.get("skipped/reason") == "not finite" and step < self.settings.train.steps
        if suspect:
            due = due._replace(copy=False)
        if due.save and suspect:
            return Due(profile=due.profile and not due.stop), due._replace(profile=False, stop=False)
        return due, NOTHING_DUE

    def next_batch(self, done: int) -> tuple[Any, float]:
        """The batch of a step, and the seconds for which it was waited."""
        compiles = self.reports.compiles(done)
        job.set_phase(f"step {done}", compiling=compiles)
        self.watchdog.begin(done, compiles=compiles)
        with waiting(f"reading the batch of step {done}", patience_secs=PATIENCE_SECS):
            batch, waited = self.batches.get(done - 1)
        self.stop_before_the_error()
        return batch, waited

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
        compiles = self.reports.compiles(done)
        what, began = "compiling the training step" if compiles else f"taking step {done}", time.monotonic()
        with self.profile.around(done), waiting(what, patience_secs=FIRST_SECS if compiles else PATIENCE_SECS):
            if _is_turn(done, self.settings.train.check_every):
                with self.reports.times.apart():
                    taken = self.corruption_check.take(self.train_step, state, batch, done)
            else:
                taken = self.train_step(state, batch)
        if compiles:
            self.reports.compile_secs = time.monotonic() - began
        return taken

    def copy(self, step: int, state: TrainState) -> None:
        """Start to copy a state to the hosts' own folders."""
        check_finite(step, state)
        job.set_phase(f"copying step {step} to the hosts")
        began = time.monotonic()
        with waiting(f"copying step {step} to the hosts"):
            self.copies.save(step, checkpoint_trees(state))
        copied = time.monotonic() - began
        self.logger.record(step, {COPIED: copied, SAVE_SECS: copied})

    def copy_if_late(self, step: int, state: TrainState) -> None:
        """Copy the state of a run that stops to the hosts' own folders before it is saved, if the save would take
        longer than what is left of checkpoint.deadline_secs on any host."""
        limit, expected = self.settings.checkpoint.deadline_secs, self.checkpoints.expected_secs()
        left = max(limit - self.stop.secs_since_signal(), 0.0)
        if not any_process(expected > left):
            return
        late = (
            f"a save takes {expected:.1f} s, as the last one did, and {left:.1f} s are left of checkpoint."
            f"deadline_secs={limit}"
        )
        if self.copies is None:
            self.logger.say(f"{late}: if step {step} is not whole by then, the run goes on from the one before")
            return
        self.logger.say(f"{late}: step {step} is copied to {self.settings.checkpoint.local} first")
        self.copy(step, state)
        self.copies.wait()

    def save(self, step: int, state: TrainState, loss: float | None) -> None:
        """Start to save a state."""
        check_finite(step, state)
        job.set_phase(f"saving step {step}")
        stopped = time.monotonic()
        with waiting("writing the checkpoint of an earlier step"):
            self.checkpoints.wait()
        began = time.monotonic()
        with waiting(f"copying step {step}"):  # it is written while the next steps run
            self.checkpoints.save(step, checkpoint_trees(state), loss=loss)
        copied = time.monotonic()
        self.logger.record(step, {COPIED: copied - began, SAVE_SECS: copied - stopped})


def _is_turn(step: int, interval: int) -> bool:
    """Whether it is the turn of what happens every `interval` steps; 0 is never."""
    return interval > 0 and step % interval == 0


def check_finite(step: int, state: TrainState) -> None:
    """Raise DivergenceError unless the parameters of a state that is to be saved are finite."""
    if bad := not_finite(state.params):
        raise DivergenceError(
            f"after step {step} parameters are not finite: {', '.join(bad)}; they are not saved, older steps are "
            "untouched; try a lower optimizer.learning_rate or a larger optimizer.eps"
        )


def check_eval_loss(step: int, loss: float) -> None:
    """Raise DivergenceError unless the loss of an evaluation is finite."""
    if not math.isfinite(loss):
        raise DivergenceError(
            f"after step {step} eval/loss is {loss:.4g}; it was not saved; try a lower optimizer.learning_rate, "
            "more optimizer.warmup_steps or a smaller optimizer.clip_norm"
        )


def checkpoint_trees(state: TrainState) -> dict[str, Any]:
    """A state as the trees of a checkpoint: parameters can be loaded without the rest."""
    return {"params": state.params, "rest": {name: part for name, part in state._asdict().items() if name != "params"}}


def state_from(trees: dict[str, Any]) -> TrainState:
    """The state from the trees of its checkpoint."""
    return TrainState(params=trees["params"], **trees["rest"])
