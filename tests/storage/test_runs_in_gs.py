"""A run's folder in a bucket of Google's: the tests of S3, on an emulator."""

import os

import pytest
from support.gs_store import gs_bucket, gs_store
from test_runs_in_buckets import (
    test_a_damaged_step_is_named_and_the_one_before_it_restored,
    test_a_killed_run_does_not_lock_itself_out,
    test_a_log_is_objects_that_are_read_as_one,
    test_a_run_that_has_lost_its_lease_saves_nothing_more,
    test_a_save_that_was_killed_does_not_count_and_is_removed,
    test_objects_are_there_whole_or_not_at_all,
    test_steps_are_saved_restored_and_removed,
    test_steps_copied_to_a_disk_are_those_of_a_run_there,
    test_two_runs_do_not_write_one_log,
    test_two_runs_in_one_folder_are_refused,
)

from parallax.errors import CheckpointError, ConfigError
from parallax.storage import buckets, files
from parallax.storage.buckets import path_of

__all__ = [
    "gs_bucket",
    "gs_store",
    "test_a_damaged_step_is_named_and_the_one_before_it_restored",
    "test_a_killed_run_does_not_lock_itself_out",
    "test_a_log_is_objects_that_are_read_as_one",
    "test_a_run_that_has_lost_its_lease_saves_nothing_more",
    "test_a_save_that_was_killed_does_not_count_and_is_removed",
    "test_objects_are_there_whole_or_not_at_all",
    "test_steps_are_saved_restored_and_removed",
    "test_steps_copied_to_a_disk_are_those_of_a_run_there",
    "test_two_runs_do_not_write_one_log",
    "test_two_runs_in_one_folder_are_refused",
]


@pytest.fixture
def bucket(gs_bucket):
    return gs_bucket


def test_a_write_is_refused_unless_the_object_is_the_one_that_was_read(bucket):
    path = bucket / "lock"
    first = buckets.write(path, b"1")
    second = buckets.write(path, b"2", instead_of=first)
    assert second and second != first
    assert buckets.write(path, b"3", instead_of=first) == b"" and files.read_bytes(path) == b"2"
    # The answer to an earlier try was lost: what is there is what was to be written.
    assert buckets.write(path, b"2", instead_of=first) == second


def test_a_bucket_that_is_not_there_is_one_line(bucket):
    with pytest.raises(CheckpointError, match=r"cannot write in gs://none/run .*bucket does not exist"):
        files.check_writable(path_of("gs://none/run"))


@pytest.mark.parametrize("written", ["localhost:9023", "http://localhost:9023/"])
def test_the_emulator_is_named_as_for_the_tools_of_google(written, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", written)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "")
    spec = files.kvstore_of(path_of("gs://bucket/runs/mine"))
    assert spec == {
        "driver": "gcs",
        "bucket": "bucket",
        "path": "runs/mine/",
        "gcs_request_retries": buckets.RETRIES,
    }
    assert os.environ["TENSORSTORE_GCS_HTTP_URL"] == "http://localhost:9023"


def test_a_url_with_a_password_is_refused():
    with pytest.raises(ConfigError, match="gs://BUCKET/FOLDER") as refused:
        path_of("gs://key:secret@bucket/run")
    assert "secret" not in str(refused.value)
