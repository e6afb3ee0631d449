"""Time of NCCL's gathers, scatters and sums by size, as NCCL itself estimates it to choose an algorithm and a protocol.

Figures and formulas: NCCL 2.30.7, src/graph/tuning.cc, without its corrections for middle sizes. A *ring* passes the
message by each GPU in turn. Sums may go along *trees* instead: from GPU to GPU within a host, and in as many steps as
the number of hosts has bits between them. The protocol *LL* is for few bytes, *LL128* for more of them, if GPUs have
NVLink, and *Simple* has all of the bandwidth. NVLink SHARP, which sums in the switch, is left out.
"""

from typing import NamedTuple

# Those that have an algorithm; messages from GPU to GPU have none.
BY_ALGORITHM = ("all-gather", "reduce-scatter", "all-reduce")
US = 1e-6


class Protocol(NamedTuple):
    """Seconds in which a message starts, and passes a link of each kind, as a ring or along a tree, and the share of
    the bandwidth that each of them has within a host and between hosts."""

    name: str
    ring_start: float
    ring_link: dict[str, float]
    ring_share: float
    tree_start: float
    tree_link: dict[str, float]
    tree_shares: tuple[float, float]


# Between hosts a link is a NETWORK.
NVLINK, PCIE, NETWORK = "NVLink", "PCIe", "network"
OF_TREE = 0.92  # of the bandwidth, with any protocol
PROTOCOLS = (
    Protocol(
        name="LL",
        ring_start=6.6 * US,
        ring_link={NVLINK: 0.6 * US, PCIE: 1.0 * US, NETWORK: 2.7 * US},
        ring_share=0.5,
        tree_start=6.8 * US,
        tree_link={NVLINK: 0.6 * US, PCIE: 1.0 * US, NETWORK: 5.0 * US},
        tree_shares=(OF_TREE / 3.8, OF_TREE / 3.8),
    ),
    Protocol(
        name="LL128",
        ring_start=14.0 * US,
        ring_link={NVLINK: 1.9 * US, NETWORK: 4.0 * US},
        ring_share=0.92,
        tree_start=14.0 * US,
        tree_link={NVLINK: 1.25 * US, NETWORK: 8.5 * US},
        tree_shares=(OF_TREE * 7 / 9, OF_TREE * 120 / 128),
    ),
    Protocol(
        name="Simple",
        ring_start=8.4 * US,
        ring_link={NVLINK: 3.4 * US, PCIE: 5.7 * US, NETWORK: 14.0 * US},
        ring_share=1.0,
        tree_start=8.4 * US,
        tree_link={NVLINK: 4.0 * US, PCIE: 4.0 * US, NETWORK: 14.0 * US},
        tree_shares=(OF_TREE, OF_TREE),
    ),
)
SIMPLE = PROTOCOLS[-1]
# Bytes a second of LL at most: on a host with H100, on two, on more.
LL_BANDWIDTHS = (141e9, 45e9, 35e9)


class Ranks(NamedTuple):
    """GPUs that send to each other: `members` on `hosts`, over links of this kind within each, and with this bandwidth
    as a ring, in bytes a second that a GPU sends."""

    members: int
    hosts: int
    link: str
    bandwidth: float

    def secs(self, kind: str, sent: float) -> float:
        """Seconds of one of BY_ALGORITHM in which each GPU sends so many bytes as a ring: by what is fastest.

        >>> eight, many = Ranks(8, 1, NVLINK, 360e9), Ranks(128, 16, NVLINK, 360e9)
        >>> [round(1e6 * ranks.secs("all-reduce", 8), 1) for ranks in (eight, many)]
        [15.0, 55.2]
        >>> round(1e6 * eight.secs("reduce-scatter", 7 / 8 * 2**30))
        2642
        """
        if self.members == 1:
            return 0.0
        protocols = [protocol for protocol in PROTOCOLS if self.link in protocol.ring_link]
        rings = (self._ring_secs(protocol, kind, sent) for protocol in protocols)
        trees = (self._tree_secs(protocol, sent) for protocol in protocols if kind == "all-reduce")
        return min(*rings, *trees)

    def _ring_secs(self, protocol: Protocol, kind: str, sent: float) -> float:
        rounds = 2 if kind == "all-reduce" else 1
        within, between = rounds * (self.members - self.hosts), rounds * (self.hosts - 1)
        links = protocol.ring_link
        latency = protocol.ring_start + within * links[self.link] + between * links[NETWORK]
        return latency + sent / self._at_most(protocol, protocol.ring_share)

    def _tree_secs(self, protocol: Protocol, sent: float) -> float:
        """Up the tree, then down: each time the whole array."""
        whole, links = sent * self.members / (self.members - 1), protocol.tree_link
        depth = (self.members / self.hosts - 1) * links[self.link] + (self.hosts.bit_length() - 1) * links[NETWORK]
        return protocol.tree_start + 2 * depth + whole / self._at_most(protocol, protocol.tree_shares[self.hosts > 1])

    def _at_most(self, protocol: Protocol, share: float) -> float:
        rate = share * self.bandwidth
        return min(rate, LL_BANDWIDTHS[min(self.hosts, 3) - 1]) if protocol.name == "LL" else rate
