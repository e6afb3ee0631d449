"""Time of traced steps by module, collective and idle time, from a trace of JAX's profiler.

JAX's `ProfileData` reads the file. Written here is which module or collective an event belongs to: that takes the
compiled and the traced program.
"""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.profiler import ProfileData

from parallax.analysis.compiled.hlo import COLLECTIVES, Instruction, axes_of, groups_of, parse_hlo
from parallax.analysis.compiled.program import GEMM, NO_COMPUTE, PRODUCT, SCALED_DOT, module_of
from parallax.display.plain import as_plain
from parallax.display.tables import LEAST_SHOWN, TEXT_WIDTH, text_table, wrapped
from parallax.display.units import percent
from parallax.errors import DataError, errors_as
from parallax.storage.files import files_below, names_in, read_bytes, read_object, time_of
from parallax.storage.run_files import PROGRAM, TRACE_ENDING, TRACED, TRACED_STEPS, RunFiles

XPLANE = f".xplane{TRACE_ENDING}"
TRACED_FOLDER = re.compile(r"steps-(\d+)-\d+")
MOST_TRACE_BYTES = 1 << 31  # of a protocol buffer
STEP = "train"  # the span of a step's dispatch, which holds the step's number
CONTROL = tuple(kind for kind in NO_COMPUTE if kind not in COLLECTIVES)
DEVICE_PLANE = re.compile(r"/device:\w+:(\d+)")
# Names of collectives in NVIDIA's library and in programs whose text is missing.
NAMED = {"allgather": "all-gather", "allreduce": "all-reduce", "reducescatter": "reduce-scatter"}
NAMED |= {"alltoall": "all-to-all", "sendrecv": "permute", "collectivepermute": "permute", "ppermute": "permute"}
NAMED |= {"psum": "all-reduce"}
OTHERS = "other programs"
# XLA for GPU launches many kernels at once, as a CUDA graph, and a trace then has the graph's name for each of them.
COMMAND_BUFFER, IN_GRAPHS = "command_buffer", "kernels in CUDA graphs"
NO_GRAPHS = "XLA_FLAGS=--xla_gpu_enable_command_buffer="


class About(NamedTuple):
    """Description of an operation: its part of the model or, for a collective, kind and axes; whether it is a
    collective, and whether it is a product."""

    module: str
    collective: bool
    product: bool


class Operation(NamedTuple):
    """An operation on a device, from `start` to `end` in seconds; on GPUs the name of its kernel, without numbers."""

    start: float
    end: float
    about: About
    kernel: str = ""


class Trace(NamedTuple):
    """Operations of each device, by its number, in the traced steps; times go from 0 to `secs`, the wall time."""

    name: str
    devices: dict[int, list[Operation]]
    secs: float
    steps: tuple[int, ...]
    mesh: dict[str, int]
    order: tuple[int, ...]  # devices as the mesh lists them
    kind: str


class Traced(NamedTuple):
    """A program in a trace: its name, and its operations by name (None for those that only contain others)."""

    name: str
    known: dict[str, About | None]

    @staticmethod
    def of(text: str, mesh: dict[str, int]) -> "Traced":
        """Read its text; if it is empty, there are no operations."""
        program = parse_hlo(text)
        instructions = [op for home in program.computations.values() for op in home.instructions]
        head = re.match(r"HloModule ([^\s,]+)", text)
        known = {op.name: _described(op, mesh) for op in instructions}
        return Traced(head[1] if head else "", known)


def _described(op: Instruction, mesh: dict[str, int]) -> About | None:
    kind = op.kind.removesuffix("-start").removesuffix("-done").removesuffix("-update")
    if kind in CONTROL:
        return None
    if kind == "async":
        return _guessed(op.name)
    if kind not in COLLECTIVES:
        product = op.op_name.endswith(PRODUCT) or op.kind in ("dot", "convolution")
        product |= op.name.startswith("gemm_fusion") or op.target.startswith((GEMM, SCALED_DOT))
        return About(module_of(op.op_name), False, product)
    shown = "permute" if kind == "collective-permute" else kind
    if mesh and not op.kind.endswith(("-done", "-update")):
        groups = groups_of(op.rest, math.prod(mesh.values()))
        shown += f" over {', '.join(axes_of(groups, mesh)) or 'no axis'}"
    return About(shown, True, False)


