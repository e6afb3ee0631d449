"""Messages between processes: one JSON object a line, over TCP."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

LONGEST_BYTES = 1 << 20  # of a line: who sends more is none of us
READ_BYTES = 1 << 16
SEND_SECS = 10.0  # a peer that reads nothing for so long is as good as gone

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
                self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[Message] | None:
        """The messages that have come, None once the connection is over; call it when there is something to read."""
        try:
            read = self.socket.recv(READ_BYTES)
        except OSError:
            read = b""
        self._unread += read
        if not read or len(self._unread) > LONGEST_BYTES:
            return None
        *lines, self._unread = self._unread.split(b"\n")
        try:
            return list(_objects(lines))
        except ValueError:
            return None

    def close(self) -> None:
        self.socket.close()


def _objects(lines: list[bytes]) -> Iterator[Message]:
    for line in lines:
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"{line!r:.80} is no object")
        yield message
