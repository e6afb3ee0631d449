"""Published steps on GPUs, and the predicted times of the same layouts, compiled on a machine without GPUs.

    python benchmarks/published.py [--rows 0 3]

Needs XLA's compiler for GPUs, pip install -e '.[gpu-compiler]'. *predicted* is the time of the compiled program by
parallax.analysis (docs/gpus.md says what that rests on), and the last column is its share of the published time. A
published rate of tokens a GPU is taken as the time of a step.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Before JAX is imported: no device is asked for.
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, config_of, run_benchmark


class Published(NamedTuple):
    title: str
    secs: float  # of a step
    source: str
    config: str
    topology: str
    changes: Mapping[str, Any] = {}  # of the config, by "section.key"


MAXTEXT = "https://github.com/NVIDIA/dgxc-benchmarking/blob/v25.02/maxtext/README_70b.md"
TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
LLAMA_8B = {"model.vocab": 128_256, "model.d_ff": 14_336, "model.kv_heads": 8, "model.rope_theta": 500_000.0}
LLAMA_8B |= {"data.seq": 8192, "data.global_batch": 16, "pipeline.microbatches": 1, "loss.chunk_tokens": 4096}
LLAMA_8B |= {"pipeline.remat": "attention"}
FLOAT8 = {"model.matmul": "float8"}
TOKENS = 2 * 8192  # of a GPU in a step of torchtitan's
HERE = "docs/measured/h100.md"
ROWS = [
    Published("MaxText, Llama-3-70B on 128 H100", 15.563, MAXTEXT, "gpu_80gb_16x8", "H100:16x8"),
    Published("the same in FP8", 9.074, MAXTEXT, "gpu_80gb_16x8", "H100:16x8", FLOAT8),
    Published("torchtitan, Llama-3.1-8B on 8 H100", TOKENS / 6667, TORCHTITAN, "gpu_80gb_x8", "H100:1x8", LLAMA_8B),
    Published("the same in FP8", TOKENS / 8532, TORCHTITAN, "gpu_80gb_x8", "H100:1x8", LLAMA_8B | FLOAT8),
    Published("the same on 128 H100", TOKENS / 6514, TORCHTITAN, "gpu_80gb_x8", "H100:16x8",
              LLAMA_8B | {"data.global_batch": 256}),
    Published("the same on 128 H100 in FP8", TOKENS / 8380, TORCHTITAN, "gpu_80gb_x8", "H100:16x8",
              LLAMA_8B | FLOAT8 | {"data.global_batch": 256}),
    Published("this project, 1.2B on one H100", 3.83, HERE, "gpu_80gb", "H100:1"),
]  # fmt: skip
# Nobody published a time of it: it shows that the benchmark runs.
SMALL = {"mesh.simulate": 0, "mesh.dp": 8, "model.dtype": "bfloat16", "pipeline.microbatches": 1}
SMALLEST = [Published("tiny_gqa", 1.0, "nowhere", "tiny_gqa", "H100:1x8", SMALL)]


def main() -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("--rows", nargs="*", type=int, help="numbers of rows; all without it")
    args = parser.parse_args()
    rows = SMALLEST if args.smoke else ROWS
    if wrong := [at for at in args.rows or () if not 0 <= at < len(rows)]:
        parser.error(f"--rows {wrong[0]}: there are rows 0 to {len(rows) - 1}")
    print("| step | published | predicted | predicted / published |")
    print("|---|---|---|---|")
    for at in range(len(rows)) if args.rows is None else args.rows:
        started, row = time.perf_counter(), rows[at]
        secs = predicted_secs(row)
        print(f"| [{row.title}]({row.source}) | {row.secs:.2f} s | {secs:.3f} s | {secs / row.secs:.2f} |", flush=True)
        print(f"row {at}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


def predicted_secs(row: Published) -> float:
    """Seconds of the compiled step."""
    from parallax.analysis.planned.step_time import compile_and_read
    from parallax.analysis.planned.topology import devices_of, read_topology, without_chips
    from parallax.config.settings import read_settings
    from parallax.step.resolve import resolve

    without_chips(["--topology"])
    config = config_of(row.config)
    config.update_from_flattened_dict(row.changes)
    topology = read_topology(row.topology)
    settings = resolve(read_settings(config.to_dict()), topology.as_devices)
    return compile_and_read(settings, topology, devices_of(topology), kernel_efficiency=1.0).time.total_secs


if __name__ == "__main__":
    run_benchmark(main)
