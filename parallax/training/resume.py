"""Whether a run starts or resumes, and whether its settings still fit its checkpoints."""

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from parallax.checkpoint.arrays import beside, flatten
from parallax.checkpoint.restore import restore, restore_newest
from parallax.checkpoint.steps import (
    check_steps,
    complete_steps,
    latest_step,
    read_manifest,
    set_aside,
    unfinished_saves,
    wrong_files,
)
from parallax.config.earlier import of_today
from parallax.config.sections import WEIGHTS_DTYPES, ModelConfig, TrainConfig
from parallax.config.settings import compare_settings, difference_text
from parallax.data.tokenizer import Tokenizer, load_tokenizer
from parallax.errors import CheckpointError, ConfigError, check_choice, first_few
from parallax.model.transformer import Parts
from parallax.processes.job import barrier, is_first
from parallax.sharding.eight_bits import rounded_columns
from parallax.sharding.layout import Layout
from parallax.sharding.parameter import ParameterSpec, layouts_of, specs_of
from parallax.storage.files import PlainPath, read_bytes
from parallax.storage.run_files import GENERATION_CONFIG, RECORD, RunFiles
from parallax.training.folder import RunFolder, has_content

RESUME = ("auto", "must", "never")
# Keys with which a run would silently become another one. For the data it is the corpus, whose fingerprint covers the
# text and the order of windows; a corpus that was only moved is the same.
FIXED_SECTIONS = ("model", "corpus", "user_code")
FIXED_KEYS = ("loss.name", "optimizer.name", "optimizer.frozen", "train.seed")
FIXED_KEYS += ("optimizer.m_dtype", "optimizer.v_dtype", "optimizer.weights_dtype")  # dtypes of a checkpoint's arrays
USER_CODE = "user_code."  # of a checkpoint's settings: hashes of the code's files, by key
CORPUS, TOKENIZER = "corpus.fingerprint", "corpus.tokenizer"
CACHES = ("data.cache", "data.cache_bytes")  # which say where data is kept, not what it is
LATER_DATA = "corpus.from_step_"  # and a step: the fingerprint of the data from there on
CONTINUE_FROM = "train.continue_from"
DTYPE, MATMUL_PARTS_KEY = "model.dtype", "model.matmul_parts"
# Keys of a model that may change: how it is computed, context extension, and what a token attends to.
FREE_KEYS = ("model.dtype", "model.kernel", "model.dropout", "model.lora_dropout")  # prefixes
FREE_KEYS += ("model.sliding_window", "model.rope_")
# Keys that may change from one number over 0 to another: with 0 a model has other arrays.
FREE_OVER_0 = ("model.qk_clip",)


def step_to_resume(
    folder: RunFolder,
    settings: Mapping[str, Any],
    resume: str,
    say: Callable[[str], None],
    *,
    changed_code: bool = False,
) -> int:
    """The step to resume from; 0 starts a new run.

    Settings that define the model or its data must be the same (CheckpointError), and so must the files of a user's own
    code, except with `changed_code`; other changed settings are listed.
    """
    check_choice("--resume", resume, RESUME)
    newest = latest_step(folder.checkpoints)
    if newest is None:
        if resume == "must":
            raise CheckpointError(
                f"--resume=must, but {folder.path} has no checkpoint; use --resume=auto to start a run there"
            )
        if unfinished_saves(folder.checkpoints) or has_content(folder.metrics):
            say(f"an earlier start in {folder.path} has saved no step: this one begins again")
        return 0
    if resume == "never":
        raise CheckpointError(
            f"--resume=never, but {folder.path} holds a run at step {newest}; choose another --workdir"
        )
    if newest == 0:
        raise CheckpointError(
            f"{folder.path} holds imported weights, not a run; start one elsewhere with train.init_from={folder.path}"
        )
    changed = _changed(folder.checkpoints, newest, settings)
    if changed.get(CONTINUE_FROM, ("", ""))[1]:
        there, here = changed[CONTINUE_FROM]
        began = f"with {CONTINUE_FROM}={there!r}" if there else "with its own first step"
        raise CheckpointError(
            f"{folder.path} holds a run at step {newest}, which began {began}, not with {CONTINUE_FROM}={here!r}; "
            "choose another --workdir: its steps stay as they are"
        )
    _check_changed(changed, newest, folder.path, say, changed_code=changed_code)
    return newest


