"""Names in a tokenizer's files, of bytes and of special tokens: which one ends a document, and a tokenizer that makes
none of text."""

import json
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from parallax.errors import DataError, quoted
from parallax.storage.files import make_folder, write_whole

TOKENIZER_FILE = "tokenizer.json"
PIECES_FILE = "tokenizer.model"  # of SentencePiece
TOKENIZER_CONFIG = "tokenizer_config.json"  # written beside it by `transformers`
TEMPLATE_FILE = "chat_template.jinja"  # as well
END_OF_DOCUMENT = "<|endoftext|>"
# Other projects' names of the token that ends a document, for tokenizers whose files do not name it.
END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>")


def _byte_symbols() -> list[str]:
    """The character of each byte in byte-level BPE: itself if it is printable, otherwise one from U+0100 on.

    The `tokenizers` library, an extra, also has these characters, but without their bytes.
    """
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]


BYTE_SYMBOLS = _byte_symbols()


def save_files(folder: Path, tokenizer: str, config: str, template: str) -> None:
    """Write the content of a tokenizer.json, and of those beside it that there are."""
    make_folder(folder)
    for name, content in ((TOKENIZER_FILE, tokenizer), (TOKENIZER_CONFIG, config), (TEMPLATE_FILE, template)):
        if content or name == TOKENIZER_FILE:
            write_whole(folder / name, content)


def end_name(
    ids: Mapping[str, int], added: Collection[str], written: Mapping[str, Any], model: Mapping[str, Any], origin: object
) -> str | None:
    """The token that ends a document, if the files have one.

    It is `eos_token` of tokenizer_config.json, else `eos_token_id` of the model's config.json (of a list, the first),
    else one of END_NAMES. A model's id that is no added token counts last, since many files have a default there that
    is a piece of text.

    Args:
        ids: of all entries, by name.
        added: names of the entries that are not of the tokenizer's model.
        written, model: contents of tokenizer_config.json and config.json.
        origin: the first file, for messages.
    Raises:
        DataError: `eos_token` is not an entry.
    """
    if (said := token_name(written.get("eos_token"))) is not None:
        if said not in ids:
            raise DataError(
                f"{origin} has eos_token={quoted(said)}, which is not an entry of the tokenizer.json beside it"
            )
        return said
    numbers = model.get("eos_token_id")
    numbers = numbers if isinstance(numbers, list) else [numbers]
    names = {number: name for name, number in ids.items()}
    of_model = [names[number] for number in numbers if type(number) is int and number in names]
    usual = [name for name in END_NAMES if name in ids]
    return next(iter([*(name for name in of_model if name in added), *usual, *of_model]), None)


def token_name(written: object) -> str | None:
    """The name of a token in tokenizer_config.json: text, or an object with its `content`."""
    name = written.get("content") if isinstance(written, dict) else written
    return name if isinstance(name, str) and name else None


def without(text: str, names: Collection[str]) -> str | None:
    """A tokenizer.json that makes none of these tokens of text; None if the given one does not.

    `encode_special_tokens` only switches off the search for added tokens that are special. A Unigram, WordLevel or
    WordPiece model, and a BPE by its merges or with `ignore_merges`, also finds a token among its own entries. So here
    each token has another name, which no text has since it is random, and is special. Ids stay as they are.
    """
    content = json.loads(text)
    model = content["model"]
    names = {name for name in names if name != model.get("unk_token")}
    hidden = {name: secrets.token_hex(16) for name in names}
    added = content.get("added_tokens") or []
    # Before 2020, files had no types.
    of_words = model.get("type", "BPE") != "BPE" or model.get("ignore_merges")
    entries = {piece[0] for piece in model["vocab"]} if isinstance(model["vocab"], list) else model["vocab"].keys()
    prefix = model.get("continuing_subword_prefix") or ""
    merged = {_result(merge, prefix) for merge in model.get("merges") or []}
    findable = names & (set(entries) if of_words else merged | {name for name in names if len(name) == 1})
    if not findable and all(token["special"] for token in added if token["content"] in names):
        return None
    for token in added:
        if token["content"] in names:
            token |= {"content": hidden[token["content"]], "special": True}
    if isinstance(model["vocab"], list):
        model["vocab"] = [[hidden.get(name, name), score] for name, score in model["vocab"]]
    else:
        model["vocab"] = {hidden.get(name, name): number for name, number in model["vocab"].items()}
    if "merges" in model:

        def is_of_hidden(merge: Any) -> bool:
            return _result(merge, prefix) in names or bool(names & set(_pair(merge)))

        model["merges"] = [merge for merge in model["merges"] if not is_of_hidden(merge)]
    # It only matters for whole sequences with special tokens, and may name them.
    content["post_processor"] = None
    return json.dumps(content)


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _result(merge: str | list[str], prefix: str) -> str:
    first, second = _pair(merge)
    return first + second.removeprefix(prefix)
