"""Several real processes train as one does, stop together, and none waits in silence for one that is gone."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from support.process_examples import FAULTY, ROOT, Started, flags_of, launched
from support.run_examples import losses, tiny_config

from parallax.checkpoint.steps import latest_step, read_manifest
from parallax.cli import launch
from parallax.storage.run_files import PROCESS_STEP_SECS, process_key, read_metrics
from parallax.training.run import train

MESH = {"mesh.pp": 1, "mesh.dp": 8, "mesh.tp": 1, "pipeline.microbatches": 1, "model.dropout": 0.0}
# What a process whose peer is gone may take to end.
SOON_SECS = 15
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, as IPv6 too


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """The losses of one process with eight devices."""
    folder = tmp_path_factory.mktemp("alone")
    train(tiny_config(corpus, **MESH), folder)
    return losses(folder)


def is_close(here, there):
    np.testing.assert_allclose(here, there, rtol=1e-6)
    return True


def test_two_processes_train_as_one_and_stop_together_and_one_goes_on(corpus, alone, tmp_path):
    tmp_path = tmp_path / "lr=[1e-3]" / "a\\b #1"  # what one process cannot save under, several cannot either
    command = ["train.py", *flags_of(corpus, **MESH), f"--workdir={tmp_path}"]
    with launched(*command) as job:
        job.wait_for("step 3/8")
        job.send(signal.SIGTERM)
        status, text = job.end()
    assert status == 0 and "stopped by SIGTERM: step" in text
    done = latest_step(tmp_path / "checkpoints")
    assert f"step {done} is on disk" in text
    assert 3 <= done < 8 and len(losses(tmp_path)) == done
    # Process 0 speaks for all; from another there are errors, and that it was asked to stop.
    zero, one = ({line[4:] for line in text.splitlines() if line.startswith(f"[{rank}] ")} for rank in (0, 1))
    assert not [line for line in zero & one if line and "SIGTERM" not in line], text
    assert len(zero) > 30 and not [line for line in one if re.match(r"\d\d:\d\d:\d\d ", line)], text
    # Each has written its own part of the arrays.
    parts = (tmp_path / "checkpoints" / str(done) / "params").glob("ocdbt.process_*")
    assert {path.name for path in parts} == {"ocdbt.process_0", "ocdbt.process_1"}
    # Here one process goes on; below, in the slow tests, two.
    train(tiny_config(corpus, **MESH), tmp_path)
    assert f"going on from step {done}" in (tmp_path / "log.txt").read_text()
    assert is_close(losses(tmp_path), alone)


@pytest.mark.slow
def test_two_processes_go_on_from_a_step_of_another_run(corpus, tmp_path):
    """Bitwise as the two processes that have saved it."""
    saving = MESH | {"checkpoint.every_steps": 2, "checkpoint.keep_last": 9}
    command = ["train.py", *flags_of(corpus, **saving)]
    source = f"--config.train.continue_from={tmp_path / 'there' / 'checkpoints' / '4'}"
    for words in ([f"--workdir={tmp_path / 'there'}"], [f"--workdir={tmp_path / 'here'}", source]):
        with launched(*command, *words) as job:
            status, text = job.end()
        assert status == 0, text
    here, there = (read_manifest(tmp_path / name / "checkpoints", 8)["arrays"] for name in ("here", "there"))
    assert here == there and losses(tmp_path / "here") == losses(tmp_path / "there")


@pytest.mark.slow
def test_when_a_process_is_killed_the_others_say_so_and_end(corpus, tmp_path):
    with launched(FAULTY, "die", "1", "6", *flags_of(corpus, **MESH), f"--workdir={tmp_path}") as job:
        job.wait_for("[launch] process 1 ended with SIGKILL")
        killed = time.monotonic()
        status, text = job.end()
    assert time.monotonic() - killed < SOON_SECS
    assert status == 128 + signal.SIGKILL and "[launch] process 0 ended with status 75" in text
    assert f"[0] LostError: process 1 on {socket.gethostname()} is gone: its connection was closed" in text
    assert "It was at 'step " in text and "this process was at 'step " in text
    assert "LostError: process 1" in (tmp_path / "log.txt").read_text()


def test_processes_with_different_configs_are_refused_with_both_values(corpus, tmp_path):
    text = refusal_of_two(corpus, tmp_path / "run", "config")
    expected = (
        "ConfigError: the processes disagree about config and code: "
        "optimizer.learning_rate is 0.003 in process 0, 0.5 in process 1"
    )
    assert f"[0] {expected}" in text and f"[1] {expected}" in text


def refusal_of_two(corpus, folder, difference):
    """What two processes say that are refused, since the second one has this difference."""
    with launched(FAULTY, difference, "1", "0", *flags_of(corpus, **MESH), f"--workdir={folder}") as job:
        status, text = job.end()
    assert status == 2 and not folder.exists(), text
    return text


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("JAX_DEFAULT_PRNG_IMPL=rbg", "jax_default_prng_impl is 'threefry2x32' in process 0, 'rbg' in process 1"),
        ("JAX_ENABLE_X64=1", "jax_enable_x64 is False in process 0, True in process 1"),
        ("XLA_FLAGS=--xla_cpu_enable_fast_math=true", "--xla_cpu_enable_fast_math is None in process 0, 'true' in"),
    ],
)
def test_processes_with_other_settings_of_jax_are_refused_with_both_values(corpus, tmp_path, variable, message):
    text = refusal_of_two(corpus, tmp_path / "run", variable)
    said = "ConfigError: the processes disagree about the settings of JAX: "
    assert all(f"[{rank}] {said}" in text for rank in (0, 1)) and message in text, text


@pytest.mark.slow
@pytest.mark.parametrize("difference", ["", "JAX_ENABLE_X64=1"])
def test_processes_that_jax_connects_compare_its_settings_too(corpus, tmp_path, difference):
    """As under Open MPI: JAX finds the others, and sends the address of its coordinator by a first program."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    job = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": f"4096.0;tcp://127.0.0.1:{port}"}
    flags = [*flags_of(corpus, **MESH), f"--workdir={tmp_path / 'run'}"]
    places = [{"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank} for rank in ("0", "1")]
    places[1] |= dict([difference.split("=")] if difference else [])
    own = [job | {"JAX_NUM_CPU_DEVICES": "4"} | place for place in places]
    with (
        Started("train.py", *flags, environment=own[0]) as zero,
        Started("train.py", *flags, environment=own[1]) as one,
    ):
        (status, text), (other, said) = zero.end(), one.end()
    if not difference:
        assert status == other == 0 and "finished: step 8" in text, text + said
        return
    expected = (
        "the processes disagree about the settings of JAX: jax_enable_x64 is False in process 0, True in process 1"
    )
    assert status == other == 2 and expected in text and expected in said, text + said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("data", "the processes disagree about the run: data manifest is '[0-9a-f]{12}' in process 0, 'other data' "),
        ("unshared", "the file of process 0 is 'there' in process 0, 'No such file or directory: "),
        ("code", "'an edited checkout' in process 1"),
        ("clock", "the clocks disagree: 2"),
    ],
)
def test_processes_with_other_data_code_clock_or_another_folder_are_refused(corpus, tmp_path, fault, message):
    assert re.search(message, text := refusal_of_two(corpus, tmp_path / "run", fault)), text


