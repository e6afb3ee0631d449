"""Generation of token ids after prompts, and of text after text."""

import dataclasses
import itertools
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
from parallax.data.tokenizer import Tokenizer, with_begin
from parallax.errors import ConfigError, check_utf8, quoted
from parallax.inference.decode import Decoder, Prompts
from parallax.inference.sample import noise_keys, sample_tokens
from parallax.model.rope import Rope
from parallax.pipeline import ShardedModel
from parallax.sharding.activations import TOKEN_AXES
from parallax.sharding.parameter import in_32_bits


def complete(
    model: ShardedModel,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[np.ndarray],
    config: SampleConfig,
    *,
    ends: Sequence[int],
    stop: Sequence[str] = (),
) -> list[str]:
    """Each prompt, of `encode`, with the text generated after it: `config.tokens` tokens, or up to one of `ends` or the
    first of the texts `stop`, which are left out. A text that is one token, or the name of a special token, ends the
    generation, too; others only cut the text."""
    ids_of_stop = (id_of(tokenizer, text) for text in stop)
    ends = [*ends, *(number for number in ids_of_stop if number is not None)]
    written = generate(model, params, prompts, config, ends=ends, vocab=tokenizer.vocab)
    decode = partial(tokenizer.decode, special_tokens=config.special_tokens)
    texts = [(decode(prompt), decode([*prompt, *ids])) for prompt, ids in zip(prompts, written)]
    return [_before_stop(lead, text, stop) for lead, text in texts]


def encode(tokenizer: Tokenizer, prompt: str, *, special_tokens: str = "text", name: str = "prompt") -> np.ndarray:
    """Ids that begin a document, then those of a prompt; ConfigError, with the prompt's `name`, if there are none, or
    it is not valid text."""
    check_text(name, prompt)
    ids = with_begin(tokenizer, tokenizer.encode(prompt, special_tokens=special_tokens))
    if len(ids) == 0:
        raise ConfigError(f"{name}={prompt!r} has no tokens; give it at least one character")
    return ids


def id_of(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of a text that is a single token, or the name of a special one; None for other texts.

    >>> from parallax.data.tokenizer import Bytes
    >>> id_of(Bytes(), "a"), id_of(Bytes(), "<|endoftext|>"), id_of(Bytes(), "ab")
    (97, 256, None)
    """
    check_text("stop", text)
    if not text:
        raise ConfigError("stop='' holds no text; leave it out, or write at least one character")
    ids = tokenizer.encode(text)
    if len(ids) == 1 and tokenizer.decode(ids) == text:
        return int(ids[0])
    return tokenizer.special_id(text)


def check_text(name: str, text: Any) -> None:
    """Raise ConfigError unless `text` is a text that UTF-8 can hold."""
    if not isinstance(text, str):
        raise ConfigError(f"{name}={quoted(text)} is not a text; write it in quotes")
    check_utf8(ConfigError, f"{name}={text!r}", text)


def stays_text(tokenizer: Tokenizer, prompts: Sequence[str], special_tokens: str) -> str:
    """A sentence on special tokens that prompts spell and that stay text; "" if there are none."""
    count = sum(tokenizer.spelled(prompt).total() for prompt in prompts) if special_tokens == "text" else 0
    many = f"{count} special token{'s'[: count > 1]} of the tokenizer"
    return f"the prompt spells {many} as text; sample.special_tokens='tokens' makes tokens of them" if count else ""


@in_32_bits()
def generate(
    model: ShardedModel,
    params: Any,
    prompts: Sequence[Sequence[int]],
    config: SampleConfig,
    *,
    ends: Sequence[int] = (),
    vocab: int | None = None,
) -> list[np.ndarray]:
    """Continue each prompt of token ids by `config.tokens` ids, or up to one of `ends`, which is left out.

    Ids of `vocab` and above, which a padded vocab has, are never chosen. The noise of a row depends only on
    `config.seed`, the row and the position, so that the text is the same on every mesh; `config.prompt` is not read.
    Compiled once for each length of the longest prompt, number of prompts, and config except its seed.
    """
    _check_ids(prompts, model.config.vocab)
    _check_lengths(prompts, model.config, config.tokens)
    sampling = dataclasses.replace(config, prompt="", seed=0)
    batch = left_padded(prompts, multiple=math.prod(model.axis_sizes.get(axis, 1) for axis in TOKEN_AXES))
    key = jax.random.key(config.seed)
    written = np.asarray(_write_ids(params, batch, key, model=model, config=sampling, ends=tuple(ends), vocab=vocab))
    return [_before_end(ids, ends) for ids in written[: len(prompts)]]


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


@partial(jax.jit, static_argnames=("model", "config", "ends", "vocab"))
def _write_ids(
    params: Any,
    prompts: Prompts,
    key: Array,
    *,
    model: ShardedModel,
    config: SampleConfig,
    ends: tuple[int, ...],
    vocab: int | None,
) -> Array:
    def pick(key: Array, logits_BV: Array, rows_B: Array, positions_B: Array) -> Array:
        known_BV = jnp.where(jnp.arange(logits_BV.shape[1])[None] < (vocab or model.config.vocab), logits_BV, -jnp.inf)
        return sample_tokens(known_BV, noise_keys(key, rows_B, positions_B), config)

    decoder = Decoder(model.config, model.plan.rows, model.mesh)
    ids_BN = decoder.write(params, prompts, key, pick, tokens=config.tokens, ends=ends)
    # Every process of a job gets all rows.
    return jax.lax.with_sharding_constraint(ids_BN, NamedSharding(model.mesh, P()))


def _before_end(ids_N: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    places = np.flatnonzero(np.isin(ids_N, ends))
    return ids_N[: places[0]] if len(places) else ids_N


def _before_stop(lead: str, text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the texts `stop` after `lead`, whose last letter may differ in it: a prompt may end
    within a letter's bytes."""
    start = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(lead, text)))
    places = [place for place in (text.find(each, start) for each in stop) if place >= 0]
    return text[: min(places, default=len(text))]


def _check_lengths(prompts: Sequence[Sequence[int]], model: ModelConfig, tokens: int) -> None:
    """Raise ConfigError if a text would become longer than the context of the short factors of a longrope, with which
    its cache begins."""
    ropes = {Rope(settings) for settings in model.settings_of_layers.settings}
    for limit in {rope.model.rope_original_seq for rope in ropes if rope.differs_by_length}:
        for row, prompt in enumerate(prompts):
            if len(prompt) <= limit < len(prompt) + tokens - 1:
                raise ConfigError(
                    f"prompt {row} of {len(prompt)} tokens and {tokens} new ones pass model.rope_original_seq={limit}, "
                    "behind which all tokens are rotated by rope_long_factors, those in the cache too; use at most "
                    f"{limit + 1 - len(prompt)} tokens, and begin again with what they are."
                )


def _check_ids(prompts: Sequence[Sequence[int]], vocab: int) -> None:
    if len(prompts) == 0:
        raise ConfigError("there are no prompts; give at least one")
    for row, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise ConfigError(
                f"prompt {row} is {ids.dtype} of shape {list(ids.shape)}; a prompt is a list of whole token ids, of "
                "one or more"
            )
        if not 0 <= ids.min() <= ids.max() < vocab:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise ConfigError(
                f"prompt {row} has token id {wrong}; the model knows 0 to {vocab - 1} (model.vocab={vocab})"
            )
