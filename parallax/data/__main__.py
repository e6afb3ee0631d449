"""Prepare text for training, and look at what was prepared.

    python -m parallax.data prepare --source text --path corpus --tokenizer bpe --bpe-vocab 8192 --out shards
    python -m parallax.data inspect shards

Train on it with --config.data.source=prepared --config.data.path=shards --config.data.tokenizer=bpe.
"""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

from parallax.cli.arguments import Parser, about_command, local_path
from parallax.config.sections import AUTO, BUILT_IN, FILES, DataConfig, check_tokenizer
from parallax.data.manifest import Manifest, read_manifest
from parallax.data.prepare import SHARD_BYTES, Request, prepare, remove
from parallax.data.sources import open_source
from parallax.data.tokenizer import Bytes
from parallax.runtime.errors import ConfigError, DataError, check_local, exit_status
from parallax.runtime.progress import speak_on

SHARED = ("field", "tokenizer", "bpe_vocab", "synthetic_tokens")  # keys of the section data that have a flag, too
AGAIN = "stopped; run the same command again to resume"


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the result is the exit status: 0, or 2 for wrong arguments, 5 for wrong data."""
    return exit_status(lambda: act(arguments), one_line=True, interrupted=AGAIN)


def act(arguments: list[str] | None) -> int:
    """Do what the command line says; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    return parsed.run(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m parallax.data", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="prepare | inspect")
    add = lambda name, text: commands.add_parser(name, help=text, description=about_command(name, text, __doc__))  # noqa: E731
    _add_prepare(add("prepare", "tokenise documents into shards; run it again to resume"))
    inspect = add("inspect", "print what is in a folder of shards, and check every byte of it")
    inspect.add_argument("folder", type=local_path, help="the --out of prepare")
    inspect.set_defaults(run=_inspect)
    return parser


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    add, training = parser.add_argument, asdict(DataConfig())
    as_training = {key: f"(default: {training[key]}, as in training)" for key in SHARED}
    add("--source", required=True, choices=(*FILES, *BUILT_IN), help="where documents come from")
    add("--path", default="", help="text, jsonl, parquet: a file, a folder (all files below it) or a quoted glob")
    add("--field", help=f"jsonl, parquet: the field or column that holds a document {as_training['field']}")
    add(
        "--tokenizer",
        default=training["tokenizer"],
        help="auto (which is bytes here), bytes, bpe (trained on these documents) or the path of a tokenizer.json "
        + as_training["tokenizer"],
    )
    add("--bpe-vocab", type=int, help=f"entries of a bpe that is trained, 257 or more {as_training['bpe_vocab']}")
    add("--synthetic-tokens", type=int, help=f"synthetic: bytes of text {as_training['synthetic_tokens']}")
    add("--out", required=True, type=local_path, help="folder for the shards, tokenizer and manifest")
    add(
        "--workers",
        type=_positive,
        default=os.cpu_count() or 1,
        help="processes (default: one per core, %(default)s here)",
    )
    add(
        "--shard-mib",
        type=_positive,
        default=SHARD_BYTES >> 20,
        help="MiB of text in a shard (default: %(default)s)",
    )
    add("--rebuild", action="store_true", help="first delete what an earlier prepare left in --out")
    parser.set_defaults(run=_prepare)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _prepare(parsed: argparse.Namespace) -> int:
    _fill_in(parsed)
    source = open_source(parsed.source, path=parsed.path, field=parsed.field, synthetic_tokens=parsed.synthetic_tokens)
    request = Request(
        source=source,
        tokenizer=parsed.tokenizer,
        bpe_vocab=parsed.bpe_vocab,
        shard_bytes=parsed.shard_mib << 20,
    )
    if parsed.rebuild:
        remove(parsed.out)
    print(_describe(prepare(request, parsed.out, workers=parsed.workers), parsed.out))
    return 0


def _fill_in(parsed: argparse.Namespace) -> None:
    """Give what is left out training's default, where it is read; refuse what is not read, and what is wrong."""
    training = asdict(DataConfig())
    if parsed.tokenizer == AUTO:
        parsed.tokenizer = Bytes.name
    read_by = {
        "path": (parsed.source in FILES, f"--source {parsed.source}"),
        "field": (parsed.source in ("jsonl", "parquet"), f"--source {parsed.source}"),
        "synthetic_tokens": (parsed.source == "synthetic", f"--source {parsed.source}"),
        "bpe_vocab": (parsed.tokenizer == "bpe", f"--tokenizer {parsed.tokenizer}"),
    }
    for key, (needed, by) in read_by.items():
        flag, value = f"--{key.replace('_', '-')}", getattr(parsed, key)
        if value and not needed:
            raise ConfigError(f"{flag}={value} is not read by {by}")
        if value is None:
            value = training[key]
            setattr(parsed, key, value)
        if needed and not value:
            raise ConfigError(f"{by} needs {flag}")
    for name in ("path", "tokenizer"):
        check_local(f"--{name}", getattr(parsed, name))
    check_tokenizer(parsed.tokenizer, parsed.bpe_vocab)


def _inspect(parsed: argparse.Namespace) -> int:
    manifest = read_manifest(parsed.folder)
    print(_describe(manifest, parsed.folder))
    damaged = [error for shard in manifest.shards if (error := _damage(shard, parsed.folder, manifest))]
    for error in damaged:
        print(f"DataError: {error}", file=sys.stderr)
    print(f"checked     {len(manifest.shards)} shards: {len(damaged) or 'none'} damaged")
    return DataError.exit_status if damaged else 0


def _damage(shard, folder: Path, manifest: Manifest) -> DataError | None:
    try:
        shard.check(folder, manifest.dtype, contents=True)
    except DataError as error:
        return error
    return None


def _describe(manifest: Manifest, folder: Path) -> str:
    entropies = (manifest.token_entropy_nats, manifest.byte_entropy_nats)
    source = ", ".join(f"{name} {value}" for name, value in manifest.request["source"].items())
    return "\n".join(
        (
            f"folder      {folder}",
            f"source      {source}",
            f"tokenizer   {manifest.tokenizer}, {manifest.vocab} ids, {manifest.tokenizer_fingerprint[:12]}",
            f"documents   {manifest.documents:,} ({manifest.empty_documents:,} empty ones left out)",
            f"tokens      {manifest.tokens:,} in {len(manifest.shards):,} shards as {manifest.dtype.name}",
            f"text        {manifest.text_bytes:,} bytes, {manifest.bytes_per_token:.3f} per token",
            "entropy     {:.3f} nats per token, {:.3f} nats per byte".format(*entropies),
        )
    )


if __name__ == "__main__":
    speak_on(sys.stderr)
    sys.exit(main())
