"""A shuffled order that is computed instead of stored: it maps any position to its window.

Written here, since NumPy's permutation is an array as long as the data, and its order may change with NumPy's version.
"""

import hashlib

import numpy as np

ROUNDS = 6  # with four rounds, changing one bit of the position often moves the result by the same distance


def shuffled(positions: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """The entries at `positions` (all below `size`) of the permutation of (size, seed, epoch).

    Adding, multiplying by an odd number and folding the upper half onto the lower are each a bijection of the numbers
    below a power of two, so a few keyed rounds of them are a permutation. Values outside of `size` are permuted again
    until they are inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, section 3). It uses only
    integer arithmetic, so the order is the same with every version of NumPy.

    >>> sorted(shuffled(np.arange(5), 5, seed=0, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    bits = max((size - 1).bit_length(), 1)
    keys = _keys(seed, epoch)
    result = _permuted(np.asarray(positions, np.uint64), bits, keys)
    outside = np.flatnonzero(result >= size)
    while len(outside):
        again = _permuted(result[outside], bits, keys)
        result[outside] = again
        outside = outside[again >= size]
    return result.astype(np.int64)


def _keys(seed: int, epoch: int) -> np.ndarray:
    """For each round the addend and the odd multiplier: [ROUNDS, 2, 1]."""
    words = hashlib.shake_256(f"{seed} {epoch}".encode()).digest(16 * ROUNDS)
    keys = np.frombuffer(words, "<u8").astype(np.uint64).reshape(ROUNDS, 2, 1)
    keys[:, 1] |= np.uint64(1)
    return keys


def _permuted(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    # Arrays, since NumPy takes twice as long for scalars and warns if they overflow.
    mask = np.full(1, (1 << bits) - 1, np.uint64)
    half = np.full(1, (bits + 1) // 2, np.uint64)
    for add, factor in keys:
        values = values + add
        values *= factor
        values &= mask
        values ^= values >> half
    return values
