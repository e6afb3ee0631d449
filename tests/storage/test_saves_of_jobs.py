"""Saves of jobs of several processes, on a disk and in a bucket: beside the steps, before a preempted host ends, and
loaded by more or fewer processes."""

import os
import re
import signal
import time

import pytest
from support.process_examples import FAULTY, flags_of, launched
from support.run_examples import at_step, losses, stop_at, tiny_config

from parallax.checkpoint import steps
from parallax.training.run import train

PLACES = ("disk", "bucket")
MESH = {"mesh.pp": 1, "mesh.dp": 4, "mesh.tp": 1, "mesh.simulate": 4, "pipeline.microbatches": 1, "model.dropout": 0.0}
MESH |= {"data.global_batch": 12, "train.eval_batches": 0, "checkpoint.keep_best": 0}
THREE = MESH | {"mesh.dp": 2, "mesh.replica": 3, "mesh.simulate": 6}


@pytest.fixture(params=PLACES)
def place(request, tmp_path):
    """The folder of a run."""
    return tmp_path / "run" if request.param == "disk" else request.getfixturevalue("bucket")


def job_in(place, corpus, *changes, fault=(), processes=2, mesh=MESH, **keys):
    """A job of so many processes; `fault` as `faulty_train.py` has it."""
    command = [*((FAULTY, *map(str, fault)) if fault else ("train.py",)), *flags_of(corpus, **mesh, **keys), *changes]
    return launched(*command, f"--workdir={place}", processes=processes, devices=mesh["mesh.simulate"] // processes)


# ---- beside the steps


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_steps_go_on_while_all_processes_save(corpus, place, processes):
    """Process 0 ends the save of step 4 only when it has taken step 7, which needs the steps of all others."""
    mesh = THREE if processes == 3 else MESH
    with job_in(place, corpus, fault=("hold-saving", 0, 4), processes=processes, mesh=mesh) as job:
        status, text = job.end()
    assert status == 0, text
    assert text.index("step 7/8") < text.index("step 4 is on disk") < text.index("step 8 is on disk"), text
    assert steps.check_steps(place / "checkpoints").valid == [8, 4]


# ---- before a preempted host ends


@pytest.mark.fast(1)
@pytest.mark.parametrize(("limit_secs", "is_late"), [(1, True), (30, False)])
def test_a_deadline_is_kept_or_said_to_be_too_short_after_the_first_save(
    corpus, tmp_path, monkeypatch, capsys, limit_secs, is_late
):
    """The first save ends, on a disk that is slow where it is late, before the signal."""
    config = tiny_config(corpus, **{"checkpoint.every_steps": 3, "checkpoint.deadline_secs": limit_secs})
    write_manifest = steps.write_manifest
    monkeypatch.setattr(steps, "write_manifest", lambda *args: time.sleep(1.2 * is_late) or write_manifest(*args))

    def saved():
        until = time.monotonic() + 60
        while 3 not in steps.complete_steps(tmp_path / "checkpoints"):
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.3)  # its thread ends

    at_step(monkeypatch, 4, saved)
    stop_at(monkeypatch, 5)
    outcome = train(config, tmp_path)
    said = capsys.readouterr().out
    assert outcome.reason == "stopped" and steps.latest_step(tmp_path / "checkpoints") == outcome.step
    too_short = r"step 3 is on disk, \S+ s after its save began: checkpoint.deadline_secs=1 is too short"
    assert bool(re.search(too_short, said)) == is_late and "step 3 is on disk" in said, said
    at_the_end = rf"a save takes .* left of checkpoint.deadline_secs={limit_secs}: if step {outcome.step} is not whole"
    assert bool(re.search(at_the_end, said)) == is_late, said


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_preempted_job_has_saved_before_its_hosts_end(corpus, place, processes):
    """In 30 s, as of a TPU's spot machine."""
    keys = {"train.steps": 2000, "checkpoint.every_steps": 4, "checkpoint.deadline_secs": 30}
    with job_in(place, corpus, processes=processes, **keys) as job:
        job.wait_for("step 4 is on disk")
        job.send(signal.SIGTERM)
        sent = time.monotonic()
        status, text = job.end()
    assert status == 0 and time.monotonic() - sent < 30, text
    (done,) = re.findall(r"stopped by SIGTERM: step (\d+) is saved", text)
    assert steps.latest_step(place / "checkpoints") == int(done) == len(losses(place))
    assert "too short" not in text and "are left of checkpoint.deadline_secs" not in text


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_hosts_that_end_inside_the_last_save_leave_the_step_before_it(corpus, place, processes):
    """The run says so: each save takes four seconds more than there are. The same command then loses no step twice."""
    keys = {"train.steps": 40, "checkpoint.every_steps": 10, "checkpoint.deadline_secs": 1}
    with job_in(place, corpus, fault=("slow-saving", 0, 5000), processes=processes, **keys) as job:
        job.wait_for("checkpoint.deadline_secs=1 is too short")
        job.send(signal.SIGTERM)
        job.wait_for("are left of checkpoint.deadline_secs=1: if step")
        time.sleep(1)
        for pid in job.pids.values():
            os.kill(pid, signal.SIGKILL)
        status, text = job.end()
    assert status == 128 + signal.SIGKILL, text
    done = steps.latest_step(place / "checkpoints")
    assert done % 10 == 0 and 10 <= done < 40 and steps.check_steps(place / "checkpoints").damaged == {}
    with job_in(place, corpus, processes=processes, **keys) as job:
        status, text = job.end()
    assert status == 0 and f"going on from step {done}" in text and "removed an unfinished save" in text, text
    assert len(losses(place)) == 40


# ---- by more or fewer processes


@pytest.fixture(scope="module")
def unstopped(corpus, tmp_path_factory):
    """The losses of one process that nothing stops."""
    folder = tmp_path_factory.mktemp("unstopped")
    with job_in(folder, corpus, processes=1) as job:
        assert job.end()[0] == 0, job.text
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_half_and_twice_the_hosts_go_on_with_the_same_data_and_optimizer(corpus, place, unstopped, before, after):
    """What is loaded has the fingerprints of what was saved: else the command ends with 3. Losses may differ by the
    order in which sums between processes are added up."""
    keys = {"checkpoint.every_steps": 2}
    with job_in(place, corpus, fault=("slow-host", 0, 700), processes=before, **keys) as job:
        job.wait_for("step 2 is on disk")
        os.kill(job.pids[0], signal.SIGKILL)
        assert job.end()[0] == 128 + signal.SIGKILL, job.text
    done = steps.latest_step(place / "checkpoints")
    with job_in(place, corpus, processes=after, **keys) as job:
        status, text = job.end()
    assert status == 0 and 2 <= done < 8 and f"going on from step {done}" in text, text
    assert losses(place) == pytest.approx(unstopped, rel=1e-6)
