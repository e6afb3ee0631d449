"""What a run needs, computed before it runs: parameters, bytes on each device, FLOPs for each token."""

from parallax.analysis.budget.counts import (
    COMPONENTS,
    FLOPS_PER_WEIGHT,
    bytes_on_device,
    component_of,
    flops_per_token,
    matmul_parameters,
    parameters_by_component,
    qk_width,
)
from parallax.analysis.budget.held import Memory, memory

__all__ = [
    "COMPONENTS",
    "FLOPS_PER_WEIGHT",
    "Memory",
    "bytes_on_device",
    "component_of",
    "flops_per_token",
    "matmul_parameters",
    "memory",
    "parameters_by_component",
    "qk_width",
]
