"""Tokenizers give back every text, and say what is wrong with a file."""

import base64
import hashlib
import json
import signal
import subprocess
import sys
import time

import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
from hypothesis import given

from parallax.data.prepare import Request, prepare
from parallax.data.shards import ids_file
from parallax.data.sources import open_source
from parallax.data.tokenizer import Bytes, load_tokenizer, split_long_words, train_bpe
from parallax.errors import ConfigError, DataError
from parallax.inference.generate import encode

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


@TOKENIZERS
def test_decoding_leaves_out_ends_and_the_padding_of_a_model(tokenizer):
    ids = [*tokenizer.encode("ab"), tokenizer.end, tokenizer.vocab, tokenizer.vocab + 100, *tokenizer.encode("c")]
    assert tokenizer.decode(ids) == "abc"


@TOKENIZERS
def test_a_tokenizer_is_loaded_as_it_was_saved(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(place)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert (loaded.vocab, loaded.end, loaded.name) == (tokenizer.vocab, tokenizer.end, tokenizer.name)
        np.testing.assert_array_equal(loaded.encode("the cat"), tokenizer.encode("the cat"))


# ---- the bytes, for other readers

BYTES_AS_BPE = tokenizers.Tokenizer.from_str(json.dumps(Bytes().as_bpe()))


@given(text=texts)
def test_bytes_as_a_bpe_have_the_same_ids(text):
    """But for text that spells the end of a document, which the library takes for it where it is not told otherwise."""
    BYTES_AS_BPE.encode_special_tokens = True
    found = BYTES_AS_BPE.encode(text)
    assert found.ids == Bytes().encode(text).tolist()
    assert BYTES_AS_BPE.decode(found.ids) == text


@given(ids=st.lists(st.integers(0, 256), max_size=40))
def test_bytes_as_a_bpe_decode_all_ids_alike(ids):
    """Those that are no UTF-8, too, and ends."""
    assert BYTES_AS_BPE.decode(ids) == Bytes().decode(ids)


def test_bytes_as_a_bpe_know_every_id_and_are_known_again(tmp_path):
    assert BYTES_AS_BPE.get_vocab_size() == Bytes().vocab
    assert BYTES_AS_BPE.token_to_id("<|endoftext|>") == Bytes().end and Bytes().token(256) == "<|endoftext|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(Bytes().as_bpe()))
    assert load_tokenizer(tmp_path).name == "bytes" and load_tokenizer(tmp_path).fingerprint == Bytes().fingerprint


# ---- what begins a document

BOS = "<|begin|>"


def with_bos(folder, *, template=False, **config):
    """A tokenizer with an entry for the begin of a document; `template` is what its post-processor says of it."""
    inner = tokenizers.Tokenizer.from_str(BPE._text)
    inner.add_special_tokens([BOS])
    if template:
        begin = [(BOS, inner.token_to_id(BOS)), ("<|endoftext|>", BPE.end)]
        template = tokenizers.processors.TemplateProcessing(single=f"{BOS} $A <|endoftext|>", special_tokens=begin)
        level = tokenizers.processors.ByteLevel(trim_offsets=False)
        inner.post_processor = tokenizers.processors.Sequence([level, template])
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(inner.to_str())
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


NUMBER = BPE.vocab  # of BOS: the next after all
SAYS_SO = {
    "nothing": (dict(), ()),
    "the post-processor": (dict(template=True), (NUMBER,)),
    "a config beside it": (dict(add_bos_token=True, bos_token=BOS), (NUMBER,)),
    "a config with all about the token": (dict(add_bos_token=True, bos_token={"content": BOS}), (NUMBER,)),
    "a config against it": (dict(template=True, add_bos_token=False, bos_token=BOS), ()),
    "a config that leaves it open": (dict(template=True, add_bos_token=None, bos_token=BOS), (NUMBER,)),
    "a config that has a token and no use for it": (dict(bos_token=BOS), ()),
}


@pytest.mark.parametrize("what", SAYS_SO)
def test_a_document_begins_as_the_tokenizers_files_say(tmp_path, what):
    files, begin = SAYS_SO[what]
    tokenizer = with_bos(tmp_path / "there", **files)
    assert tokenizer.begin == begin and [tokenizer.token(number) for number in begin] == [BOS] * len(begin)
    np.testing.assert_array_equal(tokenizer.encode("the cat"), BPE.encode("the cat"))
    assert encode(tokenizer, "the cat").tolist() == [*begin, *BPE.encode("the cat")]
    assert tokenizer.decode([*begin, *BPE.encode("the cat"), tokenizer.end]) == "the cat"
    tokenizer.save(tmp_path / "here")
    other = load_tokenizer(tmp_path / "here")
    assert (other.begin, other.fingerprint) == (begin, tokenizer.fingerprint)


def test_tokenizers_whose_documents_begin_otherwise_are_not_alike(tmp_path):
    plain = with_bos(tmp_path / "plain")
    begins = with_bos(tmp_path / "begins", add_bos_token=True, bos_token=BOS)
    texts = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("plain", "begins")]
    assert texts[0] == texts[1] and plain.fingerprint != begins.fingerprint
    assert plain.fingerprint == hashlib.sha256(texts[0]).hexdigest()  # of runs that there are already