def read_traces(path: Path) -> Trace:
    """The newest trace in a run's folder, or in a folder or file of the profiler; processes are merged.

    Raises:
        DataError: there is no trace, or it has no operations of a device.
    """
    files = trace_files(path)
    traces = [_read(file, home) for file, home in files.items()]
    devices = {number: ran for trace in traces for number, ran in trace.devices.items()}
    if not devices:
        first = next(iter(files))
        raise DataError(f"{first} has no operations of a device; trace steps with train.profile_steps=FIRST:LAST")
    return traces[0]._replace(devices=dict(sorted(devices.items())), secs=max(trace.secs for trace in traces))


def trace_files(path: Path) -> dict[Path, Path | None]:
    """The profiler's file of each process for the newest trace below `path`, each with the folder of the process that
    wrote it, with the files beside it; DataError if there is none."""
    if path.name.endswith(XPLANE) and path.is_file():
        return {path: _home(path)}
    profile = RunFiles(path).profile
    folders = {profile / name: int(match[1]) for name in names_in(profile) if (match := TRACED_FOLDER.fullmatch(name))}
    # A bucket tells no times.
    newest = max(folders, key=lambda folder: (time_of(folder), folders[folder]), default=path)
    traces = [file for file in files_below(newest) if file.name.endswith(XPLANE)] if newest.is_dir() else []
    if not traces:
        raise DataError(
            f"--trace={path} holds no trace: there is no *{XPLANE} below it; train with "
            "--config.train.profile_steps=FIRST:LAST"
        )
    homes = {file: _home(file) for file in sorted(traces, key=time_of)}
    of_process = {home: file for file, home in homes.items() if home}
    return {file: home for home, file in sorted(of_process.items())} or {traces[-1]: None}


def _home(file: Path) -> Path | None:
    return next((folder for folder in file.parents if (folder / TRACED).is_file()), None)


def _read(file: Path, home: Path | None) -> Trace:
    about, text = {}, ""
    if home:
        with errors_as(DataError, f"{home / TRACED}, or {PROGRAM} beside it, cannot be read: ", "", ValueError):
            about = read_object(home / TRACED)
            text = read_bytes(home / PROGRAM).decode("utf-8", "replace") if (home / PROGRAM).is_file() else ""
    mesh = about.get("mesh", {})
    try:
        data = ProfileData.from_serialized_xspace(read_bytes(file, MOST_TRACE_BYTES))
        planes = list(data.planes)
    except Exception as error:  # the library raises its own
        raise DataError(f"{file} is not a trace: {str(error).splitlines()[0]}") from error
    program, devices, local = Traced.of(text, mesh), {}, about.get("local", [])
    for plane in planes:
        for number, ran in _ran(plane, program):
            # Some backends count the devices of a process from 0.
            device = number if number in local or number >= len(local) else local[number]
            devices.setdefault(device, []).append(ran)
    (begin, end), steps = _span(planes, devices)
    # Each process has its own clock: times of a device are relative to the span of its process.
    inside = {
        number: [
            op._replace(start=op.start - begin, end=op.end - begin) for op in ran if op.end > begin and op.start < end
        ]
        for number, ran in devices.items()
    }
    return Trace(
        name=about.get("run", file.stem.removesuffix(".xplane")),
        devices=inside,
        secs=end - begin,
        steps=steps,
        mesh=mesh,
        order=tuple(about.get("devices", sorted(devices))),
        kind=about.get("kind", ""),
    )


