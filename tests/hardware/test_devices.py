"""Where libtpu is installed and no TPU is there, nobody hears of it; where a TPU may be, what goes wrong is shown."""

import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from parallax.errors import ConfigError
from parallax.hardware.devices import (
    compile_in_less_time,
    gpu_files,
    keep_a_thread_free,
    leave_out_absent_tpu,
    start_devices,
    tpu_signs,
    unused_accelerators,
    usable_cpus,
)

ROOT = pathlib.Path(__file__).parents[2]
LESS = "xla_cpu_disable_loop_unrolling,xla_cpu_disable_tiled_emitter"


def machine(folder, *files, **pci):
    """The files of a machine; of a device on PCI, vendor and device."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for name, (vendor, device) in pci.items():
        at = folder / "sys" / "bus" / "pci" / "devices" / name
        at.mkdir(parents=True)
        (at / "vendor").write_text(f"{vendor}\n")
        (at / "device").write_text(f"{device}\n")
    return folder


TPU = {"chip": ("0x1ae0", "0x0063")}
NONE = {"network": ("0x1ae0", "0x0042"), "other": ("0x8086", "0x1237")}


@pytest.mark.parametrize(
    ("files", "pci", "environment", "left_out"),
    [
        ([], {}, {}, True),
        ([], NONE, {"TPU_SKIP_MDS_QUERY": "1", "TPU_LIBRARY_PATH": "x"}, True),
        ([], TPU, {}, False),
        (["dev/accel0"], {}, {}, False),
        (["dev/vfio/0"], {}, {}, False),
        (["dev/accel3"], {}, {}, False),
        (["dev/vfio/12"], {}, {}, False),
        (["dev/vfio/vfio", "dev/accel/accel0"], {}, {}, True),  # of virtual machines, and of other makers
        (["dev/nvidia0"], {}, {}, False),
        ([], {}, {"TPU_WORKER_HOSTNAMES": "a,b"}, False),
        ([], {}, {"JAX_PLATFORMS": "tpu,cpu"}, False),
    ],
    ids=str,
)
def test_libtpu_is_left_out_only_where_nothing_says_that_there_is_a_chip(
    files, pci, environment, left_out, tmp_path, monkeypatch
):
    for name in [name for name in os.environ if name.startswith(("TPU_", "MEGASCALE_", "JAX_PLATFORMS"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "jax")  # whose platform stays what it is
    monkeypatch.setitem(sys.modules, "libtpu", SimpleNamespace(__spec__="installed"))
    root = machine(tmp_path, *files, **pci)
    before = os.environ.get("JAX_PLATFORMS")
    monkeypatch.setenv("JAX_PLATFORMS", before or "")
    leave_out_absent_tpu(root)
    assert os.environ["JAX_PLATFORMS"] == ("cpu" if left_out else before or "")
    monkeypatch.setenv("JAX_PLATFORMS", before or "")
    monkeypatch.setitem(sys.modules, "libtpu", None)
    leave_out_absent_tpu(root)
    assert os.environ["JAX_PLATFORMS"] == (before or "")


def test_an_accelerator_that_jax_has_not_found_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    root = machine(tmp_path, "dev/nvidia0", "dev/nvidiactl", **TPU, **NONE)
    assert gpu_files(root) == [f"{root}/dev/nvidia0", f"{root}/dev/nvidiactl"]
    assert tpu_signs({}, root) == [f"{root}/sys/bus/pci/devices/chip"]
    gpu, tpu = unused_accelerators("cpu", root)
    assert gpu.startswith(f"warning: this machine has a GPU ({root}/dev/nvidia0), but JAX runs on its CPU; ")
    assert tpu.startswith(f"warning: this machine has a TPU ({root}/sys/bus/pci/devices/chip), but JAX runs on its CPU")
    assert unused_accelerators("gpu", root) == [] == unused_accelerators("cpu", tmp_path / "empty")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert unused_accelerators("cpu", root) == []


@pytest.mark.skipif(gpu_files() != [] or tpu_signs() != [], reason="is about machines without accelerators")
def test_a_command_that_runs_on_the_cpu_says_nothing_of_tpus(tmp_path):
    """Where libtpu is not installed, it has nothing to say in any case."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_PLATFORMS")}
    code = "import sys, jax; from parallax.cli.command import run_command; "
    code += "sys.exit(run_command(lambda argv: print(jax.devices()[0].platform), ['x'], '', '', {}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu\n", "")


# ---- XLA's threads


@pytest.mark.slow
def test_products_behind_many_parallel_loops_are_right_on_as_many_devices_as_cores():
    environment = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"} | {"NPROC": "2"}
    run = [sys.executable, str(ROOT / "tests" / "hardware" / "product_behind_loops.py"), "parallax"]
    found = subprocess.run(run, capture_output=True, text=True, check=True, env=environment).stdout
    assert found == "[0, 0]\n" * 3


