"""The job to which this process belongs. With one process all functions return immediately; time limits hold, too."""

import contextlib
import itertools
import os
import re
import secrets
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from parallax.config.sections import DistributedConfig
from parallax.display.progress import waiting
from parallax.errors import ConfigError, LostError, first_line
from parallax.hardware.devices import simulate_devices, tpu_files
from parallax.processes.address import VARIABLES, ProcessAddress
from parallax.processes.client import CoordinatorClient
from parallax.processes.coordinator import Coordinator, ProcessReport
from parallax.processes.deadline import Deadline
from parallax.processes.exit import exit_now, ignoring_write_errors
from parallax.processes.gloo import avoid_reduce_scatter, needs_detour
from parallax.processes.jax_settings import common_settings
from parallax.storage import files

# JAX's own limits are longer than ours, which are more informative: they end a process only if ours could not.
LATER_SECS = 15
# Messages of the runtime if another process is gone or missing: Gloo, JAX's coordination service, NCCL.
LOST_STATUSES = ("DEADLINE_EXCEEDED", "UNAVAILABLE", "ABORTED", "CANCELLED")  # of calls between processes
STATUS = re.compile("[A-Z_]+: ")
LOCAL_STATUSES = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND", "OUT_OF_RANGE")
# Searched only in the first line: later lines have names of operations, such as "optimization_barrier".
LOST_MESSAGES = re.compile(
    r"\bgloo .*\bfailed"
    r"|coordination ?service|GetKeyValue|heartbeats?\b|\bbarrier (timed out|failed)|shutdown barrier"
    # NCCL's network errors, not those of devices or of invalid arguments.
    r"|nccl.*(remote process|network error|system error|remote ?error|abort|timed? ?out)",
    re.IGNORECASE,
)

JAX_SETTINGS = "the settings of JAX"

_client: CoordinatorClient | None = None
_deadline: Deadline | None = None  # of a process that is alone, while `limited`


def is_first() -> bool:
    """Whether this process writes the run's files, on behalf of all."""
    return jax.process_index() == 0


def several() -> bool:
    """Whether this process is one of several."""
    return _client is not None


def join(address: ProcessAddress | None, config: DistributedConfig, *, simulate: int) -> None:
    """Join the processes of a job: at a given address, or in a cluster that JAX detects.

    `simulate` is the number of CPU devices to simulate in all processes together, 0 for none.

    Raises:
        ConfigError: the port of the coordinator is taken, or the processes disagree about who they are or about
            settings of JAX.
        LostError: not all processes have connected in time.
    """
    global _client
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", True)
    processes = address.processes if address is not None else started_by_scheduler(os.environ)
    if processes > 1 and needs_detour():
        avoid_reduce_scatter()
    if simulate:
        simulate_devices(simulate, processes)
    if address is not None and processes > 1:
        _client = _connect_to(address, config)
        check_equal(JAX_SETTINGS, common_settings())
        with _connecting(config):
            _initialize(
                config,
                coordinator_address=address.coordinator,
                num_processes=address.processes,
                process_id=address.process,
                coordinator_bind_address=f"127.0.0.1:{address.port}" if address.is_loopback else None,
                # JAX would assign one device per process if a launcher runs inside a scheduler's job.
                cluster_detection_method="deactivate",
            )
    elif address is None and (processes > 1 or (not simulate and has_tpu(os.environ))):
        _client = _connect_by_jax(config, processes)
        check_equal(JAX_SETTINGS, common_settings())
    set_phase("starting the devices", compiling=True)


def set_phase(phase: str, *, compiling: bool = False) -> None:
    """Set the phase of this process, which distributed.wait_secs or compile_secs limits."""
    _limit(phase, "compile_secs" if compiling else "wait_secs")


def _limit(phase: str, setting: str) -> None:
    if (limited_by := _client or _deadline) is not None:
        limited_by.set_phase(phase, setting)


