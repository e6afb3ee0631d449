"""What runs here, as a few texts that can be compared."""

import functools
import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
COMPARED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@functools.cache
def code_version() -> str:
    """A fingerprint of the package's source, whatever git knows of it: twelve hex digits."""
    total = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        total.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Python and the packages that decide a run's numbers."""
    return {"python": platform.python_version()} | {f"package {name}": _version(name) for name in COMPARED}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
