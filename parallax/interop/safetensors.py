"""The safetensors format: a length, a JSON header that says where each tensor lies, and the tensors' bytes.

Headers are read by the `safetensors` library, as `transformers` reads them: it refuses what is no JSON, nested without
end, negative, overflowing, overlapping, or does not cover the file, in a line, 30,000 names in 0.1 s. Ours is what it
does not do (0.8.0, measured):

- It takes a name that is there twice, further keys in an entry, shapes that NumPy has no array for (65 dims, 2^63
  entries by 0), and 16 s for a header of 99 MB: these are refused here.
- Reading: through its memory map a whole file stays in memory (+262 MiB of 256, in pieces of 8 MiB), and one that is
  truncated meanwhile ends the process with SIGBUS; its slices without the map read the whole tensor for each piece.
  `read_pieces` has one piece in memory, and a file that ends too early is an error.
- Writing: it wants all of a file's tensors in memory at once (+297 MiB for a file of 256); `write` has one piece.

bfloat16 and float8 need ml_dtypes here and there, no torch; the library does not read float8 into NumPy.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from parallax.runtime.errors import CheckpointError, quoted, shown

LENGTH_BYTES = 8
HEADER_LIMIT_BYTES = 1 << 24  # some 100,000 tensors in one file
MOST_DIMS = 64  # of an array of NumPy's
MOST_BYTES = 2**63 - 1  # the same, a dim of 0 left out
REASON_LETTERS = 300
METADATA = "__metadata__"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
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
        CheckpointError: the header is none, or does not fit the file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > HEADER_LIMIT_BYTES:
                raise _bad(path, f"its header has {length} bytes by its own account; {HEADER_LIMIT_BYTES} are read")
            text = file.read(length)
        with safe_open(path, framework="numpy", backend="pread") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            found = {name: (about.get_dtype(), tuple(about.get_shape())) for name, about in slices.items()}
    except SafetensorError as error:
        raise _bad(path, str(error).removeprefix("Error while deserializing header: ")) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    tensors, at = {}, LENGTH_BYTES + length
    for name, (dtype, shape) in found.items():
        tensors[name] = _check_tensor(path, name, dtype, shape, at)
        at = tensors[name].end
    if at != path.stat().st_size:  # there are no holes
        raise _bad(path, f"its tensors end at byte {at}; it was written to meanwhile")
    _check_once(path, text)
    return tensors


def read_pieces(path: Path, tensor: Tensor, limit_bytes: int) -> Iterator[np.ndarray]:
    """Rows of a tensor, as many at a time as fit into a number of bytes."""
    count = tensor.shape[0] if tensor.shape else 1
    rows = max(limit_bytes * count // max(nbytes(tensor), 1), 1)
    try:
        with path.open("rb") as file:
            file.seek(tensor.start)
            for start in range(0, count, rows):
                piece = np.empty((min(rows, count - start), *tensor.shape[1:]), tensor.dtype)
                if file.readinto(piece.reshape(-1).view(np.uint8)) != piece.nbytes:
                    raise _bad(path, f"it ends before byte {tensor.end}, though it was as long when it was opened")
                yield piece if tensor.shape else piece.reshape(())
    except OSError as error:
        raise _unreadable(path, error) from error


def read_tensor(path: Path, tensor: Tensor) -> np.ndarray:
    """A whole tensor."""
    whole = next(read_pieces(path, tensor, nbytes(tensor)), None)
    return np.empty(tensor.shape, tensor.dtype) if whole is None else whole  # no rows, no pieces


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
        raise CheckpointError(f"{quoted(name)} is of {about.dtype}, for which safetensors has no name")
    return NAMES[np.dtype(about.dtype)]


def _check_tensor(path: Path, name: str, dtype: str, shape: tuple[int, ...], start: int) -> Tensor:
    if dtype not in DTYPES:
        raise _bad(path, f"tensor {quoted(name)} has dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if len(shape) > MOST_DIMS:
        raise _bad(path, f"tensor {quoted(name)} has {len(shape)} dims; an array has at most {MOST_DIMS}")
    if math.prod(size or 1 for size in shape) * DTYPES[dtype].itemsize > MOST_BYTES:
        raise _bad(path, f"tensor {quoted(name)} has the shape {quoted(list(shape))}, which no array has")
    tensor = Tensor(DTYPES[dtype], shape, start, start)
    return tensor._replace(end=start + nbytes(tensor))


def _check_once(path: Path, text: bytes) -> None:
    """What the library takes of a header, and another reader may read otherwise."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = set()
        for name, _ in pairs:
            if name in seen:
                raise _bad(path, f"{quoted(name)} is there twice")
            seen.add(name)
        return dict(pairs)

    for name, about in json.loads(text, object_pairs_hook=once).items():
        if name != METADATA and set(about) != {"dtype", "shape", "data_offsets"}:
            raise _bad(path, f"tensor {quoted(name)} has not dtype, shape and data_offsets alone")


def _bad(path: Path, how: str) -> CheckpointError:
    how = shown(how, REASON_LETTERS)
    return CheckpointError(f"{path} is no safetensors file that can be trusted: {how}; fetch or export it again")


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read ({error.strerror or error})")


def in_pieces(array: np.ndarray, limit_bytes: int) -> Iterator[np.ndarray]:
    """Rows of an array, as many at a time as fit into a number of bytes."""
    if array.ndim == 0:
        yield array
        return
    rows = max(limit_bytes // max(array[:1].nbytes, 1), 1)
    for start in range(0, len(array), rows):
        yield array[start : start + rows]
