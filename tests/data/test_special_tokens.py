"""Special tokens: no text makes one unless it shall, documents end where they do, and the files say with which."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from support.data_examples import prepare_texts, prepared_reader
from tokenizers import decoders, models, pre_tokenizers, processors

from parallax.data.prepare import Request, prepare
from parallax.data.shards import Manifest, ids_file
from parallax.data.sources import open_source
from parallax.data.tokenizer import Bpe, load_tokenizer, train_bpe, with_begin
from parallax.errors import ConfigError, DataError
from parallax.inference.generate import encode, stays_text
from parallax.model.batch import IGNORED

LETTERS = "abcdefghijklmnopqrstuvwxyz<>/s|"
END, BEGIN = "</s>", "<s>"
SPELLED = "the price was <s>ten</s> dollars"
BPE = train_bpe(["the cat sat on the mat", "the price was ten dollars"] * 4, vocab=280)


def unigram(*, special=True):
    """As SentencePiece's models are converted: control symbols are pieces."""
    pieces = dict.fromkeys(["<unk>", BEGIN, END, "▁", *LETTERS, "▁the", "ten"], -5.0)
    inner = tokenizers.Tokenizer(models.Unigram(list(pieces.items()), 0, False))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    if special:
        inner.add_special_tokens([BEGIN, END])
    return inner


def of_words(kind):
    entries = ["[UNK]", *dict.fromkeys(LETTERS), *map("##".__add__, dict.fromkeys(LETTERS)), "the", "price", "was", END]
    entries = {name: number for number, name in enumerate(entries)}
    inner = tokenizers.Tokenizer(kind(entries, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return inner


def bpe(*, merges=(), whole=False, added=()):
    names = dict.fromkeys([*LETTERS, " ", *map("".join, merges), *([END] if whole else [])])
    entries = {name: number for number, name in enumerate(names)}
    inner = tokenizers.Tokenizer(models.BPE(entries, [*merges], ignore_merges=whole))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(" ", "isolated"), decoders.Fuse()
    inner.add_tokens([tokenizers.AddedToken(name, special=False) for name in added])
    return inner


MERGES = [("<", "/"), ("</", "s"), ("</s", ">"), ("n", "</s>")]
FINDERS = {
    "Unigram": unigram(),
    "Unigram, no added tokens": unigram(special=False),
    "WordLevel": of_words(models.WordLevel),
    "WordPiece": of_words(models.WordPiece),
    "BPE that ignores merges": bpe(whole=True),
    "BPE that merges its end": bpe(merges=MERGES),
    "an added token that is not special": bpe(added=[END]),
}


@pytest.mark.parametrize("name", FINDERS)
@pytest.mark.parametrize("text", [f"ten {END}", f"ten{END} dollars", END])
def test_no_text_makes_the_end_of_a_document(name, text):
    """The library finds it in one of the texts, though it is told to encode special tokens as text."""
    tokenizer = Bpe(FINDERS[name].to_str())
    ids = tokenizer.encode(text)
    assert tokenizer.token(tokenizer.end) == END and tokenizer.end not in ids
    np.testing.assert_array_equal(ids, tokenizer.encode_many(["ten", text])[1])
    if not name.startswith("Word"):  # those have no letters of what they do not know
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", FINDERS)
def test_the_library_alone_would_make_it(name):
    inner = tokenizers.Tokenizer.from_str(FINDERS[name].to_str())
    inner.encode_special_tokens = True
    assert any(inner.token_to_id(END) in inner.encode(text).ids for text in (f"ten {END}", f"ten{END}", END))


def test_a_text_keeps_its_pieces_as_in_sentencepiece():
    """Control symbols are no candidates there; other pieces are those that it finds."""
    tokenizer = Bpe(unigram().to_str())
    pieces = [tokenizer.token(number) for number in tokenizer.encode(SPELLED)]
    assert pieces[11:20] == ["▁", "<", "s", ">", "ten", "<", "/", "s", ">"] and pieces[0] == "▁the"
    assert tokenizer.decode(tokenizer.encode(SPELLED)) == SPELLED
    without = [tokenizer.encode(text).tolist() for text in ("the price", "ten dollars")]
    assert without == [FINDERS["Unigram"].encode(text).ids for text in ("the price", "ten dollars")]


def test_shards_have_as_many_ends_as_documents(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(unigram().to_str())
    made = prepare_texts([SPELLED, "ten", f"{END}{END}"], tmp_path / "made", tokenizer=str(file))
    ids = np.concatenate([np.fromfile(ids_file(tmp_path / "made", shard.name), made.dtype) for shard in made.shards])
    assert (ids == load_tokenizer(file).end).sum() == made.documents == 3


class MakesItsEnd(Bpe):
    def encode_many(self, texts, *, special_tokens="text"):
        return [np.array([self.end], np.int32) for _ in texts]


def test_a_text_that_makes_the_end_all_the_same_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("parallax.data.prepare.load_tokenizer", lambda *_: MakesItsEnd(BPE._text))
    with pytest.raises(DataError, match=r"makes id 0, which ends a document, of the text 'one'; use a tokenizer"):
        prepare_texts(["one"], tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))


def test_a_letter_cannot_be_an_end():
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    with pytest.raises(DataError, match="cannot write the text 'b' without the token of that name, which ends"):
        Bpe(inner.to_str(), config='{"eos_token": "b"}').encode("ab")


def test_a_tokenizer_without_unknown_tokens_is_refused_only_for_a_text_that_spells_its_end():
    """As of DNA: of other letters nothing is left."""
    inner = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate("ACGT")}, []))
    inner.add_tokens([tokenizers.AddedToken(END, special=False)])
    tokenizer = Bpe(inner.to_str())
    assert tokenizer.encode("ACGT").tolist() == [0, 1, 2, 3] and tokenizer.token(tokenizer.end) == END
    with pytest.raises(DataError, match=f"cannot write the text '{END}' without the token of that name"):
        tokenizer.encode_many(["ACGT", f"AC{END}GT"])


