"""Host memory: holds arrays that do not fit on the device; moves to it and back.

The memory space is part of an array's type, on simulated devices too: tracing fails if something computes on an array
in host memory.
"""

from typing import Any

import jax
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

DEVICE, HOST = "device", "host"
MEMORY_KINDS = {DEVICE: None, HOST: "pinned_host"}  # as shardings name them


def is_on_host(x: Any) -> bool:
    """Whether an array, possibly a traced one, is in host memory."""
    return is_type_on_host(jax.typeof(x))


def is_type_on_host(aval: Any) -> bool:
    """The same for an array's type, as variables of a traced program have it."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def rests_on_host(sharding: Any) -> bool:
    """Whether a sharding is in host memory."""
    return getattr(sharding, "memory_kind", None) == MEMORY_KINDS[HOST]


def to_host(x: Array) -> Array:
    """The array in host memory; the type of an argument that is there already may not say so."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """The array in the device's memory."""
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def layer_to_device(stack: Array, at: Array) -> Array:
    """One layer of a stack in host memory, in the device's memory.

    On TPU in the memory layout of the stack: a copy from the host that would change it ends libtpu's compiler. Stacks
    are row-major, but for last dims that are narrower than a vector of 128 entries and come after one that is not:
    these two change places.
    """
    layer = to_device(lax.dynamic_slice_in_dim(stack, at, 1))
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "tpu":
        *rest, last_but_one, last = range(layer.ndim)
        swapped = layer.shape[last] < 128 <= layer.shape[last_but_one]
        order = (*rest, last, last_but_one) if swapped else (*rest, last_but_one, last)
        layer = with_layout_constraint(layer, Layout(order))
    return layer[0]
