"""Time of a training step by purpose: profiles the reference work of benchmarks/step.py.

    python benchmarks/account.py [--mesh 2,2,2] [--remat none] [--policy zero1] [--microbatches 8]

One step runs under the profiler. The time of every operation, added over devices and threads, is grouped by purpose.
Waiting inside a collective counts as that collective: on simulated devices an idle rank waits in one.
"""

import re
import tempfile
from collections import Counter
from pathlib import Path

from arguments import WORKS, Arguments, mesh_sizes, run_benchmark, whole_number

from parallax.config.sections import POLICY_NAMES

# The purpose of an operation is the first pattern that its kind, name and origin match.
KINDS = {
    "collectives": r"all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all",
    "matmuls of layers": r"Block.*dot_general|^dot .*Block",
    "logits' matmuls": r"/logits/|Head.*dot_general",
    "attention's softmax and masks": r"attention\._attend|_attend",
    "MLP's activation": r"mlp/(mul|jit\(silu\))",
    "norms": r"norm",
    "rotation": r"_project",
    "slots of activations": r"dynamic_index_in_dim|dynamic_update_index_in_dim|dynamic-(update-)?slice",
    "cross-entropy": r"jvp\(.*\)/(exp|sub|log|reduce|select|mul|div|eq)|while/body.*(exp|log)",
    "embedding": r"Embedding",
}
CONTROL = ("while", "conditional", "call")


def main() -> None:
    smallest = {"mesh": "1,1,1", "config": "tiny_gqa", "microbatches": 1}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--config", default="bench_small", choices=WORKS)
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
        totals = sorted_times(jax.profiler.ProfileData.from_file(str(trace)), operations(work.step.as_text()))
    whole = sum(totals.values())
    for purpose, nanoseconds in totals.most_common():
        print(f"{purpose:32}{nanoseconds / whole:8.1%}")


def operations(hlo: str) -> dict[str, str]:
    """Kind and origin of each operation of a compiled program."""
    found = {}
    for line in hlo.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\(", line)
        origin = re.search(r'op_name="([^"]*)"', line)
        if match and match[2] not in CONTROL:
            found[match[1]] = f"{match[2]} {match[1]} {origin[1] if origin else ''}"
    return found


def sorted_times(profile, known: dict[str, str]) -> Counter:
    """Nanoseconds by purpose."""
    totals: Counter = Counter()
    for event in (event for plane in profile.planes for line in plane.lines for event in line.events):
        if event.name in known:
            matches = (purpose for purpose, pattern in KINDS.items() if re.search(pattern, known[event.name]))
            totals[next(matches, "optimizer, copies and the rest")] += event.duration_ns
    return totals


if __name__ == "__main__":
    run_benchmark(main)
