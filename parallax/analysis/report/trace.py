"""A trace that JAX's profiler wrote, read: which operation ran when on which device, and in which part of the model."""

import math
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from parallax.analysis.report.cycles import NO_COMPUTE, PRODUCT, module_of
from parallax.analysis.report.groups import axes_of, groups_of
from parallax.analysis.report.hlo import COLLECTIVES, Instruction, parse
from parallax.runtime.errors import DataError
from parallax.runtime.files import read_object
from parallax.runtime.run_files import PROGRAM, TRACED, TRACED_STEPS, RunFiles

XPLANE = "*.xplane.pb"
STEP = "train"  # the span of a step's dispatch, which has its number
CONTROL = tuple(kind for kind in NO_COMPUTE if kind not in COLLECTIVES)
DEVICE = re.compile(r"/device:\w+:(\d+)")
# How NVIDIA's library and the operations of a program without its text call what they send.
NAMED = {"allgather": "all-gather", "allreduce": "all-reduce", "reducescatter": "reduce-scatter"}
NAMED |= {"alltoall": "all-to-all", "sendrecv": "permute", "collectivepermute": "permute", "ppermute": "permute"}
NAMED |= {"psum": "all-reduce"}
OTHERS = "other programs"


class Ran(NamedTuple):
    """An operation on a device, from `start` to `end` in seconds; `module` is the part of the model that it belongs to,
    of a collective its kind and axes. `product` is whether it multiplies matrices."""

    start: float
    end: float
    module: str
    collective: bool
    product: bool


class Trace(NamedTuple):
    """What each device did in the traced steps, by number; `span` is their wall time, in seconds on the same clock."""

    name: str
    devices: dict[int, list[Ran]]
    span: tuple[float, float]
    steps: tuple[int, ...]
    mesh: dict[str, int]
    order: tuple[int, ...]  # devices as the mesh lists them
    kind: str

    @property
    def secs(self) -> float:
        """Wall time."""
        return self.span[1] - self.span[0]


class Program:
    """A program's text, asked for its operations by name; without a text, what a name gives away."""

    def __init__(self, text: str, mesh: dict[str, int]):
        self._module = parse(text) if text else None
        self._mesh = mesh
        self._known: dict[str, tuple[str, bool, bool] | None] = {}

    @cached_property
    def name(self) -> str:
        """As a trace calls it, "" where there is no text."""
        return next((one.op_name.split("/")[0][4:-1] for one in self._instructions.values() if one.op_name), "")

    def about(self, op: str) -> tuple[str, bool, bool] | None:
        """Part of the model, whether it is a collective, whether it is a product; None of what only runs others."""
        if op not in self._known:
            one = self._instructions.get(op)
            self._known[op] = _guessed(op) if one is None else self._read(one)
        return self._known[op]

    def _read(self, one: Instruction) -> tuple[str, bool, bool] | None:
        kind = one.kind.removesuffix("-start").removesuffix("-done").removesuffix("-update")
        if kind in CONTROL:
            return None
        if kind == "async":
            return _guessed(one.name)
        if kind in COLLECTIVES:
            return self._collective(kind, one), True, False
        product = one.op_name.endswith(PRODUCT) or one.kind in ("dot", "convolution")
        return module_of(one.op_name), False, product

    def _collective(self, kind: str, one: Instruction) -> str:
        shown = "permute" if kind == "collective-permute" else kind
        if not self._mesh or one.kind.endswith(("-done", "-update")):
            return shown
        groups = groups_of(one.rest, math.prod(self._mesh.values()))
        return f"{shown} over {', '.join(axes_of(groups, self._mesh)) or 'no axis'}"

    @cached_property
    def _instructions(self) -> dict[str, Instruction]:
        if self._module is None:
            return {}
        return {one.name: one for home in self._module.computations.values() for one in home.instructions}


def read_traces(path: Path) -> Trace:
    """The newest trace in a run's folder, or that of a folder or file of the profiler; processes are put together.

    Raises:
        DataError: there is none, or it has no operation of a device.
    """
    files = trace_files(path)
    traces = [_read(file) for file in files]
    first = traces[0]
    devices = {number: ran for trace in traces for number, ran in trace.devices.items()}
    if not devices:
        raise DataError(f"{files[0]} has no operation of a device; trace steps with train.profile_steps=FIRST:LAST")
    # Each process has a clock of its own: every device is measured against the span of its process.
    moved = {
        number: [one._replace(start=one.start - trace.span[0], end=one.end - trace.span[0]) for one in ran]
        for trace in traces
        for number, ran in trace.devices.items()
    }
    longest = max(trace.secs for trace in traces)
    return first._replace(devices=dict(sorted(moved.items())), span=(0.0, longest))


