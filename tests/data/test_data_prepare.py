"""Prepared shards are the same however they were made: in pieces, in parallel, or after a kill."""

import dataclasses
import json
import threading

import numpy as np
import pytest
from support.data_examples import TEXTS, prepare_texts, source_of
from support.stand_ins import full_disk, on_write

from parallax.cli import data as data_command
from parallax.data.prepare import Request, prepare, remove_prepared
from parallax.data.shards import Manifest, smallest_dtype
from parallax.errors import DataError

MANY = [f"document {number} " * (number % 7) for number in range(60)]


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != ".lock"}


@pytest.fixture
def made(monkeypatch):
    """Names of the shards that are written in this process."""
    names = []
    on_write(monkeypatch, "*.ids", lambda path: names.append(path.stem))
    return names


def test_shards_hold_the_documents_in_order(tmp_path):
    manifest = prepare_texts(TEXTS, tmp_path)
    ids = np.concatenate([np.fromfile(tmp_path / f"{shard.name}.ids", "<u2") for shard in manifest.shards])
    assert ids.tolist() == [i for text in TEXTS if text for i in (*text.encode(), 256)]
    assert [shard.name for shard in manifest.shards] == ["00000", "00001"]
    assert (manifest.documents, manifest.empty_documents, manifest.tokens) == (5, 1, len(ids))
    assert manifest.text_bytes == len("".join(TEXTS).encode())
    assert manifest == Manifest.read(tmp_path)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_two_workers_make_the_same_bytes_as_one(tokenizer, tmp_path):
    for workers in (1, 2):
        prepare_texts(MANY, tmp_path / str(workers), workers=workers, tokenizer=tokenizer, shard_bytes=300)
    one, two = contents(tmp_path / "1"), contents(tmp_path / "2")
    assert one == two
    assert len([name for name in one if name.endswith(".ids")]) > 5


def test_what_is_finished_is_not_made_again(tmp_path, made):
    first = prepare_texts(MANY, tmp_path)
    assert len(made) == len(first.shards)
    made.clear()
    assert prepare_texts(MANY, tmp_path) == first
    assert not made


def stop_after(shards, folder, made):
    """Make some shards, then stop as a kill does: with a line, and a file, that are half written."""
    made.clear()

    def documents():
        for text in MANY:
            if len(made) == shards:
                raise KeyboardInterrupt
            yield text

    source = dataclasses.replace(source_of(MANY), documents=documents)
    with pytest.raises(KeyboardInterrupt):
        prepare(Request(source=source, tokenizer="bytes", bpe_vocab=300, shard_bytes=40), folder, workers=1)
    with open(folder / "unfinished.jsonl", "a") as journal:
        journal.write('{"name": "0000')
    (folder / "00009.ids.tmp").write_bytes(b"half")


def test_a_run_that_was_stopped_is_resumed(tmp_path, made):
    whole = prepare_texts(MANY, tmp_path / "whole")
    folder = tmp_path / "stopped"
    stop_after(5, folder, made)
    stop_after(3, folder, made)
    assert not (folder / "manifest.json").exists()
    made.clear()
    assert prepare_texts(MANY, folder) == whole
    assert len(made) == len(whole.shards) - 8
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_refused_request_leaves_the_folder_as_it_was(tmp_path, made):
    prepare_texts(MANY, tmp_path / "other", tokenizer="bpe")
    folder = tmp_path / "stopped"
    stop_after(3, folder, made)
    before = contents(folder)
    with pytest.raises(DataError, match="holds data of other settings: tokenizer='bytes'"):
        prepare_texts(MANY, folder, tokenizer=str(tmp_path / "other" / "tokenizer.json"))
    assert contents(folder) == before


def test_fingerprints_of_other_data_have_twelve_digits(tmp_path):
    prepare_texts(MANY, tmp_path)
    with pytest.raises(DataError, match="other settings: source.sha256='[0-9a-f]{12}' where '[0-9a-f]{12}' is wanted"):
        prepare_texts(MANY[1:], tmp_path)


@pytest.mark.parametrize("harm", ["missing", "cut", "flipped"])
@pytest.mark.parametrize("kind", ["ids", "documents"])
def test_a_damaged_shard_is_made_again(kind, harm, tmp_path, made, caplog):
    whole = prepare_texts(MANY, tmp_path)
    before = contents(tmp_path)
    file = tmp_path / f"00003.{kind}"
    damage(file, harm)
    made.clear()
    assert prepare_texts(MANY, tmp_path) == whole
    assert made == ["00003"]
    assert contents(tmp_path) == before
    assert f"00003.{kind}" in caplog.text and "written again" in caplog.text


def damage(file, harm):
    content = bytearray(file.read_bytes())
    if harm == "missing":
        file.unlink()
    elif harm == "cut":
        file.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def test_data_of_other_settings_is_refused(tmp_path):
    prepare_texts(TEXTS, tmp_path)
    with pytest.raises(DataError, match=r"other settings: shard_bytes=40 where 41 is wanted; .*--rebuild"):
        prepare_texts(TEXTS, tmp_path, shard_bytes=41)
    with pytest.raises(DataError, match="tokenizer='bytes' where 'bpe' is wanted"):
        prepare_texts(TEXTS, tmp_path, tokenizer="bpe")
    with pytest.raises(DataError, match=r"source\.sha256='.*' where '.*' is wanted"):
        prepare_texts([*TEXTS, "more"], tmp_path)


