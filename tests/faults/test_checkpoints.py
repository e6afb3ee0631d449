"""What happens to the files of a checkpoint: found, named, and never loaded; the step before is used."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from support.checkpoint_examples import abstract, flip, largest_file, make_parts, mesh_of, rewrite, save_steps, truncate
from support.stand_ins import forbid_code, full_disk, on_write

import parallax
from parallax.checkpoint.restore import restore, restore_newest
from parallax.checkpoint.save import CheckpointWriter, check_space
from parallax.checkpoint.steps import (
    ORBAX_NOTES,
    DamagedError,
    check_steps,
    latest_step,
    read_manifest,
    remove_step,
    size_and_checksum,
    tidy,
)
from parallax.config.sections import CheckpointConfig
from parallax.errors import CheckpointError
from parallax.interop.export import CARRIED, open_step

CONFIG = CheckpointConfig(every_steps=1, keep_last=2, keep_best=0)


@pytest.fixture
def saved(tmp_path):
    """A folder with steps 1 and 2, and what they hold."""
    return tmp_path, save_steps(tmp_path, {1: 3.0, 2: 2.0}, mesh=(1, 2, 2))


def damage(folder, how, part="params"):
    """Do to a step what `how` says."""
    data, manifest = largest_file(folder / part / "d"), folder / "manifest.json"
    acts = {
        "missing": data.unlink,
        "truncated": lambda: truncate(data),
        "empty": lambda: data.write_bytes(b""),
        "flipped": lambda: flip(data),
        "manifest cut": lambda: truncate(manifest),
        "manifest flipped": lambda: flip(manifest),
        "manifest empty": lambda: manifest.write_bytes(b""),
        "manifest nested": lambda: manifest.write_text("[" * 100_000),
        "linked": lambda: (data.rename(folder.parent / "elsewhere"), data.symlink_to(folder.parent / "elsewhere")),
    }
    acts[how]()


NAMES = r"; params blocks.mlp, params embedding are not what was saved"
DAMAGES = {
    "missing": r"its file params/d/\w+ is missing; params .* not what was saved",
    "truncated": r"its file params/d/\w+ has \d+ bytes instead of \d+; params .* not what was saved",
    "empty": r"its file params/d/\w+ has 0 bytes instead of \d+" + NAMES,
    "flipped": r"its file params/d/\w+ does not match its checksum; params .* not what was saved",
    "manifest cut": r"its manifest.json cannot be read",
    "manifest flipped": r"its manifest.json (cannot be read|does not match its own checksum)",
    "manifest empty": r"its manifest.json cannot be read",
    "manifest nested": r"its manifest.json cannot be read",
    "linked": r"its file params/d/\w+ is a link, or in a folder that is one",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_named_and_the_step_before_is_used(saved, how):
    folder, parts = saved
    damage(folder / "2", how)
    with pytest.raises(DamagedError, match=rf"the checkpoint of step 2 in .* is damaged: {DAMAGES[how]}"):
        restore(folder, 2, abstract(parts))
    loaded = restore_newest(folder, abstract(parts))
    assert loaded.step == 1 and [error.step for error in loaded.damaged] == [2]
    for got, want in zip(jax.tree.leaves(loaded.trees), jax.tree.leaves(parts), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_damage_to_the_optimizers_states_does_not_keep_parameters_from_loading(saved, how):
    folder, parts = saved
    damage(folder / "2", how, part="rest")
    with pytest.raises(DamagedError, match=r"its file rest/d/\w+ "):
        restore(folder, 2, abstract(parts))
    wanted = {"params": abstract(parts)["params"]}
    assert restore_newest(folder, wanted).step == 2


EVERY_STEP = r"every checkpoint in .* is damaged: step 2: .*; step 1: .*; restore one of them from a copy"


def test_where_every_step_is_damaged_none_is_loaded(saved):
    folder, parts = saved
    damage(folder / "1", "flipped")
    damage(folder / "2", "missing")
    with pytest.raises(CheckpointError, match=EVERY_STEP):
        restore_newest(folder, abstract(parts))
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_where_sizes_show_that_every_step_is_damaged_none_is_the_newest(saved):
    folder, _ = saved
    damage(folder / "1", "truncated")
    damage(folder / "2", "missing")
    with pytest.raises(CheckpointError, match=EVERY_STEP):
        latest_step(folder)


def test_a_flipped_bit_is_found_in_every_file_and_names_the_arrays_that_it_hits(saved):
    folder, parts = saved
    rng = np.random.default_rng(0)
    # Of a folder that a save has ended, the manifest is the only file that it does not list.
    there = [path for path in sorted((folder / "2").rglob("*")) if path.is_file()]
    listed = {folder / "2" / name for name in read_manifest(folder, 2)["files"]}
    assert {*there} - listed == {folder / "2" / "manifest.json"}
    named = []
    for path in [p for p in there if p.stat().st_size]:
        good = path.read_bytes()
        flip(path, rng.integers(len(good)), 1 << rng.integers(8))
        with pytest.raises(DamagedError, match="does not match its (own )?checksum|cannot be read") as error:
            restore(folder, 2, abstract(parts))
        named.append(str(error.value))
        path.write_bytes(good)
    assert restore(folder, 2, abstract(parts))
    assert len(named) > 10 and any("params embedding" in text or "params blocks.mlp" in text for text in named)


def link_out(path):
    """To a pipe outside of the step, which whoever follows the link would wait for."""
    outside = path.parents[len(path.parts) - path.parts.index("run") - 1] / "outside"
    os.mkfifo(outside)
    path.symlink_to(outside)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put", [os.mkfifo, link_out], ids=["pipe", "link"])
@pytest.mark.parametrize("name", ["d", "manifest.ocdbt", "_METADATA", "_sharding", "array_metadatas/process_7"])
def test_a_pipe_or_a_link_in_a_part_is_damage_and_is_not_read(tmp_path, name, put):
    """In place of a file, or one that the manifest does not list, as somebody would send it."""
    folder = tmp_path / "run" / "checkpoints"
    parts, step = save_steps(folder, {1: 3.0, 2: 2.0}, mesh=(1, 2, 2)), folder / "2"
    path = largest_file(step / "params" / "d") if name == "d" else step / "params" / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)  # Orbax's notes of chunks are in steps of earlier versions
    put(path)
    what = "is no plain file" if put is os.mkfifo else "is a link, or in a folder that is one"
    for _ in ("listed", "not listed"):
        with pytest.raises(
            DamagedError, match=rf"damaged: its file params/\S*{path.name} {what}; its arrays are not read"
        ):
            restore(folder, 2, abstract(parts))
        rewrite(folder, 2, lambda m: m["files"].pop(path.relative_to(step).as_posix(), None))
    assert restore_newest(folder, abstract(parts)).step == 1
    rewrite(folder, 2, lambda m: m["files"].update({name: {"bytes": 0, "crc32": 0} for name in CARRIED}))
    for name in CARRIED:
        (step / name).touch()
    with pytest.raises(DamagedError, match=f"its file params/.* {what}"):
        open_step(tmp_path / "run", 2)


def test_a_link_to_a_step_is_no_step_for_whoever_names_it(saved):
    folder, parts = saved
    (folder / "2").rename(folder / "elsewhere")
    (folder / "2").symlink_to(folder / "elsewhere")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint of step 2 in .*; steps there: 1"):
        restore(folder, 2, abstract(parts))


def test_notes_of_orbax_that_a_kill_has_left_are_not_read(saved):
    folder, parts = saved
    for name in ORBAX_NOTES:
        os.mkfifo(folder / "2" / name)
    assert restore_newest(folder, abstract(parts)).step == 2
    save_steps(folder, {3: 1.0}, mesh=(1, 2, 2))
    assert latest_step(folder) == 3


def test_a_flipped_bit_of_one_array_names_that_array_alone(tmp_path):
    rng = np.random.default_rng(0)
    parts = {"params": {name: jax.numpy.asarray(rng.normal(size=(64, 64)), np.float32) for name in ("one", "two")}}
    with CheckpointWriter(tmp_path, CONFIG, settings={}) as checkpoints:
        checkpoints.save(1, parts)
    hit = set()
    for path in [p for p in (tmp_path / "1").rglob("*") if p.is_file() and p.stat().st_size > 2 * 64 * 64]:
        for place in range(2000, path.stat().st_size - 2000, 4000):
            flip(path, place)
            with pytest.raises(DamagedError) as error:
                restore(tmp_path, 1, abstract(parts))
            hit |= set(re.findall(r"; (.*) not what was saved", str(error.value)))
            flip(path, place)
    assert {"params one is", "params two is"} <= hit


def test_other_numbers_under_right_checksums_are_found_by_their_fingerprint(saved):
    """As memory that failed while they were saved would leave them."""
    folder, parts = saved

    def change(manifest):
        manifest["arrays"]["params"]["embedding"]["fingerprint"] ^= 1 << 7

    rewrite(folder, 2, change)
    with pytest.raises(DamagedError, match="damaged: params embedding is not what was saved"):
        restore(folder, 2, abstract(parts))
    assert restore_newest(folder, abstract(parts)).step == 1


def add_file(name, **sums):
    """A manifest's change: one more file."""
    return lambda manifest: manifest["files"].update({name: {"bytes": 1, "crc32": 0} | sums})


