"""Compute the loss, perplexity and bits per byte of a trained model on a text.

    python -m parallax.evaluate --workdir=runs/mine
    python -m parallax.evaluate --workdir=runs/mine --data=book.txt --config.mesh.tp=1

Without --data the text is the run's held-out text. The mesh is the run's; flags as --config.mesh.tp=1 change it. With
--tasks the model is judged by tasks of lm-evaluation-harness instead. Several processes of a job evaluate together, by
the flags of training.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parallax.display.progress import loading, waiting

with loading(__name__, sys.stderr):
    from parallax.cli.command import (
        FLAGS_OF_A_JOB,
        Flag,
        join_job,
        read_line_of_run,
        run_command,
        written,
        written_mesh,
    )
    from parallax.config.paths import paths_of
    from parallax.config.sections import DataConfig, fields_of_records
    from parallax.config.settings import OF_A_MODEL, OF_DATA, Settings, read_settings
    from parallax.data import Reader, open_reader, open_sources
    from parallax.data.sources import kind_of_all
    from parallax.data.tokenizer import Bytes
    from parallax.display.tables import bars, text_table
    from parallax.errors import ConfigError, DataError, tell
    from parallax.inference.run import MESH_KEYS, Run, load_trained, mesh_config, sizes_of
    from parallax.interop.harness import TaskResults, Tasks, known_tasks
    from parallax.processes import job
    from parallax.sharding.activations import BATCH_AXES
    from parallax.step.batches import own_part, put_on, saved_cache
    from parallax.step.resolve import run_tokenizer
    from parallax.step.step import make_position_step
    from parallax.storage.run_files import RunFiles
    from parallax.training.evaluation import mean_loss, mean_of

USAGE = (
    "python -m parallax.evaluate --workdir=FOLDER [--data=FILES | --tasks=NAMES] [--json] "
    "[--config.SECTION.KEY=VALUE ...]"
)
FLAGS = {
    "workdir": Flag("the folder of the run"),
    "data": Flag(
        "text, .jsonl or .parquet: a file, folder or glob; or a folder of prepared shards; default: the held-out text"
    ),
    "step": Flag("step of the checkpoint, 0 or more; default: the newest", -1),
    "json": Flag("print the result as JSON", False),
    "tasks": Flag("tasks of lm-evaluation-harness, with commas between them (extra: lm-eval)"),
    "task-folder": Flag("tasks: a folder of descriptions, .yaml, in place of the harness's own; they may name code"),
    "limit": Flag("tasks: documents of each; default: all", 0),
    **FLAGS_OF_A_JOB,
}
OF_TASKS = ("task-folder", "limit")  # do nothing without --tasks
HELD_OUT = "the run's held-out text"
CHOOSE = ", ".join(f"--config.mesh.{key}" for key in MESH_KEYS)


class Evaluation(NamedTuple):
    """The result of an evaluation. `loss` is in nats per token, over `tokens` tokens: all tokens of the text except the
    first of every document, which has no context (the BOS token, if the tokenizer adds one), and the end of every
    document; of conversations and completions what is learned. `bits_per_byte` is over all `text_bytes` of the text
    itself, and NaN where only a part of it is learned; `bytes_exact` is False if they were estimated because the
    tokenizer does not reproduce its text."""

    run: str
    step: int
    data: str
    mesh: dict[str, int]
    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    documents: int
    text_bytes: int
    bytes_exact: bool
    seq: int
    sources: dict[str, float]  # of a mixture's held-out text: the loss of each
    positions: dict[int, float]  # the loss from this position in the window to below the next one

    def to_json(self) -> str:
        """The result as JSON."""
        return as_json(self._asdict())

    def __str__(self) -> str:
        about = "" if self.bytes_exact else " (estimated)"
        documents = "1 document" if self.documents == 1 else f"{self.documents:,} documents"
        bits = "" if math.isnan(self.bits_per_byte) else f", {self.bits_per_byte:.4f} bits a byte"
        return (
            f"loss {self.loss:.4f} nats a token, perplexity {self.perplexity:.4g}{bits}"
            f"\n{self.tokens:,} tokens of {documents}, {self.text_bytes:,} bytes{about}, in windows of {self.seq:,}"
            + "".join(f"\nloss {loss:.4f} of {name}" for name, loss in self.sources.items())
            + "".join(f"\n{line}" for line in self._by_position())
        )

    def _by_position(self) -> Iterator[str]:
        """A table of the loss by position in the window."""
        lasts = [first - 1 for first in [*self.positions][1:]] + [self.seq - 1]
        names = [f"{first:,}" if first == last else f"{first:,}-{last:,}" for first, last in zip(self.positions, lasts)]
        losses = [*self.positions.values()]
        rows = [[name, f"{loss:.4f}", bar] for name, loss, bar in zip(names, losses, bars(losses))]
        yield from text_table(["position in the window", "loss", ""], rows, left=1)


def main(argv: Sequence[str]) -> int:
    """Print the result; returns the exit status. User errors are one line on stderr."""
    return job.leave(lambda: run_command(act, argv, __doc__, USAGE, FLAGS))


def act(argv: Sequence[str]) -> None:
    """Read the command line, evaluate, and print the result to stdout and everything else to stderr. Of several
    processes the first one prints."""
    with job.reporting():
        result = asked(argv)
        if job.is_first():
            print(result)


def asked(argv: Sequence[str]) -> str:
    """The result that a command line asks for, as it is printed."""
    of_data = ("data.cache",) if written(argv, "data") else OF_DATA
    line = read_line_of_run(argv, FLAGS, (*OF_A_MODEL, *of_data), from_url=["data"])
    settings = read_settings(line.config)
    mesh = mesh_config(settings.mesh, written_mesh(argv, settings.mesh))
    settings, step = dataclasses.replace(settings, mesh=mesh), line.values["step"]
    workdir, data = RunFiles(line.values["workdir"]).path, line.values["data"]
    check_task_flags(line.values)
    chosen = None if step < 0 else step
    join_job(settings, line.values)
    if line.values["tasks"]:
        given = dict(folder=line.values["task-folder"] or "", limit=line.values["limit"], step=chosen)
        results = evaluate_on(workdir, settings, line.values["tasks"], **given)
        return as_json(results.by_task) if line.values["json"] else str(results)
    result = evaluate(workdir, settings, data=data, step=chosen)
    return result.to_json() if line.values["json"] else str(result)


def as_json(content: Mapping[str, Any]) -> str:
    """JSON; non-finite numbers are null, since JSON does not have them."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(each) for key, each in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(content), indent=2)


