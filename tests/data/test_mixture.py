"""Mixtures: whose rows are in which batch, wherever and whenever it is read; ends, phases, paths, fields and errors."""

import dataclasses
import json
import sys

import numpy as np
import pytest
from support.data_examples import data_config, prepare_texts

from parallax.cli.command import read_line
from parallax.config.sections import DataConfig
from parallax.config.settings import code_of, default_settings, load_settings, read_settings
from parallax.data import mixture as mixture_module
from parallax.data import open_mixture, open_reader, open_sources
from parallax.errors import ConfigError, DataError
from parallax.step.resolve import in_largest_batches, likely_entries

SEQ, BATCH = 8, 6
TEXTS = {name: [f"{name} {number} " * 9 for number in range(40)] for name in ("web", "code", "math")}
# Rows and columns of a batch that each process of a mesh holds: all of them, rows, columns, both, and interleaved rows.
MESHES = {
    "1": [(slice(None), (0, 1))],
    "dp 3": [(slice(0, None, 3), (0, 1)), (slice(1, None, 3), (0, 1)), (slice(2, None, 3), (0, 1))],
    "cp 2": [(slice(None), (0, 0.5)), (slice(None), (0.5, 1))],
    "dp 2, cp 2": [(rows, cut) for rows in (slice(0, None, 2), slice(1, None, 2)) for cut in ((0, 0.5), (0.5, 1))],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepared shards of three sources. Not to be changed."""
    folder = tmp_path_factory.mktemp("sources")
    for name, texts in TEXTS.items():
        prepare_texts(texts, folder / name)
    return folder


def config_of(folder, phases: str = "", **settings: str) -> DataConfig:
    """A mixture of sources with these settings."""
    written = {"web": "weight=7", "code": "weight=2", "math": "weight=1"} | settings
    text = " ".join(f"{name}=(path='{folder / name}', {each})" for name, each in written.items())
    return data_config(mixture=text, phases=phases, seq=SEQ, global_batch=BATCH, eval_fraction=0.1)


def mixture_of(folder, *args, **settings):
    return open_mixture(config_of(folder, *args, **settings), folder=folder, vocab=None)


def part_of(rows, cut):
    """A process's part of a shape of batches."""
    return lambda shape: (np.arange(shape[0])[rows], range(*(int(share * shape[1]) for share in cut)))


def equal(batch, other):
    assert batch.keys() == other.keys()
    for name in batch:
        np.testing.assert_array_equal(batch[name], other[name], err_msg=name)


PHASES = "more=(from_step=5, code=7) long=(from_step=9, seq=16, global_batch=12) short=(from_step=12, seq=8, web=0)"


@pytest.mark.parametrize("mesh", MESHES)
def test_processes_read_the_same_batches_on_every_mesh(mesh, folder):
    whole = mixture_of(folder, PHASES)
    for step in (0, 4, 9, 13):
        expected = whole.batch(step)
        for rows, cut in MESHES[mesh]:
            own = part_of(rows, cut)
            columns = own(whole.phase(step).shape)[1]
            mine = {name: array[rows, columns.start : columns.stop] for name, array in expected.items()}
            equal(whole.with_part(own).batch(step), mine)


def test_a_mixture_that_is_opened_again_goes_on_with_the_same_rows(folder):
    whole, again = mixture_of(folder, PHASES), mixture_of(folder, PHASES)
    for step in (13, 2, 10):  # in any order: nothing is counted along
        equal(whole.batch(step), again.batch(step))


def test_each_row_is_the_next_one_of_its_source(folder):
    config = config_of(folder, "more=(from_step=5, code=7)")
    mixture, taken = open_mixture(config, folder=folder, vocab=None), dict.fromkeys(TEXTS, 0)
    readers = {
        name: open_reader(
            data_config(source="prepared", path=str(folder / name), seq=SEQ, global_batch=1, eval_fraction=0.1),
            folder=folder,
            vocab=None,
            split="train",
        )
        for name in TEXTS
    }
    for step in range(10):
        sources, _ = mixture.dealt(mixture.rows(step))
        for row, source in enumerate(sources.tolist()):
            name = [*TEXTS][source]
            expected = readers[name].batch(taken[name])["tokens"][0]
            np.testing.assert_array_equal(mixture.batch(step)["tokens"][row], expected)
            taken[name] += 1


def test_in_every_prefix_of_a_phase_each_source_has_its_share_to_within_a_row(folder):
    mixture = mixture_of(folder, "more=(from_step=101, code=7)")
    first, later = np.arange(600), np.arange(600, 1500)
    for rows, weights in ((first, [7, 2, 1]), (later, [7, 7, 1])):
        sources, _ = mixture.dealt(rows)
        for source, weight in enumerate(weights):
            share = np.arange(1, len(rows) + 1) * weight / sum(weights)
            assert np.abs(np.cumsum(sources == source) - share).max() < 1


def test_a_single_source_is_read_as_without_a_mixture(folder):
    """So a run of one source can go on with others."""
    alone = data_config(source="prepared", path=str(folder / "web"), seq=SEQ, global_batch=BATCH, eval_fraction=0.1)
    reader = open_reader(alone, folder=folder, vocab=None, split="train")
    mixture = mixture_of(folder, "next=(from_step=4, web=0, code=1, math=1)", code="weight=0", math="weight=0")
    for step in range(3):
        batch = mixture.batch(step)
        assert not batch.pop("groups").any()  # its loss is that of source 0
        equal(batch, reader.batch(step))
    assert mixture.fingerprints["fingerprint"] == reader.fingerprint
    assert set(mixture.dealt(mixture.rows(3))[0].tolist()) == {1, 2}


def test_a_phase_that_is_added_changes_nothing_before_it(folder):
    before, after = mixture_of(folder, "more=(from_step=5, code=7)"), mixture_of(folder, PHASES)
    for step in range(8):
        equal(before.batch(step), after.batch(step))
    assert before.fingerprints.items() < after.fingerprints.items()
    assert [*after.fingerprints] == ["fingerprint", "from_step_5", "from_step_9", "from_step_12"]


def test_other_weights_and_other_text_have_other_fingerprints(folder):
    known = {mixture_of(folder).fingerprint}
    for changed in (mixture_of(folder, web="weight=6"), mixture_of(folder, math="weight=1, epochs=2, end='drop'")):
        known.add(changed.fingerprint)
    config, name = config_of(folder), folder.name
    swapped = dataclasses.replace(config, mixture=config.mixture.replace(f"{name}/code", f"{name}/math"))
    known.add(open_mixture(swapped, folder=folder, vocab=None).fingerprint)
    assert len(known) == 4


def counts(mixture, steps: int) -> list[int]:
    """Rows of each source in the first steps."""
    sources = np.concatenate([mixture.dealt(mixture.rows(step))[0] for step in range(steps)])
    return np.bincount(sources, minlength=3).tolist()


def test_a_source_that_repeats_is_read_again_and_again(folder):
    mixture = mixture_of(folder)
    windows = mixture.by_name["math"].windows
    assert counts(mixture, 10 * windows)[2] == 6 * windows  # six epochs
    assert mixture.last_step is None


@pytest.mark.parametrize(("budget", "rows"), [("tokens=100", 12), ("epochs=0.25", None), ("epochs=2", None)])
def test_a_source_that_is_dropped_is_read_as_often_as_its_budget_says(budget, rows, folder):
    mixture = mixture_of(folder, math=f"weight=1, {budget}, end='drop'")
    windows = mixture.by_name["math"].windows
    rows = rows or int(float(budget.partition("=")[2]) * windows)
    assert counts(mixture, 10 * windows)[2] == rows
    later, _ = mixture.dealt(np.arange(10 * BATCH * windows, 10 * BATCH * windows + 900))
    assert np.bincount(later, minlength=3).tolist() == [700, 200, 0]  # the others by their weights


def test_a_run_stops_with_the_last_whole_batch_of_a_source_that_stops(folder):
    mixture = mixture_of(folder, math="weight=1, tokens=100, end='stop'")
    assert mixture.ended_by == "math" and mixture.rows_left // BATCH == mixture.last_step
    assert (
        counts(mixture, mixture.last_step)[2] <= 12 == mixture.dealt(np.arange(mixture.rows_left))[0].tolist().count(2)
    )
    with pytest.raises(DataError, match="math ends at row"):
        mixture.batch(mixture.last_step)


def test_a_mixture_whose_sources_are_all_dropped_ends(folder):
    ends = "weight=1, tokens=80, end='drop'"
    mixture = mixture_of(folder, web=ends, code=ends, math=ends)
    assert mixture.rows_left == 30 and mixture.last_step == 5 and mixture.ended_by == "the last source"


def test_longer_windows_begin_with_the_next_epoch_of_each_source(folder):
    mixture = mixture_of(folder, "long=(from_step=3, seq=16, global_batch=4)")
    assert mixture.batch(1)["tokens"].shape == (6, 8) and mixture.batch(2)["tokens"].shape == (4, 16)
    sources, numbers = mixture.dealt(mixture.rows(2))
    for source, number in zip(sources.tolist(), numbers.tolist()):
        longer = [*mixture.by_name.values()][source].in_windows_of(16)
        assert longer.windows <= number < 2 * longer.windows


def test_a_plan_is_for_the_batches_that_need_most_memory(folder):
    config = config_of(
        folder, "long=(from_step=9, seq=16, global_batch=5) short=(from_step=12, seq=8, global_batch=10)"
    )
    assert config.shapes == [(6, 8), (5, 16), (10, 8)]
    settings = dataclasses.replace(default_settings(), data=config)
    assert in_largest_batches(settings).data.shapes == [(5, 16)]
    one_shape = dataclasses.replace(settings, data=config_of(folder))
    assert in_largest_batches(one_shape) == one_shape


def test_a_plan_has_the_vocab_of_the_mixtures_tokenizer(tmp_path):
    texts = [str(number**7) for number in range(2000)]
    prepare_texts(texts, tmp_path / "web", tokenizer="bpe", bpe_vocab=400, shard_bytes=1 << 20)
    config = config_of(tmp_path, "long=(from_step=9, seq=16)", web="weight=1")
    config = dataclasses.replace(config, mixture=config.mixture.partition(" code=")[0])
    settings = dataclasses.replace(default_settings(), data=config)
    assert likely_entries(config) == 400 and in_largest_batches(settings).model.vocab == 512


def test_a_source_keeps_its_place_over_a_phase_that_does_not_read_it(folder):
    """Also where a window of that phase is longer than all its text."""
    prepare_texts(["a short text of forty or fifty letters, no more"] * 2, folder / "small")
    text = f"web=(path='{folder / 'web'}') small=(path='{folder / 'small'}')"
    phases = "long=(from_step=5, seq=512, global_batch=2, small=0) short=(from_step=9, seq=4, global_batch=6, small=1)"
    config = data_config(mixture=text, phases=phases, seq=4, global_batch=6, eval_fraction=0)
    mixture = open_mixture(config, folder=folder, vocab=None)
    read = mixture.dealt(np.concatenate([mixture.rows(step) for step in (0, 1, 2, 3, 8)]))
    numbers = read[1][read[0] == 1]
    np.testing.assert_array_equal(numbers, np.arange(len(numbers)))
    assert mixture.batch(5)["tokens"].shape == (2, 512) and mixture.batch(8)["tokens"].shape == (6, 4)


def test_a_source_that_is_read_in_short_windows_alone_needs_no_long_one(folder):
    prepare_texts(["a text of twenty letters"], folder / "tiny")
    text = f"web=(path='{folder / 'web'}') tiny=(path='{folder / 'tiny'}', weight=0)"
    settings = {"mixture": text, "seq": 64, "eval_fraction": 0}
    config = data_config(phases="short=(from_step=3, seq=4, tiny=1)", **settings)
    assert open_mixture(config, folder=folder, vocab=None).by_name["tiny"].seq == 4
    config = data_config(phases="next=(from_step=3, tiny=1)", **settings)
    with pytest.raises(DataError, match="data.mixture.tiny: the train split has .* 0 windows of data.seq=64; give it"):
        open_mixture(config, folder=folder, vocab=None)


def test_a_step_has_the_shape_of_its_phase(folder):
    config = config_of(folder, PHASES)
    assert [config.phase(step).shape for step in (0, 7, 8, 10, 11)] == [(6, 8), (6, 8), (12, 16), (12, 16), (12, 8)]
    assert config.longest_seq == 16


def test_several_paths_are_one_source_and_each_file_counts_once(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"the text of {name} " * 20)
    paths = [str(tmp_path / "b.txt"), str(tmp_path / "*.txt")]
    config = data_config(mixture=f"all=(path={paths})", seq=4, global_batch=2, eval_fraction=0)
    reader = open_mixture(config, folder=tmp_path / "data", vocab=None).by_name["all"]
    ids = reader.manifest.shards[0].read_ids(reader.folder, reader.manifest.dtype)
    text = bytes(ids[ids < 256].astype(np.uint8)).decode()
    assert text.startswith("the text of b") and text.count("text of b") == text.count("text of c") == 20


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        ("score >= 0.5", "ac"),
        ("lang == 'de' and score < 1", "c"),
        ("lang in ['de', 'fr']", "cd"),
        ("lang not in ['de', 'fr']", "ab"),
        ("meta.year > 2019", "b"),
    ],
)
def test_documents_are_chosen_by_their_fields(kind, where, chosen, tmp_path):
    rows = [
        {"text": "a" * 30, "score": 1.5, "lang": "en", "meta": {"year": 2001}},
        {"text": "b" * 30, "score": 0.25, "lang": "en", "meta": {"year": 2020}},
        {"text": "c" * 30, "score": 0.5, "lang": "de", "meta": {"year": None}},
        {"text": "d" * 30, "score": None, "lang": "fr", "meta": {"year": 2019}},
    ]
    path = tmp_path / f"x.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    config = data_config(source=kind, path=str(path), where=where, seq=4, global_batch=1, eval_fraction=0)
    reader = open_reader(config, folder=tmp_path / "data", vocab=None, split="train")
    ids = reader.manifest.shards[0].read_ids(reader.folder, reader.manifest.dtype)
    assert bytes(ids[ids < 256].astype(np.uint8)).decode() == "".join(letter * 30 for letter in chosen)


