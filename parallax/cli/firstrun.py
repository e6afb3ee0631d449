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
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parallax.display.progress import clear_progress, loading, waiting

with loading(__name__, sys.stderr):
    import jax
    import numpy as np
    from jax.extend.backend import get_backend

    from parallax.analysis.planned.devices import device_memory, local_topology, most_memory
    from parallax.analysis.planned.plan import Plan, plan
    from parallax.analysis.planned.step_time import CompiledStep, read_figures
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
    from parallax.hardware.devices import start_devices
    from parallax.processes.address import ADDRESS_FLAGS, read_address
    from parallax.processes.job import connect_devices, is_first, join, leave, limited, reporting, set_phase, several
    from parallax.sharding.compiler import compiler_options
    from parallax.sharding.mesh import make_mesh
    from parallax.step.batches import own_part, put_on
    from parallax.step.resolve import Devices, resolve
    from parallax.step.step import TrainState, TrainStep, model_of, step_of
    from parallax.version import code_version, version_of

WARM_UP = 2  # steps that are excluded from times
USAGE = "python -m parallax.firstrun [--config=FILE] [--config.SECTION.KEY=VALUE ...] [--steps=12] [--out=FILE]"
FLAGS = {
    "steps": Flag(f"steps to take; the first {WARM_UP} are excluded from times", 12),
    "out": Flag("the file to write", "first-run.md"),
    **{name: Flag(f"{meaning} (or {variable})") for name, (variable, meaning) in ADDRESS_FLAGS.items()},
}


Note = Callable[[str], None]


class PhaseError(ParallaxError):
    """A phase of the first run failed; the file has the details."""

    exit_status = 1


def main(argv: Sequence[str]) -> int:
    """Run; returns the exit status. User errors are one line on stderr."""
    return leave(lambda: run_command(reporting()(act), argv, __doc__, USAGE, FLAGS))


def act(argv: Sequence[str]) -> None:
    """Run all phases and write the file; then raise PhaseError if a phase failed."""
    line, words = read_line(argv, FLAGS, config=CONFIGS / "base.py"), argv[1:]
    steps, out = line.values["steps"], line.values["out"]
    check_whole("--steps", steps, least=WARM_UP + 1)
    settings = read_settings(line.config)
    join(read_address(line.values), settings.distributed, simulate=settings.mesh.simulate)
    try:
        start_devices()
    except RuntimeError as error:  # a missing driver, or chips that another process uses
        notes_in(out, [command(words), "", *software(), ""])(f"JAX has no devices: {error}")
        raise PhaseError(f"JAX has no devices: {first_line(error)}; {out} says more") from error
    if not written(argv, "config"):
        words = [*choose([word for word in words if word.startswith(("--config.", "-config."))]), *words]
        line = read_line([argv[0], *words], FLAGS)
    run = FirstRun(shortened(read_settings(line.config), steps))
    config = json.dumps(run.settings.to_dict(), indent=1)
    note = notes_in(out, [command(words), "", *machine(), *software(), "", config, ""])
    say(command(words))
    try:
        with limited(run.settings.distributed):
            measure(run, note)
    finally:
        note("\n".join(["", *compared(run), "", *(f"warning: {line}" for line in warnings(run))]))
        say(f"results are in {out}, without names of host, user and home; attach it to an issue")


def shortened(settings: Settings, steps: int) -> Settings:
    """The settings on these devices for a run of `steps` steps without a long warm-up."""
    train = {"steps": steps, "profile_steps": ""}
    return resolve(read_settings(settings, train=train, optimizer={"warmup_steps": 1}), Devices.here())


def command(words: Sequence[str]) -> str:
    """The command for the same run, from the repository's folder."""
    return " ".join(["python -m parallax.firstrun", *words]).replace(f"{CONFIGS.parent}{os.sep}", "")


def say(text: str) -> None:
    """Print a line of progress in process 0."""
    if is_first():
        clear_progress()
        tell(text, sys.stderr)


def notes_in(out: str, header: Sequence[str]) -> Note:
    """A function that prints a text and adds it to the file, so that nothing is lost with the process."""
    lines = [f"# First run, {time.strftime('%Y-%m-%d')}", "", "```", *header]

    def note(text: str) -> None:
        say(text)
        lines.append(text)
        if is_first():
            write_output("out", out, nameless("\n".join([*lines, "```", ""])))

    return note


