"""Tokenizers give back every text, and say what is wrong with a file."""

import json
import pickle
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from parallax.errors import ConfigError, DataError
from parallax.tokenizer import Bytes, load, train_bpe

DOCUMENTS = ["the cat sat on the mat\n" * 20, "def f(x):\n    return x + 1\n" * 20, "日本語 and ünïcode\n" * 5]
BPE = train_bpe(DOCUMENTS, vocab=290)
TOKENIZERS = pytest.mark.parametrize("tokenizer", [Bytes(), BPE], ids=lambda tokenizer: tokenizer.name)

texts = st.text(st.characters(exclude_categories=["Cs"]))


@TOKENIZERS
@given(text=texts)
def test_decoding_gives_back_what_was_encoded(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab and i != tokenizer.end for i in ids)


@TOKENIZERS
def test_encoding_many_is_encoding_each(tokenizer):
    for one, many in zip(map(tokenizer.encode, DOCUMENTS), tokenizer.encode_many(DOCUMENTS)):
        np.testing.assert_array_equal(one, many)


@TOKENIZERS
def test_text_that_spells_a_special_token_is_text(tokenizer):
    text = "a <|endoftext|> b"
    assert tokenizer.end not in tokenizer.encode(text)
    assert tokenizer.end not in pickle.loads(pickle.dumps(tokenizer)).encode(text)


@TOKENIZERS
def test_decoding_leaves_out_ends_and_the_padding_of_a_model(tokenizer):
    ids = [*tokenizer.encode("ab"), tokenizer.end, tokenizer.vocab, tokenizer.vocab + 100, *tokenizer.encode("c")]
    assert tokenizer.decode(ids) == "abc"


@TOKENIZERS
def test_a_tokenizer_is_loaded_as_it_was_saved(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load(place)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert (loaded.vocab, loaded.end, loaded.name) == (tokenizer.vocab, tokenizer.end, tokenizer.name)
        np.testing.assert_array_equal(loaded.encode("the cat"), tokenizer.encode("the cat"))


def test_a_character_that_was_cut_is_shown_as_such():
    assert Bytes().decode("né".encode()[:2]) == "n\N{REPLACEMENT CHARACTER}"


def test_equal_documents_train_equal_entries():
    assert train_bpe(DOCUMENTS, vocab=290).fingerprint == BPE.fingerprint
    assert train_bpe(DOCUMENTS[:1], vocab=290).fingerprint != BPE.fingerprint


def test_bpe_has_at_most_the_entries_that_are_asked_for():
    assert BPE.vocab == 290
    assert train_bpe(["ab"], vocab=10_000).vocab < 300
    with pytest.raises(ConfigError, match="bpe_vocab=100 is too small; 257"):
        train_bpe(DOCUMENTS, vocab=100)


def test_bpe_without_its_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[data\]'"):
        train_bpe(DOCUMENTS, vocab=300)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no\.json' does not exist"):
        load(tmp_path / "no.json")


@pytest.mark.parametrize("content", ["", "{", '{"model": 3}', "[1]", "{}", b"\xff\xfe"])
def test_a_damaged_file_is_named(content, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        load(tmp_path)


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    BPE.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(DataError, match=r"no token that ends a document; one of <\|endoftext\|>, .*</s>"):
        load(file)


def test_the_end_of_other_projects_is_found(tmp_path):
    BPE.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "</s>"))
    assert load(file).end == json.loads(file.read_text())["model"]["vocab"]["</s>"]
