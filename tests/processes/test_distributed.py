"""What processes say to each other, with threads in place of processes: who is missing, who differs, who is late."""

import errno
import functools
import json
import re
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.relay import DOWN, UP, Relay
from support.stand_ins import ClientStandIn

from parallax.config.sections import DistributedConfig
from parallax.errors import ConfigError, LostError
from parallax.processes import gloo
from parallax.processes import job as job_module
from parallax.processes.address import ProcessAddress, read_address
from parallax.processes.client import CoordinatorClient
from parallax.processes.coordinator import Coordinator
from parallax.processes.exit import exit_now
from parallax.processes.job import listen, started_by_scheduler
from parallax.training.watchdog import Watchdog

PLACE = {"distributed.coordinator": "10.0.0.2:8476", "distributed.num-processes": "4", "distributed.process-id": "3"}


# ---- places


def test_a_place_comes_from_flags_or_else_from_the_environment():
    assert read_address(PLACE, {}) == ProcessAddress("10.0.0.2", 8476, 4, 3, "")
    own = {"PARALLAX_COORDINATOR": "localhost:1", "PARALLAX_NUM_PROCESSES": "2", "PARALLAX_PROCESS_ID": "0"}
    assert read_address({}, own) == ProcessAddress("localhost", 1, 2, 0, "") and read_address({}, own).is_loopback
    assert read_address(PLACE | {"distributed.process-id": None}, own).process == 0
    assert read_address({name: None for name in PLACE}, {}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distributed.coordinator": None}, "=4, .*=3 without --distributed.coordinator (or PARALLAX_COORDINATOR)"),
        (
            {"distributed.coordinator": "host"},
            "'host' is not an address; write host:port of process 0, as in 10.0.0.2:8476",
        ),
        ({"distributed.coordinator": "host:99999"}, "'host:99999' is not an address"),
        ({"distributed.num-processes": "0"}, "--distributed.num-processes='0' must be a whole number of 1 or more"),
        ({"distributed.process-id": "-1"}, "--distributed.process-id='-1' must be a whole number of 0 or more"),
        ({"distributed.process-id": "4"}, "--distributed.process-id=4 is not one of 4 processes; use 0 to 3"),
    ],
)
def test_places_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message).replace(r"\.\*", ".*")):
        read_address(PLACE | changes, {})


@pytest.fixture
def scheduled(monkeypatch):
    """By the environment Open MPI has started two processes, of which this is the second; JAX stays as it is."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(job_module, "needs_detour", lambda: False)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            ValueError("coordinator_address should be defined."),
            ConfigError,
            "JAX cannot tell which process of the job this is (coordinator_address should be defined.); "
            "set PARALLAX_COORDINATOR, PARALLAX_NUM_PROCESSES, PARALLAX_PROCESS_ID",
        ),
        (RuntimeError("no route\nto it"), LostError, "JAX could not connect the processes: no route"),
    ],
)
def test_where_jax_finds_no_cluster_a_restart_does_not_help(monkeypatch, scheduled, error, kind, message):
    """Open MPI 5 says how many processes there are, and not what JAX needs to know."""

    def initialize(**_):
        raise error

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(kind, match=re.escape(message)):
        job_module.join(None, DistributedConfig(1, 1, 1, 1, 1, 1), simulate=0)


def test_all_that_jax_does_to_connect_has_a_limit(monkeypatch, scheduled, exits, second_of_two):
    """The collective after the connection too; JAX's own limit, at which it aborts, lies behind ours."""
    limits = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: limits.update(given))

    def wait_in_vain(_):
        while not exits:
            time.sleep(0.02)
        raise TimeoutError

    monkeypatch.setattr("jax.experimental.multihost_utils.broadcast_one_to_all", wait_in_vain)
    with pytest.raises(TimeoutError):
        job_module.join(None, DistributedConfig(1, 1, 1, 1, 1, 1), simulate=0)
    assert exits == [75] and limits["initialization_timeout"] > 1 and limits["num_processes"] == 2


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_an_error_of_ours(text):
    try:
        place = read_address(PLACE | {"distributed.coordinator": text}, {})
        assert place.host and 0 < place.port < 65536
    except ConfigError as error:
        assert repr(text) in str(error)


