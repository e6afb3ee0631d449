"""Prepare text for training, and inspect prepared data.

    python -m parallax.data prepare --source text --path corpus --tokenizer bpe --bpe-vocab 8192 --out shards
    python -m parallax.data inspect shards
    python -m parallax.data conversations --out conversations.jsonl

Train on it with --config.data.source=prepared --config.data.path=shards --config.data.tokenizer=bpe.
"""

import argparse
import json
import sys
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from parallax.cli.arguments import Parser, add_command, local_path, positive, run_path, source_of, write_output
from parallax.config.mixture import DATASET, RECORDS
from parallax.config.paths import dataset_of, paths_of
from parallax.config.sections import (
    AUTO,
    BUILT_IN,
    CHAT,
    COMPLETION,
    FILES,
    FORMATS,
    NAMED_TEMPLATES,
    SPECIAL_TOKENS,
    TEXT,
    DataConfig,
    check_tokenizer,
)
from parallax.data.conversations import LEARNED, format_of, plain_ids, special_tokens_of
from parallax.data.prepare import SHARD_BYTES, Request, prepare, remove_prepared
from parallax.data.shards import Manifest, Shard
from parallax.data.sources import open_source
from parallax.data.stdlib_chats import conversations
from parallax.data.tokenizer import Bytes, load_tokenizer
from parallax.display.progress import has_colours, print_progress_on
from parallax.errors import ConfigError, DataError, check_choice, exit_status, printable
from parallax.hardware.devices import usable_cpus
from parallax.storage.remote import source_path
from parallax.user_code import CODE_FORM, imported_code, names_code

