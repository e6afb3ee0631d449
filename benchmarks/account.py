"""Time of a training step by part of the model: profiles the work of benchmarks/step.py, or the quickstart's step.

    python benchmarks/account.py [--mesh 2,2,2] [--remat none] [--policy zero1] [--microbatches 8]
    python benchmarks/account.py --config quickstart --mesh 1,1,1 --microbatches 4

One step runs under the profiler. The time of every operation, added over devices and threads, is grouped by module, as
in the report of a trace, and by whether it multiplies matrices. Waiting inside a collective counts as that collective:
on simulated devices an idle rank waits in one.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from arguments import WORKS, Arguments, mesh_sizes, run_benchmark, whole_number

from parallax.config.sections import POLICY_NAMES

CONTROL = ("while", "conditional", "call")
SENT = "collectives"


def main() -> None:
    smallest = {"mesh": "1,1,1", "config": "tiny_gqa", "microbatches": 1}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--config", default="bench_small", choices=(*WORKS, "quickstart"))
    parser.add_argument("--mesh", type=mesh_sizes, default="2,2,2", metavar="PP,DP,TP")
    parser.add_argument("--remat", default="none", choices=["none", "layer", "stage"])
    parser.add_argument("--policy", default="zero3", choices=POLICY_NAMES)
    parser.add_argument("--microbatches", type=whole_number, default=8)
    args = parser.parse_args()
    import jax
    from step import prepare

    work = prepare(args.config, args.mesh, remat=args.remat, policy=args.policy, microbatches=args.microbatches)
    state, _ = jax.block_until_ready(work.step(work.state, work.batch))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(work.step(state, work.batch))
        (trace,) = Path(folder).glob("**/*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(trace))
    totals = sorted_times(profile, operations(work.step.as_text()))
    modules: Counter = Counter()
    for (module, _), nanoseconds in totals.items():
        modules[module] += nanoseconds
    whole, products = sum(modules.values()), sum(totals[module, True] for module in modules)
    print(f"{'of a step':24}{'share':>8}{'of it in matmuls':>20}")
    for module, nanoseconds in modules.most_common():
        print(f"{module:24}{nanoseconds / whole:8.1%}{totals[module, True] / whole:20.1%}")
    print(f"{'together':24}{1:8.1%}{products / whole:20.1%}")


def operations(hlo: str) -> dict[str, tuple[str, bool]]:
    """The module of each operation of a compiled program, and whether it is a matrix product."""
    from parallax.analysis.compiled.hlo import COLLECTIVES, parse_hlo
    from parallax.analysis.compiled.program import PRODUCT, module_of

    known = {}
    for computation in parse_hlo(hlo).computations.values():
        for op in computation.instructions:
            sends = op.kind.removesuffix("-start").removesuffix("-done") in COLLECTIVES
            is_product = op.kind == "dot" or op.op_name.endswith(PRODUCT)
            if op.kind not in CONTROL:
                known[op.name] = (SENT, False) if sends else (module_of(op.op_name), is_product)
    return known


def sorted_times(profile: Any, known: dict[str, tuple[str, bool]]) -> Counter:
    """Nanoseconds by module and by whether they are of matrix products."""
    totals: Counter = Counter()
    for event in (event for plane in profile.planes for line in plane.lines for event in line.events):
        if event.name in known:
            totals[known[event.name]] += event.duration_ns
    return totals


if __name__ == "__main__":
    run_benchmark(main)
