"""Conversations as data: what is learned of them, windows of whole ones, and the same batches on every mesh."""

import json

import numpy as np
import pytest
from support.chat_examples import CALL, TOOL, chat_config, chat_reader, conversations, learned_text, turn, write_chats
from support.data_examples import data_config

from parallax.data import open_mixture, open_reader
from parallax.data.chat import ChatTemplate
from parallax.data.conversations import LEARNED, MARKED_IDS, Marked, encode_marked
from parallax.data.packing import best_fit, pack, parts_of_document
from parallax.data.tokenizer import Bytes, train_bpe
from parallax.errors import ConfigError, DataError

END = "<|im_end|>"
ANSWER = "{% generation %}{{ messages[1].content }}{% endgeneration %}"


def all_batches(reader):
    return [reader.batch(step) for step in range(reader.batches)]


def texts_of(batches):
    """The text of each document in windows, and what is learned of it, sorted."""
    documents = []
    for batch in batches:
        for tokens, labels, segments in zip(batch["tokens"], batch["labels"], batch["segments"]):
            for number in range(1, segments.max() + 1):
                here = segments == number
                text = bytes(token for token in tokens[here]).decode()
                learned = "".join(chr(label) if label >= 0 else "." for label in labels[here])
                documents.append((text, learned))
    return sorted(documents)


def test_answers_alone_are_learned_and_whole_conversations_stand_in_windows(tmp_path):
    chats = conversations(40, turns=1)
    reader = chat_reader(write_chats(tmp_path / "c.jsonl", chats), tmp_path, global_batch=1, seq=160)
    there = texts_of(all_batches(reader))
    expected = []
    for question, answer in chats:
        before = f"<|im_start|>user\n{question['content']}{END}\n<|im_start|>assistant\n"
        said = answer["content"] + END
        expected.append((before + said + "\n", "." * (len(before) - 1) + said + ".."))
    shorter = [(text, learned) for text, learned in there if not text.endswith("\n")]
    assert all(f"{text}\n" in dict(expected) for text, _ in shorter)  # a window's last token is only a label
    assert [text.rstrip("\n") for text, _ in there] == sorted(text.rstrip("\n") for text, _ in expected)
    assert [learned.strip(".") for _, learned in there] == [learned.strip(".") for _, learned in sorted(expected)]


def test_all_is_learned_where_that_is_wanted(tmp_path):
    file = write_chats(tmp_path / "c.jsonl", [turn("Hi", "Yes")] * 2)
    text = f"<|im_start|>user\nHi{END}\n<|im_start|>assistant\nYes{END}\n"
    for loss_on, expected in (("answers", [f"Yes{END}"]), ("all", [line for line in text[1:].split("\n") if line])):
        reader = chat_reader(file, tmp_path, loss_on=loss_on, global_batch=1, seq=len(text))
        assert learned_text(reader.batch(0), 0) == expected


def test_a_token_that_holds_a_letter_of_an_answer_is_learned():
    """Also one that holds other letters, too."""
    tokenizer = train_bpe(["abcabcabcabc abcabc"] * 9, vocab=300)
    text = Marked("abcabcxabc", [(4, 7)])
    of_bytes = [False] * 4 + [True] * 3 + [False] * 3 + [True]  # the end of the text
    for chosen, pieces, expected in (
        (tokenizer, ["abcabc", "x", "abc"], [True, True, False, True]),
        (Bytes(), [*text], of_bytes),
    ):
        whole = Marked(text, text.learned, is_whole=False)
        for marked, wanted in ((text, expected[:-1]), (whole, expected)):
            (ids,) = encode_marked(chosen, [marked], special_tokens="text")
            assert ((ids & LEARNED) > 0).tolist() == wanted
        assert [chosen.decode([number]) for number in chosen.encode(text)] == pieces


def test_letters_of_several_bytes_have_one_place():
    ids, starts, ends = Bytes().encode_with_places(["aé日"])[0]
    assert ids.tolist() == [*"aé日".encode()]
    assert starts.tolist() == [0, 1, 1, 2, 2, 2] and (ends - starts == 1).all()
    tokenizer = train_bpe(["abc"], vocab=257)
    for ours, theirs in zip((ids, starts, ends), tokenizer.encode_with_places(["aé日"])[0]):
        assert len(ours) == len(theirs)


LONG = [*turn("q" * 20, "a" * 20), *turn("r" * 20, "b" * 20), *turn("s" * 20, "c" * 20)]


