"""Speed of a training step, as a share of the machine's own matmul rate, and peak memory.

    python benchmarks/step.py [--meshes 1,1,1 1,4,2 2,2,2] [--schedule gpipe] [--remat none] [--rounds 5]
    python benchmarks/step.py --meshes 1,1,1 1,4,2 --same-rows --floor

The work is configs/bench_small.py. Each mesh (pp,dp,tp) runs in a process of its own on simulated devices. CPU
seconds are counted, over all threads: steadier than wall time on a shared machine. Before each step the same
process measures what a float32 matmul reaches, 2 x matmul^3 FLOPs a time; the median over steps is printed. In each
round all meshes take their turn; medians over rounds are printed, of ratios to the round's own first mesh, too.

    share = model FLOPs per CPU second of the step / matmul FLOPs per CPU second

With data ranks a microbatch has fewer rows on a device. --same-rows adds a line for each such mesh with so many fewer
microbatches that a device multiplies as many rows at once as on a mesh without data ranks.

--floor also runs the step's matrix products alone: on each device as many as in loss and gradients, of the same
shapes, and no message. Their CPU seconds are printed, and over those on the first mesh; floor is what a step would take
over one on the first mesh if all but its products took as long as there.

Model FLOPs are 6 x parameters used in matmuls x tokens, plus causal attention; an embedding look-up, a recomputed
layer and a bubble count nothing.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from arguments import WORKS, Arguments, config_of, mesh_sizes, run_benchmark, whole_number

from parallax.config.sections import POLICY_NAMES

MATMUL_TIMES = 4


def main() -> None:
    smallest = {"config": "tiny_gqa", "meshes": ["1,1,1"], "steps": 1, "microbatches": 1, "matmul": 256}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--config", default="bench_small", choices=(*WORKS, "quickstart"))
    parser.add_argument("--meshes", nargs="+", type=mesh_sizes, default=["1,1,1", "1,4,2", "2,2,2"], metavar="PP,DP,TP")
    parser.add_argument("--steps", type=whole_number, default=4)
    parser.add_argument("--rounds", type=whole_number, default=1)
    parser.add_argument("--schedule", default="gpipe", choices=["gpipe", "one_f_one_b"])
    parser.add_argument("--remat", default="none", choices=["none", "layer", "stage"])
    parser.add_argument("--policy", default="zero3", choices=POLICY_NAMES)
    parser.add_argument("--microbatches", type=whole_number, default=8)
    parser.add_argument("--matmul", type=whole_number, default=2048, help="rows of the matmul that is measured")
    parser.add_argument("--same-rows", action="store_true", help="also with a device's rows of one without data ranks")
    parser.add_argument("--floor", action="store_true", help="also the products alone, and what follows from them")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args)))
        return
    works = [*works_of(args)]
    more = "  products s  / first  floor" if args.floor else ""
    columns = "share of matmul peak  CPU s/step  / first  in matmuls / first  wall s/step  compile s   peak RSS"
    print(f"mesh    microbatches  {columns}{more}")
    measured: list[list[dict]] = [[] for _ in works]
    for number in range(args.rounds):
        for work, rows in zip(works, measured, strict=True):
            rows.append(run_child(*work, args))
            if number == args.rounds - 1:
                print(line(*work, rows, measured[0]), flush=True)


def works_of(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Each mesh with its microbatches."""
    for mesh in args.meshes:
        yield mesh, args.microbatches
        fewer = args.microbatches // int(mesh.split(",")[1])
        if args.same_rows and 0 < fewer < args.microbatches:
            yield mesh, fewer


def line(mesh: str, microbatches: int, rows: list[dict], first: list[dict]) -> str:
    """A row of the table: medians over rounds, and of each round's ratio to the first row."""
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    pairs = list(zip(rows, first, strict=True))
    ratio = statistics.median(row["cpu_secs"] / base["cpu_secs"] for row, base in pairs)
    # In units of the same process's matmul, a machine that slowed between two meshes does not show.
    matmuls = statistics.median(base["share"] / row["share"] for row, base in pairs)
    products = of_products(middle, pairs) if "products_secs" in middle else ""
    return (
        f"{mesh:8}{microbatches:12}{middle['share']:22.1%}{middle['cpu_secs']:12.2f}{ratio:9.2f}{matmuls:20.2f}"
        f"{middle['wall_secs']:13.2f}{middle['compile_secs']:11.1f}"
        f"{max(row['peak_bytes'] for row in rows) / 2**30:7.2f} GiB{products}"
    )


def of_products(middle: dict, pairs: list[tuple[dict, dict]]) -> str:
    """What --floor adds to a row."""
    ratio = statistics.median(row["products_secs"] / base["products_secs"] for row, base in pairs)
    more = ((row["products_secs"] - base["products_secs"]) / base["cpu_secs"] for row, base in pairs)
    return f"{middle['products_secs']:12.2f}{ratio:9.2f}{1 + statistics.median(more):7.2f}"


