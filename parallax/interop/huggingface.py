"""Models in the folders of Hugging Face's `transformers`, into a run and out of one, tensor by tensor."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from parallax.checkpoint.arrays import PIECE_BYTES, ArrayWriter
from parallax.checkpoint.steps import shortened
from parallax.config.sections import ModelConfig
from parallax.config.settings import Settings, load_json, load_saved, read_settings
from parallax.data.tokenizer import CONFIG_NAME, FILE_NAME, Tokenizer, load
from parallax.interop.architectures import (
    FURTHER_LAYERS,
    Described,
    describe,
    differing_keys,
    same_rope,
    with_window,
    write_config,
)
from parallax.interop.folders import Arrays, Step, as_json, damaged, made_whole, make_run, open_step
from parallax.interop.names import plain_names
from parallax.interop.quantized import Weight, with_scales
from parallax.interop.rope_fields import context_of, write_rope
from parallax.interop.safetensors import Tensor, in_pieces
from parallax.interop.shards import read_shards, write_shards
from parallax.interop.special_tokens import GENERATION, as_text, special_ids, texts_beside
from parallax.interop.weights import HEAD, LAYER, TABLE, Place, places
from parallax.model.checks import check_window
from parallax.runtime.errors import CheckpointError, ConfigError, DataError, shown
from parallax.runtime.run_files import RECORD

CONFIG = "config.json"
# What users of such a folder want to find in it again: texts, and small.
BESIDE = (GENERATION, CONFIG_NAME, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
BESIDE_LIMIT_BYTES = 1 << 24
# Of a model of type qwen2 that reads with a tokenizer of its own.
NOT_QWENS = "read its tokenizer with PreTrainedTokenizerFast: transformers 5's AutoTokenizer makes Qwen's splits of it"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
# Tables of rotary angles, which follow from the config and which old files hold.
FOLLOWS = ".rotary_emb.inv_freq"


# ---- in


def from_hf(source: Path, workdir: Path, settings: Settings) -> Described:
    """Make a run folder whose step 0 has the model of a folder; `settings` are the run's, but for its model.

    Parameters are float32, as all runs have them: of bfloat16 and float16 every bit is kept.

    Raises:
        ConfigError: the model is none that is computed here, by the name of the field that says so.
        CheckpointError: the folder cannot be trusted, or has not the parameters of its config.
        DataError: its tokenizer is missing, damaged, or has more entries than the model.
    """
    if not (source / CONFIG).is_file():
        raise CheckpointError(
            f"{source} has no {CONFIG}; name a folder with {CONFIG}, {FILE_NAME} and "
            f"safetensors, as `hf download NAME --local-dir FOLDER` makes one"
        )
    content = load_json(source / CONFIG)
    described = describe(content)
    # As a config that somebody wrote, for the checks of sizes that no machine has.
    written = settings.to_dict()
    settings = read_settings(written | {"model": written["model"] | described.model})
    check_window(settings.model, settings.data.seq)
    tokenizer = load(source)
    if tokenizer.vocab > settings.model.vocab:
        raise DataError(
            f"{source / FILE_NAME} has {tokenizer.vocab} entries, but vocab_size={settings.model.vocab}; "
            "put the model's own tokenizer there"
        )
    tensors = read_shards(source)
    at = places(settings.model, interleaved=described.interleaved)
    tensors = _wanted(source, tensors, _theirs(settings.model, at), described)
    beside = {name: _text_of(source / name) for name in BESIDE if _is_small(source / name)}
    record = {"config": _without_what_is_left_out(content), "dtypes": _dtypes_to_write(content, tensors)}

    def write(arrays: Mapping[str, ArrayWriter]) -> None:
        for here in plain_names(arrays).values():
            place = at[here.name]
            row = 0
            for piece in _rows(place, tensors[_tensor_of(place, here.index)]):
                values = np.ascontiguousarray(place.take(piece), np.float32)
                arrays[here.name].write((*here.index, slice(row, row + len(values))), values)
                row += len(values)
            for zeros in _padding(here.shape, row):
                arrays[here.name].write((slice(row, row + len(zeros)),), zeros)
                row += len(zeros)

    carried = {CONFIG: as_json(settings), FILE_NAME: source / FILE_NAME, RECORD: json.dumps(record | {"files": beside})}
    carried |= {CONFIG_NAME: source / CONFIG_NAME} if (source / CONFIG_NAME).is_file() else {}
    with made_whole(workdir) as unfinished:
        make_run(unfinished, settings, tokenizer, carried, write)
    return described._replace(notes=(*described.notes, *_said_of_padding(settings.model)))


def _rows(place: Place, found: Weight) -> Iterator[np.ndarray]:
    """Rows of an array: out of the file where they lie there as they are, else out of the whole tensor."""
    limit = PIECE_BYTES // 2  # half: bfloat16 becomes float32
    if place.view is None:
        return found.pieces(limit)
    return in_pieces(place.ours(found.whole()), limit)


def _said_of_padding(model: ModelConfig) -> list[str]:
    if model.padded_vocab == model.vocab:
        return []
    multiple = f"model.vocab_multiple={model.vocab_multiple}"
    return [
        f"vocab_size={model.vocab} is padded to {model.padded_vocab} ({multiple}), that mesh.tp may divide it; the "
        "padding has no logits, and to-hf leaves it out"
    ]


def _padding(shape: tuple[int, ...], row: int) -> Iterator[np.ndarray]:
    """Zeros for the rows of an array from `row` on: those of a table that pad its vocab."""
    zeros = np.broadcast_to(np.float32(0), (shape[0] - row, *shape[1:]))
    return map(np.ascontiguousarray, in_pieces(zeros, PIECE_BYTES))


def _without_what_is_left_out(content: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json for the weights as they can be written again."""
    left_out = ("quantization_config", *FURTHER_LAYERS)
    return {key: value for key, value in content.items() if not (key in left_out and value)}


