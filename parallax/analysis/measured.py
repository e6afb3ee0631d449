"""A few steps of a config on the devices that are here, beside what was planned of them."""

import contextlib
import dataclasses
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from parallax.analysis.planned.devices import local_topology
from parallax.analysis.planned.plan import plan
from parallax.analysis.planned.step_time import read_figures
from parallax.analysis.planned.topology import Topology
from parallax.analysis.traced.memory import predicted_memory
from parallax.analysis.traced.trace import abstract_mesh
from parallax.config.settings import Settings, read_settings
from parallax.data import as_batch
from parallax.display.progress import clear_progress, waiting
from parallax.display.tables import text_table
from parallax.display.units import in_bytes, percent
from parallax.errors import ConfigError, ParallaxError, tell
from parallax.hardware.devices import most_memory
from parallax.pipeline import ShardedModel
from parallax.processes.job import connect_devices, is_first, set_phase, several
from parallax.sharding.mesh import make_mesh
from parallax.step.resolve import Devices, resolve
from parallax.step.step import TrainState, TrainStep, model_of, options_of, step_of

WARM_UP = 2  # steps that are excluded from times
LARGEST_ID = 251  # of tokens that count up and start again, which a model learns in a few steps
ERROR_LINES = 12  # most lines of an error in the file
METRICS = ("loss", "grad_norm", "skipped")
SOURCES = ("planned", "compiled", "measured")
MEMORY, STEP_TIME, MFU = "memory of a device", "time of a step", "MFU"
UNITS = {MEMORY: in_bytes, STEP_TIME: "{:.3g} s".format, MFU: percent}


class PhaseError(ParallaxError):
    """A phase of the measurement failed; what was noted has the details."""

    exit_status = 1


def say(text: str) -> None:
    """Print a line of progress in process 0."""
    if is_first():
        clear_progress()
        tell(text, sys.stderr)


@dataclasses.dataclass
class MeasuredSteps:
    """What is known so far: the numbers of each step, and figures by name and source, NaN where they are not known."""

    settings: Settings
    note: Callable[[str], None] = say
    topology: Topology | None = None
    figures: dict[tuple[str, str], float] = dataclasses.field(default_factory=lambda: defaultdict(lambda: math.nan))
    steps: list[dict[str, float]] = dataclasses.field(default_factory=list)
    failed: str = ""  # the phase that failed last, and why

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note a phase with its time; its error becomes a PhaseError."""
        self.note(f"{name} …")
        set_phase(f"{name} of the first run", compiling=True)
        begun = time.perf_counter()
        try:
            with waiting(f"first run, {name}"):
                yield
        except Exception as error:
            lines = f"{type(error).__name__}: {error}".splitlines()
            self.note("\n".join([f"{name} failed after {time.perf_counter() - begun:.1f} s", *lines[:ERROR_LINES]]))
            self.failed = f"{name} failed: {lines[0]}"
            raise PhaseError(self.failed) from error
        self.note(f"{name}: done in {time.perf_counter() - begun:.1f} s")

    def of_planned(self, name: str) -> float:
        """What is measured over what was planned; if nothing is measured, what the compiler says."""
        planned, compiled, measured = (self.figures[name, source] for source in SOURCES)
        return (compiled if math.isnan(measured) else measured) / planned


def shortened(settings: Settings, steps: int) -> Settings:
    """The settings on these devices for a run of `steps` steps without a long warm-up."""
    train = {"steps": steps, "profile_steps": ""}
    return resolve(read_settings(settings, train=train, optimizer={"warmup_steps": 1}), Devices.here())


def planned_memory(settings: Settings) -> int:
    """Planned bytes on each device for settings on these devices; ParallaxError if they do not fit the mesh."""
    model = model_of(settings, abstract_mesh(settings.mesh.sizes, simulated=jax.default_backend() == "cpu"))
    model.check_batch(settings.data.global_batch, settings.data.seq)
    return predicted_memory(model, settings).peak


# ---- the phases; what is known stays if a later one fails


def measure(run: MeasuredSteps) -> None:
    """Plan, compile and run the step; a step that could not be planned can still be measured."""
    with contextlib.suppress(PhaseError), run.phase("plan"):
        make_plan(run)
    with run.phase("trace"):
        mesh = make_mesh(run.settings.mesh)
        connect_devices(mesh)
        step = step_of(run.settings, mesh)
        lowered = step.lower(run.settings.data.global_batch, run.settings.data.seq)
    with run.phase("compile"):
        program = lowered.compile()
    read_program(run, step.model, program)
    with run.phase("first state"):  # the first scales of 8-bit products come from a batch
        batch = counting_batch(run.settings, step)
        state = jax.block_until_ready(step.init(batch if run.settings.model.first_scales_are_measured else None))
    with run.phase("steps"):
        take_steps(run, program, state, batch)


def make_plan(run: MeasuredSteps) -> None:
    """Plan the memory of the step, and its time, if the speeds of chips and kernel are known."""
    run.figures[MEMORY, "planned"] = planned_memory(run.settings)
    try:
        if several() and jax.default_backend() == "cpu":  # processes would measure different numbers of times
            raise ConfigError("the speed of simulated devices is not measured with several processes")
        run.topology = local_topology(run.settings.model.dtype)
        planned = plan(run.settings, run.topology)
    except ConfigError as error:  # an unknown chip, or a kernel that is only interpreted here
        run.note(f"warning: no time was planned: {error}")
    else:
        run.figures[STEP_TIME, "planned"], run.figures[MFU, "planned"] = planned.secs, planned.mfu
        run.note(str(planned))


def read_program(run: MeasuredSteps, model: ShardedModel, program: Any) -> None:
    """Note the compiler's memory and, on accelerators, its time."""
    try:
        made = read_figures(program, model, run.settings, run.topology)
        run.figures[MEMORY, "compiled"] = made.peak_bytes or math.nan
        run.figures[STEP_TIME, "compiled"] = made.time.total_secs if made.time else math.nan
    except Exception as error:  # the program still runs
        run.note(f"the compiled program cannot be read: {type(error).__name__}: {error}")
    run.note(f"compiler options of Parallax: {options_of(model) or 'none'}")