def test_schedulers_count_only_where_they_have_started_the_process():
    assert started_by_scheduler({"SLURM_NTASKS": "4"}) == 1  # in the batch script
    mpi = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}
    assert started_by_scheduler(mpi) == 3
    # salloc -n 4 with an interactive step of one task, and what is started in it.
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n1"}
    assert started_by_scheduler({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", **step}) == 1
    assert started_by_scheduler({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2", **step}) == 2
    assert started_by_scheduler({"SLURM_NTASKS": "4", **step}) == 4
    assert started_by_scheduler({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", **step, **mpi}) == 3


def test_limits_below_a_second_are_refused():
    with pytest.raises(ConfigError, match="distributed.wait_secs=0 is too short; use a number of seconds of 1 or more"):
        DistributedConfig(1, 1, 0, 1, 1, 1)


# ---- collectives of old jaxlibs


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("groups", [None, [[0, 2, 4, 6], [1, 3, 5, 7]]])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_detour_is_a_reduce_scatter(tiled, groups, dim):
    ranks = len(groups[0]) if groups else 8
    shape = [3, 3]
    shape[dim] = 2 * ranks if tiled else ranks
    x = np.random.default_rng(0).integers(0, 100, (8, *shape)).astype(np.float32)
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    options = dict(scatter_dimension=dim, axis_index_groups=groups, tiled=tiled)

    def both(x):
        around = gloo.reduce_scatter_by_exchange(x[0], axis_name="i", axis_size=ranks, **options)
        return around[None], jax.lax.psum_scatter(x[0], "i", **options)[None]

    spec = jax.sharding.PartitionSpec("i")
    around, straight = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    assert np.array_equal(around, straight) and around.any()


def test_the_detour_is_taken_in_what_is_compiled_for_cpu():
    """In a process of its own: it holds for all that is compiled after it."""
    program = """
import jax
from parallax.processes.gloo import avoid_reduce_scatter
avoid_reduce_scatter()
jax.config.update("jax_num_cpu_devices", 2)
auto = (jax.sharding.AxisType.Auto,)
mesh, spec = jax.make_mesh((2,), ("i",), axis_types=auto), jax.sharding.PartitionSpec("i")
act = jax.shard_map(lambda x: jax.lax.psum_scatter(x, "i", tiled=True), mesh=mesh, in_specs=spec, out_specs=spec)
text = jax.jit(act).lower(jax.numpy.ones(8)).as_text()
assert "all_to_all" in text and "reduce_scatter" not in text, text
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- joining


def test_jax_has_no_public_barriers_or_messages_between_processes():
    """Ours are to go when it has them."""
    assert {name for name in dir(jax.distributed) if name[0] != "_"} == {"initialize", "is_initialized", "shutdown"}


LIMITS = {}  # of each client


@pytest.fixture(autouse=True)
def all_leave(monkeypatch):
    """Nobody is left to be lost, which would end the process of the tests once the patches are undone."""
    yield
    at_once(*(functools.partial(client.leave, 0, "") for client in LIMITS))
    LIMITS.clear()


class Job:
    """A coordinator, and clients that connect to it from threads of this process, each over a network of its own."""

    def __init__(self, processes, *, start_secs=20.0, heartbeat_secs=20.0):
        self.processes = processes
        self.limits = SimpleNamespace(start_secs=start_secs, heartbeat_secs=heartbeat_secs, clock_secs=60.0)
        self.limits.wait_secs = self.limits.compile_secs = 20
        listener = listen("127.0.0.1", 0)
        self.address = listener.getsockname()
        self.coordinator = Coordinator(listener, processes, "token", self.limits)
        self.networks = {}

    def join(self, rank, /, **changes):
        hello = {"rank": rank, "processes": self.processes, "token": "token", "host": f"host{rank}"} | changes
        network = self.networks[rank] = Relay(self.address)
        limits = SimpleNamespace(**vars(self.limits))
        client = CoordinatorClient(network.address, hello, limits, None if rank else self.coordinator)
        LIMITS[client] = limits
        return client

    def join_all(self, *ranks, **changes):
        return at_once(*(functools.partial(self.join, rank, **changes) for rank in ranks))


def at_once(*acts):
    """What each of them returns or raises, run side by side."""
    results = [None] * len(acts)

    def run(number, act):
        try:
            results[number] = act()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.fixture
def ended(exits, monkeypatch):
    """Instead of ending, a process notes its status."""
    monkeypatch.setattr("parallax.processes.client.GRACE_SECS", 0.1)
    return exits


def set_phase(client, phase, secs):
    """From now on this process is in a phase that has this limit."""
    LIMITS[client].wait_secs = secs
    client.set_phase(phase, "wait_secs")


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_hear_the_values_of_the_first_and_each_difference():
    first, second, third = Job(3).join_all(0, 1, 2)
    values = [{"lr": 1, "seed": 0}, {"lr": 2, "seed": 0}, {"lr": 1, "seed": 0, "more": True}]
    waits = [
        functools.partial(client.barrier, "config", value, "wait_secs")
        for client, value in zip((first, second, third), values)
    ]
    answers = at_once(*waits)
    assert all(answer["values"] == values[0] for answer in answers)
    assert answers[2]["differences"] == [["lr", 1, 1, 2], ["more", None, 2, True]]


def test_a_thread_waits_for_all_beside_the_barriers_of_the_main_thread():
    first, second = Job(2).join_all(0, 1)
    first.set_phase("step 8", "wait_secs")
    saved = threading.Thread(target=first.barrier_in_thread, args=("step 7 is stored",), daemon=True)
    saved.start()
    at_once(*(functools.partial(client.barrier, "step", {}, "wait_secs") for client in (first, second)))
    assert saved.is_alive() and first.phase == "step 8"
    second.barrier_in_thread("step 7 is stored")
    saved.join(20)
    assert not saved.is_alive()


def test_differences_are_refused_with_both_values(in_job):
    in_job(ClientStandIn(differences=[["mesh.tp", 2, 3, 4]], more=7))
    expected = r"disagree about config: mesh.tp is 2 in process 0, 4 in process 3 \(and 7 more\)"
    with pytest.raises(ConfigError, match=expected):
        job_module.check_equal("config", {"mesh.tp": 2})


def test_who_is_missing_at_the_start_is_named():
    (first, third) = Job(4, start_secs=0.5).join_all(0, 2)
    assert isinstance(first, LostError) and str(first) == str(third)
    assert str(first) == "2 of 4 processes are there after 0 s (distributed.start_secs); missing: 1, 3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "distributed.process-id=0 was given twice: on host0 and on host1"),
        ({"processes": 3}, "distributed.num-processes is 2 in process 0, 3 in process 1"),
        ({"token": "guessed"}, "this coordinator port belongs to another job; give each job its own port"),
    ],
)
def test_who_does_not_belong_is_refused(changes, message):
    job = Job(2, start_secs=1.0)
    first, second = at_once(functools.partial(job.join, 0), lambda: time.sleep(0.3) or job.join(1, **changes))
    assert isinstance(second, ConfigError) and message in str(second)
    # To a stranger the job owes nothing: it goes on waiting for its own.
    assert isinstance(first, LostError if "token" in changes else ConfigError)


def test_clocks_that_differ_are_refused_with_both_times():
    job = Job(1)
    hello = {"rank": 0, "processes": 1, "token": "token", "host": "host0", "clock": 1e9}
    with socket.create_connection(job.address) as other:
        other.sendall(json.dumps(hello).encode() + b"\n")
        refused = json.loads(other.makefile("rb").readline())
    assert refused["status"] == 2 and refused["refused"].startswith("the clocks disagree: 20")
    assert refused["refused"].endswith(
        "UTC in process 0, 2001-09-09 01:46:40 UTC in process 0 on host0, "
        "more than distributed.clock_secs=60 allows; set the clocks"
    )


def test_a_stranger_who_talks_nonsense_does_no_harm():
    job = Job(1)
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b"x" * (1 << 21), b'{"rank": "x", "token": "token"}\n'):
        with socket.create_connection(job.address) as stranger:
            try:
                stranger.sendall(nonsense)
            except OSError:
                continue
    assert isinstance(job.join(0), CoordinatorClient)


# ---- ending


def test_a_lost_process_ends_the_others_with_75(ended, capsys):
    job = Job(3)
    clients = job.join_all(0, 1, 2)
    for client in clients:
        set_phase(client, "step 7", 20)
    at_once(*(functools.partial(client.barrier, "all", {}, "compile_secs") for client in clients))
    job.networks[1].cut()
    wait_until(lambda: len(ended) >= 3)
    assert set(ended) == {75}
    # What it was last heard to do: its report of the step after the barrier may be cut off.
    message = (
        "process 1 on host1 is gone: its connection was closed. It was at '(step 7|all)'; this process was at 'step 7'"
    )
    assert re.search(message, capsys.readouterr().err)


def test_a_process_that_says_nothing_is_lost(ended, capsys):
    job = Job(2, heartbeat_secs=1.0)
    first, second = job.join_all(0, 1)
    job.networks[1].hold(UP, DOWN)
    wait_until(lambda: len(ended) >= 2)  # it hears nothing, either
    assert (
        "process 1 on host1 is gone: it has said nothing for 1 s (distributed.heartbeat_secs)"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_process_0_is_lost_too_when_it_says_nothing(ended, capsys):
    """It answers nothing, as where its host has vanished."""
    job = Job(2, heartbeat_secs=1.0)
    _, second = job.join_all(0, 1)
    set_phase(second, "step 7", 20)
    time.sleep(2)
    assert ended == []
    job.networks[1].hold(DOWN)
    wait_until(lambda: ended)
    said = capsys.readouterr().err
    assert ended == [75] and "process 0 is gone: it has said nothing for 1 s (distributed.heartbeat_secs)" in said


@pytest.mark.slow
def test_a_phase_has_behind_a_barrier_what_it_had_left_of_its_limit(ended, capsys):
    first, second = Job(2).join_all(0, 1)
    for client in (first, second):
        set_phase(client, "step 3", 1.5)
    wait = functools.partial(first.barrier, "the folder", {}, "compile_secs")
    begun = time.monotonic()
    set_phase(second, "a slow disk", 20)
    at_once(wait, lambda: time.sleep(2) or second.barrier("the folder", {}, "compile_secs"))
    assert ended == []
    wait_until(lambda: len(ended) >= 2)
    assert time.monotonic() - begun > 3
    said = "waited 2 s (distributed.wait_secs) for 'step 3'; missing: process 1 (at 'a slow disk' for"
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_where_process_0_does_not_say_who_is_late_it_is_late_itself(ended, capsys):
    job = Job(2)
    _, second = job.join_all(0, 1)
    job.networks[1].hold(DOWN)
    set_phase(second, "step 3", 0.5)
    wait_until(lambda: len(ended) >= 2)
    assert "waited 0 s (distributed.wait_secs) for 'step 3'; process 0 does not answer" in capsys.readouterr().err


@pytest.mark.fast(1)
@pytest.mark.parametrize(("status", "expected"), [(5, 5), (1, 75)])
def test_an_error_of_one_process_reaches_the_others(ended, capsys, status, expected):
    _, second = Job(2).join_all(0, 1)
    second.leave(status, "DataError: a shard is damaged")
    wait_until(lambda: ended)
    assert ended == [expected]
    said = (
        f"process 1 on host1 ended with status {status}: DataError: a shard is damaged; this process was at 'starting'"
    )
    assert said in capsys.readouterr().err


def test_a_wait_that_is_too_long_names_the_late_and_what_they_do(ended, capsys):
    first, second = Job(2).join_all(0, 1)
    set_phase(second, "reading a slow disk", 100)
    set_phase(first, "step 3", 0.5)
    wait_until(lambda: len(ended) >= 2)
    said = capsys.readouterr().err
    assert (
        ended[0] == 75
        and "waited 0 s (distributed.wait_secs) for 'step 3'; missing: process 1 (at 'reading a s" in said
    )


def test_process_0_goes_last_for_the_others_need_its_coordinator(ended, monkeypatch):
    monkeypatch.setattr("parallax.processes.client.GRACE_SECS", 5.0)
    job = Job(2)
    first, _ = job.join_all(0, 1)
    job.networks[1].hold(DOWN)  # the second does not hear it
    threading.Timer(1, job.networks[1].cut).start()
    begun = time.monotonic()
    first.leave(5, "DataError: a shard is damaged")
    assert 0.9 < time.monotonic() - begun < 5
    wait_until(lambda: ended)


def test_process_0_waits_for_the_others_only_so_long(ended):
    job = Job(2)
    first, _ = job.join_all(0, 1)
    job.networks[1].hold(UP, DOWN)
    begun = time.monotonic()
    first.leave(5, "DataError: a shard is damaged")
    assert 1 < time.monotonic() - begun < 5  # GRACE_SECS of this test, and ANSWER_SECS
    job.networks[1].release()
    wait_until(lambda: ended)


def test_who_has_said_goodbye_waits_for_nobody(ended, in_job):
    """An error that is no failure, such as a pipe that is closed: the others have heard of it, and will not come."""
    first, _ = Job(2).join_all(0, 1)
    in_job(first)
    with pytest.raises(SystemExit):
        job_module.leave(lambda: first.leave(0, "BrokenPipeError") or 0)
    assert ended == [0]


class Full:
    """A stream on a disk that is full."""

    def write(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = write


def test_a_process_ends_where_its_last_words_cannot_be_written(ended, monkeypatch):
    job = Job(2)
    first, _ = job.join_all(0, 1)
    first.log = Full().write
    monkeypatch.setattr(sys, "stderr", Full())
    job.networks[1].cut()
    wait_until(lambda: len(ended) >= 2)
    assert ended == [75, 75]


STALLED = """
import sys, threading
sys.path.insert(0, "tests")
from types import SimpleNamespace
from support.relay import Relay
from parallax.processes import client, coordinator
from parallax.processes.job import listen
client.EXIT_LIMIT_SECS = 0.5
listener = listen("127.0.0.1", 0)
network, hello = Relay(listener.getsockname()), {"rank": 0, "processes": 1, "token": "", "host": "here"}
limits = SimpleNamespace(start_secs=20, heartbeat_secs=20, clock_secs=60)
coordinator.Coordinator(listener, 1, "", limits)
first = client.CoordinatorClient(network.address, hello, limits)
first.log = lambda text: threading.Event().wait()
network.cut()
threading.Event().wait(60)
"""


def test_a_process_ends_where_its_last_words_stand_still():
    """A disk that does not answer; in a process of its own, which ends."""
    assert subprocess.run([sys.executable, "-c", STALLED], timeout=50).returncode == 75


def test_what_is_left_in_a_closed_stream_keeps_no_process_from_its_end(exits, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Full())
    with pytest.raises(SystemExit):
        exit_now(75)
    assert exits == [75]


def test_processes_that_leave_together_are_not_lost(ended):
    first, second = Job(2).join_all(0, 1)
    second.leave(0, "")
    first.leave(0, "")
    time.sleep(0.5)
    assert ended == []


# ---- the watchdog


def test_a_step_of_ten_medians_has_its_stacks_printed_once(capfd):
    with Watchdog(10.0, least_secs=0.2) as watchdog:
        watchdog.begin(1, compiles=True)
        for step in range(2, 10):
            watchdog.begin(step)
            time.sleep(0.02)
        time.sleep(1.2)
    said = capfd.readouterr().err
    assert said.count("step 9 has taken") == 1 and "(train.stall_factor=10); all threads:" in said
    assert "test_distributed.py" in said and "Thread MainThread:" in said and "Thread watchdog:" in said


def test_what_is_no_step_is_not_watched(capfd):
    with Watchdog(2.0, least_secs=0.3) as watchdog:
        for step in range(1, 10):
            watchdog.begin(step)
            time.sleep(0.02)
        watchdog.pause()
        time.sleep(0.8)
    assert capfd.readouterr().err == ""
