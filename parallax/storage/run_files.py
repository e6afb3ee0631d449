"""Names of the files in a run's folder, and how to read metrics.jsonl."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallax.errors import check_local
from parallax.storage.buckets import BucketPath, is_in_bucket, path_of
from parallax.storage.files import cache_folder, lines_in, object_of

TIME = "%Y-%m-%dT%H:%M:%S%z"  # of metadata.json
GOODPUT = "goodput"  # of a start in metadata.json: when it began and ended, and seconds of its parts
# Files beside a trace: a description, and the program that ran. The name of the span around all steps in the trace.
TRACED, PROGRAM, TRACED_STEPS = "traced.json", "program.txt", "parallax traced steps"
TRACE_ENDING = ".pb"  # of the profiler's file
# In checkpoints of imported weights: the original folder's metadata that a run does not need.
RECORD = "huggingface.json"
# Beside a tokenizer: the ids at which the model ends a text, as `eos_token_id`.
GENERATION_CONFIG = "generation_config.json"

# In lines of metrics.jsonl of their own: seconds until a step's state was copied, and until it was on disk.
COPIED, ON_DISK = "perf/copied_secs", "perf/on_disk_secs"

# When a line of metrics.jsonl was written, in seconds since 1970; and seconds in which training stood still: to compile
# the step, to evaluate, until a step's state was copied to be saved, and until the last save was on disk.
WRITTEN_AT = "time"
COMPILE_SECS, EVAL_SECS = "perf/compile_secs", "perf/eval_secs"
SAVE_SECS, LAST_SAVE_SECS = "perf/save_secs", "perf/last_save_secs"

# In lines of metrics.jsonl, before the name of a source: the loss of its held-out text.
EVAL_LOSS_OF = "eval/loss/"
# The same before a position in the window, 0 or a power of two: the loss from there to below the next one.
EVAL_LOSS_FROM = "eval/loss_from/"
# Before the name of a task of lm-evaluation-harness, and that of a metric of it.
TASK_RESULT = "tasks/"
# Before the name of a mixture's source: the loss of its rows in a step.
TRAIN_LOSS_OF = "train/loss/"

# In lines of metrics.jsonl: mean seconds of a step that each process spends for itself, by part; and of the whole step.
OWN_PARTS = ("data", "host", "copy", "write")
PROCESS_STEP_SECS = "processes/step_secs"

LARGEST_STEP = 1 << 53  # beyond it, floats cannot distinguish consecutive steps


class RunFiles:
    """Paths of a run's config, metadata, metrics, log, checkpoints, data and traces.

    Raises ConfigError if `path` is a URL of something else than a bucket.
    """

    def __init__(self, path: Path | BucketPath | str):
        if not is_in_bucket(path):
            check_local("workdir", path)
        self.path = path_of(path)
        self.config = self.path / "config.json"
        self.metadata = self.path / "metadata.json"
        self.metrics = self.path / "metrics.jsonl"
        self.log = self.path / "log.txt"
        self.lock = self.path / "lock"
        self.checkpoints = self.path / "checkpoints"
        self.data = self.path / "data" if isinstance(self.path, Path) else cache_folder() / "data"  # shards are mapped
        self.tensorboard = self.path / "tensorboard"
        self.wandb = self.path / "wandb.json"
        self.profile = self.path / "profile"


def process_key(part: str) -> str:
    """The name in metrics.jsonl of what each process spends for itself in a part."""
    return f"processes/{part}_secs"


def row_of(line: str | bytes) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl; None for a line that is incomplete or invalid.

    >>> row_of('{"step": 3, "train/loss": 2.5}'), row_of('{"step": 3, "tra')
    ({'step': 3, 'train/loss': 2.5}, None)
    """
    try:
        row = object_of(line, odd_numbers=True)
    except ValueError:
        return None
    return row if type(row.get("step")) is int and abs(row["step"]) < LARGEST_STEP else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics of each step in metrics.jsonl, with the times of its save; incomplete lines are left out."""
    steps: list[dict[str, Any]] = []
    latest: dict[int, dict[str, Any]] = {}
    for row in filter(None, map(row_of, lines_in(path) if path.exists() else ())):
        if is_of_save(row) and row["step"] in latest:
            latest[row["step"]].update(row)
        else:
            latest[row["step"]] = row
            steps.append(row)
    return steps


def is_of_save(row: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl says only how long a save took."""
    return not {COPIED, ON_DISK, LAST_SAVE_SECS}.isdisjoint(row) and "train/loss" not in row


def number_of(value: Any) -> float | None:
    """A value of such a line as a float, which may be non-finite; None if it is not a number.

    >>> number_of(3), number_of("3"), number_of(True), number_of(10**400)
    (3.0, None, None, inf)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer with hundreds of digits
        return math.inf if value > 0 else -math.inf
