"""A config's training step, compiled and priced for GPUs that are not here; run as a process of its own.

python tests/gpu_configs.py CONFIG TOPOLOGY [SECTION.KEY=VALUE ...]
"""

import pathlib
import sys

from parallax.analysis.planned.step_time import compile_and_read, predicted
from parallax.analysis.planned.topology import devices_of, without_chips
from parallax.cli.command import load_config
from parallax.cli.plan import located
from parallax.config.settings import read_settings
from parallax.display.units import in_bytes
from parallax.hardware.chips import KERNEL_EFFICIENCY, REACHED, AttentionShares, Reached

KERNELS = AttentionShares(KERNEL_EFFICIENCY, KERNEL_EFFICIENCY)
AS_COMPILED = Reached(attention=KERNELS, packed=KERNELS, triton=KERNELS)  # the rates of a compiled step
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def main(name: str, where: str, *changes: str) -> None:
    without_chips(["--topology"])
    config, _ = load_config(str(CONFIGS / f"{name}.py"))
    written = dict(change.split("=") for change in changes)
    config.update_from_flattened_dict({key: int(v) if v.isdecimal() else v for key, v in written.items()})
    settings, topology = located(read_settings(config.to_dict()), where)
    devices = devices_of(topology)
    assert len(devices) == topology.devices and {device.platform for device in devices} == {"gpu"}
    hosts = len({device.process_index for device in devices})
    assert hosts == topology.devices // topology.shape[-1]
    found = compile_and_read(settings, topology, devices)
    planned = predicted(settings, topology)
    time, sent = found.time, sum(row.bytes for row in found.sent)
    assert 0 < time.compute_secs < time.total_secs and 0 < time.mfu < topology.chip.matmul_speed(
        settings.model.matmul
    ), found
    assert all(secs >= 0 for secs in time.exposed_secs.values())
    assert all(0 <= row.hidden <= row.asynchronous <= 1 for row in found.sent)
    assert bool(sent) == (topology.devices > 1)
    hidden = sum(row.bytes * row.hidden for row in found.sent)
    fits = "fits" if found.peak_bytes <= topology.chip.usable_bytes else "does not fit"
    print(
        f"| {name} | {where} | {fits} | {found.peak_bytes / 2**30:.1f} | {planned.peak_bytes / 2**30:.1f} "
        f"| {time.total_secs:.3f} | {100 * time.mfu:.0f} % | {in_bytes(sent)} | {in_bytes(hidden)} |"
    )
    REACHED[topology.chip.name] = AS_COMPILED
    same = predicted(settings, topology).secs
    print(f"planned at the compiled step's rates: {same:.3f} s, {same / time.total_secs:.3f} of the compiled step")
    print(f"planned: {planned.secs:.3f} s, {planned.secs / time.total_secs:.3f} of the compiled step")
    print(f"predicted peak over the compiler's: {planned.peak_bytes / found.peak_bytes:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
