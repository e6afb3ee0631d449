"""Repeat one step of a run with checks, from the nearest checkpoint before it.

    python -m parallax.replay --workdir=runs/mine --step=120

The folder of the run is not changed.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

from parallax.display.progress import loading, waiting

with loading(__name__, sys.stderr):
    import numpy as np

    from parallax.checkpoint.restore import restore_newest
    from parallax.checkpoint.steps import complete_steps
    from parallax.cli.command import Flag, read_line_of_run, run_command
    from parallax.config.settings import OF_A_MODEL, OF_DATA, Settings, read_settings
    from parallax.errors import CheckpointError, ConfigError
    from parallax.hardware.devices import simulate_devices
    from parallax.step.step import TrainState, abstract_state
    from parallax.storage.run_files import read_metrics
    from parallax.training.build import RunComponents, build, checkpoint_settings, model_of_shape, put_batches
    from parallax.training.divergence import make_diagnosis, text_of
    from parallax.training.folder import RunFolder
    from parallax.training.loop import checkpoint_trees, state_from
    from parallax.training.run import begin, steps_by_shape

USAGE = "python -m parallax.replay --workdir=FOLDER --step=N [--config.SECTION.KEY=VALUE ...]"
FLAGS = {
    "workdir": Flag("the folder of the run; it is not changed"),
    "step": Flag("the step to repeat, counted from 1 as in metrics.jsonl", 0),
}


def main(argv: Sequence[str]) -> int:
    """Replay the step; returns the exit status. User errors are one line on stderr."""
    return run_command(act, argv, __doc__, USAGE, FLAGS)


def act(argv: Sequence[str]) -> None:
    """Read the command line, replay the step and print the result."""
    line = read_line_of_run(
        argv, FLAGS, (*OF_A_MODEL, *OF_DATA, "train.init_from", "train.continue_from", "pipeline.schedule")
    )
    for text in replay(read_settings(line.config), RunFolder(line.values["workdir"]), line.values["step"]):
        print(text)


def replay(settings: Settings, folder: RunFolder, step: int) -> list[str]:
    """Run from the nearest checkpoint before `step` to it and measure its values; returns lines to print."""
    if not 1 <= step <= settings.train.steps:
        raise ConfigError(f"--step={step} is not a step of this run; use 1 to train.steps={settings.train.steps}")
    if settings.mesh.simulate:
        simulate_devices(settings.mesh.simulate)
    components = build(settings, folder)
    with waiting("restoring the state"):
        start, state = load_before(components, folder, step)
    print(f"replaying step {step} from {f'the checkpoint of step {start}' if start else 'initial values'}", flush=True)
    steps, put, lines = steps_by_shape(components), put_batches(components), []
    with waiting("compiling the training step, and taking steps") as show:
        for done in range(start + 1, step):
            batch = put(components.train_data.batch(done - 1))
            state, metrics = steps[batch["tokens"].shape](state, batch)
            if metrics["skipped"]:
                lines.append(f"step {done} is skipped on the way: loss {float(metrics['loss']):.4g}")
            show(done - start, step - 1 - start)
    batch, noise = put(components.train_data.batch(step - 1)), np.array([settings.train.seed, step - 1], np.int32)
    lines.append(f"step {step}: {text_of(components.train_data, step)}")
    with waiting("compiling the step with its checks, and taking it"):
        shape = batch["tokens"].shape
        lines += make_diagnosis(model_of_shape(components.model, shape))(state.params, batch, noise).lines()
        return [*lines, *compare_with_metrics(steps[shape](state, batch)[1], folder, step)]


def compare_with_metrics(metrics: dict[str, Any], folder: RunFolder, step: int) -> list[str]:
    """The step's numbers, compared with those that the run has written."""
    rows = read_metrics(folder.metrics)
    written = next((row for row in rows if row["step"] == step), None)
    if written is None:
        return ["the run has not recorded this step"]
    lines = []
    for name in ("loss", "grad_norm"):
        now = float(metrics[name])
        if f"train/{name}" not in written:  # when it was saved may be all that is there
            lines.append(f"{name} {now!r} now, not recorded in {folder.metrics.name}")
            continue
        then = written[f"train/{name}"]
        same = now == then if math.isfinite(now) else then is None
        lines.append(f"{name} {now!r} now, {then!r} in {folder.metrics.name}: {'the same' if same else 'not the same'}")
    return lines


def load_before(components: RunComponents, folder: RunFolder, step: int) -> tuple[int, TrainState]:
    """The newest intact checkpoint before this step, and its state; damaged ones are named."""
    if not any(known < step for known in complete_steps(folder.checkpoints)):
        train = components.settings.train
        if train.first_run:
            key = "continue_from" if train.continue_from else "init_from"
            raise CheckpointError(
                f"{folder.path} has no checkpoint before this step, and began from "
                f"train.{key}={getattr(train, key)!r}; replay a step after its first checkpoint"
            )
        return begin(components, folder, 0, print)[::-1]
    wanted = checkpoint_trees(abstract_state(components.model, components.tx))
    start, state, damaged = restore_newest(
        folder.checkpoints, wanted, settings=checkpoint_settings(components), before=step
    )
    for error in damaged:
        print(error)
    return start, state_from(state)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
