"""The connection between process 0 and each process of a job: messages, membership, lost processes, and waits.

Process 0 has a `Hub`; all processes, including itself, connect to it with a `ControlLine`. Messages are JSON objects,
one per line, over TCP.

Written here, since JAX's public API only starts and stops its distributed runtime: the messages and barriers of that
are private.
"""

import asyncio
import contextlib
import errno
import hmac
import json
import math
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from parallax.config.sections import DistributedConfig
from parallax.errors import (
    EXIT_BAD_INPUT,
    EXIT_RESTART,
    NOT_WORTH_A_RESTART,
    ConfigError,
    LostError,
    tell,
    thread_stacks,
)
from parallax.storage.files import object_of

CLOCK_SECS = 0.2
# How long a process that has finished waits for the others, and they for its last message.
GRACE_SECS = 3.0
# Messages.
LONGEST_BYTES = 1 << 17  # of a line; no process of the job sends more
LONGEST_REASON = 4096  # characters of an error; those of compilers can have megabytes
UNREAD_BYTES = 1 << 20  # buffered for a process that does not read
# The hub.
LEAST_BACKLOG = 128  # so that connections of strangers do not block those of the job
NAMED_DIFFERENCES = 8
# Connections that have not yet sent the job's token: most of them, and for how long.
MOST_STRANGERS = 256
STRANGER_SECS = 30.0
LONGEST_HOST = 255
UNPASSED = 64  # most points that one process has reported and others have not reached; a correct one waits at one
# A line.
CONNECT_SECS = 0.2  # between two attempts to connect
SEND_SECS = 10  # if process 0 reads nothing for this time, its connection counts as closed
SIGNS_OF_LIFE = 4  # number sent in the time after which a silent process is lost
ANSWER_SECS = 2.0
LAST_WORDS_SECS = 10.0  # limit for the last messages and for the others to end; then the process ends anyway
NAMING_SECS = 15.0  # the same, including the hub's answer about late processes

NEVER = float("inf")

Message = dict[str, Any]


def _as_line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