HOSTILE = {
    "a path up": (add_file("../1/manifest.json"), "outside of its folder"),
    "an absolute path": (add_file("/etc/passwd"), "outside of its folder"),
    "a hidden way up": (add_file("d/../../x"), "outside of its folder"),
    "a NUL": (add_file("d/x\0y"), "outside of its folder"),
    "a section that is a number": (lambda m: m["settings"].update(model=5), "settings without sections"),
    "a huge size": (add_file("x", bytes=10**40), "a size that no file has"),
    "a negative size": (add_file("x", bytes=-1), "a size that no file has"),
    "a size as text": (add_file("x", bytes="9"), "a size that no file has"),
    "no checksum": (add_file("x", crc32=None), "gives file 'x' a size that no file has, or no checksum"),
    "a shape beyond all": (
        lambda m: m["arrays"]["params"]["embedding"].update(shape=[10**30, 2]), "describes an impossible array"),
    "a negative shape": (
        lambda m: m["arrays"]["params"]["embedding"].update(shape=[-4]), "describes an impossible array"),
    "a part elsewhere": (lambda m: m["arrays"].update({"../1/params": {}}), "has an unknown part"),
    "no arrays": (lambda m: m.pop("arrays"), "has no arrays"),
    "another step": (lambda m: m.update(step=1), "is that of step 1"),
}  # fmt: skip


