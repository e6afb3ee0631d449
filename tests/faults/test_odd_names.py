"""Folders may have any name that the file system has: whatever a library would read into it, files land there alone."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
from etils import epath
from hypothesis import example, given
from hypothesis import strategies as st
from support.checkpoint_examples import abstract, save_steps
from support.command_modules import command
from support.run_examples import write_corpus

import parallax as px
from parallax.checkpoint.arrays import ArrayReader, ArrayWriter, damaged_arrays, new_cache, store_manifest
from parallax.checkpoint.restore import restore
from parallax.checkpoint.save import CheckpointWriter
from parallax.checkpoint.steps import DamagedError, check_steps, complete_steps, read_manifest
from parallax.cli import train as command_line
from parallax.config.sections import CheckpointConfig
from parallax.errors import CheckpointError
from parallax.interop.export import open_step
from parallax.storage import files

NAMES = ["exp[1]", "lr=[1e-3]", "a\\b", "run#1", "a?b", "50%", "a|b", "q%41x", "two words", "é", "-dash", "*", "a**b"]
NAMES += ["[", "]", "{a}", "a:b", "file:x", "~", "$HOME", "a&b", "'\"", "a;b", "a\nb", "...", "x.__lock", "e\u0301"]
NAMES += [os.fsdecode(b"\xff")]
ALL = "/".join(["-p", "lr=[1e-3]", "a\\b #1", "50% a|b", "q%41x", "é *", "a**?b"])
LETTERS = "ab/[]\\*?#%|!{}$&;:~'\"\n -_.=é\u0301\udcff1"
CONFIG = CheckpointConfig(every_steps=1, keep_last=2, keep_best=0)


def below(folder):
    return {path.relative_to(folder) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_saved_and_loaded_whatever_its_folder_is_called(tmp_path, name):
    # Beside it is another, which a pattern in its name would match.
    save_steps(tmp_path / "ab" / "run", {1: 2.0}, mesh=(1, 1, 1))
    others, folder = below(tmp_path), tmp_path / name / "run"
    parts = {"params": {"x": jax.numpy.asarray(np.random.default_rng(len(name)).normal(size=(8, 4)))}}
    with CheckpointWriter(folder, CONFIG, settings={}) as checkpoints:
        checkpoints.save(1, parts)
    found = restore(folder, 1, abstract(parts))
    assert np.asarray(found["params"]["x"]).tobytes() == np.asarray(parts["params"]["x"]).tobytes()
    assert damaged_arrays(folder / "1", read_manifest(folder, 1)["arrays"]) == {}
    own = {path for path in below(tmp_path) if path.parts[0] == name}
    assert below(tmp_path) - others == own


@given(st.text(LETTERS, min_size=1, max_size=40))
@example("q%41x")
@example("x.__lock/a//b")
def test_an_array_is_written_and_read_under_any_path(tmp_path_factory, path):
    root = tmp_path_factory.mktemp("any")
    folder = root / "whole" / ("./" + path.replace("..", "."))
    folder.mkdir(parents=True)
    before, x = below(root), np.random.default_rng(len(path)).normal(size=(3, 4))
    context = new_cache()
    writer = ArrayWriter(folder, "x", x, context)
    writer.write((), [x[:2], x[2:]])
    store_manifest(folder, context)
    about = writer.described()
    reader = ArrayReader(folder, "x", about)
    assert b"".join(piece.tobytes() for piece in reader.pieces()) == x.tobytes()
    assert reader.running.value == about["fingerprint"]
    inside = folder.relative_to(root)
    assert all(path.is_relative_to(inside) for path in below(root) - before)


def test_every_command_takes_any_path(observed_run, tmp_path, capsys, monkeypatch):
    home = tmp_path / ALL
    run, out = home / "exp[2]", lambda name: str(home / name)
    write_corpus(home / "corpus")
    shutil.copytree(observed_run, run)

    def calls(name, *arguments):
        main, began = command(name).main, [name] if name in ("evaluate", "report", "replay") else []
        status = main([*began, *arguments])
        said = capsys.readouterr()
        assert status == 0, (name, arguments, said.err)
        return said.out

    mesh = [f"--config.mesh.{axis}={size}" for axis, size in (("pp", 1), ("dp", 1), ("tp", 1))]
    calls("data", "prepare", "--source=text", f"--path={home / 'corpus' / '*.txt'}", f"--out={out('shards')}")
    calls("data", "inspect", out("shards"))
    assert "step 8" in calls("watch", str(run), "--once", f"--svg={out('watch.svg')}")
    calls("report", f"--trace={run}")
    assert calls("generate", f"--workdir={run}", "--prompt=It", "--tokens=1", "--pp=1", "--dp=1", "--tp=1")
    loss = json.loads(calls("evaluate", f"--workdir={run}", "--json", *mesh))["loss"]
    calls("convert", "export", str(run), out("plain"))
    calls("convert", "import", out("plain"), out("import#1"))
    calls("convert", "to-hf", str(run), out("theirs"))
    calls("convert", "from-hf", out("theirs"), f"--workdir={out('back')}")
    params = {name: px.load(out(name)).params for name in ("import#1", "back")}
    for here, there in zip(*map(jax.tree.leaves, params.values()), strict=True):
        np.testing.assert_array_equal(here, there)
    calls("schedules", "gpipe", "--stages=2", "--microbatches=2", f"--csv={out('table.csv')}")
    again = json.loads(calls("evaluate", f"--workdir={out('back')}", f"--data={home / 'corpus'}", "--json", *mesh))
    assert again["loss"] > 0 and loss > 0
    # Nothing has landed elsewhere, as in "qAx" beside "q%41x".
    assert {path.name for path in tmp_path.iterdir()} == {"-p"}
    assert all(len(list(folder.iterdir())) == 1 for folder in list(home.parents)[: ALL.count("/")])
    assert command_line.main(["train.py", f"--workdir={run}", "--config.train.steps=9"]) == 0
    assert complete_steps(run / "checkpoints") >= {8, 9}


@pytest.fixture
def without_descriptors(monkeypatch, tmp_path):
    """A system that has no paths of open files."""
    monkeypatch.setattr(files, "DESCRIPTORS", tmp_path / "none")


def test_where_such_a_name_cannot_work_it_is_refused_at_the_start(
    corpus, tmp_path, without_descriptors, compiles_nothing, capsys
):
    run = tmp_path / "exp[1]"
    flags = ["--config=configs/tiny_gqa.py", "--config.data.source=text", f"--config.data.path={corpus}/*.txt"]
    assert command_line.main(["train.py", *flags, f"--workdir={run}"]) == 3
    error = capsys.readouterr().err
    assert "cannot hold checkpoints: '[' is not part of a name" in error and error.count("\n") == 1
    assert not run.exists()


def test_a_step_that_cannot_be_read_by_its_name_is_not_called_damaged(tmp_path, without_descriptors):
    save_steps(tmp_path / "plain", {1: 2.0}, mesh=(1, 1, 1))
    (tmp_path / "plain").rename(tmp_path / "a|b")
    with pytest.raises(CheckpointError, match=r"a\|b.* cannot hold checkpoints: '\|' is not part of a name") as error:
        restore(tmp_path / "a|b", 1, {})
    assert not isinstance(error.value, DamagedError)
    (tmp_path / "a|b").rename(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").rename(tmp_path / "c|d")
    (tmp_path / "run#").mkdir()
    (tmp_path / "c|d").rename(tmp_path / "run#" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"cannot hold checkpoints: '#' is not part of a name") as error:
        open_step(tmp_path / "run#", None)
    assert not isinstance(error.value, DamagedError)


def test_a_bucket_is_not_looked_for_where_a_local_folder_is_called_like_one():
    taken = [path for path in ("/gs/runs", "/s3/x", "/az", "/hf/y") if not files.MEANT_OTHERWISE.search(path)]
    assert taken == [] and not files.MEANT_OTHERWISE.search("/mnt/gs/runs-1.5_é=2,3 x")


# ---- what was written is read back


@pytest.mark.parametrize("part", ["params", "rest"])
def test_a_save_that_cannot_be_read_back_does_not_count(tmp_path, monkeypatch, part):
    """Orbax looks for what the processes wrote of a part, finds nothing, and says nothing."""
    parts = save_steps(tmp_path, {1: 3.0}, mesh=(1, 2, 1))
    kind = type(epath.Path("/"))
    find = kind.glob
    monkeypatch.setattr(kind, "glob", lambda self, pattern: () if self.name.startswith(part) else find(self, pattern))
    message = rf"cannot save step 2 .* what was written cannot be read back: {part} .*; older steps are untouched"
    with pytest.raises(CheckpointError, match=message):
        with CheckpointWriter(tmp_path, CONFIG, settings={}) as checkpoints:
            checkpoints.save(2, parts)
    assert check_steps(tmp_path) == ([1], {}) and [path.name for path in tmp_path.iterdir()] == ["1"]
