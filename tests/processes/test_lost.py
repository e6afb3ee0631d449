"""What the runtime says of a lost process is status 75, and processes are together before they first send."""

import itertools

import jax
import pytest
from jax.errors import JaxRuntimeError
from support.stand_ins import ClientStandIn

from parallax.errors import CheckpointError, exit_status
from parallax.processes import job as job_module
from parallax.processes.job import connect_devices, lost_process
from parallax.sharding.mesh import mesh_of

# The first was seen here; the others are put together of what jaxlib, and for GPUs NCCL, hold as texts.
LOST = [
    "UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out with key: "
    "cpu:gloo/0,2048/1 and duration: 29.99999993s [type.googleapis.com/tensorflow.CoordinationServiceError='']",
    "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
    "[127.0.0.1]:27001",
    "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/unbound_buffer.cc:82] Timed out waiting "
    "1800000ms for recv operation to complete",
    "INTERNAL: Gloo collective permute failed: Broken pipe",
    "DEADLINE_EXCEEDED: Barrier timed out. Id: orbax_save::1. This usually happens because a task triggered the "
    "barrier too early or too slowly.",
    "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:8476: Connection refused",
    "ABORTED: Shutdown barrier has been passed",
    "CANCELLED: cancelled",
    "INTERNAL: The following tasks are unhealthy (stopped sending heartbeats): /job:jax_worker/replica:0/task:1",
    "FAILED_PRECONDITION: Agent must be in CONNECTED state. It is currently in state: ERROR. Coordination service",
    "INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited or there was a network error",
    "INTERNAL: NCCL operation ncclCommInitRankConfig() failed: unhandled system error (run with NCCL_DEBUG=INFO for "
    "details). Last NCCL warning(error) log entry (may be unrelated) 'socketStartConnect: Connect to 10.0.0.2 failed'.",
]
OURS = [
    "RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes.",
    "INVALID_ARGUMENT: Expected 2 arguments, got 3.",
    "INTERNAL: NCCL operation ncclAllReduce() failed: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "INTERNAL: NCCL operation ncclAllReduce() failed: invalid argument (run with NCCL_DEBUG=WARN for details)",
    "FAILED_PRECONDITION: Buffer has been donated.",
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm.\n"
    '  Operator: op_name="jit(step)/optimization_barrier"',
    "INTERNAL: Mosaic failed to compile TPU kernel: barrier semaphore is not supported",
    "INTERNAL: during lowering\n  heartbeat, Gloo all-reduce failed, in the text of a program",
    "UNIMPLEMENTED: reduce-scatter of complex numbers is not supported by Gloo",
    "RESOURCE_EXHAUSTED: Gloo all-reduce failed: out of memory",
]


@pytest.fixture
def client(in_job):
    return in_job(ClientStandIn())


def fail(error):
    def act():
        with job_module.reporting():
            raise error

    return act


@pytest.mark.parametrize("text", LOST, ids=lambda text: text[:40])
def test_whatever_the_runtime_says_of_a_lost_process_is_status_75_in_one_line(client, capsys, text):
    assert exit_status(fail(JaxRuntimeError(text)), one_line=True) == 75
    said = capsys.readouterr().err
    assert said == (
        f"LostError: another process is gone or missing: {text}; this process was at 'step 3'; "
        "start the same command again to resume from the last checkpoint\n"
    )
    assert client.calls[0] == "waited" and client.calls[1][0] == 75  # if one is known to be lost, it is named


def test_a_plain_value_error_with_a_status_is_one_of_the_runtime(client):
    """As `multihost_utils.sync_global_devices` raises it where a process has died."""
    assert exit_status(fail(ValueError(LOST[1]))) == 75
    with pytest.raises(ValueError, match="^the barrier timed out"):
        fail(ValueError("the barrier timed out"))()


def test_a_save_that_fails_because_a_process_is_lost_is_no_fault_of_the_checkpoint(client):
    error = CheckpointError("cannot save step 3")
    error.__cause__ = JaxRuntimeError(LOST[4])
    assert exit_status(fail(error)) == 75


@pytest.mark.parametrize("error", [*map(JaxRuntimeError, OURS), RuntimeError(LOST[1])], ids=lambda each: str(each)[:40])
def test_what_the_runtime_says_of_other_things_stays_an_error(client, error):
    with pytest.raises(type(error)) as raised:
        fail(error)()
    assert raised.value is error and client.calls[1][0] == 1


def test_a_process_alone_has_lost_nobody():
    with pytest.raises(JaxRuntimeError):
        fail(JaxRuntimeError(LOST[0]))()


def test_an_error_that_came_of_itself_ends_the_search():
    error = ValueError("first")
    other = ValueError("second")
    error.__context__, other.__context__ = other, error
    assert lost_process(error) is None


def test_who_is_lost_after_the_last_barrier_changes_no_status(client, monkeypatch, exits):
    def shutdown():
        raise JaxRuntimeError("DEADLINE_EXCEEDED: Shutdown barrier timed out")

    monkeypatch.setattr(jax.distributed, "shutdown", shutdown)
    with pytest.raises(SystemExit):
        job_module.leave(lambda: 0)
    assert exits == [0]


# ---- the first collective


def test_processes_wait_for_each_other_before_they_first_send_and_then_connect_each_group(client, monkeypatch):
    from jax.experimental import multihost_utils

    def summed(x, axes):
        client.calls.append(axes)
        return psum(x, axes)

    psum = jax.lax.psum
    monkeypatch.setattr(jax.lax, "psum", summed)
    monkeypatch.setattr(multihost_utils, "sync_global_devices", lambda name: client.calls.append("all processes"))
    connect_devices(mesh_of(2, 2, 2))
    axes = ("pp", "dp", "tp")
    groups = [group for count in (1, 2, 3) for group in itertools.permutations(axes, count)]
    assert client.calls == [
        ("barrier", "the first collective", "compile_secs"),
        ("connecting the devices", "compile_secs"),
        "all processes",
        *groups,
    ]
    client.calls.clear()
    connect_devices(mesh_of(1, 4, 1))
    assert client.calls[3:] == [("dp",)]


def test_a_process_alone_connects_nothing(monkeypatch):
    monkeypatch.setattr(jax.lax, "psum", lambda *_: pytest.fail("it sends"))
    connect_devices(mesh_of(2, 2, 2))
