"""Process 0's end of the lines to all processes, its own among them: who is there, who is gone, who waits for whom."""

import errno
import hmac
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallax.runtime.errors import EXIT_BAD_INPUT, EXIT_RESTART
from parallax.runtime.multihost.wire import Message, PatientWire

TICK_SECS = 0.2
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


@dataclass
class Member:
    """A process as the hub knows it."""

    wire: PatientWire
    host: str
    heard: float
    doing: str = "starting"
    since: float = 0.0
    status: int | None = None  # once it has said that it ends
    reached: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class Hub:
    """Answers all processes from one thread, until the process ends.

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
        self._rank_of: dict[PatientWire, int] = {}
        self._strangers: dict[PatientWire, float] = {}  # and since when, the longest first
        self._complete = False
        self._others_gone = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="hub", daemon=True).start()

    def wait_for_the_others(self, secs: float) -> None:
        """Until all but process 0 have hung up: what ends with it, JAX's coordinator too, would end them unheard."""
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

    def _attend(self, wire: PatientWire, events: int) -> None:
        """Write what can be written, and read what has come."""
        if events & selectors.EVENT_WRITE:
            wire.flush()
        if events & selectors.EVENT_READ:
            self._read(wire)
        self._watch(wire)

    def _watch(self, wire: PatientWire) -> None:
        """Wake where there is something to read, and where what is unsent can be sent."""
        if wire.socket.fileno() >= 0:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.is_behind else 0)
            self._selector.modify(wire.socket, events, wire)

    # ---- beginning

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
            wire = PatientWire(connected)
        except OSError as error:  # it has changed its mind, or no more files may be opened: then a stranger has to go
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                self._hang_up(next(iter(self._strangers)))
            return
        self._selector.register(connected, selectors.EVENT_READ, wire)
        self._strangers[wire] = time.monotonic()
        if len(self._strangers) > MOST_STRANGERS:
            self._hang_up(next(iter(self._strangers)))

    def _hang_up(self, wire: PatientWire, why: str = "its connection was closed") -> None:
        """Close a connection; if it is a member's, that one is gone."""
        self._strangers.pop(wire, None)
        self._selector.unregister(wire.socket)
        wire.close()
        rank = self._rank_of.pop(wire, None)
        if rank is not None:
            self._gone(rank, why)

    def _read(self, wire: PatientWire) -> None:
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

    def _welcome(self, wire: PatientWire, hello: Message) -> Message | None:
        """Make a member of who belongs to us; who does not is told why, and if the job cannot be, all are."""
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
        """Tell all members that the job cannot be; returns what they are told."""
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
