"""Loss and gradients of packed conversations, of which answers alone are learned, are equal on every mesh."""

import functools

import jax
import numpy as np
import pytest
from support.chat_examples import chat_reader, conversations, write_chats
from support.plain_model import plain_losses_and_grad
from support.tiny_model import MESHES, build, params_of

from parallax.model.batch import IGNORED

SEQ, ROWS, MODEL = 32, 32, dict(vocab=320, layers=8, attention="gqa")
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}"
LOSS_ERROR, GRADIENT_ERROR = 1e-6, 1e-5


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    (folder / "mine.jinja").write_text(TEMPLATE + "{% if add_generation_prompt %}a{% endif %}")
    file = write_chats(folder / "c.jsonl", conversations(200, letters=9, turns=2))
    reader = chat_reader(file, folder, chat_template=str(folder / "mine.jinja"), seq=SEQ, global_batch=ROWS)
    return reader.batch(0)


@pytest.fixture(scope="module")
def reference(batch):
    model = build((1, 1, 1), **MODEL)
    return functools.partial(plain_losses_and_grad, model.config, params_of(model))(batch)


def test_rows_of_the_batch_learn_different_numbers_of_tokens(batch):
    counts = (batch["labels"] != IGNORED).sum(axis=1)
    assert counts.min() > 0 and counts.max() < SEQ - 9 and len({*counts.tolist()}) > 5
    assert batch["segments"].max() > 1
    answers = {chr(label) for label in batch["labels"].ravel() if label != IGNORED}
    assert answers == {"a", "|"}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*MESHES, (1, 2, 2, 1, 2)], ids=str)
def test_loss_and_gradients_are_those_of_the_plain_model(mesh, batch, reference):
    changes = dict(microbatches=4) if len(mesh) == 3 else dict(microbatches=4, context="all_gather")
    model = build(mesh, **MODEL, **changes)
    metrics, grads = jax.jit(model.loss_and_grad)(params_of(model), batch)
    (loss, _), expected = reference
    assert int(metrics["tokens"]) == (batch["labels"] != IGNORED).sum()
    np.testing.assert_allclose(metrics["loss"], loss, rtol=LOSS_ERROR)
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(grads), strict=True)
    errors = {jax.tree_util.keystr(path): np.abs(a - e).max() / np.abs(e).max() for (path, e), a in pairs}
    assert {name: error for name, error in errors.items() if not error <= GRADIENT_ERROR} == {}
