"""Safetensors files, and models in several files with an index of tensors.

A file has a length, a JSON header with the place of each tensor, and the tensors' bytes. The `safetensors` library
reads headers, as `transformers` does: it refuses, in one line, a header that is not JSON, is nested without end, has
negative, overflowing or overlapping offsets, or does not cover the file; 30,000 names take it 0.1 s. This module does
what the library does not (0.8.0, measured):

- Checks: the library accepts duplicate names, additional keys in an entry, and shapes that NumPy does not support (65
  dims, 2^63 entries by 0), and takes 16 s for a header of 99 MB. These are refused here.
- Reading: through its memory map a whole file stays in memory (+262 MiB of 256, in pieces of 8 MiB), and a file that is
  truncated meanwhile ends the process with SIGBUS; its slices without the map read the whole tensor for each piece.
  `Tensor.pieces` holds one piece in memory, and a file that ends too early is an error.
- Writing: it needs all of a file's tensors in memory at once (+297 MiB for a file of 256); `write_tensors` holds one.

bfloat16 and float8 need ml_dtypes in both, but not torch; the library does not read float8 into NumPy.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from parallax.config.keys import NAME_BYTES
from parallax.errors import CheckpointError, errors_as, quoted, shown
from parallax.storage.files import LARGEST_BYTES, local_copy, new_file, object_of, open_copy, read_object

LENGTH_BYTES = 8
HEADER_LIMIT_BYTES = 1 << 24  # some 100,000 tensors in one file
MOST_DIMS = 64  # of a NumPy array
MOST_BYTES = 2**63 - 1  # of a NumPy array, with dims of 0 ignored
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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FILE_NAME = re.compile(r"[^/\\]+\.safetensors")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Tensor(NamedTuple):
    """A tensor in a file, whose bytes begin at `start`."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    def pieces(self, limit_bytes: int) -> Iterator[np.ndarray]:
        """Pieces of rows, each of at most `limit_bytes`."""
        count = self.shape[0] if self.shape else 1
        rows = max(limit_bytes * count // max(nbytes(self), 1), 1)
        with _reading(self.path), open_copy(self.path) as file:
            file.seek(self.start)
            for start in range(0, count, rows):
                piece = np.empty((min(rows, count - start), *self.shape[1:]), self.dtype)
                if file.readinto(piece.reshape(-1).view(np.uint8)) != piece.nbytes:
                    end = self.start + nbytes(self)
                    raise _bad(self.path, f"it ends before byte {end}, though it was as long when it was opened")
                yield piece if self.shape else piece.reshape(())

    def whole(self) -> np.ndarray:
        """The whole tensor."""
        return next(self.pieces(nbytes(self)), np.empty(self.shape, self.dtype))  # no rows, no pieces

    def matrices(self, count: int) -> list["Tensor"]:
        """`count` matrices of the same shape, one after the other in the tensor's rows; each can be read separately.

        >>> one, other = Tensor(Path("model.safetensors"), np.dtype(np.float32), (2, 3, 4), start=100).matrices(2)
        >>> one.shape, one.start, other.shape, other.start
        ((3, 4), 100, (3, 4), 148)
        """
        *rows, columns = self.shape
        first = self._replace(shape=(math.prod(rows) // count, columns))
        return [first._replace(start=self.start + place * nbytes(first)) for place in range(count)]


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, in the order of their bytes.

    Raises:
        CheckpointError: the header is invalid, or does not fit the file.
    """
    with _reading(path), open_copy(path) as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > HEADER_LIMIT_BYTES:
            raise _bad(path, f"its header has {length} bytes by its own account; {HEADER_LIMIT_BYTES} are read")
        try:
            with safe_open(local_copy(path), framework="numpy", backend="pread"):
                header = object_of(file.read(length))  # after the library has accepted it
        except (SafetensorError, ValueError) as error:
            raise _bad(path, str(error).removeprefix("Error while deserializing header: ")) from error
    header.pop(METADATA, None)
    tensors = {name: _read_entry(path, name, about, LENGTH_BYTES + length) for name, about in header.items()}
    return dict(sorted(tensors.items(), key=lambda item: item[1].start))


def in_pieces(array: np.ndarray, limit_bytes: int) -> Iterator[np.ndarray]:
    """Pieces of rows of an array in memory, each of at most `limit_bytes`."""
    rows = max(limit_bytes // max(array[:1].nbytes, 1), 1)
    return (array[start : start + rows] for start in range(0, len(array), rows))


def write_tensors(path: Path, tensors: Mapping[str, Any], pieces: Callable[[str], Iterable[np.ndarray]]) -> None:
    """Write a new file tensor by tensor; `pieces(name)` returns the elements of each, in order.

    `tensors` are objects with shape and dtype, by name.
    """
    header, begin = {}, 0
    for name, about in tensors.items():
        end = begin + nbytes(about)
        dtype = DTYPE_NAMES[np.dtype(about.dtype)]
        header[name] = {"dtype": dtype, "shape": list(about.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps({METADATA: {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # tensors begin at a multiple of 8
    with new_file(path) as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name, about in tensors.items():
            before = file.tell()
            for piece in pieces(name):
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
            assert file.tell() - before == nbytes(about), f"the pieces of {name} are not all of it"


def nbytes(about: Any) -> int:
    """Bytes of an object with shape and dtype."""
    return math.prod(about.shape) * np.dtype(about.dtype).itemsize


def _read_entry(path: Path, name: str, about: Mapping[str, Any], begin: int) -> Tensor:
    """A tensor from its entry in a header; data of the file begin at byte `begin`."""
    if set(about) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"tensor {quoted(name)} must have exactly dtype, shape and data_offsets")
    dtype, shape, (start, _) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
    if dtype not in DTYPES:
        raise _bad(path, f"tensor {quoted(name)} has dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if len(shape) > MOST_DIMS or math.prod(size or 1 for size in shape) * DTYPES[dtype].itemsize > MOST_BYTES:
        raise _bad(path, f"tensor {quoted(name)} has the shape {quoted(list(shape))}, which no array has")
    return Tensor(path, DTYPES[dtype], shape, begin + start)


def _bad(path: Path, reason: str) -> CheckpointError:
    reason = shown(reason, REASON_LETTERS)
    return CheckpointError(f"{path} is not a valid safetensors file: {reason}; fetch or export it again")


def _reading(path: Path, *others: type[Exception]) -> AbstractContextManager[None]:
    return errors_as(CheckpointError, f"{path} cannot be read (", ")", *others)


# ---- several files


def write_model(
    folder: Path, tensors: Mapping[str, Any], pieces: Callable[[str], Iterable[np.ndarray]], *, shard_bytes: int
) -> str:
    """Write tensors in order into files of at most `shard_bytes`, except for larger tensors; returns the text of INDEX,
    to be written after all other files."""
    groups = grouped(tensors, shard_bytes)
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    for name, group in zip(names, groups):
        write_tensors(folder / name, group, pieces)
    index = {
        "metadata": {"total_size": sum(map(nbytes, tensors.values()))},
        "weight_map": {tensor: name for name, group in zip(names, groups) for tensor in group},
    }
    return json.dumps(index, indent=1) + "\n"


def grouped(tensors: Mapping[str, Any], limit_bytes: int) -> list[dict[str, Any]]:
    """Tensors in order, in groups of at most `limit_bytes`; a larger one has its own group.

    >>> [list(group) for group in grouped({name: np.zeros(3, np.uint8) for name in "abc"}, 6)]
    [['a', 'b'], ['c']]
    """
    groups: list[dict[str, Any]] = [{}]
    held = 0
    for name, about in tensors.items():
        if groups[-1] and held + nbytes(about) > limit_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = about
        held += nbytes(about)
    return groups


def read_model(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder; only the headers of files are read.

    Raises:
        CheckpointError: the index or a file is missing, damaged, or outside of the folder.
    """
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).is_file():
            raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}; did the export finish?")
        return read_header(_checked_file(folder, SINGLE))
    homes = _read_index(folder)
    tensors: dict[str, Tensor] = {}
    for shard in sorted({*homes.values()}):
        there = read_header(_checked_file(folder, shard))
        if odd := {name for name, home in homes.items() if home == shard} ^ there.keys():
            raise CheckpointError(f"{folder / INDEX} and {shard} do not agree about {quoted(min(odd))}")
        tensors |= there
    return {name: tensors[name] for name in homes}


def read_file(folder: Path, name: str) -> dict[str, Tensor]:
    """Every tensor of a file of a folder; only its header is read. Raises CheckpointError as `read_model`."""
    if not (folder / name).is_file():
        raise CheckpointError(f"{folder} has no {name}")
    return read_header(_checked_file(folder, name))


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    with _reading(path, ValueError):
        homes = read_object(path, most=LARGEST_BYTES).get("weight_map")
    if not isinstance(homes, dict) or not all(isinstance(home, str) for home in homes.values()):
        raise CheckpointError(f"{path} is damaged: it has no weight_map from names to files")
    return homes


def _checked_file(folder: Path, name: str) -> Path:
    """A file of the folder itself; a name with a path, or a link, could be any file of the machine."""
    path = folder / name
    is_name = FILE_NAME.fullmatch(name) and name.isprintable()
    if not is_name or len(name.encode()) > NAME_BYTES:
        raise CheckpointError(
            f"{folder / INDEX} names {quoted(name)}, which is not the name of a .safetensors file in its folder"
        )
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link; put the file itself there")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    return path
