"""Try Parallax on this machine's devices: run a few steps, compare them with the plan, and write a file for an issue.

python -m parallax.firstrun
python -m parallax.firstrun --config=configs/llama_1b_16.py --config.mesh.dp=-1 --steps=20 --out=first-run.md
"""

import dataclasses
import getpass
import json
import math
import os
import platform
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parallax.display.progress import clear_progress, loading, waiting

with loading(__name__, sys.stderr):
    import jax
    import numpy as np
    from jax.extend.backend import get_backend

    from parallax.analysis.compiled.program import bytes_together, device_peak, read_step
    from parallax.analysis.planned.devices import device_memory, local_topology, most_memory
    from parallax.analysis.planned.plan import plan_heading
    from parallax.analysis.planned.step_time import Estimate, predict, step_time
    from parallax.analysis.planned.topology import Topology
    from parallax.analysis.traced.flops import flops_per_token, mfu
    from parallax.analysis.traced.memory import predicted_memory
    from parallax.analysis.traced.trace import abstract_mesh
    from parallax.cli.arguments import write_output
    from parallax.cli.command import CONFIGS, Flag, read_command, read_line, run_command, written
    from parallax.config.settings import Settings, read_settings
    from parallax.data import as_batch
    from parallax.display.tables import markdown_table
    from parallax.display.units import in_bytes, percent
    from parallax.errors import ConfigError, ParallaxError, check_whole, tell
    from parallax.hardware.devices import start_devices
    from parallax.processes.address import ADDRESS_FLAGS, read_address
    from parallax.processes.job import connect_devices, is_first, join, leave, limited, reporting, set_phase, several
    from parallax.sharding.compiler import compiler_options
    from parallax.sharding.mesh import make_mesh
    from parallax.step.batches import own_part, put_on
    from parallax.step.resolve import Devices, resolve
    from parallax.step.step import TrainState, TrainStep, model_of, step_of
    from parallax.version import code_version, version_of, versions

WARM_UP = 2  # steps that are excluded from times
USAGE = "python -m parallax.firstrun [--config=FILE] [--config.SECTION.KEY=VALUE ...] [--steps=12] [--out=FILE]"
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
    line, words = read_line(argv, FLAGS, config=CONFIGS / "base.py"), argv[1:]
    steps, out = line.values["steps"], line.values["out"]
    check_whole("--steps", steps, least=WARM_UP + 1)
    settings = read_settings(line.config)
    join(read_address(line.values), settings.distributed, simulate=settings.mesh.simulate)
    machine = {"Versions": software(), "Flags": flags()}
    try:
        machine = {"Devices": devices(), **machine}
    except RuntimeError as error:  # a missing driver, or chips that another process uses
        text = document("First run: JAX has no devices", [f"`{command(words)}`", *block(str(error))], machine)
        write_output("out", out, nameless(text))
        raise PhaseError(f"JAX has no devices: {str(error).splitlines()[0]}; {out} says more") from error
    if not written(argv, "config"):
        words = [*choose([word for word in words if word.startswith(("--config.", "-config."))]), *words]
        line = read_line([argv[0], *words], FLAGS)
    run = Found(shortened(read_settings(line.config), steps), command(words))
    say(f"{machine['Devices']['devices']}; {run.command}")

    def save() -> None:
        if is_first():
            write_output("out", out, nameless(page(run, machine)))

    save()
    with limited(run.settings.distributed):
        do_phases(run, save)
    for warning in warnings(run):
        say(f"warning: {warning}")
    say(f"results are in {out}, without names of host, user and home; attach it to an issue")
    for name, phase in run.phases.items():
        if phase.error:
            raise PhaseError(f"{name} failed: {phase.error.splitlines()[0]}")


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
        except ParallaxError as error:
            say(f"{name} is passed over: {error}")
            continue
        if available is None or needed <= MEMORY_SHARE * available:
            return words
        say(f"{name} is passed over: it needs {in_bytes(needed)} on each device, which has {in_bytes(available)}")
    return [f"--config={CONFIGS / SMALLEST}.py", f"--config.data.global_batch={4 * jax.device_count()}"]


