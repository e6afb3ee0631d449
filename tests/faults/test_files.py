"""File systems that fail while a run goes on, and files that somebody else has made: one line, and nothing is lost."""

import dataclasses
import errno
import io
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from xml.etree import ElementTree

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console
from support.checkpoint_examples import rewrite
from support.data_examples import prepare_texts, prepared_reader
from support.run_examples import as_flags, at_batch, at_step, stop_at, tiny_config
from support.stand_ins import full_disk, on_write

from parallax.checkpoint.steps import complete_steps, latest_step
from parallax.cli import train as command_line
from parallax.cli.watch import WatchedRun, picture, write_svg
from parallax.config.settings import load_settings
from parallax.data import reader as reader_module
from parallax.data import sources
from parallax.data.shards import Manifest
from parallax.data.sources import open_source
from parallax.data.tokenizer import load_tokenizer
from parallax.errors import CheckpointError, ConfigError, DataError, exit_status, tell
from parallax.inference.run import Run as Trained
from parallax.step.resolve import vocab_of_weights
from parallax.storage.files import AppendFile, object_of
from parallax.storage.run_files import read_metrics
from parallax.training.folder import RunFolder
from parallax.training.resume import step_to_resume
from parallax.training.run import train
from parallax.training.signals import StopRequest

ROOT = pathlib.Path(command_line.__file__).parents[2]
DEEP = '{"a": ' * 100_000


# ---- while a run goes on


@pytest.fixture
def shards(corpus, tmp_path):
    """Prepared data in several shards, the config of a run on it that saves at its end alone, and its folder."""
    texts = [file.read_text() for file in sorted(corpus.glob("*.txt"))]
    prepare_texts(texts, tmp_path / "shards", shard_bytes=800)
    changes = {"data.source": "prepared", "data.path": str(tmp_path / "shards"), "data.cache": ""}
    changes |= {"data.tokenizer": "bytes", "checkpoint.every_steps": 0, "checkpoint.keep_best": 0}
    return tmp_path / "shards", tiny_config(corpus, **changes), tmp_path / "run"


def assert_saved_and_goes_on(config, run, least):
    """The run has saved a step that it had not been asked to, with the numbers of all steps before it, and goes on."""
    saved = latest_step(run / "checkpoints")
    assert saved >= least and [row["step"] for row in read_metrics(run / "metrics.jsonl")] == list(range(1, saved + 1))
    assert f"step {saved} is saved; with the data back, the same command goes on" in (run / "log.txt").read_text()
    assert train(config, run).reason == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=["EIO", "ESTALE"])
def test_a_file_system_that_fails_while_a_run_reads_ends_it_saved_with_status_5(number, shards, monkeypatch):
    _, config, run = shards
    preadv, failing = os.preadv, []

    def fails(*arguments):
        if failing:
            raise OSError(number, os.strerror(number))
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", fails)
    at_step(monkeypatch, 2, lambda: failing.append(1))
    with pytest.raises(DataError, match=rf"^shard .*\.ids cannot be read: {os.strerror(number)}; put it back") as error:
        train(config, run)
    assert error.value.exit_status == 5
    monkeypatch.undo()
    assert_saved_and_goes_on(config, run, least=2)


