"""A config's training step, compiled and priced for a kind of TPU; run as a process of its own, for libtpu's sake.

python tests/tpu_configs.py CONFIG CHIP
"""

import math
import pathlib
import sys

from parallax.analysis.planned.layouts import model_on_topology
from parallax.analysis.planned.step_time import compile_and_read
from parallax.analysis.planned.topology import devices_of, without_chips
from parallax.analysis.traced.memory import predicted_memory
from parallax.cli.command import load_config
from parallax.cli.plan import located
from parallax.config.settings import read_settings
from parallax.hardware.chips import chip

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
# The slices of a chip with so many dims, by their number of chips.
SLICES = {
    2: {8: "2x4", 16: "4x4", 64: "8x8", 128: "8x16"},
    3: {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "4x4x2", 64: "4x4x4", 128: "4x4x8"},
}
NEARLY = 0.75  # of a chip's memory: what the compiler refuses as too large is predicted to need at least this much


def main(name: str, kind: str) -> None:
    without_chips(["--topology"])
    config, _ = load_config(str(CONFIGS / f"{name}.py"))
    settings = read_settings(config.to_dict())
    sizes = settings.mesh.sizes.values()
    count = 8 if -1 in sizes else math.prod(sizes)
    where = f"{kind}:{SLICES[chip(kind).torus_dims][count // chip(kind).cores]}"
    settings, topology = located(settings, where)
    found = compile_and_read(settings, topology, devices_of(topology))
    predicted = predicted_memory(model_on_topology(settings, topology), settings).peak
    if found.refused:
        assert predicted > NEARLY * topology.chip.usable_bytes, (predicted, found.refused)
        print(f"{name} on {where}: too large, {predicted / 2**30:.1f} GiB predicted")
        return
    assert found.arguments + found.temporaries <= topology.chip.usable_bytes
    time = found.time
    assert 0 < time.compute_secs < time.total_secs and 0 < time.mfu < 1 and 0 <= time.bubble < 1, found
    assert all(secs >= 0 for secs in time.exposed_secs.values())
    print(f"{name} on {where}: {1e3 * time.total_secs:.1f} ms a step, MFU {100 * time.mfu:.1f} %")
    print(f"predicted peak over the compiler's: {predicted / found.peak_bytes:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
