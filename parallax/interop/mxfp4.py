"""Weights in MXFP4: numbers of 4 bits, an exponent for each 32 of them (OCP Microscaling Formats 1.0, section 5)."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from parallax.interop.safetensors import Tensor

ELEMENTS, EXPONENTS = "_blocks", "_scales"  # after a weight's name
BYTES_OF_32, EXPONENT_BIAS, NO_NUMBER = 16, 127, 255
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth is the sign
E2M1 = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)], np.float32)


class Mxfp4Tensor(NamedTuple):
    """Experts' kernels [experts, in, out] in MXFP4, read as bfloat16, which has all its values: a byte has two entries
    of `in`, the first in its lower bits."""

    blocks: Tensor  # [experts, out, blocks of in, bytes of a block]
    exponents: Tensor  # [experts, out, blocks of in]
    dtype = np.dtype(ml_dtypes.bfloat16)

    @property
    def shape(self) -> tuple[int, ...]:
        experts, out, blocks, size = self.blocks.shape
        return experts, blocks * size * 2, out

    def pieces(self, limit_bytes: int) -> Iterator[np.ndarray]:
        """Pieces of one expert or more, of at most `limit_bytes` where an expert has no more."""
        exponents, row = self.exponents.whole(), 0
        for piece in self.blocks.pieces(limit_bytes // 4):  # a byte becomes two of two bytes each
            yield of_mxfp4(piece, exponents[row : row + len(piece)]).astype(self.dtype)
            row += len(piece)


def of_mxfp4(blocks: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Kernels [experts, in, out] in float32 of their blocks [experts, out, blocks, bytes] and exponents.

    >>> blocks = np.zeros((1, 1, 1, 16), np.uint8)
    >>> blocks[..., 0] = 0x92
    >>> of_mxfp4(blocks, np.full((1, 1, 1), 128, np.uint8))[0, :3, 0].tolist()
    [2.0, -1.0, 0.0]
    """
    halves = np.stack([blocks & 0x0F, blocks >> 4], axis=-1)
    values = np.ldexp(E2M1[halves], exponents.astype(np.int32)[..., None, None] - EXPONENT_BIAS)
    values[exponents == NO_NUMBER] = np.nan
    return values.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


def with_exponents(tensors: Mapping[str, Tensor]) -> dict[str, Tensor | Mxfp4Tensor]:
    """Tensors by name, with blocks of MXFP4 joined to their exponents, which are stored as separate tensors.

    Those that do not fit each other are unchanged.
    """
    joined: dict[str, Tensor | Mxfp4Tensor] = dict(tensors)
    for name, blocks in tensors.items():
        weight = name.removesuffix(ELEMENTS)
        exponents = tensors.get(weight + EXPONENTS)
        fits = exponents and len(blocks.shape) == 4 and blocks.shape == (*exponents.shape, BYTES_OF_32)
        if weight != name and fits and {blocks.dtype, exponents.dtype} == {np.dtype(np.uint8)}:
            joined[weight] = Mxfp4Tensor(joined.pop(name), joined.pop(weight + EXPONENTS))
    return joined
