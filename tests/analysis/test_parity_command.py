"""Parity as a command: it finds a layer that forgets an axis, and finds nothing where there is nothing."""

import pytest
from support.tiny_model import mesh_of, settings_of

import parallax as px
from parallax.cli import parity as command
from parallax.config.settings import read_settings
from parallax.errors import ConfigError
from parallax.model.norm import RMSNorm


class CentredNorm(RMSNorm):
    """Where d_model is sharded, the mean is of a rank's own entries."""

    def __call__(self, x):
        return super().__call__(x - x.mean(-1, keepdims=True))


def small(**data):
    settings = settings_of(layers=2, attention="gqa", microbatches=1)
    return read_settings(settings, data={"seq": 8, "global_batch": 4, **data})


@pytest.fixture(scope="module")
def compared():
    """Of a right layer and of a wrong one."""
    return [px.parity(small(), mesh_of(1, 2, 2), code=code) for code in ({}, {"model.norm": CentredNorm})]


def test_a_right_layer_is_the_same_and_a_wrong_one_is_named(compared):
    right, wrong = compared
    assert right.is_equal and "pp=1 dp=2 tp=2: the same as on one device" in repr(right)
    assert not wrong.is_equal and "NOT the same as on one device" in repr(wrong)
    assert wrong.gradients["blocks/mlp_norm/scale"] > 1e-3
    assert right.gradients.keys() == wrong.gradients.keys() >= {"embedding/table", "blocks/attention/q/kernel"}


def test_parity_is_of_float32_and_of_a_batch_that_fits():
    with pytest.raises(ConfigError, match="model.dtype='bfloat16' rounds more than a mesh differs"):
        px.parity(read_settings(small(), model={"dtype": "bfloat16"}), mesh_of(1, 2, 2))
    with pytest.raises(ConfigError, match="data.global_batch=3 does not divide over"):
        px.parity(small(global_batch=3), mesh_of(1, 2, 2))


COMMAND = ["parity", "--config=configs/tiny_gqa.py", "--config.mesh.simulate=8"]


@pytest.mark.parametrize("status", [0, 4])
def test_the_status_of_the_command_says_whether_they_are_equal(compared, status, monkeypatch, capsys):
    result = compared[status > 0]
    monkeypatch.setattr(command, "parity", lambda settings: result)
    assert command.main(COMMAND) == status
    assert capsys.readouterr().out == f"{result}\n"


@pytest.mark.parametrize(
    ("norm", "status"), [("rms", 0), pytest.param(f"{__name__}:CentredNorm", 4, marks=pytest.mark.slow)]
)
def test_the_command_compares_what_its_config_says(norm, status, capsys):
    words = [*COMMAND, "--config.mesh.tp=4"]
    words += ["--config.data.seq=8", "--config.data.global_batch=2", f"--config.model.norm={norm}"]
    assert command.main(words) == status
    assert ("NOT the same" in capsys.readouterr().out) is bool(status)
