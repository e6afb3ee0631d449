"""A checkpoint is complete or not there, loads onto any mesh bit for bit, and damage never passes."""

import errno
import functools
import logging
import os
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.checkpoint_examples import SETTINGS, abstract, make_parts, mesh_of, save_steps
from support.stand_ins import COMPILED

from parallax.checkpoint import arrays
from parallax.checkpoint.fingerprint import RunningFingerprint, fingerprint, fingerprints
from parallax.checkpoint.restore import restore
from parallax.checkpoint.save import CheckpointWriter, is_no_error_of_orbax, say_errors_once
from parallax.checkpoint.steps import latest_step, read_manifest, set_aside
from parallax.config.sections import CheckpointConfig
from parallax.config.settings import compare_settings
from parallax.errors import CheckpointError, ConfigError


def steps_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8), (8, 1, 1), (1, 2, 2)], ids=str)
def test_a_checkpoint_loads_bit_for_bit_onto_any_mesh(tmp_path_factory, sizes):
    folder = tmp_path_factory.getbasetemp() / "any_mesh"
    if not folder.exists():
        save_steps(folder, {1: 2.0})
    wanted = make_parts(mesh_of(*sizes))
    found = restore(folder, 1, abstract(wanted))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        assert got.sharding == want.sharding and got.dtype == want.dtype
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def sum_fingerprints(monkeypatch, place):
    """Have fingerprints summed by the host or on the devices."""
    is_by_host = place == "by the host"
    monkeypatch.setattr("parallax.checkpoint.fingerprint.is_read_by_host", lambda _: is_by_host)


def replicated(shape):
    """An array that all of four devices have."""
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return jax.device_put(x, NamedSharding(mesh_of(1, 4, 1), P()))


@pytest.mark.parametrize("part_bytes", [16, 1 << 20], ids=["in parts", "by one device"])
def test_replicated_arrays_load_bit_for_bit(tmp_path, monkeypatch, part_bytes):
    monkeypatch.setattr("parallax.checkpoint.save.PART_BYTES", part_bytes)
    parts = {"params": {"x": replicated((8, 4)), "scalar": replicated(())}}
    with CheckpointWriter(tmp_path, CheckpointConfig(every_steps=1), settings=SETTINGS) as checkpoints:
        checkpoints.save(1, parts)
    loaded = restore(tmp_path, 1, abstract(parts))["params"]
    for name, x in parts["params"].items():
        assert np.asarray(loaded[name]).tobytes() == np.asarray(x).tobytes()


@pytest.mark.parametrize("place, programs", [("by the host", 0), ("on the devices", 1)])
def test_small_replicated_arrays_are_not_cut_by_programs_of_their_own(tmp_path, monkeypatch, place, programs):
    """The fingerprints are one program at most, whatever the number of arrays."""
    sum_fingerprints(monkeypatch, place)
    params = {f"x{size}": replicated((size, 4)) for size in (4, 8, 12)}
    before = len(COMPILED)
    with CheckpointWriter(tmp_path, CheckpointConfig(every_steps=1), settings=SETTINGS) as checkpoints:
        checkpoints.save(1, {"params": params})
    assert len(COMPILED[before:]) == programs


def test_parameters_load_without_the_rest(tmp_path):
    parts = save_steps(tmp_path, {1: 2.0})
    found = restore(tmp_path, 1, {"params": abstract(parts["params"])})
    assert set(found) == {"params"}
    np.testing.assert_array_equal(found["params"]["embedding"], parts["params"]["embedding"])


def test_the_last_and_the_best_steps_are_kept(tmp_path):
    save_steps(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 2.5})
    assert steps_in(tmp_path) == [2, 4, 5]


def test_the_best_step_is_still_known_after_a_restart(tmp_path):
    save_steps(tmp_path, {1: 3.0, 2: 1.0})
    save_steps(tmp_path, {3: 2.0, 4: 2.5, 5: 2.2})
    assert steps_in(tmp_path) == [2, 4, 5]