@pytest.fixture
def no_file_stays_open(monkeypatch):
    """Shards are opened each time, as where there are more of them than files may be open."""
    monkeypatch.setattr(reader_module, "OPEN_FILES", 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_shard_that_is_deleted_or_replaced_while_a_run_goes_on_ends_it_saved_with_status_5(
    how, shards, monkeypatch, no_file_stays_open
):
    folder, config, run = shards
    aside = folder.with_name("aside")

    def harm():
        shutil.copytree(folder, aside)
        for file in folder.glob("*.ids"):
            size = file.stat().st_size
            file.unlink()
            if how == "replaced":
                file.write_bytes(bytes(size))

    at_step(monkeypatch, 2, harm)
    what = "cannot be read: No such file or directory|is missing" if how == "deleted" else "is damaged: sha256"
    with pytest.raises(DataError, match=rf"^shard .*\.ids ({what})") as error:
        train(config, run)
    assert error.value.exit_status == 5
    monkeypatch.undo()
    shutil.rmtree(folder)
    aside.rename(folder)
    assert_saved_and_goes_on(config, run, least=2)


def test_a_shard_that_is_made_again_while_a_run_goes_on_is_read_on(tmp_path, no_file_stays_open):
    prepare_texts(["some text " * 40, "and more " * 40], tmp_path)
    reader = prepared_reader(tmp_path)
    first = reader.batch(0)
    for file in tmp_path.glob("*.ids"):
        shutil.copy(file, file.with_suffix(".copy"))
        file.with_suffix(".copy").replace(file)
    assert all(np.array_equal(first[name], array) for name, array in reader.batch(0).items())


@pytest.mark.slow
def test_text_held_out_that_cannot_be_read_ends_the_run_saved_with_status_5(corpus, tmp_path, monkeypatch):
    config = tiny_config(corpus, **{"checkpoint.every_steps": 0})
    unreadable_from(monkeypatch, 0, split="eval")
    with pytest.raises(DataError, match=r"shard x\.ids cannot be read"):
        train(config, tmp_path)
    monkeypatch.undo()
    assert latest_step(tmp_path / "checkpoints") == 4
    assert_saved_and_goes_on(config, tmp_path, least=4)


def full_once(monkeypatch, failing):
    """A disk that keeps no line any more once there is something in `failing`."""
    write = AppendFile.write

    def fails(self, text):
        if failing:
            raise CheckpointError(f"cannot write in {self._folder} (No space left on device)")
        write(self, text)

    monkeypatch.setattr(AppendFile, "write", fails)


def unreadable_from(monkeypatch, batch, split="train"):
    """A shard of which `batch` of a split, and what follows, cannot be read."""

    def fails(step):
        if step >= batch:
            raise DataError("shard x.ids cannot be read")

    at_batch(monkeypatch, split, fails)


@pytest.mark.parametrize("what", ["a batch", "an evaluation"])
def test_where_the_log_fails_with_the_data_the_data_is_named(what, corpus, tmp_path, monkeypatch, capsys):
    """One disk may hold both: the run ends with the status and the name of what is lost, and nothing in its place."""
    failing = []
    full_once(monkeypatch, failing)
    if what == "a batch":
        unreadable_from(monkeypatch, 5)
        at_step(monkeypatch, 5, lambda: failing.append(1))
    else:
        unreadable_from(monkeypatch, 0, split="eval")
        at_batch(monkeypatch, "eval", failing.append)
    with pytest.raises(DataError, match=r"shard x\.ids cannot be read"):
        train(tiny_config(corpus), tmp_path)
    assert "CheckpointError: cannot write in" in capsys.readouterr().out


def test_where_a_save_fails_with_the_data_and_the_log_the_data_is_named(corpus, tmp_path, monkeypatch, capsys):
    failing = []
    full_once(monkeypatch, failing)
    unreadable_from(monkeypatch, 5)

    def fails(manifest):
        failing.append(manifest)
        full_disk()

    on_write(monkeypatch, "checkpoints/*/manifest.json", fails)
    with pytest.raises(DataError, match=r"shard x\.ids cannot be read"):
        train(tiny_config(corpus, **{"checkpoint.every_steps": 0}), tmp_path)
    assert "CheckpointError: cannot save step 5" in capsys.readouterr().out


def test_where_parameters_are_not_finite_and_data_is_lost_both_are_said(corpus, tmp_path, monkeypatch):
    unreadable_from(monkeypatch, 3)
    monkeypatch.setattr("parallax.training.loop.not_finite", lambda params: ["embedding"])
    with pytest.raises(DataError, match=r"shard x\.ids cannot be read"):
        train(tiny_config(corpus, **{"checkpoint.every_steps": 0}), tmp_path)
    assert "DivergenceError: after step 3 parameters are not finite: embedding" in (tmp_path / "log.txt").read_text()
    assert latest_step(tmp_path / "checkpoints") is None


def agreed_after(monkeypatch, steps):
    """One of several processes, as far as its steps know; all agree to stop so many steps after its last."""
    monkeypatch.setattr("parallax.processes.job.several", lambda: True)
    asked, taken = [], []

    def after(self, step):
        taken.append(step)
        return bool(asked) and step >= asked[0] + steps

    monkeypatch.setattr(StopRequest, "after", after)
    monkeypatch.setattr(StopRequest, "ask", lambda self, reason: asked.append(taken[-1] if taken else 0))
    return asked


@pytest.mark.parametrize(
    ("lost", "within"), [(5, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 1), (7, 2)))]
)
def test_one_of_several_processes_that_loses_data_stops_with_the_others_before_it_is_needed(
    lost, within, corpus, tmp_path, monkeypatch
):
    asked, config = agreed_after(monkeypatch, within), tiny_config(corpus, **{"checkpoint.every_steps": 0})
    with monkeypatch.context() as patch:
        unreadable_from(patch, lost)
        with pytest.raises(DataError, match=r"^shard x\.ids cannot be read$"):
            train(config, tmp_path)
    assert asked == [lost - 2], "once, with two batches in hand"
    monkeypatch.undo()
    assert latest_step(tmp_path / "checkpoints") == lost - 2 + within
    assert_saved_and_goes_on(config, tmp_path, least=lost - 2 + within)


