"""The loss of a trained model on a text: that of a direct computation, on every mesh; and runs that start from one."""

import json
import math
import shutil
import zlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.checkpoint_examples import save_settings
from support.run_examples import TEXT, tiny_config

from parallax.cli.command import load_config
from parallax.cli.evaluate import evaluate, main, open_text
from parallax.config.sections import ALL_AXES, DataConfig, MeshConfig
from parallax.config.settings import load_settings, read_settings
from parallax.data import open_reader
from parallax.data.reader import documents_of_split
from parallax.data.tokenizer import Bytes, load_tokenizer
from parallax.errors import CheckpointError, ConfigError, DataError
from parallax.inference.run import Run, load_trained
from parallax.step.resolve import resolve, run_tokenizer, vocab_of_weights
from parallax.storage.run_files import read_metrics
from parallax.training.build import build
from parallax.training.folder import RunFolder
from parallax.training.run import train

ONE = {**dict.fromkeys(ALL_AXES, 1), "simulate": 0}


def on(run, **mesh):
    """The run's settings on another mesh."""
    config = load_config(run / "config.json")[0]
    config.mesh.update(ONE | mesh)
    return read_settings(config)


def directly(run, texts):
    """Nats, tokens, and both by position in the window: each document's tokens and end, cut into windows of the stream,
    scored by the plain logits."""
    settings = on(run)
    trained = load_trained(run, settings, MeshConfig(**ONE), None, "")
    tokenizer, seq = trained.tokenizer, settings.data.seq
    stream, document = [], []
    for number, text in enumerate(texts):
        ids = [*tokenizer.encode(text).tolist(), tokenizer.end]
        stream, document = stream + ids, document + [number] * len(ids)
    nats, count, logits = 0.0, 0, jax.jit(trained.model.logits)
    of_position = np.zeros((2, seq))
    for start in range(0, len(stream) - 1, seq):
        ids, own = np.array(stream[start : start + seq]), np.array(document[start : start + seq])
        pad = seq - len(ids)
        positions = np.array([at - np.flatnonzero(own == own[at])[0] for at in range(len(ids))])
        rows = [np.pad(part, (0, pad)).astype(np.int32)[None] for part in (ids, own - own[0] + 1, positions)]
        scores = np.asarray(logits(trained.params, *rows)[0], np.float64)
        for at in range(len(ids)):
            following = start + at + 1
            if following < len(stream) and document[following] == document[start + at]:
                row = scores[at]
                loss = np.log(np.exp(row - row.max()).sum()) + row.max() - row[stream[following]]
                nats, count = nats + loss, count + 1
                of_position[:, at] += loss, 1
    return nats, count, of_position


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "other.jsonl"
    texts = ["One text. " + TEXT, "Ünicode has more bytes than letters. " * 3, "short", TEXT * 2]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file, texts


@pytest.fixture(scope="module")
def observed_run(observed_run, tmp_path_factory):
    """A copy, since evaluations prepare their texts in the run's folder, and other workers copy that folder, too."""
    folder = tmp_path_factory.mktemp("evaluated")
    shutil.copytree(observed_run.parent, folder, dirs_exist_ok=True)
    return folder / observed_run.name


@pytest.fixture(scope="module")
def on_one_device(observed_run, text_file):
    return evaluate(observed_run, on(observed_run), data=str(text_file[0]))


