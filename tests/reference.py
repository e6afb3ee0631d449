"""What the model's loss is, written plainly: no mesh, no executor, no chunks; and its gradient by jax.grad."""

import copy
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from parallax.model.batch import IGNORED
from parallax.model.context import Context, causal_mask
from parallax.model.embedding import EMBEDDINGS
from parallax.model.families import FAMILIES
from parallax.model.rope import Rope
from parallax.model.transformer import Parts
from parallax.pipeline import Arrangement
from parallax.sharding.activations import ROWS, activation


def plain_parts(model):
    """The model's modules for one device; with no axis bound, the strings cut nothing."""
    return Parts.build(
        model, activation("d_model/tp"), FAMILIES["column_row"], EMBEDDINGS["vocab_parallel"], "kv_heads", ROWS
    )


def plain_logits(model, params, batch):
    """Logits of a batch [B, S] in float32."""
    parts, rows = plain_parts(model), jnp.arange(len(batch["tokens"]))
    # With a mask attention is jax.nn.dot_product_attention, which knows no blocks.
    mask = causal_mask(batch["segments"])
    context = Context(Rope(model).tables(batch["positions"]), rows, None, mask_B1ST=mask)
    x = parts.embedding.apply({"params": params["embedding"]}, batch["tokens"], rows, None)
    layer = lambda block, weights, x, _: (block.apply({"params": weights}, x, context), None)  # noqa: E731
    x, _ = parts.scan(layer, x, params["blocks"], None, Arrangement((0,), model.kinds).turns[:, 0])
    hidden = parts.head.apply({"params": params["head"]}, x)
    table = params["embedding" if model.tied else "head"]["table"]
    return jnp.einsum("BSD,VD->BSV", hidden, table, preferred_element_type=jnp.float32)


def plain_losses(model, params, batch, z_coefficient):
    """(cross-entropy, z-loss), each the mean over the labels that are not ignored."""
    logits, labels = plain_logits(model, params, batch), batch["labels"]
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    label_logits = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    real = labels != IGNORED
    mean = lambda losses: jnp.sum(losses * real) / jnp.sum(real)  # noqa: E731
    return mean(logsumexp - label_logits), mean(z_coefficient * logsumexp**2)


def plain_losses_and_grad(model, params, batch, z_coefficient=0.0):
    """Both losses, and the gradient of their sum, in float64.

    So that a tolerance holds one rounding, the tested one. With two rows a microbatch XLA multiplies in small loops
    that add in order, on one device as on eight: the gradient of MLA's `up_k`, what is left of a softmax's
    cancellation, is then 7e-6 from these, the plain model's in float32 4e-6, and the two up to 1.07e-5 apart.
    """

    def total(params):
        losses = plain_losses(exact, params, batch, z_coefficient)
        return sum(losses), losses

    exact = copy.copy(model)
    object.__setattr__(exact, "dtype", "float64")  # which a config refuses
    params, batch = jax.tree.map(np.asarray, (params, batch))
    with jax.enable_x64(True), mock.patch.object(jnp, "float32", jnp.float64):  # layers and softmax name float32
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        (_, losses), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
        assert {leaf.dtype for leaf in jax.tree.leaves((losses, grads))} == {np.dtype("float64")}
        return jax.tree.map(np.asarray, (losses, grads))
