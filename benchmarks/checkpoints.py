"""Cost of checkpoints, as ratios within one run.

    python benchmarks/checkpoints.py [FOLDER] [--steps 48] [--every 12] [--arrays 12]
    python benchmarks/checkpoints.py [FOLDER] --sizes 6,24,96 [--bucket s3://bucket/folder] [--local /dev/shm/bench]
    python -m parallax.launch --processes 3 --devices-per-process 1 -- benchmarks/checkpoints.py [FOLDER] --meanwhile

Steps of a state sharded over 2·2·2 simulated devices are timed without saves, and with an asynchronous save every few
steps; the disk's own speed is that of one file of as many bytes, written and flushed. The numbers are random, so that
they cannot be compressed. FOLDER is on the measured disk; by default it is the folder of temporary files.

With --sizes, numbers of arrays of 20 MiB, it prints for each size and place the seconds for which a save stops the
steps, those until it is on disk, and those of a restore with its memory: the most that the process had while it ran,
without the state and without what it had before. A local copy of one process has no neighbour's.

With --meanwhile it prints what steps take while a save is written, in one process or in those of a job: each step sums
a number over all of them, and FOLDER, or the --bucket, is shared by all.
"""

import functools
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from arguments import Arguments, run_benchmark, whole_number

from parallax.cli.arguments import local_path
from parallax.errors import ConfigError

SHAPE = (8, 1008, 650)  # 20 MiB, to be cut over 1, 2, 3 or 4 processes
BLOCK_BYTES = 1 << 22


def make_state(mesh, arrays: int) -> dict[str, Any]:
    """Arrays of random numbers, sharded over all axes."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    rng, cut = np.random.default_rng(0), NamedSharding(mesh, P("pp", "dp", "tp"))
    return {f"w{at}": jax.device_put(rng.normal(size=SHAPE).astype(np.float32), cut) for at in range(arrays)}


def step(state: dict[str, Any]) -> dict[str, Any]:
    """Some arithmetic on every element, for about a second on two cores."""
    import jax
    import jax.numpy as jnp

    return jax.lax.fori_loop(0, 4, lambda _, tree: jax.tree.map(lambda x: jnp.sin(x) * 1.01 + x * 1e-3, tree), state)


def timed_steps(
    state: dict[str, Any], compiled: Any, args: Any, checkpoints: Any = None, on_disk: Sequence[int] = ()
) -> tuple[dict[str, Any], list[float], list[float], list[float]]:
    """Seconds of each step with its check and a wait for the save before, of each call of save, and of those steps that
    began and ended while a save was written; `on_disk` has the steps of which the writer has said that they are."""
    import jax

    steps, saves, meanwhile = [], [], []
    for done in range(1, args.steps + 1):
        began = time.perf_counter()
        state = jax.block_until_ready(compiled(state))
        if checkpoints is not None:
            checkpoints.check()
        steps.append(time.perf_counter() - began)
        if len(saves) > len(on_disk):
            meanwhile.append(steps[-1])
        if checkpoints is not None and done % args.every == 0:
            steps[-1] += timed(checkpoints.wait)[0]  # for the save before, if there are too few steps between the two
            saves.append(timed(functools.partial(checkpoints.save, done, {"params": state}))[0])
    return state, steps, saves, meanwhile


def disk_speed(folder: pathlib.Path, size: int) -> float:
    """MB/s of one file of random bytes, flushed to the disk."""
    block = np.random.default_rng(0).bytes(BLOCK_BYTES)
    began = time.perf_counter()
    with (folder / "plain").open("wb") as file:
        for _ in range(size // BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    speed = size / (time.perf_counter() - began) / 1e6
    (folder / "plain").unlink()
    return speed


def saved_and_loaded(folder: pathlib.Path, state) -> tuple[float, float]:
    """MB/s of a save, including the wait for it, and of a load, including fingerprints and checksums."""
    import jax

    from parallax.checkpoint.restore import restore
    from parallax.checkpoint.save import CheckpointWriter
    from parallax.config.sections import CheckpointConfig

    size = sum(x.nbytes for x in state.values())
    config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    with CheckpointWriter(folder, config, settings={}) as checkpoints:
        began = time.perf_counter()
        checkpoints.save(1, {"params": state})
        checkpoints.wait()
        saving = time.perf_counter() - began
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    began = time.perf_counter()
    jax.block_until_ready(restore(folder, 1, {"params": wanted}))
    return size / saving / 1e6, size / (time.perf_counter() - began) / 1e6


def memory_bytes(key: str) -> int:
    """A line of what Linux says of this process's memory."""
    lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def timed(act: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result


def time_place(name: str, folder: Any, state: Any) -> str:
    """A row of the table: a save and a restore of a state in one place."""
    import jax

    from parallax.checkpoint.local import LocalCopies
    from parallax.checkpoint.restore import restore_newest
    from parallax.checkpoint.save import CheckpointWriter
    from parallax.config.sections import CheckpointConfig

    size, trees = sum(x.nbytes for x in state.values()), {"params": state}
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trees)
    if name == "local copy":
        copies = LocalCopies(folder, settings={})
        copies.begin(0, trees)
        stopped, _ = timed(lambda: copies.save(1, trees))
        written, _ = timed(copies.close)
        restore = lambda: copies.restore_newest(wanted, after=0, why_not=lambda step, settings: "")  # noqa: E731
    else:
        config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
        with CheckpointWriter(folder, config, settings={}) as checkpoints:
            stopped, _ = timed(lambda: checkpoints.save(1, trees))
            written, _ = timed(checkpoints.wait)
        restore = lambda: restore_newest(folder, wanted)  # noqa: E731
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins again
    before = memory_bytes("VmRSS")
    loading, restored = timed(lambda: jax.block_until_ready(restore().trees))
    beside = memory_bytes("VmHWM") - before - size
    del restored
    rate = size / 1e6
    return (
        f"{name:10} {size / 1e9:6.2f} GB  {stopped:6.2f} s  {written:6.2f} s {rate / (stopped + written):5.0f} MB/s"
        f"  {loading:6.2f} s {rate / loading:5.0f} MB/s  {beside / 1e9:5.2f} GB"
    )