def test_loss_and_bits_per_byte_are_those_of_a_direct_computation(observed_run, text_file, on_one_device):
    nats, count, (nats_S, count_S) = directly(observed_run, text_file[1])
    size = sum(len(text.encode()) for text in text_file[1])
    assert (on_one_device.tokens, on_one_device.text_bytes, on_one_device.documents) == (count, size, 4)
    # Float32 logits on our side: each of about a hundred terms is off by 2^-24 of its size.
    assert on_one_device.loss == pytest.approx(nats / count, rel=1e-6)
    assert on_one_device.perplexity == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert on_one_device.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    ranges = {0: slice(0, 1), 1: slice(1, 2), 2: slice(2, 4), 4: slice(4, 8), 8: slice(8, 16), 16: slice(16, 32)}
    by_position = {first: nats_S[part].sum() / count_S[part].sum() for first, part in ranges.items()}
    assert on_one_device.positions == pytest.approx(by_position, rel=1e-5)
    assert f"8-15                    {by_position[8]:.4f}" in str(on_one_device)


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "mesh", [dict(pp=2, dp=2, tp=2), dict(pp=2, dp=1, ep=2, tp=2), dict(pp=1, dp=2, cp=4, tp=1)], ids=str
)
def test_every_mesh_gives_the_same_loss_and_counts_the_same_tokens(observed_run, text_file, on_one_device, mesh):
    cut = evaluate(observed_run, on(observed_run, **mesh), data=str(text_file[0]))
    assert cut.mesh == mesh and cut.tokens == on_one_device.tokens
    assert cut.loss == pytest.approx(on_one_device.loss, abs=1e-6)
    assert cut.bits_per_byte == pytest.approx(on_one_device.bits_per_byte, abs=1e-6)
    assert cut.positions == pytest.approx(on_one_device.positions, abs=1e-5)


def test_the_held_out_part_is_that_of_the_run_and_its_bytes_are_counted(observed_run, capsys):
    assert main(["evaluate", f"--workdir={observed_run}", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    row = read_metrics(observed_run / "metrics.jsonl")[-1]
    assert found["loss"] == pytest.approx(row["eval/loss"], rel=1e-6)
    assert "step 8 of" in err and "on pp2·dp2·tp2: the run's held-out text" in err
    settings = load_settings(observed_run)
    reader = open_reader(settings.data, folder=observed_run / "data", vocab=None, split="all")
    texts = [path.read_text() for path in sorted((observed_run.parent / "corpus").glob("*.txt"))]
    hashes = np.concatenate([shard.read_documents(reader.folder)["hash"] for shard in reader.manifest.shards])
    chosen = documents_of_split(hashes, split="eval", eval_fraction=settings.data.eval_fraction)
    held_out = [text for text, out in zip(texts, chosen) if out]
    assert found["documents"] == len(held_out) == 8 and found["bytes_exact"]
    assert found["text_bytes"] == sum(map(len, held_out))


def test_all_of_a_corpus_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 5)
    config = {"source": "text", "path": str(tmp_path / "a.txt"), "field": "", "tokenizer": "bytes", "bpe_vocab": 300}
    config |= {"cache": "", "seq": 8, "global_batch": 4, "eval_fraction": 0.0, "seed": 0, "synthetic_tokens": 2}
    reader = open_reader(DataConfig(**config), folder=tmp_path / "data", vocab=None, split="all")
    labels = np.concatenate([reader.batch(at)["labels"].ravel() for at in range(reader.batches)])
    wanted = sorted([*b"123456789" * 5, *b"0" * 4, 256])
    assert sorted(labels[labels >= 0].tolist()) == wanted and reader.text_bytes() == (50, True)


def test_bytes_that_a_tokenizer_does_not_give_back_are_estimated_and_said(observed_run):
    settings = load_settings(observed_run)
    reader = open_reader(settings.data, folder=observed_run / "data", vocab=None, split="eval")
    exact, known = reader.text_bytes()
    decode = reader.tokenizer.decode
    reader.tokenizer.decode = lambda ids, **how: decode(ids, **how).lower()
    estimated, sure = reader.text_bytes()
    assert known and not sure and estimated == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "--workdir is required: the folder of the run"),
        (["--workdir=nowhere"], 3, "--workdir=nowhere is not the folder of a run: it has no config.json"),
        (["--workdir={run}", "--data=nowhere.txt"], 5, "data.path='nowhere.txt': there is no such file or folder"),
        (["--workdir={run}", "--step=5"], 3, "there is no checkpoint of step 5 in"),
        (["--workdir={run}", "--config.mesh.tp=3"], 2, "choose with --config.mesh.pp, --config.mesh."),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(observed_run, capsys, arguments, status, words):
    assert main(["evaluate", *(argument.format(run=observed_run) for argument in arguments)]) == status
    error = capsys.readouterr().err.splitlines()
    assert words in error[-1]


# ---- runs that start from the weights of another