@contextlib.contextmanager
def limited(config: DistributedConfig) -> Iterator[None]:
    """Limit the phases of a process that runs alone, too, while the block runs: it ends with 75 if one takes longer."""
    global _deadline
    if _client is None:
        _deadline = Deadline(config)
        set_phase("starting the devices", compiling=True)
    try:
        yield
    finally:
        if _deadline is not None:
            _deadline.close()
            _deadline = None


def connect_devices(mesh: Mesh) -> None:
    """Run a first collective along each of the mesh's axes and along all their products.

    Gloo connects a group of devices at its first collective and waits only half a minute for a missing process; in a
    connected group the limit of collectives applies.
    """
    if _client is None:
        return
    barrier("the first collective", setting="compile_secs")
    set_phase("connecting the devices", compiling=True)
    if mesh.devices.flat[0].platform != "cpu":
        return
    multihost_utils.sync_global_devices("the first collective")  # between processes, as for checkpoints
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    for count in range(1, len(axes) + 1):
        for group in itertools.permutations(axes, count):  # the same devices in another order are another group
            _run_collective(mesh, group)


def barrier(name: str, *, setting: str = "wait_secs") -> None:
    """Return when every process has reached the barrier of this name."""
    if _client is not None:
        with waiting(f"waiting for the other processes to reach {name!r}"):
            _client.barrier(name, {}, setting)


def barrier_in_thread(name: str) -> None:
    """The same for a thread beside the main one; whoever waits for the thread limits it."""
    if _client is not None:
        _client.barrier_in_thread(name)


def broadcast(name: str, text: str) -> str:
    """The first process's text, in all processes."""
    if _client is None:
        return text
    return _client.barrier(name, {"text": text}, "wait_secs")["values"]["text"]


def report_numbers(numbers: Mapping[str, float]) -> None:
    """Send numbers to process 0, which takes them when it has time; a process that is alone has nobody to tell."""
    if _client is not None:
        _client.report(numbers)


def take_reports() -> list[ProcessReport]:
    """In process 0 of several, what all have reported since the last call."""
    return [] if _client is None else _client.take_reports()


def check_equal(what: str, values: Mapping[str, Any]) -> None:
    """Raise ConfigError unless all processes have the same values (JSON); the error shows differences."""
    if _client is None:
        return
    answer = _client.barrier(what, values, "wait_secs")
    if answer["differences"]:
        listed = "; ".join(
            f"{key} is {first!r} in process 0, {other!r} in process {rank}"
            for key, first, rank, other in answer["differences"]
        )
        more = f" (and {answer['more']} more)" if answer["more"] else ""
        raise ConfigError(f"the processes disagree about {what}: {listed}{more}")


def check_shared(folder: Path) -> None:
    """Raise ConfigError unless all processes see the same folder, which process 0 has created."""
    if _client is None:
        return
    text = broadcast("a text for the run folder", secrets.token_hex(8))
    mark = folder / f".seen-by-all-{text}"  # unique, since another job may check the folder, too
    if is_first():
        files.write_whole(mark, text)
    barrier("the run folder")
    try:
        seen = "there" if files.read_bytes(mark) == text.encode() else f"another file: {mark}"
    except OSError as error:
        seen = f"{os.strerror(error.errno)}: {mark}"
    try:
        check_equal("the run folder, which all hosts must share", {"the file of process 0": seen})
    finally:
        if is_first():
            files.remove(mark)


def is_shared(folder: Path) -> bool:
    """Whether all processes see the same folder and process 0 can write in it."""
    try:
        check_shared(folder)
    except ConfigError:
        return False
    return True


def prepare_once(act: Callable[[], Any], what: str) -> Any:
    """Run `act` in process 0 first, then in the others, which find its results."""
    if is_first():
        _limit(what, "prepare_secs")
        result = act()
        barrier(what, setting="prepare_secs")
        return result
    barrier(what, setting="prepare_secs")
    return act()


