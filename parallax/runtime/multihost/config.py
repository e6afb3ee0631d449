"""How long the processes of a job wait for each other."""

from dataclasses import dataclass, fields

from parallax.runtime.errors import ConfigError


@dataclass(frozen=True)
class DistributedConfig:
    """Seconds. With one process none of them means anything."""

    start_secs: int
    heartbeat_secs: int
    wait_secs: int
    compile_secs: int
    prepare_secs: int
    clock_secs: int

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) < 1:
                written = f"distributed.{field.name}={getattr(self, field.name)}"
                raise ConfigError(f"{written} is too short; use a number of seconds of 1 or more")