def one_batch(run, folder):
    """A text of exactly one batch of windows, of 8 x 32 tokens by the run's tokenizer and one more, its end."""
    tokenizer, long = load_tokenizer(run), TEXT * 20
    size = next(at for at in range(256, len(long)) if len(tokenizer.encode(long[:at])) == 8 * 32)
    (folder / "one.txt").write_text(long[:size])
    return folder / "one.txt"


def tuned_config(run, file, **changes):
    """What fine-tunes a run on a file; the tokenizer and the vocabulary are left open."""
    tuned = {"data.path": str(file), "data.tokenizer": "auto", "data.eval_fraction": 0.0, "data.cache": ""}
    tuned |= {"train.init_from": str(run), "train.steps": 3, "train.eval_batches": 0, "checkpoint.keep_best": 0}
    return tiny_config(file.parent, **{"model.dropout": 0.0, **tuned, **changes})


@pytest.mark.slow
def test_a_run_that_starts_from_weights_reads_with_their_tokenizer_and_begins_at_their_loss(
    observed_run, tmp_path, capsys
):
    file = one_batch(observed_run, tmp_path)
    train(tuned_config(observed_run, file), tmp_path / "tuned")
    assert f"the tokenizer is that of {observed_run}: bpe, 280 ids" in capsys.readouterr().out
    assert load_tokenizer(tmp_path / "tuned").fingerprint == load_tokenizer(observed_run).fingerprint
    losses = [row["train/loss"] for row in read_metrics(tmp_path / "tuned" / "metrics.jsonl")]
    before = evaluate(observed_run, on(observed_run), data=str(file))
    assert before.tokens == 8 * 32
    assert losses[0] == pytest.approx(before.loss, rel=1e-6) and losses[-1] < losses[0]
    after = evaluate(tmp_path / "tuned", on(tmp_path / "tuned"), data=str(file))
    assert after.step == 3 and after.loss < before.loss

    # What it started from may go: the run has its own tokenizer and vocabulary, and goes on.
    moved = tmp_path / "gone"
    config = tuned_config(moved, file, **{"train.steps": 4})
    assert train(config, tmp_path / "tuned").step == 4
    assert load_settings(tmp_path / "tuned").model.vocab == load_settings(observed_run).model.vocab


def test_a_vocabulary_that_does_not_fit_is_refused_with_both_numbers(observed_run, tmp_path):
    file = one_batch(observed_run, tmp_path)
    with pytest.raises(ConfigError) as error:
        train(tuned_config(observed_run, file, **{"model.vocab": 512}), tmp_path / "tuned")
    assert f"model.vocab=512, but the weights of train.init_from={str(observed_run)!r} have model.vocab=384" in str(
        error.value
    )
    assert "use 384, or 0 to take it from there" in str(error.value) and not (tmp_path / "tuned").exists()
    with pytest.raises(ConfigError, match="model.vocab=384 is less than the 700 ids of tokenizer 'bpe'"):
        changes = {"data.tokenizer": "bpe", "data.bpe_vocab": 700, "data.path": str(write_words(tmp_path))}
        train(tuned_config(observed_run, file, **changes), tmp_path / "tuned")


def write_words(folder):
    """A text with enough different words for a large vocabulary."""
    random = np.random.default_rng(0)
    words = ["".join(map(chr, random.integers(97, 123, 6))) for _ in range(400)]
    (folder / "words.txt").write_text(" ".join(random.choice(words, 4000)))
    return folder / "words.txt"


def test_another_tokenizer_for_the_same_weights_is_refused(observed_run, tmp_path):
    file = one_batch(observed_run, tmp_path)
    with pytest.raises(CheckpointError, match="learned other ids"):
        train(tuned_config(observed_run, file, **{"data.tokenizer": "bytes"}), tmp_path / "tuned")