def agreed(
    act: Callable[[], Any],
    kind: type[Exception],
    of_another: Callable[[int, int], Exception],
    code_of: Callable[[Any], int] = lambda error: 1,
) -> Any:
    """The result of `act`. All processes call this together, and none continues alone: an error of this kind is raised,
    and where another process has one with a larger code, `of_another` of that process and its code."""
    result = error = None
    try:
        result = act()
    except kind as raised:
        error = raised
    code = np.array([0 if error is None else code_of(error)])
    codes = multihost_utils.process_allgather(code, tiled=True) if jax.process_count() > 1 else code
    if codes.max() > code[0]:
        error = of_another(codes.argmax(), codes.max())
    if error is not None:
        raise error
    return result


def log_to(log: Callable[[str], None]) -> None:
    """Set where process 0 writes the reason of its end, in addition to stderr."""
    if (reports := _client or _deadline) is not None and is_first():
        reports.log = log


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Report an error in the block to the other processes; if another process caused it, report that instead."""
    try:
        yield
    except BaseException as error:
        known = _as_lost(error)
        if _client is not None:
            if not isinstance(known, ConfigError | KeyboardInterrupt):
                _client.wait_for_lost()
            _client.leave(getattr(known, "exit_status", 1), f"{type(known).__name__}: {known}")
        if known is error:
            raise
        raise known from error


def leave(command: Callable[[], int]) -> int:
    """Run a command to its exit status and end: together with the others after success, otherwise at once."""
    try:
        status = command()
    except Exception:
        if _client is None:
            raise
        with ignoring_write_errors():
            traceback.print_exc()
        status = 1
    if _client is None:
        return status
    if status or _client.is_leaving:
        exit_now(status)
    barrier("the end of the run")
    _client.leave(0, "")
    try:
        jax.distributed.shutdown()
    except JaxRuntimeError:
        exit_now(status)  # a process that is lost now has finished its work
    return status


def _as_lost(error: BaseException) -> BaseException:
    """A LostError if the runtime says that a process is lost, otherwise the error itself."""
    if not isinstance(error, Exception) or isinstance(error, LostError) or not jax.distributed.is_initialized():
        return error
    message = lost_process(error)
    if message is None:
        return error
    where = f"; this process was at {_client.phase!r}" if _client is not None else ""
    return LostError(
        f"another process is gone or missing: {message}{where}; "
        "start the same command again to resume from the last checkpoint"
    )


# ---- connecting


def _connect_to(address: ProcessAddress, config: DistributedConfig) -> CoordinatorClient:
    """Connect on the coordinator's own port, which is free again when JAX needs it."""
    listener = None
    if address.process == 0:
        try:
            listener = listen("127.0.0.1" if address.is_loopback else "", address.port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on port {address.port} for distributed.coordinator={address.coordinator} "
                f"({os.strerror(error.errno)}); choose a port of this host that no other program has"
            ) from None
    return _client_at(address, config, listener)


def _connect_by_jax(config: DistributedConfig, started: int) -> CoordinatorClient | None:
    """Connect to the address that process 0 sends by JAX's collectives, which exist already; None with one process.

    `started` is the number of processes that a scheduler has started, 1 for none.
    """
    # JAX would take all tasks of SLURM's job, of which this step may have a part.
    count = {"num_processes": started} if started > 1 else {}
    with _connecting(config):
        _initialize(config, **count)
        processes = jax.process_count()
        if processes == 1:
            return None
        token, host, port, listener = secrets.token_hex(16), _host_address(), 0, None
        if is_first():
            listener = listen("", 0)
            port = listener.getsockname()[1]
        text = f"{token} {host} {port}".ljust(128).encode("ascii")
        codes = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
    token, host, port = np.asarray(codes).tobytes().decode("ascii").split()
    return _client_at(ProcessAddress(host, int(port), processes, jax.process_index(), token), config, listener)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; without a host, on every address."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port))