def test_a_word_that_a_tokenizer_cannot_write_is_an_error():
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, END: 1}, unk_token="?"))
    with pytest.raises(DataError, match=r"tokenizer\.json cannot encode a text: .*Missing \[UNK\]"):
        Bpe(inner.to_str()).encode("b")


# ---- a token that begins and ends documents


def opt_like(folder):
    """GPT-2's tokenizer with a BOS, as OPT has it: <|endoftext|> on both sides."""
    inner = tokenizers.Tokenizer.from_str(BPE._text)
    inner.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", BPE.end)]
    )
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(inner.to_str())
    return load_tokenizer(folder)


def rows_of(texts, tokenizer):
    """Token, label, segment and position of a stream of documents, by ten simple lines."""
    rows = []
    for segment, text in enumerate(texts, start=1):
        ids = [*tokenizer.begin, *tokenizer.encode(text).tolist(), tokenizer.end]
        rows += [(a, b, segment, at) for at, (a, b) in enumerate(zip(ids, [*ids[1:], IGNORED]))]
    return rows


def test_a_document_that_begins_with_its_end_is_one_document(tmp_path):
    tokenizer = opt_like(tmp_path / "there")
    assert tokenizer.begin == (tokenizer.end,)
    texts = ["the cat", "mat", "the price was ten"]
    prepare_texts(texts, tmp_path / "made", tokenizer=str(tmp_path / "there" / "tokenizer.json"), shard_bytes=5)
    expected = rows_of(texts, tokenizer)
    seq = len(expected) - 1
    batch = prepared_reader(tmp_path / "made", seq=seq, global_batch=1).batch(0)
    names = ("tokens", "labels", "segments", "positions")
    assert [*zip(*(batch[name][0].tolist() for name in names))] == expected[:-1]
    # Each text's first token is predicted, and sees BOS.
    begins = batch["positions"][0] == 0
    assert begins.sum() == 3 and (batch["labels"][0][begins] != IGNORED).all()


def test_a_host_that_reads_columns_finds_the_same_borders(tmp_path):
    opt_like(tmp_path / "there")
    prepare_texts(["the cat", "mat", "ten"] * 4, tmp_path / "made", tokenizer=str(tmp_path / "there/tokenizer.json"))
    whole = prepared_reader(tmp_path / "made", seq=6, global_batch=2).batch(1)
    parts = [prepared_reader(tmp_path / "made", seq=6, global_batch=2, columns=range(a, a + 2)) for a in (0, 2, 4)]
    for name, array in whole.items():
        np.testing.assert_array_equal(array, np.concatenate([part.batch(1)[name] for part in parts], axis=1))


