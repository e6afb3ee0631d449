"""The real training step, compiled for a place: for TPU slices on any machine, else for the devices that are here."""

import dataclasses
import math
import re
from typing import Any, NamedTuple

import jax

from parallax.analysis.budget import flops_per_token
from parallax.analysis.report.compiled import read_compiled
from parallax.analysis.report.place import Place
from parallax.analysis.report.shares import branch_shares
from parallax.analysis.report.steptime import step_time
from parallax.config.settings import Settings
from parallax.sharding.mesh import make_mesh
from parallax.training.build import step_of


class Outcome(NamedTuple):
    """What the compiler says of a step: bytes of a device, seconds where it estimates cycles.

    `refused` is its own word where the step does not fit, and then there is nothing else.
    """

    refused: str
    arguments: int
    temporaries: int
    peak_bytes: int
    compute_secs: float | None
    pallas_secs: float | None
    exposed_secs: dict[str, float]
    secs: float | None
    bubble: float | None
    mfu: float | None


def compile_step(settings: Settings, place: Place, devices: list[Any]) -> Outcome:
    """Compile the training step of these settings and read the result."""
    mesh = make_mesh(dataclasses.replace(settings.mesh, simulate=0), devices)
    step, shape = step_of(settings, mesh), (settings.data.global_batch, settings.data.seq)
    model, lowered = step.model, step.lower(*shape)
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refused(str(error))
    found = read_compiled(program, mesh, branch_shares(model))
    if found.cycles is None:  # another backend's peak, as that for CPU, may leave temporaries out
        return Outcome("", found.arguments, found.temporaries, found.together, None, None, {}, None, None, None)
    sizes = found.arguments, found.temporaries, found.peak
    flops = flops_per_token(settings.model, model.shapes, seq=shape[1]) * math.prod(shape) / place.devices
    time = step_time(found, place.chip, flops, dtype=settings.model.dtype)
    seconds = time.compute_secs, time.pallas_secs, time.exposed_secs, time.total_secs
    return Outcome("", *sizes, *seconds, time.bubble, time.mfu)


def _refused(message: str) -> Outcome:
    used = re.search(r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm", message)
    short = used[0].replace("hbm", "HBM") if used else _first_line(message)
    return Outcome(short, 0, 0, 0, None, None, {}, None, None, None)


def _first_line(error: Any) -> str:
    return str(error).splitlines()[0]
