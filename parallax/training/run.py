"""A training run from its config to its end, in the order in which it happens."""

import contextlib
import functools
import itertools
import json
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from parallax.checkpoint.local import LocalCopies, run_copies
from parallax.checkpoint.restore import Restored
from parallax.checkpoint.save import CheckpointWriter, check_space
from parallax.checkpoint.steps import tidy
from parallax.config.settings import FINGERPRINT_DIGITS, NO_CODE, code_of, read_settings
from parallax.data import MixedReader, Prefetcher
from parallax.display.progress import waiting
from parallax.errors import ConfigError, first_few, writing
from parallax.hardware.devices import simulate_devices, start_devices
from parallax.hardware.sensors import local_sensors
from parallax.inference.ends import ends_of
from parallax.inference.generate import complete, stays_text
from parallax.interop.harness import Tasks, known_tasks
from parallax.processes import job
from parallax.step.step import (
    TrainState,
    TrainStep,
    abstract_state,
    init_state,
    make_position_step,
    state_shardings,
    with_first_scales,
)
from parallax.storage.files import check_writable, names_in, write_file
from parallax.storage.run_files import EVAL_LOSS_FROM, EVAL_LOSS_OF, GOODPUT, LAST_SAVE_SECS, RunFiles
from parallax.training.build import (
    RunComponents,
    build,
    checkpoint_settings,
    encode_sample,
    eval_count,
    model_of_shape,
    put_batches,
)
from parallax.training.corruption import SilentCorruptionCheck
from parallax.training.divergence import DivergenceError, SkippedSteps
from parallax.training.evaluation import mean_loss, mean_of
from parallax.training.facts import StepCosts, next_commands, run_facts, step_costs
from parallax.training.folder import RunFolder
from parallax.training.goodput import before_first_step, goodput, starts_of
from parallax.training.logger import RunLogger, metrics_writers
from parallax.training.loop import TrainingLoop, checkpoint_trees, state_from
from parallax.training.meter import Meter, StepWork
from parallax.training.process_times import ProcessTimes
from parallax.training.profile import Profile
from parallax.training.resume import (
    load_newest,
    load_params,
    load_step,
    step_to_continue,
    step_to_resume,
    why_not_this_run,
)
from parallax.training.signals import STEPS_TO_STOP, StopRequest
from parallax.training.step_reports import StepReports, learning_rates
from parallax.training.watchdog import Watchdog

__all__ = ["DivergenceError", "Outcome", "train"]


class Outcome(NamedTuple):
    """How a call of `train` ended: "finished", "stopped" by a signal, or "nothing to do"."""

    reason: str
    step: int
    eval_loss: float | None = None


