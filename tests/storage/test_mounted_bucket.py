"""A bucket mounted as a folder, as far as a stand-in reaches: no folder can be renamed, and locks mean nothing."""

import errno
import fcntl
import os
import pathlib

import jax
import jax.numpy as jnp
import pytest

from parallax.checkpoint import steps
from parallax.checkpoint.save import CheckpointWriter
from parallax.config.sections import CheckpointConfig
from parallax.errors import CheckpointError
from parallax.storage import files
from parallax.training.folder import RunFolder

TREES = {"params": {"a": jnp.arange(4.0)}}


@pytest.fixture
def without_renamed_folders(monkeypatch):
    """What gcsfuse says of the renaming of a folder with more files than its limit, which is 0."""

    def refused(rename):
        def call(source, target, **options):
            if pathlib.Path(source).is_dir():
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(source))
            return rename(source, target, **options)

        return call

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, refused(getattr(os, name)))


def test_where_no_folder_can_be_renamed_no_step_is_half_there(tmp_path, without_renamed_folders):
    with pytest.raises(CheckpointError, match="cannot save step 1 in .*Too many open files"):
        with CheckpointWriter(tmp_path, CheckpointConfig(), settings={"model": {}}) as writer:
            writer.save(1, jax.tree.map(jnp.copy, TREES))
    assert steps.check_steps(tmp_path).valid == [] and not steps.complete_steps(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOSYS], ids=errno.errorcode.get)
def test_where_there_are_no_locks_a_run_does_not_start(tmp_path, monkeypatch, number):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(CheckpointError, match=os.strerror(number)), RunFolder(tmp_path / "run").locked():
        pass


def test_where_locks_mean_nothing_two_runs_are_not_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with files.run_lock(tmp_path / "lock") as first, files.run_lock(tmp_path / "lock") as second:
        first.take("the first run")
        second.take("the second run")  # nothing can be said here; the page says so
    assert (tmp_path / "lock").read_text() == "the second run"
