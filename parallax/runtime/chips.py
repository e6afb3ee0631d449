"""What chips can do, from their makers' data sheets: one table.

FLOP/s are of dense matrix products. A float32 product counts as JAX multiplies it unless told otherwise: on TPU in one
pass of bfloat16, on NVIDIA in TF32. TPU clocks are those at which the cycles that the compiler estimates become
seconds: peak FLOP/s over what the matrix units do in a cycle, and at 1.5 and 1.75 GHz the estimates match published
step times on v5e and v5p. `usable_bytes` is what the TPU compiler (libtpu 0.0.42) lets a program fill, as its refusals
say, and for GPUs the data sheet's memory, of which JAX takes three quarters where XLA_CLIENT_MEM_FRACTION says nothing
else. GPUs on PCIe are counted as if each could send to any other at the rate of its slot, more than cards without
direct access to each other reach. v4 and v5p are counted as chips of two cores that share their memory; a v4 topology
has such devices when it is made with `chip_config_name="megacore"`.
"""

import re
from typing import NamedTuple

from parallax.runtime.errors import ConfigError, nearest

GIB = 2**30
PCIE_DCN = 1.25e9  # assumed: 10 Gbit/s for each card
TORUS_3D = dict(ici_links=6, torus_dims=3, ring_multiple=4, cube=True)
TORUS_2D = dict(ici_links=4, torus_dims=2, ring_multiple=16, cube=False)


class Chip(NamedTuple):
    """One chip. Bandwidths are in bytes a second, one way.

    `flops` is FLOP/s by dtype. `ici_links` of `ici_bandwidth` each lead to its neighbours: on TPU two for each torus
    dim, on NVIDIA into a switch (`torus_dims` is 0). `ring_multiple` is the length, or its multiples, at which a dim of
    a slice closes to a ring; `cube` says that no dim does unless all are such multiples. `switched` is how many of one
    host share a switch, 0 on a torus. `dcn_bandwidth` is the chip's share of its host's network.
    """

    name: str
    platform: str  # as JAX calls it: "tpu", "gpu" or "cpu"
    flops: dict[str, float]
    usable_bytes: int
    hbm_bandwidth: float
    ici_bandwidth: float
    ici_links: int
    torus_dims: int
    ring_multiple: int
    cube: bool
    switched: int
    dcn_bandwidth: float
    clock_hz: float | None
    source: str

    def peak(self, dtype: str) -> float:
        """FLOP/s in this dtype; ConfigError lists those that are known."""
        if dtype not in self.flops:
            raise ConfigError(f"the peak of {self.name} in {dtype!r} is not known; {nearest(dtype, self.flops)}")
        return self.flops[dtype]


def _tpu(name: str, bfloat16: float, others: dict[str, float], **facts) -> Chip:
    flops = {"bfloat16": bfloat16, "float32": bfloat16, **others}
    return Chip(name=name, platform="tpu", flops=flops, switched=0, **facts)


def _nvidia(name: str, bfloat16: float, others: dict[str, float], **facts) -> Chip:
    flops = {"bfloat16": bfloat16, "float16": bfloat16, **others}
    links = dict(torus_dims=0, ring_multiple=0, cube=False, switched=8)
    return Chip(name=name, platform="gpu", flops=flops, clock_hz=None, **links, **facts)


def _nvidia_pcie(name: str, bfloat16: float, others: dict[str, float], **facts) -> Chip:
    """A card in a slot of PCIe 4.0 x16; of its host's network there is no data sheet."""
    links = dict(ici_bandwidth=31.5e9, ici_links=1, dcn_bandwidth=PCIE_DCN)
    return _nvidia(name, bfloat16, others, usable_bytes=24 * GIB, **links, **facts)