def trace_files(path: Path) -> list[Path]:
    """The profiler's file of each process of one trace, the newest below `path`; DataError where there is none."""
    if path.is_file() and path.name.endswith(XPLANE[1:]):
        return [path]
    profile = RunFiles(path).profile
    at = max(profile.glob("steps-*"), key=lambda folder: folder.stat().st_mtime, default=path)
    found = sorted(at.rglob(XPLANE), key=lambda file: file.stat().st_mtime) if at.is_dir() else []
    if not found:
        raise DataError(
            f"--trace={path} holds no trace: there is no {XPLANE} below it; train with "
            "--config.train.profile_steps=FIRST:LAST"
        )
    if not list(at.rglob(TRACED)):
        return [found[-1]]
    newest = {_home(file): file for file in found}
    return [file for home, file in sorted(newest.items()) if home is not None]


def _home(file: Path) -> Path | None:
    """The folder of the process that wrote a trace, with what is beside it."""
    return next((folder for folder in file.parents if (folder / TRACED).is_file()), None)


def _read(file: Path) -> Trace:
    home = _home(file)
    about = _about(home / TRACED) if home else {}
    mesh = about.get("mesh", {})
    text = (home / PROGRAM).read_text() if home and (home / PROGRAM).is_file() else ""
    try:
        data = ProfileData.from_file(str(file))
        planes = list(data.planes)
    except Exception as error:  # the library raises its own
        raise DataError(f"{file} is not a trace: {str(error).splitlines()[0]}") from error
    program, devices, local = Program(text, mesh), {}, about.get("local", [])
    for plane in planes:
        for number, ran in _ran(plane, program):
            devices.setdefault(_global(number, local), []).append(ran)
    span, steps = _span(planes, devices)
    inside = {
        number: [one for one in ran if one.end > span[0] and one.start < span[1]] for number, ran in devices.items()
    }
    return Trace(
        name=about.get("run", file.stem.removesuffix(".xplane")),
        devices=inside,
        span=span,
        steps=steps,
        mesh=mesh,
        order=tuple(about.get("devices", sorted(devices))),
        kind=about.get("kind", ""),
    )


def _about(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _ran(plane: Any, program: Program) -> Iterator[tuple[int, Ran]]:
    """Operations with the number of their device. CPUs write theirs by thread, each with its device; GPUs and TPUs have
    a plane each, GPUs with a line for each stream."""
    found = DEVICE.match(plane.name)
    if found is None and plane.name != "/host:CPU":
        return
    lines = list(plane.lines)
    if found is not None:
        streams = [line for line in lines if line.name.startswith("Stream")]
        lines = streams or [line for line in lines if line.name.endswith("XLA Ops")]
    for line in lines:
        for event in line.events:
            if found is None and event.name.startswith(("end: ", "ThreadpoolListener")):
                continue
            stats = dict(event.stats)
            if found is None and "hlo_op" not in stats:
                continue
            about = _of(event.name, stats, program)
            if about is not None:
                start = event.start_ns / 1e9
                number = int(found[1]) if found else int(stats.get("device_ordinal", 0))
                yield number, Ran(start, start + event.duration_ns / 1e9, *about)


def _global(number: int, local: list[int]) -> int:
    """A device by its number in the job; some backends count those of a process from 0."""
    return number if number in local or number >= len(local) else local[number]


def _of(name: str, stats: dict[str, Any], program: Program) -> tuple[str, bool, bool] | None:
    written = re.match(r"%([\w.\-]+) =", name)  # TPUs name an operation by its whole line
    op = str(stats.get("hlo_op") or (written[1] if written else name))
    module = str(stats.get("hlo_module", ""))
    if program.name and module and program.name not in module:
        return f"{OTHERS}: {module}", False, False
    return program.about(op)


def _span(planes: list[Any], devices: dict[int, list[Ran]]) -> tuple[tuple[float, float], tuple[int, ...]]:
    """From the first to the last moment of the traced steps, and their numbers."""
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
    if span is None:  # a trace that no run of ours wrote
        ran = [one for found in devices.values() for one in found]
        span = min((one.start for one in ran), default=0.0), max((one.end for one in ran), default=0.0)
    return span, tuple(sorted(steps))


def _guessed(op: str) -> tuple[str, bool, bool] | None:
    """What the name of an operation alone says."""
    plain = re.sub(r"[^a-z]", "", op.lower())
    for name, kind in NAMED.items():
        if name in plain:
            return kind, True, False
    stem = re.sub(r"[.\d]+$", "", op)
    if stem in CONTROL:
        return None
    return stem or op, False, "gemm" in plain or stem in ("dot", "convolution")
