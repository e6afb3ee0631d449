"""Traces some steps with JAX's profiler; each process writes its own trace."""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from parallax.config.settings import Settings
from parallax.display.progress import waiting
from parallax.errors import CheckpointError, first_line, writing
from parallax.processes.job import set_phase
from parallax.step.step import TrainStep
from parallax.storage import files
from parallax.storage.run_files import PROGRAM, TRACE_ENDING, TRACED, TRACED_STEPS, RunFiles


class Profile(contextlib.AbstractContextManager):
    """Traces the steps of `train.profile_steps`. Use it as a context: leaving it ends a trace.

    The devices are idle when a trace begins and when it ends, so that it holds exactly these whole steps. Beside it are
    the program of the devices, which describes its operations, and the mesh.
    """

    def __init__(
        self,
        settings: Settings,
        steps_by_shape: Mapping[tuple[int, int], TrainStep],
        folder: RunFiles,
        say: Callable[[str], None] = print,
    ):
        self._settings, self._steps_by_shape, self._folder, self._say = settings, steps_by_shape, folder, say
        self._steps = settings.train.profiled
        self._open: contextlib.ExitStack | None = None
        self._here: files.FolderHere | None = None  # of the trace that is open

    def __exit__(self, *_) -> None:
        # A full disk must not hide another error; the next write reports it.
        with contextlib.suppress(CheckpointError):
            self.end()

    def begins_after(self, done: int) -> bool:
        """Whether the step after `done` is the first one to trace, or the first of those that are left."""
        return self._open is None and done + 1 in self._steps

    def ends_after(self, done: int) -> bool:
        """Whether `done` is the last one to trace."""
        return self._open is not None and done == self._steps[-1]

    def around(self, step: int) -> contextlib.AbstractContextManager:
        """A context for the dispatch of a step."""
        return jax.profiler.StepTraceAnnotation("train", step_num=step) if self._open else contextlib.nullcontext()

    def begin(self, done: int, state: Any) -> None:
        """Start to trace, with idle devices, if it is time; `state` is that after the steps done."""
        if not self.begins_after(done):
            return
        # The step's text needs another compilation, which may take longer than the limit for a step.
        set_phase(f"the trace from step {done + 1}", compiling=True)
        jax.block_until_ready(state)
        name = f"steps-{done + 1}-{self._steps[-1]}"
        folder = self._folder.profile / name / f"process-{jax.process_index()}"
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's own calls are numerous and would slow the host down
        with writing(self._folder.path):
            files.remove_what_can_be(folder)  # traces of an earlier start from this step on
            self._here = files.FolderHere(folder)
            files.make_folder(self._here.path)
            self._write_about(self._here.path, self._settings.data.phase(done).shape)
        try:
            jax.profiler.start_trace(self._here.path, profiler_options=options)
        except RuntimeError as error:
            self._steps = range(0)
            self._say(f"steps are not traced: {first_line(error)}")
            return
        self._open = contextlib.ExitStack()
        self._open.callback(jax.profiler.stop_trace)
        self._open.enter_context(jax.profiler.TraceAnnotation(TRACED_STEPS))

    def end(self, state: Any = None) -> None:
        """End the trace, if there is one, when `state`, that after the last step, is ready."""
        if self._open is None:
            return
        jax.block_until_ready(state)
        opened, self._open, self._steps = self._open, None, range(0)
        try:
            opened.close()
            self._here.store(last=TRACE_ENDING)
        except (RuntimeError, OSError) as error:
            self._say(f"the trace is not written: {first_line(error)}")
            return
        self._say(f"a trace is in {self._folder.profile}: python -m parallax.report --trace={self._folder.path}")

    def _write_about(self, folder: Path, shape: tuple[int, int]) -> None:
        step = self._steps_by_shape[shape]
        mesh = step.model.mesh
        with waiting("compiling the step again, for the names in its trace"):
            text = step.lower(*shape).compile().as_text()
        files.write_file(folder / PROGRAM, text)
        about = {
            "run": self._folder.path.resolve().name,
            "mesh": dict(mesh.shape),
            "devices": [device.id for device in mesh.devices.flat],
            "local": [device.id for device in jax.local_devices()],  # a process's trace numbers its own devices from 0
            "kind": mesh.devices.flat[0].device_kind,
        }
        files.write_file(folder / TRACED, json.dumps(about, indent=1) + "\n")
