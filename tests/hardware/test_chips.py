"""The table of chips agrees with itself and with what is known of the chips, and knows what it does not know."""

import pytest

from parallax.errors import ConfigError
from parallax.hardware.chips import CHIPS, chip

# Multiply-adds that the matrix units of a device do in a cycle: units, their rows and columns.
UNITS = {
    "TPU v4": 8 * 128 * 128,
    "TPU v5e": 4 * 128 * 128,
    "TPU v5p": 8 * 128 * 128,
    "TPU v6e": 4 * 256 * 256,
    "TPU v7x": 4 * 256 * 256,
}


# GB of memory, as data sheets write it, of 2**30 bytes: the compilers let nearly all be filled, and of v5p's 95 more.
SHEETS = {"TPU v4": 32, "TPU v5e": 16, "TPU v5p": 95, "TPU v6e": 32, "TPU v7x": 192 / 2}
SHEETS |= {"NVIDIA A100": 80, "NVIDIA H100": 80, "NVIDIA H200": 141, "NVIDIA B200": 180}
SHEETS |= dict.fromkeys(("NVIDIA RTX 4090", "NVIDIA RTX 3090", "NVIDIA L4", "NVIDIA A10"), 24)


@pytest.mark.parametrize("name", UNITS)
def test_the_clock_times_what_a_cycle_multiplies_is_the_peak(name):
    known = CHIPS[name]
    assert 2 * UNITS[name] * known.clock_hz == pytest.approx(known.peak("bfloat16"), rel=0.003)


# FLOPs of a core in a cycle, by compute capability: dense bfloat16, sums in float32. Those of 8.6 and 8.9 for data
# centres add up twice as fast as those for players; tensor cores of 9.0 and 10.0 do not reach the boost clock.
CORE_FLOPS = {"A100": 2048, "H100": 4096, "H200": 4096, "B200": 8192, "RTX4090": 512, "RTX3090": 512, "L4": 1024}
CORE_FLOPS["A10"] = 1024


@pytest.mark.parametrize("name", CORE_FLOPS)
def test_the_cores_of_a_gpu_make_its_peak(name):
    known = chip(name)
    made = CORE_FLOPS[name] * known.target.cores * known.clock_hz
    assert 0.9 * made < known.peak("bfloat16") < 1.01 * made


@pytest.mark.parametrize("known", CHIPS.values(), ids=CHIPS)
def test_the_figures_of_a_chip_agree_with_each_other(known):
    assert known.peak("float32") <= known.peak("bfloat16") <= known.peak("int8")
    assert known.dcn_bandwidth < known.ici_bandwidth * known.ici_links < known.hbm_bandwidth
    assert 0.95 < known.usable_bytes / 2**30 / SHEETS[known.name] < 1.01
    assert known.ici_links == 2 * known.torus_dims or known.torus_dims == 0


@pytest.mark.parametrize(
    "written, name",
    {
        "v5p:4x4x4": "TPU v5p",
        "TPU v5": "TPU v5p",
        "TPU v5 lite": "TPU v5e",
        "TPU v6 lite": "TPU v6e",
        "tpu7x:2x2x1": "TPU v7x",
        "TPU7x": "TPU v7x",
        "v7x:2x2x1": "TPU v7x",
        "v4:2x2x2": "TPU v4",
        "H100": "NVIDIA H100",
        "NVIDIA H100 80GB HBM3": "NVIDIA H100",
        "NVIDIA H200": "NVIDIA H200",
        "NVIDIA RTX 4090": "NVIDIA RTX 4090",
        "b200:1x8": "NVIDIA B200",
        "NVIDIA A100-SXM4-80GB": "NVIDIA A100",
        "NVIDIA GeForce RTX 4090": "NVIDIA RTX 4090",
        "NVIDIA GeForce RTX 3090": "NVIDIA RTX 3090",
        "RTX4090:8": "NVIDIA RTX 4090",
        "NVIDIA L4": "NVIDIA L4",
        "a10:4": "NVIDIA A10",
    }.items(),
)
def test_a_chip_is_found_by_topology_device_kind_and_name(written, name):
    assert chip(written).name == name


@pytest.mark.parametrize(
    "written", ["v5q:2x2", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB", "NVIDIA L40S", "NVIDIA A10G", "cpu", ""]
)
def test_an_unknown_chip_is_refused_with_the_known_ones(written):
    with pytest.raises(ConfigError, match="v4, v5e, v5p, v6e, v7x, A100, H100, H200, B200, RTX4090, RTX3090, L4, A10"):
        chip(written)


def test_an_unknown_dtype_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="TPU v5e in 'float64' is not known; .*bfloat16"):
        chip("v5e").peak("float64")