def check_task_flags(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for flags that do not go together."""
    if values["tasks"] and values["data"]:
        raise ConfigError(f"--data={values['data']} is not read with --tasks={values['tasks']}; leave one of them out")
    without = [f"--{name}={values[name]}" for name in OF_TASKS if values[name] and not values["tasks"]]
    if without:
        raise ConfigError(f"{without[0]} does nothing without --tasks; name tasks, or leave it out")
    if values["limit"] < 0:
        raise ConfigError(f"--limit={values['limit']} is not a number of documents; use 1 or more, or leave it out")


def evaluate_on(
    workdir: Path,
    settings: Settings,
    tasks: str,
    *,
    folder: str = "",
    limit: int = 0,
    step: int | None = None,
) -> TaskResults:
    """The results of a run's step in tasks of lm-evaluation-harness; see `Tasks`. Raises as `evaluate`."""
    manager = known_tasks(tasks, folder)  # before a model is loaded
    trained = load_trained(workdir, settings, settings.mesh, step, CHOOSE)
    say_loaded(trained, tasks)
    data, of_model = settings.data, (trained.model, trained.tokenizer, trained.ends)
    chosen = Tasks(*of_model, tasks, manager, limit=limit, length=data.longest_seq, rows=data.global_batch)
    with waiting("running the tasks"):
        return chosen(trained.params)


def evaluate(workdir: Path, settings: Settings, *, data: str | None = None, step: int | None = None) -> Evaluation:
    """The loss of a run's step on `data`, or on the run's held-out text; `settings` are the run's, on any mesh.

    Raises:
        ConfigError: the mesh does not fit.
        CheckpointError: there is no such step, or it is damaged.
        DataError: the text is missing, or has nothing to predict.
    """
    tokenizer = run_tokenizer(settings, workdir)
    trained = load_trained(workdir, settings, settings.mesh, step, CHOOSE)
    with waiting("reading the text"):
        of_text = trained, settings.data, data, RunFiles(workdir), tokenizer
        readers = job.prepare_once(lambda: open_text(*of_text), "the prepared text")
    name = HELD_OUT if data is None else data
    say_loaded(trained, name)
    first = next(iter(readers.values()))
    put = put_on(trained.model.batch_sharding, first.batch_shape)
    step_of_eval = make_position_step(trained.model)
    job.set_phase("the first batch of the evaluation", compiling=True)
    with waiting("compiling the evaluation, and evaluating") as show:

        def show_and_limit(done: int, total: int) -> None:
            show(done, total)
            job.set_phase(f"batch {done} of {total} of the evaluation")

        losses = {
            source: mean_loss(step_of_eval, trained.params, reader, put, reader.batches, show_and_limit)
            for source, reader in readers.items()
        }
    mean = mean_of(losses.values())
    loss, tokens = mean.loss, mean.tokens
    if not tokens:
        raise DataError(f"{name} has no document of two tokens: there is nothing to predict; give it more text")
    sizes = [reader.text_bytes() for reader in readers.values()]
    size = sum(size for size, _ in sizes)
    in_part = any(reader.manifest.is_marked for reader in readers.values())  # is learned
    return Evaluation(
        run=str(workdir),
        step=trained.step,
        data=name,
        mesh=dict(trained.model.axis_sizes),
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=math.nan if in_part else loss * tokens / math.log(2) / size,
        tokens=tokens,
        documents=sum(reader.documents for reader in readers.values()),
        text_bytes=size,
        bytes_exact=all(exact for _, exact in sizes),
        seq=first.seq,
        sources={source: each.loss for source, each in losses.items() if source},
        positions=mean.by_position,
    )


def say_loaded(trained: Run, read: str) -> None:
    """Print which step of which run reads what."""
    if job.is_first():
        tell(f"step {trained.step} of {trained.path} on {sizes_of(trained.model)}: {read}", sys.stderr)


def open_text(
    trained: Run, config: DataConfig, data: str | None, run: RunFiles, tokenizer: str = ""
) -> dict[str, Reader]:
    """The text as windows, prepared in the run's folder if necessary; the held-out text of a mixture by source. It is
    read with `tokenizer`, which must be the run's own; by default with that of the config. Each process reads its part
    of a batch."""
    file, sizes = trained.tokenizer_file, trained.model.axis_sizes
    pieces = math.prod(sizes.get(axis, 1) for axis in (*BATCH_AXES, "pp"))
    # As many windows in a batch as in training, or the next number that divides over the mesh.
    config = dataclasses.replace(config, global_batch=-(-config.global_batch // pieces) * pieces)
    if data is not None:
        tokenizer = Bytes.name if trained.tokenizer.name == Bytes.name else str(file)
        source = kind_of_all(paths_of("--data", data), fields_of_records(config.format, config.field)[0])
        cache = "" if source == "prepared" else config.cache
        changes = config.changes_of_format(source, config.format)
        changes |= {"mixture": "", "phases": "", "where": "", "source": source, "path": data, "cache": cache}
        config = dataclasses.replace(config, **changes)
    split = "eval" if data is None else "all"
    vocab, fingerprint = trained.model.config.vocab, trained.tokenizer.fingerprint
    options = {"tokenizer": tokenizer, "fingerprint": fingerprint, "finished": saved_cache(run)}
    options |= {"folder": run.data, "vocab": vocab, "split": split}
    rows, columns = own_part(trained.model.batch_sharding, (config.global_batch, config.seq))
    options |= {"rows": rows, "columns": columns}
    readers = open_sources(config, **options) if config.mixture else {"": open_reader(config, **options)}
    reader = next(iter(readers.values()))
    if reader.tokenizer.fingerprint != fingerprint:  # a bpe whose corpus has changed since
        raise DataError(
            f"{data or HELD_OUT} is read with another tokenizer than that of step {trained.step}: data.tokenizer="
            f"{tokenizer or config.tokenizer!r} makes {reader.tokenizer.vocab} other ids; use {str(file)!r}"
        )
    return readers


if __name__ == "__main__":
    sys.exit(main(sys.argv))
