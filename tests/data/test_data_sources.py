"""Sources give the documents that are in the files, and name the file, line and byte that is wrong."""

import errno
import gzip
import json
import os
import sys

import pyarrow
import pyarrow.parquet
import pytest

from parallax.config.sections import DataConfig
from parallax.data import open_reader, sources
from parallax.data.sources import TEXT_PIECE_BYTES, kind_of, open_source
from parallax.errors import ConfigError, DataError


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


def test_several_paths_are_read_in_their_order_each_file_once(tmp_path):
    write(tmp_path, z__jsonl='{"text": "z"}', more_in_b__jsonl='{"text": "b"}', more_in_a__jsonl='{"text": "a"}')
    paths = [str(tmp_path / "z.jsonl"), str(tmp_path / "more"), str(tmp_path / "*.jsonl")]
    source = open_source("jsonl", path=paths, field="text", synthetic_tokens=0)
    assert [*source.documents()] == ["z", "a", "b"] and source.description["files"] == 3
    with pytest.raises(DataError, match=r"data.path='.*/no\*.jsonl': no file matches this glob"):
        open_source("jsonl", path=[*paths, str(tmp_path / "no*.jsonl")], field="text", synthetic_tokens=0)


def test_a_list_of_paths_has_the_batches_of_the_same_files_in_a_folder(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text {name} " * 40)
    options = {"folder": tmp_path / "data", "vocab": None, "split": "train"}
    settings = {"source": "text", "seq": 8, "global_batch": 2, "eval_fraction": 0.0}
    listed = str([str(tmp_path / "a.txt"), str(tmp_path / "[bc].txt")])

    def fingerprint(path):
        return open_reader(DataConfig(path=path, **settings), **options).fingerprint

    first = fingerprint(f"{tmp_path}/*.txt")
    assert fingerprint(listed) == first
    (tmp_path / "a.txt").rename(tmp_path / "d.txt")  # another order is other data
    assert fingerprint(f"{tmp_path}/*.txt") != first


@pytest.mark.parametrize("written", ["['a', 3]", "['a', 'b'", "['a'] + ['b']", "['']"])
def test_what_is_no_list_of_paths_is_one_line(written):
    with pytest.raises(ConfigError, match="is not a list of paths; write it as"):
        DataConfig(source="text", path=written)
    with pytest.raises(ConfigError, match="has several folders, and data.source='prepared' reads one"):
        DataConfig(source="prepared", path="['a', 'b']")


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


def zstd(content):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def test_the_usual_endings_of_lines_are_read(tmp_path, caplog):
    """C4 is .json.gz, Dolma .json.gz, the Pile .jsonl.zst."""
    packed = {"json": bytes, "JSONL": bytes, "jsonl.zst": zstd, "json.gz": gzip.compress, "ndjson.ZST": zstd}
    for number, (ending, pack) in enumerate(packed.items()):
        (tmp_path / f"{number}.{ending}").write_bytes(pack(b'{"text": "%d"}\n' % number))
    assert documents("jsonl", tmp_path) == [*"01234"] and not caplog.text
    assert kind_of(str(tmp_path), "text") == "jsonl"


def test_metadata_in_json_are_no_text(tmp_path, caplog):
    """Of one line, as `datasets` writes dataset_infos.json, they look like lines of text."""
    write(tmp_path, train__jsonl='{"text": "one"}\n', dataset_infos__json='{"default": {"rows": 1}}')
    assert documents("jsonl", tmp_path) == ["one"]
    assert "leaving out 1: 1 of JSON without the field 'text' in an object in the first line" in caplog.text
    (tmp_path / "train.jsonl").rename(tmp_path / "train.json")
    assert documents("jsonl", tmp_path) == ["one"]


def test_metadata_in_json_do_not_make_lines_of_plain_text(tmp_path):
    write(tmp_path, a__txt="one", metadata__json='{"text": "one"}')
    assert kind_of(str(tmp_path), "text") == "text"
    (tmp_path / "a.txt").unlink()
    assert [kind_of(str(tmp_path), field) for field in ("text", "content")] == ["jsonl", "text"]
    (tmp_path / "manifest.json").write_text("{}")
    assert kind_of(str(tmp_path), "text") == "prepared"


def test_packed_text_is_read_in_any_case(tmp_path):
    write(tmp_path, a__TXT="one", b__txt__ZST=zstd(b"two"), c__md__gz=gzip.compress(b"three"))
    assert documents("text", tmp_path) == ["one", "two", "three"]


def test_a_long_packed_file_is_cut_like_another(tmp_path):
    lines = "".join(f"line {number} is ünïcode\n" for number in range(10_000))
    write(tmp_path, a__txt=lines, b__txt__zst=zstd(lines.encode()))
    pieces = documents("text", tmp_path)
    assert pieces[:4] == pieces[4:] and "".join(pieces[4:]) == lines


def test_what_is_left_out_of_a_folder_is_said_with_counts(tmp_path, caplog):
    line = '{"text": "one"}\n'
    write(tmp_path, a__jsonl=line, b__csv="no", c__csv="no", d__txt__xz="no", __git_in_config="no", README="no")
    write(tmp_path, meta__json='{\n "rows": 1\n}', list__json='[{"text": "no"}]')
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    assert documents("jsonl", tmp_path) == ["one"]
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path}: reading 1 file, leaving out 8: 2 with the ending .csv, 2 of JSON without")
    assert all(part in said for part in ("1 hidden", "1 with the ending .xz", "and 1 more"))
    assert documents("jsonl", tmp_path) == ["one"] and len(caplog.messages) == 1
    assert documents("jsonl", tmp_path / "*.jsonl") == ["one"]


