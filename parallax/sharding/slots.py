"""Reads and writes single entries of arrays stacked in slots without other copies."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from parallax.hardware.chips import LANES
from parallax.sharding.collectives import as_varying, varying_axes
from parallax.sharding.host import argument_to_device, is_on_host, to_device, to_host
from parallax.sharding.platform import platform_traced


def zeros(like: Any, *leading: int) -> Array:
    """Zeros for stacked arrays like this one, varying over the same axes and over pp."""
    return _varying_like(like, jnp.zeros((*leading, *like.shape), like.dtype))


def unset(like: Any, *leading: int) -> Array:
    """The same for what is written before it is read: on TPU nothing clears it, elsewhere it is zero."""
    if platform_traced() != "tpu":
        return zeros(like, *leading)
    return _varying_like(like, lax.empty((*leading, *like.shape), like.dtype))


def host_zeros(like: Any, count: int) -> Array:
    """Zeros for such arrays in host memory, written one by one, so that the device never holds them all."""
    return map_slots(lambda _: zeros(like), jnp.arange(count))


def map_slots(function: Any, stacked: Array) -> Array:
    """The results of a function of each entry, which is on the device; stacked in host memory."""
    like = jax.eval_shape(lambda: function(read_layer(stacked, 0)))

    def turn(number: Array, done: Array) -> Array:
        return write_slot(done, function(read_layer(stacked, number)), number)

    return lax.fori_loop(0, len(stacked), turn, host_slots(like, len(stacked)))


def host_slots(like: Any, *leading: int) -> Array:
    """Slots for such arrays in host memory, unset; each is written before it is read. Zeros would travel there."""
    return to_host(_varying_like(like, lax.empty((*leading, *like.shape), like.dtype)))


def read_entry(stacked: Array, *numbers: Array | int) -> Array:
    """The entry at these indices of the leading dims, on the device; nothing else is copied."""
    start, rest = _indices(stacked, numbers), stacked.shape[len(numbers) :]
    piece = lax.dynamic_slice(stacked, start, (*(1 for _ in numbers), *rest), allow_negative_indices=False)
    return to_device(piece).reshape(rest)


def read_slot(stacked: Any, *numbers: Array | int) -> Any:
    """The same for each array of a tree."""
    return jax.tree.map(lambda leaf: read_entry(leaf, *numbers), stacked)


def read_layer(stacked: Array, number: Array | int) -> Array:
    """The same for one stack, whose entries in a TPU's host memory have the memory layout of arguments: that of the
    update, which reads them, too, while XLA may give them that of what they are added to, and libtpu ends there."""
    pinned = is_on_host(stacked) and platform_traced() == "tpu"
    return argument_to_device(stacked, number)[0] if pinned else read_entry(stacked, number)


def write_slot(stacked: Any, values: Any, *numbers: Array | int) -> Any:
    """The same with that entry replaced."""

    def write(leaf: Array, value: Array) -> Array:
        piece = as_varying(value, ["pp"]).reshape(*(1 for _ in numbers), *value.shape)
        piece = to_host(piece) if is_on_host(leaf) else piece
        return lax.dynamic_update_slice(leaf, piece, _indices(leaf, numbers), allow_negative_indices=False)

    return jax.tree.map(write, stacked, values)


def to_bytes(x: Array) -> list[Array]:
    """The bytes of an array's entries, the highest first: arrays of uint8 of its shape.

    >>> [part.item() for part in to_bytes(jnp.bfloat16(1))]
    [63, 128]
    """
    word = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return [(word >> 8 * place).astype(jnp.uint8) for place in reversed(range(x.dtype.itemsize))]


def from_bytes(parts: Sequence[Array], dtype: Any) -> Array:
    """The array of this dtype that has these bytes."""
    word = jnp.zeros((), f"uint{8 * len(parts)}")
    for place, part in enumerate(reversed(parts)):
        word = word | part.astype(word.dtype) << 8 * place
    return lax.bitcast_convert_type(word, dtype)


def row_major(x: Array) -> Array:
    """The same array in row-major memory layout, with the last dim fastest; [B, S, F] as XLA has it if tiles would pad
    a wide F: then S is fastest, and the array would be copied."""
    if x.ndim == 3 and x.shape[-1] > LANES and x.shape[-1] % LANES:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def heads_major(x_BSHK: Array) -> Array:
    """The same array with the tokens of a head side by side in memory, as TPU kernels of attention read it."""
    return with_layout_constraint(x_BSHK, Layout((0, 2, 1, 3)))


def heads_last(kernel: Array) -> Array:
    """A kernel [heads, d_head, outputs] in the memory layout [heads, outputs, d_head]."""
    return with_layout_constraint(kernel, Layout((0, 2, 1)))


def _varying_like(like: Any, stacked: Array) -> Array:
    return as_varying(stacked, varying_axes(like) | {"pp"})


def _indices(leaf: Array, numbers: Sequence[Array | int]) -> tuple:
    """Start indices of an entry; none is negative. A dim of size 1 has a static index, so that XLA sees that a read
    returns what was written."""
    known = [0 if size == 1 else number for size, number in zip(leaf.shape, numbers)] + [0] * (leaf.ndim - len(numbers))
    # Of one dtype: with 64-bit types enabled, counters of loops are wider.
    return tuple(
        np.int32(number) if isinstance(number, int) else lax.convert_element_type(number, jnp.int32) for number in known
    )
