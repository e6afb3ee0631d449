"""Saves steps in the background, and keeps the last few, the best few and some for good."""

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import absl.logging
import jax
import orbax.checkpoint as ocp

from parallax.checkpoint import steps
from parallax.checkpoint.arrays import check_written, flatten, shape_and_dtype
from parallax.checkpoint.fingerprint import fingerprints
from parallax.checkpoint.objects import ObjectSaver
from parallax.config.sections import CheckpointConfig
from parallax.display.units import in_bytes
from parallax.errors import CheckpointError, first_line
from parallax.storage import files

# Of a replicated array each device writes a part, if the parts have so many bytes. Orbax cuts them on the device, by a
# program of its own for each part and device: of a small array one device writes all.
PART_BYTES = 1 << 20


class CheckpointWriter(contextlib.AbstractContextManager):
    """Writes the checkpoints of one run into a folder.

    Use it as a context: leaving it waits for the save in flight, even after an error.

    Args:
        settings: a JSON dict, which is written into every manifest.
        may_write: raises CheckpointError if another run has taken the folder since.
        carry: writes further files of a step, such as its tokenizer, into the folder that it is given.
        say: reports problems that cannot be raised because another error is being raised.
        on_disk: is called with a step and the seconds since its save began, once the step is on disk.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        *,
        settings: Mapping[str, Any],
        may_write: Callable[[], None] = lambda: None,
        carry: Callable[[Path], None] = lambda folder: None,
        say: Callable[[str], None] = print,
        on_disk: Callable[[int, float], None] = lambda step, secs: None,
    ):
        self._folder, self._config = folder.resolve(), config
        self._settings, self._carry, self._say, self._on_disk = settings, carry, say, on_disk
        self._may_write = may_write
        self._in_flight: dict[str, Any] = {}
        self._began = 0.0  # when the save in flight began
        self._ended: float | None = None  # when its thread was done
        self._last_secs = 0.0  # of the last save that is on disk
        say_errors_once()
        files.check_writable(self._folder)
        self._plain = files.PlainPath(self._folder)
        if files.is_local(self._folder):
            # Orbax would remove the files of a step in any order; so here it keeps all steps.
            in_background = ocp.AsyncOptions(post_finalization_callback=self._write_manifest)
            options = ocp.CheckpointManagerOptions(async_options=in_background, lightweight_initialize=True)
            self._manager = LocalSaver(self._plain.path, options=options, handler_registry=array_handlers())
        else:
            self._manager = ObjectSaver(self._folder, self._end_in_bucket)

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.wait()
        except CheckpointError as failed:
            # The error that ends the run is more informative than the save that failed with it.
            if error is None:
                raise
            self._say(f"{type(failed).__name__}: {failed}")
        finally:
            self._manager.close()

    def save(self, step: int, trees: Mapping[str, Any], *, loss: float | None = None) -> None:
        """Copy named trees of arrays, such as {"params": ..., "rest": ...}, and begin to write them; a step is saved
        once."""
        self.wait()
        if step in steps.complete_steps(self._folder):
            return
        self._began, self._ended = time.monotonic(), None
        flat = {part: flatten(tree) for part, tree in trees.items()}
        arrays = {}
        for part, tree in flat.items():
            marks = fingerprints(tree).items()
            arrays[part] = {name: {**shape_and_dtype(tree[name]), "fingerprint": mark} for name, mark in marks}
        self._in_flight = {"step": step, "loss": loss, "settings": self._settings, "arrays": arrays}
        items = {part: ocp.args.PyTreeSave(tree) for part, tree in flat.items()}
        with self._saving(step):
            self._may_write()
            saved = self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        assert saved, f"orbax declined to save step {step}"

    def check(self) -> None:
        """Raise CheckpointError if the save in the background has failed; if it is done, remove replaced steps."""
        if self._in_flight:
            with self._saving(self._in_flight["step"]):
                self._manager.check_for_errors()
            if not self._manager.is_saving_in_progress():
                self.wait()

    def wait(self) -> None:
        """Wait until the save in the background is on disk, and remove replaced steps."""
        if not self._in_flight:
            return
        step = self._in_flight["step"]
        with self._saving(step):
            self._manager.wait_until_finished()
            ends_here = jax.process_index() == 0 and files.is_local(self._folder)
            if ends_here:
                self._confirm()
        self._in_flight = {}
        self._last_secs = secs = (self._ended or time.monotonic()) - self._began
        if ends_here:
            self._remove_replaced()  # before anything is written, since the save may have filled the disk
        self._on_disk(step, secs)

    def expected_secs(self) -> float:
        """Seconds until a save that begins now is on disk, as the last one took, after the one in flight; 0 before
        there was one."""
        running = time.monotonic() - self._began if self._in_flight else self._last_secs
        return self._last_secs + max(self._last_secs - running, 0.0)

    def _write_manifest(self, known: Mapping[str, Any] | None = None) -> None:
        # Into the unfinished folder, which orbax then renames, so that manifest and arrays become visible together. In
        # a bucket the manifest makes them so.
        if jax.process_index() == 0:
            saves = steps.unfinished_saves(self._folder)
            (unfinished,) = (path for step, path in saves if step == self._in_flight["step"])
            check_written(unfinished, self._in_flight["arrays"])
            self._carry(unfinished)
            files.try_writing(unfinished)  # the manifest has what is listed
            steps.write_manifest(unfinished, self._in_flight, known)
            self._ended = time.monotonic()

    def _end_in_bucket(self, known: Mapping[str, Any]) -> None:
        """Do the rest of a save, in process 0 and in the thread that saves: steps do not wait for its requests."""
        self._write_manifest(known)
        self._confirm()
        try:
            self._remove_replaced()
        except (OSError, CheckpointError) as error:  # the step counts; the next save looks again
            self._say(f"cannot look at older checkpoints: {first_line(error)}; they stay in {self._folder}")

    def _confirm(self) -> None:
        """Check that the step in flight is there, and remove what only says that it is not."""
        step = self._in_flight["step"]
        if step not in steps.complete_steps(self._folder):
            raise CheckpointError("it ended without an error, and without a checkpoint")
        steps.remove_notes(self._folder, step)
        files.sync(self._folder)

    def _remove_replaced(self) -> None:
        """Remove the steps that are neither among the last nor among the best, nor kept for good."""
        there = sorted(steps.check_steps(self._folder).valid)  # the next start sets damaged ones aside
        losses = {step: steps.read_manifest(self._folder, step)["loss"] for step in there}
        best = sorted((step for step in there if losses[step] is not None), key=losses.get)[: self._config.keep_best]
        for_good = first_of_every(there, self._config.keep_every_steps)
        for step in sorted({*there} - {*there[-self._config.keep_last :], *best, *for_good}):
            try:
                steps.remove_step(self._folder, step)
            except OSError as error:
                self._say(f"cannot remove the checkpoint of step {step}: {error.strerror}; it stays in {self._folder}")

    @contextlib.contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """Turn errors of a save into a CheckpointError that names the folder and the step, and clean up."""
        try:
            yield
        except Exception as error:
            self._in_flight = {}
            if jax.process_index() == 0:
                with contextlib.suppress(CheckpointError):  # what is there may be another run's
                    self._may_write()
                    steps.remove_unfinished(self._folder, step)
            reason = first_line(error).replace(str(self._plain.path), str(self._folder))
            raise CheckpointError(
                f"cannot save step {step} in {self._folder}: {reason}; older steps are untouched"
            ) from error


def first_of_every(ascending: Sequence[int], count: int) -> list[int]:
    """The first step at or after each multiple of `count`, which are none if it is 0. A save may have been postponed
    beyond the multiple, or the step of the multiple set aside.

    >>> first_of_every([500, 1000, 1500, 2001, 2500], 1000), first_of_every([500], 0)
    ([1000, 2001], [])
    """
    first: dict[int, int] = {}
    for step in ascending if count else ():
        first.setdefault(step // count, step)
    return [step for multiple, step in first.items() if multiple]


class LocalSaver(ocp.CheckpointManager):
    """Orbax's, which does not ask JAX in its own thread whether the run is to stop.

    The run asks for each step, and a question about an older one may make processes miss the step after which all stop.
    Orbax would also subtract times of which one has no zone, in the first save after a start.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