def take_steps(run: MeasuredSteps, program: Any, state: TrainState, batch: Mapping[str, Any]) -> None:
    """Run the steps, waiting for each."""
    figures, steps = run.figures, run.settings.train.steps
    for number in range(1, steps + 1):
        begun = time.perf_counter()
        state, metrics = jax.block_until_ready(program(state, batch))
        taken = {"secs": time.perf_counter() - begun} | {name: float(metrics[name]) for name in METRICS}
        run.steps.append(taken)
        said = "step {}/{}  {secs:.3g} s  loss {loss:.4f}  gnorm {grad_norm:.3g}".format(number, steps, **taken)
        run.note(said + "  skipped" * bool(taken["skipped"]))
        if jax.default_backend() != "cpu":  # there it is the process's
            figures[MEMORY, "measured"] = most_memory() or math.nan
        if number > WARM_UP:
            figures[STEP_TIME, "measured"] = secs = float(np.median([each["secs"] for each in run.steps[WARM_UP:]]))
            figures[MFU, "measured"] = figures[MFU, "planned"] * figures[STEP_TIME, "planned"] / secs


def counting_batch(settings: Settings, step: TrainStep) -> dict[str, jax.Array]:
    """A batch of tokens that count up and start again: next tokens are predictable, and no corpus is needed."""
    sharding, shape = step.model.batch_sharding, (settings.data.global_batch, settings.data.seq)
    ids = np.arange(shape[0])[:, None] * shape[1] + np.arange(shape[1] + 1)
    arrays = as_batch((ids % min(settings.model.vocab, LARGEST_ID)).astype(np.int32))
    return {name: jax.make_array_from_callback(shape, sharding, arrays[name].__getitem__) for name in arrays}


# ---- what is compared

# Differences between measurement and plan that are worth a warning: those between analytic and compiled plans
# (docs/plan.md). Simulated devices have no plan.
WITHIN = {MEMORY: 0.1, STEP_TIME: 0.2}
LOSS_WITHIN = 0.1  # share of ln(vocab), for the loss before any learning
UNEVEN = 1.5  # slowest step over the median


def compared(run: MeasuredSteps) -> Iterator[str]:
    """A table of plan, compiler's figures and measurement."""
    rows = []
    for name, text_of in UNITS.items():
        figures = [run.figures[name, source] for source in SOURCES]
        cells = [*((figure, text_of) for figure in figures), (run.of_planned(name), percent)]
        cells.append((figures[2] / figures[1], percent))
        rows.append([name, *("-" if math.isnan(figure) else text_of(figure) for figure, text_of in cells)])
    yield from text_table(["", *SOURCES, "measured\n/ planned", "measured\n/ compiled"], rows, left=1)


def warnings(run: MeasuredSteps) -> Iterator[str]:
    """Observations that readers of the file should see first."""
    steps, losses, uniform = run.steps, [step["loss"] for step in run.steps], math.log(run.settings.model.vocab)
    odd = [str(number) for number, step in enumerate(steps, 1) if not math.isfinite(step["loss"] + step["grad_norm"])]
    if odd:
        yield f"loss or gradient is not finite in step {', '.join(odd)}"
    if steps and not abs(losses[0] / uniform - 1) < LOSS_WITHIN:
        yield f"the first loss is {losses[0]:.3f}; a model that has learned nothing is near ln(vocab) = {uniform:.3f}"
    if len(steps) > 1 and not losses[-1] < losses[0]:
        yield f"the loss does not fall: {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last"
    if skipped := sum(step["skipped"] for step in steps):
        yield f"the guard skipped {skipped:.0f} of {len(steps)} steps"
    slowest = max((step["secs"] for step in steps[WARM_UP:]), default=math.nan) / run.figures[STEP_TIME, "measured"]
    if slowest > UNEVEN:
        yield f"the slowest step takes {slowest:.1f} times the median"
    for name, limit in () if run.topology and run.topology.shared else WITHIN.items():
        if abs(share := run.of_planned(name) - 1) > limit:
            yield f"the {name} is {percent(1 + share)} of what was planned: further off than {percent(limit)}"
