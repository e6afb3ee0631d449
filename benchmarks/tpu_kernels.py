"""Cycles of attention kernels on a TPU, as its compiler schedules them: a full layer and one with a window.

    python benchmarks/tpu_kernels.py [--topology v5p:2x2x1] [--window 1024] [--blocks 128 256 512]

JAX's splash with blocks of each size, and this project's kernels for short windows, forward and backward, for one row
of --seq tokens. XLA knows no cycles of kernels, but their compiler can write its schedule into files: instruction
bundles, one a cycle. Parts of a kernel count as often as they run. Waits for memory are not in a schedule, nor is it
known how cores share the steps, so these are cycles of one core. The chips need not be present.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from arguments import Arguments, absent_devices, run_benchmark, whole_number

BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s")
SKIP = re.compile(r"sbr\.rel \([^)]*\) target = \$region(\d+)")
REGION = re.compile(r"(?:Start/End empty|Start|End) region (\d+)")


class Kernel(NamedTuple):
    """A kernel's name, its steps, and how often each part runs that a step may skip, in order."""

    name: str
    steps: int
    runs: tuple[int, ...]


def main() -> None:
    smallest = {"seq": 1024, "heads": 1, "window": 256, "blocks": [256]}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--topology", default="v5p:2x2x1", help="chips that need not be present")
    parser.add_argument("--seq", type=whole_number, default=8192)
    parser.add_argument("--heads", type=whole_number, default=16)
    parser.add_argument("--width", type=whole_number, default=128, help="of a head")
    parser.add_argument("--window", type=whole_number, default=1024, help="tokens that a query attends to")
    parser.add_argument("--blocks", type=whole_number, nargs="+", default=[128, 256, 512], help="sizes for splash")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Read when the compiler is loaded.
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        device, *_ = absent_devices(args.topology)
        print("| kernels | window | blocks | steps | Mcycles |", "|---" * 5 + "|", sep="\n")
        for name, window, size, attend, kernels in layers(args):
            compile_for(device, attend, args)
            cycles = sum(cycles_of(kernel, take_schedule(Path(folder), kernel.name)) for kernel in kernels)
            steps = sum(kernel.steps for kernel in kernels)
            print(f"| {name} | {window or '-'} | {size} | {steps} | {cycles / 1e6:.2f} |", flush=True)
            for path in Path(folder).iterdir():
                path.unlink()


def layers(args: Any) -> Iterator[tuple[str, int, int, Callable, list[Kernel]]]:
    """Names, windows, blocks, attention of one row, and its kernels."""
    from parallax.model.kernels import splash_window

    for window in (0, args.window):
        for size in args.blocks:
            yield "splash", window, size, *of_splash(args, window, size)
    form = splash_window.ShortWindow(args.window, cap=0.0, interpret=False)
    size, tokens = splash_window.window_tokens(args.seq, args.window)
    count, before = args.seq // size, tokens // size - 1
    kernels = [
        Kernel("splash_window_fwd", args.heads * count, (args.heads * count,)),
        Kernel(
            "splash_window_bwd",
            args.heads * (count + before),
            (args.heads, args.heads * (count - 1), args.heads * count),
        ),
    ]

    def attend(segments: Any, q: Any, k: Any, v: Any) -> Any:
        rows = (x[None] for x in (q, k, v, segments))
        return splash_window.attention_in_short_window(*rows, None, form)[0]

    yield "this project's", args.window, size, attend, kernels


def of_splash(args: Any, window: int, size: int) -> tuple[Callable, list[Kernel]]:
    """Attention by splash with these blocks, and its kernels. A step may begin a sum, compute, and end a sum."""
    import jax
    import numpy as np
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    from parallax.model.kernels.splash import PlacesMask

    passes = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    mask = splash.MultiHeadMask([PlacesMask(args.seq, 1, window)] * args.heads)
    sizes = splash.BlockSizes(**dict.fromkeys(passes, size))
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    tables = {"fwd": kernel.fwd_mask_info, "dq": kernel.dq_mask_info, "dkv": kernel.dkv_mask_info}
    kernels, sums = [], args.heads * args.seq // size
    for name, table in tables.items():
        blocks = np.asarray(table.block_mask)
        runs = sums, args.heads * int((blocks > 0).sum()), sums
        kernels.append(Kernel(f"splash_mha_{name}", args.heads * blocks.size, runs))
    return lambda segments, q, k, v: kernel(q, k, v, splash.SegmentIds(segments, segments)), kernels


def compile_for(device: Any, attend: Callable, args: Any) -> None:
    """Compiles attention and its gradients."""
    import jax
    from jax.sharding import SingleDeviceSharding

    def run(segments: Any, q: Any, k: Any, v: Any, dy: Any) -> Any:
        return jax.vjp(lambda *heads: attend(segments, *heads), q, k, v)[1](dy)

    whole = SingleDeviceSharding(device)
    heads = jax.ShapeDtypeStruct((args.heads, args.seq, args.width), "bfloat16", sharding=whole)
    jax.jit(run).lower(jax.ShapeDtypeStruct((args.seq,), "int32", sharding=whole), *[heads] * 4).compile()


def take_schedule(folder: Path, kernel: str) -> str:
    """The last schedule of this kernel that the compiler wrote."""
    written = [path for path in folder.glob(f"*{kernel}*-final_bundles.txt") if "analysis" not in path.name]
    return max(written).read_text(encoding="utf-8")


def cycles_of(kernel: Kernel, schedule: str) -> int:
    length, parts = parts_of(schedule)
    assert len(parts) == len(kernel.runs), (kernel.name, parts)
    always = length - sum(parts)
    return kernel.steps * always + sum(part * times for part, times in zip(parts, kernel.runs, strict=True))


def parts_of(schedule: str) -> tuple[int, list[int]]:
    """Bundles of a schedule's loop over steps, and of each part of it that a step may skip: the innermost ones."""
    first, last, ends, skips = None, 0, {}, []
    for line in schedule.splitlines():
        if not (bundle := BUNDLE.match(line)):
            continue
        last = int(bundle[1], 16)
        if first is None and " LB:" in line[:20]:
            first = last
        skips += [(last, region) for region in SKIP.findall(line)]
        for region in REGION.findall(line):
            ends.setdefault(region, last)
    spans = [(start, ends[region]) for start, region in skips if ends.get(region, 0) > start]
    return last - (first or 0), [end - start for start, end in spans if not _has_inner(start, end, spans)]


def _has_inner(start: int, end: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any((start, end) != span and start <= span[0] and span[1] <= end for span in spans)


if __name__ == "__main__":
    run_benchmark(main)
