"""Text from a model, on the mesh that it lies on."""

from parallax.generate.write import check_length, complete, encode, generate
from parallax.sampling import SampleConfig

__all__ = ["SampleConfig", "check_length", "complete", "encode", "generate"]