@pytest.mark.parametrize(
    ("too_long", "learned"),
    [
        ("cut", ["a" * 20 + END, "b" * 12]),
        ("drop", []),
        ("split", ["a" * 20 + END, "b" * 20 + END, "c" * 20 + END]),
    ],
)
def test_what_becomes_of_a_conversation_that_is_longer_than_a_window(tmp_path, too_long, learned):
    short = turn("Hi", "Yes")
    file = write_chats(tmp_path / "c.jsonl", [LONG, short])
    reader = chat_reader(file, tmp_path, too_long=too_long, global_batch=1, seq=182 if too_long == "cut" else 150)
    rows = [learned_text(batch, 0) for batch in all_batches(reader)]
    assert sorted(part for row in rows for part in row) == sorted([*learned, f"Yes{END}"])
    if too_long == "split":
        texts = [text for text, _ in texts_of(all_batches(reader))]
        assert len(texts) == 4 and all(text.startswith("<|im_start|>user\n") for text in texts)


def test_parts_without_an_answer_are_left_out(tmp_path):
    chats = [turn("q" * 200, "never seen"), turn("Hi", "Yes")]
    reader = chat_reader(write_chats(tmp_path / "c.jsonl", chats), tmp_path, global_batch=1)
    assert reader.windows == 1 and "1 are longer than one, data.too_long='cut'" in reader.packed
    with pytest.raises(DataError, match="no document of the train split in .* has a token to learn in a window"):
        chat_reader(write_chats(tmp_path / "d.jsonl", chats[:1]), tmp_path / "d", global_batch=1)


def test_tools_and_system_messages_are_read(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}]
    chat += [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "4"}]
    chat += [{"role": "assistant", "content": "It is 4."}]
    for number, tools in enumerate([[TOOL], json.dumps([TOOL])]):
        file = write_chats(tmp_path / f"{number}.jsonl", [chat] * 2, tools=tools)
        reader = chat_reader(file, tmp_path / str(number), seq=1024, global_batch=1)
        call, answer = '{"name": "add", "arguments": {"a": 2, "b": [2]}}', f"It is 4.{END}"
        assert learned_text(reader.batch(0), 0) == ["<tool_call>", call, f"</tool_call>{END}", answer]


def test_a_prompt_and_its_completion(tmp_path):
    file = tmp_path / "c.jsonl"
    file.write_text('{"prompt": "2 + 2 is ", "completion": "4."}\n{"prompt": "", "completion": "So."}\n')
    reader = chat_reader(file, tmp_path, format="completion", chat_template="auto", seq=32, global_batch=1)
    (batch,) = all_batches(reader)
    assert learned_text(batch, 0) == ["4.", "o."] or learned_text(batch, 0) == ["So.", "4."]
    assert (batch["labels"] == Bytes.end).sum() == 2  # the end is learned, too
    assert batch["segments"][0].max() == 2


PROMPT = [{"role": "system", "content": "Be brief."}, *turn("q" * 4, "a" * 4), {"role": "user", "content": "2 + 2"}]


def write_parts(file, *records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_of_a_prompt_and_a_completion_of_messages_the_completion_alone_is_learned(tmp_path):
    """The prompt's answers are only read; all else is as in one conversation."""
    asked = [{"role": "user", "content": "And 3?"}, {"role": "assistant", "content": "b" * 4}]
    completion = [{"role": "assistant", "content": "4."}, *asked]
    parts = write_parts(tmp_path / "parts.jsonl", *[{"prompt": PROMPT, "completion": completion, "score": 1}] * 2)
    whole = write_chats(tmp_path / "whole.jsonl", [[*PROMPT, *completion]] * 2)
    in_parts, as_one = (
        chat_reader(file, tmp_path / file.stem, seq=512, global_batch=1).batch(0) for file in (parts, whole)
    )
    assert learned_text(in_parts, 0) == [f"4.{END}", f"bbbb{END}"] * 2
    assert learned_text(as_one, 0) == [f"aaaa{END}", f"4.{END}", f"bbbb{END}"] * 2
    np.testing.assert_equal(in_parts["tokens"], as_one["tokens"])
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": PROMPT, "completion": completion, "score": 1}] * 2
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "parts.parquet")
    for where in ("", "score > 0"):
        about = dict(source="parquet", seq=512, global_batch=1, where=where)
        table = chat_reader(tmp_path / "parts.parquet", tmp_path / f"of {where}", **about)
        np.testing.assert_equal(table.batch(0), in_parts)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "2 + 2", "completion": PROMPT}, r"prompt holds '2 \+ 2', not a list of messages"),
        ({"prompt": PROMPT, "completion": []}, r"completion holds \[\], not a list of messages"),
        (
            {"prompt": PROMPT, "completion": PROMPT[:1]},
            "completion: no message is the assistant's, so there",
        ),
        (
            {"prompt": [{"role": "bot"}], "completion": PROMPT},
            "prompt: message 1 has the role 'bot'",
        ),
        ({"prompt": PROMPT}, r"has no field 'messages' \(chat\); fields: prompt"),
    ],
)
def test_parts_of_a_conversation_that_are_none_are_refused(tmp_path, record, said):
    file = write_parts(tmp_path / "c.jsonl", record)
    with pytest.raises(DataError, match=f"c.jsonl:1:? {said}"):
        chat_reader(file, tmp_path)