def test_only_files_of_other_endings_are_an_error_that_counts_them(tmp_path):
    write(tmp_path, a__csv="no", b__csv="no")
    with pytest.raises(DataError, match=r"no file to read, which would end in \.parquet .*leaving out 2: 2 with the"):
        documents("parquet", tmp_path)


def test_links_are_followed_once_each(tmp_path, caplog):
    write(tmp_path / "far", a__txt="one", deep_in_b__txt="two")
    write(tmp_path / "here", c__txt="three", own_in_d__txt="four")
    here = tmp_path / "here"
    (here / "linked").symlink_to(tmp_path / "far")
    (here / "again").symlink_to(tmp_path / "far")
    (here / "aloop").symlink_to(here)
    (here / "aown").symlink_to(here / "own")
    (here / "acopy.txt").symlink_to(here / "c.txt")
    assert sorted(documents("text", here)) == ["four", "one", "three", "two"]
    assert documents("text", here)[-2:] == ["three", "four"]  # by their own names
    assert caplog.messages[0].endswith("here: reading 4 files, leaving out 1: 1 linked to others")
    assert sorted(documents("text", here / "**" / "*.txt")) == ["four", "one", "three", "two"]


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    write(tmp_path, a__txt="one", shut_in_b__txt="two")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("shut"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        documents("text", tmp_path)


def test_a_mark_of_the_encoding_is_not_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    write(tmp_path, a__txt=mark + b"one " + mark + b"two", b__jsonl=mark + b'{"text": "\\ufeffthree"}\n')
    assert documents("text", tmp_path / "a.txt") == ["one \ufefftwo"]
    assert documents("jsonl", tmp_path / "b.jsonl") == ["three"]
    write_parquet(tmp_path / "c.parquet", text=["\ufefffour"])
    assert documents("parquet", tmp_path / "c.parquet") == ["four"]


def test_a_null_is_an_empty_document(tmp_path):
    write(tmp_path, a__jsonl='{"text": null}\n{"text": "one"}\n')
    assert documents("jsonl", tmp_path) == ["", "one"]


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    """A few kB of zstd may be gigabytes."""
    monkeypatch.setattr(sources, "LARGEST_BYTES", 1000)
    write(tmp_path, a__jsonl__zst=zstd(b'{"text": "one"}\n{"text": "' + b"a" * 10_000_000))
    with pytest.raises(DataError, match=r"a\.jsonl\.zst:2 is a line of more than 1,000 bytes; divide"):
        documents("jsonl", tmp_path)


def test_a_damaged_zstd_file_is_named(tmp_path):
    packed = zstd(b"one line of text\n" * 1000)
    write(tmp_path, cut__txt__zst=packed[:-8], other__txt__zst=b"not zstd")
    for name in ("cut", "other"):
        with pytest.raises(DataError, match=rf"{name}\.txt\.zst cannot be read: "):
            documents("text", tmp_path / f"{name}.txt.zst")


def test_zstd_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    write(tmp_path, a__txt__zst=zstd(b"one"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"a\.txt\.zst, which is packed with zstd, .*pip install -e '\.\[data\]'"):
        documents("text", tmp_path / "a.txt.zst")


def test_parquet_gives_columns_of_categories_and_of_bytes(tmp_path):
    categories = pyarrow.array(["one", None, "é", "one"]).dictionary_encode()
    write_parquet(tmp_path / "a.parquet", text=categories)
    write_parquet(tmp_path / "b.parquet", text=pyarrow.array(["ü".encode(), None], pyarrow.binary()))
    write_parquet(tmp_path / "c.parquet", text=pyarrow.array([b"large"], pyarrow.large_binary()).dictionary_encode())
    assert documents("parquet", tmp_path) == ["one", "", "é", "one", "ü", "", "large"]
    write_parquet(tmp_path / "d.parquet", text=pyarrow.array([b"fine", b"caf\xe9"]))
    with pytest.raises(DataError, match=r"d\.parquet, row 2: column 'text' .* is not UTF-8: byte 0xe9 at offset 3"):
        documents("parquet", tmp_path / "d.parquet")


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
        ("text", "nothing.txt", r"nothing\.txt': there is no such file or folder"),
        ("text", "*.txt", r"\*\.txt': no file matches this glob"),
        ("text", "empty", "empty': this folder has no file to read \\("),
        ("text", "emp*", r"emp\*': no file matches this glob"),
        ("jsonl", "empty", r"this folder has no file to read, which would end in \.jsonl or \.ndjson or \.json"),
        ("parquet", "empty", r"this folder has no file to read, which would end in \.parquet"),
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
