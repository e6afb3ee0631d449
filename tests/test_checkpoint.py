"""A checkpoint is complete or not there, loads onto any mesh bit for bit, and damage never passes."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.checkpoint import (
    CheckpointConfig,
    Checkpoints,
    compare_settings,
    latest_step,
    restore,
    set_unfinished_aside,
)
from parallax.errors import CheckpointError, ConfigError
from parallax.mesh import MeshConfig, make_mesh

SETTINGS = {"model": {"d_model": 16, "layers": 4}}
SPECS = {"embedding": P("tp", "dp"), "blocks": {"mlp": P("pp", "dp", "tp")}}


def mesh_of(pp, dp, tp):
    return make_mesh(MeshConfig(pp=pp, dp=dp, tp=tp, simulate=0, across_slices="dp"), jax.devices()[: pp * dp * tp])


def make_parts(mesh, d_model=16):
    rng = np.random.default_rng(0)
    shapes = {"embedding": (32, d_model), "blocks": {"mlp": (8, d_model, 8)}}
    params = jax.tree.map(
        lambda shape, spec: jax.device_put(rng.normal(size=shape).astype(np.float32), NamedSharding(mesh, spec)),
        shapes,
        SPECS,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    replicated = NamedSharding(mesh, P())
    state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, replicated), tx.init(params))
    return {"params": params, "rest": {"opt_state": state, "step": jax.device_put(jnp.int32(7), replicated)}}


def abstract(parts):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), parts)


def save_steps(folder, losses, *, keep_last=2, keep_best=1, mesh=(2, 2, 2)):
    parts = make_parts(mesh_of(*mesh))
    config = CheckpointConfig(every_steps=1, keep_last=keep_last, keep_best=keep_best)
    with Checkpoints(folder, config, settings=SETTINGS) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, parts, loss=loss)
    return parts


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


def test_saving_a_step_twice_changes_nothing(tmp_path):
    save_steps(tmp_path, {3: 2.0})
    before = (tmp_path / "3" / "manifest.json").stat().st_mtime_ns
    save_steps(tmp_path, {3: 2.0})
    assert (tmp_path / "3" / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("ending", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_save_in_flight_survives_every_way_to_end(tmp_path, ending):
    config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    with pytest.raises(ending), Checkpoints(tmp_path, config, settings=SETTINGS) as checkpoints:
        checkpoints.save(5, make_parts(mesh_of(1, 2, 1)))
        raise ending
    assert latest_step(tmp_path) == 5


def test_folders_that_are_no_checkpoints_do_not_count(tmp_path):
    save_steps(tmp_path, {3: 2.0})
    (tmp_path / "7").mkdir()
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest_step(tmp_path) == 3
    assert [path.name for path in set_unfinished_aside(tmp_path)] == ["unfinished-7"]
    save_steps(tmp_path, {7: 1.0}, keep_last=5)
    assert latest_step(tmp_path) == 7 and not list(tmp_path.glob("*tmp*"))


def test_an_empty_or_missing_folder_has_no_latest_step(tmp_path):
    assert latest_step(tmp_path) is None and latest_step(tmp_path / "absent") is None


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file() and "/d/" in str(p)), key=lambda p: p.stat().st_size)


def damage(folder, how):
    path = largest_file(folder / "params")
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "manifest":
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text()[:100])
    elif how == "future":
        (folder / "manifest.json").write_text(json.dumps({"format": 99}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "missing",
            r"step 2 in .* is damaged: its file params/.* is missing; remove .*/2 to go on from step 1",
        ),
        ("truncated", r"damaged: its file params/.* has \d+ bytes instead of \d+; remove"),
        ("flipped", r"damaged: its file params/.* does not match its checksum; remove"),
        ("manifest", r"damaged: its manifest.json cannot be read; remove"),
        ("future", r"has format 99, but this version of parallax reads 1"),
    ],
)
def test_damage_is_refused_and_named(tmp_path, how, message):
    parts = save_steps(tmp_path, {1: 3.0, 2: 2.0})
    damage(tmp_path / "2", how)
    with pytest.raises(CheckpointError, match=message):
        restore(tmp_path, latest_step(tmp_path), abstract(parts))
    assert restore(tmp_path, 1, abstract(parts))


def test_every_flipped_bit_is_found(tmp_path):
    parts = save_steps(tmp_path, {1: 3.0})
    rng = np.random.default_rng(0)
    files = [p for p in (tmp_path / "1").rglob("*") if p.is_file() and p.stat().st_size]
    counted = [p for p in files if p.name not in ("_CHECKPOINT_METADATA", "manifest.json", "commit_success.txt")]
    for path in counted:
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match="checksum"):
            restore(tmp_path, 1, abstract(parts))
        path.write_bytes(good)


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


def test_an_unwritable_folder_is_named_before_anything_is_saved(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    config = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    for folder in (tmp_path / "file", tmp_path / "file" / "below", pathlib.Path("/proc/parallax")):
        with pytest.raises(CheckpointError, match=f"cannot write in {folder} .*; choose another --workdir"):
            Checkpoints(folder, config, settings={})


def test_a_failed_save_is_an_error_and_leaves_older_steps(tmp_path, monkeypatch):
    parts = save_steps(tmp_path, {1: 3.0})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("parallax.checkpoint.writer.write_manifest", full)
    with pytest.raises(CheckpointError, match=r"cannot save step 2 in .*No space left.*older steps are untouched"):
        save_steps(tmp_path, {2: 2.0})
    assert latest_step(tmp_path) == 1
    assert restore(tmp_path, 1, abstract(parts))


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
