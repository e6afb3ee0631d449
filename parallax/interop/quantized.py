"""Weights in float8, each block of a matrix with a scale of its own, as DeepSeek-V3 is published: read as float32."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from parallax.interop.fields import Fields
from parallax.interop.safetensors import Tensor, read_pieces, read_tensor

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
SCALES = "_scale_inv"  # behind a weight's name; it is what the weight is multiplied by
# How the same weights are multiplied elsewhere, which weights were left as they are, and how scales were rounded.
HARMLESS = (
    "activation_scheme",
    "modules_to_not_convert",
    "ignored_layers",
    "scale_fmt",
    "dequantize",
    "run_compressed",
)
OTHER_FIELDS = ("compression_config", "quantization")  # where other programs say how weights are quantized
WHOLE_PIECE_BYTES = 1 << 24  # of a tensor that is made float32: all that is held besides it
SUPPORTED = "'fp8' in blocks, or weights in float32, bfloat16 or float16: take the model that it was made of"

Block = tuple[int, int]  # rows and columns that share a scale


def read_quantization(fields: Fields) -> Block | None:
    """The blocks of float8 weights; None where weights are not quantized, ConfigError where they are in another way."""
    for name in OTHER_FIELDS:
        other = fields.object(name)
        if other:
            fields.refuse(name, other, SUPPORTED)
    content = fields.object("quantization_config")
    if not content:
        return None
    inner = fields.within("quantization_config", content)
    method = inner.take("quant_method", "bitsandbytes" if _is_bitsandbytes(content) else None)
    if method != "fp8":
        inner.refuse("quant_method", method, SUPPORTED)
    inner.only("fmt", "e4m3", absent="e4m3")
    block = inner.take("weight_block_size", None)
    if not _is_block(block):
        inner.refuse("weight_block_size", block, "two whole numbers, as [128, 128]")
    inner.ignore(HARMLESS)
    inner.end()
    return block[0], block[1]


def _is_bitsandbytes(content: Mapping[str, Any]) -> bool:
    return any(content.get(name) for name in ("load_in_4bit", "load_in_8bit"))


def _is_block(block: Any) -> bool:
    sizes = block if isinstance(block, list) else []
    return len(sizes) == 2 and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)


class Weight(NamedTuple):
    """A tensor in a file, and where it is float8 the scales of its blocks."""

    path: Path
    tensor: Tensor
    scales: "Weight | None" = None
    block: Block = (1, 1)

    def pieces(self, limit_bytes: int) -> Iterator[np.ndarray]:
        """Rows, as many at a time as fit into a number of bytes; float32 where they have scales."""
        if self.scales is None:
            yield from read_pieces(self.path, self.tensor, limit_bytes)
            return
        scales, row = self.scales.whole().astype(np.float32), 0
        for piece in read_pieces(self.path, self.tensor, limit_bytes // 4):  # a byte becomes four
            yield dequantized(piece, scales, self.block, row)
            row += len(piece)

    def whole(self) -> np.ndarray:
        """The tensor; float32 where it has scales."""
        if self.scales is None:
            return read_tensor(self.path, self.tensor)
        values, row = np.empty(self.tensor.shape, np.float32), 0
        for piece in self.pieces(WHOLE_PIECE_BYTES):
            values[row : row + len(piece)] = piece
            row += len(piece)
        return values


def dequantized(values_RC: np.ndarray, scales: np.ndarray, block: Block, first_row: int) -> np.ndarray:
    """Rows of a matrix in float32, each entry times the scale of its block; `first_row` is the rows' place in it.

    >>> dequantized(np.ones((2, 3), FLOAT8), np.float32([[1, 2], [3, 4]]), (2, 2), first_row=1)
    array([[1., 1., 2.],
           [3., 3., 4.]], dtype=float32)
    """
    found_RC = values_RC.astype(np.float32)
    of_row = (first_row + np.arange(len(found_RC))) // block[0]
    for column in range(scales.shape[1]):
        found_RC[:, column * block[1] : (column + 1) * block[1]] *= scales[of_row, column][:, None]
    return found_RC


def scales_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Of the scales of a matrix: blocks at its lower and right edge may be smaller.

    >>> scales_shape((576, 7168), (128, 128))
    (5, 56)
    """
    return tuple(-(-size // side) for size, side in zip(shape, block))


def with_scales(weights: Mapping[str, Weight], block: Block) -> dict[str, Weight]:
    """Weights by name, float8 ones with the scales that lie beside them in tensors of their own.

    What has no scales of the right shape, or is no float8, stays as it is: two tensors, for others to judge.
    """
    found = dict(weights)
    for name, (path, tensor, *_) in weights.items():
        scales = weights.get(name + SCALES)
        fits = scales and scales.tensor.shape == scales_shape(tensor.shape, block) and len(tensor.shape) == 2
        if tensor.dtype == FLOAT8 and fits and scales.tensor.dtype in SCALE_DTYPES:
            found[name] = Weight(path, tensor, found.pop(name + SCALES), block)
    return found
