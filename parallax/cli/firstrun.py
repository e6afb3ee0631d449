"""Try Parallax on this machine's devices: run a few steps, compare them with the plan, and write a file for an issue.

python -m parallax.firstrun
python -m parallax.firstrun --config=configs/llama_1b_16.py --config.mesh.dp=-1 --steps=20 --out=first-run.md
"""

import contextlib
import dataclasses
import getpass
import json
import math
import os
import re
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from parallax.display.progress import clear_progress, loading, waiting

with loading(__name__, sys.stderr):
    import jax
    import numpy as np
    from jax.extend.backend import get_backend

    from parallax.analysis.planned.devices import local_topology
    from parallax.analysis.planned.plan import plan
    from parallax.analysis.planned.step_time import read_figures
    from parallax.analysis.planned.topology import Topology
    from parallax.analysis.traced.memory import predicted_memory
    from parallax.analysis.traced.trace import abstract_mesh
    from parallax.cli.arguments import write_output
    from parallax.cli.command import CONFIGS, Flag, read_command, read_line, run_command, written
    from parallax.config.settings import Settings, read_settings
    from parallax.data import as_batch
    from parallax.display.tables import text_table
    from parallax.display.units import in_bytes, percent
    from parallax.errors import ConfigError, ParallaxError, check_whole, first_line, tell
    from parallax.hardware.devices import device_memory, most_memory, start_devices
    from parallax.pipeline import ShardedModel
    from parallax.processes.address import ADDRESS_FLAGS, read_address
    from parallax.processes.job import connect_devices, is_first, join, leave, limited, reporting, set_phase, several
    from parallax.sharding.compiler import compiler_options
    from parallax.sharding.mesh import make_mesh
    from parallax.step.resolve import Devices, resolve
    from parallax.step.step import TrainState, TrainStep, model_of, step_of
    from parallax.version import code_version

WARM_UP = 2  # steps that are excluded from times
COMMAND = "python -m parallax.firstrun {}"
USAGE = COMMAND.format("[--config=FILE] [--config.SECTION.KEY=VALUE ...] [--steps=12] [--out=FILE]")
FLAGS = {
    "steps": Flag(f"steps to take; the first {WARM_UP} are excluded from times", 12),
    "out": Flag("the file to write", "first-run.md"),
    **{name: Flag(f"{meaning} (or {variable})") for name, (variable, meaning) in ADDRESS_FLAGS.items()},
}


class PhaseError(ParallaxError):
    """A phase of the first run failed; the file has the details."""

    exit_status = 1


def main(argv: Sequence[str]) -> int:
    """Run; returns the exit status. User errors are one line on stderr."""
    return leave(lambda: run_command(reporting()(act), argv, __doc__, USAGE, FLAGS))


def act(argv: Sequence[str]) -> None:
    """Run all phases and write the file; then raise PhaseError if a phase failed."""
    line = read_line(argv, FLAGS, config=CONFIGS / "base.py")
    steps, out = line.values["steps"], line.values["out"]
    check_whole("--steps", steps, least=WARM_UP + 1)
    settings = read_settings(line.config)
    join(read_address(line.values), settings.distributed, simulate=settings.mesh.simulate)
    program, *words = argv
    note = notes_in(out)
    try:
        start_devices()
    except RuntimeError as error:  # a missing driver, or chips that another process uses
        note("\n".join([COMMAND.format(" ".join(words)), *software(), f"JAX has no devices: {error}"]))
        raise PhaseError(f"JAX has no devices: {first_line(error)}; {out} says more") from error
    words = words if written(argv, "config") else [*choose(words), *words]
    run = FirstRun(shortened(read_command([program, *words], FLAGS)[0], steps), note)
    config = json.dumps(run.settings.to_dict(), indent=1)
    note("\n".join([COMMAND.format(" ".join(words)), "", *machine(), *software(), "", config, ""]))
    try:
        with limited(run.settings.distributed):
            measure(run)
        if run.failed:
            raise PhaseError(run.failed)
    finally:
        note("\n".join(["", *compared(run), "", *(f"warning: {line}" for line in warnings(run))]))
        say(f"results are in {out}, without names of host, user and home; attach it to an issue")


