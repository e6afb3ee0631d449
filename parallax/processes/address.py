"""The address of this process in its job, from flags or the environment."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from parallax.errors import ConfigError

# flag: (environment variable, meaning)
ADDRESS_FLAGS = {
    "distributed.coordinator": ("PARALLAX_COORDINATOR", "host:port of process 0, to which all processes connect"),
    "distributed.num-processes": ("PARALLAX_NUM_PROCESSES", "number of processes in the job"),
    "distributed.process-id": ("PARALLAX_PROCESS_ID", "number of this process, from 0"),
}
VARIABLES = tuple(variable for variable, _ in ADDRESS_FLAGS.values())
TOKEN = "PARALLAX_JOB_TOKEN"  # a secret that the processes of one job share; a launcher creates one for each job
LOOPBACK = ("localhost", "127.0.0.1")


class ProcessAddress(NamedTuple):
    """Number of this process in its job, and the `host`:`port` of process 0."""

    host: str
    port: int
    processes: int
    process: int
    token: str

    @property
    def coordinator(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether the job runs on one machine and needs no other network."""
        return self.host in LOOPBACK


def read_address(flags: Mapping[str, str | None], environment: Mapping[str, str] = os.environ) -> ProcessAddress | None:
    """The address from flags or, if there are none, from the environment; None if neither has it.

    Raises:
        ConfigError: some of the three values are missing, or one is invalid.
    """
    written, missing = {}, []
    for flag, (variable, _) in ADDRESS_FLAGS.items():
        if flags.get(flag) is not None:
            written[flag] = (f"--{flag}", flags[flag])
        elif environment.get(variable):
            written[flag] = (variable, environment[variable])
        else:
            missing.append(f"--{flag} (or {variable})")
    if not written:
        return None
    if missing:
        given = ", ".join(f"{name}={value}" for name, value in written.values())
        raise ConfigError(f"{given} without {', '.join(missing)}; a process needs all three, or none to run alone")
    host, port = _address(*written["distributed.coordinator"])
    processes = _whole(*written["distributed.num-processes"], least=1)
    process = _whole(*written["distributed.process-id"], least=0)
    if process >= processes:
        name, value = written["distributed.process-id"]
        raise ConfigError(f"{name}={value} is not one of {processes} processes; use 0 to {processes - 1}")
    return ProcessAddress(host, port, processes, process, environment.get(TOKEN, ""))


def _address(name: str, value: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s/]+):(\d{1,5})", value)
    if not match or not 0 < int(match[2]) < 65536:
        raise ConfigError(f"{name}={value!r} is not an address; write host:port of process 0, as in 10.0.0.2:8476")
    return match[1].strip("[]"), int(match[2])


def _whole(name: str, value: str, *, least: int) -> int:
    if not re.fullmatch(r"\d{1,7}", value) or int(value) < least:
        raise ConfigError(f"{name}={value!r} must be a whole number of {least} or more")
    return int(value)
