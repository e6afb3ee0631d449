"""Peak FLOP/s, memory and links of chips, from their data sheets.

FLOP/s are those of dense matrix products. A float32 product counts as in JAX's default precision: one pass of bfloat16
on TPU, TF32 on NVIDIA. TPU clocks convert the compiler's estimated cycles into seconds: they are peak FLOP/s over the
FLOPs of the matrix units in a cycle; at 1.5 and 1.75 GHz the estimates match published step times on v5e and v5p. GPU
clocks are boost clocks; they convert times at peak rates into cycles. `usable_bytes` is the memory that the TPU
compiler (libtpu 0.0.42) lets a program use, according to its errors; for v7x and GPUs it is the data sheet's memory, of
which JAX reserves three quarters on GPUs unless XLA_CLIENT_MEM_FRACTION is set. GPUs on PCIe are modelled as if each
could send to any other at the rate of its slot, which is more than cards without direct access to each other reach. A
device of v4 and v5p is a chip, whose two cores share memory; a v4 topology has such devices if it is made with
`chip_config_name="megacore"`. A device of v7x is one of a chip's two cores. Its figures are those of a core, with half
of the chip's memory and network, but links are those of the chip.
"""

import re
from typing import NamedTuple

from parallax.errors import ConfigError, nearest
from parallax.hardware.nccl import NETWORK, NVLINK, PCIE, SIMPLE

GIB = 2**30
# Lanes of a TPU's vector registers, and entries of a tile along the fastest dim; blocks of kernels are multiples of it.
LANES = 128
# Parts of the names of GPUs that multiply nothing in bfloat16.
BEFORE_AMPERE = ("P40", "P100", "V100", "T4", "GTX", "TITAN", "Quadro", "RTX 20")
# Share of its chip's peak that an attention or grouped kernel is taken to reach in a compiled step. Compilers estimate
# no cycles for kernels, and none is measured to reach the peak.
KERNEL_EFFICIENCY = 0.7
# Chips whose matrix units scale blocks of 32 float8 numbers, or 16 float4: mxfp8 and nvfp4. XLA has such products for
# them, by jax.nn.scaled_matmul.
MICROSCALED = ("NVIDIA B200",)


class GpuTarget(NamedTuple):
    """What XLA needs to compile for a GPU that is not present. Cores are streaming multiprocessors."""

    capability: tuple[int, int]  # CUDA's
    cores: int
    float_units: int  # float32 units of a core
    threads: int  # threads of a core
    shared_kib: int  # shared memory of a core; a block may use 1 less
    l2_bytes: int
    clock_ghz: float


class AttentionShares(NamedTuple):
    """Shares of a chip's FLOP/s that a kernel of attention reaches at long rows, and the tokens of a row at which it
    reaches half of them."""

    forward: float = 1.0
    backward: float = 1.0
    tokens_at_half: int = 0

    def share(self, seq: int, *, backward: bool) -> float:
        """The share on rows of `seq` tokens."""
        return (self.backward if backward else self.forward) * seq / (seq + self.tokens_at_half)


class Reached(NamedTuple):
    """What a step reaches of a chip's data sheet: shares of its FLOP/s in products of 16 and of fewer bits and in
    kernels of attention, and of the rates of memory, links, the network and the link to the host. Kernels of experts
    are taken to reach KERNEL_EFFICIENCY of what products do: on an H200 PyTorch's grouped product reaches 705 TFLOP/s
    with 16 large groups (https://github.com/pytorch/pytorch/pull/156203), 0.71 of peak; those of this project are not
    measured. A message that hides behind work makes that longer by a share `beside` of its time.

    `packed` is for rows of several documents, which cuDNN tells apart by a bias, and `triton` for the kernels that do
    without, of either, as if a row were one document. Each operation takes
    `launch_secs` besides. At its ends a product multiplies nothing for `ramp_secs`, or as long as its arrays take
    through memory if that is shorter.
    """

    products: float = 1.0
    narrow_products: float = 1.0
    attention: AttentionShares = AttentionShares()
    packed: AttentionShares = AttentionShares()
    triton: AttentionShares = AttentionShares()
    memory: float = 1.0
    links: float = 1.0
    network: float = 1.0
    host: float = 1.0
    beside: float = 0.0
    launch_secs: float = 0.0
    ramp_secs: float = 0.0