def shortened(settings: Settings, steps: int) -> Settings:
    """The settings on these devices for a run of `steps` steps without a long warm-up."""
    train = {"steps": steps, "profile_steps": ""}
    return resolve(read_settings(settings, train=train, optimizer={"warmup_steps": 1}), Devices.here())


def say(text: str) -> None:
    """Print a line of progress in process 0."""
    if is_first():
        clear_progress()
        tell(text, sys.stderr)


def notes_in(out: str) -> Callable[[str], None]:
    """A function that prints a text and adds it to the file, so that nothing is lost with the process."""
    lines = [f"# First run, {time.strftime('%Y-%m-%d')}", "", "```"]

    def note(text: str) -> None:
        say(text)
        lines.append(text)
        if is_first():
            write_output("out", out, nameless("\n".join([*lines, "```", ""])))

    return note


# ---- the choice of the config: the largest one that fits according to the plan

# By platform, largest first: a config, and changes to it. All of them use the devices along dp.
CANDIDATES = {
    "gpu": ["gpu_80gb_16x8", "gpu_80gb_x8", "gpu_80gb", "gpu_24gb_x8", "gpu_24gb"],
    "tpu": [
        "llama2_7b_64",
        "llama_1b_16",
        "llama_1b_16 --config.pipeline.microbatches=8",
        "gpu_24gb --config.model.kernel=splash",
    ],
}
SMALLEST = "tiny_gqa"
# Share of a device's memory: JAX reserves three quarters of a GPU's, and compilers need more than the peak.
MEMORY_SHARE = 0.7


def flags_for(candidate: str) -> list[str]:
    """The flags of a candidate."""
    name, *changes = candidate.split()
    return [f"--config={CONFIGS / name}.py", "--config.mesh.dp=-1", *changes]


def choose(words: Sequence[str]) -> list[str]:
    """The flags of the config to use on this machine's devices; `words` are the user's."""
    available = device_memory()
    for candidate in CANDIDATES.get(jax.devices()[0].platform, []):
        flags = flags_for(candidate)
        try:
            needed = planned_memory(resolve(read_command([__name__, *flags, *words], FLAGS)[0], Devices.here()))
            if available is None or needed <= MEMORY_SHARE * available:
                return flags
            raise ConfigError(f"it needs {in_bytes(needed)} on each device, which has {in_bytes(available)}")
        except ParallaxError as error:
            say(f"{candidate} is passed over: {error}")
    return [f"--config={CONFIGS / SMALLEST}.py", f"--config.data.global_batch={4 * jax.device_count()}"]


def planned_memory(settings: Settings) -> int:
    """Planned bytes on each device for settings on these devices; ParallaxError if they do not fit the mesh."""
    model = model_of(settings, abstract_mesh(settings.mesh.sizes, simulated=jax.default_backend() == "cpu"))
    model.check_batch(settings.data.global_batch, settings.data.seq)
    return predicted_memory(model, settings).peak


# ---- the phases; what is known stays if a later one fails

LARGEST_ID = 251  # of tokens that count up and start again, which a model learns in a few steps
ERROR_LINES = 12  # most lines of an error in the file
METRICS = ("loss", "grad_norm", "skipped")
SOURCES = ("planned", "compiled", "measured")
MEMORY, STEP_TIME, MFU = "memory of a device", "time of a step", "MFU"
UNITS = {MEMORY: in_bytes, STEP_TIME: "{:.3g} s".format, MFU: percent}


@dataclasses.dataclass
class FirstRun:
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


def measure(run: FirstRun) -> None:
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


def make_plan(run: FirstRun) -> None:
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


