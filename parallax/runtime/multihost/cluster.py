"""Whether JAX may find a cluster of which this process is a part."""

from collections.abc import Mapping
from pathlib import Path


def started_by_scheduler(environment: Mapping[str, str]) -> int:
    """The processes that SLURM or Open MPI has started, of which this is one; 1 where neither has.

    >>> started_by_scheduler({"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "n[1-4]"})
    4
    """
    schedulers = {
        "SLURM_NTASKS": ("SLURM_PROCID", "SLURM_STEP_NODELIST"),  # without a step, this is the batch script alone
        "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK",),
    }
    for count, needed in schedulers.items():
        if all(name in environment for name in (count, *needed)):
            return int(environment[count])
    return 1


def has_tpu(environment: Mapping[str, str]) -> bool:
    """Whether this host has TPU chips, and may be one of a pod's."""
    wanted = environment.get("JAX_PLATFORMS", "tpu").startswith("tpu")
    chips = any(Path(name).exists() for name in ("/dev/accel0", "/dev/vfio/0"))
    return wanted and (chips or "TPU_WORKER_HOSTNAMES" in environment)
