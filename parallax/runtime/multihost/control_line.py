"""The line between process 0 and each process of a job: messages, who is there, who is gone, who waits for whom.

Process 0 has a `Hub`; all processes, itself too, connect to it by a `ControlLine`. Messages are JSON objects, one on a
line, over TCP.
"""

import contextlib
import errno
import faulthandler
import hmac
import json
import math
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from parallax.runtime.errors import EXIT_BAD_INPUT, EXIT_RESTART, NOT_WORTH_A_RESTART, ConfigError, LostError
from parallax.runtime.files import object_of

TICK_SECS = 0.2
# How long a process whose work has ended waits for the word of the others, and they for its last words.
GRACE_SECS = 3.0
# Messages.
LONGEST_BYTES = 1 << 20  # of a line: who sends more is none of us
READ_BYTES = 1 << 16
SEND_SECS = 10.0  # a peer that reads nothing for so long is as good as gone
UNREAD_BYTES = 4 * LONGEST_BYTES  # that are kept for one who does not read
# The hub.
NAMED_DIFFERENCES = 8
# Who has connected, and has not yet shown the job's token: how many of them, how long, and what they may send.
MOST_STRANGERS = 256
STRANGER_SECS = 30.0
LONGEST_HELLO_BYTES = 1 << 14
LONGEST_HOST = 255
UNPASSED = 64  # points that a process says it has reached, and the others have not: it waits at one
# What processes say. What else they may send is not looked at.
HELLO = {"hello": int, "of": int, "host": str, "clock": float}
SAID = {"doing": str, "reached": str, "values": dict, "bye": int, "why": str}
NEEDS = {"reached": "values", "bye": "why"}
# A line.
CONNECT_SECS = 0.2  # between two attempts
SIGNS_OF_LIFE = 4  # in the time after which a silent process is lost
ANSWER_SECS = 2.0
LAST_WORDS_SECS = 10.0  # to write them, and to hear that the others have gone; then the process ends without
NAMING_SECS = 15.0  # the same, and for the hub to say who is late

Message = dict[str, Any]


class MessageSocket:
    """One end of a connection; `send` may be called from any thread, `receive` from one."""

    def __init__(self, connected: socket.socket):
        self.socket = connected
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(SEND_SECS)
        self._unread = b""
        self._sending = threading.Lock()

    def send(self, message: Message) -> bool:
        """Whether it could be sent; False if the other end is gone."""
        try:
            with self._sending:
                self.socket.sendall(_as_line(message))
        except OSError:
            return False
        return True

    def receive(self, longest_bytes: int = LONGEST_BYTES) -> list[Message] | None:
        """The messages that have come, None once the connection is over; call it when there is something to read.

        Who sends what is no message, or one of more than `longest_bytes`, is none of us: that ends it too.
        """
        try:
            read = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            read = b""
        self._unread += read
        *lines, self._unread = self._unread.split(b"\n")
        if not read or max(map(len, (*lines, self._unread))) > longest_bytes:
            return None
        try:
            return [object_of(line, odd_numbers=True) for line in lines]
        except ValueError:
            return None

    def close(self) -> None:
        self.socket.close()


class QueuedMessageSocket(MessageSocket):
    """A socket that never blocks: unsent messages are queued, and too many of them end the connection.

    For one thread.
    """

    def __init__(self, connected: socket.socket):
        super().__init__(connected)
        self.socket.setblocking(False)
        self._unsent, self.is_cut = bytearray(), False

    @property
    def is_behind(self) -> bool:
        """Whether there is something to `flush` once the socket takes more."""
        return bool(self._unsent)

    def send(self, message: Message) -> bool:
        """Whether the other end may yet read it; False if it is gone."""
        waits = self.is_behind
        self._unsent += _as_line(message)
        if len(self._unsent) > UNREAD_BYTES:
            self._cut()
        return not self.is_cut and (waits or self.flush())

    def flush(self) -> bool:
        """Send what the socket takes; False if the other end is gone."""
        try:
            del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            return True
        except OSError:
            self._cut()
        return not self.is_cut

    def receive(self, longest_bytes: int = LONGEST_BYTES) -> list[Message] | None:
        return None if self.is_cut else super().receive(longest_bytes)

    def _cut(self) -> None:
        """End the connection."""
        self._unsent, self.is_cut = bytearray(), True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def _as_line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


