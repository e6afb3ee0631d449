"""Wrong settings and damaged data are errors that name what is wrong, before a wrong number is read."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
from support.data_examples import TEXTS, data_config, prepare_texts, prepared_reader

from parallax.data import open_reader
from parallax.errors import ConfigError, DataError

TOKENS = sum(len(text.encode()) + 1 for text in TEXTS if text)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"source": "moby dick"}, "data.source='moby dick' is unknown; did you mean 'moby'"),
        ({"source": "text"}, "data.path='' but data.source='text' needs a file, folder or glob"),
        ({"source": "stdlib", "path": "x"}, "data.path='x' is not read by data.source='stdlib'"),
        ({"source": "jsonl", "path": "x", "field": ""}, "data.field='' but data.source='jsonl' needs"),
        ({"source": "prepared", "path": "x", "cache": "y"}, "data.cache='y' is not used by data.source='prepared'"),
        ({"tokenizer": "gpt2"}, r"data.tokenizer='gpt2' is unknown; use 'auto', 'bytes', 'bpe' or .* tokenizer\.json"),
        ({"tokenizer": "bpe", "bpe_vocab": 256}, "data.bpe_vocab=256 is too small; use 257 or more"),
        ({"seq": 0}, "data.seq=0 is too small; use 1 or more"),
        ({"global_batch": 0}, "data.global_batch=0 is too small; use 1 or more"),
        ({"synthetic_tokens": 1}, "data.synthetic_tokens=1 is too small; use 2 or more"),
        ({"seed": -1}, "data.seed=-1 is too small; use 0 or more"),
        ({"eval_fraction": 1.0}, "data.eval_fraction=1.0 is not a share"),
        ({"eval_fraction": -0.1}, "data.eval_fraction=-0.1 is not a share"),
    ],
)
def test_a_wrong_setting_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        data_config(**changes)


def test_every_setting_of_the_base_config_is_read():
    assert {field.name for field in dataclasses.fields(data_config())} == {
        *("source", "path", "field", "tokenizer", "bpe_vocab", "cache", "cache_bytes", "seq"),
        *("global_batch", "eval_fraction", "seed", "special_tokens", "synthetic_tokens", "where", "mixture", "phases"),
        *("format", "chat_template", "loss_on", "too_long"),
    }


@pytest.fixture
def folder(tmp_path):
    prepare_texts(TEXTS, tmp_path)
    return tmp_path


def edit_manifest(folder, **changes):
    file = folder / "manifest.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps(content))
    return content


def edit_shard(folder, number, **changes):
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    shards[number].update(changes)
    edit_manifest(folder, shards=shards)


def sign_shard(folder, number):
    """Make the manifest agree with the files, as someone who writes shards by hand would."""
    names = {kind: folder / f"{number:05}.{kind}" for kind in ("ids", "documents")}
    sums = {f"{kind}_sha256": hashlib.sha256(file.read_bytes()).hexdigest() for kind, file in names.items()}
    edit_shard(folder, number, **sums)


def test_a_folder_without_a_manifest_is_named(tmp_path):
    with pytest.raises(DataError, match=r"has no manifest\.json; make it with `python -m parallax.data prepare`"):
        prepared_reader(tmp_path / "nothing")


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", '{"format": "parallax shards 1"}'])
def test_a_damaged_manifest_is_named(folder, content):
    (folder / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"manifest\.json (is damaged|cannot be read)"):
        prepared_reader(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": "many"}, "damaged: tokens='many' is not a legal value"),
        ({"vocab": -1}, "damaged: vocab=-1 is not a legal value"),
        ({"shards": {}}, "damaged: shards={} is not a legal value"),
        ({"shards": []}, "damaged: documents=5, but its shards have 0"),
        ({"shards": [3]}, "damaged: shard is int, not an object"),
        ({"extra": 1}, "damaged: manifest lacks, or should not have, extra"),
        ({"tokens": 7}, rf"damaged: tokens=7, but its shards have {TOKENS}"),
        ({"format": "parallax shards 2"}, "has format 'parallax shards 2'; this version reads"),
    ],
)
def test_a_manifest_that_does_not_agree_with_itself_is_refused(folder, changes, message):
    edit_manifest(folder, **changes)
    with pytest.raises(DataError, match=message):
        prepared_reader(folder)


@pytest.mark.parametrize("name", ["../00000", "/etc/passwd", "0", "", "00000\n"])
def test_a_shard_name_cannot_leave_its_folder(folder, name):
    edit_shard(folder, 0, name=name)
    with pytest.raises(DataError, match="damaged: shard name .* is not a number of five digits"):
        prepared_reader(folder)


@pytest.mark.parametrize("kind", ["ids", "documents"])
def test_a_harmed_shard_is_named(folder, kind):
    file = folder / f"00001.{kind}"
    content = bytearray(file.read_bytes())
    advice = "run `python -m parallax.data prepare` again"
    content[3] ^= 16
    file.write_bytes(content)
    with pytest.raises(DataError, match=rf"shard .*00001\.{kind} is damaged: sha256 .*; {advice}"):
        prepared_reader(folder)
    file.write_bytes(content[:-3])
    sizes = f"has {len(content) - 3} bytes where the manifest says {len(content)}"
    with pytest.raises(DataError, match=rf"shard .*00001\.{kind} {sizes}; {advice}"):
        prepared_reader(folder)
    file.unlink()
    with pytest.raises(DataError, match=rf"shard .*00001\.{kind} is missing; {advice}"):
        prepared_reader(folder)


def test_a_shard_that_is_cut_while_it_is_read_is_an_error(folder):
    reader = prepared_reader(folder)
    file = folder / "00001.ids"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(DataError, match=r"shard .*00001\.ids was truncated while it was read"):
        for step in range(reader.batches):
            reader.batch(step)


def test_an_id_beyond_the_vocab_is_named_with_its_place(folder):
    file = folder / "00001.ids"
    ids = np.fromfile(file, "<u2")
    ids[13] = 999
    file.write_bytes(ids.tobytes())
    sign_shard(folder, 1)
    reader = prepared_reader(folder)
    message = r"shard .*00001\.ids holds id 999 at position 13, but the tokenizer has 257 ids"
    with pytest.raises(DataError, match=message):
        for step in range(reader.batches):
            reader.batch(step)


def test_documents_that_do_not_add_up_are_refused(folder):
    file = folder / "00001.documents"
    table = np.fromfile(file, "<u8")
    table[0] += 1
    file.write_bytes(table.tobytes())
    sign_shard(folder, 1)
    with pytest.raises(DataError, match=rf"its documents have {TOKENS + 1} tokens, its shards {TOKENS}"):
        prepared_reader(folder)


def test_large_data_is_not_read_whole_to_open_it(folder, monkeypatch):
    monkeypatch.setattr("parallax.data.reader.CHECKSUM_BYTES", 10)
    file = folder / "00001.ids"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    prepared_reader(folder)


def test_the_tokenizer_of_a_config_must_be_that_of_the_shards(folder, tmp_path):
    bpe = tmp_path / "bpe"
    prepare_texts(TEXTS, bpe, tokenizer="bpe")
    prepared_reader(bpe, tokenizer="bpe")
    prepared_reader(bpe, tokenizer=str(bpe / "tokenizer.json"))
    with pytest.raises(DataError, match=r"data.tokenizer='bytes' is not that of .*bpe: that is 'bpe' with \d+ ids"):
        prepared_reader(bpe, tokenizer="bytes")
    with pytest.raises(DataError, match="data.tokenizer='bpe' is not that of .*: that is 'bytes' with 257 ids"):
        prepared_reader(folder, tokenizer="bpe")
    other = tmp_path / "other"
    prepare_texts(["other text"], other, tokenizer="bpe")
    with pytest.raises(DataError, match="is not that of .*bpe: that is 'bpe'"):
        prepared_reader(bpe, tokenizer=str(other / "tokenizer.json"))


def test_a_tokenizer_of_other_shards_is_refused(tmp_path):
    prepare_texts(TEXTS, tmp_path / "a", tokenizer="bpe")
    prepare_texts(["other text"], tmp_path / "b", tokenizer="bpe")
    (tmp_path / "b" / "tokenizer.json").replace(tmp_path / "a" / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json is not the tokenizer that made the shards beside it"):
        prepared_reader(tmp_path / "a", tokenizer="bpe")
    (tmp_path / "a" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer\.json (is not a tokenizer|cannot be read)"):
        prepared_reader(tmp_path / "a", tokenizer="bpe")


def test_a_corpus_without_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    config = data_config(source="text", path=str(tmp_path))
    with pytest.raises(DataError, match="the corpus is empty"):
        open_reader(config, folder=tmp_path / "run", vocab=None, split="train")
