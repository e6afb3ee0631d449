"""Special tokens and generation, as the files beside a config.json of Hugging Face's `transformers` say them."""

import json
from collections.abc import Mapping
from typing import Any

from parallax.data.tokenizer import CONFIG_NAME, FILE_NAME, Bytes, Tokenizer
from parallax.runtime.errors import CheckpointError
from parallax.runtime.files import object_of

GENERATION = "generation_config.json"


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """The fields of a config.json; null where there is none, as a field that is absent stands for some other id."""
    return {"bos_token_id": tokenizer.begin[0] if tokenizer.begin else None, "eos_token_id": tokenizer.end}


def texts_beside(
    config: Mapping[str, Any], tokenizer: Tokenizer, came: Mapping[str, str], *, trained: bool
) -> dict[str, str]:
    """Texts by name, so that a model is read, its text encoded, and generation stops where a document ends.

    `came` are those of the folder that was imported. They stay as they are, but for the end of a document, at which a
    model that was trained here stops too; what is missing among them is written.

    Raises:
        CheckpointError: the generation config that came is no JSON object.
    """
    files = dict(came)
    if tokenizer.name == Bytes.name:
        files[FILE_NAME] = as_text(Bytes().as_bpe())
    if CONFIG_NAME not in files:
        files[CONFIG_NAME] = as_text(_tokenizer_config(tokenizer, config["max_position_embeddings"]))
    if GENERATION not in files:
        files[GENERATION] = as_text(_generation_config(config, tokenizer))
    if trained:
        files[GENERATION] = _stopping_at(files[GENERATION], tokenizer.end)
    return files


def as_text(content: Mapping[str, Any]) -> str:
    """An object as these files hold it."""
    return json.dumps(content, indent=2) + "\n"


def _tokenizer_config(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    end = tokenizer.token(tokenizer.end)
    begin = {"bos_token": tokenizer.token(tokenizer.begin[0])} if tokenizer.begin else {}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # tokenizer.json as it is, whatever the model
        **begin,
        "eos_token": end,
        "pad_token": end,
        "padding_side": "left",  # a model writes behind its prompts
        "model_max_length": context,
        "model_input_names": ["input_ids", "attention_mask"],  # all that these models take
        "clean_up_tokenization_spaces": False,  # which would take spaces out of decoded text
    }


def _generation_config(content: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Of the ids in a config.json; where it has none, text ends and is padded with the end of a document."""
    said = {key: content.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    known = {key: ids for key, ids in said.items() if ids is not None}
    return {"eos_token_id": tokenizer.end, "pad_token_id": tokenizer.end} | known


def _stopping_at(text: str, end: int) -> str:
    """A generation config whose eos_token_id has the end of a document; the same text where it has it already."""
    try:
        content = object_of(text)
    except ValueError as error:
        raise CheckpointError(f"the imported {GENERATION} is damaged: {error}; import it again") from error
    ids = content.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return text if end in ids else as_text(content | {"eos_token_id": [*ids, end] if ids else end})
