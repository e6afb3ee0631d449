"""How many times longer a tokenizer can make a text: sixty steps that double a letter would fill any memory."""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

from parallax.errors import DataError

MOST_GROWTH = 256  # published tokenizers stay below 80
STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
OF_SEQUENCES = ("normalizers", "pretokenizers", "processors", "decoders")
# Steps that all tokenizers share, each with its growth where it comes again; done once, they are what users expect.
SHARED_GROWTH = {
    "NFD": 4,
    "NFC": 3,
    "NFKD": 18,
    "NFKC": 18,
    "Lowercase": 3,
    "BertNormalizer": 9,
    "ByteLevel": 2,
    "Metaspace": 2,
}
SHARED_GROWTH |= {"BertProcessing": 3, "RobertaProcessing": 3}


def check_growth(tokenizer: Any, origin: str) -> None:
    """Raise DataError if the steps of a tokenizer of the `tokenizers` library could make a text, or ids, very long."""
    for name in STEPS:
        step = getattr(tokenizer, name)
        parts = [] if step is None else _parts(json.loads(step.__getstate__()))
        kinds = [part["type"] for part in parts]
        again = [kind for number, kind in enumerate(kinds) if kind in kinds[:number]]
        growth = math.prod(map(_growth, parts)) * math.prod(SHARED_GROWTH.get(kind, 1) for kind in again)
        if growth > MOST_GROWTH:
            raise DataError(
                f"{origin} has a {name} of {len(parts)} steps that could make a text {growth:.3g} times as long; "
                f"{MOST_GROWTH} is the limit"
            )


def _parts(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps of a sequence, which may hold sequences."""
    inner = [part for key in OF_SEQUENCES for part in step.get(key, ())]
    return [part for each in inner for part in _parts(each)] if inner else [step]


def _growth(step: Mapping[str, Any]) -> float:
    """How many characters, or ids, a step may make of one by what its file says."""
    kind = step["type"]
    if kind == "Replace":
        replaced = step["pattern"].get("String", "")  # an expression may match nothing, between any two characters
        return max(len(step["content"]) / len(replaced), 1) if replaced else 1 + len(step["content"])
    if kind == "Prepend":
        return 1 + len(step["prepend"])
    if kind == "Precompiled":
        table = base64.b64decode(step["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return max(len(text.decode("utf-8", "replace")) for text in texts)
    if kind == "TemplateProcessing":
        tokens = step["special_tokens"]
        special = [part.get("SpecialToken") for part in step["single"]]
        return max(sum(len(tokens[token["id"]]["ids"]) if token else 1 for token in special), 1)
    return 1