class Chip(NamedTuple):
    """One chip, or one of its `cores` if each is a device. Bandwidths are in bytes a second, in one direction.

    `flops` is FLOP/s by dtype. `ici_links` links of `ici_bandwidth` each lead to its neighbours: on TPU two for each
    torus dim, on NVIDIA to a switch (`torus_dims` is 0). A dim of a slice closes to a ring if its length is a multiple
    of `ring_multiple`; with `cube` only if all dims are such multiples. `switched` is the number of chips of one host
    on a switch, 0 on a torus; without a switch a GPU has `pair_links` of its links to each other one of its host.
    `dcn_bandwidth` is the chip's share of its host's network, `host_bandwidth` that of its link to the host, and
    `host_bytes` its share of the host's memory. A message takes `start_secs`, and its first byte `link_secs` for each
    link between neighbours or over a switch, and `network_secs` for each of the network between hosts or slices. Of
    GPUs, gathers, scatters and sums take what NCCL says of links of this kind: parallax/hardware/nccl.py.
    """

    name: str
    platform: str  # JAX's name: "tpu", "gpu" or "cpu"
    flops: dict[str, float]
    usable_bytes: int
    hbm_bandwidth: float
    ici_bandwidth: float
    ici_links: int
    torus_dims: int
    switched: int
    dcn_bandwidth: float
    clock_hz: float | None
    ring_multiple: int = 0
    cube: bool = False
    host_bandwidth: float = 0.0
    host_bytes: int = 0
    target: GpuTarget | None = None
    cores: int = 1
    start_secs: float = 0.0
    link_secs: float = 0.0
    network_secs: float = 0.0
    nccl: str = ""
    pair_links: int = 0

    @property
    def unit(self) -> str:
        """What a device is: "chip" or "core"."""
        return "chip" if self.cores == 1 else "core"

    @property
    def gpu(self) -> str:
        """The name of a GPU; "" of other chips."""
        return self.name if self.platform == "gpu" else ""

    @property
    def reached(self) -> Reached:
        """What steps reach of these figures; all of them on chips whose figures are measured."""
        return REACHED.get(self.name, Reached())

    @property
    def is_microscaled(self) -> bool:
        """Whether it multiplies microscaled blocks."""
        return self.name in MICROSCALED

    def matmul_speed(self, matmul: str) -> float:
        """Speed of products in 8 bits relative to bfloat16; 1 for "compute", and for chips whose 8-bit FLOP/s are not
        known."""
        if matmul == "compute" or "bfloat16" not in self.flops:
            return 1.0
        sheet = self.flops.get(matmul, self.flops["bfloat16"]) / self.flops["bfloat16"]
        return EIGHT_BIT_SPEEDS.get(self.name, {}).get(matmul, sheet)

    def peak(self, dtype: str) -> float:
        """FLOP/s in this dtype; ConfigError lists the known dtypes."""
        if dtype not in self.flops:
            raise ConfigError(f"the peak of {self.name} in {dtype!r} is not known; {nearest(dtype, self.flops)}")
        return self.flops[dtype]


