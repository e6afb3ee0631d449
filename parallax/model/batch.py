"""Batches: four integer arrays [global_batch, seq], and their allowed values.

| array | values |
|---|---|
| `tokens` | ids from 0 to model.vocab - 1 |
| `labels` | the ids to predict, from 0 to model.vocab - 1, or `IGNORED`, which is -1 (PyTorch has -100): such a position counts neither in loss, z-loss and gradients nor in the number of tokens |
| `segments` | the document's number in the row, 0 or more; a token sees those of its own segment; `as_batch` has 0 in padding |
| `positions` | of rotary embedding, from 0; `as_batch` counts them from the document's start in the row |
| `groups` | may be left out: the number, from 0, of the group whose loss is also summed apart, as the sources of a mixture |

Functions that take a batch raise DataError for other names, shapes and dtypes, and for values outside these ranges. Values
cannot be checked inside a function that JAX traces. There a token out of range has an embedding of NaN, and a label out of
range has a loss of NaN; so loss and gradient norm are NaN, and the guard of a training step skips the update.
"""  # noqa: E501

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parallax.errors import LARGEST_INT32, DataError, nearest

IGNORED = -1  # the label of a position that does not count
BATCH_ARRAYS = ("tokens", "labels", "segments", "positions")
GROUPS = "groups"
LARGEST_POSITION = 2**24  # angles are float32, in which larger integers are not exact


def checked(
    batch: Mapping[str, Any], vocab: int, *, names: tuple[str, ...] = BATCH_ARRAYS, optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The arrays of these names as int32, and those of the `optional` names that are there; DataError if they do not
    meet the table above.

    >>> checked({"tokens": np.array([[3, 9]])}, 8, names=("tokens",))
    Traceback (most recent call last):
    parallax.errors.DataError: tokens[0, 1]=9 is out of range; use 0 to 7 (model.vocab=8)
    """
    if not isinstance(batch, Mapping):
        raise DataError(f"a batch is a dict of the arrays {', '.join(names)}, not {type(batch).__name__}")
    for name in batch:
        if name not in (*names, *optional):
            raise DataError(f"unknown array {name!r} in a batch; {nearest(str(name), (*names, *optional))}")
    for name in names:
        if name not in batch:
            raise DataError(
                f"the batch has no {name!r}; it needs {', '.join(names)}, which px.as_batch makes of rows of token ids"
            )
    ids = f"0 to {vocab - 1} (model.vocab={vocab})"
    ranges = {
        "tokens": (0, vocab - 1, ids),
        "labels": (IGNORED, vocab - 1, f"{ids}, or {IGNORED} where there is nothing to predict"),
        "segments": (0, LARGEST_INT32, f"0 to {LARGEST_INT32}"),
        "positions": (0, LARGEST_POSITION, f"0 to {LARGEST_POSITION}"),
        GROUPS: (0, LARGEST_INT32, f"0 to {LARGEST_INT32}"),
    }
    there = [*names, *(name for name in optional if name in batch)]
    arrays = {name: whole_numbers(name, batch[name], *ranges[name]) for name in there}
    shape = arrays[names[0]].shape
    for name, array in arrays.items():
        if array.shape != shape:
            raise DataError(
                f"{name} has shape {list(array.shape)}, {names[0]} has {list(shape)}; use one shape for all"
            )
    return arrays


def check_groups(arrays: Mapping[str, Any], groups: int) -> None:
    """Raise DataError unless a batch has an array of so many groups; under tracing its values are not checked."""
    import jax

    if GROUPS not in arrays:
        raise DataError(f"groups={groups}, but the batch has no array {GROUPS!r}; it holds the group of each token")
    last = 0 if isinstance(arrays[GROUPS], jax.core.Tracer) else int(arrays[GROUPS].max())
    if last >= groups:
        raise DataError(f"{GROUPS} of the batch has {last}, but groups={groups}; use 0 to {groups - 1}")


def whole_numbers(name: str, array: Any, least: int, most: int, legal: str) -> Any:
    """The array as int32; DataError unless it is a 2-D array of integers from `least` to `most`.

    `legal` describes the range in the error. Under tracing only dtype and shape are checked.
    """
    import jax  # here: commands on data start without it

    if not isinstance(array, np.ndarray | jax.Array):
        raise DataError(f"{name} must be an array of int32, not {type(array).__name__}; use np.array({name})")
    if array.dtype.kind not in "iu":
        raise DataError(f"{name} is {array.dtype}, not int32; use {name}.astype('int32') if they are whole numbers")
    if array.ndim != 2 or 0 in array.shape:
        raise DataError(f"{name} has shape {list(array.shape)}; use [global_batch, seq], each 1 or more")
    traced = isinstance(array, jax.core.Tracer)
    if traced and not np.can_cast(array.dtype, np.int32):
        raise DataError(
            f"{name} is {array.dtype}, and may not fit int32 where values are traced; use int32 from the start"
        )
    for start, values in [] if traced else pieces(array):
        wrong = (values < least) | (values > most)
        if wrong.any():
            index = np.unravel_index(wrong.argmax(), wrong.shape)
            place = ", ".join(str(first + within) for first, within in zip(start, index))
            raise DataError(f"{name}[{place}]={values[index]} is out of range; use {legal}")
    return array if array.dtype == np.int32 else array.astype(np.int32)


def pieces(array: Any) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """The pieces of an array that this process holds, each once, with the index of its first entry."""
    if isinstance(array, np.ndarray):
        yield (0,) * array.ndim, array
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield tuple(along.start or 0 for along in shard.index), np.asarray(shard.data)