# ---- slow: more processes, and other ways to end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "processes"), [((4, 1, 1, 2), 2), ((2, 2, 1, 2), 4), ((2, 1, 4, 1), 4), ((1, 1, 4, 2), 8)], ids=str
)
def test_any_number_of_processes_has_the_losses_of_one(corpus, tmp_path, sizes, processes):
    """Processes have the same rows, rows of one of two groups, half of each row, and a quarter: with the context axis
    a process has pieces of rows where it has fewer devices than a row needs."""
    sizes = dict(zip(("mesh.pp", "mesh.dp", "mesh.cp", "mesh.tp"), sizes))
    mesh = sizes | {"pipeline.microbatches": 1, "model.layers": 4}
    with launched(
        "train.py", *flags_of(corpus, **mesh), f"--workdir={tmp_path}", processes=processes, devices=8 // processes
    ) as job:
        status, text = job.end()
    assert status == 0, text
    train(tiny_config(corpus, **mesh), tmp_path / "alone")
    assert is_close(losses(tmp_path), losses(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "counts", "bitwise"),
    [
        ({"mesh.dp": 2, "mesh.replica": 3}, (2, 3, 1), False),  # three terms are added up in another order
        ({"mesh.dp": 2}, (2, 1), True),  # the order of two is no other
    ],
    ids=["2 3 1", "2 1"],
)
def test_a_job_goes_on_with_another_number_of_processes(corpus, tmp_path, mesh, counts, bitwise):
    """Killed the first time and asked to stop after that; as with the first number when nothing stops it. Each load
    compares parameters and optimizer states with the fingerprints of what was saved."""
    devices, one = mesh["mesh.dp"] * mesh.get("mesh.replica", 1), {"mesh.pp": 1, "mesh.tp": 1}
    own = {"mesh.simulate": devices, "data.global_batch": 6, "train.steps": 28, "train.eval_batches": 0}
    flags = flags_of(corpus, **mesh, **one, **own, **{"pipeline.microbatches": 1})
    with launched("train.py", *flags, f"--workdir={tmp_path / 'whole'}", devices=devices // 2) as job:
        assert job.end()[0] == 0
    flags, steps = [*flags, f"--workdir={tmp_path / 'own'}"], tmp_path / "own" / "checkpoints"
    with launched(FAULTY, "die", "1", "20", *flags, devices=devices // 2) as job:
        assert job.end()[0] == 128 + signal.SIGKILL
    for count in counts[1:]:
        done = latest_step(steps)
        with launched("train.py", *flags, processes=count, devices=devices // count) as job:
            if count != counts[-1]:
                job.wait_for(f"step {done + 2}/28")
                job.send(signal.SIGTERM)
            status, text = job.end()
        assert status == 0 and f"going on from step {done}" in text and 0 < done < latest_step(steps), text
    here, whole = (losses(tmp_path / name) for name in ("own", "whole"))
    assert len(here) == 28 and is_close(here, whole)
    if bitwise:
        arrays = [read_manifest(tmp_path / name / "checkpoints", 28)["arrays"] for name in ("own", "whole")]
        assert here == whole and arrays[0] == arrays[1]


@pytest.fixture(scope="module")
def by_two(corpus, tmp_path_factory):
    """The losses of two processes that nothing stops."""
    folder = tmp_path_factory.mktemp("two")
    with launched("train.py", *flags_of(corpus, **MESH), f"--workdir={folder}") as job:
        status, text = job.end()
    assert status == 0, text
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("moment", ["die-starting", "die-saving"])
def test_after_a_kill_while_starting_or_saving_the_same_command_goes_on_bit_for_bit(
    corpus, by_two, tmp_path, moment, rank
):
    flags = [*flags_of(corpus, **MESH), "--config.distributed.start_secs=20", f"--workdir={tmp_path}"]
    with launched(FAULTY, moment, rank, "4", *flags, options=("--grace-secs", "40")) as job:
        job.wait_for("ended with SIGKILL")
        killed = time.monotonic()
        status, text = job.end()
    assert status == 128 + signal.SIGKILL and "LostError: " in text, text
    assert time.monotonic() - killed < 20 + SOON_SECS
    assert latest_step(tmp_path / "checkpoints") in (None, 4)
    with launched("train.py", *flags) as job:
        status, text = job.end()
    assert status == 0 and "finished: step 8" in text, text
    assert losses(tmp_path) == by_two


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "in_what"), [("slow-data", 1, "waiting for its data"), ("slow-host", 2, "on the host")]
)
def test_of_three_processes_the_slow_one_is_named_with_what_it_is_slow_in(corpus, tmp_path, fault, rank, in_what):
    mesh = {"mesh.pp": 1, "mesh.replica": 3, "mesh.dp": 1, "mesh.tp": 1, "pipeline.microbatches": 1}
    own = {"mesh.simulate": 3, "data.global_batch": 6, "train.steps": 25, "train.slow_process_steps": 10}
    own |= {"train.eval_batches": 0, "checkpoint.every_steps": 12}
    flags = [*flags_of(corpus, **mesh, **own), f"--workdir={tmp_path}"]
    with launched(FAULTY, fault, str(rank), "400", *flags, processes=3, devices=1) as job:
        status, text = job.end()
    assert status == 0, text
    said = r"process (\d) on (\S+) is slow: of \S+ s a step it spends \S+ s ([a-z ]+), the median is \S+ s \(steps"
    assert {*re.findall(said, text)} == {(str(rank), socket.gethostname(), in_what)}, text
    # All take as long, and the others wait; what is kept of each process says which one it is.
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if PROCESS_STEP_SECS in row]
    assert len(rows) > 15
    walls, spent = (np.mean([row[key] for row in rows], axis=0) for key in (PROCESS_STEP_SECS, process_key(fault[5:])))
    assert max(walls) < 1.2 * min(walls) and spent[rank] > max(0.1, 2 * (sum(spent) - spent[rank])), (walls, spent)
    for part in ("copy", "write"):  # Orbax says so, of every process
        assert np.all(np.sum([row[process_key(part)] for row in rows], axis=0) > 0)