def read_program(run: FirstRun, model: ShardedModel, program: Any) -> None:
    """Note the compiler's memory and, on accelerators, its time."""
    try:
        made = read_figures(program, model, run.settings, run.topology)
        run.figures[MEMORY, "compiled"] = made.peak_bytes or math.nan
        run.figures[STEP_TIME, "compiled"] = made.time.total_secs if made.time else math.nan
    except Exception as error:  # the program still runs
        run.note(f"the compiled program cannot be read: {type(error).__name__}: {error}")
    run.note(f"compiler options of Parallax: {compiler_options(model.mesh, run.settings.model.matmul) or 'none'}")


def take_steps(run: FirstRun, program: Any, state: TrainState, batch: Mapping[str, Any]) -> None:
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


def compared(run: FirstRun) -> Iterator[str]:
    """A table of plan, compiler's figures and measurement."""
    rows = []
    for name, text_of in UNITS.items():
        figures = [run.figures[name, source] for source in SOURCES]
        shares = run.of_planned(name), figures[2] / figures[1]
        rows.append([name, *(cell(figure, text_of) for figure in figures), *(cell(share, percent) for share in shares)])
    yield from text_table(["", *SOURCES, "measured\n/ planned", "measured\n/ compiled"], rows, left=1)


def cell(figure: float, text_of: Callable[[float], str]) -> str:
    return "-" if math.isnan(figure) else text_of(figure)


def warnings(run: FirstRun) -> Iterator[str]:
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


# ---- the machine, without names of hosts, users or folders

# What JAX does not say of itself: packages, and settings of libraries in the environment, by how their names begin.
REPORTED = ("flax", "jax", "libtpu", "nvidia-cudnn", "nvidia-nccl", "optax", "orbax", "parallax")
SETTINGS = ("LIBTPU_INIT_ARGS", "NCCL_", "CUDA_DEVICE_")
# Addresses of private networks, or with a port: versions may have four numbers, too.
ADDRESS = re.compile(r"\b(?:\d{1,3}(?:\.\d{1,3}){3}:\d+|(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3})\b")
SHORTEST_NAME = 4  # characters; a shorter host name would match parts of words


def machine() -> list[str]:
    """What JAX says of itself, the devices and the environment, and what it leaves out of the devices: where the first
    and the last one are."""
    environment, *_ = jax.print_environment_info(return_string=True).split("| Processes")  # which may be other users'
    return [
        environment.strip(),
        f"devices: {jax.devices()[0]!r} to {jax.devices()[-1]!r}",
        f"memory of a device: {cell(device_memory() or math.nan, in_bytes)}",
        f"backend: {' '.join(get_backend().platform_version.split())}",
    ]


def software() -> list[str]:
    """Versions of the packages, and the environment's settings of libraries."""
    packages = {package.name: package.version for package in distributions() if package.name}  # it may be broken
    there = [(packages | {"parallax": code_version()}, REPORTED), (os.environ, SETTINGS)]
    return [f"{name}: {of[name]}" for of, names in there for name in sorted(of) if name.startswith(names)]


def nameless(text: str) -> str:
    """The text without names of this machine's host, user and folders, and without addresses.

    >>> nameless(f"{Path.home()}/corpus, 10.0.0.2:8476")
    '~/corpus, <address>'
    """
    for folder, instead in ((Path.cwd(), "."), (Path(sys.prefix), "<python>"), (Path.home(), "~")):
        if folder != Path(folder.anchor):
            text = text.replace(str(folder), instead)
    # JAX names the host, however short, and variables a coordinator.
    text = re.sub(r"(node=|ADDRESS=)('[^']*'|\S+)", r"\1<host>", ADDRESS.sub("<address>", text))
    for name in (socket.gethostname(), socket.gethostname().split(".")[0]):
        if len(name) >= SHORTEST_NAME:
            text = re.sub(rf"\b{re.escape(name)}\b", "<host>", text)
    with contextlib.suppress(KeyError, OSError):  # a container whose user has no name
        text = re.sub(rf"(?<=/){(user := re.escape(getpass.getuser()))}(?=/|\b)|\b{user}(?=@)", "<user>", text)
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv))
