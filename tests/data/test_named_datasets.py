"""Data sets by name, through the `datasets` library, offline: from folders of files."""

import json

import numpy as np
import pytest
from support.chat_examples import CALL, chat_reader, conversations, write_chats

from parallax.cli.data import main
from parallax.config.sections import DataConfig
from parallax.config.settings import load_json
from parallax.data import open_mixture, open_reader
from parallax.data.shards import Manifest
from parallax.data.sources import open_source
from parallax.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """As HF_HUB_OFFLINE=1, which is read when the libraries are imported; the worker with these tests alone does so."""
    pytest.importorskip("datasets", reason="needs datasets, of the extra 'datasets'")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path):
    """A data set of two splits, in a folder."""
    folder = tmp_path / "mine"
    folder.mkdir()
    rows = [{"text": f"row {number} " * 9, "score": number} for number in range(12)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "validation.jsonl").write_text('{"text": "held out", "score": 1}\n{"text": null, "score": 2}\n')
    return folder


def source_of(path, **about):
    return open_source("dataset", path=str(path), **{"field": "text", "synthetic_tokens": 0} | about)


def test_a_split_is_read_row_by_row(folder):
    assert [*source_of(f"{folder}?split=validation").documents()] == ["held out", ""]
    source = source_of(folder, where="score >= 10")
    assert [*source.documents()] == [*source.documents()] == ["row 10 " * 9, "row 11 " * 9]
    assert source.text_bytes is None


def test_parquet_in_a_folder_is_read_too(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    assert [*source_of(tmp_path).documents()] == ["one", "two"]


def test_the_same_files_elsewhere_are_the_same_data(folder):
    before = source_of(folder).description
    moved = folder.rename(folder.with_name("moved"))
    assert source_of(moved).description == before
    with open(moved / "train.jsonl", "a") as opened:
        opened.write('{"text": "more", "score": 1}\n')
    assert source_of(moved).description != before


def test_options_of_a_readme_are_part_of_the_data(tmp_path):
    """The same file has other rows with another separator, or other types of columns."""
    (tmp_path / "train.csv").write_text("score;text\n1;one\n")
    descriptions = [source_of(tmp_path).description]
    types = "dataset_info:\n  features:\n  - {name: score, dtype: float32}\n  - {name: text, dtype: string}\n"
    configs = "configs:\n- {config_name: default, data_files: '*.csv', sep: ';'}\n"
    for said in (configs, types + configs):
        (tmp_path / "README.md").write_text(f"---\n{said}---\n")
        descriptions.append(source_of(tmp_path).description)
    plain, separated, typed = (description["of"][0] for description in descriptions)
    assert "options" not in plain and separated["options"] == {"sep": "';'"}
    assert typed["options"] == {"features": "{'score': Value('float32'), 'text': Value('string')}", "sep": "';'"}
    assert plain["sha256"] == separated["sha256"] == typed["sha256"]
    assert [*source_of(tmp_path).documents()] == ["one"]


def test_it_is_prepared_and_read_by_a_run(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["prepare", "--source=dataset", "--path", str(folder), "--out", str(out)]) == 0
    assert Manifest.read(out).documents == 12 and load_json(out / "manifest.json")["request"]["source"]["of"]
    settings = {"seq": 8, "global_batch": 2, "eval_fraction": 0.1}
    options = {"folder": tmp_path / "run", "vocab": None}
    run = open_reader(DataConfig(source="dataset", path=str(folder), **settings), split="train", **options)
    prepared = open_reader(DataConfig(source="prepared", path=str(out), **settings), split="train", **options)
    assert run.fingerprint == prepared.fingerprint
    mixture = f"mine=(source='dataset', path='{folder}', where='score < 6')"
    assert open_mixture(DataConfig(mixture=mixture, **settings), **options).by_name["mine"].documents == 5


def test_rows_may_be_chats(tmp_path):
    """Fields that some messages lack are null in a table."""
    called = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    chats = [*conversations(20), called]
    (tmp_path / "mine").mkdir()
    rows = [{"messages": chat, "score": number} for number, chat in enumerate(chats)]
    (tmp_path / "mine" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = chat_reader(tmp_path / "mine", tmp_path, source="dataset")
    lines = chat_reader(write_chats(tmp_path / "c.jsonl", chats), tmp_path)
    assert here.fingerprint == lines.fingerprint and here.documents == 21
    for step in range(here.batches):
        np.testing.assert_equal(here.batch(step), lines.batch(step))
    assert chat_reader(tmp_path / "mine", tmp_path, source="dataset", where="score < 9").documents == 9


def test_nothing_in_a_data_set_is_run(folder):
    """A script beside the rows, of which earlier versions of the library run it."""
    (folder / "mine.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    try:
        assert len([*source_of(folder).documents()]) == 12
    except DataError as error:
        assert "\n" not in str(error)
    assert not (folder / "ran").exists()


def test_a_version_that_can_run_code_is_refused(folder, monkeypatch):
    monkeypatch.setattr("datasets.__version__", "3.6.0")
    with pytest.raises(ConfigError, match="datasets 3.6.0 can run code of a data set; install 5 or newer"):
        source_of(folder)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mine?split=test", "has no split 'test'; its splits: train and validation|train, validation"),
        ("nobody/has-this", "'nobody/has-this' cannot be read"),
    ],
)
def test_what_is_not_there_is_one_line(path, message, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    with pytest.raises(DataError, match=message) as error:
        source_of(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a?splits=test", "'splits' is unknown; did you mean 'split'|'splits' is unknown"),
        ("a?split=", "write split once, as NAME"),
        ("a?split=b&split=c", "write split once, as NAME"),
        ("?split=b", "has no name"),
    ],
)
def test_a_wrong_name_is_one_line(path, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(source="dataset", path=path)
    with pytest.raises(ConfigError, match=message):
        DataConfig(mixture=f"mine=(source='dataset', path='{path}')")


def test_a_row_without_text_names_its_place(folder):
    with pytest.raises(DataError, match="row 1: field 'score' .* holds int, not a string"):
        [*source_of(folder, field="score").documents()]
    with pytest.raises(DataError, match="row 1 has no field 'body'"):
        [*source_of(folder, field="body").documents()]
