"""Generation of token ids after prompts, and of text after text."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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

TOKENS_AT_ONCE = 8  # between two looks of the host at what has been written
SHORTEST_PADDED = 32


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
    ends = ends_with(tokenizer, ends, stop)
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


def ends_with(tokenizer: Tokenizer, ends: Sequence[int], stop: Sequence[str]) -> tuple[int, ...]:
    """The ends, and the ids of those texts of `stop` that are a token."""
    return (*ends, *(number for text in stop if (number := id_of(tokenizer, text)) is not None))


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
    length: int = 0,
) -> list[np.ndarray]:
    """Continue each prompt of token ids by `config.tokens` ids, or up to one of `ends`, which is left out. Prompts are
    padded to the longest, or to `length` if that is more.

    Ids of `vocab` and above, which a padded vocab has, are never chosen. The noise of a row depends only on
    `config.seed`, the row and the position, so that the text is the same on every mesh; `config.prompt` is not read.
    Compiled once for each length of the longest prompt, number of prompts, and config except its seed.
    """
    _check_ids(prompts, model.config.vocab)
    _check_lengths(prompts, model.config, config.tokens)
    sampling = dataclasses.replace(config, prompt="", seed=0)
    batch = left_padded(prompts, multiple=_rows_together(model), length=length)
    key = jax.random.key(config.seed)
    written = np.asarray(_write_ids(params, batch, key, model=model, config=sampling, ends=tuple(ends), vocab=vocab))
    return [_before_end(ids, ends) for ids in written[: len(prompts)]]


def stream(
    model: ShardedModel,
    params: Any,
    prompt: Sequence[int],
    config: SampleConfig,
    *,
    ends: Sequence[int] = (),
    vocab: int | None = None,
    length: int = 0,
    tokens: int | None = None,
    every: int = TOKENS_AT_ONCE,
) -> Iterator[list[int]]:
    """The ids of `generate` for one prompt as they come, at most `every` at a time, and `tokens` in all.

    Two programs are compiled for each length to which prompts are padded; both serve any number of tokens up to
    `config.tokens`.
    """
    _check_ids([prompt], model.config.vocab)
    _check_lengths([prompt], model.config, config.tokens)
    static = dict(model=model, config=dataclasses.replace(config, prompt="", seed=0), ends=tuple(ends), vocab=vocab)
    last, done = config.tokens if tokens is None else min(tokens, config.tokens), 0
    with in_32_bits():
        key = jax.random.key(config.seed)
        batch = left_padded([prompt], multiple=_rows_together(model), length=length)
        weights, state, written = _begin(params, batch, key, **static)
    while True:
        ids_N, count = np.asarray(written[0])[0], int(written[1])
        new = _before_end(ids_N[done:count], ends)
        yield new.tolist()
        if len(new) < count - done or count >= last:
            return
        done = count
        with in_32_bits():
            state, written = _go_on(weights, state, key, np.int32(min(count + every, last)), **static)


@partial(jax.jit, static_argnames=("model", "config", "ends", "vocab"))
def _begin(params: Any, prompts: Prompts, key: Array, *, model, config, ends, vocab) -> tuple[Any, Any, Any]:
    decoder = Decoder(model.config, model.plan.rows, model.mesh)
    pick = _picks(model, config, vocab)
    weights, state = decoder.begin(params, prompts, key, pick, tokens=config.tokens, ends=ends)
    return weights, state, _read_by_all(model, (state.ids_BN, state.count))


@partial(jax.jit, static_argnames=("model", "config", "ends", "vocab"), donate_argnames=("state",))
def _go_on(weights: Any, state: Any, key: Array, until: Array, *, model, config, ends, vocab) -> tuple[Any, Any]:
    decoder = Decoder(model.config, model.plan.rows, model.mesh)
    state = decoder.go_on(weights, state, key, until, _picks(model, config, vocab), ends=ends)
    return state, _read_by_all(model, (state.ids_BN, state.count))


def padded_length(tokens: int, longest: int) -> int:
    """The length to which prompts of so many tokens are padded, so that few lengths are compiled: a power of two, or
    the longest.

    >>> padded_length(5, 100), padded_length(40, 100), padded_length(70, 100)
    (32, 64, 100)
    """
    return max(tokens, min(longest, max(SHORTEST_PADDED, 1 << (tokens - 1).bit_length())))


def _rows_together(model: ShardedModel) -> int:
    """Rows of which every data rank has one."""
    return math.prod(model.axis_sizes.get(axis, 1) for axis in TOKEN_AXES)


def left_padded(prompts: Sequence[Sequence[int]], *, multiple: int, length: int = 0) -> Prompts:
    """Prompts that all end in the last column, at least `length` long, in a multiple of `multiple` rows; additional
    rows repeat the first.

    >>> left_padded([[5, 6], [7]], multiple=2).ids_BS.tolist()
    [[5, 6], [0, 7]]
    """
    rows = [*prompts, *[prompts[0]] * (-len(prompts) % multiple)]
    longest = max(length, *map(len, rows))
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
    decoder = Decoder(model.config, model.plan.rows, model.mesh)
    pick = _picks(model, config, vocab)
    return _read_by_all(model, decoder.write(params, prompts, key, pick, tokens=config.tokens, ends=ends))


def _picks(model: ShardedModel, config: SampleConfig, vocab: int | None) -> Callable[..., Array]:
    """`pick` of a Decoder."""

    def pick(key: Array, logits_BV: Array, rows_B: Array, positions_B: Array) -> Array:
        known_BV = jnp.where(jnp.arange(logits_BV.shape[1])[None] < (vocab or model.config.vocab), logits_BV, -jnp.inf)
        return sample_tokens(known_BV, noise_keys(key, rows_B, positions_B), config)

    return pick


def _read_by_all(model: ShardedModel, tree: Any) -> Any:
    """Arrays that every process of a job gets whole."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(model.mesh, P()))


def _before_end(ids_N: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    places = np.flatnonzero(np.isin(ids_N, ends))
    return ids_N[: places[0]] if len(places) else ids_N


def _before_stop(lead: str, text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the texts `stop` after `lead`."""
    return text[: _start(lead, text)] + text_after(lead, text, stop)


def text_after(lead: str, text: str, stop: Sequence[str]) -> str:
    """What follows `lead` in a text, up to the first of the texts `stop`. The last letter of `lead` may differ there: a
    prompt may end within a letter's bytes."""
    rest = text[_start(lead, text) :]
    return rest[: min((place for each in stop if (place := rest.find(each)) >= 0), default=len(rest))]


def _start(lead: str, text: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(lead, text)))


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
