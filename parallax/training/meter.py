"""Speed of a run, and its progress line."""

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax

from parallax.analysis.devices import most_memory
from parallax.analysis.flops import mfu
from parallax.runtime.units import count, duration, in_bytes, in_flops

LINE_WIDTH = 91  # columns of a step's line; with the time of day before it, a line has 100
LEAST_WAIT = 0.01  # share of a step; shorter waits for data are not shown
DISPENSABLE = ("memory", "lr", "wait", "gnorm", "load")  # left out if a line is too long; metrics.jsonl has them


@dataclass
class Meter:
    """Computes metrics and the progress line from steps and the times between their ends.

    `step_flops` and `peak_flops` are those of all devices together; the latter is None if unknown. The first step is
    left out of all averages, since it compiles.
    """

    steps: int
    step_tokens: int
    step_flops: float
    peak_flops: float | None
    devices: int
    clock: Callable[[], float] = time.perf_counter
    memory: Callable[[], int | None] = most_memory
    _last: float = field(init=False)  # when the next step may begin: the end of the previous step or of a pause
    _waiting: ThreadPoolExecutor = field(init=False, default_factory=lambda: ThreadPoolExecutor(1, "meter"))
    _window: list[tuple[float, float]] = field(init=False, default_factory=list)
    _measured: tuple[int, float] = field(init=False, default=(0, 0.0))

    def __post_init__(self):
        self._last = self.clock()

    def pause(self) -> None:
        """Exclude the time since the last step: it was spent on something else, and no step was running."""
        self._last = self.clock()

    def ending(self, metrics: Any) -> "Future[float]":
        """When the step of these metrics ends, measured by a thread, since the host may be reading the next batch."""
        return self._waiting.submit(lambda: (jax.block_until_ready(metrics), self.clock())[1])

    def measure(self, ended: float, waited_secs: float, *, compiled: bool) -> dict[str, float]:
        """Metrics of the step that ended at `ended`; with `compiled` it is not part of the averages.

        Speeds are NaN if a busy machine reported the ends of two steps at once, which would put one above the peak.
        """
        secs, self._last = ended - self._last, ended
        if not compiled:
            self._window.append((secs, waited_secs))
            self._measured = (self._measured[0] + 1, self._measured[1] + secs)
        believed_secs = secs if secs > self._least_secs else math.nan
        rate = 1 / believed_secs
        return {
            "perf/step_secs": secs,
            "perf/tokens_per_second": self.step_tokens * rate,
            "perf/data_wait_secs": waited_secs,
            "perf/flops_per_second_per_device": self.step_flops * rate / self.devices,
            **({} if self.peak_flops is None else {"perf/mfu": mfu(self.step_flops, believed_secs, self.peak_flops)}),
            **({} if (held := self.memory()) is None else {"perf/memory_bytes": held}),
        }

    @property
    def _least_secs(self) -> float:
        """Time of a step at its devices' peak; a step that seems faster was measured by a thread that ran late."""
        return 0.0 if self.peak_flops is None else self.step_flops / self.peak_flops

    def line(self, step: int, values: Mapping[str, float]) -> str:
        """The line for the console, at most `LINE_WIDTH` columns; speed is the mean since the last line."""
        secs, waited = map(statistics.fmean, zip(*self._window)) if self._window else (0.0, 0.0)
        self._window.clear()
        parts = {
            "step": f"step {step}/{self.steps}",
            "loss": f"loss {loss_of(values['train/loss'])}",
            "gnorm": f"gnorm {norm_of(values['train/grad_norm'])}",
            "lr": f"lr {rate_of(values['train/learning_rate'])}",
        }
        if "experts/load" in values:
            parts["load"] = f"load {values['experts/load']:.1f}x"
        if secs > self._least_secs:
            done, total = self._measured
            parts["tok/s"] = f"{count(self.step_tokens / secs)} tok/s"
            if self.peak_flops is None:
                parts["mfu"] = f"{in_flops(self.step_flops / secs / self.devices)}/s/dev"
            else:
                parts["mfu"] = f"mfu {mfu(self.step_flops, secs, self.peak_flops):.0%}"
            if "perf/memory_bytes" in values:
                parts["memory"] = in_bytes(values["perf/memory_bytes"])
            if waited / secs >= LEAST_WAIT:
                parts["wait"] = f"wait {waited / secs:.0%}"
            parts["left"] = f"left {duration((self.steps - step) * total / done)}"
        return fitted(parts)

    def eval_line(self, step: int, loss: float) -> str:
        """The console's line for an evaluation."""
        return f"step {step}/{self.steps}  eval loss {loss_of(loss)}"


def fitted(parts: Mapping[str, str]) -> str:
    """The parts of a line, closer together if they would not fit, and without the least important ones.

    >>> fitted({"step": "step 1/2", "loss": "loss 3.1416"})
    'step 1/2  loss 3.1416'
    """
    kept = dict(parts)
    line = "  ".join(kept.values())
    for name in ("", *DISPENSABLE):
        if len(line) > LINE_WIDTH:
            kept.pop(name, None)
            line = " ".join(kept.values())
    return line


def loss_of(nats: float) -> str:
    """A loss with four decimals.

    >>> loss_of(3.14159), loss_of(123456.7), loss_of(float("nan"))
    ('3.1416', '1.235e+05', 'nan')
    """
    return f"{nats:.4f}" if abs(nats) < 1000 else f"{nats:.3e}"


def norm_of(norm: float) -> str:
    """The norm of a gradient.

    >>> norm_of(1.234), norm_of(0.00123), norm_of(0.0), norm_of(123456.7)
    ('1.23', '1.2e-03', '0.00', '1.2e+05')
    """
    return f"{norm:.2f}" if norm == 0 or 0.01 <= norm < 1000 else f"{norm:.1e}"


def rate_of(rate: float) -> str:
    """A learning rate.

    >>> rate_of(6e-4), rate_of(1.5e-10), rate_of(0.0)
    ('6.0e-4', '1.5e-10', '0.0e+0')
    """
    return re.sub(r"e([+-])0", r"e\1", f"{rate:.1e}")
