"""Speed of a run, and its progress line."""

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from parallax.display.units import count, duration, in_bytes, in_flops
from parallax.hardware.chips import mfu
from parallax.hardware.devices import most_memory
from parallax.hardware.sensors import POWER, TEMPERATURE

LINE_WIDTH = 91  # columns of a step's line; with the time of day before it, a line has 100
LEAST_WAIT = 0.01  # share of a step; shorter waits for data are not shown
# Columns by name. A wait stands where the memory does, and the time left, which has no fixed width, comes last.
WIDTHS = {"step": 0, "loss": 11, "gnorm": 10, "lr": 9, "load": 9, "tok/s": 11, "mfu": 7, "sol": 7, "memory": 9}
WIDTHS |= {"sensors": 11, "left": 11}
OF_SOME_RUNS = ("load", "sol", "sensors")  # columns that are there if they have a number
FLOPS_WIDTH = 17  # in place of "mfu" for an unknown chip
NO_SOURCES: Mapping[str, float] = MappingProxyType({})
# Left out in this order if a line is too long; metrics.jsonl has them.
DISPENSABLE = ("lr", "memory", "sensors", "gnorm", "load", "sol")


class StepWork(NamedTuple):
    """What a step computes: its tokens and FLOPs, and its least time, None if unknown."""

    tokens: int
    flops: float
    light_secs: float | None


@dataclass
class Meter:
    """Computes metrics and the progress line from steps and the times between their ends.

    `step_flops` and `peak_flops` are those of all devices together; the latter is None if unknown. `light_secs` is the
    time of a step on them at the speed of light, None if unknown. The first step is left out of all averages, since it
    compiles.
    """

    steps: int
    step_tokens: int
    step_flops: float
    peak_flops: float | None
    devices: int
    clock: Callable[[], float] = time.perf_counter
    memory: Callable[[], int | None] = most_memory
    light_secs: float | None = None
    _last: float = field(init=False)  # when the next step may begin: the end of the previous step or of a pause
    _waiting: ThreadPoolExecutor = field(init=False, default_factory=lambda: ThreadPoolExecutor(1, "meter"))
    _window: list[tuple[float, float]] = field(init=False, default_factory=list)
    _measured: tuple[int, float] = field(init=False, default=(0, 0.0))

    def __post_init__(self):
        self._last = self.clock()

    def begin_work(self, work: StepWork) -> None:
        """From the next step on, steps have batches of another shape; averages begin anew."""
        self.step_tokens, self.step_flops, self.light_secs = work
        self._window.clear()
        self._measured = (0, 0.0)

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
            **({} if self.light_secs is None else {"perf/sol": self.light_secs / believed_secs}),
            **({} if (held := self.memory()) is None else {"perf/memory_bytes": held}),
        }

    @property
    def _peak_secs(self) -> float:
        """Time of a step whose products are all computed at the peak of model.dtype."""
        return 0.0 if self.peak_flops is None else self.step_flops / self.peak_flops

    @property
    def _least_secs(self) -> float:
        """Time of a step at its devices' peak; a step that seems faster was measured by a thread that ran late."""
        return self._peak_secs if self.light_secs is None else self.light_secs

    def line(self, step: int, values: Mapping[str, float]) -> str:
        """The line for the console, in columns, at most `LINE_WIDTH` wide; speed is the mean since the last line."""
        secs, waited = map(statistics.fmean, zip(*self._window)) if self._window else (0.0, 0.0)
        self._window.clear()
        columns = {
            "step": f"step {step}/{self.steps}",
            "loss": f"loss {loss_of(values['train/loss'])}",
            "gnorm": f"gnorm {norm_of(values['train/grad_norm'])}",
            "lr": f"lr {rate_of(values['train/learning_rate'])}",
        }
        if "experts/load" in values:
            columns["load"] = f"load {values['experts/load']:.1f}x"
        if secs > self._least_secs:
            done, total = self._measured
            columns["tok/s"] = f"{count(self.step_tokens / secs)} tok/s"
            if self.peak_flops is None:
                columns["mfu"] = f"{in_flops(self.step_flops / secs / self.devices)}/s/dev"
            else:
                columns["mfu"] = f"mfu {mfu(self.step_flops, secs, self.peak_flops):.0%}"
            if self.light_secs is not None and self.light_secs < self._peak_secs:  # else it is MFU
                columns["sol"] = f"sol {self.light_secs / secs:.0%}"
            columns["memory"] = in_bytes(values["perf/memory_bytes"]) if "perf/memory_bytes" in values else ""
            if waited / secs >= LEAST_WAIT:
                columns["memory"] = f"wait {waited / secs:.0%}"
            if POWER in values:
                columns["sensors"] = f"{values[POWER]:.0f} W {values[TEMPERATURE]:.0f} °C"
            columns["left"] = f"left {duration((self.steps - step) * total / done)}"
        widths = WIDTHS | {"step": len(f"step {self.steps}/{self.steps}")}
        return in_columns(columns, widths | ({"mfu": FLOPS_WIDTH} if self.peak_flops is None else {}))

    def eval_line(self, step: int, loss: float, of_sources: Mapping[str, float] = NO_SOURCES) -> str:
        """The console's line for an evaluation, with the losses of a mixture's sources."""
        each = "".join(f"  {name} {loss_of(value)}" for name, value in of_sources.items())
        return f"step {step}/{self.steps}  eval loss {loss_of(loss)}{each}"


