"""Which documents are held out for evaluation."""

import numpy as np

from parallax.runtime.errors import ConfigError

SPLITS = ("train", "eval", "all")


def documents_of_split(hashes: np.ndarray, *, split: str, eval_fraction: float) -> np.ndarray:
    """A mask of the documents in `split`.

    Held out are the documents with the least hashes of their text: the same ones however the corpus was cut
    into shards, almost the same ones when documents are added, and copies of a document stay together. "all" are
    the documents of both.

    Args:
        hashes: of the text of every document, in order.
        eval_fraction: share of the documents, at least one; 0 holds out none.
    Raises:
        ConfigError: there are too few documents to hold one out, or none is held out and `split` is "eval".
    """
    if split == "all":
        return np.ones(len(hashes), bool)
    if eval_fraction == 0:
        if split == "eval":
            raise ConfigError(
                "data.eval_fraction=0 holds out no document, so there is nothing to evaluate on; raise it"
            )
        return np.ones(len(hashes), bool)
    if len(hashes) < 2:
        raise ConfigError(
            f"data.eval_fraction={eval_fraction} holds out whole documents, but the corpus has "
            f"{len(hashes)}; give it two or more, or use data.eval_fraction=0"
        )
    held_out = min(max(round(eval_fraction * len(hashes)), 1), len(hashes) - 1)
    mask = np.zeros(len(hashes), bool)
    mask[np.argsort(hashes, kind="stable")[:held_out]] = True
    return mask if split == "eval" else ~mask
