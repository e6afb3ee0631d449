"""Which code runs: what a checkpoint remembers, and a resumed run compares."""

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).parent


@functools.cache
def code_version() -> str:
    """The version and a hash of the package's sources: an edited checkout is another version.

    >>> code_version() == code_version()
    True
    """
    content = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        content.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{version_of('parallax')}+{content.hexdigest()[:12]}"


def version_of(package: str) -> str:
    """The installed version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