@pytest.mark.parametrize("trick", HOSTILE)
def test_a_manifest_that_we_would_not_write_is_not_believed(saved, trick):
    folder, parts = saved
    change, message = HOSTILE[trick]
    rewrite(folder, 2, change)
    with pytest.raises(DamagedError, match=f"its manifest.json .*{message}"):
        restore(folder, 2, abstract(parts))
    assert latest_step(folder) == 1


def test_an_odd_file_damages_its_step_and_stops_nobody(saved, monkeypatch):
    folder, parts = saved
    circle, sums = folder / "2" / "params" / "_METADATA", {"bytes": 1, "crc32": 0}
    circle.unlink()
    circle.symlink_to(circle)
    assert "its file params/_METADATA " in check_steps(folder).damaged[2].damage
    assert restore_newest(folder, abstract(parts)).step == 1
    rewrite(folder, 2, lambda m: m.update(files={"x" * 300: sums}))
    assert "cannot be read (File name too long)" in check_steps(folder).damaged[2].damage
    rewrite(folder, 2, lambda m: m.pop("loss"))
    assert "its manifest.json has no loss" in check_steps(folder).damaged[2].damage
    with CheckpointWriter(folder, CONFIG, settings={}):
        pass
    stat = pathlib.Path.stat

    def forbidden(path, **how):
        if path == folder / "2" / "manifest.json":
            raise PermissionError(13, "Permission denied")
        return stat(path, **how)

    monkeypatch.setattr(pathlib.Path, "stat", forbidden)
    assert "its manifest.json cannot be read" in check_steps(folder).damaged[2].damage
    assert restore_newest(folder, abstract(parts)).step == 1


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d"])
def test_what_cannot_be_read_is_damage_though_its_checksum_is_right(saved, name):
    folder, parts = saved
    path = folder / "2" / "params" / name
    path = largest_file(path) if name == "d" else path
    path.write_bytes(b"not what was saved")
    rewrite(
        folder, 2, lambda m: m["files"].update({path.relative_to(folder / "2").as_posix(): size_and_checksum(path)})
    )
    with pytest.raises(DamagedError, match="step 2 in .* is damaged: it cannot be read: "):
        restore(folder, 2, abstract(parts))
    assert restore_newest(folder, abstract(parts)).step == 1


def test_an_array_of_an_absurd_shape_is_refused_before_memory_is_asked_for(saved):
    folder, parts = saved
    rewrite(folder, 2, lambda m: m["arrays"]["params"]["embedding"].update(shape=[1 << 40, 1 << 20]))
    with pytest.raises(
        CheckpointError, match=r"of another model: params embedding is float32\[1099511627776, 1048576\]"
    ):
        restore(folder, 2, abstract(parts))