@dataclass
class Member:
    """The hub's record of a process."""

    writer: asyncio.StreamWriter
    host: str
    heard: float
    doing: str = "starting"
    since: float = 0.0
    status: int | None = None  # set when it has announced its end
    reached: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class Hub:
    """Serves all processes from one thread, until process 0 ends.

    Args:
        listener: bound and listening; closed when all processes have connected, so that JAX can use its port.
        config: the time limits; processes send signs of life more often than every heartbeat_secs.
    """

    def __init__(self, listener: socket.socket, processes: int, token: str, config: DistributedConfig):
        self._processes, self._token, self._config = processes, token, config
        self._begun = time.monotonic()
        self._members: dict[int, Member] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # those that have waited longest come first
        self._others_gone = threading.Event()
        threading.Thread(target=asyncio.run, args=(self._serve(listener),), name="hub", daemon=True).start()

    def wait_for_the_others(self, secs: float) -> None:
        """Wait until all others have disconnected: JAX's coordinator ends with process 0, and would end them."""
        self._others_gone.wait(secs)

    async def _serve(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_exception)
        backlog = max(self._processes, LEAST_BACKLOG)
        self._server = await asyncio.start_server(self._attend, sock=listener, backlog=backlog, limit=LONGEST_BYTES)
        while True:
            self._look_at_the_clock()
            await asyncio.sleep(CLOCK_SECS)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it ends."""
        self._strangers[writer] = None
        if len(self._strangers) > MOST_STRANGERS:
            self._hang_up_on_the_oldest()
        if self._is_complete():
            writer.close()
        rank, why = None, "its connection was closed"
        try:
            async with asyncio.timeout(STRANGER_SECS) as patience:
                while (line := await reader.readline()).endswith(b"\n") and not writer.is_closing():
                    message = object_of(line, odd_numbers=True)
                    if rank is None:
                        rank = self._welcome(writer, message)
                        patience.reschedule(None)
                    else:
                        self._hear(rank, message)
                    await asyncio.sleep(0)  # a process that sends many messages must not delay others
        except ConfigError as refusal:
            self._send(writer, _refusal(str(refusal)))
        except ValueError:
            why = "it has sent what no process of the job sends"
        except OSError:
            pass  # the connection has ended, or a stranger's time is over
        self._strangers.pop(writer, None)
        writer.close()
        if rank is not None:
            self._gone(rank, why)

    # ---- beginning

    def _is_complete(self) -> bool:
        return len(self._members) == self._processes

    def _hang_up_on_the_oldest(self) -> None:
        oldest = next(iter(self._strangers))
        del self._strangers[oldest]
        oldest.close()

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """If no more files can be opened, drop a stranger; the new connection is then accepted a second later."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif self._strangers:
            self._hang_up_on_the_oldest()

    def _welcome(self, writer: asyncio.StreamWriter, hello: Message) -> int:
        """Accept a process of the job and return its rank; ConfigError says why it is refused."""
        if not _is_same(hello.get("token"), self._token):
            raise ConfigError("this coordinator port belongs to another job; give each job its own port")
        rank, processes, host, seconds = said = [hello.get(name) for name in ("hello", "of", "host", "clock")]
        is_ours = [type(each) for each in said] == [int, int, str, float] and math.isfinite(seconds)
        if not is_ours or len(host) > LONGEST_HOST or not host.isprintable():
            raise ConfigError("the first message is not that of a job's process; is another program using its token?")
        if processes != self._processes:
            counts = f"{self._processes} in process 0, {processes} in process {rank}"
            raise self._for_all(f"the processes disagree: distributed.num-processes is {counts}")
        if not 0 <= rank < processes:
            raise ConfigError(
                f"distributed.process-id={rank} is not one of {processes} processes; use 0 to {processes - 1}"
            )
        if rank in self._members:
            other = self._members[rank].host
            raise self._for_all(f"distributed.process-id={rank} was given twice: on {other} and on {host}")
        now = time.time()
        if abs(seconds - now) > self._config.clock_secs:
            times = f"{_time(now)} in process 0, {_time(seconds)} in process {rank} on {host}"
            limit = f"distributed.clock_secs={self._config.clock_secs:.0f} allows; set the clocks"
            raise self._for_all(f"the clocks disagree: {times}, more than {limit}")
        del self._strangers[writer]
        self._members[rank] = Member(writer, host, time.monotonic())
        if self._is_complete():
            self._server.close()
            for stranger in self._strangers:
                stranger.close()
            self._tell({"all": True})
        return rank

    def _for_all(self, why: str) -> ConfigError:
        """A refusal that is also sent to all members, since the job cannot start."""
        self._tell(_refusal(why))
        return ConfigError(why)

    # ---- what processes say

    def _hear(self, rank: int, message: Message) -> None:
        """Handle a message of a process; ValueError if it is invalid."""
        member = self._members[rank]
        member.heard = time.monotonic()
        match message:
            case {"doing": str(doing)}:
                member.doing, member.since = doing, time.monotonic()
            case {"reached": str(what), "values": dict(values)} if len(member.reached) < UNPASSED:
                member.reached[what] = values
                self._pass(what)
            case {"sign": _}:
                self._send(member.writer, {"sign": "of life"})
            case {"where": _}:
                self._send(member.writer, {"where": self._places()})
            case {"bye": int(status), "why": str(why)} if type(status) is not bool:
                if member.status is None and status:
                    self._lose(rank, why, status)
                member.status = member.status or status
                self._send(member.writer, {"heard": "bye"})
            case _:
                raise ValueError(message)

    def _pass(self, what: str) -> None:
        """When all processes have reached `what`, let them continue, with process 0's values and all differences."""
        if not all(what in member.reached for member in self._members.values()):
            return
        values = {rank: member.reached.pop(what) for rank, member in sorted(self._members.items())}
        first = values[0]
        differences = [
            [key, first.get(key), rank, other.get(key)]
            for rank, other in values.items()
            for key in sorted({*first, *other})
            if first.get(key) != other.get(key)
        ]
        answer = {"passed": what, "values": first, "differences": differences[:NAMED_DIFFERENCES]}
        self._tell(answer | {"more": max(len(differences) - NAMED_DIFFERENCES, 0)})

    def _places(self) -> dict[str, list]:
        now = time.monotonic()
        return {str(rank): [member.doing, now - member.since] for rank, member in self._members.items()}

    # ---- ending

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if not self._is_complete() and now > self._begun + self._config.start_secs:
            missing = [str(rank) for rank in range(self._processes) if rank not in self._members]
            why = (
                f"{len(self._members)} of {self._processes} processes are there after {self._config.start_secs:.0f} s "
                f"(distributed.start_secs); missing: {', '.join(missing)}"
            )
            self._tell(_refusal(why, EXIT_RESTART))
            self._begun = NEVER
        for rank, member in self._members.items():
            if self._is_complete() and now > member.heard + self._config.heartbeat_secs:
                self._gone(rank, _silent(self._config))

    def _gone(self, rank: int, why: str) -> None:
        if self._members[rank].status is None:
            self._lose(rank, why, None)
        self._members[rank].heard = NEVER  # it is gone and cannot be lost any more
        if all(member.heard == NEVER for other, member in self._members.items() if other):
            self._others_gone.set()

    def _lose(self, rank: int, why: str, status: int | None) -> None:
        member = self._members[rank]
        self._tell({"lost": rank, "host": member.host, "why": why, "status": status, "doing": member.doing}, but=rank)

    def _tell(self, message: Message, but: int | None = None) -> None:
        for rank, member in self._members.items():
            if rank != but:
                self._send(member.writer, message)

    def _send(self, writer: asyncio.StreamWriter, message: Message) -> None:
        """Send without waiting; a process with too much unread data is disconnected."""
        if not writer.is_closing():
            writer.write(_as_line(message))
            if writer.transport.get_write_buffer_size() > UNREAD_BYTES:
                writer.transport.abort()


