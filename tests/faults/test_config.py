"""Any value of any number in a config is a ConfigError or a run, and which of them is known before it compiles."""

import dataclasses
import math
import pathlib
from typing import get_type_hints

import jax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.run_examples import tiny_config

from configs.base import get_config
from parallax.analysis.planned.devices import check_fits
from parallax.cli import train as command_line
from parallax.cli.command import read_line
from parallax.config.sections import SECTIONS
from parallax.config.settings import load_settings, read_settings
from parallax.data.tokenizer import load_tokenizer
from parallax.errors import ConfigError, ParallaxError
from parallax.hardware.devices import device_memory
from parallax.step.optimizer import learning_rate
from parallax.training import run as run_module
from parallax.training.run import train
from parallax.training.step_reports import learning_rates

NUMBERS = [
    (section, field.name)
    for section, kind in SECTIONS.items()
    for field in dataclasses.fields(kind)
    if get_type_hints(kind)[field.name] in (int, float)
]
USUAL = [0, -1, 1, 2, -0.5, 1.5, math.nan, math.inf, -math.inf, 1e300, -1e300, 3e38, 1e-300, 5e-324, 0.9999999999]
USUAL += [10**30, -(10**30), *(2**bits - less for bits in (10, 14, 20, 24, 31, 32, 63, 64) for less in (0, 1))]
WRONG_TYPES = [True, False, None, "1", "", "nan", [1], (1, 2), {}, b"1", 1j, object()]
ANY = st.sampled_from(USUAL + WRONG_TYPES) | st.integers() | st.floats() | st.text(max_size=3)


def written(section, key, value, config=None):
    """A config as nested dicts, one value of it replaced; ConfigDict itself would refuse some types."""
    config = (config or get_config()).to_dict()
    config[section][key] = value
    return config


def test_there_are_numbers_in_every_section_that_has_any():
    assert len(NUMBERS) > 50 and {section for section, _ in NUMBERS} == set(SECTIONS) - {"data_parallel"}


@pytest.mark.fast(40)
@pytest.mark.parametrize("section, key", NUMBERS, ids=str)
def test_every_number_at_every_corner_is_refused_by_name_or_read(section, key):
    refused = 0
    for value in USUAL + WRONG_TYPES:
        try:
            found = getattr(getattr(read_settings(written(section, key, value)), section), key)
        except ConfigError as error:
            refused += 1
            assert key in str(error) and len(str(error).splitlines()) == 1
        else:
            assert found == type(found)(value) and math.isfinite(found) and not isinstance(value, bool)
    assert refused >= len(WRONG_TYPES) + 3  # NaN and both infinities


@settings(max_examples=300)
@given(st.sampled_from(NUMBERS), ANY, st.sampled_from(NUMBERS), ANY)
def test_any_two_values_are_refused_or_read(first, value, second, other):
    config = written(*first, value)
    config[second[0]][second[1]] = other
    try:
        found = read_settings(config)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert getattr(getattr(found, second[0]), second[1]) in (other, float(other))


@settings(max_examples=100)
@given(st.sampled_from(NUMBERS), st.text(max_size=6) | st.floats().map(str) | st.integers().map(str))
@example(("train", "steps"), "1e400")
@example(("mesh", "tp"), "٣")
@example(("optimizer", "learning_rate"), "1_0")
@example(("data", "seq"), "0x20")
@example(("train", "steps"), "")
def test_any_text_for_a_number_on_the_command_line_is_refused_or_read(number, text):
    argument = f"--config.{'.'.join(number)}={text}"
    try:
        line = read_line(["train.py", "--config=configs/tiny_gqa.py", argument, "--workdir=x"], command_line.FLAGS)
        read_settings(line.config.to_dict())
    except ConfigError as error:
        assert str(error)


class Begun(Exception):
    """All checks are passed: what follows is compiled."""


@pytest.fixture
def begins(monkeypatch):
    """Runs end where they would begin to compile."""

    def begin(*_):
        raise Begun

    monkeypatch.setattr(run_module, "begin", begin)


def began(config, folder):
    """Whether a run would begin; what else it may raise is an error of one line."""
    try:
        train(config, folder)
    except Begun:
        return True
    except ParallaxError as error:
        assert len(str(error).splitlines()) == 1
        return False
    raise AssertionError("it came to an end")


# What one number may do to the rest: tables of schedules and layers, shapes, the mesh, the order of windows, the plan.
TOGETHER = [
    ("model", "layers", 2**24),
    ("model", "d_model", 2**24),
    *(pytest.param("model", key, 2**14, marks=pytest.mark.slow) for key in ("vocab", "layers", "d_model", "d_ff")),
    *(pytest.param("model", key, 2**24, marks=pytest.mark.slow) for key in ("vocab", "d_ff", "d_head")),
    *(("pipeline", key, 2**14) for key in ("microbatches", "virtual")),
    *(("data", key, 2**24) for key in ("seq", "global_batch")),
    ("mesh", "pp", 2**20),
    ("train", "steps", 2**31 - 1),
    ("optimizer", "learning_rate", 3e38),
    ("data", "eval_fraction", 1e-300),
    ("data", "seed", 2**63 - 1),
    ("sample", "top_k", 2**31 - 1),
]


