"""A training run from its config to its end, in the order in which it happens."""

import contextlib
import dataclasses
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from parallax.analysis.devices import check_fits, matmul_lines, peak_flops
from parallax.analysis.flops import active_parameters, flops_per_token, parameters_by_component
from parallax.analysis.memory import Memory, memory
from parallax.analysis.render import text_table
from parallax.checkpoint.save import CheckpointWriter, check_space
from parallax.checkpoint.steps import complete_steps, tidy
from parallax.config.sections import AUTO, ModelConfig
from parallax.config.settings import Settings, differences, read_settings
from parallax.data import Prefetcher, Reader
from parallax.data.tokenizer import Tokenizer
from parallax.data.vocabulary import VOCAB_MULTIPLE, with_vocab, with_vocab_of_source
from parallax.inference.ends import ends_in
from parallax.inference.generate import check_length, complete, encode, stays_text
from parallax.model.products import COMPUTE
from parallax.pipeline import ShardedModel
from parallax.runtime.chips import chip
from parallax.runtime.compile_cache import use_compile_cache
from parallax.runtime.devices import simulate_devices, start_devices, unused_accelerators
from parallax.runtime.errors import ConfigError, writing
from parallax.runtime.files import check_writable, write_file
from parallax.runtime.multihost import job
from parallax.runtime.progress import waiting
from parallax.runtime.run_files import ENDS
from parallax.runtime.units import in_bytes
from parallax.runtime.version import code_versions
from parallax.sharding.mesh import make_mesh
from parallax.training.batches import open_split, own_part, put_on
from parallax.training.corruption import SilentCorruptionCheck
from parallax.training.divergence import DivergenceError, SkippedSteps
from parallax.training.evaluation import mean_loss
from parallax.training.folder import RunFolder
from parallax.training.logger import RunLogger, metrics_writers
from parallax.training.loop import LearningRates, TrainingLoop, checkpoint_parts, state_from
from parallax.training.meter import Meter
from parallax.training.profile import Profile
from parallax.training.resume import check_source, files_of_import, load_newest, load_params, step_to_resume
from parallax.training.signals import STEPS_TO_STOP, StopRequest
from parallax.training.step import (
    TrainState,
    abstract_state,
    init_state,
    make_eval_step,
    make_train_step,
    model_and_optimizer,
    state_shardings,
    with_first_scales,
)
from parallax.training.watchdog import Watchdog

__all__ = ["DivergenceError", "Outcome", "train"]


class Outcome(NamedTuple):
    """How a call of `train` ended: "finished", "stopped" by a signal, or "nothing to do"."""

    reason: str
    step: int
    eval_loss: float | None = None


class RunComponents(NamedTuple):
    """The components of a run, built from a valid config."""

    settings: Settings
    model: ShardedModel
    tx: optax.GradientTransformation
    train_data: Reader
    eval_data: Reader | None
    of_import: dict[str, bytes]  # files of the import from which its weights came, by name


