"""A process's line to the hub: what it says of itself, what it hears of the others, and what it does then."""

import contextlib
import faulthandler
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from parallax.runtime.errors import EXIT_RESTART, NOT_WORTH_A_RESTART, ConfigError, LostError
from parallax.runtime.multihost.hub import Hub
from parallax.runtime.multihost.wire import Message, Wire

TICK_SECS = 0.2
CONNECT_SECS = 0.2  # between two attempts
SIGNS_OF_LIFE = 4  # in the time after which a silent process is lost
ANSWER_SECS = 2.0
# How long a process whose work has ended waits for the word of the others, and they for its last words.
GRACE_SECS = 3.0
LAST_WORDS_SECS = 10.0  # to write them, and to hear that the others have gone; then the process ends without
NAMING_SECS = 15.0  # the same, and for the hub to say who is late


class Peers:
    """The other processes, as one of them sees them. One thread listens, gives signs of life, and keeps the limits.

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
        threading.Thread(target=self._listen, name="peers", daemon=True).start()
        self._answer(start_secs + ANSWER_SECS, "the other processes to start", "distributed.start_secs")

    def log_with(self, log: Callable[[str], None]) -> None:
        """Where last words go, besides stderr."""
        self._log = log

    def at(self, what: str, secs: float, setting: str) -> None:
        """From now on this process is at `what`, for at most so many seconds, which `setting` says."""
        self._doing, self._limit = what, (time.monotonic() + secs, secs, setting)
        self._wire.send({"doing": what})

    def meet(self, what: str, values: Mapping[str, Any], secs: float, setting: str) -> Message:
        """Wait until all processes have come as far as `what`; returns process 0's values, and what differs."""
        before, (until, limit_secs, limit_setting) = self._doing, self._limit
        left = until - time.monotonic()
        self.at(what, secs, setting)
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
    """End the process at once: JAX's own way out waits for processes that may never come."""
    end_within(LAST_WORDS_SECS, status)
    for stream in (sys.stdout, sys.stderr):
        with nothing_in_the_way():
            stream.flush()
    os._exit(status)


def end_within(secs: float, status: int) -> None:
    """End the process after so long, whatever then still holds it: a disk or a pipe to which nothing can be written."""
    late = threading.Timer(secs, os._exit, (status,))
    late.daemon = True
    late.start()


def say_last(line: str) -> None:
    """Last words, on stderr."""
    print(line, file=sys.stderr, flush=True)


def nothing_in_the_way() -> contextlib.AbstractContextManager:
    """A full disk, or a stderr that is closed, does not keep the process from its end."""
    return contextlib.suppress(OSError, ValueError)


def _connect(address: tuple[str, int], secs: float) -> Wire:
    host, port = address
    deadline = time.monotonic() + secs
    while True:
        try:
            connected = socket.create_connection(address, timeout=max(deadline - time.monotonic(), CONNECT_SECS))
            # Where nobody listens yet on a port of this host that is free, TCP may connect it with itself.
            if connected.getsockname() != connected.getpeername():
                return Wire(connected)
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
