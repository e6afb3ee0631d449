"""The attention kernel that model.kernel="auto" stands for."""

import dataclasses
from collections.abc import Mapping

from parallax.config.sections import AUTO
from parallax.config.settings import Settings
from parallax.errors import ConfigError
from parallax.model.checks import check_context, check_kernel_on, check_kernel_seq
from parallax.model.kernels.cudnn import BEFORE_AMPERE, LONGEST_BIAS
from parallax.model.kernels.platforms import FASTEST_KERNEL
from parallax.sharding.activations import CONTEXT_AXIS


def chosen_kernel(settings: Settings, axis_sizes: Mapping[str, int], platform: str, kind: str) -> str:
    """The attention kernel of these settings on devices of this kind. For "auto" it is the fastest one if it supports
    the model and its rows in this form of context parallelism, otherwise "xla"."""
    if settings.model.kernel != AUTO:
        return settings.model.kernel
    seq, context, ranks = settings.data.seq, settings.layout.context, axis_sizes.get(CONTEXT_AXIS, 1)
    fastest = dataclasses.replace(settings.model, kernel=FASTEST_KERNEL.get(platform, "xla"))
    try:
        check_context(fastest, context, axis_sizes)
        check_kernel_on(fastest, platform, kind)
        check_kernel_seq(fastest, seq, context, ranks)
    except ConfigError:
        return "xla"
    unfit = platform == "gpu" and (seq > LONGEST_BIAS or any(name in kind for name in BEFORE_AMPERE))
    return "xla" if unfit else fastest.kernel
