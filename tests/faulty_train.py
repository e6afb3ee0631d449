"""train.py, in which one process of a job has a fault: faulty_train.py FAULT RANK STEP, then arguments as of train.py.

RANK is a number, or "any" for all of them. FAULT is what happens when the process of that rank reads the batch of that
step ("raise", "raise-data", "sleep", "die"), or
that batch of an evaluation ("raise-eval"), is to take the step ("skip": it goes on without), begins to save it
("die-saving") or starts ("die-starting"), is late, by STEP seconds, to connect with the others or to load
("late-connecting", "late-loading"), is slow, by STEP milliseconds, to read each batch, on the host in each step or to
end each save ("slow-data", "slow-host", "slow-saving"), does not end the save of that step before it has taken three
more ("hold-saving"), or says when it has connected ("say-connected"); or how it differs from the others
from the start: another "config", other "code", other "data", another "clock", a folder that is "unshared"; or, as
"JAX_ENABLE_X64=1", a variable of its environment.
"""

import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
if "=" in "".join(sys.argv[1:2]) and sys.argv[2] == os.environ["PARALLAX_PROCESS_ID"]:
    os.environ |= dict([sys.argv[1].split("=", 1)])  # before JAX is imported, which reads it

from parallax.checkpoint import steps
from parallax.checkpoint.save import CheckpointWriter
from parallax.cli import command, train
from parallax.data import Reader
from parallax.errors import DataError
from parallax.processes import job
from parallax.step.step import TrainStep
from parallax.training import run
from parallax.training.loop import TrainingLoop


def raise_error() -> None:
    raise RuntimeError("a fault that was put here")


def raise_data_error() -> None:
    raise DataError("a fault that was put here")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {"raise": raise_error, "raise-data": raise_data_error, "sleep": lambda: time.sleep(600), "die": die}


def main() -> int:
    fault, rank, step, *arguments = sys.argv[1:]
    if "=" not in fault and rank in (os.environ.get("PARALLAX_PROCESS_ID"), "any"):
        if fault == "config":
            arguments.append("--config.optimizer.learning_rate=0.5")
        elif fault == "code":
            mock.patch.object(command, "code_version", lambda: "an edited checkout").start()  # which must be there
        elif fault == "clock":
            right = time.time
            time.time = lambda: right() + 3600
        elif fault == "die-starting":
            die()
        elif fault.startswith("late-"):
            be_late(*((job, "connect_devices") if fault == "late-connecting" else (run, "begin")), int(step))
        elif fault == "slow-saving":
            be_late(steps, "write_manifest", int(step) / 1000)
        elif fault == "hold-saving":
            hold_saving(int(step))
        elif fault.startswith("slow-"):
            be_slow(*((Reader, "batch") if fault == "slow-data" else (TrainingLoop, "due")), int(step) / 1000)
        elif fault == "say-connected":
            connect_devices = job.connect_devices
            job.connect_devices = lambda mesh: connect_devices(mesh) or print("all groups are connected", flush=True)
        elif fault == "die-saving":
            die_saving(int(step))
        elif fault == "skip":
            skip(int(step))
        elif fault == "data":
            Reader.fingerprint = property(lambda self: "other data")
        elif fault == "unshared":
            shared = train.train
            train.train = lambda config, workdir, **how: shared(config, f"{workdir}-of-another-host", **how)
        elif fault == "raise-eval":
            break_at(int(step), raise_data_error, split="eval")
        else:
            break_at(int(step), FAULTS[fault])
    return train.main(["train.py", *arguments])


def be_late(module: Any, name: str, secs: float) -> None:
    act = getattr(module, name)
    setattr(module, name, lambda *args: time.sleep(secs) or act(*args))


def be_slow(owner: type, name: str, secs: float) -> None:
    act = getattr(owner, name)
    setattr(owner, name, lambda *args: time.sleep(secs) or act(*args))


def die_saving(step: int) -> None:
    save = CheckpointWriter.save

    def faulty(self, at, parts, **how):
        save(self, at, parts, **how)
        if at == step:
            die()

    CheckpointWriter.save = faulty


def hold_saving(step: int) -> None:
    """If steps do not go on meanwhile, the save fails."""
    due, write_manifest, gone_on = TrainingLoop.due, steps.write_manifest, threading.Event()

    def noticed(self, done):
        if done >= step + 3:
            gone_on.set()
        return due(self, done)

    def held(folder, content, *args):
        if content["step"] == step and not gone_on.wait(timeout=100):
            raise RuntimeError("no step while the save was held")
        write_manifest(folder, content, *args)

    TrainingLoop.due, steps.write_manifest = noticed, held


def skip(step: int) -> None:
    take, latest = TrainStep.take, []

    def faulty(self, state, batch):
        if len(latest) == step - 1:
            latest.append(latest[-1])
            return state, latest[-1]
        after, metrics = take(self, state, batch)
        latest.append(metrics)
        return after, metrics

    TrainStep.take = faulty


def break_at(step: int, act, split: str = "train") -> None:
    batch = Reader.batch

    def faulty(self, at):
        if self.split == split and at == step:
            act()
        return batch(self, at)

    Reader.batch = faulty


if __name__ == "__main__":
    sys.exit(main())
