"""A server of this machine that answers for repositories as huggingface.co does, as far as its file system asks, and
for plain files as any server of HTTP."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

COMMIT = "0" * 40
REPOSITORY = re.compile(r"/api/(?:datasets|models)/(\w+/\w+)(?:/tree/main/?(.*))?")
FILE = re.compile(r"(?:/datasets)?/(\w+/\w+)/resolve/main/(.+)")


@contextlib.contextmanager
def serving(repositories: Mapping[str, Mapping[str, bytes]], *, token: str = "") -> Iterator[str]:
    """The server's URL. `repositories` have the content of files by name, and are shown to who has the token."""

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = urllib.parse.unquote(self.path).partition("?")
            if token and self.headers.get("Authorization") != f"Bearer {token}":
                return self.answer(401, b"", X_Error_Message="Invalid credentials")
            if asked := REPOSITORY.fullmatch(path):
                return self.describe(asked[1], asked[2], recursive="recursive=true" in query)
            name, file = FILE.fullmatch(path).groups() if FILE.fullmatch(path) else (path[1:], "")
            content = repositories.get(name, {}).get(file)
            return self.answer(404, b"", X_Error_Code="EntryNotFound") if content is None else self.send(content)

        do_HEAD = do_GET

        def describe(self, name: str, folder: str | None, *, recursive: bool) -> None:
            if name not in repositories:
                return self.answer(404, b"", X_Error_Code="RepoNotFound")
            rows = entries(repositories[name], f"{folder}/" if folder else "", recursive)
            return self.send(json.dumps(rows if folder is not None else {"id": name, "sha": COMMIT}).encode())

        def send(self, content: bytes) -> None:
            """All of a file, or the bytes that are asked for."""
            about = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Content_Type": "application/json"}
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if asked is None:
                return self.answer(200, content, **about)
            part = content[int(asked[1]) : int(asked[2] or len(content)) + 1]
            place = f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(content)}"
            return self.answer(206, part, Content_Range=place, **about)

        def answer(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content_Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *about: Any) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def entries(files: Mapping[str, bytes], below: str, recursive: bool) -> list[dict[str, Any]]:
    """Rows of a folder's listing."""
    rows = {}
    for name, content in files.items():
        first, _, rest = name.removeprefix(below).partition("/")
        if name.startswith(below) and (recursive or not rest):
            mark = hashlib.sha1(content).hexdigest()
            rows[name] = {"type": "file", "path": name, "size": len(content), "oid": mark}
        elif name.startswith(below):
            rows[below + first] = {"type": "directory", "path": below + first, "oid": COMMIT}
    return [*rows.values()]
