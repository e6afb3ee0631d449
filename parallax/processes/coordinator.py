"""The coordinator of a job, in process 0: admits processes, releases barriers, and tells all when one is lost.

Every process, process 0 too, connects to it with a `CoordinatorClient`. Messages are JSON objects, one per line, over
TCP.
"""

import asyncio
import collections
import errno
import hmac
import json
import math
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parallax.config.sections import DistributedConfig
from parallax.errors import EXIT_BAD_INPUT, EXIT_RESTART, ConfigError
from parallax.processes.deadline import NEVER, TIMER_SECS
from parallax.storage.files import object_of

LONGEST_BYTES = 1 << 17  # of a line; no process of the job sends more
UNREAD_BYTES = 1 << 20  # buffered for a process that does not read
LEAST_BACKLOG = 128  # so that connections of strangers do not block those of the job
MOST_DIFFERENCES = 8
# Connections that have not yet sent the job's token: most of them, and for how long.
MOST_UNIDENTIFIED = 256
IDENTIFY_SECS = 30.0
LONGEST_HOST = 255
MOST_BARRIERS = 64  # that one process has reached and others have not; a correct one waits at one in each thread
MOST_NUMBERS = 16  # of a report
REPORTS_KEPT = 64  # of each process, for process 0, which takes them at every step


Message = dict[str, Any]


@dataclass
class Member:
    """The coordinator's record of a process."""

    writer: asyncio.StreamWriter
    host: str
    last_message: float
    phase: str = "starting"
    since: float = 0.0
    status: int | None = None  # set when it has announced its end
    barriers: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class ProcessReport(NamedTuple):
    """Numbers that a process has sent to process 0."""

    rank: int
    host: str
    numbers: Mapping[str, float]


