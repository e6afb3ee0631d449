"""Runs with code of a user's own: what they say, save, resume with and refuse; adapters on weights of another run."""

import json
import pathlib
import sys
import textwrap
from functools import partial

import jax
import numpy as np
import pytest
from support import user_parts
from support.docs_commands import EXTEND, blocks
from support.run_examples import losses, stop_at, tiny_config, train

import parallax as px
from parallax.checkpoint.steps import complete_steps, read_manifest
from parallax.config.settings import read_settings
from parallax.errors import CheckpointError, ConfigError, DataError
from parallax.interop.export import export_params, import_params
from parallax.interop.huggingface import to_hf
from parallax.sharding.mesh import make_mesh
from parallax.step.batches import open_split
from parallax.storage.run_files import RunFiles
from parallax.training.run import Outcome

PARTS = {
    "model.mlp": user_parts.SquaredMLP,
    "model.dense": user_parts.LoRA,
    "loss.name": user_parts.focal,
    "optimizer.name": user_parts.signs,
    "data_parallel.policy": user_parts.wide_gathered,
}


@pytest.fixture(scope="module")
def own_run(corpus, tmp_path_factory):
    """A finished run with own parts, given as objects."""
    folder = tmp_path_factory.mktemp("own")
    config = tiny_config(corpus, **{"optimizer.learning_rate": 1e-3})
    assert train(config, folder, code=PARTS).reason == "finished"
    return folder


def test_a_run_says_and_saves_what_code_it_uses(own_run):
    said = (own_run / "log.txt").read_text()
    for key, part in PARTS.items():
        assert f"{key} is code of your own: support.user_parts:{part.__name__} (files with SHA-256 " in said
    assert json.loads((own_run / "config.json").read_text())["model"]["mlp"] == "support.user_parts:SquaredMLP"
    newest = max(complete_steps(RunFiles(own_run).checkpoints))
    assert {*read_manifest(RunFiles(own_run).checkpoints, newest)["settings"]["user_code"]} == {*PARTS}
    assert "--config.model.mlp=support.user_parts:SquaredMLP" in said.partition("write text")[2].partition("\n")[0]
    trained = losses(own_run)
    assert trained[-1] < trained[0]


def test_a_run_of_own_code_is_loaded_only_with_it(own_run):
    with pytest.raises(ConfigError, match="model.mlp='support.user_parts:SquaredMLP' and model.dense=.* name code"):
        px.load(own_run)
    run = px.load(own_run, tp=2, code={key: part for key, part in PARTS.items() if key != "optimizer.name"})
    assert run.generate("It is", tokens=2).startswith("It is")


def test_a_run_is_loaded_without_its_own_policy_and_optimizer(own_run):
    of_training = ("optimizer.name", "data_parallel.policy")
    run = px.load(own_run, tp=2, code={key: part for key, part in PARTS.items() if key not in of_training})
    assert run.generate("It is", tokens=2).startswith("It is")


def test_a_conversion_needs_no_code_but_that_of_layers(corpus, own_run, tmp_path):
    config = tiny_config(corpus, **{"train.steps": 1, "train.eval_batches": 0, "optimizer.warmup_steps": 0})
    others = {key: part for key, part in PARTS.items() if not key.startswith("model.")}
    train(config, tmp_path / "run", code=others)
    export_params(tmp_path / "run", tmp_path / "exported", step=None, shard_bytes=1 << 30)
    import_params(tmp_path / "exported", tmp_path / "imported")
    assert complete_steps(RunFiles(tmp_path / "imported").checkpoints)
    export_params(own_run, tmp_path / "own", step=None, shard_bytes=1 << 30)
    with pytest.raises(ConfigError, match="model.mlp=.* and model.dense=.*: a conversion imports no code"):
        import_params(tmp_path / "own", tmp_path / "not_made")
    with pytest.raises(ConfigError, match="a conversion imports no code"):
        to_hf(own_run, tmp_path / "hf", step=None, like=None, dtype=None, shard_bytes=1 << 30)
    assert not (tmp_path / "hf").exists() and not (tmp_path / "not_made").exists()


