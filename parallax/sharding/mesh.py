"""The mesh: devices laid out along named axes, on real chips or on simulated ones."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from parallax.config.sections import AXES, INFERRED, MeshConfig
from parallax.errors import ConfigError, divisors
from parallax.hardware.devices import start_devices

SLOW_AXES = ("replica", "pp")  # axes that may use the network between slices; dp and tp send too much
SHOWN_FACTORISATIONS = 12


def resolve_sizes(config: MeshConfig, devices: int, *, simulated: bool = True) -> dict[str, int]:
    """Size of each axis for this number of devices, with -1 replaced. ConfigError lists the legal sizes and, if devices
    may be `simulated` instead, says how.

    >>> resolve_sizes(MeshConfig(pp=2, dp=-1, tp=2, simulate=0), 8)
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
    """Arrange devices (by default all of them) along the axes of the mesh.

    On TPUs the order follows the physical links, so that the last axis has the fastest; data ranks go through one core
    of each chip, then through the next core. If the devices are in several slices, `replica` crosses the slow network
    between slices, or pp if there are no replicas. GPUs stay in the order of their hosts, so that the last axes stay
    within a host; any axis may cross the network.
    """
    devices = start_devices() if devices is None else list(devices)
    if config.simulate and len(devices) != config.simulate:
        raise ConfigError(
            f"mesh.simulate={config.simulate} but JAX runs with {len(devices)} device(s); "
            "call simulate_devices before any other JAX call"
        )
    # Auto: shard_map and our layouts decide the sharding; the default of jax.make_mesh is Explicit.
    axes = tuple(config.sizes)
    return Mesh(place_devices(config, devices), axes, axis_types=(AxisType.Auto,) * len(axes))


def mesh_of(pp: int = 1, dp: int = 1, tp: int = 1, **further: int) -> Mesh:
    """The mesh of the first pp * dp * tp devices, times the sizes of `further` axes, as cp=2; ConfigError if there are
    fewer.

    >>> dict(mesh_of(dp=1).shape)
    {'pp': 1, 'dp': 1, 'tp': 1}
    """
    config = MeshConfig(pp=pp, dp=dp, tp=tp, simulate=0, **further)
    devices = start_devices()
    whole = INFERRED in config.sizes.values()
    return make_mesh(config, devices if whole else devices[: math.prod(config.sizes.values())])