def time_places(args: Any, folder: pathlib.Path) -> None:
    """Print the table of --sizes."""
    from parallax.config.sections import MeshConfig
    from parallax.hardware.devices import simulate_devices
    from parallax.sharding.mesh import make_mesh
    from parallax.storage import files
    from parallax.storage.buckets import path_of

    simulate_devices(8)
    mesh = make_mesh(MeshConfig(pp=2, dp=2, tp=2, simulate=0))
    print("place        state     stopped    until it is on disk    restored              beside")
    for arrays in args.sizes:
        state = make_state(mesh, arrays)
        places = {"disk": folder / "run", "local copy": (args.local or folder) / f"{folder.name}-host"}
        bucket = {"bucket": path_of(f"{args.bucket}/{folder.name}")} if args.bucket else {}
        for name, place in (places | bucket).items():
            print(time_place(name, place, state), flush=True)
            files.remove(place)


def step_of_all(state: dict[str, Any]) -> dict[str, Any]:
    """Some arithmetic on every element, and a sum over all devices."""
    import jax
    import jax.numpy as jnp

    mean = sum(jnp.mean(x) for x in state.values()) / len(state)
    return jax.tree.map(lambda x: jnp.sin(x) * 1.01 + mean * 1e-3, state)


def time_meanwhile(args: Any, folder: pathlib.Path) -> None:
    """Print the figures of --meanwhile."""
    import jax

    from parallax.checkpoint.save import CheckpointWriter
    from parallax.config.sections import CheckpointConfig, DistributedConfig, MeshConfig
    from parallax.processes import job
    from parallax.processes.address import read_address
    from parallax.sharding.mesh import make_mesh
    from parallax.storage import files
    from parallax.storage.buckets import path_of

    if address := read_address({}):
        job.join(address, DistributedConfig(), simulate=0)
    mesh = make_mesh(MeshConfig(pp=1, dp=jax.device_count(), tp=1, simulate=0))
    job.connect_devices(mesh)
    place = path_of(job.broadcast("the folder", f"{args.bucket or folder}/{folder.name}"))  # of its own: it is removed
    state, compiled = make_state(mesh, args.arrays), jax.jit(step_of_all, donate_argnums=0)
    state, plain, *_ = timed_steps(compiled(state), compiled, args)
    on_disk: list[int] = []
    config = CheckpointConfig(every_steps=args.every, keep_last=1, keep_best=0)
    with CheckpointWriter(place, config, settings={}, on_disk=lambda step, secs: on_disk.append(step)) as checkpoints:
        checkpoints.save(0, {"params": state})  # compiles the fingerprints
        checkpoints.wait()
        on_disk.clear()
        state, steps, saves, meanwhile = timed_steps(state, compiled, args, checkpoints, on_disk)
    job.barrier("all is measured")
    if job.is_first():
        files.remove(place)
        lost = (sum(steps) + sum(saves) - sum(plain)) / len(saves)
        print_meanwhile(sum(x.nbytes for x in state.values()), plain, saves, meanwhile, lost)


