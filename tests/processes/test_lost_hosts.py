"""Copies of a run's newest step on the hosts, with processes in place of hosts: each has a folder of its own."""

import shutil
import signal

import pytest
from support.checkpoint_examples import rewrite
from support.process_examples import FAULTY, flags_of, launched
from support.run_examples import losses

from parallax.checkpoint.steps import complete_steps, read_manifest

STEPS = 14
MESH = {"mesh.pp": 1, "mesh.dp": 4, "mesh.tp": 1, "pipeline.microbatches": 1, "model.dropout": 0.0}
MESH |= {"train.steps": STEPS, "train.eval_batches": 0, "checkpoint.keep_best": 0, "checkpoint.every_steps": 100}
FATES = ["all there", "one lost", "one damaged", "both lost", "both have the other's", "other numbers", "another mesh"]


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The folder of a job that nothing stops."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with launched("train.py", *flags_of(corpus, **MESH), f"--workdir={folder}", devices=2) as job:
        assert job.end()[0] == 0
    return folder


def change_fingerprint(arrays):
    arrays[min(arrays)]["fingerprint"] ^= 1


@pytest.mark.slow
@pytest.mark.parametrize("fate", FATES)
def test_a_job_goes_on_from_its_hosts_and_a_lost_host_from_the_next_one(corpus, whole, tmp_path, fate):
    """Bit for bit as a job that nothing stops. Its own folder has no step yet."""
    run, host = tmp_path / "run", tmp_path / "host"
    local = {"checkpoint.local": str(host), "checkpoint.local_every_steps": 1}
    flags = [*flags_of(corpus, **MESH | local), f"--workdir={run}"]
    with launched(FAULTY, "die", "1", "12", *flags, devices=2) as job:
        status, text = job.end()
    assert status == 128 + signal.SIGKILL, text
    (copies,) = host.iterdir()
    folders = {
        (process, owner): copies / f"process-{process}" / f"of-{owner}" for process in (0, 1) for owner in (0, 1)
    }
    there = {place: complete_steps(folder) for place, folder in folders.items()}
    assert max(set.intersection(*there.values())) > 2
    lost = {"one lost": [1], "both lost": [0, 1]}.get(fate, [])
    for process in lost:
        shutil.rmtree(copies / f"process-{process}")
        there |= {(process, owner): set() for owner in (0, 1)}
    if fate == "one damaged":
        for manifest in folders[0, 0].glob("*/manifest.json"):
            manifest.write_text("{}")
        there[0, 0] = set()
    if fate in ("both have the other's", "other numbers"):
        for process in (0, 1):
            shutil.rmtree(folders[process, process])
            there[process, process] = set()
    # Of the newest step, the process that was killed may have kept less than the other one has of it.
    newest = max((there[0, 0] | there[1, 0]) & (there[0, 1] | there[1, 1]), default=0)
    lacking = [process for process in (0, 1) if newest not in there[process, process]]
    if fate == "other numbers":
        for place in [(0, 1), (1, 0)]:
            rewrite(folders[place], newest, lambda content: change_fingerprint(content["arrays"]["params"]))
            for step in there[place] - {newest}:
                shutil.rmtree(folders[place] / str(step))
    changes = ["--config.mesh.dp=2", "--config.mesh.tp=2"] if fate == "another mesh" else []
    with launched("train.py", *flags, *changes, devices=2) as job:
        status, text = job.end()
    assert status == 0, text
    assert ("is not what was saved" in text) == (fate == "other numbers"), text
    restored = fate not in ("both lost", "other numbers", "another mesh")
    assert (f"step {newest} is restored from checkpoint.local" in text) == restored, text
    assert ("it was saved on another mesh" in text) == (fate == "another mesh"), text
    names = ", ".join(map(str, lacking))
    said = f"process {names} has no copy of step {newest}, and gets the one of the next host"
    assert (said in text) == (restored and bool(lacking)), text
    assert ("gets the one of the next host" in text) == (restored and bool(lacking)), text
    if fate != "another mesh":
        here, there = (read_manifest(folder / "checkpoints", STEPS)["arrays"] for folder in (run, whole))
        assert here == there and losses(run) == losses(whole)