def train(
    config: Any,
    workdir: Path | str,
    *,
    resume: str = "auto",
    max_runtime_secs: float | None = None,
    warnings: Sequence[str] = (),
    code: Mapping[str, Any] = NO_CODE,
    changed_code: bool = False,
    began: float | None = None,
) -> Outcome:
    """Train with a config in the folder `workdir`, which is created, or resume the run in it.

    The config is Settings, a ConfigDict or nested dicts: see `read_settings`. `code` has classes and functions of your
    own for its keys, as {"optimizer.name": lion}; a run is resumed with other sources of them only with `changed_code`.

    Raises a ParallaxError for everything that a user can get wrong, before anything is compiled if possible. SIGTERM,
    Ctrl-C and the end of `max_runtime_secs` stop the run after the step in progress, which is saved. `warnings` about
    the config are printed and logged before the run begins. `began` is when the process did, in seconds since 1970, for
    the run's goodput; by default now.
    """
    began = time.time() if began is None else began
    settings = read_settings(config, code=code)
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
        components = build(settings, folder)
        settings = components.settings  # a mixture may end before train.steps
        wanted = checkpoint_settings(components)
        start = step_to_resume(folder, wanted, resume, logger.say, changed_code=changed_code)
        fresh = not start
        if fresh and settings.train.continue_from:
            start = step_to_continue(settings.train, wanted, logger.say, changed_code=changed_code)
        data = components.train_data.fingerprint[:FINGERPRINT_DIGITS]
        sources = {f"code of {key}": code.source[:FINGERPRINT_DIGITS] for key, code in code_of(settings).items()}
        job.check_equal("the run", {"data manifest": data, "step to go on from": start, **sources})
        if stop.signal and not job.several():
            logger.say(f"stopped by {stop.signal} before the first step")
            return Outcome("stopped", start)
        if fresh and start >= settings.train.steps:
            raise ConfigError(
                f"train.continue_from={settings.train.continue_from!r} is step {start}, and train.steps="
                f"{settings.train.steps} is not beyond it; use more steps, or an earlier step."
            )
        if start >= settings.train.steps:
            logger.say(f"nothing to do: {folder.path} is at step {start} of train.steps={settings.train.steps}")
            return Outcome("nothing to do", start)
        for warning in warnings:
            logger.say(warning)
        if fresh and settings.model.lora_rank and not settings.train.first_run:
            logger.say(
                f"warning: model.lora_rank={settings.model.lora_rank} trains adapters alone, beside weights that are "
                "random: train.init_from names the run whose weights they are for"
            )
        try:
            outcome = run_to_end(components, folder, logger, stop, start, fresh=fresh, resume=resume, began=began)
        except BaseException as error:
            folder.write_end(f"{type(error).__name__}: {error}")
            raise
        folder.write_end(outcome.reason)
        if outcome.reason == "stopped":
            # The process that asked to stop may have to report an error.
            job.barrier("the other processes to stop")
        return outcome


def run_to_end(
    components: RunComponents,
    folder: RunFolder,
    logger: RunLogger,
    stop: StopRequest,
    start: int,
    *,
    fresh: bool,
    resume: str,
    began: float,
) -> Outcome:
    """Print the run's facts, create or load its state, run its steps, and finish. A `fresh` run has no steps of its
    own: if `start` is not 0, it goes on from the step of another one. Its process `began` in seconds since 1970."""
    settings, model = components.settings, components.model
    earlier = starts_of(folder.starts())
    source = settings.train.continue_from if fresh else ""
    with contextlib.ExitStack() as stack:
        tidy_checkpoints(components, folder, logger)
        job.set_phase(f"step {start}, loading or making the first state", compiling=True)
        loading_at = time.time()
        copies = open_copies(components, folder, logger, began) if settings.checkpoint.local else None
        takes_copy = copies is not None and resume != "never"
        copied = newest_copy(components, copies, start, logger.say) if takes_copy else None
        loads = bool(start or settings.train.first_run or copied)
        if copied is not None:
            state, start, source = state_from(copied.trees), copied.step, ""
        else:
            state, start = continued(components) if source else begin(components, folder, start, logger.say)
        if copies is not None:
            stack.callback(copies.close)
            copies.begin(start, checkpoint_trees(abstract_state(components.model, components.tx)))
        restore_secs = time.time() - loading_at if loads else 0.0
        checkpoints = stack.enter_context(open_checkpoints(components, folder, logger))
        with writing(folder.path):
            folder.write_config(settings)
            about = {"continued_from": source} if source else {}
            folder.write_metadata(mesh=model.axis_sizes, start=start, began=began, **about)
            if job.is_first():
                components.train_data.tokenizer.save(folder.path)
        steps = steps_by_shape(components)
        costs = {shape: step_costs(steps[shape], shape) for shape in shapes_after(components, start)}
        logger.say("\n".join(run_facts(components, costs, folder.path, start, source)))
        start_secs = time.time() - began - restore_secs
        meter = meter_of(components, *next(iter(costs.items())))
        metrics = RunFiles(settings.train.first_run).metrics if source else None
        dropped = logger.begin(start, metrics, since=earlier[0].step if earlier else start)
        with writing(folder.path):
            folder.write_goodput(before_first_step(earlier, began, start_secs, restore_secs, logger.spent, dropped))
        put = put_batches(components)
        # Enough batches are prefetched to save the step before an unreadable one, and to inform other processes.
        reserve = STEPS_TO_STOP if job.several() else 1
        loop = TrainingLoop(
            settings=settings,
            train_step=lambda state, batch: steps[batch["tokens"].shape].take(state, batch),
            evaluate=evaluation(components),
            run_tasks=tasks_of(components),
            batches=stack.enter_context(Prefetcher(components.train_data, put, start, reserve=reserve)),
            checkpoints=checkpoints,
            copies=copies,
            logger=logger,
            reports=StepReports(
                settings=settings,
                logger=logger,
                meter=meter,
                rates=learning_rates(settings.optimizer, settings.train.steps),
                skips=SkippedSteps(settings, components.train_data, model, put, folder, logger),
                first=start + 1,
                works=works_of_phases(components, costs, start),
                sensors=local_sensors(),
                processes=ProcessTimes(
                    settings.train.slow_process_share, settings.train.slow_process_steps, logger.say
                ),
            ),
            stop=stop,
            watchdog=stack.enter_context(Watchdog(settings.train.stall_factor)),
            corruption_check=SilentCorruptionCheck(state_shardings(model, components.tx)),
            profile=stack.enter_context(Profile(settings, steps, folder, logger.say)),
        )
        job.barrier("the first step", setting="compile_secs")
        state, done = loop.run(state, start)
        job.set_phase("finishing the last save")
        waiting_at = time.monotonic()
        with waiting(f"writing the checkpoint of step {done}"):
            checkpoints.wait()
        logger.record(done, {LAST_SAVE_SECS: time.monotonic() - waiting_at})
        if done < settings.train.steps:
            cause = stop.signal or "another process"
            logger.say(f"stopped by {cause}: step {done} is saved; the same command goes on from there")
            say_goodput(folder, logger)
            return Outcome("stopped", done)
        if copies is not None:
            copies.remove()
        logger.say(f"finished: step {done} is saved in {folder.checkpoints}")
        conclude(components, state, loop.eval_loss, folder.path, logger.say)
        say_goodput(folder, logger)
        return Outcome("finished", done, loop.eval_loss)