@dataclass
class Member:
    """A process as the hub knows it."""

    wire: QueuedMessageSocket
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
        silence_secs: a process that says nothing for so long is lost; it sends a sign of life more often.
        clock_secs: clocks may differ by so much.
    """

    def __init__(
        self,
        listener: socket.socket,
        processes: int,
        token: str,
        *,
        start_secs: float,
        silence_secs: float,
        clock_secs: float,
        clock: Callable[[], float] = time.time,
    ):
        self._listener, self._processes, self._token = listener, processes, token
        self._start_secs, self._silence_secs, self._clock_secs = start_secs, silence_secs, clock_secs
        self._clock = clock
        self._begun = time.monotonic()
        self._members: dict[int, Member] = {}
        self._rank_of: dict[QueuedMessageSocket, int] = {}
        self._strangers: dict[QueuedMessageSocket, float] = {}  # and since when, the longest first
        self._complete = False
        self._others_gone = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="hub", daemon=True).start()

    def wait_for_the_others(self, secs: float) -> None:
        """Wait until all but process 0 have disconnected: JAX's coordinator ends with process 0, and would end them."""
        self._others_gone.wait(secs)

    def _serve(self) -> None:
        next_look = 0.0
        while True:
            for key, events in self._selector.select(TICK_SECS):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj.fileno() >= 0:  # it may have been closed since it was ready
                    self._attend(key.data, events)
            if time.monotonic() > next_look:
                self._look_at_the_clock()
                next_look = time.monotonic() + TICK_SECS

    def _attend(self, wire: QueuedMessageSocket, events: int) -> None:
        """Send what can be sent, and read what has arrived."""
        if events & selectors.EVENT_WRITE:
            wire.flush()
        if events & selectors.EVENT_READ:
            self._read(wire)
        self._watch(wire)

    def _watch(self, wire: QueuedMessageSocket) -> None:
        """Wake where there is something to read, and where what is unsent can be sent."""
        if wire.socket.fileno() >= 0:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.is_behind else 0)
            self._selector.modify(wire.socket, events, wire)

    # ---- beginning

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
            wire = QueuedMessageSocket(connected)
        except OSError as error:  # it has changed its mind, or no more files may be opened: then a stranger has to go
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                self._hang_up(next(iter(self._strangers)))
            return
        self._selector.register(connected, selectors.EVENT_READ, wire)
        self._strangers[wire] = time.monotonic()
        if len(self._strangers) > MOST_STRANGERS:
            self._hang_up(next(iter(self._strangers)))

    def _hang_up(self, wire: QueuedMessageSocket, why: str = "its connection was closed") -> None:
        """Close a connection; if it is a member's, that one is gone."""
        self._strangers.pop(wire, None)
        self._selector.unregister(wire.socket)
        wire.close()
        rank = self._rank_of.pop(wire, None)
        if rank is not None:
            self._gone(rank, why)

    def _read(self, wire: QueuedMessageSocket) -> None:
        stranger = wire in self._strangers
        messages = wire.receive(LONGEST_HELLO_BYTES) if stranger else wire.receive()
        if messages is None:
            return self._hang_up(wire)
        for message in messages:
            if wire.is_cut:
                break
            if wire in self._strangers:
                refusal = self._welcome(wire, message)
                if refusal is not None:
                    wire.send(refusal)
                    return self._hang_up(wire)
            elif _is(message, SAID) and len(self._members[self._rank_of[wire]].reached) < UNPASSED:
                self._hear(self._rank_of[wire], message)
            else:
                return self._hang_up(wire, "it has sent what no process of the job sends")
        return None

    def _welcome(self, wire: QueuedMessageSocket, hello: Message) -> Message | None:
        """Accept a process of the job, or return why it is refused."""
        if not _is_same(hello.get("token"), self._token):
            return _refusal("this coordinator port belongs to another job; give each job a port of its own")
        if not _is(hello, HELLO, whole=True) or not _is_name(hello["host"]) or not math.isfinite(hello["clock"]):
            return _refusal("this is not how a process of the job begins; is another program using its token?")
        rank, processes, host, seconds = (hello[key] for key in HELLO)
        if processes != self._processes:
            counts = f"{self._processes} in process 0, {processes} in process {rank}"
            return self._refuse(f"the processes disagree: distributed.num-processes is {counts}")
        if not 0 <= rank < processes:
            return _refusal(f"distributed.process-id={rank} is none of {processes} processes; use 0 to {processes - 1}")
        if rank in self._members:
            other = self._members[rank].host
            return self._refuse(f"distributed.process-id={rank} was given twice: on {other} and on {host}")
        if abs(seconds - self._clock()) > self._clock_secs:
            times = f"{_time(self._clock())} in process 0, {_time(seconds)} in process {rank} on {host}"
            limit = f"distributed.clock_secs={self._clock_secs:.0f} allows; set the clocks"
            return self._refuse(f"the clocks disagree: {times}, more than {limit}")
        del self._strangers[wire]
        self._members[rank], self._rank_of[wire] = Member(wire, host, time.monotonic()), rank
        self._begin_if_complete()
        return None

    def _begin_if_complete(self) -> None:
        if len(self._members) == self._processes:
            self._complete = True
            self._selector.unregister(self._listener)
            self._listener.close()
            for stranger in list(self._strangers):
                self._hang_up(stranger)
            self._tell({"all": True})

    def _refuse(self, why: str, *, status: int = EXIT_BAD_INPUT) -> Message:
        """Tell all members that the job cannot start; returns the message."""
        self._tell(_refusal(why, status))
        return _refusal(why, status)

    # ---- what processes say

    def _hear(self, rank: int, message: Message) -> None:
        member = self._members[rank]
        member.heard = time.monotonic()
        if "doing" in message:
            member.doing, member.since = message["doing"], time.monotonic()
        if "reached" in message:
            member.reached[message["reached"]] = message["values"]
            self._pass(message["reached"])
        if "sign" in message:
            self._send(member, {"sign": "of life"})
        if "where" in message:
            self._send(member, {"where": self._places()})
        if "bye" in message:
            if member.status is None and message["bye"]:
                self._lose(rank, message["why"], message["bye"])
            member.status = member.status or message["bye"]
            self._send(member, {"heard": "bye"})

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
        if not self._complete and now > self._begun + self._start_secs:
            missing = [rank for rank in range(self._processes) if rank not in self._members]
            self._refuse(
                f"{len(self._members)} of {self._processes} processes are there after {self._start_secs:.0f} s "
                f"(distributed.start_secs); missing: {', '.join(map(str, missing))}",
                status=EXIT_RESTART,
            )
            self._begun = float("inf")
        for stranger in [wire for wire, since in self._strangers.items() if now > since + STRANGER_SECS]:
            self._hang_up(stranger)
        for rank, member in list(self._members.items()):
            if self._complete and now > member.heard + self._silence_secs:
                self._gone(rank, f"it has said nothing for {self._silence_secs:.0f} s (distributed.heartbeat_secs)")

    def _gone(self, rank: int, why: str) -> None:
        if self._members[rank].status is None:
            self._lose(rank, why, None)
        self._members[rank].heard = float("inf")  # gone, and lost no more
        if all(member.heard == float("inf") for other, member in self._members.items() if other):
            self._others_gone.set()

    def _lose(self, rank: int, why: str, status: int | None) -> None:
        member = self._members[rank]
        self._tell({"lost": rank, "host": member.host, "why": why, "status": status, "doing": member.doing}, but=rank)

    def _tell(self, message: Message, but: int | None = None) -> None:
        for rank, member in self._members.items():
            if rank != but:
                self._send(member, message)

    def _send(self, member: Member, message: Message) -> None:
        # Where it cannot be sent the connection is over, as reading will show.
        if member.wire.send(message):
            self._watch(member.wire)


