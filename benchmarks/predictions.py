"""Predictions for a training step compared with the compiled program: memory, FLOPs, bytes sent.

    python benchmarks/predictions.py
    python benchmarks/predictions.py --configs bench_small --meshes 2,2,2 8,1,1 --schedules zero_bubble --remat layer
    python benchmarks/predictions.py --tpu

Of one device and step, predicted / compiled, and the error, which is predicted over compiled less 1. *Memory* is the
peak that parallax.analysis predicts, and what the compiler reserves: arguments, results that take no other place, and
temporaries. *FLOPs* are of matrix products, *sent* are the bytes of collectives: of the traced loss and gradients, and
of the compiled program, its loops turned and its branches taken as the schedule says. What the *update* of the
parameters takes, by its scope's name, is that of the compiled program and counts in no error.

Each config of a size for it is compiled on meshes of up to eight simulated CPU devices, with as many microbatches as
the config has, and on a pipeline at least two for each rank. --tpu, which needs pip install -e '.[tpu]', compiles
those at real scale for TPU slices, and prints the compiler's own figure of its peak. The table goes to stdout, how far
it has come to stderr.
"""

import math
import sys
import time
from typing import Any, NamedTuple

from arguments import Arguments, absent_devices, config_of, mesh_sizes, run_benchmark

from parallax.errors import ConfigError

EVERY = ("1,1,1", "1,8,1", "1,1,8", "2,2,2", "4,1,2", "8,1,1")
PIPELINES = EVERY[3:]
ON_CPU = (  # config, meshes, schedules, remat: heads and layers of the first two divide over fewer ranks
    ("tiny_gqa", ("1,1,1", "1,8,1", "1,2,4", "2,2,2"), ("gpipe",), ("layer",)),
    ("quickstart", ("1,1,1", "1,8,1", "1,2,4", "2,2,2", "4,1,2"), ("gpipe",), ("none",)),
    ("bench_small", EVERY, ("gpipe",), ("layer", "none")),
    ("bench_small", PIPELINES, ("one_f_one_b", "zero_bubble"), ("layer",)),
    ("bench_small", ("2,2,2",), ("one_f_one_b", "zero_bubble"), ("none",)),
)
ON_TPU = (
    ("llama_1b_16", "1,16,1", "v5e:4x4"),
    ("llama_1b_16", "1,8,2", "v5e:4x4"),
    ("deepseek_v2_lite_mla", "1,16,1", "v5p:2x2x4"),
    ("llama2_7b_64", "1,64,1", "v5p:4x4x4"),
    ("llama2_7b_64", "1,16,4", "v5p:4x4x4"),
)
SMALLEST = ("tiny_gqa", "1,4,1", "v5e:2x2")  # of ON_TPU, with --smoke
HEAD = ["config", "mesh pp·dp·tp", "schedule", "remat", "memory, MiB", "error", "GFLOP", "error", "sent, MiB", "error"]
HEAD += ["of the update: GFLOP", "sent, MiB"]


class Case(NamedTuple):
    config: str
    mesh: str
    schedule: str
    remat: str
    slice: str = ""  # of TPU chips


class Figures(NamedTuple):
    """Predicted and compiled, of one device."""

    memory: tuple[float, float]
    flops: tuple[float, float]
    sent: tuple[float, float]
    update_flops: float
    update_sent: float
    peak: int  # the compiler's own figure

    @property
    def errors(self) -> list[float]:
        """Errors of memory, FLOPs and bytes sent; 0 if the figures are equal."""
        pairs = (self.memory, self.flops, self.sent)
        return [0.0 if mine == theirs else mine / theirs - 1 if theirs else math.inf for mine, theirs in pairs]


def main() -> None:
    args = parse()
    start_jax(tpu=args.tpu)
    chosen = [case for case in (on_tpu(args.smoke) if args.tpu else on_cpu()) if wanted(case, args)]
    if not chosen:
        raise ConfigError("no row is of these configs, meshes, schedules and remat; --help says what there is")
    print_row([*HEAD, "compiler's peak, MiB"] if args.tpu else HEAD)
    print_row(["---"] * (len(HEAD) + args.tpu))
    found = [measured(case, f"{at} of {len(chosen)}", args.tpu) for at, case in enumerate(chosen, start=1)]
    largest = [max((one.errors[at] for one in found), key=abs) for at in range(3)]
    print_row(["largest", "", "", "", *(cell for error in largest for cell in ("", in_percent(error))), "", ""])