def test_prepared_documents_begin_so_and_end_as_ever(tmp_path):
    tokenizer = with_bos(tmp_path / "there", template=True)
    (tmp_path / "texts.jsonl").write_text('{"text": "the cat"}\n{"text": "the mat"}\n')
    source = open_source("jsonl", path=str(tmp_path / "texts.jsonl"), field="text", synthetic_tokens=1)
    where = str(tmp_path / "there" / "tokenizer.json")
    made = prepare(Request(source=source, tokenizer=where, bpe_vocab=300), tmp_path / "made", workers=1)
    ids = np.fromfile(ids_file(tmp_path / "made", made.shards[0].name), made.dtype).tolist()
    pieces = [[NUMBER, *BPE.encode(text), BPE.end] for text in ("the cat", "the mat")]
    assert ids == [*pieces[0], *pieces[1]] and made.tokens == len(ids)
    assert made.shards[0].read_documents(tmp_path / "made")["tokens"].tolist() == list(map(len, pieces))
    assert load_tokenizer(tmp_path / "made").fingerprint == tokenizer.fingerprint


def test_an_empty_prompt_is_one_where_documents_begin_with_a_token(tmp_path):
    assert encode(with_bos(tmp_path, template=True), "").tolist() == [NUMBER]
    with pytest.raises(ConfigError, match="has no tokens"):
        encode(BPE, "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"add_bos_token": true, "bos_token": "<s>"}', "add_bos_token=True, but bos_token='<s>' is not an entry"),
        ('{"add_bos_token": true}', "add_bos_token=True, but bos_token=None is not an entry of tokenizer.json"),
        ("[1]", r"tokenizer_config\.json is not a configuration of a tokenizer: it is '\[1\]'"),
        (b"\xff\xfe", r"tokenizer_config\.json cannot be read: .*utf-8"),
    ],
)
def test_a_config_beside_a_tokenizer_that_does_not_fit_is_named(tmp_path, content, message):
    BPE.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def test_a_character_that_was_cut_is_shown_as_such():
    assert Bytes().decode("né".encode()[:2]) == "n\N{REPLACEMENT CHARACTER}"


def test_equal_documents_train_equal_entries():
    assert train_bpe(DOCUMENTS, vocab=290).fingerprint == BPE.fingerprint
    assert train_bpe(DOCUMENTS[:1], vocab=290).fingerprint != BPE.fingerprint


