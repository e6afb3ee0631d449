"""What every conversion reads and makes: a step of a run, a new run of step 0, a folder that is whole or not there."""

import contextlib
import dataclasses
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from parallax.checkpoint.arrays import ArrayReader, ArrayWriter, flatten, new_cache
from parallax.checkpoint.fingerprint import RunningFingerprint
from parallax.checkpoint.steps import (
    DamagedError,
    complete_steps,
    files_of,
    read_manifest,
    shortened,
    write_manifest,
    wrong_files,
)
from parallax.config.sections import MeshConfig
from parallax.config.settings import Settings
from parallax.data.tokenizer import CONFIG_NAME, FILE_NAME, Tokenizer
from parallax.runtime.errors import CheckpointError, writing
from parallax.runtime.files import check_writable
from parallax.runtime.run_files import RECORD
from parallax.runtime.version import code_version
from parallax.sharding.mesh import make_mesh
from parallax.training.build import model_of

CARRIED = ("config.json", FILE_NAME)
CARRIED_IF_THERE = (CONFIG_NAME,)


class Step(NamedTuple):
    """A step of a run whose parameters are to be read: its number, its folder, its arrays and its files."""

    number: int
    folder: Path
    arrays: Mapping[str, Any]
    files: Mapping[str, Any]


def open_step(workdir: Path, step: int | None) -> Step:
    """A step, the newest where `step` is None. What is copied of it is read for its checksum; of arrays, which are held
    to their fingerprints, sizes will do.

    Raises:
        DamagedError: its config, its tokenizer or a file's size is not as saved; an older step is never taken instead.
        CheckpointError: there is no such checkpoint, or it has no parameters.
    """
    folder = workdir / "checkpoints"
    step = max(complete_steps(folder), default=None) if step is None else step
    if step is None:
        raise CheckpointError(f"{workdir} has no checkpoint to export")
    manifest = read_manifest(folder, step)
    arrays = manifest["arrays"].get("params")
    if not arrays:
        raise CheckpointError(f"the checkpoint of step {step} in {folder} has no parameters")
    found = Step(step, folder / str(step), arrays, files_of(manifest, ["params"]))
    missing = [f"its file {name} is missing" for name in CARRIED if name not in found.files]
    copied = {name: found.files[name] for name in (*CARRIED, *CARRIED_IF_THERE, RECORD) if name in found.files}
    wrong = missing or wrong_files(found.folder, copied, contents=True)
    wrong = wrong or wrong_files(found.folder, found.files, contents=False)
    if wrong:
        raise damaged(found.folder, shortened(wrong))
    return found


class Arrays:
    """The parameters of a step, read piece by piece; each is read in order and once, and `check` holds them to it."""

    def __init__(self, step: Step):
        self._step, self._running = step, {name: RunningFingerprint() for name in step.arrays}
        try:
            cache = new_cache()
            part = step.folder / "params"
            self.stored = {name: ArrayReader(part, name, about, cache) for name, about in step.arrays.items()}
        except (ValueError, OSError) as error:
            raise damaged(step.folder, str(error).splitlines()[0]) from error

    def pieces(self, name: str, index: tuple[int, ...]) -> Iterator[np.ndarray]:
        """Rows of an array, or of a layer of it, that follow one another."""
        try:
            for piece in self.stored[name].pieces(index):
                self._running[name].add(piece)
                yield piece
        except ValueError as error:  # tensorstore's, for all that is wrong with its files
            raise damaged(self._step.folder, f"params {name} cannot be read") from error

    def check(self) -> None:
        """DamagedError unless all that was read is what was saved, and all was read."""
        arrays = self._step.arrays.items()
        wrong = [f"params {name}" for name, about in arrays if self._running[name].value != about["fingerprint"]]
        if wrong:
            raise damaged(self._step.folder, f"{shortened(wrong)} not as saved")


def damaged(step: Path, how: str) -> DamagedError:
    return DamagedError(step.parent, int(step.name), how)


def make_run(
    unfinished: Path,
    settings: Settings,
    tokenizer: Tokenizer,
    carried: Mapping[str, Path | str],
    write: Callable[[Mapping[str, ArrayWriter]], None],
) -> None:
    """Make a run of step 0 in an empty folder; `write` fills its parameters, and `carried` are files to copy or texts
    by name, of which all but RECORD stand beside the checkpoints too.
    """
    step = unfinished / "checkpoints" / "0"
    (step / "params").mkdir(parents=True)
    written = {name: ArrayWriter(step / "params", name, about) for name, about in params_of(settings).items()}
    write(written)
    for name, content in carried.items():
        for folder in (step,) if name == RECORD else (step, unfinished):
            _put(content, folder / name)
    about = {**settings.to_dict(), "corpus": {"tokenizer": tokenizer.fingerprint}}
    about |= {"code": {"parallax": code_version()}}
    arrays = {name: array.described() for name, array in written.items()}
    write_manifest(step, {"step": 0, "loss": None, "settings": about, "arrays": {"params": arrays}})


def as_json(settings: Settings) -> str:
    """What a run's config.json holds."""
    return json.dumps(settings.to_dict(), indent=2) + "\n"


def _put(content: Path | str, path: Path) -> None:
    if isinstance(content, Path):
        shutil.copyfile(content, path)
    else:
        path.write_text(content, "utf-8")


def params_of(settings: Settings) -> dict[str, Any]:
    """Shapes and dtypes of the model's parameters, as one device would hold them."""
    mesh = make_mesh(MeshConfig(pp=1, dp=1, tp=1, simulate=0), jax.devices()[:1])
    pipeline = dataclasses.replace(settings.pipeline, schedule="gpipe", virtual=1, microbatches=1)
    return flatten(model_of(dataclasses.replace(settings, pipeline=pipeline), mesh).shapes)


@contextlib.contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is written, and goes away if it is not."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already; choose another name, or remove it")
    whole = folder.resolve()
    unfinished = whole.with_name(f"{whole.name}.unfinished-{uuid.uuid4().hex}")  # a name that nothing has
    check_writable(unfinished)
    try:
        with writing(folder, "make room, or choose another folder"):
            yield unfinished
            unfinished.rename(whole)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
