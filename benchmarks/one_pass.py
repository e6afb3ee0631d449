"""What F and B hide of each other's messages if they are one pass, in a step compiled without chips.

    python benchmarks/one_pass.py [--topology v5p:2x2x4] [--exchange ragged] [--axes ep]
    python benchmarks/one_pass.py --topology H100:2x8 --kernel cudnn

Needs the TPU compiler, pip install -e '.[tpu]', or that for GPUs, pip install -e '.[gpu-compiler]'. Loss and gradients
of layers with the mixtures of DeepSeek-V2-Lite, without its shared experts and its latent attention, on two pipeline
ranks of eight expert ranks, with pipeline.schedule="dualpipe_v". The program has F alone, B alone, and both as one
pass: a row for each. Figures are of a layer: messages over these axes, MiB that a chip sends in them, milliseconds that
they take, the share of the bytes that is asynchronous, milliseconds for which work waits for them, and those of the
work itself; kernels are priced at --kernels of peak.
"""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

from arguments import Arguments, absent_devices, config_of, run_benchmark, share, whole_number

from parallax.hardware.chips import KERNEL_EFFICIENCY

SIZES = {
    "deepseek": dict(vocab=32_000, d_model=2048, heads=16, kv_heads=16, d_head=128, experts=64, experts_per_token=6)
    | dict(d_expert=1408, dtype="bfloat16"),
    "tiny": dict(vocab=64, d_model=32, heads=4, kv_heads=4, d_head=8, experts=8, experts_per_token=2, d_expert=16),
}
PASSES = {"F": "F alone", "B": "B alone", "FB": "F&B"}
COLUMNS = ("calls", "MiB", "takes", "asynchronous", "waits", "compute")


def main() -> None:
    smallest = {"sizes": "tiny", "topology": "v5e:2x4", "ep": 4, "layers": 4, "exchange": "gather"}
    smallest |= {"kernel": "xla", "seq": 64}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--sizes", default="deepseek", choices=SIZES)
    parser.add_argument("--topology", default="v5p:2x2x4")
    parser.add_argument("--pp", type=whole_number, default=2)
    parser.add_argument("--ep", type=whole_number, default=8)
    parser.add_argument("--layers", type=whole_number, default=8)
    parser.add_argument("--seq", type=whole_number, default=4096, help="tokens of a microbatch on a device")
    parser.add_argument("--exchange", default="ragged", choices=["ragged", "gather"])
    parser.add_argument("--schedule", default="dualpipe_v", choices=["dualpipe_v", "zero_bubble_v"])
    parser.add_argument("--kernel", default="splash", choices=["splash", "cudnn", "xla"], help="of attention")
    parser.add_argument("--axes", default="ep", help="joined by +")
    parser.add_argument("--kernels", type=share, default=KERNEL_EFFICIENCY, help="share of peak that kernels reach")
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="of the compiler")
    args = parser.parse_args()
    read, layers = compiled(args)
    print(f"{args.topology}, {args.schedule}, exchange {args.exchange}: a layer, over {args.axes}")
    print(f"temporaries {read.temporaries / 2**30:.2f} GiB, arguments {read.arguments / 2**30:.2f} GiB")
    print(f"{'':10}" + "".join(f"{name:>{len(name) + 4}}" for name in COLUMNS))
    for scope, name in PASSES.items():
        found = pass_of(read, scope, args, layers)
        cells = (found["calls"], found["bytes"] / 2**20, 1e3 * found["takes"], found["apart"] / max(found["bytes"], 1))
        cells = *cells, 1e3 * found["waits"], 1e3 * found["compute"]
        print(f"{name:10}" + "".join(f"{cell:>{len(word) + 4}.2f}" for word, cell in zip(COLUMNS, cells)), flush=True)


def compiled(args: Any) -> tuple[Any, int]:
    """The program, and the layers of a stage."""
    import jax

    import parallax as px
    from parallax.analysis.compiled.program import read_step
    from parallax.model.batch import BATCH_ARRAYS
    from parallax.step.step import options_of, step_of

    devices, config = absent_devices(args.topology), config_of("base")
    config.mesh.update(pp=args.pp, dp=1, ep=args.ep, tp=1, simulate=0)
    sizes = SIZES[args.sizes] | dict(layers=args.layers, layers_of=f"moe*{args.layers}", kernel=args.kernel)
    config.model.update(sizes, attention="gqa", tied=False)
    config.layout.exchange = args.exchange
    microbatches = 4 * args.pp
    config.pipeline.update(schedule=args.schedule, virtual=1, microbatches=microbatches, remat="layer")
    config.data_parallel.update(policy="zero1", exceptions="")
    config.data.update(seq=args.seq, global_batch=microbatches * args.ep)
    settings = px.read_settings(config.to_dict())
    model = step_of(settings, px.make_mesh(settings.mesh, devices)).model
    options = dict(option.split("=", 1) for option in args.options)
    rows = jax.ShapeDtypeStruct((config.data.global_batch, args.seq), "int32", sharding=model.batch_sharding)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), model.shapes, model.shardings
    )
    lowered = jax.jit(model.loss_and_grad).lower(shapes, dict.fromkeys(BATCH_ARRAYS, rows))
    program = lowered.compile(compiler_options=options_of(model) | options)
    return read_step(program, model, seq=args.seq), args.layers // model.schedule.stages


def pass_of(read: Any, scope: str, args: Any, layers: int) -> Counter:
    """The figures of one layer of the pass with this scope."""
    from parallax.analysis.compiled.program import CompiledCollective, executed
    from parallax.analysis.planned.step_time import Clock
    from parallax.hardware.chips import chip

    clock = Clock(read.mesh, chip(args.topology), "bfloat16", lockstep=True, kernel_efficiency=args.kernels)
    found: Counter = Counter()
    for side in sides_of(read.timeline, scope):
        spent = clock.run(side)
        waits = {axes: spent.pop(axes, 0.0) for axes in {"+".join(call.axes) for call in calls_of(side)}}
        found += Counter(compute=sum(spent.values()), waits=waits.get(args.axes, 0.0))
        for event, _, count in executed(side):
            if isinstance(event, CompiledCollective) and "+".join(event.axes) == args.axes:
                sent = count * event.bytes
                takes = count * clock.collective_secs(event)
                found += Counter(calls=count, bytes=sent, takes=takes, apart=sent * event.asynchronous)
    return Counter({name: value / layers for name, value in found.items()})


def sides_of(events: list, scope: str) -> Iterator[list]:
    """The sides of branches that do the work of this scope."""
    from parallax.analysis.compiled.program import BranchEvent, LoopEvent

    for event in events:
        for inner in event.sides if isinstance(event, BranchEvent) else ():
            if any(is_of(call.source, scope) for call in calls_of(inner)):
                yield inner
            else:
                yield from sides_of(inner, scope)
        if isinstance(event, LoopEvent):
            yield from sides_of(event.body, scope)


def calls_of(events: list) -> list:
    """The collectives of a timeline, with those in loops and branches."""
    from parallax.analysis.compiled.program import CompiledCollective, executed

    return [event for event, *_ in executed(events) if isinstance(event, CompiledCollective)]


def is_of(source: str, scope: str) -> bool:
    """Whether a collective's name in the traced program is one of this pass."""
    return f"/{scope}/cond/" in source and (scope == "FB" or "/FB/" not in source)


if __name__ == "__main__":
    run_benchmark(main)
