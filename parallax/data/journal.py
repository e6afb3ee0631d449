"""The finished shards of a folder that has no manifest yet: what a run that was killed resumes from."""

import json
from pathlib import Path

from parallax.data.manifest import parse_shard
from parallax.data.shard import Shard, to_json
from parallax.errors import DataError

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
        if not self._file.exists():
            self._append(self._identity)
            return []
        identity, *shards = _whole_lines(self._file) or [self._identity]
        check_identity(self._identity, identity, self._file)
        return [parse_shard(shard, self._file) for shard in shards]

    def add(self, shard: Shard) -> None:
        self._append(to_json(shard))

    def delete(self) -> None:
        self._file.unlink(missing_ok=True)

    def _append(self, content: dict) -> None:
        with open(self._file, "a", encoding="utf-8") as opened:
            opened.write(json.dumps(content) + "\n")


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
    for line in file.read_text("utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines
