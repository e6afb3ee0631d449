"""Report what a training step sends, stores and computes before it runs, or the time of traced steps by part.

    python -m parallax.report --config=configs/quickstart.py
    python -m parallax.report --config=configs/llama2_7b_64.py --config.mesh.tp=4 --html=report.html
    python -m parallax.report --config=configs/llama_1b_16.py --topology=v5e:4x4
    python -m parallax.report --config=configs/tiny_gqa.py --hlo=step.hlo
    python -m parallax.report --trace=runs/mine

In a notebook use px.report(step).
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from parallax.display.progress import loading, waiting

with loading(__name__, sys.stderr):
    import jax
    from jax.sharding import AbstractMesh, Mesh

    from parallax.analysis.compiled.profile import profile_steps, read_traces
    from parallax.analysis.planned.topology import Topology, devices_of, read_topology, why_not, without_chips
    from parallax.analysis.report import report
    from parallax.analysis.traced.trace import abstract_mesh
    from parallax.cli.arguments import Parser, run_path, write_output
    from parallax.cli.command import Flag, read_command, run_command, written
    from parallax.config.sections import AUTO, MeshConfig
    from parallax.config.settings import Settings
    from parallax.errors import ConfigError
    from parallax.hardware.devices import simulate_devices, start_devices
    from parallax.model.checks import check_kernel_on
    from parallax.model.kernels.platforms import ATTENTION_KERNELS
    from parallax.sharding.mesh import INFERRED, make_mesh, resolve_sizes
    from parallax.step.resolve import resolve, rounded_entries
    from parallax.step.step import step_of

USAGE = "python -m parallax.report {--config=FILE [--config.SECTION.KEY=VALUE ...] | --trace=FOLDER}"
FLAGS = {
    "json": Flag("print the whole report as JSON", False),
    "html": Flag("write the report to this file, as one page"),
    "topology": Flag(
        "compile for chips that need not be present, as v5e:4x4 or H100:1x8; default: this machine's devices"
    ),
    "hlo": Flag(
        "write the compiled program to this file, with the parameter or module, axes and pass of each collective and "
        "large product; alone, print it in place of the report"
    ),
    "trace": Flag(
        "a run's folder, here or in a bucket, or a trace: print the time of its train.profile_steps by part; only with "
        "--json or alone"
    ),
    "trace-only": Flag("do not compile: print communication, FLOPs and predicted memory", False),
}

TRACE_ONLY = "Nothing was compiled: --trace-only."
PRINTED = "-"  # the file of --hlo alone


def main(argv: Sequence[str]) -> int:
    """Print the report; returns the exit status. User errors are one line on stderr."""
    return run_command(act, argv, __doc__, USAGE, FLAGS)


def act(argv: Sequence[str]) -> None:
    """Run the command line's report."""
    if written(argv, "trace") is not None:
        report_trace(argv[1:])
        return
    settings, values = read_command(with_printed(argv, "hlo"), FLAGS)
    hlo = values["hlo"]
    if hlo == PRINTED and values["json"]:
        raise ConfigError("--hlo and --json both print; write one to a file: --hlo=step.hlo")
    compiled, entries = not values["trace-only"], rounded_entries(settings)
    topology = read_topology(values["topology"]) if values["topology"] is not None else None
    settings = resolve(settings, topology and topology.as_devices)
    if topology is None:
        mesh, why_abstract = choose_mesh(settings, compiled=compiled)
    else:
        check_kernel_on(settings.model, topology.chip.platform, topology.chip.name)
        mesh, why_abstract = slice_mesh(settings.mesh, topology, compiled=compiled)
    name = Path(written(argv, "config")).stem
    if hlo is not None and why_abstract:
        raise ConfigError(f"--hlo shows the compiled program. {why_abstract}")
    shown = report(step_of(settings, mesh), name=name, entries=entries, annotate=hlo is not None)
    if shown.compiled is None:
        shown = dataclasses.replace(shown, compiled_for=why_abstract)
    if values["html"] is not None:
        write_output("html", values["html"], shown.to_html())
    if hlo not in (None, PRINTED):
        write_output("hlo", hlo, shown.program)
    if hlo == PRINTED:
        print(shown.program, end="")
    else:
        print(shown.to_json() if values["json"] else shown)


def with_printed(argv: Sequence[str], flag: str) -> list[str]:
    """A command line in which a flag without a value has the value PRINTED.

    >>> with_printed(["report", "--hlo", "--config=a.py"], "hlo"), with_printed(["report", "--hlo", "step.hlo"], "hlo")
    (['report', '--hlo=-', '--config=a.py'], ['report', '--hlo', 'step.hlo'])
    """
    after = [*argv[1:], "--"]
    alone = [word in (f"--{flag}", f"-{flag}") and then.startswith("-") for word, then in zip(argv, after)]
    return [f"--{flag}={PRINTED}" if bare else word for word, bare in zip(argv, alone, strict=True)]


def report_trace(arguments: Sequence[str]) -> None:
    """Print the time of traced steps by part."""
    parser = Parser("python -m parallax.report")
    parser.add_argument("--trace", type=run_path, required=True)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args(arguments)
    with waiting(f"reading the traces in {flags.trace}"):
        profile = profile_steps(read_traces(flags.trace))
    print(profile.to_json() if flags.json else profile)


def choose_mesh(settings: Settings, *, compiled: bool) -> tuple[Mesh | AbstractMesh, str]:
    """The mesh of a config; if nothing is compiled, an abstract one and the reason."""
    config, kernel = settings.mesh, settings.model.kernel
    runs_on_cpu = kernel == AUTO or "cpu" in ATTENTION_KERNELS[kernel].platforms
    inferred = INFERRED in config.sizes.values()
    if compiled and config.simulate:
        simulate_devices(config.simulate)
    here = config.simulate or (len(start_devices()) if compiled or inferred else 0)
    wanted = here if inferred else math.prod(config.sizes.values())
    if compiled and here == wanted:
        return make_mesh(config), ""
    sizes = resolve_sizes(config, config.simulate or wanted)
    if not compiled:
        simulated = config.simulate > 0 or (inferred and runs_on_cpu and jax.default_backend() == "cpu")
        return abstract_mesh(sizes, simulated=simulated), TRACE_ONLY
    instead = f" --config.mesh.simulate={wanted} compiles for simulated ones." if runs_on_cpu else ""
    return abstract_mesh(sizes), f"Nothing was compiled: the mesh has {wanted} devices, this machine {here}.{instead}"


def slice_mesh(config: MeshConfig, topology: Topology, *, compiled: bool) -> tuple[Mesh | AbstractMesh, str]:
    """The mesh on chips that need not be present, to which `config` is fitted; if nothing is compiled, an abstract one
    and the reason."""
    if not compiled:
        return abstract_mesh(config.sizes, gpu=topology.chip.gpu), TRACE_ONLY
    if reason := why_not(topology):
        return abstract_mesh(config.sizes, gpu=topology.chip.gpu), f"Nothing was compiled: {reason}"
    return make_mesh(config, devices_of(topology)), ""


if __name__ == "__main__":
    without_chips(sys.argv)
    sys.exit(main(sys.argv))
