"""ShardedModel: a model sharded over a mesh by layout strings; results are the same on every mesh, up to rounding."""

import contextlib
import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from parallax.model.batch import checked
from parallax.model.embedding import EMBEDDINGS
from parallax.model.initial_values import Undrawable, drawn_by_numpy
from parallax.pipeline.loss_and_grads import logits_of_batch, loss_and_grads, loss_of_batch, observations
from parallax.pipeline.model_on_mesh import ModelOnMesh
from parallax.sharding.activations import SHARED_ROWS
from parallax.sharding.compiler import RUN_ONCE
from parallax.sharding.layout import Layout


class ShardedModel(ModelOnMesh):
    """Parameters, loss, gradients and logits of a model on a mesh; for its arguments see ModelOnMesh."""

    def __repr__(self) -> str:
        return repr(self.plan)

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    def replace(self, *, mesh: Any = None, measures: bool = False, **sections: Any) -> "ShardedModel":
        """The same model on another mesh, or with other sections of its settings."""
        settings = dataclasses.replace(self.settings, **{"model": self.config, **sections})
        return ShardedModel(settings, self.mesh if mesh is None else mesh, measures=measures)

    def init(self, seed: int) -> Any:
        """Initial parameters, drawn in float32; bitwise the same on every mesh."""
        key = jax.random.key(seed)
        if self.is_simulated:
            with contextlib.suppress(Undrawable):
                return self._drawn_by_numpy(key)
        options = RUN_ONCE if self.is_simulated else None
        return jax.jit(self._declare, out_shardings=self.shardings, compiler_options=options)(key)

    def _declare(self, key: Array) -> Any:
        """Initial parameters as whole arrays."""
        drawn = nn.meta.unbox(self.parts.declare(key))
        return jax.tree.map(lambda x, like: x.astype(like.dtype), drawn, self.shapes)

    def _drawn_by_numpy(self, key: Array) -> Any:
        shardings, tree = jax.tree.flatten(self.shardings)
        values = drawn_by_numpy(jax.make_jaxpr(self._declare)(key), key)
        pairs = zip(values, shardings, strict=True)
        return tree.unflatten([jax.make_array_from_callback(x.shape, to, x.__getitem__) for x, to in pairs])

    def loss_and_grad(self, params: Any, batch: Mapping[str, Array], noise: Array | None = None):
        """(metrics, gradients). Metrics: "loss", the mean cross-entropy in nats over the global batch's labels that are
        not ignored; "tokens", their number; with a z-coefficient "z_loss", which the gradients include.

        `batch` holds int32 arrays [global_batch, seq]: tokens, labels, segments, positions, as model.batch has them;
        labels are -1 where there is nothing to predict. `noise` is int32 [2], (seed, step) of dropout; None disables
        it. Gradients are float32, sharded like their parameters; those of parameters that are not trained are empty.
        """
        return self.loss_grads_and_statistics(params, self.checked(batch), noise)[:2]

    def loss_grads_and_statistics(
        self, params: Any, batch: Mapping[str, Array], noise: Array | None = None, groups: int = 0
    ):
        """The same for a batch as `checked` returns it, and what the parameters of `plan.statistics` follow from.

        They are by name, and sharded like them: the largest magnitudes of 8-bit products, and how many tokens each
        expert got.
        """
        of_statistics = {name: row.at_rest.spec(self.mesh) for name, row in self.plan.statistics.items()}
        out = P(), self.on_mesh["in_specs"][0], of_statistics
        local = jax.shard_map(partial(loss_and_grads, self, groups=groups), out_specs=out, **self.on_mesh)
        return local(params, batch, noise)

    def loss(self, params: Any, batch: Mapping[str, Array], groups: int = 0) -> dict[str, Array]:
        """The metrics of `loss_and_grad`, forward only and without dropout.

        With `groups`, the batch's array of this name says to which of them a token belongs, and "group_losses" are the
        sums [2, groups] of both losses of a token, "group_tokens" the numbers of labels.
        """
        local = jax.shard_map(partial(loss_of_batch, self, groups=groups), out_specs=P(), **self.on_mesh)
        return local(params, self.checked(batch, groups), None)

    def activations(self, params: Any, batch: Mapping[str, Array], noise: Array | None = None) -> Array:
        """Observations of embedding and layers in the forward pass of `loss_and_grad`, see observations.py."""
        local = jax.shard_map(partial(observations, self), out_specs=P(), **self.on_mesh)
        return local(params, self.checked(batch), noise)

    def logits(
        self, params: Any, tokens: Array, segments: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Logits [global_batch, seq, vocab] in float32 of int32 tokens [global_batch, seq]; jax.grad goes through it.

        Logits of the vocab's padding are included and are -inf. Without `segments` each row is one document; without
        `positions` they count from 0 in each row.
        """
        given = {"tokens": tokens, "segments": segments, "positions": positions}
        given = {name: array for name, array in given.items() if array is not None}
        batch = checked(given, self.config.vocab, names=tuple(given))
        tokens = batch["tokens"]
        self.check_batch(*tokens.shape, microbatches=1)
        self._check_shared_rows(len(tokens))
        counted = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=tokens.dtype), tokens.shape)
        batch = {"labels": tokens, "segments": jnp.ones_like(tokens), "positions": counted} | batch
        whole = self._logits_layout.spec(self.mesh)
        return jax.shard_map(partial(logits_of_batch, self), out_specs=whole, **self.on_mesh)(params, batch, None)

    @property
    def _logits_layout(self) -> Layout:
        form = EMBEDDINGS[self.layout.embedding]
        ids = form.ids(SHARED_ROWS)
        return Layout((*ids.names, "vocab"), (*ids.axes, form.vocab_axes))