def test_one_of_every_so_many_steps_is_kept_for_good(tmp_path):
    """The first at or after each multiple of 3, also after a restart; what is set aside stays, and another takes its
    place."""
    keep = dict(keep_last=1, keep_best=0, keep_every_steps=3, mesh=(1, 1, 1))
    save_steps(tmp_path, {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, **keep)
    assert steps_in(tmp_path) == [3, 4]
    save_steps(tmp_path, {5: 1.0, 7: 1.0, 8: 1.0, 9: 1.0}, **keep)  # 6 was not saved
    assert steps_in(tmp_path) == [3, 7, 9]
    (tmp_path / "3" / "manifest.json").write_text("{}")
    aside = set_aside(tmp_path, 7, "damaged")
    save_steps(tmp_path, {10: 1.0, 11: 1.0}, **keep)
    assert steps_in(tmp_path) == [3, 9, 11] and aside.exists()  # a run's next start sets 3 aside
    save_steps(tmp_path, {12: 1.0}, **keep | {"keep_every_steps": 0})
    assert steps_in(tmp_path) == [3, 12]


def test_saving_a_step_twice_changes_nothing(tmp_path):
    save_steps(tmp_path, {3: 2.0})
    before = (tmp_path / "3" / "manifest.json").stat().st_mtime_ns
    save_steps(tmp_path, {3: 2.0})
    assert (tmp_path / "3" / "manifest.json").stat().st_mtime_ns == before


def test_a_run_that_goes_on_and_is_stopped_before_its_next_save_is_saved(tmp_path, monkeypatch):
    save_steps(tmp_path, {1: 2.0})
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: True)
    save_steps(tmp_path, {2: 1.0})
    assert latest_step(tmp_path) == 2


@pytest.mark.parametrize("ending", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_save_in_flight_survives_every_way_to_end(tmp_path, ending):
    config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    with pytest.raises(ending), CheckpointWriter(tmp_path, config, settings=SETTINGS) as checkpoints:
        checkpoints.save(5, make_parts(mesh_of(1, 2, 1)))
        raise ending
    assert latest_step(tmp_path) == 5


def test_an_empty_or_missing_folder_has_no_latest_step(tmp_path):
    assert latest_step(tmp_path) is None and latest_step(tmp_path / "absent") is None


def test_a_checkpoint_of_another_model_names_arrays_and_settings(tmp_path):
    save_steps(tmp_path, {1: 3.0})
    wanted = abstract(make_parts(mesh_of(1, 2, 1), d_model=32))
    with pytest.raises(CheckpointError) as error:
        restore(tmp_path, 1, wanted, settings={"model": {"d_model": 32, "layers": 4}})
    assert "is of another model: params blocks.mlp is float32[8, 16, 8] there and float32[8, 32, 8] here" in str(
        error.value
    )
    assert str(error.value).endswith("; model.d_model=16 there, 32 here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: {**p, "extra": p["embedding"]},
            r"params extra is absent there and float32\[32, 16\] here",
        ),
        (
            lambda p: {"embedding": p["embedding"]},
            r"params blocks.mlp is float32\[8, 16, 8\] there and absent here",
        ),
        (lambda p: jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), r"float32.* there and bfloat16.* here"),
    ],
)
def test_added_removed_and_retyped_arrays_are_refused(tmp_path, change, message):
    parts = save_steps(tmp_path, {1: 3.0}, mesh=(1, 1, 1))
    with pytest.raises(CheckpointError, match=message):
        restore(tmp_path, 1, {"params": abstract(change(parts["params"]))})


def test_a_missing_step_is_an_error_that_lists_those_that_are_there(tmp_path):
    parts = save_steps(tmp_path, {1: 3.0, 2: 2.0})
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9 in .*; steps there: 1, 2"):
        restore(tmp_path, 9, abstract(parts))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"every_steps": -1}, "checkpoint.every_steps=-1 is too small; use 0 or more"),
        ({"keep_last": 0}, "checkpoint.keep_last=0 is too small; use 1 or more"),
        ({"keep_best": -1}, "checkpoint.keep_best=-1 is too small; use 0 or more"),
    ],
)
def test_wrong_settings_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig(**{"every_steps": 1, "keep_last": 1, "keep_best": 0, **fields})