def test_a_run_goes_on_only_with_the_same_files(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = """
        import optax

        def made(scale: float = 1.0):
            return optax.scale(scale)
        """
    file = tmp_path / "steps_of_mine.py"
    file.write_text(textwrap.dedent(text))
    config = tiny_config(corpus, **{"train.steps": 4, "train.eval_batches": 0})
    config.optimizer.update({"name": "steps_of_mine:made(scale=0.5)", "warmup_steps": 1})
    stop_at(monkeypatch, 1)
    assert train(config, tmp_path / "run").reason == "stopped"
    file.write_text(file.read_text() + "\n# a remark\n")
    with pytest.raises(CheckpointError, match="other settings: user_code.optimizer.name=.* --changed-code"):
        train(config, tmp_path / "run")
    assert train(config, tmp_path / "run", changed_code=True) == Outcome("finished", 4, None)
    config.optimizer.name, config.train.steps = "steps_of_mine:made(scale=0.25)", 5
    with pytest.raises(CheckpointError, match="with other settings: optimizer.name='steps_of_mine:made"):
        train(config, tmp_path / "run", changed_code=True)
    del sys.modules["steps_of_mine"]


@pytest.mark.slow
def test_code_of_keys_that_may_change_is_changed_without_a_flag(corpus, tmp_path):
    """Of a policy, of which no number of a run is another one; only the same text with other files is not accepted."""
    config = tiny_config(corpus, **{"train.steps": 1, "train.eval_batches": 0, "optimizer.warmup_steps": 0})
    train(config, tmp_path, code={"data_parallel.policy": user_parts.wide_gathered})
    config.train.steps = 2
    assert train(config, tmp_path).step == 2
    config.train.steps = 3
    assert train(config, tmp_path, code={"data_parallel.policy": user_parts.wide_gathered}).step == 3
    assert "data_parallel.policy='support.user_parts:wide_gathered' there, 'zero3' here" in (
        (tmp_path / "log.txt").read_text()
    )


@pytest.mark.slow
def test_adapters_begin_on_the_weights_of_another_run_and_train_alone(corpus, whole_run, tmp_path):
    config = tiny_config(corpus, **{"train.init_from": str(whole_run), "train.steps": 3})
    config.optimizer.frozen = "embedding head blocks/*/kernel blocks/*_norm"
    train(config, tmp_path / "run", code={"model.dense": user_parts.LoRA})
    said = (tmp_path / "run" / "log.txt").read_text()
    assert "has no blocks.attention.k.a, " in said and "they begin with their initial values" in said
    base, tuned = px.load(whole_run).params, px.load(tmp_path / "run", code={"model.dense": user_parts.LoRA}).params
    kernels = [params["blocks"]["mlp"]["up"]["kernel"] for params in (base, tuned)]
    np.testing.assert_array_equal(*map(jax.device_get, kernels))
    assert np.abs(tuned["blocks"]["mlp"]["up"]["a"]).max() > 0


@pytest.mark.slow
def test_the_low_rank_product_of_the_docs_has_the_same_losses_on_a_mesh(corpus, whole_run, tmp_path, monkeypatch):
    (code,) = [block.text for block in blocks(EXTEND.read_text()) if block.title == "low_rank.py"]
    (tmp_path / "low_rank.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    few = {"train.steps": 3, "train.eval_batches": 0, "optimizer.warmup_steps": 0}
    config = tiny_config(corpus, **{"train.init_from": str(whole_run), **few})
    config.optimizer.frozen = "embedding head blocks/*/kernel blocks/*_norm"
    config.model.dense = "low_rank:LowRank(rank=2)"
    for name, size in (("one", 1), ("mesh", 2)):
        config.mesh.update(dict(dp=size, tp=size))
        monkeypatch.setattr("parallax.training.build.make_mesh", partial(make_mesh, devices=jax.devices()[: size**2]))
        train(config, tmp_path / name)
    one, mesh = (np.asarray(losses(tmp_path / name)) for name in ("one", "mesh"))
    np.testing.assert_allclose(mesh, one, rtol=1e-6)
    assert len({*one}) == len(one) >= 3
    assert "has no blocks.attention.k.a, " in (tmp_path / "mesh" / "log.txt").read_text()
    del sys.modules["low_rank"]


# ---- sources


def documents(**data):
    """The data of a tiny run, with other keys."""
    config = tiny_config(pathlib.Path("."))
    return read_settings(config, data={"cache": "", "path": "", "seq": 8, "global_batch": 2, **data})


@pytest.mark.parametrize("returned", ["a whole text", None, 3])
def test_a_source_that_returns_no_documents_is_named(tmp_path, returned):
    def source():
        return returned

    kind = type(returned).__name__
    with pytest.raises(DataError, match=f"returns a {kind}, not documents; yield a text for each"):
        open_split(documents(source=source, tokenizer="bytes"), RunFiles(tmp_path), "train")


@pytest.mark.parametrize("code", ["support.user_parts:read_lines(least=4)", "support.user_parts:numbers(most=40)"])
def test_a_source_of_ones_own_is_prepared_once_and_read_in_order(code, tmp_path):
    (tmp_path / "corpus.txt").write_text("one line\nno\nanother line\n" * 20)
    data = {"source": code, "path": str(tmp_path / "corpus.txt") if "lines" in code else "", "tokenizer": "bytes"}
    settings = documents(**data)
    first, again = (open_split(settings, RunFiles(tmp_path), "train") for _ in range(2))
    assert first.fingerprint == again.fingerprint and first.tokens == again.tokens > 100
    np.testing.assert_array_equal(first.batch(0)["tokens"], again.batch(0)["tokens"])
    assert first.manifest.request["source"]["kind"] == code


def test_a_source_that_yields_no_text_is_named(tmp_path):
    with pytest.raises(DataError, match="data.source='support.user_parts:no_texts': document 2 is a int; yield texts"):
        open_split(documents(source=user_parts.no_texts, tokenizer="bytes"), RunFiles(tmp_path), "train")