def test_the_fingerprint_knows_borders_that_ids_do_not_tell(tmp_path):
    """An earlier version made other batches of the same ids."""
    opt_like(tmp_path / "there")
    prepare_texts(["the cat", "mat"] * 9, tmp_path / "made", tokenizer=str(tmp_path / "there" / "tokenizer.json"))
    reader = prepared_reader(tmp_path / "made")
    plain = prepared_reader(tmp_path / "made")
    plain.tokenizer.begin = ()
    assert reader.fingerprint != plain.fingerprint


# ---- which token is the end


def entry(folder, *names, beside=(), special=True):
    """A tokenizer with these entries, none of a usual name unless it is among them, and files beside it."""
    inner = tokenizers.Tokenizer(models.BPE({name: number for number, name in enumerate("ab")}, []))
    (inner.add_special_tokens if special else inner.add_tokens)([*names])
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(inner.to_str())
    for name, content in dict(beside).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return load_tokenizer(folder)


@pytest.mark.parametrize("name", ["<EOS_TOKEN>", "[EOS]", "<|im_end|>"])
@pytest.mark.parametrize(
    "beside",
    [
        {"tokenizer_config": {"eos_token": "{}"}},
        {"tokenizer_config": {"eos_token": {"content": "{}", "lstrip": False}}},
        {"config": {"eos_token_id": 3}},
        {"config": {"eos_token_id": [3, 2]}},
    ],
)
def test_the_end_is_what_the_files_name(tmp_path, name, beside):
    beside = json.loads(json.dumps(beside).replace("{}", name))
    tokenizer = entry(tmp_path / "there", "<|other|>", name, beside=beside)
    assert tokenizer.token(tokenizer.end) == name
    tokenizer.save(tmp_path / "here")  # without the model's config.json
    again = load_tokenizer(tmp_path / "here")
    assert (again.end, again.fingerprint) == (tokenizer.end, tokenizer.fingerprint)


@pytest.mark.parametrize(
    ("names", "beside", "end"),
    [
        (["<|endoftext|>", "<|im_end|>"], {"tokenizer_config": {"eos_token": "<|im_end|>"}}, "<|im_end|>"),
        (["<|endoftext|>", "<|im_end|>"], {"config": {"eos_token_id": 3}}, "<|im_end|>"),
        (
            ["<|endoftext|>", "<|im_end|>"],
            {"tokenizer_config": {"eos_token": "<|endoftext|>"}, "config": {"eos_token_id": 3}},
            "<|endoftext|>",
        ),
        (["<|endoftext|>"], {"config": {"eos_token_id": 1}}, "<|endoftext|>"),  # a letter: a default that nobody set
        (["<|endoftext|>"], {"config": {"eos_token_id": 99}, "tokenizer_config": {"eos_token": None}}, "<|endoftext|>"),
    ],
)
def test_the_files_are_asked_before_usual_names(tmp_path, names, beside, end):
    tokenizer = entry(tmp_path, *names, beside=beside)
    assert tokenizer.token(tokenizer.end) == end


