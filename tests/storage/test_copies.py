"""Data behind URLs: read through copies on this machine, which have a limit. fsspec's own memory is the store."""

import os
import threading

import fsspec
import numpy as np
import pytest
from support.data_examples import prepare_texts

from parallax.config.sections import DataConfig
from parallax.data import open_mixture, open_reader
from parallax.data.sources import find_files, kind_of, open_source
from parallax.data.tokenizer import load_tokenizer
from parallax.errors import ConfigError, DataError
from parallax.step.resolve import likely_entries
from parallax.storage import copies, files, remote
from parallax.storage.remote import source_path

SECRET = "a-secret-that-is-never-shown"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder behind a URL, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(copies, "_limit", [copies.LIMIT_BYTES])
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    return memory


def held():
    folder = copies.copies_folder()
    return sorted(name.split("-", 1)[1] for name in os.listdir(folder)) if folder.exists() else []


def test_a_copy_is_made_once_and_again_when_the_file_has_changed(store):
    store.pipe("/corpus/a.txt", b"one")
    path = source_path("memory://corpus/a.txt")
    first = files.local_copy(path)
    assert first.read_bytes() == b"one" and files.local_copy(path) == first and first.suffix == ".txt"
    store.pipe("/corpus/a.txt", b"two")
    with files.open_copy(path) as opened:
        assert opened.read() == b"two"
    assert first.read_bytes() == b"one" and held() == ["a.txt", "a.txt"]


def test_copies_that_were_not_used_for_longest_make_room(store):
    copies.limit_copies(250)
    for number, name in enumerate("abc"):
        store.pipe(f"/{name}", bytes(100))
        if name != "c":
            os.utime(files.local_copy(source_path(f"memory://{name}")), (number, number))
    with files.open_copy(source_path("memory://a")) as opened:  # used now, so the other one goes
        files.local_copy(source_path("memory://c"))
        assert held() == ["a", "c"]
        store.pipe("/d", bytes(250))
        files.local_copy(source_path("memory://d"))
        assert held() == ["d"] and opened.read() == bytes(100)


def test_a_file_of_more_than_the_limit_is_refused_and_nothing_is_left(store):
    copies.limit_copies(99)
    store.pipe("/a.txt", bytes(100))
    with pytest.raises(DataError, match="memory://a.txt cannot be read: copies may have 99 bytes .* data.cache_bytes"):
        open_source("text", path="memory://a.txt", field="", synthetic_tokens=0)
    assert held() == []


def test_a_part_that_a_killed_process_left_is_removed_for_room_and_one_that_is_written_is_not(store):
    copies.limit_copies(250)
    store.pipe("/a", bytes(100))
    folder = files.local_copy(source_path("memory://a")).parent
    left, written = folder / f"1-left{copies.PART}", folder / f"2-written{copies.PART}"
    left.write_bytes(bytes(100))
    written.write_bytes(bytes(50))
    with open(written, "ab") as opened:
        files.lock(opened, wait=False)
        os.utime(written, (0, 0))
        os.utime(left, (1, 1))
        store.pipe("/b", bytes(100))
        files.local_copy(source_path("memory://b"))
    assert held() == ["a", "b", f"written{copies.PART}"]


