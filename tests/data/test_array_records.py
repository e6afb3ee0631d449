"""ArrayRecord files as a source: texts, JSON objects and TensorFlow's Examples."""

import json
import struct

import numpy as np
import pytest
from support.chat_examples import chat_reader, conversations, write_chats

from parallax.config.sections import DataConfig
from parallax.data.array_records import example_of
from parallax.data.sources import kind_of, open_source
from parallax.errors import ConfigError, DataError

library = pytest.importorskip(
    "array_record.python.array_record_module", reason="needs array_record, of the extra 'arrayrecord'"
)


def write(file, *records):
    writer = library.ArrayRecordWriter(str(file), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return file


def documents(path, field="text", **about):
    return [*open_source("arrayrecord", path=str(path), field=field, synthetic_tokens=0, **about).documents()]


def field(number, content):
    """A field of a protocol buffer: its number, its length and its content, all of less than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


def example(**lists):
    """An Example as TensorFlow writes it; a list of bytes, of floats, or of integers below 128."""
    features = b""
    for name, values in lists.items():
        if isinstance(values[0], bytes):
            feature = field(1, b"".join(field(1, value) for value in values))
        elif isinstance(values[0], float):
            feature = field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
        else:
            feature = field(3, field(1, bytes(values)))
        features += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, features)


def test_records_are_texts_json_or_examples(tmp_path):
    write(tmp_path / "a.arrayrecord", *(f"text {number}\n".encode() for number in range(600)), "é".encode())
    texts = documents(tmp_path / "a.arrayrecord", field="")
    assert texts == [*(f"text {number}\n" for number in range(600)), "é"]
    write(tmp_path / "b.array_record-00000-of-00002", b'{"text": "one", "score": 1}', b'{"text": null, "score": 2}')
    write(tmp_path / "b.array_record-00001-of-00002", example(text=["zwei é".encode()], score=[3]))
    (tmp_path / "a.arrayrecord").unlink()
    (tmp_path / "notes.txt").write_text("no")
    assert documents(tmp_path) == ["one", "", "zwei é"]
    assert documents(tmp_path, where="score != 2") == ["one", "zwei é"]
    assert kind_of(str(tmp_path), "text") == "arrayrecord"


def test_records_may_be_chats(tmp_path):
    chats = [{"messages": chat, "score": number} for number, chat in enumerate(conversations(20))]
    write(tmp_path / "c.arrayrecord", *(json.dumps(chat).encode() for chat in chats))
    here = chat_reader(tmp_path / "c.arrayrecord", tmp_path, source="arrayrecord")
    lines = chat_reader(write_chats(tmp_path / "c.jsonl", conversations(20)), tmp_path)
    assert here.fingerprint == lines.fingerprint
    np.testing.assert_equal(here.batch(0), lines.batch(0))
    assert chat_reader(tmp_path / "c.arrayrecord", tmp_path, source="arrayrecord", where="score < 9").documents == 9
    write(tmp_path / "p.arrayrecord", example(prompt=[b"2 + 2 is "], completion=[b"4."]), b'{"prompt": "2"}')
    completions = dict(source="arrayrecord", format="completion", chat_template="auto")
    with pytest.raises(DataError, match="p.arrayrecord, record 2 has no field 'completion'"):
        chat_reader(tmp_path / "p.arrayrecord", tmp_path, **completions)


def test_an_example_has_the_values_of_its_lists():
    written = example(text=[b"a"], many=[b"b", b"\xff"], ratios=[0.5, -2.0], ids=[1, 2], none=[0])
    assert example_of(written) == {"text": "a", "many": ["b", b"\xff"], "ratios": [0.5, -2.0], "ids": [1, 2], "none": 0}
    negative = field(1, field(1, field(1, b"n") + field(2, field(3, b"\x08" + b"\xff" * 9 + b"\x01"))))  # not packed
    assert example_of(negative) == {"n": -1}
    of_lists = field(2, field(1, field(1, b"text") + field(2, field(1, field(1, field(1, b"a"))))))
    assert example_of(of_lists) == {}  # a SequenceExample


def test_an_example_is_what_protocol_buffers_read():
    """Beside the library's own parser."""
    pool = pytest.importorskip("google.protobuf.descriptor_pool").DescriptorPool()
    from google.protobuf import descriptor_pb2, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="e", package="e", syntax="proto3")
    kinds = {"BytesList": 12, "FloatList": 2, "Int64List": 3}
    for name, kind in kinds.items():
        file.message_type.add(name=name).field.add(name="value", number=1, label=3, type=kind)
    feature = file.message_type.add(name="Feature")
    for number, name in enumerate(kinds, start=1):
        feature.field.add(name=name.lower(), number=number, label=1, type=11, type_name=f".e.{name}")
    entry = file.message_type.add(name="Entry")
    entry.field.add(name="key", number=1, label=1, type=9)
    entry.field.add(name="value", number=2, label=1, type=11, type_name=".e.Feature")
    features = file.message_type.add(name="Features")
    features.field.add(name="feature", number=1, label=3, type=11, type_name=".e.Entry")
    whole = file.message_type.add(name="Example")
    whole.field.add(name="features", number=1, label=1, type=11, type_name=".e.Features")
    pool.Add(file)
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("e.Example"))()
    texts, numbers = made.features.feature.add(key="text"), made.features.feature.add(key="numbers")
    texts.value.byteslist.value.append(("long é " * 100).encode())
    numbers.value.int64list.value.extend([-5, 0, 2**40])
    made.features.feature.add(key="ratio").value.floatlist.value.append(0.25)
    read = example_of(made.SerializeToString())
    assert read == {"text": "long é " * 100, "numbers": [-5, 0, 2**40], "ratio": 0.25}


def example_of_number(kind):
    """An Example whose list of this kind has an integer for its values."""
    return field(1, field(1, field(1, b"text") + field(2, field(kind, b"\x08\x05"))))


def test_what_is_no_record_is_one_line(tmp_path):
    file = tmp_path / "a.arrayrecord"
    for content, settings, message in (
        (b"plain text", {}, "record 1 is neither JSON nor an Example: .*; use data.field='' if it is text"),
        (b'{"text": ', {}, "record 1 cannot be read as JSON"),
        (b'{"body": "a"}', {}, "record 1 has no field 'text'"),
        (b"\xff", {"field": ""}, "record 1 is not UTF-8 text"),
        (field(1, field(1, b"\x08\x05")), {}, "record 1 is neither JSON nor an Example: a number where"),
        (example_of_number(1), {}, "record 1 is neither JSON nor an Example: a number where"),
        (example_of_number(2), {}, "record 1 is neither JSON nor an Example: a number where"),
    ):
        with pytest.raises(DataError, match=message) as error:
            documents(write(file, content), **settings)
        assert "\n" not in str(error.value)
    whole = write(file, b"x" * 9).read_bytes()
    for wrong in (b"no such file" * 9, whole[: len(whole) // 2], b""):
        file.write_bytes(wrong)
        with pytest.raises(DataError, match="cannot be read as ArrayRecord"):
            documents(file)


def test_fields_without_a_field_are_refused():
    with pytest.raises(
        ConfigError, match="data.where='a > 1' reads fields, and data.field='' takes each record as text"
    ):
        DataConfig(source="arrayrecord", path="a", field="", where="a > 1")
