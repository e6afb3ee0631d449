"""What a store of objects does wrong, and what a run makes of it."""

import itertools
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import faulty_store
from support.faulty_store import SECRET, Lagging, after, every, of

from parallax.checkpoint import steps
from parallax.checkpoint.restore import restore_newest
from parallax.checkpoint.save import CheckpointWriter
from parallax.config.sections import CheckpointConfig
from parallax.errors import CheckpointError
from parallax.storage import buckets, files
from parallax.storage.run_files import read_metrics

TREES = {"params": {"a": jnp.arange(24.0).reshape(4, 6)}}
WANTED = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), TREES)
REPEATED = ("throttled", "too_many", "failing", "cut", "unanswered")
SHARES = {"slow": 1, "unanswered": 8}  # of how many requests one has the fault
FINAL = {
    "throttled": "SlowDown",
    "too_many": "TooManyRequestsException",
    "failing": "InternalError",
    "cut": "Empty reply from server",
    "expired": "ExpiredToken: The provided token has expired",
    "other_region": "expecting 'eu-west-1'",
    "redirected": "PermanentRedirect",
}


def save(folder, *numbers):
    with CheckpointWriter(folder, CheckpointConfig(keep_last=2), settings={"model": {}}) as writer:
        for step in numbers:
            writer.save(step, TREES)


def assert_restores(folder, step):
    restored = restore_newest(folder, WANTED)
    assert restored.step == step and not restored.damaged
    assert np.array_equal(restored.trees["params"]["a"], TREES["params"]["a"])


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", ["slow", *REPEATED])
def test_what_a_store_does_now_and_then_loses_nothing(store, bucket, name):
    path = bucket / "metrics.jsonl"
    with store.having(every(SHARES.get(name, 3), getattr(faulty_store, name))):
        with files.run_lock(bucket / "lock") as lock:
            lock.take("this run")
            log = files.append_file(path)
            for step in (1, 2):
                log.write(f'{{"step": {step}}}\n')
                log.flush()
                lock.check()
            log.close()
            save(bucket / "checkpoints", 1)
        assert_restores(bucket / "checkpoints", 1)
        assert [row["step"] for row in read_metrics(path)] == [1, 2] and not (bucket / "lock").exists()
    assert files.names_in(bucket / "checkpoints") == ["1"]


def test_an_answer_that_breaks_off_is_asked_for_again(store, bucket):
    files.write_whole(bucket / "a", b"a" * 1000)
    with store.having(every(2, of("GET", faulty_store.truncated))):
        assert files.read_bytes(bucket / "a") == b"a" * 1000


@pytest.mark.fast(4)
@pytest.mark.parametrize("name", FINAL)
def test_what_a_store_goes_on_with_ends_a_save_in_one_line(store, bucket, name):
    save(bucket, 1)
    with store.having(of("PUT", getattr(faulty_store, name), "/2/params/")):
        with pytest.raises(CheckpointError, match=f"cannot save step 2 .*{FINAL[name]}") as failed:
            save(bucket, 2)
    said = str(failed.value)
    assert "\n" not in said and SECRET not in said and "[http" not in said and "tensorstore_spec" not in said
    assert steps.check_steps(bucket).valid == [1]
    steps.tidy(bucket)
    save(bucket, 2)
    assert_restores(bucket, 2)


def test_a_restore_that_the_store_interrupts_calls_no_step_damaged(store, bucket):
    save(bucket, 1, 2)
    chunks = of("GET", faulty_store.failing, "/2/params/d/")
    with store.having(every(1, chunks)), pytest.raises(CheckpointError, match="InternalError"):
        restore_newest(bucket, WANTED)
    with store.having(after_checksums(chunks)), pytest.raises(CheckpointError, match="step 2 .* cannot be read.*Inter"):
        restore_newest(bucket, WANTED)
    assert files.names_in(bucket) == ["1", "2"]
    assert_restores(bucket, 2)