def test_settings_are_compared_by_key():
    stored = {"model": {"layers": 4, "eps": 1e-6}, "mesh": {"dp": 2}}
    wanted = {"model": {"layers": 4, "eps": 1e-5}, "mesh": {"dp": 2, "tp": 1}}
    assert compare_settings(stored, wanted) == {"mesh.tp": (None, 1), "model.eps": (1e-6, 1e-5)}


def mixed(at):
    """MurmurHash3's finaliser, made odd: the factor of the element at a place."""
    at ^= at >> 16
    at = at * 0x85EBCA6B % 2**32
    at ^= at >> 13
    at = at * 0xC2B2AE35 % 2**32
    return (at ^ at >> 16) | 1


DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fingerprint_is_what_its_definition_says(dtype):
    x = np.random.default_rng(0).normal(0, 20, (3, 5)).astype(jnp.dtype(dtype))
    words = [int.from_bytes(element.tobytes(), "little") for element in x.reshape(-1)]
    expected = sum(word * mixed(at) for at, word in enumerate(words)) % 2**32
    running = RunningFingerprint()
    running.add(x[:2])
    running.add(x[2:])
    assert int(fingerprint(jnp.asarray(x))) == running.value == expected


@pytest.mark.parametrize("place", ["by the host", "on the devices"])
def test_a_fingerprint_does_not_depend_on_the_cut_and_sees_every_bit(monkeypatch, place):
    sum_fingerprints(monkeypatch, place)
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    cuts = [((1, 1, 1), P()), ((2, 2, 2), P("pp", ("dp", "tp"))), ((1, 8, 1), P("dp")), ((8, 1, 1), P(None, "pp"))]
    whole = set()
    for sizes, spec in cuts:
        whole |= set(fingerprints({"x": jax.device_put(x, NamedSharding(mesh_of(*sizes), spec))}).values())
    assert len(whole) == 1
    bits = x.view(np.uint32)
    for at in range(x.size):
        changed = bits.copy()
        changed.reshape(-1)[at] ^= np.uint32(1 << at % 32)
        assert {int(fingerprint(changed.view(np.float32)))} != whole
    assert {int(fingerprint(x))} == whole


def test_a_manifest_says_the_same_of_the_same_arrays_on_every_mesh(tmp_path):
    for name, mesh in (("one", (1, 1, 1)), ("eight", (2, 2, 2))):
        save_steps(tmp_path / name, {1: 2.0}, mesh=mesh)
    one, eight = (read_manifest(tmp_path / name, 1)["arrays"] for name in ("one", "eight"))
    assert one == eight and one["params"]["embedding"]["fingerprint"] > 0


def test_a_step_carries_what_it_is_given(tmp_path):
    def carry(at):
        (at / "tokenizer.json").write_text("{}")

    config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    with CheckpointWriter(tmp_path, config, settings=SETTINGS, carry=carry) as checkpoints:
        checkpoints.save(5, make_parts(mesh_of(1, 1, 1)))
    assert (tmp_path / "5" / "tokenizer.json").read_text() == "{}"
    assert read_manifest(tmp_path, 5)["files"]["tokenizer.json"]["bytes"] == 2


def test_steps_are_removed_while_the_run_goes_on(tmp_path):
    parts, config = make_parts(mesh_of(1, 1, 1)), CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    with CheckpointWriter(tmp_path, config, settings=SETTINGS) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, parts)
        while steps_in(tmp_path) != [2]:
            checkpoints.check()


def test_a_full_disk_is_freed_before_a_step_is_said_to_be_on_it(tmp_path):
    """Then there is room for what is said."""
    there = []

    def on_disk(step, secs):
        there.append(steps_in(tmp_path))
        raise OSError(errno.ENOSPC, "No space left on device")

    config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    for step in (1, 2):
        with (
            pytest.raises(OSError, match="No space left"),
            CheckpointWriter(tmp_path, config, settings=SETTINGS, on_disk=on_disk) as checkpoints,
        ):
            checkpoints.save(step, make_parts(mesh_of(1, 1, 1)))
            checkpoints.wait()
    assert there == [[1], [2]]


