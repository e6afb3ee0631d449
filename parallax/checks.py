"""What a model, a mesh and a schedule must agree on."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from parallax.errors import ConfigError, divisors
from parallax.layers.kernels import KERNELS, LANES, widest_head
from parallax.model import ModelConfig
from parallax.schedules import Schedule


def check_divides(model: ModelConfig, axis_sizes: Mapping[str, int]) -> None:
    """Raise ConfigError where a model's counts do not divide over the mesh."""
    if model.vocab < 2:
        raise ConfigError(f"model.vocab={model.vocab} must be 2 or more; 0 is for train.py, which asks the tokenizer.")
    for key, axis in (("heads", "tp"), ("d_ff", "tp"), ("d_model", "tp"), ("vocab", "tp")):
        size, ranks = getattr(model, key), axis_sizes[axis]
        if size % ranks:
            near = -(-size // ranks) * ranks
            legal = ", ".join(map(str, divisors(size)))
            raise ConfigError(
                f"model.{key}={size} does not divide over mesh.{axis}={ranks}; "
                f"use {axis} in {{{legal}}} or {key}={near}."
            )
    if model.attention == "gqa" and model.kv_heads % axis_sizes["tp"] and axis_sizes["tp"] % model.kv_heads:
        raise ConfigError(
            f"model.kv_heads={model.kv_heads} and mesh.tp={axis_sizes['tp']}: one must divide the other; "
            f"use kv_heads in {{{', '.join(map(str, divisors(axis_sizes['tp'])))}}} or a multiple of tp."
        )


def check_stages(model: ModelConfig, schedule: Schedule) -> None:
    """Raise ConfigError where there are more stages than layers."""
    if model.layers < schedule.stages:
        virtual = f" x {schedule.virtual} stages on each" if schedule.virtual > 1 else ""
        ranks = model.layers // schedule.virtual
        fewer = f", or pp={ranks} or less" if ranks else ""
        raise ConfigError(
            f"model.layers={model.layers} is less than mesh.pp={schedule.ranks}{virtual}; "
            f"use layers={schedule.stages} or more{fewer}."
        )


def check_kernel(model: ModelConfig, mesh: Any) -> None:
    """Raise ConfigError where the mesh's devices do not have the attention kernel, or it not the model's dtype or width
    of heads. A mesh of no devices has them all: who knows what it stands for asks `check_kernel_on`."""
    if model.kernel == "cudnn" and model.dtype != "bfloat16":
        raise ConfigError(
            f"model.kernel='cudnn' needs model.dtype='bfloat16', not {model.dtype!r}; or use kernel='xla'."
        )
    if isinstance(mesh, Mesh):
        device = mesh.devices.flat[0]
        check_kernel_on(model, device.platform, device.device_kind)
    else:
        check_kernel_on(model, KERNELS[model.kernel].native[0], "these devices")


def check_kernel_on(model: ModelConfig, platform: str, kind: str) -> None:
    """Raise ConfigError where devices of this kind do not have the attention kernel, or not for heads so wide."""
    runs = KERNELS[model.kernel]
    if platform not in runs.native + runs.interpreted:
        needs = " or ".join(f"{name.upper()}s" for name in runs.native)
        tried = "".join(f", or {name.upper()}s to try it on" for name in runs.interpreted)
        fit = ", ".join(repr(name) for name, other in KERNELS.items() if platform in other.native)
        raise ConfigError(
            f"model.kernel={model.kernel!r} needs {needs}{tried}, and these are {platform.upper()}s ({kind}); "
            f"use kernel in {{{fit}}}."
        )
    width, widest = model.d_head + model.d_rope * (model.attention == "mla"), widest_head(kind)
    if model.kernel == "cudnn" and (width % 8 or width > widest):
        raise ConfigError(
            f"model.kernel='cudnn' on {kind} takes heads whose width is a multiple of 8, at most {widest}; these are "
            f"{width} wide (model.d_head={model.d_head}{f' + d_rope={model.d_rope}' * (model.attention == 'mla')}); "
            f"use kernel='xla'."
        )


def check_kernel_seq(model: ModelConfig, seq: int) -> None:
    """Raise ConfigError where the attention kernel cannot do windows of `seq` tokens."""
    if model.kernel == "splash" and seq % LANES:
        more = -(-seq // LANES) * LANES
        raise ConfigError(
            f"data.seq={seq} is not a multiple of {LANES}, the least block of model.kernel='splash'; "
            f"use seq={more}, or kernel='xla'."
        )
