"""The attention kernel that model.kernel="auto" stands for."""

import dataclasses
from collections.abc import Mapping

from parallax.config.sections import AUTO
from parallax.config.settings import Settings
from parallax.errors import ConfigError
from parallax.hardware.chips import BEFORE_AMPERE
from parallax.model.checks import check_context, check_kernel_on, check_kernel_seq
from parallax.model.kernels.cudnn import LONGEST_BIAS
from parallax.model.kernels.platforms import FASTEST_KERNELS
from parallax.sharding.activations import CONTEXT_AXIS


def chosen_kernel(settings: Settings, axis_sizes: Mapping[str, int], platform: str, kind: str) -> str:
    """The attention kernel of these settings on devices of this kind. For "auto" it is the fastest one that supports
    the model and its rows in this form of context parallelism, or "xla"."""
    if settings.model.kernel != AUTO:
        return settings.model.kernel
    kernels = FASTEST_KERNELS.get(platform, ())
    return next((kernel for kernel in kernels if _is_fit(kernel, settings, axis_sizes, platform, kind)), "xla")


def _is_fit(kernel: str, settings: Settings, axis_sizes: Mapping[str, int], platform: str, kind: str) -> bool:
    seq, context, ranks = settings.data.seq, settings.layout.context, axis_sizes.get(CONTEXT_AXIS, 1)
    model = dataclasses.replace(settings.model, kernel=kernel)
    try:
        check_context(model, context, axis_sizes)
        check_kernel_on(model, platform, kind)
        check_kernel_seq(model, seq, context, ranks)
    except ConfigError:
        return False
    if platform != "gpu":
        return True
    if model.dtype != "bfloat16" or any(name in kind for name in BEFORE_AMPERE):
        return False
    return kernel != "cudnn" or seq <= LONGEST_BIAS