def say_goodput(folder: RunFolder, logger: RunLogger) -> None:
    """Print what the run's time went into, since it began."""
    if (spent := goodput(starts_of(folder.starts()), logger.spent, time.time())) is not None:
        logger.say(f"goodput {spent.text()}")


def tidy_checkpoints(components: RunComponents, folder: RunFolder, logger: RunLogger) -> None:
    """Remove incomplete checkpoints, and check the free space."""
    if job.is_first():
        check_writable(folder.checkpoints)
        for line in tidy(folder.checkpoints):
            logger.say(line)
        check_space(folder.checkpoints, abstract_state(components.model, components.tx))
    job.barrier("checkpoints are in order")


def begin(
    components: RunComponents, folder: RunFolder, start: int, say: Callable[[str], None]
) -> tuple[TrainState, int]:
    """The first state and its step: a fresh one at 0, otherwise loaded from the newest intact checkpoint."""
    wanted = abstract_state(components.model, components.tx)
    if start:
        with waiting(f"restoring step {start}"):
            step, saved = load_newest(folder, checkpoint_trees(wanted), checkpoint_settings(components), say)
        return state_from(saved), step
    with waiting("compiling and making the initial state"):
        state = init_state(components.model, components.tx, components.settings.train.seed)
    params, source = state.params, components.settings.train.init_from
    if source:
        with waiting(f"restoring the weights of {source}"):
            adds = components.settings.model.has_user_code or components.settings.model.lora_rank > 0
            initial = params if adds else None
            params = load_params(
                source, wanted.params, components.model.parts, checkpoint_settings(components), say, initial
            )
    if components.settings.model.first_scales_are_measured:
        with waiting("measuring the first scales of 8-bit products"):
            batch = put_batches(components)(components.train_data.batch(0))
            params = with_first_scales(components.model, params, batch, components.settings.train.seed)
    return state._replace(params=params), 0


def continued(components: RunComponents) -> tuple[TrainState, int]:
    """The state of the step of another run that train.continue_from names, and its step."""
    train, wanted = components.settings.train, abstract_state(components.model, components.tx)
    with waiting(f"restoring {train.continue_from}"):
        restored = load_step(train, checkpoint_trees(wanted), checkpoint_settings(components))
    return state_from(restored), train.first_step


