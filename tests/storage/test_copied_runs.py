"""A run that was copied whole from a bucket to a disk, as `aws s3 sync` does."""

import pytest
from support.run_examples import at_step, losses, tiny_config

import parallax as px
from parallax.cli.watch import main as watch
from parallax.storage import files
from parallax.storage.run_files import RunFiles, read_metrics
from parallax.training.run import train


def copied(folder, target):
    """All objects of a folder, as files."""
    for path in files.files_below(folder):
        copy = target / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(files.read_bytes(path))
    return target


def written_log(path, *texts):
    log = files.append_file(path)
    for text in texts:
        log.write(text)
        log.flush()
    log.close()


def test_a_copied_log_is_read_as_one(bucket, tmp_path):
    path, growing = tmp_path / "log.txt", files.growing_log(tmp_path / "log.txt")
    written_log(bucket / "log.txt", "1\n", "2\n")
    copied(bucket, tmp_path)
    assert list(files.lines_in(path)) == [b"1", b"2"] and files.end_of(path, 100) == b"2\n"
    assert [(is_new, list(lines)) for is_new, lines in (growing.read(), growing.read())] == [
        (True, [b"1", b"2"]),
        (False, []),
    ]
    written_log(bucket / "log.txt", "3\n")
    copied(bucket, tmp_path)
    assert list(growing.read()[1]) == [b"1", b"2", b"3"]
    files.replace_log(bucket / "log.txt", [b"4\n"])
    copied(bucket, tmp_path)
    assert list(files.lines_in(path)) == [b"4"]


@pytest.mark.parametrize("killed_in", ["", "write_whole", "remove"])
def test_a_file_is_made_of_a_copied_log_through_a_kill(bucket, tmp_path, monkeypatch, killed_in):
    written_log(bucket / "log.txt", "1\n", "2\n")
    path = copied(bucket, tmp_path) / "log.txt"
    if killed_in:
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(files, killed_in, lambda *_: {}["killed"])
            files.make_one_file(path)
        if killed_in == "write_whole":
            copied(bucket, tmp_path)  # once more, after the kill
    files.make_one_file(path)
    assert path.read_text() == "1\n2\n" and files.names_in(tmp_path) == ["log.txt"]
    files.make_one_file(path)
    written_log(path, "3\n")
    assert list(files.lines_in(path)) == [b"1", b"2", b"3"]


def test_a_copied_run_is_watched_loaded_and_goes_on(bucket, corpus, whole_run, tmp_path, monkeypatch, capsys):
    def killed():
        raise KeyError("killed")

    with monkeypatch.context() as patch, pytest.raises(KeyError):
        at_step(patch, 6, killed)
        train(tiny_config(corpus), str(bucket))
    copy = copied(bucket, tmp_path / "run")
    assert (copy / "metrics.jsonl").is_dir()
    assert px.load(copy).step == 4
    capsys.readouterr()
    assert watch([str(copy), "--once"]) == 0 and "step 6" in capsys.readouterr().out
    assert train(tiny_config(corpus), str(copy)).reason == "finished"
    assert losses(copy) == losses(whole_run)
    assert [row["step"] for row in read_metrics(RunFiles(copy).metrics)] == [*range(1, 9)]
    assert (copy / "metrics.jsonl").is_file() and (copy / "log.txt").is_file()
