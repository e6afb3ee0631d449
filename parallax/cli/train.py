"""Train a model, or go on with a run.

    python train.py --config=configs/quickstart.py --config.mesh.tp=4 --workdir=runs/mine
    python train.py --workdir=runs/mine --config.train.steps=400
    python -m parallax.train --config=quickstart

A run that was stopped goes on by the same command.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from parallax.display.progress import loading

STARTED = time.time()
with loading(__name__, sys.stdout):
    from parallax.cli.command import FLAGS_OF_A_JOB, Flag, join_job, read_line, read_secs, run_command, written
    from parallax.config.settings import read_settings
    from parallax.errors import ConfigError
    from parallax.processes.job import broadcast, leave, limited, reporting
    from parallax.storage.buckets import path_of
    from parallax.storage.run_files import RunFiles
    from parallax.training.folder import check_run_name
    from parallax.training.resume import RESUME
    from parallax.training.run import train

IMPORTED = time.monotonic()
RUNS = Path("runs")
# Set by launchers of jobs; the first that is there names the run.
RUN_NAME_VARIABLES = ("PARALLAX_RUN_NAME", "JOBSET_NAME")
USAGE = "python train.py --config=FILE [--config.SECTION.KEY=VALUE ...] [--workdir=FOLDER]"
FLAGS = {
    "workdir": Flag("the folder of the run; with a checkpoint in it, the run goes on from there, without --config too"),
    "run-name": Flag(f"name of a new folder in {RUNS}/, in place of --workdir"),
    "resume": Flag(
        "what a checkpoint in the folder is for: auto (go on if there is one), must, never; default: auto",
        "auto",
        RESUME,
    ),
    "changed-code": Flag("go on although files of code that the config names have changed since", False),
    "max-runtime": Flag("stop after so long, saved, as SIGTERM does: 3h, 90m or a number of seconds"),
    "stopped-status": Flag(
        "what a run that was stopped and saved ends with: 0, or 75 where what fails is started again", "0", ("0", "75")
    ),
    **FLAGS_OF_A_JOB,
}


def start_run(argv: Sequence[str]) -> int:
    """Do what the command line says; returns the exit status of a run that ends well."""
    with reporting():
        line = read_line(argv, FLAGS, config=config_of_run(argv))
        limit = line.values["max-runtime"]
        limit_secs = None if limit is None else read_secs("--max-runtime", limit) - (time.monotonic() - IMPORTED)
        workdir = choose_workdir(line.values["workdir"], line.values["run-name"])
        join_job(read_settings(line.config), line.values)
        workdir = workdir or default_workdir(line.path)
        with limited(read_settings(line.config).distributed):
            given = {name: line.values[name.replace("_", "-")] for name in ("resume", "changed_code")}
            given |= {"max_runtime_secs": limit_secs, "warnings": line.warnings, "began": STARTED}
            outcome = train(line.config, workdir, **given)
    return int(line.values["stopped-status"]) if outcome.reason == "stopped" else 0


def main(argv: Sequence[str]) -> int:
    """Start or continue a run; returns the exit status. What a user got wrong is one line on stderr."""
    if_well: list[int] = []
    failed = leave(lambda: run_command(lambda argv: if_well.append(start_run(argv)), argv, __doc__, USAGE, FLAGS))
    # The others are left as after any run that ends well: only the scheduler hears another status.
    return failed or next(iter(if_well), 0)


def config_of_run(argv: Sequence[str]) -> Path | None:
    """The config of the run in --workdir, None where there is none."""
    workdir = written(argv, "workdir")
    saved = RunFiles(workdir).config if workdir else None
    return saved if saved is not None and saved.is_file() else None


def choose_workdir(workdir: str | None, run_name: str | None) -> Path | None:
    """The run's folder: as written, or below runs/ by name or by the launcher's name; None where nobody names it."""
    if workdir and run_name:
        raise ConfigError(f"--workdir={workdir} and --run-name={run_name} both name the run's folder; give one")
    if workdir:
        return path_of(workdir)
    if run_name is None:
        run_name = next((os.environ[name] for name in RUN_NAME_VARIABLES if os.environ.get(name)), None)
    return RUNS / check_run_name(run_name) if run_name is not None else None


def default_workdir(path: str) -> Path:
    """The run's folder below runs/, by config and time; the same in all processes of a job."""
    started = broadcast("the name of the run", time.strftime("%Y%m%d-%H%M%S"))
    return RUNS / check_run_name(f"{Path(path).stem}-{started}")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
