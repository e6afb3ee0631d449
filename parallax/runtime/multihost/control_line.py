"""The line between process 0 and each process of a job: messages, who is there, who is gone, who waits for whom.

Process 0 has a `Hub`; all processes, itself too, connect to it by a `ControlLine`. Messages are JSON objects, one on a
line, over TCP.
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
from parallax.runtime.errors import (
    EXIT_BAD_INPUT,
    EXIT_RESTART,
    NOT_WORTH_A_RESTART,
    ConfigError,
    LostError,
    tell,
    thread_stacks,
)
from parallax.runtime.files import object_of

CLOCK_SECS = 0.2
# How long a process whose work has ended waits for the word of the others, and they for its last words.
GRACE_SECS = 3.0
# Messages.
LONGEST_BYTES = 1 << 17  # of a line: who sends more is none of us
LONGEST_REASON = 4096  # letters of an error: those of compilers can have megabytes
UNREAD_BYTES = 1 << 20  # that are kept for one who does not read
# The hub.
LEAST_BACKLOG = 128  # strangers who connect shall not keep our own from it
NAMED_DIFFERENCES = 8
# Who has connected, and has not yet shown the job's token: how many of them, and how long.
MOST_STRANGERS = 256
STRANGER_SECS = 30.0
LONGEST_HOST = 255
UNPASSED = 64  # points that a process says it has reached, and the others have not: it waits at one
# A line.
CONNECT_SECS = 0.2  # between two attempts
SEND_SECS = 10  # where process 0 reads nothing for so long, its connection is as good as closed
SIGNS_OF_LIFE = 4  # in the time after which a silent process is lost
ANSWER_SECS = 2.0
LAST_WORDS_SECS = 10.0  # to write them, and to hear that the others have gone; then the process ends without
NAMING_SECS = 15.0  # the same, and for the hub to say who is late

NEVER = float("inf")

Message = dict[str, Any]


def _as_line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


@dataclass
class Member:
    """A process as the hub knows it."""

    writer: asyncio.StreamWriter
    host: str
    heard: float
    doing: str = "starting"
    since: float = 0.0
    status: int | None = None  # once it has said that it ends
    reached: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class Hub:
    """Serves all processes from one thread, until process 0 ends.

    Args:
        listener: bound and listening; closed once all processes are there, so that JAX can have its port.
        config: has the limits; a process sends a sign of life more often than heartbeat_secs.
    """

    def __init__(self, listener: socket.socket, processes: int, token: str, config: DistributedConfig):
        self._processes, self._token, self._config = processes, token, config
        self._begun = time.monotonic()
        self._members: dict[int, Member] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # those who have waited longest come first
        self._others_gone = threading.Event()
        threading.Thread(target=asyncio.run, args=(self._serve(listener),), name="hub", daemon=True).start()

    def wait_for_the_others(self, secs: float) -> None:
        """Wait until all but process 0 have disconnected: JAX's coordinator ends with process 0, and would end them."""
        self._others_gone.wait(secs)

    async def _serve(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_exception)
        backlog = max(self._processes, LEAST_BACKLOG)
        self._server = await asyncio.start_server(self._attend, sock=listener, backlog=backlog, limit=LONGEST_BYTES)
        while True:
            self._look_at_the_clock()
            await asyncio.sleep(CLOCK_SECS)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection to its end."""
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
                    await asyncio.sleep(0)  # who says much at once does not keep others waiting
        except ConfigError as refusal:
            self._send(writer, _refusal(str(refusal)))
        except ValueError:
            why = "it has sent what no process of the job sends"
        except OSError:
            pass  # the connection is over, or a stranger has had its time
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
        """Where no more files may be opened, a stranger has to go; the connection is then accepted a second later."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif self._strangers:
            self._hang_up_on_the_oldest()

    def _welcome(self, writer: asyncio.StreamWriter, hello: Message) -> int:
        """Accept a process of the job, and return its rank; ConfigError says why it is refused."""
        if not _is_same(hello.get("token"), self._token):
            raise ConfigError("this coordinator port belongs to another job; give each job a port of its own")
        rank, processes, host, seconds = said = [hello.get(name) for name in ("hello", "of", "host", "clock")]
        is_ours = [type(each) for each in said] == [int, int, str, float] and math.isfinite(seconds)
        if not is_ours or len(host) > LONGEST_HOST or not host.isprintable():
            raise ConfigError("this is not how a process of the job begins; is another program using its token?")
        if processes != self._processes:
            counts = f"{self._processes} in process 0, {processes} in process {rank}"
            raise self._for_all(f"the processes disagree: distributed.num-processes is {counts}")
        if not 0 <= rank < processes:
            raise ConfigError(
                f"distributed.process-id={rank} is none of {processes} processes; use 0 to {processes - 1}"
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
        """A refusal of which all members are told, too: the job cannot start."""
        self._tell(_refusal(why))
        return ConfigError(why)

    # ---- what processes say

    def _hear(self, rank: int, message: Message) -> None:
        """Do what a process asks for; ValueError where it makes no sense."""
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
        """Let all go on from `what` once all have reached it; they hear what process 0 has, and what differs."""
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
        self._members[rank].heard = NEVER  # gone, and lost no more
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
        """Send without waiting; who has too much left to read is cut off."""
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
    except (OverflowError, ValueError, OSError):  # a year that no calendar has
        return f"{seconds:g} s since 1970"


class ControlLine:
    """A process's connection to the hub. One thread listens; another one sends signs of life and enforces time limits.

    When a process is lost, or a wait takes too long, they say so and end this process, whatever its main thread is
    doing: a collective that waits for a dead peer would not come back.

    Args:
        hub: where this is process 0, which goes last.

    Raises:
        LostError: the hub does not answer within start_secs, or not all processes are there then.
        ConfigError: the processes disagree about who they are.
    """

    def __init__(self, address: tuple[str, int], hello: Message, config: DistributedConfig, hub: Hub | None = None):
        self.doing = "starting"
        self.is_leaving = False  # the main thread has said goodbye
        self.log: Callable[[str], None] = lambda text: None  # gets last words, too, besides stderr
        self._rank, self._hub, self._config = hello["hello"], hub, config
        self._limit = (NEVER, "")  # until when, by which setting of how many seconds
        self._answers: queue.Queue[Message] = queue.Queue()
        self._places: queue.Queue[Mapping[str, list]] = queue.Queue()
        self._heard, self._is_ending, self._lost = time.monotonic(), False, False
        self._dismissed = threading.Event()  # the hub has heard the goodbye, or will say nothing more
        self._sending = threading.Lock()
        self._socket = _connect(address, config.start_secs)
        self._send(hello | {"clock": time.time()})
        for act in (self._listen, self._keep_time):
            threading.Thread(target=act, name="control line", daemon=True).start()
        self._answer("the other processes to start", "start_secs")

    def set_phase(self, what: str, setting: str) -> None:
        """From now on this process is at `what`, for at most as many seconds as a setting of `distributed` says."""
        self.doing, self._limit = what, (time.monotonic() + getattr(self._config, setting), setting)
        self._send({"doing": what})

    def meet(self, what: str, values: Mapping[str, Any], setting: str) -> Message:
        """Wait until all processes have come as far as `what`; returns process 0's values, and what differs."""
        before, (until, limit_setting) = self.doing, self._limit
        left = until - time.monotonic()
        self.set_phase(what, setting)
        self._send({"reached": what, "values": dict(values)})
        answer = self._answer(what, setting)
        # Back to where it was, whose limit the meeting has not used up.
        self.doing, self._limit = before, (time.monotonic() + left, limit_setting)
        self._send({"doing": before})
        return answer

    def leave(self, status: int, why: str) -> None:
        """Tell the others that this process ends; they have heard it when this returns, if they still can.

        With an error process 0 waits until they have gone.
        """
        self.is_leaving = True
        self._limit = (NEVER, "")
        self._send({"bye": status, "why": why[:LONGEST_REASON]})
        self._dismissed.wait(ANSWER_SECS)
        if status:
            self._go_last()

    def wait_for_word(self) -> None:
        """After an error that a lost process may have caused: if one is, this does not return."""
        time.sleep(GRACE_SECS)
        if self._is_ending:
            threading.Event().wait()

    def _send(self, message: Message) -> None:
        # Where it cannot be sent the connection is over, as reading will show.
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
            # Beside this thread, which goes on listening.
            who = f"process {message['lost']} on {message['host']}"
            about = (who, message["why"], message["status"], message["doing"])
            threading.Thread(target=self._lose, args=about, daemon=True).start()
        elif "where" in message:
            self._places.put(message["where"])
        elif "heard" in message:
            self._dismissed.set()
        elif "sign" not in message:
            if "refused" in message:
                self.is_leaving = True  # the main thread says why, and ends
            self._answers.put(message)

    def _keep_time(self) -> None:
        signed, sign_secs = 0.0, self._config.heartbeat_secs / SIGNS_OF_LIFE
        while True:
            now = time.monotonic()
            if now > signed + sign_secs:
                signed = now
                self._send({"sign": "of life"})
            # Process 0 does not watch itself: with it the hub stands still, and wakes.
            if self._rank and now > self._heard + self._config.heartbeat_secs:
                return self._lose("process 0", _silent(self._config))
            if now > self._limit[0]:
                return self._name_the_late()
            time.sleep(min(CLOCK_SECS, sign_secs))

    def _lose(self, who: str, why: str, status: int | None = None, doing: str = "") -> None:
        """Another process is gone: end this one, after a while where it may come to the same end by itself."""
        # Where this one's work is over, it does not matter who is gone; and without process 0 nobody answers.
        self._dismissed.set()
        if self.is_leaving or self._lost:
            return None  # who follows the first to go is no news
        self._lost = True
        here = f"this process was at {self.doing!r}"
        if status is None:
            there = f". It was at {doing!r}" if doing else ""
            return self._end(f"{who} is gone: {why}{there}; {here}", EXIT_RESTART, 0.0)
        text = f"{who} ended with status {status}: {why}; {here}"
        return self._end(text, status if status in NOT_WORTH_A_RESTART else EXIT_RESTART, GRACE_SECS)

    def _name_the_late(self) -> None:
        """A wait has taken too long: end this process, and say who has not come."""
        end_within(NAMING_SECS, EXIT_RESTART)
        doing, (_, setting) = self.doing, self._limit
        self._send({"where": True})
        try:
            missing = _missing(self._places.get(timeout=ANSWER_SECS), doing)
        except queue.Empty:
            missing = "process 0 does not answer"
        with nothing_in_the_way():
            tell(thread_stacks(), sys.__stderr__)
        secs = getattr(self._config, setting)
        text = f"waited {secs:.0f} s (distributed.{setting}) for {doing!r}; {missing}"
        self._send({"bye": EXIT_RESTART, "why": text[:LONGEST_REASON]})
        self._end(text, EXIT_RESTART, 0.0)

    def _end(self, text: str, status: int, grace_secs: float) -> None:
        end_within(grace_secs + LAST_WORDS_SECS, status)
        time.sleep(grace_secs)
        self._is_ending = True
        hint = "; start the same command again to go on from the last checkpoint" if status == EXIT_RESTART else ""
        line = f"{LostError.__name__}: {text}{hint}"
        for write in (say_last, self.log):
            with nothing_in_the_way():
                write(line)
        # The others know as much: this end is no news to them.
        self._send({"bye": 0, "why": ""})
        self._go_last()
        end_now(status)

    def _go_last(self) -> None:
        if self._hub is not None:
            self._hub.wait_for_the_others(GRACE_SECS + ANSWER_SECS)


def end_now(status: int) -> NoReturn:
    """End the process at once: JAX's own exit waits for processes that may never come."""
    end_within(LAST_WORDS_SECS, status)
    for stream in (sys.stdout, sys.stderr):
        with nothing_in_the_way():
            stream.flush()
    os._exit(status)


def end_within(secs: float, status: int) -> None:
    """End the process after so long, even if a disk or a pipe blocks it."""
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
            # Where nobody listens yet on a port of this host that is free, TCP may connect it with itself.
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
