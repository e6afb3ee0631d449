"""Predicted and measured times of layouts on simulated devices: does a plan rank them correctly?

    python benchmarks/plan.py [--rounds 5] [--layouts 10]

The work is that of configs/bench_small.py on 8 devices, in each layout of LAYOUTS. The speed of a device is measured as
in `parallax.plan` without a topology: matrix products, copies and a gather on all devices together. The devices share
the machine's cores, so a bubble costs nothing and nothing overlaps. Layouts run in turn, one step each; the minimum
over the rounds counts, since the machine may have other work. Printed are both times, both ranks, and Spearman's
correlation of the ranks, which is 1 if the order is the same.
"""

import time
from typing import Any

import numpy as np
from arguments import WORKS, Arguments, config_of, run_benchmark, whole_number

DEVICES = 8
# pp, dp, tp, microbatches, schedule, virtual, remat, policy, exceptions, prefetch
LAYOUTS = [
    (1, 8, 1, 1, "gpipe", 1, "none", "zero3", "", 0),
    (1, 8, 1, 4, "gpipe", 1, "none", "zero3", "", 0),
    (1, 8, 1, 4, "gpipe", 1, "none", "zero1", "", 0),
    (1, 8, 1, 4, "gpipe", 1, "layer", "zero3", "", 0),
    (1, 4, 2, 2, "gpipe", 1, "none", "zero1", "", 0),
    (1, 2, 4, 2, "gpipe", 1, "none", "zero1", "", 0),
    (1, 1, 8, 1, "gpipe", 1, "none", "zero3", "", 0),
    (2, 4, 1, 4, "gpipe", 1, "none", "zero1", "", 0),
    (2, 2, 2, 4, "one_f_one_b", 1, "none", "zero1", "", 0),
    (4, 2, 1, 8, "one_f_one_b", 1, "layer", "zero1", "", 0),
]


def main() -> None:
    args = parse()
    import parallax as px

    px.simulate_devices(DEVICES)
    from parallax.analysis.planned.devices import local_topology
    from parallax.analysis.planned.layouts import Choice
    from parallax.analysis.planned.step_time import predict

    settings, choices = work(args.config), [Choice(*layout) for layout in LAYOUTS[: args.layouts]]
    topology = local_topology(settings.model.dtype)
    chip = topology.chip
    rates = chip.flops[settings.model.dtype] / 1e9, chip.hbm_bandwidth / 1e9, chip.ici_bandwidth / 1e9
    print("a device: {:.1f} GFLOP/s of products, {:.2f} GB/s of copies, {:.2f} GB/s of a gather".format(*rates))
    predicted = [predict(choice.applied(settings), topology).secs for choice in choices]
    measured = measure([choice.applied(settings) for choice in choices], args.rounds)
    rows = list(zip(choices, predicted, measured, ranks(predicted), ranks(measured)))
    print(f"{'pp·dp·tp  M schedule     remat  policy':42}{'predicted':>10}{'measured':>10}{'ranks':>10}")
    for choice, guess, secs, *places in sorted(rows, key=lambda row: row[2]):
        mesh = "·".join(map(str, choice[:3]))
        name = f"{mesh:8}{choice.microbatches:3} {choice.schedule:12} {choice.remat:6} {choice.policy}"
        print(f"{name:42}{guess:8.3f} s{secs:8.3f} s{places[0]:6.0f}{places[1]:4.0f}")
    print(f"Spearman's correlation of {len(rows)} layouts: {spearman(predicted, measured):.2f}")


def parse() -> Any:
    smallest = {"config": "tiny_gqa", "rounds": 1, "layouts": 2}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--config", default="bench_small", choices=WORKS)
    parser.add_argument("--rounds", type=whole_number, default=5)
    parser.add_argument("--layouts", type=whole_number, default=len(LAYOUTS), help="the first of them alone")
    return parser.parse_args()


def work(name: str) -> Any:
    import parallax as px

    config = config_of(name)
    config.mesh.pp, config.mesh.dp, config.mesh.tp = 1, DEVICES, 1
    config.data.global_batch = 32
    return px.read_settings(config.to_dict())


def measure(layouts: list[Any], rounds: int) -> list[float]:
    """The least seconds of a step of each."""
    import jax

    running, least = [prepare(settings) for settings in layouts], [float("inf")] * len(layouts)
    for _ in range(rounds):
        for at, (step, state, batch) in enumerate(running):
            begun = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch))
            least[at] = min(least[at], time.perf_counter() - begun)
            running[at] = step, state, batch
    return least


def prepare(settings: Any) -> tuple:
    """A layout's compiled step, its state and a batch, run once."""
    import jax

    import parallax as px
    from parallax.step.step import TrainStep, init_state, model_of, optimizer_of

    model = model_of(settings, px.make_mesh(settings.mesh))
    tx = optimizer_of(model)
    shape = settings.data.global_batch, settings.data.seq
    tokens = np.random.default_rng(0).integers(0, settings.model.vocab, shape, dtype=np.int32)
    positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    batch = {
        "tokens": tokens,
        "labels": np.roll(tokens, -1, 1),
        "segments": np.ones_like(tokens),
        "positions": positions,
    }
    batch = jax.device_put(batch, model.batch_sharding)
    step = TrainStep(model, tx, 0)
    state, _ = jax.block_until_ready(step(init_state(model, tx, 0), batch))
    return step, state, batch


def ranks(values: list[float]) -> np.ndarray:
    """1 for the least."""
    return 1 + np.argsort(np.argsort(values))


def spearman(one: list[float], other: list[float]) -> float:
    """Correlation of ranks."""
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


if __name__ == "__main__":
    run_benchmark(main)