def _is_same(token: object, ours: str) -> bool:
    how = {"errors": "surrogatepass"}
    return isinstance(token, str) and hmac.compare_digest(token.encode(**how), ours.encode(**how))


def _silent(config: DistributedConfig) -> str:
    return f"it has said nothing for {config.heartbeat_secs:.0f} s (distributed.heartbeat_secs)"


def _refusal(why: str, status: int = EXIT_BAD_INPUT) -> Message:
    return {"refused": why, "status": status}


def _time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a year out of the calendar's range
        return f"{seconds:g} s since 1970"


class ControlLine:
    """A process's connection to the hub. One thread listens; another sends signs of life and enforces time limits.

    If a process is lost or a wait takes too long, they report it and end this process, whatever its main thread is
    doing: a collective that waits for a dead peer would not return.

    Args:
        hub: only in process 0, which ends last.

    Raises:
        LostError: the hub does not answer within start_secs, or not all processes have connected by then.
        ConfigError: the processes disagree about who they are.
    """

    def __init__(self, address: tuple[str, int], hello: Message, config: DistributedConfig, hub: Hub | None = None):
        self.doing = "starting"
        self.is_leaving = False  # the main thread has announced the end
        self.log: Callable[[str], None] = lambda text: None  # gets the last message in addition to stderr
        self._rank, self._hub, self._config = hello["hello"], hub, config
        self._limit = (NEVER, "")  # deadline, and the setting that limits the wait
        self._answers: queue.Queue[Message] = queue.Queue()
        self._places: queue.Queue[Mapping[str, list]] = queue.Queue()
        self._heard, self._is_ending, self._lost = time.monotonic(), False, False
        self._dismissed = threading.Event()  # the hub has confirmed the end, or will not answer any more
        self._sending = threading.Lock()
        self._socket = _connect(address, config.start_secs)
        self._send(hello | {"clock": time.time()})
        for act in (self._listen, self._keep_time):
            threading.Thread(target=act, name="control line", daemon=True).start()
        self._answer("the other processes to start", "start_secs")

    def set_phase(self, what: str, setting: str) -> None:
        """Set the phase of this process to `what`, limited by a setting of `distributed` in seconds."""
        self.doing, self._limit = what, (time.monotonic() + getattr(self._config, setting), setting)
        self._send({"doing": what})

    def meet(self, what: str, values: Mapping[str, Any], setting: str) -> Message:
        """Wait until all processes have reached `what`; returns process 0's values and all differences."""
        before, (until, limit_setting) = self.doing, self._limit
        left = until - time.monotonic()
        self.set_phase(what, setting)
        self._send({"reached": what, "values": dict(values)})
        answer = self._answer(what, setting)
        # Return to the previous phase, whose limit does not include the meeting.
        self.doing, self._limit = before, (time.monotonic() + left, limit_setting)
        self._send({"doing": before})
        return answer

    def leave(self, status: int, why: str) -> None:
        """Tell the others that this process ends; when this returns, they have received it, if they still can.

        After an error process 0 waits until they have ended.
        """
        self.is_leaving = True
        self._limit = (NEVER, "")
        self._send({"bye": status, "why": why[:LONGEST_REASON]})
        self._dismissed.wait(ANSWER_SECS)
        if status:
            self._go_last()

    def wait_for_word(self) -> None:
        """Call after an error that a lost process may have caused: if one is lost, this does not return."""
        time.sleep(GRACE_SECS)
        if self._is_ending:
            threading.Event().wait()

    def _send(self, message: Message) -> None:
        # If it cannot be sent, the connection has ended, which reading will show.
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(_as_line(message))

    def _answer(self, what: str, setting: str) -> Message:
        secs = getattr(self._config, setting) + ANSWER_SECS
        try:
            answer = self._answers.get(timeout=secs)
        except queue.Empty:
            waited = f"waited {secs:.0f} s (distributed.{setting}) for {what}"
            raise LostError(f"{waited}, and process 0 does not answer") from None
        if "refused" in answer:
            kind = LostError if answer.get("status") == EXIT_RESTART else ConfigError
            raise kind(answer["refused"])
        return answer

    # ---- the threads

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._socket.makefile("rb"):
                self._heard = time.monotonic()
                self._hear(object_of(line, odd_numbers=True))
        self._lose("process 0", "its connection was closed")

    def _hear(self, message: Message) -> None:
        if "lost" in message:
            # In another thread, since this one must continue to listen.
            who = f"process {message['lost']} on {message['host']}"
            about = (who, message["why"], message["status"], message["doing"])
            threading.Thread(target=self._lose, args=about, daemon=True).start()
        elif "where" in message:
            self._places.put(message["where"])
        elif "heard" in message:
            self._dismissed.set()
        elif "sign" not in message:
            if "refused" in message:
                self.is_leaving = True  # the main thread reports the reason and ends
            self._answers.put(message)

    def _keep_time(self) -> None:
        signed, sign_secs = 0.0, self._config.heartbeat_secs / SIGNS_OF_LIFE
        while True:
            now = time.monotonic()
            if now > signed + sign_secs:
                signed = now
                self._send({"sign": "of life"})
            # Process 0 does not watch itself: if it is suspended, so is the hub.
            if self._rank and now > self._heard + self._config.heartbeat_secs:
                return self._lose("process 0", _silent(self._config))
            if now > self._limit[0]:
                return self._name_the_late()
            time.sleep(min(CLOCK_SECS, sign_secs))

    def _lose(self, who: str, why: str, status: int | None = None, doing: str = "") -> None:
        """End this process because another one is gone; with a delay if it may end in the same way by itself."""
        # If the work here is done, it does not matter; and without process 0 there are no answers.
        self._dismissed.set()
        if self.is_leaving or self._lost:
            return None  # only the first lost process is reported
        self._lost = True
        here = f"this process was at {self.doing!r}"
        if status is None:
            there = f". It was at {doing!r}" if doing else ""
            return self._end(f"{who} is gone: {why}{there}; {here}", EXIT_RESTART, 0.0)
        text = f"{who} ended with status {status}: {why}; {here}"
        return self._end(text, status if status in NOT_WORTH_A_RESTART else EXIT_RESTART, GRACE_SECS)

    def _name_the_late(self) -> None:
        """End this process because a wait has taken too long, and name the missing processes."""
        end_within(NAMING_SECS, EXIT_RESTART)
        doing, (_, setting) = self.doing, self._limit
        self._send({"where": True})
        try:
            missing = _missing(self._places.get(timeout=ANSWER_SECS), doing)
        except queue.Empty:
            missing = "process 0 does not answer"
        show_stacks()
        text = f"{waited(self._config, setting, doing)}; {missing}"
        self._send({"bye": EXIT_RESTART, "why": text[:LONGEST_REASON]})
        self._end(text, EXIT_RESTART, 0.0)

    def _end(self, text: str, status: int, grace_secs: float) -> None:
        end_within(grace_secs + LAST_WORDS_SECS, status)
        time.sleep(grace_secs)
        self._is_ending = True
        say_lost(text, status, self.log)
        # The others know it already, so this end is not reported to them.
        self._send({"bye": 0, "why": ""})
        self._go_last()
        end_now(status)

    def _go_last(self) -> None:
        if self._hub is not None:
            self._hub.wait_for_the_others(GRACE_SECS + ANSWER_SECS)


