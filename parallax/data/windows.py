"""Fixed windows of a stream of documents, as the arrays that a model reads."""

import numpy as np

from parallax.errors import LARGEST_INT32, DataError
from parallax.model.batch import IGNORED


def batch_arrays(
    ids: np.ndarray,
    counts: np.ndarray,
    ends: np.ndarray,
    *,
    segments: np.ndarray | int = 1,
    positions: np.ndarray | int = 0,
) -> dict[str, np.ndarray]:
    """The arrays of windows, or of the same columns of windows.

    The model learns to predict a document's last token, its end; the token after it belongs to another document and is
    not predicted. A document that began in an earlier window starts here as document 1 at position 0: its context is
    only in this window, so positions are the amount of context, and always below `seq`.

    Args:
        ids: [rows, seq + 1]; the last column is only a label.
        counts: [rows], number of real ids in each row; the rest is padding.
        ends: [rows, seq], whether a token is its document's last.
        segments, positions: [rows], of the first column; by default those at the start of a window.
    Returns:
        int32 [rows, seq] each. `tokens`; `labels`, the next ids or `IGNORED`; `segments`, the document's
        number in the window from 1, or 0 in padding; `positions`, from the document's start in the window.
    """
    tokens = ids[:, :-1].astype(np.int32)
    labels = ids[:, 1:].astype(np.int32)
    labels[ends] = IGNORED
    begins = np.zeros_like(ends)
    begins[:, 1:] = ends[:, :-1]
    place = np.arange(tokens.shape[1], dtype=np.int32)
    arrays = {
        "tokens": tokens,
        "labels": labels,
        "segments": _column(segments) + np.cumsum(begins, axis=1, dtype=np.int32),
        "positions": place - np.maximum.accumulate(np.where(begins, place, -_column(positions)), axis=1),
    }
    if (counts < ids.shape[1]).any():
        padding = counts[:, None] - 1
        arrays["labels"][place >= padding] = IGNORED
        for name in ("tokens", "segments", "positions"):
            arrays[name][place >= np.maximum(padding, 0)] = 0
    return arrays


def _column(of_rows: np.ndarray | int) -> np.ndarray:
    return np.atleast_1d(np.int32(of_rows))[:, None]


def as_batch(ids: np.ndarray, *, end: int = -1) -> dict[str, np.ndarray]:
    """The arrays for rows of token ids [rows, seq + 1] without padding. With an `end`, it is the last id of each
    document and stands nowhere else; without one, each row is one document.

    parallax.model.batch describes them. Raises DataError if `ids` are not rows of token ids.

    >>> as_batch(np.array([[5, 6, 7]]))["labels"].tolist()
    [[6, 7]]
    """
    ids = np.asarray(ids)
    if ids.ndim != 2 or ids.size == 0 or ids.shape[1] < 2:
        raise DataError(f"ids has shape {list(ids.shape)}; use [rows, seq + 1], with two columns or more")
    if ids.dtype.kind not in "iu":
        raise DataError(f"ids is {ids.dtype}; token ids are whole numbers")
    if ids.min() < 0 or ids.max() > LARGEST_INT32:
        raise DataError(f"ids are from {ids.min()} to {ids.max()}; token ids are 0 to {LARGEST_INT32}")
    return batch_arrays(ids, np.full(len(ids), ids.shape[1]), ids[:, :-1] == end)