def context_as_data(mesh: Mesh) -> Mesh:
    """The same devices in the same order, with context ranks as further data ranks: arrays sharded over "dp/cp" on
    `mesh` are sharded over dp on the result, and each device has the same piece.
    """
    sizes = dict(mesh.shape)
    if "cp" not in sizes:
        return mesh
    sizes["dp"] *= sizes.pop("cp")
    devices = mesh.devices.reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def is_simulated(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices of a mesh are CPUs, as simulated ones are. An abstract mesh names its kind of device.

    >>> is_simulated(mesh_of(dp=1))
    True
    """
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform == "cpu"
    return mesh.abstract_device is not None and mesh.abstract_device.platform == "cpu"


def is_for_gpus(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices of a mesh are GPUs, or those that an abstract mesh names."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform == "gpu"
    return mesh.abstract_device is not None and not mesh.abstract_device.platform


def chips_of_slice(mesh: Mesh) -> int:
    """The number of TPU chips of the mesh that are in one slice. The cores of a chip have the same coordinates."""
    chips = {(getattr(device, "slice_index", 0), *device.coords) for device in mesh.devices.flat}
    return len(chips) // len({number for number, *_ in chips})


def host_numbers(devices: Sequence[Any], *, here: bool) -> list[int]:
    """The host of each GPU. For GPUs that are present JAX calls a host a slice, however many processes run on it. The
    ones that a compiler describes are all in one slice; there a host is a process."""
    return [getattr(device, "slice_index" if here else "process_index", 0) for device in devices]


def hosts_in(mesh: Mesh, devices: Sequence[Any]) -> list[int]:
    """The host of each of these GPUs of a mesh."""
    here = any(getattr(device, "local_hardware_id", None) is not None for device in mesh.devices.flat)
    return host_numbers(devices, here=here)


def hosts_along(mesh: Mesh, axis: str) -> int:
    """The number of hosts on which the ranks of an axis are; 0 if these do not have equal parts of them, each ranks
    that follow each other."""
    ranks = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    ranks = ranks.reshape(-1, ranks.shape[-1])
    of_ranks = np.array(hosts_in(mesh, list(ranks.reshape(-1)))).reshape(ranks.shape)
    counts = {len({*line}) for line in of_ranks.tolist()}
    hosts = counts.pop()
    parts = of_ranks.reshape(len(ranks), hosts, -1) if not (counts or ranks.shape[1] % hosts) else None
    return hosts if parts is not None and (parts == parts[:, :, :1]).all() else 0


def place_devices(config: MeshConfig, devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices as an array with a dim for each axis of the mesh.

    Raises ConfigError if their number or the number of their slices does not fit.
    """
    sizes = resolve_sizes(config, len(devices))
    shape = tuple(sizes.values())
    if devices[0].platform != "tpu":  # JAX calls a host of GPUs a slice, but any axis may cross GPU hosts
        return np.array(devices).reshape(shape)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    pieces = torus_pieces(sizes)
    split = [part for _, part in pieces]
    if slices == 1:
        placed = mesh_utils.create_device_mesh(split, devices, allow_split_physical_axes=True)
    else:
        axis = axis_between_slices(sizes, slices)
        outer = [slices if name == axis else 1 for name, _ in pieces]
        inner = [size // times for size, times in zip(split, outer)]
        placed = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    return core_by_core(placed.reshape(shape), list(sizes))


def core_by_core(placed: np.ndarray, axes: Sequence[str]) -> np.ndarray:
    """The same with data ranks in the order of the cores of their chips: first those on one core of each, then those on
    the next. So the last step of a gather over all chips has both cores, which then share what arrives. Context ranks,
    if they are fewer, are then on chips next to each other and not on the cores of one: FSDP gathers over both axes,
    and keys and values are little beside weights."""
    sizes = dict(zip(axes, placed.shape))
    ranks = ("dp", "cp") if 1 < sizes.get("cp", 1) < sizes["dp"] else ("dp",)
    dims, last = [axes.index(name) for name in ranks], [*range(-len(ranks), 0)]
    moved = np.moveaxis(placed, dims, last)
    lines = moved.reshape(-1, math.prod(sizes[name] for name in ranks))
    cores = np.vectorize(lambda device: getattr(device, "core_on_chip", 0))(lines)
    if (cores != cores[0]).any():
        return placed
    return np.moveaxis(lines.take(np.argsort(cores[0], kind="stable"), 1).reshape(moved.shape), last, dims)


def axis_between_slices(sizes: Mapping[str, int], slices: int) -> str:
    """The axis that crosses the network between slices: replica, or else pp. ConfigError if neither divides over them.

    >>> axis_between_slices({"pp": 4, "dp": 8, "replica": 2}, 2), axis_between_slices({"pp": 4, "dp": 8}, 2)
    ('replica', 'pp')
    """
    axis = next((axis for axis in SLOW_AXES if sizes.get(axis, 1) % slices == 0), None)
    if axis is None:
        written = " and ".join(f"mesh.{axis}={sizes.get(axis, 1)}" for axis in SLOW_AXES)
        data = sizes["dp"] * sizes.get("replica", 1)
        instead = f": with mesh.replica={slices} mesh.dp={data // slices}" if data % slices == 0 else ""
        chips = math.prod(sizes.values()) // slices
        raise ConfigError(
            f"{written}: neither divides over {slices} slices of {chips} chips, and other axes send too much for the "
            f"network between them; make one a multiple of {slices}{instead}"
        )
    return axis


def torus_pieces(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """The axes and sizes that are placed along dims of a torus: ep as its prime factors, each along a dim of its own if
    there are as many. Expert ranks that fill a cube exchange tokens faster than those on a plane or a line.

    >>> torus_pieces({"dp": 4, "ep": 8, "tp": 1})
    [('dp', 4), ('ep', 2), ('ep', 2), ('ep', 2), ('tp', 1)]
    """
    return [(axis, part) for axis, size in sizes.items() for part in (_primes(size) if axis == "ep" else [size])]


def _primes(number: int) -> list[int]:
    least = divisors(number)[:2][-1]
    return [least, *_primes(number // least)] if least > 1 else []


def factorisations(devices: int) -> list[tuple[int, ...]]:
    """Every way to arrange this number of devices along pp, dp and tp.

    >>> factorisations(2)
    [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    """
    pairs = itertools.product(divisors(devices), repeat=2)
    return [(pp, dp, devices // (pp * dp)) for pp, dp in pairs if devices % (pp * dp) == 0]


def _mismatch(sizes: dict[str, int], wanted: int, devices: int) -> str:
    written = " ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    multiple = "a multiple of " if INFERRED in sizes.values() else ""
    beside = {axis: size for axis, size in sizes.items() if axis not in AXES and size != INFERRED}
    others, left_over = divmod(devices, math.prod(beside.values()))
    wrong = f"{written} wants {multiple}{wanted} devices, but there are {devices}"
    if left_over:
        given = " x ".join(f"mesh.{axis}={size}" for axis, size in beside.items())
        return f"{wrong}, which {given} does not divide; use one of {', '.join(map(str, divisors(devices)))}"
    legal = sorted(factorisations(others), key=lambda shape: -_kept(shape, sizes))
    shown = ", ".join("·".join(map(str, shape)) for shape in legal[:SHOWN_FACTORISATIONS])
    left_out = len(legal) - SHOWN_FACTORISATIONS
    rest = f" and {left_out} more" if left_out > 0 else ""
    return f"{wrong}; legal pp·dp·tp for {others}: {shown}{rest}"


def _kept(shape: tuple[int, ...], sizes: dict[str, int]) -> int:
    return sum(size == sizes[axis] for axis, size in zip(AXES, shape, strict=True))
