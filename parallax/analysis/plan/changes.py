"""What one change of a config would do to memory and time: each neighbour of a plan, priced like the plan itself."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from parallax.analysis.plan.analytic import Estimate, predict_of
from parallax.analysis.plan.layouts import Choice, build_if_legal, gathers
from parallax.analysis.report.place import Place
from parallax.config.sections import REMAT
from parallax.config.settings import Settings
from parallax.model.kernels import KERNELS

SHOWN = 6
LEAST_SECS, LEAST_BYTES = 0.003, 0.02  # shares below which a change is none


class Change(NamedTuple):
    """Flags to add to the command, and what they do: bytes of a chip, and a share of the step's time."""

    flags: str
    bytes: int
    secs: float


def helpful(
    settings: Settings, place: Place, now: Estimate, show: Callable[[int, int], None] = lambda done, of: None
) -> list[Change]:
    """The changes that save time or memory; those first that save most time and fit, then those that save memory.

    Where nothing fits yet, these are shown although none of them alone may be enough. `show` is told how many of how
    many are priced.
    """
    found = list(_priced(settings, place, now, show))
    room = place.chip.usable_bytes - now.peak_bytes
    faster = [change for change in found if change.secs < -LEAST_SECS and change.bytes <= room]
    smaller = [change for change in found if change.bytes < -LEAST_BYTES * now.peak_bytes and change not in faster]
    half = SHOWN // 2
    most, least = max(half, SHOWN - len(smaller)), max(half, SHOWN - len(faster))
    return (
        sorted(faster, key=lambda change: change.secs)[:most] + sorted(smaller, key=lambda change: change.bytes)[:least]
    )


def _priced(settings: Settings, place: Place, now: Estimate, show: Callable[[int, int], None]) -> Iterator[Change]:
    tried = list(neighbours(settings, place))
    for done, (flags, changed) in enumerate(tried):
        show(done, len(tried))
        model = build_if_legal(changed, place)
        if model is not None:
            then = predict_of(model, changed, place)
            yield Change(flags, then.peak_bytes - now.peak_bytes, then.secs / now.secs - 1)


def neighbours(settings: Settings, place: Place) -> Iterator[tuple[str, Settings]]:
    """Settings that differ in one respect, legal or not, and the flags that ask for them. Of attention's kernels those
    that the place's chips run, not those that they interpret."""
    own = Choice.of(settings)
    for choice in _layouts(own):
        yield " ".join(own.flags_to(choice)), choice.applied(settings)
    for kernel, runs in KERNELS.items():
        if settings.model.kernel == "xla" != kernel and place.chip.platform in runs.native:
            yield f"--config.model.kernel={kernel}", _with(settings, "model", kernel=kernel)
    if settings.fsdp.reduce == "float32" != settings.model.dtype and settings.mesh.dp > 1:
        yield "--config.fsdp.reduce=compute", _with(settings, "fsdp", reduce="compute")
    chunk = settings.loss.chunk_tokens // 2
    if chunk:
        yield f"--config.loss.chunk_tokens={chunk}", _with(settings, "loss", chunk_tokens=chunk)


def _layouts(own: Choice) -> Iterator[Choice]:
    for remat in REMAT:
        if remat != own.remat:
            yield own._replace(remat=remat)
    for microbatches in (2 * own.microbatches, own.microbatches // 2):
        if microbatches:
            yield own._replace(microbatches=microbatches)
    for gather, prefetch in gathers(own.pp, own.dp):
        if (gather, prefetch) != (own.gather, own.prefetch):
            yield own._replace(gather=gather, prefetch=prefetch)
    for one, other in (("dp", "tp"), ("tp", "dp"), ("dp", "pp"), ("pp", "dp")):
        if getattr(own, one) % 2 == 0:
            yield own._replace(**{one: getattr(own, one) // 2, other: 2 * getattr(own, other)})
    if own.pp > 1:
        for schedule, virtual in (("one_f_one_b", 1), ("interleaved", 2), ("zero_bubble", 1)):
            if (schedule, virtual) != (own.schedule, own.virtual):
                yield own._replace(schedule=schedule, virtual=virtual)


def _with(settings: Settings, section: str, **changes: object) -> Settings:
    return dataclasses.replace(settings, **{section: dataclasses.replace(getattr(settings, section), **changes)})