def test_an_unfinished_folder_of_other_settings_is_refused(tmp_path):
    shard, *_ = prepare_texts(TEXTS, tmp_path).shards
    (tmp_path / "manifest.json").unlink()
    lines = {"source": {"kind": "other"}}, dataclasses.asdict(shard)
    (tmp_path / "unfinished.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=r"source\.kind='other' where 'list' is wanted"):
        prepare_texts(TEXTS, tmp_path)


def test_a_tokenizer_that_was_exchanged_is_refused(tmp_path):
    prepare_texts(MANY, tmp_path, tokenizer="bpe")
    prepare_texts(TEXTS, tmp_path / "other", tokenizer="bpe")
    (tmp_path / "other" / "tokenizer.json").replace(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="tokenizer_fingerprint='.*' where '.*' is wanted"):
        prepare_texts(MANY, tmp_path, tokenizer="bpe")


def test_a_loaded_tokenizer_is_kept_with_its_shards(tmp_path):
    prepare_texts(MANY, tmp_path / "trained", tokenizer="bpe")
    file = tmp_path / "trained" / "tokenizer.json"
    manifest = prepare_texts(TEXTS, tmp_path / "loaded", tokenizer=str(file))
    assert (tmp_path / "loaded" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert manifest.request["tokenizer"] == manifest.tokenizer_fingerprint


@pytest.mark.parametrize("texts, number", [([], 0), (["", "", ""], 3)])
def test_an_empty_corpus_is_refused(texts, number, tmp_path):
    with pytest.raises(DataError, match=f"the corpus is empty: {number} documents, none with text"):
        prepare_texts(texts, tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"stopped at .*file: (Not a directory|File exists)"):
        prepare_texts(TEXTS, tmp_path / "file")


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    on_write(monkeypatch, "*.ids", full_disk)
    with pytest.raises(DataError, match=r"stopped at .*00000\.ids: No space left on device; run again to resume"):
        prepare_texts(TEXTS, tmp_path)


def test_two_at_once_share_the_work_of_one(tmp_path, made):
    threads = [threading.Thread(target=prepare_texts, args=(MANY, tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == len(Manifest.read(tmp_path).shards)


def test_ids_take_two_bytes_where_they_fit():
    assert [smallest_dtype(vocab).itemsize for vocab in (257, 65_536, 65_537)] == [2, 2, 4]


def test_a_large_vocab_is_stored_in_four_bytes(tmp_path):
    prepare_texts(MANY, tmp_path / "small", tokenizer="bpe")
    file = tmp_path / "small" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 70_000, "content": "<|far|>"})
    content["model"]["vocab"]["<|far|>"] = 70_000
    file.write_text(json.dumps(content))
    request = Request(source=source_of(MANY), tokenizer=str(file), bpe_vocab=0)
    manifest = prepare(request, tmp_path / "large", workers=1)
    assert (manifest.vocab, manifest.dtype.itemsize) == (70_001, 4)
    assert (tmp_path / "large" / "00000.ids").stat().st_size == 4 * manifest.tokens


def test_only_prepared_data_is_removed(tmp_path):
    prepare_texts(MANY, tmp_path / "data", tokenizer="bpe")
    (tmp_path / "data" / "00000.ids.tmp").write_text("half")
    remove_prepared(tmp_path / "data")
    assert not (tmp_path / "data").exists()
    remove_prepared(tmp_path / "data")
    (tmp_path / "thesis.doc").write_text("dear")
    with pytest.raises(DataError, match=r"more than prepared data \(thesis\.doc\)"):
        remove_prepared(tmp_path)


def test_an_attempt_that_came_to_no_shard_does_not_stand_in_the_way_of_its_correction(tmp_path):
    """A field that is not there: the right one goes into the same folder, with a tokenizer of its own."""
    (tmp_path / "a.jsonl").write_text('{"body": "one little document"}\n' * 40)
    made = tmp_path / "made"
    command = ["prepare", "--source=jsonl", f"--path={tmp_path / 'a.jsonl'}", f"--out={made}", "--tokenizer=bytes"]
    assert data_command.main(command) == 5
    assert data_command.main([*command, "--field=body"]) == 0
    assert Manifest.read(made).documents == 40
    other = tmp_path / "other"
    prepare_texts(TEXTS, other, tokenizer="bpe")
    (other / "manifest.json").unlink()
    whole = json.dumps(dict(json.loads((made / "manifest.json").read_text())["request"], tokenizer="bpe"))
    (other / "unfinished.jsonl").write_text(whole + "\n")
    prepare_texts(MANY, other, tokenizer="bpe")
    prepare_texts(MANY, tmp_path / "alone", tokenizer="bpe")
    assert contents(other)["tokenizer.json"] == contents(tmp_path / "alone")["tokenizer.json"]