def test_data_that_a_run_does_not_get_to_stops_no_process(corpus, tmp_path, monkeypatch):
    asked = agreed_after(monkeypatch, 2)
    unreadable_from(monkeypatch, 8)
    assert train(tiny_config(corpus), tmp_path).reason == "finished" and not asked


@pytest.mark.parametrize(("lost", "saved"), [(0, None), (6, 4)])
def test_where_several_processes_do_not_agree_in_time_the_last_checkpoint_stays(
    lost, saved, corpus, tmp_path, monkeypatch
):
    agreed_after(monkeypatch, 3)
    unreadable_from(monkeypatch, lost)
    with pytest.raises(DataError, match=r"shard x\.ids cannot be read"):
        train(tiny_config(corpus), tmp_path)
    assert latest_step(tmp_path / "checkpoints") == saved


def test_one_of_several_processes_that_loses_data_and_cannot_save_names_the_data(corpus, tmp_path, monkeypatch, capsys):
    agreed_after(monkeypatch, 2)
    unreadable_from(monkeypatch, 5)

    on_write(monkeypatch, "checkpoints/*/manifest.json", full_disk)
    with pytest.raises(DataError, match=r"shard x\.ids cannot be read"):
        train(tiny_config(corpus, **{"checkpoint.every_steps": 0}), tmp_path)
    assert "CheckpointError: cannot save step 5" in capsys.readouterr().out


@pytest.mark.fast(1)
@pytest.mark.parametrize("how", ["removed", "renamed", "another in its place"])
def test_a_workdir_that_goes_away_while_a_run_goes_on_ends_it_with_status_3(how, corpus, tmp_path, monkeypatch):
    run, moved = tmp_path / "run", tmp_path / "moved"

    def go_away():
        while latest_step(run / "checkpoints") != 4:  # a save that goes on makes its folders anew
            time.sleep(0.01)
        if how == "removed":
            shutil.rmtree(run)
        else:
            run.rename(moved)
        if how == "another in its place":
            run.mkdir()

    at_step(monkeypatch, 5, go_away)
    with pytest.raises(CheckpointError, match=r"run .*it was removed or renamed while the run went on: put") as error:
        train(tiny_config(corpus), run)
    assert error.value.exit_status == 3 and "\n" not in str(error.value)
    assert not (run / "checkpoints").exists(), "nothing is written where the folder was"
    if how != "removed":
        assert complete_steps(moved / "checkpoints") == {4}
        shutil.rmtree(run, ignore_errors=True)
        moved.rename(run)
        monkeypatch.undo()
        assert train(tiny_config(corpus), run).reason == "finished"


def test_a_workdir_that_goes_away_during_a_save_ends_the_run_with_status_3(corpus, tmp_path, monkeypatch):
    on_write(monkeypatch, "checkpoints/*/manifest.json", lambda _: shutil.rmtree(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"cannot save step 4 in .*No such file|removed or renamed"):
        train(tiny_config(corpus), tmp_path / "run")


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
from parallax.cli import train
sys.exit(train.main(["train.py", *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kib", [16, 64])
def test_a_limit_on_the_size_of_files_ends_a_run_with_one_line_and_leaves_nothing(kib, corpus, tmp_path):
    """As `ulimit -f` sets it: a checkpoint's files are larger."""
    config = tiny_config(corpus, **{"checkpoint.every_steps": 2, "mesh.simulate": 8})
    flags = {f"{section}.{key}": value for section, keys in config.to_dict().items() for key, value in keys.items()}
    arguments = ["--config=configs/tiny_gqa.py", *as_flags(flags), f"--workdir={tmp_path / 'run'}"]
    command = [sys.executable, "-c", LIMITED, str(kib << 10), *arguments]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert ended.returncode == 3 and len(ended.stderr.splitlines()) == 1, ended.stderr[-2000:]
    assert ended.stderr.startswith("CheckpointError: cannot ") and "File too large" in ended.stderr
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


# ---- data


def test_a_manifest_nested_without_end_is_refused_in_one_line(tmp_path):
    prepare_texts(["some text " * 9], tmp_path)
    (tmp_path / "manifest.json").write_text(DEEP)
    with pytest.raises(DataError, match=r"manifest\.json cannot be read: it is nested without end$") as error:
        Manifest.read(tmp_path)
    assert error.value.exit_status == 5


ODD_JSON = {
    "nested without end": (DEEP, "it is nested without end"),
    "nested too deep": ('{"a": ' * 500 + "1" + "}" * 500, "it is nested more than 64 deep"),
    "lists in lists": ('{"a": ' + "[" * 500 + "]" * 500 + "}", "it is nested more than 64 deep"),
    "a number of 5,000 digits": ('{"a": ' + "7" * 5000 + "}", "a whole number has thousands of digits"),
    "NaN": ('{"a": NaN}', "NaN is not a number of JSON"),
    "infinity": ('{"a": -Infinity}', "-Infinity is not a number of JSON"),
    "1e400": ('{"a": 1e400}', "1e400 is more than a float holds"),
    "a key twice": ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is there twice"),
    "no UTF-8": (b'{"a": "\xff"}', "byte 0xff at offset 7 is not UTF-8"),
    "a list": ("[1, 2]", "it is '[1, 2]', not a JSON object"),
    "null": ("null", "it is 'null', not a JSON object"),
    "a deep list": ("[" * 300 + "]" * 300, "not a JSON object"),
    "nothing": ("", "Expecting value: line 1 column 1 (char 0)"),
}


@pytest.mark.parametrize("what", ODD_JSON)
def test_json_that_is_odd_is_refused_in_one_line_wherever_it_is_read(what, tmp_path):
    text, why = ODD_JSON[what]
    for name in ("config.json", "tokenizer.json", "manifest.json"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    readers = {Manifest.read: tmp_path, load_settings: tmp_path, load_tokenizer: tmp_path / "tokenizer.json"}
    for reads, path in readers.items():
        with pytest.raises((DataError, CheckpointError)) as error:
            reads(path)
        if reads == Manifest.read and what in ("NaN", "infinity", "1e400"):
            assert "lacks, or should not have, a" in str(error.value)  # numbers are checked by name
        else:
            assert why in str(error.value)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError):
        object_of(text)


@pytest.mark.parametrize("what", ODD_JSON)
def test_a_line_of_jsonl_that_is_odd_is_named_unless_a_field_that_nobody_reads_is(what, tmp_path):
    text, why = ODD_JSON[what]
    line = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one", "score": NaN}\n' + line + b"\n")
    source = open_source("jsonl", path=str(tmp_path / "a.jsonl"), field="text", synthetic_tokens=0)
    if what in ("NaN", "infinity", "1e400", "nested too deep", "lists in lists", "a key twice"):
        why = "has no field 'text'"
    if what == "nothing":
        assert list(source.documents()) == ["one"]
        return
    with pytest.raises(DataError, match="a.jsonl:2") as error:
        list(source.documents())
    assert why in str(error.value) and "\n" not in str(error.value)


def parquet(tmp_path, column):
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    return open_source("parquet", path=str(tmp_path / "a.parquet"), field="text", synthetic_tokens=0)


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()], ids=str)
def test_strings_of_parquet_that_are_not_utf_8_are_named_by_their_row(kind, tmp_path):
    wide = kind == pyarrow.large_string()
    offsets = np.array([0, 2, 6, 6], np.int64 if wide else np.int32)
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"okb\xff\xfed")]
    source = parquet(tmp_path, pyarrow.Array.from_buffers(kind, 3, buffers))
    wrong = r"a\.parquet, row 2: column 'text' \(data\.field\) is not UTF-8: byte 0xff at offset 1; write it as UTF-8$"
    with pytest.raises(DataError, match=wrong):
        list(source.documents())


