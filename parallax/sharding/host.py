"""Host memory: holds arrays that do not fit on the device; moves to it and back.

The memory space is part of an array's type, on simulated devices too: tracing fails if something computes on an array
in host memory.
"""

import itertools
import math
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from parallax.sharding.platform import platform_traced

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


def argument_to_device(x: Array, layer: Array | None = None) -> Array:
    """An argument of the program in host memory, or one layer of a stack, `[1, ...]`, in the device's memory; in the
    local view.

    On TPU in the memory layout that arguments have: a copy from the host that would change it ends libtpu's compiler.
    """
    order = order_on_tpu(x.shape, x.dtype)
    x = x if layer is None else lax.dynamic_slice_in_dim(x, layer, 1)
    return to_device(with_layout_constraint(x, Layout(order)) if platform_traced() == "tpu" else x)


def order_on_tpu(shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """The dims, major first, of an argument of this shape on TPU, as its memory layout has them.

    The last two are padded to tiles: the last to 128 entries, the last but one to 8, or to 1, 2 or 4 if it is that
    small and so many entries fill 32 bits. TPUs use the order that needs the least memory then; of equal ones, that
    which keeps the last dims last.

    >>> order_on_tpu((32, 64, 11008), "float32"), order_on_tpu((32, 11008, 64), "float32")
    ((0, 1, 2), (0, 2, 1))
    """
    least = 4 // np.dtype(dtype).itemsize

    def padded(order: tuple[int, ...]) -> int:
        *rest, rows, columns = (1, 1, *(shape[dim] for dim in order))
        tile = next((size for size in (1, 2, 4) if size >= max(rows, least)), 8)
        return math.prod(rest) * -(-rows // tile) * tile * -(-columns // 128) * 128

    orders = itertools.permutations(range(len(shape)))
    return min(orders, key=lambda order: (padded(order), [-dim for dim in reversed(order)]))