def _ran(plane: Any, program: Traced) -> Iterator[tuple[int, Operation]]:
    """Operations with the number of their device. On CPUs each thread's line names the device of its operations. Each
    GPU or TPU has a plane; on GPUs it has a line for each stream."""
    device = DEVICE_PLANE.match(plane.name)
    if device is None and plane.name != "/host:CPU":
        return
    lines = list(plane.lines)
    streams = [line for line in lines if device is not None and line.name.startswith("Stream")]
    if device is not None:
        lines = streams or [line for line in lines if line.name.endswith("XLA Ops")]
    for line in lines:
        for event in line.events:
            stats = dict(event.stats)
            if device is None and ("hlo_op" not in stats or event.name.startswith(("end: ", "ThreadpoolListener"))):
                continue
            about = _of(event.name, stats, program)
            if about is not None:
                start = event.start_ns / 1e9
                number = int(device[1]) if device else int(stats.get("device_ordinal", 0))
                kernel = re.sub(r"(_\d+)+$", "", event.name) if streams else ""
                yield number, Operation(start, start + event.duration_ns / 1e9, about, kernel)


def _of(name: str, stats: dict[str, Any], program: Traced) -> About | None:
    written = re.match(r"%([\w.\-]+) =", name)  # on TPUs the name of an operation is its whole line
    op = str(stats.get("hlo_op") or (written[1] if written else name))
    module = str(stats.get("hlo_module", ""))
    if program.name and module and program.name not in module:
        return About(f"{OTHERS}: {module}", False, False)
    if op.startswith(COMMAND_BUFFER):
        return About(IN_GRAPHS, False, False)
    return program.known[op] if op in program.known else _guessed(op)


def _span(planes: list[Any], devices: dict[int, list[Operation]]) -> tuple[tuple[float, float], tuple[int, ...]]:
    """Start and end of the traced steps, and the steps' numbers."""
    span, steps = None, set()
    for plane in planes:
        if plane.name != "/host:CPU":
            continue
        for line in plane.lines:
            for event in line.events:
                if event.name == TRACED_STEPS:
                    span = event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9
                elif event.name == STEP:
                    steps.update(int(value) for name, value in event.stats if name == "step_num")
    if span is None:  # not written by a run of Parallax
        ran = [op for operations in devices.values() for op in operations]
        span = min((op.start for op in ran), default=0.0), max((op.end for op in ran), default=0.0)
    return span, tuple(sorted(steps))


def _guessed(op: str) -> About | None:
    """A description from an operation's name alone."""
    plain = re.sub(r"[^a-z]", "", op.lower())
    for name, kind in NAMED.items():
        if name in plain:
            return About(kind, True, False)
    stem = re.sub(r"[._\d]+$", "", op)
    if stem in CONTROL:
        return None
    return About(stem or op, False, "gemm" in plain or stem in ("dot", "convolution"))


class PartTime(NamedTuple):
    """Seconds of an average device in all traced steps. `hidden` is the time of a collective during which the device
    computed; it is counted in compute. `calls` are those of an average device, too."""

    name: str
    secs: float
    hidden: float
    products: float
    calls: float


class KernelTime(NamedTuple):
    """Seconds of a GPU's kernels of one name, on an average device in all traced steps; those that run at once count
    each. `calls` are those of an average device, too."""

    name: str
    secs: float
    calls: float


class DeviceTime(NamedTuple):
    """Seconds of one device: `compute`, `exposed` collectives, `idle`; their sum is the wall time."""

    device: int
    place: str
    compute: float
    exposed: float
    idle: float


@dataclasses.dataclass(frozen=True, repr=False)
class StepProfile:
    """The time of traced steps; it prints as text."""

    name: str
    steps: tuple[int, ...]
    secs: float
    kind: str
    mesh: dict[str, int]
    modules: tuple[PartTime, ...]
    collectives: tuple[PartTime, ...]
    idle: float
    devices: tuple[DeviceTime, ...]
    kernels: tuple[KernelTime, ...]

    def to_json(self) -> str:
        """The whole profile as JSON."""
        return json.dumps(as_plain(self), indent=2)

    def __repr__(self) -> str:
        sections = [_heading(self), _parts(self), *([_kernels(self)] if self.kernels else []), _devices(self)]
        return "\n\n".join("\n".join(wrapped(section)) for section in sections)