def _is(message: Message, kinds: Mapping[str, type], *, whole: bool = False) -> bool:
    """Whether what it says is of these types, and nothing is left out: `whole` is all of them."""
    known = [key for key in kinds if whole or key in message]
    needed = [NEEDS[key] for key in known if key in NEEDS]
    return all(type(message.get(key)) is kinds[key] for key in (*known, *needed))


def _is_same(token: object, ours: str) -> bool:
    spelled = [text.encode(errors="surrogatepass") for text in (token, ours) if isinstance(text, str)]
    return len(spelled) == 2 and hmac.compare_digest(*spelled)


def _is_name(host: str) -> bool:
    return len(host) <= LONGEST_HOST and host.isprintable()


def _refusal(why: str, status: int = EXIT_BAD_INPUT) -> Message:
    return {"refused": why, "status": status}


def _time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a year that no calendar has
        return f"{seconds:g} s since 1970"


class ControlLine:
    """A process's connection to the hub. One thread listens, sends heartbeats and enforces timeouts.

    When a process is lost, or a wait takes too long, that thread says so and ends this process, whatever its main
    thread is doing: a collective that waits for a dead peer would not come back.

    Args:
        hub: where this is process 0, which goes last.

    Raises:
        LostError: the hub does not answer within `start_secs`, or not all processes are there then.
        ConfigError: the processes disagree about who they are.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hello: Message,
        *,
        start_secs: float,
        silence_secs: float,
        hub: Hub | None = None,
    ):
        self._rank = hello["hello"]
        self._log: Callable[[str], None] = lambda text: None
        self._answers: queue.Queue[Message] = queue.Queue()
        self._places: queue.Queue[Message] = queue.Queue()
        self._leaving, self._ending = threading.Event(), threading.Event()  # by the main thread, and by that one
        self._hub = hub
        self._lost: str | None = None
        self._doing, self._limit = "starting", (float("inf"), 0.0, "")
        self._wire = _connect(address, start_secs)
        self._silence_secs, self._sign_secs = silence_secs, silence_secs / SIGNS_OF_LIFE
        self._wire.send(hello | {"clock": time.time()})
        threading.Thread(target=self._listen, name="control line", daemon=True).start()
        self._answer(start_secs + ANSWER_SECS, "the other processes to start", "distributed.start_secs")

    def log_with(self, log: Callable[[str], None]) -> None:
        """Where last words go, besides stderr."""
        self._log = log

    def set_phase(self, what: str, secs: float, setting: str) -> None:
        """From now on this process is at `what`, for at most so many seconds, which `setting` says."""
        self._doing, self._limit = what, (time.monotonic() + secs, secs, setting)
        self._wire.send({"doing": what})

    def meet(self, what: str, values: Mapping[str, Any], secs: float, setting: str) -> Message:
        """Wait until all processes have come as far as `what`; returns process 0's values, and what differs."""
        before, (until, limit_secs, limit_setting) = self._doing, self._limit
        left = until - time.monotonic()
        self.set_phase(what, secs, setting)
        self._wire.send({"reached": what, "values": dict(values)})
        answer = self._answer(secs + ANSWER_SECS, what, setting)
        # Back to where it was, whose limit the meeting has not used up.
        self._doing, self._limit = before, (time.monotonic() + left, limit_secs, limit_setting)
        self._wire.send({"doing": before})
        return answer

    @property
    def doing(self) -> str:
        """Where this process is."""
        return self._doing

    @property
    def is_leaving(self) -> bool:
        return self._leaving.is_set()

    def leave(self, status: int, why: str) -> None:
        """Tell the others that this process ends; they have heard it when this returns, if they still can.

        With an error process 0 waits until they have gone.
        """
        self._leaving.set()
        self._limit = (float("inf"), 0.0, "")
        self._say_goodbye(status, why)
        if status:
            self._go_last()

    def _say_goodbye(self, status: int, why: str) -> None:
        if self._wire.send({"bye": status, "why": why}):
            with_answer = time.monotonic() + ANSWER_SECS
            while time.monotonic() < with_answer and self._lost is None:
                try:
                    if "heard" in self._answers.get(timeout=TICK_SECS):
                        return
                except queue.Empty:
                    continue

    def wait_for_word(self) -> None:
        """After an error that a lost process may have caused: if one is, this does not return."""
        time.sleep(GRACE_SECS)
        if self._ending.is_set():
            threading.Event().wait()

    # ---- the thread

    def _listen(self) -> None:
        signed, heard = 0.0, time.monotonic()
        selector = selectors.DefaultSelector()
        selector.register(self._wire.socket, selectors.EVENT_READ)
        while True:
            if selector.select(min(TICK_SECS, self._sign_secs)):
                messages, heard = self._wire.receive(), time.monotonic()
                if messages is None:
                    return self._lose({"lost": 0, "why": "its connection was closed", "status": None})
                for message in messages:
                    self._hear(message)
                if any("refused" in message for message in messages):
                    return None  # the main thread says so, and ends
            if time.monotonic() > signed + self._sign_secs:
                signed = time.monotonic()
                self._wire.send({"sign": "of life"})
            # Process 0 does not watch itself: with it the hub stands still, and wakes.
            if self._rank and time.monotonic() > heard + self._silence_secs:
                why = f"it has said nothing for {self._silence_secs:.0f} s (distributed.heartbeat_secs)"
                return self._lose({"lost": 0, "why": why, "status": None})
            if time.monotonic() > self._limit[0]:
                self._too_late()

    def _hear(self, message: Message) -> None:
        if "lost" in message:
            # Beside this thread, which goes on listening and giving signs of life.
            threading.Thread(target=self._lose, args=(message,), daemon=True).start()
        elif "where" in message:
            self._places.put(message["where"])
        elif "sign" not in message:
            self._answers.put(message)

    def _lose(self, message: Message) -> None:
        """Another process is gone: end this one, after a while where it may come to the same end by itself."""
        status = message.get("status")
        if self._leaving.is_set():
            # This one's work is over, whoever else is gone; without process 0 nobody will say that it was heard.
            return self._answers.put({"heard": "bye"})
        if self._lost is not None:
            return None  # who follows the first to go is no news
        self._lost = who = f"process {message['lost']}{_on(message)}"
        here = f"this process was at {self._doing!r}"
        if status is None:
            there = f". It was at {message['doing']!r}" if "doing" in message else ""
            return self._end(f"{who} is gone: {message.get('why')}{there}; {here}", EXIT_RESTART, 0.0)
        text = f"{who} ended with status {status}: {message.get('why')}; {here}"
        return self._end(text, status if status in NOT_WORTH_A_RESTART else EXIT_RESTART, GRACE_SECS)

    def _too_late(self) -> None:
        _, secs, setting = self._limit
        self._limit = (float("inf"), 0.0, "")
        threading.Thread(target=self._name_the_late, args=(secs, setting), daemon=True).start()

    def _name_the_late(self, secs: float, setting: str) -> None:
        end_within(NAMING_SECS, EXIT_RESTART)
        doing = self._doing
        self._wire.send({"where": True})
        try:
            places = self._places.get(timeout=ANSWER_SECS)
        except queue.Empty:
            places = None
        missing = "process 0 does not answer" if places is None else _missing(places, doing)
        with nothing_in_the_way():
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        text = f"waited {secs:.0f} s ({setting}) for {doing!r}; {missing}"
        self._wire.send({"bye": EXIT_RESTART, "why": text})
        self._end(text, EXIT_RESTART, 0.0)

    def _end(self, text: str, status: int, grace_secs: float) -> None:
        end_within(grace_secs + LAST_WORDS_SECS, status)
        time.sleep(grace_secs)
        self._ending.set()
        hint = "; start the same command again to go on from the last checkpoint" if status == EXIT_RESTART else ""
        line = f"{LostError.__name__}: {text}{hint}"
        for write in (say_last, self._log):
            with nothing_in_the_way():
                write(line)
        # The others know as much: this end is no news to them.
        self._wire.send({"bye": 0, "why": ""})
        self._go_last()
        end_now(status)

    def _go_last(self) -> None:
        if self._hub is not None:
            self._hub.wait_for_the_others(GRACE_SECS + ANSWER_SECS)

    def _answer(self, secs: float, what: str, setting: str) -> Message:
        try:
            answer = self._answers.get(timeout=secs)
        except queue.Empty:
            raise LostError(f"waited {secs:.0f} s ({setting}) for {what}, and process 0 does not answer") from None
        if "refused" in answer:
            kind = LostError if answer.get("status") == EXIT_RESTART else ConfigError
            raise kind(answer["refused"])
        return answer


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


def _connect(address: tuple[str, int], secs: float) -> MessageSocket:
    host, port = address
    deadline = time.monotonic() + secs
    while True:
        try:
            connected = socket.create_connection(address, timeout=max(deadline - time.monotonic(), CONNECT_SECS))
            # Where nobody listens yet on a port of this host that is free, TCP may connect it with itself.
            if connected.getsockname() != connected.getpeername():
                return MessageSocket(connected)
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


def _on(message: Message) -> str:
    return f" on {message['host']}" if "host" in message else ""
