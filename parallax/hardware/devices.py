"""Simulated CPU devices, and detection of this machine's accelerators, even if JAX does not find them."""

import contextlib
import ctypes
import importlib.util
import math
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from parallax.errors import ConfigError, first_line

if TYPE_CHECKING:
    import jax

ROOT = Path("/")
GPU_FILES = ("dev/nvidia0", "dev/nvidiactl", "dev/dxg", "dev/kfd")
TPU_FILES = ("dev/accel[0-9]*", "dev/vfio/[0-9]*")  # a container may have any of a host's
GOOGLE = "0x1ae0"  # PCI vendor id
NO_TPU = ("0x0042", "0x001f")  # Google's network card and disk, which machines without TPU have, too
SET_BY_JAX = ("TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH")
CPU_THREADS = ("PJRT_NPROC", "NPROC")  # number of XLA's threads for all CPU devices together; the first one set counts
TUNABLES = "GLIBC_TUNABLES"
# Parameters of glibc's mallopt by their numbers in malloc.h, the last two in bytes: M_ARENA_MAX, as many heaps as two
# cores have by default, so that more cores do not keep more; M_MMAP_MAX; M_TRIM_THRESHOLD; M_TOP_PAD, a heap's size.
KEEPING = {-8: 16, -4: 0, -1: 2**31 - 1, -2: 2**26}
XLA_FLAGS, EXTRA_OPTIONS = "XLA_FLAGS", "--xla_backend_extra_options"  # options for one backend, with commas between
COMPILE_OPTIONS = ("xla_cpu_disable_loop_unrolling", "xla_cpu_disable_tiled_emitter")


def gpu_files(root: Path = ROOT) -> list[str]:
    """Device files of GPUs."""
    return [str(root / name) for name in GPU_FILES if (root / name).exists()]


def tpu_files(root: Path = ROOT) -> list[str]:
    """Device files of TPUs."""
    return [str(file) for pattern in TPU_FILES for file in sorted(root.glob(pattern))]


def tpu_signs(environment: Mapping[str, str] = os.environ, root: Path = ROOT) -> list[str]:
    """Device files of TPUs, and environment variables that TPU hosts set."""
    names = (name for name in environment if name.startswith(("TPU_", "MEGASCALE_")))
    return [*tpu_files(root), *_on_pci(root), *(name for name in names if name not in SET_BY_JAX)]


def start_devices(root: Path = ROOT) -> "list[jax.Device]":
    """All devices of JAX, which starts them; ConfigError if JAX_PLATFORMS names one that is not here.

    Other errors of JAX, for example if another program holds the chips, are raised as they are: they may pass.
    """
    import jax  # here, since accelerators are detected before JAX is imported

    wanted = jax.config.jax_platforms or ""
    absent = [name for name in wanted.split(",") if not _may_be_here(name, root)]
    if "tpu" in absent:  # libtpu would print its own complaints, which cannot be turned off
        raise _not_here(wanted, "no sign of a TPU")
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for "cuda" without a GPU
        if not wanted or not absent:
            raise
        why = re.search(r"backend '.*?': (.*?)\.?( \(set JAX_PLATFORMS.*)?$", first_line(error))
        raise _not_here(wanted, why[1] if why else f"no sign of {absent[0]}") from error


def _may_be_here(platform: str, root: Path) -> bool:
    if platform in ("cuda", "rocm", "gpu"):
        return gpu_files(root) != []
    return platform == "cpu" or (platform == "tpu" and tpu_signs(root=root) != [])


def _not_here(wanted: str, why: str) -> ConfigError:
    return ConfigError(
        f"JAX_PLATFORMS={wanted!r}: this machine has no such devices ({why}); unset it, or use JAX_PLATFORMS=cpu"
    )


