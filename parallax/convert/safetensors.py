"""The safetensors format: a length, a JSON header that says where each tensor lies, and the tensors' bytes.

A header is read as if an enemy had written it: every number in it is held to the file before a byte is taken.
https://huggingface.co/docs/safetensors has the format.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from parallax.errors import CheckpointError

LENGTH_BYTES = 8
HEADER_LIMIT_BYTES = 100_000_000  # as the format's own library has it
METADATA = "__metadata__"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Tensor(NamedTuple):
    """What a header says of a tensor; its bytes are `start` to `end` of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, in the order of their bytes.

    Raises:
        CheckpointError: the header is none, or does not fit the file: says of which tensor.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(HEADER_LIMIT_BYTES, size - LENGTH_BYTES):
            raise _bad(path, f"its header has {length} bytes by its own account, the file {size}")
        content = _parse(path, file.read(length))
    content.pop(METADATA, None)
    base = LENGTH_BYTES + length
    tensors = {name: _check_tensor(path, name, about, size - base) for name, about in content.items()}
    in_order = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    _check_cover(path, in_order, size - base)
    return {
        name: tensor._replace(start=base + tensor.start, end=base + tensor.end) for name, tensor in in_order.items()
    }


def open_tensor(path: Path, tensor: Tensor) -> np.ndarray:
    """The tensor as an array that lies in the file: what is not looked at is not read."""
    if not math.prod(tensor.shape):
        return np.empty(tensor.shape, tensor.dtype)
    return np.memmap(path, tensor.dtype, "r", tensor.start, tensor.shape)


def write(path: Path, tensors: Mapping[str, Any], pieces: Callable[[str], Iterable[np.ndarray]]) -> None:
    """Write a file tensor by tensor: `pieces(name)` gives the elements of each, in order.

    `tensors` are anything with shape and dtype, by name.
    """
    header, at = {}, 0
    for name, about in tensors.items():
        end = at + nbytes(about)
        header[name] = {"dtype": _dtype_name(name, about), "shape": list(about.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({METADATA: {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # tensors begin at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name, about in tensors.items():
            before = file.tell()
            for piece in pieces(name):
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
            assert file.tell() - before == nbytes(about), f"the pieces of {name} are not all of it"


def nbytes(about: Any) -> int:
    """Bytes of anything with shape and dtype."""
    return math.prod(about.shape) * np.dtype(about.dtype).itemsize


def _dtype_name(name: str, about: Any) -> str:
    if np.dtype(about.dtype) not in NAMES:
        raise CheckpointError(f"{name} is of {about.dtype}, for which safetensors has no name")
    return NAMES[np.dtype(about.dtype)]


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise _bad(path, f"{twice!r:.100} is there twice")
        return dict(pairs)

    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _bad(path, "its header is no JSON") from error
    if not isinstance(content, dict):
        raise _bad(path, "its header is no JSON object")
    return content


def _check_tensor(path: Path, name: str, about: Any, size: int) -> Tensor:
    """A tensor with its offsets from the end of the header, which `size` bytes follow."""
    if not isinstance(about, dict) or set(about) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"tensor {name!r:.100} has not dtype, shape and data_offsets alone")
    shape, offsets = about["shape"], about["data_offsets"]
    if not isinstance(about["dtype"], str) or about["dtype"] not in DTYPES:
        raise _bad(path, f"tensor {name!r:.100} has dtype {about['dtype']!r:.40}; known: {', '.join(DTYPES)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _bad(path, f"tensor {name!r:.100} has a shape or data_offsets that are no lists of whole numbers")
    dtype, (start, end) = DTYPES[about["dtype"]], offsets
    if not start <= end <= size:
        raise _bad(path, f"tensor {name!r:.100} has bytes {start} to {end} of {size}")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise _bad(path, f"tensor {name!r:.100} is {about['dtype']}{shape}, but has {end - start} bytes")
    return Tensor(dtype, tuple(shape), start, end)


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number < 2**63 for number in numbers)


def _check_cover(path: Path, tensors: Mapping[str, Tensor], size: int) -> None:
    at = 0
    for name, tensor in tensors.items():
        if tensor.start != at:
            how = "overlaps the tensor before it" if tensor.start < at else "leaves a hole before it"
            raise _bad(path, f"tensor {name!r:.100} {how}")
        at = tensor.end
    if at != size:
        raise _bad(path, f"its tensors end at byte {at} of {size}")


def _bad(path: Path, how: str) -> CheckpointError:
    return CheckpointError(f"{path} is no safetensors file that can be trusted: {how}")


def in_pieces(array: np.ndarray, limit_bytes: int) -> Iterator[np.ndarray]:
    """Rows of an array, as many at a time as fit into a number of bytes."""
    if array.ndim == 0:
        yield array
        return
    rows = max(limit_bytes // max(array[:1].nbytes, 1), 1)
    for start in range(0, len(array), rows):
        yield array[start : start + rows]
