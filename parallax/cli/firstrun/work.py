"""The phases of a first run. What a phase finds is kept if a later one fails."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from parallax.analysis.compiled import branch_shares, read_compiled
from parallax.analysis.devices import device_memory, local_topology, most_memory
from parallax.analysis.flops import flops_per_token
from parallax.analysis.memory import Memory
from parallax.analysis.step_time import Estimate, predict, step_time
from parallax.analysis.topology import Topology
from parallax.cli.firstrun.choose import planned_memory
from parallax.config.settings import Settings
from parallax.runtime.errors import ConfigError
from parallax.runtime.multihost.job import connect, set_phase, several
from parallax.runtime.progress import waiting
from parallax.runtime.units import in_bytes
from parallax.sharding.compiler import compiler_options
from parallax.sharding.mesh import make_mesh
from parallax.training.batches import own_rows, put_on
from parallax.training.step import TrainState, TrainStep, step_of

WARM_UP = 2  # steps that are left out of the times
LARGEST_ID = 251  # of the tokens that count up and begin anew, which a model learns in a few steps
LINES = 12  # of an error, in the file


class Taken(NamedTuple):
    """A step that was taken, from its start to the end of what it computes."""

    secs: float
    loss: float
    grad_norm: float
    skipped: bool


class Phase(NamedTuple):
    """How a phase went: "done", "failed", "running" or "not reached"."""

    name: str
    state: str
    secs: float = 0.0
    error: str = ""


@dataclasses.dataclass
class Found:
    """All results so far; None where there is none yet. Bytes are those of a device, seconds those of a step."""

    settings: Settings
    command: str
    phases: list[Phase] = dataclasses.field(default_factory=list)
    held: Memory | None = None
    topology: Topology | None = None
    unplanned: str = ""  # why no time was planned
    planned: Estimate | None = None
    options: dict[str, str] = dataclasses.field(default_factory=dict)  # what the compiler is told by this project
    compile_secs: float | None = None
    compiled_bytes: int | None = None
    compiled_parts: str = ""
    compiled_step_secs: float | None = None  # as the compiler counts cycles
    step_flops: float | None = None  # of the model's mathematics, on all devices
    steps: list[Taken] = dataclasses.field(default_factory=list)
    most_bytes: int | None = None
    limit_bytes: int | None = None

    @property
    def failed(self) -> bool:
        return any(phase.state == "failed" for phase in self.phases)

    @property
    def median_secs(self) -> float | None:
        """Of the steps after the warm-up."""
        counted = [taken.secs for taken in self.steps[WARM_UP:]]
        return statistics.median(counted) if counted else None

    @property
    def mfu(self) -> float | None:
        """FLOPs of the model's mathematics over what the devices could do in the median step."""
        if self.topology is None or self.median_secs is None or self.step_flops is None:
            return None
        peak = self.topology.chip.peak(self.settings.model.dtype) * self.topology.devices
        return self.step_flops / peak / self.median_secs


