"""A vocab that no mesh cuts is padded: its tables have more rows, and nothing that a model says depends on them."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cached_logits import decoded_logits
from support.exportable_runs import own_run, own_settings
from support.hf_folders import config_of, random_tensors, read_folder, shapes_of, write_folder
from support.plain_model import plain_losses_and_grad
from support.run_examples import tiny_config
from support.tiny_model import build, make_batch, optimizer_config, params_of
from test_convert import params_of as arrays_of

import parallax as px
from configs.base import get_config
from parallax.analysis.traced.flops import flops_breakdown
from parallax.analysis.traced.trace import abstract_mesh
from parallax.cli.convert import main
from parallax.config.sections import AXES, SampleConfig
from parallax.config.settings import load_settings, read_settings
from parallax.data.tokenizer import Bytes
from parallax.errors import ConfigError, DataError
from parallax.inference.decode import Prompts
from parallax.inference.generate import generate
from parallax.model.embedding import EMBEDDINGS, Embedding
from parallax.model.loss import cross_entropy
from parallax.sharding.layout import Layout
from parallax.step.optimizer import make_optimizer
from parallax.step.resolve import resolve
from parallax.step.step import model_of
from parallax.training.resume import is_fixed
from parallax.training.run import train

VOCAB, PADDED = 50, 64  # on 8 ranks of tp the last has rows of padding alone
SMALL = dict(vocab=VOCAB, layers=2)
Z_COEFFICIENT = 1e-2
LOSS_ERROR, GRADIENT_ERROR = 1e-6, 1e-5  # as in test_parity
TABLES = (("embedding", "table"), ("head", "table"))


def padded_model(mesh, **changes):
    return build(mesh, **SMALL, vocab_multiple=PADDED, **changes)


def tables_of(tree):
    return [tree[part][name] for part, name in TABLES if name in tree[part]]


def entries_of(tree):
    """Parameters or gradients without the rows of padding."""
    cut = lambda path, leaf: leaf[:VOCAB] if "table" in jax.tree_util.keystr(path) else leaf  # noqa: E731
    return jax.tree_util.tree_map_with_path(cut, jax.tree.map(np.asarray, tree))


@functools.cache
def batch():
    return make_batch(rows=16, vocab=VOCAB)


@functools.cache
def unpadded(**changes):
    """The same model without padding, on one device: parameters, losses and gradients."""
    model = build((1, 1, 1), **SMALL, **changes)
    params = params_of(model)
    return params, *plain_losses_and_grad(model.config, params, batch(), Z_COEFFICIENT)


def test_the_padded_size_is_the_models_and_not_the_meshs():
    for mesh in [(1, 1, 1), (2, 1, 4), (1, 1, 8)]:
        model = padded_model(mesh, tied=False)
        assert model.config.padded_vocab == PADDED
        assert {table.shape for table in tables_of(model.shapes)} == {(PADDED, 32)}
    assert build((1, 1, 2), vocab=64, vocab_multiple=32).config.padded_vocab == 64


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_entries_begin_as_without_padding_and_padding_as_zeros_on_every_mesh(tied):
    plain = jax.tree.map(np.asarray, build((1, 1, 1), **SMALL, tied=tied).init(3))
    for mesh in [(1, 1, 1), (1, 1, 8)]:
        params = padded_model(mesh, tied=tied).init(3)
        jax.tree.map(np.testing.assert_array_equal, entries_of(params), plain)
        assert not any(np.asarray(table[VOCAB:]).any() for table in tables_of(params))


CASES = [
    ((1, 2, 2), dict(tied=False, embedding="all_to_all", microbatches=2)),
    ((1, 1, 8), dict(tied=True, embedding="vocab_parallel", attention="gqa", policy="zero1")),
    ((2, 1, 4), dict(tied=False, embedding="vocab_parallel", schedule="zero_bubble")),
]
MORE_CASES = [
    ((1, 1, 1), dict(tied=True, embedding="vocab_parallel")),
    ((1, 2, 4), dict(tied=True, embedding="vocab_parallel", attention="gqa", policy="zero1")),
    ((1, 1, 8), dict(tied=False, embedding="vocab_parallel")),
    ((2, 2, 2), dict(tied=True, embedding="vocab_parallel", schedule="one_f_one_b")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES)], ids=str
)
def test_loss_and_gradients_are_those_without_padding_on_every_mesh(mesh, changes):
    model = padded_model(mesh, z_coefficient=Z_COEFFICIENT, **changes)
    of_model = {key: changes[key] for key in ("tied", "attention") if key in changes}
    plain, losses, grads = unpadded(**of_model)
    params = params_of(model)
    jax.tree.map(np.testing.assert_array_equal, entries_of(params), jax.tree.map(np.asarray, plain))
    metrics, found = jax.jit(model.loss_and_grad)(params, batch())
    np.testing.assert_allclose((metrics["loss"], metrics["z_loss"]), losses, rtol=LOSS_ERROR)
    for (path, expected), actual in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(entries_of(found)), strict=True
    ):
        assert np.abs(actual - expected).max() <= GRADIENT_ERROR * np.abs(expected).max(), path
    assert all((np.asarray(table[VOCAB:]) == 0).all() for table in tables_of(found))
    evaluated = jax.jit(model.loss)(params, batch())
    np.testing.assert_allclose(evaluated["loss"], losses[0], rtol=LOSS_ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_padding_stays_zero_whatever_the_optimizer_adds(name):
    model = padded_model((1, 2, 2), tied=False)
    config = optimizer_config(name=name, weight_decay=0.5, warmup_steps=0, learning_rate=0.1)
    tx = make_optimizer(config, 4, model.plan.rows)

    @jax.jit
    def step(params, state):
        _, grads = model.loss_and_grad(params, batch())
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    params = model.init(0)
    state = tx.init(params)
    for _ in range(2):
        params, state = step(params, state)
    for table in tables_of(params):
        assert (np.asarray(table[VOCAB:]) == 0).all() and np.asarray(table[:VOCAB]).all()


@pytest.mark.slow
@pytest.mark.parametrize("embedding", ["vocab_parallel", "all_to_all"])
def test_logits_of_padding_are_minus_infinity_and_the_others_as_without(embedding):
    plain = build((1, 1, 1), **SMALL)
    expected = jax.jit(plain.logits)(params_of(plain), batch()["tokens"])
    model = padded_model((2, 1, 4), embedding=embedding)
    found = np.asarray(jax.jit(model.logits)(params_of(model), batch()["tokens"]))
    assert found.shape[-1] == PADDED and (found[..., VOCAB:] == -np.inf).all()
    np.testing.assert_allclose(found[..., :VOCAB], expected, atol=1e-5)


@pytest.mark.slow
def test_what_decoding_says_is_what_the_full_pass_says():
    model = padded_model((1, 1, 4))
    params, ids = params_of(model), batch()["tokens"][:2, :8]
    prompts = Prompts(ids, np.zeros(2, np.int32))
    found = decoded_logits(model, params, prompts, prefill=5)
    full = jax.jit(model.logits)(params, ids)
    assert (np.asarray(found)[..., VOCAB:] == -np.inf).all()
    np.testing.assert_allclose(found[..., :VOCAB], full[..., :VOCAB], atol=1e-5)


def test_padding_is_never_chosen():
    """Not even where all other logits are far below the zero that a row of zeros would have."""
    model = padded_model((1, 1, 4))
    params = params_of(model)
    params["head"]["norm"]["scale"] = jnp.zeros_like(params["head"]["norm"]["scale"])  # all logits are alike
    config = SampleConfig(prompt="", tokens=30, temperature=5.0, top_k=0, top_p=1.0, seed=0)
    written = np.concatenate(generate(model, params, [[1], [2], [3], [4]], config))
    assert written.max() < VOCAB and len(set(written.tolist())) > VOCAB / 2


@pytest.mark.slow
def test_what_one_sees_inside_has_the_entries_alone():
    model = padded_model((1, 1, 2))
    inside = px.look_inside(model, params_of(model), batch())
    assert inside.logits.shape[-1] == VOCAB and np.isfinite(inside.logits).all()
    np.testing.assert_allclose(inside.loss, unpadded()[1][0], rtol=1e-5)


def test_an_id_of_the_padding_is_no_id():
    model = padded_model((1, 1, 1))
    wrong = batch() | {"tokens": np.full_like(batch()["tokens"], VOCAB)}
    with pytest.raises(DataError, match=f"use 0 to {VOCAB - 1} "):
        model.loss(params_of(model), wrong)
    residual = "batch/dp seq d_model/tp"
    embedding = Embedding(
        EMBEDDINGS["vocab_parallel"], "batch/dp", residual, {"vocab": PADDED, "d_model": 2}, VOCAB, "float32", 0.0
    )
    rows = embedding.apply({"params": {"table": jnp.ones((PADDED, 2))}}, jnp.array([[VOCAB - 1, VOCAB]]), [0], None)
    assert np.isfinite(rows[0, 0]).all() and np.isnan(rows[0, 1]).all()
    losses = cross_entropy(
        jnp.zeros((2, PADDED)), jnp.array([VOCAB - 1, VOCAB]), Layout.parse("vocab d_model"), 0.0, VOCAB
    )
    np.testing.assert_allclose(losses[0], [np.log(VOCAB), np.nan], rtol=1e-6)


def test_a_multiple_that_divides_the_vocab_changes_nothing():
    models = [build((1, 1, 2), vocab=64, layers=2, vocab_multiple=multiple) for multiple in (1, 32)]
    plain, multiple = (str(jax.make_jaxpr(model.loss_and_grad)(model.shapes, make_batch(rows=16))) for model in models)
    assert plain == multiple


# ---- settings


def settings_with(**model):
    return read_settings(get_config(), model=dict(layers=2) | model)


def test_a_vocab_that_tp_does_not_divide_is_refused_with_the_padding_that_helps():
    with pytest.raises(ConfigError, match="model.vocab=50 does not divide over mesh.tp=4; .* or vocab_multiple=4") as _:
        build((1, 1, 4), **SMALL)
    with pytest.raises(ConfigError, match="model.vocab=55, padded from 50, does not .* or vocab_multiple=44"):
        build((1, 1, 4), **SMALL, vocab_multiple=11)
    build((1, 1, 4), **SMALL, vocab_multiple=44)


def test_a_vocab_that_the_tokenizer_says_is_rounded_or_padded():
    model = resolve(settings_with(), tokenizer=Bytes()).model
    assert model.padded_vocab == model.vocab == 384
    model = resolve(settings_with(vocab_multiple=64), tokenizer=Bytes()).model
    assert (model.vocab, model.padded_vocab) == (257, 320)


@pytest.mark.slow
def test_rows_of_padding_are_padding_to_the_count_of_flops_too():
    mesh = abstract_mesh(dict.fromkeys(AXES, 1))
    models = [model_of(settings_with(vocab=500, vocab_multiple=multiple), mesh) for multiple in (1, 512)]
    plain, padded = (flops_breakdown(model, 2, 64) for model in models)
    assert padded.model == plain.model
    more = 6 * 12 * models[0].config.d_model * 2 * 64
    assert padded.padding - plain.padding == pytest.approx(more)


# ---- runs


def losses_of(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.mark.slow
def test_a_run_with_padding_goes_on_with_the_same_losses_on_another_mesh(corpus, tmp_path):
    """257 entries in 264 rows, which four ranks of tp cut, or two of pp."""
    changes = {"model.vocab": 0, "model.vocab_multiple": 8, "train.steps": 4, "checkpoint.every_steps": 2}
    changes |= {"optimizer.warmup_steps": 0, "train.eval_batches": 0, "checkpoint.keep_best": 0}
    changes |= {"optimizer.schedule": "constant"}  # of which two steps are the first two of four

    def on(pp, dp, tp, steps=4):
        return tiny_config(corpus, **changes | {"mesh.pp": pp, "mesh.dp": dp, "mesh.tp": tp, "train.steps": steps})

    train(on(1, 8, 1), tmp_path / "stays")
    train(on(1, 2, 4, steps=2), tmp_path / "moves")
    assert load_settings(tmp_path / "moves").config.padded_vocab == 264
    train(on(2, 4, 1), tmp_path / "moves")
    there, here = losses_of(tmp_path / "stays"), losses_of(tmp_path / "moves")
    assert sorted(there) == sorted(here) == [1, 2, 3, 4]
    np.testing.assert_allclose([here[step] for step in here], [there[step] for step in here], rtol=1e-5)
    table = arrays_of(tmp_path / "moves", 4)["embedding.table"]
    assert table.shape[0] == 264 and not table[257:].any() and table[:257].all()


def test_a_run_keeps_its_padding():
    assert is_fixed("model.vocab_multiple")


def test_an_export_has_no_padding_and_comes_back_with_it(corpus, tmp_path):
    settings = own_settings(corpus, attention="gqa", vocab=300, vocab_multiple=64, tied=False)
    made = own_run(tmp_path / "mine", settings)  # whose padding is anything, to be sure that it is not what is written
    assert made["head.table"].shape[0] == 320
    assert main(["to-hf", str(tmp_path / "mine"), str(tmp_path / "out")]) == 0
    out, said = read_folder(tmp_path / "out"), json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["vocab_size"] == 300
    for name, ours in {"model.embed_tokens.weight": "embedding.table", "lm_head.weight": "head.table"}.items():
        assert out[name].tobytes() == made[ours][:300].tobytes() and out[name].shape[0] == 300
    assert main(["from-hf", str(tmp_path / "out"), "--workdir", str(tmp_path / "back")]) == 0
    back = arrays_of(tmp_path / "back", 0)["head.table"]
    assert back.shape[0] == 384 and (back[:300] == made["head.table"][:300]).all() and not back[300:].any()


def imported(folder, vocab, *flags):
    config = config_of("LlamaForCausalLM", vocab_size=vocab)
    write_folder(folder / "theirs", config, random_tensors(shapes_of(config)))
    assert main(["from-hf", str(folder / "theirs"), "--workdir", str(folder / "run"), *flags]) == 0
    return load_settings(folder / "run").model


def test_an_import_pads_by_itself_and_says_so(tmp_path, capsys):
    assert imported(tmp_path / "odd", 261).padded_vocab == 384
    assert "vocab_size=261 is padded to 384 (model.vocab_multiple=128), so that mesh.tp" in capsys.readouterr().out
    assert imported(tmp_path / "even", 384).padded_vocab == 384
    assert "padded" not in capsys.readouterr().out
    assert imported(tmp_path / "chosen", 261, "--config.model.vocab_multiple=6").padded_vocab == 264
    assert imported(tmp_path / "none", 261, "--config.model.vocab_multiple=1").padded_vocab == 261


def test_a_run_takes_the_padding_of_its_first_weights_or_has_the_same(tmp_path):
    imported(tmp_path, 261)

    def begun(**model):
        start = read_settings(get_config(), model=model, train={"init_from": str(tmp_path / "run")})
        return resolve(start).model

    assert (begun().vocab, begun().padded_vocab) == (261, 384)
    assert begun(vocab=261, vocab_multiple=384).vocab_multiple == 384  # as many rows
    with pytest.raises(ConfigError, match="model.vocab_multiple=1, but the weights .* have model.vocab_multiple=128"):
        begun(vocab=261)
    with pytest.raises(
        ConfigError, match="model.vocab_multiple=64, but the weights .* use 128, or model.vocab=0 and 1"
    ):
        begun(vocab_multiple=64)
    with pytest.raises(ConfigError, match="model.vocab=260, but .* have model.vocab=261; use 261, or 0 to take it"):
        begun(vocab=260)