def train(
    config: Any,
    workdir: Path | str,
    *,
    resume: str = "auto",
    max_runtime_secs: float | None = None,
    warnings: Sequence[str] = (),
) -> Outcome:
    """Train with a config in the folder `workdir`, which is created, or resume the run in it.

    The config is Settings, a ConfigDict or nested dicts: see `read_settings`.

    Raises a ParallaxError for everything that a user can get wrong, before anything is compiled if possible. SIGTERM,
    Ctrl-C and the end of `max_runtime_secs` stop the run after the step in progress, which is saved. `warnings` about
    the config are printed and logged before the run begins.
    """
    settings = read_settings(config)
    if settings.mesh.simulate and not job.several():
        simulate_devices(settings.mesh.simulate)
    with waiting("starting the devices"):
        start_devices()
    folder = RunFolder(workdir)
    with (
        StopRequest(max_runtime_secs) as stop,
        folder.locked(),
        RunLogger(folder, metrics_writers(settings, folder)) as logger,
    ):
        job.log_to(logger.say_last)

        def interrupted(why: str) -> None:
            logger.say_last(why)
            folder.write_end("interrupted")

        stop.last_words = interrupted
        job.check_shared(folder.path)
        parts = build(settings, folder)
        start = step_to_resume(folder, checkpoint_settings(parts), resume, logger.say)
        job.check_equal("the run", {"data manifest": parts.train_data.fingerprint, "step to go on from": start})
        if stop.signal and not job.several():
            logger.say(f"stopped by {stop.signal} before the first step")
            return Outcome("stopped", start)
        if start >= settings.train.steps:
            logger.say(f"nothing to do: {folder.path} is at step {start} of train.steps={settings.train.steps}")
            return Outcome("nothing to do", start)
        for warning in warnings:
            logger.say(warning)
        try:
            outcome = run_to_end(parts, folder, logger, stop, start)
        except BaseException as error:
            folder.write_end(f"{type(error).__name__}: {error}")
            raise
        folder.write_end(outcome.reason)
        if outcome.reason == "stopped":
            # The process that asked to stop may have to report an error.
            job.wait_for_all("the other processes to stop")
        return outcome


def build(settings: Settings, folder: RunFolder) -> RunComponents:
    """Mesh, data, model and optimizer; all checks between sections happen here."""
    mesh = make_mesh(settings.mesh)
    use_compile_cache(settings.train.compile_cache)
    job.connect(mesh)
    if settings.train.init_from and not complete_steps(folder.checkpoints):
        check_source(settings.train.init_from)
    settings = with_vocab_of_source(settings, folder.path)
    # Preparing data may take hours, so everything else is checked first. This vocab divides over any axis.
    model_and_optimizer(with_vocab(settings, VOCAB_MULTIPLE * mesh.size * settings.model.vocab_multiple), mesh)
    with waiting("preparing the data"):
        train_data = job.prepare_once(lambda: open_split(settings, folder, "train"), "the prepared data")
    job.set_phase("planning the run", compiling=True)
    settings = with_vocab(settings, train_data.tokenizer.vocab)
    with waiting("planning the run"):
        model, tx = model_and_optimizer(settings, mesh)
        check_fits(abstract_state(model, tx))
    if settings.sample.prompt:  # report a prompt that cannot be read or is too long now, not at the end
        check_length(settings.model, [encode_sample(settings, train_data.tokenizer)], settings.sample)
    shape = (settings.data.global_batch, settings.data.seq)
    rows, columns = own_part(model.batch_sharding, shape)
    if (len(rows), len(columns)) != shape:
        train_data = open_split(settings, folder, "train", rows, columns)
    eval_data = None
    if settings.train.eval_batches:
        eval_data = open_split(settings, folder, "eval", rows, columns)
        if not eval_data.batches:
            raise ConfigError(
                f"train.eval_batches={settings.train.eval_batches}, but data.eval_fraction="
                f"{settings.data.eval_fraction} holds out no text; use a larger share, or train.eval_batches=0"
            )
    of_import = files_of_import(folder, settings.train.init_from)
    return RunComponents(settings, model, tx, train_data, eval_data, of_import)


