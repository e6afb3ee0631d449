"""What a config leaves open is filled in by one function, from devices, weights and a tokenizer."""

import json

import pytest
from support.run_examples import tiny_config

from configs.base import get_config
from parallax.analysis.planned.topology import read_topology
from parallax.config.settings import read_settings
from parallax.data.tokenizer import Bytes
from parallax.errors import ConfigError
from parallax.step.resolve import Devices, resolve
from parallax.training.build import build
from parallax.training.folder import RunFolder

EIGHT_CPUS = Devices(8, "cpu", "cpu")


def test_nothing_stays_open_on_devices():
    settings = read_settings(get_config())
    assert (settings.mesh.dp, settings.model.kernel, settings.model.vocab) == (-1, "auto", 0)
    found = resolve(settings, EIGHT_CPUS)
    assert found.mesh.sizes == {"pp": 1, "dp": 8, "tp": 1} and found.mesh.simulate == 8
    assert (found.model.kernel, found.model.vocab) == ("xla", 384)
    assert resolve(found, EIGHT_CPUS) == found


def test_devices_here_are_those_of_jax():
    assert Devices.here() == EIGHT_CPUS


def test_what_is_written_is_not_changed():
    written = read_settings(get_config(), mesh={"dp": 2, "tp": 4}, model={"vocab": 1000, "kernel": "xla"})
    assert resolve(written, EIGHT_CPUS, Bytes()) == read_settings(written, mesh={"simulate": 8})


def test_chips_that_are_not_here_are_named_when_the_mesh_does_not_fit_them():
    settings = read_settings(get_config(), mesh={"dp": 3})
    with pytest.raises(ConfigError, match=r"^v5e:2x4 has 8 devices: mesh.pp=1 mesh.dp=3 .*[^)]$"):
        resolve(settings, read_topology("v5e:2x4").as_devices)
    with pytest.raises(ConfigError, match=r"^mesh.pp=1 mesh.dp=3 .*mesh.simulate=3\)$"):
        resolve(settings, EIGHT_CPUS)


def test_a_runs_config_has_the_vocab_and_leaves_open_what_its_next_start_decides(corpus, tmp_path):
    folder = RunFolder(tmp_path / "run")
    settings = read_settings(tiny_config(corpus, **{"model.vocab": 0, "mesh.simulate": 8, "data.tokenizer": "auto"}))
    parts = build(settings, folder)
    assert parts.settings == resolve(settings, tokenizer=parts.train_data.tokenizer, run=folder.path)
    folder.path.mkdir(exist_ok=True)
    folder.write_config(parts.settings)
    saved = json.loads(folder.config.read_text(encoding="utf-8"))
    assert (saved["mesh"]["dp"], saved["model"]["kernel"], saved["data"]["tokenizer"]) == (-1, "auto", "auto")
    assert saved["model"]["vocab"] == parts.model.config.vocab == 384
    assert parts.model.axis_sizes == {"pp": 1, "dp": 8, "tp": 1} and parts.model.config.kernel == "xla"
