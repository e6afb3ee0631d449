"""What a save writes on each host, and whether it ends before a preempted host does."""

import math
from collections.abc import Iterator

import jax

from parallax.analysis.planned.layouts import model_on_topology
from parallax.analysis.planned.topology import Topology
from parallax.analysis.traced.memory import predicted_state
from parallax.config.settings import Settings
from parallax.display.units import in_bytes

# Of the machines of slices with several of them: https://docs.cloud.google.com/tpu/docs/v5e, v5p, v6e and tpu7x.
TPU_CHIPS_A_HOST = 4


def devices_a_host(topology: Topology) -> int:
    """Devices of a host: the chips of a TPU's machine, or the GPUs on a switch."""
    chips = min(math.prod(topology.shape), TPU_CHIPS_A_HOST) if topology.is_tpu else topology.shape[-1]
    return chips * topology.chip.cores


def saved_bytes(settings: Settings, topology: Topology) -> tuple[int, int]:
    """Bytes of a state, and at most how many of them a host writes: each shard is written once."""
    state = predicted_state(model_on_topology(settings, topology))
    whole = on_host = 0
    for leaf in jax.tree.leaves(state):
        size, shard = (
            math.prod(shape) * leaf.dtype.itemsize for shape in (leaf.shape, leaf.sharding.shard_shape(leaf.shape))
        )
        whole += size
        on_host += min(size, shard * devices_a_host(topology))
    return whole, on_host


def saving_lines(settings: Settings, topology: Topology, step_secs: float, write_rate: float) -> Iterator[str]:
    """Whether a save ends before checkpoint.deadline_secs, after the step in progress, if each host writes so many MB
    a second; what rate it needs if none is given."""
    deadline = settings.checkpoint.deadline_secs
    if not (deadline or write_rate):
        return
    (whole, on_host), devices = saved_bytes(settings, topology), devices_a_host(topology)
    yield f"saving: a state of {in_bytes(whole)}, at most {in_bytes(on_host)} a host of {devices} devices"
    left = deadline - step_secs
    secs = on_host / (write_rate * 1e6) if write_rate else 0.0
    if write_rate:
        yield f"{secs:.1f} s at --write-rate={write_rate:g} MB/s a host, after a step of {step_secs:.1f} s"
    if not deadline:
        return
    needed = f"{on_host / left / 1e6:,.0f} MB/s a host" if left > 0 else "a shorter step"
    if left <= 0 or secs > left:
        copied = "" if settings.checkpoint.local else ", or set checkpoint.local, where a step is copied first"
        yield f"checkpoint.deadline_secs={deadline} is too short: it needs {needed}{copied}"
    else:
        yield f"checkpoint.deadline_secs={deadline} needs {needed}" + (
            ": it suffices" if write_rate else "; see --write-rate"
        )
