"""Windows against dumb oracles, and the law that a batch is a function of (data, seed, step)."""

import gc
import hashlib
import os
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from support.data_examples import TEXTS, data_config, prepare_texts, prepared_reader

from parallax.data import open_reader
from parallax.data.reader import TokenStream
from parallax.errors import ConfigError, DataError
from parallax.model.batch import IGNORED

END = 256
documents = st.lists(st.text("ab\né", max_size=40), min_size=2, max_size=12).filter(
    lambda texts: sum(map(bool, texts)) >= 2
)


def assert_same(batch, other):
    assert batch.keys() == other.keys() == {"tokens", "labels", "segments", "positions"}
    for name, array in batch.items():
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, other[name], name)


def held_out(texts, fraction):
    """Eval documents: those with the least hashes."""
    digests = {text: hashlib.blake2b(text.encode(), digest_size=8).digest()[::-1] for text in texts}
    count = min(max(round(fraction * len(texts)), 1), len(texts) - 1)
    order = sorted(range(len(texts)), key=lambda i: (digests[texts[i]], i))
    return set(order[:count])


def stream_of(texts, split, fraction):
    """Ids of a split, one document after the other."""
    texts = [text for text in texts if text]
    evals = held_out(texts, fraction) if fraction else set()
    ids = []
    for i, text in enumerate(texts):
        if (i in evals) == (split == "eval"):
            ids += [*text.encode(), END]
    return ids


def window_of(ids, start, seq):
    """Columns of one window: token, label, segment, position."""
    columns, segment, position = [], 1, 0
    for at in range(start, start + seq):
        if at + 1 >= len(ids):
            columns.append((0, IGNORED, 0, 0))
            continue
        ended = ids[at] == END
        columns.append((ids[at], IGNORED if ended else ids[at + 1], segment, position))
        segment, position = (segment + 1, 0) if ended else (segment, position + 1)
    return tuple(columns)


def rows_of(batch):
    arrays = [batch[name].tolist() for name in ("tokens", "labels", "segments", "positions")]
    return [tuple(zip(*columns)) for columns in zip(*arrays)]


@given(
    texts=documents,
    seq=st.integers(1, 9),
    batch=st.integers(1, 5),
    fraction=st.sampled_from([0.0, 0.01, 0.5]),
    shard_bytes=st.sampled_from([1, 30, 1000]),
)
def test_an_epoch_holds_every_window_of_the_stream_once(texts, seq, batch, fraction, shard_bytes):
    ids = stream_of(texts, "train", fraction)
    windows = (len(ids) - 1) // seq
    batch = max(1, min(batch, windows))
    with tempfile.TemporaryDirectory() as folder:
        prepare_texts(texts, Path(folder), shard_bytes=shard_bytes)
        options = {"seq": seq, "global_batch": batch, "eval_fraction": fraction}
        if windows < 1:
            with pytest.raises(DataError, match=f"{len(ids)} tokens, 0 windows"):
                prepared_reader(Path(folder), **options)
            return
        reader = prepared_reader(Path(folder), **options)
        assert (reader.tokens, reader.windows) == (len(ids), windows)
        rows = [row for step in range(2 * windows) for row in rows_of(reader.batch(step))]
    expected = sorted(window_of(ids, start * seq, seq) for start in range(windows))
    for epoch in range(2):
        assert sorted(rows[epoch * windows : (epoch + 1) * windows]) == expected