TORUS = {
    "3D": dict(ici_links=6, torus_dims=3, ring_multiple=4, cube=True),
    "2D": dict(ici_links=4, torus_dims=2, ring_multiple=16, cube=False),
}
# TFLOP/s in bfloat16, and in other dtypes, usable GiB, GB/s of HBM, of a link, of the network and of the link to the
# host, GB of host memory; then GHz and torus. Links to hosts: the book How to Scale Your Model, 16 GB/s for v4, 15 for
# v5e and v5p, 32 for v6e. Host memory: Google Cloud's page of each, over the chips of a VM or host: 407 GB for 4 on v4,
# 384 GB for 8 on v5e, 448 GB for 4 on v5p, 1536 GiB for 8 on v6e.
TPUS = {
    # Google Cloud's page on TPU v4; links and clock: Jouppi et al. 2023, TPU v4, table of its features; network: a
    # quarter of a host's 25 GB/s, as in the book How to Scale Your Model.
    "TPU v4": (275, {"int8": 275}, 30.75, 1200, 50, 6.25, 16, 101, 1.05, "3D"),
    # Google Cloud's page on TPU v5e: 400 GB/s in both directions over 4 ports, 2 x 100 Gbit/s for 8 chips.
    "TPU v5e": (197, {"int8": 393}, 15.75, 819, 50, 3.125, 15, 48, 1.5, "2D"),
    # Google Cloud's page on TPU v5p: 1200 GB/s in both directions over 6 links, 50 Gbit/s of network for a chip;
    # int8: the book How to Scale Your Model.
    "TPU v5p": (459, {"int8": 918, "float8": 459}, 95.74, 2765, 100, 6.25, 15, 112, 1.75, "3D"),
    # Google Cloud's page on TPU v6e: 800 GB/s in both directions over 4 ports, 4 x 200 Gbit/s for 8 chips.
    "TPU v6e": (918, {"int8": 1836, "float8": 918}, 31.25, 1638, 100, 12.5, 32, 206, 1.75, "2D"),
    # Half of what Google Cloud's page on TPU7x has of a chip, whose two cores are devices: 2307 TFLOP/s, 192 GB, 7380
    # GB/s, 100 Gbit/s of network; the chip has 1200 GB/s in both directions over 6 links. The page has no figure for
    # int8, whose products compile to no faster ones than bfloat16's, and none of the link to its host.
    "TPU v7x": (1153.5, {"int8": 1153.5, "float8": 2307}, 96, 3690, 100, 6.25, 0, 0, 2.2, "3D"),
}
# The sizes of the largest slice: Google Cloud's page of each chip. A pod of v5p has 8960 chips, its largest job 6144.
LARGEST_SLICES = {
    "TPU v4": (16, 16, 16),
    "TPU v5e": (16, 16),
    "TPU v5p": (16, 16, 24),
    "TPU v6e": (16, 16),
    "TPU v7x": (16, 24, 24),
}
# TPU: the book How to Scale Your Model has about 1 us for a link, and 8 us for a gather over three, measured. GPUs have
# for messages from one to another what NCCL assumes of its protocol Simple. Between slices of TPUs there is no figure:
# what NCCL 2.7.5 assumed of the network of GPUs stands in for it (commit 01afd20a, src/graph/tuning.cc).
ICI_SECS, NETWORK_OF_SLICES_SECS = (5e-6, 1e-6), 9.6e-6
CORES = {"TPU v7x": 2}  # that are devices
# Between the two cores of a chip, over one of its links to another chip: the same page.
LINKS_BETWEEN_CORES = 6
# Speed of a product of 8192 x 8192 matrices relative to bfloat16, by cycles of libtpu 0.0.52: int8 to int32, e4m3 to
# bfloat16. For other chips, and for v4, it is taken from data sheets.
EIGHT_BIT_SPEEDS = {
    "TPU v5e": {"int8": 2.14, "float8": 1.06},
    "TPU v5p": {"int8": 1.89, "float8": 0.95},
    "TPU v6e": {"int8": 1.62, "float8": 1.14},
    "TPU v7x": {"int8": 0.91, "float8": 2.06},
}
# The same; then links. Cards in a slot of PCIe 4.0 x16 have one, and for the network of their hosts, of which there is
# no data sheet, 10 Gbit/s for each card are assumed, and 64 GB of memory. Links to hosts are the slot's 16 lanes: 31.5
# GB/s with PCIe 4.0, 63 with 5.0; memory of hosts: DGX A100, H100, H200 and B200, 2 TB for 8.
NVIDIA = {
    # NVIDIA's data sheet of the A100 80GB SXM, without sparsity; network: DGX A100, 200 Gbit/s for a GPU.
    "NVIDIA A100": (312, {"float32": 156, "int8": 624}, 80, 2039, 25, 25, 31.5, 250, 12),
    # NVIDIA's data sheets of the H100 and H200 SXM, half of the figures with sparsity; network: DGX H100 and H200,
    # 400 Gbit/s for a GPU.
    "NVIDIA H100": (989, {"float32": 494.5, "float8": 1979, "int8": 1979}, 80, 3350, 25, 50, 63, 250, 18),
    "NVIDIA H200": (989, {"float32": 494.5, "float8": 1979, "int8": 1979}, 141, 4800, 25, 50, 63, 250, 18),
    # From public tables of the HGX B200 at 1000 W, without sparsity, which differ in TF32 (1100 and 1125); NVIDIA's own
    # page was not checked. Network: 400 Gbit/s for a GPU.
    "NVIDIA B200": (
        2250,
        {"float32": 1125, "float8": 4500, "int8": 4500, "float4": 9000},
        180,
        8000,
        50,
        50,
        63,
        250,
        18,
    ),
    # NVIDIA's white paper of the Ada architecture, table of the RTX 4090: sums in float32, without sparsity.
    "NVIDIA RTX 4090": (165.2, {"float32": 82.6, "float8": 330.3, "int8": 660.6}, 24, 1008, 31.5, 1.25, 31.5, 64, 1),
    # NVIDIA's white paper of GA102, table of the RTX 3090: sums in float32, without sparsity.
    "NVIDIA RTX 3090": (71, {"float32": 35.6, "int8": 284}, 24, 936, 31.5, 1.25, 31.5, 64, 1),
    # NVIDIA's data sheet of the L4, half of the figures with sparsity.
    "NVIDIA L4": (121, {"float32": 60, "float8": 242, "int8": 242}, 24, 300, 31.5, 1.25, 31.5, 64, 1),
    # NVIDIA's data sheet of the A10, without sparsity.
    "NVIDIA A10": (125, {"float32": 62.5, "int8": 250}, 24, 600, 31.5, 1.25, 31.5, 64, 1),
}

