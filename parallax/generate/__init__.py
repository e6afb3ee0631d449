"""Text from a model, on the mesh that it lies on."""

from parallax.generate.write import complete, encode, generate
from parallax.sampling import SampleConfig

__all__ = ["SampleConfig", "complete", "encode", "generate"]
