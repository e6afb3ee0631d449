"""The backward pass that docs/backward.md writes by hand is that of JAX and that of the package's model."""

import jax
import nbformat
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.docs_commands import ROOT, blocks
from support.tiny_model import mesh_of

import parallax as px
from configs.base import get_config

PAGE = ROOT / "docs" / "backward.md"
NOTEBOOK = ROOT / "notebooks" / "08_the_backward_pass.ipynb"
ROWS, SEQ, VOCAB = 4, 8, 32
MODEL = dict(attention="gqa", layers=2, d_model=16, d_ff=24, heads=4, kv_heads=2, d_head=4, vocab=VOCAB, tied=False)
HIDDEN, SEQUENCE = "batch/dp seq d_model/tp", "batch/dp seq/tp d_model"
ERROR = 1e-5  # of a gradient's largest entry


def code_of_page():
    return [block.text for block in blocks(PAGE.read_text()) if block.language == "python"]


@pytest.fixture(scope="module")
def written():
    """The names that the page defines."""
    names = {}
    for text in code_of_page():
        exec(compile(text, "docs/backward.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def example():
    """Weights that no symmetry hides, as a tree, and a batch of documents with labels that do not count."""
    rng = np.random.default_rng(0)
    noise = lambda x: np.asarray(x) + 0.1 * rng.normal(size=x.shape).astype(np.float32)  # noqa: E731
    params = jax.tree.map(noise, model_on(1, 1, HIDDEN).init(0))
    ids = rng.integers(1, VOCAB, (ROWS, SEQ + 1))
    batch = px.as_batch(np.where(rng.random(ids.shape) < 0.15, 0, ids), end=0)
    hidden = rng.random((ROWS, SEQ)) < 0.1
    return params, batch | {"labels": np.where(hidden, px.IGNORED, batch["labels"])}


@pytest.fixture(scope="module")
def by_jax(written, example):
    """Loss and gradients of the page's forward pass on one device, without a mesh."""
    params, batch = example
    return jax.jit(jax.value_and_grad(lambda *given: written["forward"](*given)[0]))(px.named_leaves(params), batch)


def model_on(dp, tp, residual):
    settings = px.read_settings(
        get_config(),
        mesh=dict(pp=1, dp=dp, tp=tp, simulate=0),
        model=MODEL,
        layout=dict(residual=residual),
        pipeline=dict(schedule="gpipe", microbatches=1),
        data=dict(seq=SEQ, global_batch=ROWS),
    )
    return px.model_of(settings, mesh_of(1, dp, tp))


def by_hand(written, mesh, params, batch):
    specs = {name: px.Layout.parse(layout).spec() for name, layout in written["AT_REST"].items()}
    options = dict(mesh=mesh, in_specs=(specs, P("dp")), out_specs=(P(), specs), check_vma=True)
    return jax.jit(jax.shard_map(written["loss_and_gradients"], **options))(px.named_leaves(params), batch)


def check_equal(actual, expected):
    """Loss and gradients, leaf for leaf."""
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        largest = np.abs(gradient).max()
        assert largest > 0 and np.abs(actual[1][name] - gradient).max() <= ERROR * largest, name


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("dp", "tp", "residual"),
    [(2, 2, HIDDEN), (1, 2, HIDDEN), (4, 1, HIDDEN), (2, 2, SEQUENCE), (1, 2, SEQUENCE), (4, 2, SEQUENCE)],
)
def test_the_gradients_written_by_hand_are_those_of_jax_and_of_the_packages_model(
    written, example, by_jax, monkeypatch, dp, tp, residual
):
    params, batch = example
    monkeypatch.setitem(written, "RESIDUAL", residual)
    model = model_on(dp, tp, residual)
    found = by_hand(written, model.mesh, params, batch)
    check_equal(found, by_jax)
    metrics, gradients = jax.jit(model.loss_and_grad)(params, batch)
    check_equal(found, (metrics["loss"], px.named_leaves(gradients)))


def test_the_notebook_runs_what_the_page_shows():
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert [text for text in map(str.rstrip, code_of_page()) if text not in cells] == []
