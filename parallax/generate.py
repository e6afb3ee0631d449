"""Text from a model, on the mesh that it lies on."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from parallax.errors import ConfigError
from parallax.sampling import SampleConfig, choose
from parallax.sharded_model import ShardedModel
from parallax.tokenizer import Tokenizer

__all__ = ["SampleConfig", "complete"]


def complete(model: ShardedModel, params: Any, tokenizer: Tokenizer, config: SampleConfig) -> str:
    """The prompt and what the model writes behind it: `config.tokens` tokens, or to the document's end."""
    prompt = tokenizer.encode(config.prompt)
    if len(prompt) == 0:
        raise ConfigError("sample.prompt='' has no tokens; give it at least one character")
    sizes = model.axis_sizes
    length = len(prompt) + config.tokens
    # Each row is the same text: a batch must have one for every device that shares the rows.
    ids = np.zeros((sizes["dp"] * sizes["pp"], math.ceil(length / sizes["tp"]) * sizes["tp"]), np.int32)
    ids[:, : len(prompt)] = prompt
    next_token = jax.jit(lambda *args: _next_token(model, config, *args))
    for at in range(len(prompt), length):
        token = int(next_token(params, ids, at, jax.random.key(config.seed)))
        if token == tokenizer.end:
            return tokenizer.decode(ids[0, :at])
        ids[:, at] = token
    return tokenizer.decode(ids[0, :length])


def _next_token(
    model: ShardedModel, config: SampleConfig, params: Any, ids_BS: Array, at: Array, key: Array
) -> Array:
    """The token for position `at`, from the logits of the one before it."""
    positions_BS = jnp.broadcast_to(jnp.arange(ids_BS.shape[1], dtype=jnp.int32), ids_BS.shape)
    batch = {"tokens": ids_BS, "segments": jnp.ones_like(ids_BS), "positions": positions_BS}
    logits_BSV = model.logits(params, batch)
    logits_BV = jax.lax.dynamic_index_in_dim(logits_BSV, at - 1, axis=1, keepdims=False)[:1]
    return choose(logits_BV, jax.random.fold_in(key, at), config)[0]
