"""The coordinator against bytes: whoever connects, the job's own processes are answered, and reach their barriers.

All of it is on loopback, with sockets in place of processes, and fixed seeds.
"""

import contextlib
import errno
import json
import math
import random
import select
import socket
import struct
import threading
import time

import pytest

from parallax.config.sections import DistributedConfig
from parallax.processes import coordinator
from parallax.processes.coordinator import Coordinator
from parallax.processes.job import listen

TOKEN = "a secret of the job"
# What a process is answered within, on a busy machine; it is lost after distributed.heartbeat_secs=60.
ANSWER_SECS = 5.0
SEEDS = range(4)
CASES = 60  # of each seed
DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture(autouse=True)
def no_tracebacks(monkeypatch, capfd):
    """No thread ends with an error, and nobody is told of what strangers write."""
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))
    yield
    assert raised == [] and capfd.readouterr().err == ""


class Job:
    """A coordinator of so many processes, and what they have connected."""

    def __init__(self, processes):
        self.processes = processes
        listener = listen("127.0.0.1", 0)
        self.address = listener.getsockname()
        self.coordinator = Coordinator(listener, processes, TOKEN, DistributedConfig(60, 60, 60, 60, 60, 60))

    def connect(self):
        return Connection(socket.create_connection(self.address, timeout=ANSWER_SECS))

    def hello(self, rank, /, **changes):
        hello = {"rank": rank, "processes": self.processes, "token": TOKEN, "host": f"host{rank}", "clock": time.time()}
        return hello | changes

    def join(self, rank, /, **changes):
        line = self.connect()
        line.send(self.hello(rank, **changes))
        return line


class Connection:
    """A process's end: it writes what it likes, and reads messages."""

    def __init__(self, connected):
        self.socket, self._reader = connected, connected.makefile("rb")

    def send(self, message):
        self.write(json.dumps(message).encode() + b"\n")

    def write(self, data):
        """As far as the other end takes it."""
        with contextlib.suppress(OSError):
            self.socket.sendall(data)

    def read(self):
        """The next message, None where the connection has ended."""
        try:
            line = self._reader.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line else None

    def read_until(self, key):
        while (message := self.read()) is not None and key not in message:
            continue
        return message

    def is_answered(self):
        """Ask for the phases of all, and get them in time."""
        self.send({"phases": True})
        begun = time.monotonic()
        answer = self.read_until("phases")
        return answer is not None and time.monotonic() - begun < ANSWER_SECS

    def is_ended(self):
        while self.read() is not None:
            continue
        return True

    def close(self):
        self._reader.close()
        self.socket.close()


def meets(job, *joined):
    """Whether the others can join those that are there, and all hear that the job is complete."""
    lines = [*joined, *(job.join(rank) for rank in range(len(joined), job.processes))]
    return all(line.read_until("complete") is not None for line in lines)


# ---- before the job is complete


def says(data):
    return lambda line: line.write(data)


def leaves(line):
    """A reset in place of an end."""
    line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.write(b'{"rank"')
    line.close()


def never_reads(line):
    """Each line would have an answer; they fill what the sockets hold."""
    line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.write(b'{"rank": 1, "token": "guessed"}\n' * 200_000)


