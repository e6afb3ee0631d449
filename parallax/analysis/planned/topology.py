"""Chips of one kind, the links between them, and the compiler's descriptions of chips that are not present."""

import functools
import importlib.util
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from parallax.errors import ConfigError, how_to_install
from parallax.hardware import nccl
from parallax.hardware.chips import LARGEST_SLICES, LINKS_BETWEEN_CORES, Chip, chip
from parallax.sharding.compiler import compiles_ragged
from parallax.sharding.mesh import axis_between_slices, core_by_core, hosts_along, hosts_in, torus_pieces
from parallax.step.resolve import Devices

GET_LIBTPU = f"the TPU compiler, libtpu, is not installed: {how_to_install('tpu')}"
GET_CUDA = f"XLA's compiler for GPUs, JAX's CUDA plugin for Linux, is not installed: {how_to_install('gpu-compiler')}"
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# Assumed for GPUs that are not present. Without a version of CUDA no product would be in float8.
CUDNN_VERSION, CUDA_VERSION = "major: 9 minor: 10", "major: 12 minor: 9"
# The driver's name of a GPU, which JAX looks up, if this project uses a shorter one.
DRIVER_NAMES = {"NVIDIA RTX 4090": "NVIDIA GeForce RTX 4090"}

COMPILER_NAMES = {"TPU v7x": "tpu7x"}  # of chips that the compiler calls by another one

TOPOLOGY = re.compile(r"(([1-9][0-9]*)x)?([^:]+):([1-9][0-9]*(x[1-9][0-9]*)*)")