# Data centre GPUs: from XLA (xla/backends/gpu/target_config/specs, 2026). Other GPUs: cores, L2 and boost clock as
# commonly given, not checked against data sheets. XLA uses them to choose tiles; times and memory of a plan do not
# depend on them.
GPU_TARGETS = {
    "NVIDIA A100": GpuTarget((8, 0), 108, 64, 2048, 164, 40 * 2**20, 1.41),
    "NVIDIA H100": GpuTarget((9, 0), 132, 128, 2048, 228, 50 * 2**20, 1.98),
    "NVIDIA H200": GpuTarget((9, 0), 132, 128, 2048, 228, 50 * 2**20, 1.98),
    "NVIDIA B200": GpuTarget((10, 0), 148, 128, 2048, 228, 132_644_864, 1.965),
    "NVIDIA RTX 4090": GpuTarget((8, 9), 128, 128, 1536, 100, 72 * 2**20, 2.52),
    "NVIDIA RTX 3090": GpuTarget((8, 6), 82, 128, 1536, 100, 6 * 2**20, 1.695),
    "NVIDIA L4": GpuTarget((8, 9), 58, 128, 1536, 100, 48 * 2**20, 2.04),
    "NVIDIA A10": GpuTarget((8, 6), 72, 128, 1536, 100, 6 * 2**20, 1.695),
}


def _chip(name: str, bfloat16: float, others: dict[str, float], gib: float, *rates: float | str) -> Chip:
    is_tpu = name in TPUS
    hbm, link, network, host_link, host_memory, *kind = rates
    target = GPU_TARGETS.get(name)
    clock, links = kind if is_tpu else (target.clock_ghz, dict(ici_links=kind[0], torus_dims=0))
    nccl = "" if is_tpu else PCIE if kind[0] == 1 else NVLINK
    start, link_latency = ICI_SECS if is_tpu else (SIMPLE.ring_start, SIMPLE.ring_link[nccl])
    tflops = {"bfloat16": bfloat16, "float32" if is_tpu else "float16": bfloat16, **others}
    return Chip(
        name=name,
        platform="tpu" if is_tpu else "gpu",
        flops={dtype: rate * 1e12 for dtype, rate in tflops.items()},
        usable_bytes=int(gib * GIB),
        hbm_bandwidth=hbm * 1e9,
        ici_bandwidth=link * 1e9,
        **(TORUS[links] if is_tpu else links),
        switched=0 if is_tpu else 8,
        dcn_bandwidth=network * 1e9,
        clock_hz=clock * 1e9,
        host_bandwidth=host_link * 1e9,
        host_bytes=int(host_memory * 1e9),
        target=target,
        cores=CORES.get(name, 1),
        start_secs=start,
        link_secs=link_latency,
        network_secs=NETWORK_OF_SLICES_SECS if is_tpu else SIMPLE.ring_link[NETWORK],
        nccl=nccl,
    )


