"""The overhead of Parallax: its training step compared with the same model in bare JAX, in one process, alternating.

    python benchmarks/bare.py [--config bench_small] [--remat none] [--microbatches 8] [--dtype float32] [--rounds 5]

One device, mesh 1·1·1. Three steps start from the same parameters and take the same batch of packed documents: ours;
plain, as one writes it first in JAX; and best, the fastest form known on CPUs (benchmarks/bare_model.py). Each round
takes a step of each. CPU seconds, over all threads, and wall seconds are medians over rounds, ratios the medians of
rounds; the last line is ours over best in CPU seconds.

The losses of the first step and after three steps must agree, or the benchmark fails: it compares equal work.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from arguments import WORKS, Arguments, config_of, run_benchmark, whole_number

CHECKED_STEPS = (0, 3)  # the first, and the one after three updates
# Relative, between losses: float32 adds in another order; bfloat16 has 8 bits, and forms round at different places.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-3}


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"config": "tiny_gqa", "microbatches": 2, "rounds": 3})
    parser.add_argument("--config", default="bench_small", choices=WORKS)
    parser.add_argument("--remat", default="none", choices=["none", "layer"])
    parser.add_argument("--microbatches", type=whole_number, default=8)
    parser.add_argument("--dtype", choices=list(TOLERANCES), help="of compute; the config's where it is not given")
    parser.add_argument("--rounds", type=whole_number, default=5, help="3 or more")
    args = parser.parse_args()
    if args.rounds < max(CHECKED_STEPS):
        parser.error(f"--rounds={args.rounds} is too few to compare losses after three steps; use 3 or more")
    import parallax as px

    px.simulate_devices(1)
    config = config_of(args.config)
    config.mesh.pp = config.mesh.dp = config.mesh.tp = config.mesh.simulate = 1
    config.model.dtype = args.dtype or config.model.dtype
    config.pipeline.remat, config.pipeline.microbatches = args.remat, args.microbatches
    settings = px.read_settings(config.to_dict())
    compare(prepare(settings), args.rounds, TOLERANCES[settings.model.dtype])


def prepare(settings: Any) -> dict[str, Callable[[], float]]:
    """By name, a function that runs the next step of a form and returns its loss."""
    import jax
    from bare_model import BEST, PLAIN, init_state, make_train_step

    import parallax as px

    batch = packed_batch(settings.data.global_batch, settings.data.seq, settings.model.vocab)
    step = px.step_of(settings, px.make_mesh(settings.mesh, jax.devices()[:1]))
    state, batch = step.init(), jax.device_put(batch, step.model.batch_sharding)
    forms = {"plain": PLAIN, "best": BEST}
    bare = {name: (make_train_step(form, settings), init_state(form, state.params)) for name, form in forms.items()}
    return {name: stepper(*both, batch) for name, both in {"ours": (step.take, state), **bare}.items()}


def stepper(step: Callable, state: Any, batch: dict) -> Callable[[], float]:
    """A function that runs one more step with each call and returns its loss."""
    import jax

    def take() -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(step(state, batch))
        return float(metrics["loss"])

    return take


def compare(steps: dict[str, Callable[[], float]], rounds: int, tolerance: float) -> None:
    """Run steps of each in turn, after one to compile; print the table and the ratios."""
    losses, cpu, wall = ({name: [] for name in steps} for _ in range(3))
    for _ in range(rounds + 1):
        for name, step in steps.items():
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            losses[name].append(step())
            cpu[name].append(time.process_time() - cpu_start)
            wall[name].append(time.perf_counter() - wall_start)
    print("form    CPU s/step  wall s/step  first loss  after 3 steps")
    for name in steps:
        first, later = (losses[name][step] for step in CHECKED_STEPS)
        secs = [statistics.median(values[name][1:]) for values in (cpu, wall)]
        print(f"{name:8}{secs[0]:10.3f}{secs[1]:13.3f}{first:12.6f}{later:15.6f}")
    for name in ("plain", "best"):
        for step in CHECKED_STEPS:
            ours, bare = losses["ours"][step], losses[name][step]
            assert abs(bare / ours - 1) <= tolerance, f"loss after {step} steps: ours {ours}, {name} {bare}"
    for title, secs, name in (("wall", wall, "best"), ("plain", cpu, "plain"), ("bare", cpu, "best")):
        ratio = statistics.median(ours / bare for ours, bare in zip(secs["ours"][1:], secs[name][1:]))
        print(f"ours/{title} {ratio:.3f}")


def packed_batch(rows: int, seq: int, vocab: int) -> dict:
    """Random tokens in documents of about a quarter of a row; 0 ends one."""
    import numpy as np

    import parallax as px

    random = np.random.default_rng(0)
    ids = random.integers(1, vocab, (rows, seq + 1), dtype=np.int32)
    ids[random.random(ids.shape) < 4 / seq] = 0
    return px.as_batch(ids, end=0)


if __name__ == "__main__":
    run_benchmark(main)
