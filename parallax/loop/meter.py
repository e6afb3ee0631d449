"""Speed of a run, and the line that says how it goes."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax

from parallax.loop.peak import most_memory
from parallax.units import duration, in_bytes


@dataclass
class Meter:
    """Turns steps and the time between their ends into numbers and a line.

    `step_flops` and `peak_flops` are those of all devices together, the latter None where it is unknown. The first
    step is left out of all averages: it compiles.
    """

    steps: int
    step_tokens: int
    step_flops: float
    peak_flops: float | None
    devices: int
    clock: Callable[[], float] = time.perf_counter
    memory: Callable[[], int | None] = most_memory
    _last: float = field(init=False)  # when a step may have begun: the one before has ended, or a pause
    _waiting: ThreadPoolExecutor = field(init=False, default_factory=lambda: ThreadPoolExecutor(1, "meter"))
    _window: list[tuple[float, float]] = field(init=False, default_factory=list)
    _measured: tuple[int, float] = field(init=False, default=(0, 0.0))

    def __post_init__(self):
        self._last = self.clock()

    def pause(self) -> None:
        """Forget the time since the last step: it went to something else, and no step is at work."""
        self._last = self.clock()

    def ending(self, metrics: Any) -> "Future[float]":
        """When the step of these metrics ends, seen by a thread: the host may be at the next step's batch by then."""
        return self._waiting.submit(lambda: (jax.block_until_ready(metrics), self.clock())[1])

    def measure(self, ended: float, waited_secs: float, *, compiled: bool) -> dict[str, float]:
        """Numbers of the step that ended then; `compiled` keeps it out of the averages."""
        secs, self._last = ended - self._last, ended
        if not compiled:
            self._window.append((secs, waited_secs))
            self._measured = (self._measured[0] + 1, self._measured[1] + secs)
        return {
            "perf/step_secs": secs,
            "perf/tokens_per_second": self.step_tokens / secs,
            "perf/data_wait_secs": waited_secs,
            "perf/flops_per_second_per_device": self.step_flops / secs / self.devices,
            **({} if self.peak_flops is None else {"perf/mfu": self.step_flops / secs / self.peak_flops}),
            **({} if (held := self.memory()) is None else {"perf/memory_bytes": held}),
        }

    def line(self, step: int, values: Mapping[str, float]) -> str:
        """What the console shows; speed is the mean since the last line."""
        secs = sum(secs for secs, _ in self._window) / max(len(self._window), 1)
        waited = sum(waited for _, waited in self._window) / max(len(self._window), 1)
        self._window.clear()
        parts = [
            f"step {step}/{self.steps}",
            f"loss {values['train/loss']:.4f}",
            f"gnorm {values['train/grad_norm']:.2f}",
            f"lr {values['train/learning_rate']:.1e}",
        ]
        if secs:
            parts += self._speed(step, secs, waited, values)
        if "eval/loss" in values:
            parts.append(f"eval {values['eval/loss']:.4f}")
        return "  ".join(parts)

    def _speed(self, step: int, secs: float, waited: float, values: Mapping[str, float]) -> list[str]:
        mfu = "n/a" if self.peak_flops is None else f"{self.step_flops / secs / self.peak_flops:.0%}"
        count, total = self._measured
        return [
            f"{secs:.2f} s",
            f"{self.step_tokens / secs:,.0f} tok/s",
            f"{flops(self.step_flops / secs / self.devices)}/s/dev",
            f"mfu {mfu}",
            *([f"mem {in_bytes(values['perf/memory_bytes'])}"] if "perf/memory_bytes" in values else []),
            f"wait {waited / secs:.1%}",
            f"left {duration((self.steps - step) * total / count)}",
        ]


def flops(count: float) -> str:
    """FLOPs in a unit that people read with ease.

    >>> [flops(count) for count in (2e6, 4.56e10, 1.234e13)]
    ['2.0 MFLOP', '45.6 GFLOP', '12.3 TFLOP']
    """
    size, unit = next(((size, unit) for size, unit in ((1e12, "T"), (1e9, "G")) if count >= size), (1e6, "M"))
    return f"{count / size:.1f} {unit}FLOP"
