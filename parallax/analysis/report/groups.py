"""Which devices exchange something, read from HLO, and which mesh axes that is.

Devices are numbered as a mesh lists them: the last axis fastest.
"""

import math
import re
from collections.abc import Mapping

import numpy as np

Groups = list[tuple[int, ...]]


def groups_of(rest: str, devices: int) -> Groups:
    """Devices that exchange something with each other, from an instruction's attributes.

    Reads lists `{{0,1},{2,3}}`, ranges `[2,2]<=[4]` and meshes `mesh['a'=2,'b'=2] {'b'}`; of a permutation each pair
    is a group. Raises ValueError for a form that is not known.

    >>> groups_of("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", 4)
    [(0, 2), (1, 3)]
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", rest):
        return _lists(pairs[1])
    if re.search(r"replica_groups=\{\}", rest):
        return [tuple(range(devices))]
    if lists := re.search(r"replica_groups=\{(.*?)\}\}", rest):
        return _lists(lists[1])
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", rest):
        return _rows(_order(found[2]).reshape(_ints(found[1])))
    mesh = re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((\[.*?)\))? \{([^}]*)\}", rest)
    if mesh and ":" not in mesh[3]:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        order = _order(mesh[2]) if mesh[2] else np.arange(devices)
        return _over_axes(order, {name: int(size) for name, size in sizes.items()}, re.findall(r"'([^']+)'", mesh[3]))
    raise ValueError(f"replica groups of an unknown form: {rest[:200]!r}")


def axes_of(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which members of a group differ, in mesh order.

    >>> axes_of([(0, 1), (2, 3)], {"dp": 2, "tp": 2})
    ('tp',)
    """
    coordinates = np.stack(np.unravel_index(np.arange(math.prod(sizes.values())), tuple(sizes.values())), axis=1)
    differs = np.zeros(len(sizes), bool)
    for group in groups:
        differs |= np.ptp(coordinates[list(group)], axis=0) > 0
    return tuple(axis for axis, found in zip(sizes, differs, strict=True) if found)


def _over_axes(order: np.ndarray, sizes: dict[str, int], axes: list[str]) -> Groups:
    names = list(sizes)
    last = [names.index(axis) for axis in axes]
    first = [at for at in range(len(names)) if at not in last]
    size = math.prod(sizes[axis] for axis in axes)
    return _rows(order.reshape(tuple(sizes.values())).transpose(first + last).reshape(-1, size))


def _order(text: str) -> np.ndarray:
    """Device numbers of `[4,2]` or, transposed, of `[4,2]T(1,0)`."""
    dims, _, turned = text.partition("T")
    numbers = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return (numbers.transpose(_ints(turned)) if turned else numbers).reshape(-1)


def _lists(text: str) -> Groups:
    return [_ints(group) for group in re.findall(r"[\d,]+", text.replace("},{", "}{"))]


def _rows(table: np.ndarray) -> Groups:
    return [tuple(map(int, row)) for row in table]


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