def test_a_field_that_is_named_is_not_replaced_by_a_prompt_and_a_completion(tmp_path):
    file = write_parts(tmp_path / "c.jsonl", {"prompt": PROMPT, "completion": PROMPT})
    with pytest.raises(DataError, match="has no field 'talk'"):
        chat_reader(file, tmp_path, field="talk")


def test_messages_are_no_text_of_a_completion(tmp_path):
    file = write_parts(tmp_path / "c.jsonl", {"prompt": PROMPT, "completion": PROMPT})
    with pytest.raises(DataError, match="not a text; data.format='chat' reads messages"):
        chat_reader(file, tmp_path, format="completion", chat_template="auto")


def test_parquet_has_the_same_batches_as_jsonl(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chats = conversations(20)
    lines = chat_reader(write_chats(tmp_path / "c.jsonl", chats), tmp_path)
    rows = [{"messages": chat, "score": number} for number, chat in enumerate(chats)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    table = chat_reader(tmp_path / "c.parquet", tmp_path, source="parquet")
    assert lines.windows == table.windows and lines.fingerprint == table.fingerprint
    for step in range(3):
        np.testing.assert_equal(table.batch(step), lines.batch(step))
    few = chat_reader(tmp_path / "c.parquet", tmp_path, source="parquet", where="score < 9")
    assert few.documents == 9
    with pytest.raises(DataError, match="c.parquet has no column 'talk'; columns: messages, score"):
        chat_reader(tmp_path / "c.parquet", tmp_path, source="parquet", field="talk")


def test_a_batch_depends_on_data_seed_and_step_alone(tmp_path):
    """Whoever reads which rows and columns, and whether shards were prepared before."""
    file = write_chats(tmp_path / "c.jsonl", conversations(60))
    whole = chat_reader(file, tmp_path)
    prepared = chat_reader(whole.folder, tmp_path, source="prepared", format="text", chat_template="auto")
    again = chat_reader(file, tmp_path, rows=[3, 1], columns=range(32, 96))
    assert whole.fingerprint == prepared.fingerprint
    for step in (0, 5, 17):
        np.testing.assert_equal(prepared.batch(step), whole.batch(step))
        for name, array in whole.batch(step).items():
            np.testing.assert_array_equal(again.batch(step)[name], array[[3, 1], 32:96])
    other = chat_reader(file, tmp_path, seed=1)
    assert other.fingerprint != whole.fingerprint
    assert any((other.batch(0)["tokens"] != whole.batch(0)["tokens"]).ravel())


def test_each_epoch_has_every_conversation_once(tmp_path):
    reader = chat_reader(write_chats(tmp_path / "c.jsonl", conversations(60)), tmp_path, too_long="drop", seq=512)
    rows = np.arange(reader.windows)
    first, second = (reader.windows_of_rows(rows + epoch * reader.windows) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == rows.tolist() and first.tolist() != second.tolist()
    assert reader.documents_of(rows).tolist() == [*range(60)]


@pytest.mark.parametrize("changes", [{"loss_on": "all"}, {"too_long": "split"}, {"too_long": "drop"}])
def test_what_is_learned_is_part_of_the_fingerprint(tmp_path, changes):
    file = write_chats(tmp_path / "c.jsonl", conversations(40))
    assert chat_reader(file, tmp_path).fingerprint != chat_reader(file, tmp_path, **changes).fingerprint


def test_the_held_out_conversations_are_read_whole_with_a_padded_batch(tmp_path):
    file = write_chats(tmp_path / "c.jsonl", conversations(60, turns=1))
    reader = chat_reader(file, tmp_path, split="eval", eval_fraction=0.2)
    assert len(texts_of(all_batches(reader))) == reader.documents == 12
    last = all_batches(reader)[-1]
    assert (last["labels"][(last["segments"] == 0).all(axis=1)] == -1).all()


def test_chats_in_a_mixture(tmp_path):
    write_chats(tmp_path / "c.jsonl", conversations(60))
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps({"text": "x" * 50}) + "\n" for _ in range(99)))
    chat, plain = tmp_path / "c.jsonl", tmp_path / "plain.jsonl"
    mixture = f"chat=(path='{chat}', format='chat', weight=1) plain=(path='{plain}', weight=3)"
    shape = dict(seq=128, global_batch=4, eval_fraction=0.0)
    config = data_config(mixture=mixture, chat_template="chatml", **shape)
    mixed = open_mixture(config, folder=tmp_path, vocab=None)
    alone = chat_reader(chat, tmp_path, global_batch=1)
    batch = mixed.batch(2)
    assert "<|im_start|>" in mixed.tokenizer.template
    of_source = batch.pop("groups")
    assert (of_source == (batch["tokens"] == ord("x")).any(1)[:, None]).all()
    assert sum((tokens == ord("x")).any() for tokens in batch["tokens"]) == 3
    of_chat = [row for row in range(4) if not (batch["tokens"][row] == ord("x")).any()]
    np.testing.assert_equal({name: array[of_chat] for name, array in batch.items()}, alone.batch(2))
    again = open_mixture(config, folder=tmp_path, vocab=None)
    np.testing.assert_equal(again.batch(2), batch | {"groups": of_source})


def test_windows_of_another_length_in_a_later_phase(tmp_path):
    file = write_chats(tmp_path / "c.jsonl", conversations(60))
    config = data_config(
        mixture=f"chat=(path='{file}', format='chat')",
        phases="long=(from_step=3, seq=256, global_batch=2)",
        chat_template="chatml",
        seq=128,
        global_batch=4,
        eval_fraction=0.0,
    )
    mixed = open_mixture(config, folder=tmp_path, vocab=None)
    assert [mixed.batch(step)["tokens"].shape for step in (1, 2)] == [(4, 128), (2, 256)]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"text": "Hi"}', r"c.jsonl:2 has no field 'messages' \(chat\); fields: text"),
        ('{"messages": "Hi"}', "c.jsonl:2 holds 'Hi', not a list of messages"),
        ('{"messages": [{"role": "user"', "c.jsonl:2 cannot be read as JSON"),
        ('{"messages": [{"content": "Hi"}]}', "c.jsonl:2: message 1 has no role"),
        ('{"messages": [{"role": "bot", "content": "Hi"}]}', "c.jsonl:2: message 1 has the role 'bot'"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "c.jsonl:2: no message is the assistant's"),
        ('{"messages": [{"role": "assistant", "content": ""}]}', "c.jsonl:2: message 1 has no content"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "tools": "["}', "c.jsonl:2: tools cannot be read as"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "tools": [1]}', r"c.jsonl:2: tools is \[1\], not a li"),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "c.jsonl:2"),
        (
            '{"messages": [{"role": "tool", "content": "a"}, {"role": "assistant", "content": "a"}]}',
            "c.jsonl:2: .*has no",
        ),
    ],
)
def test_a_wrong_record_is_said_with_file_and_line(tmp_path, line, error):
    good = json.dumps({"messages": turn("Hi", "Yes")})
    (tmp_path / "c.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(DataError, match=error) as raised:
        chat_reader(tmp_path / "c.jsonl", tmp_path, chat_template="gemma")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"prompt": "a"}', r"c.jsonl:1 has no field 'completion' \(completion\); fields: prompt"),
        ('{"prompt": "a", "completion": ""}', "c.jsonl:1 has an empty completion, so there is nothing to learn"),
        ('{"prompt": 7, "completion": "a"}', "c.jsonl:1: field 'prompt' holds 7, not a text"),
    ],
)
def test_a_wrong_completion_is_said_with_file_and_line(tmp_path, line, error):
    (tmp_path / "c.jsonl").write_text(line)
    with pytest.raises(DataError, match=error):
        chat_reader(tmp_path / "c.jsonl", tmp_path, format="completion", chat_template="auto")


