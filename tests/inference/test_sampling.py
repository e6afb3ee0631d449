"""A token is chosen as temperature, top-k and top-p say, and by noise that is the row's own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.config.sections import SampleConfig
from parallax.errors import ConfigError
from parallax.inference.sample import keep_top_p, noise_keys, sample_tokens

GREEDY = SampleConfig(prompt="", tokens=10, temperature=0.0, top_k=0, top_p=1.0, seed=0)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, top_k=20, top_p=0.95, seed=3)


def random_logits(rows=50):
    return jnp.asarray(np.random.default_rng(1).normal(size=(rows, 20)) * 2, jnp.float32)


def keys(rows=50, seed=0):
    return noise_keys(jax.random.key(seed), jnp.arange(rows), jnp.zeros(rows, jnp.int32))


@pytest.mark.parametrize("change", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}])
def test_the_ends_of_every_setting_are_greedy(change):
    config = dataclasses.replace(SAMPLED, **change)
    best = random_logits().argmax(axis=-1).tolist()
    assert all(sample_tokens(random_logits(), keys(seed=seed), config).tolist() == best for seed in (0, 1))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p):
    kept_BV = np.isfinite(keep_top_p(random_logits(), p))
    for logits_V, kept_V in zip(np.asarray(random_logits(), np.float64), kept_BV):
        probability_V = np.exp(logits_V) / np.exp(logits_V).sum()
        sums = np.cumsum(np.sort(probability_V)[::-1])
        smallest = np.searchsorted(sums, p) + 1
        assert set(np.flatnonzero(kept_V)) == set(np.argsort(-probability_V)[:smallest])


def test_choices_follow_the_probabilities_at_the_temperature():
    draws, temperature = 20_000, 1.7
    logits_BV = jnp.broadcast_to(random_logits(1), (draws, 20))
    config = dataclasses.replace(GREEDY, temperature=temperature)
    counts = np.bincount(sample_tokens(logits_BV, keys(draws), config), minlength=20)
    expected = np.asarray(jax.nn.softmax(random_logits(1)[0] / temperature), np.float64)
    sigma = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(counts / draws - expected) < 4 * sigma).all()  # 4 sigma, 20 bins: one seed in a thousand


def test_the_noise_of_a_row_does_not_depend_on_its_neighbours():
    config, alone = dataclasses.replace(SAMPLED, top_k=0), slice(7, 9)
    all_rows = sample_tokens(random_logits(), keys(), config)
    assert sample_tokens(random_logits()[alone], keys()[alone], config).tolist() == all_rows[alone].tolist()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"top_p": 0.0}, "sample.top_p=0.0 must be above 0 and at most 1 (off)"),
        ({"top_p": float("nan")}, "sample.top_p=nan is not a number that float32 holds; use 3.4e+38 or less"),
        ({"temperature": -1.0}, "sample.temperature=-1.0 must be 0 (greedy) or 1e-06 or more; 0.8 is usual"),
        ({"temperature": 1e-9}, "sample.temperature=1e-09 must be 0 (greedy) or 1e-06 or more; 0.8 is usual"),
        ({"top_k": -1}, "sample.top_k=-1 is too small; use 0 or more"),
        ({"seed": 2**32}, "sample.seed=4294967296 is too large; use 4294967295 or less"),
        ({"tokens": 0}, "sample.tokens=0 is too small; use 1 or more"),
    ],
)
def test_wrong_sample_settings_are_refused(change, message):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(GREEDY, **change)
    assert str(error.value) == message
