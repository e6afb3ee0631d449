"""Where a step would run: chips of one kind and the links between them, or the devices of this machine."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from parallax.chips import Chip, chip
from parallax.errors import ConfigError
from parallax.plan.machine import measured
from parallax.report.links import closes

TOPOLOGY = re.compile(r"[^:]+:[1-9][0-9]*(x[1-9][0-9]*)*")


# Share of a data sheet's FLOP/s that matrix products reach, what is fused with them included, by the TPU compiler's
# estimate of cycles: 0.83 and 0.79 in the programs of docs/plan.md, for v5e and v5p.
MATMUL_EFFICIENCY = 0.8


class Place(NamedTuple):
    """So many chips along each dim of a torus; of chips on switches, the last number is those on one switch.

    `shared`: the devices are simulated by one machine and share its cores, so that an idle one lends them to others.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    shared: bool = False

    @property
    def devices(self) -> int:
        return math.prod(self.shape)

    @property
    def is_tpu(self) -> bool:
        return self.chip.torus_dims > 0

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s that matrix products reach; what was measured is not reduced."""
        return self.chip.peak(dtype) * (1 if self.shared else MATMUL_EFFICIENCY)

    def bandwidth(self, sizes: Mapping[str, int], axes: Sequence[str], *, neighbours: bool = False) -> float:
        """Bytes a second, one way, at which a device sends to the others along these axes of a mesh of these sizes.

        A torus dim that is a ring can be sent along both ways, another one way; several dims at once. `neighbours`:
        all is for one of them, so that there is one link to take.
        """
        if not self.is_tpu:
            inside = math.prod(n for axis, n in _up_to_last(sizes, axes)) <= self.shape[-1]
            return self.chip.ici_links * self.chip.ici_bandwidth if inside else self.chip.dcn_bandwidth
        links = 1 if neighbours else sum(self._links(sizes)[axis] for axis in axes)
        return links * self.chip.ici_bandwidth

    def _links(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """How many links a chip can send on along each axis; the last axis is laid out first, along few dims."""
        left, links = list(self.shape), {}
        for axis in reversed(sizes):
            n, links[axis] = sizes[axis], 0
            for dim in sorted(range(len(left)), key=lambda dim: (left[dim] != n, -left[dim])):
                part = math.gcd(n, left[dim])
                if part > 1:
                    links[axis] += 2 if part == self.shape[dim] and closes(self.chip, list(self.shape), part) else 1
                    left[dim], n = left[dim] // part, n // part
            links[axis] = max(links[axis], 1)
        return links


def read_topology(text: str) -> Place:
    """The place of "v5p:4x4x4"; ConfigError where the chip is unknown or the sizes are no shape of a slice of it.

    >>> place = read_topology("v5p:4x4x4")
    >>> place.devices, place.bandwidth({"pp": 1, "dp": 16, "tp": 4}, ["dp"]) / 1e9
    (64, 400.0)
    """
    if not TOPOLOGY.fullmatch(text):
        raise ConfigError(
            f"--topology={text} is no topology; write CHIP:SIZES, such as v5p:4x4x4, v5e:4x4 or H100:8 for one host."
        )
    known = chip(text)
    shape = tuple(map(int, text.split(":")[1].split("x")))
    if known.torus_dims and len(shape) != known.torus_dims:
        example = "x".join(["4"] * known.torus_dims)
        raise ConfigError(
            f"--topology={text} has {len(shape)} sizes, but slices of {known.name} have {known.torus_dims}; "
            f"write {text.split(':')[0]}:{example}, for {4**known.torus_dims} chips."
        )
    return Place(text, known, shape)


def local_place(dtype: str) -> Place:
    """The devices that JAX has here. What CPUs do a second is measured, in `dtype`, by all of them together."""
    devices = jax.devices()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        return Place(f"{len(devices)} simulated devices", measured(dtype), (len(devices),), shared=True)
    return Place(f"{len(devices)} x {kind}", chip(kind), (len(devices),))


def _up_to_last(sizes: Mapping[str, int], axes: Sequence[str]) -> list[tuple[str, int]]:
    """The axes whose steps a message along `axes` spans: these, and all that vary faster."""
    names = list(sizes)
    return [(name, sizes[name]) for name in names[min(map(names.index, axes)) :]]
