"""Runs and models that `convert` makes in a bucket."""

import itertools

import numpy as np
import pytest
from support import faulty_store
from support.exportable_runs import own_run, own_settings
from support.faulty_store import SECRET, after, of

from parallax.cli.convert import main as convert
from parallax.interop.export import SavedParams, open_step
from parallax.interop.safetensors import INDEX, read_model
from parallax.storage import files


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A run on a disk, as if it had trained."""
    folder = tmp_path_factory.mktemp("converted") / "run"
    own_run(folder, own_settings(corpus, attention="gqa"))
    return folder


def params_of(run):
    params = SavedParams(open_step(run, None))
    return {name: np.concatenate([*params.pieces(name, ())]) for name in params.stored}


def assert_same(run, other):
    ours, theirs = params_of(run), params_of(other)
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_run_is_exported_to_a_bucket_and_imported_there(run, bucket):
    assert convert(["export", str(run), str(bucket / "exported"), "--shard-mbytes=1"]) == 0
    assert files.names_in(bucket) == ["exported"] and INDEX in files.names_in(bucket / "exported")
    assert convert(["import", str(bucket / "exported"), str(bucket / "imported")]) == 0
    assert_same(run, bucket / "imported")


@pytest.mark.slow
def test_a_run_becomes_a_hugging_face_folder_in_a_bucket_and_a_run_again(run, bucket):
    assert convert(["to-hf", str(run), str(bucket / "theirs")]) == 0
    assert convert(["from-hf", str(bucket / "theirs"), f"--workdir={bucket / 'ours'}"]) == 0
    assert_same(run, bucket / "ours")


def test_a_folder_that_is_there_already_is_refused(run, bucket, capsys):
    files.write_whole(bucket / "exported" / "mine.txt", "mine")
    assert convert(["export", str(run), str(bucket / "exported")]) == 3
    assert f"{bucket}/exported exists already" in capsys.readouterr().err
    assert files.names_in(bucket / "exported") == ["mine.txt"]


@pytest.mark.parametrize("act", ["export", "import"])
@pytest.mark.parametrize("apart", [pytest.param(1, marks=pytest.mark.slow), 37])
def test_what_a_store_refuses_after_any_request_is_not_there(store, bucket, run, tmp_path, capsys, act, apart):
    source, out = run, bucket / "out"
    if act == "import":
        source = tmp_path / "exported"
        assert convert(["export", str(run), str(source)]) == 0
    for number in itertools.count(0, apart):
        with store.having(of("PUT", after(number, faulty_store.expired))):
            status = convert([act, str(source), str(out)])
        said = capsys.readouterr().err
        if status == 0:
            break
        assert status == 3 and "ExpiredToken" in said and len(said.splitlines()) == 1 and SECRET not in said
        assert not out.exists()
    assert number and (read_model(out) if act == "export" else params_of(out))


def test_a_killed_export_is_not_taken_for_a_model(run, bucket, monkeypatch, capsys):
    monkeypatch.setattr(files, "remove_what_can_be", lambda folder: None)
    monkeypatch.setattr("parallax.interop.export._write_as_today", lambda *_: {}["killed"])
    with pytest.raises(KeyError):
        convert(["export", str(run), str(bucket / "exported")])
    assert "config.json" in files.names_in(bucket / "exported")
    assert convert(["import", str(bucket / "exported"), str(bucket / "imported")]) == 3
    assert "did the export finish?" in capsys.readouterr().err and not (bucket / "imported").exists()
