"""Converts a run's parameters to safetensors files and back to a new run, without a whole model in memory."""

import contextlib
import json
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallax.checkpoint.arrays import (
    PIECE_BYTES,
    ArrayReader,
    ArrayWriter,
    check_written,
    flatten,
    new_cache,
    store_manifest,
)
from parallax.checkpoint.steps import (
    DamagedError,
    complete_steps,
    files_of,
    odd_files,
    read_manifest,
    write_manifest,
    wrong_files,
)
from parallax.config.sections import BLOCKS, EMBEDDING, LossConfig, MeshConfig
from parallax.config.settings import Settings, code_of, load_saved, read_settings
from parallax.data.tokenizer import TEMPLATE_FILE, TOKENIZER_CONFIG, TOKENIZER_FILE, Tokenizer, load_tokenizer
from parallax.errors import CheckpointError, ConfigError, first_few, quoted, shown, writing
from parallax.hardware.devices import start_devices
from parallax.inference.ends import ends_of_step
from parallax.inference.run import Run
from parallax.interop.safetensors import INDEX, read_model, write_model
from parallax.sharding.mesh import make_mesh
from parallax.sharding.plan import ShardingPlan
from parallax.step.resolve import for_inference, tokenizer_of_step
from parallax.step.step import model_of
from parallax.storage import files
from parallax.storage.buckets import path_of
from parallax.storage.run_files import GENERATION_CONFIG, RECORD
from parallax.version import code_version

STACKED = f"{BLOCKS}."  # prefix of arrays with a dim for layers; the kind of layer follows if there are several
CARRIED = ("config.json", TOKENIZER_FILE)
CARRIED_IF_THERE = (TOKENIZER_CONFIG, TEMPLATE_FILE, GENERATION_CONFIG)


def export_params(workdir: Path, out: Path, *, step: int | None, shard_bytes: int) -> int:
    """Write the parameters of a run's checkpoint (`step` None: the newest) as safetensors; returns the step.

    `out` appears when it is complete, with the run's config and tokenizer.

    Raises:
        DamagedError: a parameter, its config or its tokenizer is damaged; an older step is never used instead.
        CheckpointError: there is no such checkpoint, or `out` cannot be written.
    """
    source = open_step(workdir, step)
    settings = read_settings(load_saved(source.folder / "config.json")[0])
    kinds = settings.model.layer_kinds
    with new_folder(out) as unfinished:
        params = SavedParams(source)
        plain = plain_names(params.stored, kinds)
        index = write_model(unfinished, plain, lambda name: params.pieces(*plain[name][:2]), shard_bytes=shard_bytes)
        params.check()
        for name in (*CARRIED, *CARRIED_IF_THERE):
            if name in source.files:
                files.copy_file(source.folder / name, unfinished / name)
        _write_as_today(source, settings.model.vocab, unfinished)
        files.write_whole(unfinished / INDEX, index)
    return source.number


def import_params(source: Path, workdir: Path) -> None:
    """Make a run folder whose step 0 has the parameters of `source`, which also has config.json and tokenizer.json.

    Raises:
        CheckpointError: `source` cannot be trusted, or does not have the parameters of the model in its config.
        DataError: its tokenizer is missing or damaged.
    """
    settings = read_settings(load_saved(source / "config.json")[0])
    tokenizer = load_tokenizer(source)
    tensors, wanted = read_model(source), plain_names(param_shapes(settings), settings.model.layer_kinds)
    differences = []
    for name in wanted.keys() & tensors.keys():
        there, here = (f"{np.dtype(about.dtype)}{list(about.shape)}" for about in (tensors[name], wanted[name]))
        differences += [] if there == here else [f"{name} is {there} there and {here} here"]
    check_tensors(source, tensors, wanted, differences)
    names = (*CARRIED, *(name for name in CARRIED_IF_THERE if (source / name).is_file()))

    def parts(name: str, here: TensorSource) -> list[tuple[tuple[int, ...], Iterator[np.ndarray]]]:
        return [(here.index, tensors[name].pieces(PIECE_BYTES))]

    make_run(workdir, settings, tokenizer, {name: source / name for name in names}, parts)