def planned_memory(settings: Settings) -> int:
    """Planned bytes on each device for settings on these devices; ParallaxError if they do not fit the mesh."""
    model = model_of(settings, abstract_mesh(settings.mesh.sizes, simulated=jax.default_backend() == "cpu"))
    model.check_batch(settings.data.global_batch, settings.data.seq)
    return predicted_memory(model, settings).peak


# ---- the phases; results of a phase are kept if a later one fails

LARGEST_ID = 251  # of tokens that count up and start again, which a model learns in a few steps
ERROR_LINES = 12  # most lines of an error in the file


class Taken(NamedTuple):
    """A measured step, from its start to the end of its computation."""

    secs: float
    loss: float
    grad_norm: float
    skipped: bool


class Phase(NamedTuple):
    """The state of a phase: "done", "failed", "running" or "not reached"."""

    state: str
    secs: float = 0.0
    error: str = ""


@dataclasses.dataclass
class Found:
    """All results so far; missing ones are None. Bytes are those of a device, seconds those of a step."""

    settings: Settings
    command: str
    phases: dict[str, Phase] = dataclasses.field(default_factory=dict)
    planned_bytes: int | None = None
    topology: Topology | None = None
    unplanned: str = ""  # why no time was planned
    planned: Estimate | None = None
    step: TrainStep | None = None
    program: Any = None
    compile_secs: float | None = None
    compiled_bytes: int | None = None
    compiled_step_secs: float | None = None  # from the compiler's cycles, on GPUs from a roofline
    step_flops: float | None = None  # model FLOPs on all devices
    state: TrainState | None = None
    steps: list[Taken] = dataclasses.field(default_factory=list)
    most_bytes: int | None = None

    @property
    def median_secs(self) -> float | None:
        """Median time of the steps after the warm-up."""
        counted = [taken.secs for taken in self.steps[WARM_UP:]]
        return statistics.median(counted) if counted else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what the devices could compute in the median step."""
        if self.topology is None or self.median_secs is None or self.step_flops is None:
            return None
        peak = self.topology.chip.peak(self.settings.model.dtype) * self.topology.devices
        return mfu(self.step_flops, self.median_secs, peak)


def do_phases(run: Found, save: Callable[[], None]) -> None:
    """Run all phases until one fails; a step that could not be planned can still be measured.

    `save` is called before and after each, so that nothing is lost with the process.
    """
    acts = {
        "plan": make_plan,
        "compile": compile_step,
        "first state": make_state,
        "first step": lambda run: take_steps(run, 1),
        "steps": lambda run: take_steps(run, run.settings.train.steps),
    }
    run.phases = dict.fromkeys(acts, Phase("not reached"))
    for name, act_of_phase in acts.items():
        say(f"{name} …")
        run.phases[name] = Phase("running")
        save()
        set_phase(f"{name} of the first run", compiling=True)
        begun, error = time.perf_counter(), ""
        with waiting(f"first run, {name}"):
            try:
                act_of_phase(run)
            except Exception as raised:  # any error belongs into the file
                error = "\n".join(f"{type(raised).__name__}: {raised}".splitlines()[:ERROR_LINES])
        run.phases[name] = ended = Phase("failed" if error else "done", time.perf_counter() - begun, error)
        run.most_bytes = most_memory() if jax.default_backend() != "cpu" else None
        save()
        say(f"{name}: {ended.state} after {ended.secs:.1f} s{error and f': {error.splitlines()[0]}'}")
        if error and name != "plan":
            return


def make_plan(run: Found) -> None:
    """Plan the memory and time of the step, if the speeds of chips and kernel are known."""
    run.planned_bytes = planned_memory(run.settings)
    try:
        if several() and jax.default_backend() == "cpu":  # processes would measure different numbers of times
            raise ConfigError("the speed of simulated devices is not measured with several processes")
        run.topology = local_topology(run.settings.model.dtype)
        run.planned = predict(run.settings, run.topology)
    except ConfigError as error:  # an unknown chip, or a kernel that is only interpreted here
        run.unplanned = str(error)
    say(f"planned: {in_bytes(run.planned_bytes)} on each device, {in_secs(run.planned and run.planned.secs)}")


def compile_step(run: Found) -> None:
    """Compile the step and read the compiler's memory and time."""
    settings, mesh = run.settings, make_mesh(run.settings.mesh)
    connect_devices(mesh)
    run.step, shape = step_of(settings, mesh), (settings.data.global_batch, settings.data.seq)
    run.step_flops = flops_per_token(settings.model, run.step.model.plan.declared, seq=shape[1]) * math.prod(shape)
    lowered, begun = run.step.lower(*shape), time.perf_counter()
    run.program = lowered.compile()
    run.compile_secs = time.perf_counter() - begun
    on_tpu, sizes = jax.default_backend() == "tpu", run.program.memory_analysis()
    if sizes is not None:
        # The peak of XLA for CPU excludes temporaries, and for GPU it may be missing.
        run.compiled_bytes = device_peak(sizes) if on_tpu else bytes_together(sizes)
    if jax.default_backend() != "cpu":  # the compiler for CPU estimates no cycles, and the peak of CPUs is not known
        price_program(run)


