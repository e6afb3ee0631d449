"""Options that save memory or time, one at a time: effect on memory and time, predicted, and compiled or measured.

    python benchmarks/options.py --config llama_1b_16 --topology v5e:4x4 [--only "nothing" "weights bfloat16"]
    python benchmarks/options.py --config gpu_80gb --here [--steps 8] [--set data.global_batch=32]

The first row is the config as it is, in GiB of a chip and milliseconds of a step; the others are differences from it.
*Predicted* is what `python -m parallax.plan` says. *Compiled*, without a chip, are arguments and temporaries of the
compiler's program and its time as parallax.analysis estimates it, kernels at --kernels of peak. It needs the compiler
of the topology's chips: pip install -e '.[tpu]', or '.[gpu-compiler]'. Copies between a chip and its host have no
cycles, so compiled times exclude them. *Measured*, with --here, are the allocator's peak and the median of the steps
after the first two, on this machine's devices, each row in a process of its own. A step that the compiler refuses is
*too large*; an impossible row says why.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, absent_devices, config_with, run_benchmark, setting, share, whole_number
from recipes import RECIPES

from parallax.hardware.chips import KERNEL_EFFICIENCY

CONFIGS = sorted({path.stem for path in (Path(__file__).resolve().parents[1] / "configs").glob("*.py")} - {"base"})
INT8, FLOAT8, RESIDUALS_8BIT = {"model.matmul": "int8"}, {"model.matmul": "float8"}, {"model.matmul_residuals": "8bit"}
AGAIN = {"pipeline.remat": "elementwise ffn"}
GRADS_16 = {"pipeline.grads_dtype": "bfloat16"}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "m and v bfloat16": {"optimizer.m_dtype": "bfloat16", "optimizer.v_dtype": "bfloat16"},
    "m and v float8": {"optimizer.m_dtype": "float8", "optimizer.v_dtype": "float8"},
    "weights bfloat16": {"optimizer.weights_dtype": "bfloat16"},
    "m and v on the host": {"optimizer.states_on": "host"},
    "weights on the host": {"optimizer.masters_on": "host"},
    "gradients bfloat16": GRADS_16,
    "gradients on the host": {"pipeline.grads_on": "host"},
    "gradients bfloat16, on the host": GRADS_16 | {"pipeline.grads_on": "host"},
    "residuals on the host": {"pipeline.residuals_on": "host"},
    "products int8": INT8,
    "products float8": FLOAT8,
    "products int8, residuals 8bit": INT8 | RESIDUALS_8BIT,
    "products float8, residuals 8bit": FLOAT8 | RESIDUALS_8BIT,
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
# Asked for by name, these too.
ROWS = OPTIONS | {
    f"{remat}products {name}": again | keys
    for remat, again in (("", {}), ("remat elementwise ffn, ", AGAIN))
    for name, keys in RECIPES.items()
}
SMALLEST = {"config": "tiny_gqa", "topology": "v5e:2x4", "only": ["nothing", "weights bfloat16"]}


class Figures(NamedTuple):
    """GiB of a chip and seconds of a step, predicted, and compiled or measured; missing ones are nan, with the reason.
    Of measured steps, their losses."""

    predicted: tuple[float, float] = (math.nan, math.nan)
    made: tuple[float, float] = (math.nan, math.nan)
    why: str = ""
    losses: Sequence[float] = ()


def main() -> None:
    parser = Arguments(description=__doc__, smallest=SMALLEST)
    parser.add_argument("--config", default="llama_1b_16", choices=CONFIGS)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--topology", default="v5e:4x4")
    where.add_argument("--here", action="store_true", help="run the steps on this machine's devices")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[*OPTIONS], metavar="OPTION")
    parser.add_argument("--set", nargs="+", default=[], type=setting, metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--kernels", type=share, default=KERNEL_EFFICIENCY, help="share of peak that kernels reach")
    parser.add_argument("--steps", type=whole_number, default=8, help="of a row that is measured")
    parser.add_argument("--child", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args, args.child)))
        return
    if not args.here:
        # Before JAX is imported, so that it neither initialises devices nor queries the network for a TPU.
        os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        absent_devices(args.topology)
    import parallax as px
    from parallax.errors import check_whole

    check_whole("--steps", args.steps, least=3)  # the first two are not counted
    px.read_settings(config_with(args.config, dict(args.set)).to_dict())  # what is wrong is said once, not in each row
    made, last = ("measured", " loss |") if args.here else ("compiled", "")
    print(" ".join([args.config, *([] if args.here else ["on", args.topology]), *(f"{k}={v}" for k, v in args.set)]))
    print(f"| option | memory predicted | {made} | step predicted | {made} |{last}")
    print("|---" * (6 if args.here else 5) + "|")
    first = None
    for name in args.only:
        started, found = time.perf_counter(), (figures_here if args.here else figures)(args, name)
        first = first or found  # of a first row without figures the others have no differences
        loss = [f"{loss:.6f}" for loss in found.losses[-1:]] or [""] * args.here
        print(f"| {name} | " + " | ".join(cells(found, first) + loss) + " |", flush=True)
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


def settings_on(args: argparse.Namespace, name: str, count: int) -> Any:
    """The settings of an option on this number of devices; on others than the config's, the same work for each."""
    import parallax as px

    config = config_with(args.config, dict(args.set))
    size = math.prod(px.read_settings(config.to_dict()).mesh.sizes.values())
    if size > 0:  # otherwise dp is inferred
        config.mesh.dp = config.mesh.dp * count // size
        config.data.global_batch = config.data.global_batch * count // size
    config.update_from_flattened_dict(ROWS[name])
    return px.read_settings(config.to_dict())


