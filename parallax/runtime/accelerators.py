"""Which accelerators this machine has, as its files and its environment say, whether JAX finds them or not."""

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path("/")
GPU_FILES = ("dev/nvidia0", "dev/nvidiactl", "dev/dxg", "dev/kfd")
TPU_FILES = ("dev/accel0", "dev/vfio/0")
GOOGLE = "0x1ae0"  # as a vendor on PCI
NO_TPU = ("0x0042", "0x001f")  # its network card and its disk, which machines without TPU have too
SET_BY_JAX = ("TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH")


def gpus(root: Path = ROOT) -> list[str]:
    """Files of GPUs."""
    return [str(root / name) for name in GPU_FILES if (root / name).exists()]


def tpus(environment: Mapping[str, str] = os.environ, root: Path = ROOT) -> list[str]:
    """Files of TPUs, and variables that a host of TPUs has."""
    files = [str(root / name) for name in TPU_FILES if (root / name).exists()]
    names = (name for name in environment if name.startswith(("TPU_", "MEGASCALE_")))
    return [*files, *_on_pci(root), *(name for name in names if name not in SET_BY_JAX)]


def leave_out_absent_tpu(root: Path = ROOT) -> None:
    """Keep JAX from asking libtpu for chips, where that is installed to compile for them and there are none.

    To be called before the first array. Libtpu would complain on stderr that it is on no host of TPUs, and take its
    time. Where anything says that there are chips, or JAX_PLATFORMS that they are wanted, what goes wrong is shown.
    """
    if os.environ.get("JAX_PLATFORMS") or not importlib.util.find_spec("libtpu") or gpus(root) or tpus(root=root):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # it has read that variable
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def unused(platform: str, root: Path = ROOT) -> list[str]:
    """A line where this machine has accelerators and JAX, which runs on `platform`, has not found them."""
    wanted = os.environ.get("JAX_PLATFORMS", "")
    found = [("GPU", gpus(root)), ("TPU", [name for name in tpus({}, root) if "vfio" not in name])]
    if platform != "cpu" or wanted.startswith("cpu"):
        return []
    return [
        f"warning: this machine has a {kind} ({files[0]}), but JAX runs on its CPU; "
        "`python -c 'import jax; jax.devices()'` says why"
        for kind, files in found
        if files
    ]


def _on_pci(root: Path) -> Iterator[str]:
    for file in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        try:
            vendor, device = (at.read_text().strip() for at in (file, file.with_name("device")))
        except OSError:
            continue
        if vendor == GOOGLE and device not in NO_TPU:
            yield str(file.parent)
