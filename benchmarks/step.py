"""Speed of a training step, as a share of the machine's own matmul rate, and peak memory.

    python benchmarks/step.py [--meshes 1,1,1 1,4,2 2,2,2] [--steps 4] [--remat none] [--microbatches 0]

The work is configs/bench_small.py. Each mesh (pp,dp,tp) runs in a process of its own on simulated devices. CPU
seconds are counted, over all threads: steadier than wall time on a shared machine. Just before and after the
steps, the same process measures what a float32 matmul reaches, 2 x 2048^3 FLOPs a time.

    share = model FLOPs per CPU second of the step / matmul FLOPs per CPU second

Model FLOPs are 6 x parameters used in matmuls x tokens, plus causal attention; an embedding look-up, a recomputed
layer and a bubble count nothing.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MATMUL, MATMUL_TIMES = 2048, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=["1,1,1", "1,4,2", "2,2,2"], metavar="PP,DP,TP")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--remat", default="none", choices=["none", "layer", "stage"])
    parser.add_argument("--microbatches", type=int, default=0, help="0: 8 with a pipeline, else 1 row a device")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.steps, args.remat, args.microbatches)))
        return
    print("mesh    microbatches  share of matmul peak  CPU s/step  wall s/step  / first mesh  compile s  peak RSS")
    first = None
    for mesh in args.meshes:
        row = run_child(mesh, args)
        first = first or row
        print(
            f"{mesh:8}{row['microbatches']:12}{row['share']:21.1%}{row['cpu_secs']:13.2f}{row['wall_secs']:13.2f}"
            f"{row['cpu_secs'] / first['cpu_secs']:14.2f}{row['compile_secs']:11.1f}{row['peak_bytes'] / 2**30:7.2f} GiB",
            flush=True,
        )


def run_child(mesh: str, args: argparse.Namespace) -> dict:
    options = ["--steps", str(args.steps), "--remat", args.remat, "--microbatches", str(args.microbatches)]
    command = [sys.executable, __file__, "--child", mesh, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def measure(mesh_text: str, steps: int, remat: str, microbatches: int) -> dict:
    sys.path.insert(0, str(ROOT))
    import jax
    import numpy as np

    import parallax as px
    from configs.bench_small import get_config
    from parallax import plan
    from parallax.optimizer import make_optimizer
    from parallax.step import init_state, make_train_step

    pp, dp, tp = map(int, mesh_text.split(","))
    px.simulate_devices(pp * dp * tp)
    config = get_config()
    config.mesh.pp, config.mesh.dp, config.mesh.tp, config.mesh.simulate = pp, dp, tp, pp * dp * tp
    config.pipeline.remat = remat
    default = 8 if pp > 1 else config.data.global_batch // dp
    config.pipeline.microbatches = microbatches or default
    settings = px.read_settings(config.to_dict())
    mesh = px.make_mesh(settings.mesh)
    model = px.ShardedModel(settings.model, settings.layout, settings.pipeline, settings.loss, mesh)
    tx = make_optimizer(settings.optimizer, settings.train.steps, model.layouts)
    rows, seq = settings.data.global_batch, settings.data.seq
    batch = jax.device_put(random_batch(np, rows, seq, settings.model.vocab), model.batch_sharding)
    state = init_state(model, tx, 0)

    started = time.perf_counter()
    step = make_train_step(model, tx, 0).lower(state, batch).compile()
    compile_secs = time.perf_counter() - started
    state, _ = jax.block_until_ready(step(state, batch))
    before = matmul_rate(jax)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(steps):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    cpu_secs, wall_secs = (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps
    peak = (before + matmul_rate(jax)) / 2
    flops = plan.flops_per_token(settings.model, model.shapes, seq=seq) * rows * seq
    return {
        "microbatches": config.pipeline.microbatches,
        "share": flops / cpu_secs / peak,
        "cpu_secs": cpu_secs,
        "wall_secs": wall_secs,
        "compile_secs": compile_secs,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def random_batch(np, rows: int, seq: int, vocab: int) -> dict:
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, seq), dtype=np.int32)
    positions = np.tile(np.arange(seq, dtype=np.int32), (rows, 1))
    labels = np.roll(tokens, -1, axis=1)
    return {"tokens": tokens, "labels": labels, "segments": np.ones_like(tokens), "positions": positions}


def matmul_rate(jax) -> float:
    """FLOPs per CPU second of float32 matmuls."""
    square = jax.numpy.ones((MATMUL, MATMUL))
    product = jax.jit(lambda a: a @ a)
    product(square).block_until_ready()
    cpu = time.process_time()
    for _ in range(MATMUL_TIMES):
        product(square).block_until_ready()
    return MATMUL_TIMES * 2 * MATMUL**3 / (time.process_time() - cpu)


if __name__ == "__main__":
    main()