@pytest.mark.parametrize(
    "where",
    [
        "score",
        "score > other",
        "f(score) > 1",
        "not score > 1",
        "a > 1 or b > 1",
        "1 < a < 2",
        ")",
        "lang in {['a']}",
        "lang == None",
    ],
)
def test_a_filter_that_is_no_comparison_of_fields_is_refused(where):
    with pytest.raises(ConfigError, match="data.where=.* write comparisons of fields"):
        data_config(source="jsonl", path="x.jsonl", where=where)
    with pytest.raises(ConfigError, match="data.mixture.web.where=.* write comparisons of fields"):
        data_config(mixture=f"web=(path='a', where={where!r})")


def test_a_value_that_cannot_be_compared_is_named_with_its_line(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a", "score": 1}\n{"text": "b", "score": "high"}\n')
    config = data_config(source="jsonl", path=str(tmp_path / "x.jsonl"), where="score > 0")
    with pytest.raises(DataError, match="x.jsonl:2: field 'score' holds str, which cannot be compared with 0"):
        open_reader(config, folder=tmp_path / "data", vocab=None, split="train")


def test_a_missing_source_is_named_before_any_is_prepared(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 99)
    config = data_config(mixture=f"first=(path='{tmp_path}/a.txt') second=(path='{tmp_path}/missing')")
    with pytest.raises(DataError, match="data.mixture.second: data.path=.*missing': there is no such file or folder"):
        open_mixture(config, folder=tmp_path / "data", vocab=None)
    assert not (tmp_path / "data").exists()


def test_a_source_that_turns_out_to_have_no_fields_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 99)
    config = data_config(mixture=f"web=(path='{tmp_path}/a.txt', where='score > 1')")
    with pytest.raises(ConfigError, match="data.mixture.web.where='score > 1' reads fields, and a source 'text' has"):
        open_mixture(config, folder=tmp_path / "data", vocab=None)