def add_up(ran: list[Operation], wall_secs: float) -> Counter:
    """Seconds of one device by purpose and module: "compute" and the "products" in it, "exposed" and "hidden"
    collectives, "idle"; and the "calls". Each moment is divided equally among the operations that compute then. If none
    computes, it counts for collectives; if nothing runs, it is idle."""
    spent = Counter(("calls", op.about.module) for op in ran)
    now, running = 0.0, set()
    # Starts come before ends at the same moment, so that an operation of zero length starts before it ends.
    edges = [(time, ends, index) for index, op in enumerate(ran) for time, ends in ((op.start, False), (op.end, True))]
    for time, ends, index in [*sorted(edges), (wall_secs, True, None)]:
        until = min(max(time, now), wall_secs)
        secs, now = until - now, until
        computing = [ran[number].about for number in running if not ran[number].about.collective]
        sending = [ran[number].about for number in running if ran[number].about.collective]
        for about in computing if secs else ():
            spent["compute", about.module] += secs / len(computing)
            spent["products", about.module] += secs / len(computing) * about.product
        for about in sending if secs else ():
            spent["hidden" if computing else "exposed", about.module] += secs / len(sending)
        spent["idle", ""] += secs * (not running)
        running = running - {index} if ends else running | {index}
    return spent


def profile_steps(trace: Trace) -> StepProfile:
    """The profile of a trace: an average device, and each device."""
    by_device = {number: add_up(ran, trace.secs) for number, ran in trace.devices.items()}
    mean: Counter = Counter()
    for spent in by_device.values():
        mean.update({key: value / len(by_device) for key, value in spent.items()})

    def parts(purpose: str, *others: str) -> list[PartTime]:
        names = dict.fromkeys(name for what, name in mean if what in (purpose, *others))
        figures = (purpose, "hidden", "products", "calls")
        return [PartTime(name, *(float(mean[what, name]) for what in figures)) for name in names]

    def total(spent: Counter, purpose: str) -> float:
        return sum(secs for (what, _), secs in spent.items() if what == purpose)

    return StepProfile(
        name=trace.name,
        steps=trace.steps,
        secs=trace.secs,
        kind=trace.kind,
        mesh=trace.mesh,
        modules=tuple(sorted(parts("compute"), key=lambda part: -part.secs)),
        collectives=tuple(sorted(parts("exposed", "hidden"), key=lambda part: -part.secs - part.hidden)),
        idle=mean["idle", ""],
        devices=tuple(
            DeviceTime(number, _place(trace, number), *(total(spent, what) for what in ("compute", "exposed", "idle")))
            for number, spent in by_device.items()
        ),
        kernels=tuple(sorted(kernel_times(trace), key=lambda kernel: -kernel.secs)),
    )


def kernel_times(trace: Trace) -> list[KernelTime]:
    """The time of each kernel of GPUs by name; none on other devices."""
    secs, calls = Counter(), Counter()
    for op in (op for ran in trace.devices.values() for op in ran if op.kernel):
        secs[op.kernel] += op.end - op.start
        calls[op.kernel] += 1
    count = len(trace.devices)
    return [KernelTime(name, total / count, calls[name] / count) for name, total in secs.items()]


def _place(trace: Trace, number: int) -> str:
    """Mesh coordinates of a device, as "pp=0 dp=1 tp=0"."""
    if number not in trace.order or not trace.mesh:
        return ""
    ranks = np.unravel_index(trace.order.index(number), tuple(trace.mesh.values()))
    return " ".join(f"{axis}={rank}" for axis, rank in zip(trace.mesh, ranks, strict=True))


SHOWN_DEVICES, SHOWN_KERNELS = 16, 24


