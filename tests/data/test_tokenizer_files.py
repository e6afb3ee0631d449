"""Files of tiktoken and SentencePiece make the ids of these libraries, of any text, and bring the text back."""

import base64
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_examples import chat_reader, turn, write_chats

from parallax.config.sections import check_tokenizer
from parallax.data import rank_files
from parallax.data.prepare import Request, prepare
from parallax.data.rank_files import PATTERNS
from parallax.data.sources import open_source
from parallax.data.special_tokens import BYTE_SYMBOLS
from parallax.data.tokenizer import load_tokenizer, train_bpe
from parallax.errors import ConfigError, DataError
from parallax.model.batch import IGNORED

tiktoken = pytest.importorskip("tiktoken", reason="needs tiktoken, of the extra 'tokenizers'")
sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece, of the extra 'tokenizers'")

WHITESPACE = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())
AWKWARD = [
    "",
    " ",
    "a",
    "It's they'LL I'M we'vE 'S 'ſ o'clock",
    "1 12 123 1234 12345678901 ٣٤٥ ⅷ ²³ ½",
    "  two   spaces \n\n\n three\t\ttabs \r\n\r\n  end  ",
    "trailing spaces   ",
    "line\n$ sign$\n",
    f"{WHITESPACE}x{WHITESPACE}",
    "naïve café ÜBER straße ǅ ﬁ e\u0301 ａｂｃ \u200b\u200d\ufeff",
    "東京都 日本語のテキスト。한국어 العربية עברית ไทย हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 \U0001f600\U0010ffff",
    "def f(x):\n    return {'a': [1, 2, 3]}  # !!!???---===\n\n\n",
    "<|endoftext|> and <|im_start|>user </s> <s> <unk> <0x41> ▁ ▁▁x",
    "aaaaaaaaaaaaaaaaaaaaaaa bababababab the the the thethethe",
    "\0\x01\x7f\x85\xa0",
]
SPECIAL = {"<|endoftext|>": 700, "<|im_start|>": 702, "<|im_end|>": 703}  # 701 is no token


@pytest.fixture(scope="module")
def moby():
    source = open_source("moby", path="", field="", synthetic_tokens=0)
    return [text for number, text in enumerate(source.documents()) if number % 12 == 1]


@pytest.fixture(scope="module")
def ranks(moby, tmp_path_factory):
    """Ranks of a BPE of 600 tokens, by their bytes."""
    folder = tmp_path_factory.mktemp("bpe")
    train_bpe(moby, vocab=601).save(folder)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    bytes_of = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)}
    names = sorted((name for name in vocab if name != "<|endoftext|>"), key=vocab.get)
    return {bytes(bytes_of[symbol] for symbol in name): rank for rank, name in enumerate(names)}


def write_ranks(folder, ranks, **beside):
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / "ranks.tiktoken").write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    return folder / "ranks.tiktoken"


@pytest.fixture(scope="module", params=PATTERNS)
def pair(request, ranks, tmp_path_factory):
    """An encoding of the library with a published pattern, and its file, which names the pattern."""
    published = pytest.importorskip("tiktoken_ext.openai_public")
    patched = pytest.MonkeyPatch()
    patched.setattr(published, "load_tiktoken_bpe", lambda *_, **__: ranks)  # of a hundred thousand, 600
    name = request.param
    pattern = published.r50k_pat_str if name == "gpt2" else published.ENCODING_CONSTRUCTORS[name]()["pat_str"]
    patched.undo()
    options = {"pat_str": pattern, "mergeable_ranks": ranks, "special_tokens": SPECIAL}
    file = write_ranks(tmp_path_factory.mktemp(name), ranks, pat_str=name, special_tokens=SPECIAL)
    return tiktoken.Encoding("tiny", **options), load_tokenizer(file)


def same_as_tiktoken(pair, text):
    library, here = pair
    expected = library.encode_ordinary(text)
    assert here.encode(text).tolist() == expected
    assert here.decode(expected) == library.decode(expected)
    with_tokens = library.encode(text, allowed_special="all")
    assert here.encode(text, special_tokens="tokens").tolist() == with_tokens


def test_a_rank_file_makes_the_ids_of_tiktoken(pair, moby):
    library, here = pair
    for text in [*AWKWARD, moby[0][:5000]]:
        same_as_tiktoken(pair, text)
        assert here.decode(here.encode(text)) == text
    assert here.special_id("<|im_end|>") == 703 and here.end == 700 and here.vocab == library.n_vocab == 704
    assert here.spelled(AWKWARD[13]) == {"<|endoftext|>": 1, "<|im_start|>": 1}


@settings(max_examples=60, deadline=None, database=None)
@given(st.text(alphabet=st.characters(max_codepoint=0x3100, exclude_categories=["Cs", "Cn"]), max_size=30))
def test_any_text_has_the_ids_of_tiktoken(pair, text):
    same_as_tiktoken(pair, text)