@pytest.mark.parametrize(("given", "threads"), [("2", "5"), ("9", "9"), ("many", "5")])
def test_xla_has_a_thread_more_than_devices_and_no_fewer_than_it_was_told(monkeypatch, given, threads):
    monkeypatch.setattr("parallax.hardware.devices.usable_cpus", lambda: 1)
    monkeypatch.setenv("PJRT_NPROC", given)
    monkeypatch.delenv("NPROC", raising=False)
    keep_a_thread_free(4)
    assert os.environ["PJRT_NPROC"] == threads


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("", f"--xla_backend_extra_options={LESS}"),
        ("--xla_a=1", f"--xla_a=1 --xla_backend_extra_options={LESS}"),
        ("--xla_backend_extra_options=mine", "--xla_backend_extra_options=mine"),
        ("/a/file/with/flags", "/a/file/with/flags"),
    ],
)
def test_xla_compiles_in_less_time_unless_the_user_has_options_of_the_backend(monkeypatch, given, flags):
    monkeypatch.setenv("XLA_FLAGS", given)
    compile_in_less_time()
    compile_in_less_time()
    assert os.environ["XLA_FLAGS"] == flags


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have another C library")
@pytest.mark.parametrize(("given", "is_kept"), [({}, True), ({"MALLOC_ARENA_TEST": "8"}, False)])
def test_temporaries_of_programs_keep_their_memory_unless_the_user_says_how_to_allocate(given, is_kept):
    """New pages in each of ten runs on two devices, as a share of the 41 MB of temporaries: the least of five times,
    since each thread that runs a program for the first time takes new pages."""
    program = """
import resource, jax
from parallax.hardware.devices import simulate_devices
simulate_devices(2)
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
multiplied = jax.pmap(lambda x: jax.numpy.sin(x @ x.T) @ x)
x = jax.numpy.ones((2, 3200, 8))
counts = []
for _ in range(5):
    before = faults()
    for _ in range(10):
        multiplied(x).block_until_ready()
    counts.append(faults() - before)
print(min(counts) * resource.getpagesize() / (10 * 2 * 3200**2 * 4))
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    run = [sys.executable, "-c", program]
    environment = clean | given | {"PYTHONPATH": str(ROOT)}
    share = float(subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout)
    assert share < 0.1 if is_kept else share > 0.9


@pytest.mark.slow
def test_xla_makes_less_code_of_a_loop_that_is_left_rolled(tmp_path):
    program = "simulate_devices(1); import jax; jax.jit(lambda x: x * x + 1).lower(jax.numpy.ones(4096)).compile()"
    sizes = []
    for folder, given in ((tmp_path / "rolled", ""), (tmp_path / "as_is", " --xla_backend_extra_options=xla_none")):
        environment = os.environ | {"XLA_FLAGS": f"--xla_dump_to={folder}{given}", "PYTHONPATH": str(ROOT)}
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        run = [sys.executable, "-c", f"from parallax.hardware.devices import simulate_devices; {program}"]
        subprocess.run(run, env=environment, check=True)
        sizes.append(sum(file.stat().st_size for file in folder.glob("*lambda*.o")))
    rolled, as_is = sizes
    assert 0 < rolled < as_is


# ---- devices that are not here


@pytest.mark.skipif(gpu_files() != [] or tpu_signs() != [], reason="is about machines without accelerators")
@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("platforms", "reason"),
    [
        ("nonsense", "Backend 'nonsense' is not in the list of known backends: "),
        ("cuda", "no sign of cuda"),
        ("tpu", "no sign of a TPU"),
        ("tpu,cpu", "no sign of a TPU"),
    ],
)
def test_a_platform_that_is_not_here_is_one_line_with_status_2(platforms, reason):
    """Of a command: none asks JAX for its devices in another way."""
    command = [sys.executable, "-m", "parallax.report", "--config=configs/tiny_gqa.py"]
    # Commands that plan for TPUs, which other tests run in this process, leave signs of one.
    here = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "MEGASCALE_"))}
    environment = here | {"JAX_PLATFORMS": platforms}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"ConfigError: JAX_PLATFORMS={platforms!r}: this machine has no such devices (")
    assert reason in done.stderr and done.stderr.endswith("; unset it, or use JAX_PLATFORMS=cpu\n")


def test_devices_that_are_here_and_do_not_start_are_no_wrong_setting(tmp_path, monkeypatch):
    """Another program may hold them, for a while."""

    def held():
        raise RuntimeError("Unable to initialize backend 'tpu': ABORTED: the TPU is already in use")

    monkeypatch.setattr(jax, "devices", held)
    monkeypatch.setattr(type(jax.config), "jax_platforms", "tpu", raising=False)
    with pytest.raises(RuntimeError, match="already in use") as raised:
        start_devices(machine(tmp_path, "dev/accel0"))
    assert not isinstance(raised.value, ConfigError)


# ---- CPUs that a process may use


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("no group", {}, 64),
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/box/job", {"cpu.max": "max 100000", "box/cpu.max": "400000 100000", "box/job/cpu.max": "max 100000"}, 4),
        ("0::/not/mounted", {"cpu.max": "50000 100000"}, 1),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ("4:cpu,cpuacct:/docker/7", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("9:cpuset:/\n4:cpu:/a\n0::/", {"cpu/a/cpu.cfs_quota_us": "800000", "cpu/a/cpu.cfs_period_us": "1000"}, 64),
    ],
    ids=str,
)
def test_the_cpus_of_a_container_are_those_of_its_quota(own, files, cpus, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "process_cpu_count", lambda: 64, raising=False)
    for name, text in {
        "proc/self/cgroup": own,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert usable_cpus(tmp_path) == cpus


def test_without_control_groups_the_affinity_counts(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "process_cpu_count", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 8}, raising=False)
    assert usable_cpus(tmp_path) == 3