def why_not_this_run(step: int, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Why the copy of a step, saved with its own settings, is not one from which this run goes on; "" if it is."""
    if step >= (steps := settings["train"]["steps"]):
        return f"it is not before train.steps={steps}"
    changed = _changed_since(step, saved, settings)
    fixed = _fixed(changed) | {key: values for key, values in changed.items() if key == CONTINUE_FROM}
    return f"it has other settings: {difference_text(fixed)}" if fixed else ""


def step_to_continue(
    train: TrainConfig,
    settings: Mapping[str, Any],
    say: Callable[[str], None],
    *,
    changed_code: bool = False,
) -> int:
    """The step of another run from which a run without steps of its own goes on, by train.continue_from.

    Settings must fit as in `step_to_resume`. With train.other_data the data may differ, but not its tokenizer.
    """
    run, step = RunFiles(train.first_run), train.first_step
    changed = _changed(run.checkpoints, step, settings)
    changed.pop(CONTINUE_FROM, None)
    if train.other_data:
        changed = {key: values for key, values in changed.items() if not _is_of_data(key)}
    _check_changed(changed, step, run.path, say, changed_code=changed_code, may_differ=not train.other_data)
    return step


def _changed(checkpoints: Path, step: int, settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from those of a saved step."""
    return _changed_since(step, read_manifest(checkpoints, step)["settings"], settings)


def _changed_since(step: int, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    saved = of_today(saved)[0]
    changed = compare_settings(saved, settings)
    if MATMUL_PARTS_KEY in changed and _products_in_8_bits(saved) == _products_in_8_bits(settings):
        del changed[MATMUL_PARTS_KEY]  # only names of parts without 8-bit products differ
    changed = {key: values for key, values in changed.items() if not _is_of_later_data(key, step)}
    # Other code has other files, too.
    return {key: values for key, values in changed.items() if key.removeprefix(USER_CODE) not in {*changed} - {key}}


def _is_of_data(key: str) -> bool:
    """Whether it is a fingerprint of what is read, from the first step or from a later one."""
    return key == CORPUS or key.startswith(LATER_DATA)


def _is_of_later_data(key: str, step: int) -> bool:
    """Whether it is the fingerprint of data that is read after a step only: that may still become other data."""
    first = key.removeprefix(LATER_DATA)
    return first != key and first.isdecimal() and int(first) > step


def _check_changed(
    changed: Mapping[str, tuple[Any, Any]],
    step: int,
    run: Path,
    say: Callable[[str], None],
    *,
    changed_code: bool,
    may_differ: bool = False,
) -> None:
    """List settings that have changed since a step of a run; CheckpointError if it cannot go on with them. `may_differ`
    says whether train.other_data would allow other data."""
    fixed = _fixed(changed)
    if fixed and not (changed_code and all(key.startswith(USER_CODE) for key in fixed)):
        only_data = may_differ and all(map(_is_of_data, fixed))
        allowed = ", or allow other data with train.other_data=True" if only_data else ""
        raise CheckpointError(f"cannot go on from step {step} in {run} {_why_not(changed, fixed, run)}{allowed}")
    if changed:
        say(f"going on with changed settings: {difference_text(changed)}")


def _why_not(changed: Mapping[str, tuple[Any, Any]], fixed: Mapping[str, tuple[Any, Any]], run: Path) -> str:
    """Why a run cannot be resumed, and what to do: what is read comes first, since model.vocab may follow from it."""
    sections = {key.split(".")[0] for key in fixed}
    corpus = {key: values for key, values in fixed.items() if key.startswith("corpus.")}
    others = {key: values for key, values in fixed.items() if key not in corpus}
    read = {key: values for key, values in changed.items() if key.startswith("data.") and key not in CACHES}
    cause = difference_text(read) or "data.* is the same, and the text or its tokenizer is not"
    said = [*([cause] if corpus else []), *map(difference_text, filter(None, (others, corpus)))]
    advice = "set back what differs, or choose another --workdir"
    if sections == {"user_code"}:
        advice += ", or accept the files of today with --changed-code"
    elif "model" not in sections:
        advice += f"; a new run there takes these weights with train.init_from={run}"
    return f"with other settings: {', '.join(said)}; {advice}"


def _products_in_8_bits(settings: Mapping[str, Any]) -> list[str] | None:
    """Parts of layers with 8-bit products; None for settings that are refused today, or that no run has written."""
    with contextlib.suppress(ConfigError, KeyError, TypeError):
        return ModelConfig(**settings["model"]).products_in_8_bits
    return None


def load_newest(
    folder: RunFolder, wanted: Mapping[str, Any], settings: Mapping[str, Any], say: Callable[[str], None]
) -> tuple[int, dict[str, Any]]:
    """The newest intact step and its trees; damaged ones after it are named and set aside."""
    step, trees, damaged = restore_newest(folder.checkpoints, wanted, settings=settings)
    for error in damaged:
        aside = set_aside(folder.checkpoints, error.step, "damaged") if is_first() else None
        what = f"the checkpoint of step {error.step} is damaged: {error.damage}"
        say(f"{what}; set aside as {aside}, going on from step {step}, the one before it")
    barrier("damaged checkpoints are set aside")
    return step, trees


def load_step(train: TrainConfig, wanted: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The trees of the step of another run that train.continue_from names; CheckpointError if it is damaged."""
    return restore(RunFiles(train.first_run).checkpoints, train.first_step, wanted, settings=settings)


def load_params(
    source: str,
    wanted: Any,
    parts: Parts,
    settings: Mapping[str, Any],
    say: Callable[[str], None],
    initial: Mapping[str, Any] | None = None,
) -> Any:
    """The parameters of another run's newest checkpoint, with the shardings and dtypes of `wanted`, those of the model
    of `parts`; float32 is rounded to the nearest bfloat16. Maxima of steps, as scales of 8-bit products, that one of
    the two lacks are left out, or are zeros. With `initial`, parameters that the checkpoint lacks have these values:
    adapters, say. Kernels that rest in 8 bits here are rounded if they do not there.

    CheckpointError if it was trained with another tokenizer, or has adapters that this model has not.
    """
    checkpoints, wanted_arrays = RunFiles(source).checkpoints, flatten(wanted)
    manifest = read_manifest(checkpoints, latest_step(checkpoints))
    _check_adapters(manifest, settings, source)
    stored = manifest["arrays"].get("params", {})
    maxima = {name for name, spec in flatten(specs_of(parts.declared_in_8_bits())).items() if spec.is_maximum}
    specs, layouts = (flatten(of(parts.declared())) for of in (specs_of, layouts_of))
    units = {name: beside(name, spec.unit) for name, spec in specs.items() if spec.unit}
    units = {name: unit for name, unit in units.items() if name in stored and unit not in stored}  # rounded here
    left_out = {*maxima, *units.values()}
    added = [name for name in wanted_arrays if name not in {*stored, *left_out}] if initial is not None else []
    saved = _as_saved(stored, wanted_arrays, left_out={*left_out, *added})
    if not saved:
        raise CheckpointError(f"{checkpoints} has none of the parameters of this model")
    if added:
        say(f"train.init_from={source!r} has no {first_few(added)}: they begin with their initial values")
    whole = NamedSharding(next(iter(saved.values())).sharding.mesh, PartitionSpec())
    for name in maxima & stored.keys():
        about = stored[name]
        saved[name] = jax.ShapeDtypeStruct(about["shape"], jnp.dtype(about["dtype"]), sharding=whole)
    step, restored, damaged = restore_newest(checkpoints, {"params": saved}, settings=settings)
    _compare_with_source(source, step, settings, say)
    for error in damaged:
        say(f"{error}; weights are those of step {step}")
    zeros = {name: jnp.zeros(wanted_arrays[name].shape) for name in maxima & wanted_arrays.keys()}
    values = flatten(initial or {}) | zeros | restored["params"]
    for name, unit in units.items():
        shardings = wanted_arrays[name].sharding, wanted_arrays[unit].sharding
        values[name], values[unit] = in_eight_bits(specs[name], layouts[name], values[name], shardings)
    leaves = [_as_wanted(values[name], like) for name, like in wanted_arrays.items()]
    return jax.tree.unflatten(jax.tree.structure(wanted), leaves)


def _compare_with_source(source: str, step: int, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Say if the weights of a step were computed in another dtype; CheckpointError if they know another tokenizer."""
    run = RunFiles(source)
    changed = compare_settings(read_manifest(run.checkpoints, step)["settings"], settings)
    if DTYPE in changed:
        there, here = changed[DTYPE]
        say(f"train.init_from={source!r} computed in {there}, this run computes in {here} ({DTYPE})")
    both = changed.get(TOKENIZER, (None, None))
    if None in both:
        return
    if not _differ_in_the_end(load_tokenizer(run.checkpoints / str(step)), {*both}):
        raise CheckpointError(
            f"train.init_from={source!r} learned other ids: {difference_text({TOKENIZER: both})}; "
            f"use its tokenizer, data.tokenizer={str(run.path / 'tokenizer.json')!r}"
        )
    say(f"train.init_from={source!r} ended its documents with another token, as an earlier version chose it")


def _check_adapters(manifest: Mapping[str, Any], settings: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError if a step has adapters that this run would leave out, or kernels in 8 bits of another
    kind."""
    there = of_today(manifest["settings"])[0].get("model", {})
    if not there.get("lora_rank"):
        return
    keys = ["model.lora_rank", "model.lora_alpha", "model.lora_on"]
    if there["lora_base"] not in WEIGHTS_DTYPES:
        keys.append("model.lora_base")
    changed = {key: values for key, values in compare_settings({"model": there}, settings).items() if key in keys}
    if changed:
        raise CheckpointError(
            f"train.init_from={source!r} has adapters: {difference_text(changed)}; set these keys as they are there, "
            f"or name a run without them, as `python -m parallax.convert merge {source} NEW` makes one"
        )


def in_eight_bits(
    spec: ParameterSpec, layout: Layout, kernel: jax.Array, shardings: tuple[Any, Any]
) -> tuple[jax.Array, jax.Array]:
    """A kernel, which may be a stack of them, as it rests in 8 bits, and its units."""
    inputs = tuple(layout.index(name) for name in spec.inputs)
    rounded = functools.partial(rounded_columns, inputs=inputs, kind=spec.stored)
    return jax.jit(rounded, out_shardings=shardings)(kernel)


def _differ_in_the_end(tokenizer: Tokenizer, fingerprints: set[str]) -> bool:
    """Whether they are those of a tokenizer as this version and as an earlier one understand its files, which makes no
    other ids of texts."""
    earlier = tokenizer.earlier
    return earlier is not None and fingerprints == {tokenizer.fingerprint, earlier.fingerprint}


def _as_wanted(x: Any, like: Any) -> Any:
    if x.dtype == like.dtype and x.sharding == like.sharding:
        return x
    return jax.device_put(x.astype(like.dtype), like.sharding)


def _as_saved(stored: Mapping[str, Any], wanted: Mapping[str, Any], *, left_out: Collection[str]) -> dict[str, Any]:
    """Shapes of parameters by name, with the dtypes of a checkpoint if these are allowed for parameters."""
    dtypes = {name: about["dtype"] for name, about in stored.items() if about["dtype"] in WEIGHTS_DTYPES}
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtypes.get(name, leaf.dtype)), sharding=leaf.sharding)
        for name, leaf in wanted.items()
        if name not in left_out
    }


def files_of_import(folder: RunFolder, source: str) -> dict[str, bytes]:
    """What a run's checkpoints carry of the folder from which its weights were imported, by name: a record, and the ids
    at which the model ends a text.

    They are in the run's newest step, or in that of `source`, from which the run starts; there may be none.
    """
    is_new = not complete_steps(folder.checkpoints)
    checkpoints = folder.checkpoints if not (is_new and source) else RunFiles(source).checkpoints
    for step in check_steps(checkpoints).valid:
        saved_in, files = checkpoints / str(step), read_manifest(checkpoints, step)["files"]
        carried = {name: files[name] for name in (RECORD, GENERATION_CONFIG) if name in files}
        if not wrong_files(saved_in, carried, contents=True):
            return {name: read_bytes(saved_in / name) for name in carried}
    return {}


def check_source(train: TrainConfig) -> None:
    """CheckpointError if the run of train.init_from or train.continue_from has no such checkpoint; loading checks the
    checkpoint itself."""
    checkpoints = RunFiles(train.first_run).checkpoints
    if train.continue_from:
        read_manifest(checkpoints, train.first_step)
    elif not complete_steps(checkpoints):
        raise CheckpointError(
            f"train.init_from={train.init_from!r} holds no checkpoint; name the folder of a run that saved one"
        )
    PlainPath(checkpoints)  # refused now, not when the weights are loaded


def _fixed(changed: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Those of changed settings with which a run cannot be resumed."""
    allowed = {key for key in FREE_OVER_0 if all(changed.get(key, ()))}
    return {key: values for key, values in changed.items() if is_fixed(key) and key not in allowed}


def is_fixed(key: str) -> bool:
    """Whether a run cannot be resumed after this setting has changed.

    >>> [key for key in ("model.d_ff", "model.kernel", "mesh.tp", "data.path") if is_fixed(key)]
    ['model.d_ff']
    """
    return key in FIXED_KEYS or (key.split(".")[0] in FIXED_SECTIONS and not key.startswith(FREE_KEYS))
