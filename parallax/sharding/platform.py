"""The platform for which a program is being traced."""

import jax

from parallax.hardware.chips import MICROSCALED


def platform_traced() -> str:
    """Platform for which a program is being traced, as "cpu"; "" for an abstract mesh, which is for accelerators."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is not None:
        return mesh.abstract_device.platform
    return jax.default_backend() if mesh.empty else ""


def platform_planned() -> str:
    """The same, but "gpu" for an abstract mesh that names a GPU, be its kind known or not."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "gpu" if device is not None and not device.platform else platform_traced()


def device_kind_planned() -> str:
    """JAX's name of the devices for which a program is traced; for an abstract mesh the chip that it names, or ""."""
    mesh = jax.sharding.get_abstract_mesh()
    device = jax.devices()[0] if mesh.empty else mesh.abstract_device
    return "" if device is None else device.device_kind


def multiplies_microscaled() -> bool:
    """Whether the program being traced multiplies microscaled blocks as such: on GPUs, where XLA has a product of them,
    which is in the compute dtype on most; and on an abstract mesh that is for a chip with such units."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return platform_traced() == "gpu" or (device is not None and device.device_kind in MICROSCALED)