def _client_at(address: ProcessAddress, config: DistributedConfig, listener: socket.socket | None) -> CoordinatorClient:
    """Connect to process 0; it is this process if it has the `listener`."""
    hello = {"rank": address.process, "processes": address.processes, "token": address.token}
    hello["host"] = socket.gethostname()
    coordinator = Coordinator(listener, address.processes, address.token, config) if listener else None
    return CoordinatorClient((address.host, address.port), hello, config, coordinator)


def _host_address() -> str:
    """The address of this host on its outgoing network; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def _initialize(config: DistributedConfig, **address: Any) -> None:
    """Let JAX connect the processes; its own limits are longer than ours, since it aborts the process."""
    try:
        jax.distributed.initialize(
            **address,
            initialization_timeout=config.start_secs + LATER_SECS,
            heartbeat_timeout_seconds=config.heartbeat_secs + LATER_SECS,
            shutdown_timeout_seconds=LATER_SECS,
        )
    except ValueError as error:
        raise ConfigError(
            f"JAX cannot tell which process of the job this is ({first_line(error)}); set {', '.join(VARIABLES)}"
        ) from error
    except RuntimeError as error:
        raise LostError(f"JAX could not connect the processes: {first_line(error)}") from error


def _connecting(config: DistributedConfig) -> contextlib.AbstractContextManager:
    """End the process if JAX takes too long to connect the processes and to run their first collective."""
    limits = Deadline(config)
    limits.set_phase("JAX to connect the processes", "start_secs")
    return contextlib.closing(limits)


def _run_collective(mesh: Mesh, axes: tuple[str, ...]) -> None:
    """A tiny sum in each group of devices along these axes."""
    others = PartitionSpec(tuple(axis for axis in mesh.axis_names if axis not in axes))
    everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    ones = jax.jit(lambda: jnp.ones(mesh.size), out_shardings=everywhere)()
    add = jax.shard_map(
        lambda x: lax.psum(x, axes), mesh=mesh, in_specs=everywhere.spec, out_specs=others, check_vma=True
    )
    jax.jit(add)(ones).block_until_ready()


# ---- messages of the runtime, and the environment


def lost_process(error: BaseException | None) -> str | None:
    """The runtime's message about a lost process, in an error or its causes; None if there is none.

    >>> lost_process(JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [10.0.0.2]:1234"))
    'UNKNOWN: Gloo all-reduce failed: Connection closed by peer [10.0.0.2]:1234'
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        line = first_line(error)
        # multihost_utils raise a runtime's error as a plain ValueError.
        if (isinstance(error, JaxRuntimeError) or (type(error) is ValueError and STATUS.match(line))) and (
            line.startswith(LOST_STATUSES) or (LOST_MESSAGES.search(line) and not line.startswith(LOCAL_STATUSES))
        ):
            return line
        error = error.__cause__ or error.__context__
    return None


def started_by_scheduler(environment: Mapping[str, str]) -> int:
    """Number of processes that SLURM or Open MPI has started together with this one; 1 if neither has.

    >>> step = {"SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "n[1-4]", "SLURM_STEP_NUM_TASKS": "4"}
    >>> started_by_scheduler({"SLURM_NTASKS": "8", **step})
    4
    """
    # Open MPI first: its daemons are a step of SLURM's, and their processes are not. A job of SLURM may have many
    # steps, of which an interactive one has a single task; without a step, this is only the batch script.
    for counts, needed in (
        (("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_RANK",)),
        (("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_PROCID", "SLURM_STEP_NODELIST")),
    ):
        given = [environment[name] for name in counts if name in environment]
        if given and all(name in environment for name in needed):
            return int(given[0])
    return 1


def has_tpu(environment: Mapping[str, str]) -> bool:
    """Whether this host has TPU chips and may be part of a pod."""
    wanted = environment.get("JAX_PLATFORMS", "tpu").startswith("tpu")
    return wanted and (bool(tpu_files()) or "TPU_WORKER_HOSTNAMES" in environment)
