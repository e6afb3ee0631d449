"""What JAX was told from outside: its configuration, XLA's and libtpu's flags, and JAX's variables."""

import contextlib
import enum
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from parallax.storage import files

# Settings that may differ between the processes of a job, since no program depends on them.
OF_ONE_PROCESS = re.compile(
    r"jax_\w*visible_devices|jax_num_cpu_devices"  # the devices that each process has of its host's
    r"|jax_compilation_cache_dir|jax_dump_ir_to|jax_mtls_(cert|key|ca)_file"  # paths on its host
    r"|jax_cross_host_transfer_socket_address|jax_cross_host_transport_addresses"  # its host's addresses
    # What is told about it, as where only one process is examined.
    r"|jax_debug_log_modules|jax_logging_level|jax_log_\w+|jax_explain_cache_misses|jax_compiler_detailed_logging\w*"
    r"|jax_pprint_use_color|jax_traceback_filtering|jax_tracer_error_num_traceback_frames|jax_dump_ir_modes"
    r"|jax_include_debug_info_in_dumps"
    # Of variables that are no setting: which process this is, and where the first one is seen from here.
    r"|JAX_(PROCESS_ID|COORDINATOR_ADDRESS|COORDINATOR_BIND_ADDRESS|LOCAL_DEVICE_IDS|PARTITION_INDEX|SLICE_INDEX)"
    r"|XLA_FLAGS --xla_dump_\w+|XLA_FLAGS --xla_force_host_platform_device_count"
)
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables with many flags in each


def common_settings(environment: Mapping[str, str] = os.environ) -> dict[str, bool | int | float | str | None]:
    """All settings of JAX, XLA and libtpu that must be the same in all processes of a job, by name.

    Otherwise they compile different programs, whose collectives do not meet or whose numbers differ.
    """
    settings = {name: _plain(value) for name, value in jax.config.values.items()}
    settings |= {
        name: value
        for name, value in environment.items()
        if name.startswith("JAX_") and name.lower() not in jax.config.values
    }
    for variable in FLAGS:
        settings |= {f"{variable} {name}": value for name, value in _flags(environment.get(variable, ""))}
    return {name: value for name, value in settings.items() if not OF_ONE_PROCESS.fullmatch(name)}


def _plain(value: object) -> bool | int | float | str | None:
    if isinstance(value, enum.Enum):
        return value.name
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _flags(text: str) -> Iterator[tuple[str, str]]:
    """Names and values of flags; the last of equal names counts. XLA reads text that begins otherwise as a file.

    >>> dict(_flags("--xla_a=1 --xla_b --xla_a=2"))
    {'--xla_a': '2', '--xla_b': ''}
    """
    if text.strip() and not text.lstrip().startswith("-"):
        with contextlib.suppress(OSError, ValueError):
            text = files.read_bytes(Path(text.strip())).decode()
    for word in text.split():
        name, _, value = word.partition("=")
        yield name, value