# One table of what chips reach, each figure with its source.
FITTED = "fitted to half of the published steps, benchmarks/published.py"
SAME = "not known: that of another chip, or of rows of one document, stands in"
ASSUMED = "assumed: no published or measured figure"
H100_STEP = "docs/measured/h100.md: kernels of a step on one H100, jax 0.11.2"
H100_KERNELS = "docs/measured/h100.md: kernels of attention, at 2048 to 32,768 tokens within a tenth"
JAX_KERNELS = "docs/measured/h100.md: JAX's kernels of attention for Triton, at 2048 to 32,768 tokens within a tenth"
IRONWOOD = (
    "https://github.com/AI-Hypercomputer/tpu-recipes/blob/c8cfe2f/microbenchmarks/ironwood/README.md: GEMM by size"
)
NCCL_LINKS = (
    "https://github.com/NVIDIA/nccl/issues/1281: all-gathers of 350 GB/s and reduce-scatters of 360 on H100, of 450; "
    "370 by NCCL's authors in https://github.com/NVIDIA/nccl-tests/issues/212"
)
NCCL_ASSUMES = (
    "https://github.com/NVIDIA/nccl/blob/v2.30.7-1/src/graph/topo.h: what NCCL takes links to have, NVLink of A100 20 "
    "of 25 GB/s, of B200 40.1 of 50, PCIe 12 of 15.75"
)
NCCL_NETWORK = "https://github.com/NVIDIA/nccl-tests/issues/290: 46 to 48 GB/s of each network interface, of 50"
INTERFERENCE = (
    "https://arxiv.org/abs/2507.03114: compute is 18.9 % slower beside messages, and both one after the other take "
    "10.2 % longer than that; so 0.189 of (1.189 * 1.102 - 1), of A100, H100, MI210 and MI250 together"
)
RTX_4090 = "https://github.com/zzc0721/torch-performance-test-data/issues/78: 159 TFLOP/s at 2048 to 10,240, of 165.2"
RTX_5090 = "https://github.com/pytorch/pytorch/pull/155991: 389 TFLOP/s in float8 at 4096 on an RTX 5090, of 419"
AMPERE_KERNELS = (
    "https://github.com/gpu-mode/ring-attention/issues/10: FlashAttention-2 on an RTX A5000 at 512 to 8192 tokens, 82 "
    "TFLOP/s forward and 53 to 77 backward, of 111"
)
BOOK = "https://github.com/jax-ml/scaling-book/blob/0819a7d/tpus.md: a link's one-way bandwidth, over the data sheet's"


class Figure(NamedTuple):
    """A figure of Reached, and where it is from."""

    value: float | AttentionShares
    source: str


_SPLASH = AttentionShares(0.45, 0.45, 1450)
_AMPERE = AttentionShares(0.74, 0.71, 240)
_TPU = dict(
    products=Figure(0.93, FITTED),
    narrow_products=Figure(0.93, SAME),
    attention=Figure(_SPLASH, FITTED),
    packed=Figure(_SPLASH, SAME),
    links=Figure(0.9, BOOK),
    network=Figure(0.9, SAME),
    launch_secs=Figure(1.6e-6, SAME),
    ramp_secs=Figure(10e-6, SAME),
)
_H100 = dict(
    products=Figure(0.77, H100_STEP),
    narrow_products=Figure(0.74, H100_STEP),
    attention=Figure(AttentionShares(0.62, 0.56, 1450), H100_KERNELS),
    packed=Figure(AttentionShares(0.295, 0.244, 700), H100_KERNELS),
    triton=Figure(AttentionShares(0.215, 0.177, 700), JAX_KERNELS),
    memory=Figure(0.83, H100_STEP),
    links=Figure(0.8, NCCL_LINKS),
    network=Figure(0.94, NCCL_NETWORK),
    beside=Figure(0.61, INTERFERENCE),
    host=Figure(0.86, H100_STEP),
    launch_secs=Figure(2.1e-6, H100_STEP),
)
SOURCES_OF_REACHED: dict[str, dict[str, Figure]] = {
    "TPU v4": {name: Figure(figure.value, SAME) for name, figure in _TPU.items()},
    "TPU v5e": _TPU,
    "TPU v5p": _TPU,
    "TPU v6e": _TPU | dict(products=Figure(0.66, FITTED), narrow_products=Figure(0.66, SAME)),
    "TPU v7x": _TPU
    | dict(
        products=Figure(0.72, FITTED),
        narrow_products=Figure(0.72, FITTED),
        links=Figure(0.9, SAME),
        launch_secs=Figure(1.6e-6, IRONWOOD),
        ramp_secs=Figure(10e-6, IRONWOOD),
    ),
    **{name: {key: Figure(figure.value, SAME) for key, figure in _H100.items()} for name in NVIDIA},
}
SOURCES_OF_REACHED["NVIDIA H100"] = _H100
# Cards with less FLOP/s for their power and memory than an H100.
for _name in ("NVIDIA RTX 4090", "NVIDIA RTX 3090", "NVIDIA L4", "NVIDIA A10"):
    SOURCES_OF_REACHED[_name] |= dict(products=Figure(0.8, ASSUMED), narrow_products=Figure(0.8, ASSUMED))
    SOURCES_OF_REACHED[_name] |= dict(links=Figure(0.76, NCCL_ASSUMES), attention=Figure(_AMPERE, AMPERE_KERNELS))
