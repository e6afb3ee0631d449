"""A network between a client and a server, which can stop or break."""

import contextlib
import socket
import threading

UP, DOWN = "to the server", "to the client"


class Relay:
    """Passes one connection on to `server`; clients connect to `address`."""

    def __init__(self, server):
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._open = {direction: threading.Event() for direction in (UP, DOWN)}
        self.release()
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, *directions):
        """Pass nothing on in these directions until `release`; the connection stays open."""
        for direction in directions:
            self._open[direction].clear()

    def release(self):
        for event in self._open.values():
            event.set()

    def cut(self):
        """Close the connection at both ends."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        client, _ = self._listener.accept()
        self._listener.close()
        server = socket.create_connection(self._server)
        self._ends = (client, server)
        for source, target, direction in ((client, server, UP), (server, client, DOWN)):
            threading.Thread(target=self._pass_on, args=(source, target, self._open[direction]), daemon=True).start()

    def _pass_on(self, source, target, is_open):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                is_open.wait()
                target.sendall(data)
        self.cut()
