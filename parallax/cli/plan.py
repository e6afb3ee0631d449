"""Plan a training step for chips that need not be present, or for this machine's devices.

    python -m parallax.plan --config=configs/llama2_7b_64.py --topology=v5p:4x4x4
    python -m parallax.plan --config=configs/llama2_7b_64.py --topology=v5p:4x4x4 --sweep --svg=layouts.svg

Compiled plans for TPUs need libtpu but no TPU; those for GPUs need JAX's CUDA plugin but no GPU.
"""

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallax.display.progress import loading, waiting

with loading(__name__, sys.stderr):
    from parallax.analysis.planned import plan
    from parallax.analysis.planned.devices import local_topology
    from parallax.analysis.planned.saving import saving_lines
    from parallax.analysis.planned.step_time import CompiledStep, compile_and_read, predicted
    from parallax.analysis.planned.sweep import Cache, Sweep, draw, front
    from parallax.analysis.planned.topology import Topology, devices_of, read_topology, why_not, without_chips
    from parallax.cli.arguments import write_output
    from parallax.cli.command import Flag, read_command, run_command, written
    from parallax.config.settings import Settings
    from parallax.errors import ConfigError, check_whole, quoted
    from parallax.hardware.devices import simulate_devices, start_devices
    from parallax.sharding.mesh import resolve_sizes
    from parallax.step.resolve import in_largest_batches, resolve

USAGE = "python -m parallax.plan --config=FILE [--config.SECTION.KEY=VALUE ...] [--topology=CHIP:SIZES] [--sweep]"
FLAGS = {
    "topology": Flag("chips that need not be present, as v5p:4x4x4 or H100:1x8; default: this machine's devices"),
    "analytic": Flag("compile nothing", False),
    "write-rate": Flag("MB/s that a host writes to the checkpoints' store, as 1000; says how long a save takes"),
    "sweep": Flag("price all legal layouts, and compile the best", False),
    "keep": Flag("sweep: number of fastest layouts to find; default: 12", 12),
    "most": Flag("sweep: most layouts to look at, those with the least bounds; default: 60; 0: as many as needed", 60),
    "compile": Flag("sweep: number of them to compile; default: 3", 3),
    "svg": Flag("sweep: draw memory against time to this file"),
    "cache": Flag("sweep: the folder of its results; default: .cache/plan", ".cache/plan"),
}


def main(argv: Sequence[str]) -> int:
    """Print the plan; returns the exit status. User errors are one line on stderr."""
    return run_command(act, argv, __doc__, USAGE, FLAGS)


def act(argv: Sequence[str]) -> None:
    """Run the command line's plan or sweep."""
    settings, values = read_command(argv, FLAGS)
    check_flags(values, argv)
    settings, topology = located(settings, values["topology"])
    name = Path(written(argv, "config")).stem
    if values["sweep"]:
        sweep(name, settings, topology, values)
    else:
        print_plan(name, settings, topology, values)


def check_flags(values: dict[str, Any], argv: Sequence[str]) -> None:
    """Raise ConfigError if flags do not fit together or have invalid values."""
    for flag in ("keep", "most", "compile", "svg", "cache"):
        if written(argv, flag) is not None and not values["sweep"]:
            raise ConfigError(f"--{flag}={written(argv, flag)} is for --sweep; add --sweep, or leave it out.")
    read_rate(values["write-rate"])
    for flag, least in (("keep", 1), ("most", 0), ("compile", 0)):
        check_whole(f"--{flag}", values[flag], least=least)


def read_rate(text: str | None) -> float:
    """MB/s of --write-rate, 0 where it is not given; ConfigError if it is no rate.

    >>> read_rate("1000"), read_rate(None)
    (1000.0, 0.0)
    """
    if text is None:
        return 0.0
    rate = float(text) if re.fullmatch(r"\d+(\.\d+)?(e\d+)?", text) else 0.0
    if not 0 < rate < math.inf:
        raise ConfigError(
            f"--write-rate={quoted(text)} is no rate; write how many MB/s a host writes, a number of more than 0 "
            "without its unit, as --write-rate=1000; or leave it out."
        )
    return rate


