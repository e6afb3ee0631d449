"""Programs compiled for accelerators are kept for later runs, where nobody else can write."""

import grp
import os
import pathlib
import pwd
import stat
import subprocess
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from support.stand_ins import Chip, ClientStandIn

from configs.base import get_config
from parallax.config.settings import read_settings
from parallax.processes import compile_cache
from parallax.processes.compile_cache import use_compile_cache

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def on(tmp_path, monkeypatch, with_chips):
    """A function that has JAX run on a platform, as far as anybody asks, without a cache yet; it gives the user's."""
    before = jax.config.jax_compilation_cache_dir

    def platform(name):
        jax.config.update("jax_compilation_cache_dir", None)
        if name != "cpu":
            with_chips(Chip(name, "a kind"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
        return tmp_path / "caches" / "parallax" / "jax"

    yield platform
    use_compile_cache("off")
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_on_accelerators_programs_are_kept_where_the_user_alone_can_write(on, platform):
    folder = on(platform)
    use_compile_cache(read_settings(get_config()).train.compile_cache)
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    use_compile_cache("off")
    assert jax.config.jax_compilation_cache_dir is None


def test_a_relative_cache_home_counts_as_none():
    assert compile_cache.users_folder({"XDG_CACHE_HOME": "here"}) == pathlib.Path.home() / ".cache/parallax/jax"


def test_on_cpu_nothing_is_kept_and_a_folder_for_several_devices_is_a_line(on, tmp_path, capsys):
    folder = on("cpu")
    use_compile_cache("auto")
    assert jax.config.jax_compilation_cache_dir is None and not folder.exists() and not capsys.readouterr().err
    use_compile_cache(str(tmp_path / "mine"))
    assert jax.config.jax_compilation_cache_dir is None and not (tmp_path / "mine").exists()
    assert capsys.readouterr().err.startswith("compiled programs are not kept: those of several CPU devices can hang")


def test_what_the_user_told_jax_stays(on, tmp_path):
    on("gpu")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    for setting in ("auto", "off", str(tmp_path / "mine")):
        use_compile_cache(setting)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "theirs")


@pytest.mark.parametrize("setting", ["auto", "named"])
def test_a_folder_that_cannot_be_made_is_one_line(on, tmp_path, capsys, setting):
    on("tpu")
    (tmp_path / "caches").write_text("a file")
    use_compile_cache("auto" if setting == "auto" else str(tmp_path / "caches" / "mine"))
    error = capsys.readouterr().err
    assert jax.config.jax_compilation_cache_dir is None
    assert error.count("\n") == 1 and error.startswith("compiled programs are not kept: ") and "/caches" in error


def writable(mode):
    return lambda folder: folder.chmod(mode)


def with_a_file_that_others_can_write(folder):
    (folder / "jit_f-0-cache").touch()
    (folder / "jit_f-0-cache").chmod(0o666)


def in_a_folder_where_others_can_rename(folder):
    folder.parent.chmod(0o777)


OPEN_TO_OTHERS = {
    "to all": (writable(0o777), ""),
    "to all, as /tmp": (writable(0o1777), ""),
    "a file in it": (with_a_file_that_others_can_write, "/jit_f-0-cache"),
    "the folder above it": (in_a_folder_where_others_can_rename, "/.."),
}


@pytest.mark.parametrize("setting", ["auto", "named", "through a link"])
@pytest.mark.parametrize("case", OPEN_TO_OTHERS)
def test_nothing_is_loaded_from_a_folder_that_others_can_change(case, setting, on, tmp_path, capsys):
    automatic = on("gpu")
    folder = automatic if setting == "auto" else tmp_path / "above" / "mine"
    folder.mkdir(parents=True, mode=0o755)
    open_up, named = OPEN_TO_OTHERS[case]
    open_up(folder)
    (tmp_path / "link").symlink_to(folder.parent)
    use_compile_cache({"auto": "auto", "named": str(folder)}.get(setting, str(tmp_path / "link" / "mine")))
    said = capsys.readouterr().err
    assert jax.config.jax_compilation_cache_dir is None
    at = os.path.normpath(f"{folder}{named}")
    assert said == (
        f"compiled programs are not kept: other users can change {at}; chmod go-w, or name a folder of yours alone in "
        "train.compile_cache\n"
    )


@pytest.mark.parametrize("whose", ["the folder's", "the folder above's"])
def test_nothing_is_loaded_from_a_folder_of_another_user(whose, on, tmp_path, monkeypatch, capsys):
    on("gpu")
    folder = tmp_path / "above" / "mine"
    folder.mkdir(parents=True, mode=0o700)
    theirs, stat_of = folder if whose == "the folder's" else folder.parent, pathlib.Path.stat

    def of_another(path, **how):
        found = list(stat_of(path, **how))
        return os.stat_result([*found[:4], 12345, *found[5:]]) if path == theirs else stat_of(path, **how)

    monkeypatch.setattr(pathlib.Path, "stat", of_another)
    use_compile_cache(str(folder))
    assert jax.config.jax_compilation_cache_dir is None
    assert f"other users can change {theirs};" in capsys.readouterr().err


def test_a_folder_that_is_named_is_made_for_this_user_alone_and_links_in_its_path_are_gone(on, tmp_path):
    on("gpu")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    before = os.umask(0o002)
    try:
        use_compile_cache(str(tmp_path / "link" / "new" / "mine"))
    finally:
        os.umask(before)
    folder = tmp_path / "disk" / "new" / "mine"
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)} == {0o700}


@pytest.mark.parametrize("members", [[], ["me"], ["me", "another"]], ids=str)
def test_a_group_of_one_user_is_nobody_else(members, on, tmp_path, monkeypatch, capsys):
    """As systems make it that let a user's group write all that the user makes."""
    on("gpu")
    (folder := tmp_path / "mine").mkdir()
    folder.chmod(0o775)
    user = pwd.struct_passwd(("me", "x", os.getuid(), folder.stat().st_gid, "", "", ""))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("me", "x", gid, members)))
    use_compile_cache(str(folder))
    assert (jax.config.jax_compilation_cache_dir == str(folder)) is ("another" not in members)
    assert bool(capsys.readouterr().err) is ("another" in members)


def test_processes_that_do_not_share_the_folder_keep_nothing(on, in_job, capsys):
    on("gpu")
    in_job(ClientStandIn(differences=[["the file of process 0", "there", 1, "No such file or directory"]]))
    use_compile_cache("auto")
    assert jax.config.jax_compilation_cache_dir is None and "processes do not share" in capsys.readouterr().err


PROGRAM = """
import sys, jax
from parallax.processes.compile_cache import use_compile_cache
use_compile_cache(sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x * 2)(1.0)
"""


def test_programs_are_kept_in_a_folder_that_is_named(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "mine")]
    subprocess.run(command, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, check=True)
    assert any(path.name.startswith("jit_") for path in (tmp_path / "mine").iterdir())
