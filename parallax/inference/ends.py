"""Ids at which a model ends a text, besides the end of a document: `eos_token_id`, as Hugging Face's `transformers` has
it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallax.data.tokenizer import Tokenizer
from parallax.errors import CheckpointError, ConfigError, errors_as
from parallax.storage.files import object_of, read_bytes
from parallax.storage.run_files import GENERATION_CONFIG, RECORD


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


def ends_of_import(config: Mapping[str, Any], generation: Mapping[str, Any]) -> list[int]:
    """The ids that end a text in a folder of somebody's: those of its generation_config.json, as in `transformers`; if
    it has none, of config.json, in which models often keep the default of their class."""
    of_config = eos_ids("config.json", config)
    return eos_ids(GENERATION_CONFIG, generation) or of_config


def ends_of_step(tokenizer: Tokenizer, vocab: int, step: Path) -> tuple[int, ...]:
    """The ids that end a text of the model in the folder of a step, as in `ends_of`."""
    files = (step / name for name in (GENERATION_CONFIG, RECORD))
    return ends_of(tokenizer, vocab, {file.name: read_bytes(file) for file in files if file.is_file()})


def ends_of(tokenizer: Tokenizer, vocab: int, carried: Mapping[str, bytes]) -> tuple[int, ...]:
    """The ids that end a text: the end of a document, then the model's own, from the files that its checkpoints carry
    of an import. Ids that the model lacks are left out.

    Raises CheckpointError if a file cannot be read.
    """
    name = next((name for name in (GENERATION_CONFIG, RECORD) if name in carried), None)
    with errors_as(
        CheckpointError, f"{name} of the checkpoint cannot be read: ", "; import the model again", ValueError
    ):
        of_model = _own_ends(name, object_of(carried[name])) if name else []
    return tuple(dict.fromkeys([tokenizer.end, *(number for number in of_model if 0 <= number < vocab)]))


def _own_ends(name: str, content: Mapping[str, Any]) -> list[int]:
    if name == GENERATION_CONFIG:
        return eos_ids(name, content)
    # An import of an earlier version has them only in its record of the folder.
    config, texts = content.get("config"), content.get("files")
    text = texts.get(GENERATION_CONFIG, "{}") if isinstance(texts, dict) else None
    if not (isinstance(config, dict) and isinstance(text, str)):
        raise ValueError("it was not written by an import")
    return ends_of_import(config, object_of(text))
