"""Simulated CPU devices, and detection of this machine's accelerators, even if JAX does not find them."""

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from parallax.runtime.errors import ConfigError

ROOT = Path("/")
GPU_FILES = ("dev/nvidia0", "dev/nvidiactl", "dev/dxg", "dev/kfd")
TPU_FILES = ("dev/accel0", "dev/vfio/0")
GOOGLE = "0x1ae0"  # PCI vendor id
NO_TPU = ("0x0042", "0x001f")  # Google's network card and disk, which machines without TPU have, too
SET_BY_JAX = ("TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH")
CPU_THREADS = ("PJRT_NPROC", "NPROC")  # number of XLA's threads for all CPU devices together; the first one set counts


def gpu_files(root: Path = ROOT) -> list[str]:
    """Device files of GPUs."""
    return [str(root / name) for name in GPU_FILES if (root / name).exists()]


def tpu_signs(environment: Mapping[str, str] = os.environ, root: Path = ROOT) -> list[str]:
    """Device files of TPUs, and environment variables that TPU hosts set."""
    files = [str(root / name) for name in TPU_FILES if (root / name).exists()]
    names = (name for name in environment if name.startswith(("TPU_", "MEGASCALE_")))
    return [*files, *_on_pci(root), *(name for name in names if name not in SET_BY_JAX)]


def simulate_devices(count: int, processes: int = 1) -> None:
    """Simulate `count` devices on the CPU; call it before anything else asks JAX for its devices.

    `import jax` may come before it, but not the first array. If JAX already runs with this many CPU devices, nothing
    happens. Each of several processes simulates an equal share. Raises ConfigError with both numbers if it is too late.
    """
    if count % processes:
        raise ConfigError(f"mesh.simulate={count} does not divide over {processes} processes; use a multiple of it")
    count //= processes
    import jax  # here, since accelerators are detected before JAX is imported

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
    """Make XLA start more threads than there are CPU devices; with fewer, some products are silently wrong.

    A device's program continues in whichever of these threads finished what it waited for, and that thread does not
    serve its queue meanwhile. Parallel loops and products put entries into the queue for threads without a program. If
    all threads run a program, the queue is full after 1,024 entries, and XLA runs further ones immediately. Within a
    large product Eigen (TensorContractionThreadPool.h) then packs a tile over one that was not multiplied yet: the
    first rows of the result lack a block of the sum. tests/product_behind_loops.py shows it with jaxlib 0.10.2 and
    0.12.0.
    """
    given = [os.environ[name] for name in CPU_THREADS if os.environ.get(name, "").isdecimal()]
    threads = int(given[0]) if given else _usable_cpus()
    os.environ[CPU_THREADS[0]] = str(max(threads, devices + 1))


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def leave_out_absent_tpu(root: Path = ROOT) -> None:
    """Keep JAX from initializing libtpu if it is installed but there is no TPU.

    Call it before the first array. Otherwise libtpu would take time and complain on stderr that there are no TPUs. If
    there is any sign of chips, or JAX_PLATFORMS asks for them, nothing is changed, so that errors are shown.
    """
    is_installed = importlib.util.find_spec("libtpu") is not None
    if os.environ.get("JAX_PLATFORMS") or not is_installed or gpu_files(root) or tpu_signs(root=root):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # JAX has already read the variable
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def unused_accelerators(platform: str, root: Path = ROOT) -> list[str]:
    """Warnings about accelerators of this machine that JAX, running on `platform`, has not found."""
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
            vendor, device = (at.read_text(encoding="utf-8").strip() for at in (file, file.with_name("device")))
        except OSError:
            continue
        if vendor == GOOGLE and device not in NO_TPU:
            yield str(file.parent)