def figures(args: argparse.Namespace, name: str) -> Figures:
    import jax

    from parallax.analysis.planned.step_time import compile_and_read, predict
    from parallax.analysis.planned.topology import read_topology
    from parallax.errors import ConfigError
    from parallax.step.resolve import resolve

    devices, topology, predicted = absent_devices(args.topology), read_topology(args.topology), (math.nan, math.nan)
    try:
        settings = resolve(settings_on(args, name, len(devices)), topology.as_devices)
        estimate = predict(settings, topology)
        predicted = estimate.peak_bytes / 2**30, estimate.secs
        made = compile_and_read(settings, topology, devices, kernel_efficiency=args.kernels)
    except (ConfigError, jax.errors.JaxRuntimeError) as error:
        return Figures(predicted, why=f"no: {str(error).splitlines()[0]}")
    if made.refused:
        return Figures(predicted, why="too large")
    secs = made.time.total_secs if made.time else math.nan
    return Figures(predicted, ((made.arguments + made.temporaries) / 2**30, secs), why="no cycles")


def figures_here(args: argparse.Namespace, name: str) -> Figures:
    """The same, measured by a process: a device's allocator has one peak for each."""
    changes = ["--set", *(f"{key}={value!r}" for key, value in args.set)] if args.set else []
    flags = [f"--config={args.config}", f"--steps={args.steps}", *changes]
    command = [sys.executable, __file__, f"--child={name}", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=False)
    if done.returncode:
        return Figures(why=f"no: it ended with status {done.returncode}")
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def measure(args: argparse.Namespace, name: str) -> dict:
    """The fields of Figures, by the phases of a first run."""
    import jax

    import parallax as px
    from parallax.analysis.measured import MEMORY, STEP_TIME, MeasuredSteps, PhaseError, shortened
    from parallax.analysis.measured import measure as measure_run
    from parallax.errors import ConfigError

    try:
        if simulated := config_with(args.config, dict(args.set)).mesh.simulate:
            px.simulate_devices(simulated)
        found = MeasuredSteps(shortened(settings_on(args, name, jax.device_count()), args.steps))
    except ConfigError as error:
        return {"why": f"no: {error}"}
    with contextlib.suppress(PhaseError):
        measure_run(found)
    why = f"no: {found.failed}" if found.failed else "not reported"
    predicted, made = (
        [found.figures[MEMORY, source] / 2**30, found.figures[STEP_TIME, source]] for source in ("planned", "measured")
    )
    return {"predicted": predicted, "made": made, "why": why, "losses": [step["loss"] for step in found.steps]}


if __name__ == "__main__":
    run_benchmark(main)
