"""Copies of the newest step on each host: restored first, bit for bit, and never if they are not of this run."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.checkpoint_examples import SETTINGS, abstract, flip, largest_file, make_parts, mesh_of, rewrite
from support.run_examples import at_step, losses, tiny_config

from parallax.checkpoint.local import KEEP, LocalCopies, bytes_of_process, distance_to_another_host
from parallax.checkpoint.steps import complete_steps
from parallax.config.sections import CheckpointConfig
from parallax.errors import CheckpointError, ConfigError
from parallax.storage import files
from parallax.training.loop import TrainingLoop
from parallax.training.resume import why_not_this_run
from parallax.training.run import train


class Killed(BaseException):
    """As a kill: the run saves nothing more."""


def killed() -> None:
    raise Killed


def test_a_run_goes_on_from_the_copy_bit_for_bit_and_removes_it_at_its_end(corpus, whole_run, tmp_path, monkeypatch):
    config = tiny_config(corpus, **{"checkpoint.local": str(tmp_path / "host"), "checkpoint.local_every_steps": 2})
    (tmp_path / "host" / "another-12345678").mkdir(parents=True)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 7, killed)
        train(config, tmp_path / "run")
    assert complete_steps(tmp_path / "run" / "checkpoints") == {4}
    train(config, tmp_path / "run")
    said = (tmp_path / "run" / "log.txt").read_text()
    assert "step 6 is restored from checkpoint.local; the newest step in the run's folder is 4" in said
    assert "going on from step 6" in said and losses(tmp_path / "run") == losses(whole_run)
    assert "has copies of other runs, which are not used: another-12345678" in said
    assert not [*(tmp_path / "host").rglob("manifest.json")]


def test_a_run_that_is_told_never_to_resume_takes_no_copy(corpus, tmp_path, monkeypatch):
    config = tiny_config(corpus, **{"checkpoint.local": str(tmp_path / "host"), "checkpoint.local_every_steps": 2})
    for step, resume in ((3, "auto"), (1, "never")):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            at_step(patch, step, killed)
            train(config, tmp_path / "run", resume=resume)
    said = (tmp_path / "run" / "log.txt").read_text()
    assert "is restored from" not in said and not [*(tmp_path / "host").rglob("manifest.json")]


def test_a_copy_beyond_the_last_step_is_named():
    settings = {"train": {"steps": 8, "continue_from": ""}}
    assert why_not_this_run(8, settings, settings) == "it is not before train.steps=8"
    assert why_not_this_run(7, settings, settings) == ""


@pytest.fixture
def copied(tmp_path):
    """The parts of a run, whose steps 2 and 4 were copied; the folder of those that are kept."""
    parts = make_parts(mesh_of(2, 2, 2))
    copies = LocalCopies(tmp_path, settings=SETTINGS)
    copies.begin(0, parts)
    for step in (2, 4):
        copies.save(step, parts)
    copies.close()
    return parts, tmp_path / "process-0" / "of-0"


def restored(folder, parts, said, after=0):
    copies = LocalCopies(folder.parents[1], settings=SETTINGS, say=said.append)
    return copies.restore_newest(
        abstract(parts), after=after, why_not=lambda step, saved: "" if saved == SETTINGS else "it has other settings"
    )


def test_the_newest_whole_copy_is_restored_bit_for_bit(copied):
    parts, folder = copied
    said = []
    step, trees, _ = restored(folder, parts, said)
    assert step == 4 and not said
    jax.tree.map(np.testing.assert_array_equal, trees, parts)
    assert restored(folder, parts, said, after=4) is None and not said


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: flip(largest_file(folder / "4")), "does not match its checksum"),
        (lambda folder: (folder / "4" / "manifest.json").unlink(), None),
        (lambda folder: rewrite(folder, 4, lambda c: c["settings"]["model"].update(layers=3)), "it has other settings"),
        (lambda folder: rewrite(folder, 4, lambda c: c.update(shards=1)), "it was saved on another mesh"),
        (
            lambda folder: rewrite(folder, 4, lambda c: c["arrays"]["rest"]["step"].update(fingerprint=1)),
            "rest step is not what was saved",
        ),
    ],
    ids=["damaged", "unfinished", "settings", "mesh", "fingerprint"],
)
def test_a_copy_that_is_not_whole_or_not_of_this_run_is_named_and_not_restored(copied, damage, reason):
    parts, folder = copied
    damage(folder)
    said = []
    assert restored(folder, parts, said).step == 2
    assert len(said) == bool(reason) and (reason or "") in "".join(said)


def test_copies_of_another_mesh_or_model_are_not_restored(copied):
    _, folder = copied
    said = []
    assert restored(folder, make_parts(mesh_of(1, 2, 2)), said) is None
    assert restored(folder, make_parts(mesh_of(2, 2, 2), d_model=8), said) is None
    assert [text for text in said if "on another mesh" in text] and [text for text in said if "another model" in text]


def test_a_copy_that_cannot_be_written_is_named_and_the_older_one_stays(copied, monkeypatch):
    parts, folder = copied
    said = []
    copies = LocalCopies(folder.parents[1], settings=SETTINGS, say=said.append)
    copies.begin(4, parts)
    monkeypatch.setattr("parallax.checkpoint.local.write_tree", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    copies.save(6, parts)
    copies.wait()
    assert said == [f"checkpoint.local: step 6 could not be copied to {folder.parent}: no space"]
    assert files.names_in(folder) == ["4"] and restored(folder, parts, said).step == 4


def test_copies_are_kept_in_folders_of_any_name(tmp_path):
    parts, folder = make_parts(mesh_of(2, 2, 2)), tmp_path / "lr=[1e-3]"
    copies = LocalCopies(folder, settings=SETTINGS)
    copies.begin(0, parts)
    copies.save(2, parts)
    copies.close()
    _, trees, _ = restored(folder / "process-0" / "of-0", parts, [])
    jax.tree.map(np.testing.assert_array_equal, trees, parts)


def test_what_earlier_starts_kept_is_removed_and_the_folder_with_the_last_copy(copied):
    parts, folder = copied
    process = folder.parent
    others = [process / "of-1", process.parent / "process-1", process.parent / "process-12"]
    for other in others:
        (other / "4").mkdir(parents=True)
    copies = LocalCopies(process.parent, settings=SETTINGS)
    copies.begin(4, parts)
    assert [*process.parent.iterdir()] == [process] and [*process.iterdir()] == [folder]
    copies.remove()
    assert not process.parent.exists()


@pytest.mark.parametrize(
    ("hosts", "distance"),
    [("aa", 1), ("ab", 1), ("aabb", 2), ("abab", 1), ("abcabc", 1), ("aabcc", 2), ("abba", 2), ("aab", 1)],
)
def test_the_neighbour_is_the_nearest_on_another_host(hosts, distance):
    assert distance_to_another_host([*map(ord, hosts)]) == distance


def test_what_is_kept_counts_as_room(copied, monkeypatch):
    parts, folder = copied
    held = files.bytes_below(folder / "4")
    copies = LocalCopies(folder.parents[1], settings=SETTINGS)
    monkeypatch.setattr(files, "free_bytes", lambda path: KEEP * bytes_of_process(parts) - held)
    copies.begin(4, parts)


def test_a_folder_without_room_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match=r"of this process take [\d.]+ KiB, and .* has room for [\d.]+ (Ki)?B;"):
        LocalCopies(tmp_path, settings={}).begin(0, make_parts(mesh_of(1, 1, 1)))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"local_every_steps": 5}, "checkpoint.local_every_steps=5 needs a folder of each host"),
        ({"local": "x"}, "checkpoint.local='x' would never be written"),
        ({"local": "s3://b/x", "local_every_steps": 5}, "checkpoint.local='s3://b/x' "),
        ({"local": "x", "local_every_steps": 500}, "is not more often than checkpoint.every_steps=500"),
    ],
)
def test_keys_that_do_not_belong_together_are_refused(keys, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        CheckpointConfig(**keys)


@pytest.mark.parametrize(
    ("expected", "local", "said"),
    [
        (19.0, True, []),
        (21.0, True, ["step 3 is copied to host first", "copied", "waited"]),
        (21.0, False, ["if step 3 is not whole by then, the run goes on from the one before"]),
    ],
)
def test_a_save_that_would_miss_the_deadline_is_preceded_by_a_copy(expected, local, said):
    """30 s, of which 10 are over when the step has ended."""
    happened = []
    copies = SimpleNamespace(wait=lambda: happened.append("waited")) if local else None
    loop = SimpleNamespace(
        settings=SimpleNamespace(checkpoint=CheckpointConfig(local="host" if local else "", deadline_secs=30)),
        checkpoints=SimpleNamespace(expected_secs=lambda: expected),
        stop=SimpleNamespace(secs_since_signal=lambda: 10.0),
        copies=copies,
        copy=lambda step, state: happened.append("copied"),
        logger=SimpleNamespace(say=happened.append),
    )
    TrainingLoop.copy_if_late(loop, 3, None)
    assert len(happened) == len(said) and all(word in text for word, text in zip(said, happened, strict=True))
