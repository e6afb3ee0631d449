"""Simulated CPU devices, and the accelerators of this machine, whether JAX finds them or not."""

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from parallax.runtime.errors import ConfigError

ROOT = Path("/")
GPU_FILES = ("dev/nvidia0", "dev/nvidiactl", "dev/dxg", "dev/kfd")
TPU_FILES = ("dev/accel0", "dev/vfio/0")
GOOGLE = "0x1ae0"  # as a vendor on PCI
NO_TPU = ("0x0042", "0x001f")  # its network card and its disk, which machines without TPU have too
SET_BY_JAX = ("TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH")
CPU_THREADS = ("PJRT_NPROC", "NPROC")  # how many threads XLA starts for all CPU devices together; the first that is set


def gpu_files(root: Path = ROOT) -> list[str]:
    """Device files of GPUs."""
    return [str(root / name) for name in GPU_FILES if (root / name).exists()]


def tpu_signs(environment: Mapping[str, str] = os.environ, root: Path = ROOT) -> list[str]:
    """Device files of TPUs, and environment variables that TPU hosts set."""
    files = [str(root / name) for name in TPU_FILES if (root / name).exists()]
    names = (name for name in environment if name.startswith(("TPU_", "MEGASCALE_")))
    return [*files, *_on_pci(root), *(name for name in names if name not in SET_BY_JAX)]


def simulate_devices(count: int, processes: int = 1) -> None:
    """Let the CPU pose as `count` devices; to be called before anything else asks JAX for its devices.

    `import jax` may come first, an array may not. Where JAX already runs with so many CPU devices nothing happens.
    Of several processes each simulates its equal share. Raises ConfigError with both numbers where it comes too late.
    """
    if count % processes:
        raise ConfigError(f"mesh.simulate={count} does not divide over {processes} processes; use a multiple of it")
    count //= processes
    import jax  # here: what looks for accelerators comes before it

    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
        keep_a_thread_free(count)
    except RuntimeError as error:
        present = len(jax.devices())
        if jax.default_backend() == "cpu" and present == count:
            return
        raise ConfigError(
            f"mesh.simulate={count} comes too late: JAX already runs with {present} {jax.default_backend()} "
            f"device(s); restart the kernel, or start a fresh process, and call simulate_devices({count}) there before "
            "any other JAX call"
        ) from error


def keep_a_thread_free(devices: int) -> None:
    """Have XLA start more threads than there are CPU devices; with fewer, some products are wrong, and nothing says so.

    A device's program goes on in whichever of these threads ended what it waited for, and that thread does not look
    into its queue meanwhile. Parallel loops and products leave entries there, for threads without a program to take.
    Where all have one, the queue is full after 1,024 of them, and XLA runs at once what it would queue. Within a large
    product Eigen (TensorContractionThreadPool.h) then packs a tile over one that is not multiplied yet: the result's
    first rows are wrong by a block of the sum. tests/product_behind_loops.py shows it with jaxlib 0.10.2 and 0.12.0.
    """
    given = [os.environ[name] for name in CPU_THREADS if os.environ.get(name, "").isdecimal()]
    threads = int(given[0]) if given else _usable_cpus()
    os.environ[CPU_THREADS[0]] = str(max(threads, devices + 1))


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def leave_out_absent_tpu(root: Path = ROOT) -> None:
    """Keep JAX from initializing libtpu where it is installed but there is no TPU.

    To be called before the first array. Libtpu would complain on stderr that it is on no host of TPUs, and take its
    time. Where anything says that there are chips, or JAX_PLATFORMS that they are wanted, what goes wrong is shown.
    """
    is_installed = importlib.util.find_spec("libtpu") is not None
    if os.environ.get("JAX_PLATFORMS") or not is_installed or gpu_files(root) or tpu_signs(root=root):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # it has read that variable
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def unused_accelerators(platform: str, root: Path = ROOT) -> list[str]:
    """Warnings about accelerators of this machine that JAX, which runs on `platform`, has not found."""
    wanted = os.environ.get("JAX_PLATFORMS", "")
    found = [("GPU", gpu_files(root)), ("TPU", [name for name in tpu_signs({}, root) if "vfio" not in name])]
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