STRANGERS = {
    "nested JSON": says(b'{"rank": ' + DEEP + b"}\n"),
    "short nested JSON": says(b"[" * 5000 + b"]" * 5000 + b"\n"),
    "an endless line": says(b"x" * (64 << 20)),
    "a long number": says(b'{"rank": ' + b"1" * 9000 + b"}\n"),
    "no text": says(bytes(range(128, 256)) + b"\n"),
    "half a surrogate": says(b'{"rank": 1, "token": "\\ud800"}\n'),
    "no object": says(b"null\n[]\n1\n"),
    "another protocol": says(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "a closed end": lambda line: line.socket.shutdown(socket.SHUT_WR),
    "a reset": leaves,
    "silence": lambda line: None,
    "half a line": says(b'{"rank": 1, "tok'),
    "no token": says(json.dumps({"rank": 1, "processes": 2, "host": "h", "clock": 0.0}).encode() + b"\n"),
    "never reading": never_reads,
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_neither_stops_nor_stalls_a_job_that_is_not_complete(stranger):
    job = Job(2)
    first = job.join(0)
    lines = [job.connect() for _ in range(3)]
    for line in lines:
        acting = threading.Thread(target=stranger, args=(line,))
        acting.start()
        assert first.is_answered()
        acting.join(30)
        assert not acting.is_alive() and first.is_answered()
    assert meets(job, first)


def test_a_stranger_who_writes_slowly_or_not_at_all_is_sent_away(monkeypatch):
    monkeypatch.setattr(coordinator, "IDENTIFY_SECS", 0.5)
    job = Job(2)
    first, silent, slow = job.join(0), job.connect(), job.connect()
    for byte in b'{"rank"':
        slow.write(bytes([byte]))
        time.sleep(0.05)
    assert silent.is_ended() and slow.is_ended()
    assert first.is_answered() and meets(job, first)


def test_of_thousands_of_strangers_a_few_are_listened_to():
    job = Job(2)
    first = job.join(0)
    oldest = job.connect()
    for each in range(2000):
        # Most stay open at their end, as those of a machine that has vanished.
        line = job.connect()
        if each % 4:
            line.write(b"{")
            HALF_OPEN.append(line)
        if len(HALF_OPEN) > 400:
            HALF_OPEN.pop(0).close()
        if not each % 250:
            assert first.is_answered()
    assert oldest.is_ended()
    ended = select.poll()
    for line in HALF_OPEN:
        ended.register(line.socket, select.POLLIN)
    deadline = time.monotonic() + ANSWER_SECS
    while len(HALF_OPEN) - len(ended.poll(0)) > coordinator.MOST_UNIDENTIFIED:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert meets(job, first)


@pytest.mark.parametrize(("number", "ends"), [(errno.ECONNABORTED, False), (errno.EMFILE, True)])
def test_only_for_want_of_open_files_is_the_oldest_stranger_hung_up(number, ends, monkeypatch):
    job, failed = Job(2), threading.Event()
    stranger = job.connect()
    other = job.connect()
    other.write(b"\n")
    assert other.is_ended()  # it came second, so the first is known

    def fails(listener):
        monkeypatch.undo()
        failed.set()
        raise OSError(number, "on purpose")

    monkeypatch.setattr(socket.socket, "accept", fails)
    job.connect()
    assert failed.wait(ANSWER_SECS)
    if ends:
        assert stranger.is_ended()
    else:
        stranger.send(job.hello(0))
        assert stranger.is_answered() and meets(job, stranger)


HALF_OPEN = []


@pytest.fixture(autouse=True, scope="module")
def closed():
    yield
    while HALF_OPEN:
        HALF_OPEN.pop().close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": -5}, "distributed.process-id=-5 is not one of 2 processes; use 0 to 1"),
        ({"rank": 2}, "distributed.process-id=2 is not one of 2 processes; use 0 to 1"),
        ({"rank": 10**300}, "is not one of 2 processes"),
        *(
            (change, "the first message is not that of a job's process")
            for change in (
                {"rank": True},
                {"rank": 1.0},
                {"rank": "1"},
                {"rank": None},
                {"rank": [1]},
                {"processes": True},
                {"processes": "2"},
                {"clock": math.nan},
                {"clock": math.inf},
                {"clock": -math.inf},
                {"clock": True},
                {"clock": None},
                {"clock": 10**300},
                {"host": 1},
                {"host": "\x1b[2J"},
                {"host": "h" * 10_000},
            )
        ),
        *(
            ({"token": token}, "this coordinator port belongs to another job")
            for token in (None, "", True, 0, [TOKEN], TOKEN + " ", "\ud800")
        ),
    ],
    ids=str,
)
def test_who_says_of_itself_what_cannot_be_is_refused_and_the_job_goes_on(changes, message):
    job = Job(2)
    first = job.join(0)
    refused = job.join(1, **changes)
    assert message in refused.read()["refused"] and refused.is_ended()
    assert first.is_answered() and meets(job, first)


@pytest.mark.parametrize("clock", [1e300, -1e300, 1e15, 0.0])
def test_a_clock_that_no_calendar_has_is_refused_as_others_are(clock):
    job = Job(2)
    first = job.join(0)
    assert "the clocks disagree" in job.join(1, clock=clock).read()["refused"]
    assert "in process 1 on host1, more than distributed.clock_secs=60" in first.read()["refused"]
    assert first.is_answered()


# ---- once it is complete


def test_when_the_job_is_complete_nobody_else_is_listened_to():
    job = Job(2)
    waiting = [job.connect() for _ in range(5)]
    first, second = job.join(0), job.join(1)
    assert first.read_until("complete") and second.read_until("complete")
    assert all(line.is_ended() for line in waiting)
    with pytest.raises(ConnectionRefusedError):
        job.join(1)
    assert first.is_answered() and second.is_answered()


