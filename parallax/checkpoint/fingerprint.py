"""Fingerprints of arrays, the same for every sharding.

The bits of each element, as 32-bit integers, are multiplied by an odd number that depends on the element's position,
and summed modulo 2^32. The sum does not depend on the order, so sharding does not matter. An odd number has an inverse,
so every change of a single element, and every flipped bit, changes the sum.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from parallax.sharding.host import rests_on_host

WORD_BITS = 32
# Elements that the host sums at once; its intermediate arrays are many times their size.
BLOCK_WORDS = 1 << 18
PROGRAM_BYTES = 1 << 26
# Mixing steps of MurmurHash3's finaliser.
MIXERS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))


def fingerprint(x: Array) -> Array:
    """The fingerprint of an array, a uint32.

    >>> int(fingerprint(jnp.ones(3))) == int(fingerprint(jnp.ones(3)))
    True
    """
    total = jnp.uint32(0)
    for part, words in enumerate(_words(x)):
        total += jnp.sum(words * _odd(_positions(x.shape) + jnp.uint32(part << 31)), dtype=jnp.uint32)
    return total


def fingerprints(arrays: Mapping[str, Array]) -> dict[str, int]:
    """The fingerprint of each array by name; a device reads only its own shards.

    A program takes arrays of up to `PROGRAM_BYTES` on a device, since some compilers write the terms of its sums down.
    It is waited for, since simulated devices can deadlock in sums of two programs that run at once. Arrays in host
    memory are copied to the devices one after the other, each for a separate program. Of a process that alone has all
    arrays, on CPUs, NumPy sums so many bytes in less time than it takes to compile a program.
    """
    if sum(array.nbytes for array in arrays.values()) <= PROGRAM_BYTES and all(map(is_read_by_host, arrays.values())):
        return {name: _by_numpy(array) for name, array in arrays.items()}
    waiting = {name: array for name, array in arrays.items() if rests_on_host(getattr(array, "sharding", None))}
    numbers: dict[str, int] = {}
    for group in _groups({name: array for name, array in arrays.items() if name not in waiting}):
        numbers |= zip(group, jax.device_get(_of_all(list(group.values()))), strict=True)
    for name, array in waiting.items():
        on_device = jax.device_put(array, array.sharding.with_memory_kind("device"))
        numbers[name] = jax.device_get(_of_all([on_device]))[0]
    return {name: int(numbers[name]) for name in arrays}


def is_read_by_host(array: Any) -> bool:
    """Whether NumPy can read all of an array where it lies."""
    return isinstance(array, Array) and array.is_fully_addressable and next(iter(array.devices())).platform == "cpu"


def _by_numpy(array: Array) -> int:
    running = RunningFingerprint()
    running.add(np.asarray(array))
    return running.value


def _groups(arrays: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """The arrays in groups, each for one program."""
    group: dict[str, Array] = {}
    size = 0
    for name, array in arrays.items():
        on_device = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        if group and size + on_device > PROGRAM_BYTES:
            yield group
            group, size = {}, 0
        group[name] = array
        size += on_device
    if group:
        yield group


@jax.jit
def _of_all(arrays: list[Array]) -> Array:
    return jnp.stack([fingerprint(array) for array in arrays])


class RunningFingerprint:
    """The fingerprint of an array that the host reads piece by piece, in order."""

    def __init__(self):
        self.value = 0
        self._next = 0  # position of the next element

    def add(self, piece: np.ndarray) -> None:
        """Add the next elements."""
        flat = np.ascontiguousarray(piece).reshape(-1)
        all_words = flat.view(np.dtype(f"u{min(flat.dtype.itemsize, 4)}")).reshape(-1, max(flat.dtype.itemsize // 4, 1))
        for start in range(0, len(flat), BLOCK_WORDS):
            words = all_words[start : start + BLOCK_WORDS]
            positions = np.arange(self._next, self._next + len(words), dtype=np.uint64).astype(np.uint32)
            for half in range(words.shape[1]):
                terms = words[:, half].astype(np.uint32) * _odd(positions + np.uint32(half << 31))
                self.value = (self.value + int(terms.sum(dtype=np.uint64))) % (1 << WORD_BITS)
            self._next += len(words)


def _words(x: Array) -> list[Array]:
    """The bits of the elements as uint32; two arrays for 64-bit elements."""
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    bits = min(np.dtype(x.dtype).itemsize * 8, WORD_BITS)
    words = jax.lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)
    return [words] if words.shape == x.shape else [words[..., half] for half in range(words.shape[-1])]


def _positions(shape: tuple[int, ...]) -> Array:
    """Index of each element in the whole array, modulo 2^32."""
    positions = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(shape))):
        positions += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride % (1 << WORD_BITS))
        stride *= shape[dim]
    return positions


def _odd(positions: Any) -> Any:
    """An odd number for each position; the same in JAX and NumPy."""
    for shift, factor in MIXERS:
        positions = (positions ^ (positions >> np.uint32(shift))) * np.uint32(factor)
    return (positions ^ (positions >> np.uint32(16))) | np.uint32(1)