def parse() -> Any:
    parser = Arguments(description=__doc__, smallest={"configs": ["tiny_gqa"], "meshes": ["1,1,1", "1,4,1"]})
    for name in ("configs", "meshes", "schedules", "remat"):
        kind = {"type": mesh_sizes, "metavar": "PP,DP,TP"} if name == "meshes" else {}
        parser.add_argument(f"--{name}", nargs="+", help="rows of these alone", **kind)
    parser.add_argument("--tpu", action="store_true", help="compile for TPU slices")
    return parser.parse_args()


def start_jax(*, tpu: bool) -> None:
    """Simulate devices or, for the TPU compiler, see that it is there."""
    import jax

    import parallax as px

    jax.config.update("jax_enable_compilation_cache", False)
    if tpu:
        absent_devices(SMALLEST[-1])
    else:
        px.simulate_devices(8)


# ---- the rows


def on_cpu() -> list[Case]:
    return [
        Case(config, mesh, schedule, remat)
        for config, meshes, schedules, remats in ON_CPU
        for schedule in schedules
        for remat in remats
        for mesh in meshes
    ]


def on_tpu(smoke: bool) -> list[Case]:
    rows = [SMALLEST] if smoke else ON_TPU
    own = {name: config_of(name).pipeline for name, _, _ in rows}
    return [Case(name, mesh, own[name].schedule, own[name].remat, chips) for name, mesh, chips in rows]


def wanted(case: Case, args: Any) -> bool:
    limits = args.configs, args.meshes, args.schedules, args.remat
    return all(not limit or value in limit for value, limit in zip(case, limits))


def measured(case: Case, place: str, tpu: bool) -> Figures:
    """The figures of a row, printed."""
    print(f"{place}: {' '.join(filter(None, case))} ...", end="", file=sys.stderr, flush=True)
    started = time.perf_counter()
    found, schedule = figures(case)
    print(f" {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print_row(cells(case._replace(schedule=schedule), found, tpu))
    return found


def cells(case: Case, found: Figures, tpu: bool) -> list[str]:
    pairs = [(found.memory, 2**20), (found.flops, 1e9), (found.sent, 2**20)]
    sizes = [" / ".join(f"{size / unit:,.1f}" for size in pair) for pair, unit in pairs]
    beside = [cell for size, error in zip(sizes, found.errors) for cell in (size, in_percent(error))]
    update = [f"{found.update_flops / 1e9:,.1f}", f"{found.update_sent / 2**20:,.1f}"]
    named = [case.config, case.mesh.replace(",", "·"), case.schedule, case.remat]
    return [*named, *beside, *update, *([f"{found.peak / 2**20:,.1f}"] if tpu else [])]


def print_row(row: list[str]) -> None:
    print(f"| {' | '.join(row)} |", flush=True)


def in_percent(error: float) -> str:
    return f"{error:+.1%}".replace("%", " %").replace("-", "−")


# ---- one row


def figures(case: Case) -> tuple[Figures, str]:
    """What is predicted and what was compiled, and the schedule that ran: without a pipeline none of the named ones."""
    import parallax as px
    from parallax.analysis.report import report, traced_beside_compiled
    from parallax.step.resolve import resolve, rounded_entries

    settings = px.read_settings(config_for(case).to_dict())
    mesh = px.make_mesh(settings.mesh, devices(case))
    found = report(px.step_of(resolve(settings), mesh), name=case.config, entries=rounded_entries(settings))
    _, memory = (pair for _, *pair in found.beside_compiler())
    fates = traced_beside_compiled(found.sent_on_average, found.compiled.collectives)
    passes = [row for row in fates if not row.update]
    return Figures(
        memory=tuple(memory),
        flops=(found.flops.executed, found.compiled_flops.passes),
        sent=(sum(row.traced_bytes for row in passes), sum(row.bytes for row in passes)),
        update_flops=found.compiled_flops.update,
        update_sent=sum(row.bytes for row in fates if row.update),
        peak=found.compiled.peak,
    ), found.schedule


def config_for(case: Case) -> Any:
    config, (pp, dp, tp) = config_of(case.config), sizes(case)
    config.mesh.update(pp=pp, dp=dp, tp=tp, simulate=0)
    enough = max(config.pipeline.microbatches, 2 * pp if pp > 1 else 1)
    microbatches = min(enough, config.data.global_batch // dp)
    config.pipeline.update(schedule=case.schedule, remat=case.remat, microbatches=microbatches)
    return config


def devices(case: Case) -> Any:
    import jax

    if case.slice:
        return absent_devices(case.slice)
    return jax.devices()[: math.prod(sizes(case))]


def sizes(case: Case) -> tuple[int, ...]:
    return tuple(map(int, case.mesh.split(",")))


if __name__ == "__main__":
    run_benchmark(main)