def open_copies(components: RunComponents, folder: RunFolder, logger: RunLogger, began: float) -> LocalCopies:
    """The run's copies on this host. The run's first start, perhaps this one, tells it from others of its name."""
    this_start = {"host": socket.gethostname(), GOODPUT: {"began": began}}
    first = json.loads(job.broadcast("the run's first start", json.dumps((*folder.starts(), this_start)[0])))
    local = run_copies(components.settings.checkpoint.local, folder.path.name, first)
    others = [name for name in (names_in(local.parent) if local.parent.is_dir() else []) if name != local.name]
    if others:
        logger.say(f"{local.parent} has copies of other runs, which are not used: {first_few(others)}")
    return LocalCopies(local, settings=checkpoint_settings(components), flush=logger.flush, say=logger.say_besides)


def newest_copy(
    components: RunComponents, copies: LocalCopies, start: int, say: Callable[[str], None]
) -> Restored | None:
    """The newest step of the hosts' copies that is whole and newer than `start`, that of the run's folder."""
    settings, wanted = checkpoint_settings(components), abstract_state(components.model, components.tx)
    with waiting("looking for copies on the hosts"):
        copied = copies.restore_newest(
            checkpoint_trees(wanted), after=start, why_not=lambda step, saved: why_not_this_run(step, saved, settings)
        )
    if copied is not None:
        say(f"step {copied.step} is restored from checkpoint.local; the newest step in the run's folder is {start}")
    return copied


def open_checkpoints(components: RunComponents, folder: RunFolder, logger: RunLogger) -> CheckpointWriter:
    """The run's checkpoint writer; each step also holds the config, the tokenizer, the data's manifest, and files of
    the import from which its weights came."""

    def carry(step: Path) -> None:
        folder.check_locked()  # the manifest follows
        logger.flush()
        for name, content in components.of_import.items():
            write_file(step / name, content)
        components.train_data.tokenizer.save(step)
        write_file(step / folder.config.name, json.dumps(components.settings.to_dict(), indent=2) + "\n")
        write_file(step / "data.json", json.dumps(components.train_data.about, indent=1) + "\n")

    config = components.settings.checkpoint
    return CheckpointWriter(
        folder.checkpoints,
        config,
        settings=checkpoint_settings(components),
        may_write=folder.check_locked,
        carry=carry,
        say=logger.say_besides,
        on_disk=functools.partial(logger.on_disk, limit_secs=config.deadline_secs),
    )


def conclude(
    components: RunComponents, state: TrainState, eval_loss: float | None, path: Path, say: Callable[[str], None]
) -> None:
    """Print the last evaluation loss with the unigram entropy of the corpus, write the sample, and say what to do
    next."""
    data, sample = components.train_data, components.settings.sample
    if eval_loss is not None and isinstance(data, MixedReader):
        say(f"eval loss {eval_loss:.3f} nats a token, over the held-out text of all sources")
    elif eval_loss is not None and data.manifest.is_marked:
        say(f"eval loss {eval_loss:.3f} nats a token, over what is learned of the held-out records")
    elif eval_loss is not None:
        corpus = data.manifest
        say(
            f"eval loss {eval_loss:.3f} nats a token, {eval_loss / corpus.bytes_per_token:.3f} a byte; unigram entropy "
            f"{corpus.token_entropy_nats:.3f} a token, {corpus.byte_entropy_nats:.3f} a byte"
        )
    if sample.prompt:
        job.set_phase("the sample", compiling=True)
        with waiting(f"compiling and writing a sample of {sample.tokens} tokens"):
            prompt = encode_sample(components.settings, data.tokenizer)
            ends = ends_of(data.tokenizer, components.settings.model.vocab, components.of_import)
            (text,) = complete(components.model, state.params, data.tokenizer, [prompt], sample, ends=ends)
        if spelled := stays_text(data.tokenizer, [sample.prompt], sample.special_tokens):
            say(f"note: {spelled}")
        say(f"sample of {sample.tokens} tokens:\n\n{text}")
    say("\n".join(["what to do next:", "", *next_commands(path, components.settings), ""]))


