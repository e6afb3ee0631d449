"""Small corpora for the tests of data."""

import hashlib
import json
import pathlib

from configs.base import get_config
from parallax.config.sections import DataConfig
from parallax.data import Reader, open_reader
from parallax.data.prepare import Request, prepare
from parallax.data.shards import Manifest
from parallax.data.sources import Source

TEXTS = ["one little document", "", "é and 日本", "three\nthree\nthree", "x", "the fifth is a longer document " * 9]


SECTION = dict(get_config().data)  # made once: a test may read a thousand configs


def data_config(**changes) -> DataConfig:
    return DataConfig(**(SECTION | changes))


def source_of(texts: list[str]) -> Source:
    content = json.dumps(texts).encode()
    return Source({"kind": "list", "sha256": hashlib.sha256(content).hexdigest()}, None, lambda: iter(texts))


def prepare_texts(
    texts: list[str],
    folder: pathlib.Path,
    *,
    tokenizer: str = "bytes",
    shard_bytes: int = 40,
    workers: int = 1,
    bpe_vocab: int = 300,
) -> Manifest:
    request = Request(source=source_of(texts), tokenizer=tokenizer, bpe_vocab=bpe_vocab, shard_bytes=shard_bytes)
    return prepare(request, folder, workers=workers)


def prepared_reader(
    folder: pathlib.Path, *, split: str = "train", rows=None, columns=None, vocab=None, **changes
) -> Reader:
    changes = {"seq": 8, "global_batch": 4, "eval_fraction": 0.0, **changes}
    config = data_config(source="prepared", path=str(folder), **changes)
    return open_reader(config, folder=folder, vocab=vocab, split=split, rows=rows, columns=columns)
