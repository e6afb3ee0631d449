"""Orders of tokens on context ranks, for models whose layers have windows: zigzag beside contiguous.

    python benchmarks/orders.py [--layers "near*8" "(near*3 dense)*2"] [--window 64] [--seq 1024] [--ranks 4]
    python benchmarks/orders.py --topology v5e:4x4 --config llama_1b_128k --layers "near*16" --window 1024

For each sequence of as many layers as the config has, of which `near` have a window, and each form and order: the
scores of a head that the busiest rank computes in all layers forward, and what a device's attention sends over mesh.cp
in a step, from its traced program. Then a training step of --config at --seq on --ranks simulated devices, in one
process and in turns: CPU seconds, over all threads, and their ratio to the first row, medians over rounds. All losses
of the same layers must agree, or the benchmark fails.

With --topology nothing runs: the step is the config's own on these chips, and the analytic plan's seconds take the
place of CPU seconds, with those that wait for messages over mesh.cp. The chips need not be present.
"""

import itertools
import statistics
from typing import Any

from arguments import Arguments, config_of, run_benchmark, whole_number
from bare import packed_batch, stepper
from context import TOLERANCE, in_turns

ORDERS = ("zigzag", "contiguous")


def main() -> None:
    smallest = {"config": "tiny_gqa", "seq": 64, "ranks": 2, "window": 8, "rounds": 1, "layers": ["near*2"]}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--config", default="bench_small")
    parser.add_argument("--layers", nargs="+", default=["near*8", "(near*3 dense)*2"])
    parser.add_argument("--window", type=whole_number, default=64)
    parser.add_argument("--seq", type=whole_number, default=1024)
    parser.add_argument("--ranks", type=whole_number, default=4)
    parser.add_argument("--forms", nargs="+", default=["all_gather"], choices=("all_gather", "ring"))
    parser.add_argument("--rounds", type=whole_number, default=5)
    parser.add_argument("--topology", default="", help="chips that need not be present, as v5e:4x4")
    args = parser.parse_args()
    import parallax as px

    px.simulate_devices(1 if args.topology else args.ranks)
    last = "step s  waits s" if args.topology else "CPU s  / first"
    print(f"layers            form        order       scores / M   MiB sent  {last}")
    for layers in args.layers:
        rows = {key: settings_of(args, layers, *key) for key in itertools.product(args.forms, ORDERS)}
        times = planned(rows, args.topology) if args.topology else measured(rows, args.rounds)
        for (form, order), settings in rows.items():
            counts = f"{scores(settings) / 1e6:10.2f}{sent(settings) / 2**20:11.3f}"
            print(f"{layers:18}{form:12}{order:12}{counts}{times[form, order]}", flush=True)


def settings_of(args, layers: str, form: str, order: str) -> Any:
    """The settings of a step: those of the config on a topology, otherwise with as many tokens in other rows."""
    import parallax as px
    from parallax.analysis.planned.topology import read_topology
    from parallax.step.resolve import resolve

    config = config_of(args.config)
    config.layout.context, config.layout.order = form, order
    if not args.topology:
        tokens = config.data.global_batch * config.data.seq
        config.data.seq, config.data.global_batch = args.seq, max(tokens // args.seq, 1)
        config.mesh.pp = config.mesh.dp = config.mesh.tp = 1
        config.mesh.cp = config.mesh.simulate = args.ranks
        config.model.kernel, config.pipeline.microbatches = "xla", 1
    kinds = {"near": {"sliding_window": args.window}} if "near" in layers else {}
    settings = px.read_settings(config.to_dict(), model=dict(layers_of=layers, kinds=kinds))
    return resolve(settings, read_topology(args.topology).as_devices) if args.topology else settings


def planned(rows: dict[tuple, Any], topology: str) -> dict[tuple, str]:
    """Seconds of a step as the analytic plan has them."""
    from parallax.analysis.planned.step_time import predict
    from parallax.analysis.planned.topology import read_topology

    steps = {key: predict(settings, read_topology(topology)) for key, settings in rows.items()}
    return {key: f"{step.secs:8.3f}{step.exposed_secs.get('cp', 0):9.4f}" for key, step in steps.items()}


def measured(rows: dict[tuple, Any], rounds: int) -> dict[tuple, str]:
    """CPU seconds of a step, on simulated devices."""
    import jax

    import parallax as px

    takes: dict[tuple, Any] = {}
    losses: dict[tuple, list[float]] = {key: [] for key in rows}
    for key, settings in rows.items():
        batch = packed_batch(settings.data.global_batch, settings.data.seq, settings.model.vocab)
        step = px.step_of(settings, px.make_mesh(settings.mesh, jax.devices()[: settings.mesh.cp]))
        take = stepper(step.take, step.init(), jax.device_put(batch, step.model.batch_sharding))
        takes[key] = lambda take=take, key=key: losses[key].append(take())
    secs = in_turns(takes, rounds)
    first, *_ = secs.values()
    reference, *_ = losses.values()
    assert all(abs(loss[-1] / reference[-1] - 1) <= TOLERANCE for loss in losses.values()), losses
    ratios = {key: statistics.median(x / y for x, y in zip(of_row, first)) for key, of_row in secs.items()}
    return {key: f"{statistics.median(of_row):7.2f}{ratios[key]:9.3f}" for key, of_row in secs.items()}


def scores(settings) -> int:
    """Scores of a head in all layers, forward, of the rank that computes the most."""
    from parallax.model.kernels.flops import computed_scores

    sizes = dict(seq=settings.data.seq, width=settings.model.d_head, ranks=settings.mesh.cp)
    sizes |= dict(ring=settings.layout.context == "ring", order=settings.layout.order)
    kernel = settings.model.kernel
    return sum(computed_scores(kernel, "fwd", window=window, **sizes) for window in settings.model.windows)


def sent(settings) -> float:
    """Bytes that a device's attention sends over cp in a step."""
    from parallax.analysis.traced.collectives import bytes_by, collectives_by_rank
    from parallax.analysis.traced.trace import abstract_mesh
    from parallax.pipeline import ShardedModel

    model = ShardedModel(settings, abstract_mesh(settings.mesh.sizes, simulated=settings.mesh.simulate > 0))
    (rank,) = collectives_by_rank(model, settings.data.global_batch, settings.data.seq)
    calls = (call for call in rank if call.module.startswith("attention"))
    return bytes_by(calls, "axes").get((("cp",),), 0)


if __name__ == "__main__":
    run_benchmark(main)