TABLE = [
    _tpu(
        "TPU v4",
        275e12,
        {"int8": 275e12},
        usable_bytes=int(30.75 * GIB),
        hbm_bandwidth=1.2e12,
        ici_bandwidth=50e9,
        **TORUS_3D,
        dcn_bandwidth=6.25e9,
        clock_hz=1.05e9,
        source="Google Cloud's page on TPU v4; links and clock: Jouppi et al. 2023, TPU v4, table of its features; "
        "network: a quarter of a host's 25 GB/s, as in the book How to Scale Your Model",
    ),
    _tpu(
        "TPU v5e",
        197e12,
        {"int8": 393e12},
        usable_bytes=int(15.75 * GIB),
        hbm_bandwidth=819e9,
        ici_bandwidth=50e9,
        **TORUS_2D,
        dcn_bandwidth=3.125e9,
        clock_hz=1.5e9,
        source="Google Cloud's page on TPU v5e: 400 GB/s in both directions over 4 ports, 2 x 100 Gbit/s for 8 chips",
    ),
    _tpu(
        "TPU v5p",
        459e12,
        {"int8": 918e12, "float8": 459e12},
        usable_bytes=int(95.74 * GIB),
        hbm_bandwidth=2765e9,
        ici_bandwidth=100e9,
        **TORUS_3D,
        dcn_bandwidth=6.25e9,
        clock_hz=1.75e9,
        source="Google Cloud's page on TPU v5p: 1200 GB/s in both directions over 6 links, 50 Gbit/s of network for a "
        "chip; int8: the book How to Scale Your Model",
    ),
    _tpu(
        "TPU v6e",
        918e12,
        {"int8": 1836e12},
        usable_bytes=int(31.25 * GIB),
        hbm_bandwidth=1638e9,
        ici_bandwidth=100e9,
        **TORUS_2D,
        dcn_bandwidth=12.5e9,
        clock_hz=1.75e9,
        source="Google Cloud's page on TPU v6e: 800 GB/s in both directions over 4 ports, 4 x 200 Gbit/s for 8 chips",
    ),
    _nvidia(
        "NVIDIA A100",
        312e12,
        {"float32": 156e12, "int8": 624e12},
        usable_bytes=80 * GIB,
        hbm_bandwidth=2039e9,
        ici_bandwidth=25e9,
        ici_links=12,
        dcn_bandwidth=25e9,
        source="NVIDIA's data sheet of the A100 80GB SXM, without sparsity; network: DGX A100, 200 Gbit/s for a GPU",
    ),
    _nvidia(
        "NVIDIA H100",
        989e12,
        {"float32": 494.5e12, "float8": 1979e12, "int8": 1979e12},
        usable_bytes=80 * GIB,
        hbm_bandwidth=3350e9,
        ici_bandwidth=25e9,
        ici_links=18,
        dcn_bandwidth=50e9,
        source="NVIDIA's data sheet of the H100 SXM, half of the figures with sparsity; network: DGX H100, 400 Gbit/s "
        "for a GPU",
    ),
    _nvidia(
        "NVIDIA H200",
        989e12,
        {"float32": 494.5e12, "float8": 1979e12, "int8": 1979e12},
        usable_bytes=141 * GIB,
        hbm_bandwidth=4800e9,
        ici_bandwidth=25e9,
        ici_links=18,
        dcn_bandwidth=50e9,
        source="NVIDIA's data sheet of the H200 SXM, half of the figures with sparsity; network: DGX H200, 400 Gbit/s "
        "for a GPU",
    ),
    _nvidia_pcie(
        "NVIDIA RTX 4090",
        165.2e12,
        {"float32": 82.6e12, "float8": 330.3e12, "int8": 660.6e12},
        hbm_bandwidth=1008e9,
        source="NVIDIA's white paper of the Ada architecture, table of the RTX 4090: sums in float32, without sparsity",
    ),
    _nvidia_pcie(
        "NVIDIA RTX 3090",
        71e12,
        {"float32": 35.6e12, "int8": 284e12},
        hbm_bandwidth=936e9,
        source="NVIDIA's white paper of GA102, table of the RTX 3090: sums in float32, without sparsity",
    ),
    _nvidia_pcie(
        "NVIDIA L4",
        121e12,
        {"float32": 60e12, "float8": 242e12, "int8": 242e12},
        hbm_bandwidth=300e9,
        source="NVIDIA's data sheet of the L4, half of the figures with sparsity",
    ),
    _nvidia_pcie(
        "NVIDIA A10",
        125e12,
        {"float32": 62.5e12, "int8": 250e12},
        hbm_bandwidth=600e9,
        source="NVIDIA's data sheet of the A10, without sparsity",
    ),
]
CHIPS = {chip.name: chip for chip in TABLE}
# What JAX calls them where that is not the name. Cards of another make, such as H100 PCIe, are other chips.
KINDS = {
    "geforce rtx 3090": "NVIDIA RTX 3090",
    "geforce rtx 4090": "NVIDIA RTX 4090",
    "v5 lite": "TPU v5e",
    "v5": "TPU v5p",
    "v6 lite": "TPU v6e",
    "a100-sxm4-80gb": "NVIDIA A100",
    "h100 80gb hbm3": "NVIDIA H100",
}
NAMES = {name.split(maxsplit=1)[1].replace(" ", ""): name for name in CHIPS}  # as topologies have them: no spaces
SHORT = {short.lower(): name for short, name in NAMES.items()} | KINDS


def chip(name: str) -> Chip:
    """The chip of a topology ("v5p:4x4x4"), of a device kind ("TPU v5 lite"), or by its name ("H100").

    Raises ConfigError with the known ones.

    >>> chip("v5e:4x4").name, chip("TPU v5 lite").flops["bfloat16"]
    ('TPU v5e', 197000000000000.0)
    """
    short = re.sub(r"^(tpu|nvidia)\s+", "", name.split(":")[0].strip().lower())
    if short not in SHORT:
        raise ConfigError(f"chip {name!r} is unknown; {nearest(name.split(':')[0], NAMES)}")
    return CHIPS[SHORT[short]]
