"""A run's folder in a bucket, on moto's S3 server."""

import json
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.checkpoint_examples import save_steps
from support.faulty_store import SECRET, expired, of

from parallax.checkpoint import steps
from parallax.checkpoint.restore import restore_newest
from parallax.checkpoint.save import CheckpointWriter
from parallax.cli import train as command_line
from parallax.config.sections import CheckpointConfig
from parallax.errors import CheckpointError, ConfigError
from parallax.storage import buckets, files
from parallax.storage.buckets import path_of
from parallax.storage.run_files import RunFiles, read_metrics


def test_objects_are_there_whole_or_not_at_all(bucket):
    assert not bucket.exists() and files.names_in(bucket) == []
    files.check_writable(bucket)
    files.write_whole(bucket / "a" / "b.json", '{"x": 1}')
    files.write_whole(bucket / "a" / "b.json", '{"x": 2}')
    files.write_whole(bucket / "ab", b"")
    assert files.names_in(bucket) == ["a", "ab"] and files.names_in(bucket / "a") == ["b.json"]
    assert files.read_object(bucket / "a" / "b.json") == {"x": 2}
    assert (bucket / "a").is_dir() and not (bucket / "a").is_file() and (bucket / "ab").is_file()
    (bucket / "a").replace(bucket / "c")
    assert [str(path) for path in files.files_below(bucket)] == [f"{bucket}/ab", f"{bucket}/c/b.json"]
    files.remove(bucket)
    assert not bucket.exists()
    with pytest.raises(FileNotFoundError):
        files.read_bytes(bucket / "ab")


def test_a_log_is_objects_that_are_read_as_one(bucket):
    path = bucket / "metrics.jsonl"
    log = files.append_file(path)
    log.write('{"step": 1}\n')
    log.flush()
    log.write('{"step": 2}\n')
    log.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2] and len(files.names_in(path)) == 2
    files.replace_log(path, [b'{"step": 1}\n'])
    again = files.append_file(path)
    again.write('{"step": 2, "train/loss": 3.0}\n')
    again.close()
    assert [row.get("train/loss") for row in read_metrics(path)] == [None, 3.0]


def test_what_replaces_a_log_counts_before_the_rest_is_removed(store, bucket):
    path = bucket / "log.txt"
    log = files.append_file(path)
    log.write("1\n2\n")
    log.close()
    with store.having(of("DELETE", expired)), pytest.raises(OSError):
        files.replace_log(path, [b"1\n"])
    assert len(files.names_in(path)) == 2 and list(files.lines_in(path)) == [b"1"]


def test_one_of_every_so_many_steps_is_kept_for_good_in_a_bucket_too(bucket):
    keep = dict(keep_last=1, keep_best=0, keep_every_steps=3, mesh=(1, 1, 1))
    save_steps(bucket, {2: 1.0, 3: 1.0, 5: 1.0}, **keep)
    assert steps.complete_steps(bucket) == {3, 5}


def test_two_runs_do_not_write_one_log(bucket):
    one, other = files.append_file(bucket / "log.txt"), files.append_file(bucket / "log.txt")
    one.write("one\n")
    one.close()
    other.write("other\n")
    with pytest.raises(CheckpointError, match="another run writes this log"):
        other.close()


def test_two_runs_in_one_folder_are_refused(bucket, monkeypatch):
    monkeypatch.setattr(buckets, "RENEW_SECS", 0.05)
    monkeypatch.setattr(buckets, "LEASE_LOOK_SECS", 0.3)
    with files.run_lock(bucket / "lock") as lock:
        lock.take("process 1 on here")
        with pytest.raises(BlockingIOError) as refused:
            files.run_lock(bucket / "lock").take("process 2 on here")
        assert refused.value.strerror == "process 1 on here"
        lock.check()
    assert not (bucket / "lock").exists()


@pytest.mark.parametrize(("holder", "waits"), [({}, False), ({"host": "another"}, True)], ids=["here", "elsewhere"])
def test_a_killed_run_does_not_lock_itself_out(bucket, monkeypatch, holder, waits):
    monkeypatch.setattr(buckets, "LEASE_SECS", 0.2)
    monkeypatch.setattr(buckets, "LEASE_LOOK_SECS", 0.05)
    looks = []
    monkeypatch.setattr(buckets.time, "sleep", lambda secs: looks.append(threading.Event().wait(secs)))
    killed = {**buckets.this_process(), "pid": 2**22 + 1, "began": "1", "owner": "killed", **holder}
    files.write_whole(bucket / "lock", json.dumps(killed))
    with files.run_lock(bucket / "lock") as lock:
        lock.take("the next one")
        assert files.read_object(bucket / "lock")["owner"] == "the next one" and bool(looks) == waits


def test_a_run_that_has_lost_its_lease_saves_nothing_more(bucket):
    with files.run_lock(bucket / "lock") as lock:
        lock.take("one")
        files.write_whole(bucket / "lock", json.dumps({"owner": "other"}))
        with pytest.raises(CheckpointError, match="the lease of this run is lost"):
            lock.check()
    assert files.read_object(bucket / "lock") == {"owner": "other"}


TREES = {
    "params": {"a": jnp.arange(24.0).reshape(4, 6), "b": {"c": jnp.full((3,), 1.5, jnp.bfloat16)}},
    "rest": {"step": jnp.int32(7)},
}
WANTED = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), TREES)


def save(folder, *numbers, keep_last=2):
    with CheckpointWriter(folder, CheckpointConfig(keep_last=keep_last), settings={"model": {}}) as writer:
        for step in numbers:
            writer.save(step, TREES)


