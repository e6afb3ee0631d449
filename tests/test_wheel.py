"""What a built wheel brings outside of the clone: the configs, the texts, a program for each command."""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from parallax.__main__ import commands

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ("parallax", "configs", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: nothing is left in the repository."""
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml needs setuptools 77, of the extra tests")
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True, text=True)
    return folder / built.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder into which pip has installed the wheel, without what it depends on."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, f"--target={folder}", wheel], check=True)
    return folder


def run(installed, folder, name, *arguments):
    """A program of the wheel, run to its end in another folder."""
    command = [installed / "bin" / f"parallax-{name}", *arguments]
    env = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_a_wheel_has_the_package_its_texts_and_the_configs_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {*(ROOT / "parallax").rglob("*.py"), *(ROOT / "configs").glob("*.py")}
    files |= {file for name in ("texts", "templates") for file in (ROOT / "parallax" / "data" / name).iterdir()}
    assert names == {file.relative_to(ROOT).as_posix() for file in files}


def test_each_command_is_a_program(installed):
    (found,) = importlib.metadata.distributions(name="parallax-mesh", path=[str(installed)])
    assert sorted(found.entry_points.names) == sorted(f"parallax-{name}" for name in commands())
    assert {point.value for point in found.entry_points} == {"parallax.__main__:start"}


def test_a_program_of_the_wheel_finds_a_config_by_its_name_in_any_folder(installed, tmp_path):
    """Which is read, with the base that it imports, before its key is refused."""
    ended = run(installed, tmp_path, "train", "--config=quickstart", "--config.train.steps=0")
    assert ended.returncode == 2 and "train.steps=0 is too small" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", commands())
def test_every_program_of_the_wheel_starts(name, installed, tmp_path):
    ended = run(installed, tmp_path, name, "--help")
    assert ended.returncode == 0 and "usage: " in ended.stdout
