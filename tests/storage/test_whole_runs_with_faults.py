"""Whole runs in a bucket whose store fails within a save, or is slow: status, error, folder and bits."""

import pytest
from support import faulty_store
from support.faulty_store import SECRET, FromRequest, Lagging, every
from support.process_examples import flags_of
from support.run_examples import losses

from parallax.checkpoint import steps
from parallax.cli import train as command_line
from parallax.storage import buckets
from parallax.storage.run_files import RunFiles, read_metrics

UPLOAD, MANIFEST = "/checkpoints/6/params/", "/checkpoints/6/manifest.json"
# What the store does from a write of the save of step 6 on, and what the one line says.
ENDING = {
    "cut": "Empty reply from server",
    "denied": "AccessDenied",
    "expired": "ExpiredToken",
    "failing": "InternalError",
    "other_region": "expecting 'eu-west-1'",
    "throttled": "SlowDown",
    "too_many": "TooManyRequestsException",
    "without_bucket": "bucket does not exist",
}
CASES = [(name, key) for key in (UPLOAD, MANIFEST) for name in ENDING]
NOW_AND_THEN = {"slow": 1, "cut": 4, "failing": 4, "throttled": 4, "unanswered": 8}  # of how many requests one


@pytest.fixture
def command(bucket, corpus, monkeypatch):
    """A run that saves steps 3, 6 and 8. The one after it is of the same process here, which has not ended, and a save
    that failed is not waited for."""
    monkeypatch.setattr(buckets, "LEASE_SECS", 0.2)
    monkeypatch.setattr(buckets, "LEASE_LOOK_SECS", 0.05)
    monkeypatch.setattr(steps, "NO_FILES_SECS", 0.0)
    return ["train.py", *flags_of(corpus, **{"checkpoint.every_steps": 3}), f"--workdir={bucket}"]


def assert_ends_in_one_line(command, capfd, said):
    assert command_line.main(command) == 3
    error = capfd.readouterr().err
    assert said in error and "cannot " in error and len(error.splitlines()) == 1 and SECRET not in error


def assert_goes_on_with_the_same_bits(command, bucket, whole_run):
    run = RunFiles(bucket)
    assert steps.check_steps(run.checkpoints).valid == [3]
    assert command_line.main(command) == 0
    assert losses(bucket) == losses(whole_run)
    assert [row["step"] for row in read_metrics(run.metrics)] == [*range(1, 9)]
    assert steps.check_steps(run.checkpoints).valid[0] == 8 and not steps.unfinished_saves(run.checkpoints)
    assert not run.lock.exists()


@pytest.mark.fast(1)
@pytest.mark.parametrize(("name", "key"), CASES, ids=lambda word: word.strip("/").rpartition("/")[2])
def test_a_run_whose_store_fails_within_a_save_goes_on(store, bucket, command, whole_run, capfd, name, key):
    with store.having(FromRequest(key, getattr(faulty_store, name))):
        assert_ends_in_one_line(command, capfd, ENDING[name])
    assert_goes_on_with_the_same_bits(command, bucket, whole_run)


@pytest.mark.slow
def test_a_run_whose_lists_begin_to_lag_goes_on(store, bucket, command, whole_run, capfd):
    lists = Lagging(0)

    def lagging_from_the_save_on(request):
        if request.method == "PUT" and UPLOAD in request.key:
            lists.stop()
        return lists(request)

    with store.having(lagging_from_the_save_on):
        assert_ends_in_one_line(command, capfd, "lists of this store do not show")
    assert_goes_on_with_the_same_bits(command, bucket, whole_run)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), NOW_AND_THEN.items())
def test_a_run_whose_store_fails_now_and_then_has_the_same_bits(store, bucket, command, whole_run, name, share):
    with store.having(every(share, getattr(faulty_store, name))):
        assert command_line.main(command) == 0
    assert losses(bucket) == losses(whole_run)
    assert steps.check_steps(RunFiles(bucket).checkpoints).valid[0] == 8
