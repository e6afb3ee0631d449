"""Options that save memory or time, one at a time: effect on memory and time, predicted, and compiled without a chip.

    python benchmarks/options.py --config llama_1b_16 --topology v5e:4x4 [--only "nothing" "weights bfloat16"]

Needs the compiler of the topology's chips: pip install -e '.[tpu]', or '.[gpu-compiler]'. The first row is the config
as it is, in GiB of a chip and milliseconds of a step; the others are differences from it. *Predicted* is what
`python -m parallax.plan` says, *compiled* arguments and temporaries of the compiler's program and its time as
parallax.analysis estimates it, kernels at --kernels of peak. Copies between a chip and its
host have no cycles, so compiled times exclude them. A step that the compiler refuses is *too large*; an impossible row
says why.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

# Before JAX is imported, so that it neither initialises devices nor queries the network for a TPU.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, absent_devices, config_of, run_benchmark

CONFIGS = sorted({path.stem for path in (Path(__file__).resolve().parents[1] / "configs").glob("*.py")} - {"base"})
INT8, FLOAT8, RESIDUALS_8BIT = {"model.matmul": "int8"}, {"model.matmul": "float8"}, {"model.matmul_residuals": "8bit"}
AGAIN = {"pipeline.remat": "elementwise ffn"}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "m and v bfloat16": {"optimizer.m_dtype": "bfloat16", "optimizer.v_dtype": "bfloat16"},
    "m and v float8": {"optimizer.m_dtype": "float8", "optimizer.v_dtype": "float8"},
    "weights bfloat16": {"optimizer.weights_dtype": "bfloat16"},
    "m and v on the host": {"optimizer.states_on": "host"},
    "weights on the host": {"optimizer.masters_on": "host"},
    "residuals on the host": {"pipeline.residuals_on": "host"},
    "products int8": INT8,
    "products float8": FLOAT8,
    "products int8, residuals 8bit": INT8 | RESIDUALS_8BIT,
    "gathers int8": {"fsdp.gather_dtype": "int8"},
    "remat none": {"pipeline.remat": "none"},
    "remat elementwise": {"pipeline.remat": "elementwise"},
    "remat attention": {"pipeline.remat": "attention"},
    "remat layer": {"pipeline.remat": "layer"},
    "remat elementwise, products int8": {"pipeline.remat": "elementwise"} | INT8,
    "remat elementwise ffn": AGAIN,
    "remat elementwise ffn, products int8": AGAIN | INT8,
    "remat elementwise ffn, products float8": AGAIN | FLOAT8,
    "remat ffn": {"pipeline.remat": "ffn"},
    "remat ffn, products int8": {"pipeline.remat": "ffn"} | INT8,
    "remat ffn, products int8, residuals 8bit": {"pipeline.remat": "ffn"} | INT8 | RESIDUALS_8BIT,
}
SMALLEST = {"config": "tiny_gqa", "topology": "v5e:2x4", "only": ["nothing", "weights bfloat16"]}


class Figures(NamedTuple):
    """GiB of a chip and seconds of a step, predicted and compiled; missing ones are nan, with the reason."""

    predicted: tuple[float, float]
    compiled: tuple[float, float] = (math.nan, math.nan)
    why: str = ""


def main() -> None:
    parser = Arguments(description=__doc__, smallest=SMALLEST)
    parser.add_argument("--config", default="llama_1b_16", choices=CONFIGS)
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--only", nargs="+", choices=OPTIONS, default=[*OPTIONS], metavar="OPTION")
    parser.add_argument("--kernels", type=float, default=0.7, help="share of peak that kernels reach")
    args = parser.parse_args()
    absent_devices(args.topology)
    print(f"{args.config} on {args.topology}")
    print("| option | memory predicted | compiled | step predicted | compiled |")
    print("|---|---|---|---|---|")
    first = None
    for name in args.only:
        started, found = time.perf_counter(), figures(args, name)
        first = first or found  # of a first row without figures the others have no differences
        print(f"| {name} | " + " | ".join(cells(found, first)) + " |", flush=True)
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


def cells(found: Figures, first: Figures) -> list[str]:
    """Each figure, of the first row and where that has none by itself, else beside the first row's."""

    def cell(at: int, side: int) -> str:
        own, before = found[side][at], first[side][at]
        if math.isnan(own):
            return ""
        if found is first or math.isnan(before):
            return f"{own:.2f} GiB" if at == 0 else f"{1e3 * own:.1f} ms"
        return f"{own - before:+.2f} GiB" if at == 0 else f"{100 * (own / before - 1):+.1f} %"

    shown = [cell(at, side) for at in (0, 1) for side in (0, 1)]
    if "" in shown:
        shown[shown.index("")] = found.why
    return shown


def figures(args: argparse.Namespace, name: str) -> Figures:
    import jax

    import parallax as px
    from parallax.analysis.step_time import compile_and_read, predict
    from parallax.analysis.topology import read_topology
    from parallax.runtime.errors import ConfigError

    config, devices, topology = config_of(args.config), absent_devices(args.topology), read_topology(args.topology)
    predicted = math.nan, math.nan
    try:
        # On other slices than that of the config, the same work for each chip.
        size = math.prod(px.read_settings(config.to_dict()).mesh.sizes.values())
        if size > 0:  # otherwise dp is inferred
            config.mesh.dp = config.mesh.dp * len(devices) // size
            config.data.global_batch = config.data.global_batch * len(devices) // size
        config.update_from_flattened_dict(OPTIONS[name])
        settings = px.read_settings(config.to_dict())
        estimate = predict(settings, topology)
        predicted = estimate.peak_bytes / 2**30, estimate.secs
        made = compile_and_read(settings, topology, devices, kernel_efficiency=args.kernels)
    except (ConfigError, jax.errors.JaxRuntimeError) as error:
        return Figures(predicted, why=f"no: {str(error).splitlines()[0]}")
    if made.refused:
        return Figures(predicted, why="too large")
    secs = made.time.total_secs if made.time else math.nan
    return Figures(predicted, ((made.arguments + made.temporaries) / 2**30, secs), why="no cycles")


if __name__ == "__main__":
    run_benchmark(main)
