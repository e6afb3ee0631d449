"""How long a compiled step takes: compute by the compiler's cycles, and what it waits for."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from parallax.analysis.report.compiled import Compiled
from parallax.analysis.report.links import Route, one_way, route
from parallax.analysis.report.timeline import Begin, Branch, Call, Compute, End, Kernel, Loop
from parallax.runtime.chips import Chip
from parallax.runtime.errors import ConfigError


class StepTime(NamedTuple):
    """Seconds of a step on the rank that the others wait for.

    `exposed_secs` are those in which compute waits for a collective, by mesh axes as "dp" or "dp+tp". `pallas_secs`
    are priced apart and can be left out: see `step_time`. `bubble` is the share of the time in which an average rank
    waits for others. `mfu` is model FLOPs over what the chip could do in `total_secs`.
    """

    compute_secs: float
    exposed_secs: dict[str, float]
    pallas_secs: float
    total_secs: float
    bubble: float
    mfu: float


def step_time(
    compiled: Compiled,
    chip: Chip,
    model_flops: float,
    *,
    dtype: str = "bfloat16",
    kernel_secs: Callable[[Kernel], float] | None = None,
) -> StepTime:
    """The time of one step, with `model_flops` a device.

    Compute takes the compiler's estimated cycles, loops turned and branches as the schedule takes them, over the clock.
    A collective takes its bytes over its links' bandwidth (see `route`, and for messages `one_way`); those of the same
    axes follow each other, but messages in two directions travel at once. What compute between its start and its end
    does not cover is exposed. Pallas calls, to which the compiler gives no cycles, take `kernel_secs(kernel)`: by
    default the longer of their FLOPs at peak and of reading operands and writing results once, which no kernel beats;
    `lambda kernel: 0.0` leaves them out. Raises ConfigError where the program has no cycles, as on backends other than
    TPU.
    """
    if compiled.cycles is None or chip.clock_hz is None:
        raise ConfigError(f"the compiler of {chip.name} estimates no cycles; a step time can be read on TPU alone.")
    price = kernel_secs or (lambda kernel: roofline_secs(kernel, chip, dtype))
    critical, own = (Clock(compiled, chip, price, lockstep).run(compiled.timeline) for lockstep in (True, False))
    total = sum(critical.values())
    exposed = {axes: secs for axes, secs in critical.items() if axes not in ("compute", "pallas")}
    mfu = model_flops / (chip.peak(dtype) * total)
    assert mfu < 1, f"{model_flops:.3g} FLOPs in {total:.3g} s are more than {chip.name} can do: a program misread"
    return StepTime(
        critical["compute"],
        exposed,
        critical["pallas"],
        total,
        1 - sum(own.values()) / total,
        mfu,
    )


def roofline_secs(kernel: Kernel, chip: Chip, dtype: str) -> float:
    """At least so long a kernel takes: FLOPs at peak, or operands and results once through memory."""
    moved = kernel.operand_bytes + kernel.result_bytes
    return max(kernel.flops / chip.peak(dtype), moved / chip.hbm_bandwidth)


class Clock:
    """Runs through a timeline as a device does, and tells where its time goes."""

    def __init__(self, compiled: Compiled, chip: Chip, kernel_secs: Callable[[Kernel], float], lockstep: bool):
        self.mesh, self.chip, self.kernel_secs, self.lockstep = compiled.mesh, chip, kernel_secs, lockstep
        self._routes: dict[tuple, Route] = {}

    def run(self, events: list) -> Counter:
        """Seconds by "compute", "pallas" and axes waited for; all links are free before."""
        spent: Counter = Counter()
        free: dict[tuple, float] = {}  # when the links of these axes, or those one way, have done all that has begun
        ready: dict[str, tuple[float, str]] = {}  # when a collective that has begun is done
        for event in events:
            now = sum(spent.values())
            if isinstance(event, Begin):
                links = event.call.axes, event.call.shift
                free[links] = max(now, free.get(links, 0.0)) + self._secs(event.call)
                ready[event.call.op] = free[links], "+".join(event.call.axes)
            elif isinstance(event, End) and event.op in ready:
                done, axes = ready.pop(event.op)
                spent[axes] += max(0.0, done - now)
            else:
                spent.update(self._local(event))
        return spent

    def _local(self, event: Compute | Kernel | Loop | Branch | End) -> dict[str, float]:
        if isinstance(event, Compute):
            return {"compute": event.cycles / self.chip.clock_hz}
        if isinstance(event, Kernel):
            return {"pallas": self.kernel_secs(event)}
        if isinstance(event, Loop):
            return {name: event.trips * secs for name, secs in self.run(event.body).items()}
        if isinstance(event, Branch):
            spent: Counter = Counter()
            for share, side in zip(event.lockstep if self.lockstep else event.own, event.sides, strict=True):
                spent.update({name: share * secs for name, secs in self.run(side).items()} if share else {})
            return spent
        return {}

    def _secs(self, call: Call) -> float:
        """How long one call takes with the links to itself."""
        if call.pairs:
            return call.bytes / one_way(self.mesh, call.pairs, self.chip)
        key = call.axes, call.group
        if key not in self._routes:
            self._routes[key] = route(self.mesh, call.axes, self.chip, call.group)
        found = self._routes[key]
        return call.bytes * (found.spread if call.kind == "all-to-all" else 1) / found.bandwidth