def array_handlers() -> ocp.CheckpointHandlerRegistry:
    """Orbax's handlers of trees of arrays, which do not cut parts of less than PART_BYTES."""
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=PART_BYTES)
    types = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    registry = ocp.DefaultCheckpointHandlerRegistry()
    registry.add(None, ocp.args.PyTreeSave, ocp.PyTreeCheckpointHandler(type_handler_registry=types))
    return registry


@functools.cache  # once in a process, since others may install hooks on top of ours
def say_errors_once() -> None:
    """Suppress what orbax and TensorStore print about a failed save, since the error is also raised.

    They log tracebacks, and one more for each write that ends after the first failure, since nothing waits for it or
    its event loop is closed by then.
    """
    before = sys.unraisablehook

    def unraisable(about: Any) -> None:
        # A late TensorStore write calls back into a closed event loop, where nothing can be raised.
        if str(about.exc_value) != "Event loop is closed":
            before(about)

    sys.unraisablehook = unraisable
    for logger in (absl.logging.get_absl_logger(), logging.getLogger("asyncio")):
        logger.addFilter(is_no_error_of_orbax)


def is_no_error_of_orbax(record: logging.LogRecord) -> bool:
    """Whether a line of the log is to be printed."""
    abandoned = record.name == "asyncio" and "orbax" in record.getMessage()
    logged = record.levelno >= logging.ERROR and "orbax" in Path(record.pathname).parts
    return not (abandoned or logged)


def check_space(folder: Path, trees: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the folder's disk has no space for one more checkpoint of these trees."""
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))
    free = files.free_bytes(folder)
    if free < needed:
        raise CheckpointError(
            f"a checkpoint has {in_bytes(needed)}, but the disk of {folder} has {in_bytes(free)} free; "
            "free some space or choose another --workdir"
        )
