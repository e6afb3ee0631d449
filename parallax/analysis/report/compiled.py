"""What the compiler made of a step: memory, collectives with what lies between their start and end, cycles."""

from typing import NamedTuple

import jax
from jax.sharding import Mesh

from parallax.analysis.report.hlo import parse
from parallax.analysis.report.shares import Shares
from parallax.analysis.report.timeline import Begin, Branch, Compute, End, Kernel, Loop, Reader


class Made(NamedTuple):
    """A collective of the compiled program.

    `bytes` are what a device sends in one call. `count` is how often an average device calls it in a step, with loops
    turned and branches as the schedule takes them; `lockstep_count` how often the rank that the others wait for does.
    `cycles_between` are those of compute between its start and its end, in one call. `merged` arrays move together.
    `source` is its name in the traced program, `line` this project's line that asked, "" where the compiler lost it.
    """

    kind: str  # "all-gather" "reduce-scatter" "all-reduce" "all-to-all" "permute"
    axes: tuple[str, ...]
    bytes: int
    count: float
    lockstep_count: float
    asynchronous: bool
    cycles_between: float
    op: str
    source: str
    line: str
    merged: int


class Compiled(NamedTuple):
    """A compiled program; sizes are in bytes for a device.

    `peak` is the compiler's word for the most at any moment; that of XLA for CPU leaves temporaries out, and `together`
    is what a device must have. `cycles` are of compute, loops turned, on the rank that the
    others wait for; None where the compiler gives none. `unknown_loops` turn as often as data says and count once.
    """

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    peak: int
    collectives: list[Made]
    cycles: float | None
    pallas_calls: list[Kernel]
    unknown_loops: list[str]
    mesh: Mesh
    timeline: list
    text: str

    @property
    def together(self) -> int:
        """Arguments, results that do not take their place, and temporaries."""
        return self.arguments + self.temporaries + self.outputs - self.aliased


def read_compiled(compiled: jax.stages.Compiled, mesh: Mesh, branch_shares: Shares | None = None) -> Compiled:
    """Read what `jax.jit(step).lower(...).compile()` gave on this mesh.

    `branch_shares` say how often each branch runs: see `shares_of`. Conditionals that they do not name, and all where
    there are none, are taken to run their dearer branch each time.
    """
    sizes, text = compiled.memory_analysis(), compiled.as_text()
    return read_text(text, mesh, branch_shares)._replace(
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        outputs=sizes.output_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        peak=sizes.peak_memory_in_bytes,
    )


def read_text(text: str, mesh: Mesh, branch_shares: Shares | None = None) -> Compiled:
    """The same from the program's text alone, without sizes."""
    reader = Reader(parse(text), mesh, branch_shares)
    timeline = reader.entry()
    tally = Tally()
    tally.add(timeline, 1.0, 1.0)
    cycles = cycles_of(timeline) or None
    made = [Made(*call) for call in tally.made()]
    return Compiled(0, 0, 0, 0, 0, made, cycles, tally.kernels, reader.unknown, mesh, timeline, text)


class Tally:
    """Counts what a timeline holds, with how often it runs."""

    def __init__(self):
        self.kernels: list[Kernel] = []
        self._made: dict[str, list] = {}

    def add(self, events: list, own: float, lockstep: float) -> None:
        """Count these events, run so often on an average rank and on the one that others wait for."""
        for at, event in enumerate(events):
            if isinstance(event, Loop):
                self.add(event.body, own * event.trips, lockstep * event.trips)
            elif isinstance(event, Branch):
                for side, *shares in zip(event.sides, event.own, event.lockstep, strict=True):
                    self.add(side, own * shares[0], lockstep * shares[1])
            elif isinstance(event, Kernel):
                self.kernels.append(event)
            elif isinstance(event, Begin):
                self._add_call(event, _until_end(events[at + 1 :], event.call.op), own, lockstep)

    def _add_call(self, event: Begin, between: float, own: float, lockstep: float) -> None:
        call = event.call
        counts = self._made.setdefault(call.op, [event, between, 0.0, 0.0])
        counts[2] += own
        counts[3] += lockstep

    def made(self) -> list[tuple]:
        """The fields of each Made, in program order."""
        return [
            (c.kind, c.axes, c.bytes, own, lock, e.asynchronous, between, c.op, c.source, c.line, c.merged)
            for e, between, own, lock in self._made.values()
            for c in [e.call]
        ]


def cycles_of(events: list, lockstep: bool = True) -> float:
    """Cycles of compute in a timeline, on the rank that the others wait for or, else, on an average one."""
    total = 0.0
    for event in events:
        if isinstance(event, Compute):
            total += event.cycles
        elif isinstance(event, Loop):
            total += event.trips * cycles_of(event.body, lockstep)
        elif isinstance(event, Branch):
            shares = event.lockstep if lockstep else event.own
            total += sum(share * cycles_of(side, lockstep) for share, side in zip(shares, event.sides, strict=True))
    return total


def _until_end(events: list, op: str) -> float:
    last = next((at for at, event in enumerate(events) if isinstance(event, End) and event.op == op), len(events))
    return cycles_of(events[:last])
