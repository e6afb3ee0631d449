"""The attention kernels, and the platforms on which each runs."""

from typing import NamedTuple


class Runs(NamedTuple):
    """Platforms (JAX's names) on which a kernel runs natively, and those that only interpret it, slowly."""

    native: tuple[str, ...]
    interpreted: tuple[str, ...] = ()

    @property
    def platforms(self) -> tuple[str, ...]:
        """All platforms on which it can run."""
        return self.native + self.interpreted


# The values of model.kernel and, only here, the platforms on which each runs.
ATTENTION_KERNELS = {
    "xla": Runs(("cpu", "gpu", "tpu")),
    "cudnn": Runs(("gpu",)),
    "splash": Runs(("tpu",), interpreted=("cpu",)),
    "triton": Runs(("gpu",), interpreted=("cpu",)),
}
# What model.kernel="auto" stands for on each platform: the first that supports the model and its rows; elsewhere "xla".
FASTEST_KERNELS = {"gpu": ("cudnn", "triton"), "tpu": ("splash",)}