def print_meanwhile(
    size: int, plain: Sequence[float], saves: Sequence[float], meanwhile: Sequence[float], lost: float
) -> None:
    import jax

    alone, call, each = (statistics.median(secs or [0.0]) for secs in (plain, saves, meanwhile))
    print(f"{jax.process_count()} processes, a state of {size / 1e9:.2f} GB, steps of {alone:.3f} s")
    print(f"call of save     {call:6.3f} s = {call / alone:.2f} steps")
    followed = max(len(saves) - 1, 1)  # after the last save there are no more steps
    print(f"steps meanwhile  {each:6.3f} s = {each / alone:.2f} steps, {len(meanwhile) / followed:.1f} a save")
    print(f"lost to a save   {lost:6.3f} s = {lost / alone:.2f} steps")


def sizes_of(text: str) -> list[int]:
    return [whole_number(word) for word in text.split(",")]


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"steps": 2, "every": 1, "arrays": 1})
    parser.add_argument("folder", type=local_path, nargs="?", help="where files are written; they are removed again")
    parser.add_argument("--steps", type=whole_number, default=48)
    parser.add_argument("--every", type=whole_number, default=12, help="steps between two saves")
    parser.add_argument("--arrays", type=whole_number, default=12, help="of 20 MiB each")
    parser.add_argument("--sizes", type=sizes_of, help="numbers of arrays, as 6,24,96: time each place")
    parser.add_argument("--bucket", help="with --sizes or --meanwhile: a folder in a bucket")
    parser.add_argument("--local", type=local_path, help="with --sizes: where the local copy is")
    parser.add_argument("--meanwhile", action="store_true", help="time steps while a save is written")
    args = parser.parse_args()
    if args.every > args.steps:
        raise ConfigError(f"--every={args.every} is more than --steps={args.steps}: nothing would be saved")
    if args.folder and not args.folder.is_dir():
        raise ConfigError(f"{str(args.folder)!r} is not a folder; name one on the disk to measure")
    folder = pathlib.Path(tempfile.mkdtemp(dir=args.folder))
    try:
        (time_places if args.sizes else time_meanwhile if args.meanwhile else measure)(args, folder)
    finally:
        shutil.rmtree(folder)


def measure(args: Any, folder: pathlib.Path) -> None:
    import jax

    from parallax.checkpoint.fingerprint import fingerprints
    from parallax.checkpoint.save import CheckpointWriter
    from parallax.config.sections import CheckpointConfig, MeshConfig
    from parallax.hardware.devices import simulate_devices
    from parallax.sharding.mesh import make_mesh

    simulate_devices(8)
    state = make_state(make_mesh(MeshConfig(pp=2, dp=2, tp=2, simulate=0)), args.arrays)
    size = sum(x.nbytes for x in state.values())
    compiled = jax.jit(step, donate_argnums=0)
    state = compiled(state)
    fingerprints(state)
    began = time.perf_counter()
    fingerprints(state)
    marks = time.perf_counter() - began
    state, plain, *_ = timed_steps(state, compiled, args)
    config = CheckpointConfig(every_steps=args.every, keep_last=1, keep_best=0)
    with CheckpointWriter(folder / "run", config, settings={}) as checkpoints:
        state, steps, saves, _ = timed_steps(state, compiled, args, checkpoints)
    whole, base = sum(steps) + sum(saves), sum(plain)
    disk = disk_speed(folder, size)
    saving, loading = saved_and_loaded(folder / "once", state)
    print(
        f"state {size / 1e6:.0f} MB, {args.steps} steps of {statistics.median(plain):.2f} s, a save every {args.every}"
    )
    for name, secs in (
        ("call of save", statistics.median(saves)),
        ("  fingerprints", marks),
        ("lost to a save", (whole - base) / len(saves)),
    ):
        print(f"{name:20} {secs:6.2f} s = {secs / statistics.median(plain):.2f} steps")
    print(f"lost over all steps  {(whole - base) / base:6.1%}")
    print(f"disk, one file       {disk:6.0f} MB/s")
    print(f"save and wait        {saving:6.0f} MB/s = {saving / disk:.2f} of the disk")
    print(f"load and check       {loading:6.0f} MB/s = {loading / disk:.2f} of the disk's writing")


if __name__ == "__main__":
    run_benchmark(main)
