"""Whether a run starts or resumes, and whether its settings still fit its checkpoints."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parallax.checkpoint.restore import restore_newest
from parallax.checkpoint.steps import check_steps, complete_steps, latest_step, read_manifest, set_aside, wrong_files
from parallax.config.earlier import of_today
from parallax.config.settings import compare_settings
from parallax.runtime.errors import CheckpointError, check_choice
from parallax.runtime.files import read_bytes
from parallax.runtime.multihost.job import is_first, wait_for_all
from parallax.runtime.run_files import RECORD, RunFiles
from parallax.runtime.version import code_version, version_of
from parallax.training.folder import RunFolder

RESUME = ("auto", "must", "never")
# What another value would silently make another run. Of the data, that is the corpus, whose fingerprint covers its
# text and the order of its windows; a corpus that has only moved is the same one.
FIXED_SECTIONS = ("model", "corpus")
FIXED_KEYS = ("optimizer.name", "train.seed")
TOKENIZER = "corpus.tokenizer"
# What may change in a model: how it is computed, and context extension; no window is shorter than the run's seq.
FREE_KEYS = ("model.dtype", "model.kernel", "model.dropout", "model.sliding_window", "model.rope_")  # as these begin


def step_to_resume(folder: RunFolder, settings: Mapping[str, Any], resume: str, say: Callable[[str], None]) -> int:
    """The step to go on from, 0 to start.

    Settings that fix the model or its data must be what they were (CheckpointError); others that have changed
    are listed.
    """
    check_choice("--resume", resume, RESUME)
    newest = latest_step(folder.checkpoints)
    if newest is None:
        if resume == "must":
            raise CheckpointError(
                f"--resume=must, but {folder.path} has no checkpoint; use --resume=auto to start a run there"
            )
        return 0
    if resume == "never":
        raise CheckpointError(
            f"--resume=never, but {folder.path} holds a run at step {newest}; choose another --workdir"
        )
    if newest == 0:
        raise CheckpointError(
            f"{folder.path} holds imported weights, not a run; start one elsewhere with train.init_from={folder.path}"
        )
    changed = compare_settings(of_today(read_manifest(folder.checkpoints, newest)["settings"])[0], settings)
    if any(map(is_fixed, changed)):
        causes = {key: values for key, values in changed.items() if is_fixed(key) or key.startswith("data.")}
        raise CheckpointError(
            f"cannot go on from step {newest} in {folder.path} with another model or other data: "
            f"{_text(causes)}; set them back or choose another --workdir"
        )
    if changed:
        say(f"going on with changed settings: {_text(changed)}")
    return newest


def load_newest(
    folder: RunFolder, wanted: Mapping[str, Any], settings: Mapping[str, Any], say: Callable[[str], None]
) -> tuple[int, dict[str, Any]]:
    """The newest step that is whole, and its parts; damaged ones after it are named and set aside."""
    step, parts, damaged = restore_newest(folder.checkpoints, wanted, settings=settings)
    for error in damaged:
        how = f"the checkpoint of step {error.step} is damaged: {error.how}"
        aside = set_aside(folder.checkpoints, error.step, "damaged") if is_first() else None
        say(f"{how}; set aside as {aside}, going on from step {step}, the one before it")
    wait_for_all("damaged checkpoints are set aside")
    return step, parts


def load_params(source: str, wanted: Any, settings: Mapping[str, Any], say: Callable[[str], None]) -> Any:
    """The parameters of another run's newest checkpoint, onto the shardings of `wanted`.

    CheckpointError if it knows its ids by another tokenizer.
    """
    checkpoints = RunFiles(source).checkpoints
    step, parts, damaged = restore_newest(checkpoints, {"params": wanted}, settings=settings)
    changed = compare_settings(read_manifest(checkpoints, step)["settings"], settings)
    there, here = changed.get(TOKENIZER, (None, None))
    if there is not None and here is not None:
        raise CheckpointError(
            f"train.init_from={source!r} learned other ids: {TOKENIZER}={there!r} there, {here!r} here; "
            f"use its tokenizer, data.tokenizer={str(Path(source) / 'tokenizer.json')!r}"
        )
    for error in damaged:
        say(f"{error}; weights are those of step {step}")
    return parts["params"]


def import_record(folder: RunFolder, source: str) -> bytes | None:
    """The record of the folder that a run's weights were imported from, for its checkpoints to carry.

    It is in the run's own newest step, or in that of `source`, the run that it starts from; None if nothing was kept.
    """
    own = complete_steps(folder.checkpoints)
    checkpoints = folder.checkpoints if own or not source else RunFiles(source).checkpoints
    for step in check_steps(checkpoints).valid:
        at, files = checkpoints / str(step), read_manifest(checkpoints, step)["files"]
        if RECORD not in files:
            return None
        if not wrong_files(at, {RECORD: files[RECORD]}, contents=True):
            return read_bytes(at / RECORD)
    return None


def check_source(source: str) -> None:
    """CheckpointError if the run that train.init_from names has no checkpoint; loading judges what it has."""
    if not complete_steps(RunFiles(source).checkpoints):
        raise CheckpointError(
            f"train.init_from={source!r} holds no checkpoint; name the folder of a run that saved one"
        )


def code_versions() -> dict[str, str]:
    """Versions of the code that computes a run."""
    return {"parallax": code_version(), **{name: version_of(name) for name in ("jax", "jaxlib", "flax", "optax")}}


def is_fixed(key: str) -> bool:
    """Whether a run cannot go on when this setting changes.

    >>> [key for key in ("model.d_ff", "model.kernel", "mesh.tp", "data.path") if is_fixed(key)]
    ['model.d_ff']
    """
    return key in FIXED_KEYS or (key.split(".")[0] in FIXED_SECTIONS and not key.startswith(FREE_KEYS))


def _text(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key}={there!r} there, {here!r} here" for key, (there, here) in changed.items())