@pytest.mark.slow
def test_a_step_that_stands_still_has_its_stacks_printed(corpus, tmp_path):
    with launched(
        FAULTY, "sleep", "1", "40", *flags_of(corpus, **MESH), "--config.train.steps=2000", f"--workdir={tmp_path}"
    ) as job:
        job.wait_for("(train.stall_factor=10); all threads:")
        job.wait_for("Thread MainThread:")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("fault", "error", "expected"), [("raise", "RuntimeError", 1), ("raise-data", "DataError", 5)])
def test_when_a_process_raises_the_others_name_its_error(corpus, tmp_path, rank, fault, error, expected):
    with launched(FAULTY, fault, str(rank), "4", *flags_of(corpus, **MESH), f"--workdir={tmp_path}") as job:
        job.wait_for(f"{error}: a fault that was put here")
        raised = time.monotonic()
        status, text = job.end()
    assert time.monotonic() - raised < SOON_SECS
    other = 5 if expected == 5 else 75
    assert status == expected and f"[launch] process {1 - rank} ended with status {other}" in text, text
    said = f"ended with status {expected}: {error}: a fault that was put here; this process was at"
    assert any(said in line for line in text.splitlines() if line.startswith(f"[{1 - rank}] LostError: ")), text


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1", "any"])
def test_when_a_process_loses_data_all_stop_saved_and_the_same_command_goes_on_bit_for_bit(
    corpus, by_two, tmp_path, rank
):
    flags = [*flags_of(corpus, **MESH), "--config.checkpoint.every_steps=0", f"--workdir={tmp_path}"]
    with launched(FAULTY, "raise-data", rank, "6", *flags) as job:
        status, text = job.end()
    assert status == 5 and all(f"[launch] process {each} ended with status 5" in text for each in (0, 1)), text
    error = "DataError: a fault that was put here"
    said = [line for line in text.splitlines() if error in line]
    own = [line for line in said if line.endswith(error)]  # before what the others say of it, or behind
    assert own and (rank == "any" or (own[0].startswith(f"[{rank}]") and len(said) == 2)), text
    saved, log = latest_step(tmp_path / "checkpoints"), (tmp_path / "log.txt").read_text()
    assert 0 < saved <= 6 and losses(tmp_path) == by_two[:saved]
    assert f"step {saved} is saved" in log and error in log
    with launched("train.py", *flags) as job:
        status, text = job.end()
    assert status == 0 and f"going on from step {saved}" in text and "finished: step 8" in text, text
    assert losses(tmp_path) == by_two


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_when_a_process_loses_text_held_out_the_step_before_the_evaluation_is_saved(corpus, by_two, tmp_path, rank):
    evaluates = ["--config.train.eval_every_steps=3", "--config.train.eval_batches=1"]
    flags = [*flags_of(corpus, **MESH), *evaluates, "--config.checkpoint.every_steps=0", f"--workdir={tmp_path}"]
    with launched(FAULTY, "raise-eval", rank, "0", *flags) as job:
        status, text = job.end()
    assert status == 5 and all(f"[launch] process {each} ended with status 5" in text for each in (0, 1)), text
    assert "DataError: a fault that was put here" in text, text
    assert f"DataError: process {rank} cannot read a batch of the evaluation; see its own error" in text, text
    assert latest_step(tmp_path / "checkpoints") == 3 and losses(tmp_path) == by_two[:3]
    assert "step 3 is saved" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_that_takes_too_long_names_who_is_missing_and_for_what(corpus, tmp_path, rank):
    with launched(
        FAULTY,
        "sleep",
        str(rank),
        "4",
        *flags_of(corpus, **MESH),
        "--config.distributed.wait_secs=4",
        f"--workdir={tmp_path}",
    ) as job:
        status, text = job.end()
    assert status == 75 and "waited 4 s (distributed.wait_secs) for 'step " in text
    for each in (0, 1):
        assert f"[launch] process {each} ended with status 75" in text and f"[{each}] LostError: " in text, text
    assert "Thread MainThread:" in text  # the stacks
    assert "start the same command again to resume from the last checkpoint" in text


@pytest.mark.slow
def test_a_process_alone_ends_too_where_a_wait_takes_too_long(corpus, tmp_path):
    limit = "--config.distributed.wait_secs=3"
    with Started(FAULTY, "sleep", "any", "4", *flags_of(corpus), limit, f"--workdir={tmp_path}") as run:
        status, text = run.end()
    said = r"LostError: waited 3 s \(distributed.wait_secs\) for 'step \d'; start the same command again to resume"
    assert status == 75 and re.search(said, text) and "Thread MainThread:" in text, text
    assert re.search(said, (tmp_path / "log.txt").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["late-connecting", "late-loading"])
def test_a_process_that_is_late_for_its_first_collective_is_waited_for(corpus, tmp_path, fault):
    """By more than the half minute for which Gloo waits."""
    with launched(FAULTY, fault, "1", "40", *flags_of(corpus, **MESH), f"--workdir={tmp_path}") as job:
        status, text = job.end()
    assert status == 0 and "finished: step 8" in text, text


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 8, 1)], ids=str)
def test_after_the_start_no_group_of_devices_is_new(corpus, tmp_path, sizes):
    """Not in a step, an evaluation, a check, a save, nor in a resumed run: each would be a first collective."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    mesh = dict(zip(("mesh.pp", "mesh.dp", "mesh.tp"), sizes)) | {"model.layers": 4, "pipeline.microbatches": 1}
    flags = [*flags_of(corpus, **mesh, **{"train.check_every": 3}), "--config.mesh.simulate=8"]
    place = {"PARALLAX_COORDINATOR": f"127.0.0.1:{port}", "PARALLAX_NUM_PROCESSES": "2"}
    for steps in (4, 8):
        command = [FAULTY, "say-connected", "0", "0", *flags, f"--config.train.steps={steps}", f"--workdir={tmp_path}"]
        places = [place | {"PARALLAX_PROCESS_ID": str(rank)} for rank in range(2)]
        with Started(*command, environment=places[0]) as first, Started(*command, environment=places[1]) as second:
            (status, text), (_, other) = first.end(), second.end()
        assert status == 0 and f"finished: step {steps}" in text, text + other
        before, after = text.split("all groups are connected")
        connected = r"Expected number of connected peer ranks is : [1-9]"  # a group of one device waits for nobody
        assert re.search(connected, before) and not re.search(connected, after), text


@pytest.mark.slow
def test_a_process_that_leaves_a_step_out_does_not_train_on_in_silence(corpus, tmp_path):
    """Its next step meets the others' last: sums are wrong, until one waits for a step that the other has had."""
    flags = [*flags_of(corpus, **MESH), "--config.distributed.wait_secs=6", "--config.checkpoint.every_steps=4"]
    with launched(FAULTY, "skip", "1", "3", *flags, f"--workdir={tmp_path}") as job:
        status, text = job.end()
    assert status == 75 and "waited 6 s (distributed.wait_secs) for" in text, text
    for each in (0, 1):
        assert f"[{each}] LostError: " in text, text
    assert latest_step(tmp_path / "checkpoints") is None  # what came of it was not saved


