"""Tokenizers of tiktoken as a tokenizer.json, which makes the same ids."""

import base64
import binascii
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from parallax.data.special_tokens import BYTE_SYMBOLS, token_name
from parallax.errors import ConfigError, DataError, errors_as, first_line, imported, nearest, quoted
from parallax.storage.files import object_of

ENCODING_PREFIX = "tiktoken:"  # before the name of an encoding of the library
SAID_BESIDE = ("pat_str", "special_tokens", "added_tokens_decoder")  # which a tokenizer.json says itself
RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Patterns of the library's encodings, by which a text is divided into words.
PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k_base": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k_base": "|".join(
        [
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}",
            r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ]
    ),
}
# Two regular expressions differ here: {1,3}+ is possessive in Rust and repeats in Oniguruma, and $ there ends a line.
POSSESSIVE = re.compile(r"(\\[pP]\{\w+\}|\\.|\[(?:\\.|[^\]\\])*\]|[^\\()\[\]{}])(\{\d+(?:,\d*)?\})\+")
TEXT_END = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\$")


def is_rank_file(content: bytes) -> bool:
    """Whether a file has the ranks of tiktoken: on each line bytes in base64, and their id."""
    return bool(RANK_LINE.match(content))


@functools.lru_cache(maxsize=4)
def json_of_rank_file(content: bytes, config: str, origin: str) -> tuple[str, str]:
    """The tokenizer.json of a rank file, and the tokenizer_config.json that goes with it. `config` is the one beside
    the file, which says what the file does not: `pat_str`, a pattern or the name of one of PATTERNS, and
    `special_tokens`, ids by name.

    Raises:
        DataError: a file is damaged, or the pattern is missing.
    """
    wrong = f"{origin} is not a file of tiktoken's ranks: "
    with errors_as(DataError, wrong, "", ValueError, binascii.Error):
        lines = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    with errors_as(DataError, f"tokenizer_config.json beside {origin} cannot be read: ", "", ValueError):
        written = object_of(config) if config else {}
    pattern = written.get("pat_str")
    if not isinstance(pattern, str):
        raise DataError(
            f'{origin} has no pattern; write a tokenizer_config.json beside it with "pat_str", the pattern that '
            f'divides a text into words or the name of one ({", ".join(PATTERNS)}), and "special_tokens", ids by name'
        )
    left = {name: value for name, value in written.items() if name not in SAID_BESIDE}
    text = _json_of(ranks, PATTERNS.get(pattern, pattern), _special_tokens(written, origin), origin)
    return text, json.dumps(left, ensure_ascii=False, indent=2) + "\n" if left else ""


def _special_tokens(written: Mapping[str, Any], origin: str) -> dict[str, int]:
    """Ids by name: as tiktoken writes them, or as transformers does."""
    there = written.get("special_tokens", {})
    if isinstance(decoder := written.get("added_tokens_decoder"), dict) and not there:
        there = {token_name(each): int(number) for number, each in decoder.items() if number.isdigit()}
    if not isinstance(there, dict) or not all(name and type(number) is int for name, number in there.items()):
        raise DataError(f"tokenizer_config.json beside {origin}: special_tokens={quoted(there)} are not ids by name")
    return there


@functools.lru_cache(maxsize=4)
def json_of_encoding(named: str) -> str:
    """The tokenizer.json of an encoding of the library, as "tiktoken:cl100k_base".

    Its ranks are in the library's cache, the folder TIKTOKEN_CACHE_DIR, or are fetched there.

    Raises:
        ConfigError: there is no such encoding, or the library is not installed.
        DataError: its ranks are not in the cache and cannot be fetched.
    """
    library, name = imported("tiktoken", named, "tokenizers"), named.removeprefix(ENCODING_PREFIX)
    if name not in (known := library.list_encoding_names()):
        raise ConfigError(f"data.tokenizer={quoted(named)} is no encoding of tiktoken; {nearest(name, known)}")
    try:
        encoding = library.get_encoding(name)
    except Exception as error:  # of any library with which it fetches
        raise DataError(
            f"the encoding {name!r} is not in the cache of tiktoken (TIKTOKEN_CACHE_DIR), and cannot be fetched: "
            f"{first_line(error)}"
        ) from error
    # The library's README names these three for building an encoding from another.
    return _json_of(encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens, named)


def _json_of(ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], origin: str) -> str:
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise DataError(f"{origin} has no rank of the byte {missing[0]:#04x}; each byte needs one")
    names = {token: "".join(BYTE_SYMBOLS[byte] for byte in token) for token in ranks}
    vocab = {names[token]: rank for token, rank in ranks.items()} | dict(special)
    if len({*vocab.values()}) < len(ranks) + len(special):
        raise DataError(f"{origin} gives an id to two tokens, or a special token is one of its entries")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    words = {"type": "Split", "pattern": {"Regex": _for_tokenizers(pattern)}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    by_rank = sorted(ranks, key=ranks.__getitem__)
    pairs = (_pair(ranks, token) for token in by_rank if len(token) > 1)
    content = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [{"id": number, "content": name, **flags} for name, number in special.items()],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, level]},
        "decoder": level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **{"fuse_unk": False, "byte_fallback": False, "ignore_merges": True},
            "vocab": vocab,
            "merges": [[names[part] for part in pair] for pair in pairs if len(pair) == 2],
        },
    }
    return json.dumps(content, ensure_ascii=False)


def _pair(ranks: Mapping[bytes, int], token: bytes) -> list[bytes]:
    """The parts from which tiktoken makes a token: those of its bytes when only lower ranks are merged, first the
    lowest and leftmost. Nowhere else can the same bytes be in other parts, so a token has one merge."""
    parts, limit = [token[place : place + 1] for place in range(len(token))], ranks[token]
    while True:
        joined = [ranks.get(first + second, limit) for first, second in zip(parts, parts[1:])]
        rank, place = min(zip(joined, range(len(joined))), default=(limit, 0))
        if rank >= limit:
            return parts
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def _for_tokenizers(pattern: str) -> str:
    """A pattern of tiktoken in the words of the `tokenizers` library.

    >>> _for_tokenizers(r"\\p{N}{1,3}+|[$]|\\s++$")
    '(?>\\\\p{N}{1,3})|[$]|\\\\s++\\\\z'
    """
    pattern = POSSESSIVE.sub(r"(?>\1\2)", pattern)
    return TEXT_END.sub(lambda match: r"\z" if match[0] == "$" else match[0], pattern)