def steps_by_shape(components: RunComponents) -> dict[tuple[int, int], TrainStep]:
    """The training step for each shape of a run's batches; each is compiled when its first batch comes."""
    tx, settings = components.tx, components.settings
    models = {shape: model_of_shape(components.model, shape) for shape in settings.data.shapes}
    given = tx, settings.train.seed, settings.guard
    groups = settings.data.loss_groups
    return {shape: TrainStep(model, *given, groups=groups) for shape, model in models.items()}


def shapes_after(components: RunComponents, start: int) -> list[tuple[int, int]]:
    """The shapes of batches after the step `start`, in order, each once."""
    phases = components.settings.data.run_phases
    current = components.settings.data.phase(start)
    return [*dict.fromkeys(phase.shape for phase in phases if phase.first_step >= current.first_step)]


def works_of_phases(
    components: RunComponents, costs: Mapping[tuple[int, int], StepCosts], start: int
) -> dict[int, StepWork]:
    """What steps compute, by the first step after `start` + 1 that has another shape than the one before it."""
    phases = components.settings.data.run_phases
    changes = {
        after.first_step + 1: after.shape
        for before, after in zip(phases, phases[1:])
        if after.shape != before.shape and after.first_step > start
    }
    return {step: work_of(costs[shape], shape) for step, shape in changes.items()}


def work_of(costs: StepCosts, shape: tuple[int, int]) -> StepWork:
    """What a step with batches of this shape computes."""
    tokens = math.prod(shape)
    light_secs = None if costs.light_secs_per_token is None else costs.light_secs_per_token * tokens
    return StepWork(tokens, costs.flops_per_token * tokens, light_secs)


def meter_of(components: RunComponents, shape: tuple[int, int], costs: StepCosts) -> Meter:
    """The run's meter, whose clock begins now, with batches of this shape."""
    tokens, flops, light_secs = work_of(costs, shape)
    steps = components.settings.train.steps
    return Meter(steps, tokens, flops, costs.peak_flops, jax.device_count(), light_secs=light_secs)


def evaluation(components: RunComponents) -> Callable[[Any], dict[str, float]] | None:
    """A function that computes the mean loss over the held-out tokens of the first batches from parameters, and that by
    position in the window; with a mixture also that of each source, of which it reads as many batches."""
    if not components.eval_data:
        return None
    step, put = make_position_step(components.model), put_batches(components)
    what = itertools.chain(["compiling the evaluation, and evaluating"], itertools.repeat("evaluating"))

    def evaluate(params: Any) -> dict[str, float]:
        with waiting(next(what)) as show:

            def show_and_limit(done: int, total: int) -> None:
                show(done, total)
                if done < total:
                    job.set_phase(f"batch {done + 1} of {total} of an evaluation")

            sources = components.eval_data.items()
            losses = {
                name: mean_loss(step, params, reader, put, eval_count(components, reader), show_and_limit)
                for name, reader in sources
            }
        mean = mean_of(losses.values())
        values = {"eval/loss": mean.loss} | {
            f"{EVAL_LOSS_OF}{name}": each.loss for name, each in losses.items() if name
        }
        return values | {f"{EVAL_LOSS_FROM}{first}": loss for first, loss in mean.by_position.items()}

    return evaluate


def tasks_of(components: RunComponents) -> Callable[[Any], dict[str, float]] | None:
    """A function that computes the results of train.tasks from parameters."""
    train, data = components.settings.train, components.settings.data
    if not train.tasks:
        return None
    tokenizer = components.train_data.tokenizer
    ends = ends_of(tokenizer, components.settings.model.vocab, components.of_import)
    manager = known_tasks(train.tasks, train.tasks_folder)
    options = dict(limit=train.tasks_limit, length=data.longest_seq, rows=data.global_batch)
    tasks = Tasks(components.model, tokenizer, ends, train.tasks, manager, **options)
    return lambda params: tasks(params).by_metric
