"""Commands and data that read from a bucket, on moto's S3 server."""

import json
import os

import pytest
from support.data_examples import prepare_texts

from parallax.cli import data as data_command
from parallax.cli import watch
from parallax.cli.command import load_config, read_line
from parallax.config.sections import DataConfig
from parallax.config.settings import default_settings
from parallax.data import open_reader, prepare
from parallax.data.shards import Manifest
from parallax.errors import CheckpointError, ConfigError, DataError, StoreError
from parallax.interop.safetensors import INDEX, read_model, write_model
from parallax.storage import buckets, copies, files
from parallax.storage.copies import copies_folder

SECRET = "a-secret-that-is-never-shown"
TEXTS = [f"document {number} has a text of its own, " * 5 for number in range(30)]


@pytest.fixture(autouse=True)
def copies_of_this_test(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(copies, "_limit", [copies.LIMIT_BYTES])


# ---- what a command reads of a run


def row(step, **more):
    return json.dumps({"step": step, "train/loss": 5.0 - step, "perf/step_secs": 0.1, **more}) + "\n"


def make_run(folder, *, steps=2):
    """What watch reads of a run, without checkpoints."""
    files.write_whole(folder / "config.json", json.dumps(default_settings().to_dict()))
    files.write_whole(folder / "metadata.json", json.dumps({"starts": [{"start": 0}]}))
    log = files.append_file(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        log.write(row(step, time=1e9))
    log.flush()
    return log


def test_a_run_in_a_bucket_is_watched_and_only_what_is_new_is_read(bucket, monkeypatch):
    log = make_run(bucket / "run")
    run = watch.WatchedRun(bucket / "run", clock=lambda: 1e9 + 5)
    assert run.name == "run" and run.metrics.steps == [1, 2] and run.status.state == "running"
    log.write(row(3))
    log.close()
    answer, names = buckets._answer, []
    monkeypatch.setattr(buckets, "_answer", lambda path, reading: names.append(path.name) or answer(path, reading))
    run.refresh()
    assert run.metrics.steps == [1, 2, 3] and names == ["000000000002"]
    files.replace_log(bucket / "run" / "metrics.jsonl", [row(1).encode()])  # as a resumed run does
    run.refresh()
    assert run.metrics.steps == [1]
    run.clock = lambda: 1e9 + 500
    assert run.status.state == "stands still"


def test_a_folder_of_runs_in_a_bucket_is_a_table(bucket, capsys):
    make_run(bucket / "one").close()
    make_run(bucket / "two", steps=4).close()
    assert watch.main([str(bucket), "--table", "--sort=loss", "--width=100"]) == 0
    said = capsys.readouterr().out
    assert said.index(" two ") < said.index(" one ")


def test_a_store_that_is_gone_for_a_moment_keeps_the_picture(bucket, monkeypatch):
    make_run(bucket / "run").close()
    run = watch.WatchedRun(bucket / "run")

    def fails(*_):
        raise StoreError(5, "no answer", "s3://bucket")

    monkeypatch.setattr(buckets, "_asked", fails)
    watch.refresh([run])
    assert run.metrics.steps == [1, 2]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_store_that_does_not_answer_makes_no_step_damaged(bucket, monkeypatch, wrapped):
    make_run(bucket / "run").close()
    run = watch.WatchedRun(bucket / "run")
    run.saved = saved = watch.Saved([4], [], [])
    files.write_file(bucket / "run" / "checkpoints" / "5" / "manifest.json", "{}")

    def fails(*_):
        error = StoreError(5, "no answer", "s3://bucket")
        if wrapped:
            raise CheckpointError("the steps cannot be read") from error
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(watch, "check_steps", fails)
        watch.refresh([run])
    assert run.saved == saved
    watch.refresh([run])
    assert run.saved.damaged == [5]


def test_a_folder_in_a_bucket_without_a_run_is_named(bucket, capsys):
    make_run(bucket / "one").close()
    assert watch.main([str(bucket), "--once"]) == 3
    said = capsys.readouterr().err
    assert f"'{bucket}' is not the folder of a run" in said and "runs below it: one" in said


def test_the_config_of_a_run_in_a_bucket_is_read_and_a_program_is_not_run(bucket, capsys):
    make_run(bucket / "run").close()
    line = read_line(["train.py", f"--config={bucket}/run/config.json", "--config.train.steps=7"], {})
    assert line.config.train.steps == 7
    files.write_whole(bucket / "evil.py", "raise SystemExit(9)")
    with pytest.raises(ConfigError, match="is code, which is run only from a file of this machine"):
        load_config(f"{bucket}/evil.py")
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(f"{bucket}/none.json")


# ---- data


def config(folder, **changes):
    return DataConfig(**{"source": "prepared", "path": str(folder), "seq": 16, "global_batch": 2, **changes})


def put(here, folder):
    for path in files.files_below(here):
        files.write_whole(folder / path.relative_to(here), files.read_bytes(path))


def test_a_corpus_is_prepared_from_a_bucket_into_a_bucket(bucket, tmp_path, capsys):
    for name in ("1.txt", "2.txt"):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / "corpus" / name).write_text(f"{name} " * 3000)
    put(tmp_path / "corpus", bucket / "corpus")
    there = ["prepare", "--source=text", f"--path={bucket}/corpus/*.txt", "--tokenizer=bytes", f"--out={bucket}/shards"]
    here = [*there[:2], f"--path={tmp_path}/corpus", there[3], f"--out={tmp_path}/shards"]
    assert data_command.main(there) == data_command.main(here) == 0
    assert Manifest.read(bucket / "shards") == Manifest.read(tmp_path / "shards")
    assert files.names_in(bucket / "shards") == ["00000.documents", "00000.ids", "manifest.json", "tokenizer.json"]
    assert data_command.main(there) == data_command.main(["inspect", f"{bucket}/shards"]) == 0
    assert "1 shards: none damaged" in capsys.readouterr().out


def test_a_killed_prepare_goes_on_in_the_bucket(bucket, monkeypatch, tmp_path):
    here = prepare_texts(TEXTS, tmp_path, shard_bytes=2000)
    with monkeypatch.context() as killed:
        killed.setattr(Manifest, "write", lambda *_: (_ for _ in ()).throw(KeyError("killed")))
        with pytest.raises(KeyError):
            prepare_texts(TEXTS, bucket, shard_bytes=2000)
    assert "unfinished.jsonl" in files.names_in(bucket) and "manifest.json" not in files.names_in(bucket)
    with monkeypatch.context() as watched:
        watched.setattr(prepare, "write_shard", None)  # nothing is tokenised again
        assert prepare_texts(TEXTS, bucket, shard_bytes=2000) == here
    assert not {"unfinished.jsonl", ".lock"} & {*files.names_in(bucket)}


def test_half_of_a_shard_a_changed_one_and_a_missing_one_are_named(bucket, tmp_path):
    prepare_texts(TEXTS, tmp_path / "shards", shard_bytes=2000)
    put(tmp_path / "shards", bucket)
    reader = open_reader(config(bucket), folder=None, vocab=None, split="train")
    here = open_reader(config(tmp_path / "shards"), folder=None, vocab=None, split="train")
    assert reader.fingerprint == here.fingerprint and (reader.batch(3)["tokens"] == here.batch(3)["tokens"]).all()
    content = files.read_bytes(bucket / "00000.ids")
    for wrong, said in (
        (content[:-10], r"shard s3://\S+/00000.ids has \d+ bytes where"),
        (bytes(len(content)), r"shard s3://\S+/00000.ids is damaged: sha256"),
    ):
        files.write_whole(bucket / "00000.ids", wrong)
        with pytest.raises(DataError, match=said):
            open_reader(config(bucket), folder=None, vocab=None, split="train")
    files.remove(bucket / "00000.ids")
    with pytest.raises(DataError, match=r"shard s3://\S+/00000.ids is missing"):
        open_reader(config(bucket), folder=None, vocab=None, split="train")


def test_an_object_is_copied_in_pieces_and_one_that_changes_meanwhile_is_named(bucket, monkeypatch):
    monkeypatch.setattr(buckets, "OBJECT_PIECE_BYTES", 7)
    for size in (0, 6, 7, 8, 21):
        files.write_whole(bucket / f"{size}", bytes(range(size)))
        assert files.local_copy(bucket / f"{size}").read_bytes() == bytes(range(size))
    pieces = buckets._pieces(bucket / "21", files.state_of(bucket / "21"))
    next(pieces)
    files.write_whole(bucket / "21", bytes(21))
    with pytest.raises(OSError, match="it was changed while it was read"):
        next(pieces)
    assert not [name for name in os.listdir(copies_folder()) if name.endswith(copies.PART)]


def test_a_missing_corpus_and_a_missing_bucket_are_one_line(bucket, capsys):
    for url in (f"{bucket}/none", "s3://none/corpus"):
        assert data_command.main(["prepare", "--source=text", f"--path={url}", "--tokenizer=bytes", "--out=x"]) == 5
        said = capsys.readouterr().err
        assert url in said and said.count("\n") == 1 and SECRET not in said
    assert data_command.main(["prepare", "--source=synthetic", "--tokenizer=bytes", "--out=s3://none/shards"]) == 5
    assert "bucket does not exist" in capsys.readouterr().err


def test_data_of_a_store_that_refuses_or_does_not_answer_is_one_line_without_credentials(bucket, monkeypatch):
    monkeypatch.setattr(buckets, "RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DataError, match="cannot be read: Could not connect|cannot be read: .*connect") as refused:
        open_reader(config(bucket), folder=None, vocab=None, split="train")
    assert SECRET not in str(refused.value) and "\n" not in str(refused.value)


# ---- models


def test_the_tensors_of_a_model_in_a_bucket_are_those_of_its_files(bucket, tmp_path):
    import numpy as np

    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}
    (tmp_path / INDEX).write_text(write_model(tmp_path, tensors, lambda name: [tensors[name]], shard_bytes=24))
    for path in tmp_path.glob("*.safetensors*"):
        files.write_whole(bucket / path.name, path.read_bytes())
    there = read_model(bucket)
    assert all((there[name].whole() == tensors[name]).all() for name in tensors)
    files.remove(bucket / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors is missing"):
        read_model(bucket)
