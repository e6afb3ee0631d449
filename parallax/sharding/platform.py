"""The platform for which a program is being traced."""

import jax


def platform_traced() -> str:
    """Platform for which a program is being traced, as "cpu"; "" for an abstract mesh, which is for accelerators."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is not None:
        return mesh.abstract_device.platform
    return jax.default_backend() if mesh.empty else ""
