"""Log-likelihoods of given continuations, and greedy ones up to a text: what benchmarks of language models ask for."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from parallax.config.sections import SampleConfig
from parallax.config.settings import with_code
from parallax.data.tokenizer import Tokenizer
from parallax.errors import DataError
from parallax.inference.generate import ends_with, generate, text_after
from parallax.model.batch import GROUPS, IGNORED
from parallax.model.loss import cross_entropy
from parallax.model.padding import without_padding
from parallax.pipeline import GROUP_LOSSES, ShardedModel
from parallax.processes.job import set_phase
from parallax.sharding.activations import BATCH_AXES, CONTEXT_AXIS
from parallax.sharding.collectives import max_over, offset, sum_over
from parallax.sharding.layout import Layout
from parallax.step.batches import own_part, put_on
from parallax.step.step import make_eval_step


class Continuation(NamedTuple):
    """Ids to score, and those before them, of which there is at least one."""

    context: Sequence[int]
    ids: Sequence[int]


class Score(NamedTuple):
    """The log-likelihood of a continuation in nats, and whether greedy decoding would write it."""

    log_likelihood: float
    is_greedy: bool


class Scorer:
    """Scores continuations with the forward pass of training, so on any mesh and without logits of a whole batch.

    A batch has `rows` rows, or the next number that divides over the mesh. It is compiled for each length of rows,
    which are powers of two.
    """

    def __init__(self, model: ShardedModel, *, rows: int = 8):
        # A loss of one's own: the harness asks for two numbers of a token, as a loss has them.
        settings = with_code(model.settings, {"loss.name": likelihood_and_misses})
        self._model = model.replace(loss=settings.loss)
        sizes = self._model.axis_sizes
        ranks = math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)
        pieces = ranks * sizes["pp"] * self._model.pipeline.microbatches
        self.rows = -(-rows // pieces) * pieces
        context = sizes.get(CONTEXT_AXIS, 1)
        self._multiple = math.lcm(2 * context if context > 1 else 1, context * sizes["tp"])
        self._step = make_eval_step(self._model, groups=self.rows)

    def __call__(self, params: Any, continuations: Sequence[Continuation]) -> list[Score]:
        """The score of each continuation.

        Raises:
            DataError: one has no context, or no ids.
        """
        for each in continuations:
            if not len(each.context) or not len(each.ids):
                raise DataError(
                    f"a continuation of {len(each.ids)} tokens after {len(each.context)} cannot be scored; give it one "
                    "token or more, after one or more"
                )
        scores = {}
        for numbers in _by_length([len(each.context) + len(each.ids) for each in continuations], self.rows):
            scores |= zip(numbers, self._scores(params, [continuations[number] for number in numbers]))
        return [scores[number] for number in range(len(continuations))]

    def _scores(self, params: Any, continuations: Sequence[Continuation]) -> Iterator[Score]:
        longest = max(len(each.context) + len(each.ids) - 1 for each in continuations)
        batch = self._batch(continuations, self._multiple << max(0, (-(-longest // self._multiple) - 1).bit_length()))
        shape, sharding = batch["tokens"].shape, self._model.batch_sharding
        rows, columns = own_part(sharding, shape)
        part = {name: array[rows, columns.start : columns.stop] for name, array in batch.items()}
        nats, misses = np.asarray(self._step(params, put_on(sharding, shape)(part))[GROUP_LOSSES])
        return (Score(-float(loss), not missed) for loss, missed in zip(nats, misses[: len(continuations)]))

    def _batch(self, continuations: Sequence[Continuation], length: int) -> dict[str, np.ndarray]:
        """A batch whose rows are groups; a continuation's ids are its labels."""
        shape = self.rows, length
        tokens, labels = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
        segments, groups = (
            np.zeros(shape, np.int32),
            np.broadcast_to(np.arange(self.rows, dtype=np.int32)[:, None], shape),
        )
        for row, (context, ids) in enumerate(continuations):
            text = np.concatenate([context, ids]).astype(np.int32)
            tokens[row, : len(text) - 1], segments[row, : len(text) - 1] = text[:-1], 1
            labels[row, len(context) - 1 : len(text) - 1] = ids
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
        arrays = {"tokens": tokens, "labels": labels, "segments": segments, "positions": positions, GROUPS: groups}
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def likelihood_and_misses(
    logits_CV: Array, labels_C: Array, table: Layout, z_coefficient: float, entries: int | None = None
) -> Array:
    """`-log p(label)` of each token, and 1 where another token is more likely, [2, C]; 0 where the label is IGNORED.

    Communication:
        forward   all_reduce over tp of what cross_entropy sends, the largest logit and the label's
        backward  nothing
    """
    losses_C = cross_entropy(logits_CV, labels_C, table, 0.0, entries)[0]
    if entries is not None:
        logits_CV = without_padding(logits_CV, table, entries)
    axes = table.cut_of("vocab")
    columns_V = offset(table, "vocab", logits_CV.shape[1]) + jnp.arange(logits_CV.shape[1])
    is_label_CV = columns_V[None, :] == labels_C[:, None]
    label_C = sum_over(jnp.where(is_label_CV, logits_CV, 0).sum(axis=-1), axes)
    misses_C = (label_C < max_over(logits_CV.max(axis=-1), axes)) & (labels_C != IGNORED)
    return jnp.stack([losses_C, misses_C.astype(losses_C.dtype)])


def greedy_until(
    model: ShardedModel,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    ends: Sequence[int],
    stop: Sequence[str] = (),
    rows: int = 8,
) -> list[str]:
    """The most likely text after each prompt of token ids: `tokens` tokens, or up to one of `ends` or the first of the
    texts `stop`, which are left out. Prompts are continued `rows` at once, those of like lengths together."""
    ends = ends_with(tokenizer, ends, stop)
    greedy = SampleConfig(tokens=tokens, temperature=0.0, top_p=1.0)
    texts: dict[int, str] = {}
    for numbers in _by_length(list(map(len, prompts)), rows):
        chosen = [prompts[number] for number in numbers]
        chosen += [chosen[-1]] * (rows - len(chosen))  # one program for all batches of a length
        written = generate(model, params, chosen, greedy, ends=ends, vocab=tokenizer.vocab)
        texts |= zip(numbers, (text_after("", tokenizer.decode(ids), stop) for ids in written))
    return [texts[number] for number in range(len(prompts))]


def _by_length(lengths: Sequence[int], rows: int) -> Iterator[tuple[int, ...]]:
    """The numbers of texts in batches of at most so many rows, the longest first. Each batch is a phase of the
    process, which may compile a program for it."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    for start in range(0, len(order), rows):
        set_phase(f"texts {start + 1} and after of {len(order)} of a task", compiling=True)
        yield tuple(order[start : start + rows])
