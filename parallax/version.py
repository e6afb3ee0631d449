"""Versions of the code, which checkpoints record and resumed runs compare."""

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(__file__).parent
DEPENDENCIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")  # they affect a run's numbers and files


@functools.cache
def code_version() -> str:
    """The version and a hash of the package's sources, so that an edited checkout is another version.

    >>> code_version() == code_version()
    True
    """
    content = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        content.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{VERSION}+{content.hexdigest()[:12]}"


def version_of(package: str) -> str:
    """The installed version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def code_versions() -> dict[str, str]:
    """Versions of the code that computes a run."""
    return {"parallax": code_version(), **{name: version_of(name) for name in ("jax", "jaxlib", "flax", "optax")}}


def versions() -> dict[str, str]:
    """Installed versions, by package, of the dependencies that affect a run's numbers and files."""
    return {name: version_of(name) for name in DEPENDENCIES}
