"""The chunked loss is cross-entropy, its gradient the true one, and no more logits exist than one chunk's."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import numpy_layers
from support.tiny_model import build, make_batch, mesh_of, params_of
from support.traced_equations import equations

from parallax.config.sections import AXES, LossConfig
from parallax.errors import ConfigError
from parallax.model.batch import IGNORED
from parallax.model.loss import TokenGroups, chunked_loss, chunked_loss_and_grads
from parallax.sharding.collectives import as_varying, sum_over
from parallax.sharding.layout import Layout

TOKENS, VOCAB, WIDTH, WEIGHT = 23, 24, 8, 0.25
TABLES = {"whole vocab": "vocab d_model", "cut vocab": "vocab/tp d_model", "cut over two": "vocab/tp/pp d_model"}


@functools.cache
def arrays():
    rng = np.random.default_rng(0)
    table, hidden = rng.normal(size=(VOCAB, WIDTH)), 3 * rng.normal(size=(TOKENS, WIDTH))
    labels = rng.integers(0, VOCAB, TOKENS)
    labels[::4] = IGNORED
    return table.astype(np.float32), hidden.astype(np.float32), labels.astype(np.int32)


def oracle(z_coefficient):
    """(loss, gradient in table, in hidden), from the derivative written out."""
    table, hidden, labels = (np.asarray(a, np.float64) if a.dtype == np.float32 else a for a in arrays())
    logits = hidden @ table.T
    logsumexp = np.log(np.exp(logits).sum(1, keepdims=True))
    slope = np.exp(logits - logsumexp) * (1 + 2 * z_coefficient * logsumexp) - np.eye(VOCAB)[labels]
    slope[labels == IGNORED] = 0
    return numpy_layers.cross_entropy(logits, labels, z_coefficient), slope.T @ hidden, slope @ table


def on_mesh(config, text):
    """(forward only, loss, gradient in table, in hidden) with the vocab cut as the layout `text` says."""
    layout = Layout.parse(text)
    axes = layout.cut_of("vocab")

    def local(table, hidden, labels):
        table, hidden = as_varying(table), as_varying(hidden)
        forward = chunked_loss(config, layout, table, hidden, labels)
        loss, d_table, d_hidden = chunked_loss_and_grads(config, layout, table, hidden, labels, jnp.float32(WEIGHT))
        copies = [axis for axis in AXES if axis not in axes]
        size = math.prod(jax.lax.axis_size(axis) for axis in copies)
        mean = lambda x: sum_over(x, copies) / size  # noqa: E731
        return mean(forward), mean(loss), mean(d_table), sum_over(mean(d_hidden), axes)

    out_specs = (P(), P(), layout.spec(), P())
    run = jax.shard_map(local, mesh=mesh_of(2, 1, 4), in_specs=(layout.spec(), P(), P()), out_specs=out_specs)
    return jax.tree.map(np.asarray, jax.jit(run)(*arrays()))


def check(found, z_coefficient):
    loss, d_table, d_hidden = oracle(z_coefficient)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(found[0].sum(), loss)
    close(found[1].sum(), loss)
    close(found[0][0], oracle(0.0)[0])  # cross-entropy apart from the z-loss
    close(found[2], WEIGHT * d_table)
    close(found[3], WEIGHT * d_hidden)


@pytest.mark.parametrize("z_coefficient", [0.0, 1e-2])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 1000])
def test_the_chunked_loss_is_cross_entropy_whatever_the_chunks(chunk_tokens, z_coefficient):
    config, layout = LossConfig(z_coefficient=z_coefficient, chunk_tokens=chunk_tokens), Layout.parse("vocab d_model")
    table, hidden, labels = map(jnp.asarray, arrays())
    loss = chunked_loss(config, layout, table, hidden, labels)
    check((loss, *chunked_loss_and_grads(config, layout, table, hidden, labels, jnp.float32(WEIGHT))), z_coefficient)


@pytest.mark.parametrize("table", TABLES)
def test_the_vocab_can_be_cut(table):
    check(on_mesh(LossConfig(z_coefficient=1e-2, chunk_tokens=7), TABLES[table]), z_coefficient=1e-2)


def test_the_gradient_of_the_table_is_added_to_an_earlier_one():
    table, hidden, labels = map(jnp.asarray, arrays())
    arguments = (
        LossConfig(z_coefficient=1e-2, chunk_tokens=7),
        Layout.parse("vocab d_model"),
        table,
        hidden,
        labels,
        jnp.float32(WEIGHT),
    )
    (loss, apart, d_hidden), (again, total, d_again) = (
        chunked_loss_and_grads(*arguments, earlier) for earlier in (None, 3 * table)
    )
    np.testing.assert_allclose(total, 3 * table + apart, rtol=0, atol=1e-6 * np.abs(total).max())
    np.testing.assert_array_equal(loss, again)
    np.testing.assert_array_equal(d_hidden, d_again)


def test_large_logits_do_not_overflow():
    table, hidden, labels = map(jnp.asarray, arrays())
    config, layout = LossConfig(z_coefficient=0.0, chunk_tokens=7), Layout.parse("vocab d_model")
    found = chunked_loss_and_grads(config, layout, 100 * table, hidden, labels, jnp.float32(1))
    assert all(np.isfinite(leaf).all() for leaf in found)


def test_bfloat16_activations_have_a_float32_loss():
    table, hidden, labels = arrays()
    table, hidden = jnp.asarray(table, jnp.bfloat16), jnp.asarray(hidden, jnp.bfloat16)
    loss, d_table, d_hidden = chunked_loss_and_grads(
        LossConfig(z_coefficient=0.0, chunk_tokens=7),
        Layout.parse("vocab d_model"),
        table,
        hidden,
        jnp.asarray(labels),
        jnp.float32(1),
    )
    assert (loss.dtype, d_table.dtype, d_hidden.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    logits = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64).T
    np.testing.assert_allclose(loss[0], numpy_layers.cross_entropy(logits, labels, 0.0), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_products_of_the_head_are_of_operands_in_the_models_dtype_and_add_up_in_float32(dtype):
    """A product of two dtypes is one of the wider: on GPUs several times slower."""
    table, hidden, labels = arrays()
    operands = jnp.asarray(table, dtype), jnp.asarray(hidden, dtype), jnp.asarray(labels), jnp.float32(1)
    run = functools.partial(
        chunked_loss_and_grads, LossConfig(z_coefficient=0.0, chunk_tokens=7), Layout.parse("vocab d_model")
    )
    found = [e for e in equations(run, *operands) if e.primitive.name == "dot_general"]
    assert [{var.aval.dtype.name for var in e.invars} for e in found] == [{dtype}] * 3
    assert {e.outvars[0].aval.dtype.name for e in found} == {"float32"}


def test_gradients_of_a_bfloat16_head_are_as_near_as_its_operands():
    table, hidden, labels = arrays()
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (table, hidden)]
    run = functools.partial(
        chunked_loss_and_grads, LossConfig(z_coefficient=0.0, chunk_tokens=7), Layout.parse("vocab d_model")
    )
    rest = jnp.asarray(labels), jnp.float32(1)
    exact = run(*(x.astype(jnp.float32) for x in narrow), *rest)[1:]
    for actual, expected in zip(run(*narrow, *rest)[1:], exact, strict=True):
        difference = np.linalg.norm(np.asarray(actual, np.float32) - expected)
        assert difference < 2.0**-8 * np.linalg.norm(expected)  # half the last bit of bfloat16, of most


@pytest.mark.fast(1)
@pytest.mark.parametrize("embedding", ["vocab_parallel", "all_to_all"])
def test_the_loss_is_the_mean_over_real_tokens_of_the_whole_batch(embedding):
    """Rows have few labels or many, so a mean of the means of rows, microbatches or devices would differ."""
    model, batch = build((2, 2, 2), embedding=embedding, layers=2), make_batch()
    params = params_of(model)
    arrays = (batch[name] for name in ("tokens", "segments", "positions"))
    logits = np.asarray(jax.jit(model.logits)(params, *arrays), np.float64)
    by_row = [numpy_layers.cross_entropy(*row, 0.0) for row in zip(logits, batch["labels"])]
    counts = (batch["labels"] != IGNORED).sum(1)
    metrics = jax.jit(model.loss)(params, batch)
    assert float(metrics["tokens"]) == counts.sum()
    np.testing.assert_allclose(metrics["loss"], sum(by_row) / counts.sum(), rtol=1e-6)
    assert abs(np.mean(by_row / np.maximum(counts, 1)) - float(metrics["loss"])) > 1e-3


@pytest.mark.slow
def test_a_batch_without_labels_has_no_loss_and_no_gradient():
    model, batch = build((1, 2, 2), layers=2), make_batch()
    batch["labels"][:] = IGNORED
    metrics, grads = jax.jit(model.loss_and_grad)(params_of(model), batch)
    assert float(metrics["loss"]) == float(metrics["tokens"]) == 0.0
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("embedding", ["vocab_parallel", "all_to_all"])
@pytest.mark.parametrize("tied", [True, False])
def test_no_more_logits_exist_than_one_chunk(mesh, embedding, tied):
    vocab, chunk = 104, 40  # 104 and its half are no other dim's size
    model = build(mesh, embedding=embedding, tied=tied, vocab=vocab, chunk_tokens=chunk)
    local = vocab // (mesh[2] if embedding == "vocab_parallel" else 1)
    batch = make_batch(vocab=vocab)
    for function in (model.loss_and_grad, model.loss):
        shapes = {var.aval.shape for equation in equations(function, model.shapes, batch) for var in equation.outvars}
        tokens = {math.prod(shape) // local for shape in shapes if shape and shape[-1] == local}
        assert 1 < max(tokens) <= chunk
        # Tables and their gradients have d_model=32 columns; nothing else has the vocab as a dim.
        assert max(math.prod(shape) // local for shape in shapes if local in shape) <= chunk


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(z_coefficient=-1.0, chunk_tokens=8), "loss.z_coefficient=-1.0 must be 0 or more; 1e-4 is usual."),
        (dict(z_coefficient=float("nan"), chunk_tokens=8), "loss.z_coefficient=nan is not a number that float32 holds"),
        (dict(z_coefficient=0.0, chunk_tokens=0), "loss.chunk_tokens=0 must be 1 or more; 1024 is usual."),
        (
            dict(z_coefficient=0.0, chunk_tokens=True),
            "loss.chunk_tokens=True is True or False, but it must be a whole number",
        ),
    ],
)
def test_wrong_settings_are_refused(fields, message):
    with pytest.raises(ConfigError) as caught:
        LossConfig(**fields)
    assert message in str(caught.value)


def test_the_metrics_hold_cross_entropy_and_z_loss_apart():
    plain, weighed = (build((1, 1, 1), layers=2, z_coefficient=z) for z in (0.0, 0.1))
    batch, params = make_batch(), params_of(plain)
    cross_entropy, both = (jax.jit(model.loss)(params, batch) for model in (plain, weighed))
    trained, _ = jax.jit(weighed.loss_and_grad)(params, batch)
    assert "z_loss" not in cross_entropy
    np.testing.assert_allclose(both["loss"], cross_entropy["loss"], rtol=1e-6)
    np.testing.assert_allclose([trained["loss"], trained["z_loss"]], [both["loss"], both["z_loss"]], rtol=1e-6)
    assert float(both["z_loss"]) > 0.1


@pytest.mark.parametrize("chunk_tokens", [5, 1000])
def test_losses_of_groups_are_summed_apart_and_change_neither_loss_nor_gradients(chunk_tokens):
    table, hidden, labels = arrays()
    config, layout = LossConfig(z_coefficient=1e-2, chunk_tokens=chunk_tokens), Layout.parse("vocab d_model")
    of_tokens = jnp.arange(len(labels), dtype=jnp.int32) % 3
    groups, given = TokenGroups(of_tokens, 4), (config, layout, table, hidden, labels)
    sums, *grads = chunked_loss_and_grads(*given, jnp.float32(WEIGHT), groups=groups)
    plain, *plain_grads = chunked_loss_and_grads(*given, jnp.float32(WEIGHT))
    jax.tree.map(np.testing.assert_array_equal, (sums[:, 0], *grads), (plain, *plain_grads))
    np.testing.assert_allclose(chunked_loss(*given, groups=groups), sums, rtol=1e-6)
    for group in range(4):
        only = jnp.where(of_tokens == group, labels, IGNORED)
        np.testing.assert_allclose(sums[:, 1 + group], chunked_loss(*given[:4], only), rtol=1e-5)