def test_random_ranks_make_the_ids_of_tiktoken(tmp_path):
    """Ranks that no training would make, with tokens that merges do not reach."""
    random = np.random.default_rng(0)
    tokens = {bytes(random.choice(list(b"ab c"), random.integers(2, 6))) for _ in range(60)}
    order = random.permutation(sorted(tokens)).tolist()
    ranks = {bytes([byte]): byte for byte in range(256)} | {token: 256 + n for n, token in enumerate(order)}
    options = {"pat_str": r" ?[abc]+| +", "special_tokens": {"<|endoftext|>": 999}}
    pair = (
        tiktoken.Encoding("random", mergeable_ranks=ranks, **options),
        load_tokenizer(write_ranks(tmp_path, ranks, **options)),
    )
    for _ in range(300):
        same_as_tiktoken(pair, "".join(random.choice(list("ab c"), random.integers(1, 12))))


def test_an_encoding_is_read_by_its_name(ranks, monkeypatch):
    """Its ranks come from the library's cache; here the library reads 600 of them."""
    published = pytest.importorskip("tiktoken_ext.openai_public")
    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *_, **__: ranks)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    rank_files.json_of_encoding.cache_clear()
    check_tokenizer("tiktoken:cl100k_base", 0)
    here, library = load_tokenizer("tiktoken:cl100k_base"), tiktoken.get_encoding("cl100k_base")
    for text in AWKWARD:
        same_as_tiktoken((library, here), text)
    assert here.end == library.eot_token == 100257 and here.special_id("<|endofprompt|>") == 100276
    rank_files.json_of_encoding.cache_clear()


def test_an_encoding_that_is_not_there_is_one_line(monkeypatch, tmp_path):
    published = pytest.importorskip("tiktoken_ext.openai_public")

    def refuse(*_, **__):
        raise OSError("no network\nand more")

    monkeypatch.setattr(published, "load_tiktoken_bpe", refuse)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(DataError, match=r"'o200k_base' is not in the cache of tiktoken \(TIKTOKEN_CACHE_DIR\).*no net"):
        load_tokenizer("tiktoken:o200k_base")
    with pytest.raises(ConfigError, match="data.tokenizer='tiktoken:cl100k' is no encoding of tiktoken.*cl100k_base"):
        load_tokenizer("tiktoken:cl100k")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pat_str": None}, "has no pattern; write a tokenizer_config.json beside it"),
        ({"special_tokens": {"<|endoftext|>": 5}}, "gives an id to two tokens"),
        ({"special_tokens": {"<|endoftext|>": "5"}}, "are not ids by name"),
        ({"special_tokens": {}}, "no token that ends a document"),
        ({"pat_str": "(unclosed"}, "is not a tokenizer"),
    ],
)
def test_a_wrong_rank_file_is_one_line(changes, message, ranks, tmp_path):
    beside = {"pat_str": "gpt2", "special_tokens": {"<|endoftext|>": 700}} | changes
    with pytest.raises(DataError, match=message) as error:
        load_tokenizer(write_ranks(tmp_path, ranks, **beside))
    assert "\n" not in str(error.value)


def test_ranks_without_a_byte_and_no_ranks_are_one_line(ranks, tmp_path):
    few = {token: rank for token, rank in ranks.items() if token != b"\xc0"}
    with pytest.raises(DataError, match="has no rank of the byte 0xc0"):
        load_tokenizer(write_ranks(tmp_path, few, pat_str="gpt2"))
    (tmp_path / "ranks.tiktoken").write_text("not base64!")
    with pytest.raises(DataError, match="is not a file of tiktoken's ranks"):
        load_tokenizer(tmp_path / "ranks.tiktoken")


def test_special_tokens_may_be_written_as_transformers_does(ranks, tmp_path):
    decoder = {"700": {"content": "<|endoftext|>", "special": True}, "701": {"content": "<|im_end|>"}}
    file = write_ranks(tmp_path, ranks, pat_str="gpt2", added_tokens_decoder=decoder, eos_token="<|im_end|>")
    here = load_tokenizer(file.rename(tmp_path / "tokenizer.model"))  # as Llama 3 names it
    assert here.end == 701 and here.encode("<|endoftext|>", special_tokens="tokens").tolist() == [700]


# ---- SentencePiece

KINDS = {
    "unigram": {"model_type": "unigram"},  # with NFKC, and without repeated spaces
    "unigram_bytes": {
        "model_type": "unigram",
        "normalization_rule_name": "identity",
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
    },
    "bpe_bytes": {  # as Gemma: no first space, runs of spaces, symbols of its own
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<start_of_turn>", "\n", "▁▁"],
        "control_symbols": ["<|im_start|>"],
    },
}