def waited(config: DistributedConfig, setting: str, doing: str) -> str:
    """That a phase took longer than its limit."""
    return f"waited {getattr(config, setting):.0f} s (distributed.{setting}) for {doing!r}"


def show_stacks() -> None:
    """Print the stacks of all threads to stderr."""
    with nothing_in_the_way():
        tell(thread_stacks(), sys.__stderr__)


def say_lost(text: str, status: int, log: Callable[[str], None]) -> None:
    """Write a process's last line, to stderr and its log, with what to do if a restart helps."""
    hint = "; start the same command again to resume from the last checkpoint" if status == EXIT_RESTART else ""
    for write in (say_last, log):
        with nothing_in_the_way():
            write(f"{LostError.__name__}: {text}{hint}")


def end_now(status: int) -> NoReturn:
    """End the process at once: JAX's own exit waits for processes that may never come."""
    end_within(LAST_WORDS_SECS, status)
    for stream in (sys.stdout, sys.stderr):
        with nothing_in_the_way():
            stream.flush()
    os._exit(status)


def end_within(secs: float, status: int) -> None:
    """End the process after this time, even if a disk or a pipe blocks it."""
    late = threading.Timer(secs, os._exit, (status,))
    late.daemon = True
    late.start()


def say_last(line: str) -> None:
    """Print the reason for the end to stderr."""
    print(line, file=sys.stderr, flush=True)


def nothing_in_the_way() -> contextlib.AbstractContextManager:
    """Ignore a full disk or a closed stderr while the process ends."""
    return contextlib.suppress(OSError, ValueError)


def _connect(address: tuple[str, int], secs: float) -> socket.socket:
    host, port = address
    deadline = time.monotonic() + secs
    while True:
        try:
            connected = socket.create_connection(address, timeout=max(deadline - time.monotonic(), CONNECT_SECS))
            # If nothing listens yet on a free port of this host, TCP may connect the socket with itself.
            if connected.getsockname() != connected.getpeername():
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connected.settimeout(None)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECS, 0))
                return connected
            connected.close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise LostError(
                    f"process 0 has not answered at {host}:{port} for {secs:.0f} s (distributed.start_secs): "
                    f"{error.strerror or error}; is it running, and is this the address of its host?"
                ) from None
        time.sleep(CONNECT_SECS)


def _missing(places: Mapping[str, list], doing: str) -> str:
    late = [f"{rank} (at {at!r} for {since:.0f} s)" for rank, (at, since) in places.items() if at != doing]
    return f"missing: process {', '.join(late)}" if late else "all processes are at it"