def simulate_devices(count: int, processes: int = 1) -> None:
    """Simulate `count` devices on the CPU; call it before anything else asks JAX for its devices.

    `import jax` may come before it, but not the first array. If JAX already runs with this many CPU devices, nothing
    happens. Each of several processes simulates an equal share. It sets PJRT_NPROC and XLA_FLAGS for XLA, and so for
    the programs that this one starts later, and has this process keep memory that it frees. Raises ConfigError with
    both numbers if it is too late.
    """
    if count % processes:
        raise ConfigError(f"mesh.simulate={count} does not divide over {processes} processes; use a multiple of it")
    count //= processes
    import jax  # here, since accelerators are detected before JAX is imported

    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
        keep_a_thread_free(count)
        compile_in_less_time()
        keep_freed_memory()
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
    first rows of the result lack a block of the sum. tests/hardware/product_behind_loops.py shows it with jaxlib 0.10.2
    and 0.12.0.
    """
    given = [os.environ[name] for name in CPU_THREADS if os.environ.get(name, "").isdecimal()]
    threads = int(given[0]) if given else usable_cpus()
    os.environ[CPU_THREADS[0]] = str(max(threads, devices + 1))


def compile_in_less_time() -> None:
    """Have XLA compile for CPUs without what gains a step nothing, unless XLA_FLAGS has options of the backend already.

    Loops are in vectors without being unrolled, too: the quickstart's step compiles in 8.6 in place of 10.3 CPU
    seconds. Without its emitter of tiled kernels it compiles in 0.92 of the time that this takes, and gives the same
    bits. Only jaxlib 0.10 has that option; others pass over it.
    """
    given = os.environ.get(XLA_FLAGS, "").strip()
    names_a_file = given and not given.startswith("-")
    if EXTRA_OPTIONS not in given and not names_a_file:
        os.environ[XLA_FLAGS] = f"{given} {EXTRA_OPTIONS}={','.join(COMPILE_OPTIONS)}".strip()


def keep_freed_memory() -> None:
    """Have glibc keep the memory that this process frees, unless MALLOC_* or GLIBC_TUNABLES in the environment say how
    to allocate.

    XLA allocates a program's temporaries anew in each run, and glibc returns large blocks to the system, which clears
    each page when it is next used: a sixth of a step of the quickstart. Blocks of more than 64 MiB do not fit into a
    thread's heap and are returned still. Only one heap for all threads would keep them, but small blocks then lie
    between large ones, and the process grows. Does nothing where the C library is not glibc.
    """
    given = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(TUNABLES, "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not given:
        for parameter, value in KEEPING.items():
            mallopt(parameter, value)


def usable_cpus(root: Path = ROOT) -> int:
    """Number of CPUs that this process may use: those of its affinity, and at most its container's share of time."""
    if hasattr(os, "process_cpu_count"):  # since Python 3.13
        count = os.process_cpu_count() or 1
    else:
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([count, *map(math.ceil, _cpu_quotas(root))]), 1)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Limits in CPUs, from the control groups of this process and all groups around them, of version 1 and 2."""
    try:
        groups = re.findall(r"^\d+:(.*?):/(.*)$", (root / "proc/self/cgroup").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:  # not Linux
        return
    for controllers, path in groups:
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # In a container its own group may be mounted as the top, while the path is that outside: it is not found then.
        for group in (top / path, *(top / parent for parent in Path(path).parents)):
            with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
                texts = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if controllers else ["cpu.max"]
                quota, period = " ".join((group / name).read_text(encoding="utf-8") for name in texts).split()
                if float(quota) > 0 and float(period) > 0:
                    yield float(quota) / float(period)


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
    files_of = [("GPU", gpu_files(root)), ("TPU", [name for name in tpu_signs({}, root) if "vfio" not in name])]
    if platform != "cpu" or wanted.startswith("cpu"):
        return []
    return [
        f"warning: this machine has a {kind} ({files[0]}), but JAX runs on its CPU; "
        "`python -c 'import jax; jax.devices()'` says why"
        for kind, files in files_of
        if files
    ]


def _on_pci(root: Path) -> Iterator[str]:
    for file in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        try:
            vendor, device = (each.read_text(encoding="utf-8").strip() for each in (file, file.with_name("device")))
        except OSError:
            continue
        if vendor == GOOGLE and device not in NO_TPU:
            yield str(file.parent)


def most_memory() -> int | None:
    """Peak bytes in use on any of this process's devices; None if the backend does not report it.

    Simulated devices share the process; for them it is the peak of the process.
    """
    import jax

    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        # Linux counts in KiB, macOS in bytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((peak for peak in peaks if peak is not None), default=None)


def device_memory() -> int | None:
    """Bytes of memory of a device; None if the backend does not report it. Simulated devices share the machine's."""
    import jax

    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")
