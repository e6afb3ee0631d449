"""Parameters out of a run's checkpoint and into a new run's, tensor by tensor: never a whole model in memory."""

import contextlib
import dataclasses
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from parallax.assembly import model_of
from parallax.checkpoint import DamagedError, complete_steps, probe_folder, read_manifest
from parallax.checkpoint.fingerprint import Running
from parallax.checkpoint.manifest import files_of, flatten, shortened, write_manifest, wrong_files
from parallax.checkpoint.stored import PIECE_BYTES, Stored, Written, new_cache
from parallax.convert.names import Source, plain_names
from parallax.convert.safetensors import Tensor, in_pieces, open_tensor
from parallax.convert.shards import read_shards, write_shards
from parallax.errors import CheckpointError, writing
from parallax.mesh import MeshConfig, make_mesh
from parallax.settings import Settings, load_json, read_settings
from parallax.tokenizer import load
from parallax.version import code_version

CARRIED = ("config.json", "tokenizer.json")


def export_params(workdir: Path, out: Path, *, step: int | None, shard_bytes: int) -> int:
    """Write the parameters of a run's checkpoint, the newest where `step` is None, as safetensors; returns the step.

    `out` appears when it is whole, with the run's config and tokenizer.

    Raises:
        DamagedError: a parameter, its config or its tokenizer is damaged; an older step is never taken in its place.
        CheckpointError: there is no such checkpoint, or `out` cannot be written.
    """
    folder = workdir / "checkpoints"
    step = max(complete_steps(folder), default=None) if step is None else step
    if step is None:
        raise CheckpointError(f"{workdir} has no checkpoint to export")
    manifest = read_manifest(folder, step)
    arrays = manifest["arrays"].get("params")
    if not arrays:
        raise CheckpointError(f"the checkpoint of step {step} in {folder} has no parameters")
    _check_files(folder / str(step), files_of(manifest, ["params"]))
    with _made_whole(out) as unfinished:
        _write_tensors(folder / str(step), arrays, unfinished, shard_bytes)
        for name in CARRIED:
            shutil.copyfile(folder / str(step) / name, unfinished / name)
    return step


def import_params(source: Path, workdir: Path) -> None:
    """Make a run folder whose step 0 has the parameters of `source`, which has a config.json and a tokenizer.json too.

    Raises:
        CheckpointError: `source` cannot be trusted, or has not the parameters of the model in its config.
        DataError: its tokenizer is missing or damaged.
    """
    settings = read_settings(load_json(source / "config.json"))
    tokenizer = load(source)
    tensors = read_shards(source)
    wanted = _params_of(settings)
    _check_tensors(source, tensors, plain_names(wanted))
    with _made_whole(workdir) as unfinished:
        step = unfinished / "checkpoints" / "0"
        step.mkdir(parents=True)
        arrays = _read_tensors(tensors, wanted, step / "params")
        for name in CARRIED:
            shutil.copyfile(source / name, step / name)
            shutil.copyfile(source / name, unfinished / name)
        corpus = {"tokenizer": tokenizer.fingerprint}
        about = {**settings.to_dict(), "corpus": corpus, "code": {"parallax": code_version()}}
        write_manifest(step, {"step": 0, "loss": None, "settings": about, "arrays": {"params": arrays}})


def _check_files(step: Path, files: Mapping[str, Any]) -> None:
    """What is copied is read for its checksum; of arrays, which are held to their fingerprints, sizes will do."""
    missing = [f"its file {name} is missing" for name in CARRIED if name not in files]
    wrong = missing or wrong_files(step, {name: files[name] for name in CARRIED}, contents=True)
    wrong = wrong or wrong_files(step, files, contents=False)
    if wrong:
        raise _damaged(step, shortened(wrong))


def _write_tensors(step: Path, arrays: Mapping[str, Any], out: Path, shard_bytes: int) -> None:
    try:
        cache = new_cache()
        stored = {name: Stored(step / "params", name, about, cache) for name, about in arrays.items()}
    except (ValueError, OSError) as error:
        raise _damaged(step, str(error).splitlines()[0]) from error
    running = {name: Running() for name in arrays}
    plain = plain_names(stored)

    def pieces(name: str) -> Iterator[np.ndarray]:
        source = plain[name]
        try:
            for piece in stored[source.name].pieces(source.index):
                running[source.name].add(piece)
                yield piece
        except ValueError as error:  # tensorstore's, for all that is wrong with its files
            raise _damaged(step, f"params {source.name} cannot be read") from error

    write_shards(out, plain, pieces, shard_bytes=shard_bytes)
    wrong = [f"params {name}" for name, about in arrays.items() if running[name].value != about["fingerprint"]]
    if wrong:
        raise _damaged(step, f"{shortened(wrong)} not as saved")


def _damaged(step: Path, how: str) -> DamagedError:
    return DamagedError(step.parent, int(step.name), how)


def _read_tensors(tensors: Mapping[str, tuple[Path, Tensor]], wanted: Mapping[str, Any], part: Path) -> dict[str, Any]:
    """Write every array of a part; returns them as a manifest lists them."""
    part.mkdir()
    written = {name: Written(part, name, about) for name, about in wanted.items()}
    for name, source in plain_names(wanted).items():
        at = 0
        for piece in in_pieces(open_tensor(*tensors[name]), PIECE_BYTES):
            rows = (slice(at, at + len(piece)),) if piece.ndim else ()
            written[source.name].write((*source.index, *rows), np.asarray(piece))
            at += len(piece) if piece.ndim else 0
    return {name: array.described() for name, array in written.items()}


def _params_of(settings: Settings) -> dict[str, Any]:
    """Shapes and dtypes of the model's parameters, as one device would hold them."""
    mesh = make_mesh(MeshConfig(pp=1, dp=1, tp=1, simulate=0), jax.devices()[:1])
    pipeline = dataclasses.replace(settings.pipeline, schedule="gpipe", virtual=1, microbatches=1)
    return flatten(model_of(dataclasses.replace(settings, pipeline=pipeline), mesh).shapes)


def _check_tensors(source: Path, tensors: Mapping[str, tuple[Path, Tensor]], wanted: Mapping[str, Source]) -> None:
    differences = [f"{name} is missing" for name in wanted if name not in tensors]
    differences += [f"{name} is of no use" for name in tensors if name not in wanted]
    for name in wanted.keys() & tensors.keys():
        there, here = _text(tensors[name][1]), _text(wanted[name])
        differences += [] if there == here else [f"{name} is {there} there and {here} here"]
    if differences:
        raise CheckpointError(f"{source} has not the parameters of its config.json: {shortened(sorted(differences))}")


def _text(about: Any) -> str:
    return f"{np.dtype(about.dtype)}{list(about.shape)}"


@contextlib.contextmanager
def _made_whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is written, and goes away if it is not."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already; choose another name, or remove it")
    whole = folder.resolve()
    unfinished = whole.with_name(f"{whole.name}.unfinished-{uuid.uuid4().hex}")  # a name that nothing has
    probe_folder(unfinished)
    try:
        with writing(folder, "make room, or choose another folder"):
            yield unfinished
            unfinished.rename(whole)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