def listening(pid):
    """Addresses on which a process takes connections, as /proc has them."""
    links = [os.readlink(path) for path in pathlib.Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    tables = [pathlib.Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in own}


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/net/tcp").exists(), reason="sockets are read from Linux's /proc")
def test_the_coordinator_of_one_machine_listens_to_that_machine_alone(corpus, tmp_path):
    with launched("train.py", *flags_of(corpus, **MESH), "--config.train.steps=2000", f"--workdir={tmp_path}") as job:
        job.wait_for("step 2/2000")
        assert set() < listening(job.pids[0]) <= LOOPBACK


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_stands_still_is_lost_after_its_heartbeat(corpus, tmp_path, rank):
    flags = [*flags_of(corpus, **MESH), "--config.distributed.heartbeat_secs=4", "--config.train.steps=2000"]
    with launched("train.py", *flags, f"--workdir={tmp_path}", options=("--grace-secs", "5")) as job:
        job.wait_for("step 3/2000")
        os.kill(job.pids[rank], signal.SIGSTOP)
        stopped = time.monotonic()
        job.wait_for("it has said nothing for 4 s (distributed.heartbeat_secs)")
        assert time.monotonic() - stopped < SOON_SECS
        status, text = job.end()
    assert status == 75 and f"ending process {rank} by SIGTERM" in text
    assert f"[{1 - rank}] LostError: process {rank} " in text


@pytest.mark.slow
def test_when_process_0_is_killed_the_others_end_too(corpus, tmp_path):
    with launched("train.py", *flags_of(corpus, **MESH), "--config.train.steps=2000", f"--workdir={tmp_path}") as job:
        job.wait_for("step 3/2000")
        os.kill(job.pids[0], signal.SIGKILL)
        killed = time.monotonic()
        status, text = job.end()
    assert time.monotonic() - killed < SOON_SECS and status == 128 + signal.SIGKILL
    assert "[1] LostError: process 0 is gone: its connection was closed" in text


@pytest.mark.slow
def test_sigterm_while_compiling_saves_the_first_step(corpus, tmp_path):
    before = 0
    for _ in ("fresh", "resumed"):
        flags = [*flags_of(corpus, **MESH), "--config.train.steps=2000", f"--workdir={tmp_path}"]
        with launched("train.py", *flags) as job:
            job.wait_for("tokens a step;")  # the last that is said before the first step
            job.send(signal.SIGTERM)
            status, text = job.end()
        assert status == 0 and "stopped by SIGTERM: step" in text, text
        done = latest_step(tmp_path / "checkpoints")
        assert before < done <= before + 3
        before = done


@pytest.mark.slow
def test_a_second_signal_ends_all_processes_at_once(corpus, tmp_path):
    with launched("train.py", *flags_of(corpus, **MESH), "--config.train.steps=2000", f"--workdir={tmp_path}") as job:
        job.wait_for("tokens a step;")
        for rank in (0, 1):
            os.kill(job.pids[rank], signal.SIGTERM)
            job.wait_for(f"[{rank}] SIGTERM: stopping after this step")
        job.send(signal.SIGTERM)
        sent = time.monotonic()
        status, _ = job.end()
    assert status == 75 and time.monotonic() - sent < SOON_SECS


@pytest.mark.slow
def test_the_end_of_max_runtime_stops_all_processes_after_one_step(corpus, tmp_path):
    flags = [*flags_of(corpus, **MESH), "--config.train.steps=20000", "--max-runtime=20s", "--stopped-status=75"]
    with launched("train.py", *flags, f"--workdir={tmp_path}") as job:
        status, text = job.end()
    assert status == 75 and "stopped by --max-runtime: step" in text
    assert all(f"[launch] process {rank} ended with status 75" in text for rank in (0, 1)) and "LostError" not in text
    assert latest_step(tmp_path / "checkpoints") == len(losses(tmp_path))


@pytest.mark.slow
def test_a_missing_process_is_named(corpus, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    place = {"PARALLAX_COORDINATOR": f"127.0.0.1:{port}", "PARALLAX_NUM_PROCESSES": "3", "PARALLAX_PROCESS_ID": "0"}
    flags = [*flags_of(corpus), "--config.distributed.start_secs=3", "--config.mesh.simulate=3"]
    with Started("train.py", *flags, f"--workdir={tmp_path}", environment=place) as process:
        status, text = process.end()
    assert status == 75
    assert text == "LostError: 1 of 3 processes are there after 3 s (distributed.start_secs); missing: 1, 2\n"


@pytest.mark.slow
@pytest.mark.parametrize("silent", [False, True])
def test_a_coordinator_that_does_not_answer_is_named(corpus, tmp_path, silent):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if not silent:
            listener.close()
        flags = [*flags_of(corpus), "--config.distributed.start_secs=3", "--config.mesh.simulate=2"]
        place = [f"--distributed.coordinator=127.0.0.1:{port}", "--distributed.num-processes=2"]
        with Started("train.py", *flags, *place, "--distributed.process-id=1", f"--workdir={tmp_path}") as process:
            begun = time.monotonic()
            status, text = process.end()
    assert status == 75 and time.monotonic() - begun < 30 and len(text.splitlines()) == 1
    words = "process 0 does not answer" if silent else f"process 0 has not answered at 127.0.0.1:{port} for 3 s"
    assert words in text and "(distributed.start_secs)" in text


@pytest.mark.slow
def test_a_port_that_is_in_use_is_named(corpus, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        flags = [*flags_of(corpus), "--config.distributed.start_secs=5", f"--workdir={tmp_path}"]
        place = [f"--distributed.coordinator=127.0.0.1:{port}", "--distributed.num-processes=2"]
        with Started("train.py", *flags, *place, "--distributed.process-id=0") as process:
            status, text = process.end()
    assert status == 2
    expected = f"cannot listen on port {port} for distributed.coordinator=127.0.0.1:{port} (Address already in use)"
    assert f"ConfigError: {expected}" in text


@pytest.mark.slow
def test_slurm_is_detected_by_jax(corpus, tmp_path):
    """The variables that srun sets for two tasks on this machine, and no flag of ours."""
    job = str(os.getpid())
    slurm = {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    command = ["train.py", *flags_of(corpus, **MESH), "--config.mesh.simulate=8", f"--workdir={tmp_path}"]
    tasks = [{**slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    with Started(*command, environment=tasks[0]) as first, Started(*command, environment=tasks[1]) as second:
        (status, text), (other_status, other_text) = first.end(), second.end()
    assert status == other_status == 0 and "finished: step 8" in text, text + other_text
    assert "finished" not in other_text


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_task_of_slurm_that_is_missing_ends_the_other_with_75(corpus, tmp_path, rank):
    """JAX's own limit, at which it aborts, comes later."""
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    slurm |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    flags = [*flags_of(corpus, **MESH), "--config.mesh.simulate=8", "--config.distributed.start_secs=5"]
    with Started("train.py", *flags, f"--workdir={tmp_path}", environment=slurm) as process:
        status, text = process.end()
    assert status == 75 and "waited 5 s (distributed.start_secs) for 'JAX to connect the processes'" in text


# ---- the launcher


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0", "--", "train.py"], "'0' is not a whole number from 1 to 99999"),
        (["--processes", "2", "--devices-per-process", "x", "--", "train.py"], "'x' is not a whole number"),
        (["--processes", "2"], "nothing to start; write it last, as in `-- train.py"),
        (["--processes", "2", "--", "trian.py"], f"'trian.py' is not a Python file in {ROOT}; write one"),
        (["--", "train.py"], "the following arguments are required: --processes"),
    ],
)
def test_the_launcher_refuses_what_it_cannot_start(arguments, message, capsys):
    from parallax.cli import launch

    assert launch.main(arguments) == 2 and message in capsys.readouterr().err


def test_the_launcher_names_the_module_where_there_is_no_train_py(tmp_path, monkeypatch, capsys):
    from parallax.cli import launch

    monkeypatch.chdir(tmp_path)
    assert launch.main(["--processes", "2", "--", "train.py"]) == 2
    said = capsys.readouterr().err
    assert (
        f"'train.py' is not a Python file in {tmp_path}; write one after --, or a module, as -m parallax.train" in said
    )


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0,1", "2,3"]),
        ("4,5,6,7", ["4,5", "6,7"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d,GPU-e", ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
    ],
)
def test_the_launcher_divides_the_gpus_that_it_may_see(monkeypatch, visible, expected):
    from parallax.cli import launch

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    parsed = launch.parser().parse_args(["--processes", "2", "--gpus-per-process", "2", "--", "x.py"])
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    environments = [launch.environment_of(parsed, rank) for rank in range(2)]
    assert [own["CUDA_VISIBLE_DEVICES"] for own in environments] == expected
    for own in environments:
        assert own["NCCL_DEBUG"] == "WARN"
        assert own["XLA_FLAGS"] == f"--xla_gpu_nccl_termination_timeout_seconds={launch.NCCL_SECS} --xla_dump_to=x"


@pytest.mark.parametrize("visible", ["", "0,1,2"])
def test_the_launcher_refuses_too_few_gpus(monkeypatch, capsys, visible):
    from parallax.cli import launch

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launch.main(["--processes", "2", "--gpus-per-process", "2", "--", "train.py"]) == 2
    count = len([gpu for gpu in visible.split(",") if gpu])
    assert f"CUDA_VISIBLE_DEVICES={visible!r} names {count} GPUs, and --processes 2 with" in capsys.readouterr().err


CHILDREN = """
import os, signal, sys, time
rank = os.environ["PARALLAX_PROCESS_ID"]
print("rank", rank, "of", os.environ["PARALLAX_NUM_PROCESSES"], os.environ.get("JAX_NUM_CPU_DEVICES"))
if rank == "1":
    sys.exit(9)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("no newline at the end", end="", flush=True)
time.sleep(600)
"""


def test_the_launcher_ends_all_when_one_ends_with_the_status_of_the_first_that_failed(tmp_path):
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    with launched(str(script), processes=3, devices=2, options=("--grace-secs", "1")) as job:
        status, text = job.end()
    assert status == 9 and {"[0] rank 0 of 3 2", "[1] rank 1 of 3 2", "[2] rank 2 of 3 2"} <= set(text.splitlines())
    assert "[launch] process 1 ended with status 9\n" in text and "ending process 0, 2 by SIGTERM" in text
    assert "[2] no newline at the end\n" in text


@pytest.mark.parametrize(
    ("ended", "made_to_end", "status"),
    [
        ({1: 75, 0: 1}, {}, 1),  # process 0 goes last
        ({0: 75, 1: -6}, {}, 75),
        ({1: -6, 0: 75}, {}, 134),
        ({2: -9, 0: 75, 1: -6}, {}, 137),
        ({0: 75, 1: -9}, {1}, 75),
        ({0: 0, 1: -15}, {1}, 143),
        ({0: 0, 1: 0}, {}, 0),
    ],
    ids=str,
)
def test_the_status_of_a_job_is_that_of_the_first_that_failed_by_itself(ended, made_to_end, status):
    assert launch.status_of(ended, made_to_end) == status


def test_the_launcher_goes_on_where_nobody_reads_its_output(tmp_path):
    script = tmp_path / "children.py"
    script.write_text("import pathlib, sys, time\nfor _ in range(9): print('line'); time.sleep(0.1)\nsys.exit(7)")
    command = [sys.executable, "-m", "parallax.launch", "--processes", "2", "--", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as launcher:
        launcher.stdout.readline()
        launcher.stdout.close()
        said = launcher.stderr.read()
        assert launcher.wait(timeout=60) == 7 and "process 1 ended with status 7" in said, said


HANGS_UP = """
import signal, sys, time
ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
if not ignored:
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(9))
print("ready")
time.sleep(2 if ignored else 600)
"""
NOHUP = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.parametrize(("nohup", "status"), [(False, 9), (True, 0)])
def test_a_closed_terminal_reaches_the_processes_unless_nohup_has_it_ignored(tmp_path, nohup, status):
    script = tmp_path / "children.py"
    script.write_text(HANGS_UP)
    launcher = ["-m", "parallax.launch", "--processes", "2", "--", str(script)]
    with Started(*(["-c", NOHUP, "-u"] if nohup else []), *launcher) as job:
        for rank in (0, 1):
            job.wait_for(f"[{rank}] ready")
        job.send(signal.SIGHUP)
        assert job.end()[0] == status


def test_no_process_outlives_the_launcher(tmp_path):
    script = tmp_path / "children.py"
    script.write_text("import time; print('ready', flush=True); time.sleep(600)")
    with launched(str(script)) as job:
        job.wait_for("[0] ready")
        job.wait_for("[1] ready")
        pids = job.pids.values()
        job.send(signal.SIGKILL)
        job.end()
        deadline = time.monotonic() + 10
        while any(is_running(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
