"""Draws when a chip computes, sends and waits in steps compiled without chips.

    python benchmarks/timeline.py --config llama_1b_16 --topology v5e:4x4 --rows 0 12 --kernels 1 --svg timeline.svg

Needs the TPU compiler, pip install -e '.[tpu]'. Rows are those of benchmarks/overlap.py, and so are the times: compute
as the compiler estimates its cycles, messages as long as their bytes take over their links, kernels at the share of
peak that --kernels says. Each step is drawn whole, and below it a turn of each loop over layers, or over the ticks of
a pipeline whose stages are single layers. The slowest rank of a pipeline runs a pass in a part of the ticks; the whole
step has it in each of them, shorter by that part, and an average rank waits for others in a part of that.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from arguments import Arguments, absent_devices, run_benchmark, share
from overlap import ROWS, compiled_row, no_row, title

from parallax.hardware.chips import KERNEL_EFFICIENCY


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"config": "tiny_gqa", "topology": "v5e:2x4", "rows": [0]})
    parser.add_argument("--config", default="llama_1b_16", choices=ROWS)
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--rows", nargs="+", type=int, default=[0, 11], help="rows of benchmarks/overlap.py")
    parser.add_argument("--kernels", type=share, default=KERNEL_EFFICIENCY, help="share of peak that kernels reach")
    parser.add_argument("--names", nargs="+", default=[], help="names of these rows in the picture")
    parser.add_argument("--svg", help="a file for the picture")
    args = parser.parse_args()
    if wrong := no_row(args.config, args.rows):
        parser.error(wrong)
    if args.names and len(args.names) != len(args.rows):
        parser.error(f"--names: {len(args.names)} names for {len(args.rows)} rows; write one for each")
    devices = absent_devices(args.topology)
    from timeline_picture import in_milliseconds, picture  # here, since --help needs no JAX

    names = args.names or [f"row {row}" for row in args.rows]
    steps = [compiled_step(args, devices, row, name) for row, name in zip(args.rows, names, strict=True)]
    for step in steps:
        print(f"{step.words}: {step.changes}")
        for strip in (step.step, *step.turns):
            print(f"  {in_milliseconds(strip)}")
    if args.svg:
        words = f"A step of {args.config} on {args.topology}, as compiled"
        command = shlex.join(["python", "benchmarks/timeline.py", *sys.argv[1:]])
        Path(args.svg).write_text(picture(words, command, steps), encoding="utf-8")


def compiled_step(args: argparse.Namespace, devices: list, number: int, name: str) -> Any:
    """The timeline of a row."""
    from timeline_picture import drawn

    from parallax.analysis.planned.step_time import Clock, step_time
    from parallax.hardware.chips import chip

    row, where = ROWS[args.config][number], chip(args.topology)
    read, flops, matmul = compiled_row(args.config, devices, row)
    time = step_time(read, where, flops, matmul=matmul, kernel_efficiency=args.kernels)
    clock = Clock(read.mesh, where, "bfloat16", lockstep=True, kernel_efficiency=args.kernels)
    words = f"{name}: {1e3 * time.total_secs:.0f} ms, MFU {100 * time.mfu:.1f} %"
    return drawn(clock, read.timeline, words, "as configured" if row == ROWS[args.config][0] else title(row))


if __name__ == "__main__":
    run_benchmark(main)
