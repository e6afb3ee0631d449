"""The command line of data: one line for an error, an exit status for its kind, and shards that survive a kill."""

import hashlib
import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from configs.base import get_config
from parallax.cli.data import main
from parallax.config.sections import DataConfig
from parallax.data import open_reader
from parallax.data.shards import Manifest

MOBY = ["prepare", "--source", "moby", "--tokenizer", "bytes", "--out"]


def failure(capsys, *arguments):
    """Exit status and message of a command."""
    status = main([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert error.count("\n") == 1, "one line"
    return status, error.strip()


def test_prepare_then_inspect(tmp_path, capsys):
    assert main([*MOBY, str(tmp_path)]) == 0
    prepared = capsys.readouterr().out
    assert "tokens      298,495 in 1 shards as uint16" in prepared
    assert "documents   32 (0 empty ones left out)" in prepared
    assert main(["inspect", str(tmp_path)]) == 0
    inspected = capsys.readouterr().out
    assert inspected == prepared + "checked     1 shards: none damaged\n"


def test_inspect_says_where_texts_hold_ends_of_documents(tmp_path, capsys):
    """As shards of earlier versions do, made with a tokenizer that finds its end in text."""
    flags = ["--source=synthetic", "--synthetic-tokens=4000", "--tokenizer=bytes", "--out", str(tmp_path)]
    assert main(["prepare", *flags]) == 0
    ids = np.fromfile(tmp_path / "00000.ids", "<u2")
    ids[[3, 9]] = 256
    ids.tofile(tmp_path / "00000.ids")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["shards"][0]["ids_sha256"] = hashlib.sha256(ids.tobytes()).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 0
    assert "2 inside of documents: text became the token '<|endoftext|>'" in capsys.readouterr().out


def test_prepare_makes_tokens_of_text_where_it_shall(tmp_path, capsys, caplog):
    """Or says how often it did not."""
    (tmp_path / "a.txt").write_text("one<|endoftext|>two " * 40)
    flags = ["--source=text", f"--path={tmp_path / 'a.txt'}", "--tokenizer=bpe", "--bpe-vocab=300"]
    for how, ends in (("text", 1), ("tokens", 41)):
        assert main(["prepare", *flags, f"--special-tokens={how}", "--out", str(tmp_path / how)]) == 0
        assert (np.fromfile(tmp_path / how / "00000.ids", "<u2") == 0).sum() == ends
        said = "special tokens of the tokenizer 40 times (<|endoftext|> 40)" in caplog.text
        assert said == (how == "text")
        caplog.clear()
        assert main(["inspect", str(tmp_path / how)]) == 0
        assert "inside of" not in capsys.readouterr().out


def test_inspect_names_the_damaged_shard(tmp_path, capsys):
    main([*MOBY, str(tmp_path)])
    file = tmp_path / "00000.ids"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    status, error = failure(capsys, "inspect", tmp_path)
    assert status == 5
    assert error.startswith(f"DataError: shard {file} is damaged: sha256")


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        ("--source text --tokenizer bytes", 2, "ConfigError: --source text needs --path"),
        ("--source jsonl --path x --field= --tokenizer bytes", 2, "ConfigError: --source jsonl needs --field"),
        ("--source moby --tokenizer bpe --bpe-vocab 0", 2, "ConfigError: --tokenizer bpe needs --bpe-vocab"),
        ("--source synthetic --synthetic-tokens 0", 2, "--source synthetic needs --synthetic-tokens"),
        ("--source text --path x --field y", 2, "--field=y is not read by --source text"),
        ("--source moby --tokenizer bytes --bpe-vocab 300", 2, "--bpe-vocab=300 is not read by --tokenizer bytes"),
        ("--source moby --path x --tokenizer bytes", 2, "--path=x is not read by --source moby"),
        ("--source moby --tokenizer bpe --bpe-vocab 9", 2, "bpe_vocab=9 is too small"),
        ("--source moby --tokenizer bytes --reserve <a>", 2, "--reserve=<a> is not read by --tokenizer bytes"),
        ("--source moby --tokenizer bpe --reserve <a> <a>", 2, "reserved token '<a>' is empty or is there twice"),
        ("--source moby --tokenizer bpe --bpe-vocab 257 --reserve <a>", 2, "258 hold the bytes and the end of a"),
        ("--source moby --tokenizer gpt", 2, "tokenizer='gpt' is unknown"),
        ("--source text --path ['a' --tokenizer bytes", 2, "--path=\"['a'\" is not a list of paths"),
        ("--source text --path nowhere --tokenizer bytes", 5, "path='nowhere': there is no such file or folder"),
        ("--source moby --tokenizer nowhere.json", 5, "tokenizer 'nowhere.json' does not exist"),
    ],
)
def test_an_error_is_one_line_and_a_status(arguments, status, message, tmp_path, capsys):
    found, error = failure(capsys, "prepare", *arguments.split(), "--out", tmp_path / "out")
    assert found == status
    assert message in error