class Coordinator:
    """Serves all processes from one thread, until process 0 ends.

    Args:
        listener: bound and listening; closed when all processes have connected, so that JAX can use its port.
        config: the time limits; processes send heartbeats more often than every heartbeat_secs.
    """

    def __init__(self, listener: socket.socket, processes: int, token: str, config: DistributedConfig):
        self._processes, self._token, self._config = processes, token, config
        self._started = time.monotonic()
        self._members: dict[int, Member] = {}
        self._unidentified: dict[asyncio.StreamWriter, None] = {}  # the oldest connections come first
        self._others_disconnected = threading.Event()
        self._reports: collections.deque[ProcessReport] = collections.deque(maxlen=REPORTS_KEPT * processes)
        threading.Thread(target=asyncio.run, args=(self._serve(listener),), name="coordinator", daemon=True).start()

    def wait_for_others(self, secs: float) -> None:
        """Wait until all others have disconnected: JAX's coordinator ends with process 0, and would end them."""
        self._others_disconnected.wait(secs)

    def take_reports(self) -> list[ProcessReport]:
        """What processes have reported since the last call, in the order in which it came; the oldest are dropped if
        nobody takes them."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    async def _serve(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_exception)
        backlog = max(self._processes, LEAST_BACKLOG)
        self._server = await asyncio.start_server(
            self._serve_connection, sock=listener, backlog=backlog, limit=LONGEST_BYTES
        )
        while True:
            self._check_time()
            await asyncio.sleep(TIMER_SECS)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it ends."""
        self._unidentified[writer] = None
        if len(self._unidentified) > MOST_UNIDENTIFIED:
            self._close_oldest_unidentified()
        if self._is_complete():
            writer.close()
        rank, reason = None, "its connection was closed"
        try:
            async with asyncio.timeout(IDENTIFY_SECS) as limit:
                while (line := await reader.readline()).endswith(b"\n") and not writer.is_closing():
                    message = object_of(line, odd_numbers=True)
                    if rank is None:
                        rank = self._admit(writer, message)
                        limit.reschedule(None)
                    else:
                        self._on_message(rank, message)
                    await asyncio.sleep(0)  # a process that sends many messages must not delay others
        except ConfigError as refusal:
            self._send(writer, _refusal(str(refusal)))
        except ValueError:
            reason = "it has sent what no process of the job sends"
        except OSError:
            pass  # the connection has ended, or it has not identified itself in time
        self._unidentified.pop(writer, None)
        writer.close()
        if rank is not None:
            self._on_disconnect(rank, reason)

    # ---- beginning

    def _is_complete(self) -> bool:
        return len(self._members) == self._processes

    def _close_oldest_unidentified(self) -> None:
        oldest = next(iter(self._unidentified))
        del self._unidentified[oldest]
        oldest.close()

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """If no more files can be opened, close the oldest unidentified connection: the new one is accepted then."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif self._unidentified:
            self._close_oldest_unidentified()

    def _admit(self, writer: asyncio.StreamWriter, hello: Message) -> int:
        """Accept a process of the job and return its rank; ConfigError says why it is refused."""
        if not _is_same(hello.get("token"), self._token):
            raise ConfigError("this coordinator port belongs to another job; give each job its own port")
        rank, processes, host, seconds = values = [hello.get(key) for key in ("rank", "processes", "host", "clock")]
        is_ours = [type(value) for value in values] == [int, int, str, float] and math.isfinite(seconds)
        if not is_ours or len(host) > LONGEST_HOST or not host.isprintable():
            raise ConfigError("the first message is not that of a job's process; is another program using its token?")
        if processes != self._processes:
            counts = f"{self._processes} in process 0, {processes} in process {rank}"
            raise self._refuse_all(f"the processes disagree: distributed.num-processes is {counts}")
        if not 0 <= rank < processes:
            raise ConfigError(
                f"distributed.process-id={rank} is not one of {processes} processes; use 0 to {processes - 1}"
            )
        if rank in self._members:
            other = self._members[rank].host
            raise self._refuse_all(f"distributed.process-id={rank} was given twice: on {other} and on {host}")
        now = time.time()
        if abs(seconds - now) > self._config.clock_secs:
            times = f"{_time(now)} in process 0, {_time(seconds)} in process {rank} on {host}"
            limit = f"distributed.clock_secs={self._config.clock_secs:.0f} allows; set the clocks"
            raise self._refuse_all(f"the clocks disagree: {times}, more than {limit}")
        del self._unidentified[writer]
        self._members[rank] = Member(writer, host, time.monotonic())
        if self._is_complete():
            self._server.close()
            for connection in self._unidentified:
                connection.close()
            self._send_to_all({"complete": True})
        return rank

    def _refuse_all(self, reason: str) -> ConfigError:
        """A refusal that is also sent to all members, since the job cannot start."""
        self._send_to_all(_refusal(reason))
        return ConfigError(reason)

    # ---- messages

    def _on_message(self, rank: int, message: Message) -> None:
        """Handle a message of a process; ValueError if it is invalid."""
        member = self._members[rank]
        member.last_message = time.monotonic()
        match message:
            case {"phase": str(phase)}:
                member.phase, member.since = phase, time.monotonic()
            case {"barrier": str(name), "values": dict(values)} if len(member.barriers) < MOST_BARRIERS:
                member.barriers[name] = values
                self._release(name)
            case {"report": dict(numbers)} if _are_numbers(numbers):
                self._reports.append(ProcessReport(rank, member.host, numbers))
            case {"heartbeat": _}:
                self._send(member.writer, {"heartbeat": True})
            case {"phases": _}:
                self._send(member.writer, {"phases": self._phases()})
            case {"exit": int(status), "reason": str(reason)} if type(status) is not bool:
                if member.status is None and status:
                    self._announce_lost(rank, reason, status)
                member.status = member.status or status
                self._send(member.writer, {"confirmed": "exit"})
            case _:
                raise ValueError(message)

    def _release(self, barrier: str) -> None:
        """When all processes have reached a barrier, release them, with process 0's values and all differences."""
        if not all(barrier in member.barriers for member in self._members.values()):
            return
        values = {rank: member.barriers.pop(barrier) for rank, member in sorted(self._members.items())}
        first = values[0]
        differences = [
            [key, first.get(key), rank, other.get(key)]
            for rank, other in values.items()
            for key in sorted({*first, *other})
            if first.get(key) != other.get(key)
        ]
        answer = {"released": barrier, "values": first, "differences": differences[:MOST_DIFFERENCES]}
        self._send_to_all(answer | {"more": max(len(differences) - MOST_DIFFERENCES, 0)})

    def _phases(self) -> dict[str, list]:
        now = time.monotonic()
        return {str(rank): [member.phase, now - member.since] for rank, member in self._members.items()}

    # ---- ending

    def _check_time(self) -> None:
        now = time.monotonic()
        if not self._is_complete() and now > self._started + self._config.start_secs:
            missing = [str(rank) for rank in range(self._processes) if rank not in self._members]
            reason = (
                f"{len(self._members)} of {self._processes} processes are there after {self._config.start_secs:.0f} s "
                f"(distributed.start_secs); missing: {', '.join(missing)}"
            )
            self._send_to_all(_refusal(reason, EXIT_RESTART))
            self._started = NEVER
        for rank, member in self._members.items():
            if self._is_complete() and now > member.last_message + self._config.heartbeat_secs:
                self._on_disconnect(rank, no_heartbeat(self._config))

    def _on_disconnect(self, rank: int, reason: str) -> None:
        if self._members[rank].status is None:
            self._announce_lost(rank, reason, None)
        self._members[rank].last_message = NEVER  # it cannot be lost any more
        if all(member.last_message == NEVER for other, member in self._members.items() if other):
            self._others_disconnected.set()

    def _announce_lost(self, rank: int, reason: str, status: int | None) -> None:
        member = self._members[rank]
        lost = {"lost": rank, "host": member.host, "reason": reason, "status": status, "phase": member.phase}
        self._send_to_all(lost, but=rank)

    def _send_to_all(self, message: Message, but: int | None = None) -> None:
        for rank, member in self._members.items():
            if rank != but:
                self._send(member.writer, message)

    def _send(self, writer: asyncio.StreamWriter, message: Message) -> None:
        """Send without waiting; a process with too much unread data is disconnected."""
        if not writer.is_closing():
            writer.write(json.dumps(message).encode() + b"\n")
            if writer.transport.get_write_buffer_size() > UNREAD_BYTES:
                writer.transport.abort()


def _is_same(token: object, ours: str) -> bool:
    if not isinstance(token, str):
        return False
    return hmac.compare_digest(token.encode(errors="surrogatepass"), ours.encode(errors="surrogatepass"))


def _are_numbers(values: Mapping[str, Any]) -> bool:
    return len(values) <= MOST_NUMBERS and all(type(x) in (int, float) and abs(x) < 2**53 for x in values.values())


def no_heartbeat(config: DistributedConfig) -> str:
    """That a process counts as lost since it has sent nothing."""
    return f"it has said nothing for {config.heartbeat_secs:.0f} s (distributed.heartbeat_secs)"


def _refusal(reason: str, status: int = EXIT_BAD_INPUT) -> Message:
    return {"refused": reason, "status": status}


def _time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a year out of the calendar's range
        return f"{seconds:g} s since 1970"