def test_a_manifest_of_absurd_length_is_not_read(saved):
    folder, _ = saved
    os.truncate(folder / "2" / "manifest.json", 1 << 40)
    with pytest.raises(DamagedError, match=r"its manifest.json cannot be read \(it has more than \d+ bytes\)"):
        read_manifest(folder, 2)


def test_a_checkpoint_of_another_format_is_refused_and_not_passed_over(saved):
    folder, parts = saved
    (folder / "2" / "manifest.json").write_text(json.dumps({"format": 99}))
    for look in (lambda: latest_step(folder), lambda: restore_newest(folder, abstract(parts))):
        with pytest.raises(CheckpointError, match="has format 99, but this version of parallax reads 2"):
            look()


def test_folders_that_are_no_checkpoints_do_not_count(tmp_path):
    parts = save_steps(tmp_path, {3: 2.0}, mesh=(1, 1, 1))
    (tmp_path / "7").mkdir()
    (tmp_path / "9.orbax-checkpoint-tmp-1").mkdir()
    (tmp_path / "9.orbax-checkpoint-tmp-1" / "half").write_bytes(b"x" * 3000)
    (tmp_path / "probe-0a").touch()
    for name in ("notes", "007", "-4", "٣", "1e3", "9" * 30):
        (tmp_path / name).mkdir()
    (tmp_path / "8").symlink_to(tmp_path / "3")
    (tmp_path / "5").write_text("a file")
    assert latest_step(tmp_path) == 3
    said = "\n".join(tidy(tmp_path))
    assert "removed an unfinished save of step 9, 2.9 KiB" in said
    assert [int(n) for n in re.findall(r"never finished: .*/unfinished-(\d+)", said)] == [5, 7, 8]
    assert not list(tmp_path.glob("*tmp*")) and not list(tmp_path.glob("probe*")) and tidy(tmp_path) == []
    # What was set aside does not stand in the way, and nothing that a link leads to was touched.
    save_steps(tmp_path, {7: 1.0, 8: 1.0}, keep_last=5, mesh=(1, 1, 1))
    assert latest_step(tmp_path) == 8 and restore(tmp_path, 3, abstract(parts))


def test_a_step_set_aside_again_keeps_what_was_set_aside_before(tmp_path):
    for content in ("first", "second", "third"):
        (tmp_path / "4").mkdir()
        (tmp_path / "4" / content).touch()
        assert tidy(tmp_path)
    kept = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert kept == ["unfinished-4.2/second", "unfinished-4.3/third", "unfinished-4/first"]


def test_a_kill_while_a_step_is_removed_leaves_no_step(saved, monkeypatch):
    folder, parts = saved

    def killed(path):
        next(path.rglob("*.ocdbt")).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_step(folder, 1)
    monkeypatch.undo()
    assert check_steps(folder) == ([2], {})
    assert tidy(folder) == [f"removed what was left of step 1: {folder / '1'}"] and not (folder / "1").exists()
    assert restore_newest(folder, abstract(parts)).step == 2


def test_a_half_copied_step_is_not_valid(saved):
    folder, _ = saved
    largest_file(folder / "2" / "rest").unlink()
    checked = check_steps(folder)
    assert checked.valid == [1] and "is missing" in checked.damaged[2].damage and latest_step(folder) == 1


def test_a_step_that_was_renamed_is_not_believed(saved):
    folder, _ = saved
    (folder / "2").rename(folder / "20")
    with pytest.raises(DamagedError, match="its manifest.json is that of step 2"):
        read_manifest(folder, 20)
    assert latest_step(folder) == 1


def test_time_stamps_do_not_decide_which_step_is_the_latest(saved):
    folder, _ = saved
    os.utime(folder / "1", (2**32, 2**32))
    os.utime(folder / "2", (0, 0))
    assert latest_step(folder) == 2