class Topology(NamedTuple):
    """`shape` is the number of chips along each dim of a torus, of which there may be several `slices`; for chips on
    switches, the last number is per switch.

    A chip may be several devices, its cores. `shared`: one machine simulates the devices, which share its cores, so
    that others can use those of an idle one.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    shared: bool = False
    slices: int = 1

    @property
    def devices(self) -> int:
        return self.slices * math.prod(self.shape) * self.chip.cores

    @property
    def as_devices(self) -> Devices:
        """What settings are fitted to."""
        return Devices(self.devices, self.chip.platform, self.chip.name, topology=self.name)

    @property
    def slice_chips(self) -> int:
        """The number of chips of a slice."""
        return math.prod(self.shape)

    @property
    def is_tpu(self) -> bool:
        return self.chip.platform == "tpu"

    @property
    def has_gpu_hosts(self) -> bool:
        """Whether these are GPUs on several hosts."""
        return self.chip.platform == "gpu" and self.devices > self.shape[-1]

    @property
    def has_ragged(self) -> bool:
        """Whether there is a ragged all-to-all."""
        return self.chip.platform != "cpu" and compiles_ragged(self.chip.name, self.slice_chips)

    @property
    def as_reached(self) -> "Topology":
        """The same chips with links and a network that have what messages reach of them."""
        chip, reached = self.chip, self.chip.reached
        rates = dict(
            ici_bandwidth=chip.ici_bandwidth * reached.links, dcn_bandwidth=chip.dcn_bandwidth * reached.network
        )
        return self._replace(chip=chip._replace(**rates))

    def matmul_rate(self, dtype: str, matmul: str = "compute") -> float:
        """FLOP/s that matrix products reach, in this dtype or in 8 bits; measured rates are not reduced."""
        wide = dtype if matmul == "compute" or "bfloat16" not in self.chip.flops else "bfloat16"
        reached = self.chip.reached.products if matmul == "compute" else self.chip.reached.narrow_products
        return self.chip.peak(wide) * self.chip.matmul_speed(matmul) * reached

    def attention_rate(self, dtype: str, seq: int, *, kernel: str, backward: bool, packed: bool) -> float:
        """FLOP/s that a kernel of attention reaches on rows of `seq` tokens, one document each or `packed`."""
        reached = self.chip.reached
        shares = reached.triton if kernel == "triton" else reached.packed if packed else reached.attention
        return self.chip.peak(dtype) * shares.share(seq, backward=backward)

    def route(self, sizes: Mapping[str, int], axes: Sequence[str], group: tuple[int, ...] = ()) -> "Route":
        """The links between chips that differ along these axes of a mesh of these sizes, or between a `group` of ranks
        of the only axis: see `route`."""
        chip, ordered = self.chip._replace(flops=()), tuple(sizes.items())  # can be hashed
        return _route_on(self.shape, self.slices, ordered, tuple(axes), chip, group)

    def hosts_along(self, sizes: Mapping[str, int], axis: str) -> int:
        """The number of hosts of GPUs on which the ranks of an axis are: see `hosts_along`."""
        return hosts_along(_laid_out(self.shape, self.chip.cores, tuple(sizes.items())), axis)


def read_topology(text: str) -> Topology:
    """Parse a topology as "v5p:4x4x4", or "2xv5p:4x4x4" for two such slices; ConfigError if the chip is unknown or has
    no slice of this shape.

    >>> topology = read_topology("v5p:4x4x4")
    >>> topology.devices, topology.route({"pp": 1, "dp": 16, "tp": 4}, ["dp"]).bandwidth / 1e9
    (64, 400.0)
    >>> slices = read_topology("2xv5p:4x4x4")
    >>> slices.devices, slices.route({"replica": 2, "dp": 64}, ["replica"]).bandwidth / 1e9
    (128, 6.25)
    """
    if not (parts := TOPOLOGY.fullmatch(text)):
        right = "write CHIP:SIZES, such as v5p:4x4x4, v5e:4x4 or H100:8 for one host"
        if re.fullmatch(r"(v|tpu)\w+-\d+", text):  # v5litepod-16
            right += ". Of Google's names v5litepod-16 is v5e:4x4, and v5p-64, which counts cores, v5p:2x4x4"
        raise ConfigError(f"--topology={text} is not a topology; {right}.")
    known, slices = chip(f"{parts[3]}:{parts[4]}"), int(parts[2] or 1)
    shape = tuple(map(int, parts[4].split("x")))
    if known.torus_dims and len(shape) != known.torus_dims:
        example = "x".join(["4"] * known.torus_dims)
        raise ConfigError(
            f"--topology={text} has {len(shape)} sizes, but slices of {known.name} have {known.torus_dims}; "
            f"write {parts[1] or ''}{parts[3]}:{example}, for {slices * 4**known.torus_dims} chips."
        )
    largest = LARGEST_SLICES.get(known.name, shape)
    too_long = len(shape) == 2 and max(shape) > max(largest)
    if too_long or math.prod(shape) > math.prod(largest):
        several, sizes = slices * -(-math.prod(shape) // math.prod(largest)), "x".join(map(str, largest))
        raise ConfigError(
            f"--topology={text} has slices of {parts[4]} ({math.prod(shape):,} chips), but the largest of {known.name} "
            f"is {sizes} ({math.prod(largest):,}); write {f'{several}x' if several > 1 else ''}{parts[3]}:{sizes}, for "
            f"{several * math.prod(largest):,} chips."
        )
    if known.switched and (len(shape) > 2 or shape[-1] > known.switched):
        hosts = -(-slices * math.prod(shape) // known.switched)
        raise ConfigError(
            f"--topology={text} is not a valid number of hosts and of GPUs on each; a host has at most "
            f"{known.switched} {known.name}: write {parts[3]}:{hosts}x{known.switched}, for "
            f"{hosts * known.switched} GPUs."
        )
    if parts[2] and not known.torus_dims:
        hosts = slices * math.prod(shape) // shape[-1]
        raise ConfigError(
            f"--topology={text} has {slices} slices, but {known.name} are on hosts; "
            f"write {parts[3]}:{hosts}x{shape[-1]}, for {hosts} hosts."
        )
    return Topology(text, known, shape, slices=slices)


def why_not(topology: Topology) -> str:
    """Why steps cannot be compiled for chips that are not present; "" if they can."""
    if not topology.is_tpu:
        return "" if any(map(importlib.util.find_spec, CUDA_PLUGINS)) else GET_CUDA
    return "" if importlib.util.find_spec("libtpu") else GET_LIBTPU


def devices_of(topology: Topology | str) -> list[Any]:
    """Devices of chips that need not be present, as their compiler describes them; ConfigError if it does not support
    such a slice, or is not installed."""
    topology = read_topology(topology) if isinstance(topology, str) else topology
    if reason := why_not(topology):
        raise ConfigError(reason)
    describe = _describe_slice if topology.is_tpu else _describe_hosts
    try:
        return describe(topology).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        what = f"--topology={topology.name} is not a topology that the compiler supports"
        raise ConfigError(f"{what}: {reason}") from error


def _describe_slice(topology: Topology) -> topologies.TopologyDescription:
    options = {"chip_config_name": "megacore"} if topology.chip.name == "TPU v4" else {}
    kind = COMPILER_NAMES.get(topology.chip.name, topology.chip.name.split()[1])
    name = f"{kind}:{'x'.join(map(str, topology.shape))}"
    return topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=topology.slices, **options)


def _describe_hosts(topology: Topology) -> topologies.TopologyDescription:
    """For GPUs: one slice of hosts with the same number of GPUs on each."""
    hosts, gpus = (1, *topology.shape)[-2:]
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=topology.name,
        target_config=target_config(topology.chip),
        topology=f"1x{hosts}x{gpus}",
    )


def target_config(chip: Chip) -> str:
    """XLA's GpuTargetConfigProto of a GPU, as text."""
    target = chip.target
    major, minor = target.capability
    info = dict(
        threads_per_block_limit=1024,
        threads_per_warp=32,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_core=target.shared_kib * 2**10,
        shared_memory_per_block_optin=(target.shared_kib - 1) * 2**10,
        threads_per_core_limit=target.threads,
        core_count=target.cores,
        fpus_per_core=target.float_units,
        block_dim_limit_x=2**31 - 1,
        block_dim_limit_y=2**16 - 1,
        block_dim_limit_z=2**16 - 1,
        memory_bandwidth=int(chip.hbm_bandwidth),
        l2_cache_size=target.l2_bytes,
        clock_rate_ghz=target.clock_ghz,
        device_memory_size=chip.usable_bytes,
        registers_per_core_limit=2**16,
        registers_per_block_limit=2**16,
    )
    lines = [f"{name}: {value}" for name, value in info.items()]
    lines.append(f"cuda_compute_capability {{ major: {major} minor: {minor} }}")
    named = f'platform_name: "CUDA" device_description_str: "{DRIVER_NAMES.get(chip.name, chip.name)}"'
    versions = f"dnn_version_info {{ {CUDNN_VERSION} }} runtime_version {{ {CUDA_VERSION} }}"
    return f"gpu_device_info {{ {' '.join(lines)} }} {versions} {named}"