def test_sources_of_other_tokenizers_are_refused(tmp_path):
    prepare_texts(TEXTS["web"], tmp_path / "web", tokenizer="bpe")
    prepare_texts(TEXTS["code"], tmp_path / "code")
    config = data_config(mixture=f"web=(path='{tmp_path}/web') code=(path='{tmp_path}/code')", seq=4)
    with pytest.raises(DataError, match="data.mixture.code has the tokenizer 'bytes', and data.mixture.web has 'bpe'"):
        open_mixture(config, folder=tmp_path, vocab=None)


def test_settings_of_chats_are_refused_where_there_are_none(folder):
    for name, value in (("loss_on", "all"), ("too_long", "drop"), ("chat_template", "gemma")):
        with pytest.raises(ConfigError, match=f"data.{name}='{value}' is not read: the data has neither chats nor"):
            open_mixture(dataclasses.replace(config_of(folder), **{name: value}), folder=folder, vocab=None)


def test_a_source_without_a_window_is_refused(folder):
    with pytest.raises(ConfigError, match="data.mixture.web has .* tokens to train on, not one window of seq=100000"):
        mixture_of(folder, "long=(from_step=9, seq=100000)")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (dict(mixture="web"), "must be settings by name"),
        (dict(mixture="web=(path='a') web=(path='b')"), "each name once"),
        (dict(mixture="web=(pth='a')"), "data.mixture.web.pth is not a setting of a source; did you mean 'path'"),
        (dict(mixture="web=(path='a', weight=-1)"), "data.mixture.web.weight=-1 must be a number of 0 or more"),
        (dict(mixture="web=(path='a', weight='x')"), "must be a number of 0 or more"),
        (dict(mixture=f"web=(path='a', weight=1{'0' * 400})"), "weight=1000.* must be a number of 0 or more"),
        (dict(mixture="web=(path='a', source='txt')"), "data.mixture.web.source='txt' is unknown"),
        (dict(mixture="web=(path='a', source='text', where='a > 1')"), "web.where='a > 1' reads fields, and a source"),
        (dict(mixture="web=(path='a', source='text', field='a')"), "web.field='a' reads fields, and a source 'text'"),
        (dict(mixture="web=(path='file:///a')"), "data.mixture.web.path='file:///a' is a URL"),
        (dict(mixture="web=(path=3)"), "must be a path or glob in quotes, or a list of them"),
        (dict(mixture="web=(weight=3)"), "data.mixture.web has neither path nor source"),
        (dict(mixture="web=(path='a', end='never')"), "data.mixture.web.end='never' is unknown"),
        (dict(mixture="web=(path='a', epochs=2)"), "add end='drop'"),
        (dict(mixture="web=(path='a', epochs=2, tokens=9, end='drop')"), "one of them is its budget"),
        (dict(mixture="web=(path='a', weight=0)"), "all weights are 0"),
        (dict(mixture="web=(path='a') code=(path='b', weight=0)"), "no phase reads it"),
        (dict(mixture="web=(path='a', weight=0.1234567) code=(path='b')"), "write them with fewer digits"),
        (dict(mixture="seq=(path='a')"), "give the source another name"),
        (dict(mixture="web=module:documents"), "web is code alone; write its settings, as web=.source='module:docu"),
        (dict(mixture="web=(path='a')", source="text", path="b"), "data.path='b' is not read with data.mixture"),
        (dict(mixture="web=(path='a')", source="moby"), "data.source='moby' is not read with data.mixture"),
        (dict(mixture="web=(path='a')", phases="x=(web=1)"), "data.phases.x has no from_step"),
        (dict(mixture="web=(path='a')", phases="x=(from_step=1)"), "use 2 or more"),
        (dict(mixture="web=(path='a')", phases="x=(from_step=9) y=(from_step=9)"), "use 10 or more"),
        (dict(mixture="web=(path='a')", phases="x=(from_step=9, web=0)"), "data.phases.x: all weights are 0"),
        (dict(mixture="web=(path='a')", phases="x=(from_step=9, wbe=2)"), "did you mean 'web'"),
        (dict(mixture="web=(path='a')", phases="x=(from_step=9, seq=0)"), "must be a whole number of 1 or more"),
        (dict(phases="x=(from_step=9)"), "needs data.mixture"),
        (dict(where="a > 1"), "data.source='stdlib' has none"),
    ],
    ids=str,
)
def test_a_mixture_that_says_no_mixture_is_refused(written, said):
    with pytest.raises(ConfigError, match=said):
        data_config(**written)


