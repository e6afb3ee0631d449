"""Which processes of a job are slow, and in what, by the seconds that each spends for itself in a step."""

import numpy as np

from parallax.storage.run_files import OWN_PARTS

SLOW_IN = dict(
    zip(OWN_PARTS, ("waiting for its data", "on the host", "copying checkpoints", "writing checkpoints"), strict=True)
)


def median(means: np.ndarray) -> np.ndarray:
    """The median of all processes by part; of two processes in the middle, the faster one's."""
    return np.sort(means, axis=0)[(len(means) - 1) // 2]


def slow_processes(means: np.ndarray, share: float) -> dict[int, str]:
    """The slow processes, each with the part in which it loses most: more than the median by this share of a step.

    Args:
        means: mean seconds of a step, a row for each process; a column for each of OWN_PARTS, and one for the whole.

    >>> slow_processes(np.array([[0, 0.1, 0, 0, 1], [0.4, 0.1, 0, 0, 1], [0, 0.1, 0, 0, 1]]), share=0.2)
    {1: 'data'}
    """
    lost = (means - median(means))[:, :-1]
    return {
        rank: OWN_PARTS[int(np.argmax(lost[rank]))]
        for rank in range(len(means))
        if np.max(lost[rank]) > share * means[rank, -1]
    }
