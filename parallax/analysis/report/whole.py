"""The report of a step: what it sends, stores and computes, and what the compiler makes of it."""

import dataclasses
import json
import math
from collections.abc import Mapping
from html import escape
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from parallax.analysis.budget import memory
from parallax.analysis.report.compiled import Compiled, read_compiled
from parallax.analysis.report.cycles import ModuleSecs, secs_by_module
from parallax.analysis.report.flops import Flops, step_flops
from parallax.analysis.report.page import page
from parallax.analysis.report.products import CompiledFlops, compiled_flops
from parallax.analysis.report.shares import branch_shares
from parallax.analysis.report.steptime import StepTime, step_time
from parallax.analysis.report.text import text
from parallax.analysis.report.traced import Sent, busiest, collectives_by_rank, on_average
from parallax.cli.command import likely_entries, with_likely_vocab
from parallax.config.settings import Settings
from parallax.runtime.chips import chip
from parallax.runtime.errors import ConfigError
from parallax.runtime.progress import waiting
from parallax.training.build import step_of
from parallax.training.step import TrainStep, abstract_state

GIVEN = ("parameters", "optimizer", "batch")  # of the memory's components: the arguments of a step
LEFT_OUT = ("mesh", "timeline", "text")  # of what the compiler made: not for JSON


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """A report as plain data. It prints as text; notebooks show it as a page.

    `sent` is what a device sends for loss and gradients: see `busiest`; `sent_on_average` that of an average pipeline
    rank, to compare with what was compiled. `memory` are the predicted bytes on a device by component, at the moment
    when they are most. `compiled` is None where nothing was compiled; `compiled_for` says for what, or why not.
    `compiled_flops` are those that an average device executes of the compiled program, the update's apart; `time` is
    None where the compiler estimates no cycles, `computed` its compute by module.
    """

    name: str
    mesh: dict[str, int]
    schedule: str
    microbatches: int
    rows: int
    seq: int
    sent: tuple[Sent, ...]
    sent_on_average: tuple[Sent, ...]
    flops: Flops
    memory: dict[str, int]
    compiled: Compiled | None
    compiled_for: str
    compiled_flops: CompiledFlops | None = None
    time: StepTime | None = None
    computed: tuple[ModuleSecs, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of a step, on all devices."""
        return self.rows * self.seq

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def peak(self) -> int:
        """Predicted bytes on a device, all components together."""
        return sum(self.memory.values())

    def beside_compiler(self) -> list[tuple[str, int, int]]:
        """Label, predicted bytes and the compiler's: of what a step is given, and of that with all it needs besides."""
        arguments = sum(size for name, size in self.memory.items() if name in GIVEN)
        made = self.compiled
        return [("arguments", arguments, made.arguments), ("together", self.peak, made.together)]

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and lists that JSON can hold."""
        plain = dataclasses.asdict(self) | {"tokens": self.tokens, "devices": self.devices, "peak": self.peak}
        plain |= {key: [one._asdict() for one in getattr(self, key)] for key in ("sent", "sent_on_average")}
        plain["flops"] = self.flops._asdict() | {"executed": self.flops.executed, "mfu_ceiling": self.flops.ceiling}
        plain["time"] = self.time and self.time._asdict()
        plain["computed"] = [one._asdict() for one in self.computed]
        if self.compiled is not None:
            plain["compiled_flops"] = self.compiled_flops._asdict()
            found = self.compiled._asdict()
            found["collectives"] = [one._asdict() for one in self.compiled.collectives]
            found["pallas_calls"] = [one._asdict() for one in self.compiled.pallas_calls]
            plain["compiled"] = {key: value for key, value in found.items() if key not in LEFT_OUT}
        return plain

    def to_json(self) -> str:
        """All of it, every collective too."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """One page that needs nothing else."""
        return page(self)

    def __repr__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        # In a frame of its own: the page's style is not the notebook's.
        return f'<iframe srcdoc="{escape(self.to_html())}" style="width:100%;height:40rem;border:0"></iframe>'


def report(
    step: TrainStep,
    batch: Any = None,
    *,
    name: str = "step",
    entries: int | None = None,
    compiled: bool = True,
) -> Report:
    """What a step of `make_train_step` sends, stores and computes.

    Args:
        batch: the arrays that the step takes, or their shapes; those of the last step where it has taken one.
        name: what is reported, as it is printed.
        entries: of the model's vocab that are tokens, where some are padding.
        compiled: whether to compile the step and read what became of it. Not where the mesh is abstract.

    Raises ConfigError where the batch's shape is not known.
    """
    rows, seq = _shape_of(step, batch)
    model = step.model
    with waiting("tracing the step"):
        planned = memory(model, abstract_state(model, step.tx).opt_state, global_batch=rows, seq=seq)
        ranks = collectives_by_rank(model, rows, seq)
        flops = step_flops(model, rows, seq, entries=entries)
        shares = branch_shares(model)
    made, made_for, time, computed = None, "", None, ()
    if compiled and isinstance(model.mesh, Mesh):
        kind = model.mesh.devices.flat[0].device_kind
        made_for = f"{model.mesh.size} x {kind}"
        with waiting(f"compiling the step for {made_for}"):
            program = step.lower(rows, seq).compile()
        with waiting("reading the compiled step"):
            made = read_compiled(program, model.mesh, shares)
            if made.cycles is not None:
                time = step_time(made, chip(kind), flops.model, dtype=model.model.dtype)
                computed = tuple(secs_by_module(made.text, shares, chip(kind).clock_hz))
    return Report(
        name=name,
        mesh=dict(model.axis_sizes),
        schedule=model.schedule.name,
        microbatches=model.pipeline.microbatches,
        rows=rows,
        seq=seq,
        sent=tuple(busiest(ranks)),
        sent_on_average=tuple(on_average(ranks)),
        flops=flops,
        memory=dict(planned._asdict()),
        compiled=made,
        compiled_for=made_for,
        compiled_flops=made and compiled_flops(made.text, shares),
        time=time,
        computed=computed,
    )


def report_settings(settings: Settings, mesh: Mesh | AbstractMesh, *, name: str) -> Report:
    """The report of the step that these settings train on a mesh; compiled where its devices are real or simulated."""
    filled = with_likely_vocab(settings)
    array = jax.ShapeDtypeStruct((filled.data.global_batch, filled.data.seq), "int32")
    entries = None if settings.model.vocab else likely_entries(settings.data)
    return report(step_of(filled, mesh), {"tokens": array}, name=name, entries=entries)


def abstract_mesh(sizes: Mapping[str, int], *, simulated: bool = False) -> AbstractMesh:
    """A mesh of these sizes that has no devices: enough to trace on. `simulated`: what is traced, and what it holds, is
    as on simulated devices, not as on accelerators."""
    device = AbstractDevice("cpu", None, "cpu") if simulated else None
    axis_types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types, abstract_device=device)


def _shape_of(step: TrainStep, batch: Any) -> tuple[int, int]:
    shape = step.batch_shape if batch is None else batch["tokens"].shape
    if shape is None:
        raise ConfigError("the step has taken no batch yet, so its shape is not known; write report(step, batch).")
    return shape