def price_program(run: Found) -> None:
    """The step's time from the compiler's cycles, on GPUs from a roofline over the program's fusions. If it cannot be
    read, a line says so; the program still runs."""
    try:
        made = read_step(run.program, run.step.model, seq=run.settings.data.seq)
        flops, dtype = run.step_flops / run.topology.devices, run.settings.model.dtype
        run.compiled_step_secs = step_time(made, run.topology.chip, flops, dtype=dtype).total_secs
    except Exception as error:
        say(f"the compiled program is not priced: {type(error).__name__}: {error}")


def make_state(run: Found) -> None:
    """Create the initial parameters and optimizer states; the first scales of 8-bit products come from a batch."""
    needs_batch = run.settings.model.first_scales_are_measured
    run.state = jax.block_until_ready(run.step.init(counting_batch(run) if needs_batch else None))


def take_steps(run: Found, last: int) -> None:
    """Run the steps up to `last`, waiting for each."""
    batch = counting_batch(run)
    while len(run.steps) < last:
        begun = time.perf_counter()
        run.state, metrics = jax.block_until_ready(run.program(run.state, batch))
        secs = time.perf_counter() - begun
        loss, norm, skipped = (float(metrics[name]) for name in ("loss", "grad_norm", "skipped"))
        run.steps.append(Taken(secs, loss, norm, bool(skipped)))
        step = f"step {len(run.steps)}/{run.settings.train.steps}"
        say(f"{step}  {in_secs(secs)}  loss {loss:.4f}  gnorm {norm:.2f}")


def counting_batch(run: Found) -> dict[str, Any]:
    """A batch of tokens that count up and start again: next tokens are predictable, and no corpus is needed."""
    data, sharding = run.settings.data, run.step.model.batch_sharding
    shape = data.global_batch, data.seq
    rows, columns = own_part(sharding, shape)
    ids = (rows[:, None] * data.seq + np.arange(data.seq + 1)) % min(run.settings.model.vocab, LARGEST_ID)
    batch = {name: array[:, columns.start : columns.stop] for name, array in as_batch(ids.astype(np.int32)).items()}
    return put_on(sharding, shape)(batch)


# ---- the file, as Markdown for an issue

# Differences between measurement and plan that are worth a warning: those between analytic and compiled plans
# (docs/plan.md). Simulated devices have no plan.
MEMORY_WITHIN, TIME_WITHIN = 0.1, 0.2
LOSS_WITHIN = 0.1  # share of ln(vocab), for the loss before any learning
UNEVEN = 1.5  # slowest step over the median


