"""A run in a bucket that is killed ten times, and goes on on other meshes and by other numbers of processes."""

import os
import pathlib
import random
import re
import signal
import time

import numpy as np
import pytest
from support.faulty_store import SECRET
from support.process_examples import LONGEST_SECS, ROOT, Started, launched
from support.run_examples import as_flags, tiny_config

from parallax.checkpoint import steps
from parallax.errors import CheckpointError
from parallax.storage import files
from parallax.storage.buckets import BucketPath
from parallax.storage.run_files import read_metrics
from parallax.training.run import train

STEPS, KILLS, ON_ONE, IN_SAVES, DEVICES = 20, 10, 6, 4, 6
ONE = ({"mesh.pp": 1, "mesh.dp": 6, "mesh.tp": 1}, 1)  # a mesh, and by how many processes
OTHERS = (
    ({"mesh.pp": 1, "mesh.dp": 6, "mesh.tp": 1}, 2),
    ({"mesh.pp": 2, "mesh.dp": 3, "mesh.tp": 1}, 3),
)
SMALLEST = {
    **{"model.layers": 2, "model.d_model": 24, "model.d_ff": 48, "model.heads": 2},
    **{"model.d_head": 8, "model.d_latent": 12, "model.d_rope": 4},
    **{"data.source": "synthetic", "data.tokenizer": "bytes", "data.synthetic_tokens": 20_000},
    **{"data.seq": 24, "data.global_batch": 12, "train.steps": STEPS, "optimizer.warmup_steps": 2},
    **{"train.log_every_steps": 1, "train.eval_batches": 0, "sample.prompt": ""},
    **{"mesh.simulate": DEVICES, "pipeline.microbatches": 2, "distributed.heartbeat_secs": 600},
}
A_STEP = re.compile(r"step \d+/\d+ +loss")


def started(
    workdir: pathlib.Path | BucketPath, cache: pathlib.Path, mesh: dict, processes: int, every_steps: int = 1
) -> Started:
    """The quickstart at its smallest size."""
    flags = as_flags(SMALLEST | {"data.cache": str(cache), "checkpoint.every_steps": every_steps} | mesh)
    command = ["train.py", f"--config={ROOT / 'configs' / 'quickstart.py'}", *flags, f"--workdir={workdir}"]
    return launched(*command, processes=processes, devices=DEVICES // processes) if processes > 1 else Started(*command)


def wait_until(job: Started, condition) -> None:
    deadline = time.monotonic() + LONGEST_SECS
    while not condition():
        assert job.is_running, f"ended by itself:\n{job.text}"
        assert time.monotonic() < deadline, job.text
        time.sleep(0.1)


def kill(job: Started, folder: BucketPath, rng: random.Random, *, saving: bool) -> bool:
    """Kill one process of a job, or the only one; whether that was inside a save."""
    goal = newest(folder) + rng.choice([0, 1])
    wait_until(job, lambda: A_STEP.search(job.text) and newest(folder) >= goal)
    if saving:
        wait_until(job, lambda: steps.unfinished_saves(folder))
        time.sleep(rng.uniform(0, 0.2))
    else:
        time.sleep(rng.uniform(0, 2))
    assert job.is_running, job.text
    os.kill(rng.choice([*job.pids.values()] or [job.pid]), signal.SIGKILL)
    job.end()
    return bool(steps.unfinished_saves(folder))


def newest(folder: BucketPath) -> int:
    return max(steps.complete_steps(folder), default=0)


def losses(folder) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in read_metrics(folder / "metrics.jsonl") if "train/loss" in row}


def test_a_run_that_is_killed_in_a_save_goes_on_bit_for_bit(bucket, corpus, whole_run, monkeypatch, capfd):
    """And nothing that it has written or printed has a credential in it."""
    config = tiny_config(corpus, **{"checkpoint.every_steps": 2})
    write_manifest = steps.write_manifest

    def killed(folder, content, *known):
        if content["step"] == 4:
            raise KeyError("killed")
        write_manifest(folder, content, *known)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="cannot save step 4"):
        patch.setattr(steps, "write_manifest", killed)
        patch.setattr(steps, "remove_unfinished", lambda *_: None)
        train(config, str(bucket))
    assert steps.unfinished_saves(bucket / "checkpoints") and newest(bucket / "checkpoints") == 2
    assert train(config, str(bucket)).reason == "finished"
    assert losses(bucket) == losses(whole_run) and newest(bucket / "checkpoints") == 8
    assert not [path for path in files.files_below(bucket) if SECRET.encode() in files.read_bytes(path)]
    assert SECRET not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_kills_on_changing_meshes_lose_nothing(bucket, tmp_path):
    """Bitwise as a local run while the mesh is the same, and to rounding on others."""
    local, checkpoints = tmp_path / "local", bucket / "checkpoints"
    with started(local, tmp_path / "data", *ONE, every_steps=STEPS) as job:
        assert job.end()[0] == 0, job.text
    rng, in_saves, same = random.Random(0), 0, 0
    for number in range(1, KILLS + 1):
        mesh, processes = ONE if number <= ON_ONE else OTHERS[number % len(OTHERS)]
        with started(bucket, tmp_path / "data", mesh, processes) as job:
            hit = kill(job, checkpoints, rng, saving=number % 2 == 0)
        in_saves += hit
        done = newest(checkpoints)
        same = done if number <= ON_ONE else same
        by = f"{processes} process{'es' if processes > 1 else ''}"
        print(f"kill {number} on {mesh} by {by}: step {done} is there, {'in' if hit else 'out'}side a save", flush=True)
    with started(bucket, tmp_path / "data", *ONE) as job:
        status, text = job.end()
    assert status == 0 and f"finished: step {STEPS}" in text, text
    assert in_saves >= IN_SAVES and same > 1
    here, there = losses(bucket), losses(local)
    print(f"{in_saves} kills inside a save; steps 1 to {same} are bitwise those of the local run")
    print(f"largest relative difference {max(abs(here[step] / there[step] - 1) for step in there):.1e}")
    assert here.keys() == there.keys() and len(here) == STEPS
    assert all(here[step] == there[step] for step in range(1, same + 1))
    np.testing.assert_allclose([*here.values()], [*there.values()], rtol=1e-6)
