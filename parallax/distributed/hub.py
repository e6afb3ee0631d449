"""Process 0's end of the lines to all processes, its own among them: who is there, who is gone, who waits for whom."""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallax.distributed.wire import Message, Wire
from parallax.errors import EXIT_BAD_INPUT, EXIT_RESTART

TICK_SECS = 0.2
NAMED_DIFFERENCES = 8


@dataclass
class Member:
    """A process as the hub knows it."""

    wire: Wire
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
        self._complete = False
        self._others_gone = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="hub", daemon=True).start()

    def wait_for_the_others(self, secs: float) -> None:
        """Until all but process 0 have hung up: what ends with it, JAX's coordinator too, would end them unheard."""
        self._others_gone.wait(secs)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(TICK_SECS):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data, key.fileobj)
            self._look_at_the_clock()

    # ---- beginning

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has changed its mind
            connected, _ = self._listener.accept()
            self._selector.register(connected, selectors.EVENT_READ, Wire(connected))

    def _read(self, wire: Wire, connected: socket.socket) -> None:
        messages = wire.receive()
        rank = next((rank for rank, member in self._members.items() if member.wire is wire), None)
        if messages is None:
            self._selector.unregister(connected)
            wire.close()
            if rank is not None:
                self._gone(rank, "its connection was closed")
            return
        for message in messages:
            if rank is not None:
                self._hear(rank, message)
            elif "hello" in message:
                rank = self._welcome(wire, message)

    def _welcome(self, wire: Wire, hello: Message) -> int | None:
        """Its number, once it belongs to us; who does not is told why."""
        if hello.get("token") != self._token or not _is_hello(hello):
            wire.send(_refusal("this coordinator port belongs to another job; give each job a port of its own"))
            return None
        rank, processes, host, seconds = (hello[key] for key in ("hello", "of", "host", "clock"))
        if processes != self._processes:
            counts = f"{self._processes} in process 0, {processes} in process {rank}"
            self._refuse(f"the processes disagree: distributed.num_processes is {counts}", also=wire)
        elif rank in self._members:
            other = self._members[rank].host
            self._refuse(f"distributed.process_id={rank} was given twice: on {other} and on {host}", also=wire)
        elif abs(seconds - self._clock()) > self._clock_secs:
            times = f"{_time(self._clock())} in process 0, {_time(seconds)} in process {rank} on {host}"
            limit = f"distributed.clock_secs={self._clock_secs:.0f} allows; set the clocks"
            self._refuse(f"the clocks disagree: {times}, more than {limit}", also=wire)
        else:
            self._members[rank] = Member(wire, host, time.monotonic())
            self._begin_if_complete()
            return rank
        return None

    def _begin_if_complete(self) -> None:
        if len(self._members) == self._processes:
            self._complete = True
            self._selector.unregister(self._listener)
            self._listener.close()
            self._tell({"all": True})

    def _refuse(self, why: str, *, status: int = EXIT_BAD_INPUT, also: Wire | None = None) -> None:
        self._tell(_refusal(why, status))
        if also is not None:
            also.send(_refusal(why, status))

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
            member.wire.send({"sign": "of life"})
        if "where" in message:
            member.wire.send({"where": self._places()})
        if "bye" in message:
            if member.status is None and message["bye"]:
                self._lose(rank, message["why"], message["bye"])
            member.status = member.status or message["bye"]
            member.wire.send({"heard": "bye"})

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
                member.wire.send(message)


def _is_hello(message: Message) -> bool:
    kinds = {"hello": int, "of": int, "host": str, "clock": float}
    return all(type(message.get(key)) is kind for key, kind in kinds.items())


def _refusal(why: str, status: int = EXIT_BAD_INPUT) -> Message:
    return {"refused": why, "status": status}


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