# ---- code of a user's own, and a tokenizer for all sources

LINES = """
from pathlib import Path


def read(file: Path = None, *, least: int = 1):
    lines = file.read_text().splitlines() if file else [f"made {number} of none" for number in range(9)]
    yield from (line for line in lines if len(line) >= least)
"""
OF_CODE = (
    "web=(source='lines_of_a_mixture:read(least=3)', path='a.txt', weight=3) code=(source='lines_of_a_mixture:read')"
)


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """A module with a source, beside a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    sys.modules.pop("lines_of_a_mixture", None)
    (tmp_path / "lines_of_a_mixture.py").write_text(LINES)
    (tmp_path / "a.txt").write_text("of a file\nno\n" * 20)
    return tmp_path


def test_code_of_a_users_own_is_a_source_of_a_mixture(lines):
    config = default_settings().to_dict()
    settings = read_settings(config, data={"mixture": OF_CODE, "seq": SEQ, "global_batch": BATCH})
    assert str(settings.data.mixture) == OF_CODE and [part.weight for part in settings.data.parts] == [3, 1]
    assert code_of(settings)["data.mixture"].source
    mixture = open_mixture(settings.data, folder=lines, vocab=None)
    assert [reader.documents for reader in mixture.by_name.values()] == [19, 8]  # one of each is held out
    assert mixture.batch(0)["tokens"].shape == (BATCH, SEQ)


def test_a_saved_mixture_imports_no_code(lines):
    """The folder may come from somebody else."""
    settings = default_settings().to_dict()
    settings["data"]["mixture"] = OF_CODE
    (lines / "config.json").write_text(json.dumps(settings))
    saved = load_settings(lines)
    read_settings(read_line(["train.py", f"--config={lines / 'config.json'}"], {}).config)
    assert saved.data.mixture == OF_CODE and "lines_of_a_mixture" not in sys.modules
    with pytest.raises(ConfigError, match="data.mixture=.* names code, and the saved config of a run imports none"):
        open_mixture(saved.data, folder=lines, vocab=None)
    assert "lines_of_a_mixture" not in sys.modules


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "lines_of_a_mixture:reads",
            "data.mixture.web.source='lines_of_a_mixture:reads': lines_of_a_mixture has no",
        ),
        ("lines_of_a_mixture:read(most=3)", "data.mixture.web.source: .* has no setting 'most'"),
        ("no_such_module:read", "data.mixture.web.source='no_such_module:read': there is no module"),
    ],
)
def test_wrong_code_in_a_mixture_is_one_line(source, message, lines):
    with pytest.raises(ConfigError, match=message):
        read_settings(default_settings().to_dict(), data={"mixture": f"web=(source='{source}')"})


def test_a_bpe_is_trained_on_all_sources_of_a_mixture_once(tmp_path, monkeypatch):
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"{name} text of its own, {name} {name}\n" * 400)
        (tmp_path / name / "b.txt").write_text(f"more {name}\n" * 400)
    mixture = f"web=(path='{tmp_path / 'web'}') code=(path='{tmp_path / 'code'}', weight=3)"
    config = data_config(mixture=mixture, tokenizer="bpe", bpe_vocab=300, seq=SEQ, global_batch=BATCH)
    read = open_mixture(config, folder=tmp_path / "run", vocab=None)
    texts = [read.tokenizer.encode(f"{name} text of its own") for name in ("web", "code")]
    assert all(len(ids) < 12 for ids in texts) and read.tokenizer.vocab <= 300
    monkeypatch.setattr(mixture_module, "bpe_of", None)  # it is there
    assert open_mixture(config, folder=tmp_path / "run", vocab=None).fingerprint == read.fingerprint
    held_out = open_sources(config, folder=tmp_path / "other", vocab=None, split="eval", finished=str(tmp_path / "run"))
    assert held_out["web"].tokenizer.fingerprint == read.tokenizer.fingerprint


def test_a_bpe_is_not_trained_on_prepared_shards(folder):
    config = dataclasses.replace(config_of(folder), tokenizer="bpe")
    with pytest.raises(ConfigError, match="is trained on the text of all sources, and data.mixture.web is prepared"):
        open_mixture(config, folder=folder, vocab=None)


def test_other_sources_are_read_with_the_tokenizer_of_prepared_ones(folder, tmp_path):
    (tmp_path / "more.txt").write_text("more " * 200)
    text = f"web=(path='{folder / 'web'}') more=(path='{tmp_path / 'more.txt'}')"
    config = data_config(mixture=text, seq=SEQ, global_batch=BATCH, eval_fraction=0.0, tokenizer="auto")
    mixed = open_mixture(config, folder=tmp_path, vocab=None)
    assert (
        mixed.tokenizer.fingerprint
        == open_mixture(config_of(folder), folder=tmp_path, vocab=None).tokenizer.fingerprint
    )
    assert (mixed.batch(0)["tokens"] == ord("m")).any()


def test_a_field_of_texts_is_not_that_of_completions(tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"body": f"text {n} " * 9}) + "\n" for n in range(40)))
    pairs = [{"prompt": f"{n} ", "completion": "is a number, as others are"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    written = f"texts=(path='{tmp_path / 'texts.jsonl'}') pairs=(path='{tmp_path / 'pairs.jsonl'}', format='completion'"
    shape = dict(field="body", seq=64, global_batch=2, eval_fraction=0.0)
    assert open_mixture(data_config(mixture=f"{written})", **shape), folder=tmp_path, vocab=None).batch(0)
    with pytest.raises(ConfigError, match=r"data\.mixture\.pairs\.field='body' is not read with format='completion'"):
        open_mixture(data_config(mixture=f"{written}, field='body')", **shape), folder=tmp_path, vocab=None)
