"""Parallax's training step compared with the same model under `jit` with sharding annotations, compiled for TPUs.

    python benchmarks/gspmd.py [--layout tp] [--config llama_1b_16] [--topology v5e:4x4] [--set KEY=VALUE] [--rows 0 1]
    python benchmarks/gspmd.py --here [--config gpu_80gb] [--set data.global_batch=32] [--rounds 6]

With --here both take steps on this machine's devices, in turns; times are medians, and the first two steps are not
counted. Otherwise it needs the TPU compiler: pip install -e '.[tpu]'; no TPU. State, batch, optimizer and guard are the
same, the compiler's options too but where a row says otherwise, and both steps are priced alike, by parallax.analysis.
The annotated model, benchmarks/gspmd_model.py, is plain jnp; XLA (GSPMD) makes its collectives. *GiB* are arguments and
temporaries of a chip; *step*, *compute*, *kernels* and *waits* are milliseconds. Of collectives: calls and GiB that a
chip sends in a step, and the share of these that is asynchronous, with compute between start and done. The last line
compares the step times of Parallax and of the fastest annotated row. `--layout` is one of four for 16 chips: FSDP 16,
and FSDP 8 with TP 2, CP 2 or EP 2; with EP the MLP is a mixture of the same active FLOPs. `--smoke` compiles for no
slice: one step of each side and layout on 8 simulated devices, whose losses and gradients must be the same.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, absent_devices, config_with, run_benchmark, setting, whole_number


class Row(NamedTuple):
    title: str
    annotated: bool
    options: bool = True  # whether the compiler gets the options of parallax/sharding/compiler.py


ROWS = [
    Row("ours", False),
    Row("gspmd", True),
    Row("gspmd, XLA's defaults", True, options=False),
]
CONFIGS = ["llama_1b_16", "llama2_7b_64", "gpu_80gb", "tiny_gqa"]
COLUMNS = ("step", "compute", "kernels", "waits", "MFU", "GiB")
CALLS = ("axes", "collective", "calls", "GiB sent", "beside compute")
MIXTURE = {"model.layers_of": "moe*16", "model.experts": 8, "model.experts_per_token": 2, "model.d_expert": 4096}
LAYOUTS = {
    "fsdp": {},
    "tp": {"mesh.dp": 8, "mesh.tp": 2, "layout.residual": "batch/dp seq/tp d_model"},
    "cp": {"mesh.dp": 8, "mesh.cp": 2},
    "ep": {"mesh.dp": 8, "mesh.ep": 2, "pipeline.microbatches": 4, **MIXTURE},
}
SMOKE = {"mesh.dp": 4, "mesh.simulate": 8, "pipeline.microbatches": 2, "pipeline.remat": "elementwise"}
SMOKE_OF = {"fsdp": {"mesh.dp": 8}, "ep": {"model.layers_of": "moe*2", "model.experts": 4, "model.d_expert": 48}}
TOLERANCE = 1e-5  # float32, added up in another order


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"rounds": 2})
    parser.add_argument("--config", default="llama_1b_16", choices=CONFIGS)
    parser.add_argument("--layout", default="fsdp", choices=LAYOUTS, help="settings of 16 chips, before --set")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--topology", default="v5e:4x4")
    where.add_argument("--here", action="store_true", help="take steps on this machine's devices")
    parser.add_argument("--set", nargs="+", default=[], type=setting, metavar="KEY=VALUE", help="of the config")
    parser.add_argument(
        "--rows", nargs="+", type=int, default=range(len(ROWS)), choices=range(len(ROWS)), help="compiled"
    )
    parser.add_argument("--rounds", type=whole_number, default=6, help="steps of each side, with --here")
    args = parser.parse_args()
    if args.here:
        take_turns(args)
        return
    # Before JAX is imported, so that it neither initialises devices nor queries the network for a TPU.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if args.smoke:
        compare_numbers()
        return
    import parallax as px

    devices = absent_devices(args.topology)
    changes = LAYOUTS[args.layout] | dict(args.set)
    settings = px.read_settings(config_with(args.config, changes).to_dict())
    print(" ".join([args.config, "on", args.topology, *(f"{key}={value}" for key, value in changes.items())]))
    print(f"| | {' | '.join(COLUMNS)} |\n{'|---' * (1 + len(COLUMNS))}|")
    found = []
    for row in map(ROWS.__getitem__, args.rows):
        started = time.perf_counter()
        found.append((row, *compiled_and_time(row, settings, devices, args.topology)))
        print(f"| {row.title} | {' | '.join(figures(*found[-1][1:]))} |", flush=True)
        print(f"{row.title}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print(f"\n| | {' | '.join(CALLS)} |\n{'|---' * (1 + len(CALLS))}|")
    for row, read, times in found:
        for cells in calls_by_kind(read.collectives):
            print(f"| {row.title} | {' | '.join(cells)} |")
        waits = (f"{1e3 * secs:.0f} ms over {axes}" for axes, secs in times.exposed_secs.items())
        print(f"| {row.title} | waits: {', '.join(waits)} |{' |' * (len(CALLS) - 1)}")
    secs = {side: [times.total_secs for row, _, times in found if row.annotated == side] for side in (False, True)}
    if all(secs.values()):
        print(f"\ngspmd/ours {min(secs[True]) / min(secs[False]):.3f}")


def take_turns(args: argparse.Namespace) -> None:
    """Print the time of a step of each side on the devices that are here, its memory, and the last loss."""
    import jax

    import parallax as px
    from parallax.analysis.measured import counting_batch, shortened

    config = config_with("tiny_gqa" if args.smoke else args.config, LAYOUTS[args.layout] | dict(args.set))
    if config.mesh.simulate:
        px.simulate_devices(config.mesh.simulate)
    settings = shortened(px.read_settings(config.to_dict()), 2 + args.rounds)
    mesh, shape = px.make_mesh(settings.mesh), (settings.data.global_batch, settings.data.seq)
    steps, states, batch = {}, {}, None
    for row in ROWS[:2]:
        step = step_of(row, settings, mesh)
        batch = batch or counting_batch(settings, step)
        steps[row.title], states[row.title] = step.lower(*shape).compile(), step.init(batch)
    secs, losses = {title: [] for title in steps}, {}
    for _ in range(2 + args.rounds):  # the first two are not counted
        for title, take in steps.items():
            started = time.perf_counter()
            states[title], metrics = jax.block_until_ready(take(states[title], batch))
            secs[title].append(time.perf_counter() - started)
            losses[title] = float(metrics["loss"])
    print("| | step | GiB | loss |\n|---|---|---|---|")
    for title, take in steps.items():
        memory = take.memory_analysis()
        held = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30
        print(f"| {title} | {1e3 * statistics.median(secs[title][2:]):.1f} ms | {held:.2f} | {losses[title]:.6f} |")
    ours, other = (statistics.median(secs[row.title][2:]) for row in ROWS[:2])
    print(f"\ngspmd/ours {other / ours:.3f}")


def step_of(row: Row, settings: Any, mesh: Any) -> Any:
    """The training step of one side; only loss and gradients differ."""
    from gspmd_model import Annotated

    from parallax.step.step import TrainStep, model_of, optimizer_of

    model = model_of(settings, mesh)
    tx = optimizer_of(model)
    if row.annotated:
        model = Annotated(model.settings, mesh)
    return TrainStep(model, tx, settings.train.seed, settings.guard)


def compiled_and_time(row: Row, settings: Any, devices: Any, topology: str) -> tuple[Any, Any]:
    """The compiled program as the report reads it, and its StepTime."""
    import math

    import parallax as px
    from parallax.analysis.compiled.program import read_step
    from parallax.analysis.planned.step_time import step_time
    from parallax.analysis.traced.flops import flops_per_token
    from parallax.hardware.chips import chip
    from parallax.sharding import compiler

    mesh = px.make_mesh(settings.mesh, devices)
    shape = settings.data.global_batch, settings.data.seq
    with contextlib.nullcontext() if row.options else patch.dict(compiler.OPTIONS, clear=True):
        step = step_of(row, settings, mesh)
        program = step.lower(*shape).compile()
    read = read_step(program, step.model, seq=shape[1])
    flops = flops_per_token(settings.model, step.model.plan.declared, seq=shape[1]) * math.prod(shape) / mesh.size
    return read, step_time(read, chip(topology), flops, kernel_efficiency=1.0)


def figures(read: Any, times: Any) -> list[str]:
    secs = times.total_secs, times.compute_secs, times.pallas_secs, sum(times.exposed_secs.values())
    held = (read.arguments + read.temporaries) / 2**30
    return [*(f"{1e3 * part:.0f}" for part in secs), f"{100 * times.mfu:.1f} %", f"{held:.2f}"]


def calls_by_kind(collectives: Any) -> list[list[str]]:
    """The cells of CALLS for each kind and axes, by bytes sent; those that send almost nothing are left out."""
    calls, sent, beside = Counter(), Counter(), Counter()
    for made in collectives:
        key, size = ("+".join(made.axes), made.kind), made.count * made.bytes
        calls[key] += made.count
        sent[key] += size
        beside[key] += size * (made.asynchronous and made.cycles_between > 0)
    return [
        [*key, f"{calls[key]:.0f}", f"{size / 2**30:.2f}", f"{beside[key] / size:.0%}"]
        for key, size in sent.most_common()
        if size >= 2**30 / 200
    ]


def compare_numbers() -> None:
    """One step of each side on simulated devices, in each layout, from the same state with the same batch."""
    import parallax as px

    px.simulate_devices(SMOKE["mesh.simulate"])
    ratios = [compare_layout(layout) for layout in LAYOUTS]
    count, worst = sum(count for count, _ in ratios), max((ratio for _, ratio in ratios), key=lambda x: abs(x - 1))
    print(f"losses, and gradients of {count} parameters: gspmd/ours {worst:.6f}")


def compare_layout(layout: str) -> tuple[int, float]:
    """The number of parameters whose gradients were compared, and the annotated model's loss over ours."""
    import jax
    import numpy as np

    import parallax as px

    changes = LAYOUTS[layout] | SMOKE | SMOKE_OF.get(layout, {})
    settings = px.read_settings(config_with("tiny_gqa", changes).to_dict())
    mesh = px.make_mesh(settings.mesh)
    shape = settings.data.global_batch, settings.data.seq + 1
    batch = px.as_batch(np.random.default_rng(0).integers(settings.model.vocab, size=shape))
    found, params = [], None
    for row in ROWS[:2]:
        model = step_of(row, settings, mesh).model
        params = params or model.init(settings.train.seed)
        if row.annotated:
            model.room = settings.model.experts  # so that it drops no token, as ours
        run = jax.jit(model.loss_grads_and_statistics, compiler_options={"xla_backend_optimization_level": 0})
        metrics, *trees = run(params, batch, None)
        found.append((float(metrics["loss"]), jax.device_get(trees)))
        print(f"{layout:6} {row.title:6} loss {found[-1][0]:.6f}")
    (our_loss, ours), (loss, others) = found
    np.testing.assert_allclose(loss, our_loss, rtol=TOLERANCE)
    for own, other in zip(jax.tree.leaves(ours), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(other, own, rtol=0, atol=TOLERANCE * abs(own).max(initial=0))
    return sum(grad.size > 0 for grad in jax.tree.leaves(ours[0])), loss / our_loss


if __name__ == "__main__":
    run_benchmark(main)
