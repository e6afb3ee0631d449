"""Long rows: attention in blocks compared with its plain form, and a step on context ranks with one on one device.

    python benchmarks/context.py [--seqs 256 1024 4096] [--ranks 4] [--seq 1024] [--forms all_gather ring ulysses]

The first table is forward and backward pass of one layer's attention (8 query heads, 4 key heads of 32, packed
documents, 8,192 tokens), in float32: *plain* is jax.nn.dot_product_attention with a mask, *blocks* is
parallax.model.blockwise. MiB are the compiled program's temporaries.

The second is a training step of configs/bench_small.py at --seq, with as many tokens as there: on one device, and on
--ranks simulated devices along mesh.cp, in one process and in turns. CPU seconds, over all threads, and ratios are
medians over rounds. All losses must agree, or the benchmark fails.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from arguments import WORKS, Arguments, config_of, run_benchmark, whole_number
from bare import packed_batch, stepper

TOKENS, HEADS, GROUPS, WIDTH = 8192, 8, 4, 32
FORMS = ("all_gather", "ring", "ulysses")
TOLERANCE = 1e-5  # relative, between losses after a few steps: float32 adds in another order


def main() -> None:
    smallest = {"seqs": [64], "seq": 64, "config": "tiny_gqa", "ranks": 2, "rounds": 1, "forms": ["ring"]}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--seqs", nargs="+", type=whole_number, default=[256, 1024, 4096], help="of the first table")
    parser.add_argument("--config", default="bench_small", choices=WORKS)
    parser.add_argument("--seq", type=whole_number, default=1024, help="of the second table")
    parser.add_argument("--ranks", type=whole_number, default=4)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--rounds", type=whole_number, default=5)
    args = parser.parse_args()
    import parallax as px

    px.simulate_devices(args.ranks)
    print("attention    seq   CPU ms  / plain  temporaries MiB")
    for seq in args.seqs:
        attention(seq, args.rounds)
    print("step             CPU s  / one device  loss")
    steps(args)


def attention(seq: int, rounds: int) -> None:
    """Print the figures of each form for rows of `seq` tokens."""
    import jax
    import jax.numpy as jnp

    from parallax.model.blockwise import blockwise_attention
    from parallax.model.context import causal_mask

    scale = WIDTH**-0.5

    def plain(q, k, v, segments):
        return jax.nn.dot_product_attention(q, k, v, mask=causal_mask(segments), scale=scale, implementation="xla")

    def blocks(q, k, v, segments):
        return blockwise_attention(q, k, v, segments, scale=scale)

    rows = max(TOKENS // seq, 1)
    keys = jax.random.split(jax.random.key(0), 3)
    heads = [jax.random.normal(key, (rows, seq, n, WIDTH)) for key, n in zip(keys, (HEADS, GROUPS, GROUPS))]
    segments = packed_batch(rows, seq, 256)["segments"]
    programs = {}
    for form in (plain, blocks):
        passes = jax.grad(lambda *heads, form=form: jnp.sum(jnp.sin(form(*heads, segments))), (0, 1, 2))
        programs[form.__name__] = jax.jit(passes).lower(*heads).compile()
    secs = in_turns(
        {name: lambda run=run: jax.block_until_ready(run(*heads)) for name, run in programs.items()}, rounds
    )
    for name, program in programs.items():
        ratio = statistics.median(own / other for own, other in zip(secs[name], secs["plain"]))
        held = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{name:10}{seq:6}{1e3 * statistics.median(secs[name]):9.0f}{ratio:9.2f}{held:17.1f}", flush=True)


def steps(args: argparse.Namespace) -> None:
    """Print a row for one device, and one for each form on context ranks."""
    import jax

    import parallax as px

    config = config_of(args.config)
    tokens = config.data.global_batch * config.data.seq
    config.data.seq, config.data.global_batch = args.seq, max(tokens // args.seq, 1)
    config.mesh.pp = config.mesh.dp = config.mesh.tp = 1
    config.mesh.simulate = args.ranks
    config.pipeline.microbatches = 1
    losses: dict[str, list[float]] = {}
    takes: dict[str, Callable[[], Any]] = {}
    for name, ranks in [("one device", 1), *((form, args.ranks) for form in args.forms)]:
        config.mesh.cp, config.mesh.simulate = ranks, ranks
        config.layout.context = name if ranks > 1 else "all_gather"
        settings = px.read_settings(config.to_dict())
        batch = packed_batch(settings.data.global_batch, args.seq, settings.model.vocab)
        step = px.step_of(settings, px.make_mesh(settings.mesh, jax.devices()[:ranks]))
        take = stepper(step.take, step.init(), jax.device_put(batch, step.model.batch_sharding))
        losses[name] = []
        takes[name] = lambda take=take, name=name: losses[name].append(take())
    secs = in_turns(takes, args.rounds)
    for name in takes:
        ratio = statistics.median(own / other for own, other in zip(secs[name], secs["one device"]))
        print(f"{name:12}{statistics.median(secs[name]):10.2f}{ratio:14.3f}  {losses[name][-1]:.6f}", flush=True)
        assert abs(losses[name][-1] / losses["one device"][-1] - 1) <= TOLERANCE, f"{name}: {losses}"


def in_turns(takes: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each, round by round; one round before them compiles."""
    secs: dict[str, list[float]] = {name: [] for name in takes}
    for at in range(rounds + 1):
        for name, take in takes.items():
            start = time.process_time()
            take()
            if at:
                secs[name].append(time.process_time() - start)
    return secs


if __name__ == "__main__":
    run_benchmark(main)
