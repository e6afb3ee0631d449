"""Which settings of JAX all processes of a job share, and which are of one process."""

from types import SimpleNamespace

import jax
import pytest

from parallax.processes.jax_settings import common_settings


def difference(monkeypatch, own, config):
    """Names and values in which another process differs that has these variables and settings."""
    ours = common_settings({})
    monkeypatch.setattr(jax, "config", SimpleNamespace(values=jax.config.values | config))
    theirs = common_settings(own)
    return {name: theirs[name] for name in theirs if name not in ours or ours[name] != theirs[name]}


@pytest.mark.parametrize(
    ("own", "config", "differs"),
    [
        ({"LIBTPU_INIT_ARGS": "--a=1 --b=2"}, {}, {"LIBTPU_INIT_ARGS --a": "1", "LIBTPU_INIT_ARGS --b": "2"}),
        ({"XLA_FLAGS": "--xla_a=1\n --xla_b --xla_a=2"}, {}, {"XLA_FLAGS --xla_a": "2", "XLA_FLAGS --xla_b": ""}),
        ({"JAX_FORCE_TPU_INIT": "1"}, {}, {"JAX_FORCE_TPU_INIT": "1"}),
        ({}, {"jax_threefry_partitionable": "other"}, {"jax_threefry_partitionable": "other"}),
        # What it has is a setting: that counts, however it is written.
        ({"JAX_ENABLE_X64": "false"}, {}, {}),
        # A process's own: devices, addresses, folders, and what is told about it.
        ({"XLA_FLAGS": "--xla_dump_to=/tmp/mine --xla_force_host_platform_device_count=3"}, {}, {}),
        ({"JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "host0:1", "JAX_LOCAL_DEVICE_IDS": "3"}, {}, {}),
        ({"SLURM_PROCID": "1", "CUDA_VISIBLE_DEVICES": "3"}, {"jax_cuda_visible_devices": "3"}, {}),
        ({}, {"jax_num_cpu_devices": 3, "jax_compilation_cache_dir": "/x", "jax_log_compiles": True}, {}),
    ],
    ids=str,
)
def test_a_setting_that_programs_depend_on_is_shared(monkeypatch, own, config, differs):
    assert difference(monkeypatch, own, config) == differs


def test_flags_in_a_file_are_those_that_it_holds(tmp_path):
    """XLA reads text that does not begin with a dash as the name of a file."""
    (tmp_path / "flags").write_text("--xla_a=1\n--xla_b=2\n")
    assert common_settings({"XLA_FLAGS": str(tmp_path / "flags")}) == common_settings(
        {"XLA_FLAGS": "--xla_b=2 --xla_a=1"}
    )
    assert f"XLA_FLAGS {tmp_path / 'none'}" in common_settings({"XLA_FLAGS": str(tmp_path / "none")})


def test_every_setting_is_one_of_json():
    kinds = {type(value) for value in common_settings().values()}
    assert kinds <= {bool, int, float, str, type(None)} and "jax_default_prng_impl" in common_settings()