def test_names_and_what_a_step_carries_are_flushed(tmp_path, monkeypatch):
    """By the time that a save is done; the folder of the step has its last name then."""
    flushed, fsync = set(), os.fsync

    def noting(opened):
        about = os.fstat(opened)
        flushed.add((about.st_dev, about.st_ino))
        fsync(opened)

    monkeypatch.setattr(os, "fsync", noting)
    config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)

    def carry(folder):
        (folder / "tokenizer.json").write_text("{}")

    with CheckpointWriter(tmp_path, config, settings={}, carry=carry) as checkpoints:
        checkpoints.save(1, {"params": {"x": jax.numpy.ones(3)}})
    step = tmp_path / "1"
    wanted = [tmp_path, step, step / "manifest.json", step / "tokenizer.json", step / "params", step / "params" / "d"]
    assert all((path.stat().st_dev, path.stat().st_ino) in flushed for path in wanted)


def test_what_others_hang_above_our_hook_is_not_called_without_end(monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    say_errors_once.cache_clear()
    say_errors_once()
    ours = sys.unraisablehook
    monkeypatch.setattr(sys, "unraisablehook", lambda about: ours(about))
    say_errors_once()
    sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError("Event loop is closed")))
    assert not heard
    sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError("another")))
    assert len(heard) == 1


@pytest.mark.parametrize(("level", "passes"), [(logging.WARNING, True), (logging.ERROR, False)])
def test_of_what_orbax_logs_errors_alone_are_left_out(level, passes):
    record = logging.LogRecord("absl", level, "/x/orbax/checkpoint/handler.py", 1, "text", (), None)
    assert is_no_error_of_orbax(record) == passes


class ArrayUnderWay:
    """An array whose reads are under way until their results are taken."""

    def __init__(self, array, under_way, most):
        self._array, self._under_way, self._most = array, under_way, most

    def __getitem__(self, index):
        shard = self._array[index].read().result()

        def result():
            self._under_way.remove(shard.nbytes)
            return shard

        self._under_way.append(shard.nbytes)
        self._most.append(sum(self._under_way))
        return SimpleNamespace(read=lambda: SimpleNamespace(result=result))


@pytest.mark.parametrize("limit_bytes", [1, 4096])
def test_a_restore_has_no_more_under_way_than_its_limit(tmp_path, monkeypatch, limit_bytes):
    parts = save_steps(tmp_path, {1: None})
    under_way, most, open_together = [], [], arrays.open_together

    def opened(*about):
        arrays_there = {name: opening.result() for name, opening in open_together(*about).items()}
        watched = {name: ArrayUnderWay(array, under_way, most) for name, array in arrays_there.items()}
        return {name: SimpleNamespace(result=functools.partial(watched.get, name)) for name in watched}

    monkeypatch.setattr(arrays, "open_together", opened)
    monkeypatch.setattr(arrays, "READ_AHEAD_BYTES", limit_bytes)
    loaded = restore(tmp_path, 1, abstract(parts))
    jax.tree.map(np.testing.assert_array_equal, loaded, parts)
    largest = max(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(parts))
    assert not under_way and largest <= max(most) <= max(limit_bytes, largest)
    assert (max(most) > largest) == (limit_bytes > largest)


def test_a_fingerprint_does_not_depend_on_the_programs_that_it_takes(monkeypatch):
    numbers = {f"x{count}": jnp.arange(count * 7.0) for count in range(1, 5)}
    by_host = fingerprints(numbers)
    sum_fingerprints(monkeypatch, "on the devices")
    together = fingerprints(numbers)
    assert together == by_host
    monkeypatch.setattr("parallax.checkpoint.fingerprint.PROGRAM_BYTES", 1)
    assert fingerprints(numbers) == together