def run_to_end(parts: RunComponents, folder: RunFolder, logger: RunLogger, stop: StopRequest, start: int) -> Outcome:
    """Print the run's facts, create or load its state, run its steps, and finish."""
    settings, model = parts.settings, parts.model
    with contextlib.ExitStack() as stack:
        tidy_checkpoints(parts, folder, logger)
        job.set_phase(f"step {start}, loading or making the first state", compiling=True)
        state, start = begin(parts, folder, start, logger.say)
        checkpoints = stack.enter_context(open_checkpoints(parts, folder, logger))
        with writing(folder.path):
            folder.write_config(settings)
            folder.write_metadata(mesh=model.axis_sizes, start=start)
            if job.is_first():
                parts.train_data.tokenizer.save(folder.path)
        meter = introduce(parts, folder, logger, start)
        logger.begin(start)
        train_step = make_train_step(model, parts.tx, settings.train.seed, settings.guard)
        # Enough batches are prefetched to save the step before an unreadable one, and to inform other processes.
        reserve = STEPS_TO_STOP if job.several() else 1
        loop = TrainingLoop(
            settings,
            train_step.take,
            evaluation(parts),
            stack.enter_context(Prefetcher(parts.train_data, put_batches(parts), start, reserve=reserve)),
            checkpoints,
            logger,
            meter,
            stop,
            stack.enter_context(Watchdog(settings.train.stall_factor)),
            LearningRates(settings.optimizer, settings.train.steps),
            SkippedSteps(settings, parts.train_data, model, put_batches(parts), folder, logger),
            SilentCorruptionCheck(state_shardings(model, parts.tx)),
            stack.enter_context(Profile(settings, train_step, folder, logger.say)),
        )
        job.wait_for_all("the first step", setting="compile_secs")
        state, done = loop.run(state, start)
        job.set_phase("finishing the last save")
        with waiting(f"writing the checkpoint of step {done}"):
            checkpoints.wait()
        if done < settings.train.steps:
            cause = stop.signal or "another process"
            logger.say(f"stopped by {cause}: step {done} is saved; the same command goes on from there")
            return Outcome("stopped", done)
        logger.say(f"finished: step {done} is saved in {folder.checkpoints}")
        conclude(parts, state, loop.eval_loss, folder.path, logger.say)
        return Outcome("finished", done, loop.eval_loss)


def tidy_checkpoints(parts: RunComponents, folder: RunFolder, logger: RunLogger) -> None:
    """Remove incomplete checkpoints, and check the free space."""
    if job.is_first():
        check_writable(folder.checkpoints)
        for line in tidy(folder.checkpoints):
            logger.say(line)
        check_space(folder.checkpoints, abstract_state(parts.model, parts.tx))
    job.wait_for_all("checkpoints are in order")


def begin(parts: RunComponents, folder: RunFolder, start: int, say: Callable[[str], None]) -> tuple[TrainState, int]:
    """The first state and its step: a fresh one at 0, otherwise loaded from the newest intact checkpoint."""
    wanted = abstract_state(parts.model, parts.tx)
    if start:
        with waiting(f"restoring step {start}"):
            step, found = load_newest(folder, checkpoint_parts(wanted), checkpoint_settings(parts), say)
        return state_from(found), step
    with waiting("compiling and making the initial state"):
        state = init_state(parts.model, parts.tx, parts.settings.train.seed)
    params, source = state.params, parts.settings.train.init_from
    if source:
        with waiting(f"restoring the weights of {source}"):
            params = load_params(source, wanted.params, parts.model.parts, checkpoint_settings(parts), say)
    if parts.settings.model.matmul != COMPUTE:
        with waiting("measuring the first scales of 8-bit products"):
            batch = put_batches(parts)(parts.train_data.batch(0))
            params = with_first_scales(parts.model, params, batch, parts.settings.train.seed)
    return state._replace(params=params), 0


def open_checkpoints(parts: RunComponents, folder: RunFolder, logger: RunLogger) -> CheckpointWriter:
    """The run's checkpoint writer; each step also holds the config, the tokenizer, the data's manifest, and files of
    the import from which its weights came."""

    def carry(at: Path) -> None:
        for name, content in parts.of_import.items():
            write_file(at / name, content)
        parts.train_data.tokenizer.save(at)
        write_file(at / folder.config.name, json.dumps(parts.settings.to_dict(), indent=2) + "\n")
        write_file(at / "data.json", json.dumps(dataclasses.asdict(parts.train_data.manifest), indent=1) + "\n")

    config = parts.settings.checkpoint
    return CheckpointWriter(
        folder.checkpoints,
        config,
        settings=checkpoint_settings(parts),
        carry=carry,
        say=logger.say_besides,
        on_disk=logger.on_disk,
    )


