"""Parameters out of a run's checkpoint and into a new run's, tensor by tensor: never a whole model in memory."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parallax.checkpoint.arrays import PIECE_BYTES, ArrayWriter
from parallax.checkpoint.steps import shortened
from parallax.config.settings import load_saved, read_settings
from parallax.data.tokenizer import load
from parallax.interop.folders import CARRIED, CARRIED_IF_THERE, Arrays, made_whole, make_run, open_step, params_of
from parallax.interop.names import Source, plain_names
from parallax.interop.safetensors import Tensor, read_pieces
from parallax.interop.shards import read_shards, write_shards
from parallax.runtime.errors import CheckpointError, shown


def export_params(workdir: Path, out: Path, *, step: int | None, shard_bytes: int) -> int:
    """Write the parameters of a run's checkpoint, the newest where `step` is None, as safetensors; returns the step.

    `out` appears when it is whole, with the run's config and tokenizer.

    Raises:
        DamagedError: a parameter, its config or its tokenizer is damaged; an older step is never taken in its place.
        CheckpointError: there is no such checkpoint, or `out` cannot be written.
    """
    source = open_step(workdir, step)
    with made_whole(out) as unfinished:
        arrays = Arrays(source)
        plain = plain_names(arrays.stored)
        pieces = lambda name: arrays.pieces(plain[name].name, plain[name].index)  # noqa: E731
        write_shards(unfinished, plain, pieces, shard_bytes=shard_bytes)
        arrays.check()
        for name in (*CARRIED, *CARRIED_IF_THERE):
            if name in source.files:
                shutil.copyfile(source.folder / name, unfinished / name)
    return source.number


def import_params(source: Path, workdir: Path) -> None:
    """Make a run folder whose step 0 has the parameters of `source`, which has a config.json and a tokenizer.json too.

    Raises:
        CheckpointError: `source` cannot be trusted, or has not the parameters of the model in its config.
        DataError: its tokenizer is missing or damaged.
    """
    settings = read_settings(load_saved(source / "config.json"))
    tokenizer = load(source)
    tensors = read_shards(source)
    _check_tensors(source, tensors, plain_names(params_of(settings)))

    def write(arrays: Mapping[str, ArrayWriter]) -> None:
        for name, here in plain_names(arrays).items():
            at = 0
            for piece in read_pieces(*tensors[name], PIECE_BYTES):
                rows = (slice(at, at + len(piece)),) if piece.ndim else ()
                arrays[here.name].write((*here.index, *rows), piece)
                at += len(piece) if piece.ndim else 0

    names = (*CARRIED, *(name for name in CARRIED_IF_THERE if (source / name).is_file()))
    with made_whole(workdir) as unfinished:
        make_run(unfinished, settings, tokenizer, {name: source / name for name in names}, write)


def _check_tensors(source: Path, tensors: Mapping[str, tuple[Path, Tensor]], wanted: Mapping[str, Source]) -> None:
    differences = [f"{name} is missing" for name in wanted if name not in tensors]
    differences += [f"{shown(name)} is of no use" for name in tensors if name not in wanted]
    for name in wanted.keys() & tensors.keys():
        there, here = _text(tensors[name][1]), _text(wanted[name])
        differences += [] if there == here else [f"{name} is {there} there and {here} here"]
    if differences:
        raise CheckpointError(f"{source} has not the parameters of its config.json: {shortened(sorted(differences))}")


def _text(about: Any) -> str:
    return f"{np.dtype(about.dtype)}{list(about.shape)}"
