"""The facts of a run, as lines: what it prints before its first step, and after its last one."""

import contextlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from parallax.analysis.planned.devices import light_secs, matmul_lines, peak_flops
from parallax.analysis.traced.flops import (
    active_parameters,
    flops_in_8_bits_per_token,
    flops_per_token,
    parameters_by_component,
)
from parallax.analysis.traced.memory import Memory, memory_of_run
from parallax.config.sections import ALL_BATCHES, AUTO, ModelConfig
from parallax.config.settings import (
    FINGERPRINT_DIGITS,
    NOT_OF_A_MODEL,
    NOT_SAVED,
    OF_A_MODEL,
    Settings,
    code_of,
    default_value,
    differences,
    key_values,
)
from parallax.data import MixedReader, PackedReader, Reader
from parallax.display.progress import waiting
from parallax.display.tables import text_table
from parallax.display.units import in_bytes
from parallax.errors import ConfigError
from parallax.hardware.chips import chip
from parallax.hardware.devices import device_memory, unused_accelerators
from parallax.step.step import TrainStep
from parallax.training.build import RunComponents, eval_count


class StepCosts(NamedTuple):
    """What a run's step needs: FLOPs of the model, and bytes on each device; `peak_flops` is that of all devices
    together, None if unknown, and `peak_origin` says where it comes from. `light_secs_per_token` is the least time of
    all devices together, None if unknown."""

    flops_per_token: float
    peak_flops: float | None
    peak_origin: str
    memory: Memory
    light_secs_per_token: float | None = None


def step_costs(step: TrainStep, shape: tuple[int, int]) -> StepCosts:
    """The costs of a run's step with batches of this shape; the speed of CPUs is measured."""
    model, settings, (batch, seq) = step.model, step.model.settings, shape
    with waiting("predicting the memory"):
        needs = memory_of_run(step, global_batch=batch, seq=seq)
    flops = flops_per_token(settings.model, model.plan.declared, seq=seq)
    light = None
    with contextlib.suppress(ConfigError):  # an unknown chip, as a CPU
        known = chip(jax.devices()[0].device_kind)
        in_8_bits = flops_in_8_bits_per_token(settings.model, model.plan.declared, known)
        light = light_secs(settings.model, flops - in_8_bits, in_8_bits, known) / jax.device_count()
    return StepCosts(flops, *peak_flops(settings.model.dtype), needs, light)


def run_facts(
    components: RunComponents,
    costs_by_shape: Mapping[tuple[int, int], StepCosts],
    path: Path,
    start: int,
    source: str = "",
) -> Iterator[str]:
    """What is printed of a run in the folder `path` before its steps from `start` on; `source` is the step of another
    run from which it goes on. The costs are those of the shapes of batches that are still to come."""
    settings, model, data = components.settings, components.model, components.train_data
    (batch, seq), costs = next(iter(costs_by_shape.items()))
    yield f"run {path}" + (f", going on from {source or f'step {start}'}" if start else "")
    yield ""
    yield "what differs from configs/base.py (all settings are in the folder's config.json):"
    yield from differences(settings)
    yield from code_lines(settings)
    yield ""
    yield from mixture_lines(data, settings) if isinstance(data, MixedReader) else text_lines(data)
    if not start and settings.train.init_from and settings.data.tokenizer == AUTO:
        name, vocab = data.tokenizer.name, data.tokenizer.vocab
        yield f"the tokenizer is that of {settings.train.init_from}: {name}, {vocab:,} ids"
    yield ""
    parameters, trained = (parameters_by_component(model.plan.declared, trained=only) for only in (False, True))
    yield from size_tables(settings.model, parameters, costs.memory, sum(trained.values()))
    yield from memory_lines({shape: each.memory.peak for shape, each in costs_by_shape.items()})
    yield ""
    sizes = ", ".join(f"{axis}={size}" for axis, size in model.axis_sizes.items())
    yield f"{jax.device_count()} x {jax.devices()[0].device_kind} as {sizes}; {str(model.schedule).splitlines()[0]}"
    rate = "peak unknown" if costs.peak_flops is None else f"peak {costs.peak_flops / 1e9:,.0f} GFLOP/s"
    yield (
        f"{batch} x {seq} = {batch * seq:,} tokens a step; {costs.flops_per_token / 1e6:,.1f} MFLOP a token (model); "
        f"{rate} ({costs.peak_origin})"
    )
    if settings.model.kernel == AUTO and jax.default_backend() != "cpu":
        yield f"attention by {model.config.kernel} (model.kernel={AUTO!r})"
    with contextlib.suppress(ConfigError):  # an unknown chip
        yield from matmul_lines(settings.model, chip(jax.devices()[0].device_kind))
    if not settings.mesh.simulate:
        yield from unused_accelerators(jax.default_backend())
    wanted = settings.train.eval_batches
    for name, reader in components.eval_data.items():
        text = f"batches of {name}" if name else "batches"
        if wanted == ALL_BATCHES:
            yield f"evaluating on {text}: {reader.batches}, the whole held-out text"
        elif (count := eval_count(components, reader)) < wanted:
            yield f"evaluating on {text}: {count}, all that are held out; train.eval_batches={wanted} is more"
    if not wanted and settings.checkpoint.keep_best:
        keep = f"checkpoint.keep_best={settings.checkpoint.keep_best}"
        yield f"nothing is evaluated (train.eval_batches=0), so no checkpoint becomes one of the best ({keep})"
    if cache := jax.config.jax_compilation_cache_dir:
        yield f"compiled programs are kept in {cache} (train.compile_cache)"
    yield ""


