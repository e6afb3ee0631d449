"""Messages between processes: one JSON object a line, over TCP."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

LONGEST_BYTES = 1 << 20  # of a line: who sends more is none of us
DEEPEST_LEVELS = 16  # of objects and lists in each other
READ_BYTES = 1 << 16
SEND_SECS = 10.0  # a peer that reads nothing for so long is as good as gone
UNREAD_BYTES = 4 * LONGEST_BYTES  # that are kept for one who does not read

Message = dict[str, Any]


class Wire:
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
                self.socket.sendall(_line(message))
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
            return list(_objects(lines))
        except (ValueError, RecursionError):
            return None

    def close(self) -> None:
        self.socket.close()


class PatientWire(Wire):
    """A wire that waits for nobody: what the other end does not read is kept, and too much of it ends the connection.

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
        self._unsent += _line(message)
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
        """From now on nothing is sent, and what is read next is the end."""
        self._unsent, self.is_cut = bytearray(), True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _objects(lines: list[bytes]) -> Iterator[Message]:
    for line in lines:
        message = json.loads(line)
        if not isinstance(message, dict) or not _is_within(message, DEEPEST_LEVELS):
            raise ValueError(f"{line!r:.80} is no message")
        yield message


def _is_within(value: Any, levels: int) -> bool:
    """Whether objects and lists lie in each other at most so deep: comparing and sending them on recurses too."""
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_within(each, levels - 1) for each in inner)
