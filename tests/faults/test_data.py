"""Text, shards and tokenizers that are wrong: a run names them and ends with status 5, or trains on what is there.

The errors of single functions are in tests/test_data_*.py; here runs and commands meet the faults.
"""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from support.data_examples import TEXTS, prepare_texts, prepared_reader
from support.run_examples import at_step, tiny_config
from support.stand_ins import forbid_code

from parallax.checkpoint.steps import latest_step
from parallax.cli import train as command_line
from parallax.data.shards import Manifest, write_shard
from parallax.data.tokenizer import Bytes
from parallax.errors import CheckpointError, ConfigError, DataError
from parallax.storage.run_files import read_metrics
from parallax.training.run import train

ROOT = pathlib.Path(__file__).parents[2]


BROKEN = {
    "text that is not UTF-8": ("text", "a.txt", b"good\xffbad", "a.txt is not UTF-8 text: byte 0xff at offset 4"),
    "an empty file": ("text", "a.txt", b"", "the corpus is empty: 0 documents, none with text; give it some"),
    "a line that is no JSON": ("jsonl", "a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2 cannot be read as JSON"),
    "a line without its field": (
        "jsonl",
        "a.jsonl",
        b'{"txt": "x"}\n',
        "has no field 'text' (data.field); fields: txt",
    ),
    "JSON that is not UTF-8": ("jsonl", "a.jsonl", b'{"text": "\xff"}\n', "a.jsonl:1 cannot be read as JSON"),
    "a file that is no Parquet": ("parquet", "a.parquet", b"PAR1 and nothing more", "a.parquet"),
    "an empty Parquet file": ("parquet", "a.parquet", b"", "a.parquet"),
    "an empty JSONL file": ("jsonl", "a.jsonl", b"", "the corpus is empty"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_run_on_broken_text_ends_with_status_5_and_one_line(fault, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    source, name, content, message = BROKEN[fault]
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_bytes(content)
    flags = [f"--config.data.source={source}", f"--config.data.path={tmp_path / 'corpus' / name}"]
    status = command_line.main(["train.py", "--config=configs/tiny_gqa.py", *flags, f"--workdir={tmp_path / 'run'}"])
    said = capsys.readouterr()
    assert status == 5 and said.err.startswith("DataError: ") and len(said.err.splitlines()) == 1
    assert message in said.err and "checkpoints" not in {path.name for path in (tmp_path / "run").glob("*")}


def trained(texts, folder, **changes):
    """The rows of metrics of a short run on these documents, each a file."""
    (folder / "corpus").mkdir()
    for number, text in enumerate(texts):
        (folder / "corpus" / f"{number:04}.txt").write_text(text)
    config = tiny_config(folder / "corpus", **changes)
    assert train(config, folder / "run").reason == "finished"
    return read_metrics(folder / "run" / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    "texts",
    [["one very long document of many windows " * 300, "and another " * 300], ["a", "b"] * 300],
    ids=["documents longer than the window", "one-token documents"],
)
def test_documents_of_any_length_train(texts, tmp_path):
    rows = trained(texts, tmp_path)
    assert all(np.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 for row in rows)
    assert rows[-1]["eval/loss"] > 0 and not rows[-1]["train/skipped_steps"]


@pytest.mark.slow
def test_a_batch_without_any_label_changes_nothing_by_its_loss(tmp_path):
    """Windows of one token: those that hold a document's end have no label, and may come alone into a batch."""
    rows = trained(["a"] * 40, tmp_path, **{"data.seq": 1})
    assert all(row["train/loss"] >= 0 and np.isfinite(row["train/grad_norm"]) for row in rows)


class Wrong(Bytes):
    """A tokenizer that gives ids which it says it does not have."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong

    def encode_many(self, texts, **_):
        return [np.array([1, self.wrong, 2], np.int32) for _ in texts]


@pytest.mark.parametrize("wrong", [-1, 257, 70_000])
def test_ids_that_the_tokenizer_does_not_have_are_not_written(wrong, tmp_path):
    """As unsigned numbers of 16 bits, -1 and 70,000 would be other ids."""
    ids = rf"gives ids from {min(wrong, 1)} to {max(wrong, 256)}, but says that it has 257 \(0 to 256\)"
    with pytest.raises(DataError, match=ids):
        write_shard(tmp_path, "00000", ["text"], Wrong(wrong))
    assert not list(tmp_path.iterdir())


def tokenising(texts, folder, *, workers):
    """The command that prepares these texts in shards of a MiB, in `folder / "out"`."""
    (folder / "corpus").mkdir()
    for number, text in enumerate(texts):
        (folder / "corpus" / f"{number}.txt").write_text(text)
    command = [sys.executable, "-m", "parallax.data", "prepare", "--source", "text", "--path", str(folder / "corpus")]
    command += ["--tokenizer", "bytes", "--shard-mib", "1", "--workers", str(workers), "--out", str(folder / "out")]
    return command


def test_a_disk_that_is_full_while_tokenising_is_named_and_the_next_run_completes(tmp_path):
    command = tokenising([f"{number} words and words, " * 30_000 for number in range(3)], tmp_path, workers=1)
    run = dict(cwd=ROOT, capture_output=True, text=True)
    # Files of at most 64 KiB: a write that goes beyond fails, as on a disk that is full.
    ended = subprocess.run(["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", *command], **run)
    assert ended.returncode == 5 and len(ended.stderr.splitlines()) == 1
    assert "stopped at " in ended.stderr and "00000.ids" in ended.stderr and "run again to resume" in ended.stderr
    assert not [*(tmp_path / "out").glob("manifest.json"), *(tmp_path / "out").glob("*.tmp")]
    assert subprocess.run(command, **run).returncode == 0
    written = sum(file.stat().st_size for file in (tmp_path / "corpus").iterdir())
    assert Manifest.read(tmp_path / "out").text_bytes == written and not list((tmp_path / "out").glob("*.tmp"))


@pytest.fixture
def prepared(corpus, tmp_path):
    """A run's config on shards of its own, and their folder."""
    texts = [path.read_text() for path in sorted(corpus.glob("*.txt"))]
    prepare_texts(texts, tmp_path / "shards", shard_bytes=4000)
    data = {"data.source": "prepared", "data.path": str(tmp_path / "shards"), "data.cache": ""}
    return tiny_config(corpus, **data, **{"checkpoint.every_steps": 1}), tmp_path / "shards"


def harm(file, how):
    content = bytearray(file.read_bytes())
    if how == "deleted":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif how == "a flipped bit":
        content[7] ^= 4
        file.write_bytes(content)
    elif how == "a symbolic link elsewhere":
        file.unlink()
        file.symlink_to("/etc/hostname")


@pytest.mark.parametrize("how", ["deleted", "truncated", "a flipped bit", "a symbolic link elsewhere"])
def test_a_run_on_a_harmed_shard_ends_with_status_5_before_it_starts(how, prepared, tmp_path):
    config, folder = prepared
    harm(folder / "00001.ids", how)
    with pytest.raises(DataError, match=r"shard .*00001\.ids (is missing|has \d+ bytes|is damaged).*prepare` again"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_shard_that_is_cut_while_a_run_reads_ends_it_with_status_5_and_what_was_saved_stays(
    prepared, tmp_path, monkeypatch
):
    config, folder = prepared
    at_step(monkeypatch, 2, lambda: [os.truncate(file, 10) for file in folder.glob("*.ids")])
    with pytest.raises(DataError, match=r"shard .*\.ids was truncated while it was read") as error:
        train(config, tmp_path / "run")
    assert error.value.exit_status == 5 and latest_step(tmp_path / "run" / "checkpoints") >= 2


def edited(folder, change):
    file = folder / "manifest.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def all_of(key, value):
    """A count in the manifest and in its first shard, so that they agree."""

    def change(content):
        content["shards"] = content["shards"][:1]
        for name in ("documents", "empty_documents", "tokens", "text_bytes"):
            content[name] = content["shards"][0][name]
        content[key] = content["shards"][0][key] = value

    return change


ABSURD = {
    "tokens": (all_of("tokens", 10**30), r"00000\.ids has \d+ bytes where the manifest says 2000000000000000"),
    "documents": (all_of("documents", 2**62), r"00000\.documents has \d+ bytes where the manifest says"),
    "no text": (all_of("text_bytes", 0), "documents and 0 bytes"),
    "vocab": (lambda content: content.update(vocab=10**30), "is not the tokenizer that made the shards|bytes where"),
    "entropy": (
        lambda content: content.update(token_entropy_nats=float("nan")),
        "token_entropy_nats=nan is not a legal",
    ),
    "negative": (lambda content: content.update(byte_entropy_nats=-1.0), "byte_entropy_nats=-1.0 is not a legal"),
    "many shards": (lambda content: content.update(shards=content["shards"] * 1000), "but its shards have"),
}


@pytest.mark.parametrize("what", ABSURD)
def test_absurd_sizes_in_a_manifest_are_refused_before_memory_is_taken_for_them(what, tmp_path):
    prepare_texts(TEXTS, tmp_path)
    change, message = ABSURD[what]
    edited(tmp_path, change)
    with pytest.raises(DataError, match=message):
        prepared_reader(tmp_path)


def test_a_manifest_that_is_a_folder_or_a_link_to_another_is_refused(tmp_path):
    prepare_texts(TEXTS, tmp_path / "a")
    prepare_texts([text + " more" for text in TEXTS], tmp_path / "b")
    (tmp_path / "a" / "manifest.json").unlink()
    (tmp_path / "a" / "manifest.json").symlink_to(tmp_path / "b" / "manifest.json")
    with pytest.raises(DataError, match=r"shard .*a/0000\d\.\w+ (is missing|has \d+ bytes|is damaged)"):
        prepared_reader(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").unlink()
    (tmp_path / "a" / "manifest.json").mkdir()
    with pytest.raises(DataError, match=r"manifest\.json cannot be read: Is a directory"):
        prepared_reader(tmp_path / "a")


def test_a_tokenizer_that_changed_between_two_starts_is_refused(prepared, tmp_path):
    config, folder = prepared
    other = tmp_path / "other"
    prepare_texts(TEXTS, other, tokenizer="bpe")
    config.data.tokenizer = str(other / "tokenizer.json")
    with pytest.raises(DataError, match=r"data.tokenizer='.*tokenizer\.json' is not that of .*shards: that is 'bytes'"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize("prompt, message", [("\udc80", "half a surrogate pair, which is not text; leave it out")])
def test_a_prompt_that_is_no_text_is_known_before_the_first_step(prompt, message, corpus, tmp_path, compiles_nothing):
    with pytest.raises(ConfigError, match=message):
        train(tiny_config(corpus, **{"sample.prompt": prompt}), tmp_path / "run")


@pytest.mark.slow
def test_a_slow_disk_shows_as_waiting_and_changes_no_bit(corpus, tmp_path, monkeypatch):
    few = {"train.eval_batches": 0, "checkpoint.keep_best": 0, "checkpoint.every_steps": 0}
    train(tiny_config(corpus, **few), tmp_path / "fast")
    preadv = os.preadv

    def slow(*args):
        time.sleep(0.02)  # eight reads in a batch
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", slow)
    train(tiny_config(corpus, **few), tmp_path / "slow")
    fast, slow = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("fast", "slow"))
    assert [row["train/loss"].hex() for row in fast] == [row["train/loss"].hex() for row in slow]
    assert sum(row["perf/data_wait_secs"] for row in slow) > sum(row["perf/data_wait_secs"] for row in fast)


HOUR = 3600.0


@pytest.mark.slow
@pytest.mark.parametrize("jump", [-HOUR, HOUR], ids=["back", "forward"])
def test_a_clock_that_jumps_loses_nothing(jump, corpus, tmp_path, monkeypatch):
    """An hour each time that anybody looks. Orbax takes a jump forward for a save that hangs: the run then ends as with
    any failed save, and the same command goes on."""
    few = {"train.eval_batches": 0, "checkpoint.keep_best": 0, "checkpoint.every_steps": 2}
    train(tiny_config(corpus, **few), tmp_path / "steady")
    now, jumps = time.time, itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + jump * next(jumps))
        if jump < 0:
            train(tiny_config(corpus, **few), tmp_path / "jumping")
        else:
            with pytest.raises(CheckpointError, match=r"cannot save step 2 .*; older steps are untouched"):
                train(tiny_config(corpus, **few), tmp_path / "jumping")
    train(tiny_config(corpus, **few), tmp_path / "jumping")
    steady, jumping = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("steady", "jumping"))
    losses = [(row["step"], row["train/loss"].hex()) for row in steady]
    assert losses == [(row["step"], row["train/loss"].hex()) for row in jumping]
    assert all(row["perf/step_secs"] > 0 for row in jumping)


def test_the_newest_checkpoint_is_that_of_the_last_step_whatever_its_date(corpus, tmp_path):
    few = {"train.eval_batches": 0, "checkpoint.keep_best": 0, "checkpoint.every_steps": 4}
    train(tiny_config(corpus, **few), tmp_path)
    os.utime(tmp_path / "checkpoints" / "8", (0, 0))
    assert latest_step(tmp_path / "checkpoints") == 8


def test_loading_data_runs_no_code(tmp_path, monkeypatch):
    """An array that is pickled, where a table of documents should be, is bytes like any others."""
    prepare_texts(TEXTS, tmp_path)
    np.save(tmp_path / "00000.documents.npy", np.array([{"a": 1}], object), allow_pickle=True)
    (tmp_path / "00000.documents.npy").replace(tmp_path / "00000.documents")
    forbid_code(monkeypatch)
    with pytest.raises(DataError, match=r"shard .*00000\.documents has"):
        prepared_reader(tmp_path)
