"""What the runtime says where another process is gone, or does not come: Gloo, JAX's coordination service, NCCL."""

import re
from collections.abc import Iterator

from jax.errors import JaxRuntimeError

STATUSES = ("DEADLINE_EXCEEDED", "UNAVAILABLE", "ABORTED", "CANCELLED")  # of calls from one process to another
OF_THIS_PROCESS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND", "OUT_OF_RANGE")
# Searched for in the first line alone: what follows are names of operations, and "optimization_barrier" is one.
SAYINGS = re.compile(
    r"\bgloo .*\bfailed"
    r"|coordination ?service|GetKeyValue|heartbeats?\b|\bbarrier (timed out|failed)|shutdown barrier"
    # Of NCCL's errors those of its network, not of a device, nor of what it was asked for.
    r"|nccl.*(remote process|network error|system error|remote ?error|abort|timed? ?out)",
    re.IGNORECASE,
)


def lost_process(error: BaseException) -> str | None:
    """What the runtime says of a lost process, in an error or in what that came of; None where it does not.

    >>> lost_process(JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [10.0.0.2]:1234"))
    'UNKNOWN: Gloo all-reduce failed: Connection closed by peer [10.0.0.2]:1234'
    """
    for each in _with_causes(error):
        if not isinstance(each, JaxRuntimeError):
            continue
        said = (str(each).splitlines() or [""])[0]
        if said.startswith(STATUSES) or (SAYINGS.search(said) and not said.startswith(OF_THIS_PROCESS)):
            return said
    return None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or following.__context__
    return iter(chain)