def check_tensors(
    source: Path,
    tensors: Mapping,
    wanted: Mapping,
    differences: list[str],
    what: str = "the parameters of its config.json",
) -> None:
    """Raise CheckpointError with these differences and with missing and unknown names."""
    differences = [
        *(f"{name} is missing" for name in wanted if name not in tensors),
        *(f"{shown(name)} is unexpected" for name in tensors if name not in wanted),
        *differences,
    ]
    if differences:
        raise CheckpointError(f"{source} does not have {what}: {first_few(sorted(differences))}")


# ---- names


class TensorSource(NamedTuple):
    """The array to which a tensor belongs: `index` is empty, or a layer's index among those of its kind; `layer` is its
    index in the model. `shape` is the tensor's."""

    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    layer: int | None = None


def plain_names(arrays: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, TensorSource]:
    """Tensors by name, layer by layer, in the order of the model, whose layers have `kinds`; `arrays` have shape and
    dtype.

    >>> from jax import ShapeDtypeStruct as Shape
    >>> arrays = {"blocks.mlp.up.kernel": Shape((2, 4, 8), "float32"), "embedding.table": Shape((9, 4), "float32")}
    >>> list(plain_names(arrays, ["dense", "dense"]))
    ['embedding.table', 'blocks.0.mlp.up.kernel', 'blocks.1.mlp.up.kernel']
    """
    single = {
        name: TensorSource(name, (), tuple(about.shape), about.dtype)
        for name, about in arrays.items()
        if _part_of(name) != BLOCKS
    }
    first = {name: source for name, source in single.items() if _part_of(name) == EMBEDDING}
    stacks = stack_names(kinds)
    of_stacks = {kind: [name for name in arrays if name.startswith(stack)] for kind, stack in stacks.items()}
    of_layers = {}
    for layer, kind in enumerate(kinds):
        index = kinds[:layer].count(kind)
        for name in of_stacks[kind]:
            source = TensorSource(name, (index,), tuple(arrays[name].shape[1:]), arrays[name].dtype, layer)
            of_layers[name.replace(stacks[kind], f"{STACKED}{layer}.", 1)] = source
    return {**first, **of_layers, **single}


def _part_of(name: str) -> str:
    """The part of the model to which an array belongs: the tree of parameters has an entry for each."""
    return name.split(".")[0]


def stack_names(kinds: Sequence[str]) -> dict[str, str]:
    """Prefixes of names of arrays with the layers of a kind, by kind.

    >>> stack_names(["dense", "moe", "moe"]), stack_names(["moe"])
    ({'dense': 'blocks.dense.', 'moe': 'blocks.moe.'}, {'moe': 'blocks.'})
    """
    names = sorted({*kinds})
    return {kind: f"{STACKED}{kind}." if len(names) > 1 else STACKED for kind in names}


# ---- from a run


class SavedStep(NamedTuple):
    """A step of a run to read; `arrays` and `files` are those of the manifest."""

    number: int
    folder: Path
    tokenizer: Tokenizer
    arrays: Mapping[str, Any]
    files: Mapping[str, Any]


