"""Sources give the documents that are in the files, and name the file, line and byte that is wrong."""

import gzip
import json
import sys

import pyarrow
import pyarrow.parquet
import pytest

from parallax.data import sources
from parallax.data.sources import TEXT_PIECE_BYTES, open_source
from parallax.runtime.errors import ConfigError, DataError


def documents(kind, path="", field="text", synthetic_tokens=0):
    return [*open_source(kind, path=str(path), field=field, synthetic_tokens=synthetic_tokens).documents()]


def description(kind, path, field="text"):
    return open_source(kind, path=str(path), field=field, synthetic_tokens=0).description


def write(folder, **contents):
    for name, content in contents.items():
        file = folder / name.replace("__", ".").replace("_in_", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def write_parquet(file, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file


def test_text_is_read_in_sorted_order_without_hidden_files(tmp_path):
    write(tmp_path, b__txt="two\r\n", a_in_c__md="one", __hidden="no", __git_in_config="no")
    assert documents("text", tmp_path) == ["one", "two\r\n"]
    assert documents("text", tmp_path / "b.txt") == ["two\r\n"]
    assert documents("text", tmp_path / "**" / "*.md") == ["one"]


def test_a_long_file_is_cut_at_line_ends(tmp_path):
    lines = [f"line {number} is ünïcode\n" for number in range(10_000)]
    write(tmp_path, long__txt="".join(lines))
    pieces = documents("text", tmp_path)
    assert "".join(pieces) == "".join(lines)
    assert len(pieces) == 4
    assert all(piece.endswith("\n") and len(piece.encode()) < TEXT_PIECE_BYTES + 40 for piece in pieces)


@pytest.mark.parametrize("shift", range(4))
def test_a_line_without_an_end_is_cut_between_characters(shift, tmp_path):
    text = "x" * shift + "𝛑" * TEXT_PIECE_BYTES
    write(tmp_path, long__txt=text)
    pieces = documents("text", tmp_path)
    assert "".join(pieces) == text
    assert len(pieces) == 2


def test_jsonl_gives_the_field_of_each_line(tmp_path):
    lines = [json.dumps({"text": text, "id": 1}) for text in ("one", "two\nlines", "é")]
    write(tmp_path, a__jsonl="\n\n".join(lines), b__jsonl__gz=gzip.compress(b'{"text": "packed"}\n'), c__csv="no")
    assert documents("jsonl", tmp_path) == ["one", "two\nlines", "é", "packed"]


def test_parquet_gives_the_column(tmp_path):
    write_parquet(tmp_path / "a.parquet", body=["one", None, "é"], number=[1, 2, 3])
    write_parquet(tmp_path / "b.parquet", body=pyarrow.array(["large"], pyarrow.large_string()))
    assert documents("parquet", tmp_path, field="body") == ["one", "", "é", "large"]


def test_the_standard_library_is_whole_files_of_source():
    source = documents("stdlib")
    assert len(source) > 100
    assert any("class ArgumentParser" in document for document in source)


def test_moby_dick_is_one_document_a_chapter():
    chapters = documents("moby")
    assert len(chapters) == 32
    assert all(chapter.startswith(f"CHAPTER {number}. ") for number, chapter in enumerate(chapters, start=1))
    assert "Call me Ishmael." in chapters[0]


@pytest.mark.parametrize("tokens", [2, 3, 1000, 1001, 1002, 1003, 1004, 2002, 2003, 5000])
def test_synthetic_text_has_the_tokens_that_are_asked_for(tokens):
    found = documents("synthetic", synthetic_tokens=tokens)
    assert sum(len(document.encode()) + 1 for document in found) == tokens
    assert all(found)


def test_equal_descriptions_are_of_equal_documents(tmp_path):
    for name, content in {"a": "one", "b": "one", "c": "two"}.items():
        write(tmp_path / name, x__txt=content, y__txt="same")
    assert description("text", tmp_path / "a") == description("text", tmp_path / "b")
    assert description("text", tmp_path / "a") != description("text", tmp_path / "c")


@pytest.mark.parametrize(
    "kind, path, message",
    [
        ("text", "nothing.txt", r"nothing\.txt': a match of this file, folder or glob does not exist"),
        ("text", "*.txt", r"\*\.txt': a match of this file, folder or glob does not exist"),
        ("text", "empty", "empty': a file does not exist"),
        ("jsonl", "empty", r"a file that ends in \.jsonl or \.jsonl\.gz or \.ndjson does not exist"),
        ("parquet", "empty", r"a file that ends in \.parquet does not exist"),
    ],
)
def test_no_files_are_an_error_that_names_the_place(kind, path, message, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        documents(kind, tmp_path / path)


def test_text_that_is_not_utf8_is_named_with_its_offset(tmp_path):
    write(tmp_path, a__txt=b"caf\xe9 au lait", b__txt=b"x\n" * TEXT_PIECE_BYTES + b"ab\xff")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text: byte 0xe9 at offset 3"):
        documents("text", tmp_path / "a.txt")
    with pytest.raises(DataError, match=rf"b\.txt is not UTF-8 text: byte 0xff at offset {2 * TEXT_PIECE_BYTES + 2}"):
        documents("text", tmp_path / "b.txt")


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[1]", r"cannot be read as JSON: it is '\[1\]', not a JSON object"),
        ('{"body": "x", "id": 3}', r"has no field 'text' \(data.field\); fields: body, id"),
        ("{}", "has no field 'text' .* fields: none"),
        ('{"text": 7}', r"field 'text' \(data.field\) holds int, not a string"),
        (r'{"text": "ab\ud800"}', "has half a surrogate pair at character 2"),
        (b'{"text": "\xff"}', "cannot be read as JSON"),
    ],
)
def test_a_wrong_line_is_named(line, message, tmp_path):
    line = line if isinstance(line, bytes) else line.encode()
    write(tmp_path, a__jsonl=b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:3.* {message}"):
        documents("jsonl", tmp_path)


def test_wrong_parquet_is_named(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", body=["one"], number=[1])
    with pytest.raises(DataError, match=r"a\.parquet has no column 'text' \(data.field\); columns: body, number"):
        documents("parquet", file)
    with pytest.raises(DataError, match=r"column 'number' \(data.field\) holds int64, not strings"):
        documents("parquet", file, field="number")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        documents("parquet", file, field="body")


def test_a_damaged_gzip_file_is_named(tmp_path):
    packed = gzip.compress(b"one line of text\n" * 1000)
    damaged = bytearray(packed)
    damaged[20] ^= 255
    write(tmp_path, cut__txt__gz=packed[:-12], other__txt__gz=b"not gzip", flipped__txt__gz=bytes(damaged))
    for name in ("cut", "other", "flipped"):
        with pytest.raises(DataError, match=rf"{name}\.txt\.gz (cannot be read|is not UTF-8)"):
            documents("text", tmp_path / f"{name}.txt.gz")


def test_a_line_of_absurd_length_is_refused(tmp_path, monkeypatch):
    """Compressed, it has a thousandth of its bytes: it may not be read as a whole."""
    monkeypatch.setattr(sources, "LARGEST_BYTES", 100)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(b'{"text": "b"}\n{"text": "' + b"a" * 1_000_000 + b'"}\n')
    documents = open_source("jsonl", path=str(tmp_path), field="text", synthetic_tokens=0).documents()
    assert next(documents) == "b"
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:2 has more than 100 bytes; a line is a document$"):
        next(documents)


def test_a_small_parquet_file_that_repeats_a_long_text_takes_little_memory(tmp_path):
    """One text of 26 kB is in its dictionary, and the rest of half a kilobyte repeats it 4096 times: 106 MB."""
    table = pyarrow.table({"text": pyarrow.repeat("a" * 26_000, 4096)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    del table
    assert (tmp_path / "a.parquet").stat().st_size < 700
    documents = open_source("parquet", path=str(tmp_path), field="text", synthetic_tokens=0).documents()
    assert next(documents) == next(documents) == "a" * 26_000
    assert pyarrow.total_allocated_bytes() < 30e6


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    file = write_parquet(tmp_path / "a.parquet", text=["one"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[data\]'"):
        documents("parquet", file)
