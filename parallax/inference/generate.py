"""Generation of token ids after prompts, and of text after text."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.config.sections import ModelConfig, SampleConfig
from parallax.data.tokenizer import Tokenizer
from parallax.inference.decode import Decoder, Prompts
from parallax.inference.sample import noise_keys, sample_tokens
from parallax.model.checks import check_window
from parallax.pipeline import ShardedModel
from parallax.runtime.errors import ConfigError
from parallax.sharding.activations import TOKEN_AXES

NO_END = -1  # no token has this id


def complete(model: ShardedModel, params: Any, tokenizer: Tokenizer, config: SampleConfig) -> str:
    """The prompt and the generated text: `config.tokens` tokens, or up to the document's end."""
    prompt = encode(tokenizer, config.prompt)
    (written,) = generate(model, params, [prompt], config, end=tokenizer.end, vocab=tokenizer.vocab)
    return tokenizer.decode([*prompt, *written])


def encode(tokenizer: Tokenizer, prompt: str) -> np.ndarray:
    """Ids that begin a document, then those of a prompt; ConfigError if there are none, or it is not valid text."""
    try:
        ids = np.array([*tokenizer.begin, *tokenizer.encode(prompt)], np.int32)
    except UnicodeEncodeError as error:
        raise ConfigError(f"sample.prompt={prompt!r} is not text: {error.reason}; write it in UTF-8") from error
    if len(ids) == 0:
        raise ConfigError(f"sample.prompt={prompt!r} has no tokens; give it at least one character")
    return ids


@jax.enable_x64(False)
def generate(
    model: ShardedModel,
    params: Any,
    prompts: Sequence[Sequence[int]],
    config: SampleConfig,
    *,
    end: int | None = None,
    vocab: int | None = None,
) -> list[np.ndarray]:
    """Continue each prompt of token ids by `config.tokens` ids, or up to `end`, which is left out.

    Ids of `vocab` and above, which a padded vocab has, are never chosen. The noise of a row depends only on
    `config.seed`, the row and the position, so that the text is the same on every mesh; `config.prompt` is not read.
    Compiled once for each length of the longest prompt, number of prompts, and config except its seed.
    """
    _check_ids(prompts, model.model.vocab)
    check_length(model.model, prompts, config)
    how = dataclasses.replace(config, prompt="", seed=0)
    end = NO_END if end is None else end
    batch = left_padded(prompts, multiple=math.prod(model.axis_sizes.get(axis, 1) for axis in TOKEN_AXES))
    key = jax.random.key(config.seed)
    written = np.asarray(_write_ids(params, batch, key, model=model, config=how, end=end, vocab=vocab))
    return [_before_end(ids, end) for ids in written[: len(prompts)]]


def check_length(model: ModelConfig, prompts: Sequence[Sequence[int]], config: SampleConfig) -> None:
    """Raise ConfigError if a text would be longer than the model's attention supports."""
    longest = max(map(len, prompts))
    key = f"a prompt of {longest} tokens and sample.tokens={config.tokens} make a text whose length"
    check_window(model, longest + config.tokens, key)


def left_padded(prompts: Sequence[Sequence[int]], *, multiple: int) -> Prompts:
    """Prompts that all end in the last column, in a multiple of `multiple` rows; additional rows repeat the first.

    >>> left_padded([[5, 6], [7]], multiple=2).ids_BS.tolist()
    [[5, 6], [0, 7]]
    """
    rows = [*prompts, *[prompts[0]] * (-len(prompts) % multiple)]
    longest = max(map(len, rows))
    empty_B = np.array([longest - len(row) for row in rows], np.int32)
    ids_BS = np.array([[0] * (longest - len(row)) + list(row) for row in rows], np.int32)
    return Prompts(ids_BS, empty_B)


@partial(jax.jit, static_argnames=("model", "config", "end", "vocab"))
def _write_ids(
    params: Any, prompts: Prompts, key: Array, *, model: ShardedModel, config: SampleConfig, end: int, vocab: int | None
) -> Array:
    def pick(key: Array, logits_BV: Array, rows_B: Array, positions_B: Array) -> Array:
        known_BV = jnp.where(jnp.arange(logits_BV.shape[1])[None] < (vocab or model.model.vocab), logits_BV, -jnp.inf)
        return sample_tokens(known_BV, noise_keys(key, rows_B, positions_B), config)

    decoder = Decoder(model.model, model.layouts, model.mesh, model.plan.rounded_to)
    ids_BN = decoder.write(params, prompts, key, pick, tokens=config.tokens, end=end)
    # Every process of a job gets all rows.
    return jax.lax.with_sharding_constraint(ids_BN, NamedSharding(model.mesh, P()))


def _before_end(ids_N: np.ndarray, end: int) -> np.ndarray:
    ends = np.flatnonzero(ids_N == end)
    return ids_N[: ends[0]] if len(ends) else ids_N


def _check_ids(prompts: Sequence[Sequence[int]], vocab: int) -> None:
    if len(prompts) == 0:
        raise ConfigError("there are no prompts; give at least one")
    for row, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.size == 0:
            raise ConfigError(f"prompt {row} has no tokens; give it at least one")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ConfigError(
                f"prompt {row} is {ids.dtype} of shape {list(ids.shape)}; a prompt is a list of whole token ids"
            )
        if not 0 <= ids.min() <= ids.max() < vocab:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise ConfigError(
                f"prompt {row} has token id {wrong}; the model knows 0 to {vocab - 1} (model.vocab={vocab})"
            )