def open_step(workdir: Path, step: int | None) -> SavedStep:
    """Open a step; the newest if `step` is None.

    Checksums of copied files are checked. For arrays only sizes are checked, since reading checks their fingerprints.

    Raises:
        DamagedError: its config, its tokenizer or a file's size is not as saved; an older step is never used instead.
        CheckpointError: there is no such checkpoint, or it has no parameters.
    """
    folder = workdir / "checkpoints"
    if folder.is_dir():
        files.PlainPath(folder)  # a name that cannot be read is not taken for damage
    step = max(complete_steps(folder), default=None) if step is None else step
    if step is None:
        raise CheckpointError(f"{workdir} has no checkpoint to export")
    manifest = read_manifest(folder, step)
    arrays = manifest["arrays"].get("params")
    if not arrays:
        raise CheckpointError(f"the checkpoint of step {step} in {folder} has no parameters")
    saved_in, saved = folder / str(step), files_of(manifest, ["params"])
    copied = {name: saved[name] for name in (*CARRIED, *CARRIED_IF_THERE, RECORD) if name in saved}
    wrong = (
        [f"its file {name} is missing" for name in CARRIED if name not in saved]
        or odd_files(saved_in, ["params"])
        or wrong_files(saved_in, copied, contents=True)
        or wrong_files(saved_in, saved, contents=False)
    )
    if wrong:
        raise DamagedError(folder, step, first_few(wrong))
    return SavedStep(step, saved_in, tokenizer_of_step(folder, step), arrays, saved)


def _write_as_today(source: SavedStep, vocab: int, out: Path) -> None:
    """Write what a step of an earlier version says elsewhere: the end of a document in its manifest, the ends of a
    text in its record of an import."""
    if load_tokenizer(out).fingerprint != source.tokenizer.fingerprint:
        source.tokenizer.save(out)
    end, *others = ends_of_step(source.tokenizer, vocab, source.folder)
    if others and GENERATION_CONFIG not in source.files:
        files.write_file(out / GENERATION_CONFIG, json_text({"eos_token_id": [*others, end]}))


def damaged(step: SavedStep, reason: str) -> DamagedError:
    return DamagedError(step.folder.parent, step.number, reason)


class SavedParams:
    """The parameters of a step, each read once, piece by piece, in order; `check` compares their fingerprints."""

    def __init__(self, step: SavedStep):
        self._step = step
        try:
            cache, folder = new_cache(), step.folder / "params"
            self.stored = {name: ArrayReader(folder, name, about, cache) for name, about in step.arrays.items()}
        except (ValueError, OSError) as error:
            raise damaged(step, str(error).splitlines()[0]) from error

    def pieces(self, name: str, index: tuple[int, ...]) -> Iterator[np.ndarray]:
        """Consecutive pieces of rows of an array, or of one of its layers."""
        try:
            yield from self.stored[name].pieces(index)
        except ValueError as error:  # tensorstore raises it for any problem with its files
            raise damaged(self._step, f"params {name} cannot be read") from error

    def check(self, names: Collection[str] | None = None) -> None:
        """Raise DamagedError unless these arrays, by default all, were read and are as saved."""
        arrays = [(name, about) for name, about in self._step.arrays.items() if names is None or name in names]
        wrong = [f"params {name}" for name, about in arrays if self.stored[name].running.value != about["fingerprint"]]
        if wrong:
            raise damaged(self._step, f"{first_few(wrong)} not as saved")


# ---- to a run


