"""Steps that the guard has skipped: what is said of them, and the end of a run that has too many."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from parallax.config.settings import Settings
from parallax.data import Reader
from parallax.pipeline.sharded_model import ShardedModel
from parallax.runtime.errors import EXIT_NUMBERS, ParallaxError
from parallax.runtime.multihost.job import set_phase
from parallax.training.diagnosis import Diagnosis, make_diagnosis
from parallax.training.folder import RunFolder
from parallax.training.journal import Journal

SHOWN_RANGES = 8


class DivergenceError(ParallaxError):
    """Loss, gradient or parameters are no longer finite."""

    exit_status = EXIT_NUMBERS


@dataclass
class Skips:
    """Says which steps were skipped, and of which text they were; `put` sends a batch to the model's devices."""

    settings: Settings
    data: Reader
    model: ShardedModel
    put: Callable[[dict[str, np.ndarray]], dict[str, jax.Array]]
    folder: RunFolder
    journal: Journal

    def note(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """What metrics.jsonl says of a skipped step, nothing of others; a line tells people."""
        if not metrics["skipped"]:
            return {}
        self.journal.say(f"step {step} skipped: {self._why(metrics)}; {text_of(self.data, step)}; nothing has changed")
        windows = self.data.windows_of(step - 1)
        documents = self.data.documents_of(windows)
        reason = "not finite" if metrics["in_a_row"] else "spike"
        return {"skipped/reason": reason, "skipped/windows": windows.tolist(), "skipped/documents": documents.tolist()}

    def too_many(self, metrics: Mapping[str, float]) -> bool:
        """Whether so many steps in a row were not finite that the run must stop."""
        return metrics["in_a_row"] > self.settings.guard.max_skipped_steps

    def stop(self, step: int, metrics: Mapping[str, float], params: Any) -> None:
        """Raise DivergenceError, with where in the model the first of these steps went wrong."""
        in_a_row = int(metrics["in_a_row"])
        first = step - in_a_row + 1
        set_phase(f"the diagnosis of step {first}", compiling=True)
        found = self.diagnose(params, first)
        numbers, where = _numbers(metrics), "when it is computed again, all is finite: the hardware may be faulty"
        if found.first is not None:
            numbers, where = _numbers(found._asdict()), f"the first value that is not finite is the {found.first}"
        after = f", nor are the {in_a_row - 1} steps after it" if in_a_row > 1 else ""
        raise DivergenceError(
            f"step {first} is not finite: {numbers}{after} (guard.max_skipped_steps="
            f"{self.settings.guard.max_skipped_steps}); in step {first}, of "
            f"{text_of(self.data, first)}, {where}. Nothing of these steps was kept. Replay it with "
            f"`python -m parallax.replay --workdir={self.folder.path} --step={first}`; try a lower "
            "optimizer.learning_rate, more optimizer.warmup_steps or a smaller optimizer.clip_norm"
        )

    def diagnose(self, params: Any, step: int) -> Diagnosis:
        """What step `step` computes with these parameters."""
        noise = np.array([self.settings.train.seed, step - 1], np.int32)
        return make_diagnosis(self.model)(params, self.put(self.data.batch(step - 1)), noise)

    def _why(self, metrics: Mapping[str, float]) -> str:
        if metrics["in_a_row"]:
            most = self.settings.guard.max_skipped_steps
            return f"not finite, {_numbers(metrics)} ({int(metrics['in_a_row'])} in a row, {most} are let pass)"
        guard = self.settings.guard
        return f"a spike of {guard.spike_signal} beyond guard.spike_z={guard.spike_z:g}, {_numbers(metrics)}"


def ranges(numbers: np.ndarray) -> str:
    """Whole numbers in order, those that follow one another as a range; a long list is cut.

    >>> ranges(np.array([7, 3, 4, 5, 12]))
    '3-5, 7, 12'
    """
    numbers = np.unique(numbers)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:SHOWN_RANGES]]
    left = len(runs) - SHOWN_RANGES
    return ", ".join(shown) + (f" and {left} more" if left > 0 else "")


def text_of(data: Reader, step: int) -> str:
    """The text of a step, by number of its windows and documents."""
    windows = data.windows_of(step - 1)
    return f"windows {ranges(windows)} of documents {ranges(data.documents_of(windows))}"


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in ("loss", "grad_norm"))
