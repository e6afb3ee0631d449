"""Several processes of one job: how they find each other, agree, wait no longer than they may, and end together.

JAX connects the processes and runs their collectives. Beside it runs a line of our own between process 0 and each of
the others: over it they compare what must be equal, say where they are, and hear at once when one of them ends. With
one process all of this does nothing.
"""

from parallax.runtime.multihost.job import (
    agree,
    at,
    check_shared,
    compare,
    connect,
    is_first,
    is_shared,
    join,
    leave,
    log_to,
    prepare_once,
    reporting,
    several,
    wait_for_all,
)
from parallax.runtime.multihost.place import FLAGS, Place, read_place

__all__ = [
    "FLAGS",
    "Place",
    "agree",
    "at",
    "check_shared",
    "compare",
    "connect",
    "is_first",
    "is_shared",
    "join",
    "leave",
    "log_to",
    "prepare_once",
    "read_place",
    "reporting",
    "several",
    "wait_for_all",
]
