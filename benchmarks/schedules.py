"""Pipeline schedules compared with GPipe on simulated devices: memory, time, FLOPs, compile time, each in one run.

    python benchmarks/schedules.py memory [--mesh 4,1,1] [--remat layer] [--microbatches 4 8 16 32 64]
    python benchmarks/schedules.py time [--mesh 4,1,1] [--remat layer] [--microbatches 4 8 16] [--rounds 5]
    python benchmarks/schedules.py flops [--mesh 4,1,1] [--remat layer] [--microbatches 4 8 16]
    python benchmarks/schedules.py compile [--mesh 4,1,1] [--remat layer] [--layers 16 64] [--microbatches 4 64]

The work is loss and gradients of the model of configs/bench_small.py with a vocabulary of 1024 and so many layers that
each schedule divides them evenly.

memory: MiB of one device. *temporaries* is the compiler's figure for one device's program, *saved* the activations
that parallax.analysis computes; slots are those of the schedule's pools. A microbatch has the same rows in all cells.
time: seconds of a step over GPipe's with the same batch; schedules take turns, the median of each is taken. CPU seconds
are those of all threads: a device that waits does not show there. Wall time
is that of the cores the machine has: where they are fewer than pipeline ranks, a bubble hardly shows there either.
flops: those of matrix products that all devices execute, over those of one device without a pipeline; and the
busiest rank's over the least busy one's.
compile: CPU seconds to lower and compile, without a cache, the least of the rounds, and their ratio to GPipe's.
"""

import argparse
import statistics
import sys
import time
from typing import Any, NamedTuple

from arguments import WORKS, Arguments, config_of, mesh_sizes, run_benchmark, whole_number

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipe_v")
WIDTH = 18


class Work(NamedTuple):
    model: Any
    rows: int  # of the global batch
    seq: int


def main() -> None:
    args = parse()
    import jax

    import parallax as px

    jax.config.update("jax_enable_compilation_cache", False)
    pp, dp, tp = map(int, args.mesh.split(","))
    px.simulate_devices(pp * dp * tp)
    print(f"mesh {args.mesh}, remat {args.remat}, layers {args.layers}")
    {"memory": memory, "time": times, "flops": flops, "compile": compile_times}[args.command](args)


def parse() -> argparse.Namespace:
    parser = Arguments(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    smallest = {"config": "tiny_gqa", "mesh": "2,1,1", "microbatches": [2], "layers": [2], "rounds": 1}
    smallest["schedules"] = SCHEDULES[:2]
    defaults = {"memory": ([4, 8, 16, 32, 64], [16]), "time": ([4, 8, 16], [16]), "compile": ([4, 64], [16, 64])}
    defaults["flops"] = defaults["time"]
    for name, (microbatches, layers) in defaults.items():
        command = commands.add_parser(name, smallest=smallest)
        command.add_argument("--config", default="bench_small", choices=WORKS)
        command.add_argument("--mesh", type=mesh_sizes, default="4,1,1", metavar="PP,DP,TP")
        command.add_argument("--remat", default="layer", choices=["none", "layer", "stage"])
        command.add_argument("--microbatches", nargs="+", type=whole_number, default=microbatches)
        command.add_argument("--layers", nargs="+", type=whole_number, default=layers)
        command.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
        command.add_argument("--rounds", type=whole_number, default=2 if name == "compile" else 5)
    return parser.parse_args()


# ---- the work


def build(schedule: str, args: argparse.Namespace, *, microbatches: int, rows: int, layers: int) -> Work:
    """The model on its mesh, for a global batch of `rows` rows."""
    import jax

    import parallax as px

    config = config_of(args.config)
    config.mesh.pp, config.mesh.dp, config.mesh.tp = map(int, args.mesh.split(","))
    config.mesh.simulate = 0
    config.model.vocab, config.model.layers = 1024, layers
    virtual = 2 if schedule == "interleaved" else 1
    config.pipeline.update(schedule=schedule, virtual=virtual, microbatches=microbatches, remat=args.remat)
    settings = px.read_settings(config.to_dict())
    mesh = px.make_mesh(settings.mesh, jax.devices()[: config.mesh.pp * config.mesh.dp * config.mesh.tp])
    model = px.model_of(settings, mesh)
    return Work(model, rows, settings.data.seq)


def compiled(work: Work) -> Any:
    import jax

    from parallax.model.batch import BATCH_ARRAYS

    model, shape = work.model, (work.rows, work.seq)
    params = jax.tree.map(
        lambda x, cut: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut), model.shapes, model.shardings
    )
    batch = dict.fromkeys(BATCH_ARRAYS, jax.ShapeDtypeStruct(shape, "int32", sharding=model.batch_sharding))
    gradients = jax.jit(model.loss_and_grad, out_shardings=(None, model.shardings))
    return gradients.lower(params, batch).compile()


def heading(name: str, columns: list[str], width: int) -> None:
    print(f"{name:{WIDTH}}" + "".join(f"{column:>{width}}" for column in columns), flush=True)


# ---- memory


