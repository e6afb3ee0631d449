"""The connection of a process to the coordinator: its phase, barriers, lost processes, and time limits."""

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from parallax.config.sections import DistributedConfig
from parallax.errors import EXIT_RESTART, NOT_WORTH_A_RESTART, ConfigError, LostError
from parallax.processes.coordinator import Coordinator, Message, ProcessReport, no_heartbeat
from parallax.processes.deadline import TIMER_SECS, Deadline
from parallax.processes.exit import EXIT_LIMIT_SECS, exit_now, exit_within, print_stacks, report_lost
from parallax.storage.files import object_of

CONNECT_SECS = 0.2  # between two attempts to connect
SEND_SECS = 10  # if process 0 reads nothing for this time, its connection counts as closed
HEARTBEATS_PER_LIMIT = 4  # sent in the time after which a silent process is lost
ANSWER_SECS = 2.0
# How long a process that has finished waits for the others, and they for its last message.
GRACE_SECS = 3.0
LATE_REPORT_SECS = 15.0  # limit for the last messages, with the coordinator's answer about late processes
START_BARRIER = "the other processes to start"
LONGEST_REASON = 4096  # characters of an error; those of compilers can have megabytes


class CoordinatorClient(Deadline):
    """A process's connection to the coordinator.

    One thread reads messages; others send heartbeats and enforce time limits. If a process is lost or a wait takes too
    long, they report it and end this process, whatever its main thread is doing: a collective that waits for a lost
    process would not return.

    Args:
        hello: the rank, number of processes, token and host of this process, as `Coordinator` expects them.
        coordinator: only in process 0, which ends last.

    Raises:
        LostError: the coordinator does not answer within start_secs, or not all processes have connected by then.
        ConfigError: the processes disagree about who they are.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hello: Message,
        config: DistributedConfig,
        coordinator: Coordinator | None = None,
    ):
        super().__init__(config)
        self.is_leaving = False  # the main thread has announced the end
        self._rank, self._coordinator = hello["rank"], coordinator
        self._answers: dict[str, queue.Queue[Message]] = {}  # by what is waited for
        self._phases: queue.Queue[Mapping[str, list]] = queue.Queue()
        self._last_message, self._is_exiting, self._is_lost_reported = time.monotonic(), False, False
        self._may_exit = threading.Event()  # the coordinator has confirmed the end, or will not answer any more
        self._sending = threading.Lock()
        self._socket = _connected_socket(address, config.start_secs)
        self._send(hello | {"clock": time.time()})
        for act in (self._read_messages, self._send_heartbeats):
            threading.Thread(target=act, name="coordinator client", daemon=True).start()
        self._answer(START_BARRIER, "start_secs")

    def set_phase(self, phase: str, setting: str) -> None:
        """The same, and the others learn of it if they have to wait."""
        super().set_phase(phase, setting)
        self._send({"phase": phase})

    def barrier(self, name: str, values: Mapping[str, Any], setting: str) -> Message:
        """Wait until all processes have reached it; returns process 0's values and all differences."""
        before = self._phase  # its limit does not include the barrier
        self.set_phase(name, setting)
        self._send({"barrier": name, "values": dict(values)})
        answer = self._answer(name, setting)
        self._phase = before
        self._send({"phase": before.name})
        return answer

    def barrier_in_thread(self, name: str) -> None:
        """Wait until all processes have reached it, beside the main thread, whose phase stays. There is no limit but
        that of whoever waits for the thread."""
        self._send({"barrier": name, "values": {}})
        self._answers_to(name).get()

    def report(self, numbers: Mapping[str, float]) -> None:
        """Send numbers to process 0, without waiting for an answer."""
        self._send({"report": dict(numbers)})

    def take_reports(self) -> list[ProcessReport]:
        """In process 0, the reports of all processes since the last call; none in the others."""
        return [] if self._coordinator is None else self._coordinator.take_reports()

    def leave(self, status: int, reason: str) -> None:
        """Tell the others that this process ends; when this returns, they have received it, if they still can.

        After an error process 0 waits until they have ended.
        """
        self.is_leaving = True
        self.close()
        self._send({"exit": status, "reason": reason[:LONGEST_REASON]})
        self._may_exit.wait(ANSWER_SECS)
        if status:
            self._let_others_exit()

    def wait_for_lost(self) -> None:
        """Call after an error that a lost process may have caused: if one is lost, this does not return."""
        time.sleep(GRACE_SECS)
        if self._is_exiting:
            threading.Event().wait()

    def _send(self, message: Message) -> None:
        # If it cannot be sent, the connection has ended, which reading will show.
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _answer(self, name: str, setting: str) -> Message:
        secs = getattr(self._config, setting) + ANSWER_SECS
        try:
            answer = self._answers_to(name).get(timeout=secs)
        except queue.Empty:
            waited = f"waited {secs:.0f} s (distributed.{setting}) for {name}"
            raise LostError(f"{waited}, and process 0 does not answer") from None
        if "refused" in answer:
            kind = LostError if answer.get("status") == EXIT_RESTART else ConfigError
            raise kind(answer["refused"])
        return answer

    def _answers_to(self, name: str) -> queue.Queue[Message]:
        return self._answers.setdefault(name, queue.Queue())

    # ---- the threads

    def _read_messages(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._socket.makefile("rb"):
                self._last_message = time.monotonic()
                self._on_message(object_of(line, odd_numbers=True))
        self._on_lost("process 0", "its connection was closed")

    def _on_message(self, message: Message) -> None:
        if "lost" in message:
            # In another thread, since this one must continue to read.
            process = f"process {message['lost']} on {message['host']}"
            about = (process, message["reason"], message["status"], message["phase"])
            threading.Thread(target=self._on_lost, args=about, daemon=True).start()
        elif "phases" in message:
            self._phases.put(message["phases"])
        elif "confirmed" in message:
            self._may_exit.set()
        elif "heartbeat" not in message:
            if "refused" in message:
                self.is_leaving = True  # the main thread reports the reason and ends
            self._answers_to(message.get("released", START_BARRIER)).put(message)

    def _send_heartbeats(self) -> None:
        sent, heartbeat_secs = 0.0, self._config.heartbeat_secs / HEARTBEATS_PER_LIMIT
        while True:
            now = time.monotonic()
            if now > sent + heartbeat_secs:
                sent = now
                self._send({"heartbeat": True})
            # Process 0 does not watch itself: if it is suspended, so is the coordinator.
            if self._rank and now > self._last_message + self._config.heartbeat_secs:
                return self._on_lost("process 0", no_heartbeat(self._config))
            time.sleep(min(TIMER_SECS, heartbeat_secs))

    def _on_lost(self, process: str, reason: str, status: int | None = None, phase: str = "") -> None:
        """End this process because another one is lost; with a delay if it may end in the same way by itself."""
        # If the work here is done, it does not matter; and without process 0 there are no answers.
        self._may_exit.set()
        if self.is_leaving or self._is_lost_reported:
            return None  # only the first lost process is reported
        self._is_lost_reported = True
        here = f"this process was at {self.phase!r}"
        if status is None:
            there = f". It was at {phase!r}" if phase else ""
            return self._exit(f"{process} is gone: {reason}{there}; {here}", EXIT_RESTART, 0.0)
        text = f"{process} ended with status {status}: {reason}; {here}"
        return self._exit(text, status if status in NOT_WORTH_A_RESTART else EXIT_RESTART, GRACE_SECS)

    def _on_limit(self, text: str) -> None:
        """End this process because a wait has taken too long, and name the processes that are late."""
        exit_within(LATE_REPORT_SECS, EXIT_RESTART)
        self._send({"phases": True})
        try:
            text = f"{text}; {_late(self._phases.get(timeout=ANSWER_SECS), self.phase)}"
        except queue.Empty:
            text = f"{text}; process 0 does not answer"
        print_stacks()
        self._send({"exit": EXIT_RESTART, "reason": text[:LONGEST_REASON]})
        self._exit(text, EXIT_RESTART, 0.0)

    def _exit(self, text: str, status: int, grace_secs: float) -> None:
        exit_within(grace_secs + EXIT_LIMIT_SECS, status)
        time.sleep(grace_secs)
        self._is_exiting = True
        report_lost(text, status, self.log)
        # The others know it already, so this end is not reported to them.
        self._send({"exit": 0, "reason": ""})
        self._let_others_exit()
        exit_now(status)

    def _let_others_exit(self) -> None:
        if self._coordinator is not None:
            self._coordinator.wait_for_others(GRACE_SECS + ANSWER_SECS)


def _connected_socket(address: tuple[str, int], secs: float) -> socket.socket:
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


def _late(phases: Mapping[str, list], phase: str) -> str:
    late = [f"{rank} (at {other!r} for {since:.0f} s)" for rank, (other, since) in phases.items() if other != phase]
    return f"missing: process {', '.join(late)}" if late else "all processes are at it"
