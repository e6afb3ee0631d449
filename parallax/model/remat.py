"""What a layer marks as dear to make again."""

from jax import Array
from jax.ad_checkpoint import checkpoint_name

# What the backward pass finds kept, for each `pipeline.remat` that makes some again, and not all or none.
KEPT = {"elementwise": ("mlp", "attention"), "attention": ("mlp",)}


def keep(x: Array, *, of: str) -> Array:
    """The same array, marked as a product "of" the layer's "mlp" or "attention"."""
    return checkpoint_name(x, of)