def assert_is_saved(trees):
    equal = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), trees, TREES)
    assert all(jax.tree.leaves(equal))


def test_steps_are_saved_restored_and_removed(bucket):
    save(bucket, 1, 2, 3)
    assert steps.check_steps(bucket).valid == [3, 2] and files.names_in(bucket) == ["2", "3"]
    restored = restore_newest(bucket, WANTED)
    assert restored.step == 3 and not restored.damaged
    assert_is_saved(restored.trees)


def test_what_a_save_replaces_is_removed_beside_the_steps(store, bucket):
    removed, gone_on, on_disk = threading.Event(), threading.Event(), []

    def hold(request):
        if request.method == "DELETE" and "/run/1/" in f"/{request.key}":
            removed.set()
            assert gone_on.wait(20)

    config = CheckpointConfig(keep_last=1)
    with CheckpointWriter(bucket, config, settings={}, on_disk=lambda step, secs: on_disk.append(step)) as writer:
        writer.save(1, TREES)
        writer.wait()
        with store.having(hold):
            writer.save(2, TREES)
            assert removed.wait(20)
            writer.check()  # as after each step
            assert on_disk == [1]
            gone_on.set()
            writer.wait()
    assert on_disk == [1, 2] and steps.complete_steps(bucket) == {2}


def test_one_list_says_what_a_step_has(store, bucket):
    save(bucket, 1)
    sums, lists = steps.read_manifest(bucket, 1)["files"], []
    with store.having(lambda request: lists.append(request) if request.is_list else None):
        assert steps.wrong_files(bucket / "1", sums, contents=False) == []
    assert len(lists) == 1 < len(sums)
    files.remove(bucket / "1" / "rest" / "manifest.ocdbt")
    wrong = steps.wrong_files(bucket / "1", sums, contents=False)
    assert wrong == ["its file rest/manifest.ocdbt is missing"]


def test_steps_copied_to_a_disk_are_those_of_a_run_there(bucket, tmp_path):
    save(bucket, 1)
    for path in files.files_below(bucket):
        copy = tmp_path / path.relative_to(bucket)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(files.read_bytes(path))
    assert_is_saved(restore_newest(tmp_path, WANTED).trees)
    shutil.rmtree(tmp_path)


def test_a_save_that_was_killed_does_not_count_and_is_removed(bucket, monkeypatch):
    save(bucket, 1)
    monkeypatch.setattr(steps, "write_manifest", lambda *_: (_ for _ in ()).throw(KeyError("killed")))
    monkeypatch.setattr(steps, "remove_unfinished", lambda *_: None)
    with pytest.raises(CheckpointError, match="cannot save step 2"):
        save(bucket, 2)
    assert (bucket / "2" / "params" / "manifest.ocdbt").is_file()
    assert steps.check_steps(bucket).valid == [1] and [step for step, _ in steps.unfinished_saves(bucket)] == [2]
    assert steps.tidy(bucket) == [f"removed an unfinished save of step 2: {bucket}/2"]
    assert files.names_in(bucket) == ["1"]


def test_a_damaged_step_is_named_and_the_one_before_it_restored(bucket):
    save(bucket, 1, 2, 3, keep_last=3)
    (of_params, *_) = [path for path in files.files_below(bucket / "3" / "params") if path.parent.name == "d"]
    files.write_whole(of_params, b"x" * 100)
    files.remove(bucket / "2" / "rest" / "manifest.ocdbt")
    restored = restore_newest(bucket, WANTED)
    assert restored.step == 1
    assert [(error.step, "match its checksum" in str(error)) for error in restored.damaged] == [(3, True), (2, False)]
    assert steps.set_aside(bucket, 3, "damaged") == bucket / "damaged-3" and steps.complete_steps(bucket) == {1, 2}


def test_a_bucket_that_is_not_there_is_one_line(bucket):
    with pytest.raises(CheckpointError, match="cannot write in s3://none/run .*bucket does not exist"):
        files.check_writable(path_of("s3://none/run"))


def test_a_server_that_does_not_answer_is_one_line_without_credentials(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(buckets, "RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})
    with pytest.raises(CheckpointError, match="Could not connect to server") as refused:
        files.check_writable(bucket)
    assert SECRET not in str(refused.value) and "\n" not in str(refused.value)


def test_the_command_says_in_one_line_that_no_store_answers(bucket, monkeypatch, capsys):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(buckets, "RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})
    assert command_line.main(["train.py", "--config=configs/quickstart.py", f"--workdir={bucket}"]) == 3
    said = capsys.readouterr().err
    assert "Could not connect to server" in said and SECRET not in said and "Traceback" not in said


NO_FOLDERS = ["s3://", "s3://bucket", "s3://bucket/a/../b", f"s3://key:{SECRET}@bucket/run"]
NO_FOLDERS += [f"s3://bucket{SECRET}?X-Amz-Signature={SECRET}", f"s3://bucket/run?X-Amz-Signature={SECRET}"]


@pytest.mark.parametrize("written", NO_FOLDERS)
def test_a_url_that_is_no_folder_of_a_bucket_is_refused(written):
    with pytest.raises(ConfigError, match="s3://") as refused:
        RunFiles(written)
    assert SECRET not in str(refused.value)


def test_a_pattern_in_a_bucket_has_asterisks_alone():
    assert str(path_of("s3://bucket/a*/*.txt", pattern=True)) == "s3://bucket/a*/*.txt"
    with pytest.raises(ConfigError, match="a s3 URL has a query, .*; write s3://bucket/FOLDER"):
        path_of("s3://bucket/a?.txt", pattern=True)