def without_chips(argv: Sequence[str]) -> None:
    """Set up a process to compile without chips, if its command line names a topology; call before the first array.

    Then libtpu does not query a metadata server, and allows another process to compile at the same time. It needs some
    accelerator type, although the topology determines the target.
    """
    if any(argument.startswith("--topology") for argument in argv):
        os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5p-8"}
        jax.config.update("jax_platforms", "cpu")


@functools.lru_cache(maxsize=16)  # each may have 2**15 devices
def _laid_out(shape: tuple[int, ...], cores: int, sizes: tuple[tuple[str, int], ...]) -> Any:
    """A mesh of stand-ins for the cores of chips that fill a torus of this shape; the last axis is placed first, along
    few dims.

    Chips on one switch have the same process index.
    """
    shape = *shape, cores
    lengths = [n for _, n in torus_pieces(dict(sizes))]
    index = np.indices(lengths)
    places = np.zeros((*lengths, len(shape)), int)
    left, stride = list(shape), [1] * len(shape)
    for axis in reversed(range(len(lengths))):
        n, rest = lengths[axis], index[axis]
        for dim in sorted(range(len(shape)), key=lambda dim: (left[dim] != n, -left[dim])):
            part = math.gcd(n, left[dim])
            places[..., dim] += rest % part * stride[dim]
            n, rest = n // part, rest // part
            left[dim], stride[dim] = left[dim] // part, stride[dim] * part
    devices = np.empty(lengths, object)
    for number, place in enumerate(np.ndindex(*lengths)):
        *coords, core = places[place]
        devices[place] = SimpleNamespace(coords=coords, core_on_chip=core, process_index=number // shape[-2])
    names = tuple(name for name, _ in sizes)
    return SimpleNamespace(devices=core_by_core(devices.reshape([n for _, n in sizes]), names), axis_names=names)


@functools.lru_cache
def _route_on(
    shape: tuple[int, ...],
    slices: int,
    sizes: tuple[tuple[str, int], ...],
    axes: tuple[str, ...],
    chip: Chip,
    group: tuple[int, ...] = (),
) -> "Route":
    if slices == 1:
        mesh = _laid_out(shape, chip.cores, sizes)
        if group:
            inner = mesh.axis_names.index(axes[0]) + 1
            group = tuple(rank * math.prod(mesh.devices.shape[inner:]) for rank in group)
        return route(mesh, axes, chip, group)
    crossing = axis_between_slices(dict(sizes), slices)
    if crossing in axes:
        return _between_slices(chip)
    within = tuple((axis, size // slices if axis == crossing else size) for axis, size in sizes)
    return route(_laid_out(shape, chip.cores, within), axes, chip)


class Route(NamedTuple):
    """How fast devices send to each other. `bandwidth` is the bytes a second of a ring, `spread` how much longer an
    all-to-all takes for as many bytes, and `to_one` the bytes a second of a message to one other device. `start` is how
    long a message takes to start, `around` how long its first byte takes to pass all devices, `across` to reach the
    farthest one and `next` to reach a neighbour, in seconds. `ranks` are those of NCCL, of which gathers, scatters and
    sums have no other latency."""

    bandwidth: float
    spread: float
    to_one: float
    start: float = 0.0
    around: float = 0.0
    across: float = 0.0
    next: float = 0.0
    ranks: nccl.Ranks | None = None

    def latency(self, kind: str) -> float:
        """Seconds until a collective's first byte is everywhere; an all-reduce scatters and then gathers."""
        path = {"permute": self.next, "all-to-all": self.across, "all-reduce": 2 * self.around}
        return self.start + path.get(kind, self.around)

    def secs(self, kind: str, sent: float) -> float:
        """How long a collective takes in which each device sends so many bytes."""
        if kind == "permute":
            return sent / self.to_one
        return sent * (self.spread if kind == "all-to-all" else 1) / self.bandwidth

    def call_secs(self, kind: str, sent: float) -> float:
        """The same with the latency of one call."""
        if self.ranks and kind in nccl.BY_ALGORITHM:
            return self.ranks.secs(kind, sent)
        return self.secs(kind, sent) + self.latency(kind)


def route(mesh: Mesh, axes: tuple[str, ...], chip: Chip, group: Sequence[int] = ()) -> Route:
    """The links between devices that differ along these mesh axes: all of them, or a group given by device numbers.

    On a torus, a collective uses all dims along which its devices differ at once. A dim that they fill, and that closes
    to a ring, has two links per chip, one for each direction. Any other dim is a line and has one, since a chip at its
    end has only one. Devices at a distance of k share links with k - 1 others. If devices have no coordinates, as in a
    mesh of simulated devices, each mesh axis counts as a separate, filled dim. In an all-to-all, data passes a quarter
    of each dim on average, which loads links by as much. Cores of a chip share its links: a core has its part of them,
    and all of them if the other cores belong to the group. On a switch a collective uses all links of a chip. Between
    slices it uses the network; between hosts of GPUs see `_between_hosts`. The first byte of a message passes half of a
    ring, and all of a line.
    """
    devices = [mesh.devices.flat[number] for number in group] if group else _members(mesh, axes)
    if not chip.torus_dims:
        return _between_hosts(hosts_in(mesh, devices), chip)
    if _differ(devices, "slice_index"):
        return _between_slices(chip)
    places, extents = _places(mesh, axes, devices)
    *extents, _ = extents
    links, hops, path, cores = 0.0, 0.0, 0, len(np.unique(places[:, -1]))
    for dim, extent in enumerate(extents):
        values = np.unique(places[:, dim])
        if len(values) > 1:
            whole = len(values) == extent
            links += (2 if whole and closes(chip, extents, extent) else 1) / int(np.diff(values).min())
            hops += len(values) / 4
            path += len(values) // 2 if whole and closes(chip, extents, extent) else int(np.ptp(values))
    members = len(devices)
    if not links:
        between_cores = chip.ici_bandwidth * LINKS_BETWEEN_CORES
        return Route(between_cores, 1.0, between_cores, chip.start_secs)
    rings = chip.ici_bandwidth * links * cores / chip.cores
    spread, secs = max(1.0, hops * members / (members - 1)), path * chip.link_secs
    return Route(rings, spread, chip.ici_bandwidth, chip.start_secs, secs, secs, chip.link_secs)


def _between_slices(chip: Chip) -> Route:
    """The network between slices: each chip sends over its share of its host's."""
    return Route(chip.dcn_bandwidth, 1.0, chip.dcn_bandwidth, chip.start_secs, *[chip.network_secs] * 3)


def _between_hosts(hosts: list[int], chip: Chip) -> Route:
    """The links between GPUs; `hosts` are the numbers of their hosts.

    NCCL runs a ring through each network interface. For k GPUs on each host there are k rings: each enters and leaves a
    host at another GPU, passes the others over the switch, and sends a k-th of the bytes over the network. In an
    all-to-all each GPU sends to the n - k GPUs of other hosts over its own interface. Without a switch all links of a
    GPU are in use only if all GPUs of its host are members.
    """
    members, local, count = len(hosts), min(Counter(hosts).values()), len(set(hosts))
    pair, network, link = chip.ici_bandwidth * (chip.pair_links or chip.ici_links), chip.dcn_bandwidth, chip.link_secs
    switch = min(chip.ici_bandwidth * chip.ici_links, pair * max(1, local - 1))
    if count == 1:
        ranks = nccl.Ranks(members, 1, chip.nccl, switch) if chip.nccl else None
        return Route(switch, 1.0, pair, chip.start_secs, (members - 1) * link, link, link, ranks)
    rings = min(local * network, switch)
    spread = (members - local) / (members - 1) * rings / network
    around = (members - count) * link + (count - 1) * chip.network_secs
    ranks = nccl.Ranks(members, count, chip.nccl, rings) if chip.nccl else None
    return Route(rings, spread, network, chip.start_secs, around, chip.network_secs, chip.network_secs, ranks)


def closes(chip: Chip, extents: list[int], extent: int) -> bool:
    """Whether a dim of this extent is a ring in a slice of these extents."""
    fits = [size % chip.ring_multiple == 0 for size in extents]
    return all(fits) if chip.cube else extent % chip.ring_multiple == 0


def one_way(mesh: Mesh, pairs: Sequence[tuple[int, int]], chip: Chip) -> float:
    """Bytes a second of each message, if all devices of these pairs send at once.

    On a torus a message follows one dim after the other, the shorter way around a ring, and messages on the same link
    share its bandwidth. On a switch a message uses all links of a card.
    """
    devices = list(mesh.devices.flat)
    if not chip.torus_dims:
        hosts = hosts_in(mesh, devices)
        apart = any(hosts[source] != hosts[target] for source, target in pairs)
        return chip.dcn_bandwidth if apart else chip.ici_bandwidth * chip.ici_links
    if any(_differ([devices[source], devices[target]], "slice_index") for source, target in pairs):
        return chip.dcn_bandwidth
    places, extents = (coordinates[..., :-1] for coordinates in _places(mesh, mesh.axis_names, devices))
    rings = [closes(chip, extents, extent) for extent in extents]
    messages = Counter(
        link for source, target in pairs for link in _path(places[source], places[target], extents, rings)
    )
    return chip.ici_bandwidth / max(messages.values(), default=1)


def _path(start: np.ndarray, end: np.ndarray, extents: list[int], rings: list[bool]) -> Iterator[tuple]:
    """The links of a message's path, each as chip, dim and direction."""
    here = [int(place) for place in start]
    for dim, goal in enumerate(map(int, end)):
        direction = 1 if goal > here[dim] else -1
        if rings[dim] and 2 * abs(goal - here[dim]) > extents[dim]:
            direction = -direction
        while here[dim] != goal:
            yield *here, dim, direction
            here[dim] = (here[dim] + direction) % extents[dim]


def _members(mesh: Mesh, axes: tuple[str, ...]) -> list:
    index = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    return list(mesh.devices[index].reshape(-1))


def _differ(devices: list, attribute: str) -> bool:
    return len({getattr(device, attribute, None) for device in devices}) > 1


def _places(mesh: Mesh, axes: tuple[str, ...], devices: list) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of these devices, of which the last is the core on a chip, and the extents of the slice that all
    devices of the mesh fill."""
    if getattr(devices[0], "coords", None) is not None:
        everywhere = np.array([_coordinates(device) for device in mesh.devices.flat])
        return np.array([_coordinates(device) for device in devices]), np.ptp(everywhere, axis=0) + 1
    sizes = [mesh.shape[axis] for axis in mesh.axis_names if axis in axes]
    if len(devices) < math.prod(sizes):  # a group of them
        sizes = [len(devices)]
    return np.stack(np.unravel_index(np.arange(math.prod(sizes)), [*sizes, 1]), axis=1), np.array([*sizes, 1])


def _coordinates(device: Any) -> tuple[int, ...]:
    return *device.coords, getattr(device, "core_on_chip", 0)
