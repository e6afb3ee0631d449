"""What a model, a mesh and a schedule must agree on."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from parallax.errors import ConfigError, divisors
from parallax.layers.kernels import LANES
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
    """Raise ConfigError where the mesh's devices do not have the attention kernel, or it not the model's dtype."""
    if model.kernel == "xla":
        return
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else None
    if model.kernel == "splash":
        _check_splash(model, platform)
    if model.kernel == "cudnn":
        _check_cudnn(model, platform)


def check_kernel_seq(model: ModelConfig, seq: int) -> None:
    """Raise ConfigError where the attention kernel cannot do windows of `seq` tokens."""
    if model.kernel == "splash" and seq % LANES:
        more = -(-seq // LANES) * LANES
        raise ConfigError(
            f"data.seq={seq} is not a multiple of {LANES}, the least block of model.kernel='splash'; "
            f"use seq={more}, or kernel='xla'."
        )


def _check_splash(model: ModelConfig, platform: str | None) -> None:
    if platform not in ("tpu", "cpu", None):
        raise ConfigError(
            f"model.kernel='splash' needs TPUs, or CPUs to try it on, the mesh has devices of {platform!r}; "
            f"use kernel='xla'."
        )


def _check_cudnn(model: ModelConfig, platform: str | None) -> None:
    if model.dtype != "bfloat16":
        raise ConfigError(
            f"model.kernel='cudnn' needs model.dtype='bfloat16', not {model.dtype!r}; or use kernel='xla'."
        )
    if platform not in ("gpu", None):
        raise ConfigError(f"model.kernel='cudnn' needs GPUs, the mesh has devices of {platform!r}; use kernel='xla'.")