# ---- the choice of the config: the largest one that fits according to the plan

ALL_ALONG_DP = "--config.mesh.dp=-1"
# By platform, largest first: a config, and changes to it.
CANDIDATES = {
    "gpu": [
        ("gpu_80gb_16x8",),
        ("gpu_80gb_x8",),
        ("gpu_80gb", ALL_ALONG_DP),
        ("gpu_24gb_x8",),
        ("gpu_24gb", ALL_ALONG_DP),
    ],
    "tpu": [
        ("llama2_7b_64", ALL_ALONG_DP),
        ("llama_1b_16", ALL_ALONG_DP),
        ("llama_1b_16", ALL_ALONG_DP, "--config.pipeline.microbatches=8"),
        ("gpu_24gb", ALL_ALONG_DP, "--config.model.kernel=splash"),
    ],
}
SMALLEST = "tiny_gqa"
# Share of a device's memory: JAX reserves three quarters of a GPU's, and compilers need more than the peak.
MEMORY_SHARE = 0.7


def choose(rest: Sequence[str]) -> list[str]:
    """The flags of the config to use on this machine's devices; `rest` are the user's changes."""
    available = device_memory()
    for name, *changes in CANDIDATES.get(jax.devices()[0].platform, []):
        words = [f"--config={CONFIGS / name}.py", *changes]
        try:
            needed = planned_memory(resolve(read_command([__name__, *words, *rest], {})[0], Devices.here()))
            if available is None or needed <= MEMORY_SHARE * available:
                return words
            raise ConfigError(f"it needs {in_bytes(needed)} on each device, which has {in_bytes(available)}")
        except ParallaxError as error:
            say(f"{name} is passed over: {error}")
    return [f"--config={CONFIGS / SMALLEST}.py", f"--config.data.global_batch={4 * jax.device_count()}"]


def planned_memory(settings: Settings) -> int:
    """Planned bytes on each device for settings on these devices; ParallaxError if they do not fit the mesh."""
    model = model_of(settings, abstract_mesh(settings.mesh.sizes, simulated=jax.default_backend() == "cpu"))
    model.check_batch(settings.data.global_batch, settings.data.seq)
    return predicted_memory(model, settings).peak


# ---- the phases; what is known stays if a later one fails

LARGEST_ID = 251  # of tokens that count up and start again, which a model learns in a few steps
ERROR_LINES = 12  # most lines of an error in the file


class Taken(NamedTuple):
    """A measured step, from its start to the end of its computation."""

    secs: float
    loss: float
    grad_norm: float
    skipped: bool


@dataclasses.dataclass
class FirstRun:
    """What is known so far; missing figures are None. Bytes are those of a device, seconds those of a step."""

    settings: Settings
    planned_bytes: int | None = None
    topology: Topology | None = None
    unplanned: str = ""  # why no time was planned
    plan: Plan | None = None
    compile_secs: float | None = None
    made: CompiledStep | None = None
    steps: list[Taken] = dataclasses.field(default_factory=list)
    most_bytes: int | None = None

    @property
    def median_secs(self) -> float | None:
        """Median time of the steps after the warm-up."""
        counted = [taken.secs for taken in self.steps[WARM_UP:]]
        return statistics.median(counted) if counted else None


@contextlib.contextmanager
def phase(name: str, note: Note) -> Iterator[None]:
    """Note a phase with its time; its error becomes a PhaseError."""
    note(f"{name} …")
    set_phase(f"{name} of the first run", compiling=True)
    begun = time.perf_counter()
    try:
        with waiting(f"first run, {name}"):
            yield
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        note("\n".join([f"{name} failed after {time.perf_counter() - begun:.1f} s", *lines[:ERROR_LINES]]))
        raise PhaseError(f"{name} failed: {lines[0]}") from error
    note(f"{name}: done in {time.perf_counter() - begun:.1f} s")


def measure(run: FirstRun, note: Note) -> None:
    """Plan, compile and run the step; a step that could not be planned can still be measured."""
    unplanned = None
    try:
        with phase("plan", note):
            make_plan(run)
            note(str(run.plan or f"no time was planned: {run.unplanned}"))
    except PhaseError as error:
        unplanned = error
    with phase("compile", note):
        step, program = compile_step(run, note)
    with phase("first state", note):  # the first scales of 8-bit products come from a batch
        batch = counting_batch(run.settings, step)
        state = jax.block_until_ready(step.init(batch if run.settings.model.first_scales_are_measured else None))
    with phase("steps", note):
        take_steps(run, note, program, state, batch)
    if unplanned:
        raise unplanned