def page(run: Found, machine: Mapping[str, Mapping[str, str]]) -> str:
    """The whole file; `machine` is sections of names and values."""
    failed = [name for name, phase in run.phases.items() if phase.state in ("failed", "running")]
    verdict = f"**Failed or interrupted: {', '.join(failed)}.**" if failed else "All phases are done."
    phases = [[name, phase.state, f"{phase.secs:.1f} s"] for name, phase in run.phases.items()]
    errors = (line for phase in run.phases.values() if phase.error for line in block(phase.error))
    options = run.step and compiler_options(run.step.model.mesh, run.settings.model.matmul)
    parts = {
        "Planned and measured": compared(run),
        "Phases": [*markdown_table(["phase", "", "time"], phases), *errors],
        "Steps": markdown_table(["step", "time", "loss", "gradient norm", "skipped"], step_cells(run.steps)),
        "Warnings": [f"- {line}" for line in warnings(run)] or ["None."],
        **machine,
        **({"Compiler options of Parallax": options} if options else {}),
        "Config": ["```json", json.dumps(run.settings.to_dict(), indent=1), "```"],
    }
    intro = f"`{run.command}`, {time.strftime('%Y-%m-%d')}. {verdict}"
    return document(f"First run on {machine['Devices']['devices']}", [intro], parts)


def document(title: str, intro: Sequence[str], parts: Mapping[str, Iterable[str] | Mapping[str, Any]]) -> str:
    """A title, an introduction, and sections by title; one of names and values is a table."""
    lines = [f"# {title}", "", *intro]
    for heading, body in parts.items():
        if isinstance(body, Mapping):
            body = markdown_table(["", ""], ((name, str(value)) for name, value in body.items()))
        lines += ["", f"## {heading}", "", *body]
    return "\n".join([*lines, ""])


def block(text: str) -> list[str]:
    """A paragraph with the text as it is."""
    return ["", "```", text, "```"]


def compared(run: Found) -> Iterator[str]:
    """A table of plan, compiler's figures and measurement."""
    planned, secs = run.planned, run.median_secs
    memory = run.planned_bytes, run.compiled_bytes, run.most_bytes
    times = planned and planned.secs, run.compiled_step_secs, secs
    shares = ratio(run.most_bytes or run.compiled_bytes, run.planned_bytes), ratio(memory[2], memory[1])
    shown = (UNKNOWN if share is None else percent(share) for share in (planned and planned.mfu, run.mfu))
    rows = [
        ["memory of a device", *(UNKNOWN if size is None else in_bytes(size) for size in memory), *shares],
        ["time of a step", *map(in_secs, times), ratio(secs, times[0]), ratio(secs, times[1])],
        ["MFU", next(shown), "", next(shown), "", ""],
        ["compilation", "", "", in_secs(run.compile_secs), "", ""],
    ]
    head = ["", "planned", "compiled", "measured", "measured / planned", "measured / compiled"]
    yield from markdown_table(head, rows)
    yield ""
    yield (
        f"The measured time is the median after {WARM_UP} steps, each waited for. A device's measured memory is the "
        "allocator's peak on process 0's devices if the backend reports it; else the first ratio is the compiler's."
    )
    if run.unplanned:
        yield f"No time was planned: {run.unplanned}"
    if run.topology is not None:
        yield from block(plan_heading("the step", run.settings, run.topology))


def step_cells(steps: Sequence[Taken]) -> Iterator[list[str]]:
    """The cells of each step."""
    for number, (secs, loss, grad_norm, skipped) in enumerate(steps, 1):
        yield [str(number), in_secs(secs), f"{loss:.4f}", f"{grad_norm:.3g}", "yes" * skipped]