def conclude(
    parts: RunComponents, state: TrainState, eval_loss: float | None, path: Path, say: Callable[[str], None]
) -> None:
    """Print the last evaluation loss with the unigram entropy of the corpus, write the sample, and say what to do
    next."""
    data, sample = parts.train_data, parts.settings.sample
    if eval_loss is not None:
        corpus = data.manifest
        say(
            f"eval loss {eval_loss:.3f} nats a token, {eval_loss / corpus.bytes_per_token:.3f} a byte; unigram entropy "
            f"{corpus.token_entropy_nats:.3f} a token, {corpus.byte_entropy_nats:.3f} a byte"
        )
    if sample.prompt:
        job.set_phase("the sample", compiling=True)
        with waiting(f"compiling and writing a sample of {sample.tokens} tokens"):
            prompt = encode_sample(parts.settings, data.tokenizer)
            ends = ends_in(data.tokenizer, parts.settings.model.vocab, parts.of_import.get(ENDS))
            (text,) = complete(parts.model, state.params, data.tokenizer, [prompt], sample, ends=ends)
        if spelled := stays_text(data.tokenizer, [sample.prompt], sample.special_tokens):
            say(f"note: {spelled}")
        say(f"sample of {sample.tokens} tokens:\n\n{text}")
    say("\n".join(["what to do next:", "", *next_commands(path, parts.settings), ""]))


def next_commands(path: Path, settings: Settings) -> Iterator[str]:
    """Commands for a finished run, each with what it does."""
    # The environment's Python, as make sets it up, unless the shell finds it by its name.
    own = Path(sys.executable)
    python = str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else "python"
    workdir, prompt = shlex.quote(str(path)), shlex.quote(settings.sample.prompt.partition("\n")[0] or "The ")
    yield f"write text   {python} -m parallax.generate --workdir={workdir} --prompt={prompt}"
    yield f"see losses   {python} -m parallax.watch {workdir} --once"
    yield f"train on     {python} train.py --workdir={workdir} --config.train.steps={2 * settings.train.steps}"


def encode_sample(settings: Settings, tokenizer: Tokenizer) -> np.ndarray:
    """Ids of the prompt of the run's sample."""
    how = {"special_tokens": settings.sample.special_tokens, "name": "sample.prompt"}
    return encode(tokenizer, settings.sample.prompt, **how)


def introduce(parts: RunComponents, folder: RunFolder, logger: RunLogger, start: int) -> Meter:
    """Log the facts of the run; returns its meter."""
    settings, model, data = parts.settings, parts.model, parts.train_data
    batch, seq = settings.data.global_batch, settings.data.seq
    with waiting("predicting the memory"):
        needs = memory(model, abstract_state(model, parts.tx).opt_state, global_batch=batch, seq=seq)
    flops = flops_per_token(settings.model, model.plan.declared, seq=seq)
    parameters, trained = (parameters_by_component(model.plan.declared, trained=only) for only in (False, True))
    peak, origin = peak_flops(settings.model.dtype)
    rate = "peak unknown" if peak is None else f"peak {peak / 1e9:,.0f} GFLOP/s"
    lines = [
        f"run {folder.path}" + (f", going on from step {start}" if start else ""),
        "",
        "what differs from configs/base.py (all settings are in the folder's config.json):",
        *differences(settings),
        "",
        f"{data.tokens:,} tokens to train on, {data.windows:,} windows of {seq}; unigram entropy "
        f"{data.manifest.token_entropy_nats:.2f} nats a token",
    ]
    if not start and settings.train.init_from and settings.data.tokenizer == AUTO:
        name, vocab = data.tokenizer.name, data.tokenizer.vocab
        lines.append(f"the tokenizer is that of {settings.train.init_from}: {name}, {vocab:,} ids")
    lines += [
        "",
        *size_tables(settings.model, parameters, needs, sum(trained.values())),
        "",
        f"{jax.device_count()} x {jax.devices()[0].device_kind} as "
        + ", ".join(f"{axis}={size}" for axis, size in model.axis_sizes.items())
        + f"; {str(model.schedule).splitlines()[0]}",
        f"{batch} x {seq} = {batch * seq:,} tokens a step; {flops / 1e6:,.1f} MFLOP a token (model); {rate} ({origin})",
    ]
    if settings.model.kernel == AUTO and jax.default_backend() != "cpu":
        lines.append(f"attention by {model.model.kernel} (model.kernel={AUTO!r})")
    with contextlib.suppress(ConfigError):  # an unknown chip
        lines += matmul_lines(settings.model, chip(jax.devices()[0].device_kind))
    if not settings.mesh.simulate:
        lines += unused_accelerators(jax.default_backend())
    wanted = settings.train.eval_batches
    if wanted and eval_count(parts) < wanted:
        lines.append(
            f"evaluating on batches: {eval_count(parts)}, all that are held out; train.eval_batches={wanted} is more"
        )
    if not wanted and settings.checkpoint.keep_best:
        keep = f"checkpoint.keep_best={settings.checkpoint.keep_best}"
        lines.append(f"nothing is evaluated (train.eval_batches=0), so no checkpoint becomes one of the best ({keep})")
    if cache := jax.config.jax_compilation_cache_dir:
        lines.append(f"compiled programs are kept in {cache} (train.compile_cache)")
    logger.say("\n".join([*lines, ""]))
    return Meter(settings.train.steps, batch * seq, flops * batch * seq, peak, jax.device_count())


