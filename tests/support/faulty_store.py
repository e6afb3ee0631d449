"""moto's S3 server with the faults that a test asks for: what a store, or the network before it, does to requests."""

import contextlib
import itertools
import logging
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest

from parallax.storage import buckets

BUCKET = "bucket"
SECRET = "a-secret-that-is-never-shown"


class Request(NamedTuple):
    """A request, and how to answer it. `key` is empty if it is of the bucket, as one for a list is."""

    method: str
    key: str
    environment: dict[str, Any]
    start: Callable
    served: Callable[[], Any]  # by moto

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and not self.key

    def cut(self) -> None:
        """Close the connection without an answer."""
        self.environment["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError("cut by a test")

    def answered(self, status: str, body: str) -> list[bytes]:
        self.start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body.encode()]


class FaultyStore:
    """A server with one bucket. `fault` is given each request: it answers it, cuts it, or returns None for moto."""

    def __init__(self) -> None:
        # Here, since every test imports this module, and moto takes a second.
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._app = DomainDispatcherApplication(create_backend_app)
        self.fault: Callable[[Request], Any] = lambda request: None
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT"))

    def __call__(self, environment: dict[str, Any], start: Callable) -> Any:
        key = environment["PATH_INFO"].removeprefix(f"/{BUCKET}").strip("/")
        request = Request(environment["REQUEST_METHOD"], key, environment, start, lambda: self._app(environment, start))
        answer = self.fault(request)
        return request.served() if answer is None else answer

    @contextlib.contextmanager
    def having(self, fault: Callable[[Request], Any]) -> Iterator[None]:
        self.fault = fault
        yield
        self.fault = lambda request: None

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def store():
    server = FaultyStore()
    yield server
    server.stop()


@pytest.fixture
def bucket(store, monkeypatch, request):
    """A folder of this test's own, in a store that is asked again at once."""
    for name, value in {"ENDPOINT_URL": store.url, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": SECRET}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(buckets, "RETRIES", {"max_retries": 3, "initial_delay": "1ms", "max_delay": "1ms"})
    store.fault = lambda request: None
    return buckets.path_of(f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}/run")


# ---- faults


def refused(status: str, code: str, message: str) -> Callable[[Request], Any]:
    """The store refuses each request."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return lambda request: request.answered(status, body)


throttled = refused("503 Slow Down", "SlowDown", "Please reduce your request rate.")
too_many = refused("429 Too Many Requests", "TooManyRequestsException", "Too many requests.")
failing = refused("500 Internal Server Error", "InternalError", "We encountered an internal error.")
denied = refused("403 Forbidden", "AccessDenied", "Access Denied")
expired = refused("403 Forbidden", "ExpiredToken", "The provided token has expired.")
without_bucket = refused("404 Not Found", "NoSuchBucket", "The specified bucket does not exist")
other_region = refused(
    "400 Bad Request",
    "AuthorizationHeaderMalformed",
    "The authorization header is malformed; the region 'us-east-1' is wrong; expecting 'eu-west-1'",
)
redirected = refused("301 Moved Permanently", "PermanentRedirect", "The bucket must be addressed by another endpoint.")


def slow(request: Request) -> None:
    time.sleep(0.02)


def cut(request: Request) -> None:
    """The connection breaks in the middle of an upload, or before an answer."""
    request.environment["wsgi.input"].read(max(int(request.environment.get("CONTENT_LENGTH") or 0) // 2, 0))
    request.cut()


def unanswered(request: Request) -> None:
    """What was asked is done, and the answer is lost."""
    b"".join(request.served())
    request.cut()


def truncated(request: Request) -> None:
    """The connection breaks in the middle of an answer."""
    head = 'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nETag: "x"\r\n\r\n'
    request.environment["werkzeug.socket"].sendall(head.encode() + b"x" * 300)
    request.cut()


# ---- when


def of(method: str, fault: Callable[[Request], Any], key: str = "") -> Callable[[Request], Any]:
    """This fault, of requests with this method for objects with `key` in their names."""
    return lambda request: fault(request) if request.method == method and key in request.key else None


def every(count: int, fault: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """This fault, of the first of so many requests."""
    numbers = itertools.count()
    return lambda request: None if next(numbers) % count else fault(request)


def after(count: int, fault: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """This fault, of all requests after so many."""
    numbers = itertools.count()
    return lambda request: fault(request) if next(numbers) >= count else None


class FromRequest:
    """A fault of all requests from the first one on that writes an object with `key` in its name."""

    def __init__(self, key: str, fault: Callable[[Request], Any]):
        self._key, self._fault, self._has_begun = key, fault, threading.Event()

    def __call__(self, request: Request) -> Any:
        if request.method == "PUT" and self._key in request.key:
            self._has_begun.set()
        return self._fault(request) if self._has_begun.is_set() else None


# ---- lists


class Lagging:
    """Lists show what was there some seconds ago."""

    def __init__(self, secs: float, names: Iterable[str] = ()):
        self._secs, self._lock, self._names = secs, threading.Lock(), [(0.0, frozenset(names))]

    def __call__(self, request: Request) -> Any:
        if request.is_list:
            return request.answered("200 OK", self._listed(request))
        answer = request.served()
        if request.method in ("PUT", "DELETE"):
            with self._lock:
                names = self._names[-1][1]
                names = names | {request.key} if request.method == "PUT" else names - {request.key}
                self._names.append((time.monotonic(), names))
        return answer

    def stop(self) -> None:
        """From now on, lists show what is there now."""
        with self._lock:
            self._secs, self._names = float("inf"), [(float("-inf"), self._names[-1][1])]

    def _listed(self, request: Request) -> str:
        asked = dict(urllib.parse.parse_qsl(request.environment["QUERY_STRING"]))
        then = time.monotonic() - self._secs
        names = [names for since, names in self._names if since <= then][-1]
        shown = sorted(name for name in names if name.startswith(asked.get("prefix", "")))
        shown = [name for name in shown if name > asked.get("start-after", "")]
        rows = "".join(f"<Contents><Key>{name}</Key><Size>1</Size></Contents>" for name in shown)
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><KeyCount>{len(shown)}</KeyCount><IsTruncated>false</IsTruncated>{rows}"
            "</ListBucketResult>"
        )
