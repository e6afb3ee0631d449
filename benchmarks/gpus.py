"""The training steps of all configs on hosts of eight GPUs that are not here: memory, time, and what is hidden.

    python benchmarks/gpus.py [--configs llama2_7b_64 quickstart] [--topologies H100:1x8 H200:1x8 B200:1x8]

Needs XLA's compiler for GPUs: pip install -e '.[gpu-compiler]'. A config for another number of devices gets as
many data ranks as the GPUs leave and the same rows for each device; a kernel of attention for TPUs becomes "auto". A
row has the compiler's memory, the plan's for the same step, the time by a roofline over the compiled program, the bytes
that a GPU sends in a step, and how many of them compute hides.
"""

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import Arguments, absent_devices, config_of, run_benchmark

CONFIGS = sorted(path.stem for path in (Path(__file__).resolve().parents[1] / "configs").glob("*.py"))
HOSTS = ("H100:1x8", "H200:1x8", "B200:1x8")
HEAD = ("config", "GPUs", "", "memory", "predicted", "step", "MFU", "sent", "hidden")


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"configs": ["tiny_gqa"], "topologies": ["H100:1x8"]})
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=CONFIGS, metavar="CONFIG")
    parser.add_argument("--topologies", nargs="+", default=[*HOSTS], metavar="TOPOLOGY")
    args = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |")
    print("|---" * len(HEAD) + "|")
    for name in args.configs:
        for where in args.topologies:
            started = time.perf_counter()
            print(f"| `{name}` | {where} | {' | '.join(figures(name, where))} |", flush=True)
            print(f"{name} on {where}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


def figures(name: str, where: str) -> list[str]:
    """The cells of a row after the first two; of a step that is refused, the reason."""
    from parallax.analysis.planned.step_time import compile_and_read, predict
    from parallax.analysis.planned.topology import read_topology
    from parallax.config.settings import read_settings
    from parallax.display.units import in_bytes
    from parallax.errors import ConfigError
    from parallax.step.resolve import resolve

    devices, topology = absent_devices(where), read_topology(where)
    try:
        settings = resolve(read_settings(on_devices(config_of(name), len(devices)).to_dict()), topology.as_devices)
        predicted = predict(settings, topology)
        made = compile_and_read(settings, topology, devices, kernel_efficiency=1.0)
    except ConfigError as error:
        return [f"no: {str(error).splitlines()[0]}", *[""] * (len(HEAD) - 3)]
    sent, hidden = (sum(row.bytes * share(row) for row in made.sent) for share in (lambda _: 1, lambda row: row.hidden))
    return [
        "fits" if made.peak_bytes <= topology.chip.usable_bytes else "does not fit",
        in_bytes(made.peak_bytes),
        in_bytes(predicted.peak_bytes),
        f"{made.time.total_secs:.4g} s",
        f"{100 * made.time.mfu:.0f} %",
        *(in_bytes(bytes) if bytes else "-" for bytes in (sent, hidden)),
    ]


def on_devices(config: Any, count: int) -> Any:
    """The config with as many data ranks as `count` devices leave, and the same rows for each device."""
    sizes = config.mesh.to_dict()
    before = sizes.pop("simulate") or math.prod(sizes.values())
    others = math.prod(size for axis, size in sizes.items() if axis != "dp")
    config.mesh.update(dp=count // others, simulate=0)
    if before > 0:  # otherwise the config is for any number of devices
        config.data.global_batch = config.data.global_batch * count // before
    if config.model.kernel == "splash":
        config.model.kernel = "auto"
    return config


if __name__ == "__main__":
    run_benchmark(main)
