"""Text is UTF-8 whatever the locale is, a console gets what it can show, and no size of a file takes the memory."""

import io
import os
import subprocess
import sys
import tracemalloc

import pytest

from parallax.cli.watch import Metrics
from parallax.display.progress import ProgressPrinter
from parallax.errors import exit_status, tell
from parallax.storage.files import LINE_BYTES, OBJECT_BYTES, lines_in, read_bytes, read_object
from parallax.storage.run_files import read_metrics
from parallax.training.logger import drop_after

IN_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
WRITES = """
import pathlib, sys
from parallax.errors import exit_status, tell
from parallax.storage.files import AppendFile, open_file, write_file, write_whole
folder = pathlib.Path(sys.argv[1])
text = "n\\u00e9 \\u2192 " + str(folder)
def act():
    AppendFile(folder / "log.txt").write(text)
    write_whole(folder / "whole", text)
    write_file(folder / "file", text)
    with open_file(folder / "opened", "a", errors="backslashreplace") as opened: opened.write(text)
    tell(text, sys.stdout)
    print(text)
sys.exit(exit_status(act))
"""


def test_text_is_utf_8_in_files_and_escaped_on_a_console_whatever_the_locale(tmp_path):
    folder = tmp_path / "é"
    folder.mkdir()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | IN_ASCII
    done = subprocess.run([sys.executable, "-c", WRITES, folder], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    # The folder's name has no letter of this locale: Python has its bytes as halves of surrogate pairs.
    for name in ("log.txt", "whole", "file", "opened"):
        assert (folder / name).read_text(encoding="utf-8") == f"né → {tmp_path}/\\udcc3\\udca9"
    assert done.stdout.decode("ascii").splitlines() == [f"n\\xe9 \\u2192 {tmp_path}/\\udcc3\\udca9"] * 2


SHOWN = {"ascii": r"n\xe9 \u2192", "latin-1": r"né \u2192", "utf-8": "né →"}


@pytest.mark.parametrize("encoding", SHOWN)
def test_a_console_gets_what_its_encoding_has_and_escapes_of_the_rest(encoding, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", console)
    tell("né →", console)
    monkeypatch.setattr(console, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    progress = ProgressPrinter(console, clock=lambda: 0.0)
    progress.begin("né →", 0.0, str)
    progress.tick()
    assert exit_status(lambda: print("né →")) == 0
    console.flush()
    assert (
        console.buffer.getvalue().decode(encoding).replace("\r", "").replace("\x1b[K", "\n")
        == f"{SHOWN[encoding]}\n{SHOWN[encoding]} ...\n{SHOWN[encoding]}\n"
    )


# ---- sizes


def sparse(path, begin, gib=50, end=b""):
    """A file of so many GiB of which hardly a block is on the disk."""
    path.write_bytes(begin)
    os.truncate(path, gib << 30)
    with path.open("ab") as file:
        file.write(end)
    return path


@pytest.fixture
def little_memory():
    """Python's own memory may grow by less than 40 MB."""
    tracemalloc.start()
    yield
    assert tracemalloc.get_traced_memory()[1] < 40e6
    tracemalloc.stop()


def test_metrics_of_50_gib_take_no_memory_where_they_are_read_or_shortened(tmp_path, little_memory):
    path = sparse(tmp_path / "metrics.jsonl", b'{"step": 1}\n{"step"', end=b': 2}\n{"step": 3}\n{"step": 4}')
    metrics = Metrics(path)
    metrics.read()
    assert (metrics.steps, metrics.torn) == ([1, 3], 1)
    metrics.read()
    with path.open("ab") as file:
        file.write(b'\n{"step": 5}\n')
    metrics.read()
    assert (metrics.steps, metrics.torn) == ([1, 3, 4, 5], 1)
    assert [row["step"] for row in read_metrics(path)] == [1, 3, 4, 5]
    drop_after(path, 4)
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n{"step": 4}\n'


def test_a_line_that_never_ends_takes_the_memory_of_a_line(tmp_path, little_memory):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        for piece in (b"x" * (LINE_BYTES - 1), b"\n", *[b"y" * LINE_BYTES] * 3, b"\nz\n", *[b"w" * LINE_BYTES] * 2):
            file.write(piece)
    assert [len(line) for line in lines_in(path)] == [LINE_BYTES - 1, 0, 1]
    metrics = Metrics(path)
    for _ in range(3):
        metrics.read()
    assert (metrics.steps, metrics.torn) == ([], 3)


def test_a_small_file_takes_little_memory_and_a_large_one_is_refused_unread(tmp_path):
    (tmp_path / "small").write_bytes(b"{}")
    tracemalloc.start()
    assert read_bytes(tmp_path / "small") == b"{}"
    for path, read in (("large", read_bytes), ("config.json", read_object)):
        with pytest.raises(OSError, match=r"it has more than \d+ bytes"):
            read(sparse(tmp_path / path, b"{", gib=1))
    assert tracemalloc.get_traced_memory()[1] < 4e6
    tracemalloc.stop()
    (tmp_path / "config.json").write_bytes(b"{}" + b" " * (OBJECT_BYTES - 2))
    assert read_object(tmp_path / "config.json") == {}