def size_tables(
    model: ModelConfig, parameters: dict[str, int], needs: Memory, trained: int | None = None
) -> Iterator[str]:
    """Two tables: parameters by component, with the active ones of a mixture and, if some are not, the number that is
    trained; and bytes on each device."""
    total = sum(parameters.values())
    counts = [[name, f"{count:,}", f"{count / total:.1%}"] for name, count in parameters.items()]
    counts.append(["total", f"{total:,}", ""])
    if "moe" in model.kinds:
        active = sum(active_parameters(model, parameters).values())
        counts.append(["active for a token", f"{active:,}", f"{active / total:.1%}"])
    if trained not in (None, total):
        counts.append(["trained", f"{trained:,}", f"{trained / total:.1%}"])
    sizes = [[name.replace("_", " "), in_bytes(size)] for name, size in needs._asdict().items()]
    yield from text_table(["", "parameters", "share"], counts, left=1)
    yield ""
    yield from text_table(["", "on each device"], [*sizes, ["total", in_bytes(needs.peak)]], left=1)


def evaluation(parts: RunComponents) -> Callable[[Any], float] | None:
    """A function that computes the mean loss over the held-out tokens of the first batches from parameters."""
    if parts.eval_data is None:
        return None
    step, put = make_eval_step(parts.model), put_batches(parts)
    what = itertools.chain(["compiling the evaluation, and evaluating"], itertools.repeat("evaluating"))

    def evaluate(params: Any) -> float:
        with waiting(next(what)) as show:

            def show_and_limit(done: int, total: int) -> None:
                show(done, total)
                if done < total:
                    job.set_phase(f"batch {done + 1} of {total} of an evaluation")

            return mean_loss(step, params, parts.eval_data, put, eval_count(parts), show_and_limit)[0]

    return evaluate


def eval_count(parts: RunComponents) -> int:
    """Number of batches in an evaluation, at most those that hold every window once."""
    return min(parts.settings.train.eval_batches, parts.eval_data.batches)


def checkpoint_settings(parts: RunComponents) -> dict[str, Any]:
    """The settings of a checkpoint, with the fingerprints of its data and the versions of the code."""
    corpus = {"fingerprint": parts.train_data.fingerprint, "tokenizer": parts.train_data.tokenizer.fingerprint}
    return {**parts.settings.to_dict(), "corpus": corpus, "code": code_versions()}


def put_batches(parts: RunComponents) -> Callable[[dict[str, np.ndarray]], dict[str, jax.Array]]:
    """A function that sends this run's batches to its devices."""
    return put_on(parts.model.batch_sharding, (parts.settings.data.global_batch, parts.settings.data.seq))
