"""Log-likelihoods and greedy texts, as benchmarks ask for them: those of a plain forward pass, on every mesh."""

import functools

import jax
import numpy as np
import pytest
from support.tiny_model import build, params_of

from parallax.data.tokenizer import Bytes
from parallax.errors import DataError
from parallax.inference.score import Continuation, Scorer, greedy_until

SMALL = dict(layers=2, d_model=16, d_ff=16, vocab=257, vocab_multiple=2, microbatches=1)
LENGTHS = [(1, 1), (3, 5), (9, 7), (2, 1), (30, 2)]  # of contexts and continuations
MESHES = {"pp·dp·tp": (2, 2, 2), "cp": (1, 1, 1, 1, 4, 1), "ep": (1, 2, 1, 1, 1, 2)}


@functools.cache
def on(mesh):
    model = build(mesh, **SMALL)
    return model, params_of(model)


@functools.cache
def logits_of():
    return jax.jit(on((1, 1, 1))[0].logits)


@functools.cache
def plain(ids):
    """Log-probabilities of the ids that follow each of these, in float64."""
    params = on((1, 1, 1))[1]
    row = np.zeros((1, 32), np.int32)
    row[0, : len(ids)] = ids
    logits = np.asarray(logits_of()(params, row)[0], np.float64)[: len(ids), :257]
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


def greedy(ids, tokens):
    for _ in range(tokens):
        ids = (*ids, int(plain(ids)[-1].argmax()))
    return ids[-tokens:]


def continuations():
    """The last one is what greedy decoding writes."""
    random = np.random.default_rng(0)
    pairs = [tuple(tuple(random.integers(0, 256, n).tolist()) for n in lengths) for lengths in LENGTHS]
    return [*(Continuation(*pair) for pair in pairs), Continuation(pairs[1][0], greedy(pairs[1][0], 3))]


def expected(each):
    ids = (*each.context, *each.ids)
    places = np.arange(len(each.context) - 1, len(ids) - 1)
    of_labels = plain(ids[:-1])[places]
    return of_labels[np.arange(len(places)), list(each.ids)].sum(), bool((of_labels.argmax(-1) == each.ids).all())


def check(mesh):
    model, params = on(mesh)
    scorer = Scorer(model, rows=2)
    scores = scorer(params, continuations())
    for score, each in zip(scores, continuations(), strict=True):
        log_likelihood, is_greedy = expected(each)
        # Sums of up to seven float32 logarithms.
        assert score.log_likelihood == pytest.approx(log_likelihood, abs=1e-5) and score.is_greedy == is_greedy
    assert scores[-1].is_greedy and not scores[0].is_greedy


def test_scores_are_those_of_a_plain_forward_pass():
    check((1, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_scores_are_the_same_on_every_mesh(name):
    check(MESHES[name])


def test_what_cannot_be_scored_is_said():
    model, params = on((1, 1, 1))
    with pytest.raises(DataError, match="a continuation of 1 tokens after 0 cannot be scored; give it one"):
        Scorer(model)(params, [Continuation([], [3])])


def test_greedy_texts_are_those_of_a_plain_loop_up_to_the_first_text_to_stop_at():
    model, params = on((1, 1, 1))
    tokenizer, prompts = Bytes(), [tuple(b"It is"), tuple(b"a"), tuple(b"How?")]
    whole = [tokenizer.decode(greedy(prompt, 6)) for prompt in prompts]
    write = functools.partial(greedy_until, model, params, tokenizer, prompts, tokens=6, ends=[tokenizer.end], rows=2)
    assert write() == whole
    stop = [whole[0][2:4], whole[2][1]]
    places = [[text.find(each) for each in stop if each in text] for text in whole]
    assert write(stop=stop) == [text[: min(found, default=None)] for text, found in zip(whole, places)]