def test_an_unwritable_folder_is_named_before_anything_is_saved(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", pathlib.Path("/proc/parallax")):
        with pytest.raises(CheckpointError, match=f"cannot write in {folder} .*; choose another --workdir"):
            CheckpointWriter(folder, CONFIG, settings={})


def test_a_failed_save_is_an_error_at_the_next_check_and_leaves_older_steps(tmp_path, monkeypatch):
    parts = save_steps(tmp_path, {1: 3.0}, mesh=(1, 1, 1))
    on_write(monkeypatch, "manifest.json", full_disk)
    message = r"cannot save step 2 in .*No space left.*older steps are untouched"
    with pytest.raises(CheckpointError, match=message), CheckpointWriter(tmp_path, CONFIG, settings={}) as checkpoints:
        checkpoints.save(2, parts)
        while True:
            checkpoints.check()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert restore(tmp_path, 1, abstract(parts))


def test_a_failed_save_is_said_when_another_error_ends_the_run(tmp_path, monkeypatch):
    said = []
    on_write(monkeypatch, "manifest.json", full_disk)
    with (
        pytest.raises(ZeroDivisionError),
        CheckpointWriter(tmp_path, CONFIG, settings={}, say=said.append) as checkpoints,
    ):
        checkpoints.save(2, make_parts(mesh_of(1, 1, 1)))
        raise ZeroDivisionError
    assert len(said) == 1 and re.match("CheckpointError: cannot save step 2 in .*No space left", said[0])


def test_a_disk_without_room_for_a_checkpoint_is_refused(tmp_path):
    parts = {"params": jax.ShapeDtypeStruct((1 << 30, 1 << 30), np.float32)}
    with pytest.raises(
        CheckpointError, match=r"a checkpoint has 4096.0 PiB, but the disk of .* has .* free; free some space"
    ):
        check_space(tmp_path, parts)


def noise(mbytes):
    """Arrays that do not compress."""
    bits = np.random.default_rng(0).integers(0, 256, (mbytes, 1 << 20), np.uint8)
    return {"params": {"noise": jax.numpy.asarray(bits)}}


def test_a_disk_that_is_full_ends_the_save_and_keeps_the_step_before(small_disk):
    small = noise(1)
    with pytest.raises(CheckpointError, match="cannot save step 2 in .*older steps are untouched"):
        with CheckpointWriter(small_disk, CONFIG, settings={}) as checkpoints:
            checkpoints.save(1, small)
            checkpoints.save(2, noise(4))
    assert sorted(path.name for path in small_disk.iterdir()) == ["1"]
    assert restore_newest(small_disk, abstract(small)).step == 1
    # The failed save gave its room back.
    with CheckpointWriter(small_disk, CONFIG, settings={}) as checkpoints:
        checkpoints.save(3, small)
    assert latest_step(small_disk) == 3


def test_a_read_only_disk_is_named(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(
        CheckpointError, match=r"cannot write in .* \(Read-only file system\); choose another --workdir"
    ):
        CheckpointWriter(small_disk, CONFIG, settings={})


LIMITED = """
import resource, signal, sys, pathlib
sys.path.insert(0, "tests")
import conftest, numpy, jax
jax.config.update("jax_enable_compilation_cache", False)  # the limit is for its files, too, and others write them
from parallax.config.sections import CheckpointConfig
from parallax.checkpoint.save import CheckpointWriter
from parallax.errors import exit_status
folder = pathlib.Path(sys.argv[1])
def act():
    bits = numpy.random.default_rng(0).integers(0, 256, (4, 1 << 20), numpy.uint8)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    config = CheckpointConfig(every_steps=1, keep_last=2, keep_best=0)
    with CheckpointWriter(folder, config, settings={}) as checkpoints:
        noise = {f"noise {number}": jax.numpy.asarray(bits) for number in range(8)}
        checkpoints.save(2, {"params": noise, "rest": noise})
sys.exit(exit_status(act))
"""


@pytest.mark.slow
def test_a_quota_ends_a_run_with_one_line_and_status_3(tmp_path):
    root = pathlib.Path(parallax.__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], cwd=root, capture_output=True, text=True)
    assert ended.returncode == 3 and ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("CheckpointError: cannot save step 2 in")
    assert latest_step(tmp_path) is None and not list(tmp_path.iterdir())


def test_loading_runs_no_code_of_a_checkpoint(saved, monkeypatch):
    folder, parts = saved
    forbid_code(monkeypatch)
    assert restore(folder, 2, abstract(parts))


def test_no_file_of_the_package_imports_pickle():
    pattern = re.compile(
        r"^\s*(import|from)\s+(pickle|cloudpickle|dill|joblib|shelve|marshal)\b|allow_pickle\s*=\s*True", re.M
    )
    files = list(pathlib.Path(parallax.__file__).parent.rglob("*.py"))
    assert [path for path in files if pattern.search(path.read_text())] == [] and len(files) > 100
