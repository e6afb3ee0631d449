"""Saving in the background, and keeping the last few steps and the best few."""

import contextlib
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from parallax.checkpoint.manifest import (
    complete_steps,
    describe,
    flatten,
    numbered_steps,
    read_manifest,
    write_manifest,
)
from parallax.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep: the last few, and the best few by eval/loss."""

    every_steps: int
    keep_last: int
    keep_best: int

    def __post_init__(self):
        for key, least in (("every_steps", 0), ("keep_last", 1), ("keep_best", 0)):
            if getattr(self, key) < least:
                raise ConfigError(f"checkpoint.{key}={getattr(self, key)} is too small; use {least} or more")


class Checkpoints:
    """Writes the checkpoints of one run into a folder.

    Use it as a context: leaving it waits for the save in flight, whatever the reason to leave. `settings` is
    a dict that JSON can hold; it goes into every manifest.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, *, settings: Mapping[str, Any]):
        self._folder = folder.resolve()
        self._settings = settings
        self._in_flight: dict[str, Any] = {}
        probe_folder(self._folder)
        self._policy = _LastAndBest(self._folder, config)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._policy,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_manifest),
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.wait()
        except CheckpointError:
            # The error that ends the run says more than the save that it took along.
            if error is None:
                raise
        finally:
            self._manager.close()

    def save(self, step: int, parts: Mapping[str, Any], *, loss: float | None = None) -> None:
        """Begin to save named trees of arrays, such as {"params": ..., "rest": ...}; a step is saved once."""
        self.wait()
        if step in self._manager.all_steps():
            return
        flat = {part: flatten(tree) for part, tree in parts.items()}
        arrays = {part: {name: describe(x) for name, x in tree.items()} for part, tree in flat.items()}
        self._in_flight = {"step": step, "loss": loss, "settings": self._settings, "arrays": arrays}
        items = {part: ocp.args.StandardSave(tree) for part, tree in flat.items()}
        self._policy.losses[step] = loss
        with _saving(self._folder, step):
            saved = self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        assert saved, f"orbax declined to save step {step}"

    def check(self) -> None:
        """Raise CheckpointError if the save in the background has failed."""
        with _saving(self._folder, self._in_flight.get("step")):
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Wait until the save in the background is on disk."""
        with _saving(self._folder, self._in_flight.get("step")):
            self._manager.wait_until_finished()

    def _write_manifest(self) -> None:
        # Into the unfinished folder, which orbax then renames: manifest and arrays become visible in one act.
        if jax.process_index() == 0:
            (unfinished,) = self._folder.glob(f"{self._in_flight['step']}.orbax-checkpoint-tmp*")
            write_manifest(unfinished, self._in_flight)


def probe_folder(folder: Path) -> None:
    """Make the folder, and prove that files can be written, renamed and removed in it."""
    probe = folder / f"probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("x")
        probe.rename(probe.with_suffix(".renamed")).unlink()
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"cannot write in {folder} ({reason}); choose another --workdir") from error


def set_unfinished_aside(folder: Path) -> list[Path]:
    """Rename numbered folders without a manifest, which would stand in the way of a save of that step."""
    renamed = []
    for step in sorted(numbered_steps(folder) - complete_steps(folder)):
        aside = folder / f"unfinished-{step}"
        shutil.rmtree(aside, ignore_errors=True)
        renamed.append((folder / str(step)).rename(aside))
    return renamed


class _LastAndBest:
    """Tells orbax which steps stay. Losses are ours to remember: orbax forgets them when a run restarts."""

    def __init__(self, folder: Path, config: CheckpointConfig):
        self._config = config
        self.losses = {step: read_manifest(folder, step)["loss"] for step in complete_steps(folder)}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        measured = [step for step in steps if self.losses.get(step) is not None]
        best = sorted(measured, key=self.losses.__getitem__)[: self._config.keep_best]
        kept = {*sorted(steps)[-self._config.keep_last :], *best}
        return [step in kept for step in steps]


@contextlib.contextmanager
def _saving(folder: Path, step: int | None) -> Iterator[None]:
    """Turn what goes wrong in orbax into a CheckpointError that names the folder and the step."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"cannot save step {step} in {folder}: {reason}; older steps are untouched") from error