@pytest.mark.parametrize("section, key, value", TOGETHER)
def test_a_number_that_reads_well_is_refused_or_a_run_before_anything_compiles(
    section, key, value, corpus, tmp_path, begins
):
    config = tiny_config(corpus, **{f"{section}.{key}": value})
    fits = (section, key) not in {("model", "d_model"), ("mesh", "pp"), ("data", "seq"), ("data", "global_batch")}
    fits &= section != "pipeline" and (key, value) != ("layers", 2**24)
    if (key, value) in {("d_model", 2**14), ("d_ff", 2**24), ("vocab", 2**24), ("d_head", 2**24), ("layers", 2**14)}:
        began(config, tmp_path)  # that depends on the memory of the machine
    else:
        assert began(config, tmp_path) == fits


@pytest.mark.slow
@pytest.mark.parametrize("section, key", NUMBERS, ids=str)
def test_every_number_at_every_corner_is_refused_or_a_run(section, key, corpus, tmp_path, begins):
    for value in USUAL:
        config = tiny_config(corpus)
        try:
            config[section][key] = value
        except TypeError:  # ConfigDict's own refusal
            continue
        began(config, tmp_path / "run")


def test_a_model_that_no_device_holds_is_refused_with_both_sizes(corpus, tmp_path, begins):
    with pytest.raises(
        ConfigError, match=r"parameters and optimizer need .* on each device, which has .* GiB; use more"
    ):
        train(tiny_config(corpus, **{"model.d_model": 2**20, "model.d_ff": 2**20}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    size = device_memory() // 4
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    check_fits([jax.ShapeDtypeStruct((size,), "float32", sharding=there)])
    with pytest.raises(ConfigError):
        check_fits([jax.ShapeDtypeStruct((size + 1,), "float32", sharding=there)])


def test_the_rate_of_any_update_of_a_run_of_any_length():
    config = read_settings(get_config().to_dict()).optimizer
    schedule, rates = learning_rate(config, 2**31 - 1), learning_rates(config, 2**31 - 1)
    for update in (0, 1, 99, 100, 1023, 1024, 2**30, 2**31 - 2):
        # Fused, a cosine near -1 is another in its last place, and so is the sixth digit of what is left of 1.
        assert rates(update) == pytest.approx(float(schedule(update)), rel=1e-5)


# ---- names and meshes, as commands meet them

NAMES = ["", ".", "..", "../x", "a/b", "/etc/x", "-x", "a b", "a\nb", "~", "$HOME", "é", "a" * 101, "a\u202eb", "con:"]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_run_name_that_is_no_name_is_refused_and_nothing_is_written(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = pathlib.Path(command_line.__file__).parents[2] / "configs" / "tiny_gqa.py"
    status = command_line.main(["train.py", f"--config={config}", f"--run-name={name}"])
    said = capsys.readouterr().err
    reason = "is not a valid name of a run" if name else "--run-name='' is empty; leave it out"
    assert status == 2 and reason in said and len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_launcher_that_sets_a_bad_name_is_refused_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARALLAX_RUN_NAME", "../../x")
    with pytest.raises(ConfigError, match="is not a valid name of a run"):
        command_line.choose_workdir(None, None)


@pytest.mark.parametrize("workdir", ["x" * 300, "file/below", "/proc/none"])
def test_a_workdir_that_cannot_be_made_ends_with_status_3(workdir, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ParallaxError, match=r"cannot write in .*; choose another --workdir") as error:
        train(tiny_config(corpus), workdir)
    assert error.value.exit_status == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"pp": 3},
        {"pp": 16},
        {"dp": 4},
        {"pp": 2, "dp": 2, "tp": 4},
        {"pp": 0},
        {"pp": -2},
        {"pp": -1, "tp": -1},
        {"tp": 7},
    ],
    ids=str,
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused_never_used_in_part(changes, corpus, tmp_path):
    with pytest.raises(ConfigError, match=r"mesh\.(pp|dp|tp)=.*(legal pp·dp·tp for 8|use 1 or more|at most one axis)"):
        train(tiny_config(corpus, **{f"mesh.{axis}": size for axis, size in changes.items()}), tmp_path / "run")


def test_what_a_resumed_run_reads_is_json_and_runs_no_code(tmp_path):
    """A config file is Python, and runs; what a run has saved does not."""
    (tmp_path / "config.json").write_text("__import__('os').mkdir('evil')")
    with pytest.raises(ParallaxError, match="cannot be read"):
        load_settings(tmp_path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("text", ["5", "null", "[]", "{", "[" * 100_000, "\0"], ids=lambda text: text[:4])
def test_what_a_run_has_saved_and_is_no_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ParallaxError, match=r"config\.json cannot be read: "):
        load_settings(tmp_path)
    with pytest.raises(ParallaxError, match=r"tokenizer\.json cannot be read: "):
        load_tokenizer(tmp_path)
