"""Plans of large models on 256 to 16,384 chips: the fastest of some layouts, by the analytic plan; nothing is compiled.

    python benchmarks/large.py [--models llama3_70b] [--topologies v5p:16x16x16 4xv5p:8x8x16]

Of the meshes of WITHIN those with the least bounds are priced in closed form, each with a few numbers of microbatches
and sets of recomputed parts. A row has the fastest layout that fits, what its time goes into, and what a device sends
over the network between slices, or between hosts of GPUs: bytes in a step, how long the step waits for messages over
the axes that cross it, and the rate that would hide them if all could go on beside the rest of the step. Batches are
BATCHES, the same for every number of chips; rows are packed documents. The whole table takes ten CPU minutes.
"""

import contextlib
import itertools
import math
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, config_of, run_benchmark, whole_number

# Rows of a step: 16.8 M tokens, as published for Llama-3.1-405B.
BATCHES = {"llama3_70b": 2048, "llama3_405b": 2048, "deepseek_v3": 4096, "tiny_gqa": 64}
MODELS = ("llama3_70b", "llama3_405b", "deepseek_v3")
# A slice of v5p has at most 6,144 chips, one of v7x 9,216.
SLICES = ("4x8x8", "8x8x16", "16x16x16"), ("8x8x16", "16x16x16")
TPUS = [f"{chip}:{shape}" for chip in ("v5p", "v7x") for shape in SLICES[0]]
TPUS += [f"4x{chip}:{shape}" for chip in ("v5p", "v7x") for shape in SLICES[1]]
TOPOLOGIES = (*TPUS, *(f"H100:{hosts}x8" for hosts in (32, 128, 512, 2048)))
# Ranks along pp, cp and tp that are tried.
WITHIN = [(1, 1, 1), (1, 1, 4), (1, 1, 8), (1, 2, 1), (1, 4, 1), (1, 8, 1), (1, 16, 1), (1, 4, 4)]
WITHIN += [(4, 1, 1), (8, 1, 1), (16, 1, 1), (4, 1, 8), (8, 1, 8), (16, 1, 8)]
EXPERT_RANKS = (8, 16, 32, 64)  # of a model with experts
MOST_ROWS, MOST_OVER, GROUP = 4, 16, 256  # rows of a microbatch; ranks over the fewest that rows allow; GPUs of FSDP
LEFT_OUT = ("none", "attention", "stage")  # values of remat that are dominated by others
SCHEDULES = (("one_f_one_b", 1), ("interleaved", 2))
PRICED = 12  # layouts of a mesh, those with the least bounds
LAYERS: dict = defaultdict(dict)  # traced ones, by model and chip
HEAD = ("", "chips", "fastest layout", "step", "MFU", "memory", "time", "network", "waits", "hidden at")


def main() -> None:
    smallest = {"models": ["tiny_gqa"], "topologies": ["2xv5p:2x2x1"], "meshes": 1}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--models", nargs="+", choices=list(BATCHES), default=MODELS, metavar="MODEL")
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES, metavar="TOPOLOGY")
    parser.add_argument("--meshes", type=whole_number, default=3, help="that are priced, those with the least bounds")
    args = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |")
    print("|---" * len(HEAD) + "|")
    for name in args.models:
        for where in args.topologies:
            started = time.process_time()
            print(f"| {' | '.join(cells(name, where, args.meshes))} |", flush=True)
            print(f"{name} on {where}: {time.process_time() - started:.0f} s", file=sys.stderr, flush=True)


def cells(name: str, where: str, meshes: int) -> list[str]:
    """The row of a model on a topology."""
    from parallax.analysis.planned.topology import read_topology
    from parallax.display.units import in_bytes, percent

    topology = read_topology(where)
    priced = min(prices(name, topology, meshes), key=lambda price: price[0], default=None)
    if priced is None:
        return [name, where, "none fits", *[""] * (len(HEAD) - 3)]
    _, closed, choice = priced
    step, work, settings = closed.estimate(choice), closed.work(choice), choice.applied(closed.settings)
    sent, waits = over_network(work, settings, topology, step)
    times = parts(step, work, settings, topology)
    figures = [f"{step.secs:.2f} s", percent(step.mfu), in_bytes(step.peak_bytes), times]
    rate = float(f"{sent / (step.secs - waits) / 1e9:.2g}")
    network = [in_bytes(sent), f"{waits:.2f} s", f"{rate:g} GB/s"] if sent else ["-"] * 3
    return [name, where, layout(settings), *figures, *network]


