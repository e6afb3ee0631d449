"""How fast devices of a mesh exchange something: which links lie between them."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from parallax.runtime.chips import Chip


class Route(NamedTuple):
    """`bandwidth` is bytes a second that a device sends at most, `spread` how much more an all-to-all loads links."""

    bandwidth: float
    spread: float


def route(mesh: Mesh, axes: tuple[str, ...], chip: Chip, group: Sequence[int] = ()) -> Route:
    """The links between devices that differ along these mesh axes: all of them, or a group of them by their numbers.

    On a torus, a collective uses all dims along which its devices lie at once. A dim that they fill, and that closes to
    a ring, gives two links of each chip, one for each direction; any other dim, a line, one, since its end has no
    other; devices that lie k apart share links with k - 1 others. Where devices have no place on a torus, as when a
    mesh of simulated ones stands for it, each mesh axis is a dim of its own, filled. In an all-to-all, data passes a
    quarter of each dim on average, and loads links by as much. A switch gives all links of a chip. Between slices,
    and between processes of a switch, it is the network. Latency counts as nothing.
    """
    devices = [mesh.devices.flat[at] for at in group] if group else _members(mesh, axes)
    if _differ(devices, "slice_index") or (not chip.torus_dims and _differ(devices, "process_index")):
        return Route(chip.dcn_bandwidth, 1.0)
    if not chip.torus_dims:
        return Route(chip.ici_bandwidth * chip.ici_links, 1.0)
    places, extents = _places(mesh, axes, devices)
    links, hops = 0.0, 0.0
    for dim, extent in enumerate(extents):
        values = np.unique(places[:, dim])
        if len(values) > 1:
            whole = len(values) == extent
            links += (2 if whole and closes(chip, extents, extent) else 1) / int(np.diff(values).min())
            hops += len(values) / 4
    members = len(devices)
    return Route(chip.ici_bandwidth * links, max(1.0, hops * members / (members - 1)))


def closes(chip: Chip, extents: list[int], extent: int) -> bool:
    """Whether a dim of a slice of these extents is a ring."""
    fits = [size % chip.ring_multiple == 0 for size in extents]
    return all(fits) if chip.cube else extent % chip.ring_multiple == 0


def one_way(mesh: Mesh, pairs: Sequence[tuple[int, int]], chip: Chip) -> float:
    """Bytes a second of each message, where all devices of these pairs send at once.

    On a torus a message goes along one dim after the other, the shorter way round a ring, and those that share a link
    share its bandwidth. A switch gives a card all of its links.
    """
    devices = mesh.devices.reshape(-1)
    if any(_differ([devices[one], devices[other]], "slice_index") for one, other in pairs):
        return chip.dcn_bandwidth
    if not chip.torus_dims:
        apart = any(_differ([devices[one], devices[other]], "process_index") for one, other in pairs)
        return chip.dcn_bandwidth if apart else chip.ici_bandwidth * chip.ici_links
    places, extents = _places(mesh, mesh.axis_names, list(devices))
    rings = [closes(chip, extents, extent) for extent in extents]
    load = Counter(link for one, other in pairs for link in _path(places[one], places[other], extents, rings))
    return chip.ici_bandwidth / max(load.values(), default=1)


def _path(start: np.ndarray, end: np.ndarray, extents: list[int], rings: list[bool]) -> Iterator[tuple]:
    """The links that a message takes, each as its chip, its dim and its direction."""
    here = [int(at) for at in start]
    for dim, goal in enumerate(map(int, end)):
        way = 1 if goal > here[dim] else -1
        if rings[dim] and 2 * abs(goal - here[dim]) > extents[dim]:
            way = -way
        while here[dim] != goal:
            yield *here, dim, way
            here[dim] = (here[dim] + way) % extents[dim]


def _members(mesh: Mesh, axes: tuple[str, ...]) -> list:
    index = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    return list(mesh.devices[index].reshape(-1))


def _differ(devices: list, attribute: str) -> bool:
    return len({getattr(device, attribute, None) for device in devices}) > 1


def _places(mesh: Mesh, axes: tuple[str, ...], devices: list) -> tuple[np.ndarray, list[int]]:
    """Coordinates of these devices, and the extents of what all devices of the mesh fill."""
    if getattr(devices[0], "coords", None) is not None:
        everywhere = np.array([device.coords for device in mesh.devices.flat])
        return np.array([device.coords for device in devices]), list(np.ptp(everywhere, axis=0) + 1)
    sizes = [mesh.shape[axis] for axis in mesh.axis_names if axis in axes]
    if len(devices) < math.prod(sizes):  # a group of them
        sizes = [len(devices)]
    return np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=1), sizes
