"""What decides a run's numbers besides its config, as a few texts that can be compared."""

import platform

from parallax.version import version_of

COMPARED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Python and the packages."""
    return {"python": platform.python_version()} | {f"package {name}": version_of(name) for name in COMPARED}