def test_data_keeps_both_templates_of_a_tokenizer(tmp_path):
    """Those of a folder, of which a saved tokenizer has none."""
    theirs = tmp_path / "theirs"
    train_bpe(["some text"], vocab=257).save(theirs)
    (theirs / "chat_template.jinja").write_text("plain " + ANSWER)
    (theirs / "additional_chat_templates").mkdir()
    (theirs / "additional_chat_templates" / "tool_use.jinja").write_text("tools " + ANSWER)
    file = write_chats(tmp_path / "c.jsonl", conversations(40))
    about = dict(chat_template="auto", tokenizer=str(theirs / "tokenizer.json"), loss_on="all")
    reader = chat_reader(file, tmp_path, **about)
    assert reader.tokenizer.template == ""
    reader.tokenizer.save(tmp_path / "run")
    kept = ChatTemplate.of_tokenizer(tmp_path / "run")
    chat = turn("Hi", "Yes")
    assert kept.render(chat) == "plain Yes" and kept.render(chat, [TOOL]) == "tools Yes"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (dict(source="text"), "data.format='chat' reads records, and data.source='text' has none; use jsonl or"),
        (dict(format="text"), "data.chat_template='chatml' is not read with data.format='text'"),
        (dict(format="text", chat_template="auto", loss_on="all"), "data.loss_on='all' is not read with data.format="),
        (dict(format="text", chat_template="auto", too_long="drop"), "data.too_long='drop' is not read with"),
        (dict(format="completion", chat_template="auto", field="x"), "data.field='x' is not read with data.format='c"),
        (dict(special_tokens="tokens"), "data.special_tokens='tokens' is not read with data.format='chat'"),
        (dict(format="chats"), "data.format='chats'"),
        (dict(too_long="wrap"), "data.too_long='wrap'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, changes, error):
    with pytest.raises(ConfigError, match=error):
        chat_config(tmp_path / "c.jsonl", **changes)


def test_a_template_must_come_from_somewhere(tmp_path):
    file = write_chats(tmp_path / "c.jsonl", conversations(9))
    with pytest.raises(DataError, match="data.chat_template='auto' is that of the tokenizer, and 'bytes' has none"):
        chat_reader(file, tmp_path, chat_template="auto")
    tokenizer = train_bpe(["some text"], vocab=257)
    tokenizer.template = "{% for m in messages %}{{ m.role }} {{ m.content }}|{% endfor %}"
    tokenizer.save(tmp_path / "t")
    reader = chat_reader(file, tmp_path, chat_template="auto", tokenizer=str(tmp_path / "t" / "tokenizer.json"))
    assert reader.tokenizer.template == tokenizer.template
    (tmp_path / "mine.jinja").write_text("{{ raise_exception('never') }}")
    with pytest.raises(DataError, match="c.jsonl:1: .*mine.jinja refuses the messages: never"):
        chat_reader(file, tmp_path, chat_template=str(tmp_path / "mine.jinja"))


def test_pieces_are_packed_by_best_fit():
    random = np.random.default_rng(0)
    lengths = random.integers(1, 65, 500)
    windows = best_fit(lengths.tolist(), 64)
    sums = np.bincount(windows, lengths)
    # Two pieces of more than half a window never share one.
    assert sums.max() <= 64 and len(sums) <= max(np.ceil(lengths.sum() / 64), (lengths > 32).sum()) * 1.03
    packing = pack(np.cumsum(lengths) - lengths, lengths, np.arange(500), 64)
    assert sorted(np.concatenate([packing.pieces_in(window) for window in range(packing.windows)])) == [*range(500)]
    assert len(packing.pieces_in(packing.windows)) == 0
    none = np.zeros(0, np.int64)
    assert pack(none, none, none, 64).windows == 0


def test_parts_begin_with_turns():
    for length, turns, room in [(100, [10, 20, 55, 90], 40), (7, [], 3), (30, [29], 10), (12, [4, 8], 4)]:
        parts = parts_of_document(length, turns, room)
        assert [first for first, _ in parts] == sorted({first for first, _ in parts} & {0, *turns})
        assert all(count <= room for _, count in parts)
        whole = [first + count for first, count in parts if count < room]
        assert {*whole} <= {*turns, length}


def test_ids_of_marked_texts_have_four_bytes(tmp_path):
    reader = chat_reader(write_chats(tmp_path / "c.jsonl", conversations(9)), tmp_path)
    assert reader.manifest.dtype == MARKED_IDS and reader.manifest.record_format == "chat"
    manifest = json.loads((reader.folder / "manifest.json").read_text())
    assert manifest["request"]["source"]["fields"] == ["messages"]
    text = open_reader(
        data_config(source="synthetic", synthetic_tokens=5000, seq=8), folder=tmp_path, vocab=None, split="all"
    )
    assert text.manifest.dtype == np.dtype("<u2") and text.manifest.record_format == "text"


def test_another_source_drops_the_settings_of_chats(tmp_path):
    config = chat_config(tmp_path / "c.jsonl", loss_on="all", too_long="drop")
    of_text = {"format": "text", "chat_template": "auto", "loss_on": "answers", "too_long": "cut"}
    assert config.changes_of_format("text", "chat") == of_text
    assert config.changes_of_format("prepared", "chat") == {"format": "text", "chat_template": "auto"}
    of_chat = {"format": "chat", "chat_template": "chatml", "special_tokens": "text"}
    assert config.changes_of_format("jsonl", "chat") == of_chat
