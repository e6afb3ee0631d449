"""A training step as compiled for TPU, on a machine without a TPU.

    python benchmarks/tpu_compile.py [--topology v5e:4x4] [--mesh 4,2,2] [--schedules gpipe one_f_one_b]

Needs the TPU compiler: pip install -e '.[tpu]'. The step is that of configs/llama_1b_16.py, 1.2 billion parameters
in bfloat16, with one window of --seq tokens in a microbatch; one row for each schedule. Bytes are per chip and in GiB:
arguments (the state, which the results take the place of, and the batch), temporaries, and the most at any moment.
Collectives are those of the compiled program, a loop's body once, as `asynchronous/all`; the first leave time for other
work. `messages` are those between stages: how many of them have a pass of a stage, which is a branch or a loop, between
their start and their done. `step ms`, `exposed`, `bubble` and `mfu` are as parallax.analysis estimates them, the
latter three as shares in percent. `python -m parallax.report --hlo=FILE` has the program of such a step.
"""

import time
from typing import Any, NamedTuple

from arguments import Arguments, absent_devices, config_of, mesh_sizes, run_benchmark, whole_number

from parallax.config.sections import POLICY_NAMES

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipe_v")
SIZES = ("arguments", "temporaries", "peak")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "permute")
TIMES = ("step ms", "exposed", "bubble", "mfu")
COLUMNS = (*SIZES, *COLLECTIVES, "messages", *TIMES, "compile s")


class Step(NamedTuple):
    compiled: Any  # parallax.analysis.compiled.program.Compiled
    time: Any  # parallax.analysis.planned.step_time.StepTime
    compile_secs: float


def main() -> None:
    args = parse()
    devices = absent_devices(args.topology)
    print(
        f"{args.topology} mesh {args.mesh} microbatches {args.microbatches} x {args.seq} tokens, "
        f"remat {args.remat}, policy {args.policy}, kernel {args.kernel}"
    )
    print(f"{'schedule':15}" + "".join(f"{name:>{len(name) + 2}}" for name in COLUMNS))
    for name in args.schedules:
        step = compile_step(name, devices, args)
        print(f"{name:15}" + row(step), flush=True)


def parse() -> Any:
    smallest = {"config": "tiny_gqa", "topology": "v5e:2x2", "mesh": "2,2,1", "schedules": SCHEDULES[:1]}
    smallest |= {"microbatches": 2, "seq": 64}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--config", default="llama_1b_16", choices=["llama_1b_16", "tiny_gqa"])
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--mesh", type=mesh_sizes, default="4,2,2", metavar="PP,DP,TP")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--microbatches", type=whole_number, default=16)
    parser.add_argument("--seq", type=whole_number, default=2048)
    parser.add_argument("--remat", default="layer", help="as pipeline.remat")
    parser.add_argument("--policy", default="zero3", choices=POLICY_NAMES)
    parser.add_argument("--kernel", default="xla", choices=["xla", "splash"])
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="of the compiler")
    return parser.parse_args()


def compile_step(schedule: str, devices: Any, args: Any) -> Step:
    import parallax as px
    from parallax.analysis.compiled.program import read_step
    from parallax.analysis.planned.step_time import step_time
    from parallax.analysis.traced.flops import flops_per_token
    from parallax.hardware.chips import chip
    from parallax.step.step import step_of

    config = config_of(args.config)
    config.mesh.pp, config.mesh.dp, config.mesh.tp = map(int, args.mesh.split(","))
    config.pipeline.update(
        schedule=schedule,
        virtual=2 if schedule == "interleaved" else 1,
        microbatches=args.microbatches,
        remat=args.remat,
    )
    config.data_parallel.policy = args.policy
    config.model.kernel = args.kernel
    config.data.seq, config.data.global_batch = args.seq, args.microbatches * config.mesh.dp
    settings = px.read_settings(config.to_dict())
    mesh = px.make_mesh(settings.mesh, devices)
    train_step = step_of(settings, mesh)
    model = train_step.model
    options = dict(option.split("=", 1) for option in args.options)
    started = time.perf_counter()
    compiled = train_step.lower(config.data.global_batch, args.seq).compile(compiler_options=options)
    compile_secs = time.perf_counter() - started
    read = read_step(compiled, model, seq=args.seq)
    tokens = config.data.global_batch * args.seq / mesh.size
    flops = flops_per_token(settings.model, model.plan.declared, seq=args.seq) * tokens
    return Step(read, step_time(read, chip(args.topology), flops, kernel_efficiency=1.0), compile_secs)


def row(step: Step) -> str:
    read, times = step.compiled, step.time
    sizes = (f"{getattr(read, name) / 2**30:.2f}" for name in SIZES)
    kinds = [(made.kind, made.asynchronous) for made in read.collectives]
    counts = (f"{kinds.count((kind, True))}/{sum(found == kind for found, _ in kinds)}" for kind in COLLECTIVES)
    beside = messages(read.timeline)
    exposed = sum(times.exposed_secs.values()) / times.total_secs
    shares = (f"{100 * share:.1f}" for share in (exposed, times.bubble, times.mfu))
    passes = f"{sum(beside)}/{len(beside)}"
    cells = *sizes, *counts, passes, f"{1e3 * times.total_secs:.0f}", *shares, f"{step.compile_secs:.0f}"
    return "".join(f"{cell:>{len(name) + 2}}" for name, cell in zip(COLUMNS, cells, strict=True))


def messages(events: list) -> list[bool]:
    """For each message between stages, whether there is a branch or a loop between its start and its done."""
    from parallax.analysis.compiled.program import BranchEvent, CompiledCollective, End, LoopEvent

    found = []
    for at, event in enumerate(events):
        if isinstance(event, CompiledCollective) and event.kind == "permute" and event.axes == ("pp",):
            done = events.index(End(event.op), at)
            found.append(any(isinstance(other, BranchEvent | LoopEvent) for other in events[at:done]))
        for inner in (
            event.sides if isinstance(event, BranchEvent) else [event.body] if isinstance(event, LoopEvent) else []
        ):
            found += messages(inner)
    return found


if __name__ == "__main__":
    run_benchmark(main)