def test_several_paths_are_prepared_as_a_list_of_them(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    files = [str(tmp_path / f"{name}.txt") for name in "cab"]
    for out, paths in (("flags", files), ("list", [str(files)])):
        assert main(["prepare", "--source", "text", "--path", *paths, "--out", str(tmp_path / out)]) == 0
    assert (tmp_path / "flags" / "00000.ids").read_bytes() == (tmp_path / "list" / "00000.ids").read_bytes()
    assert Manifest.read(tmp_path / "list").request["source"]["files"] == 3


@pytest.mark.parametrize("arguments", [[], ["prepair"], [*MOBY, "x", "--workers", "0"], [*MOBY, "x", "lr=3"]])
def test_wrong_arguments_end_with_status_2(arguments, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: ") and error.count("\n") == 1


def test_what_is_left_out_is_as_in_training(tmp_path, corpora):
    """A run with configs/base.py's settings of data finds what `prepare` has made of the same corpus."""
    for source, path in corpora.items():
        out = tmp_path / source
        assert main(["prepare", "--source", source, "--path", str(path), "--out", str(out)]) == 0
        sizes = {"seq": 8, "global_batch": 2}
        config = DataConfig(**get_config().data.to_dict() | sizes | {"source": source, "path": str(path)})
        open_reader(config, folder=tmp_path / "run", vocab=None, split="all")
        (run,) = (tmp_path / "run").glob(f"{source}-*")
        assert Manifest.read(out).request == Manifest.read(run).request


@pytest.fixture
def corpora(tmp_path):
    """A jsonl and a parquet file, whose documents are in the field of configs/base.py, and a text file."""
    texts = [f"Document {number}, of some length." for number in range(20)]
    field = get_config().data.field
    files = {source: tmp_path / f"corpus.{source}" for source in ("text", "jsonl", "parquet")}
    files["text"].write_text("\n".join(texts))
    files["jsonl"].write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    parquet.write_table(pyarrow.table({field: texts}), files["parquet"])
    return files


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--source", "moby", "--tokenizer", "bpe"], "bpe_vocab"),
        (["--source", "synthetic"], "synthetic_tokens"),
        (["--source", "jsonl"], "field"),
    ],
)
def test_each_default_is_that_of_the_base_config(flags, key, corpora, tmp_path, capsys):
    if key == "field":
        flags = [*flags, "--path", str(corpora["jsonl"])]
    assert main(["prepare", *flags, "--out", str(tmp_path / "made")]) == 0
    manifest = Manifest.read(tmp_path / "made")
    found = {"bpe_vocab": manifest.vocab, "synthetic_tokens": manifest.tokens} | manifest.request["source"]
    assert found[key] == get_config().data[key]
    assert manifest.tokenizer == ("bpe" if key == "bpe_vocab" else "bytes")
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert f"(default: {get_config().data[key]}, as in training)" in told


def test_rebuild_replaces_data_of_other_settings(tmp_path, capsys):
    main([*MOBY, str(tmp_path)])
    other = ["prepare", "--source", "synthetic", "--synthetic-tokens", "5000", "--tokenizer", "bytes", "--out"]
    status, error = failure(capsys, *other, tmp_path)
    assert status == 5
    assert "source.kind='moby' where 'synthetic' is wanted" in error
    assert main([*other, str(tmp_path), "--rebuild"]) == 0


def test_a_run_that_is_killed_is_resumed(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    line = "It was the best of times, it was the worst of times,\n"
    for number in range(15):
        (corpus / f"{number:02}.txt").write_text(f"{number} {line}" * 20_000)
    command = [sys.executable, "-m", "parallax.data", "prepare", "--source", "text", "--path", str(corpus)]
    command += ["--tokenizer", "bytes", "--shard-mib", "1", "--workers", "2", "--out", str(tmp_path / "out")]
    root = pathlib.Path(__file__).parents[2]
    journal = tmp_path / "out" / "unfinished.jsonl"
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE)
    while not journal.exists() or len(journal.read_text().splitlines()) < 3:
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=10)  # until the workers, which have the same output, have ended too
    assert not (tmp_path / "out" / "manifest.json").exists()
    finished = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.documents")}
    kept = {line.split('"')[3] for line in journal.read_text().splitlines()[1:] if line.endswith("}")}
    assert subprocess.run(command, cwd=root, stdout=subprocess.DEVNULL).returncode == 0
    assert len(kept) >= 2
    for file, written in finished.items():
        assert file.stem not in kept or file.stat().st_mtime_ns == written
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert not [*(tmp_path / "out").glob("*.tmp")] and not journal.exists()