def memory(args: argparse.Namespace) -> None:
    rows = 4 * int(args.mesh.split(",")[1])
    print("MiB on a device: temporaries / saved")
    heading("schedule", [f"M={count}" for count in args.microbatches] + ["slots"], 16)
    for schedule in args.schedules:
        cells, slots = [], []
        for count in args.microbatches:
            work = build(schedule, args, microbatches=count, rows=count * rows, layers=args.layers[0])
            temporaries, saved = sizes(work)
            cells.append(f"{temporaries / 2**20:.1f} / {saved / 2**20:.1f}")
            slots.append("+".join(map(str, work.model.schedule.slots.values())))
        heading(schedule, [*cells, "   " + " ".join(slots)], 16)


def sizes(work: Work) -> tuple[int, int]:
    """The compiler's temporaries and the computed activations, in bytes on a device."""
    from parallax.analysis.traced.memory import memory

    analysis = compiled(work).memory_analysis()
    computed = memory(work.model, {}, global_batch=work.rows, seq=work.seq)
    return analysis.temp_size_in_bytes, computed.saved_activations


# ---- time


def times(args: argparse.Namespace) -> None:
    rows = max(args.microbatches) * int(args.mesh.split(",")[1])
    print(f"a step of {rows} rows over GPipe's: CPU seconds, wall time")
    heading("schedule", [f"M={count}" for count in args.microbatches], 16)
    columns = [ratios(args, microbatches=count, rows=rows) for count in args.microbatches]
    for at, schedule in enumerate(args.schedules):
        heading(schedule, ["{:.2f}  {:.2f}".format(*column[at]) for column in columns], 16)


def ratios(args: argparse.Namespace, *, microbatches: int, rows: int) -> list[list[float]]:
    """For each schedule CPU seconds and wall seconds over those of the first."""
    runs = [
        runner(build(name, args, microbatches=microbatches, rows=rows, layers=args.layers[0]))
        for name in args.schedules
    ]
    for run in runs:
        measured(run)
    taken = [[measured(run) for run in runs] for _ in range(args.rounds)]
    medians = [[statistics.median(secs) for secs in zip(*of_one)] for of_one in zip(*taken)]
    print("seconds: " + "  ".join("{:.2f} {:.2f}".format(*secs) for secs in medians), file=sys.stderr, flush=True)
    return [[secs / first for secs, first in zip(of_one, medians[0])] for of_one in medians]


def runner(work: Work) -> Any:
    import jax
    from step import random_batch

    step, params = compiled(work), work.model.init(0)
    batch = random_batch(work.rows, work.seq, work.model.config.vocab)
    batch = jax.device_put(batch, work.model.batch_sharding)
    return lambda: jax.block_until_ready(step(params, batch))


def measured(run: Any) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return time.process_time() - cpu, time.perf_counter() - wall


# ---- FLOPs


def flops(args: argparse.Namespace) -> None:
    rows = max(args.microbatches) * int(args.mesh.split(",")[1])
    print("FLOPs of all devices over those of one, of the busiest rank over the least busy one")
    heading("schedule", [f"M={count}" for count in args.microbatches], 16)
    for schedule in args.schedules:
        cells = []
        for count in args.microbatches:
            alone = argparse.Namespace(**{**vars(args), "mesh": "1,1,1"})
            ideal = executed(build("gpipe", alone, microbatches=count, rows=rows, layers=args.layers[0]))
            ranks = executed(build(schedule, args, microbatches=count, rows=rows, layers=args.layers[0]))
            cells.append(f"{sum(ranks) / sum(ideal):.4f}  {max(ranks) / min(ranks):.4f}")
        heading(schedule, cells, 16)


def executed(work: Work) -> list[int]:
    """FLOPs by pipeline rank, its data and tensor ranks together."""
    import jax

    from parallax.analysis.traced.flops import flops_by_direction
    from parallax.model.batch import BATCH_ARRAYS

    model, sizes = work.model, work.model.axis_sizes
    batch = dict.fromkeys(BATCH_ARRAYS, jax.ShapeDtypeStruct((work.rows, work.seq), "int32"))
    ranks = (dict(pp=pp, dp=0, tp=0) for pp in range(sizes["pp"]))
    alike = sizes["dp"] * sizes["tp"]
    program = jax.make_jaxpr(model.loss_and_grad)(model.shapes, batch)
    return [alike * sum(flops_by_direction(program, rank=rank).values()) for rank in ranks]


# ---- compile time


def compile_times(args: argparse.Namespace) -> None:
    grid = [(layers, count) for layers in args.layers for count in args.microbatches]
    print("CPU seconds to lower and compile, and over GPipe's")
    heading("schedule", [f"layers {layers} M={count}" for layers, count in grid], 20)
    dp = int(args.mesh.split(",")[1])

    def seconds(schedule: str, layers: int, count: int) -> float:
        work = build(schedule, args, microbatches=count, rows=4 * dp * count, layers=layers)
        return measured(lambda: compiled(work))[0]

    seconds(args.schedules[0], *grid[0])  # the first compile also loads the compiler
    found = {
        (name, *cell): min(seconds(name, *cell) for _ in range(args.rounds)) for cell in grid for name in args.schedules
    }
    for name in args.schedules:
        cells = [(found[name, *cell], found[name, *cell] / found[args.schedules[0], *cell]) for cell in grid]
        heading(name, ["{:.1f}  {:.2f}".format(*cell) for cell in cells], 20)


if __name__ == "__main__":
    run_benchmark(main)
