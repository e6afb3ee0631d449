"""Long rows: attention in blocks compared with its plain form, and a step on context ranks with one on one device.

    python benchmarks/context.py [--seqs 256 1024 4096] [--ranks 4] [--seq 1024] [--forms all_gather ring ulysses]
    python benchmarks/context.py --topology v5e:4x4 [--seqs 256 512 1024 2048 8192]

The first table is forward and backward pass of one layer's attention (8 query heads, 4 key heads of 32, packed
documents, 8,192 tokens), in float32: *plain* is jax.nn.dot_product_attention with a mask, *blocks* is
parallax.model.kernels.blockwise. MiB are the compiled program's temporaries.

The second is a training step of configs/bench_small.py at --seq, with as many tokens as there: on one device, and on
--ranks simulated devices along mesh.cp, in one process and in turns. CPU seconds, over all threads, and ratios are
medians over rounds. All losses must agree, or the benchmark fails.

With --topology there is one table: the same passes in bfloat16 (16 query heads, 4 key heads of 128) on one chip, in
milliseconds as parallax.analysis estimates its compiled program. *saved* is the plain form with its softmax saved
between the passes, as in a training step; for *plain* the compiler may share it within one program. It needs the chip's
compiler, pip install -e '.[tpu]' or '.[gpu-compiler]'.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
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
    parser.add_argument("--topology", default="", help="chips that need not be present, as v5e:4x4 or H100:1")
    args = parser.parse_args()
    if args.topology:
        compiled(args.topology, args.seqs)
        return
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

    from parallax.model.kernels.blockwise import blockwise_attention
    from parallax.model.mask import Mask

    scale = WIDTH**-0.5

    def plain(q, k, v, segments):
        return jax.nn.dot_product_attention(
            q, k, v, mask=Mask(segments).dense(q.shape[1]), scale=scale, implementation="xla"
        )

    def blocks(q, k, v, segments):
        return blockwise_attention(q, k, v, Mask(segments), scale=scale)

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


def compiled(topology: str, seqs: Sequence[int]) -> None:
    """Print the time of both forms as compiled for one chip."""
    import jax
    import jax.numpy as jnp
    from arguments import absent_devices
    from einops import rearrange
    from jax import lax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import parallax as px
    from parallax.analysis.compiled.program import read_compiled
    from parallax.hardware.chips import chip
    from parallax.model.kernels.blockwise import blockwise_attention
    from parallax.model.mask import Mask

    heads, groups, width = 16, 4, 128
    scale = width**-0.5
    mesh = px.make_mesh(px.MeshConfig(pp=1, dp=1, tp=1), absent_devices(topology)[:1])
    here = NamedSharding(mesh, P())

    def plain(q, k, v, segments):
        return jax.nn.dot_product_attention(
            q, k, v, mask=Mask(segments).dense(q.shape[1]), scale=scale, implementation="xla"
        )

    def blocks(q, k, v, segments):
        return blockwise_attention(q, k, v, Mask(segments), scale=scale)

    @jax.custom_vjp
    def saved(q, k, v, segments):
        return forward(q, k, v, segments)[0]

    def forward(q, k, v, segments):
        grouped = rearrange(q, "B S (G H) J -> B S G H J", G=k.shape[2])
        scores = scale * jnp.einsum("BSGHJ,BTGJ->BGHST", grouped, k, preferred_element_type=jnp.float32)
        hidden = jnp.where(Mask(segments).dense(q.shape[1])[:, None], scores, -jnp.inf)
        weights = lax.optimization_barrier(jax.nn.softmax(hidden, axis=-1).astype(v.dtype))
        out = jnp.einsum("BGHST,BTGK->BSGHK", weights, v)
        return rearrange(out, "B S G H K -> B S (G H) K"), (grouped, k, v, weights)

    def backward(kept, dy):
        q, k, v, weights = kept
        dy = rearrange(dy, "B S (G H) K -> B S G H K", G=k.shape[2])
        d_weights = jnp.einsum("BSGHK,BTGK->BGHST", dy, v, preferred_element_type=jnp.float32)
        own = (d_weights * weights).sum(axis=-1, keepdims=True)
        d_scores = (scale * weights * (d_weights - own)).astype(q.dtype)
        dq = rearrange(jnp.einsum("BGHST,BTGJ->BSGHJ", d_scores, k), "B S G H J -> B S (G H) J")
        dk = jnp.einsum("BGHST,BSGHJ->BTGJ", d_scores, q)
        return dq, dk, jnp.einsum("BGHST,BSGHK->BTGK", weights, dy), None

    saved.defvjp(forward, backward)

    def millis(form, seq):
        rows = max(TOKENS // seq, 1)
        shapes = [
            jax.ShapeDtypeStruct((rows, seq, n, width), "bfloat16", sharding=here) for n in (heads, groups, groups)
        ]
        segments = jax.ShapeDtypeStruct((rows, seq), "int32", sharding=here)

        def passes(q, k, v, segments):
            loss = lambda *qkv: jnp.sum(form(*qkv, segments).astype(jnp.float32) ** 2)  # noqa: E731
            return jax.grad(loss, (0, 1, 2))(q, k, v)

        mapped = jax.jit(jax.shard_map(passes, mesh=mesh, in_specs=P(), out_specs=P()))
        program = mapped.lower(*shapes, segments).compile()
        return 1e3 * read_compiled(program, mesh).cycles / chip(topology).clock_hz

    print("seq     plain ms   saved ms  blocks ms  / saved")
    for seq in seqs:
        one, kept, own = (millis(form, seq) for form in (plain, saved, blocks))
        print(f"{seq:<8}{one:8.2f}{kept:11.2f}{own:11.2f}{own / kept:9.2f}", flush=True)


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
