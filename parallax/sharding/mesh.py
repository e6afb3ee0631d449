"""The mesh: devices laid out along named axes, on real chips or on simulated ones."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from parallax.runtime.errors import ConfigError, divisors, quoted

# tp goes last: neighbours have the fastest links, and tp sends the most.
AXES = ("pp", "dp", "tp")
INFERRED = -1
SLOW_AXES = ("dp", "pp")  # what may go over the network between slices: tp sends too much, in every layer
SHOWN_FACTORISATIONS = 12


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis. One of the axes may be -1: all devices that are left.

    `simulate` is a number of CPU devices to simulate, in all processes together; 0 takes the devices that are there.
    `across_slices` is the axis that goes over the slow network between slices of chips, where there are several.
    """

    pp: int
    dp: int
    tp: int
    simulate: int
    across_slices: str = "dp"

    def __post_init__(self):
        for axis, size in self.sizes.items():
            if not _is_whole(size) or (size < 1 and size != INFERRED):
                raise ConfigError(
                    f"mesh.{axis}={quoted(size)} is no number of devices; use 1 or more, or -1 for all others"
                )
        inferred = [axis for axis, size in self.sizes.items() if size == INFERRED]
        if len(inferred) > 1:
            both = ", ".join(f"mesh.{axis}=-1" for axis in inferred)
            raise ConfigError(f"{both}: at most one axis can be inferred; give the others a size, such as 1")
        if not _is_whole(self.simulate) or self.simulate < 0:
            raise ConfigError(f"mesh.simulate={quoted(self.simulate)} is no number of devices; use 0 (none) or more")

        if self.across_slices not in SLOW_AXES:
            raise ConfigError(
                f"mesh.across_slices={quoted(self.across_slices)} is no axis for the network between slices; "
                f"use one of {', '.join(map(repr, SLOW_AXES))}"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """What was written for each axis, in the order of AXES."""
        return {axis: getattr(self, axis) for axis in AXES}


def resolve_sizes(config: MeshConfig, devices: int, *, simulated: bool = True) -> dict[str, int]:
    """Size of each axis on so many devices, -1 replaced; ConfigError lists the legal sizes, and where devices may be
    `simulated` instead says how.

    >>> resolve_sizes(MeshConfig(pp=2, dp=-1, tp=2, simulate=0, across_slices="dp"), 8)
    {'pp': 2, 'dp': 2, 'tp': 2}
    """
    sizes = dict(config.sizes)
    written = math.prod(size for size in sizes.values() if size != INFERRED)
    fits = devices % written == 0 if INFERRED in sizes.values() else devices == written
    if not fits:
        instead = f" (or simulate {written} CPU devices: mesh.simulate={written})" if simulated else ""
        raise ConfigError(_mismatch(sizes, written, devices) + instead)
    return {axis: devices // written if size == INFERRED else size for axis, size in sizes.items()}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lay devices (by default all of them) out along AXES.

    On accelerators the order follows the physical links, so that the last axis has the fastest; of devices in several
    slices, the axis `across_slices` has the slow network between these.
    """
    devices = jax.devices() if devices is None else list(devices)
    if config.simulate and len(devices) != config.simulate:
        raise ConfigError(
            f"mesh.simulate={config.simulate} but JAX runs with {len(devices)} device(s); "
            "call simulate_devices before any other JAX call"
        )
    # Auto: layouts are ours to say, in shard_map; the default of jax.make_mesh is Explicit.
    return Mesh(place_devices(config, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_of(pp: int = 1, dp: int = 1, tp: int = 1) -> Mesh:
    """The mesh of the first pp * dp * tp devices that are here; ConfigError where there are fewer.

    >>> dict(mesh_of(dp=1).shape)
    {'pp': 1, 'dp': 1, 'tp': 1}
    """
    config = MeshConfig(pp=pp, dp=dp, tp=tp, simulate=0)
    devices = jax.devices()
    whole = INFERRED in config.sizes.values()
    return make_mesh(config, devices if whole else devices[: math.prod(config.sizes.values())])


def is_simulated(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices of a mesh are CPUs, as simulated ones are; those of an abstract mesh are what it says.

    >>> is_simulated(mesh_of(dp=1))
    True
    """
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform == "cpu"
    return mesh.abstract_device is not None and mesh.abstract_device.platform == "cpu"


def place_devices(config: MeshConfig, devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices as an array [pp, dp, tp]; ConfigError where their number, or that of their slices, does not fit."""
    sizes = resolve_sizes(config, len(devices))
    shape = tuple(sizes.values())
    if devices[0].platform == "cpu":
        return np.array(devices).reshape(shape)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    axis = config.across_slices
    if sizes[axis] % slices:
        other = SLOW_AXES[1 - SLOW_AXES.index(axis)]
        instead = f", or mesh.across_slices={other!r}" if sizes[other] % slices == 0 else ""
        raise ConfigError(
            f"mesh.{axis}={sizes[axis]} does not divide over {slices} slices of {len(devices) // slices} chips, "
            f"between which mesh.across_slices={axis!r} puts it; use a multiple of {slices}{instead}"
        )
    outer = tuple(slices if name == axis else 1 for name in AXES)
    inner = tuple(size // times for size, times in zip(shape, outer))
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)


def factorisations(devices: int) -> list[tuple[int, ...]]:
    """Every way to lay so many devices out along AXES.

    >>> factorisations(2)
    [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    """
    pairs = itertools.product(divisors(devices), repeat=2)
    return [(pp, dp, devices // (pp * dp)) for pp, dp in pairs if devices % (pp * dp) == 0]


def _mismatch(sizes: dict[str, int], wanted: int, devices: int) -> str:
    written = " ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    multiple = "a multiple of " if INFERRED in sizes.values() else ""
    legal = sorted(factorisations(devices), key=lambda shape: -_kept(shape, sizes))
    shown = ", ".join("·".join(map(str, shape)) for shape in legal[:SHOWN_FACTORISATIONS])
    left_out = len(legal) - SHOWN_FACTORISATIONS
    rest = f" and {left_out} more" if left_out > 0 else ""
    return (
        f"{written} wants {multiple}{wanted} devices, but there are {devices}; "
        f"legal pp·dp·tp for {devices}: {shown}{rest}"
    )


def _kept(shape: tuple[int, ...], sizes: dict[str, int]) -> int:
    return sum(size == written for size, written in zip(shape, sizes.values(), strict=True))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
