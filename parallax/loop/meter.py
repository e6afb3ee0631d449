"""Speed of a run, and the line that says how it goes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass
class Meter:
    """Turns steps and the time between them into numbers and a line.

    `peak_flops` is that of all devices together, None where it is unknown. The first step is left out of all
    averages: it compiles.
    """

    steps: int
    step_tokens: int
    step_flops: float
    peak_flops: float | None
    clock: Callable[[], float] = time.perf_counter
    _last: float = field(init=False)
    _window: list[tuple[float, float]] = field(init=False, default_factory=list)
    _measured: tuple[int, float] = field(init=False, default=(0, 0.0))

    def __post_init__(self):
        self._last = self.clock()

    def pause(self) -> None:
        """Forget the time since the last step: it went to something else."""
        self._last = self.clock()

    def measure(self, waited_secs: float, *, compiled: bool) -> dict[str, float]:
        """Numbers of the step that has just ended; `compiled` keeps it out of the averages."""
        now = self.clock()
        secs, self._last = now - self._last, now
        if not compiled:
            self._window.append((secs, waited_secs))
            self._measured = (self._measured[0] + 1, self._measured[1] + secs)
        return {
            "perf/step_secs": secs,
            "perf/tokens_per_second": self.step_tokens / secs,
            "perf/data_wait_secs": waited_secs,
            **({} if self.peak_flops is None else {"perf/mfu": self.step_flops / secs / self.peak_flops}),
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
            parts += self._speed(step, secs, waited)
        if "eval/loss" in values:
            parts.append(f"eval {values['eval/loss']:.4f}")
        return "  ".join(parts)

    def _speed(self, step: int, secs: float, waited: float) -> list[str]:
        mfu = "n/a" if self.peak_flops is None else f"{self.step_flops / secs / self.peak_flops:.0%}"
        count, total = self._measured
        return [
            f"{secs:.2f} s",
            f"{self.step_tokens / secs:,.0f} tok/s",
            f"mfu {mfu}",
            f"wait {waited / secs:.1%}",
            f"left {duration((self.steps - step) * total / count)}",
        ]


def duration(secs: float) -> str:
    """Hours, minutes and seconds, the two largest of them.

    >>> [duration(secs) for secs in (7, 250, 7262)]
    ['7s', '4m10s', '2h01m']
    """
    secs = round(secs)
    if secs < 60:
        return f"{secs}s"
    if secs < 3600:
        return f"{secs // 60}m{secs % 60:02}s"
    return f"{secs // 3600}h{secs % 3600 // 60:02}m"