TRAINING = DataConfig()
AGAIN = "stopped; run the same command again to resume"


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, or 2 for wrong arguments, 5 for wrong data."""

    def run() -> int:
        parsed = parser().parse_args(arguments)
        return parsed.run(parsed)

    return exit_status(run, one_line=True, interrupted=AGAIN)


def parser() -> argparse.ArgumentParser:
    parser = Parser("python -m parallax.data", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="prepare | inspect | conversations")
    _add_prepare(add_command(commands, "prepare", "tokenise documents into shards; run it again to resume", __doc__))
    inspect = add_command(commands, "inspect", "describe a folder of shards, and check every byte of it", __doc__)
    inspect.add_argument("folder", type=source_of, help="the --out of prepare")
    inspect.add_argument(
        "--show", type=positive, default=0, help="print so many of the first documents; what is learned is in colour"
    )
    inspect.set_defaults(run=_inspect)
    text = "write conversations about Python's standard library, from its documentation strings, as JSONL"
    made = add_command(commands, "conversations", text, __doc__)
    made.add_argument("--out", required=True, type=local_path, help="the file")
    made.add_argument("--held-out", action="store_true", help="ask in the words that are left out otherwise")
    made.set_defaults(run=_conversations)
    return parser


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    meaning = {field.name: field.metadata["key"].meaning for field in fields(DataConfig)}

    def as_training(name: str, text: str) -> str:
        return f"{text} (default: {getattr(TRAINING, name)}, as in training)"

    sources = f"{meaning['source']}: {', '.join((*FILES, *BUILT_IN))}, or {CODE_FORM}"
    add("--source", required=True, help=sources)
    places = "files, folders (all files below them) or quoted globs, read in this order; dataset: NAME?config=A&split=B"
    add("--path", nargs="+", default=[], help=places)
    add("--field", help=as_training("field", meaning["field"]))
    add("--where", default=TRAINING.where, help=as_training("where", meaning["where"]).replace("%", "%%"))
    names = "auto (which is bytes here), bytes, bpe (trained on these documents), tiktoken:NAME, or a file: a "
    names += "tokenizer.json, ranks.tiktoken or tokenizer.model"
    add("--tokenizer", default=TRAINING.tokenizer, help=as_training("tokenizer", names))
    add("--bpe-vocab", type=int, help=as_training("bpe_vocab", f"{meaning['bpe_vocab']}, 257 or more"))
    reserved = "bpe: further special tokens, as those of a chat template"
    add("--reserve", nargs="+", default=[], metavar="TOKEN", help=reserved)
    add("--format", default=TRAINING.format, choices=FORMATS, help=as_training("format", meaning["format"]))
    templates = f"{meaning['chat_template']}; {', '.join(NAMED_TEMPLATES)} or a file"
    add("--chat-template", default=TRAINING.chat_template, help=as_training("chat_template", templates))
    tokens = as_training("special_tokens", meaning["special_tokens"])
    add("--special-tokens", default=TRAINING.special_tokens, choices=SPECIAL_TOKENS, help=tokens)
    add("--synthetic-tokens", type=int, help=as_training("synthetic_tokens", "synthetic: bytes of text"))
    add("--out", required=True, type=run_path, help="folder for the shards, tokenizer and manifest")
    cores, mib = usable_cpus(), SHARD_BYTES >> 20
    add(
        "--workers",
        type=positive,
        default=cores,
        help="threads (default: one per usable CPU, %(default)s here)",
    )
    add("--shard-mib", type=positive, default=mib, help="MiB of text in a shard (default: %(default)s)")
    add("--rebuild", action="store_true", help="first delete what an earlier prepare left in --out")
    parser.set_defaults(run=_prepare)


def _prepare(parsed: argparse.Namespace) -> int:
    _fill_in(parsed)
    about = {key: getattr(parsed, key) for key in ("path", "field", "where", "synthetic_tokens")}
    form = format_of(parsed.format, field=parsed.field, template=parsed.chat_template, tokenizer=parsed.tokenizer)
    source = open_source(parsed.source, form=form, **about)
    options = {key: getattr(parsed, key) for key in ("tokenizer", "bpe_vocab")} | {"reserved": tuple(parsed.reserve)}
    options["special_tokens"] = special_tokens_of(parsed.format, parsed.special_tokens, parsed.tokenizer)
    request = Request(source=source, shard_bytes=parsed.shard_mib << 20, **options)
    if parsed.rebuild:
        remove_prepared(parsed.out)
    print(_describe(prepare(request, parsed.out, workers=parsed.workers), parsed.out))
    return 0


def _conversations(parsed: argparse.Namespace) -> int:
    lines = [json.dumps(conversation) for conversation in conversations(held_out=parsed.held_out)]
    write_output("out", parsed.out, "\n".join(lines) + "\n")
    print(f"{len(lines)} conversations in {parsed.out}")
    return 0


def _fill_in(parsed: argparse.Namespace) -> None:
    """Fill in training's defaults for missing flags that are read; refuse flags that are not read, and wrong values."""
    if parsed.tokenizer == AUTO:
        parsed.tokenizer = Bytes.name
    parsed.source = imported_code("--source", parsed.source)
    if not (of_code := names_code(parsed.source)):
        check_choice("--source", parsed.source, (*FILES, *BUILT_IN))
    reads_field = parsed.source in RECORDS and parsed.format != COMPLETION
    read_by = {
        "path": (parsed.source in FILES, f"--source {parsed.source}"),
        "field": (reads_field, f"--source {parsed.source}" if parsed.format != COMPLETION else "--format completion"),
        "where": (parsed.source in RECORDS, f"--source {parsed.source}"),
        "format": (parsed.format == TEXT or parsed.source in RECORDS, f"--source {parsed.source}"),
        "chat_template": (parsed.format == CHAT or parsed.chat_template == AUTO, f"--format {parsed.format}"),
        "special_tokens": (parsed.format != CHAT or parsed.special_tokens == TRAINING.special_tokens, "--format chat"),
        "synthetic_tokens": (parsed.source == "synthetic", f"--source {parsed.source}"),
        "bpe_vocab": (parsed.tokenizer == "bpe", f"--tokenizer {parsed.tokenizer}"),
        "reserve": (parsed.tokenizer == "bpe", f"--tokenizer {parsed.tokenizer}"),
    }
    may_be_empty = ("where", "reserve", *["field"] * (parsed.source == "arrayrecord"))
    for key, (needed, by) in read_by.items():
        flag, value = f"--{key.replace('_', '-')}", getattr(parsed, key)
        if key == "path" and of_code:
            continue
        if value and not needed:
            written = " ".join(value) if isinstance(value, list) else value
            raise ConfigError(f"{flag}={written} is not read by {by}")
        if value is None:
            value = getattr(TRAINING, key)
            setattr(parsed, key, value)
        if needed and not value and key not in may_be_empty:
            raise ConfigError(f"{by} needs {flag}")
    source_path(parsed.tokenizer, "--tokenizer")
    parsed.path = [path for text in parsed.path for path in paths_of("--path", text)]
    for path in parsed.path:
        dataset_of("--path", path) if parsed.source == DATASET else source_path(path, "--path", pattern=True)
    if parsed.where and not parsed.field:
        raise ConfigError(f"--where {parsed.where} reads fields, and --field= takes each record as text")
    check_tokenizer(parsed.tokenizer, parsed.bpe_vocab)


