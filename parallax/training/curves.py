"""Where a run's numbers go beside metrics.jsonl, as they are written there: TensorBoard, Weights & Biases."""

import contextlib
import json
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from parallax.config.settings import Settings
from parallax.runtime.errors import ConfigError, how_to_install, writing
from parallax.runtime.files import read_object, write_whole
from parallax.runtime.multihost.job import is_first
from parallax.runtime.run_files import RunFiles

WANDB_SECS = 60  # for the service to answer, when a run begins and when it ends


class Curves(Protocol):
    """Somewhere to draw a run's numbers."""

    def begin(self, step: int, say: Callable[[str], None]) -> None:
        """Make ready for numbers after `step`; `say` hears what goes wrong and does not end the run."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """The numbers of a step, and its texts; what else a step has is left out."""

    def close(self, *, failed: bool) -> None:
        """No more will come."""


def curves_of(settings: Settings, folder: RunFiles) -> list[Curves]:
    """What the settings ask for, on process 0; ConfigError where a package is missing."""
    if not is_first():
        return []
    found: list[Curves] = []
    if settings.train.tensorboard:
        found.append(TensorBoard(folder))
    if settings.train.wandb:
        found.append(Wandb(settings.train.wandb, folder, settings.to_dict()))
    return found


class TensorBoard:
    """Events in the run's folder; those that an earlier run wrote after the step it goes on from are hidden."""

    def __init__(self, folder: RunFiles):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ConfigError(
                f"train.tensorboard=True needs the package tensorboardX: {how_to_install('tensorboard')}"
            ) from None
        self._open, self._folder, self._events = SummaryWriter, folder.tensorboard, None

    def begin(self, step: int, say: Callable[[str], None]) -> None:
        self._events = self._open(str(self._folder), purge_step=step + 1)

    def write(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._events.add_scalar(name, value, step)
            if isinstance(value, str):
                self._events.add_text(name, value, step)

    def close(self, *, failed: bool) -> None:
        if self._events is not None:
            self._events.close()


class Wandb:
    """A run of Weights & Biases, the same one when the run goes on. Where the service fails, the run goes on without.

    Steps are the run's own: what is computed again after a resume is drawn at its step.
    """

    def __init__(self, project: str, folder: RunFiles, settings: dict[str, Any]):
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f"train.wandb={project!r} needs the package wandb: {how_to_install('wandb')}, or leave it empty"
            ) from None
        self._wandb, self._project, self._folder, self._settings = wandb, project, folder, settings
        self._run: Any = None
        self._say: Callable[[str], None] = print

    def begin(self, step: int, say: Callable[[str], None]) -> None:
        self._say = say
        own = self._own_id()
        with self._going_on_without():
            self._run = self._wandb.init(
                project=self._project,
                id=own,
                name=self._folder.path.resolve().name,
                dir=str(self._folder.path),
                config=self._settings,
                resume="allow",
                # The console stays ours: signals and closed pipes are handled there.
                settings=self._wandb.Settings(console="off", init_timeout=WANDB_SECS),
            )
            self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, Any]) -> None:
        if self._run is not None:
            with self._going_on_without():
                self._run.log({"step": step, **{k: v for k, v in values.items() if isinstance(v, int | float | str)}})

    def close(self, *, failed: bool) -> None:
        if self._run is None:
            return
        ending = threading.Thread(target=self._finish, args=(failed,), name="wandb", daemon=True)
        ending.start()
        ending.join(WANDB_SECS)
        if ending.is_alive():
            self._say(f"wandb has not taken all numbers within {WANDB_SECS} s; the run ends without")

    def _finish(self, failed: bool) -> None:
        with self._going_on_without():
            self._run.finish(exit_code=int(failed))

    def _own_id(self) -> str:
        """That of the project's run in this folder; a new one where there is none yet."""
        file = self._folder.wandb
        known = _read(file)
        if known.get("project") != self._project or not isinstance(known.get("id"), str):
            known = {"project": self._project, "id": uuid.uuid4().hex[:12]}
            with writing(self._folder.path):
                write_whole(file, json.dumps(known) + "\n")
        return known["id"]

    @contextlib.contextmanager
    def _going_on_without(self) -> Any:
        try:
            yield
        except Exception as error:
            self._run = None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._say(f"wandb failed, the run goes on without it: {reason}")


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except (OSError, ValueError):
        return {}