def make_run(
    workdir: Path,
    settings: Settings,
    tokenizer: Tokenizer,
    carried: Mapping[str, Path | str],
    parts: Callable[[str, TensorSource], Iterable[tuple[tuple[int, ...], Iterable[np.ndarray]]]],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Make a run at step 0 in a new folder. `parts` returns, for each tensor of `plain_names`, in order, the index of
    rows in its array and pieces of them; `check` is called after the last.

    `carried` are files to copy, or their texts, by name. All except RECORD are also written beside the checkpoints.

    Raises:
        CheckpointError: a parameter has values that are not finite.
    """
    with new_folder(workdir) as unfinished:
        step = unfinished / "checkpoints" / "0"
        files.make_folder(step / "params")
        plan = plan_of(settings)
        stacked = {name: row.spec.stacked(row.at_rest) or 1 for name, row in flatten(plan.rows).items()}
        context = new_cache()
        arrays = {
            name: ArrayWriter(step / "params", name, about, context, stacked=stacked[name])
            for name, about in flatten(plan.shapes).items()
        }
        for name, here in plain_names(arrays, settings.model.layer_kinds).items():
            for index, pieces in parts(name, here):
                arrays[here.name].write(index, _finite(name, pieces))
        store_manifest(step / "params", context)
        check()
        for name, content in carried.items():
            for folder in (step,) if name == RECORD else (step, unfinished):
                if isinstance(content, str):
                    files.write_file(folder / name, content)
                else:
                    files.copy_file(content, folder / name)
        corpus, code = {"tokenizer": tokenizer.fingerprint}, {"parallax": code_version()}
        about = {**settings.to_dict(), "corpus": corpus, "code": code}
        described = {"params": {name: array.described() for name, array in arrays.items()}}
        check_written(step, described)
        write_manifest(step, {"step": 0, "loss": None, "settings": about, "arrays": described})


def _finite(name: str, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The pieces of a parameter; CheckpointError if one has NaN or an infinity, with which every loss would be NaN."""
    for piece in pieces:
        if len(odd := piece[~np.isfinite(piece)]):
            raise CheckpointError(f"{name} has values that are not finite, first {odd[0]}; fetch or export it again")
        yield piece


def json_text(content: Mapping[str, Any]) -> str:
    """The JSON text of an object, as in config.json and the files beside it."""
    return json.dumps(content, indent=2) + "\n"


def param_shapes(settings: Settings) -> dict[str, Any]:
    """Shapes and dtypes of the model's parameters by name."""
    return flatten(plan_of(settings).shapes)


def plan_of(settings: Settings) -> ShardingPlan:
    """The plan of the model's parameters on one device: their shapes, dtypes, and what they are. Neither a loss nor a
    sharding policy decides them.

    Raises ConfigError for a model with code of a user's own, which only the user can import.
    """
    if codes := [f"{key}={quoted(code)}" for key, code in code_of(settings).items() if key.startswith("model.")]:
        raise ConfigError(
            f"{' and '.join(codes)}: a conversion imports no code, so it does not know these parameters; "
            "px.load(run, code=...) reads them, and `export` copies them as they are."
        )
    settings = read_settings(settings, loss={"name": LossConfig.name})
    mesh = make_mesh(MeshConfig(pp=1, dp=1, tp=1, simulate=0), start_devices()[:1])
    return model_of(for_inference(settings), mesh).plan


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when it is complete, and is removed after an error. In a bucket it
    has its name from the start, and counts with the object that is written last."""
    if folder.exists() and (not folder.is_dir() or files.names_in(folder)):
        raise CheckpointError(f"{folder} exists already; choose another name, or remove it")
    whole = folder.resolve()
    unfinished = whole.with_name(f"{whole.name}.unfinished-{uuid.uuid4().hex}") if files.is_local(whole) else whole
    files.check_writable(unfinished)
    try:
        with writing(folder, "free some space, or choose another folder"):
            yield unfinished
            if unfinished != whole:
                unfinished.replace(whole)
    except BaseException:
        files.remove_what_can_be(unfinished)
        raise


def save_run(workdir: Path | str, run: Run, params: Any) -> None:
    """Make a run in a new folder whose step 0 has these parameters, as those of a training loop of your own; settings
    and tokenizer are those of `run`. By one process, which has all of the parameters.

    Raises:
        CheckpointError: the folder is there already, or a parameter is not finite.
    """
    arrays, wanted = flatten(params), param_shapes(run.settings)
    odd = {*arrays} ^ {*wanted} or {name for name in wanted if arrays[name].shape != wanted[name].shape}
    if odd:
        raise CheckpointError(
            f"params are not those of the run's model: {first_few(sorted(odd))}; give all, as they are"
        )

    def parts(name: str, here: TensorSource) -> list[tuple[tuple[int, ...], list[np.ndarray]]]:
        return [(here.index, [np.asarray(arrays[here.name][here.index])])]

    beside = run.tokenizer_file.parent
    carried = {name: beside / name for name in (TOKENIZER_FILE, *CARRIED_IF_THERE) if (beside / name).is_file()}
    carried["config.json"] = json_text(run.settings.to_dict())
    make_run(path_of(workdir), run.settings, run.tokenizer, carried, parts)
