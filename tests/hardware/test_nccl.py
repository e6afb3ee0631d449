"""What NCCL's collectives are taken to take is what others measured, and what NCCL would choose."""

import pytest

from parallax.analysis.planned.topology import read_topology
from parallax.hardware.nccl import BY_ALGORITHM, NVLINK, PCIE, Ranks

EIGHT_H100 = Ranks(8, 1, NVLINK, 360e9)


@pytest.mark.parametrize(
    ("size", "measured_us"),
    [
        (2**27, 377.2),
        (2**28, 709.7),
        (2**29, 1377.8),
        (2**30, 2689.3),
        (2**31, 5295.9),
        (2**32, 10_505),
        (2**33, 20_754),
    ],
)
def test_reduce_scatters_on_eight_h100_take_what_was_measured_by_size(size, measured_us):
    """nccl-tests on one host with H100, by rings: https://github.com/NVIDIA/nccl/issues/1047."""
    assert 1e6 * EIGHT_H100.secs("reduce-scatter", size * 7 / 8) == pytest.approx(measured_us, rel=0.06)


def test_few_bytes_over_many_hosts_go_along_trees():
    many = Ranks(128, 16, NVLINK, 360e9)
    around = 8.4 + 2 * (112 * 3.4 + 15 * 14)  # a ring with the protocol of many bytes, in us
    assert 1e6 * many.secs("all-reduce", 8) < around / 15
    # Hosts double: a tree has one level more, a ring as many hosts more.
    levels = [1e6 * Ranks(8 * hosts, hosts, NVLINK, 360e9).secs("all-reduce", 8) for hosts in (16, 32, 64)]
    assert [late - early for early, late in zip(levels, levels[1:])] == pytest.approx([10, 10])


@pytest.mark.parametrize("kind", BY_ALGORITHM)
@pytest.mark.parametrize(
    "ranks", [EIGHT_H100, Ranks(16, 2, NVLINK, 360e9), Ranks(8, 1, PCIE, 24e9), Ranks(4, 4, NVLINK, 47e9)]
)
def test_more_bytes_take_longer_and_many_have_all_of_the_bandwidth(kind, ranks):
    secs = [ranks.secs(kind, 10.0**power) for power in range(12)]
    assert secs == sorted(secs)
    assert 10.0**11 / secs[-1] == pytest.approx(ranks.bandwidth, rel=0.01)


def test_two_gpus_without_a_switch_have_the_links_of_a_pair():
    """Boards with four: 18 links, of which six lead to each other GPU."""
    four = read_topology("H200:2x4")
    four = four._replace(chip=four.chip._replace(pair_links=6))
    sizes = {"dp": 2, "tp": 4}
    assert four.route(sizes, ["tp"]).bandwidth == 18 * 25e9
    assert four.route(sizes, ["tp"]).to_one == 6 * 25e9
    assert four.route({"dp": 4, "tp": 2}, ["tp"]).bandwidth == 6 * 25e9
    assert read_topology("H200:2x4").route({"dp": 4, "tp": 2}, ["tp"]).bandwidth == 18 * 25e9
