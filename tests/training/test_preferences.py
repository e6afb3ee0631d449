"""The preference optimization of docs/extend.md: what ten steps of it do, beside a plain model and a plain Adam."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.docs_commands import EXTEND, blocks
from support.plain_model import plain_logits
from support.tiny_model import mesh_of

import parallax as px
from configs.quickstart import get_config
from parallax.data.tokenizer import Bytes
from parallax.errors import CheckpointError
from parallax.model.batch import IGNORED

# The quickstart's model, smaller: latent attention, and a table of its own for each end.
SMALL = {"layers": 2, "d_model": 16, "d_ff": 32, "heads": 2, "d_head": 8, "d_latent": 8, "d_rope": 4, "vocab": 260}
PAIRS = [
    {"prompt": "Call me", "chosen": " Ishmael.", "rejected": " tomorrow, or later."},
    {"prompt": "The ", "chosen": "white whale", "rejected": "shark"},
]
SEQ, STEPS, BETA, RATE = 32, 10, 0.3, 1e-3


@pytest.fixture(scope="module")
def dpo():
    """The module of the page."""
    (code,) = [block.text for block in blocks(EXTEND.read_text()) if block.title == "dpo.py"]
    module = types.ModuleType("dpo")
    exec(compile(code, "dpo.py", "exec"), module.__dict__)
    return module


def model_on(**axes):
    settings = px.read_settings(get_config(), model={**SMALL, "dtype": "float32"}, pipeline={"microbatches": 1})
    return px.model_of(settings, mesh_of(**{"pp": 1, "dp": 1, "tp": 1} | axes))


def plain_losses(model, params, batch):
    """The loss before each of ten steps, on one device, written out: the reference model, the loss, and Adam."""

    def of_rows(params):
        log_p = jax.nn.log_softmax(plain_logits(model.config, params, jax.tree.map(jnp.asarray, batch)))
        rows, columns = np.nonzero(batch["labels"] != IGNORED)
        chosen = log_p[rows, columns, batch["labels"][rows, columns]]
        return jnp.zeros(len(log_p)).at[rows].add(chosen)

    def loss(params):
        gains = of_rows(params) - before
        margins = [gains[pair] - gains[pair + len(PAIRS)] for pair in range(len(PAIRS))]
        return sum(jnp.log(1 + jnp.exp(-BETA * margin)) for margin in margins) / len(PAIRS)

    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), params)
    before, losses = of_rows(params), []
    loss_and_grad = jax.jit(jax.value_and_grad(loss))
    means = squares = jax.tree.map(np.zeros_like, params)
    for step in range(1, STEPS + 1):
        value, grads = loss_and_grad(params)
        losses.append(float(value))
        means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * np.asarray(g), means, grads)
        squares = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * np.asarray(g) ** 2, squares, grads)
        of_mean, of_square = 1 - 0.9**step, 1 - 0.999**step
        moves = jax.tree.map(lambda m, s, a=of_mean, b=of_square: (m / a) / (np.sqrt(s / b) + 1e-8), means, squares)
        params = jax.tree.map(lambda p, move: p - RATE * move, params, moves)
    return losses


@pytest.mark.slow
def test_ten_steps_are_those_of_a_plain_model_on_two_meshes(dpo):
    batch = dpo.rows_of(Bytes(), PAIRS, SEQ)
    expected = None
    for axes in ({"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}):
        model = model_on(**axes)
        params = model.init(0)
        expected = expected or plain_losses(model, params, batch)
        _, losses = dpo.tuned(model, params, batch, steps=STEPS, beta=BETA, learning_rate=RATE)
        # A margin is left of four sums of tens of nats, each rounded by 4e-6 in float32; largest seen: 6.3e-6.
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert losses[0] == pytest.approx(np.log(2)) and losses[-1] < 0.9 * losses[0]


def test_only_answers_and_their_ends_have_labels(dpo):
    batch = dpo.rows_of(Bytes(), PAIRS, SEQ)
    assert batch["tokens"].shape == (4, SEQ)
    texts = [bytes(row[(row != IGNORED) & (row < 256)].tolist()).decode() for row in batch["labels"]]
    assert texts == [" Ishmael.", "white whale", " tomorrow, or later.", "shark"]
    assert (batch["labels"] == 256).sum(axis=1).tolist() == [1] * 4
    with pytest.raises(SystemExit, match="pair 1 has 28 tokens; use --seq=27 or more"):
        dpo.rows_of(Bytes(), PAIRS, 24)


def test_the_loss_is_that_of_the_paper(dpo, monkeypatch):
    """Of log-probabilities that are given in the place of a model's."""
    monkeypatch.setattr(dpo, "log_probabilities", lambda *_: jnp.array([-1.0, -2.0, -3.0, -1.0]))
    value, margins = dpo.dpo_loss(None, None, None, jnp.array([-1.5, -2.0, -2.0, -2.0]), 0.5)
    assert margins.tolist() == [1.5, -1.0]
    assert float(value) == pytest.approx(np.mean(np.log(1 + np.exp(-0.5 * np.array([1.5, -1.0])))))


def test_a_run_of_ones_own_parameters_is_read_as_any_other(whole_run, tmp_path):
    run = px.load(whole_run)
    params = jax.tree.map(lambda leaf: leaf * 1.5, run.params)
    px.save_run(tmp_path / "mine", run, params)
    saved = px.load(tmp_path / "mine")
    assert saved.step == 0 and saved.tokenizer.fingerprint == run.tokenizer.fingerprint
    jax.tree.map(np.testing.assert_array_equal, saved.params, params)
    with pytest.raises(CheckpointError, match="exists already"):
        px.save_run(tmp_path / "mine", run, params)
    with pytest.raises(CheckpointError, match="values that are not finite"):
        px.save_run(tmp_path / "nan", run, jax.tree.map(lambda leaf: leaf * np.nan, params))