def settings_on(name: str, topology: Any, replicas: int) -> Any:
    """The settings of a config with its batch, on these chips."""
    from parallax.config.settings import read_settings
    from parallax.step.resolve import resolve

    config = config_of(name)
    stages = topology.slices // math.gcd(topology.slices, replicas)  # without replicas, stages cross the network
    beside = {"cp": 1, "ep": 1, "tp": 1}
    config.mesh.update(simulate=0, pp=stages, dp=topology.devices // replicas // stages, replica=replicas, **beside)
    config.data.global_batch = BATCHES[name]
    config.model.dtype = "bfloat16"
    config.pipeline.microbatches = stages
    config.data_parallel.exceptions = ""
    if not topology.is_tpu:
        config.model.kernel, config.fsdp.reduce = "auto", "compute"
    return resolve(read_settings(config.to_dict()), topology.as_devices)


def prices(name: str, topology: Any, meshes: int) -> Iterator[tuple[float, Any, Any]]:
    """Seconds by the closed form of layouts that fit, of as many `meshes` with the least bounds; the form, and them."""
    from parallax.analysis.planned.closed_form import ClosedForm
    from parallax.analysis.planned.layouts import build_if_legal
    from parallax.analysis.planned.sweep import LeastWork
    from parallax.errors import ParallaxError

    usable, forms, of_mesh = topology.chip.usable_bytes, {}, defaultdict(list)
    for replicas in replicas_on(topology, config_of(name).model.d_model):
        settings = settings_on(name, topology, replicas)
        tried = list(layouts(settings, topology))
        models = ((choice.applied(settings), build_if_legal(choice.applied(settings), topology)) for choice in tried)
        legal, model = next(((legal, model) for legal, model in models if model), (None, None))
        if model is None:
            continue
        least = LeastWork(legal, topology, model)
        forms[replicas] = ClosedForm(legal, topology, LAYERS[name, topology.chip.name])
        for choice in tried:
            if least.held(choice) <= usable:
                of_mesh[replicas, choice.mesh].append((least.bound(choice), choice))
    priced = 0
    for replicas, mesh in sorted(of_mesh, key=lambda mesh: min(of_mesh[mesh])):
        fits = False
        for _, choice in sorted(of_mesh[replicas, mesh])[:PRICED]:
            with contextlib.suppress(ParallaxError):
                price = forms[replicas].estimate(choice)
                if price.peak_bytes <= usable:
                    fits = True
                    yield price.secs, forms[replicas], choice
        priced += fits
        if priced == meshes:
            return


def replicas_on(topology: Any, d_model: int) -> list[int]:
    """Numbers of replicas: one in each slice, or stages in several; on GPUs one, or one for each GROUP. Also as many as
    leave each the most ranks over which FSDP can shard d_model, if they are a power of two."""
    most = d_model & -d_model
    others = [topology.slices if topology.is_tpu else topology.devices // GROUP, topology.devices // most]
    return sorted({1, *filter(None, others)})


def layouts(settings: Any, topology: Any) -> Iterator[Any]:
    """The layouts that are considered."""
    from parallax.analysis.planned.layouts import Choice
    from parallax.analysis.traced.recompute import sets_to_try
    from parallax.errors import divisors

    model, seq = settings.model, settings.data.seq
    expert_ranks = EXPERT_RANKS if model.has_mixtures else (1,)
    sets = [remat for remat in sets_to_try(model, seq=seq, exchanges=model.has_mixtures) if remat not in LEFT_OUT]
    now, replicas = Choice.of(settings), settings.mesh.replica
    devices, rows = topology.devices // replicas, settings.data.global_batch // replicas
    for pp, cp, tp in WITHIN:
        data, left = divmod(devices, pp * cp * tp)
        stays = topology.slices > replicas and pp % topology.slices
        if left or stays or rows % data or pp * cp * tp > MOST_OVER * max(1, devices // rows):
            continue
        for microbatches in divisors(rows // data):
            if microbatches < pp or rows // data // microbatches > MOST_ROWS:
                continue
            schedules = SCHEDULES if pp > 1 else [("gpipe", 1)]
            for (schedule, virtual), remat, ep in itertools.product(schedules, sets, expert_ranks):
                if data % ep == 0:
                    shape = dict(pp=pp, dp=data // ep, cp=cp, ep=ep, tp=tp, microbatches=microbatches, remat=remat)
                    yield now._replace(**shape, schedule=schedule, virtual=virtual)


def layout(settings: Any) -> str:
    """The layout in short."""
    mesh = " ".join(f"{axis} {size}" for axis, size in settings.mesh.sizes.items() if size > 1)
    stages = settings.pipeline
    schedule = f", {stages.schedule}" + f" v={stages.virtual}" * (stages.virtual > 1) if settings.mesh.pp > 1 else ""
    many = f"{stages.microbatches} microbatch" + "es" * (stages.microbatches > 1)
    return f"{mesh}{schedule}; {many}; {stages.remat}"


def parts(step: Any, work: Any, settings: Any, topology: Any) -> str:
    """What the step's time goes into, most first, without what takes less than 2 %."""
    from parallax.analysis.planned.step_time import KERNEL_PARTS, op_secs
    from parallax.display.units import percent

    secs: Counter = Counter({f"waits over {axes}": waits for axes, waits in step.exposed_secs.items()})
    secs |= {"bubble": step.bubble_secs, "update": step.update_secs}
    for op in work.products:
        kind = op.kernel if op.kernel in KERNEL_PARTS else "products" if op.flops else "passes"
        kind = "recomputed" if op.direction == "recompute" else kind
        secs[kind] += op.count * op_secs(op, settings, topology, packed=True)
    shares = [(name, part / step.secs) for name, part in secs.most_common()]
    return ", ".join(f"{name} {percent(share)}" for name, share in shares if share > 0.02)


def over_network(work: Any, settings: Any, topology: Any, step: Any) -> tuple[float, float]:
    """Bytes that a device sends in a step over the network between slices or hosts, and seconds of waits for them."""
    from parallax.analysis.planned.step_time import with_several_ranks

    sent, axes_sent = 0.0, set()
    for call in work.sent:
        links = topology.route(settings.mesh.sizes, call.axes)
        if call.bytes and links.next == topology.chip.network_secs:  # a neighbour is on another host or slice
            sent += links.secs(call.kind, call.total_bytes) * topology.chip.dcn_bandwidth
            axes_sent.add(with_several_ranks(call.axes, settings.mesh.sizes))
    return sent, sum(step.exposed_secs.get(axes, 0.0) for axes in axes_sent)


if __name__ == "__main__":
    run_benchmark(main)
