"""Ids at which a model ends a text, besides the end of a document: `eos_token_id`, as Hugging Face's `transformers` has
it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallax.data.tokenizer import Tokenizer
from parallax.runtime.errors import CheckpointError, ConfigError
from parallax.runtime.files import object_of, read_bytes
from parallax.runtime.run_files import ENDS


def eos_ids(where: str, content: Mapping[str, Any]) -> list[int]:
    """The ids of `eos_token_id`: one, a list, or none if it is null or absent. ConfigError if they are not ids.

    >>> eos_ids("config.json", {"eos_token_id": 2}), eos_ids("config.json", {"eos_token_id": [2, 7]})
    ([2], [2, 7])
    """
    written = content.get("eos_token_id")
    ids = written if isinstance(written, list) else [] if written is None else [written]
    if not all(type(number) is int for number in ids):
        raise ConfigError(
            f"{where}: eos_token_id={written!r:.100} is not supported; supported: a token's id, a list of ids, or null"
        )
    return ids


def ends_of(tokenizer: Tokenizer, vocab: int, step: Path) -> tuple[int, ...]:
    """The ids that end a text of the model in the folder of a step: the end of a document, then the model's own.

    Raises CheckpointError if the file of the model's own cannot be read.
    """
    return ends_in(tokenizer, vocab, read_bytes(step / ENDS) if (step / ENDS).is_file() else None)


def ends_in(tokenizer: Tokenizer, vocab: int, written: bytes | None) -> tuple[int, ...]:
    """The same from the content of the file, None if there is none. Ids that the model lacks are left out."""
    try:
        own = eos_ids(ENDS, object_of(written)) if written else []
    except ValueError as error:
        raise CheckpointError(f"{ENDS} of the checkpoint cannot be read: {error}; import the model again") from error
    return tuple(dict.fromkeys([tokenizer.end, *(number for number in own if 0 <= number < vocab)]))