def test_a_parquet_file_cut_or_changed_anywhere_is_refused_or_read(tmp_path):
    source = parquet(tmp_path, pyarrow.array([None, "", "some text", "more"] * 50))
    whole, rng = (tmp_path / "a.parquet").read_bytes(), np.random.default_rng(0)
    for _ in range(150):
        content = bytearray(whole)
        content[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        (tmp_path / "a.parquet").write_bytes(content[: rng.integers(len(whole))] if rng.random() < 0.2 else content)
        try:
            assert all(isinstance(text, str) for text in source.documents())
        except DataError as error:
            assert "a.parquet" in str(error)


@pytest.mark.parametrize("where", ["hashed", "read"])
def test_a_source_that_cannot_be_read_ends_with_status_5_and_its_name(where, tmp_path, monkeypatch, capsys):
    from parallax.cli.data import main

    (tmp_path / "a.txt").write_text("some text")

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(*((sources, "_size_and_hash") if where == "hashed" else (sources, "_open")), fails)
    command = ["prepare", "--source", "text", "--path", str(tmp_path), "--tokenizer", "bytes"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 5
    said = capsys.readouterr().err
    assert said == f"DataError: {tmp_path / 'a.txt'} cannot be read: Input/output error\n"


# ---- a run folder received from somebody else


VICTIM = "what must stay"


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The folder of a run that was stopped, with the programs of all tiny runs; not to be changed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 3)
        assert train(tiny_config(corpus), folder).reason == "stopped"
    return folder


@pytest.fixture
def received(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "victim").write_text(VICTIM)
    return tmp_path / "run"


ASIDE = ("config.json.tmp", "metadata.json.tmp", "metrics.jsonl.tmp", "tokenizer.json.tmp")
ASIDE += ("config.tmp", "metadata.tmp", "metrics.tmp")
REPLACED = ("config.json", "metadata.json", "metrics.jsonl", "tokenizer.json")
KINDS = {
    "a symbolic link": lambda path, victim: path.symlink_to(victim),
    "a hard link": lambda path, victim: path.hardlink_to(victim),
    "a pipe": lambda path, victim: os.mkfifo(path),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_received_run_has_where_files_are_made_or_replaced_is_not_written_through(
    kind, corpus, received, tmp_path
):
    for name in ASIDE:
        KINDS[kind](received / name, tmp_path / "victim")
    if kind == "a symbolic link":
        for name in REPLACED:
            shutil.move(received / name, tmp_path / name)
            (received / name).symlink_to(tmp_path / name)
    before = {name: (tmp_path / name).read_bytes() for name in REPLACED if (tmp_path / name).exists()}
    assert train(tiny_config(corpus), received).reason == "finished"
    assert (tmp_path / "victim").read_text() == VICTIM
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    assert [row["step"] for row in read_metrics(received / "metrics.jsonl")] == list(range(1, 9))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lock", "log.txt"])
def test_a_lock_and_a_log_of_a_received_run_that_are_no_plain_files_are_refused_with_status_3(
    name, kind, corpus, received, tmp_path
):
    (received / name).unlink()
    KINDS[kind](received / name, tmp_path / "victim")
    what = {"a symbolic link": "is a symbolic link", "a hard link": "has 2 names", "a pipe": "is no plain file"}[kind]
    with pytest.raises(CheckpointError, match=rf"cannot write in .*run \({name} {what}.*; remove it\)") as error:
        train(tiny_config(corpus), received)
    assert error.value.exit_status == 3 and "\n" not in str(error.value)
    assert (tmp_path / "victim").read_text() == VICTIM


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "metrics.jsonl", "log.txt", "lock", "metadata.json"])
def test_a_pipe_in_place_of_a_file_that_is_read_is_not_waited_for(name, received):
    (received / name).unlink()
    os.mkfifo(received / name)
    assert WatchedRun(received).status.state
    if name in ("config.json", "tokenizer.json"):
        with pytest.raises((CheckpointError, DataError), match=rf"{name} cannot be read: {name} is no plain file"):
            load_settings(received)
            load_tokenizer(received)


FORGED = [{}, {"model": {}}, {"model": {"layers": "x", "unknown": 1}}, {"model": 5}, {"pipeline": 3}, {"train": None}]
FORGED += [{"pipeline": {"gather": []}}, {"model": {"matmul_parts": {}}, "data_parallel": {"policy": "zero3"}}]


@pytest.mark.parametrize("settings", FORGED, ids=str)
def test_a_manifest_with_settings_that_no_run_has_written_is_refused_in_one_line(settings, received):
    for step in complete_steps(received / "checkpoints"):
        rewrite(received / "checkpoints", step, lambda manifest: manifest.update(settings=settings))
    wanted = {**load_settings(received).to_dict(), "corpus": {}, "code": {}}
    with pytest.raises((CheckpointError, ConfigError)) as error:
        assert step_to_resume(RunFolder(received), wanted, "must", print)
    assert "\n" not in str(error.value)
    here = load_settings(received)
    if all(isinstance(keys, dict) for keys in settings.values()) and "pipeline" not in settings:
        assert vocab_of_weights(here, received) == {}
        source = dataclasses.replace(here, train=dataclasses.replace(here.train, init_from=str(received)))
        assert vocab_of_weights(source) == {}


@pytest.mark.parametrize("name", [".lock", "manifest.json.tmp", "unfinished.jsonl", "unfinished.jsonl.tmp"])
def test_links_in_a_folder_of_prepared_data_are_not_written_through(name, tmp_path):
    (tmp_path / "victim").write_text(VICTIM)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).symlink_to(tmp_path / "victim")
    try:
        prepare_texts(["some text"], tmp_path / "data")
    except DataError as error:
        assert ".lock is a symbolic link; remove it" in str(error)
    assert (tmp_path / "victim").read_text() == VICTIM


# ---- what is shown of it

STEERING = "\x1b]0;title\x07\x1b[31m\x9b2J\x7f\x00\u202e\u2066\ufffe\x08\r"
SHOWN = "\\x1b]0;title\\x07\\x1b[31m\\x9b2J\\x7f\\x00\\u202e\\u2066\\ufffe\\x08\\r"
STYLES = re.compile(r"\x1b\[[0-9;]*m")


def watched(run, *, svg):
    """What a terminal gets of a run, but for colours, and the elements of its picture."""
    screen = io.StringIO()
    console = Console(file=screen, width=150, force_terminal=True)
    console.print(picture([run], console))
    write_svg([run], 150, svg)
    return STYLES.sub("", screen.getvalue()), list(ElementTree.parse(svg).iter())


def test_no_character_of_a_received_run_steers_the_terminal_and_its_picture_is_xml(tmp_path):
    folder = tmp_path / f"{STEERING.replace(chr(0), '')}<&@font-face {{ x }}"
    folder.mkdir()
    start = {"start": 0, "mesh": {"pp": 1, STEERING: STEERING}, "devices": STEERING}
    start["ended"] = {"time": "yesterday", "reason": f"why{STEERING}" + "]]>&<script>" + "long " * 10_000}
    (folder / "metadata.json").write_text(json.dumps({"starts": [start]}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    (folder / "log.txt").write_text(f"last{STEERING}@font-face {{ x\n", newline="")
    (folder / "checkpoints").mkdir()
    shown, elements = watched(run := WatchedRun(folder), svg=tmp_path / "a.svg")
    assert not [one for one in shown if not one.isprintable() and one != "\n"]
    assert f"why{SHOWN}]]>&<script>" in run.status.why and len(run.status.why) < 10_000
    assert SHOWN in run.mesh and SHOWN in run.devices
    assert len(elements) > 20 and not [one for one in elements if one.tag.endswith("script")]
    (folder / "metadata.json").unlink()
    assert WatchedRun(folder).last_words() == "@font-face { x"  # what comes behind the carriage return is a line


@pytest.mark.parametrize("text", [STEERING, "a name\u00a0of two", "👩\u200d🚀 日本"], ids=["steers", "space", "emoji"])
def test_an_error_about_a_name_prints_no_character_that_steers(text, capsys):
    def act():
        raise CheckpointError(f"{text} is missing")

    assert exit_status(act) == 3
    assert capsys.readouterr().err == f"CheckpointError: {SHOWN if text == STEERING else text} is missing\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_a_model_has_written_steers_no_terminal_and_a_pipe_gets_all_of_it():
    for output, wanted in ((Terminal(), f"text\n{SHOWN}\n"), (io.StringIO(), f"text\n{STEERING}\n")):
        tell(f"text\n{STEERING}", output)
        assert output.getvalue() == wanted


ODD_VALUES = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "1e308",
    "-1e308",
    "7" * 400,
    "7" * 5000,
    '"abc"',
    "null",
    "true",
]
ODD_VALUES += ["[[[]]]", "{}", "-1", "0", "5e-324", '"\\u001b[2J"', "[" * 5000]
COUNTED = {"NaN", "Infinity", "-Infinity", "1e400", "7" * 400, '"abc"', "true", "[[[]]]", "{}", '"\\u001b[2J"'}
UNREADABLE = {"7" * 5000, "[" * 5000}
PLAIN = {"train/loss": 2.0, "eval/loss": 2.5, "perf/step_secs": 0.5, "perf/tokens_per_second": 9.0, "perf/mfu": 0.1}
PLAIN |= {"perf/data_wait_secs": 0.0, "perf/memory_bytes": 1.0, "train/skipped_steps": 0.0}


@pytest.mark.fast(40)
@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: value[:8])
@pytest.mark.parametrize("key", [*PLAIN, "step", "another"])
def test_odd_numbers_in_metrics_are_shown_and_not_raised(key, value, tmp_path):
    row = {name: json.dumps(number) for name, number in ({"step": 1} | PLAIN).items()} | {key: value}
    line = ", ".join(f'"{name}": {number}' for name, number in row.items())
    (tmp_path / "metrics.jsonl").write_text(f"{{{line}}}\n" * 3)
    (tmp_path / "config.json").write_text(f'{{"train": {{"steps": {value}}}}}')
    start = f'{{"start": {value}, "mesh": {{"pp": {value}}}, "devices": {value}, "ended": {{"time": {value}}}}}'
    (tmp_path / "metadata.json").write_text(f'{{"starts": [{start}]}}')
    run = WatchedRun(tmp_path)
    shown, _ = watched(run, svg=tmp_path / "a.svg")
    assert max(map(len, shown.splitlines())) <= 150
    assert ("3 values of metrics.jsonl are not finite numbers" in shown) is (value in COUNTED and key in PLAIN)
    is_step = value in ("-1", "0")
    assert ("3 lines of metrics.jsonl" in shown) is (value in UNREADABLE or (key == "step" and not is_step))


