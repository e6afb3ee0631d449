"""Attention kernels for packed documents on this machine's device: time and TFLOP/s, forward and backward.

    python benchmarks/attention.py [--tokens 16384] [--seqs 2048 8192 32768] [--sliding-window 1024] [--blocks 64,32]
    python benchmarks/attention.py --topologies v5p:2x2x1 H100:1 [--seqs 8192]

Windows of packed documents, `--document` tokens each, in bfloat16. *cuDNN, causal alone* knows no documents. The
kernels for Triton are timed with each of the `--blocks`, too, tokens on a side forward and backward. TFLOP/s
are of the products of the scores below the diagonal, as if a window were one document; the backward pass has 2.5 times
those of the forward pass. A kernel that refuses the windows says why. The second table has a layer with a sliding
window, forward and backward, and its time over that of the full layer: the median of rounds in which both run in turn,
on CPUs in CPU time.

With --topologies it is that of chips that are not here, one of each: what XLA makes of its loops in the time that its
compiler estimates, on GPUs by a roofline, and fused kernels at the peak's speed. Needs their compilers: see
benchmarks/tpu_compile.py and benchmarks/gpus.py.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, absent_devices, run_benchmark, whole_number

SMALLEST = {"tokens": 256, "seqs": [128], "heads": 2, "width": 16, "document": 64, "rounds": 2, "sliding_window": 32}
CALLS = 3  # between two readings of the clock


def main() -> None:
    parser = Arguments(description=__doc__, smallest=SMALLEST)
    parser.add_argument("--tokens", type=whole_number, default=16_384, help="at least one window is computed")
    parser.add_argument("--seqs", type=whole_number, nargs="+", default=[2048, 8192, 32_768], help="tokens of a window")
    parser.add_argument("--heads", type=whole_number, default=16)
    parser.add_argument("--width", type=whole_number, default=128, help="of a head")
    parser.add_argument("--document", type=whole_number, default=512, help="tokens of a document")
    parser.add_argument("--sliding-window", type=whole_number, default=1024, help="tokens that a query attends to")
    parser.add_argument("--blocks", type=block_sizes, nargs="+", default=[], help="FORWARD,BACKWARD for Triton")
    parser.add_argument("--rounds", type=whole_number, default=8)
    parser.add_argument("--topologies", nargs="+", default=[], metavar="TOPOLOGY", help="chips that are not here")
    args = parser.parse_args()
    for number, where in enumerate(args.topologies):
        devices = absent_devices(where)
        for line in as_compiled(where, devices, args)[2 * bool(number) :]:
            print(line, flush=True)
    if args.topologies:
        return
    import jax

    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for line in attention(args):
        print(line, flush=True)


def block_sizes(text: str) -> tuple[int, int]:
    forward, backward = map(int, text.split(","))
    return forward, backward


def attention(args: argparse.Namespace) -> Iterator[str]:
    """Lines of the tables, by window and kernel."""
    import jax
    import jax.numpy as jnp

    yield "| windows | kernel | forward | forward and backward | TFLOP/s forward | backward |"
    yield "|---" * 6 + "|"
    in_window = []
    for seq in args.seqs:
        rows = max(1, args.tokens // seq)
        shape = rows, seq, args.heads, args.width
        q, k, v, dy = (jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4))
        segments = jnp.broadcast_to(jnp.arange(seq) // args.document, (rows, seq)).astype(jnp.int32)
        flops = 2 * 2 * rows * args.heads * args.width * seq * (seq + 1) // 2
        for name, attend in kernels_of(segments, args.width**-0.5, blocks=args.blocks).items():
            try:
                forward = median_secs(jax.jit(attend), args.rounds, q, k, v)
                both = median_secs(jax.jit(partial(gradients, attend)), args.rounds, q, k, v, dy)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                yield f"| {rows} x {seq} | {name} | no: {str(error).splitlines()[0][:100]} |"
                continue
            rates = flops / forward / 1e12, 2.5 * flops / max(both - forward, 1e-9) / 1e12
            millis = f"{1e3 * forward:.2f} ms | {1e3 * both:.2f} ms"
            yield f"| {rows} x {seq} | {name} | {millis} | {rates[0]:.0f} | {rates[1]:.0f} |"
            windowed = kernels_of(segments, args.width**-0.5, args.sliding_window, blocks=args.blocks).get(name)
            if windowed:
                full, near = (jax.jit(partial(gradients, each)) for each in (attend, windowed))
                millis, share = in_turn(full, near, args.rounds, q, k, v, dy)
                in_window.append(f"| {rows} x {seq} | {name} | {millis:.2f} ms | {share:.2f} |")
    yield from ("", f"| windows | kernel | {args.sliding_window} tokens, both | of the full layer |", "|---" * 4 + "|")
    yield from in_window


def as_compiled(where: str, devices: list, args: argparse.Namespace) -> list[str]:
    """Lines of the table of a layer with a window and the full one, forward and backward, on one of these devices."""
    import jax
    from jax.experimental.layout import Format, Layout
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import parallax as px
    from parallax.analysis.compiled.program import read_compiled
    from parallax.analysis.planned.step_time import Clock
    from parallax.config.sections import MeshConfig
    from parallax.hardware.chips import chip
    from parallax.sharding.compiler import compiler_options

    mesh = px.make_mesh(MeshConfig(pp=1, dp=1, tp=1, simulate=0), devices[:1])
    # In a memory layout of the compiler's choice, as between products.
    platform, of_choice = devices[0].platform, Format(Layout.AUTO, NamedSharding(mesh, P()))
    clock = Clock(mesh, chip(where), "bfloat16", lockstep=True, kernel_efficiency=1.0)

    def secs(name: str, window: int, seq: int) -> tuple[float, float]:
        def run(segments: Any, *heads: Any) -> Any:
            return gradients(kernels_of(segments, args.width**-0.5, window, platform)[name], *heads)

        mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=True)
        rows = max(1, args.tokens // seq)
        heads = jax.ShapeDtypeStruct((rows, seq, args.heads, args.width), "bfloat16")
        segments = jax.ShapeDtypeStruct((rows, seq), "int32")
        lowered = jax.jit(mapped, in_shardings=of_choice, out_shardings=of_choice).lower(segments, *[heads] * 4)
        program = lowered.compile(compiler_options=compiler_options(mesh))
        spent = clock.run(read_compiled(program, mesh).timeline)
        return sum(spent.values()), spent["attention"]

    head = f"| chip | windows | kernel | full | {args.sliding_window} tokens | of the full layer | of its kernels |"
    lines = [head, "|---" * 7 + "|"]
    for seq in args.seqs:
        for name in kernels_of(None, 1.0, args.sliding_window, platform):
            full, near = (secs(name, window, seq) for window in (0, args.sliding_window))
            shares = [f"{short / long:.3f}" if long else "-" for short, long in zip(near, full)]
            figures = f"{1e3 * full[0]:.2f} ms | {1e3 * near[0]:.2f} ms | {' | '.join(shares)}"
            lines.append(f"| {where} | {max(1, args.tokens // seq)} x {seq} | {name} | {figures} |")
    return lines


def kernels_of(
    segments: Any, scale: float, sliding_window: int = 0, platform: str = "", blocks: Iterable[tuple[int, int]] = ()
) -> dict[str, Callable]:
    """Attention of q, k, v to documents, by kernel; with a sliding window, of kernels that have them."""
    import jax

    from parallax.model.kernels.blockwise import blockwise_attention
    from parallax.model.kernels.cudnn import cudnn_attention
    from parallax.model.kernels.pallas import pallas_attention
    from parallax.model.kernels.splash import splash_attention
    from parallax.model.kernels.triton import TritonKernelOf, triton_attention
    from parallax.model.mask import Mask
    from parallax.sharding.platform import platform_traced

    def causal_alone(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=scale, implementation="cudnn")

    def with_segments(attend: Callable, q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, Mask(segments, window=sliding_window), scale=scale)

    def in_blocks(block: int, backward_block: int, q: Any, k: Any, v: Any, mask: Mask, *, scale: float) -> Any:
        return pallas_attention(TritonKernelOf(scale, 0.0, block, backward_block), q, k, v, mask)

    in_xla = {"blocks in XLA": partial(with_segments, blockwise_attention)}
    tried = {
        f"Triton, blocks of {forward} and {backward}": partial(with_segments, partial(in_blocks, forward, backward))
        for forward, backward in blocks
    }
    of_platform = {
        "gpu": {
            "cuDNN, mask of documents as a bias": partial(with_segments, cudnn_attention),
            "cuDNN, causal alone": causal_alone,
            "Triton, segments": partial(with_segments, triton_attention),
            **tried,
        },
        "tpu": {"splash, segments": partial(with_segments, splash_attention)},
    }
    kernels = of_platform.get(platform or platform_traced(), {}) | in_xla
    return {name: kernel for name, kernel in kernels.items() if not (sliding_window and kernel is causal_alone)}


def gradients(attend: Callable, q: Any, k: Any, v: Any, dy: Any) -> Any:
    import jax

    return jax.vjp(attend, q, k, v)[1](dy)


def median_secs(run: Callable, rounds: int, *arrays: Any) -> float:
    """Seconds of a call, the median of all rounds; the first call, which compiles, is excluded."""
    import jax

    jax.block_until_ready(run(*arrays))
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(CALLS):
            made = run(*arrays)
        jax.block_until_ready(made)
        found.append((time.perf_counter() - started) / CALLS)
    return statistics.median(found)


def in_turn(full: Callable, near: Callable, rounds: int, *arrays: Any) -> tuple[float, float]:
    """Milliseconds of a call of `near`, and its share of one of `full`, both medians over rounds that call each; on
    CPUs of CPU time, which other work changes less."""
    import jax

    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    secs: dict[Callable, list[float]] = {full: [], near: []}
    for call in secs:
        jax.block_until_ready(call(*arrays))
    for _ in range(rounds):
        for call, took in secs.items():
            started = clock()
            jax.block_until_ready(call(*arrays))
            took.append(clock() - started)
    shares = [short / long for short, long in zip(secs[near], secs[full])]
    return 1e3 * statistics.median(secs[near]), statistics.median(shares)


if __name__ == "__main__":
    run_benchmark(main)