class FirstRun:
    """The phases, in order. `save` is called after each, and before it, so that nothing is lost with the process."""

    def __init__(self, found: Found, steps: int, *, say: Callable[[str], None], save: Callable[[], None]):
        self.found, self.steps, self.say, self.save = found, steps, say, save
        self.step: TrainStep | None = None
        self.program: Any = None
        self.state: TrainState | None = None

    def run(self) -> None:
        """Do all phases, up to the first that fails; what was not planned can still be measured."""
        acts = {
            "plan": self._plan,
            "compile": self._compile,
            "first state": self._start,
            "first step": lambda: self._take(1),
            "steps": lambda: self._take(self.steps - 1),
        }
        self.found.phases = [Phase(name, "not reached") for name in acts]
        for number, (name, act) in enumerate(acts.items()):
            self.say(f"{name} …")
            with waiting(f"first run, {name}"):
                done = self._do(number, name, act)
            if not done and name != "plan":
                return

    def _do(self, number: int, name: str, act: Callable[[], None]) -> bool:
        self.found.phases[number] = Phase(name, "running")
        self.save()
        set_phase(f"{name} of the first run", compiling=True)
        begun = time.perf_counter()
        try:
            act()
            ended = Phase(name, "done", time.perf_counter() - begun)
        except Exception as error:  # whatever it is, it belongs into the file
            said = "\n".join(f"{type(error).__name__}: {error}".splitlines()[:LINES])
            ended = Phase(name, "failed", time.perf_counter() - begun, said)
        self.found.phases[number] = ended
        self.found.most_bytes = most_memory() if jax.default_backend() != "cpu" else None
        self.save()
        self.say(f"{name}: {ended.state} after {ended.secs:.1f} s{ended.error and f': {ended.error.splitlines()[0]}'}")
        return ended.state == "done"

    def _plan(self) -> None:
        found, settings = self.found, self.found.settings
        found.limit_bytes = device_memory()
        found.held = planned_memory(settings)
        try:
            if several() and jax.default_backend() == "cpu":  # each measures as often as it can: they would not meet
                raise ConfigError("what simulated devices of several processes do a second is not measured")
            found.topology = local_topology(settings.model.dtype)
            found.planned = predict(settings, found.topology)
        except ConfigError as error:  # an unknown chip, or a kernel that is only interpreted here
            found.unplanned = str(error)
        self.say(
            f"planned: {in_bytes(found.held.peak)} on each device, {seconds(found.planned and found.planned.secs)}"
        )

    def _compile(self) -> None:
        found, settings = self.found, self.found.settings
        mesh = make_mesh(settings.mesh)
        connect(mesh)
        found.options = {name: str(value) for name, value in compiler_options(mesh).items()}
        self.step, shape = step_of(settings, mesh), (settings.data.global_batch, settings.data.seq)
        model = self.step.model
        found.step_flops = flops_per_token(settings.model, model.shapes, seq=shape[1]) * math.prod(shape)
        lowered, begun = self.step.lower(*shape), time.perf_counter()
        self.program = lowered.compile()
        found.compile_secs = time.perf_counter() - begun
        self._read_sizes()
        if jax.default_backend() == "tpu":  # the only compiler that estimates cycles
            self._price()

    def _price(self) -> None:
        """The step's time as the compiler counts cycles. What cannot be read is said: the program runs without."""
        found, model = self.found, self.step.model
        try:
            made = read_compiled(self.program, model.mesh, branch_shares(model))
            flops, dtype = found.step_flops / found.topology.devices, found.settings.model.dtype
            found.compiled_step_secs = step_time(made, found.topology.chip, flops, dtype=dtype).total_secs
        except Exception as error:
            self.say(f"the compiled program is not priced: {type(error).__name__}: {error}")

    def _read_sizes(self) -> None:
        """The compiler's word on memory, as far as the backend has one."""
        sizes = self.program.memory_analysis()
        if sizes is None:
            return
        arguments, temporaries = sizes.argument_size_in_bytes, sizes.temp_size_in_bytes
        new = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        # The peak of XLA for CPU leaves temporaries out, and for GPU it may be missing.
        on_tpu = jax.default_backend() == "tpu"
        self.found.compiled_bytes = sizes.peak_memory_in_bytes if on_tpu else arguments + temporaries + new
        parts = {"arguments": arguments, "temporaries": temporaries, "new results": new}
        self.found.compiled_parts = ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items())

    def _start(self) -> None:
        self.state = jax.block_until_ready(self.step.init())

    def _take(self, count: int) -> None:
        batch = counting(self.found.settings, self.step.model.batch_sharding)
        for _ in range(count):
            begun = time.perf_counter()
            self.state, metrics = jax.block_until_ready(self.program(self.state, batch))
            secs = time.perf_counter() - begun
            loss, norm, skipped = (float(metrics[name]) for name in ("loss", "grad_norm", "skipped"))
            self.found.steps.append(Taken(secs, loss, norm, bool(skipped)))
            self.say(f"step {len(self.found.steps)}/{self.steps}  {seconds(secs)}  loss {loss:.4f}  gnorm {norm:.2f}")


def counting(settings: Settings, sharding: Any) -> dict[str, Any]:
    """A batch whose tokens count up and begin anew: next tokens are known, and any corpus does without."""
    shape = settings.data.global_batch, settings.data.seq
    numbers = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)[own_rows(sharding, shape)]
    largest = min(settings.model.vocab, LARGEST_ID)
    batch = {
        "tokens": numbers % largest,
        "labels": (numbers + 1) % largest,
        "segments": np.ones_like(numbers),
        "positions": numbers % shape[1],
    }
    return put_on(sharding, shape)(batch)


def seconds(secs: float | None) -> str:
    """A step's time.

    >>> seconds(0.01234), seconds(None)
    ('0.0123 s', 'not known')
    """
    return "not known" if secs is None else f"{secs:.3g} s"