def make_plan(run: FirstRun) -> None:
    """Plan the memory and time of the step, if the speeds of chips and kernel are known."""
    run.planned_bytes = planned_memory(run.settings)
    try:
        if several() and jax.default_backend() == "cpu":  # processes would measure different numbers of times
            raise ConfigError("the speed of simulated devices is not measured with several processes")
        run.topology = local_topology(run.settings.model.dtype)
        run.plan = plan(run.settings, run.topology)
    except ConfigError as error:  # an unknown chip, or a kernel that is only interpreted here
        run.unplanned = str(error)


def compile_step(run: FirstRun, note: Note) -> tuple[TrainStep, Any]:
    """The step, compiled; the compiler's memory and, on accelerators, its time are read from it."""
    settings, mesh = run.settings, make_mesh(run.settings.mesh)
    connect_devices(mesh)
    step = step_of(settings, mesh)
    lowered, begun = step.lower(settings.data.global_batch, settings.data.seq), time.perf_counter()
    program = lowered.compile()
    run.compile_secs = time.perf_counter() - begun
    try:
        run.made = read_figures(program, step.model, settings, run.topology)
    except Exception as error:  # the program still runs
        note(f"the compiled program cannot be read: {type(error).__name__}: {error}")
    note(f"compiler options of Parallax: {compiler_options(mesh, settings.model.matmul) or 'none'}")
    return step, program


def take_steps(run: FirstRun, note: Note, program: Any, state: TrainState, batch: Mapping[str, Any]) -> None:
    """Run the steps, waiting for each."""
    for number in range(1, run.settings.train.steps + 1):
        begun = time.perf_counter()
        state, metrics = jax.block_until_ready(program(state, batch))
        secs = time.perf_counter() - begun
        loss, norm, skipped = (float(metrics[name]) for name in ("loss", "grad_norm", "skipped"))
        run.steps.append(Taken(secs, loss, norm, bool(skipped)))
        run.most_bytes = most_memory() if jax.default_backend() != "cpu" else None
        step = f"step {number}/{run.settings.train.steps}  {in_secs(secs)}  loss {loss:.4f}  gnorm {norm:.3g}"
        note(step + "  skipped" * bool(skipped))


def counting_batch(settings: Settings, step: TrainStep) -> dict[str, Any]:
    """A batch of tokens that count up and start again: next tokens are predictable, and no corpus is needed."""
    data, sharding = settings.data, step.model.batch_sharding
    shape = data.global_batch, data.seq
    rows, columns = own_part(sharding, shape)
    ids = (rows[:, None] * data.seq + np.arange(data.seq + 1)) % min(settings.model.vocab, LARGEST_ID)
    batch = {name: array[:, columns.start : columns.stop] for name, array in as_batch(ids.astype(np.int32)).items()}
    return put_on(sharding, shape)(batch)


# ---- what is compared

# Differences between measurement and plan that are worth a warning: those between analytic and compiled plans
# (docs/plan.md). Simulated devices have no plan.
MEMORY_WITHIN, TIME_WITHIN = 0.1, 0.2
LOSS_WITHIN = 0.1  # share of ln(vocab), for the loss before any learning
UNEVEN = 1.5  # slowest step over the median
in_secs = "{:.3g} s".format


def compared(run: FirstRun) -> Iterator[str]:
    """A table of plan, compiler's figures and measurement."""
    planned, made, secs = run.plan, run.made, run.median_secs
    memory = run.planned_bytes, made and made.peak_bytes, run.most_bytes
    times = planned and planned.secs, made and made.time and made.time.total_secs, secs
    mfu = planned and secs and planned.mfu * planned.secs / secs
    of_memory = of_planned_memory(run), ratio(memory[2], memory[1])
    rows = [
        ["memory of a device", *cells(in_bytes, *memory), *cells(percent, *of_memory)],
        ["time of a step", *cells(in_secs, *times), *cells(percent, ratio(secs, times[0]), ratio(secs, times[1]))],
        ["MFU", *cells(percent, planned and planned.mfu), "", *cells(percent, mfu), "", ""],
        ["compilation", "", "", *cells(in_secs, run.compile_secs), "", ""],
    ]
    head = ["", "planned", "compiled", "measured", "measured\n/ planned", "measured\n/ compiled"]
    yield from text_table(head, rows, left=1)


