"""The finished shards of a folder that has no manifest yet: what a run that was killed resumes from."""

import json
from dataclasses import asdict
from pathlib import Path

from parallax.data.manifest import parse_shard
from parallax.data.shard import Shard
from parallax.runtime.errors import DataError
from parallax.runtime.files import object_of, plain, read_bytes, write_whole

FILE_NAME = "unfinished.jsonl"


class Journal:
    """One line of JSON for what is made, then one for each finished shard.

    Args:
        identity: what is made, as JSON; a journal of something else is refused.
    """

    def __init__(self, folder: Path, identity: dict):
        self._file = folder / FILE_NAME
        self._identity = identity

    def read(self) -> list[Shard]:
        """The finished shards.

        Raises:
            DataError: the journal is of another identity.
        """
        lines = _whole_lines(self._file) if self._file.exists() else []
        identity, *records = lines or [self._identity]
        check_identity(self._identity, identity, self._file)
        shards = [parse_shard(record, self._file) for record in records]
        # Written again, so that what is added does not continue a line that is torn.
        text = "".join(json.dumps(line) + "\n" for line in (identity, *records))
        write_whole(self._file, text)
        return shards

    def add(self, shard: Shard) -> None:
        with open(self._file, "a", encoding="utf-8", opener=plain) as opened:
            opened.write(json.dumps(asdict(shard)) + "\n")

    def delete(self) -> None:
        self._file.unlink(missing_ok=True)


def began_otherwise(folder: Path, wanted: dict) -> bool:
    """Whether an attempt of another request than `wanted` has begun here, and has come to no finished shard."""
    file = folder / FILE_NAME
    identity, *shards = (_whole_lines(file) if file.exists() else []) or [wanted]
    return not shards and {key: identity.get(key) for key in wanted} != wanted


def check_identity(wanted: dict, found: dict, file: Path) -> None:
    """Raise DataError, with the first difference, unless a folder holds what is wanted."""
    if wanted == found:
        return
    # What both name comes first: with another tokenizer, only one of them names a bpe_vocab.
    differences = sorted(_differences(wanted, found, ()), key=lambda difference: None in difference)
    path, wanted_value, found_value = differences[0]
    raise DataError(
        f"{file.parent} holds data of other settings: {path}={found_value!r} where {wanted_value!r} is "
        "wanted; choose another folder, or delete this one (`python -m parallax.data prepare --rebuild` does)"
    )


def _differences(wanted: dict, found: dict, path: tuple[str, ...]):
    for key in sorted(wanted.keys() | found.keys()):
        a, b = wanted.get(key), found.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differences(a, b, (*path, key))
        elif a != b:
            yield ".".join((*path, key)), a, b


def _whole_lines(file: Path) -> list[dict]:
    # The last line is torn where the writer was killed.
    lines = []
    for line in read_bytes(file).splitlines():
        try:
            lines.append(object_of(line))
        except ValueError:
            break
    return lines
