"""Copies of a run's newest step on the hosts, with processes in place of hosts: each has a folder of its own."""

import shutil
import signal

import pytest
from support.process_examples import FAULTY, flags_of, launched
from support.run_examples import losses

from parallax.checkpoint.steps import complete_steps, read_manifest

STEPS = 14
MESH = {"mesh.pp": 1, "mesh.dp": 4, "mesh.tp": 1, "pipeline.microbatches": 1, "model.dropout": 0.0}
MESH |= {"train.steps": STEPS, "train.eval_batches": 0, "checkpoint.keep_best": 0, "checkpoint.every_steps": 100}


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The folder of a job that nothing stops."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with launched("train.py", *flags_of(corpus, **MESH), f"--workdir={folder}", devices=2) as job:
        assert job.end()[0] == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["all there", "one lost", "one damaged", "both lost", "another mesh"])
def test_a_job_goes_on_from_its_hosts_and_a_lost_host_from_the_next_one(corpus, whole, tmp_path, fate):
    """Bit for bit as a job that nothing stops. Its own folder has no step yet."""
    run, host = tmp_path / "run", tmp_path / "host"
    local = {"checkpoint.local": str(host), "checkpoint.local_every_steps": 1}
    flags = [*flags_of(corpus, **MESH | local), f"--workdir={run}"]
    with launched(FAULTY, "die", "1", "12", *flags, devices=2) as job:
        status, text = job.end()
    assert status == 128 + signal.SIGKILL, text
    (copies,) = host.iterdir()
    folders = [copies / f"process-{process}" / f"of-{owner}" for process in (0, 1) for owner in (0, 1)]
    newest = max(set.intersection(*map(complete_steps, folders)))
    assert newest > 2
    if fate in ("one lost", "both lost"):
        shutil.rmtree(copies / "process-1")
    if fate == "both lost":
        shutil.rmtree(copies / "process-0")
    if fate == "one damaged":
        for manifest in folders[0].glob("*/manifest.json"):
            manifest.write_text("{}")
    changes = ["--config.mesh.dp=2", "--config.mesh.tp=2"] if fate == "another mesh" else []
    with launched("train.py", *flags, *changes, devices=2) as job:
        status, text = job.end()
    assert status == 0, text
    restored = fate not in ("both lost", "another mesh")
    assert (f"step {newest} is restored from checkpoint.local" in text) == restored, text
    assert ("it was saved on another mesh" in text) == (fate == "another mesh"), text
    lacking = {"one lost": "process 1", "one damaged": "process 0"}.get(fate, "process")
    said = f"{lacking} has no copy of step {newest}, and gets the one of the next host"
    assert (said in text) == (lacking != "process"), text
    if fate != "another mesh":
        here, there = (read_manifest(folder / "checkpoints", STEPS)["arrays"] for folder in (run, whole))
        assert here == there and losses(run) == losses(whole)
