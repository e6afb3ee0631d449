"""Location of JAX's persistent compilation cache.

Whoever can write there can make this process run any program. So only this user may: of a folder that others can
change, by themselves or by one above it, nothing is loaded.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from parallax.errors import tell
from parallax.processes.job import broadcast, is_first, is_shared
from parallax.storage import files

AUTO_FOLDER, OFF = "auto", "off"

_ours: str | None = None  # the folder that we set in JAX; another one was set by the user's program or environment


def use_compile_cache(setting: str) -> None:
    """Set JAX's compilation cache as train.compile_cache says; call it before anything large is compiled.

    If a folder cannot be used, a line on stderr says so. A cache that was set before, by JAX_COMPILATION_CACHE_DIR or
    by the program, stays. With several processes, which all read what the first one writes, all must share the folder:
    if some find a program and others compile it, they can deadlock.
    """
    if jax.config.jax_compilation_cache_dir not in (None, "", _ours):
        return
    if setting == OFF or not _may_keep(setting):
        _tell_jax(None)
        return
    folder = broadcast("the compilation cache", _made(setting) if is_first() else "")
    if folder and not is_shared(Path(folder)):
        _complain(f"the processes do not share {folder}; name a folder that they share in train.compile_cache")
        folder = ""
    _tell_jax(folder or None)


def users_folder(environment: Mapping[str, str]) -> Path:
    """The folder for compiled programs in the user's cache, following the XDG base directories.

    >>> users_folder({"XDG_CACHE_HOME": "/scratch/cache"}).as_posix()
    '/scratch/cache/parallax/jax'
    """
    caches = Path(environment.get("XDG_CACHE_HOME", ""))
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "parallax" / "jax"


def _may_keep(setting: str) -> bool:
    """Whether to cache programs of these devices; on CPU, cached programs with collectives have hung."""
    if jax.default_backend() != "cpu":
        return True
    if setting != AUTO_FOLDER and jax.device_count() > 1:
        _complain("those of several CPU devices can hang when they are loaded again (train.compile_cache)")
        return False
    return setting != AUTO_FOLDER


def _made(setting: str) -> str:
    """Create the folder and check that this user, and nobody else, can write in it; "" and a message if not."""
    try:
        folder = users_folder(os.environ) if setting == AUTO_FOLDER else Path(setting).expanduser().absolute()
        for path in (*reversed(folder.parents), folder):
            files.make_folder(path, mode=0o700)
        folder = folder.resolve(strict=True)  # nobody can point a link elsewhere afterwards
        files.try_writing(folder)
        theirs = files.open_to_others(folder)
    except (OSError, RuntimeError) as error:  # the latter if the user has no home
        _complain(f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error))
        return ""
    if theirs:
        _complain(
            f"other users can change {theirs}; chmod go-w, or name a folder of yours alone in train.compile_cache"
        )
        return ""
    return str(folder)


def _complain(why: str) -> None:
    if is_first():
        tell(f"compiled programs are not kept: {why}", sys.stderr)


def _tell_jax(folder: str | None) -> None:
    global _ours
    if folder != _ours:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
        _ours = folder