@pytest.fixture(scope="module", params=KINDS)
def model(request, moby, tmp_path_factory):
    """A small model of SentencePiece."""
    folder = tmp_path_factory.mktemp(request.param)
    options = {"model_prefix": str(folder / "tokenizer"), "vocab_size": 500, "minloglevel": 2, "num_threads": 1}
    lines = [line for line in moby[0].splitlines() if line][:150]
    trainer = sentencepiece.SentencePieceTrainer
    trainer.train(sentence_iterator=iter(lines), hard_vocab_limit=False, **options, **KINDS[request.param])
    return folder / "tokenizer.model"


def test_a_model_makes_the_ids_of_sentencepiece(model, tmp_path):
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    here = load_tokenizer(model)
    here.save(tmp_path)
    saved = load_tokenizer(tmp_path)
    assert saved.fingerprint == here.fingerprint and here.end == library.eos_id() and here.begin == ()
    for text in AWKWARD:
        expected = library.encode(text)
        assert here.encode(text).tolist() == saved.encode(text).tolist() == expected
        assert here.decode(expected) == library.decode(expected)
        assert here.end not in expected
    if library.piece_to_id("<0x00>") != library.unk_id():  # with bytes, nothing is lost
        assert all(here.decode(here.encode(text)) == text for text in AWKWARD if "▁" not in text)


def test_control_symbols_of_a_model_are_its_special_tokens(model):
    here = load_tokenizer(model)
    text, end = "one</s>two", here.special_id("</s>")
    assert end == here.end and here.spelled(text) == {"</s>": 1} and end not in here.encode(text)
    ids = here.encode(text, special_tokens="tokens").tolist()
    assert ids == [*here.encode("one"), end, *here.encode("two")]
    assert here.decode([*ids, end], special_tokens="tokens") == text and here.decode(ids) == here.decode(
        [i for i in ids if i != end]
    )


def test_ids_of_a_model_have_places_in_the_text(model):
    here = load_tokenizer(model)
    has_bytes = "<0x00>" in map(here.token, range(here.vocab))
    for text in [*AWKWARD, "<s>one</s></s> 日本</s>"]:
        for special in ("text", "tokens"):
            ((ids, starts, ends),) = here.encode_with_places([text], special_tokens=special)
            assert ids.tolist() == here.encode(text, special_tokens=special).tolist()
            if has_bytes:  # no letter is left out, and none has two places
                assert [0, *ends] == [*starts, len(text)]
            assert np.all((starts <= ends) & (np.append(starts[1:], len(text)) >= ends))
    ((ids, starts, ends),) = here.encode_with_places(["aé日</s>a"], special_tokens="tokens")
    several = [(1, 1), (1, 2), (2, 2), (2, 2), (2, 3)]  # the last of its bytes has the letter
    assert [*zip(starts, ends)] == [(0, 1), *(several if has_bytes else [(1, 3)]), (3, 7), (7, 8)]


def test_answers_of_chats_are_learned_with_a_model(model, tmp_path):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    chat = [*turn("What is é?", "It is 日本 🙂."), *turn("So", " two  spaces ")]
    file = write_chats(tmp_path / "c.jsonl", [chat])
    options = dict(tokenizer=str(model), chat_template=str(tmp_path / "mine.jinja"), global_batch=1)
    labels = chat_reader(file, tmp_path, **options).batch(0)["labels"][0]
    here = load_tokenizer(model)
    answers = [here.encode(f"{message['content']}</s>", special_tokens="tokens") for message in chat[1::2]]
    assert labels[labels != IGNORED].tolist() == np.concatenate(answers).tolist()


def test_shards_of_a_model_are_read_again(model, tmp_path):
    (tmp_path / "a.txt").write_text("one text\n" * 9)
    source = open_source("text", path=str(tmp_path / "a.txt"), field="", synthetic_tokens=0)
    manifest = prepare(Request(source=source, tokenizer=str(model), bpe_vocab=0), tmp_path / "out", workers=1)
    assert manifest.tokenizer == "sentencepiece"
    ids = np.fromfile(tmp_path / "out" / "00000.ids", "<u2")
    assert load_tokenizer(tmp_path / "out").decode(ids).split() == ["one", "text"] * 9


def test_a_bos_symbol_begins_documents_where_its_files_say_so(model, tmp_path):
    copy = tmp_path / "tokenizer.model"
    copy.write_bytes(model.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    assert load_tokenizer(copy).begin == (1,)
    for written, begin in (("", (1,)), (', "add_bos_token": false', ())):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"tokenizer_class": "LlamaTokenizer"{written}}}')
        assert load_tokenizer(copy).begin == load_tokenizer(tmp_path).begin == begin
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(DataError, match="has eos_token='<end>', which is no control symbol of it"):
        load_tokenizer(copy)
    copy.write_bytes(b"no model")
    with pytest.raises(DataError, match="tokenizer.model is not a model of SentencePiece"):
        load_tokenizer(copy)