@given(
    texts=documents,
    seq=st.integers(1, 9),
    batch=st.integers(1, 7),
    fraction=st.sampled_from([0.01, 0.5]),
)
def test_evaluation_counts_every_token_once(texts, seq, batch, fraction):
    ids = stream_of(texts, "eval", fraction)
    with tempfile.TemporaryDirectory() as folder:
        prepare_texts(texts, Path(folder))
        options = {"seq": seq, "global_batch": batch, "eval_fraction": fraction, "split": "eval"}
        reader = prepared_reader(Path(folder), **options)
        batches = [reader.batch(step) for step in range(reader.batches)]
        assert_same(reader.batch(reader.batches), batches[0])
    rows = [row for one in batches for row in rows_of(one)]
    padding = window_of([], 0, seq)
    expected = [window_of(ids, start, seq) for start in range(0, len(ids) - 1, seq)]
    expected += [padding] * (len(rows) - len(expected))
    assert sorted(rows) == sorted(expected)
    assert len(rows) == -(-reader.windows // batch) * batch
    labels = np.concatenate([one["labels"].ravel() for one in batches])
    assert (labels != IGNORED).sum() == len(ids) - ids.count(END)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    prepare_texts(TEXTS * 3, folder)
    return folder


@pytest.mark.parametrize("split", ["train", "eval"])
@given(step=st.integers(0, 500), row=st.integers(0, 7), cuts=st.sets(st.integers(1, 11)))
def test_hosts_read_pieces_of_rows(folder, split, step, row, cuts):
    """Segments and positions go on where the piece before ends, though its ids are not read; padding too."""
    options = {"split": split, "eval_fraction": 0.3, "global_batch": 8, "seq": 12}
    whole = prepared_reader(folder, **options).batch(step)
    bounds = [0, *sorted(cuts), 12]
    parts = [
        prepared_reader(folder, rows=[row], columns=range(a, b), **options).batch(step)
        for a, b in zip(bounds, bounds[1:])
    ]
    own = {name: array[row : row + 1] for name, array in whole.items()}
    assert_same(own, {name: np.concatenate([part[name] for part in parts], axis=1) for name in whole})


def test_of_a_row_no_more_is_read_than_a_piece_and_its_last_label(folder, monkeypatch):
    counts = []
    read = TokenStream.read
    monkeypatch.setattr(TokenStream, "read", lambda self, starts, n: counts.append(n) or read(self, starts, n))
    prepared_reader(folder, seq=12, columns=range(4, 8)).batch(0)
    assert counts == [5]


@pytest.mark.parametrize("columns", [range(0), range(8, 13), range(-1, 2), range(0, 8, 2)])
def test_columns_outside_of_a_row_are_refused(folder, columns):
    with pytest.raises(
        ConfigError, match=r"columns range\(.*\) are not columns of data.seq=12; use a range in 0 to 11"
    ):
        prepared_reader(folder, seq=12, columns=columns)


@pytest.mark.parametrize("split", ["train", "eval"])
@given(step=st.integers(0, 500), cuts=st.sets(st.integers(1, 7)))
def test_hosts_read_parts_of_one_global_batch(folder, split, step, cuts):
    options = {"split": split, "eval_fraction": 0.3, "global_batch": 8}
    whole = prepared_reader(folder, **options).batch(step)
    bounds = [0, *sorted(cuts), 8]
    parts = [prepared_reader(folder, rows=range(a, b), **options).batch(step) for a, b in zip(bounds, bounds[1:])]
    assert_same(whole, {name: np.concatenate([part[name] for part in parts]) for name in whole})


def test_rows_may_be_any_in_any_order(folder):
    rows = [6, 0, 3]
    whole, part = (prepared_reader(folder, global_batch=8, rows=chosen).batch(5) for chosen in (None, rows))
    assert_same({name: array[rows] for name, array in whole.items()}, part)


@given(steps=st.lists(st.integers(0, 10**6), min_size=1, max_size=8))
def test_a_batch_does_not_depend_on_what_was_read_before(folder, steps):
    used = prepared_reader(folder)
    for step in steps:
        assert_same(used.batch(step), prepared_reader(folder).batch(step))


def test_batches_never_share_memory(folder):
    reader = prepared_reader(folder)
    first, again = reader.batch(0), reader.batch(0)
    first["tokens"][:] = 0
    assert_same(again, reader.batch(0))


def test_another_seed_gives_another_order(folder):
    rows = [rows_of(prepared_reader(folder, seed=seed).batch(0)) for seed in range(3)]
    assert len({tuple(row) for row in rows}) == 3


def test_the_batches_are_the_same_for_ever(tmp_path):
    reader = open_reader(data_config(source="moby"), folder=tmp_path, vocab=None, split="train")
    content = b"".join(reader.batch(step)[name].tobytes() for step in (0, 33, 40) for name in sorted(reader.batch(0)))
    assert hashlib.sha256(content).hexdigest() == GOLDEN_MOBY
    assert (reader.tokens, reader.windows) == (278_628, 1088)


def test_the_fingerprint_says_whether_batches_are_equal(folder, tmp_path):
    prepare_texts([*TEXTS, "one more"], tmp_path)
    readers = [
        prepared_reader(folder),
        prepared_reader(folder, seed=1),
        prepared_reader(folder, seq=7),
        prepared_reader(folder, global_batch=3),
        prepared_reader(folder, eval_fraction=0.2),
        prepared_reader(folder, eval_fraction=0.2, split="eval"),
        prepared_reader(tmp_path),
    ]
    assert len({reader.fingerprint for reader in readers}) == len(readers)
    assert prepared_reader(folder, rows=range(1, 2)).fingerprint == readers[0].fingerprint


def test_entropies_are_those_of_the_corpus(folder):
    manifest = prepared_reader(folder).manifest
    ids = np.array(stream_of(TEXTS * 3, "train", 0))
    for entropy, values in ((manifest.token_entropy_nats, ids), (manifest.byte_entropy_nats, ids[ids != END])):
        share = np.unique(values, return_counts=True)[1] / len(values)
        assert entropy == pytest.approx(-(share * np.log(share)).sum())
    assert manifest.bytes_per_token == (ids != END).sum() / len(ids)


@pytest.mark.parametrize("source, tokenizer", [("stdlib", "bytes"), ("moby", "bpe"), ("synthetic", "bytes")])
def test_built_in_corpora_need_nothing_but_a_folder(source, tokenizer, tmp_path):
    config = data_config(source=source, tokenizer=tokenizer, bpe_vocab=500)
    train, held = (open_reader(config, folder=tmp_path, vocab=512, split=split) for split in ("train", "eval"))
    assert train.batch(0)["tokens"].shape == (32, 256)
    assert held.tokens < 0.15 * train.tokens
    assert len([*tmp_path.iterdir()]) == 1
    text = train.tokenizer.decode(train.batch(0)["tokens"][0])
    assert len(text) > 200 and "\N{REPLACEMENT CHARACTER}" not in text[2:-2]


def test_the_cache_is_used_when_it_is_given(tmp_path):
    config = data_config(source="moby", cache=str(tmp_path / "cache"))
    open_reader(config, folder=tmp_path / "run", vocab=None, split="train")
    assert not (tmp_path / "run").exists()
    assert [*(tmp_path / "cache").glob("moby-bytes-*/manifest.json")]


def test_fewer_windows_than_a_batch_are_refused_with_both_numbers(folder):
    with pytest.raises(DataError, match=r"\d+ tokens, 3 windows of data.seq=256, fewer than data.global_batch=32"):
        prepared_reader(folder, seq=256, global_batch=32)


def test_a_model_with_too_small_a_vocab_is_refused(folder):
    with pytest.raises(ConfigError, match="model.vocab=256 is less than the 257 ids of tokenizer 'bytes'"):
        prepared_reader(folder, vocab=256)


def test_a_split_that_is_not_held_out_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"eval_fraction=0 holds out no document"):
        prepared_reader(folder, split="eval", eval_fraction=0.0)
    with pytest.raises(ConfigError, match="split='test' is unknown; .*known: train, eval"):
        prepared_reader(folder, split="test")
    prepare_texts(["just one document"], tmp_path)
    with pytest.raises(ConfigError, match=r"holds out whole documents, but the corpus has 1; .*eval_fraction=0"):
        prepared_reader(tmp_path, eval_fraction=0.02)


@pytest.mark.parametrize("rows", [range(0), range(2, 5), range(-1, 2), [4, 0]])
def test_rows_outside_of_the_batch_are_refused(folder, rows):
    with pytest.raises(ConfigError, match=r"rows .* are not rows of data.global_batch=4; use 0 to 3"):
        prepared_reader(folder, rows=rows)


GOLDEN_MOBY = "e994a5b016025a282d3e9a0b4aaf5e2d063db610540cb46341da51a935759ea6"


def test_a_stream_that_is_dropped_closes_its_files_at_once(tmp_path):
    """Without a collection of garbage, which may be late."""
    prepare_texts(TEXTS, tmp_path)
    reader = prepared_reader(tmp_path)
    reader.batch(0)
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        del reader
        assert len(os.listdir("/proc/self/fd")) < before
    finally:
        gc.enable()