def test_the_vocabulary_of_the_weights_is_taken_where_the_tokenizer_has_fewer(observed_run, tmp_path):
    source, manifest = tmp_path / "source", "checkpoints/8/manifest.json"
    shutil.copytree(observed_run, source)
    about = json.loads((source / manifest).read_text())
    about["content"]["settings"]["model"]["vocab"] = 303  # as models of others have: no multiple of 128
    about["crc32"] = zlib.crc32(json.dumps(about["content"], sort_keys=True).encode())
    (source / manifest).write_text(json.dumps(about))
    config = tuned_config(source, one_batch(source, tmp_path))
    settings = build(read_settings(config), RunFolder(tmp_path / "run")).settings
    assert settings.model.vocab == 303 and settings.data.tokenizer == "auto"


def test_a_damaged_newest_step_is_passed_over_for_its_tokenizer_and_vocabulary(tmp_path):
    config = tiny_config(tmp_path, **{"data.tokenizer": "auto", "model.vocab": 0})
    for step in ("4", "8"):
        at = tmp_path / "run" / "checkpoints" / step
        at.mkdir(parents=True)
        Bytes().save(at)
        (at / "manifest.json").write_text('{"format": 2, "con')
    (at / "tokenizer.json").write_text('{"parall')
    assert run_tokenizer(read_settings(config), tmp_path / "run") == "bytes"
    config.train.init_from = str(tmp_path / "run")
    assert vocab_of_weights(read_settings(config)) == {}
    (at.parent / "4" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="does not exist"):
        run_tokenizer(read_settings(config), tmp_path / "run")


def test_a_run_that_goes_on_has_its_own_vocabulary_whatever_its_source_has(tmp_path):
    for name, vocab in (("run", 384), ("source", 512)):
        save_settings(tmp_path / name / "checkpoints", 8, {"model": {"vocab": vocab}})
    changes = {"train.init_from": str(tmp_path / "source"), "model.vocab": 0}
    settings = read_settings(tiny_config(tmp_path, **changes))
    assert resolve(settings, run=tmp_path / "run").model.vocab == 384
    assert resolve(settings, run=tmp_path / "new").model.vocab == 512
    settings = read_settings(tiny_config(tmp_path, **{**changes, "model.vocab": 384}))
    assert resolve(settings, run=tmp_path / "run") == settings
    with pytest.raises(ConfigError, match="model.vocab=512"):
        resolve(settings, run=tmp_path / "new")


def test_other_text_is_not_cut_by_the_filter_of_the_runs_records(corpus, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a", "score": 1}\n')
    data = {"source": "jsonl", "path": str(tmp_path / "x.jsonl"), "where": "score > 0", "tokenizer": "bytes"}
    config = read_settings(tiny_config(corpus, **{f"data.{name}": value for name, value in data.items()})).data
    every_row = NamedSharding(jax.make_mesh((1,), "dp"), PartitionSpec())
    model = SimpleNamespace(config=SimpleNamespace(vocab=384), axis_sizes={"dp": 1}, batch_sharding=every_row)
    trained = Run(tmp_path, 8, None, model, None, Bytes())
    (reader,) = open_text(trained, config, f"{corpus}/00.txt", RunFolder(tmp_path)).values()
    assert reader.documents == 1


def test_a_tokenizer_that_is_not_the_one_of_training_is_refused(corpus, tmp_path):
    config = read_settings(tiny_config(corpus, **{"data.tokenizer": "bytes"})).data
    sizes, every_row = SimpleNamespace(vocab=384), NamedSharding(jax.make_mesh((1,), "dp"), PartitionSpec())
    model = SimpleNamespace(config=sizes, axis_sizes={"pp": 1, "dp": 1}, batch_sharding=every_row)
    trained = Run(tmp_path, 8, None, model, None, SimpleNamespace(fingerprint="of another corpus"))
    with pytest.raises(DataError, match="read with another tokenizer than that of step 8: data.tokenizer='bytes'"):
        open_text(trained, config, None, RunFolder(tmp_path))


@pytest.mark.parametrize("number", [0, 1])
def test_of_several_processes_the_first_one_prints(number, monkeypatch, capsys):
    monkeypatch.setattr("parallax.cli.evaluate.asked", lambda argv: "loss 5.3467")
    monkeypatch.setattr(jax, "process_index", lambda: number)
    assert main(["evaluate"]) == 0
    assert capsys.readouterr().out == ("" if number else "loss 5.3467\n")
