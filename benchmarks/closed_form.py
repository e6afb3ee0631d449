"""Prices in closed form beside those of traced steps, for legal layouts drawn at random.

    python benchmarks/closed_form.py [--config llama_1b_16 --topology v5e:4x4] [--layouts 12] [--seed 0]
    python benchmarks/closed_form.py --config llama2_7b_64 --topology v5p:4x4x4

Layouts are drawn from those that a sweep looks at. For each: seconds of a step and GiB of a chip in closed form, and by
how much they differ from the traced step's. Last, the largest differences, and CPU seconds of a layout either way. The
benchmark fails if a time differs by more than a sweep allows for. The chips need not be present.
"""

import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from arguments import Arguments, config_of, run_benchmark, whole_number


def main() -> None:
    smallest = {"config": "tiny_gqa", "topology": "v5e:1x2", "layouts": 1}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--config", default="llama_1b_16")
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--layouts", type=whole_number, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from parallax.analysis.planned.sweep import TIME_WITHIN

    rows = []
    print("  closed, s  of traced      GiB  of traced")
    for layout, closed, traced, spent in prices(args):
        apart = closed.secs / traced.secs - 1, closed.peak_bytes / traced.peak_bytes - 1
        figures = (
            f"{closed.secs:11.4f}{100 * apart[0]:+10.2f} %{closed.peak_bytes / 2**30:9.2f}{100 * apart[1]:+9.1f} %"
        )
        print(f"{figures}  {layout}", flush=True)
        rows.append((*map(abs, apart), *spent))
    secs, memory, *_ = map(max, zip(*rows, strict=True))
    each = [sum(column) / len(rows) for column in zip(*rows, strict=True)][2:]
    print(f"at most: {100 * secs:.2f} % of the time, {100 * memory:.1f} % of the memory")
    print(f"CPU s a layout: {each[0]:.2f} in closed form, {each[1]:.2f} traced")
    assert secs <= TIME_WITHIN or args.smoke, f"a time differs by {100 * secs:.2f} %"


def prices(args: Any) -> Iterator[tuple[str, Any, Any, tuple[float, float]]]:
    """Legal layouts, each with its estimate in closed form and by its traced step, and the CPU seconds of both."""
    from parallax.analysis.planned.closed_form import ClosedForm
    from parallax.analysis.planned.layouts import choices
    from parallax.analysis.planned.step_time import predict
    from parallax.analysis.planned.topology import read_topology
    from parallax.config.settings import read_settings
    from parallax.errors import ParallaxError
    from parallax.step.resolve import resolve

    config, topology = config_of(args.config), read_topology(args.topology)
    if args.smoke:
        config.mesh.update(pp=1, dp=2, tp=1)
    settings = resolve(read_settings(config.to_dict()), topology.as_devices)
    closed, drawn = ClosedForm(settings, topology), random.Random(args.seed)
    legal, every = 0, [*filter(closed.knows, choices(settings, topology))]
    drawn.shuffle(every)
    for choice in every:
        begun = time.process_time()
        try:
            traced = predict(choice.applied(settings), topology)
        except ParallaxError:
            continue
        between = time.process_time()
        priced = closed.estimate(choice)
        legal += 1
        spent = time.process_time() - between, between - begun
        words = choice.mesh, f"M={choice.microbatches}", choice.schedule * (choice.pp > 1), choice.remat, choice.policy
        yield " ".join(filter(None, words)), priced, traced, spent
        if legal == args.layouts:
            return
    sys.exit(f"only {legal} of {len(every)} layouts of {args.config} on {args.topology} are legal")


if __name__ == "__main__":
    run_benchmark(main)