def memory_lines(peaks: Mapping[tuple[int, int], int]) -> Iterator[str]:
    """The predicted memory of batches of later phases, and a warning about a shape that will not fit."""
    there = device_memory()
    for number, ((batch, seq), peak) in enumerate(peaks.items()):
        if number:
            yield f"batches of {batch} x {seq}, which come later, need {in_bytes(peak)} on each device"
        if there is not None and peak > there:
            yield (
                f"warning: batches of {batch} x {seq} need {in_bytes(peak)} on each device, as predicted, which has "
                f"{in_bytes(there)}; make global_batch or seq of their phase smaller, or use more devices"
            )


def text_lines(data: Reader, name: str = "") -> Iterator[str]:
    """The text of a source to train on."""
    yield (
        f"{f'{name}: ' if name else ''}{data.tokens:,} tokens to train on, {data.windows:,} windows of {data.seq}; "
        f"unigram entropy {data.manifest.token_entropy_nats:.2f} nats a token"
    )
    if data.left_out:
        yield data.left_out
    if isinstance(data, PackedReader):
        yield data.packed
    if spelled := data.manifest.spelled_tokens:
        yield f"the text spells {spelled:,} special tokens of the tokenizer, which stay text"


def mixture_lines(data: MixedReader, settings: Settings) -> Iterator[str]:
    """The text of each source, and what each phase reads of it."""
    for name, reader in data.by_name.items():
        yield from text_lines(reader, name)
    for phase in data.phases:
        if phase.first_step < settings.train.steps:
            total = sum(phase.weights.values())
            shares = ", ".join(f"{name} {float(weight / total):.1%}" for name, weight in phase.weights.items())
            name = f" ({phase.name})" if phase.name else ""
            yield f"from step {phase.first_step + 1}{name}: {phase.global_batch} x {phase.seq}, {shares}"
    if data.ended_by:
        yield f"{data.ended_by} ends the run after step {data.last_step}, as its end='stop' says"


def code_lines(settings: Settings) -> Iterator[str]:
    """What a run uses of a user's own code, a line for each key."""
    for key, code in code_of(settings).items():
        source = code.source if code.installed else f"files with SHA-256 {code.source[:FINGERPRINT_DIGITS]}…"
        yield f"{key} is code of your own: {code} ({source if code.source else 'without a file, so not compared'})"


def size_tables(model: ModelConfig, parameters: dict[str, int], needs: Memory, trained: int) -> Iterator[str]:
    """Two tables: parameters by component, with the active ones of a mixture and, if some are not, the number that is
    trained; and bytes on each device."""
    total = sum(parameters.values())
    counts = [[name, f"{count:,}", f"{count / total:.1%}"] for name, count in parameters.items()]
    counts.append(["total", f"{total:,}", ""])
    if model.has_mixtures:
        active = sum(active_parameters(model, parameters).values())
        counts.append(["active for a token", f"{active:,}", f"{active / total:.1%}"])
    if trained != total:
        counts.append(["trained", f"{trained:,}", f"{trained / total:.1%}"])
    sizes = [[name.replace("_", " "), in_bytes(size)] for name, size in needs._asdict().items()]
    yield from text_table(["", "parameters", "share"], counts, left=1)
    yield ""
    yield from text_table(["", "on each device"], [*sizes, ["total", in_bytes(needs.peak)]], left=1)


def next_commands(path: Path, settings: Settings) -> Iterator[str]:
    """Commands for a finished run, each with what it does."""
    # The environment's Python, as make sets it up, unless the shell finds it by its name.
    program = Path(sys.executable)
    python = str(program.relative_to(Path.cwd())) if program.is_relative_to(Path.cwd()) else "python"
    workdir, prompt = shlex.quote(str(path)), shlex.quote(settings.sample.prompt.partition("\n")[0] or "The ")
    code = code_of(settings)
    of_model = flags_not_saved(settings, (*OF_A_MODEL, *(key for key in code if not key.startswith(NOT_OF_A_MODEL))))
    steps, of_run = 2 * settings.train.steps, flags_not_saved(settings, (*NOT_SAVED, *code))
    yield f"write text   {python} -m parallax.generate --workdir={workdir} --prompt={prompt}{of_model}"
    yield f"see losses   {python} -m parallax.watch {workdir} --once"
    yield f"train on     {python} -m parallax.train --workdir={workdir} --config.train.steps={steps}{of_run}"


def flags_not_saved(settings: Settings, names: Sequence[str] = NOT_SAVED) -> str:
    """Flags, each after a space, for keys that the run's config.json does not decide and that have other values than
    the defaults."""
    changed = {name: value for name, value in key_values(settings.to_dict(), names) if value != default_value(name)}
    return "".join(f" --config.{name}={shlex.quote(str(value))}" for name, value in changed.items())