def _dtypes_to_write(content: Mapping[str, Any], tensors: Mapping[str, Weight]) -> dict[str, str]:
    """Of each tensor its own; of what was quantized the one that config.json says of the model."""
    said = content.get("torch_dtype") or content.get("dtype")
    plain = said if said in tuple(DTYPES) else "bfloat16"
    return {name: plain if weight.scales else str(weight.tensor.dtype) for name, weight in tensors.items()}


def _tensor_of(place: Place, index: tuple[int, ...]) -> str:
    return place.tensor.format(layer=index[0]) if index else place.tensor


def _theirs(model: ModelConfig, at: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """The shape of each of their tensors."""
    layers = range(model.layers)
    return {place.tensor.format(layer=layer): place.shape for place in at.values() for layer in layers}


def _wanted(
    source: Path,
    tensors: Mapping[str, tuple[Path, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    described: Described,
) -> dict[str, Weight]:
    """The tensors of the model; CheckpointError says which are missing, of no use, or not as the config has them."""
    further = tuple(
        LAYER.format(layer=described.model["layers"] + number) for number in range(described.further_layers)
    )
    tensors = {
        name: Weight(*found)
        for name, found in tensors.items()
        if not name.endswith(FOLLOWS) and not name.startswith(further)
    }
    if described.block:
        tensors = with_scales(tensors, described.block)
    if HEAD in tensors and HEAD not in shapes and TABLE in tensors and _equal(tensors[HEAD], tensors[TABLE]):
        del tensors[HEAD]  # a tied table that is there twice
    differences = [f"{name} is missing" for name in shapes if name not in tensors]
    differences += [f"{shown(name)} is of no use" for name in tensors if name not in shapes]
    for name in shapes.keys() & tensors.keys():
        tensor, scales = tensors[name].tensor, tensors[name].scales
        if tensor.shape != shapes[name]:
            differences.append(f"{name} is {list(tensor.shape)} there and {list(shapes[name])} here")
        if tensor.dtype not in DTYPES.values() and not scales:
            differences.append(f"{name} is {tensor.dtype} and none of {', '.join(DTYPES)}")
    if differences:
        raise CheckpointError(f"{source} has not the parameters of its config.json: {shortened(sorted(differences))}")
    return tensors


def _equal(one: Weight, other: Weight) -> bool:
    if one.tensor[:2] != other.tensor[:2]:
        return False
    pairs = zip(*(found.pieces(PIECE_BYTES) for found in (one, other)))
    return all(a.tobytes() == b.tobytes() for a, b in pairs)


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")  # line ends as they are
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _is_small(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size <= BESIDE_LIMIT_BYTES


# ---- out


class Target(NamedTuple):
    """What is written: a config.json, which it describes, the dtype of each tensor, and texts beside it."""

    config: dict[str, Any]
    described: Described
    dtypes: Mapping[str, np.dtype]
    files: Mapping[str, str]


class Theirs(NamedTuple):
    """A tensor of theirs, of the arrays that lie in it: name and index of each, and its place."""

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: list[tuple[str, tuple[int, ...], Place]]


def to_hf(
    workdir: Path, out: Path, *, step: int | None, like: Path | None, dtype: str | None, shard_bytes: int
) -> tuple[int, str]:
    """Write a step of a run, the newest where `step` is None, as a folder that `transformers` reads.

    What was imported is written as it came: config.json, names, dtypes, tokenizer. So is a run that was trained from an
    import, which it knows itself, or by `like`, the import's run. Any other becomes the plainest architecture that
    computes it, in float32. `dtype` overrules. Returns the step, and what was written in words.

    Raises:
        DamagedError: a parameter, its config or its tokenizer is damaged.
        CheckpointError: there is no such checkpoint, or `out` cannot be written.
        ConfigError: no architecture computes the model, or `like` is another one.
    """
    source = open_step(workdir, step)
    settings = read_settings(load_saved(source.folder / CONFIG))
    tokenizer = load(source.folder)
    record = _record_of(like, tokenizer) if like else _record(source)
    trained = like is not None or source.number > 0
    differing = _differing(record, settings.model)
    if differing and like:
        raise ConfigError(f"the model is not the one that was imported: {differing}")
    record = None if differing else record
    target = _target(settings, tokenizer, record, dtype, trained=trained)
    config = {"max_position_embeddings": target.described.context} | target.config  # which files may leave out
    files = texts_beside(config, tokenizer, _beside(source) | target.files, trained=trained)
    at = places(settings.model, interleaved=target.described.interleaved)
    with made_whole(out) as unfinished:
        arrays = Arrays(source)
        theirs: dict[str, Theirs] = {}
        for here in plain_names(arrays.stored).values():
            place = at[here.name]
            name = _tensor_of(place, here.index)
            theirs.setdefault(name, Theirs(place.shape, target.dtypes[name], []))
            theirs[name].parts.append((here.name, here.index, place))
        write_shards(unfinished, theirs, lambda name: _pieces(arrays, theirs[name]), shard_bytes=shard_bytes)
        arrays.check()
        shutil.copyfile(source.folder / FILE_NAME, unfinished / FILE_NAME)
        for name, text in {CONFIG: as_text(target.config), **files}.items():
            (unfinished / name).write_bytes(text.encode("utf-8"))
    kinds = " and ".join(sorted({str(tensor.dtype) for tensor in theirs.values()}))
    aside = f", for it is not the model that was imported: {differing}" if differing else ""
    if record is None and target.described.architecture == "Qwen2ForCausalLM" and CONFIG_NAME not in source.files:
        aside += f"; {NOT_QWENS}"
    return source.number, f"{target.described.architecture}, {kinds}{aside}"


def _beside(source: Step) -> dict[str, str]:
    """The tokenizer config of a run that knows no import, but reads with somebody's tokenizer."""
    return {CONFIG_NAME: _text_of(source.folder / CONFIG_NAME)} if CONFIG_NAME in source.files else {}


def _pieces(arrays: Arrays, tensor: Theirs) -> Iterator[np.ndarray]:
    """A tensor as it is written: in pieces where it is one array of ours, else whole."""
    (name, index, place), *more = tensor.parts
    if not more and place.view is None:
        row = 0  # all rows are read, and held to the array's fingerprint; those that pad a vocab are not written
        for piece in arrays.pieces(name, index):
            yield _narrowed(name, piece[: max(tensor.shape[0] - row, 0)], tensor.dtype)
            row += len(piece)
        return
    whole = np.empty(tensor.shape, tensor.dtype)
    for name, index, place in tensor.parts:
        ours, row = place.ours(whole), 0
        for piece in arrays.pieces(name, index):
            place.put(ours[row : row + len(piece)], _narrowed(name, piece, tensor.dtype))
            row += len(piece)
    yield whole


def _narrowed(name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Values rounded to a dtype; ConfigError where one is beyond its range: it would become infinite."""
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(dtype)
    if (np.isinf(narrow) & np.isfinite(values)).any():
        raise ConfigError(f"{name} has values beyond {dtype}'s largest; write it with --dtype=bfloat16 or float32")
    return narrow


def _record(source: Step) -> dict[str, Any] | None:
    """What an import kept of the folder that it read. A run may be anybody's, and its names are files to write."""
    if RECORD not in source.files:
        return None
    record = load_json(source.folder / RECORD)
    config, dtypes, files = (record.get(part) for part in ("config", "dtypes", "files"))
    known = all(isinstance(part, dict) for part in (config, dtypes, files))
    known = known and all(kind in tuple(DTYPES) for kind in dtypes.values())
    if not known or not all(name in BESIDE and isinstance(text, str) for name, text in files.items()):
        raise damaged(source.folder, f"its file {RECORD} is none that an import writes")
    return record


def _record_of(like: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """The record of the run that --like names; ConfigError if there is none, or not of this tokenizer."""
    source = open_step(like, None)
    record = _record(source)
    if record is None:
        raise ConfigError(f"--like={like} was not made by from-hf; name the folder of a run that was")
    if load(source.folder).fingerprint != tokenizer.fingerprint:
        raise ConfigError(f"--like={like} has another tokenizer, so that its special tokens are others; leave it out")
    return record


def _differing(record: dict[str, Any] | None, model: ModelConfig) -> str:
    """In which keys a model is not the one that was imported, in words."""
    described = describe(record["config"]) if record else None
    keys = differing_keys(described, model) if described else []
    return ", ".join(f"model.{key}={described.model[key]!r} there, {getattr(model, key)!r} here" for key in keys)


def _target(
    settings: Settings, tokenizer: Tokenizer, record: dict[str, Any] | None, dtype: str | None, *, trained: bool
) -> Target:
    model = settings.model
    if record is None:
        config = write_config(model, settings.data.seq) | special_ids(tokenizer) | {"torch_dtype": dtype or "float32"}
        names = _theirs(model, places(model, interleaved=False))
        return Target(config, describe(config), dict.fromkeys(names, DTYPES[dtype or "float32"]), {})
    config, files = record["config"], record["files"]
    described = describe(config)
    config = with_window(config, described, model)
    config = _reaching(config, described, model, settings.data.seq) if trained else config
    dtypes = {name: np.dtype(DTYPES[kind]) for name, kind in record["dtypes"].items()}
    if dtype:
        dtypes = dict.fromkeys(dtypes, DTYPES[dtype])
        config = {key: value for key, value in config.items() if key != "dtype"} | {"torch_dtype": dtype}
    return Target(config, described, dtypes, files)


def _reaching(config: dict[str, Any], described: Described, model: ModelConfig, seq: int) -> dict[str, Any]:
    """An imported config.json, stretched as the model was meanwhile, and no shorter than its windows of `seq`."""
    known = described.context
    if same_rope(described, model):
        if known >= seq or model.rope_scaling == "yarn":
            return config
    else:
        known = round(model.rope_original_seq * model.rope_factor)
    old = ("rope_parameters", "rope_scaling", "rope_theta")
    config = {key: value for key, value in config.items() if key not in old} | write_rope(model)
    return config | {"max_position_embeddings": context_of(model, max(known, seq))}