# Those for games multiply at half of the rate if sums are in float32, so that little else is waited for.
for _name in ("NVIDIA RTX 4090", "NVIDIA RTX 3090"):
    SOURCES_OF_REACHED[_name] |= dict(products=Figure(0.96, RTX_4090), narrow_products=Figure(0.93, RTX_5090))
for _name in ("NVIDIA A100", "NVIDIA B200"):
    SOURCES_OF_REACHED[_name] |= dict(links=Figure(0.8, NCCL_ASSUMES))
REACHED = {
    chip: Reached(**{name: figure.value for name, figure in figures.items()})
    for chip, figures in SOURCES_OF_REACHED.items()
}

CHIPS = {name: _chip(name, *row) for name, row in (TPUS | NVIDIA).items()}
# JAX's names, if they differ. Other variants, such as H100 PCIe, are different chips.
DEVICE_KINDS = {
    "geforce rtx 3090": "NVIDIA RTX 3090",
    "geforce rtx 4090": "NVIDIA RTX 4090",
    "v5 lite": "TPU v5e",
    "v5": "TPU v5p",
    "v6 lite": "TPU v6e",
    "tpu7x": "TPU v7x",
    "7x": "TPU v7x",
    "a100-sxm4-80gb": "NVIDIA A100",
    "h100 80gb hbm3": "NVIDIA H100",
}
NAMES = {name.split(maxsplit=1)[1].replace(" ", ""): name for name in CHIPS}  # without spaces, as in topologies
SHORT = {short.lower(): name for short, name in NAMES.items()} | DEVICE_KINDS
SHORT |= {name.split(maxsplit=1)[1].lower(): name for name in CHIPS}


def chip(name: str) -> Chip:
    """The chip of a topology ("v5p:4x4x4"), of a device kind ("TPU v5 lite"), or by its name ("H100").

    Raises ConfigError, which lists the known ones.

    >>> chip("v5e:4x4").name, chip("TPU v5 lite").flops["bfloat16"]
    ('TPU v5e', 197000000000000.0)
    """
    short = re.sub(r"^(tpu|nvidia)\s+", "", name.split(":")[0].strip().lower())
    if short not in SHORT:
        raise ConfigError(f"chip {name!r} is unknown; {nearest(name.split(':')[0], NAMES)}")
    return CHIPS[SHORT[short]]


def name_of_kind(device_kind: str) -> str:
    """The name of the chip of this device kind; "" if it is unknown.

    >>> name_of_kind("TPU v5 lite"), name_of_kind("TFRT_CPU")
    ('TPU v5e', '')
    """
    try:
        return chip(device_kind).name
    except ConfigError:
        return ""


def mfu(model_flops: float, secs: float, peak_flops: float) -> float:
    """Model FLOPs utilization: model FLOPs over peak FLOP/s times the time; both of the same devices, one or all."""
    return model_flops / secs / peak_flops