def test_threads_that_want_one_file_make_one_copy(store, monkeypatch):
    store.pipe("/a", bytes(100))
    reads = []
    monkeypatch.setattr(remote, "_pieces", lambda path: reads.append(path) or [bytes(100)])
    threads = [threading.Thread(target=files.local_copy, args=(source_path("memory://a"),)) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(reads) == 1 and held() == ["a"]


def test_a_file_that_changes_while_it_is_read_is_named_not_mixed(store, monkeypatch):
    store.pipe("/a.txt", b"one")
    states = iter([("1",), ("1",), ("2",)])
    monkeypatch.setattr(remote, "_state_of", lambda path: next(states))
    monkeypatch.setattr(files, "state_of", remote._state_of)
    with pytest.raises(DataError, match="memory://a.txt cannot be read: it was changed"):
        open_source("text", path="memory://a.txt", field="", synthetic_tokens=0)
    assert held() == []


# ---- corpora and shards

TEXTS = [f"document {number} has a text of its own, " * 5 for number in range(30)]


def config(**changes):
    return DataConfig(**{"seq": 16, "global_batch": 2, "eval_fraction": 0.1, **changes})


def test_a_corpus_behind_a_url_is_read_as_one_of_a_folder(store, tmp_path):
    (tmp_path / "corpus" / "b").mkdir(parents=True)
    for name in ("1.txt", "b/2.txt", ".hidden"):
        (tmp_path / "corpus" / name).write_text(f"{name} " * 300)
        store.pipe(f"/corpus/{name}", (tmp_path / "corpus" / name).read_bytes())
    store.pipe("/corpus/.git/x.txt", b"no")
    options = {"folder": tmp_path / "data", "vocab": None, "split": "all"}
    here = open_reader(config(source="text", path=str(tmp_path / "corpus")), **options)
    for url in ("memory://corpus", "memory://corpus/**/*.txt"):
        there = open_reader(config(source="text", path=url), **options)
        assert there.fingerprint == here.fingerprint
    several = str(["memory://corpus/1.txt", str(tmp_path / "corpus" / "b")])
    assert open_reader(config(source="text", path=several), **options).fingerprint == here.fingerprint
    names = [str(path) for path in find_files("memory://corpus/*/2.txt", "text", "")[0]]
    assert names == ["memory://corpus/b/2.txt"]


def test_lines_and_kinds_of_a_corpus_behind_a_url(store):
    store.pipe("/c/a.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    source = open_source("jsonl", path="memory://c", field="text", synthetic_tokens=0)
    assert [*source.documents()] == ["one", "two"] and source.text_bytes == 32
    assert kind_of("memory://c/a.jsonl", "text") == "jsonl"


@pytest.fixture
def shards(store, tmp_path):
    prepare_texts(TEXTS, tmp_path / "shards", shard_bytes=2000)
    for path in (tmp_path / "shards").iterdir():
        if path.is_file():
            store.pipe(f"/shards/{path.name}", path.read_bytes())
    return config(source="prepared", path="memory://shards")


def open_shards(config, split="train"):
    return open_reader(config, folder=None, vocab=None, split=split)


def test_shards_behind_a_url_give_the_batches_of_a_folder(shards, tmp_path):
    here = open_shards(config(source="prepared", path=str(tmp_path / "shards")))
    there = open_shards(shards)
    assert there.fingerprint == here.fingerprint
    for step in (0, 7):
        np.testing.assert_array_equal(there.batch(step)["tokens"], here.batch(step)["tokens"])
    assert load_tokenizer("memory://shards").fingerprint == load_tokenizer(tmp_path / "shards").fingerprint


def test_half_of_a_shard_and_a_missing_one_are_named(shards, store):
    name = next(path for path in store.ls("/shards", detail=False) if path.endswith(".ids"))
    content = store.cat(name)
    store.pipe(name, content[: len(content) // 2])
    with pytest.raises(DataError, match=r"shard memory://shards/\d+.ids has \d+ bytes where the manifest says"):
        open_shards(shards)
    store.rm(name)
    with pytest.raises(DataError, match=r"shard memory://shards/\d+.ids is missing"):
        open_shards(shards)


def test_a_shard_that_changes_after_the_start_is_named(shards, store, monkeypatch):
    monkeypatch.setattr("parallax.data.reader.CHECKSUM_BYTES", 0)  # as of data that is too long to read at the start
    reader = open_shards(shards)
    for name in store.ls("/shards", detail=False):
        if name.endswith(".ids"):
            store.pipe(name, bytes(len(store.cat(name))))
    with pytest.raises(DataError, match=r"shard memory://shards/\d+.ids is damaged: sha256"):
        reader.batch(0)
    reader._fetching.join(20)  # it would copy into the next test's folder


def test_shards_are_fetched_before_they_are_needed(shards, monkeypatch):
    monkeypatch.setattr("parallax.data.reader.CHECKSUM_BYTES", 0)
    reader = open_shards(shards)
    assert not any(name.endswith(".ids") for name in held())
    reader.batch(0)
    reader._fetching.join(20)
    assert sum(name.endswith(".ids") for name in held()) == len(reader.manifest.shards) > 1


def test_less_room_than_the_shards_need_is_refused_at_once(shards):
    with pytest.raises(ConfigError, match=r"data.cache_bytes=1000 is less than the [\d,]+ bytes of the shards"):
        open_shards(config(source="prepared", path="memory://shards", cache_bytes=1000))


def mixture_of(places, **changes):
    text = " ".join(f"{name}=(path='{place}')" for name, place in places.items())
    config = DataConfig(mixture=text, seq=16, global_batch=6, **changes)
    return open_mixture(config, folder=None, vocab=None)


def test_a_mixture_behind_urls_has_the_batches_of_folders(shards, store, tmp_path, monkeypatch):
    monkeypatch.setattr("parallax.data.reader.CHECKSUM_BYTES", 0)
    here = mixture_of({"one": tmp_path / "shards", "two": tmp_path / "shards"})
    there = mixture_of({"one": "memory://shards", "two": "memory://shards"})
    assert there.fingerprint == here.fingerprint and not any(name.endswith(".ids") for name in held())
    for step in (0, 7):
        np.testing.assert_array_equal(there.batch(step)["tokens"], here.batch(step)["tokens"])
    for reader in there._readers_by_shape[6, 16][1]:
        reader._fetching.join(20)
    assert sum(name.endswith(".ids") for name in held()) == len(there.by_name["one"].manifest.shards)
    assert likely_entries(there.config) == there.tokenizer.vocab


def test_a_mixtures_shards_need_room_together(shards):
    size = open_shards(shards).copied_bytes
    for more, text in ((0, "of the shards in data.mixture"), (-size, "data.mixture.one: .* in memory://shards")):
        with pytest.raises(ConfigError, match=text):
            mixture_of({"one": "memory://shards", "two": "memory://shards"}, cache_bytes=2 * size - 1 + more)


def test_a_store_of_several_schemes_lists_files_under_the_one_that_is_written(store, monkeypatch):
    """As Azure's, whose files are az:// and abfs://."""
    store.pipe("/corpus/a.txt", b"one")
    monkeypatch.setattr(type(store), "protocol", ("another", "memory"))
    assert files.matching(source_path("memory://corpus/*.txt", pattern=True)) == [source_path("memory://corpus/a.txt")]


# ---- what is refused


@pytest.mark.parametrize(
    ("written", "said"),
    {
        f"https://me:{SECRET}@host/a.txt": "data.path is a URL of https:// with a user, a query",
        f"https://host/a.txt?key={SECRET}": "data.path is a URL of https:// with a user, a query",
        "hf://datasets/a/../b": "data.path is a URL of hf:// with a user, a query",
        "reference://host/a.json": "data.path='reference://host/a.json' is a URL, and a path is needed",
        "file:///data/a.txt": "data.path='file:///data/a.txt' is a URL, and a path is needed; write '/data/a.txt'",
    }.items(),
)
def test_a_url_that_may_hold_a_secret_or_lead_elsewhere_is_refused(written, said):
    with pytest.raises(ConfigError) as refused:
        config(source="text", path=written)
    assert said in str(refused.value) and SECRET not in str(refused.value)


def test_a_url_without_its_package_says_what_to_install(monkeypatch):
    remote._file_system.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"https:// needs the package fsspec: pip install -e '.\[urls\]'"):
        source_path("https://host/a.txt").is_file()


def test_a_store_without_its_package_says_what_it_lacks():
    remote._file_system.cache_clear()
    with pytest.raises(ConfigError, match=r"az:// needs a further package \(.*adlfs.*\); those of https:// and hf://"):
        source_path("az://container/a.txt").is_file()


def test_what_a_library_says_of_a_failed_request_holds_no_credentials(monkeypatch):
    class Failing:
        def invalidate_cache(self):
            pass

        def info(self, path):
            raise RuntimeError(f"403 for https://me:{SECRET}@host/a?sig={SECRET}\nmore")

    monkeypatch.setattr(remote, "_file_system", lambda scheme: Failing())
    with pytest.raises(DataError, match="https://host/a.txt cannot be read: 403 for https://host/a") as refused:
        open_source("text", path="https://host/a.txt", field="", synthetic_tokens=0)
    assert SECRET not in str(refused.value) and "\n" not in str(refused.value)