def cells(text_of: Callable[[float], str], *figures: float | None) -> list[str]:
    """The cells of figures; those of None say that it is not known."""
    return ["not known" if figure is None else text_of(figure) for figure in figures]


def ratio(measured: float | None, planned: float | None) -> float | None:
    return measured / planned if measured and planned else None


def of_planned_memory(run: FirstRun) -> float | None:
    """The measured memory over the planned one; where none is measured, the compiler's."""
    return ratio(run.most_bytes or (run.made and run.made.peak_bytes), run.planned_bytes)


def warnings(run: FirstRun) -> Iterator[str]:
    """Observations that readers of the file should see first."""
    steps, secs = run.steps, run.median_secs
    odd = [str(number) for number, taken in enumerate(steps, 1) if not math.isfinite(taken.loss + taken.grad_norm)]
    if odd:
        yield f"loss or gradient is not finite in step {', '.join(odd)}"
    losses, uniform = [taken.loss for taken in steps], math.log(run.settings.model.vocab)
    if steps and not abs(losses[0] / uniform - 1) < LOSS_WITHIN:
        yield f"the first loss is {losses[0]:.3f}; a model that has learned nothing is near ln(vocab) = {uniform:.3f}"
    if len(steps) > 1 and not losses[-1] < losses[0]:
        yield f"the loss does not fall: {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last"
    if skipped := sum(taken.skipped for taken in steps):
        yield f"the guard skipped {skipped} of {len(steps)} steps"
    of_time = ratio(secs, run.plan and run.plan.secs)
    limits = ("memory", of_planned_memory(run), MEMORY_WITHIN), ("the time of a step", of_time, TIME_WITHIN)
    for what, share, limit in () if run.topology and run.topology.shared else limits:
        if share and abs(share - 1) > limit:
            yield f"{what} is {percent(share)} of what was planned: further off than {percent(limit)}"
    slowest = max((taken.secs for taken in steps[WARM_UP:]), default=0.0)
    if secs and slowest > UNEVEN * secs:
        yield f"the slowest step takes {slowest / secs:.1f} times the median"
    if run.unplanned:
        yield f"no time was planned: {run.unplanned}"


# ---- the machine, without names of hosts, users or folders

# What JAX does not say of itself: other packages, if installed, and the environment's settings of libraries below it.
OTHER_PACKAGES = (
    *("flax", "optax", "orbax-checkpoint", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
SETTINGS = ("LIBTPU_INIT_ARGS", "NCCL_", "CUDA_DEVICE_")
# Addresses of private networks, or with a port: versions may have four numbers, too.
ADDRESS = re.compile(r"\b(?:\d{1,3}(?:\.\d{1,3}){3}:\d+|(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3})\b")
SHORTEST_NAME = 4  # characters; a shorter host name would match parts of words


def machine() -> list[str]:
    """What JAX says of itself, the devices and the environment, and what it leaves out of the devices."""
    (memory,) = cells(in_bytes, device_memory())
    environment, *_ = jax.print_environment_info(return_string=True).split("| Processes")  # which may be other users'
    return [
        environment.strip(),
        f"topology: {topology()}",
        f"memory of a device: {memory}",
        f"backend: {' '.join(get_backend().platform_version.split())}",
    ]


def topology() -> str:
    """Extents of the torus and the number of slices, if devices have coordinates.

    >>> topology()
    'none: devices say no coordinates'
    """
    places = [device.coords for device in jax.devices() if getattr(device, "coords", None) is not None]
    slices = len({getattr(device, "slice_index", 0) for device in jax.devices()})
    extents = "x".join(str(max(dim) - min(dim) + 1) for dim in zip(*places))
    return f"{extents}, {slices} slice{'s' * (slices > 1)}" if places else "none: devices say no coordinates"


def software() -> list[str]:
    """Versions of the packages, and the environment's settings of libraries."""
    there = {"parallax": code_version(), "jax": version_of("jax")} | {name: version_of(name) for name in OTHER_PACKAGES}
    flags = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
    return [f"{name}: {value}" for name, value in (there | flags).items() if value != "not installed"]


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
    try:
        user = re.escape(getpass.getuser())
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    return re.sub(rf"(?<=/){user}(?=/|\b)|\b{user}(?=@)", "<user>", text)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
