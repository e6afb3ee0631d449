"""What checkpoints cost, as ratios within one run: python benchmarks/checkpoints.py

Steps of a state cut over 2·2·2 simulated devices are timed without saves, and with an asynchronous save every few
steps; the disk's own speed is that of one file of as many bytes, written and flushed. The numbers are random, so that
nothing is gained by compression.
"""

import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.checkpoint import CheckpointConfig, Checkpoints, restore
from parallax.checkpoint.fingerprint import fingerprints
from parallax.mesh import MeshConfig, make_mesh, simulate_devices

ARRAYS, SHAPE = 12, (8, 1024, 640)  # 12 of 20 MiB
STEPS, EVERY = 48, 12
BLOCK_BYTES = 1 << 22


def make_state(mesh) -> dict[str, jax.Array]:
    """Arrays of random numbers, cut over all axes."""
    rng, cut = np.random.default_rng(0), NamedSharding(mesh, P("pp", "dp", "tp"))
    return {f"w{at}": jax.device_put(rng.normal(size=SHAPE).astype(np.float32), cut) for at in range(ARRAYS)}


def step(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Some arithmetic on every element, for about a second on two cores."""
    return jax.lax.fori_loop(0, 4, lambda _, tree: jax.tree.map(lambda x: jnp.sin(x) * 1.01 + x * 1e-3, tree), state)


def timed_steps(
    state, compiled, checkpoints: Checkpoints | None
) -> tuple[dict[str, jax.Array], list[float], list[float]]:
    """Seconds of each step with its check, and of each call of save."""
    steps, saves = [], []
    for done in range(1, STEPS + 1):
        began = time.perf_counter()
        state = jax.block_until_ready(compiled(state))
        if checkpoints is not None:
            checkpoints.check()
        steps.append(time.perf_counter() - began)
        if checkpoints is not None and done % EVERY == 0:
            began = time.perf_counter()
            checkpoints.save(done, {"params": state})
            saves.append(time.perf_counter() - began)
    return state, steps, saves


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
    """MB/s of a save that is waited for, and of a load, fingerprints and checksums included."""
    size = sum(x.nbytes for x in state.values())
    config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    with Checkpoints(folder, config, settings={}) as checkpoints:
        began = time.perf_counter()
        checkpoints.save(1, {"params": state})
        checkpoints.wait()
        saving = time.perf_counter() - began
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    began = time.perf_counter()
    jax.block_until_ready(restore(folder, 1, {"params": wanted}))
    return size / saving / 1e6, size / (time.perf_counter() - began) / 1e6


def main() -> None:
    simulate_devices(8)
    state = make_state(make_mesh(MeshConfig(pp=2, dp=2, tp=2, simulate=0)))
    size = sum(x.nbytes for x in state.values())
    compiled = jax.jit(step, donate_argnums=0)
    state = compiled(state)
    fingerprints(state)
    folder = pathlib.Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    try:
        began = time.perf_counter()
        fingerprints(state)
        marks = time.perf_counter() - began
        state, plain, _ = timed_steps(state, compiled, None)
        config = CheckpointConfig(every_steps=EVERY, keep_last=1, keep_best=0)
        with Checkpoints(folder / "run", config, settings={}) as checkpoints:
            state, steps, saves = timed_steps(state, compiled, checkpoints)
        whole, base = sum(steps) + sum(saves), sum(plain)
        disk = disk_speed(folder, size)
        saving, loading = saved_and_loaded(folder / "once", state)
    finally:
        shutil.rmtree(folder)
    print(f"state {size / 1e6:.0f} MB, {STEPS} steps of {statistics.median(plain):.2f} s, a save every {EVERY}")
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
    main()
