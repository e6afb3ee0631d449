"""Activation names for remat policies: `pipeline.remat` says which named activations the backward pass keeps."""

# Names that layers give by `checkpoint_name`: outputs of products of their "mlp" and their "attention".
REMAT_POLICIES = {"elementwise": ("mlp", "attention"), "attention": ("mlp",)}