def after_checksums(fault):
    """The fault, once each object was asked for: a restore first reads all of them for their checksums."""
    seen = set()

    def second_time(request):
        if request.method == "GET" and request.key in seen:
            return fault(request)
        return seen.add(request.key)

    return second_time


def test_a_bucket_that_is_removed_ends_the_next_save_in_one_line(store, bucket):
    save(bucket, 1)
    log = files.append_file(bucket / "log.txt")
    with store.having(faulty_store.without_bucket):
        with pytest.raises(CheckpointError, match="bucket does not exist"):
            save(bucket, 2)
        log.write("a line\n")
        with pytest.raises(CheckpointError, match="bucket does not exist"):
            log.flush()
        with pytest.raises(CheckpointError, match="bucket does not exist"):
            files.check_writable(bucket)
    log.close()
    assert list(files.lines_in(bucket / "log.txt")) == [b"a line"]
    save(bucket, 2)
    assert_restores(bucket, 2)


@pytest.mark.parametrize("apart", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_a_bucket_that_is_removed_after_any_request_of_a_save_ends_it_in_one_line(store, bucket, monkeypatch, apart):
    monkeypatch.setattr(steps, "NO_FILES_SECS", 0.0)
    save(bucket, 1)
    said, errors = [], []  # said is what ends no save
    with CheckpointWriter(bucket, CheckpointConfig(keep_last=2), settings={"model": {}}, say=said.append) as writer:
        for number in itertools.count(0, apart):
            steps.tidy(bucket)
            with store.having(after(number, faulty_store.without_bucket)):
                try:
                    writer.save(2, TREES)
                    writer.wait()
                    break
                except CheckpointError as failed:
                    errors.append(str(failed))
            assert steps.check_steps(bucket).valid[-1] == 1
            files.remove(bucket / "2")
    assert len(errors) == number // apart and not any("\n" in line or SECRET in line for line in errors + said)
    assert all("bucket does not exist" in line for line in errors + said)
    save(bucket, 2)
    assert_restores(bucket, 2)


def test_a_store_whose_lists_lag_is_refused_at_the_start(store, bucket):
    with (
        store.having(Lagging(60)),
        pytest.raises(CheckpointError, match="cannot write in .* \\(lists of this store do"),
    ):
        files.check_writable(bucket)


def test_lists_that_begin_to_lag_end_the_save_and_the_step_before_stays(store, bucket):
    with CheckpointWriter(bucket, CheckpointConfig(keep_last=2), settings={"model": {}}) as writer:
        writer.save(1, TREES)
        writer.wait()
        with store.having(Lagging(60, [path.key for path in files.files_below(bucket)])):
            writer.save(2, TREES)
            with pytest.raises(CheckpointError, match="cannot save step 2 .*lists of this store do not show"):
                writer.wait()
    assert steps.check_steps(bucket).valid == [1]
    assert steps.tidy(bucket) == [f"removed an unfinished save of step 2: {bucket}/2"]
    save(bucket, 2)
    assert_restores(bucket, 2)


def test_a_long_log_is_made_one_object_again_and_again(bucket, monkeypatch):
    monkeypatch.setattr(buckets, "FLUSH_SECS", 0.01)
    monkeypatch.setattr(buckets, "MOST_SEGMENTS", 3)
    written, folded = [], threading.Event()
    fold = buckets.Segments._fold
    monkeypatch.setattr(buckets.Segments, "_fold", lambda self: fold(self) or folded.set())
    log = files.append_file(bucket / "log.txt")
    for _ in range(2):
        folded.clear()
        while not folded.is_set():
            written.append(b"%d" % len(written))
            log.write(written[-1].decode() + "\n")
            log.flush()
    log.close()
    names = files.names_in(bucket / "log.txt")
    assert names[0].endswith(files.WHOLE_LOG) and len(names) < len(written)
    assert list(files.lines_in(bucket / "log.txt")) == written
    again = files.append_file(bucket / "log.txt")
    again.write("more\n")
    again.close()
    assert list(files.lines_in(bucket / "log.txt")) == [*written, b"more"]


def test_a_log_whose_objects_could_not_be_removed_goes_on_after_them(store, bucket, monkeypatch):
    log = files.append_file(bucket / "log.txt")
    log.write("1\n")
    log.flush()
    with store.having(of("DELETE", faulty_store.expired)), pytest.raises(CheckpointError, match="ExpiredToken"):
        log._fold()
    log.write("2\n")
    log.close()
    assert list(files.lines_in(bucket / "log.txt")) == [b"1", b"2"] and len(files.names_in(bucket / "log.txt")) == 3


def test_the_objects_of_a_log_are_asked_for_at_once_and_read_in_turn(store, bucket, monkeypatch):
    monkeypatch.setattr(buckets, "READS_AHEAD", 4)
    for number in range(1, 10):
        files.write_whole(bucket / "log.txt" / f"{number:012}", f"{number}\n")
    asked, most = threading.Semaphore(0), []

    def counted(request):
        if request.method == "GET" and request.key:
            asked.release()
            most.append(asked._value)
            threading.Event().wait(0.02)
            asked.acquire()

    with store.having(counted):
        assert list(files.lines_in(bucket / "log.txt")) == [b"%d" % number for number in range(1, 10)]
    assert 2 <= max(most) <= 4


def test_a_log_that_is_replaced_while_it_is_read_is_read_again(store, bucket, monkeypatch):
    path = bucket / "log.txt"
    log = files.append_file(path)
    log.write("1\n")
    log.close()
    names, looks = buckets._names_that_count, []

    def replaced_after_the_first_look(path):
        looks.append(names(path))
        if len(looks) == 1:
            files.replace_log(path, [b"1\n2\n"])
        return looks[-1]

    monkeypatch.setattr(buckets, "_names_that_count", replaced_after_the_first_look)
    assert list(files.lines_in(path)) == [b"1", b"2"] and len(looks) == 2


def test_a_log_that_is_replaced_after_its_names_were_listed_is_read_as_new(store, bucket, monkeypatch):
    path, keys = bucket / "log.txt", buckets._keys
    log = files.append_file(path)
    log.write("1\n")
    log.flush()
    growing = files.growing_log(path)
    assert list(growing.read()[1]) == [b"1"]
    log.write("2\n")
    log.close()

    def replaced_after_the_list(*asked):
        names = keys(*asked)
        monkeypatch.setattr(buckets, "_keys", keys)
        files.replace_log(path, [b"1\n2\n"])
        return names

    monkeypatch.setattr(buckets, "_keys", replaced_after_the_list)
    is_new, lines = growing.read()
    assert is_new and list(lines) == [b"1", b"2"]


@pytest.mark.slow
@pytest.mark.parametrize("silent", [2, 1], ids=["now and then", "for good"])
def test_a_server_that_says_nothing_is_asked_again_and_not_waited_for(store, bucket, silent):
    files.write_whole(bucket / "a", b"a" * 10)
    code = f"from parallax.storage import buckets; buckets.RETRIES = {buckets.RETRIES}; "
    code += f"print(len(buckets.read(buckets.path_of('{bucket}/a'))))"
    ended = threading.Event()
    with store.having(every(silent, lambda request: ended.wait(60))):
        said = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        ended.set()
    if silent == 2:
        assert said.stdout == "10\n"
    else:
        assert "StoreError" in said.stderr and "Timeout was reached" in said.stderr


ASKS_AT_ITS_END = """
import sys, threading
from parallax.storage import buckets

path, asked = buckets.path_of(sys.argv[1]), threading.Event()

def ask():
    while True:
        buckets.read(path)
        asked.set()

for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
asked.wait()
sys.exit(7)
"""


def test_a_process_ends_with_its_own_status_while_its_threads_still_ask_a_store(store, bucket):
    """As where the shards of a run that has ended are still being fetched: TensorStore would abort (SIGABRT)."""
    files.write_whole(bucket / "a", b"a" * 10)
    command = [sys.executable, "-c", ASKS_AT_ITS_END, str(bucket / "a")]
    for _ in range(3):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout, ended.stderr) == (7, "", "")