def run_child(mesh: str, microbatches: int, args: argparse.Namespace) -> dict:
    names = ("config", "steps", "schedule", "remat", "policy", "matmul")
    flags = [f"--{name}={getattr(args, name)}" for name in names] + ["--floor"] * args.floor
    command = [sys.executable, __file__, "--child", mesh, f"--microbatches={microbatches}", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


class Prepared(NamedTuple):
    step: Any  # compiled: (state, batch) -> (state, metrics)
    state: Any
    batch: dict
    flops: int  # of the model, a step
    compile_secs: float
    model: Any


def prepare(
    config_name: str, mesh: str, *, remat: str, policy: str, microbatches: int, schedule: str = "gpipe"
) -> Prepared:
    """The reference work on a mesh, compiled."""
    import jax

    import parallax as px
    from parallax.analysis.traced.flops import flops_per_token
    from parallax.step.step import TrainStep, init_state, model_of, optimizer_of

    pp, dp, tp = map(int, mesh.split(","))
    px.simulate_devices(pp * dp * tp)
    config = config_of(config_name)
    if config.data.tokenizer == "bpe":
        config.model.vocab = config.data.bpe_vocab
    config.mesh.pp, config.mesh.dp, config.mesh.tp, config.mesh.simulate = pp, dp, tp, pp * dp * tp
    config.pipeline.remat, config.data_parallel.policy = remat, policy
    config.pipeline.microbatches, config.pipeline.schedule = microbatches, schedule
    settings = px.read_settings(config.to_dict())
    model = model_of(settings, px.make_mesh(settings.mesh, jax.devices()[: pp * dp * tp]))
    tx = optimizer_of(model)
    rows, seq = settings.data.global_batch, settings.data.seq
    batch = jax.device_put(random_batch(rows, seq, settings.model.vocab), model.batch_sharding)
    state = init_state(model, tx, 0)
    started = time.perf_counter()
    step = TrainStep(model, tx, 0).lower(rows, seq).compile()
    compile_secs = time.perf_counter() - started
    flops = flops_per_token(settings.model, model.plan.declared, seq=seq) * rows * seq
    return Prepared(step, state, batch, flops, compile_secs, model)


def measure(args: argparse.Namespace) -> dict:
    import jax

    names = ("remat", "policy", "microbatches", "schedule")
    work = prepare(args.config, args.child, **{name: getattr(args, name) for name in names})
    state, _ = jax.block_until_ready(work.step(work.state, work.batch))
    alone = products_alone(work.model, *work.batch["tokens"].shape) if args.floor else None
    cpu, wall, rates, products = [], [], [], []
    for _ in range(args.steps):
        rates.append(matmul_rate(args.matmul))
        if alone:
            products.append(alone())
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        state, _ = jax.block_until_ready(work.step(state, work.batch))
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - wall_start)
    shares = [work.flops / secs / rate for secs, rate in zip(cpu, rates, strict=True)]
    return ({"products_secs": statistics.median(products)} if products else {}) | {
        "share": statistics.median(shares),
        "cpu_secs": statistics.median(cpu),
        "wall_secs": statistics.median(wall),
        "compile_secs": work.compile_secs,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def products_alone(model: Any, rows: int, seq: int) -> Callable[[], float]:
    """What runs the matrix products of a step alone on each device of the model's mesh, and returns CPU seconds."""
    import jax
    from jax.sharding import PartitionSpec as P

    counts = products_of(model, rows, seq)

    def compute(operands: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        pairs = zip(counts, operands, strict=True)
        return [repeated(left, right, dims, times) for ((*_, dims), times), (left, right) in pairs]

    def repeated(left: jax.Array, right: jax.Array, dims: Any, times: int) -> jax.Array:
        def turn(_: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            left, _ = carried
            result = jax.lax.dot_general(left, right, dims)
            # So that the next turn's product is another one.
            return left.at[(0,) * left.ndim].set(result[(0,) * result.ndim]), result

        like = jax.eval_shape(lambda: jax.lax.dot_general(left, right, dims))
        return jax.lax.fori_loop(0, times, turn, (left, jax.numpy.zeros(like.shape, like.dtype)))[1]

    program = jax.jit(jax.shard_map(compute, mesh=model.mesh, in_specs=P(), out_specs=P()))
    whole = jax.sharding.NamedSharding(model.mesh, P())
    operands = [tuple(jax.device_put(jax.numpy.ones(shape), whole) for shape in pair) for (*pair, _), _ in counts]
    jax.block_until_ready(program(operands))

    def run() -> float:
        started = time.process_time()
        jax.block_until_ready(program(operands))
        return time.process_time() - started

    return run


def products_of(model: Any, rows: int, seq: int) -> list[tuple[tuple, int]]:
    """The products of a step on a device of the first stage, ((left shape, right shape, dims), times)."""
    from parallax.analysis.traced.trace import step_program, walk

    def count(equation: Any, _: Any) -> Counter:
        if equation.primitive.name != "dot_general":
            return Counter()
        shapes = (operand.aval.shape for operand in equation.invars)
        return Counter([(*shapes, equation.params["dimension_numbers"])])

    first = dict.fromkeys(model.axis_sizes, 0)
    return [*walk(step_program(model, rows, seq), rank=first, count=count).items()]


def random_batch(rows: int, seq: int, vocab: int) -> dict:
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, vocab, (rows, seq), dtype=np.int32)
    positions = np.tile(np.arange(seq, dtype=np.int32), (rows, 1))
    labels = np.roll(tokens, -1, axis=1)
    return {"tokens": tokens, "labels": labels, "segments": np.ones_like(tokens), "positions": positions}


def matmul_rate(size: int) -> float:
    """FLOPs per CPU second of float32 matmuls with `size` rows and columns."""
    import jax

    square = jax.numpy.ones((size, size))
    product = jax.jit(lambda a: a @ a)
    product(square).block_until_ready()
    cpu = time.process_time()
    for _ in range(MATMUL_TIMES):
        product(square).block_until_ready()
    return MATMUL_TIMES * 2 * size**3 / (time.process_time() - cpu)


if __name__ == "__main__":
    run_benchmark(main)