def _inspect(parsed: argparse.Namespace) -> int:
    manifest = Manifest.read(parsed.folder)
    print(_describe(manifest, parsed.folder))
    damaged = 0
    for shard in manifest.shards:
        try:
            shard.check(parsed.folder, manifest.dtype, contents=True)
        except DataError as error:
            damaged += 1
            print(f"DataError: {error}", file=sys.stderr)
    print(f"checked     {len(manifest.shards)} shards: {damaged or 'none'} damaged")
    if not damaged and manifest.special_tokens == "text" and not manifest.is_marked:
        _report_ends(manifest, parsed.folder)
    if not damaged and parsed.show:
        _show(manifest, parsed.folder, parsed.show)
    return DataError.exit_status if damaged else 0


def _show(manifest: Manifest, folder: Path, documents: int) -> None:
    """Print the first documents, with what is learned in green, or where there are no colours between ⟦ and ⟧."""
    tokenizer = load_tokenizer(folder, manifest.tokenizer_fingerprint)
    texts = (text for shard in manifest.shards for text in _documents_of(shard, manifest, folder))
    left, right = ("\033[32m", "\033[0m") if has_colours(sys.stdout) else ("⟦", "⟧")
    for number, stored in enumerate(islice(texts, documents), start=1):
        ids, learned = plain_ids(stored), (stored & LEARNED) > 0
        if not manifest.is_marked:
            learned = np.ones(len(ids), bool)
        parts = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(learned)) + 1)
        text, before = "", ""
        for part in parts:
            whole = tokenizer.decode_whole(ids[: part[-1] + 1])  # the decoder of a piece alone may drop its space
            words, before = printable(whole[len(before) :]), whole
            text += f"{left}{words}{right}" if learned[part[0]] else words
        print(f"\ndocument {number}: {len(ids):,} tokens, {learned.sum():,} learned\n{text}")


def _documents_of(shard: Shard, manifest: Manifest, folder: Path) -> list[np.ndarray]:
    """The ids of each document of a shard, as stored."""
    ends = np.cumsum(shard.read_documents(folder)["tokens"].astype(np.int64))
    return np.split(shard.read_ids(folder, manifest.dtype).astype(np.uint32), ends[:-1])


def _report_ends(manifest: Manifest, folder: Path) -> None:
    """Say whether texts hold ends of documents, which earlier versions made of text with some tokenizers."""
    tokenizer = load_tokenizer(folder, manifest.tokenizer_fingerprint)
    end, each = tokenizer.end, 1 + tokenizer.begin.count(tokenizer.end)
    ends = sum(int((shard.read_ids(folder, manifest.dtype) == end).sum()) for shard in manifest.shards)
    if inside := ends - each * manifest.documents:
        print(
            f"ends        {inside:,} inside of documents: text became the token {tokenizer.token(end)!r}, which ends "
            "them; prepare it again in another folder"
        )


def _line_of(value: Any) -> str:
    """A value of a request: texts, or data sets, side by side."""
    if isinstance(value, list):
        return "; ".join(map(_line_of, value)) if isinstance(value[0], dict) else " ".join(value)
    return " ".join(f"{key}={each}" for key, each in value.items()) if isinstance(value, dict) else str(value)


def _describe(manifest: Manifest, folder: Path) -> str:
    source = ", ".join(f"{name} {_line_of(value)}" for name, value in manifest.request["source"].items())
    return f"""\
folder      {folder}
source      {source}
tokenizer   {manifest.tokenizer}, {manifest.vocab} ids, {manifest.tokenizer_fingerprint[:12]}
documents   {manifest.documents:,} ({manifest.empty_documents:,} empty ones left out)
tokens      {manifest.tokens:,} in {len(manifest.shards):,} shards as {manifest.dtype.name}
text        {manifest.text_bytes:,} bytes, {manifest.bytes_per_token:.3f} per token
entropy     {manifest.token_entropy_nats:.3f} nats per token, {manifest.byte_entropy_nats:.3f} nats per byte"""


if __name__ == "__main__":
    print_progress_on(sys.stderr)
    sys.exit(main())
