"""Qwen2.5-7B on H100 and RTX 4090, as llm.q has published it, and as Parallax plans and compiles it.

    python benchmarks/llmq.py [--rows 0 3] [--analytic]

A step has 512 windows of 1024 tokens; weights and moments are in bfloat16. *Planned* is the analytic plan. *Compiled*
needs XLA's compiler for GPUs, pip install -e '.[gpu-compiler]', and is what parallax.analysis reads from the compiled
program (docs/gpus.md says what that rests on). *Gradients* is the dtype of their sums over microbatches, which in llm.q
is bfloat16. Tokens a second are those of all GPUs together, SOL is the share of the speed of light.
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


class Row(NamedTuple):
    topology: str
    dtype: str
    tokens_per_second: int  # published, in step 5
    sol: float
    file: str
    changes: Mapping[str, Any]


SOURCE = "https://github.com/IST-DASLab/llmq/blob/b77d969/benchmarks"
MODEL = dict(vocab=152_064, layers=28, d_model=3584, d_ff=18_944, attention="gqa", heads=28, kv_heads=4, d_head=128)
MODEL |= dict(qkv_bias=True, tied=False, rope_theta=1e6, dtype="bfloat16", kernel="cudnn")
QWEN = {f"model.{key}": value for key, value in MODEL.items()}
QWEN |= {"data.seq": 1024, "data.global_batch": 512, "fsdp.reduce": "compute"}
QWEN |= {f"optimizer.{key}_dtype": "bfloat16" for key in ("m", "v", "weights")}
FLOAT8, GRADIENTS = {"model.matmul": "float8"}, {"pipeline.grads_dtype": "bfloat16"}
ON_ONE = {"pipeline.microbatches": 128, "pipeline.remat": "elementwise", "optimizer.states_on": "host"} | GRADIENTS
ON_EIGHT = {"pipeline.microbatches": 8, "pipeline.remat": "elementwise"}
ON_FOUR_SMALL = {"pipeline.microbatches": 16, "pipeline.remat": "layer", "optimizer.states_on": "host"}
# All that can leave the device does; sums of gradients travel for each microbatch, so these are few.
ON_ONE_SMALL = {"pipeline.microbatches": 32, "pipeline.remat": "layer", "optimizer.states_on": "host"}
ON_ONE_SMALL |= {"loss.chunk_tokens": 256}
ON_ONE_SMALL |= GRADIENTS | {"pipeline.grads_on": "host", "pipeline.residuals_on": "host"}
ROWS = [
    Row("H100:1", "bf16", 13_863, 0.603, "H100x1.md", ON_ONE),
    Row("H100:1", "fp8", 19_194, 0.455, "H100x1.md", ON_ONE | FLOAT8),
    Row("H100:8", "bf16", 112_000, 0.613, "H100x8.md", ON_EIGHT),
    Row("H100:8", "fp8", 159_000, 0.472, "H100x8.md", ON_EIGHT | FLOAT8),
    Row("RTX4090:1", "bf16", 2_777, 0.724, "4090x1.md", ON_ONE_SMALL),
    Row("RTX4090:1", "fp8", 4_328, 0.615, "4090x1.md", ON_ONE_SMALL | FLOAT8),
    Row("RTX4090:4", "bf16", 10_897, 0.710, "4090x4.md", ON_FOUR_SMALL),
    Row("RTX4090:4", "fp8", 16_487, 0.585, "4090x4.md", ON_FOUR_SMALL | FLOAT8),
]
# Nobody published it: it shows that the benchmark runs.
SMALL = {"model.layers": 2, "model.vocab": 512, "model.d_model": 128, "model.d_ff": 128, "model.heads": 4}
SMALL |= {"data.global_batch": 8, "pipeline.microbatches": 1, "model.kernel": "xla", "optimizer.states_on": "device"}
SMALLEST = [Row("H100:1", "bf16", 1, 1.0, "nowhere.md", ON_ONE | SMALL)]


def main() -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("--rows", nargs="*", type=int, help="numbers of rows; all without it")
    parser.add_argument("--analytic", action="store_true", help="compile nothing")
    args = parser.parse_args()
    rows = SMALLEST if args.smoke else ROWS
    if wrong := [at for at in args.rows or () if not 0 <= at < len(rows)]:
        parser.error(f"--rows {wrong[0]}: there are rows 0 to {len(rows) - 1}")
    columns = ["GPUs", "products", "gradients", "llm.q: tokens/s", "SOL"]
    columns += [name for made in ("planned", "compiled") for name in (f"{made}: GiB", "tokens/s", "SOL")]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for at in range(len(rows)) if args.rows is None else args.rows:
        started, row = time.perf_counter(), rows[at]
        published = f"[{row.tokens_per_second:,}]({SOURCE}/{row.file}) | {row.sol:.0%}"
        figures = " | ".join(figures_of(row, compiles=not args.analytic and not args.smoke))
        gradients = row.changes.get("pipeline.grads_dtype", "float32")
        print(f"| {row.topology} | {row.dtype} | {gradients} | {published} | {figures} |", flush=True)
        print(f"row {at}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


def figures_of(row: Row, *, compiles: bool) -> list[str]:
    """Memory, tokens a second and share of the speed of light, as planned and as compiled."""
    from parallax.analysis.planned.devices import light_secs
    from parallax.analysis.planned.layouts import model_on_topology
    from parallax.analysis.planned.step_time import compile_and_read, predict
    from parallax.analysis.planned.topology import devices_of, read_topology, without_chips
    from parallax.analysis.traced.flops import flops_in_8_bits_per_token, flops_per_token
    from parallax.config.settings import read_settings
    from parallax.step.resolve import resolve

    without_chips(["--topology"])
    config = config_of("base")
    config.update_from_flattened_dict(QWEN | row.changes)
    topology = read_topology(row.topology)
    settings = resolve(read_settings(config.to_dict()), topology.as_devices)
    tokens, declared = (
        settings.data.global_batch * settings.data.seq,
        model_on_topology(settings, topology).plan.declared,
    )
    flops = flops_per_token(settings.model, declared, seq=settings.data.seq)
    in_8_bits = flops_in_8_bits_per_token(settings.model, declared, topology.chip)
    light = light_secs(settings.model, flops - in_8_bits, in_8_bits, topology.chip) * tokens / topology.devices

    def shown(peak_bytes: int, secs: float) -> list[str]:
        gib, fits = peak_bytes / 2**30, peak_bytes <= topology.chip.usable_bytes
        return [f"{gib:.1f}" if fits else f"{gib:.1f}, does not fit", f"{tokens / secs:,.0f}", f"{light / secs:.0%}"]

    estimate = predict(settings, topology)
    figures = shown(estimate.peak_bytes, estimate.secs)
    if not compiles:
        return [*figures, "-", "-", "-"]
    made = compile_and_read(settings, topology, devices_of(topology))
    return [*figures, *shown(made.peak_bytes, made.time.total_secs)]


if __name__ == "__main__":
    run_benchmark(main)