def _heading(profile: StepProfile) -> Iterator[str]:
    """Name, steps and mesh of the trace."""
    mesh = " ".join(f"{axis}={size}" for axis, size in profile.mesh.items())
    where = f"{len(profile.devices)} devices" + (f" ({profile.kind})" if profile.kind else "")
    steps = profile.steps
    which = (
        "unknown steps" if not steps else f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    )
    yield f"{profile.name}: {which} on {where}" + (f", {mesh}" if mesh else "")
    each = f", {_ms(profile.secs / len(steps))} a step" if steps else ""
    yield f"{_ms(profile.secs)} of wall time{each}; below, an average device in one step"


def _parts(profile: StepProfile) -> Iterator[str]:
    """Parts of the model, collectives and idle: they add up to the wall time."""
    steps, least = max(len(profile.steps), 1), LEAST_SHOWN * profile.secs
    shown = [part for part in profile.modules if part.secs >= least]
    rest = [part for part in profile.modules if 0 < part.secs < least]
    if rest:
        name = f"{len(rest)} more parts" if len(rest) > 1 else rest[0].name
        secs, calls = sum(part.secs for part in rest), sum(part.calls for part in rest)
        shown.append(PartTime(name, secs, 0.0, 0.0, calls))
    rows = [
        [*_cells(part, profile, steps), f"{_ms(part.products / steps)} in products" if part.products else ""]
        for part in shown
    ]
    for part in profile.collectives:
        rows.append([*_cells(part, profile, steps), f"{_ms(part.hidden / steps)} hidden" if part.hidden else ""])
    rows.append(["idle", "", _ms(profile.idle / steps), percent(profile.idle / profile.secs), ""])
    total = sum(part.secs for part in (*profile.modules, *profile.collectives)) + profile.idle
    rows.append(["together", "", _ms(total / steps), percent(total / profile.secs), ""])
    yield from text_table(["of a step", "calls", "time", "share", "of it"], rows, left=1, width=TEXT_WIDTH)
    yield ""
    yield "hidden: a collective runs while the device computes, and is counted there."
    if any(part.name == IN_GRAPHS for part in profile.modules):
        yield f"{IN_GRAPHS} have no names: trace with {NO_GRAPHS} in the environment."
    if profile.kind == "cpu":
        yield "Simulated devices share the machine's cores: collectives hold the wait for the others, too."


def _kernels(profile: StepProfile) -> Iterator[str]:
    """The kernels of GPUs that take longest."""
    steps = max(len(profile.steps), 1)
    rows = [
        [kernel.name, f"{kernel.calls / steps:,.0f}", _ms(kernel.secs / steps), percent(kernel.secs / profile.secs)]
        for kernel in profile.kernels[:SHOWN_KERNELS]
    ]
    yield from text_table(["kernel", "calls", "time", "share"], rows, left=1, width=TEXT_WIDTH)
    if left := profile.kernels[SHOWN_KERNELS:]:
        secs = sum(kernel.secs for kernel in left)
        yield f"and {len(left)} more, {_ms(secs / steps)} together; --json has all."


def _cells(part: PartTime, profile: StepProfile, steps: int) -> list[str]:
    return [part.name, f"{part.calls / steps:,.0f}", _ms(part.secs / steps), percent(part.secs / profile.secs)]


def _devices(profile: StepProfile) -> Iterator[str]:
    """Each device's share of compute, collectives and idle."""
    rows = [
        [str(number), place, *(percent(part / profile.secs) for part in parts)]
        for number, place, *parts in profile.devices[:SHOWN_DEVICES]
    ]
    yield from text_table(["device", "place", "compute", "exposed collectives", "idle"], rows, left=2, width=TEXT_WIDTH)
    if len(profile.devices) > SHOWN_DEVICES:
        yield f"and {len(profile.devices) - SHOWN_DEVICES} more devices; --json has all."


def _ms(secs: float) -> str:
    return f"{1e3 * secs:,.2f} ms"