def located(settings: Settings, name: str | None) -> tuple[Settings, Topology]:
    """The settings with nothing left open, and the topology; ConfigError if they do not fit."""
    if name is not None:
        topology = read_topology(name)
    else:
        if settings.mesh.simulate:
            simulate_devices(settings.mesh.simulate)
        check_mesh_is_of(settings, len(start_devices()))
        with waiting("measuring this machine's devices"):
            topology = local_topology(settings.model.dtype)
    settings = resolve(in_largest_batches(settings), topology.as_devices)
    topology.chip.peak(settings.model.dtype)
    return settings, topology


def check_mesh_is_of(settings: Settings, devices: int) -> None:
    """Raise ConfigError, before they are measured, if this machine's devices do not fit the mesh."""
    try:
        resolve_sizes(settings.mesh, devices)
    except ConfigError as error:
        raise ConfigError(f"{error}, or plan for chips that need not be here: --topology=v5e:4x4") from error


def print_plan(name: str, settings: Settings, topology: Topology, values: dict[str, Any]) -> None:
    """Print the plan of one layout."""
    with waiting("tracing the step"):
        planned = plan.Plan(name, settings, topology, predicted(settings, topology))
    print(planned, flush=True)
    now = planned.estimate
    saving = saving_lines(settings, topology, planned.secs, read_rate(values["write-rate"]))
    print(*(f"{line}\n" for line in saving), sep="", end="", flush=True)
    print(*(f"{line}\n" for line in plan.eight_bit_lines(settings, topology, now)), sep="", end="", flush=True)
    with waiting("pricing changes") as show:
        changes = plan.helpful_changes(settings, topology, now, show)
    if changes:
        print("", *plan.changes_table(changes), sep="\n", flush=True)
    print(*(f"{line}\n" for line in plan.enough_lines(changes, now, topology)), sep="", end="", flush=True)
    if values["analytic"]:
        return
    devices = compiler_devices(topology, values)
    if devices:
        with waiting(f"compiling the step for {topology.name}"):
            made = compile_and_read(settings, topology, devices)
        print("", *plan.compiled_lines(made, topology), sep="\n")


def sweep(name: str, settings: Settings, topology: Topology, values: dict[str, Any]) -> None:
    """Search layouts, print the table and draw the picture; after an interruption, of the layouts so far."""
    search = Sweep(settings, topology, Cache(values["cache"]), keep=values["keep"], most=values["most"])
    print(plan.plan_heading(name, settings, topology), flush=True)
    compiled: dict[Any, CompiledStep] = {}
    try:
        acts = {"finding layouts that may fit": search.find, "pricing layouts": search.price}
        acts |= {"tracing the fastest": search.run, "tracing sets of parts to recompute": search.run_sets}
        for what, act in acts.items():
            with waiting(what) as show:
                act(show)
        if not values["analytic"]:
            compile_best(search, topology, values, compiled)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from here", file=sys.stderr)
        raise
    finally:
        shown = search.shown()
        marked = front(search.rows)
        print("", *plan.sweep_table(shown, compiled, marked, search.configured), sep="\n")
        print("", *plan.passed_over_lines(search), sep="\n")
        usable_bytes = topology.chip.usable_bytes
        print(*plan.fastest_line(shown, compiled, search.configured, usable_bytes), sep="\n", end="")
        if search.sets:
            print("", *plan.sets_table(search.sets, search.configured), sep="\n")
        if values["svg"] is not None:
            write_output(
                "svg", values["svg"], draw(f"{name} on {topology.name}", search.rows, topology, search.configured)
            )


def compile_best(search: Sweep, topology: Topology, values: dict[str, Any], compiled: dict[Any, CompiledStep]) -> None:
    """Compile the fastest layouts until the requested number fits, and the config's own."""
    devices = compiler_devices(topology, values)
    if not devices:
        return
    for choice in sorted((row.choice for row in search.rows), key=lambda choice: choice != search.configured):
        fitting = sum(not made.refused for layout, made in compiled.items() if layout != search.configured)
        if fitting == values["compile"]:
            break
        with waiting(f"compiling layout {choice.mesh}, {fitting} of {values['compile']} found that fit"):
            compiled[choice] = search.compiled(choice, devices)


def compiler_devices(topology: Topology, values: dict[str, Any]) -> list[Any]:
    """The devices to compile for; empty, with a printed reason, if that is not possible."""
    if values["topology"] is None:
        return start_devices()
    if reason := why_not(topology):
        print(f"\nnot compiled: {reason}")
        return []
    return devices_of(topology)


if __name__ == "__main__":
    without_chips(sys.argv)
    sys.exit(main(sys.argv))