NONSENSE = {
    "a number for a phase": b'{"phase": 5}\n',
    "a list for a barrier": b'{"barrier": [], "values": {}}\n',
    "a barrier without values": b'{"barrier": "x"}\n',
    "values that are none": b'{"barrier": "x", "values": 5}\n',
    "nested values": b'{"barrier": "x", "values": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}\n",
    "no status": b'{"exit": "x", "reason": ""}\n',
    "a boolean for a status": b'{"exit": true, "reason": ""}\n',
    "a status without its reason": b'{"exit": 1}\n',
    "nested JSON": DEEP + b"\n",
    "an endless line": b"x" * (2 << 20),
    "no text": b"\xff\xfe\n",
    "many barriers": b"".join(b'{"barrier": "%d", "values": {}}\n' % number for number in range(100)),
}


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE)
def test_a_process_that_talks_nonsense_is_lost_and_the_others_hear_it(said):
    job = Job(3)
    first, second, third = (job.join(rank) for rank in range(3))
    assert third.read_until("complete")
    third.write(said)
    for line in (first, second):
        lost = line.read_until("lost")
        assert (lost["lost"], lost["host"], lost["status"]) == (2, "host2", None)
        assert line.is_answered()


@pytest.mark.slow
def test_a_process_that_reads_nothing_stalls_nobody_and_is_lost():
    job = Job(2)
    first, second = job.join(0), job.join(1)
    assert second.read_until("complete")
    second.socket.settimeout(30)
    asking = threading.Thread(target=second.write, args=(b'{"phases": 1}\n' * 150_000,))
    asking.start()
    message, deadline = {}, time.monotonic() + 30
    while "lost" not in message:
        assert time.monotonic() < deadline
        first.send({"heartbeat": True})
        begun = time.monotonic()
        message = first.read()
        assert time.monotonic() - begun < ANSWER_SECS
    assert first.is_answered()
    second.close()


# ---- anything


def valid_messages(job, rank, rng):
    """What processes say, as text."""
    messages = [
        job.hello(rank),
        {"phase": "step 12"},
        {"barrier": f"the run {rng.random()}", "values": {"step": 0, "data": "ab"}},
        {"heartbeat": True},
        {"phases": True},
        {"exit": 75, "reason": "LostError: gone"},
    ]
    return [json.dumps(message).encode() for message in messages]


def mutated(line, rng):
    """The line with a few changes that a fuzzer makes: of bytes, of length, of values."""
    values = [b"null", b"true", b"-5", b"1e999", b"NaN", b'""', b"[]", b"{}", b"1" * 5000, b'"\\ud800"', b"[" * 2000]
    line = bytearray(line)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(line) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            line[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del line[at : at + rng.randint(1, 8)]
        elif kind == 2:
            line[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 3:
            line[at:at] = line[: rng.randint(0, 40)]
        else:
            colons = [place for place, byte in enumerate(line) if byte == ord(":")]
            if colons:
                place = rng.choice(colons) + 1
                end = min((line.find(mark, place) for mark in b",}" if line.find(mark, place) >= 0), default=len(line))
                line[place:end] = rng.choice(values)
    return bytes(line)


def fuzzed(job, rank, rng):
    """A few lines, of which some may be right."""
    kinds = [
        lambda: rng.randbytes(rng.randint(0, 400)),
        lambda: (line := rng.choice(valid_messages(job, rank, rng)))[: rng.randrange(len(line))],
        lambda: mutated(rng.choice(valid_messages(job, rank, rng)), rng),
        lambda: mutated(valid_messages(job, rank, rng)[0], rng),
    ]
    return b"\n".join(rng.choice(kinds)() for _ in range(rng.randint(1, 5))) + rng.choice([b"", b"\n"])


@pytest.mark.parametrize("seed", SEEDS)
def test_any_bytes_of_strangers_leave_a_job_that_is_not_complete_as_it_was(seed):
    rng, job = random.Random(seed), Job(3)
    first, lines = job.join(0), []
    for _ in range(CASES):
        lines.append(job.connect())
        lines[-1].write(fuzzed(job, 1, rng).replace(TOKEN.encode(), b"guessed"))
    assert first.is_answered() and meets(job, first)
    for line in lines:
        assert line.is_ended()


@pytest.mark.parametrize("seed", SEEDS)
def test_any_bytes_of_who_has_the_token_leave_process_0_answering(seed):
    """They may be those of a process, which is then lost, or is told with the others that the job cannot be."""
    rng, job = random.Random(seed), Job(100)
    first = job.join(0)
    for rank in range(1, CASES):
        line = job.connect()
        line.write(fuzzed(job, rank, rng))
        if rank % 2:
            line.close()
        if not rank % 10:
            assert first.is_answered()
    assert first.is_answered()


@pytest.mark.parametrize("seed", SEEDS)
def test_any_bytes_of_processes_of_a_complete_job_leave_the_others_answered(seed):
    rng, job = random.Random(seed), Job(CASES)
    lines = [job.join(rank) for rank in range(CASES)]
    first, last = lines[0], lines[-1]
    assert last.read_until("complete")
    for rank, line in enumerate(lines[1:-1], 1):
        line.write(fuzzed(job, rank, rng))
        if not rank % 10:
            assert first.is_answered() and last.is_answered()
    for line in lines[1:-1]:
        line.close()
    assert first.is_answered() and last.is_answered()