def test_an_end_that_is_no_entry_is_named(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer_config\.json has eos_token='<e>', which is not an entry"):
        entry(tmp_path, "<|endoftext|>", beside={"tokenizer_config": {"eos_token": "<e>"}})
    with pytest.raises(DataError, match="no token that ends a document; eos_token in tokenizer_config.json beside it"):
        entry(tmp_path, "<|other|>", beside={"tokenizer_config": {}})


def test_tokenizers_with_other_ends_are_not_alike(tmp_path):
    ends = [
        entry(tmp_path, "<1>", "<2>", "</s>", beside={"tokenizer_config": {"eos_token": name}})
        for name in ("<1>", "<2>", "</s>")
    ]
    (tmp_path / "tokenizer_config.json").unlink()
    assert len({tokenizer.fingerprint for tokenizer in ends}) == 3
    assert load_tokenizer(tmp_path).fingerprint == ends[2].fingerprint  # of shards that there are already
    unusual = [
        entry(tmp_path, "<1>", "<2>", beside={"tokenizer_config": {"eos_token": name}}) for name in ("<1>", "<2>")
    ]
    assert unusual[0].fingerprint != unusual[1].fingerprint


def test_shards_of_an_earlier_version_are_read_with_the_end_that_it_chose(tmp_path):
    """It went by the usual names, whatever the files said."""
    tokenizer = entry(tmp_path / "there", "<|endoftext|>", "<|im_end|>")
    file = tmp_path / "there" / "tokenizer.json"
    prepare_texts(["ab", "ba"] * 20, tmp_path / "made", tokenizer=str(file))
    says = '{"eos_token": "<|im_end|>"}'
    for folder in ("there", "made"):
        (tmp_path / folder / "tokenizer_config.json").write_text(says)
    assert load_tokenizer(file).token(load_tokenizer(file).end) == "<|im_end|>"
    for how in ("auto", str(file)):
        reader = prepared_reader(tmp_path / "made", tokenizer=how)
        assert (reader.tokenizer.end, reader.tokenizer.fingerprint) == (tokenizer.end, tokenizer.fingerprint)
    reader.tokenizer.save(tmp_path / "step")  # as a checkpoint does
    assert load_tokenizer(tmp_path / "step").end == tokenizer.end


# ---- text that spells tokens on purpose

TURN, CLOSE = "<|im_start|>", "<|im_end|>"
CHAT = f"{TURN}user\nthe cat{CLOSE}\n{TURN}assistant\nsat{CLOSE}"


def chat_tokenizer(folder, *, begin=None):
    inner = tokenizers.Tokenizer.from_str(BPE._text)
    inner.add_special_tokens([TURN, CLOSE, *([begin] if begin else [])])
    about = {"eos_token": CLOSE, **({"add_bos_token": True, "bos_token": begin} if begin else {})}
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(inner.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return load_tokenizer(folder)


def prepare_chats(texts, folder, tokenizer, special_tokens):
    (folder / "chats.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = open_source("jsonl", path=str(folder / "chats.jsonl"), field="text", synthetic_tokens=1)
    request = Request(source=source, tokenizer=tokenizer, bpe_vocab=300, special_tokens=special_tokens)
    made = prepare(request, folder / special_tokens, workers=1)
    return made, np.fromfile(ids_file(folder / special_tokens, made.shards[0].name), made.dtype)


def test_a_rendered_chat_is_trained_on_as_its_tokens_where_it_shall(tmp_path, caplog):
    tokenizer = chat_tokenizer(tmp_path / "there")
    where = str(tmp_path / "there" / "tokenizer.json")
    made, ids = prepare_chats([CHAT, "the mat"], tmp_path, where, "tokens")
    theirs = tokenizers.Tokenizer.from_file(where)
    assert ids.tolist() == [*theirs.encode(CHAT).ids, *theirs.encode("the mat").ids, tokenizer.end]
    assert not caplog.text
    # Turns end inside of a document, which the table of documents divides, not the id.
    batch = prepared_reader(tmp_path / "tokens", seq=len(ids) - 1, global_batch=1, special_tokens="tokens").batch(0)
    assert batch["segments"].max() == 2 and (batch["labels"][0] == IGNORED).sum() == 1
    many, as_text = prepare_chats([CHAT, "the mat"], tmp_path, where, "text")
    assert made.request != many.request and len(as_text) > len(ids)
    said = "the text spells special tokens of the tokenizer 4 times (<|im_start|> 2, <|im_end|> 2); they stay text"
    assert said in caplog.text and (made.spelled_tokens, many.spelled_tokens) == (0, 4)
    file = tmp_path / "text" / "manifest.json"
    content = json.loads(file.read_text())
    assert content.pop("spelled_tokens") == 4
    file.write_text(json.dumps(content))  # as of an earlier version
    assert Manifest.read(tmp_path / "text") == replace(many, spelled_tokens=0)


def test_a_text_that_spells_its_begin_and_end_does_not_get_them_twice(tmp_path):
    tokenizer = chat_tokenizer(tmp_path / "there", begin="<bos>")
    (begin,), where = tokenizer.begin, str(tmp_path / "there" / "tokenizer.json")
    _, ids = prepare_chats([f"<bos>{CHAT}"], tmp_path, where, "tokens")
    assert ids.tolist() == tokenizers.Tokenizer.from_file(where).encode(f"<bos>{CHAT}").ids
    assert ids[0] == begin and ids[1] != begin and ids[-1] == tokenizer.end and ids[-2] != tokenizer.end
    assert with_begin(tokenizer, ids[1:]).tolist() == ids.tolist()
    assert encode(tokenizer, "<bos>a", special_tokens="tokens").tolist().count(begin) == 1


def test_the_fingerprint_of_data_says_where_documents_end_though_texts_spell_ends(tmp_path):
    chat_tokenizer(tmp_path)
    prints = []
    for number, texts in enumerate((["the cat", "sat"] * 20, [f"the cat{CLOSE}sat"] * 20)):
        (tmp_path / str(number)).mkdir()
        made, ids = prepare_chats(texts, tmp_path / str(number), str(tmp_path / "tokenizer.json"), "tokens")
        reader = prepared_reader(tmp_path / str(number) / "tokens", special_tokens="tokens")
        prints.append((reader.fingerprint, made.shards[0].ids_sha256))
    (one, ids), (other, same) = prints
    assert ids == same and one != other


def test_shards_say_how_they_were_made(tmp_path):
    chat_tokenizer(tmp_path / "there")
    where = str(tmp_path / "there" / "tokenizer.json")
    for made, other in (("text", "tokens"), ("tokens", "text")):
        prepare_chats([CHAT] * 9, tmp_path, where, made)
        assert prepared_reader(tmp_path / made, special_tokens=made).tokens
        with pytest.raises(DataError, match=f"data.special_tokens='{other}', but .* was prepared with '{made}'; use"):
            prepared_reader(tmp_path / made, special_tokens=other)
    assert "special_tokens" not in Manifest.read(tmp_path / "text").request  # as in earlier versions


def test_bytes_have_no_special_tokens():
    source = open_source("synthetic", path="", field="", synthetic_tokens=9)
    with pytest.raises(ConfigError, match="data.special_tokens='tokens' has no effect with the tokenizer 'bytes'"):
        Request(source=source, tokenizer="bytes", bpe_vocab=0, special_tokens="tokens")


def test_a_prompt_is_read_as_the_sample_says(tmp_path):
    tokenizer = chat_tokenizer(tmp_path / "there")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "there" / "tokenizer.json"))
    prompt = f"{TURN}user\nthe cat{CLOSE}\n"
    assert encode(tokenizer, prompt, special_tokens="tokens").tolist() == theirs.encode(prompt).ids
    assert len(encode(tokenizer, prompt)) > 2 * len(theirs.encode(prompt).ids)
    said = "the prompt spells 2 special tokens of the tokenizer as text; sample.special_tokens='tokens' makes tokens"
    assert stays_text(tokenizer, [prompt], "text") == f"{said} of them"
    assert not stays_text(tokenizer, [prompt], "tokens")
    ids = [*theirs.encode(prompt).ids, *tokenizer.encode("sat"), tokenizer.end]
    assert tokenizer.decode(ids, special_tokens="tokens") == f"{prompt}sat"
    assert tokenizer.decode(ids) == "user\nthe cat\nsat"


# ---- entries that a model's table does not have


def padded_tokenizer(folder):
    """As Llama-2's with a <pad> that somebody added: one entry more than the model has rows."""
    inner = tokenizers.Tokenizer.from_str(BPE._text)
    inner.add_special_tokens(["<pad>"])
    (folder / "tokenizer.json").write_text(inner.to_str())
    return folder / "tokenizer.json"


def test_added_tokens_beyond_the_table_that_never_occur_are_allowed(tmp_path):
    file = padded_tokenizer(tmp_path)
    prepare_texts(["the cat sat <pad>"] * 9, tmp_path / "made", tokenizer=str(file))
    reader = prepared_reader(tmp_path / "made", vocab=BPE.vocab)
    assert reader.tokenizer.vocab == BPE.vocab + 1 and reader.tokenizer.needed == BPE.vocab
    assert reader.batch(0)["tokens"].max() < BPE.vocab
    with pytest.raises(ConfigError, match=f"model.vocab={BPE.vocab - 1} is less than the {BPE.vocab} ids"):
        prepared_reader(tmp_path / "made", vocab=BPE.vocab - 1)


@pytest.mark.parametrize("checked", [True, False])
def test_an_id_beyond_the_table_that_occurs_is_named(tmp_path, monkeypatch, checked):
    """Before the run, or where it is read if the data is large."""
    file = padded_tokenizer(tmp_path)
    prepare_chats(["the <pad> cat", *["the cat sat"] * 8], tmp_path, str(file), "tokens")
    monkeypatch.setattr("parallax.data.reader.CHECKSUM_BYTES", 1 << 30 if checked else 1)
    message = rf"holds id {BPE.vocab} at position \d+, but the tokenizer has \d+ ids and the model's table {BPE.vocab}"
    with pytest.raises(DataError, match=message):
        reader = prepared_reader(tmp_path / "tokens", vocab=BPE.vocab, special_tokens="tokens")
        assert not checked
        for step in range(reader.batches):
            reader.batch(step)