def in_columns(columns: Mapping[str, str], widths: Mapping[str, int]) -> str:
    """The columns of a line, as wide as `widths` says; closer together, and without the least important ones, if they
    would not fit. Which ones follows from the widths, so that lines of the same columns are alike.

    >>> in_columns({"step": "step 1/20", "loss": "loss 3.1416", "left": "left 9s"}, WIDTHS | {"step": 10})
    'step 1/20  loss 3.1416 left 9s'
    """
    for gap, dropped in (("  ", ()), *((" ", DISPENSABLE[:number]) for number in range(len(DISPENSABLE) + 1))):
        kept = {name: width for name, width in widths.items() if name in columns or name not in OF_SOME_RUNS}
        kept = {name: width for name, width in kept.items() if name not in dropped}
        # Numbers end where their column does, and words begin there.
        cells = (
            columns[name].ljust(width) if name in ("step", "left") else _right(columns[name], width)
            for name, width in kept.items()
            if name in columns
        )
        line = gap.join(cells).rstrip()
        if max(len(line), sum(kept.values()) + (len(kept) - 1) * len(gap)) <= LINE_WIDTH:
            break
    return line


def _right(text: str, width: int) -> str:
    """A label and a number, or either, with the number at the right end."""
    label, blank, number = text.partition(" ")
    return f"{label} {number.rjust(width - len(label) - 1)}" if blank and label.isalpha() else text.rjust(width)


def loss_of(nats: float) -> str:
    """A loss with five digits, four of them decimals below 10.

    >>> loss_of(3.14159), loss_of(11.93), loss_of(123456.7), loss_of(float("nan"))
    ('3.1416', '11.930', '1.235e+05', 'nan')
    """
    return f"{nats:.{4 if abs(nats) < 10 else 3 if abs(nats) < 100 else 2}f}" if abs(nats) < 1000 else f"{nats:.3e}"


def norm_of(norm: float) -> str:
    """The norm of a gradient.

    >>> norm_of(1.234), norm_of(12.34), norm_of(0.00123), norm_of(0.0), norm_of(123456.7)
    ('1.23', '12.3', '1.2e-03', '0.00', '1.2e+05')
    """
    decimals = 2 if norm < 10 else 1 if norm < 100 else 0
    return f"{norm:.{decimals}f}" if norm == 0 or 0.01 <= norm < 1000 else f"{norm:.1e}"


def rate_of(rate: float) -> str:
    """A learning rate.

    >>> rate_of(6e-4), rate_of(1.5e-10), rate_of(0.0)
    ('6.0e-4', '1.5e-10', '0.0e+0')
    """
    return re.sub(r"e([+-])0", r"e\1", f"{rate:.1e}")