def test_curves_of_a_received_run_have_its_numbers_and_no_others(received):
    rows = [f'{{"step": {step}, "train/loss": {value}}}' for step, value in enumerate(ODD_VALUES)]
    (received / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    run = Trained(received, 4, None, None, None, None)
    steps, losses = run.curve("train/loss")
    assert run.numbers == ["train/loss"] and len(steps) == len(losses) == 10
    assert math.isnan(losses[0]) and math.isinf(losses[3])
    drawn = run.loss_curve()
    assert "svg" in drawn and "nan" not in drawn and "inf" not in drawn


def test_a_step_that_goes_back_or_is_there_twice_is_drawn(tmp_path):
    steps = [1, 2, 3, 2, 2, -5, 10**15, 10**40, 4]
    rows = [json.dumps({"step": step, "train/loss": 1.0 * number}) for number, step in enumerate(steps)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    shown, _ = watched(WatchedRun(tmp_path), svg=tmp_path / "a.svg")
    assert "step 4" in shown and "1 lines of metrics.jsonl" in shown


def test_what_a_line_of_jsonl_has_beside_its_text_may_be_whatever_json_allows(tmp_path):
    deep = '{"text": "two", "meta": ' + "[" * 100 + "]" * 100 + "}"
    (tmp_path / "a.jsonl").write_text('{"text": "one", "meta": {"a": 1, "a": 2}, "id": 1, "id": 2}\n' + deep)
    source = open_source("jsonl", path=str(tmp_path / "a.jsonl"), field="text", synthetic_tokens=0)
    assert list(source.documents()) == ["one", "two"]
    (tmp_path / "a.jsonl").write_text('{"text": "one", "text": "two"}')
    source = open_source("jsonl", path=str(tmp_path / "a.jsonl"), field="text", synthetic_tokens=0)
    with pytest.raises(DataError, match="a.jsonl:1 cannot be read as JSON: 'text' is there twice"):
        list(source.documents())


def test_names_of_a_stranger_are_a_line_that_has_an_end(tmp_path):
    record = {f"name\n{each}" + "x" * 2000: each for each in range(5000)}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    source = open_source("jsonl", path=str(tmp_path / "a.jsonl"), field="text", synthetic_tokens=0)
    with pytest.raises(DataError, match="and 4988 more") as error:
        list(source.documents())
    assert "\n" not in str(error.value) and len(str(error.value)) < 2000
    prepare_texts(["one little document"], tmp_path / "made")
    file = tmp_path / "made" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | record))
    with pytest.raises(DataError, match="lacks, or should not have") as error:
        Manifest.read(tmp_path / "made")
    assert "\n" not in str(error.value) and len(str(error.value)) < 2000