def test_reserved_tokens_are_entries_that_no_text_spells():
    reserved = train_bpe(DOCUMENTS, vocab=290, reserved=["<|im_start|>", "<|im_end|>"])
    assert reserved.vocab == 290
    assert [reserved.special_id(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    assert not {0, 1, 2} & {*reserved.encode("<|im_start|>").tolist()}
    assert reserved.encode("<|im_start|>", special_tokens="tokens").tolist() == [1]
    assert train_bpe(DOCUMENTS, vocab=290, reserved=[]).fingerprint == BPE.fingerprint


def test_an_unbroken_word_is_learned_from_in_pieces_and_other_texts_as_ever():
    """The library's time for a word grows with the square of its length: 48 s for 200,000 letters of DNA."""
    dna = "".join(np.random.default_rng(0).choice([*"ACGT"], 100_000))
    pieces = [dna[at : at + 1024] for at in range(0, len(dna), 1024)]
    began = time.process_time()
    learned = train_bpe([f"a gene {dna} ends"], vocab=300)
    assert time.process_time() - began < 8
    assert (
        learned.fingerprint
        == train_bpe([f"a gene {pieces[0]}", *pieces[1:-1], f"{pieces[-1]} ends"], vocab=300).fingerprint
    )
    assert split_long_words("two words " * 1000) == ["two words " * 1000]
    assert [*map(len, split_long_words(f"a {'b' * 1024} {' ' * 1500}c"))] == [2 + 1024 + 1024, 1501 - 1024 + 1]
    for before in ("", "a ", "a " * 300, "a " * 399):
        assert split_long_words(before + "b" * 1025) == [before + "b" * 1024, "b"]


def test_ctrl_c_ends_the_learning_of_a_bpe():
    """The library hears no signal in the thread in which it learns; left alone it learns for a quarter of a minute."""
    code = """
import numpy as np
from parallax.data.tokenizer import train_bpe
def documents():
    draw = np.random.default_rng(0)
    yield from ("".join(draw.choice([*"ACGT"], 1000)) for _ in range(5000))
    print("learning", flush=True)
train_bpe(documents(), vocab=100_000)
"""
    learning = [sys.executable, "-c", code]
    with subprocess.Popen(learning, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "learning\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        said = process.communicate(timeout=60)[1]
    assert time.monotonic() - sent < 5 and process.returncode == -signal.SIGINT
    assert said.strip().endswith("KeyboardInterrupt")


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
        load_tokenizer(tmp_path / "no.json")


@pytest.mark.parametrize("content", ["", "{", '{"model": 3}', "[1]", "{}", b"\xff\xfe"])
def test_a_damaged_file_is_named(content, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=r"tokenizer\.json (is not a tokenizer|cannot be read)"):
        load_tokenizer(tmp_path)


def test_a_file_that_remembers_the_length_of_a_batch_cuts_and_fills_nothing(tmp_path):
    inner = tokenizers.Tokenizer.from_str(BPE._text)
    inner.enable_truncation(4)
    inner.enable_padding(length=64, direction="left", pad_id=BPE.end, pad_token="<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(inner.to_str())
    found = load_tokenizer(tmp_path)
    assert found.begin == ()
    for text in DOCUMENTS:
        np.testing.assert_array_equal(found.encode(text), BPE.encode(text))
        np.testing.assert_array_equal(found.encode_many([text, "a"])[1], BPE.encode("a"))


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
TEMPLATE |= {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2, "pair": [{"Sequence": {"id": "B", "type_id": 0}}]}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TABLE = base64.b64encode((8).to_bytes(4, "little") + bytes(8) + b"x" * 300 + b"\0").decode()
ANY = {"Regex": "b*"}
GROWS = {
    "sixty that double a letter": ("normalizer", [DOUBLE] * 60),
    "in sequences": ("normalizer", [{"type": "Sequence", "normalizers": [DOUBLE] * 5}] * 2),
    "of another form": ("normalizer", [{"pattern": {"String": "a"}, "content": "aa"}] * 60),
    "an expression that matches nothing": ("normalizer", [DOUBLE | {"pattern": ANY, "content": "a" * 17}] * 2),
    "a text before": ("normalizer", [{"type": "Prepend", "prepend": "a" * 300}]),
    "letters that are taken apart": ("normalizer", [DOUBLE | {"content": "\ufdfa"}, {"type": "NFKD"}] * 4),
    "a table": ("normalizer", [{"type": "Precompiled", "precompiled_charsmap": TABLE}]),
    "bytes of bytes": ("pre_tokenizer", [LEVEL] * 60),
    "a template that says a text twice": ("post_processor", [TEMPLATE] * 60),
    "the way back": ("decoder", [DOUBLE] * 60),
}
LISTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}
LISTS |= {"post_processor": "processors", "decoder": "decoders"}


@pytest.mark.parametrize("what", GROWS)
def test_steps_that_make_a_text_absurdly_long_are_refused_before_they_run(what, tmp_path):
    step, parts = GROWS[what]
    content = json.loads(BPE._text) | {step: {"type": "Sequence", LISTS[step]: parts}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"tokenizer\.json has a {step} of \d+ steps that could make .* times as long"):
        load_tokenizer(tmp_path)


def test_steps_that_published_tokenizers_have_are_read(tmp_path):
    space, quotes = {"Regex": " {2,}"}, {"String": "``"}
    parts = [DOUBLE | {"pattern": quotes, "content": '"'}, {"type": "NFKD"}, {"type": "StripAccents"}]
    parts += [{"type": "Lowercase"}, DOUBLE | {"pattern": space, "content": "▁"}, {"type": "Prepend", "prepend": "▁"}]
    content = json.loads(BPE._text) | {"normalizer": {"type": "Sequence", "normalizers": parts}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode("``A  b")) == '▁"a▁b'


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    BPE.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(DataError, match=r"no token that ends a document; eos_token .* one of <\|endoftext\|>, .*</s>"):
        load_tokenizer(file)


def test_the_end_of_other_projects_is_found(tmp_path):
    BPE.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "</s>"))
    assert load_tokenizer(file).end == json.loads(file.read_text())["model"]["vocab"]["</s>"]
