"""What the processes of one job must do alone or agree on."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
    """Whether this process writes the run's files, on behalf of all."""
    return jax.process_index() == 0


def agree(text: str) -> str:
    """The first process's text, in all of them; texts must have the same number of ASCII characters."""
    if jax.process_count() == 1:
        return text
    codes = multihost_utils.broadcast_one_to_all(np.frombuffer(text.encode("ascii"), np.uint8))
    return np.asarray(codes).tobytes().decode("ascii")


def wait_for_all(what: str) -> None:
    """Go on when every process has come as far as `what`."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)