def warnings(run: Found) -> Iterator[str]:
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
    if run.topology is None or not run.topology.shared:
        if memory := ratio(run.most_bytes or run.compiled_bytes, run.planned_bytes, beyond=MEMORY_WITHIN):
            yield f"memory is {memory} of what was planned: further off than {percent(MEMORY_WITHIN)}"
        if time_share := ratio(secs, run.planned and run.planned.secs, beyond=TIME_WITHIN):
            yield f"a step takes {time_share} of the planned time: further off than {percent(TIME_WITHIN)}"
    slowest = max((taken.secs for taken in steps[WARM_UP:]), default=0.0)
    if secs and slowest > UNEVEN * secs:
        yield f"the slowest step takes {slowest / secs:.1f} times the median"
    if run.unplanned:
        yield f"no time was planned: {run.unplanned}"


UNKNOWN = "not known"


def in_secs(secs: float | None) -> str:
    """A step's time.

    >>> in_secs(0.01234), in_secs(None)
    ('0.0123 s', 'not known')
    """
    return UNKNOWN if secs is None else f"{secs:.3g} s"


def ratio(measured: float | None, planned: float | None, *, beyond: float = 0.0) -> str:
    """The ratio of two numbers; "" if one is not known, or if it is no further from 1 than `beyond`.

    >>> ratio(1.1, 1.0), ratio(1.1, 1.0, beyond=0.2), ratio(None, 1.0)
    ('110.0 %', '', '')
    """
    if not measured or not planned or (beyond and abs(measured / planned - 1) <= beyond):
        return ""
    return percent(measured / planned)


# ---- the machine, without names of hosts, users or folders

# Packages that drive the devices, if installed.
DRIVERS = (
    *("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
SETTINGS = ("XLA_", "LIBTPU_INIT_ARGS", "NCCL_", "CUDA_DEVICE_", "JAX_PLATFORMS", "JAX_DEFAULT_MATMUL_PRECISION")
# Addresses of private networks, or with a port: versions may have four numbers, too.
ADDRESS = re.compile(r"\b(?:\d{1,3}(?:\.\d{1,3}){3}:\d+|(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3})\b")
SHORTEST_NAME = 4  # characters; a shorter host name would match parts of words


def devices() -> dict[str, str]:
    """The devices: number, kind, topology and memory."""
    first, here = start_devices()[0], jax.local_devices()
    held = device_memory()
    return {
        "devices": f"{jax.device_count()} x {first.device_kind} ({first.platform})",
        "processes": f"{jax.process_count()}, {len(here)} devices in each",
        "topology": topology(),
        "memory of a device": "not said by the backend" if held is None else in_bytes(held),
        "backend": " ".join(get_backend().platform_version.split()),
    }


def topology() -> str:
    """Extents of the torus and the number of slices, if devices have coordinates.

    >>> topology()
    'none: devices say no coordinates'
    """
    places = [device.coords for device in jax.devices() if getattr(device, "coords", None) is not None]
    slices = len({getattr(device, "slice_index", 0) for device in jax.devices()})
    extents = "x".join(str(max(dim) - min(dim) + 1) for dim in zip(*places))
    return f"{extents}, {slices} slice{'s' * (slices > 1)}" if places else "none: devices say no coordinates"


def software() -> dict[str, str]:
    """Versions of Python, the packages and the driver."""
    drivers = {name: version for name in DRIVERS if (version := version_of(name)) != "not installed"}
    there = {"parallax": code_version(), "python": platform.python_version(), **versions(), **drivers}
    there["system"] = platform.system()
    if NVIDIA_DRIVER.is_file():
        there["driver"] = NVIDIA_DRIVER.read_text(encoding="utf-8").splitlines()[0]
    return there


def flags() -> dict[str, str]:
    """The environment's settings of XLA, NCCL and JAX."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}


def nameless(text: str) -> str:
    """The text without names of this machine's host, user and folders, and without addresses.

    >>> nameless(f"{Path.home()}/corpus, 10.0.0.2:8476")
    '~/corpus, <address>'
    """
    for folder, instead in ((Path.cwd(), "."), (Path(sys.prefix), "<python>"), (Path.home(), "~")):
        if folder != Path(folder.anchor):
            text = text.replace(str(folder), instead)
    text = ADDRESS.sub("<address>", text)
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
